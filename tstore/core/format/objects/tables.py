"""Tables of references to the chunks of one array, one over the other: a newer row replaces an older one; no I/O.

Tables in memory are combined by their number of rows. Runs of segments stay as they are, except that segments in
the range of a newer run that has every chunk of it are dropped.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ranges
from tstore.core.format.objects.segments import Segment, SegmentSource, SortedRun

__all__ = [
    "Table",
    "between",
    "count_of",
    "last_number",
    "numbers_of",
    "overlay",
    "overlay_each",
    "references",
    "rows_of",
    "segment_ends",
    "segment_ranges",
    "segments_first",
    "segments_of",
    "sorted_runs",
    "stack",
    "totals",
]

_TIER_TABLES = 16  # tables of about the same size that are combined into one

Table = ChunkTable | SortedRun


def sorted_runs(segments: Iterable[Segment], source: SegmentSource) -> list[SortedRun]:
    """Return tables of these segments, in their order: each begins where the ranges of numbers overlap."""
    runs: list[list[Segment]] = []
    for segment in segments:
        if runs and runs[-1][-1].last < segment.first:
            runs[-1].append(segment)
        else:
            runs.append([segment])
    return [SortedRun(run, source) for run in runs]


def rows_of(table: Table) -> ChunkTable:
    """Return all rows of a table; reads all segments."""
    return table if isinstance(table, ChunkTable) else table.load()


def overlay(tables: Sequence[Table]) -> ChunkTable:
    """Return each chunk's row from the last table that has one, sorted by number; reads all segments."""
    return ChunkTable.overlay(list(map(rows_of, tables)))


def between(table: Table, first: int, last: int) -> ChunkTable:
    """Return the rows of the chunks from `first` to `last`; reads the segments whose range has one of them."""
    if last < first:
        return ChunkTable.concat([])
    if isinstance(table, SortedRun):
        table = ChunkTable.concat(table.source.load(table.within(first, last)))
    number = table.number
    start, stop = np.searchsorted(number, np.uint64(first)), np.searchsorted(number, np.uint64(last), "right")
    return table.part(int(start), int(stop))


def references(tables: Iterable[Table], first: int, last: int) -> Iterator[Segment | ChunkTable]:
    """Yield the segments and the rows of the chunks from `first` to `last`; reads no segments."""
    for table in tables:
        if isinstance(table, SortedRun):
            yield from table.within(first, last)
        elif len(rows := between(table, first, last)):
            yield rows


def totals(tables: Sequence[Table]) -> tuple[int, int]:
    """Return the number and the encoded bytes of all chunks; reads only segments in the range of other tables."""
    count = stored = 0
    for first, last in segment_ranges(tables):
        found = list(references(tables, first, last))
        if len(found) == 1 and isinstance(alone := found[0], Segment) and alone.first >= first:
            count, stored = count + alone.rows, stored + alone.stored_bytes
        elif found:
            part = ChunkTable.overlay([between(table, first, last) for table in tables])
            count, stored = count + len(part), stored + int(part.length.sum())
    return count, stored


def segment_ranges(tables: Sequence[Table]) -> Iterator[tuple[int, int]]:
    """Yield ranges of chunk numbers, in each of which a table has at most one segment; together they have all."""
    ends = [*segment_ends(tables)[:-1], last_number(tables)]
    for before, last in itertools.pairwise([-1, *ends]):
        yield before + 1, last


def segment_ends(tables: Iterable[Table]) -> list[int]:
    """Return the last chunk number of each segment, ascending.

    No table has more than one segment with numbers between two of these.
    """
    return [last for last, _ in itertools.groupby(sorted(segment.last for segment in segments_of(tables)))]


def segments_of(tables: Iterable[Table]) -> list[Segment]:
    """Return the segments of all tables, in their order."""
    return [segment for table in tables if isinstance(table, SortedRun) for segment in table.segments]


def last_number(tables: Iterable[Table]) -> int:
    """Return the highest chunk number, or -1; reads no segments."""
    lasts = [
        table.segments[-1].last if isinstance(table, SortedRun) else int(table.number[-1])
        for table in tables
        if len(table)
    ]
    return max(lasts, default=-1)


def numbers_of(tables: Sequence[Table]) -> npt.NDArray[np.uint64]:
    """Return the numbers of all chunks, sorted; reads the segments that lack a number, one after the other."""
    parts = [part for table in tables for part in _numbers(table)]
    if len(parts) == 1 and isinstance(tables[0], ChunkTable):
        return parts[0]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))


def _numbers(table: Table) -> Iterator[npt.NDArray[np.uint64]]:
    if isinstance(table, ChunkTable):
        yield table.number
        return
    for segment in table.segments:
        if segment.rows == segment.last - segment.first + 1:
            yield np.arange(segment.first, segment.last + 1, dtype=np.uint64)
        else:
            yield table.source.load((segment,))[0].number


def count_of(tables: Sequence[Table]) -> int:
    """Return the number of chunks; reads segments only if the ranges of numbers overlap."""
    spans = []
    for table in tables:
        if isinstance(table, SortedRun):
            spans += [(segment.first, segment.last) for segment in table.segments]
        elif len(table):
            spans.append((int(table.number[0]), int(table.number[-1])))
    spans.sort()
    if all(last < first for (_, last), (first, _) in itertools.pairwise(spans)):
        return sum(map(len, tables))
    return len(numbers_of(tables))


