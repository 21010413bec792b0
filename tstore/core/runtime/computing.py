"""Calls that only compute, such as parsers, which a cancellation ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from tstore.core.runtime.pool import run

__all__ = ["compute"]

T = TypeVar("T")

_LOOPS = 100
_AGAIN = 0.1  # seconds between the exceptions in a call that goes on


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
            import ctypes  # slow to import, and seldom needed

            interrupted = ctypes.py_object(_Interrupted)
            if (thread := self._thread) is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), interrupted)
                asyncio.get_running_loop().call_later(_AGAIN, self.interrupt)
        self._is_setting = False
