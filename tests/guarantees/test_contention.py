"""Many independent writers: each one commits, and can list the conflicts on its way."""

from __future__ import annotations

import asyncio
import datetime
import uuid
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
import tstore.sync as blocking
from tests.support.polling import until
from tests.support.thresholds import Thresholds
from tstore import cli
from tstore.core.format.objects.records import Record
from tstore.core.format.tree.changes import Changes
from tstore.core.log.group_commit import Newer, next_pause
from tstore.core.storage.objects import Durability
from tstore.errors import CommitOutcomeUnknown, Conflict, Corrupt, InvalidArgument, NotFound
from tstore.lab.conformance.faults import Faults, open_faulty

WRITERS = 64


async def make(url: str, cells: int, chunk: int = 1) -> None:
    async with (await tstore.open(url)).transaction() as tx:
        await (await tx.create_array("w", (cells,), "int64", (chunk,))).write(-1)


async def set_cell(store: tstore.Store, cell: int) -> tstore.Transaction:
    tx = store.transaction(f"cell {cell}", durability="none")
    await (await tx.array("w"))[cell].write(cell)
    return tx


async def values(url: str) -> list[int]:
    snapshot = await (await tstore.open(url, "r")).snapshot()
    return [int(v) for v in await (await snapshot.array("w")).read()]


async def test_the_slowest_of_many_processes_commits(url: str) -> None:
    """A writer loses at most once to each of the others, as an attempt fails only when another one succeeds."""
    await make(url, WRITERS)
    ready = [await set_cell(await tstore.open(url), i) for i in range(WRITERS)]
    versions = await asyncio.gather(*[tx.commit() for tx in ready])
    assert sorted(versions) == list(range(2, WRITERS + 2))
    assert await values(url) == list(range(WRITERS))
    store = await tstore.open(url, "r")
    assert {c.base async for c in store.history() if c.version > 1} == {1}
    for tx in ready:
        assert len(tx.retries) < WRITERS
        lost = [r.version for r in tx.retries]
        assert lost == sorted(set(lost))
        assert not {tx.version} & set(lost)


async def test_the_commits_of_one_process_do_not_race_each_other(url: str) -> None:
    await make(url, WRITERS)
    store = await tstore.open(url)
    ready = [await set_cell(store, i) for i in range(WRITERS)]
    await asyncio.gather(*[tx.commit() for tx in ready])
    assert [tx.retries for tx in ready] == [[]] * WRITERS
    assert await values(url) == list(range(WRITERS))


async def created(tx: tstore.Transaction, path: str, size: int = 4) -> tstore.Transaction:
    await (await tx.create_array(path, (size,), "uint8", (size,))).write(7)
    return tx


async def waiting(store: tstore.Store, commits: int) -> None:
    """Return once this many commits are queued behind one in flight."""

    async def queued() -> bool:
        return len(store.log._queues[asyncio.get_running_loop()].waiting) >= commits

    await until(queued)


async def together(
    url: str, store: tstore.Store, ready: list[tstore.Transaction], between: tstore.Transaction | None = None
) -> list[int | BaseException]:
    """Commit transactions while the create of another is held back, and return their outcomes."""
    faults = store.log.storage
    assert isinstance(faults, Faults)
    first = await created(store.transaction("first"), "first")
    gate = faults.hold("create", "commits/*")
    tasks = [asyncio.create_task(first.commit())]
    await gate.reached()
    for number, tx in enumerate(ready, 1):
        tasks.append(asyncio.create_task(tx.commit()))
        await waiting(store, number)  # so that they queue in this order
    if between is not None:
        await between.commit()
    gate.release()
    return (await asyncio.gather(*tasks, return_exceptions=True))[1:]


