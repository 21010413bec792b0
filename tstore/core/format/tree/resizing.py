"""The chunks of an array with another shape: they keep their place in the grid; pure, no I/O.

If only the first axis changes, chunks keep their numbers, so tables with segments stay as they are. Otherwise the
references are restated; so they are if the segments are in many layers, all of which a lookup would have to ask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import renumbered
from tstore.core.format.objects import merges
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.layers import Table, between, layers, numbers_of, overlay, segments_of
from tstore.core.format.objects.segments import SegmentedTable

__all__ = ["chunks_at_edge", "resized", "shrinking_axes"]


def resized(tables: Sequence[Table], before: ArrayMeta, after: ArrayMeta) -> tuple[Table, ...]:
    """Return tables of the chunks that are in another grid too, with their numbers there.

    This reads all segments if the references are restated, otherwise those with chunks on both sides of the end.
    """
    if before.counts == after.counts:
        return tuple(tables)
    segmented = [table for table in tables if isinstance(table, SegmentedTable)]
    is_layered = bool(segmented) and len(layers(segments_of(segmented), segmented[0].source)) > merges.MAX_LAYERS
    if before.counts[1:] != after.counts[1:] or is_layered:
        chunks = overlay(tables)
        positions, numbers = renumbered(chunks.number, before.counts, after.counts)
        return (chunks.take(positions).with_numbers(numbers),)
    parts = (part for table in tables for part in _up_to(table, after.chunk_count - 1))
    return tuple(part for part in parts if len(part))


def _up_to(table: Table, last: int) -> Iterator[Table]:
    """Yield tables of the chunks of a table up to a number."""
    if isinstance(table, ChunkTable):
        yield between(table, 0, last)
        return
    whole = [segment for segment in table.segments if segment.last <= last]
    if whole:
        yield SegmentedTable(whole, table.source)
    cut = [segment for segment in table.segments if segment.first <= last < segment.last]
    if cut:
        yield between(SegmentedTable(cut, table.source), 0, last)


def shrinking_axes(before: ArrayMeta, after: ArrayMeta) -> list[int]:
    """Return the axes along which the array ends closer, and within a chunk."""
    sides = enumerate(zip(before.shape, after.shape, after.chunks, strict=True))
    return [axis for axis, (former, length, chunk) in sides if length < former and length % chunk]


def chunks_at_edge(tables: Sequence[Table], meta: ArrayMeta, axis: int) -> npt.NDArray[np.int64]:
    """Return the numbers of the last chunks along an axis; along the first, this reads only the segments there."""
    if axis == 0:
        row = math.prod(meta.counts[1:])
        last = meta.chunk_count - 1
        return numbers_of([between(table, last + 1 - row, last) for table in tables]).astype(np.int64)
    numbers = numbers_of(tables).astype(np.int64)
    is_last = np.unravel_index(numbers, meta.counts)[axis] == meta.counts[axis] - 1
    return numbers[np.flatnonzero(is_last)]
