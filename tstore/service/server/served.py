"""The storage behind a server: objects opened for sending, pages of listings, and incoming objects.

A pack is received whole (`Spool`) before it is uploaded at the pace of the storage: so a few upload slots suffice
for any number of clients, and no slow client occupies one. `ServedFolder` (`folder`) is faster for local files.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import mmap
import os
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from io import FileIO
from typing import IO, NamedTuple, Protocol

import xxhash

from tstore.core.runtime.pool import run
from tstore.core.storage.base import PackReader, Storage
from tstore.core.storage.local.atomic_file import write_all
from tstore.core.storage.objects import Buffers, Durability, Page, PutMode, mapped_errors
from tstore.errors import NotFound
from tstore.service.server.kinds import Kind
from tstore.service.server.quotas import LIMITS, PIECE, Shares

__all__ = ["MAX_READ_WHOLE", "Incoming", "OpenObject", "ServedStorage", "Spool"]

MAX_READ_WHOLE = 1 << 20
"""The longest pack or replaceable file, in bytes, that is read whole before any of it is sent."""

_UPLOADS = 8  # concurrent uploads to the storage, of objects already received
_MIN_CACHED = 1000  # names; shorter listings are cheap to read again
_MAX_CACHED = 500_000  # names of all listings
_EXPIRY = 60.0  # seconds that a listing stays cached after a page was read from it


class OpenObject(NamedTuple):
    """An object that is open for reading."""

    size: int
    etag: str | None
    """Identifies the bytes of the object; None if nothing does."""
    age: float | None
    """Seconds since the object was written; None if unknown."""
    modified: float | None
    """When the object was written, as a Unix time; None if unknown."""
    source: bytes | FileIO | PackReader
    """Where the bytes are; the operating system can send a file directly."""

    async def piece(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset`; fewer only if a file has been truncated."""
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


class Incoming(Protocol):
    """An object being received."""

    async def write(self, pieces: Buffers) -> None:
        """Append bytes."""


class Spool:
    """A buffer for a body being received: up to 1 MiB in memory, a larger body in an unnamed temporary file.

    So a body that arrives slowly, or declares a large size, takes little memory and no upload slot, only disk
    space (`TMPDIR`) for the bytes received so far. Close the spool after use.
    """

    def __init__(self) -> None:
        self.size = 0
        self._in_memory: list[bytes] = []
        self._file: IO[bytes] | None = None

    async def write(self, pieces: Buffers) -> None:
        """Append bytes."""
        self.size += sum(map(len, pieces))
        if self._file is None and self.size <= PIECE:
            self._in_memory += map(bytes, pieces)
        else:
            await run(self._write, [*self._in_memory, *pieces])
            self._in_memory.clear()

    def content(self) -> bytes | mmap.mmap:
        """Return the bytes; those of a file are memory-mapped."""
        if self._file is None:
            return b"".join(self._in_memory)
        return mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ)

    async def read(self) -> bytes:
        """Return the bytes, in memory."""
        content = self.content()
        return content if isinstance(content, bytes) else await run(bytes, content)

    def close(self) -> None:
        """Release memory and file; may be called repeatedly."""
        self._in_memory.clear()
        if self._file is not None:
            self._file.close()

    def _write(self, pieces: Buffers) -> None:
        with mapped_errors("write", tempfile.gettempdir()):
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `close`
            write_all(self._file.fileno(), pieces, self.size - sum(map(len, pieces)))


