"""Exports to GGUF, read back by the package gguf."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import exmy
import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import tstore.sync as tstore
from tstore.convert.exporting import ExportReport, format_of
from tstore.convert.gguf_export import export_gguf
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument

Values = npt.NDArray[Any]


def weights(shape: tuple[int, ...] = (6, 256), seed: int = 0) -> Values:
    return np.random.default_rng(seed).normal(0, 0.05, shape).astype(np.float32)


def quantized(folder: Path, tree: dict[str, Any], rules: dict[str, Any]) -> Path:
    store = folder / "store"
    tstore.save(store, tree, 1)
    tstore.quantize(store, rules, tag="low")
    return store


def export(store: Path, out: Path, **options: Any) -> ExportReport:
    return asyncio.run(export_gguf(store, out, at="low", **options))


def read(path: Path) -> dict[str, tuple[str, Values]]:
    """Return the type and the values of each tensor, as the package decodes them."""
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        kind, shape = tensor.tensor_type, tuple(reversed(tensor.shape.tolist()))
        if kind.name in ("Q4_0", "Q8_0", "MXFP4", "BF16"):
            values = gguf.dequantize(tensor.data, kind)
        else:
            values = np.array(tensor.data)
        tensors[tensor.name] = (kind.name, values.reshape(shape))
    return tensors


EXACT = {
    "Q4_0": ["e0m1", "e0m2", "e0m3", "e1m0", "e1m1", "e1m2", "e2m0"],
    "MXFP4": ["e2m1"],
    "Q8_0": ["e0m4", "e0m5", "e0m6", "e0m7", "e1m3", "e1m4", "e1m5", "e1m6", "e2m2", "e2m3", "e2m4", "e3m0"],
}
GROUPS: list[dict[str, Any]] = [{}, {"axis": -1}, {"block": 32}, {"block": 128}]


def test_the_formats_that_gguf_has_bit_for_bit(tmp_path: Path) -> None:
    cases = [
        (f"{name}.{i}", kind, {"format": name, **group})
        for kind, names in EXACT.items()
        for name in names
        for i, group in enumerate(GROUPS)
    ]
    tree = {path: weights(seed=seed) for seed, (path, _, _) in enumerate(cases)}
    tree["e2m1.2"][3, 32:64] = 0
    store = quantized(tmp_path, tree, {path: rule for path, _, rule in cases})
    report = export(store, tmp_path / "a.gguf")
    decoded = tstore.restore(store, at="low")
    tensors = read(tmp_path / "a.gguf")
    for path, kind, _ in cases:
        assert tensors[path][0] == kind, path
        np.testing.assert_array_equal(tensors[path][1], decoded[path], path)
    assert [(a.name, a.written_as, a.changed, a.reason) for a in report.quantized] == [
        (path, kind, 0, "") for path, kind, _ in cases
    ]
    size = sum({"Q4_0": 18, "MXFP4": 17, "Q8_0": 34}[kind] for _, kind, _ in cases) * 6 * 256 // 32
    assert report.bytes == size
    assert size < (tmp_path / "a.gguf").stat().st_size < size + 200 * len(cases)


def test_scales_that_float16_has(tmp_path: Path) -> None:
    values = np.tile(np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32) * 0.375, (3, 8))
    codecs = [{"name": "exmy", "configuration": {"format": "e2m1", "scale": 0.375}}]
    with tstore.open(tmp_path / "store").transaction(tag="low") as tx:
        tx.create_array("w", values.shape, "float32", (3, 64), codecs).write(values)
    export(tmp_path / "store", tmp_path / "a.gguf")
    assert read(tmp_path / "a.gguf")["w"][0] == "Q8_0"
    assert np.array_equal(read(tmp_path / "a.gguf")["w"][1], values)


OTHERS: dict[str, tuple[Any, str]] = {
    "e4m3": ({"format": "e4m3", "axis": -1}, "times the least step of e4m3, more than 127"),
    "e2m5": ({"format": "e2m5", "block": 32}, "times the least step of e2m5"),
    "scales": ({"format": "e2m1", "block": 32, "scale": "6bit"}, "scales that are not numbers of float16"),
    "entropy": ({"bits": 5, "coding": "entropy"}, "more than 127|not numbers of float16"),
    "block": ({"format": "e2m1", "block": 16}, "blocks of 32 do not divide"),
    "columns": ({"format": "e2m1", "axis": 0}, "along axis 0"),
    "length": ({"format": "e2m1", "axis": -1}, "blocks of 32 do not divide"),
}


def others(folder: Path) -> Path:
    tree = {name: weights((64, 48) if name == "length" else (64, 256), seed) for seed, name in enumerate(OTHERS)}
    return quantized(folder, tree, {name: rule for name, (rule, _) in OTHERS.items()})


def test_other_formats_are_decoded_and_named(tmp_path: Path) -> None:
    import re

    store = others(tmp_path)
    report = export(store, tmp_path / "a.gguf")
    tensors, decoded = read(tmp_path / "a.gguf"), tstore.restore(store, at="low")
    assert {a.name for a in report.quantized} == OTHERS.keys()
    for a in report.quantized:
        assert (a.written_as, a.changed) == ("F32", 0)
        assert re.search(OTHERS[a.name][1], a.reason), (a.name, a.reason)
        assert tensors[a.name][0] == "F32"
        assert tensors[a.name][1].tobytes() == decoded[a.name].tobytes()


@pytest.mark.parametrize(("kind", "least"), [("q8_0", 40), ("q4_0", 18)])
def test_they_are_quantized_again_if_asked(tmp_path: Path, kind: Any, least: int) -> None:
    store = others(tmp_path)
    report = export(store, tmp_path / "a.gguf", requantize=kind)
    tensors, decoded = read(tmp_path / "a.gguf"), tstore.restore(store, at="low")
    for a in report.quantized:
        stored, values = tensors[a.name]
        if a.name == "length":  # 48 is no multiple of 32
            assert (a.written_as, stored) == ("F32", "F32")
            continue
        assert (a.written_as, a.changed) == (kind.upper(), None)
        assert stored == kind.upper()
        assert exmy.sqnr(decoded[a.name], values) > least


def test_everything_else_keeps_its_dtype(tmp_path: Path) -> None:
    tree = {
        "f16": weights().astype(np.float16),
        "bf16": weights().astype(ml_dtypes.bfloat16),
        "f64": weights((3,)).astype(np.float64),
        "i32": np.arange(24, dtype=np.int32).reshape(2, 3, 4),
        "i8": np.arange(5, dtype=np.int8),
        "step": np.int64(7),
        "epoch": 3,
    }
    tstore.save(tmp_path / "store", tree, 1)
    report = asyncio.run(export_gguf(tmp_path / "store", tmp_path / "a.gguf", architecture="llama"))
    assert (report.left_out, report.quantized) == (["epoch"], [])
    tensors = read(tmp_path / "a.gguf")
    assert {n: k for n, (k, _) in tensors.items()} == {
        "f16": "F16",
        "bf16": "BF16",
        "f64": "F64",
        "i32": "I32",
        "i8": "I8",
        "step": "I64",
    }
    for name in ("f16", "f64", "i32", "i8"):
        assert tensors[name][1].tobytes() == tree[name].tobytes()
    assert tensors["bf16"][1].tolist() == tree["bf16"].tolist()
    assert tensors["step"][1].tolist() == [7]
    field = gguf.GGUFReader(tmp_path / "a.gguf").get_field("general.architecture")
    assert field is not None
    assert field.contents() == "llama"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": np.zeros(3, np.uint8)}, "a: dtype uint8, not one of float16"),
        ({"a": np.zeros(3, ml_dtypes.float8_e4m3fn)}, "a: dtype float8_e4m3fn"),
        ({"a": np.zeros((1,) * 5)}, r"a: shape \[1, 1, 1, 1, 1\], not up to 4 axes"),
        ({"a": np.zeros((0, 3))}, r"a: shape \[0, 3\], not up to 4 axes, with elements"),
        ({"a" * 64: np.zeros(3)}, "a name of more than 63 bytes"),
    ],
)
def test_what_gguf_lacks(tmp_path: Path, tree: dict[str, Any], message: str) -> None:
    tstore.save(tmp_path / "store", tree, 1)
    with pytest.raises(InvalidArgument, match=message):
        asyncio.run(export_gguf(tmp_path / "store", tmp_path / "a.gguf"))
    assert not (tmp_path / "a.gguf").exists()


def test_files_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = quantized(tmp_path, {"w": weights(), "x": weights(seed=1)}, {"w": "e2m1"})
    (tmp_path / "a.gguf").write_bytes(b"mine")
    with pytest.raises(AlreadyExists):
        export(store, tmp_path / "a.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == b"mine"
    for pack in (store / "txn").rglob("pack-*"):
        pack.write_bytes(bytes(pack.stat().st_size))
    with pytest.raises(Corrupt):
        export(store, tmp_path / "b.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.gguf", "store"]
    with pytest.raises(InvalidArgument, match="requantize='q5_0': expected 'q8_0', 'q4_0' or None"):
        export(store, tmp_path / "b.gguf", requantize="q5_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InvalidArgument, match="needs the package gguf; run pip install gguf"):
        export(store, tmp_path / "b.gguf")


def test_the_suffix_chooses_the_format() -> None:
    assert format_of("x/model.GGUF") == "gguf"
