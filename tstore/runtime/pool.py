"""Blocking work in threads, requests on the I/O loop, and the memory that both may hold.

Blocking work (file calls, checksums, encoding) runs here as plain functions on buffers that release the GIL.
A call crosses the event loop once: `each` starts a few workers, every worker draws items until none is left,
and the caller is woken when all of them have ended. A cancelled or failed call also waits for its workers, so
that no thread touches the caller's memory after the call has returned.

Requests to servers are awaited on one more loop, the I/O loop, in a daemon thread: so one session with a server
serves the loops of all callers, the loop of `tstore.sync` and the blocking calls of workers. Many requests are
under way there at the same time; nothing that takes the CPU for long may run on it.

Memory: what workers allocate beyond the caller's arrays is drawn from one byte budget per process. Scratch
buffers belong to their worker thread and are used again, which also spares the page faults of fresh memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from tstore.errors import Misuse
from tstore.runtime.threads import LoopThread, Workers

__all__ = [
    "BUDGET",
    "STREAMS",
    "WORKERS",
    "IoCall",
    "each",
    "hold",
    "inline",
    "let_go",
    "on_io",
    "on_shortage",
    "run",
    "scratch",
    "start_io",
    "uncancelled",
    "wait_io",
]

T = TypeVar("T")

WORKERS = max(2, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 4))
"""Worker threads that carry data; control calls (small reads, creates) have threads of their own."""

STREAMS = 32
"""Threads for calls that carry data and mostly wait for a server: `each` uses them where asked for so many."""

BUDGET = 256 << 20
"""Bytes that all calls of this process together may hold beyond the caller's arrays."""

_LONGEST_KEPT = 16 << 20
_SHORTAGE = 0.05  # seconds after which a caller that waits for memory says so again