async def test_queued_commits_share_one_record(url: str) -> None:
    await make(url, 4)
    async with (await tstore.open(url)).transaction() as tx:
        await created(tx, "old")
    store, faults = await open_faulty(url)
    ready = [store.transaction(f"m{i}", tag=f"t{i}" if i % 2 else None, metadata={"i": i}) for i in range(5)]
    for i in range(3):
        await (await ready[i].array("w"))[i].write(i)
    await created(ready[3], "new/a")
    await ready[3].delete("old")
    await created(ready[4], "new/b")
    assert await together(url, store, ready) == [4] * 5
    assert faults.count("create", "commits/*") == 2
    assert [tx.version for tx in ready] == [4] * 5
    assert await values(url) == [0, 1, 2, -1]
    other = await tstore.open(url, "r")
    snapshot = await other.snapshot()
    assert snapshot.paths() == ["first", "new/a", "new/b", "w"]
    assert snapshot.tags == {"t1": 4, "t3": 4}
    told = [c async for c in other.history()][:6][::-1]
    assert [(c.version, c.message, c.tag, c.metadata) for c in told] == [
        (3, "first", None, {}),
        *[(4, f"m{i}", f"t{i}" if i % 2 else None, {"i": i}) for i in range(5)],
    ]
    assert [await other.outcome(tx.id) for tx in ready] == [4] * 5
    assert [c.transaction for c in told[1:]] == [tx.id for tx in ready]
    assert all(c.bytes_added for c in told)
    assert (await other.verify()).ok


async def test_commits_that_are_ready_at_once_share_one_record(url: str) -> None:
    await make(url, 8)
    store, faults = await open_faulty(url)
    ready = [await set_cell(store, i) for i in range(8)]
    assert await asyncio.gather(*[tx.commit() for tx in ready]) == [2] * 8
    assert faults.count("create", "commits/*") == 1
    assert await values(url) == list(range(8))


async def test_a_cancelled_commit_leaves_the_queue_and_the_others_commit(url: str) -> None:
    await make(url, 4)
    store, faults = await open_faulty(url)
    ready = [await set_cell(store, i) for i in range(4)]
    gate = faults.hold("create", "commits/*")
    tasks = [asyncio.create_task(ready[0].commit())]
    await gate.reached()
    tasks += [asyncio.create_task(tx.commit()) for tx in ready[1:]]
    await waiting(store, 3)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.wait([tasks[1]], timeout=30)
    assert tasks[1].done()  # although the first commit is still under way
    assert not tasks[0].done()
    gate.release()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(outcome, asyncio.CancelledError) for outcome in outcomes] == [True, True, False, False]
    assert [tx.version for tx in ready] == [2, None, 3, 3]
    assert [await store.outcome(tx.id) for tx in ready] == [2, None, 3, 3]
    assert await values(url) == [0, -1, 2, 3]


async def test_commits_with_more_metadata_than_a_record_may_have_share_several(
    url: str, monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds
) -> None:
    """Each is within the bounds; readers would refuse one record with all of them."""
    thresholds(RECORD_VALUES=1 << 14)
    monkeypatch.setattr("tstore.core.log.group_commit._MAX_VALUES", (1 << 14) - 1)
    await make(url, 4)
    store, faults = await open_faulty(url)
    values = [0] * 3_750
    ready = [store.transaction(f"m{i}", tag=f"t{i}", metadata={"loss": values}) for i in range(8)]
    for i, tx in enumerate(ready):
        await created(tx, f"a{i}")
    assert await together(url, store, ready) == [3, 3, 3, 3, 4, 4, 4, 4]
    assert faults.count("create", "commits/*") == 3
    other = await tstore.open(url, "r")
    assert [len(c.metadata["loss"]) for c in [c async for c in other.history()][:8]] == [3_750] * 8
    assert (await other.verify()).ok


