"""The I/O loop: one event loop in a daemon thread on which all requests to servers are awaited.

One session with a server thus serves the loops of all callers, the loop of `tstore.sync` and the blocking calls of
workers. Many requests are under way at the same time; nothing that takes the CPU for long may run here.
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
    """The loop of this process, started at its first use; a forked child has its own."""

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
                        "tstore before the main thread of the program ends"
                    ) from None
            return self._loop


_io = _IoLoop()


def _after_fork() -> None:
    global _io  # noqa: PLW0603 - the parent's thread does not exist in the child
    _io = _IoLoop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class IoCall(Generic[T]):
    """Work that goes on upon the I/O loop; `ended` is done when it has really ended, also where cancelled."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.ended: Future[T] = Future()
        self.ended.set_running_or_notify_cancel()  # who waits for it cannot cancel it, but with `cancel`
        self._task: asyncio.Task[T] | None = None
        self._loop = _io.get()
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
    if asyncio.get_running_loop() is _io.get():
        return await work
    call = IoCall(work)
    return (await all_ended([call.ended], call.cancel))[0]


def wait_io(work: Coroutine[Any, Any, T]) -> T:
    """The result of work done on the I/O loop; blocks the calling thread.

    In a worker of `each` it is cancelled when that is, or when another worker fails.
    """
    try:
        inside = asyncio.get_running_loop() is _io.get()
    except RuntimeError:
        inside = False
    if inside:
        work.close()
        raise Misuse("a blocking call was made on the I/O loop, which would wait for itself; await it instead")
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
