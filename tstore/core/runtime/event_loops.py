"""Event loops in daemon threads, the I/O loop among them, and values kept per event loop (`PerLoop`).

All requests to servers run on the I/O loop, so one HTTP session serves callers on any event loop, callers of
`tstore.sync`, and worker threads. Nothing CPU-bound may run on the I/O loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from tstore.core.runtime.pool import Workers, current_each_call, wait_all, without_threads
from tstore.errors import Misuse

__all__ = ["LoopCall", "LoopThread", "PerLoop", "on_io", "run_apart", "start_io", "wait_io"]

T = TypeVar("T")

_LOOP_WORKERS = 8  # threads for the blocking calls of one loop


class PerLoop(Generic[T]):
    """A value for the running event loop, such as a lock or a session, made at the first use of `get` there.

    When another loop needs a value, the old value is dropped. So a forked child never gets its parent's value.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._current: tuple[asyncio.AbstractEventLoop, T] | None = None  # a loop, and its value

    def get(self) -> T:
        """Return the value of the running loop."""
        loop, current = asyncio.get_running_loop(), self._current
        if current is None or current[0] is not loop:
            self._current = current = loop, self._make()
        return current[1]

    def pop(self) -> T | None:
        """Drop the value, and return it if it belongs to the running loop."""
        current, self._current = self._current, None
        return current[1] if current is not None and current[0] is asyncio.get_running_loop() else None


class _Executor(ThreadPoolExecutor):
    """An executor that runs an event loop's internal blocking calls, such as name resolution, on `Workers`."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(1)  # starts no thread
        self._workers = workers

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        return self._workers.submit(lambda: fn(*args, **kwargs))


class LoopThread(threading.Thread):
    """A daemon thread that runs an event loop; creation raises `RuntimeError` if no thread can be started."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        super().__init__(target=self.loop.run_forever, name=name, daemon=True)
        self.loop.set_default_executor(_Executor(Workers(_LOOP_WORKERS, f"{name}-call")))
        try:
            self.start()
        except RuntimeError:
            self.loop.close()
            raise


class _IoLoop:
    """The I/O loop of this process, started at first use; a forked child starts another."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                try:
                    self._loop = LoopThread("tstore-io").loop
                except RuntimeError as error:
                    raise Misuse(
                        f"no thread can be started for requests to a server ({error}); make the first use of "
                        "tstore before the main thread ends"
                    ) from None
            return self._loop


_io = _IoLoop()


def _after_fork() -> None:
    global _io  # noqa: PLW0603 - the parent's thread does not exist in the child
    _io = _IoLoop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class LoopCall(Generic[T]):
    """A coroutine that runs on an event loop of another thread; `future` completes when the coroutine ends."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self.future: Future[T] = Future()
        # from now on `future.cancel()` has no effect; `LoopCall.cancel` cancels
        self.future.set_running_or_notify_cancel()
        self._task: asyncio.Task[T] | None = None
        self._loop = loop
        self._loop.call_soon_threadsafe(self._start, work)

    def cancel(self) -> None:
        """Request cancellation, without waiting for the end."""
        self._loop.call_soon_threadsafe(self._cancel)

    def _start(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self.future.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())


def start_io(work: Coroutine[Any, Any, T]) -> LoopCall[T]:
    """Start a coroutine on the I/O loop and return its `LoopCall`."""
    return LoopCall(_io.get(), work)


async def on_io(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the I/O loop and return its result; if cancelled, cancel the coroutine and await it."""
    if asyncio.get_running_loop() is _io.get():
        return await work
    call = start_io(work)
    return (await wait_all([call.future], call.cancel))[0]


def wait_io(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the I/O loop and return its result, blocking the calling thread.

    If the caller is a worker of `pool.each`, the coroutine is cancelled when `each` is cancelled or another worker
    fails. Raise `Misuse` if called on the I/O loop.
    """
    try:
        on_loop = asyncio.get_running_loop() is _io.get()
    except RuntimeError:
        on_loop = False
    if on_loop:
        work.close()
        raise Misuse("a blocking call on the I/O loop would wait for itself; await the async function")
    call, each_call = start_io(work), current_each_call()
    if each_call is None:
        return call.future.result()
    each_call.requests.add(call)
    if each_call.stopped:
        call.cancel()
    try:
        return call.future.result()
    finally:
        each_call.requests.discard(call)


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own and return its result, blocking the calling thread.

    It needs neither the caller's event loop nor a worker thread: all of these may wait for the result.
    """

    async def without_workers() -> T:
        with without_threads(_no_pause):
            return await work

    call: Future[T] = Future()

    def run_to_end() -> None:
        try:
            call.set_result(asyncio.run(without_workers()))
        except BaseException as error:  # the caller's thread raises it
            call.set_exception(error)

    thread = threading.Thread(target=run_to_end, name="tstore-apart", daemon=True)
    thread.start()
    thread.join()
    return call.result()


async def _no_pause() -> None:
    return
