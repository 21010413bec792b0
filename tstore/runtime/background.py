"""The event loop in a daemon thread that runs the calls of `tstore.sync`, and its shutdown.

At exit the process waits for the calls of other threads, even of daemon threads; Ctrl-C cancels them, waits for
that, and ends the process by that signal. From then on only the main thread can make calls, in `atexit`
functions, and no thread can once the interpreter is being finalized.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from tstore.errors import Misuse
from tstore.runtime.threads import LoopThread

__all__ = ["BackgroundLoop"]

R = TypeVar("R")


class BackgroundLoop:
    """An event loop in a daemon thread, started at its first use and again in a forked child."""

    def __init__(self) -> None:
        self._reset()
        atexit.register(self._finish)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._thread: LoopThread | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls = 0  # under way
        self._exiting = False
        self._late_error: Exception | None = None

    def run(self, call: Coroutine[Any, Any, R]) -> R:
        """Return the result of a coroutine; Ctrl-C cancels it and waits until it has ended."""
        try:
            self._begin()
        except Misuse:
            call.close()
            raise
        try:
            loop = self._started()
            return self._run_late(call) if loop is None else self._result(loop, call)
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _begin(self) -> None:
        with self._changed:
            if threading.current_thread() is self._thread:
                raise Misuse(
                    "a blocking call of tstore.sync was made on its own event loop; await tstore's instead"
                )
            ended = self._exiting and threading.current_thread() is not threading.main_thread()
            if ended or sys.is_finalizing():
                raise Misuse("the process is exiting, so tstore.sync accepts no more calls; make them earlier")
            self._calls += 1

    def _started(self) -> asyncio.AbstractEventLoop | None:
        """Return the running loop; None if the interpreter is exiting and can't start its thread."""
        with self._changed:
            if self._thread is None:
                try:
                    self._thread = LoopThread("tstore-loop")
                except RuntimeError:
                    return None
            return self._thread.loop

    def _result(self, loop: asyncio.AbstractEventLoop, call: Coroutine[Any, Any, R]) -> R:
        ended = threading.Event()
        tasks: list[asyncio.Task[R]] = []

        def start() -> None:
            task = loop.create_task(call)
            tasks.append(task)
            self._tasks.add(task)
            task.add_done_callback(end)

        def end(task: asyncio.Task[R]) -> None:
            self._tasks.discard(task)
            ended.set()

        def cancel() -> None:
            tasks[0].cancel()

        loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except BaseException:
            loop.call_soon_threadsafe(cancel)
            ended.wait()
            if not tasks[0].cancelled():
                tasks[0].exception()  # retrieved, or asyncio would log it as never retrieved
            raise
        return tasks[0].result()

    def _run_late(self, call: Coroutine[Any, Any, R]) -> R:
        """Run in this thread a first call made when no thread can be started any more."""
        try:
            return asyncio.run(call)
        except Exception as error:
            self._late_error = error  # possibly nothing else reports it
            raise

    def _finish(self) -> None:
        """At exit, wait until all calls have ended."""
        with self._changed:
            self._exiting = True
            try:
                self._changed.wait_for(lambda: not self._calls)
            except KeyboardInterrupt:
                self._interrupt()
        if self._late_error is not None:
            print(f"tstore: a call failed after the main thread had ended: {self._late_error}", file=sys.stderr)
            sys.stdout.flush()
            os._exit(1)

    def _interrupt(self) -> None:
        """Cancel all calls, wait for them, and end the process by SIGINT; a second Ctrl-C ends it at once."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print(f"tstore: Ctrl-C cancels {self._calls} calls of other threads", file=sys.stderr)
        if self._thread is not None:
            self._thread.loop.call_soon_threadsafe(self._cancel)
        self._changed.wait_for(lambda: not self._calls)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGINT)

    def _cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()
