"""Memory for objects that are read whole, of which many are on their way at once.

Each may take `FREE` bytes. What it has beyond these counts: all together have `SHARED` bytes of that, and the one
that began first goes on beyond, so that none waits for ever. So what servers send at once takes `FREE` bytes for
each request, `SHARED`, and the bound of the longest object.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

__all__ = ["FREE", "SHARED", "Room"]

FREE = 1 << 20
SHARED = 128 << 20


class _Shared:
    """What the objects of one event loop take beyond their free bytes, in the order in which they began to."""

    def __init__(self) -> None:
        self.taken: dict[Room, int] = {}
        self.changed = asyncio.Event()


_shared: tuple[asyncio.AbstractEventLoop, _Shared] | None = None


def _of_this_loop() -> _Shared:
    global _shared  # noqa: PLW0603 - after a fork the loop is another one, and nothing is on its way
    loop = asyncio.get_running_loop()
    if _shared is None or _shared[0] is not loop:
        _shared = loop, _Shared()
    return _shared[1]


class Room:
    """The room of one object, until the end of the `async with` block."""

    def __init__(self) -> None:
        self._size = 0
        self._shared: _Shared | None = None

    def has(self, size: int) -> bool:
        """Take room for that many more bytes; False where there is none now, and `wait` must be awaited."""
        self._size += size
        if self._size <= FREE:
            return True
        if self._shared is None:
            self._shared = _of_this_loop()
        taken = self._shared.taken
        taken[self] = self._size - FREE
        return self._is_first() or sum(taken.values()) <= SHARED

    async def wait(self) -> None:
        """Return once there is room for what `has` was asked for."""
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
