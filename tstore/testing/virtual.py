"""An event loop with virtual time: waits cost nothing, and the same program runs the same way each time.

Time stands still while callbacks run and jumps to the next timer when none is ready. There are no threads, files
or sockets; a loop on which nothing will ever happen again raises `Stuck` instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["Stuck", "VirtualLoop"]


class Stuck(Exception):
    """Every task waits for something that no timer and no callback will bring."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop whose `time()` begins at 0 and moves only when nothing else is left to do."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_now = 0.0
        self._selector = self  # what BaseEventLoop waits with

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_now

    def select(self, timeout: float | None) -> list[Any]:
        """Lets `timeout` seconds pass at once."""
        if timeout is None:
            raise Stuck("no timer is set and no callback is ready")
        self._virtual_now += timeout
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        return None  # it never sleeps, so nothing need wake it
