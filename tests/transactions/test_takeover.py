"""Many hosts, hosts that die, others that finish for them, and which hosts are reported as absent."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.dying import Dead, Dying
from tests.support.polling import delivered, until
from tests.support.thresholds import Thresholds
from tstore.errors import (
    CommitOutcomeUnknown,
    Conflict,
    DeadlineExceeded,
    Denied,
    Inconsistent,
    InvalidArgument,
    NotFound,
)
from tstore.lab.conformance.faults import Faults, open_faulty
from tstore.lab.simulation.scenario import override_constants

BLOCK = 10
"""The number of hosts in a block: a tenth of the usual, so that few hosts merge as many do."""
MANY = 23
"""The number of hosts whose fragments are merged in a tree: two full blocks and a part of one."""


@pytest.fixture
def short_blocks() -> Iterator[None]:
    with override_constants(FAN_IN=BLOCK):
        yield


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


async def host(
    store: tstore.Store, number: int, hosts: int, *, attempt: str = "a", timeout: float = 20, writes: int = -1
) -> int:
    """Create the array "w" as every host does, and write one chunk, by default that of the host's number."""
    tx = store.transaction(
        name="n", host=number, hosts=hosts, attempt=attempt, tag=f"t/{hosts}", durability="none"
    )
    w = await tx.create_array("w", (hosts,), "int32", (1,))
    at = number if writes < 0 else writes
    await w[at].write(at + 1)
    return await tx.commit(timeout)


async def check(store: tstore.Store, hosts: int) -> None:
    assert (await store.tags()) == {f"t/{hosts}": 1}
    values = await (await (await store.snapshot()).array("w")).read()
    assert values.tolist() == list(range(1, hosts + 1))
    assert (await store.verify()).ok


async def outcomes(*calls: Any) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


# ---- large groups


@pytest.mark.usefixtures("short_blocks")
async def test_a_large_group_merges_as_a_tree(url: str) -> None:
    opened = [await open_faulty(url) for _ in range(MANY)]
    assert await asyncio.gather(*[host(s, h, MANY) for h, (s, _) in enumerate(opened)]) == [1] * MANY
    await check(opened[0][0], MANY)
    merges = await opened[0][0].log.storage.list(
        f"txn/{opened[0][0].transaction(name='n', host=0, hosts=MANY, attempt='a').id}/merge-"
    )
    assert [k.rpartition("/")[2] for k in merges] == [f"merge-1-{i:05d}-of-{MANY:05d}" for i in range(3)]
    read = [faults.count("get", "*/part-*") for _, faults in opened]
    assert max(read) <= BLOCK
    assert max(faults.count("get", "*/merge-*") for _, faults in opened) <= 3


@pytest.mark.usefixtures("short_blocks")
async def test_a_host_may_die_after_its_fragment(url: str) -> None:
    """The refused host had claimed its block, so another merges it."""
    store, faults = await open_faulty(url)
    others = [asyncio.create_task(host(await tstore.open(url), h, MANY)) for h in range(MANY) if h != 15]
    await until(lambda: delivered(store, MANY - 1), *others)
    faults.fail("list", "*/part-001*")
    with pytest.raises(CommitOutcomeUnknown):
        await host(store, 15, MANY)
    assert await asyncio.gather(*others) == [1] * (MANY - 1)
    await check(store, MANY)


@pytest.mark.usefixtures("short_blocks")
async def test_the_absent_hosts_of_a_large_group_are_named(url: str) -> None:
    store = await tstore.open(url)
    results = await outcomes(*[host(store, h, MANY, timeout=1.5) for h in range(MANY) if h not in (7, 15, 16)])
    assert {type(e) for e in results} == {DeadlineExceeded}
    assert [7, 15, 16] in [e.absent for e in results]
    assert set.intersection(*[set(e.absent) for e in results]) == {7, 15, 16}
    assert await outcomes(*[host(store, h, MANY) for h in (7, 15, 16)]) == [1] * 3
    await check(store, MANY)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("twin", [15, 5], ids=["of its block", "of another block"])
async def test_a_chunk_of_two_hosts_in_a_large_group_is_refused(url: str, twin: int) -> None:
    store = await tstore.open(url)
    calls = [host(store, h, MANY, timeout=30, writes=twin if h == 16 else -1) for h in range(MANY)]
    results = await outcomes(*calls)
    assert {type(e) for e in results} == {Inconsistent}
    assert f"w: chunks at [{twin}:{twin + 1}]" in str(results[0])
    assert (await store.snapshot()).version == 0


