"""Weighted least squares: the importance of elements when offsets and scales are chosen, in NumPy.

If all elements of a group have the same importance, the kernels measure the unweighted errors: the same offset or
scale minimizes both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy import kernels, reference
from exmy.elements import Array, Kind, Layout
from exmy.errors import DtypeError, FormatError, SizeError
from exmy.groups import Groups

__all__ = ["STOP_RATIO", "Importance", "RunWeights", "best_factors", "noise", "squared_errors"]

STOP_RATIO = 2.001
"""A search stops if the error exceeds the least so far by this factor: no greater offset wins (see _search.h)."""


@dataclass(frozen=True, slots=True, eq=False)
class Importance:
    """The weights of the squared errors of an array's elements; they are never copied as a whole."""

    weights: Array
    """The weights, of the shape of the array; a view of what the caller passed."""
    unit: float
    """The number that weights are divided by."""

    @staticmethod
    def from_argument(importance: Any, shape: tuple[int, ...]) -> Importance:
        """Return the importance of the elements of an array, or of a slab of it, whose weights may all be 0.

        Raise `DtypeError` if the argument is not an array of numbers, `FormatError` if one is negative or not
        finite, `SizeError` if they do not broadcast to the shape.
        """
        try:
            weights = np.asarray(importance)
            if weights.dtype.kind in "cSUTmM":  # NumPy would convert them, without their imaginary parts
                raise TypeError
            if weights.dtype.kind not in "biuf":
                weights = weights.astype(np.float64)
        except (TypeError, ValueError):
            raise DtypeError(f"importance is {type(importance).__name__}; expected an array of numbers") from None
        if weights.size and not 0 <= weights.min() <= weights.max() < math.inf:
            raise FormatError(
                "importance has a negative or non-finite number; expected finite numbers, at least 0"
            )
        try:
            return Importance(np.broadcast_to(weights, shape), 1.0)
        except ValueError:
            raise SizeError(
                f"importance has shape {weights.shape}, which does not broadcast to the array's, {shape}"
            ) from None

    @staticmethod
    def from_array(importance: Any, shape: tuple[int, ...]) -> Importance | None:
        """Return the importance of the elements of a whole array, or None if all have the same.

        Raise as `from_argument` does, and `FormatError` if all weights are 0.
        """
        if importance is None:
            return None
        weights = Importance.from_argument(importance, shape).weights
        if not weights.size:
            return None
        least, greatest = float(weights.min()), float(weights.max())
        if greatest == 0:
            raise FormatError("importance is 0 for all elements; expected a positive number among them")
        return None if least == greatest else Importance(weights, greatest)

    def elements(self, low: int, high: int) -> NDArray[np.float64]:
        """Return the weights of the elements low ... high-1 in C order."""
        return self._scaled(self.weights.flat[low:high])

    def runs(self, groups: Groups, low: int, high: int) -> RunWeights:
        """Return the weights of the groups low ... high-1, one row each."""
        length, inner = groups.length, groups.inner
        if inner == 1:
            return RunWeights(self.elements(low * length, high * length).reshape(high - low, length))
        group = np.arange(low, high)
        first = group // inner * (length * inner) + group % inner
        return self.rows(first[:, None] + np.arange(length) * inner)

    def rows(self, positions: NDArray[np.int64]) -> RunWeights:
        """Return the weights of the elements at these positions in C order, a matrix."""
        index = np.unravel_index(positions, self.weights.shape)
        return RunWeights(self._scaled(self.weights[index]))

    def _scaled(self, weights: Array) -> NDArray[np.float64]:
        scaled: NDArray[np.float64] = weights.astype(np.float64) / self.unit
        return scaled


class RunWeights:
    """The weights of the elements of runs, a matrix of one group per row."""

    def __init__(self, matrix: NDArray[np.float64]) -> None:
        self.matrix = matrix
        self.equal: NDArray[np.bool_] = matrix.min(axis=1, initial=math.inf) >= matrix.max(axis=1, initial=0)
        """Whether all elements of a row have the same weight; `noise` and `best_factors` then use the weight 1."""

    @property
    def shared(self) -> NDArray[np.float64]:
        """The factor that errors of `noise` and `best_factors` still need: the weight shared by a row, else 1."""
        return np.where(self.equal, self.matrix[:, 0], 1.0) if self.matrix.size else np.ones(len(self.matrix))


