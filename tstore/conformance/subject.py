"""A place that is judged by the conformance suite, and the form of a check.

A check works in a folder of its own below `txn/`, under names that a store's layout has, so that it harms no store
that lies there, and it removes what it made. It has two clients, since much that is wrong shows only in the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from tstore.conformance.relay import Relay
from tstore.errors import Denied, StorageFull, TStoreError, Unavailable
from tstore.storage.base import Backend, Durability
from tstore.storage.connect import connect
from tstore.storage.memory import MemoryBackend
from tstore.storage.objects import Objects
from tstore.storage.remote import RemoteBackend

__all__ = ["Check", "Place", "Subject", "Work", "heartbeat", "many"]

_AT_ONCE = 32


class Subject:
    """A place that is judged, and how to get there."""

    def __init__(
        self,
        connect: Callable[[], Backend | Objects],
        *,
        url: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        relay: Relay | None = None,
    ) -> None:
        """Takes what makes one more client of the place.

        With `url` and `storage_options`, under which `tstore.open` finds it, processes race too; with a relay
        through which all of its clients reach the server, replies are lost.
        """
        self.connect = connect
        self.url = url
        self.storage_options = dict(storage_options or {})
        self.relay = relay

    @classmethod
    def of(cls, url: str, storage_options: Mapping[str, Any] | None = None, relay: Relay | None = None) -> Subject:
        """The place under a URL; one in memory is this process's alone, so other processes do not race for it."""
        given = storage_options
        shared = None if isinstance(connect(url, given), MemoryBackend) else url
        return cls(lambda: connect(url, given), url=shared, storage_options=given, relay=relay)


class Place:
    """A new folder of the subject, with two clients of it."""

    def __init__(self, subject: Subject, clients: Sequence[Backend]) -> None:
        self.subject = subject
        self.folder = f"txn/{secrets.token_hex(16)}"
        self.one, self.other = clients

    def key(self, name: object) -> str:
        """A key in the folder, of the kind under which any bytes may stand."""
        return f"{self.folder}/pack-{name}"

    @property
    def objects(self) -> Objects:
        """The first client's objects; the check is skipped where it has none."""
        if not isinstance(self.one, RemoteBackend):
            raise unittest.SkipTest("this backend is no server of objects")
        return self.one.objects


Work = Callable[[Place], Awaitable[None]]


class Check:
    """One promise, and how it is put to the test."""

    def __init__(self, name: str, promise: str, work: Work, needs: str) -> None:
        self.name = name
        self.promise = promise
        self._work = work
        self._needs = needs

    async def __call__(self, subject: Subject) -> None:
        """Raises AssertionError where the promise is broken, `unittest.SkipTest` where that can't be told.

        `StorageFull` and `Unavailable` break no promise, and are raised as they are.
        """
        async with _place(subject) as place:
            try:
                await place.one.size(place.key("none"))  # a server's capabilities are known from its first answer
                if self._needs and not getattr(place.one.capabilities, self._needs):
                    raise unittest.SkipTest(f"the backend does not claim {self._needs}")
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
    clients = [_backend(subject.connect()) for _ in range(2)]
    try:
        yield Place(subject, clients)
    finally:
        for client in clients:
            await client.close()


def _backend(made: Backend | Objects) -> Backend:
    return RemoteBackend(cast(Objects, made)) if hasattr(made, "put") else made


async def _closed(place: Place) -> bool:
    """Whether nothing at all can be created, also not what whoever may write may create."""
    try:
        await place.one.create(f"{place.folder}/alive-trial", heartbeat(0), Durability.NONE)
    except Denied:
        return True
    return False


def heartbeat(number: int) -> bytes:
    """What a host renews while it is at work; a server may take nothing else under `alive-…`."""
    return b'{"name": "probe", "time": %d}' % number


async def _clean(place: Place) -> None:
    """Removes what the check has made, as far as that is permitted."""
    if not place.one.capabilities.listing:
        return
    with contextlib.suppress(TStoreError):
        if not isinstance(place.one, RemoteBackend):
            for client in (place.one, place.other):
                await client.close()  # some file systems keep what is still open
        keys = await place.one.list(f"{place.folder}/")
        await many(place.one.delete, keys)
        folders = {key.rpartition("/")[0] for key in keys} | {place.folder, "txn"}
        for folder in sorted(folders, key=len, reverse=True):
            await place.one.delete(folder)


async def many(call: Callable[[str], Awaitable[object]], keys: Iterable[str]) -> None:
    """Awaits the call for every key, some at a time."""
    left = iter(keys)

    async def work() -> None:
        for key in left:
            await call(key)

    await asyncio.gather(*[work() for _ in range(_AT_ONCE)])
