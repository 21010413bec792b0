"""Pieces: byte ranges of packs to be read, each of which verifies its bytes and delivers their values.

1. `divide` splits a selection into boxes of many small chunks that follow each other in a pack (the writer puts
   the chunks of a box into its pack in C order), and a `Projection` for each chunk outside of these boxes.
2. A `BoxPiece` is such a box: one read fetches all of its chunks, and one strided copy stores them in the result.
   A `ChunkPiece` is one chunk, or those of its blocks that have selected values.
3. The reader sorts all pieces by pack and offset. It reads them in batches, straight into the `destination` of
   each piece that has one, and calls `deliver` with the bytes.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt
from tstore.format.array_metadata import ArrayMeta
from tstore.format.checksums import BLOCK, CHECK_SIZE, block_checks
from tstore.format.chunk_refs import ChunkRow, ChunkSource, ChunkTable
from tstore.format.grid import (
    AxisRun,
    Projection,
    Selection,
    axis_runs,
    boxes,
    chunk_coordinates,
    chunk_number,
    chunk_numbers,
    full_boxes,
    part_of,
    partial_projections,
    projections,
    view_as_chunks,
)
from tstore.runtime.budget import scratch

__all__ = [
    "BoxPiece",
    "Bytes",
    "ChunkPiece",
    "Piece",
    "ReadJob",
    "StackJob",
    "Values",
    "can_decode_into",
    "divide",
    "stacked_pieces",
]

Values = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Numbers = Sequence[int] | npt.NDArray[np.int64]
Box = tuple[range, ...]
"""Neighbouring chunks: a range of chunk coordinates per axis."""

_MAX_BOX_BYTES = 4 << 20  # read, verified and copied while they are in the CPU's caches
_MAX_BOX_CHUNKS = 512
_MIN_BOX_CHUNKS = 4


class ReadJob(msgspec.Struct, eq=False, gc=False):
    """A selection of one array, and the array `out` to read it into.

    `out` has one axis per axis of the stored array; an axis that an index dropped has length 1. Values are cast to
    the dtype of `out`. `source` looks up the array's chunks.
    """

    path: str
    meta: ArrayMeta
    source: ChunkSource
    selection: Selection
    out: Values


class StackJob(msgspec.Struct, eq=False, gc=False):
    """A request to read chunks of one array that are unencoded, at most a block long and numbered consecutively.

    `out` is contiguous, has the array's dtype, and has one chunk at each position of its first axis.
    """

    path: str
    meta: ArrayMeta
    source: ChunkSource
    numbers: range
    out: Values


def can_decode_into(values: Values, meta: ArrayMeta) -> bool:
    """Return whether a chunk can be decoded straight into `values` of its shape, without a cast or a copy."""
    return values.flags.c_contiguous and values.dtype == meta.dtype


class Piece(abc.ABC):
    """`size` bytes at `offset` of a pack, their checksums, and the destination of their values."""

    __slots__ = ("checks", "job", "offset", "pack", "size")

    def __init__(self, job: ReadJob | StackJob, pack: str | bytes, offset: int, size: int, checks: bytes) -> None:
        self.job = job
        self.pack = pack
        self.offset = offset
        self.size = size
        self.checks = checks

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """The path and the chunk, for errors."""

    def destination(self) -> Bytes | None:
        """Return the bytes of the result to read into, or None if the values need decoding or copying."""
        return None

    def split(self, max_size: int) -> Iterator[Piece]:
        """Yield the piece, or parts of at most `max_size` bytes (whole blocks) if it can be read in parts."""
        yield self

    @abc.abstractmethod
    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the bytes read and store their values in the result.

        `data` is the `destination` unless that is None. `url` names the store in errors. Raise `Corrupt`, naming
        the chunk, if the bytes are damaged.
        """


