"""Going on from an earlier step: what `rollback` removes, what a save without it says, and what is resumed."""

from __future__ import annotations

import asyncio
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tstore.cli import main
from tstore.core.tags import remove_step, remove_steps, remove_steps_after
from tstore.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    InvalidArgument,
    NotAStore,
    NotFinite,
    NotFound,
)
from tstore.lab.conformance.faults import open_faulty


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


def state(value: float) -> dict[str, Any]:
    return {"w": np.full(5000, value), "value": value}


def job(url: str | Path, hosts: int = 1, **options: Any) -> list[tstore.Checkpointer]:
    return [tstore.Checkpointer(url, host=h, hosts=hosts, attempt="a", **options) for h in range(hosts)]


async def save(hosts: list[tstore.Checkpointer], steps: list[int], value: float = 0.0) -> None:
    for step in steps:
        await asyncio.gather(*(c.save(step, state(value + step)) for c in hosts))
    await asyncio.gather(*(c.wait() for c in hosts))


def test_a_job_goes_on_from_an_earlier_step(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path / "s", every=10, keep=3) as checkpoints:
        for step in (280, 290, 300):
            checkpoints.save(step, state(step))
        restored = checkpoints.restore(290)
        with pytest.raises(InvalidArgument, match=r"step 291 comes before step 300, the newest.*rollback\(290\)"):
            checkpoints.save(291, restored)
        version = checkpoints.rollback(290)
        assert [step.step for step in checkpoints.steps()] == [280, 290]
        assert checkpoints.restore_latest()["value"] == 290
        checkpoints.save(291, state(-291))
        checkpoints.save(300, state(-300))
        assert checkpoints.restore_latest()["value"] == -300
        assert blocking.steps(tmp_path / "s") == [290, 291, 300]
    with blocking.open(tmp_path / "s") as store:
        assert [c.message for c in store.history() if c.version == version] == ["remove the steps after 290"]
        assert store.verify().ok


@pytest.mark.parametrize("staging", ["memory", "turns", "reference"])
@pytest.mark.parametrize("overwrite", [False, True])
async def test_a_step_before_the_newest_is_refused(url: str, staging: Any, overwrite: bool) -> None:
    await tstore.save(url, state(2), 2)
    await tstore.save(url, state(3), 3)
    checkpoints = tstore.Checkpointer(url, staging=staging)
    for step in (1, 2):
        advice = r"no earlier step for rollback; .*another URL, or .*tstore rm .* --step 3\)"
        with pytest.raises(InvalidArgument, match=f"step {step} comes before step 3.*{advice}"):
            await (await checkpoints.save(step, state(1), overwrite=overwrite)).committed
    async with await tstore.open(url) as store:
        assert await store.tags() == {"step/2": 1, "step/3": 2}
        assert (await store.snapshot()).version == 2
    await checkpoints.save(3, state(4), overwrite=True)  # the newest one itself may be saved again
    await checkpoints.close()
    assert (await tstore.restore(url))["value"] == 4


def test_a_job_saves_earlier_steps_once_the_later_ones_are_removed(tmp_path: Path) -> None:
    """As the error advises, with another program or another object of this one."""
    with blocking.Checkpointer(tmp_path / "s") as checkpoints:
        for step in (1, 3):
            checkpoints.save(step, state(step))
        with pytest.raises(InvalidArgument, match="step 2 comes before step 3"):
            checkpoints.save(2, state(-2))
        checkpoints.wait()
        assert main(["rm", str(tmp_path / "s"), "--step", "3"]) == 0
        checkpoints.save(2, state(-2))
        assert checkpoints.restore_latest()["value"] == -2


async def test_a_step_before_one_that_another_job_saved_meanwhile_is_refused(url: str) -> None:
    """The job has saved before, so it looks at the steps of the store only as it saves."""
    [checkpoints] = job(url)
    await save([checkpoints], [10])
    await tstore.save(url, state(30.0), 30)
    late = await checkpoints.save(11, state(11.0))
    with pytest.raises(InvalidArgument, match="step 11 comes before step 30"):
        await late.committed
    assert await tstore.steps(url) == [10, 30]


async def test_what_is_removed_stays_readable_as_a_version(url: str) -> None:
    [checkpoints] = hosts = job(url)
    await save(hosts, [1, 2, 3])
    assert await checkpoints.rollback(1) == 4
    assert not checkpoints.should_save(1)
    assert checkpoints.should_save(3)  # although it was saved last
    assert (await tstore.restore(url, at=3))["value"] == 3
    assert (await tstore.restore(url))["value"] == 1
    assert await checkpoints.rollback(1) == 4  # nothing is left to remove
    assert (await (await tstore.open(url)).snapshot()).version == 4
    with pytest.raises(NotFound, match="no step 2; its steps are: 1"):
        await checkpoints.rollback(2)
    with pytest.raises(InvalidArgument, match="step -1"):
        await checkpoints.rollback(-1)
    with pytest.raises(NotAStore):
        await tstore.Checkpointer(f"memory://{uuid.uuid4()}").rollback(1)


