"""A local file that appears whole or not at all, and never replaces another.

1. Its bytes go to a temporary name in the same folder, `.<digest of its name>.<random>.tmp`, and are made durable
   (fsync). A file that tries several names (`StagedFile`) does this once.
2. link(2) gives it its name, and fails if the name exists. If it reports "exists" but the temporary file has two
   links, the reply to our link was lost (NFS): created. If links are not supported, renameat2(RENAME_NOREPLACE)
   replaces steps 2 and 3.
3. The temporary name is removed.
4. The folder is made durable (fsync).

A process killed before 2 leaves the temporary file, after it the whole new one. A long temporary file (of
`NewFile`, or of an upload to a server) is locked with flock(2) while its writer lives; the next writer of the same
object, or the next server, removes those that are not locked. If files can't be locked, as on some network mounts,
it removes those without a write for an hour."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence

from tstore.errors import (
    AlreadyExists,
    Denied,
    InvalidArgument,
    NotFound,
    StorageFull,
    Unavailable,
)
from tstore.storage.objects import Buffers, BufferStream, Durability

__all__ = [
    "IOV_MAX",
    "NewFile",
    "StagedFile",
    "explained",
    "fsync_folder",
    "locked_draft",
    "new_file",
    "remove_unfinished",
    "rest_of",
    "start_writeback",
    "write_all",
]

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.ENOTSUP}
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
IOV_MAX = 1024
"""The most buffers of one system call."""
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}
_GIVEN_UP = 3600  # seconds


@contextlib.contextmanager
def explained(action: str, path: str) -> Iterator[None]:
    """Turn an OSError into the error of tstore that says what to do."""
    try:
        yield
    except OSError as error:
        what = f"can't {action} {path}: {error.strerror or error}"
        match error.errno:
            case errno.ENOTDIR:
                raise NotFound(
                    f"{what}: a file is there, or in place of a folder above it; give another path"
                ) from error
            case errno.ENOENT if action in ("create", "write"):
                raise NotFound(f"{what}; give a path in a folder that exists") from error
            case errno.ENOENT:
                raise NotFound(f"{what}; give the path of something that exists") from error
            case errno.EEXIST:
                raise AlreadyExists(f"{what}; choose another name") from error
            case errno.EISDIR | errno.ENAMETOOLONG | errno.ELOOP:
                raise InvalidArgument(f"{what}; give another path") from error
            case errno.EACCES | errno.EPERM | errno.EROFS:
                raise Denied(f"{what}; check the owner, the permissions and whether it is read-only") from error
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                raise StorageFull(f"{what}; make room or raise the limit, then repeat") from error
            case errno.EMFILE | errno.ENFILE:
                raise Unavailable(f"{what}; raise the limit of open files (ulimit -n)") from error
            case _:
                raise Unavailable(f"{what}; try again, or look at the disk") from error


class StagedFile:
    """A file under a temporary name in a folder, open for writing as `fd`, until it is published or closed."""

    def __init__(self, folder: str, mark: str, durability: Durability) -> None:
        self._folder = folder
        self._mark = mark
        self._durability = durability
        self._temporary = f"{folder}/.{mark}.{secrets.token_hex(8)}.tmp"
        self.fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def force(self) -> None:
        """Make its bytes durable, if asked."""
        if self._durability is Durability.FSYNC:
            os.fsync(self.fd)

    def publish(self, path: str) -> None:
        """Give it its name, in a folder of the same file system, after `force`.

        Raise FileExistsError if the name is taken; then another can be tried.
        """
        _link(self._temporary, path)
        self.close()
        if self._durability is Durability.FSYNC:
            fsync_folder(os.path.dirname(os.path.abspath(path)))

    def close(self) -> None:
        """Remove the temporary name; any number of times."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)

    def remove_abandoned(self) -> None:
        """Remove the temporary files of the same mark whose writers have ended."""
        locks = _lock(self.fd) is not None
        now = os.fstat(self.fd).st_mtime  # by the clock of the file system
        remove_unfinished(self._folder, f".{self._mark}.", math.inf if locks else now - _GIVEN_UP)


