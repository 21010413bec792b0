"""The clock and random numbers, which a simulation can replace.

Identifiers, jitter and the times in records come from here, so that each host of a simulation can have a separate
clock, and a seed reproduces a run exactly. Waits and deadlines use the time of the event loop. Code in the threads
of the pool always uses the real clock and random numbers.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["World", "now", "token", "uniform", "use_world"]


class World:
    """The real clock and random numbers; a simulation overrides all methods."""

    def now(self) -> float:
        """Return the time in seconds since 1970."""
        return time.time()

    def token(self, size: int) -> str:
        """Return a unique token: `size` random bytes in hexadecimal digits."""
        return os.urandom(size).hex()

    def uniform(self, low: float, high: float) -> float:
        """Return a random number between `low` and `high`."""
        return _RANDOM.uniform(low, high)


_RANDOM = random.SystemRandom()  # leaves the state of the module `random`, which jobs seed and save, to the caller
_REAL = World()
_current: ContextVar[World] = ContextVar("tstore_world", default=_REAL)


def now() -> float:
    """Return the time in seconds since 1970, by the clock of this host."""
    return _current.get().now()


def token(size: int) -> str:
    """Return a unique token: `size` random bytes in hexadecimal digits."""
    return _current.get().token(size)


def uniform(low: float, high: float) -> float:
    """Return a random number between `low` and `high`."""
    return _current.get().uniform(low, high)


@contextlib.contextmanager
def use_world(world: World) -> Iterator[None]:
    """Replace the clock and random numbers in the running task, and in tasks that it starts inside the block."""
    before = _current.set(world)
    try:
        yield
    finally:
        _current.reset(before)
