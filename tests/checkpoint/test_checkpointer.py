"""The Checkpointer: when it saves, what it keeps, what it resumes from, and how its errors surface."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import uuid
import warnings
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
import tstore.sync as blocking
from tests.support.polling import until
from tstore.checkpoint.checkpoint import Checkpoint
from tstore.checkpoint.policies import Moment, Policy
from tstore.core.runtime.pool import run_to_end
from tstore.errors import (
    AlreadyExists,
    Corrupt,
    DeadlineExceeded,
    InvalidArgument,
    Misuse,
    NotFound,
    StorageFull,
    TStoreError,
    Unavailable,
)
from tstore.lab.conformance.faults import open_faulty
from tstore.sync import Checkpointer, Continuous, EverySeconds, EverySteps, Keep, OnPreemption, Shards


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


def test_a_job_resumes_from_its_newest_step(tmp_path: Path) -> None:
    url, trained = tmp_path / "s", []

    def job(until: int) -> None:
        state = {"step": 0, "w": np.zeros(1000)}
        with Checkpointer(url, every=4, keep=2) as checkpoints:
            restored = checkpoints.restore_latest(target=state)
            if restored is not None:
                state = restored
            for step in range(state["step"] + 1, until):
                state["w"] += step
                state["step"] = step
                trained.append(step)
                if checkpoints.should_save(step):
                    checkpoints.save(step, state, metrics={"loss": 1 / step})

    job(10)
    job(15)
    assert trained == [*range(1, 10), *range(9, 15)]
    assert blocking.steps(url) == [8, 12]
    assert blocking.restore(url)["w"][0] == sum(range(13))


def test_nothing_is_made_by_asking_for_what_is_not_there(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", every=10) as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.best("loss") is None
        assert checkpoints.restore_latest() is None
        assert checkpoints.steps() == []
        assert not (tmp_path / "s").exists()
        with pytest.raises(NotFound):
            checkpoints.restore(3)
    with blocking.open(tmp_path / "s") as store, store.transaction() as tx:
        tx.create_group("g")  # a version, but no step
    assert Checkpointer(tmp_path / "s").restore_latest() is None


async def test_steps_have_their_versions_times_and_metrics(url: str) -> None:
    losses = [3.0, 1.0, float("nan"), 1.0, 2.0]
    async with tstore.Checkpointer(url) as checkpoints:
        for step, loss in enumerate(losses):
            await checkpoints.save(step, {}, metrics={"loss": loss})
        await checkpoints.save(5, {})
        saved = await checkpoints.steps()
        assert [(s.step, s.version) for s in saved] == [(n, n + 1) for n in range(6)]
        assert [s.metrics.get("loss") for s in saved[3:]] == [1.0, 2.0, None]
        assert saved[0].time <= saved[-1].time
        assert await checkpoints.best("loss") == 3  # of equal ones the newest
        assert await checkpoints.best("loss", "max") == 0
        assert await checkpoints.best("accuracy") is None
        with pytest.raises(InvalidArgument, match="step None: expected an integer"):
            await checkpoints.restore(await checkpoints.best("accuracy"))  # type: ignore[arg-type]
        assert (await checkpoints.latest(), await checkpoints.restore_latest()) == (5, {})
        with pytest.raises(InvalidArgument, match="'min' or 'max'"):
            await checkpoints.best("loss", "lowest")  # type: ignore[arg-type]


def test_the_newest_step_is_found_without_the_commits_of_the_others(tmp_path: Path) -> None:
    """Resuming takes as long after 10,000 steps as after 10; a damaged commit of an old step is no obstacle."""
    with Checkpointer(tmp_path / "s") as checkpoints:
        for step in range(70):  # the 64th version has a root
            checkpoints.save(step, {"value": step})
        checkpoints.wait()
        (tmp_path / "s" / "commits" / f"{3:020}").write_bytes(b"damaged")
        with pytest.raises(Corrupt):
            checkpoints.steps()
        assert checkpoints.latest() == 69
        assert checkpoints.restore_latest() == {"value": 69}


@pytest.mark.parametrize("before_rollback", [False, True], ids=["not yet", "rolled back"])
@pytest.mark.parametrize("keep", [Keep(last=2, best=(1, "loss")), Keep(last=2, tags=("good",))])
def test_a_rule_without_candidates_stops_neither_the_job_nor_the_collection(
    url: str, keep: Keep, before_rollback: bool
) -> None:
    if before_rollback:
        blocking.save(url, {"w": np.zeros(3)}, 0)
        blocking.save(url, {"w": np.zeros(3)}, 5, metrics={"loss": 2.0})
    with warnings.catch_warnings(record=True) as told, Checkpointer(url, keep=keep) as checkpoints:
        warnings.simplefilter("always")
        if before_rollback:
            checkpoints.rollback(0)
            with blocking.open(url) as store:
                store.collect(Keep(last=1))
        for step in range(1, 6):
            checkpoints.save(step, {"w": np.zeros(3)}, metrics={"loss": float("nan"), "other": 1.0})
            checkpoints.wait()
        assert blocking.steps(url) == [4, 5]
    [warning] = told
    assert re.search(r"no (step has the metric 'loss'|living version has the tag 'good')", str(warning.message))
    with blocking.open(url) as store, pytest.raises(NotFound, match="nothing was collected"):
        store.collect(keep)


async def test_host_0_collects_what_is_not_kept(url: str) -> None:
    keep = Keep(last=1, best=(1, "loss"))
    async with tstore.Checkpointer(url, keep=keep) as checkpoints:
        for step in range(6):
            await checkpoints.save(step, {"w": np.arange(2000) + step}, metrics={"loss": abs(step - 2)})
            await checkpoints.wait()
        assert [s.step for s in await checkpoints.steps()] == [2, 5]
    async with await tstore.open(url) as store:
        assert (await store.verify()).ok
        assert len([c async for c in store.history() if not c.expired and c.tag]) == 2
    many: list[tstore.Checkpointer] = [
        tstore.Checkpointer(url, keep=1, host=host, hosts=2, attempt="a") for host in (0, 1)
    ]
    await asyncio.gather(*(c.save(6, {"w": np.zeros(3)}) for c in many))
    await asyncio.gather(*(c.close() for c in many))
    assert await tstore.steps(url) == [6]


def test_errors_surface_at_the_next_call(url: str) -> None:
    blocking.save(url, {}, 3)
    calls: list[Any] = [
        lambda c: c.should_save(4),
        lambda c: c.latest(),
        lambda c: c.restore_latest(),
        lambda c: c.wait(),
        lambda c: c.close(),
        lambda c: c.save(4, {}),  # begins first
    ]
    for call in calls:
        checkpoints = Checkpointer(url, every=5, staging="reference")
        save = checkpoints.save(3, {})
        futures.wait([save._work.ended])
        with pytest.raises(AlreadyExists, match="step 3"):
            call(checkpoints)
        assert checkpoints.should_save(5)  # it was told
        checkpoints.close()
    assert blocking.steps(url) == [3, 4]
    with Checkpointer(url) as checkpoints:
        save = checkpoints.save(4, {})
        with pytest.raises(AlreadyExists):
            save.wait()
        assert checkpoints.save(4, {}, overwrite=True).wait() == 3


def test_a_save_past_its_deadline_is_abandoned(tmp_path: Path) -> None:
    url = tmp_path / "s"
    blocking.save(url, {"w": np.zeros(3)}, 0)
    checkpoints = Checkpointer(url, host=0, hosts=2, attempt="a")
    save = checkpoints.save(1, {"w": np.ones(5000)})  # the other host never comes
    with pytest.raises(DeadlineExceeded, match="it continues"):
        checkpoints.wait(0.01)
    assert not save.done()
    with pytest.raises(DeadlineExceeded, match="so it was abandoned"):
        checkpoints.close(0.01)
    with pytest.raises(DeadlineExceeded, match="so it was abandoned"):
        save.wait()
    assert blocking.steps(url) == [0]
    checkpoints.close()


def test_a_collection_past_its_deadline_is_abandoned(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def endless(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(tstore.Store, "collect", endless)
    checkpoints = Checkpointer(url, keep=1)
    save = checkpoints.save(1, {})
    assert save.wait() == 1
    with pytest.raises(DeadlineExceeded, match="the next one collects the same steps"):
        checkpoints.close(0.01)
    checkpoints.close()
    assert blocking.steps(url) == [1]


def test_a_closed_checkpointer_saves_no_more(url: str) -> None:
    with Checkpointer(url) as checkpoints:
        checkpoints.save(1, {"w": np.ones(2)})
    with pytest.raises(Misuse, match="Checkpointer is closed; make another one to save step 2"):
        checkpoints.save(2, {"w": np.ones(2)})
    assert checkpoints.latest() == 1
    assert checkpoints.restore_latest()["w"].tolist() == [1, 1]


def test_a_wrong_order_is_told_at_the_call_that_has_it(url: str) -> None:
    blocking.save(url, {}, 10)
    with Checkpointer(url) as checkpoints:
        with pytest.raises(InvalidArgument, match="step 9 comes before step 10"):
            checkpoints.save(9, {})
        saved = [checkpoints.save(step, {}) for step in (11, 12)]
        with pytest.raises(InvalidArgument, match="step 11 comes before step 12"):
            checkpoints.save(11, {})
        assert [save.wait() for save in saved] == [2, 3]
        checkpoints.rollback(10)
        assert checkpoints.save(11, {}).wait() == 5


# ---- policies

leaves = st.one_of(
    st.builds(EverySteps, st.integers(1, 50)),
    st.builds(EverySeconds, st.floats(0.1, 100)),
    st.builds(OnPreemption),
    st.builds(Continuous),
)
either_or_both = st.sampled_from([lambda a, b: a | b, lambda a, b: a & b])
policies = st.recursive(
    leaves, lambda some: st.builds(lambda join, a, b: join(a, b), either_or_both, some, some), max_leaves=4
)
moments = st.builds(Moment, st.integers(0, 10**6), st.floats(0, 200), st.booleans(), st.booleans())


@given(policies, policies, moments)
def test_policies_compose(a: Policy, b: Policy, moment: Moment) -> None:
    either, both = a | b, a & b
    assert either.due(moment) == (a.due(moment) or b.due(moment)) == (b | a).due(moment)
    assert both.due(moment) == (a.due(moment) and b.due(moment)) == (b & a).due(moment)
    assert either.uses_clock == both.uses_clock == (a.uses_clock or b.uses_clock)
    assert either.waits_for_save == both.waits_for_save == (a.waits_for_save or b.waits_for_save)
    assert either.signals == both.signals == a.signals | b.signals
    for policy in (either, both):
        same = eval(repr(policy).replace("<Signals.SIGTERM: 15>", "15"), globals())
        assert same.due(moment) == policy.due(moment)


@given(st.integers(1, 40), moments)
def test_steps_alone_decide_by_the_step(n: int, moment: Moment) -> None:
    assert EverySteps(n).due(moment) == (moment.step % n == 0)
    assert not EverySteps(n).uses_clock


def test_no_number_of_steps_is_told_by_its_argument(url: str) -> None:
    with pytest.raises(InvalidArgument, match="every=0: expected a number of steps, at least 1, or policies"):
        tstore.Checkpointer(url, every=0)


def test_when_to_save(url: str) -> None:
    with Checkpointer(url, every=EverySteps(3)) as checkpoints:
        assert [step for step in range(10) if checkpoints.should_save(step)] == [0, 3, 6, 9]
        checkpoints.save(6, {})
        assert not checkpoints.should_save(6)  # it is saved
    with Checkpointer(url) as checkpoints:
        assert checkpoints.should_save(7)  # every step
    with Checkpointer(url, every=EverySeconds(1e9)) as checkpoints:
        assert not checkpoints.should_save(0)
    with Checkpointer(url, every=EverySeconds(1e-9)) as checkpoints:
        assert checkpoints.should_save(0)


def test_several_hosts_must_agree(url: str) -> None:
    for policy in (EverySeconds(5), EverySteps(2) | OnPreemption()):
        with pytest.raises(InvalidArgument, match="agree="):
            Checkpointer(url, every=policy, hosts=2, attempt="a")
    asked = []

    def agree(due: bool) -> bool:
        asked.append(due)
        return True

    with Checkpointer(url, every=EverySteps(5) | EverySeconds(1e9), hosts=2, attempt="a", agree=agree) as hosts:
        assert [hosts.should_save(step) for step in (4, 5)] == [True, True]
    assert asked == [False, True]
    with Checkpointer(url, every=OnPreemption(), hosts=2, attempt="a", agree=agree) as hosts:
        assert hosts.should_save(3)  # another host was told to stop
    assert asked == [False, True, False, False]


def part(host: int, value: float, hosts: int = 2) -> blocking.Shards:
    rows = slice(2 * host, 2 * host + 2)
    return blocking.Shards((2 * hosts, 300), "f8", [((rows, slice(0, 300)), np.full((2, 300), float(value)))])


def test_an_error_of_one_host_does_not_cost_its_peers_the_next_step(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Checkpointer(url, keep=5, host=host, hosts=2, attempt="a") for host in (0, 1)]
    lost = AsyncMock(side_effect=Unavailable("503"))
    with monkeypatch.context() as broken:
        broken.setattr("tstore.core.store.Store.collect", lost)
        futures.wait([jobs[host].save(1, part(host, 1.0))._work.ended for host in (0, 1)])
    with pytest.raises(Unavailable, match="503"):
        jobs[0].save(2, part(0, 2.0))
    assert jobs[1].save(2, part(1, 2.0)).wait() == 2
    assert not jobs[0].should_save(2)
    assert (blocking.restore(url, 2) == 2).all()
    for job in jobs:
        job.close()


@pytest.mark.parametrize("error", [StorageFull, Unavailable, OSError])
def test_hosts_in_lockstep_lose_only_the_step_of_a_transient_error(url: str, error: type[Exception]) -> None:
    """Host 1 can't deliver its part of step 2. Host 0 learns of that later, when it waits for that part."""
    stores = [asyncio.run(open_faulty(url)) for _ in range(2)]
    stores[1][1].fail("create", "*/part-*", nth=2, error=error)
    lockstep, told = threading.Barrier(2), []

    def train(host: int) -> None:
        with Checkpointer(stores[host][0], host=host, hosts=2, attempt="a") as job:
            for step in range(1, 6):
                lockstep.wait(60)
                try:
                    job.save(step, part(host, step))
                except (TStoreError, OSError) as raised:
                    told.append((host, type(raised)))

    with futures.ThreadPoolExecutor(2) as hosts:
        list(hosts.map(train, range(2)))
    own = error if error is StorageFull else Unavailable  # it may have been delivered, but was withdrawn
    assert sorted(told, key=str) == [(0, DeadlineExceeded), (1, own)]
    assert blocking.steps(url) == [1, 3, 4, 5]


