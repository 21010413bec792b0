"""The specification of eXmY in NumPy: read this (or FORMAT.md) to know what every other path must produce.

A format is three integers here, its layout: exponent bits X, mantissa bits Y and bias.  All arithmetic is
float64, in which every step below is exact: formats have at most 15 mantissa bits and biases of -512 ...
512.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from exmy.elements import Array, Kind, Layout

__all__ = ["TILE", "decode", "encode", "narrow", "pack", "planes", "squared_errors", "unpack", "widen"]

TILE = 256
"""Elements of a tile, the unit of packing."""


def encode(x: NDArray[np.float64], layout: Layout) -> NDArray[np.uint16]:
    """Return the codes of the nearest values (ties to the even code; beyond the largest, the largest).

    Infinity becomes the largest value of its sign, NaN becomes +0.
    """
    exponent_bits, mantissa_bits, bias = layout
    lowest = 1 - bias  # exponent of the smallest normal, and of all subnormals
    largest = decode(np.array([(1 << (exponent_bits + mantissa_bits)) - 1]), layout)
    magnitude = np.minimum(np.abs(x), largest)
    magnitude[np.isnan(x)] = 0.0
    exponent = np.where(magnitude > 0, np.maximum(np.frexp(magnitude)[1] - 1, lowest), lowest)
    quanta = np.rint(np.ldexp(magnitude, mantissa_bits - exponent)).astype(np.int64)
    code = quanta + ((exponent - lowest).astype(np.int64) << mantissa_bits)
    sign = np.signbit(x) & ~np.isnan(x)
    code |= sign.astype(np.int64) << (exponent_bits + mantissa_bits)
    codes: NDArray[np.uint16] = code.astype(np.uint16)
    return codes


def decode(codes: NDArray[Any], layout: Layout) -> NDArray[np.float64]:
    """Return (-1)^s 2^(max(e,1) - bias) ((e>0) + m/2^Y) for the code s 2^(X+Y) + e 2^Y + m."""
    exponent_bits, mantissa_bits, bias = layout
    code = codes.astype(np.int64)
    m = code & ((1 << mantissa_bits) - 1)
    e = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    s = code >> (exponent_bits + mantissa_bits)
    quanta = ((e > 0).astype(np.int64) << mantissa_bits) + m
    magnitude = np.ldexp(quanta.astype(np.float64), np.maximum(e, 1) - bias - mantissa_bits)
    values: NDArray[np.float64] = np.copysign(magnitude, 0.5 - s)
    return values


def planes(bits: int) -> tuple[tuple[int, int], ...]:
    """Return the planes of a width, widest first, as (bits of the plane, lowest bit of the code in it)."""
    found = []
    shift = 0
    for width in (8, 4, 2, 1):
        while bits - shift >= width:
            found.append((width, shift))
            shift += width
    return tuple(found)


def pack(codes: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Return the packed bytes: tile after tile, the last one padded with code 0 to a multiple of 8."""
    whole = codes.size // TILE * TILE
    last = np.zeros((codes.size - whole + 7) // 8 * 8, codes.dtype)
    last[: codes.size - whole] = codes[whole:]
    tiles = _pack_tiles(codes[:whole].reshape(-1, TILE), bits)
    return np.concatenate([tiles.reshape(-1), _pack_tiles(last[None], bits).reshape(-1)])


def _pack_tiles(tiles: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Pack rows of equal length: in a plane of p bits, byte j holds elements j, j+n, ... of 8/p runs of n."""
    rows, length = tiles.shape
    parts = []
    for width, shift in planes(bits):
        runs = (tiles >> shift & ((1 << width) - 1)).reshape(rows, 8 // width, length * width // 8)
        place = (np.arange(8 // width) * width).astype(np.uint16)[None, :, None]
        parts.append(np.bitwise_or.reduce(runs.astype(np.uint16) << place, axis=1).astype(np.uint8))
    return np.concatenate(parts, axis=1)


def unpack(packed: NDArray[np.uint8], bits: int, count: int) -> NDArray[np.uint16]:
    """Return the `count` codes of packed bytes."""
    split = count // TILE * TILE // 8 * bits
    tiles = _unpack_tiles(packed[:split].reshape(-1, TILE // 8 * bits), bits)
    last = _unpack_tiles(packed[None, split:], bits)
    return np.concatenate([tiles.reshape(-1), last.reshape(-1)])[:count]


def _unpack_tiles(rows: NDArray[np.uint8], bits: int) -> NDArray[np.uint16]:
    """Undo _pack_tiles."""
    length = rows.shape[1] * 8 // bits
    codes = np.zeros((rows.shape[0], length), np.uint16)
    start = 0
    for width, shift in planes(bits):
        plane = rows[:, start : start + length * width // 8].astype(np.uint16)
        start += plane.shape[1]
        place = (np.arange(8 // width) * width).astype(np.uint16)[None, :, None]
        runs = plane[:, None, :] >> place & ((1 << width) - 1)
        codes |= runs.reshape(rows.shape[0], length) << shift
    return codes


def widen(elements: Array, kind: Kind) -> NDArray[np.float64]:
    """Return the elements as float64, exactly (bfloat16 is given as its bits in uint16)."""
    if kind is Kind.BFLOAT16:
        elements = (elements.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):
        return elements.astype(np.float64)


def narrow(values: NDArray[np.float64], kind: Kind) -> Array:
    """Return float64 values rounded once, ties to even, to a kind; overflow to infinity, bfloat16 as bits."""
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


def squared_errors(x: NDArray[np.float64], layout: Layout) -> NDArray[np.float64]:
    """Return the squared error of each element in rows of 16, the last row padded with zeros."""
    error = x - decode(encode(x, layout), layout)
    rows = np.zeros((-(-x.size // 16), 16))
    rows.reshape(-1)[: x.size] = error * error
    return rows
