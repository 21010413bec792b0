"""Quantization of arrays, with exponent offsets or float scales fitted to their values."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from exmy import kernels
from exmy.elements import Array, Kind, NonFinite, as_flat, saturates
from exmy.errors import FormatError, NonFiniteError
from exmy.fit import BIAS_LIMIT, encoding_scales, fit_bias, zero_nonfinite
from exmy.format import Format, as_format
from exmy.groups import Groups
from exmy.offsets import group_peaks, largest_unclipped_offsets, search_offsets
from exmy.packing import packed_size
from exmy.quantized import Quantized
from exmy.rounding import Dither, Rounding, make_dither
from exmy.threads import check_threads, run_parts, split_at_tiles

__all__ = ["Scale", "quantize"]

Scale: TypeAlias = Literal["search", "max", "none", "float"]

_MAX_SPREAD = 255  # the largest difference between offsets of one array: they are stored as bytes


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
    """Quantize x to format f, with one exponent offset for the whole tensor, per row or per block.

    `x`: float16, bfloat16, float32 or float64, of any shape and strides. The bias of `f` does not matter, except
    with scale "none".

    With neither `axis` nor `block`, the tensor has one offset. With an `axis`, all elements along it share an
    offset: one per row. With a `block` of 16, 32, 64 or 128, each run of that many elements along the axis (the
    last axis if None) has one; the block must divide the length of the axis.

    `scale`: "max" is the largest offset with which no value clips; "search" is the offset with the least squared
    error, which may clip a few large values to give the others finer steps; "none" is offset 0; "float" uses
    float32 scales instead of offsets, those with the least squared error. Offsets of one array differ by at most
    255; groups whose magnitudes are below 2^-255 times those of the largest group get coarser steps.

    `nonfinite`, `rounding` and `seed` are as for `encode`; offsets are fitted to the finite values, for rounding
    to nearest. `threads`: the maximum number of threads for a large array; the result does not depend on it.

    Raise `FormatError` for an unknown scale or block length and for magnitudes that clip with every bias,
    `SizeError` if axis or block do not fit the shape, and otherwise as `encode` does.
    """
    f = as_format(f)
    dither = make_dither(rounding, seed)
    if scale not in {"search", "max", "none", "float"}:
        raise FormatError(f"scale is {scale!r}; expected 'search', 'max', 'none' or 'float'")
    saturate, threads = saturates(nonfinite), check_threads(threads)
    elements, kind, shape = as_flat(x)
    groups = Groups.from_shape(shape, axis, block)
    if scale == "none":
        if groups.axis is not None:
            raise FormatError(
                "scale='none' has no offsets to share; leave out axis and block, or choose another scale"
            )
    else:
        f = f.standard
    offsets = np.zeros(groups.counts, np.int16)
    decoding_scales = np.ones(groups.counts, np.float32) if scale == "float" else None
    if groups.axis is None and scale in {"max", "search"}:
        fit = fit_bias(elements, kind, f.layout, scale, threads, saturate=saturate)
        if fit.nonfinite_count and not saturate:
            raise _nonfinite_error(elements, kind, shape)
        offsets[...] = fit.bias - f.bias
    elif elements.size and scale != "none":
        best, scales = _fit_groups(elements, kind, f, groups, scale, threads, saturate=saturate)
        if scales is None or decoding_scales is None:
            offsets[...] = np.minimum(best, best.min() + _MAX_SPREAD).reshape(groups.counts)
        else:
            decoding_scales[...] = scales.reshape(groups.counts)
    packed = np.empty(packed_size(elements.size, f.bits), np.uint8)
    _encode(elements, kind, f, groups, offsets, decoding_scales, packed, saturate, threads, dither)
    return Quantized(f, groups, offsets, decoding_scales, packed, kind.name.lower())


def _fit_groups(
    elements: Array, kind: Kind, f: Format, groups: Groups, scale: Scale, threads: int, *, saturate: bool
) -> tuple[Array, Array | None]:
    """Return the best offset of each group, and its float scale if scale is "float"."""
    peaks = group_peaks(elements, kind, groups, threads)
    if not np.isfinite(peaks).all():
        if not saturate:
            raise _nonfinite_error(elements, kind, groups.shape)
        elements = zero_nonfinite(elements, kind)
        peaks = group_peaks(elements, kind, groups, threads)
    unclipped = largest_unclipped_offsets(peaks, f.layout)
    if scale == "max":
        return unclipped, None
    return search_offsets(elements, kind, f.layout, groups, unclipped, threads, float_scales=scale == "float")


def _encode(
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
            kernels.encode_groups(kind, layout, groups, low, scales, source, target, seed=seed)

    run_parts(encode_part, split_at_tiles(elements.size, threads), threads)
    if any(count for count, _ in results):
        raise _nonfinite_error(elements, kind, groups.shape)


def _nonfinite_error(elements: Array, kind: Kind, shape: tuple[int, ...]) -> NonFiniteError:
    _, count, first = kernels.peak(kind, elements)
    return NonFiniteError(count, elements.size, tuple(int(i) for i in np.unravel_index(first, shape)))
