"""Choose the exponent offset, or the float scale, of each scale group of an array.

With offset k, an element x is encoded as x 2^k and decoded as value 2^-k, as if the bias were greater by k.
All formats in this module have their standard bias.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from exmy import importance as weighted
from exmy import kernels, reference
from exmy.elements import Array, Kind, Layout
from exmy.errors import FormatError
from exmy.fit import BIAS_LIMIT, OFFSETS_TRIED, encoding_scales
from exmy.groups import Groups
from exmy.importance import Importance
from exmy.threads import run_parts

__all__ = [
    "MAX_FLOAT_OFFSET",
    "group_peaks",
    "largest_unclipped_offsets",
    "search_offsets",
    "search_scales",
]

MAX_FLOAT_OFFSET = 125
"""Float32 scales replace offsets of at most this absolute value, so that their reciprocals stay normal."""

_OFFSET_FACTORS = np.exp2(np.arange(OFFSETS_TRIED))
_EIGHTHS = np.array(sorted(range(-8, 9), key=lambda i: (abs(i), i)))  # eighths of an octave, the most likely first
_SCALE_FACTORS = np.exp2(_EIGHTHS / 8).astype(np.float32).astype(np.float64)
_MAGNITUDE_BITS = {2: (np.uint16, 0x7FFF), 4: (np.uint32, 0x7FFFFFFF), 8: (np.uint64, 0x7FFFFFFFFFFFFFFF)}
"""By element size: the unsigned type of the bits of a float, and the mask of all but its sign."""


def group_peaks(elements: Array, kind: Kind, groups: Groups, threads: int) -> NDArray[np.float64]:
    """Return the largest magnitude of each group as a flat array; infinity or NaN if the group has one."""
    out = np.zeros(math.prod(groups.counts))

    def scan_rows(low: int, high: int) -> None:
        kernels.peaks(kind, kernels.runs(groups, elements, low, high), out[low:high])

    def scan_columns(low: int, high: int) -> None:
        word, mask = _MAGNITUDE_BITS[elements.itemsize]
        length, inner = groups.length, groups.inner
        step = max(1, (1 << 16) // inner)
        for outer in range(low, high):
            matrix = elements[outer * length * inner : (outer + 1) * length * inner].view(word)
            matrix = matrix.reshape(length, inner)
            peaks: Array = np.zeros(inner, word)
            for row in range(0, length, step):
                np.maximum(peaks, (matrix[row : row + step] & mask).max(axis=0), out=peaks)
            out[outer * inner : (outer + 1) * inner] = reference.widen(peaks.view(elements.dtype), kind)

    if groups.inner == 1:
        run_parts(scan_rows, groups.strips(), threads)
    else:
        run_parts(scan_columns, ((i, i + 1) for i in range(out.size // groups.inner)), threads)
    return out


def largest_unclipped_offsets(peaks: NDArray[np.float64], layout: Layout) -> NDArray[np.int64]:
    """Return for each group the largest offset that does not clip its peak: see `largest_unclipped_bias`.

    All-zero groups get the least offset of the other groups, or 0. Raise `FormatError` if a peak always clips.
    """
    exponent_bits, mantissa_bits, bias = layout
    fraction, exponent = np.frexp(peaks)
    exponent = exponent.astype(np.int64) - (exponent_bits > 0)
    exponent += fraction >= 1 - 2.0 ** -(mantissa_bits + 1 + (exponent_bits > 0))
    highest = (1 << exponent_bits) - 1 if exponent_bits > 0 else 1
    offsets: NDArray[np.int64] = np.minimum(highest - exponent, BIAS_LIMIT) - bias
    nonzero = peaks > 0
    least = int(offsets[nonzero].min()) if nonzero.any() else 0
    if least + bias < -BIAS_LIMIT:
        raise FormatError(
            f"the largest magnitude {peaks.max():g} exceeds the range of e{exponent_bits}m{mantissa_bits} with "
            f"any bias down to -{BIAS_LIMIT}; scale the input"
        )
    offsets[~nonzero] = least
    return offsets


def search_offsets(
    elements: Array,
    kind: Kind,
    layout: Layout,
    groups: Groups,
    lowest: NDArray[np.int64],
    importance: Importance | None,
    threads: int,
) -> NDArray[np.int64]:
    """Return for each group the offset with the least squared error, weighted by the importance if there is one.

    Try up to 32 offsets for each group, upwards from its largest unclipped one, `lowest`.
    """
    return _search(elements, kind, layout, groups, lowest, importance, threads, None)


def search_scales(
    elements: Array,
    kind: Kind,
    layout: Layout,
    groups: Groups,
    lowest: NDArray[np.int64],
    importance: Importance | None,
    threads: int,
) -> NDArray[np.float32]:
    """Return for each group the float32 scale of decoded values with the least squared error, weighted likewise.

    It is the best within one octave of the group's best offset, in steps of an eighth of an octave. `lowest`: the
    largest unclipped offsets. Raise `FormatError` if a peak needs a scale beyond float32.
    """
    if int(lowest.min()) < -MAX_FLOAT_OFFSET:
        raise FormatError("the largest magnitude needs a scale beyond float32; use scale='search'")
    scales = np.ones(lowest.size, np.float32)
    lowest = np.minimum(lowest, MAX_FLOAT_OFFSET - OFFSETS_TRIED)
    _search(elements, kind, layout, groups, lowest, importance, threads, scales)
    return scales


def _search(
    elements: Array,
    kind: Kind,
    layout: Layout,
    groups: Groups,
    lowest: NDArray[np.int64],
    importance: Importance | None,
    threads: int,
    scales: NDArray[np.float32] | None,
) -> NDArray[np.int64]:
    """Return the best offset of each group, and write the best scale near it to `scales`, if given."""
    offsets = lowest.copy()
    base = encoding_scales(lowest, kind, layout)
    tries = np.minimum(OFFSETS_TRIED, BIAS_LIMIT - layout.bias - lowest + 1)

    def search_part(low: int, high: int) -> None:
        runs = kernels.runs(groups, elements, low, high)
        weights = None if importance is None else importance.runs(groups, low, high)
        best, error = np.empty(high - low, np.int64), np.empty(high - low)
        part = (base[low:high], _OFFSET_FACTORS, tries[low:high], best, error)
        weighted.best_factors(kind, layout, runs, weights, *part, rising=True)
        offsets[low:high] += best
        if scales is not None:
            centers = np.ldexp(base[low:high], best.astype(np.int32))
            all_tries = np.full(high - low, _SCALE_FACTORS.size)
            part = (centers, _SCALE_FACTORS, all_tries, best, error)
            weighted.best_factors(kind, layout, runs, weights, *part, rising=False)
            scales[low:high] = (1 / (centers * _SCALE_FACTORS[best])).astype(np.float32)

    run_parts(search_part, groups.strips(), threads)
    return offsets
