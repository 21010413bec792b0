"""A body until it is whole: a little in memory, the rest in a temporary file without a name.

So a body that comes slowly, or is declared to be long, claims neither memory nor a turn with the storage, but only
the room on the disk (`TMPDIR`) of what has arrived.
"""

from __future__ import annotations

import mmap
import tempfile
from typing import IO

from tstore.runtime.pool import run
from tstore.server.limits import PIECE
from tstore.storage.base import Buffers
from tstore.storage.local.atomic_file import explained, write_all

__all__ = ["Spool"]


class Spool:
    """Bytes that come one after the other, and are read when all are there; close it in the end."""

    def __init__(self) -> None:
        self.size = 0
        self._held: list[bytes] = []
        self._file: IO[bytes] | None = None

    async def write(self, pieces: Buffers) -> None:
        """Add the next bytes."""
        self.size += sum(map(len, pieces))
        if self._file is None and self.size <= PIECE:
            self._held += map(bytes, pieces)
        else:
            await run(self._write, [*self._held, *pieces])
            self._held.clear()

    def content(self) -> bytes | mmap.mmap:
        """All of it; that of a file is mapped, and costs memory only while it is looked at."""
        if self._file is None:
            return b"".join(self._held)
        return mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ)

    async def read(self) -> bytes:
        """All of it, in memory."""
        content = self.content()
        return content if isinstance(content, bytes) else await run(bytes, content)

    def close(self) -> None:
        """Release what it took; any number of times."""
        self._held.clear()
        if self._file is not None:
            self._file.close()

    def _write(self, pieces: Buffers) -> None:
        with explained("write", tempfile.gettempdir()):
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - until `close`
            write_all(self._file.fileno(), pieces, self.size - sum(map(len, pieces)))
