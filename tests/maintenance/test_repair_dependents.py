"""What rests on a version that a repair voids: later versions, open transactions, collections, copies, servers."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.http_server import ADMIN, everybody
from tstore import Keep
from tstore.core.format.layout import commit_key
from tstore.core.maintenance import repair
from tstore.core.storage.memory import MemoryStorage
from tstore.core.tags import set_tag
from tstore.errors import (
    Conflict,
    Corrupt,
    InvalidArgument,
    NotFound,
    SnapshotExpired,
    TimelineChanged,
    TStoreError,
)
from tstore.service.server import Server

VALUES = np.arange(8, dtype="f4")
Edit = Callable[[tstore.Transaction], Awaitable[object]]


async def new_store() -> tstore.Store:
    return await tstore.open(f"memory://{uuid.uuid4()}")


async def commit(store: tstore.Store, edit: Edit, tag: str | None = None) -> None:
    async with store.transaction(tag=tag) as tx:
        await edit(tx)


async def create(tx: tstore.Transaction, dtype: str = "f4", shape: tuple[int, ...] = (8,)) -> None:
    await (await tx.create_array("a", shape, dtype, (2,) * len(shape))).write(
        np.arange(np.prod(shape)).reshape(shape)
    )


async def recreate(tx: tstore.Transaction) -> None:
    await tx.delete("a")
    await create(tx, "i4")


async def resize(tx: tstore.Transaction) -> None:
    await (await tx.array("a")).resize((4, 8))


async def append_two(tx: tstore.Transaction) -> None:
    await (await tx.array("a")).append(np.full(3, 7, "f4"))


async def write_part(tx: tstore.Transaction) -> None:
    a = await tx.array("a")
    await a[0:1].write(np.full((1, *a.shape[1:]), 9, a.dtype))


async def create_array_b(tx: tstore.Transaction) -> None:
    await (await tx.create_array("b", (8,), "f4", (2,))).write(VALUES)


async def write_b(tx: tstore.Transaction) -> None:
    await (await tx.array("b"))[0:2].write(VALUES[:2])


async def delete_a(tx: tstore.Transaction) -> None:
    await tx.delete("a")


async def create_below_a(tx: tstore.Transaction) -> None:
    await (await tx.create_array("a/b", (8,), "f4", (2,))).write(VALUES)


RESTING: dict[str, tuple[Edit, Edit, Edit]] = {
    "an array created again": (create, recreate, write_part),
    "a resized array": (lambda tx: create(tx, shape=(4, 4)), resize, write_part),
    "a new array": (create, create_array_b, write_b),
    "an append": (create, append_two, append_two),
    "a deleted array": (create, delete_a, create_below_a),
}


async def resting(name: str) -> tstore.Store:
    store = await new_store()
    for edit in RESTING[name]:
        await commit(store, edit)
    return store


async def check_refused(store: tstore.Store, name: str) -> None:
    """Check that version 3, which rests on the void version 2, is an error, until it is voided too."""
    store = await tstore.open(store.url)
    [fault, *_] = (await store.verify()).faults
    assert commit_key(3) in fault
    if name != "a deleted array":  # which is only in the way
        with pytest.raises(Corrupt, match=r"a record writes to '[ab]'"):
            await store.snapshot()
    [damage] = (await store.repair()).damaged
    assert (damage.version, damage.record_intact) == (3, True)
    assert commit_key(3) in damage.reason
    report = await store.repair(void_intact=[3])
    assert (report.ok, report.voided) == (True, [3])
    store = await tstore.open(store.url)
    assert (await store.verify()).faults == []
    assert (await (await store.snapshot()).array("a")).dtype == "f4"


@pytest.mark.parametrize("name", RESTING)
async def test_an_intact_version_on_which_a_later_one_rests_is_not_voided_alone(name: str) -> None:
    store = await resting(name)
    with pytest.raises(InvalidArgument, match=r"nothing was voided: .*0003: .*void_intact=\[2, 3\]"):
        await store.repair(void_intact=[2])
    assert await store.log.storage.list("damaged/") == []
    assert (await store.verify()).faults == []
    report = await store.repair(void_intact=[2, 3])
    assert (report.ok, report.voided) == (True, [2, 3])
    store = await tstore.open(store.url)
    assert (await store.verify()).faults == []
    assert (await (await store.snapshot()).array("a")).dtype == "f4"


@pytest.mark.parametrize("name", RESTING)
async def test_a_version_that_rests_on_a_damaged_one_is_named(name: str) -> None:
    store = await resting(name)
    await store.log.storage.replace(commit_key(2), b"garbage")
    report = await (await tstore.open(store.url)).repair([2])
    assert [(damage.version, damage.record_intact) for damage in report.damaged] == [(2, False), (3, True)]
    assert not report.ok
    await check_refused(store, name)


async def test_a_tag_of_a_damaged_version_is_dropped_though_the_head_rests_on_that() -> None:
    """So no tree of the head tells which tags name it."""
    store = await resting("an array created again")
    await set_tag(store, "best", 2)
    await set_tag(store, "first", 1)
    await store.log.storage.replace(commit_key(2), b"garbage")
    await (await tstore.open(store.url)).repair([2])
    assert (await (await tstore.open(store.url)).repair(void_intact=[3])).ok
    assert await (await tstore.open(store.url)).tags() == {"first": 1}


async def save(store: tstore.Store, step: int, arrays: int = 150) -> None:
    await tstore.save(store, {f"w{i}": np.full(100, 1000 * step + i) for i in range(arrays)}, step)


async def check_works(url: str) -> None:
    store = await tstore.open(url)
    snapshot = await store.snapshot()
    for path in snapshot.paths():
        await (await snapshot.array(path)).read()
    await save(store, 100)
    await commit(store, create_array_b)
    assert (await tstore.restore(store, 100))["w3"][0] == 100003
    assert (await store.verify()).faults == []
    assert (await store.repair()).ok
    await store.collect(Keep(last=1), abandoned=timedelta(0))
    assert (await tstore.restore(store, 100))["w3"][0] == 100003
    assert (await (await tstore.open(url)).verify()).faults == []


async def copied(store: tstore.Store) -> str:
    """Return the URL of a copy made through a server, which validates every record."""
    url = f"memory://{uuid.uuid4()}"
    async with Server(url, access=everybody()) as server:
        await tstore.copy(store, server.url, storage_options={"token": ADMIN})
    return url


async def test_a_version_whose_tree_rests_on_collected_objects_is_named() -> None:
    """The voided save had replaced the tree, so a gc deleted the older one, which a later write would need."""
    store = await new_store()
    for step in (1, 2):
        await save(store, step)
    await store.collect(Keep(last=1), abandoned=timedelta(0))
    async with store.transaction() as tx:
        await (await tx.array("w0"))[0:1].write(np.array([5]))
    await store.log.storage.replace(commit_key(2), b"garbage")
    store = await tstore.open(store.url)
    report = await store.repair([2])
    assert (report.ok, [damage.version for damage in report.damaged]) == (False, [2, 4])
    report = await (await tstore.open(store.url)).repair(void_intact=[4])
    assert (report.ok, report.restated) == (True, 0)
    store = await tstore.open(store.url)
    assert (await store.snapshot()).paths() == []
    for url in (store.url, await copied(store)):
        await check_works(url)


async def test_the_newest_state_is_that_of_a_living_version() -> None:
    store = await new_store()
    for step in range(1, 6):
        await save(store, step)
    await store.collect(Keep(every=3, last=1), abandoned=timedelta(0))
    report = await store.repair(void_intact=[5])
    assert (report.ok, report.restated) == (True, 3)
    store = await tstore.open(store.url)
    assert await tstore.steps(store) == [3]
    w = await (await store.snapshot()).array("w1")
    assert (await w.read())[0] == 3001
    for url in (store.url, await copied(store)):
        await check_works(url)


async def _append_columns(tx: tstore.Transaction) -> None:
    await (await tx.array("a")).append(np.full((4, 1), 7, "f4"), axis=1)


async def _append_rows(tx: tstore.Transaction) -> None:
    await (await tx.array("a")).append(np.full((1, 4), 7, "f4"))


async def _copy(tx: tstore.Transaction) -> None:
    await tx.copy_array(await tx.array("a"), "copied")


async def _attributes(tx: tstore.Transaction) -> None:
    await tx.create_group("g", {"k": 1})


async def _nothing(tx: tstore.Transaction) -> None:
    await tx.paths()


async def _replace(tx: tstore.Transaction) -> None:
    await tx.delete("a")


OPEN: dict[str, Edit] = {
    "part of a chunk": write_part,
    "append": _append_rows,
    "append along another axis": _append_columns,
    "copy": _copy,
    "resize": resize,
    "group": _attributes,
    "tag only": _nothing,
    "delete": _replace,
}


@pytest.mark.parametrize("same", [True, False], ids=["same store", "another process"])
@pytest.mark.parametrize("name", OPEN)
async def test_a_transaction_open_across_a_repair_conflicts(name: str, *, same: bool) -> None:
    store = await new_store()
    await commit(store, lambda tx: create(tx, shape=(4, 4)))
    await commit(store, write_part)
    other = store if same else await tstore.open(store.url)
    tx = other.transaction(tag="t")
    await OPEN[name](tx)
    await store.repair(void_intact=[2])
    with pytest.raises((Conflict, TimelineChanged)):
        await tx.commit()
    store = await tstore.open(store.url)
    assert (await store.snapshot()).version == 3
    a = await (await store.snapshot()).array("a")
    assert np.array_equal(await a.read(), np.arange(16).reshape(4, 4))


async def test_a_transaction_that_has_not_read_the_voided_record_conflicts() -> None:
    """It has read a root above the voided version, so no record that it knows has changed."""
    store = await new_store()
    for i in range(70):
        async with store.transaction(durability="none") as tx:
            await tx.create_group(f"g{i}", {"i": i})
    tx = (await tstore.open(store.url)).transaction()
    await tx.create_group("g70")
    await (await tstore.open(store.url)).repair(void_intact=[5])
    with pytest.raises(Conflict, match="a repair voided version 5"):
        await tx.commit()
    assert (await (await tstore.open(store.url)).snapshot()).version == 71


async def test_concurrent_commits_of_one_process_conflict_each_by_its_own_base() -> None:
    """One began before the repair, the others after it; they would share a record."""
    store = await new_store()
    await commit(store, create)
    await commit(store, write_part)
    old = store.transaction()
    await write_part(old)
    await (await tstore.open(store.url)).repair(void_intact=[2])
    store2 = await tstore.open(store.url)
    new = store2.transaction()
    await (await new.array("a"))[4:6].write(VALUES[:2])
    results = await asyncio.gather(old.commit(), new.commit(), return_exceptions=True)
    assert isinstance(results[0], (Conflict, TimelineChanged))
    assert results[1] == 4


@pytest.mark.parametrize("damaged", [True, False])
async def test_finish_never_commits_again_what_was_voided(*, damaged: bool) -> None:
    store = await new_store()
    await commit(store, create)
    arguments: dict[str, Any] = {"host": 0, "hosts": 1, "attempt": "x"}
    async with store.transaction(name="job", **arguments) as tx:
        await write_part(tx)
    if damaged:
        await store.log.storage.replace(commit_key(2), b"garbage")
    store = await tstore.open(store.url)
    await store.repair([2] if damaged else [], void_intact=[] if damaged else [2])
    store = await tstore.open(store.url)
    with pytest.raises(Conflict, match="a repair voided version 2"):
        await store.finish(tx.id)
    assert np.array_equal(await (await (await store.snapshot()).array("a")).read(), VALUES)
    with pytest.raises(TStoreError):
        async with store.transaction(name="job", **arguments) as again:
            await write_part(again)
    assert np.array_equal(await (await (await store.snapshot()).array("a")).read(), VALUES)


@pytest.mark.parametrize("commits", [write_part, create_array_b])
async def test_a_commit_between_the_void_record_and_the_repair(
    commits: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that was open does not know yet that its base is void."""
    store = await new_store()
    await commit(store, create)
    await commit(store, recreate)
    before, append = await tstore.open(store.url), repair._append
    await (await before.snapshot()).array("a")
    pending = [True]

    async def append_late(*arguments: Any) -> int:
        if pending:
            pending.clear()
            with contextlib.suppress(TimelineChanged):
                await commit(before, commits)
        return await append(*arguments)

    monkeypatch.setattr(repair, "_append", append_late)
    report = await (await tstore.open(store.url)).repair(void_intact=[2])
    assert report.ok == ((await (await tstore.open(store.url)).verify()).faults == [])
    store = await tstore.open(store.url)
    with contextlib.suppress(Corrupt):
        assert np.array_equal(await (await (await store.snapshot()).array("a")).read(), VALUES)
    rest = [d.version for d in report.damaged if d.version != 2]
    if rest:
        assert (await (await tstore.open(store.url)).repair(void_intact=rest)).ok
        assert (await (await tstore.open(store.url)).verify()).faults == []


