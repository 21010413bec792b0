"""Headers of quantized arrays and of chunks: valid ones decode exactly, invalid ones are refused."""

import math
import random
import struct
from fractions import Fraction

import exmy
import ml_dtypes
import numpy as np
import pytest

SIGNIFICANDS = {"float16": (11, -24, 16), "bfloat16": (8, -133, 128), "float32": (24, -149, 128)}
HEADER = struct.Struct("<4sBBBBhBBhHh6x")


def header(f=(4, 3), bias=7, base=0, deltas=b"\0", scales=None, shape=(8,), axis=-1, block=0, kind=2, codes=None):
    """Return the bytes of a quantized array with a given header, and random codes for its shape and format."""
    x, y = f
    shared = deltas if scales is None else struct.pack(f"<{len(scales)}f", *scales)
    head = HEADER.pack(b"eXmY", 1, kind, x, y, bias, len(shape), scales is not None, axis, block, base)
    head += struct.pack(f"<{len(shape)}Q", *shape) + shared
    head += bytes(-len(head) % 8)
    if codes is None:
        codes = np.arange(math.prod(shape)) % (1 << (1 + x + y))
    return head + exmy.pack(np.array(codes, np.int64), 1 + x + y).tobytes()


def exact(code, x, y, bias):
    """Return the value of a code, by the definition."""
    m, e, s = code & ((1 << y) - 1), (code >> y) & ((1 << x) - 1), code >> (x + y)
    return (-1) ** s * Fraction(2) ** (max(e, 1) - bias) * ((e > 0) + Fraction(m, 1 << y))


def rounded(value, dtype):
    """Return the nearest value of a dtype, ties to even, as float64; infinity beyond its largest."""
    if dtype == "float64" or value == 0:
        return float(value)
    digits, least, top = SIGNIFICANDS[dtype]
    exponent = math.floor(math.log2(abs(value)))
    exponent += (abs(value) >= Fraction(2) ** (exponent + 1)) - (abs(value) < Fraction(2) ** exponent)
    unit = Fraction(2) ** max(exponent - digits + 1, least)
    nearest = round(value / unit) * unit
    return math.copysign(math.inf, value) if abs(nearest) >= Fraction(2) ** top else float(nearest)


def check_exact(q, factor_of):
    """Assert that every value of q is rounded once from its exact value, and finite in the dtype of the source."""
    x, y, bias = q.format.layout
    codes = q.codes().reshape(-1).tolist()
    true = [exact(code, x, y, bias) * factor_of(i) for i, code in enumerate(codes)]
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        result = q.dequantize(dtype).reshape(-1).astype(np.float64)
        largest = float(ml_dtypes.finfo(dtype).max) if dtype == q.dtype else math.inf
        expected = np.clip([rounded(value, dtype) for value in true], -largest, largest)
        np.testing.assert_array_equal(result, expected, err_msg=f"{q!r} {dtype}")


