"""Encoding of chunks: equality with `exmy.quantize`, layout, slices, invalid bytes and configurations."""

import json
import math

import exmy
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

DTYPES = ["float16", "bfloat16", "float32", "float64"]
SHARINGS = [{}, {"axis": -1}, {"axis": 0}, {"block": 16}, {"axis": 0, "block": 16}]
SHAPE = (16, 3, 32)
GOLDEN = [
    ([1, -2, 0.5], {"scale": "max"}, "0200 000000000000 040e0200"),
    ([1, -2, 0.5], {}, "0200 000000000000 040e0200"),
    ([1, -2, 0.5], {"scale": "none"}, "0100 000000000000 020c0100"),
    ([[1, -2], [24, 0]], {"scale": "max", "axis": 1}, "ffff 000000000000 0300000000000000 040e0700"),
    ([[1, -2], [24, 0]], {"scale": "float", "axis": 1}, "0100 000000000000 0000803f00000041 020c0500"),
    ([1, -2, 0.25], {"scale": 0.5}, "0100 000000000000 040e0100"),
    ([65 / 64, -2, 0.5], {"format": "e2m6", "scale": 1.0}, "0100 000000000000 20c0100000000000 01"),
    ([[1, -2], [24, 0]], {"scale": "e4m3", "axis": 1}, "0100 000000000000 8988883c677f0000 020c0500"),
    ([[3, -3], [24, -24]], {"scale": 0.5, "axis": 1}, "0100 000000000000 cdcccc3c 677f0000 040c040c"),
    ([[0] * 16, [0] * 15 + [-6]], {"block": 16}, "0100 000000000000 0000000000000000 " + "00" * 12 + "000000f0"),
]


