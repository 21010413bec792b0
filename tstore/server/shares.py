"""What clients of a server share and wait for: memory, and turns with a storage.

Nothing is claimed for a body that is still on its way, so that how long a claim lasts is up to the server and its
storage, never to a client. Therefore waiting in turn is fair, and no claim needs to be taken back.
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
    """A quantity of which clients claim parts; who has least is served first, and nobody waits for ever."""

    def __init__(self, total: int, wait: float, what: str) -> None:
        self._total = total
        self._left = total
        self._wait = wait
        self._what = what
        self._claimed: Counter[Hashable] = Counter()
        self._waiting: list[_Waiter] = []

    @contextlib.asynccontextmanager
    async def claim(self, client: Hashable, size: int) -> AsyncIterator[None]:
        """Claim that much, at most the total, for as long as the block takes; `Refused` (503) after the wait."""
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
        self._serve()  # who has less than those before it may come first
        try:
            async with asyncio.timeout(self._wait):
                await waiter.turn
        except BaseException as error:
            if waiter.turn.done() and not waiter.turn.cancelled():  # it came at the last moment
                self._release(waiter.client, waiter.size)
            else:
                self._waiting.remove(waiter)
                self._serve()  # those behind it may fit
            if isinstance(error, TimeoutError):
                raise Refused(503, f"the server waits for {self._what}; try again", {"Retry-After": "5"}) from None
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
            waiter = min(waiting, key=lambda waiter: self._claimed[waiter.client])  # the first of equals
            if waiter.size > self._left:
                return  # it is next, so that long ones get their turn too
            self._waiting.remove(waiter)
            self._take(waiter.client, waiter.size)
            waiter.turn.set_result(None)
