"""Plain Zarr folders: what zarr-python and TensorStore write we read equal, and what we write they read equal."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore as async_tstore
import tstore.sync as tstore
from tests.support.fileservers import aiohttp_files
from tests.support.fuzzing import bounded_time
from tests.support.lazy import lazy
from tstore.convert import zarr_export, zarr_import
from tstore.convert.references import export_references
from tstore.convert.zarr_export import consolidate, export_zarr
from tstore.convert.zarr_import import import_zarr
from tstore.core.snapshot import Snapshot
from tstore.core.transactions.encoded import EncodedStaging
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, UnsupportedFormat
from tstore.zarr import ZarrStore

ts = lazy("tensorstore")
zarr = lazy("zarr")

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
BIG = {"name": "bytes", "configuration": {"endian": "big"}}
ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}
CRC = {"name": "crc32c"}
BLOSC = {
    "name": "blosc",
    "configuration": {"typesize": 2, "cname": "lz4", "clevel": 5, "shuffle": "shuffle", "blocksize": 0},
}
TRANSPOSE = {"name": "transpose", "configuration": {"order": [1, 0]}}


def sharded(*inner: dict[str, Any]) -> dict[str, Any]:
    settings = {"chunk_shape": [2, 3], "codecs": list(inner), "index_codecs": [LITTLE, CRC]}
    return {"name": "sharding_indexed", "configuration": settings}


CHAINS = [
    [LITTLE],
    [BIG],
    [LITTLE, GZIP],
    [LITTLE, ZSTD],
    [LITTLE, BLOSC],
    [LITTLE, CRC],
    [TRANSPOSE, LITTLE, ZSTD, CRC],
    [sharded(LITTLE)],
    [sharded(BIG, GZIP)],
    [sharded(TRANSPOSE, LITTLE, ZSTD, CRC)],
]
BOTH = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex64", "complex128"]
TENSORSTORE = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "int2", "float4_e2m1fn"]


def values_of(dtype: str, shape: tuple[int, ...] = (11, 7)) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(len(dtype))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    if kind.kind == "c":
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(kind)
    if kind.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    return (rng.normal(size=shape) * 4).astype(kind) if kind.kind in "fV" else rng.integers(0, 100, shape, kind)


def equal(mine: np.ndarray[Any, Any], other: Any) -> bool:
    other = np.asarray(other)
    return bool(mine.shape == other.shape and mine.dtype == other.dtype and mine.tobytes() == other.tobytes())


def tensorstore_write(
    path: Path, values: Any, codecs: list[dict[str, Any]], chunks: list[int], **more: Any
) -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path)},
        "create": True,
        "metadata": {
            "shape": list(values.shape),
            "data_type": values.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
            "codecs": codecs,
            **more,
        },
    }
    ts.open(spec).result().write(values).result()


def tensorstore_read(path: Path) -> Any:
    return ts.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}).result().read().result()


def one_byte(codecs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chain for a dtype of one byte, of which TensorStore expects no byte order."""
    text = json.dumps(codecs)
    for endian in (LITTLE, BIG):
        text = text.replace(json.dumps(endian), '{"name": "bytes"}')
    chain: list[dict[str, Any]] = json.loads(text)
    for codec in chain:
        if codec["name"] == "sharding_indexed":
            codec["configuration"]["index_codecs"] = [LITTLE, CRC]
    return chain


def imported(folder: Path | str, store: Path) -> Any:
    asyncio.run(import_zarr(folder, store))
    return tstore.open(store, "r").snapshot()


def exported(store: Path, folder: Path) -> Path:
    asyncio.run(export_zarr(store, folder))
    return folder


@pytest.mark.parametrize("dtype", [*BOTH, *TENSORSTORE])
def test_every_dtype_goes_from_tensorstore_to_the_store_and_back(tmp_path: Path, dtype: str) -> None:
    values = values_of(dtype)
    codecs: list[dict[str, Any]] = one_byte([LITTLE, ZSTD]) if values.itemsize == 1 else [LITTLE, ZSTD]
    tensorstore_write(tmp_path / "a.zarr", values, codecs, [4, 3])
    snapshot = imported(tmp_path / "a.zarr", tmp_path / "store")
    assert equal(values, snapshot.array("a").read())
    assert not snapshot.array("a").sparse  # since it has all chunks
    back = exported(tmp_path / "store", tmp_path / "b.zarr")
    assert equal(values, tensorstore_read(back / "a"))
    if dtype in BOTH:
        assert equal(values, zarr.open_array(back / "a", mode="r")[:])


