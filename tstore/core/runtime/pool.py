"""Worker threads, and the blocking calls made in them.

File I/O, checksums and encoding run here as plain functions that release the GIL. A call of `each` crosses the
event loop once: it starts a few workers, every worker takes items until none is left, and the caller is woken when
all workers have ended. A cancelled or failed call also waits for its workers, so that no thread accesses the
caller's memory after the call has returned.

The executors of the standard library refuse calls as soon as the main thread has ended, although a save in another
thread may still need them. `Workers` accepts calls until the interpreter exits, and the exit waits for all calls.
By then Python may refuse to start threads (3.12 starts none after the main thread has ended). Existing threads
then make the calls, or the submitting thread does if there are none.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from tstore.core.runtime.pacing import Pace

__all__ = [
    "STREAMS",
    "WORKERS",
    "Cancellable",
    "EachCall",
    "Workers",
    "current_each_call",
    "each",
    "give_way",
    "give_way_in_worker",
    "has_low_priority",
    "low_priority",
    "run",
    "run_to_end",
    "uses_threads",
    "wait_all",
    "without_threads",
]

T = TypeVar("T")

WORKERS = max(2, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4))
"""The number of threads that transfer data; control calls (small reads, creates) use separate threads."""

# not of lower priority: the main thread would wait longer for a descheduled one that holds the interpreter's lock
_BACKGROUND_WORKERS = WORKERS // 2

STREAMS = 32
"""The number of threads that mostly wait for a server; `each` uses these if asked for more than `WORKERS`."""


class Workers:
    """A pool of up to `limit` threads, started when needed, that make calls in the order of submission."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._threads = 0
        self._pending = 0  # calls submitted and not ended
        self._changed = threading.Condition()
        _pools.add(self)

    def start(self, call: Callable[[], object]) -> None:
        """Submit a call whose result is not needed, and which must not raise."""
        with self._changed:
            if self._pending >= self._threads and self._threads < self._limit:
                self._threads += self._start_thread()
            in_this_thread = not self._threads
            self._pending += not in_this_thread
        if in_this_thread:
            call()
        else:
            self._calls.put(call)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Submit a call and return a future for its result."""
        submission = _Submission(call)
        self.start(submission)
        return submission.future

    def drain(self) -> None:
        """Wait until no call is pending."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

    def _start_thread(self) -> bool:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is exiting, or the system is out of threads
            return False
        return True

    def _work(self) -> None:
        while True:
            self._calls.get()()
            with self._changed:
                self._pending -= 1
                if not self._pending:
                    self._changed.notify_all()


class _Submission(Generic[T]):
    """A call with the future for its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._call = call

    def __call__(self) -> None:
        future = self.future
        if not future.set_running_or_notify_cancel():
            return  # cancelled while queued, for example the name resolution of an abandoned request
        try:
            result = self._call()
        except BaseException as error:
            future.set_exception(error)
            del self, future  # breaks the reference cycle of the exception and this frame
        else:
            future.set_result(result)


_pools: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _drain_all() -> None:
    for workers in list(_pools):
        workers.drain()


class Cancellable(Protocol):
    """A task, or a request to a server for which a worker waits."""

    def cancel(self) -> object:
        """Request cancellation."""


@dataclass(slots=True)
class EachCall:
    """The state of one call of `each`: the requests for which its workers wait, and whether it has stopped.

    `paced_workers` is the number of workers if they give way to the main thread, otherwise 0.
    """

    paced_workers: int
    requests: set[Cancellable] = field(default_factory=set)
    stopped: bool = False


class _Threads:
    """The threads of this process, started when needed; a forked child starts its own."""

    def __init__(self) -> None:
        self.data = Workers(WORKERS, "tstore-data")
        self.background = Workers(_BACKGROUND_WORKERS, "tstore-background")
        self.streams = Workers(STREAMS, "tstore-stream")
        self.control = Workers(16, "tstore-control")
        self.local = threading.local()


_threads = _Threads()
_before_call: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("tstore_before_call", default=None)
"""What a task without threads awaits before each blocking call; None for a task that uses threads."""
_low_priority_pace: ContextVar[Pace | None] = ContextVar("tstore_low_priority_pace", default=None)
"""The pauses of a task of low priority; None for any other task."""


@contextlib.contextmanager
def low_priority() -> Iterator[None]:
    """Make the current task, and tasks started inside the block, give way to the main thread.

    They transfer data in fewer threads, and pause where they call `give_way`.
    """
    token = _low_priority_pace.set(Pace())
    try:
        yield
    finally:
        _low_priority_pace.reset(token)


def has_low_priority() -> bool:
    """Return whether the current task gives way to the main thread (see `low_priority`)."""
    return _low_priority_pace.get() is not None


async def give_way() -> None:
    """Pause after a stretch of Python code, if the current task has low priority and the main thread is busy."""
    pace = _low_priority_pace.get()
    if pace is not None:
        pace.add_own_time()
        while seconds := pace.next_sleep():  # noqa: ASYNC110 - no event says that a thread is idle
            await asyncio.sleep(seconds)


def give_way_in_worker(work: float) -> None:
    """Pause as `give_way` does, in a worker of `each` that held the interpreter's lock for `work` seconds."""
    each_call = current_each_call()
    if each_call is None or not each_call.paced_workers:
        return
    pace: Pace | None = getattr(_threads.local, "pace", None)
    if pace is None:
        pace = _threads.local.pace = Pace()
    pace.add(work * each_call.paced_workers)  # the work of all workers, who do equal shares
    while not each_call.stopped and (seconds := pace.next_sleep()):
        time.sleep(seconds)


