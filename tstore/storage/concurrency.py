"""Limits on what is asked of a server at the same time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tstore.storage.objects import Objects, Request, Wrapper

__all__ = ["Limits"]

T = TypeVar("T")


class Limits(Wrapper):
    """At most so many requests under way, carrying at most so many bytes together; the others wait their turn.

    A request that carries more bytes than that goes when no other carries any.
    """

    def __init__(self, inner: Objects, requests: int, size: int) -> None:
        super().__init__(inner)
        self._most_requests = requests
        self._most_bytes = size
        self._requests = 0
        self._bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Makes the request once it is its turn and there is room."""
        loop, size = asyncio.get_running_loop(), request.size
        if loop is not self._loop:  # the first, or that of a forked child, where nothing is under way
            self._loop, self._requests, self._bytes = loop, 0, 0
            self._waiting.clear()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append((size, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(size)  # it was its turn already
            else:
                self._admit()  # those behind it may need less room
            raise
        try:
            return await call()
        finally:
            self._leave(size)

    def _admit(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            few = self._bytes == 0 or self._bytes + size <= self._most_bytes
            if not turn.done():
                if self._requests >= self._most_requests or (size and not few):
                    return
                self._requests += 1
                self._bytes += size
                turn.set_result(None)
            self._waiting.popleft()

    def _leave(self, size: int) -> None:
        self._requests -= 1
        self._bytes -= size
        self._admit()
