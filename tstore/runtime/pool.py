"""Blocking work in worker threads.

File calls, checksums and encoding run here as plain functions on buffers that release the GIL. A call crosses the
event loop once: `each` starts a few workers, every worker draws items until none is left, and the caller is woken
when all of them have ended. A cancelled or failed call also waits for its workers, so that no thread touches the
caller's memory after the call has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from tstore.runtime.threads import Workers

__all__ = ["STREAMS", "WORKERS", "Batch", "all_ended", "current_batch", "each", "inline", "run", "uncancelled"]

T = TypeVar("T")

WORKERS = max(2, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4))
"""Worker threads that carry data; control calls (small reads, creates) have threads of their own."""

STREAMS = 32
"""Threads for calls that carry data and mostly wait for a server: `each` uses them where asked for that many."""


class Cancellable(Protocol):
    """A request that a worker waits for."""

    def cancel(self) -> None:
        """Ask it to end early."""


class Batch(NamedTuple):
    """One call of `each`, as its workers see it."""

    requests: set[Cancellable]
    """What the workers wait for; cancelled when the batch stops."""
    stopped: threading.Event


class _Threads:
    """The threads of this process, started when they are needed; a forked child has its own."""

    def __init__(self) -> None:
        self.data = Workers(WORKERS, "tstore-data")
        self.streams = Workers(STREAMS, "tstore-stream")
        self.control = Workers(16, "tstore-control")
        self.local = threading.local()


_threads = _Threads()
_pause: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("tstore_pool_pause", default=None)


@contextlib.contextmanager
def inline(pause: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Have the running task, and all tasks that it starts inside, use no threads.

    `run` and `each` then make their calls themselves, one after the other, and await `pause` before each: for
    simulations, whose order of events must not depend on threads.
    """
    before = _pause.set(pause)
    try:
        yield
    finally:
        _pause.reset(before)


def _after_fork() -> None:
    global _threads  # noqa: PLW0603 - the parent's threads do not exist in the child
    _threads = _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


async def run(call: Callable[..., T], *args: Any) -> T:
    """The result of one blocking call, made in a control thread; cancelling waits for its end."""
    if (pause := _pause.get()) is not None:
        await pause()
        return call(*args)
    made = _Made(call, args)
    _threads.control.start(made)
    return await made.result()


class _Made(Generic[T]):
    """One call in a thread, for which one task of a loop waits, and is woken once."""

    def __init__(self, call: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._call = call
        self._args = args
        self._loop = asyncio.get_running_loop()
        self._woken: asyncio.Future[None] = self._loop.create_future()
        self._returned: list[T] = []
        self._raised: BaseException | None = None

    def __call__(self) -> None:
        try:
            self._returned.append(self._call(*self._args))
        except BaseException as error:
            self._raised = error
        with contextlib.suppress(RuntimeError):  # a loop that was closed without waiting
            self._loop.call_soon_threadsafe(self._wake)

    async def result(self) -> T:
        """What the call returned or raised; cancelling waits for its end."""
        cancelled: asyncio.CancelledError | None = None
        while not self._returned and self._raised is None:
            try:
                await self._woken
            except asyncio.CancelledError as error:
                cancelled = error
                self._woken = self._loop.create_future()
        try:
            if cancelled is not None:
                raise cancelled
            if self._raised is not None:
                raise self._raised
            return self._returned[0]
        finally:
            self._raised = cancelled = None  # else the exception and this frame hold each other

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)


async def each(call: Callable[[T], None], items: Iterable[T], workers: int = WORKERS) -> None:
    """Calls `call(item)` for every item on up to `workers` threads; returns when all have ended.

    More than `WORKERS` are of those `STREAMS` that may wait for a server. The first exception stops the drawing of
    further items and is raised once every worker has ended.
    """
    if (pause := _pause.get()) is not None:
        for item in items:
            await pause()
            call(item)
        return
    source = iter(items)
    lock = threading.Lock()
    batch = Batch(set(), threading.Event())

    def work() -> None:
        _threads.local.batch = batch
        try:
            while not batch.stopped.is_set():
                with lock:
                    item = next(source, batch)
                if item is batch:
                    return
                call(item)  # type: ignore[arg-type]
        except BaseException:
            end()
            raise

    def end() -> None:
        batch.stopped.set()
        for request in list(batch.requests):
            request.cancel()

    threads = _threads.data if workers <= WORKERS else _threads.streams
    await all_ended([threads.submit(work) for _ in range(max(1, min(workers, STREAMS)))], end)


def current_batch() -> Batch | None:
    """Return the batch that the calling thread works for, None outside of `each`."""
    batch: Batch | None = getattr(_threads.local, "batch", None)
    return batch


async def all_ended(futures: list[Future[T]], stop: Callable[[], object]) -> list[T]:
    """Return the results once all futures have ended; a cancelled caller calls `stop` and waits for that too."""
    waiting = [asyncio.wrap_future(f) for f in futures]
    cancelled: asyncio.CancelledError | None = None
    pending: set[asyncio.Future[T]] = set(waiting)
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            stop()
    failures = [e for w in waiting if (e := w.exception()) is not None]
    if cancelled is not None:
        raise cancelled
    if failures:  # those that were cancelled were so because of another
        raise next((e for e in failures if not isinstance(e, asyncio.CancelledError)), failures[0])
    return [w.result() for w in waiting]


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """The result of work that always runs to its end; a cancelled caller waits for that, then is cancelled."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # looked at, so that it is not reported as lost
        raise cancelled
    return task.result()
