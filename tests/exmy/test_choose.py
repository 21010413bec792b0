"""Choosing a format for given values: estimates match what quantization achieves, and the choice is the best."""

import copy
import math
import pickle

import exmy
import ml_dtypes
import numpy as np
import pytest

OPTIONS = [{}, {"axis": 0}, {"axis": -1}, {"axis": 1, "block": 32}, {"scale": "max"}, {"scale": "float"}]


def achieved(x, f, **options):
    return exmy.sqnr(x, exmy.quantize(x, f, **options).dequantize("float64"))


def data(shape=(192, 128), dtype=np.float32):
    return np.random.default_rng(0).standard_t(4, shape).astype(dtype)


@pytest.mark.parametrize("options", [*OPTIONS, {"scale": "none"}, {"axis": -1, "scale": "max"}])
def test_the_survey_of_a_small_array_is_what_quantize_achieves(options):
    x = data()
    result = exmy.survey(x, [3, 5, 8], **options)
    assert [c.format.bits for c in result] == [3] * 3 + [5] * 5 + [8] * 8
    each = 4 if options.get("scale") == "float" else 1
    length = {0: 192, -1: 128, 1: 32}.get(options.get("axis"))
    for c in result:
        q = exmy.quantize(x, c.format, **options)
        d = exmy.compare(x, q.dequantize("float64"))
        close = {"rel": 1e-3} if options.get("scale") == "float" else {"rel": 1e-9}
        assert c.noise == pytest.approx(d.noise, **close), c
        assert c.signal == pytest.approx(d.signal)
        assert c.clipped == pytest.approx(q.count_clipped(x) / x.size, abs=2 / x.size)
        assert c.bits_per_value == c.format.bits + (8 * each / length if length else 0)
        if not options:
            assert c.format == c.format.fit(x, "search")


@pytest.mark.parametrize("outlier", [60, 150, 240])
def test_the_survey_finds_offsets_far_from_the_largest_value(outlier):
    x = np.random.default_rng(0).standard_normal((16, 4096), dtype=np.float32)
    x[3, 7] = outlier
    for options in ({}, {"axis": -1}):
        for c in exmy.survey(x, [4, 7], **options):
            d = exmy.compare(x, exmy.quantize(x, c.format, **options).dequantize("float64"))
            assert c.noise == pytest.approx(d.noise, rel=1e-9), c


@pytest.mark.parametrize("options", OPTIONS)
def test_a_sample_stands_for_a_large_array(options):
    x = np.random.default_rng(0).standard_normal((1500, 1024), dtype=np.float32)
    close = 0.8 if options.get("axis") in {0, -1} else 0.25  # a sample has few rows
    for c in exmy.survey(x, [4, 8], **options)[::2]:
        assert achieved(x, c.format, **options) == pytest.approx(c.sqnr, abs=close), c


@pytest.mark.parametrize("shape", [(3, 70_000), (70_000, 3), (2, 3, 50_000), (7, 64, 512), (200_000,)])
def test_every_shape_is_sampled(shape):
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    for axis in range(-1, len(shape) - 1):
        c = exmy.choose(x, bits=6, axis=axis).candidates[0]
        assert achieved(x, c.format, axis=axis) == pytest.approx(c.sqnr, abs=0.6)


