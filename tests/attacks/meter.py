"""The memory, open files and CPU time of a process, from `/proc`."""

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
    """The peaks of a process since `reset`; they remain after its end."""

    def __init__(self, pid: int) -> None:
        self._proc = Path(f"/proc/{pid}")
        self.memory = 0
        """The peak resident memory in bytes."""
        self.files = 0
        """Open descriptors at most."""

    def reset(self) -> None:
        """Reset the peaks."""
        self.memory = self.files = 0
        with contextlib.suppress(OSError):
            (self._proc / "clear_refs").write_text("5")  # resets the peak to the current size

    def look(self) -> None:
        """Update the peaks."""
        with contextlib.suppress(OSError, IndexError):
            self.memory = max(self.memory, self._status("VmHWM") << 10)
            self.files = max(self.files, len(os.listdir(self._proc / "fd")))

    @property
    def cpu(self) -> float:
        """The CPU seconds of the process since its start."""
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Update the peaks periodically for the duration of the block."""
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
