"""Fit the shared exponent offset of a tensor, expressed as the bias of a format.

Formats that differ only in bias have the same values up to a power of two. So choosing the bias means choosing a
power-of-two scale, at no cost in decoding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from exmy import importance as weighted
from exmy import kernels, reference
from exmy.elements import Array, Kind, Layout
from exmy.errors import FormatError
from exmy.importance import STOP_RATIO, Importance, RunWeights
from exmy.threads import run_parts

__all__ = [
    "BIAS_LIMIT",
    "OFFSETS_TRIED",
    "BiasFit",
    "FitMethod",
    "encoding_scales",
    "fit_bias",
    "largest_unclipped_bias",
    "zero_nonfinite",
]

FitMethod: TypeAlias = Literal["max", "search"]

BIAS_LIMIT = 512
"""Biases are -512 ... 512, which suffices for every float32 in every format; all values are exact in float64."""

OFFSETS_TRIED = 32
"""The number of offsets that a search tries: the largest that does not clip, and the next greater ones."""

_RUN_COUNT = 256  # runs of elements in the sample
_RUN_LENGTH = 256  # elements per run
_PART_LENGTH = 1 << 18  # elements per partial sum of errors, counted from the start of the tensor
_EXTRA_BIASES = 4  # biases that the last pass tries above the window


def largest_unclipped_bias(peak: float, layout: Layout) -> int:
    """Return the largest bias that does not clip the magnitude `peak`.

    The peak is m 2^k > 0 with 1/2 <= m < 1. The format's largest value is 2^E (2 - 2^-Y) with E = 2^X - 1 - bias
    (for X = 0: 2^E (1 - 2^-Y) with E = 1 - bias); magnitudes less than half a step above still round to it. For
    tiny peaks, the result is 512. Raise `FormatError` if even bias -512 clips (float64 beyond 1e154).
    """
    exponent_bits, mantissa_bits, _ = layout
    fraction, exponent = math.frexp(peak)
    if exponent_bits > 0:
        exponent -= 1
    if fraction >= 1 - 2.0 ** -(mantissa_bits + 1 + (exponent_bits > 0)):
        exponent += 1
    highest = (1 << exponent_bits) - 1 if exponent_bits > 0 else 1
    bias = min(highest - exponent, BIAS_LIMIT)
    if bias < -BIAS_LIMIT:
        raise FormatError(
            f"the largest magnitude {peak:g} exceeds the range of e{exponent_bits}m{mantissa_bits} with any bias "
            f"down to -{BIAS_LIMIT}; scale the input"
        )
    return bias


def encoding_scales(offsets: NDArray[Any], kind: Kind, layout: Layout) -> Array:
    """Return 2^offset, in float32 if scaling in float32 changes no code, in float64 otherwise.

    In float32, products below 2^-126 may lose bits; with fewer than 8 exponent bits they have code 0 anyway.
    """
    narrow = kind is not Kind.FLOAT64 and layout.exponent_bits < 8 and int(np.abs(offsets).max()) <= 126
    scales: Array = np.ldexp(1.0, offsets.astype(np.int32)).astype(np.float32 if narrow else np.float64)
    return scales


def zero_nonfinite(elements: Array, kind: Kind) -> Array:
    """Return a copy with zeros in place of NaN and infinity."""
    wide = reference.widen(elements, kind)
    return reference.narrow(np.where(np.isfinite(wide), wide, 0.0), kind)


_Weights: TypeAlias = list[Callable[[], NDArray[np.float64]]]
"""Functions that return the weights of consecutive elements; none if all have the same."""


class _Measurements(NamedTuple):
    """The measurements of one part of the tensor in one pass; `errors` are the sums of squared errors by bias."""

    peak: float
    nonfinite_count: int
    first_nonfinite: int
    exponent_counts: Array | None
    signal: float
    errors: list[float]


class BiasFit:
    """The choice of a bias for a tensor of `count` elements, in passes over its pieces.

    Pieces are flat (`elements.as_flat`) and arrive in C order. All sums run over parts of fixed length in a fixed
    order, so the result depends neither on how the tensor is cut into pieces nor on the number of threads.

    Methods "max" and "none" take one pass, "search" up to three:

    1. The first pass finds the largest magnitude and takes a sample: 256 runs of 256 elements, or the whole of
       smaller tensors. At its end, the sample yields the bias with the least error on it, unless the largest
       magnitude alone decides.
    2. The second pass measures this bias and its neighbours on the whole tensor.
    3. If the least error is at an end of that window (because the runs missed outliers), a third pass measures the
       biases beyond that end.

    NaN and infinity count as 0. With `reports_noise`, the fit also has the signal, and the noise once a pass has
    measured it, be it one after the fit is done. Pieces may have importance; errors and the signal are then
    weighted. With `counts_exponents`, the first pass also counts exponents, while each part is in the CPU cache.
    """

    def __init__(
        self,
        layout: Layout,
        kind: Kind,
        count: int,
        method: FitMethod | Literal["none"],
        *,
        reports_noise: bool,
        counts_exponents: bool = False,
    ) -> None:
        self.bias = layout.bias
        self.done = False
        self.passes = 0  # completed
        self.added = 0  # elements added in this pass
        self.nonfinite_count = 0
        self.first_nonfinite = 0  # the index of the first
        self.signal = 0.0  # the sum of squares, if `reports_noise`
        self._layout, self._kind, self._count, self._method = layout, kind, count, method
        self._reports_noise, self._counts_exponents = reports_noise, counts_exponents
        self.exponent_counts = np.zeros(kernels.EXPONENT_COUNT + 2, np.int64)  # see `kernels.exponents`
        self._peak = 0.0
        self._nonfinite_parts: set[int] = set()  # parts with non-finite elements
        self._incomplete: list[Array] = []  # the pieces of the last part, until it is complete
        self._incomplete_weights: _Weights = []
        self._sample_weights: list[NDArray[np.float64]] = []
        self._is_weighted = False
        self._run_length = min(_RUN_LENGTH, count) if count > _RUN_COUNT * _RUN_LENGTH else count  # in the sample
        self._starts = np.zeros(1, np.int64)  # the starts of the runs
        if self._run_length < count:
            self._starts = np.linspace(0, count - _RUN_LENGTH, _RUN_COUNT).astype(np.int64)
        self._sample: list[Array] = []
        self._window = range(layout.bias, layout.bias + (method == "none"))  # the biases that this pass measures
        self._floor = self._top = layout.bias  # the range of biases that any pass may measure
        self._errors: dict[int, float] = {}  # by bias, summed over the whole tensor

    @property
    def noise(self) -> float | None:
        """The sum of squared errors with `bias`; None if no pass has measured it."""
        return 0.0 if self.passes and self._peak == 0 else self._errors.get(self.bias)

    def add(self, elements: Array, threads: int, importance: Importance | None = None) -> None:
        """Add the next elements of the pass; either all or none have importance."""
        self._is_weighted = importance is not None
        parts = list(self._parts(elements, importance))
        measurements: list[_Measurements | None] = [None] * len(parts)

        def measure(low: int, high: int) -> None:
            for i in range(low, high):
                measurements[i] = self._measure(*parts[i])

        run_parts(measure, [(i, i + 1) for i in range(len(parts))], threads)
        for (number, _, _), measured in zip(parts, measurements, strict=True):
            assert measured is not None
            self._accumulate(number, measured)

    def end_pass(self) -> None:
        """Measure the last, incomplete part, and decide on the bias or on the next pass."""
        if self._incomplete:
            number, part = self.added // _PART_LENGTH, np.concatenate(self._incomplete)
            weights, self._incomplete, self._incomplete_weights = self._incomplete_weights, [], []
            self._accumulate(number, self._measure(number, part, weights))
        self.added = 0
        self.passes += 1
        if self.passes > 1 and self._method == "search":
            self._decide()
        elif self._method == "none" or self._peak == 0 or self.passes > 1:
            self.done = True
        else:
            self.bias = self._floor = largest_unclipped_bias(self._peak, self._layout)
            self._top = min(self._floor + OFFSETS_TRIED, BIAS_LIMIT + 1)
            if self._method != "search":
                self.done = True
            elif (
                self._run_length < self._count
                and not self._is_weighted  # the peak may have no weight
                and self._peak_rules_out_larger_biases()
            ):
                self._top = self._floor + 1
                self.done = True
            else:
                self._propose()
        self._sample, self._sample_weights = [], []
        if self.done:
            self._window = range(self.bias, self.bias + 1)  # another pass would measure the noise

    def _parts(self, elements: Array, importance: Importance | None) -> Iterator[tuple[int, Array, _Weights]]:
        """Yield the number, elements and weights of each part that these elements complete, and keep the rest."""
        start = 0
        while start < elements.size:
            number, inside = divmod(self.added, _PART_LENGTH)
            piece = elements[start : start + _PART_LENGTH - inside]
            runs = [] if self.passes else self._sampled_runs(piece.size)
            self._sample += [piece[low:high].copy() for low, high in runs]
            if importance is not None:
                self._incomplete_weights.append(partial(importance.elements, start, start + piece.size))
                self._sample_weights += [importance.elements(start + low, start + high) for low, high in runs]
            start += piece.size
            self.added += piece.size
            if inside + piece.size < _PART_LENGTH:
                self._incomplete.append(piece.copy())
            else:
                part = np.concatenate([*self._incomplete, piece]) if self._incomplete else piece
                yield number, part, self._incomplete_weights
                self._incomplete, self._incomplete_weights = [], []

    def _sampled_runs(self, size: int) -> list[tuple[int, int]]:
        """Return the ranges of the next `size` elements that belong to the runs of the sample."""
        first = np.searchsorted(self._starts, self.added - self._run_length, "right")
        starts = self._starts[first : np.searchsorted(self._starts, self.added + size)] - self.added
        return [(max(start, 0), min(start + self._run_length, size)) for start in starts.tolist()]

    def _measure(self, number: int, part: Array, weights_of_pieces: _Weights) -> _Measurements:
        # after the first pass, the count is only 0 or 1: whether the part has non-finite elements
        peak, nonfinite_count, first_nonfinite = 0.0, int(number in self._nonfinite_parts), 0
        if not self.passes:
            peak, nonfinite_count, first_nonfinite = kernels.peak(self._kind, part)
        exponent_counts = None
        if self._counts_exponents and not self.passes:
            exponent_counts = np.zeros_like(self.exponent_counts)
            kernels.exponents(self._kind, part, exponent_counts)
        if nonfinite_count:
            part = zero_nonfinite(part, self._kind)
            peak, _, _ = kernels.peak(self._kind, part)
        weights = np.concatenate([each() for each in weights_of_pieces]) if weights_of_pieces else None
        signal = 0.0
        if self._reports_noise and not self.passes:
            signal = kernels.energy(self._kind, part) if weights is None else self._weighted_energy(part, weights)
        errors = self._squared_errors(part, weights, self._window) if self._window else []
        return _Measurements(peak, nonfinite_count, first_nonfinite, exponent_counts, signal, errors)

    def _accumulate(self, number: int, part: _Measurements) -> None:
        if not self.passes:
            self._peak = max(self._peak, part.peak)
            if part.nonfinite_count:
                if not self.nonfinite_count:
                    self.first_nonfinite = number * _PART_LENGTH + part.first_nonfinite
                self.nonfinite_count += part.nonfinite_count
                self._nonfinite_parts.add(number)
            self.signal += part.signal
        if part.exponent_counts is not None:
            self.exponent_counts += part.exponent_counts
        for bias, error in zip(self._window, part.errors, strict=True):
            self._errors[bias] = self._errors.get(bias, 0.0) + error

    def _squared_errors(self, elements: Array, weights: NDArray[np.float64] | None, biases: range) -> list[float]:
        layout = self._layout._replace(bias=biases.start)
        return weighted.squared_errors(self._kind, layout, elements, weights, len(biases))

    def _weighted_energy(self, elements: Array, weights: NDArray[np.float64]) -> float:
        wide = reference.widen(elements, self._kind)
        return float(np.einsum("i,i,i", wide, wide, weights))

    def _peak_rules_out_larger_biases(self) -> bool:
        """Return whether the peak alone proves that no bias above the largest unclipped one has less error.

        With a larger bias, the grid for unclipped values differs only below the smallest normal value, so their
        error shrinks by at most half the smallest step each. Errors of clipped values do not shrink. The peak's
        error grows from at most half a step to at least the peak's distance from half the largest value. Formats
        with many exponent bits therefore need no search.
        """
        exponent_bits, mantissa_bits, _ = self._layout
        if exponent_bits == 0:
            return False
        top = math.ldexp(1.0, (1 << exponent_bits) - 1 - self._floor)  # the largest power of two
        largest, half_step = 2 * top - math.ldexp(top, -mantissa_bits), math.ldexp(top, -mantissa_bits - 1)
        gain = self._count * math.ldexp(1.0, -self._floor - mantissa_bits) ** 2
        beyond = self._peak - largest / 2
        return beyond > half_step and beyond**2 - half_step**2 > 1.001 * gain

    def _propose(self) -> None:
        """Choose from the sample the biases to measure next, or the final bias if it is the whole tensor."""
        sample = np.concatenate(self._sample)
        weights = np.concatenate(self._sample_weights) if self._sample_weights else None
        if self.nonfinite_count:
            sample = zero_nonfinite(sample, self._kind)
        unbiased = self._layout._replace(bias=0)
        scale = encoding_scales(np.array([self._floor]), self._kind, unbiased)
        tries, best, error = np.array([self._top - self._floor]), np.empty(1, np.int64), np.empty(1)
        factors = np.exp2(np.arange(OFFSETS_TRIED))
        runs, run_weights = sample[None], None if weights is None else RunWeights(weights[None])
        part = (scale, factors, tries, best, error)
        weighted.best_factors(self._kind, unbiased, runs, run_weights, *part, rising=True)
        self.bias = self._floor + int(best[0])
        if sample.size == self._count:
            self.done = True
            if self._reports_noise:
                window = range(self.bias, self.bias + 1)
                self._errors[self.bias] = self._squared_errors(sample, weights, window)[0]
        else:
            self._window = range(max(self._floor, self.bias - 1), min(self._top, self.bias + 2))

    def _decide(self) -> None:
        """Choose the bias from the errors on the whole tensor, or the biases to measure in a last pass."""
        tried, window = sorted(self._errors), self._window
        self.bias = min(tried, key=self._errors.__getitem__)
        lower = range(self._floor, window.start)
        higher = range(window.stop, min(self._top, window.stop + _EXTRA_BIASES))
        may_win = self._errors[tried[-1]] < STOP_RATIO * min(self._errors[bias] for bias in tried[:-1] or tried)
        if self.passes == 2 and self.bias == window.start and lower:
            self._window = lower
        elif self.passes == 2 and self.bias == window[-1] and higher and may_win:
            self._window = higher
        else:
            self.done = True


def fit_bias(
    elements: Array,
    kind: Kind,
    layout: Layout,
    method: FitMethod,
    threads: int = 1,
    *,
    saturate: bool,
    importance: Importance | None = None,
) -> BiasFit:
    """Return the completed fit of a tensor in memory.

    If the tensor has non-finite elements and `saturate` is false, the fit stops after one pass: check its
    `nonfinite_count`.
    """
    fit = BiasFit(layout, kind, elements.size, method, reports_noise=False)
    while not fit.done and not (fit.nonfinite_count and not saturate):
        fit.add(elements, threads, importance)
        fit.end_pass()
    return fit
