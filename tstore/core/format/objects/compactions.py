"""Compactions: a commit restates older references in new segments, so that lookups stay fast; no I/O.

1. Commits that write a few chunks of a long array leave rows, which every root repeats. Commits that write many,
   but not all chunks of a range leave sorted runs that overlap, all of which a lookup has to ask. So a transaction
   that writes to an array with more than `MAX_ROWS` rows or `MAX_RUNS` runs in its base adds a compaction:
   segments in its own packs with the references of the base. The bytes of inline chunks are copied into a pack.
2. A compaction takes all rows, and the newest runs down to the first that is more than `_GROWTH` times as long as
   those above it together (more runs if too many would remain). So a reference is restated once for each doubling
   of the array, and few runs remain. Of long runs it takes a range of chunk numbers in which most of them overlap:
   with `MIN_SEGMENTS` of each run, or with as many references as the commit itself writes, if these are more.
3. A compaction writes no chunks, so it conflicts with no other commit: `Changes` do not have it. It names what it
   replaces: segments by their checksums, and rows by their chunk numbers. A tree after the commit lacks those,
   and has the new run above all other segments and below the rows that are above these (`compacted`). Trees are
   built without reading any segment.
4. Commits after the base are newer than the compaction. While the transaction is validated against them, the
   numbers of rows that they wrote are removed from those that it replaces: these rows remain, above its run. If
   one of these commits wrote segments of the array, or a compaction, this compaction is dropped; so it is if a
   garbage collection condemned a pack to which nothing else in the commit refers, or if a repair voided versions,
   which it may restate. The commit itself never fails because of a compaction.
5. A compaction may be ignored if the array does not exist: it only restates. Servers and `verify` compare each one
   with the tree before it (`Compaction.differences`).
6. To garbage collections and copies, its references are like those to reused chunks: the record lists the packs of
   other transactions to which they refer.
7. A repair that voids a version does not undo what an earlier compaction has restated of it, as it does not undo
   what commits have reused. The packs of the voided version stay, because the record of the compaction lists them.
   `verify` does not compare such compactions; servers accept them from an administrator, who may copy the store.
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
from tstore.core.format.objects.segments import SEGMENT_ROWS, Segment, SortedRun, fitting
from tstore.core.format.objects.tables import Table, between, segments_first, segments_of, sorted_runs
from tstore.errors import Corrupt

__all__ = [
    "MAX_ROWS",
    "MAX_RUNS",
    "MIN_SEGMENTS",
    "Compaction",
    "CompactionEntry",
    "CompactionPlan",
    "compacted",
]

MAX_ROWS = 1024
"""The maximum rows of an array outside segments before a transaction compacts them."""

MAX_RUNS = 8
"""The maximum sorted runs of an array before a transaction compacts some."""

MIN_SEGMENTS = 8
"""The segments of each run that one transaction compacts, however few chunks it writes."""

_GROWTH = 2
_SLAB_SEGMENTS = 16  # segments that end in a range of chunk numbers; the range is in memory at once
_LAST = (1 << 62) - 1  # the highest chunk number

Numbers = npt.NDArray[np.uint64]


class CompactionEntry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A compaction in a manifest.

    The first `segments` segments of the node at position `node` are the compacted ones. They replace the segments
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
            raise Corrupt("a compaction in a manifest has more segments than its node, or a checksum is cut short")
        if any(before.last >= after.first for before, after in itertools.pairwise(own)):
            raise Corrupt("the segments of a compaction overlap")
        numbers = parse_column(self.numbers, "<u8")
        if not (numbers[1:] > numbers[:-1]).all():
            raise Corrupt("the chunk numbers of a compaction are out of order")


class Compaction(NamedTuple):
    """A new run of references to chunks of one array, and the segments (checksums) and rows that it replaces."""

    run: SortedRun
    replaced: frozenset[bytes]
    numbers: Numbers

    @staticmethod
    def from_entry(entry: CompactionEntry, run: SortedRun) -> Compaction:
        """Return the compaction of an entry in a manifest."""
        checks = entry.replaced
        replaced = frozenset(checks[at : at + CHECK_SIZE] for at in range(0, len(checks), CHECK_SIZE))
        return Compaction(run, replaced, parse_column(entry.numbers, "<u8"))

    def entry(self, node: int) -> CompactionEntry:
        """Return the entry of this compaction for the node at a position in a manifest."""
        return CompactionEntry(
            node, len(self.run.segments), b"".join(sorted(self.replaced)), self.numbers.tobytes()
        )

    def without(self, numbers: Numbers) -> Compaction:
        """Return a compaction that replaces no rows of these chunks."""
        return self._replace(numbers=np.setdiff1d(self.numbers, numbers, assume_unique=True))

    def differences(self, tables: Sequence[Table]) -> Iterator[bool]:
        """Yield, step by step, whether the compaction changes chunks of the tables before it; reads segments."""
        after, source = compacted(tables, self), self.run.source
        replaced = (segment for segment in segments_of(tables) if segment.check in self.replaced)
        touched = itertools.chain(
            (table.number for segment in (*self.run.segments, *replaced) for table in source.load((segment,))),
            (part for t in tables if isinstance(t, ChunkTable) for part in _parts(t.number)),
        )
        for numbers in touched:
            yield len(_newest(tables, numbers).differing_numbers(_newest(after, numbers))) > 0


def compacted(tables: Sequence[Table], compaction: Compaction) -> tuple[Table, ...]:
    """Return the tables of a node after a compaction; reads no segments."""
    result: list[Table] = []
    position = 0
    for table in tables:
        if isinstance(table, ChunkTable):
            result += _remaining(table, compaction.numbers)
            continue
        segments = [segment for segment in table.segments if segment.check not in compaction.replaced]
        if segments:
            result.append(table if len(segments) == len(table.segments) else SortedRun(segments, table.source))
        position = len(result)
    result.insert(position, compaction.run)
    return tuple(result)


def _parts(numbers: Numbers) -> Iterator[Numbers]:
    return (numbers[at : at + SEGMENT_ROWS] for at in range(0, len(numbers), SEGMENT_ROWS))


def _remaining(table: ChunkTable, numbers: Numbers) -> list[ChunkTable]:
    kept = np.flatnonzero(~np.isin(table.number, numbers, assume_unique=True))
    return [table] if len(kept) == len(table) else [table.take(kept)] if len(kept) else []


def _newest(tables: Sequence[Table], numbers: Numbers) -> ChunkTable:
    return ChunkTable.overlay([table.select(numbers) for table in tables])


class CompactionPlan(NamedTuple):
    """What a compaction of the `tables` of an array takes: rows, and the newest runs, from `first` to `last`.

    `numbers` are the chunks of the rows that the compaction replaces.
    """

    tables: Sequence[Table]
    numbers: Numbers
    runs: Sequence[SortedRun]
    first: int
    last: int

    @staticmethod
    def make(tables: Sequence[Table], added: int, max_rows: int) -> CompactionPlan | None:
        """Choose what a commit that adds some chunks should compact, None if nothing pays; reads no segments.

        It pays if there are more than `max_rows` rows, or too many runs. It does not if a row fits in no segment,
        as that of a chunk of 70 GB.
        """
        rows = [table for table in tables if isinstance(table, ChunkTable)]
        if len(tables) - len(rows) <= MAX_RUNS and sum([r.stop - r.start for r in rows]) <= max_rows:
            return None  # as usual for a short array
        segmented = [table for table in tables if isinstance(table, SortedRun)]
        segments = itertools.chain.from_iterable(table.segments for table in segmented)
        below = sorted_runs(segments, segmented[0].source) if segmented else []
        newest = ChunkTable.overlay(rows)
        if len(newest) <= max_rows and len(below) <= MAX_RUNS:
            return None
        if not _fitting(newest).all():
            return None  # such a row can't be compacted, and a compaction of the rows below could hide it
        total, chosen = len(newest), list[SortedRun]()
        while below and (len(below[-1]) <= _GROWTH * total or len(below) + 1 > MAX_RUNS):
            chosen.insert(0, below.pop())
            total += len(chosen[0])
        return CompactionPlan(
            tables, newest.number, chosen, *_range(chosen, max(MIN_SEGMENTS * SEGMENT_ROWS * len(chosen), added))
        )

    @property
    def replaced(self) -> frozenset[bytes]:
        """The checksums of the segments that the compaction replaces."""
        segments = itertools.chain.from_iterable(run.segments for run in self.runs)
        return frozenset(s.check for s in segments if self.first <= s.first and s.last <= self.last)

    def rows(self) -> ChunkTable:
        """Return the rows to compact, without those that newer segments replace; reads these."""
        return ChunkTable.overlay([t for t in segments_first(self.tables) if isinstance(t, ChunkTable)])

    def parts(self, rows: ChunkTable) -> Iterator[ChunkTable]:
        """Yield the references of runs and, over them, of these rows, in ascending order; reads the runs."""
        ends = sorted(s.last for run in self.runs for s in run.segments if self.first <= s.last <= self.last)
        start, pending = 0, rows.part(0, 0)
        for stop in [*ends[_SLAB_SEGMENTS - 1 :: _SLAB_SEGMENTS], _LAST]:
            slab = [between(run, max(start, self.first), min(stop, self.last)) for run in self.runs]
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


def _range(chosen: Sequence[SortedRun], work: int) -> tuple[int, int]:
    """Return the range of chunk numbers to compact: one with segments of `work` references, where most overlap."""
    if sum(map(len, chosen)) <= work:
        return 0, _LAST
    segments = [segment for table in chosen for segment in table.segments]
    firsts = np.array([segment.first for segment in segments], np.uint64)
    lasts = np.array([segment.last for segment in segments], np.uint64)
    depth = np.searchsorted(np.sort(firsts), firsts, "right") - np.searchsorted(np.sort(lasts), firsts)
    first = int(firsts[depth == depth.max()].min())
    replaced = 0  # each compaction must replace enough, however wide the segments are
    for segment in sorted(segments, key=lambda segment: segment.last):
        replaced += segment.rows if segment.first >= first else 0
        if replaced >= work:
            return first, segment.last
    return first, _LAST
