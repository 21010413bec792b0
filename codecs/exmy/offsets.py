"""Offsets: the shared exponents, or float scales, of the groups of an array.

An offset k means that a group is encoded as x 2^k and decoded as value 2^-k: the bias of its format is k more.
All formats here have their standard bias.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy import kernels, reference
from exmy.elements import Array, Kind, Layout
from exmy.errors import FormatError
from exmy.fit import BIAS_LIMIT
from exmy.groups import Groups
from exmy.threads import run_parts

__all__ = ["encoding_scales", "holding_offsets", "least_error", "peaks_of"]

_WINDOWS = ((0, 4), (4, 12), (12, 32))  # offsets above the one that holds, tried in one pass each
_STEPS = 8  # float scales tried in an octave
_FLOAT_REACH = 125  # of offsets where scales are float32 with normal reciprocals
_MAGNITUDE = {2: (np.uint16, 0x7FFF), 4: (np.uint32, 0x7FFFFFFF), 8: (np.uint64, 0x7FFFFFFFFFFFFFFF)}


def peaks_of(elements: Array, kind: Kind, groups: Groups, threads: int) -> NDArray[np.float64]:
    """Return the largest magnitude of each group, flat; infinity or NaN where a group has one."""
    out = np.zeros(math.prod(groups.counts))

    def rows(low: int, high: int) -> None:
        kernels.peaks(kind, groups.runs(elements, low, high), out[low:high])

    def columns(low: int, high: int) -> None:
        word, mask = _MAGNITUDE[elements.itemsize]
        length, inner = groups.length, groups.inner
        step = max(1, (1 << 16) // inner)
        for outer in range(low, high):
            matrix = elements[outer * length * inner : (outer + 1) * length * inner].view(word)
            matrix = matrix.reshape(length, inner)
            most: Any = np.zeros(inner, word)
            for row in range(0, length, step):
                np.maximum(most, (matrix[row : row + step] & mask).max(axis=0), out=most)
            out[outer * inner : (outer + 1) * inner] = reference.widen(most.view(elements.dtype), kind)

    if groups.inner == 1:
        run_parts(rows, groups.strips(), threads)
    else:
        run_parts(columns, ((i, i + 1) for i in range(out.size // groups.inner)), threads)
    return out


def holding_offsets(peaks: NDArray[np.float64], layout: Layout) -> NDArray[np.int64]:
    """Return the largest offset of each group with which its peak does not clip, as `bias_that_holds` does.

    Groups of zeros get the least offset of the others, or 0.
    """
    exponent_bits, mantissa_bits, bias = layout
    fraction, exponent = np.frexp(peaks)
    exponent = exponent.astype(np.int64) - (exponent_bits > 0)
    exponent += fraction >= 1 - 2.0 ** -(mantissa_bits + 1 + (exponent_bits > 0))
    highest = (1 << exponent_bits) - 1 if exponent_bits > 0 else 1
    offsets: NDArray[np.int64] = np.minimum(highest - exponent, BIAS_LIMIT) - bias
    some = peaks > 0
    least = int(offsets[some].min()) if some.any() else 0
    if least + bias < -BIAS_LIMIT:
        raise FormatError(
            f"the largest magnitude {peaks.max():g} is beyond e{exponent_bits}m{mantissa_bits} with any bias "
            f"down to -{BIAS_LIMIT}; scale the input"
        )
    offsets[~some] = least
    return offsets


def encoding_scales(offsets: NDArray[Any], kind: Kind, layout: Layout) -> Array:
    """Return 2^offset: float32 where scaling in float32 changes no code, float64 otherwise.

    In float32, what gets below 2^-126 may lose bits; with less than 8 exponent bits it is code 0 anyway.
    """
    narrow = kind is not Kind.FLOAT64 and layout.exponent_bits < 8 and int(np.abs(offsets).max()) <= 126
    scales: Array = np.ldexp(1.0, offsets.astype(np.int32)).astype(np.float32 if narrow else np.float64)
    return scales


def least_error(
    elements: Array,
    kind: Kind,
    layout: Layout,
    groups: Groups,
    holds: NDArray[np.int64],
    threads: int,
    *,
    floats: bool,
) -> tuple[NDArray[np.int64], NDArray[np.float32] | None]:
    """Return the offset of each group, from the one that holds on, with the least squared error.

    A first pass tries 4 offsets; a second (8 more) and a third (20 more) see only the groups whose clipped
    part may still be smaller than the least error so far.  With `floats`, float32 scales by which values are
    multiplied are returned too: the best of eighths of an octave, within one octave of that offset.
    """
    if floats:
        if int(holds.min()) < -_FLOAT_REACH:
            raise FormatError("the largest magnitude needs a scale beyond float32; use scale='search'")
        holds = np.minimum(holds, _FLOAT_REACH - _WINDOWS[-1][1])
    offsets = holds.copy()
    scales = np.ones(holds.size, np.float32) if floats else None
    base = encoding_scales(holds, kind, layout)
    octave = np.exp2(np.arange(-_STEPS, _STEPS + 1) / _STEPS).astype(np.float32).astype(np.float64)

    def part(low: int, high: int) -> None:
        runs = groups.runs(elements, low, high)
        best = _least(kind, layout, runs, base[low:high], BIAS_LIMIT - layout.bias - holds[low:high])
        offsets[low:high] += best
        if scales is not None:
            scaled = np.ldexp(base[low:high], best.astype(np.int32))
            finest = octave[np.argmin(_noise(kind, layout, runs, scaled, octave), axis=1)]
            scales[low:high] = (1 / (scaled * finest)).astype(np.float32)

    run_parts(part, groups.strips(), threads)
    return offsets, scales


def _least(kind: Kind, layout: Layout, runs: Array, scales: Array, room: NDArray[Any]) -> NDArray[np.int64]:
    """Return for each run the k of least squared error of its elements times its scale times 2^k."""
    best = np.zeros(len(runs), np.int64)
    least = np.full(len(runs), np.inf)
    open_ = np.arange(len(runs))  # runs that are not decided
    top = (1 << layout.exponent_bits) - 1 if layout.exponent_bits else 1
    for first, stop in _WINDOWS:
        some = runs if open_.size == len(runs) else runs[open_]
        k = np.arange(first, stop)
        errors = _noise(kind, layout, some, scales[open_], np.exp2(k))
        errors[k[None, :] > room[open_, None]] = np.inf
        found = np.argmin(errors, axis=1)
        value = np.take_along_axis(errors, found[:, None], axis=1)[:, 0]
        better = value < least[open_]
        best[open_[better]] = k[found[better]]
        least[open_[better]] = value[better]
        # Larger offsets clip more, so what is clipped at the last one tried is a lower bound of their errors;
        # what is not clipped there adds at most half a step each.
        half = math.ldexp(1.0, top - layout.bias - layout.mantissa_bits - 1 - int(k[-1]))
        clipped = errors[:, -1] - runs.shape[1] * half * half
        open_ = open_[clipped < least[open_]]
        if not open_.size:
            break
    return best


def _noise(kind: Kind, layout: Layout, runs: Array, scales: Array, factors: Array) -> NDArray[np.float64]:
    """Return the squared error of each run for each factor, in units of the scaled run."""
    out = np.empty((len(runs), factors.size))
    kernels.noise(kind, layout, runs, np.ascontiguousarray(scales), factors, out)
    out /= factors * factors
    return out
