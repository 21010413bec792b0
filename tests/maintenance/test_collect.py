"""Garbage collection: what expires, what stays, and that nothing needed is removed under concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
import tstore.sync as blocking
from tests.support.held_commit import held_commit
from tests.support.http_server import ADMIN, everybody
from tests.support.thresholds import Thresholds
from tstore import Keep
from tstore.core import tags
from tstore.core.format.layout import commit_key
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.storage.connect import connect
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Buffers, Durability, PutMode
from tstore.core.storage.remote import as_remote
from tstore.core.storage.wrapper import Wrapper
from tstore.errors import (
    Conflict,
    Corrupt,
    Denied,
    InvalidArgument,
    NotFound,
    SnapshotExpired,
    TStoreError,
    Unavailable,
)
from tstore.lab.conformance.faults import Faults, open_faulty
from tstore.service.server import Server

NEVER = timedelta(days=10_000)
NOW = timedelta(0)
FROZEN = np.random.default_rng(0).random(2000)


class Killed(TStoreError):
    """Simulates the death of the process; tstore does not handle it."""


def tree_of(step: int) -> dict[str, Any]:
    """Return 16 kB that all steps share and 16 kB of the step's own."""
    return {"frozen": FROZEN, "moving": np.random.default_rng(step + 1).random(2000)}


async def saved(url: str, steps: int, metric: Callable[[int], float] = float) -> tstore.Store:
    store = await tstore.open(url)
    for step in range(steps):
        await tstore.save(store, tree_of(step), step, metrics={"loss": metric(step)})
    return store


async def check_step(store: tstore.Store, step: int) -> None:
    tree = await tstore.restore(store, step)
    for name, values in tree_of(step).items():
        assert np.array_equal(tree[name], values)


async def check_whole(store: tstore.Store) -> None:
    """Check that another process finds no fault and reads every step."""
    other = await tstore.open(store.url, "r")
    report = await other.verify()
    assert report.ok, report.faults
    for step in await tstore.steps(other):
        await check_step(other, step)


def wide(value: float) -> dict[str, Any]:
    """Return enough arrays for a separate manifest object."""
    return {f"a{i}": np.full(3, float(value)) for i in range(400)}


async def objects(url: str) -> set[str]:
    return set(await connect(url).list("txn/"))


async def needed(store: tstore.Store) -> set[str]:
    """Return the objects that living versions reference, if every commit replaces the whole tree."""
    packs = set()
    async for commit in store.history():
        if not commit.expired:
            tree = (await store.snapshot(commit.version)).tree
            packs |= {
                p for n in tree.nodes.values() for p in n.chunks.with_used_packs().packs if isinstance(p, str)
            }
            refs = (await store.log.reader.record(commit.version)).manifests
            packs |= {m.key for m in refs if isinstance(m, ObjectRef)}
    return packs


# ---- retention


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        (Keep(last=1), [9]),
        (Keep(last=3), [7, 8, 9]),
        (Keep(last=99), list(range(10))),
        (Keep(every=4), [0, 4, 8, 9]),
        (Keep(best=(2, "loss")), [4, 5, 9]),
        (Keep(best=(2, "loss", "min")), [4, 5, 9]),
        (Keep(best=(2, "loss", "max")), [0, 9]),
        (Keep(tags=("step/2", "step/6")), [2, 6, 9]),
        (Keep(newer_than=timedelta(hours=1)), list(range(10))),
        (Keep(newer_than=timedelta(0)), [9]),
        (Keep(last=2, every=6, best=(1, "loss"), tags=("step/1",)), [0, 1, 4, 6, 8, 9]),
    ],
)
async def test_rules(keep: Keep, steps: list[int]) -> None:
    """The loss is least at step 4, then at 5."""
    store = await saved(f"memory://{uuid.uuid4()}", 10, lambda step: abs(step - 4.4))
    would = await store.collect(keep, dry_run=True)
    assert len(await objects(store.url)) == 10
    report = await store.collect(keep)
    assert await tstore.steps(store) == steps
    assert report.versions == would.versions == [s + 1 for s in range(10) if s not in steps]
    assert (report.bytes, report.objects, report.tags) == (would.bytes, would.objects, would.tags)
    assert (report.version, would.version) == (None if len(steps) == 10 else 11, None)
    await check_whole(store)
    assert await objects(store.url) == await needed(store)


async def test_removed_bytes_are_counted(url: str) -> None:
    store = await saved(url, 5)
    before = sum([await connect(url).size(k) or 0 for k in await objects(url)])
    report = await store.collect(Keep(last=2))
    after = sum([await connect(url).size(k) or 0 for k in await objects(url)])
    assert before - after == report.bytes == 2 * 16_000  # the frozen layer lies beside the moving one of step 0
    assert report.versions == [1, 2, 3]
    again = await store.collect(Keep(last=2))
    assert again.version is None
    assert (again.versions, again.objects, again.bytes) == ([], 0, 0)


async def test_untagged_versions_expire_and_the_newest_never_does(url: str) -> None:
    store = await saved(url, 2)
    async with store.transaction() as tx:
        await (await tx.array("moving")).write(1.0)
    assert (await store.collect(Keep(last=1))).versions == [1]
    async with store.transaction(tag="other") as tx:
        await (await tx.array("moving"))[:10].write(2.0)
    assert (await store.collect(Keep(last=1))).versions == [3]
    values = await (await (await store.snapshot()).array("moving")).read()
    assert (values == np.repeat([2.0, 1.0], [10, 1990])).all()
    assert (await store.verify()).ok
    await check_step(store, 1)


async def test_a_version_whose_tag_was_dropped_expires(url: str) -> None:
    store = await tstore.open(url)
    for step in range(3):
        await tstore.save(store, {"w": np.full(9, step)}, step)
    async with store.transaction(drop_tag="step/2"):
        pass
    assert await tstore.steps(store) == [0, 1]
    report = await store.collect(Keep(last=1))
    assert (report.versions, report.tags) == ([1, 3], ["step/0"])
    assert await tstore.steps(store) == [1]
    assert await tstore.save(store, {"w": np.full(9, 7)}, 2) == 6


async def test_a_tag_keeps_the_version_that_it_names_now(url: str) -> None:
    store = await tstore.open(url)
    for value, how in enumerate(({"tag": "best"}, {"move_tag": "best"}, {})):
        async with store.transaction(**how) as tx:
            await tx.staging.replace_all(b"")
            await (await tx.create_array("x", (2000,), "f8")).write(float(value))
    report = await store.collect(Keep(tags=("best",)))
    assert (report.versions, report.tags) == ([1], [])
    assert await store.tags() == {"best": 2}


