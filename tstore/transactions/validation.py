"""Validation: whether a transaction can still be committed after the commits that came since its base."""

from __future__ import annotations

from tstore.errors import Conflict
from tstore.format.tree import Changes
from tstore.log.group_commit import Newer
from tstore.log.log import Log
from tstore.transactions.staged_tree import StagedTree
from tstore.transactions.tags import TagEdits

__all__ = ["check_reads", "chunks_to_patch"]


async def check_reads(log: Log, staged: StagedTree, tags: TagEdits, newer: Newer) -> None:
    """Raise `Conflict` where newer commits changed what a serializable transaction has read."""
    base = staged.base
    for version, _ in newer:
        now = await log.tree(version)
        changed = [*staged.reads.changed(base, now), *tags.changed(base.tags, now.tags)]
        if changed:
            raise Conflict(
                f"{staged.where}: version {version}, committed since then, changed what this serializable "
                "transaction has read; nothing of it was committed. Read again and repeat it",
                changed,
            )


async def chunks_to_patch(log: Log, staged: StagedTree, mine: Changes, newer: Newer) -> dict[str, set[int]]:
    """Return the chunks, by path, that newer commits wrote and this transaction wrote in part.

    Raise `Conflict` where any other of its changes meets a newer commit.
    """
    chunks: dict[str, set[int]] = {}
    for version, other in newer:
        overlap = mine.overlap(await log.changes(version, other))
        again, lost = staged.patched_again(overlap.chunks)
        fatal = [*overlap.fatal, *lost]
        if fatal:
            raise Conflict(
                f"{staged.where}: version {version}, committed since then, changed the same as this "
                "transaction; nothing of it was committed. Read again and repeat it",
                fatal,
            )
        for path, numbers in again.items():
            chunks.setdefault(path, set()).update(numbers)
    return chunks
