"""What an import does not take, it tells: all importers of folders, with files of all kinds in them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.numpy

import tstore.sync as tstore
from tests.support.lazy import lazy
from tests.support.sources import imported, untold_additions, untold_removals
from tstore.checkpoint.structure import flatten
from tstore.convert.dcp import open_dcp
from tstore.convert.dcp_export import export_dcp
from tstore.convert.exporting import export_huggingface, export_safetensors
from tstore.convert.gguf_export import export_gguf
from tstore.convert.importing import recognize
from tstore.convert.orbax import left_out
from tstore.convert.references import export_references
from tstore.convert.zarr_export import export_zarr
from tstore.errors import InvalidArgument

torch = lazy("torch")
dcp = lazy("torch.distributed.checkpoint")
zarr = lazy("zarr")


def trainer(folder: Path) -> None:
    """Write what a Trainer of Hugging Face does."""
    folder.mkdir(parents=True)
    safetensors.numpy.save_file({"w": np.ones((2, 3), "f4")}, folder / "model.safetensors", {"format": "pt"})
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        (folder / name).write_bytes(b"PK\x03\x04")
    for name in ("config.json", "trainer_state.json"):
        (folder / name).write_text("{}")


def sharded(folder: Path) -> None:
    tstore.save(folder.parent / "saved", {"a": np.arange(30.0), "b": np.arange(40.0)}, 0)
    asyncio.run(export_huggingface(folder.parent / "saved", folder, max_shard_size=250))
    safetensors.numpy.save_file({"a": np.zeros(3)}, folder / "consolidated.safetensors")
    add_to(folder / "model.safetensors.index.json", "metadata", {"total_size": 560, "run": "a"})


def add_to(file: Path, key: str, value: Any) -> None:
    """Add an entry to the JSON object in a file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))


def megatron(folder: Path) -> None:
    """Write what Megatron does."""
    dcp.save({"model": {"w": torch.ones(2, 3), "b": torch.arange(4)}}, checkpoint_id=folder, no_dist=True)
    for name in ("common.pt", "metadata.json"):
        (folder / name).write_bytes(b"PK\x03\x04")


