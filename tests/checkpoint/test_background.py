"""Saves in the background: what they save, how they queue, and where their errors surface."""

from __future__ import annotations

import asyncio
import threading
import uuid
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tstore.checkpoint.jobs import StreamedArray
from tstore.core.runtime import pool
from tstore.errors import AlreadyExists, Conflict, DeadlineExceeded, Denied, InvalidArgument, Misuse


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


def state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "long": rng.random(3_000_000),
        "columns": np.asfortranarray(rng.random((1500, 1500))),
        "strided": rng.random((1200, 2200))[:, ::2],
        "transposed": np.arange(12.0).reshape(3, 4).T,
        "reversed": np.arange(5)[::-1],
        "bfloat16": np.ones((3, 3), ml_dtypes.bfloat16),
        "big-endian": np.arange(3, dtype=">i4"),
        "none": np.zeros((0, 3)),
        "one": np.array(5.0),
        "small": [np.full(3, i) for i in range(300)],
        "shards": tstore.Shards((4, 2), "f4", [((slice(0, 4), slice(0, 2)), np.ones((4, 2), "f4"))]),
        "step": 7,
    }


def arrays(tree: dict[str, Any]) -> list[Any]:
    """Return the arrays of a `state` in one order."""
    leaves = [v.parts[0][1] if isinstance(v, tstore.Shards) else v for k, v in tree.items() if k != "small"]
    return [*leaves, *tree["small"]]


@pytest.mark.parametrize("staging", ["memory", "turns"])
async def test_arrays_are_saved_as_they_were_when_the_call_returned(tmp_path: Path, staging: Any) -> None:
    tree = state()
    save = await tstore.save_async(tmp_path / "s", tree, 3, staging=staging)
    await save.staged
    for array in arrays(tree):
        if isinstance(array, np.ndarray):
            array[...] = 77
    assert await save.committed == 1
    assert (save.wait(), save.wait(0), await save.committed, save.done(), save.step) == (1, 1, 1, True, 3)
    assert "step=3" in repr(save)
    for saved, expected in zip(arrays(await tstore.restore(tmp_path / "s", 3)), arrays(state()), strict=True):
        assert np.array_equal(saved, expected)


@pytest.mark.parametrize("staging", ["memory", "turns", "reference"])
async def test_a_step_that_this_attempt_has_saved_is_staged_at_once(url: str, staging: Any) -> None:
    """As when a host repeats its save, because it was told of no commit."""
    tree, job = {"w": np.arange(3.0)}, {"hosts": 2, "attempt": "job.0", "staging": staging}
    saves = [await tstore.save_async(url, tree, 1, host=host, **job) for host in (0, 1)]
    assert [await save.committed for save in saves] == [1, 1]
    again = await tstore.save_async(url, tree, 1, host=0, **job)
    assert await again.committed == 1


async def test_memory_is_used_again_and_only_for_one_save_at_a_time(url: str) -> None:
    async with tstore.Checkpointer(url) as checkpoints:
        for step in range(4):
            await checkpoints.save(step, {"w": np.full(100_000 * (2 - step % 2), step)})
        for step in range(4):
            assert (await checkpoints.restore(step))["w"].tolist() == [step] * (100_000 * (2 - step % 2))


def cycle() -> Any:
    tree: dict[str, Any] = {}
    tree["itself"] = tree
    return tree


BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "a step of 31 digits": (({}, 10**30), {}, "step"),
    "a cycle": (({"a": cycle()}, 1), {}, "a/itself: the tree contains itself"),
    "a function": (({"a": [print]}, 1), {}, "a/0"),
    "a set": (({"a": {1}}, 1), {}, "a: "),
    "an unknown way to stage": (({}, 1), {"staging": "disk"}, "'memory', 'turns' or 'reference'"),
    "an unknown way to wait": (({}, 1), {"in_flight": "drop"}, "'queue' or 'refuse'"),
    "a host without an attempt": (({}, 1), {"hosts": 2}, "attempt"),
    "metrics that are no mapping": (({}, 1), {"metrics": 3}, "metrics"),
}


@pytest.mark.parametrize("name", BAD)
async def test_invalid_arguments_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    arguments, options, text = BAD[name]
    with pytest.raises(InvalidArgument, match=text):
        await tstore.save_async(tmp_path / "s", *arguments, **options)
    assert not (tmp_path / "s").exists()


async def test_the_first_argument_is_the_store(tmp_path: Path) -> None:
    for call in (tstore.save, tstore.save_async):
        with pytest.raises(InvalidArgument, match=r"save\(url, tree, step\)"):
            await call({"w": np.zeros(3)}, str(tmp_path / "s"), 1)  # type: ignore[arg-type]
    with (tmp_path / "open").open("w") as file, pytest.raises(InvalidArgument, match="log"):
        await tstore.save_async(tmp_path / "s", {"log": file}, 1)
    assert not (tmp_path / "s").exists()