@pytest.mark.parametrize("number", range(len(CHAINS)))
def test_every_codec_chain_is_copied_byte_for_byte(tmp_path: Path, number: int) -> None:
    values, codecs = values_of("uint16"), CHAINS[number]
    tensorstore_write(tmp_path / "a.zarr", values, codecs, [4, 6])
    snapshot = imported(tmp_path / "a.zarr", tmp_path / "store")
    array = snapshot.array("a")
    assert equal(values, array.read())
    assert equal(values[1:9:3, ::-2], array[1:9:3, ::-2].read())
    back = exported(tmp_path / "store", tmp_path / "b.zarr") / "a"
    assert equal(values, tensorstore_read(back))
    assert equal(values, zarr.open_array(back, mode="r")[:])
    chunks = sorted(
        p.relative_to(tmp_path / "a.zarr") for p in (tmp_path / "a.zarr" / "c").rglob("*") if p.is_file()
    )
    assert len(chunks) == 6
    assert all((tmp_path / "a.zarr" / name).read_bytes() == (back / name).read_bytes() for name in chunks)


V2_COMPRESSORS = [None, {"id": "gzip", "level": 1}, {"id": "zstd", "level": 1}, {"id": "zlib", "level": 1}]
V2_COMPRESSORS += [{"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": shuffle} for shuffle in (-1, 0, 1, 2)]


@given(
    dtype=st.sampled_from(["<i4", ">i4", "<f8", ">f2", "|b1", "|u1", "<c8", ">c16", "<U3", "|S4", "<M8[ns]"]),
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    order=st.sampled_from("CF"),
    separator=st.sampled_from("./"),
    compressor=st.sampled_from(V2_COMPRESSORS),
    delta=st.booleans(),
    data=st.data(),
)
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
def test_v2_arrays_of_zarr_python(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: str,
    shape: tuple[int, ...],
    order: Any,
    separator: Any,
    compressor: Any,
    delta: bool,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("v2")
    chunks = tuple(data.draw(st.integers(1, 4)) for _ in shape)
    kind = np.dtype(dtype)
    filters = [{"id": "delta", "dtype": dtype}] if delta and kind.kind == "i" else None
    values = np.arange(int(np.prod(shape)), dtype="i8").reshape(shape).astype(kind)
    import numcodecs

    array = zarr.create_array(
        folder / "a.zarr",
        shape=shape,
        dtype=kind,
        chunks=chunks,
        zarr_format=2,
        order=order,
        compressors=None if compressor is None else numcodecs.get_codec(dict(compressor)),
        filters=None if filters is None else [numcodecs.get_codec(dict(f)) for f in filters],
        chunk_key_encoding={"name": "v2", "separator": separator},
    )
    array[...] = values
    snapshot = imported(folder / "a.zarr", folder / "store")
    assert equal(np.asarray(array[...]).astype(kind.newbyteorder("=")), snapshot.array("a").read())
    back = exported(folder / "store", folder / "b.zarr")
    assert np.array_equal(zarr.open_array(back / "a", mode="r")[...], array[...])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
def test_a_v2_compressor_of_numbers(tmp_path: Path, order: Any, delta: bool) -> None:
    import numcodecs

    values = np.arange(40, dtype="<i4").reshape(8, 5)
    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=(8, 5),
        chunks=(4, 3),
        dtype="<i4",
        zarr_format=2,
        order=order,
        compressors=numcodecs.get_codec({"id": "pcodec"}),
        filters=[numcodecs.get_codec({"id": "delta", "dtype": "<i4"})] if delta else None,
    )
    array[...] = values
    assert equal(values, imported(tmp_path / "a.zarr", tmp_path / "store").array("a").read())
    back = exported(tmp_path / "store", tmp_path / "b.zarr")
    assert np.array_equal(zarr.open_array(back / "a", mode="r")[...], values)


V2_FILTERS: list[tuple[str, list[dict[str, Any]]]] = [
    ("<i4", [{"id": "delta", "dtype": "<i4", "astype": ">i2"}]),
    (">i4", [{"id": "delta", "dtype": ">i4", "astype": "<i8"}]),
    ("<i4", [{"id": "delta", "dtype": "<i4", "astype": ">i4"}, {"id": "delta", "dtype": ">i4", "astype": "<i4"}]),
    ("<f8", [{"id": "fixedscaleoffset", "offset": 1, "scale": 10, "dtype": "<f8", "astype": ">i4"}]),
    (">f8", [{"id": "fixedscaleoffset", "offset": 1, "scale": 10, "dtype": ">f8", "astype": "|u1"}]),
    ("<f4", [{"id": "quantize", "digits": 2, "dtype": "<f4", "astype": ">f4"}]),
    ("<f8", [{"id": "astype", "encode_dtype": ">f4", "decode_dtype": "<f8"}]),
    ("<f8", [{"id": "astype", "encode_dtype": "<f4", "decode_dtype": "<f8"}, {"id": "shuffle", "elementsize": 4}]),
    ("|b1", [{"id": "packbits"}]),
    ("<f4", [{"id": "bitround", "keepbits": 5}]),
]


