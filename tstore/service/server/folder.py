"""A local folder behind a server, in which no symbolic link is followed.

Processes that can write to the folder must be trusted: one that replaces a folder by a link between the check and
the open defeats the check.

Without TLS, all but small files are sent with `sendfile`. A received body goes to a temporary file piece by piece,
so that memory stays flat for objects of any length. The temporary files, `.upload.….tmp` in the store's folder,
are locked while they are written: a starting server removes unlocked ones, which a killed server left.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import AsyncIterator, Hashable
from io import FileIO

import xxhash

from tstore.core.runtime.pool import run, run_to_end
from tstore.core.storage.local.atomic_file import StagedFile, open_regular, write_all
from tstore.core.storage.local.store import LocalStorage, path_in
from tstore.core.storage.objects import Buffers, Durability, Page, PutMode, mapped_errors
from tstore.errors import Corrupt, Denied, NotFound
from tstore.service.server.kinds import Kind
from tstore.service.server.quotas import LIMITS
from tstore.service.server.served import MAX_READ_WHOLE, Incoming, OpenObject, ServedStorage

__all__ = ["ConfinedStorage", "ServedFolder"]

_PREFIX = "upload"
_MAX_COPIED = 16 << 10  # bytes; up to this size a file is faster to copy than to send with a separate `sendfile`
_CLOCK_TICK = 3.0  # seconds within which a file may change without a new modification time


class ConfinedStorage(LocalStorage):
    """The files below one folder; raise `Denied` for a key that is a link, or below one."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(os.path.realpath(root), _confined_path, _status_of_file)


def _status_of_file(path: str) -> os.stat_result:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return status


def _confined_path(root: str, key: str) -> str:
    """Return the path of a key; raise `Denied` if it is a link, or a folder above it is a link or not a folder."""
    path, part = path_in(root, key), root
    try:
        for folder in key.split("/")[:-1]:
            part = f"{part}/{folder}"
            if not stat.S_ISDIR(os.lstat(part).st_mode):
                raise Denied(f"{part} is a link or not a folder; a server follows no links below its store")
        if stat.S_ISLNK(os.lstat(path).st_mode):
            raise Denied(f"{path} is a link; a server follows no links below its store")
    except FileNotFoundError:
        pass
    return path


class ServedFolder(ServedStorage):
    """The folder of a store, as a server uses it."""

    storage: ConfinedStorage

    def __init__(self, folder: str, wait: float = LIMITS.wait) -> None:
        super().__init__(ConfinedStorage(folder), wait)

    @contextlib.asynccontextmanager
    async def open(self, key: str, kind: Kind) -> AsyncIterator[OpenObject]:
        opened, file = await run(self._open, key, kind)
        try:
            yield opened
        finally:
            file.close()

    async def page(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[Page, str | None]:
        return await self.storage.page(prefix, delimiter, after, limit)

    async def remove_unfinished(self) -> None:
        await run(self._remove_unfinished)

    async def remove_empty_folder(self, folder: str) -> None:
        page, _ = await self.page(f"{folder}/", "", "", 1)
        if not page.entries:
            await self.storage.delete(folder)

    @contextlib.asynccontextmanager
    async def incoming(self, key: str, client: Hashable, mode: PutMode) -> AsyncIterator[Incoming]:
        incoming = _IncomingFile(self.storage, await run(self.storage.path, key), mode)
        try:
            await run(incoming.open)
            yield incoming
            await run(incoming.finish)
        finally:
            await run_to_end(run(incoming.close))

    def _remove_unfinished(self) -> None:
        try:
            staged = StagedFile.create_locked(self.storage.url, _PREFIX, Durability.NONE)
        except OSError:
            return  # the folder does not exist yet, or is read-only
        with contextlib.closing(staged):
            staged.remove_abandoned()

    def _open(self, key: str, kind: Kind) -> tuple[OpenObject, FileIO]:
        path = self.storage.path(key)
        try:
            with mapped_errors("read", path):
                fd, status = open_regular(path, os.O_NOFOLLOW)
        except Corrupt as error:
            raise NotFound(str(error)) from error
        file = FileIO(fd)
        age = max(0.0, time.time() - status.st_mtime)
        if kind.replaceable and status.st_size <= MAX_READ_WHOLE:  # a replacement may have the same time and size
            data = file.read(MAX_READ_WHOLE)
            return OpenObject(len(data), xxhash.xxh3_128_hexdigest(data), age, status.st_mtime, data), file
        may_change = kind.replaceable and age < _CLOCK_TICK
        etag = None if may_change else f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
        data = file.read(_MAX_COPIED) if status.st_size <= _MAX_COPIED else b""
        source = data if len(data) == status.st_size else file
        return OpenObject(status.st_size, etag, age, status.st_mtime, source), file


class _IncomingFile:
    """An object being received into a temporary file."""

    def __init__(self, storage: ConfinedStorage, path: str, mode: PutMode) -> None:
        self._storage = storage
        self._path = path
        self._mode = mode
        self._staged: StagedFile | None = None
        self._end = 0

    async def write(self, pieces: Buffers) -> None:
        await run(self._write, pieces)

    def open(self) -> None:
        """Open the temporary file. Blocking."""
        with mapped_errors("create", self._path):
            self._storage.make_folder(self._storage.url, Durability.FSYNC)
            self._staged = StagedFile.create_locked(self._storage.url, _PREFIX, Durability.FSYNC)

    def finish(self) -> None:
        """Give the file its name. Blocking."""
        assert self._staged is not None
        with mapped_errors("create", self._path):
            self._staged.sync()
            self._storage.make_folder(os.path.dirname(self._path), Durability.FSYNC)
            self._staged.publish(self._path, self._mode)

    def close(self) -> None:
        """Remove the temporary file, if it exists; may be called repeatedly. Blocking."""
        if self._staged is not None:
            self._staged.close()

    def _write(self, pieces: Buffers) -> None:
        assert self._staged is not None
        with mapped_errors("write", self._path):
            self._end += write_all(self._staged.fd, pieces, self._end)
