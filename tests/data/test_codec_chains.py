"""Codec chains of Zarr v3 beyond the usual ones, compared with zarr-python's pipeline, and with hostile bytes."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import json
import tracemalloc
import uuid
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zarr.codecs.numcodecs
from hypothesis import given
from hypothesis import strategies as st
from zarr.core.array import create_codec_pipeline
from zarr.core.array_spec import ArrayConfig
from zarr.core.buffer import default_buffer_prototype
from zarr.core.metadata import ArrayV3Metadata

import tstore
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.codecs import Chain
from tstore.core.maintenance.contents import array_info
from tstore.errors import Corrupt, InvalidArgument, NotFinite, UnsupportedFormat

Values = npt.NDArray[Any]
Document = dict[str, Any]
PROTOTYPE = default_buffer_prototype()


def codec(name: str, **configuration: Any) -> Document:
    return {"name": name, "configuration": configuration} if configuration else {"name": name}


def numcodec(name: str, **configuration: Any) -> Document:
    return {"name": f"numcodecs.{name}", "configuration": configuration}


LITTLE, BIG = codec("bytes", endian="little"), codec("bytes", endian="big")
ZSTD = codec("zstd", level=1, checksum=False)
INDEX = [LITTLE, codec("crc32c")]
BLOSC = codec("blosc", typesize=4, cname="lz4", clevel=5, shuffle="shuffle", blocksize=0)
XZ_FILTERS = [{"id": 3, "dist": 4}, {"id": 0x21, "preset": 1}]
BYTES_CODECS = [
    ZSTD,
    codec("gzip", level=1),
    BLOSC,
    codec("crc32c"),
    numcodec("adler32"),
    numcodec("adler32", location="end"),
    numcodec("blosc"),
    numcodec("blosc", shuffle=-1, cname="zstd", clevel=3),
    numcodec("blosc", shuffle=0, cname="zlib", clevel=1, blocksize=0),
    numcodec("bz2"),
    numcodec("bz2", level=9),
    numcodec("crc32"),
    numcodec("crc32", location="end"),
    numcodec("crc32c"),
    numcodec("crc32c", location="start"),
    numcodec("fletcher32"),
    numcodec("gzip", level=3),
    numcodec("jenkins_lookup3"),
    numcodec("jenkins_lookup3", initval=5),
    numcodec("lz4"),
    numcodec("lz4", acceleration=5),
    numcodec("lzma"),
    numcodec("lzma", format=2),
    numcodec("lzma", format=3, filters=XZ_FILTERS),
    numcodec("lzma", preset=3, check=0),
    numcodec("shuffle"),
    numcodec("shuffle", elementsize=2),
    numcodec("zlib"),
    numcodec("zlib", level=9),
    numcodec("zstd"),
    numcodec("zstd", level=5, checksum=True),
]


def shards(inner: tuple[int, ...], *codecs: Document, **more: Any) -> Document:
    return codec(
        "sharding_indexed", **{"chunk_shape": list(inner), "codecs": codecs, "index_codecs": INDEX} | more
    )


def filters(dtype: str) -> list[Document]:
    """Return filters that zarr-python runs on this dtype."""
    name = np.dtype(dtype).str
    some = [
        numcodec("delta", dtype=name),
        numcodec("delta", dtype=name, astype="<i8"),
        numcodec("fixedscaleoffset", offset=1, scale=10, dtype=name, astype="<i4"),
        numcodec("fixedscaleoffset", offset=0, scale=2),
        numcodec("astype", encode_dtype="<f8", decode_dtype=name),
        numcodec("astype", encode_dtype="<i8"),
    ]
    if np.dtype(dtype).kind == "f":
        some += [numcodec("bitround", keepbits=4), numcodec("quantize", digits=1, dtype=name)]
    return some


def needs(package: str) -> Any:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")


# ---- zarr-python's pipeline


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore that zarr-python warns of names that have no specification yet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def zarr_pipeline(meta: ArrayMeta) -> tuple[Any, Any]:
    with quiet():
        metadata = ArrayV3Metadata.from_dict(json.loads(meta.document))
        spec = metadata.get_chunk_spec(
            (0,) * len(meta.shape), ArrayConfig(order="C", write_empty_chunks=False), PROTOTYPE
        )
        return create_codec_pipeline(metadata), spec


def zarr_encoded(meta: ArrayMeta, values: Values) -> bytes:
    pipeline, spec = zarr_pipeline(meta)
    with quiet():
        [data] = asyncio.run(pipeline.encode([(PROTOTYPE.nd_buffer.from_numpy_array(values), spec)]))
    encoded: bytes = b"" if data is None else data.to_bytes()
    return encoded


def zarr_decoded(meta: ArrayMeta, data: bytes) -> Values:
    pipeline, spec = zarr_pipeline(meta)
    with quiet():
        [values] = asyncio.run(pipeline.decode([(PROTOTYPE.buffer.from_bytes(data), spec)]))
    decoded: Values = values.as_numpy_array().astype(meta.dtype)
    return decoded


def encoded(meta: ArrayMeta, values: Values) -> bytes:
    return bytes(meta.chain.encode(values, np.empty(meta.chain.out_size, np.uint8)))


def decoded(meta: ArrayMeta, data: bytes) -> Values:
    out = np.empty(meta.chunks, meta.dtype)
    meta.chain.decode(memoryview(data), out)
    return out


def sample(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Values:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    with np.errstate(all="ignore"):
        values = np.asarray(rng.normal(size=shape) * 40).astype(dtype)
    if shape:
        values[: shape[0] // 2] = 0  # some inner chunks are all fill values
    return values


def compare(values: Values, chain: list[Document]) -> None:
    """Check that tstore and zarr-python encode to the same bytes and decode each other's."""
    meta = ArrayMeta.new(values.shape, values.dtype, values.shape, chain)
    ours, theirs = encoded(meta, values), zarr_encoded(meta, values)
    back = decoded(meta, ours)
    if meta.chain.lossless:
        assert back.tobytes() == values.tobytes()
    assert zarr_decoded(meta, ours).tobytes() == back.tobytes()
    if not theirs:
        return  # zarr-python stores no shard without inner chunks
    assert decoded(meta, theirs).tobytes() == back.tobytes()
    if "gzip" not in str(chain):  # its header has the time
        assert ours == theirs


