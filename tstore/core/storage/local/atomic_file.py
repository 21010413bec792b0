"""A local file that appears whole or not at all, and replaces an existing one only on request.

1. Its bytes are written under a temporary name, `.<prefix>.<random>.tmp`, and made durable (fsync). The prefix
   is usually a digest of the file's name. If several names are tried, the bytes are written only once.
2. link(2) gives the file its name, and fails if the name exists. If it reports an error although the name is that
   of the temporary file, the reply was lost (as on NFS), and the file was created. If links are not supported,
   renameat2(RENAME_NOREPLACE) replaces steps 2 and 3. So does rename(2) for a file that replaces another.
3. The temporary name is removed. If that fails it stays, and costs only space (`Storage.sweep`).
4. The folder is made durable (fsync). If that fails for any reason, the file exists but may not survive a
   power failure, so the error is `Unavailable`.

If the name already exists, the process that created it may have been killed before step 4. So whoever finds it
makes it durable (`sync_existing`), unless it only looks for a free name.

A process killed before step 2 leaves the temporary file; a process killed after it leaves the whole file. The
temporary file of an upload (`pack.LocalUpload`, or an upload to `tstore serve`) is locked with flock(2) while its
writer lives. The next writer of the same object, or the next `tstore serve`, removes unlocked temporary files.
Where files can't be locked, as on some network mounts, it removes those not written for an hour.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import math
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Self

from tstore.core.runtime.concurrency import QuickCalls
from tstore.core.runtime.pool import run
from tstore.core.storage.objects import Buffers, BufferStream, Durability, Entry, PutMode, mapped_errors
from tstore.errors import AlreadyExists, Denied, Unavailable

__all__ = [
    "IOV_MAX",
    "NO_LINKS",
    "LocalStagedObject",
    "StagedFile",
    "fsync_folder",
    "give_name",
    "name_digest",
    "new_file",
    "new_folder",
    "open_regular",
    "remove_unfinished",
    "rest_of",
    "start_writeback",
    "sync_existing",
    "write_all",
]

NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.ENOTSUP}
"""The errors of link(2) where files can't be linked."""

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP}  # errors of stat(2)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


def give_name(fd: int, temporary: str, path: str) -> None:
    """Give an open temporary file its final name; raise OSError only if it does not get that name."""
    try:
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in NO_LINKS or _is_name_of(fd, path):
                raise
            _rename_no_replace(temporary, path)
    except OSError:
        if not _is_name_of(fd, path):
            raise


def _is_name_of(fd: int, path: str) -> bool:
    """Return whether the path is a name of an open file; raise `Unavailable` if that can't be determined."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise Unavailable(
            f"whether {path} was created is unknown: can't stat it: {error.strerror or error}; try again, or "
            "check the disk"
        ) from error


def _rename_no_replace(temporary: str, path: str) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    error_number = errno.ENOSYS
    if renameat2 is not None:
        source, target = os.fsencode(temporary), os.fsencode(path)
        if not renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE):
            return
        error_number = ctypes.get_errno()
    if error_number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise Denied(
            f"{path}: the file system supports neither link(2) nor renaming without replacing, so files can't be "
            "created atomically; use another file system"
        )
    raise OSError(error_number, os.strerror(error_number), path)


_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}  # errors of flock(2)
_ABANDONED = 3600  # seconds without a write, where files can't be locked

IOV_MAX = 1024
"""The maximum number of buffers in one system call."""


def open_regular(path: str, flags: int = 0) -> tuple[int, os.stat_result]:
    """Open a file for reading, and return its descriptor and status.

    Raise OSError, with ENXIO for anything but a regular file. Opening a pipe does not wait.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO), path)
    return fd, status


