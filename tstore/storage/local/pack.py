"""Packs as local files: preallocated, written at increasing offsets, read at any offset."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable

from tstore.errors import Corrupt, StorageFull
from tstore.storage.local.atomic_file import IOV_MAX, explained, rest_of, start_writeback, write_all
from tstore.storage.objects import Buffers, BufferStream, Durability

__all__ = ["LocalPack", "LocalReader"]

_EXTENT = 64 << 20
_SEND = 4 << 20


class LocalPack:
    """A `PackWriter` of a file with a name that nobody else uses.

    `discarded` is called with the key once the file is deleted.
    """

    def __init__(self, key: str, path: str, durability: Durability, discarded: Callable[[str], object]) -> None:
        self.key = key
        self._discarded = discarded
        self._durability = durability
        self._sent = 0
        self._path = path
        self._end = 0
        self._reserved = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def append(self, buffers: BufferStream, size: int) -> int:
        """See `PackWriter.append`."""
        offset = self._end
        if offset + size > self._reserved:
            try:
                self._reserve(max(size, _EXTENT))
            except StorageFull:
                self._reserve(size)  # the last room on a disk
        with explained("write", self._path):
            self._end += write_all(self._fd, buffers, self._end)
        if self._durability is Durability.FSYNC and self._end - self._sent >= _SEND:
            # the disk begins now, while the next chunks are encoded, and not only at the fsync
            start_writeback(self._fd, self._sent, self._end - self._sent)
            self._sent = self._end
        return offset

    def finish(self) -> None:
        """See `PackWriter.finish`."""
        with explained("write", self._path):
            try:
                if self._reserved > self._end:
                    os.ftruncate(self._fd, self._end)
                if self._durability is Durability.FSYNC:
                    os.fsync(self._fd)
            finally:
                self._close()

    def discard(self) -> None:
        """See `PackWriter.discard`."""
        self._close()
        with explained("delete", self._path), contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._discarded(self.key)

    def _reserve(self, size: int) -> None:
        """Preallocate room for `size` more bytes; raise `StorageFull`."""
        if self._end + size <= self._reserved:
            return
        end = self._end + size
        with explained("write", self._path):
            try:
                os.posix_fallocate(self._fd, self._reserved, end - self._reserved)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    os.ftruncate(self._fd, self._reserved)  # releases a part that was allocated
                    raise
        self._reserved = end

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalReader:
    """A `PackReader` of one open file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    @property
    def is_deleted(self) -> bool:
        """Whether the file has lost its name."""
        return os.fstat(self._fd).st_nlink == 0

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        """See `PackReader.read_into`."""
        with explained("read", self._path):
            for i in range(0, len(buffers), IOV_MAX):
                part = buffers[i : i + IOV_MAX]
                wanted = size if len(buffers) <= IOV_MAX else sum(len(b) for b in part)
                done = os.preadv(self._fd, part, offset)
                while done < wanted:
                    part = rest_of(part, done)
                    offset, wanted = offset + done, wanted - done
                    done = os.preadv(self._fd, part, offset)
                    if done == 0:
                        raise Corrupt(
                            f"{self._path} is cut short: {wanted} bytes are missing at {offset}; "
                            "restore the file from a copy of the store"
                        )
                offset += done
