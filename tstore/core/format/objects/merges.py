"""Merges: a commit restates references of earlier commits in new segments, so that lookups stay fast; no I/O.

1. Commits that write a few chunks of a long array leave rows, which every root repeats. Commits that write many,
   but not all chunks of a range leave segments in layers, all of which a lookup has to ask. So a transaction
   that writes to an array with more than `MAX_ROWS` rows or `MAX_LAYERS` layers in its base adds a merge:
   segments in its own packs with the references of the base. The bytes of inline chunks are copied into a pack.
2. A merge takes all rows, and the newest layers down to the first that is more than `_GROWTH` times as long as
   those above it together (more layers if too many would remain). So a reference is merged once for each
   doubling of the array, and few layers remain. Of long layers it takes a range of chunk numbers in which most
   layers overlap: with `MIN_SEGMENTS` of each layer, or with as many references as the commit itself writes, if
   these are more.
3. A merge writes no chunks, so it conflicts with no other commit: `Changes` do not have it. It names what it
   replaces: segments by their checksums, and rows by their chunk numbers. A tree after the commit lacks those,
   and has the new segments above all other segments and below the rows that are above these (`merged`). Trees
   are built without reading any segment.
4. Commits after the base are newer than the merge. While the transaction is validated against them, the numbers
   of rows that they wrote are removed from those that the merge replaces: these rows remain, above the merge. If
   one of these commits wrote segments of the array, or a merge, this merge is dropped; so it is if a garbage
   collection condemned a pack to which only the merge refers, or if a repair voided versions, since the merge may
   restate these. The commit itself never fails because of a merge.
5. A merge may be ignored if the array does not exist: it only restates. Servers and `verify` compare every merge
   with the tree before it (`Merge.differences`).
6. To garbage collections and copies, merged segments are like reused chunks: the record lists the packs of other
   transactions to which they refer.
7. A repair that voids a version does not undo what an earlier merge has restated of it, as it does not undo what
   commits have reused. The packs of the voided version stay, because the record with the merge lists them.
   `verify` does not compare such merges, and servers accept them from an administrator, who may copy the store.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.checksums import CHECK_SIZE
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import parse_column
from tstore.core.format.objects.layers import Table, between, layers, segments_first, segments_of
from tstore.core.format.objects.segments import SEGMENT_ROWS, Segment, SegmentedTable, fitting
from tstore.errors import Corrupt

__all__ = ["MAX_LAYERS", "MAX_ROWS", "MIN_SEGMENTS", "Merge", "MergeEntry", "MergePlan", "merged"]

MAX_ROWS = 1024
"""The most rows of an array, beside its segments, before a transaction merges them."""

MAX_LAYERS = 8
"""The most layers of segments of an array before a transaction merges some."""

MIN_SEGMENTS = 8
"""The segments of each layer that one transaction merges, however few chunks it writes."""

_GROWTH = 2
_SLAB_SEGMENTS = 16  # that end in the range of chunk numbers whose references are in memory at once
_LAST = (1 << 62) - 1  # the highest chunk number

Numbers = npt.NDArray[np.uint64]


class MergeEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A merge in a manifest.

    The first `segments` segments of the node at position `node` are the merged ones. They replace the segments
    with the checksums `replaced`, and rows with the chunk numbers `numbers`.
    """

    node: int
    segments: int
    replaced: bytes  # 16 bytes each
    numbers: bytes  # u64, ascending

    def check(self, segments: Sequence[Segment]) -> None:
        """Raise `Corrupt` for invalid values; `segments` are those of the node."""
        own = segments[: self.segments]
        if not 0 < self.segments == len(own) or len(self.replaced) % CHECK_SIZE:
            raise Corrupt("a merge in a manifest has more segments than its node, or a checksum is cut short")
        if any(before.last >= after.first for before, after in itertools.pairwise(own)):
            raise Corrupt("the segments of a merge overlap")
        numbers = parse_column(self.numbers, "<u8")
        if not (numbers[1:] > numbers[:-1]).all():
            raise Corrupt("the chunk numbers of a merge are out of order")


class Merge(NamedTuple):
    """Merged references to chunks of one array, the checksums of the segments and the rows that they replace."""

    table: SegmentedTable
    replaced: frozenset[bytes]
    numbers: Numbers

    @staticmethod
    def from_entry(entry: MergeEntry, table: SegmentedTable) -> Merge:
        """Return the merge of an entry in a manifest."""
        checks = entry.replaced
        replaced = frozenset(checks[at : at + CHECK_SIZE] for at in range(0, len(checks), CHECK_SIZE))
        return Merge(table, replaced, parse_column(entry.numbers, "<u8"))

    def entry(self, node: int) -> MergeEntry:
        """Return the entry of this merge for the node at a position in a manifest."""
        return MergeEntry(node, len(self.table.segments), b"".join(sorted(self.replaced)), self.numbers.tobytes())

    def without(self, numbers: Numbers) -> Merge:
        """Return a merge that replaces no rows of these chunks."""
        return self._replace(numbers=np.setdiff1d(self.numbers, numbers, assume_unique=True))

    def differences(self, tables: Sequence[Table]) -> Iterator[bool]:
        """Yield, step by step, whether the merge changes chunks of these tables, before it; reads segments."""
        after, source = merged(tables, self), self.table.source
        replaced = (segment for segment in segments_of(tables) if segment.check in self.replaced)
        touched = itertools.chain(
            (table.number for segment in (*self.table.segments, *replaced) for table in source.load((segment,))),
            (part for t in tables if isinstance(t, ChunkTable) for part in _parts(t.number)),
        )
        for numbers in touched:
            yield len(_newest(tables, numbers).differing_numbers(_newest(after, numbers))) > 0


