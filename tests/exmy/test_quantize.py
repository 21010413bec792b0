"""Quantized arrays: every granularity against NumPy, equality of levels and threads, bytes, invalid input."""

import copy
import itertools
import math
import pickle
import struct

import exmy
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

DTYPES = ["float16", "bfloat16", "float32", "float64"]
SHARINGS = [{}, {"axis": -1}, {"axis": 0}, {"axis": 1}, {"block": 16}, {"axis": 0, "block": 16}]
SCALES = ["max", "search", "float", "e4m3", "6bit"]
GOLDEN_ROWS = "65586d590102030203000200010000000300000000000000" + (
    "020000000000000003000000000000000003000000000000088c040c0517"
)
GOLDEN_FLOAT = "65586d590102030203000201000000000000000000000000" + (
    "020000000000000003000000000000000000003e0000803e0000803d00000000080808000517"
)


def weights(shape, dtype="float32", seed=0):
    """Return rows of different magnitude, with heavy tails and a row of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, shape) * np.exp2(rng.integers(-6, 6, (shape[0], *[1] * (len(shape) - 1))))
    x[shape[0] // 2] = 0
    return x.astype(exmy.elements.output_dtype(dtype))


def groups_of(x, sharing):
    """Return the groups as rows, computed with NumPy alone, and the inverse function."""
    if not sharing:
        return x.reshape(1, -1), lambda rows: rows.reshape(x.shape)
    axis = sharing.get("axis", -1)
    moved = np.moveaxis(x, axis, -1)
    rows = moved.reshape(-1, sharing.get("block", moved.shape[-1]))
    return rows, lambda new: np.moveaxis(new.reshape(moved.shape), -1, axis)


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e0m7", "e8m2", "e3m8"])
def test_each_group_is_encoded_with_its_own_bias(sharing, name):
    for dtype in DTYPES:
        x = weights((32, 16, 3) if sharing.get("axis") in (0, 1) else (5, 7, 48), dtype)
        rows, back = groups_of(x, sharing)
        fits = [exmy.Format(name).fit(row) for row in rows]
        expected = np.stack([exmy.round(row.astype(np.float64), f) for row, f in zip(rows, fits, strict=True)])
        narrow = {each: back(expected).astype(exmy.elements.output_dtype(each)) for each in DTYPES}
        for level in exmy.kernels.levels():
            with exmy.kernels.use(level):
                q = exmy.quantize(x, name, scale="max", **sharing)
                np.testing.assert_array_equal(q.dequantize("float64"), back(expected), level)
                for target in DTYPES:
                    assert q.dequantize(target).tobytes() == narrow[target].tobytes(), (level, target)
                assert q.codes().shape == x.shape
                assert q.dtype == dtype


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("name", ["e2m1", "e0m3", "e3m2", "e4m3", "e8m1"])
def test_search_has_the_least_error(sharing, name):
    x = weights((32, 48))
    q = exmy.quantize(x, name, scale="search", **sharing)
    assert q.nbytes == exmy.quantize(x, name, scale="max", **sharing).nbytes
    rows, _ = groups_of(x, sharing)
    got, _ = groups_of(q.dequantize("float64"), sharing)
    f = exmy.Format(name)
    for row, mine in zip(rows.astype(np.float64), got, strict=True):
        first = f.fit(row).bias
        errors = [np.square(exmy.round(row, f.with_bias(b)) - row).sum() for b in range(first, first + 32)]
        assert np.square(mine - row).sum() <= min(errors) * (1 + 1e-12)


@pytest.mark.parametrize("name", ["e2m1", "e0m3", "e4m3", "e8m2"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_float_scales_beat_offsets(sharing, name):
    x = weights((32, 48))
    float_ = exmy.quantize(x, name, scale="float", **sharing)
    search = exmy.quantize(x, name, scale="search", **sharing)
    assert (float_.offsets == 0).all()
    assert search.scales is None
    assert exmy.sqnr(x, float_.dequantize()) >= exmy.sqnr(x, search.dequantize()) - 1e-6
    values = exmy.decode(float_.codes(), float_.format, "float64")
    rows, back = groups_of(values, sharing)
    scales = np.moveaxis(float_.scales, sharing.get("axis", -1), -1) if "block" in sharing else float_.scales
    expected = back(rows * scales.reshape(-1, 1).astype(np.float64))
    assert float_.dequantize("float64").tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", SCALES)
def test_levels_and_threads_give_the_same_bytes(dtype, scale):
    for name, sharing in itertools.product(["e2m1", "e3m2", "e8m2"], SHARINGS):
        x = weights((32, 48), dtype, seed=3)
        results, decoded = set(), set()
        for level in exmy.kernels.levels():
            with exmy.kernels.use(level):
                q = exmy.quantize(x, name, scale=scale, **sharing)
                results.add(q.to_bytes())
                decoded |= {(d, q.dequantize(d).tobytes()) for d in DTYPES}
        assert (len(results), len(decoded)) == (1, 4), (name, sharing)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("sharing", [{}, {"axis": 0}, {"axis": 1}, {"axis": 1, "block": 32}])
def test_threads_share_the_work_on_big_arrays(scale, sharing):
    x = weights((1 << 11, 1056))
    x += np.float32(0.001)
    one = exmy.quantize(x, "e3m2", scale=scale, **sharing)
    four = exmy.quantize(x, "e3m2", scale=scale, threads=4, **sharing)
    assert one.to_bytes() == four.to_bytes()
    assert one.dequantize().tobytes() == one.dequantize(threads=4).tobytes()


def test_a_tensor_is_packed_as_encode_packed_does(level):
    x = weights((9, 100))
    for scale, fitted in [("max", "max"), ("search", "search"), ("none", None)]:
        f = exmy.Format("e3m2b9") if fitted is None else exmy.Format("e3m2").fit(x, fitted)
        q = exmy.quantize(x, f, scale=scale)
        assert q.format.bias + int(q.offsets) == f.bias
        assert q.packed.tobytes() == exmy.encode_packed(x, f).tobytes()
        assert q.to_bytes().endswith(q.packed.tobytes())


def test_metadata_is_small():
    rows = exmy.quantize(np.ones((1, 4096), np.float32), "e3m2", axis=1)
    more = exmy.quantize(np.ones((1001, 4096), np.float32), "e3m2", axis=1)
    assert ((more.nbytes - rows.nbytes) * 8 / 1000 - 6 * 4096) / 4096 <= 0.01
    more = exmy.quantize(np.ones((1000, 4096), np.float32), "e3m2", axis=1, scale="float")
    assert more.bits_per_value - 6 <= 0.01
    assert exmy.quantize(np.ones((1000, 4096), np.float32), "e2m1", block=32).bits_per_value < 4.2501


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,), (5, 3), (2, 1, 16)])
def test_bytes_there_and_back(level, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    sharings = [{}, {"axis": 0}, {"axis": -1}] if shape else [{}]
    sharings += [{"block": 16}] if shape[-1:] == (16,) else []
    for scale, sharing in [("none", {}), *itertools.product(SCALES, sharings)]:
        q = exmy.quantize(x, "e4m3", scale=scale, **sharing)
        data = q.to_bytes()
        assert len(data) == q.nbytes
        for form in (data, bytearray(data), np.frombuffer(data, np.uint8)):
            r = exmy.Quantized.from_bytes(form)
            assert (r.format, r.groups, r.dtype, r.granularity) == (q.format, q.groups, q.dtype, q.granularity)
            np.testing.assert_array_equal(r.offsets, q.offsets)
            assert r.to_bytes() == data
            assert r.dequantize().tobytes() == q.dequantize().tobytes()
    assert "e4m3" in repr(q)


def test_golden(level):
    x = np.array([[1, -2, 0.5], [0.25, 0, 0.125]], np.float32)
    header = "65586d59010202010100"
    q = exmy.quantize(x[0], "e2m1", scale="max")
    assert q.to_bytes().hex() == header + "0100ffff00000100" + "00" * 6 + "03" + "00" * 15 + "040e0200"
    q = exmy.quantize(x, "e3m2", axis=1, scale="max")
    assert q.to_bytes().hex() == GOLDEN_ROWS
    q = exmy.quantize(x, "e3m2", axis=0, scale="float")
    assert q.to_bytes().hex() == GOLDEN_FLOAT
    q = exmy.Quantized.from_bytes(bytes.fromhex(GOLDEN_ROWS))
    assert q.dequantize().tolist() == x.tolist()


def test_extremes(level):
    for dtype in DTYPES:
        info = ml_dtypes.finfo(exmy.elements.output_dtype(dtype))
        tiny, huge = info.smallest_subnormal, info.max if dtype != "float64" else 1e150
        x = np.array([[tiny, -tiny], [huge, -1], [0, 0], [1, tiny]]).astype(info.dtype)
        for scale in SCALES:
            if dtype == "float64" and scale in ("float", "e4m3", "6bit"):
                with pytest.raises(exmy.FormatError, match="beyond float32"):
                    exmy.quantize(x, "e4m3", axis=1, scale=scale)
                continue
            q = exmy.quantize(x, "e4m3", axis=1, scale=scale)
            y = q.dequantize("float64")
            assert np.isfinite(y).all()
            assert np.abs(y[1, 0] / np.float64(huge) - 1) < 0.07
            if scale == "max" and dtype in ("float16", "bfloat16", "float32"):
                biases = q.offsets.astype(int)
                assert biases.max() - biases.min() <= 255
    with pytest.raises(exmy.FormatError, match="scale the input"):
        exmy.quantize(np.array([[1e300, 1], [1, 1]]), "e0m7", axis=1)


def test_nonfinite(level):
    x = np.ones((4, 32), np.float32)
    x[1, 3], x[2, 5] = np.nan, -np.inf
    for sharing, scale in itertools.product(({}, {"axis": 1}, {"axis": 0}, {"block": 16}), SCALES):
        with pytest.raises(exmy.NonFiniteError, match=r"2 of 128 .* \[1, 3\]"):
            exmy.quantize(x, "e3m2", scale=scale, **sharing)
        q = exmy.quantize(x, "e3m2", scale=scale, nonfinite="saturate", **sharing)
        y = q.dequantize()
        assert y[1, 3] == 0
        assert y[2, 5] <= -1
        assert y[0, 0] == pytest.approx(1, rel=0.01 if scale == "6bit" else 1e-6)
    with pytest.raises(exmy.NonFiniteError, match=r"2 of 128 .* \[1, 3\]"):
        exmy.quantize(x, "e3m2", scale="none")


def test_any_memory_order(level):
    x = weights((32, 48))
    expected = exmy.quantize(x, "e3m2", axis=0).to_bytes()
    frozen = x.copy()
    frozen.flags.writeable = False
    for y in (np.asfortranarray(x), x.astype(">f4"), np.repeat(x, 2, axis=1)[:, ::2], frozen):
        assert exmy.quantize(y, "e3m2", axis=0).to_bytes() == expected
    assert exmy.quantize(x.astype(">f4"), "e3m2").to_bytes() == exmy.quantize(x, "e3m2").to_bytes()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"axis": 2}, exmy.SizeError, "axis 2 does not fit an array of 2 dimensions"),
        ({"axis": 1.5}, exmy.SizeError, "expected an integer"),
        ({"block": 20}, exmy.FormatError, "expected one of 16, 32, 64, 128"),
        ({"block": 32}, exmy.SizeError, "blocks of 32 do not divide axis 1 of length 40; pad"),
        ({"scale": "best"}, exmy.FormatError, "expected 'search'"),
        ({"scale": "none", "axis": 1}, exmy.FormatError, "no offsets to share"),
        ({"threads": 0}, exmy.SizeError, "at least 1"),
        ({"nonfinite": "ignore"}, exmy.FormatError, "expected 'error'"),
        ({"nonfinite": []}, exmy.FormatError, "expected 'error'"),
        ({"rounding": []}, exmy.FormatError, "expected 'nearest'"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        exmy.quantize(np.ones((4, 40), np.float32), "e3m2", **arguments)


def test_wrong_bytes():
    data = exmy.quantize(np.ones((4, 32), np.float32), "e3m2", block=16).to_bytes()
    read = exmy.Quantized.from_bytes
    for n in range(len(data)):
        with pytest.raises(exmy.SizeError, match="truncated"):
            read(data[:n])
    with pytest.raises(exmy.SizeError, match="too long"):
        read(data + b"\0")
    with pytest.raises(exmy.FormatError, match=r"version 2.*newer"):
        read(data[:4] + b"\2" + data[5:])
    with pytest.raises(exmy.FormatError, match="not a quantized array"):
        read(b"PNG" + data[3:])
    with pytest.raises(exmy.DtypeError, match="from str"):
        read("text")
    for at, value in [(5, 4), (6, 9), (11, 2), (13, 0x80), (14, 5), (18, 1), (24, 0xFF), (31, 0xFF)]:
        broken = bytearray(data)
        broken[at] = value
        with pytest.raises((exmy.FormatError, exmy.SizeError)):
            read(broken)


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_refused_or_read(tail):
    data = struct.pack("<4sBBBB", b"eXmY", 1, 2, 4, 3) + tail
    try:
        q = exmy.Quantized.from_bytes(data)
    except exmy.ExmyError:
        return
    assert q.dequantize().size == math.prod(q.shape)


def test_arrays_are_read_only():
    q = exmy.quantize(np.ones((4, 32), np.float32), "e3m2", axis=1, scale="float")
    for each in (q, pickle.loads(pickle.dumps(q)), copy.deepcopy(q)):
        assert each.to_bytes() == q.to_bytes()
        for array in (each.packed, each.offsets, each.scales):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_offsets_that_differ_too_much_for_bytes_are_refused():
    q = exmy.quantize(np.ones((2, 16), np.float32), "e4m3", axis=1)
    for offsets, fits in (([-100, 155], True), ([-100, 156], False)):
        joined = exmy.Quantized(q.format, q.groups, np.array(offsets, np.int16), None, q.packed, "float64")
        if fits:
            restored = exmy.Quantized.from_bytes(joined.to_bytes())
            np.testing.assert_array_equal(restored.dequantize(), joined.dequantize())
            continue
        with pytest.raises(exmy.FormatError, match=r"offsets -100 to 156 .* differ by more than 255"):
            joined.to_bytes()
