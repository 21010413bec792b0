"""Blocking calls for many items, made in the calling thread with the help of other threads.

The threads are none of `pool`: its locks could stay locked if Ctrl-C came in the calling thread, which may be the
main one.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from tstore.core.runtime.pool import WORKERS

__all__ = ["each_with_caller"]

T = TypeVar("T")


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
        helping.add(helper)  # before it looks whether the calls are closed: the caller does it the other way round
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
