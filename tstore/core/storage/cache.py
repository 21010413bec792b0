"""A local cache in front of any storage: immutable objects are cached in files as they are read.

1. Manifests are cached whole. Each ends in a checksum, which is verified before the object is cached and at every
   use. For a pack, or a manifest or root in pages, the ranges that were read are cached, cut at
   multiples of `PIECE`, each followed by a checksum (`_RangeReader`). A torn or changed file counts as missing:
   the object is read again.
2. Records are never cached: if a backup is restored at the same URL, the same names belong to other records, and
   only the store can tell which. Everything cached is bound to a record, which contains a manifest's checksum and
   the id of a pack's transaction. Nor are roots, which a repair rewrites, except for their pages, whose checksums
   are in the root. The marker, hints, fragments, heartbeats and the absence of an object are not cached either.
3. File names are derived from the store's URL, its uuid and the key, so that stores, and copies of a store, do not
   mix.
4. A reader may reject cached bytes whose checksum is right, because the server sent wrong bytes, or because a
   backup was restored since. It then calls `forget`, which drops them, and reads the object again.
5. A file appears whole or not at all (`atomic_file`) and is never changed, so processes can share a folder.
6. A hit updates the file's time. A process that has written 1 / `_CHECKS` of the size limit checks whether the
   folder exceeds the limit. If so, it removes the least recently used files; one process evicts at a time. So
   each process may exceed the limit by that fraction.
7. A failed write to the cache never fails a read: a warning is given once, and the object is not cached.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from exmy.user_warnings import warn

from tstore.core.format.arguments import quote
from tstore.core.format.checksums import CHECK_SIZE, digest
from tstore.core.runtime.budget import scratch
from tstore.core.runtime.pool import run
from tstore.core.storage.base import PackReader, Storage
from tstore.core.storage.local.atomic_file import new_file, open_regular, write_all
from tstore.core.storage.local.pack import LocalReader
from tstore.core.storage.objects import Buffers, Durability, read_limit
from tstore.core.storage.wrapper import Wrapper
from tstore.errors import Corrupt, InvalidArgument, TStoreError

__all__ = ["PIECE", "Cache", "CachedStorage", "forget", "without_cache"]

PIECE = 4 << 20
"""The maximum bytes of a pack in one file."""

_RANGE = re.compile(r"(\d{1,20})-(\d{1,20})", re.ASCII)  # file names of a pack's ranges
_WHOLE = re.compile(r"txn/[^/]+/manifest(-[^/]*)?")  # keys of objects that are cached whole
_CHECKS = 32  # how often a process that writes `size` bytes checks the limit
_TARGET = 0.9  # the fraction of the limit that remains in use after an eviction
_ABANDONED = 3600.0  # seconds without a write after which a temporary file is abandoned


class Cache:
    """A `folder` of cached objects, of at most about `size` bytes; created at the first write.

    Processes and stores may share it; no other user should be able to write there.
    Raise `InvalidArgument` for an invalid folder or size.
    """

    def __init__(self, folder: str | os.PathLike[str], size: int = 10 << 30) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise InvalidArgument(f"Cache({quote(folder)}): expected the path of a local folder")
        if "\0" in str(folder):
            raise InvalidArgument(f"Cache({quote(folder)}) has a null character; expected a path without one")
        if isinstance(size, bool) or not isinstance(size, int) or size < _CHECKS * CHECK_SIZE:
            raise InvalidArgument(
                f"Cache(size={quote(size)}): expected at least {_CHECKS * CHECK_SIZE} bytes, such as 10 << 30"
            )
        self.folder = os.path.abspath(os.fspath(folder))
        self.size = size
        self._unchecked = size  # bytes written since the last check; the first write checks
        self._warned = False

    def __repr__(self) -> str:
        return f"Cache({self.folder!r}, size={self.size})"

    def write(self, path: str, buffers: Buffers) -> None:
        """Write a file, unless it already exists; warn once if that fails."""
        try:
            for folder in (self.folder, os.path.dirname(path)):
                os.makedirs(folder, mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError), new_file(path, Durability.NONE) as fd:
                self._unchecked += write_all(fd, buffers, 0)
            if self._unchecked > self.size // _CHECKS:
                self._unchecked = 0
                self._evict()
        except FileNotFoundError:
            return  # between `makedirs` and `new_file` another process removed the folder, since it was empty
        except OSError as error:
            if not self._warned:
                self._warned = True
                warn(
                    f"the cache in {self.folder} can't be written ({error}); objects are read without it",
                    RuntimeWarning,
                )

    def _evict(self) -> None:
        """Remove the least recently used files if the limit is exceeded, unless another process is doing that."""
        lock = os.open(f"{self.folder}/.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files = sorted(self._files())
            total = sum(size for _, size, _ in files)
            if total > self.size:
                for _, size, path in files:
                    if total <= _TARGET * self.size:
                        break
                    _remove(path)
                    total -= size
        except BlockingIOError:
            return
        finally:
            os.close(lock)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield the time of the last use, the size and the path of each file; remove abandoned temporary files."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = f"{folder}/{name}"
                with contextlib.suppress(FileNotFoundError):
                    status = os.stat(path)
                    if not name.startswith("."):
                        yield status.st_mtime, status.st_size, path
                    elif name.endswith(".tmp") and status.st_mtime < time.time() - _ABANDONED:
                        os.unlink(path)


class CachedStorage(Wrapper):
    """A storage with a cache in front of it; `identity`, the uuid of the store, tells stores at one URL apart."""

    def __init__(self, inner: Storage, cache: Cache, identity: str) -> None:
        super().__init__(inner)
        self.cache = cache
        self._folder_of_store = f"{cache.folder}/{digest(f'{identity} {inner.url}'.encode()).hex()}"

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        if not _WHOLE.fullmatch(key):
            return await self.inner.get(key, max_size)
        path = self.path(key)
        data = await run(_read_whole, path, read_limit(key, max_size))
        if data is None:
            data = await self.inner.get(key, max_size)
            if _is_intact(data):
                await run(self.cache.write, path, [data])
        return data

    async def delete(self, key: str) -> None:
        await self.inner.delete(key)
        await run(self.forget, key)

    def reader(self, key: str) -> PackReader:
        return _RangeReader(self.path(key), self.cache.write, functools.partial(super().reader, key))

    def path(self, key: str) -> str:
        """Return the path of a cached object: a file, or the folder of a pack's ranges."""
        name = digest(key.encode()).hex()
        return f"{self._folder_of_store}/{name[:2]}/{name[2:]}"

    def forget(self, key: str) -> bool:
        """Drop what is cached of an object; return whether anything was."""
        path = self.path(key)
        try:
            files = [entry.path for entry in os.scandir(path)]
        except NotADirectoryError:
            files = [path]
        except FileNotFoundError:
            return False
        for file in files:
            _remove(file)
        return bool(files)


