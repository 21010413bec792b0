"""One object on its way to a server: filled in memory, or in a temporary file if it is long, then uploaded.

Memory is drawn from the byte budget until the upload ends. A long object would take too much of it: its pages are
those of an unnamed temporary file, mapped into memory.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.runtime.budget import acquire, release
from tstore.runtime.event_loops import wait_io
from tstore.storage.local.atomic_file import explained
from tstore.storage.objects import Buffers, BufferStream

__all__ = ["IN_MEMORY", "Upload"]

IN_MEMORY = 32 << 20
"""The longest object in bytes that is held in memory."""

_PART = 8 << 20


class Upload:
    """A `PackWriter` of an object of known size, which `send` uploads when it is finished."""

    def __init__(self, key: str, size: int, send: Callable[[Buffers], Coroutine[Any, Any, None]]) -> None:
        self.key = key
        self._send = send
        self._end = 0
        self._held = size if size <= IN_MEMORY else 0
        if self._held:
            acquire(self._held)
        self._data = np.empty(size, np.uint8) if size <= IN_MEMORY else _mapped(size)

    def append(self, buffers: BufferStream, size: int) -> int:
        """See `PackWriter.append`."""
        offset = self._end
        for buffer in buffers:
            data = np.frombuffer(buffer, np.uint8)
            self._data[self._end : self._end + len(data)] = data
            self._end += len(data)
        return offset

    def finish(self) -> None:
        """Upload the object; it is durable on return."""
        try:
            wait_io(self._send([self._data[i : i + _PART].data for i in range(0, self._end, _PART)]))
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
        os.posix_fallocate(file.fileno(), 0, size)  # a page without room on the disk would kill the process
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
