"""Merging references to chunks of a long array in a transaction that writes to it (see `format.merges`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tstore.core.data.writer import PackSet
from tstore.core.format.objects import merges
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.layers import Table
from tstore.core.format.objects.merges import Merge, MergePlan
from tstore.core.format.objects.segments import Segment, SegmentedTable, SegmentSource
from tstore.core.runtime import world
from tstore.core.runtime.pool import run

__all__ = ["merge_references"]


_COMMITS = 8
"""One commit in this many, drawn at random, merges rows at the bound, the others at twice the bound.

Otherwise all commits under way would merge the same rows, and only the first merge would be kept."""


async def merge_references(
    tables: Sequence[Table], added: int, packs: PackSet, source: SegmentSource
) -> Merge | None:
    """Write a merge of the tables of an array if one pays, for a transaction that adds some chunks to it.

    Raise `Corrupt` or `NotFound` if a segment can't be read.
    """
    plan = MergePlan.make(tables, added, merges.MAX_ROWS)
    if plan is not None and world.uniform(0, _COMMITS) >= 1:
        plan = MergePlan.make(tables, added, 2 * merges.MAX_ROWS)
    if plan is None:
        return None
    parts = plan.parts(await _stored(await run(plan.rows), packs))
    segments: list[Segment] = []
    while (part := await run(next, parts, None)) is not None:
        segments += await packs.write_segments(part)
    return Merge(SegmentedTable(segments, source), plan.replaced, plan.numbers) if segments else None


async def _stored(table: ChunkTable, packs: PackSet) -> ChunkTable:
    """Return references to the same chunks, with those that are inline copied into a pack."""
    chunks = [r.pack[r.offset : r.offset + r.length] for r in table.rows if isinstance(r.pack, bytes)]
    if not chunks:
        return table
    key, offset = await packs.write_bytes(chunks)
    rows = []
    for row in table.rows:
        if isinstance(row.pack, bytes):
            row = msgspec.structs.replace(row, pack=key, offset=offset)
            offset += row.length
        rows.append(row)
    return ChunkTable.from_rows(rows)
