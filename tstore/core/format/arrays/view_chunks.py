"""The chunks of a view, by a grid of its own, that have elements of given chunks of its array; pure, no I/O.

A sparse array is copied with them in time for the chunks that exist, however many the grids have.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.grid import chunk_counts
from tstore.core.format.arrays.views import View

__all__ = ["view_chunks"]

Numbers = npt.NDArray[np.int64]
_TOGETHER = 1 << 20  # chunks of the view, unless one chunk of the array has elements of more


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
    """Return the first index of a range with a value from `low` up to `high`, and the index after the last one."""
    start, step = selected.start, selected.step
    if step > 0:
        begin, end = -((start - low) // step), -((start - high) // step)
    else:
        begin, end = -((high - 1 - start) // -step), -((low - 1 - start) // -step)
    return np.clip(begin, 0, len(selected)), np.clip(end, 0, len(selected))
