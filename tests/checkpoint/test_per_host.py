"""Values that each host has for itself: `PerHost`."""

from __future__ import annotations

import asyncio
import copy
import pickle
import random
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tests.support.fuzzing import bounded_time
from tests.support.thresholds import Thresholds
from tstore.cli import main
from tstore.errors import Corrupt, InvalidArgument, NotFound, StructureMismatch

HOSTS = 3


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return f"memory://{request.node.name}"


def own(host: int) -> dict[str, Any]:
    """Return what a host has for itself, in another structure on each host."""
    generator = np.random.default_rng(host)
    return {
        "python": random.Random(host).getstate(),
        "numpy": generator.bit_generator.state,
        "worker": [{"seen": i} for i in range(host)],
        "bf16": np.full((2, host), host, ml_dtypes.bfloat16).T,
        "scalar": np.float32(host),
        "texts": np.array(["a", "bc"]),
        "empty": (None, {}, b"\xff", np.zeros((0, 2))),
        "name/with%": -0.0,
    }


def tree(host: int) -> dict[str, Any]:
    return {"w": np.arange(5.0), "data": [tstore.PerHost(own(host)), (1, None)], "step": 7}


async def save(url: str, step: int = 1, hosts: int = HOSTS, **options: Any) -> None:
    async with await tstore.open(url) as store:
        calls = [
            tstore.save(store, tree(h), step, host=h, hosts=hosts, attempt="a", **options) for h in range(hosts)
        ]
        await asyncio.gather(*calls)


def equal(one: Any, other: Any) -> bool:
    """Return whether two values have the same types and bits."""
    if isinstance(one, np.ndarray | np.generic):
        return type(one) is type(other) and one.dtype == other.dtype and one.tolist() == other.tolist()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


async def test_each_host_gets_the_value_of_the_host_with_its_number(url: str) -> None:
    await save(url)
    for host in range(HOSTS):
        for target in (None, {"w": np.empty(5), "data": [tstore.PerHost(None), (0, None)], "step": 0}):
            restored = await tstore.restore(url, target=target, host=host, hosts=HOSTS)
            assert equal(restored["data"][0].value, own(host))
            assert restored["data"][1] == (1, None)
            assert restored["step"] == 7
        plan = await tstore.explain(url, host=host, hosts=HOSTS)
        assert list(plan.arrays) == ["w", f"data/0/%host={host}"]
    generator = random.Random()
    generator.setstate(restored["data"][0].value["python"])
    assert generator.random() == random.Random(HOSTS - 1).random()


async def test_another_number_of_hosts_is_told_how_to_go_on(url: str) -> None:
    await save(url)
    target = {"w": np.empty(5), "data": [tstore.PerHost("mine"), (0, None)], "step": 0}
    for options in ({}, {"host": 1, "hosts": 2}, {"host": 3, "hosts": 4}, {"target": target}):
        with pytest.raises(InvalidArgument, match=r"data/0: saved by 3 hosts; this is host . of .") as caught:
            await tstore.restore(url, **options)
        for advice in ("per_host='all'", "per_host='keep'", "only=…", "hosts=…"):
            assert advice in str(caught.value)
    for hosts in (1, HOSTS):
        restored = await tstore.restore(url, per_host="all", hosts=hosts)
        values = restored["data"][0]
        assert equal(list(values), [own(host) for host in range(HOSTS)])
        assert restored["step"] == 7
        for of_all in (values, copy.deepcopy(values), pickle.loads(pickle.dumps(values))):
            for unsaved in (of_all, {"data": [of_all]}, tstore.PerHost(of_all)):
                with pytest.raises(InvalidArgument, match=r"values of 3 hosts, as per_host.*PerHost\(value"):
                    await tstore.save(url, unsaved, 2)
    kept = await tstore.restore(url, target=target, per_host="keep")
    assert kept["data"] == [target["data"][0], (1, None)]
    assert kept["step"] == 7
    assert equal((await tstore.restore(url, target=target, per_host="keep", hosts=HOSTS))["data"][0].value, own(0))
    with pytest.raises(InvalidArgument, match="pass target="):
        await tstore.restore(url, per_host="keep")
    assert list(await tstore.restore(url, only="w")) == ["w"]
    with pytest.raises(InvalidArgument, match="expected 'same', 'keep' or 'all'"):
        await tstore.restore(url, per_host="none")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="host=3, hosts=3: expected a host from 0 to hosts - 1"):
        await tstore.restore(url, host=3, hosts=3)


async def test_more_hosts_than_ten_come_in_their_order(url: str) -> None:
    calls = [tstore.save(url, {"n": tstore.PerHost(h)}, 1, host=h, hosts=12, attempt="a") for h in range(12)]
    await asyncio.gather(*calls)
    assert (await tstore.restore(url, per_host="all"))["n"] == list(range(12))
    assert (await tstore.restore(url, only="n", per_host="all"))["n"] == list(range(12))
    async with (await tstore.open(url)).transaction() as tx:
        await (await tx.create_array("more", (2,), "i4")).write(1)
    assert (await tstore.restore(url, at=2, per_host="all"))["n"] == list(range(12))


