"""The specification of eXmY in NumPy (FORMAT.md in code), which every other implementation matches bit for bit.

A format is given by its layout: exponent bits X, mantissa bits Y and bias. Codes and values are computed in
float64, exactly except for the rounding itself: formats have at most 15 mantissa bits and biases of -512 ... 512.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy.elements import Array, Kind, Layout

__all__ = [
    "TILE",
    "clipping_limit",
    "compare",
    "decode",
    "encode",
    "exponents",
    "narrow",
    "pack",
    "planes",
    "random_bits",
    "unpack",
    "widen",
]

TILE = 256
"""The number of elements per tile, the unit of packing."""


def encode(x: NDArray[np.float64], layout: Layout, random: NDArray[np.uint32] | None = None) -> NDArray[np.uint16]:
    """Return the codes of the nearest values: ties to even, saturating at the largest value.

    With 32 random bits per element, round stochastically instead: a number at a fraction f of the way between two
    neighboring values is rounded up with probability f. Infinity becomes the largest value of its
    sign, NaN becomes +0.
    """
    exponent_bits, mantissa_bits, bias = layout
    lowest = 1 - bias  # exponent of the smallest normal, and of all subnormals
    largest = decode(np.array([(1 << (exponent_bits + mantissa_bits)) - 1]), layout)
    magnitude = np.minimum(np.abs(x), largest)
    magnitude[np.isnan(x)] = 0.0
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, lowest), lowest)
    quanta = np.ldexp(magnitude, mantissa_bits - exponent)
    if random is None:
        quanta = np.rint(quanta)
    else:
        below = np.floor(quanta)
        quanta = below + (np.floor((quanta - below) * 2.0**32) + random >= 2.0**32)
    code = quanta.astype(np.int64) + ((exponent - lowest).astype(np.int64) << mantissa_bits)
    sign = np.signbit(x) & ~np.isnan(x)
    code |= sign.astype(np.int64) << (exponent_bits + mantissa_bits)
    codes: NDArray[np.uint16] = code.astype(np.uint16)
    return codes


def random_bits(seed: int, first: int, count: int) -> NDArray[np.uint32]:
    """Return 32 random bits for each of the positions first ... first + count - 1 (modulo 2^64)."""
    position = np.arange(count, dtype=np.uint64) + np.uint64(first)
    low, high = position.astype(np.uint32), (position >> np.uint64(32)).astype(np.uint32)
    seed_low, seed_high = np.uint32(seed & 0xFFFFFFFF), np.uint32(seed >> 32)
    k0 = _mix(seed_low ^ _mix(seed_high ^ _mix(high + np.uint32(0x9E3779B9))))
    k1 = _mix(k0 + np.uint32(0x85EBCA6B))
    return _mix(_mix(low ^ k0) + k1)


def _mix(h: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Hash 32-bit integers: the "lowbias32" function."""
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x7FEB352D)
    h = (h ^ (h >> np.uint32(15))) * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


def decode(codes: NDArray[Any], layout: Layout) -> NDArray[np.float64]:
    """Return the value (-1)^s 2^(max(e,1) - bias) ((e>0) + m/2^Y) of each code s 2^(X+Y) + e 2^Y + m."""
    exponent_bits, mantissa_bits, bias = layout
    code = codes.astype(np.int64)
    m = code & ((1 << mantissa_bits) - 1)
    e = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    s = code >> (exponent_bits + mantissa_bits)
    quanta = ((e > 0).astype(np.int64) << mantissa_bits) + m
    magnitude = np.ldexp(quanta.astype(np.float64), np.maximum(e, 1) - bias - mantissa_bits)
    values: NDArray[np.float64] = np.copysign(magnitude, 0.5 - s)
    return values


def clipping_limit(layout: Layout) -> float:
    """Return the largest value plus half a step: larger magnitudes are clipped."""
    exponent_bits, mantissa_bits, bias = layout
    highest = ((1 << exponent_bits) - 1 if exponent_bits else 1) - bias
    quanta = (1 << mantissa_bits + (exponent_bits > 0)) - 0.5
    return math.ldexp(quanta, highest - mantissa_bits)


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """Return the planes of codes of `bits` bits as (width, first bit of the code), widest first."""
    result = []
    shift = 0
    for width in (8, 4, 2, 1):
        while bits - shift >= width:
            result.append((width, shift))
            shift += width
    return tuple(result)


