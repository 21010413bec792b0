"""Plain Zarr arrays that lie or have what tstore does not support: refused alike when imported and in place."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.server
import json
import os
import threading
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import tstore.sync as tstore
from tests.support.fileservers import python_files
from tests.support.fuzzing import bounded_time
from tstore.convert.folder import Folder
from tstore.convert.zarr_import import import_zarr
from tstore.errors import Corrupt, InvalidArgument, NotFound, UnsupportedFormat

LITTLE = {"name": "bytes", "configuration": {"endian": "little"}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}
V3: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4],
    "data_type": "int32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
    "chunk_key_encoding": {"name": "default"},
    "fill_value": 0,
    "codecs": [LITTLE],
}
EXMY = {"name": "exmy", "configuration": {"format": "e4m3"}}
V2: dict[str, Any] = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<i4", "order": "C", "fill_value": 0}


def sharded() -> dict[str, Any]:
    inner = {"chunk_shape": [2], "codecs": [LITTLE, GZIP], "index_codecs": [LITTLE], "index_location": "start"}
    return V3 | {"codecs": [{"name": "sharding_indexed", "configuration": inner}]}


def inner_bomb() -> bytes:
    """Return a shard of which one inner chunk of 8 bytes decodes to a MiB."""
    bomb = gzip.compress(bytes(1 << 20))
    index = [32, len(bomb), 32, len(bomb)]
    return b"".join(n.to_bytes(8, "little") for n in index) + bomb


def refuse(
    folder: Path, metadata: dict[str, Any], chunk: bytes | None, error: type[Exception], match: str
) -> None:
    v3 = metadata["zarr_format"] > 2
    (folder / "x.zarr/c").mkdir(parents=True)
    (folder / "x.zarr" / ("zarr.json" if v3 else ".zarray")).write_text(json.dumps(metadata))
    if chunk is not None:
        (folder / "x.zarr" / ("c/0" if v3 else "0")).write_bytes(chunk)
    with pytest.raises(error, match=match) as imported:
        asyncio.run(import_zarr(folder / "x.zarr", folder / "store"))
    driver = "zarr3" if v3 else "zarr"
    with pytest.raises(error, match=match) as opened:
        tstore.open({"driver": driver, "kvstore": f"file://{folder}/x.zarr/"})[1:].read()
    assert str(opened.value) == str(imported.value)
    assert str(folder / "x.zarr") in str(opened.value)
    if (folder / "store").exists():
        assert tstore.open(folder / "store", "r").snapshot().version == 0


@pytest.mark.parametrize(
    ("metadata", "error", "match"),
    [
        (V3 | {"zarr_format": 4}, UnsupportedFormat, "Zarr format 4; expected 2 or 3"),
        (V2 | {"zarr_format": 1}, UnsupportedFormat, "not of Zarr 1"),
        (V3 | {"codecs": [LITTLE, {"name": "fancy"}]}, UnsupportedFormat, "codec 'fancy' is not supported"),
        (V3 | {"codecs": [LITTLE, {"name": "imagecodecs_jpeg"}]}, UnsupportedFormat, "the package imagecodecs"),
        (V3 | {"codecs": [{"name": "omfiles.pfor"}]}, UnsupportedFormat, "the package omfiles"),
        (V3 | {"codecs": [LITTLE, {"name": "numcodecs.pickle"}]}, UnsupportedFormat, "numcodecs.pickle"),
        (V2 | {"compressor": {"id": "imagecodecs_jpeg2k"}}, UnsupportedFormat, "the package imagecodecs"),
        (V2 | {"compressor": {"id": "jpegxl"}}, UnsupportedFormat, "'numcodecs.jpegxl'"),
        (V2 | {"order": "K"}, UnsupportedFormat, "order 'K'"),
        (V3 | {"chunk_grid": {"name": "rectilinear"}}, UnsupportedFormat, "chunk grid 'rectilinear'"),
        (V3 | {"data_type": "float24"}, UnsupportedFormat, "data type 'float24'"),
        (V3 | {"data_type": {"name": "a.b", "configuration": {"c": 1}}}, UnsupportedFormat, "data type 'a.b'"),
        (V3 | {"data_type": "int1"}, UnsupportedFormat, "data type 'int1'"),
        (V3 | {"data_type": "int4", "fill_value": 8}, Corrupt, "8 is not a value of int4"),
        (
            V3 | {"data_type": "float4_e2m1fn", "fill_value": "NaN"},
            Corrupt,
            "'NaN' is not a value of float4",
        ),
        (V3 | {"data_type": "string", "fill_value": ""}, UnsupportedFormat, "encoded by 'vlen-utf8'"),
        (V3 | {"data_type": "string"}, Corrupt, "0 is not a string"),
        (V2 | {"dtype": "|O", "filters": [{"id": "pickle"}]}, UnsupportedFormat, r"filters \['pickle'\]"),
        (V2 | {"dtype": "|O"}, UnsupportedFormat, "expected the filter vlen-utf8"),
        (V2 | {"dtype": "<i9"}, UnsupportedFormat, "'<i9' is unknown"),
        (V3 | {"new": {"name": "a.b"}}, UnsupportedFormat, "unsupported key 'new'"),
        (V3 | {"new": {"name": "a.b", "must_understand": True}}, UnsupportedFormat, "unsupported key 'new'"),
        (V3 | {"storage_transformers": [{"name": "t"}]}, UnsupportedFormat, "storage transformers"),
        (V3 | {"shape": [-1]}, Corrupt, "length below 0"),
        (V3 | {"fill_value": "x"}, Corrupt, "'x' is not a value of int32"),
        (
            V3 | {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0]}}},
            Corrupt,
            r"chunks \(0,\) of an array of shape \(4,\) have a length below 1",
        ),
        (
            V3 | {"data_type": "float32", "fill_value": "NaN", "codecs": [EXMY]},
            Corrupt,
            "fill value nan can't be encoded, because it is not finite",
        ),
        (
            V3 | {"codecs": [LITTLE, GZIP | {"note": "x" * (1 << 20)}]},
            UnsupportedFormat,
            "codecs of more than .* bytes are not supported",
        ),
        (V3 | {"attributes": [1]}, Corrupt, "attributes are not a JSON object"),
    ],
)
def test_metadata(tmp_path: Path, metadata: dict[str, Any], error: type[Exception], match: str) -> None:
    refuse(tmp_path, metadata, None, error, match)


def test_an_extension_that_need_not_be_understood(tmp_path: Path) -> None:
    (tmp_path / "zarr.json").write_text(json.dumps(V3 | {"new": {"name": "a.b", "must_understand": False}}))
    assert tstore.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/"}).read().tolist() == [0] * 4


@pytest.mark.parametrize(
    ("data_type", "fill", "expected"),
    [
        ("float32", "NaN", "nan"),
        ("float32", "-Infinity", "-inf"),
        ("int32", "5.0", "5"),
        ("int16", "-2e3", "-2000"),
    ],
)
def test_fill_values_as_zarr_python_reads_them(tmp_path: Path, data_type: str, fill: str, expected: str) -> None:
    """Bare NaN and Infinity are no JSON, and integers have no fraction, but other programs write them."""
    text = json.dumps(V3 | {"data_type": data_type, "fill_value": "?"}).replace('"?"', fill)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "zarr.json").write_text(text)
    assert str(zarr.open_array(tmp_path / "x")[0]) == expected
    assert str(tstore.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/x/"})[0].read()) == expected
    asyncio.run(import_zarr(tmp_path / "x", tmp_path / "store"))
    assert str(tstore.open(tmp_path / "store").snapshot().array("x")[0].read()) == expected


COMPRESSED = V3 | {"codecs": [LITTLE, GZIP]}
ZLIB = V2 | {"compressor": {"id": "zlib", "level": 9}}
CHUNKS = {
    "short": (V3, bytes(15), "expected 16 encoded bytes, got 15"),
    "empty": (V3, b"", "expected 16 encoded bytes, got 0"),
    "long": (V3, bytes(17), "more than 16 bytes"),
    "decodes to less": (COMPRESSED, gzip.compress(bytes(15)), "expected 16 decoded bytes, got 15"),
    "decodes to more": (COMPRESSED, gzip.compress(bytes(17)), "expected at most 16 decoded bytes"),
    "bomb": (COMPRESSED, gzip.compress(bytes(2 << 20)), "expected at most 16 decoded bytes"),
    "long bomb": (COMPRESSED, gzip.compress(bytes(8 << 20)), "more than 4114 bytes"),
    "not compressed": (COMPRESSED, b"no gzip", "gzip bytes do not decode"),
    "bomb in a shard": (sharded(), inner_bomb(), "expected at most 8 decoded bytes"),
    "v2, decodes to less": (ZLIB, zlib.compress(bytes(15)), "expected 16 decoded bytes"),
    "v2, bomb": (ZLIB, zlib.compress(bytes(2 << 20)), "16 decoded bytes"),
}


@pytest.mark.parametrize("name", CHUNKS)
def test_chunks(tmp_path: Path, name: str) -> None:
    metadata, chunk, match = CHUNKS[name]
    refuse(tmp_path, metadata, chunk, Corrupt, match)


def write_zarr(folder: Path, **files: Any) -> None:
    for name, contents in files.items():
        path = folder / name.replace("__", "/").replace("zarr_json", "zarr.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(contents if isinstance(contents, str) else json.dumps(contents))


GROUP: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {}}


def test_a_linked_array_is_imported_and_a_linked_group_refused(tmp_path: Path) -> None:
    write_zarr(tmp_path / "elsewhere", zarr_json=V3, c__0="0123456789abcdef")
    write_zarr(tmp_path / "x.zarr", zarr_json=GROUP, a__zarr_json=GROUP)
    (tmp_path / "x.zarr/a/w").symlink_to(tmp_path / "elsewhere")
    asyncio.run(import_zarr(tmp_path / "x.zarr", tmp_path / "store"))
    assert tstore.open(tmp_path / "store").snapshot().array("a/w").read().tobytes() == b"0123456789abcdef"
    (tmp_path / "x.zarr/a/again").symlink_to("..")
    with pytest.raises(UnsupportedFormat, match="a/again is a symbolic link to a folder that is not an array"):
        asyncio.run(import_zarr(tmp_path / "x.zarr", tmp_path / "other"))


def test_a_chunk_that_is_a_broken_link_is_not_a_missing_chunk(tmp_path: Path) -> None:
    write_zarr(tmp_path / "x.zarr", zarr_json=V3)
    (tmp_path / "x.zarr/c").mkdir()
    (tmp_path / "x.zarr/c/0").symlink_to("annexed")
    with pytest.raises(NotFound, match="c/0 is a symbolic link to a file that does not exist"):
        asyncio.run(import_zarr(tmp_path / "x.zarr", tmp_path / "store"))


@pytest.mark.parametrize("frame", ["502a4d1800000000", "28b52ffd2000010000"], ids=["skippable", "empty"])
def test_millions_of_empty_zstd_frames(tmp_path: Path, frame: str) -> None:
    grid = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 23]}}}
    write_zarr(tmp_path / "x.zarr", zarr_json=V3 | grid | {"codecs": [LITTLE, "zstd"]}, c__0="")
    (tmp_path / "x.zarr/c/0").write_bytes(bytes.fromhex(frame) * (1 << 20))
    with bounded_time(1), pytest.raises(Corrupt, match="more than 1024 zstd frames are empty"):
        tstore.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/x.zarr/"}).read()


def test_a_chunk_file_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "x.zarr"
    (folder / "c").mkdir(parents=True)
    (folder / "zarr.json").write_text(json.dumps(V3))
    (folder / "c/0").touch()
    os.truncate(folder / "c/0", 256 << 20)  # a hole, which takes no space
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match=r"c/0 has more than 16 bytes"):
            tstore.open({"driver": "zarr3", "kvstore": f"file://{folder}/"}).read()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_a_chunk_larger_than_memory(tmp_path: Path) -> None:
    huge = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 45]}}}
    write_zarr(tmp_path / "x.zarr", zarr_json=COMPRESSED | huge, c__0="x")
    with pytest.raises(InvalidArgument, match=r"chunk \(0,\): too little memory to decode it"):
        asyncio.run(import_zarr(tmp_path / "x.zarr", tmp_path / "store"))


@pytest.mark.parametrize("node", [V3, GROUP])
def test_attributes_that_cannot_be_stored(tmp_path: Path, node: dict[str, Any]) -> None:
    (tmp_path / "deep.zarr").mkdir()
    deep = json.dumps(node | {"attributes": 0})[:-2] + '{"a":' * 600 + "0" + "}" * 601
    (tmp_path / "deep.zarr/zarr.json").write_text(deep)
    with pytest.raises(Corrupt, match="nested too deep"):
        asyncio.run(import_zarr(tmp_path / "deep.zarr", tmp_path / "store"))
    write_zarr(tmp_path / "text.zarr", zarr_json=node | {"attributes": {"a": "\ud800"}})
    with pytest.raises(Corrupt, match="surrogates not allowed"):
        asyncio.run(import_zarr(tmp_path / "text.zarr", tmp_path / "store"))


@pytest.mark.parametrize("dtype", ["<M8[ns]", "<m8[s]"])
def test_missing_moments_of_v2_are_no_moments(tmp_path: Path, dtype: str) -> None:
    (tmp_path / ".zarray").write_text(json.dumps(V2 | {"dtype": dtype, "fill_value": None}))
    values = tstore.open({"driver": "zarr", "kvstore": f"file://{tmp_path}/"}).read()
    assert np.isnat(values).all()


def test_files_that_a_server_lacks_are_missing_chunks(tmp_path: Path) -> None:
    """The error of fsspec for a missing file has no errno, unlike that of a local one."""
    (tmp_path / "x.zarr/a").mkdir(parents=True)
    (tmp_path / "x.zarr/.zgroup").write_text('{"zarr_format": 2}')
    metadata = {"a/.zarray": V2 | {"shape": [8]}, ".zgroup": {"zarr_format": 2}}
    (tmp_path / "x.zarr/.zmetadata").write_text(json.dumps({"metadata": metadata}))
    (tmp_path / "x.zarr/a/.zarray").write_text(json.dumps(V2 | {"shape": [8]}))
    (tmp_path / "x.zarr/a/1").write_bytes(bytes([1, 0, 0, 0] * 4))
    with python_files(tmp_path) as url:
        plain = tstore.open({"driver": "zarr", "kvstore": f"{url}/x.zarr/a"})
        assert plain.read().tolist() == [0] * 4 + [1] * 4
        asyncio.run(import_zarr(f"{url}/x.zarr", tmp_path / "store"))
    assert tstore.open(tmp_path / "store").snapshot().array("a").read().tolist() == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    "consolidated", [[1], "x", {"metadata": [1]}, {"metadata": [[1, V3], ["a", V3]]}, {"metadata": {"a": None}}]
)
def test_consolidated_metadata_of_the_wrong_type(tmp_path: Path, consolidated: Any) -> None:
    (tmp_path / "zarr.json").write_text(json.dumps(GROUP | {"consolidated_metadata": consolidated}))
    with python_files(tmp_path) as url, pytest.raises(Corrupt, match="metadata"):
        asyncio.run(import_zarr(url, tmp_path / "store"))


@pytest.mark.parametrize(
    ("kvstore", "match"),
    [
        ("file:///a%00b", "has a NUL"),
        ("http://[", r"kvstore 'http://\[' is not a URL"),
        ({"driver": "http", "base_url": "http://localhost:1", "path": 5}, "path=5 in a kvstore: expected text"),
        ({"driver": "file", "path": ["x"]}, r"path=\['x'\] in a kvstore: expected text"),
        ({"driver": "file", "path": "\ud800"}, "lone surrogates"),
        (["file"], "kvstore=.*expected a URL"),
    ],
)
def test_specs_that_can_name_no_array(kvstore: Any, match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        tstore.open({"driver": "zarr3", "kvstore": kvstore})
    with pytest.raises(InvalidArgument, match="can't be opened"):
        tstore.open({"driver": ["zarr3"], "kvstore": "file:///a"})


def test_a_path_of_the_driver_file_is_no_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zarr(tmp_path / "http:/x", zarr_json=V3)
    monkeypatch.chdir(tmp_path)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": "http://x"}}
    assert tstore.open(spec).shape == (4,)


@pytest.mark.parametrize("length", [0, 4])
def test_an_array_without_chunks_is_sparse_and_grows(tmp_path: Path, length: int) -> None:
    write_zarr(tmp_path / "x.zarr", zarr_json=V3 | {"shape": [length]})
    asyncio.run(import_zarr(tmp_path / "x.zarr", tmp_path / "store"))
    with tstore.open(tmp_path / "store").transaction() as transaction:
        transaction.array("x").resize((8,))
    assert tstore.open(tmp_path / "store").snapshot().array("x").read().tolist() == [0] * 8


def test_links_among_the_folders_of_chunks_make_no_endless_paths(tmp_path: Path) -> None:
    axes = 30
    grid = {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1] * axes}}}
    write_zarr(tmp_path / "x.zarr", zarr_json=V3 | {"shape": [2] * axes} | grid, elsewhere__0__0="x")
    (tmp_path / "x.zarr/c").symlink_to("elsewhere")  # one link is followed
    for name in "01":
        (tmp_path / "x.zarr/elsewhere" / f"{name}{name}").symlink_to(".")
    with (
        bounded_time(5),
        pytest.raises(UnsupportedFormat, match="is a second symbolic link to one folder"),
    ):
        asyncio.run(import_zarr(tmp_path / "x.zarr", tmp_path / "store"))


class _Endless(http.server.BaseHTTPRequestHandler):
    """Send 256 MiB, whatever is asked for."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(256):
                self.wfile.write(bytes(1 << 20))

    def log_message(self, *arguments: Any) -> None:
        pass


