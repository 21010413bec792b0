"""The error of an approximation of an array: SQNR and the largest errors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from exmy import kernels
from exmy.elements import Array, Kind, as_flat
from exmy.errors import DtypeError, SizeError
from exmy.threads import PART_LENGTH, check_threads, run_parts

__all__ = ["Difference", "compare", "decibels", "energy", "sqnr"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The error of an approximation y of an original x: the result of `exmy.compare`.

    The sum of the differences of an array's parts is the difference of the whole.
    """

    count: int
    """The number of elements compared."""
    signal: float
    """The sum of x^2."""
    noise: float
    """The sum of (x - y)^2."""
    largest_error: float
    """The largest |x - y|; NaN if any x - y is NaN, 0 for no elements."""
    largest_relative: float
    """The largest |x - y| / |x| over finite x != 0; NaN if any x - y is NaN, 0 if there is no such x."""

    @staticmethod
    def from_totals(count: int, totals: Iterable[float]) -> Difference:
        """Return the difference with the totals of `kernels.compare`, whose maxima ignore NaN."""
        signal, noise, largest, relative = totals
        if math.isnan(noise):
            largest = relative = math.nan
        return Difference(count, signal, noise, largest, relative)

    @property
    def sqnr(self) -> float:
        """The signal-to-quantization-noise ratio in dB: see `exmy.sqnr`."""
        if self.noise == 0 and self.largest_error > 0:
            return math.nan  # the squared errors underflow float64
        return decibels(self.signal, self.noise)

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.count + other.count,
            self.signal + other.signal,
            self.noise + other.noise,
            _larger_or_nan(self.largest_error, other.largest_error),
            _larger_or_nan(self.largest_relative, other.largest_relative),
        )


def _larger_or_nan(a: float, b: float) -> float:
    return math.nan if math.isnan(a + b) else max(a, b)


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise): inf for noise 0, else -inf for signal 0, else NaN if one is not finite."""
    if noise == 0:
        return math.inf
    if signal == 0:
        return -math.inf
    return 10 * math.log10(signal / noise) if math.isfinite(signal + noise) else math.nan


def compare(x: Any, y: Any, *, threads: int = 1) -> Difference:
    """Return the error of y as an approximation of x.

    `x`, `y`: arrays of the same shape, of any real dtypes. `threads`: the maximum number of threads for large
    arrays. Sums are float64 in a fixed order, so the result does not depend on the number of threads.
    Raise `SizeError` for different shapes, `DtypeError` for other dtypes.

    Examples
    --------
    >>> error = exmy.compare(np.float64([1, 2, -4]), np.float64([1, 2, -3]))
    >>> error.largest_error, error.largest_relative, error.sqnr
    (1.0, 0.25, 13.22...)
    """
    original, approximation = np.asarray(x), np.asarray(y)
    if original.shape != approximation.shape:
        raise SizeError(f"x has shape {original.shape} and y has {approximation.shape}; expected the same")
    for array in (original, approximation):
        if array.dtype.kind in "cOSUmM":
            raise DtypeError(f"arrays of dtype {array.dtype.name!r} cannot be compared; expected real numbers")
    threads = check_threads(threads)
    a, b, kind = _flatten(original, approximation)
    starts = range(0, a.size, PART_LENGTH)
    differences: list[Difference] = [Difference(0, 0.0, 0.0, 0.0, 0.0)] * len(starts)

    def compare_part(low: int, high: int) -> None:
        if kind is None:
            wide_a, wide_b = a[low:high].astype(np.float64), b[low:high].astype(np.float64)
            totals = kernels.compare(Kind.FLOAT64, wide_a, wide_b)
        else:
            totals = kernels.compare(kind, a[low:high], b[low:high])
        differences[low // PART_LENGTH] = Difference.from_totals(high - low, totals)

    run_parts(compare_part, ((low, min(low + PART_LENGTH, a.size)) for low in starts), threads)
    return sum(differences, Difference(0, 0.0, 0.0, 0.0, 0.0))


def energy(x: Any) -> float:
    """Return the sum of the squares of x; NaN or infinity if x has any, or if the squares overflow.

    `x`: float16, bfloat16, float32 or float64 of any shape. Raise `DtypeError` for other dtypes.
    """
    elements, kind, _ = as_flat(x)
    return kernels.energy(kind, elements)


def _flatten(x: Array, y: Array) -> tuple[Array, Array, Kind | None]:
    """Return both arrays flat, and their kind, or None if they need conversion to float64."""
    if x.dtype == y.dtype and x.dtype.name in {kind.name.lower() for kind in Kind}:
        a, kind, _ = as_flat(x)
        return a, as_flat(y)[0], kind
    return x.reshape(-1), y.reshape(-1), None


def sqnr(x: Any, y: Any) -> float:
    """Return the signal-to-quantization-noise ratio 10 log10(sum x^2 / sum (x-y)^2) in dB.

    `x`: the original, `y`: the approximation, as for `compare`. Infinity if they are finite and equal, or empty;
    else NaN if all squared errors underflow float64 (errors below 1e-162); else -infinity if the squares of x are
    all 0; else NaN if x or y has a NaN or infinity, or if the squares overflow (magnitudes beyond 1e154). Raise as
    `compare` does.
    """
    return compare(x, y).sqnr
