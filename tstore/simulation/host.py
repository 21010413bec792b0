"""A simulated host: its clock, random numbers and faults, and whether it is alive."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

from tstore.runtime.world import World

__all__ = ["NO_FAULTS", "FaultFreeHost", "FaultRates", "Host"]

_JUMPS = (-7_200.0, -20.0, 20.0, 90_000.0)


class FaultRates(NamedTuple):
    """The probabilities of faults: crashes, pauses and jumps per half a round trip, others per request."""

    faults: float = 0
    """Requests fail, get no response, or take effect late or twice."""
    crashes: float = 0
    pauses: float = 0
    stale_lists: float = 0
    """Listings lack new objects, or still contain deleted ones."""
    stale_heads: float = 0
    """Sizes are stale: a new object seems absent, and a deleted one present."""
    jumps: float = 0
    """The host's clock jumps."""


NO_FAULTS = FaultRates()


class Host(World):
    """One run of a host, from its start to its end or crash.

    `log` is called with the name of the host and a line of text for each event; `skew` is the initial error of the
    host's clock in seconds.
    """

    def __init__(
        self, name: str, seed: str, rates: FaultRates, skew: float, log: Callable[[str, str], None]
    ) -> None:
        self.name = name
        self.random = random.Random(seed)
        self.rates = rates
        self.crashed = asyncio.Event()
        self.ended = False
        self._skew = skew
        self._log = log
        self.cut_off_until = 0.0
        self._paused_until = 0.0
        self._suspended: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Return the time by the host's clock, which is wrong by its skew."""
        return 1.7e9 + self._loop.time() + self._skew

    def token(self, size: int) -> str:
        """Return `size` random bytes in hexadecimal."""
        return self.random.randbytes(size).hex()

    def uniform(self, low: float, high: float) -> float:
        """Return a random number between `low` and `high`."""
        return self.random.uniform(low, high)

    def log(self, text: str) -> None:
        """Record an event as a line of text."""
        self._log(self.name, text)

    def chance(self, probability: float) -> bool:
        """Return True with that probability."""
        return probability > 0 and self.random.random() < probability

    def delay(self) -> float:
        """Return a random latency in seconds: about 10 ms, sometimes much longer."""
        draw = self.random.random()
        if draw < 0.9:
            return self.random.expovariate(100)
        return self.random.uniform(0, 1 if draw < 0.99 else 5)

    async def step(self) -> None:
        """Wait for half a round trip, in which the host may crash or pause; on a crashed host, never return."""
        if self.ended:
            raise asyncio.CancelledError
        if not self.crashed.is_set() and self.chance(self.rates.crashes):
            self.log("crashes")
            self.crashed.set()
        elif self.chance(self.rates.pauses):
            pause = self.random.uniform(1, 60)
            self.log(f"pauses for {pause:.1f} s")
            self._paused_until = max(self._paused_until, self._loop.time() + pause)
        if self.chance(self.rates.jumps):
            self._skew += self.random.choice(_JUMPS)
            self.log(f"has its clock set to {self._skew:+.0f} s")
        await asyncio.sleep(self.delay())
        if (pause := self._paused_until - self._loop.time()) > 0:
            await asyncio.sleep(pause)
        if self.crashed.is_set():
            never = self._loop.create_future()
            self._suspended.append(never)  # an unreferenced task would be garbage-collected, and run its `finally`
            await never


class FaultFreeHost(Host):
    """A host without faults or latency, which runs alone before or after the others."""

    def __init__(self, name: str, seed: str, log: Callable[[str, str], None]) -> None:
        super().__init__(name, seed, NO_FAULTS, 0, log)

    async def step(self) -> None:
        """Return immediately, since no other host could use the time."""
