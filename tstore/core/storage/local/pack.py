"""Local files: packs, written in place; uploads, which appear when finished; and files that are read whole."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator

from tstore.core.storage.local.atomic_file import (
    IOV_MAX,
    StagedFile,
    name_digest,
    open_regular,
    rest_of,
    start_writeback,
    sync_existing,
    write_all,
)
from tstore.core.storage.objects import (
    Buffers,
    BufferStream,
    Durability,
    PutMode,
    mapped_errors,
    overlong,
    raise_mapped,
    read_limit,
    too_short,
)
from tstore.errors import StorageFull, Unavailable

__all__ = ["LocalPack", "LocalReader", "LocalUpload", "read_leading", "read_whole"]

_EXTENT = 16 << 20  # bytes to preallocate at a time
_WRITEBACK = 4 << 20  # after this many appended bytes, the system is asked to start writing them to the disk


class LocalPack:
    """A `PackWriter` that appends to a preallocated file, whose name no other writer uses.

    `on_discard` is called with the key after `discard` has deleted the file.
    """

    def __init__(self, key: str, path: str, durability: Durability, on_discard: Callable[[str], object]) -> None:
        self.key = key
        self._on_discard = on_discard
        self._durability = durability
        self._written_back = 0
        self._path = path
        self._end = 0
        self._reserved = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def append(self, buffers: BufferStream, size: int) -> int:
        offset = self._end
        if offset + size > self._reserved:
            try:
                self._reserve(max(size, _EXTENT))
            except StorageFull:
                self._reserve(size)  # on a disk that is nearly full, this smaller size may still fit
        with mapped_errors("write", self._path):
            self._end += write_all(self._fd, buffers, self._end)
        if self._durability is Durability.FSYNC and self._end - self._written_back >= _WRITEBACK:
            # the disk starts now, while the next chunks are encoded, rather than at the fsync
            start_writeback(self._fd, self._written_back, self._end - self._written_back)
            self._written_back = self._end
        return offset

    def finish(self) -> None:
        with mapped_errors("write", self._path):
            try:
                if self._reserved > self._end:
                    os.ftruncate(self._fd, self._end)
                if self._durability is Durability.FSYNC:
                    os.fsync(self._fd)
            finally:
                self._close()

    def discard(self) -> None:
        self._close()
        with mapped_errors("delete", self._path), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._on_discard(self.key)

    def _reserve(self, size: int) -> None:
        """Preallocate space for `size` more bytes; raise `StorageFull`."""
        if self._end + size <= self._reserved:
            return
        end = self._end + size
        with mapped_errors("write", self._path):
            try:
                os.posix_fallocate(self._fd, self._reserved, end - self._reserved)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    os.ftruncate(self._fd, self._reserved)  # free what was allocated before the failure
                    raise
        self._reserved = end

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalUpload:
    """A `PackWriter` whose file appears under its name when it is finished.

    `on_finish` is called with the key when the file has its name. Before the upload writes, it removes the
    temporary files that killed writers of the same object have left.
    """

    def __init__(
        self,
        key: str,
        path: str,
        size: int,
        durability: Durability,
        mode: PutMode,
        on_finish: Callable[[str], object],
    ) -> None:
        self.key = key
        self._path = path
        self._mode = mode
        self._on_finish = on_finish
        self._end = 0
        folder = os.path.dirname(os.path.abspath(path))
        self._file = StagedFile.create_locked(folder, name_digest(path), durability)
        self._fd = self._file.fd
        try:
            self._file.remove_abandoned()
            self._allocate(size)
        except BaseException:
            self.discard()
            raise

    def append(self, buffers: BufferStream, size: int) -> int:
        offset = self._end
        with mapped_errors("write", self._path):
            self._end += write_all(self._fd, buffers, self._end)
            start_writeback(self._fd, offset, self._end - offset)
        return offset

    def finish(self) -> None:
        with mapped_errors("create", self._path):
            try:
                self._file.sync()
                self._file.publish(self._path, self._mode)
            except FileExistsError:
                sync_existing(self._path)
                raise
            except FileNotFoundError as error:
                raise Unavailable(
                    f"{self._path} could not be created: its temporary file was removed, perhaps by another "
                    "`tstore copy` on a file system without locks; run one copy at a time"
                ) from error
            finally:
                self._file.close()
        self._on_finish(self.key)

    def discard(self) -> None:
        self._file.close()

    def _allocate(self, size: int) -> None:
        with mapped_errors("write", self._path):
            try:
                os.posix_fallocate(self._fd, 0, max(1, size))
                os.ftruncate(self._fd, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise


class LocalReader:
    """A `PackReader` that reads one open file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd, _ = open_regular(path)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    @property
    def is_deleted(self) -> bool:
        """Whether the file has been deleted."""
        return os.fstat(self._fd).st_nlink == 0

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        try:
            for i in range(0, len(buffers), IOV_MAX):
                batch = buffers[i : i + IOV_MAX]
                remaining = size if len(buffers) <= IOV_MAX else sum(len(b) for b in batch)
                done = os.preadv(self._fd, batch, offset)
                while done < remaining:
                    batch = rest_of(batch, done)
                    offset, remaining = offset + done, remaining - done
                    done = os.preadv(self._fd, batch, offset)
                    if done == 0:
                        raise too_short(self._path, offset, offset + remaining, offset)
                offset += done
        except OSError as error:
            raise_mapped("read", self._path, error)


try:
    from tstore.core.format import kernels
except ImportError:  # installed without a C compiler
    kernels = None  # type: ignore[assignment]


_FIRST_READ = 64 << 10  # bytes


def read_whole(key: str, path: str, max_size: int | None) -> bytes:
    """Return the bytes of an object's file; raise `Corrupt` if it is longer than `read_limit`, or OSError."""
    fd, status = open_regular(path)
    try:
        data = os.read(fd, _FIRST_READ)  # usually the whole object
        max_size = read_limit(key, max_size, data)
        if _FIRST_READ <= len(data) < status.st_size <= max_size:
            data = os.pread(fd, status.st_size, 0)  # whole: joining two parts takes twice the memory
    finally:
        os.close(fd)
    if max(len(data), status.st_size) > max_size:
        raise overlong(path, max_size)
    return data


def read_leading(
    path_of: Callable[[str, str], str], root: str, keys: Iterator[str], unless: str
) -> tuple[list[bytes], list[str] | None]:
    """Return the first objects, if they are short, and the keys drawn from `keys` that come next.

    Return None in place of these keys if neither the next object, the one after it, nor `unless` exists.
    """
    if kernels is None or sys.platform == "win32":
        return [], []
    return kernels.read_leading(path_of, root, keys, unless)
