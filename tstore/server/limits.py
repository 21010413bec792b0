"""What a server spends on its clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

__all__ = ["HELD", "LIMITS", "LONGEST_HELD", "LONGEST_SMALL", "PIECE", "Budget", "Limits"]

PIECE = 1 << 20
"""Bytes of a body that are received before they are written, so that a long object costs no memory."""

HELD = 256 << 20
"""Bytes of bodies that are in memory at once: those that are checked before they are stored."""

LONGEST_HELD = 192 << 20
"""The longest body that is held in memory."""

UPLOADS = 8
"""Packs on their way at once to a storage that is not local; each is in memory (to 32 MiB) or a temporary file."""

LONGEST_SMALL = 4 << 10
"""The longest marker, hint or heartbeat."""


class Limits(NamedTuple):
    """What clients may take; beyond it they are refused or cut off."""

    connections: int = 1024
    """Open at once; a further one takes the place of the one that is idle for longest."""
    requests: int = 256
    """Answered at once; a further one gets 503, to be repeated."""
    object_bytes: int = 64 << 30
    """The longest pack."""
    stall: float = 60.0
    """Seconds in which the next piece (1 MiB) of a body must have been sent or received."""
    idle: float = 75.0
    """Seconds until the head of the next request must be whole."""
    drain: float = 30.0
    """Seconds that requests under way are given at the end."""


LIMITS = Limits()
"""Those that a server has unless told otherwise."""


class Budget:
    """Bytes that may be held; who asks for more than is left waits, in turn."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def claim(self, size: int) -> AsyncIterator[None]:
        """Holds that many bytes as long as the block takes; never more than the whole budget."""
        if size and (self._waiting or size > self._left):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._release(size)
                else:
                    with contextlib.suppress(ValueError):  # it was passed over already
                        self._waiting.remove((size, turn))
                    self._release(0)
                raise
        else:
            self._left -= size
        try:
            yield
        finally:
            self._release(size)

    def _release(self, size: int) -> None:
        self._left += size
        while self._waiting and self._waiting[0][0] <= self._left:
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._left -= wanted
                turn.set_result(None)