class ServedStorage:
    """Storage as a server uses it."""

    def __init__(self, storage: Storage, wait: float = LIMITS.wait) -> None:
        self.storage = storage
        self._listings = _ListingCache()
        self._uploads = Shares(_UPLOADS, wait, waiting_for="its storage")

    @contextlib.asynccontextmanager
    async def open(self, key: str, kind: Kind) -> AsyncIterator[OpenObject]:
        """Open an object (its age may be None) for the duration of the block; raise `NotFound` if it is absent."""
        entry = await self.storage.head(key) if kind.streamed else None
        if kind.streamed and entry is None:
            raise NotFound(f"{self.storage.url}: {key} does not exist")
        if entry is None or entry.size <= MAX_READ_WHOLE:
            data = await self.storage.get(key)
            age = None if entry is None else entry.age
            yield OpenObject(len(data), xxhash.xxh3_128_hexdigest(data), age, None, data)
        else:  # a key that is never reused identifies an object
            etag = None if kind.replaceable else xxhash.xxh3_128_hexdigest(f"{key} {entry.size}".encode())
            yield OpenObject(entry.size, etag, entry.age, None, await run(self.storage.reader, key))

    async def page(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[Page, str | None]:
        """Return up to `limit` names after `after`, and the `after` of the next page, None at the end."""
        names = self._listings.get(prefix, delimiter, after)
        if names is None:
            names = await self._names(prefix, delimiter)
        first = bisect.bisect_right(names, after)
        on_page = names[first : first + limit]
        next_after = on_page[-1] if first + limit < len(names) else None
        folders = [name for name in on_page if delimiter and name.endswith(delimiter)]
        keys = [name for name in on_page if not (delimiter and name.endswith(delimiter))]
        entries = await asyncio.gather(*[self.storage.head(key) for key in keys])
        return Page([entry for entry in entries if entry is not None], folders), next_after

    async def _names(self, prefix: str, delimiter: str) -> list[str]:
        keys = await self.storage.list(prefix)

        def cut_at_delimiter() -> list[str]:
            parts = (key[len(prefix) :].partition(delimiter) for key in keys)
            return list(dict.fromkeys(f"{prefix}{name}{end}" for name, end, _ in parts))

        names = await run(cut_at_delimiter) if delimiter else keys
        self._listings.put(prefix, delimiter, names)
        return names

    async def remove_unfinished(self) -> None:
        """Remove the unfinished uploads of a server that was killed; only a local folder has any."""

    async def remove_empty_folder(self, folder: str) -> None:
        """Remove a folder that contains no object; only file systems have such folders."""

    @contextlib.asynccontextmanager
    async def incoming(self, key: str, client: Hashable, mode: PutMode) -> AsyncIterator[Incoming]:
        """Receive an object during the block, and store it at the end; store nothing if the block raises.

        Raise `AlreadyExists` if the key of a create is taken.
        """
        with contextlib.closing(Spool()) as spool:
            yield spool
            async with self._uploads.claim(client, 1):
                await run(self._upload, key, spool, mode)

    def _upload(self, key: str, spool: Spool, mode: PutMode) -> None:
        """Upload an object to the storage. Blocks one thread of `run`, which has more threads than `_UPLOADS`."""
        writer = self.storage.upload(key, spool.size, Durability.FSYNC, mode)
        try:
            if spool.size:
                writer.append([spool.content()], spool.size)
            writer.finish()
        except BaseException:
            writer.discard()
            raise


class _Listing(NamedTuple):
    used_at: float  # by the monotonic clock
    names: list[str]


class _ListingCache:
    """The sorted names of long listings, so that a listing in pages reads the names only once.

    Storage does not report changes. So the first page of a listing is always read from it, and only later pages
    come from the cache, whose names are at least as new as the first page.
    """

    def __init__(self) -> None:
        self._cache: OrderedDict[tuple[str, str], _Listing] = OrderedDict()

    def get(self, prefix: str, delimiter: str, after: str) -> list[str] | None:
        """Return the names of a listing for a page after `after`; None for a first page, or if not cached."""
        cached = self._cache.get((prefix, delimiter))
        if cached is None or not after or time.monotonic() > cached.used_at + _EXPIRY:
            return None
        self.put(prefix, delimiter, cached.names)
        return cached.names

    def put(self, prefix: str, delimiter: str, names: list[str]) -> None:
        """Cache the names for the following pages, as the most recently used."""
        self._cache.pop((prefix, delimiter), None)
        if len(names) >= _MIN_CACHED:
            self._cache[prefix, delimiter] = _Listing(time.monotonic(), names)
        while sum(len(cached.names) for cached in self._cache.values()) > _MAX_CACHED:
            self._cache.popitem(last=False)
