"""`tstore import` and `tstore export` of other formats: what a source was taken for, and what is refused."""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import tstore.sync as tstore
from tests.support.lazy import lazy
from tstore.cli import main

zarr = lazy("zarr")

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    tree = {"a": {"w": np.ones((10, 100), np.float32)}, "b": np.zeros(1000), "epoch": 3}
    tstore.save(tmp_path / "store", tree, 4)
    return tmp_path / "store"


def test_a_folder_by_size_and_back(store: Path, tmp_path: Path, call: Call) -> None:
    code, out, err = call("export", store, tmp_path / "model", "--max-shard-size", "5KB")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"{tmp_path / 'model'}: exported 2 tensors, 12.0 kB in 2 files, of version 1"
    names = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert sorted(os.listdir(tmp_path / "model")) == names
    code, out, err = call("import", tmp_path / "model", tmp_path / "b", "--step", 1)
    assert (code, err) == (0, "")
    kind = "a folder of safetensors files"
    assert out == f"{tmp_path / 'b'}: imported 2 tensors, 12.0 kB from {kind}, as version 1 (step/1)\n"
    files = [tmp_path / "model" / name for name in names]
    code, out, _ = call("import", *files[:2], tmp_path / "c", "--step", 1, "--json")
    assert json.loads(out)["kind"] == "several safetensors files"
    code, out, _ = call("import", files[2], tmp_path / "d", "--step", 1, "--json")
    assert json.loads(out)["kind"] == "an index of safetensors files"
    assert list(tstore.restore(tmp_path / "c")) == list(tstore.restore(tmp_path / "d")) == ["a.w", "b"]
    code, out, _ = call("export", store, tmp_path / "plain", "--json")
    assert json.loads(out)["format"] == "huggingface"
    assert os.listdir(tmp_path / "plain") == ["model.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["out.pt"], "does not write .pt, the suffix of torch.save"),
        (["out.safetensor"], ".safetensor is not the suffix of a format that tstore writes"),
        (["out.zarr", "--strip", "a."], "--strip is for the names in"),
        (["out", "--subtree", "c"], "has no array at or below 'c'; pass the path of a group"),
        (["out", "--strip", "module."], "no name begins with 'module.', which was to be stripped"),
        (["out.zarr", "--subtree", "b"], "b is an array; pass a group above it"),
        (["out.npz"], "does not write .npz, the suffix of NumPy"),
        (["out.zip"], "does not write .zip, the suffix of zip archives"),
        (["out", "--keep-exmy"], "--keep-exmy is for a Zarr folder or a reference file"),
        (["out.json"], ".json is the suffix of a reference file; pass --references"),
        (["out.parq", "--zarr"], ".parq is the suffix of a reference file"),
        (["out.zarr", "--references"], "ends in .json, or in .parq"),
        (["out.safetensors", "--references"], "ends in .json, or in .parq"),
        (["out.json", "--references", "--max-shard-size", "5GB"], "--max-shard-size is for a Hugging Face folder"),
        (["out.gguf", "--to", "huggingface"], "only --to gguf writes a file whose name ends in .gguf"),
        (["out", "--to", "gguf"], "only --to gguf writes a file whose name ends in .gguf"),
        (["out.gguf", "--layout", "fp8"], "--layout is for a safetensors file or a Hugging Face folder"),
        (["out.gguf", "--requantize", "fp8"], "q8_0 or q4_0 for a GGUF file"),
        (["out", "--layout", "fp8", "--requantize", "q8_0"], "--requantize is fp8 for --layout"),
        (["out", "--requantize", "fp8"], "needs --layout compressed-tensors or --layout fp8"),
        (["out.zarr", "--requantize", "q8_0"], "--requantize is fp8 for --layout"),
        (["out.safetensors", "--layout", "compressed-tensors"], "has a config.json: pass a folder as OUT"),
        (["out", "--layout", "mx"], "--layout"),
        (["out.safetensors", "--zarr"], "only --to safetensors writes a file"),
        (["out.safetensors", "--to", "huggingface"], "only --to safetensors writes a file"),
        (["out.safetensors", "--to", "dcp"], "only --to safetensors writes a file"),
        (["out", "--to", "safetensors"], "only --to safetensors writes a file"),
        (["out.safetensors", "--max-shard-size", "5GB"], "--max-shard-size is for a Hugging Face folder"),
        (["out", "--to", "dcp", "--max-shard-size", "5GB"], "--max-shard-size is for a Hugging Face folder"),
        (["out", "--max-shard-size", "0"], "is not a size"),
        (["out", "--max-shard-size", "5 cats"], "is not a size"),
        (["out", "--to", "pt"], "--to"),
    ],
)
def test_misuse_of_export(store: Path, tmp_path: Path, call: Call, arguments: list[str], message: str) -> None:
    code, out, err = call("export", store, tmp_path / arguments[0], *arguments[1:])
    assert (code, out) == (2, "")
    assert message in err
    assert os.listdir(tmp_path) == ["store"]


