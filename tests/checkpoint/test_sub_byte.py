"""Numbers of 2, 4 and 6 bits: saved, restored, cast, served and exported with their bits."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import tensorstore as ts

import tstore.sync as tstore
from tests.support.http_server import ADMIN, everybody
from tstore.convert.exporting import export_safetensors
from tstore.convert.importing import import_checkpoint
from tstore.convert.zarr_export import export_zarr
from tstore.convert.zarr_import import import_zarr
from tstore.errors import InvalidArgument, StructureMismatch
from tstore.service.server import Server

BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6}
FLOATS = [name for name in BITS if name.startswith("float")]


def values(name: str, shape: tuple[int, ...] = (24, 20)) -> npt.NDArray[Any]:
    codes = np.random.default_rng(3).integers(0, 1 << BITS[name], shape, np.uint8)
    return codes.view(getattr(ml_dtypes, name))


TREE: dict[str, Any] = {name: values(name) for name in BITS} | {"scalar": values("int4", ())}


def assert_same(tree: Any, expected: Any) -> None:
    assert tree.keys() == expected.keys()
    for name, array in expected.items():
        assert (tree[name].dtype, tree[name].shape) == (array.dtype, array.shape)
        assert tree[name].tobytes() == array.tobytes()


def test_save_and_restore(tmp_path: Path) -> None:
    store = tmp_path / "store"
    tstore.save(store, TREE, 1)
    assert_same(tstore.restore(store), TREE)
    assert_same(tstore.restore(store, target=TREE), TREE)
    tstore.save(store, TREE, 2, codecs="lossless")
    assert_same(tstore.restore(store), TREE)
    with pytest.raises(StructureMismatch, match=r"int4: stored int4.*target int8"):
        tstore.restore(store, target={**TREE, "int4": np.zeros((24, 20), np.int8)})
    halves = [tstore.Shards((24, 20), "int4", [(np.s_[12 * h : 12 * h + 12, 0:20], None)]) for h in (0, 1)]
    for half in (0, 1):
        part = tstore.restore(store, target={"int4": halves[half]}, only="int4")["int4"].values[0]
        assert part.tobytes() == TREE["int4"][12 * half : 12 * half + 12].tobytes()


def test_a_quantization_leaves_them_unchanged(tmp_path: Path) -> None:
    store = tmp_path / "store"
    tstore.save(store, {**TREE, "w": np.random.default_rng(0).normal(size=(64, 64)).astype("f4")}, 1)
    report = tstore.quantize(store, {"**": "e4m3"}, tag="small")
    assert [array.path for array in report.encoded] == ["w"]
    restored = tstore.restore(store, at="small")
    assert_same({name: restored[name] for name in TREE}, TREE)


def test_over_http(tmp_path: Path) -> None:
    async def work() -> None:
        import tstore as asynchronous

        async with Server(tmp_path / "store", access=everybody()) as server:
            options = {"token": ADMIN}
            async with await asynchronous.open(server.url, storage_options=options) as store:
                await asynchronous.save(store, TREE, 1)
                assert_same(await asynchronous.restore(store), TREE)

    asyncio.run(work())


def test_a_zarr_folder_there_and_back(tmp_path: Path) -> None:
    tstore.save(tmp_path / "store", TREE, 1)
    asyncio.run(export_zarr(tmp_path / "store", tmp_path / "out.zarr"))
    for name, array in TREE.items():
        assert json.loads((tmp_path / f"out.zarr/{name}/zarr.json").read_text())["data_type"] == array.dtype
    for name in ("int4", "int2", "float4_e2m1fn"):  # those that TensorStore has
        spec = {"driver": "zarr3", "kvstore": f"file://{tmp_path}/out.zarr/{name}/"}
        assert ts.open(spec).result().read().result().tobytes() == TREE[name].tobytes()
    asyncio.run(import_zarr(tmp_path / "out.zarr", tmp_path / "again"))
    snapshot = tstore.open(tmp_path / "again", "r").snapshot()
    assert_same({name: snapshot.array(name).read() for name in TREE}, TREE)


def test_safetensors_there_and_back(tmp_path: Path) -> None:
    tree = {name: TREE[name] for name in FLOATS}
    tstore.save(tmp_path / "store", tree, 1)
    report = asyncio.run(export_safetensors(tmp_path / "store", tmp_path / "a.safetensors"))
    assert report.bytes == 24 * 20 * (4 + 6 + 6) // 8
    asyncio.run(import_checkpoint(tmp_path / "a.safetensors", tmp_path / "again", 1))
    assert_same(tstore.restore(tmp_path / "again"), tree)


@pytest.mark.parametrize("name", [name for name in BITS if name not in FLOATS])
def test_safetensors_has_no_integers_below_a_byte(tmp_path: Path, name: str) -> None:
    tstore.save(tmp_path / "store", {"x": {"y": TREE[name]}}, 1)
    with pytest.raises(
        InvalidArgument, match=rf"'x\.y' is {name}, which safetensors can't hold; convert it to one of"
    ):
        asyncio.run(export_safetensors(tmp_path / "store", tmp_path / "a.safetensors"))
    assert not (tmp_path / "a.safetensors").exists()


def written(name: str, new: Any, **options: Any) -> Any:
    """Return what an array of zeros has after a write."""
    store = tstore.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        array = tx.create_array("a", (4,), name, (2,))
        array.write(np.zeros(4, array.dtype))
        array.write(new, **options)
    return store.snapshot().array("a").read()


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("int4", 8),
        ("int4", -9),
        ("uint4", -1),
        ("uint2", 4),
        ("int4", 1.5),
        ("int4", np.ones(4)),
        ("int2", np.array([1, 0, 2, 1])),
        ("float4_e2m1fn", float("nan")),
        ("float6_e2m3fn", np.array([1, 2, np.inf, 3], "f4")),
    ],
    ids=str,
)
def test_writes_that_would_lose_information(name: str, new: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^a: .*(cast the values|replace them)"):
        written(name, new)


def test_writes_that_fit() -> None:
    assert written("int4", -8).tolist() == [-8] * 4
    assert written("int4", np.array([7, -8, 0, 1])).tolist() == [7, -8, 0, 1]
    assert written("uint2", True).tolist() == [1] * 4
    assert written("float4_e2m1fn", 1.5).tolist() == [1.5] * 4
    assert written("float6_e3m2fn", np.array([1, 2, 28, 0.0625], "f4")).tolist() == [1, 2, 28, 0.0625]


def test_fill_values() -> None:
    store = tstore.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        for name, fill in (("int4", -8), ("uint2", 3), ("float4_e2m1fn", -1.5), ("float6_e2m3fn", 7.5)):
            array = tx.create_array(name, (3,), name, (2,), fill_value=fill, sparse=True)
            assert array.read().tolist() == [fill] * 3
        for name, wrong in (("int4", 8), ("uint4", -1), ("int2", 0.5), ("float4_e2m1fn", float("nan"))):
            with pytest.raises(InvalidArgument, match="fill_value"):
                tx.create_array("bad", (3,), name, (2,), fill_value=wrong)
    read = store.snapshot()
    assert read.array("int4").read().tolist() == [-8] * 3
    assert read.array("float6_e2m3fn").fill_value == 7.5


def test_a_restore_widens_but_does_not_narrow(tmp_path: Path) -> None:
    tstore.save(tmp_path / "store", {"w": np.ones(4, np.float32), "x": TREE["float4_e2m1fn"]}, 1)
    assert tstore.restore(tmp_path / "store", dtype="float32")["x"].tolist() == TREE["float4_e2m1fn"].tolist()
    with pytest.raises(InvalidArgument, match=r"float4_e2m1fn is not a float dtype of 8 bits.*quantize"):
        tstore.restore(tmp_path / "store", dtype="float4_e2m1fn")


def test_tensors_of_torch_with_elements_below_a_byte(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pairs = torch.tensor([0x21, 0x43], dtype=torch.uint8)
    if hasattr(torch, "float4_e2m1fn_x2"):
        with pytest.raises(
            InvalidArgument, match=r"w: a tensor of torch.float4_e2m1fn_x2 .* tensor.view\(torch.uint8\)"
        ):
            tstore.torch.save(tmp_path / "a", {"w": pairs.view(torch.float4_e2m1fn_x2)}, 1)
    if hasattr(torch, "int4"):
        with pytest.raises(InvalidArgument, match=r"w: a tensor of torch.int4 can't be stored; .*whole bytes"):
            tstore.torch.save(tmp_path / "a", {"w": pairs.view(torch.int4)}, 1)
    tstore.save(tmp_path / "b", {"w": TREE["int4"]}, 1)
    with pytest.raises(InvalidArgument, match=r"w: torch has no dtype for int4; restore it with tstore.restore"):
        tstore.torch.restore(tmp_path / "b")
