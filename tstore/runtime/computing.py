"""Calls that only compute, such as parsers, which a cancellation ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tstore.runtime.pool import run

__all__ = ["compute"]

T = TypeVar("T")

_LOOPS = 100


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
    """A call that another thread may interrupt, once.

    Under the lock the exception is either raised in the call, or not at all. It may arrive as the call ends; then
    `_end` waits for it, so that the thread does not meet it in its next call. It is never withdrawn: CPython would
    go on looking for it between the instructions of all threads, and not end under a tracer.
    """

    def __init__(self, call: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._call, self._args = call, args
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_interrupted = False

    def __call__(self) -> T:
        with self._lock:
            if self._is_interrupted:
                raise _Interrupted
            self._thread = threading.get_ident()
        try:
            return self._call(*self._args)
        finally:
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._thread = None
        for _ in range(_LOOPS):  # an exception that was set before arrives when this jumps back
            pass

    def interrupt(self) -> None:
        """Raise an exception in the call, now or when it begins."""
        with self._lock:
            if self._thread is not None and not self._is_interrupted:
                import ctypes  # slow to import, and seldom needed

                interrupted = ctypes.py_object(_Interrupted)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), interrupted)
            self._is_interrupted = True
