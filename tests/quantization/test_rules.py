"""Rules whose codecs are more than a format: lists of names, other lossy codecs, settings and targets."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import exmy
import numpy as np
import pytest

import tstore
from tstore.cli import main
from tstore.errors import InvalidArgument

RNG = np.random.default_rng(5)
W = RNG.standard_normal((128, 256)).astype("f4")
EXMY = {"name": "exmy", "configuration": {"format": "e4m3"}}
INDEX = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
SHARDS = {"chunk_shape": [64, 64], "codecs": [EXMY], "index_codecs": INDEX}


@pytest.mark.parametrize("codecs", [["bytes", "zstd"], ["zstd"], {"w": ["bytes", "zstd"]}], ids=str)
async def test_codecs_by_name(tmp_path: Path, codecs: Any) -> None:
    await tstore.save(tmp_path / "saved", {"w": W}, 0, codecs=codecs)
    await tstore.save(tmp_path / "quantized", {"w": W}, 0)
    await tstore.quantize(tmp_path / "quantized", codecs, tag="copy")
    for url, at in ((tmp_path / "saved", None), (tmp_path / "quantized", "copy")):
        array = await (await (await tstore.open(url)).snapshot(at)).array("w")
        assert [codec["name"] for codec in array.codecs] == ["bytes", "zstd"]
        assert np.array_equal(await array.read(), W)


async def test_a_codec_outside_a_list_is_explained(tmp_path: Path) -> None:
    tree = {"w": W, "name": W}
    zstd: dict[str, Any] = {"name": "zstd"}
    for codecs in ("zstd", zstd, zstd | {"configuration": {"level": 3}}):
        with pytest.raises(InvalidArgument, match=r"^codecs=.*pass Zarr codecs as a list, such as .*'zstd'"):
            await tstore.save(tmp_path, tree, 0, codecs=codecs)
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, {"**/name": "e4m3"})
    assert [array.path for array in report.encoded] == ["name"]


async def error_of(work: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        await work
    return str(caught.value)


BAD_CODECS = [
    *("zstd", "e9m9", "e4m3 ", b"e4m3", 5, 4.5, True, [], [5], [None], [{}], [{"name": 5}], {"format": "e9m9"}),
    {"name": "zstd"},
    *({"format": "e4m3", "blok": 32}, [{"name": "exmy"}], [{"name": "exmy", "configuration": {"format": "fp8"}}]),
    *(["bytes", {"name": "zstd", "level": 3}], [{"name": "zstd", "configuration": [3]}]),
    *(["bytes", {"name": "zstd", "configuration": {"level": float("nan")}}], [{"name": "exmy", "format": "e4m3"}]),
]


@pytest.mark.parametrize("codecs", BAD_CODECS, ids=str)
async def test_what_an_array_refuses_a_save_and_a_quantization_refuse_in_the_same_words(codecs: Any) -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}", "x")
    await tstore.save(store, {"w": W}, 0)
    async with store.transaction() as tx:
        error = await error_of(tx.create_array("w2", W.shape, "f4", codecs=codecs))
        assert error.startswith("codecs")
    assert await error_of(tstore.save(store, {"w": W}, 1, codecs=codecs)) == error
    formats = error.replace("codecs", "formats", 1)
    assert await error_of(tstore.quantize(store, codecs)) == formats
    rule = await error_of(tstore.save(store, {"w": W}, 1, codecs={"w": codecs, "**": None}))
    assert rule.removeprefix("the rule 'w': ").removeprefix("codecs") in error
    assert await tstore.steps(store) == [0]


GOOD_CODECS: list[Any] = [
    *(None, "lossless", "e4m3", exmy.Format("e3m2"), {"format": "e4m3", "block": 32}, ["zstd"], ("bytes", "zstd")),
    *([EXMY], [EXMY, "zstd"], ["bytes", {"name": "zstd", "configuration": {"level": 3, "checksum": False}}]),
    [{"name": "transpose", "configuration": {"order": [1, 0]}}, EXMY, "crc32c"],
]


@pytest.mark.parametrize("codecs", GOOD_CODECS, ids=str)
async def test_what_an_array_takes_a_save_takes(codecs: Any) -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}", "x")
    await tstore.save(store, {"w": W}, 0, codecs=codecs)
    await tstore.save(store, {"w": W}, 1, codecs={"w": codecs})
    async with store.transaction() as tx:
        array = await tx.create_array("w2", W.shape, "f4", codecs=codecs)
    for step in (0, 1):
        assert (await (await store.snapshot(f"step/{step}")).array("w")).codecs == array.codecs


@pytest.mark.parametrize("target", [{"bits": 4}, {"min_sqnr": 20, "coding": "packed"}], ids=str)
async def test_a_target_without_a_pattern_is_for_all_arrays(tmp_path: Path, target: Any) -> None:
    await tstore.save(tmp_path, {"w": W}, 0)
    again = await tstore.quantize(tmp_path, {"**": target}, tag="pattern")
    report = await tstore.quantize(tmp_path, target, tag="alone")
    assert report.arrays == again.arrays
    await tstore.save(tmp_path, {"w": W}, 1, codecs=target)
    saved = await (await tstore.open(tmp_path)).snapshot("step/1")
    assert "exmy" in [codec["name"] for codec in (await saved.array("w")).codecs]


@pytest.mark.parametrize(
    "codecs",
    [
        [{"name": "transpose", "configuration": {"order": [1, 0]}}, EXMY],
        [{"name": "sharding_indexed", "configuration": SHARDS}],
        [{"name": "numcodecs.bitround", "configuration": {"keepbits": 3}}, "bytes"],
    ],
    ids=["transposed", "shards", "bitround"],
)
async def test_other_lossy_codecs_are_not_called_damaged(tmp_path: Path, codecs: Any) -> None:
    await tstore.save(tmp_path, {"w": W}, 0)
    with pytest.raises(InvalidArgument, match="w: the codecs of its rule change values"):
        await tstore.quantize(tmp_path, codecs)
    await tstore.save(tmp_path, {"w": W, "v": W}, 1, codecs={"w": codecs, "v": tstore.Bits(5)})


@pytest.mark.parametrize("scale", ["none", 0.05])
@pytest.mark.parametrize("compressors", [[], ["zstd"]], ids=["plain", "zstd"])
async def test_a_fixed_scale_in_a_rule_goes_before_a_default_block(
    tmp_path: Path, scale: Any, compressors: list[Any]
) -> None:
    await tstore.save(tmp_path, {"w": W, "v": W}, 0)
    rule = [{"name": "exmy", "configuration": {"format": "e4m3", "scale": scale}}, *compressors]
    report = await tstore.quantize(tmp_path, {"w": rule}, bits=7, block=32)
    v, w = report.arrays
    assert (v.granularity, w.granularity) == ("block of 32", "tensor")
    assert (v.coding, w.coding) == ("packed", "entropy" if compressors else "packed")


@pytest.mark.parametrize("scale", [1.0, 1, np.float32(1)], ids=type)
async def test_codes_of_a_fixed_scale_before_a_compressor_are_in_small_chunks(tmp_path: Path, scale: Any) -> None:
    """Whatever the type of the number."""
    await tstore.save(tmp_path, {"w": np.ones((1500, 1024), "f4")}, 0)
    rule = [{"name": "exmy", "configuration": {"format": "e3m4", "scale": scale}}, "zstd"]
    await tstore.quantize(tmp_path, rule, tag="q")
    array = await (await (await tstore.open(tmp_path)).snapshot("q")).array("w")
    assert array.chunks == (500, 1024)


@pytest.mark.parametrize("options", [{}, {"scale": "max"}, {"axis": 0}], ids=str)
@pytest.mark.parametrize("rule", [{"format": "e4m3", "axis": 5}, {"format": "e4m3", "block": 256}], ids=str)
async def test_a_rule_that_does_not_fit_its_array_is_refused_with_its_path(
    tmp_path: Path, rule: Any, options: dict[str, Any]
) -> None:
    await tstore.save(tmp_path, {"w": W[:, :100].copy()}, 0)
    with pytest.raises(InvalidArgument, match=r"^w: codec exmy with .* does not fit chunks of shape"):
        await tstore.quantize(tmp_path, {"w": rule}, **options)


async def test_a_block_in_a_rule_goes_before_a_default_scale_without_blocks(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": W, "v": W}, 0)
    report = await tstore.quantize(tmp_path, {"w": {"format": "e4m3", "block": 32}, "v": "e4m3"}, scale="none")
    assert [a.granularity for a in report.arrays] == ["tensor", "block of 32"]


async def test_an_array_that_would_grow_stays_unchanged(tmp_path: Path) -> None:
    store = await tstore.open(tmp_path)
    x = (RNG.standard_normal((128, 64)) * 4000).astype("f2")
    async with store.transaction(tag="step/0") as tx:
        await (await tx.create_array("x", x.shape, "f2", x.shape, "lossless")).write(x)
    report = await tstore.quantize(store, min_sqnr=72)  # with the codes that keep it, longer than without loss
    [array] = report.arrays
    assert (array.format, array.reason) == (None, "no smaller format keeps 72 dB")
    assert array.bytes_after == array.bytes_before


@pytest.mark.parametrize("scale", ["float", "e4m3", "6bit"])
async def test_a_float_scale_without_blocks_is_reported_as_one_for_each_chunk(tmp_path: Path, scale: Any) -> None:
    store = await tstore.open(tmp_path)
    async with store.transaction(tag="step/0") as tx:
        for path, chunks in (("one", (50, 50)), ("several", (50, 30))):
            await (await tx.create_array(path, (50, 50), "f4", chunks)).write(W[:50, :50])
    report = await tstore.quantize(store, "e4m3", scale=scale, tag="q")
    assert [array.granularity for array in report.arrays] == ["tensor", "chunk"]
    with pytest.raises(InvalidArgument, match="float scales per row or block if axis= or block= asks for them"):
        await tstore.restore(store, at="q", packed=True)


async def test_a_part_of_a_training_step_is_copied_alone(tmp_path: Path) -> None:
    w = RNG.standard_normal((64, 64))
    tree = {"model": {"w": w, "b": np.ones(3), "depth": 2}, "model2": {"w": w}, "optimizer": {"m": w}, "epoch": 3}
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, "e4m3", subtree="model", tag="small")
    assert [array.path for array in report.arrays] == ["model/b", "model/w"]
    restored = await tstore.restore(tmp_path, at="small")
    assert restored["model"].keys() == {"w", "b", "depth"}
    assert restored.keys() == {"model", "epoch"}
    assert exmy.sqnr(w, restored["model"]["w"]) > 30
    assert (await tstore.restore(tmp_path)).keys() == tree.keys()
    assert not await asyncio.to_thread(
        main, ["quantize", str(tmp_path), "--bits", "8", "--subtree", "model", "--tag", "command"]
    )
    assert (await tstore.restore(tmp_path, at="command")).keys() == {"model", "epoch"}
    store = await tstore.open(tmp_path)
    assert (await store.verify()).ok
    for options in ({"subtree": "mod"}, {"subtree": "optimizer", "formats": {"model/w": "e4m3"}}):
        with pytest.raises(InvalidArgument, match=r"no arrays to quantize at or below 'mod'|match no array"):
            await tstore.quantize(store, **options)
