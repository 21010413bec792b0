"""Stochastic rounding: the mean is exact, and the bits depend only on seed and position."""

import re
from importlib import resources

import exmy
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st


def stochastic(x, f, seed=1, **more):
    return exmy.round(x, f, rounding="stochastic", seed=seed, **more)


def mix(h):
    h = ((h ^ h >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    h = ((h ^ h >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return h ^ h >> 16


def random_bits(seed, i):
    """Return the random bits as FORMAT.md defines them, in Python integers."""
    inner = mix(seed >> 32 ^ mix((i >> 32) + 0x9E3779B9 & 0xFFFFFFFF))
    k0 = mix((seed & 0xFFFFFFFF) ^ inner)
    k1 = mix(k0 + 0x85EBCA6B & 0xFFFFFFFF)
    return mix(mix(i & 0xFFFFFFFF ^ k0) + k1 & 0xFFFFFFFF)


def test_the_examples_of_the_format_file():
    text = (resources.files("exmy") / "FORMAT.md").read_text().split("## 4.")[0]
    examples = [(0, 0), (0, 1), (7, 2**32 + 5), (2**64 - 1, 10**6)]
    assert re.findall(r"\| ([0-9a-f]{8}) \|", text) == [f"{random_bits(*example):08x}" for example in examples]


def test_the_random_bits_are_those_of_the_format_file(level):
    """With e0m1 there is one step, so x = 2^-32 k rounds up exactly where r + k reaches 2^32."""
    for seed, first in [(0, 0), (7, 5), (2**64 - 1, 2**32 - 20), (2**40 + 3, 2**63)]:
        r = np.array([random_bits(seed, first + i) for i in range(40)], np.uint64)
        for up, k in [(0, 2**32 - 1 - r), (1, 2**32 - r)]:  # just below and just at the limit
            x = k.astype(np.float64) / 2**32
            codes = exmy.encode(x, "e0m1b0", rounding="stochastic", seed=seed, first=first)
            np.testing.assert_array_equal(codes, up)


@pytest.mark.parametrize("name", ["e0m3", "e2m1", "e4m3", "e3m0", "e3m2b9"])
def test_the_mean_is_the_number(level, name):
    f = exmy.Format(name)
    count = 40_000 if level != "reference" else 10_000
    own = f.values()[: 2 ** (f.bits - 1)]
    for low, high in zip(own[:-1:5], own[1::5], strict=True):
        for part in (0.1, 0.5, 0.93):
            x = np.full(count, -(low + part * (high - low)))
            y = stochastic(x, f)
            assert set(y.tolist()) <= {-low, -high}
            sigma = (high - low) * np.sqrt(part * (1 - part) / count)
            assert abs(y.mean() - x[0]) < 5 * sigma


def test_neighbours_are_independent():
    x = np.full(1 << 16, 0.5)
    up = stochastic(x, "e0m1b0") - 0.5
    for lag in (1, 2, 3, 16, 256, 4096):
        assert abs((up[lag:] * up[:-lag]).mean()) < 5 * 0.25 / 256
    other = stochastic(x, "e0m1b0", seed=2) - 0.5
    assert abs((up * other).mean()) < 5 * 0.25 / 256


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["e4m3", "e2m1", "e5m10", "e0m7", "e8m7", "e3m2b60", "e4m3b-400", "e2m9b512"])
def test_levels_agree_bit_for_bit(dtype, name):
    f = exmy.Format(name)
    rng = np.random.default_rng(5)
    span = np.exp2(rng.uniform(-30, 30, 9001) + 1 - f.bias) * rng.choice([-1, 1], 9001)
    with np.errstate(over="ignore", under="ignore"):
        x = span.astype(exmy.elements.output_dtype(dtype))
    x[:4] = [np.nan, np.inf, -np.inf, -0.0]
    results = []
    for level in exmy.kernels.levels():
        with exmy.kernels.use(level):
            kwargs = {"rounding": "stochastic", "seed": 9, "first": 2**32 - 4000, "nonfinite": "saturate"}
            codes = exmy.encode(x, f, **kwargs)
            assert (exmy.unpack(exmy.encode_packed(x, f, **kwargs), f.bits, x.size) == codes).all()
            decoded = exmy.decode(codes, f, dtype)
            assert exmy.round(x, f, **kwargs).tobytes() == decoded.tobytes()
            results.append(codes.tobytes())
    assert results == results[:1] * len(results)


def test_values_of_the_format_never_move_and_larger_ones_saturate(level, all_formats):
    for f in all_formats[::5]:
        codes = np.arange(1 << f.bits, dtype=exmy.encode(0.0, f).dtype)
        for seed in (0, 3):
            kwargs = {"rounding": "stochastic", "seed": seed}
            np.testing.assert_array_equal(exmy.encode(f.values(), f, **kwargs), codes)
            big = np.array([f.max * 1.3, -f.max * 4, np.nextafter(f.max, np.inf)])
            np.testing.assert_array_equal(exmy.round(big, f, **kwargs), [f.max, -f.max, f.max])


@given(
    x=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60),
    seed=st.integers(0, 2**64 - 1),
    cut=st.integers(0, 60),
    name=st.sampled_from(["e4m3", "e0m4", "e5m2b20", "e1m9"]),
)
def test_each_result_is_a_neighbour_wherever_the_array_is_cut(x, seed, cut, name):
    f, x = exmy.Format(name), np.array(x, np.float32)
    kwargs = {"rounding": "stochastic", "seed": seed}
    codes = exmy.encode(x, f, **kwargs)
    y = exmy.decode(codes, f, "float64")
    own = np.unique(f.values())
    wide = np.clip(x.astype(np.float64), -f.max, f.max)
    low, high = own[np.searchsorted(own, wide, "right") - 1], own[np.searchsorted(own, wide)]
    assert ((y == low) | (y == high)).all()
    assert (np.signbit(y) == np.signbit(x)).all()
    parts = [exmy.encode(x[:cut], f, **kwargs), exmy.encode(x[cut:], f, first=min(cut, x.size), **kwargs)]
    assert np.concatenate(parts).tobytes() == codes.tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": "none"},
        {"axis": 0},
        {"axis": 1, "scale": "float"},
        {"axis": 1, "block": 32, "scale": "max"},
        {"scale": "float"},
    ],
)
def test_quantize_by_levels_and_threads(options):
    x = np.random.default_rng(3).standard_t(4, (128, 96)).astype(np.float32)
    results = set()
    for level in exmy.kernels.levels():
        with exmy.kernels.use(level):
            results.add(exmy.quantize(x, "e3m2", **options, rounding="stochastic", seed=4).to_bytes())
    assert len(results) == 1
    assert exmy.quantize(x, "e3m2", **options, rounding="stochastic", seed=5).to_bytes() not in results
    nearest = exmy.quantize(x, "e3m2", **options, seed=4)
    assert nearest.to_bytes() == exmy.quantize(x, "e3m2", **options).to_bytes()
    q = exmy.quantize(x, "e3m2", **options, rounding="stochastic", seed=4)
    assert (q.offsets == nearest.offsets).all()
    if q.scales is None and options.get("axis") is None:  # positions are those of C order
        whole = q.format.with_bias(q.format.bias + int(q.offsets))
        assert (q.codes() == exmy.encode(x, whole, rounding="stochastic", seed=4)).all()


