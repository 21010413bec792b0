"""Checkpoints: a saved tree is restored unchanged, on the same or another mesh of hosts."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import gc
import importlib
import math
import uuid
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
from tstore.checkpoint.structure import flatten
from tstore.core.format.tree_document import expanded
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFinite, NotFound, StructureMismatch
from tstore.lab.conformance.faults import open_faulty
from tstore.sharding import Mesh, P


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


def same(a: Any, b: Any) -> None:
    """Assert equality of types, key order and bits."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert [(type(k), k) for k in a] == [(type(k), k) for k in b]
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, np.ndarray | np.generic):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.tobytes() == b.tobytes()
    else:
        assert a == b or (math.isnan(a) and math.isnan(b))


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class State:
    w: Any
    inner: Any
    step: int = 0


TREES: dict[str, Any] = {
    "keys of many types": {
        5: np.arange(2),
        "5": np.arange(3),
        1.5: np.arange(4),
        b"5": np.arange(5),
        "b'5'": np.ones(1),
    },
    "scalars under keys of one text": {5: 1, "5": 2, "6": {"a": 3.5}, 6: {"a": "x"}},
    "true and one": {"a": {True: np.zeros(1)}, "b": {1: np.ones(1)}},
    "odd names": {
        k: np.full(2, i)
        for i, k in enumerate(
            [
                "",
                ".",
                "..",
                "/",
                "a/b",
                "a%2fb",
                "%",
                "%%",
                "5%",
                "zarr.json",
                " ",
                "\n",
                "ü",
                "日本",
                "a" * 300,
                "*",
                "value",
            ]
        )
    },
    "nothing": {"none": None, "dict": {}, "list": [], "tuple": (), "deep": {"a": [{}, [()]]}},
    "scalars": [
        0,
        -1,
        10**30,
        1.5,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        True,
        False,
        "",
        "text",
        b"\0\xff",
        1 - 2j,
    ],
    "numpy scalars": {"a": np.float32(0.1), "b": np.int8(-3), "c": np.bool_(True), "d": ml_dtypes.bfloat16(1.5)},
    "arrays of no axes and no elements": [np.array(5), np.zeros((0,)), np.zeros((3, 0), "i2"), np.array(1j)],
    "nested": [{"a": ({"b": [np.arange(3), (np.ones(2),)]},)}],
    "an array": np.arange(12).reshape(3, 4),
    "a scalar": 3.5,
    "none": None,
}


@given(
    st.dictionaries(
        st.sampled_from(["zarr.json", ".", "..", "5", 5, 5.0, True]) | st.text("a/%5.\n", max_size=3),
        st.just(np.zeros(1)),
    )
)
def test_a_dict_and_another_mapping_have_the_same_paths(tree: dict[Any, Any]) -> None:
    document, leaves = flatten(tree)
    assert (expanded(document), leaves) == flatten(collections.OrderedDict(tree))


@pytest.mark.parametrize("name", TREES)
async def test_a_tree_comes_back(url: str, name: str) -> None:
    tree = TREES[name]
    await tstore.save(url, tree, 0)
    same(await tstore.restore(url), tree)
    same(await tstore.restore(url, target=tree), tree)


async def test_classes_are_restored_from_a_target(url: str) -> None:
    tree = {"s": State(np.arange(3), Point(np.ones(2), None), 7), "p": Point(1, [np.zeros(1)])}
    await tstore.save(url, tree, 0)
    same(
        await tstore.restore(url),
        {
            "s": {"w": np.arange(3), "inner": {"x": np.ones(2), "y": None}, "step": 7},
            "p": {"x": 1, "y": [np.zeros(1)]},
        },
    )
    target = {"s": State(np.zeros(3, int), Point(np.zeros(2), None), 0), "p": Point(0, [np.ones(1)])}
    restored = await tstore.restore(url, target=target)
    assert type(restored["s"]) is State
    assert type(restored["s"].inner) is Point
    assert (restored["s"].step, restored["p"].x) == (7, 1)
    same(restored["s"].w, np.arange(3))