@contextlib.contextmanager
def without_threads(before_call: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Let the current task, and tasks started inside the block, make blocking calls themselves.

    `run` and `each` then make their calls one after the other in the task, and await `before_call()` before each.
    Simulations need this, because their order of events must not depend on threads.
    """
    token = _before_call.set(before_call)
    try:
        yield
    finally:
        _before_call.reset(token)


def uses_threads() -> bool:
    """Return whether the blocking calls of the current task are made in threads (see `without_threads`)."""
    return _before_call.get() is None


def _after_fork() -> None:
    global _threads  # noqa: PLW0603 - the parent's threads do not exist in the child
    _pools.clear()
    _threads = _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


async def run(call: Callable[..., T], *args: Any, stop: Callable[[], object] = lambda: None) -> T:
    """Make one blocking call in a control thread and return its result.

    Cancellation calls `stop` and waits for the call's end.
    """
    if (before_call := _before_call.get()) is not None:
        await before_call()
        return call(*args)
    awaited = _AwaitedCall(call, args)
    _threads.control.start(awaited)
    return await awaited.result(stop)


class _AwaitedCall(Generic[T]):
    """A call in a thread that one task awaits, with a single wake-up of its event loop."""

    def __init__(self, call: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._call = call
        self._args = args
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._returned: list[T] = []
        self._raised: BaseException | None = None

    def __call__(self) -> None:
        try:
            self._returned.append(self._call(*self._args))
        except BaseException as error:
            self._raised = error
        with contextlib.suppress(RuntimeError):  # the loop was closed without waiting
            self._loop.call_soon_threadsafe(self._ended.set)

    async def result(self, stop: Callable[[], object]) -> T:
        """Return or raise the outcome of the call; cancellation calls `stop` and waits for the call's end."""
        cancelled: asyncio.CancelledError | None = None
        while not self._returned and self._raised is None:
            try:
                await self._ended.wait()
            except asyncio.CancelledError as error:
                cancelled = error
                stop()
        try:
            if cancelled is not None:
                raise cancelled
            if self._raised is not None:
                raise self._raised
            return self._returned[0]
        finally:
            self._raised = cancelled = None  # breaks the reference cycle of the exception and this frame


async def each(call: Callable[[T], None], items: Iterable[T], workers: int = WORKERS) -> None:
    """Call `call(item)` for every item on up to `workers` threads; return when all have ended.

    After the first exception no further items are taken; the exception is raised when every worker has ended.
    """
    if (before_call := _before_call.get()) is not None:
        for item in items:
            await before_call()
            call(item)
        return
    source = iter(items)
    lock = threading.Lock()
    paced_workers = 0 if _low_priority_pace.get() is None else min(workers, _BACKGROUND_WORKERS)
    each_call = EachCall(paced_workers)
    no_item = object()

    def work() -> None:
        _threads.local.each_call = each_call
        try:
            while not each_call.stopped:
                with lock:
                    item = next(source, no_item)
                if item is no_item:
                    return
                call(item)  # type: ignore[arg-type]
        except BaseException:
            stop()
            raise

    def stop() -> None:
        each_call.stopped = True
        for request in list(each_call.requests):
            request.cancel()

    data_threads = _threads.background if each_call.paced_workers else _threads.data
    threads = data_threads if workers <= WORKERS else _threads.streams
    if workers <= 1:  # the usual small read or write, which futures would take longer
        alone = _AwaitedCall(work, ())
        threads.start(alone)
        await alone.result(stop)
        return
    await wait_all([threads.submit(work) for _ in range(min(workers, STREAMS))], stop)


def current_each_call() -> EachCall | None:
    """Return the call of `each` for which the calling thread works; None outside of its workers."""
    each_call: EachCall | None = getattr(_threads.local, "each_call", None)
    return each_call


async def wait_all(futures: list[Future[T]], stop: Callable[[], object]) -> list[T]:
    """Wait until all futures have ended; return their results, or raise the first exception among them.

    If cancelled, call `stop` and keep waiting; the cancellation is raised at the end.
    """
    wrapped = [asyncio.wrap_future(f) for f in futures]
    cancelled: asyncio.CancelledError | None = None
    pending: set[asyncio.Future[T]] = set(wrapped)
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            stop()
    failures = [e for w in wrapped if (e := w.exception()) is not None]
    if cancelled is not None:
        raise cancelled
    if failures:  # a cancelled future is the consequence of another's failure
        raise next((e for e in failures if not isinstance(e, asyncio.CancelledError)), failures[0])
    return [w.result() for w in wrapped]


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end and return its result; a cancellation of the caller is raised only after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved, or asyncio would log it as never retrieved
        raise cancelled
    return task.result()
