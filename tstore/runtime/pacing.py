"""Pauses of a save in the background, so that it hardly slows the main thread.

Python code of two threads never runs at the same time, so each second of Python code in the background is one
second less for the training loop. After each stretch of such code, the background pauses for many times as long,
but only while the main thread is busy. A main thread that waits, for a device or for the save, is not slowed, so
the pause ends.
"""

from __future__ import annotations

import threading
import time

__all__ = ["Pace"]

_PAUSE = 30.0  # seconds of pause for each second of work
_MIN_WORK = 300e-6  # seconds; shorter stretches add up
_MAX_WORK = 50e-3  # seconds; a longer stretch counts as this
_STEP = 2e-3  # seconds: the first sleep of a pause; each next sleep is twice as long, if the main thread is busy
_LONGEST_STEP = 64e-3  # seconds
_BUSY = 0.2  # a main thread that runs for at least this share of the time is busy


class Pace:
    """The pauses of one thread after its work."""

    def __init__(self) -> None:
        self._counted = time.thread_time()
        self._work = 0.0  # seconds since the last pause
        self._left = 0.0  # seconds to pause
        self._step = _STEP
        self._since = (0.0, 0.0)  # the time, and the CPU time of the main thread, when the step began

    def add(self, seconds: float) -> None:
        """Count `seconds` of work that held the interpreter's lock."""
        self._work += min(seconds, _MAX_WORK)

    def add_own_time(self) -> None:
        """Count the CPU time of the calling thread since the previous call as work."""
        now = time.thread_time()
        self.add(now - self._counted)
        self._counted = now

    def step(self) -> float:
        """Return how many seconds to sleep before the next call; 0 if the thread may continue."""
        if self._left:
            elapsed, busy = (now - then for now, then in zip(_clocks(), self._since, strict=True))
            self._left = max(0.0, self._left - elapsed) if busy > _BUSY * elapsed else 0.0
            if not self._left:
                return 0.0
        else:
            if self._work < _MIN_WORK or _main_clock() is None:
                return 0.0
            self._left, self._step, self._work = _PAUSE * self._work, _STEP, 0.0
        self._since, step = _clocks(), min(self._step, self._left)
        self._step = min(2 * self._step, _LONGEST_STEP)
        return step


def _clocks() -> tuple[float, float]:
    """Return the time, and the CPU time of the main thread (0 if the system has no clock for it)."""
    clock = _main_clock()
    return time.monotonic(), 0.0 if clock is None else time.clock_gettime(clock)


def _main_clock() -> int | None:
    """Return the clock of the main thread, or None where the system has none."""
    main = threading.main_thread().ident
    return (
        time.pthread_getcpuclockid(main) if main is not None and hasattr(time, "pthread_getcpuclockid") else None
    )
