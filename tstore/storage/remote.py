"""Wrappers that count, limit and retry the requests to a server, and run them on the I/O loop.

Requests that had no response or were throttled are retried:

1. Only `Unavailable` and `Throttled` are retried. Reads, deletes and replacements may be done twice.
2. The pause before the next try is drawn between `min_pause` and three times the previous pause, up to `max_pause`
   (decorrelated jitter), or is the server's `retry_after` if that is longer.
3. No try begins later than `deadline` after the first. Until the server has responded once, the deadline is
   `first_deadline`, or `connect_deadline` if no connection can be made: a wrong address fails fast. All tries
   together wait at most `deadline`, beyond the time that their bytes take at the lowest rate (`limits.CallTime`).
4. A create without a response may have taken effect, or may still do so. If a later try finds that the key is
   taken, the object is therefore read back and compared: equal bytes mean that this create, or another with the
   same bytes, succeeded; other bytes mean `AlreadyExists`, as does a key that is taken at the first try. If a
   later try is refused, the outcome of the earlier one remains unknown, and the error is `Unavailable`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, TypeVar

from tstore.errors import AlreadyExists, Denied, NotFound, Throttled, TStoreError, Unavailable, Unreachable
from tstore.runtime import world
from tstore.runtime.event_loops import PerLoop, on_io
from tstore.runtime.pool import STREAMS
from tstore.storage.base import REMOTE, Storage
from tstore.storage.limits import one_call
from tstore.storage.objects import (
    Buffers,
    Capabilities,
    Durability,
    Page,
    PutMode,
    Traffic,
    Tuning,
    checked_key,
    overlong,
    read_limit,
)
from tstore.storage.wrapper import Request, Wrapper, request_of_put

__all__ = [
    "RETRY_POLICY",
    "LimitedStorage",
    "RetryPolicy",
    "RetryingStorage",
    "TracedStorage",
    "as_remote",
]

_MAX_BYTES = 192 << 20  # of all requests in progress
_PIECE = 4 << 20  # bytes that are compared at a time
_RESPONSES = (AlreadyExists, Denied, NotFound)  # errors that only a response can cause

T = TypeVar("T")

_Call = Callable[[], Awaitable[T]]

_log = logging.getLogger("tstore.storage")


class RetryPolicy(NamedTuple):
    """Pauses and deadlines of retries, in seconds."""

    min_pause: float = 0.1
    max_pause: float = 10.0
    deadline: float = 60.0
    first_deadline: float = 10.0
    connect_deadline: float = 1.0


RETRY_POLICY = RetryPolicy()


def as_remote(storage: Storage, policy: RetryPolicy = RETRY_POLICY) -> RemoteStorage:
    """Return the storage in these wrappers and `RetryingStorage`."""
    return RemoteStorage(RetryingStorage(LimitedStorage(TracedStorage(storage), STREAMS, _MAX_BYTES), policy))


class RemoteStorage(Wrapper):
    """The outermost wrapper that `as_remote` adds.

    Every request runs on the I/O loop, so that one session serves all threads and loops of the process. Packs are
    filled in memory and uploaded whole (`packs`).
    """

    @property
    def capabilities(self) -> Capabilities:
        """See `Storage.capabilities`; packs are not written in place, even if the inner storage can do that."""
        return self.inner.capabilities._replace(in_place=False)

    @property
    def tuning(self) -> Tuning:
        return REMOTE if self.inner.capabilities.in_place else self.inner.tuning

    async def around(self, request: Request, call: _Call[T]) -> T:
        if request.operation not in ("list", "sync", "sweep"):
            checked_key(request.key, self.url)

        async def awaited_call() -> T:
            return await call()

        return await on_io(awaited_call())

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        """See `Storage.get`. The bound is enforced here, in case the inner storage does not enforce it."""
        data = await super().get(key, read_limit(key, max_size))
        if len(data) > (max_size := read_limit(key, max_size, data)):
            raise overlong(f"{self.url}: {key}", max_size)
        return data

    async def close(self) -> None:
        await on_io(self.inner.close())


class _InProgress:
    """The requests of one event loop: the number and bytes of those in progress, and those that wait, in order."""

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()


class LimitedStorage(Wrapper):
    """Limits the number of requests in progress and their bytes; the others wait in turn.

    A request with more than `max_bytes` proceeds when no other request in progress has any bytes.
    """

    def __init__(self, inner: Storage, max_requests: int, max_bytes: int) -> None:
        super().__init__(inner)
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._state = PerLoop(_InProgress)

    async def around(self, request: Request, call: _Call[T]) -> T:
        state, size = self._state.get(), request.size
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        state.waiting.append((size, turn))
        self._admit(state)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(state, size)  # the request had been admitted
            else:
                self._admit(state)  # the requests behind it may be smaller
            raise
        try:
            return await call()
        finally:
            self._leave(state, size)

    def _admit(self, state: _InProgress) -> None:
        while state.waiting:
            size, turn = state.waiting[0]
            fits = state.bytes == 0 or state.bytes + size <= self._max_bytes
            if not turn.done():
                if state.requests >= self._max_requests or (size and not fits):
                    return
                state.requests += 1
                state.bytes += size
                turn.set_result(None)
            state.waiting.popleft()

    def _leave(self, state: _InProgress, size: int) -> None:
        state.requests -= 1
        state.bytes -= size
        self._admit(state)


class TracedStorage(Wrapper):
    """Counts requests and their bytes, and logs each request at DEBUG to `tstore.storage`."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._requests: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._read = 0
        self._written = 0

    @property
    def traffic(self) -> Traffic:
        return Traffic(dict(self._requests), dict(self._failed), self._read, self._written)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """See `Storage.pages`. The call that finds no more pages is not counted: it makes no request."""
        any_page = False
        async for page in super().pages(prefix, delimiter):
            any_page = True
            yield page
        if any_page:
            self._requests["list"] -= 1

    async def around(self, request: Request, call: _Call[T]) -> T:
        began, outcome = time.perf_counter(), "done"
        self._requests[request.operation] += 1
        try:
            result = await call()
        except (NotFound, AlreadyExists) as error:
            outcome = type(error).__name__
            raise
        except BaseException as error:
            self._failed[request.operation] += 1
            outcome = f"{type(error).__name__}: {error}"
            raise
        finally:
            if _log.isEnabledFor(logging.DEBUG):
                duration = 1000 * (time.perf_counter() - began)
                _log.debug("%s: %s %s (%d bytes): %s after %.1f ms", self.url, *request, outcome, duration)
        if request.operation in ("create", "hint"):
            self._written += request.size
        elif request.operation in ("get", "read"):
            self._read += len(result) if isinstance(result, bytes) else request.size
        return result


