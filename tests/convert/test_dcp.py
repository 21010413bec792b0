"""Folders of torch.distributed.checkpoint and files of torch.save, in and out, with PyTorch itself."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
import io
import json
import os
import pickle
import random
import shutil
import struct
import subprocess
import sys
import uuid
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tstore
from tests.support.collisions import equal_hashes, long_walks
from tests.support.fuzzing import bounded_time, fuzz, mutated
from tests.support.lazy import lazy
from tests.support.thresholds import Thresholds
from tests.support.weights import raw
from tstore.cli import main
from tstore.convert.dcp import open_dcp
from tstore.convert.dcp_export import export_dcp
from tstore.convert.importing import ImportReport, SourceKind, import_checkpoint, import_torch_file
from tstore.convert.nesting import nested
from tstore.convert.pickled import Visits
from tstore.convert.torch_archive import read_archive
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, TStoreError, UnsupportedFormat

torch = lazy("torch")
dcp = lazy("torch.distributed.checkpoint")

FLOATS = ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
OTHERS = ("bool", "uint8", "int8", "uint16", "int16", "int32", "int64", "uint64", "complex64", "complex128")


def every_dtype() -> dict[str, Any]:
    """Return tensors with random bits, one of each dtype."""
    bits = torch.randint(0, 256, (3, 4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return {n: bits.clone().view(getattr(torch, n)) for n in (*FLOATS, *OTHERS) if n != "bool"} | {
        "bool": bits % 2 == 0
    }


def state_dict() -> dict[str, Any]:
    """Return a state dict with what they have: views, parameters, nested optimizer state, numbers and text."""
    numbers = torch.arange(12.0)
    return {
        "model": {
            "layer.weight": torch.nn.Parameter(numbers.reshape(3, 4)),
            "transposed": numbers.reshape(3, 4).t(),
            "view": numbers[3:7],
            "scalar": torch.tensor(3.0),
            "empty": torch.zeros(0, 3),
        },
        "dtypes": every_dtype(),
        "optimizer": {
            "state": {"layer.weight": {"step": torch.tensor(3.0), "exp_avg": torch.ones(3)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1], "fused": None}],
            "list": [torch.ones(2), torch.zeros(1)],
        },
        "step": 7,
        "name": "run",
        "data": b"\0\xff",
    }


def save(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no process group is there
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)


def load(state: dict[str, Any], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(folder), no_dist=True)


def bits(value: Any) -> Any:
    """Return a tree with the dtype, shape and bytes in place of each tensor or array."""
    match value:
        case torch.Tensor():
            data = value.detach().contiguous()
            flat = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else np.empty(0)
            return str(data.dtype).removeprefix("torch."), tuple(data.shape), flat.tobytes()
        case np.ndarray():
            return str(value.dtype), value.shape, raw(value)
        case dict():
            return {key: bits(item) for key, item in value.items()}
        case list():
            return [bits(item) for item in value]
    return value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that torch.distributed.checkpoint wrote."""
    folder = tmp_path_factory.mktemp("peers") / "dcp"
    save(state_dict(), folder)
    return folder


async def test_a_folder_goes_in_and_out_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    report = await import_checkpoint(folder, tmp_path / "store", 7)
    assert (report.kind, report.version) == (SourceKind.DCP, 1)
    tree = await tstore.restore(tmp_path / "store")
    assert bits(tree) == bits(state_dict())
    assert tree["dtypes"]["bfloat16"].dtype == ml_dtypes.bfloat16

    told: list[tuple[int, int]] = []
    exported = await export_dcp(tmp_path / "store", tmp_path / "out", progress=lambda *at: told.append(at))
    assert (exported.tensors, exported.bytes, exported.left_out) == (report.tensors, report.bytes, [])
    assert sorted(os.listdir(tmp_path / "out")) == [".metadata", "__0_0.distcp"]
    assert told[-1] == (report.bytes, report.bytes)
    expected = bits(open_dcp(str(folder))[0])
    assert bits(open_dcp(str(tmp_path / "out"))[0]) == expected
    loaded = state_dict()
    for tensor in (*loaded["dtypes"].values(), loaded["model"]["view"], loaded["optimizer"]["list"][0]):
        tensor.zero_()
    loaded |= {"step": 0, "name": ""}
    load(loaded, tmp_path / "out")
    assert bits(loaded) == bits(state_dict())


