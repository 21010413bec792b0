"""Cooperative transactions: many hosts, one commit or none."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tstore
from tests.support import forks
from tests.support.polling import delivered, until
from tests.support.thresholds import Thresholds
from tstore.checkpoint.replicated import checksums
from tstore.checkpoint.structure import flatten
from tstore.core.transactions.agreement import check_replicated
from tstore.errors import (
    AlreadyExists,
    Conflict,
    DeadlineExceeded,
    Inconsistent,
    InvalidArgument,
    Misuse,
    NotFound,
    StorageFull,
    TStoreError,
)
from tstore.lab.conformance.faults import open_faulty
from tstore.lab.simulation.scenario import override_constants

HOSTS = 8
ROWS = 16


@pytest.fixture
def prompt(thresholds: Thresholds) -> None:
    """Let a waiting host take over from a refused one at once instead of after a second."""
    thresholds(_GRACE=0.02)


@pytest.fixture
def short_blocks() -> Iterator[None]:
    """Let eleven hosts merge their fragments as more than a hundred do."""
    with override_constants(FAN_IN=10):
        yield


def tree(host: int, value: int = 0, hosts: int = HOSTS, rows: int = ROWS) -> dict[str, Any]:
    """Return the tree of a host: its rows of "w", and "b" and "step", which are the same on every host."""
    lines = rows // hosts
    mine = slice(host * lines, (host + 1) * lines)
    part = np.full((lines, 6), value * 100 + host, "i4")
    w = tstore.Shards((rows, 6), "int32", [((mine, slice(0, 6)), part)])
    return {"w": w, "b": np.full(3, value), "step": value, "layers": {3: {"x": np.full(2, value / 2)}}}


def whole(value: int = 0, hosts: int = HOSTS) -> Any:
    return np.repeat(value * 100 + np.arange(hosts), ROWS // hosts)[:, None] * np.ones(6, int)


async def save(store: Any, host: int, value: int = 0, *, step: int = 1, attempt: str = "a", **more: Any) -> int:
    given = more.pop("tree", None)
    options = {"hosts": HOSTS, "attempt": attempt, "timeout": 30, **more}
    return await tstore.save(store, given or tree(host, value, options["hosts"]), step, host=host, **options)


async def check(url: str, value: int, step: int = 1) -> None:
    restored = await tstore.restore(url, step)
    assert (restored["w"] == whole(value)).all()
    assert (restored["b"] == value).all()
    assert restored["step"] == value
    assert restored["layers"][3]["x"].tolist() == [value / 2] * 2
    assert (await (await tstore.open(url, "r")).verify()).ok


async def outcomes(calls: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


def raised(results: Sequence[Any], kind: type[TStoreError]) -> TStoreError:
    """Return the error that all of the calls raised."""
    assert {type(e) for e in results} == {kind}, results
    return results[0]  # type: ignore[no-any-return]


def absent(results: Sequence[Any]) -> set[int]:
    """Return the hosts that all errors name; a host that gave up early may also name a late one."""
    assert {type(e) for e in results} == {DeadlineExceeded}, results
    assert all(str(e.absent) in str(e) for e in results)
    return set.intersection(*[set(e.absent) for e in results])


async def test_eight_hosts_make_one_commit(url: str) -> None:
    stores = [await tstore.open(url) for _ in range(HOSTS)]
    assert await asyncio.gather(*[save(s, h, 5) for h, s in enumerate(stores)]) == [1] * HOSTS
    assert [(c.version, c.tag) async for c in stores[0].history()] == [(1, "step/1")]
    await check(url, 5)
    assert await asyncio.gather(*[save(s, h, 6, step=2) for h, s in enumerate(stores)]) == [2] * HOSTS
    await check(url, 6, 2)
    await check(url, 5, 1)


async def test_nothing_is_visible_before_the_last_host(url: str) -> None:
    waiting = [asyncio.create_task(save(url, h)) for h in range(1, HOSTS)]
    store = await tstore.open(url)
    await until(lambda: delivered(store, HOSTS - 1), *waiting)
    assert (await store.snapshot()).version == 0
    assert await tstore.steps(store) == []
    with pytest.raises(NotFound):
        await tstore.restore(store)
    assert await save(url, 0) == 1
    assert await asyncio.gather(*waiting) == [1] * (HOSTS - 1)


async def test_a_host_delivers_without_waiting_and_the_last_one_commits(url: str) -> None:
    async with await tstore.open(url) as store:
        txs = [store.transaction(name="n", host=host, hosts=3, attempt="a") for host in range(3)]
        for host, tx in enumerate(txs):
            w = await tx.create_array(f"w{host}", (2,), "i4")
            await w.write([host, host])
        assert await txs[2].deliver() is None
        assert "delivered" in repr(txs[2])
        await txs[2].abort()  # does nothing: the transaction has ended
        with pytest.raises(Misuse, match="delivered"):
            await txs[2].commit()
        assert await txs[0].deliver() is None
        assert (await store.snapshot()).version == 0
        assert await txs[1].deliver() == 1
        assert (await store.snapshot()).paths() == ["w0", "w1", "w2"]
        async with store.transaction() as alone:
            with pytest.raises(Misuse, match="one host"):
                await alone.deliver()


async def test_a_commit_is_validated_from_the_lowest_base_of_its_hosts(url: str) -> None:
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("a", (4,), "int8", (2,))).write(0)
    early, late = [store.transaction(name="t", host=host, hosts=2, attempt="a") for host in (1, 0)]
    await (await early.array("a"))[2:4].write(1)
    async with store.transaction() as tx:
        await (await tx.array("a")).write(9)  # conflicts with the host that has begun before
    await (await late.array("a"))[0:2].write(1)
    assert await early.deliver() is None
    with pytest.raises(Conflict):
        await late.commit()
    assert (await (await (await store.snapshot()).array("a")).read()).tolist() == [9] * 4


async def test_an_absent_host_is_named(url: str) -> None:
    results = await outcomes([save(url, h, timeout=0.3) for h in range(HOSTS) if h not in (2, 5)])
    assert absent(results) == {2, 5}
    assert await tstore.steps(url) == []
    # the absent hosts may still deliver: the last one commits
    assert await outcomes([save(url, h) for h in (2, 5)]) == [1, 1]
    await check(url, 0)
    assert await save(url, 3) == 1  # a host that repeats its call gets the same version


@pytest.mark.parametrize("size", [3, 300_000])
async def test_a_host_that_gave_up_delivers_the_same_values_again(url: str, size: int) -> None:
    """Large values are then in other packs, and another commit may have come between."""
    trees = [{"own": tstore.PerHost(np.full(size, h)), **dict.fromkeys("abc", np.ones(size))} for h in range(2)]
    for other in "xy":
        with pytest.raises(DeadlineExceeded):
            await save(url, 0, tree=trees[0], hosts=2, timeout=0.01)
        async with (await tstore.open(url)).transaction() as tx:
            await tx.create_array(other, (0,), "i1")
    with pytest.raises(Inconsistent, match="already delivered a different fragment"):
        await save(url, 0, tree=trees[0] | {"own": trees[1]["own"]}, hosts=2, timeout=0.01)
    last = [save(url, h, tree=trees[h], hosts=2) for h in range(2)]
    [version] = set(await asyncio.gather(*last))
    restored = await tstore.restore(url, per_host="all")
    assert [own.tolist() for own in restored["own"]] == [[h] * size for h in range(2)]
    assert (await (await tstore.open(url, "r")).verify()).ok
    assert await asyncio.gather(*[save(url, h, tree=trees[h], hosts=2) for h in range(2)]) == [version] * 2


async def test_a_cancelled_wait_ends_at_once(url: str) -> None:
    waiting = asyncio.create_task(save(url, 1, timeout=300))
    store = await tstore.open(url)
    await until(lambda: store.log.storage.list("txn/"), waiting)
    waiting.cancel()
    done, _ = await asyncio.wait([waiting], timeout=60)
    assert done
    assert waiting.cancelled()


async def test_attempts_of_one_step_are_never_mixed(url: str) -> None:
    """Four hosts of the first start and four of the second never make a checkpoint."""
    first = await outcomes([save(url, h, 1, attempt="job.0", timeout=0.2) for h in range(4)])
    second = await outcomes([save(url, h, 2, attempt="job.1", timeout=0.2) for h in range(4, HOSTS)])
    assert absent(first) == {4, 5, 6, 7}
    assert absent(second) == {0, 1, 2, 3}
    assert await tstore.steps(url) == []
    rest = [save(url, h, 2, attempt="job.1") for h in range(4)]
    assert await outcomes(rest) == [1] * 4
    await check(url, 2)
    late = await outcomes([save(url, h, 1, attempt="job.0", timeout=60) for h in range(4, HOSTS)])
    raised(late, AlreadyExists)
    await check(url, 2)


async def test_only_one_of_two_complete_attempts_commits(url: str) -> None:
    await tstore.open(url)
    calls = [save(url, h, a, attempt=f"job.{a}") for h in range(HOSTS) for a in (1, 2)]
    results = await outcomes(calls)
    won = [f for f in results if f == 1]
    assert len(won) == HOSTS
    assert {type(f) for f in results if not isinstance(f, int)} <= {tstore.errors.Conflict, AlreadyExists}
    winner = {i % 2 for i, f in enumerate(results) if f == 1}
    assert len(winner) == 1
    await check(url, winner.pop() + 1)
    assert len([c async for c in (await tstore.open(url)).history()]) == 1


async def test_a_preempted_host_that_wakes_up_late_cannot_damage_the_next_attempt(url: str) -> None:
    """The old attempt lacks only its record when the new one commits."""
    store, faults = await open_faulty(url)
    others = await outcomes([save(url, h, 1, attempt="old", timeout=0.1) for h in range(1, HOSTS)])
    raised(others, DeadlineExceeded)
    gate = faults.hold("create", "commits/*")
    late = asyncio.create_task(save(store, 0, 1, attempt="old"))
    await gate.reached()
    assert await asyncio.gather(*[save(url, h, 2, attempt="new") for h in range(HOSTS)]) == [1] * HOSTS
    gate.release()
    with pytest.raises(tstore.errors.AlreadyExists, match="step 1 is already saved, as version 1"):
        await late
    await check(url, 2)
    assert len([c async for c in (await tstore.open(url)).history()]) == 1


async def test_a_second_different_fragment_of_a_host_is_refused(url: str) -> None:
    store = await tstore.open(url)

    async def part(value: int, *, end: bool = True) -> Any:
        tx = store.transaction(name="n", host=0, hosts=2, attempt="a")
        w = await tx.create_array("w", (2,), "int8", (1,))
        await w[0].write(value)
        return await tx.commit(timeout=0.05)

    with pytest.raises(DeadlineExceeded):
        await part(1)
    with pytest.raises(Inconsistent, match="twice"):
        await part(2)
    with pytest.raises((DeadlineExceeded, Inconsistent)):
        await part(1)


async def test_another_number_of_hosts_is_refused(url: str) -> None:
    raised(await outcomes([save(url, 0, timeout=0.1)]), DeadlineExceeded)
    with pytest.raises(Inconsistent, match="has hosts=4 here, but another host passed hosts="):
        await save(url, 1, hosts=4)


@pytest.mark.parametrize(("host", "hosts"), [(8, 8), (-1, 8), (0, 0), (1, 1), (0, -2)])
async def test_a_host_out_of_range_is_refused(url: str, host: int, hosts: int) -> None:
    with pytest.raises(InvalidArgument, match="hosts"):
        await tstore.save(url, {"x": np.zeros(3)}, 1, host=host, hosts=hosts, attempt="a")


async def test_similar_attempts_and_names_are_distinct(url: str) -> None:
    """The folder of a cooperative transaction begins with its readable name, and differs for similar names."""
    store = await tstore.open(url)
    long = "x" * 60
    alike = [("n", "a/0"), ("n", "a.0"), ("n", long), ("n", long + "y"), ("n/a", "0"), ("n-a", "0"), ("n.a", "0")]
    ids = {store.transaction(name=n, host=0, hosts=2, attempt=a).id for n, a in alike}
    assert len(ids) == len(alike)
    assert ids == {store.transaction(name=n, host=1, hosts=2, attempt=a).id for n, a in alike}


# ---- hosts that disagree


async def test_a_repeated_save_of_an_attempt_is_compared_with_what_it_saved(url: str) -> None:
    """Another start of the job with the same attempt must not be told that its values are saved."""
    both = dict.fromkeys("abcdef", np.zeros(2))
    again = {"hosts": 2, "metrics": {"loss": np.nan}}
    for _ in range(2):
        calls = [save(url, h, tree=tree(h, 5, 2) | {"both": both}, **again) for h in range(2)]
        assert await asyncio.gather(*calls) == [1, 1]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"tree": tree(1, 5, 2) | {"both": both, "w": tree(1, 6, 2)["w"]}}, "values of this host"),
        ({"tree": tree(1, 5, 2) | {"step": 6}}, "structure of the tree"),
        ({"tree": tree(1, 5, 2) | {"more": np.zeros(3)}}, "more"),
        ({"tree": tree(1, 5, 2) | {"b": np.zeros(4)}}, "b"),
        *(({"tree": tree(1, 5, 2) | {"both": {**both, name: np.ones(2)}}}, f"both/{name}") for name in both),
        ({"metrics": {"loss": 0.5}}, "the metrics"),
    ]
    for change, told in changes:
        with pytest.raises(Inconsistent, match=r"already saved step 1, as version 1.*another attempt=") as caught:
            await save(url, 1, 5, **again | change)
        assert any(told in path for path in caught.value.paths)
    store = await tstore.open(url)
    assert (await store.snapshot()).version == 1
    assert (await store.verify()).ok


async def test_hosts_that_pass_different_metrics_are_told(url: str) -> None:
    metrics = [{"loss": 0.5, "nan": np.nan}, {"nan": np.nan, "loss": 0.5}, {"loss": 0.25, "nan": np.nan}, None]
    for step, others in enumerate((metrics[2], metrics[3])):
        calls = [save(url, h, step=step, metrics=m, hosts=2) for h, m in enumerate((metrics[0], others))]
        error = raised(await outcomes(calls), Inconsistent)
        assert "hosts [1] differ from host 0 in the metrics" in str(error)
        other = None if others is None else others["loss"]
        assert error.paths[0] == f"loss: 0.5 on host 0, {other} on host 1"
        assert len(error.paths) == (2 if others is None else 1)
    calls = [save(url, h, step=9, metrics=m, hosts=2) for h, m in enumerate(metrics[:2])]
    assert await asyncio.gather(*calls) == [1, 1]


def odd_one(**change: Any) -> list[dict[str, Any]]:
    """Return the trees of all hosts, of which host 3 has a different one."""
    trees = [tree(h) for h in range(HOSTS)]
    trees[3].update(change)
    return trees


def other_rows(rows: int) -> dict[str, Any]:
    rows_saved: tstore.Shards = tree(3, rows=rows)["w"]
    return {"w": rows_saved}


DISAGREE: dict[str, tuple[dict[str, Any], str]] = {
    "shape": (other_rows(32), "w: host 0 has int32[16, 6]"),
    "dtype": (
        {"w": tstore.Shards((16, 6), "int64", [((slice(6, 8), slice(0, 6)), np.zeros((2, 6), "i8"))])},
        "host 3 has int64[16, 6]",
    ),
    "chunks": (
        {
            "w": tstore.Shards(
                (16, 6), "int32", [((slice(6, 8), slice(0, 6)), np.zeros((2, 6), "i4"))], shard_shape=(1, 6)
            )
        },
        "chunks=[1, 6]",
    ),
    "shape of what is the same everywhere": ({"b": np.zeros(4, int)}, "b: host 0 has int64[3]"),
}


@pytest.mark.usefixtures("prompt")
@pytest.mark.parametrize("what", DISAGREE)
async def test_hosts_that_disagree_on_an_array_are_named(url: str, what: str) -> None:
    change, text = DISAGREE[what]
    calls = [save(url, h, tree=t, timeout=60) for h, t in enumerate(odd_one(**change))]
    error = raised(await outcomes(calls), Inconsistent)
    assert isinstance(error, Inconsistent)
    assert text in str(error)
    assert "host 3" in str(error)
    assert error.paths
    assert await tstore.steps(url) == []


@pytest.mark.usefixtures("prompt")
@pytest.mark.parametrize("change", [{"more": np.zeros(2)}, {"more": {}}, {"b": [np.zeros(3, int)]}], ids=str)
async def test_hosts_with_different_structures_are_named(url: str, change: dict[str, Any]) -> None:
    calls = [save(url, h, tree=t, timeout=60) for h, t in enumerate(odd_one(**change))]
    error = raised(await outcomes(calls), Inconsistent)
    assert "hosts [3]" in str(error)
    assert "structure" in str(error)
    assert await tstore.steps(url) == []


REPLICATED: dict[str, Any] = {
    "an array": np.arange(4),
    "a long array": np.ones(1 << 19),
    "a strided array": np.ones((1 << 10, 300))[:, ::2],
    "no axes": np.array(1.5),
    "a NumPy scalar": np.float32(1),
    "structured": np.array([(1, 2.5)], [("a", "u1"), ("b", "f8")]),
    "nested": np.ones(3, [("a", [("b", "f8")])]),
    "bfloat16": np.ones(3, ml_dtypes.bfloat16),
    "texts": np.array(["a", "bcd"]),
    "a bool": True,
    "an int": 5,
    "text": "PCG64",
    "bytes": b"\xff",
}
"""Values that every host must pass alike, by kind."""


def changed(value: Any) -> Any:
    """Return another value of the same type, shape and dtype."""
    if isinstance(value, np.generic | np.ndarray):
        other = np.array(value)
        other[...] = np.zeros((), other.dtype)
        return other[()] if isinstance(value, np.generic) else other
    return type(value)() if value else value


@pytest.mark.usefixtures("prompt")
async def test_values_that_differ_between_hosts_are_refused_with_their_paths() -> None:
    """Only one of them would be stored, and every host would restore it."""
    url = "memory://differing"
    trees = [{"same": REPLICATED, "rng": {**REPLICATED, 3: [value, 0]}} for value in (1, 1, 2)]
    await asyncio.gather(*[save(url, h, tree=trees[0], hosts=3) for h in range(3)])
    trees[2]["rng"] |= {kind: changed(value) for kind, value in REPLICATED.items()}
    calls = [save(url, h, step=2, tree=tree, hosts=3) for h, tree in enumerate(trees)]
    error = raised(await outcomes(calls), Inconsistent)
    assert isinstance(error, Inconsistent)
    paths = sorted(f"rng/{kind}" for kind in (*REPLICATED, "3/0"))
    assert sorted(error.paths) == [f"{path}: hosts [2] differ from host 0" for path in paths]
    assert "make them equal on all hosts, or pass tstore.PerHost(value)" in str(error)
    assert await tstore.steps(url) == [1]


@pytest.mark.usefixtures("prompt", "short_blocks")
async def test_values_that_differ_between_blocks_of_hosts_are_named() -> None:
    calls = [save("memory://blocks", h, tree={"x": h // 10}, hosts=11) for h in range(11)]
    assert "x: hosts [10] differ from host 0" in str(raised(await outcomes(calls), Inconsistent))


@pytest.mark.usefixtures("prompt")
@pytest.mark.parametrize(("known", "differ"), [([0, 3], True), ([1, 7], True), ([3, 5], True), ([3, 5], False)])
async def test_values_that_some_hosts_lack_are_compared_between_blocks(known: list[int], differ: bool) -> None:
    """Eight hosts in blocks of two, which are merged at three levels; two of them know a checksum of "x"."""
    store = await tstore.open(f"memory://{uuid.uuid4()}", "x")

    async def host(number: int) -> int:
        tx = store.transaction(name="n", host=number, hosts=8, attempt="a")
        await tx.create_group(f"g{number}")
        tx.staging.replicated = {"x": bytes([number * differ])} if number in known else {}
        return await tx.commit(20)

    with override_constants(FAN_IN=2):
        results = await outcomes([host(number) for number in range(8)])
    if differ:
        assert "x: hosts [" in str(raised(results, Inconsistent))
    else:
        assert results == [1] * 8


def test_checksums_of_many_values_are_combined_in_the_largest_groups() -> None:
    names = [f"{n:0200}" for n in range(1500)]
    trees: list[Any] = [{"few": {"a": i, "b": np.array(7)}, "many": dict.fromkeys(names, i)} for i in (0, 1)]
    one, other = (checksums(*flatten(tree)) for tree in trees)
    assert list(one) == list(other) == ["few/b", "few/a", "many"]
    assert [path for path in one if one[path] != other[path]] == ["few/a", "many"]
    assert len(checksums(*flatten({"fewer": dict.fromkeys(names[:1000], 0)}))) == 1000


@pytest.mark.parametrize("size", [5, 1 << 17])
def test_values_are_equal_in_any_byte_order(size: int) -> None:
    values = np.ones(size, [("a", "i1"), ("b", [("c", "f8")])])
    swapped = values.astype([("a", "i1"), ("b", [("c", ">f8")])])
    other = values.copy()
    other["b"]["c"][-1] = 2
    for arrays in ((values, swapped, other), (x["b"]["c"] for x in (values, swapped, other))):
        one, same, another = (checksums(("array", "x"), {"x": x}) for x in arrays)
        assert same == one != another


def test_values_that_the_first_host_lacks_are_compared_among_the_others() -> None:
    found = [([0], {}), ([1, 2], {"x": b"1"}), ([3], {"x": b"2"})]
    with pytest.raises(Inconsistent, match=r"x: hosts \[3\] differ from host 1"):
        check_replicated(found, "")
    check_replicated(found[:2], "")


async def test_a_host_alone_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tstore.checkpoint.replicated.checksums", None)
    assert await tstore.save("memory://a-host-alone", {"x": 1, "y": np.ones(2)}, step=1) == 1


@pytest.mark.usefixtures("prompt")
async def test_hosts_with_different_durabilities_are_named(url: str) -> None:
    calls = [save(url, h, timeout=60, durability="none" if h == 3 else "fsync") for h in range(HOSTS)]
    error = raised(await outcomes(calls), Inconsistent)
    assert "hosts [3]" in str(error)
    assert "durability" in str(error)
    assert await tstore.steps(url) == []


def rows_of(*ranges: tuple[int, int]) -> tstore.Shards:
    parts = [((slice(a, b), slice(0, 6)), np.zeros((b - a, 6), "i4")) for a, b in ranges]
    return tstore.Shards((16, 6), "int32", parts, shard_shape=(2, 6))


@pytest.mark.usefixtures("prompt")
async def test_a_chunk_that_two_hosts_wrote_is_refused(url: str) -> None:
    trees = odd_one(w=rows_of((6, 8), (14, 16)))
    error = raised(await outcomes([save(url, h, tree=t, timeout=60) for h, t in enumerate(trees)]), Inconsistent)
    assert "w: chunks at [14:16, 0:6]" in str(error)
    assert await tstore.steps(url) == []


@pytest.mark.usefixtures("prompt")
async def test_a_chunk_that_no_host_wrote_is_refused(url: str) -> None:
    trees = odd_one(w=rows_of())
    error = raised(await outcomes([save(url, h, tree=t, timeout=60) for h, t in enumerate(trees)]), Inconsistent)
    assert "w: 1 of 8 chunks, the first at [6:8, 0:6]" in str(error)
    assert await tstore.steps(url) == []


@pytest.mark.usefixtures("prompt")
async def test_different_tags_of_hosts_are_refused(url: str) -> None:
    store = await tstore.open(url)

    async def host(number: int) -> int:
        tx = store.transaction(name="n", host=number, hosts=2, attempt="a", tag=f"tag{number}")
        await (await tx.create_array(f"x{number}", (2,), "int8")).write(1)
        return await tx.commit(timeout=60)

    raised(await outcomes([host(0), host(1)]), Inconsistent)
    assert await store.tags() == {}


# ---- finishing


async def test_a_late_finisher_finds_the_commit_and_makes_no_second_one(url: str) -> None:
    slow, faults = await open_faulty(url)
    gate = faults.hold("create", "commits/*")
    others = [asyncio.create_task(save(url, h, 4)) for h in range(1, HOSTS)]
    late = asyncio.create_task(save(slow, 0, 4))
    assert await asyncio.gather(*others) == [1] * (HOSTS - 1)
    store = await tstore.open(url)
    async with store.transaction("between") as tx:
        await (await tx.create_array("z", (1,), "int8")).write(1)
    gate.release()
    assert await late == 1
    assert [c.message async for c in store.history()] == ["between", ""]


async def test_every_host_may_try_to_finish(url: str) -> None:
    """All hosts see that all fragments exist at the same moment: their first list is held back until then."""
    opened = [await open_faulty(url) for _ in range(HOSTS)]
    gates = [faults.hold("list", "*part-000") for _, faults in opened]
    calls = [asyncio.create_task(save(s, h, 4)) for h, (s, _) in enumerate(opened)]
    creates = [faults.hold("create", "commits/*") for _, faults in opened]
    for some in (gates, creates):
        for gate in some:
            await gate.reached()
        for gate in some:
            gate.release()
    assert await asyncio.gather(*calls) == [1] * HOSTS
    assert len([c async for c in opened[0][0].history()]) == 1
    await check(url, 4)


async def test_a_lost_reply_to_a_fragment_can_be_repeated(url: str) -> None:
    store, faults = await open_faulty(url)
    others = [asyncio.create_task(save(url, h, 4)) for h in range(1, HOSTS)]
    faults.lose_reply("create", "*/part-*")
    [first] = await outcomes([save(store, 0, 4)])
    assert first == 1 or isinstance(first, tstore.errors.CommitOutcomeUnknown)
    assert await asyncio.gather(*others) == [1] * (HOSTS - 1)
    assert await save(store, 0, 4) == 1
    await check(url, 4)


async def test_a_host_that_fails_leaves_nothing_visible(url: str) -> None:
    store, faults = await open_faulty(url)
    faults.fail("create", "*/part-00000-*", error=StorageFull)
    results = await outcomes([save(store if h == 0 else url, h, timeout=0.5) for h in range(HOSTS)])
    assert isinstance(results[0], StorageFull)
    assert absent(results[1:]) == {0}
    assert await tstore.steps(url) == []


async def test_hosts_of_a_group_may_write_regions_of_an_existing_array(url: str) -> None:
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("w", (8,), "int8", (2,))).write(0)

    async def host(number: int) -> int:
        tx = store.transaction(name="update", host=number, hosts=4, attempt="a")
        await (await tx.array("w"))[2 * number : 2 * number + 2 - number % 2].write(number + 1)
        return await tx.commit(timeout=60)

    assert await asyncio.gather(*[host(h) for h in range(4)]) == [2] * 4
    values = await (await (await store.snapshot()).array("w")).read()
    assert values.tolist() == [1, 1, 2, 0, 3, 3, 4, 0]


async def test_a_commit_between_the_bases_of_two_hosts_is_a_conflict(url: str) -> None:
    """Host 0 read the array before that commit, host 1 after it."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("w", (8,), "int8", (4,))).write(0)

    async def host(number: int, timeout: float) -> int:
        tx = store.transaction(name="update", host=number, hosts=2, attempt="a")
        await (await tx.array("w"))[4 * number + 1].write(number + 1)
        return await tx.commit(timeout=timeout)

    with pytest.raises(DeadlineExceeded):
        await host(0, 0.05)
    async with store.transaction() as tx:
        await (await tx.array("w"))[0].write(9)
    with pytest.raises(tstore.errors.Conflict) as caught:
        await host(1, 10)
    assert caught.value.paths == ["w"]
    values = await (await (await store.snapshot()).array("w")).read()
    assert values.tolist() == [9, 0, 0, 0, 0, 0, 0, 0]


