"""Exports of quantized arrays in low bits, read back by decoders of the tests and by compressed-tensors."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import Any

import exmy
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore.sync as tstore
from tstore.convert.exporting import ExportReport, export_huggingface, export_safetensors
from tstore.convert.narrow import NoCounterpart, as_floats, as_integers
from tstore.convert.safetensors import open_tensors
from tstore.errors import InvalidArgument

Values = npt.NDArray[Any]


def weights(shape: tuple[int, ...] = (48, 256), seed: int = 0, dtype: str = "float32") -> Values:
    return np.random.default_rng(seed).normal(0, 0.05, shape).astype(dtype)


RULES: dict[str, Any] = {
    "fp4/**": {"format": "e2m1", "block": 32},
    "fp4_rows/**": {"format": "e2m1", "axis": -1},
    "fp4_float/**": {"format": "e2m1", "block": 16, "scale": "6bit"},
    "fp3/**": {"format": "e2m0", "block": 64},
    "fp6/**": {"format": "e2m3", "block": 32},
    "fp6_tensor/**": "e2m3",
    "fp6_wide/**": {"format": "e3m2", "block": 32},
    "fp7/**": {"format": "e3m3", "axis": -1},
    "fp7_tensor/**": "e3m3",
    "int4/**": {"format": "e1m2", "block": 128},
    "int4_scales/**": {"format": "e0m3", "block": 32, "scale": "6bit"},
    "int8/**": {"format": "e0m7", "axis": -1},
    "int8_tensor/**": {"format": "e1m5"},
    "norm": None,
    "plain/**": None,
    "odd": {"format": "e3m2", "axis": -1},
    "heads/**": {"format": "e3m2", "axis": -1},
    "columns/**": {"format": "e3m2", "axis": 0},
    "fine/**": {"format": "e3m6", "axis": -1},
    "entropy/**": {"bits": 5, "coding": "entropy"},
}
SCHEMES = {
    "fp4": "mxfp4-pack-quantized",
    "fp4_rows": "mxfp4-pack-quantized",
    "fp4_float": "float-quantized",
    "fp3": "mxfp4-pack-quantized",
    "fp6": "mxfp6-pack-quantized",
    "fp6_tensor": "mxfp6-pack-quantized",
    "fp6_wide": "mxfp8-quantized",
    "fp7": "float-quantized",
    "fp7_tensor": "float-quantized",
    "int4": "pack-quantized",
    "int4_scales": "pack-quantized",
    "int8": "pack-quantized",
    "int8_tensor": "pack-quantized",
}
REASONS = {
    "odd": "only matrices whose names end in .weight",
    "heads.weight": "only matrices whose names end in .weight",
    "columns.weight": "along axis 0",
    "fine.weight": "FP8 lacks the values of",
    "entropy.weight": "FP8 lacks the values of",
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a quantized version that has each kind of array, of two dtypes."""
    path = tmp_path_factory.mktemp("low") / "store"
    tree: dict[str, Any] = {name: {"weight": weights(seed=i)} for i, name in enumerate(SCHEMES)}
    for name in ("fp4", "fp6_wide", "int4", "fp4_float"):
        tree[name]["weight"][3, :128] = 0
    for name in ("fp7", "int8"):
        tree[name]["weight"][5] = 0
    tree["fp6"]["weight"] = tree["fp6"]["weight"].astype(ml_dtypes.bfloat16)
    tree |= {"norm": weights((256,)), "plain": {"weight": weights((4, 8))}, "odd": weights((8, 96))}
    tree |= {"heads": {"weight": weights((2, 8, 64))}, "columns": {"weight": weights((64, 64))}}
    tree |= {"fine": {"weight": weights()}, "entropy": {"weight": weights()}}
    tstore.save(path, tree, 1)
    tstore.quantize(path, RULES, tag="low")
    return path


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Values]:
    found: dict[str, Values] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def to_folder(store: Path, out: Path, **options: Any) -> ExportReport:
    return asyncio.run(export_huggingface(store, out, at="low", **options))


def outcomes(report: ExportReport) -> dict[str, tuple[str, int | None, str]]:
    return {a.name: (a.written_as, a.changed, a.reason) for a in report.quantized}


