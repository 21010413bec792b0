"""A deterministic event loop with virtual time, in which waiting takes no real time.

Time stands still while callbacks run, and jumps to the next timer when no callback is ready. There are no threads,
files or sockets. The loop raises `Stuck` when no callback and no timer is left.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

__all__ = ["Stuck", "VirtualLoop"]

_INSTANT = 1e-9  # seconds within which timers count as simultaneous


class Stuck(Exception):
    """A deadlock: tasks wait, but no timer is set and no callback is ready."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop whose `time()` starts at 0. Simultaneous timers run in the order of their creation."""

    def __init__(self) -> None:
        super().__init__()
        self._virtual_now = 0.0
        self._callbacks: deque[_Callback] = deque()
        self._timers: list[tuple[float, int, _Callback]] = []
        self._created = 0

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual_now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> _Callback:  # type: ignore[override]
        """Schedule a callback for the next turn of the loop."""
        handle = _Callback(callback, args, context)
        self._callbacks.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        """Schedule a callback after a delay in virtual seconds."""
        return self.call_at(self._virtual_now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        """Schedule a callback at a virtual time."""
        handle = _Callback(callback, args, context)
        self._created += 1
        heapq.heappush(self._timers, (when, self._created, handle))
        return handle

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
        return None  # it never sleeps, so there is nothing to wake


class _Callback:
    """The handle of a callback: faster than asyncio's handles, which also support debugging and threads."""

    __slots__ = ("_args", "_call", "_context")

    def __init__(self, call: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self._call: Callable[..., object] | None = call
        self._args = args
        self._context = copy_context() if context is None else context

    def cancel(self) -> None:
        self._call = None
        self._args = ()

    def cancelled(self) -> bool:
        return self._call is None

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._call is None:
            return
        try:
            self._context.run(self._call, *self._args)
        except Exception as error:
            loop.call_exception_handler({"message": f"an error in {self._call!r}", "exception": error})
