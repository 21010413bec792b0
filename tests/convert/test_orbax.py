"""Orbax checkpoints, as Orbax writes them: every layout, and damaged ones."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tstore
from tests.support.sources import imported, untold_removals
from tests.support.weights import raw
from tstore.checkpoint.jobs import StreamedArray
from tstore.cli import main
from tstore.convert.importing import SourceKind, import_checkpoint, recognize
from tstore.convert.orbax import open_orbax
from tstore.errors import Corrupt, InvalidArgument, NotFound, TStoreError, UnsupportedFormat

pytest.importorskip("tensorstore")
if importlib.util.find_spec("orbax") is None:
    pytest.skip("orbax-checkpoint is not installed", allow_module_level=True)

LAYOUTS = ("zarr", "files", "zarr3", "files3")
NUMBERS = np.arange(1024 * 512, dtype=np.float32)
ONE = np.ones(1, np.float32)
EXPECTED: dict[str, Any] = {
    "params": {
        "w": NUMBERS.reshape(1024, 512),
        "long": NUMBERS.reshape(256, 2048).astype(ml_dtypes.bfloat16),
        "a.b": np.zeros(3, np.float32),
        "f8": np.arange(4).astype(ml_dtypes.float8_e4m3fn),
        "i4": np.arange(-4, 4).astype(ml_dtypes.int4),
    },
    "opt": [{"mean": np.full(3, 2, np.float32), "count": np.array(4, np.int32)}, {}, [np.ones(2, np.float32)]],
    "step": 7,
    "lr": 0.5,
    "none": None,
    "np": np.arange(3),
    "flag": np.float32(3),
}
EXPECTED["opt"] += [ONE] * 9  # so that the order of a list is not that of the text of its numbers


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that Orbax wrote."""
    folder = tmp_path_factory.mktemp("orbax")
    script = Path(__file__).with_name("orbax_peer.py")
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True, timeout=250)
    return folder


def bits(value: Any) -> Any:
    match value:
        case np.ndarray() | np.generic():
            return str(value.dtype), value.shape, raw(value)
        case dict():
            return {key: bits(item) for key, item in value.items()}
        case list() | tuple():
            return [bits(item) for item in value]
    return value


async def test_every_layout_is_imported_bit_for_bit(peers: Path, tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "store") as store:
        for step, layout in enumerate(LAYOUTS):
            report = await import_checkpoint(peers / layout, store, step)
            assert (report.kind, report.version) == (SourceKind.ORBAX, step + 1)
            tree = await tstore.restore(store, step)
            assert bits(tree) == bits({**EXPECTED, "name": "run"})
            assert (type(tree["step"]), type(tree["lr"]), type(tree["flag"])) == (int, float, np.float32)
        added = [c.bytes_added async for c in store.history()]
        assert added[:3] == [0, 0, 0]  # the same chunks, whatever the layout: also of arrays that are streamed
    tree = open_orbax(str(peers / "zarr"))
    assert isinstance(tree["params"]["w"], StreamedArray)
    assert tree["params"]["w"].region_shape == (1024, 512)


