"""Boxes of many small chunks that follow each other in a pack, each read as one piece.

The writer puts the chunks of a box into its pack in C order, so that one read brings all of them and one strided
copy stores them in the result. A selection is divided into such boxes and the covers of its other chunks, which
are read one by one with the same result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tstore.data.pieces import Bytes, Piece, ReadJob, Values
from tstore.errors import Corrupt
from tstore.format.checksums import BLOCK, CHECK_SIZE, digest
from tstore.format.chunk_refs import ChunkRow, ChunkTable
from tstore.format.grid import (
    AxisCover,
    Cover,
    axis_covers,
    boxes,
    chunk_coordinates,
    chunk_numbers,
    covers,
    full_boxes,
    part_of,
    partial_covers,
)

__all__ = ["BoxPiece", "Division", "divide"]

_BOX = 8 << 20
_BOX_CHUNKS = 512
_FEWEST = 4

Box = tuple[range, ...]
"""Neighbouring chunks: a range of chunk coordinates per axis."""


class BoxPiece(Piece):
    """The chunks of a box, of equal length and one after the other in a pack; `target` takes their values."""

    __slots__ = ("box", "target")

    def __init__(self, job: ReadJob, references: ChunkTable, box: Box, target: Values) -> None:
        pack, offset = references.packs[int(references.pack[0])], int(references.offset[0])
        size = len(references) * job.meta.encoded_bound
        super().__init__(job, pack, offset, size, references.checks.tobytes())
        self.box = box
        self.target = target

    @property
    def label(self) -> str:
        """The path and the first chunk, for errors."""
        return f"{self.job.path}, chunk {tuple(side.start for side in self.box)}"

    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the chunks and store their values in the result; raise `Corrupt`, naming the first bad chunk."""
        meta, view = self.job.meta, data.data
        size, chunks = meta.encoded_bound, meta.chunks
        checks = b"".join([digest(view[i : i + size]) for i in range(0, self.size, size)])
        if checks != self.checks:
            raise self._mismatch(checks, url)
        counts = [len(side) for side in self.box]
        values = data.view(meta.dtype).reshape(*counts, *chunks)
        rank = len(chunks)
        order = [i for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for i in pair]
        split = [x for pair in zip(counts, chunks, strict=True) for x in pair]
        np.copyto(self.target.reshape(split), values.transpose(order))

    def _mismatch(self, checks: bytes, url: str) -> Corrupt:
        pairs = range(0, len(checks), CHECK_SIZE)
        bad = next(i for i in pairs if checks[i : i + CHECK_SIZE] != self.checks[i : i + CHECK_SIZE])
        number = bad // CHECK_SIZE
        inside = chunk_coordinates(number, [len(side) for side in self.box])
        at = tuple(side.start + i for side, i in zip(self.box, inside, strict=True))
        size = self.job.meta.encoded_bound
        row = ChunkRow(number, self.pack, self.offset + number * size, size, b"")
        return Corrupt(f"{self.job.path}, chunk {at}: {row.mismatch(0, url)}")


class Division(NamedTuple):
    """A selection as boxes, and the covers of the chunks in none of them."""

    boxes: Iterable[BoxPiece]
    others: Iterable[Cover]


def divide(job: ReadJob) -> Division:
    """Return the division of a job's selection; it has no boxes if chunks are long, few, encoded or scattered."""
    meta, selection = job.meta, job.selection
    small = meta.chain.identity and meta.encoded_bound <= BLOCK // 2 and meta.chunk_count >= _FEWEST
    if not small or any(r.step != 1 or not r for r in selection.axes) or job.out.dtype != meta.dtype:
        return Division((), covers(selection, meta.shape, meta.chunks))
    per_axis = [
        [_whole(p, c) for p in axis_covers(r, n, c)]
        for r, n, c in zip(selection.axes, meta.shape, meta.chunks, strict=True)
    ]
    most = max(1, min(_BOX_CHUNKS, _BOX // meta.encoded_bound))
    pieces: list[BoxPiece] = []
    scattered: list[Cover] = []
    for first, counts, region in full_boxes(per_axis):
        view = part_of(job.out, region)
        for box in boxes(counts, most):
            at = tuple(range(f + r.start, f + r.stop) for f, r in zip(first, box, strict=True))
            inner = tuple(slice(r.start * c, r.stop * c) for r, c in zip(box, meta.chunks, strict=True))
            for part, piece in _pieces(job, at, view[inner]):
                if piece is not None:
                    pieces.append(piece)
                else:
                    scattered += _one_by_one(per_axis, part)
    return Division(pieces, itertools.chain(scattered, partial_covers(per_axis)))


def _whole(part: AxisCover, chunk: int) -> AxisCover:
    """Return the cover, full only if the chunk does not extend beyond the array's edge."""
    return part if part.inside.stop - part.inside.start == chunk else part._replace(full=False)


def _pieces(job: ReadJob, box: Box, target: Values) -> Iterator[tuple[Box, BoxPiece | None]]:
    """Yield the box if its chunks are contiguous in a pack, else its halves likewise, with None for the rest."""
    piece = _contiguous(job, box, target)
    longest = next((axis for axis, side in enumerate(box) if len(side) > 1), None)
    if piece is not None or longest is None or math.prod(map(len, box)) < 2 * _FEWEST:
        yield box, piece
        return
    side, chunk = box[longest], job.meta.chunks[longest]
    half = len(side) // 2
    cut = (slice(None),) * longest
    for part, inner in (
        (side[:half], slice(0, half * chunk)),
        (side[half:], slice(half * chunk, len(side) * chunk)),
    ):
        halved = (*box[:longest], part, *box[longest + 1 :])
        yield from _pieces(job, halved, target[(*cut, inner)])


def _contiguous(job: ReadJob, box: Box, target: Values) -> BoxPiece | None:
    """Return the box as a piece, or None if its chunks are few, absent, or not one after the other in a pack."""
    numbers = chunk_numbers(box, job.meta.counts)
    if len(numbers) < _FEWEST:
        return None
    references = job.source.select(numbers)
    if len(references) < len(numbers):
        return None
    offset, pack, size = references.offset, references.pack, job.meta.encoded_bound
    follows = bool(np.all(offset[1:] - offset[:-1] == size)) and bool(np.all(references.length == size))
    return BoxPiece(job, references, box, target) if follows and bool(np.all(pack == pack[0])) else None


def _one_by_one(per_axis: list[list[AxisCover]], box: Box) -> Iterator[Cover]:
    """Yield the covers of the chunks of a box."""
    chosen = [[p for p in parts if p.chunk in side] for parts, side in zip(per_axis, box, strict=True)]
    for parts in itertools.product(*chosen):
        yield Cover.from_axes(parts)
