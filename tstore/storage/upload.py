"""One object on its way to a server: filled in memory, or in a temporary file where it is long, then put.

Memory is drawn from the pool's budget for as long as the object is on its way. A long one would take too much of
it; the server is sent the pages of a file without a name instead, mapped into memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
import numpy.typing as npt

from tstore.runtime.budget import acquire, release
from tstore.runtime.io_loop import wait_io
from tstore.storage.base import BufferStream
from tstore.storage.local.atomic_file import explained
from tstore.storage.objects import Objects, PutMode

__all__ = ["IN_MEMORY", "Upload"]

IN_MEMORY = 32 << 20
"""Bytes of the longest object that is kept in memory."""

_PART = 8 << 20


class Upload:
    """A `PackWriter` of an object of a known size; it appears when it is finished."""

    def __init__(self, objects: Objects, key: str, size: int) -> None:
        self.key = key
        self._objects = objects
        self._end = 0
        self._held = size if size <= IN_MEMORY else 0
        if self._held:
            acquire(self._held)
        self._data = np.empty(size, np.uint8) if size <= IN_MEMORY else _mapped(size)

    def reserve(self, size: int) -> None:
        """See `PackWriter.reserve`: there is room for all of it."""

    def append(self, buffers: BufferStream, size: int) -> int:
        """See `PackWriter.append`."""
        offset = self._end
        for buffer in buffers:
            data = np.frombuffer(buffer, np.uint8)
            self._data[self._end : self._end + len(data)] = data
            self._end += len(data)
        return offset

    def finish(self) -> None:
        """See `PackWriter.finish`; the object is durable when this returns."""
        try:
            parts = [self._data[i : i + _PART].data for i in range(0, self._end, _PART)]
            wait_io(self._objects.put(self.key, parts, PutMode.CREATE))
        finally:
            self.discard()

    def discard(self) -> None:
        """See `PackWriter.discard`."""
        self._data = np.empty(0, np.uint8)
        held, self._held = self._held, 0
        if held:
            release(held)


def _mapped(size: int) -> npt.NDArray[np.uint8]:
    with explained("write", tempfile.gettempdir()), tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a page that has no room on the disk would kill the process
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
