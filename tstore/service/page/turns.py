"""Turns to compute a view: few at once, so that the server's other requests stay fast, and shared by clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable

__all__ = ["Turns"]

_MAX_WAITING = 16  # waiting requests of one client, so that they do not exhaust the server's limit
_MAX_WAITING_OF_ALL = 64


class Turns:
    """At most `most` turns at once; one client has at most all but one, so that others need not wait for it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[Hashable] = Counter()  # by client
        self._waiting: list[tuple[Hashable, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def turn(self, client: Hashable, longest_wait: float) -> AsyncIterator[None]:
        """Take a turn for the duration of the block; raise `TimeoutError` if none is free within a few seconds.

        Turns are given in the order of requests, but to the clients that have the fewest first. If many requests
        wait, raise `TimeoutError` at once.
        """
        await self._take(client, longest_wait)
        try:
            yield
        finally:
            self._release(client)

    async def _take(self, client: Hashable, longest_wait: float) -> None:
        own = sum(waiting == client for waiting, _ in self._waiting)
        if own >= _MAX_WAITING or len(self._waiting) >= _MAX_WAITING_OF_ALL:
            raise TimeoutError
        request = client, asyncio.get_running_loop().create_future()
        self._waiting.append(request)
        self._give()
        try:
            async with asyncio.timeout(longest_wait):
                await request[1]
        except BaseException:
            if request in self._waiting:
                self._waiting.remove(request)
            elif not request[1].cancelled():  # it got a turn just now
                self._release(client)
            raise

    def _release(self, client: Hashable) -> None:
        self._taken[client] -= 1
        self._taken += Counter()  # forgets clients without a turn
        self._give()

    def _give(self) -> None:
        # a request that was cancelled has not been able to leave yet
        self._waiting = [waiting for waiting in self._waiting if not waiting[1].done()]
        while self._waiting and self._taken.total() < self._most:
            request = min(self._waiting, key=lambda waiting: self._taken[waiting[0]])
            client, turn = request
            if self._taken[client] >= self._most - 1:
                return
            self._waiting.remove(request)
            self._taken[client] += 1
            turn.set_result(None)
