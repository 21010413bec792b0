"""The bytes of chunks and the metadata of arrays, compared with zarr-python's."""

from __future__ import annotations

import asyncio
import json
import math
import time
import uuid
from typing import Any

import exmy
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import zarr.core.buffer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors import safe_open
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec
from zarr.core.metadata import ArrayV3Metadata
from zarr.storage import MemoryStore

import tstore
from tests.support.weights import real_weights
from tstore.core.format.arrays.array_metadata import ArrayMeta, dtype_named
from tstore.errors import Corrupt, InvalidArgument, NotFinite, UnsupportedFormat

NUMPY = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
NUMPY += ["float16", "float32", "float64", "complex64", "complex128"]
CUSTOM = ["bfloat16"] + [n for n in dir(ml_dtypes) if n.startswith("float8_")]
CUSTOM += ["float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn", "int4", "uint4", "int2", "uint2"]
ZARR_CODECS = {
    "plain": [BytesCodec()],
    "zstd": [BytesCodec(), ZstdCodec(level=3)],
    "gzip": [BytesCodec(), GzipCodec(level=5)],
    "gzip, not compressed": [BytesCodec(), GzipCodec(level=0)],
    "checked": [BytesCodec(), ZstdCodec(level=0, checksum=True)],
    "blosc": [BytesCodec(), BloscCodec(typesize=4, cname="lz4", clevel=5, shuffle="shuffle", blocksize=0)],
    "blosc bits": [BytesCodec(), BloscCodec(typesize=2, cname="zstd", clevel=3, shuffle="bitshuffle")],
}
EXMY = [
    {"format": "e4m3"},
    {"format": "e3m2", "scale": "max"},
    {"format": "e4m3b9", "scale": "none"},
    {"format": "e3m2", "block": 32},
    {"format": "e2m1", "axis": 0, "scale": "float"},
]


