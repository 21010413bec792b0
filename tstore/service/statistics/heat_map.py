"""The values of a matrix as a grid of cells, as many as a picture can show."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.array import Array
from tstore.core.format.arguments import checked_budget, quote
from tstore.core.format.plain_text import finite_or_none
from tstore.core.runtime.pool import run
from tstore.errors import InvalidArgument
from tstore.service.statistics.moments import Sums, wide
from tstore.service.statistics.numbers import as_floats, check_numbers
from tstore.service.statistics.reading import Batch, Coverage, SampleCounts, parts, sample_of
from tstore.service.statistics.results import RESULTS
from tstore.service.statistics.strips import strip_bounds, strip_numbers

__all__ = ["HEAT_MAP_BUDGET", "HeatMap", "heat_map"]

HEAT_MAP_BUDGET = 64 << 20
"""The default bytes of values to read for a heat map: more than for statistics, as each cell needs some."""

_MAX_CELLS = 1024  # cells along one axis

Grid = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class HeatMap:
    """The values of a matrix by cell: the result of `tstore.heat_map`.

    Cells count only finite values; a cell without any has NaN. Complex numbers count by their magnitude.
    """

    path: str
    """The path of the array."""
    shape: tuple[int, ...]
    """The shape of the view."""
    coverage: Coverage
    """How many of the values were read."""
    rows: npt.NDArray[np.int64]
    """The first row of each row of cells, and the number of rows."""
    columns: npt.NDArray[np.int64]
    """The first column of each column of cells, and the number of columns."""
    means: Grid
    """The mean of the values of each cell."""
    rms: Grid
    """The root mean square of the values of each cell."""
    nonfinite: npt.NDArray[np.int64]
    """The number of values of each cell that are NaN or infinite."""

    def __repr__(self) -> str:
        height, width = self.means.shape
        return f"<tstore.HeatMap {self.path!r} {self.shape}: {height}×{width} cells, of {self.coverage}>"

    def document(self) -> dict[str, Any]:
        """Return the heat map as JSON values, with None for infinity and NaN."""
        return {
            "path": self.path,
            "shape": list(self.shape),
            "coverage": self.coverage.document(),
            "rows": self.rows.tolist(),
            "columns": self.columns.tolist(),
            "means": [[finite_or_none(x) for x in row] for row in self.means.tolist()],
            "rms": [[finite_or_none(x) for x in row] for row in self.rms.tolist()],
            "nonfinite": self.nonfinite.tolist(),
        }


async def heat_map(
    view: Array, *, cells: tuple[int, int] = (64, 64), budget: int | None = HEAT_MAP_BUDGET
) -> HeatMap:
    """Return the mean and the root mean square of the values of a matrix, cell by cell.

    To zoom, index the array: `heat_map(array[0, 512:768, :256])`. Results are cached like those of `summarize`.

    Parameters
    ----------
    view
        An array or a view of at most two axes. A vector is one row.
    cells
        The number of rows and columns of cells, at most 1,024 each. There are fewer if the view is smaller, or if
        a sample has no values for some of them: then adjacent cells are joined until each has some.
    budget
        Bytes of values to read, by default 64 MiB; None reads all.

    Raises
    ------
    As `summarize` does; `InvalidArgument` for more than two axes.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> _ = tstore.save("memory://of-heat-map", {"w": np.arange(16.0).reshape(4, 4)}, step=7)
    >>> tstore.heat_map(tstore.open("memory://of-heat-map").snapshot().array("w"), cells=(2, 2)).means
    array([[ 2.5,  4.5],
           [10.5, 12.5]])
    """
    if not isinstance(view, Array):
        raise InvalidArgument(f"{quote(view)} is not an array of a snapshot or a transaction, nor a view of one")
    check_numbers(view.path, view.dtype)
    if view.ndim > 2:
        index = "0, " * (view.ndim - 2)
        raise InvalidArgument(
            f"{view.path} has {view.ndim} axes; index all but two of them, such as array[{index}:, :]"
        )
    limits = _checked_cells(cells)
    sample = await sample_of(view, checked_budget(budget))
    key = await sample.key("heat map", limits)
    cached = None if key is None else RESULTS.get(key)
    if isinstance(cached, HeatMap):
        return dataclasses.replace(cached, path=view.path)
    cells_of = _Cells(view.shape, limits)
    counts = SampleCounts()
    async for batch in sample.batches(counts):
        await run(cells_of.add, batch)
    if not sample.tiling.complete:
        await run(cells_of.join)
    result = cells_of.heat_map(view, counts.coverage(view))
    if key is not None:
        RESULTS.put(key, result, 4096 + 3 * result.means.nbytes + result.rows.nbytes + result.columns.nbytes)
    return result


def _checked_cells(cells: Any) -> tuple[int, int]:
    listed = list(cells) if isinstance(cells, tuple | list) else []
    if len(listed) != 2 or not all(type(n) is int and 1 <= n <= _MAX_CELLS for n in listed):
        raise InvalidArgument(f"cells={quote(cells)}: expected two numbers from 1 to {_MAX_CELLS}")
    return listed[0], listed[1]


class _Cells:
    """The sums of the values of each cell."""

    def __init__(self, shape: Sequence[int], limits: tuple[int, int]) -> None:
        self._axes = (1,) * (2 - len(shape)) + tuple(shape)
        self.rows, self.columns = (strip_bounds(n, most) for n, most in zip(self._axes, limits, strict=True))
        grid = len(self.rows) - 1, len(self.columns) - 1
        self._sums = Sums(*grid)
        self._finite = np.zeros(grid, np.int64)
        self._read = np.zeros(grid, np.int64)

    def add(self, batch: Batch) -> None:
        """Add tiles."""
        for region, tile, _ in batch:
            for starts, [values] in parts(region, tile):
                floats = as_floats(values).reshape((1,) * (2 - values.ndim) + values.shape)
                finite = np.isfinite(floats)
                summed = wide(floats if finite.all() else np.where(finite, floats, 0))
                first = (0,) * (2 - len(starts)) + starts
                rows = strip_numbers(self.rows, first[0], first[0] + floats.shape[0])
                columns = strip_numbers(self.columns, first[1], first[1] + floats.shape[1])
                at = np.ix_(np.unique(rows), np.unique(columns))
                self._sums.sums[at] += _by_cell(summed, rows, columns)
                self._sums.squares[at] += _by_cell(np.square(summed), rows, columns)
                self._finite[at] += _by_cell(finite.astype(np.int64), rows, columns)
                self._read[at] += _by_cell(np.ones(floats.shape, np.int64), rows, columns)

    def join(self) -> None:
        """Join adjacent cells until each has values that were read."""
        while self._read.size > 1 and not self._read.all():
            halves = {axis: _joined(self._read, axis) for axis in (0, 1) if self._read.shape[axis] > 1}
            # the axis along which fewer cells stay without values; if none differs, the longer one
            axis = min(
                halves, key=lambda i: (np.count_nonzero(halves[i] == 0) / halves[i].size, halves[i].shape[i])
            )
            self._read = halves[axis]
            self._finite = _joined(self._finite, axis)
            self._sums.sums = _joined(self._sums.sums, axis)
            self._sums.squares = _joined(self._sums.squares, axis)
            if axis:
                self.columns = _thinned(self.columns)
            else:
                self.rows = _thinned(self.rows)

    def heat_map(self, view: Array, coverage: Coverage) -> HeatMap:
        """Return the result."""
        means, rms = self._sums.means(self._finite), self._sums.rms(self._finite)
        nonfinite = self._read - self._finite
        return HeatMap(view.path, view.shape, coverage, self.rows, self.columns, means, rms, nonfinite)


def _by_cell(
    values: npt.NDArray[Any], rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64]
) -> npt.NDArray[Any]:
    """Return the sums of values per cell, given the ascending cell numbers of their rows and columns."""
    row_starts = np.flatnonzero(np.diff(rows, prepend=-1))
    column_starts = np.flatnonzero(np.diff(columns, prepend=-1))
    return np.asarray(np.add.reduceat(np.add.reduceat(values, column_starts, axis=1), row_starts, axis=0))


def _joined(grid: npt.NDArray[Any], axis: int) -> npt.NDArray[Any]:
    return np.asarray(np.add.reduceat(grid, np.arange(0, grid.shape[axis], 2), axis=axis))


def _thinned(bounds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return every second bound, and the last."""
    return np.concatenate([bounds[:-1:2], bounds[-1:]])
