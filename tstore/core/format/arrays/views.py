"""Views: chains of indices into an array that is not in memory; pure, no I/O.

A view selects positions on each axis of the array: a `range`, which one axis of the view follows, or
an index array, which may follow several. Indexing a view gives a view of the same array, so a chain of indices is
one plan. TensorStore calls this an index transform.

`view_chunks` finds the chunks of a view that have elements of given chunks of its array, so that a sparse array is
copied in time for the chunks that exist, however many the grids have.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.grid import Selection, chunk_counts, whole
from tstore.core.format.arrays.indices import Index, Item, as_positions, out_of_range, parsed, place_of
from tstore.core.format.arrays.points import NOTHING, Points, PointSelection
from tstore.errors import InvalidIndex

__all__ = ["View", "view_chunks", "whole_view"]

Positions = range | npt.NDArray[np.int64]
_ALL = slice(None)


class View(NamedTuple):
    """The elements that a chain of indices selects from an array.

    If an axis of the view is in `follows` of an array axis with a range, it is in no other.
    """

    shape: tuple[int, ...]
    positions: tuple[Positions, ...]
    """The selected positions on each axis of the array. An index array has an axis for each that it follows."""
    follows: tuple[tuple[int, ...], ...]
    """For each axis of the array, the axes of the view that it follows, ascending; none if it has one position."""

    def narrow(self, index: Index) -> View:
        """Return the view of this view that NumPy's indexing selects; raise `InvalidIndex`."""
        items = parsed(index, len(self.shape))
        for item in items:
            if isinstance(item, np.ndarray):
                return self._advanced(items, place_of(items))
        return self._basic(items)

    def orthogonal(self, index: Index) -> View:
        """Return the view that selects along each axis independently; arrays have one dimension."""
        items = parsed(index, len(self.shape))
        for item in items:
            if isinstance(item, np.ndarray) and item.ndim != 1:
                raise InvalidIndex(f"oindex takes arrays of one dimension, not of {item.ndim}; see vindex")
        view = self._basic([_ALL if isinstance(item, np.ndarray) else item for item in items])
        axis = 0
        for item in items:
            if isinstance(item, np.ndarray):
                [points] = as_positions(item, axis, view.shape)
                view = view._take({axis: points}, points.shape, axis)
            axis += item is None or isinstance(item, (slice, np.ndarray))
        return view

    def vectorized(self, index: Index) -> View:
        """Return the view in which all arrays are broadcast together, and their axes come first."""
        items = parsed(index, len(self.shape))
        return self._advanced(items, 0) if any(isinstance(i, np.ndarray) for i in items) else self._basic(items)

    def transpose(self, axes: Sequence[int]) -> View:
        """Return the view with its axes in this order, a permutation of all."""
        new = {old: at for at, old in enumerate(axes)}
        positions, follows = [], []
        for selected, old_axes in zip(self.positions, self.follows, strict=True):
            followed = [new[axis] for axis in old_axes]
            if not isinstance(selected, range):
                selected = selected.transpose(np.argsort(followed))
            positions.append(selected)
            follows.append(tuple(sorted(followed)))
        return View(tuple(self.shape[axis] for axis in axes), tuple(positions), tuple(follows))

    @property
    def ndim(self) -> int:
        """The number of axes of the view."""
        return len(self.shape)

    @property
    def has_points(self) -> bool:
        """Whether some axis of the array has an index array."""
        return np.ndarray in map(type, self.positions)

    def is_whole(self, shape: tuple[int, ...]) -> bool:
        """Return whether the view has all elements of an array of this shape, in their order."""
        if self.has_points or self.shape != shape:
            return False
        return self.positions == whole(shape).axes and self.follows == whole_view(shape).follows

    def source(self, axis: int) -> tuple[int, Positions] | None:
        """Return the axis of the array that follows only this axis, with its positions, or None.

        None if several axes of the array follow it, or none, or one that also follows another.
        """
        found = [i for i, axes in enumerate(self.follows) if axis in axes]
        return (found[0], self.positions[found[0]]) if [self.follows[i] for i in found] == [(axis,)] else None

    @property
    def repeated(self) -> tuple[slice, ...] | None:
        """The index of the last values along broadcast axes of the view, which no axis of the array follows.

        All values along such an axis are the same. None if there are no other values.
        """
        if len(set().union(*self.follows)) == len(self.shape):
            return None
        unfollowed = self._unfollowed()
        if all(self.shape[axis] < 2 for axis in unfollowed):
            return None
        return tuple(slice(-1, None) if axis in unfollowed else _ALL for axis in range(self.ndim))

    def selection(self) -> Selection | PointSelection:
        """Return the elements to read or write; see `arranged` for the axes of their values."""
        if 0 in self.shape and self._selects_nothing():
            return NOTHING
        if np.ndarray not in map(type, self.positions):
            return Selection(self.positions)  # type: ignore[arg-type]  # all are ranges
        points = []
        for array_axes, axes in self._components():
            shape = tuple(self.shape[axis] for axis in axes)
            columns = []
            for i in array_axes:
                sides = [self.shape[axis] if axis in self.follows[i] else 1 for axis in axes]
                spread = np.broadcast_to(np.asarray(self.positions[i]).reshape(sides), shape)
                columns.append(spread.reshape(-1))
            points.append(Points(tuple(array_axes), tuple(columns), shape))
        return PointSelection(tuple(points), tuple(self._ranges()))

    def arranged(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a view of values of this view's shape, with the axes that the result of its `selection` has.

        Along an axis that no axis of the array follows, the last values are taken.
        """
        sets: Sequence[Sequence[int]] = self.follows
        points = np.ndarray in map(type, self.positions)
        if points:
            sets = [*(axes for _, axes in self._components()), *(self.follows[i] for i, _ in self._ranges())]
        order = list(itertools.chain.from_iterable(sets))
        ascending = sorted(order)
        if order == ascending and len(order) == len(self.shape):
            if () not in sets:
                return values
            if not points:
                return values[(*[_ALL if axes else None for axes in sets], ...)]
        if len(order) < len(self.shape):
            if self._selects_nothing():
                return values.reshape(0)
            last = tuple(_ALL if axis in ascending else -1 for axis in range(self.ndim))
            values = values[(*last, ...)]
        values = values.transpose([ascending.index(axis) for axis in order])
        return values[(*(side for axes in sets for side in ((_ALL,) * len(axes) or (None,))), ...)]

    def of_values(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the view of an array in memory; the view has no index arrays."""
        ranges = [selected for _, selected in self._ranges()]
        strides = [0] * self.ndim
        for selected, axes, stride in zip(ranges, self.follows, values.strides, strict=True):
            for axis in axes:
                strides[axis] += selected.step * stride
        start: tuple[Any, ...] = tuple(slice(selected.start, None) for selected in ranges)
        first = values[(*start, ...)]
        return np.lib.stride_tricks.as_strided(first, self.shape, strides, writeable=False)

    # ---- steps of an index

    def _unfollowed(self) -> set[int]:
        """Return the axes of the view that no axis of the array follows."""
        return set(range(self.ndim)).difference(*self.follows)

    def _selects_nothing(self) -> bool:
        """Return whether such an axis is empty, in which case the positions do not show that the view is."""
        return any(self.shape[axis] == 0 for axis in self._unfollowed())

    def _ranges(self) -> list[tuple[int, range]]:
        """Return the axes of the array that have ranges."""
        return [(i, selected) for i, selected in enumerate(self.positions) if isinstance(selected, range)]

    def _components(self) -> list[tuple[list[int], list[int]]]:
        """Return sets of array axes whose index arrays vary together, with the axes of the view they follow."""
        components: list[tuple[list[int], list[int]]] = []
        for i, (selected, axes) in enumerate(zip(self.positions, self.follows, strict=True)):
            if isinstance(selected, range):
                continue
            joined, followed, others = [i], set(axes), []
            for component in components:
                if followed.isdisjoint(component[1]):
                    others.append(component)
                else:
                    joined += component[0]
                    followed |= set(component[1])
            components = [*others, (sorted(joined), sorted(followed))]
        return components

    def _basic(self, items: Sequence[Item]) -> View:
        """Apply integers, slices and new axes, one for each axis of the view."""
        shape: list[int] = []
        picks: list[Any] = []  # an integer or a slice for each axis of this view
        new: list[int] = []  # the axis that each becomes, if it stays
        for item in items:
            if item is None:
                shape.append(1)
            elif item is not Ellipsis:
                length = self.shape[len(picks)]
                if isinstance(item, slice):
                    try:
                        chosen = range(length)[item]
                    except (TypeError, ValueError) as error:
                        raise InvalidIndex(f"slice {item} on axis {len(picks)}: {error}") from None
                    if len(chosen) == 1 and abs(chosen.step) > length:  # NumPy has no steps beyond 2^63
                        item = slice(chosen.start, chosen.start + 1, length)
                    new.append(len(shape))
                    shape.append(len(chosen))
                else:
                    assert isinstance(item, int)
                    if not -length <= item < length:
                        raise out_of_range(item, len(picks), length)
                    item = item + length if item < 0 else item
                    new.append(-1)
                picks.append(item)
        positions: list[Positions] = []
        follows: list[tuple[int, ...]] = []
        for selected, axes in zip(self.positions, self.follows, strict=True):
            if isinstance(selected, range):
                if axes:
                    pick, axis = picks[axes[0]], new[axes[0]]
                    selected = selected[pick] if axis >= 0 else selected[pick : pick + 1]
                    axes = (axis,) if axis >= 0 else ()
            else:
                picked = selected[tuple([picks[axis] for axis in axes])]
                selected, axes = _compact(picked, [new[axis] for axis in axes if new[axis] >= 0], shape)
            positions.append(selected)
            follows.append(axes)
        return View(tuple(shape), tuple(positions), tuple(follows))

    def _advanced(self, items: Sequence[Item], place: int) -> View:
        """Apply items, some of which are arrays; `place` is the first axis that the arrays create."""
        basic: list[Item] = []
        arrays: dict[int, npt.NDArray[np.int64]] = {}  # by axis of the view after the basic items
        shapes = []
        axis = after = 0
        for item in items:
            if not isinstance(item, np.ndarray):
                basic.append(item)
                axis += item is not None and item is not Ellipsis
                after += item is None or isinstance(item, slice)
                continue
            for points in as_positions(item, axis, self.shape):
                shapes.append(points.shape)
                if item.ndim or item.dtype.kind != "b":
                    arrays[after] = points
                    basic.append(_ALL)
                    axis, after = axis + 1, after + 1
        view = self._basic(basic)
        try:
            shape = np.broadcast_shapes(*shapes)
        except ValueError:
            listed = " ".join(map(str, shapes))
            raise InvalidIndex(f"index arrays of the shapes {listed} can't be broadcast together") from None
        return view._take(arrays, shape, place)

    def _take(self, arrays: dict[int, npt.NDArray[np.int64]], taken: tuple[int, ...], place: int) -> View:
        """Replace axes of the view by index arrays, which are broadcast to the shape `taken`.

        The axes of that shape begin at the axis `place` of the result.
        """
        kept = [axis for axis in range(self.ndim) if axis not in arrays]
        new = {axis: at if at < place else at + len(taken) for at, axis in enumerate(kept)}
        sides = [self.shape[axis] for axis in kept]
        shape = (*sides[:place], *taken, *sides[place:])
        wide = {
            axis: _unrepeated(array.reshape((1,) * (len(taken) - array.ndim) + array.shape))
            for axis, array in arrays.items()
        }
        made = range(place, place + len(taken))
        positions: list[Positions] = []
        follows: list[tuple[int, ...]] = []
        for selected, axes in zip(self.positions, self.follows, strict=True):
            hit = [axis for axis in axes if axis in arrays]
            others = [axis for axis in axes if axis not in arrays]
            followed = [*(made if hit else ()), *(new[axis] for axis in others)]
            if not hit:
                axes = tuple(followed)
            else:
                if isinstance(selected, range):
                    points = selected.start + selected.step * wide[hit[0]]
                else:
                    ordered = selected.transpose([axes.index(axis) for axis in (*hit, *others)])
                    points = ordered[tuple(wide[axis] for axis in hit)]
                selected, axes = _compact(points, followed, shape)
            positions.append(selected)
            follows.append(axes)
        return View(shape, tuple(positions), tuple(follows))


@functools.lru_cache(1 << 12)
def whole_view(shape: tuple[int, ...]) -> View:
    """Return the view of all elements of an array of this shape."""
    return View(shape, whole(shape).axes, tuple((axis,) for axis in range(len(shape))))


def _unrepeated(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return an array without the repetition along axes on which it was broadcast."""
    return array[tuple(slice(1) if stride == 0 else _ALL for stride in array.strides)]


def _compact(
    points: npt.NDArray[np.int64], axes: Sequence[int], shape: Sequence[int]
) -> tuple[Positions, tuple[int, ...]]:
    """Return positions and the axes of the view that they follow, without axes along which they are the same.

    `shape` is that of the view. The only axis of a single position is kept if the view has one position there.
    """
    if points.ndim == 1 and shape[axes[0]] == len(points):
        return points, tuple(axes)
    varying = [i for i in range(points.ndim) if points.shape[i] != 1]
    single = [i for i in range(points.ndim) if shape[axes[i]] == 1]
    if not varying and len(single) == 1:
        varying = single
    if not varying:
        position = int(points.reshape(-1)[0])
        return range(position, position + 1), ()
    varying.sort(key=lambda i: axes[i])
    order = [*varying, *(i for i in range(points.ndim) if i not in varying)]
    points = points.transpose(order).reshape([points.shape[i] for i in varying])
    return points, tuple(axes[i] for i in varying)


Numbers = npt.NDArray[np.int64]
_TOGETHER = 1 << 20  # chunks of the view in a part, unless one chunk of the array overlaps more


def view_chunks(
    view: View, shape: Sequence[int], chunks: Sequence[int], numbers: Numbers, own_chunks: Sequence[int]
) -> Iterator[Numbers]:
    """Yield the sorted numbers of the chunks of a view that have elements of chunks of the array, in parts.

    `shape` and `chunks` are those of the array, `numbers` those of its chunks, and `own_chunks` is the shape of a
    chunk of the view. A chunk may be in several parts. The view must not have points.
    """
    counts = chunk_counts(view.shape, own_chunks)
    if not math.prod(counts) or not len(numbers):
        return
    places = np.unravel_index(numbers, chunk_counts(shape, chunks)) if shape else ()
    first = [np.zeros(len(numbers), np.int64) for _ in counts]  # by axis of the view
    last = [np.full(len(numbers), count - 1, np.int64) for count in counts]
    selected = np.ones(len(numbers), np.bool_)
    for place, length, chunk, positions, axes in zip(
        places, shape, chunks, view.positions, view.follows, strict=True
    ):
        assert isinstance(positions, range)
        begin, end = _positions_in(positions, place * chunk, np.minimum((place + 1) * chunk, length))
        selected &= begin < end
        for axis in axes:
            first[axis], last[axis] = begin // own_chunks[axis], (end - 1) // own_chunks[axis]
    rows = np.flatnonzero(selected)
    sizes = [high[rows] - low[rows] + 1 for low, high in zip(first, last, strict=True)]
    ends = np.cumsum(np.prod(sizes, axis=0) if sizes else np.ones(len(rows), np.int64))
    at = 0
    while at < len(rows):
        done = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, done + _TOGETHER, "right")))
        part = np.zeros(stop - at, np.int64)
        owner = np.arange(at, stop)  # the row of each number in `part`
        for low, size, count in zip(first, sizes, counts, strict=True):
            repeats = size[owner]
            begins = np.cumsum(repeats) - repeats
            part, owner = np.repeat(part, repeats), np.repeat(owner, repeats)
            part = part * count + low[rows[owner]] + np.arange(len(part)) - np.repeat(begins, repeats)
        yield np.unique(part)
        at = stop


def _positions_in(selected: range, low: Numbers, high: Numbers) -> tuple[Numbers, Numbers]:
    """Return the bounds of the indices of values in `low:high` of a range: range(1, 9, 2), 3, 6 → (1, 3)."""
    start, step = selected.start, selected.step
    if step > 0:
        begin, end = -((start - low) // step), -((start - high) // step)
    else:
        begin, end = -((high - 1 - start) // -step), -((low - 1 - start) // -step)
    return np.clip(begin, 0, len(selected)), np.clip(end, 0, len(selected))