# ---- the finisher dies


@pytest.mark.parametrize("hosts", [3, 101])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
async def test_the_finisher_may_die_at_each_step(tmp_path: Path, hosts: int, done: bool) -> None:
    """All others have delivered and left. A later process finishes the commit, once and completely."""
    last = hosts // 2
    before = await tstore.open(tmp_path / "before")
    results = await outcomes(*[host(before, h, hosts, timeout=0.01) for h in range(hosts) if h != last])
    assert {type(e) for e in results} == {DeadlineExceeded}
    steps = 0
    while True:
        shutil.copytree(tmp_path / "before", tmp_path / "store")
        store = await tstore.open(tmp_path / "store")
        mortal = tstore.Store(Dying(store.log.storage, steps, done=done), store.marker, "a")  # type: ignore[arg-type]
        try:
            await host(mortal, last, hosts)
        except Dead:
            delivered = steps > 0 or done
            [state] = await store.pending() or [None]
            if state is None:
                assert await store.snapshot(1)  # it died after the record
            else:
                assert state.absent == (() if delivered else (last,))
            if not delivered:
                with pytest.raises(DeadlineExceeded) as caught:
                    await store.finish("n")
                assert caught.value.absent == [last]
                assert await host(store, last, hosts) == 1
            elif state is not None:
                assert await store.finish("n") == 1
                assert await store.finish(state.transaction) == 1
            await check(store, hosts)
            assert await store.pending() == []
        else:
            break
        shutil.rmtree(tmp_path / "store")
        steps += 1
    assert steps >= (4 if hosts < 100 else 7)


# ---- finishing for others


async def test_a_checkpoint_is_finished_by_its_name(url: str) -> None:
    store = await tstore.open(url)
    faulty, faults = await open_faulty(url)
    faults.fail("create", "commits/*", times=99)
    calls = [tstore.save(faulty, {"w": np.arange(9)}, 5, host=h, hosts=2, attempt="a/b c") for h in range(2)]
    await outcomes(*calls)
    [state] = await store.pending()
    assert (state.name, state.absent) == ("step/5", ())
    assert await store.finish("step/5") == 1
    assert await tstore.steps(store) == [5]


async def test_what_is_committed_can_be_finished_again(url: str) -> None:
    """By its id or its name, also after a garbage collection has deleted the fragments."""
    store = await tstore.open(url)
    assert await outcomes(*[host(store, h, 2) for h in range(2)]) == [1, 1]
    calls = [tstore.save(store, {"w": np.arange(9)}, 5, host=h, hosts=2, attempt="a/b c") for h in range(2)]
    assert await outcomes(*calls) == [2, 2]
    ids = [(await store.log.reader.record(version)).transaction for version in (1, 2)]
    for _ in range(2):
        assert [await store.finish(name) for name in ("n", "step/5", *ids)] == [1, 2, 1, 2]
        for key in await store.log.storage.list("txn/"):
            if "/part-" in key:
                await store.log.storage.delete(key)
    for name in ("step/6", "o"):
        with pytest.raises(NotFound, match="under way"):
            await store.finish(name)


async def test_waiting_hosts_learn_that_a_collection_has_condemned_them(url: str) -> None:
    """Their own deadline is an hour."""
    store = await tstore.open(url)
    waiting = [asyncio.create_task(host(store, h, 3, timeout=3600)) for h in (0, 2)]
    await until(lambda: delivered(store, 2), *waiting)
    report = await store.collect(abandoned=timedelta(0))
    assert len(report.abandoned) == 1
    for error in await outcomes(*waiting):
        assert isinstance(error, Conflict)
        assert "looked abandoned" in str(error)


async def test_a_host_that_repeats_a_transaction_learns_that_its_version_was_removed(url: str) -> None:
    store = await tstore.open(url)
    assert await outcomes(*[host(store, h, 2) for h in range(2)]) == [1, 1]
    async with store.transaction() as tx:
        await tx.delete("w")
    assert (await store.collect(tstore.Keep(last=1))).versions == [1]
    async with store.transaction() as tx:
        await tx.create_group("g")
    await store.collect(tstore.Keep(last=1))  # compares hosts that begin again with what it condemned alone
    late = await tstore.open(url)
    with pytest.raises(Conflict, match=r"version 1 was removed by .* version 3 .*another attempt"):
        await host(late, 0, 2, timeout=0.05)


