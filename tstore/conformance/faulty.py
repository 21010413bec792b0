"""A backend that fails where it is told to, in front of one that works.

    store, faults = await open_faulty("memory://x")
    faults.fail("create", "commits/*")               # the request never arrives: `Unavailable`, nothing done
    faults.lose_reply("create", "commits/*", nth=2)  # it is done, but no answer comes: `Unavailable`
    faults.postpone("create", "commits/*")           # no answer, not done yet; done when `land()` is awaited
    gate = faults.hold("create", "commits/*")        # the call waits: `await gate.reached()`, `gate.release()`

Each rule takes effect once, at the n-th call of that operation whose key matches the pattern (as of `fnmatch`);
`times` makes it go on for more calls. Operations are the methods of `Backend`, of `PackWriter` and `PackReader`
("append", "finish", "read_into", …). `calls` lists what was asked for, `bytes_read` counts what was read.
"""

from __future__ import annotations

import asyncio
import fnmatch
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple, TypeVar

from tstore.errors import TStoreError, Unavailable
from tstore.storage.base import Backend, Buffers, BufferStream, Durability, Keys, PackReader, PackWriter, Transfer
from tstore.storage.plain import Plain
from tstore.store import Mode, Store, open

__all__ = ["Call", "FaultyBackend", "Gate", "open_faulty"]

T = TypeVar("T")


class Call(NamedTuple):
    """One call that reached the wrapper."""

    operation: str
    key: str