# ---- decoders written from the specifications: OCP MX 1.0, and the layout of compressed-tensors

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def fp4(code: int) -> float:
    return E2M1[code & 7] * (-1 if code & 8 else 1)


def fp6_e2m3(code: int) -> float:
    exponent, mantissa = code >> 3 & 3, code & 7
    magnitude = mantissa / 8 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 8)
    return -magnitude if code & 32 else magnitude


def unpacked(packed: Values, bits: int) -> Values:
    """Return the codes of each row: elements follow each other without gaps, the first in the lowest bits."""
    stream = np.unpackbits(packed, axis=1, bitorder="little")
    codes = stream.reshape(len(packed), -1, bits) @ (1 << np.arange(bits))
    return np.asarray(codes)


def decoded(tensors: dict[str, Values], config: dict[str, Any]) -> dict[str, Values]:
    """Return the values of a model in the layout of compressed-tensors, as float32."""
    tensors = dict(tensors)
    assert config["quant_method"] == "compressed-tensors"
    for group in config["config_groups"].values():
        scheme = group["weights"]
        assert scheme["symmetric"]
        for module in group["targets"]:
            scales = tensors.pop(f"{module}.weight_scale")
            if scheme["scale_dtype"] == "torch.uint8":
                assert (scales.dtype, scheme["group_size"]) == (np.uint8, 32)
                scales = np.ldexp(np.float64(1), scales.astype(int) - 127)
            if group["format"] == "pack-quantized":
                assert scheme["type"] == "int"
                words = tensors.pop(f"{module}.weight_packed")
                shape = tuple(tensors.pop(f"{module}.weight_shape").tolist())
                bits = scheme["num_bits"]
                assert words.dtype == np.int32
                numbers = unpacked(words.view(np.uint8), bits).reshape(shape) - float(1 << (bits - 1))
            elif group["format"] == "mxfp4-pack-quantized":
                numbers = np.vectorize(fp4, [float])(unpacked(tensors.pop(f"{module}.weight_packed"), 4))
            elif group["format"] == "mxfp6-pack-quantized":
                numbers = np.vectorize(fp6_e2m3, [float])(unpacked(tensors.pop(f"{module}.weight_packed"), 6))
            else:
                assert group["format"] in ("mxfp8-quantized", "float-quantized")
                numbers = tensors.pop(f"{module}.weight")
                assert numbers.dtype == ml_dtypes.float8_e4m3fn
                numbers = numbers.astype(np.float64)
            shape = {
                "tensor": (1,),
                "channel": (len(numbers), 1),
                "group": (len(numbers), numbers.shape[1] // (scheme["group_size"] or 1)),
            }[scheme["strategy"]]
            assert scales.shape == shape
            if scheme["strategy"] == "group":
                scales = np.repeat(scales, scheme["group_size"], axis=1)
            tensors[f"{module}.weight"] = (numbers * scales).astype(np.float32)
    return tensors


def check_exact(tensors: dict[str, Values], store: Path) -> None:
    expected = flat(tstore.restore(store, at="low"))
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(np.asarray(tensors[name], np.float32), values.astype(np.float32), name)


# ---- compressed-tensors


def test_the_layout_of_compressed_tensors_has_the_same_values(store: Path, tmp_path: Path) -> None:
    report = to_folder(store, tmp_path / "out", layout="compressed-tensors")
    found = outcomes(report)
    assert {name: scheme for name, (scheme, _, reason) in found.items() if not reason} == {
        f"{name}.weight": scheme for name, scheme in SCHEMES.items()
    }
    assert all(changed == 0 for _, changed, _ in found.values())
    for name, reason in REASONS.items():
        assert found[name][0] == "float32"
        assert reason in found[name][2]
    assert found.keys() == {f"{name}.weight" for name in SCHEMES} | REASONS.keys()
    tensors, _ = open_tensors(tmp_path / "out/model.safetensors")
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert set(config["ignore"]) == {"columns", "fine", "entropy", "plain"}
    check_exact(decoded(tensors, config), store)
    assert report.bytes == sum(array.nbytes for array in tensors.values())
    rows, columns = 48, 256
    assert tensors["int4.weight_packed"].shape == (rows, columns // 8)
    assert tensors["fp4.weight_packed"].shape == (rows, columns // 2)
    assert tensors["fp6.weight_packed"].shape == (rows, columns * 3 // 4)


def test_compressed_tensors_reads_it(store: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="pip install compressed-tensors to read its layout with it")
    to_folder(store, tmp_path / "out", layout="compressed-tensors")
    check_read_by_compressed_tensors(tmp_path / "out", store)


def check_read_by_compressed_tensors(folder: Path, store: Path) -> None:
    import safetensors.torch
    import torch
    from compressed_tensors.entrypoints.convert import CompressedTensorsDequantizer

    reader = CompressedTensorsDequantizer(str(folder), dtype=torch.float32)
    tensors = reader.validate(safetensors.torch.load_file(folder / "model.safetensors"))
    check_exact({name: tensor.float().numpy() for name, tensor in tensors.items()}, store)


@pytest.mark.parametrize("f", ["e2m1", "e2m3", "e3m3", "e0m3", "e0m7"])
def test_shapes_that_no_block_or_byte_divides(tmp_path: Path, f: str) -> None:
    """Sides that are no multiples of 2, 8 or 32, vectors, scalars, empty and tied arrays, in both layouts."""
    shapes = [(5, 33), (1, 256), (7, 34), (9, 40), (64, 1), (2, 63), (33, 96), (300,), (0, 64), (64, 0)]
    tree: dict[str, Any] = {"x".join(map(str, shape)): {"weight": weights(shape)} for shape in shapes}
    tied = weights((256, 1024))
    tree |= {"scalar": np.float32(3), "tied": {"weight": tied}, "twin": {"weight": tied}}
    tstore.save(tmp_path / "store", tree, 1)
    tstore.quantize(tmp_path / "store", {"*/weight": {"format": f, "axis": -1}}, tag="low")
    expected = flat(tstore.restore(tmp_path / "store", at="low"))

    to_folder(tmp_path / "store", tmp_path / "packed", layout="compressed-tensors")
    tensors, _ = open_tensors(tmp_path / "packed/model.safetensors")
    config = json.loads((tmp_path / "packed/config.json").read_text())["quantization_config"]
    check_exact(decoded(tensors, config), tmp_path / "store")
    if importlib.util.find_spec("compressed_tensors") is not None:
        check_read_by_compressed_tensors(tmp_path / "packed", tmp_path / "store")

    to_folder(tmp_path / "store", tmp_path / "fp8", layout="fp8")
    tensors, _ = open_tensors(tmp_path / "fp8/model.safetensors")
    for name, values in expected.items():
        read = np.asarray(tensors[name], np.float32)
        if f"{name}_scale" in tensors:
            read = read * broadcast(np.asarray(tensors[f"{name}_scale"], np.float32), values.shape)
        np.testing.assert_array_equal(read, values, name)


def test_one_scheme_is_the_format_of_all(tmp_path: Path) -> None:
    tstore.save(tmp_path / "store", {"a": {"weight": weights()}, "b": {"weight": weights(seed=1)}}, 1)
    tstore.quantize(tmp_path / "store", {"**": {"format": "e2m1", "block": 32}}, tag="low")
    to_folder(tmp_path / "store", tmp_path / "out", layout="compressed-tensors", max_shard_size=3000)
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["format"] == "mxfp4-pack-quantized"
    assert [group["targets"] for group in config["config_groups"].values()] == [["a", "b"]]
    assert config["ignore"] == []
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    tensors = {name: array for shard in shards for name, array in open_tensors(shard)[0].items()}
    assert len(shards) == 4  # codes and scales of one matrix in two files
    check_exact(decoded(tensors, config), tmp_path / "store")


def test_rounding_to_fp8_must_be_asked_for_and_is_counted(store: Path, tmp_path: Path) -> None:
    report = to_folder(store, tmp_path / "out", layout="compressed-tensors", requantize="fp8")
    found = outcomes(report)
    assert {name for name, (_, _, reason) in found.items() if reason} == {"odd", "heads.weight"}
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    values = decoded(open_tensors(tmp_path / "out/model.safetensors")[0], config)
    expected = flat(tstore.restore(store, at="low"))
    for name, (scheme, changed, _) in found.items():
        assert changed is not None
        differing = int(np.count_nonzero(values[name] != expected[name].astype(np.float32)))
        assert differing == changed or (name == "columns.weight" and differing <= changed)
        if changed:
            assert scheme == "float-quantized"
            assert exmy.sqnr(expected[name], values[name]) > 29
    assert {name for name, (_, changed, _) in found.items() if changed} == {
        *("columns.weight", "fine.weight", "entropy.weight")
    }


def test_the_largest_code_of_e4m3_is_nan_in_fp8(tmp_path: Path) -> None:
    """OCP's E4M3 ends at 448. A group that has 480 moves down by a power of two, if its small values allow it."""
    values = np.full((4, 32), 480, np.float32)
    values[1, 1], values[2, 2] = 2.0**-8, 2.0**-9
    tstore.save(tmp_path / "store", {"a": {"weight": values}}, 1)
    tstore.quantize(tmp_path / "store", {"**": {"format": "e4m3", "block": 32, "scale": "max"}}, tag="low")
    report = to_folder(tmp_path / "store", tmp_path / "out", layout="compressed-tensors")
    assert outcomes(report) == {"a.weight": ("float32", 0, "FP8 lacks the values of 1 of its 128 elements")}
    report = to_folder(tmp_path / "store", tmp_path / "rounded", layout="compressed-tensors", requantize="fp8")
    assert outcomes(report) == {"a.weight": ("mxfp8-quantized", 1, "")}
    config = json.loads((tmp_path / "rounded/config.json").read_text())["quantization_config"]
    read = decoded(open_tensors(tmp_path / "rounded/model.safetensors")[0], config)["a.weight"]
    assert np.argwhere(read != values).tolist() == [[2, 2]]
    assert read[2, 2] == 0  # half of its least value, to even


# ---- plain FP8


def broadcast(scales: Values, shape: tuple[int, ...]) -> Values:
    return scales if not scales.ndim else np.repeat(scales, shape[-1] // scales.shape[-1], axis=-1)


def test_fp8_tensors_with_scales(store: Path, tmp_path: Path) -> None:
    report = asyncio.run(export_safetensors(store, tmp_path / "a.safetensors", at="low", layout="fp8"))
    found = outcomes(report)
    kept = {name for name, (_, _, reason) in found.items() if not reason}
    in_fp8 = {f"{name}.weight" for name in SCHEMES if name not in ("int8", "int8_tensor")}
    assert kept == in_fp8 | {"odd", "heads.weight"}
    tensors, _ = open_tensors(tmp_path / "a.safetensors")
    values = {}
    for name, array in tensors.items():
        if name.endswith("_scale"):
            continue
        values[name] = array
        if array.dtype == ml_dtypes.float8_e4m3fn:
            scales = tensors[f"{name}_scale"]
            assert scales.dtype == np.float32
            values[name] = (array.astype(np.float64) * broadcast(scales, array.shape)).astype(np.float32)
    check_exact(values, store)
    assert tensors["heads.weight_scale"].shape == (2, 8, 1)
    assert tensors["fp6_tensor.weight_scale"].shape == ()


def test_e5m2_where_e4m3_lacks_the_range(tmp_path: Path) -> None:
    values = np.ldexp(1.0, np.arange(-14, 14)).astype(np.float32)[None].repeat(32, 0)
    tstore.save(tmp_path / "store", {"a": values}, 1)
    tstore.quantize(tmp_path / "store", {"**": {"format": "e5m2", "axis": -1}}, tag="low")
    report = asyncio.run(
        export_safetensors(tmp_path / "store", tmp_path / "a.safetensors", at="low", layout="fp8")
    )
    assert outcomes(report) == {"a": ("F8_E5M2", 0, "")}
    tensors, _ = open_tensors(tmp_path / "a.safetensors")
    assert tensors["a"].dtype == ml_dtypes.float8_e5m2
    np.testing.assert_array_equal(tensors["a"].astype(np.float32) * tensors["a_scale"], values)


# ---- arrays in several chunks


@pytest.mark.parametrize(("chunks", "scheme"), [((32, 64), "mxfp6-pack-quantized"), ((32, 16), "float-quantized")])
def test_chunks_with_their_own_offsets_are_joined(tmp_path: Path, chunks: tuple[int, int], scheme: str) -> None:
    values = weights((64, 64))
    values[:32, :16] *= 100
    codecs = [{"name": "exmy", "configuration": {"format": "e2m3"}}]
    with tstore.open(tmp_path / "store").transaction(tag="low") as tx:
        tx.create_array("a.weight", values.shape, "float32", chunks, codecs).write(values)
    report = to_folder(tmp_path / "store", tmp_path / "out", layout="compressed-tensors")
    assert outcomes(report) == {"a.weight": (scheme, 0, "")}
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    read = decoded(open_tensors(tmp_path / "out/model.safetensors")[0], config)["a.weight"]
    np.testing.assert_array_equal(read, tstore.open(tmp_path / "store", "r").snapshot().array("a.weight").read())


def test_chunks_that_no_blocks_fit(tmp_path: Path) -> None:
    values = weights((64, 60))
    values[:, :20] *= 100
    codecs = [{"name": "exmy", "configuration": {"format": "e2m3"}}]
    with tstore.open(tmp_path / "store").transaction(tag="low") as tx:
        tx.create_array("a.weight", values.shape, "float32", (64, 20), codecs).write(values)
    report = to_folder(tmp_path / "store", tmp_path / "out", layout="fp8")
    reason = "the offsets of its chunks are not those of rows or blocks of the whole array"
    assert outcomes(report) == {"a.weight": ("float32", 0, reason)}
    report = to_folder(tmp_path / "store", tmp_path / "rounded", layout="fp8", requantize="fp8")
    assert outcomes(report)["a.weight"][0] == "F8_E4M3"


# ---- any codes, and what is refused


@given(
    st.sampled_from([f.name for bits in range(2, 10) for f in exmy.formats(bits)]),
    st.sampled_from([None, -1, 32]),
    st.sampled_from(["search", "max", "float", "6bit"]),
    st.sampled_from(
        [ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e2m3fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
    ),
    st.integers(0, 100),
)
def test_narrow_floats_are_exact_or_counted(
    name: str, group: int | None, scale: Any, dtype: Any, seed: int
) -> None:
    x = np.random.default_rng(seed).standard_t(3, (3, 64)).astype(np.float32)
    x[seed % 3, : 32 * (seed % 4)] = 0
    block, axis = (32, None) if group == 32 else (None, group)
    q = exmy.quantize(x, name, axis=axis, block=block, scale=scale)
    expected = q.dequantize("float64")
    narrow = as_floats(q, dtype)
    assert np.isfinite(narrow.numbers.astype(np.float32)).all()
    values = narrow.numbers.astype(np.float64) * np.repeat(narrow.scales_of_runs(32), 32, axis=-1)
    assert np.count_nonzero(values != expected) == narrow.changed
    assert np.array_equal(np.signbit(values), np.signbit(expected))
    try:
        whole = as_integers(q, 127)
    except NoCounterpart:
        return
    assert whole.numbers.dtype == np.int8
    numbers = whole.numbers.astype(np.float64) * np.repeat(whole.scales_of_runs(32), 32, axis=-1)
    np.testing.assert_array_equal(numbers, expected)


def test_a_plain_export_decodes_and_says_so(store: Path, tmp_path: Path) -> None:
    report = to_folder(store, tmp_path / "out")
    assert set(outcomes(report).values()) == {("float32", 0, ""), ("bfloat16", 0, "")}
    assert not (tmp_path / "out/config.json").exists()
    check_exact(open_tensors(tmp_path / "out/model.safetensors")[0], store)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "mx"}, "layout='mx': expected one of decoded, compressed-tensors, fp8"),
        ({"layout": "fp8", "requantize": "q8_0"}, "requantize='q8_0': expected 'fp8' or None"),
        ({"requantize": "fp8"}, "pass layout='compressed-tensors' or layout='fp8' too"),
    ],
)
def test_misuse(store: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        to_folder(store, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_names_that_scales_need(tmp_path: Path) -> None:
    tstore.save(tmp_path / "store", {"w": weights(), "w_scale": weights((3,))}, 1)
    tstore.quantize(tmp_path / "store", {"w": "e2m3"}, tag="low")
    with pytest.raises(InvalidArgument, match="rename them and save again") as error:
        to_folder(tmp_path / "store", tmp_path / "out", layout="fp8")
    assert "w_scale" in str(error.value)
    with pytest.raises(InvalidArgument, match=r"needs a config.json beside the file; export a folder"):
        asyncio.run(
            export_safetensors(tmp_path / "store", tmp_path / "a.safetensors", layout="compressed-tensors")
        )
