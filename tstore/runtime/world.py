"""The clock and the chance that tstore takes from the world around it.

Identifiers, jitter and the times in records come from here, so that a simulated host can have a clock and random
numbers of its own (`tstore.simulation`), and a seed replays exactly. Waits and deadlines use the time of
the event loop. What runs in the pool's threads always sees the real world.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Iterator
from contextvars import ContextVar

__all__ = ["World", "inhabited", "now", "token", "uniform"]


class World:
    """The real one; a simulated world overrides all of it."""

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def token(self, size: int) -> str:
        """That many random bytes in hexadecimal digits, never the same twice."""
        return secrets.token_hex(size)

    def uniform(self, low: float, high: float) -> float:
        """A random number between the two."""
        return random.uniform(low, high)


_REAL = World()
_current: ContextVar[World] = ContextVar("tstore_world", default=_REAL)


def now() -> float:
    """Seconds since 1970, by the clock of this host."""
    return _current.get().now()


def token(size: int) -> str:
    """That many random bytes in hexadecimal digits, never the same twice."""
    return _current.get().token(size)


def uniform(low: float, high: float) -> float:
    """A random number between the two."""
    return _current.get().uniform(low, high)


@contextlib.contextmanager
def inhabited(world: World) -> Iterator[None]:
    """Lets the running task, and all tasks that it starts inside, live in another world."""
    before = _current.set(world)
    try:
        yield
    finally:
        _current.reset(before)