class Gate:
    """A call that is held back until it is released."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._released = asyncio.Event()

    async def reached(self) -> None:
        """Returns once the call has come."""
        await self._reached.wait()

    def release(self) -> None:
        """Lets the call go on."""
        self._released.set()

    async def pass_through(self) -> None:
        """What the held call awaits."""
        self._reached.set()
        await self._released.wait()


class _Rule:
    def __init__(
        self,
        action: Literal["fail", "lose", "postpone", "hold"],
        operation: str,
        pattern: str,
        first: int,
        times: int,
        error: Callable[[str], TStoreError],
        gate: Gate | None = None,
    ) -> None:
        self.action = action
        self.operation = operation
        self.pattern = pattern
        self.range = range(first, first + times)
        self.seen = 0
        self.error = error
        self.gate = gate

    def hits(self, call: Call) -> bool:
        if call.operation != self.operation or not fnmatch.fnmatchcase(call.key, self.pattern):
            return False
        self.seen += 1
        return self.seen in self.range


class FaultyBackend(Plain):
    """Another backend with faults; a rule that was given first is tried first, the first that fits is taken."""

    def __init__(self, backend: Backend) -> None:
        self.inner = backend
        self.url = backend.url
        self.capabilities = backend.capabilities
        self.calls: list[Call] = []
        self.bytes_read = 0
        self._rules: list[_Rule] = []
        self._late: list[Callable[[], Awaitable[object]]] = []
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
        """Makes the n-th such call raise, and do nothing."""
        self._rules.append(_Rule("fail", operation, pattern, nth, times, error))

    def lose_reply(self, operation: str, pattern: str = "*", *, nth: int = 1, times: int = 1) -> None:
        """Makes the n-th such call raise `Unavailable` after it was done."""
        self._rules.append(_Rule("lose", operation, pattern, nth, times, Unavailable))

    def postpone(self, operation: str, pattern: str = "*", *, nth: int = 1, times: int = 1) -> None:
        """Makes the n-th such call raise `Unavailable` now and be done later, at `land()`. Awaited calls only."""
        self._rules.append(_Rule("postpone", operation, pattern, nth, times, Unavailable))

    def hold(self, operation: str, pattern: str = "*", *, nth: int = 1) -> Gate:
        """Makes the n-th such call wait before it is done. Awaited calls only."""
        gate = Gate()
        self._rules.append(_Rule("hold", operation, pattern, nth, 1, Unavailable, gate))
        return gate

    async def land(self) -> list[object]:
        """Does all postponed calls, and returns what came of each: a result, or the exception it raised."""
        late, self._late = self._late, []
        return [(await asyncio.gather(call(), return_exceptions=True))[0] for call in late]

    def heal(self) -> None:
        """Forgets all rules."""
        with self._lock:
            self._rules.clear()

    def count(self, operation: str, pattern: str = "*") -> int:
        """How many such calls there were."""
        return sum(c.operation == operation and fnmatch.fnmatchcase(c.key, pattern) for c in self.calls)

    @property
    def transfer(self) -> Transfer:
        """See `Backend.transfer`."""
        return self.inner.transfer

    async def get(self, key: str, most: int | None = None) -> bytes:
        """See `Backend.get`."""
        data = await self._do("get", key, lambda: self.inner.get(key, most))
        self.bytes_read += len(data)
        return data

    async def size(self, key: str) -> int | None:
        """See `Backend.size`."""
        return await self._do("size", key, lambda: self.inner.size(key))

    async def create(self, key: str, data: bytes, durability: Durability) -> None:
        """See `Backend.create`."""
        await self._do("create", key, lambda: self.inner.create(key, data, durability))

    async def hint(self, key: str, data: bytes) -> None:
        """See `Backend.hint`."""
        await self._do("hint", key, lambda: self.inner.hint(key, data))

    async def empty(self) -> bool:
        """See `Backend.empty`."""
        return await self._do("empty", "", self.inner.empty)

    async def list(self, prefix: str) -> Keys:
        """See `Backend.list`."""
        return await self._do("list", prefix, lambda: self.inner.list(prefix))

    async def folders(self, prefix: str) -> Keys:
        """See `Backend.folders`."""
        return await self._do("folders", prefix, lambda: self.inner.folders(prefix))

    async def age(self, prefix: str) -> float | None:
        """See `Backend.age`."""
        return await self._do("age", prefix, lambda: self.inner.age(prefix))

    async def delete(self, key: str) -> None:
        """See `Backend.delete`."""
        await self._do("delete", key, lambda: self.inner.delete(key))

    async def settle(self, prefix: str, durability: Durability) -> None:
        """See `Backend.settle`."""
        await self._do("settle", prefix, lambda: self.inner.settle(prefix, durability))

    async def flush(self) -> None:
        """See `Backend.flush`."""
        await self._do("flush", "", self.inner.flush)

    async def sweep(self) -> None:
        """See `Backend.sweep`."""
        await self._do("sweep", "", self.inner.sweep)

    def writer(self, key: str, durability: Durability) -> PackWriter:
        """See `Backend.writer`."""
        return self.blocking("writer", key, lambda: _FaultyWriter(self, self.inner.writer(key, durability)))

    def upload(self, key: str, size: int, durability: Durability) -> PackWriter:
        """See `Backend.upload`."""
        return self.blocking("upload", key, lambda: _FaultyWriter(self, self.inner.upload(key, size, durability)))

    def reader(self, key: str) -> PackReader:
        """See `Backend.reader`."""
        return self.blocking("reader", key, lambda: _FaultyReader(self, key, self.inner.reader(key)))

    async def close(self) -> None:
        """See `Backend.close`."""
        await self.inner.close()

    async def _do(self, operation: str, key: str, call: Callable[[], Awaitable[T]]) -> T:
        rule = self._met(Call(operation, key))
        if rule is None:
            return await call()
        if rule.gate is not None:
            await rule.gate.pass_through()
            return await call()
        if rule.action == "postpone":
            self._late.append(call)
        elif rule.action == "lose":
            await call()
        raise rule.error(f"{self.url}: {operation} {key}: a fault that was asked for")

    def blocking(self, operation: str, key: str, call: Callable[[], T]) -> T:
        """Makes a blocking call by the rules."""
        rule = self._met(Call(operation, key))
        if rule is None:
            return call()
        if rule.action == "lose":
            call()
        raise rule.error(f"{self.url}: {operation} {key}: a fault that was asked for")

    def count_read(self, size: int) -> None:
        """Adds to `bytes_read`, from any thread."""
        with self._lock:
            self.bytes_read += size

    def _met(self, call: Call) -> _Rule | None:
        with self._lock:
            self.calls.append(call)
            return next((rule for rule in self._rules if rule.hits(call)), None)


class _FaultyWriter:
    def __init__(self, owner: FaultyBackend, inner: PackWriter) -> None:
        self.key = inner.key
        self._owner = owner
        self._inner = inner

    def reserve(self, size: int) -> None:
        self._owner.blocking("reserve", self.key, lambda: self._inner.reserve(size))

    def append(self, buffers: BufferStream, size: int) -> int | None:
        return self._owner.blocking("append", self.key, lambda: self._inner.append(buffers, size))

    def finish(self) -> None:
        self._owner.blocking("finish", self.key, self._inner.finish)

    def discard(self) -> None:
        self._owner.blocking("discard", self.key, self._inner.discard)


class _FaultyReader:
    def __init__(self, owner: FaultyBackend, key: str, inner: PackReader) -> None:
        self._owner = owner
        self._key = key
        self._inner = inner

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        self._owner.blocking("read_into", self._key, lambda: self._inner.read_into(offset, buffers, size))
        self._owner.count_read(size)


async def open_faulty(url: str | os.PathLike[str], mode: Mode = "a") -> tuple[Store, FaultyBackend]:
    """The store at a URL with faults between it and its backend; without rules there are none."""
    store = await open(url, mode)
    backend = FaultyBackend(store.log.backend)
    return Store(backend, store.uuid, mode), backend
