"""A storage with a cache in front of it: immutable objects are cached as they are read.

1. Roots and manifests are cached whole. Each ends in a checksum, which is verified when it is cached and whenever
   it is used. Of packs the ranges that were read are cached, cut at multiples of `PIECE`, each followed by a
   checksum. A torn or changed file counts as missing, and is read again.
2. Records are never cached: after a backup was restored at the same URL, the same names belong to other records,
   and only the store can tell. Everything cached is bound to a record: a root and a manifest by a checksum in it,
   a pack by the id of its transaction. The marker, hints, fragments, heartbeats and the absence of an object are
   never cached either.
3. Names are derived from the store's URL, its uuid and the key, so that stores do not mix, nor a store and its
   copy.
4. Bytes that a reader rejects although they are as they were cached came wrong from the server, or belong to
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
from tstore.storage.base import PackReader, Storage
from tstore.storage.cache.folder import Cache, remove
from tstore.storage.objects import Buffers, bound
from tstore.storage.wrapper import Wrapper

__all__ = ["PIECE", "CachedStorage", "forget", "uncached"]

PIECE = 4 << 20
"""Bytes of the longest range in one file."""

_IOV_MAX = 1000
_WHOLE = re.compile(r"roots/\d{20}|txn/[^/]+/manifest(-[^/]*)?")


class _Range(NamedTuple):
    start: int
    stop: int
    path: str


class CachedStorage(Wrapper):
    """A storage with a cache in front of it."""

    def __init__(self, inner: Storage, cache: Cache, identity: str) -> None:
        super().__init__(inner)
        self.cache = cache
        self._top = f"{cache.folder}/{digest(f'{identity} {inner.url}'.encode()).hex()}"

    async def get(self, key: str, most: int | None = None) -> bytes:
        """See `Storage.get`."""
        if not _WHOLE.fullmatch(key):
            return await self.inner.get(key, most)
        path = self.path(key)
        data = await run(_read_whole, path, bound(key, most))
        if data is None:
            data = await self.inner.get(key, most)
            if _is_intact(data):
                await run(self.cache.write, path, [data])
        return data

    async def delete(self, key: str) -> None:
        """See `Storage.delete`."""
        await self.inner.delete(key)
        await run(self.forget, key)

    def reader(self, key: str) -> PackReader:
        """See `Storage.reader`."""
        return _CachedReader(self, key)

    def uncached_reader(self, key: str) -> PackReader:
        """Return a reader of the object that does not use the cache."""
        return super().reader(key)

    def path(self, key: str) -> str:
        """Return the path of a cached object: a file, or the folder of a pack's ranges."""
        name = digest(key.encode()).hex()
        return f"{self._top}/{name[:2]}/{name[2:]}"

    def forget(self, key: str) -> bool:
        """Drop what is cached of an object; return whether there was anything."""
        path = self.path(key)
        try:
            kept = [entry.path for entry in os.scandir(path)]
        except NotADirectoryError:
            kept = [path]
        except FileNotFoundError:
            return False
        for file in kept:
            remove(file)
        return bool(kept)


class _CachedReader:
    """Reads of a pack: at most one request each, from the first byte that is not cached to the last."""

    def __init__(self, owner: CachedStorage, key: str) -> None:
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
        self._owner.uncached_reader(self._key).read_into(low, wanted, high - low)
        for start in range(low - low % PIECE, high, PIECE):
            begin, stop = max(start, low), min(start + PIECE, high)
            piece = _cut(views, begin - offset, stop - offset)
            self._owner.cache.write(f"{self._folder}/{begin}-{stop}", [*piece, self._check(begin, piece)])

    def _cover(self, offset: int, end: int) -> Iterator[tuple[int, int, _Range | None]]:
        """Yield the wanted spans in order, each with the cached range that contains it, or None."""
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
        """Fill the views from a cached range; return False and drop it if its checksum is wrong."""
        size, wanted = kept.stop - kept.start, sum(map(len, views))
        check = bytearray(CHECK_SIZE)
        try:
            fd = os.open(kept.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            if wanted == size:
                intact = _fill(fd, [*views, memoryview(check)]) and check == self._check(kept.start, views)
            else:
                with scratch(size) as room:
                    intact = _fill(fd, [room.data, memoryview(check)])
                    intact = intact and check == self._check(kept.start, [room.data])
                    at = start - kept.start
                    for view in views if intact else ():
                        np.frombuffer(view, np.uint8)[:] = room[at : at + len(view)]
                        at += len(view)
            if intact:
                os.utime(fd)
        except OSError:
            return False
        finally:
            os.close(fd)
        if not intact:
            remove(kept.path)
        return intact

    def _check(self, start: int, views: list[memoryview]) -> bytes:
        """Return the checksum of a range, its pack and its offset."""
        state = xxhash.xxh3_128(f"{self._folder}/{start}".encode())
        for view in views:
            state.update(view)
        return state.digest()


def uncached(storage: Storage) -> Storage:
    """Return the storage behind the cache, or the storage itself if it has none."""
    return storage.inner if isinstance(storage, CachedStorage) else storage


def forget(storage: Storage, key: str) -> bool:
    """Drop what is cached of an object; return whether there was anything, so that another read may help."""
    return isinstance(storage, CachedStorage) and storage.forget(key)


def _read_whole(path: str, most: int) -> bytes | None:
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
            if len(data) <= most and _is_intact(data):
                os.utime(file.fileno())
                return data
    except OSError:
        return None
    remove(path)
    return None


def _is_intact(data: bytes) -> bool:
    return len(data) > CHECK_SIZE and digest(memoryview(data)[:-CHECK_SIZE]) == data[-CHECK_SIZE:]


def _fill(fd: int, views: list[memoryview]) -> bool:
    """Fill the views; return whether the file has exactly as many bytes."""
    offset = 0
    for i in range(0, len(views), _IOV_MAX):
        part = views[i : i + _IOV_MAX]
        wanted = sum(map(len, part))
        if os.preadv(fd, part, offset) != wanted:
            return False
        offset += wanted
    return os.fstat(fd).st_size == offset


def _cut(views: list[memoryview], low: int, high: int) -> list[memoryview]:
    """Return the bytes from `low` to `high` of the joined views."""
    parts, at = [], 0
    for view in views:
        part = view[max(0, low - at) : max(0, high - at)]
        if len(part):
            parts.append(part)
        at += len(view)
    return parts
