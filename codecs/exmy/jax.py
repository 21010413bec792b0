"""eXmY in JAX, under jit and vmap: rounding with gradients, and packed codes for collectives.

>>> import exmy.jax, jax, jax.numpy as jnp
>>> exmy.jax.round(jnp.array([0.6, -1.0, 500.0]), "e4m3")
Array([  0.625,  -1.   , 480.   ], dtype=float32)
>>> q = exmy.jax.quantize(jnp.array([0.6, -1.0, 500.0]), "e4m3")
>>> q.packed.dtype, q.dequantize()
(dtype('uint8'), Array([  0.625,  -1.   , 512.   ], dtype=float32))

All results equal, bit for bit, those of the functions in `exmy` with the same names.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import exmy
from exmy import integers
from exmy.elements import Kind, kind_of
from exmy.emulation import Constants, Gradient, NonFiniteOutput, check_options, rounding_constants
from exmy.errors import DtypeError, SizeError
from exmy.format import Format, as_format
from exmy.groups import Groups
from exmy.packing import packed_size
from exmy.rounding import Rounding, check_uint64

__all__ = ["Quantized", "fake_quantize", "pack", "quantize", "round", "unpack"]


def round(
    x: Any,
    f: Format | str,
    *,
    nonfinite: NonFiniteOutput = "propagate",
    rounding: Rounding = "nearest",
    seed: Any = 0,
    gradient: Gradient = "identity",
) -> jax.Array:
    """Return x rounded to values of f, in the shape and dtype of x, bit for bit equal to `exmy.round`.

    `x`: float16, bfloat16, float32, or float64 if JAX has it enabled. All arguments but `x` and `seed` are static.
    `nonfinite`: "propagate" keeps NaN and infinity; "saturate" replaces infinity by the largest value of its sign
    and NaN by +0. `rounding="stochastic"` rounds up or down at random, so that the expected value is x unless x
    saturates; the random bits depend on `seed` and on the element's position in x in C order. Under vmap,
    positions start at 0 in every example, so pass each example a different seed. `seed`: 0 ... 2^64 - 1, or a JAX
    array of one integer, traced or not, whose 32 or 64 bits are read as unsigned.

    The derivative is that of a straight-through estimator: 1 everywhere with `gradient="identity"`; with
    "clipped", 0 for NaN and for magnitudes beyond the largest value of f.

    Raise `DtypeError` for other dtypes, `SizeError` for stochastic rounding of more than 2^32 elements,
    `FormatError` for an invalid option or seed.
    """
    f = as_format(f)
    check_options(nonfinite, rounding, gradient)
    array = jnp.asarray(x)
    kind = kind_of(np.dtype(array.dtype))
    if rounding == "stochastic" and array.size > 1 << 32:
        raise SizeError(f"x has {array.size} elements; expected at most 2^32 for stochastic rounding: split it")
    s = rounding_constants(f.layout, kind)
    rounded: jax.Array = _straight_through(array, _seed_words(seed), s, nonfinite, rounding, gradient)
    return rounded


def _seed_words(seed: Any) -> jax.Array:
    """Return the low and the high 32 bits of a seed as uint32 of shape (2,)."""
    if isinstance(seed, np.ndarray) and seed.size == 1:
        seed = seed.item()  # without x64, a JAX array would drop the upper 32 bits
    if not isinstance(seed, jax.Array):
        number = check_uint64("seed", seed)
        return jnp.array([number & 0xFFFFFFFF, number >> 32], jnp.uint32)
    if not jnp.issubdtype(seed.dtype, jnp.integer) or seed.size != 1:
        raise DtypeError(f"seed is a {seed.dtype} array of shape {seed.shape}; expected one integer")
    bits = seed.reshape(())
    high = bits >> 32 if bits.dtype.itemsize == 8 else jnp.uint32(0)
    words: jax.Array = jnp.stack([bits.astype(jnp.uint32), high.astype(jnp.uint32)])
    return words


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4, 5))
def _straight_through(
    x: jax.Array, seed: jax.Array, s: Constants, nonfinite: NonFiniteOutput, rounding: Rounding, gradient: Gradient
) -> jax.Array:
    rounded: jax.Array = _round_bits(x, seed, s, nonfinite, rounding)
    return rounded


@_straight_through.defjvp
def _tangent(
    s: Constants,
    nonfinite: NonFiniteOutput,
    rounding: Rounding,
    gradient: Gradient,
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, Any],
) -> tuple[jax.Array, jax.Array]:
    (x, seed), (dx, _) = primals, tangents
    if gradient == "clipped":
        dx = jnp.where(_magnitude(x, s) <= s.limit, dx, jnp.zeros_like(dx))
    rounded = _straight_through(x, seed, s, nonfinite, rounding, gradient)  # differentiable, unlike _round_bits
    return rounded, dx


def _word(x: jax.Array, s: Constants) -> jax.Array:
    """Return the bits of x as integers of at least 32 bits."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{s.width}"))
    return bits.astype(jnp.uint64 if s.width == 64 else jnp.uint32)