def test_a_server_that_sends_more_than_a_chunk_is_cut_off() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        folder = Folder(f"http://127.0.0.1:{server.server_port}")
        tracemalloc.start()
        try:
            with pytest.raises(Corrupt, match="more than 16 bytes"):
                folder.get("c/0", 16)
            assert tracemalloc.get_traced_memory()[1] < 32 << 20
        finally:
            tracemalloc.stop()
            server.shutdown()


def test_an_array_of_billions_of_chunks_on_a_server_without_listings(tmp_path: Path) -> None:
    write_zarr(tmp_path / "x.zarr", zarr_json=V3 | {"shape": [1 << 40]})
    with python_files(tmp_path) as url, bounded_time(5):
        with pytest.raises(UnsupportedFormat, match="274,877,906,944 chunks, on a server that can't list"):
            asyncio.run(import_zarr(f"{url}/x.zarr", tmp_path / "store"))


def test_a_shard_of_many_inner_chunks_takes_little_memory(tmp_path: Path) -> None:
    count = 1 << 15
    inner = {"chunk_shape": [1], "codecs": [{"name": "bytes"}], "index_codecs": [LITTLE]}
    metadata = V3 | {"data_type": "uint8", "shape": [count]}
    metadata |= {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [count]}}}
    write_zarr(tmp_path, zarr_json=metadata | {"codecs": [{"name": "sharding_indexed", "configuration": inner}]})
    (tmp_path / "c").mkdir()
    (tmp_path / "c/0").write_bytes(b"\7" + np.tile(np.array([0, 1], "<u8"), count).tobytes())
    array = tstore.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/"})
    tracemalloc.start()
    try:
        assert (array.read() == 7).all()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20  # the index is read, and decoded: 0.5 MiB each
    finally:
        tracemalloc.stop()