def test_a_zarr_folder_and_back(store: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "model.zarr"
    for arguments in ((out,), (tmp_path / "plain", "--zarr")):
        code, text, err = call("export", store, *arguments)
        assert (code, err) == (0, "")
        assert (
            text == f"{arguments[0]}: exported 2 tensors, 12.0 kB in 6 files, of version 1\nnot exported: epoch\n"
        )
    code, text, err = call("import", out, tmp_path / "b")
    assert (code, err) == (0, "")
    assert text == f"{tmp_path / 'b'}: imported 2 tensors, 12.0 kB from a Zarr folder, as version 1\n"
    assert np.array_equal(tstore.open(tmp_path / "b", "r").snapshot().array("a/w").read(), np.ones((10, 100)))
    for more in ((), ("--step", 4), ("--codec", "e4m3")):
        code, text, err = call("import", out, tmp_path / "b", *more)
        assert (code, text) == (2 if more else 1, "")
        assert ("leave out --step, --codec and --skip" if more else "'a/w' exists") in err


def test_a_reference_file(store: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "refs.json"
    code, text, err = call("export", store, "--references", out)
    assert (code, err) == (0, "")
    [exported, hint, left_out] = text.splitlines()
    assert (exported, left_out) == (f"{out}: exported 2 tensors, 12.0 kB, of version 1", "not exported: epoch")
    assert hint.startswith("to read it: zarr.open_group(")
    root = eval(hint.removeprefix("to read it: "), {"zarr": zarr})
    assert np.array_equal(root["a/w"][:], np.ones((10, 100)))
    code, text, err = call("export", store, "--references", out)
    assert (code, text) == (1, "")
    assert "already exists" in err


def test_sizes(store: Path, tmp_path: Path, call: Call) -> None:
    for size, files in {"100": 2, "9kb": 2, "12KB": 1, "1mib": 1}.items():
        code, out, _ = call("export", store, tmp_path / size, "--max-shard-size", size, "--json")
        assert (code, json.loads(out)["files"]) == (0, files)


def test_a_file_of_torch_needs_trust(tmp_path: Path, call: Call) -> None:
    for start in (b"PK\x03\x04" + bytes(100), b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."):
        (tmp_path / "model.pt").write_bytes(start)
        code, out, err = call("import", tmp_path / "model.pt", tmp_path / "store", "--step", 0)
        assert (code, out) == (2, "")
        assert "a file of torch.save, a pickle, and loading one may run code" in err
        assert "--trust" in err
        assert os.listdir(tmp_path) == ["model.pt"]
    with zipfile.ZipFile(tmp_path / "model.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}X\x01\x00\x00\x00aK\x05s.")
    code, out, err = call("import", tmp_path / "model.pt", tmp_path / "store", "--step", 0, "--trust")
    assert (code, err) == (0, "")
    assert "imported 0 tensors, 0 B from a file of torch.save" in out
    assert tstore.restore(tmp_path / "store") == {"a": 5}


def test_what_an_import_leaves_out_is_listed_and_values_may_be_skipped(tmp_path: Path, call: Call) -> None:
    folder, store = tmp_path / "checkpoint-4", tmp_path / "store"
    folder.mkdir()
    safetensors.numpy.save_file({"a.w": np.ones(3), "b.w": np.ones(3)}, folder / "model.safetensors")
    (folder / "optimizer.pt").touch()
    (folder / "trainer_state.json").touch()
    code, out, _ = call("import", folder, store, "--step", 4, "--skip", "b.*")
    assert (code, out.splitlines()[1:]) == (0, ["not imported: optimizer.pt, trainer_state.json, b.w"])
    assert list(tstore.restore(store)) == ["a.w"]
    code, out, err = call("import", folder, store, "--step", 5, "--skip", "c")
    assert (code, out) == (2, "")
    assert "has no value at 'c', which skip names" in err


def test_trust_changes_nothing_for_other_sources(tmp_path: Path, call: Call) -> None:
    safetensors.numpy.save_file({"w": np.ones(3)}, tmp_path / "in.safetensors")
    code, out, _ = call("import", tmp_path / "in.safetensors", tmp_path / "store", "--step", 0, "--trust")
    assert code == 0
    assert "from a safetensors file" in out


def test_unknown_sources_are_refused_before_a_store_is_made(tmp_path: Path, call: Call) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "steps" / "100").mkdir(parents=True)
    (tmp_path / "steps" / "100" / "_CHECKPOINT_METADATA").write_text("{}")
    cases: list[tuple[list[Any], int, str]] = [
        ([tmp_path / "empty"], 2, "can't be imported: it has neither"),
        (
            [tmp_path / "steps"],
            2,
            f"1 checkpoint below it; pass the folder of one, such as {tmp_path / 'steps' / '100'}",
        ),
        ([tmp_path / "steps" / "100"], 1, "without _METADATA"),
        ([tmp_path / "nowhere"], 1, "nowhere"),
        ([tmp_path / "empty", tmp_path / "steps"], 2, "is a folder; pass it alone"),
    ]
    for sources, expected, message in cases:
        code, out, err = call("import", *sources, tmp_path / "store", "--step", 0)
        assert (code, out) == (expected, ""), err
        assert message in err
    code, _, err = call("import", tmp_path / "nowhere", tmp_path / "store")
    assert (code, "nowhere: No such file" in err) == (1, True)
    code, _, err = call("import", tmp_path / "steps" / "100", tmp_path / "store")
    assert (code, "which becomes a step; pass --step N" in err) == (2, True)
    assert sorted(os.listdir(tmp_path)) == ["empty", "steps"]


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    """A store with a quantized version, some of whose arrays other formats lack."""
    rng = np.random.default_rng(0)
    tree = {name: {"weight": rng.normal(size=(64, 64)).astype("f4")} for name in "abcd"}
    store = tmp_path / "quantized"
    tstore.save(store, {**tree, "norm": np.ones(64, "f4")}, 1)
    rules = {"a/*": {"format": "e2m1", "block": 32}, "b/*": {"format": "e2m1", "block": 64}, "c/*": "e3m3"}
    tstore.quantize(store, {**rules, "d/*": {"format": "e3m6", "axis": -1}}, tag="low")
    return store


def test_an_export_in_low_bits_names_what_it_decodes(quantized: Path, tmp_path: Path, call: Call) -> None:
    code, text, err = call("export", quantized, tmp_path / "plain", "--at", "low")
    assert (code, err) == (0, "")
    assert text.splitlines()[1:] == [
        "decoded 4 quantized arrays; --layout compressed-tensors or --layout fp8 keeps low bits",
        f"no configuration: from_pretrained also needs the config.json and tokenizer in {tmp_path / 'plain'}",
    ]
    options = ("--at", "low", "--layout", "compressed-tensors")
    code, text, err = call("export", quantized, tmp_path / "out", *options)
    assert (code, err) == (0, "")
    lines = text.splitlines()[1:]
    assert lines[:2] == [
        "2 quantized arrays as mxfp4-pack-quantized: a.weight, b.weight",
        "1 quantized array as float-quantized: c.weight",
    ]
    assert re.fullmatch(r"decoded \(FP8 lacks the values of [\d,]+ of its 4,096 elements\): d\.weight", lines[2])
    code, text, err = call("export", quantized, tmp_path / "rounded", *options, "--requantize", "fp8", "--json")
    assert (code, err) == (0, "")
    arrays = {a["name"]: a for a in json.loads(text)["quantized"]}
    assert arrays["a.weight"] == {
        "name": "a.weight",
        "format": "e2m1",
        "written_as": "mxfp4-pack-quantized",
        "changed": 0,
        "reason": "",
    }
    assert arrays["d.weight"]["changed"] > 0
    code, text, err = call("export", quantized, tmp_path / "a.safetensors", "--at", "low", "--layout", "fp8")
    assert "3 quantized arrays as F8_E4M3: a.weight, b.weight, c.weight" in text.splitlines()
    code, text, err = call("export", quantized, tmp_path / "head", *options[2:])
    assert text.splitlines()[1:-1] == [
        "version 1 has no quantized arrays, so nothing is in low bits; pass the tag of a quantized copy as --at"
    ]


def test_an_export_to_gguf(quantized: Path, tmp_path: Path, call: Call) -> None:
    code, text, err = call("export", quantized, tmp_path / "a.gguf", "--at", "low")
    assert (code, err) == (0, "")
    lines = text.splitlines()[1:]
    assert lines[0] == "2 quantized arrays as MXFP4: a.weight, b.weight"
    assert [re.sub(r"of \S+ times", "of N times", line) for line in lines[1:]] == [
        "decoded (it has values of N times the least step of e3m3, more than 127): c.weight",
        "decoded (it has values of N times the least step of e3m6, more than 127): d.weight",
    ]
    code, text, err = call("export", quantized, tmp_path / "b.gguf", "--at", "low", "--requantize", "q8_0")
    assert (code, err) == (0, "")
    assert "2 quantized arrays as Q8_0: c.weight, d.weight" in text.splitlines()
    assert sum(line.startswith("rounded to Q8_0 (") for line in text.splitlines()) == 2
