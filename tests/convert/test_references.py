"""References in kerchunk's format: fsspec and zarr-python read a version in place, in a process without tstore."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import tstore as async_tstore
import tstore.sync as tstore
from tests.support.fileservers import aiohttp_files
from tests.support.fuzzing import bounded_time
from tests.support.http_server import READ, everybody
from tests.support.lazy import lazy
from tests.support.thresholds import Thresholds
from tstore.convert.references import export_references, reader_options
from tstore.core.format.frame import link_of, linked
from tstore.core.format.layout import commit_key
from tstore.core.format.objects.encoding import decode, encode
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.snapshot import Snapshot
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound
from tstore.service.server import Server

zarr = lazy("zarr")
SHARDED = [
    {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [2, 5],
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}},
                {"name": "zstd", "configuration": {"level": 1, "checksum": False}},
            ],
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        },
    }
]
READER = """
import hashlib, importlib.util, json, os, sys, traceback, warnings
sys.modules["tstore"] = None  # an import of it fails
import fsspec.implementations.http, fsspec.implementations.reference, zarr
if importlib.util.find_spec("fastparquet"):
    import fastparquet
warnings.filterwarnings("ignore", "The .fastparquet. engine")
warnings.filterwarnings("ignore", "Both zarr.json")

def digest(values):
    return hashlib.sha256(values.tobytes()).hexdigest()

def read(options):
    arrays = {}
    for path, node in zarr.open_group("reference://", mode="r", storage_options=options).members(max_depth=None):
        if isinstance(node, zarr.Array):
            values = node[...]
            part = node[-3:, 1:7] if node.ndim == 2 else node[...]
            shape = list(values.shape)
            arrays[path] = [str(values.dtype), shape, digest(values), digest(part), dict(node.attrs)]
        else:
            arrays[path] = dict(node.attrs)
    return arrays

for line in sys.stdin:
    if os.fork():
        os.wait()
        continue
    try:
        print(json.dumps({"read": read(json.loads(line))}), flush=True)
    except BaseException:
        print(json.dumps({"error": traceback.format_exc()}), flush=True)
    os._exit(0)
"""

Reader = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def read_by_zarr() -> Iterator[Reader]:
    """Yield a function that reads in a process of its own, forked from one that has only imported zarr-python."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-I", "-c", READER], **pipes) as process:  # type: ignore[call-overload]

        def ask(options: dict[str, Any]) -> Any:
            process.stdin.write(json.dumps(options) + "\n")
            process.stdin.flush()
            reply = json.loads(process.stdout.readline())
            assert "error" not in reply, reply["error"]
            return reply["read"]

        yield ask
        process.stdin.close()