async def test_two_processes_save_and_one_store_has_the_whole_tensors(tmp_path: Path) -> None:
    script = Path(__file__).with_name("dcp_job.py")
    command = [sys.executable, "-W", "ignore", script, tmp_path]
    job = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert job.returncode == 0, job.stderr
    for name, kind in (("dcp", SourceKind.DCP), ("hf", SourceKind.FOLDER)):
        report = await import_checkpoint(tmp_path / name, tmp_path / f"{name}.store", 3, codecs={"**/plain": None})
        assert report.kind is kind
        tree = await tstore.restore(tmp_path / f"{name}.store")
        tensors = tree["model"] if kind is SourceKind.DCP else tree
        for tensor, shape in {"rows": (7, 3), "columns": (4, 6), "copied": (5,), "plain": (2, 2)}.items():
            numbers = np.arange(np.prod(shape)).reshape(shape)
            assert tensors[tensor].astype("f4").tolist() == numbers.tolist(), tensor
        assert tensors["columns"].dtype == ml_dtypes.bfloat16
    (tmp_path / "dcp" / "__1_0.distcp").unlink()
    with pytest.raises(TStoreError, match="__1_0"):
        await import_checkpoint(tmp_path / "dcp", tmp_path / "store", 0)
    (tmp_path / "hf" / "shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(Corrupt, match="or some are missing"):
        await import_checkpoint(tmp_path / "hf", tmp_path / "store", 0)
    assert not (tmp_path / "store").exists()


async def test_other_trees_become_state_dicts(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32)
    tree = {"a": (x, [x + 1, {"b": np.int64(4)}]), 0: {"w": x}, "n": None}
    await tstore.save(tmp_path / "store", tree, 1)
    await export_dcp(tmp_path / "store", tmp_path / "out")
    back, _ = open_dcp(str(tmp_path / "out"))
    assert bits(back) == bits({"a": [x, [x + 1, {"b": np.array(4)}]], "0": {"w": x}, "n": None})
    async with await tstore.open(tmp_path / "store") as store:
        for step, odd, error in (
            (2, {"a.b": x, "a": {"b": x}}, r"duplicated flatten key a\.b"),
            (3, {1: x, "1": x}, "the same as text"),
            (4, [x], "is a list, but the other format has dicts"),
            (5, x, "is one array, but the other format has dicts"),
            (6, {"x": x.astype(ml_dtypes.float8_e3m4)}, "float8_e3m4, which PyTorch"),
        ):
            await tstore.save(store, odd, step)
            with pytest.raises(InvalidArgument, match=error):
                await export_dcp(store, tmp_path / "new", step=step)
        with pytest.raises(AlreadyExists, match="out already exists"):
            await export_dcp(store, tmp_path / "out")
    pack = next((tmp_path / "store").glob("txn/*/pack-*"), None)
    assert pack is None  # all chunks are inline
    assert sorted(os.listdir(tmp_path)) == ["out", "store"]


async def test_numbers_stay_beside_the_bytes_of_each_host(tmp_path: Path) -> None:
    tree = {"model": {"w": np.ones((4, 4), "f4"), "none": None, "cfg": 7}, "rng": tstore.PerHost(5), "epoch": 3}
    await tstore.save(tmp_path / "s", tree, step=1)
    report = await export_dcp(tmp_path / "s", tmp_path / "out")
    assert (report.tensors, list(report.left_out)) == (2, [])
    await import_checkpoint(tmp_path / "out", tmp_path / "again", step=1)
    restored = await tstore.restore(tmp_path / "again")
    assert (list(restored["rng"]), restored["epoch"]) == (["%host=0"], 3)
    assert restored["model"].pop("w").tolist() == tree["model"]["w"].tolist()  # type: ignore[index]
    assert restored["model"] == {"none": None, "cfg": 7}


async def test_a_damaged_chunk_leaves_no_folder(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "store", {"x": np.ones(5000)}, 0)
    pack = next((tmp_path / "store").glob("txn/*/pack-*"))
    pack.write_bytes(pack.read_bytes()[:-8] + b"\1" * 8)
    with pytest.raises(Corrupt, match=r"x, chunk"):
        await export_dcp(tmp_path / "store", tmp_path / "out")
    assert os.listdir(tmp_path) == ["store"]


async def test_a_cancelled_export_ends_at_the_next_tensor(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "store", {str(i): np.full(10, i) for i in range(100)}, 0)
    told = []

    def cancel(done: int, total: int) -> None:
        told.append(done)
        task.cancel()

    task = asyncio.create_task(export_dcp(tmp_path / "store", tmp_path / "out", progress=cancel))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(told) < 90
    assert os.listdir(tmp_path) == ["store"]


# ---- files of torch.save


class Config:
    """A class of somebody's program, which a file may name."""

    def __init__(self) -> None:
        self.weights = {"w": torch.ones(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.weights


class Evil:
    """An object whose loading leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


async def test_a_file_is_imported_only_if_it_is_trusted(tmp_path: Path) -> None:
    state = state_dict()
    state["ordered"] = collections.OrderedDict(a=torch.ones(2), lr=np.float64(0.5), size=torch.Size([2, 3]))
    file = tmp_path / "model.pt"
    torch.save(state, file)
    with pytest.raises(InvalidArgument, match=r"a pickle, and loading one may run code.*--trust"):
        await import_checkpoint(file, tmp_path / "store", 0)
    assert not (tmp_path / "store").exists()
    report = await import_torch_file(file, tmp_path / "store", 0)
    assert report.kind is SourceKind.TORCH
    state["ordered"]["size"] = (2, 3)
    assert bits(await tstore.restore(tmp_path / "store")) == bits({**state, "ordered": dict(state["ordered"])})


async def test_a_model_in_several_files_is_imported_by_its_index(tmp_path: Path) -> None:
    folder, index = tmp_path / "model", tmp_path / "model" / "pytorch_model.bin.index.json"
    folder.mkdir()
    files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for i, file in enumerate(files):
        torch.save({f"w{i}": torch.full((3,), i)}, folder / file)
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"w0": files[0], "w1": files[1]}}))
    for source, told in {folder: "pass one of them: pytorch_model.bin.index.json", index: "each a pickle"}.items():
        with pytest.raises(InvalidArgument, match=told):
            await import_checkpoint(source, tmp_path / "store", 0)
    with pytest.raises(InvalidArgument, match=r"pass it alone.*\*\.bin\.index\.json"):
        await import_checkpoint([folder / file for file in files], tmp_path / "store", 0)
    report = await import_torch_file(index, tmp_path / "store", 0)
    assert report == ImportReport(SourceKind.TORCH_INDEX, 1, 2, 48, [])
    restored = await tstore.restore(tmp_path / "store")
    assert {name: array.tolist() for name, array in restored.items()} == {"w0": [0] * 3, "w1": [1] * 3}
    for value, kind in (([torch.ones(3)], "list"), ({1: torch.ones(3)}, "dict")):
        torch.save(value, folder / files[1])
        with pytest.raises(InvalidArgument, match=rf"00002-of-00002\.bin has a {kind}, not a dict of names"):
            await import_torch_file(index, tmp_path / "store", 1)
    (folder / files[1]).unlink()
    with pytest.raises(NotFound, match="1 are missing"):
        await import_torch_file(index, tmp_path / "store", 1)


async def test_expanded_tensors_of_a_file(tmp_path: Path) -> None:
    values = {"a": torch.arange(3.0).expand(5, 3), "b": torch.ones(1).expand(20)}
    torch.save(values, tmp_path / "x.pt")
    await import_torch_file(tmp_path / "x.pt", tmp_path / "store", 0)
    restored = await tstore.restore(tmp_path / "store")
    assert all(np.array_equal(restored[name], value.numpy()) for name, value in values.items())


def lazily_computed() -> dict[str, Any]:
    """Return tensors whose memory has other values than they: conjugated and negated ones."""
    numbers = torch.randn(3, 4, dtype=torch.complex64)
    negated = torch._neg_view(torch.arange(6.0))
    return {
        "conjugated": numbers.conj(),
        "scalar": torch.tensor(1 + 2j).conj(),
        "both": torch._neg_view(numbers.clone().conj()),
        "negated": negated,
        "part": negated[2:4],
        "empty": numbers.clone().conj()[:0],
    }


@pytest.mark.parametrize("trusted", [True, False])
async def test_lazily_conjugated_and_negated_tensors(tmp_path: Path, trusted: bool) -> None:
    values = lazily_computed()
    if trusted:
        torch.save(values, tmp_path / "x.pt")
        await import_torch_file(tmp_path / "x.pt", tmp_path / "store", 0)
    else:
        save(values, tmp_path / "folder")
        await import_checkpoint(tmp_path / "folder", tmp_path / "store", 0)
    restored = await tstore.restore(tmp_path / "store")
    for name, value in values.items():
        np.testing.assert_array_equal(restored[name], value.resolve_conj().resolve_neg().numpy(), name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.empty(3, device="meta"), "w is a tensor on the meta device, which has no values"),
        (lambda: torch.nn.Parameter(torch.empty(2, device="meta")), "w is a tensor on the meta device"),
        (lambda: torch.eye(3).to_sparse(), r"w is a tensor of layout torch\.sparse_coo"),
        (lambda: torch.ones(2, dtype=torch.complex32), r"w is .* dtype torch\.complex32"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), r"w is .* dtype torch\.qint8"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of PyTorch, for types that it no longer develops
async def test_tensors_without_dense_values_are_named(tmp_path: Path, make: Any, message: str) -> None:
    torch.save({"w": make()}, tmp_path / "x.pt")
    with pytest.raises(InvalidArgument, match=message):
        await import_torch_file(tmp_path / "x.pt", tmp_path / "store", 0)


async def test_conjugated_tensors_that_share_their_memory_are_read_by_torch(tmp_path: Path) -> None:
    numbers = torch.randn(1000, dtype=torch.complex64)
    torch.save([numbers.conj() for _ in range(5)], tmp_path / "x.pt")
    with pytest.raises(UnsupportedFormat, match="more bytes than the archive"):
        read_archive(np.fromfile(tmp_path / "x.pt", np.uint8), "x")
    await import_torch_file(tmp_path / "x.pt", tmp_path / "store", 0)
    assert np.array_equal((await tstore.restore(tmp_path / "store"))[4], numbers.conj().resolve_conj().numpy())


async def test_layers_of_a_file_that_share_their_weights(tmp_path: Path) -> None:
    layers = torch.nn.ModuleList([torch.nn.Linear(64, 64)] * 48).state_dict()
    torch.save(layers, tmp_path / "x.pt")
    await import_torch_file(tmp_path / "x.pt", tmp_path / "store", 0)
    restored = await tstore.restore(tmp_path / "store")
    np.testing.assert_array_equal(restored["47.weight"], layers["47.weight"].numpy())


async def test_other_objects_are_loaded_by_torch_if_trusted(tmp_path: Path) -> None:
    torch.save({"config": Config(), "odd": every_dtype()}, tmp_path / "new.pt")
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    await import_torch_file(tmp_path / "new.pt", tmp_path / "a", 0)
    assert bits(await tstore.restore(tmp_path / "a")) == bits(
        {"config": {"w": torch.ones(3)}, "odd": every_dtype()}
    )
    with pytest.raises(InvalidArgument, match=r"a file of torch\.save"):
        await import_checkpoint(tmp_path / "old.pt", tmp_path / "b", 0)
    await import_torch_file(tmp_path / "old.pt", tmp_path / "b", 0)
    assert bits(await tstore.restore(tmp_path / "b")) == bits({"w": torch.ones(3)})
    (tmp_path / "cut.pt").write_bytes((tmp_path / "old.pt").read_bytes()[:-20])
    torch.save({"w": torch.ones(3).to_sparse()}, tmp_path / "sparse.pt")
    torch.save({"f": pickle.dumps, "w": torch.ones(3)}, tmp_path / "function.pt")
    torch.save({("w", 1): torch.ones(3)}, tmp_path / "tuple.pt")
    for name, message in (
        ("cut", "can't be loaded by torch.load"),
        ("sparse", "/w is a tensor of layout torch.sparse_coo"),
        ("function", r"has 1 value .* leave them out .*--skip PATH:\n  f: builtins.builtin_function_or_method"),
        ("tuple", "a dict key of type tuple can't be stored; expected str, int, float, bool or bytes"),
    ):
        with pytest.raises((Corrupt, InvalidArgument, UnsupportedFormat), match=message):
            await import_torch_file(tmp_path / f"{name}.pt", tmp_path / "c", 0)
    report = await import_torch_file(tmp_path / "sparse.pt", tmp_path / "d", 0, skip=["w"])
    assert (report.tensors, report.left_out) == (0, ["w"])
    assert not (tmp_path / "c").exists()


async def test_an_object_of_a_class_that_is_not_installed_is_left_out_by_name(tmp_path: Path) -> None:
    module = ModuleType("not_installed")
    exec("class Args(dict): pass\nclass Steps(list): pass\nclass Run: pass", vars(module))
    for kind in ("Args", "Steps", "Run"):
        getattr(module, kind).__module__ = "not_installed"
    run = module.Run()
    run.args, run.steps = module.Args(lr=0.5), module.Steps([1, 2])
    sys.modules["not_installed"] = module
    file = tmp_path / "x.pt"
    torch.save({"w": torch.ones(3), "hyper": [run, module.Steps([1])], "epoch": 3}, file)
    del sys.modules["not_installed"]
    with pytest.raises(
        Corrupt, match=r"No module named 'not_installed'.*skip=; .*hyper/0 \(not_installed.Run\), hyper/1"
    ):
        await import_torch_file(file, tmp_path / "store", 0)
    command = ["import", str(file), str(tmp_path / "store"), "--step", "0", "--trust", "--skip", "hyper/*"]
    assert await asyncio.to_thread(main, command) == 0
    tree = await tstore.restore(tmp_path / "store")
    assert bits(tree) == bits({"w": torch.ones(3), "hyper": [None, None], "epoch": 3})
    report = await import_torch_file(file, tmp_path / "store", 1, skip=["hyper"])
    assert report.left_out == ["hyper"]
    with pytest.raises(Corrupt, match="No module named 'not_installed'"):
        await import_torch_file(file, tmp_path / "store", 2, skip=["hyper/1"])


# ---- hostile bytes


async def test_nothing_that_a_folder_names_is_called(folder: Path, tmp_path: Path) -> None:
    save({"w": torch.ones(3), "evil": Evil(tmp_path / "harm")}, tmp_path / "a")
    torch.save({"w": torch.ones(3), "evil": Evil(tmp_path / "harm")}, tmp_path / "a.pt")
    shutil.rmtree(tmp_path / "harm", ignore_errors=True)
    with pytest.raises(UnsupportedFormat, match=r"1 value that tstore can't store.*\n  evil: posix.mkdir"):
        await import_checkpoint(tmp_path / "a", tmp_path / "store", 0)
    for source in (
        import_checkpoint(tmp_path / "a", tmp_path / "store", 0, skip=["evil"]),
        import_torch_file(tmp_path / "a.pt", tmp_path / "store", 1, skip=["e*"]),
    ):
        report = await source
        assert (report.tensors, report.left_out) == (1, ["evil"])
        assert list(await tstore.restore(tmp_path / "store")) == ["w"]
    with pytest.raises(InvalidArgument, match=r"has no value at 'evli', which skip names"):
        await import_checkpoint(tmp_path / "a", tmp_path / "store", 2, skip=["evli", "evil"])
    (tmp_path / "b").mkdir()
    for protocol in range(6):
        (tmp_path / "b" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "harm"), protocol))
        with pytest.raises(UnsupportedFormat, match=r"refers to posix.mkdir"):
            open_dcp(str(tmp_path / "b"))
    assert not (tmp_path / "harm").exists()


def with_metadata(folder: Path, out: Path, change: Any) -> str:
    """Copy a folder with changed metadata; return its path."""
    shutil.copytree(folder, out)
    with open(folder / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (out / ".metadata").write_bytes(pickle.dumps(metadata))
    return str(out)


class PicklerOf3112(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 does, and `Attribute` as it does them."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Attribute):
            return getattr, tuple(value)
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


class Attribute(list[Any]):
    """An object and the name of an attribute."""


def test_only_members_of_enums_are_named_by_getattr(folder: Path, tmp_path: Path) -> None:
    def repickle(change: Any, name: str, protocol: int = 4) -> str:
        path = with_metadata(folder, tmp_path / name, lambda _: None)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        with open(tmp_path / name / ".metadata", "wb") as file:
            PicklerOf3112(file, protocol).dump(metadata)
        assert b"getattr" in (tmp_path / name / ".metadata").read_bytes()
        return path

    for protocol in (2, 4):  # in the older one, the module is `__builtin__`
        path = repickle(lambda _: None, f"enums{protocol}", protocol)
        assert bits(open_dcp(path)[0]) == bits(open_dcp(str(folder))[0])
    for i, evil in enumerate(
        ([torch.Size, "numel"], ["text", "upper"], [getattr, "__self__"], [torch.float32, "x"])
    ):
        path = repickle(lambda m, evil=evil: setattr(m, "planner_data", Attribute(evil)), f"evil{i}")
        with pytest.raises(UnsupportedFormat, match=r"refers to an attribute, by builtins.getattr"):
            open_dcp(path)


def test_metadata_that_lies(folder: Path, tmp_path: Path) -> None:
    def info(metadata: Any) -> Any:
        return next(i for key, i in metadata.storage_data.items() if key.fqn == "model.layer.weight")

    def set_file(name: str) -> Any:
        return lambda m: setattr(info(m), "relative_path", name)

    def set_size(m: Any) -> None:
        m.state_dict_metadata["model.layer.weight"].size = torch.Size([4, 4])

    def set_dtype(m: Any) -> None:
        m.state_dict_metadata["model.layer.weight"].properties.dtype = torch.float64

    def move(by: int) -> Any:
        return lambda m: vars(info(m)).update(offset=info(m).offset + by, length=info(m).length - 3)

    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    cases = {
        "which is not in the folder": [set_file("../secret"), set_file(str(tmp_path / "secret")), set_file("")],
        "lies at bytes": [move(1 << 40), lambda m: vars(info(m)).update(offset=-1, length=1)],
        "can't be read as an archive": [move(3)],
        "lie at the same bytes of '__0_0.distcp'": [lambda m: setattr(info(m), "length", 1 << 40)],
        "has 16 elements, but its pieces have 12": [set_size],
        "its metadata expects float64": [set_dtype],
        "has two values, or a value and a container, at": [
            lambda m: m.planner_data.update({"step": ("model", "layer.weight")})
        ],
        "has a value above model|or a value and a container, at model": [
            lambda m: m.planner_data.update({"step": ("model",)})
        ],
        "in one list": [lambda m: m.planner_data.update({"step": ("optimizer", "list", 10**9)})],
        "does not have the format": [
            lambda m: m.planner_data.update({"step": 5}),
            lambda m: m.planner_data.update({"step": ("optimizer", 10**5000)}),
            lambda m: setattr(m, "storage_data", None),
            lambda m: m.state_dict_metadata.pop("step"),
            lambda m: m.planner_data.update({"step": ("a",) * 300}) or setattr(m, "storage_data", {1: 2}),
        ],
        "has a leaf with 300 keys": [lambda m: m.planner_data.update({"step": ("a",) * 300})],
        "is stored 0 times": [lambda m: [m.storage_data.pop(k) for k in list(m.storage_data) if k.fqn == "step"]],
    }
    for number, (message, change) in enumerate((m, c) for m, changes in cases.items() for c in changes):
        changed = with_metadata(folder, tmp_path / str(number), change)
        with pytest.raises(TStoreError, match=message) as raised:
            open_dcp(changed)
        assert len(str(raised.value)) < 1000


def archive(pickled: bytes, storage: bytes = b"", **options: Any) -> bytes:
    """Return an archive of torch.save with this pickle and one storage."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as entries:
        entries.writestr("archive/data.pkl", pickled)
        entries.writestr("archive/byteorder", b"little")
        entries.writestr("archive/data/0", storage)
    return file.getvalue()


def tensor_pickle(offset: int, size: Any, stride: Any, storage: str = "FloatStorage") -> bytes:
    """Return the pickle of a tensor in storage 0."""
    file = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", getattr(torch, storage), "0", "cpu", 4) if value is Pickler else None

    class Tensor:
        def __reduce__(self) -> Any:
            return torch._utils._rebuild_tensor_v2, (Pickler, offset, size, stride, False, {})

    Pickler(file, 2).dump(Tensor())
    return file.getvalue()


HEAD = b"\x80\x02"
ENDLESS = b"K\x01" + b"2\x86" * 60  # a tuple of 2^60 numbers, each pair of equal tuples
DEEP = b"K\x01" + b"\x85" * 150_000
SCALAR = b"cnumpy.core.multiarray\nscalar\n"
LONG = b"\x8b" + struct.pack("<i", 10**6) + b"\x7f" * 10**6 + b"q\0"  # a number of a million bytes


@pytest.mark.parametrize(
    "pickled",
    [
        HEAD + b"ccollections\nOrderedDict\n](" + DEEP + b"K\x01\x86e\x85R.",
        HEAD + b"ccollections\nOrderedDict\n](" + ENDLESS + b"K\x01\x86e\x85R.",
        HEAD + b"c_codecs\nencode\n" + ENDLESS + b"\x85R.",
        HEAD + SCALAR + b"cnumpy\ndtype\n" + ENDLESS + b"\x85RK\x01\x86R.",
        lambda: tensor_pickle(0, (2, 5), (1, 1)).replace(b"K\x02K\x05\x86", ENDLESS),
        lambda: tensor_pickle(0, (2, 5), (1, 1)).replace(b"K\x02K\x05\x86", b"(" + b"K\x01" * 200 + b"t"),
    ],
)
def test_an_archive_is_read_in_time_and_without_a_crash(pickled: bytes | Callable[[], bytes]) -> None:
    data = np.frombuffer(archive(pickled() if callable(pickled) else pickled, bytes(16)), np.uint8)
    with bounded_time(20), pytest.raises(Corrupt, match="not have the format") as raised:
        read_archive(data, "x")
    assert len(str(raised.value)) < 1000


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"}(" + LONG + b"N" + b"h\0N" * 10**5 + b"u", "a key that is too long, of type int"),
        (b"}(" + text("k" * 10**5) + b"Nu", "a key that is too long, of type str"),
        (b"](" + LONG + b"h\0" * 100 + b"e", "more than 16 times the bytes"),
        (b"](c_codecs\nencode\n" + text("a" * 10**6) + b"\x85Rq\0" + b"h\0" * 10**4 + b"e", "more than 16 times"),
        (SCALAR + b"cnumpy\ndtype\n" + text("(2,f4") + b"\x85RC\x04" + bytes(4) + b"\x86R", r"dtype \(2,f4$"),
    ],
)
def test_a_value_that_is_used_many_times_costs_no_more_than_its_bytes(pickled: bytes, message: str) -> None:
    data = np.frombuffer(archive(HEAD + pickled + b"."), np.uint8)
    with bounded_time(5), pytest.raises((Corrupt, UnsupportedFormat), match=message) as raised:
        read_archive(data, "x")
    assert len(str(raised.value)) < 1000


