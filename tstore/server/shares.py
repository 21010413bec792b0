"""Fair sharing of memory, and of access to the storage, among the clients of a server.

Nothing is claimed for a body that is still being received, so the duration of a claim depends on the server and
its storage, never on a client. Therefore waiting in turn is fair, and no claim needs to be revoked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from typing import NamedTuple

from tstore.server.responses import Refused

__all__ = ["Shares"]


class _Waiter(NamedTuple):
    client: Hashable
    size: int
    turn: asyncio.Future[None]


class Shares:
    """A weighted semaphore that serves the client with the smallest claims first, after at most `wait` seconds."""

    def __init__(self, total: int, wait: float, resource: str) -> None:
        self._total = total
        self._left = total
        self._wait = wait
        self._resource = resource
        self._claimed: Counter[Hashable] = Counter()
        self._waiting: list[_Waiter] = []

    @contextlib.asynccontextmanager
    async def claim(self, client: Hashable, size: int) -> AsyncIterator[None]:
        """Claim `size`, capped at the total, during the block; raise `Refused` (503) after the wait."""
        size = min(size, self._total)
        if self._waiting or size > self._left:
            await self._turn(_Waiter(client, size, asyncio.get_running_loop().create_future()))
        else:
            self._take(client, size)
        try:
            yield
        finally:
            self._release(client, size)

    async def _turn(self, waiter: _Waiter) -> None:
        self._waiting.append(waiter)
        self._serve()  # a client with smaller claims than the earlier waiters may come first
        try:
            async with asyncio.timeout(self._wait):
                await waiter.turn
        except BaseException as error:
            if waiter.turn.done() and not waiter.turn.cancelled():  # granted at the moment of the timeout
                self._release(waiter.client, waiter.size)
            else:
                self._waiting.remove(waiter)
                self._serve()  # those after it may fit
            if isinstance(error, TimeoutError):
                message = f"the server is busy, waiting for {self._resource}; try again"
                raise Refused(503, message, {"Retry-After": "5"}) from None
            raise

    def _take(self, client: Hashable, size: int) -> None:
        self._left -= size
        self._claimed[client] += size

    def _release(self, client: Hashable, size: int) -> None:
        self._left += size
        self._claimed[client] -= size
        if not self._claimed[client]:
            del self._claimed[client]
        self._serve()

    def _serve(self) -> None:
        while waiting := [waiter for waiter in self._waiting if not waiter.turn.done()]:
            waiter = min(waiting, key=lambda waiter: self._claimed[waiter.client])  # the earliest of equals
            if waiter.size > self._left:
                return  # it stays next, so that large claims are not starved
            self._waiting.remove(waiter)
            self._take(waiter.client, waiter.size)
            waiter.turn.set_result(None)