class _CachedRange(NamedTuple):
    start: int
    stop: int
    path: str


class _RangeReader:
    """A `PackReader` of a pack whose ranges are cached in a folder, as files `<start>-<stop>`.

    A read makes at most one request to the storage, for the bytes from the first missing one to the last. `write`
    writes a file of the cache; `uncached` returns a reader of the pack itself.
    """

    def __init__(
        self, folder: str, write: Callable[[str, Buffers], None], uncached: Callable[[], PackReader]
    ) -> None:
        self._folder = folder
        self._write = write
        self._uncached = uncached

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        end = offset + size
        low, high = end, offset  # the bounds of the missing bytes; none are known to be missing yet
        for start, stop, cached in self._spans(offset, end):
            if cached is None or not self._fill(cached, start, _slice(views, start - offset, stop - offset)):
                low, high = min(low, start), max(high, stop)
        if low >= high:
            return
        missing = _slice(views, low - offset, high - offset)
        self._uncached().read_into(low, missing, high - low)
        for boundary in range(low - low % PIECE, high, PIECE):
            start, stop = max(boundary, low), min(boundary + PIECE, high)
            piece = _slice(views, start - offset, stop - offset)
            self._write(f"{self._folder}/{start}-{stop}", [*piece, self._checksum(start, piece)])

    def _spans(self, offset: int, end: int) -> Iterator[tuple[int, int, _CachedRange | None]]:
        """Yield consecutive spans from `offset` to `end`, each with the cached range that contains it, or None."""
        ahead = sorted(self._ranges(), reverse=True)  # the ranges that start after `at`, the nearest one last
        furthest = _CachedRange(0, 0, "")  # of the ranges that start at or before `at`, the one that ends last
        at = offset
        while at < end:
            while ahead and ahead[-1].start <= at:
                furthest = max(furthest, ahead.pop(), key=lambda r: r.stop)
            if furthest.stop > at:
                stop = min(end, furthest.stop)
                yield at, stop, furthest
            else:
                stop = min(end, ahead[-1].start) if ahead else end
                yield at, stop, None
            at = stop

    def _ranges(self) -> Iterator[_CachedRange]:
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if match := _RANGE.fullmatch(entry.name):  # there may be other files too
                        yield _CachedRange(int(match[1]), int(match[2]), entry.path)
        except (FileNotFoundError, NotADirectoryError):
            return

    def _fill(self, cached: _CachedRange, start: int, views: list[memoryview]) -> bool:
        """Fill the views from a cached range; return whether it succeeded. Remove a damaged range."""
        try:
            if sum(map(len, views)) == (size := cached.stop - cached.start):
                self._read_range(cached, views)
            else:
                with scratch(size) as buffer:  # the checksum needs the whole range
                    self._read_range(cached, [buffer.data])
                    at = start - cached.start
                    for view in views:
                        np.frombuffer(view, np.uint8)[:] = buffer[at : at + len(view)]
                        at += len(view)
            os.utime(cached.path)
        except Corrupt:
            _remove(cached.path)
            return False
        except (OSError, TStoreError):
            return False
        return True

    def _read_range(self, cached: _CachedRange, views: list[memoryview]) -> None:
        """Fill the views with a whole range; raise `Corrupt` if its file has another length or checksum."""
        check, length = bytearray(CHECK_SIZE), cached.stop - cached.start + CHECK_SIZE
        LocalReader(cached.path).read_into(0, [*views, check], length)
        if os.path.getsize(cached.path) != length or check != self._checksum(cached.start, views):
            raise Corrupt(f"{cached.path} is damaged")

    def _checksum(self, start: int, views: list[memoryview]) -> bytes:
        """Return a checksum over the folder of the pack, the offset of the range, and its bytes."""
        state = xxhash.xxh3_128(f"{self._folder}/{start}".encode())
        for view in views:
            state.update(view)
        return state.digest()