async def test_conflicting_commits_do_not_share_a_record(url: str) -> None:
    await make(url, 8, chunk=4)
    store, _faults = await open_faulty(url)
    ready = [store.transaction(tag=tag) for tag in (None, None, "x", "x", None)]
    for i, tx in enumerate(ready[:2]):
        await (await tx.array("w"))[i].write(i)  # parts of one chunk
    for i, tx in enumerate(ready[2:]):
        await created(tx, f"new{i}")
    outcomes = await together(url, store, ready)
    assert outcomes[0] == outcomes[2] == outcomes[4] == 3
    assert outcomes[1] == 4
    assert isinstance(outcomes[3], Conflict)
    assert outcomes[3].paths == ["tag x"]
    assert await values(url) == [0, 1, *[-1] * 6]


async def test_conflicting_changes_of_metadata_do_not_share_a_record(url: str) -> None:
    await make(url, 8)
    store, _faults = await open_faulty(url)
    ready = [store.transaction() for _ in range(4)]
    for i, tx in enumerate(ready[:2]):
        await created(tx, "new", 4 + i)
    await (await ready[2].array("w"))[7].write(7)
    await (await ready[3].array("w")).resize((4,))
    creation, other_creation, write, resize = await together(url, store, ready)
    assert creation == write == 3
    for conflict, path in ((other_creation, "new"), (resize, "w")):
        assert isinstance(conflict, Conflict)
        assert conflict.paths == [path]
    assert await values(url) == [*[-1] * 7, 7]


async def test_some_transactions_never_share_a_record(url: str) -> None:
    """Large and serializable transactions, and those that replace the whole tree."""
    await make(url, 4)
    store, _faults = await open_faulty(url)
    ready = [store.transaction(), store.transaction(), store.transaction(isolation="serializable")]
    ready += [store.transaction(durability="none"), store.transaction()]
    for i, tx in enumerate(ready):
        await created(tx, f"new{i}", 1 << 15 if i == 1 else 4)
    assert await together(url, store, ready) == [3, 4, 5, 6, 3]
    whole = store.transaction()
    await whole.staging.replace_all(b"")
    async with store.transaction() as tx:
        await tx.delete("first")
    beside = await created(store.transaction(), "beside")
    outcomes = await together(url, store, [whole, beside])
    assert outcomes[0] == 9
    assert isinstance(outcomes[1], Conflict)
    assert (await (await tstore.open(url, "r")).snapshot()).paths() == []


async def test_dropped_tags_never_share_a_record(url: str) -> None:
    await make(url, 4)
    store, _faults = await open_faulty(url)
    async with store.transaction(tag="old"):
        pass
    ready = [await created(store.transaction(), "a"), store.transaction(drop_tag="old")]
    ready.append(await created(store.transaction(), "b"))
    assert await together(url, store, ready) == [4, 5, 4]
    assert await store.tags() == {}
    assert [c.dropped async for c in store.history() if c.version >= 4] == [("old",), (), ()]


async def test_tags_of_earlier_versions_never_share_a_record(url: str) -> None:
    await make(url, 4)
    store, _faults = await open_faulty(url)
    tagging = store.transaction(tag="old")
    await tagging.staging.tag_version(1)
    ready = [await created(store.transaction(), "a"), tagging, await created(store.transaction(), "b")]
    assert await together(url, store, ready) == [3, 4, 3]
    assert await store.tags() == {"old": 1}
    assert [c.tagged async for c in store.history() if c.version >= 3] == [{"old": 1}, {}, {}]


