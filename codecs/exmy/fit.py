"""Fit: the shared exponent offset of a tensor, expressed as the bias of a format.

Formats that differ only in bias hold the same values times a power of two, so choosing the bias is choosing a
power-of-two scale, at no cost in decoding.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import numpy as np

from exmy import kernels
from exmy.elements import Array, Kind, Layout
from exmy.errors import FormatError

__all__ = ["BIAS_LIMIT", "FitMethod", "bias_that_holds", "bias_with_least_error"]

FitMethod: TypeAlias = Literal["max", "search"]

BIAS_LIMIT = 512
"""Biases lie in -512 ... 512: enough for every float32 in every format, and exact in float64."""

_RUNS = 256  # of
_RUN = 256  # elements make the sample
_REACH = 32  # offsets below the largest magnitude that the sample tries
_WINDOW = 4  # offsets that the whole tensor tries at once


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


def bias_with_least_error(elements: Array, kind: Kind, holds: Layout) -> int:
    """Return the bias from that of `holds` (with which nothing clips) on that has the least squared error.

    Up to 65,536 elements are tried whole.  Of more, 256 runs of 256 elements find where the least error lies,
    and the whole tensor then decides in one pass over the 4 biases there, and in a second over all the lower
    ones if outliers that the runs missed push it to the edge.
    """

    def errors(below: int, biases: int, of: Array) -> list[float]:
        return kernels.squared_errors(kind, holds._replace(bias=holds.bias + below), of, biases)

    most = min(_REACH, BIAS_LIMIT - holds.bias + 1)
    if elements.size <= _RUNS * _RUN:
        return holds.bias + int(np.argmin(errors(0, most, elements)))
    starts = np.linspace(0, elements.size - _RUN, _RUNS).astype(np.int64)
    sample = elements[starts[:, None] + np.arange(_RUN)].reshape(-1)
    low = max(0, int(np.argmin(errors(0, most, sample))) - _WINDOW + 2)
    best = low + int(np.argmin(errors(low, min(_WINDOW, most - low), elements)))
    if best == low > 0:
        best = int(np.argmin(errors(0, low + 1, elements)))
    return holds.bias + best