@pytest.mark.parametrize("last", BYTES_CODECS, ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "int32", "float64"])
def test_bytes_codecs_are_those_of_zarr(dtype: str, last: Document) -> None:
    compare(sample((6, 8), dtype), [LITTLE, last])


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64", "float32", "float64"])
def test_filters_are_those_of_zarr(dtype: str) -> None:
    for first in filters(dtype):
        compare(sample((5, 6), dtype), [first, LITTLE, numcodec("zlib", level=1)])
    compare(sample((5, 3), "bool"), [numcodec("packbits"), codec("bytes"), ZSTD])
    compare(sample((4, 4), "bool"), [numcodec("packbits"), codec("bytes")])


@needs("pcodec")
@pytest.mark.parametrize("dtype", ["int16", "uint32", "int64", "float16", "float32", "float64"])
def test_pcodec_is_that_of_zarr(dtype: str) -> None:
    compare(sample((50, 6), dtype), [numcodec("pcodec", level=8)])
    paged = numcodec("pcodec", delta_spec="try_consecutive", delta_encoding_order=2, equal_pages_up_to=100)
    compare(sample((50, 6), dtype), [paged, codec("crc32c")])
    meta = ArrayMeta.new((50,), dtype, (50,), [numcodec("pcodec")])
    for count in (49, 51):
        other = ArrayMeta.new((count,), dtype, (count,), [numcodec("pcodec")])
        with pytest.raises(Corrupt, match="expected 50 values"):
            decoded(meta, encoded(other, sample((count,), dtype)))
    with pytest.raises(Corrupt):
        decoded(meta, b"pco!")


@needs("zfpy")
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
def test_zfpy_is_that_of_zarr(dtype: str) -> None:
    for shape in ((7,), (5, 6), (3, 4, 5), (2, 3, 4, 5)):
        for settings_ in ({"tolerance": 0.01}, {"mode": 2, "rate": 16}, {"mode": 3, "precision": 16}):
            compare(sample(shape, dtype), [numcodec("zfpy", **settings_), ZSTD])
    meta = ArrayMeta.new((5, 6), dtype, (5, 6), [numcodec("zfpy", tolerance=0.01)])
    data = encoded(meta, sample((5, 6), dtype))
    for cut in range(len(data)):
        with suppress(Corrupt):
            decoded(meta, data[:cut])
    other = ArrayMeta.new((6, 5), dtype, (6, 5), [numcodec("zfpy", tolerance=0.01)])
    with pytest.raises(Corrupt, match="expected values of"):
        decoded(meta, encoded(other, sample((6, 5), dtype)))
    if dtype.startswith("float"):
        with pytest.raises(NotFinite):
            encoded(meta, np.full((5, 6), np.nan, dtype))


