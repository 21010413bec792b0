"""A backend in front of which a cache lies: what was read and never changes is kept, and read again from there.

1. Roots and manifests are kept whole. Each ends in its own checksum, which must be right when it is kept and
   whenever it is used. Of packs the ranges are kept that were read, cut at multiples of `PIECE`, each with a
   checksum behind it. What is torn, or was changed, counts as not there, and is read again.
2. Records are never kept: where a backup was restored at the same URL, others stand under the same names, and only
   the store itself can tell. All that is kept is bound to them: a root and a manifest by a checksum that a record
   has, a pack by the id of its transaction. The marker, hints, fragments, heartbeats and the absence of an object
   are never kept either.
3. Names are made of the store's URL, its uuid and the key, so that stores do not mix, nor a store and its copy.
4. Bytes that a reader finds wrong although they are as they were kept came wrong from the server, or are those of
   another history: `forget` has the object read again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from tstore.format.checksums import CHECK_SIZE, digest
from tstore.runtime.budget import scratch
from tstore.runtime.pool import run
from tstore.storage.base import (
    Backend,
    Buffers,
    Capabilities,
    Durability,
    Keys,
    PackReader,
    PackWriter,
    Transfer,
    bound,
)
from tstore.storage.cache.folder import Cache, remove
from tstore.storage.plain import Plain

__all__ = ["PIECE", "CachedBackend", "forget", "uncached"]

PIECE = 4 << 20
"""Bytes of the longest range in one file."""

_IOV_MAX = 1000
_WHOLE = re.compile(r"roots/\d{20}|txn/[^/]+/manifest(-[^/]*)?")


class _Range(NamedTuple):
    start: int
    stop: int
    path: str


class CachedBackend(Plain):
    """A backend in front of which a cache lies."""

    def __init__(self, inner: Backend, cache: Cache, identity: str) -> None:
        self.inner = inner
        self.cache = cache
        self._top = f"{cache.folder}/{digest(f'{identity} {inner.url}'.encode()).hex()}"

    @property
    def url(self) -> str:
        """See `Backend.url`."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        """See `Backend.capabilities`."""
        return self.inner.capabilities

    @property
    def transfer(self) -> Transfer:
        """See `Backend.transfer`."""
        return self.inner.transfer

    async def get(self, key: str, most: int | None = None) -> bytes:
        """See `Backend.get`."""
        if not _WHOLE.fullmatch(key):
            return await self.inner.get(key, most)
        path = self.path(key)
        data = await run(_read_whole, path, bound(key, most))
        if data is None:
            data = await self.inner.get(key, most)
            if _is_right(data):
                await run(self.cache.write, path, [data])
        return data

    async def size(self, key: str) -> int | None:
        """See `Backend.size`."""
        return await self.inner.size(key)

    async def create(self, key: str, data: bytes, durability: Durability) -> None:
        """See `Backend.create`."""
        await self.inner.create(key, data, durability)

    async def hint(self, key: str, data: bytes) -> None:
        """See `Backend.hint`."""
        await self.inner.hint(key, data)

    async def empty(self) -> bool:
        """See `Backend.empty`."""
        return await self.inner.empty()

    async def list(self, prefix: str) -> Keys:
        """See `Backend.list`."""
        return await self.inner.list(prefix)

    async def folders(self, prefix: str) -> Keys:
        """See `Backend.folders`."""
        return await self.inner.folders(prefix)

    async def age(self, prefix: str) -> float | None:
        """See `Backend.age`."""
        return await self.inner.age(prefix)

    async def delete(self, key: str) -> None:
        """See `Backend.delete`."""
        await self.inner.delete(key)
        await run(self.forget, key)

    async def settle(self, prefix: str, durability: Durability) -> None:
        """See `Backend.settle`."""
        await self.inner.settle(prefix, durability)

    async def flush(self) -> None:
        """See `Backend.flush`."""
        await self.inner.flush()

    async def sweep(self) -> None:
        """See `Backend.sweep`."""
        await self.inner.sweep()

    def writer(self, key: str, durability: Durability) -> PackWriter:
        """See `Backend.writer`."""
        return self.inner.writer(key, durability)

    def upload(self, key: str, size: int, durability: Durability) -> PackWriter:
        """See `Backend.upload`."""
        return self.inner.upload(key, size, durability)

    def reader(self, key: str) -> PackReader:
        """See `Backend.reader`."""
        return _CachedReader(self, key)

    async def close(self) -> None:
        """See `Backend.close`."""
        await self.inner.close()

    def path(self, key: str) -> str:
        """Where an object is kept: a file, or the folder of a pack's ranges."""
        name = digest(key.encode()).hex()
        return f"{self._top}/{name[:2]}/{name[2:]}"

    def forget(self, key: str) -> bool:
        """Drops what is kept of an object; whether there was anything."""
        path = self.path(key)
        try:
            kept = [entry.path for entry in os.scandir(path)]
        except NotADirectoryError:
            kept = [path]
        except FileNotFoundError:
            return False
        for found in kept:
            remove(found)
        return bool(kept)


