"""Sample: some tens of thousands of elements that stand for an array, and what a format makes of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy import kernels
from exmy.elements import Array, Kind, Layout, NonFinite, as_flat, output_dtype, saturates
from exmy.errors import FormatError, NonFiniteError
from exmy.exponents import Exponents, exponents
from exmy.fit import BIAS_LIMIT, CERTAIN, REACH, encoding_scales, without_nonfinite
from exmy.format import Format
from exmy.groups import Groups
from exmy.offsets import holding_offsets
from exmy.quantizer import Scale
from exmy.reference import clipping_limit, widen
from exmy.threads import PART

__all__ = ["RARE", "SAMPLE", "Fit", "Sample"]

SAMPLE = 1 << 16
"""Elements that are spread evenly over an array; arrays up to this size are taken whole."""

RARE = 1 << 12
"""The largest elements of a tensor that join its sample, at most."""

_RUN = 256  # elements that are taken side by side
_NEAR = 128  # elements that are looked at one by one where a rare one is among them
_LONG = 4  # rows that are taken at least, and then only in parts
_FLOAT_REACH = 125  # of offsets beside which float32 scales have normal reciprocals
_OFFSETS = np.exp2(np.arange(REACH))
_OCTAVE = np.exp2(np.arange(-8, 9) / 8)  # float scales around the best offset


@dataclass(frozen=True, slots=True)
class Fit:
    """How one format does on an array, as far as its sample says."""

    format: Format
    """With the bias that suits the sample, where all elements share an offset."""
    noise: float
    """The sum of squared errors of the whole array."""
    clipped: float
    """The share of elements beyond the largest value of their group by more than half a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Elements of an array that stand for all of them."""

    runs: Array
    """Rows of the array's elements; with groups, one group a row."""
    magnitudes: NDArray[np.float64]
    """Those of the elements of the rows."""
    kind: Kind
    groups: Groups
    """The groups of the whole array."""
    weights: NDArray[np.float64]
    """How many elements of the array each one of a row stands for."""
    peaks: NDArray[np.float64]
    """The largest magnitude of the group that each row belongs to."""
    exponents: Exponents
    """The histogram of the exponents: of the whole array where that is one group, else of the sample."""
    signal: float
    """The sum of squares of the whole array."""

    @staticmethod
    def of(x: Any, axis: int | None, block: int | None, nonfinite: NonFinite) -> Sample:
        """Return the sample of an array: all of it up to SAMPLE elements.

        Of larger ones that share one offset: 256 runs of 256 elements spread evenly, and beside them the
        largest elements of all, down to the lowest power of two that RARE of them at most reach, since a few
        outliers can decide on the format.  Else: whole groups, or parts of at least four groups where they
        are long.  NonFiniteError as in `encode` for what is met: everywhere with one offset, in the sample
        with groups.  Where they saturate, NaN and infinity count as zeros.
        """
        saturates(nonfinite)
        elements, kind, shape = as_flat(x)
        groups = Groups.of(shape, axis, block)
        if groups.axis is None:
            return _tensor_sample(elements, kind, groups, nonfinite)
        return _group_sample(elements, kind, groups, nonfinite)

    def metadata(self, scale: Scale) -> float:
        """Return the bits that the offsets or scales of rows and blocks add to each element."""
        if self.groups.axis is None or not self.groups.length:
            return 0.0
        return (32 if scale == "float" else 8) / self.groups.length

    def holds(self, f: Format, scale: Scale) -> bool:
        """Return whether f holds the values with some bias, or scale of `quantize`."""
        if scale == "none":
            return True
        limit = clipping_limit(f.layout._replace(bias=f.bias - _FLOAT_REACH if scale == "float" else -BIAS_LIMIT))
        return bool(self.peaks.max(initial=0.0) < limit)

    def fit(self, f: Format, scale: Scale) -> Fit:
        """Return how f does with the offsets or scales that `quantize` would take for these elements.

        FormatError where f cannot hold the values with any bias.
        """
        if scale not in {"search", "max", "none", "float"}:
            raise FormatError(f"scale is {scale!r}; expected 'search', 'max', 'none' or 'float'")
        if scale != "none":
            f = f.standard
        elif self.groups.axis is not None:
            raise FormatError("scale='none' shares nothing; leave out axis and block, or choose another scale")
        if not self.peaks.any():
            return Fit(f, 0.0, 0.0)
        layout = f.layout
        offsets = np.zeros(len(self.runs), np.int64) if scale == "none" else holding_offsets(self.peaks, layout)
        if scale == "float":
            offsets = np.minimum(offsets, _FLOAT_REACH - REACH)
        scales = encoding_scales(offsets, self.kind, layout)
        factors = np.ones(len(self.runs))
        if scale in {"none", "max"}:
            noise = self._noise(layout, scales, np.ones(1))[:, 0]
        else:
            tries = np.minimum(REACH, BIAS_LIMIT - layout.bias - offsets + 1)
            k, noise = self._least(layout, scales, _OFFSETS, tries, rising=True)
            scales, offsets = np.ldexp(scales, k.astype(np.int32)), offsets + k
            noise = np.ldexp(noise, 2 * k)
        if scale == "float":
            k, noise = self._least(layout, scales, _OCTAVE, np.full(len(self.runs), _OCTAVE.size), rising=False)
            factors = _OCTAVE[k]
        with np.errstate(over="ignore", under="ignore"):
            total = float(self.weights @ np.ldexp(noise, -2 * offsets))
        clipped = self._clipped(np.ldexp(clipping_limit(layout) / factors, -offsets))
        if self.groups.axis is None and scale in {"search", "max"}:
            f = f.with_bias(f.bias + int(offsets[0]))
        return Fit(f, total, clipped)

    def _noise(self, layout: Layout, scales: Array, factors: Array) -> NDArray[np.float64]:
        """Return the squared error of each row with each of the factors, in units of the row times both."""
        out = np.empty((len(self.runs), factors.size))
        kernels.noise(self.kind, layout, self.runs, scales, factors, out)
        return out

    def _least(
        self, layout: Layout, scales: Array, factors: Array, tries: NDArray[np.int64], *, rising: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return as `kernels.least` does, one factor for all rows where they are of one group.

        The errors are in units of the row times its scale.
        """
        if self.groups.axis is None:
            return self._least_of_all(layout, scales, factors[: tries[0]], rising=rising)
        found, error = np.empty(len(self.runs), np.int64), np.empty(len(self.runs))
        kernels.least(self.kind, layout, self.runs, scales, factors, tries, found, error, rising=rising)
        return found, error

    def _least_of_all(
        self, layout: Layout, scales: Array, factors: Array, *, rising: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        best, least, errors = 0, math.inf, np.full(len(self.runs), math.inf)
        for k, factor in enumerate(factors):
            each = self._noise(layout, scales, factors[k : k + 1])[:, 0] / (factor * factor)
            error = float(self.weights @ each)
            if rising and error >= CERTAIN * least:
                break
            if error < least:
                best, least, errors = k, error, each
        return np.full(len(self.runs), best), errors

    def _clipped(self, limits: NDArray[np.float64]) -> float:
        """Return the share of elements beyond the limits of their rows."""
        if not (self.peaks > limits).any():
            return 0.0
        beyond = np.count_nonzero(self.magnitudes > limits[:, None], axis=1)
        return float(self.weights @ beyond) / math.prod(self.groups.shape)


def _tensor_sample(elements: Array, kind: Kind, groups: Groups, nonfinite: NonFinite) -> Sample:
    typed = elements.view(output_dtype(kind.name.lower())).reshape(groups.shape)
    histogram = exponents(typed, nonfinite=nonfinite)
    size = elements.size
    bad = size > histogram.count
    if size <= SAMPLE:
        runs = (without_nonfinite(elements, kind) if bad else elements).reshape(-1, max(size, 1))
        peaks, weights = np.zeros(len(runs)), np.ones(len(runs))
        if size:
            kernels.peaks(kind, runs, peaks)
        return _sample(runs, kind, groups, weights, peaks, histogram)
    reached = histogram.counts[::-1].cumsum()
    octaves = int(np.searchsorted(reached, RARE, "right"))
    least = float(np.ldexp(1.0, histogram.highest + 1 - octaves))
    rare, peak = _rare(elements, kind, least)
    starts = np.linspace(0, size - _RUN, SAMPLE // _RUN).astype(np.int64)
    spread = elements[starts[:, None] + np.arange(_RUN)].reshape(-1)
    if bad:
        spread = without_nonfinite(spread, kind)
    frequent = np.abs(widen(spread, kind)) < least
    spread[~frequent] = 0  # the rare ones speak for themselves
    runs = np.zeros((SAMPLE // RARE + 1, RARE), elements.dtype)
    runs[:-1].reshape(-1)[:] = spread
    runs[-1, : rare.size] = rare
    weights = np.full(len(runs), (size - rare.size) / int(frequent.sum()))
    weights[-1] = 1.0
    return _sample(runs, kind, groups, weights, np.full(len(runs), peak), histogram)


def _rare(elements: Array, kind: Kind, least: float) -> tuple[Array, float]:
    """Return the elements from a magnitude on, in order, and the largest magnitude; of those that are finite."""
    found, peak = [], 0.0
    for start in range(0, elements.size, PART):
        part = elements[start : start + PART]
        rows = part[: part.size // _NEAR * _NEAR].reshape(-1, _NEAR)
        peaks = np.zeros(len(rows))
        if rows.size:
            kernels.peaks(kind, rows, peaks)
        near = ~(peaks < least)  # which is so where a row is not finite
        peak = max(peak, float(peaks[~near].max(initial=0.0)))
        for some in (rows[near].reshape(-1), part[rows.size :]):
            magnitudes = np.abs(widen(some, kind))
            finite = np.isfinite(magnitudes)
            found.append(some[finite & (magnitudes >= least)])
            peak = max(peak, float(magnitudes[finite].max(initial=0.0)))
    return np.concatenate(found), peak


def _group_sample(elements: Array, kind: Kind, groups: Groups, nonfinite: NonFinite) -> Sample:
    runs = _runs(elements, groups)
    peaks = np.zeros(len(runs))
    if runs.size:
        kernels.peaks(kind, runs, peaks)
        if not np.isfinite(peaks).all():
            if not saturates(nonfinite):
                _, bad, first = kernels.peak(kind, elements)
                index = tuple(int(i) for i in np.unravel_index(first, groups.shape))
                raise NonFiniteError(bad, elements.size, index)
            runs = without_nonfinite(runs, kind)
            kernels.peaks(kind, runs, peaks)
    weights = np.full(len(runs), elements.size / max(runs.size, 1))
    return _sample(runs, kind, groups, weights, peaks, exponents(widen(runs, kind)))


def _sample(
    runs: Array,
    kind: Kind,
    groups: Groups,
    weights: NDArray[np.float64],
    peaks: NDArray[np.float64],
    histogram: Exponents,
) -> Sample:
    magnitudes = np.abs(widen(runs, kind))
    with np.errstate(over="ignore", under="ignore"):
        signal = float(weights @ np.einsum("ij,ij->i", magnitudes, magnitudes))
    return Sample(runs, magnitudes, kind, groups, weights, peaks, histogram, signal)


def _runs(elements: Array, groups: Groups) -> Array:
    """Return groups of the array, one a row: all, or some spread evenly, or parts of some."""
    count, length, inner = math.prod(groups.counts), groups.length, groups.inner
    if elements.size <= SAMPLE:
        if not elements.size:
            return elements.reshape(0, 1)
        return groups.runs(elements, 0, count)
    if length > SAMPLE // _LONG:
        rows = min(count, _LONG)
        starts = np.linspace(0, length - _RUN, SAMPLE // _RUN // rows).astype(np.int64)
        along = (starts[:, None] + np.arange(_RUN)).reshape(-1)
    else:
        rows = min(count, SAMPLE // length)
        along = np.arange(length)
    group = np.linspace(0, count - 1, rows).astype(np.int64)
    first = group // inner * (length * inner) + group % inner
    return elements[first[:, None] + along * inner]
