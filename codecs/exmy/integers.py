"""Quantization by integer operations, shared by `exmy.jax` and `exmy.torch`.

Floats are processed as bit patterns, so that no compiler can change a result by flushing
subnormals, fusing operations or keeping excess precision. All integers are int32: significands have at most 24
bits, and exponents are small.

1. The peak of a group is the greatest magnitude, as bits, of its finite elements. The offset of the group is the
   largest that does not clip the peak, as in `exmy.offsets`; groups of zeros get the least offset of the others.
2. A code and the bits of a float are both the magnitude of significand · 2^exponent in a binary format, so one
   function encodes and decodes.
3. Codes are packed in tiles of 256 (FORMAT.md, section 5).
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple, Protocol

from exmy.elements import Kind, Layout
from exmy.errors import DtypeError, SizeError
from exmy.fit import BIAS_LIMIT
from exmy.groups import Groups
from exmy.packing import TILE, packed_size
from exmy.quantized import MAX_SPREAD
from exmy.reference import planes

__all__ = [
    "Operations",
    "check_shapes",
    "decode",
    "encode",
    "float_type",
    "grouped_shape",
    "pack",
    "unclipped_offsets",
    "unpack",
]

_MAX_DROP = 26  # bits; dropping more than the 24 bits of a significand also gives 0


class Operations(Protocol):
    """Operations on int32 arrays of one framework, beside Python's operators."""

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """Return elements of `a` where the condition holds, else of `b`; either may be an integer."""

    def minimum(self, a: Any, b: Any) -> Any:
        """Return the element-wise minimum; `b` may be an integer."""

    def maximum(self, a: Any, b: Any) -> Any:
        """Return the element-wise maximum; `b` may be an integer."""

    def bit_length(self, a: Any) -> Any:
        """Return the bit length of integers from 1 to 2^24; the result for 0 is arbitrary."""

    def largest(self, a: Any, axis: int | None) -> Any:
        """Return the maximum along an axis (kept with length 1), or over all elements."""

    def smallest(self, a: Any) -> Any:
        """Return the minimum over all elements."""

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        """Join arrays along an axis."""

    def zeros(self, shape: tuple[int, ...], like: Any) -> Any:
        """Return zeros of the dtype and on the device of an array."""


class Binary(NamedTuple):
    """A binary format: its mantissa bits, the exponent of its smallest normal, and its largest magnitude."""

    mantissa_bits: int
    lowest: int
    largest: int

    @staticmethod
    def from_layout(layout: Layout) -> Binary:
        """Return an eXmY format, whose magnitudes are codes without the sign."""
        exponent_bits, mantissa_bits, bias = layout
        return Binary(mantissa_bits, 1 - bias, (1 << (exponent_bits + mantissa_bits)) - 1)


FLOATS = {
    Kind.FLOAT16: Binary(10, -14, 0x7BFF),
    Kind.BFLOAT16: Binary(7, -126, 0x7F7F),
    Kind.FLOAT32: Binary(23, -126, 0x7F7FFFFF),
}
"""The float types, whose magnitudes are their bits without the sign; `largest` is the largest finite number."""


def float_type(kind: Kind) -> Binary:
    """Return a float type; raise `DtypeError` for float64, whose significands exceed 32 bits."""
    if kind not in FLOATS:
        raise DtypeError("x is float64; expected float16, bfloat16 or float32. exmy.quantize takes float64 arrays")
    return FLOATS[kind]


def _parts(bits: Any, f: Binary, ops: Operations) -> tuple[Any, Any]:
    """Return the significand and the exponent of magnitudes: significand · 2^exponent."""
    # float16 1.5 = 0x3E00: field 15, fraction 0x200 → significand 0x600, exponent -10: 1536 · 2^-10
    field = bits >> f.mantissa_bits
    hidden = 1 << f.mantissa_bits
    significand = ops.where(field > 0, bits & (hidden - 1) | hidden, bits)
    return significand, ops.maximum(field, 1) - 1 + (f.lowest - f.mantissa_bits)


def _magnitude(significand: Any, exponent: Any, f: Binary, ops: Operations) -> Any:
    """Return the magnitude nearest to significand · 2^exponent, ties to even, or the largest of the format."""
    # significand 11, exponent 0 in e4m3 (3 mantissa bits, bias 7): lead 3, drop 0 → exact, 1.375 · 2^3 = 0x53
    # significand 43, exponent 0: lead 5, drop 2 → 10 + rest 3 of 4, so up to 11: 1.375 · 2^5 = 0x63
    lead = ops.bit_length(significand) - 1 + exponent
    top = f.lowest + (f.largest >> f.mantissa_bits)
    normal = ops.minimum(ops.maximum(lead, f.lowest), top)
    drop = normal - f.mantissa_bits - exponent
    left = ops.minimum(ops.maximum(-drop, 0), _MAX_DROP - 2)
    right = ops.minimum(ops.maximum(drop, 0), _MAX_DROP)
    whole = significand >> right
    rest = significand - (whole << right)
    up = 2 * rest + (whole & 1) > (1 << right)
    quanta = ops.where(drop > 0, ops.where(up, whole + 1, whole), significand << left)
    result = quanta + ((normal - f.lowest) << f.mantissa_bits)
    result = ops.where(lead > top, f.largest, ops.minimum(result, f.largest))
    return ops.where(significand > 0, result, 0)