def test_the_survey_is_the_same_at_every_level():
    x = data((40, 64))
    for options in OPTIONS:
        results = set()
        for level in exmy.kernels.levels():
            with exmy.kernels.use(level):
                results.add(exmy.survey(x, [4, 7], **options))
        assert len(results) == 1


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("bits", [2, 4, 6.5, 8])
def test_bits_gives_the_format_with_the_least_error(options, bits):
    x = data()
    if bits == 2 and "axis" in options:
        with pytest.raises(exmy.FormatError, match="do not suffice"):
            exmy.choose(x, bits, **options)
        return
    f = exmy.choose(x, bits, **options)
    cost = exmy.quantize(x, f, **options)
    assert f.bits == math.floor(bits - (max(0, cost.offsets.size / x.size * 8 - 0.01) if "axis" in options else 0))
    best = max(achieved(x, g, **options) for g in exmy.formats(f.bits))
    assert achieved(x, f, **options) > best - 0.01
    assert [c.noise for c in f.candidates] == sorted(c.noise for c in f.candidates)
    assert f.candidates[0].format == f


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("floor", [-10, 12, 25.5, 40])
def test_min_sqnr_gives_the_fewest_bits(options, floor):
    x = data()
    f = exmy.choose(x, min_sqnr=floor, **options)
    assert achieved(x, f, **options) >= floor - 0.01
    assert f.bits == 2 or max(achieved(x, g, **options) for g in exmy.formats(f.bits - 1)) < floor + 0.01
    assert all(c.sqnr >= floor and c.format.bits == f.bits for c in f.candidates)


def test_an_unreachable_floor_says_what_is_possible():
    x = data()
    best = max(exmy.survey(x), key=lambda c: c.sqnr)
    with pytest.raises(exmy.FormatError, match=f"best possible is {best.sqnr:.2f} dB, with {best.format}"):
        exmy.choose(x, min_sqnr=120)
    assert exmy.choose(np.ones(5), min_sqnr=500).candidates[0].sqnr == math.inf


@pytest.mark.parametrize("options", OPTIONS)
def test_arrays_without_nonzero_values(options):
    for x in (np.zeros((64, 64), np.float32), np.zeros((0, 64)), np.zeros((64, 0))):
        assert exmy.choose(x, bits=5.3, **options) == exmy.Format("e0m4")
        for f in (exmy.choose(x, min_sqnr=60, **options), exmy.choose(x, min_sqnr=math.inf, **options)):
            assert f == exmy.Format("e0m1")
            assert "every format is exact" in f.reason
        assert exmy.quantize(x, f, **options).dequantize().shape == x.shape
    assert exmy.choose(np.float32(3), bits=8).bits == 8


def test_a_choice_is_a_format():
    f = exmy.choose(data(), bits=6)
    plain = exmy.Format(f.name)
    assert isinstance(f, exmy.Format)
    assert f == plain
    assert plain == f
    assert len({f, plain}) == 1
    assert str(f) == f"{f}" == f.name
    for other in (pickle.loads(pickle.dumps(f)), copy.copy(f), copy.deepcopy(f)):
        assert type(other) is exmy.Format
        assert other == f
    with pytest.raises(AttributeError):
        f.reason = "none"
    assert f != f.with_bias(77)
    assert f != str(f)
    x = data()
    assert exmy.encode(x, f).tobytes() == exmy.encode(x, plain).tobytes()


def test_the_reason_is_a_readable_sentence():
    x = data()
    f = exmy.choose(x, bits=8)
    for part in (
        f"{f} has the least error",
        f"{f.candidates[0].sqnr:.1f} dB expected",
        "exponents range over",
        "entropy",
    ):
        assert part in f.reason
    g = exmy.choose(x, min_sqnr=30, block=32)
    assert f"{g} reaches 30 dB with the fewest bits" in g.reason


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_all_dtypes(dtype):
    x = data(dtype=exmy.elements.output_dtype(dtype))
    for options in OPTIONS:
        c = exmy.choose(x, bits=7, **options).candidates[0]
        assert achieved(x, c.format, **options) == pytest.approx(c.sqnr, abs=0.01)


def test_far_from_one():
    for factor, dtype in [(1e-38, np.float32), (1e36, np.float32), (1e-300, np.float64), (1e150, np.float64)]:
        x = (data((64, 64), np.float64) * factor).astype(dtype)
        for options in ({}, {"axis": 0}, {"axis": 0, "scale": "float"})[: 3 if dtype is np.float32 else 2]:
            c = exmy.choose(x, bits=6, **options).candidates[0]
            if factor != 1e-300:  # beneath the smallest offset there is
                assert achieved(x, c.format, **options) == pytest.approx(c.sqnr, abs=0.01)
    x = np.array([1e200, 1e199, -3e198])
    assert exmy.choose(x, bits=16).exponent_bits == 8
    with pytest.raises(exmy.FormatError, match="scale the input"):
        exmy.choose(x, bits=4)
    with pytest.raises(exmy.FormatError, match="scale the input"):
        exmy.survey(x, [4])