def expected(store: Any) -> Any:
    snapshot, read = tstore.open(store, "r").snapshot(), dict[str, Any]()
    for path in snapshot.paths():
        array = snapshot.array(path)
        values = array.read()
        part = values[-3:, 1:7] if values.ndim == 2 else values
        digests = [sha256(np.ascontiguousarray(v).tobytes()).hexdigest() for v in (values, part)]
        read[path] = [str(values.dtype), list(values.shape), *digests, array.attributes]
        for above in range(1, len(path.split("/"))):
            group = "/".join(path.split("/")[:above])
            read[group] = snapshot.attributes(group)
    return read


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with arrays in packs and in records, in two versions."""
    rng = np.random.default_rng(0)
    url = tmp_path / "with space" / "store"
    values = rng.normal(size=(50, 40)).astype(np.float32)
    with tstore.open(url).transaction() as tx:
        tx.create_group("layers/0", {"kind": "mlp"})
        tx.create_array("layers/0/raw", (50, 40), "float32", (7, 40), attributes={"unit": "m"}).write(values)
        tx.create_array("layers/0/blosc", (50, 40), "float32", (20, 9), codecs="lossless").write(values)
        tx.create_array("sharded", (50, 40), "int16", (10, 20), codecs=SHARDED).write((values * 9).astype("i2"))
        tx.create_array("complex", (900,), "complex128", (100,)).write(rng.normal(size=900) * 1j)
        tx.create_array("empty", (0, 3), "float64")
    with tstore.open(url).transaction() as tx:  # small enough to be in its record
        tx.create_array("scalar", (), "float64").write(2.5)
        tx.create_array("tiny", (4, 7), "uint8", (2, 7)).write(9)
        tx.array("layers/0/raw")[:7].write(1.0)
    return url


def add_sparse(store: Path) -> None:
    with tstore.open(store).transaction() as tx:
        sparse = tx.create_array("sparse", (60, 60), "int64", (10, 20), sparse=True, fill_value=5)
        sparse[10:30].write(3)
        sparse[55:, 50:].write(2)
        tx.create_array("unwritten", (8, 8), "int8", (4, 4), sparse=True, fill_value=-1)


def write(store: Any, file: Path, **options: Any) -> Any:
    return asyncio.run(export_references(store, file, **options))


@pytest.mark.parametrize("name", ["refs.json", "refs.parq", "refs.parquet"])
def test_a_local_store(store: Path, tmp_path: Path, name: str, read_by_zarr: Reader) -> None:
    if not name.endswith(".json"):
        pytest.importorskip("fastparquet")
    wanted = expected(store)
    report = write(store, tmp_path / name)
    assert (report.version, report.tensors) == (2, len(tstore.open(store, "r").snapshot().paths()))
    with tstore.open(store).transaction() as tx:
        tx.array("layers/0/raw").write(0.0)  # the file stays with its version
    assert read_by_zarr({"fo": str(tmp_path / name), **reader_options(str(store))}) == wanted


def test_json_has_small_chunks_and_names_each_other_by_a_range(
    store: Path, tmp_path: Path, read_by_zarr: Reader
) -> None:
    write(store, tmp_path / "refs.json")
    document = json.loads((tmp_path / "refs.json").read_text())
    assert (document["version"], document["templates"]) == (1, {"store": f"file://{store}"})
    refs = document["refs"]
    assert refs["scalar/c"].startswith("base64:")
    assert refs["tiny/c/0/0"].startswith("base64:")
    url, offset, length = refs["complex/c/3"]
    pack = (store / url.removeprefix("{{store}}/")).read_bytes()
    assert (
        pack[offset : offset + length] == tstore.open(store).snapshot().array("complex")[300:400].read().tobytes()
    )
    assert read_by_zarr({"fo": str(tmp_path / "refs.json")}) == expected(store)  # the protocol is in the file too


@pytest.mark.parametrize("name", ["refs.json", "refs.parq"])
def test_arrays_that_zarr_cannot_open_hide_no_others(
    store: Path, tmp_path: Path, name: str, read_by_zarr: Reader
) -> None:
    if not name.endswith(".json"):
        pytest.importorskip("fastparquet")
    wanted = expected(store)
    with tstore.open(store).transaction() as tx:
        tx.create_array("layers/0/small", (50, 40), "bfloat16", (7, 40)).write(1.0)
        tx.create_array("layers/0/codes", (8,), "int4").write(1)
        tx.create_array("layers/0/eighths", (8,), "float8_e5m2").write(1)
        tx.create_array("layers/0/pair", (8,), np.dtype([("a", "i4"), ("b", "bfloat16")]), sparse=True)
        tx.create_array("back\\slash/a", (8,), "int8").write(1)
    assert write(store, tmp_path / name).unlisted == [
        "back\\slash/a",
        *(f"layers/0/{array}" for array in ("codes", "eighths", "pair", "small")),
    ]
    options = {"fo": str(tmp_path / name), **reader_options(str(store))}
    assert read_by_zarr(options) == wanted
    for group in ("layers", "layers/0"):
        opened = zarr.open_group("reference://", path=group, mode="r", storage_options=options)
        below = {path.removeprefix(f"{group}/") for path in wanted if path.startswith(f"{group}/")}
        assert {path for path, _ in opened.members(max_depth=None)} == below


@pytest.mark.parametrize("name", ["refs.json", "refs.parq"])
def test_missing_chunks_have_the_fill_value(store: Path, tmp_path: Path, name: str, read_by_zarr: Reader) -> None:
    if not name.endswith(".json"):
        pytest.importorskip("fastparquet")
    add_sparse(store)
    write(store, tmp_path / name)
    options = {"fo": str(tmp_path / name), **reader_options(str(store))}
    assert read_by_zarr(options) == expected(store)


def test_a_moved_store_by_another_template(store: Path, tmp_path: Path, read_by_zarr: Reader) -> None:
    wanted = expected(store)
    write(store, tmp_path / "refs.json")
    store.rename(tmp_path / "moved")
    options = {"fo": str(tmp_path / "refs.json"), "template_overrides": {"store": f"file://{tmp_path}/moved"}}
    assert read_by_zarr(options) == wanted


def test_braces_in_the_path_of_a_store_are_no_template(store: Path, tmp_path: Path, read_by_zarr: Reader) -> None:
    moved = tmp_path / "a{{c}}b"
    store.rename(moved)
    write(moved, tmp_path / "refs.json")
    assert read_by_zarr({"fo": str(tmp_path / "refs.json")}) == expected(moved)


@pytest.mark.parametrize("name", ["refs.json", "refs.parq"])
async def test_over_http(store: Path, tmp_path: Path, name: str, read_by_zarr: Reader) -> None:
    if not name.endswith(".json"):
        pytest.importorskip("fastparquet")
    wanted = await asyncio.to_thread(expected, store)
    async with aiohttp_files(tmp_path) as url:
        served = f"{url}/with space/store"
        await export_references(served, tmp_path / name)
        options = {"fo": str(tmp_path / name), **reader_options(served)}
        assert await asyncio.to_thread(read_by_zarr, options) == wanted
    async with Server(store, access=None) as server:
        await export_references(server.url, tmp_path / f"served-{name}")
        options = {"fo": str(tmp_path / f"served-{name}"), **reader_options(server.url)}
        assert await asyncio.to_thread(read_by_zarr, options) == wanted


@pytest.mark.parametrize("name", ["refs.json", "refs.parq"])
async def test_a_token_is_passed_by_readers_and_is_not_in_the_file(
    store: Path, tmp_path: Path, name: str, read_by_zarr: Reader
) -> None:
    if not name.endswith(".json"):
        pytest.importorskip("fastparquet")
    wanted = await asyncio.to_thread(expected, store)
    async with Server(store, access=everybody()) as server:
        opened = await async_tstore.open(server.url, "r", storage_options={"token": READ})
        out = tmp_path / name
        await export_references(opened, out)
        files = [out] if out.is_file() else [p for p in out.rglob("*") if p.is_file()]
        assert files
        assert not any(READ.encode() in file.read_bytes() for file in files)
        options = {"fo": str(out), **reader_options(server.url)}
        with pytest.raises(AssertionError, match="failed to fetch target"):
            await asyncio.to_thread(read_by_zarr, options)
        options["remote_options"]["client_kwargs"] = {"headers": {"Authorization": f"Bearer {READ}"}}
        assert await asyncio.to_thread(read_by_zarr, options) == wanted
        await opened.close()


def test_exmy_arrays_are_refused_unless_kept(tmp_path: Path, read_by_zarr: Reader) -> None:
    values = np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30)
    with tstore.open(tmp_path / "store").transaction() as tx:
        tx.create_array("a/q", values.shape, "float32", (8, 30), codecs="e4m3").write(values)
    with pytest.raises(InvalidArgument, match=r"a/q is in an eXmY format.*--keep-exmy.*Zarr folder"):
        write(tmp_path / "store", tmp_path / "refs.json")
    assert not (tmp_path / "refs.json").exists()
    write(tmp_path / "store", tmp_path / "refs.json", keep_exmy=True)
    assert read_by_zarr({"fo": str(tmp_path / "refs.json")}) == expected(tmp_path / "store")  # with exmy's codec


def test_what_is_refused_leaves_nothing(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("refs", "refs.zarr", "refs.json/", "a.json.parq", "refs.kerchunk"):
        with pytest.raises(InvalidArgument, match=r"ends in \.json, or in \.parq"):
            write(store, f"{tmp_path}/{name}")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "fastparquet", None)
    with pytest.raises(InvalidArgument, match="need the package fastparquet, which is not installed"):
        write(store, tmp_path / "refs.parq")
    with tstore.open("memory://references").transaction() as tx:
        tx.create_array("a", (2,), "int8").write(1)
    with pytest.raises(InvalidArgument, match="memory://references"):
        write("memory://references", tmp_path / "refs.json")
    with tstore.open(tmp_path / "dense").transaction() as tx:
        tx.create_array("a", (4000,), "int64", (1000,))[:2000].write(1)
    with pytest.raises(NotFound, match=r"chunk \(2,\) of a was never written"):
        write(tmp_path / "dense", tmp_path / "refs.json")
    (tmp_path / "refs.json").write_text("mine")
    with pytest.raises(AlreadyExists, match="already exists"):
        write(store, tmp_path / "refs.json")
    assert (tmp_path / "refs.json").read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["dense", "refs.json", "with space"]


@pytest.mark.parametrize("name", ["refs.json", "refs.parq"])
def test_a_chunk_in_a_record_is_verified_before_it_is_copied(store: Path, tmp_path: Path, name: str) -> None:
    """The record is intact, but what it has of a chunk is not what its checksum says."""
    if not name.endswith(".json"):
        pytest.importorskip("fastparquet")
    path = store / commit_key(2)
    data = path.read_bytes()
    record = decode(data, Record)
    [manifest] = record.manifests
    assert isinstance(manifest, Manifest)
    damaged = tuple(bytes([chunk[0] ^ 1]) + chunk[1:] for chunk in manifest.inline)
    forged = encode(replace(record, manifests=(replace(manifest, inline=damaged),)))
    path.write_bytes(linked(forged, link_of(data)))
    with pytest.raises(Corrupt, match="chunk number 0: checksum mismatch"):
        write(store, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_many_chunks_in_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds, read_by_zarr: Reader
) -> None:
    pytest.importorskip("fastparquet")
    from tstore.convert import references

    monkeypatch.setattr(references, "_RECORD", 7)
    thresholds(_ROUND=5)
    values = np.arange(3600, dtype=np.int32).reshape(60, 60)
    with tstore.open(tmp_path / "store").transaction() as tx:
        tx.create_array("a", (60, 60), "int32", (9, 13)).write(values)
        sparse = tx.create_array("sparse", (600,), "int32", (10,), sparse=True, fill_value=7)
        sparse[:70].write(1)  # all chunks of the first file, none of the second, some of later ones
        sparse[235:271].write(2)
    for name in ("refs.parq", "refs.json"):
        write(tmp_path / "store", tmp_path / name)
        options = {"fo": str(tmp_path / name), "remote_protocol": "file"}
        assert read_by_zarr(options) == expected(tmp_path / "store")
    assert len(list((tmp_path / "refs.parq/a").iterdir())) == 5
    assert {p.name for p in (tmp_path / "refs.parq/sparse").iterdir()} == {f"refs.{n}.parq" for n in (0, 3)}


@pytest.mark.parametrize("name", ["refs.json", "refs.parq"])
async def test_few_references_are_in_memory_at_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await async_tstore.open(tmp_path / "store")
    async with store.transaction() as tx:
        await (await tx.create_array("a", (250_000,), "u1", (1,))).write(1)
    rounds, references = [], Snapshot.references

    async def counted(self: Snapshot, path: str, numbers: range) -> Any:
        rounds.append(len(numbers))
        return await references(self, path, numbers)

    monkeypatch.setattr(Snapshot, "references", counted)
    await export_references(store, tmp_path / name)
    assert sum(rounds) == 250_000
    assert max(rounds) <= 100_000


@pytest.mark.filterwarnings("ignore:Both zarr.json", "ignore:The .fastparquet. engine")
@pytest.mark.parametrize("name", ["refs.json", "refs.parq"])
def test_a_sparse_array_of_trillions_of_chunks(tmp_path: Path, name: str) -> None:
    if not name.endswith(".json"):
        pytest.importorskip("fastparquet")
    with tstore.open(tmp_path / "store").transaction() as tx:
        array = tx.create_array("a", (1 << 20,) * 3, "uint8", (64,) * 3, sparse=True)
        array[-1, 70:100, 60:70].write(3)
    with bounded_time(10):
        write(tmp_path / "store", tmp_path / name)
    options = {"fo": str(tmp_path / name), "asynchronous": True, **reader_options(str(tmp_path / "store"))}
    read = zarr.open_array("reference://", path="a", mode="r", storage_options=options)
    assert read[-1, 69:101, 60].tolist() == [0, *[3] * 30, 0]
    assert read[5, 5, 5] == 0
