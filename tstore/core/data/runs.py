"""Pieces of many short, unencoded chunks that are contiguous in a pack; pure, no I/O.

One call reads them, and another verifies them. `divide` finds them in a selection.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.data.pieces import Bytes, Piece, ReadJob, StackJob, Values
from tstore.core.format.arrays.gather import scatter, scatter_region
from tstore.core.format.arrays.grid import (
    AxisProjection,
    AxisRun,
    ChunkRowProjection,
    Projection,
    Selection,
    all_rows,
    axis_projections,
    axis_runs,
    boxes,
    chunk_coordinates,
    chunk_number,
    chunk_numbers,
    full_boxes,
    only_projection,
    part_of,
    partial_rows,
    projections,
    view_as_chunks,
)
from tstore.core.format.arrays.points import PointProjection, PointSelection, point_projections
from tstore.core.format.checksums import BLOCK, CHECK_SIZE, block_checks
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.errors import Corrupt

__all__ = ["Fill", "RegionPiece", "RunPiece", "divide", "stacked_pieces"]

Numbers = Sequence[int] | npt.NDArray[np.int64]
Box = tuple[range, ...]
"""A box of chunks: a range of chunk coordinates per axis."""

_MAX_BOX_BYTES = 4 << 20  # so that a box stays in the CPU's caches
_MAX_BOX_CHUNKS = 512
_MIN_BOX_CHUNKS = 4
_MIN_SELECTED = 64  # chunks; at least as many are looked up with one search
_MAX_SELECTED = 1 << 16  # chunks looked up together


class RunPiece(Piece):
    """A run of short unencoded chunks that are contiguous in a pack.

    If they are contiguous in the result too, `target` is their part of the result, otherwise None.
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
        return self.label_of(0)

    @property
    def chunks(self) -> Sequence[int]:
        """The numbers of the chunks."""
        return [int(number) for number in self.numbers]

    def label_of(self, index: int) -> str:
        """Return the path and the chunk at this position in the run."""
        return f"{self.job.path}, chunk {chunk_coordinates(int(self.numbers[index]), self.job.meta.counts)}"

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
        at, number = self.offset + index * size, int(self.numbers[index])
        row = ChunkRow(number, self.pack, at, size, self.checks[bad : bad + CHECK_SIZE])
        return Corrupt(f"{self.label_of(index)}: {row.mismatch(checks[bad : bad + CHECK_SIZE], url)}")


class BoxPiece(RunPiece):
    """The chunks of a box; `region` is the part of the result for them, with the axes of the box first."""

    __slots__ = ("region",)

    def __init__(self, job: ReadJob, references: ChunkTable, numbers: Numbers, region: Values):
        region = view_as_chunks(region, job.meta.chunks)
        super().__init__(job, references, numbers, region if region.flags.c_contiguous else None)
        self.region = region

    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the chunks and store their values in the result; raise `Corrupt`, naming the first bad chunk."""
        if self.target is not None:
            super().deliver(data, url)
        elif (checks := scatter(data, self.region)) != self.checks:
            raise self._mismatch(checks, url)


class RegionPiece(RunPiece):
    """A row of chunks along the last axis, a region of which fills `region` of the result.

    The region begins at `start` in the first chunk.
    """

    __slots__ = ("region", "start")

    def __init__(
        self, job: ReadJob, references: ChunkTable, numbers: Numbers, region: Values, start: tuple[int, ...]
    ):
        super().__init__(job, references, numbers, None)
        self.region = region
        self.start = start

    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the chunks and store the region's values; raise `Corrupt`, naming the first bad chunk."""
        if (checks := scatter_region(data, self.region, self.job.meta.chunks, self.start)) != self.checks:
            raise self._mismatch(checks, url)


def stacked_pieces(job: StackJob, references: ChunkTable) -> Iterator[RunPiece]:
    """Yield the pieces of a stack; `references` has one row per chunk."""
    ends = [*references.run_starts()[1:], len(references)]
    start = 0
    for end in ends:
        run = references.part(start, end)
        piece = RunPiece(job, run, job.numbers[start:end], job.out[start:end])
        if int(run.length[0]) != job.meta.encoded_size:
            raise Corrupt(f"{piece.label}: expected {job.meta.encoded_size} encoded bytes, got {run.length[0]}")
        yield piece
        start = end


Fill = Callable[[ReadJob, Any], None]
"""Store the fill value in the part of a job's result that an index selects."""


