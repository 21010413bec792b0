"""The checkpoints of one training job: when to save, which to keep, and which to resume from."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from tstore.checkpoint.background import (
    BackgroundSave,
    BackgroundStore,
    InFlight,
    StagingChoice,
    abandon,
    begin_save,
    checked_choices,
    ended,
    untold_error,
)
from tstore.checkpoint.policies import Moment, Policy, PreemptionSignal, checked_policy
from tstore.checkpoint.restore import restore
from tstore.checkpoint.save import checkpoint_from_arguments
from tstore.checkpoint.staging import StagingMemory
from tstore.errors import DeadlineExceeded, InvalidArgument, Misuse, NotAStore
from tstore.format.arguments import checked_index, checked_step, quote
from tstore.format.retention import Keep
from tstore.quantization.policy import CodecRules, Target
from tstore.runtime.event_loops import BACKGROUND
from tstore.steps import Step, saved_steps
from tstore.store import Store, opened

__all__ = ["Checkpointer"]


class Checkpointer:
    """The checkpoints of one job at one URL: saved in the background, by policies, and collected.

    If a save or collection fails, the next call raises its error. `async with` closes it at the end.

    Parameters
    ----------
    store
        A URL, a path or a `Store`. A store that does not exist is created by the first save.
    every
        When `should_save` returns True: a number of steps, or policies such as
        `EverySteps(1000) | EverySeconds(600) | OnPreemption()`; by default at every step.
    keep
        The steps to keep, as `Store.collect` takes them, or the number of the last steps to keep. Host 0 collects
        the others in the background after each commit. By default all are kept. Steps count by their numbers, so
        remove the later ones (`tstore rm`) before a job goes on from an earlier step.
    host, hosts, attempt, codecs, timeout
        As `save` takes them.
    staging, in_flight
        As `save_async` takes them. The memory for copies is kept from one save to the next.
    agree
        With several hosts, `EverySeconds` and `OnPreemption` need a function that gets a bool of this host and
        returns on each host whether any host passed True, such as an all-reduce. `should_save` calls it, so every
        host must call `should_save` at the same steps.

    Raises
    ------
    `InvalidArgument`, and `Misuse` for `OnPreemption` outside of the main thread.
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store,
        *,
        every: int | Policy | None = None,
        keep: int | Keep | None = None,
        host: int = 0,
        hosts: int = 1,
        attempt: str | None = None,
        codecs: CodecRules | Target = None,
        timeout: float | None = None,
        staging: StagingChoice = "memory",
        in_flight: InFlight = "queue",
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        checked_choices(staging, in_flight)
        self._store = store
        self._policy = checked_policy(every)
        self._keep = _checked_keep(keep)
        self._host, self._hosts = checked_index("host", host), checked_index("hosts", hosts)
        self._attempt = attempt
        self._codecs = codecs
        self._timeout = timeout
        self._staging: StagingChoice = staging
        self._in_flight: InFlight = in_flight
        self._agree = agree
        if self._hosts > 1 and agree is None and (self._policy.timed or self._policy.signals):
            raise InvalidArgument(
                f"every={quote(every)}: {self._hosts} hosts could decide differently; pass agree=…, a function "
                "that returns whether any host passed True, or only EverySteps"
            )
        self._process = os.getpid()
        self._place: BackgroundStore | None = None
        self._memory = StagingMemory()
        self._saves: list[BackgroundSave] = []  # under way, or not yet known to have succeeded
        self._last_step: int | None = None
        self._last_time = time.monotonic()
        self._told_to_stop = False  # whether any host was, when all of them last agreed
        self._preemption_saved = False
        self._collecting = asyncio.Lock()
        self._collect_error: BaseException | None = None
        self._signal = PreemptionSignal(self._policy.signals)

    def __repr__(self) -> str:
        return f"<tstore.Checkpointer {quote(self._store)} every={self._policy}>"

    @property
    def preempted(self) -> bool:
        """Whether a signal of `OnPreemption` has come and a step was saved since, so that the job should end."""
        return self._preemption_saved

    def should_save(self, step: int) -> bool:
        """Return whether to save after a step, by the policies; False for the step that was saved last."""
        self._check_process()
        step = checked_step(step)
        self._told_to_stop = self._signal.received
        if self._agree is not None and self._policy.signals:
            self._told_to_stop = self._agree(self._signal.received)
        preempted = self._told_to_stop and not self._preemption_saved
        due = self._policy.due(Moment(step, time.monotonic() - self._last_time, preempted))
        if self._agree is not None and self._policy.timed:
            due = self._agree(due)
        self._check()  # after this host's part in what the hosts agree on
        return due and step != self._last_step

    async def save(
        self,
        step: int,
        tree: Any,
        *,
        metrics: Mapping[str, float] | None = None,
        attributes: Mapping[str, Any] | None = None,
        message: str = "",
        overwrite: bool = False,
    ) -> BackgroundSave:
        """Begin to save a tree as a step, as `save_async` does, also if no policy asks for it.

        Raise what `save_async` raises, and the error of an earlier save.
        """
        self._check()
        place = self._place = self._place or BackgroundStore(self._store)
        checkpoint = await checkpoint_from_arguments(
            tree,
            step,
            host=self._host,
            hosts=self._hosts,
            attempt=self._attempt,
            codecs=self._codecs,
            metrics=metrics,
            attributes=attributes,
            message=message,
            durability="fsync",
            timeout=self._timeout,
            overwrite=overwrite,
        )
        preempted = self._told_to_stop if self._agree is not None else self._signal.received
        save = await begin_save(place, checkpoint, self._memory, self._staging, self._in_flight, self._collect)
        self._saves.append(save)
        self._last_step, self._last_time = checkpoint.step, time.monotonic()
        self._preemption_saved |= preempted
        return save

    async def latest(self) -> int | None:
        """Return the newest step, None if there is none or no store, once saves under way have ended."""
        steps = await self.steps()
        return steps[-1].step if steps else None

    async def best(self, metric: str, order: Literal["min", "max"] = "min") -> int | None:
        """Return the step with the lowest or highest value of a metric, the newest of equal ones.

        Return None if no step has a finite value of it.
        """
        if order not in ("min", "max"):
            raise InvalidArgument(f"order={quote(order)}: expected 'min' or 'max'")
        sign = 1 if order == "min" else -1
        saved = [s for s in await self.steps() if math.isfinite(s.metrics.get(metric, math.nan))]
        return min(saved, key=lambda s: (sign * s.metrics[metric], -s.step)).step if saved else None

    async def steps(self) -> list[Step]:
        """Return the saved steps, in increasing order, once saves under way have ended; none without a store."""
        await self.wait()
        try:
            async with opened(self._store, "r") as source:
                return await saved_steps(source)
        except NotAStore:
            return []

    async def restore_latest(self, target: Any = None, **options: Any) -> Any:
        """Return the newest step as `restore` does, or None if there is none or no store.

        `options` are those of `restore`, such as `only`.
        """
        if await self.latest() is None:
            return None
        return await restore(self._store, target=target, **options)

    async def restore(self, step: int, target: Any = None, **options: Any) -> Any:
        """Return a step as `restore` does, with its options; wait for saves under way first."""
        await self.wait()
        return await restore(self._store, step, target=target, **options)

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves and collections have ended; raise the error of one that failed.

        Raise `DeadlineExceeded` if one is under way after `timeout` seconds; it goes on.
        """
        self._check_process()
        if not await self._ended(timeout):
            raise DeadlineExceeded(f"{self._under_way()} after {timeout:g} s; it goes on")
        self._check()

    async def close(self, timeout: float | None = None) -> None:
        """Wait as `wait` does, free the memory for copies, and put back the signal handlers.

        A save that is under way after `timeout` seconds is abandoned, unless its commit has begun: the store is as
        it was before, and `DeadlineExceeded` is raised. A later call of the `Checkpointer` may use it again.
        """
        if os.getpid() != self._process:  # a forked child has none of the saves
            return
        try:
            if not await self._ended(timeout):
                reason = f"{self._under_way()} after {timeout:g} s, so it was abandoned"
                for save in self._saves:
                    abandon(save, reason)
                await self._ended(None)
            self._check()
        finally:
            self._signal.remove()
            self._memory = StagingMemory()
            if self._place is not None:
                await self._place.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ended(self, timeout: float | None) -> bool:
        """Wait until nothing is under way; return whether that is so in time."""
        ends = [asyncio.wrap_future(ended(save)) for save in self._saves]
        return not ends or not (await asyncio.wait(ends, timeout=timeout))[1]

    def _under_way(self) -> str:
        steps = ", ".join(str(save.step) for save in self._saves if not ended(save).done())
        return f"{quote(self._store)}: the save of step {steps} has not ended"

    def _check(self) -> None:
        """Raise the error of a save or collection that has failed and that nobody has been told."""
        self._check_process()
        for save in [save for save in self._saves if ended(save).done()]:
            self._saves.remove(save)
            if (error := untold_error(save)) is not None:
                raise error
        if self._collect_error is not None:
            error, self._collect_error = self._collect_error, None
            BACKGROUND.withdraw(self)
            raise error

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise Misuse("this Checkpointer belongs to the parent of this forked process; make another one here")

    async def _collect(self, version: int | None) -> None:
        """Collect the steps that are not to be kept after the commit of a version."""
        if version is None or self._keep is None or self._host != 0:
            return
        assert self._place is not None
        try:
            async with self._collecting:
                await (await self._place.opened()).collect(self._keep)
        except (Exception, asyncio.CancelledError) as raised:
            error: BaseException = raised
            if isinstance(raised, asyncio.CancelledError):
                error = DeadlineExceeded(
                    f"the collection after version {version} was abandoned; the next one collects the same steps"
                )
            self._collect_error = error
            BACKGROUND.report_at_exit(self, f"the collection after version {version} failed: {error}")


def _checked_keep(keep: Any) -> Keep | None:
    if keep is None or isinstance(keep, Keep):
        return keep
    if isinstance(keep, int) and not isinstance(keep, bool):
        return Keep(last=keep)
    raise InvalidArgument(f"keep={quote(keep)}: expected a number of steps, a tstore.Keep, or None")
