"""Ways to make many calls, or repeated calls of one kind, efficiently.

`together` awaits many with bounded concurrency. `QuickCalls` makes short blocking calls in the event loop's
thread. `compute` makes a call that only computes, which a cancellation ends. `each_with_caller` makes blocking
calls for many items in the calling thread, with the help of other threads: none of `pool`, whose locks could stay
locked if Ctrl-C came in the calling thread, which may be the main one. `SharedCalls` makes one call for all tasks
that need it at the same time, such as those that one event has woken:

1. A task that makes one call after the other makes each at once, so a task that is alone is not delayed.
2. If the last call was made by another task, the call is shared: it begins in the next turn of the loop, after all
   tasks that are ready have asked for it too. So each of them sees what preceded its own call.
3. If the shared call fails, each task makes the call again alone, and gets its own error.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

from tstore.core.runtime.event_loops import PerLoop
from tstore.core.runtime.pool import WORKERS, run, uses_threads

if sys.platform == "linux":
    import resource

__all__ = [
    "Prefetch",
    "QuickCalls",
    "SharedCalls",
    "batched",
    "batched_by_size",
    "compute",
    "each_with_caller",
    "together",
]

_CONCURRENCY = 64

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")


def batched(items: Iterable[K]) -> Iterator[list[K]]:
    """Yield the items in batches, each as large as the number of calls that `together` runs at once."""
    source = iter(items)
    while batch := list(itertools.islice(source, _CONCURRENCY)):
        yield batch


def batched_by_size(items: Iterable[K], size_of: Callable[[K], int], size: int) -> Iterator[list[K]]:
    """Yield the items in batches, each ended by the item with which it reaches a size."""
    batch: list[K] = []
    reached = 0
    for item in items:
        batch.append(item)
        reached += size_of(item)
        if reached >= size:
            yield batch
            batch, reached = [], 0
    if batch:
        yield batch


async def together(call: Callable[[K], Awaitable[V]], items: Iterable[K]) -> list[V]:
    """Return the results of a call for all items, with bounded concurrency; a failure cancels the other calls."""
    results: list[V] = []
    for batch in batched(items):
        calls = [asyncio.ensure_future(call(item)) for item in batch]
        try:
            results += await asyncio.gather(*calls)
        finally:
            for started in calls:
                started.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
    return results


class Prefetch(Generic[K, V]):
    """An async iterator over items and the results of a call for many of them, for a caller that may stop early.

    The first call gets one item, and each later one twice as many; a call returns a result for each of its items.
    """

    def __init__(self, call: Callable[[Sequence[K]], Awaitable[Sequence[V]]], items: Iterable[K]) -> None:
        self._call = call
        self._source = iter(items)
        self._ahead = 1
        self._results: collections.deque[tuple[K, V]] = collections.deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[K, V]:
        if not self._results:
            batch = list(itertools.islice(self._source, self._ahead))
            if not batch:
                raise StopAsyncIteration
            self._results.extend(zip(batch, await self._call(batch), strict=True))
            self._ahead = min(2 * self._ahead, _CONCURRENCY)
        return self._results.popleft()


_QUICK = 300e-6  # seconds
_SURELY_WAITED = 0.1  # seconds
_LONGEST = 1e-3  # seconds that one call counts, so that a single long one, perhaps descheduled, changes little
_WEIGHT = 1 / 8  # weight of the last call in the mean
_FEWEST, _MOST = 8, 4096  # calls in threads before calls may be made in the loop's thread
_SUSPECTED = 64  # calls
_LONG_SPELL = 256  # calls in the loop's thread after which the count starts at `_FEWEST` again


def _waits() -> float:
    """Return how often this thread has waited for a disk, a lock or another event; NaN if that is not known."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if sys.platform == "linux" else math.nan


