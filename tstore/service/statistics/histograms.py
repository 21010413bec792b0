"""Histograms of values between bounds that a few outliers do not move."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.format.plain_text import pluralize
from tstore.service.statistics.numbers import Floats

__all__ = ["Histogram", "ValueBins", "value_bins"]

_TAIL = 0.001  # the share of values on each side that may be outliers
_MARGIN = 0.25  # margin on each side, relative to the distance of these quantiles; fits a normal distribution
_LARGEST_INTEGER = 2.0**51  # 0.5 can be added exactly up to here
_RANKED = (1 << 18) - 1  # values from which quantiles are computed
_BELOW_ONE = math.nextafter(1, 0)
_NARROWEST = 1e-12  # minimum width, relative to the largest magnitude, so that bounds are distinct


@dataclass(frozen=True, eq=False)
class Histogram:
    """The number of values between bounds; finite values only."""

    edges: npt.NDArray[np.float64]
    """The bounds of the bins, ascending; the last bin includes its upper bound."""
    counts: npt.NDArray[np.int64]
    """The number of values in each bin."""
    below: int
    """The number of values below the first bound."""
    above: int
    """The number of values above the last bound."""

    def __repr__(self) -> str:
        low, high = (self.edges[0], self.edges[-1]) if len(self.edges) else (math.nan, math.nan)
        bins = pluralize(len(self.counts), "bin")
        return f"<Histogram {low:.3g} … {high:.3g}, {bins}, {self.below + self.above:,} outside>"

    def document(self) -> dict[str, Any]:
        """Return the histogram as JSON values."""
        return {
            "edges": self.edges.tolist(),
            "counts": self.counts.tolist(),
            "below": self.below,
            "above": self.above,
        }


class ValueBins:
    """The bins of a histogram, to which values are added; there are none for an array without finite values.

    The bounds are divided by 2^exponent, so that their differences neither overflow nor underflow.
    """

    def __init__(self, edges: npt.NDArray[np.float64], exponent: int) -> None:
        self._edges = edges
        self._exponent = exponent
        self._counts = np.zeros(max(0, len(edges) - 1), np.int64)
        self._below = self._above = 0

    def add(self, values: Floats) -> None:
        """Count finite values."""
        if not len(self._counts):
            return
        with np.errstate(over="ignore"):  # outliers become infinite, and are above or below
            scaled = np.ldexp(values.ravel().astype(np.float64), -self._exponent)
        low, high = self._edges[0], self._edges[-1]
        self._below += int(np.count_nonzero(scaled < low))
        self._above += int(np.count_nonzero(scaled > high))
        self._counts += np.histogram(scaled, len(self._counts), (low, high))[0]

    def histogram(self) -> Histogram:
        """Return the counts."""
        return Histogram(np.ldexp(self._edges, self._exponent), self._counts, self._below, self._above)


def value_bins(sample: Sequence[Floats], bins: int, steps: float | None) -> ValueBins:
    """Return bins for values like these finite ones; `steps` is the distance of values that are multiples of it.

    The bounds exclude outliers: values far beyond nearly all others.
    """
    values = np.concatenate([part.ravel().astype(np.float64) for part in sample]) if sample else np.zeros(0)
    if not values.size:
        return ValueBins(np.zeros(0), 0)
    least, most = float(values.min()), float(values.max())
    some = values[:: -(-values.size // _RANKED)]
    low, high = map(float, np.quantile(some, [_TAIL, 1 - _TAIL], method="nearest"))
    margin = _MARGIN * high - _MARGIN * low  # no difference of bounds, which might overflow
    low, high = max(least, low - margin), min(most, high + margin)
    exponent = math.frexp(max(abs(low), abs(high)))[1]
    low, high = math.ldexp(low, -exponent), math.ldexp(high, -exponent)
    step = 0.0 if steps is None else math.ldexp(steps, -exponent)
    if step and high - low < bins * step and max(-low, high) < _LARGEST_INTEGER * step:
        # a bin for each integer
        low, high = math.floor(low / step) * step, math.ceil(high / step) * step
        count = max(1, round((high - low) / step) + 1)
        return ValueBins(np.array([(low / step - 0.5 + i) * step for i in range(count + 1)]), exponent)
    narrowest = _NARROWEST * max(abs(low), abs(high))
    if high - low <= narrowest:
        half = max(abs(low) / 2, narrowest) if low else 0.5
        low, high = low - half, high + half
        if exponent == sys.float_info.max_exp:  # otherwise a bound would be infinite
            low, high = max(low, -_BELOW_ONE), min(high, _BELOW_ONE)
    edges: npt.NDArray[np.float64] = np.linspace(low, high, bins + 1)
    return ValueBins(edges, exponent)