def test_many_tensors_share_one_list_of_chunks(folder: Path, tmp_path: Path, thresholds: Thresholds) -> None:
    def share(metadata: Any) -> None:
        item = metadata.state_dict_metadata["model.layer.weight"]
        item.chunks *= 10
        empty = dataclasses.replace(item, size=torch.Size([0]))
        metadata.state_dict_metadata |= {f"empty.{i}": empty for i in range(1000)}

    path = with_metadata(folder, tmp_path / "shared", share)
    assert len(open_dcp(path)[0]) > 1000
    thresholds(_MAX_VISITS=9000)
    with pytest.raises(Corrupt, match="more than 9000 values"):
        open_dcp(path)


def test_metadata_is_read_in_time_and_without_a_crash(folder: Path, tmp_path: Path) -> None:
    marker = 123456789123
    name = pickle.dumps(marker, 2)[2:-1]
    for field in ("state_dict_metadata", "planner_data", "storage_data"):
        path = with_metadata(folder, tmp_path / field, lambda m, field=field: setattr(m, field, marker))
        metadata = tmp_path / field / ".metadata"
        data = pickle.dumps(pickle.loads(metadata.read_bytes()), 2)
        assert data.count(name) == 1
        for odd in (ENDLESS, DEEP):
            metadata.write_bytes(data.replace(name, b"](" + odd + b"e"))
            with bounded_time(20), pytest.raises(Corrupt, match="not have the format") as raised:
                open_dcp(path)
            assert len(str(raised.value)) < 1000