class _Unreadable:
    """An array that can't be read."""

    shape, dtype = (4, 300), np.dtype("f8")

    def __array__(self, *_: object, **__: object) -> Any:
        raise RuntimeError("no such device")


WRONG: dict[str, Any] = {
    "tree": {"tree": {"w": object()}},
    "values": {"tree": _Unreadable()},
    "arguments": {"metrics": {"loss": "low"}},
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_peers_of_a_host_that_can_not_begin_to_save_are_told_at_once(
    url: str, wrong: str, overwrite: bool
) -> None:
    """Not only after their own timeout, and they stay in lockstep."""
    lockstep, told = threading.Barrier(2), []

    def train(host: int) -> None:
        with Checkpointer(url, host=host, hosts=2, attempt="a") as job:
            for step in range(1, 4):
                lockstep.wait(60)
                arguments = {"step": step, "tree": part(host, step), "overwrite": overwrite}
                try:
                    job.save(**arguments | (WRONG[wrong] if (host, step) == (1, 2) else {})).wait(60)
                except Exception as raised:
                    told.append((host, step, raised))

    with futures.ThreadPoolExecutor(2) as hosts:
        list(hosts.map(train, range(2)))
    own, other = sorted(told, key=lambda each: -each[0])
    assert [own[:2], other[:2]] == [(1, 2), (0, 2)]
    assert not isinstance(own[2], Unavailable)
    assert isinstance(other[2], DeadlineExceeded)
    assert "host 1 of 2 gave up" in str(other[2])
    assert blocking.steps(url) == [1, 3]


async def test_peers_of_a_host_that_refuses_a_second_save_are_told_at_once(url: str) -> None:
    jobs = [
        tstore.Checkpointer(url, host=host, hosts=2, attempt="a", in_flight="refuse", timeout=20)
        for host in range(2)
    ]
    first = await jobs[1].save(1, part(1, 1))
    with pytest.raises(Misuse, match="a save is under way"):
        await jobs[1].save(2, part(1, 2))
    assert await (await jobs[0].save(1, part(0, 1))).committed == await first.committed
    with pytest.raises(DeadlineExceeded, match="host 1 of 2 gave up"):
        await (await jobs[0].save(2, part(0, 2))).committed
    assert await (await jobs[1].save(3, part(1, 3))).staged is None
    assert await (await jobs[0].save(3, part(0, 3))).committed == 2


async def test_every_error_names_the_host_that_is_dead(url: str) -> None:
    """Host 3 of 6 was killed. The others save three steps, and another of them is the first to give up each."""
    store = await tstore.open(url)
    jobs = [
        tstore.Checkpointer(store, host=host, hosts=6, attempt="a", timeout=60) for host in range(6) if host != 3
    ]
    errors: list[Any] = []
    for step, impatient in enumerate(jobs[:3]):
        saves = [await job.save(step, np.zeros(3)) for job in jobs if job is not impatient]

        async def others_delivered() -> bool:
            states = [state for state in await store.pending() if state.withdrawn_by is None]
            return [len(state.delivered) for state in states] == [4]

        await until(others_delivered)
        saves.append(await impatient.save(step, np.zeros(3), timeout=1))
        errors += await asyncio.gather(*(save.committed for save in saves), return_exceptions=True)
    assert [type(error) for error in errors] == [DeadlineExceeded] * 15
    assert [error.absent for error in errors] == [[3]] * 15
    assert all("hosts [3]" in str(error) for error in errors)


def test_a_step_whose_save_failed_is_due_again(url: str) -> None:
    with Checkpointer(url, hosts=2, attempt="a", timeout=0.1) as checkpoints:
        with pytest.raises(DeadlineExceeded):
            checkpoints.save(4, np.ones(3)).wait()
        assert checkpoints.should_save(4)


@pytest.mark.parametrize(("alone", "reason"), [(0, DeadlineExceeded), (1, DeadlineExceeded), (0, Unavailable)])
def test_parts_of_a_save_that_was_given_up_are_not_committed_with_later_ones(
    url: str, alone: int, reason: type[TStoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host saves alone, and gives up; then all hosts go on in the same processes, and save the step again."""
    hosts = [Checkpointer(url, host=host, hosts=2, attempt="a", timeout=1) for host in range(2)]

    def save(host: int, step: int, value: float) -> type[TStoreError] | int:
        rows = slice(2 * host, 2 * host + 2)
        part = Shards((4,), "f8", [((rows,), np.full(2, value))], shard_shape=(2,))
        try:
            return hosts[host].save(step, part).wait()
        except TStoreError as error:
            return type(error)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda host: save(host, 2, 2.0), range(2))) == [1, 1]
        with monkeypatch.context() as network:
            if reason is Unavailable:  # while this host waits for the other one
                network.setattr("tstore.core.log.reader.LogReader.scan", AsyncMock(side_effect=Unavailable("503")))
            assert save(alone, 3, 3.0) is reason
        assert [checkpoints.restore_latest().tolist() for checkpoints in hosts] == [[2.0] * 4] * 2
        assert list(pool.map(lambda host: save(host, 3, 3.5), range(2))) == [DeadlineExceeded] * 2
        assert list(pool.map(lambda host: save(host, 4, 4.0), range(2))) == [2, 2]
    assert blocking.restore(url).tolist() == [4.0] * 4


def test_hosts_agree_only_where_a_policy_may_be_due(url: str) -> None:
    asked = []

    def agree(due: bool) -> bool:
        asked.append(due)
        return due

    policy = EverySteps(100) | EverySteps(10) & (EverySeconds(1e9) | OnPreemption())
    assert " | EverySteps(steps=10) & (EverySeconds(seconds=1000000000.0) | On" in repr(policy)
    with Checkpointer(url, every=policy, hosts=2, attempt="a", agree=agree) as hosts:
        assert [step for step in range(1, 101) if hosts.should_save(step)] == [100]
        assert len(asked) == 11  # and once more, when one was due, whether to stop
        signal.raise_signal(signal.SIGTERM)
        assert [step for step in range(101, 121) if hosts.should_save(step)] == [110, 120]


def test_hosts_that_are_told_to_stop_end_at_the_same_step(url: str) -> None:
    """Otherwise the others would wait in their next collective operation for one that has left."""

    asked = []

    def agree(decision: bool) -> bool:  # the signal comes to this host while the hosts agree whether to stop
        asked.append(decision)
        if len(asked) == 2:
            signal.raise_signal(signal.SIGTERM)
        return decision

    with Checkpointer(url, every=EverySteps(1) | OnPreemption(), agree=agree) as checkpoints:
        assert checkpoints.should_save(1)
        checkpoints.save(1, {})
        assert not checkpoints.preempted  # the others do not know
        assert checkpoints.should_save(2)
        checkpoints.save(2, {})
        assert checkpoints.preempted


@pytest.mark.parametrize(
    "make",
    [
        lambda: EverySteps(0),
        lambda: EverySteps(True),
        lambda: EverySeconds(0),
        lambda: EverySeconds("1"),  # type: ignore[arg-type]
        lambda: OnPreemption(0),
        lambda: Checkpointer("s", every="10"),  # type: ignore[arg-type]
        lambda: Checkpointer("s", every=True),
        lambda: Checkpointer("s", keep=0),
        lambda: Checkpointer("s", keep="all"),  # type: ignore[arg-type]
        lambda: Checkpointer("s", staging="disk"),  # type: ignore[arg-type]
        lambda: Checkpointer("s").should_save(-1),
        lambda: Checkpointer({"w": 1}).save(1, {}),  # type: ignore[arg-type]
        lambda: Checkpointer("s").save({"w": np.zeros(3)}, 1),  # type: ignore[arg-type]
    ],
)
def test_invalid_arguments_are_refused(make: Any) -> None:
    with pytest.raises(InvalidArgument):
        make()


def test_arguments_in_another_order_are_refused_with_the_right_one(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"the step comes first, as in save\(99, state\)"):
        Checkpointer(url).save({"w": np.zeros(3)}, 99)  # type: ignore[arg-type]


@pytest.mark.parametrize("staging", ["memory", "turns", "reference"])
@pytest.mark.parametrize("yields", range(0, 40, 4))
async def test_a_cancelled_save_is_known(url: str, staging: Any, yields: int) -> None:
    """Whenever its caller is cancelled, `wait` waits for the end of the save, and nothing is an error."""
    async with tstore.Checkpointer(url, staging=staging) as checkpoints:
        call = asyncio.create_task(checkpoints.save(1, {"w": np.zeros(300_000)}))
        for _ in range(yields):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        steps = [step.step for step in await checkpoints.steps()]
        assert steps in ([], [1])
        assert call.cancelled() or steps == [1]
        await checkpoints.save(2, {})
    assert await tstore.steps(url) == [*steps, 2]


async def test_a_save_whose_caller_is_cancelled_once_it_is_staged_is_known(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, commits = threading.Event(), threading.Event()
    saved = Checkpoint.save

    async def save(self: Any, store: Any, *others: Any) -> int:
        staged.set()
        return await run_to_end(committed(self, store, *others))

    async def committed(*arguments: Any) -> int:
        await asyncio.to_thread(commits.wait)
        return await saved(*arguments)

    checkpoints = tstore.Checkpointer(url)
    await (await checkpoints.save(0, {})).committed  # the next save need not read which steps there are
    monkeypatch.setattr(Checkpoint, "save", save)
    call = asyncio.create_task(checkpoints.save(1, {"w": np.zeros(3)}))
    await asyncio.sleep(0)
    assert staged.wait(30)  # which this loop has not seen yet
    call.cancel()
    await asyncio.wait([call])
    try:
        with pytest.raises(DeadlineExceeded, match="the save of step 1 has not ended"):
            await checkpoints.wait(0.01)
    finally:
        commits.set()
        await checkpoints.close()
    assert await tstore.steps(url) == [0, 1]


def test_the_signal_comes_to_the_one_that_is_open(url: str) -> None:
    """A blocking `close` leaves its handler to the next signal, behind which another one stands meanwhile."""
    closed = [Checkpointer(url, every=OnPreemption()) for _ in range(2)]
    with Checkpointer(url, every=OnPreemption()) as checkpoints:
        for other in closed:
            other.close()
        signal.raise_signal(signal.SIGTERM)
        assert [c.should_save(1) for c in (*closed, checkpoints)] == [False, False, True]


def test_signals_need_the_main_thread(url: str) -> None:
    raised = []

    def make() -> None:
        try:
            Checkpointer(url, every=OnPreemption())
        except Misuse as error:
            raised.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "main thread" in raised[0]
