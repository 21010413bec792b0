"""What a process spends, as its `/proc` tells it: memory, open files, processor time."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

__all__ = ["Meter"]

_EVERY = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    """The peaks of one process since `reset`; those of one that has ended stay."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        self.memory = 0
        """Bytes of resident memory at most."""
        self.files = 0
        """Open descriptors at most."""

    def reset(self) -> None:
        """Forget the peaks of before."""
        self.memory = self.files = 0
        with contextlib.suppress(OSError):
            (self._proc / "clear_refs").write_text("5")  # the peak begins at what is resident now

    def look(self) -> None:
        """Take the peaks as they are now."""
        with contextlib.suppress(OSError, IndexError):
            self.memory = max(self.memory, self._status("VmHWM") << 10)
            self.files = max(self.files, len(os.listdir(self._proc / "fd")))

    @property
    def cpu(self) -> float:
        """Seconds of processor time that the process has used since its start."""
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look again and again as long as the block takes."""
        task = asyncio.ensure_future(self._watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            self.look()

    async def _watch(self) -> None:
        while True:
            self.look()
            await asyncio.sleep(_EVERY)

    def _status(self, name: str) -> int:
        text = (self._proc / "status").read_text()
        return int(text.split(f"{name}:")[1].split()[0])