@pytest.mark.parametrize("compressor", [None, {"id": "zlib", "level": 1}])
@pytest.mark.parametrize(("dtype", "filters"), V2_FILTERS)
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
def test_v2_filters_with_other_dtypes(tmp_path: Path, dtype: str, filters: list[Any], compressor: Any) -> None:
    import numcodecs

    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=(8, 5),
        chunks=(4, 3),
        dtype=dtype,
        zarr_format=2,
        compressors=None if compressor is None else numcodecs.get_codec(dict(compressor)),
        filters=[numcodecs.get_codec(dict(each)) for each in filters],
    )
    array[...] = (np.arange(40).reshape(8, 5) % 7).astype(dtype)
    expected = np.asarray(array[...]).astype(np.dtype(dtype).newbyteorder("="))
    assert equal(expected, imported(tmp_path / "a.zarr", tmp_path / "store").array("a").read())
    back = exported(tmp_path / "store", tmp_path / "b.zarr")
    assert np.array_equal(zarr.open_array(back / "a", mode="r")[...], expected)


@pytest.mark.parametrize(("dtype", "shuffle"), [("u1", "bitshuffle"), ("<i4", "shuffle")])
def test_the_automatic_shuffle_of_v2_is_the_one_for_the_size_of_an_element(
    tmp_path: Path, dtype: str, shuffle: str
) -> None:
    import numcodecs

    blosc = numcodecs.get_codec({"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": -1})
    values = np.arange(40).astype(dtype)
    zarr.create_array(tmp_path / "a.zarr", data=values, chunks=(10,), zarr_format=2, compressors=blosc)
    array = imported(tmp_path / "a.zarr", tmp_path / "store").array("a")
    assert array.codecs[-1]["configuration"]["shuffle"] == shuffle
    assert equal(values, array.read())


@pytest.mark.parametrize(
    ("dtype", "stored", "expected"),
    [
        ("|b1", 0, False),
        ("|b1", 1, True),
        ("<i4", 7.0, 7),
        (">i4", -7, -7),
        ("<u8", None, 0),
        ("<f4", "-Infinity", -np.inf),
        ("<f8", 3, 3),
        ("<c8", 3, 3),
        ("<c16", [1.0, "Infinity"], complex(1, np.inf)),
        ("|S4", "YWIAAA==", b"ab"),
        ("|S2", "YWIAAA==", b"ab"),  # longer than the dtype
        ("|S4", 0, b""),
        ("<U3", "xy", "xy"),
        ("<U3", None, ""),
    ],
)
def test_fill_values_of_v2_as_writers_have_them(tmp_path: Path, dtype: str, stored: Any, expected: Any) -> None:
    fields = {"zarr_format": 2, "shape": [3], "chunks": [2], "dtype": dtype, "fill_value": stored, "order": "C"}
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr/.zarray").write_text(json.dumps(fields | {"compressor": None, "filters": None}))
    array = imported(tmp_path / "a.zarr", tmp_path / "store").array("a")
    assert equal(np.full(3, expected, np.dtype(dtype).newbyteorder("=")), array.read())
    assert array.fill_value == expected
    back = zarr.open_array(exported(tmp_path / "store", tmp_path / "b.zarr") / "a", mode="r")
    assert back[:].tolist() == array.read().tolist()


def test_numbers_in_v2_attributes_that_json_lacks(tmp_path: Path) -> None:
    fields = {"zarr_format": 2, "shape": [3], "chunks": [2], "dtype": "<i4", "fill_value": 0, "order": "C"}
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr/.zarray").write_text(json.dumps(fields | {"compressor": None, "filters": None}))
    (tmp_path / "a.zarr/.zattrs").write_text('{"x": NaN, "y": [Infinity, {"z": -Infinity}], "n": 1.5}')
    array = imported(tmp_path / "a.zarr", tmp_path / "store").array("a")
    assert array.attributes == {"x": "NaN", "y": ["Infinity", {"z": "-Infinity"}], "n": 1.5}


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (">i4", {"id": "delta", "dtype": ">i4"}),
        ("u1", {"id": "astype", "encode_dtype": "<f8", "decode_dtype": "|u1"}),
        ("i1", {"id": "fixedscaleoffset", "offset": 0, "scale": 1, "dtype": "|i1", "astype": "<i2"}),
    ],
)
def test_a_filter_that_zarr_python_misreads_is_decoded_on_export(
    tmp_path: Path, dtype: str, settings: dict[str, Any]
) -> None:
    import numcodecs

    values = np.arange(40, dtype=dtype).reshape(8, 5)
    filters = [numcodecs.get_codec(settings)]
    zarr.create_array(
        tmp_path / "a.zarr", data=values, chunks=(4, 3), zarr_format=2, compressors=None, filters=filters
    )
    snapshot = imported(tmp_path / "a.zarr", tmp_path / "store")
    assert np.array_equal(snapshot.array("a").read(), values)
    with pytest.raises(
        UnsupportedFormat, match=r"^a has a filter of .*, which zarr-python misreads; read it with"
    ):
        zarr.open_array(ZarrStore(snapshot), path="a", mode="r")
    back = exported(tmp_path / "store", tmp_path / "b.zarr")
    assert np.array_equal(zarr.open_array(back / "a", mode="r")[...], values)  # which would misread the filter
    with pytest.raises(InvalidArgument, match=r"a has a filter of .*, which zarr-python misreads; export a Zarr"):
        asyncio.run(export_references(tmp_path / "store", tmp_path / "refs.json", keep_exmy=True))


