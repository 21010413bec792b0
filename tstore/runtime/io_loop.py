"""The I/O loop: one event loop in a daemon thread that runs all requests to servers.

Thus one HTTP session serves callers on any event loop, `tstore.sync`, and blocking calls in worker threads. Many
requests are under way at the same time; nothing CPU-bound may run here.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from tstore.errors import Misuse
from tstore.runtime.pool import all_ended, current_batch
from tstore.runtime.threads import LoopThread

__all__ = ["IoCall", "on_io", "start_io", "wait_io"]

T = TypeVar("T")


class _IoLoop:
    """The loop of this process, started at first use; a forked child starts its own."""

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


class IoCall(Generic[T]):
    """A coroutine running on the I/O loop; `ended` completes when it has ended, even after a cancellation."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.ended: Future[T] = Future()
        self.ended.set_running_or_notify_cancel()  # so that only `cancel` can cancel it
        self._task: asyncio.Task[T] | None = None
        self._loop = _io.get()
        self._loop.call_soon_threadsafe(self._start, work)

    def cancel(self) -> None:
        """Request cancellation; wait for `ended`."""
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
    """Start a coroutine on the I/O loop, from any thread, without waiting for it."""
    return IoCall(work)


async def on_io(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine run on the I/O loop; cancellation cancels it and waits for its end."""
    if asyncio.get_running_loop() is _io.get():
        return await work
    call = IoCall(work)
    return (await all_ended([call.ended], call.cancel))[0]


def wait_io(work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine run on the I/O loop, blocking the calling thread.

    In a worker of `each` it is cancelled when `each` is, or when another worker fails.
    """
    try:
        inside = asyncio.get_running_loop() is _io.get()
    except RuntimeError:
        inside = False
    if inside:
        work.close()
        raise Misuse("a blocking call on the I/O loop would wait for itself; await it instead")
    call, batch = IoCall(work), current_batch()
    if batch is None:
        return call.ended.result()
    batch.requests.add(call)
    if batch.stopped.is_set():
        call.cancel()
    try:
        return call.ended.result()
    finally:
        batch.requests.discard(call)
