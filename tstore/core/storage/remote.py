"""Wrappers that count and limit the requests to a server, and run them on the I/O loop.

`as_remote` puts four wrappers around a storage. A request passes them in this order: `RemoteStorage` moves it to
the I/O loop, `RetryingStorage` (`retry`) repeats it, `LimitedStorage` makes each attempt wait for its turn, and
`TracedStorage` counts the attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from tstore.core.runtime.event_loops import PerLoop, on_io
from tstore.core.runtime.pool import STREAMS
from tstore.core.storage.base import REMOTE, Storage
from tstore.core.storage.limits import charged
from tstore.core.storage.objects import Capabilities, Page, Traffic, Tuning, checked_key, overlong, read_limit
from tstore.core.storage.retry import RETRY_POLICY, RetryingStorage, RetryPolicy
from tstore.core.storage.wrapper import Request, Wrapper
from tstore.errors import AlreadyExists, NotFound

__all__ = ["LimitedStorage", "RemoteStorage", "TracedStorage", "as_remote"]

_MAX_BYTES = 192 << 20  # bytes of all requests in progress

T = TypeVar("T")

_Call = Callable[[], Awaitable[T]]

_log = logging.getLogger("tstore.storage")


def as_remote(storage: Storage, policy: RetryPolicy = RETRY_POLICY) -> RemoteStorage:
    """Wrap a storage in the four wrappers, and return the outermost one."""
    return RemoteStorage(RetryingStorage(LimitedStorage(TracedStorage(storage), STREAMS, _MAX_BYTES), policy))


class RemoteStorage(Wrapper):
    """The outermost wrapper that `as_remote` adds.

    Every request runs on the I/O loop, so that one session serves all threads and loops of the process. Packs are
    filled in memory and uploaded whole (`packs`).
    """

    @property
    def capabilities(self) -> Capabilities:
        """See `Storage.capabilities`; native I/O of the inner storage is not used, because packs are uploaded."""
        return self.inner.capabilities._replace(native_io=False)

    @property
    def tuning(self) -> Tuning:
        """See `Storage.tuning`; a storage with native I/O is tuned for that, not for requests."""
        return REMOTE if self.inner.capabilities.native_io else self.inner.tuning

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
    """The requests of one event loop: how many are in progress, their bytes, and those that wait, in order."""

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
    """Counts requests and their bytes, and logs each request at DEBUG to `tstore.core.storage`."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._requests: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._bytes_read = 0
        self._bytes_written = 0

    @property
    def traffic(self) -> Traffic:
        return Traffic(dict(self._requests), dict(self._failed), self._bytes_read, self._bytes_written)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """See `Storage.pages`. The call that finds no more pages is not counted: it makes no request."""
        any_page = False
        async for page in super().pages(prefix, delimiter):
            any_page = True
            yield page
        if any_page:  # otherwise the only call made a request, whose result was empty
            self._requests["list"] -= 1

    async def around(self, request: Request, call: _Call[T]) -> T:
        started, outcome = time.perf_counter(), "done"
        self._requests[request.operation] += 1
        try:
            with charged(request.size):
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
                duration = 1000 * (time.perf_counter() - started)
                _log.debug("%s: %s %s (%d bytes): %s after %.1f ms", self.url, *request, outcome, duration)
        if request.operation in ("create", "replace"):
            self._bytes_written += request.size
        elif request.operation in ("get", "read"):
            self._bytes_read += len(result) if isinstance(result, bytes) else request.size
        return result
