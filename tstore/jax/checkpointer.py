"""`tstore.Checkpointer` for pytrees and the processes of `jax.distributed`."""

from __future__ import annotations

import os
import time
from collections.abc import Coroutine
from typing import Any, Unpack

import jax

from tstore.checkpoint import checkpointer
from tstore.checkpoint.background import BackgroundSave
from tstore.checkpoint.job_store import CheckpointerOptions, Tiered
from tstore.checkpoint.options import CommitOptions, CommitSettings, complete
from tstore.core.format.arguments import checked_step
from tstore.core.hints import hinting
from tstore.core.runtime import pool
from tstore.core.store import Store
from tstore.jax.processes import Processes, agreed_number, any_process, job_token
from tstore.jax.restore import PlacedTarget, restore
from tstore.jax.save import unchanging_values

__all__ = ["Checkpointer"]


class Checkpointer(checkpointer.Checkpointer):
    """A `tstore.Checkpointer` whose checkpoints are pytrees.

    Every process of the job makes the same calls. `save`, `restore` and `restore_latest` take pytrees as
    `tstore.jax.save_async` and `tstore.jax.restore` do. Policies may decide differently in different processes, so
    the processes share their decisions at each step, or with `EverySteps(10) & OnPreemption()` at every 10th. They
    do so through the coordination service of `jax.distributed`: if a process does not call `should_save` or
    `restore_latest` within `timeout` seconds of the others, all get a `DeadlineExceeded` that names it.

    Parameters
    ----------
    store, every, keep, codecs, timeout, in_flight, on_error, on_saved
        As `tstore.Checkpointer` takes them.
    """

    @hinting
    @complete(CheckpointerOptions, checkpointer.Checkpointer.__init__)
    def __init__(
        self,
        store: str | os.PathLike[str] | Store | Tiered,
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        super().__init__(
            store,
            host=jax.process_index(),
            hosts=jax.process_count(),
            attempt=None,
            staging="reference",
            agree=lambda decision: any_process(decision, self._timeout),
            **options,
        )

    @complete(CommitOptions, CommitSettings)
    def save(
        self,
        step: int,
        tree: Any,
        **options: Unpack[CommitOptions],
    ) -> Coroutine[Any, Any, BackgroundSave]:
        """Start saving a pytree as a step, as `save_async` does, even if no policy asks for it.

        Raise what `save_async` raises, and the error of an earlier save once this one has begun.
        """
        called = time.monotonic()
        processes = Processes.saving(self._saves.store, step, None, None, None)
        begin = super()._save_since

        async def run() -> BackgroundSave:
            values = await unchanging_values(tree, processes.hosts)
            self._attempt = processes.attempt
            return await begin(called, step, values, **options)

        return run()

    def restore_latest(
        self, target: Any = None, *, fallback: bool = False, **options: Any
    ) -> Coroutine[Any, Any, Any]:
        """Restore the newest step as `restore` does, the same in all processes; return None if there is none.

        With `fallback` pass over damaged steps, as `tstore.Checkpointer.restore_latest` does.
        """
        return super().restore_latest(PlacedTarget.here(target), fallback=fallback, **options)

    async def _agree_on_latest(self, latest: int | None, failure: Exception | None) -> int | None:
        """Return the step that the first process found; raise in all processes if one has a `failure`."""
        number: int | None = await agreed_number("restore_latest", latest, failure, self._timeout)
        return number

    def restore(self, step: int, target: Any = None, **options: Any) -> Coroutine[Any, Any, Any]:
        """Return a step as `tstore.jax.restore` does, with its options; wait for saves under way first.

        Raise what `tstore.jax.restore` raises, and the error of a save that failed.
        """
        step, here = checked_step(step), PlacedTarget.here(target)

        async def run() -> Any:
            await self.wait()
            return await restore(await self._saves.source(step), step, target=here, **options)

        return run()

    async def _start_token(self) -> str:
        return await pool.run(job_token)
