"""The objects of a store as a server needs them, beyond what their storage does.

A pack is received whole (`spool`) before it is uploaded to the storage, at the storage's pace: so a few slots
suffice for any number of clients, and no slow client occupies one. `ServedFolder` (`folder`) is faster for local
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
from tstore.storage.base import PackReader, Storage
from tstore.storage.objects import Buffers, Durability, Page

__all__ = ["SMALL", "Incoming", "OpenObject", "Served"]

SMALL = 1 << 20
"""The longest object in bytes that is read whole before any of it is sent."""


class OpenObject(NamedTuple):
    """An object that is open for reading."""

    size: int
    etag: str | None
    """Identifies the bytes of the object; None if nothing does."""
    age: float | None
    modified: float | None
    source: bytes | FileIO | PackReader
    """The system can send a file directly."""

    async def piece(self, offset: int, size: int) -> bytes:
        """Return some of its bytes, which must exist."""
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
    """The objects of a storage."""

    def __init__(self, storage: Storage, wait: float = LIMITS.wait) -> None:
        self.storage = storage
        self._pages = Pages()
        self._uploads = Shares(UPLOADS, wait, "its storage")

    @contextlib.asynccontextmanager
    async def opened(self, key: str, kind: Kind) -> AsyncIterator[OpenObject]:
        """Open an object for the duration of the block; raise `NotFound`. Its age may be left out."""
        entry = await self.storage.head(key) if kind.streamed else None
        if kind.streamed and entry is None:
            raise NotFound(f"{self.storage.url}: {key} does not exist")
        if entry is None or entry.size <= SMALL:
            data = await self.storage.get(key)
            age = None if entry is None else entry.age
            yield OpenObject(len(data), xxhash.xxh3_128_hexdigest(data), age, None, data)
        else:  # a name that is never reused identifies an object
            etag = None if kind.replaceable else xxhash.xxh3_128_hexdigest(f"{key} {entry.size}".encode())
            yield OpenObject(entry.size, etag, entry.age, None, await run(self.storage.reader, key))

    async def page(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[Page, str | None]:
        """Return up to `limit` names after `after`, and the last of them if more follow."""
        names = self._pages.known(prefix, delimiter, after)
        if names is None:
            names = await self._names(prefix, delimiter)
        first = bisect.bisect_right(names, after)
        listed = names[first : first + limit]
        more = listed[-1] if first + limit < len(names) else None
        folders = [name for name in listed if delimiter and name.endswith(delimiter)]
        keys = [name for name in listed if not (delimiter and name.endswith(delimiter))]
        entries = await asyncio.gather(*[self.storage.head(key) for key in keys])
        return Page([entry for entry in entries if entry is not None], folders), more

    async def _names(self, prefix: str, delimiter: str) -> list[str]:
        """Return all names of a listing, in order."""
        keys = await self.storage.list(prefix)

        def sort() -> list[str]:
            if not delimiter:
                return sorted(keys)
            cut = (key[len(prefix) :].partition(delimiter) for key in keys)
            return sorted({f"{prefix}{name}{end}" for name, end, _ in cut})

        names = await run(sort)
        self._pages.put(prefix, delimiter, names)
        return names

    async def clean(self) -> None:
        """Remove the unfinished files of a server that was killed; only files have any."""

    async def clean_folder(self, folder: str) -> None:
        """Remove a folder that contains no object; only files have folders."""

    @contextlib.asynccontextmanager
    async def incoming(self, key: str, client: Hashable) -> AsyncIterator[Incoming]:
        """Receive a new object of a client; it appears whole if the block ends without an exception.

        Raise `AlreadyExists` at the end if the key is taken by then.
        """
        with contextlib.closing(Spool()) as spool:
            yield spool
            async with self._uploads.claim(client, 1):
                await run(self._upload, key, spool)

    def _upload(self, key: str, spool: Spool) -> None:
        """Upload an object to the storage; block a control thread, of which there are more than slots."""
        writer = self.storage.upload(key, spool.size, Durability.FSYNC)
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
        """Append bytes."""