class Paused:
    """Deletions wait for `go`, each of them once it has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        delete = MemoryStorage.delete

        async def paused(storage: Any, key: str) -> None:
            if "trial" not in key and not key.startswith("roots/"):
                self.begun.set()
                await self.go.wait()
            await delete(storage, key)

        monkeypatch.setattr(MemoryStorage, "delete", paused)


@pytest.mark.parametrize("reuses", [True, False])
async def test_a_gc_that_is_still_deleting_while_its_record_is_voided(
    monkeypatch: pytest.MonkeyPatch, *, reuses: bool
) -> None:
    store = await new_store()
    big = np.arange(4000.0)
    for step in range(3):
        await tstore.save(store, {"w": big + step % 2}, step)
    paused = Paused(monkeypatch)
    collecting = asyncio.create_task((await tstore.open(store.url)).collect(Keep(last=1), abandoned=timedelta(0)))
    await paused.begun.wait()
    report = await (await tstore.open(store.url)).repair(void_intact=[4])
    assert report.ok
    store = await tstore.open(store.url)
    if reuses:
        await tstore.save(store, {"w": big + 1}, 10)  # has the values of step 1
        with contextlib.suppress(SnapshotExpired):
            async with store.transaction() as tx:
                await tx.copy_array(await (await store.snapshot(2)).array("w"), "copied")
    paused.go.set()
    with contextlib.suppress(TimelineChanged):
        await collecting
    store = await tstore.open(store.url)
    assert (await store.verify()).faults == []
    assert (await store.repair()).ok
    for step in await tstore.steps(store):
        assert (await tstore.restore(store, step))["w"][0] in (0, 1)


@pytest.mark.parametrize("damaged", [True, False])
async def test_a_gc_that_is_still_deleting_what_a_version_needs_after_a_repair(
    monkeypatch: pytest.MonkeyPatch, *, damaged: bool
) -> None:
    """The save that is voided had replaced the tree of the first one, which a later write needs without it."""
    store = await new_store()
    for step in (1, 2):
        await save(store, step)
    async with store.transaction() as tx:
        await (await tx.array("w0"))[0:1].write(np.array([5]))
    paused = Paused(monkeypatch)
    collecting = asyncio.create_task((await tstore.open(store.url)).collect(Keep(last=1), abandoned=timedelta(0)))
    await paused.begun.wait()
    if damaged:
        await store.log.storage.replace(commit_key(2), b"garbage")
        report = await (await tstore.open(store.url)).repair([2])
        assert (report.ok, [damage.version for damage in report.damaged]) == (False, [2, 3])
        report = await (await tstore.open(store.url)).repair()
        assert [damage.version for damage in report.damaged] == [3]
    else:
        with pytest.raises(InvalidArgument, match=r"void_intact=\[2, 3\]"):
            await (await tstore.open(store.url)).repair(void_intact=[2])
    paused.go.set()
    await collecting
    report = await (await tstore.open(store.url)).repair(void_intact=[3] if damaged else [2, 3])
    assert (report.ok, report.restated) == (True, 0)
    await check_works(store.url)


async def test_a_gc_whose_record_was_damaged_and_voided_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await new_store()
    for step in range(70):  # more than are deleted at once
        await tstore.save(store, {"w": np.arange(1000.0) + step}, step, durability="none")
    paused = Paused(monkeypatch)
    collecting = asyncio.create_task((await tstore.open(store.url)).collect(Keep(last=1), abandoned=timedelta(0)))
    await paused.begun.wait()
    await store.log.storage.replace(commit_key(71), b"garbage")
    paused.go.set()
    with pytest.raises((TimelineChanged, Corrupt)):
        await collecting
    store = await tstore.open(store.url)
    assert (await store.repair([71])).ok
    store = await tstore.open(store.url)
    assert len(await tstore.steps(store)) > 1
    assert (await store.verify()).faults == []


async def test_a_collection_planned_before_a_repair_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from tstore.core.maintenance import gc

    store = await new_store()
    for step in range(3):
        await tstore.save(store, {"w": VALUES + step}, step)
    append, pending = gc._append, [True]

    async def append_late(*arguments: Any) -> int:
        if pending:
            pending.clear()
            await (await tstore.open(store.url)).repair(void_intact=[3])
        return await append(*arguments)

    monkeypatch.setattr(gc, "_append", append_late)
    with contextlib.suppress(TimelineChanged):
        await (await tstore.open(store.url)).collect(Keep(last=1), abandoned=timedelta(0))
    store = await tstore.open(store.url)
    await store.collect(Keep(last=1), abandoned=timedelta(0))
    assert (await tstore.restore(store))["w"][0] == 1
    assert (await (await tstore.open(store.url)).verify()).faults == []


async def test_a_copy_made_before_a_repair_is_not_mixed_with_it() -> None:
    store = await new_store()
    await commit(store, create)
    await commit(store, create_array_b)
    await commit(store, write_part)
    target = f"memory://{uuid.uuid4()}"
    await tstore.copy(store, target)
    await store.repair(void_intact=[2])
    store = await tstore.open(store.url)
    with pytest.raises(Conflict, match="from version 2 on"):
        await tstore.copy(store, target)
    assert (await (await tstore.open(target)).snapshot()).version == 3
    fresh = f"memory://{uuid.uuid4()}"
    await tstore.copy(store, fresh)
    assert (await (await tstore.open(fresh)).snapshot()).paths() == ["a"]


async def test_a_voided_record_as_long_as_the_one_before_is_noticed_by_a_copy() -> None:
    """So the list of the destination does not tell that they differ."""
    length, differs = 300, 1
    for _ in range(3):
        store, target = await new_store(), f"memory://{uuid.uuid4()}"
        for message in ("", "m" * length, ""):
            async with store.transaction(message) as tx:
                await tx.create_group(f"g{uuid.uuid4()}")
        await tstore.copy(store, target)
        before = await store.log.storage.size(commit_key(2))
        await store.repair(void_intact=[2])
        after = await store.log.storage.size(commit_key(2))
        assert before is not None
        assert after is not None
        differs = after - before
        length += differs
        if not differs:
            break
    assert not differs
    with pytest.raises(Conflict, match="from version 2 on"):
        await tstore.copy(await tstore.open(store.url), target)
    assert (await (await tstore.open(target)).snapshot()).version == 3


@pytest.mark.parametrize("void", [2, 3])
async def test_a_server_that_runs_during_a_repair_follows_it(void: int, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    store = await tstore.open(url)
    await commit(store, create)
    await commit(store, create_array_b)
    await commit(store, write_part)
    async with Server(url, access=everybody()) as server:
        client = await tstore.open(server.url, storage_options={"token": ADMIN})
        await commit(client, _attributes)
        tx = client.transaction()
        await write_part(tx)
        await (await tstore.open(url)).repair(void_intact=[void])
        with pytest.raises((Conflict, TimelineChanged)):
            await tx.commit()
        client = await tstore.open(server.url, storage_options={"token": ADMIN})
        await commit(client, write_part)
        snapshot = await client.snapshot()
        assert snapshot.paths() == (["a"] if void == 2 else ["a", "b"])
        assert (await client.verify()).faults == []


async def test_an_open_store_forgets_trees_of_voided_versions() -> None:
    """It has read a root above the voided version, not its record."""
    store = await new_store()
    for i in range(70):
        async with store.transaction(durability="none") as tx:
            await tx.create_group(f"g{i}", {"i": i})
    other = await tstore.open(store.url, "r")
    snapshot = await other.snapshot()
    await (await tstore.open(store.url)).repair(void_intact=[5])
    assert snapshot.version == 70
    for at in (70, None, 70):
        try:
            tree = await other.log.reader.tree((await other.snapshot(at)).version)
        except TimelineChanged:
            return
        if at is None:
            seen = tree
    assert "g4" not in seen.nodes
    assert "g4" not in tree.nodes
    assert "g5" in tree.nodes


async def test_a_tag_set_during_the_repair_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await new_store()
    for step in range(3):
        await tstore.save(store, {"w": VALUES + step}, step)
    async with store.transaction(tag="best") as tx:
        await tx.create_group("x", {})
    async with store.transaction(move_tag="best") as tx:
        await tx.staging.tag_version(2)
    append, pending = repair.Log.append, [True]

    async def append_late(log: Any, *arguments: Any) -> int:
        if pending:
            pending.clear()
            async with (await tstore.open(store.url)).transaction(move_tag="best"):
                pass
        return await append(log, *arguments)

    monkeypatch.setattr(repair.Log, "append", append_late)
    await (await tstore.open(store.url)).repair(void_intact=[2])
    assert (await (await tstore.open(store.url)).tags())["best"] == 6


@pytest.mark.parametrize("target", [None, 3])
async def test_a_tag_moved_away_before_the_repair_is_not_dropped(target: int | None) -> None:
    store = await new_store()
    for step in range(3):
        await tstore.save(store, {"w": VALUES + step}, step)
    for named in (2, target):
        async with store.transaction(move_tag="best") as tx:
            if named is not None:
                await tx.staging.tag_version(named)
    await store.repair(void_intact=[2])
    assert (await (await tstore.open(store.url)).tags())["best"] == (target or 5)


async def test_an_outcome_is_that_of_the_repaired_history() -> None:
    store = await new_store()
    await commit(store, create)
    async with store.transaction() as tx:
        await write_part(tx)
    await store.repair(void_intact=[2])
    store = await tstore.open(store.url)
    assert await store.outcome(tx.id) is None
    with pytest.raises(NotFound):
        await (await store.snapshot()).array("b")
