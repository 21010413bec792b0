"""Quantized: an array as packed codes of a format, with the offsets or scales that groups of them share."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from exmy import kernels
from exmy.elements import TOP, Array, Kind, Layout, as_flat, kind_of, output_dtype, plain, without_infinity
from exmy.errors import DtypeError, FormatError, SizeError
from exmy.fit import BIAS_LIMIT
from exmy.format import Format
from exmy.groups import Granularity, Groups
from exmy.packing import as_bytes, packed_size, unpack
from exmy.reference import clipping_limit, widen
from exmy.threads import check_threads, run_parts, whole_tiles

__all__ = ["Quantized", "are_scales", "may_overflow"]

_HEADER = struct.Struct("<4sBBBBhBBhHh6x")
_MAGIC = b"eXmY"
_VERSION = 1
_COLUMNS = 1 << 16  # of a long group that are looked at together
_DIMENSIONS = 64  # that NumPy's arrays have at most
_SIZE = 1 << 60  # elements, below which an array of float64 can be made, zero lengths left out
_KINDS = {kind.name.lower(): kind for kind in Kind}


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """An array in eXmY: what `exmy.quantize` returns.

    An element is worth value(code, format) · 2^-offset of its group, or, where there are scales, value · scale.
    Immutable; its arrays are read-only.
    """

    format: Format
    """The format of the codes."""
    groups: Groups
    """Which elements share an offset."""
    offsets: NDArray[np.int16]
    """The shared exponent offsets, one for each group: shape () for a tensor, else `groups.counts`."""
    scales: NDArray[np.float32] | None
    """Float scales instead, of the same shape; the offsets are 0 then."""
    packed: NDArray[np.uint8]
    """The packed codes of the elements in C order."""
    dtype: str
    """The name of the dtype that was quantized."""

    def __post_init__(self) -> None:
        for array in (self.offsets, self.scales, self.packed):
            if array is not None:
                array.flags.writeable = False

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
        """What shares an offset: "tensor", "row" or "block"."""
        return self.groups.granularity

    @property
    def axis(self) -> int | None:
        """The axis along which elements share an offset; None where all do."""
        return self.groups.axis

    @property
    def block(self) -> int | None:
        """How many elements along the axis share an offset; None where all do."""
        return self.groups.block

    @property
    def nbytes(self) -> int:
        """The bytes that `to_bytes` returns: packed codes and metadata."""
        return self._codes_at() + self.packed.size

    @property
    def bits_per_value(self) -> float:
        """Bits for each element, metadata included; NaN for an empty array."""
        return self.nbytes * 8 / self.size if self.size else math.nan

    def codes(self) -> Array:
        """Return the codes, unpacked, in the array's shape."""
        return unpack(self.packed, self.format.bits, self.size).reshape(self.shape)

    def dequantize(self, dtype: DTypeLike = "float32", *, out: Array | None = None, threads: int = 1) -> Array:
        """Return the values in float16, bfloat16, float32 or float64: the exact ones, rounded once.

        What rounds beyond the largest value of dtype is infinite, but in the dtype that was quantized, whose
        values were finite, it is that largest value.
        out: a writable, C-contiguous array of that dtype and the shape, to write to and return (DtypeError,
        SizeError otherwise).  threads: how many may share the work on a big array; the result is the same for all.
        """
        wanted = output_dtype(dtype)
        out = np.empty(self.shape, wanted) if out is None else out
        if out.dtype != wanted:
            raise DtypeError(f"out has dtype {out.dtype!r}; expected native {wanted.name}")
        if out.shape != self.shape or not (out.flags.c_contiguous and out.flags.writeable):
            raise SizeError(f"out has shape {out.shape}; expected a writable, C-contiguous one of {self.shape}")
        kind = kind_of(out.dtype)
        target = plain(out.reshape(-1), kind)
        threads = check_threads(threads)
        bits = self.format.bits

        def part(low: int, high: int) -> None:
            data = self.packed[packed_size(low, bits) : packed_size(high, bits)]
            if scales is None:
                kernels.decode(kind, layout, data, target[low:high], packed=True)
            else:
                kernels.decode_groups(kind, layout, self.groups, low, scales, data, target[low:high])
            if saturating:
                without_infinity(target[low:high], kind)

        layout = self.format.layout
        scales = None
        if self.scales is None and self.offsets.ndim == 0:
            layout = layout._replace(bias=layout.bias + int(self.offsets))
        elif self.size:
            layout, scales = self._decoding_scales(kind)
        saturating = may_overflow(self, kind)
        run_parts(part, whole_tiles(self.size, threads), threads)
        return out

    def clipped(self, x: Any) -> int:
        """Return how many elements of x lie beyond the largest value of their group by more than half a step.

        x: what was quantized, of the same shape (SizeError otherwise).  Infinity counts, NaN does not.
        """
        elements, kind, shape = as_flat(x)
        if shape != self.shape:
            raise SizeError(f"x has shape {shape}; expected that of the quantized array, {self.shape}")
        if not self.size:
            return 0
        if self.scales is None:
            limits = np.ldexp(clipping_limit(self.format.layout), -self.offsets.astype(np.int32)).reshape(-1)
        else:
            limits = clipping_limit(self.format.layout) * self.scales.astype(np.float64).reshape(-1)
        found = 0
        for low, high in self.groups.strips():
            runs = self.groups.runs(elements, low, high)
            for start in range(0, runs.shape[1], _COLUMNS):
                part = np.abs(widen(runs[:, start : start + _COLUMNS], kind))
                found += int((part > limits[low:high, None]).sum())
        return found

    def _decoding_scales(self, kind: Kind) -> tuple[Layout, Array]:
        """Return a layout, and the factors of its values, as `kernels.decode_groups` takes them.

        The layout has its standard bias where offsets allow that, which keeps values and factors near 1: with any
        bias and offset, both and their product are then float64, exactly.
        """
        layout = self.format.layout
        if self.scales is not None:
            narrow = kind is Kind.FLOAT32 and _is_float32(layout)
            return layout, self.scales.reshape(-1).astype(np.float32 if narrow else np.float64)
        standard = self.format.standard.layout
        offsets = self.offsets.reshape(-1).astype(np.int32) + (layout.bias - standard.bias)
        low, high = int(offsets.min()), int(offsets.max())
        x, y, bias = standard
        narrow = kind is not Kind.FLOAT64 and _is_float32(standard) and -126 <= low <= high <= 126
        if kind in {Kind.FLOAT16, Kind.BFLOAT16}:  # the kernels round a float32 product again
            narrow = narrow and 1 - bias - y - high >= -149 and (1 << x) - bias - low <= 127
        return standard, np.ldexp(1.0, -offsets).astype(np.float32 if narrow else np.float64)

    def _codes_at(self) -> int:
        """Return where in the bytes the packed codes begin."""
        each = 1 if self.scales is None else 4
        return -(-(_HEADER.size + 8 * len(self.shape) + each * self.offsets.size) // 8) * 8

    def to_bytes(self) -> bytes:
        """Return all of it as self-describing bytes, ending with the packed codes: see FORMAT.md, section 8."""
        x, y, bias = self.format.layout
        base = int(self.offsets.min()) if self.offsets.size else 0
        axis = -1 if self.axis is None else self.axis
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            _KINDS[self.dtype],
            x,
            y,
            bias,
            len(self.shape),
            self.scales is not None,
            axis,
            self.block or 0,
            base,
        )
        if self.scales is None:
            shared = (self.offsets.reshape(-1).astype(np.int32) - base).astype(np.uint8).tobytes()
        else:
            shared = self.scales.astype("<f4").tobytes()
        head = header + struct.pack(f"<{len(self.shape)}Q", *self.shape) + shared
        return b"".join([head, bytes(self._codes_at() - len(head)), self.packed.data])

    @staticmethod
    def from_bytes(data: Any) -> Quantized:
        """Return what `to_bytes` was called on; the packed codes stay in the memory of data, uncopied.

        data: bytes-like.  FormatError where the header is not that of a quantized array, or is of a newer version;
        SizeError where the bytes are truncated or too long, or axis and block do not fit the shape.
        """
        try:
            view = memoryview(data).cast("B").toreadonly()
        except TypeError as cause:
            raise DtypeError(f"a quantized array is read from bytes, not from {type(data).__name__}") from cause
        if len(view) < _HEADER.size:
            raise SizeError(f"a quantized array is truncated: {len(view)} bytes, expected {_HEADER.size} or more")
        fields = _HEADER.unpack(view[: _HEADER.size])
        magic, version, kind, x, y, bias, ndim, floats, axis, block, base = fields
        if magic != _MAGIC:
            raise FormatError(f"these bytes are no quantized array: they begin with {magic!r}, not {_MAGIC!r}")
        if version != _VERSION:
            raise FormatError(
                f"this quantized array has version {version}, and this exmy reads version {_VERSION}; install "
                "a newer exmy"
            )
        if kind > Kind.FLOAT64 or floats > 1 or any(view[18:24]):
            raise FormatError("the header of this quantized array holds what version 1 does not know")
        if ndim > _DIMENSIONS:
            raise FormatError(f"this quantized array has {ndim} dimensions; expected at most {_DIMENSIONS}")
        at = _HEADER.size + 8 * ndim
        if len(view) < at:
            raise SizeError(f"a quantized array is truncated: {len(view)} bytes, expected {at} or more")
        shape = struct.unpack(f"<{ndim}Q", view[_HEADER.size : at])
        if math.prod(n or 1 for n in shape) >= _SIZE or axis < -1:
            raise FormatError(f"the shape {shape} or the axis {axis} of this quantized array is out of range")
        groups = Groups.of(shape, None if axis < 0 else axis, block or None)
        if (axis < 0) != (groups.axis is None):
            raise FormatError("the header of this quantized array has a block without an axis")
        f = Format(f"e{x}m{y}b{bias}")
        count = math.prod(groups.counts)
        end = at + count * (4 if floats else 1)
        start, size = -(-end // 8) * 8, packed_size(math.prod(shape), f.bits)
        if len(view) != start + size:
            fault = "truncated" if len(view) < start + size else "too long"
            raise SizeError(f"a quantized array is {fault}: {len(view)} bytes, expected {start + size}")
        if any(view[end:start]):
            raise FormatError("the padding behind the offsets or scales of this quantized array is not zero")
        offsets, scales = np.zeros(groups.counts, np.int16), None
        if floats:
            scales = np.frombuffer(view, "<f4", count, at).astype(np.float32).reshape(groups.counts)
            if base or not are_scales(scales):
                raise FormatError(
                    "the scales of this quantized array are not all finite and positive, with base 0"
                )
        else:
            deltas = np.frombuffer(view, np.uint8, count, at).astype(np.int32)
            most = int(deltas.max(initial=0))
            if count and not -BIAS_LIMIT <= bias + base <= bias + base + most <= BIAS_LIMIT:
                raise FormatError(
                    f"the bias {bias} and the offsets {base} to {base + most} of this quantized array add up to "
                    f"less than -{BIAS_LIMIT} or more than {BIAS_LIMIT}"
                )
            offsets[...] = (deltas + base).reshape(groups.counts)
        packed = as_bytes(view[start:], f.bits, math.prod(shape))
        return Quantized(f, groups, offsets, scales, packed, Kind(kind).name.lower())

    def __repr__(self) -> str:
        shared = self.granularity if self.axis is None else f"{self.granularity} along axis {self.axis}"
        if self.block:
            shared = f"block of {self.block} along axis {self.axis}"
        what = "offset" if self.scales is None else "scale"
        return f"<Quantized {self.format} {self.dtype} {self.shape}, one {what} per {shared}, {self.nbytes} bytes>"


def are_scales(scales: NDArray[np.float32]) -> bool:
    """Return whether all of these can be float scales: finite and positive."""
    return bool(np.all((scales > 0) & np.isfinite(scales)))


def may_overflow(q: Quantized, kind: Kind) -> bool:
    """Return whether a kind is what was quantized, and some code is worth more than its largest value."""
    if _KINDS[q.dtype] is not kind or not q.offsets.size:
        return False
    f = q.format
    if q.scales is not None:
        beyond = math.frexp(q.scales.max())[1]
    else:
        beyond = -int(q.offsets.min() if q.offsets.ndim else q.offsets)
    return max(1 << f.exponent_bits, 2) - f.bias + beyond >= TOP[kind]


def _is_float32(layout: Layout) -> bool:
    """Return whether every value of a layout is a float32, as the kernels decide it."""
    x, _, bias = layout
    return bias <= 127 and max((1 << x) - 1, 1) - bias <= 127