async def test_mappings_of_other_types_are_restored_from_a_target(url: str) -> None:
    tree = collections.OrderedDict(b=np.arange(2), a=np.ones(1))
    await tstore.save(url, tree, 0)
    assert list(await tstore.restore(url)) == ["b", "a"]
    restored = await tstore.restore(url, target=tree)
    assert type(restored) is collections.OrderedDict
    default: Any = collections.defaultdict(list, a=np.ones(1))
    await tstore.save(url, default, 1)
    restored = await tstore.restore(url, 1, target=default)
    assert restored["a"].tolist() == [1]


async def test_a_counter_gets_the_restored_counts_not_their_sums_with_its_own(url: str) -> None:
    tree = {"milestones": collections.Counter({30: 1, 60: 2})}
    await tstore.save(url, tree, 0)
    restored = await tstore.restore(url, target=tree)
    assert restored == tree
    assert type(restored["milestones"]) is collections.Counter


class Settings(collections.abc.MutableMapping[str, Any]):
    """Whose copies share its values, as `copy.copy` of an object with a dict inside makes them."""

    def __init__(self, values: Any) -> None:
        self.values_by_key = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self.values_by_key[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.values_by_key[key] = value

    def __delitem__(self, key: str) -> None:
        del self.values_by_key[key]

    def __iter__(self) -> Any:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)


async def test_a_target_of_a_mapping_class_stays_as_it_is(url: str) -> None:
    await tstore.save(url, {"w": np.ones(3)}, 0)
    target = Settings({"w": np.zeros(3)})
    restored = await tstore.restore(url, target=target)
    assert type(restored) is Settings
    assert restored["w"].tolist() == [1, 1, 1]
    assert target["w"].tolist() == [0, 0, 0]


leaves = st.one_of(
    st.integers(0, 5).map(np.arange),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.none(),
    st.booleans(),
    st.binary(),
    st.floats(width=32).map(np.float32),
)
keys = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(), st.binary(max_size=3))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


@given(trees)
def test_any_tree_comes_back(tree: Any) -> None:
    async def check() -> None:
        where = f"memory://{uuid.uuid4()}"
        await tstore.save(where, tree, 0)
        same(await tstore.restore(where), tree)
        same(await tstore.restore(where, target=tree), tree)

    asyncio.run(check())


@pytest.mark.parametrize(
    "tree",
    [
        {"a": object},
        {"a": {1, 2}},
        {"a": np.array(["x"], "T")},
        {"a": np.array([object])},
        {(1, 2): np.ones(1)},
        {"a": [lambda: 0]},
        {None: 1},
        {"a": "\ud800"},
        {"\ud800": np.ones(1)},
    ],
    ids=lambda t: ascii(t)[:30],
)
async def test_leaves_that_cannot_be_stored_are_named(url: str, tree: Any) -> None:
    await tstore.save(url, {"good": np.ones(1)}, 0)
    with pytest.raises(InvalidArgument):
        await tstore.save(url, tree, 1)
    assert await tstore.steps(url) == [0]


@pytest.mark.parametrize("step", [-1, 1.0, "1", True, None], ids=repr)
async def test_a_step_is_a_whole_number(url: str, step: Any) -> None:
    with pytest.raises(InvalidArgument, match="step"):
        await tstore.save(url, {}, step)


# ---- targets and parts

SAVED = {
    "params": {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3, "f4"), 3: [np.zeros(2), np.ones(2)]},
    "opt": {"m": np.full(4, 2.0), "count": 5},
    "name": "run",
}


async def test_a_target_that_does_not_fit_lists_all_mismatches(url: str) -> None:
    await tstore.save(url, SAVED, 0)
    target = {
        "params": {"w": np.zeros((3, 2)), "b": np.ones(3, "f8"), "new": np.ones(1), 3: [np.zeros(2), np.ones(2)]},
        "opt": {"count": 5.0},
        "other": {"x": 3},
        "name": "run",
    }
    with pytest.raises(StructureMismatch) as caught:
        await tstore.restore(url, target=target)
    error = caught.value
    assert sorted(error.missing) == ["other/x", "params/new"]
    assert sorted(error.unexpected) == ["opt/m"]
    assert sorted(m.partition(":")[0] for m in error.mismatched) == ["opt/count", "params/b", "params/w"]
    for text in ("float64[2, 3]", "float64[3, 2]", "float32[3]", "stored int, target float"):
        assert text in str(error)
    assert isinstance(error, InvalidArgument)