@pytest.mark.parametrize("format_", [2, 3])
def test_groups_attributes_names_and_missing_chunks(tmp_path: Path, format_: Any) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=format_)
    root.attrs["title"] = "x"
    root.create_group("empty").attrs["n"] = [1, {"y": None}]
    names = {"dimension_names": ["x", "y"]} if format_ == 3 else {}
    a = root.create_array("g/h/a", shape=(6, 6), chunks=(2, 2), dtype="int32", fill_value=7, **names)
    a.attrs["unit"] = "m"
    if format_ == 2:
        a.attrs["_ARRAY_DIMENSIONS"] = ["x", "y"]
    a[:2, :2] = 1
    full = root.create_array("full", shape=(4,), chunks=(2,), dtype="float32")
    full[:] = 1
    snapshot = imported(tmp_path / "a.zarr", tmp_path / "store")
    assert snapshot.attributes() == {"title": "x"}
    assert snapshot.attributes("empty") == {"n": [1, {"y": None}]}
    array = snapshot.array("g/h/a")
    assert (array.attributes, array.dimension_names, array.fill_value) == ({"unit": "m"}, ("x", "y"), 7)
    assert np.array_equal(array.read(), a[:])
    back = zarr.open_group(exported(tmp_path / "store", tmp_path / "b.zarr"), mode="r")
    assert dict(back.attrs) == {"title": "x"}
    assert dict(back["empty"].attrs) == {"n": [1, {"y": None}]}
    assert np.array_equal(back["g/h/a"][:], a[:])
    assert len(list((tmp_path / "b.zarr/g/h/a/c").rglob("*"))) == 2  # the folder 0 and its chunk 0


@pytest.mark.parametrize("separator", ["/", "."])
@pytest.mark.parametrize("format_", [2, 3])
@pytest.mark.parametrize("protocol", ["", "memory://"])
def test_a_sparse_array_of_many_chunks_is_imported_from_its_listing(
    tmp_path: Path, format_: Any, separator: str, protocol: str
) -> None:
    folder = f"{protocol}{tmp_path}/a.zarr"
    encoding = {"name": "v2" if format_ == 2 else "default", "separator": separator}
    written = zarr.create_array(
        folder,
        shape=(10**8, 10**8, 6),
        chunks=(2, 3, 6),
        dtype="i4",
        zarr_format=format_,
        chunk_key_encoding=encoding,
        fill_value=7,
    )
    places = [(0, 0), (11, 2), (10**8 - 1, 10**8 - 1), (2, 90)]
    for row, column in places:
        written[row, column] = range(6)
    if not protocol:
        for name in ("notes.txt", "c/01", "01", "0.0", "c.0.0.0.0", "999999999/0/0", "999999999.0.0"):
            (tmp_path / "a.zarr" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "a.zarr" / name).write_text("")  # no chunks of this array
    array = imported(folder, tmp_path / "store").array("a")
    assert len(array[:20, :99].explain().chunks) == 3
    for row, column in places:
        assert array[row, column].read().tolist() == list(range(6))
    assert array[0, 1].read().tolist() == [7] * 6