def divide(job: ReadJob, fill: Fill) -> tuple[Iterable[RunPiece], Iterable[Projection | PointProjection]]:
    """Divide a job's selection into boxes and rows of short, unencoded chunks, and single chunks.

    The chunks of a box or row are contiguous in a pack. Call `fill` for regions of a sparse array with many chunks
    that were never written; other chunks are not looked up.
    """
    meta, selection = job.meta, job.selection
    if isinstance(selection, PointSelection):
        return (), point_projections(selection, meta.shape, meta.chunks)
    if (only := only_projection(selection, meta.shape, meta.chunks)) is not None:
        return (), (only,)
    boxable = meta.chain.identity and meta.encoded_size <= BLOCK // 2 and meta.chunk_count >= _MIN_BOX_CHUNKS
    if not boxable or any(r.step != 1 or not r for r in selection.axes) or job.out.dtype != meta.dtype:
        return (), _stored_projections(job, selection, fill)
    touched = math.prod(r[-1] // c - r[0] // c + 1 for r, c in zip(selection.axes, meta.chunks, strict=True))
    if touched < _MIN_BOX_CHUNKS:  # a single box would be read chunk by chunk
        return (), projections(selection, meta.shape, meta.chunks)
    per_axis = [
        [_mark_padded(run, c) for run in axis_runs(r, n, c)]
        for r, n, c in zip(selection.axes, meta.shape, meta.chunks, strict=True)
    ]
    max_chunks = max(1, min(_MAX_BOX_CHUNKS, _MAX_BOX_BYTES // meta.encoded_size))
    pieces: list[RunPiece] = []
    scattered: list[Projection] = []
    rows = partial_rows(per_axis)
    if math.prod(sum(run.chunk_count for run in axis if run.full) for axis in per_axis) < _MIN_BOX_CHUNKS:
        rows = all_rows(per_axis)
    else:
        for first, counts, region in full_boxes(per_axis):
            view = part_of(job.out, region)
            for sides in boxes(counts, max_chunks):
                box = tuple(range(f + side.start, f + side.stop) for f, side in zip(first, sides, strict=True))
                references = job.source.select(chunk_numbers(box, meta.counts))
                if meta.sparse and not len(references):
                    axes = zip(box, meta.chunks, selection.axes, strict=True)
                    fill(job, tuple(slice(s.start * c - r.start, s.stop * c - r.start) for s, c, r in axes))
                    continue
                inner = tuple(slice(s.start * c, s.stop * c) for s, c in zip(sides, meta.chunks, strict=True))
                for part, piece in _split_box(job, box, view[inner], references):
                    if piece is not None:
                        pieces.append(piece)
                    else:
                        scattered += _projections_in_box(per_axis, part)
    for row in rows:
        for start in range(0, len(row.last), max_chunks):
            short = row._replace(last=row.last[start : start + max_chunks])
            if (region_piece := _region_piece(job, short)) is not None:
                pieces.append(region_piece)
            else:
                scattered += short.projections()
    return pieces, scattered


def _region_piece(job: ReadJob, row: ChunkRowProjection) -> RegionPiece | None:
    """Return the piece of a row of chunks, None if they are not contiguous in a pack."""
    parts = (*row.others, row.last[0])
    number, count = chunk_number([part.chunk for part in parts], job.meta.counts), len(row.last)
    numbers = range(number, number + count)
    references = job.source.select(numbers)
    if len(references) != count or not references.is_run(job.meta.encoded_size):
        return None
    stop = row.last[-1].result.stop
    region = (*(part.result for part in row.others), slice(parts[-1].result.start, stop))
    return RegionPiece(job, references, numbers, part_of(job.out, region), tuple(p.inside.start for p in parts))


def _stored_projections(job: ReadJob, selection: Selection, fill: Fill) -> Iterable[Projection]:
    """Return the projections of a selection; for many chunks of a sparse array, only those of written chunks."""
    meta = job.meta
    axes = zip(selection.axes, meta.shape, meta.chunks, strict=True)
    per_axis = [axis_projections(r, n, c) for r, n, c in axes] if meta.sparse else []
    if math.prod(map(len, per_axis)) < _MIN_SELECTED:
        return projections(selection, meta.shape, meta.chunks)
    return _selected_projections(job, per_axis, fill)


def _selected_projections(job: ReadJob, per_axis: list[list[AxisProjection]], fill: Fill) -> Iterator[Projection]:
    """Yield the projections of the chunks that were written; first fill the result if some were not.

    Chunks are looked up together, in groups along the first axis.
    """
    counts, is_filled = job.meta.counts, False
    coordinates = [np.array([part.chunk for part in parts], np.int64) for parts in per_axis]
    rows = max(1, _MAX_SELECTED // math.prod(map(len, per_axis[1:])))
    for start in range(0, len(per_axis[0]), rows):
        grid = np.ix_(coordinates[0][start : start + rows], *coordinates[1:])
        numbers = np.ravel_multi_index(np.broadcast_arrays(*grid), counts)
        stored = job.source.select(numbers.reshape(-1)).number
        if len(stored) < numbers.size and not is_filled:
            fill(job, ...)
            is_filled = True
        at = np.unravel_index(np.searchsorted(numbers.reshape(-1), stored), numbers.shape)
        for first, *others in zip(*(axis.tolist() for axis in at), strict=True):
            places = (start + first, *others)
            yield Projection.from_axes([parts[i] for parts, i in zip(per_axis, places, strict=True)])


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
        yield box, BoxPiece(job, references, chunk_numbers(box, job.meta.counts), target)
        return
    if count < 2 * _MIN_BOX_CHUNKS:
        yield box, None
        return
    axis = next(axis for axis, side in enumerate(box) if len(side) > 1)
    side, chunk = box[axis], job.meta.chunks[axis]
    half, layer = len(side) // 2, count // len(side)  # `layer`: chunks per coordinate on the axis
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
