"""The conformance suite: a storage under test, the class of a check, and the function that runs all checks.

A check raises `AssertionError` if the storage breaks a promise, `unittest.SkipTest` if it can't be tested, and
the storage's error if it is full or does not respond. It works in a new folder below `txn/`, with names as a
store has them but never one that a store uses, and deletes what it created if that is permitted. It uses two
clients, since many faults show only between clients.

A check can find a fault, but not prove that there is none, so races are repeated many times.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from tstore.core.storage.base import Storage
from tstore.core.storage.connect import connect
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Durability
from tstore.core.storage.remote import RemoteStorage
from tstore.errors import Denied, StorageFull, TStoreError, Unavailable

__all__ = ["CHECKS", "Check", "Finding", "Scratch", "Subject", "for_each", "heartbeat", "promise", "run_checks"]

_CONCURRENCY = 32

Outcome = Literal["holds", "fails", "skipped", "unknown"]
"""The outcome is "unknown" if the storage was full or did not respond; then repeat the check."""


class Relay(Protocol):
    """A relay between a server and its clients, which loses the next request or response on demand."""

    bytes_to_clients: int
    """The number of bytes that the server has sent to clients so far."""

    def losing(self, loss: Literal["request", "response"]) -> contextlib.AbstractContextManager[None]:
        """Lose the next request, or the next response, within the block."""


class Subject:
    """A storage under test, and how to connect to it."""

    def __init__(
        self,
        connect: Callable[[], Storage],
        *,
        url: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        relay: Relay | None = None,
    ) -> None:
        """Take a function that returns a new client of the storage at each call.

        With a `url` and `storage_options` for `tstore.open`, races between processes are tested too. With a relay
        between the server and all clients, lost responses are tested too.
        """
        self.connect = connect
        self.url = url
        self.storage_options = dict(storage_options or {})
        self.relay = relay

    @classmethod
    def from_url(
        cls, url: str, storage_options: Mapping[str, Any] | None = None, relay: Relay | None = None
    ) -> Subject:
        """Return the subject at a URL; storage in this process's memory is tested without other processes."""
        options = storage_options
        shared_url = None if isinstance(connect(url, options), MemoryStorage) else url
        return cls(lambda: connect(url, options), url=shared_url, storage_options=options, relay=relay)


class Scratch:
    """A new folder of the subject, with two clients of it."""

    def __init__(self, subject: Subject, clients: Sequence[Storage]) -> None:
        self.subject = subject
        self.folder = f"txn/{secrets.token_hex(16)}"
        self.one, self.other = clients

    def key(self, name: object) -> str:
        """Return a key in the folder. It names a pack, because packs may contain any bytes."""
        return f"{self.folder}/pack-{name}"


CheckBody = Callable[[Scratch], Awaitable[None]]


class Check:
    """One promise, and its test."""

    def __init__(self, name: str, promise: str, body: CheckBody, needs: str) -> None:
        self.name = name
        self.promise = promise
        self._body = body
        self._needs = needs

    async def __call__(self, subject: Subject) -> None:
        """Raise `AssertionError` if the promise is broken, `unittest.SkipTest` if it can't be tested.

        `StorageFull` and `Unavailable` are raised unchanged, because they do not show that a promise is broken.
        """
        async with _scratch(subject) as scratch:
            try:
                await scratch.one.size(scratch.key("none"))  # the first response reveals a server's capabilities
                if self._needs and not getattr(scratch.one.capabilities, self._needs):
                    raise unittest.SkipTest(f"the storage does not claim {self._needs}")
                await self._body(scratch)
            except (AssertionError, unittest.SkipTest, StorageFull, Unavailable):
                raise
            except TStoreError as error:
                if isinstance(error, Denied) and await _is_read_only(scratch):
                    raise unittest.SkipTest(f"nothing can be created here: {error}") from error
                raise AssertionError(f"{type(error).__name__}: {error}") from error
            finally:
                await _clean(scratch)

    def __repr__(self) -> str:
        return self.name


CHECKS: list[Check] = []
"""All checks, the quick ones first."""


def promise(text: str, needs: str = "") -> Callable[[CheckBody], CheckBody]:
    """Add the decorated function to the checks, as the test of a promise.

    `needs` names the capability without which the promise does not apply.
    """

    def add(body: CheckBody) -> CheckBody:
        CHECKS.append(Check(getattr(body, "__name__", ""), text, body, needs))
        return body

    return add


class Finding(NamedTuple):
    """The result of a check."""

    check: str
    promise: str
    outcome: Outcome
    detail: str
    seconds: float


async def run_checks(
    subject: Subject, checks: Iterable[Check] | None = None, progress: Callable[[str], None] = lambda name: None
) -> list[Finding]:
    """Run the checks (by default all) sequentially; call `progress` with each name before the check."""
    findings = []
    for check in CHECKS if checks is None else checks:
        progress(check.name)
        started = time.monotonic()
        outcome: Outcome = "holds"
        detail = ""
        try:
            await check(subject)
        except unittest.SkipTest as reason:
            outcome, detail = "skipped", str(reason)
        except AssertionError as fault:
            outcome, detail = "fails", str(fault)
        except (StorageFull, Unavailable) as error:
            outcome, detail = "unknown", str(error)
        findings.append(Finding(check.name, check.promise, outcome, detail, time.monotonic() - started))
    return findings


def heartbeat(number: int) -> bytes:
    """Return a heartbeat of a host; a server may accept nothing else under the keys `alive-…`."""
    return b'{"name": "probe", "time": %d}' % number


async def for_each(call: Callable[[str], Awaitable[object]], keys: Iterable[str]) -> None:
    """Await the call for every key, with bounded concurrency."""
    remaining = iter(keys)

    async def work() -> None:
        for key in remaining:
            await call(key)

    await asyncio.gather(*[work() for _ in range(_CONCURRENCY)])


@contextlib.asynccontextmanager
async def _scratch(subject: Subject) -> AsyncIterator[Scratch]:
    clients = [_client(subject.connect()) for _ in range(2)]
    try:
        yield Scratch(subject, clients)
    finally:
        for client in clients:
            await client.close()


def _client(storage: Storage) -> Storage:
    """Wrap a storage behind a network in `RemoteStorage`, as a store does, but without retries and limits."""
    native_io = storage.capabilities.native_io
    return storage if native_io or isinstance(storage, RemoteStorage) else RemoteStorage(storage)


async def _is_read_only(scratch: Scratch) -> bool:
    """Return whether even a heartbeat, which needs the weakest permission to write, can't be created."""
    try:
        await scratch.one.create(f"{scratch.folder}/alive-trial", heartbeat(0), Durability.NONE)
    except Denied:
        return True
    return False


async def _clean(scratch: Scratch) -> None:
    """Delete what the check has created, as far as that is permitted."""
    if not scratch.one.capabilities.listing:
        return
    with contextlib.suppress(TStoreError):
        if scratch.one.capabilities.native_io:
            for client in (scratch.one, scratch.other):
                await client.close()  # a network file system keeps a deleted file in its folder while it is open
        keys = await scratch.one.list(f"{scratch.folder}/")
        await for_each(scratch.one.delete, keys)
        folders = {key.rpartition("/")[0] for key in keys} | {scratch.folder, "txn"}
        for folder in sorted(folders, key=len, reverse=True):
            await scratch.one.delete(folder)
