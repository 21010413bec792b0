"""The chunks that differ between two versions of an array, found range by range.

1. Cut the chunk numbers at the ends of the segments of both versions, so that few segments are in memory at once.
2. Skip a range in which both versions refer to the same segments and rows, without reading these.
3. Compare the checksums of the chunks in the other ranges. Where the bytes are stored makes no difference.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.segments import Segment
from tstore.core.format.objects.tables import between, last_number, references, segment_ends
from tstore.core.format.tree.node import Node, check_in_grid

__all__ = ["differing_numbers"]

_Counts = tuple[int, ...]


def differing_numbers(before: Node, after: Node) -> npt.NDArray[np.uint64]:
    """Return the numbers of the chunks that only one version has, or whose bytes differ, in ascending order.

    The arrays have the same encoding. The numbers are those of the earlier grid; `_Version` numbers the chunks
    outside of it.
    """
    grids = before.meta.counts, after.meta.counts
    versions = [_Version(before, grids[0]), _Version(after, grids[0])]
    stops = [stop for stop, _ in itertools.groupby(sorted([*versions[0].stops(), *versions[1].stops()]))]
    if not stops:  # there are no chunks, perhaps because both grids are empty
        return np.empty(0, np.uint64)
    parts = [np.empty(0, np.uint64)]
    for start, stop in itertools.pairwise([0, *stops[:-1], None]):
        assert start is not None
        last = stops[-1] - 1 if stop is None else stop - 1
        found = (references(node.tables, start, last) for node in (before, after))
        if grids[0] == grids[1] and _same(*found):
            continue
        old, new = (version.chunks(start, stop) for version in versions)
        parts.append(old.differing_numbers(new))
    numbers = np.concatenate(parts)
    return numbers if grids[0] == grids[1] else np.sort(numbers)


class _Version:
    """The chunks of one version of an array, by their numbers in a grid, that of the earlier version.

    A chunk outside of the grid has its number in its own grid, plus the number of cells of the other. A grid that
    contains both could have more cells than there are numbers.
    """

    def __init__(self, node: Node, grid: _Counts) -> None:
        self._last = last_number(node.tables)
        check_in_grid(node.path, node.meta, self._last)
        self._tables, self._own, self._grid = node.tables, node.meta.counts, grid

    def stops(self) -> list[int]:
        """Return how many cells of the grid come before the end of each segment, and before that of all chunks."""
        if self._last < 0:
            return []
        ends = [*segment_ends(self._tables), self._last]
        return [_cells_before(end + 1, self._grid, self._own) for end in ends]

    def chunks(self, start: int, stop: int | None) -> ChunkTable:
        """Return the references to the chunks between two cells of the grid, sorted by number; reads segments.

        `stop=None` stands for the end of all chunks. Chunks outside of the grid are between the cells that come
        before and after them in the order of rows.
        """
        first = _cells_before(start, self._own, self._grid)
        last = self._last if stop is None else _cells_before(stop, self._own, self._grid) - 1
        chunks = ChunkTable.overlay([between(table, first, last) for table in self._tables])
        if self._own == self._grid:
            return chunks
        numbers = self._renumbered(chunks.number)
        order = np.argsort(numbers, kind="stable")
        return chunks.take(order).with_numbers(numbers[order])

    def _renumbered(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        own = numbers.astype(np.int64)
        if not len(own):
            return own
        at = np.array(np.unravel_index(own, self._own)).reshape(len(self._own), -1)
        inside = (at < np.array(self._grid, np.int64)[:, None]).all(axis=0)
        renumbered = own + math.prod(self._grid)
        if inside.any():
            renumbered[inside] = np.ravel_multi_index(tuple(at[:, inside]), self._grid)
        return renumbered


def _same(a: Iterator[Segment | ChunkTable], b: Iterator[Segment | ChunkTable]) -> bool:
    """Return whether two versions have the same segments and rows, one over the other in the same order."""
    return all(
        mine.equals(other) if isinstance(mine, ChunkTable) and isinstance(other, ChunkTable) else mine == other
        for mine, other in itertools.zip_longest(a, b)
    )


def _cells_before(number: int, counts: Sequence[int], grid: Sequence[int]) -> int:
    """Return how many cells of the grid `counts` come before a number in another grid at the same origin."""
    if counts == grid or not number:
        return number
    before, inner, outer = 0, math.prod(counts), math.prod(grid)
    for count, other in zip(counts, grid, strict=True):
        inner, outer = (inner // count if count else 0), outer // other
        at, number = divmod(number, outer)
        before += min(at, count) * inner
        if at >= count:
            break
    return before
