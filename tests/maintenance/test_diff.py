"""`diff` of two versions: arrays, chunks by their references, and the distance of floats."""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path
from typing import Any

import exmy
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
import tstore.sync as blocking
from tstore.cli import main
from tstore.core.format.layout import ROOT_EVERY, is_pack, root_key
from tstore.core.storage.memory import MemoryStorage
from tstore.errors import InvalidArgument, NotFound, SnapshotExpired
from tstore.lab.conformance.faults import open_faulty

VALUES = np.random.default_rng(0).standard_normal((8, 8)).astype("f4")


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


async def first(url: str, **options: Any) -> tstore.Store:
    """Commit version 1: "w" (8×8 float32 in chunks of 4×4), "ids" (int32), "old", and the group "g"."""
    store = await tstore.open(url)
    async with store.transaction(tag="one") as tx:
        await (await tx.create_array("w", (8, 8), "float32", (4, 4), **options)).write(VALUES)
        await (await tx.create_array("ids", (10,), "int32", (2,))).write(np.arange(10))
        await (await tx.create_array("old", (3,), "int8", (2,))).write(1)
        await tx.create_group("g", {"a": 1})
    return store


async def only(store: tstore.Store) -> tstore.ArrayDiff:
    [row] = (await store.diff(1)).arrays
    return row


async def test_added_removed_and_changed_arrays(url: str) -> None:
    store = await first(url)
    async with store.transaction(tag="two") as tx:
        await tx.delete("old")
        await (await tx.create_array("new", (5,), "float64", (2,))).write(1)
        await (await tx.array("ids"))[3:5].write(0)
        await tx.create_group("g", {"a": 2})
        await tx.create_group("h")
    diff = await store.diff("one", "two")
    assert (diff.before, diff.after, diff.groups) == (1, 2, ("g", "h"))
    assert [(a.path, a.change, a.chunks, a.fields, a.distance) for a in diff.arrays] == [
        ("ids", "changed", 2, (), None),
        ("new", "added", 3, (), None),
        ("old", "removed", 2, (), None),
    ]
    ids, new, old = diff.arrays
    assert new.before is None
    assert new.after is not None
    assert new.after.shape == (5,)
    assert old.after is None
    assert old.before is not None
    assert old.before.dtype == "int8"
    assert ids.before is not None
    assert ids.before.shape == (10,)
    turned = await store.diff(2, 1)
    assert [(a.path, a.change) for a in turned.arrays] == [
        ("ids", "changed"),
        ("new", "removed"),
        ("old", "added"),
    ]
    assert (await store.diff(1, 1)).arrays == (await store.diff("two")).arrays == ()


async def test_the_distance_of_floats_is_measured_on_the_differing_chunks(url: str) -> None:
    store = await first(url)
    later = VALUES.copy()
    later[0, 0] += 0.5
    later[5, 5:7] -= 2
    async with store.transaction() as tx:
        await (await tx.array("w"))[...].write(later)
    row = await only(store)
    assert (row.path, row.chunks) == ("w", 2)
    assert row.distance is not None
    a, b = (np.stack([v[:4, :4], v[4:, 4:]]) for v in (VALUES, later))
    assert row.distance.count == 32
    assert row.distance.largest_error == np.abs(a.astype("f8") - b).max()
    assert row.distance.sqnr == pytest.approx(exmy.sqnr(a, b))


async def test_only_differing_chunks_are_read(url: str) -> None:
    await first(url)
    store = await tstore.open(url)
    big = np.zeros((64, 1 << 14), "f4")
    async with store.transaction() as tx:
        await (await tx.create_array("big", big.shape, "float32", (1, 1 << 14))).write(big)
        await (await tx.create_array("count", (1 << 16,), "int64", (1 << 14,))).write(0)
    async with store.transaction() as tx:
        await (await tx.array("big"))[7].write(1)
        await (await tx.array("count")).write(1)
    faulty, faults = await open_faulty(url, "r")
    diff = await faulty.diff(2, 3)
    assert [(a.path, a.chunks) for a in diff.arrays] == [("big", 1), ("count", 4)]
    assert 2 << 16 <= faults.bytes_read < (2 << 16) + (1 << 14)  # the rest are records and manifests


async def test_the_same_values_written_again_are_no_difference(url: str) -> None:
    store = await first(url)
    async with store.transaction() as tx:
        await (await tx.array("w")).write(VALUES)
    assert (await store.diff(1)).arrays == ()


