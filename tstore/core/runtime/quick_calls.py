"""Short blocking calls, made in the event loop's thread where they are quick."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from tstore.core.runtime.pool import run, uses_threads

if sys.platform == "linux":
    import resource

__all__ = ["QuickCalls"]

T = TypeVar("T")

_QUICK = 300e-6  # seconds
_LONGEST = 1e-3  # seconds that one call counts, so that a single long one, perhaps descheduled, changes little
_WEIGHT = 1 / 8  # of the last call in the mean
_FEWEST, _MOST = 8, 4096  # calls in threads before calls may be made in the loop's thread
_LONG_SPELL = 256  # calls in the loop's thread after which the fewest are enough again


def _waits() -> float:
    """Return how often this thread has waited for a disk, a lock or another event; NaN if that is not known."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if sys.platform == "linux" else math.nan


class QuickCalls:
    """Makes blocking calls of one kind to one storage where they cost least.

    A control thread, and waking the event loop, cost about as much CPU as creating a small file in memory, and
    more than reading one that the system has cached. On a disk that is waited for, or a network mount, a call
    must not hold up the loop.

    1. The first calls are made in control threads. Their times include waits for the interpreter's lock, so the
       shortest of some calls counts. If it is below 300 µs, the next calls are made in the loop's thread.
    2. If the mean of recent calls there reaches 300 µs, calls return to threads. The number of calls after which
       the loop's thread is tried again doubles, so that a storage that is sometimes slow rarely stops the loop.
    3. A long call during which the thread waited for nothing does not count: other processes had the processor
       meanwhile, and a thread would have to wait for it too.
    """

    def __init__(self) -> None:
        self._mean = math.inf  # of recent calls in the loop's thread; infinite while calls are made in threads
        self._count = 0  # calls made in the same kind of thread
        self._shortest = math.inf  # of these calls
        self._needed = _FEWEST

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Make one blocking call and return its result; cancellation waits for the call's end."""
        if self._mean == math.inf or not uses_threads():
            return await run(self._call_in_thread, call, *args)
        waits, start = _waits(), time.perf_counter()
        try:
            return call(*args)
        finally:
            self._count += 1
            duration = time.perf_counter() - start
            if duration < _QUICK or _waits() != waits:
                self._mean += _WEIGHT * (min(duration, _LONGEST) - self._mean)
            if self._mean >= _QUICK:
                self._needed = _FEWEST if self._count >= _LONG_SPELL else min(2 * self._needed, _MOST)
                self._mean, self._count, self._shortest = math.inf, 0, math.inf

    def _call_in_thread(self, call: Callable[..., T], *args: Any) -> T:
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            # threads may race, which loses one of two counts
            self._count += 1
            self._shortest = min(self._shortest, time.perf_counter() - start)
            if self._count >= self._needed:
                if self._shortest < _QUICK:
                    self._mean = self._shortest
                self._count, self._shortest = 0, math.inf