class ChunkPiece(Piece):
    """A chunk, or its blocks `first:last`, which begin `skipped` bytes into the chunk.

    `projection` is None if the chunk is the whole array and its bytes are the result.
    """

    __slots__ = ("projection", "row", "skipped", "target")
    job: ReadJob

    def __init__(
        self, job: ReadJob, row: ChunkRow, projection: Projection | None, first: int = 0, last: int | None = None
    ):
        skipped = first * BLOCK
        size = (row.length if last is None else min(last * BLOCK, row.length)) - skipped
        checks = row.checks if last is None else row.checks[first * CHECK_SIZE : last * CHECK_SIZE]
        super().__init__(job, row.pack, row.offset + skipped, size, checks)
        self.row = row
        self.projection = projection
        self.skipped = skipped
        self.target: Bytes | None = None

    @staticmethod
    def from_projection(job: ReadJob, row: ChunkRow, projection: Projection | None) -> ChunkPiece:
        """Return the piece whose blocks contain the selected values; raise `Corrupt` for an impossible length."""
        meta = job.meta
        try:
            meta.chain.check_length(row.length)
        except Corrupt as error:
            raise Corrupt(f"{ChunkPiece(job, row, projection).label}: {error}") from error
        if projection is None or projection.full or row.length <= BLOCK or not meta.chain.identity:
            return ChunkPiece(job, row, projection)
        return ChunkPiece(job, row, projection, *_selected_blocks(meta, projection))

    @property
    def label(self) -> str:
        """The path and the chunk, for errors."""
        at = self.projection.chunk if self.projection else (0,) * len(self.job.meta.shape)
        return f"{self.job.path}, chunk {at}"

    def destination(self) -> Bytes | None:
        """Return the bytes of the result into which the stored bytes can be read directly, or None."""
        if self.target is None:
            self.target = self._direct_target()
        return self.target

    def _direct_target(self) -> Bytes | None:
        meta, projection, out = self.job.meta, self.projection, self.job.out
        if self.size != meta.encoded_size or not meta.chain.identity:
            return None
        if projection is None:
            return out.reshape(-1).view(np.uint8)
        if not projection.full or any(s.step is not None and s.step < 0 for s in projection.result):
            return None
        target = part_of(out, projection.result)
        if target.shape != meta.chunks or not can_decode_into(target, meta):
            return None
        return target.reshape(-1).view(np.uint8)

    def split(self, max_size: int) -> Iterator[Piece]:
        """Yield parts of at most `max_size` bytes (whole blocks) if the bytes go straight into the result."""
        target = self.destination() if self.size > max_size else None
        if target is None:
            yield self
            return
        for start in range(0, self.size, max_size):
            first, last = (self.skipped + start) // BLOCK, -(-(self.skipped + self.size) // BLOCK)
            part = ChunkPiece(self.job, self.row, self.projection, first, min(first + max_size // BLOCK, last))
            part.target = target[start : start + max_size]
            yield part

    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the bytes read; decode them and store the selected values, unless they were read into `out`."""
        checks = block_checks(data.data)
        if checks != self.checks:
            raise Corrupt(f"{self.label}: {self.row.mismatch(checks, url, self.skipped // BLOCK)}")
        if self.target is not None:
            return
        if self.job.meta.chain.identity:
            self._copy(data)
            return
        try:
            self._decode(data)
        except Corrupt as error:
            raise Corrupt(f"{self.label}: {error}") from error

    def _copy(self, data: Bytes) -> None:
        """Store the selected values of an unencoded chunk, of which `data` may be only some blocks."""
        meta = self.job.meta
        inside, target = self._selected_and_target()
        strides = [math.prod(meta.chunks[i + 1 :]) * meta.dtype.itemsize for i in range(len(meta.chunks))]
        values: Values = np.ndarray(
            tuple(len(range(s.start, s.stop, s.step)) for s in inside),
            meta.dtype,
            buffer=data,
            offset=sum(s.start * stride for s, stride in zip(inside, strides, strict=True)) - self.skipped,
            strides=tuple(stride * s.step for s, stride in zip(inside, strides, strict=True)),
        )
        np.copyto(target, values, casting="unsafe")

    def _decode(self, data: Bytes) -> None:
        meta = self.job.meta
        inside, target = self._selected_and_target()
        if target.shape == meta.chunks and can_decode_into(target, meta):
            meta.chain.decode(data.data, target)
            return
        with scratch(meta.chunk_size * meta.dtype.itemsize) as buffer:
            decoded = buffer.view(meta.dtype).reshape(meta.chunks)
            meta.chain.decode(data.data, decoded)
            np.copyto(target, decoded[inside], casting="unsafe")

    def _selected_and_target(self) -> tuple[tuple[slice, ...], Values]:
        """Return the selected elements of the chunk, and the part of the result for them."""
        assert self.projection is not None  # a chunk that is the whole array is read straight into the result
        return self.projection.inside, part_of(self.job.out, self.projection.result)


def _selected_blocks(meta: ArrayMeta, projection: Projection) -> tuple[int, int]:
    """Return the first block of an unencoded chunk that has selected values, and the block after the last one."""
    first = chunk_number([s.start for s in projection.inside], meta.chunks)  # elements are numbered in C order
    last = chunk_number([s.stop - 1 for s in projection.inside], meta.chunks)
    size = meta.dtype.itemsize
    return first * size // BLOCK, -(-(last + 1) * size // BLOCK)


class RunPiece(Piece):
    """A run of unencoded short chunks that follow each other in a pack.

    If they also follow each other in the result, `target` is their part of the result, otherwise None.
    """

    __slots__ = ("numbers", "target")

    def __init__(self, job: ReadJob | StackJob, references: ChunkTable, numbers: Numbers, target: Values | None):
        pack, offset = references.packs[int(references.pack[0])], int(references.offset[0])
        size = len(references) * job.meta.encoded_size
        super().__init__(job, pack, offset, size, references.checks.tobytes())
        self.numbers = numbers
        self.target = target

    @property
    def label(self) -> str:
        """The path and the first chunk, for errors."""
        return f"{self.job.path}, chunk {chunk_coordinates(self.numbers[0], self.job.meta.counts)}"

    def destination(self) -> Bytes | None:
        """Return the bytes of the result to read into, or None."""
        return None if self.target is None else self.target.reshape(-1).view(np.uint8)

    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the chunks; raise `Corrupt`, naming the first bad chunk."""
        checks = block_checks(data.data, self.job.meta.encoded_size)
        if checks != self.checks:
            raise self._mismatch(checks, url)

    def _mismatch(self, checks: bytes, url: str) -> Corrupt:
        starts = range(0, len(checks), CHECK_SIZE)
        bad = next(i for i in starts if checks[i : i + CHECK_SIZE] != self.checks[i : i + CHECK_SIZE])
        index, size = bad // CHECK_SIZE, self.job.meta.encoded_size
        number = int(self.numbers[index])
        at = chunk_coordinates(number, self.job.meta.counts)
        row = ChunkRow(number, self.pack, self.offset + index * size, size, self.checks[bad : bad + CHECK_SIZE])
        return Corrupt(f"{self.job.path}, chunk {at}: {row.mismatch(checks[bad : bad + CHECK_SIZE], url)}")


class BoxPiece(RunPiece):
    """The chunks of a box; `region` is the part of the result for them."""

    __slots__ = ("box", "region")

    def __init__(self, job: ReadJob, references: ChunkTable, numbers: Numbers, box: Box, region: Values):
        super().__init__(job, references, numbers, None)
        self.box = box
        self.region = region

    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the chunks and store their values in the result; raise `Corrupt`, naming the first bad chunk."""
        super().deliver(data, url)
        meta = self.job.meta
        values = data.view(meta.dtype).reshape(*map(len, self.box), *meta.chunks)
        np.copyto(view_as_chunks(self.region, meta.chunks), values, casting="unsafe")


def stacked_pieces(job: StackJob, references: ChunkTable) -> Iterator[RunPiece]:
    """Yield the pieces of a stack; `references` has one row for each of its chunks."""
    ends = [*references.run_starts()[1:], len(references)]
    start = 0
    for end in ends:
        run = references.part(start, end)
        piece = RunPiece(job, run, job.numbers[start:end], job.out[start:end])
        if int(run.length[0]) != job.meta.encoded_size:
            raise Corrupt(f"{piece.label}: expected {job.meta.encoded_size} encoded bytes, got {run.length[0]}")
        yield piece
        start = end


def divide(job: ReadJob) -> tuple[Iterable[BoxPiece], Iterable[Projection]]:
    """Divide a job's selection into boxes of short, unencoded chunks adjacent in a pack, and single chunks."""
    meta, selection = job.meta, job.selection
    boxable = meta.chain.identity and meta.encoded_size <= BLOCK // 2 and meta.chunk_count >= _MIN_BOX_CHUNKS
    if not boxable or any(r.step != 1 or not r for r in selection.axes) or job.out.dtype != meta.dtype:
        return (), projections(selection, meta.shape, meta.chunks)
    per_axis = [
        [_mark_padded(run, c) for run in axis_runs(r, n, c)]
        for r, n, c in zip(selection.axes, meta.shape, meta.chunks, strict=True)
    ]
    max_chunks = max(1, min(_MAX_BOX_CHUNKS, _MAX_BOX_BYTES // meta.encoded_size))
    pieces: list[BoxPiece] = []
    scattered: list[Projection] = []
    for first, counts, region in full_boxes(per_axis):
        view = part_of(job.out, region)
        for sides in boxes(counts, max_chunks):
            box = tuple(range(f + side.start, f + side.stop) for f, side in zip(first, sides, strict=True))
            inner = tuple(slice(side.start * c, side.stop * c) for side, c in zip(sides, meta.chunks, strict=True))
            for part, piece in _split_box(job, box, view[inner]):
                if piece is not None:
                    pieces.append(piece)
                else:
                    scattered += _projections_in_box(per_axis, part)
    return pieces, itertools.chain(scattered, partial_projections(per_axis))


def _mark_padded(run: AxisRun, chunk: int) -> AxisRun:
    """Return the run, marked as not full if its chunk extends beyond the array's edge."""
    return run if run.inside.stop - run.inside.start == chunk else run._replace(full=False)


def _split_box(
    job: ReadJob, box: Box, target: Values, references: ChunkTable | None = None
) -> Iterator[tuple[Box, BoxPiece | None]]:
    """Yield a box and its piece if its chunks are contiguous in a pack; otherwise split it in halves, recursively.

    A box that is neither contiguous nor large enough to be split has None as its piece. `references` are those of
    all chunks of the box; if None, they are looked up.
    """
    count = math.prod(map(len, box))
    if count < _MIN_BOX_CHUNKS:
        yield box, None
        return
    if references is None:
        references = job.source.select(chunk_numbers(box, job.meta.counts))
    complete = len(references) == count
    if complete and references.is_run(job.meta.encoded_size):
        yield box, BoxPiece(job, references, chunk_numbers(box, job.meta.counts), box, target)
        return
    if count < 2 * _MIN_BOX_CHUNKS:
        yield box, None
        return
    axis = next(axis for axis, side in enumerate(box) if len(side) > 1)
    side, chunk = box[axis], job.meta.chunks[axis]
    half, layer = len(side) // 2, count // len(side)  # `layer` chunks have the same coordinate on the axis
    before = (slice(None),) * axis
    for start, stop in ((0, half), (half, len(side))):
        part = (*box[:axis], side[start:stop], *box[axis + 1 :])
        inner = target[(*before, slice(start * chunk, stop * chunk))]
        yield from _split_box(job, part, inner, references.part(start * layer, stop * layer) if complete else None)


def _projections_in_box(per_axis: list[list[AxisRun]], box: Box) -> Iterator[Projection]:
    """Yield the projection of each chunk in a box."""
    chosen = [
        [part for run in runs for part in run.each(side.start, side.stop)]
        for runs, side in zip(per_axis, box, strict=True)
    ]
    for parts in itertools.product(*chosen):
        yield Projection.from_axes(parts)