def test_nonfinite_values_are_refused():
    x = data((300, 400))
    x[7, 3], x[7, 5] = np.nan, np.inf
    with pytest.raises(exmy.NonFiniteError, match=r"2 of 120000 .* \[7, 3\]"):
        exmy.choose(x, bits=8, axis=0)
    x[np.isnan(x)] = np.inf
    zeroed = np.where(np.isfinite(x), x, 0)
    for options in OPTIONS[:3]:
        f = exmy.choose(x, bits=8, nonfinite="saturate", **options)
        assert f.candidates == exmy.choose(zeroed, bits=8, **options).candidates


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({}, "either bits or min_sqnr"),
        ({"bits": 4, "min_sqnr": 30}, "either bits or min_sqnr"),
        ({"bits": 1.5}, "number from 2 to 16"),
        ({"bits": 17}, "number from 2 to 16"),
        ({"bits": "4"}, "number from 2 to 16"),
        ({"bits": True}, "number from 2 to 16"),
        ({"bits": math.nan}, "number from 2 to 16"),
        ({"min_sqnr": math.nan}, "number of dB"),
        ({"min_sqnr": math.inf}, "number of dB"),
        ({"min_sqnr": "30"}, "number of dB"),
        ({"bits": 4, "scale": "best"}, "expected 'search'"),
        ({"bits": 4, "scale": "none", "axis": 0}, "no offsets to share"),
        ({"bits": 4, "block": 20}, "expected one of 16"),
    ],
)
def test_invalid_arguments_are_refused(kwargs, match):
    with pytest.raises(exmy.FormatError, match=match):
        exmy.choose(data((64, 64)), **kwargs)


def test_a_survey_without_widths_is_refused():
    with pytest.raises(exmy.FormatError, match="no widths to try"):
        exmy.survey(data((64, 64)), [])


def test_bfloat16_without_a_copy_of_the_type():
    x = data((8, 32)).astype(ml_dtypes.bfloat16)
    assert exmy.exponents(x).count == 256
    assert "exponents range over" in exmy.choose(x, bits=3).reason


def best_of(bits, x, **options):
    return max(achieved(x, f, **options) for f in exmy.formats(bits))


