"""Roots that open stores write while a repair voids a version whose changes these roots have.

Every fourth version has a root here. Version 1 creates "a", version n sets its element n to n.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tstore
from tstore.core.format.layout import commit_key, root_key
from tstore.core.format.objects import pages
from tstore.core.log import objects
from tstore.errors import CommitOutcomeUnknown, TimelineChanged, Unavailable
from tstore.lab.conformance.faults import Faults, open_faulty
from tstore.lab.simulation.scenario import override_constants


@pytest.fixture(autouse=True)
def short_roots() -> Iterator[None]:
    with override_constants(ROOT_EVERY=4):
        yield


@contextlib.contextmanager
def short_pages() -> Iterator[None]:
    """Let short roots be in pages, of which readers read only those that they need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "PAGE_BYTES", 500)
        patch.setattr(pages, "SHORT_MANIFEST", 500)
        patch.setattr(objects, "_SHORT_ROOT", 1500)
        patch.setattr(objects, "_ROOT_END", 300)
        yield


async def filled(newest: int) -> tuple[tstore.Store, Faults]:
    store, faults = await open_faulty(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await (await tx.create_array("a", (40,), "i4", (1,))).write(0)
    for version in range(2, newest + 1):
        assert await write(store) == version
    return store, faults


async def write(store: tstore.Store) -> int:
    """Commit the next version."""
    version = (await store.snapshot()).version + 1
    tx = store.transaction()
    await (await tx.array("a"))[version : version + 1].write(np.array([version], "i4"))
    return await tx.commit()


async def voided(url: str, at: int | None = None) -> list[int]:
    """Return which versions a new reader of a version, by default the newest, lacks."""
    snapshot = await (await tstore.open(url)).snapshot(at)
    values = (await (await snapshot.array("a")).read()).tolist()
    return [v for v in range(2, snapshot.version + 1) if values[v] != v]


@pytest.mark.parametrize("newest", [3, 11])
async def test_no_reader_gets_a_root_with_voided_changes_once_the_repair_is_committed(newest: int) -> None:
    """The repair stops at each of its requests after the commit, as if it had crashed there."""
    requests = 0
    while True:
        store, _ = await filled(newest)
        repairing, faults = await open_faulty(store.url)
        gate = faults.hold("create", commit_key(newest + 1))
        repair = asyncio.create_task(repairing.repair(void_intact=[2]))
        await gate.reached()
        assert await write(store) == newest + 1  # with a root
        committed = faults.hold("create", commit_key(newest + 2))
        gate.release()
        await committed.reached()
        made = len(faults.calls)
        crash = [faults.hold(o, "roots/*", nth=requests + 1) for o in ("delete", "replace", "create")]
        committed.release()
        stops = [asyncio.create_task(gate.reached()) for gate in crash]
        await asyncio.wait([repair, *stops], return_when=asyncio.FIRST_COMPLETED)
        for version in range(newest + 1, newest + 3):
            assert set(await voided(store.url, version)) - {newest + 2} == {2}, faults.calls[made:]
        assert (await (await tstore.open(store.url)).verify()).faults == []
        if repair.done():
            break
        repair.cancel()
        for stop in stops:
            stop.cancel()
        requests += 1
    assert requests


async def test_a_store_that_dies_after_it_wrote_a_root_leaves_none_with_voided_changes() -> None:
    store, faults = await filled(3)
    gate = faults.hold("create", root_key(4))
    commit = asyncio.create_task(write(store))
    await gate.reached()
    await (await tstore.open(store.url)).repair(void_intact=[2])
    faults.fail("read", times=1000)
    faults.fail("delete", times=1000)
    gate.release()
    with contextlib.suppress(Unavailable):
        await commit
    assert await write(await tstore.open(store.url)) == 6
    assert await voided(store.url, 4) == [2]
    assert await voided(store.url) == [2, 5]


async def test_a_repair_that_ends_another_one_leaves_no_root_with_changes_that_this_voided() -> None:
    """The first one crashed before its commit, and an open store has written a root since."""
    store, _ = await filled(3)
    repairing, faults = await open_faulty(store.url)
    faults.fail("create", "commits/*", times=100)
    with pytest.raises(CommitOutcomeUnknown):
        await repairing.repair(void_intact=[2])
    for version in range(4, 9):
        assert await write(store) == version
    assert (await (await tstore.open(store.url)).repair(void_intact=[7])).voided == [7]
    for version, lacking in ((4, [2]), (6, [2]), (8, [2, 7])):
        assert await voided(store.url, version) == lacking


async def test_a_repair_that_is_begun_again_uses_no_root_with_changes_that_it_has_voided() -> None:
    """The root that would vouch for the lost version 6 also has the changes of version 2."""
    store, _ = await filled(9)
    repairing, faults = await open_faulty(store.url)
    await repairing.log.storage.replace(commit_key(6), b"garbage")
    faults.fail("replace", commit_key(6), times=100)
    with pytest.raises(Unavailable):
        await repairing.repair(void=[6], void_intact=[2])
    assert [await write(store) for _ in range(3)] == [10, 11, 12]  # the roots that were deleted are there again
    assert {root_key(8), root_key(12)} <= {*await store.log.storage.list("roots/")}
    assert (await (await tstore.open(store.url)).repair(void=[6], void_intact=[2])).ok
    for version in (8, 12, None):
        assert [v for v in await voided(store.url, version) if v < 13] == [2, 6]


async def test_a_version_that_is_void_already_costs_no_root_that_has_the_changes_of_a_lost_record() -> None:
    store, _ = await filled(3)
    await (await tstore.open(store.url)).repair(void_intact=[2])
    store = await tstore.open(store.url)
    for version in range(5, 10):
        assert await write(store) == version
    await store.log.storage.replace(commit_key(6), b"garbage")
    report = await (await tstore.open(store.url)).repair(void=[6], void_intact=[2])
    assert report.ok
    assert await voided(store.url, 9) == [2, 4]


async def test_a_cache_on_disk_has_no_root_from_before_a_repair(tmp_path: Path) -> None:
    """A new process reads no record of the repair: it begins at a later root, or reads an older version."""
    store, _ = await filled(9)

    async def lacking(at: int | None) -> list[int]:
        storage = (await tstore.open(store.url)).log.storage
        snapshot = await (await tstore.open(storage, "r", cache=tmp_path)).snapshot(at)
        values = (await (await snapshot.array("a")).read()).tolist()
        return [v for v in range(2, snapshot.version + 1) if values[v] != v]

    assert [await lacking(at) for at in (8, 9)] == [[], []]
    await (await tstore.open(store.url)).repair(void_intact=[5])
    other = await tstore.open(store.url)
    assert [await write(other) for _ in range(4)] == [11, 12, 13, 14]
    assert [await lacking(at) for at in (8, 9, None)] == [[5], [5], [5, 10]]


async def test_a_snapshot_whose_root_was_written_anew_says_that_the_timeline_changed() -> None:
    """It has read some pages of the root, and not others; none are mixed with those of the new root."""
    with short_pages():
        url, paths = f"memory://{uuid.uuid4()}", [f"g{number:02}" for number in range(40)]
        for some in (paths[:20], paths[20:]):
            async with (await tstore.open(url)).transaction(durability="none") as tx:
                for path in some:
                    await (await tx.create_array(path, (2,), "i8")).write(0)
        async with (await tstore.open(url)).transaction(durability="none") as tx:
            for path in (paths[0], paths[-1]):
                await (await tx.array(path)).write(1)
        await (await tstore.open(url)).transaction(durability="none").commit()
        snapshot = await (await tstore.open(url)).snapshot()
        assert (await (await snapshot.array(paths[0])).read()).tolist() == [1, 1]
        await (await tstore.open(url)).repair(void_intact=[3])
        with pytest.raises(TimelineChanged, match="as if a repair"):
            await snapshot.read_nodes()


async def test_a_repair_that_ends_that_of_a_collection_expires_what_this_had_deleted() -> None:
    store, _ = await open_faulty(f"memory://{uuid.uuid4()}")
    for step in (1, 2, 3):
        await tstore.save(store, {"w": np.full(4000, step)}, step)
    assert (await store.collect(tstore.Keep(last=1))).version == 4
    await tstore.save(store, {"w": np.full(4000, 5)}, 5)
    await store.log.storage.replace(commit_key(4), b"garbage")
    repairing, faults = await open_faulty(store.url)
    faults.fail("create", "commits/*", times=100)
    with pytest.raises(CommitOutcomeUnknown):
        await repairing.repair(void=[4])
    report = await (await tstore.open(store.url)).repair(void_intact=[5])
    assert (report.ok, report.expired) == (True, [1, 2])
    store = await tstore.open(store.url)
    assert await tstore.steps(store) == [3]
    assert (await store.verify()).faults == []
