"""References to chunks: where each lies and what its bytes must be, as columns; pure, no I/O.

A chunk's checks are the xxh3-128 of each `BLOCK` of its encoded bytes, so that a part of a long chunk can be
read and still be checked.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from tstore.errors import Corrupt

__all__ = [
    "BLOCK",
    "CHECK_SIZE",
    "SHORT",
    "ChunkRow",
    "ChunkSource",
    "ChunkTable",
    "Run",
    "Span",
    "as_checks",
    "block_checks",
    "column",
    "digest",
    "gather",
    "largest",
    "layered",
    "total",
]

BLOCK = 1 << 20
"""Bytes of an encoded chunk under one checksum."""

CHECK_SIZE = 16

_MERGED = 16
SHORT = 64  # values, or rows: up to so many are looked at faster one by one in Python than by NumPy

digest = xxhash.xxh3_128_digest


class ChunkRow(NamedTuple):
    """Where one chunk lies: its number in the grid, its pack (a key, or the bytes themselves), its checks."""

    number: int
    pack: str | bytes
    offset: int
    length: int
    checks: bytes

    def mismatch(self, at: int, url: str) -> str:
        """What to tell of a chunk, in the store at `url`, whose bytes from `at` on do not have their checksum."""
        place = f"inline in its manifest in {url}" if isinstance(self.pack, bytes) else f"in {url}: {self.pack}"
        return (
            f"checksum mismatch in the {self.length} bytes at {self.offset} {place} (from byte {at} of the chunk "
            "on); the bytes have changed since they were committed: restore the file from a copy, or read "
            "another version"
        )


def block_checks(data: memoryview) -> bytes:
    """The concatenated xxh3-128 digests of each `BLOCK` of the bytes; one digest for no bytes."""
    if len(data) <= BLOCK:
        return digest(data)
    return b"".join([digest(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)])


class Run(NamedTuple):
    """Chunks of one array that lie one behind the other in a pack, each of the same length.

    `checks` are those of all of them, in order.
    """

    numbers: Sequence[int]
    pack: str | bytes
    offset: int
    length: int
    checks: bytes


class ChunkSource(Protocol):
    """Where the chunks of one array are looked up."""

    def row(self, number: int) -> ChunkRow | None:
        """Where one chunk lies, None where it was never written."""

    @property
    def chunks(self) -> ChunkTable:
        """All of them, sorted by number."""


class ChunkTable:
    """References to chunks, as columns: number in the grid, pack, offset, length, checks."""

    def __init__(
        self,
        packs: tuple[str | bytes, ...],
        index: npt.NDArray[np.uint64],
        pack: npt.NDArray[np.uint32],
        offset: npt.NDArray[np.uint64],
        length: npt.NDArray[np.uint64],
        checks: npt.NDArray[np.uint8],
    ) -> None:
        self.packs = packs
        self.index = index
        self.pack = pack
        self.offset = offset
        self.length = length
        self.checks = checks  # (blocks, 16)

    def __len__(self) -> int:
        return len(self.index)

    @staticmethod
    def empty() -> ChunkTable:
        """The table of no chunks."""
        return ChunkTable.of([])

    @staticmethod
    def of(runs: Sequence[Run]) -> ChunkTable:
        """The table of these runs, one after the other."""
        packs: dict[str | bytes, int] = {}
        numbers = [packs.setdefault(run.pack, len(packs)) for run in runs]
        counts = np.array([len(run.numbers) for run in runs], np.int64)
        lengths = np.repeat(np.array([run.length for run in runs], "<u8"), counts)
        ends = np.cumsum(counts)
        within = np.arange(len(lengths)) - np.repeat(ends - counts, counts)
        return ChunkTable(
            tuple(packs),
            np.array(list(itertools.chain.from_iterable(run.numbers for run in runs)), "<u8"),
            np.repeat(np.array(numbers, "<u4"), counts),
            np.repeat(np.array([run.offset for run in runs], "<u8"), counts) + within.astype("<u8") * lengths,
            lengths,
            as_checks(b"".join([run.checks for run in runs])),
        )

    @functools.cached_property
    def blocks(self) -> npt.NDArray[np.int64]:
        """Where the checks of each row begin, and after the last where they end."""
        per_row = np.maximum(1, -(-self.length.astype(np.int64) // BLOCK))
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(per_row)])

    @functools.cached_property
    def rows(self) -> list[tuple[int, int, int, int, bytes]]:
        """The rows as Python values: number, pack, offset, length, checks; for loops over chunks."""
        data, lengths = self.checks.tobytes(), self.length.tolist()
        if len(lengths) <= SHORT:
            ends = list(itertools.accumulate([_blocks_in(length) * CHECK_SIZE for length in lengths], initial=0))
        else:
            ends = (self.blocks * CHECK_SIZE).tolist()
        checks = [data[a:b] for a, b in itertools.pairwise(ends)]
        columns = self.index.tolist(), self.pack.tolist(), self.offset.tolist(), lengths, checks
        return list(zip(*columns, strict=True))

    def equals(self, other: ChunkTable) -> bool:
        """Whether both have the same rows in the same order; packs may be numbered in another one."""
        mine, theirs = self.compact(), other.compact()
        names = {pack: number for number, pack in enumerate(mine.packs)}
        numbers = np.array([names.get(pack, len(names)) for pack in theirs.packs], "<u4")
        return (
            np.array_equal(mine.index, theirs.index)
            and np.array_equal(mine.pack, numbers[theirs.pack])
            and np.array_equal(mine.offset, theirs.offset)
            and np.array_equal(mine.length, theirs.length)
            and np.array_equal(mine.checks, theirs.checks)
        )

    def validate(self) -> None:
        """Raises `Corrupt` where the columns do not fit each other."""
        n = len(self.index)
        if not len(self.pack) == len(self.offset) == len(self.length) == n:
            raise Corrupt("the columns of a manifest differ in length")
        if n and largest(self.pack) >= len(self.packs):
            raise Corrupt("a manifest refers to a pack that it does not name")
        longest = largest(self.length)
        if longest >= 1 << 62 or largest(self.offset) >= 1 << 62:
            raise Corrupt("a manifest holds an impossible offset or length")
        if len(self.checks) != (n if longest <= BLOCK else int(self.blocks[-1])):
            raise Corrupt("a manifest holds a wrong number of checksums")

    def take(self, at: slice | npt.NDArray[np.integer[Any]]) -> ChunkTable:
        """The rows at these positions, in their order."""
        if isinstance(at, slice):
            low, high, _ = at.indices(len(self))
            checks = self.checks[self.blocks[low] : self.blocks[high]]
        else:
            begin, size = self.blocks[:-1][at], np.diff(self.blocks)[at]
            ends = np.cumsum(size)
            total = int(ends[-1]) if len(ends) else 0
            checks = self.checks[np.arange(total) + np.repeat(begin - (ends - size), size)]
        return ChunkTable(self.packs, self.index[at], self.pack[at], self.offset[at], self.length[at], checks)

    @property
    def chunks(self) -> ChunkTable:
        """The table itself, as the source of its array's chunks; it must be sorted by number."""
        return self

    def row(self, number: int) -> ChunkRow | None:
        """The row of a chunk number, None where it has none. The table must be sorted by number."""
        at = int(np.searchsorted(self.index, np.uint64(number)))
        if at == len(self) or int(self.index[at]) != number:
            return None
        first, last = self.blocks[at : at + 2].tolist()
        return ChunkRow(
            number,
            self.packs[int(self.pack[at])],
            int(self.offset[at]),
            int(self.length[at]),
            self.checks[first:last].tobytes(),
        )

    def renumbered(self, numbers: npt.NDArray[np.integer[Any]]) -> ChunkTable:
        """The same rows under other chunk numbers."""
        return ChunkTable(self.packs, numbers.astype("<u8"), self.pack, self.offset, self.length, self.checks)

    def locate(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """The row of each chunk number, -1 where it has none. The table must be sorted by number."""
        if not len(self):
            return np.full(len(numbers), -1, np.int64)
        at = np.minimum(np.searchsorted(self.index, numbers), len(self) - 1).astype(np.int64)
        return np.where(self.index[at] == numbers, at, -1)

    def differing(self, other: ChunkTable) -> npt.NDArray[np.uint64]:
        """The numbers of the chunks that only one of the tables has, or whose checks differ, sorted.

        Both tables must be sorted by number. Equal bytes count as equal wherever they lie.
        """
        common, mine, theirs = np.intersect1d(self.index, other.index, assume_unique=True, return_indices=True)
        alike = self.length[mine] == other.length[theirs]
        a, b = self.take(mine[alike]), other.take(theirs[alike])
        wrong = (a.checks != b.checks).any(axis=1)
        owner = np.repeat(np.arange(len(a)), np.diff(a.blocks))
        return np.union1d(
            np.setxor1d(self.index, other.index, assume_unique=True),
            np.concatenate([common[~alike], a.index[owner[wrong]]]),
        )

    @staticmethod
    def concat(tables: Sequence[ChunkTable]) -> ChunkTable:
        """All rows of the tables, one after the other; a pack that several use is named once."""
        names: dict[str | bytes, int] = {}
        numbers = [
            np.array([names.setdefault(p, len(names)) for p in t.packs], "<u4")[t.pack] for t in tables if len(t)
        ]
        return ChunkTable(
            tuple(names),
            _joined([t.index for t in tables], "<u8"),
            _joined(numbers, "<u4"),
            _joined([t.offset for t in tables], "<u8"),
            _joined([t.length for t in tables], "<u8"),
            _joined([t.checks for t in tables], np.uint8).reshape(-1, CHECK_SIZE),
        )

    def ordered(self) -> ChunkTable:
        """The same rows, naming the packs that they refer to in the order in which these come first."""
        count = len(self.packs)
        if count <= 1 and len(self):
            return self
        first = np.full(count, len(self))
        np.minimum.at(first, self.pack, np.arange(len(self)))
        order = np.argsort(first, kind="stable")[: int((first < len(self)).sum())]
        if np.array_equal(order, np.arange(count)):
            return self
        renamed = np.zeros(count, "<u4")
        renamed[order] = np.arange(len(order))
        packs = tuple(self.packs[p] for p in order.tolist())
        return ChunkTable(packs, self.index, renamed[self.pack], self.offset, self.length, self.checks)

    def compact(self) -> ChunkTable:
        """The same rows, naming only the packs that they refer to."""
        used, renamed = np.unique(self.pack, return_inverse=True)
        if len(used) == len(self.packs):
            return self
        packs = tuple(self.packs[p] for p in used.tolist())
        return ChunkTable(packs, self.index, renamed.astype("<u4"), self.offset, self.length, self.checks)

    @staticmethod
    def overlay(tables: Sequence[ChunkTable]) -> ChunkTable:
        """The rows by chunk number, the last table's where several have one; sorted by number."""
        if len(tables) == 1 and bool(np.all(tables[0].index[1:] > tables[0].index[:-1])):
            return tables[0]
        joined = ChunkTable.concat(tables)
        # the first occurrence in reversed order is the newest
        _, first = np.unique(joined.index[::-1], return_index=True)
        return joined.take(len(joined) - 1 - first)


class Span(NamedTuple):
    """A run of rows of a table."""

    table: ChunkTable
    start: int
    stop: int

    @property
    def level(self) -> int:
        """The power of sixteen below which the number of rows is."""
        return -(-(self.stop - self.start).bit_length() // 4)

    def chunks(self) -> ChunkTable:
        """The rows as a table of their own."""
        return self.table.take(slice(self.start, self.stop))


def layered(spans: tuple[Span, ...], newest: Span) -> tuple[Span, ...]:
    """Return the spans with one more over them; small ones at the end are overlaid once they are many.

    Spans of about the same length, to a power of sixteen, and shorter ones are merged sixteen or more at a time.
    So a row is copied a few times however many commits follow, and about fifteen spans are left for each power.
    """
    joined = (*spans, newest)
    while len(joined) >= _MERGED:
        level = joined[-1].level
        first = len(joined) - 1
        while first and joined[first - 1].level <= level:
            first -= 1
        if len(joined) - first < _MERGED:
            break
        table = ChunkTable.overlay([span.chunks() for span in joined[first:]]).compact()
        joined = (*joined[:first], Span(table, 0, len(table)))
    return joined


def gather(nodes: Sequence[Sequence[Span]]) -> tuple[ChunkTable, npt.NDArray[np.int64]]:
    """The overlaid rows of each node, one node after the other in one table, and their number per node.

    The table depends on the rows alone, not on the tables that they come from. Whole tables are joined and taken
    from once, whatever the number of nodes.
    """
    base: dict[int, int] = {}
    tables: list[ChunkTable] = []
    total = 0
    for table, *_ in (span for spans in nodes for span in spans):
        if id(table) not in base:
            base[id(table)] = total
            tables.append(table)
            total += len(table)
    joined = ChunkTable.concat(tables)
    owners = np.array([i for i, spans in enumerate(nodes) for _ in spans], np.int64)
    starts = np.array([base[id(t)] + a for spans in nodes for t, a, _ in spans], np.int64)
    sizes = np.array([b - a for spans in nodes for _, a, b in spans], np.int64)
    ends = np.cumsum(sizes)
    at = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
    owner = np.repeat(owners, sizes)
    order = np.lexsort((joined.index[at], owner))  # stable: of equal numbers the newest is the last
    at, owner = at[order], owner[order]
    number = joined.index[at]
    newest = np.ones(len(at), np.bool_)
    newest[:-1] = (owner[1:] != owner[:-1]) | (number[1:] != number[:-1])
    counts = np.bincount(owner[newest], minlength=len(nodes)).astype(np.int64)
    return joined.take(at[newest]).ordered(), counts


def column(data: bytes, kind: str) -> npt.NDArray[Any]:
    """The values of a column; `Corrupt` where its bytes hold no whole number of them."""
    try:
        return np.frombuffer(data, kind)
    except ValueError:
        size = np.dtype(kind).itemsize
        raise Corrupt(f"a column of {len(data)} bytes does not hold whole values of {size}") from None


def largest(values: npt.NDArray[np.unsignedinteger[Any]]) -> int:
    """Return the largest value of a column, 0 where it is empty."""
    if len(values) > SHORT:
        return int(values.max())
    listed = values.tolist()
    return max(listed) if listed else 0


def total(values: npt.NDArray[np.uint64], most: int) -> int:
    """Return the sum of a column, or -1 where one value is above `most`, so that the sum may not fit 64 bits."""
    if len(values) <= SHORT:
        return sum(values.tolist())
    return int(values.sum()) if largest(values) <= most else -1


def as_checks(data: bytes) -> npt.NDArray[np.uint8]:
    """The checks in a column, one row of 16 bytes each."""
    if len(data) % CHECK_SIZE:
        raise Corrupt(f"{len(data)} bytes of checksums are no multiple of {CHECK_SIZE}")
    return np.ndarray((len(data) // CHECK_SIZE, CHECK_SIZE), np.uint8, data)


def _blocks_in(length: int) -> int:
    return max(1, -(-length // BLOCK))


def _joined(parts: Sequence[npt.NDArray[Any]], kind: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, kind)
