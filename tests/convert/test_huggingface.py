"""Models in several safetensors files: folders, indices and lists of files, in and out."""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import tstore
import tstore.sync as blocking
from tests.support.weights import example, raw
from tstore.cli import main
from tstore.convert.exporting import export_huggingface, export_safetensors, format_of
from tstore.convert.huggingface import open_index
from tstore.convert.importing import ImportReport, SourceKind, import_checkpoint, recognize
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, TStoreError

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
TENSORS = {
    "model.embed.weight": example(np.dtype(ml_dtypes.bfloat16), (30, 8)),
    "model.layers.0.weight": example(np.dtype("f4"), (16, 8), 1),
    "model.layers.0.scale": example(np.dtype(ml_dtypes.float8_e4m3fn), (8,), 2),
    "lm_head.weight": example(np.dtype("i8"), (3,), 3),
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of two files with an index."""
    folder = tmp_path / "model"
    folder.mkdir()
    parts = {FIRST: list(TENSORS)[:2], SECOND: list(TENSORS)[2:]}
    for file, names in parts.items():
        safetensors.numpy.save_file({name: TENSORS[name] for name in names}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, names in parts.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return folder


def assert_same(tree: dict[str, Any], expected: dict[str, Any] = TENSORS) -> None:
    assert {n: (a.dtype, a.shape, raw(a)) for n, a in tree.items()} == {
        n: (a.dtype, a.shape, raw(a)) for n, a in expected.items()
    }


async def test_a_folder_an_index_or_the_files_are_imported_alike(model: Path, tmp_path: Path) -> None:
    sources: dict[SourceKind, Any] = {
        SourceKind.FOLDER: model,
        SourceKind.INDEX: model / INDEX,
        SourceKind.FILES: [model / FIRST, model / SECOND],
    }
    for kind, source in sources.items():
        report = await import_checkpoint(source, tmp_path / kind.name, 3)
        assert report == ImportReport(kind, 1, 4, sum(a.nbytes for a in TENSORS.values()), [])
        assert_same(await tstore.restore(tmp_path / kind.name, 3))
    (model / INDEX).unlink()
    os.symlink(model / FIRST, model / "linked.safetensors")  # as in the cache of Hugging Face
    (model / FIRST).rename(tmp_path / "blob")
    (model / "linked.safetensors").unlink()
    os.symlink(tmp_path / "blob", model / FIRST)
    await import_checkpoint(model, tmp_path / "again", 3)
    assert_same(await tstore.restore(tmp_path / "again"))


async def test_names_and_bits_survive_an_export_by_size(model: Path, tmp_path: Path) -> None:
    await import_checkpoint(model, tmp_path / "store", 0)
    told: list[tuple[int, int]] = []
    report = await export_huggingface(
        tmp_path / "store", tmp_path / "out", max_shard_size=600, progress=lambda *at: told.append(at)
    )
    assert (report.tensors, report.files, report.left_out) == (4, 2, [])
    assert told[-1] == (report.bytes, report.bytes)
    assert sorted(os.listdir(tmp_path / "out")) == sorted([FIRST, SECOND, INDEX])
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": report.bytes}
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "out" / file, "np") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert name in opened.keys()  # noqa: SIM118
    assert (tmp_path / "out" / FIRST).stat().st_size < 1200
    await import_checkpoint(tmp_path / "out", tmp_path / "back", 0)
    assert_same(await tstore.restore(tmp_path / "back"))


async def test_a_model_that_fits_is_one_file(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "store", {"a": {"w": np.ones(3)}, "epoch": 2}, 0)
    report = await export_huggingface(tmp_path / "store", tmp_path / "out")
    assert (report.files, report.left_out) == (1, ["epoch"])
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert list(safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")) == ["a.w"]
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}  # without which transformers refuses it
    report = await export_huggingface(tmp_path / "store", tmp_path / "small", max_shard_size=1)
    assert report.files == 1  # a tensor is never split


@pytest.mark.parametrize(("kind", "stem"), [("config.json", "model"), ("adapter_config.json", "adapter_model")])
async def test_the_files_that_a_trainer_saved_beside_a_model_are_exported(
    tmp_path: Path, kind: str, stem: str
) -> None:
    files = {kind: b'{"a": 1}', "tokenizer.json": b"[]"}
    arrays = {name: np.frombuffer(data, np.uint8) for name, data in files.items()}
    tree = {"model": {"w": np.ones((4, 32), np.float32)}, "files": arrays, "optimizer": np.ones(2)}
    await tstore.save(tmp_path / "store", tree, 7)
    await export_huggingface(tmp_path / "store", tmp_path / "out", subtree="model")
    out = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert list(safetensors.numpy.load(out.pop(f"{stem}.safetensors"))) == ["w"]
    assert out == files
    await export_huggingface(tmp_path / "store", tmp_path / "bare", subtree="model", skip=["files"])
    assert os.listdir(tmp_path / "bare") == ["model.safetensors"]
    options = {"subtree": "model", "layout": "compressed-tensors"}
    await export_huggingface(tmp_path / "store", tmp_path / "low", **options)
    config = json.loads((tmp_path / "low" / "config.json").read_text())
    assert "quantization_config" in config
    assert config.get("a") == (1 if kind == "config.json" else None)


async def test_an_export_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    store = tmp_path / "store"
    await tstore.save(store, {"a": np.ones(5000), "b": np.ones(5000) + 1, "c": np.zeros(5000)}, 0)
    (tmp_path / "taken").mkdir()
    with pytest.raises(AlreadyExists, match="taken already exists"):
        await export_huggingface(store, tmp_path / "taken")
    pack = next(store.glob("txn/*/pack-*"))
    data = bytearray(pack.read_bytes())
    data[-9] ^= 1
    pack.write_bytes(data)
    with pytest.raises(Corrupt, match="chunk"):
        await export_huggingface(store, tmp_path / "out", max_shard_size=5000 * 8)
    assert sorted(os.listdir(tmp_path)) == ["store", "taken"]


def test_no_name_of_another_format_becomes_safetensors() -> None:
    assert format_of("out.safetensors") == format_of("OUT.SafeTensors") == "safetensors"
    assert format_of("out") == format_of("llama-3.1") == format_of("dir/") == "huggingface"
    for name in ("a.pt", "a.pth", "a.bin", "a.npz", "a.zip", "a.zip/", "a.ckpt", "a.h5", "A.PT", "a.onnx"):
        with pytest.raises(InvalidArgument, match=r"does not write .*; export to a name that ends"):
            format_of(name)
    with pytest.raises(InvalidArgument, match="json is the suffix of a reference file; pass --references"):
        format_of("a.index.json")


def test_a_suffix_that_no_format_has_is_refused() -> None:
    for name in ("model.foo", "model.safetensor", "a/b.Tensors", "model.v2"):
        with pytest.raises(InvalidArgument, match=r"is not the suffix of a format .* end it with a slash"):
            format_of(name)
    assert {format_of(name) for name in ("model.foo/", "Qwen2.5", "llama-3.1-8b", "a.foo/b", ".hidden")} == {
        "huggingface"
    }


def test_files_that_are_no_checkpoints_are_named_for_what_they_are(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.ones(3))
    np.savez(tmp_path / "w.npz", w=np.ones(3))  # a zip archive, as the files of torch.save are
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(range(1, 100)))
    for name in ("w.npy", "w.npz"):
        with pytest.raises(InvalidArgument, match=f"{name} is a file of NumPy; load it with numpy.load"):
            recognize([tmp_path / name])
    with pytest.raises(InvalidArgument, match=r"model\.gguf can't be imported"):
        recognize([tmp_path / "model.gguf"])


# ---- what does not fit together


async def refused(model: Path, *words: str, source: Any = None, error: type[TStoreError] = Corrupt) -> None:
    store = model.parent / "store"
    with pytest.raises(error) as raised:
        await import_checkpoint(model if source is None else source, store, 0)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert len(str(raised.value)) < 2000
    assert not store.exists()


def change_index(model: Path, **changes: Any) -> None:
    document = json.loads((model / INDEX).read_text())
    document["weight_map"] |= changes
    document["weight_map"] = {name: file for name, file in document["weight_map"].items() if file != "-"}
    (model / INDEX).write_text(json.dumps(document))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "", ".", "x\0y"])
async def test_an_index_reads_no_file_outside_of_its_folder(model: Path, name: str) -> None:
    (model.parent / "secret").write_bytes((model / FIRST).read_bytes())
    change_index(model, extra=name)
    await refused(model, "which is not in the folder")


async def test_files_that_do_not_fit_their_index(model: Path) -> None:
    change_index(model, extra="model-00003-of-00003.safetensors")
    await refused(model, "1 are missing", "model-00003-of-00003.safetensors", error=NotFound)
    change_index(model, extra=FIRST)
    await refused(model, "disagree on 1 tensors", f"extra: in {FIRST}")
    change_index(model, extra="-", **{"lm_head.weight": FIRST})
    await refused(model, "disagree", "lm_head.weight")
    change_index(model, **{"lm_head.weight": "-"})
    await refused(model, f"lm_head.weight: only in {SECOND}")


async def test_an_index_without_tensors_makes_no_empty_step(model: Path) -> None:
    (model / INDEX).write_text('{"weight_map": {}}')
    await refused(model, "lists no tensors")


async def test_a_file_name_that_is_not_unicode(model: Path, tmp_path: Path) -> None:
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.safetensors")
    os.link(model / FIRST, name)
    await import_checkpoint(name, tmp_path / "store", 0)
    async with await tstore.open(tmp_path / "store") as store:
        assert [commit.message async for commit in store.history()] == ["imported from \ufffd.safetensors"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "x", "a": "y"}}',
        '{"weight_map": ' + '{"a":' * 100_000 + "1" + "}" * 100_001,
        "\ud800",
    ],
)
async def test_an_index_of_another_form(model: Path, text: str) -> None:
    (model / INDEX).write_bytes(text.encode("utf-8", "surrogatepass"))
    await refused(model, INDEX, "is not an index of a model's files")


async def test_an_index_takes_no_memory_for_what_is_not_read(model: Path) -> None:
    index = (model / INDEX).read_bytes()
    (model / INDEX).write_bytes(index.rstrip()[:-1] + b', "x": [' + b"[]," * (1 << 19) + b"0]}")
    tracemalloc.start()
    try:
        open_index(str(model / INDEX))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20  # 1.5 MiB, and some copies
    finally:
        tracemalloc.stop()


async def test_a_folder_without_its_index_lacks_a_file(model: Path, tmp_path: Path) -> None:
    (model / INDEX).unlink()
    assert (await import_checkpoint(str(model), str(tmp_path / "whole"), 0)).tensors == 4
    (model / SECOND).unlink()
    await refused(model, "1 of the 2 files model-…-of-00002.safetensors, and no index", error=NotFound)
    assert (await import_checkpoint(str(model / FIRST), str(tmp_path / "part"), 0)).tensors == 2


async def test_two_files_with_the_same_tensor(model: Path) -> None:
    (model / INDEX).unlink()
    (model / "other.safetensors").write_bytes((model / FIRST).read_bytes())
    await refused(model, "both have a tensor 'model.", "other.safetensors")
    await refused(model, "both have a tensor", source=[model / FIRST, model / FIRST])
    (model / "other.safetensors").write_bytes((model / FIRST).read_bytes()[:-1])
    await refused(model, "other.safetensors is not a valid safetensors file")


async def test_what_is_no_checkpoint_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    await refused(model, "can't be imported: it has neither", source=tmp_path / "empty", error=InvalidArgument)
    await refused(model, "no source", source=[], error=InvalidArgument)
    await refused(model, "pass it alone", source=[model, model / FIRST], error=InvalidArgument)
    await refused(model, "is an index", source=[model / INDEX, model / FIRST], error=InvalidArgument)
    await refused(model, "nowhere", source=tmp_path / "nowhere", error=NotFound)
    (tmp_path / "empty" / "pytorch_model.bin").touch()
    await refused(model, "pytorch_model.bin", source=tmp_path / "empty", error=InvalidArgument)
    await tstore.save(tmp_path / "empty" / "own", {"x": np.ones(3)}, 0)
    await refused(model, "tstore copy", source=tmp_path / "empty" / "own", error=InvalidArgument)
    (model / f"model.fp16{INDEX[5:]}").write_text("{}")
    assert recognize([model]) is SourceKind.FOLDER
    await import_checkpoint(model, tmp_path / "imported", 0)  # model.safetensors.index.json is the one that counts
    (model / INDEX).rename(model / f"a{INDEX}")
    await refused(model, "has 2 indices; pass one of them", error=InvalidArgument)


# ---- pieces of tensors, as PyTorch writes them for Hugging Face


def write_piece(path: Path, values: Any, offsets: Any) -> None:
    info = json.dumps({"w": {"saved_offsets": offsets}})
    safetensors.numpy.save_file({"w": values}, path, {"format": "pt", "DCP_SHARDING_INFO": info})


async def test_pieces_are_joined_and_checked(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    model = tmp_path / "model"
    model.mkdir()
    pieces = {"1": (whole[:4, :2], [0, 0]), "2": (whole[:4, 2:], [0, 2]), "3": (whole[4:], [4, 0])}
    for name, (values, offsets) in pieces.items():
        write_piece(model / f"{name}.safetensors", np.ascontiguousarray(values), offsets)
    await import_checkpoint(model, tmp_path / "a", 0)
    assert_same(await tstore.restore(tmp_path / "a"), {"w": whole})
    await export_safetensors(tmp_path / "a", tmp_path / "out.safetensors")
    with safetensors.safe_open(tmp_path / "out.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    write_piece(model / "2.safetensors", whole[:4, :2].copy(), [0, 0])
    await refused(model, "'w' has pieces that overlap and leave a hole")
    (model / "2.safetensors").unlink()
    await refused(model, "'w' has 24 elements, but its pieces have 16")
    for offsets in ([0], [-1, 0], ["0", 0], None, [1 << 70, 0]):
        write_piece(model / "2.safetensors", whole[:4, 2:].copy(), offsets)
        await refused(model)
    write_piece(model / "2.safetensors", whole[:4, 2:].astype("f8"), [0, 2])
    await refused(model, "differ in dtype")
    for name in "23":
        (model / f"{name}.safetensors").unlink()
    far = [10**4000, 10**4000]
    for values, offsets in ((whole, far), (np.ones((0, 2, 2), "f4"), [0, 1 << 62, 1 << 62])):
        write_piece(model / "1.safetensors", values, offsets)
        await refused(model)


# ---- a model of a training step


def test_a_model_of_a_training_step_is_read_by_transformers(tmp_path: Path) -> None:
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=50, **sizes))
    wrapped = {f"module.{name}": tensor.numpy() for name, tensor in model.state_dict().items()}
    blocking.save(tmp_path / "run", {"model": wrapped, "optimizer": {"step": np.ones(3)}, "epoch": 3}, 7)
    options = ["--subtree", "model", "--strip", "module."]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported"), *options]) == 0
    model.config.save_pretrained(tmp_path / "exported")
    loaded, info = transformers.BertModel.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(info.values())
    for (name, tensor), again in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(tensor, again), name


@pytest.mark.parametrize("rule", [{"format": "e2m1", "block": 32}, {"format": "e4m3", "axis": -1}])
def test_a_model_in_low_bits_is_read_by_transformers(tmp_path: Path, rule: dict[str, Any]) -> None:
    """Its embedding, which the output layer shares, is decoded: transformers can't load it in low bits."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    pytest.importorskip("compressed_tensors")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, tie_word_embeddings=True, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    assert main(["import", str(tmp_path / "model"), str(tmp_path / "store"), "--step", "0"]) == 0
    blocking.quantize(tmp_path / "store", {"**": rule}, tag="low")
    options = ["--at", "low", "--layout", "compressed-tensors", "--requantize", "fp8"]
    assert main(["export", str(tmp_path / "store"), str(tmp_path / "low"), *options]) == 0
    quantization = json.loads((tmp_path / "low/config.json").read_text())
    assert quantization["quantization_config"]["ignore"] == ["model.embed_tokens"]
    merged = json.loads((tmp_path / "model/config.json").read_text()) | quantization
    (tmp_path / "low/config.json").write_text(json.dumps(merged))
    options = {"dtype": torch.bfloat16}  # to which compressed-tensors decodes MX formats
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "low", output_loading_info=True, **options
    )
    assert not any(info.values())
    asyncio.run(export_huggingface(tmp_path / "store", tmp_path / "decoded", at="low"))
    config.save_pretrained(tmp_path / "decoded")
    decoded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "decoded", **options)
    tokens = torch.arange(8)[None]
    assert torch.allclose(loaded(tokens).logits, decoded(tokens).logits, atol=0.05)
    assert torch.equal(loaded.lm_head.weight, decoded.lm_head.weight)