async def test_metrics_that_can_not_be_compared_do_not_count(url: str) -> None:
    store = await saved(url, 4, lambda step: float("nan") if step == 1 else -step)
    await tstore.save(store, tree_of(9), 9)
    await store.collect(Keep(best=(1, "loss", "max")))
    assert await tstore.steps(store) == [0, 9]


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"last": 0},
        {"last": 1.5},
        {"every": 0},
        {"every": True},
        {"best": (0, "loss")},
        {"best": (1, "loss", "least")},
        {"best": (1,)},
        {"newer_than": timedelta(days=-1)},
        {"tags": "step/1"},
    ],
)
def test_invalid_rules_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="Keep"):
        Keep(**wrong)


async def test_misuse(url: str) -> None:
    store = await saved(url, 2)
    for keep in (Keep(tags=("step/7",)), Keep(best=(1, "los"))):
        with pytest.raises(NotFound, match="nothing was collected"):
            await store.collect(keep)
    with pytest.raises(InvalidArgument):
        await store.collect(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        await store.collect(abandoned=timedelta(-1))
    reader = await tstore.open(url, "r")
    with pytest.raises(Denied, match="mode='r'"):
        await reader.collect(Keep(last=1))
    assert (await reader.collect(Keep(last=1), dry_run=True)).versions == [1]
    assert await tstore.steps(reader) == [0, 1]


def deleted_but_open(store: Path) -> list[str]:
    """Return the deleted files of a store that this process still has open."""
    paths = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            paths.append(os.readlink(f"/proc/self/fd/{name}"))
    return [target for target in paths if target.endswith(" (deleted)") and target.startswith(f"{store}/txn/")]


async def test_deleted_packs_are_closed(tmp_path: Path) -> None:
    """The space of an open file is released only when it is closed."""
    store = await saved(str(tmp_path), 5)
    for step in range(5):
        await check_step(store, step)
    await store.collect(Keep(last=1))
    assert not deleted_but_open(tmp_path)
    await check_whole(store)


async def test_packs_of_an_aborted_transaction_are_closed(tmp_path: Path) -> None:
    """They were opened because a transaction reads its own writes."""
    store = await tstore.open(tmp_path)
    tx = store.transaction()
    array = await tx.create_array("x", (100_000,), "f8", (50_000,))
    values = np.random.default_rng(0).random(100_000)
    await array.write(values)
    assert np.array_equal(await array.read(), values)
    await tx.abort()
    assert not deleted_but_open(tmp_path)
    assert not list(tmp_path.glob("txn/*/pack-*"))


# ---- expired versions


async def test_an_expired_version_is_reported_as_expired(url: str) -> None:
    store = await saved(url, 3)
    between = (await store.log.reader.record(1)).time
    held = await store.snapshot(2)
    await store.collect(Keep(last=1))
    then = datetime.datetime.fromtimestamp(between, datetime.UTC) + timedelta(microseconds=1)
    other = await tstore.open(url, "r")
    for opened in (store, other):
        for at in (1, "step/0", then):
            with pytest.raises(SnapshotExpired, match=r"version 1.* collection recorded as version 4 at 20"):
                await opened.snapshot(at)
        with pytest.raises(NotFound, match="no step 7"):
            await opened.snapshot("step/7")
        with pytest.raises(NotFound):
            await tstore.restore(opened, 0)
    with pytest.raises(SnapshotExpired, match="version 2 "):
        await (await held.array("moving")).read()
    assert [(c.version, c.expired) async for c in other.history()] == [
        (4, False),
        (3, False),
        (2, True),
        (1, True),
    ]
    assert (await store.snapshot(4)).paths() == (await store.snapshot(3)).paths()


@pytest.mark.parametrize("operation", ["get", "head"])
async def test_possibly_expired_data_is_not_reported_as_damaged(url: str, operation: str) -> None:
    await saved(url, 3)
    reader, faults = await open_faulty(url)
    held = await reader.snapshot(2)
    await (await tstore.open(url)).collect(Keep(last=1))
    faults.fail(operation, "commits/*", times=1000)
    with pytest.raises(Unavailable):
        await (await held.array("moving")).read()


async def test_later_gcs_respect_earlier_ones(url: str) -> None:
    store = await saved(url, 3)
    await store.collect(Keep(last=2))
    await tstore.save(store, tree_of(3), 3)
    await store.collect(Keep(last=2))
    for version, gc in ((1, 4), (2, 6)):
        with pytest.raises(SnapshotExpired, match=f"collection recorded as version {gc}"):
            await store.snapshot(version)
    assert await tstore.save(store, tree_of(0), 0) == 7  # a step that has expired may be saved again
    await check_whole(store)


async def test_an_expired_state_behind_void_commits_and_gcs(url: str) -> None:
    store, faults = await open_faulty(url)
    await tstore.save(store, tree_of(0), 0)
    faults.fail("create", "commits/*")
    await tstore.save(store, tree_of(1), 1)  # version 2 is void
    await tstore.save(store, tree_of(2), 2)
    await store.collect(Keep(last=2))  # version 5
    with pytest.raises(SnapshotExpired):
        await store.snapshot(2)
    await tstore.save(store, tree_of(3), 3)
    await store.collect(Keep(last=1))
    with pytest.raises(SnapshotExpired):
        await store.snapshot(5)
    await check_whole(store)


# ---- objects that living versions need


@given(st.data())
async def test_random_commits_and_gcs(data: st.DataObject) -> None:
    """Every living version equals the model after random writes and collections."""
    store = await tstore.open(f"memory://{uuid.uuid4()}", "x")
    model: dict[int, dict[str, Any]] = {}
    state: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    operations = st.sampled_from(["save", "write", "part", "create", "resize", "delete", "keep", "gc", "gc"])
    for number in range(data.draw(st.integers(3, 14))):
        operation = data.draw(operations)
        newest = max(model, default=0)
        if operation == "gc":
            if model:
                keep = data.draw(
                    st.sampled_from([Keep(last=1), Keep(last=2), Keep(tags=(f"t{newest}",)), Keep(every=3)])
                )
                tag = data.draw(st.sampled_from(sorted(model)))
                report = await store.collect(data.draw(st.sampled_from([keep, Keep(tags=(f"t{tag}",))])))
                for version in report.versions:
                    del model[version]
            continue
        async with store.transaction(
            tag=f"t{1 + await store.log.reader.newest()}", move_tag=f"step/{number}"
        ) as tx:
            some = sorted(state)[0] if state else None
            if operation == "save" or some is None:
                await tx.staging.replace_all(b"")
                state = {"a": rng.random((30, 40)), "b": rng.random((30, 40))}
                for path, values in state.items():
                    await (await tx.create_array(path, values.shape, "f8", (10, 40))).write(values)
            elif operation == "create":
                path = f"new/{number}"
                state = {**state, path: rng.random((30, 40))}
                await (await tx.create_array(path, (30, 40), "f8", (10, 40))).write(state[path])
            elif operation == "delete":
                await tx.delete(some)
                state = {p: v for p, v in state.items() if p != some}
            elif operation == "resize":
                await (await tx.array(some)).resize((20, 40))
                state = {**state, some: state[some][:20]}
            elif operation == "keep":
                source = await store.snapshot(data.draw(st.sampled_from(sorted(model))))
                await tx.staging.replace_all(b"")
                for path, node in source.tree.nodes.items():
                    await tx.staging.keep_array(path, node.meta, node.tables, source.version)
                state = model[source.version]
            else:
                rows = slice(10, 20) if operation == "write" else slice(5, 7)
                state = {**state, some: state[some].copy()}
                state[some][rows] = rng.random()
                await (await tx.array(some))[rows].write(state[some][rows])
        assert tx.version is not None
        model[tx.version] = state
    other = await tstore.open(store.url, "r")
    for version, expected in model.items():
        snapshot = await other.snapshot(version)
        assert snapshot.paths() == sorted(expected)
        for path, values in expected.items():
            assert np.array_equal(await (await snapshot.array(path)).read(), values)
    assert (await other.verify()).ok
    assert [c.version async for c in other.history() if not c.expired and c.tags] == sorted(model, reverse=True)


async def test_chunks_and_manifests_needed_by_later_versions_stay(url: str) -> None:
    """Partial commits depend on chunks and manifests of older versions, which may have expired."""
    store = await tstore.open(url)
    many = np.random.default_rng(0).random(400_000)
    async with store.transaction() as tx:
        await (await tx.create_array("x", many.shape, "f8", (500,))).write(many)
    for i in range(1, 4):
        async with store.transaction() as tx:
            await (await tx.array("x"))[: 1000 * i].write(many[: 1000 * i] + i)
        report = await store.collect(Keep(last=1))
        assert report.versions == [1 if i == 1 else 2 * i - 2]
    assert (await store.verify()).ok
    other = await tstore.open(url, "r")
    assert np.array_equal(
        await (await (await other.snapshot()).array("x")).read(), np.r_[many[:3000] + 3, many[3000:]]
    )
    owners = {key.split("/")[1] for key in await objects(url) if "/pack-" in key}
    assert owners == {
        (await store.log.reader.record(v)).transaction for v in (1, 6)
    }  # 6 overwrote the chunks of 2 and 4
    async with store.transaction() as tx:
        await tx.staging.replace_all(b"")
    await store.collect(Keep(last=1))
    assert await objects(url) == set()


async def layers(store: tstore.Store, step: int, changed: int) -> None:
    """Save a step of eight layers, the first `changed` of them new, from two hosts that write a pack each."""
    tree = {f"layer{i}": np.full(2000, float(step if i < changed else 0)) for i in range(8)}
    hosts = [tstore.save(store, tree, step, host=h, hosts=2, attempt=f"job.{step}") for h in range(2)]
    await asyncio.gather(*hosts)


async def check_layers(store: tstore.Store, step: int, changed: int) -> None:
    tree = await tstore.restore(store, step)
    assert [tree[f"layer{i}"][-1] for i in range(8)] == [float(step if i < changed else 0) for i in range(8)]


async def test_a_stale_listing_removes_nothing_needed(url: str) -> None:
    """Packs of an expired version that a living one needs stay, even if a stale list does not show them."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        w = await tx.create_array("w", (4000,), "int64", (2000,))
        await w.write(np.arange(4000))
    async with store.transaction() as tx:
        await (await tx.array("w"))[:2000].write(7)
    storage = Faults(store.log.storage)
    listed = storage.list

    async def old_list(prefix: str) -> list[str]:
        keys = await listed(prefix)
        collected = len(await listed("commits/")) > 2
        return [key for key in keys if collected or "/pack-" not in key]

    storage.list = old_list  # type: ignore[method-assign]
    await tstore.Store(storage, store.marker, "a").collect(Keep(last=1))
    assert (await (await (await store.snapshot()).array("w")).read())[[0, 2000]].tolist() == [7, 2000]
    assert (await store.verify()).ok


async def test_packs_of_one_version_are_removed_individually(url: str) -> None:
    """Step 1 still needs one of the two packs of step 0, as only that host's layers are unchanged."""
    store = await tstore.open(url)
    await layers(store, 0, 0)
    tree = await tstore.restore(store, 0)
    packs = {
        p: n.chunks.with_used_packs().packs[0]
        for p, n in (await store.snapshot()).tree.nodes.items()
        if n.is_array
    }
    first, second = sorted(set(packs.values()))
    assert isinstance(first, str)
    await tstore.save(store, {p: v + (packs[p] == first) for p, v in tree.items()}, 1)
    dying, faults = await open_faulty(url)
    faults.fail("delete", nth=2, error=Killed, times=100)
    with pytest.raises(Killed):
        await dying.collect(Keep(last=1))
    assert {first, second} <= await objects(url)
    report = await store.collect()
    assert (report.version, report.packs, report.transactions) == (4, [first], [])
    assert second in await objects(url)
    other = await tstore.open(url, "r")
    assert [v[0] for v in (await tstore.restore(other)).values()] == [float(packs[p] == first) for p in tree]
    assert (await other.verify()).ok
    await tstore.save(store, {"x": 1}, 2)
    await store.collect(Keep(last=1))
    assert await objects(url) == set()


async def test_packs_of_living_versions_reused_by_expired_ones_stay(url: str) -> None:
    store = await tstore.open(url)
    await layers(store, 0, 0)
    for step, changed in ((1, 0), (2, 7)):
        await layers(store, step, changed)
    assert (await store.collect(Keep(tags=("step/0",)))).versions == [2]
    other = await tstore.open(url, "r")
    await check_layers(other, 0, 0)
    await check_layers(other, 2, 7)
    assert (await other.verify()).ok


async def test_an_expired_version_does_not_end_a_chain(url: str) -> None:
    """The newest version depends on the first one, by way of a second one that expired before it."""
    store = await tstore.open(url)
    await tstore.save(store, wide(0), 0)
    for path in ("a1", "a2"):
        async with store.transaction() as tx:
            await (await tx.array(path)).write(1.0)
    assert (await store.collect(Keep(tags=("step/0",)))).versions == [2]
    await tstore.save(store, wide(5), 5)
    assert (await store.collect(Keep(last=2, newer_than=NEVER))).versions == []
    await tstore.save(store, wide(6), 6)
    await store.collect(Keep(last=1))
    assert await objects(url) == await needed(store)
    store = await tstore.open(f"{url}2")
    await tstore.save(store, wide(0), 0)
    for path in ("a1", "a2"):
        async with store.transaction(tag=path) as tx:
            await (await tx.array(path)).write(1.0)
    await store.collect(Keep(tags=("step/0",)))
    async with store.transaction(tag="step/1") as tx:
        await (await tx.array("a3")).write(1.0)
    await store.collect(Keep(tags=("a2",)))
    other = await tstore.open(store.url, "r")
    for at, ones in (("a2", 2), ("step/1", 3)):
        tree = await tstore.restore(other, at=at)
        assert [tree[f"a{i}"][0] for i in range(5)] == [0.0] + [1.0] * ones + [0.0] * (4 - ones)
    assert (await other.verify()).ok


async def test_a_chain_that_begins_in_an_expired_version_holds_nothing_older(url: str) -> None:
    store = await tstore.open(url)
    await tstore.save(store, wide(0), 0)
    async with store.transaction() as tx:
        await tx.staging.replace_all(b"")
        for i in range(400):
            await (await tx.create_array(f"a{i}", (3,), "f8")).write(2.0)
    async with store.transaction(tag="step/1") as tx:
        await (await tx.array("a0")).write(3.0)
    await store.collect(Keep(tags=("step/0",)))
    await store.collect(Keep(last=1))
    assert {key.split("/")[1] for key in await objects(url)} == {(await store.log.reader.record(2)).transaction}
    tree = await tstore.restore(await tstore.open(url, "r"))
    assert (tree["a0"][0], tree["a1"][0]) == (3.0, 2.0)


async def test_verify_reads_packs_of_expired_versions_still_in_use(tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "s")
    await tstore.save(store, tree_of(0), 0)
    async with store.transaction(tag="step/1") as tx:
        await (await tx.array("moving")).write(1.0)
    await store.collect(Keep(last=1))
    [pack] = [k for k in await objects(store.url) if (await store.log.reader.record(1)).transaction in k]
    data = bytearray((tmp_path / "s" / pack).read_bytes())
    data[5] ^= 1  # in the frozen layer, or in what version 2 overwrote
    data[16_005] ^= 1
    (tmp_path / "s" / pack).write_bytes(data)
    [fault] = (await (await tstore.open(store.url)).verify()).faults
    assert "version 2: frozen" in fault
    (tmp_path / "s" / pack).unlink()
    [fault] = (await (await tstore.open(store.url)).verify()).faults
    assert f"its pack {pack} is missing" in fault


async def test_roots_are_removed_with_their_versions(url: str) -> None:
    store = await tstore.open(url)
    for step in range(140):
        await tstore.save(store, {"x": step}, step, durability="none")
    await store.collect(Keep(last=2, tags=("step/70",)))
    assert await connect(url).list("roots/") == ["roots/00000000000000000064", "roots/00000000000000000128"]
    for step in range(140, 256):
        await tstore.save(store, {"x": step}, step, durability="none")
    await store.collect(Keep(last=2))  # the root of version 256 follows no other
    assert await connect(url).list("roots/") == ["roots/00000000000000000256"]
    other = await tstore.open(url, "r")
    assert (await tstore.restore(other))["x"] == 255
    assert (await other.verify()).ok


# ---- concurrency


async def test_a_commit_that_reuses_packs_protects_them_from_a_concurrent_gc(url: str) -> None:
    store = await saved(url, 2)
    source = await store.snapshot("step/0")
    collecting, faults = await open_faulty(url)
    async with held_commit(faults, collecting.collect(Keep(last=1))) as gc:
        await copied(store, source, "copy")
    report = await gc
    assert report.versions == [1]
    assert report.objects == 0
    await check_whole(store)
    tree = await tstore.restore(store, at="copy")
    assert np.array_equal(tree["moving"], tree_of(0)["moving"])
    await store.collect(Keep(last=1))
    assert (await tstore.restore(store, at="copy"))["frozen"].sum() == FROZEN.sum()  # the newest version


async def copied(store: tstore.Store, source: tstore.Snapshot, tag: str) -> None:
    async with store.transaction(tag=tag) as tx:
        await tx.staging.replace_all(b"")
        for path, node in source.tree.nodes.items():
            if node.is_array:
                await tx.staging.keep_array(path, node.meta, node.tables, source.version)


async def test_a_commit_that_reuses_condemned_packs_is_refused(url: str) -> None:
    store, faults = await open_faulty(url)
    for step in range(3):
        await tstore.save(store, tree_of(step), step)
    source = await store.snapshot("step/1")
    async with held_commit(faults, copied(store, source, "copy")) as copy:
        await (await tstore.open(url)).collect(Keep(last=1))
    with pytest.raises(Conflict, match="as version 4") as caught:
        await copy
    assert caught.value.paths
    with pytest.raises(SnapshotExpired):
        await copied(store, source, "copy")  # this time already when it is staged
    await check_whole(store)


async def test_a_commit_that_reuses_a_pack_condemned_alone_is_refused(url: str) -> None:
    """The pack that another host wrote in the expired transaction is still needed."""
    store, faults = await open_faulty(url)
    hosts = [store.transaction(name="both", host=host, hosts=2, attempt="x") for host in range(2)]
    for tx, name in zip(hosts, ("a", "b"), strict=True):
        await (await tx.create_array(name, (2000,), "f8")).write(1)
    await asyncio.gather(*[tx.commit() for tx in hosts])
    source = await store.snapshot()
    async with store.transaction() as tx:
        await (await tx.array("a")).write(2)
    tx = store.transaction()
    await tx.copy_array(await source.array("a"), "copy")
    async with held_commit(faults, tx.commit()) as committing:
        report = await (await tstore.open(url)).collect(Keep(newer_than=timedelta(0)))
        assert (report.versions, report.transactions, len(report.packs)) == ([1], [], 1)
    with pytest.raises(Conflict, match="removed chunks that this transaction reuses"):
        await committing


async def test_a_version_that_a_tag_to_keep_names_during_a_gc_is_kept(url: str) -> None:
    store, faults = await open_faulty(url)
    for step in range(3):
        await tstore.save(store, tree_of(step), step)
    await tags.set_tag(store, "best", 1)
    async with held_commit(faults, store.collect(Keep(tags=("best",)))) as collecting:
        await tags.move_tag(await tstore.open(url), "best", 2)
    assert (await collecting).versions == [1, 4]
    assert np.array_equal((await tstore.restore(store, at="best"))["moving"], tree_of(1)["moving"])
    await check_whole(store)


async def test_a_save_reuses_chunks_of_the_newest_step_during_a_gc(url: str) -> None:
    store, faults = await open_faulty(url)
    for step in range(3):
        await tstore.save(store, tree_of(step), step)
    async with held_commit(faults, tstore.save(store, tree_of(3), 3)) as save:
        assert (await (await tstore.open(url)).collect(Keep(last=1))).versions == [1, 2]
    assert await save == 5
    await check_whole(store)


@pytest.mark.parametrize("hosts", [1, 2])
async def test_a_save_rewrites_chunks_that_were_condemned(url: str, hosts: int) -> None:
    store, faults = await open_faulty(url)
    await tstore.save(store, tree_of(0), 0)
    gate = faults.hold("create", "commits/*")

    async def all_hosts() -> list[int]:
        group = {} if hosts == 1 else {"hosts": hosts, "attempt": "a"}
        return await asyncio.gather(*[tstore.save(store, tree_of(1), 1, host=h, **group) for h in range(hosts)])  # type: ignore[arg-type]

    save = asyncio.create_task(all_hosts())
    await gate.reached()
    other = await tstore.open(url)
    await tstore.save(other, {"other": np.arange(9)}, 2)
    assert (await other.collect(Keep(last=1))).versions == [1]
    gate.release()
    assert await save == [4] * hosts
    if hosts > 1:
        assert await all_hosts() == [4] * hosts  # a repeated save of the attempt finds what it saved
    assert (await other.verify()).ok
    again = await tstore.restore(other, 1)
    assert all(np.array_equal(again[name], values) for name, values in tree_of(1).items())


async def test_a_save_that_rewrites_chunks_reuses_no_others(url: str) -> None:
    """Otherwise another gc might condemn those too, and so on."""
    store, faults = await open_faulty(url)
    await tstore.save(store, tree_of(0), 0)
    other = await tstore.open(url)
    gate = faults.hold("create", "commits/*")
    save = asyncio.create_task(tstore.save(store, tree_of(1), 1))
    await gate.reached()
    await tstore.save(other, {"other": np.arange(9)}, 2)
    assert (await other.collect(Keep(last=1))).versions == [1]
    await tstore.save(other, tree_of(3), 3)  # has the frozen layer again
    second = faults.hold("create", "commits/*")
    gate.release()
    await second.reached()
    await tstore.save(other, {"other": np.arange(9)}, 4)
    assert (await other.collect(Keep(last=1))).versions == [2, 4]
    second.release()
    assert await save == 7
    await check_step(other, 1)


async def test_restoring_the_newest_step_retries_with_a_newer_one_after_a_gc(url: str) -> None:
    await tstore.save(url, {"moving": np.zeros(2000)}, 0)
    step, overtaken = 0, 0
    for asked in (False, True):
        nth = 1
        while True:  # during each step of the restore, a newer step is saved and this one collected
            store, faults = await open_faulty(url)
            gate = faults.hold("head", "commits/*", nth=nth)
            restore = asyncio.create_task(tstore.restore(store, step if asked else None))
            if await first_of(restore, gate.reached()) is restore:
                break
            step, nth = step + 1, nth + 1
            await tstore.save(url, {"moving": np.full(2000, float(step))}, step)
            await (await tstore.open(url)).collect(Keep(last=1))
            gate.release()
            try:
                assert (await restore)["moving"][0] in (step - 1, step)
            except NotFound as error:
                assert asked
                overtaken += isinstance(error, SnapshotExpired)
    assert overtaken


async def first_of(task: asyncio.Task[Any], other: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return the one that ends first; if that is `task`, cancel the other."""
    waiting = asyncio.create_task(other)
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        return task
    return waiting


async def slow_array(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        await (await tx.create_array("slow", (2000,), "f8")).write(FROZEN)


async def slow_group(store: tstore.Store) -> None:
    await tstore.save(store, tree_of(5), 5, host=0, hosts=2, attempt="a", timeout=0.5)


@pytest.mark.parametrize("dies", [False, True])
async def test_a_gc_takes_as_many_abandoned_transactions_as_its_record_can_name(
    monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds, *, dies: bool
) -> None:
    """Otherwise a store with millions of them could never be collected again."""
    thresholds(_MAX_ABANDONED=300)
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    await tstore.save(store, {"w": np.arange(9)}, 0)
    names = [f"{i:0100}" for i in range(8)]
    for name in names:
        await store.log.storage.create(f"txn/{name}/pack-0", b"x", Durability.NONE)
    if dies:
        with monkeypatch.context() as patch:
            patch.setattr("tstore.core.maintenance.gc._delete", Mock(side_effect=asyncio.CancelledError))
            with pytest.raises(asyncio.CancelledError):
                await store.collect(abandoned=NOW)
        assert (await store.collect(abandoned=NOW)).abandoned == []  # finishes the deletions only
        names = names[3:]
    while names:
        report = await store.collect(abandoned=NOW)
        assert report.abandoned == names[:3]
        names = names[3:]
        assert len(await store.log.storage.folders("txn/")) <= 1 + len(names)


@pytest.mark.parametrize("years", [-10, 10])
async def test_a_host_with_a_wrong_clock_considers_no_writer_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    """Ages are measured by the clock that dates the files."""
    right = time.time
    store = await tstore.open(tmp_path / "s")
    async with store.transaction() as tx:
        await (await tx.create_array("w", (4, 1000), "f8", (1, 1000))).write(np.ones((4, 1000)))
        with monkeypatch.context() as wrong:
            wrong.setattr(time, "time", lambda: right() + years * 365 * 86400)
            other = await tstore.open(tmp_path / "s")
            assert (await other.collect()).abandoned == []
            assert len((await other.collect(abandoned=NOW, dry_run=True)).abandoned) == 1
    assert tx.version == 1
    await check_whole(store)


@pytest.mark.parametrize("point", [("create", "commits/*"), ("flush", "txn/*")])
async def test_a_slow_writer_considered_abandoned_fails_cleanly(url: str, point: tuple[str, str]) -> None:
    store, faults = await open_faulty(url)
    await tstore.save(store, tree_of(0), 0)
    gate = faults.hold(*point)
    slow = asyncio.create_task(slow_array(store))
    await gate.reached()
    other = await tstore.open(url)
    assert (await other.collect(abandoned=NEVER)).abandoned == []
    report = await other.collect(abandoned=NOW)
    assert len(report.abandoned) == 1
    assert report.bytes >= 16_000
    gate.release()
    with pytest.raises(Conflict, match="looked abandoned"):
        await slow
    await check_whole(store)
    await slow_array(store)  # a new transaction is fine
    await other.collect(abandoned=NOW)
    assert (await store.verify()).ok


async def test_a_transaction_that_commits_before_its_condemnation_is_spared(url: str) -> None:
    store, faults = await open_faulty(url)
    await tstore.save(store, tree_of(0), 0)
    gate = faults.hold("create", "commits/*")
    slow = asyncio.create_task(slow_array(store))
    await gate.reached()
    collecting, later = await open_faulty(url)
    held = later.hold("create", "commits/*")
    gc = asyncio.create_task(collecting.collect(Keep(last=1), abandoned=NOW))
    await held.reached()
    gate.release()
    await slow
    held.release()
    report = await gc
    assert (report.abandoned, report.objects) == ([], 0)
    await check_whole(store)
    other = await tstore.open(url, "r")
    assert np.array_equal(await (await (await other.snapshot()).array("slow")).read(), FROZEN)


async def test_remains_of_dead_hosts_and_aborted_transactions_are_removed_later(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    store = await saved(url, 1)
    with pytest.raises(TStoreError):
        await slow_group(store)
    tx = store.transaction()
    await (await tx.create_array("x", (5000,), "f8")).write(1.0)
    await tx.abort()
    late = store.transaction(tag="step/5", name="step/5", host=1, hosts=2, attempt="a")
    await late.staging.replace_all(b"")
    left = await objects(url) - await needed(store)
    assert left
    assert (await store.collect()).abandoned == []  # too young
    for path in [*(tmp_path / "store/txn").rglob("*"), *(tmp_path / "store/txn").iterdir()]:
        os.utime(path, (0, 0))
    report = await store.collect()
    assert len(report.abandoned) == 2
    assert report.versions == []
    assert len(os.listdir(tmp_path / "store/txn")) == 1
    with pytest.raises(Conflict, match="looked abandoned"):  # its first host is gone for good
        await late.commit(timeout=0.3)
    await check_whole(store)


async def test_two_concurrent_gcs(url: str) -> None:
    store = await saved(url, 8)
    first, faults = await open_faulty(url)
    async with held_commit(faults, first.collect(Keep(last=2))) as one:
        two = await (await tstore.open(url)).collect(Keep(every=4))
        assert two.versions == [2, 3, 4, 6, 7]
    report = await one
    assert report.versions == [1]
    assert await tstore.steps(store) == [4, 7]
    await check_whole(store)
    assert await objects(url) == await needed(store)


async def test_a_step_that_is_the_newest_again_during_a_gc_stays(url: str) -> None:
    store = await saved(url, 3)
    collecting, faults = await open_faulty(url)
    async with held_commit(faults, collecting.collect(Keep(last=1))) as gc:
        await tags.remove_steps_after(store, 1)
    assert (await gc).versions == [1, 3]
    assert np.array_equal((await tstore.restore(store))["moving"], tree_of(1)["moving"])
    await check_whole(store)


async def test_concurrent_gcs_readers_and_writers(url: str) -> None:
    """Every acknowledged step is complete or was collected; readers see nothing else."""
    store = await saved(url, 1)
    done = asyncio.Event()

    async def write() -> None:
        for step in range(1, 25):
            await tstore.save(await tstore.open(url), tree_of(step), step, durability="none")
        done.set()

    async def collect(keep: Keep) -> None:
        opened = await tstore.open(url)
        while not done.is_set():
            await opened.collect(keep)
            await asyncio.sleep(0)

    async def read() -> None:
        while not done.is_set():
            opened = await tstore.open(url, "r")
            try:
                for step in (await tstore.steps(opened))[::-1]:
                    await check_step(opened, step)
            except SnapshotExpired:
                pass
            except NotFound as error:
                assert "has no step" in str(error)  # noqa: PT017 - collected after it was listed
            await asyncio.sleep(0)

    await asyncio.gather(write(), collect(Keep(last=2)), collect(Keep(every=7)), read(), read())
    await store.collect(Keep(last=1))
    assert await tstore.steps(store) == [24]
    await check_whole(store)
    assert await objects(url) == await needed(store)


async def test_a_save_overtaken_by_steps_and_their_collection_commits(url: str) -> None:
    """Arrays that a step replaces are not read, so they need not exist."""
    store, faults = await open_faulty(url)
    await tstore.save(store, wide(0), 0)
    async with held_commit(faults, tstore.save(store, wide(1), 1)) as late:
        other = await tstore.open(url)
        for step in (2, 3, 4):
            await tstore.save(other, wide(step), step)
        assert (await other.collect(Keep(last=1))).versions == [1, 2, 3]
    assert await late == 6
    assert (await tstore.restore(store, 1))["a7"].tolist() == [1.0] * 3
    assert (await (await tstore.open(url)).verify()).ok


async def test_a_write_overtaken_during_validation_is_a_conflict(url: str) -> None:
    store, faults = await open_faulty(url)
    await tstore.save(store, wide(0), 0)
    late = store.transaction()
    await (await late.array("a0")).write(9.0)
    other = await tstore.open(url)
    async with other.transaction() as tx:
        for i in range(400):
            await (await tx.create_array(f"b{i}", (1,), "f8")).write(1.0)
    gate = faults.hold("get", "txn/*/manifest-*")
    commit = asyncio.create_task(late.commit())
    await gate.reached()
    await tstore.save(other, wide(1), 1)
    await other.collect(Keep(last=1))
    gate.release()
    with pytest.raises(Conflict, match="version 3, committed since then") as caught:
        await commit
    assert caught.value.paths == ["a0"]


async def test_parts_of_chunks_are_patched_over_versions_that_expired_meanwhile(url: str) -> None:
    store, faults = await open_faulty(url)
    async with store.transaction() as tx:
        await (await tx.create_array("x", (5000,), "f8", (5000,))).write(0.0)
    late = store.transaction()
    await (await late.array("x"))[:10].write(7.0)
    async with held_commit(faults, late.commit()) as commit:
        other = await tstore.open(url)
        for value in (1.0, 2.0):
            async with other.transaction() as tx:
                await (await tx.array("x"))[5:4000].write(value)
        assert (await other.collect(Keep(last=1))).versions == [1, 2]
    assert await commit == 5
    values = await (await (await store.snapshot()).array("x")).read()
    assert np.array_equal(values, np.repeat([7.0, 2.0, 0.0], [10, 3990, 1000]))
    await other.collect(Keep(last=1))
    assert (await (await tstore.open(url)).verify()).ok


async def test_a_transaction_whose_base_expired(url: str) -> None:
    store = await saved(url, 2)
    tx = store.transaction()
    array = await tx.array("moving")
    await tstore.save(store, tree_of(2), 2)
    await store.collect(Keep(last=1))
    await store.close()
    with pytest.raises(SnapshotExpired, match="version 2"):
        await array.read()
    await array[:5].write(1.0)
    with pytest.raises(SnapshotExpired, match="version 2"):
        await tx.commit()
    await check_whole(store)


async def test_cooperative_transactions_reuse_packs_and_are_spared_too(url: str) -> None:
    """Two hosts save a step whose frozen layer is in the packs of an older one."""

    async def group(opened: tstore.Store, step: int) -> list[int]:
        hosts = range(2)
        attempt = f"job.{step}"
        return await asyncio.gather(
            *[tstore.save(opened, tree_of(step), step, host=h, hosts=2, attempt=attempt) for h in hosts]
        )

    store = await saved(url, 2)
    held, faults = await open_faulty(url)
    gates = [
        faults.hold("create", "commits/*") for _ in range(2)
    ]  # two, as the other host takes over after a while
    late = asyncio.create_task(group(held, 2))
    await gates[0].reached()
    await tstore.save(store, {"x": 1}, 3)
    await store.collect(Keep(last=1))  # condemns packs that step 2 is about to reference
    for gate in gates:
        gate.release()
    assert len(set(await late)) == 1  # each host wrote the frozen layer's part anew
    assert len(set(await group(store, 4))) == 1
    assert len(set(await group(store, 5))) == 1
    await store.collect(Keep(last=1))
    await check_step(store, 5)
    await store.collect(Keep(last=1), abandoned=NOW)
    await check_step(await tstore.open(url), 5)
    assert (await (await tstore.open(url)).verify()).ok
    owners = {key.split("/")[1] for key in await objects(url)}
    assert owners <= {
        (await store.log.reader.record(v)).transaction for v in range(1, 1 + await store.log.reader.newest())
    }


async def test_a_void_record_passes_on_the_collection(url: str) -> None:
    store, faults = await open_faulty(url)
    for step in range(3):
        await tstore.save(store, tree_of(step), step)
    await store.collect(Keep(last=2))  # version 4
    faults.fail("create", "commits/*")
    faults.fail("create", "commits/*", nth=2, error=Killed)
    with pytest.raises(Killed):
        await tstore.save(store, tree_of(3), 3)
    other = await tstore.open(url)
    assert (await other.log.reader.record(5)).void
    with pytest.raises(SnapshotExpired):
        await other.snapshot(1)
    await tstore.save(other, tree_of(4), 4)
    assert (await other.collect(Keep(last=2), abandoned=NOW)).versions == [2]
    with pytest.raises(SnapshotExpired):
        await other.snapshot(1)
    await check_whole(other)
    assert await objects(url) == await needed(other)


async def test_an_attempt_that_starts_again_while_a_gc_deletes_it_is_told(tmp_path: Path) -> None:
    """The gc condemned the attempt as abandoned, and would delete what its hosts write now; another one works."""

    class AfterNextCommit(Wrapper):
        """Calls a function once, when the next record has been created."""

        call: Callable[[], Coroutine[Any, Any, None]] | None = None

        async def put(
            self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
        ) -> None:
            await super().put(key, buffers, mode, durability)
            if self.call is not None and key.startswith("commits/"):
                call, self.call = self.call, None
                await call()

    store = await saved(str(tmp_path / "store"), 2)
    with pytest.raises(tstore.errors.DeadlineExceeded):
        await tstore.save(store, tree_of(2), 2, host=0, hosts=2, attempt="a", timeout=0.1)
    storage = AfterNextCommit(connect(store.url))
    again: list[tstore.Transaction] = []

    async def start_again() -> None:
        for host in range(2):
            tx = store.transaction(name="step/2", host=host, hosts=2, attempt="a")
            array = await tx.create_array(f"w{host}", (1_000_000,), "float64")
            await array.write(float(host))  # its pack is among the files of the transaction from now on
            again.append(tx)

    storage.call = start_again
    await (await tstore.open(storage)).collect(Keep(last=2), abandoned=NOW)
    for told in await asyncio.gather(*(tx.commit() for tx in again), return_exceptions=True):
        assert isinstance(told, Conflict)
        assert "removed by the garbage collection" in str(told)
    await tstore.save(store, tree_of(2), 2)
    await check_whole(store)


# ---- dying processes


async def test_a_gc_that_dies_at_any_step_is_finished_by_the_next(url: str) -> None:
    keep, dead = Keep(last=2), 0
    while True:
        here = f"{url}{dead}"
        store = await saved(here, 6)
        dying, faults = await open_faulty(here)
        operation, nth = ("create", 1) if dead == 0 else ("delete", 1 + dead)  # the first deletion is a trial
        faults.fail(operation, "*", nth=nth, times=1000, error=Killed)
        try:
            await dying.collect(keep)
        except Killed:
            await check_whole(store)
            assert await tstore.steps(store) == ([*range(6)] if dead == 0 else [4, 5])
            report = await store.collect(keep)
            assert (report.version is None) == (report.objects == 0)
            assert (report.objects > 0) or dead > 3
        else:
            break
        assert await objects(here) == await needed(store)
        await check_whole(store)
        dead += 1
    assert dead > 3  # and one more for each folder, where there are any


async def test_the_next_gc_condemns_the_remains_of_a_dead_one(url: str) -> None:
    store = await saved(url, 6)
    for keep in (Keep(last=4), Keep(last=3)):  # both die before they delete anything
        dying, faults = await open_faulty(url)
        faults.fail("delete", "*", nth=2, times=1000, error=Killed)
        with pytest.raises(Killed):
            await dying.collect(keep)
    assert len(await objects(url)) == 6
    assert (await store.collect()).version == 9
    assert await objects(url) == await needed(store)
    await check_whole(store)
    assert (await store.collect()).version is None


async def test_a_gc_whose_create_fails_deletes_only_what_its_record_condemned(url: str) -> None:
    for action in ("lose_reply", "postpone", "fail"):
        here = f"{url}-{action}"
        await saved(here, 4)
        store, faults = await open_faulty(here)
        getattr(faults, action)("create", "commits/*")
        report = await store.collect(Keep(last=2))
        await faults.do_postponed()
        assert report.versions == [1, 2]
        assert report.version == (5 if action == "lose_reply" else 6)
        await check_whole(store)


async def test_nothing_is_deleted_before_the_record_exists(url: str) -> None:
    await saved(url, 4)
    store, faults = await open_faulty(url)
    await store.collect(Keep(last=1))
    trial, *calls = [c for c in faults.calls if c.operation in ("create", "delete")]
    assert trial.key.startswith("txn/gc-")  # no such transaction exists
    operations = [c.operation for c in calls]
    assert operations[0] == "create"
    assert operations.count("create") == 1
    assert "delete" in operations


@pytest.mark.parametrize("error", [Denied, Unavailable])
async def test_undeletable_objects_expire_only_if_the_error_says_so(
    url: str, error: Callable[[str], TStoreError]
) -> None:
    await saved(url, 4)
    store, faults = await open_faulty(url)
    faults.fail("delete", times=1000, error=error)
    with pytest.raises(error):
        await store.collect(Keep(last=1))
    assert await tstore.steps(store) == [0, 1, 2, 3]
    store, faults = await open_faulty(url)
    faults.fail("delete", nth=3, times=1000, error=error)
    with pytest.raises(error, match="Version 5, the commit of this gc, is durable"):
        await store.collect(Keep(last=1))
    assert await tstore.steps(store) == [3]
    store = await tstore.open(url)
    assert (await store.collect(Keep(last=1))).version == 6
    assert await objects(url) == await needed(store)


def test_old_remains_of_killed_creates_are_removed(tmp_path: Path) -> None:
    place = tmp_path / "s"
    blocking.save(place, tree_of(0), 0)
    old, new, locked = [place / "commits" / f".object.{name}.tmp" for name in ("old", "new", "locked")]
    marker, archive = place / ".0123.tmp", place / "archives" / ".object.old.tmp"
    archive.parent.mkdir()
    with locked.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for path in (old, new, locked, marker, archive):
            path.touch()
        for path in (old, locked, marker, archive):
            os.utime(path, (0, 0))
        with blocking.open(place) as store:
            store.collect(dry_run=True)
            assert old.exists()
            store.collect()
            assert store.verify().ok
    assert [path.exists() for path in (old, marker, archive, new, locked)] == [False, False, False, True, True]


# ---- cost


async def test_the_cost_does_not_grow_with_the_living_versions() -> None:
    async def requests(steps: int) -> int:
        url = f"memory://{uuid.uuid4()}"
        await saved(url, steps)
        await (await tstore.open(url)).collect(Keep(last=steps - 1))
        await tstore.save(url, tree_of(steps), steps)
        store, faults = await open_faulty(url)
        assert len((await store.collect(Keep(last=steps - 1))).versions) == 1
        return len(faults.calls)

    assert await requests(40) <= await requests(10) + 8  # the search for the newest version takes a few more


# ---- blocking


def test_blocking(tmp_path: Path) -> None:
    for step in range(3):
        blocking.save(tmp_path / "s", tree_of(step), step)
    with blocking.open(tmp_path / "s") as store:
        report = store.collect(blocking.Keep(last=1))
        assert isinstance(report, blocking.CollectReport)
        assert report.versions == [1, 2]
        with pytest.raises(SnapshotExpired):
            store.snapshot("step/1")
    assert blocking.steps(tmp_path / "s") == [2]


@pytest.mark.parametrize("where", ["memory", "folder", "server"])
@pytest.mark.parametrize("lost", [(4, 5), (2, 3, 4, 5, 6), (7,)])
async def test_a_gap_in_the_log_prevents_the_collection(where: str, lost: tuple[int, ...], tmp_path: Path) -> None:
    """The data of the versions above the gap looks abandoned."""
    url = f"memory://{uuid.uuid4()}" if where == "memory" else str(tmp_path / "store")
    async with await saved(url, 8) as store:
        for version in lost:
            await store.log.storage.delete(commit_key(version))
        keys = await store.log.storage.list("")
        async with contextlib.AsyncExitStack() as stack:
            if where == "server":
                server = await stack.enter_async_context(Server(url, access=everybody()))
                damaged = await tstore.open(server.url, storage_options={"token": ADMIN})
            else:
                damaged = await tstore.open(url)
            await stack.enter_async_context(damaged)
            for dry_run in (True, False):
                with pytest.raises(Corrupt, match=f"{commit_key(lost[0])} is missing, though later commits"):
                    await damaged.collect(Keep(last=1), abandoned=NOW, dry_run=dry_run)
        assert await store.log.storage.list("") == keys


async def test_many_objects_are_deleted_at_once(tmp_path: Path) -> None:
    """One after the other, a thousand transactions would take minutes on storage with a latency of 50 ms."""

    class Slow(Wrapper):
        """Notes how many deletions are under way at once."""

        under_way = most = 0

        async def delete(self, key: str) -> None:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(0.001)
            await super().delete(key)
            self.under_way -= 1

    url = str(tmp_path / "store")
    await saved(url, 40)
    storage = Slow(connect(url))
    report = await (await tstore.open(storage)).collect(Keep(last=1))
    assert len(report.transactions) == 38
    assert storage.most > 30
    assert len(list((tmp_path / "store" / "txn").iterdir())) == 2


async def test_no_request_to_a_bucket_is_void() -> None:
    memory = MemoryStorage(uuid.uuid4().hex)
    async with await tstore.open(as_remote(memory)) as store:
        for step in range(40):  # every other save fits into its record, and writes no object
            await tstore.save(store, {"w": np.full(3 if step % 2 else 9000, step, "f4")}, step=step)
    for abandoned in ("a", "b"):
        await memory.put(f"txn/{abandoned * 32}/pack-0-0", [b"x"], PutMode.CREATE)
    async with await tstore.open(as_remote(memory)) as store:
        report = await store.collect(keep=Keep(last=2), abandoned=datetime.timedelta(0))
        assert store.traffic is not None
        requests = store.traffic.requests
    assert (len(report.versions), report.objects, len(report.abandoned)) == (38, 21, 2)
    assert requests["delete"] == 21 + 1  # and one as a check of the permission
    assert requests["list"] <= 21 + 2 + 3  # the ages of the abandoned ones; txn/, commits/ and damaged/
    assert requests["head"] < 21 + 9  # in search of the newest version, also in archives