def test_quantize_on_many_threads():
    x = np.random.default_rng(3).standard_normal((3000, 1024), dtype=np.float32)
    for options in ({"scale": "none"}, {"axis": 1, "scale": "max"}):
        one, four = (exmy.quantize(x, "e2m1", **options, rounding="stochastic", seed=4, threads=n) for n in (1, 4))
        assert one.packed.tobytes() == four.packed.tobytes()


def test_the_quantized_mean_is_unbiased():
    x = np.random.default_rng(3).standard_normal((64, 64), dtype=np.float32)
    kwargs = {"axis": 1, "scale": "max", "rounding": "stochastic"}
    mean = sum(exmy.quantize(x, "e2m1", seed=s, **kwargs).dequantize("float64") for s in range(64)) / 64
    nearest = exmy.quantize(x, "e2m1", axis=1, scale="max").dequantize("float64")
    assert np.abs(mean - x).mean() < np.abs(nearest - x).mean() / 2


def test_in_place(level):
    x = np.random.default_rng(3).standard_normal(5000).astype(np.float32)
    for kwargs in ({}, {"rounding": "stochastic", "seed": 8}):
        expected = exmy.round(x, "e2m1", **kwargs)
        y = x.copy()
        assert exmy.round(y, "e2m1", out=y, **kwargs) is y
        assert y.tobytes() == expected.tobytes()
        shifted = np.concatenate([x, np.zeros(3, np.float32)])
        exmy.round(shifted[:-3], "e2m1", out=shifted[3:], **kwargs)  # overlapping memory
        assert shifted[3:].tobytes() == expected.tobytes()
    x[4500] = np.nan
    with pytest.raises(exmy.NonFiniteError, match=r"1 of 5000 .* \[4500\]"):
        exmy.round(x, "e2m1", out=x)


def test_in_place_counts_only_nonfinite_inputs(level):
    x = np.full(70_000, 65504, np.float16)
    x[-1] = np.inf
    with pytest.raises(exmy.NonFiniteError, match="1 of 70000"):
        exmy.round(x, "e8m0", out=x)  # 65504 becomes 2^16, infinity in float16


def test_out_is_refused_with_the_reason():
    x = np.ones((4, 6), np.float32)
    with pytest.raises(exmy.SizeError, match=r"shape \(24,\); expected that of x, \(4, 6\)"):
        exmy.round(x, "e2m1", out=np.ones(24, np.float32))
    with pytest.raises(exmy.DtypeError, match="float32"):
        exmy.round(x, "e2m1", out=np.ones((4, 6)))
    with pytest.raises(exmy.SizeError, match="C-contiguous"):
        exmy.round(x, "e2m1", out=np.ones((6, 4), np.float32).T)
    out = np.zeros((4, 6), ml_dtypes.bfloat16)
    assert exmy.round(out, "e2m1", out=out) is out


@pytest.mark.parametrize("call", [exmy.round, exmy.encode, exmy.encode_packed, exmy.quantize])
def test_invalid_arguments_are_refused(call):
    x = np.ones(3, np.float32)
    for seed in (-1, 2**64, 1.0, True, "1"):
        with pytest.raises(exmy.FormatError, match="0 to 2\\^64 - 1"):
            call(x, "e2m1", rounding="stochastic", seed=seed)
    with pytest.raises(exmy.FormatError, match="'nearest' or 'stochastic'"):
        call(x, "e2m1", rounding="down")
    x[1] = np.nan
    with pytest.raises(exmy.NonFiniteError, match=r"1 of 3 .* \[1\]"):
        call(x, "e2m1", rounding="stochastic")
