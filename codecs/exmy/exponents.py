"""Exponents: how the magnitudes of an array are spread over the powers of two."""

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
from exmy.threads import PART, check_threads, run_parts

__all__ = ["Exponents", "exponents"]


@dataclass(frozen=True, slots=True, eq=False)
class Exponents:
    """A histogram of exponents, floor(log2 |x|): what `exmy.exponents` returns.

    Those of the parts of an array add up to that of the whole.
    """

    lowest: int
    """The exponent of counts[0]; 0 where there are no counts."""
    counts: NDArray[np.int64]
    """How many values have the exponents lowest, lowest + 1, ...; the first and the last are not 0."""
    zeros: int
    """How many values are zero."""

    def __post_init__(self) -> None:
        self.counts.flags.writeable = False

    @property
    def highest(self) -> int:
        """The exponent of the last count."""
        return self.lowest + max(self.counts.size, 1) - 1

    @property
    def count(self) -> int:
        """All values, the zeros included."""
        return self.zeros + int(self.counts.sum())

    @property
    def entropy(self) -> float:
        """The entropy of the exponents of the values that are not zero, in bits; 0 where there are none."""
        share = self.counts[self.counts > 0] / max(self.counts.sum(), 1)
        return float(-(share * np.log2(share)).sum()) + 0.0

    def below(self, f: Format | str) -> float:
        """Return the share of nonzero values under 2^(1 - bias), the smallest normal of f.

        For X = 0, whose values are all subnormal, these are the values that its grid reaches at all.
        """
        return self._share(self.counts[: max(0, 1 - as_format(f).bias - self.lowest)])

    def above(self, f: Format | str) -> float:
        """Return the share of nonzero values whose exponent is above that of the largest value of f."""
        top = math.frexp(as_format(f).max)[1] - 1
        return self._share(self.counts[max(0, top + 1 - self.lowest) :])

    def _share(self, part: NDArray[np.int64]) -> float:
        return float(part.sum() / max(self.counts.sum(), 1))

    def __add__(self, other: Exponents) -> Exponents:
        both = [histogram for histogram in (self, other) if histogram.counts.size]
        lowest = min((histogram.lowest for histogram in both), default=0)
        counts = np.zeros(max((histogram.highest + 1 - lowest for histogram in both), default=0), np.int64)
        for histogram in both:
            at = histogram.lowest - lowest
            counts[at : at + histogram.counts.size] += histogram.counts
        return Exponents(lowest, counts, self.zeros + other.zeros)

    def __repr__(self) -> str:
        spread = f"2^{self.lowest} … 2^{self.highest}" if self.counts.size else "none"
        return f"<Exponents {spread}, {self.count} values, {self.zeros} zero, {self.entropy:.2f} bits>"


def exponents(x: Any, *, nonfinite: NonFinite = "error", threads: int = 1) -> Exponents:
    """Return the histogram of the exponents floor(log2 |x|); subnormals have their true ones.

    x: float16, bfloat16, float32 or float64 of any shape (DtypeError otherwise).  NonFiniteError for NaN and
    infinity, which nonfinite="saturate" leaves out.  threads: how many may share the work on a big array.
    """
    saturate, threads = saturates(nonfinite), check_threads(threads)
    elements, kind, shape = as_flat(x)
    step = PART if threads > 1 else max(elements.size, 1)
    starts = range(0, elements.size, step)
    rows = np.zeros((len(starts), kernels.EXPONENTS + 2), np.int64)

    def part(low: int, high: int) -> None:
        kernels.exponents(kind, elements[low:high], rows[low // step])

    run_parts(part, ((low, min(low + step, elements.size)) for low in starts), threads)
    counts = rows.sum(axis=0)
    if counts[-1] and not saturate:
        _, bad, first = kernels.peak(kind, elements)
        raise NonFiniteError(bad, elements.size, tuple(int(i) for i in np.unravel_index(first, shape)))
    some = np.flatnonzero(counts[: kernels.EXPONENTS])
    if not some.size:
        return Exponents(0, np.zeros(0, np.int64), int(counts[kernels.EXPONENTS]))
    low, high = int(some[0]), int(some[-1]) + 1
    return Exponents(low + kernels.LEAST_EXPONENT, counts[low:high].copy(), int(counts[kernels.EXPONENTS]))
