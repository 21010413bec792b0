"""Quantized arrays: packed codes of a format, with the offsets or scales that groups of elements share."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from exmy import kernels
from exmy.elements import (
    EXPONENT_LIMIT,
    Array,
    Kind,
    Layout,
    as_flat,
    builtin_view,
    clamp_infinities,
    kind_of,
    output_dtype,
)
from exmy.errors import DtypeError, FormatError, SizeError
from exmy.fit import BIAS_LIMIT
from exmy.format import Format
from exmy.groups import Granularity, Groups
from exmy.noise import Difference, compare
from exmy.packing import as_bytes, packed_size, unpack
from exmy.reference import clipping_limit, widen
from exmy.scales import FLOAT_SCALES, GroupScales, parse_scales, scales_size
from exmy.threads import check_threads, run_parts, split_at_tiles

__all__ = ["MAX_SPREAD", "Quantized", "decoding", "needs_clamping"]

MAX_SPREAD = 255
"""The largest difference between offsets of one array: they are stored as bytes."""

_HEADER = struct.Struct("<4sBBBBhBBhHh6x")  # FORMAT.md, section 8
_MAGIC = b"eXmY"
_VERSION = 1
_LINE = 1 << 12  # elements of a long group that `count_clipped` checks together
_MAX_DIMENSIONS = 64  # the limit of NumPy
_SIZE_LIMIT = 1 << 60  # elements, with empty axes counted as 1: too many for a float64 array of NumPy
_KINDS = {kind.name.lower(): kind for kind in Kind}


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """An array encoded in an eXmY format: the result of `exmy.quantize`.

    The value of an element is value(code, format) · 2^-offset, or value(code, format) · scale if there are scales,
    with the offset or scale of its group. Immutable; its arrays are read-only.
    """

    format: Format
    """The format of the codes."""
    groups: Groups
    """The groups of elements that share an offset or scale."""
    offsets: NDArray[np.int16]
    """The exponent offset of each group, of shape `groups.counts`; all 0 if there are scales."""
    group_scales: GroupScales | None
    """The float scale of each group and its encoding, or None."""
    packed: NDArray[np.uint8]
    """The packed codes of the elements in C order."""
    dtype: str
    """The name of the dtype before quantization."""

    def __post_init__(self) -> None:
        for array in (self.offsets, self.scales, self.packed):
            if array is not None:
                array.flags.writeable = False

    def __reduce__(self) -> tuple[type[Quantized], tuple[Any, ...]]:
        # copying and unpickling call the constructor, which makes the arrays read-only
        return Quantized, (self.format, self.groups, self.offsets, self.group_scales, self.packed, self.dtype)

    @property
    def scales(self) -> NDArray[np.float32] | None:
        """The float scale of each group, of the shape of `offsets`, or None."""
        return None if self.group_scales is None else self.group_scales.values

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.groups.shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def granularity(self) -> Granularity:
        """The elements that share an offset: "tensor", "row" or "block"."""
        return self.groups.granularity

    @property
    def axis(self) -> int | None:
        """The axis along which elements share an offset; None if all elements do."""
        return self.groups.axis

    @property
    def block(self) -> int | None:
        """The number of elements along the axis that share an offset; None for all of them."""
        return self.groups.block

    @property
    def nbytes(self) -> int:
        """The size of `to_bytes()` in bytes: packed codes and metadata."""
        return self._header_size() + self.packed.size

    @property
    def bits_per_value(self) -> float:
        """The bits per element, including metadata; NaN for an empty array."""
        return self.nbytes * 8 / self.size if self.size else math.nan

    def codes(self) -> Array:
        """Return the codes, unpacked, in the array's shape."""
        return unpack(self.packed, self.format.bits, self.size).reshape(self.shape)

    def dequantize(self, dtype: DTypeLike | None = None, *, out: Array | None = None, threads: int = 1) -> Array:
        """Return the values in float16, bfloat16, float32 or float64, each rounded once from its exact value.

        By default, the dtype is that of `out`, or else the one before quantization. Values beyond the range of the
        dtype become infinity. If the dtype is the one before quantization, they saturate to its largest value
        instead, because the original values were finite.
        `out`: a writable, C-contiguous array of that dtype and shape, to write to and return. `threads`: the
        maximum number of threads for a large array; the result does not depend on it.
        Raise `DtypeError` or `SizeError` for an unsuitable dtype or `out`.
        """
        if dtype is None:
            dtype = self.dtype if out is None else out.dtype
        native = output_dtype(dtype)
        out = np.empty(self.shape, native) if out is None else out
        if out.dtype != native:
            raise DtypeError(f"out has dtype {out.dtype!r}; expected native {native.name}")
        if out.shape != self.shape:
            raise SizeError(f"out has shape {out.shape}; expected {self.shape}")
        if not (out.flags.c_contiguous and out.flags.writeable):
            raise SizeError("out is read-only or not C-contiguous; expected a writable, C-contiguous array")
        kind = kind_of(out.dtype)
        target = builtin_view(out.reshape(-1), kind)
        threads = check_threads(threads)
        bits, (layout, scales) = self.format.bits, decoding(self, kind)
        saturating = needs_clamping(self, kind)

        def decode_part(low: int, high: int) -> None:
            data = self.packed[packed_size(low, bits) : packed_size(high, bits)]
            if scales is None:
                kernels.decode(kind, layout, data, target[low:high], packed=True)
            else:
                kernels.decode_groups(kind, layout, self.groups, low, scales, data, target[low:high])
            if saturating:
                clamp_infinities(target[low:high], kind)

        run_parts(decode_part, split_at_tiles(self.size, threads), threads)
        return out

    def measure(self, x: Any) -> tuple[Difference, int]:
        """Return the error of the quantized array as an approximation of x, and the number of clipped elements.

        `x`: the unquantized array. The results are those of `exmy.compare(x, self.dequantize(x.dtype))`, up to the
        order in which an array of more than 2^20 elements is added up, and of `count_clipped(x)`. They take less
        time, since the decoded values are not stored. Raise `SizeError` for another shape.
        """
        elements, kind, shape = as_flat(x)
        if shape != self.shape:
            raise SizeError(f"x has shape {shape}; expected that of the quantized array, {self.shape}")
        if needs_clamping(self, kind):
            return compare(x, self.dequantize(np.asarray(x).dtype)), self.count_clipped(x)
        layout, scales = decoding(self, kind)
        limits = self._clipping_limits()
        limit = float(limits[0]) if limits.size == 1 else math.inf
        *totals, count = kernels.measure(kind, layout, self.groups, scales, limit, self.packed, elements)
        return Difference.from_totals(self.size, totals), count if limits.size == 1 else self.count_clipped(x)

    def count_clipped(self, x: Any) -> int:
        """Return the number of elements of x that the format clips.

        An element is clipped if its magnitude exceeds the largest value of a code in its group by more than half a
        step; infinity counts, NaN does not. `x`: the unquantized array. Raise `SizeError` for another shape.
        """
        elements, kind, shape = as_flat(x)
        if shape != self.shape:
            raise SizeError(f"x has shape {shape}; expected that of the quantized array, {self.shape}")
        if not self.size:
            return 0
        limits, count = self._clipping_limits(), 0
        for low, high in self.groups.strips():
            runs = kernels.runs(self.groups, elements, low, high)
            if runs.shape[1] <= _LINE:
                count += _count_above(runs, limits[low:high], kind)
                continue
            for run, limit in zip(runs, limits[low:high], strict=True):
                stop = len(run) // _LINE * _LINE
                count += _count_above(run[:stop].reshape(-1, _LINE), limit, kind)
                if stop < len(run):
                    count += _count_above(run[None, stop:], limit, kind)
        return count

    def _clipping_limits(self) -> NDArray[np.float64]:
        """Return for each group the magnitude above which elements are clipped."""
        limit = clipping_limit(self.format.layout)
        if self.scales is None:
            return np.ldexp(limit, -self.offsets.astype(np.int32)).reshape(-1)
        return limit * self.scales.astype(np.float64).reshape(-1)

    def _header_size(self) -> int:
        """Return the number of bytes before the packed codes in `to_bytes`."""
        parameters = self.offsets.size if self.group_scales is None else self.group_scales.stored.size
        return -(-(_HEADER.size + 8 * len(self.shape) + parameters) // 8) * 8

    def to_bytes(self) -> bytes:
        """Return the array as self-describing bytes: see FORMAT.md, section 8.

        Raise `FormatError` if offsets differ by more than 255, which is possible in a joined array.
        """
        x, y, bias = self.format.layout
        base = int(self.offsets.min()) if self.offsets.size else 0
        highest = int(self.offsets.max()) if self.offsets.size else 0
        if highest - base > MAX_SPREAD:
            raise FormatError(
                f"the offsets {base} to {highest} of this quantized array differ by more than {MAX_SPREAD}, which "
                "its bytes can't store; quantize its values again, or store its parts"
            )
        axis, block, ndim = -1 if self.axis is None else self.axis, self.block or 0, len(self.shape)
        scaled = 0 if self.group_scales is None else 1 + FLOAT_SCALES.index(self.group_scales.encoding)
        header = _HEADER.pack(_MAGIC, _VERSION, _KINDS[self.dtype], x, y, bias, ndim, scaled, axis, block, base)
        if self.group_scales is None:
            parameters = (self.offsets.reshape(-1).astype(np.int32) - base).astype(np.uint8).tobytes()
        else:
            parameters = self.group_scales.stored.tobytes()
        head = header + struct.pack(f"<{ndim}Q", *self.shape) + parameters
        return b"".join([head, bytes(self._header_size() - len(head)), self.packed.data])

    @staticmethod
    def from_bytes(data: Any) -> Quantized:
        """Return the array encoded by `to_bytes`, without copying the packed codes from `data`.

        Raise `DtypeError` if `data` is not bytes-like, `FormatError` if the header, offsets or scales are invalid
        or the version is not supported, `SizeError` if the bytes are truncated or too long, or axis or block do
        not fit the shape.
        """
        try:
            view = memoryview(data).cast("B").toreadonly()
        except TypeError as cause:
            raise DtypeError(f"a quantized array is read from bytes, not from {type(data).__name__}") from cause
        if len(view) < _HEADER.size:
            raise SizeError(f"a quantized array is truncated: {len(view)} bytes, expected {_HEADER.size} or more")
        magic, version, kind, x, y, bias, ndim, scaled, axis, block, base = _HEADER.unpack(view[: _HEADER.size])
        if magic != _MAGIC:
            raise FormatError(
                f"these bytes are not a quantized array: they begin with {magic!r}, expected {_MAGIC!r}"
            )
        if version != _VERSION:
            raise FormatError(
                f"this quantized array has version {version}, and this exmy reads version {_VERSION}; install "
                "a newer exmy"
            )
        if kind > Kind.FLOAT64 or scaled > len(FLOAT_SCALES) or any(view[18:24]):
            raise FormatError("the header of this quantized array has a value that version 1 does not define")
        if ndim > _MAX_DIMENSIONS:
            raise FormatError(f"this quantized array has {ndim} dimensions; expected at most {_MAX_DIMENSIONS}")
        shape_end = _HEADER.size + 8 * ndim
        if len(view) < shape_end:
            raise SizeError(f"a quantized array is truncated: {len(view)} bytes, expected {shape_end} or more")
        shape = struct.unpack(f"<{ndim}Q", view[_HEADER.size : shape_end])
        if math.prod(n or 1 for n in shape) >= _SIZE_LIMIT or axis < -1:
            raise FormatError(f"the shape {shape} or the axis {axis} of this quantized array is out of range")
        groups = Groups.from_shape(shape, None if axis < 0 else axis, block or None)
        if (axis < 0) != (groups.axis is None):
            raise FormatError("the header of this quantized array has a block without an axis")
        f = Format(f"e{x}m{y}b{bias}")
        count = math.prod(groups.counts)
        encoding = FLOAT_SCALES[scaled - 1] if scaled else None
        end = shape_end + (count if encoding is None else scales_size(encoding, groups))
        start, size = -(-end // 8) * 8, packed_size(math.prod(shape), f.bits)
        if len(view) != start + size:
            fault = "truncated" if len(view) < start + size else "too long"
            raise SizeError(f"a quantized array is {fault}: {len(view)} bytes, expected {start + size}")
        if any(view[end:start]):
            raise FormatError("the padding after the offsets or scales of this quantized array is not zero")
        offsets, scales = np.zeros(groups.counts, np.int16), None
        if encoding is not None:
            if base:
                raise FormatError(f"the base of this quantized array is {base}; expected 0 beside scales")
            stored = np.frombuffer(view, np.uint8, end - shape_end, shape_end)
            scales = parse_scales(encoding, stored, groups)
        else:
            deltas = np.frombuffer(view, np.uint8, count, shape_end).astype(np.int32)
            offsets[...] = _offsets(deltas, base, bias).reshape(groups.counts)
        packed = as_bytes(view[start:], f.bits, math.prod(shape))
        return Quantized(f, groups, offsets, scales, packed, Kind(kind).name.lower())

    def __repr__(self) -> str:
        group = self.granularity if self.axis is None else f"{self.granularity} along axis {self.axis}"
        if self.block:
            group = f"block of {self.block} along axis {self.axis}"
        term = "offset" if self.scales is None else "scale"
        return f"<Quantized {self.format} {self.dtype} {self.shape}, one {term} per {group}, {self.nbytes} bytes>"


def _offsets(deltas: NDArray[np.int32], base: int, bias: int) -> NDArray[np.int32]:
    """Return the offsets base + deltas. Raise `FormatError` if the sum with the bias is out of range."""
    highest = base + int(deltas.max(initial=0))
    if deltas.size and not -BIAS_LIMIT <= bias + base <= bias + highest <= BIAS_LIMIT:
        raise FormatError(
            f"the bias {bias} and the offsets {base} to {highest} of this quantized array add up to less than "
            f"-{BIAS_LIMIT} or more than {BIAS_LIMIT}"
        )
    return deltas + base


def decoding(q: Quantized, kind: Kind) -> tuple[Layout, Array | None]:
    """Return the layout, and the scale of each group, or None if its bias has the offset of all elements."""
    layout = q.format.layout
    if q.scales is None and q.offsets.ndim == 0:
        return layout._replace(bias=layout.bias + int(q.offsets)), None
    return _group_scales(q, kind) if q.size else (layout, None)


def _group_scales(q: Quantized, kind: Kind) -> tuple[Layout, Array]:
    """Return the layout and the scale of each group, the arguments of `kernels.decode_groups`.

    With offsets, the layout has its standard bias, and the scales absorb the difference. This keeps values and
    scales near 1, so that float64 represents both and their product exactly, for any bias and offset.
    """
    layout = q.format.layout
    if q.scales is not None:
        narrow = kind is Kind.FLOAT32 and _is_float32(layout)
        return layout, q.scales.reshape(-1).astype(np.float32 if narrow else np.float64)
    standard = q.format.standard.layout
    offsets = q.offsets.reshape(-1).astype(np.int32) + (layout.bias - standard.bias)
    low, high = int(offsets.min()), int(offsets.max())
    x, y, bias = standard
    narrow = kind is not Kind.FLOAT64 and _is_float32(standard) and -126 <= low <= high <= 126
    if kind in {Kind.FLOAT16, Kind.BFLOAT16}:  # float32 products must be exact: the kernels round them again
        narrow = narrow and 1 - bias - y - high >= -149 and (1 << x) - bias - low <= 127
    return standard, np.ldexp(1.0, -offsets).astype(np.float32 if narrow else np.float64)


def needs_clamping(q: Quantized, kind: Kind) -> bool:
    """Return whether `kind` is the dtype before quantization, and decoded values may be beyond its range."""
    if _KINDS[q.dtype] is not kind or not q.offsets.size:
        return False
    f = q.format
    if q.scales is not None:
        scale_exponent = math.frexp(q.scales.max() if q.scales.ndim else q.scales)[1]
    else:
        scale_exponent = -int(q.offsets.min() if q.offsets.ndim else q.offsets)
    return max(1 << f.exponent_bits, 2) - f.bias + scale_exponent >= EXPONENT_LIMIT[kind]


def _count_above(lines: Array, limits: Any, kind: Kind) -> int:
    """Return the number of elements whose magnitude exceeds the limit of their line, or of all lines."""
    peaks = np.empty(len(lines))
    kernels.peaks(kind, lines, peaks)
    above = ~(peaks <= limits)  # a NaN may hide other elements
    if not above.any():
        return 0
    limits = np.broadcast_to(limits, peaks.shape)[above, None]
    return int((np.abs(widen(lines[above], kind)) > limits).sum())


def _is_float32(layout: Layout) -> bool:
    """Return whether every value of a layout is a float32, by the same rule as the kernels."""
    x, _, bias = layout
    return bias <= 127 and max((1 << x) - 1, 1) - bias <= 127
