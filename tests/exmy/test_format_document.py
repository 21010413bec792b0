"""A decoder written from FORMAT.md alone, in plain Python, agrees with exmy on arrays and chunks of all kinds."""

from __future__ import annotations

import json
import math
import re
import struct
from fractions import Fraction
from typing import Any

import exmy
import numpy as np
import pytest

BYTES = bytes | bytearray


def parsed(name: str) -> tuple[int, int, int]:
    """Section 1: exponent bits, mantissa bits and bias."""
    match = re.fullmatch(r"e([0-8])m(\d+)(?:b(-?\d+))?", name)
    assert match is not None
    x, y = int(match[1]), int(match[2])
    return x, y, int(match[3]) if match[3] else (2 ** (x - 1) - 1 if x else 1)


def value(code: int, x: int, y: int, bias: int) -> Fraction:
    """Section 2; -0 becomes 0."""
    m, e, s = code % 2**y, code // 2**y % 2**x, code // 2 ** (x + y)
    return (-1) ** s * Fraction(2) ** (max(e, 1) - bias) * ((1 if e else 0) + Fraction(m, 2**y))


def codes(packed: BYTES, bits: int, n: int) -> list[int]:
    """Section 5: decoding one element."""
    result = []
    for i in range(n):
        t, r = divmod(i, 256)
        length = min(256, -(-n // 8) * 8 - 256 * t)
        start, code, done = 32 * bits * t, 0, 0
        for p in (w for w in (8, 8, 4, 2, 1) if w <= bits):
            if bits - done < p:
                continue
            q = length * p // 8
            code |= (packed[start + r % q] >> p * (r // q)) % 2**p << done
            start, done = start + q, done + p
        result.append(code)
    return result


def float32(number: Fraction) -> Fraction:
    """Round to float32 once; the numbers here are normal."""
    return Fraction(float(np.float32(float(number)))) if number else number


def scales(data: BYTES, how: str, groups: int, length: int) -> list[Fraction]:
    """Section 8: scales."""
    if how == "float":
        return [Fraction(s) for s in struct.unpack(f"<{groups}f", data[: 4 * groups])]
    if how == "e4m3":
        unit = Fraction(struct.unpack("<f", data[:4])[0])
        return [float32(value(code, 4, 3, 7) * unit) for code in data[4 : 4 + groups]]
    run = max(1, 256 // length)
    runs = -(-groups // run)
    units = [Fraction(struct.unpack("<f", b"\0\0" + data[2 * i : 2 * i + 2])[0]) for i in range(runs)]
    return [float32(n * units[i // run]) for i, n in enumerate(codes(data[2 * runs :], 6, groups))]


def scales_size(how: str, groups: int, length: int) -> int:
    """Section 8: the size of the scales."""
    if how in ("float", "e4m3"):
        return 4 * groups if how == "float" else 4 + groups
    return 2 * -(-groups // max(1, 256 // length)) + -(-groups // 8) * 6


def group_of(index: tuple[int, ...], shape: tuple[int, ...], axis: int | None, block: int | None) -> int:
    """Section 8: the number of an element's group."""
    if axis is None:
        return 0
    counts, position = list(shape), list(index)
    if block:
        counts[axis] //= block
        position[axis] //= block
    else:
        del counts[axis], position[axis]
    number = 0
    for count, i in zip(counts, position, strict=True):
        number = number * count + i
    return number


def chunk_values(data: BYTES, shape: tuple[int, ...], configuration: str) -> list[Fraction]:
    """Section 9, for chunks that quantized float32."""
    keys: dict[str, Any] = json.loads(configuration)
    x, y, _ = parsed(keys["format"])
    how, axis, block = keys.get("scale", "search"), keys.get("axis"), keys.get("block")
    if axis is None and block is not None:
        axis = -1
    if axis is not None:
        axis %= len(shape)
    length = math.prod(shape) if axis is None else block or shape[axis]
    groups = math.prod(shape) // length
    stored, size, factors = struct.unpack("<h", data[:2])[0], 0, [Fraction(1)]
    assert not any(data[2:8])
    if isinstance(how, float) and axis is None:
        factors = [Fraction(float(np.float32(how)))]
    elif how in ("float", "e4m3", "6bit"):
        size = scales_size(how, groups, length)
        factors = scales(data[8:], how, groups, length)
    elif isinstance(how, float):
        size = scales_size("e4m3", groups, length)
        factors = scales(data[8:], "e4m3", groups, length)
    elif axis is not None:
        size = groups
        factors = [Fraction(2) ** -delta for delta in data[8 : 8 + groups]]
    start = -(-(8 + size) // 8) * 8
    assert not any(data[8 + size : start])
    n, bits = math.prod(shape), 1 + x + y
    if isinstance(how, float) and bits > 8:
        middle, low = start + -(-n // 8) * 8, bits - 8
        planes = codes(data[start:middle], 8, n), codes(data[middle:], low, n)
        decoded = [u << low | lower for u, lower in zip(*planes, strict=True)]
    else:
        decoded = codes(data[start:], bits, n)
    elements = zip(np.ndindex(*shape), decoded, strict=True)
    return [value(code, x, y, stored) * factors[group_of(at, shape, axis, block)] for at, code in elements]


CONFIGURATIONS: list[dict[str, Any]] = [
    {"format": name, **settings}
    for name in ("e4m3", "e2m1", "e3m2", "e0m3", "e1m0", "e2m0", "e5m10", "e4m3b11", "e3m7", "e2m6")
    for settings in (
        {},
        {"scale": "max", "axis": None, "block": None},
        {"scale": "none"},
        {"scale": 0.3},
        {"scale": 0.3, "axis": -1},
        {"scale": 0.3, "block": 16},
        {"scale": "float"},
        {"axis": 0},
        {"axis": -1, "scale": "float"},
        {"block": 16},
        {"block": 32, "axis": 1, "scale": "e4m3"},
        {"block": 16, "scale": "6bit"},
        {"axis": 0, "scale": "6bit"},
        {"axis": 0, "block": 16, "scale": "float"},
    )
]


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_chunks(configuration: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((16, 96)) * np.exp2(rng.integers(-3, 3, (16, 1)))).astype("f4")
    codec = exmy.ChunkCodec.from_configuration(configuration)
    data = codec.encode(x).tobytes()
    expected = codec.decode(data, x.shape, "float32")
    mine = [float32(v) for v in chunk_values(data, x.shape, json.dumps(configuration))]
    assert mine == [Fraction(float(v)) for v in expected.reshape(-1)]


@pytest.mark.parametrize("settings", [{}, {"axis": 0}, {"block": 16}, {"block": 32, "scale": "6bit"}], ids=str)
def test_self_describing_arrays(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((3, 64)) * np.exp2(rng.integers(-3, 3, (3, 1)))).astype("f4")
    q = exmy.quantize(x, "e3m2", **settings)
    data = q.to_bytes()
    magic, version, kind, ex, y, bias, ndim, how, axis, block, base = struct.unpack("<4sBBBBhBBhHh", data[:18])
    assert (magic, version, kind, ndim) == (b"eXmY", 1, 2, 2)
    shape = struct.unpack("<2Q", data[24:40])
    length = math.prod(shape) if axis < 0 else block or shape[axis]
    groups, name = math.prod(shape) // length, {2: "e4m3", 3: "6bit", 1: "float"}.get(how)
    size = groups if name is None else scales_size(name, groups, length)
    if name is None:
        factors = [Fraction(2) ** -(base + delta) for delta in data[40 : 40 + groups]]
    else:
        factors = scales(data[40:], name, groups, length)
    start = -(-(40 + size) // 8) * 8
    elements = zip(np.ndindex(*shape), codes(data[start:], 1 + ex + y, math.prod(shape)), strict=True)
    at_axis = None if axis < 0 else axis
    mine = [
        float32(value(code, ex, y, bias) * factors[group_of(at, shape, at_axis, block)]) for at, code in elements
    ]
    assert mine == [Fraction(float(v)) for v in q.dequantize().reshape(-1)]


@pytest.mark.parametrize(
    ("name", "x", "code"), [("e2m0", 0.5, 0), ("e2m0", 1.5, 2), ("e2m0", 3.0, 3), ("e1m0", 0.5, 0)]
)
def test_ties_without_mantissa_bits(name: str, x: float, code: int) -> None:
    assert exmy.encode(np.float32([x]), name)[0] == code
