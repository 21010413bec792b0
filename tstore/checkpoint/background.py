"""Saves in the background: the caller continues once its values are copied or written.

All saves run on one event loop of the process (`runtime.event_loops.BACKGROUND`). So a save survives the end
of the loop or thread that started it, and the process waits for it before it exits. The error of a save is raised
where the caller waits for the save, or else reported at exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import os
import time
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent import futures
from concurrent.futures import Future
from typing import Any, Generic, Literal, TypeVar, Unpack, get_args

from tstore.checkpoint.background_store import BackgroundStore
from tstore.checkpoint.checkpoint import Checkpoint
from tstore.checkpoint.options import SaveOptions, complete
from tstore.checkpoint.save import checkpoint_to_save
from tstore.checkpoint.staging import StagingMemory
from tstore.core.format.arguments import checked_choice
from tstore.core.pickling import refusal
from tstore.core.runtime.event_loops import BACKGROUND, SIGNAL_CHECK, LoopCall, PerLoop
from tstore.core.runtime.pool import low_priority, wait_all
from tstore.core.store import Store
from tstore.errors import DeadlineExceeded, Misuse

__all__ = [
    "BackgroundSave",
    "InFlight",
    "SaveReport",
    "SaveWork",
    "StagingChoice",
    "checked_choices",
    "save_async",
]

T = TypeVar("T")

StagingChoice = Literal["memory", "turns", "reference"]
InFlight = Literal["queue", "refuse"]

_locks: PerLoop[weakref.WeakValueDictionary[tuple[str, int], asyncio.Lock]] = PerLoop(weakref.WeakValueDictionary)
"""A lock per URL and host: only one save may hold it."""


@complete(SaveOptions, checkpoint_to_save)
async def save_async(
    store: str | os.PathLike[str] | Store,
    tree: Any,
    step: int,
    *,
    staging: StagingChoice = "memory",
    in_flight: InFlight = "queue",
    **options: Unpack[SaveOptions],
) -> BackgroundSave:
    """Start a save in the background; return its `BackgroundSave` once the arrays may be changed.

    A process that ends normally finishes its saves first, wherever they began. If a save fails, `wait` of the
    `BackgroundSave` raises its error, and so does an `await` of its `committed`. If nobody waits for either, the
    process prints the error at exit, and its exit status is 1. A forked child does not continue the saves of its
    parent.

    While the main thread is busy, the save pauses after each stretch of Python code, so that the save hardly slows
    the main thread. A save of very many leaves therefore takes longer. The save does not pause while the main
    thread waits, for a device or for the save.

    Parameters
    ----------
    store, tree, step, and options not named here
        As `save` takes them. If a `Store` is passed, its `close` waits for the end of the save.
    staging
        With "memory" the values are copied, so the save needs as much memory again as the state. With "turns" this
        returns when all values are written, and only the fsync and the commit are left. That takes longer, but
        needs no more memory than `save`. With "reference" nothing is copied: do not change the arrays before the
        commit.
    in_flight
        A host runs at most one save to a URL at a time. With "queue" the next save waits for the current one
        before it copies its values; with "refuse" it raises `Misuse`.

    Raises
    ------
    `InvalidArgument`, `Misuse` (a save is under way, or the process is exiting), `Denied`; with "turns" also what
    `save` raises while it writes.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> w = np.zeros(4)
    >>> saving = tstore.save_async("memory://of-save-async", {"w": w}, step=7)
    >>> w += 1  # what is saved is a copy
    >>> saving.wait()
    1
    """
    checked_choices(staging, in_flight)
    background_store = BackgroundStore(store)
    checkpoint = await checkpoint_to_save(tree, step, **options)

    async def close(_: SaveWork) -> None:
        await background_store.close()

    save = SaveWork.start(background_store, checkpoint, StagingMemory(), staging, in_flight, close)
    await save.wait_staged()
    return BackgroundSave(save)


def checked_choices(staging: Any, in_flight: Any) -> None:
    """Raise `InvalidArgument` unless both are among their choices."""
    checked_choice("staging", staging, get_args(StagingChoice))
    checked_choice("in_flight", in_flight, get_args(InFlight))


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """What the save of a step took, and what it wrote on this host.

    `dataclasses.asdict` gives the numbers by name.
    """

    step: int
    """The step."""
    version: int
    """The version of its commit."""
    seconds_blocked: float
    """From the call of `Checkpointer.save` until the caller could go on: by so much the save delayed it.

    This is much longer than `seconds_staged` if the save waited for the one before it.
    """
    seconds_staged: float
    """How long the values were copied, or written with staging="turns"."""
    seconds_committed: float
    """From the call until the commit."""
    bytes_new: int
    """The bytes of the chunks that were written."""
    bytes_shared: int
    """The bytes of the chunks that did not change, which are not written again."""
    retries: int
    """The requests to the storage that failed meanwhile, and were repeated."""

    def __str__(self) -> str:
        return (
            f"step {self.step} is version {self.version}, after {self.seconds_committed:.3f} s: "
            f"{self.seconds_blocked:.3f} s blocked, {self.seconds_staged:.3f} s staging; "
            f"{self.bytes_new:,} bytes new, {self.bytes_shared:,} shared; {self.retries} retries"
        )


class SaveWork:
    """A save in the background, for who starts it; callers get a `BackgroundSave` of it.

    `called` is when the caller began to wait; `report` is known once the save is committed.
    """

    def __init__(self, url: str, step: int, called: float) -> None:
        self.url = url
        self.step = step
        self.report: SaveReport | None = None
        self._called = called
        self._staged_at = called
        self.staged: Future[None] = Future()
        self.committed: Future[int] = Future()
        for future in (self.staged, self.committed):
            future.set_running_or_notify_cancel()  # a cancelled `await` must not cancel it
        self._process = os.getpid()
        self._call: LoopCall[None]
        self._abandon_reason = ""  # why the save was cancelled
        self._seen = False  # whether somebody has seen how the save ended

    @staticmethod
    def start(
        store: BackgroundStore,
        checkpoint: Checkpoint,
        memory: StagingMemory,
        staging: StagingChoice,
        in_flight: InFlight,
        on_end: Callable[[SaveWork], Awaitable[None]],
        called: float | None = None,
    ) -> SaveWork:
        """Start to save a checkpoint, by default as if called now; at the end, call `on_end` with the save."""
        save = SaveWork(store.url, checkpoint.step, time.monotonic() if called is None else called)
        save._start(save._save(store, checkpoint, memory, staging, in_flight), on_end)
        store.close_after(save.ended)
        return save

    @property
    def ended(self) -> Future[None]:
        """A future that completes once the save, and the garbage collection or `close` after it, have ended."""
        return self._call.future

    @property
    def has_failed(self) -> bool:
        """Whether the save has ended without a commit."""
        return self.committed.done() and self.committed.exception() is not None

    @property
    def unseen_error(self) -> BaseException | None:
        """The error of a save that has failed; None if somebody has seen it already."""
        return self.committed.exception() if self.committed.done() and not self._seen else None

    async def wait_staged(self) -> None:
        """Wait until the caller may change its arrays, or raise the error of the save.

        If the caller is cancelled, so is the save, unless its commit has begun. A cancelled save has not failed:
        it reports no error at exit.
        """
        await wait_all([self.staged], self._call.cancel)

    def mark_seen(self) -> None:
        """Record that the caller knows how the save ended, so that nothing is reported at exit."""
        self._seen = True
        BACKGROUND.withdraw(self)

    def abandon(self, reason: str) -> None:
        """Cancel a save whose commit has not begun; the save then raises `DeadlineExceeded` with this reason."""
        self._abandon_reason = reason
        self._call.cancel()

    def check_process(self) -> None:
        """Raise `Misuse` in a forked child, which does not continue the save."""
        if os.getpid() != self._process:
            raise Misuse(
                f"the save of step {self.step} to {self.url} belongs to the parent of this forked process; wait "
                "for it there"
            )

    async def _save(
        self,
        store: BackgroundStore,
        checkpoint: Checkpoint,
        memory: StagingMemory,
        staging: StagingChoice,
        in_flight: InFlight,
    ) -> int:
        lock = _locks.get().setdefault((store.url, checkpoint.host), asyncio.Lock())
        async with contextlib.AsyncExitStack() as stack:
            async with checkpoint.withdrawn_on_error(store.opened):
                if in_flight == "refuse" and lock.locked():
                    raise Misuse(
                        f"{store.url}: a save is under way, so step {self.step} is not saved; wait for it, or "
                        "pass in_flight='queue'"
                    )
                await stack.enter_async_context(lock)
                began, failed_requests = time.monotonic(), store.failed_requests
                if staging == "memory":
                    await memory.copy(checkpoint.jobs)

            def on_written() -> None:
                self._set_staged()
                if checkpoint.settings.priority is None:
                    stack.enter_context(low_priority())  # from here on the caller computes beside the save

            if staging != "turns":
                on_written()
            saved = await store.save(checkpoint, on_written if staging == "turns" else None)
            self._set_staged()  # this attempt may have saved the step before, and written nothing now
            self.report = SaveReport(
                self.step,
                saved.version,
                seconds_blocked=self._staged_at - self._called,
                seconds_staged=self._staged_at - began,
                seconds_committed=time.monotonic() - self._called,
                bytes_new=saved.bytes_new,
                bytes_shared=saved.bytes_shared,
                retries=store.failed_requests - failed_requests,
            )
            return saved.version

    def _start(self, work: Coroutine[Any, Any, int], on_end: Callable[[SaveWork], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                version = await work
            except BaseException as error:
                self._fail(error)
            else:
                self.committed.set_result(version)
            finally:
                await on_end(self)

        def fail_if_never_run(_: Future[None]) -> None:
            if not self.committed.done():
                work.close()
                self._fail(asyncio.CancelledError())

        try:
            self._call = BACKGROUND.start(run())
        except Misuse:
            work.close()
            raise
        self._call.future.add_done_callback(fail_if_never_run)

    def _set_staged(self) -> None:
        if not self.staged.done():
            self._staged_at = time.monotonic()
            self.staged.set_result(None)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):
            if self._abandon_reason:
                error = DeadlineExceeded(self._abandon_reason)
            else:  # cancelled with its caller, or by Ctrl-C at exit: nothing to report
                self._seen = True
        _release_values(error)
        if not self.staged.done():  # `wait_staged` raises the error
            self._seen = True
            self.staged.set_exception(error)
        elif not self._seen:
            BACKGROUND.report_at_exit(self, f"the save of step {self.step} to {self.url} failed: {error}")
        self.committed.set_exception(error)


class BackgroundSave:
    """A save in the background, of `step`.

    `staged` and `committed` can be awaited any number of times, on any event loop. `staged` completes when the
    caller may change its arrays; `committed` completes when the save has ended, with the version as its result.
    """

    def __init__(self, work: SaveWork) -> None:
        self.step = work.step
        self._work = work

    def __repr__(self) -> str:
        state, committed = "under way", self._work.committed
        if committed.done():
            state = "failed" if committed.exception() else f"version {committed.result()}"
        return f"<tstore.BackgroundSave step={self.step} {self._work.url}: {state}>"

    __reduce__ = refusal("a BackgroundSave can't be pickled: wait for it here, and pass its version")

    @property
    def staged(self) -> Awaitable[None]:
        """An awaitable that completes when the caller may change its arrays.

        It raises what the save raised before that.
        """
        return _Outcome(self._work, self._work.staged)

    @property
    def committed(self) -> Awaitable[int]:
        """An awaitable that completes with the version once it is committed; it raises what the save raised."""
        return _Outcome(self._work, self._work.committed)

    def done(self) -> bool:
        """Return whether the save has ended, by its commit or an error."""
        self._work.check_process()
        return self._work.committed.done()

    def wait(self, timeout: float | None = None) -> int:
        """Block until the save has ended and return its version, or raise what it raised.

        Raise `DeadlineExceeded` if the save is still under way after `timeout` seconds; it continues.
        """
        work = self._work
        work.check_process()
        if BACKGROUND.is_running_here():
            raise Misuse("wait() would block the event loop that runs the save, and never return; await committed")
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not work.committed.done():
            left = end - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"the save of step {self.step} to {work.url} has not ended after {timeout:g} s; it continues"
                )
            futures.wait([work.committed], min(left, SIGNAL_CHECK))
        work.mark_seen()
        return work.committed.result()


class _Outcome(Generic[T]):
    """An awaitable of a background save, either for the end of its staging or for its version."""

    def __init__(self, work: SaveWork, future: Future[T]) -> None:
        self._work = work
        self._future = future

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        self._work.check_process()
        try:
            return await asyncio.wrap_future(self._future)
        except asyncio.CancelledError:  # the caller was cancelled, and has not seen any error of the save
            raise
        except BaseException:
            self._work.mark_seen()
            raise


def _release_values(error: BaseException | None) -> None:
    """Drop the local variables in an error's traceback, because they hold the values of the save."""
    seen: set[int] = set()  # causes may form a circle
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
