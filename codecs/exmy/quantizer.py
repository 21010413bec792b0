"""Quantization of arrays, with exponent offsets or float scales fitted to their values."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from exmy import kernels
from exmy.elements import Array, Kind, NonFinite, as_flat, saturates
from exmy.errors import FormatError, NonFiniteError
from exmy.fit import BIAS_LIMIT, FitMethod, encoding_scales, fit_bias, zero_nonfinite
from exmy.format import Format, as_format
from exmy.groups import Groups
from exmy.importance import Importance
from exmy.offsets import group_peaks, largest_unclipped_offsets, search_offsets, search_scales
from exmy.packing import checked_output, packed_size
from exmy.quantized import MAX_SPREAD, Quantized
from exmy.reference import clipping_limit
from exmy.rounding import Dither, Rounding, make_dither
from exmy.scales import (
    FLOAT_SCALES,
    FloatScale,
    GroupScales,
    fit_scales,
    fixed_scale,
    is_float_scale,
    relative_scales,
)
from exmy.threads import check_threads, run_parts, split_at_tiles

__all__ = ["Scale", "check_scale", "encode_elements", "quantize", "unclipped_scales"]

Scale: TypeAlias = Literal["search", "max", "none", "float", "e4m3", "6bit"] | float
"""How offsets or scales are chosen: see `quantize`."""

_SCALE_LIMIT = 2.0**125  # fixed scales and their reciprocals are normal float32 numbers


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
    importance: Any = None,
    out: Array | None = None,
) -> Quantized:
    """Quantize x to format f, with one exponent offset for the whole tensor, per row or per block.

    `x`: float16, bfloat16, float32 or float64, of any shape and strides. The bias of `f` does not matter, except
    with scale "none".

    With neither `axis` nor `block`, the tensor has one offset. With an `axis`, all elements along it share an
    offset: one per row. With a `block` of 16, 32, 64, 128 or 256, each run of that many elements along the axis
    (the last axis if None) has one; the block must divide the length of the axis.

    `scale`: "max" is the largest offset that clips no value; "search" is the offset with the least squared
    error, which may clip a few large values to give the others finer steps; "none" is offset 0. Offsets of one
    array differ by at most 255; groups whose magnitudes are below 2^-255 times those of the largest group get
    coarser steps. "float" uses float32 scales instead of offsets, those with the least squared error. "e4m3" and
    "6bit" are like "float", but store the scales in 8 and about 6 bits each (see `exmy.scales`). A number is the
    scale of the whole tensor, for entropy coding: it is rounded to float32, and -0 is encoded as +0. With an axis
    or block, the scale of each group is that number times the root mean square of its elements, stored as in
    "e4m3", so that groups of unequal magnitudes have about equal relative errors.

    `importance`: the weights of squared errors, with which "search", "float", "e4m3" and "6bit" choose among the
    same offsets or scales: finite numbers, none negative and not all 0, which broadcast to the shape of x, such as
    (columns,) or (rows, 1). Where all elements of a group have the same weight, the result does not change.

    `nonfinite`, `rounding` and `seed` are as for `encode`; offsets are fitted to the finite values, for rounding
    to nearest. `threads`: the maximum number of threads for a large array; the result does not depend on it.
    `out`: a writable, contiguous, flat uint8 array for the packed codes, of exactly their size.

    Raise `FormatError` for an unknown scale or block length and for magnitudes that clip with every bias,
    `SizeError` if axis, block or importance do not fit the shape, `FormatError` or `DtypeError` for unsuitable
    importance, `SizeError` or `DtypeError` for an unsuitable `out`, and otherwise as `encode` does. After an error
    the contents of `out` are undefined.

    Examples
    --------
    >>> x = np.random.default_rng(0).normal(size=(64, 256)).astype("float32")
    >>> q = exmy.quantize(x, "e2m3", block=32)
    >>> q.offsets.shape, q.bits_per_value
    ((64, 8), 6.26953125)
    >>> exmy.sqnr(x, q.dequantize()) > 30
    True
    """
    f = as_format(f)
    dither = make_dither(rounding, seed)
    scale = check_scale(scale, axis, block)
    saturate, threads = saturates(nonfinite), check_threads(threads)
    elements, kind, shape = as_flat(x)
    groups = Groups.from_shape(shape, axis, block)
    weights = Importance.from_array(importance, shape)
    if scale != "none":
        f = f.standard
    offsets, scales = np.zeros(groups.counts, np.int16), None
    if isinstance(scale, float):
        scales = _number_scales(scale, elements, kind, groups, saturate=saturate)
    elif groups.axis is None and scale in {"max", "search"}:
        method: FitMethod = "max" if scale == "max" else "search"
        fit = fit_bias(elements, kind, f.layout, method, threads, saturate=saturate, importance=weights)
        if fit.nonfinite_count and not saturate:
            raise _nonfinite_error(elements, kind, shape)
        offsets[...] = fit.bias - f.bias
    elif is_float_scale(scale):
        scales = _fit_scales(elements, kind, f, groups, scale, weights, threads, saturate=saturate)
    elif elements.size and scale != "none":
        best = _fit_offsets(elements, kind, f, groups, scale, weights, threads, saturate=saturate)
        offsets[...] = np.minimum(best, best.min() + MAX_SPREAD).reshape(groups.counts)
    packed = checked_output(out, packed_size(elements.size, f.bits))
    values, positive_zero = None if scales is None else scales.values, isinstance(scale, float)
    encode_elements(
        elements, kind, f, groups, offsets, values, packed, saturate, threads, dither, positive_zero=positive_zero
    )
    return Quantized(f, groups, offsets, scales, packed, kind.name.lower())


def check_scale(scale: Any, axis: int | None, block: int | None) -> Scale:
    """Return a valid `scale` argument of `quantize`, a number as the float that float32 represents.

    Raise `FormatError` if it is invalid, or has no offsets or scales for an axis or block.
    """
    is_number = isinstance(scale, (int, float, np.integer, np.floating)) and not isinstance(scale, bool)
    if is_number:
        if not 1 / _SCALE_LIMIT <= scale <= _SCALE_LIMIT:
            raise FormatError(f"scale is {scale!r}; expected a positive number from 2^-125 to 2^125")
        scale = float(np.float32(scale))
    elif not isinstance(scale, str) or scale not in {"search", "max", "none", *FLOAT_SCALES}:
        raise FormatError(
            f"scale is {scale!r}; expected 'search', 'max', 'none', 'float', 'e4m3', '6bit' or a positive number"
        )
    if scale == "none" and (axis, block) != (None, None):
        raise FormatError(
            f"scale={scale!r} has no offsets to share; leave out axis and block, or choose another scale"
        )
    checked: Scale = scale
    return checked


def _finite_peaks(
    elements: Array, kind: Kind, groups: Groups, threads: int, *, saturate: bool
) -> tuple[Array, NDArray[np.float64]]:
    """Return the elements, with zeros for NaN and infinity if `saturate`, and the peak of each group."""
    peaks = group_peaks(elements, kind, groups, threads)
    if not np.isfinite(peaks).all():
        if not saturate:
            raise _nonfinite_error(elements, kind, groups.shape)
        elements = zero_nonfinite(elements, kind)
        peaks = group_peaks(elements, kind, groups, threads)
    return elements, peaks


def _number_scales(scale: float, elements: Array, kind: Kind, groups: Groups, *, saturate: bool) -> GroupScales:
    """Return the scales of a number: that of the whole tensor, or of groups in proportion to their magnitudes."""
    if groups.axis is None:
        return fixed_scale(scale, groups)
    if elements.size:
        elements, _ = _finite_peaks(elements, kind, groups, 1, saturate=saturate)
    return relative_scales(scale, elements, kind, groups)


def _fit_offsets(
    elements: Array,
    kind: Kind,
    f: Format,
    groups: Groups,
    scale: Scale,
    importance: Importance | None,
    threads: int,
    *,
    saturate: bool,
) -> Array:
    """Return the best offset of each group."""
    elements, peaks = _finite_peaks(elements, kind, groups, threads, saturate=saturate)
    unclipped = largest_unclipped_offsets(peaks, f.layout)
    if scale == "max":
        return unclipped
    return search_offsets(elements, kind, f.layout, groups, unclipped, importance, threads)


def _fit_scales(
    elements: Array,
    kind: Kind,
    f: Format,
    groups: Groups,
    scale: FloatScale,
    importance: Importance | None,
    threads: int,
    *,
    saturate: bool,
) -> GroupScales:
    """Return the best float scale of each group that a header can store."""
    ideal = np.ones(math.prod(groups.counts), np.float32)
    if elements.size:
        elements, peaks = _finite_peaks(elements, kind, groups, threads, saturate=saturate)
        unclipped = largest_unclipped_offsets(peaks, f.layout)
        ideal = search_scales(elements, kind, f.layout, groups, unclipped, importance, threads)
    return fit_scales(elements, kind, f.layout, groups, ideal, scale, importance, threads)


def unclipped_scales(elements: Array, kind: Kind, f: Format, groups: Groups) -> NDArray[np.float32]:
    """Return for each group the least float scale that clips no value; raise as `quantize` does."""
    if not elements.size:
        return np.ones(math.prod(groups.counts), np.float32)
    _, peaks = _finite_peaks(elements, kind, groups, 1, saturate=False)
    with np.errstate(over="ignore"):
        least = (peaks / clipping_limit(f.layout)).astype(np.float32)
    if not np.isfinite(least).all():
        raise FormatError("the largest magnitude needs a scale beyond float32; use scale='search'")
    return np.maximum(least, np.finfo(np.float32).tiny)


def encode_elements(
    elements: Array,
    kind: Kind,
    f: Format,
    groups: Groups,
    offsets: Array,
    decoding_scales: Array | None,
    packed: Array,
    saturate: bool,
    threads: int,
    dither: Dither | None,
    *,
    positive_zero: bool,
) -> None:
    """Write the packed codes to `packed`. Raise `NonFiniteError` for NaN and infinity unless `saturate`."""
    layout = f.layout
    scales: Array | None = None
    if decoding_scales is not None and elements.size:
        scales = 1 / decoding_scales.reshape(-1).astype(np.float64)
        if kind is not Kind.FLOAT64 and layout.exponent_bits < 8:
            scales = scales.astype(np.float32)
    elif groups.axis is not None and elements.size:
        scales = encoding_scales(offsets.reshape(-1), kind, layout)
    else:
        bias = layout.bias + int(offsets.reshape(-1)[0]) if offsets.size else layout.bias
        assert abs(bias) <= BIAS_LIMIT
        layout = layout._replace(bias=bias)
    results: list[tuple[int, int]] = []

    def encode_part(low: int, high: int) -> None:
        target = packed[packed_size(low, f.bits) : packed_size(high, f.bits)]
        source = elements[low:high]
        if scales is None:
            part_dither = dither and dither.at(low)
            results.append(
                kernels.encode(kind, layout, source, target, packed=True, saturate=saturate, dither=part_dither)
            )
        else:
            seed = dither and dither.seed
            finite = kernels.encode_groups(
                kind, layout, groups, low, scales, source, target, positive_zero=positive_zero, seed=seed
            )
            if not finite and not saturate:
                results.append(kernels.peak(kind, source)[1:])

    run_parts(encode_part, split_at_tiles(elements.size, threads), threads)
    if any(count for count, _ in results):
        raise _nonfinite_error(elements, kind, groups.shape)


def _nonfinite_error(elements: Array, kind: Kind, shape: tuple[int, ...]) -> NonFiniteError:
    _, count, first = kernels.peak(kind, elements)
    return NonFiniteError.at(count, first, shape)
