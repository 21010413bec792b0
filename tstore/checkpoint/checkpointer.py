"""The checkpoints of one training job: when to save, which to keep, and which to resume from."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self, Unpack

from tstore.checkpoint.background import BackgroundSave, InFlight, SaveWork, StagingChoice, checked_choices
from tstore.checkpoint.checkpoint import Checkpoint
from tstore.checkpoint.job_store import Job, JobStore, Tiered, TierStep
from tstore.checkpoint.mapped import Mapped
from tstore.checkpoint.options import CommitOptions, CommitSettings, complete
from tstore.checkpoint.policies import Moment, Policy, PreemptionSignal, checked_policy
from tstore.checkpoint.restore import restore
from tstore.checkpoint.rollback import check_fallback, check_newest, is_damaged
from tstore.checkpoint.save import checked_order, checkpoint_to_save
from tstore.checkpoint.series import OnError, OnSaved, SaveSeries
from tstore.checkpoint.staging import StagingMemory
from tstore.core.format.arguments import (
    checked_choice,
    checked_commit_timeout,
    checked_host,
    checked_step,
    checked_text,
    quote,
)
from tstore.core.format.tree.retention import Keep, checked_keep
from tstore.core.hints import hinting
from tstore.core.pickling import refusal
from tstore.core.runtime import pool
from tstore.core.steps import Step
from tstore.core.store import Store
from tstore.core.transactions.attempts import Attempt, start_token
from tstore.errors import Corrupt, DeadlineExceeded, Misuse, SnapshotExpired
from tstore.quantization.policy import QuantizeRules, Target

__all__ = ["Checkpointer"]

_log = logging.getLogger("tstore.checkpoint")


class Checkpointer:
    """The checkpoints of one job at one URL, saved in the background; garbage collection removes those not kept.

    If a save or garbage collection fails, the next call raises its error; `save` first begins to save its step.
    `on_error` changes that.
    `async with` closes the `Checkpointer`.

    Parameters
    ----------
    store
        A URL, a path, a `Store`, or `Tiers`. A store that does not exist is created by the first save.
    every
        When `should_save` returns True: a number of steps, or policies such as
        `EverySteps(1000) | EverySeconds(600) | OnPreemption()`, or `Continuous()`; by default at every step.
    keep
        The steps to keep, as `Store.collect` takes them, or the number of the highest steps to keep. Host 0
        collects the other steps in the background after each commit. A rule whose metric or tag no step has yet
        selects none, with one warning. By default all are kept. Call `rollback` before a job continues from an
        earlier step.
    host, hosts, attempt, codecs, timeout
        As `save` takes them.
    staging, in_flight
        As `save_async` takes them. The memory for copies is kept from one save to the next.
    on_error
        With "warn" a failed save or garbage collection, as in a full bucket, does not stop the job: the error is
        logged to `tstore.checkpoint`, `unsaved` has it, and the next save tries again. `close` raises
        `Unavailable` if no later save succeeded. `InvalidArgument` and `Misuse` are raised all the same.
    on_saved
        A function that gets the `SaveReport` of each commit of this host, one after the other, in a thread of its
        own. Garbage collection, `wait` and `close` wait for it, so it must not call these. Its error is treated
        like one of garbage collection. The report is also logged to `tstore.checkpoint`, at INFO.
    agree
        With several hosts, all policies but `EverySteps` need a function that gets a bool of this host and returns
        on each host whether any host passed True, such as an all-reduce. `should_save` calls it at each step where
        one of these may be due, so every host must call `should_save` at the same steps. If these calls take too
        long, let the hosts agree less often: `EverySteps(10) & OnPreemption()`.

    Raises
    ------
    `InvalidArgument`, and `Misuse` for `OnPreemption` outside of the main thread.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> with tstore.Checkpointer("memory://of-checkpointer", every=10, keep=2) as checkpoints:
    ...     state = checkpoints.restore_latest() or {"w": np.zeros(4)}
    ...     for step in range(1 + (checkpoints.latest() or 0), 31):
    ...         state = {"w": state["w"] + 1}
    ...         if checkpoints.should_save(step):
    ...             _ = checkpoints.save(step, state, metrics={"loss": 1 / step})
    ...     checkpoints.latest(), checkpoints.best("loss")
    (30, 30)
    """

    @hinting
    def __init__(
        self,
        store: str | os.PathLike[str] | Store | Tiered,
        *,
        every: int | Policy | None = None,
        keep: int | Keep | None = None,
        host: int = 0,
        hosts: int = 1,
        attempt: str | None = None,
        codecs: QuantizeRules | Target = None,
        timeout: float | None = None,
        staging: StagingChoice = "memory",
        in_flight: InFlight = "queue",
        on_error: OnError = "raise",
        on_saved: OnSaved | None = None,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        checked_choices(staging, in_flight)
        self._store = store
        self._host, self._hosts = checked_host(host, hosts)
        every = store.every if isinstance(store, Tiered) and every is None else every
        self._policy, kept = checked_policy(every, self._hosts, agree), checked_keep(keep)
        self._attempt, self._codecs, self._agree = attempt, codecs, agree
        self._timeout = None if timeout is None else checked_commit_timeout(timeout)
        self._staging: StagingChoice = staging
        self._in_flight: InFlight = in_flight
        self._process = os.getpid()
        self._memory = StagingMemory()
        kept = kept if self._host == 0 else None
        self._saves = JobStore.of(store, Job(self._host, self._hosts, timeout, kept, self._start_token))
        self._series = SaveSeries(kept if self._saves.collects else None, on_error, on_saved)
        self._last_rollback: int | None = None  # the version of its commit
        self._last_step: int | None = None
        self._last_time = time.monotonic()
        self._preemption_agreed = False  # whether any host had received the signal when the hosts last agreed
        self._preemption_saved = self._closed = False
        self._signal = PreemptionSignal(self._policy.signals)

    def __repr__(self) -> str:
        return f"<tstore.Checkpointer {quote(self._store)} every={self._policy}>"

    __reduce__ = refusal("a Checkpointer can't be pickled: make one in the other process")

    @property
    def preempted(self) -> bool:
        """Whether a signal of `OnPreemption` has come and a step was saved since, so that the job should end."""
        return self._preemption_saved

    @property
    def unsaved(self) -> Mapping[int, BaseException]:
        """The errors of the saves that have failed since one succeeded, by step, with on_error="warn"."""
        return dict(self._series.unsaved)

    def should_save(self, step: int) -> bool:
        """Return whether the policies say to save after a step; False for the step that was saved last.

        The last step of the run is not known here. To save it too, write
        `if checkpoints.should_save(step) or step == last`. If a step is to be saved, `save` raises the error of an
        earlier save, so that all hosts make the same calls even if only one has an error.
        """
        self._check_process()
        step = checked_step(step)
        if not self._policy.due(Moment(step, math.inf, True, True)):  # not due, whatever differs between hosts
            self._raise_unseen_error()
            return False
        busy = self._policy.waits_for_save and bool(self._series.pending)
        if self._policy.waits_for_save and self._agree is not None:
            busy = self._agree(busy)
        signaled, signals = self._signal.received, self._policy.signals
        preempted = signaled and not self._preemption_saved
        due = self._policy.due(Moment(step, time.monotonic() - self._last_time, preempted, not busy))
        if self._agree is not None:
            due = self._agree(due) if signals or self._policy.uses_clock else due
            signaled = self._agree(self._signal.received) if signals and due else False
        self._preemption_agreed = signaled
        self._forget_failed_step()
        if due and step != self._last_step:
            return True
        self._raise_unseen_error()
        return False

    @complete(CommitOptions, CommitSettings)
    async def save(
        self,
        step: int,
        tree: Any,
        **options: Unpack[CommitOptions],
    ) -> BackgroundSave:
        """Start saving a tree as a step, as `save_async` does with these options, even if no policy asks for it.

        Raise what `save_async` raises, `InvalidArgument` for a step before the newest one (call `rollback` first),
        and `Misuse` after `close`. Raise the error of an earlier save once this one has begun; it continues.
        """
        return await self._save_since(time.monotonic(), step, tree, **options)

    async def _save_since(
        self, called: float, step: int, tree: Any, **options: Unpack[CommitOptions]
    ) -> BackgroundSave:
        """Do what `save` does, for a caller who has waited since the time `called`."""
        step = checked_order(step, tree)
        if self._closed:
            raise Misuse(f"{quote(self._store)}: the Checkpointer is closed; make another one to save step {step}")
        store = self._saves.background()
        attempt = self._next_attempt(store.url, step)  # every host counts this call, even if it raises below
        self._check_process()
        empty = Checkpoint.for_withdrawal(step, self._host, self._hosts, attempt, options.get("overwrite", False))
        async with empty.withdrawn_on_error(store.opened):
            options.setdefault("timeout", self._timeout)
            checkpoint = await checkpoint_to_save(
                tree,
                step,
                host=self._host,
                hosts=self._hosts,
                attempt=self._attempt,
                codecs=self._codecs,
                **options,
            )
            self._forget_failed_step()
            await self._saves.check_order(step, self._last_step, self._series.pending)
        preempted = self._preemption_agreed if self._agree is not None else self._signal.received
        checkpoint = checkpoint._replace(
            attempt=attempt, check_tags=lambda tags: check_newest(store.url, step, tags), withdraws=True
        )
        series = self._series
        save = SaveWork.start(
            store,
            checkpoint,
            self._memory,
            self._staging,
            self._in_flight,
            lambda ended: series.end(ended, store),
            called,
        )
        series.add(save)  # before this can be cancelled, so that `wait` and `close` know of it
        try:
            await save.wait_staged()
        except Exception as error:
            if not series.tolerates(error):
                raise
        self._last_step, self._last_time = step, time.monotonic()
        self._preemption_saved |= preempted
        self._raise_unseen_error(save)  # only now: other hosts, without an error, wait for this host's part
        return BackgroundSave(save)

    async def latest(self) -> int | None:
        """Wait for saves under way; return the newest step, None if there is no step or no store."""
        return max(await self._steps(), default=None)

    async def best(self, metric: str, order: Literal["min", "max"] = "min") -> int | None:
        """Return the step with the lowest or highest value of a metric, the newest of equal ones.

        Return None if no step has a finite value of the metric. Raise `InvalidArgument` for another order.
        """
        checked_choice("order", order, ("min", "max"))
        metric = checked_text("metric", metric)
        sign = 1 if order == "min" else -1
        saved = [s for s in await self.steps() if math.isfinite(s.metrics.get(metric, math.nan))]
        return min(saved, key=lambda s: (sign * s.metrics[metric], -s.step)).step if saved else None

    async def steps(self) -> list[Step]:
        """Wait for saves under way; return the saved steps in increasing order, none if there is no store.

        A `Step` has the number, version, time and metrics; `tstore.steps` returns only the numbers.
        """
        await self.wait()
        return await self._saves.saved_steps()

    async def tiers(self) -> list[TierStep]:
        """Return what each tier has of each step, as far as this host knows; see `Tiers`."""
        return await self._saves.tiers()

    async def restore_latest(self, target: Any = None, *, fallback: bool = False, **options: Any) -> Any:
        """Restore the newest step as `restore` does; return None if there is no step or no store.

        `options` are those of `restore`, such as `only`. If the step is damaged this raises `Corrupt`; call
        `rollback` to go on from an older one. With `fallback` this does that by itself: it restores the newest
        step that is not damaged on any host, logs a warning for each that is, and makes the restored step the
        newest, as `rollback` does, so that `latest` returns it and the next step can be saved. The damaged steps
        stay readable as versions until garbage collection. No other error makes it fall back, and
        `missing="keep"` is refused, because it could mix the values of two steps. If the record or
        manifest of the newest version is damaged, nothing can be saved: run `tstore repair` first.

        Each of several hosts looks up the newest step for itself. If another step may be committed meanwhile, call
        `latest` on one host, send its result to all hosts, and call `restore` with it; the classes of
        `tstore.torch` and `tstore.jax` do that.
        """
        await self.wait()
        await self._saves.resume()
        if fallback and not self._saves.verifies:
            return await self._restore_undamaged(target, options)
        while (step := await self._agreed_latest()) is not None:
            try:
                return await self.restore(step, target, **options)
            except Corrupt as error:
                raise Corrupt(f"step {step}, the newest: {error}; {await self._rollback_advice(step)}") from error
            except SnapshotExpired:  # another job may have saved a newer step, and collected this one
                if self._hosts > 1 or options.get("missing") == "keep" or await self.latest() == step:
                    raise
        return None

    async def restore(self, step: int, target: Any = None, **options: Any) -> Any:
        """Restore a step as `tstore.restore` does, with its options; wait for saves under way first.

        Raise what `tstore.restore` raises, and the error of a save that failed.
        """
        await self.wait()
        options = {"host": self._host, "hosts": self._hosts, **options}
        step = checked_step(step)
        return await restore(await self._saves.source(step), step, target=target, **options)

    async def rollback(self, step: int) -> int:
        """Make a step the newest: remove all later steps in one commit, and return the version of that commit.

        Call it on every host before the job continues from an earlier step: host 0 commits, and the others wait.
        A repeated call finds no later steps, commits nothing and returns the same version. If no later steps
        were ever removed, the version of the step is returned. The removed steps stay readable as versions (`at=`)
        until garbage collection.

        Wait for saves under way first. Raise `NotFound` if there is no such step, and `DeadlineExceeded` if host 0
        has not removed the later steps after `timeout` seconds.
        """
        step = checked_step(step)
        await self.wait()
        rollback = await self._saves.roll_back(step, self._host, checked_commit_timeout(self._timeout))
        self._last_rollback = self._last_rollback if rollback.removal is None else rollback.removal
        self._last_step = step
        self._series.forget_unsaved_after(step)
        return rollback.step_version if rollback.removal is None else rollback.removal

    async def wait(self, timeout: float | None = None) -> None:
        """Wait until all saves and collections have ended; raise the error of any that failed.

        Raise `DeadlineExceeded` if any of them is still under way after `timeout` seconds; it continues.
        """
        self._check_process()
        if not await self._series.wait_ended(timeout):
            raise DeadlineExceeded(
                f"{quote(self._store)}: {self._series.unfinished()} after {timeout:g} s; it continues"
            )
        self._raise_unseen_error()

    async def close(self, timeout: float | None = None) -> None:
        """Wait as `wait` does, free the memory for copies, and restore the previous signal handlers.

        A save that is under way after `timeout` seconds is abandoned, unless its commit has begun: the store does
        not change, and `DeadlineExceeded` is raised. Afterwards the `Checkpointer` restores, but saves no more.
        """
        await self._close(timeout, completed=True)

    async def _close(self, timeout: float | None, *, completed: bool) -> None:
        if os.getpid() != self._process:  # a forked child has none of the saves
            return
        self._closed = True
        try:
            if not await self._series.wait_ended(timeout):
                unfinished = f"{quote(self._store)}: {self._series.unfinished()} after {timeout:g} s"
                await self._series.abandon(f"{unfinished}, so it was abandoned")
            self._raise_unseen_error()
            self._series.raise_unsaved(quote(self._store))
        finally:
            self._signal.remove()
            self._memory = StagingMemory()
            await self._saves.close(completed=completed)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        await self._close(None, completed=error_type is None)

    async def _restore_undamaged(self, target: Any, options: dict[str, Any]) -> Any:
        """Restore the newest step that is not damaged on any host, and make it the newest."""
        check_fallback(self._hosts, self._agree is not None, options.get("missing"))
        newest = step = await self._agreed_latest()
        while step is not None:
            value, error = None, None
            try:
                value = await self.restore(step, target, **options)
                if isinstance(value, Mapped):
                    await value.verified()
            except Exception as raised:  # the other hosts must learn whether the step is damaged
                error = raised
            damaged = await is_damaged(await self._saves.source(step), step, error)
            if self._agree is not None:
                damaged = await pool.run(self._agree, damaged)
            if not damaged:
                if error is not None:
                    raise error
                if step != newest:
                    await self.rollback(step)
                return value
            reason = str(error or "another host cannot read it")
            earlier = await self._agreed_latest(step)
            if earlier is None:
                raise Corrupt(f"step {step}: {reason}; no step is left to fall back to") from error
            _log.warning("%s: step %d is damaged, so step %d is tried: %s", self._store, step, earlier, reason)
            step = earlier
        return None

    async def _agreed_latest(self, before: float = math.inf) -> int | None:
        """Look up the newest step before another; `_agree_on_latest` returns it or raises the lookup's error."""
        latest, failure = None, None
        try:
            latest = max((step for step in await self._steps() if step < before), default=None)
        except Exception as error:  # reported to the other hosts
            failure = error
        return await self._agree_on_latest(latest, failure)

    async def _agree_on_latest(self, latest: int | None, failure: Exception | None) -> int | None:
        """Return `latest` or raise `failure`; a subclass for several processes agrees with the others instead."""
        if failure is not None:
            raise failure
        return latest

    def _next_attempt(self, url: str, step: int) -> Attempt | None:
        attempt = Attempt.passed_or_detected(self._attempt, self._hosts)
        if attempt is None:
            return None
        return attempt._replace(rollback=self._last_rollback).next_save(url, self._host, step)

    async def _start_token(self) -> str:
        """Return the token of this start of the job; a subclass for several processes agrees on one instead."""
        return start_token(self._attempt, self._hosts)

    async def _steps(self) -> list[int]:
        """Wait for saves under way; return the steps that can be restored, in increasing order."""
        await self.wait()
        return await self._saves.steps()

    async def _rollback_advice(self, step: int) -> str:
        """Return advice on how to go on without a damaged step."""
        earlier = [number for number in await self._steps() if number < step]
        return f"to go on from an earlier step, call rollback({earlier[-1]})" if earlier else "it is the only step"

    def _raise_unseen_error(self, returned: SaveWork | None = None) -> None:
        self._check_process()
        self._forget_failed_step()
        self._series.raise_error(returned)

    def _forget_failed_step(self) -> None:
        """Make the step that was saved last due again if its save has failed, even if that has not yet ended."""
        if self._series.has_failed(self._last_step):
            self._last_step = None

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise Misuse("this Checkpointer belongs to the parent of this forked process; make another one here")
