"""Memory for objects that are read whole, many of them concurrently.

Each may take `FREE` bytes. All others share `SHARED` bytes, which only the object that began first may exceed, so
that none waits for ever. So concurrent responses take at most `FREE` bytes each, `SHARED`, and the bound of the
longest object.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from tstore.runtime.event_loops import PerLoop

__all__ = ["FREE", "SHARED", "Room"]

FREE = 1 << 20
SHARED = 128 << 20


class _Shared:
    """The shared bytes of one event loop, by object, in the order in which the objects began to take them."""

    def __init__(self) -> None:
        self.taken: dict[Room, int] = {}
        self.changed = asyncio.Event()


_shared = PerLoop(_Shared)


class Room:
    """The room of one object, until the end of the `async with` block."""

    def __init__(self) -> None:
        self._size = 0
        self._shared: _Shared | None = None

    def has(self, size: int) -> bool:
        """Take room for that many more bytes; if it returns False, `wait` must be awaited first."""
        self._size += size
        if self._size <= FREE:
            return True
        if self._shared is None:
            self._shared = _shared.get()
        taken = self._shared.taken
        taken[self] = self._size - FREE
        return self._is_first() or sum(taken.values()) <= SHARED

    async def wait(self) -> None:
        """Wait until there is room for all bytes taken."""
        assert self._shared is not None
        while not self._is_first() and sum(self._shared.taken.values()) > SHARED:
            await self._shared.changed.wait()

    def _is_first(self) -> bool:
        assert self._shared is not None
        return next(iter(self._shared.taken)) is self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shared is not None:
            del self._shared.taken[self]
            self._shared.changed.set()
            self._shared.changed = asyncio.Event()
