"""The limits of a server, and fair sharing of its memory and its storage among clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple, TypeVar

from tstore.core.format.tree.validation import Steps, advance
from tstore.core.runtime.pool import run
from tstore.core.storage.limits import BODY_RATE
from tstore.errors import InvalidArgument
from tstore.service.server.responses import Refused

__all__ = [
    "BODY_MEMORY",
    "LIMITS",
    "LONGEST_IN_MEMORY",
    "PIECE",
    "SIZE_ADVICE",
    "Limits",
    "Shares",
    "Turns",
    "checked_limits",
]

PIECE = 1 << 20
"""A body is sent in pieces of at most this many bytes; a client has `Limits.stall` seconds for each piece."""

BODY_MEMORY = 256 << 20
"""Bytes of memory for bodies that are received whole, to be validated before they are stored."""

LONGEST_IN_MEMORY = 192 << 20
"""The longest body that is received whole; `format.bounds.max_object_size` may permit less for its key."""

SIZE_ADVICE = "choose larger chunks, or write to its storage directly"
"""The advice for metadata that is too large for a server."""

T = TypeVar("T")

_MAX_RATE = 1 << 20  # for `Limits.rate`; about the share of each of 128 concurrent bodies at 1 Gbit/s

_MAX_CLIENTS = 4096  # clients whose last claim `Shares` remembers


class Limits(NamedTuple):
    """The limits of clients; beyond them requests are refused or aborted."""

    connections: int = 1024
    """Concurrent connections; beyond these, one without a request under way is closed, or else the new one."""
    requests: int = 256
    """Concurrent requests; beyond these, the transfer of a slow client is ended, or the new request gets 503."""
    pack_bytes: int = 64 << 30
    """The maximum size of a pack."""
    stall: float = 180.0
    """Seconds to transfer the next MiB of a body; by default longer than tstore's own clients wait."""
    idle: float = 75.0
    """Seconds to receive the complete head of the next request."""
    drain: float = 30.0
    """Seconds that requests under way may take at shutdown."""
    rate: int = BODY_RATE
    """The minimum average bytes per second of a body after `stall` seconds; by default that of tstore's client."""
    wait: float = 30.0
    """Seconds that a request waits for memory, or for its turn with the storage, before it gets 503."""


LIMITS = Limits()
"""The default limits."""


def checked_limits(limits: Limits) -> Limits:
    """Return the limits; raise `InvalidArgument` for a value out of its range."""
    for name, value in limits._asdict().items():
        minimum = {"drain": 0, "stall": 0.001, "idle": 0.001, "wait": 0.001}.get(name, 1)
        maximum = _MAX_RATE if name == "rate" else math.inf
        if not (isinstance(value, int | float) and minimum <= value <= maximum and math.isfinite(value)):
            upper = "" if maximum == math.inf else f" and at most {maximum}"
            raise InvalidArgument(f"Limits({name}={value!r}): expected a number of at least {minimum}{upper}")
    return limits


class _Waiter(NamedTuple):
    client: Hashable
    size: int
    turn: asyncio.Future[None]


class Shares:
    """A weighted semaphore that serves the client with the smallest claims first and refuses after `wait` seconds.

    Of clients with equal claims, the one that was served longest ago is first, however many requests others have.
    Nothing is claimed for a body that is still being received, so the duration of a claim depends on the server
    and its storage, never on a client. Therefore waiting in turn is fair, and no claim needs to be revoked.
    """

    def __init__(self, total: int, wait: float, waiting_for: str) -> None:
        self._total = total
        self._available = total
        self._wait = wait
        self._waiting_for = waiting_for
        self._claimed: Counter[Hashable] = Counter()
        self._waiting: list[_Waiter] = []
        self._served: dict[Hashable, int] = {}  # by client, the sequence number of its last claim, in order
        self._numbers = itertools.count(1)

    def claim(self, client: Hashable, size: int) -> AbstractAsyncContextManager[None]:
        """Claim `size`, capped at the total, during the block; raise `Refused` (503) after the wait."""
        return self._claim(client, min(size, self._total)) if size else contextlib.nullcontext()

    @contextlib.asynccontextmanager
    async def _claim(self, client: Hashable, size: int) -> AsyncIterator[None]:
        if self._waiting or size > self._available:
            await self._await_turn(_Waiter(client, size, asyncio.get_running_loop().create_future()))
        else:
            self._take(client, size)
        try:
            yield
        finally:
            self._release(client, size)

    async def _await_turn(self, waiter: _Waiter) -> None:
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
                message = f"the server is busy, waiting for {self._waiting_for}; try again"
                raise Refused(503, message, {"Retry-After": "5"}) from None
            raise

    def _take(self, client: Hashable, size: int) -> None:
        self._available -= size
        self._claimed[client] += size
        self._served.pop(client, None)
        self._served[client] = next(self._numbers)
        if len(self._served) > _MAX_CLIENTS:
            del self._served[next(iter(self._served))]

    def _release(self, client: Hashable, size: int) -> None:
        self._available += size
        self._claimed[client] -= size
        if not self._claimed[client]:
            del self._claimed[client]
        self._serve()

    def _serve(self) -> None:
        while waiting := [waiter for waiter in self._waiting if not waiter.turn.done()]:
            waiter = min(waiting, key=self._order)  # the earliest of equals
            if waiter.size > self._available:
                return  # it stays first in line, so that large claims are not starved
            self._waiting.remove(waiter)
            self._take(waiter.client, waiter.size)
            waiter.turn.set_result(None)

    def _order(self, waiter: _Waiter) -> tuple[int, int]:
        return self._claimed[waiter.client], self._served.get(waiter.client, 0)


class Turns:
    """Calls in a thread, one at a time; clients take turns, and wait at most `wait` seconds for each turn.

    Decoding and checking metadata holds the GIL, so that more threads gain nothing, and it takes many times the
    memory of the encoded bytes. So one call, or one step of longer work, runs at a time, and a client gives up its
    turn after each. A request that is cancelled, also when the server stops, ends after the call under way.
    """

    def __init__(self, wait: float) -> None:
        self._shares = Shares(1, wait, waiting_for="its turn to check metadata")

    async def run(self, client: Hashable, call: Callable[..., T], *args: Any) -> T:
        """Return the result of a call made at this client's next turn; raise `Refused` (503) after the wait."""
        async with self._shares.claim(client, 1):
            return await run(call, *args)

    async def complete(self, client: Hashable, steps: Steps[T]) -> T:
        """Return the result of work in steps, each of which runs at a turn of this client."""
        while (done := await self.run(client, advance, steps)) is None:
            pass
        result: T = done.result
        return result
