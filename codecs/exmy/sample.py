"""Sample: some tens of thousands of elements that stand for an array, and the error of a format on them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy import kernels
from exmy.elements import Array, Kind, Layout, NonFinite, as_flat, saturates
from exmy.errors import FormatError, NonFiniteError
from exmy.exponents import Exponents, exponents
from exmy.fit import BIAS_LIMIT, REACH, encoding_scales
from exmy.format import Format
from exmy.groups import Groups
from exmy.offsets import holding_offsets
from exmy.quantizer import Scale
from exmy.reference import clipping_limit, narrow, widen

__all__ = ["SAMPLE", "Fit", "Sample"]

SAMPLE = 1 << 16
"""Elements of a sample; arrays up to this size are taken whole."""

_RUN = 256  # elements that are taken side by side
_LONG = 4  # rows that are taken at least, and then only in parts
_FLOAT_REACH = 125  # of offsets beside which float32 scales have normal reciprocals
_OFFSETS = np.exp2(np.arange(REACH))
_OCTAVE = np.exp2(np.arange(-8, 9) / 8)  # float scales around the best offset


@dataclass(frozen=True, slots=True)
class Fit:
    """How one format does on a sample."""

    format: Format
    """With the bias that suits the sample, where all elements share an offset."""
    noise: float
    """The sum of squared errors."""
    clipped: float
    """The share of elements beyond the largest value of their group by more than half a step."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Groups of an array that stand for all of them."""

    runs: Array
    """One group a row; float64 or whatever the array has."""
    kind: Kind
    groups: Groups
    """The groups of the whole array."""
    peaks: NDArray[np.float64]
    """The largest magnitude of each row."""
    signal: float
    """The sum of squares."""

    @staticmethod
    def of(x: Any, axis: int | None, block: int | None, nonfinite: NonFinite) -> Sample:
        """Return the sample of an array: all of it up to SAMPLE elements, else parts spread evenly.

        Without groups these are runs of 256 elements; else whole groups, and parts of at least four groups
        where they are long.  NonFiniteError as in `encode` for what the sample meets; where they saturate,
        NaN and infinity count as zeros.
        """
        saturate = saturates(nonfinite)
        elements, kind, shape = as_flat(x)
        groups = Groups.of(shape, axis, block)
        runs = _runs(elements, groups)
        peaks = np.zeros(len(runs))
        if runs.size:
            kernels.peaks(kind, runs, peaks)
            if not np.isfinite(peaks).all():
                if not saturate:
                    _, bad, first = kernels.peak(kind, elements)
                    raise NonFiniteError(bad, elements.size, tuple(int(i) for i in np.unravel_index(first, shape)))
                wide = widen(runs, kind)
                runs = narrow(np.where(np.isfinite(wide), wide, 0.0), kind)
                kernels.peaks(kind, runs, peaks)
        flat = widen(runs.reshape(-1), kind)
        with np.errstate(over="ignore", under="ignore"):
            return Sample(runs, kind, groups, peaks, float(flat @ flat))

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.runs.size

    def exponents(self) -> Exponents:
        """Return the histogram of exponents."""
        return exponents(widen(self.runs, self.kind))

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
            noise = np.empty((len(self.runs), 1))
            kernels.noise(self.kind, layout, self.runs, scales, np.ones(1), noise)
        else:
            tries = np.minimum(REACH, BIAS_LIMIT - layout.bias - offsets + 1)
            k, noise = self._least(layout, scales, _OFFSETS, tries, rising=True)
            scales, offsets = np.ldexp(scales, k.astype(np.int32)), offsets + k
            noise = np.ldexp(noise, 2 * k)
        if scale == "float":
            k, noise = self._least(layout, scales, _OCTAVE, np.full(len(self.runs), _OCTAVE.size), rising=False)
            factors = _OCTAVE[k]
        with np.errstate(over="ignore", under="ignore"):
            total = float(np.ldexp(noise.reshape(-1), -2 * offsets).sum())
        clipped = self._clipped(np.ldexp(clipping_limit(layout) / factors, -offsets))
        if self.groups.axis is None and scale in {"search", "max"}:
            f = f.with_bias(f.bias + int(offsets[0]))
        return Fit(f, total, clipped)

    def _least(
        self, layout: Layout, scales: Array, factors: Array, tries: NDArray[np.int64], *, rising: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return as `kernels.least` does; the error is in units of the row times its scale."""
        found, error = np.empty(len(self.runs), np.int64), np.empty(len(self.runs))
        kernels.least(self.kind, layout, self.runs, scales, factors, tries, found, error, rising=rising)
        return found, error

    def _clipped(self, limits: NDArray[np.float64]) -> float:
        """Return the share of elements beyond the limits of their rows."""
        some = self.peaks > limits
        magnitudes = np.abs(widen(self.runs[some], self.kind))
        return int((magnitudes > limits[some, None]).sum()) / self.size


def _runs(elements: Array, groups: Groups) -> Array:
    """Return groups of the array, one a row: all, or some spread evenly, or parts of some."""
    count, length, inner = math.prod(groups.counts), groups.length, groups.inner
    if elements.size <= SAMPLE:
        if not elements.size:
            return elements.reshape(0, 1)
        return groups.runs(elements, 0, count)
    if groups.axis is None or length > SAMPLE // _LONG:
        rows = min(count, _LONG)
        starts = np.linspace(0, length - _RUN, SAMPLE // _RUN // rows).astype(np.int64)
        along = (starts[:, None] + np.arange(_RUN)).reshape(-1)
    else:
        rows = min(count, SAMPLE // length)
        along = np.arange(length)
    group = np.linspace(0, count - 1, rows).astype(np.int64)
    first = group // inner * (length * inner) + group % inner
    return elements[first[:, None] + along * inner]
