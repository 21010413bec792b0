"""References to chunks: the pack, offset, length and checksums of each, as rows of a columnar table; pure, no I/O.

A chunk has one xxh3-128 checksum for each `BLOCK` of its encoded bytes, so that a part of a long chunk can be read
and verified without the rest. A `ChunkRow` is the reference to one chunk, which the writer makes and the reader
looks up. A `ChunkTable` has the references to many chunks, as in a manifest: a range of rows of NumPy columns,
which the tables of all arrays of a manifest share.

A checkpoint has many of these objects, and they are part of no cycle. So Python's cycle collector does not track
them (`gc=False`): each of its full runs also visits all other objects of a training job.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.checksums import BLOCK, CHECK_SIZE
from tstore.core.format.objects.chunk_rows import SHORT_COLUMN, ChunkRow, Columns, RowColumns, largest, ranges
from tstore.errors import Corrupt

__all__ = ["ChunkSource", "ChunkTable"]

_CACHED_ROWS = 1 << 16  # columns of at most this many rows may keep all of them as Python objects


class ChunkSource(Protocol):
    """The lookup of references to one array's chunks."""

    @property
    def reads_segments(self) -> bool:
        """Whether lookups may read segments from storage, and so block."""

    def row(self, number: int) -> ChunkRow | None:
        """Return the reference to a chunk, or None if it was never written."""

    def select(self, numbers: npt.NDArray[np.integer[Any]] | range) -> ChunkTable:
        """Return the references to these chunks, in their order, without those that were never written.

        If `numbers` is a range, its step is one.
        """