@pytest.mark.parametrize(("constant", "bound"), [("_ROUND_BYTES", 16 * 4000), ("_ROUND_CHUNKS", 16)])
def test_few_chunks_are_in_memory_during_an_import(
    tmp_path: Path, constant: str, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = values_of("int64", (100, 400))
    tensorstore_write(tmp_path / "a.zarr", values, [LITTLE], [1, 400])  # of 3,200 bytes each
    written, write = list[int](), EncodedStaging.write

    async def counted(self: EncodedStaging, chunks: Any) -> Any:
        written.append(len(chunks))
        return await write(self, chunks)

    monkeypatch.setattr(EncodedStaging, "write", counted)
    monkeypatch.setattr(zarr_import, constant, bound)
    snapshot = imported(tmp_path / "a.zarr", tmp_path / "store")
    assert equal(values, snapshot.array("a").read())
    assert sum(written) == 100
    assert 4 <= max(written) <= 20


def test_a_damaged_chunk_fails_the_import_and_is_named(tmp_path: Path) -> None:
    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("x/w", shape=(4, 4), chunks=(2, 2), dtype="int32")[:] = 1
    chunk = tmp_path / "a.zarr/x/w/c/1/0"
    chunk.write_bytes(chunk.read_bytes()[:-3])
    with pytest.raises(Corrupt, match=r"x/w, chunk \(1, 0\)"):
        imported(tmp_path / "a.zarr", tmp_path / "store")
    assert tstore.open(tmp_path / "store", "r").snapshot().version == 0


def test_what_is_refused_says_why(tmp_path: Path) -> None:
    def refused(error: type[Exception], match: str, **files: Any) -> None:
        folder = tmp_path / str(len(os.listdir(tmp_path)))
        folder.mkdir()
        for name, contents in files.items():
            (folder / name.replace("_", ".")).write_text(
                contents if isinstance(contents, str) else json.dumps(contents)
            )
        with pytest.raises(error, match=match):
            imported(folder, tmp_path / "store")
        assert not (tmp_path / "store").exists()

    v3 = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [2],
        "data_type": "int8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes"}],
    }
    v2 = {"zarr_format": 2, "shape": [2], "chunks": [2], "dtype": "|O", "order": "C", "fill_value": 0}
    refused(InvalidArgument, "not a Zarr hierarchy", readme="x")
    refused(Corrupt, "zarr.json is not JSON", zarr_json="{")
    refused(Corrupt, "not that of a Zarr group or array", zarr_json=[])
    refused(UnsupportedFormat, "'fancy'", zarr_json=v3 | {"codecs": [{"name": "fancy"}]})
    refused(UnsupportedFormat, "chunk keys", zarr_json=v3 | {"chunk_key_encoding": {"name": "odd"}})
    refused(UnsupportedFormat, "rectangular", zarr_json=v3 | {"chunk_grid": {"name": "rectangular"}})
    refused(UnsupportedFormat, "object", _zarray=v2)
    refused(Corrupt, "does not parse", _zarray={"zarr_format": 2, "shape": [2], "dtype": "<i4"})
    refused(
        UnsupportedFormat, "numcodecs.msgpack2", _zarray=v2 | {"dtype": "<i4", "compressor": {"id": "msgpack2"}}
    )


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3")
def test_a_chain_that_zarr_python_would_misread_is_exported_decoded(tmp_path: Path) -> None:
    import numcodecs

    array = zarr.create_array(
        tmp_path / "a.zarr",
        shape=(9,),
        dtype=">i4",
        chunks=(4,),
        zarr_format=2,
        compressors=None,
        filters=[numcodecs.Delta(dtype=">i4")],
        fill_value=0,
    )
    array[:] = np.arange(9) ** 2
    assert imported(tmp_path / "a.zarr", tmp_path / "store").array("a").read().tolist() == [
        n * n for n in range(9)
    ]
    back = exported(tmp_path / "store", tmp_path / "b.zarr")
    assert zarr.open_array(back / "a", mode="r")[:].tolist() == [n * n for n in range(9)]


@pytest.mark.parametrize(
    "change",
    [
        {"codecs": ["bytes", "gzip"]},
        {"codecs": [{"name": "bytes"}]},
        {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}, "must_understand": True}]},
        {"codecs": [sharded({"name": "bytes"}, {"name": "crc32c", "configuration": {}})]},
        {"data_type": {"name": "float32"}},
        {"data_type": {"name": "float32", "configuration": {}}},
        {"dimension_names": None},
        {"attributes": None},
        {"shape": [0, 3], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 3]}}},
    ],
)
def test_metadata_in_other_words_becomes_that_of_zarr(tmp_path: Path, change: dict[str, Any]) -> None:
    """Few programs read all that some accept; what tstore stores, they all read."""
    fields: dict[str, Any] = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4, 3],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 3]}},
        "chunk_key_encoding": "default",
        "fill_value": 0.5,
        "codecs": [LITTLE],
    }
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.zarr" / "zarr.json").write_text(json.dumps(fields | change))
    expected = np.full(change.get("shape", (4, 3)), 0.5, "f4")
    snapshot = imported(tmp_path / "a.zarr", tmp_path / "store")
    assert equal(expected, snapshot.array("a").read())
    assert equal(expected, zarr.open_group(ZarrStore(snapshot), mode="r")["a"][:])
    back = exported(tmp_path / "store", tmp_path / "b.zarr")
    assert equal(expected, zarr.open_array(back / "a", mode="r")[:])
    assert equal(expected, tensorstore_read(back / "a"))


def test_a_chunk_that_is_a_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("a", data=np.arange(4), chunks=(2,))
    (tmp_path / "a.zarr/a/c/1").unlink()
    os.mkfifo(tmp_path / "a.zarr/a/c/1")
    with pytest.raises(InvalidArgument, match="c/1 is a pipe"):
        imported(tmp_path / "a.zarr", tmp_path / "store")