async def test_a_tag_moved_concurrently_is_not_dropped(url: str) -> None:
    await make(url, 4)
    store, _faults = await open_faulty(url)
    async with store.transaction(tag="old"):
        pass
    ready = [await created(store.transaction(), "new"), store.transaction(drop_tag="old")]
    ready.append(store.transaction(move_tag="old"))
    outcomes = await together(url, store, ready)
    assert outcomes[0] == outcomes[2] == 4
    assert isinstance(outcomes[1], Conflict)
    assert outcomes[1].paths == ["tag old"]
    assert await store.tags() == {"old": 4}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (tstore.Keep(last=1), {"step/10"}),
        (tstore.Keep(last=2), {"step/10", "step/3"}),
        (tstore.Keep(every=5), {"step/10"}),
        (tstore.Keep(every=2), {"step/10", "step/2"}),
        (tstore.Keep(best=(1, "loss")), {"step/1", "step/10"}),
        (tstore.Keep(best=(1, "loss", "max")), {"step/2", "step/10"}),
    ],
)
async def test_retention_sees_every_step_of_a_group_commit(url: str, keep: tstore.Keep, kept: set[str]) -> None:
    """Steps in any order, some with metrics, are queued together; afterwards the rules find all of them."""
    await make(url, 4)
    store, _faults = await open_faulty(url)
    losses = {1: 0.1, 10: None, 2: 0.3, 3: 0.2}
    ready = []
    for step, loss in losses.items():
        metadata = {"step": step} if loss is None else {"step": step, "metrics": {"loss": loss}}
        ready.append(await created(store.transaction(tag=f"step/{step}", metadata=metadata), f"new/{step}"))
    ready.append(await created(store.transaction(), "another"))
    versions = await together(url, store, ready)
    assert versions[1] == versions[4]  # those without metrics
    assert len({versions[i] for i in (0, 1, 2, 3)}) == 4
    async with store.transaction():
        pass
    told = {c.tag: c.metadata for c in [c async for c in store.history()] if c.tag}
    assert told == {f"step/{s}": {"step": s} | ({"metrics": {"loss": x}} if x else {}) for s, x in losses.items()}
    assert kept <= (await store.tags()).keys()
    assert set((await store.collect(keep)).tags) == {f"step/{s}" for s in losses} - kept


async def test_retention_sees_every_step_tag_of_one_version(url: str) -> None:
    """The tags may be set and moved by one transaction, or by several in a group commit."""
    await make(url, 4)
    store, _faults = await open_faulty(url)
    async with store.transaction(tag="step/20"):
        pass
    async with store.transaction(tag="step/1", move_tag="step/20"):
        pass
    ready = [store.transaction(tag="step/3"), store.transaction(tag="step/30"), store.transaction(tag="step/4")]
    assert len(set(await together(url, store, ready))) == 1
    async with store.transaction():
        pass
    assert (await store.collect(tstore.Keep(last=1), dry_run=True)).tags == ["step/1", "step/20"]
    assert (await store.collect(tstore.Keep(every=20), dry_run=True)).tags == []
    assert (await store.collect(tstore.Keep(last=4), dry_run=True)).tags == []
    assert (await store.collect(tstore.Keep(every=4), dry_run=True)).tags == []


async def test_grouped_commits_validate_only_against_versions_above_their_own_base(url: str) -> None:
    """One commit writes into an array that was created after the base of the other."""
    store, _ = await open_faulty(url)
    older = await created(store.transaction(), "older")
    async with store.transaction() as tx:
        await created(tx, "new")
    newer = store.transaction()
    await (await newer.array("new"))[0].write(1)
    assert await together(url, store, [older, newer]) == [3, 3]
    assert (await (await (await store.snapshot()).array("new")).read()).tolist() == [1, 7, 7, 7]


async def test_a_failing_commit_does_not_fail_the_others_of_its_group(url: str) -> None:
    """It can't be encoded, or its validation raises. The test calls the log, since transactions check earlier."""
    await make(url, 4)
    store, faults = await open_faulty(url)
    base = await store.log.reader.newest()

    def record(name: str, **more: object) -> Record:
        return Record(name, base, 0.0, tags=(name,), **more)  # type: ignore[arg-type]

    async def fine(newer: Newer) -> Record:
        return record("fine")

    async def broken(newer: Newer) -> Record:
        raise TypeError("broken")

    gate = faults.hold("create", "commits/*")
    first = asyncio.create_task((await created(store.transaction(), "first")).commit())
    await gate.reached()
    wrong = record("wrong", metadata={"x": object()})
    calls = [(record("fine"), fine), (wrong, fine), (record("broken"), broken)]
    tasks = [
        asyncio.create_task(store.log.append(r, validate, Durability.FSYNC, changes=Changes({}, tags=r.tags)))
        for r, validate in calls
    ]
    tasks.append(asyncio.create_task((await created(store.transaction(), "last")).commit()))
    await waiting(store, 3)
    gate.release()
    outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
    assert [outcomes[0], outcomes[1], outcomes[4]] == [2, 3, 3]
    assert isinstance(outcomes[2], InvalidArgument)
    assert isinstance(outcomes[3], TypeError)
    assert await store.tags() == {"fine": 3}


