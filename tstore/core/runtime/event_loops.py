"""Event loops in daemon threads, the I/O loop among them, and values kept per event loop (`PerLoop`).

The background loop runs the calls of `tstore.sync` and the saves of `save_async`.

All requests to servers run on the I/O loop, so one HTTP session serves callers on any event loop, callers of
`tstore.sync`, and worker threads. Nothing CPU-bound may run on the I/O loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from tstore.core.runtime.pool import Cancellable, Workers, current_each_call, wait_all, without_threads
from tstore.errors import Misuse

__all__ = [
    "BACKGROUND",
    "SIGNAL_CHECK",
    "BackgroundLoop",
    "LoopCall",
    "LoopThread",
    "PerLoop",
    "on_io",
    "run_apart",
    "start_io",
    "wait_io",
]

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
    """Run a coroutine in a separate thread and return its result, blocking the calling thread.

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


SIGNAL_CHECK = 0.5
"""The maximum uninterrupted wait of the main thread, in seconds.

A signal does not end a wait if it comes just before the wait begins, after Python last looked for signals, or if
another thread receives it. Python sees it when the wait ends.
"""


class BackgroundLoop:
    """An event loop in a daemon thread, started at its first use and again in a forked child.

    At exit the process waits for all calls under way, including those of daemon threads. Ctrl-C during this wait
    cancels the calls, waits for their end, and ends the process by SIGINT. During exit, only the main thread (in
    `atexit` functions) and the loop's own thread can make calls. Once the interpreter is being finalized, no
    thread can.
    """

    def __init__(self) -> None:
        self._reset()
        atexit.register(self._finish)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: LoopThread | None = None
        self._tasks: set[Cancellable] = set()
        self._calls: set[object] = set()  # calls in progress
        self._exiting = False
        self._failures: dict[object, str] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result; Ctrl-C cancels it. Raise `Misuse` on this loop and at exit."""
        if self.is_running_here():
            work.close()
            raise Misuse(
                "a tstore.sync function can't be called on its own event loop; await the function of the same "
                "name in tstore"
            )
        call = object()
        try:
            loop = self._begin(call, work)
            return self._run_in_this_thread(work) if loop is None else self._run_on_loop(loop, work)
        finally:
            self._calls.discard(call)  # before anything that Ctrl-C could prevent
            self._notify()

    def start(self, work: Coroutine[Any, Any, T]) -> LoopCall[T]:
        """Start a coroutine, from any thread, and return its `LoopCall`.

        Raise `Misuse` at exit, or if the exiting interpreter can no longer start the loop's thread.
        """
        call = object()
        loop = self._begin(call, work)
        if loop is None:
            work.close()
            self._calls.discard(call)
            self._notify()
            refusal = "the main thread has ended, so no background call can start; start such calls earlier"
            self.report_at_exit(self, refusal)  # in case the caller does not report it
            raise Misuse(refusal)
        started = LoopCall(loop, work)
        self._tasks.add(started)

        def end(_: Future[T]) -> None:
            self._tasks.discard(started)
            self._calls.discard(call)
            self._notify()

        started.future.add_done_callback(end)
        return started

    def is_running_here(self) -> bool:
        """Return whether the calling thread is the loop's."""
        return threading.current_thread() is self._thread

    def report_at_exit(self, origin: object, message: str) -> None:
        """Make the process print the message at exit and end with status 1, unless `withdraw` is called first."""
        self._failures[origin] = message

    def withdraw(self, origin: object) -> None:
        """Withdraw the message of an origin, for example because the error has been raised after all."""
        self._failures.pop(origin, None)

    def _begin(self, call: object, work: Coroutine[Any, Any, Any]) -> asyncio.AbstractEventLoop | None:
        """Register a call and return the loop; None if the exiting interpreter can't start the loop's thread.

        Raise `Misuse` if the process accepts no more calls from this thread.
        """
        with self._lock:  # not the condition: Ctrl-C in its `__enter__` would leave it locked
            caller = threading.current_thread()
            refused = self._exiting and caller is not threading.main_thread() and caller is not self._thread
            if refused or sys.is_finalizing():
                work.close()
                raise Misuse("the process is exiting, so tstore accepts no more calls; make them earlier")
            self._calls.add(call)
            if self._thread is None:
                try:
                    self._thread = LoopThread("tstore-loop")
                except RuntimeError:
                    return None
                self._finish_with_multiprocessing()
            return self._thread.loop

    def _notify(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def _run_on_loop(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
        ended = queue.SimpleQueue[None]()  # unlike an Event, it has no lock that Ctrl-C could leave locked
        tasks: list[asyncio.Task[T]] = []

        def start() -> None:
            if not tasks:
                task = loop.create_task(work)
                tasks.append(task)
                self._tasks.add(task)
                task.add_done_callback(end)

        def end(task: asyncio.Task[T]) -> None:
            self._tasks.discard(task)
            ended.put(None)

        def cancel() -> None:
            start()  # in case Ctrl-C came before the start was requested
            tasks[0].cancel()

        def wait() -> None:
            while not (tasks and tasks[0].done()):  # done already if Ctrl-C came after the end
                with contextlib.suppress(queue.Empty):
                    ended.get(timeout=SIGNAL_CHECK)

        try:
            loop.call_soon_threadsafe(start)
            wait()
        except BaseException:
            loop.call_soon_threadsafe(cancel)
            wait()
            if not tasks[0].cancelled():
                tasks[0].exception()  # retrieved, or asyncio would log it as never retrieved
            raise
        return tasks[0].result()

    def _run_in_this_thread(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this thread, because no thread can be started any more."""
        try:
            return asyncio.run(work)
        except Exception as error:  # reported here in case the caller does not report it
            self.report_at_exit(self, f"a call failed after the main thread had ended: {error}")
            raise

    def _finish_with_multiprocessing(self) -> None:
        """Make a child of multiprocessing wait at its end too: Python calls no `atexit` functions there."""
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            from multiprocessing.util import Finalize

            Finalize(None, self._finish, exitpriority=100)

    def _finish(self) -> None:
        """Wait at exit until all calls have ended; exit with status 1 if there are failures to report."""
        with self._changed:
            self._exiting = True
            try:
                while self._calls:
                    self._changed.wait(SIGNAL_CHECK)
            except KeyboardInterrupt:
                self._interrupt()
        if self._failures:
            for message in self._failures.values():
                print(f"tstore: {message}", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _interrupt(self) -> None:
        """Cancel all calls, wait for them, and end the process by SIGINT; a second Ctrl-C ends it at once."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        print(f"tstore: Ctrl-C cancels {len(self._calls)} calls under way", file=sys.stderr)
        if self._thread is not None:
            self._thread.loop.call_soon_threadsafe(self._cancel)
        self._changed.wait_for(lambda: not self._calls)
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGINT)

    def _cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()


BACKGROUND = BackgroundLoop()
"""The loop of all blocking calls and background saves of this process."""
