"""The reference to one chunk, and the columns of references to many, as manifests have them; pure, no I/O.

Columns are NumPy arrays. Those of few chunks are made from `ChunkRow` objects when they are needed: NumPy's calls
would take most of a small commit, whose references are often looked up one by one, or not at all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.checksums import BLOCK, CHECK_SIZE, as_checks
from tstore.errors import Corrupt

__all__ = [
    "SHORT_COLUMN",
    "ChunkRow",
    "Columns",
    "RowColumns",
    "chunk_rows",
    "largest",
    "parse_column",
    "ranges",
    "total",
]

SHORT_COLUMN = 64
"""The length of a column up to which Python's loops are faster than NumPy's functions."""


_DTYPES = {name: np.dtype(name) for name in ("<u4", "<u8")}  # NumPy parses a name at each call


def parse_column(data: bytes, dtype: str) -> npt.NDArray[Any]:
    """Return the values of a column; raise `Corrupt` if the last value is cut short."""
    try:
        return np.frombuffer(data, _DTYPES[dtype])
    except ValueError:
        size = _DTYPES[dtype].itemsize
        raise Corrupt(f"a column has {len(data)} bytes, expected a multiple of {size}") from None


def largest(values: npt.NDArray[np.unsignedinteger[Any]]) -> int:
    """Return the largest value of a column, 0 if it is empty."""
    if len(values) > SHORT_COLUMN:
        return int(values.max())
    listed = values.tolist()
    return max(listed) if listed else 0


def total(values: npt.NDArray[np.uint64], max_value: int) -> int:
    """Return the sum of a column, or -1 if it is long and a value exceeds `max_value`: the sum might overflow."""
    if len(values) <= SHORT_COLUMN:
        return sum(values.tolist())
    return int(values.sum()) if largest(values) <= max_value else -1


def ranges(starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the integers of the ranges with these starts and sizes, one range after the other."""
    ends = np.cumsum(sizes)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    values: npt.NDArray[np.int64] = within + np.repeat(starts, sizes)
    return values


class ChunkRow(msgspec.Struct, frozen=True, gc=False):
    """The reference to one chunk.

    `number` is the chunk's C-order number in the grid, and `checks` are its joined checksums. `pack` is the key of
    its pack, or the bytes of the pack if the pack is stored inline.
    """

    number: int
    pack: str | bytes
    offset: int
    length: int
    checks: bytes

    def mismatch(self, checks: bytes, url: str, first: int = 0) -> str:
        """Return the message for a chunk that has the wrong checksums `checks` from its block `first` on."""
        starts = range(0, len(checks), CHECK_SIZE)
        expected = self.checks[first * CHECK_SIZE :]
        differing = (i for i in starts if checks[i : i + CHECK_SIZE] != expected[i : i + CHECK_SIZE])
        at = (first + next(differing, 0) // CHECK_SIZE) * BLOCK
        where = f"inline in its manifest in {url}" if isinstance(self.pack, bytes) else f"in {url}: {self.pack}"
        return (
            f"checksum mismatch in the {self.length} bytes at {self.offset} {where} (in the block at byte {at} of "
            "the chunk); the bytes have changed since they were committed: restore the file from a copy, or read "
            "another version"
        )


def chunk_rows(
    numbers: Iterable[int],
    packs: Iterable[str | bytes],
    offsets: Iterable[int],
    lengths: Iterable[int],
    checks: Iterable[bytes],
) -> list[ChunkRow]:
    """Return the rows of these columns, up to the end of the shortest; faster than a call for each row."""
    return list(map(ChunkRow, numbers, packs, offsets, lengths, checks))


@dataclass(eq=False, repr=False)
class Columns:
    """The columns of one or many tables, named like the fields of `ChunkRow`.

    `pack` has positions in `packs`. `checks` has a row of 16 bytes for each block; a chunk has at least one block.
    """

    packs: tuple[str | bytes, ...]
    number: npt.NDArray[np.uint64]
    pack: npt.NDArray[np.uint32]
    offset: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    checks: npt.NDArray[np.uint8]
    lookups: int = 0

    def __len__(self) -> int:
        return len(self.number)

    def count_lookup(self) -> bool:
        """Count a lookup of one row; return whether `rows` are worth their making."""
        self.lookups += 1
        return self.lookups > 16

    @functools.cached_property
    def blocks(self) -> npt.NDArray[np.int64]:
        """The position in `checks` of each chunk's first checksum, and the end of the last chunk's checksums."""
        counts = np.maximum(1, -(-self.length.astype(np.int64) // BLOCK))
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])

    @functools.cached_property
    def follows(self) -> npt.NDArray[np.bool_]:
        """For each chunk, whether it lies right behind the chunk before it in the same pack, with equal length."""
        follows = np.zeros(len(self.number), np.bool_)
        follows[1:] = (
            (self.pack[1:] == self.pack[:-1])
            & (self.length[1:] == self.length[:-1])
            & (self.offset[1:] - self.offset[:-1] == self.length[:-1])
        )
        return follows

    @functools.cached_property
    def rows(self) -> list[ChunkRow]:
        """All rows as objects."""
        data, lengths = self.checks.tobytes(), self.length.tolist()
        if len(lengths) <= SHORT_COLUMN:
            ends = list(itertools.accumulate([max(1, -(-n // BLOCK)) * CHECK_SIZE for n in lengths], initial=0))
        else:
            ends = (self.blocks * CHECK_SIZE).tolist()
        packs = map(self.packs.__getitem__, self.pack.tolist())
        checks = [data[a:b] for a, b in itertools.pairwise(ends)]
        return chunk_rows(self.number.tolist(), packs, self.offset.tolist(), lengths, checks)


class RowColumns(Columns):
    """The columns of rows that exist as objects; each column is made when it is needed first."""

    def __init__(self, rows: Sequence[ChunkRow]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getattr__(self, name: str) -> Any:
        """Make a column."""
        make = _COLUMNS.get(name)
        if make is None:
            raise AttributeError(name)
        column = self.__dict__[name] = make(self.rows)
        return column

    def count_lookup(self) -> bool:
        """Return True: the rows exist."""
        return True


def _packs(rows: Sequence[ChunkRow]) -> tuple[str | bytes, ...]:
    """Return the packs, in the order of the rows that first refer to them."""
    return tuple(dict.fromkeys([row.pack for row in rows]))


def _positions(rows: Sequence[ChunkRow]) -> npt.NDArray[np.uint32]:
    positions = {pack: position for position, pack in enumerate(_packs(rows))}
    return np.fromiter([positions[row.pack] for row in rows], "<u4", len(rows))


_COLUMNS: dict[str, Callable[[Sequence[ChunkRow]], Any]] = {
    "packs": _packs,
    "number": lambda rows: np.fromiter([row.number for row in rows], "<u8", len(rows)),
    "pack": _positions,
    "offset": lambda rows: np.fromiter([row.offset for row in rows], "<u8", len(rows)),
    "length": lambda rows: np.fromiter([row.length for row in rows], "<u8", len(rows)),
    "checks": lambda rows: as_checks(b"".join([row.checks for row in rows])),
}