class ChunkTable(msgspec.Struct, eq=False, gc=False):
    """References to chunks: rows `start` to `stop` of columns, which many tables can share.

    The chunks of one array are sorted by number. A part of a table copies nothing.
    """

    columns: Columns
    start: int
    stop: int

    @staticmethod
    def from_columns(
        packs: tuple[str | bytes, ...],
        number: npt.NDArray[np.uint64],
        pack: npt.NDArray[np.uint32],
        offset: npt.NDArray[np.uint64],
        length: npt.NDArray[np.uint64],
        checks: npt.NDArray[np.uint8],
    ) -> ChunkTable:
        """Return the table of these columns; `checks` has 16 columns and a row for each block."""
        return ChunkTable(Columns(packs, number, pack, offset, length, checks), 0, len(number))

    @staticmethod
    def from_rows(rows: Sequence[ChunkRow]) -> ChunkTable:
        """Return the table of these rows, in their order."""
        columns = RowColumns(rows)
        if len(rows) <= SHORT_COLUMN:
            return ChunkTable(columns, 0, len(rows))
        parts = (columns.number, columns.pack, columns.offset, columns.length, columns.checks)
        return ChunkTable.from_columns(columns.packs, *parts)

    @staticmethod
    def concat(tables: Sequence[ChunkTable]) -> ChunkTable:
        """Concatenate the rows of all tables; each pack is listed once."""
        if len(tables) == 1:
            return tables[0]
        if _have_few_objects(tables):
            return ChunkTable.from_rows(list(itertools.chain.from_iterable([table.rows for table in tables])))
        names: dict[str | bytes, int] = {}
        packs = [
            np.array([names.setdefault(p, len(names)) for p in t.packs], "<u4")[t.pack] for t in tables if len(t)
        ]
        return ChunkTable.from_columns(
            tuple(names),
            _joined([t.number for t in tables], "<u8"),
            _joined(packs, "<u4"),
            _joined([t.offset for t in tables], "<u8"),
            _joined([t.length for t in tables], "<u8"),
            _joined([t.checks for t in tables], np.uint8).reshape(-1, CHECK_SIZE),
        )

    @staticmethod
    def overlay(tables: Sequence[ChunkTable]) -> ChunkTable:
        """Return each chunk's row from the last table that has one, sorted by number."""
        if _have_few_objects(tables):
            latest = {row.number: row for table in tables for row in table.rows}
            return ChunkTable.from_rows([latest[number] for number in sorted(latest)])
        return ChunkTable.concat(tables).latest()

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def reads_segments(self) -> bool:
        """False: all rows are in memory."""
        return False

    @property
    def packs(self) -> tuple[str | bytes, ...]:
        """The packs by position; the rows of a part of a table may refer to only a few of them."""
        return self.columns.packs

    @property
    def number(self) -> npt.NDArray[np.uint64]:
        """The number of each chunk in its grid."""
        return self.columns.number[self.start : self.stop]

    @property
    def pack(self) -> npt.NDArray[np.uint32]:
        """The position of each chunk's pack in `packs`."""
        return self.columns.pack[self.start : self.stop]

    @property
    def offset(self) -> npt.NDArray[np.uint64]:
        """The offset of each chunk in its pack, in bytes."""
        return self.columns.offset[self.start : self.stop]

    @property
    def length(self) -> npt.NDArray[np.uint64]:
        """The encoded length of each chunk, in bytes."""
        return self.columns.length[self.start : self.stop]

    @property
    def stored_bytes(self) -> int:
        """The encoded bytes of all chunks."""
        count = self.stop - self.start
        if count > 1:
            return int(self.length.sum())
        return (
            int(self.columns.length[self.start]) if count else 0
        )  # a shortcut for most arrays; a sum takes ten times as long

    @property
    def checks(self) -> npt.NDArray[np.uint8]:
        """The checksums of all blocks, of shape (blocks, 16)."""
        if self._is_whole():
            return self.columns.checks
        blocks = self.columns.blocks
        return self.columns.checks[blocks[self.start] : blocks[self.stop]]

    @property
    def blocks(self) -> npt.NDArray[np.int64]:
        """The position in `checks` of each chunk's first checksum, and the end of the last chunk's checksums."""
        blocks = self.columns.blocks
        return blocks if self._is_whole() else blocks[self.start : self.stop + 1] - blocks[self.start]

    @property
    def rows(self) -> list[ChunkRow]:
        """All rows as Python objects, which are cached."""
        return self.columns.rows[self.start : self.stop]

    def run_starts(self) -> list[int]:
        """Return the positions of the chunks that start a run: those that do not follow the chunk before them."""
        follows = self.columns.follows[self.start + 1 : self.stop]
        return [0] if follows.all() else [0, *(np.flatnonzero(~follows) + 1).tolist()]

    def is_run(self, length: int) -> bool:
        """Return whether the chunks, at least one, have this length and are contiguous in a pack."""
        columns = self.columns
        return bool(columns.follows[self.start + 1 : self.stop].all()) and columns.length[self.start] == length

    def _is_whole(self) -> bool:
        return self.stop - self.start == len(self.columns)

    def part(self, start: int, stop: int) -> ChunkTable:
        """Return the rows from `start` up to `stop`, without copying them."""
        return ChunkTable(self.columns, self.start + start, self.start + stop)

    def take(self, positions: npt.NDArray[np.integer[Any]]) -> ChunkTable:
        """Return a copy of the rows at these positions, in their order."""
        columns, at = self.columns, positions + self.start
        begin = columns.blocks[at]
        return ChunkTable.from_columns(
            columns.packs,
            columns.number[at],
            columns.pack[at],
            columns.offset[at],
            columns.length[at],
            columns.checks[ranges(begin, columns.blocks[at + 1] - begin)],
        )

    def row(self, number: int) -> ChunkRow | None:
        """Return the row of a chunk, or None if there is none. The table must be sorted by number."""
        columns = self.columns
        # many small arrays share columns; making all rows pays off once some have been looked up
        if self.stop - self.start == 1 and len(columns) <= _CACHED_ROWS and columns.count_lookup():
            row = columns.rows[self.start]
            return row if row.number == number else None
        return self.find(number)

    def find(self, number: int) -> ChunkRow | None:
        """Return the row of a chunk as `row` does, without caching any rows."""
        columns, at = self.columns, self.start + number
        if at >= self.stop or columns.number[at] != number:  # the row is elsewhere if some chunks have no row
            at = self.start + int(np.searchsorted(self.number, np.uint64(number)))
        if at == self.stop or int(columns.number[at]) != number:
            return None
        first, last = columns.blocks[at : at + 2].tolist()
        return ChunkRow(
            number,
            columns.packs[int(columns.pack[at])],
            int(columns.offset[at]),
            int(columns.length[at]),
            columns.checks[first:last].tobytes(),
        )

    def locate(self, numbers: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
        """Return the position of each chunk, or -1 if it has no row. The table must be sorted by number."""
        if not len(self):
            return np.full(len(numbers), -1, np.int64)
        numbers, present = numbers.astype(np.uint64), self.number
        at = np.minimum(np.searchsorted(present, numbers), len(self) - 1).astype(np.int64)
        return np.where(present[at] == numbers, at, -1)

    def select(self, numbers: npt.NDArray[np.integer[Any]] | range) -> ChunkTable:
        """Return the rows of these chunks, in their order; chunks without a row are omitted.

        If `numbers` is a range, its step is one.
        """
        if isinstance(numbers, range):
            if self._is_dense(numbers):
                return self.part(numbers.start, numbers.stop)
            numbers = np.arange(numbers.start, numbers.stop)
        at = self.locate(numbers)
        at = at[at >= 0]
        # consecutive rows need no copy
        if len(at) and at[-1] - at[0] == len(at) - 1 and bool((at[1:] > at[:-1]).all()):
            return self.part(int(at[0]), int(at[-1]) + 1)
        return self.take(at)

    def _is_dense(self, numbers: range) -> bool:
        """Return whether each of these chunks is at the position of its number, so that no search is needed."""
        first, last = self.start + numbers.start, self.start + numbers.stop - 1
        column = self.columns.number
        return first <= last < self.stop and column[first] == numbers.start and column[last] == numbers.stop - 1

    def latest(self) -> ChunkTable:
        """Return the last row of each chunk, sorted by number."""
        if isinstance(self.columns, RowColumns):
            newest = {row.number: row for row in self.rows}
            return ChunkTable.from_rows([newest[number] for number in sorted(newest)])
        number = self.number
        if len(number) < 2 or bool(np.all(number[1:] > number[:-1])):
            return self
        _, first = np.unique(number[::-1], return_index=True)  # in reverse order the last comes first
        return self.take(len(self) - 1 - first)

    def with_numbers(self, numbers: npt.NDArray[np.integer[Any]]) -> ChunkTable:
        """Return the same rows with other chunk numbers."""
        number = numbers.astype("<u8")
        return ChunkTable.from_columns(self.packs, number, self.pack, self.offset, self.length, self.checks)

    def equals(self, other: ChunkTable) -> bool:
        """Return whether both tables have the same rows in the same order; the order of `packs` may differ."""
        mine, theirs = (
            self.with_used_packs(),
            other.with_used_packs(),
        )  # both then list their packs in the order of the rows
        columns = ("number", "pack", "offset", "length", "checks")
        return mine.packs == theirs.packs and all(
            np.array_equal(getattr(mine, column), getattr(theirs, column)) for column in columns
        )

    def differing_numbers(self, other: ChunkTable) -> npt.NDArray[np.uint64]:
        """Return the numbers of the chunks that only one table has, or whose bytes differ, sorted.

        Both tables must be sorted by number. Where the bytes are stored makes no difference.
        """
        common, mine, theirs = np.intersect1d(self.number, other.number, assume_unique=True, return_indices=True)
        same_length = self.length[mine] == other.length[theirs]
        a, b = self.take(mine[same_length]), other.take(theirs[same_length])
        unequal = (a.checks != b.checks).any(axis=1)
        owner = np.repeat(np.arange(len(a)), np.diff(a.blocks))
        return np.union1d(
            np.setxor1d(self.number, other.number, assume_unique=True),
            np.concatenate([common[~same_length], a.number[owner[unequal]]]),
        )

    def with_used_packs(self) -> ChunkTable:
        """Return the same rows with only the packs that they refer to, in the order of first reference."""
        if isinstance(self.columns, RowColumns) and self._is_whole():
            return self  # these packs are in that order
        count = len(self.packs)
        if count <= 1 and len(self):
            return self
        first = np.full(count, len(self))
        np.minimum.at(first, self.pack, np.arange(len(self)))
        order = np.argsort(first, kind="stable")[: int((first < len(self)).sum())]
        if np.array_equal(order, np.arange(count)):
            return self
        new_positions = np.zeros(count, "<u4")  # by former position
        new_positions[order] = np.arange(len(order))
        packs = tuple(self.packs[p] for p in order.tolist())
        pack = new_positions[self.pack]
        return ChunkTable.from_columns(packs, self.number, pack, self.offset, self.length, self.checks)

    def validate(self) -> None:
        """Raise `Corrupt` if the columns contradict each other or have impossible values."""
        n, columns = len(self), self.columns
        if not len(columns.pack) == len(columns.offset) == len(columns.length) == n:
            raise Corrupt("the columns of a manifest differ in length")
        if n and largest(columns.pack) >= len(columns.packs):
            raise Corrupt("a manifest refers to a pack that it does not name")
        longest = largest(columns.length)
        if longest >= 1 << 62 or largest(columns.offset) >= 1 << 62:
            raise Corrupt("a manifest has an impossible offset or length")
        if len(columns.checks) != (n if longest <= BLOCK else int(columns.blocks[-1])):
            raise Corrupt("a manifest has too many or too few checksums")


def _have_few_objects(tables: Sequence[ChunkTable]) -> bool:
    """Return whether all rows are objects, and so few that making columns would take longer."""
    few = sum([table.stop - table.start for table in tables]) <= SHORT_COLUMN
    return few and all(isinstance(table.columns, RowColumns) for table in tables)


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
