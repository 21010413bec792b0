"""The chunks that differ between two versions of an array, found range by range.

1. Cut the chunk numbers at the ends of the segments of both versions, so that few segments are in memory at once.
2. Skip a range in which both versions refer to the same segments and rows, without reading these.
3. Compare the checksums of the chunks in the other ranges. Where the bytes are stored makes no difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tstore.format.objects.chunk_refs import ChunkTable
from tstore.format.objects.layers import between, last_number, references, segment_ends
from tstore.format.objects.segments import Segment
from tstore.format.tree.node import Node, check_in_grid

__all__ = ["differing_numbers"]

_Counts = tuple[int, ...]


def differing_numbers(before: Node, after: Node) -> npt.NDArray[np.uint64]:
    """Return the numbers of the chunks that only one version has, or whose bytes differ, in ascending order.

    The arrays have the same encoding. The numbers are those of the smallest grid that contains both grids.
    """
    both = before.meta.counts, after.meta.counts
    grid = tuple(max(n, m) for n, m in zip(*both, strict=True))
    versions = [_Version(before, grid), _Version(after, grid)]
    last = max(version.last for version in versions)
    if last < 0:  # there are no chunks, perhaps because the grid is empty
        return np.empty(0, np.uint64)
    ends = sorted({end for version in versions for end in version.ends()})
    parts = [np.empty(0, np.uint64)]
    for start, stop in itertools.pairwise([0, *(end + 1 for end in ends[:-1]), last + 1]):
        found = (references(node.tables, start, stop - 1) for node in (before, after))
        if both[0] == both[1] and _same(*found):
            continue
        old, new = (version.chunks(start, stop) for version in versions)
        parts.append(old.differing_numbers(new))
    return np.concatenate(parts)


class _Version:
    """The chunks of one version of an array, by their numbers in a grid that contains its own."""

    def __init__(self, node: Node, grid: _Counts) -> None:
        last = last_number(node.tables)
        check_in_grid(node.path, node.meta, last)
        self._tables, self._own, self._grid = node.tables, node.meta.counts, grid
        self.last = int(self._renumbered(np.array([last]))[0]) if last >= 0 else -1

    def ends(self) -> list[int]:
        """Return the last chunk number of each segment."""
        return list(map(int, self._renumbered(np.array(segment_ends(self._tables), np.int64))))

    def chunks(self, start: int, stop: int) -> ChunkTable:
        """Return the references to the chunks from `start` up to `stop`, sorted by number; reads segments."""
        first, last = _cells_before(start, self._own, self._grid), _cells_before(stop, self._own, self._grid) - 1
        chunks = ChunkTable.overlay([between(table, first, last) for table in self._tables])
        return chunks if self._own == self._grid else chunks.with_numbers(self._renumbered(chunks.number))

    def _renumbered(self, numbers: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        if self._own == self._grid:
            return numbers.astype(np.int64)
        return np.ravel_multi_index(np.unravel_index(numbers.astype(np.int64), self._own), self._grid)


def _same(a: Iterator[Segment | ChunkTable], b: Iterator[Segment | ChunkTable]) -> bool:
    """Return whether two versions have the same segments and rows, one over the other in the same order."""
    return all(
        mine.equals(other) if isinstance(mine, ChunkTable) and isinstance(other, ChunkTable) else mine == other
        for mine, other in itertools.zip_longest(a, b)
    )


def _cells_before(number: int, counts: Sequence[int], grid: Sequence[int]) -> int:
    """Return how many cells of the grid `counts`, at the origin of a larger one, come before a number in that."""
    before, inner, outer = 0, int(np.prod(counts, dtype=object)), int(np.prod(grid, dtype=object))
    for count, larger in zip(counts, grid, strict=True):
        inner, outer = (inner // count if count else 0), outer // larger
        at, number = divmod(number, outer)
        before += min(at, count) * inner
        if at >= count:
            break
    return before