def test_the_values_of_a_folder_are_counted_together(tmp_path: Path, thresholds: Thresholds) -> None:
    save({str(i): (i, i) for i in range(100)}, tmp_path / "a")
    thresholds(_MAX_VISITS=300)
    open_dcp(str(tmp_path / "a"))
    thresholds(_MAX_VISITS=299)
    with pytest.raises(Corrupt, match="more than 299 values"):
        open_dcp(str(tmp_path / "a"))


def test_many_names_of_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    """A folder of 1 GB could be imported as any number of them."""

    def repeat(metadata: Any) -> None:
        key, info = next((k, i) for k, i in metadata.storage_data.items() if k.fqn == "model.transposed")
        metadata.state_dict_metadata["again"] = metadata.state_dict_metadata[key.fqn]
        metadata.storage_data[dataclasses.replace(key, fqn="again")] = info

    with pytest.raises(Corrupt, match="'again' lie at the same bytes"):
        open_dcp(with_metadata(folder, tmp_path / "many", repeat))


def test_many_tensors_of_one_storage() -> None:
    tensor = tensor_pickle(0, (1 << 14,), (1,))[2:-1]
    for item in (tensor, b"B" + struct.pack("<I", 1 << 16) + bytes(1 << 16) + b"q\0"):
        for count, error in ((15, None), (40, "more than 16 times the bytes"), (2000, "more than 16 times")):
            items = tensor * count if item is tensor else item + b"h\0" * (count - 1)
            data = archive(HEAD + b"](" + items + b"e.", bytes(1 << 16))
            if error is None:
                assert len(read_archive(np.frombuffer(data, np.uint8), "x")) == count
                continue
            with pytest.raises(Corrupt, match=error):
                read_archive(np.frombuffer(data, np.uint8), "x")


