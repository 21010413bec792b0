"""A wrapper that makes a storage fail: by rules, or at random from a seed, as behind a bad network.

    store, faults = await open_faulty("memory://x")
    faults.fail("create", "commits/*")               # raises `Unavailable`, creates nothing
    faults.lose_reply("create", "commits/*", nth=2)  # creates the object, then raises `Unavailable`
    faults.postpone("create", "commits/*")           # raises `Unavailable`; `await faults.do_postponed()` creates
    gate = faults.hold("create", "commits/*")        # waits: `await gate.reached()`, then `gate.release()`

A rule affects the n-th (by default the first) request of its operation whose key matches the `fnmatch` pattern.
With `times` it affects that many matching requests, starting at the n-th. Operations are those of `Request`, and
the blocking calls "writer", "reader", "upload", "append", "finish", "discard" and "read_into". `calls` lists all
requests.

`Chances` draw at most one fault for each awaited request to which no rule applies:

    throttled    raises `Throttled`; the request never takes effect
    lost         raises `Unavailable`; the request never takes effect
    unanswered   takes effect, but raises `Unavailable`
    late         raises `Unavailable`, and takes effect afterwards
    repeated     takes effect, and afterwards once more, as on a network that duplicates requests

Late and repeated requests take effect within `LATE` seconds, unless the process ends earlier. A "read" or "list"
that would be late or repeated is lost instead.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import random
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeVar

from tstore.core.storage.base import PackReader, PackWriter, Storage
from tstore.core.storage.objects import Buffers, BufferStream, Durability, PutMode
from tstore.core.storage.wrapper import Request, Wrapper
from tstore.core.store import Mode, Store, open
from tstore.errors import Throttled, TStoreError, Unavailable

__all__ = ["LATE", "Call", "Chances", "Faults", "Gate", "open_faulty"]

LATE = 0.5  # seconds
_MAX_HELD = 60.0  # seconds that a request, or a test that holds it, waits
_RETRY_AFTER = 0.01  # seconds, in `Throttled`

T = TypeVar("T")


class Call(NamedTuple):
    """A request that reached the wrapper."""

    operation: str
    key: str


class Chances(NamedTuple):
    """The probability of each fault per request; their sum is at most 1."""

    throttled: float = 0.0
    lost: float = 0.0
    unanswered: float = 0.0
    late: float = 0.0
    repeated: float = 0.0


class Gate:
    """A point at which a request waits until the test releases it.

    Both waits raise `TimeoutError` after a minute, which names the `requests` for which the gate is.
    """

    def __init__(self, requests: str) -> None:
        self._requests = requests
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    async def reached(self) -> None:
        """Return once the request has arrived."""
        await self._wait(self._reached, "arrived")

    def release(self) -> None:
        """Let the request proceed."""
        self._released.set()

    async def pass_through(self) -> None:
        """Wait until released; awaited by the request."""
        self._reached.set()
        await self._wait(self._released, "was released")

    async def _wait(self, event: asyncio.Event, what: str) -> None:
        try:
            await asyncio.wait_for(event.wait(), _MAX_HELD)
        except TimeoutError:
            raise TimeoutError(f"no request held at {self._requests!r} {what} within {_MAX_HELD:g} s") from None


@dataclass(eq=False)
class _Rule:
    action: Literal["fail", "lose", "postpone", "hold"]
    operation: str
    pattern: str
    numbers: range  # which of the matching calls it affects, counted from 1
    error: Callable[[str], TStoreError] = Unavailable
    gate: Gate = field(init=False)
    seen: int = 0  # the number of matching calls so far

    def __post_init__(self) -> None:
        self.gate = Gate(f"{self.operation} {self.pattern}")

    def hits(self, call: Call) -> bool:
        """Count a call that matches; return whether the rule takes effect."""
        if call.operation != self.operation or not fnmatch.fnmatchcase(call.key, self.pattern):
            return False
        self.seen += 1
        return self.seen in self.numbers


class Faults(Wrapper):
    """A wrapper that injects faults into the requests to another storage.

    If several rules apply to a request, the first takes effect. An awaited request to which no rule applies takes
    `latency` seconds more, plus a random time with the mean `jitter`. The same `seed` and order of requests give
    the same faults.
    """

    def __init__(
        self,
        inner: Storage,
        chances: Chances = Chances(),  # noqa: B008 - immutable
        *,
        latency: float = 0.0,
        jitter: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(inner)
        self.chances = chances
        self.calls: list[Call] = []
        self.bytes_read = 0
        self._latency = latency
        self._jitter = jitter
        self._random = random.Random(seed)
        self._rules: list[_Rule] = []
        self._postponed: list[Callable[[], Awaitable[object]]] = []
        self._late: set[asyncio.Task[object]] = set()
        self._lock = threading.Lock()

    def fail(
        self,
        operation: str,
        pattern: str = "*",
        *,
        nth: int = 1,
        times: int = 1,
        error: Callable[[str], TStoreError] = Unavailable,
    ) -> None:
        """Make the n-th matching request raise an error instead of taking effect."""
        self._rules.append(_Rule("fail", operation, pattern, range(nth, nth + times), error))

    def lose_reply(self, operation: str, pattern: str = "*", *, nth: int = 1, times: int = 1) -> None:
        """Make the n-th matching request raise `Unavailable` after it took effect."""
        self._rules.append(_Rule("lose", operation, pattern, range(nth, nth + times)))

    def postpone(self, operation: str, pattern: str = "*", *, nth: int = 1, times: int = 1) -> None:
        """Make the n-th matching awaited request raise `Unavailable`; only `do_postponed` makes the request."""
        self._rules.append(_Rule("postpone", operation, pattern, range(nth, nth + times)))

    def hold(self, operation: str, pattern: str = "*", *, nth: int = 1) -> Gate:
        """Make the n-th matching awaited request wait at the returned gate."""
        rule = _Rule("hold", operation, pattern, range(nth, nth + 1))
        self._rules.append(rule)
        return rule.gate

    async def do_postponed(self) -> list[object]:
        """Make all postponed requests now, and return the result of each, or the exception it raised."""
        postponed, self._postponed = self._postponed, []
        return [(await asyncio.gather(call(), return_exceptions=True))[0] for call in postponed]

    def clear_rules(self) -> None:
        """Remove all rules."""
        with self._lock:
            self._rules.clear()

    def count(self, operation: str, pattern: str = "*") -> int:
        """Return the number of matching requests so far."""
        return sum(c.operation == operation and fnmatch.fnmatchcase(c.key, pattern) for c in self.calls)

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Make the request, with a fault if a rule applies or chance decides so."""
        rule = self._match(Call(request.operation, request.key))
        if rule is None:
            result = await self._by_chance(request, call)
            self.count_read(len(result) if isinstance(result, bytes) else 0)
            return result
        if rule.action == "hold":
            await rule.gate.pass_through()
            return await call()
        if rule.action == "postpone":
            self._postponed.append(call)
        elif rule.action == "lose":
            await call()
        raise rule.error(f"{self.url}: {request.operation} {request.key}: injected fault")

    def writer(self, key: str, durability: Durability) -> PackWriter:
        """See `Storage.writer`."""
        inner = super().writer
        return self.call_blocking("writer", key, lambda: _FaultyWriter(self, inner(key, durability)))

    def upload(self, key: str, size: int, durability: Durability, mode: PutMode = PutMode.CREATE) -> PackWriter:
        """See `Storage.upload`."""
        inner = super().upload
        return self.call_blocking("upload", key, lambda: _FaultyWriter(self, inner(key, size, durability, mode)))

    def reader(self, key: str) -> PackReader:
        """See `Storage.reader`."""
        inner = super().reader
        return self.call_blocking("reader", key, lambda: _FaultyReader(self, key, inner(key)))

    def call_blocking(self, operation: str, key: str, call: Callable[[], T]) -> T:
        """Make a blocking call, with a fault if a rule applies."""
        rule = self._match(Call(operation, key))
        if rule is None:
            return call()
        if rule.action == "lose":
            call()
        raise rule.error(f"{self.url}: {operation} {key}: injected fault")

    def count_read(self, size: int) -> None:
        """Add to `bytes_read`; may be called from any thread."""
        with self._lock:
            self.bytes_read += size

    def _match(self, call: Call) -> _Rule | None:
        with self._lock:
            self.calls.append(call)
            return next((rule for rule in self._rules if rule.hits(call)), None)

    async def _by_chance(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        delay = self._latency + (self._random.expovariate(1 / self._jitter) if self._jitter else 0.0)
        fault, lateness = "none", 0.0
        if any(self.chances):
            fault = self._random.choices([*Chances._fields, "none"], [*self.chances, 1 - sum(self.chances)])[0]
            lateness = self._random.uniform(0, LATE)
        if delay:
            await asyncio.sleep(delay)
        if request.operation in ("read", "list") and fault in ("late", "repeated"):
            fault = "lost"  # later, the caller may have reused its buffers, or stopped listing pages
        context = f"{self.url}: {request.operation} {request.key}"
        match fault:
            case "throttled":
                raise Throttled(f"{context}: too many requests; try again later", _RETRY_AFTER)
            case "lost":
                raise Unavailable(f"{context}: the request was lost; try again")
            case "unanswered":
                await call()
                raise Unavailable(f"{context}: the response was lost; try again")
            case "late":
                self._do_later(call, lateness)
                raise Unavailable(f"{context}: no response came; try again")
            case "repeated":
                result = await call()
                self._do_later(call, lateness)
                return result
        return await call()

    def _do_later(self, call: Callable[[], Awaitable[object]], delay: float) -> None:
        async def late() -> None:
            await asyncio.sleep(delay)
            try:
                await call()
            except TStoreError:
                return  # the caller is no longer waiting, or has a result already

        task = asyncio.get_running_loop().create_task(late())
        self._late.add(task)
        task.add_done_callback(self._late.discard)


class _FaultyWriter:
    def __init__(self, faults: Faults, inner: PackWriter) -> None:
        self.key = inner.key
        self._faults = faults
        self._inner = inner

    def append(self, buffers: BufferStream, size: int) -> int | None:
        return self._faults.call_blocking("append", self.key, lambda: self._inner.append(buffers, size))

    def finish(self) -> None:
        self._faults.call_blocking("finish", self.key, self._inner.finish)

    def discard(self) -> None:
        self._faults.call_blocking("discard", self.key, self._inner.discard)


class _FaultyReader:
    def __init__(self, faults: Faults, key: str, inner: PackReader) -> None:
        self._faults = faults
        self._key = key
        self._inner = inner

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        self._faults.call_blocking("read_into", self._key, lambda: self._inner.read_into(offset, buffers, size))
        self._faults.count_read(size)


async def open_faulty(url: str | os.PathLike[str], mode: Mode = "a") -> tuple[Store, Faults]:
    """Return the store at a URL, and the `Faults` around its storage, which has no rules yet."""
    store = await open(url, mode)
    await store.log.ensure_created()  # without faults
    faults = Faults(store.log.storage)
    return Store(faults, store.marker, mode), faults
