"""The wrappers of a storage behind a network: counted, limited, retried, and run on the I/O loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from tstore.errors import AlreadyExists, NotFound
from tstore.runtime.event_loops import PerLoop, on_io
from tstore.runtime.pool import STREAMS
from tstore.storage.base import REMOTE, Storage
from tstore.storage.objects import Capabilities, Page, Traffic, Tuning, bound, checked_key, overlong
from tstore.storage.retry import RETRY_POLICY, RetryingStorage, RetryPolicy
from tstore.storage.wrapper import Request, Wrapper

__all__ = ["LimitedStorage", "RemoteStorage", "TracedStorage", "as_remote"]

_IN_FLIGHT = 192 << 20  # bytes of the requests in progress

T = TypeVar("T")

_log = logging.getLogger("tstore.storage")


def as_remote(storage: Storage, policy: RetryPolicy = RETRY_POLICY) -> RemoteStorage:
    """Return the storage as stores use it: counted, limited, retried, and run on the I/O loop."""
    return RemoteStorage(RetryingStorage(LimitedStorage(TracedStorage(storage), STREAMS, _IN_FLIGHT), policy))


class RemoteStorage(Wrapper):
    """The outermost wrapper of a storage behind a network, which stores whole objects.

    Every request runs on the I/O loop, so that one session serves all threads and loops of the process. Packs are
    filled in memory (`packs`).
    """

    @property
    def capabilities(self) -> Capabilities:
        """See `Storage.capabilities`; packs are not written in place, even if the inner storage could."""
        return self.inner.capabilities._replace(in_place=False)

    @property
    def tuning(self) -> Tuning:
        return REMOTE if self.inner.capabilities.in_place else self.inner.tuning

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Make the request on the I/O loop."""
        if request.operation not in ("list", "sync", "sweep"):
            checked_key(request.key, self.url)

        async def made() -> T:
            return await call()

        return await on_io(made())

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        """See `Storage.get`; enforces the bound of the object's kind, whatever the inner storage does."""
        data = await super().get(key, bound(key, max_size))
        if len(data) > (max_size := bound(key, max_size, data)):
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
    """Has at most `requests` requests in progress, with at most `size` bytes in total; the others wait in turn.

    A request with more bytes than that proceeds when no other request in progress has any.
    """

    def __init__(self, inner: Storage, requests: int, size: int) -> None:
        super().__init__(inner)
        self._most_requests = requests
        self._most_bytes = size
        self._state = PerLoop(_InProgress)

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Make the request when its turn comes and its bytes fit."""
        state, size = self._state.get(), request.size
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        state.waiting.append((size, turn))
        self._admit(state)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave(state, size)  # it had been admitted
            else:
                self._admit(state)  # those behind it may be smaller
            raise
        try:
            return await call()
        finally:
            self._leave(state, size)

    def _admit(self, state: _InProgress) -> None:
        while state.waiting:
            size, turn = state.waiting[0]
            fits = state.bytes == 0 or state.bytes + size <= self._most_bytes
            if not turn.done():
                if state.requests >= self._most_requests or (size and not fits):
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
        """See `Storage.pages`; finding the end of a listing is not counted, since the last page marks it."""
        shown = False
        async for page in super().pages(prefix, delimiter):
            shown = True
            yield page
        if shown:
            self._requests["list"] -= 1

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Make the request and count it."""
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
                took = 1000 * (time.perf_counter() - began)
                where = f"{self.url}: {request.operation} {request.key}"
                _log.debug("%s (%d bytes): %s after %.1f ms", where, request.size, outcome, took)
        if request.operation in ("create", "hint"):
            self._written += request.size
        elif request.operation in ("get", "read"):
            self._read += len(result) if isinstance(result, bytes) else request.size
        return result