async def test_a_store_open_for_reading_is_refused(url: str) -> None:
    await tstore.save(url, {}, 0)
    async with await tstore.open(url, "r") as store:
        with pytest.raises(Denied, match="mode='r'"):
            await tstore.save_async(store, {}, 1)


async def test_an_error_is_raised_wherever_the_save_is_awaited(url: str) -> None:
    await tstore.save(url, {}, 1)
    save = await tstore.save_async(url, {"w": np.zeros(3)}, 1)
    for _ in range(2):
        with pytest.raises(AlreadyExists, match="step 1 is already saved, as version 1"):
            await save.committed
        with pytest.raises(AlreadyExists):
            save.wait()
    assert save.done()
    assert "failed" in repr(save)
    with pytest.raises(AlreadyExists):  # before the call returns, as nothing can be written
        await tstore.save_async(url, {"w": np.zeros(3)}, 1, staging="turns")
    assert await tstore.steps(url) == [1]


async def test_an_error_is_not_lost_with_a_cancelled_await(url: str) -> None:
    """The save fails, and its caller is cancelled, while other work keeps the event loop busy."""
    async with tstore.Checkpointer(url) as checkpoints:
        await (await checkpoints.save(5, {"w": np.zeros(3)})).committed
        save = await checkpoints.save(5, {"w": np.zeros(3)})

        async def awaiting() -> None:
            await save.committed

        task = asyncio.create_task(awaiting())
        await asyncio.sleep(0)
        while not save.done():
            threading.Event().wait(0.001)  # a busy main thread would slow the save
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(AlreadyExists, match="step 5 is already saved"):
            await checkpoints.wait()


async def test_a_save_that_has_failed_before_the_call_returns_tells_its_error_itself(url: str) -> None:
    """However fast it fails, the call returns the save; the error is raised by whoever asks for its outcome."""
    async with tstore.Checkpointer(url) as checkpoints:
        await (await checkpoints.save(5, {"w": np.zeros(3)})).committed
        for _ in range(200):
            save = await checkpoints.save(5, {"w": np.zeros(3)})
            with pytest.raises(AlreadyExists, match="step 5 is already saved"):
                await save.committed


@pytest.mark.parametrize(
    ("kind", "priority", "is_low"),
    [
        ("save", None, False),
        ("save", "low", True),
        ("save_async", None, True),
        ("save_async", "normal", False),
        ("save_async", "low", True),
        ("Checkpointer", None, True),
        ("Checkpointer", "normal", False),
    ],
)
async def test_a_save_gives_way_to_the_main_thread_as_its_priority_says(
    url: str, kind: str, priority: Any, is_low: bool
) -> None:
    priorities = set()

    def read(_: Any) -> Any:
        call = pool.current_each_call()  # None on the event loop
        priorities.add(pool.has_low_priority() if call is None else call.paced_workers > 0)
        return np.zeros(3, "f4")

    tree = {"w": StreamedArray((3,), np.dtype("f4"), read)}
    match kind:
        case "save":
            await tstore.save(url, tree, 1, priority=priority)
        case "save_async":
            await (await tstore.save_async(url, tree, 1, staging="reference", priority=priority)).committed
        case "Checkpointer":
            async with tstore.Checkpointer(url, staging="reference") as checkpoints:
                await (await checkpoints.save(1, tree, priority=priority)).committed
    assert priorities == {is_low}


async def test_an_unknown_priority_is_refused(url: str) -> None:
    for call in (tstore.save, tstore.save_async):
        with pytest.raises(InvalidArgument, match=r"priority='high': expected 'normal', 'low' or None"):
            await call(url, {}, 1, priority="high")  # type: ignore[operator]


async def test_an_error_that_is_its_own_cause_ends_the_save(url: str) -> None:
    def read(_: Any) -> Any:
        error = OSError("no such disk")
        raise error from error

    leaf = StreamedArray((3,), np.dtype("f4"), read)
    save = await tstore.save_async(url, {"w": leaf}, 1, staging="reference")
    with pytest.raises(OSError, match="no such disk"):
        save.wait(10)