async def test_hosts_roll_back_in_one_commit_and_save_the_steps_again(url: str) -> None:
    hosts = job(url, 3)
    await save(hosts, [1, 2, 3])
    for n in (1, 2):
        versions = await asyncio.gather(*(c.rollback(1) for c in hosts))
        assert len(set(versions)) == 1
        assert await tstore.steps(url) == [1]
        await save(hosts, [2, 3], 10.0 * n)
        assert (await tstore.restore(url))["value"] == 10 * n + 3
    async with await tstore.open(url) as store:
        assert sum("remove" in c.message for c in [c async for c in store.history()]) == 2


async def test_a_host_whose_rollback_was_lost_calls_it_again(url: str) -> None:
    hosts = job(url, 2, timeout=30)
    await save(hosts, [1, 2, 3])
    hosts[1]._timeout = 0.05
    with pytest.raises(DeadlineExceeded, match=r"host 0 has not removed the steps after 1.*every host") as late:
        await hosts[1].rollback(1)
    hosts[1]._timeout = 30
    assert late.value.absent == [0]
    assert await tstore.steps(url) == [1, 2, 3]
    version = await hosts[0].rollback(1)
    assert [await c.rollback(1) for c in hosts] == [version] * 2
    await save(hosts, [2, 3], 10.0)
    assert (await tstore.restore(url, 2))["value"] == 12


async def test_a_rollback_that_is_cancelled_can_be_called_again(url: str) -> None:
    for number, cut in enumerate(range(0, 45, 5)):
        hosts = job(f"{url}-{cut}", 2)
        await save(hosts, [1, 2, 3])
        calls = [asyncio.create_task(c.rollback(1)) for c in hosts]
        for _ in range(cut):
            await asyncio.sleep(0)
        calls[number % 2].cancel()
        await asyncio.wait(calls[:1])  # host 1 waits for host 0
        if calls[0].cancelled() and not calls[1].done():
            calls[1].cancel()
        await asyncio.wait(calls)
        assert await tstore.steps(f"{url}-{cut}") in ([1, 2, 3], [1])
        versions = await asyncio.gather(*(c.rollback(1) for c in hosts))
        assert versions[0] == versions[1]
        await save(hosts, [2, 3], 10.0)
        assert (await tstore.restore(f"{url}-{cut}", 3))["value"] == 13


async def test_a_host_that_wakes_up_behind_a_rollback_does_not_commit(url: str) -> None:
    """It stood still between its claim and the record of step 30; alone it stood still before the record."""
    for hosts in (1, 2):
        place = f"{url}-{hosts}"
        before = job(place, hosts)
        await save(before, [10, 20])
        stores = [await open_faulty(place) for _ in range(hosts)]
        gates = [faults.hold("create", "commits/*") for _, faults in stores]
        late = [
            asyncio.create_task(tstore.save(store, state(30), 30, host=h, hosts=hosts, attempt="a", timeout=30))
            for h, (store, _) in enumerate(stores)
        ]
        reached = [asyncio.create_task(gate.reached()) for gate in gates]
        await asyncio.wait(reached, return_when="FIRST_COMPLETED")
        after = [tstore.Checkpointer(place, host=h, hosts=hosts, attempt="b") for h in range(hosts)]
        await asyncio.gather(*(c.rollback(10) for c in after))
        await save(after, [11])
        for gate in gates:
            gate.release()
        for call in late:
            with pytest.raises(Conflict, match="steps were removed, as rollback does") as caught:
                await call
            assert caught.value.paths == ["tag step/30"]
        for task in reached:
            task.cancel()
        assert await tstore.steps(place) == [10, 11]
        await save(after, [12])
        assert (await tstore.restore(place))["value"] == 12


@pytest.mark.parametrize("remove", [False, True], ids=["rollback", "remove"])
async def test_a_removal_of_steps_meets_a_step_that_is_saved_meanwhile(url: str, remove: bool) -> None:
    await save(job(url), [10, 20])
    store, faults = await open_faulty(url)
    gate = faults.hold("create", "commits/*")
    removal = asyncio.create_task(remove_step(store, 20) if remove else remove_steps_after(store, 10))
    await gate.reached()
    await tstore.save(url, state(30), 30)
    gate.release()
    assert await removal == 4
    assert await tstore.steps(url) == ([10, 30] if remove else [10])