async def test_a_commit_over_a_lost_pack_fails_alone(url: str) -> None:
    """Its patch must be reapplied to a chunk that is gone; the other commit does not touch that chunk."""
    async with (await tstore.open(url)).transaction() as tx:
        await (await tx.create_array("w", (3000,), "uint8", (3000,))).write(0)
    store, _faults = await open_faulty(url)
    other = await tstore.open(url)
    ready = [store.transaction(), await created(store.transaction(), "innocent")]
    await (await ready[0].array("w"))[0].write(1)
    async with other.transaction() as tx:
        await created(tx, "more", 2000)  # so that the next chunk does not fit into the record
        await (await tx.array("w")).write(2)
    [pack] = await other.log.storage.list("txn/")
    await other.log.storage.delete(pack)
    outcomes = await together(url, store, ready)
    assert isinstance(outcomes[0], Corrupt)
    assert outcomes[1] == 4
    assert await store.outcome(ready[1].id) == 4


async def test_a_commit_based_before_a_lost_manifest_fails_alone(url: str) -> None:
    """It can't be validated against the version with the lost manifest, on which the other commit is based."""
    await make(url, 4)
    store, _faults = await open_faulty(url)
    old = await created(store.transaction(), "old")
    async with store.transaction() as tx:
        for i in range(400):  # enough for a separate manifest object
            await created(tx, f"many/{i}", 1)
    young = await created(store.transaction(), "young")
    [manifest] = await store.log.storage.list(f"txn/{tx.id}/manifest")
    await store.log.storage.delete(manifest)
    outcomes = await together(url, store, [old, young])
    assert isinstance(outcomes[0], NotFound)
    assert outcomes[1] == 4


async def test_a_conflicting_commit_leaves_its_group_and_the_others_commit(url: str) -> None:
    await make(url, 4)
    store, _faults = await open_faulty(url)
    ready = [await set_cell(store, i) for i in range(3)]
    meanwhile = await set_cell(await tstore.open(url), 1)
    outcomes = await together(url, store, ready, meanwhile)
    assert outcomes[0] == outcomes[2] == 4
    assert isinstance(outcomes[1], Conflict)
    assert outcomes[1].paths == ["w, chunk (1,)"]
    assert await store.outcome(ready[1].id) is None
    assert await values(url) == [0, 1, 2, -1]


async def test_a_condemned_transaction_leaves_its_group(url: str) -> None:
    await make(url, 4)
    store, faults = await open_faulty(url)
    first = await created(store.transaction(), "first")
    ready = [await created(store.transaction(), "a"), store.transaction(), await created(store.transaction(), "b")]
    await created(ready[1], "big", 1 << 15)  # writes a pack, so that a gc may consider it abandoned
    await ready[1].delete("big")
    await created(ready[1], "small")
    gate = faults.hold("create", "commits/*")
    tasks = [asyncio.create_task(first.commit())]
    await gate.reached()
    for number, tx in enumerate(ready, 1):
        tasks.append(asyncio.create_task(tx.commit()))
        await waiting(store, number)
    report = await (await tstore.open(url)).collect(abandoned=datetime.timedelta(0))
    assert report.abandoned == [ready[1].id]
    gate.release()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [outcomes[0], outcomes[1], outcomes[3]] == [3, 4, 4]
    assert isinstance(outcomes[2], Conflict)
    assert "abandoned" in str(outcomes[2])