@st.composite
def chains(draw: st.DrawFn, dtype: str, shape: tuple[int, ...], depth: int = 2) -> list[Document]:
    chain: list[Document] = []
    order = draw(st.permutations(range(len(shape))))
    some = filters(dtype) if depth == 2 and dtype != "uint8" else []  # zarr-python drops the byte order of uint8
    filter_ = draw(st.sampled_from([None, *some]))
    if filter_ is not None:  # zarr-python reverses neither a transposition before nor big-endian bytes after it
        chain.append(filter_)
    in_shards = depth > 0 and filter_ is None and draw(st.booleans())
    if filter_ is None and (not in_shards or len(set(shape)) == 1) and draw(st.booleans()):
        chain.append(codec("transpose", order=order))  # zarr-python checks shards against the shape before it
        shape = tuple(shape[axis] for axis in order)
    if in_shards:
        inner = tuple(draw(st.sampled_from([i for i in range(1, n + 1) if n % i == 0])) for n in shape)
        location = draw(st.sampled_from(["start", "end"]))
        index = [draw(st.sampled_from([LITTLE, BIG])), *draw(st.sampled_from([[], [codec("crc32c")]]))]
        codecs = draw(chains(dtype, inner, depth - 1))
        chain.append(shards(inner, *codecs, index_location=location, index_codecs=index))
    elif filter_ is None and dtype.startswith("float") and draw(st.booleans()):
        chain.append(codec("exmy", format=draw(st.sampled_from(["e4m3", "e3m2"])), scale="max"))
    else:
        chain.append(LITTLE if filter_ is not None else draw(st.sampled_from([LITTLE, BIG])))
    usual = [c for c in BYTES_CODECS if "shuffle" not in c["name"] and "gzip" not in c["name"]]
    return chain + draw(st.lists(st.sampled_from(usual), max_size=2))


@given(st.data())
def test_generated_chains_are_those_of_zarr(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["int16", "int32", "uint8", "int64", "float32", "float64"]))
    shape = tuple(data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=3)))
    compare(sample(shape, dtype, data.draw(st.integers(0, 99))), data.draw(chains(dtype, shape)))


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float32", "complex128"])
def test_the_usual_chains_are_those_of_zarr(dtype: str) -> None:
    for shape in ((), (1,), (700,), (20, 31)):
        values = sample(shape, dtype)
        for chain in ([LITTLE], [LITTLE, ZSTD], [LITTLE, BLOSC], [LITTLE, codec("crc32c")], [BIG]):
            compare(values, chain)
        if dtype == "float32" and shape:
            compare(values, [codec("exmy", format="e4m3")])
            compare(values, [codec("exmy", format="e4m3"), ZSTD])


def test_every_numcodec_of_zarr_has_a_place() -> None:
    """Otherwise a release of zarr-python has new ones."""
    ours = {str(c["name"]) for c in [*BYTES_CODECS, *filters("float32"), numcodec("pcodec"), numcodec("zfpy")]}
    ours.add("numcodecs.packbits")
    classes = [getattr(zarr.codecs.numcodecs, name) for name in zarr.codecs.numcodecs.__all__]
    theirs = {each.codec_name for each in classes if not each.__name__.startswith("_")}
    assert len(theirs) > 20
    assert theirs <= ours


def test_transposed_chunks_are_not_mixed_up_by_filters() -> None:
    """numcodecs flattens Fortran-contiguous chunks in the order of their memory."""
    values = np.arange(30, dtype="i4").reshape(5, 6) ** 2
    for last in (LITTLE, BIG):
        chain = [codec("transpose", order=[1, 0]), numcodec("delta", dtype="<i4"), last]
        meta = ArrayMeta.new((5, 6), "i4", (5, 6), chain)
        assert np.array_equal(decoded(meta, encoded(meta, values)), values)


def test_negative_zeros_are_no_fill_values() -> None:
    for dtype, value in (("float32", -0.0), ("complex64", complex(-0.0, 0.0))):
        meta = ArrayMeta.new((8,), dtype, (8,), [shards((4,), LITTLE)])
        values = np.full(8, value, dtype)
        assert decoded(meta, encoded(meta, values)).tobytes() == values.tobytes()


def test_settings_that_depend_on_the_array_are_stored() -> None:
    meta = ArrayMeta.new((4, 6), "float64", (4, 6), [shards((2, 3), codec("bytes"), numcodec("shuffle"))])
    expected = shards((2, 3), LITTLE, numcodec("shuffle", elementsize=8), index_location="end")
    assert meta.codecs == json.loads(json.dumps([expected]))
    meta = ArrayMeta.new((4,), "float64", (4,), [numcodec("quantize", digits=2), codec("bytes")])
    assert meta.codecs[0]["configuration"] == {"digits": 2, "dtype": "<f8", "astype": "<f8"}


# ---- arrays


CHAINS: dict[str, list[Document]] = {
    "transposed": [codec("transpose", order=[1, 0]), BIG, ZSTD],
    "sharded": [shards((4, 5), LITTLE, ZSTD, codec("crc32c"))],
    "sharded exmy": [shards((4, 5), codec("exmy", format="e4m3"))],
    "shards in shards": [shards((8, 5), shards((4, 5), BIG), index_location="start"), numcodec("lz4")],
    "transposed shards": [codec("transpose", order=[1, 0]), shards((5, 4), LITTLE)],
    "filtered": [numcodec("delta", dtype="<f4"), LITTLE, numcodec("shuffle"), numcodec("bz2")],
    "checked": [LITTLE, codec("crc32c")],
    "packed": [numcodec("fixedscaleoffset", offset=0, scale=4, astype="<i2"), BIG, numcodec("lzma", preset=1)],
}


