"""Quantized checkpoints: stored bits, rules, floors, budgets, what is kept, reports, executors."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import exmy
import ml_dtypes
import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tests.support.thresholds import Thresholds
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, SnapshotExpired, Unavailable
from tstore.quantization.report import plot_report

RNG = np.random.default_rng(7)
KINDS = ["float16", "bfloat16", "float32", "float64"]


def values(*shape: int, kind: str = "float32", scale: float = 1.0) -> np.ndarray[Any, Any]:
    dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else kind
    return (RNG.standard_normal(shape) * scale).astype(dtype)


@pytest.fixture(autouse=True)
def same_values_in_any_order() -> None:
    """Start the generator again, so that the values of a test don't depend on the tests before it."""
    RNG.bit_generator.state = np.random.default_rng(7).bit_generator.state


async def chunked(url: Any, arrays: dict[str, tuple[Any, tuple[int, ...]]]) -> None:
    """Commit arrays with these chunks as step 0."""
    store = await tstore.open(url)
    async with store.transaction(tag="step/0") as tx:
        for path, (x, chunks) in arrays.items():
            array = await tx.create_array(path, x.shape, x.dtype, chunks)
            await array.write(x)


def same_codes(actual: exmy.Quantized, expected: exmy.Quantized) -> None:
    assert isinstance(actual, exmy.Quantized)
    assert (actual.format, actual.shape, actual.dtype) == (expected.format, expected.shape, expected.dtype)
    assert (actual.granularity, actual.axis, actual.block) == (expected.granularity, expected.axis, expected.block)
    assert np.array_equal(actual.packed, expected.packed)
    assert np.array_equal(actual.offsets, expected.offsets)


# ---- the stored bits


@pytest.mark.parametrize("name", ["e4m3", "e3m2", "e0m3", "e2m0", "e5m10", "e8m7"])
@pytest.mark.parametrize("kind", KINDS)
async def test_stored_bits_are_those_of_exmy(tmp_path: Path, name: str, kind: str) -> None:
    arrays = {
        "whole": (values(60, 70, kind=kind), (60, 70)),
        "slabs": (values(64, 16, kind=kind, scale=1e-3), (16, 16)),
        "edge": (values(50, 33, kind=kind), (16, 33)),
        "grid": (values(37, 45, kind=kind), (16, 16)),
        "vector": (values(1000, kind=kind), (300,)),
        "cube": (values(5, 6, 50, kind=kind), (1, 6, 50)),
    }
    await chunked(tmp_path, arrays)
    report = await tstore.quantize(tmp_path, {"vector": name, "**": name}, tag="q")
    packed = await tstore.restore(tmp_path, at="q", packed=True)
    decoded = await tstore.restore(tmp_path, at="q")
    for row in report.arrays:
        x = arrays[row.path][0]
        expected = exmy.quantize(x, name)
        same_codes(packed[row.path], expected)
        y = expected.dequantize(kind)
        assert decoded[row.path].dtype == x.dtype
        assert decoded[row.path].tobytes() == y.tobytes()
        assert (row.format, row.granularity) == (name, "tensor")
        assert row.sqnr == pytest.approx(exmy.sqnr(x, y), abs=1e-6)
        wide = x.astype("f8") - y.astype("f8")
        assert row.largest_error == pytest.approx(np.abs(wide).max())
        nonzero = x != 0
        assert row.largest_relative == pytest.approx(np.abs(wide[nonzero] / x[nonzero].astype("f8")).max())
        assert row.clipped == pytest.approx(expected.count_clipped(x) / x.size)


@pytest.mark.parametrize(
    ("axis", "block", "granularity"), [(-1, None, "row"), (0, None, "row"), (1, 32, "block of 32"), (None, 16, "")]
)
async def test_rows_and_blocks_are_those_of_exmy(
    tmp_path: Path, axis: int | None, block: int | None, granularity: str
) -> None:
    spread = np.exp2(RNG.integers(-6, 6, (96, 1)))
    arrays = {
        "whole": ((values(96, 64) * spread).astype("f4"), (96, 64)),
        "grid": ((values(96, 64) * spread).astype("f4"), (32, 16)),
        "odd": ((values(96, 64) * spread).astype("f4"), (25, 24)),
    }
    await chunked(tmp_path, arrays)
    report = await tstore.quantize(tmp_path, "e3m2", axis=axis, block=block, tag="q")
    packed = await tstore.restore(tmp_path, at="q", packed=True)
    decoded = await tstore.restore(tmp_path, at="q")
    for row in report.arrays:
        x = arrays[row.path][0]
        expected = exmy.quantize(x, "e3m2", axis, block)
        same_codes(packed[row.path], expected)
        assert np.array_equal(decoded[row.path], expected.dequantize())
        assert row.granularity == (granularity or "block of 16")
        assert row.bits_per_value > 6


async def test_a_saved_chunk_has_the_bits_of_exmy(tmp_path: Path) -> None:
    x = values(40, 50)
    await tstore.save(tmp_path, {"w": x}, 0, codecs="e3m2")
    same_codes((await tstore.restore(tmp_path, packed=True))["w"], exmy.quantize(x, "e3m2"))
    assert np.array_equal((await tstore.restore(tmp_path))["w"], exmy.quantize(x, "e3m2").dequantize())


async def test_chunks_with_offsets_of_their_own_become_rows_or_blocks(tmp_path: Path) -> None:
    tall, wide = values(8, 64), values(8, 64)
    tall *= np.exp2(np.arange(8))[:, None].astype("f4")
    wide[:, 32:] *= 1000
    store = await tstore.open(tmp_path)
    async with store.transaction() as tx:
        for path, x, chunks in (("tall", tall, (2, 64)), ("wide", wide, (8, 32)), ("odd", wide, (8, 20))):
            await (await tx.create_array(path, x.shape, "f4", chunks, "e3m2")).write(x)
    snapshot = await store.snapshot()
    restored = await tstore.restore(store, packed=True, only=["tall", "wide"])
    for path, granularity in (("tall", "row"), ("wide", "block")):
        assert restored[path].granularity == granularity
        assert np.array_equal(restored[path].dequantize(), await (await snapshot.array(path)).read())
    with pytest.raises(
        InvalidArgument, match=r"the values of odd can be read.* odd: no offsets per row or per block"
    ):
        await tstore.restore(store, packed=True)


async def test_packed_restores_other_codecs_unpacked(tmp_path: Path) -> None:
    tree = {"w": values(100, 3), "ids": np.arange(5), "n": [values(7), 3]}
    await tstore.save(tmp_path, tree, 0, codecs={"w": "e4m3"})
    restored = await tstore.restore(tmp_path, packed=True)
    assert isinstance(restored["w"], exmy.Quantized)
    assert np.array_equal(restored["ids"], tree["ids"])
    assert np.array_equal(restored["n"][0], tree["n"][0])
    again = await tstore.restore(tmp_path, packed=True, target=tree)
    assert again["w"].to_bytes() == restored["w"].to_bytes()
    with pytest.raises(InvalidArgument, match="ids: it is not stored in an eXmY format"):
        await (await (await tstore.open(tmp_path)).snapshot()).read_packed("ids")