async def test_a_commit_that_grew_when_reapplied_gets_its_own_record(url: str) -> None:
    async with (await tstore.open(url)).transaction() as tx:
        await (await tx.create_array("w", (3000,), "uint8", (3000,))).write(0)
        await created(tx, "old")
    store, _ = await open_faulty(url)
    ready = [await created(store.transaction(), "a"), store.transaction(), await created(store.transaction(), "b")]
    await (await ready[1].array("w"))[0].write(5)
    meanwhile = (await tstore.open(url)).transaction()
    await (await meanwhile.array("w"))[1].write(6)
    assert await together(url, store, ready, meanwhile) == [4, 5, 4]
    assert (await values(url))[:3] == [5, 6, 0]
    assert (await (await tstore.open(url)).verify()).ok


async def test_later_commits_validate_against_every_part_of_a_shared_record(url: str) -> None:
    await make(url, 4)
    store, _ = await open_faulty(url)
    late = [await set_cell(await tstore.open(url), i) for i in range(3)]
    ready = [await set_cell(store, i) for i in range(3)]
    assert await together(url, store, ready) == [3] * 3
    for i, tx in enumerate(late):
        with pytest.raises(Conflict) as caught:
            await tx.commit()
        assert caught.value.paths == [f"w, chunk ({i},)"]


@pytest.mark.parametrize("fault", ["lose_reply", "fail"])
async def test_a_shared_record_whose_response_is_lost(url: str, fault: str) -> None:
    await make(url, 4)
    store, faults = await open_faulty(url)
    ready = [await set_cell(store, i) for i in range(3)]
    getattr(faults, fault)("create", "commits/*", nth=2)
    version = 3 if fault == "lose_reply" else 4
    assert await together(url, store, ready) == [version] * 3
    assert await values(url) == [0, 1, 2, -1]
    for tx in ready:
        assert await store.outcome(tx.id) == version
        assert [r.version for r in tx.retries][-1:] == [3]


async def test_an_unknown_outcome_of_a_shared_record_names_each_transaction(url: str) -> None:
    await make(url, 4)
    store, faults = await open_faulty(url)
    ready = [await set_cell(store, i) for i in range(3)]
    faults.fail("create", "commits/*", nth=2, times=9)
    outcomes = await together(url, store, ready)
    assert all(isinstance(e, CommitOutcomeUnknown) for e in outcomes)
    assert [e.transaction for e in outcomes if isinstance(e, CommitOutcomeUnknown)] == [tx.id for tx in ready]
    assert await values(url) == [-1] * 4


WRITES = st.lists(
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 5)), min_size=1, max_size=3), min_size=1, max_size=8
)


@given(WRITES, st.sampled_from([1, 2, 12]))
def test_concurrent_commits_are_serial_in_the_order_of_the_history(
    writes: list[list[tuple[int, int]]], chunk: int
) -> None:
    asyncio.run(concurrent(writes, chunk))


async def concurrent(writes: list[list[tuple[int, int]]], chunk: int) -> None:
    url = f"memory://{uuid.uuid4()}"
    await make(url, 12, chunk)
    store, _faults = await open_faulty(url)
    ready = []
    for i, regions in enumerate(writes):
        tx = store.transaction(str(i))
        for start, length in regions:
            await (await tx.array("w"))[start : start + length].write(i)
        ready.append(tx)
    outcomes = await together(url, store, ready)
    assert all(isinstance(f, (int, Conflict)) for f in outcomes)
    model = [-1] * 12
    told = [(c.version, int(c.message)) async for c in store.history() if c.message.isdigit()][::-1]
    assert sorted(told, key=lambda c: c[1]) == [(f, i) for i, f in enumerate(outcomes) if isinstance(f, int)]
    for _, i in told:
        for start, length in writes[i]:
            model[start : start + length] = [i] * len(model[start : start + length])
    assert await values(url) == model


