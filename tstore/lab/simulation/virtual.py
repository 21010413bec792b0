"""Virtual time: a deterministic event loop, in which waiting takes no real time, and the hosts that run in it.

Time stands still while callbacks run, and jumps to the next timer when no callback is ready. There are no threads,
files or sockets. The loop raises `Stuck` when no callback and no timer is left.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, NamedTuple, TypeVar

from tstore.core.runtime.world import World

__all__ = ["NO_FAULTS", "FaultFreeHost", "FaultRates", "Host", "Stuck", "VirtualLoop"]

T = TypeVar("T")

_INSTANT = 1e-9  # seconds within which timers count as simultaneous
_JUMPS = (-7_200.0, -20.0, 20.0, 90_000.0)  # jumps of a clock, in seconds


class Stuck(Exception):
    """A deadlock: tasks wait, but no timer is set and no callback is ready."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop whose `time()` starts at 0. Simultaneous timers run in the order of their creation."""

    _stopping: bool  # set by `stop`

    def __init__(self) -> None:
        super().__init__()
        self._virtual_now = 0.0
        self._callbacks: deque[_Callback] = deque()
        self._timers: list[tuple[float, int, _Callback]] = []
        self._created = 0

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual_now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> _Callback:  # type: ignore[override]
        """Schedule a callback for the next turn of the loop."""
        handle = _Callback((callback, args, copy_context() if context is None else context))
        self._callbacks.append(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there are no threads

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        """Schedule a callback after a delay in virtual seconds."""
        return self.call_at(self._virtual_now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> _Callback:
        """Schedule a callback at a virtual time."""
        handle = _Callback((callback, args, copy_context() if context is None else context))
        self._created += 1
        heapq.heappush(self._timers, (when, self._created, handle))
        return handle

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: object = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        """Create a task as the loops of asyncio do, without a name of its own."""
        return asyncio.Task(coro, loop=self, name="simulated" if name is None else str(name), context=context)

    get_debug = staticmethod(bool)  # False, for each future anew

    def _run_once(self) -> None:
        """Run callbacks and timers until the loop is stopped."""
        callbacks, timers = self._callbacks, self._timers
        while not self._stopping:
            if not callbacks:
                while timers and timers[0][2].cancelled():
                    heapq.heappop(timers)
                if not timers:
                    raise Stuck("no timer is set and no callback is ready")
                self._virtual_now = max(self._virtual_now, timers[0][0])
            due = self._virtual_now + _INSTANT
            while timers and timers[0][0] < due:
                callbacks.append(heapq.heappop(timers)[2])
            for _ in range(len(callbacks)):
                function, arguments, context = callbacks.popleft()
                if function is not None:
                    try:
                        context.run(function, *arguments)
                    except Exception as error:
                        self.call_exception_handler({"message": f"an error in {function!r}", "exception": error})

    def _write_to_self(self) -> None:
        return None  # the loop never sleeps, so there is nothing to wake


class _Callback(list[Any]):
    """The function of a callback, or None once it is cancelled, its arguments and context: also its handle.

    A list is created several times as fast as the handles of asyncio, which also support debugging and threads.
    """

    __slots__ = ()

    def cancel(self) -> None:
        self[:2] = None, ()

    def cancelled(self) -> bool:
        return self[0] is None


class FaultRates(NamedTuple):
    """The probabilities of faults: crashes, pauses and jumps per half a round trip, other faults per request."""

    faults: float = 0
    """Requests fail, get no response, or take effect late or twice."""
    crashes: float = 0
    """The host stops forever."""
    pauses: float = 0
    """The host stalls for up to a minute."""
    stale_lists: float = 0
    """Listings lack new objects, or still contain deleted ones."""
    stale_heads: float = 0
    """Sizes (responses to `head`) are stale: a new object seems absent, and a deleted one present."""
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
        self.cancelled = False  # set at the end of the run, so that the next step raises `CancelledError`
        self._skew = skew
        self._log = log
        self.cut_off_until = 0.0  # the time until which requests get no response
        self._paused_until = 0.0
        self.paused = 0.0  # seconds that the host was paused, in total
        self._suspended: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()
        self._context = copy_context()  # of all its timers

    def now(self) -> float:
        """Return the time by the host's clock, which is ahead of the virtual time by its skew."""
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
        if self.cancelled:
            raise asyncio.CancelledError
        if self.rates.crashes or self.rates.pauses or self.rates.jumps:
            self._interfere()
        arrived = self._loop.create_future()  # cheaper than `asyncio.sleep`
        self._loop.call_later(self.delay(), _arrive, arrived, context=self._context)
        await arrived
        if (pause := self._paused_until - self._loop.time()) > 0:
            await asyncio.sleep(pause)
        if self.crashed.is_set():
            never = self._loop.create_future()
            self._suspended.append(never)  # else Python would garbage-collect the task and run its `finally`
            await never

    def _interfere(self) -> None:
        """Let the host crash or pause, or its clock jump, with the probabilities of its rates."""
        if not self.crashed.is_set() and self.chance(self.rates.crashes):
            self.log("crashes")
            self.crashed.set()
        elif self.chance(self.rates.pauses):
            pause = self.random.uniform(1, 60)
            self.log(f"pauses for {pause:.1f} s")
            resumes = max(self._paused_until, self._loop.time() + pause)
            self.paused += resumes - max(self._paused_until, self._loop.time())
            self._paused_until = resumes
        if self.chance(self.rates.jumps):
            self._skew += self.random.choice(_JUMPS)
            self.log(f"has its clock set to {self._skew:+.0f} s")


def _arrive(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class FaultFreeHost(Host):
    """A host without faults or latency, which runs alone before or after the others."""

    def __init__(self, name: str, seed: str, log: Callable[[str, str], None]) -> None:
        super().__init__(name, seed, NO_FAULTS, 0, log)

    async def step(self) -> None:
        """Return immediately: no other host runs at the same time, so the order of steps does not matter."""
