"""What was read from a store, kept in a local folder: objects that never change, under a limit of bytes.

1. Records, roots, manifests and fragments are kept whole. Each ends in its own checksum, which must be right when
   it is kept and whenever it is used. Of packs the ranges are kept that were read, cut at multiples of `PIECE`,
   each with a checksum behind it. What is torn, or was changed, counts as not there, and is read again.
2. The marker, hints, heartbeats and the absence of an object are never kept.
3. Names are made of the store's URL, its uuid and the key, so that stores do not mix, nor a store and its copy.
4. A file appears whole or not at all (`newfile`), and is never changed: any number of processes share a folder.
5. A hit sets the file's time. Whoever has written a part of the limit looks whether the limit is passed, and then
   removes what was not used for the longest; one process does that at a time. So several processes together may
   pass the limit by some parts.
6. Bytes that a reader finds wrong although they are as they were kept came wrong from the server: `forget` has the
   pack read again.

A failure to write here never fails a read: there is one warning, and reading goes on without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash

from tstore.chunks.table import CHECK_SIZE, digest
from tstore.errors import InvalidArgument
from tstore.kv.base import (
    Backend,
    Buffers,
    Capabilities,
    Durability,
    Keys,
    PackReader,
    PackWriter,
    Transfer,
)
from tstore.kv.newfile import new_file, write_all
from tstore.pool import run, scratch

__all__ = ["PIECE", "Cache", "CachedBackend", "forget", "uncached"]

PIECE = 4 << 20
"""Bytes of the longest range in one file."""

_PARTS = 32  # of the limit, between two looks at what is there
_LEFT = 0.9  # of the limit, after one that found too much
_UNFINISHED = 3600.0  # seconds after which a temporary file is nobody's
_IOV_MAX = 1000
_WHOLE = re.compile(r"(commits|roots)/\d{20}|txn/[^/]+/(manifest|part|merge)-[^/]*")


class Cache:
    """A folder for what is read from stores, of about `size` bytes at most; made when it is first written to.

    Processes and stores may share it. Nobody else should be able to write there. Raises `InvalidArgument`.
    """

    def __init__(self, folder: str | os.PathLike[str], size: int = 10 << 30) -> None:
        if size < _PARTS * CHECK_SIZE:
            raise InvalidArgument(f"Cache(size={size}): expected a number of bytes, as 10 << 30")
        self.folder = os.path.abspath(os.fspath(folder))
        self.size = size
        self._unlooked = size  # bytes written since the last look; the first write looks
        self._warned = False

    def __repr__(self) -> str:
        return f"Cache({self.folder!r}, size={self.size})"

    def write(self, path: str, buffers: Buffers) -> None:
        """Makes a file; nothing where it is there already or can't be made."""
        try:
            for folder in (self.folder, os.path.dirname(path)):
                os.makedirs(folder, mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError), new_file(path, Durability.NONE) as fd:
                size = 0
                for i in range(0, len(buffers), _IOV_MAX):
                    size += write_all(fd, buffers[i : i + _IOV_MAX], size)
                self._unlooked += size
            if self._unlooked > self.size // _PARTS:
                self._unlooked = 0
                self._make_room()
        except FileNotFoundError:
            return  # the folder was empty just now, and another process removed it
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the cache in {self.folder} can't be written ({error}); reading goes on without it",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _make_room(self) -> None:
        lock = os.open(f"{self.folder}/.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = sorted(self._files())
            left = sum(size for _, size, _ in found)
            if left <= self.size:
                return
            for _, size, path in found:
                _remove(path)
                left -= size
                if left <= _LEFT * self.size:
                    return
        except BlockingIOError:
            return  # another process does it
        finally:
            os.close(lock)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """When each file was used last, its size and its path."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = f"{folder}/{name}"
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(path)
                    if not name.startswith("."):
                        yield found.st_mtime, found.st_size, path
                    elif name.endswith(".tmp") and found.st_mtime < time.time() - _UNFINISHED:
                        os.unlink(path)


class _Range(NamedTuple):
    start: int
    stop: int
    path: str


class CachedBackend:
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

    async def get(self, key: str) -> bytes:
        """See `Backend.get`."""
        if not _WHOLE.fullmatch(key):
            return await self.inner.get(key)
        path = self.path(key)
        data = await run(_read_whole, path)
        if data is None:
            data = await self.inner.get(key)
            if _is_right(data):
                await run(self.cache.write, path, [data])
        return data

    async def size(self, key: str) -> int | None:
        """See `Backend.size`; commits are never deleted, so one that was seen is there."""
        if key.startswith("commits/"):
            data = await run(_read_whole, self.path(key))
            if data is not None:
                return len(data)
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
            _remove(found)
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
            _remove(kept.path)
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


def _read_whole(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            data = file.read()
            if _is_right(data):
                os.utime(file.fileno())
                return data
    except OSError:
        return None
    _remove(path)
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


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))  # where it was the last
