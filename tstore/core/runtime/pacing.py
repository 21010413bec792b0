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

_PAUSE_PER_SECOND = 30.0  # seconds of pause for each second of work
_MIN_WORK = 300e-6  # seconds; shorter stretches add up
_MAX_WORK = 50e-3  # seconds; a longer stretch counts as this
_FIRST_SLEEP = 2e-3  # seconds; each next sleep of a pause is twice as long, while the main thread is busy
_LONGEST_SLEEP = 64e-3  # seconds
_BUSY_SHARE = 0.2  # a main thread that runs for at least this share of the time is busy


class Pace:
    """The pauses of one thread after its work."""

    def __init__(self) -> None:
        self._counted_time = time.thread_time()
        self._work = 0.0  # seconds since the last pause
        self._remaining = 0.0  # seconds of the pause
        self._sleep = _FIRST_SLEEP
        self._clocks_before = (0.0, 0.0)  # the time, and the CPU time of the main thread, when the sleep began

    def add(self, seconds: float) -> None:
        """Count `seconds` of work that held the interpreter's lock."""
        self._work += min(seconds, _MAX_WORK)

    def add_own_time(self) -> None:
        """Count the CPU time of the calling thread since the previous call as work."""
        now = time.thread_time()
        self.add(now - self._counted_time)
        self._counted_time = now

    def next_sleep(self) -> float:
        """Return how many seconds to sleep before the next call; 0 if the thread may continue."""
        if self._remaining:
            elapsed, busy = (now - then for now, then in zip(_clocks(), self._clocks_before, strict=True))
            self._remaining = max(0.0, self._remaining - elapsed) if busy > _BUSY_SHARE * elapsed else 0.0
            if not self._remaining:
                return 0.0
        else:
            if self._work < _MIN_WORK or _main_clock() is None:
                return 0.0
            self._remaining, self._sleep, self._work = _PAUSE_PER_SECOND * self._work, _FIRST_SLEEP, 0.0
        self._clocks_before, sleep = _clocks(), min(self._sleep, self._remaining)
        self._sleep = min(2 * self._sleep, _LONGEST_SLEEP)
        return sleep


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