async def test_values_appended_before_the_hosts_commit_are_not_lost(url: str) -> None:
    """No chunk is written by both, but the hosts write to the shorter array."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("w", (8,), "int8", (4,))).write(0)
    hosts = [store.transaction(name="update", host=number, hosts=2, attempt="a") for number in range(2)]
    for number, tx in enumerate(hosts):
        await (await tx.array("w"))[4 * number : 4 * number + 4].write(number + 1)
    async with store.transaction() as tx:
        await (await tx.array("w")).append(np.array([9], "int8"))
    for error in await asyncio.gather(*[tx.commit(timeout=60) for tx in hosts], return_exceptions=True):
        assert isinstance(error, tstore.errors.Conflict)
        assert error.paths == ["w"]
    values = await (await (await store.snapshot()).array("w")).read()
    assert values.tolist() == [0] * 8 + [9]


# ---- real processes

HOST = """
import os, signal
import numpy as np
import tstore.sync as tstore
url, host, hosts, value, attempt, timeout, killed = arguments
lines = 16 // hosts
mine = slice(host * lines, (host + 1) * lines)
w = tstore.Shards((16, 6), "int32", [((mine, slice(0, 6)), np.full((lines, 6), value * 100 + host, "i4"))])
tree = {"w": w, "b": np.full(3, value), "step": value, "layers": {3: {"x": np.full(2, value / 2)}}}
if host == killed:  # after its fragment
    async def die(self, level, block):
        os.kill(os.getpid(), signal.SIGKILL)
    from tstore.core.transactions.fragments import FragmentTree
    FragmentTree._present_members = die