class QuickCalls:
    """Makes blocking calls of one kind to one storage where they cost least.

    A control thread, and waking the event loop, cost about as much CPU as creating a small file in memory, and
    more than reading one that the system has cached. On a disk that is waited for, or a network mount, a call
    must not hold up the loop.

    1. The first calls are made in control threads. Their times include waits for the interpreter's lock, so the
       shortest of some calls counts. If it is below 300 µs, the next calls are made in the loop's thread.
    2. If the mean of recent calls there reaches 300 µs, calls return to threads. The number of calls after which
       the loop's thread is tried again doubles, so that a storage that is sometimes slow rarely stops the loop.
    3. A long call during which the thread waited for nothing does not count: other processes had the processor
       meanwhile, and a thread would have to wait for it too. Asking the system costs a tenth of a short call, so
       it is asked only during the calls after a long one. A first long call counts if it took 100 ms.
    """

    def __init__(self) -> None:
        self._mean = math.inf  # of recent calls in the loop's thread; infinite while calls are made in threads
        self._count = 0  # calls made in the same kind of thread
        self._shortest = math.inf  # of these calls
        self._needed = _FEWEST
        self._suspected = 0  # calls for which the system will be asked whether the thread waited

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Make one blocking call and return its result; cancellation waits for the call's end."""
        if self._mean == math.inf or not uses_threads():
            return await run(self._call_in_thread, call, *args)
        waits, start = _waits() if self._suspected else None, time.perf_counter()
        try:
            return call(*args)
        finally:
            self._count += 1
            duration = time.perf_counter() - start
            if is_quick := duration < _QUICK:
                self._suspected -= self._suspected > 0
            else:
                self._suspected = _SUSPECTED
            if is_quick or (duration >= _SURELY_WAITED if waits is None else _waits() != waits):
                self._mean += _WEIGHT * (min(duration, _LONGEST) - self._mean)
            if self._mean >= _QUICK:
                self._needed = _FEWEST if self._count >= _LONG_SPELL else min(2 * self._needed, _MOST)
                self._mean, self._count, self._shortest = math.inf, 0, math.inf

    def _call_in_thread(self, call: Callable[..., T], *args: Any) -> T:
        start = time.perf_counter()
        try:
            return call(*args)
        finally:
            # threads may race, which loses one of two counts
            self._count += 1
            self._shortest = min(self._shortest, time.perf_counter() - start)
            if self._count >= self._needed:
                if self._shortest < _QUICK:
                    self._mean = self._shortest
                self._count, self._shortest = 0, math.inf


class _Turn(Generic[T]):
    """The tasks that wait for the next shared call of a loop."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[T | None]] = []
        self.task: asyncio.Task[None] | None = None  # kept, because a loop only has weak references to tasks


class SharedCalls(Generic[T]):
    """Makes a call whose result is never None for many tasks."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._call = call
        self._caller = 0  # the identity of the task that called last
        self._turns: PerLoop[_Turn[T]] = PerLoop(_Turn)

    async def __call__(self) -> T:
        """Return the result of a call that begins after this one was made; raise what the call raises."""
        caller = id(asyncio.current_task())
        if caller == self._caller:
            return await self._call()
        self._caller = caller
        turn, loop = self._turns.get(), asyncio.get_running_loop()
        if not turn.waiting:
            turn.task = loop.create_task(self._answer(turn))
        answer: asyncio.Future[T | None] = loop.create_future()  # cancelling it does not affect the others
        turn.waiting.append(answer)
        result = await answer
        return await self._call() if result is None else result

    async def _answer(self, turn: _Turn[T]) -> None:
        waiting, turn.waiting = turn.waiting, []
        result: T | None = None  # each of the tasks then makes the call again
        try:
            with contextlib.suppress(Exception):
                result = await self._call()
        finally:
            for answer in waiting:
                if not answer.done():
                    answer.set_result(result)


_LOOPS = 100
_AGAIN = 0.1  # seconds between the exceptions in a call that does not end


async def compute(call: Callable[..., T], *args: Any) -> T:
    """Make a call in a control thread and return its result; cancellation ends the call, and waits for its end.

    Python raises an exception in the call where it would handle Ctrl-C in the main thread: between two
    instructions, anywhere. So the call must change nothing that outlives it. A hostile file can make a parser
    compute for minutes, but a single function in C must be short, because nothing interrupts it.
    """
    computation = _Computation(call, args)
    return await run(computation, stop=computation.interrupt)


