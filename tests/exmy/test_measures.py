"""Measurements: the histogram of exponents, the difference of two arrays, and clipped elements."""

import math

import exmy
import ml_dtypes
import numpy as np
import pytest

DTYPES = ["float16", "bfloat16", "float32", "float64"]


def spread(dtype, count=20_000, seed=0):
    """Return values of all magnitudes of a dtype: subnormals, zeros of both signs, the largest."""
    rng = np.random.default_rng(seed)
    info = ml_dtypes.finfo(exmy.elements.output_dtype(dtype))
    low, high = math.log2(float(info.smallest_subnormal)), math.log2(float(info.max))
    x = np.exp2(rng.uniform(low, high, count)) * rng.choice([-1.0, 1.0], count)
    x[::50], x[1::50] = 0.0, -0.0
    x[2], x[3] = float(info.smallest_subnormal), float(info.max)
    return x.astype(info.dtype)


def close(dtype, count=5003, seed=0):
    """Return values of close magnitudes, as weights have, some zeros, and one subnormal."""
    x = np.random.default_rng(seed).standard_normal(count)
    x[::20] = 0.0
    x[7] = float(ml_dtypes.finfo(exmy.elements.output_dtype(dtype)).smallest_subnormal)
    return x.astype(exmy.elements.output_dtype(dtype))


@pytest.mark.parametrize("values", [spread, close])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exponents_are_the_true_ones(level, dtype, values):
    x = values(dtype)
    result = exmy.exponents(x)
    wide = x.astype(np.float64)
    exponent = np.frexp(wide[wide != 0])[1] - 1
    assert (result.lowest, result.highest) == (exponent.min(), exponent.max())
    np.testing.assert_array_equal(result.counts, np.bincount(exponent - exponent.min()))
    assert (result.zeros, result.count) == ((x == 0).sum(), x.size)


def test_properties_of_a_histogram():
    h = exmy.exponents(np.array([0, 1, 1.5, -1.75, 4, 0.5, 0.25, -0.0]))
    assert (h.lowest, h.counts.tolist(), h.zeros, h.count) == (-2, [1, 1, 3, 0, 1], 2, 8)
    assert h.entropy == pytest.approx(-(3 * math.log2(1 / 6) / 6 + 0.5 * math.log2(0.5)))
    assert h.below("e2m1") == pytest.approx(2 / 6)  # under 1
    assert h.above("e2m1") == 0  # beyond 2^2 ... 6
    assert h.above("e2m1b2") == pytest.approx(1 / 6)  # beyond 2^1 ... 3
    assert h.above("e0m3") == pytest.approx(4 / 6)  # beyond 7/8
    assert h.below("e0m3") == pytest.approx(2 / 6)  # all the others
    assert not h.counts.flags.writeable
    for nothing in (np.zeros((0, 3)), np.zeros(5)):
        h = exmy.exponents(nothing)
        assert (h.lowest, h.counts.size, h.count, h.entropy) == (0, 0, nothing.size, 0.0)
        assert (h.below("e4m3"), h.above("e4m3")) == (0, 0)


def test_exponents_of_parts_add_up():
    x = spread("float32", 5000)
    parts = [x[:10], x[10:10], x[10:11], np.sort(x[11:])[:2000], np.sort(x[11:])[2000:]]
    total = sum((exmy.exponents(p) for p in parts[1:]), exmy.exponents(parts[0]))
    whole = exmy.exponents(x)
    assert (total.lowest, total.zeros, total.entropy) == (whole.lowest, whole.zeros, whole.entropy)
    assert total.counts.tolist() == whole.counts.tolist()


def test_exponents_of_nonfinite_values_are_refused(level):
    x = np.array([[1, np.nan], [-np.inf, 3]], np.float32)
    with pytest.raises(exmy.NonFiniteError, match=r"2 of 4 .* \[0, 1\]"):
        exmy.exponents(x)
    assert exmy.exponents(x, nonfinite="saturate").counts.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_compare_is_the_same_at_every_level(dtype):
    x = spread(dtype, 70_013)
    x = np.where(np.abs(x.astype(np.float64)) < 1e100, x, np.float64(1)).astype(x.dtype)
    y = exmy.round(x, "e5m1b16")
    results = set()
    for level in exmy.kernels.levels():
        with exmy.kernels.use(level):
            results.add(exmy.compare(x, y))
    assert len(results) == 1
    d = results.pop()
    a, b = x.astype(np.float64), y.astype(np.float64)
    assert d.count == x.size
    assert d.signal == pytest.approx(math.fsum(a * a), rel=1e-12)
    assert d.noise == pytest.approx(math.fsum((a - b) ** 2), rel=1e-12)
    assert d.largest_error == np.abs(a - b).max()
    assert d.largest_relative == (np.abs(a - b)[a != 0] / np.abs(a)[a != 0]).max()
    assert d.sqnr == exmy.sqnr(x, y)


def test_compare_of_any_real_dtypes(level):
    x = np.arange(-500, 1500)
    y = exmy.round(x.astype(np.float32), "e4m3b3")
    expected = exmy.compare(x.astype(np.float64), y.astype(np.float64))
    for a, b in [(x, y), (x.astype(">f4"), y.astype(">f4")), (x[::-1], y[::-1].astype(np.float64))]:
        d = exmy.compare(a, b)
        assert (d.count, d.signal, d.largest_error) == (2000, expected.signal, expected.largest_error)
        assert d.noise == pytest.approx(expected.noise)
        assert d.largest_relative == expected.largest_relative