ready()
try:
    told = tstore.save(url, tree, 1, host=host, hosts=hosts, attempt=attempt, timeout=timeout)
except tstore.errors.TStoreError as error:
    told = " ".join([type(error).__name__, *map(str, getattr(error, "absent", []))])
os.write(out, str(told).encode())
"""


def saved_by(
    hosts: list[int], url: Path, value: int, attempt: str, timeout: float = 30, killed: int = -1
) -> dict[int, str]:
    """Save in a process for each host; return the version that each reports, or the error and the absent hosts."""
    outs = {host: url.parent / f"{attempt}-{host}" for host in hosts}
    with forks.forks(HOST) as server:
        pids = {h: server.start(outs[h], url, h, HOSTS, value, attempt, timeout, killed) for h in hosts}
        server.release(len(hosts))
        statuses = {host: server.wait(pid) for host, pid in pids.items()}
    assert statuses == {host: -signal.SIGKILL if host == killed else 0 for host in hosts}
    return {host: out.read_text() for host, out in outs.items()}


def test_a_group_of_processes_survives_a_killed_host(tmp_path: Path) -> None:
    url = tmp_path / "s"
    results = saved_by([h for h in range(HOSTS) if h != 6], url, 1, "job.0", timeout=1.5)
    assert {f.split()[0] for f in results.values()} == {"DeadlineExceeded"}
    assert set.intersection(*[set(f.split()[1:]) for f in results.values()]) == {"6"}
    assert asyncio.run(tstore.steps(url)) == []
    # a restarted job; one host dies by SIGKILL after its fragment, and the others finish without it
    results = saved_by(list(range(HOSTS)), url, 2, "job.1", killed=4)
    assert {h: f for h, f in results.items() if h != 4} == {h: "1" for h in range(HOSTS) if h != 4}
    asyncio.run(check(str(url), 2))


@pytest.mark.parametrize("kept", range(3))
async def test_deletions_of_every_host_are_applied(url: str, kept: int) -> None:
    store = await tstore.open(url)
    async with store.transaction() as tx:
        for path in ("old/0", "old/1", "old/2", "stays"):
            await (await tx.create_array(path, (1,), "i4")).write(1)

    async def host(number: int) -> int:
        tx = store.transaction(name="n", host=number, hosts=3, attempt="a")
        await (await tx.create_array(f"new/{number}", (1,), "i4")).write(2)
        if number != kept:
            await tx.delete(f"old/{number}")
        return await tx.commit(20)

    assert await asyncio.gather(*[host(i) for i in range(3)]) == [2] * 3
    assert (await store.snapshot()).paths() == ["new/0", "new/1", "new/2", f"old/{kept}", "stays"]


DISAGREEING: dict[str, tuple[str, str]] = {  # what the hosts do, and what the error says
    "one created anew what the other wrote into": ("anew", "created or resized it, host {writer} did not"),
    "one deleted what the other wrote into": ("delete old/w", "deleted old/w, host {writer} wrote into it"),
    "one deleted a group that the other wrote into": ("delete old", "deleted old, host {writer} wrote into it"),
    "one created an array below that of the other": ("array", "below new, an array of host {writer}"),
    "one created a group below an array of the other": ("group", "below new, an array of host {writer}"),
}


@pytest.mark.parametrize(("hosts", "other", "writer"), [(2, 0, 1), (2, 1, 0), (11, 10, 0)])
@pytest.mark.parametrize("what", DISAGREEING)
async def test_conflicting_changes_of_two_hosts_are_refused(
    url: str, what: str, hosts: int, other: int, writer: int, request: pytest.FixtureRequest
) -> None:
    """With any order of the hosts, also if only their merged fragments are compared."""
    request.getfixturevalue("prompt" if hosts == 2 else "short_blocks")  # of eleven, all would do this at once
    act, text = DISAGREEING[what]
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("old/w", (8,), "f8", (2,))).write(np.arange(8) + 100)

    async def host(number: int) -> int:
        tx = store.transaction(name="n", host=number, hosts=hosts, attempt="a", durability="none")
        if number == other:
            if act.startswith("delete"):
                await tx.delete(act.removeprefix("delete "))
            elif act == "anew":
                await tx.delete("old/w")
                await (await tx.create_array("old/w", (8,), "f8", (2,)))[:2].write(1)
            elif act == "array":
                await (await tx.create_array("new/below", (1,), "f8")).write(1)
            else:
                await tx.create_group("new/below", {"a": 1})
        elif number == writer:
            if act in ("array", "group"):
                await (await tx.create_array("new", (1,), "f8")).write(1)
            else:
                await (await tx.array("old/w"))[3].write(7)
        return await tx.commit(20)

    error = raised(await outcomes([host(i) for i in range(hosts)]), Inconsistent)
    assert text.format(writer=writer) in str(error)
    assert (await store.snapshot()).version == 1


async def test_hosts_that_all_resize_an_array_are_told_to_resize_it_before(tmp_path: Path) -> None:
    store = await tstore.open(tmp_path)
    async with store.transaction() as tx:
        await (await tx.create_array("w", (4,), "i8", (2,))).write(1)
    transactions = [store.transaction(name="grow", host=host, hosts=2, attempt="a") for host in range(2)]
    for tx in transactions:
        await (await tx.array("w")).resize((6,))
    results = await asyncio.gather(*[tx.commit() for tx in transactions], return_exceptions=True)
    for error in results:
        assert isinstance(error, Inconsistent)
        assert "to resize an array, do so in an earlier transaction" in str(error)