class _CachedReader:
    """Reads of a pack: at most one request each, from the first byte that is not kept to the last."""

    def __init__(self, owner: CachedBackend, key: str) -> None:
        self._owner = owner
        self._key = key
        self._folder = owner.path(key)

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        """See `PackReader.read_into`."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        end = offset + size
        low, high = end, offset
        for start, stop, kept in self._cover(offset, end):
            if kept is None or not self._take(kept, start, _cut(views, start - offset, stop - offset)):
                low, high = min(low, start), max(high, stop)
        if low >= high:
            return
        wanted = _cut(views, low - offset, high - offset)
        self._owner.inner.reader(self._key).read_into(low, wanted, high - low)
        for start in range(low - low % PIECE, high, PIECE):
            begin, stop = max(start, low), min(start + PIECE, high)
            piece = _cut(views, begin - offset, stop - offset)
            self._owner.cache.write(f"{self._folder}/{begin}-{stop}", [*piece, self._check(begin, piece)])

    def _cover(self, offset: int, end: int) -> Iterator[tuple[int, int, _Range | None]]:
        """The wanted bytes in order: those that a kept range has, and those that none has."""
        ranges = sorted(self._ranges())
        at, following, longest = offset, 0, _Range(0, 0, "")
        while at < end:
            while following < len(ranges) and ranges[following].start <= at:
                longest = max(longest, ranges[following], key=lambda r: r.stop)
                following += 1
            if longest.stop > at:
                stop = min(end, longest.stop)
                yield at, stop, longest
            else:
                stop = min(end, ranges[following].start) if following < len(ranges) else end
                yield at, stop, None
            at = stop

    def _ranges(self) -> Iterator[_Range]:
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    start, _, stop = entry.name.partition("-")
                    if stop and not start.startswith("."):
                        yield _Range(int(start), int(stop), entry.path)
        except (FileNotFoundError, NotADirectoryError):
            return

    def _take(self, kept: _Range, start: int, views: list[memoryview]) -> bool:
        """Fills the views from the kept range; whether that has its checksum. Else it is dropped."""
        size, wanted = kept.stop - kept.start, sum(map(len, views))
        check = bytearray(CHECK_SIZE)
        try:
            fd = os.open(kept.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if wanted == size:
                right = _fill(fd, [*views, memoryview(check)]) and check == self._check(kept.start, views)
            else:
                with scratch(size) as room:
                    right = _fill(fd, [room.data, memoryview(check)])
                    right = right and check == self._check(kept.start, [room.data])
                    at = start - kept.start
                    for view in views if right else ():
                        np.frombuffer(view, np.uint8)[:] = room[at : at + len(view)]
                        at += len(view)
            if right:
                os.utime(fd)
        except OSError:
            return False
        finally:
            os.close(fd)
        if not right:
            remove(kept.path)
        return right

    def _check(self, start: int, views: list[memoryview]) -> bytes:
        """The checksum of a range, and of which it is."""
        state = xxhash.xxh3_128(f"{self._folder}/{start}".encode())
        for view in views:
            state.update(view)
        return state.digest()


def uncached(backend: Backend) -> Backend:
    """The backend behind the cache, the backend itself where there is none."""
    return backend.inner if isinstance(backend, CachedBackend) else backend


def forget(backend: Backend, key: str) -> bool:
    """Drops what a cache keeps of an object; whether there was anything, so that reading again may help."""
    return isinstance(backend, CachedBackend) and backend.forget(key)


def _read_whole(path: str, most: int) -> bytes | None:
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
            if len(data) <= most and _is_right(data):
                os.utime(file.fileno())
                return data
    except OSError:
        return None
    remove(path)
    return None


def _is_right(data: bytes) -> bool:
    return len(data) > CHECK_SIZE and digest(memoryview(data)[:-CHECK_SIZE]) == data[-CHECK_SIZE:]


def _fill(fd: int, views: list[memoryview]) -> bool:
    """Whether the file has just as many bytes as the views, which are filled."""
    offset = 0
    for i in range(0, len(views), _IOV_MAX):
        part = views[i : i + _IOV_MAX]
        wanted = sum(map(len, part))
        if os.preadv(fd, part, offset) != wanted:
            return False
        offset += wanted
    return os.fstat(fd).st_size == offset


def _cut(views: list[memoryview], low: int, high: int) -> list[memoryview]:
    """The bytes from `low` to `high` of the joined views."""
    found, at = [], 0
    for view in views:
        part = view[max(0, low - at) : max(0, high - at)]
        if len(part):
            found.append(part)
        at += len(view)
    return found