class RetryingStorage(Wrapper):
    """Retries requests by the rules at the top of this file."""

    def __init__(self, inner: Storage, policy: RetryPolicy = RETRY_POLICY) -> None:
        super().__init__(inner)
        self._policy = policy
        self._responded = False

    async def around(self, request: Request, call: _Call[T]) -> T:
        return await self._retry(request, call)

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        if mode is not PutMode.CREATE:
            return await super().put(key, buffers, mode, durability)

        async def read_back() -> None:
            if not await self._equals(key, buffers):
                raise AlreadyExists(f"{self.url}: {key} exists already, with other contents")

        request = request_of_put(key, buffers, mode)
        return await self._retry(request, lambda: self.inner.put(key, buffers, mode, durability), read_back)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """See `Storage.pages`. A listing that broke off is restarted, and names yielded already are skipped."""
        pages, broken = aiter(self.inner.pages(prefix, delimiter)), False
        last_key = last_folder = ""  # some servers send all folders with the first page

        async def next_page() -> Page | None:
            nonlocal pages, broken
            if broken:
                pages, broken = aiter(self.inner.pages(prefix, delimiter)), False
            try:
                return await anext(pages, None)
            except TStoreError:
                broken = True
                raise

        while (page := await self.around(Request("list", prefix), next_page)) is not None:
            entries = [e for e in page.entries if e.key > last_key]
            folders = [f for f in page.folders if f > last_folder]
            last_key, last_folder = max([last_key, *(e.key for e in entries)]), max([last_folder, *folders])
            yield Page(entries, folders)

    async def _retry(self, request: Request, call: _Call[T], read_back: _Call[T] | None = None) -> T:
        """Make the call by those rules; `read_back` compares a key that a later try finds taken."""
        clock, policy = asyncio.get_running_loop().time, self._policy
        began, pause, uncertain, creates = clock(), policy.min_pause, False, read_back is not None
        with one_call(policy.deadline) as call_time:
            while True:
                try:
                    result = await call()
                    self._responded = True
                    return result
                except Unavailable as error:
                    uncertain = True
                    pause = min(policy.max_pause, world.uniform(policy.min_pause, 3 * pause))
                    retry_after = error.retry_after if isinstance(error, Throttled) else None
                    wait = pause if retry_after is None else max(pause, retry_after)
                    self._responded |= isinstance(error, Throttled)
                    if clock() - began + wait > self._deadline(error):
                        raise
                    operation = f"{request.operation} {request.key}"
                    _log.info("%s: %s: %s; retried in %.1f s", self.url, operation, error, wait)
                except TStoreError as error:
                    self._responded |= isinstance(error, _RESPONSES)
                    if not (uncertain and creates):
                        raise
                    if not isinstance(error, AlreadyExists):
                        lost = "An earlier try had no response; it may have taken effect, or may still do so"
                        raise Unavailable(f"{error}. {lost}") from error
                    if read_back is None:
                        raise
                    call, read_back = read_back, None
                    continue
                call_time.left -= wait
                await asyncio.sleep(wait)

    def _deadline(self, error: Unavailable) -> float:
        """Return the seconds after which a request that fails with this error is no longer retried."""
        if self._responded:
            return self._policy.deadline
        if isinstance(error, Unreachable):
            return min(self._policy.deadline, self._policy.connect_deadline)
        return min(self._policy.deadline, self._policy.first_deadline)

    async def _equals(self, key: str, buffers: Buffers) -> bool:
        """Return whether the object equals the joined buffers; raise `Unavailable` if that is unknown."""
        entry = await self.inner.head(key)
        if entry is None:
            raise Unavailable(f"{self.url}: {key} existed, then did not; whether it was created is unknown")
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if entry.size != sum(map(len, views)):
            return False
        offset = 0
        for view in views:
            for start in range(0, len(view), _PIECE):
                part = view[start : start + _PIECE]
                stored = bytearray(len(part))
                await self.inner.read(key, offset, [stored], len(stored))
                if stored != part:
                    return False
                offset += len(part)
        return True
