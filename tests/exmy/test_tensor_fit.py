"""Fitting a tensor slab by slab: bit for bit the same result as in one piece, for any slabs."""

import exmy
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PASSES = 3
PART = 1 << 18  # elements whose errors are summed together


def fitted(x, name, scale, cuts, **options):
    """Fit with different slabs in each pass; cuts(n) returns their bounds between 0 and n."""
    fit = exmy.TensorFit(name, x.size, scale, **options)
    for _ in range(PASSES):
        for slab in np.split(x.reshape(-1), sorted(cuts(x.size))):
            fit.add(slab)
        fit.end_pass()
        if fit.done:
            return fit
    raise AssertionError("not done after 3 passes")


def whole(x, name, scale, **options):
    return fitted(x, name, scale, lambda n: [], **options)


def heavy(count, dtype="float32", seed=0):
    x = np.random.default_rng(seed).standard_t(3, count)
    return x.astype(exmy.elements.output_dtype(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("count", [0, 1, 300, 65_536, 65_537, PART, 2 * PART + 12_345])
def test_the_format_is_that_of_the_tensor_in_memory(dtype, count):
    x = heavy(count, dtype)
    for name in ("e2m1", "e4m3b3"):
        for scale in ("search", "max"):
            fit = whole(x, name, scale)
            assert fit.format == exmy.Format(name).fit(x, scale)
            q = exmy.quantize(x, name, scale=scale)
            assert q.format.bias + int(q.offsets) == (fit.format.bias if count else q.format.bias)
        assert whole(x, name, "none").format == exmy.Format(name)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("count", [5_000, 2 * PART + 12_345])
@pytest.mark.parametrize("scale", ["search", "none"])
def test_noise_and_signal_are_those_of_the_chosen_format(dtype, count, scale):
    x = heavy(count, dtype)
    fit = whole(x, "e3m2", scale)
    exact = x.astype(np.float64)
    error = exact - exmy.round(exact, fit.format)
    assert fit.noise == pytest.approx(error @ error, rel=1e-6)
    assert fit.signal == pytest.approx(exact @ exact, rel=1e-12)


@given(
    st.lists(st.lists(st.integers(0, 600_000), max_size=6), min_size=PASSES, max_size=PASSES), st.integers(0, 2)
)
@settings(max_examples=15, deadline=None)
def test_neither_cuts_nor_threads_nor_levels_matter(cuts, seed):
    x = heavy(600_000, seed=seed)
    x[300_000] = 1e4  # the sample misses it, so that a third pass is needed
    expected = whole(x, "e2m1", "search")
    passes = iter(cuts)
    fit = fitted(x, "e2m1", "search", lambda n: next(passes), threads=1 + seed)
    assert (fit.format, fit.noise, fit.signal) == (expected.format, expected.noise, expected.signal)


def test_the_memory_of_a_slab_may_be_used_again():
    x = heavy(100_000)
    fit, slab = exmy.TensorFit("e3m2", x.size), np.empty(1000, np.float32)
    while not fit.done:
        for start in range(0, x.size, 1000):
            slab[:] = x[start : start + 1000]
            fit.add(slab)
        fit.end_pass()
    expected = whole(x, "e3m2", "search")
    assert (fit.format, fit.noise, fit.signal) == (expected.format, expected.noise, expected.signal)


def test_levels_agree():
    x = heavy(70_001)
    results = set()
    for level in exmy.kernels.levels():
        with exmy.kernels.use(level):
            fit = whole(x, "e3m2", "search")
            results.add((fit.format, fit.noise, fit.signal))
    assert len(results) == 1


@pytest.mark.parametrize(("outlier", "scale"), [(1.0, 1), (1e6, 1), (1e3, 1e-3)])
def test_it_takes_one_pass_for_small_tensors_and_at_most_three_for_large_ones(outlier, scale):
    x = np.random.default_rng(1).standard_normal(700_000).astype(np.float32)
    x[12_345] *= outlier
    fit = exmy.TensorFit("e0m7", x.size)
    passes = 0
    while not fit.done:
        fit.add(x)
        fit.end_pass()
        passes += 1
    assert passes <= PASSES
    assert fit.format == exmy.Format("e0m7").fit(x, "search")
    small = exmy.TensorFit("e0m7", 1000)
    small.add(x[:1000])
    small.end_pass()
    assert small.done
    assert small.noise > 0


def test_max_measures_in_one_more_pass():
    x = heavy(100_000)
    fit = whole(x, "e3m2", "max")
    assert fit.noise is None
    fit.add(x)
    fit.end_pass()
    error = x.astype(np.float64) - exmy.round(x, fit.format)
    assert fit.noise == pytest.approx(error @ error, rel=1e-6)
    assert fit.format == exmy.Format("e3m2").fit(x)


def test_zeros():
    fit = whole(np.zeros(100_000, np.float32), "e3m2b5", "search")
    assert (fit.format, fit.noise, fit.signal) == (exmy.Format("e3m2b5"), 0.0, 0.0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [1000, PART + 1000])
def test_nonfinite(dtype, count):
    x = heavy(count, dtype)
    x[777], x[-2] = np.nan, -np.inf
    fit = exmy.TensorFit("e3m2", count)
    for slab in np.array_split(x, 7):
        fit.add(slab)
    with pytest.raises(exmy.NonFiniteError, match=rf"2 of {count} .* \[777\]"):
        fit.end_pass()
    finite = np.where(np.isfinite(x), x, x.dtype.type(0))
    for scale in ("search", "max", "none"):
        fit = fitted(x, "e3m2", scale, lambda n: [10, 100], nonfinite="saturate")
        expected = whole(finite, "e3m2", scale)
        assert (fit.format, fit.noise, fit.signal) == (expected.format, expected.noise, expected.signal)


def test_wrong_use():
    with pytest.raises(exmy.FormatError, match="expected 'search', 'max' or 'none'"):
        exmy.TensorFit("e3m2", 5, "float")
    with pytest.raises(exmy.FormatError, match="expected 'search', 'max' or 'none'"):
        exmy.TensorFit("e3m2", 5, [])
    with pytest.raises(exmy.FormatError, match="expected 'bias', 'errors' or 'exponents'"):
        exmy.TensorFit("e3m2", 5, measures=[])
    with pytest.raises(exmy.FormatError, match="expected 'max' or 'search'"):
        exmy.Format("e3m2").fit(np.ones(3), [])
    with pytest.raises(exmy.SizeError, match="count is -1"):
        exmy.TensorFit("e3m2", -1)
    fit = exmy.TensorFit("e3m2", 5)
    fit.add(np.ones(3, np.float32))
    with pytest.raises(exmy.SizeError, match="adds 6 elements; expected 5"):
        fit.add(np.ones(3, np.float32))
    with pytest.raises(exmy.SizeError, match="added 3 elements; expected 5"):
        fit.end_pass()
    with pytest.raises(exmy.DtypeError, match="float64; expected float32"):
        fit.add(np.ones(2))
    for name in ("format", "signal"):
        with pytest.raises(exmy.SizeError, match="not known yet"):
            getattr(fit, name)
    fit.add(np.ones((1, 2), np.float32))
    fit.end_pass()
    assert fit.format == exmy.Format("e3m2").fit(np.ones(1, np.float32), "search")
    with pytest.raises(exmy.FormatError, match="scale the input"):
        whole(np.array([1e300]), "e0m7", "search")
    assert whole(np.array([1.5], ml_dtypes.bfloat16), "e3m2", "max").format.max >= 1.5


@pytest.mark.parametrize("count", [1, 300, 2 * PART + 12_345])
def test_exponents_are_counted_in_the_first_pass(count):
    x = heavy(count)
    x[count // 2] = np.nan
    fit = fitted(x, "e4m3", "search", lambda n: [n // 3], nonfinite="saturate", measures="exponents")
    expected = exmy.exponents(x, nonfinite="saturate")
    assert (fit.exponents.lowest, fit.exponents.zeros) == (expected.lowest, expected.zeros)
    np.testing.assert_array_equal(fit.exponents.counts, expected.counts)
    assert fit.format == whole(x, "e4m3", "search", nonfinite="saturate").format


def test_exponents_are_not_known_unless_counted():
    for fit in (exmy.TensorFit("e4m3", 8, measures="exponents"), whole(heavy(8), "e4m3", "search")):
        with pytest.raises(exmy.SizeError, match="exponents"):
            _ = fit.exponents