def noise(
    kind: Kind, layout: Layout, runs: Array, weights: RunWeights | None, scales: Array, factors: Array, out: Array
) -> None:
    """Write the sums of weighted squared errors, otherwise as `kernels.noise` does."""
    if weights is None or weights.equal.all():
        kernels.noise(kind, layout, runs, scales, factors, out)
        return
    kernel, rows = np.flatnonzero(weights.equal), np.flatnonzero(~weights.equal)
    if kernel.size:
        unweighted = np.empty((kernel.size, factors.size))
        kernels.noise(kind, layout, runs[kernel], scales[kernel], factors, unweighted)
        out[kernel] = unweighted
    scaled = _scaled_runs(kind, runs[rows], scales[rows])
    for k, factor in enumerate(factors):
        out[rows, k] = _weighted_noise(layout, scaled * factor, weights.matrix[rows])


def best_factors(
    kind: Kind,
    layout: Layout,
    runs: Array,
    weights: RunWeights | None,
    scales: Array,
    factors: Array,
    tries: Array,
    best: Array,
    error: Array,
    *,
    rising: bool,
) -> None:
    """Write the factors of least weighted error, and that error, otherwise as `kernels.best_factors` does."""
    if weights is None or weights.equal.all():
        kernels.best_factors(kind, layout, runs, scales, factors, tries, best, error, rising=rising)
        return
    kernel, rows = np.flatnonzero(weights.equal), np.flatnonzero(~weights.equal)
    if kernel.size:
        index, least = np.empty(kernel.size, np.int64), np.empty(kernel.size)
        part = (runs[kernel], scales[kernel], factors, tries[kernel], index, least)
        kernels.best_factors(kind, layout, *part, rising=rising)
        best[kernel], error[kernel] = index, least
    scaled, matrix = _scaled_runs(kind, runs[rows], scales[rows]), weights.matrix[rows]
    best[rows], error[rows] = 0, math.inf
    for k, factor in enumerate(factors):
        live = k < tries[rows]
        rows, scaled, matrix = rows[live], scaled[live], matrix[live]
        if not rows.size:
            break
        errors, least = _weighted_noise(layout, scaled * factor, matrix) / (factor * factor), error[rows]
        better = (errors < least) | ((errors == least) & (factor < factors[best[rows]]))
        best[rows[better]], error[rows[better]] = k, errors[better]
        if rising:
            live = errors < STOP_RATIO * least
            rows, scaled, matrix = rows[live], scaled[live], matrix[live]


def squared_errors(
    kind: Kind, layout: Layout, src: Array, weights: NDArray[np.float64] | None, count: int
) -> list[float]:
    """Return the sums of weighted squared errors, otherwise as `kernels.squared_errors` does."""
    if weights is None or not src.size:
        return kernels.squared_errors(kind, layout, src, count)
    if weights.min() == weights.max():
        return [float(weights[0]) * error for error in kernels.squared_errors(kind, layout, src, count)]
    wide = reference.widen(src, kind)[None]
    biases = range(layout.bias, layout.bias + count)
    return [float(_weighted_noise(layout._replace(bias=b), wide, weights[None])[0]) for b in biases]


def _scaled_runs(kind: Kind, runs: Array, scales: Array) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = reference.widen(runs, kind) * scales[:, None].astype(np.float64)
    return scaled


def _weighted_noise(
    layout: Layout, values: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the sum of weighted squared errors of each row."""
    rounded = np.empty_like(values)
    kernels.round(Kind.FLOAT64, layout, values.reshape(-1), rounded.reshape(-1), saturate=True)
    rounded -= values
    sums: NDArray[np.float64] = np.einsum("ij,ij,ij->i", rounded, rounded, weights)
    return sums
