"""Commits that are under way while a repair voids what they rest on, or themselves."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.held_commit import held_commit
from tstore.conformance.faults import Faults, open_faulty
from tstore.errors import CommitOutcomeUnknown, Conflict
from tstore.format.layout import commit_key
from tstore.maintenance import repair

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
    applied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is applied over that version, or is about to be, and has read only the record of the repair anew."""
    if applied:
        monkeypatch.setattr("tstore.log.search._RECENTLY", 0.0)  # so that the commit reads newer records at first
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
        with pytest.raises(Conflict, match="a repair voided version 2"):
            await (await tstore.open(store.url)).finish(tx.id)
        return await append(*arguments)

    monkeypatch.setattr(repair, "_append", append_late)
    await void(store, 2, damaged=True)
    await check_voided(store)


async def test_a_commit_that_exists_is_not_denied_because_another_was_voided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, faults = await new_store()
    await (await write(store, 0)).commit()
    tx = await create_group(store, "g")
    await unknown(faults, tx)
    await void(store, 2)
    monkeypatch.setattr("tstore.log.search._RECENTLY", 0.0)
    with pytest.raises(CommitOutcomeUnknown):
        await tx.commit()
    other = await tstore.open(store.url)
    assert await other.outcome(tx.id) == 3
    await check_voided(store)