@pytest.mark.parametrize("bits", [5, 6, 7])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["t", "laplace"])
def test_rare_large_values_are_seen(name, seed, bits):
    rng = np.random.default_rng(seed)
    x = (rng.standard_t(5, 1 << 18) if name == "t" else rng.laplace(size=1 << 18)).astype(np.float32)
    c = exmy.choose(x, bits=bits).candidates[0]
    assert achieved(x, c.format) > best_of(bits, x) - 0.1
    assert achieved(x, c.format) == pytest.approx(c.sqnr, abs=0.1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize(("scale", "at"), [("search", 123_457), ("max", -1), ("none", 123_457), ("float", -1)])
def test_one_gigantic_value_is_seen(dtype, scale, at):
    x = np.random.default_rng(0).standard_normal(200_001).astype(exmy.elements.output_dtype(dtype))
    x[at] = -30_000.0
    for c in exmy.survey(x, [5, 8], scale=scale):
        assert achieved(x, c.format, scale=scale) == pytest.approx(c.sqnr, abs=0.15), c
    assert achieved(x, exmy.choose(x, 8, scale=scale), scale=scale) > best_of(8, x, scale=scale) - 0.1


@pytest.mark.parametrize(
    "x",
    [
        np.random.default_rng(0).uniform(-1, 1, 200_000),  # more large values than can join the sample
        np.where(np.arange(200_000) == 130_000, 1.9999, 1.0),  # all but one the same
        np.where(np.arange(200_000) % 100 == 99, np.random.default_rng(0).standard_t(3, 200_000), 0.0),
    ],
    ids=["crowded", "constant", "sparse"],
)
@pytest.mark.parametrize("scale", ["search", "max"])
def test_any_largest_values(x, scale):
    for c in exmy.survey(x, [2, 4, 7], scale=scale):
        d = exmy.compare(x, exmy.quantize(x, c.format, scale=scale).dequantize("float64"))
        assert c.noise == pytest.approx(d.noise, rel=0.03, abs=1e-5 * d.signal), c
        assert c.signal == pytest.approx(d.signal, rel=0.01)
        if scale == "max":
            assert c.format == c.format.fit(x, "max")


def test_few_values_besides_zeros_are_all_seen():
    x = np.zeros(300_000, np.float32)
    x[::100] = np.random.default_rng(0).standard_t(2, 3000)
    for c in exmy.survey(x, [3, 6]):
        d = exmy.compare(x, exmy.quantize(x, c.format).dequantize("float64"))
        assert (c.noise, c.signal) == (pytest.approx(d.noise, rel=1e-9), pytest.approx(d.signal, rel=1e-9))
        assert c.clipped * x.size == pytest.approx(exmy.quantize(x, c.format).count_clipped(x), abs=1)


@pytest.mark.parametrize("options", OPTIONS)
def test_noise_and_signal_are_those_of_the_whole_array(options):
    x = np.random.default_rng(0).standard_normal((1500, 1024), dtype=np.float32)
    for c in exmy.survey(x, [4], **options):
        d = exmy.compare(x, exmy.quantize(x, c.format, **options).dequantize())
        assert c.noise == pytest.approx(d.noise, rel=0.2), c
        assert c.signal == pytest.approx(d.signal, rel=0.02), c


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_large_tensor_is_surveyed_the_same_at_every_level(dtype):
    x = np.random.default_rng(0).standard_t(3, (70, 1001)).astype(exmy.elements.output_dtype(dtype))
    results = set()
    for level in exmy.kernels.levels():
        with exmy.kernels.use(level):
            results |= {exmy.survey(x, [3]), exmy.survey(np.asfortranarray(x), [3])}
    assert len(results) == 1


def test_nonfinite_anywhere_in_a_large_tensor():
    x = np.random.default_rng(0).standard_t(3, (400, 500))
    x.flat[100_004] = 1000.0
    zeroed = x.copy()
    for i, value in ((0, np.inf), (777, -np.inf), (100_001, np.nan), (199_999, np.nan)):
        x.flat[i], zeroed.flat[i] = value, 0
        with pytest.raises(exmy.NonFiniteError, match="of 200000"):
            exmy.choose(x, bits=8)
        saturated = exmy.choose(x, bits=8, nonfinite="saturate")
        assert saturated.candidates == exmy.choose(zeroed, bits=8).candidates
    small = exmy.choose(x[:2], bits=8, nonfinite="saturate")
    assert small.candidates == exmy.choose(zeroed[:2], bits=8).candidates
    x = np.zeros(100_000)
    x[5000] = np.nan
    with pytest.raises(exmy.NonFiniteError, match=r"1 of 100000 .* \[5000\]"):
        exmy.choose(x, bits=8)
    assert exmy.choose(x, bits=8, nonfinite="saturate") == exmy.Format("e0m7")


def test_the_reason_describes_all_values():
    x = np.random.default_rng(0).standard_normal(200_001)
    x[123_457] = 40.0
    f = exmy.choose(x, bits=8, scale="none")
    h = exmy.exponents(x)
    assert f"exponents range over {h.lowest} … 5 (entropy {h.entropy:.2f} bits)" in f.reason
    assert f"{h.below(f):.2%} of the nonzero values are below" in f.reason


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_a_survey_of_subnormal_values_gives_no_warning(kind):
    x = (np.random.default_rng(0).normal(size=(256, 257)) * 1e-39).astype(kind)
    assert all(math.isfinite(c.noise) for c in exmy.survey(x))
