"""Whether newer commits conflict with a transaction, and which of its changes must be applied again over them."""

from __future__ import annotations

from tstore.errors import Conflict
from tstore.format.tree import Changes
from tstore.log.group_commit import Newer
from tstore.log.reader import LogReader
from tstore.runtime.pool import run
from tstore.transactions.staged_tree import StagedTree, TagEdits

__all__ = ["check_reads", "chunks_to_patch"]


async def check_reads(log: LogReader, staged: StagedTree, tags: TagEdits, newer: Newer) -> None:
    """Raise `Conflict` if newer commits changed what a serializable transaction has read."""
    base = staged.base
    for version, _ in newer:
        tree = await log.tree(version)
        changed = [*await run(staged.reads.changed, base, tree), *tags.changed(base.tags, tree.tags)]
        if changed:
            raise Conflict(
                f"{staged.origin}: version {version}, committed since then, changed what this serializable "
                "transaction has read, so it is not committed; read again and repeat it",
                changed,
            )


async def chunks_to_patch(
    log: LogReader, staged: StagedTree, changes: Changes, newer: Newer
) -> dict[str, set[int]]:
    """Return the chunks, by path, that newer commits wrote and this transaction wrote in part.

    Raise `Conflict` if the changes of this transaction overlap with a newer commit in any other way.
    """
    chunks: dict[str, set[int]] = {}
    for version, other in newer:
        overlap = changes.overlap(await log.trees.changes(version, other))
        patched, lost = await run(staged.split_overlap, overlap.chunks) if overlap.chunks else ({}, [])
        conflicts = [*overlap.conflicts, *lost]
        if conflicts:
            raise Conflict(
                f"{staged.origin}: version {version}, committed since then, and this transaction changed the same "
                "chunks or metadata, so the transaction is not committed; read again and repeat it",
                conflicts,
            )
        for path, numbers in patched.items():
            chunks.setdefault(path, set()).update(numbers)
    return chunks