def _magnitude(x: jax.Array, s: Constants) -> jax.Array:
    return _word(x, s) & ((1 << (s.width - 1)) - 1)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _round_bits(
    x: jax.Array, seed: jax.Array, s: Constants, nonfinite: NonFiniteOutput, rounding: Rounding
) -> jax.Array:
    """Drop the low bits of each significand, and add one unit if that is nearer, or at random."""
    mantissa_bits = s.type_mantissa_bits
    word = _word(x, s)
    magnitude = _magnitude(x, s)
    unit = jnp.array(1, word.dtype)
    signed = jnp.int64 if s.width == 64 else jnp.int32

    field = (magnitude >> mantissa_bits).astype(signed)
    significand = jnp.where(field > 0, magnitude & ((1 << mantissa_bits) - 1) | (1 << mantissa_bits), magnitude)
    field = jnp.maximum(field, 1)
    lead = field  # the exponent field that the leading bit would have as a normal number
    if s.lowest < 1:  # subnormals of the type may be normals of the format
        zeros = lax.clz(significand).astype(signed)
        lead = field + (8 * word.dtype.itemsize - 1 - mantissa_bits) - zeros
    drop = jnp.maximum(lead, s.lowest) - field + s.surplus
    drop = jnp.clip(drop, 0, mantissa_bits + 34).astype(word.dtype)  # larger drops also round to 0
    whole = drop > mantissa_bits  # the entire significand is dropped

    rest = significand & ((unit << jnp.minimum(drop, mantissa_bits + 1)) - 1)
    if rounding == "nearest":
        odd = significand >> jnp.minimum(drop, mantissa_bits + 1) & 1
        up = 2 * rest + odd > unit << jnp.minimum(drop, mantissa_bits + 2)
    else:
        fraction = jnp.where(
            drop <= 32, rest << jnp.minimum(32 - jnp.minimum(drop, 32), 31), rest >> (jnp.maximum(drop, 32) - 32)
        ).astype(jnp.uint32)
        up = _random_bits(x.shape, seed) + fraction < fraction  # whether the sum overflows 32 bits
    truncated = jnp.where(whole, 0, magnitude - rest)
    step = jnp.where(whole, jnp.array(s.smallest, word.dtype), unit << jnp.minimum(drop, mantissa_bits))
    out = truncated + jnp.where(up, step, 0)

    out = jnp.where(magnitude > s.limit, jnp.array(s.largest, word.dtype), out)
    if nonfinite == "propagate":
        out = jnp.where(magnitude >= s.infinity, magnitude, out)
    out = out | (word ^ magnitude)
    if nonfinite == "saturate":
        out = jnp.where(magnitude > s.infinity, 0, out)
    return lax.bitcast_convert_type(out.astype(jnp.dtype(f"uint{s.width}")), x.dtype)


