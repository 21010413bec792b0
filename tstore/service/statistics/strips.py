"""The norms of the rows and columns of an array, grouped into a bounded number of strips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.format.plain_text import finite_or_none, pluralize
from tstore.service.statistics.moments import Sums, wide
from tstore.service.statistics.numbers import Floats

__all__ = ["MAX_STRIPS", "StripSums", "Strips", "strip_bounds", "strip_numbers"]

MAX_STRIPS = 256


@dataclass(frozen=True, eq=False)
class Strips:
    """The norms of strips along one axis: ranges of indices, or single indices if there are few."""

    axis: int
    """The axis of the rows, or of the columns."""
    bounds: npt.NDArray[np.int64]
    """The first index of each strip, and the length of the axis."""
    counts: npt.NDArray[np.int64]
    """The number of finite values read in each strip."""
    norms: npt.NDArray[np.float64]
    """The Euclidean norm of these values, NaN if there are none."""

    @property
    def rms(self) -> npt.NDArray[np.float64]:
        """The root mean square of each strip, comparable between strips that were sampled."""
        return self.norms / np.sqrt(np.maximum(1, self.counts))

    def __repr__(self) -> str:
        unread = int(np.count_nonzero(self.counts == 0))
        return f"<Strips axis={self.axis} {pluralize(len(self.counts), 'strip')}, {unread:,} without values>"

    def document(self) -> dict[str, Any]:
        """Return the strips as JSON values, with None for infinity and NaN."""
        return {
            "axis": self.axis,
            "bounds": self.bounds.tolist(),
            "counts": self.counts.tolist(),
            "norms": [finite_or_none(x) for x in self.norms.tolist()],
            "rms": [finite_or_none(x) for x in self.rms.tolist()],
        }


def strip_bounds(length: int, most: int) -> npt.NDArray[np.int64]:
    """Return the bounds of at most `most` strips of nearly equal lengths."""
    count = min(length, most)
    return np.array([i * length // max(1, count) for i in range(count + 1)], np.int64)


def strip_numbers(bounds: npt.NDArray[np.int64], start: int, stop: int) -> npt.NDArray[np.int64]:
    """Return the number of the strip of each index."""
    return np.searchsorted(bounds, np.arange(start, stop), "right") - 1


class StripSums:
    """Accumulates the squares of the values by strip along one axis."""

    def __init__(self, axis: int, length: int) -> None:
        self._axis = axis
        self._bounds = strip_bounds(length, MAX_STRIPS)
        count = len(self._bounds) - 1
        self._sums = Sums(count)
        self._counts = np.zeros(count, np.int64)

    def add(self, starts: Sequence[int], values: Floats, finite: npt.NDArray[np.bool_]) -> None:
        """Add the values of a region that begins at `starts`."""
        axis = self._axis
        others = tuple(i for i in range(values.ndim) if i != axis)
        numbers = strip_numbers(self._bounds, starts[axis], starts[axis] + values.shape[axis])
        squares = np.square(wide(values if finite.all() else np.where(finite, values, 0)))
        np.add.at(self._sums.squares, numbers, squares.sum(axis=others))
        np.add.at(self._counts, numbers, np.count_nonzero(finite, axis=others))

    def strips(self) -> Strips:
        """Return the norms."""
        norms = np.where(self._counts > 0, self._sums.norms(), np.nan)
        return Strips(self._axis, self._bounds, self._counts, norms)