async def test_hosts_that_disagree_on_their_number_are_told_the_other_one(url: str) -> None:
    """The first of them waits already when the other one comes; its own deadline is an hour."""
    store = await tstore.open(url)
    calls = [host(store, 0, 3, timeout=3600), host(store, 1, 3, timeout=3600), host(store, 2, 4, timeout=3600)]
    three, also_three, four = await outcomes(*calls)
    assert {type(e) for e in (three, also_three, four)} == {Inconsistent}
    assert all("has hosts=3 here" in str(e) and "passed hosts=4" in str(e) for e in (three, also_three))
    assert "has hosts=4 here" in str(four)
    assert "passed hosts=3" in str(four)


async def test_finishing_an_incomplete_or_missing_group_is_an_error(url: str) -> None:
    store = await tstore.open(url)
    with pytest.raises(NotFound, match="under way"):
        await store.finish("n")
    with pytest.raises(DeadlineExceeded):
        await host(store, 1, 3, timeout=0.01)
    with pytest.raises(DeadlineExceeded) as caught:
        await store.finish("n")
    assert caught.value.absent == [0, 2]
    assert "[0, 2]" in str(caught.value)
    with pytest.raises(DeadlineExceeded):
        await host(store, 1, 3, attempt="b", timeout=0.01)
    with pytest.raises(InvalidArgument, match="several attempts"):
        await store.finish("n")
    with pytest.raises(NotFound, match="no host"):
        await store.finish(f"n.c.{'0' * 32}-of-00003")
    with pytest.raises(Denied, match="mode='r'"):
        await (await tstore.open(url, "r")).finish("n")
    assert (await store.snapshot()).version == 0


async def test_two_sizes_of_one_attempt_never_both_commit(url: str) -> None:
    """Both numbers of hosts are complete, and each looked for the other before either began."""
    opened = [await open_faulty(url) for _ in range(5)]
    gates = [faults.hold("create", "*/part-*") for _, faults in opened]
    calls = [asyncio.create_task(host(opened[h][0], h, 2, timeout=60)) for h in range(2)]
    calls += [asyncio.create_task(host(opened[2 + h][0], h, 3, timeout=60)) for h in range(3)]
    for gate in gates:
        await gate.reached()
    for gate in gates:
        gate.release()
    results = await outcomes(*calls)
    assert {type(e) for e in results} == {Inconsistent}
    assert (await opened[0][0].snapshot()).version == 0


async def test_the_next_attempt_may_have_another_size(url: str) -> None:
    store = await tstore.open(url)
    results = await outcomes(*[host(store, h, 4, timeout=0.05) for h in range(3)])
    assert {type(e) for e in results} == {DeadlineExceeded}
    assert await outcomes(*[host(store, h, 3, attempt="b") for h in range(3)]) == [1] * 3
    await check(store, 3)
    [left] = await store.pending()
    assert (left.hosts, left.absent) == (4, (3,))


# ---- who is shown


async def test_a_waiting_host_is_listed_as_alive(url: str, thresholds: Thresholds) -> None:
    thresholds(_FIRST_DELAY=0.0, _INTERVAL=0.02)
    store = await tstore.open(url)
    waiting = asyncio.create_task(host(store, 1, 3))

    async def alive() -> bool:
        return any(state.heartbeats and state.delivered for state in await store.pending())

    await until(alive, waiting)
    [state] = await store.pending()
    assert (state.name, state.hosts, state.delivered, state.absent) == ("n", 3, (1,), (0, 2))
    assert state.heartbeats.keys() == {1}
    assert 0 <= state.heartbeats[1] < 30
    assert await outcomes(host(store, 0, 3), host(store, 2, 3), waiting) == [1] * 3
    assert await store.pending() == []
    assert not [k for k in await store.log.storage.list("txn/") if "/alive-" in k]


async def test_heartbeats_that_fail_do_not_matter(url: str, thresholds: Thresholds) -> None:
    thresholds(_FIRST_DELAY=0.0)
    store, faults = await open_faulty(url)
    faults.fail("replace", "*/alive-*", times=100)
    faults.fail("delete", "*/alive-*", times=100)
    assert await outcomes(*[host(store, h, 3) for h in range(3)]) == [1] * 3
    assert isinstance(store.log.storage, Faults)
    await check(store, 3)


async def test_a_quick_save_costs_no_heartbeat(url: str) -> None:
    store, faults = await open_faulty(url)
    assert await outcomes(*[host(store, h, 3) for h in range(3)]) == [1] * 3
    assert faults.count("replace", "*/alive-*") == faults.count("delete", "*/alive-*") == 0