def without_cache(storage: Storage) -> Storage:
    """Return the storage behind the cache, or the storage itself if it has none."""
    return storage.inner if isinstance(storage, CachedStorage) else storage


def forget(storage: Storage, key: str) -> bool:
    """Drop what is cached of an object; return whether anything was cached, so that a second read may differ."""
    return isinstance(storage, CachedStorage) and storage.forget(key)


def _read_whole(path: str, max_size: int) -> bytes | None:
    """Return a cached object, None if it is not cached; remove a file that is too long or damaged."""
    try:
        fd, status = open_regular(path)
        try:
            data = os.read(fd, status.st_size) if status.st_size <= max_size else b""
            if _is_intact(data):
                os.utime(fd)
                return data
        finally:
            os.close(fd)
    except OSError:
        return None
    _remove(path)
    return None


def _is_intact(data: bytes) -> bool:
    """Return whether an object ends in the right checksum of its other bytes."""
    return len(data) > CHECK_SIZE and digest(memoryview(data)[:-CHECK_SIZE]) == data[-CHECK_SIZE:]


def _slice(views: list[memoryview], low: int, high: int) -> list[memoryview]:
    """Return the bytes from `low` to `high` of the joined views."""
    parts, at = [], 0
    for view in views:
        part = view[max(0, low - at) : max(0, high - at)]
        if len(part):
            parts.append(part)
        at += len(view)
    return parts


def _remove(path: str) -> None:
    """Remove a file if it exists, and its folder if that is then empty."""
    with contextlib.suppress(OSError):
        os.unlink(path)
        os.rmdir(os.path.dirname(path))
