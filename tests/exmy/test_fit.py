"""Fitting the shared exponent: nothing clips with "max", "search" has the least error; the resulting SQNR."""

import math

import exmy
import ml_dtypes
import numpy as np
import pytest
from exmy.elements import Kind
from hypothesis import given
from hypothesis import strategies as st


def clips(x, f):
    """Return whether a value saturates: without an upper limit, it would round to a larger value."""
    last = (1 << (f.bits - 1)) - 1
    below, top = exmy.decode(np.array([last - 1, last], np.uint8 if f.bits <= 8 else np.uint16), f, "float64")
    assert top == f.max
    step = top - below if f.bits > 2 else top
    return bool((np.abs(x) >= f.max + step / 2).any())


@pytest.mark.parametrize("peak", [1.0, 0.99, 1.9, 1.93, 1.9375, 1.94, 1.96875, 1.97, 448, 3e38, 1e-40, 2.0**-149])
def test_max_is_the_largest_bias_that_does_not_clip(level, all_formats, peak):
    x = np.array([peak / 3, -peak], np.float32)
    for f in all_formats:
        g = f.fit(x)
        assert (g.exponent_bits, g.mantissa_bits) == (f.exponent_bits, f.mantissa_bits)
        assert not clips(x.astype(np.float64), g), g
        assert clips(x.astype(np.float64), g.with_bias(g.bias + 1)), g
        assert f.with_bias(3).fit(x) == g


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_all_dtypes_fit_alike(level, dtype):
    x = np.array([[0.25, -1.5], [0.0, 1.0]], exmy.elements.output_dtype(dtype))
    assert exmy.Format("e3m2").fit(x) == exmy.Format("e3m2b7")
    assert exmy.Format("e3m2").fit(x.T) == exmy.Format("e3m2b7")


def test_nothing_to_fit(level):
    f = exmy.Format("e3m2b5")
    for method in ("max", "search"):
        assert f.fit(np.zeros(10, np.float32), method) == f
        assert f.fit(np.zeros((0, 3), np.float32), method) == f


def test_nonfinite(level):
    x = np.array([[1.5, np.inf], [np.nan, 0.5]], np.float32)
    with pytest.raises(exmy.NonFiniteError, match=r"2 of 4 .* \[0, 1\]"):
        exmy.Format("e3m2").fit(x)
    for method in ("max", "search"):
        for dtype in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16):
            g = exmy.Format("e3m2").fit(x.astype(dtype), method, nonfinite="saturate")
            assert g == exmy.Format("e3m2").fit(np.array([1.5, 0.5], dtype), method)


def test_limits(level):
    assert exmy.Format("e8m7").fit(np.array([5e-324])).bias == 512
    with pytest.raises(exmy.FormatError, match="scale the input"):
        exmy.Format("e0m7").fit(np.array([1e300]))
    with pytest.raises(exmy.FormatError, match="expected 'max' or 'search'"):
        exmy.Format("e0m7").fit(np.ones(1), "best")


@pytest.mark.parametrize("name", ["e0m3", "e2m1", "e3m2", "e0m7", "e4m3", "e8m2"])
@pytest.mark.parametrize("count", [3000, 200_000, 600_000])
def test_search_has_the_least_error(name, count):
    x = np.random.default_rng(1).standard_t(5, count).astype(np.float32)
    f = exmy.Format(name)
    errors = {}
    for bias in range(f.fit(x).bias, f.fit(x).bias + 12):
        difference = exmy.round(x, f.with_bias(bias)).astype(np.float64) - x
        errors[bias] = float(difference @ difference)
    assert f.fit(x, "search").bias == min(errors, key=errors.__getitem__)


@given(
    st.sampled_from(["e0m3", "e1m0", "e2m1", "e3m2", "e4m3", "e0m7", "e5m2", "e8m2"]),
    st.sampled_from([1, 2, 5, 50]),
    st.integers(0, 2**32),
    st.sampled_from([5, 16, 32, 100, 3000]),
)
def test_no_offset_that_the_search_leaves_out_is_better(name, freedom, seed, length):
    x = np.random.default_rng(seed).standard_t(freedom, (4, length)).astype(np.float32)
    layout = exmy.Format(name).layout
    offsets = exmy.offsets.largest_unclipped_offsets(np.abs(x).max(1), layout)
    scales = exmy.fit.encoding_scales(offsets, Kind.FLOAT32, layout)
    factors, out = np.exp2(np.arange(32)), np.empty((4, 32))
    exmy.kernels.noise(Kind.FLOAT32, layout, x, scales, factors, out)
    best, error = np.empty(4, np.int64), np.empty(4)
    tries = np.array([32, 32, 2, 1])
    for rising in (True, False):
        exmy.kernels.best_factors(Kind.FLOAT32, layout, x, scales, factors, tries, best, error, rising=rising)
        errors = out / factors**2
        assert best.tolist() == [int(np.argmin(errors[i, : tries[i]])) for i in range(4)]
        assert error.tolist() == [errors[i, best[i]] for i in range(4)]