@pytest.mark.parametrize("chunk_count", [4, 40])  # which are looked up one by one, and listed
def test_a_chunk_that_is_a_folder_is_refused(tmp_path: Path, chunk_count: int) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=np.arange(chunk_count), chunks=(1,))
    (tmp_path / "a.zarr/c/1").unlink()
    (tmp_path / "a.zarr/c/1").mkdir()
    with pytest.raises(InvalidArgument, match="c/1: Is a directory"):
        imported(tmp_path / "a.zarr", tmp_path / "store")


def test_a_link_to_itself_beside_the_chunks_is_no_chunk(tmp_path: Path) -> None:
    written = zarr.create_array(tmp_path / "a.zarr", data=np.arange(40).reshape(20, 2), chunks=(1, 1))
    (tmp_path / "a.zarr/c/latest").symlink_to("latest")
    assert np.array_equal(imported(tmp_path / "a.zarr", tmp_path / "store").array("a").read(), written[:])


def test_an_array_in_the_current_folder_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zarr.create_array(tmp_path / "a.zarr", data=np.arange(4))
    monkeypatch.chdir(tmp_path / "a.zarr")
    assert imported(".", tmp_path / "store").array("a").read().tolist() == [0, 1, 2, 3]


def test_an_import_from_a_reference_file(tmp_path: Path) -> None:
    written = zarr.create_array(tmp_path / "a.zarr", data=np.arange(1, 101), chunks=(2,))
    (tmp_path / "a.zarr/c/9").unlink()
    files = [file for file in (tmp_path / "a.zarr").rglob("*") if file.is_file()]
    references = {file.relative_to(tmp_path / "a.zarr").as_posix(): [str(file)] for file in files}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": references}))
    options = {"fo": str(tmp_path / "refs.json"), "remote_protocol": "file"}
    asyncio.run(import_zarr("reference://", tmp_path / "store", storage_options=options))
    array = tstore.open(tmp_path / "store").snapshot().array("array")
    assert array.sparse
    assert np.array_equal(array.read(), written[:])


@pytest.mark.parametrize("codecs", [None, "e4m3"])
def test_a_sparse_array_of_trillions_of_chunks_is_exported(tmp_path: Path, codecs: str | None) -> None:
    with tstore.open(tmp_path / "store").transaction() as tx:
        array = tx.create_array("a", (1 << 20, 1 << 20, 70), "float32", (2, 3, 64), codecs, 0.5, sparse=True)
        array[-1, 70:73, 60:70].write(3)
    with bounded_time(10):
        asyncio.run(export_zarr(tmp_path / "store", tmp_path / "b.zarr"))
    read = zarr.open_array(tmp_path / "b.zarr/a", mode="r")
    assert read[-1, 69:74, 69].tolist() == [0.5, 3, 3, 3, 0.5]
    assert read[-2:, 70, 59:].tolist() == [[0.5] * 11, [0.5, *[3] * 10]]
    assert sum(file.is_file() for file in (tmp_path / "b.zarr/a/c").rglob("*")) == 4


def test_quantized_arrays_are_decoded_unless_kept(tmp_path: Path) -> None:
    values = np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30)
    with tstore.open(tmp_path / "store").transaction() as tx:
        tx.create_array("q", values.shape, "float32", (8, 30), codecs="e4m3").write(values)
        tx.create_array("s", (), "float32").write(2.5)
    expected = tstore.open(tmp_path / "store").snapshot().array("q").read()
    decoded = exported(tmp_path / "store", tmp_path / "decoded")
    assert equal(expected, tensorstore_read(decoded / "q"))
    assert tensorstore_read(decoded / "s") == 2.5
    asyncio.run(export_zarr(tmp_path / "store", tmp_path / "kept", keep_exmy=True))
    document = json.loads((tmp_path / "kept/q/zarr.json").read_text())
    assert document["codecs"][0]["name"] == "exmy"
    assert equal(expected, zarr.open_array(tmp_path / "kept/q", mode="r")[:])  # with the plugin of exmy
    assert equal(expected, imported(tmp_path / "kept", tmp_path / "again").array("q").read())


def test_arrays_of_dtypes_that_zarr_lacks_hide_no_others_in_a_folder(tmp_path: Path) -> None:
    xarray = pytest.importorskip("xarray")
    with tstore.open(tmp_path / "store").transaction() as tx:
        for path, dtype in (("a/t", "f4"), ("a/b", "bfloat16"), ("a/c/i", "int4"), ("d/t", "f4")):
            tx.create_array(path, shape=(3,), dtype=dtype, dimension_names=("x",)).write(1)
    report = asyncio.run(export_zarr(tmp_path / "store", tmp_path / "out"))
    assert (report.unlisted, report.left_out) == (["a/b", "a/c/i"], [])
    group = zarr.open_group(tmp_path / "out", mode="r")
    assert sorted(name for name, _ in group.members(None)) == ["a", "a/c", "a/t", "d", "d/t"]
    assert list(zarr.open_group(tmp_path / "out", path="a/c", mode="r").keys()) == []
    assert list(xarray.open_zarr(tmp_path / "out", group="a")) == ["t"]
    assert "consolidated_metadata" not in json.loads((tmp_path / "out" / "d" / "zarr.json").read_text())
    assert tensorstore_read(tmp_path / "out" / "a" / "b").tolist() == [1, 1, 1]
    asyncio.run(import_zarr(tmp_path / "out", tmp_path / "back"))
    assert tstore.open(tmp_path / "back", "r").snapshot().paths() == ["a/b", "a/c/i", "a/t", "d/t"]


