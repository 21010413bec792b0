"""One run of a simulated host: its clock, its random numbers, and the probabilities of its faults."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

from tstore.runtime.world import World

__all__ = ["NO_FAULTS", "FaultFreeHost", "FaultRates", "Host"]

_JUMPS = (-7_200.0, -20.0, 20.0, 90_000.0)


class FaultRates(NamedTuple):
    """The probabilities of faults, per request."""

    faults: float = 0
    crashes: float = 0
    pauses: float = 0
    stale_lists: float = 0
    """Listings lack new objects, or still have deleted ones."""
    stale_heads: float = 0
    """Sizes are stale, so that a new object seems absent and a deleted one present."""
    jumps: float = 0
    """The clock of the host jumps."""


NO_FAULTS = FaultRates()


class Host(World):
    """One run of one host: its clock, its random numbers, and whether it is alive.

    `log` gets a line of text for each event; `skew` is the initial error of its clock, in seconds.
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
        self._still_until = 0.0
        self._graves: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Return the time of the host's clock, which is off by its skew."""
        return 1.7e9 + self._loop.time() + self._skew

    def token(self, size: int) -> str:
        """Return `size` random bytes in hexadecimal."""
        return self.random.randbytes(size).hex()

    def uniform(self, low: float, high: float) -> float:
        """Return a random number."""
        return self.random.uniform(low, high)

    def log(self, text: str) -> None:
        """Record an event as a line of text."""
        self._log(self.name, text)

    def chance(self, likelihood: float) -> bool:
        """Return True with that probability."""
        return likelihood > 0 and self.random.random() < likelihood

    def delay(self) -> float:
        """Return a random latency in seconds: about 10 ms, sometimes much longer."""
        draw = self.random.random()
        if draw < 0.9:
            return self.random.expovariate(100)
        return self.random.uniform(0, 1 if draw < 0.99 else 5)

    async def step(self) -> None:
        """Wait for one leg of a request; the host may crash or pause. For a crashed host this never returns."""
        if self.ended:
            raise asyncio.CancelledError
        if not self.crashed.is_set() and self.chance(self.rates.crashes):
            self.log("crashes")
            self.crashed.set()
        elif self.chance(self.rates.pauses):
            still = self.random.uniform(1, 60)
            self.log(f"pauses for {still:.1f} s")
            self._still_until = max(self._still_until, self._loop.time() + still)
        if self.chance(self.rates.jumps):
            self._skew += self.random.choice(_JUMPS)
            self.log(f"has its clock set to {self._skew:+.0f} s")
        await asyncio.sleep(self.delay())
        if (still := self._still_until - self._loop.time()) > 0:
            await asyncio.sleep(still)
        if self.crashed.is_set():
            grave = self._loop.create_future()
            self._graves.append(grave)  # an unreferenced task would be garbage-collected, which runs its `finally`
            await grave


class FaultFreeHost(Host):
    """A host without faults or latency, which runs alone, before or after all others."""

    def __init__(self, name: str, seed: str, log: Callable[[str, str], None]) -> None:
        super().__init__(name, seed, NO_FAULTS, 0, log)

    async def step(self) -> None:
        """Return at once: no other host could use the time."""
