"""An event loop with virtual time: waits cost nothing, and the same program runs the same way each time.

Time stands still while callbacks run and jumps to the next timer when none is ready. There are no threads, files
or sockets; a loop on which nothing will ever happen again raises `Stuck` instead of waiting for ever.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

__all__ = ["Stuck", "VirtualLoop"]

_INSTANT = 1e-9  # seconds between timers that are due at the same time


class Stuck(Exception):
    """Every task waits for something that no timer and no callback will bring."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop whose `time()` begins at 0 and moves only when nothing else is left to do.

    Callbacks are kept and run here, not by asyncio, whose handles know of debugging and of other threads: a
    simulated run makes some 10,000 of them. Timers that are due at the same time run in the order of their making.
    """

    def __init__(self) -> None:
        super().__init__()
        self._virtual_now = 0.0
        self._callbacks: deque[_Callback] = deque()
        self._timers: list[tuple[float, int, _Callback]] = []
        self._made = 0

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> _Callback:  # type: ignore[override]
        """Call it once in this turn of the loop or the next."""
        made = _Callback(callback, args, context)
        self._callbacks.append(made)
        return made

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        """Call it once after that many virtual seconds."""
        return self.call_at(self._virtual_now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        """Call it once at that virtual time."""
        made = _Callback(callback, args, context)
        self._made += 1
        heapq.heappush(self._timers, (when, self._made, made))
        return made

    def _run_once(self) -> None:
        callbacks, timers = self._callbacks, self._timers
        if not callbacks:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise Stuck("no timer is set and no callback is ready")
            self._virtual_now = max(self._virtual_now, timers[0][0])
        due = self._virtual_now + _INSTANT
        while timers and timers[0][0] < due:
            callbacks.append(heapq.heappop(timers)[2])
        for _ in range(len(callbacks)):
            callbacks.popleft().run(self)

    def _write_to_self(self) -> None:
        return None  # it never sleeps, so nothing need wake it


class _Callback:
    """One call that a loop makes, unless it is cancelled before."""

    __slots__ = ("_args", "_call", "_context")

    def __init__(self, call: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self._call: Callable[..., object] | None = call
        self._args = args
        self._context = copy_context() if context is None else context

    def cancel(self) -> None:
        """Do not make it, and let go of what it would need."""
        self._call = None
        self._args = ()

    def cancelled(self) -> bool:
        """Whether it will not be made."""
        return self._call is None

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make it, unless it was cancelled."""
        if self._call is None:
            return
        try:
            self._context.run(self._call, *self._args)
        except Exception as error:
            loop.call_exception_handler({"message": f"an error in {self._call!r}", "exception": error})
