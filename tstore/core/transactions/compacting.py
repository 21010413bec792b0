"""Compaction of the references to a long array's chunks, in a transaction that writes to it (`compactions`)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tstore.core.data.writer import PackSet
from tstore.core.format.objects import compactions
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.compactions import Compaction, CompactionPlan
from tstore.core.format.objects.segments import Segment, SegmentSource, SortedRun
from tstore.core.format.objects.tables import Table
from tstore.core.runtime import world
from tstore.core.runtime.pool import run

__all__ = ["compact_references"]


_COMMITS = 8
"""One commit in this many, drawn at random, compacts rows at the bound, the others at twice the bound.

Otherwise all commits under way would compact the same rows, and only the first compaction would be kept."""


async def compact_references(
    tables: Sequence[Table], added: int, packs: PackSet, source: SegmentSource
) -> Compaction | None:
    """Write a compaction of the tables of an array if one pays, for a transaction that adds some chunks to it.

    Raise `Corrupt` or `NotFound` if a segment can't be read.
    """
    plan = CompactionPlan.make(tables, added, compactions.MAX_ROWS)
    if plan is not None and world.uniform(0, _COMMITS) >= 1:
        plan = CompactionPlan.make(tables, added, 2 * compactions.MAX_ROWS)
    if plan is None:
        return None
    parts = plan.parts(await _stored(await run(plan.rows), packs))
    segments: list[Segment] = []
    while (part := await run(next, parts, None)) is not None:
        segments += await packs.write_segments(part)
    return Compaction(SortedRun(segments, source), plan.replaced, plan.numbers) if segments else None


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
