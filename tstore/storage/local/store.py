"""Objects as files below a folder of a POSIX file system.

Create, so that a crash at any point leaves the whole object under its name or none:

1. Make the missing folders; fsync the parent of each folder the first time this process relies on it (another
   process may have made it and died before its own fsync).
2. Make the file appear whole, or not at all where the name is taken, with its folder made durable (`newfile`).
3. Acknowledge.

Packs are written in place, under names that nobody else uses, and mean nothing until a record refers to them.

A backend keeps up to 64 packs open for reading, and closes those that it deletes itself. The system frees the
space of a deleted file only once every process, and every other `Store`, that has it open has closed it too.

So a commit forces what it wrote to the disk in this order (`durability="fsync"`), each before the next:

1. The bytes of each pack: preallocate, write at increasing offsets, cut to size, fsync the file.
2. The names of the packs: `settle` fsyncs the parents of `txn/<id>/` and then that folder, once for all packs.
3. Where the manifest is an object of its own (and for each fragment of a group): its bytes, under a temporary
   name; link; its folder.
4. Where an earlier commit was not durable, everything (sync).
5. The bytes of the record, under a temporary name, and the parents of `commits/`.
6. link(2): from here on others see the commit. Whoever builds on it before 7 forces `commits/` itself.
7. The folder `commits/`. Now the commit is acknowledged.

A power failure before 6 leaves the old version, between 6 and 7 the old or the new, after 7 the new. Nothing is
renamed over or written twice, the `latest` hint and the heartbeats of hosts apart, which may be lost or torn.
`tests/guarantees/test_power.py` replays all of this.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tstore.errors import NotFound
from tstore.runtime.pool import WORKERS, run
from tstore.storage.base import (
    TOGETHER,
    Capabilities,
    Durability,
    Keys,
    Leading,
    Transfer,
    bound,
    checked_key,
    overlong,
)
from tstore.storage.local.atomic_file import (
    NewFile,
    explained,
    fsync_folder,
    new_file,
    remove_unfinished,
    write_all,
)
from tstore.storage.local.offer import LocalOffer
from tstore.storage.local.pack import LocalPack, LocalReader

__all__ = ["LocalBackend"]

_FIRST, _MORE = 64 << 10, 64 << 20  # bytes read at once
_OPEN_READERS = 64
_LONG_AGO = 7 * 86_400  # seconds


class LocalBackend:
    """The files below one folder, which need not exist before the first create."""

    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=True)
    transfer = Transfer(streams=WORKERS, batch=4 << 20, piece=1 << 20, gap=32 << 10)  # verified in the caches

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.url = os.path.abspath(os.fspath(root))
        self._durable_folders: set[str] = set()
        self._readers: OrderedDict[str, LocalReader] = OrderedDict()
        self._lock = threading.Lock()

    async def get(self, key: str, most: int | None = None) -> bytes:
        return await run(self._get, key, most)

    async def size(self, key: str) -> int | None:
        return await run(self._size, key)

    async def create(self, key: str, data: bytes, durability: Durability) -> None:
        await run(self._create, key, data, durability)

    async def leading(self, keys: Iterable[str]) -> Leading:
        return await run(self._leading, keys)

    def offer(self, data: bytes, durability: Durability) -> LocalOffer:
        return LocalOffer(data, durability, self.path, self.make_folder)

    async def hint(self, key: str, data: bytes) -> None:
        await run(self._hint, key, data)

    async def empty(self) -> bool:
        return await run(self._empty)

    async def list(self, prefix: str) -> Keys:
        return await run(self._list, prefix)

    async def folders(self, prefix: str) -> Keys:
        return await run(self._folders, prefix)

    async def age(self, prefix: str) -> float | None:
        return await run(self._age, prefix)

    async def delete(self, key: str) -> None:
        await run(self._delete, key)

    async def settle(self, prefix: str, durability: Durability) -> None:
        if durability is Durability.FSYNC:
            await run(self._settle, prefix)

    async def flush(self) -> None:
        await run(os.sync)

    async def sweep(self) -> None:
        await run(self._sweep)

    async def close(self) -> None:
        with self._lock:
            self._readers.clear()

    @contextlib.contextmanager
    def created(self, key: str, durability: Durability) -> Iterator[int]:
        """The descriptor of a new object, which appears whole when the block ends without an exception.

        Blocking. `AlreadyExists` at the end where the key is taken by then.
        """
        path = self.path(key)
        folder = os.path.dirname(path)
        with explained("create", path):
            self.make_folder(folder, durability)
            with new_file(path, durability) as fd:
                yield fd

    def make_folder(self, folder: str, durability: Durability) -> None:
        """Makes a folder, if it is missing, and durable if asked. Blocking."""
        os.makedirs(folder, exist_ok=True)
        if durability is Durability.FSYNC:
            self._make_durable(folder)

    def writer(self, key: str, durability: Durability) -> LocalPack:
        path = self.path(key)
        with explained("create", path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            return LocalPack(key, path, durability, discarded=self._close_reader)

    def upload(self, key: str, size: int, durability: Durability) -> NewFile:
        path = self.path(key)
        with explained("create", path):
            self.make_folder(os.path.dirname(path), durability)
            return NewFile(key, path, size, durability)

    def reader(self, key: str) -> LocalReader:
        with self._lock:
            found = self._readers.get(key)
            if found is not None:
                self._readers.move_to_end(key)
                return found
        path = self.path(key)
        with explained("open", path):
            opened = LocalReader(path)
        with self._lock:
            self._readers[key] = opened
            if len(self._readers) > _OPEN_READERS:
                self._readers.popitem(last=False)  # closed when its last user lets go of it
        if opened.is_deleted:  # between the open and its place in the cache, where the deletion did not find it
            self._close_reader(key)
        return opened

    def _close_reader(self, key: str) -> None:
        """Closes the descriptor of a deleted object once its last reader is done, so that its space is freed."""
        with self._lock:
            self._readers.pop(key, None)

    def path(self, key: str) -> str:
        """The path of an object."""
        return f"{self.url}/{checked_key(key, self.url)}"

    def _get(self, key: str, most: int | None = None) -> bytes:
        path = self.path(key)
        with explained("read", path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for
            try:
                data = os.read(fd, _FIRST)  # all of it, as a rule
                most = bound(key, most, data)
                if len(data) == _FIRST:
                    data = _rest(fd, data, most)
            finally:
                os.close(fd)
        if len(data) > most:
            raise overlong(path, most)
        return data

    def _leading(self, keys: Iterable[str]) -> Leading:
        found: list[bytes] = []
        missing, size = "", 0
        for key in keys:
            if size > TOGETHER and len(found) > 1:
                return Leading(found, False, cut=True)
            if missing:
                if self._size(key) is None:
                    break
                try:  # what is behind it came later, unless there is a hole
                    found.append(self._get(missing))
                except NotFound:
                    return Leading(found, True)
                missing = ""
            try:
                found.append(self._get(key))
                size += len(found[-1])
            except NotFound:
                missing = key
        return Leading(found, False)

    def _size(self, key: str) -> int | None:
        path = self.path(key)
        try:
            with explained("look at", path):
                return os.stat(path).st_size
        except NotFound:
            return None

    def _create(self, key: str, data: bytes, durability: Durability) -> None:
        path = self.path(key)
        with explained("create", path):
            if os.path.lexists(path):  # a race that is lost already shall cost no write and no fsync
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        with self.created(key, durability) as fd:
            write_all(fd, [data], 0)

    def _hint(self, key: str, data: bytes) -> None:
        path = self.path(key)
        temporary = f"{os.path.dirname(path)}/.{secrets.token_hex(8)}.tmp"
        with explained("write", path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            try:
                Path(temporary).write_bytes(data)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):  # it may never have been made; what failed is what is told
                    os.unlink(temporary)
                raise

    def _empty(self) -> bool:
        try:
            with explained("list", self.url), os.scandir(self.url) as entries:
                return all(e.name.startswith(".") and e.name.endswith(".tmp") for e in entries)
        except NotFound:
            if os.path.lexists(self.url) and not os.path.isdir(self.url):
                raise  # a file stands where the folder should be
            return True  # also where another host has made the folder since

    def _list(self, prefix: str) -> Keys:
        top = self.path(prefix.rpartition("/")[0]) if "/" in prefix else self.url
        found = []
        with explained("list", top):
            for folder, folders, names in os.walk(top, onerror=_raise_unless_missing):
                base = os.path.relpath(folder, self.url).replace(os.sep, "/")
                base = "" if base == "." else f"{base}/"
                found += [f"{base}{n}" for n in names if not n.startswith(".")]
                folders[:] = [n for n in folders if f"{base}{n}/".startswith(prefix[: len(f"{base}{n}/")])]
        return sorted(k for k in found if k.startswith(prefix))

    def _delete(self, key: str) -> None:
        path = self.path(key)
        with explained("delete", path), contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path) and not os.path.islink(path):
                self._delete_folder(path)
            else:
                os.unlink(path)
        self._close_reader(key)

    def _delete_folder(self, path: str) -> None:
        """Removes a folder that holds no object, with what creates that never ended left in it."""
        with os.scandir(path) as entries:
            names = [e.name for e in entries]
        if all(n.startswith(".") and n.endswith(".tmp") for n in names):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{path}/{name}")
            with contextlib.suppress(OSError):  # an object came into it
                os.rmdir(path)
        self._durable_folders.discard(path)

    def _folders(self, prefix: str) -> Keys:
        top, _, begin = prefix.rpartition("/")
        path = self.path(top) if top else self.url
        with explained("list", path):
            try:
                with os.scandir(path) as entries:
                    names = [e.name for e in entries if e.name.startswith(begin) and e.is_dir()]
            except FileNotFoundError:
                return []
        return sorted(n[len(begin) :] for n in names if not n.startswith("."))

    def _age(self, prefix: str) -> float | None:
        top = self.path(prefix)
        with explained("look at", top):
            try:
                with os.scandir(top) as entries:
                    written = [e.stat().st_mtime for e in entries]
                written.append(os.stat(top).st_mtime)
            except FileNotFoundError:
                return None  # deleted meanwhile
        return self._now() - max(written)

    def _now(self) -> float:
        """The time by the clock that dates the files: of a network's file system it is not this machine's."""
        try:
            with tempfile.TemporaryFile(prefix=".", dir=self.url) as new:
                return os.fstat(new.fileno()).st_mtime
        except OSError:  # it can't be written
            return time.time()

    def _sweep(self) -> None:
        """In the folders of objects that are never removed; a transaction's go with it."""
        before = self._now() - _LONG_AGO
        for folder in (self.url, self.path("commits"), self.path("roots")):
            with explained("tidy", folder):
                remove_unfinished(folder, ".", before)

    def _settle(self, prefix: str) -> None:
        folder = self.path(prefix)
        with explained("fsync", folder):
            self._make_durable(folder)
            fsync_folder(folder)

    def _make_durable(self, folder: str) -> None:
        """fsyncs the parents through which the folder is reached, once per folder and process."""
        missing = []
        while folder not in self._durable_folders:
            missing.append(folder)
            folder = os.path.dirname(folder)
            if folder == os.path.dirname(folder):
                break
        for found in reversed(missing):
            try:
                fsync_folder(os.path.dirname(found))
            except PermissionError:
                if len(found) > len(self.url):
                    raise  # a folder above the store may be closed to us; then we have not made it either
            self._durable_folders.add(found)


def _rest(fd: int, begun: bytes, most: int) -> bytes:
    """A whole file, or one byte more than it may have."""
    pieces, left = [begun], most + 1 - len(begun)
    while left > 0 and (piece := os.read(fd, min(_MORE, left))):
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _raise_unless_missing(error: OSError) -> None:
    if error.errno != errno.ENOENT:
        raise error