@pytest.mark.parametrize("name", CHAINS)
async def test_arrays_with_any_chain(name: str, tmp_path: Any) -> None:
    url = str(tmp_path / "store")
    store = await tstore.open(url)
    rng = np.random.default_rng(3)
    values = rng.integers(-8, 8, (30, 23)).astype("f4")  # exact in every one of these chains
    async with store.transaction() as tx:
        for path, sparse in (("a", False), ("b", True)):
            array = await tx.create_array(path, values.shape, "f4", (16, 10), CHAINS[name], 2, sparse=sparse)
            await (array if path == "a" else array[3:9, 4:13]).write(values if path == "a" else values[3:9, 4:13])
    expected = np.full_like(values, 2)
    expected[3:9, 4:13] = values[3:9, 4:13]
    snapshot = await store.snapshot()
    assert np.array_equal(await (await snapshot.array("b")).read(), expected)
    array = await snapshot.array("a")
    assert np.array_equal(await array.read(), values)
    for index in (np.s_[3:20:4, 7], np.s_[29, :], np.s_[::-3, 22:2:-5], np.s_[16:30, 10:20], np.s_[5, 6]):
        assert np.array_equal(await array[index].read(), values[index])
        out = np.zeros(np.shape(values[index]), "f4")
        await array[index].read(out=out)
        assert np.array_equal(out, values[index])

    async with store.transaction() as tx:  # a part of some chunks
        await (await tx.array("a"))[2:18, 3].write(1)
    values[2:18, 3] = 1
    assert np.array_equal(await (await (await store.snapshot()).array("a")).read(), values)
    assert (await store.verify()).ok
    copied = str(tmp_path / "copy")
    await tstore.copy(url, copied)
    assert np.array_equal(await (await (await (await tstore.open(copied)).snapshot()).array("a")).read(), values)


@pytest.mark.parametrize("name", CHAINS)
async def test_unchanged_chunks_are_not_written_again(name: str) -> None:
    url = f"memory://{uuid.uuid4()}"
    values = np.random.default_rng(3).integers(-8, 8, (512, 400)).astype("f4")
    tree = {"w": values}
    await tstore.save(url, tree, 0, codecs={"**": _unshaped(CHAINS[name])})
    store = await tstore.open(url)
    await tstore.save(url, tree, 1, codecs={"**": _unshaped(CHAINS[name])})
    history = [commit async for commit in store.history()]
    assert min(commit.bytes_added for commit in history) == 0
    restored = await tstore.restore(url)
    assert np.array_equal(restored["w"], values)


def _unshaped(chain: list[Document]) -> list[Document]:
    """Return the chain with inner chunks that divide those of a checkpoint."""
    text = json.dumps(chain).replace("[4, 5]", "[64, 50]").replace("[5, 4]", "[50, 64]")
    documents: list[Document] = json.loads(text.replace("[8, 5]", "[128, 100]"))
    return documents


async def test_listings_show_the_codecs_of_shards() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    chain = [shards((2,), codec("exmy", format="e4m3"), "crc32c"), numcodec("lzma", format=1)]  # type: ignore[arg-type]
    async with store.transaction() as tx:
        await (await tx.create_array("a", (4,), "f4", (4,), chain)).write(1)
    info = array_info("a", (await store.snapshot()).tree.nodes["a"])
    assert info.codec == "shards(e4m3+crc32c)+numcodecs.lzma"


# ---- hostile bytes


