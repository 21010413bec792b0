"""The steps of a store: the commits that are tagged `step/<number>`, each a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tstore.commits.retention import step_of
from tstore.errors import NotFound
from tstore.snapshot import Snapshot, snapshot_of
from tstore.store import Store, opened

__all__ = ["chosen_snapshot", "step_tag", "steps", "steps_of"]


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
    found = steps_of(newest.tags)
    if step is not None:
        if step not in found:
            raise NotFound(f"{store.url} has no step {step}; its steps are: {found[-10:] or 'none'}")
        return await snapshot_of(store.log, newest.tags[step_tag(step)], newest.version)
    if found:
        return await snapshot_of(store.log, newest.tags[step_tag(found[-1])], newest.version)
    if newest.version == 0:
        raise NotFound(f"{store.url} holds no commit yet; save one first")
    return newest
