"""Float scales in 8 and 6 bits and fixed scales, decoded as FORMAT.md says; their error; invalid bytes."""

import exmy
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

rng = np.random.default_rng(0)
X = (rng.standard_t(5, (24, 512)) * np.exp2(rng.integers(-4, 4, (24, 1)))).astype(np.float32)


def scales_of_chunk(data, scale, counts, length):
    """Return the scales in the header of a chunk, by section 8 of FORMAT.md, and the size of the header."""
    count = int(np.prod(counts))
    if scale == "e4m3":
        unit, codes = data[8:12].view("<f4").astype(np.float64), data[12 : 12 + count]
        assert ((codes >= 1) & (codes <= 127)).all()
        mantissa, exponent = codes & 7, codes >> 3
        values = np.where(exponent > 0, 1 + mantissa / 8, mantissa / 8) * np.exp2(np.maximum(exponent, 1) - 7.0)
        return (values * unit).astype(np.float32).reshape(counts), -(-(12 + count) // 8) * 8
    per_run = max(1, 256 // length)
    runs = -(-count // per_run)
    units = data[8 : 8 + 2 * runs].view(ml_dtypes.bfloat16).astype(np.float64)
    end = 8 + 2 * runs + exmy.packed_size(count, 6)
    numbers = exmy.unpack(data[8 + 2 * runs : end], 6, count)
    assert numbers.min() >= 1
    return (np.repeat(units, per_run)[:count] * numbers).astype(np.float32).reshape(counts), -(-end // 8) * 8


@pytest.mark.parametrize("scale", ["e4m3", "6bit"])
@pytest.mark.parametrize("sharing", [{"block": b} for b in exmy.BLOCKS] + [{"axis": 0}, {"axis": 1}, {}], ids=str)
def test_a_chunk_decodes_as_the_format_says(level, scale, sharing):
    codec = exmy.ChunkCodec.from_configuration({"format": "e2m1", "scale": scale, **sharing})
    data = codec.encode(X)
    q = codec.to_quantized(data, X.shape, "float32")
    scales, start = scales_of_chunk(data, scale, q.groups.counts, q.groups.length)
    np.testing.assert_array_equal(q.scales, scales)
    values = exmy.decode_packed(data[start:], "e2m1", X.size, dtype="float64").reshape(X.shape)
    factors = scales.reshape(-1)[q.groups.index(0, X.size)].reshape(X.shape).astype(np.float64)
    np.testing.assert_array_equal(q.dequantize("float32"), (values * factors).astype(np.float32))
    again = exmy.Quantized.from_bytes(exmy.quantize(X, "e2m1", scale=scale, **sharing).to_bytes())
    np.testing.assert_array_equal(again.dequantize(), q.dequantize("float32"))


@pytest.mark.parametrize("block", [16, 32, 64])
def test_small_scales_cost_little_error(block):
    exact = exmy.sqnr(X, exmy.quantize(X, "e2m1", block=block, scale="float").dequantize())
    offsets = exmy.sqnr(X, exmy.quantize(X, "e2m1", block=block).dequantize())
    for scale, bits in (("e4m3", 8 / block), ("6bit", 6 / block + 16 / 256)):
        q = exmy.quantize(X, "e2m1", block=block, scale=scale)
        assert q.bits_per_value == pytest.approx(4 + bits, abs=0.06)
        assert max(offsets + 0.3, exact - 0.4) < exmy.sqnr(X, q.dequantize())


@pytest.mark.parametrize(("block", "bits"), [(16, 7), (32, 8), (64, 10), (128, 14)])
def test_the_bits_of_a_scale(block, bits):
    x = np.resize(X, (1024, 512))
    for scale, expected in (("6bit", bits), ("e4m3", 8), ("float", 32)):
        q = exmy.quantize(x, "e2m1", block=block, scale=scale)
        assert (q.bits_per_value - 4) * block == pytest.approx(expected, abs=0.1)


def test_golden_bytes_of_6_bits():
    """The unit is the bfloat16 just above 8/63, 131/1024, so the scales 1 and 8 become 8 and 63 (or 62) units."""
    x = np.array([[1, -2], [24, 0]], np.float32)
    data = exmy.ChunkCodec.from_configuration({"format": "e2m1", "scale": "6bit", "axis": 1}).encode(x)
    assert data.tobytes() == bytes.fromhex("0100000000000000 033e080f00000003 020c0500")


@given(st.sampled_from(["e2m1", "e3m4", "e3m6", "e1m1", "e4m10"]), st.floats(1e-3, 1e3), st.integers(0, 600))
def test_a_fixed_scale_is_that_of_all_values_and_has_one_zero(name, scale, count):
    x = rng.standard_normal(count).astype(np.float32)
    q = exmy.quantize(x, name, scale=scale)
    codes = q.codes()
    assert (codes != 1 << (q.format.bits - 1)).all()
    nearest = exmy.encode(x * np.float32(1 / np.float64(np.float32(scale))), name)
    np.testing.assert_array_equal(codes, np.where(nearest == 1 << (q.format.bits - 1), 0, nearest))
    expected = exmy.decode(codes, name, dtype="float64") * np.float64(np.float32(scale))
    np.testing.assert_array_equal(q.dequantize("float64"), expected)
    codec = exmy.ChunkCodec.from_configuration({"format": name, "scale": scale})
    np.testing.assert_array_equal(codec.decode(codec.encode(x), x.shape, "float64"), expected)
    assert exmy.ChunkCodec.from_configuration(codec.configuration) == codec


@pytest.mark.parametrize("scale", [0, -1, float("nan"), float("inf"), 1e39, 1e-39, True, [1], "7bit"])
def test_invalid_scales_are_refused(scale):
    for call in (
        lambda: exmy.quantize(X, "e4m3", scale=scale),
        lambda: exmy.ChunkCodec.from_configuration({"format": "e4m3", "scale": scale}),
    ):
        with pytest.raises(exmy.FormatError, match="scale is"):
            call()


def test_a_number_beside_an_axis_is_a_share_of_the_magnitude_of_each_row():
    x = np.random.default_rng(5).normal(size=(3, 4096)) * [[1e-3], [1.0], [1e3]]
    together, rows = (exmy.quantize(x, "e3m4", axis, scale=1.0) for axis in (None, -1))
    assert not together.dequantize("float64")[0].any()  # one step for all is larger than these values
    assert all(exmy.sqnr(*row) > 33 for row in zip(x, rows.dequantize("float64"), strict=True))


@pytest.mark.parametrize(
    ("scale", "change", "message"),
    [
        ("e4m3", (12, 0x80), "with a sign"),
        ("e4m3", (12, 0), "positive"),
        ("e4m3", (11, 0xFF), "positive"),  # a negative unit
        ("6bit", (9, 0xFF), "positive"),
        ("6bit", (8 + 2, 0), "positive"),  # the low bits of the numbers 1 to 63
    ],
)
def test_invalid_stored_scales_are_refused(scale, change, message):
    codec = exmy.ChunkCodec.from_configuration({"format": "e2m1", "scale": scale, "block": 256})
    data = codec.encode(np.full((1, 256), 1.0, np.float32)).copy()
    if scale == "6bit" and change[0] > 9:
        data[10:16] = 0
    else:
        data[change[0]] = change[1]
    with pytest.raises(exmy.FormatError, match=message):
        codec.decode(data, (1, 256), "float32")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_fixed_scale_refuses_values_that_are_not_finite(bad):
    x = np.linspace(-1, 1, 5000, dtype=np.float32)
    x[4321] = bad
    with pytest.raises(exmy.NonFiniteError, match="4321"):
        exmy.quantize(x, "e3m4", scale=0.5)
    with pytest.raises(exmy.NonFiniteError, match="4321"):
        exmy.ChunkCodec(exmy.Format("e3m4"), 0.5).encode(x)
    saturated = exmy.quantize(x, "e3m4", scale=0.5, nonfinite="saturate").dequantize()
    assert saturated[4321] == (0 if np.isnan(bad) else np.copysign(15.5, bad))


@pytest.mark.parametrize("f", ["e1m0", "e0m2", "e2m1", "e3m4", "e3m7", "e8m7"])
@pytest.mark.parametrize("options", [{}, {"rounding": "stochastic", "seed": 3}])
def test_a_fixed_scale_has_one_zero_at_every_level(f, options):
    x = np.linspace(-1, 1, 70_001, dtype=np.float32)
    packed = set()
    for level in exmy.kernels.levels():
        with exmy.kernels.use(level):
            q = exmy.quantize(x, f, scale=0.5, **options)
        packed.add(q.packed.tobytes())
        codes = q.codes()
        assert not (codes == 1 << (q.format.bits - 1)).any()
        assert (codes == 0).any()
    assert len(packed) == 1