def test_the_metadata_of_many_groups_is_consolidated_in_one_pass() -> None:
    """With a pass for each group, tens of thousands of arrays would take minutes."""
    nodes: dict[str, dict[str, Any]] = {"": {"node_type": "group"}}
    for layer in range(20_000):
        nodes |= {f"m/{layer}": {"node_type": "group"}, f"m/{layer}/w": {"node_type": "array"}}
    groups = [path for path, fields in nodes.items() if fields["node_type"] == "group"]
    with bounded_time(30):
        consolidate(nodes, groups, [path for path in nodes if path.endswith("/w")])
    assert nodes["m/7"]["consolidated_metadata"]["unlisted"] == {"w": {"node_type": "array"}}
    assert len(nodes[""]["consolidated_metadata"]["metadata"]) == 20_000


async def test_arrays_that_a_folder_does_not_list_are_imported_over_http(tmp_path: Path) -> None:
    async with await async_tstore.open(tmp_path / "store") as store:
        async with store.transaction() as tx:
            for path, dtype in (("a/t", "f4"), ("a/b", "bfloat16")):
                await (await tx.create_array(path, shape=(3,), dtype=dtype)).write(1)
        await export_zarr(store, tmp_path / "out")
        async with aiohttp_files(tmp_path / "out") as url:
            await import_zarr(url, tmp_path / "back")
            await import_zarr(f"{url}/a", tmp_path / "part")
    for folder, paths in (("back", ["a/b", "a/t"]), ("part", ["b", "t"])):
        assert (await (await async_tstore.open(tmp_path / folder, "r")).snapshot()).paths() == paths


def test_the_structure_of_a_checkpoint_is_not_exported(tmp_path: Path) -> None:
    tstore.save(tmp_path / "store", {"a": [np.arange(3), 2.5]}, 1)
    folder = exported(tmp_path / "store", tmp_path / "out")
    assert json.loads((folder / "zarr.json").read_text())["attributes"] == {}
    assert np.array_equal(zarr.open_group(folder, mode="r")["a/0"][:], np.arange(3))


def test_chunks_with_other_keys_are_exported_by_the_usual_ones(tmp_path: Path) -> None:
    with tstore.open(tmp_path / "store").transaction() as tx:
        for kind, separator in (("v2", "."), ("default", ".")):
            array = zarr.open_group(ZarrStore(tx), mode="a").create_array(
                f"{kind}-keys",
                shape=(6, 6),
                chunks=(4, 3),
                dtype="i4",
                chunk_key_encoding={"name": kind, "separator": separator},
            )
            array[:] = 7
    folder = exported(tmp_path / "store", tmp_path / "out")
    for name in ("v2-keys", "default-keys"):
        assert (folder / name / "c/1/1").exists()
        assert np.array_equal(zarr.open_array(folder / name, mode="r")[:], np.full((6, 6), 7))
        assert np.array_equal(tensorstore_read(folder / name), np.full((6, 6), 7))


def test_shards_of_quantized_chunks_are_decoded(tmp_path: Path) -> None:
    """The last one is padded with the fill value, which readers see once the array grows."""
    codecs = [sharded({"name": "exmy", "configuration": {"format": "e4m3"}})]
    values = np.linspace(-1, 1, 35, dtype=np.float32).reshape(5, 7)
    with tstore.open(tmp_path / "store").transaction() as tx:
        tx.create_array("q", values.shape, "float32", (4, 6), codecs=codecs, fill_value=2).write(values)
    expected = tstore.open(tmp_path / "store").snapshot().array("q").read()
    folder = exported(tmp_path / "store", tmp_path / "out")
    assert equal(expected, tensorstore_read(folder / "q"))
    last = np.frombuffer((folder / "q/c/1/1").read_bytes(), "<f4").reshape(4, 6)
    padded = np.full((4, 6), 2, "f4")
    padded[:1, :1] = expected[4:, 6:]
    assert np.array_equal(last, padded)


