"""One run of a simulated host: its clock, its random numbers, and how often something goes wrong for it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

from tstore.runtime.world import World

__all__ = ["CALM", "Host", "Onlooker", "Weather"]

_JUMPS = (-7_200.0, -20.0, 20.0, 90_000.0)


class Weather(NamedTuple):
    """The probabilities with which one request, or one host at a request, meets a fault."""

    faults: float = 0
    crashes: float = 0
    pauses: float = 0
    stale: float = 0
    """Listings lack what is new, or still show what was deleted."""
    blind: float = 0
    """Sizes are those of a moment ago, so that a new object seems absent and a deleted one present."""
    jumps: float = 0
    """The clock of the host is set to another time."""


CALM = Weather()


class Host(World):
    """One run of one host: its clock, its random numbers, and whether it still lives.

    `tell` takes one line of the story; `skew` is what its clock is wrong by at first.
    """

    def __init__(
        self, name: str, seed: str, weather: Weather, skew: float, tell: Callable[[str, str], None]
    ) -> None:
        self.name = name
        self.random = random.Random(seed)
        self.weather = weather
        self.crashed = asyncio.Event()
        self.ended = False
        self._skew = skew
        self._tell = tell
        self.cut_off_until = 0.0
        self._still_until = 0.0
        self._graves: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Its own clock, wrong by its skew."""
        return 1.7e9 + self._loop.time() + self._skew

    def token(self, size: int) -> str:
        """Random digits of its own."""
        return self.random.randbytes(size).hex()

    def uniform(self, low: float, high: float) -> float:
        """A random number of its own."""
        return self.random.uniform(low, high)

    def tell(self, text: str) -> None:
        """Add a line to the story."""
        self._tell(self.name, text)

    def chance(self, likelihood: float) -> bool:
        """True with that probability."""
        return likelihood > 0 and self.random.random() < likelihood

    def delay(self) -> float:
        """Seconds that a request is under way: 10 ms or so, now and then much longer."""
        draw = self.random.random()
        if draw < 0.9:
            return self.random.expovariate(100)
        return self.random.uniform(0, 1 if draw < 0.99 else 5)

    async def step(self) -> None:
        """One stretch of a request's way; here a host may crash or stand still. A dead host never returns."""
        if self.ended:
            raise asyncio.CancelledError
        if not self.crashed.is_set() and self.chance(self.weather.crashes):
            self.tell("crashes")
            self.crashed.set()
        elif self.chance(self.weather.pauses):
            still = self.random.uniform(1, 60)
            self.tell(f"stands still for {still:.1f} s")
            self._still_until = max(self._still_until, self._loop.time() + still)
        if self.chance(self.weather.jumps):
            self._skew += self.random.choice(_JUMPS)
            self.tell(f"has its clock set to {self._skew:+.0f} s")
        await asyncio.sleep(self.delay())
        if (still := self._still_until - self._loop.time()) > 0:
            await asyncio.sleep(still)
        if self.crashed.is_set():
            grave = self._loop.create_future()
            self._graves.append(grave)  # a task that nothing refers to would be collected, and its `finally` run
            await grave


class Onlooker(Host):
    """A host that is alone with the store, before the others live or once they have ended: it need not wait."""

    def __init__(self, name: str, seed: str, tell: Callable[[str, str], None]) -> None:
        super().__init__(name, seed, CALM, 0, tell)

    async def step(self) -> None:
        """Return at once: a time that passes would be nobody else's."""