def test_an_archive_of_more_entries_than_are_read(thresholds: Thresholds) -> None:
    data = np.frombuffer(archive(HEAD + b"]."), np.uint8)
    assert read_archive(data, "x") == []
    thresholds(_MAX_DIRECTORY=100)
    with pytest.raises(Corrupt, match="its list of entries is too long"):
        read_archive(data, "x")


def test_a_pickle_of_more_opcodes_than_are_read(thresholds: Thresholds) -> None:
    data = np.frombuffer(archive(HEAD + b"]" + b"2" * 100 + b"."), np.uint8)  # DUP: a byte that takes 8 of memory
    assert read_archive(data, "x") == []
    thresholds(_MAX_OPCODES=100)
    with pytest.raises(UnsupportedFormat, match="more than 100 opcodes"):
        read_archive(data, "x")


def test_the_opcodes_of_all_archives_are_counted_together(thresholds: Thresholds) -> None:
    """Otherwise each of many archives could take half a minute."""
    archives = [np.frombuffer(archive(HEAD + b"](" + b"N" * 3000 + b"e."), np.uint8) for _ in range(3)]
    thresholds(_MAX_OPCODES=10_000)
    visits = Visits("the folder")
    for data in archives:
        assert read_archive(data, "x", visits) == [None] * 3000
    with pytest.raises(UnsupportedFormat, match="has pickles of more than 10000 opcodes"):
        read_archive(archives[0], "x", visits)