async def test_a_part_is_restored_by_pattern(url: str) -> None:
    await tstore.save(url, SAVED, 0)
    same(await tstore.restore(url, only="params/**"), {"params": SAVED["params"]})
    same(await tstore.restore(url, only="**/w"), {"params": {"w": SAVED["params"]["w"]}})
    same(
        await tstore.restore(url, only=["opt/*", "params/b"]),
        {"params": {"b": np.ones(3, "f4")}, "opt": SAVED["opt"]},
    )
    same(await tstore.restore(url, only="params/3/1"), {"params": {3: [None, np.ones(2)]}})
    with pytest.raises(NotFound, match="nothing"):
        await tstore.restore(url, only="nothing/**")
    with pytest.raises(
        NotFound, match=r"'params' selects no arrays, but groups of them; did you mean only='params/\*\*'"
    ):
        await tstore.restore(url, only="params")
    target = {
        "params": {"w": np.zeros((2, 3)), "b": np.zeros(3, "f4"), 3: [np.ones(2), np.zeros(2)]},
        "mine": np.full(2, 7),
    }
    restored = await tstore.restore(url, target=target, only="params/?")
    assert (restored["params"]["w"] == SAVED["params"]["w"]).all()
    assert restored["mine"].tolist() == [7, 7]
    assert restored["params"][3][0].tolist() == [1, 1]
    with pytest.raises(StructureMismatch, match="mine"):
        await tstore.restore(url, target=target, only=["params/**", "mine"])


async def test_a_target_may_consist_of_shapes_and_dtypes(url: str) -> None:
    class Spec(NamedTuple):
        shape: tuple[int, ...]
        dtype: Any

    await tstore.save(url, {"w": np.arange(6.0).reshape(2, 3)}, 0)
    same(await tstore.restore(url, target={"w": Spec((2, 3), "float64")}), {"w": np.arange(6.0).reshape(2, 3)})


async def test_big_endian_arrays_are_valid_targets_of_their_checkpoint(url: str) -> None:
    tree = {"w": np.arange(5, dtype=">f4")}
    await tstore.save(url, tree, 0)
    for target in (tree, {"w": np.zeros(5, "<f4")}):
        same(await tstore.restore(url, target=target), {"w": np.arange(5, dtype="<f4")})


# ---- steps


async def test_steps_versions_and_tags(url: str) -> None:
    for step in (10, 2, 30):
        await tstore.save(url, {"x": np.array(step)}, step, metrics={"loss": step / 2}, message=f"at {step}")
    store = await tstore.open(url)
    assert await tstore.steps(store) == [2, 10, 30]
    assert (await tstore.restore(url))["x"] == 30
    assert (await tstore.restore(url, 2))["x"] == 2
    assert (await tstore.restore(url, at=1))["x"] == 10
    assert (await tstore.restore(url, at="step/2"))["x"] == 2
    assert [(c.tag, c.message, c.metadata["metrics"]) async for c in store.history()] == [
        (f"step/{s}", f"at {s}", {"loss": s / 2}) for s in (30, 2, 10)
    ]
    same(await tstore.restore(url, at=np.int64(1)), await tstore.restore(url, at=1))  # type: ignore[arg-type]
    with pytest.raises(NotFound, match=r"no step 7; its steps are: 2, 10, 30"):
        await tstore.restore(url, 7)
    with pytest.raises(InvalidArgument, match="both"):
        await tstore.restore(url, 2, at=1)


async def test_restoring_from_an_empty_store_is_not_found(url: str) -> None:
    await tstore.open(url, "x")
    assert await tstore.steps(url) == []
    with pytest.raises(NotFound, match="no commit yet"):
        await tstore.restore(url)


async def test_an_existing_step_is_not_replaced(url: str) -> None:
    await tstore.save(url, {"x": np.array(1)}, 5)
    with pytest.raises(AlreadyExists, match="step 5 is already saved, as version 1"):
        await tstore.save(url, {"x": np.array(2)}, 5)
    assert (await tstore.restore(url, 5))["x"] == 1
    assert len([c async for c in (await tstore.open(url)).history()]) == 1


async def test_an_empty_list_of_codecs_is_refused_with_its_pattern(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"the rule 'w': \[\]: the list of codecs is empty"):
        await tstore.save(url, {"w": np.arange(4.0)}, 0, codecs={"w": []})


