"""Histograms of the exponents of an array's values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy import kernels
from exmy.elements import NonFinite, as_flat, saturates
from exmy.errors import NonFiniteError
from exmy.format import Format, as_format
from exmy.threads import PART_LENGTH, check_threads, run_parts

__all__ = ["Exponents", "exponents", "exponents_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Exponents:
    """A histogram of exponents, floor(log2 |x|): the result of `exmy.exponents`.

    The sum of the histograms of an array's parts is the histogram of the whole.
    """

    lowest: int
    """The exponent of counts[0]; 0 if `counts` is empty."""
    counts: NDArray[np.int64]
    """The number of values with exponent lowest, lowest + 1, ...; the first and the last are not 0."""
    zeros: int
    """The number of values that are zero."""

    def __post_init__(self) -> None:
        self.counts.flags.writeable = False

    @property
    def highest(self) -> int:
        """The exponent of the last count; `lowest` if `counts` is empty."""
        return self.lowest + max(self.counts.size, 1) - 1

    @property
    def count(self) -> int:
        """The number of values, including zeros."""
        return self.zeros + int(self.counts.sum())

    @property
    def entropy(self) -> float:
        """The entropy of the exponents of the nonzero values, in bits; 0 if there are none."""
        share = self.counts[self.counts > 0] / max(self.counts.sum(), 1)
        return float(-(share * np.log2(share)).sum()) + 0.0

    def below(self, f: Format | str) -> float:
        """Return the share of nonzero values below 2^(1 - bias), the smallest normal of f.

        Formats with X = 0 have no normals: all their values are below 2^(1 - bias). Raise `FormatError` for a
        name of no format.
        """
        return self._share(self.counts[: max(0, 1 - as_format(f).bias - self.lowest)])

    def above(self, f: Format | str) -> float:
        """Return the share of nonzero values whose exponent exceeds that of the largest value of f.

        Raise `FormatError` for a name of no format.
        """
        top = math.frexp(as_format(f).max)[1] - 1
        return self._share(self.counts[max(0, top + 1 - self.lowest) :])

    def _share(self, part: NDArray[np.int64]) -> float:
        return float(part.sum() / max(self.counts.sum(), 1))

    def __add__(self, other: Exponents) -> Exponents:
        nonempty = [histogram for histogram in (self, other) if histogram.counts.size]
        lowest = min((histogram.lowest for histogram in nonempty), default=0)
        counts = np.zeros(max((histogram.highest + 1 - lowest for histogram in nonempty), default=0), np.int64)
        for histogram in nonempty:
            start = histogram.lowest - lowest
            counts[start : start + histogram.counts.size] += histogram.counts
        return Exponents(lowest, counts, self.zeros + other.zeros)

    def __repr__(self) -> str:
        span = f"2^{self.lowest} … 2^{self.highest}" if self.counts.size else "none"
        return f"<Exponents {span}, {self.count} values, {self.zeros} zero, {self.entropy:.2f} bits>"


def exponents(x: Any, *, nonfinite: NonFinite = "error", threads: int = 1) -> Exponents:
    """Return the histogram of the exponents floor(log2 |x|) of all nonzero values, subnormals included.

    `x`: float16, bfloat16, float32 or float64 of any shape. `nonfinite="saturate"` skips NaN and infinity; the
    default is to raise. `threads`: the maximum number of threads for a large array.
    Raise `DtypeError` for other dtypes, `NonFiniteError` for NaN and infinity.

    Examples
    --------
    >>> histogram = exmy.exponents(np.float32([0, 1, 1.5, 4]))
    >>> histogram.lowest, histogram.counts, histogram.zeros
    (0, array([2, 0, 1]), 1)
    """
    saturate, threads = saturates(nonfinite), check_threads(threads)
    elements, kind, shape = as_flat(x)
    step = PART_LENGTH if threads > 1 else max(elements.size, 1)
    starts = range(0, elements.size, step)
    rows = np.zeros((len(starts), kernels.EXPONENT_COUNT + 2), np.int64)

    def count_part(low: int, high: int) -> None:
        kernels.exponents(kind, elements[low:high], rows[low // step])

    run_parts(count_part, ((low, min(low + step, elements.size)) for low in starts), threads)
    totals = rows.sum(axis=0)
    if totals[-1] and not saturate:
        _, count, first = kernels.peak(kind, elements)
        raise NonFiniteError.at(count, first, shape)
    return exponents_of(totals)


def exponents_of(totals: NDArray[np.int64]) -> Exponents:
    """Return the histogram of the counts that `kernels.exponents` wrote."""
    counts, zeros = totals[:-2], int(totals[-2])
    indices = np.flatnonzero(counts)
    if not indices.size:
        return Exponents(0, np.zeros(0, np.int64), zeros)
    low, high = int(indices[0]), int(indices[-1]) + 1
    return Exponents(low + kernels.MIN_EXPONENT, counts[low:high].copy(), zeros)
