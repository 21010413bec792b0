"""Commits that are under way while a repair voids what they rest on, or themselves."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.held_commit import held_commit
from tests.support.thresholds import Thresholds
from tstore import Keep
from tstore.core import tags
from tstore.core.format.layout import commit_key, root_key
from tstore.core.maintenance import repair
from tstore.core.maintenance.repair import RepairReport
from tstore.errors import CommitOutcomeUnknown, Conflict, SnapshotExpired, TimelineChanged
from tstore.lab.conformance.faults import Faults, open_faulty
from tstore.lab.simulation.scenario import override_constants

VALUES = np.arange(8, dtype="f4")


async def new_store() -> tuple[tstore.Store, Faults]:
    """Return a store whose version 1 has an array "a", in chunks of two values."""
    store, faults = await open_faulty(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await (await tx.create_array("a", (8,), "f4", (2,))).write(VALUES)
    return store, faults


async def write(store: tstore.Store, at: int, **arguments: Any) -> tstore.Transaction:
    """Return a transaction that has set one value of "a" to 9."""
    tx = store.transaction(**arguments)
    await (await tx.array("a"))[at : at + 1].write(np.array([9], "f4"))
    return tx


async def create_group(store: tstore.Store, path: str) -> tstore.Transaction:
    tx = store.transaction()
    await tx.create_group(path)
    return tx


async def void(store: tstore.Store, version: int, *, damaged: bool = False) -> None:
    """Void a version as another process does, which can read its record unless that is `damaged`."""
    if damaged:
        await store.log.storage.replace(commit_key(version), b"garbage")
    other = await tstore.open(store.url)
    await other.repair(*([version],) if damaged else (), **({} if damaged else {"void_intact": [version]}))


async def check_voided(store: tstore.Store) -> None:
    """Check that another process reads the values of version 1."""
    other = await tstore.open(store.url)
    assert np.array_equal(await (await (await other.snapshot()).array("a")).read(), VALUES)


@pytest.mark.parametrize("applied", [True, False])
async def test_a_patch_over_a_version_that_is_voided_is_not_committed(
    applied: bool, thresholds: Thresholds
) -> None:
    """It is applied over that version, or is about to be, and has read only the record of the repair anew."""
    if applied:
        thresholds(_RECENTLY=0.0)  # the commit reads newer records first
    store, faults = await new_store()
    tx, other = await write(store, 0), await tstore.open(store.url)
    await (await write(other, 1)).commit()
    async with held_commit(faults, tx.commit()) as committing:
        await (await create_group(other, "g")).commit()
        assert (await store.snapshot()).version == 3  # the newest record, which is read anew
        await void(store, 2)
    with pytest.raises(Conflict, match="a repair voided version 2"):
        await committing
    await check_voided(store)


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_commit_that_was_voided_before_its_response_is_not_repeated(*, damaged: bool) -> None:
    """If the record was damaged, only the number tells that it was this one."""
    store, faults = await new_store()
    tx = await write(store, 0)
    faults.lose_reply("create", commit_key(2))
    gate = faults.hold("get", commit_key(2))
    committing = asyncio.create_task(tx.commit())
    await gate.reached()
    await void(store, 2, damaged=damaged)
    gate.release()
    with pytest.raises(Conflict, match="a repair voided version 2"):
        await committing
    await check_voided(store)


async def unknown(faults: Faults, tx: tstore.Transaction) -> None:
    """Commit; the commit exists, but no response comes."""
    faults.lose_reply("create", "commits/*")
    faults.fail("get", "commits/*")
    with pytest.raises(CommitOutcomeUnknown):
        await tx.commit()


async def test_a_commit_that_was_voided_while_its_outcome_was_unknown_is_not_repeated() -> None:
    store, faults = await new_store()
    tx = await write(store, 0)
    await unknown(faults, tx)
    await void(store, 2)
    with pytest.raises(Conflict, match="a repair voided version 2"):
        await tx.commit()
    await check_voided(store)


async def test_finish_during_a_repair_does_not_commit_again_what_was_voided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record was damaged, so nothing but its number tells what it was, and the repair is not yet recorded."""
    store, _ = await new_store()
    tx = await write(store, 0, name="job", host=0, hosts=1, attempt="x")
    await tx.commit()
    append = repair._append

    async def append_late(*arguments: Any) -> int:
        with pytest.raises(CommitOutcomeUnknown, match="a repair that voided version 2 has not ended"):
            await (await tstore.open(store.url)).finish(tx.id)
        return await append(*arguments)

    monkeypatch.setattr(repair, "_append", append_late)
    await void(store, 2, damaged=True)
    with pytest.raises(Conflict, match="a repair voided version 2"):
        await (await tstore.open(store.url)).finish(tx.id)
    await check_voided(store)


