"""Selections by index arrays, and their division among the chunks of a grid; pure, no I/O.

The axes of an array form independent sets: the axes whose index arrays vary together, and each axis with a range.
So the intersection with a chunk is a product, and the index arrays of each set are divided among chunks once. The
cost is linear in the lengths of the arrays, not in the number of points.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.grid import AxisProjection, axis_projections, chunk_counts

__all__ = [
    "NOTHING",
    "PointProjection",
    "PointSelection",
    "Points",
    "Target",
    "point_projections",
    "touched_chunks",
]

Numbers = npt.NDArray[np.int64]


class Points(NamedTuple):
    """Points on the array axes `axes`: their coordinates on each, as flat arrays of equal length.

    In the result they have the shape `shape`, in C order.
    """

    axes: tuple[int, ...]
    coordinates: tuple[Numbers, ...]
    shape: tuple[int, ...]


class PointSelection(NamedTuple):
    """The product of points and of ranges on all other axes of an array.

    Its result has the axes of each set of points, then one for each range.
    """

    points: tuple[Points, ...]
    ranges: tuple[tuple[int, range], ...]
    """Axes of the array with their ranges, ascending."""


NOTHING = PointSelection((Points((), (), (0,)),), ())
"""The selection of no elements of any array."""


class Target(NamedTuple):
    """A strided gather from a chunk in C order: for each of `starts`, `lengths` elements at `strides`.

    Positions and strides count elements: starts [0, 8], lengths (3,), strides (2,) selects the elements 0, 2, 4
    and 8, 10, 12. The index also works if only a part of the chunk is in memory.
    """

    starts: Numbers
    lengths: tuple[int, ...]
    strides: tuple[int, ...]

    def window(self, elements: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Numbers]:
        """Return a view of contiguous elements, and the index of the target in it.

        The view overlaps itself: `view[i]` is the elements selected from position i. NumPy can't make such a view
        of variable-length elements, which are indexed one by one.
        """
        if not self.lengths:
            return elements, self.starts
        if elements.dtype.hasobject:
            index = self.starts
            for n, stride in zip(self.lengths, self.strides, strict=True):
                index = index[..., None] + np.arange(n) * stride
            return elements, index
        beyond = sum((n - 1) * stride for n, stride in zip(self.lengths, self.strides, strict=True))
        strides = [elements.itemsize * stride for stride in (1, *self.strides)]
        shape = (len(elements) - beyond, *self.lengths)
        # as_strided fails for float8_e5m2, whose name NumPy does not know
        return np.ndarray(shape, elements.dtype, elements.view(np.uint8), strides=strides), self.starts

    def assign(self, chunk: npt.NDArray[Any], values: Any) -> None:
        """Store values in a chunk in C order; the last value wins if an element has several."""
        window, index = self.window(chunk.reshape(-1))
        window[index] = values


class _Group(NamedTuple):
    """Points in one chunk: the offsets of their elements, and their positions on axes of the result."""

    offsets: Numbers
    places: tuple[tuple[int, Numbers], ...]


class _Span(NamedTuple):
    """Several elements of a range in one chunk: their positions in the result, and the stride between them."""

    axis: int
    result: slice
    length: int
    stride: int

    @property
    def last(self) -> int:
        return (self.length - 1) * self.stride

    def as_group(self) -> _Group:
        steps = np.arange(self.length, dtype=np.int64)
        return _Group(steps * self.stride, ((self.axis, self.result.start + steps * (self.result.step or 1)),))


class PointProjection(NamedTuple):
    """The intersection of a selection of points with one chunk: a product of groups of points and of ranges."""

    chunk: tuple[int, ...]
    groups: tuple[_Group, ...]
    spans: tuple[_Span, ...]
    fixed: tuple[tuple[int, int], ...]
    """Axes of the result on which the projection has one position, and that position."""
    base: int
    """The position of the first element of all ranges in the chunk."""

    @property
    def result(self) -> tuple[Any, ...]:
        """The index of the values in the result: first one axis for each group, then one for each span."""
        index: dict[int, Any] = dict(self.fixed)
        for dimension, group in enumerate(self.groups):
            sides = [1] * len(self.groups)
            sides[dimension] = -1
            index.update((axis, places.reshape(sides)) for axis, places in group.places)
        index.update((span.axis, span.result) for span in self.spans)
        return tuple(index[axis] for axis in range(len(index)))

    @property
    def target(self) -> Target:
        """The elements of the chunk, in this order."""
        starts: Numbers = np.array(self.base, np.int64)
        for group in self.groups:
            starts = starts[..., None] + group.offsets
        return Target(starts, tuple(s.length for s in self.spans), tuple(s.stride for s in self.spans))

    def read(self, elements: npt.NDArray[Any], skipped: int, out: npt.NDArray[Any]) -> None:
        """Store the selected values in the result; the data start at element `skipped` of the chunk."""
        target = self.target
        if skipped:
            target = target._replace(starts=target.starts - skipped)
        window, index = target.window(elements)
        out[self.result] = window[index]

    def patch(self, values: npt.NDArray[Any], dtype: np.dtype[Any]) -> tuple[Target, npt.NDArray[Any]]:
        """Return the elements to change in the chunk, and a copy of their values, which have the result's axes."""
        target = self.target
        copied = np.array(values[self.result], dtype, order="C")
        return target._replace(starts=target.starts.reshape(-1)), copied.reshape(-1, *target.lengths)

    def covers(self, size: int) -> bool:
        """Return whether the projection has all `size` elements of a chunk."""
        selected = math.prod([*(len(g.offsets) for g in self.groups), *(s.length for s in self.spans)])
        if selected < size:
            return False
        return (
            math.prod([*(len(np.unique(g.offsets)) for g in self.groups), *(s.length for s in self.spans)]) == size
        )

    def divide(self, block: int) -> Iterator[tuple[int, int, PointProjection]]:
        """Yield runs of blocks of `block` elements, and the part of the projection in each.

        A run is its first block and the block after its last one. All of its blocks have selected elements.
        """
        parts: list[tuple[int, _Group | _Span]] = [(int(np.ptp(g.offsets)), g) for g in self.groups]
        parts += [(span.last, span) for span in self.spans]
        parts.sort(key=lambda part: part[0])
        near: list[_Group | _Span] = []  # those whose elements are all within one or two adjacent blocks
        extent = 0
        while parts and extent + parts[0][0] < block:
            size, part = parts.pop(0)
            extent += size
            near.append(part)
        low = self.base + sum(int(p.offsets.min()) for p in near if isinstance(p, _Group))
        far = [p if isinstance(p, _Group) else p.as_group() for _, p in parts]
        offsets: Numbers = np.zeros((), np.int64)
        for group in far:
            offsets = offsets[..., None] + group.offsets
        offsets = offsets.reshape(-1)
        first = (offsets + low) // block
        blocks = np.unique(np.concatenate([first, (offsets + (low + extent)) // block]))
        begins = np.flatnonzero(np.diff(blocks, prepend=blocks[0] - 2) > 1)
        ends = [*(begins[1:] - 1).tolist(), len(blocks) - 1]
        if len(begins) == 1:
            yield int(blocks[0]), int(blocks[-1]) + 1, self
            return
        run_of = np.searchsorted(blocks[begins], first, "right") - 1
        order = np.argsort(run_of, kind="stable")
        cuts = np.searchsorted(run_of[order], np.arange(len(begins) + 1))
        sides = [len(group.offsets) for group in far]
        for run, (begin, end) in enumerate(zip(begins.tolist(), ends, strict=True)):
            chosen = order[cuts[run] : cuts[run + 1]]
            along = np.unravel_index(chosen, sides)
            places = [(axis, p[i]) for i, g in zip(along, far, strict=True) for axis, p in g.places]
            groups = (_Group(offsets[chosen], tuple(places)), *(p for p in near if isinstance(p, _Group)))
            spans = tuple(span for span in self.spans if any(span is part for part in near))
            yield int(blocks[begin]), int(blocks[end]) + 1, self._replace(groups=groups, spans=spans)


def point_projections(
    selection: PointSelection, shape: Sequence[int], chunks: Sequence[int]
) -> Iterator[PointProjection]:
    """Yield the intersections with all chunks that the selection touches."""
    if not all(selected for _, selected in selection.ranges):
        return
    strides = [math.prod(chunks[axis + 1 :]) for axis in range(len(chunks))]
    axis, sides = 0, []
    for points in selection.points:
        sides.append(list(_groups(points, axis, shape, chunks, strides)))
        axis += len(points.shape)
    runs = [axis_projections(selected, shape[i], chunks[i]) for i, selected in selection.ranges]
    order = [i for points in selection.points for i in points.axes] + [i for i, _ in selection.ranges]
    for parts in itertools.product(*sides):
        known = [i for at, _ in parts for i in at]
        for sections in itertools.product(*runs):
            chunk = [0] * len(chunks)
            for i, number in zip(order, [*known, *(section.chunk for section in sections)], strict=True):
                chunk[i] = number
            yield _projection(
                tuple(chunk), tuple(group for _, group in parts), sections, selection.ranges, axis, strides
            )


def touched_chunks(selection: PointSelection, chunks: Sequence[int], counts: Sequence[int]) -> Numbers:
    """Return the numbers of the chunks that a selection touches."""
    strides = [math.prod(counts[axis + 1 :]) for axis in range(len(counts))]
    numbers: Numbers = np.zeros(1, np.int64)
    for points in selection.points:
        parts: Numbers = np.zeros(math.prod(points.shape), np.int64)
        for axis, coordinates in zip(points.axes, points.coordinates, strict=True):
            parts += coordinates // chunks[axis] * strides[axis]
        numbers = (numbers[:, None] + np.unique(parts)).reshape(-1)
    for axis, selected in selection.ranges:
        along = np.unique(np.arange(selected.start, selected.stop, selected.step) // chunks[axis])
        numbers = (numbers[:, None] + along * strides[axis]).reshape(-1)
    return numbers


def _projection(
    chunk: tuple[int, ...],
    groups: tuple[_Group, ...],
    sections: Sequence[AxisProjection],
    ranges: Sequence[tuple[int, range]],
    first: int,
    strides: Sequence[int],
) -> PointProjection:
    """Return the projection on a chunk; `first` is the axis of the result with the first range."""
    base, fixed, spans = 0, [], []
    for axis, (section, (i, _)) in enumerate(zip(sections, ranges, strict=True), first):
        inside, stride = section.inside, strides[i]
        base += inside.start * stride
        length = len(range(inside.start, inside.stop, inside.step))
        if length == 1:
            fixed.append((axis, section.result.start))
        else:
            spans.append(_Span(axis, section.result, length, inside.step * stride))
    return PointProjection(chunk, groups, tuple(spans), tuple(fixed), base)


def _groups(
    points: Points, first: int, shape: Sequence[int], chunks: Sequence[int], strides: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], _Group]]:
    """Yield the points of each chunk, with the chunk's coordinates on their axes.

    `first` is their first axis in the result. The points of a chunk keep their order.
    """
    count = math.prod(points.shape)
    if not count:
        return
    key, offsets = np.zeros(count, np.int64), np.zeros(count, np.int64)
    counts = [chunk_counts(shape, chunks)[i] for i in points.axes]
    for i, n, coordinates in zip(points.axes, counts, points.coordinates, strict=True):
        number, inside = np.divmod(coordinates, chunks[i])
        key = key * n + number
        offsets += inside * strides[i]
    order = np.argsort(key, kind="stable")
    key, offsets = key[order], offsets[order]
    begins = np.flatnonzero(np.diff(key, prepend=-1))
    ends = [*begins[1:].tolist(), count]
    places = [order] if len(points.shape) == 1 else np.unravel_index(order, points.shape)
    numbers = [n.tolist() for n in np.unravel_index(key[begins], counts)]
    for begin, end, *at in zip(begins.tolist(), ends, *numbers, strict=True):
        part = tuple((first + axis, p[begin:end]) for axis, p in enumerate(places))
        yield tuple(at), _Group(offsets[begin:end], part)