async def test_numbers_of_a_state_are_restored_into_its_abstract_tree(peers: Path, tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    await import_checkpoint(peers / "zarr", tmp_path, 0)
    target = jax.eval_shape(lambda: {"step": 0, "lr": 1.0})  # of int32 and float32
    state = await tstore.jax.restore(tmp_path, target=target, only=["step", "lr"])
    assert (int(state["step"]), float(state["lr"]), state["step"].weak_type) == (7, 0.5, True)


async def test_regions_are_whole_pieces_of_the_source(
    peers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tstore.checkpoint.jobs._REGION_BYTES", 600_000)
    tree = open_orbax(str(peers / "files"))
    w, read = tree["params"]["w"], []
    assert w.region_shape == (512, 256)  # one piece is 512 kB
    regions, streamed = [], w.read
    w.read = lambda region: regions.append(region) or streamed(region)
    await tstore.save(tmp_path / "store", {"w": w}, 0, codecs="e4m3")
    assert len(regions) == 4
    await tstore.save(tmp_path / "lossless", {"w": open_orbax(str(peers / "files"))["params"]["w"]}, 0)
    read = (await tstore.restore(tmp_path / "lossless"))["w"]
    assert raw(read) == raw(EXPECTED["params"]["w"])


async def test_a_step_of_a_manager_has_items(peers: Path, tmp_path: Path) -> None:
    await import_checkpoint(peers / "steps" / "3", tmp_path / "all", 3)
    tree = await tstore.restore(tmp_path / "all")
    assert bits(tree) == bits({"extra": {"x": np.ones(2, np.float32)}, "model": EXPECTED})
    await import_checkpoint(peers / "steps" / "3" / "model", tmp_path / "one", 3)
    assert bits(await tstore.restore(tmp_path / "one")) == bits(EXPECTED)
    with pytest.raises(
        InvalidArgument, match=r"has 1 checkpoint below it; pass the folder of one, such as .*/steps/3"
    ):
        recognize([peers / "steps"])


def test_the_items_of_a_step_that_are_not_imported_are_reported(
    peers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = peers / "measured" / "3"
    report = asyncio.run(import_checkpoint(step, tmp_path / "a", 3))
    assert (report.tensors, report.left_out) == (1, ["config/", "metrics/"])
    assert bits(asyncio.run(tstore.restore(tmp_path / "a"))) == bits({"state": {"x": np.ones(2, np.float32)}})
    assert main(["import", str(step), str(tmp_path / "b"), "--step", "3"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["not imported: config/, metrics/"]
    assert asyncio.run(import_checkpoint(step / "state", tmp_path / "c", 3)).left_out == []
    shutil.copytree(step, tmp_path / "source")
    idle = set(untold_removals(tmp_path / "source", tmp_path))
    about = {"_CHECKPOINT_METADATA", "commit_success.txt", "state/commit_success.txt", "state/_sharding"}
    assert {file for file in idle if not file.startswith(("state/ocdbt", "state/array_metadatas"))} <= about
    (tmp_path / "source" / "state" / "notes.txt").touch()
    assert asyncio.run(imported(tmp_path / "source"))[1] == ["config/", "metrics/", "state/notes.txt"]


async def test_typed_keys_are_stored_as_tstore_jax_does(peers: Path, tmp_path: Path) -> None:
    step = peers / "unnamed" / "3"
    await import_checkpoint(step, tmp_path / "store", 3)
    raw_key = np.array([0, 3], np.uint32)
    tree = await tstore.restore(tmp_path / "store")
    rbg = tree["keys"][1]["impl=rbg"]
    assert (rbg.shape, rbg.dtype) == ((2, 4), np.uint32)
    assert bits(tree) == bits({"keys": [{"impl=threefry2x32": raw_key}, {"impl=rbg": rbg}], "raw": raw_key})
    await import_checkpoint(step / "default", tmp_path / "item", 3)
    assert bits(await tstore.restore(tmp_path / "item")) == bits(tree)
    shutil.copytree(step, tmp_path / "a")
    (tmp_path / "a" / "default" / "array_metadatas" / "process_1").write_text('{"array_metadatas": 5}')
    await refused(tmp_path / "a", "process_1", "not have the format")
    shutil.rmtree(tmp_path / "a" / "default" / "array_metadatas")  # as older versions of Orbax
    await import_checkpoint(tmp_path / "a", tmp_path / "old", 3)
    assert bits((await tstore.restore(tmp_path / "old"))["keys"]) == bits([raw_key, rbg])


# ---- damage


async def refused(folder: Path, *words: str, error: type[TStoreError] = Corrupt) -> None:
    store = folder.parent / "store"
    with pytest.raises(error) as raised:
        await import_checkpoint(folder, store, 0)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert len(str(raised.value)) < 1000


async def test_a_missing_chunk_is_an_error_and_not_zeros(peers: Path, tmp_path: Path) -> None:
    shutil.copytree(peers / "files", tmp_path / "a")
    (tmp_path / "a" / "params.w" / "1.0").unlink()
    await refused(tmp_path / "a", "params.w", "1.0", "is missing")
    assert await tstore.steps(tmp_path / "store") == []  # it was being saved
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "a" / "np" / "0").write_bytes(b"garbage")
    await refused(tmp_path / "a", "'np' can't be read")
    shutil.rmtree(tmp_path / "a" / "np")
    await refused(tmp_path / "a", "no array 'np'", error=NotFound)
    shutil.copytree(peers / "zarr", tmp_path / "b")
    for file in (tmp_path / "b").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-9])
    await refused(tmp_path / "b", "can't be read")
    assert not (tmp_path / "store").exists()


async def test_chunks_that_would_end_the_process_are_refused(peers: Path, tmp_path: Path) -> None:
    shutil.copytree(peers / "files", tmp_path / "a")
    path = tmp_path / "a" / "np" / ".zarray"
    good = json.loads(path.read_text())
    for changes, words in (
        ({"chunks": [1 << 40]}, "but chunks of (1099511627776,)"),
        ({"chunks": [1 << 40], "shape": [1 << 40]}, "more than half of the memory"),
        ({"shape": [1 << 40]}, "is missing"),
        ({"shape": [3, 3]}, "can't be read"),
        ({"dtype": "<i4"}, "can't be read"),
        ({"dtype": "|O"}, "can't be read"),
    ):
        path.write_text(json.dumps({**good, **changes}))
        await refused(tmp_path / "a", "'np'", words, error=TStoreError)


async def test_metadata_that_lies(peers: Path, tmp_path: Path) -> None:
    shutil.copytree(peers / "files", tmp_path / "a")
    good = json.loads((tmp_path / "a" / "_METADATA").read_text())

    async def changed(key: Any, key_type: Any, value_type: Any, *words: str) -> None:
        entry = {
            "key_metadata": [{"key": key, "key_type": key_type}],
            "value_metadata": {"value_type": value_type},
        }
        document = {**good, "tree_metadata": {**good["tree_metadata"], "x": entry}}
        (tmp_path / "a" / "_METADATA").write_text(json.dumps(document))
        await refused(tmp_path / "a", *words, error=TStoreError)

    await changed("../files/np", 2, "np.ndarray", "not in the folder")
    await changed("..", 2, "np.ndarray", "not in the folder")
    await changed("x", 2, "np.ndarray", "no array 'x'")
    await changed("np", 2, "np.ndarray", "two arrays one name")
    await changed("opt", 2, "None", "value and a container, at opt")
    await changed("gone", 2, "string", "no text 'gone'")
    await changed(5, 2, "None", "not have the format")
    await changed("a", 1, "None", "not have the format")
    await changed("a", 3, "None", "not have the format")
    await changed("a", 2, None, "not have the format")
    for text in ("", "[]", "{}", '{"tree_metadata": 5}', "[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000):
        (tmp_path / "a" / "_METADATA").write_text(text)
        await refused(tmp_path / "a", "_METADATA")
    (tmp_path / "a" / "_METADATA").unlink()
    await refused(tmp_path / "a", "without _METADATA", error=UnsupportedFormat)
    assert not (tmp_path / "store").exists()
