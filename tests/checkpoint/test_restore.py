"""Restoring under other names, in other dtypes, into other trees and shards, and the plan of that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
import tstore.sync as blocking
from tstore.checkpoint.leaves import Destination
from tstore.core.data import batches, reader
from tstore.core.format.patterns import compile_renames
from tstore.errors import InvalidArgument, NotFound, StructureMismatch
from tstore.sharding import Mesh, P

TREE = {
    "net": {"0": {"w": np.arange(6, dtype="f4").reshape(2, 3), "b": np.ones(3, ml_dtypes.bfloat16)}},
    "step": np.array(7),
    "lr": 0.5,
}


@pytest.fixture
async def url(request: pytest.FixtureRequest) -> str:
    url = f"memory://{request.node.name}"
    await tstore.save(url, TREE, 1)
    return url


# ---- names


async def test_a_target_with_other_names_is_restored_by_rename(url: str) -> None:
    target = {
        "model": {"layer0": {"w": np.zeros((2, 3), "f4"), "b": np.zeros(3, ml_dtypes.bfloat16)}},
        "count": np.array(0),
        "lr": 0.0,
    }
    rename = {"net/0/**": "model/layer0/**", "step": "count"}
    restored = await tstore.restore(url, target=target, rename=rename)
    np.testing.assert_array_equal(restored["model"]["layer0"]["w"], TREE["net"]["0"]["w"])
    assert restored["count"] == 7
    assert restored["lr"] == 0.5


async def test_scalars_stay_when_arrays_are_added_or_deleted_later(url: str) -> None:
    await tstore.save(url, {"w": np.ones(2), "opt": {"lr": 0.5, "betas": (0.9, 0.99)}, "epoch": 3}, 0)
    async with await tstore.open(url) as store:
        async with store.transaction() as tx:
            await (await tx.create_array("ema", (2,), "f8")).write(7)
            await tx.delete("w")
        restored = await tstore.restore(store, at=tx.version)
        assert restored.pop("ema").tolist() == [7, 7]
        assert restored == {"opt": {"lr": 0.5, "betas": {"0": 0.9, "1": 0.99}}, "epoch": 3}
        target = {"ema": np.zeros(2), "opt": {"lr": 0.0, "betas": (0.0, 0.0)}, "epoch": 0}
        into = await tstore.restore(store, at=tx.version, target=target)
        assert (into["opt"], into["epoch"]) == ({"lr": 0.5, "betas": (0.9, 0.99)}, 3)
        async with store.transaction() as tx:  # arrays in place of a scalar, and below one
            for path in ("epoch", "opt/lr/x"):
                await (await tx.create_array(path, (1,), "f8")).write(1)
        restored = await tstore.restore(store, at=tx.version)
        assert restored["epoch"].tolist() == restored["opt"]["lr"]["x"].tolist() == [1]
        assert restored["opt"]["betas"] == {"0": 0.9, "1": 0.99}


async def test_scalars_and_structure_stay_when_the_root_s_attributes_are_set(url: str) -> None:
    tree = {"w": [np.ones(2)], "epoch": 3, "none": None}
    await tstore.save(url, tree, 9)
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await tx.create_group("", {"note": "first"})
        await tx.create_group("", {"note": "better"})
    assert (await store.snapshot(tx.version)).attributes()["note"] == "better"
    restored = await tstore.restore(url, at=tx.version)
    assert (restored["w"][0].tolist(), restored["epoch"], restored["none"]) == ([1, 1], 3, None)


async def test_scalars_of_a_deleted_group_are_deleted(url: str) -> None:
    """Nothing else could remove them: a transaction deletes arrays and groups of arrays."""
    tree = {"model": {"w": np.ones(3), "depth": 2}, "optimizer": {"m": {"w": np.ones(3)}, "lr": 0.1}, "epoch": 3}
    await tstore.save(url, tree, 9)
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await tx.delete("optimizer")
    target = {"model": {"w": np.zeros(3), "depth": 0}, "epoch": 0}
    restored = await tstore.restore(url, at=tx.version, target=target)
    assert (restored["model"]["depth"], restored["epoch"]) == (2, 3)
    assert "optimizer" not in await tstore.restore(url, at=tx.version)


async def test_without_a_target_renamed_arrays_are_nested_dicts(url: str) -> None:
    restored = await tstore.restore(url, rename={"net/*/*": "model/block_*/*"})
    assert list(restored) == ["model", "step", "lr"]
    assert set(restored["model"]["block_0"]) == {"w", "b"}


async def test_only_and_dtype_refer_to_new_names(url: str) -> None:
    restored = await tstore.restore(
        url, rename={"net/**": "model/**"}, only="model/**", dtype={"model/*/b": "float64"}
    )
    assert restored["model"]["0"]["b"].dtype == "f8"
    assert restored["model"]["0"]["w"].dtype == "f4"
    assert "step" not in restored


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"net/0/*": "same"}, "must have the wildcards of"),
        ({"net/0/w": "x", "net/0/b": "x"}, "'net/0/w' and 'net/0/b' would both be restored as 'x'"),
        ({"lr": "step"}, "'step' and 'lr' would both be restored as 'step'"),
        ({"step": "net"}, "'net/0/w' would be restored as 'net/0/w', below 'step' as 'net'"),
        ({"lr": "net/0/w/x"}, "'lr' would be restored as 'net/0/w/x', below 'net/0/w' as 'net/0/w'"),
        ("net", "expected new paths by stored path"),
        ({"net": 1}, "expected new paths by stored path"),
    ],
)
async def test_invalid_renames_are_refused(url: str, rename: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await tstore.restore(url, rename=rename)


@given(st.lists(st.text("ab/*", min_size=1, max_size=6), min_size=1, max_size=3), st.text("ab/", max_size=8))
def test_a_rename_to_the_same_pattern_changes_nothing(globs: list[str], path: str) -> None:
    assert compile_renames({glob: glob for glob in globs})(path) == path


async def test_a_tree_moves_below_a_name_and_back(url: str) -> None:
    below = await tstore.restore(url, rename={"**": "model/**"})
    assert list(below) == ["model"]
    assert below["model"].keys() == TREE.keys()
    above = await tstore.restore(url, rename={"net/**": "**"}, only="0/**")
    np.testing.assert_array_equal(above["0"]["w"], TREE["net"]["0"]["w"])
    assert compile_renames({"net/**": "**"})("net") == "net"  # no path is empty


# ---- dtypes


async def test_floats_are_cast_when_asked_and_integers_are_not(url: str) -> None:
    restored = await tstore.restore(url, dtype="float16")
    assert restored["net"]["0"]["w"].dtype == "f2"
    assert restored["net"]["0"]["b"].dtype == "f2"
    assert restored["step"].dtype == TREE["step"].dtype
    np.testing.assert_array_equal(restored["net"]["0"]["w"], TREE["net"]["0"]["w"].astype("f2"))


async def test_a_target_of_another_float_dtype_needs_dtype(url: str) -> None:
    target: Mapping[str, Any] = {"net": {"0": {"w": np.zeros((2, 3), "f4"), "b": np.zeros(3, "f4")}}}
    with pytest.raises(StructureMismatch, match=r"net/0/b: stored bfloat16\[3\], target float32\[3\]"):
        await tstore.restore(url, target=target, only="net/**")
    for dtype in ("target", "float32", {"**/b": np.float32}):
        restored = await tstore.restore(url, target=target, only="net/**", dtype=dtype)
        assert restored["net"]["0"]["b"].dtype == "f4"
        assert restored["net"]["0"]["b"].tolist() == [1, 1, 1]
    with pytest.raises(StructureMismatch, match=r"stored bfloat16\[3\] as float64, target float32"):
        await tstore.restore(url, target=target, only="net/**", dtype="float64")


@pytest.mark.parametrize("dtype", ["int8", {"**": "complex64"}, "unknown", 3.5, {"**": None}])
async def test_a_cast_to_other_than_floats_is_refused(url: str, dtype: Any) -> None:
    with pytest.raises(InvalidArgument, match="dtype"):
        await tstore.restore(url, dtype=dtype)


async def test_floats_are_not_cast_to_the_integers_of_a_target(url: str) -> None:
    target = {"net": {"0": {"w": np.zeros((2, 3), ml_dtypes.int4)}}}
    with pytest.raises(StructureMismatch, match=r"net/0/w: stored float32\[2, 3\], target int4"):
        await tstore.restore(url, target=target, only="net/0/w", dtype="target")


# ---- leaves that are missing


async def test_missing_leaves_are_kept_only_when_asked(url: str) -> None:
    target = {**TREE, "ema": np.full(2, 3.0), "decay": 0.9}
    with pytest.raises(StructureMismatch) as caught:
        await tstore.restore(url, target=target)
    assert caught.value.missing == ["ema", "decay"]
    restored = await tstore.restore(url, target=target, missing="keep")
    assert restored["ema"].tolist() == [3, 3]
    assert restored["decay"] == 0.9
    assert restored["step"] == 7
    with pytest.raises(StructureMismatch, match="unexpected, not in the target: step"):
        await tstore.restore(url, target={"net": TREE["net"], "lr": 0.5}, missing="keep")
    with pytest.raises(InvalidArgument, match="missing='zero': expected 'error' or 'keep'"):
        await tstore.restore(url, missing="zero")  # type: ignore[arg-type]


# ---- parts


async def test_only_what_is_selected_changes(url: str) -> None:
    """Python scalars too."""
    saved = {"model": {"w": np.ones(3), "depth": 2}, "epoch": 7}
    await tstore.save(url, saved, 9)
    target = {"model": {"w": np.zeros(3), "depth": 0}, "epoch": 0}
    restored = await tstore.restore(url, 9, target=target, only="model/w")
    assert (restored["model"]["w"].tolist(), restored["model"]["depth"], restored["epoch"]) == ([1] * 3, 0, 0)
    restored = await tstore.restore(url, 9, target=target, only="model/**")
    assert (restored["model"]["w"].tolist(), restored["model"]["depth"], restored["epoch"]) == ([1] * 3, 2, 0)
    target["model"]["depth"] = 0.5
    with pytest.raises(StructureMismatch, match="model/depth: stored int, target float"):
        await tstore.restore(url, 9, target=target, only="model/**")
    assert (await tstore.restore(url, 9, target=target, only="model/w"))["model"]["depth"] == 0.5


async def test_a_target_of_one_group_is_told_how_to_select_it(url: str) -> None:
    tree = {"model": {"w": np.ones(3)}, "optimizer": {"m": np.ones(3)}, "epoch": 7, "seed": 1}
    await tstore.save(url, tree, 9)
    for wanted, only in (({"model"}, "'model/**'"), ({"model", "epoch"}, "['epoch', 'model/**']")):
        target = {key: value for key, value in tree.items() if key in wanted}
        with pytest.raises(StructureMismatch, match="optimizer/m") as caught:
            await tstore.restore(url, 9, target=target)
        assert f"without one, or with only={only}:" in str(caught.value)
    for target, cure in (
        ({"model": {}}, "with only=…:"),
        ({"model": {"w": np.ones(4)}}, "with only=…:"),
        ({"model": {"w": np.ones(3, "f4")}}, "with dtype='target', which casts floats, or only=…:"),
        ({"model": {"b": np.ones(3)}}, "with missing='keep', .* or rename=… or only=…:"),
    ):
        with pytest.raises(StructureMismatch, match=cure):
            await tstore.restore(url, 9, target=target)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("net/*", r"groups of them; did you mean only='net/\*/\*\*'\?"),
        ("/net/0/w", r"did you mean only='net/0/w'\?"),
        ("mlp/~/linear/w", r"written %2f; did you mean only='mlp%2f~%2flinear/w'\?"),
        ("net/7", r"similar paths: net/0/b, net/0/w, net/1/b, net/1/w$|similar paths: net/0/w, net/0/b, "),
        ("nte/*", r"its paths: net/0/"),
    ],
)
async def test_a_pattern_that_matches_nothing_is_told_what_to_pass(url: str, pattern: str, hint: str) -> None:
    await tstore.save(url, {**TREE, "mlp/~/linear": {"w": np.ones(2)}}, 2)
    with pytest.raises(NotFound, match=hint):
        await tstore.restore(url, only=pattern)


async def test_a_rename_that_matches_nothing_is_an_error(url: str) -> None:
    with pytest.raises(NotFound, match=r"rename={'net': 'n'} matches nothing; .*; did you mean 'net/\*\*'\?"):
        await tstore.restore(url, rename={"step": "count", "net": "n"})


def read_only(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    ("stop", "out"),
    [
        ((3, 4), np.zeros((3, 3), "f4")),
        ((3, 4), np.zeros((3, 4), "i4")),
        ((3, 4), np.zeros((3, 4), ">f4")),
        ((3, 4), read_only(np.zeros((3, 4), "f4"))),
        ((5, 4), np.zeros((5, 4), "f4")),
        ((3,), np.zeros((3, 4), "f4")),
    ],
)
async def test_memory_that_does_not_fit_its_region_is_refused(url: str, stop: Any, out: Any) -> None:
    """A region beyond an array would be read for ever."""
    await tstore.save(url, {"w": np.arange(12, dtype="f4").reshape(3, 4)}, 8)
    leaf = Destination((3, 4), np.dtype("f4"), [(tuple(slice(0, n) for n in stop), out)])
    with pytest.raises(InvalidArgument, match=r"w: .* can't hold the region"):
        await tstore.restore(url, 8, target={"w": leaf})


@pytest.mark.parametrize(
    "side",
    [
        slice(None),
        slice(0, None),
        slice(-3, 3),
        slice(0, 6, 2),
        slice(3, 0, -1),
        slice(0, 3.0),
        slice(False, 3),
        0,
    ],
)
async def test_a_region_that_is_no_box_is_refused(url: str, side: Any) -> None:
    await tstore.save(url, {"w": np.arange(7, dtype="f4")}, 8)
    leaf = Destination((7,), np.dtype("f4"), [((side,), np.zeros(3, "f4"))])
    with pytest.raises(InvalidArgument, match=r"w: .* can't hold the region"):
        await tstore.restore(url, 8, target={"w": leaf})


# ---- what is read


@pytest.mark.parametrize("after", [(1, 8), (2, 4), (8, 1)])
async def test_a_reshard_in_one_process_reads_each_chunk_once(after: tuple[int, int]) -> None:
    url, rng = f"memory://reshard-{after[0]}", np.random.default_rng(0)
    w = rng.standard_normal((2048, 2048), "f4")
    before, spec = Mesh({"x": 8, "y": 1}, devices_per_host=8), P("x", "y")
    await tstore.save(url, {"w": tstore.Shards.of(w, before, spec, 0)}, 1)
    mesh = Mesh({"x": after[0], "y": after[1]}, devices_per_host=8)
    target = {"w": tstore.Shards.wanted(w.shape, w.dtype, mesh, spec, 0)}
    plan = await tstore.explain(url, target=target)
    assert plan.bytes_needed == plan.bytes_read == w.nbytes
    assert plan.arrays == {"w": w.nbytes}
    restored = await tstore.restore(url, target=target)
    assert len(restored["w"].parts) == 8
    for index, values in restored["w"].parts:
        np.testing.assert_array_equal(values, w[index])


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e5m2, ml_dtypes.int4, "M8[s]", "U3", "?"])
async def test_a_restore_of_any_dtype_is_explained(url: str, dtype: Any) -> None:
    await tstore.save(url, {"w": np.zeros((4, 3), dtype), "empty": np.zeros((4, 0), dtype)}, 2)
    assert (await tstore.explain(url)).arrays == {"w": 12 * np.dtype(dtype).itemsize, "empty": 0}


async def test_chunks_in_the_metadata_need_no_read(url: str) -> None:
    await tstore.save(url, {"v": np.arange(64, dtype="f4")}, 5)
    plan = await tstore.explain(url, step=5)
    assert (plan.bytes_read, plan.arrays) == (0, {"v": 256})


async def test_parts_that_are_read_as_one_stack_are_explained() -> None:
    url, w = "memory://stack", np.arange(4096, dtype="f4").reshape(64, 64)
    mesh = Mesh({"x": 4}, devices_per_host=4)
    await tstore.save(url, {"w": tstore.Shards.of(w, mesh, P("x"), 0)}, 1)
    plan = await tstore.explain(url, target={"w": tstore.Shards.wanted(w.shape, w.dtype, mesh, P("x"), 0)})
    assert plan.bytes_needed == plan.bytes_read == w.nbytes


async def test_a_reshard_of_many_hosts_reads_what_each_needs() -> None:
    url, w = "memory://reshard-hosts", np.random.default_rng(0).standard_normal((8192, 2048), "f4")
    before, after, spec = Mesh({"x": 8, "y": 1}), Mesh({"x": 1, "y": 8}), P("x", "y")
    shards = [(index, w[index]) for host in range(8) for index in before.host_shards(host, w.shape, spec)]
    await tstore.save(url, {"w": tstore.Shards(w.shape, w.dtype, shards, shard_shape=(1024, 2048))}, 1)
    for host in (0, 5):
        target = {"w": tstore.Shards.wanted(w.shape, w.dtype, after, spec, host)}
        plan = await tstore.explain(url, target=target)
        assert plan.bytes_needed == w.nbytes // 8
        assert plan.bytes_read <= 1.1 * plan.bytes_needed
        [(index, values)] = (await tstore.restore(url, target=target))["w"].parts
        np.testing.assert_array_equal(values, w[index])


@pytest.mark.parametrize("codecs", [None, "lossless"])
@pytest.mark.parametrize("columns", [1 << 10, 3000])
async def test_chunks_that_several_parts_cross_are_read_once(columns: int, codecs: str | None) -> None:
    url, w = (
        f"memory://crossed-{columns}-{codecs}",
        np.random.default_rng(0).standard_normal((5000, columns), "f4"),
    )
    small = np.arange(60.0).reshape(6, 10)
    await tstore.save(url, {"w": w, "small": small}, 1, codecs=codecs)
    width = columns // 4
    parts = [((slice(0, 5000), slice(a, min(a + width + 7, columns))), None) for a in range(0, columns, width)]
    halves = [((slice(0, 6), slice(a, a + 5)), None) for a in (0, 5)]
    target = {"w": tstore.Shards(w.shape, "f4", parts), "small": tstore.Shards((6, 10), "f8", halves)}
    plan = await tstore.explain(url, target=target)
    assert plan.bytes_needed <= plan.bytes_read <= 1.01 * plan.bytes_needed
    restored = await tstore.restore(url, target=target)
    for name, values in (("w", w), ("small", small)):
        for index, part in restored[name].parts:
            np.testing.assert_array_equal(part, values[index])


async def test_parts_far_from_each_other_are_read_alone() -> None:
    url, w = "memory://far-parts", np.zeros((64, 1 << 18), "f4")
    await tstore.save(url, {"w": w}, 1)
    parts = [((slice(0, 8), slice(0, 1 << 18)), None), ((slice(56, 64), slice(0, 1 << 18)), None)]
    plan = await tstore.explain(url, target={"w": tstore.Shards(w.shape, w.dtype, parts)})
    assert plan.bytes_read == plan.bytes_needed == w.nbytes // 4


async def test_a_plan_needs_no_more_memory_than_its_metadata(url: str) -> None:
    async with (await tstore.open("memory://huge")).transaction(tag="step/1") as tx:
        await tx.create_array("huge", (1 << 17, 1 << 17), "f4", sparse=True)
    plan = await tstore.explain("memory://huge")
    assert plan == tstore.RestorePlan(1, 0, 0, {"huge": 0}, {})
    with pytest.raises(InvalidArgument, match=re.escape("step=… and at=… both name a version")):
        await tstore.explain(url, 1, at=1)


async def test_small_leaves_are_stored_and_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object and a call for each leaf would take longer than its bytes."""
    tree = {f"{number:04}": np.full(16, number, "f4") for number in range(1000)}
    boxes, pieces = [], []
    box, pieces_of = batches.ChunkBox, reader.pieces_of

    def counted(*arguments: Any) -> Any:
        pieces.append(pieces_of(*arguments))
        return pieces[-1]

    monkeypatch.setattr(batches, "ChunkBox", lambda *arguments: boxes.append(arguments) or box(*arguments))
    monkeypatch.setattr(reader, "pieces_of", counted)
    await tstore.save(tmp_path, tree, 1)
    assert boxes == []
    restored = await tstore.restore(tmp_path)
    assert all(np.array_equal(restored[path], values) for path, values in tree.items())
    assert 0 < sum(map(len, pieces)) <= 10