async def test_concurrent_saves_of_one_step_have_one_winner(url: str) -> None:
    """Each save finds the step free when it begins; the errors of the losers name the version that won."""
    store, faults = await open_faulty(url)
    gate = faults.hold("create", "commits/*")
    first = asyncio.create_task(tstore.save(store, {"w": np.zeros(5000)}, 7))
    await gate.reached()
    others = [tstore.save(url, {"w": np.full(5000, float(i))}, 7) for i in range(3)]
    ended = await asyncio.gather(*others, return_exceptions=True)
    gate.release()
    [won] = [i for i, result in enumerate(ended) if result == 1]
    for error in [e for e in (*ended, *await asyncio.gather(first, return_exceptions=True)) if e != 1]:
        with pytest.raises(AlreadyExists, match="step 7 is already saved, as version 1"):
            raise error
    assert (await tstore.restore(url))["w"][0] == won


@pytest.mark.parametrize("operation", ["head", "get"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
async def test_a_save_that_loses_a_race_is_refused(url: str, operation: str, nth: int) -> None:
    """Another save commits while this one is held at one of its reads of the log."""
    await tstore.save(url, {"x": np.array(0)}, 0)
    store, faults = await open_faulty(url)
    gate = faults.hold(operation, "commits/*", nth=nth)
    mine = asyncio.create_task(tstore.save(store, {"x": np.array(1)}, 5))
    reached = asyncio.create_task(gate.reached())
    await asyncio.wait([mine, reached], return_when=asyncio.FIRST_COMPLETED)
    if mine.done():
        reached.cancel()
        return
    assert await tstore.save(url, {"x": np.array(2)}, 5) == 2
    gate.release()
    with pytest.raises((AlreadyExists, tstore.errors.Conflict)):
        await mine
    assert (await tstore.restore(url, 5))["x"] == 2


async def test_unchanged_arrays_cost_no_bytes(url: str) -> None:
    rng = np.random.default_rng(0)
    tree = {"frozen": rng.random(300_000), "small": np.arange(5), "moving": rng.random(300_000)}
    await tstore.save(url, tree, 0)
    store = await tstore.open(url)
    before = sum([(await store.log.storage.size(k)) or 0 for k in await store.log.storage.list("txn/")])
    tree = {**tree, "moving": tree["moving"] + 1}
    await tstore.save(url, tree, 1)
    after = sum([(await store.log.storage.size(k)) or 0 for k in await store.log.storage.list("txn/")])
    assert tree["moving"].nbytes <= after - before < tree["moving"].nbytes + 4096
    commits = [c async for c in store.history()]
    assert commits[0].bytes_added == tree["moving"].nbytes
    await tstore.save(url, tree, 2)
    assert (await anext(store.history())).bytes_added == 0
    for step in (1, 2):
        same(await tstore.restore(url, step), tree)
    assert (await store.verify()).ok


# ---- shards

MESH = Mesh({"data": 4, "model": 2}, devices_per_host=1)
SPECS = {"w": P("data", "model"), "v": P(None, "model"), "b": P("data"), "r": P()}


def full() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "w": rng.integers(0, 1000, (64, 32), "i4"),
        "v": rng.random((12, 6)).astype("f4"),
        "b": rng.random(40).astype(ml_dtypes.bfloat16),
        "r": rng.random(7),
    }


async def save_on_mesh(url: str, values: dict[str, Any], step: int = 0, mesh: Mesh = MESH) -> None:
    async def host(number: int) -> int:
        tree = {k: tstore.Shards.of(v, mesh, SPECS[k], number) for k, v in values.items()}
        return await tstore.save(url, tree, step, host=number, hosts=8, attempt="a", timeout=30)

    assert len(set(await asyncio.gather(*[host(h) for h in range(8)]))) == 1


async def test_shards_of_eight_hosts_are_one_array(url: str) -> None:
    values = full()
    await save_on_mesh(url, values)
    same(await tstore.restore(url), values)
    await save_on_mesh(url, values, 1)
    store = await tstore.open(url)
    assert (await anext(store.history())).bytes_added == 0  # each host knows its chunks again


@pytest.mark.parametrize(
    "mesh", [Mesh({"data": 2, "model": 2}), Mesh({"data": 1, "model": 3}), Mesh({"data": 8, "model": 1})], ids=str
)
async def test_shards_are_restored_on_another_mesh(url: str, mesh: Mesh) -> None:
    values = full()
    await save_on_mesh(url, values)
    names = ["v", "b", "r"] if mesh.shape["model"] == 3 else list(values)
    hosts = {shard.host for shard in mesh.shards((64, 6), P())}
    for host in hosts:
        target = {k: tstore.Shards.wanted(values[k].shape, values[k].dtype, mesh, SPECS[k], host) for k in names}
        restored = await tstore.restore(url, target=target, only=names)
        for name in names:
            assert [i for i, _ in restored[name].parts] == [i for i, _ in target[name].parts]
            for index, part in restored[name].parts:
                same(part, values[name][index])


async def test_a_restore_reads_only_what_it_needs(url: str) -> None:
    values = {"w": np.random.default_rng(0).random((64, 1 << 13)).astype("f4"), "other": np.ones(1 << 18)}
    tree = {
        "w": tstore.Shards(
            values["w"].shape,
            "f4",
            [((slice(8 * i, 8 * i + 8), slice(None)), values["w"][8 * i : 8 * i + 8]) for i in range(8)],
        ),
        "other": values["other"],
    }
    await tstore.save(url, tree, 0)
    store, faults = await open_faulty(url, "r")
    await store.snapshot()
    before = faults.bytes_read
    target = {"w": tstore.Shards(values["w"].shape, "f4", [((slice(16, 24), slice(None)), None)])}
    restored = await tstore.restore(store, target=target, only="w")
    needed = 8 * (1 << 13) * 4
    assert needed <= faults.bytes_read - before <= needed + 4096
    same(restored["w"].parts[0][1], values["w"][16:24])


async def test_a_partial_read_of_a_long_chunk_reads_only_the_needed_blocks(url: str) -> None:
    values = np.random.default_rng(0).random((1 << 20,))  # 8 MiB, one chunk
    await tstore.save(url, {"w": values}, 0)
    store, faults = await open_faulty(url, "r")
    w = await (await store.snapshot()).array("w")
    assert w.chunks == (1 << 20,)
    before = faults.bytes_read
    assert (await w[5000:5010].read() == values[5000:5010]).all()
    assert faults.bytes_read - before == 1 << 20


@pytest.mark.parametrize(
    ("shape", "parts", "text"),
    [
        ((8, 4), [((slice(0, 3), slice(0, 4)), None)], "no values"),
        (
            (8, 4),
            [((slice(0, 3), slice(0, 4)), np.zeros((3, 4))), ((slice(3, 8), slice(0, 4)), np.zeros((5, 4)))],
            "shard_shape",
        ),
    ],
)
async def test_invalid_shards_are_refused_by_save(url: str, shape: Any, parts: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        await tstore.save(url, {"w": tstore.Shards(shape, "f8", parts)}, 0)


@pytest.mark.parametrize(
    "parts",
    [
        [((slice(0, 2),), np.zeros((2, 4)))],
        [((slice(0, 9), slice(0, 4)), np.zeros((9, 4)))],
        [((slice(0, 4, 2), slice(0, 4)), np.zeros((2, 4)))],
        [((slice(0, 2), slice(0, 4)), np.zeros((3, 4)))],
        [((slice(0, 2), slice(0, 4)), np.zeros((2, 4), "f4"))],
        [((slice(0, 2), slice(0, 4)), None), ((slice(0, 2), slice(0, 4)), None)],
    ],
    ids=str,
)
def test_shards_that_do_not_fit_are_refused(parts: Any) -> None:
    with pytest.raises(InvalidArgument):
        tstore.Shards((8, 4), "f8", parts)


async def test_ten_thousand_leaves_are_saved_and_restored(url: str) -> None:
    tree = {f"layer{i}": {"w": np.full(8, i), "b": np.array(i, "f4")} for i in range(5000)}
    await tstore.save(url, tree, 0)
    same(await tstore.restore(url), tree)
    tree["layer77"]["w"] = np.zeros(8, int)
    await tstore.save(url, tree, 1)
    same((await tstore.restore(url, only="layer77/**"))["layer77"], tree["layer77"])
    report = await (await tstore.open(url)).verify()
    assert (report.ok, report.arrays) == (True, 10_000)


# ---- codecs and quantized copies


async def test_rules_choose_codecs_by_path(url: str) -> None:
    rng = np.random.default_rng(0)
    tree = {
        "layers": [
            {"w": rng.normal(size=1000).astype("f4"), "norm": rng.normal(size=10).astype("f4")} for _ in range(2)
        ],
        "head": rng.normal(size=1000).astype("f4"),
        "ids": np.arange(5),
    }
    await tstore.save(url, tree, 0, codecs={"**/norm": None, "layers/**": "e4m3", "head": "e3m2"})
    snapshot = await (await tstore.open(url)).snapshot()
    formats = {
        p: (await snapshot.array(p)).codecs[0].get("configuration", {}).get("format") for p in snapshot.paths()
    }
    assert formats == {
        "layers/0/w": "e4m3",
        "layers/1/w": "e4m3",
        "layers/0/norm": None,
        "layers/1/norm": None,
        "head": "e3m2",
        "ids": None,
    }
    restored = await tstore.restore(url)
    same(restored["layers"][1]["norm"], tree["layers"][1]["norm"])
    assert 0 < np.abs(restored["layers"][1]["w"] - tree["layers"][1]["w"]).max() < 0.3


async def test_nan_in_an_array_to_be_encoded_is_named(url: str) -> None:
    bad = np.ones((4, 5), "f4")
    bad[2, 3] = math.nan
    await tstore.save(url, {"ok": np.ones(3), "bad": {"w": bad}}, 0)
    with pytest.raises(NotFinite, match="bad/w"):
        await tstore.save(url, {"bad": {"w": bad}}, 1, codecs="e4m3")
    assert await tstore.steps(url) == [0]
    assert await (await tstore.open(url)).tags() == {"step/0": 1}
    same((await tstore.restore(url))["bad"]["w"], bad)


async def test_a_quantized_copy_is_a_separate_commit(url: str) -> None:
    rng = np.random.default_rng(0)
    tree = {
        "w": rng.normal(size=(300, 400)).astype("f4"),
        "h": rng.normal(size=(10, 100)).astype("f2"),
        "tiny": rng.normal(size=(10, 100)).astype("f4") * 1e-6,
        "huge": rng.normal(size=(10, 100)).astype("f4") * 1e20,
        "bf": rng.normal(size=(10, 100)).astype(ml_dtypes.bfloat16),
        "d": rng.normal(size=(10, 100)),
        "ids": np.arange(50),
        "flags": np.array([True, False]),
        "step": 3,
    }
    await tstore.save(url, tree, 7)
    store = await tstore.open(url)
    before = await store.log.storage.list("txn/")
    report = await tstore.quantize(store, "e4m3")
    assert (report.version, report.tag, report.source) == (2, "step/7/e4m3", 1)
    assert report.sqnr > 30
    by_path = {a.path: a for a in report.arrays}
    assert {p for p, a in by_path.items() if a.format} == {"w", "h", "tiny", "huge", "bf", "d"}
    assert all(30 < a.sqnr < 40 for a in report.arrays if a.format)
    assert by_path["ids"].sqnr == math.inf
    assert by_path["w"].bytes_after < by_path["w"].bytes_before / 3.9
    assert 8 <= by_path["w"].bits_per_value < 8.1
    restored = await tstore.restore(store, at="step/7/e4m3")
    for name in ("ids", "flags", "step"):
        same(restored[name], tree[name])
    for name in ("w", "h", "tiny", "huge", "bf", "d"):
        x, y = tree[name].astype("f8"), restored[name].astype("f8")
        assert restored[name].dtype == tree[name].dtype
        sqnr = 10 * math.log10(np.square(x).sum() / np.square(x - y).sum())
        assert sqnr == pytest.approx(by_path[name].sqnr, abs=1e-6)
    same(await tstore.restore(store), tree)
    assert await tstore.steps(store) == [7]
    assert set(before) <= set(await store.log.storage.list("txn/"))
    with pytest.raises(AlreadyExists, match="names version"):
        await tstore.quantize(store, "e4m3")
    coarse = await tstore.quantize(store, {"w": "e3m2", "**": None}, tag="coarse")
    assert {a.path for a in coarse.arrays if a.format} == {"w"}
    assert coarse.sqnr < report.sqnr
    assert (await store.verify()).ok


def test_a_local_store_can_be_copied(tmp_path: Path) -> None:
    import shutil

    asyncio.run(tstore.save(tmp_path / "a", SAVED, 0))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    same(asyncio.run(tstore.restore(tmp_path / "b")), SAVED)


NO_DOCUMENTS: list[Any] = [
    5,
    {"structure": 5},
    {"structure": ["dict", 5]},
    {"structure": ["dict", [["a"]]]},
    {"structure": ["dict", [[["list", "a"], ["array", "w"]]]]},
    {"structure": ["list", [["array", "w"], ["no such kind", "x"]]]},
    {"structure": ["list", [["array", "w"], ["int", "x"]]]},
    {"structure": ["list", [["array", "w"], ["float", 1]]]},
    {"structure": ["namedtuple", 3, [["x", ["array", "w"]]]]},
    {"structure": ["arrays", "", ["w", "w"]]},
    {"structure": ["arrays", "", ["w", 5]]},
    {"structure": ["arrays", 5, ["w"]]},
    {"structure": ["dataclass", "D", [[3, ["array", "w"]]]]},
    {"structure": ["array", 5]},
    {"structure": ["array", "another"]},
    {"quantization": 7},
]


@pytest.mark.parametrize("own", NO_DOCUMENTS, ids=repr)
async def test_foreign_attributes_do_not_prevent_a_restore(url: str, own: Any) -> None:
    store = await tstore.open(url)
    async with store.transaction(tag="step/1") as tx:
        await tx.create_group("", {"tstore": own})
        await (await tx.create_array("w", (64,), "f4")).write(np.arange(64))
    assert (await tstore.restore(url))["w"][5] == 5
    assert (await tstore.restore(url, target={"w": np.zeros(64, np.float32)}))["w"][5] == 5
    with pytest.raises(NotFound, match="no report"):
        await tstore.quantize_report(url)
    await tstore.quantize(url, {"w": "e4m3"})
    assert (await tstore.quantize_report(url)).source == 1
    assert np.allclose((await tstore.restore(url, at="step/1/e4m3"))["w"], np.arange(64), rtol=0.1)


async def test_a_stored_dict_of_too_many_equal_keys_is_damaged(url: str) -> None:
    keys = [[["float", "nan"], ["int", "1"]]] * 20  # no two of these are equal
    async with (await tstore.open(url)).transaction(tag="step/1") as tx:
        await tx.create_group("", {"tstore": {"structure": ["dict", [*keys, [["str", "w"], ["array", "w"]]]]}})
        await (await tx.create_array("w", (64,), "f4")).write(np.arange(64))
    with pytest.raises(Corrupt, match=r"its structure .*a dict has over 16 keys that are written nan"):
        await tstore.restore(url)


async def test_packed_restores_scalars_unpacked(url: str) -> None:
    tree = {"w": np.ones((64, 64), np.float32), "s": np.float32(3), "a": np.array(2.0)}
    await tstore.save(url, tree, 1, codecs="e4m3")
    for target in (None, tree):
        back = await tstore.restore(url, packed=True, target=target)
        assert back["w"].format.name.startswith("e4m3")
        assert (type(back["s"]), back["s"], back["a"]) == (np.float32, 3, 2)


@dataclasses.dataclass(frozen=True)
class Counted:
    w: Any
    count: Any = dataclasses.field(init=False, default=0)


class ReadOnly(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        raise TypeError("read-only")

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("read-only")


async def test_targets_may_have_other_constructors(url: str) -> None:
    counted = Counted(np.ones(3))
    object.__setattr__(counted, "count", np.array(7))
    await tstore.save(url, {"a": counted, "b": ReadOnly(w=np.ones(2))}, 1)
    target = {"a": Counted(np.zeros(3)), "b": {"w": np.zeros(2)}}
    object.__setattr__(target["a"], "count", np.array(0))
    back = await tstore.restore(url, target=target)
    assert (type(back["a"]), back["a"].w.tolist(), back["a"].count) == (Counted, [1, 1, 1], 7)
    with pytest.raises(InvalidArgument, match=r"^b: the target's ReadOnly can't be copied .*read-only"):
        await tstore.restore(url, target={"a": counted, "b": ReadOnly(w=np.zeros(2))})


@dataclasses.dataclass
class Config:
    hidden: int = 8

    @functools.cached_property
    def doubled(self) -> int:
        return 2 * self.hidden


async def test_attributes_beside_the_fields_of_a_dataclass_are_refused(url: str) -> None:
    """A configuration of transformers, for instance, keeps some of its options so."""
    config = Config()
    assert config.doubled == 16
    await tstore.save(url, {"config": config}, 1)
    config.__dict__["extra"] = 3
    with pytest.raises(InvalidArgument, match=r"^config: a Config has .* not fields .*: extra; pass a dict"):
        await tstore.save(url, {"config": config}, 2)
    with pytest.raises(InvalidArgument, match=r"^config: a Config has .* not fields"):
        await tstore.restore(url, target={"config": config})
    assert await tstore.steps(url) == [1]


@pytest.mark.parametrize("module", ["", ".torch", ".jax"])
def test_an_unknown_option_is_refused_with_a_similar_one(module: str, url: str) -> None:
    api: Any = importlib.import_module(f"tstore.sync{module}")
    with api.Checkpointer(url) as checkpoints:
        for call, argument, similar in (
            (lambda **options: api.save(url, {}, 1, **options), "tag", "tags"),
            (lambda **options: api.save_async(url, {}, 1, **options), "metric", "metrics"),
            (lambda **options: checkpoints.save(1, {}, **options), "overwritten", "overwrite"),
            (lambda **options: api.Checkpointer(url, **options), "keeps", "keep"),
            (lambda **options: api.restore(url, **options), "onyl", "only"),
            (lambda **options: checkpoints.restore(1, **options), "renamed", "rename"),
            (lambda **options: tstore.sync.quantize(url, **options), "min_snr", "min_sqnr"),
        ):
            with pytest.raises(TypeError, match=rf"^there is no argument {argument}=; did you mean {similar}=\?$"):
                call(**{argument: 1})
            with pytest.raises(TypeError, match=r"^there is no argument xyzzy=$"):
                call(xyzzy=1)


async def test_arrays_are_freed_without_the_cycle_collector() -> None:
    url, values = f"memory://{uuid.uuid4()}", np.ones((64, 64))
    saved = weakref.ref(values)
    gc.disable()
    try:
        await tstore.save(url, {"layers": [values]}, 1)
        del values
        assert saved() is None
        for target in (None, {"layers": [np.zeros((64, 64))]}):
            restored = await tstore.restore(url, target=target)
            freed = weakref.ref(restored["layers"][0])
            del restored
            assert freed() is None
    finally:
        gc.enable()


async def test_arrays_in_the_same_memory_are_stored_once(tmp_path: Path) -> None:
    """As tied weights are, which a model has under two names."""
    embed = np.random.default_rng(0).standard_normal((1024, 512)).astype("f4")  # 2 MiB
    tree = {"embed": embed, "head": embed[:], "flat": embed.reshape(-1), "T": embed.T, "e4m3": embed}
    tree |= {"half": embed[:512], "other half": embed[512:]}
    size = embed.nbytes
    async with await tstore.open(tmp_path / "s") as store:
        for step, added in enumerate((4.25 * size, 4.25 * size, 0)):  # all but "head"
            embed += step == 1
            await tstore.save(store, tree, step, codecs={"e4m3": "e4m3"})
            restored = await tstore.restore(store)
            assert [name for name in tree if not np.array_equal(restored[name], tree[name])] == ["e4m3"]
            [commit, *_] = [commit async for commit in store.history()]
            assert added <= commit.bytes_added <= added + 1000
        assert (await store.verify()).ok
        await store.collect(keep=tstore.Keep(last=1))
        assert np.array_equal((await tstore.restore(store))["head"], embed)
    tied = await tstore.save_async(tmp_path / "s", {"a": embed, "b": embed}, 4)
    embed[:] = 0  # it was copied
    await tied.committed
    restored = await tstore.restore(tmp_path / "s")
    assert np.array_equal(restored["a"], restored["b"])
    assert restored["a"].any()