@pytest.mark.parametrize("sparse", [False, True])
def test_few_references_are_in_memory_during_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sparse: bool
) -> None:
    step = 4 if sparse else 1
    with tstore.open(tmp_path / "store").transaction() as tx:
        tx.create_array("a", (1000,), "u1", (1,), sparse=sparse)[::step].write(1)
    rounds, read = list[int](), Snapshot.read_encoded

    async def counted(self: Snapshot, path: str, references: Any, deliver: Any) -> Any:
        rounds.append(len(references))
        return await read(self, path, references, deliver)

    monkeypatch.setattr(zarr_export, "_ROUND_CHUNKS", 100)
    monkeypatch.setattr(Snapshot, "read_encoded", counted)
    folder = exported(tmp_path / "store", tmp_path / "out")
    assert sum(rounds) == 1000 // step
    assert max(rounds) <= 100
    assert sorted(map(int, os.listdir(folder / "a/c"))) == list(range(0, 1000, step))


def test_few_decoded_chunks_are_in_memory_during_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.linspace(-1, 1, 40 * 500, dtype=np.float32).reshape(40, 500)
    with tstore.open(tmp_path / "store").transaction() as tx:
        tx.create_array("a", values.shape, "float32", (1, 500), codecs="e4m3").write(values)
    sizes, read = list[int](), Snapshot.read_array

    async def counted(self: Snapshot, path: str, meta: Any, selection: Any, out: np.ndarray[Any, Any]) -> None:
        sizes.append(out.nbytes)
        await read(self, path, meta, selection, out)

    monkeypatch.setattr(zarr_export, "_ROUND_BYTES", 16_000)
    expected = tstore.open(tmp_path / "store").snapshot().array("a").read()
    monkeypatch.setattr(Snapshot, "read_array", counted)
    assert equal(expected, tensorstore_read(exported(tmp_path / "store", tmp_path / "out") / "a"))
    assert sizes == [16_000] * 5


def test_a_pack_that_is_one_chunk_is_linked(tmp_path: Path) -> None:
    values = np.arange(4096, dtype=np.int64)
    with tstore.open(tmp_path / "store").transaction() as tx:
        tx.create_array("a", values.shape, "int64", values.shape).write(values)
    chunk = exported(tmp_path / "store", tmp_path / "out") / "a/c/0"
    assert os.stat(chunk).st_nlink == 2
    [pack] = (tmp_path / "store").rglob("pack-*")
    zarr.open_array(tmp_path / "out/a", mode="r+")[:] = 0  # replaces the file
    tensorstore_write(tmp_path / "ts", values, [LITTLE], [4096])
    assert os.stat(pack).st_nlink == 1
    assert equal(values, tstore.open(tmp_path / "store").snapshot().array("a").read())


def test_an_export_is_whole_or_absent(tmp_path: Path) -> None:
    with tstore.open(tmp_path / "store").transaction() as tx:
        tx.create_array("a", (10_000,), "int64", (10_000,)).write(np.arange(10_000))
        tx.create_array("never", (4,), "int64", (2,))
    (tmp_path / "out").mkdir()
    with pytest.raises(AlreadyExists):
        exported(tmp_path / "store", tmp_path / "out")
    with pytest.raises(NotFound, match=r"chunk \(0,\) of never was never written"):
        exported(tmp_path / "store", tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["out", "store"]
    with tstore.open(tmp_path / "store").transaction() as tx:
        tx.delete("never")
    [pack] = (tmp_path / "store").rglob("pack-*")
    data = bytearray(pack.read_bytes())
    data[100] ^= 1
    pack.write_bytes(data)
    with pytest.raises(Corrupt, match="a, chunk"):
        exported(tmp_path / "store", tmp_path / "new")
    assert sorted(os.listdir(tmp_path)) == ["out", "store"]


def test_an_import_from_a_url_of_fsspec(tmp_path: Path) -> None:
    import fsspec

    root = zarr.open_group(tmp_path / "a.zarr", mode="w")
    root.create_array("x/w", shape=(4, 4), chunks=(2, 2), dtype="int32")[:] = np.arange(16).reshape(4, 4)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "a.zarr"), "/of_test_zarr_folders.zarr", recursive=True)
    try:
        for url in ("memory://of_test_zarr_folders.zarr", f"file://{tmp_path}/a.zarr"):
            asyncio.run(import_zarr(url, store := tmp_path / url.partition(":")[0]))
            assert np.array_equal(tstore.open(store).snapshot().array("x/w").read(), root["x/w"][:])
    finally:
        memory.rm("/of_test_zarr_folders.zarr", recursive=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of unclosed files
@pytest.mark.parametrize("cache", ["filecache", "simplecache", "blockcache"])
def test_an_import_through_a_cache_of_fsspec(tmp_path: Path, cache: str) -> None:
    values = np.arange(400)
    zarr.open_group(tmp_path / "a.zarr", mode="w").create_array("w", data=values, chunks=(4,))
    options = {cache: {"cache_storage": str(tmp_path / "cache")}}
    for name in ("first", "from_cache"):
        url = f"{cache}::file://{tmp_path}/a.zarr"
        asyncio.run(import_zarr(url, store := tmp_path / name, storage_options=options))
        assert np.array_equal(tstore.open(store).snapshot().array("w").read(), values)
