"""Quantizer: arrays to `Quantized`, with the exponents or scales that suit their values."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from exmy import kernels
from exmy.elements import Array, Kind, NonFinite, as_flat, saturates
from exmy.errors import FormatError, NonFiniteError
from exmy.fit import BIAS_LIMIT, encoding_scales, fit_bias, without_nonfinite
from exmy.format import Format, as_format
from exmy.groups import Groups
from exmy.offsets import holding_offsets, least_error, peaks_of
from exmy.packing import packed_size
from exmy.quantized import Quantized
from exmy.rounding import Dither, Rounding, dither_of
from exmy.threads import check_threads, run_parts, whole_tiles

__all__ = ["Scale", "quantize"]

Scale: TypeAlias = Literal["search", "max", "none", "float"]

_SPREAD = 255  # how far offsets of one array may lie apart


def quantize(
    x: Any,
    f: Format | str,
    axis: int | None = None,
    block: int | None = None,
    scale: Scale = "search",
    *,
    nonfinite: NonFinite = "error",
    threads: int = 1,
    rounding: Rounding = "nearest",
    seed: int = 0,
) -> Quantized:
    """Return x in format f, with an exponent offset for the whole, for each row or for each block.

    x: float16, bfloat16, float32 or float64, any shape and strides.  axis None: one offset; an axis: one for
    each row along it (all elements along the axis share); with block 16, 32, 64 or 128: one for each run of
    that many along the axis (the last axis if None), which the block must divide (SizeError otherwise).

    scale "max": the largest offset with which no value clips.  "search": the one with the least squared
    error, which may clip a few large values for finer steps.  "none": none, f as it is.  "float": a float32
    factor with the least squared error instead of an offset.  Except for "none", the bias of f does not
    matter.  Offsets of one array span at most 255: groups whose values are all 2^-255 of the largest and
    less get coarser steps.  NaN and infinity as in `encode`; where they saturate, the finite values decide.
    threads: how many may share the work on a big array; the result is the same for all.
    rounding "stochastic" and seed: as in `encode`; the offsets are those for rounding to nearest.
    """
    f = as_format(f)
    dither = dither_of(rounding, seed)
    if scale not in {"search", "max", "none", "float"}:
        raise FormatError(f"scale is {scale!r}; expected 'search', 'max', 'none' or 'float'")
    saturate, threads = saturates(nonfinite), check_threads(threads)
    elements, kind, shape = as_flat(x)
    groups = Groups.of(shape, axis, block)
    if scale == "none":
        if groups.axis is not None:
            raise FormatError("scale='none' shares nothing; leave out axis and block, or choose another scale")
    else:
        f = f.standard
    offsets = np.zeros(groups.counts, np.int16)
    factors = np.ones(groups.counts, np.float32) if scale == "float" else None
    if groups.axis is None and scale in {"max", "search"}:
        fit = fit_bias(elements, kind, f.layout, scale, threads, saturate=saturate)
        if fit.bad and not saturate:
            raise _not_finite(elements, kind, shape)
        offsets[...] = fit.bias - f.bias
    elif elements.size and scale != "none":
        finite = elements
        peaks = peaks_of(elements, kind, groups, threads)
        if not np.isfinite(peaks).all():
            if not saturate:
                raise _not_finite(elements, kind, shape)
            finite = without_nonfinite(elements, kind)
            peaks = peaks_of(finite, kind, groups, threads)
        holds = holding_offsets(peaks, f.layout)
        if scale == "max":
            offsets[...] = np.minimum(holds, holds.min() + _SPREAD).reshape(groups.counts)
        else:
            found, best = least_error(finite, kind, f.layout, groups, holds, threads, floats=factors is not None)
            if best is None or factors is None:
                offsets[...] = np.minimum(found, found.min() + _SPREAD).reshape(groups.counts)
            else:
                factors[...] = best.reshape(groups.counts)
    packed = np.empty(packed_size(elements.size, f.bits), np.uint8)
    _encode(elements, kind, f, groups, offsets, factors, packed, saturate, threads, dither)
    return Quantized(f, groups, offsets, factors, packed, kind.name.lower())


def _encode(
    elements: Array,
    kind: Kind,
    f: Format,
    groups: Groups,
    offsets: Array,
    factors: Array | None,
    packed: Array,
    saturate: bool,
    threads: int,
    dither: Dither | None,
) -> None:
    """Write the packed codes; NonFiniteError where `saturate` is not said."""
    layout = f.layout
    scales: Array | None = None
    if factors is not None and elements.size:
        scales = 1 / factors.reshape(-1).astype(np.float64)
        if kind is not Kind.FLOAT64 and layout.exponent_bits < 8:
            scales = scales.astype(np.float32)
    elif groups.axis is not None and elements.size:
        scales = encoding_scales(offsets.reshape(-1), kind, layout)
    else:
        bias = layout.bias + int(offsets.reshape(-1)[0]) if offsets.size else layout.bias
        assert abs(bias) <= BIAS_LIMIT
        layout = layout._replace(bias=bias)
    bad: list[tuple[int, int]] = []

    def part(low: int, high: int) -> None:
        target = packed[packed_size(low, f.bits) : packed_size(high, f.bits)]
        source = elements[low:high]
        if scales is None:
            here = dither and dither.at(low)
            bad.append(kernels.encode(kind, layout, source, target, packed=True, saturate=saturate, dither=here))
        else:
            seed = dither and dither.seed
            kernels.encode_groups(kind, layout, groups, low, scales, source, target, seed=seed)

    run_parts(part, whole_tiles(elements.size, threads), threads)
    if any(count for count, _ in bad):
        raise _not_finite(elements, kind, groups.shape)


def _not_finite(elements: Array, kind: Kind, shape: tuple[int, ...]) -> NonFiniteError:
    _, count, first = kernels.peak(kind, elements)
    return NonFiniteError(count, elements.size, tuple(int(i) for i in np.unravel_index(first, shape)))