@pytest.mark.parametrize(
    ("f", "bias", "base", "spread"),
    [
        ((7, 2), -63, 100, 9),
        ((5, 2), -99, 120, 3),
        ((4, 3), -512, 512, 200),
        ((4, 3), 512, -1024, 255),
        ((8, 7), -512, 600, 0),
        ((8, 7), 512, -500, 255),
        ((0, 3), -400, 300, 40),
        ((6, 9), 90, -250, 80),
    ],
)
def test_values_are_exact_for_any_bias_and_offsets(level, f, bias, base, spread):
    deltas = bytes([0, spread // 2, spread, 0])
    codes = np.random.default_rng(0).integers(0, 1 << (1 + sum(f)), 64)
    data = header(f, bias, base, deltas, shape=(4, 16), axis=1, codes=codes)
    check_exact(exmy.Quantized.from_bytes(data), lambda i: Fraction(2) ** -(base + deltas[i // 16]))


@pytest.mark.parametrize(("f", "bias"), [((7, 2), -63), ((5, 2), -99), ((8, 7), 127), ((4, 3), 480), ((2, 1), 1)])
@pytest.mark.parametrize("sharing", [{"axis": 1}, {"axis": 0}, {"axis": 1, "block": 16}, {"axis": -1}])
def test_values_are_exact_for_any_scales(level, f, bias, sharing):
    count = 1 if sharing["axis"] < 0 else 16 if sharing["axis"] == 0 else 4
    scales = [math.ldexp(1.3, e) for e in (-126, 100, -60, 1, -149, 0, 30, 126, 5, -9, 11, -100, 2, 3, 4, 6)]
    scales = [struct.unpack("<f", struct.pack("<f", s))[0] for s in scales][:count]
    codes = np.random.default_rng(1).integers(0, 1 << (1 + sum(f)), 64)
    q = exmy.Quantized.from_bytes(header(f, bias, scales=scales, shape=(4, 16), codes=codes, **sharing))
    group = {-1: lambda i: 0, 0: lambda i: i % 16, 1: lambda i: i // 16}[sharing["axis"]]
    check_exact(q, lambda i: Fraction(scales[group(i)]))


@pytest.mark.parametrize(
    "fields",
    [
        {"bias": 513},
        {"bias": -32768},
        {"bias": 500, "base": 13},
        {"bias": 500, "deltas": b"\x0d"},
        {"bias": -500, "base": -13},
        {"base": 32767, "deltas": b"\xff"},
        {"base": -32768},
        {"bias": 0, "base": -600, "deltas": b"\x50\x57", "shape": (2, 4), "axis": 1},
        {"scales": [math.nan]},
        {"scales": [math.inf]},
        {"scales": [-1.0]},
        {"scales": [0.0]},
        {"scales": [1.0], "base": 1},
        {"shape": (1,) * 65, "codes": [0]},
        {"shape": (1,) * 255, "codes": [0]},
        {"shape": (1 << 31, 1 << 31), "codes": [0]},
        {"shape": (1 << 62,), "codes": [0]},
        {"shape": ((1 << 64) - 1, 0), "codes": []},
        {"shape": (1 << 62, 0), "axis": 1, "codes": []},
        {"axis": -2},
        {"axis": 1},
        {"axis": 32767},
        {"axis": 0, "block": 7},
        {"axis": 0, "block": 65535},
        {"block": 16, "shape": (16,)},
        {"f": (9, 3)},
        {"f": (8, 8)},
        {"f": (0, 0)},
        {"kind": 4},
    ],
    ids=str,
)
def test_an_invalid_header_is_refused(fields):
    f = fields.get("f", (4, 3))
    good = fields if 2 <= 1 + sum(f) <= 16 and f[0] <= 8 else {**fields, "f": (4, 3)}
    data = bytearray(header(**good))
    data[6:8] = bytes(f)
    with pytest.raises((exmy.FormatError, exmy.SizeError)):
        exmy.Quantized.from_bytes(bytes(data))


def test_padding_after_the_offsets_is_zero():
    data = bytearray(header(deltas=b"\0\0\0", shape=(3, 8), axis=1))
    assert exmy.Quantized.from_bytes(bytes(data)).shape == (3, 8)
    data[HEADER.size + 16 + 3] = 1
    with pytest.raises(exmy.FormatError, match="padding"):
        exmy.Quantized.from_bytes(bytes(data))


SOURCES = [
    ("e4m3", {}, (40,)),
    ("e2m1", {"axis": 1}, (3, 24)),
    ("e8m7", {"axis": 0}, (3, 5)),
    ("e3m2", {"block": 16}, (2, 32)),
    ("e0m3", {"scale": "float"}, ()),
    ("e5m2", {"scale": "float", "axis": 0}, (4, 6)),
    ("e4m3b-3", {"scale": "none"}, (2, 0, 3)),
]
EDGES = [
    0,
    1,
    2,
    4,
    15,
    16,
    32,
    64,
    127,
    128,
    255,
    256,
    512,
    0x7FFF,
    0x8000,
    0xFFFF,
    1 << 31,
    (1 << 63) - 1,
    1 << 63,
]


def mutated(data, rng, most):
    """Return the bytes with a few of their first `most` changed: single bytes or whole fields."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        size = rng.choice([1, 1, 2, 4, 8])
        at = rng.randrange(max(1, min(most, len(out)) - size + 1))
        value = rng.choice([rng.getrandbits(8 * size), rng.choice(EDGES) & ((1 << (8 * size)) - 1)])
        out[at : at + size] = value.to_bytes(size, "little")
    if rng.random() < 0.2:
        out = out[: rng.randrange(len(out) + 1)] if rng.random() < 0.5 else out + bytes(rng.randrange(1, 40))
    return bytes(out)


@pytest.mark.parametrize("seed", range(len(SOURCES)))
def test_mutated_bytes_are_refused_or_decode_to_finite_values(seed):
    name, sharing, shape = SOURCES[seed]
    rng, x = random.Random(seed), np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    data = exmy.quantize(x, name, **sharing).to_bytes()
    accepted = 0
    for _ in range(4000):
        try:
            q = exmy.Quantized.from_bytes(mutated(data, rng, len(data) - math.prod(shape) // 2))
        except (exmy.FormatError, exmy.SizeError):
            continue
        accepted += 1
        y = q.dequantize("float64")
        assert y.shape == q.shape
        assert np.isfinite(y).all()
        again = exmy.Quantized.from_bytes(q.to_bytes())
        assert again.dequantize("float64").tobytes() == y.tobytes()
        q.count_clipped(np.zeros(q.shape, np.float32))
        q.dequantize("bfloat16")
    assert 100 < accepted < 3900


@pytest.mark.parametrize("seed", range(len(SOURCES)))
def test_mutated_chunks_are_refused_or_decode_to_finite_values(seed):
    name, sharing, shape = SOURCES[seed]
    rng, x = random.Random(seed), np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    codec = exmy.ChunkCodec.from_configuration({"format": name, **sharing})
    data = codec.encode(x).tobytes()
    accepted = 0
    for _ in range(1000):
        try:
            y = codec.decode(mutated(data, rng, len(data)), shape, "float64")
        except (exmy.FormatError, exmy.SizeError):
            continue
        accepted += 1
        assert np.isfinite(y).all()
    assert accepted > 0 or not math.prod(shape)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e5m2", "e5m10", "e8m7"])
def test_finite_values_stay_finite_in_their_dtype(level, dtype, name):
    """The largest values of a dtype, as in masks, round to values of the format beyond the dtype."""
    info = ml_dtypes.finfo(exmy.elements.output_dtype(dtype))
    x = np.full((2, 512), info.min, info.dtype)
    x[:, ::3] = 1
    x[0, 7] = info.max
    cases = [{}, {"scale": "max"}, {"axis": 1}, {"axis": 0, "scale": "max"}, {"block": 16}]
    if dtype == "float16" or name != "e2m1":  # others need a scale that is no float32
        cases.append({"block": 16, "scale": "float"})
    for case in cases:
        q = exmy.quantize(x, name, **case)
        y = q.dequantize(dtype)
        assert np.isfinite(y.astype(np.float64)).all()
        assert np.abs(y[0, 1].astype(np.float64)) >= 0.7 * float(info.max)
        assert (y[0, 1] < 0) == (x[0, 1] < 0)
        codec = exmy.ChunkCodec.from_configuration({"format": name, **case})
        data = codec.encode(x)
        assert codec.decode(data, x.shape, dtype).tobytes() == y.tobytes()
        part = codec.slice(x.shape, 256, 1024)
        got = part.decode(data[: part.header_size], data[part.first_byte : part.end_byte], dtype)
        assert got.tobytes() == y.reshape(-1)[256:].tobytes()
        if dtype == "float16" and name == "e4m3" and not case:
            assert (q.dequantize("float32")[0, 1], y[0, 1]) == (-65536, -65504)


def test_dtypes_of_ml_dtypes_round_as_the_specification(level):
    """The rounding above agrees with ml_dtypes for values that a float32 represents exactly."""
    values = np.array([1.00390625, 3.0e-40, 6.5e4, 1.0e-41], np.float32)
    assert [rounded(Fraction(float(v)), "bfloat16") for v in values] == values.astype(ml_dtypes.bfloat16).tolist()