@pytest.mark.parametrize("name", ["e7m0b0", "e7m1b7", "e7m8b0", "e7m8b1", "e6m3b-60", "e5m9b-90"])
def test_the_noise_of_formats_near_the_top_of_float32(name, level):
    """The sums with which such values are rounded exceed float32."""
    layout = exmy.Format(name).layout
    runs = (np.random.default_rng(1).standard_normal((4, 100)) * 2.0**125).astype(np.float32)
    scales, factors = np.ones(4, np.float32), np.array([1.0, 0.5, 2.0**-9])
    out, expected = np.empty((4, 3)), np.empty((4, 3))
    exmy.kernels.noise(Kind.FLOAT32, layout, runs, scales, factors, out)
    exmy.blockwise.noise(Kind.FLOAT32, layout, runs, scales, factors, expected)
    assert (out == expected).all()
    assert (out > 0).all()


def test_the_error_may_rise_before_it_falls(level):
    x = np.full(601, 1 / 32, np.float32)  # lost with the first two offsets, exact with the third
    x[0] = 7 / 8
    f = exmy.Format("e0m3")
    errors = [float(np.square(x - exmy.round(x, f.with_bias(1 + k))).sum()) for k in range(4)]
    assert errors[2] < errors[0] < errors[1] < 2 * errors[0]
    assert f.fit(x, "search").bias == 3
    assert exmy.quantize(x, f, axis=0).offsets == 2


def test_search_sees_where_a_sample_has_too_many_outliers():
    x = np.random.default_rng(1).standard_normal(3_000_000).astype(np.float32)
    x[:256] *= 12  # a run of the sample
    f = exmy.Format("e0m5")
    first = f.fit(x).bias
    errors = [float(np.square(x - exmy.round(x, f.with_bias(first + k))).sum(dtype="f8")) for k in range(8)]
    assert f.fit(x, "search").bias == first + int(np.argmin(errors))


def test_search_sees_outliers_that_a_sample_misses():
    x = np.random.default_rng(1).standard_normal(1_000_000).astype(np.float32)
    x[12_345] = 1e6
    assert exmy.Format("e0m7").fit(x, "search") == exmy.Format("e0m7").fit(x, "max")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e0m7b-90", "e8m2"])
def test_sums_are_the_same_at_every_level(dtype, name):
    x = np.random.default_rng(2).standard_t(3, 10_001).astype(exmy.elements.output_dtype(dtype))
    elements, kind, _ = exmy.elements.as_flat(x)
    results = []
    for level in exmy.kernels.levels():
        with exmy.kernels.use(level):
            errors = exmy.kernels.squared_errors(kind, exmy.Format(name).layout, elements, 5)
            results.append([*errors, exmy.kernels.energy(kind, elements)])
    assert all(result == results[0] for result in results)
    exact = x.astype(np.float64)
    for k, error in enumerate(results[0][:5]):
        difference = exact - exmy.round(exact, exmy.Format(name).with_bias(exmy.Format(name).bias + k))
        assert error == pytest.approx(difference @ difference, rel=1e-6)
    assert results[0][5] == pytest.approx(exact @ exact, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"), [("e2m1", 18.96), ("e3m2", 25.53), ("e2m3", 30.83), ("e4m3", 31.54), ("e0m7", 40.57)]
)
def test_sqnr_on_gaussian_data(name, expected):
    x = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
    f = exmy.Format(name).fit(x, "search")
    assert exmy.sqnr(x, exmy.round(x, f)) == pytest.approx(expected, abs=0.15)


def test_sqnr():
    x = np.array([3.0, -4.0])
    assert exmy.sqnr(x, x) == math.inf
    assert exmy.sqnr(x, np.zeros(2)) == 0.0
    assert exmy.sqnr(x, x + np.array([0.3, 0.4])) == pytest.approx(20.0)
    assert exmy.sqnr(x, x + np.array([0.03, 0.04])) == pytest.approx(40.0)
    assert exmy.sqnr(x * 0, x) == -math.inf
    assert exmy.sqnr(np.zeros((0, 2)), np.zeros((0, 2))) == math.inf
    assert math.isnan(exmy.sqnr(x, [np.nan, 1]))
    big = np.ones(200_000, np.float32)
    assert exmy.sqnr(big, (big * 1.5).astype(ml_dtypes.bfloat16)) == pytest.approx(6.0206, abs=1e-3)
    assert exmy.sqnr(np.arange(5), np.arange(5)) == math.inf
    with pytest.raises(exmy.SizeError, match="expected the same"):
        exmy.sqnr(x, x[:1])
    with pytest.raises(exmy.DtypeError, match="expected real numbers"):
        exmy.sqnr(x, x.astype(complex))


@pytest.mark.parametrize("name", ["e2m1", "e3m2", "e3m4", "e4m3", "e4m0", "e5m2", "e6m1", "e8m2"])
@pytest.mark.parametrize("tail", [0.0, 1.01, 1.2, 1.9])
def test_the_peak_may_decide_only_where_the_search_would_too(native, name, tail):
    x = np.random.default_rng(3).standard_t(4, 70_000).astype(np.float32)
    x = np.clip(x, -8, 8) if tail else x
    x[0] = 8 * tail or x[0]
    f = exmy.Format(name)
    holds = f.fit(x, "max")
    errors = [
        np.square(x - exmy.round(x, holds.with_bias(holds.bias + k)), dtype=np.float64).sum() for k in range(9)
    ]
    fit = f.fit(x, "search")
    assert errors[fit.bias - holds.bias] == pytest.approx(min(errors), rel=1e-9)