async def test_an_array_in_place_of_a_number_is_one_mismatch_that_says_what_to_put_there(tmp_path: Path) -> None:
    number, array = {"step": 3}, {"step": np.int64(3)}
    for stored, target, text in (
        (array, number, "step: stored an array, target int; put an array into"),
        (number, array, "step: stored int, target an array; put int into"),
    ):
        store = tmp_path / type(stored["step"]).__name__
        await tstore.save(store, stored, step=1)
        with pytest.raises(StructureMismatch, match=text) as caught:
            await tstore.restore(store, target=target)
        assert (caught.value.missing, caught.value.unexpected) == ([], [])


def test_an_object_in_a_target_is_refused_as_such(url: str) -> None:
    blocking.save(url, {"a": np.ones(2), "b": np.ones(2)}, 7)
    for restore, argument in (
        (blocking.restore, "target"),
        (blocking.restore, "into"),
        (blocking.torch.restore, "target"),
    ):
        for placeholder in (..., len):
            tree: dict[str, Any] = {argument: {"a": np.zeros(2), "b": placeholder}}
            with pytest.raises(InvalidArgument, match=r"^b: .* stands for no array; put None there.* only="):
                restore(url, only="a", **tree)
    assert blocking.restore(url, only="a", target={"a": np.zeros(2), "b": None})["b"] is None


async def test_none_and_empty_containers_are_renamed_too(tmp_path: Path) -> None:
    """They give way to what is renamed to their path, and to arrays created there or below since."""
    w = np.ones(3)
    await tstore.save(tmp_path, {"a": {"w": w, "n": None, "e": {}, "k": 3}, "b": None, "c": []}, 1)
    restored = await tstore.restore(tmp_path, rename={"a/**": "z/**"})
    np.testing.assert_equal(restored, {"z": {"w": w, "n": None, "e": {}, "k": 3}, "b": None, "c": []})
    restored = await tstore.restore(tmp_path, rename={"a/w": "b", "c": "b/below", "a/n": "n"}, only=["b/**", "n"])
    np.testing.assert_equal(restored, {"b": w, "n": None})
    async with (await tstore.open(tmp_path)).transaction() as tx:
        await tx.create_array("a/e/x", data=w)
    restored = await tstore.restore(tmp_path, at=2)
    np.testing.assert_equal(restored, {"a": {"w": w, "n": None, "e": {"x": w}, "k": 3}, "b": None, "c": []})