def test_long_metadata_of_short_files_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(HEAD + b"(" + b"}" * (1 << 22) + b"l.")
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1 << 20))
    with bounded_time(1), pytest.raises(Corrupt, match=r"has 4194309 bytes, but .* only 1048576"):
        open_dcp(str(tmp_path))


async def test_archives_that_lie(tmp_path: Path, thresholds: Thresholds) -> None:
    thresholds(_MAX_VISITS=5000)
    file = tmp_path / "x.pt"
    good = archive(tensor_pickle(0, (2, 2), (2, 1)), bytes(16))
    file.write_bytes(good)
    await import_torch_file(file, tmp_path / "good", 0)
    deep = b"\x80\x02" + b"(" * 100_000 + b"N" + b"t" * 100_000 + b"."
    laughs = b"\x80\x02]q\0" + b"".join(b"]q%c(h%ch%ch%ce" % (i, i - 1, i - 1, i - 1) for i in range(1, 40)) + b"."
    cases = {
        "does not fit in the 16 bytes": [
            *(tensor_pickle(*args) for args in ((1, (2, 2), (2, 1)), (0, (5,), (1,)), (0, (2, 2), (3, 1)))),
            tensor_pickle(0, (3,), (1,), "DoubleStorage"),
        ],
        "more than 1024 times the bytes": [
            *(tensor_pickle(*args) for args in ((0, (1 << 40,), (0,)), (0, (1 << 61, 1 << 61), (0, 0)))),
        ],
        "a tensor has size": [
            *(tensor_pickle(*args) for args in ((-1, (2,), (1,)), (0, (2,), (-1,)), (0, (2,), (1, 1)))),
            tensor_pickle(0, (1 << 70,), (1,)),
        ],
        "not a valid pickle|not have the format|more than": [
            deep,
            laughs,
            b"",
            b".",
            b"\x80\x02}q\0(h\0h\0u.",
            b"garbage",
        ],
        "more than 5000 values": [laughs],
    }
    for message, pickles in cases.items():
        for pickled in pickles:
            file.write_bytes(archive(pickled, bytes(16)))
            with pytest.raises(Corrupt, match=message) as raised:
                await import_torch_file(file, tmp_path / "store", 0)
            assert len(str(raised.value)) < 1000
    file.write_bytes(good[:-40])
    with pytest.raises(Corrupt, match="not a zip archive"):
        await import_torch_file(file, tmp_path / "store", 0)
    assert not (tmp_path / "store").exists()


