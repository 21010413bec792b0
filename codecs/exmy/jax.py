"""Emulation in JAX: `round` under jit, vmap and grad, bit for bit equal to `exmy.round`.

>>> import exmy.jax, jax, jax.numpy as jnp
>>> exmy.jax.round(jnp.array([0.3, -1.0, 500.0]), "e4m3")
Array([  0.3125,  -1.    , 480.    ], dtype=float32)
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from exmy.elements import kind_of
from exmy.emulation import Constants, Gradient, NonFiniteOutput, check_options, rounding_constants
from exmy.errors import DtypeError, SizeError
from exmy.format import Format, as_format
from exmy.rounding import Rounding, check_uint64

__all__ = ["round"]


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
