"""The objects behind a server: what it reads from, creates in, lists and removes from a backend of any kind.

A few packs are on their way at once, each in memory, or in a temporary file if it is long, until it is whole (see
`Backend.upload`). `ServedFolder` (`folder`) does better with local files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from io import FileIO
from typing import NamedTuple, Protocol

import xxhash

from tstore.errors import InvalidArgument, NotFound
from tstore.kv.base import Backend, Buffers, Durability, PackReader, PackWriter
from tstore.kv.objects import Entry, Page, PutMode
from tstore.pool import run, uncancelled
from tstore.server.limits import UPLOADS
from tstore.server.names import Kind

__all__ = ["Found", "Incoming", "LengthNeeded", "Served"]

_SMALL = 1 << 20


class Found(NamedTuple):
    """An object that is open for reading."""

    size: int
    etag: str
    """Changes with every change of the bytes, and never without one."""
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

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._uploads = asyncio.Semaphore(UPLOADS)

    @contextlib.asynccontextmanager
    async def opened(self, key: str, kind: Kind) -> AsyncIterator[Found]:
        """The object at a key, as long as the block takes; `NotFound`. Its age may be left out."""
        size = await self.backend.size(key) if kind.streamed else 0
        if size is None:
            raise NotFound(f"{self.backend.url}: there is no object {key}")
        if size <= _SMALL:
            data = await self.backend.get(key)
            yield Found(len(data), xxhash.xxh3_128_hexdigest(data), None, None, data)
        else:  # its name is never used again, so it tells one object from any other
            etag = xxhash.xxh3_128_hexdigest(f"{key} {size}".encode())
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
        names: dict[str, None] = {}
        for key in await self.backend.list(prefix):
            rest, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            name = f"{prefix}{rest}{found}" if found else key
            if name > after:
                names[name] = None
        listed = sorted(names)
        more = listed[limit - 1] if len(listed) > limit else None
        keys = [name for name in listed[:limit] if not (delimiter and name.endswith(delimiter))]
        folders = [name for name in listed[:limit] if delimiter and name.endswith(delimiter)]
        sizes = await asyncio.gather(*[self.backend.size(key) for key in keys])
        parents = sorted({key.rpartition("/")[0] for key in keys} - {""})
        ages = dict(zip(parents, await asyncio.gather(*[self.backend.age(p) for p in parents]), strict=True))
        entries = [
            Entry(key, size, ages.get(key.rpartition("/")[0]))
            for key, size in zip(keys, sizes, strict=True)
            if size is not None
        ]
        return Page(entries, folders), more

    async def delete(self, key: str) -> None:
        """Removes an object; no error where it does not exist."""
        await self.backend.delete(key)

    async def tidy(self, folder: str) -> None:
        """Removes a folder in which no object is left; only files have any."""

    @contextlib.asynccontextmanager
    async def incoming(self, key: str, length: int | None) -> AsyncIterator[Incoming]:
        """A new object that is filled piece by piece, and appears whole when the block ends without exception.

        Raises `AlreadyExists` at the end where another was faster, `LengthNeeded`.
        """
        if length is None:
            raise LengthNeeded(f"{self.backend.url}: {key} is of unknown length")
        async with self._uploads:
            incoming = _Upload(self.backend, key, length)
            try:
                await incoming.begin()
                yield incoming
                await incoming.finish()
            except BaseException:
                await uncancelled(incoming.discard())
                raise


class LengthNeeded(InvalidArgument):
    """An object that comes without its length can't be received."""


class Incoming(Protocol):
    """A new object."""

    async def write(self, pieces: Buffers) -> None:
        """Adds the next bytes."""


class _Upload:
    """It waits for memory, and for the storage, in threads of the pool: there are more of these than uploads."""

    def __init__(self, backend: Backend, key: str, length: int) -> None:
        self._backend = backend
        self._key = key
        self._length = length
        self._writer: PackWriter | None = None

    async def begin(self) -> None:
        def begin() -> None:  # whoever is cancelled meanwhile still has it to discard
            self._writer = self._backend.upload(self._key, self._length, Durability.FSYNC)

        await run(begin)

    async def write(self, pieces: Buffers) -> None:
        assert self._writer is not None
        await run(self._writer.append, pieces, sum(map(len, pieces)))

    async def finish(self) -> None:
        assert self._writer is not None
        await run(self._writer.finish)

    async def discard(self) -> None:
        if self._writer is not None:
            await run(self._writer.discard)
