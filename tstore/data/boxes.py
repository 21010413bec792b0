"""Boxes of many small chunks that lie one behind the other in a pack, to be read at once.

The writer puts the chunks of a box into its pack in C order, so that one read brings all of them and one strided
copy puts them into the destination. This is a faster way to the same result as reading them one by one: a
selection is divided into such boxes and the covers of all other chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import BLOCK, CHECK_SIZE, ChunkRow, ChunkSource, ChunkTable, digest
from tstore.format.grid import (
    AxisCover,
    Cover,
    Selection,
    along,
    boxes,
    chunk_numbers,
    cover_of,
    covers,
    full_boxes,
    part_of,
    partial_covers,
)

__all__ = ["ChunkBox", "Division", "chunk_boxes"]

_BOX = 8 << 20
_BOX_CHUNKS = 512
_FEWEST = 4


class ChunkBox(NamedTuple):
    """Chunks of equal length behind each other in a pack, and where their values go."""

    path: str
    meta: ArrayMeta
    pack: str | bytes
    offset: int
    length: int
    checks: bytes
    box: tuple[range, ...]
    target: npt.NDArray[Any]

    @property
    def size(self) -> int:
        """Their bytes."""
        return self.length

    @property
    def where(self) -> str:
        """The first of the chunks, for errors."""
        return f"{self.path}, chunk {tuple(side.start for side in self.box)}"

    def deliver(self, buffer: npt.NDArray[np.uint8], url: str) -> None:
        """Verifies the chunks as they were read and puts them into the target; `Corrupt` names the bad one.

        `url` is their store's.
        """
        chunks, size = self.meta.chunks, self.meta.encoded_bound
        data = buffer.data
        checks = b"".join([digest(data[i : i + size]) for i in range(0, self.length, size)])
        if checks != self.checks:
            raise self._damaged(checks, url)
        counts = [len(side) for side in self.box]
        values = buffer.view(self.meta.dtype).reshape(*counts, *chunks)
        rank = len(chunks)
        order = [i for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for i in pair]
        split = [x for pair in zip(counts, chunks, strict=True) for x in pair]
        np.copyto(self.target.reshape(split), values.transpose(order))

    def _damaged(self, checks: bytes, url: str) -> Corrupt:
        pairs = range(0, len(checks), CHECK_SIZE)
        bad = next(i for i in pairs if checks[i : i + CHECK_SIZE] != self.checks[i : i + CHECK_SIZE])
        number = bad // CHECK_SIZE
        inside = np.unravel_index(number, [len(side) for side in self.box])
        at = tuple(side.start + int(i) for side, i in zip(self.box, inside, strict=True))
        size = self.meta.encoded_bound
        row = ChunkRow(number, self.pack, self.offset + number * size, size, b"")
        return Corrupt(f"{self.path}, chunk {at}: {row.mismatch(0, url)}")


class Division(NamedTuple):
    """A selection as boxes and the covers of what is in none of them."""

    boxes: Iterable[ChunkBox]
    others: Iterable[Cover]


def chunk_boxes(
    path: str, meta: ArrayMeta, source: ChunkSource, selection: Selection, out: npt.NDArray[Any]
) -> Division:
    """The division of a selection; without boxes where chunks are long, few, encoded or not neighbours."""
    small = meta.chain.identity and meta.encoded_bound <= BLOCK // 2 and meta.chunk_count >= _FEWEST
    if not small or any(r.step != 1 or not r for r in selection.axes) or out.dtype != meta.dtype:
        return Division((), covers(selection, meta.shape, meta.chunks))
    per_axis = [
        [_whole(p, c) for p in along(r, n, c)]
        for r, n, c in zip(selection.axes, meta.shape, meta.chunks, strict=True)
    ]
    table = source.chunks
    most = max(1, min(_BOX_CHUNKS, _BOX // meta.encoded_bound))
    found: list[ChunkBox] = []
    scattered: list[Cover] = []
    for first, counts, region in full_boxes(per_axis):
        view = part_of(out, region)
        for box in boxes(counts, most):
            at = tuple(range(f + r.start, f + r.stop) for f, r in zip(first, box, strict=True))
            inner = tuple(slice(r.start * c, r.stop * c) for r, c in zip(box, meta.chunks, strict=True))
            for part, neighbours in _pieces(path, meta, table, at, view[inner]):
                if neighbours is not None:
                    found.append(neighbours)
                else:
                    scattered += _one_by_one(per_axis, part)
    return Division(found, itertools.chain(scattered, partial_covers(per_axis)))


def _whole(part: AxisCover, chunk: int) -> AxisCover:
    """The cover, full only where the chunk does not reach over the array's edge."""
    return part if part.inside.stop - part.inside.start == chunk else part._replace(full=False)


def _pieces(
    path: str, meta: ArrayMeta, table: ChunkTable, box: tuple[range, ...], target: npt.NDArray[Any]
) -> Iterator[tuple[tuple[range, ...], ChunkBox | None]]:
    """The box if its chunks are neighbours, else those of its halves that are, and None with the rest."""
    found = _neighbours(path, meta, table, box, target)
    longest = next((axis for axis, side in enumerate(box) if len(side) > 1), None)
    if found is not None or longest is None or math.prod(map(len, box)) < 2 * _FEWEST:
        yield box, found
        return
    side, chunk = box[longest], meta.chunks[longest]
    half = len(side) // 2
    cut = (slice(None),) * longest
    for part, inner in (
        (side[:half], slice(0, half * chunk)),
        (side[half:], slice(half * chunk, len(side) * chunk)),
    ):
        halved = (*box[:longest], part, *box[longest + 1 :])
        yield from _pieces(path, meta, table, halved, target[(*cut, inner)])


def _neighbours(
    path: str, meta: ArrayMeta, table: ChunkTable, box: tuple[range, ...], target: npt.NDArray[Any]
) -> ChunkBox | None:
    numbers = chunk_numbers(box, meta.counts)
    if len(numbers) < _FEWEST:
        return None
    rows = table.locate(numbers.astype(np.uint64))
    if rows[0] < 0 or rows.min() < 0:
        return None
    offsets, size = table.offset[rows], meta.encoded_bound
    behind = bool(np.all(offsets[1:] - offsets[:-1] == size)) and bool(np.all(table.length[rows] == size))
    pack = int(table.pack[rows[0]])
    if not behind or not bool(np.all(table.pack[rows] == pack)):
        return None
    checks = table.checks[table.blocks[rows]].tobytes()  # one check each, as none is longer than a block
    return ChunkBox(path, meta, table.packs[pack], int(offsets[0]), len(rows) * size, checks, box, target)


def _one_by_one(per_axis: list[list[AxisCover]], box: tuple[range, ...]) -> Iterator[Cover]:
    """The covers of the chunks of a box."""
    chosen = [[p for p in parts if p.chunk in side] for parts, side in zip(per_axis, box, strict=True)]
    for parts in itertools.product(*chosen):
        yield cover_of(parts)