async def test_a_quantized_copy_differs_by_its_noise(url: str) -> None:
    store = await first(url)
    report = await tstore.quantize(store, formats="e4m3", at=1)
    assert (await store.diff(1)).arrays == ()
    row = {a.path: a for a in (await store.diff(1, report.tag)).arrays}["w"]
    assert "codecs" in row.fields
    assert row.after is not None
    assert row.after.codec.startswith("e4m3")
    [measured] = [a for a in report.arrays if a.path == "w"]
    assert row.distance is not None
    assert row.distance.sqnr == pytest.approx(measured.sqnr)
    assert row.distance.largest_error == measured.largest_error


async def test_a_changed_shape_compares_chunks_by_position(url: str) -> None:
    store = await first(url)
    async with store.transaction() as tx:
        await (await tx.array("w")).resize((8, 12))
    row = await only(store)
    assert (row.fields, row.chunks, row.distance) == (("shape",), 0, None)
    async with store.transaction() as tx:
        await (await tx.array("w"))[:4, 8:].write(0)
        await (await tx.array("w")).resize((4, 12))
    row = await only(store)
    assert (row.fields, row.chunks) == (("shape",), 3)  # two are gone, one is new


@pytest.mark.parametrize(("old", "new"), [((0, 3), (0, 7)), ((0, 3), (5, 0)), ((4, 0), (4, 3)), ((4, 3), (0, 9))])
async def test_arrays_without_elements_differ_in_their_shape(
    url: str, old: tuple[int, int], new: tuple[int, int]
) -> None:
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("w", old, "i4", (2, 3), sparse=True)).write(1)
    async with store.transaction() as tx:
        await (await tx.array("w")).resize(new)
    for before, after in ((1, 2), (2, 1)):
        [w] = (await store.diff(before, after)).arrays
        assert (w.fields, w.chunks) == (("shape",), 2 if 0 not in old else 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [((1 << 40, 1 << 10), (1 << 10, 1 << 40)), ((1 << 61, 1), (1, 1 << 61)), ((8, 1), (1 << 30, 9))],
)
async def test_grids_may_have_more_cells_together_than_there_are_numbers(
    url: str, old: tuple[int, int], new: tuple[int, int]
) -> None:
    store = await tstore.open(url)
    last = old[0] - 1, old[1] - 1
    async with store.transaction() as tx:
        w = await tx.create_array("w", old, "i1", (1, 1), sparse=True)
        await w[0, 0].write(1)
        await w[last].write(2)
    async with store.transaction() as tx:
        w = await tx.array("w")
        await w.resize(new)
        await w[new[0] - 1, new[1] - 1].write(2)
    kept = all(at < length for at, length in zip(last, new, strict=True))
    for before, after in ((1, 2), (2, 1)):
        [row] = (await store.diff(before, after)).arrays
        assert (row.fields, row.chunks) == (("shape",), 1 if kept else 2)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
async def test_another_dtype_and_grid_are_compared_by_value(url: str, dtype: str) -> None:
    store = await first(url)
    later = VALUES.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    async with store.transaction() as tx:
        await tx.delete("w")
        await (await tx.create_array("w", (8, 8), dtype, (3, 8))).write(later)
    row = await only(store)
    assert (row.fields, row.chunks) == (("dtype", "chunks"), 3)
    assert row.distance is not None
    assert row.distance.sqnr == pytest.approx(exmy.sqnr(VALUES, later.astype("f8")))
    assert row.distance.count == 64