def sample(shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
    rng = np.random.default_rng(math.prod(shape))
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return rng.random(shape) < 0.5
    if kind.kind == "c":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(kind)
    return np.asarray(rng.normal(size=shape) * 50).astype(kind)


def zarr_chunks(values: npt.NDArray[Any], chunks: tuple[int, ...], codecs: list[Any]) -> dict[str, bytes]:
    """Return the objects that zarr-python writes."""
    store = MemoryStore()
    array = zarr.create_array(
        store,
        shape=values.shape,
        dtype=values.dtype,
        chunks=chunks or "auto",
        serializer=codecs[0],
        compressors=codecs[1:] or None,
        filters=None,
        fill_value=0,
        config={"write_empty_chunks": True},
    )
    array[...] = values

    async def read() -> dict[str, bytes]:
        prototype = zarr.core.buffer.default_buffer_prototype()
        objects = {}
        async for key in store.list():
            data = await store.get(key, prototype)
            assert data is not None
            objects[key] = data.to_bytes()
        return objects

    objects = asyncio.run(read())
    del objects["zarr.json"]
    return objects


async def our_chunks(values: npt.NDArray[Any], chunks: tuple[int, ...], codecs: list[Any]) -> dict[str, bytes]:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    documents = [c.to_dict() for c in codecs]
    async with store.transaction() as tx:
        array = await tx.create_array("a", values.shape, values.dtype, chunks, codecs=documents)
        await array.write(values)
    node = (await store.snapshot()).tree.nodes["a"]
    encoded = {}
    for row in node.chunks.rows:
        data = row.pack if isinstance(row.pack, bytes) else await store.log.storage.get(row.pack)
        at = np.unravel_index(row.number, node.meta.counts) if chunks else ()
        encoded["/".join(["c", *[str(i) for i in at]])] = data[row.offset : row.offset + row.length]
    return encoded


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("codecs", ZARR_CODECS)
def test_chunks_have_the_bytes_of_zarr(dtype: str, codecs: str) -> None:
    for shape, chunks in [((10, 7), (4, 3)), ((8,), (4,)), ((5,), (9,)), ((), ()), ((2, 3, 4), (1, 3, 2))]:
        values = sample(shape, dtype)
        expected = zarr_chunks(values, chunks, ZARR_CODECS[codecs])
        ours = asyncio.run(our_chunks(values, chunks, ZARR_CODECS[codecs]))
        if codecs.startswith("gzip"):  # zarr's header contains the time
            expected = {key: data[:4] + bytes(4) + data[8:] for key, data in expected.items()}
        assert ours == expected, (shape, chunks)


def test_equal_chunks_have_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an unchanged chunk would not be recognised later."""
    values = np.arange(100)
    for codecs in ZARR_CODECS.values():
        meta = ArrayMeta.new(values.shape, "int64", values.shape, [c.to_dict() for c in codecs])
        encodings = set()
        for now in (1e9, 1.5e9):
            monkeypatch.setattr(time, "time", lambda now=now: now)
            encodings.add(bytes(meta.chain.encode(values, np.empty(meta.encoded_size, np.uint8))))
        assert len(encodings) == 1


@pytest.mark.parametrize("dtype", NUMPY)
def test_zarr_understands_the_metadata(dtype: str) -> None:
    meta = ArrayMeta.new(
        (10, 7),
        dtype,
        (4, 3),
        [{"name": "bytes", "configuration": {"endian": "little"}}, ZstdCodec(level=3).to_dict()],
        fill_value=1,
        attributes={"unit": "m", "nested": {"a": [1, None]}},
        dimension_names=("x", None),
        sparse=True,
    )
    theirs = ArrayV3Metadata.from_dict(json.loads(meta.document))
    assert theirs.shape == (10, 7)
    assert theirs.chunk_grid.chunk_shape == (4, 3)  # type: ignore[attr-defined]
    assert theirs.data_type.to_native_dtype() == np.dtype(dtype)
    assert theirs.fill_value == np.array(1, dtype)
    assert theirs.dimension_names == ("x", None)
    assert theirs.attributes == {"unit": "m", "nested": {"a": [1, None]}}
    assert [c.to_dict() for c in theirs.codecs][1] == ZstdCodec(level=3).to_dict()


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, -0.0, 1.5])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
def test_zarr_understands_the_fill_value(fill: float, dtype: str) -> None:
    meta = ArrayMeta.new((1,), dtype, (1,), fill_value=fill)
    theirs = ArrayV3Metadata.from_dict(json.loads(meta.document)).fill_value
    expected = np.array(fill, dtype)
    assert np.asarray(theirs, dtype).tobytes() == expected.tobytes() or math.isnan(fill)
    assert meta.fill_value.tobytes() == expected.tobytes() or math.isnan(fill)
    assert bool(np.isnan(meta.fill_value)) == math.isnan(fill)


def bits(values: npt.NDArray[Any]) -> bytes:
    return np.ascontiguousarray(values).tobytes()


@given(
    st.sampled_from(NUMPY + CUSTOM).flatmap(
        lambda name: st.tuples(
            st.just(name), st.lists(st.integers(0, 5), max_size=3).map(tuple), st.binary(min_size=1, max_size=40)
        )
    )
)
def test_plain_chunks_keep_every_bit(case: tuple[str, tuple[int, ...], bytes]) -> None:
    name, shape, seed = case
    dtype = dtype_named(name)
    size = math.prod(shape) * dtype.itemsize
    raw = np.frombuffer((seed * (size // len(seed) + 1))[:size], np.uint8)
    values = (raw % 2 if dtype.kind == "b" else raw).view(dtype).reshape(shape)
    meta = ArrayMeta.new(shape, dtype, tuple(max(1, n) for n in shape))
    out = np.empty(meta.encoded_size, np.uint8)
    padded = np.zeros(meta.chunks, dtype)
    padded[tuple(slice(n) for n in shape)] = values
    encoded = meta.chain.encode(padded, out)
    decoded = np.empty(meta.chunks, dtype)
    meta.chain.decode(encoded, decoded)
    assert bits(decoded) == bits(padded)


@given(
    hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    st.sampled_from(["e4m3", "e3m2", "e2m1", "e5m2"]),
)
def test_exmy_chunks_hold_a_bias_and_packed_codes(values: npt.NDArray[Any], name: str) -> None:
    meta = ArrayMeta.new(values.shape, "float32", values.shape, name)
    encoded = meta.chain.encode(values, np.empty(meta.encoded_size, np.uint8))
    bias = int.from_bytes(encoded[:2], "little", signed=True)
    assert bytes(encoded[2:8]) == bytes(6)
    fitted = exmy.Format(name).with_bias(bias)
    assert bytes(encoded[8:]) == exmy.pack(exmy.encode(values, fitted), fitted.bits).tobytes()
    decoded = np.empty_like(values)
    meta.chain.decode(encoded, decoded)
    assert np.array_equal(decoded, exmy.quantize(values, name).dequantize())


def test_exmy_chunks_of_the_first_version_are_read() -> None:
    meta = ArrayMeta.new((3,), "float32", (3,), "e2m1")
    assert meta.codecs == [{"name": "exmy", "configuration": {"format": "e2m1"}}]
    decoded = np.empty(3, "f4")
    meta.chain.decode(memoryview(bytes.fromhex("0200000000000000040e0200")), decoded)
    assert decoded.tolist() == [1, -2, 0.5]


@pytest.mark.parametrize("configuration", EXMY, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_exmy_chunks_have_the_bytes_of_zarr(dtype: str, configuration: dict[str, Any]) -> None:
    values, chunks = sample((100, 70), dtype), (32, 64)
    codecs = [zarr.registry.get_codec_class("exmy")(**configuration)]
    assert asyncio.run(our_chunks(values, chunks, codecs)) == zarr_chunks(values, chunks, codecs)


@pytest.mark.parametrize("configuration", EXMY, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_arrays_take_a_configuration_of_exmy(dtype: str, configuration: dict[str, Any]) -> None:
    values, kind = sample((60, 64), dtype), dtype_named(dtype)
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        array = await tx.create_array("a", values.shape, dtype, (30, 64), codecs=configuration)
        await array.write(values)
    array = await (await store.snapshot()).array("a")
    assert array.codecs == [{"name": "exmy", "configuration": configuration}]
    arguments = {"f" if k == "format" else k: v for k, v in configuration.items()}
    wanted = [exmy.quantize(part, **arguments).dequantize(kind) for part in (values[:30], values[30:])]
    assert bits(await array.read()) == bits(np.concatenate(wanted))
    assert bits(await array[7:41:2, 5].read()) == bits(np.concatenate(wanted)[7:41:2, 5])


@pytest.mark.parametrize(
    ("codecs", "says"),
    [
        ({"format": "e3m2", "block": 32}, "does not fit chunks of shape .5, 33.*pad"),
        ({"format": "e3m2", "axis": 2}, "axis 2"),
        ({"format": "e3m2", "scale": "best"}, "'best'"),
        ({"format": "e3m2", "level": 1}, "expected format, scale, axis, block"),
        ({"axis": 1}, "has no format"),
        ("zstd", "'lossless'"),
        ([{"name": "exmy", "configuration": {"format": "e3m2", "block": 32}}], "does not fit chunks"),
        ([{"name": "exmy", "configuration": {"format": "e4m3", "more": 1}}], "'more'"),
        ([{"name": "exmy", "configuration": {"format": "e4m3", "scale": "new"}}], "'new'"),
        ([{"name": "exmy", "configuration": {}}], "has no format"),
    ],
    ids=str,
)
def test_exmy_configurations_that_do_not_fit_are_refused(codecs: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        ArrayMeta.new((10, 66), "float32", (5, 33), codecs)


def test_exmy_bytes_that_no_encoder_writes_are_corrupt() -> None:
    meta = ArrayMeta.new((4,), "float32", (4,), "e4m3")
    encoded = bytearray(meta.chain.encode(np.ones(4, "f4"), np.empty(meta.encoded_size, np.uint8)))
    encoded[5] = 1
    with pytest.raises(Corrupt, match="exmy"):
        meta.chain.decode(memoryview(encoded), np.empty(4, "f4"))


# ---- lossless


@pytest.mark.parametrize("dtype", NUMPY + CUSTOM)
async def test_lossless_keeps_every_bit(dtype: str) -> None:
    kind = dtype_named(dtype)
    raw = np.random.default_rng(3).integers(0, 256, 90 * kind.itemsize, np.uint8)
    values = (raw % 2 if dtype == "bool" else raw).view(kind).reshape(9, 10)
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        array = await tx.create_array("a", values.shape, dtype, (4, 10), codecs="lossless")
        await array.write(values)
    array = await (await store.snapshot()).array("a")
    assert bits(await array.read()) == bits(values)
    assert bits(await array[3:5, ::3].read()) == bits(values[3:5, ::3])


@pytest.mark.parametrize("dtype", NUMPY)
def test_zarr_reads_lossless_chunks(dtype: str) -> None:
    values = sample((10, 300), dtype)
    meta = ArrayMeta.new(values.shape, dtype, (4, 300), "lossless")
    codecs = [zarr.registry.get_codec_class(c["name"]).from_dict(c) for c in meta.codecs]
    ours, theirs = asyncio.run(our_chunks(values, (4, 300), codecs)), zarr_chunks(values, (4, 300), codecs)
    assert ours == theirs
    store = MemoryStore()

    async def put() -> None:
        for key, data in {**ours, "zarr.json": meta.document}.items():
            await store.set(key, zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(data))

    asyncio.run(put())
    assert bits(np.asarray(zarr.open_array(store, mode="r")[...])) == bits(values)


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.85), ("bfloat16", 0.71)])
def test_lossless_shrinks_real_weights(dtype: str, most: float) -> None:
    kind = dtype_named(dtype)
    with safe_open(real_weights(), "numpy") as file:
        values = file.get_tensor("embeddings.word_embeddings.weight")[:8192].astype(kind)
    meta = ArrayMeta.new(values.shape, kind, values.shape, "lossless")
    encoded = meta.chain.encode(values, np.empty(meta.encoded_size, np.uint8))
    assert len(encoded) < most * values.nbytes
    decoded = np.empty_like(values)
    meta.chain.decode(encoded, decoded)
    assert bits(decoded) == bits(values)


async def test_rules_take_configurations_and_lossless() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    x, ids = sample((8, 32), "float32"), np.arange(64)
    tree = {"head": x, "body": x + 1, "ids": ids, "norm": x[0]}
    block = {"format": "e3m2", "block": 32}
    await tstore.save(store, tree, 0, codecs=block)
    await tstore.save(store, tree, 1, codecs={"norm": "lossless", "head": block, "ids": "lossless", "**": "e4m3"})
    for step, names in ((0, {"head": block, "body": block}), (1, {"head": block, "body": {"format": "e4m3"}})):
        snapshot = await store.snapshot(f"step/{step}")
        for path, configuration in names.items():
            assert (await snapshot.array(path)).codecs == [{"name": "exmy", "configuration": configuration}]
        restored = await tstore.restore(store, step)
        assert np.array_equal(restored["head"], exmy.quantize(x, "e3m2", block=32).dequantize())
        assert np.array_equal(restored["ids"], ids)
    assert bits(restored["norm"]) == bits(x[0])
    assert [c["name"] for c in (await snapshot.array("ids")).codecs] == ["bytes", "blosc"]


def test_a_chunk_beyond_bloscs_limit_is_refused() -> None:
    ArrayMeta.new((1 << 31,), "uint8", (1 << 30,), "lossless")
    with pytest.raises(InvalidArgument, match="smaller chunks"):
        ArrayMeta.new((1 << 31,), "uint8", (1 << 31,), "lossless")


def test_exmy_takes_no_nan_and_no_integers() -> None:
    meta = ArrayMeta.new((4,), "float32", (4,), "e4m3")
    with pytest.raises(NotFinite):
        meta.chain.encode(np.array([1, 2, math.nan, 3], "f4"), np.empty(meta.encoded_size, np.uint8))
    with pytest.raises(InvalidArgument, match="float32"):
        ArrayMeta.new((4,), "int32", (4,), "e4m3")


@pytest.mark.parametrize(
    ("codec", "change"),
    [(c, n) for c in ("plain", "zstd", "gzip", "blosc") for n in (-1, -5, -30)]
    + [("plain", 1), ("zstd", 1), ("blosc", 1)],
)
def test_chunks_of_a_wrong_length_are_corrupt(codec: str, change: int) -> None:
    meta = ArrayMeta.new((9,), "int16", (9,), [c.to_dict() for c in ZARR_CODECS[codec]])
    encoded = bytes(meta.chain.encode(np.arange(9, dtype="i2"), np.empty(meta.encoded_size, np.uint8)))
    bad = encoded[:change] if change < 0 else encoded + b"\0"
    with pytest.raises(Corrupt):
        meta.chain.decode(memoryview(bad), np.empty(9, "i2"))


@pytest.mark.parametrize(
    "name",
    ["object", "U", "S", "T", "V", "int1", "uint1", "nonsense", [("a", "i4", (2,))], [("a", "O")], []],
    ids=str,
)
def test_other_dtypes_are_refused(name: Any) -> None:
    with pytest.raises(InvalidArgument):
        dtype_named(name)


@pytest.mark.skipif(np.dtype("longdouble").itemsize == 8, reason="no longer doubles here")
@pytest.mark.parametrize(("name", "other"), [("longdouble", "float64"), ("clongdouble", "complex128")])
def test_floats_of_one_platform_are_refused(name: str, other: str) -> None:
    with pytest.raises(InvalidArgument, match=f"use {other}"):
        dtype_named(name)
    with pytest.raises(InvalidArgument, match=f"use {other}"):
        ArrayMeta.new((2,), np.zeros(2, name).dtype, (2,))


def test_names_and_byte_orders_of_dtypes() -> None:
    assert dtype_named(">f4") == np.dtype("<f4")
    assert dtype_named(float) == np.dtype("float64")
    assert dtype_named(ml_dtypes.bfloat16) == dtype_named("bfloat16")
    assert {dtype_named(n).itemsize for n in CUSTOM if n != "bfloat16"} == {1}


GOOD: dict[str, Any] = {"shape": (4, 4), "dtype": "uint8", "chunks": (2, 2)}


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": (2,)},
        {"chunks": (0, 2)},
        {"chunks": "ab"},
        {"shape": (-1, 4)},
        {"shape": 4},
        {"shape": (1 << 40, 1 << 40)},
        {"shape": (1.5, 2)},
        {"dimension_names": ("x",)},
        {"fill_value": 256},
        {"fill_value": -1},
        {"fill_value": 1.5},
        {"fill_value": math.nan},
        {"fill_value": "x"},
        {"fill_value": [1, 2]},
        {"fill_value": 1j},
        {"dtype": "float32", "fill_value": 1j},
        {"attributes": {"a": object}},
        {"codecs": "e99m99"},
        {"codecs": "zstd"},
        {"codecs": []},
        {"codecs": ["zstd", "bytes"]},
    ],
    ids=str,
)
def test_metadata_that_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        ArrayMeta.new(**{**GOOD, **change})


@pytest.mark.parametrize(
    "codecs",
    [
        [{"name": "bytes", "configuration": {"endian": "middle"}}],
        [{"name": "bytes", "configuration": {"endian": "little", "new": 1}}],
        [
            {"name": "bytes"},
            {
                "name": "blosc",
                "configuration": {
                    "typesize": 4,
                    "cname": "new",
                    "clevel": 1,
                    "shuffle": "shuffle",
                    "blocksize": 0,
                },
            },
        ],
        [{"name": "transpose"}, {"name": "bytes"}],
    ],
    ids=str,
)
def test_unknown_codecs_are_named(codecs: list[dict[str, Any]]) -> None:
    with pytest.raises(UnsupportedFormat, match="codec"):
        ArrayMeta.new((4,), "float32", (2,), codecs)


@pytest.mark.parametrize(
    "document",
    [b"", b"{}", b"[]", b"\xff", b'{"zarr_format": 3}', b'{"zarr_format":3,"node_type":"array","shape":[1]}'],
)
def test_a_document_that_does_not_parse_is_corrupt(document: bytes) -> None:
    with pytest.raises(Corrupt):
        ArrayMeta.parse(document)


def test_a_document_of_another_zarr_is_unsupported() -> None:
    fields = json.loads(ArrayMeta.new(**GOOD).document)
    newer_exmy = {"name": "exmy", "configuration": {"format": "e4m3", "more": 1}}
    floats = {"data_type": "float32", "fill_value": 0.0, "codecs": [newer_exmy]}
    for change in (
        {"zarr_format": 4},
        {"chunk_grid": {"name": "rectilinear"}},
        {"codecs": [{"name": "new"}]},
        floats,
    ):
        with pytest.raises(UnsupportedFormat):
            ArrayMeta.parse(json.dumps({**fields, **change}).encode())