class _Budget:
    """The bytes that may be held: half of them in buffers that threads keep, half in claims for a while.

    A claim above its half waits until it is alone. A thread that holds a claim gets another at once: it could
    not let go of the first while it waits.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit // 2
        self._kept = 0
        self._held = 0
        self._changed = threading.Condition()
        self._mine = threading.local()

    def keep(self, size: int) -> bool:
        """Whether a thread may keep a buffer of that size for good."""
        with self._changed:
            room = size <= _LONGEST_KEPT and self._kept + size <= self._limit
            self._kept += size if room else 0
            return room

    @contextlib.contextmanager
    def claim(self, size: int) -> Iterator[None]:
        mine = getattr(self._mine, "held", 0)
        self.hold(size)
        self._mine.held = mine + size
        try:
            yield
        finally:
            self._mine.held = mine
            self.let_go(size)

    def hold(self, size: int) -> None:
        mine = getattr(self._mine, "held", 0)
        while True:
            with self._changed:
                if mine or self._held == 0 or self._held + size <= self._limit:
                    self._held += size
                    return
            for call in _on_shortage:
                call()
            with self._changed:
                if self._held + size > self._limit:
                    self._changed.wait(_SHORTAGE)  # not for ever: who holds memory may come to hold it only now

    def let_go(self, size: int) -> None:
        with self._changed:
            self._held -= size
            self._changed.notify_all()


class _Threads:
    """The threads of this process, started when they are needed; a forked child has its own."""

    def __init__(self) -> None:
        self.data = Workers(WORKERS, "tstore-data")
        self.streams = Workers(STREAMS, "tstore-stream")
        self.control = Workers(16, "tstore-control")
        self.budget = _Budget(BUDGET)
        self.local = threading.local()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def io(self) -> asyncio.AbstractEventLoop:
        """The I/O loop, started at its first use."""
        with self._lock:
            if self._loop is None:
                try:
                    self._loop = LoopThread("tstore-io").loop
                except RuntimeError as error:
                    raise Misuse(
                        f"no thread can be started for requests to a server ({error}); make the first use of "
                        "tstore before the main thread of the program ends"
                    ) from None
            return self._loop


_on_shortage: list[Callable[[], None]] = []
_threads = _Threads()
_pause: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("tstore_pool_pause", default=None)


@contextlib.contextmanager
def inline(pause: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Lets the running task, and all tasks that it starts inside, do without threads.

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
    stop = threading.Event()

    calls: set[IoCall[Any]] = set()  # what the workers wait for

    def work() -> None:
        _threads.local.waiting = calls, stop
        try:
            while not stop.is_set():
                with lock:
                    item = next(source, stop)
                if item is stop:
                    return
                call(item)  # type: ignore[arg-type]
        except BaseException:
            end()
            raise

    def end() -> None:
        stop.set()
        for waited in list(calls):
            waited.cancel()

    threads = _threads.data if workers <= WORKERS else _threads.streams
    await _settle([threads.submit(work) for _ in range(max(1, min(workers, STREAMS)))], end)


class IoCall(Generic[T]):
    """Work that goes on upon the I/O loop; `ended` is done when it has really ended, also where cancelled."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.ended: Future[T] = Future()
        self.ended.set_running_or_notify_cancel()  # who waits for it cannot cancel it, but with `cancel`
        self._task: asyncio.Task[T] | None = None
        self._loop = _threads.io()
        self._loop.call_soon_threadsafe(self._start, work)

    def cancel(self) -> None:
        """Asks the work to end early; wait for `ended`."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _start(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.ended.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())


def start_io(work: Coroutine[Any, Any, T]) -> IoCall[T]:
    """Begins work on the I/O loop and returns at once. From any thread."""
    return IoCall(work)


async def on_io(work: Coroutine[Any, Any, T]) -> T:
    """The result of work done on the I/O loop; cancelling cancels it and waits for its end."""
    if asyncio.get_running_loop() is _threads.io():
        return await work
    call = IoCall(work)
    return (await _settle([call.ended], call.cancel))[0]


def wait_io(work: Coroutine[Any, Any, T]) -> T:
    """The result of work done on the I/O loop; blocks the calling thread.

    In a worker of `each` it is cancelled when that is, or when another worker fails.
    """
    try:
        inside = asyncio.get_running_loop() is _threads.io()
    except RuntimeError:
        inside = False
    if inside:
        work.close()
        raise Misuse("a blocking call was made on the I/O loop, which would wait for itself; await it instead")
    call, waiting = IoCall(work), getattr(_threads.local, "waiting", None)
    if waiting is None:
        return call.ended.result()
    calls, stop = waiting
    calls.add(call)
    if stop.is_set():
        call.cancel()
    try:
        return call.ended.result()
    finally:
        calls.discard(call)


async def _settle(futures: list[Future[T]], stop: Callable[[], object]) -> list[T]:
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


def hold(size: int) -> None:
    """Draws bytes from the budget until `let_go(size)`; waits until there is room. Blocking."""
    _threads.budget.hold(size)


def let_go(size: int) -> None:
    """Gives bytes back to the budget. From any thread."""
    _threads.budget.let_go(size)


def on_shortage(call: Callable[[], None]) -> None:
    """Has `call` made by whoever waits for memory, from now on: it should begin to free some, and not wait."""
    _on_shortage.append(call)


@contextlib.contextmanager
def scratch(size: int) -> Iterator[npt.NDArray[np.uint8]]:
    """A buffer of `size` bytes for the running worker thread, drawn from the byte budget.

    Nested claims get distinct buffers. The contents are undefined.
    """
    free: list[npt.NDArray[np.uint8]] = _threads.local.__dict__.setdefault("free", [])
    at = next((i for i, buffer in enumerate(free) if buffer.size >= size), None)
    if at is not None:
        kept = free.pop(at)
    elif _threads.budget.keep(rounded := 1 << max(16, (size - 1).bit_length())):
        kept = np.empty(rounded, np.uint8)
    else:
        with _threads.budget.claim(size):
            yield np.empty(size, np.uint8)
        return
    try:
        yield kept[:size]
    finally:
        free.append(kept)