@pytest.mark.parametrize("only", ["data/0", "data/**", "data/*", ["w", "data/0"]])
async def test_a_value_is_selected_and_renamed_by_its_path(url: str, only: Any) -> None:
    await save(url)
    options: Any = {"host": 1, "hosts": HOSTS}
    assert equal((await tstore.restore(url, only=only, **options))["data"][0].value, own(1))
    renamed = await tstore.restore(url, rename={"data/0": "rng"}, only="rng", **options)
    assert equal(renamed["rng"].value, own(1))
    assert equal((await tstore.restore(url, rename={"**": "x/**"}, **options))["x"]["data"]["0"].value, own(1))
    with pytest.raises(NotFound, match="matches nothing"):
        await tstore.restore(url, rename={"dat": "rng"}, **options)


async def test_a_target_with_a_value_in_only_one_of_both_does_not_match(url: str) -> None:
    await save(url)
    target: dict[str, Any] = {"w": np.empty(5), "data": [tstore.PerHost(None), (0, None)], "step": 0}
    options: Any = {"hosts": HOSTS}
    wrong = {
        "w: only one of the checkpoint and the target has a tstore.PerHost": {"w": tstore.PerHost(None)},
        "data/0: only one of the checkpoint and the target has": {"data": [np.zeros(3), (0, None)]},
        "unexpected, not in the target: data/0": {"data": [None, (0, None)]},
        "missing in the checkpoint: more": {"more": tstore.PerHost(None)},
        "missing in the checkpoint: step": {"step": tstore.PerHost(None)},
    }
    for text, change in wrong.items():
        with pytest.raises(StructureMismatch, match=text):
            await tstore.restore(url, target={**target, **change}, **options)
    more = tstore.PerHost("kept")
    assert (await tstore.restore(url, target={**target, "more": more}, missing="keep", **options))["more"] is more


async def test_values_of_which_one_host_s_was_deleted_are_those_of_no_number_of_hosts(url: str) -> None:
    await save(url)
    async with (await tstore.open(url)).transaction() as tx:
        await tx.delete("data/0/%host=2")
    for options in ({"hosts": 2}, {"hosts": HOSTS}, {"per_host": "all"}):
        assert (await tstore.restore(url, at=2, **options))["data"] == {"1": {"0": 1, "1": None}}
        with pytest.raises(NotFound, match="no array matches"):
            await tstore.restore(url, at=2, only="data/0", **options)


async def test_patterns_for_the_values_of_other_hosts_are_told(url: str) -> None:
    await save(url)
    for only in ("data/0/%host=1", "**/%host=1", ["data/0/%host=1", "data/0/%host=2"]):
        with pytest.raises(NotFound, match=r"data/0 has .* host 0 is not selected"):
            await tstore.restore(url, only=only, hosts=HOSTS)
        assert equal((await tstore.restore(url, only=only, host=1, hosts=HOSTS))["data"][0].value, own(1))
        assert equal((await tstore.restore(url, only=only, per_host="all"))["data"][0][0], own(1))