def encode(bits: Any, negative: Any, kind: Kind, layout: Layout, offsets: Any, ops: Operations) -> Any:
    """Return the codes of elements times 2^offset.

    `bits`: the magnitudes of the elements. `negative`: 1 for a sign bit, else 0. `offsets` broadcast to `bits`.
    Infinity becomes the largest value of its sign, and NaN +0.
    """
    f, target = FLOATS[kind], Binary.from_layout(layout)
    infinity = f.largest + 1
    significand, exponent = _parts(ops.minimum(bits, f.largest), f, ops)
    codes = ops.where(bits == infinity, target.largest, _magnitude(significand, exponent + offsets, target, ops))
    return ops.where(bits > infinity, 0, codes | negative << (layout.exponent_bits + layout.mantissa_bits))


def unclipped_offsets(bits: Any, kind: Kind, layout: Layout, axis: int | None, ops: Operations) -> Any:
    """Return for each group the largest offset that clips no element.

    A group is all elements, or those along an axis, which has length 1 in the result.
    """
    f = FLOATS[kind]
    exponent_bits, mantissa_bits, bias = layout
    peaks = ops.largest(ops.where(bits > f.largest, 0, bits), axis)
    significand, exponent = _parts(peaks, f, ops)
    length = ops.bit_length(significand)
    has_exponent = int(exponent_bits > 0)
    exponent = length + exponent - has_exponent
    digits = mantissa_bits + 1 + has_exponent  # of the largest value; a peak with more digits may round up
    normalised = significand << ops.minimum(ops.maximum(24 - length, 0), 24)
    exponent = ops.where(normalised >= (1 << 24) - (1 << (24 - digits)), exponent + 1, exponent)
    highest = (1 << exponent_bits) - 1 if exponent_bits else 1
    offsets = ops.minimum(highest - exponent, BIAS_LIMIT) - bias
    absent = 1 << 20  # beyond every offset
    least = ops.smallest(ops.where(peaks > 0, offsets, absent))
    least = ops.where(least == absent, 0, least)
    return ops.minimum(ops.where(peaks > 0, offsets, least), least + MAX_SPREAD)


def decode(codes: Any, kind: Kind, layout: Layout, offsets: Any, ops: Operations) -> tuple[Any, Any]:
    """Return the magnitudes and the sign bits, in `kind`, of decoded values; they are finite."""
    exponent_bits, mantissa_bits, _ = layout
    sign = exponent_bits + mantissa_bits
    significand, exponent = _parts(codes & ((1 << sign) - 1), Binary.from_layout(layout), ops)
    return _magnitude(significand, exponent - offsets, FLOATS[kind], ops), codes >> sign


def grouped_shape(groups: Groups) -> tuple[tuple[int, ...], int | None]:
    """Return a shape in which each group lies along one axis, and that axis (None if there is one group)."""
    shape, axis, block = groups.shape, groups.axis, groups.block
    if axis is None or block is None:
        return shape, axis
    return (*shape[:axis], shape[axis] // block, block, *shape[axis + 1 :]), axis + 1


def check_shapes(packed: Any, offsets: Any, bits: int, groups: Groups) -> None:
    """Raise `SizeError` unless packed codes and offsets have the shapes of one array, not of several together."""
    expected = (packed_size(math.prod(groups.shape), bits),), groups.counts
    if (tuple(packed.shape), tuple(offsets.shape)) != expected:
        raise SizeError(
            f"packed codes and offsets have the shapes {tuple(packed.shape)} and {tuple(offsets.shape)}; expected "
            f"{expected[0]} and {expected[1]} for an array of shape {groups.shape}. If a collective has gathered "
            "those of several arrays, decode each array, with vmap or in a loop"
        )


def pack(codes: Any, bits: int, ops: Operations) -> Any:
    """Pack flat codes into bytes, held as int32."""
    count = math.prod(codes.shape)
    whole = count // TILE * TILE
    rest = count - whole
    parts = []
    if whole:
        parts.append(_pack_tiles(codes[:whole].reshape(-1, TILE), bits, ops).reshape(-1))
    if rest:
        padding = ops.zeros((-rest % 8,), codes)
        parts.append(
            _pack_tiles(ops.concatenate([codes[whole:], padding], 0).reshape(1, -1), bits, ops).reshape(-1)
        )
    return ops.concatenate(parts, 0) if parts else codes


def _pack_tiles(tiles: Any, bits: int, ops: Operations) -> Any:
    # 8 codes of 3 bits: their low 2 bits fill 2 bytes (byte 0: codes 0, 2, 4, 6), then their high bits 1 byte
    rows, length = tiles.shape
    parts = []
    for width, shift in planes(bits):
        runs = (tiles >> shift & ((1 << width) - 1)).reshape(rows, 8 // width, length * width // 8)
        shifted = (runs[:, i] << (i * width) for i in range(8 // width))
        parts.append(functools.reduce(operator.or_, shifted))
    return ops.concatenate(parts, 1)


def unpack(packed: Any, bits: int, count: int, ops: Operations) -> Any:
    """Return `count` codes of packed bytes, passed as int32."""
    split = count // TILE * TILE // 8 * bits
    parts = []
    if split:
        parts.append(_unpack_tiles(packed[:split].reshape(-1, TILE // 8 * bits), bits, ops).reshape(-1))
    if count % TILE:
        parts.append(_unpack_tiles(packed[split:].reshape(1, -1), bits, ops).reshape(-1))
    return ops.concatenate(parts, 0)[:count] if parts else packed


def _unpack_tiles(rows: Any, bits: int, ops: Operations) -> Any:
    length = rows.shape[1] * 8 // bits
    codes, start = [], 0
    for width, shift in planes(bits):
        plane = rows[:, start : start + length * width // 8]
        start += length * width // 8
        runs = [plane >> (i * width) & ((1 << width) - 1) for i in range(8 // width)]
        codes.append(ops.concatenate(runs, 1) << shift)
    return functools.reduce(operator.or_, codes)