async def test_no_host_is_told_that_a_transaction_is_not_committed_because_an_earlier_version_was_voided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is committed by a host that has read the version before; another one asks before and after that."""
    store, faults = await new_store()
    job = {"name": "job", "hosts": 2, "attempt": "x"}
    hosts = [await write(store, 2 * host, host=host, **job) for host in range(2)]
    assert await hosts[1].deliver() is None
    await (await create_group(store, "g")).commit()
    other = await tstore.open(store.url)
    append = repair._append

    async def append_late(*arguments: Any) -> int:
        assert await (await write(other, 2, host=1, **job)).deliver() is None
        gate.release()
        assert await committing == 3
        assert await (await write(other, 2, host=1, **job)).deliver() == 3
        return await append(*arguments)

    monkeypatch.setattr(repair, "_append", append_late)
    gate = faults.hold("create", commit_key(3))
    committing = asyncio.create_task(hosts[0].commit())
    await gate.reached()
    await void(store, 2)
    assert await (await write(other, 2, host=1, **job)).deliver() == 3


async def test_a_commit_that_exists_is_not_denied_because_another_was_voided(
    thresholds: Thresholds,
) -> None:
    store, faults = await new_store()
    await (await write(store, 0)).commit()
    tx = await create_group(store, "g")
    await unknown(faults, tx)
    await void(store, 2)
    thresholds(_RECENTLY=0.0)
    with pytest.raises(CommitOutcomeUnknown):
        await tx.commit()
    other = await tstore.open(store.url)
    assert await other.outcome(tx.id) == 3
    await check_voided(store)


async def saved(steps: int) -> tstore.Store:
    """Return a store whose version of each step has a pack of its own."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for step in range(1, steps + 1):
        await tstore.save(store, {"w": np.arange(2000.0) + step}, step)
    return store


async def repair_beside_a_save(store: tstore.Store, version: int, patch: pytest.MonkeyPatch) -> RepairReport:
    """Void a version; before the repair appends its first record, another process saves step 9."""
    append, pending = repair.Log.append, [True]

    async def append_late(log: Any, *arguments: Any) -> int:
        if pending:
            pending.clear()
            await tstore.save(store.url, {"w": np.arange(2000.0) + 9}, 9)
        return await append(log, *arguments)

    patch.setattr(repair.Log, "append", append_late)
    return await (await tstore.open(store.url)).repair(void_intact=[version])


async def check_head(url: str, value: int) -> None:
    """Check that the head has a value, also after all other versions have expired."""
    for _ in range(2):
        store = await tstore.open(url)
        w = await (await store.snapshot()).array("w")
        assert (await w.read())[0] == value
        assert (await store.verify()).faults == []
        for step in (await tstore.steps(store))[:-1]:
            await tags.remove_step(store, step)
        await store.collect(Keep(newer_than=timedelta(0)), abandoned=timedelta(0))


