"""State that belongs to one event loop: locks, futures, sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PerLoop"]

T = TypeVar("T")


class PerLoop(Generic[T]):
    """A value of the running event loop, made when a loop first asks for it.

    Another loop gets another value, and the former is dropped: after a fork, the child's loops start afresh.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: tuple[asyncio.AbstractEventLoop, T] | None = None

    def get(self) -> T:
        """Return the value of the running loop."""
        loop, made = asyncio.get_running_loop(), self._made
        if made is None or made[0] is not loop:
            self._made = made = loop, self._make()
        return made[1]

    def pop(self) -> T | None:
        """Drop the value; return it if it is that of the running loop."""
        made, self._made = self._made, None
        return made[1] if made is not None and made[0] is asyncio.get_running_loop() else None
