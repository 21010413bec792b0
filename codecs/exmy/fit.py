"""Fit: the shared exponent offset of a tensor, expressed as the bias of a format.

Formats that differ only in bias hold the same values times a power of two, so choosing the bias is choosing a
power-of-two scale, at no cost in decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from exmy import kernels, reference
from exmy.elements import Array, Kind, Layout
from exmy.errors import FormatError
from exmy.threads import run_parts

__all__ = [
    "BIAS_LIMIT",
    "CERTAIN",
    "REACH",
    "BiasFit",
    "FitMethod",
    "bias_that_holds",
    "encoding_scales",
    "fit_bias",
    "without_nonfinite",
]

FitMethod: TypeAlias = Literal["max", "search"]

BIAS_LIMIT = 512
"""Biases lie in -512 ... 512: enough for every float32 in every format, and exact in float64."""

REACH = 32
"""Offsets that are tried, from the largest that does not clip on."""

CERTAIN = 2.001
"""No larger offset is better than one whose error is this many times the least before: see _search.h."""

_RUNS = 256  # of
_RUN = 256  # elements make the sample
_PART = 1 << 18  # elements whose errors are summed by themselves, counted from the tensor's first
_MORE = 4  # biases above the window that the last pass tries


def bias_that_holds(peak: float, layout: Layout) -> int:
    """Return the largest bias with which a magnitude does not clip, that is, rounds to a value of the format.

    peak > 0 is m 2^k with 1/2 <= m < 1.  The largest value is 2^E (2 - 2^-Y) with E = 2^X - 1 - bias (for X
    = 0: 2^E (1 - 2^-Y) with E = 1 - bias), and whatever lies less than half a step above still rounds to
    it. FormatError where even bias -512 clips (float64 beyond 1e154); tiny peaks get bias 512.
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
            f"the largest magnitude {peak:g} is beyond e{exponent_bits}m{mantissa_bits} with any bias down "
            f"to -{BIAS_LIMIT}; scale the input"
        )
    return bias


def encoding_scales(offsets: NDArray[Any], kind: Kind, layout: Layout) -> Array:
    """Return 2^offset: float32 where scaling in float32 changes no code, float64 otherwise.

    In float32, what gets below 2^-126 may lose bits; with less than 8 exponent bits it is code 0 anyway.
    """
    narrow = kind is not Kind.FLOAT64 and layout.exponent_bits < 8 and int(np.abs(offsets).max()) <= 126
    scales: Array = np.ldexp(1.0, offsets.astype(np.int32)).astype(np.float32 if narrow else np.float64)
    return scales


def without_nonfinite(elements: Array, kind: Kind) -> Array:
    """Return a copy with zeros for what is not finite."""
    wide = reference.widen(elements, kind)
    return reference.narrow(np.where(np.isfinite(wide), wide, 0.0), kind)


class _Measured(NamedTuple):
    """What a pass learns from one part."""

    peak: float
    bad: int
    first: int
    energy: float
    errors: list[float]


