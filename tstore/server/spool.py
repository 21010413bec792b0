"""A buffer for a body being received: up to 1 MiB in memory, a larger body in an unnamed temporary file.

So a body that arrives slowly, or is declared to be large, claims neither memory nor access to the storage, but
only disk space (`TMPDIR`) for the bytes received so far.
"""

from __future__ import annotations

import mmap
import tempfile
from typing import IO

from tstore.runtime.pool import run
from tstore.server.limits import PIECE
from tstore.storage.local.atomic_file import explained, write_all
from tstore.storage.objects import Buffers

__all__ = ["Spool"]


class Spool:
    """Bytes written sequentially and read back when complete; close it afterwards."""

    def __init__(self) -> None:
        self.size = 0
        self._held: list[bytes] = []
        self._file: IO[bytes] | None = None

    async def write(self, pieces: Buffers) -> None:
        """Append bytes."""
        self.size += sum(map(len, pieces))
        if self._file is None and self.size <= PIECE:
            self._held += map(bytes, pieces)
        else:
            await run(self._write, [*self._held, *pieces])
            self._held.clear()

    def content(self) -> bytes | mmap.mmap:
        """Return the bytes; those of a file are memory-mapped."""
        if self._file is None:
            return b"".join(self._held)
        return mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ)

    async def read(self) -> bytes:
        """Return the bytes, in memory."""
        content = self.content()
        return content if isinstance(content, bytes) else await run(bytes, content)

    def close(self) -> None:
        """Release memory and file; may be called repeatedly."""
        self._held.clear()
        if self._file is not None:
            self._file.close()

    def _write(self, pieces: Buffers) -> None:
        with explained("write", tempfile.gettempdir()):
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `close`
            write_all(self._file.fileno(), pieces, self.size - sum(map(len, pieces)))
