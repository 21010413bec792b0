"""Tags for versions that already exist: set, move and drop them, and remove steps.

A commit that sets a tag changes no array; it only records the version that the tag names. None of these functions
sets the tag of a step: the commit that saves a step sets it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tstore.core.format.arguments import checked_name, checked_tag
from tstore.core.format.plain_text import pluralize
from tstore.core.steps import chosen_snapshot, step_tag, step_tags, steps_of
from tstore.core.store import Store
from tstore.core.transactions.transaction import Transaction
from tstore.errors import Conflict, InvalidArgument

__all__ = [
    "Tagged",
    "drop_steps_after",
    "drop_tag",
    "last_removal",
    "later_steps",
    "move_tag",
    "remove_step",
    "remove_steps",
    "remove_steps_after",
    "set_tag",
]


class Tagged(NamedTuple):
    """The version that a tag now names, and the version of the commit that set the tag."""

    target: int
    version: int


async def set_tag(store: Store, tag: str, at: int | str | None = None) -> Tagged:
    """Tag a version, by default the newest step, or without steps the head.

    If the version changed nothing, for example because it is a garbage collection, the head before it is
    tagged. Raise `AlreadyExists` if the tag is in use, `InvalidArgument` if it names a step, and `NotFound` or
    `SnapshotExpired` if the version can't be read.
    """
    version = await _version_to_tag(store, tag, at)
    return await _commit_tag(store.transaction(f"tag {tag}", tag), version)


async def move_tag(store: Store, tag: str, at: int | str | None = None) -> Tagged:
    """Set a tag as `set_tag` does, but move it if it is in use."""
    version = await _version_to_tag(store, tag, at)
    return await _commit_tag(store.transaction(f"tag {tag}", move_tag=tag), version)


async def drop_tag(store: Store, tag: str) -> int:
    """Remove a tag and return the version of this commit; raise `NotFound` if there is no such tag.

    Raise `InvalidArgument` for the tag of a step, which `remove_step` removes.
    """
    if steps := steps_of([checked_name("tag", tag)]):
        raise InvalidArgument(
            f"the tag {tag!r} names a step; remove step {steps[0]} with tstore rm --step {steps[0]}"
        )
    return await _commit(store.transaction(f"drop the tag {tag}", drop_tag=tag))


async def remove_step(store: Store, step: int) -> int:
    """Drop the tags of a step and return the version of this commit; raise `NotFound` if there is no such step.

    These are the step's tag and the tags of its copies (`step_tags`). The version of the step stays readable by
    number until garbage collection removes it.
    """
    tag = step_tag(step)
    while True:
        await chosen_snapshot(store, step, None)  # raises `NotFound`, which lists the steps
        try:
            version = await _drop(store, f"remove step {step}", lambda tags: step_tags(tags, step))
            assert version is not None
            return version
        except Conflict as conflict:  # repeat it if another step was saved meanwhile
            if f"tag {tag}" in conflict.paths:
                raise


async def remove_steps(store: Store, steps: Sequence[int]) -> int | None:
    """Do what `remove_step` does for those of these steps that are saved, in one commit; return None without any.

    Every process of a job may make this call, which is not an error if another one has removed the steps.
    """
    while True:
        with contextlib.suppress(Conflict):  # a step was saved meanwhile
            return await _drop(
                store,
                f"remove {pluralize(len(steps), 'step')}, the last of them {max(steps)}",
                lambda tags: [tag for step in steps_of(tags) if step in steps for tag in step_tags(tags, step)],
            )


async def remove_steps_after(store: Store, step: int) -> int | None:
    """Drop the tags of all steps after a step; return the version of this commit, or None without later steps.

    The tags of their copies are dropped too.

    A step that is saved meanwhile is removed too. Raise `NotFound` if there is no such step. The versions of the
    later steps stay readable, as after `remove_step`.
    """
    while True:
        await chosen_snapshot(store, step, None)  # raises `NotFound`, which lists the steps
        with contextlib.suppress(Conflict):  # a step was saved meanwhile
            return await drop_steps_after(store, step)


async def drop_steps_after(store: Store, step: int) -> int | None:
    """Drop the tags as `remove_steps_after` does, also if there is no such step.

    Raise `Conflict` if a step is saved meanwhile.
    """
    return await _drop(
        store,
        f"remove the steps after {step}",
        lambda tags: [tag for later in later_steps(tags, step) for tag in step_tags(tags, later)],
    )


def later_steps(tags: Iterable[str], step: int) -> list[int]:
    """Return the steps among the tags that come after a step, in increasing order."""
    return [number for number in steps_of(tags) if number > step]


async def last_removal(store: Store, step: int, version: int) -> int | None:
    """Return the newest commit after `version` that removed steps after `step`, or None.

    Commits that removed only earlier steps do not count: one of them may come between the calls of two hosts.
    """
    for number in range(await store.log.reader.newest(), version, -1):
        if later_steps((await store.log.reader.record(number)).dropped, step):
            return number
    return None


async def _version_to_tag(store: Store, tag: str, at: int | str | None) -> int:
    """Return the version to tag; `tag` and `at` are those of `set_tag`."""
    if steps := steps_of([checked_tag("tag", tag)]):
        raise InvalidArgument(
            f"the tag {tag!r} names a step, and only save makes steps; pass another tag, such as 'best/{steps[0]}'"
        )
    snapshot = await store.snapshot(at)
    saved = steps_of(snapshot.tags) if at is None else []
    return snapshot.tags[step_tag(saved[-1])] if saved else snapshot.version


async def _commit_tag(tx: Transaction, version: int) -> Tagged:
    async with tx:
        target = await tx.staging.tag_version(version)
    assert tx.version is not None
    return Tagged(target, tx.version)


async def _drop(store: Store, message: str, choose: Callable[[Mapping[str, int]], Sequence[str]]) -> int | None:
    """Drop the tags that `choose` selects and return the version of this commit, None if it selects none.

    It selects them in the version on which the commit is based: what is newer conflicts.
    """
    while tags := choose(await store.tags()):
        tx = store.transaction(message, drop_tag=tags)
        if choose((await tx.staging.base()).tags) == tags:
            return await _commit(tx)
        await tx.abort()
    return None


async def _commit(tx: Transaction) -> int:
    async with tx:
        pass
    assert tx.version is not None
    return tx.version