async def test_every_process_of_a_job_may_remove_the_same_steps(url: str) -> None:
    await save(job(url), [10, 20, 30])
    store, faults = await open_faulty(url)
    gate = faults.hold("create", "commits/*")
    late = asyncio.create_task(remove_steps(store, [20, 30, 99]))
    await gate.reached()
    assert await remove_steps(await tstore.open(url), [20, 30, 99]) == 4
    gate.release()
    assert await late == 5
    assert await remove_steps(store, [20, 30]) is None
    assert await tstore.steps(url) == [10]


async def test_the_copies_of_a_step_that_is_removed_or_saved_again_lose_their_tags(url: str) -> None:
    store = await tstore.open(url)
    for step in (10, 20):
        await tstore.save(store, {"w": np.ones(4, np.float32)}, step)
        await tstore.quantize(store, "e4m3", at=f"step/{step}", tag=f"step/{step}/e4m3")
    await remove_steps(store, [10])
    assert (await store.tags()).keys() == {"step/20", "step/20/e4m3"}
    await tstore.save(store, {"w": np.zeros(4, np.float32)}, 20, overwrite=True)
    assert (await store.tags()).keys() == {"step/20"}


@pytest.mark.parametrize("remove", [False, True], ids=["rollback", "remove"])
async def test_a_removal_of_steps_meets_tags_set_before_its_commit_is_based_on_a_version(
    url: str, remove: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(job(url), [10, 20])
    store, read_tags = await tstore.open(url), tstore.Store.tags

    async def tags_before_another_commit(self: tstore.Store) -> dict[str, int]:
        tags = await read_tags(self)
        with monkeypatch.context() as patch:
            patch.setattr(tstore.Store, "tags", read_tags)
            if "step/20/e4m3" not in tags:
                await tstore.quantize(url, {"**": "e4m3"}, at="step/20", tag="step/20/e4m3")
            if not remove and "step/30" not in tags:
                await tstore.save(url, state(30), 30)
        return tags

    monkeypatch.setattr(tstore.Store, "tags", tags_before_another_commit)
    await (remove_step(store, 20) if remove else remove_steps_after(store, 10))
    monkeypatch.undo()
    assert list(await (await tstore.open(url)).tags()) == ["step/10"]


async def test_hosts_agree_on_a_rollback_though_an_earlier_step_is_removed_between_their_calls(url: str) -> None:
    hosts = job(url, 2, timeout=60)
    await save(hosts, [5, 10, 20])
    version = await hosts[0].rollback(10)
    async with await tstore.open(url) as store:
        assert await remove_step(store, 5) > version
    assert await hosts[1].rollback(10) == version
    await save(hosts, [11])
    assert await tstore.steps(url) == [10, 11]


@pytest.mark.parametrize("anew", [False, True])
async def test_the_parts_of_a_failed_save_are_never_mixed_with_those_of_the_next(url: str, anew: bool) -> None:
    """Host 0 has written its part of step 2 when host 1 can't, and both go on from step 1."""
    hosts = job(url, 2, codecs="e4m3")

    async def save_parts(step: int, *values: float) -> list[Any]:
        saves = []
        for host, value in reversed([*enumerate(values)]):
            index = (slice(4 * host, 4 * host + 4),)
            shards = tstore.Shards((8,), "f4", [(index, np.full(4, value, "f4"))])
            saves.append(await hosts[host].save(step, {"w": shards}))
        return await asyncio.gather(*(save.committed for save in saves), return_exceptions=True)

    await save_parts(1, 1.0, 1.0)
    hosts[0]._timeout = 0.05
    assert [*map(type, await save_parts(2, 2.0, np.nan))] == [NotFinite, DeadlineExceeded]
    hosts[0]._timeout = 30
    if anew:
        hosts[:] = job(url, 2, codecs="e4m3")
    else:
        assert [await c.rollback(1) for c in hosts] == [1, 1]
    assert await save_parts(2, 3.0, 3.0) == [2, 2]
    assert (await tstore.restore(url, 2))["w"].tolist() == [3.0] * 8


async def test_the_attempt_of_a_removed_step_is_used_up(url: str) -> None:
    await save(job(url, 2), [1, 2])
    async with await tstore.open(url) as store, store.transaction(drop_tag="step/2"):
        pass
    options: dict[str, Any] = {"hosts": 2, "timeout": 30}
    for save_again in [tstore.save(url, state(3), 2, host=h, attempt="a", **options) for h in (0, 1)]:
        with pytest.raises(AlreadyExists, match=r"already saved step 2, as version 2, and.*another attempt="):
            await save_again
    again = (tstore.save(url, state(3), 2, host=h, attempt="b", **options) for h in (0, 1))
    assert len(set(await asyncio.gather(*again))) == 1
    assert (await tstore.restore(url, 2))["value"] == 3


@pytest.mark.parametrize("collections", [1, 2])
async def test_a_host_that_runs_again_is_told_that_its_step_was_removed(collections: int, url: str) -> None:
    """At once, if the last collection removed it; otherwise once it has waited for the other host."""
    await save(job(url, 2), [1, 2])
    async with await tstore.open(url) as store:
        await store.collect(tstore.Keep(last=1), abandoned=timedelta(0))
        if collections == 2:
            await save(job(url, 2), [3])
            await store.collect(tstore.Keep(last=1), abandoned=timedelta(0))
    with pytest.raises(AlreadyExists, match=r"already saved step 1, as version 1, and.*another attempt="):
        await tstore.save(url, state(1), 1, host=0, hosts=2, attempt="a", timeout=60 if collections == 1 else 0.05)


def test_a_damaged_newest_step_is_never_replaced_silently(tmp_path: Path) -> None:
    with blocking.Checkpointer(tmp_path / "s") as checkpoints:
        checkpoints.save(1, state(1))
        checkpoints.wait()
        packs = set((tmp_path / "s" / "txn").rglob("pack-*"))
        checkpoints.save(2, state(2))
        checkpoints.wait()
        for pack in set((tmp_path / "s" / "txn").rglob("pack-*")) - packs:
            pack.write_bytes(pack.read_bytes()[::-1])
        with pytest.raises(Corrupt, match=r"step 2, the newest.*w.*rollback\(1\)"):
            checkpoints.restore_latest()
        checkpoints.rollback(1)
        assert checkpoints.restore_latest()["value"] == 1


async def test_several_tags_are_dropped_in_one_commit(url: str) -> None:
    async with await tstore.open(url) as store:
        for tag in ("a", "b", "c"):
            async with store.transaction(tag=tag):
                pass
        with pytest.raises(NotFound, match="no tag 'd' to drop"):
            async with store.transaction(drop_tag=["a", "d"]):
                pass
        with pytest.raises(InvalidArgument, match="passed twice"):
            store.transaction(drop_tag=["a", "a"])
        async with store.transaction(drop_tag=["a", "b"]):
            pass
        assert await store.tags() == {"c": 3}


@pytest.mark.parametrize("how", ["rollback", "remove", "overwrite"])
async def test_the_tags_of_copies_go_with_their_step(tmp_path: Path, how: str) -> None:
    url = tmp_path / "s"
    for step in (10, 20):
        await tstore.save(url, {"w": np.full((64, 64), step, "f4")}, step)
    await tstore.quantize(url, "e4m3")
    await tstore.quantize(url, "e4m3", at="step/10", tag="mine")
    assert set(await (await tstore.open(url)).tags()) == {"step/10", "step/20", "step/20/e4m3", "mine"}
    if how == "rollback":
        async with tstore.Checkpointer(url) as checkpoints:
            await checkpoints.rollback(10)
    elif how == "remove":
        assert await asyncio.to_thread(main, ["rm", str(url), "--step", "20"]) == 0
    await tstore.save(url, {"w": np.full((64, 64), 3, "f4")}, 20, overwrite=how == "overwrite")
    assert set(await (await tstore.open(url)).tags()) == {"step/10", "step/20", "mine"}
    assert (await tstore.quantize(url, "e4m3")).tag == "step/20/e4m3"
    assert (await tstore.restore(url, at="step/20/e4m3"))["w"][0, 0] == 3


async def test_the_default_tag_of_a_copy_moves_to_that_of_the_version_saved_instead(tmp_path: Path) -> None:
    """A step that several hosts overwrite keeps the tags of its copies: only one host can drop tags."""
    url = tmp_path / "s"
    await tstore.save(url, {"w": np.full((64, 64), 1, "f4")}, 20)
    await tstore.quantize(url, "e4m3")
    with pytest.raises(AlreadyExists, match="already names version 2"):
        await tstore.quantize(url, "e4m3")

    async def save(host: int) -> int:
        part = ((slice(host * 32, host * 32 + 32), slice(0, 64)), np.full((32, 64), 3, "f4"))
        tree = {"w": tstore.Shards((64, 64), "f4", [part])}
        return await tstore.save(url, tree, 20, host=host, hosts=2, attempt="a", overwrite=True)

    await asyncio.gather(save(0), save(1))
    assert (await tstore.quantize(url, "e4m3")).tag == "step/20/e4m3"
    assert (await tstore.restore(url, at="step/20/e4m3"))["w"][0, 0] == 3