def stack(tables: Sequence[Table], newer: Sequence[Table]) -> tuple[Table, ...]:
    """Return the tables with newer ones over them; reads no segments, which may be gone if a version expired.

    The tier of a table without segments is its length as a power of sixteen. Sixteen or more such tables at the
    end are combined if none has a higher tier than the last. So each row is copied only a few times, however many
    commits follow, and about fifteen tables remain for each tier.
    """
    dense = [table for table in newer if isinstance(table, SortedRun) and table.is_dense]
    result = _outside(tables, dense) if dense else list(tables)
    if len(newer) >= _TIER_TABLES and all(isinstance(table, ChunkTable) for table in newer):
        newer = [overlay(newer).with_used_packs()]
    for newest in newer:
        result.append(newest)
        if isinstance(newest, ChunkTable):
            _combine_last(result, newest)
    return tuple(result)


def _combine_last(tables: list[Table], newest: ChunkTable) -> None:
    """Combine the last tables as `stack` describes; `newest` is the last one."""
    while len(tables) >= _TIER_TABLES:
        tier, first = _tier(newest), len(tables) - 1
        earliest = tables[-_TIER_TABLES]
        if not isinstance(earliest, ChunkTable) or _tier(earliest) > tier:
            return
        while first and isinstance(before := tables[first - 1], ChunkTable) and _tier(before) <= tier:
            first -= 1
        if len(tables) - first < _TIER_TABLES:
            return
        newest = overlay(tables[first:]).with_used_packs()
        tables[first:] = [newest]


def _tier(table: ChunkTable) -> int:
    """Return the exponent of the lowest power of sixteen that exceeds the number of rows."""
    return -(-len(table).bit_length() // 4)


def segments_first(tables: Sequence[Table]) -> tuple[Table, ...]:
    """Return the tables, those with segments first; reads these for the rows that they replace in earlier ones."""
    segmented = [table for table in tables if isinstance(table, SortedRun)]
    rest: list[ChunkTable] = []
    for at, table in enumerate(tables):
        if isinstance(table, ChunkTable):
            newer = (later for later in tables[at + 1 :] if isinstance(later, SortedRun))
            rest.append(functools.reduce(_absent_in, newer, table))
    return (*segmented, *(table for table in rest if len(table)))


def _outside(tables: Sequence[Table], dense: Sequence[SortedRun]) -> list[Table]:
    """Return tables without the segments and rows in the range of one of the `dense` tables."""
    ranges = sorted((table.segments[0].first, table.segments[-1].last) for table in dense)
    firsts = np.array([first for first, _ in ranges], np.uint64)
    lasts = np.maximum.accumulate(np.array([last for _, last in ranges], np.uint64))

    def kept(first: npt.NDArray[np.uint64], last: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        at = np.searchsorted(firsts, first, "right") - 1
        return np.flatnonzero((at < 0) | (lasts[at] < last))

    result: list[Table] = []
    for table in tables:
        if isinstance(table, ChunkTable):
            result.append(table.take(kept(table.number, table.number)))
        else:
            segments = [table.segments[at] for at in kept(table.firsts, table.lasts).tolist()]
            result.append(SortedRun(segments, table.source))
    return list(filter(len, result))


def _absent_in(table: ChunkTable, newer: SortedRun) -> ChunkTable:
    """Return the rows of a table whose chunks a newer one lacks."""
    number = table.number
    present = np.isin(number, newer.select(number).number)
    return table.take(np.flatnonzero(~present))


def overlay_each(nodes: Sequence[Sequence[ChunkTable]]) -> tuple[ChunkTable, npt.NDArray[np.int64]]:
    """Overlay the tables of each node; return all rows in one table, node by node, and the row count of each.

    The result depends on the rows alone, not on how they are divided into tables. Columns that many tables share
    are copied once.
    """
    first_rows: dict[int, int] = {}  # positions in `joined`, by the id of the columns
    shared: list[ChunkTable] = []
    size = 0
    for table in itertools.chain.from_iterable(nodes):
        columns = table.columns
        if id(columns) not in first_rows:
            first_rows[id(columns)] = size
            shared.append(ChunkTable(columns, 0, len(columns.number)))
            size += len(columns.number)
    joined = ChunkTable.concat(shared)
    owners = np.array([i for i, tables in enumerate(nodes) for _ in tables], np.int64)
    starts = np.array([first_rows[id(t.columns)] + t.start for tables in nodes for t in tables], np.int64)
    sizes = np.array([t.stop - t.start for tables in nodes for t in tables], np.int64)
    at, owner = ranges(starts, sizes), np.repeat(owners, sizes)
    order = np.lexsort((joined.number[at], owner))  # stable: of equal numbers the newest is the last
    at, owner = at[order], owner[order]
    number = joined.number[at]
    newest = np.ones(len(at), np.bool_)
    newest[:-1] = (owner[1:] != owner[:-1]) | (number[1:] != number[:-1])
    counts = np.bincount(owner[newest], minlength=len(nodes)).astype(np.int64)
    return joined.take(at[newest]).with_used_packs(), counts
