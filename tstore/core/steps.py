"""The steps of a store: the commits with a tag `step/<number>`, each a checkpoint.

`save` and `tstore import` set these tags, a copy of the store preserves them, and any transaction may set one. But
`quantize` refuses to set one, because a lossy copy is not a step.

By default, `restore` and `quantize` read the newest step, and without steps the head: the newest version that is
not a copy.
"""

from __future__ import annotations

import datetime
import os
import reprlib
from collections.abc import Iterable
from typing import NamedTuple

from tstore.core.format.arguments import checked_step, step_number
from tstore.core.format.objects.wellformed import date_of
from tstore.core.log.expiry import changes_nothing, ledger_at, living_versions, state_of
from tstore.core.snapshot import Snapshot, snapshot_of
from tstore.core.store import Store, opened
from tstore.errors import InvalidArgument, NotFound, name_list

__all__ = [
    "Step",
    "check_one_version",
    "chosen_snapshot",
    "copy_snapshot",
    "saved_steps",
    "source_snapshot",
    "step_tag",
    "step_tags",
    "steps",
    "steps_of",
]


def step_tag(step: int) -> str:
    """Return the tag of the checkpoint of a step."""
    return f"step/{step}"


def step_tags(tags: Iterable[str], step: int) -> list[str]:
    """Return the tag of a step, and the tags that begin with it, as `quantize` names copies."""
    tag = step_tag(step)
    return [tag, *(name for name in tags if name.startswith(f"{tag}/"))]


def steps_of(tags: Iterable[str]) -> list[int]:
    """Return the steps among the tags, in increasing order."""
    return sorted(step for tag in tags if (step := step_number(tag)) is not None)


async def steps(store: str | os.PathLike[str] | Store) -> list[int]:
    """Return the numbers of the saved steps, in increasing order; raise `NotAStore` if there is no store.

    `Checkpointer.steps` returns a `Step` for each, with its version, time and metrics.
    """
    async with opened(store, "r") as source:
        return steps_of(await source.tags())


class Step(NamedTuple):
    """A saved step: its `version`, the `time` of its commit by the writer's clock, and its `metrics`."""

    step: int
    """The number of the step."""
    version: int
    time: datetime.datetime
    metrics: dict[str, float]

    def __repr__(self) -> str:
        return f"Step({self.step}, version={self.version}, time={self.time}, metrics={reprlib.repr(self.metrics)})"


async def saved_steps(store: Store) -> list[Step]:
    """Return the saved steps, in increasing order."""
    tags = await store.tags()
    numbers = steps_of(tags)
    versions = [tags[step_tag(step)] for step in numbers]
    saved: list[Step] = []
    async for version, record in store.log.reader.each_record(versions):  # keeps their order
        step = numbers[len(saved)]
        # a record of several transactions has a part for each
        part = next((part for part in record.parts or () if step_tag(step) in part.tags), record)
        metrics = {**part.metadata, **record.metadata}.get("metrics")
        saved.append(Step(step, version, date_of(part.time), dict(metrics or {})))
    return saved


def check_one_version(step: int | None, at: int | str | None) -> None:
    """Raise `InvalidArgument` if both a step and a version or tag are passed."""
    if step is not None and at is not None:
        raise InvalidArgument("step=… and at=… both name a version; pass one of them")


async def chosen_snapshot(store: Store, step: int | None, at: int | str | None) -> Snapshot:
    """Return the snapshot of a step, version or tag, or `restore`'s default; raise `NotFound` if there is none."""
    if at is not None:
        return await store.snapshot(at)
    step = None if step is None else checked_step(step)
    head = await store.snapshot()
    saved = steps_of(head.tags)
    if step is None:
        if head.version == 0:
            raise NotFound(f"{store.url} has no commit yet; save one first")
        if not saved and not head.paths() and not head.attributes():
            raise NotFound(
                f"{store.url}: version {head.version}, the newest that is not a copy, is empty; pass at=… to read "
                "another version or a copy (tstore log lists them)"
            )
        if not saved:
            return head
        step = saved[-1]
    if step not in saved:
        raise NotFound(f"{store.url} has no step {step}; {name_list('steps', saved)}")
    return await snapshot_of(store.log.reader, head.tags[step_tag(step)], head.version)


async def source_snapshot(store: Store, at: int | str | None) -> Snapshot:
    """Return the snapshot to quantize: by default the newest step, else the lowest version with the head's arrays.

    In place of a version that changed nothing, such as a garbage collection, return the head before it.
    """
    log, chosen = store.log.reader, await chosen_snapshot(store, None, at)
    source = await state_of(log, chosen.version)
    if at is None and not steps_of(chosen.tags):
        alive, last_gc = await living_versions(log, chosen.version)
        for version in range(source, 0, -1):
            record = await log.record(version)
            if (version > last_gc or version in alive) and not (record.source or changes_nothing(record)):
                source = version  # the commits after it only set tags
            if record.of_head.changes_nodes:
                break
    return chosen if source == chosen.version else await snapshot_of(log, source, chosen.version)


async def copy_snapshot(store: Store, at: int | str | None) -> Snapshot:
    """Return the snapshot of a version or tag, by default of the newest copy, or of the head if there is none."""
    if at is None:
        ledger, _ = await ledger_at(store.log.reader, await store.log.reader.newest())
        at = max((version for version, entry in ledger.alive.items() if entry.source), default=None)
    return await store.snapshot(at)
