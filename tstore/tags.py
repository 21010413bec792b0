"""Tags for versions that exist already: set, move and drop them, and remove steps.

A commit tags itself. So a tag for an earlier version is the tag of a new commit with the tree of that version. It
refers to the same chunks and stores none; garbage collection keeps them even if the earlier version expires. Only
`save` makes steps, so none of these functions sets the tag of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from tstore.errors import InvalidArgument, NotFound
from tstore.format.arguments import checked_name, checked_tag
from tstore.format.references import ObjectRef
from tstore.format.tree import RESERVED_ATTRIBUTE
from tstore.log.expiry import changes_nothing
from tstore.log.reader import LogReader
from tstore.snapshot import Snapshot
from tstore.steps import QUANTIZED, chosen_snapshot, step_tag, steps_of
from tstore.store import Store
from tstore.transactions.transaction import Transaction, staging_of

__all__ = [
    "Tagged",
    "drop_tag",
    "last_removal",
    "later_steps",
    "move_tag",
    "remove_step",
    "remove_steps_after",
    "set_tag",
]


class Tagged(NamedTuple):
    """The version that a tag names, and the earlier version whose data it has, None for the newest."""

    version: int
    source: int | None


async def set_tag(store: Store, tag: str, at: int | str | None = None) -> Tagged:
    """Tag the data of a version, by default of the newest step, or without steps the newest version.

    Raise `AlreadyExists` if the tag is in use, `InvalidArgument` if it names a step, or if a commit with the data
    of an earlier version would undo changes of transactions; `NotFound`, `SnapshotExpired`.
    """
    message, source = await _planned(store, tag, at)
    tx = store.transaction(message, tag, metadata=await _metadata(store, source))
    return await _committed_copy(tx, source)


async def move_tag(store: Store, tag: str, at: int | str | None = None) -> Tagged:
    """Do what `set_tag` does, but move a tag that is in use."""
    message, source = await _planned(store, tag, at)
    tx = store.transaction(message, move_tag=tag, metadata=await _metadata(store, source))
    return await _committed_copy(tx, source)


async def drop_tag(store: Store, tag: str) -> int:
    """Remove a tag and return the version of the commit that does; raise `NotFound` if there is no such tag.

    Raise `InvalidArgument` for the tag of a step, which `remove_step` removes.
    """
    if steps := steps_of([checked_name("tag", tag)]):
        raise InvalidArgument(
            f"the tag {tag!r} names a step; remove step {steps[0]} with tstore rm --step {steps[0]}"
        )
    return await _committed(store.transaction(f"drop the tag {tag}", drop_tag=tag))


async def remove_step(store: Store, step: int) -> int:
    """Drop the tag of a step and return the version of the commit that does; raise `NotFound`.

    The version of the step stays readable by its number until garbage collection removes it.
    """
    await chosen_snapshot(store, step, None)  # raises `NotFound`, which lists the steps
    return await _committed(store.transaction(f"remove step {step}", drop_tag=step_tag(step)))


async def remove_steps_after(store: Store, step: int) -> int | None:
    """Drop the tags of all steps after a step and return the version of the commit that does; raise `NotFound`.

    Return None if there are no later steps. Their versions stay readable, as after `remove_step`.
    """
    await chosen_snapshot(store, step, None)  # raises `NotFound`, which lists the steps
    if not (later := later_steps(await store.tags(), step)):
        return None
    return await _committed(
        store.transaction(f"remove the steps after {step}", drop_tag=[step_tag(number) for number in later])
    )


def later_steps(tags: Iterable[str], step: int) -> list[int]:
    """Return the steps among the tags that come after a step, in increasing order."""
    return [number for number in steps_of(tags) if number > step]


async def last_removal(store: Store, version: int) -> int | None:
    """Return the newest commit after a version that removed steps, None if there is none."""
    for number in range(await store.log.reader.newest(), version, -1):
        if steps_of((await store.log.reader.record(number)).dropped):
            return number
    return None


async def _planned(store: Store, tag: str, at: int | str | None) -> tuple[str, Snapshot | None]:
    """Return the message of the tag's commit, and the version to copy, None for the newest as of the commit."""
    if steps := steps_of([checked_tag("tag", tag)]):
        raise InvalidArgument(
            f"the tag {tag!r} names a step, and only save makes steps; pass another tag, such as 'best/{steps[0]}'"
        )
    newest = await store.snapshot()
    if newest.version == 0:
        raise NotFound(f"{store.url} has no commit yet; save one first")
    if at is None:
        if not (saved := steps_of(newest.tags)):
            return f"tag {tag}", None
        at = step_tag(saved[-1])
    source = await store.snapshot(at)
    if not await _is_replaced(store.log.reader, newest.version):
        if source.version == newest.version:
            return f"tag {tag}", None
        raise InvalidArgument(
            f"{newest.location}: transactions changed arrays since the last save, and the commit of a tag for "
            f"version {source.version} would undo that; tag versions as they are committed: "
            "store.transaction(tag=…)"
        )
    return f"tag {tag}: the data of version {source.version}", source


async def _is_replaced(log: LogReader, version: int) -> bool:
    """Return whether all nodes of a version are of one commit that replaced the tree, as a save does."""
    while version:
        record = await log.record(version)
        if record.replaces:
            return True
        if record.deleted or any(isinstance(m, ObjectRef) or list(m.nodes()) for m in record.manifests):
            return False
        version -= 1
    return False


async def _metadata(store: Store, source: Snapshot | None) -> dict[str, Any]:
    """Return the metadata of a commit with this data: the source version, if it is a quantized copy."""
    version = 0 if source is None else source.version
    while version:
        record = await store.log.reader.record(version)
        if not changes_nothing(record):
            return {key: value for key, value in record.metadata.items() if key == QUANTIZED}
        version -= 1
    return {}


async def _committed_copy(tx: Transaction, source: Snapshot | None) -> Tagged:
    """Commit the transaction, with the tree of the source if there is one."""
    if source is None:
        return Tagged(await _committed(tx), None)
    async with tx:
        staging = staging_of(tx)
        await staging.replace_all(b"")
        for path, node in source.tree.nodes.items():
            if node.is_array:
                await staging.keep_array(path, node.meta, node.chunks, source.version)
            elif path:
                await tx.create_group(path, node.attributes)
        attributes = {key: value for key, value in source.attributes().items() if key != RESERVED_ATTRIBUTE}
        await staging.set_root_attributes(attributes, source.reserved_attributes())
    assert tx.version is not None
    return Tagged(tx.version, source.version)


async def _committed(tx: Transaction) -> int:
    async with tx:
        pass
    assert tx.version is not None
    return tx.version