def pack(codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Return the packed codes, tile by tile, with the last tile padded with code 0 to a multiple of 8."""
    whole = codes.size // TILE * TILE
    last = np.zeros((codes.size - whole + 7) // 8 * 8, codes.dtype)
    last[: codes.size - whole] = codes[whole:]
    tiles = _pack_tiles(codes[:whole].reshape(-1, TILE), bits)
    return np.concatenate([tiles.reshape(-1), _pack_tiles(last[None], bits).reshape(-1)])


def _pack_tiles(tiles: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Pack rows of equal length: byte j of a plane of n bytes holds elements j, j+n, j+2n and so on."""
    rows, length = tiles.shape
    parts = []
    for width, shift in planes(bits):
        runs = (tiles >> shift & ((1 << width) - 1)).reshape(rows, 8 // width, length * width // 8)
        shifts = (np.arange(8 // width) * width).astype(np.uint16)[None, :, None]
        parts.append(np.bitwise_or.reduce(runs.astype(np.uint16) << shifts, axis=1).astype(np.uint8))
    return np.concatenate(parts, axis=1)


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint16]:
    """Return `count` codes from packed bytes."""
    split = count // TILE * TILE // 8 * bits
    tiles = _unpack_tiles(packed[:split].reshape(-1, TILE // 8 * bits), bits)
    last = _unpack_tiles(packed[None, split:], bits)
    return np.concatenate([tiles.reshape(-1), last.reshape(-1)])[:count]


def _unpack_tiles(rows: NDArray[np.uint8], bits: int) -> NDArray[np.uint16]:
    """Unpack rows of bytes: the inverse of `_pack_tiles`."""
    length = rows.shape[1] * 8 // bits
    codes = np.zeros((rows.shape[0], length), np.uint16)
    start = 0
    for width, shift in planes(bits):
        plane = rows[:, start : start + length * width // 8].astype(np.uint16)
        start += plane.shape[1]
        shifts = (np.arange(8 // width) * width).astype(np.uint16)[None, :, None]
        runs = plane[:, None, :] >> shifts & ((1 << width) - 1)
        codes |= runs.reshape(rows.shape[0], length) << shift
    return codes


def widen(elements: Array, kind: Kind) -> NDArray[np.float64]:
    """Return the elements as float64, exactly; bfloat16 elements are passed as their bits in uint16."""
    if kind is Kind.BFLOAT16:
        elements = (elements.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return elements.astype(np.float64)


def narrow(values: NDArray[np.float64], kind: Kind) -> Array:
    """Round float64 values once to a kind: ties to even, overflow to infinity, bfloat16 as its bits."""
    if kind is Kind.FLOAT64:
        return values
    with np.errstate(over="ignore", under="ignore"):
        if kind is not Kind.BFLOAT16:
            return values.astype(np.float16 if kind is Kind.FLOAT16 else np.float32)
        # bfloat16: 8 significant bits, exponents from -126 on
        exponent = np.maximum(np.frexp(values)[1] - 1, -126)
        rounded = np.ldexp(np.rint(np.ldexp(values, 7 - exponent)), exponent - 7)
        bits: NDArray[np.uint32] = rounded.astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16)


def compare(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Return x^2, (x - y)^2, |x - y| and |x - y| / |x| (0 for x = 0), each in rows of 8."""
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        error = np.abs(x - y)
        relative = np.divide(error, np.abs(x), out=np.zeros_like(error), where=np.abs(x) > 0)
        return _rows(x * x), _rows(error * error), _rows(error), _rows(relative)


def _rows(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values in rows of 8, the last one padded with zeros."""
    rows = np.zeros((-(-values.size // 8), 8))
    rows.reshape(-1)[: values.size] = values
    return rows


def exponents(x: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the counts of the exponents from -1074 to 1023, then of zeros, then of non-finite elements."""
    exponent = np.frexp(x)[1] - 1
    index = np.where(np.isfinite(x), np.where(x == 0, 2098, exponent + 1074), 2099)
    return np.bincount(index, minlength=2100).astype(np.int64)