def merged(tables: Sequence[Table], merge: Merge) -> tuple[Table, ...]:
    """Return the tables of a node after a merge; reads no segments."""
    result: list[Table] = []
    position = 0
    for table in tables:
        if isinstance(table, ChunkTable):
            result += _remaining(table, merge.numbers)
            continue
        segments = [segment for segment in table.segments if segment.check not in merge.replaced]
        if segments:
            result.append(
                table if len(segments) == len(table.segments) else SegmentedTable(segments, table.source)
            )
        position = len(result)
    result.insert(position, merge.table)
    return tuple(result)


def _parts(numbers: Numbers) -> Iterator[Numbers]:
    return (numbers[at : at + SEGMENT_ROWS] for at in range(0, len(numbers), SEGMENT_ROWS))


def _remaining(table: ChunkTable, numbers: Numbers) -> list[ChunkTable]:
    kept = np.flatnonzero(~np.isin(table.number, numbers, assume_unique=True))
    return [table] if len(kept) == len(table) else [table.take(kept)] if len(kept) else []


def _newest(tables: Sequence[Table], numbers: Numbers) -> ChunkTable:
    return ChunkTable.overlay([table.select(numbers) for table in tables])


class MergePlan(NamedTuple):
    """What a merge of the `tables` of an array takes: rows, and the newest layers, from `first` to `last`.

    `numbers` are the chunks of the rows that the merge replaces.
    """

    tables: Sequence[Table]
    numbers: Numbers
    layers: Sequence[SegmentedTable]
    first: int
    last: int

    @staticmethod
    def make(tables: Sequence[Table], added: int, max_rows: int) -> MergePlan | None:
        """Return what to merge in a commit that adds some chunks, or None if no merge pays; reads no segments.

        A merge pays if there are more than `max_rows` rows, or too many layers. There is none if a row fits in no
        segment, as that of a chunk of 70 GB.
        """
        rows = [table for table in tables if isinstance(table, ChunkTable)]
        if len(tables) - len(rows) <= MAX_LAYERS and sum([r.stop - r.start for r in rows]) <= max_rows:
            return None  # as usual for a short array
        segmented = [table for table in tables if isinstance(table, SegmentedTable)]
        segments = itertools.chain.from_iterable(table.segments for table in segmented)
        below = layers(segments, segmented[0].source) if segmented else []
        newest = ChunkTable.overlay(rows)
        if len(newest) <= max_rows and len(below) <= MAX_LAYERS:
            return None
        if not _fitting(newest).all():
            return None  # such a row can't be merged, and a merge of what it replaces could lie over it
        total, chosen = len(newest), list[SegmentedTable]()
        while below and (len(below[-1]) <= _GROWTH * total or len(below) + 1 > MAX_LAYERS):
            chosen.insert(0, below.pop())
            total += len(chosen[0])
        return MergePlan(
            tables, newest.number, chosen, *_range(chosen, max(MIN_SEGMENTS * SEGMENT_ROWS * len(chosen), added))
        )

    @property
    def replaced(self) -> frozenset[bytes]:
        """The checksums of the segments that the merge replaces."""
        segments = itertools.chain.from_iterable(table.segments for table in self.layers)
        return frozenset(s.check for s in segments if self.first <= s.first and s.last <= self.last)

    def rows(self) -> ChunkTable:
        """Return the rows to merge, without those that newer segments replace; reads these."""
        return ChunkTable.overlay([t for t in segments_first(self.tables) if isinstance(t, ChunkTable)])

    def parts(self, rows: ChunkTable) -> Iterator[ChunkTable]:
        """Yield the references of layers and, over them, of these rows, in ascending order; reads the layers."""
        ends = sorted(s.last for t in self.layers for s in t.segments if self.first <= s.last <= self.last)
        start, pending = 0, rows.part(0, 0)
        for stop in [*ends[_SLAB_SEGMENTS - 1 :: _SLAB_SEGMENTS], _LAST]:
            slab = [between(t, max(start, self.first), min(stop, self.last)) for t in self.layers]
            pending = ChunkTable.concat([pending, ChunkTable.overlay([*slab, between(rows, start, stop)])])
            whole = len(pending) - len(pending) % SEGMENT_ROWS
            if whole:
                yield pending.part(0, whole)
                pending = pending.part(whole, len(pending))
            start = stop + 1
        if len(pending):
            yield pending


def _fitting(table: ChunkTable) -> npt.NDArray[np.bool_]:
    """Return which rows can be in a segment, once the inline chunks are in a pack."""
    return fitting(table) | np.array([isinstance(pack, bytes) for pack in table.packs], np.bool_)[table.pack]


def _range(chosen: Sequence[SegmentedTable], work: int) -> tuple[int, int]:
    """Return the range of chunk numbers to merge: one with segments of `work` references, where most overlap."""
    if sum(map(len, chosen)) <= work:
        return 0, _LAST
    segments = [segment for table in chosen for segment in table.segments]
    firsts = np.array([segment.first for segment in segments], np.uint64)
    lasts = np.array([segment.last for segment in segments], np.uint64)
    depth = np.searchsorted(np.sort(firsts), firsts, "right") - np.searchsorted(np.sort(lasts), firsts)
    first = int(firsts[depth == depth.max()].min())
    replaced = 0  # so that each merge replaces enough, however wide the segments are
    for segment in sorted(segments, key=lambda segment: segment.last):
        replaced += segment.rows if segment.first >= first else 0
        if replaced >= work:
            return first, segment.last
    return first, _LAST