@pytest.mark.parametrize("sparse", [False, True])
async def test_unwritten_chunks_are_compared_by_their_fill_value(url: str, sparse: bool) -> None:
    """In a sparse array they have the fill value; otherwise they are not compared."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        w = await tx.create_array("w", (8,), "float32", (4,), fill_value=2, sparse=sparse)
        await w[:4].write(1)
    async with store.transaction() as tx:
        await (await tx.array("w")).write(5)
    row = await only(store)
    assert row.chunks == 2
    assert row.distance is not None
    assert (row.distance.count, row.distance.noise) == ((8, 4 * 16 + 4 * 9) if sparse else (4, 4 * 16))


async def test_changed_attributes_are_listed(url: str) -> None:
    store = await first(url, fill_value=math.nan)
    async with store.transaction() as tx:
        await tx.delete("w")
        w = await tx.create_array("w", (8, 8), "float32", (4, 4), fill_value=math.nan, attributes={"unit": "m"})
        await w.write(VALUES)
    row = await only(store)
    assert (row.fields, row.chunks, row.distance) == (("attributes",), 0, None)


DTYPES = ["f4", "i4", "?", "U3", "M8[s]", "c8", ml_dtypes.bfloat16, ml_dtypes.int4, "S4", "V5", str]
STRUCTS = [[("a", "f4")], [("a", "f4"), ("b", "i4")], [("b", "f4")]]


async def test_arrays_of_any_two_dtypes_are_compared(url: str) -> None:
    store = await tstore.open(url)
    versions = []
    for dtype in (*DTYPES, *STRUCTS):
        async with store.transaction() as tx:
            if versions:
                await tx.delete("a")
            a = await tx.create_array("a", (3,), dtype)
            await a.write(np.zeros(3, a.dtype))
        versions.append(tx.version)
    for before in versions:
        for after in versions:
            diff = await store.diff(before, after)
            assert [a.fields[0] for a in diff.arrays] == (["dtype"] if before != after else []), diff.table()


async def test_values_that_stay_nan_or_infinite_hide_no_change(url: str) -> None:
    """A NaN that becomes a number, or an infinity of the other sign, is no finite distance."""
    store, values = await tstore.open(url), np.ones(10, "f4")
    values[:3] = np.nan, np.inf, -np.inf
    for change in (0, 1, 2):
        async with store.transaction() as tx:
            if change:
                await (await tx.array("a"))[change * 4 - 4 : change * 4].write(
                    values[change * 4 - 4 : change * 4] * -2
                )
            else:
                await (await tx.create_array("a", (10,), "f4")).write(values)
    [first, second] = [(await store.diff(*pair)).arrays[0] for pair in ((1, 2), (2, 3))]
    assert first.distance is not None
    assert second.distance is not None
    assert not math.isfinite(first.relative_norm)
    assert second.relative_norm == pytest.approx(math.sqrt(4 * 9 / 10))
    assert second.distance.largest_error == 3


async def test_versions_that_were_read_through_a_root(url: str) -> None:
    store = await first(url)
    for i in range(ROOT_EVERY):
        async with store.transaction(durability="none") as tx:
            await (await tx.array("ids"))[i % 10].write(100 + i)
    cold = await tstore.open(url, "r")
    assert await cold.log.storage.size(root_key(ROOT_EVERY))
    assert [(a.path, a.chunks) for a in (await cold.diff(1)).arrays] == [("ids", 5)]


async def test_an_unknown_version_is_named(url: str) -> None:
    with pytest.raises(NotFound, match="'three'"):
        await (await first(url)).diff("one", "three")


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(-3, 3)), max_size=6),
    st.sampled_from([(9, 9), (2, 5), (3, 3)]),
)
def test_chunks_and_distances_are_those_of_the_arrays(writes: list[tuple[int, int, int]], chunks: Any) -> None:
    store = blocking.open(f"memory://{uuid.uuid4()}")
    a = np.arange(81, dtype="f4").reshape(9, 9)
    with store.transaction() as tx:
        tx.create_array("w", a.shape, "float32", chunks).write(a)
    b = a.copy()
    with store.transaction() as tx:
        w = tx.array("w")
        for i, j, value in writes:
            w[i, j].write(value)
            b[i, j] = value
    rows = store.diff(1, 2).arrays
    differing = {(i // chunks[0], j // chunks[1]) for i, j in np.argwhere(a != b).tolist()}
    assert sum(d.chunks for d in rows) == len(differing)
    if differing:
        [w_diff] = rows
        assert w_diff.distance is not None
        assert w_diff.distance.noise == ((a.astype("f8") - b) ** 2).sum()


async def test_a_budget_reads_small_arrays_whole_and_samples_of_others(url: str) -> None:
    store = await tstore.open(url)
    generator = np.random.default_rng(0)
    large, small = generator.standard_normal((64, 4096)).astype("f4"), generator.standard_normal(50).astype("f4")
    async with store.transaction() as tx:
        await (await tx.create_array("large", large.shape, "float32", (1, 4096))).write(large)
        await (await tx.create_array("one", large.shape, "float32")).write(large)
        await (await tx.create_array("small", small.shape, "float32")).write(small)
        await (await tx.create_array("same", small.shape, "float32")).write(small)
        await (await tx.create_array("medium", (1 << 13,), "float32")).write(large.ravel()[: 1 << 13])
    async with store.transaction() as tx:
        await (await tx.array("medium")).write(large.ravel()[: 1 << 13] * 1.5)
        await (await tx.array("large")).write(large * 1.01)
        await (await tx.array("one")).write(large * 1.1)
        await (await tx.array("small")).write(small * 2)
    faulty, faults = await open_faulty(url, "r")
    diff = await faulty.diff(1, 2, budget=1 << 18)
    read = faults.bytes_read
    assert read < large.nbytes * 3
    rows = {a.path: a for a in diff.arrays}
    assert rows.keys() == {"large", "one", "small", "medium"}
    norms = [rows[path].relative_norm for path in ("large", "one", "small")]
    assert norms == pytest.approx([0.01, 0.1, 1], rel=0.01)
    counts = {path: a.distance.count for path, a in rows.items() if a.distance is not None}
    assert counts["small"] == 50
    assert counts["medium"] == 1 << 13  # less than a third of the rest of the budget
    for path in ("large", "one"):  # parts of chunks
        assert 0.9 * 8192 < counts[path] < 1.3 * 8192
    assert sum(counts.values()) * 8 <= 1 << 18
    values = {"large": 1 << 18, "one": 1 << 18, "small": 50, "medium": 1 << 13}
    assert {path: a.values for path, a in rows.items()} == values
    assert [a.path for a in diff.by_change] == ["small", "medium", "one", "large"]
    assert diff.table().splitlines()[1].split()[:2] == ["small", "changed"]
    exact = {a.path: a.distance for a in (await store.diff(1, 2)).arrays}
    assert exact == {a.path: a.distance for a in (await store.diff(1, 2, budget=1 << 30)).arrays}
    for budget in (0, -1, True, "1"):
        with pytest.raises(InvalidArgument, match="budget="):
            await store.diff(1, 2, budget=budget)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [128, 16])  # rows of a chunk
async def test_a_sample_smaller_than_a_chunk_is_spread_over_the_array(url: str, rows: int) -> None:
    store = await tstore.open(url)
    before = np.random.default_rng(0).standard_normal((128, 1 << 14)).astype("f4")
    noise = np.linspace(0, 1, 128, dtype="f4")[:, None] * before  # the first rows change least
    async with store.transaction() as tx:
        await (await tx.create_array("w", before.shape, "f4", (rows, 1 << 14))).write(before)
    async with store.transaction() as tx:
        await (await tx.array("w")).write(before + noise)
    [exact] = (await store.diff(1, 2)).arrays
    [sample] = (await store.diff(1, 2, budget=1 << 19)).arrays
    assert sample.distance is not None
    assert sample.distance.count < before.size / 16
    assert sample.relative_norm == pytest.approx(exact.relative_norm, rel=0.25)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = blocking.open(tmp_path / "s")
    with store.transaction(tag="one") as tx:
        tx.create_array("w", (4, 4), "float32", (2, 4)).write(1)
        tx.create_array("same", (4,), "float32", (2,)).write(np.nan)
        tx.create_array("old", (4,), "float32", (2,)).write(1)
    with store.transaction(tag="two") as tx:
        tx.array("w")[0].write(3)
        tx.array("w").resize((4, 4))
        tx.delete("old")
        tx.create_array("new", (4,), "int8", (2,)).write(1)
        tx.array("same")[0].write(2)
    assert main(["diff", str(tmp_path / "s"), "one", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["before"], report["after"]) == (1, 2)
    by_path = {a["path"]: a for a in report["arrays"]}
    assert by_path["w"]["chunks"] == 1
    assert (by_path["w"]["largest"], by_path["w"]["values_compared"]) == (2.0, 8)
    assert by_path["w"]["sqnr_db"] == pytest.approx(10 * math.log10(8 / 16))
    assert (by_path["same"]["largest"], by_path["same"]["sqnr_db"]) == (None, None)
    assert main(["diff", str(tmp_path / "s"), "one", "two"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "version 1 → version 2: 1 array added, 1 removed, 2 changed"
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:-1]}
    assert rows["w"] == ["values", "1", "1.41", "2", "-3.0", "dB"]
    assert rows["same"] == ["values", "1", "not", "finite"]
    assert rows["new"] == ["added:", "int8", "4,", "4", "B", "2"]
    assert main(["diff", str(tmp_path / "s"), "one", "nine"]) == 1
    assert "no tag 'nine'" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "s"), "one"]) == 2


async def test_a_version_that_expires_while_its_values_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4()}"
    for step in range(3):
        await tstore.save(url, {"w": np.arange(4000.0) + step}, step)
    reader = MemoryStorage.reader

    def collected(self: MemoryStorage, key: str) -> Any:
        if is_pack(key):
            monkeypatch.undo()
            blocking.open(url).collect(keep=tstore.Keep(last=1))
        return reader(self, key)

    monkeypatch.setattr(MemoryStorage, "reader", collected)
    with pytest.raises(SnapshotExpired):
        await (await tstore.open(url)).diff(1, 3)
