"""A storage under test, and the form of a check.

A check works in a new folder below `txn/`, under names of a store's layout, so that it harms no store at that URL,
and deletes what it created. It has two clients, since many faults show only in the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from tstore.conformance.relay import Relay
from tstore.errors import Denied, StorageFull, TStoreError, Unavailable
from tstore.storage.base import Storage
from tstore.storage.connect import connect
from tstore.storage.memory import MemoryStorage
from tstore.storage.objects import Durability
from tstore.storage.remote import Remote

__all__ = ["Check", "Place", "Subject", "Work", "heartbeat", "many"]

_AT_ONCE = 32


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
        """Take a function that returns one more client of the storage at each call.

        With a `url` and `storage_options` for `tstore.open`, processes race too; with a relay between the server
        and all clients, responses are lost.
        """
        self.connect = connect
        self.url = url
        self.storage_options = dict(storage_options or {})
        self.relay = relay

    @classmethod
    def of(cls, url: str, storage_options: Mapping[str, Any] | None = None, relay: Relay | None = None) -> Subject:
        """Return the storage at a URL; other processes do not race for one in the memory of this process."""
        options = storage_options
        shared = None if isinstance(connect(url, options), MemoryStorage) else url
        return cls(lambda: connect(url, options), url=shared, storage_options=options, relay=relay)


class Place:
    """A new folder of the subject, with two clients of it."""

    def __init__(self, subject: Subject, clients: Sequence[Storage]) -> None:
        self.subject = subject
        self.folder = f"txn/{secrets.token_hex(16)}"
        self.one, self.other = clients

    def key(self, name: object) -> str:
        """Return a key in the folder, of the kind whose objects may have any bytes."""
        return f"{self.folder}/pack-{name}"


Work = Callable[[Place], Awaitable[None]]


class Check:
    """One promise, and its test."""

    def __init__(self, name: str, promise: str, work: Work, needs: str) -> None:
        self.name = name
        self.promise = promise
        self._work = work
        self._needs = needs

    async def __call__(self, subject: Subject) -> None:
        """Raise AssertionError if the promise is broken, `unittest.SkipTest` if it can't be tested.

        `StorageFull` and `Unavailable` break no promise, and are raised unchanged.
        """
        async with _place(subject) as place:
            try:
                await place.one.size(
                    place.key("none")
                )  # a server's capabilities are known from its first response
                if self._needs and not getattr(place.one.capabilities, self._needs):
                    raise unittest.SkipTest(f"the storage does not claim {self._needs}")
                await self._work(place)
            except (AssertionError, unittest.SkipTest, StorageFull, Unavailable):
                raise
            except TStoreError as error:
                if isinstance(error, Denied) and await _closed(place):
                    raise unittest.SkipTest(f"nothing can be created here: {error}") from error
                raise AssertionError(f"{type(error).__name__}: {error}") from error
            finally:
                await _clean(place)

    def __repr__(self) -> str:
        return self.name


@contextlib.asynccontextmanager
async def _place(subject: Subject) -> AsyncIterator[Place]:
    clients = [_client(subject.connect()) for _ in range(2)]
    try:
        yield Place(subject, clients)
    finally:
        for client in clients:
            await client.close()


def _client(storage: Storage) -> Storage:
    """Return the storage as stores use it, but without retries."""
    return storage if storage.capabilities.in_place or isinstance(storage, Remote) else Remote(storage)


async def _closed(place: Place) -> bool:
    """Return whether nothing can be created, not even with the weakest permission to write."""
    try:
        await place.one.create(f"{place.folder}/alive-trial", heartbeat(0), Durability.NONE)
    except Denied:
        return True
    return False


def heartbeat(number: int) -> bytes:
    """Return a heartbeat of a host; a server may accept nothing else at `alive-…`."""
    return b'{"name": "probe", "time": %d}' % number


async def _clean(place: Place) -> None:
    """Delete what the check has created, as far as that is permitted."""
    if not place.one.capabilities.listing:
        return
    with contextlib.suppress(TStoreError):
        if place.one.capabilities.in_place:
            for client in (place.one, place.other):
                await client.close()  # some file systems keep files that are open
        keys = await place.one.list(f"{place.folder}/")
        await many(place.one.delete, keys)
        folders = {key.rpartition("/")[0] for key in keys} | {place.folder, "txn"}
        for folder in sorted(folders, key=len, reverse=True):
            await place.one.delete(folder)


async def many(call: Callable[[str], Awaitable[object]], keys: Iterable[str]) -> None:
    """Await the call for every key, some at a time."""
    left = iter(keys)

    async def work() -> None:
        for key in left:
            await call(key)

    await asyncio.gather(*[work() for _ in range(_AT_ONCE)])