@pytest.mark.parametrize("memory", [0, 130_000, 1 << 20])
async def test_an_array_beyond_a_slab_is_fitted_and_encoded_in_pieces(
    tmp_path: Path, thresholds: Thresholds, memory: int
) -> None:
    thresholds(SLAB=1 << 14)
    thresholds(SLAB=1 << 14)
    x = values(300, 100)
    x[211, 5] = 300.0  # an outlier in one of the later slabs
    await chunked(tmp_path, {"x": (x, (16, 50)), "y": (x, (7, 100)), "z": (x[:, :1].copy(), (100, 1))})
    await tstore.quantize(tmp_path, "e3m2", tag="q", memory=memory)
    restored = await tstore.restore(tmp_path, at="q", packed=True)
    same_codes(restored["x"], exmy.quantize(x, "e3m2"))
    same_codes(restored["y"], exmy.quantize(x, "e3m2"))
    for target in ({"bits": 5.0}, {"min_sqnr": 25.0}):
        report = await tstore.quantize(tmp_path, **target, coding="packed", memory=memory)  # type: ignore[arg-type]
        for row in report.arrays:
            restored = await tstore.restore(tmp_path, at=report.tag, packed=True)
            given = x[:, :1] if row.path == "z" else x
            if row.format:
                same_codes(restored[row.path], exmy.quantize(given, row.format))
            else:
                assert np.array_equal(restored[row.path], given)
        assert sum(a.format is not None for a in report.arrays) >= 2


@pytest.mark.parametrize(
    "options", [{"min_sqnr": 30.0}, {"bits": 5.0}, {"min_sqnr": 30.0, "axis": 0, "block": 32}]
)
@pytest.mark.parametrize("shape", [(32, 43 * 128), (43 * 128, 32)])
async def test_an_array_beyond_a_slab_is_sampled_in_whole_blocks(
    tmp_path: Path, thresholds: Thresholds, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    """Also if the axis that is divided into blocks is the longest."""
    thresholds(SLAB=1 << 16)
    x = np.random.default_rng(0).standard_normal(shape, dtype="f4")
    await tstore.save(tmp_path, {"w": x}, 0)
    report = await tstore.quantize(tmp_path, **options)
    assert report.arrays[0].format is not None


async def test_the_sample_of_an_array_represents_all_of_it(tmp_path: Path, thresholds: Thresholds) -> None:
    """Two arrays of which the last quarter differs get one format, also if a slab has the shape of the sample."""
    thresholds(SLAB=1 << 16)
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.standard_normal((192, 256)), rng.choice([-1.0, 1.0], (64, 256))]).astype("f4")
    await tstore.save(tmp_path, {"x": x, "y": x[:252]}, 0)
    report = await tstore.quantize(tmp_path, min_sqnr=30, coding="packed")
    assert [row.format for row in report.arrays] == ["e2m3", "e2m3"]