def _random_bits(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Return 32 random bits for each element: a hash of its position in C order and of the seed."""
    position = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):  # a sum over axes, not a reshape, preserves the sharding of x
        stride = math.prod(shape[axis + 1 :])
        if shape[axis] > 1:
            position += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
    high = _mix(jnp.uint32(0x9E3779B9))  # the hash is of 64-bit positions; their high half is 0 here
    k0 = _mix(seed[0] ^ _mix(seed[1] ^ high))
    k1 = _mix(k0 + jnp.uint32(0x85EBCA6B))
    return _mix(_mix(position ^ k0) + k1)


def _mix(h: jax.Array) -> jax.Array:
    h ^= h >> 16
    h *= jnp.uint32(0x7FEB352D)
    h ^= h >> 15
    h *= jnp.uint32(0x846CA68B)
    return h ^ h >> 16


class _Operations:
    """The operations of `exmy.integers` in JAX."""

    where = staticmethod(jnp.where)
    minimum = staticmethod(jnp.minimum)
    maximum = staticmethod(jnp.maximum)

    def bit_length(self, a: jax.Array) -> jax.Array:
        length: jax.Array = 32 - lax.clz(a)
        return length

    def largest(self, a: jax.Array, axis: int | None) -> jax.Array:
        return jnp.max(a, axis=axis, keepdims=axis is not None)

    def smallest(self, a: jax.Array) -> jax.Array:
        return jnp.min(a)

    def concatenate(self, parts: list[jax.Array], axis: int) -> jax.Array:
        return jnp.concatenate(parts, axis)

    def zeros(self, shape: tuple[int, ...], like: jax.Array) -> jax.Array:
        return jnp.zeros(shape, like.dtype)


_OPERATIONS: Any = _Operations()


@partial(
    jax.tree_util.register_dataclass, data_fields=["packed", "offsets"], meta_fields=["format", "groups", "dtype"]
)
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """The packed codes of an array on a device, and the exponent offset of each group: a pytree of two arrays."""

    packed: jax.Array
    """The packed codes, flat uint8, as FORMAT.md, section 5, defines them."""
    offsets: jax.Array
    """The offset of each group, int16 of shape `groups.counts`."""
    format: Format
    """The format of the codes; each group's offset is added to its bias."""
    groups: Groups
    """Which elements share an offset."""
    dtype: str
    """The dtype of the array that was quantized."""

    def dequantize(self) -> jax.Array:
        """Return the values, in the dtype of the array that was quantized.

        Decode arrays that a collective has gathered one by one: `jax.vmap(lambda q: q.dequantize())(gathered)`.
        """
        integers.check_shapes(self.packed, self.offsets, self.format.bits, self.groups)
        values: jax.Array = _dequantized(self)
        return values

    def to_numpy(self) -> exmy.Quantized:
        """Return the same codes and offsets on the host."""
        integers.check_shapes(self.packed, self.offsets, self.format.bits, self.groups)
        offsets, packed = np.asarray(self.offsets), np.asarray(self.packed)
        return exmy.Quantized(self.format, self.groups, offsets, None, packed, self.dtype)


def quantize(x: Any, f: Format | str, axis: int | None = None, block: int | None = None) -> Quantized:
    """Quantize x to format f, with one exponent offset for the whole tensor, per row or per block.

    The result is that of `exmy.quantize` with scale="max" and nonfinite="saturate": the offsets, computed on
    the device, are the largest that clip no finite value, infinity becomes the largest value of its sign, and
    NaN becomes +0. `x`: float16, bfloat16 or float32. `f`, `axis` and `block` are static.

    Raise `DtypeError` for other dtypes, `SizeError` if axis or block do not fit the shape, `FormatError` for an
    invalid format or block.
    """
    array = jnp.asarray(x)
    kind = kind_of(np.dtype(array.dtype))
    integers.float_type(kind)
    f, groups = as_format(f).standard, Groups.from_shape(array.shape, axis, block)
    packed, offsets = _quantized(array, kind, f, groups)
    return Quantized(packed, offsets, f, groups, array.dtype.name)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _quantized(x: jax.Array, kind: Kind, f: Format, groups: Groups) -> tuple[jax.Array, jax.Array]:
    if x.size == 0:
        return jnp.zeros(0, jnp.uint8), jnp.zeros(groups.counts, jnp.int16)
    shape, axis = integers.grouped_shape(groups)
    word = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).reshape(shape)
    sign = 8 * x.dtype.itemsize - 1
    bits, negative = (word & ((1 << sign) - 1)).astype(jnp.int32), (word >> sign).astype(jnp.int32)
    offsets = integers.unclipped_offsets(bits, kind, f.layout, axis, _OPERATIONS)
    codes = integers.encode(bits, negative, kind, f.layout, offsets, _OPERATIONS)
    packed = integers.pack(codes.reshape(-1), f.bits, _OPERATIONS).astype(jnp.uint8)
    return packed, offsets.reshape(groups.counts).astype(jnp.int16)