def orbax(folder: Path) -> None:
    """Write a step with two items, in the layout of Orbax with a folder for each array."""
    keys = {"a": [{"key": "a", "key_type": 2}], "b.0": [{"key": "b", "key_type": 2}, {"key": "0", "key_type": 1}]}
    entry = {"value_metadata": {"value_type": "np.ndarray"}}
    tree = {str(key): {"key_metadata": key, **entry} for key in keys.values()}
    (folder / "metrics").mkdir(parents=True)
    (folder / "metrics" / "metrics").write_text('{"loss": 0.5}')
    for name in keys:
        array = zarr.create_array(folder / "state" / name, shape=(4, 4), chunks=(2, 4), dtype="f4", zarr_format=3)
        array[...] = 1 + np.arange(16).reshape(4, 4)
    document = {"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": True, "custom_metadata": {"epoch": 1}}
    (folder / "state" / "_METADATA").write_text(json.dumps(document))
    (folder / "state" / "_sharding").write_text("{}")
    step = {"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2, "custom_metadata": {"run": "a"}}
    (folder / "_CHECKPOINT_METADATA").write_text(json.dumps(step))


def zarr_group(folder: Path, zarr_format: Any) -> None:
    root = zarr.open_group(folder, mode="w", zarr_format=zarr_format, attributes={"kind": "volume"})
    for name in ("a/b/w", "v", "a/scalar"):
        shape: Any = () if "scalar" in name else (3, 2)
        chunks: Any = () if "scalar" in name else (2, 2)
        root.create_array(name, shape=shape, chunks=chunks, dtype="i4")[...] = 7
    outside = {2: ["9.0", "9.1"], 3: ["c/9/0", "c/9/1"]}[zarr_format]
    for name in outside:
        (folder / "v" / name).parent.mkdir(exist_ok=True)
        (folder / "v" / name).write_bytes(b"1234")
    if zarr_format == 3:
        (folder / "v" / ".zattrs").write_text('{"unit": "m"}')
    for file in {2: ["v/.zarray", ".zgroup"], 3: ["v/zarr.json", "zarr.json"]}[zarr_format]:
        add_to(folder / file, "note", {"must_understand": False})
    (folder / "OME").mkdir()
    (folder / "OME" / "METADATA.ome.xml").write_text("<OME/>")


V2, V3 = (lambda folder: zarr_group(folder, 2)), (lambda folder: zarr_group(folder, 3))
TRAINER = [
    "config.json",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
]
SOURCES: dict[str, tuple[Callable[[Path], None], list[str], set[str]]] = {
    "trainer": (trainer, TRAINER, set()),
    "sharded": (sharded, ["consolidated.safetensors", "metadata 'run'"], set()),
    "megatron": (megatron, ["common.pt", "metadata.json"], set()),
    "orbax": (
        orbax,
        ["metrics/", "state/_METADATA: custom_metadata", "_CHECKPOINT_METADATA: custom_metadata"],
        {"state/_sharding"},
    ),
    "v2": (
        V2,
        [".zgroup: note", "OME/", "v/.zarray: note", "v/9.0 (2 chunks outside of the grid)"],
        {"v/9.1"},
    ),
    "v3": (
        V3,
        ["OME/", "v/.zattrs", "v/c/9/0 (2 chunks outside of the grid)", "v/zarr.json: note", "zarr.json: note"],
        {"v/c/9/1"},
    ),
}
"""For each importer of folders: a source, what it leaves out, and files that only describe the others."""


STRAYS = ("notes.txt", ".hidden", "optimizer.pt", "model.bin", "extra/deep/METADATA.ome.xml", "a.json")
CHUNKS = ("07", "c/07/7")
UNUSED = ("d/0", "manifest.ocdbt", "_strings.json")  # of Orbax, which this checkpoint does without


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("name", SOURCES)
def test_no_file_is_left_out_without_a_word(tmp_path: Path, name: str) -> None:
    write, expected, about = SOURCES[name]
    write(tmp_path / "source")
    assert asyncio.run(imported(tmp_path / "source"))[1] == expected
    idle = set(untold_removals(tmp_path / "source", tmp_path))
    assert {file for file in idle if not file.endswith((".zgroup", ".zattrs"))} == about
    assert untold_additions(tmp_path / "source", STRAYS + (UNUSED if name == "orbax" else CHUNKS)) == []


def test_metadata_on_which_files_disagree_is_told(tmp_path: Path) -> None:
    for name, metadata in (("a", {"format": "pt", "part": "1"}), ("b", {"format": "pt", "part": "2", "x": "y"})):
        safetensors.numpy.save_file({name: np.ones(3)}, tmp_path / f"{name}.safetensors", metadata)
    (nodes, *_), left_out = asyncio.run(imported(tmp_path))
    assert (nodes[""]["safetensors"], left_out) == ({"format": "pt"}, ["metadata 'part'", "metadata 'x'"])


def test_metadata_of_orbax_leads_to_no_other_folder(tmp_path: Path) -> None:
    """The names of leaves without an array may be any paths, such as that of all files."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "0.0").touch()
    (tmp_path / "source").mkdir()
    keys = [{"key": str(tmp_path / "other"), "key_type": 2}]
    entry = {"key_metadata": keys, "value_metadata": {"value_type": "None"}}
    document = {"tree_metadata": {"x": entry}, "use_ocdbt": False}
    (tmp_path / "source" / "_METADATA").write_text(json.dumps(document))
    with mock.patch("os.walk", side_effect=AssertionError("walks")):
        assert left_out(str(tmp_path / "source")) == []


def test_a_folder_above_checkpoints_names_the_newest(tmp_path: Path) -> None:
    for step in (9, 10):
        trainer(tmp_path / "run" / f"checkpoint-{step}")
    orbax(tmp_path / "orbax" / "7" / "default")
    (tmp_path / "orbax" / "8.orbax-checkpoint-tmp" / "default").mkdir(parents=True)
    (tmp_path / "orbax" / "8.orbax-checkpoint-tmp" / "_CHECKPOINT_METADATA").write_text("{}")
    hub = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    trainer(hub)
    for folder, count, newest in (
        ("run", "2 checkpoints", "run/checkpoint-10"),
        ("orbax", "1 checkpoint", "orbax/7/default"),
        ("hub", "1 checkpoint", "hub/models--org--name/snapshots/abc"),
    ):
        message = (
            f"is not a checkpoint, but has {count} below it; pass the folder of one, such as {tmp_path / newest};"
        )
        with pytest.raises(InvalidArgument, match=message):
            recognize([tmp_path / folder])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["__0_0.distcp", "__1_0.distcp"], "but not .metadata, which is written last: the save is under way"),
        (
            ["_CHECKPOINT_METADATA", "state.orbax-checkpoint-tmp/_METADATA"],
            "not committed, as state.orbax-checkpoint-tmp",
        ),
    ],
)
def test_a_checkpoint_that_is_not_committed_is_refused(tmp_path: Path, files: list[str], message: str) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    with pytest.raises(InvalidArgument, match=message):
        recognize([tmp_path])


def test_a_step_of_orbax_is_not_committed_by_its_name_or_without_the_time(tmp_path: Path) -> None:
    orbax(tmp_path / "3")
    recognize([tmp_path / "3"])
    (tmp_path / "3").rename(tmp_path / "3.orbax-checkpoint-tmp-17")
    for folder in ("3.orbax-checkpoint-tmp-17", "3.orbax-checkpoint-tmp-17/state"):
        with pytest.raises(InvalidArgument, match=r"has not committed, as 3\.orbax-checkpoint-tmp-17 tells"):
            recognize([tmp_path / folder])
    (tmp_path / "3.orbax-checkpoint-tmp-17").rename(tmp_path / "3")
    (tmp_path / "3" / "_CHECKPOINT_METADATA").write_text(
        '{"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": null}'
    )
    with pytest.raises(InvalidArgument, match="has not committed, as _CHECKPOINT_METADATA tells"):
        recognize([tmp_path / "3"])


# ---- exports

VALUES, GROUPS = ["epoch", "none", "empty"], ["empty group bare", "attributes of model"]
EXPORTS: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "out.safetensors": (export_safetensors, [*VALUES, *GROUPS]),
    "out": (export_huggingface, [*VALUES, *GROUPS]),
    "out.gguf": (export_gguf, [*VALUES, *GROUPS]),
    "dcp": (export_dcp, ["empty", *GROUPS]),
    "out.zarr": (export_zarr, VALUES),
    "refs.json": (export_references, VALUES),
}
"""For each exporter: the name of a result, and what it can't hold of the checkpoint below."""


def names_in(out: Path) -> list[str]:
    """Return the sorted names of the arrays in a result."""
    match out.name:
        case "out.safetensors":
            return sorted(safetensors.numpy.load_file(out))
        case "out":
            return sorted(safetensors.numpy.load_file(out / "model.safetensors"))
        case "out.gguf":
            return sorted(tensor.name for tensor in lazy("gguf").GGUFReader(out).tensors)
        case "dcp":
            return sorted(flatten(open_dcp(str(out))[0])[1])
        case "refs.json":
            names = (name.rpartition("/")[0] for name in json.loads(out.read_text())["refs"] if "/c/" in name)
            return sorted({name.removesuffix("/c") for name in names})
    return sorted(p.relative_to(out).parent.as_posix() for p in out.rglob("c"))


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_tells_what_it_does_not_hold_and_takes_a_part(tmp_path: Path, name: str) -> None:
    export, left_out = EXPORTS[name]
    if name == "out.gguf":
        pytest.importorskip("gguf")
    store = tmp_path / "store"
    model = {"m": {"w": np.ones(32, "f4")}, "b": np.ones(3, "f4")}
    tstore.save(store, {"model": model, "optimizer": np.ones(2, "f4"), "epoch": 3, "none": None, "empty": {}}, 1)
    with tstore.open(store).transaction() as tx:
        tx.create_group("model", {"kind": "mlp"})
        tx.create_group("bare")
    report = asyncio.run(export(store, tmp_path / name, at=2))
    assert report.left_out == left_out
    (tmp_path / "part").mkdir()
    part = tmp_path / "part" / name
    report = asyncio.run(export(store, part, at=2, subtree="model"))
    assert (report.tensors, report.left_out) == (2, [text for text in left_out if "model" in text])
    flat = name in ("out.safetensors", "out", "out.gguf")
    assert names_in(part) == ["b", "m.w" if flat else "m/w"]
    with pytest.raises(
        InvalidArgument, match=r"no array at or below 'mo'; .*its outermost names are: model, optimizer"
    ):
        asyncio.run(export(store, tmp_path / "part" / f"2{name}", subtree="mo"))
    (tmp_path / "skipped").mkdir()
    report = asyncio.run(export(store, tmp_path / "skipped" / name, at=2, skip=["optimizer", "*/m"]))
    assert (report.tensors, report.left_out) == (1, [*left_out, "model/m/w", "optimizer"])
    assert names_in(tmp_path / "skipped" / name) == ["model.b" if flat else "model/b"]
    if name == "dcp":
        assert open_dcp(str(tmp_path / "skipped" / name))[0]["epoch"] == 3
    with tstore.open(store).transaction() as tx:
        tx.create_array("model/beside", data=np.ones(32, "f4"))
    (tmp_path / "beside").mkdir()
    report = asyncio.run(export(store, tmp_path / "beside" / name, at=3))
    assert (report.tensors, report.left_out) == (4, list(dict.fromkeys([*VALUES, *left_out])))
    with pytest.raises(InvalidArgument, match=r"has no array at 'none', 'o/\*\*', which skip names"):
        asyncio.run(export(store, tmp_path / "skipped" / f"2{name}", skip=["none", "o/**", "model/b"]))
    if flat:
        (tmp_path / "stripped").mkdir()
        asyncio.run(export(store, tmp_path / "stripped" / name, subtree="model", strip="m."))
        with pytest.raises(InvalidArgument, match="no name begins with 'x', which was to be stripped"):
            asyncio.run(export(store, tmp_path / "stripped" / f"2{name}", strip="x"))
        assert names_in(tmp_path / "stripped" / name) == ["b", "w"]


def test_files_beside_a_model_may_be_in_folders(tmp_path: Path) -> None:
    files = {"config.json": np.ones(1, "u1"), "additional_chat_templates": {"tool.jinja": np.ones(2, "u1")}}
    tstore.save(tmp_path / "s", {"model": {"w": np.ones(2, "f4")}, "files": files}, 1)
    asyncio.run(export_huggingface(tmp_path / "s", tmp_path / "out", subtree="model"))
    assert (tmp_path / "out" / "additional_chat_templates" / "tool.jinja").read_bytes() == b"\1\1"


def test_a_structure_that_has_an_array_twice_is_not_followed(tmp_path: Path) -> None:
    items = [[["str", name], ["array", "a"]] for name in ("a", "b")]
    with tstore.open(tmp_path / "s", "x").transaction() as tx:
        tx.create_array("a", data=np.ones(2, "f4"))
        tx.create_group("", {"tstore": {"structure": ["dict", items]}})
    asyncio.run(export_safetensors(tmp_path / "s", tmp_path / "out.safetensors"))
    assert names_in(tmp_path / "out.safetensors") == ["a"]
