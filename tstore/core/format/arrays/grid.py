"""Regular chunk grids, and their intersections with a range on each axis; pure, no I/O."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = [
    "AxisProjection",
    "AxisRun",
    "ChunkRowProjection",
    "Projection",
    "Selection",
    "all_rows",
    "axis_projections",
    "axis_runs",
    "box_sides",
    "boxes",
    "chunk_coordinates",
    "chunk_counts",
    "chunk_number",
    "chunk_numbers",
    "covering_chunks",
    "default_chunks",
    "full_boxes",
    "may_overlap",
    "only_projection",
    "part_of",
    "partial_projections",
    "partial_rows",
    "projections",
    "region_text",
    "renumbered",
    "view_as_chunks",
    "whole",
]

PAGE = 4096
"""The bytes of a page of most machines: long chunks begin and end at multiples, so that they can be mapped."""

TARGET_BYTES = 8 << 20
"""The default size of a chunk: small enough that a restore to another topology reads few bytes it doesn't need."""
_MIN_SHARD_CHUNK = 512 << 10  # bytes


class Selection(NamedTuple):
    """A range of positions for each axis of an array."""

    axes: tuple[range, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of positions on each axis."""
        return tuple(map(len, self.axes))

    def whole_chunk(self, chunks: Sequence[int]) -> tuple[int, ...] | None:
        """Return the coordinates of the chunk if the selection has exactly its elements, in C order, else None."""
        coordinates = []
        for selected, size in zip(self.axes, chunks, strict=True):
            at, inside = divmod(selected.start, size)
            if inside or len(selected) != size or selected.step != 1:
                return None
            coordinates.append(at)
        return tuple(coordinates)


@functools.lru_cache(1 << 12)
def whole(shape: tuple[int, ...]) -> Selection:
    """Return the selection of all elements of an array of this shape."""
    return Selection(tuple(range(n) for n in shape))


def part_of(values: npt.NDArray[Any], region: tuple[slice, ...]) -> npt.NDArray[Any]:
    """Return a view of a region; it is an array even if `values` is 0-d, where NumPy would return a scalar."""
    index: tuple[slice | EllipsisType, ...] = (*region, ...)
    view: npt.NDArray[Any] = values[index]
    return view


def may_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int = 1) -> bool:
    """Return whether elements of an array may share memory, as after `as_strided`; False for slices of an array.

    `itemsize` is in the unit of the strides.
    """
    extent = itemsize  # memory spanned by the axes with smaller strides
    for stride, length in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < extent:
            return 0 not in shape
        extent += stride * (length - 1)
    return False


def chunk_counts(shape: Sequence[int], chunks: Sequence[int]) -> tuple[int, ...]:
    """Return the number of chunks along each axis; the last chunk may extend beyond the array's edge."""
    return tuple(-(-n // c) for n, c in zip(shape, chunks, strict=True))


class Projection(NamedTuple):
    """The intersection of a selection with one chunk, like Zarr's `ChunkProjection`."""

    chunk: tuple[int, ...]
    inside: tuple[slice, ...]
    """The selected elements of the chunk, with steps of one or more."""
    result: tuple[slice, ...]
    """Their positions in the result; the step is negative if the order is reversed."""
    full: bool
    """Whether all elements of the chunk within the array are selected."""

    @staticmethod
    def from_axes(parts: Sequence[AxisProjection]) -> Projection:
        """Combine the intersections along each axis."""
        return Projection(
            tuple(p.chunk for p in parts),
            tuple(p.inside for p in parts),
            tuple(p.result for p in parts),
            all(p.full for p in parts),
        )


def only_projection(selection: Selection, shape: Sequence[int], chunks: Sequence[int]) -> Projection | None:
    """Return the projection of a selection within a single chunk, much faster than `projections`.

    Return None if the selection is empty, touches several chunks or has a negative step.
    """
    at, inside, result, full = [], [], [], True
    for selected, length, chunk in zip(selection.axes, shape, chunks, strict=True):
        count, start, step = len(selected), selected.start, selected.step
        if not count or step < 1:
            return None
        number = start // chunk
        first, last = start - number * chunk, start + (count - 1) * step - number * chunk
        if last >= chunk:
            return None
        at.append(number)
        inside.append(slice(first, last + 1, step))
        result.append(slice(0, count))
        full = full and count == min(chunk, length - number * chunk)
    return Projection(tuple(at), tuple(inside), tuple(result), full)


def projections(selection: Selection, shape: Sequence[int], chunks: Sequence[int]) -> Iterator[Projection]:
    """Yield the intersections with all chunks that the selection touches, in C order."""
    if not all(selection.axes):  # an axis is empty, but the lists for the others could be long
        return
    per_axis = [axis_projections(r, n, c) for r, n, c in zip(selection.axes, shape, chunks, strict=True)]
    for parts in itertools.product(*per_axis):
        yield Projection.from_axes(parts)


class AxisProjection(NamedTuple):
    """The intersection of a range with one chunk along one axis, with the fields of `Projection`."""

    chunk: int
    inside: slice
    result: slice
    full: bool


class AxisRun(NamedTuple):
    """The intersections of a range with `chunk_count` consecutive chunks along one axis, starting at `chunk`.

    `inside` is the same in each chunk; `result` covers all of them.
    """

    chunk: int
    chunk_count: int
    inside: slice
    result: slice
    full: bool

    def each(self, first: int = 0, stop: int | None = None) -> Iterator[AxisProjection]:
        """Yield the intersection with each chunk in `first:stop`, by default with all chunks."""
        end = self.chunk + self.chunk_count
        for chunk in range(max(self.chunk, first), end if stop is None else min(end, stop)):
            result = self.result
            if self.chunk_count > 1:
                start = result.start + (chunk - self.chunk) * self.inside.stop
                result = slice(start, start + self.inside.stop)
            yield AxisProjection(chunk, self.inside, result, self.full)


def axis_projections(selected: range, length: int, chunk: int) -> list[AxisProjection]:
    """Return the intersections with all chunks of one axis that a range touches, in ascending order."""
    return [part for run in axis_runs(selected, length, chunk) for part in run.each()]


def axis_runs(selected: range, length: int, chunk: int) -> list[AxisRun]:
    """Return the intersections with all chunks of one axis that a range touches, in ascending order.

    If the range has a step of one, consecutive whole chunks form one run.
    """
    # axis_runs(range(2, 14), length=20, chunk=4) →
    #     AxisRun(chunk=0, chunk_count=1, inside=2:4, result=0:2)
    #     AxisRun(chunk=1, chunk_count=2, inside=0:4, result=2:10, full=True)
    #     AxisRun(chunk=3, chunk_count=1, inside=0:2, result=10:12)
    if not selected:
        return []
    reverse = selected.step < 0
    forward = selected[::-1] if reverse else selected
    step, count = forward.step, len(forward)
    runs, done = [], 0
    while done < count:
        number, offset = divmod(forward[done], chunk)
        whole = (count - done) // chunk if selected.step == 1 and not offset else 0
        if whole > 1:
            until = done + whole * chunk
            runs.append(AxisRun(number, whole, slice(0, chunk, 1), slice(done, until), True))
            done = until
            continue
        low, high = number * chunk, min((number + 1) * chunk, length)
        # the first index into `forward` past this chunk: ceil((high - start) / step)
        until = min(count, -(-(high - forward.start) // step))
        start, last = forward[done] - low, forward[until - 1] - low
        if reverse:
            result = slice(count - 1 - done, count - 1 - until if count - 1 - until >= 0 else None, -1)
        else:
            result = slice(done, until)
        runs.append(AxisRun(number, 1, slice(start, last + 1, step), result, full=until - done == high - low))
        done = until
    return runs


def full_boxes(
    per_axis: Sequence[Sequence[AxisRun]],
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]]]:
    """Yield boxes of adjacent full chunks: the first chunk, the chunk counts, and the region of the result.

    The selection must have positive steps.
    """
    for runs in itertools.product(*[_joined([run for run in axis if run.full]) for axis in per_axis]):
        yield (
            tuple(run.chunk for run in runs),
            tuple(run.chunk_count for run in runs),
            tuple(run.result for run in runs),
        )


def _joined(runs: list[AxisRun]) -> list[AxisRun]:
    """Join adjacent full runs, except runs whose elements are selected with gaps."""
    joined: list[AxisRun] = []
    for run in runs:
        gapless = run.inside.step == 1 and run.result.step is None
        if joined and gapless and joined[-1].chunk + joined[-1].chunk_count == run.chunk:
            before = joined[-1]
            result = slice(before.result.start, run.result.stop)
            joined[-1] = before._replace(chunk_count=before.chunk_count + run.chunk_count, result=result)
        else:
            joined.append(run)
    return joined


class ChunkRowProjection(NamedTuple):
    """The intersections of a selection with a row of chunks, adjacent along the last axis."""

    others: tuple[AxisProjection, ...]
    last: list[AxisProjection]

    def projections(self) -> list[Projection]:
        """Return the intersection with each chunk."""
        return [Projection.from_axes((*self.others, part)) for part in self.last]


def all_rows(per_axis: Sequence[Sequence[AxisRun]]) -> Iterator[ChunkRowProjection]:
    """Yield the rows of all chunks of a selection; it needs a step of one and at least one axis."""
    *outer, last = [[part for run in runs for part in run.each()] for runs in per_axis]
    for others in itertools.product(*outer):
        yield ChunkRowProjection(others, last)


def partial_rows(per_axis: Sequence[Sequence[AxisRun]]) -> Iterator[ChunkRowProjection]:
    """Yield the rows of the chunks that are not full, grouped by the first axis on which they are not full."""
    # for axes with runs [F P] and [F P] (F full, P partial): axis 0 gives P×F and P×P, axis 1 gives F×P
    if not per_axis:
        return
    for k, axis in enumerate(per_axis[:-1]):
        if not all(run.full for run in axis):
            sides = [[p for p in runs if i > k or p.full == (i < k)] for i, runs in enumerate(per_axis)]
            yield from all_rows(sides)
    full = [[p for p in runs if p.full] for runs in per_axis[:-1]]
    for run in per_axis[-1]:
        if not run.full:
            yield from all_rows([*full, [run]])


def partial_projections(per_axis: Sequence[Sequence[AxisRun]]) -> Iterator[Projection]:
    """Yield the projections of the chunks that are not full, grouped as `partial_rows` does."""
    return itertools.chain.from_iterable(row.projections() for row in partial_rows(per_axis))


def chunk_number(chunk: Sequence[int], counts: Sequence[int]) -> int:
    """Return the C-order number of a chunk in its grid."""
    number = 0
    for i, n in zip(chunk, counts, strict=True):
        number = number * n + i
    return number


def chunk_coordinates(number: int, counts: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of the chunk with this C-order number."""
    return tuple(int(i) for i in np.unravel_index(number, counts)) if counts else ()


def chunk_region(chunk: Sequence[int], chunks: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the region of the chunk with these coordinates, cut at the end of the array."""
    return tuple(slice(i * c, min(i * c + c, n)) for i, c, n in zip(chunk, chunks, shape, strict=True))


def renumbered(
    numbers: npt.NDArray[np.integer[Any]], before: Sequence[int], counts: Sequence[int]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Convert chunk numbers to another grid; return the indices of the chunks kept, and their new numbers.

    `before` and `counts` are the chunk counts of the old and new grid. Chunks outside the new grid are dropped:
    numbers [0, 5, 7] of a 2 × 4 grid become [0, 4] in a 2 × 3 grid (indices [0, 1]).
    """
    if not counts:  # one chunk, or none; NumPy refuses to unravel an array of numbers
        return np.arange(len(numbers)), np.zeros(len(numbers), np.intp)
    axes = np.unravel_index(numbers.astype(np.int64), tuple(before))
    kept = np.flatnonzero(np.logical_and.reduce([i < n for i, n in zip(axes, counts, strict=True)]))
    return kept, np.ravel_multi_index([indices[kept] for indices in axes], tuple(counts))


def covering_chunks(region: Sequence[slice], chunks: Sequence[int]) -> tuple[range, ...]:
    """Return the box of chunks that overlap a region, empty for an empty region."""
    if any(side.stop <= side.start for side in region):
        return tuple(range(0) for _ in region)
    return tuple(range(side.start // n, -(-side.stop // n)) for side, n in zip(region, chunks, strict=True))


def chunk_numbers(box: Sequence[range], counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the numbers of all chunks of a box, in C order."""
    numbers = np.zeros(1, np.int64)
    for side, n in zip(box, counts, strict=True):
        numbers = (numbers[:, None] * n + np.arange(side.start, side.stop)).reshape(-1)
    return numbers


def region_text(first: Sequence[int], size: Sequence[int], chunks: Sequence[int], shape: Sequence[int]) -> str:
    """Format a region for a message, such as "[0:256, 512:600]": `size` elements from chunk `first`, clipped."""
    sides = zip(first, size, chunks, shape, strict=True)
    return "[" + ", ".join(f"{i * c}:{min(i * c + n, end)}" for i, n, c, end in sides) + "]"


def view_as_chunks(values: npt.NDArray[Any], chunks: Sequence[int]) -> npt.NDArray[Any]:
    """Return a view of whole chunks: its first axes are those of the grid, the others those of a chunk."""
    sides = [side for n, c in zip(values.shape, chunks, strict=True) for side in (n // c, c)]
    return values.reshape(sides).transpose(*range(0, len(sides), 2), *range(1, len(sides), 2))


def box_sides(counts: Sequence[int], max_cells: int) -> tuple[int, ...]:
    """Return the shape of boxes of up to `max_cells` cells, consecutive in C order: (4, 6), 12 → (2, 6)."""
    sides: list[int] = []
    room = max(1, max_cells)
    for n in reversed(counts):
        side = max(1, min(n, room))
        sides.append(side)
        room = room // side if side == n else 1
    return tuple(reversed(sides))


def boxes(counts: Sequence[int], max_cells: int) -> Iterator[tuple[range, ...]]:
    """Yield boxes that partition a grid, each of at most `max_cells` cells that are consecutive in C order."""
    sides = box_sides(counts, max_cells)
    steps = [[range(i, min(i + s, n)) for i in range(0, n, s)] for n, s in zip(counts, sides, strict=True)]
    yield from itertools.product(*steps)


def default_chunks(
    shape: Sequence[int], itemsize: int, shard: Sequence[int] | None = None, target: int = TARGET_BYTES
) -> tuple[int, ...]:
    """Return a chunk shape of half to twice `target` bytes, aligned to the `shard` of a device.

    Leading axes are divided first, so that chunks stay contiguous in memory, into chunks of whole pages where they
    can be. Chunks are smaller if the array is,
    or if the length of a shard has no suitable divisor. Each axis of a sharded array gets as many chunks as the
    most divided axis has shards, if chunks have 512 KiB or more. So a restore to another layout over the same
    number of devices reads few values that it does not need.
    """
    chunks = [max(1, n) for n in (shape if shard is None else shard)]
    if shard is not None:
        most_shards = max((-(-n // c) for n, c in zip(shape, chunks, strict=True)), default=1)
        for axis, n in sorted(enumerate(chunks), key=lambda item: -item[1]):
            pieces = min(
                n, most_shards * n // max(1, shape[axis]), math.prod(chunks) * itemsize // _MIN_SHARD_CHUNK
            )
            if pieces > 1:
                chunks[axis] = _divisor(n, pieces) if shape[axis] != n else _even(n, pieces)
    for axis, n in enumerate(chunks):
        size = math.prod(chunks) * itemsize
        if size <= 2 * target:
            break
        pieces = min(n, -(-size // target))
        aligned = shard is not None and shape[axis] != n
        row = size // n  # bytes
        chunks[axis] = _divisor(n, pieces) if aligned else min(n, _whole_pages(_even(n, pieces), row))
    return tuple(chunks)


def _whole_pages(rows: int, row: int) -> int:
    """Return a number of rows of `row` bytes that are whole pages, so that a chunk can be mapped behind another.

    It is up to an eighth greater than `rows`; `rows` if that does not suffice.
    """
    unit = PAGE // math.gcd(PAGE, row)
    return -(-rows // unit) * unit if 8 * unit <= rows else rows


def _even(n: int, pieces: int) -> int:
    """Return n / k for the least divisor k of n within `pieces` + 50 %, else n / pieces rounded up: 10, 3 → 4."""
    even = (n // k for k in range(pieces, min(n, pieces + pieces // 2) + 1) if n % k == 0)
    return next(even, -(-n // pieces))


def _divisor(n: int, pieces: int) -> int:
    """Return the largest divisor of n, at most n / pieces: 12, 5 → 2."""
    divisors = (length for k in range(1, math.isqrt(n) + 1) if n % k == 0 for length in (k, n // k))
    return max(length for length in divisors if n // length >= pieces)
