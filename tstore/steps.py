"""The steps of a store: the commits that are tagged `step/<number>`, each a checkpoint.

`save` sets these tags, as does an import, which saves; a copy takes them over. Nothing else of tstore does, and
`quantize` refuses them: a lossy copy is no step, and is restored, or quantized again, only where it is named. Who
sets such a tag in a transaction of their own declares that commit a checkpoint.

In a store without steps the newest version stands for the newest step, commits of `quantize` left out: these name
the version that they were made from in their metadata (`QUANTIZED`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from tstore.errors import InvalidArgument, NotFound, inventory
from tstore.format.retention import step_of
from tstore.log.expiry import changes_nothing, living
from tstore.snapshot import Snapshot, snapshot_of
from tstore.store import Store, opened

__all__ = ["QUANTIZED", "chosen_snapshot", "source_snapshot", "step_tag", "steps", "steps_of"]

QUANTIZED = "quantized"
"""The fact of a quantized commit: the version that it was made from."""


def step_tag(step: int) -> str:
    """The tag of the checkpoint of a step."""
    return f"step/{step}"


def steps_of(tags: Iterable[str]) -> list[int]:
    """The steps that the tags name, in increasing order."""
    return sorted(step for tag in tags if (step := step_of([tag])) is not None)


async def steps(where: str | os.PathLike[str] | Store) -> list[int]:
    """The steps that are saved, in increasing order."""
    async with opened(where, "r") as store:
        return steps_of(await store.tags())


async def chosen_snapshot(store: Store, step: int | None, at: int | str | None) -> Snapshot:
    """The snapshot of a step, of a version or tag, or else of the newest step (or version, without steps)."""
    if at is not None:
        return await store.snapshot(at)
    newest = await store.snapshot()
    if step is not None:
        found = steps_of(newest.tags)
        if step not in found:
            raise NotFound(f"{store.url} has no step {step}; {inventory('steps', found)}")
        return await snapshot_of(store.log, newest.tags[step_tag(step)], newest.version)
    return await _newest_checkpoint(store, newest) or newest


async def source_snapshot(store: Store, at: int | str | None) -> Snapshot:
    """The snapshot to quantize: of a version or tag, or else of the newest step (or version, without steps).

    Raises `InvalidArgument` where there is none that is not quantized already.
    """
    if at is not None:
        return await store.snapshot(at)
    found = await _newest_checkpoint(store, await store.snapshot())
    if found is None:
        raise InvalidArgument(
            f"{store.url} holds quantized commits only; to quantize one of them again, name it: at=…"
        )
    return found


async def _newest_checkpoint(store: Store, newest: Snapshot) -> Snapshot | None:
    """The newest step; without steps, the newest version that lives and that `quantize` did not make, if any."""
    if newest.version == 0:
        raise NotFound(f"{store.url} holds no commit yet; save one first")
    found = steps_of(newest.tags)
    if found:
        return await snapshot_of(store.log, newest.tags[step_tag(found[-1])], newest.version)
    alive, gc = await living(store.log, newest.version)
    for version in range(newest.version, 0, -1):
        record = await store.log.record(version)
        if changes_nothing(record):
            continue
        if QUANTIZED not in record.metadata and (version > gc or version in alive):
            return await snapshot_of(store.log, version, newest.version)
    return None
