"""What a repair leaves alive, what it expires, and what stays condemned: else data that is needed is deleted."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from datetime import timedelta

import numpy as np
import pytest

import tstore
from tests.maintenance.test_repair_dependents import Paused
from tests.support.held_commit import held_commit
from tests.support.http_server import ADMIN, everybody
from tstore import Keep
from tstore.core.format.layout import commit_key
from tstore.core.tags import remove_step, set_tag
from tstore.errors import SourceCondemned, TimelineChanged
from tstore.lab.conformance.faults import open_faulty
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Server

VALUES = np.arange(4000.0)
NOW = timedelta(0)
HEAD = Keep(newer_than=NOW)  # which keeps nothing else


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


async def save(url: str, *steps: int) -> None:
    """Save steps, each of which has a pack of its own and needs no other."""
    for step in steps:
        await tstore.save(url, {"w": VALUES + step}, step)


async def groups(url: str, count: int, tag: str | None = None) -> None:
    """Commit new groups; the manifest of 500 is an object of its own."""
    store = await tstore.open(url)
    async with store.transaction(tag=tag) as tx:
        for number in range(count):
            await tx.create_group(f"{tag}{number}", {"long": f"{number:040}"})


async def check(url: str, *steps: int) -> None:
    """Check that these steps are there, that nothing is damaged, and that it stays so after a collection."""
    for _ in range(2):
        store = await tstore.open(url)
        assert (await store.verify()).faults == []
        assert (await store.repair()).damaged == []
        assert await tstore.steps(store) == list(steps)
        for step in steps:
            assert (await tstore.restore(store, step))["w"][0] == step
        await store.collect(abandoned=NOW)


async def lose_pack(store: tstore.Store, version: int) -> None:
    transaction = (await store.log.reader.record(version)).transaction
    [pack] = [key for key in await store.log.storage.list(f"txn/{transaction}/") if "/pack-" in key]
    await store.log.storage.delete(pack)


@contextlib.asynccontextmanager
async def collecting(url: str, keep: Keep, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Collect: during the block, the record of the collection exists, and it has not deleted anything yet."""
    paused = Paused(monkeypatch)
    collection = asyncio.create_task((await tstore.open(url)).collect(keep, abandoned=NOW))
    begun = asyncio.create_task(paused.begun.wait())
    await asyncio.wait([collection, begun], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield
    finally:
        begun.cancel()
        paused.go.set()
        with contextlib.suppress(TimelineChanged):
            await collection


async def test_the_head_of_a_voided_collection_lost_its_pack_in_another_way(url: str) -> None:
    """A collection never deletes that, so it is damaged, not expired, even if a copy is the newest version."""
    for step in (1, 2):
        await tstore.save(url, {"w": np.full((64, 128), step, "f4")}, step)
    await tstore.quantize(url, "e4m3", at="step/2", tag="q")
    store = await tstore.open(url)
    assert (await store.collect(Keep(last=1))).version == 4
    await save(url, 5)
    await lose_pack(store, 2)
    report = await (await tstore.open(url)).repair(void_intact=[4])
    assert (report.expired, [one.version for one in report.damaged]) == ([1], [2])
    assert await tstore.steps(url) == [2, 5]


async def test_older_manifests_that_the_newest_state_needs_stay(url: str) -> None:
    """The only living version needed them; it is voided, so that the state before it is the newest again."""
    for tag in ("a", "b", "c"):
        await groups(url, 500 if tag == "a" else 1, tag)
    store = await tstore.open(url)
    assert (await store.collect(HEAD, abandoned=NOW)).versions == [1, 2]
    assert (await store.repair(void_intact=[3])).restated is None
    for _ in range(2):
        store = await tstore.open(url)
        await store.collect(HEAD, abandoned=NOW)
        assert len((await store.snapshot()).tree.nodes) > 500
        assert (await store.verify()).faults == []
        await groups(url, 1, f"{uuid.uuid4()}")


@pytest.mark.parametrize("void", [[3], [3, 4]])
@pytest.mark.parametrize("manifest", [False, True])
async def test_what_a_collection_still_deletes_is_not_alive_again(
    manifest: bool, void: list[int], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of version 2 needs a pack of its own, or only the manifest of version 1."""
    if manifest:
        await groups(url, 500, "a")
        await groups(url, 1, "b")
    else:
        await save(url, 1, 2)
    await save(url, 3)
    async with collecting(url, Keep(last=1), monkeypatch):
        report = await (await tstore.open(url)).repair(void_intact=void)
        assert report.restated == 0
    await check(url)


async def test_what_needs_a_manifest_that_a_voided_collection_still_deletes_is_expired(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else of those versions is condemned; copies, and the saves after them, need no older manifest."""
    await save(url, 1)
    for tag in ("a", "b"):
        await groups(url, 500 if tag == "a" else 1, tag)
    assert (await tstore.quantize(url, "e4m3", at="step/1", tag="q")).version == 4
    await save(url, 5)
    await groups(url, 1, "c")
    async with collecting(url, Keep(last=2), monkeypatch):
        assert (await (await tstore.open(url)).repair(void_intact=[7])).expired == [2, 3]
    await check(url, 1, 5)


async def test_a_version_that_an_older_collection_deleted_is_not_alive_again(url: str) -> None:
    """What the last collection condemned does not tell of it."""
    for step in (1, 2):
        await tstore.save(url, {"w": np.full((64, 128), step, "f4")}, step)
    await (await tstore.open(url)).collect(Keep(last=1), abandoned=NOW)
    await tstore.quantize(url, "e4m3", at="step/2", tag="q")
    store = await tstore.open(url)
    assert (await store.collect(Keep(last=1, copies=0), abandoned=NOW)).versions == [4]
    assert (await store.repair(void_intact=[2])).restated == 0
    await check(url)


async def test_two_repairs_at_once(url: str) -> None:
    """The record of the first is a collection. It would list as living what the second has voided."""
    await save(url, 1, 2, 3)
    await (await tstore.open(url)).collect(Keep(last=2))
    await save(url, 5, 6)
    await groups(url, 1)
    store, faults = await open_faulty(url)
    async with held_commit(faults, store.repair(void_intact=[3])) as repairing:
        await (await tstore.open(url)).repair(void_intact=[6])
    try:
        await repairing
    except TimelineChanged:
        assert (await (await tstore.open(url)).repair(void_intact=[3])).ok
    await (await tstore.open(url)).collect(Keep(last=1), abandoned=NOW)
    await check(url, 5)


async def test_a_commit_beside_the_repair_reuses_what_a_voided_collection_still_deletes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(url, 1, 2)
    async with collecting(url, Keep(last=1), monkeypatch):
        store, faults = await open_faulty(url)
        async with held_commit(faults, store.repair(void_intact=[3])) as repairing:
            other = await tstore.open(url)
            async with other.transaction() as tx:
                await tx.copy_array(await (await other.snapshot(1)).array("w"), "copied")
        report = await repairing
        assert (report.expired, report.restated) == ([1, 4], 2)
    await check(url, 2)


async def test_a_tag_of_a_version_that_is_being_voided_is_dropped(url: str) -> None:
    """The process that sets it has read the version before."""
    await save(url, 1, 2, 3)
    other = await tstore.open(url)
    assert (await other.snapshot("step/2")).version == 2
    store, faults = await open_faulty(url)
    async with held_commit(faults, store.repair(void_intact=[2])) as repairing:
        await set_tag(other, "late", 2)
    assert (await repairing).ok
    assert await (await tstore.open(url)).tags() == {"step/1": 1, "step/3": 3}


async def test_a_collection_keeps_the_manifest_that_a_lost_record_wrote(url: str) -> None:
    """It has no chunks. Roots refer to its pages."""
    with override_constants(ROOT_EVERY=4):
        await groups(url, 4000, "a")
        for number in range(9):
            await groups(url, 1, f"b{number}-")
        store = await tstore.open(url)
        await store.log.storage.replace(commit_key(1), b"garbage")
        assert (await (await tstore.open(url)).repair([1])).ok
        for _ in range(2):
            store = await tstore.open(url)
            await store.collect(HEAD, abandoned=NOW)
            assert len((await store.snapshot()).tree.nodes) == 4009
            assert (await store.verify()).faults == []


async def test_what_a_lost_record_wrote_outlives_a_copy_whose_root_has_its_changes(url: str) -> None:
    with override_constants(ROOT_EVERY=4):
        for step in (1, 2):
            await tstore.save(url, {"w": np.full((64, 128), step, "f4")}, step)
        async with (await tstore.open(url)).transaction() as tx:
            await (await tx.create_array("lost", (4000,), "f8")).write(VALUES)
        assert (await tstore.quantize(url, "e4m3", at="step/2", tag="q")).version == 4
        for number in range(3):
            await groups(url, 1, f"b{number}-")
        store = await tstore.open(url)
        await store.log.storage.replace(commit_key(3), b"garbage")
        assert (await (await tstore.open(url)).repair([3])).ok
        heir = ("b0-",)
        for keep in (Keep(last=1, tags=heir), Keep(last=1, tags=heir, copies=0), Keep(tags=heir)):
            store = await tstore.open(url)
            if keep.last is None:
                await remove_step(store, 2)
            await store.collect(keep, abandoned=NOW)
            snapshot = await store.snapshot()
            assert np.array_equal(await (await snapshot.array("lost")).read(), VALUES)
            assert (await (await snapshot.array("w")).read() == 2).all()
            assert (await store.verify()).faults == []


@pytest.mark.parametrize("expired", [2, 4])
async def test_a_write_after_a_save_needs_nothing_from_before_it(expired: int, url: str) -> None:
    """The manifests of the expired versions are deleted. The writes are not damaged without them."""
    with override_constants(ROOT_EVERY=4):
        for number in range(expired):
            await groups(url, 500, f"a{number}-")
        await save(url, expired + 1)
        await groups(url, 1, "b")
        store = await tstore.open(url)
        assert (await store.collect(Keep(last=1), abandoned=NOW)).versions == list(range(1, expired + 1))
        await groups(url, 1, "c")
        await check(url, expired + 1)


async def test_what_needs_a_manifest_that_is_gone_is_damaged(url: str) -> None:
    """It writes to none of the nodes in that manifest, which was replaced by the version that is voided."""
    await groups(url, 500, "a")
    await save(url, 2)
    store = await tstore.open(url)
    await store.collect(HEAD, abandoned=NOW)
    await groups(url, 1, "b")
    await store.log.storage.replace(commit_key(2), b"garbage")
    report = await (await tstore.open(url)).repair([2])
    assert (report.ok, [one.version for one in report.damaged]) == (False, [2, 4])
    assert (await (await tstore.open(url)).repair(void_intact=[4])).ok
    await check(url)


async def test_a_transaction_that_reuses_what_a_voided_collection_still_deletes_conflicts(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save(url, 1, 2)
    other = await tstore.open(url)
    tx = other.transaction()
    await tx.copy_array(await (await other.snapshot(1)).array("w"), "copied")
    async with collecting(url, Keep(last=1), monkeypatch):
        await (await tstore.open(url)).repair(void_intact=[3])
        with pytest.raises((SourceCondemned, TimelineChanged)):
            await tx.commit()
    await check(url, 2)


async def test_a_repair_restates_no_version_that_lacks_a_pack(url: str) -> None:
    await save(url, 1, 2, 3, 4, 5)
    store = await tstore.open(url)
    await store.collect(Keep(last=1, tags=("step/2", "step/3")), abandoned=NOW)
    await lose_pack(store, 3)
    assert (await (await tstore.open(url)).repair(void_intact=[5])).restated == 2
    w = await (await (await tstore.open(url)).snapshot()).array("w")
    assert (await w.read())[0] == 2


async def test_what_an_expired_version_wrote_outlives_a_copy_above_it(url: str) -> None:
    """It lacks a pack that a voided collection deleted. The head needs its other one, which the copy does not."""
    await tstore.save(url, {"w": np.zeros((256, 128), "f4")}, 1)
    store = await tstore.open(url)
    async with store.transaction(tag="rows") as tx:
        await (await tx.create_array("x", (4000,), "f8", (1000,))).write(VALUES)
    async with store.transaction(tag="half") as tx:
        await (await tx.array("x"))[:2000].write(VALUES[:2000] + 1)
    await tstore.quantize(store, "e4m3", at="step/1", tag="q")
    async with store.transaction() as tx:
        await (await tx.array("x"))[2000:].write(VALUES[2000:] + 2)
    collection = await store.collect(Keep(tags=("step/1", "q")), abandoned=NOW)
    assert collection.versions == [2, 3]
    report = await (await tstore.open(url)).repair(void_intact=[6])
    assert report.expired == [2, 3]
    for _ in range(2):
        store = await tstore.open(url)
        await store.collect(Keep(tags=("step/1",), copies=0), abandoned=NOW)
        x = await (await (await store.snapshot()).array("x")).read()
        assert np.array_equal(x, VALUES + np.repeat([1, 2], 2000))
        assert (await store.verify()).faults == []


async def test_a_version_that_inherits_from_a_voided_one_needs_older_ones_too(url: str) -> None:
    await groups(url, 1, "expires")
    for tag in ("kept", "voided", "head"):
        async with (await tstore.open(url)).transaction(tag=tag) as tx:
            new = tag == "kept"
            x = await (tx.create_array("x", (4000,), "f8", (1000,)) if new else tx.array("x"))
            await x[: 4000 if new else 1000].write(VALUES[: 4000 if new else 1000])
    store = await tstore.open(url)
    assert (await store.collect(Keep(tags=("kept", "voided")), abandoned=NOW)).versions == [1]
    await store.repair(void_intact=[3])
    for _ in range(2):
        store = await tstore.open(url)
        await store.collect(HEAD, abandoned=NOW)
        assert np.array_equal(await (await (await store.snapshot()).array("x")).read(), VALUES)
        assert (await store.verify()).faults == []


async def test_no_version_inherits_what_a_collection_still_deletes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server, which checks that nothing is condemned that a living version needs, takes the history."""
    await save(url, 1, 2)
    served = f"{url}-served"
    async with collecting(url, Keep(last=1), monkeypatch):
        assert (await (await tstore.open(url)).repair(void_intact=[3])).expired == [1]
        async with Server(served, access=everybody()) as server:
            await tstore.copy(url, server.url, storage_options={"token": ADMIN})
    for each in (url, served):
        await check(each, 2)
