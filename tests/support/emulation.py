"""Formats, edge cases and a reference for stochastic rounding, for the tests of emulation in JAX and PyTorch."""

from __future__ import annotations

from typing import Any

import exmy
import ml_dtypes
import numpy as np
from numpy.typing import NDArray

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}

# Common formats, and edge cases: grids, no mantissa bits, more range or precision than a dtype, values that are
# subnormals of a dtype, and only values below the smallest or above the largest of a dtype.
FORMATS = [
    exmy.Format(name)
    for name in (
        *("e0m1", "e0m7", "e1m2", "e2m1", "e3m0", "e4m3", "e4m3b25", "e4m3b200", "e5m2", "e5m2b140", "e5m10"),
        *("e5m2b16", "e2m3b128", "e3m12", "e8m0", "e8m7", "e2m3b-200", "e2m3b512"),
    )
]


# (seed, position, from, to) at which the hash is 0, 2^31 - 1 or 2^31, so that one bit decides.
EDGES = [(75553, 1654, 1.0, 1.0), (6039095, 1221, 1.25, 1.0), (489388, 374, 1.25, 1.5)]


def bits_of(array: NDArray[Any]) -> NDArray[Any]:
    return array.view(f"u{array.itemsize}")


def is_finite(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Like np.isfinite, which warns about signalling NaN in bfloat16."""
    infinity = int(bits_of(np.array([np.inf], array.dtype))[0])
    return bits_of(array) & (2 ** (8 * array.itemsize - 1) - 1) < infinity


def assert_same_bits(actual: NDArray[Any], expected: NDArray[Any], context: object = "") -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), context
    wrong = np.flatnonzero(bits_of(actual) != bits_of(expected))
    there = wrong[:5]
    assert not wrong.size, f"{context}: {actual.flat[there]} at {there}, expected {expected.flat[there]}"


def every_16_bit(dtype: str) -> NDArray[Any]:
    return np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])


def hard_inputs(f: exmy.Format, dtype: str) -> NDArray[Any]:
    """Return finite values: random bits, subnormals, zeros, limits of the dtype, values of f, ties, neighbours."""
    kind = DTYPES[dtype]
    info = ml_dtypes.finfo(kind)
    word = np.dtype(f"u{kind.itemsize}")
    rng = np.random.default_rng(0)
    own = f.values()[: 1 << (f.bits - 1)]
    own = own[:: -(-own.size // 300)]
    with np.errstate(over="ignore", under="ignore"):
        near = np.concatenate([own, (own[1:] + own[:-1]) / 2, [f.max, f.max * 1.5, f.smallest_subnormal / 2]])
        near = np.concatenate([near, f.smallest_subnormal * rng.uniform(0, 4, 300), rng.uniform(0, f.max, 300)])
        near = near.astype(kind)
    magnitudes = np.concatenate(
        [
            bits_of(near),
            bits_of(near) + word.type(1),
            bits_of(near) - word.type(1),  # the neighbour below 0 is a NaN, removed below
            rng.integers(0, 1 << (8 * kind.itemsize - 1), 3000, word),
            rng.integers(0, 1 << info.nmant, 300, word),
            bits_of(np.array([0, info.max, info.smallest_normal, info.smallest_subnormal], kind)),
        ]
    )
    x = magnitudes.view(kind)
    x = np.concatenate([x, -x])
    return x[is_finite(x)]


def stochastic(x: NDArray[Any], f: exmy.Format, seed: int) -> NDArray[Any]:
    """Return finite x rounded stochastically, by the definition; every step is exact in float64."""
    magnitude = np.minimum(np.abs(x.astype(np.float64)), f.max)
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, 1 - f.bias), 1 - f.bias)
    a = np.ldexp(magnitude, f.mantissa_bits - exponent)
    whole = np.floor(a)
    fraction = np.floor((a - whole) * 2.0**32).astype(np.uint64)
    drawn = noise(x.size, seed).reshape(x.shape)
    value = np.ldexp(whole + (drawn + fraction >= 1 << 32), exponent - f.mantissa_bits)
    with np.errstate(over="ignore", under="ignore"):
        return np.copysign(value, x.astype(np.float64)).astype(x.dtype)


def noise(count: int, seed: int) -> NDArray[np.uint64]:
    def mix(h: Any) -> Any:
        h = h ^ h >> 16
        h = h * 0x7FEB352D & 0xFFFFFFFF
        h = h ^ h >> 15
        h = h * 0x846CA68B & 0xFFFFFFFF
        return h ^ h >> 16

    k0 = mix(seed & 0xFFFFFFFF ^ mix(seed >> 32 ^ mix(0x9E3779B9)))
    k1 = mix(k0 + 0x85EBCA6B & 0xFFFFFFFF)
    lo = np.arange(count, dtype=np.uint64)
    return mix(mix(lo ^ np.uint64(k0)) + np.uint64(k1) & np.uint64(0xFFFFFFFF))