def values(dtype, shape=SHAPE, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(3, shape) * np.exp2(rng.integers(-6, 6, (shape[0], *[1] * (len(shape) - 1))))
    return x.astype(exmy.elements.output_dtype(dtype))


def scales_of(sharing):
    return ["search", "max", "float", "e4m3", "6bit", 0.01, *([] if sharing else ["none"])]


CASES = [{**s, "scale": scale} for s in SHARINGS for scale in scales_of(s)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_chunk_has_the_codes_of_quantize(level, case):
    for dtype in DTYPES:
        x = values(dtype)
        for name in ("e3m2", "e8m2") if dtype == "float32" else ("e4m3b9",):
            codec = exmy.ChunkCodec.from_configuration({"format": name, **case})
            data = codec.encode(x)
            assert data.size == codec.size(x.shape)
            q = exmy.quantize(x, name, **case)
            result = codec.to_quantized(data.tobytes(), x.shape, dtype)
            assert (result.format, result.dtype) == (q.format, q.dtype)
            np.testing.assert_array_equal(result.codes(), q.codes())
            np.testing.assert_array_equal(result.offsets, q.offsets)
            for target in DTYPES:
                expected = q.dequantize(target)
                assert codec.decode(data, x.shape, target).tobytes() == expected.tobytes()
            out = np.empty(x.shape, x.dtype)
            assert codec.decode(data.tobytes(), x.shape, dtype, out=out) is out
            assert out.tobytes() == q.dequantize(dtype).tobytes()
            for start, stop in ((0, 0), (0, 1), (255, 513), (1300, x.size), (x.size, x.size)):
                part = codec.slice(x.shape, start, stop)
                assert part.start <= start <= stop <= part.stop
                got = part.decode(data[: part.header_size].tobytes(), data[part.first_byte : part.end_byte], dtype)
                assert got.tobytes() == out.reshape(-1)[part.start : part.stop].tobytes()


@pytest.mark.parametrize("sharing", [{"axis": 0}, {"block": 32}, {"axis": -1, "scale": "float"}])
def test_a_vector_may_be_one_row_or_blocks(sharing):
    x = values("float32", (64,))
    codec = exmy.ChunkCodec.from_configuration({"format": "e3m2", **sharing})
    q = exmy.quantize(x, "e3m2", **sharing)
    result = codec.to_quantized(codec.encode(x), x.shape, "float32")
    assert result.to_bytes() == q.to_bytes()


@pytest.mark.parametrize(("x", "configuration", "data"), GOLDEN, ids=lambda v: str(v)[:40])
def test_golden_bytes(level, x, configuration, data):
    x = np.array(x, np.float32)
    codec = exmy.ChunkCodec.from_configuration({"format": "e2m1", **configuration})
    assert codec.encode(x).tobytes() == bytes.fromhex(data)
    np.testing.assert_array_equal(codec.decode(bytes.fromhex(data), x.shape, "float32"), x)


def test_the_size_is_that_of_the_format_document():
    for bits in range(2, 17):
        for shape in ((), (1,), (8,), (9,), (3, 100), (0, 4)):
            count = math.prod(shape)
            size = exmy.ChunkCodec(exmy.formats(bits)[0]).size(shape)
            assert size == 8 + -(-count // 8) * bits
            assert exmy.ChunkCodec(exmy.formats(bits)[0]).encode(np.zeros(shape, "f4")).size == size
    assert exmy.ChunkCodec.from_configuration({"format": "e2m1", "block": 32}).size((3, 64)) == 8 + 8 + 96
    floats = exmy.ChunkCodec.from_configuration({"format": "e2m1", "axis": 0, "scale": "float"})
    assert floats.size((3, 5)) == 8 + 24 + 8


def test_a_slice_needs_only_the_header_and_its_tiles():
    part = exmy.ChunkCodec.from_configuration({"format": "e3m2", "block": 32}).slice((64, 1024), 5000, 5001)
    assert (part.start, part.stop) == (4864, 5120)
    assert part.header_size == 8 + 2048
    assert (part.first_byte, part.end_byte) == (part.header_size + 19 * 192, part.header_size + 20 * 192)
    with pytest.raises(exmy.SizeError, match="192"):
        part.decode(bytes(part.header_size), bytes(191), "float32")


@given(
    st.sampled_from(["e4m3", "e3m2", "e2m1b5"]),
    st.sampled_from(["search", "max", "none", "float"]),
    st.none() | st.integers(-3, 3),
    st.none() | st.sampled_from([16, 32, 64, 128]),
)
def test_configurations_are_canonical(name, scale, axis, block):
    given_ = {"format": name, "scale": scale, "axis": axis, "block": block}
    if scale == "none" and (axis, block) != (None, None):
        with pytest.raises(exmy.FormatError):
            exmy.ChunkCodec.from_configuration(given_)
        return
    codec = exmy.ChunkCodec.from_configuration(given_)
    defaults = {"scale": "search", "axis": None, "block": None}
    assert codec.configuration == {k: v for k, v in given_.items() if k not in defaults or v != defaults[k]}
    assert exmy.ChunkCodec.from_configuration(codec.configuration) == codec


def test_integers_of_numpy_are_integers():
    codec = exmy.ChunkCodec.from_configuration({"format": "e4m3", "axis": np.int64(-1), "block": np.uint8(32)})
    assert json.dumps(codec.configuration) == '{"format": "e4m3", "axis": -1, "block": 32}'


@pytest.mark.parametrize(
    ("configuration", "says"),
    [
        ({}, "has no format"),
        ({"format": "e9m9"}, "e9m9"),
        ({"format": "e4m3", "level": 3, "turbo": 1}, "'level', 'turbo'"),
        ({"format": "e4m3", "scale": "best"}, "'best'"),
        ({"format": "e4m3", "block": 24}, "24"),
        ({"format": "e4m3", "scale": "none", "axis": 0}, "none"),
    ],
    ids=str,
)
def test_unknown_configurations_are_refused(configuration, says):
    with pytest.raises(exmy.FormatError, match=says):
        exmy.ChunkCodec.from_configuration(configuration)


@pytest.mark.parametrize(
    "bad", [{"format": 4}, {"format": "e4m3", "axis": "x"}, {"format": "e4m3", "block": "32"}, 7]
)
def test_configurations_of_wrong_types_are_refused(bad):
    with pytest.raises(exmy.DtypeError):
        exmy.ChunkCodec.from_configuration(bad)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_of_a_wrong_length_are_refused(case):
    codec = exmy.ChunkCodec.from_configuration({"format": "e3m2", **case})
    data = codec.encode(values("float32")).tobytes()
    for bad, says in ((data[:-1], "truncated"), (b"", "truncated"), (data + b"\0", "too long")):
        with pytest.raises(exmy.SizeError, match=says):
            codec.decode(bad, SHAPE, "float32")


@pytest.mark.parametrize(
    ("configuration", "change"),
    [
        ({}, {2: 1}),
        ({}, {7: 255}),
        ({}, {0: 1, 1: 2}),  # 513
        ({}, {0: 255, 1: 253}),  # -513
        ({"scale": "none"}, {0: 2}),
        ({"scale": "float"}, {0: 2}),
        ({"scale": "float"}, {10: 0x80, 11: 0x7F}),  # infinity
        ({"scale": "float"}, {15: 1}),
        ({"axis": 1}, {0: 0, 1: 2, 8: 200}),  # 512 and more
        ({"axis": 1}, {13: 1}),  # behind the offsets of 3 rows
    ],
    ids=str,
)
def test_invalid_headers_are_refused(configuration, change):
    codec = exmy.ChunkCodec.from_configuration({"format": "e3m2", **configuration})
    data = codec.encode(np.ones((3, 5), np.float32))
    assert codec.decode(data, (3, 5), "float32").all()
    for at, byte in change.items():
        data[at] = byte
    with pytest.raises(exmy.FormatError):
        codec.decode(data, (3, 5), "float32")


def test_values_that_cannot_be_encoded_are_refused():
    codec = exmy.ChunkCodec.from_configuration({"format": "e3m2", "block": 32})
    with pytest.raises(exmy.DtypeError, match="int64"):
        codec.encode(np.arange(32))
    with pytest.raises(exmy.SizeError, match="blocks of 32"):
        codec.size((33,))
    for x in (codec.encode, exmy.ChunkCodec.from_configuration({"format": "e3m2"}).encode):
        with pytest.raises(exmy.NonFiniteError):
            x(np.array([1.0, np.nan] * 16, np.float32))
    with pytest.raises(exmy.SizeError, match="expected 40"):
        codec.encode(np.zeros(32, "f4"), out=np.empty(39, np.uint8))
    with pytest.raises(exmy.DtypeError):
        codec.encode(np.zeros(32, "f4"), out=np.empty(40, np.int8))


def test_an_unknown_dtype_is_refused_with_and_without_out():
    codec = exmy.ChunkCodec.from_configuration({"format": "e3m4", "scale": 0.5})
    data = codec.encode(np.ones(8, "f4"))
    for out in (None, np.empty(8, "f4")):
        with pytest.raises(exmy.DtypeError, match="'float99' is not a dtype"):
            codec.decode(data, (8,), "float99", out=out)


@given(st.data())
def test_chunks_of_any_layout_in_memory(data):
    x = values(data.draw(st.sampled_from(DTYPES)), (8, 4, 16))
    view = data.draw(st.sampled_from([x.T, x[::-1, ::2], x[:, 1], x.swapaxes(0, 1), np.asfortranarray(x)]))
    codec = exmy.ChunkCodec.from_configuration({"format": "e3m2", **data.draw(st.sampled_from([{}, {"axis": 0}]))})
    assert codec.encode(view).tobytes() == codec.encode(np.ascontiguousarray(view)).tobytes()
