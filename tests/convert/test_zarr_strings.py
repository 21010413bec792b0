"""Strings and bytes of variable length in plain Zarr folders, with zarr-python's bytes both ways."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore.sync as tstore
from tests.support.lazy import lazy
from tstore.convert.zarr_export import export_zarr
from tstore.convert.zarr_import import import_zarr
from tstore.zarr import ZarrStore

zarr = lazy("zarr")
pytestmark = pytest.mark.filterwarnings("ignore:The data type:FutureWarning", "ignore::Warning")

STRINGS = np.array([["a", "bc", ""], ["é" * 300, "", "😀"], ["x", "y\0", "z"], ["", "", ""]], object)
BYTES = np.array(
    [[b"a\0", b"", b"ccc"], [b"\xff" * 300, b"", b"1"], [b"x", b"y\0", b"z"], [b"", b"", b""]], object
)


def options() -> dict[str, dict[str, Any]]:
    return {
        "default": {},
        "plain": {"compressors": None},
        "blosc": {"compressors": zarr.codecs.BloscCodec(typesize=1, cname="lz4", shuffle="noshuffle")},
        "shards": {"shards": (4, 2)},
    }


def written(folder: Path, zarr_format: int) -> Any:
    """Write arrays with zarr-python; in some, a chunk is missing."""
    root = zarr.open_group(folder, mode="w", zarr_format=zarr_format)
    cases = options() if zarr_format == 3 else {"default": {}, "plain": {"compressors": None}, "F": {"order": "F"}}
    for name, more in cases.items():
        for kind, values, dtype in (
            ("s", STRINGS, str),
            ("b", BYTES, zarr.dtype.VariableLengthBytes()),
        ):
            array = root.create_array(f"{kind}_{name}", shape=(5, 3), chunks=(2, 2), dtype=dtype, **more)
            array[:4] = values
    return root


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def equal(mine: Any, theirs: Any) -> bool:
    mine, theirs = np.asarray(mine), np.asarray(theirs)
    return (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) and mine.tolist() == theirs.tolist()


@pytest.mark.parametrize("zarr_format", [3, 2])
def test_what_zarr_writes_is_read_imported_and_exported(tmp_path: Path, zarr_format: int) -> None:
    root = written(tmp_path / "a.zarr", zarr_format)
    asyncio.run(import_zarr(tmp_path / "a.zarr", tmp_path / "store"))
    snapshot = tstore.open(tmp_path / "store", "r").snapshot()
    asyncio.run(export_zarr(tmp_path / "store", tmp_path / "b.zarr"))
    exported = zarr.open_group(tmp_path / "b.zarr", mode="r")
    for path in snapshot.paths():
        values = root[path][...]
        driver = "zarr3" if zarr_format == 3 else "zarr"
        in_place = tstore.open({"driver": driver, "kvstore": f"file://{tmp_path}/a.zarr/{path}/"})
        assert equal(in_place.read(), values), path
        assert equal(snapshot.array(path).read(), values), path
        assert equal(zarr.open_array(ZarrStore(snapshot), path=path, mode="r")[...], values), path
        assert equal(exported[path][...], values), path
    if zarr_format == 3:
        mine, theirs = files_of(tmp_path / "b.zarr"), files_of(tmp_path / "a.zarr")
        assert {k: v for k, v in mine.items() if "/c/" in k} == {k: v for k, v in theirs.items() if "/c/" in k}


def test_what_we_write_has_the_bytes_and_the_metadata_of_zarr(tmp_path: Path) -> None:
    written(tmp_path / "a.zarr", 3)
    theirs = files_of(tmp_path / "a.zarr")
    with tstore.open(tmp_path / "store").transaction() as tx:
        for name in {key.partition("/")[0] for key in theirs} - {"zarr.json"}:
            fields = json.loads(theirs[f"{name}/zarr.json"])
            chunks = fields["chunk_grid"]["configuration"]["chunk_shape"]
            codecs = fields["codecs"]
            array = tx.create_array(name, fields["shape"], fields["data_type"], chunks, codecs, sparse=True)
            array[:4].write(STRINGS if name.startswith("s") else BYTES)
    asyncio.run(export_zarr(tmp_path / "store", tmp_path / "b.zarr"))
    mine = files_of(tmp_path / "b.zarr")
    for key, data in theirs.items():
        if key.endswith("zarr.json"):
            ours = json.loads(mine[key])
            kept = {
                k: v
                for k, v in json.loads(data).items()
                if k not in ("storage_transformers", "consolidated_metadata")
            }
            assert ours == kept, key
        else:
            assert mine[key] == data, key


def test_transposed_strings_are_read_by_zarr(tmp_path: Path) -> None:
    """zarr-python 3.1 itself writes them in the wrong order."""
    with tstore.open(tmp_path).transaction() as tx:
        transpose = {"name": "transpose", "configuration": {"order": [1, 0]}}
        tx.create_array("a", (4, 3), "string", (4, 2), [transpose, {"name": "vlen-utf8"}]).write(STRINGS)
    snapshot = tstore.open(tmp_path).snapshot()
    for values in (snapshot.array("a").read(), zarr.open_array(ZarrStore(snapshot), path="a", mode="r")[...]):
        assert values.tolist() == STRINGS.tolist()


def test_zarr_writes_strings_in_a_transaction(tmp_path: Path) -> None:
    store = tstore.open(tmp_path)
    with store.transaction() as tx:
        array = zarr.create_array(ZarrStore(tx), name="a", shape=(4, 3), chunks=(2, 2), dtype=str)
        array[...] = STRINGS
        array[1, 1:] = np.array(["new", "😀"], object)
    with store.transaction() as tx:
        tx.array("a")[3, 0].write("later")
    expected = STRINGS.copy()
    expected[1, 1:], expected[3, 0] = ["new", "😀"], "later"
    assert store.snapshot().array("a").read().tolist() == expected.tolist()
    assert zarr.open_array(ZarrStore(store.snapshot()), path="a", mode="r")[...].tolist() == expected.tolist()
