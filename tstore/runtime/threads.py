"""Daemon threads that accept calls until the interpreter exits.

The executors of the standard library refuse calls as soon as the main thread has ended, although a save in another
thread may still need them. `Workers` accept calls until interpreter exit, which waits for all of them. By then
Python may not start threads any more (3.12 starts none after the main thread has ended): existing threads make
the calls, or, if there are none, the submitting thread does.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

__all__ = ["LoopThread", "Workers"]

T = TypeVar("T")

_LOOP_WORKERS = 8


class Workers:
    """A pool of up to `limit` threads, started when needed, that make calls in the order of submission."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._threads = 0
        self._pending = 0  # calls submitted and not ended
        self._changed = threading.Condition()
        _all.add(self)

    def start(self, call: Callable[[], object]) -> None:
        """Submit a call without a result; it must not raise."""
        with self._changed:
            if self._pending >= self._threads and self._threads < self._limit:
                self._threads += self._start_thread()
            inline = not self._threads
            self._pending += not inline
        if inline:
            call()
        else:
            self._calls.put(call)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Submit a call and return a future for its result."""
        work = _Work(call)
        self.start(work)
        return work.future

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


class _Work(Generic[T]):
    """A call with the future for its result."""

    def __init__(self, call: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._call = call

    def __call__(self) -> None:
        future = self.future
        if not future.set_running_or_notify_cancel():
            return  # cancelled while queued, as the name resolution of an abandoned request
        try:
            result = self._call()
        except BaseException as error:
            future.set_exception(error)
            del self, future  # breaks the reference cycle of the exception and this frame
        else:
            future.set_result(result)


class _Executor(ThreadPoolExecutor):
    """An executor on `Workers` for an event loop's own blocking calls, such as name resolution."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(1)  # starts no thread
        self._workers = workers

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `concurrent.futures.Executor.submit`."""
        return self._workers.submit(lambda: fn(*args, **kwargs))


class LoopThread(threading.Thread):
    """A daemon thread that runs an event loop; raise `RuntimeError` if no thread can be started any more."""

    def __init__(self, name: str) -> None:
        super().__init__(target=self._run, name=name, daemon=True)
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(_Executor(Workers(_LOOP_WORKERS, f"{name}-call")))
        try:
            self.start()
        except RuntimeError:
            self.loop.close()
            raise

    def _run(self) -> None:
        self.loop.run_forever()


_all: weakref.WeakSet[Workers] = weakref.WeakSet()


@atexit.register
def _drain_all() -> None:
    for workers in list(_all):
        workers.drain()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_all.clear)  # the parent's threads do not exist in the child