def test_differences_of_parts_add_up_and_threads_change_nothing():
    x = np.random.default_rng(0).standard_normal(5_000_001, dtype=np.float32)
    y = exmy.round(x, "e3m2")
    whole = exmy.compare(x, y)
    assert exmy.compare(x, y, threads=3) == whole
    parts = exmy.compare(x[: 1 << 20], y[: 1 << 20]) + exmy.compare(x[1 << 20 :], y[1 << 20 :])
    assert (parts.count, parts.largest_error, parts.largest_relative) == (
        whole.count,
        whole.largest_error,
        whole.largest_relative,
    )
    assert parts.noise == pytest.approx(whole.noise, rel=1e-12)
    assert exmy.exponents(x, threads=3).counts.tolist() == exmy.exponents(x).counts.tolist()


def test_comparing_nonfinite_values_is_refused(level):
    d = exmy.compare([1.0, np.nan, 2.0], [1.5, 2.0, 2.0])
    assert all(map(math.isnan, (d.noise, d.largest_error, d.largest_relative, d.sqnr)))
    assert math.isnan((d + exmy.compare([1.0], [1.0])).largest_error)
    assert exmy.compare([1.0, 0.0], [np.inf, 0.0]).largest_error == math.inf
    assert exmy.compare([0.0, 2.0], [5.0, 3.0]).largest_relative == 0.5
    assert exmy.compare([], []) == exmy.Difference(0, 0, 0, 0, 0)


@pytest.mark.parametrize("options", [{}, {"axis": 0}, {"axis": -1}, {"axis": 0, "block": 16}, {"block": 32}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_clipped(options, dtype):
    x = np.random.default_rng(0).standard_t(2, (64, 96)).astype(exmy.elements.output_dtype(dtype))
    for scale in ("search", "max", "float"):
        q = exmy.quantize(x, "e2m1", **options, scale=scale)
        y = q.dequantize("float64")
        values = q.format.values()[q.codes()]
        top = np.abs(values) == q.format.max
        half = np.abs(y / q.format.max)  # half a step of e2m1 at its top is 1, of 6
        beyond = top & (np.abs(x.astype(np.float64)) - np.abs(y) > half * (1 + 1e-12))
        assert q.count_clipped(x) == beyond.sum()
        if scale == "max":
            assert q.count_clipped(x) == 0
    assert exmy.quantize(x, "e2m1").count_clipped(x) > 0
    with pytest.raises(exmy.SizeError, match="shape"):
        q.count_clipped(x.T)


def test_clipping_statistics_of_nonfinite_values_are_refused():
    x = np.array([np.inf, -np.inf, np.nan, 1.0])
    q = exmy.quantize(x, "e4m3", scale="none", nonfinite="saturate")
    assert q.count_clipped(x) == 2
    assert exmy.quantize(np.zeros((0, 4)), "e4m3", axis=0).count_clipped(np.zeros((0, 4))) == 0


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e0m7"])
def test_an_offset_for_each_row_costs_less_than_a_hundredth_of_a_bit(name):
    x = np.random.default_rng(0).standard_normal((64, 4096), dtype=np.float32)
    q = exmy.quantize(x, name, axis=-1)
    assert q.bits_per_value - q.format.bits <= 0.01


@pytest.mark.parametrize("seed", range(20))
def test_the_largest_relative_error_is_exact_among_ratios_an_ulp_apart(seed):
    """The kernels divide only where a ratio may exceed the largest so far."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(4096).astype("f4") * np.exp2(rng.integers(-140, 100, 4096)).astype("f4")
    error = np.float64(x) * (rng.random() * (1 + rng.integers(0, 4, 4096) * 2.0**-52))
    y = np.where(rng.random(4096) < 0.2, 0, x - error).astype("f4")
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.abs(np.float64(x) - y) / np.abs(np.float64(x))
    for level in exmy.kernels.levels():
        with exmy.kernels.use(level):
            assert exmy.compare(x, y).largest_relative == np.nanmax(np.where(x == 0, 0, ratios))
            assert exmy.compare(x[::-1], y[::-1]).largest_relative == np.nanmax(np.where(x == 0, 0, ratios))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("e4m3", {}),
        ("e2m1", {"block": 32}),
        ("e3m2", {"axis": 0}),
        ("e2m1", {"block": 16, "scale": "6bit"}),
        ("e3m4", {"scale": 0.01}),
        ("e3m7", {"scale": 2.0**-100}),
        ("e8m3", {}),
    ],
)
def test_a_quantized_array_is_measured_as_if_it_were_decoded(level, dtype, name, options):
    x = np.random.default_rng(3).standard_t(3, (37, 128)).astype(dtype)
    q = exmy.quantize(x, name, **options)
    difference, clipped = q.measure(x)
    assert difference == exmy.compare(x, q.dequantize(x.dtype))
    assert clipped == q.count_clipped(x)
    assert difference.signal == pytest.approx(exmy.energy(x))
    with pytest.raises(exmy.SizeError, match="expected that of the quantized array"):
        q.measure(x[1:])