def test_odd_folders(folder: Path, tmp_path: Path) -> None:
    """Change bytes of a folder at random: it is imported completely, or refused before a store is made."""
    small = tmp_path / "small"
    save(
        {"w": torch.ones(3, 4), "l": [torch.ones(2, dtype=torch.bfloat16)], "lr": 0.5, "g": {"b": (1, "x")}}, small
    )
    files = {name: (small / name).read_bytes() for name in (".metadata", "__0_0.distcp")}
    with asyncio.Runner() as runner:

        def attack(choice: random.Random) -> bool:
            name = choice.choice(list(files))
            for other, data in files.items():
                (small / other).write_bytes(mutated(data, choice) if other == name else data)
            url = f"memory://{uuid.uuid4()}"
            try:
                runner.run(import_checkpoint(small, url, 1))
            except TStoreError as error:
                return len(str(error)) > 5000
            assert "w" in runner.run(tstore.restore(url, 1))
            return True

        fuzz("DCP folders", attack, 150)


def int_key(number: int) -> bytes:
    return b"\x8a\x0a" + number.to_bytes(10, "little", signed=True)


COLLIDING = equal_hashes(40_000)
NUMBERS = [int_key(number) + b"N" for number in COLLIDING]


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"}(" + b"".join(NUMBERS) + b"u", "numbers as keys of dicts collide"),
        (b"}" + b"".join(item + b"s" for item in NUMBERS), "numbers as keys of dicts collide"),
        (b"](" + (b"}(" + b"".join(NUMBERS[:2000]) + b"u") * 99 + b"e", "numbers as keys of dicts collide"),
        (b"](" + b"".join(b"Nr" + struct.pack("<I", n << 16) for n in range(9)) + b"e", "not a valid pickle"),
        (b"Np-1\n", "not a valid pickle"),
        (b"]q\0g-1\n", "not a valid pickle"),
        (b"}ctorch\nSize\nK\1K\2\x86\x85RNs", "a tuple as a key"),
        *(
            (b"](" + opcodes * (1 << 16) + b"e", "24 times its size in memory")
            for opcodes in (b"}", b"]", b"(", b"}K\0Ns", b"K\1\x85\x85\x85", b"](K\1e")
        ),
    ],
    ids=range(13),
)
def test_numbers_that_collide_and_values_that_fill_the_memory(
    pickled: bytes, message: str, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    if "memory" in message:
        thresholds(_MEMORY=1 << 18)
    monkeypatch.setattr("tstore.core.format.tree_document._MAX_SECONDS", 0.5)
    data = np.frombuffer(archive(HEAD + pickled + b"."), np.uint8)
    with bounded_time(20), pytest.raises((Corrupt, UnsupportedFormat), match=message):
        read_archive(data, "x")


def test_small_numbers_that_walk_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tstore.core.format.tree_document._MAX_SECONDS", 0.1)
    pickled = b"}(" + b"".join(b"J" + struct.pack("<i", n) + b"N" for n in long_walks(15)) + b"u."
    data = np.frombuffer(archive(HEAD + pickled), np.uint8)
    with bounded_time(5), pytest.raises(Corrupt, match="numbers as keys of dicts collide"):
        read_archive(data, "x")


def test_honest_numbers_as_keys() -> None:
    state = {i: {"step": i} for i in range(20_000)}
    sparse = {i * 1_000_003 - (1 << 70): -i for i in range(100_000)} | {0.5: 1, True: 2, -7: 3}
    for value in (state, sparse, [True] * 100_000, [(i, i) for i in range(20_000)]):
        for protocol in (2, 4):
            data = np.frombuffer(archive(pickle.dumps(value, protocol)), np.uint8)
            assert read_archive(data, "x", max_expansion=1 << 10) == value


def test_holes_of_sparse_files_are_no_values(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(HEAD + b"(" + b"}" * (1 << 22) + b"l.")
    with open(tmp_path / "__0_0.distcp", "wb") as file:
        file.truncate(1 << 40)
    with (
        bounded_time(1),
        pytest.raises(Corrupt, match=r"4194309 bytes, but .* only 0 on the disk"),
    ):
        open_dcp(str(tmp_path))


def test_positions_and_offsets_that_collide() -> None:
    leaves = [(("list", n), n) for n in COLLIDING]
    with bounded_time(5), pytest.raises(Corrupt, match=r"the keys .* in one list, at list; expected 0 to 39999"):
        nested(leaves, "x")
    shuffled = random.Random(1).sample(range(1000), 1000)
    assert nested([(("a", i, "b"), i) for i in shuffled], "x") == {"a": [{"b": i} for i in range(1000)]}