async def test_saves_of_one_series_queue_or_are_refused(url: str) -> None:
    one, two = {"host": 0, "hosts": 2, "attempt": "a"}, {"host": 1, "hosts": 2, "attempt": "a"}
    first = await tstore.save_async(url, {"w": np.zeros(3)}, 1, **one)  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="step 2 is not saved"):
        await tstore.save_async(url, {}, 2, in_flight="refuse")
    with pytest.raises(DeadlineExceeded, match="it continues"):
        first.wait(0.01)
    second = asyncio.create_task(tstore.save_async(url, {"w": np.ones(3)}, 2))
    given_up = asyncio.create_task(tstore.save_async(url, {"w": np.ones(3)}, 3))
    await asyncio.sleep(0)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    assert not first.done()
    assert not second.done()
    # another host in the same process is another series
    assert await (await tstore.save_async(url, {"w": np.zeros(3)}, 1, **two)).committed == 1  # type: ignore[arg-type]
    assert await first.committed == 1
    assert await (await second).committed == 2
    assert await tstore.steps(url) == [1, 2]


def test_a_save_outlives_the_loop_of_its_caller(tmp_path: Path) -> None:
    async def begin() -> tstore.BackgroundSave:
        store = await tstore.open(tmp_path / "s")
        return await tstore.save_async(store, {"w": np.arange(1_000_000)}, 1)

    save = asyncio.run(begin())
    assert save.wait() == 1
    assert asyncio.run(until(save)) == 1
    assert blocking.restore(tmp_path / "s")["w"][-1] == 999_999


async def until(save: tstore.BackgroundSave) -> int:
    return await save.committed


async def test_closing_a_store_waits_for_its_saves(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "s") as store:
        saves = [await tstore.save_async(store, {"w": np.arange(500_000)}, step) for step in range(3)]
    assert all(save.done() for save in saves)
    with blocking.open(tmp_path / "s") as store:
        assert blocking.save_async(store, {"w": np.zeros(3)}, 3).wait() == 4


# ---- overwriting a step


async def test_an_overwritten_step_is_the_new_one_and_the_old_version_stays(url: str) -> None:
    for value in range(3):
        assert await tstore.save(url, {"w": np.full(3, value)}, 5, overwrite=True) == value + 1
    store = await tstore.open(url)
    assert (await tstore.restore(store, 5))["w"][0] == 2
    assert (await tstore.restore(store, at=1))["w"][0] == 0
    assert await store.tags() == {"step/5": 3}
    await store.collect(tstore.Keep(last=1))
    assert (await tstore.restore(store, 5))["w"][0] == 2
    assert (await store.verify()).ok


async def test_hosts_overwrite_a_step_of_the_same_attempt(url: str) -> None:
    for value in range(3):
        tree = {f"w{n}": np.full(3, value) for n in range(4)}
        job: dict[str, Any] = {"hosts": 4, "attempt": "a", "overwrite": True, "timeout": 30}
        saves = [tstore.save(url, tree, 5, host=host, **job) for host in range(4)]
        assert await asyncio.gather(*saves) == [value + 1] * 4
        assert {int(w[0]) for w in (await tstore.restore(url, 5)).values()} == {value}


@pytest.mark.parametrize("hosts", [1, 2])
async def test_tags_of_a_save_move_to_it_in_its_commit(url: str, hosts: int) -> None:
    for step in (1, 2):
        job: dict[str, Any] = {"hosts": hosts, "attempt": "a", "timeout": 30, "tags": ["last", f"name-{step}"]}
        await asyncio.gather(
            *(tstore.save(url, {"w": np.full(3, step)}, step, host=h, **job) for h in range(hosts))
        )
    store = await tstore.open(url)
    assert await store.tags() == {"step/1": 1, "name-1": 1, "step/2": 2, "last": 2, "name-2": 2}
    assert [commit.version async for commit in store.history()] == [2, 1]
    assert (await tstore.restore(url, at="last"))["w"][0] == 2


async def test_of_two_writers_that_overwrite_a_step_one_is_told(url: str) -> None:
    await tstore.save(url, {"w": np.zeros(5000)}, 5)
    saves = [tstore.save(url, {"w": np.full(5000, float(i))}, 5, overwrite=True) for i in range(1, 5)]
    ended = await asyncio.gather(*saves, return_exceptions=True)
    versions = [result for result in ended if isinstance(result, int)]
    assert versions
    for error in (result for result in ended if not isinstance(result, int)):
        with pytest.raises(Conflict, match="save again to overwrite that one"):
            raise error  # type: ignore[misc]
    assert (await tstore.restore(url, 5))["w"][0] == 1 + ended.index(max(versions))


@pytest.mark.parametrize("staging", ["memory", "turns", "reference"])
async def test_a_small_leaf_before_one_longer_than_a_batch_is_not_all_that_is_written(tmp_path, staging):
    tree = {"a": np.arange(3.0), "b": np.arange(float(1 << 20)).reshape(1024, 1024), "c": np.arange(5.0)}
    save = await tstore.save_async(tmp_path / "store", tree, 1, staging=staging)
    await save.committed
    restored = await tstore.restore(tmp_path / "store")
    assert all(np.array_equal(restored[name], tree[name]) for name in tree)