async def test_a_save_beside_a_repair_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of the repair is that of a collection too, since the last one had kept the voided version."""
    store = await saved(4)
    await store.collect(Keep(last=2))
    report = await repair_beside_a_save(store, 4, monkeypatch)
    assert report.ok
    await check_head(store.url, 9)


async def test_a_save_beside_a_repair_that_restates_an_older_version_stays_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = await saved(5)
    await store.collect(Keep(every=3, last=1), abandoned=timedelta(0))
    report = await repair_beside_a_save(store, 5, monkeypatch)
    assert (report.ok, report.restated) == (True, None)
    await check_head(store.url, 9)


async def test_what_a_repair_restates_outlives_the_older_version() -> None:
    """It refers to packs of that version."""
    store = await saved(5)
    await store.collect(Keep(every=3, last=1), abandoned=timedelta(0))
    report = await store.repair(void_intact=[5])
    assert report.restated == 3
    store = await tstore.open(store.url)
    await tags.set_tag(store, "restated", report.version)
    await tags.remove_step(store, 3)
    expired = await store.collect(Keep(tags=("restated",)), abandoned=timedelta(0))
    assert 3 in expired.versions
    assert (await (await (await store.snapshot("restated")).array("w")).read())[0] == 3


async def test_a_repair_restates_no_copy() -> None:
    """The newest living version that is complete is a quantized copy, which must not become the head."""
    store = await saved(3)
    await tstore.quantize(store, formats="e4m3", tag="q")
    for step in (4, 5):
        await tstore.save(store, {"w": np.arange(2000.0) + step}, step)
    await store.collect(Keep(every=3, last=1), abandoned=timedelta(0))
    assert (await store.repair(void_intact=[6])).restated == 3
    await check_head(store.url, 3)


async def test_a_root_that_is_written_after_a_repair_is_removed() -> None:
    """Its writer had read the tree before that."""
    with override_constants(ROOT_EVERY=4):
        store, faults = await new_store()
        for at in (0, 2):
            await (await write(store, at)).commit()
        gate = faults.hold("create", root_key(4))
        committing = asyncio.create_task((await create_group(store, "g")).commit())
        await gate.reached()
        await void(store, 2)
        gate.release()
        assert await committing == 4
        other = await tstore.open(store.url)
        assert (await (await (await other.snapshot()).array("a")).read()).tolist() == [0, 1, 9, 3, 4, 5, 6, 7]


async def tagged_versions(count: int) -> tuple[tstore.Store, Faults]:
    """Return a store of versions with the tags v1, v2, …, as opened by a process that did not write them."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for number in range(1, count + 1):
        async with store.transaction(tag=f"v{number}") as tx:
            await tx.create_group(f"g{number}")
    return await open_faulty(store.url)


async def check_without_v3(store: tstore.Store) -> None:
    other = await tstore.open(store.url)
    newest = (await other.snapshot()).version
    for version in range(4, newest + 1):
        with contextlib.suppress(SnapshotExpired):
            assert "v3" not in (await other.snapshot(version)).tags
    assert (await other.verify()).faults == []


@pytest.mark.parametrize("lost", [(), (8,), (8, 10)])
async def test_a_commit_that_writes_roots_only_after_a_repair_leaves_none_with_voided_changes(
    lost: tuple[int, ...],
) -> None:
    """It also writes the roots to which its own one refers, if they are lost."""
    with override_constants(ROOT_EVERY=2):
        store, faults = await tagged_versions(11)
        await (await store.snapshot()).read_nodes()
        for version in lost:
            await store.log.storage.delete(root_key(version))
        gate = faults.hold("create", "roots/*")
        commit = asyncio.create_task(store.transaction().commit())
        await gate.reached()
        await void(store, 3)
        gate.release()
        assert await commit == 12
        await check_without_v3(store)


async def test_a_collection_that_writes_a_root_only_after_a_repair_leaves_none_with_voided_changes() -> None:
    with override_constants(ROOT_EVERY=2):
        store, faults = await tagged_versions(8)
        await store.log.storage.delete(root_key(8))
        gate = faults.hold("create", root_key(8))
        collection = asyncio.create_task(store.collect(Keep(newer_than=timedelta(0))))
        await gate.reached()
        await void(store, 3)
        gate.release()
        with contextlib.suppress(TimelineChanged):
            await collection
        await check_without_v3(store)


async def test_versions_that_expire_while_a_repair_looks_for_damage_are_not_damaged() -> None:
    store, faults = await open_faulty(f"memory://{uuid.uuid4()}")
    for step in range(3):
        await tstore.save(store, {"w": np.full(4000, step)}, step)
    gate = faults.hold("head", "txn/*/pack-*")
    repair = asyncio.create_task(store.repair())
    await gate.reached()
    await (await tstore.open(store.url)).collect(Keep(last=1))
    gate.release()
    assert (await repair).damaged == []
