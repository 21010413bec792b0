"""`tstore.open` with specs of TensorStore: plain Zarr arrays read in place, locally and over HTTP."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore as async_tstore
import tstore.sync as tstore
from tests.support.fileservers import python_files
from tests.support.lazy import lazy
from tstore.convert.folder import Folder
from tstore.errors import Corrupt, InvalidArgument, Misuse, NotAStore, NotFound

ts = lazy("tensorstore")
zarr = lazy("zarr")

VALUES = np.arange(11 * 7, dtype=np.float32).reshape(11, 7)


@pytest.fixture(params=[2, 3])
def spec(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    array = zarr.create_array(
        tmp_path / "g/a", shape=(11, 7), chunks=(4, 3), dtype="float32", zarr_format=request.param, fill_value=9
    )
    array[:8] = VALUES[:8]
    driver = "zarr" if request.param == 2 else "zarr3"
    return {"driver": driver, "kvstore": {"driver": "file", "path": f"{tmp_path}/g/a/"}}


def test_values_equal_those_of_tensorstore(spec: dict[str, Any]) -> None:
    theirs = ts.open(spec).result()
    mine = tstore.open(spec)
    assert isinstance(mine, tstore.Array)
    assert (mine.shape, mine.dtype, mine.chunks, mine.fill_value) == ((11, 7), np.dtype("float32"), (4, 3), 9)
    for index in ((), (3, 2), (slice(1, 10, 3), slice(None, None, -2)), ([0, 9, 9], slice(2)), (None, ..., -1)):
        assert np.array_equal(mine[index].read(), np.asarray(theirs.read().result())[index])
    assert np.array_equal(mine.vindex[[0, 10], [1, 6]].read(), [1, 9])
    assert np.array_equal(np.asarray(mine[8:]), np.full((3, 7), 9))
    assert np.array_equal(tstore.open(theirs.spec().to_json()).read(), mine.read())
    with pytest.raises(InvalidArgument, match="selects a part"):
        tstore.open(theirs[2:5].spec().to_json())

    async def read() -> Any:
        array = await async_tstore.open(spec, "r")
        return await array[2:4].read()

    assert np.array_equal(asyncio.run(read()), VALUES[2:4])


def test_every_kind_of_location(spec: dict[str, Any], tmp_path: Path) -> None:
    driver = spec["driver"]
    with python_files(tmp_path) as url:
        for kvstore, path in [
            (f"file://{tmp_path}/g/a/", ""),
            (f"file://{tmp_path}/g", "a/"),
            ({"driver": "file", "path": f"{tmp_path}/"}, "g/a"),
            ({"driver": "http", "base_url": url, "path": "/g/a/"}, ""),
            ({"driver": "http", "base_url": f"{url}/g"}, "a"),
            (f"{url}/g/", "a"),
        ]:
            more = {"path": path, "open": True, "context": {}, "dtype": "float32"}
            array = tstore.open({"driver": driver, "kvstore": kvstore, **more})
            assert np.array_equal(array[:8].read(), VALUES[:8]), kvstore


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"driver": "n5"}, "'n5'"),
        ({"driver": None}, "driver None"),
        ({"kvstore": None}, "kvstore=None"),
        ({"kvstore": {"driver": "memory"}}, "'memory'"),
        ({"kvstore": "memory://x"}, "'memory://x'"),
        ({"kvstore": "file://a.zarr"}, "'file://a.zarr': a file URL has an absolute path"),
        ({"kvstore": {"driver": "ocdbt", "base": "file:///x"}}, "'ocdbt'"),
        ({"kvstore": {"driver": "file", "path": "/x", "extra": 1}}, "extra"),
        ({"kvstore": {"driver": "gcs", "path": "x"}}, "'bucket'"),
        ({"kvstroe": "file:///x"}, "keys: 'kvstroe'; did you mean 'kvstore'"),
        ({"drvier": "zarr3"}, "keys: 'drvier'; did you mean 'driver'"),
        ({3: "zarr3"}, "keys: 3; expected driver, kvstore, path, dtype"),
        ({"transform": {"input_exclusive_max": [3, 7]}}, "transform of the spec selects a part"),
        ({"metadata": {"shape": [3]}}, r"has the shape \[11, 7\], not that of the spec's metadata"),
        ({"schema": {}}, "'schema'; expected driver"),
        ({"create": True}, "create=True"),
        ({"open": False}, "open=False"),
        ({"delete_existing": True}, "delete_existing=True"),
        ({"assume_metadata": True}, "assume_metadata=True"),
        ({"dtype": "int8"}, "float32, not the spec's dtype 'int8'"),
        ({"path": 3}, "path=3"),
    ],
)
def test_what_is_not_supported_is_named(spec: dict[str, Any], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        tstore.open(spec | changed)


def test_a_misspelled_key_is_named_where_the_right_one_is_missing() -> None:
    with pytest.raises(InvalidArgument, match="'kvstroe'; did you mean 'kvstore'"):
        tstore.open({"driver": "zarr3", "kvstroe": "file:///x"})
    with pytest.raises(InvalidArgument, match="'diver', 'kvstor'; did you mean 'driver' and 'kvstore'"):
        tstore.open({"diver": "zarr3", "kvstor": "file:///x"})
    with pytest.raises(InvalidArgument, match=r"'file' has unsupported or missing keys.*pth"):
        tstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "pth": "/x"}})


def test_missing_and_damaged_arrays(spec: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="g/b"):
        tstore.open(spec | {"kvstore": f"file://{tmp_path}/g/b"})
    other = "zarr" if spec["driver"] == "zarr3" else "zarr3"
    with pytest.raises(NotFound, match="no array of Zarr v"):
        tstore.open(spec | {"driver": other})
    array = tstore.open(spec)
    with pytest.raises(Misuse, match="import it to change it"):
        array.write(1)
    with pytest.raises(Misuse, match="import it to change it"):
        array.resize((1, 1))
    for options in ({"mode": "r+"}, {"mode": "x"}, {"cache": str(tmp_path / "cache")}):
        with pytest.raises(InvalidArgument, match="only read"):
            tstore.open(spec, **options)  # type: ignore[arg-type]
    name = "0.0" if spec["driver"] == "zarr" else "c/0/0"
    (tmp_path / "g/a" / name).write_bytes(b"damaged")
    with pytest.raises(Corrupt, match=r"chunk \(0, 0\)"):
        array[0, 0].read()
    assert np.array_equal(array[5, 6].read(), VALUES[5, 6])


def test_a_plan_has_the_whole_files_of_the_chunks_that_exist(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    array = tstore.open(spec)[2:9, 1]
    read, get = list[tuple[str, int, int]](), Folder.get

    def recorded(self: Folder, key: str, max_size: int) -> bytes | None:
        data = get(self, key, max_size)
        if data is not None:
            read.append((key, 0, len(data)))
        return data

    monkeypatch.setattr(Folder, "get", recorded)
    plan = array.explain()
    assert read == []
    assert array.read().tolist() == [*VALUES[2:8, 1].tolist(), 9]
    assert sorted(read) == sorted(map(tuple, plan.requests))
    assert (plan.chunks, plan.bytes_wanted) == ([0, 3], 28)
    assert plan.bytes_read == sum(size for *_, size in read)


def test_a_copy_into_a_store_keeps_codecs_and_holes(spec: dict[str, Any]) -> None:
    plain = tstore.open(spec)
    store = tstore.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        tx.copy_array(plain, "whole")
        tx.copy_array(plain[::2], "every_other_row", chunks=(2, 7))
    whole = store.snapshot().array("whole")
    assert np.array_equal(whole.read(), plain.read())
    assert (whole.codecs, whole.chunks, whole.sparse) == (plain.codecs, plain.chunks, True)
    assert len(whole.explain().chunks) == len(plain.explain().chunks)
    assert np.array_equal(store.snapshot().array("every_other_row").read(), plain[::2].read())


def test_a_zarr_folder_taken_for_a_store_is_recognized(tmp_path: Path) -> None:
    zarr.create_array(tmp_path / "g/a", data=VALUES)
    (tmp_path / "g/zarr.json").write_text('{"zarr_format": 3, "node_type": "group"}')
    for mode in ("r", "a"):
        with pytest.raises(NotAStore, match="folder of Zarr: import it with tstore import"):
            tstore.open(tmp_path / "g", mode)
    with pytest.raises(
        InvalidArgument, match=r"pass a spec, such as {'driver': 'zarr3', 'kvstore': 'file:///x/a'}"
    ):
        tstore.open("file:///x/a|zarr3:")