class Reads:
    """Counts the reads of each array, and the bytes of values read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        read_chunks, read_local = tstore.core.snapshot.read_chunks, tstore.core.snapshot.read_local

        def count(job: Any) -> None:
            self.calls[job.path] += 1
            self.bytes[job.path] = self.bytes.get(job.path, 0) + job.out.nbytes

        async def counting(storage: Any, jobs: Any, *unfinished: Any) -> None:
            for job in jobs:
                count(job)
            await read_chunks(storage, jobs, *unfinished)

        def counting_local(storage: Any, job: Any, threads: int) -> None:
            count(job)
            read_local(storage, job, threads)

        monkeypatch.setattr("tstore.core.snapshot.read_local", counting_local)

        for module in ("tstore.core.snapshot", "tstore.core.data.reader"):
            monkeypatch.setattr(f"{module}.read_chunks", counting)


TARGETS = [{"bits": 5.0}, {"bits": 5.0, "block": None}, {"min_sqnr": 25.0, "block": None}, {"formats": "e3m2"}]


@pytest.mark.parametrize("options", TARGETS)
async def test_values_are_read_once_where_memory_allows_and_the_result_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds, options: dict[str, Any]
) -> None:
    thresholds(SLAB=1 << 14)
    tree = {
        "large": values(128, 128),
        "larger": values(256, 128),
        "small": values(16, 128),
        "tiny": values(8, 128),
    }
    await tstore.save(tmp_path, tree, 0)
    local = await tstore.quantize(tmp_path, **options, tag="local", memory=1 << 20)
    monkeypatch.setattr("tstore.core.snapshot.is_local", lambda storage: False)
    reads = Reads(monkeypatch)
    roomy = await tstore.quantize(tmp_path, **options, at="step/0", tag="roomy", memory=1 << 20)
    assert reads.bytes == {path: x.nbytes for path, x in tree.items()}
    results = [roomy, local]
    for memory in (0, 1 << 14, 70_000, 140_000):
        results.append(await tstore.quantize(tmp_path, **options, at="step/0", tag=f"m{memory}", memory=memory))
    assert all(result.arrays == roomy.arrays for result in results)
    expected, *others = [await tstore.restore(tmp_path, at=r.version, packed=True) for r in results]
    for other in others:
        for path in tree:
            assert other[path].to_bytes() == expected[path].to_bytes()


@pytest.mark.parametrize("options", [{"bits": 5.0}, {"formats": "e3m2", "block": 32}])
@pytest.mark.parametrize(("memory", "is_local", "reads"), [(1 << 20, True, 1), (0, True, 2), (0, False, 2)])
async def test_large_arrays_are_read_once_if_memory_suffices(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    thresholds: Thresholds,
    options: dict[str, Any],
    memory: int,
    is_local: bool,
    reads: int,
) -> None:
    thresholds(SLAB=1 << 14)
    x = values(256, 128)
    await tstore.save(tmp_path, {"w": x}, 0)
    monkeypatch.setattr("tstore.core.snapshot.is_local", lambda storage: is_local)
    counted = Reads(monkeypatch)
    await tstore.quantize(tmp_path, **options, memory=memory)
    assert counted.bytes == {"w": reads * x.nbytes}


async def test_a_bias_is_searched_once_in_a_pass_that_also_counts_exponents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    thresholds(SLAB=1 << 14)
    x = values(256, 128)
    await tstore.save(tmp_path, {"w": x}, 0)
    fitted: list[str] = []
    fit = exmy.TensorFit

    def counted(f: Any, *arguments: Any, **options: Any) -> exmy.TensorFit:
        fitted.append(exmy.Format(f).name if isinstance(f, str) else f.name)
        return fit(f, *arguments, **options)

    monkeypatch.setattr(exmy, "TensorFit", counted)
    for options in ({"bits": 5.0}, {"min_sqnr": 25.0}):
        fitted.clear()
        await tstore.quantize(tmp_path, block=None, at="step/0", **options)
        assert len(fitted) == len(set(fitted)) > 0
    fitted.clear()
    reads = Reads(monkeypatch)
    await tstore.quantize(tmp_path, "e3m2", at="step/0", memory=0)
    assert fitted == ["e3m2"]
    assert reads.bytes == {"w": 2 * x.nbytes}  # the search, which needs one pass here, and the encoding


async def test_codes_with_a_checksum_of_their_own_are_those_of_plain_codes(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": values(40, 64)}, 0)
    plain = await tstore.quantize(tmp_path, "e3m2", tag="plain")
    rule = {"w": [{"name": "exmy", "configuration": {"format": "e3m2"}}, {"name": "crc32c"}]}
    checked = await tstore.quantize(tmp_path, rule, at="step/0", tag="checked")
    assert checked.arrays[0].sqnr == plain.arrays[0].sqnr
    assert checked.arrays[0].bytes_after == plain.arrays[0].bytes_after + 4
    restored = [await tstore.restore(tmp_path, at=tag) for tag in ("plain", "checked")]
    assert np.array_equal(restored[0]["w"], restored[1]["w"])


# ---- the format of each array


async def test_rules(tmp_path: Path) -> None:
    tree = {
        "layers": [{"w": values(50, 40), "norm": values(100)} for _ in range(2)],
        "embed": {"table": values(200, 16)},
        "ids": np.arange(100),
    }
    await tstore.save(tmp_path, tree, 3)
    rules = {"**/norm*": None, "**/embed/*": "e4m3", "layers/1/*": {"format": "e3m2", "axis": 0}, "**": "e2m1"}
    report = await tstore.quantize(tmp_path, rules)  # type: ignore[arg-type]
    assert (report.tag, report.source) == ("step/3/e4m3-e3m2-e2m1", 1)
    assert {a.path: (a.format, a.granularity) for a in report.arrays} == {
        "layers/0/w": ("e2m1", "tensor"),
        "layers/0/norm": (None, ""),
        "layers/1/w": ("e3m2", "row"),
        "layers/1/norm": (None, ""),
        "embed/table": ("e4m3", "tensor"),
        "ids": (None, ""),
    }
    restored = await tstore.restore(tmp_path, at=report.tag)
    assert np.array_equal(restored["layers"][1]["norm"], tree["layers"][1]["norm"])  # type: ignore[index]
    assert await tstore.steps(tmp_path) == [3]
    same = await tstore.restore(tmp_path)
    assert np.array_equal(same["embed"]["table"], tree["embed"]["table"])  # type: ignore[index]


@pytest.mark.parametrize("call", ["quantize", "save"])
@pytest.mark.parametrize("codecs", ["fp8", "e4m3 ", {"format": "e4m3", "blok": 32}])
async def test_a_format_that_does_not_exist_is_an_error_where_no_array_would_have_it(
    tmp_path: Path, call: str, codecs: Any
) -> None:
    tree = {"w": values(100), "ids": np.arange(100)}
    await tstore.save(tmp_path, tree, 0)
    rules = {"w": "e4m3", "**": codecs}
    work = tstore.quantize(tmp_path, rules) if call == "quantize" else tstore.save(tmp_path, tree, 1, codecs=rules)
    with pytest.raises(InvalidArgument, match=r"the rule '\*\*': .*(does not name a format|'blok')"):
        await work
    assert (await (await tstore.open(tmp_path)).tags()) == {"step/0": 1}


@pytest.mark.parametrize("call", ["quantize", "save"])
async def test_a_pattern_without_a_match_is_an_error_that_lists_near_names(tmp_path: Path, call: str) -> None:
    tree = {"layers": {"norm1": values(100), "w_out": values(100)}, "embed": values(100)}
    await tstore.save(tmp_path, tree, 0)
    rules = {"**/nrom1": None, "embed": "e4m3", "layer/**": "e3m2", "zzz": None}
    work = tstore.quantize(tmp_path, rules) if call == "quantize" else tstore.save(tmp_path, tree, 1, codecs=rules)
    with pytest.raises(InvalidArgument, match="3 of 4 patterns match no array") as caught:
        await work
    message = str(caught.value)
    assert "'**/nrom1'; similar paths: layers/norm1" in message
    assert message.endswith("\n  'zzz'")
    assert (await (await tstore.open(tmp_path)).tags()) == {"step/0": 1}


@pytest.mark.parametrize("tag", ["step/99", "step/0"])
async def test_a_lossy_copy_is_no_step(tmp_path: Path, tag: str) -> None:
    """Otherwise `restore` would return it, and the next quantization would take it for its source."""
    tree = {"w": values(300)}
    await tstore.save(tmp_path, tree, 0)
    with pytest.raises(InvalidArgument, match=r"names a step.*pass another name, such as"):
        await tstore.quantize(tmp_path, "e2m1", tag=tag)
    report = await tstore.quantize(tmp_path, "e2m1", tag=f"quantized/{tag}")
    assert await tstore.steps(tmp_path) == [0]
    assert np.array_equal((await tstore.restore(tmp_path))["w"], tree["w"])
    assert (await tstore.quantize(tmp_path, "e4m3")).source == report.source == 1


async def test_without_steps_a_lossy_copy_is_no_source(tmp_path: Path) -> None:
    x = values(300)
    async with await tstore.open(tmp_path) as store:
        for scale in (1, 2):
            async with store.transaction(tag=f"v{scale}") as tx:
                await tx.staging.replace_all(b"")
                await (await tx.create_array("x", x.shape, x.dtype)).write(scale * x)
        for name in ("e4m3", "e2m1"):
            assert (await tstore.quantize(store, name)).source == 2
        assert np.array_equal((await tstore.restore(store))["x"], 2 * x)
        assert [c.source async for c in store.history()] == [2, 2, None, None]
        assert (await tstore.quantize(store, "e3m2", at="v2/e4m3")).source == 3


async def test_min_sqnr_is_kept_with_few_bits(tmp_path: Path) -> None:
    outliers = values(200, 100)
    outliers[:, 0] *= 300
    tree = {
        "gauss": values(300, 100),
        "heavy": RNG.standard_t(3, (200, 100)).astype("f4"),
        "outliers": outliers,
        "even": RNG.uniform(-1, 1, (50, 100)).astype("f4"),
        "powers": np.exp2(RNG.integers(-8, 8, (30, 100))).astype("f4"),
    }
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, min_sqnr=30, coding="packed")
    assert report.tag == "step/0/30dB-packed"
    by_path = {a.path: a for a in report.arrays}
    for path, row in by_path.items():
        assert row.format is not None
        assert row.sqnr >= 30
        fewer = exmy.Format(row.format).bits - 1
        best = (
            max(
                (exmy.sqnr(tree[path], exmy.quantize(tree[path], f).dequantize()) for f in exmy.formats(fewer)),
                default=-math.inf,
            )
            if fewer >= 2
            else -math.inf
        )
        assert best < 30.2, path
    assert by_path["powers"].bits_per_value < by_path["gauss"].bits_per_value < by_path["heavy"].bits_per_value
    high = await tstore.quantize(tmp_path, min_sqnr=200, coding="packed", tag="high")
    assert not high.encoded or all(a.sqnr >= 200 for a in high.encoded)
    assert any("keep 200 dB" in a.reason for a in high.arrays)
    rows = await tstore.quantize(tmp_path, min_sqnr=30, axis=1, tag="rows", at="step/0")
    assert all(a.sqnr >= 30 for a in rows.encoded)


async def test_a_budget_is_kept_and_beats_every_uniform_format(tmp_path: Path) -> None:
    tree = {
        "small": values(100, 100, scale=0.02),
        "large": values(100, 100, scale=2.0),
        "even": RNG.uniform(-1, 1, (100, 100)).astype("f4"),
        "heavy": RNG.standard_t(3, (100, 100)).astype("f4"),
        "norm": values(30),
    }
    await tstore.save(tmp_path, tree, 0)
    for width in (3, 5, 8):
        uniform = [
            await tstore.quantize(tmp_path, f.name, at="step/0", tag=f"u{f.name}") for f in exmy.formats(width)
        ]
        budget = max(u.bits_per_value for u in uniform)
        report = await tstore.quantize(tmp_path, bits=budget, error="absolute", at="step/0", tag=f"b{width}")
        assert report.bits_per_value <= budget
        assert report.bits_per_value > budget - 0.8
        assert sum(a.noise for a in report.arrays) < min(sum(a.noise for a in u.arrays) for u in uniform)
    [norm] = [a for a in report.arrays if a.path == "norm"]
    assert (norm.format, norm.reason) == (None, "fewer than 64 values")


async def test_a_relative_budget_serves_small_values_too(tmp_path: Path) -> None:
    tree = {"small": values(100, 100, scale=1e-3), "large": values(100, 100, scale=1e3)}
    await tstore.save(tmp_path, tree, 0)
    absolute = await tstore.quantize(tmp_path, bits=6, error="absolute", coding="packed", tag="a")
    relative = await tstore.quantize(tmp_path, bits=6.1, coding="packed", tag="r", at="step/0")
    large, small = sorted(absolute.arrays, key=lambda a: a.path)
    assert small.bits_per_value < 3
    assert large.bits_per_value > 9
    large, small = sorted(relative.arrays, key=lambda a: a.path)
    assert small.bits_per_value == large.bits_per_value
    assert small.sqnr == pytest.approx(large.sqnr, abs=1)


async def test_an_executor_that_is_none_is_refused(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": values(100, 100)}, 0)
    with pytest.raises(InvalidArgument, match=r"executor='dask': expected a concurrent\.futures\.Executor"):
        await tstore.quantize(tmp_path, "e4m3", executor="dask")  # type: ignore[arg-type]


async def test_an_impossible_budget_says_the_least_possible(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": values(100, 100), "ids": np.arange(10_000)}, 0)
    with pytest.raises(InvalidArgument, match=r"bits=5 can't be met: the least possible is 33\.000 bits"):
        await tstore.quantize(tmp_path, bits=5, coding="packed")
    report = await tstore.quantize(tmp_path, bits=33, coding="packed")
    assert report.bits_per_value == pytest.approx(33.004, abs=1e-3)  # with the header of the chunk
    assert await (await tstore.open(tmp_path)).tags() == {"step/0": 1, "step/0/33bits-packed": 2}


@pytest.mark.parametrize(
    ("bits", "settings"),
    [
        (4.25, {"block": 32, "scale": "6bit"}),
        (4.5, {"block": 16, "scale": "e4m3"}),
        (4.25, {"block": 32}),
        (4, {"block": None}),
    ],
)
async def test_the_header_of_a_chunk_costs_no_width(tmp_path: Path, bits: float, settings: dict[str, Any]) -> None:
    await tstore.save(tmp_path, {"w": values(4096, 64)}, 0)
    report = await tstore.quantize(tmp_path, bits=bits, coding="packed", **settings)
    assert bits - 0.01 < report.bits_per_value < bits + 0.01


async def test_a_chunk_that_is_decoded_whole_is_decoded_once_in_each_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    thresholds(SLAB=1 << 14)
    store, x = await tstore.open(tmp_path), values(512, 128)
    async with store.transaction(tag="step/0") as tx:
        await (await tx.create_array("w", x.shape, "f4", x.shape, codecs=["bytes", "zstd"])).write(x)
    reads = Reads(monkeypatch)
    report = await tstore.quantize(store, "e4m3", memory=0)
    assert reads.calls["w"] <= 4  # the array has 16 slabs
    expected = exmy.quantize(x, "e4m3")
    assert report.arrays[0].noise == expected.measure(x)[0].noise


async def test_a_budget_that_all_bits_fit_is_refused(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": values(100, 100)}, 0)
    for bits in (32, 40, 99):
        with pytest.raises(
            InvalidArgument, match=rf"bits={bits} changes nothing, .* already take 32\.000 bits per value"
        ):
            await tstore.quantize(tmp_path, bits=bits)
    assert await (await tstore.open(tmp_path)).tags() == {"step/0": 1}


async def test_codes_that_missed_the_target_take_no_space(tmp_path: Path) -> None:
    tree = {f"w{i}": values(300, 416) * np.exp(values(300, 1) * i) for i in range(6)}
    await tstore.save(tmp_path, tree, 0)
    before = sum(path.stat().st_size for path in tmp_path.glob("txn/*/pack-*"))
    report = await tstore.quantize(tmp_path, min_sqnr=60, block=16)
    added = sum(path.stat().st_size for path in tmp_path.glob("txn/*/pack-*")) - before
    assert added <= sum(a.bytes_after for a in report.arrays if a.format) * 17 / 16
    assert (await (await tstore.open(tmp_path)).verify()).ok


@pytest.mark.parametrize("format", ["e0m3", "e1m2", "e2m1", "e3m0", "e4m3"])
@pytest.mark.parametrize("scale", ["search", "float", "e4m3"])
async def test_large_values_are_encoded_where_exmy_encodes_them(tmp_path: Path, format: str, scale: Any) -> None:
    x = np.random.default_rng(0).uniform(-1, 1, (32, 64))
    x[0, 0] = 1
    tree = {f"w{power}": x * 2.0**power for power in (124, 126.6, 127.4, 129, 133)}
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, {"**": {"format": format, "scale": scale, "block": 32}}, tag="q")
    copy = await tstore.restore(tmp_path, at="q")
    assert [row.path for row in report.arrays] == sorted(tree)
    for row in report.arrays:
        try:
            expected = exmy.quantize(tree[row.path], format, block=32, scale=scale).dequantize()
        except exmy.FormatError:
            assert "beyond the range" in row.reason
        else:
            assert np.array_equal(copy[row.path], expected)


@pytest.mark.parametrize(
    ("shape", "chunks"), [((64, 100), (16, 16)), ((70, 90, 50), (10, 16, 16)), ((9, 8), (9, 16))]
)
@pytest.mark.parametrize("target", [{"bits": 6}, {"min_sqnr": 20}, {"bits": 6, "scale": "6bit"}])
async def test_blocks_need_not_divide_the_array(
    tmp_path: Path, shape: tuple[int, ...], chunks: tuple[int, ...], target: dict[str, Any]
) -> None:
    store = await tstore.open(tmp_path)
    async with store.transaction(tag="step/0") as tx:
        await (await tx.create_array("w", shape, "float32", chunks)).write(values(*shape))
    sensitivity = {"w": np.linspace(1, 2, shape[-1])} if "bits" in target else None
    report = await tstore.quantize(store, block=16, sensitivity=sensitivity, **target)
    [w] = report.arrays
    assert "block of 16" in str(w) or w.reason


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            {"**": {"bits": 9}},
            r"^the rule '\*\*': bits=9 can't be met: .*, of which 32\.000 belong to arrays that stay unchanged or "
            "have a rule, the largest of them ids; allow more bits, or add rules",
        ),
        (
            {"w": {"bits": 1e-3}},
            r"^the rule 'w': bits=0\.001 can't be met: .*\d bits per value; allow more bits$",
        ),
    ],
)
async def test_an_impossible_budget_of_a_rule_names_it(tmp_path: Path, rules: Any, message: str) -> None:
    tree = {"w": values(100, 100), "v": values(100), "ids": np.arange(10_000)}
    await tstore.save(tmp_path, tree, 0)
    with pytest.raises(InvalidArgument, match=message):
        await tstore.quantize(tmp_path, rules)


async def test_rules_go_before_the_data(tmp_path: Path) -> None:
    tree = {"a": values(100, 100), "b": values(100, 100), "c": values(100, 100)}
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, {"a": None, "b": "e2m1"}, bits=15, coding="packed")
    a, b, c = report.arrays
    assert (a.format, b.format) == (None, "e2m1")
    assert c.format
    assert exmy.Format(c.format).bits in (8, 9)


async def test_a_lossless_rule_takes_every_dtype(tmp_path: Path) -> None:
    tree = {"empty": values(0, 4), "ids": np.arange(5000), "c": np.ones(300, "c16"), "flags": np.ones(200, bool)}
    tree["nan"] = np.full((40, 50), np.nan, "f4")
    tree["w"] = values(60, 50)
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, {"w": "e4m3", "**": "lossless"})
    restored = await tstore.restore(tmp_path, at=report.tag)
    for row in report.arrays:
        if row.path != "w":
            assert np.array_equal(restored[row.path], tree[row.path], equal_nan=True)
            assert (row.format, row.reason, row.sqnr) == (None, "", math.inf)
    assert {a.path for a in report.encoded} == {"w"}
    assert report.bytes_after < report.bytes_before / 2


async def test_arrays_that_cannot_be_encoded_are_kept_and_reported(tmp_path: Path) -> None:
    bad = values(100, 3)
    bad[3, 1], bad[99, 2] = np.nan, -np.inf
    tree = {
        "bad": bad,
        "tiny": values(5),
        "ids": np.arange(500),
        "empty": values(0, 4),
        "w": values(100, 3),
        "s": 3,
    }
    tree["zero"] = np.zeros((3, 100), "f4")
    await tstore.save(tmp_path, tree, 0)
    for options in ({"formats": "e3m2"}, {"min_sqnr": 20.0}, {"bits": 31.0}):
        report = await tstore.quantize(tmp_path, **options, tag=str(options))  # type: ignore[arg-type]
        rows = {a.path: a for a in report.arrays}
        assert "2" in rows["bad"].reason
        assert "NaN or infinite" in rows["bad"].reason
        assert "(1 left exact because of NaN or infinity: bad)" in repr(report)
        assert rows["tiny"].reason == rows["empty"].reason == "fewer than 64 values"
        assert rows["ids"].reason == "int64 is not encoded"
        restored = await tstore.restore(tmp_path, at=report.tag)
        for path in ("bad", "tiny", "ids", "empty", "zero"):
            assert np.array_equal(restored[path], tree[path], equal_nan=path != "ids")
        assert restored["s"] == 3


@pytest.mark.parametrize("at", [None, "step/1"])
async def test_a_concurrent_gc_is_reported(tmp_path: Path, at: str | None) -> None:
    """Unchanged arrays are referenced, and a gc may condemn their chunks in the meantime."""
    tree = {"w": values(64, 64), "n": np.arange(10_000)}
    await tstore.save(tmp_path, tree, 1)
    told: list[int] = []

    def overtake(done: int, total: int) -> None:
        if not told:
            blocking.save(tmp_path, {"w": values(64, 64), "n": np.arange(10_000) + 1}, 2)
            blocking.open(tmp_path).collect(tstore.Keep(last=1))
        told.append(done)

    if at is not None:
        with pytest.raises(SnapshotExpired, match=r"version 1.* was removed by the garbage collection"):
            await tstore.quantize(tmp_path, "e4m3", at=at, progress=overtake)
        return
    report = await tstore.quantize(tmp_path, "e4m3", progress=overtake)
    assert (report.tag, report.source) == ("step/2/e4m3", 2)
    assert (await tstore.restore(tmp_path, at="step/2/e4m3"))["n"][0] == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_sqnr": 30, "bits": 5}, "mutually exclusive"),
        ({"min_sqnr": math.nan}, "min_sqnr=nan: expected decibels"),
        ({"min_sqnr": -5}, "min_sqnr=-5: expected decibels from 0"),
        ({"min_sqnr": "much"}, "expected a number"),
        ({"bits": 0}, "positive"),
        ({"bits": -3.0}, "positive"),
        ({"bits": True}, "expected a number"),
        ({"coding": "zip"}, "coding='zip': expected 'entropy' or 'packed'"),
        ({"coding": []}, "expected 'entropy' or 'packed'"),
        ({"progress": 1}, "progress=1: expected a function"),
        ({"memory": -1}, "memory=-1: expected a number of bytes"),
        ({"bits": 4, "sensitivity": {"w": 10**400}}, "is not a number"),
        ({"formats": "e9m9"}, "e9m9"),
        ({"formats": {"**": "float8"}}, "float8"),
        ({"formats": "e4m3", "block": 33}, "33"),
        ({"formats": "e4m3", "axis": 5}, "axis 5"),
        ({"formats": "e4m3", "scale": "best"}, "best"),
        ({"formats": {"format": "e4m3", "colour": 3}}, "colour"),
        ({"bits": 6, "axis": 9}, "axis 9"),
        ({"bits": 6, "error": "none"}, "expected 'absolute' or 'relative'"),
        ({"bits": 6, "error": ""}, "expected 'absolute' or 'relative'"),
        ({"formats": []}, r"formats=\[\]: the list of codecs is empty"),
        ({"min_sqnr": 6, "error": "relative"}, "pass bits"),
        ({"min_sqnr": 20, "block": 7}, "7"),
        ({"block": np.array([1, 2])}, "block is array"),
        ({"scale": np.array([1, 2])}, "scale=array"),
        ({"message": np.array([1, 2])}, "message=array"),
    ],
)
async def test_misuse_is_refused_and_nothing_is_committed(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    await tstore.save(tmp_path, {"w": values(64, 50)}, 0)
    with pytest.raises(InvalidArgument, match=words):
        await tstore.quantize(tmp_path, **options)
    assert await (await tstore.open(tmp_path)).tags() == {"step/0": 1}


async def test_a_taken_tag_is_refused(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": values(64, 50)}, 0)
    await tstore.quantize(tmp_path, "e4m3")
    with pytest.raises(AlreadyExists, match="names version"):
        await tstore.quantize(tmp_path, "e4m3")


# ---- compressed chains and their report


CHAIN = [{"name": "exmy", "configuration": {"format": "e2m1"}}, {"name": "zstd", "configuration": {"level": 1}}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compressor", ["zstd", "gzip", "blosc"])
async def test_a_compressed_chain_is_measured_on_the_stored_bytes(
    tmp_path: Path, kind: str, compressor: str
) -> None:
    settings = {"cname": "zstd", "clevel": 1, "shuffle": "noshuffle", "typesize": 1, "blocksize": 0}
    last = {"name": compressor, "configuration": settings if compressor == "blosc" else {"level": 1}}
    x = values(60, 70, kind=kind)
    nan = values(30, 10, kind=kind)
    nan[2, 3] = np.nan
    await chunked(
        tmp_path,
        {"w": (x, (16, 70)), "e": (x[:50, :33], (16, 33)), "ids": (np.arange(99), (99,)), "nan": (nan, (30, 10))},
    )
    rules = {"e": {"format": "e2m1", "axis": 1}, "**": [CHAIN[0], last]}
    report = await tstore.quantize(tmp_path, rules, tag="q")  # type: ignore[arg-type]
    rows = {a.path: a for a in report.arrays}
    expected = exmy.quantize(x, "e2m1")
    assert (rows["w"].format, rows["w"].granularity) == ("e2m1", "tensor")
    assert rows["w"].sqnr == pytest.approx(exmy.sqnr(x, expected.dequantize(kind)), abs=1e-6)
    assert rows["w"].clipped == pytest.approx(expected.count_clipped(x) / x.size)
    assert rows["ids"].reason == "int64 is not encoded"
    assert "NaN" in rows["nan"].reason
    assert report.sqnr < 25
    decoded = await tstore.restore(tmp_path, at="q")
    assert decoded["w"].tobytes() == expected.dequantize(kind).tobytes()
    snapshot = await (await tstore.open(tmp_path)).snapshot("q")
    document = json.loads(snapshot.tree.nodes["w"].document)
    assert [c["name"] for c in document["codecs"]] == ["exmy", compressor]
    assert rows["w"].bytes_after == sum(int(n) for n in snapshot.tree.nodes["w"].chunks.length)
    same_codes((await tstore.restore(tmp_path, at="q", packed=True))["w"], expected)


async def test_a_compressed_chain_shares_offsets_as_asked(tmp_path: Path) -> None:
    x = (values(96, 64) * np.exp2(RNG.integers(-6, 6, (96, 1)))).astype("f4")
    await chunked(tmp_path, {"w": (x, (25, 24))})
    await tstore.quantize(tmp_path, CHAIN, axis=-1, tag="rows")
    restored = await tstore.restore(tmp_path, at="rows", packed=True)
    same_codes(restored["w"], exmy.quantize(x, "e2m1", -1))


async def test_an_array_of_zeros_is_exact(tmp_path: Path) -> None:
    tree = {"zero": np.zeros((64, 128), "f4"), "huge": values(64, 128, kind="float64", scale=1e152)}
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, {"**": "e4m3"})
    huge, zero = sorted(report.arrays, key=lambda a: a.path)
    assert (zero.format, zero.sqnr, zero.largest_error) == ("e4m3", math.inf, 0)
    assert huge.sqnr == pytest.approx(31.5, abs=0.5)


async def test_sums_beyond_float64_are_not_called_exact(tmp_path: Path) -> None:
    large, small = values(64, 128, kind="float64") * 1e153, values(64, 128, kind="float64") * 1e-200
    await tstore.save(tmp_path, {"large": large, "small": small}, 0)
    report = await tstore.quantize(tmp_path, {"**": "e4m3"})
    vast, tiny = report.arrays
    assert math.isnan(vast.sqnr)
    assert vast.largest_error > 0
    assert vast.bits_per_value < 8.1
    assert (tiny.sqnr, tiny.bits_per_value) == (math.inf, 64)  # kept, since squared errors would be 0
    assert tiny.reason.endswith("are too small")
    stored = await tstore.quantize_report(tmp_path, report.tag)
    assert [math.isnan(row.sqnr) for row in stored.arrays] == [True, False]
    floored = await tstore.quantize(tmp_path, min_sqnr=20.0, at="step/0", tag="floor")
    assert not floored.encoded  # what cannot be measured keeps no floor


@pytest.mark.parametrize("scale", [1e150, 1e-130])
async def test_packed_float64_is_studied_where_products_of_squares_leave_its_range(
    tmp_path: Path, scale: float
) -> None:
    await tstore.save(tmp_path, {"w": values(64, 256, kind="float64") * scale}, 0)
    report = await tstore.quantize(tmp_path, coding="packed", tag="8bits")
    assert report.sqnr > 40
    floored = await tstore.quantize(tmp_path, min_sqnr=30.0, coding="packed", at="step/0", tag="30dB")
    assert floored.arrays[0].bits_per_value < 6.1


@pytest.mark.parametrize("rule", ["e4m3", {"format": "e4m3", "scale": "none"}, {"format": "e8m7", "axis": -1}])
async def test_values_whose_squares_exceed_float64_are_kept_also_by_a_rule(tmp_path: Path, rule: Any) -> None:
    vast, w = values(64, 128, kind="float64") * 2.0**513, values(64, 128, kind="float64")
    await tstore.save(tmp_path, {"vast": vast, "w": w}, 0)
    report = await tstore.quantize(tmp_path, {"**": rule}, tag="q")
    assert [array.path for array in report.encoded] == ["w"]
    assert report.arrays[0].reason.endswith("are too large")
    assert math.isfinite(report.sqnr)


@pytest.mark.parametrize("fill", [np.nan, -np.inf])
@pytest.mark.parametrize(
    "options", [{}, {"bits": 48.0}, {"min_sqnr": 30.0}, {"bits": 48.0, "coding": "packed"}, {"formats": "e4m3"}]
)
async def test_arrays_with_a_fill_value_that_no_format_has_are_kept(
    tmp_path: Path, fill: float, options: dict[str, Any]
) -> None:
    store = await tstore.open(tmp_path)
    arrays = {"filled": values(100, 80), "w": values(100, 80)}
    async with store.transaction(tag="step/0") as tx:
        for path, x in arrays.items():
            fill_value = fill if path == "filled" else 0
            array = await tx.create_array(path, x.shape, x.dtype, (64, 64), fill_value=fill_value)
            await array.write(x)
    report = await tstore.quantize(tmp_path, tag="q", **options)
    assert [array.path for array in report.encoded] == ["w"]
    assert report.arrays[0].reason == f"eXmY can't encode its fill value {fill}"
    assert np.array_equal((await tstore.restore(tmp_path, at="q"))["filled"], arrays["filled"])


@pytest.mark.parametrize("scale", ["search", "float"])
@pytest.mark.parametrize("block", ["auto", None])
@pytest.mark.parametrize(
    "options", [{}, {"formats": "e4m3"}, {"formats": CHAIN}, {"min_sqnr": 30.0}, {"bits": 56.0}]
)
async def test_values_beyond_every_format_keep_their_bits(
    tmp_path: Path, options: dict[str, Any], scale: Any, block: Any
) -> None:
    w = values(64, 128, kind="float64")
    beyond = {"vast": w * 1e200, "vaster": w * 1e300, "single": w.copy()}
    beyond["single"][40, 5] = 1e300
    if scale == "float":
        beyond["large"] = w * 1e100
    await tstore.save(tmp_path, {"w": w, **beyond}, 0)
    report = await tstore.quantize(tmp_path, **options, scale=scale, block=block, tag="q")
    rows = {a.path: a for a in report.arrays}
    assert rows.pop("w").format is not None
    for path, row in rows.items():
        assert row.format is None
        assert "2^" in row.reason
        assert np.array_equal((await tstore.restore(tmp_path, at="q"))[path], beyond[path])


async def test_a_save_names_the_array_that_its_format_cannot_represent(tmp_path: Path) -> None:
    tree = {"w": values(64, 128), "vast": values(64, 128, kind="float64") * 1e300}
    with pytest.raises(InvalidArgument, match=r"^vast, chunk \(0, 0\): .*exceeds the range of e4m3"):
        await tstore.save(tmp_path, tree, 0, codecs={"**": "e4m3"})
    await tstore.save(tmp_path, tree, 1, codecs=tstore.MinSqnr(30))
    restored = await tstore.restore(tmp_path)
    assert np.array_equal(restored["vast"], tree["vast"])
    assert not np.array_equal(restored["w"], tree["w"])


async def test_blocks_that_do_not_divide_an_array_are_not_restored_packed(tmp_path: Path) -> None:
    codecs = {"format": "e4m3", "block": 32}
    async with await tstore.open(tmp_path) as store:
        async with store.transaction() as tx:
            array = await tx.create_array("w", shape=(4, 100), dtype="float32", chunks=(4, 64), codecs=codecs)
            await array.write(np.ones((4, 100), "f4"))
        with pytest.raises(InvalidArgument, match=r"w: blocks of 32.* do not divide its length 100"):
            await tstore.restore(store, at=1, packed=True)


async def test_a_report_with_an_unknown_format_is_corrupt(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": values(64, 128)}, 0)
    report = await tstore.quantize(tmp_path, "e4m3")
    document = {"arrays": [report.arrays[0]._replace(format="e99m1")._asdict()], "tag": "", "source": 1}
    async with await tstore.open(tmp_path) as store:
        async with store.transaction(tag="q") as tx:
            await tx.staging.set_root_attributes({}, {"quantization": {**document, "request": ""}})
        with pytest.raises(Corrupt, match="its report"):
            await tstore.quantize_report(store, "q")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_largest_values_of_a_dtype_come_back_finite(tmp_path: Path, kind: str) -> None:
    x = values(64, 128, kind=kind)
    x[0] = -1e150 if kind == "float64" else ml_dtypes.finfo(x.dtype).max
    await tstore.save(tmp_path, {"w": x}, 0)
    for options in ({}, {"formats": {"**": "e5m2"}}, {"bits": 8.5, "coding": "packed"}):
        report = await tstore.quantize(tmp_path, **options, at="step/0", tag=str(options))  # type: ignore[arg-type]
        y = (await tstore.restore(tmp_path, at=report.tag))["w"]
        assert np.isfinite(y.astype("f8")).all()
        assert math.isfinite(report.arrays[0].largest_error)


# ---- defaults


async def test_without_arguments_floats_get_eight_bits(tmp_path: Path) -> None:
    """Integers, vectors and arrays beyond the range count for nothing."""
    tree = {
        "w": values(40, 384),
        "odd": values(40, 50, scale=1e-20),
        "bias": values(384),
        "ids": np.arange(5000),
        "vast": values(64, 128, kind="float64") * 1e200,
        "low": values(64, 128, kind="float16").astype(ml_dtypes.float8_e4m3fn),
    }
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path)
    assert report.tag == "step/0/8bits"
    assert {a.path: a.coding for a in report.encoded} == {"w": "entropy", "odd": "packed"}
    assert 7.8 < 8 * sum(a.bytes_after for a in report.encoded) / sum(a.values for a in report.encoded) <= 8
    assert {a.path: a.reason for a in report.arrays if not a.format} == {
        "bias": "one-dimensional; to encode it, add a rule with its name",
        "ids": "int64 is not encoded",
        "low": "float8_e4m3fn is not encoded",
        "vast": f"values of 2^{exmy.exponents(tree['vast']).highest} are too large",
    }
    restored = await tstore.restore(tmp_path, at=report.tag)
    assert exmy.sqnr(tree["w"], restored["w"]) > 40
    packed = await tstore.quantize(tmp_path, coding="packed", at="step/0", tag="packed")
    assert {(a.coding, a.granularity) for a in packed.encoded} == {
        ("packed", "block of 128"),
        ("packed", "tensor"),
    }


@pytest.mark.parametrize("options", [{"bits": 5.2}, {"min_sqnr": 25.0}])
async def test_data_decides_in_blocks_that_fit_rows_and_chunks(tmp_path: Path, options: dict[str, float]) -> None:
    x = values(200, 256)
    arrays = {
        "w": (x, (200, 256)),
        "cut": (x, (200, 64)),
        "odd": (x[:, :100].copy(), (100, 100)),
        "thirds": (x[:, :96].copy(), (200, 96)),
        "deep": (x.reshape(10, 20, 256), (5, 20, 256)),
    }
    await chunked(tmp_path, arrays)
    report = await tstore.quantize(tmp_path, **options, coding="packed", tag="auto")  # type: ignore[arg-type]
    granularity = {a.path: a.granularity for a in report.arrays}
    blocks = {"w": 128, "cut": 64, "odd": None, "thirds": 32, "deep": 128}
    assert granularity == {path: f"block of {n}" if n else "tensor" for path, n in blocks.items()}
    whole = await tstore.quantize(tmp_path, **options, block=None, at="step/0", tag="whole")  # type: ignore[arg-type]
    assert {a.granularity for a in whole.encoded} == {"tensor"}
    packed = await tstore.restore(tmp_path, at="auto", packed=True)
    for row in report.encoded:
        assert row.format is not None
        same_codes(packed[row.path], exmy.quantize(arrays[row.path][0], row.format, block=blocks[row.path]))


@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("**", []),
        ("*", []),
        ("*/*", []),
        ("layers/**", []),
        ("layers/*", []),
        ("**/????", []),
        ("layers/bias", ["layers/bias"]),
        ("**/bias", ["bias", "layers/bias"]),
        ("**/b*", ["bias", "layers/bias"]),
        ("*/bi??", ["layers/bias"]),
    ],
)
async def test_vectors_keep_their_bits_unless_a_rule_names_them(
    tmp_path: Path, pattern: str, named: list[str]
) -> None:
    tree = {"bias": values(300), "layers": {"bias": values(300), "w": values(30, 40), "bw": values(30, 40)}}
    await tstore.save(tmp_path, tree, 0)
    report = await tstore.quantize(tmp_path, {pattern: "e4m3"})  # type: ignore[arg-type]
    assert {a.path for a in report.encoded if "bias" in a.path} == set(named)
    reasons = {a.path: a.reason for a in report.arrays}
    if pattern == "**":
        assert (
            reasons["bias"] == reasons["layers/bias"] == "one-dimensional; to encode it, add a rule with its name"
        )
        assert reasons["layers/w"] == ""


async def test_data_leaves_vectors_their_bits(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": values(100, 128), "b": values(100)}, 0)
    for options in ({"bits": 9.0}, {"min_sqnr": 20.0}, {}):
        report = await tstore.quantize(tmp_path, **options, tag=f"t{options}", at="step/0")  # type: ignore[arg-type]
        b, w = report.arrays
        assert (b.format, b.reason) == (None, "one-dimensional; to encode it, add a rule with its name")
        assert w.format is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "bits=8, error=relative, coding=entropy"),
        ({"formats": "e4m3"}, "e4m3"),
        ({"formats": {"w": None, "**": {"format": "e3m2", "axis": 0}}}, "w: kept, **: e3m2 (axis=0)"),
        ({"formats": CHAIN, "block": 64}, "exmy (format=e2m1) + zstd (level=1); block=64"),
        ({"bits": 9}, "bits=9, error=relative, coding=entropy"),
        ({"bits": 9, "coding": "packed"}, "bits=9, error=relative, coding=packed; block=auto"),
        ({"formats": {"w": {"bits": 3}}}, "w: bits=3, error=relative, coding=entropy"),
        (
            {"bits": 9.5, "error": "absolute", "axis": -1, "scale": "max"},
            "bits=9.5, error=absolute, coding=packed; axis=-1, scale=max",
        ),
        ({"min_sqnr": 20, "block": None}, "min_sqnr=20, coding=packed"),
    ],
)
async def test_the_message_summarises_the_options(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    await tstore.save(tmp_path, {"w": values(100, 128)}, 0)
    report = await tstore.quantize(tmp_path, **options, tag="q")
    [commit, _] = [c async for c in (await tstore.open(tmp_path)).history()]
    assert commit.message == f"quantized from version 1: {said}"
    assert report.request == (await tstore.quantize_report(tmp_path, "q")).request == said


async def test_a_long_request_is_cut(tmp_path: Path) -> None:
    tree = {f"w{i:03}": values(10, 10) for i in range(100)}
    await tstore.save(tmp_path, tree, 0)
    await tstore.quantize(tmp_path, {f"w{i:03}": "e4m3" for i in range(100)}, tag="q")
    [commit, _] = [c async for c in (await tstore.open(tmp_path)).history()]
    assert commit.message.startswith("quantized from version 1: w000: e4m3, w001: e4m3")
    assert commit.message.endswith("…")
    assert len(commit.message) < 400


async def test_a_plot_has_paths_and_tags_with_dollars_as_they_are(tmp_path: Path) -> None:
    """Matplotlib would parse what is between two of them as mathematics."""
    await tstore.save(tmp_path / "store", {r"w$\w$": values(64, 64)}, 0)
    report = await tstore.quantize(tmp_path / "store", "e4m3", tag=r"q$\q$")
    plot_report(report, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert r"<!-- q$\q$: 8.0" in drawn
    assert r"w$\w$" in drawn


async def test_a_default_tag_names_a_few_formats(tmp_path: Path) -> None:
    names = [f"e{x}m{y}" for x in range(1, 9) for y in range(5)]
    await tstore.save(tmp_path, {f"w{i:02}": values(10, 10) for i in range(len(names))}, 0)
    report = await tstore.quantize(tmp_path, {f"w{i:02}": name for i, name in enumerate(names)})
    assert report.tag == "step/0/e1m0-e1m1-e1m2-and-37-more"


async def test_only_a_few_unmatched_patterns_are_compared_with_all_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    similar = tstore.quantization.policy._similar_paths

    def counted(pattern: str, paths: list[str]) -> list[str]:
        calls.append(pattern)
        return similar(pattern, paths)

    monkeypatch.setattr("tstore.quantization.policy._similar_paths", counted)
    await tstore.save(tmp_path, {"wide": values(64, 50)}, 0)
    with pytest.raises(InvalidArgument, match="100 of 100 patterns match no array") as refused:
        await tstore.quantize(tmp_path, {f"wid{i}": "e4m3" for i in range(100)})
    assert "'wid0'; similar paths: wide" in str(refused.value)
    assert "'wid19'" in str(refused.value)
    assert len(calls) == 5


async def test_a_report_prints_as_one_line(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {f"w{i}": values(50, 40) for i in range(30)}, 0)
    report = await tstore.quantize(tmp_path, "e4m3", tag="q")
    for text in (repr(report), str(report), f"{report}", repr(await tstore.quantize_report(tmp_path, "q"))):
        assert len(text) < 200
        assert "\n" not in text
        assert "30 of 30 arrays encoded" in text
        assert "8.03 bits/value" in text
    assert len(repr(report.arrays[0])) < 200


# ---- save with a target


@pytest.mark.parametrize("target", [tstore.MinSqnr(30), tstore.Bits(9.0)])
async def test_save_lets_the_data_decide(tmp_path: Path, target: tstore.MinSqnr | tstore.Bits) -> None:
    tree = {
        "w": values(100, 100),
        "even": RNG.uniform(-1, 1, (50, 100)).astype("f4"),
        "ids": np.arange(10),
        "**": values(99),
    }
    await tstore.save(tmp_path, tree, 0, codecs=target)
    restored = await tstore.restore(tmp_path)
    for path in ("w", "even", "**"):
        assert exmy.sqnr(tree[path], restored[path]) > 25  # type: ignore[arg-type]
    assert exmy.sqnr(tree["w"], restored["w"]) < 70
    assert np.array_equal(restored["ids"], tree["ids"])
    with pytest.raises(InvalidArgument, match="has only its own part"):
        await tstore.save(tmp_path, tree, 1, host=0, hosts=2, attempt="a", codecs=target)


# ---- the report


async def test_the_report_is_kept_with_the_commit(tmp_path: Path) -> None:
    tree = {f"w{i}": values(50, 20, scale=1 / (i + 1)) for i in range(12)}
    await tstore.save(tmp_path, {**tree, "ids": np.arange(70)}, 0)
    progress: list[tuple[int, int]] = []
    report = await tstore.quantize(tmp_path, bits=11.0, tag="q", progress=lambda *done: progress.append(done))
    assert progress[-1][0] == progress[-1][1]
    again = await tstore.quantize_report(tmp_path, "q")
    assert again._replace(arrays=[]) == report._replace(arrays=[])
    for mine, kept in zip(report.arrays, again.arrays, strict=True):
        assert kept._replace(exponents=None) == mine._replace(exponents=None)
    assert sum(a.exponents is not None for a in again.arrays) == 8
    lowest, counts = report.worst[0].exponents or (0, [])
    assert sum(counts) == 1000
    assert lowest + len(counts) - 1 <= 2
    document = json.loads(json.dumps(report.document(), allow_nan=False))
    assert document["total"]["bits_per_value"] == report.bits_per_value
    assert document["arrays"][0]["sqnr_db"] is None  # sorted by path
    assert report.bytes_after < report.bytes_before
    assert 0 < report.largest_error < 1
    [commit, _] = [c async for c in (await tstore.open(tmp_path)).history()]
    assert 0 < commit.bytes_added < report.bytes_after
    with pytest.raises(NotFound, match=r"at version 1 has no report, since it is not a quantized copy"):
        await tstore.quantize_report(tmp_path, "step/0")


# ---- executors


def executors() -> list[Any]:
    return [
        pytest.param(lambda: ThreadPoolExecutor(2), id="threads"),
        pytest.param(lambda: ProcessPoolExecutor(2, mp_context=get_context("spawn")), id="processes"),
    ]


@pytest.mark.parametrize("make", executors())
async def test_an_executor_does_the_same_work(tmp_path: Path, make: Any, thresholds: Thresholds) -> None:
    thresholds(_MIN_TASK_BYTES=30_000)
    tree = {f"w{i}": values(60, 50 + i, scale=1 / (i + 1)) for i in range(7)}
    await tstore.save(tmp_path, tree, 0)
    with make() as executor:
        for options in ({"formats": "e3m2"}, {"bits": 5.0}, {"min_sqnr": 25.0, "axis": 0}):
            alone = await tstore.quantize(tmp_path, **options, tag=f"a{options}")  # type: ignore[arg-type]
            progress: list[tuple[int, int]] = []
            report = await tstore.quantize(
                tmp_path,
                **options,  # type: ignore[arg-type]
                tag=f"e{options}",
                executor=executor,
                progress=lambda *done: progress.append(done),  # noqa: B023
            )
            assert report.arrays == alone.arrays
            assert progress[-1][0] == progress[-1][1]
            mine, theirs = [await tstore.restore(tmp_path, at=r.version, packed=True) for r in (alone, report)]
            for path in tree:
                assert mine[path].to_bytes() == theirs[path].to_bytes()
    store = await tstore.open(tmp_path)
    assert (await store.verify()).ok
    history = [c.bytes_added async for c in store.history()]
    assert history[0] == history[1] > 0


class Failing(ThreadPoolExecutor):
    """Run all calls but the last one, which breaks."""

    def submit(self, call: Any, /, *args: Any, **named: Any) -> Any:
        def broken() -> None:
            raise OSError("the worker is gone")

        paths = args[1]
        return super().submit(broken) if "w3" in paths else super().submit(call, *args, **named)


async def test_a_failing_worker_leaves_nothing_behind(tmp_path: Path, thresholds: Thresholds) -> None:
    thresholds(_MIN_TASK_BYTES=1)
    await tstore.save(tmp_path, {f"w{i}": values(60, 50) for i in range(4)}, 0)
    with Failing(2) as executor, pytest.raises(OSError, match="the worker is gone"):
        await tstore.quantize(tmp_path, "e4m3", executor=executor)
    assert await (await tstore.open(tmp_path)).tags() == {"step/0": 1}
    assert (await tstore.quantize(tmp_path, "e4m3")).version == 2


async def test_a_broken_executor_is_named(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": values(60, 50)}, 0)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        with pytest.raises(BrokenProcessPool):
            executor.submit(os._exit, 1).result()
        with pytest.raises(Unavailable, match="the executor broke"):
            await tstore.quantize(tmp_path, "e4m3", executor=executor)
    assert await (await tstore.open(tmp_path)).tags() == {"step/0": 1}


async def test_an_executor_that_was_shut_down_is_refused(tmp_path: Path) -> None:
    await tstore.save(tmp_path, {"w": values(64, 64)}, 0)
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(InvalidArgument, match="takes no tasks: cannot schedule new futures after shutdown"):
        await tstore.quantize(tmp_path, "e4m3", executor=executor)


async def test_a_store_in_memory_is_not_reached_by_other_processes() -> None:
    await tstore.save("memory://quantize-executor", {"w": values(60, 50)}, 0)
    with ThreadPoolExecutor(1) as threads:
        await tstore.quantize("memory://quantize-executor", "e4m3", executor=threads)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        with pytest.raises(tstore.errors.TStoreError, match="memory://quantize-executor"):
            await tstore.quantize("memory://quantize-executor", "e3m2", at=1, executor=processes)


async def test_a_tree_that_can_be_saved_can_be_quantized(tmp_path: Path) -> None:
    tree: Any = {"w": values(64, 64)}
    for _ in range(150):
        tree = {"a": tree}
    await tstore.save(tmp_path, tree, 1, attributes={"mine": [1]})
    await tstore.quantize(tmp_path, "e4m3", tag="q")
    back = await tstore.restore(tmp_path, at="q")
    while "w" not in back:
        back = back["a"]
    assert back["w"].shape == (64, 64)
    assert (await (await tstore.open(tmp_path)).snapshot("q")).attributes()["mine"] == [1]