@jax.jit
def _dequantized(q: Quantized) -> jax.Array:
    dtype = jnp.dtype(q.dtype)
    count = math.prod(q.groups.shape)
    if count == 0:
        return jnp.zeros(q.groups.shape, dtype)
    shape, axis = integers.grouped_shape(q.groups)
    codes = integers.unpack(q.packed.astype(jnp.int32), q.format.bits, count, _OPERATIONS).reshape(shape)
    offsets = q.offsets.astype(jnp.int32)
    offsets = offsets if axis is None else jnp.expand_dims(offsets, axis)
    kind = kind_of(np.dtype(dtype))
    bits, negative = integers.decode(codes, kind, q.format.layout, offsets, _OPERATIONS)
    unsigned = jnp.dtype(f"uint{8 * dtype.itemsize}")
    word = bits.astype(unsigned) | negative.astype(unsigned) << (8 * dtype.itemsize - 1)
    return lax.bitcast_convert_type(word, dtype).reshape(q.groups.shape)


def pack(codes: Any, bits: int) -> jax.Array:
    """Return codes packed on the device: `exmy.pack`. Bits above the width are dropped, not refused.

    Raise `DtypeError` for codes that are not integers.
    """
    array, bits = jnp.asarray(codes), _checked_bits(bits)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise DtypeError(f"codes have dtype {array.dtype}; expected integers")
    packed: jax.Array = _packed(array, bits)
    return packed


def unpack(packed: Any, bits: int, count: int) -> jax.Array:
    """Return `count` codes of packed bytes, flat uint8 or uint16, unpacked on the device: `exmy.unpack`.

    Raise `DtypeError` unless `packed` is uint8, `SizeError` unless its size is `exmy.packed_size(count, bits)`.
    """
    array = jnp.asarray(packed)
    if array.dtype != jnp.uint8:
        raise DtypeError(f"packed codes have dtype {array.dtype}; expected uint8")
    if array.shape != (packed_size(count, bits),):
        raise SizeError(f"packed has shape {array.shape}; expected {packed_size(count, bits)} bytes")
    codes: jax.Array = _unpacked(array, bits, count)
    return codes


def _checked_bits(bits: int) -> int:
    packed_size(0, bits)  # raises FormatError
    return bits


@partial(jax.jit, static_argnums=1)
def _packed(codes: jax.Array, bits: int) -> jax.Array:
    packed: jax.Array = integers.pack(codes.reshape(-1).astype(jnp.int32), bits, _OPERATIONS)
    return packed.astype(jnp.uint8)


@partial(jax.jit, static_argnums=(1, 2))
def _unpacked(packed: jax.Array, bits: int, count: int) -> jax.Array:
    codes: jax.Array = integers.unpack(packed.astype(jnp.int32), bits, count, _OPERATIONS)
    return codes.astype(jnp.uint8 if bits <= 8 else jnp.uint16)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def fake_quantize(x: Any, f: Format | str, axis: int | None = None, block: int | None = None) -> jax.Array:
    """Return the values of `quantize(x, f, axis, block)`; the derivative is 1 everywhere (straight-through).

    Raise as `quantize` does.
    """
    return quantize(x, f, axis, block).dequantize()


@fake_quantize.defjvp
def _fake_quantize_tangent(
    f: Format | str, axis: int | None, block: int | None, primals: tuple[Any], tangents: tuple[Any]
) -> tuple[jax.Array, Any]:
    return fake_quantize(*primals, f, axis, block), tangents[0]
