"""Objects behind a bad network: seeded latency, lost requests, lost replies, late and repeated requests, refusals.

For tests and measurements. Each request meets at most one fault, drawn by a generator of its own:

    throttled    refused, and not done: `Throttled`
    lost         never arrives: `Unavailable`
    unanswered   done, but the answer is lost: `Unavailable`
    late         `Unavailable`, and done only afterwards
    repeated     done, and done again afterwards, as by a network that duplicates

Late requests and repetitions are done `LATE` seconds later at most, unless the process ends before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from tstore.errors import Throttled, TStoreError, Unavailable
from tstore.storage.objects import Objects, Request, Wrapper

__all__ = ["LATE", "Chances", "Faults"]

LATE = 0.5
_RETRY_AFTER = 0.01

T = TypeVar("T")


class Chances(NamedTuple):
    """How likely each fault is, for one request; together at most 1."""

    throttled: float = 0.0
    lost: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    repeated: float = 0.0


class Faults(Wrapper):
    """Other objects, reached through a bad network.

    Every request takes `latency` seconds at least, and a further time drawn with the mean `jitter`. The same
    `seed` and the same order of requests give the same faults.
    """

    def __init__(
        self,
        inner: Objects,
        chances: Chances = Chances(),  # noqa: B008 - never changes
        *,
        latency: float = 0.0,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(inner)
        self.chances = chances
        self._latency = latency
        self._jitter = jitter
        self._random = random.Random(seed)
        self._late: set[asyncio.Task[object]] = set()

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Makes the request, or not, or twice."""
        delay = self._latency + (self._random.expovariate(1 / self._jitter) if self._jitter else 0.0)
        fault = self._random.choices([*Chances._fields, "none"], [*self.chances, 1 - sum(self.chances)])[0]
        later = self._random.uniform(0, LATE)
        if delay:
            await asyncio.sleep(delay)
        if request.operation in ("read", "list") and fault in ("late", "repeated"):
            fault = "lost"  # the buffers are the caller's again after the answer; and pages come one by one
        where = f"{self.url}: {request.operation} {request.key}"
        match fault:
            case "throttled":
                raise Throttled(f"{where}: too many requests; try again later", _RETRY_AFTER)
            case "lost":
                raise Unavailable(f"{where}: the request was lost; try again")
            case "unanswered":
                await call()
                raise Unavailable(f"{where}: the answer was lost; try again")
            case "late":
                self._do_later(call, later)
                raise Unavailable(f"{where}: no answer came; try again")
            case "repeated":
                result = await call()
                self._do_later(call, later)
                return result
        return await call()

    def _do_later(self, call: Callable[[], Awaitable[object]], delay: float) -> None:
        async def late() -> None:
            await asyncio.sleep(delay)
            try:
                await call()
            except TStoreError:
                return  # its sender does not listen any more

        task = asyncio.get_running_loop().create_task(late())
        self._late.add(task)
        task.add_done_callback(self._late.discard)
