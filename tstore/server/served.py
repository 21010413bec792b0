"""The objects behind a server: what it reads from, creates in, lists and removes from a backend of any kind.

A pack is received whole (`spool`) before it goes on to the storage, at the pace of that: so a few turns suffice
for any number of clients, and no slow one takes them from others. `ServedFolder` (`folder`) does better with local
files.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import os
from collections.abc import AsyncIterator, Hashable
from io import FileIO
from typing import NamedTuple, Protocol

import xxhash

from tstore.errors import NotFound
from tstore.runtime.pool import run
from tstore.server.limits import LIMITS, UPLOADS
from tstore.server.listings import Pages
from tstore.server.names import Kind
from tstore.server.shares import Shares
from tstore.server.spool import Spool
from tstore.storage.base import Backend, Buffers, Durability, PackReader
from tstore.storage.objects import Entry, Page, PutMode

__all__ = ["SMALL", "Found", "Incoming", "Served"]

SMALL = 1 << 20
"""Bytes of the longest object that is read whole before any of it is sent."""


class Found(NamedTuple):
    """An object that is open for reading."""

    size: int
    etag: str | None
    """Changes with every change of the bytes, and never without one; None where nothing does."""
    age: float | None
    modified: float | None
    source: bytes | FileIO | PackReader
    """A file can be sent by the system itself."""

    async def piece(self, offset: int, size: int) -> bytes:
        """Some of its bytes, which it has."""
        source = self.source
        if isinstance(source, bytes):
            return source[offset : offset + size]
        if isinstance(source, FileIO):
            return await run(os.pread, source.fileno(), size, offset)
        return await run(_piece, source, offset, size)


def _piece(source: PackReader, offset: int, size: int) -> bytes:
    data = bytearray(size)
    source.read_into(offset, [memoryview(data)], size)
    return bytes(data)


class Served:
    """The objects of a backend."""

    def __init__(self, backend: Backend, wait: float = LIMITS.wait) -> None:
        self.backend = backend
        self._pages = Pages()
        self._uploads = Shares(UPLOADS, wait, "its storage")

    @contextlib.asynccontextmanager
    async def opened(self, key: str, kind: Kind) -> AsyncIterator[Found]:
        """The object at a key, as long as the block takes; `NotFound`. Its age may be left out."""
        size = await self.backend.size(key) if kind.streamed else 0
        if size is None:
            raise NotFound(f"{self.backend.url}: there is no object {key}")
        if size <= SMALL:
            data = await self.backend.get(key)
            yield Found(len(data), xxhash.xxh3_128_hexdigest(data), None, None, data)
        else:  # a name that is never used again tells one object from any other
            etag = None if kind.replaceable else xxhash.xxh3_128_hexdigest(f"{key} {size}".encode())
            yield Found(size, etag, None, None, await run(self.backend.reader, key))

    async def age(self, key: str) -> float | None:
        """Seconds since an object, or one beside it, was written; None where that is not known."""
        return await self.backend.age(key.rpartition("/")[0]) if "/" in key else None

    async def exists(self, key: str) -> bool:
        """Whether there is an object at the key."""
        return await self.backend.size(key) is not None

    async def size(self, key: str) -> int | None:
        """The length of an object, None where there is none."""
        return await self.backend.size(key)

    async def put(self, key: str, data: bytes, mode: PutMode) -> None:
        """Stores an object, durable when this returns; `AlreadyExists` where `mode` is CREATE and one is there."""
        if mode is PutMode.CREATE:
            await self.backend.create(key, data, Durability.FSYNC)
        else:
            await self.backend.hint(key, data)

    async def page(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[Page, str | None]:
        """What lies below the prefix behind the name `after`, and the last name where there is more."""
        names = self._pages.known(prefix, delimiter, after)
        if names is None:
            names = await self._names(prefix, delimiter)
        first = bisect.bisect_right(names, after)
        listed = names[first : first + limit]
        more = listed[-1] if first + limit < len(names) else None
        keys = [name for name in listed if not (delimiter and name.endswith(delimiter))]
        folders = [name for name in listed if delimiter and name.endswith(delimiter)]
        sizes = await asyncio.gather(*[self.backend.size(key) for key in keys])
        parents = sorted({key.rpartition("/")[0] for key in keys} - {""})
        ages = dict(zip(parents, await asyncio.gather(*[self.backend.age(p) for p in parents]), strict=True))
        entries = [
            Entry(key, size, ages.get(key.rpartition("/")[0]))
            for key, size in zip(keys, sizes, strict=True)
            if size is not None
        ]
        return Page(entries, folders), more

    async def _names(self, prefix: str, delimiter: str) -> list[str]:
        """All names that a list of a prefix has, in order."""
        keys = await self.backend.list(prefix)

        def found() -> list[str]:
            if not delimiter:
                return sorted(keys)
            cut = (key[len(prefix) :].partition(delimiter) for key in keys)
            return sorted({f"{prefix}{name}{end}" for name, end, _ in cut})

        names = await run(found)
        self._pages.put(prefix, delimiter, names)
        return names

    async def delete(self, key: str) -> None:
        """Removes an object; no error where it does not exist."""
        await self.backend.delete(key)

    async def tidy_up(self) -> None:
        """Removes what a server that was killed left unfinished; only files have any."""

    async def tidy(self, folder: str) -> None:
        """Removes a folder in which no object is left; only files have any."""

    @contextlib.asynccontextmanager
    async def incoming(self, key: str, client: Hashable) -> AsyncIterator[Incoming]:
        """A new object of a client, filled piece by piece; it appears whole when the block ends without exception.

        Raises `AlreadyExists` at the end where another was faster.
        """
        with contextlib.closing(Spool()) as spool:
            yield spool
            async with self._uploads.claim(client, 1):
                await run(self._upload, key, spool)

    def _upload(self, key: str, spool: Spool) -> None:
        """Hands an object on to the storage; blocks a control thread, of which there are more than turns."""
        writer = self.backend.upload(key, spool.size, Durability.FSYNC)
        try:
            if spool.size:
                writer.append([spool.content()], spool.size)
            writer.finish()
        except BaseException:
            writer.discard()
            raise


class Incoming(Protocol):
    """A new object."""

    async def write(self, pieces: Buffers) -> None:
        """Adds the next bytes."""