class _Interrupted(BaseException):
    """The exception that ends a computation; the caller gets the `CancelledError`."""


class _Computation(Generic[T]):
    """A call that the event loop may interrupt.

    The exception is raised again until the call ends: a destructor, or a callback of the garbage collector, may
    have met and dropped it. It must not meet the thread in its next call. So the thread first notes that the call
    has ended, and then waits for an exception that is being set. It is never withdrawn: CPython would look for it
    between the instructions of all threads from then on, and not end under a tracer.
    """

    def __init__(self, call: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._call, self._args = call, args
        self._thread: int | None = None
        self._is_interrupted = self._is_setting = False

    def __call__(self) -> T:
        try:
            self._thread = threading.get_ident()
            if self._is_interrupted:
                raise _Interrupted
            return self._call(*self._args)
        finally:
            while True:
                try:
                    self._thread = None
                    while self._is_setting:
                        time.sleep(0)
                    for _ in range(_LOOPS if self._is_interrupted else 0):
                        pass  # an exception that was set before arrives when this jumps back
                    break
                except _Interrupted:
                    pass

    def interrupt(self) -> None:
        """Raise an exception in the call, now or when it begins, and again until it ends."""
        self._is_interrupted = self._is_setting = True
        if self._thread is not None:
            import ctypes  # slow to import, and rarely needed

            interrupted = ctypes.py_object(_Interrupted)
            if (thread := self._thread) is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), interrupted)
                asyncio.get_running_loop().call_later(_AGAIN, self.interrupt)
        self._is_setting = False


class _Threads:
    """Threads that wait for callers to help; a forked child starts its own."""

    def __init__(self) -> None:
        self._calls = queue.SimpleQueue[Callable[[], None]]()
        self._threads = 0

    def ask(self, call: Callable[[], None], count: int) -> None:
        """Let `count` threads make a call, which must not raise, as soon as they are idle."""
        with contextlib.suppress(RuntimeError):  # at exit, or if the system is out of threads
            while self._threads < count:
                threading.Thread(target=self._help, name="tstore-read", daemon=True).start()
                self._threads += 1  # callers may race, or be interrupted: a thread too many does no harm
        for _ in range(count):
            self._calls.put(call)

    def _help(self) -> None:
        while True:
            self._calls.get()()


_threads = _Threads()


def _after_fork() -> None:
    global _threads  # noqa: PLW0603 - the parent's threads do not exist in the child
    _threads = _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def each_with_caller(call: Callable[[T], None], items: Iterable[T], workers: int = WORKERS) -> None:
    """Call `call(item)` for every item in the calling thread and up to `workers - 1` others; return at the end.

    Blocking. No event loop is crossed, and a thread that is busy with other work is not waited for. After the
    first exception, also Ctrl-C, no further items are taken; it is raised when no thread makes a call any more.
    """
    source, lock, no_item = iter(items), threading.Lock(), object()
    helping: set[object] = set()
    ended = queue.SimpleQueue[None]()  # unlike an Event, it has no lock that Ctrl-C could leave locked
    failures: list[BaseException] = []
    closed = False

    def work() -> None:
        while not closed:
            with lock:
                item = next(source, no_item)
            if item is no_item:
                return
            call(item)  # type: ignore[arg-type]

    def close() -> None:
        nonlocal closed
        closed = True

    def help_caller() -> None:
        helper = object()
        helping.add(helper)  # before it checks whether the calls are closed: the caller does both in reverse order
        try:
            work()
        except BaseException as error:
            failures.append(error)
            close()
        finally:
            helping.discard(helper)
            ended.put(None)

    def finish() -> None:
        close()
        while helping:
            ended.get()

    try:
        _threads.ask(help_caller, min(workers, WORKERS) - 1)
        work()
        finish()
    except BaseException:
        finish()
        raise
    if failures:
        raise failures[0]