class StagedFile:
    """A file under a temporary name in a folder, open for writing as `fd`, until it is published or closed."""

    def __init__(self, folder: str, prefix: str, durability: Durability) -> None:
        self._folder = folder
        self._prefix = prefix
        self._durability = durability
        self._temporary = f"{folder}/.{prefix}.{os.urandom(8).hex()}.tmp"
        self.fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    @classmethod
    def create_locked(cls, folder: str, prefix: str, durability: Durability) -> Self:
        """Return a new file that is locked, if possible, for as long as this process has it open."""
        while True:
            file = cls(folder, prefix, durability)
            try:
                if _lock(file.fd) is not False and os.fstat(file.fd).st_nlink:
                    return file
            except BaseException:
                file.close()
                raise
            file.close()  # another process removed it before it was locked

    def sync(self) -> None:
        """Make the bytes durable, if `durability` asks for it."""
        if self._durability is Durability.FSYNC:
            os.fsync(self.fd)

    def publish(self, path: str, mode: PutMode = PutMode.CREATE) -> None:
        """Give the file its name, on the same file system; call `sync` first.

        Raise FileExistsError if the name of a create is taken; then another name can be tried. After `Unavailable`
        the file may have the name; after any other error it does not.
        """
        if mode is PutMode.CREATE:
            give_name(self.fd, self._temporary, path)
        else:
            os.replace(self._temporary, path)
        self.close()
        if self._durability is Durability.FSYNC:
            folder = os.path.dirname(path) or "."
            try:
                fsync_folder(folder)
            except OSError as error:
                raise Unavailable(
                    f"{path} was written, but can't fsync {folder}: {error.strerror or error}, so a power failure "
                    "may undo that; try again, or check the disk"
                ) from error

    def close(self) -> None:
        """Close the file and remove its temporary name, if that is possible; may be called more than once."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            with contextlib.suppress(OSError):  # synced bytes stay
                try:
                    os.close(fd)
                finally:
                    os.unlink(self._temporary)

    def remove_abandoned(self) -> None:
        """Remove the temporary files of the same prefix whose writers have died."""
        can_lock = _lock(self.fd) is not None
        now = os.fstat(self.fd).st_mtime  # by the clock of the file system
        remove_unfinished(self._folder, f".{self._prefix}.", math.inf if can_lock else now - _ABANDONED)


@contextlib.contextmanager
def new_file(path: str, durability: Durability, mode: PutMode = PutMode.CREATE) -> Iterator[int]:
    """Yield the descriptor of a file that appears at `path` if the block ends without an exception.

    Raise OSError (FileExistsError if the name of a create is taken by then). No temporary file is left.
    """
    file = StagedFile(os.path.dirname(os.path.abspath(path)), name_digest(path), durability)
    try:
        yield file.fd
        file.sync()
        file.publish(path, mode)
    finally:
        file.close()


@contextlib.contextmanager
def new_folder(path: str) -> Iterator[str]:
    """Yield a temporary folder that appears at `path` if the block ends without an exception.

    The caller makes the files in the folder durable. Raise OSError (FileExistsError if the name is taken). A
    process that is killed meanwhile leaves the temporary folder, `.<prefix>.<random>.tmp`.
    """
    parent, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(parent, f".{name_digest(name)}.{secrets.token_hex(8)}.tmp")
    os.mkdir(temporary)
    try:
        yield temporary
        fsync_folder(temporary)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        os.rename(temporary, path)  # replaces at most an empty folder that appeared meanwhile
        fsync_folder(parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _lock(fd: int) -> bool | None:
    """Lock a file; return False if another process has locked it, None if files can't be locked here."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def remove_unfinished(folder: str, prefix: str, before: float) -> None:
    """Remove the unlocked temporary files whose names start with `prefix`, last written before `before`."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_file(follow_symlinks=False)]
    except FileNotFoundError:
        return
    for temporary in [f"{folder}/{n}" for n in names if n.startswith(prefix) and n.endswith(".tmp")]:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            fd = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_mtime < before and _lock(fd) is not False:
                    os.unlink(temporary)
            finally:
                os.close(fd)


def write_all(fd: int, buffers: BufferStream, offset: int) -> int:
    """Write all buffers at the offset and return their size."""
    end = offset
    if isinstance(buffers, list) and len(buffers) <= IOV_MAX:
        batches: Iterable[Buffers] = (buffers,)
    elif isinstance(buffers, Sequence):
        batches = (buffers[i : i + IOV_MAX] for i in range(0, len(buffers), IOV_MAX))
    else:
        batches = ([buffer] for buffer in buffers)
    for batch in batches:
        size = sum(map(len, batch))
        written = os.pwritev(fd, batch, end)
        while written < size:
            written += os.pwritev(fd, rest_of(batch, written), end + written)
        end += size
    return end - offset


def rest_of(buffers: Buffers, done: int) -> Buffers:
    """Return the rest of the buffers, after their first `done` bytes."""
    for i, buffer in enumerate(buffers):
        if done < len(buffer):
            return [memoryview(buffer)[done:], *buffers[i + 1 :]]
        done -= len(buffer)
    return []


def fsync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_existing(path: str) -> None:
    """Make an existing file and its name durable, unless it is deleted meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    fsync_folder(os.path.dirname(path) or ".")


def start_writeback(fd: int, offset: int, size: int) -> None:
    """Ask the system, if it can, to start writing these bytes to the disk, without waiting."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE)


class LocalStagedObject:
    """A `StagedObject` as a temporary file, which is written once, then linked to the first free name."""

    def __init__(
        self,
        data: bytes,
        durability: Durability,
        path_of: Callable[[str], str],
        make_folder: Callable[[str, Durability], None],
        head: Callable[[str], Entry | None],
        creates: QuickCalls,
    ) -> None:
        self._data = data
        self._durability = durability
        self._path_of = path_of
        self._make_folder = make_folder
        self._head = head
        self._creates = creates
        self._file: StagedFile | None = None

    async def write(self, key: str) -> None:
        await run(self._write_durably, key)

    async def create(self, key: str, unless: str = "") -> None:
        await self._creates.run(self._create, key, unless)

    async def discard(self) -> None:
        if self._file is not None:
            await run(self._file.close)

    def _write_durably(self, key: str) -> None:
        path = self._path_of(key)
        with mapped_errors("create", path):
            self._file = self._write(os.path.dirname(path))
            os.fsync(self._file.fd)

    def _create(self, key: str, unless: str) -> None:
        path = self._path_of(key)
        with mapped_errors("create", path):
            if self._file is None:
                self._file = self._write(os.path.dirname(path))
            try:
                self._file.publish(path)
            finally:
                if self._file.fd < 0:  # it has its name
                    self._file = None
        if unless and self._head(unless) is not None:
            raise AlreadyExists(f"{path} exists, in {unless}")

    def _write(self, folder: str) -> StagedFile:
        self._make_folder(folder, self._durability)
        file = StagedFile(folder, "object", self._durability)
        try:
            write_all(file.fd, [self._data], 0)
            file.sync()
        except BaseException:
            file.close()
            raise
        return file


def name_digest(path: str) -> str:
    """Return the prefix of a file's temporary files: a digest of its name, since the name could be too long."""
    return hashlib.blake2b(os.fsencode(os.path.basename(path)), digest_size=8).hexdigest()
