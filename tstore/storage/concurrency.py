"""A bound on the requests to a server that are in progress at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tstore.runtime.event_loops import PerLoop
from tstore.storage.base import Storage
from tstore.storage.wrapper import Request, Wrapper

__all__ = ["Concurrency"]

T = TypeVar("T")


class _InProgress:
    """The requests of one event loop: how many there are, their bytes, and those that wait, in order."""

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()


class Concurrency(Wrapper):
    """At most `requests` requests in progress, carrying at most `size` bytes together; the others wait in turn.

    A request that carries more bytes than that proceeds when no other carries any.
    """

    def __init__(self, inner: Storage, requests: int, size: int) -> None:
        super().__init__(inner)
        self._most_requests = requests
        self._most_bytes = size
        self._state = PerLoop(_InProgress)

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Make the request once it is its turn and there is room."""
        state, size = self._state.get(), request.size
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        state.waiting.append((size, turn))
        self._admit(state)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(state, size)  # it was its turn already
            else:
                self._admit(state)  # those behind it may need less room
            raise
        try:
            return await call()
        finally:
            self._leave(state, size)

    def _admit(self, state: _InProgress) -> None:
        while state.waiting:
            size, turn = state.waiting[0]
            fits = state.bytes == 0 or state.bytes + size <= self._most_bytes
            if not turn.done():
                if state.requests >= self._most_requests or (size and not fits):
                    return
                state.requests += 1
                state.bytes += size
                turn.set_result(None)
            state.waiting.popleft()

    def _leave(self, state: _InProgress, size: int) -> None:
        state.requests -= 1
        state.bytes -= size
        self._admit(state)