async def test_a_whole_tree_and_a_key_like_that_of_a_host(url: str) -> None:
    await tstore.save(url, tstore.PerHost({"%host=0": 5}), 1)
    assert (await tstore.restore(url)).value == {"%host=0": 5}
    await tstore.save(url, {"x": {"%host=0": np.ones(2), "%host=1": np.ones(2)}, "host=0": 3}, 2)
    restored = await tstore.restore(url)
    assert list(restored["x"]) == ["%host=0", "%host=1"]
    assert restored["host=0"] == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (object(), "own, in the PerHost: an object of type object can't be stored"),
        ({"x": [tstore.PerHost(1)]}, "own, in the PerHost: x/0: a PerHost is not a value of one host alone"),
        (
            [tstore.Shards((1,), "f4", [((slice(0, 1),), np.zeros(1, "f4"))])],
            "0: a Shards is not a value of one host",
        ),
        (np.array([None]), "own, in the PerHost: dtype object can't be stored"),
    ],
    ids=["object", "per host", "shards", "object array"],
)
async def test_what_one_host_cannot_save_alone_is_named(url: str, value: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        await tstore.save(url, {"own": tstore.PerHost(value)}, 1)


async def test_unchanged_values_cost_no_bytes(tmp_path: Path) -> None:
    await save(str(tmp_path / "s"), 1)
    size = sum(path.stat().st_size for path in tmp_path.rglob("pack-*"))
    assert size > 3 * 5000  # with the states of Python's generators
    await save(str(tmp_path / "s"), 2)
    assert sum(path.stat().st_size for path in tmp_path.rglob("pack-*")) == size


async def test_a_save_repeated_after_its_commit_returns_the_version(url: str) -> None:
    await save(url)
    await save(url)
    assert [commit.version async for commit in (await tstore.open(url)).history()] == [1]


async def test_a_save_leaves_the_random_numbers_of_the_job_alone() -> None:
    state = random.getstate()
    await save("memory://jitter")
    assert random.getstate() == state


async def test_a_series_restores_the_own_values_of_each_host(tmp_path: Path) -> None:
    async def host(number: int) -> Any:
        async with tstore.Checkpointer(tmp_path / "s", host=number, hosts=2, attempt="a") as checkpoints:
            value = np.full(3, number)
            await checkpoints.save(1, {"own": tstore.PerHost(value)})
            value[:] = 9  # the save has its own copy
            return (await checkpoints.restore_latest())["own"].value.tolist()

    assert await asyncio.gather(host(0), host(1)) == [[0] * 3, [1] * 3]


async def test_codecs_apply_to_weights_and_leave_own_values_exact(url: str) -> None:
    saved = {"w": np.random.default_rng(0).normal(size=(64, 64)), "own": tstore.PerHost(np.array([0.1, 1e300]))}
    for step, codecs in enumerate(["e4m3", "lossless", tstore.Bits(5)]):
        await tstore.save(url, saved, step, codecs=codecs)  # type: ignore[arg-type]
        assert (await tstore.restore(url))["own"].value.tolist() == [0.1, 1e300]
    await tstore.quantize(url, formats="e4m3", tag="small")
    assert (await tstore.restore(url, at="small"))["own"].value.tolist() == [0.1, 1e300]


@pytest.mark.parametrize("change", [lambda data: data[:-3], lambda data: b"\x80", lambda data: data + b"\0"])
async def test_damaged_bytes_are_named(url: str, change: Any) -> None:
    await tstore.save(url, {"own": tstore.PerHost(np.ones(3))}, 1)
    store = await tstore.open(url)
    data = await (await (await store.snapshot()).array("own/%host=0")).read()
    async with store.transaction() as tx:
        w = await tx.array("own/%host=0")
        await w.resize((len(change(data.tobytes())),))
        await w.write(np.frombuffer(change(data.tobytes()), np.uint8))
    with pytest.raises(Corrupt, match="own/%host=0"):
        await tstore.restore(url, at=2)


@pytest.mark.parametrize(
    ("structure", "arrays"),
    [
        (["array", "a"], {}),
        (["array", "a"], {"a": ("float32", (2,), b"1234")}),
        (["array", "a"], {"a": ("float32", (-1,), b"1234")}),
        (["array", "a"], {"a": ("object", (1,), b"12345678")}),
        (["int", "x"], {}),
    ],
)
async def test_forged_values_are_refused(url: str, structure: Any, arrays: Any) -> None:
    await tstore.save(url, {"own": tstore.PerHost(1)}, 1)
    forged = msgspec.msgpack.encode({"structure": structure, "arrays": arrays})
    async with (await tstore.open(url)).transaction() as tx:
        w = await tx.array("own/%host=0")
        await w.resize((len(forged),))
        await w.write(np.frombuffer(forged, np.uint8))
    with pytest.raises(tstore.errors.TStoreError, match=r"own/%host=0|dtype|data type"):
        await tstore.restore(url, at=2)


def test_copies_and_pickles_have_the_value() -> None:
    leaf = tstore.PerHost([np.ones(2), "x"])
    for copied in (copy.deepcopy(leaf), pickle.loads(pickle.dumps(leaf))):
        assert type(copied) is tstore.PerHost
        assert equal(copied.value, leaf.value)
    assert repr(tstore.PerHost(list(range(10_000)))) == "PerHost(a list)"


def test_commands_list_compare_and_export_the_bytes_of_each_host(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url, out = str(tmp_path / "s"), tmp_path / "out.safetensors"
    for step in (1, 2):
        blocking.save(url, {"w": np.ones(2), "own": tstore.PerHost(step)}, step)
    for arguments in (["ls", url, "own"], ["show", url], ["diff", url, "step/1", "step/2"]):
        assert main(arguments) == 0
        assert "%host=0" in capfd.readouterr().out
    assert main(["export", url, str(out)]) == 0
    assert b"own.%host=0" in out.read_bytes()


def stored(structure: Any, arrays: dict[str, Any] | None = None) -> bytes:
    return msgspec.msgpack.encode({"structure": structure, "arrays": arrays or {}})


def test_hostile_bytes_of_a_host_are_refused_at_once(url: str, thresholds: Thresholds) -> None:
    """Sizes, depths and keys are checked before the parser meets them."""
    thresholds(NODE_METADATA_VALUES=10_000)
    colliding = [-(2**61 - 1), 0, 2**61 - 1] + [n * (2**61 - 1) for n in range(2, 9)]
    many = b"\x82\xa6arrays\x80\xa9structure\xdd\x00\x00\x30\x00" + bytes(0x3000)
    hostile = {
        "length <= 64": stored(["array", "a"], {"a": ("uint8", [2**63] * 65, b"")}),
        "a key that is not text": stored(dict.fromkeys(colliding, 1) | dict.fromkeys("abc" * 99, "x" * 999)),
        "levels of nesting": b"\x82\xa6arrays\x80\xa9structure" + b"\x91" * 9_000 + b"\xc0",
        "more than 10,000 values": many,
        "do not match": stored(["arrays", "k" * (1 << 20), [str(i) for i in range(1025)]]),
    }
    with blocking.open(url) as store:
        for step, data in enumerate([*hostile.values(), np.ones((2, 3)), np.ones(3, ml_dtypes.bfloat16)]):
            values = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
            with store.transaction(tag=f"step/{step}") as tx:
                tx.create_array(f"x{step}/%host=0", data=values)
        for step, message in enumerate([*hostile, "expected bytes, got float64", "expected bytes, got bfloat16"]):
            with bounded_time(5), pytest.raises(Corrupt, match=message):
                blocking.restore(store, step, only=f"x{step}")


async def test_what_could_not_be_read_again_is_not_saved(url: str, thresholds: Thresholds) -> None:
    thresholds(NODE_METADATA_VALUES=1000)
    with pytest.raises(InvalidArgument, match=r"x: the PerHost has more than 1,000 values; use arrays"):
        await tstore.save(url, {"x": tstore.PerHost(list(range(1000)))}, 1)


@pytest.mark.parametrize("package", ["", "torch", "jax"])
@pytest.mark.parametrize(
    ("generator", "state"),
    [
        (random.Random(), r"getstate\(\)"),
        (np.random.default_rng(), r"bit_generator\.state"),
        (np.random.RandomState(), r"get_state\(\)"),
    ],
)
def test_a_generator_is_refused_with_its_path_and_how_to_get_its_state(
    url: str, package: str, generator: Any, state: str
) -> None:
    save = (getattr(blocking, package) if package else blocking).save
    places = {
        "rng: ": generator,
        "rng, in the PerHost: ": tstore.PerHost(generator),
        "rng/a, in the PerHost: x: ": {"a": tstore.PerHost({"x": generator})},
    }
    for place, tree in places.items():
        with pytest.raises(InvalidArgument, match=f"^{place}an object .* can't be stored; pass its {state}, in a"):
            save(url, {"rng": tree}, step=1)


async def test_arrays_beside_the_bytes_of_a_host_are_not_lost(url: str) -> None:
    paths = ["x/%host=0", "x/w", "y/%host=0/v", "y/%host=1", "%host=0"]
    async with await tstore.open(url, "x") as store, store.transaction() as tx:
        for path in paths:
            await tx.create_array(path, data=np.arange(3))
    own = await tstore.restore(url)
    assert [own["x"]["%host=0"].tolist(), own["x"]["w"].tolist(), own["%host=0"].tolist()] == [[0, 1, 2]] * 3
    assert [own["y"]["%host=0"]["v"].tolist(), own["y"]["%host=1"].tolist()] == [[0, 1, 2]] * 2
    assert (await tstore.restore(url, only="x/%host=0"))["x"]["%host=0"].tolist() == [0, 1, 2]
    assert (await tstore.restore(url, only="x/w"))["x"]["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["x/%host=5", "x/%host=00", "x/%host="])
def test_values_of_no_such_host_are_told(url: str, name: str) -> None:
    with blocking.open(url) as store:
        with store.transaction(tag="step/1") as tx:
            tx.create_array(name, data=np.frombuffer(stored(["none"]), np.uint8))
        for target in (None, {"x": tstore.PerHost(0)}):
            with pytest.raises(
                NotFound, match=r"values of 1 hosts, but that of host 0 is not selected, or not at"
            ):
                blocking.restore(store, 1, target=target)
        assert blocking.restore(store, 1, per_host="all") == {"x": [None]}


async def test_rules_for_codecs_match_the_path_of_the_value(tmp_path: Path) -> None:
    tree = {"rng": tstore.PerHost(np.zeros(1000)), "w": np.ones((32, 32), "f4")}
    await tstore.save(tmp_path, tree, 1, codecs={"rng": "lossless"})
    async with await tstore.open(tmp_path) as store:
        array = await (await store.snapshot()).array("rng/%host=0")
    assert [codec["name"] for codec in array.codecs] == ["bytes", "blosc"]
    assert (await tstore.quantize(tmp_path, {"rng": None, "w": "e4m3"})).arrays[-1].format == "e4m3"
