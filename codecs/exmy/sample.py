"""A sample of an array, from which the error of a format is estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy import importance as weighted
from exmy import kernels
from exmy.elements import Array, Kind, Layout, NonFinite, as_flat, output_dtype, saturates
from exmy.errors import FormatError, NonFiniteError
from exmy.exponents import Exponents, exponents
from exmy.fit import BIAS_LIMIT, OFFSETS_TRIED, encoding_scales, zero_nonfinite
from exmy.format import Format
from exmy.groups import Groups
from exmy.importance import STOP_RATIO, Importance, RunWeights
from exmy.offsets import MAX_FLOAT_OFFSET, largest_unclipped_offsets
from exmy.quantizer import Scale, check_scale
from exmy.reference import clipping_limit, widen
from exmy.scales import is_float_scale, scales_size
from exmy.threads import PART_LENGTH

__all__ = ["MAX_OUTLIERS", "SAMPLE_SIZE", "Estimate", "Sample"]

SAMPLE_SIZE = 1 << 16
"""The maximum number of elements in a sample, besides the outliers of a tensor. Smaller arrays are used whole."""

MAX_OUTLIERS = 1 << 12
"""The maximum number of a tensor's largest elements that are added to its sample."""

_RUN_LENGTH = 256  # consecutive elements per sampled run
_SCAN_LENGTH = 128  # consecutive elements, checked one by one only if any may be an outlier
_LONG_ROWS = 4  # rows in a sample of long rows; only parts of each row are sampled
_OFFSET_FACTORS = np.exp2(np.arange(OFFSETS_TRIED))
_SCALE_FACTORS = np.exp2(np.arange(-8, 9) / 8)  # float scales around the best offset


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated error of one format on an array."""

    format: Format
    """The format; its bias is unchanged with scale "none", fitted if all elements share one, else standard."""
    noise: float
    """The estimated sum of squared errors of the whole array."""
    clipped: float
    """The estimated share of elements that are clipped: see `Quantized.count_clipped`."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A weighted sample of the elements of an array."""

    runs: Array
    """A matrix of sampled elements; each row has elements of one group."""
    magnitudes: NDArray[np.float64]
    """The magnitudes of the elements of `runs`."""
    kind: Kind
    """The float type of `runs`."""
    groups: Groups
    """The scale groups of the whole array."""
    weights: NDArray[np.float64]
    """The weight of each row: the number of array elements that each of its elements represents."""
    peaks: NDArray[np.float64]
    """For each row, the largest magnitude of its group, or of the sampled part of a long group."""
    exponents: Exponents
    """The histogram of exponents: of the whole array if all elements share one offset, else of the sample."""
    importance: RunWeights | None
    """The weights of the squares and squared errors of the elements of `runs`; None if all have the same."""
    signal: float
    """The estimated sum of squares of the whole array."""

    @staticmethod
    def from_array(
        x: Any, axis: int | None, block: int | None, nonfinite: NonFinite, importance: Any = None
    ) -> Sample:
        """Return a sample of an array. Arrays of up to SAMPLE_SIZE elements are used whole.

        If all elements of a larger array share one offset, the sample is 256 evenly spaced runs of 256 elements,
        and the largest elements of the array, because a few outliers can decide which format is best: those of
        magnitude 2^k or more, with the smallest k that leaves at most MAX_OUTLIERS. With rows or blocks, the
        sample is whole groups, or parts of up to four groups if each has more than 16,384 elements.

        Raise `NonFiniteError` for NaN and infinity: anywhere in x if all elements share one offset, else only in
        the sample. With `nonfinite="saturate"` they count as zeros.
        """
        saturates(nonfinite)  # raises for an unknown choice
        elements, kind, shape = as_flat(x)
        groups = Groups.from_shape(shape, axis, block)
        weights = Importance.from_array(importance, shape)
        if groups.axis is None:
            return _tensor_sample(elements, kind, groups, nonfinite, weights)
        return _group_sample(elements, kind, groups, nonfinite, weights)

    def metadata_bits(self, scale: Scale) -> float:
        """Return the bits per element that the offsets or scales of rows and blocks take."""
        count, size = math.prod(self.groups.counts), math.prod(self.groups.shape)
        if self.groups.axis is None or not size:
            return 0.0
        return 8 * (scales_size(scale, self.groups) if is_float_scale(scale) else count) / size

    def is_within_range(self, f: Format, scale: Scale) -> bool:
        """Return whether some allowed bias or float scale avoids clipping; true for "none", which may clip."""
        if scale == "none":
            return True
        limit = clipping_limit(
            f.layout._replace(bias=f.bias - MAX_FLOAT_OFFSET if is_float_scale(scale) else -BIAS_LIMIT)
        )
        return bool(self.peaks.max(initial=0.0) < limit)

    def estimate(self, f: Format, scale: Scale) -> Estimate:
        """Return the estimated error of f with the offsets or scales that `quantize` would choose for the sample.

        Raise `FormatError` for an unsuitable `scale`, and if no bias of f can represent the largest values.
        """
        scale = check_scale(scale, self.groups.axis, self.groups.block)
        if isinstance(scale, float):
            raise FormatError(f"scale is {scale!r}; expected a scale that is fitted to the values")
        if scale != "none":
            f = f.standard
        if not self.peaks.any():
            return Estimate(f, 0.0, 0.0)
        layout = f.layout
        offsets = (
            np.zeros(len(self.runs), np.int64)
            if scale == "none"
            else largest_unclipped_offsets(self.peaks, layout)
        )
        if is_float_scale(scale):
            offsets = np.minimum(offsets, MAX_FLOAT_OFFSET - OFFSETS_TRIED)
        scales = encoding_scales(offsets, self.kind, layout)
        factors = np.ones(len(self.runs))
        if scale in {"none", "max"}:
            noise = self._noise(layout, scales, np.ones(1))[:, 0]
        else:
            tries = np.minimum(OFFSETS_TRIED, BIAS_LIMIT - layout.bias - offsets + 1)
            best, noise = self._best_factors(layout, scales, _OFFSET_FACTORS, tries, rising=True)
            with np.errstate(over="ignore"):  # the scale of subnormal values overflows; only float scales use it
                scales = np.ldexp(scales, best.astype(np.int32))
            offsets, noise = offsets + best, np.ldexp(noise, 2 * best)
        if is_float_scale(scale):
            all_tries = np.full(len(self.runs), _SCALE_FACTORS.size)
            best, noise = self._best_factors(layout, scales, _SCALE_FACTORS, all_tries, rising=False)
            factors = _SCALE_FACTORS[best]
        with np.errstate(over="ignore", under="ignore"):
            total = float(self.weights @ np.ldexp(noise, -2 * offsets))
        clipped = self._clipped_share(np.ldexp(clipping_limit(layout) / factors, -offsets))
        if self.groups.axis is None and scale in {"search", "max"}:
            f = f.with_bias(f.bias + int(offsets[0]))
        return Estimate(f, total, clipped)

    def _noise(self, layout: Layout, scales: Array, factors: Array) -> NDArray[np.float64]:
        """Return the sums of squared errors of encoding the rows multiplied by their scales and by each factor."""
        out = np.empty((len(self.runs), factors.size))
        weighted.noise(self.kind, layout, self.runs, self.importance, scales, factors, out)
        return out if self.importance is None else out * self.importance.shared[:, None]

    def _best_factors(
        self, layout: Layout, scales: Array, factors: Array, tries: NDArray[np.int64], *, rising: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the index of each row's best factor, and its error: see `kernels.best_factors`.

        If all elements share an offset, all rows share a factor. The errors are of the rows times their scales.
        """
        if self.groups.axis is None:
            return self._best_shared_factor(layout, scales, factors[: tries[0]], rising=rising)
        best, error = np.empty(len(self.runs), np.int64), np.empty(len(self.runs))
        part = (scales, factors, tries, best, error)
        weighted.best_factors(self.kind, layout, self.runs, self.importance, *part, rising=rising)
        return best, error if self.importance is None else error * self.importance.shared

    def _best_shared_factor(
        self, layout: Layout, scales: Array, factors: Array, *, rising: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the index of the factor with the least total error, once for each row, and each row's error."""
        best, least, errors = 0, math.inf, np.full(len(self.runs), math.inf)
        for k, factor in enumerate(factors):
            row_errors = self._noise(layout, scales, factors[k : k + 1])[:, 0] / (factor * factor)
            error = float(self.weights @ row_errors)
            if rising and error >= STOP_RATIO * least:
                break
            if error < least:
                best, least, errors = k, error, row_errors
        return np.full(len(self.runs), best), errors

    def _clipped_share(self, limits: NDArray[np.float64]) -> float:
        """Return the estimated share of elements beyond the limits of their rows."""
        if not (self.peaks > limits).any():
            return 0.0
        beyond = np.count_nonzero(self.magnitudes > limits[:, None], axis=1)
        return float(self.weights @ beyond) / math.prod(self.groups.shape)


def _tensor_sample(
    elements: Array, kind: Kind, groups: Groups, nonfinite: NonFinite, importance: Importance | None
) -> Sample:
    """Return a sample of an array whose elements all share one offset."""
    array = elements.view(output_dtype(kind.name.lower())).reshape(groups.shape)
    histogram = exponents(array, nonfinite=nonfinite)
    size = elements.size
    has_nonfinite = size > histogram.count
    if size <= SAMPLE_SIZE:
        runs = (zero_nonfinite(elements, kind) if has_nonfinite else elements).reshape(-1, max(size, 1))
        peaks, weights = np.zeros(len(runs)), np.ones(len(runs))
        if size:
            kernels.peaks(kind, runs, peaks)
        run_weights = None if importance is None else importance.runs(groups, 0, 1)
        return _make_sample(runs, kind, groups, weights, peaks, histogram, run_weights)
    cumulative = histogram.counts[::-1].cumsum()  # from the highest exponent down
    octaves = int(np.searchsorted(cumulative, MAX_OUTLIERS, "right"))  # how many octaves are outliers
    threshold = float(np.ldexp(1.0, histogram.highest + 1 - octaves))
    positions, peak = _find_outliers(elements, kind, threshold)
    starts = np.linspace(0, size - _RUN_LENGTH, SAMPLE_SIZE // _RUN_LENGTH).astype(np.int64)
    sampled = np.zeros((SAMPLE_SIZE // MAX_OUTLIERS + 1, MAX_OUTLIERS), np.int64)  # their positions
    sampled[:-1].reshape(-1)[:] = (starts[:, None] + np.arange(_RUN_LENGTH)).reshape(-1)
    sampled[-1, : positions.size] = positions
    values = elements[sampled[:-1].reshape(-1)]
    if has_nonfinite:
        values = zero_nonfinite(values, kind)
    is_inlier = np.abs(widen(values, kind)) < threshold
    values[~is_inlier] = 0  # the outliers are in a separate row of weight 1
    runs = np.zeros(sampled.shape, elements.dtype)
    runs[:-1].reshape(-1)[:] = values
    runs[-1, : positions.size] = elements[positions]
    weights = np.full(len(runs), (size - positions.size) / int(is_inlier.sum()))
    weights[-1] = 1.0
    run_weights = None if importance is None else importance.rows(sampled)
    return _make_sample(runs, kind, groups, weights, np.full(len(runs), peak), histogram, run_weights)


def _find_outliers(elements: Array, kind: Kind, threshold: float) -> tuple[NDArray[np.int64], float]:
    """Return the positions of finite elements of magnitude `threshold` or more, and the largest magnitude."""
    pieces, peak = [], 0.0
    for start in range(0, elements.size, PART_LENGTH):
        part = elements[start : start + PART_LENGTH]
        rows = part[: part.size // _SCAN_LENGTH * _SCAN_LENGTH].reshape(-1, _SCAN_LENGTH)
        peaks = np.zeros(len(rows))
        if rows.size:
            kernels.peaks(kind, rows, peaks)
        candidates = ~(peaks < threshold)  # true for rows with NaN or infinity too
        peak = max(peak, float(peaks[~candidates].max(initial=0.0)))
        first = start + np.flatnonzero(candidates) * _SCAN_LENGTH
        in_rows = (first[:, None] + np.arange(_SCAN_LENGTH)).reshape(-1)
        for positions in (in_rows, np.arange(start + rows.size, start + part.size)):
            magnitudes = np.abs(widen(elements[positions], kind))
            finite = np.isfinite(magnitudes)
            pieces.append(positions[finite & (magnitudes >= threshold)])
            peak = max(peak, float(magnitudes[finite].max(initial=0.0)))
    return np.concatenate(pieces), peak


def _group_sample(
    elements: Array, kind: Kind, groups: Groups, nonfinite: NonFinite, importance: Importance | None
) -> Sample:
    """Return a sample of an array with one offset per row or block."""
    runs, run_weights = _group_runs(elements, groups, importance)
    peaks = np.zeros(len(runs))
    if runs.size:
        kernels.peaks(kind, runs, peaks)
        if not np.isfinite(peaks).all():
            if not saturates(nonfinite):
                _, count, first = kernels.peak(kind, elements)
                raise NonFiniteError.at(count, first, groups.shape)
            runs = zero_nonfinite(runs, kind)
            kernels.peaks(kind, runs, peaks)
    weights = np.full(len(runs), elements.size / max(runs.size, 1))
    return _make_sample(runs, kind, groups, weights, peaks, exponents(widen(runs, kind)), run_weights)


def _make_sample(
    runs: Array,
    kind: Kind,
    groups: Groups,
    weights: NDArray[np.float64],
    peaks: NDArray[np.float64],
    histogram: Exponents,
    importance: RunWeights | None,
) -> Sample:
    """Return a sample, with its magnitudes and its signal computed."""
    magnitudes = np.abs(widen(runs, kind))
    with np.errstate(over="ignore", under="ignore"):
        if importance is None:
            energies = np.einsum("ij,ij->i", magnitudes, magnitudes)
        else:
            energies = np.einsum("ij,ij,ij->i", magnitudes, magnitudes, importance.matrix)
        signal = float(weights @ energies)
    return Sample(runs, magnitudes, kind, groups, weights, peaks, histogram, importance, signal)


def _group_runs(elements: Array, groups: Groups, importance: Importance | None) -> tuple[Array, RunWeights | None]:
    """Return groups of the array, one per row: all of them, or an evenly spaced selection of groups or parts.

    Return their importance too.
    """
    count, length, inner = math.prod(groups.counts), groups.length, groups.inner
    if elements.size <= SAMPLE_SIZE:
        if not elements.size:
            return elements.reshape(0, 1), None
        return kernels.runs(groups, elements, 0, count), None if importance is None else importance.runs(
            groups, 0, count
        )
    if length > SAMPLE_SIZE // _LONG_ROWS:
        rows = min(count, _LONG_ROWS)
        starts = np.linspace(0, length - _RUN_LENGTH, SAMPLE_SIZE // _RUN_LENGTH // rows).astype(np.int64)
        along = (starts[:, None] + np.arange(_RUN_LENGTH)).reshape(-1)
    else:
        rows = min(count, SAMPLE_SIZE // length)
        along = np.arange(length)
    group = np.linspace(0, count - 1, rows).astype(np.int64)
    first = group // inner * (length * inner) + group % inner
    positions = first[:, None] + along * inner
    return elements[positions], None if importance is None else importance.rows(positions)