async def lost_race(url: str) -> tuple[tstore.Transaction, tstore.Transaction]:
    """Commit two transactions so that the first loses a create to the second, and return both."""
    await make(url, 4)
    store, faults = await open_faulty(url)
    tx = await set_cell(store, 0)
    gate = faults.hold("create", "commits/*")
    commit = asyncio.create_task(tx.commit())
    await gate.reached()
    other = await set_cell(await tstore.open(url), 1)
    await other.commit()
    gate.release()
    assert await commit == 3
    return tx, other


@pytest.mark.parametrize(("duration", "shortest", "longest"), [(20e-6, 20e-6, 1e-3), (0.05, 2e-3, 0.7)])
def test_pauses_are_as_short_as_attempts_are_quick(duration: float, shortest: float, longest: float) -> None:
    pause = 0.0
    for attempts in range(1, 100):
        before, pause = pause, next_pause(pause, attempts, duration)
        assert shortest <= pause <= min(3 * max(shortest, before), longest)


async def test_a_lost_race_is_listed_and_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tstore")
    tx, other = await lost_race(url)
    assert tx.retries == [tstore.Retry(2, "another transaction became this version first")]
    store = await tstore.open(url)
    last = await anext(store.history())
    assert (last.version, last.base) == (3, 1)
    assert (other.retries, await values(url)) == ([], [0, 1, -1, -1])
    [line] = [r.getMessage() for r in caplog.records if r.name == "tstore.log"]
    assert line == f"retrying transaction {tx.id} after version 2: another transaction became this version first"


def test_the_log_shows_the_base_of_each_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(make(str(tmp_path / "alone"), 4))
    assert cli.main(["log", str(tmp_path / "alone")]) == 0
    assert "base" not in capsys.readouterr().out
    asyncio.run(lost_race(str(tmp_path / "raced")))
    assert cli.main(["log", str(tmp_path / "raced")]) == 0
    heads, _, *rows = capsys.readouterr().out.splitlines()
    at = heads.index("base")
    assert [row[at : at + len("base")].strip() for row in rows] == ["1", "1", "0"]


async def test_a_create_without_a_response_is_listed(url: str) -> None:
    await make(url, 4)
    store, faults = await open_faulty(url)
    tx = await set_cell(store, 0)
    faults.fail("create", "commits/*")
    assert await tx.commit() == 3
    [retry] = tx.retries
    assert retry.version == 2
    assert "no response" in retry.reason


async def test_reapplied_patches_are_listed(url: str) -> None:
    await make(url, 4, chunk=4)
    store = await tstore.open(url)
    tx, other = await set_cell(store, 0), await set_cell(store, 1)
    await other.commit()
    await tx.commit()
    [retry] = tx.retries
    assert retry.version == 2
    assert retry.reason.endswith("w")
    assert (await anext(store.history())).metadata == {}  # the first attempt created the record
    assert await values(url) == [0, 1, -1, -1]


def test_a_store_serves_several_event_loops_in_turn(url: str) -> None:
    asyncio.run(make(url, 8))
    store = asyncio.run(tstore.open(url))

    async def four(first: int) -> None:
        ready = [await set_cell(store, i) for i in range(first, first + 4)]
        await asyncio.gather(*[tx.commit() for tx in ready])

    asyncio.run(four(0))
    asyncio.run(four(4))
    assert asyncio.run(values(url)) == list(range(8))


def test_blocking_transactions_list_their_retries() -> None:
    store = blocking.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        tx.create_array("w", (4,), "int64", (4,)).write(0)
    tx = store.transaction()
    tx.array("w")[0].write(1)
    with store.transaction() as other:
        other.array("w")[1].write(2)
    tx.commit()
    assert [r.version for r in tx.retries] == [2]
    assert isinstance(tx.retries[0], blocking.Retry)
