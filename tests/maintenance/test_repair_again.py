"""Repairs after repairs: interrupted, voided themselves, or undone by a backup; and collections between them."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import tstore
from tstore import Keep
from tstore.core.format.layout import commit_key
from tstore.core.maintenance import repair
from tstore.errors import Conflict, Corrupt, SnapshotExpired, TimelineChanged


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


async def steps(url: str, *numbers: int) -> tstore.Store:
    store = await tstore.open(url)
    for number in numbers:
        await tstore.save(store, {"w": np.full(3, number)}, number)
    return store


async def write(store: tstore.Store, value: int, tag: str | None = None, *, at: slice = slice(None)) -> int | None:
    async with store.transaction(tag=tag) as tx:
        if "x" in await tx.paths():
            await (await tx.array("x"))[at].write(value)
        else:
            await (await tx.create_array("x", (4,), "i8", (4,))).write(value)
    return tx.version


async def values(store: tstore.Store) -> list[int]:
    return (await (await (await store.snapshot()).array("x"))[...].read()).tolist()


async def damage(store: tstore.Store, version: int) -> None:
    await store.log.storage.replace(commit_key(version), b"garbage")


async def interrupt(store: tstore.Store, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin to void a version, and die before the commit of the repair."""

    async def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(repair, "_commit_repair", die)
        with pytest.raises(KeyboardInterrupt):
            await store.repair(void_intact=[version])