class BiasFit:
    """The bias that suits a tensor of `count` elements, found in passes over it, piece by piece.

    Pieces are flat and plain (``elements.as_flat``) and come in C order.  All sums run over parts of fixed
    length in order, so what is found depends neither on how the tensor was cut nor on the threads.

    The first pass finds the largest magnitude, and takes a sample of 256 runs of 256 elements, which is
    the whole of smaller tensors.  The bias of least error on the sample and its neighbours are then tried on
    the whole; where the least error lies at an end of these (outliers that the runs missed), a third pass
    tries those beyond.  What is not finite counts as 0.
    """

    def __init__(
        self, layout: Layout, kind: Kind, count: int, scale: FitMethod | Literal["none"], *, measures: bool
    ) -> None:
        self.bias = layout.bias
        self.done = False
        self.passes = 0  # that have ended
        self.at = 0  # elements of this pass so far
        self.bad = self.first = 0  # elements that are not finite, and the first of them
        self.signal = 0.0  # the sum of squares, if it `measures`
        self._layout, self._kind, self._count, self._scale = layout, kind, count, scale
        self._measures = measures
        self._peak = 0.0
        self._unclean: set[int] = set()  # the parts with elements that are not finite
        self._kept: list[Array] = []  # pieces of the part that is not whole yet
        self._run = min(_RUN, count) if count > _RUNS * _RUN else count
        self._starts = np.zeros(1, np.int64)
        if self._run < count:
            self._starts = np.linspace(0, count - _RUN, _RUNS).astype(np.int64)
        self._sample: list[Array] = []
        self._window = range(layout.bias, layout.bias + (scale == "none"))  # the biases that this pass tries
        self._floor = self._top = layout.bias  # those that may be tried at all
        self._errors: dict[int, float] = {}  # of the biases tried, on the whole

    @property
    def noise(self) -> float | None:
        """The sum of squared errors with the bias; None while no pass has measured it."""
        return 0.0 if self.passes and self._peak == 0 else self._errors.get(self.bias)

    def add(self, elements: Array, threads: int) -> None:
        """Take the next elements."""
        parts = list(self._parts(elements))
        found: list[_Measured | None] = [None] * len(parts)

        def measure(low: int, high: int) -> None:
            for i in range(low, high):
                found[i] = self._measure(*parts[i])

        run_parts(measure, [(i, i + 1) for i in range(len(parts))], threads)
        for (number, _), measured in zip(parts, found, strict=True):
            assert measured is not None
            self._fold(number, measured)

    def end_pass(self) -> None:
        """Take the last elements of the pass, and decide what is known now."""
        if self._kept:
            number, part = self.at // _PART, np.concatenate(self._kept)
            self._kept = []
            self._fold(number, self._measure(number, part))
        self.at = 0
        self.passes += 1
        if self.passes > 1 and self._scale == "search":
            self._decide()
        elif self._scale == "none" or self._peak == 0 or self.passes > 1:
            self.done = True
        else:
            self.bias = self._floor = bias_that_holds(self._peak, self._layout)
            self._top = min(self._floor + REACH, BIAS_LIMIT + 1)
            if self._scale != "search":
                self.done = True
            elif self._run < self._count and self._nothing_gains():
                self._top = self._floor + 1
                self._window = range(self._floor, self._top)  # a pass for the noise, if it measures
                self.done = not self._measures
            else:
                self._propose()
        self._sample = []
        if self.done:
            self._window = range(self.bias, self.bias + 1)  # of one more pass, made for the noise

    def _parts(self, elements: Array) -> Iterator[tuple[int, Array]]:
        """Yield the number and the elements of each part that is whole now, and keep the rest."""
        start = 0
        while start < elements.size:
            number, inside = divmod(self.at, _PART)
            piece = elements[start : start + _PART - inside]
            if not self.passes:
                self._take_sample(piece)
            start += piece.size
            self.at += piece.size
            if inside + piece.size < _PART:
                self._kept.append(piece.copy())
            else:
                yield number, np.concatenate([*self._kept, piece]) if self._kept else piece
                self._kept = []

    def _take_sample(self, piece: Array) -> None:
        """Keep what lies in the runs of the sample."""
        end = self.at + piece.size
        first = int(np.searchsorted(self._starts, self.at - self._run, "right"))
        starts = self._starts[first : int(np.searchsorted(self._starts, end))] - self.at
        whole = (starts >= 0) & (starts + self._run <= piece.size)
        if whole.all() and starts.size:
            self._sample.append(np.lib.stride_tricks.sliding_window_view(piece, self._run)[starts].reshape(-1))
            return
        for start in starts.tolist():
            self._sample.append(piece[max(start, 0) : start + self._run].copy())

    def _measure(self, number: int, part: Array) -> _Measured:
        peak, bad, first = 0.0, int(number in self._unclean), 0
        if not self.passes:
            peak, bad, first = kernels.peak(self._kind, part)
        if bad:
            part = without_nonfinite(part, self._kind)
            peak, _, _ = kernels.peak(self._kind, part)
        energy = kernels.energy(self._kind, part) if self._measures and not self.passes else 0.0
        errors = self._squared_errors(part, self._window) if self._window else []
        return _Measured(peak, bad, first, energy, errors)

    def _fold(self, number: int, measured: _Measured) -> None:
        if not self.passes:
            self._peak = max(self._peak, measured.peak)
            if measured.bad:
                self.first = self.first if self.bad else number * _PART + measured.first
                self.bad += measured.bad
                self._unclean.add(number)
            self.signal += measured.energy
        for bias, error in zip(self._window, measured.errors, strict=True):
            self._errors[bias] = self._errors.get(bias, 0.0) + error

    def _squared_errors(self, elements: Array, biases: range) -> list[float]:
        layout = self._layout._replace(bias=biases.start)
        return kernels.squared_errors(self._kind, layout, elements, len(biases))

    def _nothing_gains(self) -> bool:
        """Say whether the peak alone proves that no larger bias has less error than the one that holds.

        A larger bias rounds what it does not clip to a grid that differs only below the smallest normal value, so
        it gains at most the errors there, half the smallest step each.  What it clips has no less error than
        before; the peak is at least as far off as from half the largest value, in place of half a step.  This
        spares formats with many exponent bits the search.
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
        """Decide by the sample: which biases to try on the whole, or which it is where the sample is all."""
        sample = np.concatenate(self._sample)
        if self.bad:
            sample = without_nonfinite(sample, self._kind)
        standard = self._layout._replace(bias=0)
        scale = encoding_scales(np.array([self._floor]), self._kind, standard)
        tries, found, error = np.array([self._top - self._floor]), np.empty(1, np.int64), np.empty(1)
        factors = np.exp2(np.arange(REACH))
        kernels.least(self._kind, standard, sample[None], scale, factors, tries, found, error, rising=True)
        self.bias = self._floor + int(found[0])
        if sample.size == self._count:
            self.done = True
            if self._measures:
                self._errors[self.bias] = self._squared_errors(sample, range(self.bias, self.bias + 1))[0]
        else:
            self._window = range(max(self._floor, self.bias - 1), min(self._top, self.bias + 2))

    def _decide(self) -> None:
        """Decide by the whole: the bias, or the biases to try in a last pass."""
        tried, window = sorted(self._errors), self._window
        self.bias = min(tried, key=self._errors.__getitem__)
        lower, higher = range(self._floor, window.start), range(window.stop, min(self._top, window.stop + _MORE))
        certain = self._errors[tried[-1]] >= CERTAIN * min(self._errors[bias] for bias in tried[:-1] or tried)
        if self.passes == 2 and self.bias == window.start and lower:
            self._window = lower
        elif self.passes == 2 and self.bias == window[-1] and higher and not certain:
            self._window = higher
        else:
            self.done = True


def fit_bias(
    elements: Array,
    kind: Kind,
    layout: Layout,
    scale: FitMethod,
    threads: int = 1,
    *,
    saturate: bool,
) -> BiasFit:
    """Return the finished fit of a tensor in memory; unfinished where it is not finite and may not be."""
    fit = BiasFit(layout, kind, elements.size, scale, measures=False)
    while not fit.done and not (fit.bad and not saturate):
        fit.add(elements, threads)
        fit.end_pass()
    return fit
