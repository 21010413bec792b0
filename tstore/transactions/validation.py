"""Whether a transaction can still be committed on top of the commits since its base."""

from __future__ import annotations

from tstore.errors import Conflict
from tstore.format.tree import Changes
from tstore.log.group_commit import Newer
from tstore.log.reader import LogReader
from tstore.transactions.staged_tree import StagedTree
from tstore.transactions.tags import TagEdits

__all__ = ["check_reads", "chunks_to_patch"]


async def check_reads(log: LogReader, staged: StagedTree, tags: TagEdits, newer: Newer) -> None:
    """Raise `Conflict` if newer commits changed what a serializable transaction has read."""
    base = staged.base
    for version, _ in newer:
        tree = await log.tree(version)
        changed = [*staged.reads.changed(base, tree), *tags.changed(base.tags, tree.tags)]
        if changed:
            raise Conflict(
                f"{staged.origin}: version {version}, committed since then, changed what this serializable "
                "transaction has read, so it is not committed; read again and repeat it",
                changed,
            )


async def chunks_to_patch(log: LogReader, staged: StagedTree, own: Changes, newer: Newer) -> dict[str, set[int]]:
    """Return the chunks, by path, that newer commits wrote and this transaction wrote in part.

    Raises `Conflict` if any other of its changes overlaps with a newer commit.
    """
    chunks: dict[str, set[int]] = {}
    for version, other in newer:
        overlap = own.overlap(await log.trees.changes(version, other))
        patched, lost = staged.patched_again(overlap.chunks)
        conflicts = [*overlap.fatal, *lost]
        if conflicts:
            raise Conflict(
                f"{staged.origin}: version {version}, committed since then, changed the same as this transaction, "
                "so it is not committed; read again and repeat it",
                conflicts,
            )
        for path, numbers in patched.items():
            chunks.setdefault(path, set()).update(numbers)
    return chunks
