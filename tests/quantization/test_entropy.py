"""Entropy-coded eXmY: the budgets and the SQNR that it keeps, its gain over packed codes, and its chunks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import exmy
import ml_dtypes
import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype

import tstore
from tests.support.thresholds import Thresholds
from tstore.errors import InvalidArgument
from tstore.zarr import ZarrStore

RNG = np.random.default_rng(0)
BUFFERS = default_buffer_prototype()


def laplace(*shape: int, scale: float = 1.0) -> Any:
    return RNG.laplace(0, scale, shape).astype("f4")


@pytest.mark.parametrize("bits", [1.5, 2.2, 3, 4, 5.7, 8, 9.3, 11, 13.5])
async def test_a_budget_is_used_up_and_kept(tmp_path: Path, bits: float) -> None:
    tree = {f"w{i}": laplace(200 * (i + 1), 384, scale=10.0**-i) for i in range(4)}
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, bits=bits)
    assert 0.985 * bits < report.bits_per_value <= bits
    assert {a.coding for a in report.arrays} == {"entropy"}
    restored = await tstore.restore(tmp_path, at=report.tag)
    for row in report.arrays:
        assert row.sqnr == pytest.approx(exmy.sqnr(tree[row.path], restored[row.path]), abs=0.01)
    assert (await (await tstore.open(tmp_path)).verify()).ok


@pytest.mark.parametrize("decibel", [45, 57, 62, 70, 80])
async def test_a_high_sqnr_takes_fewer_bits_than_packed_codes(tmp_path: Path, decibel: float) -> None:
    await tstore.save(tmp_path, {"w": laplace(300, 384), "x": RNG.standard_normal((300, 200))}, 0)
    entropy = await tstore.quantize(tmp_path, min_sqnr=decibel)
    packed = await tstore.quantize(tmp_path, min_sqnr=decibel, coding="packed", at="step/0", tag="packed")
    assert len(entropy.encoded) == len(packed.encoded) == 2
    assert all(array.sqnr >= decibel for array in entropy.encoded)
    assert entropy.bits_per_value < packed.bits_per_value


@pytest.mark.parametrize("options", [{"bits": 2.0}, {"bits": 4.0}, {"min_sqnr": 40.0}, {}])
async def test_constant_arrays_are_exact(tmp_path: Path, options: dict[str, Any]) -> None:
    """A step that divides the constant takes no more bytes than those near it."""
    tree = {"ones": np.ones((100, 256), "f4"), "third": np.full((100, 256), 1 / 3, "f4"), "w": laplace(64, 256)}
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, tag="q", **options)
    rows = {array.path: array for array in report.arrays}
    assert rows["ones"].sqnr == rows["third"].sqnr == math.inf
    assert rows["ones"].bytes_after < 100


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
async def test_rows_of_unequal_magnitudes_have_equal_relative_errors(tmp_path: Path, kind: str) -> None:
    dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(kind)
    rows = laplace(300, 400) * np.exp2(RNG.uniform(-6, 6, (300, 1)))
    rows[7] = 0
    tree = {"rows": rows.astype(dtype), "equal": laplace(300, 400).astype(dtype)}
    await tstore.save(tmp_path, tree, 0)
    for options in ({"bits": 3.0}, {"bits": 4.5}, {}, {"min_sqnr": 30.0}):
        report = await tstore.quantize(tmp_path, at="step/0", tag=f"{options}", **options)  # type: ignore[arg-type]
        by_path = {array.path: array for array in report.arrays}
        assert (by_path["rows"].granularity, by_path["equal"].granularity) == ("row", "tensor")
        restored = (await tstore.restore(tmp_path, at=report.tag))["rows"]
        assert not restored[7].any()
        decibels = [exmy.sqnr(x, y) for x, y in zip(tree["rows"], restored, strict=True) if x.any()]
        assert min(decibels) > by_path["rows"].sqnr - 3  # one step leaves the smallest rows none of their values
        array = await (await (await tstore.open(tmp_path)).snapshot(report.tag)).array("rows")
        np.testing.assert_array_equal(await array[10:20, 5:390].read(), restored[10:20, 5:390])
    assert by_path["rows"].sqnr >= 30
    assert (await (await tstore.open(tmp_path)).verify()).ok


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
async def test_the_error_is_far_below_that_of_packed_codes(tmp_path: Path, bits: float) -> None:
    await tstore.save(tmp_path, {"w": laplace(512, 512)}, 0)
    entropy = await tstore.quantize(tmp_path, bits=bits)
    packed = await tstore.quantize(tmp_path, bits=bits + 0.07, coding="packed", at="step/0")
    assert entropy.sqnr > packed.sqnr + 2
    # at most 0.4 bits, or 2.5 dB, above the entropy of a uniform step: h = log2(2e·b), for b = 1
    assert entropy.sqnr > 10 * math.log10(2 * 12) + 6.02 * (bits - math.log2(2 * math.e)) - 2.5


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64"])
async def test_an_sqnr_is_kept_with_few_bits(tmp_path: Path, kind: str) -> None:
    dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else np.dtype(kind)
    tree = {"w": laplace(300, 400).astype(dtype), "t": RNG.standard_t(3, (300, 400)).astype(dtype)}
    await tstore.save(tmp_path, tree, 0)
    for decibel in (10, 22, 35):
        report = await tstore.quantize(tmp_path, min_sqnr=decibel, at="step/0")
        assert all(decibel <= a.sqnr < decibel + 0.5 for a in report.arrays)


@pytest.mark.parametrize("chunks", [(1, 48), (4, 12), (64, 48)])
@pytest.mark.parametrize("rows", [2, 64, 512])
async def test_a_short_array_is_no_worse_than_in_a_named_format(
    tmp_path: Path, rows: int, chunks: tuple[int, int]
) -> None:
    """The bytes of headers count: of each chunk, and of each frame of zstd."""
    values = RNG.standard_normal((rows, 48), "f4")
    store = await tstore.open(tmp_path, "x")
    async with store.transaction(tag="step/0") as tx:
        await (await tx.create_array("w", values.shape, "f4", chunks)).write(values)
    for format in ("e2m1", "e3m2", "e2m3", "e4m3", "e2m5"):
        [named] = (await tstore.quantize(store, format, tag=f"named/{format}")).arrays
        bits = 8 * named.bytes_after / named.values
        [chosen] = (await tstore.quantize(store, bits=bits, tag=f"bits/{format}")).arrays
        assert chosen.bytes_after <= named.bytes_after
        assert chosen.sqnr >= named.sqnr - 0.01
        [chosen] = (await tstore.quantize(store, min_sqnr=named.sqnr - 0.06, tag=f"sqnr/{format}")).arrays
        assert chosen.bytes_after <= named.bytes_after
        assert chosen.sqnr >= named.sqnr - 0.06


async def test_large_arrays_are_sampled_and_in_small_chunks(tmp_path: Path) -> None:
    x = laplace(1500, 2048)
    x[:, 1000:] *= 4
    x[777, 5] = 175.0 * x.std()  # no sample has it
    await tstore.save(tmp_path, {"w": x}, 0)
    for bits in (2.5, 4, 7.5):
        report = await tstore.quantize(tmp_path, bits=bits, at="step/0")
        assert 0.985 * bits < report.bits_per_value <= bits
    async with await tstore.open(tmp_path) as store:
        array = await (await store.snapshot(report.tag)).array("w")
        assert math.prod(array.chunks) <= 1 << 20
    y = (await tstore.restore(tmp_path, at=report.tag))["w"]
    assert abs(y[777, 5] - x[777, 5]) < 0.1 * x[777, 5]
    packed = (await tstore.restore(tmp_path, at=report.tag, packed=True))["w"]
    assert np.array_equal(packed.dequantize(), y)


async def test_a_wrong_estimate_is_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    """The sample has the quiet first half of each row only; so the first choice takes more than the budget."""
    thresholds(_RUN=512)
    monkeypatch.setattr("tstore.quantization.entropy._SAMPLE_BYTES", 512 * 300)
    x = laplace(301, 1024)
    x[:, :512] *= 0.2
    monkeypatch.setattr("numpy.linspace", lambda first, last, count: np.arange(count) % 300 * 1024)
    await tstore.save(tmp_path, {"w": x}, 0)
    report = await tstore.quantize(tmp_path, bits=4)
    assert 3.9 < report.bits_per_value <= 4


async def test_a_correction_encodes_only_arrays_whose_codecs_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    """The sample has the quiet first half of each row of `w` only, as above; zeros have one possible codec."""
    thresholds(_RUN=512)
    monkeypatch.setattr("tstore.quantization.entropy._SAMPLE_BYTES", 512 * 300)
    x = laplace(301, 1024)
    x[:, :512] *= 0.2
    monkeypatch.setattr("numpy.linspace", lambda first, last, count: np.arange(count) % 300 * 1024)
    encoded: list[str] = []
    encode_batch = tstore.quantization.encoding.encode_batch

    async def recording(storage: Any, packs: Any, batch: Any, *arguments: Any) -> Any:
        encoded.extend(values.path for values in batch)
        return await encode_batch(storage, packs, batch, *arguments)

    monkeypatch.setattr("tstore.quantization.work.encode_batch", recording)
    await tstore.save(tmp_path, {"w": x, "zeros": np.zeros((100, 1024), "f4")}, 0)
    report = await tstore.quantize(tmp_path, bits=4)
    assert 3.9 < report.bits_per_value <= 4
    assert encoded.count("w") > 1
    assert encoded.count("zeros") == 1


@pytest.mark.parametrize("coding", ["entropy", "packed"])
async def test_the_default_counts_arrays_that_are_smaller_unchanged(tmp_path: Path, coding: Any) -> None:
    """Compressed zeros take fewer bytes than any codes, so the other array may have more than 8 bits per value."""
    tree = {"w": laplace(512, 512), "zeros": np.zeros((256, 512), "f4")}
    await tstore.save(tmp_path, tree, 0, codecs={"zeros": "lossless", "**": None})
    report = await tstore.quantize(tmp_path, coding=coding)
    w, zeros = report.arrays
    assert zeros.reason == "the budget has room for all its bits"
    assert 8.1 < w.bits_per_value < 12.2
    assert 7.5 < report.bits_per_value <= 8.1


@pytest.mark.parametrize(("deviation", "bits"), [(2, 1.6), (2, 2.28), (2, 2.44), (3, 1.36), (3, 2.8)])
async def test_a_budget_of_integers_is_kept(tmp_path: Path, deviation: int, bits: float) -> None:
    """Their sizes are a staircase: a slightly coarser step gives the same codes, and it takes several tries."""
    x = np.round(np.random.default_rng(deviation - 1).standard_normal((512, 400)) * deviation).astype("f4")
    await tstore.save(tmp_path, {"w": x}, 0)
    report = await tstore.quantize(tmp_path, bits=bits)
    assert 0.75 * bits < report.bits_per_value <= bits


async def test_a_budget_that_sizes_exceed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tstore.quantization.quantize._SHARES", (1.01,))
    await tstore.save(tmp_path, {"w": laplace(200, 256), "v": laplace(200, 256)}, 0)
    message = r"^the rule 'w': bits=4 can't be met, 4\.0\d+ bits per value were stored, since sizes"
    with pytest.raises(InvalidArgument, match=message):
        await tstore.quantize(tmp_path, {"w": {"bits": 4}})


async def test_each_rule_has_its_own_target(tmp_path: Path) -> None:
    tree = {"a": {"w": laplace(100, 256), "b": laplace(256)}, "c": laplace(200, 256), "d": laplace(150, 256)}
    await tstore.save(tmp_path, tree, 0)
    rules: Any = {"a/*": tstore.Bits(6), "c": {"min_sqnr": 25}, "d": {"bits": 4, "coding": "packed"}}
    report = await tstore.quantize(tmp_path, rules)
    rows = {a.path: a for a in report.arrays}
    values = rows["a/b"].values + rows["a/w"].values
    assert 5.8 < 8 * (rows["a/b"].bytes_after + rows["a/w"].bytes_after) / values <= 6
    assert rows["a/b"].format is None
    assert 25 <= rows["c"].sqnr < 25.5
    assert (rows["d"].coding, rows["d"].granularity) == ("packed", "block of 128")
    assert report.tag == "step/0/6bits-25dB-4bits-packed"
    both = await tstore.quantize(tmp_path, {"c": {"bits": 3}}, bits=7, at="step/0")
    rows = {a.path: a for a in both.arrays}
    assert 2.9 < rows["c"].bits_per_value <= 3
    assert 6.7 < both.bits_per_value <= 7


async def test_arrays_without_much_to_encode(tmp_path: Path) -> None:
    tree = {
        "zeros": np.zeros((100, 100), "f4"),
        "ones": np.ones((100, 100), "f4"),
        "signs": RNG.choice([-1.0, 1.0], (100, 100)).astype("f4"),
        "one": np.eye(1, 10_000, dtype="f4"),
        "few": laplace(8, 8),
    }
    await tstore.save(tmp_path, tree, 0)
    for bits in (2, 8):
        report = await tstore.quantize(tmp_path, bits=bits, at="step/0")
        assert report.bits_per_value <= bits
        restored = await tstore.restore(tmp_path, at=report.tag)
        assert np.array_equal(restored["zeros"], tree["zeros"])
        assert not np.signbit(restored["zeros"]).any()
    assert all(a.sqnr > 30 for a in report.encoded if a.path not in ("zeros", "few"))


@pytest.mark.parametrize("bits", [0.2, 0.5, 1, 1.2])
async def test_a_budget_is_kept_where_the_size_jumps(tmp_path: Path, bits: float) -> None:
    """Signs take no space where the step is so coarse that all are 0, and a bit where it is a little finer."""
    rng = np.random.default_rng(1)
    tree = {name: rng.choice([-0.02, 0.02], (200, 257)).astype("f4") for name in "ab"}
    tree["wide"] = np.clip(rng.standard_t(1.2, (64, 31)), -6e4, 6e4).astype("f4")
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, bits=bits)
    assert report.bits_per_value <= bits


async def test_an_outlier_that_no_sample_has_is_not_clipped_for_more_bits(url: str) -> None:
    values = np.random.default_rng(0).normal(0, 0.05, (384, 1536)).astype("f4")
    values[95, 700] = 60.0  # less than twice the largest value of a format, and in the same octave
    await tstore.save(url, {"w": values}, 0)
    sqnr = [(await tstore.quantize(url, bits=bits, tag=f"{bits}bits")).sqnr for bits in (5, 12)]
    assert sqnr[1] >= sqnr[0] - 1, sqnr


async def test_zarr_reads_the_chunks(tmp_path: Path) -> None:
    tree = {"w": laplace(300, 700), "v": laplace(200, 700)}
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, bits=3.5)
    restored = await tstore.restore(tmp_path, at=report.tag)
    async with await tstore.open(tmp_path) as store:
        group = zarr.open_group(ZarrStore(await store.snapshot(report.tag)), mode="r")
        for path in tree:
            array: Any = group[path]
            assert np.array_equal(array[:], restored[path])
            assert [codec["name"] for codec in array.metadata.to_dict()["codecs"]] == ["exmy", "zstd"]


@pytest.mark.parametrize("bits", [4, 9.5])
@pytest.mark.parametrize(
    ("shape", "chunks"), [((200, 70), (64, 32)), ((65, 33, 17), (20, 11, 8)), ((3000, 3000), (2000, 1000))]
)
async def test_the_chunks_are_those_of_a_write(
    tmp_path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], bits: float
) -> None:
    """Slabs and chunks end at different values, and chunks at the edges of the array are padded."""
    values = laplace(*shape)
    async with await tstore.open(tmp_path) as store:
        async with store.transaction() as tx:
            await (await tx.create_array("w", shape=shape, dtype="f4", chunks=chunks)).write(values)
        await tstore.quantize(store, bits=bits, tag="q")
        quantized = await (await store.snapshot("q")).array("w")
        async with store.transaction() as tx:
            settings: dict[str, Any] = {"chunks": quantized.chunksize, "codecs": quantized.codecs}
            written = await tx.create_array("written", shape=shape, dtype="f4", **settings)
            await written.write(values)
        expected, actual = ZarrStore(await store.snapshot()), ZarrStore(await store.snapshot("q"))
        keys = [key async for key in actual.list_prefix("w/c/")]
        assert len(keys) == math.prod(-(-n // c) for n, c in zip(shape, quantized.chunksize, strict=True))
        for key in keys:
            a, b = await actual.get(key, BUFFERS), await expected.get(key.replace("w/", "written/", 1), BUFFERS)
            assert a is not None
            assert b is not None
            assert a.to_bytes() == b.to_bytes()


async def test_saves_with_targets(tmp_path: Path) -> None:
    tree = {"a": laplace(200, 300), "b": laplace(200, 300), "c": np.arange(5)}
    await tstore.save(tmp_path, tree, 0, codecs=tstore.Bits(4))
    await tstore.save(tmp_path, tree, 1, codecs={"a": tstore.MinSqnr(30), "b": "e4m3"})
    first, second = [await tstore.restore(tmp_path, step=step) for step in (0, 1)]
    assert exmy.sqnr(tree["a"], first["a"]) > 20
    assert exmy.sqnr(tree["a"], second["a"]) >= 30
    assert np.array_equal(second["b"], exmy.quantize(tree["b"], "e4m3").dequantize())
    async with await tstore.open(tmp_path) as store:
        sizes = [await (await store.snapshot(step)).array("a") for step in ("step/0", "step/1")]
        assert all(array.codecs[-1]["name"] == "zstd" for array in sizes)
    with pytest.raises(InvalidArgument, match="has only its own part"):
        await tstore.save(tmp_path, tree, 2, host=0, hosts=2, attempt="a", codecs={"a": tstore.Bits(4)})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 4, "coding": "entropy", "block": 32}, "settings of packed codes"),
        ({"bits": 4, "coding": "huffman"}, "coding='huffman': expected 'entropy' or 'packed'"),
        ({"formats": "e4m3", "coding": "packed"}, r"coding='packed' applies to bits=… and min_sqnr=…"),
        ({"formats": {"w": {"bits": 3, "min_sqnr": 3}}}, "the rule 'w': a target can't have min_sqnr"),
        ({"formats": {"w": {"bits": -3}}}, "the rule 'w': bits=-3: expected a positive number"),
        ({"formats": {"w": {"min_sqnr": 3, "coding": 5}}}, "the rule 'w': coding=5"),
        ({"bits": 0.01}, "can't be met: the least possible is"),
    ],
)
async def test_bad_arguments_change_nothing(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    await tstore.save(tmp_path, {"w": laplace(100, 128)}, 0)
    with pytest.raises(InvalidArgument, match=message):
        await tstore.quantize(tmp_path, **options)
    async with await tstore.open(tmp_path) as store:
        assert await store.tags() == {"step/0": 1}


async def test_a_report_as_a_table(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": laplace(100, 128), "b": laplace(100), "x": laplace(64, 64)}, 0)
    report = await tstore.quantize(tmp_path, {"x": "e4m3"}, bits=12)
    stored = await tstore.quantize_report(tmp_path, report.tag)
    assert stored.table() == report.table()
    head, b, w, x, total = report.table().splitlines()
    assert head.split()[:2] == ["array", "format"]
    assert b.endswith("one-dimensional; to encode it, add a rule with its name")
    assert w.split()[:3] == ["w", "e3m10", "entropy"]
    assert x.split()[:3] == ["x", "e4m3", "packed"]
    assert total == repr(report)


@pytest.mark.parametrize(
    "options", [{}, {"min_sqnr": 30}, {"coding": "packed"}, {"formats": "e4m3"}, {"formats": "e2m1", "block": 32}]
)
async def test_values_whose_squares_underflow_stay_unchanged(tmp_path: Path, options: dict[str, Any]) -> None:
    """The error of such values can't be measured; as zeros, which they resembled, they were lost."""
    tree = {"tiny": RNG.standard_normal((64, 64)) * 1e-300, "zero": np.zeros((64, 64))}
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, tag="q", **options)
    exact = {row.path: row.reason for row in report.arrays if row.format is None}
    assert exact.keys() == {"tiny"}
    assert exact["tiny"].endswith("are too small")
    restored = await tstore.restore(tmp_path, at="q")
    assert all(np.array_equal(restored[path], tree[path]) for path in tree)


async def test_values_beyond_the_steps_stay_unchanged(tmp_path: Path) -> None:
    tree = {f"{2 * k}": RNG.standard_normal((64, 64)) * 2.0 ** (2 * k) for k in (-68, -62, 0, 61, 66)}
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, min_sqnr=20)
    exact = {row.path: row.reason for row in report.arrays if row.format is None}
    assert exact.keys() == {"-136", "132"}
    assert all("beyond the steps of entropy coding" in reason for reason in exact.values())


async def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": laplace(64, 96)}, 0)
    numbers: list[Any] = [{"bits": np.int64(5)}, {"bits": np.float32(5)}, {"min_sqnr": np.float32(20)}]
    for i, options in enumerate([*numbers, {"block": np.int64(32)}]):
        report = await tstore.quantize(tmp_path, at="step/0", tag=f"q{i}", **options)  # type: ignore[arg-type]
        assert [row.path for row in report.encoded] == ["w"]
