"""Following a store: patches between versions, new versions as they come, and arrays kept at the newest one."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tstore
import tstore.sync
from tests.support.http_server import READ, everybody
from tstore.errors import Corrupt, InvalidArgument, NotFound, SnapshotExpired, Unavailable
from tstore.lab.conformance.faults import open_faulty
from tstore.service.server import Server

DEADLINE = 60  # seconds, for waits that end at once

rng = np.random.default_rng(0)
OLD: dict[str, Any] = {
    "same": rng.random(50),
    "few": rng.random((40, 30)).astype(ml_dtypes.bfloat16),
    "many": rng.random((40, 30)).astype("f4"),
    "pairs": rng.random(40) + 1j,
    "nan": np.array([np.nan, 0.0, 1.0, 2.0]),
    "zero": np.float32(1),
    "shape": np.zeros(3),
    "dtype": np.zeros(3, "i4"),
    "gone": np.ones(2),
    "empty": np.zeros((0, 4)),
}


def changed() -> dict[str, Any]:
    new = {path: np.array(values) for path, values in OLD.items() if path != "gone"}
    new["few"][[3, 39], [0, 29]] = 7
    new["many"] += 1
    new["pairs"][7] = 3
    new["nan"][1] = -0.0
    new["zero"] = np.float32(2)
    new |= {"shape": np.zeros(4), "dtype": np.zeros(3, "f4"), "new": np.ones(5)}
    return new


@pytest.mark.parametrize("rechunked", [False, True])
async def test_patches_lead_from_one_version_to_another_bit_for_bit(url: str, rechunked: bool) -> None:
    store, new = await tstore.open(url), changed()
    for number, tree in enumerate([OLD, new]):
        async with store.transaction(tag=f"v/{number}") as tx:
            for path, values in tree.items():
                size = 7 if rechunked and number else 5
                if number and path in OLD:
                    await tx.delete(path)
                await tx.create_array(path, data=values, chunks=tuple(min(size, max(n, 1)) for n in values.shape))
            if number:
                await tx.delete("gone")
    snapshot = await store.snapshot()
    patches = {patch.path: patch async for patch in snapshot.patches(since="v/0")}
    assert set(patches) == {"few", "many", "pairs", "nan", "zero", "shape", "dtype", "new"}
    whole = {path for path, patch in patches.items() if patch.indices is None}
    assert whole == {"many", "zero", "shape", "dtype", "new"}
    assert patches["few"].indices is not None
    assert patches["few"].indices.tolist() == [90, 1199]
    for path, (_, indices, values) in patches.items():
        array = np.array(OLD.get(path, values)) if indices is not None else values
        if indices is not None:
            array.reshape(-1)[indices] = values
        assert array.dtype == new[path].dtype
        assert array.tobytes() == new[path].tobytes()
    assert [patch async for patch in snapshot.patches(since=snapshot.version)] == []
    backwards = (await store.snapshot("v/0")).patches(since="v/1")
    assert {"gone", "few"} <= {patch.path async for patch in backwards}
    with pytest.raises(NotFound):
        await anext(snapshot.patches(since=9))
    with pytest.raises(InvalidArgument, match="a version or a tag"):
        await anext(snapshot.patches(since=1.5))  # type: ignore[arg-type]


async def published(url: str, *values: float) -> tstore.Store:
    """Save steps 1, 2, … of an array of such values, in small chunks so that little differs."""
    store = await tstore.open(url)
    for step, value in enumerate(values, 1):
        await tstore.save(store, {"w": np.full(1000, float(value)), "b": np.full(3, value)}, step)
    return store


async def versions(follower: tstore.Follower, count: int) -> list[int]:
    async with asyncio.timeout(DEADLINE):
        return [(await anext(follower)).version for _ in range(count)]


async def test_every_kind_of_commit_is_yielded_or_passed_over(url: str) -> None:
    store = await published(url, 1, 2, 3)  # versions 1, 2 and 3
    await tstore.quantize(store, {"w": "e4m3"}, tag="small")  # 4, a copy
    async with store.transaction(tag="other") as tx:  # 5
        await tx.create_group("g")
    await store.collect(tstore.Keep(last=2))  # 6, without version 1
    async with store.transaction(move_tag="other") as tx:  # 7
        await tx.delete("g")
    await tstore.save(store, {"w": np.zeros(3)}, 4)  # 8
    newest = (await store.snapshot()).version
    assert await versions(store.follow(since=1), 5) == [2, 3, 5, 7, newest]
    assert await versions(store.follow(since=2, tags="step/*"), 2) == [3, newest]
    assert await versions(store.follow(since=0, tags=["small", "other"]), 3) == [4, 5, 7]
    assert await versions(store.follow(), 1) == [newest]
    assert await versions(store.follow(tags="small"), 1) == [4]
    assert await versions(store.follow(since=1, versions="newest"), 1) == [newest]
    waiting = asyncio.ensure_future(versions(store.follow(tags="never"), 1))
    late = asyncio.ensure_future(versions(store.follow(tags="late"), 1))
    await tstore.core.tags.set_tag(store, "late", 2)
    assert await late == [2]
    waiting.cancel()
    for wrong in ({"since": -1}, {"since": True}, {"versions": "all"}, {"tags": 3}):
        with pytest.raises(InvalidArgument):
            store.follow(**wrong)  # type: ignore[arg-type]


async def test_a_follower_is_woken_by_commits_on_disk_and_on_a_server(tmp_path: Any) -> None:
    async with Server(tmp_path / "store", access=everybody()) as served:
        for url, options in ((str(tmp_path / "store"), {}), (served.url, {"token": READ})):
            opening = tstore.open(url, storage_options=options)
            async with await opening as store, await tstore.open(tmp_path / "store") as writer:
                follower = store.follow(tags="step/*")
                for step in (1, 2):
                    task = asyncio.ensure_future(versions(follower, 1))
                    await asyncio.sleep(0)  # it waits
                    assert [await tstore.save(writer, {"w": np.full(3, step)}, step)] == await task
                await tstore.core.tags.remove_steps(writer, [1, 2])


async def test_a_follower_behind_the_retention_is_told_and_goes_on(url: str) -> None:
    store = await published(url, 1, 2, 3)
    each, newest = store.follow(since=0), store.follow(since=0, versions="newest")
    await store.collect(tstore.Keep(last=1))
    for _ in range(2):
        with pytest.raises(SnapshotExpired, match=r"slower than the retention: go on .* versions='newest'"):
            await anext(each)
    assert await versions(each, 1) == [3]
    assert await versions(newest, 1) == [3]


async def test_arrays_are_brought_from_version_to_version_in_place(url: str) -> None:
    store, faults = await open_faulty(url)
    held = {"w": np.zeros(2000)[::2], "b": np.zeros(3), "step": 0}
    follower = store.follow(tags="step/*")
    assert await follower.update(held, timeout=0.01) is None
    assert follower.held is None
    w = np.arange(1000.0)
    for step in range(1, 4):
        w[step * 100] += 1
        chunks = {"w": w, "b": np.full(3, 9.0)}
        async with store.transaction(tag=f"step/{step}") as tx:
            for path, values in chunks.items():
                if step > 1:
                    await (await tx.array(path)).write(values)
                else:
                    await tx.create_array(path, data=values, chunks=(100,), codecs=["bytes"])
        before = faults.count("read_into", "txn/*")
        snapshot = await follower.update(held)
        assert snapshot is not None
        assert follower.held == snapshot.version == step
        np.testing.assert_array_equal(held["w"], w)
        assert step == 1 or faults.count("read_into", "txn/*") == before + 1  # the chunk that changed
    assert held["b"].tolist() == [9, 9, 9]


class FailsOnce(np.ndarray[Any, Any]):
    """An array in which one assignment fails, as if memory were short."""

    fails = False

    def __setitem__(self, index: Any, values: Any) -> None:
        if self.fails:
            self.fails = False
            raise MemoryError
        super().__setitem__(index, values)


async def test_a_copy_that_fails_is_made_again_as_a_whole(url: str) -> None:
    store = await published(url, 1, 2)
    failing = np.zeros(3, int).view(FailsOnce)
    held = {"w": np.zeros(1000), "b": failing}
    follower = store.follow(since=0)
    await follower.update(held)
    failing.fails = True
    with pytest.raises(MemoryError):
        await follower.update(held)
    assert follower.held is None
    assert (await follower.update(held)).version == follower.held == 2  # type: ignore[union-attr]
    assert [set(values.tolist()) for values in held.values()] == [{2}, {2}]


async def test_a_failed_update_changes_nothing_and_is_tried_again(tmp_path: Any) -> None:
    store, faults = await open_faulty(tmp_path)
    for step in (1, 2):
        await tstore.save(store, {"w": np.full(3000, step), "v": np.full(3000, step)}, step)
    held = {"w": np.zeros(3000, int), "v": np.zeros(3000, int)}
    follower = store.follow(since=0)
    assert (await follower.update(held)).version == 1  # type: ignore[union-attr]
    faults.fail("read_into", "txn/*", error=Unavailable)
    with pytest.raises(Unavailable):
        await follower.update(held)
    assert [set(values.tolist()) for values in held.values()] == [{1}, {1}]
    assert follower.held == 1
    faults.clear_rules()
    assert (await follower.update(held)).version == 2  # type: ignore[union-attr]
    assert [set(values.tolist()) for values in held.values()] == [{2}, {2}]
    await tstore.save(store, {"w": np.full(3000, 3), "v": np.full(3000, 3)}, 3)
    held["v"].flags.writeable = False
    with pytest.raises(InvalidArgument, match="v can't be written"):
        await follower.update(held)
    held["v"].flags.writeable = True
    held["w"] = np.zeros(7)
    with pytest.raises(InvalidArgument, match="w is int64 of shape"):
        await follower.update(held)
    with pytest.raises(NotFound, match="no array 'x'"):
        await follower.update({"x": np.zeros(3)})
    with pytest.raises(InvalidArgument, match="has no NumPy arrays"):
        await follower.update([object()])
    with pytest.raises(InvalidArgument, match="w is a float32"):
        await follower.update({"w": np.float32(1)})
    held["w"] = np.zeros(3000, int)  # an array that the last update did not fill is read as a whole
    await store.collect(tstore.Keep(last=1))  # so is all of it when the version that it holds has expired
    assert (await follower.update(held)).version == 3  # type: ignore[union-attr]
    assert [set(values.tolist()) for values in held.values()] == [{3}, {3}]


def test_readers_under_the_lock_never_see_a_mixture(tmp_path: Any) -> None:
    store = tstore.sync.open(tmp_path)
    tree = {name: np.zeros(20_000, int) for name in "abcd"}
    tstore.sync.save(store, tree, 0)
    held = {name: np.empty(20_000, int) for name in "abcd"}
    follower = store.follow(versions="newest")
    follower.update(into=held)
    mixtures: list[Any] = []
    seen: set[int] = set()
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            with follower.lock:
                values = {int(x) for array in held.values() for x in (array[0], array[-1], array[10_000])}
            seen.update(values)
            if len(values) > 1:
                mixtures.append(values)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for step in range(1, 9):
            tstore.sync.save(store, {name: np.full(20_000, step) for name in "abcd"}, step)
            assert follower.update(into=held).version == step + 1
    finally:
        ended.set()
        reader.join()
    assert not mixtures
    assert len(seen) > 1


async def test_damage_is_an_error_of_the_update(tmp_path: Any) -> None:
    store = await published(str(tmp_path), 1)
    [pack] = tmp_path.glob("txn/*/pack-*")
    with pack.open("r+b") as file:
        file.seek(500)
        file.write(b"\xff" * 64)
    held = {"w": np.zeros(1000)}
    with pytest.raises(Corrupt, match="w"):
        await store.follow().update(held)
    assert not held["w"].any()


async def test_values_that_a_sparse_array_with_other_chunks_lacks_are_told(url: str) -> None:
    store = await tstore.open(url)
    for size in (5, 7):
        async with store.transaction() as tx:
            if size == 7:
                await tx.delete("w")
            w = await tx.create_array("w", shape=(100,), dtype="f4", chunks=(size,), sparse=True)
            await w[: 700 // size**2].write(np.float32(size))
    held = {"w": np.zeros(100, "f4")}
    follower = store.follow(since=0)
    for expected in (28, 14):
        assert await follower.update(held) is not None
        assert np.count_nonzero(held["w"]) == expected
    [patch] = [patch async for patch in (await store.snapshot()).patches(since=1)]
    assert patch.indices is None
    assert patch.values.tobytes() == held["w"].tobytes()


@pytest.mark.parametrize("choice", ["each", "newest"])
async def test_a_version_is_not_lost_when_it_cannot_be_read_at_once(tmp_path: Any, choice: Any) -> None:
    store = await tstore.open(tmp_path)
    for step in range(66):
        await tstore.save(store, {"w": np.full(3, step)}, step)
    store, faults = await open_faulty(tmp_path)
    follower = store.follow(since=65, versions=choice)
    faults.fail("get", "roots/*", error=Unavailable)
    with pytest.raises(Unavailable):
        await anext(follower)
    faults.clear_rules()
    assert await versions(follower, 1) == [66]


async def test_updates_at_the_same_time_take_one_version_after_the_other(url: str) -> None:
    store = await published(url, 1, 2, 3)
    held = {"w": np.zeros(1000), "b": np.zeros(3, int)}
    follower = store.follow(since=0)
    snapshots = await asyncio.gather(*(follower.update(held) for _ in range(3)))
    assert [snapshot and snapshot.version for snapshot in snapshots] == [1, 2, 3]
    assert [set(values.tolist()) for values in held.values()] == [{3}, {3}]


async def test_an_update_to_the_newest_version_passes_over_one_that_fails(url: str) -> None:
    store = await published(url, 1)
    held = {"w": np.zeros(1000)}
    follower = store.follow(since=0, versions="newest")
    await tstore.save(store, {"other": np.zeros(3)}, 2)
    with pytest.raises(NotFound, match="no array 'w'"):
        await follower.update(held)
    await tstore.save(store, {"w": np.full(1000, 3.0)}, 3)
    assert (await follower.update(held)).version == 3  # type: ignore[union-attr]
    assert set(held["w"].tolist()) == {3}