@contextmanager
def memory(limit: int) -> Iterator[None]:
    """Fail if more than `limit` bytes are allocated at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


_LITTLE_MEMORY = 12 << 20  # of which the dictionary of lzma is 8 MiB


@pytest.mark.parametrize("last", [c for c in BYTES_CODECS if "32" not in c["name"]], ids=str)
def test_bombs_and_wrong_sizes_are_refused_in_little_memory(last: Document) -> None:
    small = ArrayMeta.new((1024,), "u1", (1024,), [LITTLE, last])
    for size in (1 << 24, 1028, 1020):
        other = ArrayMeta.new((size,), "u1", (size,), [LITTLE, last])
        bomb = encoded(other, np.zeros(size, "u1"))
        with memory(_LITTLE_MEMORY), pytest.raises(Corrupt):
            decoded(small, bomb)
        last_but_one = ArrayMeta.new((1024,), "u1", (1024,), [LITTLE, last, codec("crc32c")])
        crc = ArrayMeta.new((len(bomb),), "u1", (len(bomb),), [LITTLE, codec("crc32c")])
        bomb = encoded(crc, np.frombuffer(bomb, "u1"))
        with memory(_LITTLE_MEMORY), pytest.raises(Corrupt):
            decoded(last_but_one, bomb)
        later = [LITTLE, codec("crc32c"), last]  # whose input has the checksum too
        bomb = encoded(ArrayMeta.new((size,), "u1", (size,), later), np.zeros(size, "u1"))
        with memory(_LITTLE_MEMORY), pytest.raises(Corrupt):
            decoded(ArrayMeta.new((1024,), "u1", (1024,), later), bomb)


@pytest.mark.parametrize("declared", [1029, 1 << 25, (1 << 32) - 1])
def test_an_lz4_block_that_declares_too_much_is_refused_in_little_memory(declared: int) -> None:
    meta = ArrayMeta.new((1024,), "u1", (1024,), [LITTLE, codec("crc32c"), numcodec("lz4")])
    data = encoded(meta, np.arange(1024, dtype="u4").astype("u1"))
    with memory(1 << 20), pytest.raises(Corrupt, match=f"the frame declares {declared}"):
        decoded(meta, declared.to_bytes(4, "little") + data[4:])


@pytest.mark.parametrize("last", BYTES_CODECS, ids=str)
def test_bytes_of_a_compressor_that_are_cut_short_are_corrupt(last: Document) -> None:
    if "shuffle" in last["name"]:
        return  # which takes only bytes of a fixed length
    meta = ArrayMeta.new((256,), "u1", (256,), [LITTLE, ZSTD, last])
    data = encoded(meta, np.arange(256, dtype="u1"))
    for cut in {0, 1, 3, 4, 7, len(data) // 2, len(data) - 1}:
        with pytest.raises((Corrupt, UnsupportedFormat)):
            decoded(meta, data[:cut])


@pytest.mark.parametrize("last", BYTES_CODECS, ids=str)
def test_damaged_bytes_are_corrupt_or_decode_to_a_chunk(last: Document) -> None:
    meta = ArrayMeta.new((256,), "u4", (256,), [LITTLE, last])
    data = encoded(meta, np.arange(256, dtype="u4"))
    rng = np.random.default_rng(0)
    for cut in {0, 1, 3, 4, 5, 16, len(data) // 2, len(data) - 1}:
        with pytest.raises((Corrupt, UnsupportedFormat)):
            decoded(meta, data[:cut])
    with pytest.raises((Corrupt, UnsupportedFormat)):
        decoded(meta, data + b"\1\2\3\4")
    for _ in range(50):
        bad = bytearray(data)
        bad[rng.integers(len(bad))] ^= 1 << int(rng.integers(8))
        with suppress(Corrupt, UnsupportedFormat):
            decoded(meta, bytes(bad))


def test_an_lzma_dictionary_beyond_the_limit_is_refused() -> None:
    import lzma

    meta = ArrayMeta.new((64,), "u1", (64,), [LITTLE, numcodec("lzma", format=2)])
    alone = lzma.compress(bytes(64), lzma.FORMAT_ALONE)
    huge = alone[:1] + (0xF0000000).to_bytes(4, "little") + alone[5:]
    with memory(1 << 20), pytest.raises(UnsupportedFormat, match="bytes of memory"):
        decoded(meta, huge)
    with pytest.raises(UnsupportedFormat, match="dict_size"):
        ArrayMeta.new(
            (64,), "u1", (64,), [LITTLE, numcodec("lzma", format=3, filters=[{"id": 0x21, "dict_size": 1 << 31}])]
        )


ABSENT = (1 << 64) - 1


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize(
    "entry",
    [
        (0, ABSENT),
        (ABSENT, 0),
        (ABSENT - 1, 2),
        (ABSENT, 1),
        (1 << 60, 16),
        (0, 1 << 60),
        (10**4, 16),
        (0, 15),
        (0, 17),
    ],
    ids=str,
)
def test_a_shard_with_a_wrong_index_is_corrupt(entry: tuple[int, int], location: str) -> None:
    meta = ArrayMeta.new((8,), "u4", (8,), [shards((4,), LITTLE, index_codecs=[LITTLE], index_location=location)])
    data = bytearray(encoded(meta, np.arange(1, 9, dtype="u4")))
    index = np.frombuffer(data, "<u8", 4, 0 if location == "start" else len(data) - 32).copy()
    index[2:] = entry
    start = 0 if location == "start" else len(data) - 32
    data[start : start + 32] = index.tobytes()
    with memory(1 << 20), pytest.raises(Corrupt, match="inner chunk"):
        decoded(meta, bytes(data))
    out = np.zeros(3, "u4")
    meta.chain.decode_part(memoryview(bytes(data)), (slice(0, 3, 1),), out)  # needs the other inner chunk alone
    assert out.tolist() == [1, 2, 3]


def test_bombs_in_shards_are_refused_in_little_memory() -> None:
    inner = ArrayMeta.new((1 << 25,), "u1", (1 << 25,), [LITTLE, ZSTD])
    bomb = encoded(inner, np.zeros(1 << 25, "u1"))
    meta = ArrayMeta.new((1024,), "u1", (1024,), [shards((256,), LITTLE, ZSTD, index_codecs=[LITTLE])])
    index = np.array([[0, len(bomb)]] * 4, "<u8")
    with memory(1 << 20), pytest.raises(Corrupt, match="inner chunk"):
        decoded(meta, bomb + index.tobytes())


def test_inner_chunks_that_overlap_cost_no_more_than_the_chunk() -> None:
    meta = ArrayMeta.new((1024,), "u1", (1024,), [shards((1,), LITTLE, index_codecs=[LITTLE])])
    index = np.array([[0, 1]] * 1024, "<u8")
    with memory(1 << 20):
        assert decoded(meta, b"\5" + index.tobytes()).tolist() == [5] * 1024
    with pytest.raises(Corrupt):
        decoded(meta, index.tobytes()[:-1])


def test_only_the_selected_inner_chunks_are_decoded() -> None:
    meta = ArrayMeta.new((8, 8), "u4", (8, 8), [shards((2, 8), LITTLE, codec("crc32c"))])
    values = np.arange(1, 65, dtype="u4").reshape(8, 8)
    data = bytearray(encoded(meta, values))
    data[0] ^= 1  # of the first inner chunk
    out = np.zeros((2, 3), "f8")
    meta.chain.decode_part(memoryview(bytes(data)), (slice(3, 6, 2), slice(1, 6, 2)), out)
    assert np.array_equal(out, values[3:6:2, 1:6:2])
    with pytest.raises(Corrupt, match=r"inner chunk \(0, 0\)"):
        decoded(meta, bytes(data))


async def test_a_read_of_a_part_of_a_shard_decodes_only_the_inner_chunks_that_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, values = await tstore.open(f"memory://{uuid.uuid4()}"), np.arange(4096, dtype="u4").reshape(64, 64)
    async with store.transaction() as tx:
        await (await tx.create_array("a", (64, 64), "u4", (64, 64), [shards((8, 8), LITTLE, ZSTD)])).write(values)
    array = await (await store.snapshot()).array("a")
    sizes, decode = list[int](), Chain.decode

    def counted(self: Chain, data: memoryview, out: Values) -> None:
        sizes.append(out.size)
        decode(self, data, out)

    monkeypatch.setattr(Chain, "decode", counted)
    assert np.array_equal(await array[3:5, 12:4:-2].read(), values[3:5, 12:4:-2])
    assert sizes == [2 * 64, 64, 64]  # the index and two inner chunks


def test_only_the_selected_chunks_of_an_inner_shard_are_decoded() -> None:
    inner = shards((2, 8), LITTLE, codec("crc32c"))
    meta = ArrayMeta.new((8, 8), "u4", (8, 8), [shards((4, 8), inner)])
    values = np.arange(1, 65, dtype="u4").reshape(8, 8)
    data = bytearray(encoded(meta, values))
    data[0] ^= 1
    out = np.zeros((1, 3), "f8")
    meta.chain.decode_part(memoryview(bytes(data)), (slice(3, 4, 1), slice(1, 6, 2)), out)
    assert np.array_equal(out, values[3:4, 1:6:2])
    with pytest.raises(Corrupt, match=r"inner chunk \(0, 0\): inner chunk \(0, 0\)"):
        decoded(meta, bytes(data))


def test_an_inner_chunk_that_ends_beyond_its_shard_is_corrupt() -> None:
    """Though all of its bytes are there: its length is not that of the bytes."""
    chain = [shards((4,), LITTLE, ZSTD, index_codecs=[LITTLE], index_location="start")]
    meta = ArrayMeta.new((8,), "u4", (8,), chain)
    data = bytearray(encoded(meta, np.arange(1, 9, dtype="u4")))
    data[24:32] = (int.from_bytes(data[24:32], "little") + 3).to_bytes(8, "little")
    with pytest.raises(Corrupt, match=r"inner chunk \(1,\) has .* beyond the end of its shard"):
        decoded(meta, bytes(data))


def test_many_gzip_members_take_time_linear_in_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """zlib copies what follows a member, which must not be the rest of the chunk each time."""
    count, passed = 2000, 0

    class Counted:
        def __init__(self, **settings: Any) -> None:
            self._inner = zlib.decompressobj(**settings)

        def decompress(self, data: Any, most: int) -> bytes:
            nonlocal passed
            passed += len(data)
            return self._inner.decompress(data, most)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    module = SimpleNamespace(decompressobj=Counted, error=zlib.error)
    monkeypatch.setattr("tstore.core.format.arrays.compressors.zlib", module)
    values = np.random.default_rng(1).integers(0, 256, (count, 200), np.uint8)
    meta = ArrayMeta.new(values.shape, "u1", values.shape, [LITTLE, codec("gzip")])
    data = b"".join(gzip.compress(row.tobytes(), 0, mtime=0) for row in values)
    assert np.array_equal(decoded(meta, data), values)
    assert passed <= count * (16 << 10) + len(data)


def test_huge_shapes_are_checked_without_memory() -> None:
    side = 1 << 55
    for chain in (
        [shards((1,), LITTLE)],
        [codec("transpose", order=[0]), BIG],
        [LITTLE, numcodec("bz2"), ZSTD],
        [numcodec("packbits"), LITTLE],
    ):
        with memory(1 << 20):
            meta = ArrayMeta.new((side,), "bool", (side,), chain)
            with pytest.raises(Corrupt):
                meta.chain.check_length(1000)
    with memory(1 << 20):  # one inner chunk: the shard may be short, the inner chunk may not
        meta = ArrayMeta.new((side,), "u1", (side,), [shards((side,), LITTLE, index_codecs=[LITTLE])], 7)
        out = np.zeros(1, "u1")
        meta.chain.decode_part(memoryview(b"\xff" * 16), (slice(5, 6, 1),), out)
        assert out[0] == 7
        with pytest.raises(Corrupt, match="inner chunk"):
            meta.chain.decode_part(memoryview(b"ab" + bytes(8) + b"\2" + bytes(7)), (slice(5, 6, 1),), out)
    with pytest.raises(InvalidArgument):
        ArrayMeta.new((1 << 59,), "u1", (1 << 59,), [numcodec("astype", encode_dtype="<i8"), LITTLE])


@pytest.mark.parametrize("codecs", [["bytes", "zstd"], ["bytes", "gzip"], ["numcodecs.pcodec"]], ids=str)
def test_zarr_reads_the_metadata_of_codecs_that_are_named_only(codecs: Any) -> None:
    """zarr-python requires their configuration."""
    document = json.loads(ArrayMeta.new((4,), "int32", (2,), codecs).document)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that numcodecs' names have no specification
        assert ArrayV3Metadata.from_dict(document).shape == (4,)


# ---- metadata


def doc(**changes: Any) -> bytes:
    fields = json.loads(ArrayMeta.new((4, 6), "float32", (4, 6)).document)
    return json.dumps(fields | changes).encode()


@pytest.mark.parametrize(
    ("codecs", "named"),
    [
        ([LITTLE, codec("new", a=1)], "'new' with configuration {'a': 1}"),
        ([codec("numcodecs.pickle"), LITTLE], "numcodecs.pickle"),
        ([LITTLE, codec("numcodecs.os.system")], "numcodecs.os.system"),
        ([codec("imagecodecs_jpeg")], "package imagecodecs"),
        ([codec("vlen-utf8")], "vlen-utf8"),
        ([LITTLE, numcodec("zlib", level=10)], "level"),
        ([LITTLE, numcodec("zlib", new=1)], "'new'"),
        ([LITTLE, numcodec("lzma", format=4)], "format"),
        ([LITTLE, numcodec("lzma", filters=[{"id": "x"}])], "filters"),
        ([LITTLE, numcodec("jenkins_lookup3", prefix="ab")], "prefix"),
        ([LITTLE, numcodec("crc32", location="middle")], "location"),
        ([codec("transpose", order=[0]), LITTLE], "permutation"),
        ([codec("transpose", order=[0, 0]), LITTLE], "permutation"),
        ([codec("transpose", order=[True, False]), LITTLE], "permutation"),
        ([numcodec("delta", dtype="<i4"), LITTLE], "float32"),
        ([numcodec("delta", dtype=">f4"), LITTLE], "little-endian"),
        ([numcodec("delta", dtype="O"), LITTLE], "'O'"),
        ([numcodec("delta", astype="S4"), LITTLE], "'S4'"),
        ([numcodec("astype", encode_dtype="O"), LITTLE], "'O'"),
        ([numcodec("astype", encode_dtype="<c8"), LITTLE], "complex64"),
        ([numcodec("fixedscaleoffset", offset="1", scale=1), LITTLE], "offset"),
        ([numcodec("bitround", keepbits=30), LITTLE], "bitround"),
        ([numcodec("quantize", digits=10**6), LITTLE], "quantize"),
        ([numcodec("packbits"), LITTLE], "bool"),
        ([shards((2, 3), LITTLE, index_codecs=[LITTLE, ZSTD])], "length of its index"),
        ([shards((2, 3), LITTLE, index_location="middle")], "index_location"),
        ([shards((2, 0), LITTLE)], "chunk_shape"),
        ([codec("sharding_indexed", chunk_shape=[2, 3])], "'codecs'"),
        ([shards((2, 3), 5)], "5 is not a codec"),  # type: ignore[arg-type]
        ([LITTLE] + [ZSTD] * 9, "at most 8"),
        ([codec("transpose", order=[1, 0])] * 9 + [LITTLE], "at most 8"),
    ],
    ids=lambda v: str(v)[:80],
)
def test_codecs_that_are_not_supported_are_named(codecs: list[Document], named: str) -> None:
    with pytest.raises(UnsupportedFormat) as error:
        ArrayMeta.parse(doc(codecs=codecs))
    assert named in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("zstdd", "did you mean 'zstd'?"),
        ("lz4", "did you mean 'numcodecs.lz4'?"),
        ("numcodecs.zlb", "did you mean 'numcodecs.zlib'?"),
        ("e4m3", "it is an eXmY format; pass codecs='e4m3', without a list"),
        ("wxyz", "does not know it"),
    ],
)
async def test_the_codec_that_was_meant_is_suggested(name: str, meant: str) -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        with pytest.raises(UnsupportedFormat) as error:
            await tx.create_array("a", (4,), "float32", codecs=[name])
    assert str(error.value).endswith(meant)


def test_shards_nested_too_deeply_are_refused() -> None:
    chain = LITTLE
    for _ in range(6):
        chain = shards((4, 6), chain)
    with pytest.raises(UnsupportedFormat, match="nested"):
        ArrayMeta.parse(doc(codecs=[chain]))


@pytest.mark.parametrize(
    "codecs",
    [
        [],
        [ZSTD, LITTLE],
        [LITTLE, BIG],
        [LITTLE, codec("transpose", order=[1, 0])],
        [codec("transpose", order=[1, 0])],
        [shards((3, 3), LITTLE)],
        [shards((2, 3, 1), LITTLE)],
        [LITTLE, numcodec("shuffle", elementsize=7)],
        [LITTLE, ZSTD, numcodec("shuffle")],
    ],
    ids=lambda v: str(v)[:80],
)
def test_chains_that_do_not_fit_are_refused(codecs: list[Document]) -> None:
    with pytest.raises(InvalidArgument):
        ArrayMeta.new((4, 6), "float32", (4, 6), codecs)
    with pytest.raises(Corrupt):
        ArrayMeta.parse(doc(codecs=codecs))


def test_only_a_caller_may_leave_out_the_codec_of_bytes() -> None:
    assert ArrayMeta.new((4, 6), "float32", (4, 6), [ZSTD]).codecs == [LITTLE, ZSTD]
    with pytest.raises(Corrupt):
        ArrayMeta.parse(doc(codecs=[ZSTD]))


@pytest.mark.parametrize(
    ("name", "package"), [("pcodec", "pcodec"), ("zfpy", "zfpy"), ("crc32c", "google-crc32c")]
)
def test_an_absent_package_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, f"numcodecs.{'checksum32' if name == 'crc32c' else name}", None)
    chain = [numcodec(name)] if name != "crc32c" else [LITTLE, numcodec(name)]
    with pytest.raises(UnsupportedFormat, match=f"needs the package {package}"):
        ArrayMeta.new((4, 6), "float32", (4, 6), chain)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"zarr_format": 4}, "Zarr 4"),
        ({"chunk_grid": {"name": "rectilinear"}}, "rectilinear"),
        ({"storage_transformers": [{"name": "lakes"}]}, "lakes"),
        ({"new": {"must_understand": True}}, "'new'"),
        ({"new": 1}, "'new'"),
        ({"data_type": "float128"}, "float128"),
    ],
    ids=str,
)
def test_metadata_that_is_not_supported_is_named(change: Document, named: str) -> None:
    with pytest.raises(UnsupportedFormat, match=named):
        ArrayMeta.parse(doc(**change))
    ArrayMeta.parse(doc(new={"must_understand": False, "name": "new"}))


def test_names_alone_stand_for_codecs() -> None:
    assert ArrayMeta.parse(doc(codecs=["bytes", "crc32c"])).chain.fixed_length == 4 * 24 + 4


@pytest.mark.parametrize("name", ["gzip", "numcodecs.gzip"])
def test_gzip_bytes_do_not_depend_on_the_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a save writes no chunk anew that has not changed."""
    values, encoded = np.arange(64, dtype="i4"), []
    for time in (1e9, 1.5e9):
        monkeypatch.setattr("time.time", lambda time=time: time)
        chain = ArrayMeta.new((64,), "i4", (64,), ["bytes", name]).chain
        encoded.append(bytes(chain.encode(values, np.empty(chain.out_size, np.uint8))))
    assert encoded[0] == encoded[1]
    assert encoded[0][4:8] == bytes(4)