@contextlib.contextmanager
def new_file(path: str, durability: Durability) -> Iterator[int]:
    """Yield the descriptor of a file that appears at `path` if the block ends without an exception.

    Raise OSError (FileExistsError if the name is taken by then); no error leaves a new name.
    """
    draft = StagedFile(os.path.dirname(os.path.abspath(path)), _mark(path), durability)
    try:
        yield draft.fd
        draft.force()
        draft.publish(path)
    finally:
        draft.close()


def locked_draft(folder: str, mark: str, durability: Durability) -> StagedFile:
    """Return a staged file that is locked, if possible, as long as this process has it open."""
    while True:
        draft = StagedFile(folder, mark, durability)
        try:
            if _lock(draft.fd) is not False and os.fstat(draft.fd).st_nlink:
                return draft
        except BaseException:
            draft.close()
            raise
        draft.close()  # another process removed it before it was locked


def _lock(fd: int) -> bool | None:
    """Lock a file; return False if another process has locked it, None if files can't be locked."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def remove_unfinished(folder: str, begin: str, before: float) -> None:
    """Remove the unlocked temporary files whose names start with `begin`, without a write since `before`."""
    try:
        with os.scandir(folder) as entries:
            left = [e.path for e in entries if e.name.startswith(begin) and e.name.endswith(".tmp")]
    except FileNotFoundError:
        return
    for temporary in left:
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
    if isinstance(buffers, Sequence):
        parts: Iterable[Buffers] = (buffers[i : i + IOV_MAX] for i in range(0, len(buffers), IOV_MAX))
    else:
        parts = ([buffer] for buffer in buffers)
    for part in parts:
        wanted = sum(len(b) for b in part)
        done = os.pwritev(fd, part, end)
        while done < wanted:
            done += os.pwritev(fd, rest_of(part, done), end + done)
        end += wanted
    return end - offset


def rest_of(buffers: Buffers, done: int) -> Buffers:
    """Return the buffers without their first `done` bytes."""
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


def start_writeback(fd: int, offset: int, size: int) -> None:
    """Ask the system to begin writing these bytes to the disk, if it can, without waiting."""
    sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if sync_file_range is not None:
        sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)


class NewFile:
    """A `PackWriter` of a file that has its name only once it is finished.

    It removes the temporary files of earlier writers of the same name that were killed.
    """

    def __init__(self, key: str, path: str, size: int, durability: Durability) -> None:
        self.key = key
        self._path = path
        self._end = 0
        self._draft = locked_draft(os.path.dirname(os.path.abspath(path)), _mark(path), durability)
        self._fd = self._draft.fd
        try:
            self._draft.remove_abandoned()
            self._allocate(size)
        except BaseException:
            self.discard()
            raise

    def append(self, buffers: BufferStream, size: int) -> int:
        """See `PackWriter.append`."""
        offset = self._end
        with explained("write", self._path):
            self._end += write_all(self._fd, buffers, self._end)
            start_writeback(self._fd, offset, self._end - offset)
        return offset

    def finish(self) -> None:
        """See `PackWriter.finish`."""
        with explained("create", self._path):
            try:
                self._draft.force()
                self._draft.publish(self._path)
            except FileNotFoundError as error:
                raise Unavailable(
                    f"{self._path} could not be created: its temporary file was removed, as by another copy on a "
                    "file system that can't lock it; run one copy at a time"
                ) from error
            finally:
                self._draft.close()

    def discard(self) -> None:
        """See `PackWriter.discard`."""
        self._draft.close()

    def _allocate(self, size: int) -> None:
        with explained("write", self._path):
            try:
                os.posix_fallocate(self._fd, 0, max(1, size))
                os.ftruncate(self._fd, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise


def _mark(path: str) -> str:
    """Return the beginning of the temporary names of a file, of bounded length."""
    return hashlib.blake2b(os.fsencode(os.path.basename(path)), digest_size=8).hexdigest()


def _link(temporary: str, path: str) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        if os.stat(temporary).st_nlink != 2:
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_no_replace(temporary, path)


def _rename_no_replace(temporary: str, path: str) -> None:
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    number = errno.ENOSYS
    if renameat2 is not None:
        source, target = os.fsencode(temporary), os.fsencode(path)
        if not renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE):
            return
        number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise Denied(
            f"{path}: the file system can neither link(2) nor rename without replacing, so files can't "
            "be created atomically; use another file system"
        )
    raise OSError(number, os.strerror(number), path)
