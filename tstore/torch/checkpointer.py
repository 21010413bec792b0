"""`tstore.Checkpointer` for trees of tensors and the processes of a process group."""

from __future__ import annotations

import os
import time
from collections.abc import Coroutine
from typing import Any, Unpack

import torch.distributed as dist

from tstore.checkpoint import checkpointer
from tstore.checkpoint.background import BackgroundSave, StagingChoice
from tstore.checkpoint.job_store import CheckpointerOptions, Tiered
from tstore.checkpoint.options import CommitOptions, CommitSettings, complete
from tstore.core.format.arguments import checked_step
from tstore.core.hints import hinting
from tstore.core.runtime import pool, world
from tstore.core.store import Store
from tstore.errors import Unavailable
from tstore.torch.processes import Processes
from tstore.torch.restore import restore_among
from tstore.torch.save import plan_save

__all__ = ["Checkpointer"]


class Checkpointer(checkpointer.Checkpointer):
    """`tstore.Checkpointer` for trees of tensors: the checkpoints of one job.

    Every process of the group makes the same calls. `save`, `restore` and `restore_latest` take trees as
    `tstore.torch.save` and `tstore.torch.restore` do. Policies may decide differently in different processes, so
    the processes share their decisions in an all-gather at each step; with `EverySteps(10) & OnPreemption()`, only
    at every 10th step.

    Parameters
    ----------
    group
        The process group whose processes save and restore together, by default all.
    store, every, keep, codecs, timeout, staging, in_flight, on_error, on_saved
        As `tstore.Checkpointer` takes them.
    """

    @hinting
    @complete(CheckpointerOptions, checkpointer.Checkpointer.__init__)
    def __init__(
        self,
        store: str | os.PathLike[str] | Store | Tiered,
        *,
        group: dist.ProcessGroup | None = None,
        staging: StagingChoice = "memory",
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        self._processes = Processes.of(group)
        super().__init__(
            store,
            host=self._processes.host,
            hosts=self._processes.hosts,
            attempt=None,
            staging=staging,
            agree=self._any_process,
            **options,
        )

    @complete(CommitOptions, CommitSettings)
    def save(
        self,
        step: int,
        tree: Any,
        **options: Unpack[CommitOptions],
    ) -> Coroutine[Any, Any, BackgroundSave]:
        """Start saving a tree of tensors as a step, as `save_async` does, even if no policy asks for it.

        Raise what `save_async` raises. If an earlier save has failed in a process, all of them raise an error, but
        only once this one has begun.
        """
        called, error = time.monotonic(), self._series.unseen_error()
        plan = plan_save(tree, self._processes, None, "" if error is None else f"{type(error).__name__}: {error}")
        self._attempt = plan.attempt
        begin = super()._save_since

        async def run() -> BackgroundSave:
            save = await begin(called, step, plan.tree, **options)
            for number, reason in enumerate(plan.failures):
                if reason:
                    raise Unavailable(f"an earlier save of process {number} of {plan.hosts} failed: {reason}")
            return save

        return run()

    async def restore(self, step: int, target: Any = None, **options: Any) -> Any:
        """Return a step as `tstore.torch.restore` does, with its options; wait for saves under way first.

        Raise what `tstore.torch.restore` raises, and the error of a save that failed.
        """
        await self.wait()
        step = checked_step(step)
        return await restore_among(self._processes, await self._saves.source(step), step, target=target, **options)

    async def _start_token(self) -> str:
        tokens: list[str] = await pool.run(self._processes.exchange, world.token(12), None)
        return tokens[0]

    async def _agree_on_latest(self, latest: int | None, failure: Exception | None) -> int | None:
        """Return the step that the first process found; raise in all processes if one has a `failure`."""
        steps: list[int | None] = await pool.run(self._processes.exchange, latest, failure)
        return steps[0]

    def _any_process(self, decision: bool) -> bool:
        return any(self._processes.gather(decision))
