"""Objects as files below a folder of a POSIX file system.

A create leaves the whole object under its name, or nothing, even if the machine crashes meanwhile:

1. Create the missing folders. The first time this storage uses a folder, fsync its parent: another process may
   have created the folder and died before the fsync.
2. Create the file whole, or not at all if its name is taken; make its folder durable (`atomic_file`). Acknowledge.

Packs are written in place, under names that nobody else uses; others read them only after a record refers to them.

A storage keeps up to 64 packs open for reading, and closes those that it deletes. The system frees the space of a
deleted file only when all other readers, in this or another process, have closed it too.

A commit with `durability="fsync"` forces what it has written to disk in this order:

1. The bytes of each pack: preallocate, write at increasing offsets, cut to size, fsync the file.
2. The names of the packs: `flush` fsyncs the parents of `txn/<id>/` and then that folder, once for all packs.
3. The manifest, if it is a separate object, and each fragment of a cooperative transaction: fsync the file
   under a temporary name, link it to its key, fsync its folder.
4. Everything (sync), if an earlier commit was not durable.
5. The bytes of the record, under a temporary name, and the parents of `commits/`.
6. link(2): now other processes see the commit. A writer that builds on it before step 7 fsyncs `commits/` too.
7. The folder `commits/`. Now the commit is acknowledged.

A power failure before step 6 leaves the old version, between 6 and 7 the old or the new, after 7 the new. Nothing
is renamed over or written twice, except the `latest` hint and the heartbeats of hosts, which may be lost or torn,
and the records that `tstore repair` replaces by void ones. `tests/guarantees/test_power.py` replays all of this.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from typing import Any

from tstore.core.runtime.concurrency import QuickCalls, batched, together
from tstore.core.runtime.pool import WORKERS, run
from tstore.core.storage.base import LEADING_BYTES, Leading, Objects, Storage
from tstore.core.storage.local.atomic_file import (
    LocalStagedObject,
    fsync_folder,
    new_file,
    remove_unfinished,
    sync_existing,
    write_all,
)
from tstore.core.storage.local.listing import Listing
from tstore.core.storage.local.pack import LocalPack, LocalReader, LocalUpload, read_leading, read_whole
from tstore.core.storage.objects import (
    SHORT_OBJECT,
    Buffers,
    Capabilities,
    Durability,
    Entry,
    Keys,
    Page,
    PutMode,
    Tuning,
    checked_key,
    mapped_errors,
    raise_mapped,
)
from tstore.errors import Corrupt, NotFound

__all__ = ["LocalStorage", "path_in"]

_QUICK_READS = 5e-3  # seconds; cached files take 20 µs each
_OPEN_READERS = 64
_SWEPT_AGE = 7 * 86_400  # seconds after which a temporary file can't belong to a create under way
_PAGE_LENGTH = 1000  # keys and folders


class LocalStorage(Storage):
    """The files below one folder, which need not exist before the first create."""

    capabilities = Capabilities(
        conditional_create=True, listing=True, ranges=True, durable=True, folders=True, native_io=True
    )
    # small batches, so that chunks are verified while they are in the processor's caches
    tuning = Tuning(streams=WORKERS, batch=4 << 20, piece=1 << 20, gap=32 << 10)

    def __init__(
        self,
        root: str | os.PathLike[str],
        path_of: Callable[[str, str], str] | None = None,
        status_of: Callable[[str], os.stat_result] | None = None,
    ) -> None:
        """Use the files below `root`; `path_of` replaces `path_in`, and `status_of` replaces `os.stat`."""
        self.url = os.path.abspath(os.fspath(root))
        self._path_of = path_in if path_of is None else path_of
        self._status_of = os.stat if status_of is None else status_of
        self._durable_folders: set[str] = set()
        self._readers: OrderedDict[str, LocalReader] = OrderedDict()
        self._lock = threading.Lock()
        self._reads, self._creates = QuickCalls(), QuickCalls()

    @functools.cached_property
    def _listing(self) -> Listing:
        return Listing(self.url, self._path_of)

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        return await run(self._get, key, max_size)

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        await run(lambda: self.reader(key).read_into(offset, buffers, size))

    async def head(self, key: str) -> Entry | None:
        return await run(self._head, key)

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        if mode is PutMode.CREATE:
            await run(self._create, key, buffers, durability)
        else:
            await run(self._replace, key, buffers, durability)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        after: str | None = ""
        while after is not None:
            page, after = await self.page(prefix, delimiter, after, _PAGE_LENGTH)
            yield page

    async def page(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[Page, str | None]:
        """Return up to `limit` names after `after`, and the last of these names if more follow, else None."""
        return await run(self._listing.page, prefix, delimiter, after, limit)

    async def delete(self, key: str) -> None:
        await run(self._delete, key)

    async def close(self) -> None:
        with self._lock:
            self._readers.clear()

    async def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for batch in batched(keys):
            sizes |= await self._reads.run(self._sizes, batch)
        return sizes

    def leading(self, keys: Iterable[str], unless: str = "") -> Coroutine[Any, Any, Leading]:
        return self._reads.run(self._leading_unless, keys, unless)

    async def short_objects(self, keys: Iterable[str]) -> Objects:
        keys = list(keys)
        objects = await run(self._read_quickly, keys)
        others = keys[len(objects) :]  # the disk is waited for, so wait for many objects at once
        return [*objects, *await together(lambda key: run(self._get_short, key), others)]

    def stage(self, data: bytes, durability: Durability) -> LocalStagedObject:
        return LocalStagedObject(data, durability, self.path, self.make_folder, self._head, self._creates)

    async def empty(self) -> bool:
        return await run(self._listing.empty)

    async def enclosing(self, key: str) -> str | None:
        return await run(self._listing.enclosing, key)

    async def list(self, prefix: str) -> Keys:
        return await run(self._listing.keys, prefix)

    async def folders(self, prefix: str) -> Keys:
        return await run(self._listing.folders, prefix)

    async def age(self, prefix: str) -> float | None:
        return await run(self._age, prefix)

    async def flush(self, prefix: str, durability: Durability) -> None:
        if durability is Durability.FSYNC:
            await run(self._flush, prefix)

    async def sync(self) -> None:
        await run(os.sync)

    async def sweep(self) -> None:
        await run(self._sweep)

    def writer(self, key: str, durability: Durability) -> LocalPack:
        path = self.path(key)
        folder = os.path.dirname(path)
        with mapped_errors("create", path):
            if not os.path.isdir(folder):
                self._durable_folders.discard(folder)  # another process may have deleted it
                os.makedirs(folder, exist_ok=True)
            return LocalPack(key, path, durability, on_discard=self._drop_reader)

    def reader(self, key: str) -> LocalReader:
        with self._lock:
            cached = self._readers.get(key)
            if cached is not None:
                self._readers.move_to_end(key)
                return cached
        path = self.path(key)
        with mapped_errors("open", path):
            opened = LocalReader(path)
        with self._lock:
            self._readers[key] = opened
            if len(self._readers) > _OPEN_READERS:
                self._readers.popitem(last=False)  # closed when its last user drops it
        if opened.is_deleted:  # deleted after the open, but before the reader was cached
            self._drop_reader(key)
        return opened

    def upload(self, key: str, size: int, durability: Durability, mode: PutMode = PutMode.CREATE) -> LocalUpload:
        path = self.path(key)
        with mapped_errors("create", path):
            self.make_folder(os.path.dirname(path), durability)
            return LocalUpload(key, path, size, durability, mode, on_finish=self._drop_reader)

    def path(self, key: str) -> str:
        """Return the path of an object."""
        return self._path_of(self.url, key)

    def make_folder(self, folder: str, durability: Durability) -> None:
        """Create a folder if it is missing, and make it durable if asked. Blocking."""
        if folder in self._durable_folders:
            return  # created before; if a garbage collection has deleted it since, the write must fail
        os.makedirs(folder, exist_ok=True)
        if durability is Durability.FSYNC:
            self._make_durable(folder)

    def _drop_reader(self, key: str) -> None:
        """Drop the cached reader of an object that was deleted or replaced; its last user frees the space."""
        with self._lock:
            self._readers.pop(key, None)

    def _get(self, key: str, max_size: int | None = None) -> bytes:
        path = self.path(key)
        try:
            return read_whole(key, path, max_size)
        except OSError as error:
            raise_mapped("read", path, error)

    def _get_short(self, key: str) -> bytes | None:
        with contextlib.suppress(Corrupt, NotFound):
            return self._get(key, SHORT_OBJECT)
        return None

    def _read_quickly(self, keys: Sequence[str]) -> Objects:
        """Return the first short objects, those that are read within a few milliseconds."""
        end = time.perf_counter() + _QUICK_READS
        return [self._get_short(key) for key in itertools.takewhile(lambda _: time.perf_counter() < end, keys)]

    def _get_or_none(self, key: str) -> bytes | None:
        """Return an object, or None if it does not exist, as at the end of every search for newer records."""
        path = self.path(key)
        try:
            return read_whole(key, path, None)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise_mapped("read", path, error)

    def _leading_unless(self, keys: Iterable[str], unless: str) -> Leading:
        keys = iter(keys)
        objects, drawn = read_leading(self._path_of, self.url, keys, unless)
        if drawn is None:
            return Leading(objects, False)
        leading = self._leading(Leading(objects, False), itertools.chain(drawn, keys))
        return leading._replace(superseded=True) if unless and self._head(unless) is not None else leading

    def _leading(self, first: Leading, keys: Iterable[str]) -> Leading:
        objects = first.objects
        missing, size = "", sum(map(len, objects))
        for key in keys:
            if size > LEADING_BYTES and len(objects) > 1:
                return Leading(objects, False, truncated=True)
            if missing:
                if self._head(key) is None:
                    break
                created = self._get_or_none(missing)
                if created is None:
                    return Leading(objects, True)
                objects.append(created)  # meanwhile, so there is no hole
                missing = ""
            data = self._get_or_none(key)
            if data is None:
                missing = key
            else:
                objects.append(data)
                size += len(data)
        return Leading(objects, False)

    def _head(self, key: str) -> Entry | None:
        path = self._path_of(self.url, key)
        try:
            status = self._status_of(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise_mapped("stat", path, error)
        return Entry(key, status.st_size, max(0.0, time.time() - status.st_mtime))

    def _sizes(self, keys: Iterable[str]) -> dict[str, int]:
        sizes = {}
        for key in keys:
            path = self._path_of(self.url, key)
            try:
                sizes[key] = self._status_of(path).st_size
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise_mapped("stat", path, error)
        return sizes

    def _create(self, key: str, buffers: Buffers, durability: Durability) -> None:
        path = self.path(key)
        with mapped_errors("create", path):
            try:
                if os.path.lexists(path):  # a race that is already lost should cost no write
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
                self.make_folder(os.path.dirname(path), durability)
                with new_file(path, durability) as fd:
                    write_all(fd, buffers, 0)
            except FileExistsError:
                if durability is Durability.FSYNC:
                    self._make_durable(os.path.dirname(path))
                    sync_existing(path)
                raise

    def _replace(self, key: str, buffers: Buffers, durability: Durability) -> None:
        path = self.path(key)
        with mapped_errors("write", path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with new_file(path, durability, PutMode.REPLACE) as fd:
                write_all(fd, buffers, 0)
        self._drop_reader(key)

    def _delete(self, key: str) -> None:
        path = self.path(key)
        with mapped_errors("delete", path), contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                self._delete_folder(path)
            else:
                os.unlink(path)
        self._drop_reader(key)

    def _delete_folder(self, path: str) -> None:
        """Remove a folder without objects, and the temporary files of creates that failed in it."""
        with os.scandir(path) as entries:
            names = [e.name for e in entries]
        if all(n.startswith(".") and n.endswith(".tmp") for n in names):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{path}/{name}")
            with contextlib.suppress(OSError):  # an object may have been created in it
                os.rmdir(path)
        self._durable_folders.discard(path)

    def _age(self, prefix: str) -> float | None:
        top = self.path(prefix)
        with mapped_errors("stat", top):
            try:
                with os.scandir(top) as entries:
                    times = [e.stat().st_mtime for e in entries]
                times.append(os.stat(top).st_mtime)
            except FileNotFoundError:
                return None  # there is no such folder
        return self._now() - max(times)

    def _now(self) -> float:
        """Return the time by the clock of the file system, which may be on another machine."""
        try:
            with tempfile.TemporaryFile(prefix=".", dir=self.url) as file:
                return os.fstat(file.fileno()).st_mtime
        except OSError:  # the folder may be read-only
            return time.time()

    def _sweep(self) -> None:
        """Remove old temporary files. A transaction's folder is not swept, because it is deleted whole."""
        before = self._now() - _SWEPT_AGE
        for folder in (self.url, *map(self.path, ("commits", "roots", "archives"))):
            with mapped_errors("sweep", folder):
                remove_unfinished(folder, ".", before)

    def _flush(self, prefix: str) -> None:
        folder = self.path(prefix) if prefix else self.url
        with mapped_errors("fsync", folder):
            self._make_durable(folder)
            fsync_folder(folder)

    def _make_durable(self, folder: str) -> None:
        """Fsync the folders above this one, so that its path is durable; once per folder and storage."""
        pending = []
        while folder not in self._durable_folders:
            pending.append(folder)
            folder = os.path.dirname(folder)
            if folder == os.path.dirname(folder):
                break
        for path in reversed(pending):
            try:
                fsync_folder(os.path.dirname(path))
            except PermissionError:
                # a folder above the store may be unreadable; this process then did not create it
                if len(path) > len(self.url):
                    raise
            self._durable_folders.add(path)


@functools.lru_cache(256)
def path_in(root: str, key: str) -> str:
    """Return the path of a key below a folder; raise `InvalidArgument` if it is not valid."""
    return f"{root}/{checked_key(key, root)}"
