"""The steps of a store: the commits with a tag `step/<number>`, each a checkpoint.

`save` and `tstore import` set these tags, a copy of the store preserves them, and any transaction may set one. But
`quantize` refuses to set one, because a lossy copy is not a step.

By default, `restore` and `quantize` read the newest step. Without steps, they read the newest version that
`quantize` did not commit. If `quantize` committed all versions, `restore` reads the newest version, and `quantize`
needs an explicit version or tag.
"""

from __future__ import annotations

import datetime
import os
import reprlib
from collections.abc import Iterable
from typing import NamedTuple

from tstore.errors import InvalidArgument, NotFound, name_list
from tstore.format.arguments import checked_step
from tstore.format.objects.records import date_of
from tstore.format.tree.retention import step_of
from tstore.log.expiry import changes_nothing, living_versions
from tstore.snapshot import Snapshot, snapshot_of
from tstore.store import Store, opened

__all__ = [
    "QUANTIZED",
    "Step",
    "check_one_version",
    "chosen_snapshot",
    "saved_steps",
    "source_snapshot",
    "step_tag",
    "steps",
    "steps_of",
]

QUANTIZED = "quantized"
"""The metadata key under which a quantized commit names its source version."""


def step_tag(step: int) -> str:
    """Return the tag of the checkpoint of a step."""
    return f"step/{step}"


def steps_of(tags: Iterable[str]) -> list[int]:
    """Return the steps among the tags, in increasing order."""
    return sorted(step for tag in tags if (step := step_of([tag])) is not None)


async def steps(store: str | os.PathLike[str] | Store) -> list[int]:
    """Return the saved steps, in increasing order; raise `NotAStore` if there is no store."""
    async with opened(store, "r") as source:
        return steps_of(await source.tags())


class Step(NamedTuple):
    """A saved step: its version, the time of its commit by the writer's clock, and its metrics."""

    step: int
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
    newest = await store.snapshot()
    if step is None:
        return await _newest_checkpoint(store, newest) or newest
    saved = steps_of(newest.tags)
    if step not in saved:
        raise NotFound(f"{store.url} has no step {step}; {name_list('steps', saved)}")
    return await snapshot_of(store.log.reader, newest.tags[step_tag(step)], newest.version)


async def source_snapshot(store: Store, at: int | str | None) -> Snapshot:
    """Return the snapshot to quantize: by default the newest step, else the newest version that is not quantized.

    Raise `InvalidArgument` if `at` is None and every version is quantized.
    """
    if at is not None:
        return await store.snapshot(at)
    newest = await _newest_checkpoint(store, await store.snapshot())
    if newest is None:
        raise InvalidArgument(
            f"{store.url} has only quantized commits; to quantize one again, pass its version or tag as at=…"
        )
    return newest


async def _newest_checkpoint(store: Store, newest: Snapshot) -> Snapshot | None:
    """Return the newest step, else the newest living version that is not quantized, else None."""
    if newest.version == 0:
        raise NotFound(f"{store.url} has no commit yet; save one first")
    saved = steps_of(newest.tags)
    if saved:
        return await snapshot_of(store.log.reader, newest.tags[step_tag(saved[-1])], newest.version)
    alive, last_gc = await living_versions(store.log.reader, newest.version)
    candidate = 0  # the lowest living version found so far with the same arrays as `version`, 0 if there is none
    for version in range(newest.version, 0, -1):
        record = await store.log.reader.record(version)
        if not changes_nothing(record) and (version > last_gc or version in alive):
            candidate = version
        if record.changes_nodes:
            if candidate and QUANTIZED not in record.metadata:
                return await snapshot_of(store.log.reader, candidate, newest.version)
            candidate = 0
    return None