@pytest.mark.parametrize("missing", [False, True])
async def test_no_collection_between_the_halves_of_a_repair(
    url: str, missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last collection lists the void version as the highest step, so the newest real one would expire."""
    store = await steps(url, 1, 7, 9)
    await store.collect(Keep(last=2))
    if missing:
        await store.log.storage.delete(commit_key(3))
        store = await tstore.open(url)
    await interrupt(store, 3, monkeypatch)
    store = await tstore.open(url)
    await write(store, 1)
    for _ in range(2):
        with pytest.raises(
            Corrupt, match=r"voided version 3 has not ended; .*`tstore repair --void 3`. Nothing was collected"
        ):
            await store.collect(Keep(last=1))
    assert (await store.repair([3])).ok
    store = await tstore.open(url)
    await store.collect(Keep(last=1))
    assert await tstore.steps(store) == [7]
    assert (await tstore.restore(store))["w"].tolist() == [7] * 3
    assert (await store.verify()).faults == []


async def test_an_interrupted_repair_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await steps(url, 1, 7, 9)
    await interrupt(store, 2, monkeypatch)
    store = await tstore.open(url)
    finish = "if it was interrupted, finish it with `tstore repair --void 2`"
    sentence = f"the repair that voided version 2 has not ended; {finish}"
    assert (await store.verify()).faults == [f"{url}: {sentence}"]
    assert (await store.repair()).damaged == [(2, f"{url}: {sentence}", True)]
    assert (await store.repair([2])).version == 4
    assert (await (await tstore.open(url)).verify()).faults == []
    assert await store.repair([2]) == await store.repair(void_intact=[2]) == ([], [], [], None, [], None)


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_a_copy_of_a_version_below_the_commit_of_a_repair_is_repaired(url: str, at: int) -> None:
    """Its log ends before that commit, with or without other versions that expire."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await tx.create_group("voided")
    for value in (2, 3):
        await write(store, value)
    await store.repair(void_intact=[1])
    await tstore.copy(url, f"{url}-copy", at)
    copy = await tstore.open(f"{url}-copy")
    assert (await copy.verify()).faults == []
    assert (await copy.repair()).damaged == []
    assert (await copy.snapshot()).paths() == (["x"] if at > 1 else [])
    await copy.collect(Keep(last=1))
    assert at == 1 or await values(copy) == [at] * 4


async def test_a_job_goes_on_after_a_repair(url: str) -> None:
    async with tstore.Checkpointer(url) as checkpoints:
        for step in (1, 2, 3):
            await (await checkpoints.save(step, {"w": np.full(3, step)})).committed
        await (await tstore.open(url)).repair(void_intact=[2])
        with pytest.raises(TimelineChanged, match="a repair voided version 2 while the store was open"):
            await (await checkpoints.save(4, {"w": np.full(3, 4)})).committed
        assert await (await checkpoints.save(5, {"w": np.full(3, 5)})).committed == 5
    assert await tstore.steps(url) == [1, 3, 5]


async def test_another_repair_ends_one_that_was_interrupted(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await steps(url, 1, 7, 9)
    await store.collect(Keep(last=2))
    await interrupt(store, 3, monkeypatch)
    store = await tstore.open(url)
    version = await write(store, 1)
    assert version is not None
    assert (await store.repair(void_intact=[version])).voided == [version]
    store = await tstore.open(url)
    await store.collect(Keep(last=1))
    assert await tstore.steps(store) == [7]
    assert (await store.verify()).faults == []


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_step_voided_by_a_repair_that_is_voided_is_not_the_newest(url: str, damaged: bool) -> None:
    store = await steps(url, 1, 7, 9)
    await store.collect(Keep(last=2))
    first = await store.repair(void_intact=[3])
    assert first.version is not None
    store = await tstore.open(url)
    if damaged:
        await damage(store, first.version)
    await store.repair(void_intact=[first.version])
    store = await tstore.open(url)
    await write(store, 1)
    await store.collect(Keep(last=1))
    assert await tstore.steps(store) == [7]
    assert (await store.verify()).faults == []


async def _commit(store: tstore.Store, tx: tstore.Transaction) -> None:
    with pytest.raises(Conflict, match="a repair voided version 2"):
        await tx.commit()


async def _read(store: tstore.Store, tx: tstore.Transaction) -> None:
    with pytest.raises(TimelineChanged):
        await values(store)


async def _copy(store: tstore.Store, tx: tstore.Transaction) -> None:
    with pytest.raises(Conflict, match="diverged"):
        await tstore.copy(store.url, f"{store.url}-copy")


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("act", [_commit, _read, _copy])
async def test_what_a_repair_voided_stays_void_when_the_repair_is_voided(
    url: str, damaged: bool, act: Callable[[tstore.Store, tstore.Transaction], Awaitable[None]]
) -> None:
    """What was open, or copied, before both repairs has the values of version 2."""
    store = await tstore.open(url)
    await write(store, 1)
    await write(store, 666, "bad", at=slice(0, 2))
    await tstore.copy(url, f"{url}-copy")
    assert await values(store) == [666, 666, 1, 1]
    tx = (await tstore.open(url)).transaction()
    await (await tx.array("x"))[3:].write(3)
    admin = await tstore.open(url)
    first = await admin.repair(void_intact=[2])
    assert first.version is not None
    if damaged:
        await damage(admin, first.version)
    await (await tstore.open(url)).repair(void_intact=[first.version])
    await act(store, tx)
    assert await values(await tstore.open(url)) == [1, 1, 1, 1]


@pytest.mark.parametrize("writes", [5, 80])
async def test_a_voided_record_that_a_backup_restores_is_named(url: str, writes: int) -> None:
    store = await tstore.open(url)
    await write(store, 1)
    await write(store, 666, "bad")
    backup = await store.log.storage.get(commit_key(2))
    await store.repair(void_intact=[2])
    store = await tstore.open(url)
    for value in range(writes):
        await write(store, value, at=slice(1))
    await store.log.storage.replace(commit_key(2), backup)
    store = await tstore.open(url)
    if writes < 64:  # later readers begin at a root, which has the repaired state
        with pytest.raises(Corrupt, match=r"0002 is a record again.*--void-intact 2"):
            await store.snapshot()
    assert "0002 is a record again" in (await store.verify()).faults[0]
    [restored] = (await store.repair()).damaged
    assert (restored.version, restored.record_intact) == (2, True)
    assert (await store.repair(void_intact=[2])).ok
    store = await tstore.open(url)
    assert await values(store) == [writes - 1, 1, 1, 1]
    assert await store.tags() == {}
    assert (await store.verify()).faults == []


async def test_a_voided_collection_of_small_commits(url: str) -> None:
    """The state before what it kept is alive again, and is not expired by the same repair."""
    store = await tstore.open(url)
    for value in (1, 2, 3):
        await write(store, value)
    await store.collect(Keep(newer_than=timedelta(0)))
    await store.repair(void_intact=[3])
    store = await tstore.open(url)
    assert await values(store) == [2] * 4
    assert (await store.repair(void_intact=[4])).ok
    store = await tstore.open(url)
    assert await values(store) == [2] * 4
    assert (await store.verify()).faults == []
    await store.collect(Keep(newer_than=timedelta(0)))
    assert await values(store) == [2] * 4


async def test_a_transaction_based_beside_a_copy_expires_with_the_head(url: str) -> None:
    store = await tstore.open(url)
    for step in (1, 2):
        await tstore.save(store, {"w": np.full((512, 512), step, "f4")}, step)
    await tstore.quantize(store, "e4m3", at="step/1", tag="q")
    tx = store.transaction()
    await tx.paths()
    await tstore.save(store, {"w": np.full((512, 512), 3, "f4")}, 3)
    await store.collect(Keep(last=1, tags=("q",)))
    with pytest.raises(SnapshotExpired, match="version 2 was removed"):
        await (await tx.array("w"))[0:1].read()
