"""Archives of old records: what they change for nobody, stalled writers and readers, damage, servers and copies.

An archive has four records here, and every fourth version has a root.
"""

from __future__ import annotations

import asyncio
import datetime
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tstore
from tests.support.held_commit import held_commit
from tests.support.http_server import ADMIN, WRITE, client_of, everybody
from tstore import Keep
from tstore.core.format.frame import link_of, linked
from tstore.core.format.layout import archive_end, archive_key, commit_key
from tstore.core.format.objects.encoding import Archive, encode
from tstore.core.format.objects.records import Record
from tstore.core.log.commits import CommitObjects
from tstore.core.log.history import Commit
from tstore.core.storage.base import Storage
from tstore.core.storage.connect import connect
from tstore.core.storage.objects import Durability, Tuning
from tstore.core.store import Store
from tstore.errors import CommitOutcomeUnknown, Conflict, Corrupt, Unavailable
from tstore.lab.conformance.faults import Faults, open_faulty
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Server

EVERY = 4


@pytest.fixture(autouse=True)
def short_archives() -> Iterator[None]:
    with override_constants(ARCHIVE_EVERY=EVERY, ROOT_EVERY=4):
        yield


async def commit(store: tstore.Store, value: int, tag: str | None = None) -> int:
    """Append a value to the array "x"; if it is odd, also set all of "y" to it."""
    async with store.transaction(str(value), tag=tag) as tx:
        if "x" not in await tx.paths():
            await tx.create_array("x", (0,), "i8", (2,))
            await tx.create_array("y", (2,), "i8", (2,))
        await (await tx.array("x")).append(np.array([value]))
        if value % 2:
            await (await tx.array("y")).write(value)
    assert tx.version is not None
    return tx.version


async def fill(url: str, commits: range) -> tstore.Store:
    store = await tstore.open(url)
    for value in commits:
        await commit(store, value, f"t{value}")
    return store


async def archive(store: tstore.Store) -> None:
    """Collect twice: the first collection archives, the second one deletes; nothing expires."""
    for _ in range(2):
        await store.collect(None)


async def values(store: tstore.Store) -> list[int]:
    return (await (await (await store.snapshot()).array("x")).read()).tolist()


async def records(storage: Storage) -> list[str]:
    return await storage.list("commits/")


async def archives(storage: Storage) -> list[str]:
    return await storage.list("archives/")


async def commits_of(store: tstore.Store) -> list[Commit]:
    return [commit async for commit in store.history()]


async def check(url: str, expected: list[int]) -> None:
    """Check what another process reads, with and without the hint."""
    for _ in range(2):
        async with await tstore.open(url, "r") as store:
            assert await values(store) == expected
            assert [commit.message for commit in await commits_of(store)] == list(map(str, reversed(expected)))
            report = await store.verify()
            assert report.ok, report.faults
        await connect(url).delete("latest")


async def test_archives_change_nothing_but_the_number_of_objects(url: str) -> None:
    store = await fill(url, range(1, 31))
    before = await commits_of(store)
    ids = [commit.transaction for commit in before]
    await archive(store)
    storage = connect(url)
    assert await archives(storage) == [archive_key(end) for end in range(4, 28, 4)]
    assert await records(storage) == [commit_key(version) for version in range(25, 31)]
    for each in (store, await tstore.open(url)):
        assert await commits_of(each) == before
        assert [await each.outcome(name) for name in ids] == list(range(30, 0, -1))
        for version in range(1, 31):
            for at in (version, f"t{version}", before[30 - version].time + datetime.timedelta(microseconds=1)):
                snapshot = await each.snapshot(at)
                assert snapshot.version == version
                assert (await (await snapshot.array("x")).read()).tolist() == list(range(1, version + 1))
    await check(url, list(range(1, 31)))


async def test_objects_follow_what_lives(url: str) -> None:
    store, counts = await tstore.open(url), []
    for step in range(40):
        await tstore.save(store, {"w": np.full(3000, float(step))}, step)
        await store.collect(Keep(last=2))
        counts.append(len(await connect(url).list("")))
    per_archive = 40 * 2 // EVERY
    assert max(counts[20:]) <= counts[8] + per_archive
    assert len(await records(connect(url))) <= 4 * EVERY
    assert (await store.verify()).ok
    assert (await tstore.restore(store))["w"][0] == 39


# ---- numbers are never used again


@pytest.mark.parametrize("later", [9, 11, 30])
async def test_a_stalled_writer_whose_number_was_archived_commits_another_one(later: int, url: str) -> None:
    store = await fill(url, range(1, 4))
    stalled, faults = await open_faulty(url)
    async with held_commit(faults, commit(stalled, 0)) as task:
        await fill(url, range(4, later))
        await archive(store)
        assert commit_key(4) not in await records(connect(url))
    assert await task == later
    await check(url, [*range(1, later), 0])
    await store.collect(None)
    assert commit_key(4) not in await records(connect(url))


async def test_a_stalled_writer_that_conflicts(url: str) -> None:
    store = await fill(url, range(1, 4))
    stalled, faults = await open_faulty(url)

    async def conflict() -> None:
        async with stalled.transaction() as tx:
            await (await tx.array("y")).write(-1)

    async with held_commit(faults, conflict()) as task:
        await fill(url, range(4, 12))
        await archive(store)
    with pytest.raises(Conflict, match="y"):
        await task
    await check(url, list(range(1, 12)))


async def test_a_void_record_of_an_archived_number_voids_nothing(url: str) -> None:
    """The writer got no response to its create, and stands still before it creates the void record."""
    store = await fill(url, range(1, 4))
    stalled, faults = await open_faulty(url)
    faults.fail("create", commit_key(4), nth=1)
    gate = faults.hold("create", commit_key(4))
    task = asyncio.create_task(commit(stalled, 0))
    await gate.reached()
    await fill(url, range(4, 12))
    await archive(store)
    gate.release()
    assert await task == 12
    await check(url, [*range(1, 12), 0])


async def test_a_create_whose_look_fails_is_decided(url: str) -> None:
    await fill(url, range(1, 4))
    store, faults = await open_faulty(url)
    await values(store)
    faults.fail("get", archive_key(4), nth=1)
    faults.fail("get", archive_key(4), nth=2)
    try:
        version = await commit(store, 4)
    except (CommitOutcomeUnknown, Unavailable):
        version = 4
    faults.clear_rules()
    other = await tstore.open(url)
    newest = (await other.snapshot()).version
    assert newest in (3, version)
    await check(url, list(range(1, newest + 1)))


async def dead_writer(url: str, version: int) -> None:
    """Leave what a writer leaves that died between the create of an archived number and its look."""
    record = Record("of-a-dead-writer", version - 1, 0.0, "dead")
    storage = connect(url)
    link = link_of(await CommitObjects(storage).get(version))  # it had read what the winner had read
    await storage.create(commit_key(version), linked(encode(record), link), Durability.FSYNC)


@pytest.mark.parametrize("version", [1, 5, 8])
async def test_readers_ignore_an_object_beside_the_archive(version: int, url: str) -> None:
    store = await fill(url, range(1, version))
    await store.log.ensure_created()
    early = await tstore.open(url, "r")
    await early.snapshot()
    await fill(url, range(version, 20))
    await archive(store)
    await dead_writer(url, version)
    assert await values(early) == list(range(1, 20))
    await check(url, list(range(1, 20)))
    assert await (await tstore.open(url)).outcome("of-a-dead-writer") is None
    await store.collect(None)
    assert commit_key(version) not in await records(connect(url))
    await check(url, list(range(1, 20)))


@pytest.mark.parametrize("known", [3, 4, 5, 10])
async def test_a_reader_that_stood_still_follows_through_archives(known: int, url: str) -> None:
    store = await fill(url, range(1, known + 1))
    early, writer = await tstore.open(url, "r"), await tstore.open(url)
    assert await values(early) == await values(writer) == list(range(1, known + 1))
    await fill(url, range(known + 1, 30))
    await archive(store)
    assert await values(early) == list(range(1, 30))
    assert await commit(writer, 30) == 30
    await check(url, list(range(1, 31)))


async def test_a_transaction_open_since_before_an_archive_is_validated(url: str) -> None:
    store = await fill(url, range(1, 4))
    disjoint, conflicting = store.transaction("0"), store.transaction()
    await (await disjoint.array("x")).append(np.array([0]))
    await (await conflicting.array("y")).write(0)
    await fill(url, range(4, 20))
    await archive(store)
    assert await disjoint.commit() == 20
    with pytest.raises(Conflict):
        await conflicting.commit()
    await check(url, [*range(1, 20), 0])


# ---- collections


async def test_nothing_is_deleted_by_the_collection_that_archives(url: str) -> None:
    """A request under way while one collection archives and deletes could miss the record in both places."""
    store = await fill(url, range(1, 20))
    await store.collect(None)
    assert len(await records(connect(url))) == 19
    assert len(await archives(connect(url))) == 3
    await store.collect(None)
    assert len(await records(connect(url))) == 7


async def test_records_are_deleted_only_while_their_archive_can_be_read(url: str) -> None:
    """Also by a process that has read the archive before it was damaged."""
    store = await fill(url, range(1, 20))
    await store.collect(None)
    assert await store.log.reader.commits.archive(4) is not None
    await connect(url).replace(archive_key(4), b"garbage")
    await store.collect(None)
    assert set(map(commit_key, range(1, 5))) <= set(await records(connect(url)))


async def test_records_whose_archive_vanishes_during_a_collection_are_kept(url: str) -> None:
    """An administrator deletes it after the collection has listed it."""
    await (await fill(url, range(1, 20))).collect(None)
    store, faults = await open_faulty(url)
    gate = faults.hold("flush", "archives")
    collection = asyncio.create_task(store.collect(None))
    await gate.reached()
    await connect(url).delete(archive_key(4))
    gate.release()
    await collection
    await check(url, list(range(1, 20)))


async def test_the_error_of_a_collection_that_committed_nothing_names_no_version(url: str) -> None:
    """It only deletes the records that the one before has archived."""
    await (await fill(url, range(1, 20))).collect(None)
    store, faults = await open_faulty(url)
    faults.fail("delete", "commits/*")
    with pytest.raises(Unavailable, match=r"injected fault$"):
        await store.collect(None)


@pytest.mark.parametrize("operation", ["create", "delete"])
async def test_archiving_that_was_killed_is_continued(operation: str, url: str) -> None:
    await fill(url, range(1, 30))
    for nth in range(1, 4):
        store, faults = await open_faulty(url)
        faults.fail(operation, "archives/*" if operation == "create" else "commits/*", nth=nth)
        with pytest.raises(Unavailable):
            await archive(store)
        await check(url, list(range(1, 30)))
    await archive(await tstore.open(url))
    assert len(await records(connect(url))) == 5
    await check(url, list(range(1, 30)))


async def test_racing_collections_write_the_same_archives(url: str) -> None:
    store = await fill(url, range(1, 30))
    await asyncio.gather(*[(await tstore.open(url)).collect(None) for _ in range(4)])
    await asyncio.gather(*[archive(store) for _ in range(4)])
    assert len(await records(connect(url))) == 5
    await check(url, list(range(1, 30)))


async def test_long_records_stay_as_they_are(url: str) -> None:
    """A reader that stood still reads them as objects, and those after them from an archive."""
    store, early = await fill(url, range(1, 5)), await tstore.open(url, "r")
    assert await values(early) == [1, 2, 3, 4]
    async with store.transaction("5", metadata={"long": "x" * 2000}) as tx:
        await (await tx.array("x")).append(np.array([5]))
    await fill(url, range(6, 20))
    with override_constants(ARCHIVE_BYTES=4000):
        await archive(store)
    assert await archives(connect(url)) == [archive_key(4), archive_key(12)]
    assert await values(early) == list(range(1, 20))
    await check(url, list(range(1, 20)))


async def test_a_block_with_a_damaged_record_is_not_archived(url: str) -> None:
    store = await fill(url, range(1, 20))
    storage = connect(url)
    data = await storage.get(commit_key(6))
    await storage.replace(commit_key(6), data[:-1])
    await archive(store)
    assert archive_key(8) not in await archives(storage)
    await storage.replace(commit_key(6), data)
    await archive(store)
    await check(url, list(range(1, 20)))


# ---- damage


async def test_a_damaged_archive_is_a_fault_that_names_it(url: str) -> None:
    store = await fill(url, range(1, 30))
    await archive(store)
    storage = connect(url)
    intact = await storage.get(archive_key(8))
    for damaged in (intact[:-1], bytes([*intact[:100], intact[100] ^ 1, *intact[101:]]), b""):
        await storage.replace(archive_key(8), damaged)
        other = await tstore.open(url)
        assert await values(other) == list(range(1, 30))
        assert any(archive_key(8) in fault for fault in (await other.verify()).faults)
        with pytest.raises(Corrupt, match=archive_key(8)):
            await other.snapshot(6)
    await storage.replace(archive_key(8), await storage.get(archive_key(12)))
    assert any(archive_key(8) in fault for fault in (await (await tstore.open(url)).verify()).faults)
    await storage.replace(archive_key(8), intact)
    await check(url, list(range(1, 30)))


async def test_a_lost_archive_is_a_gap_that_a_repair_can_void(url: str) -> None:
    store = await tstore.open(url)
    for step in range(20):
        await tstore.save(store, {"w": np.full(5, step)}, step)
    await archive(store)
    await connect(url).delete(archive_key(8))
    other = await tstore.open(url)
    assert (await tstore.restore(other))["w"][0] == 19
    assert any(commit_key(5) in fault for fault in (await other.verify()).faults)
    assert [damage.version for damage in (await other.repair()).damaged] == [5, 6, 7, 8]
    report = await other.repair(void=[5, 6, 7, 8])
    assert report.ok
    again = await tstore.open(url)
    assert (await again.verify()).ok
    await tstore.save(again, {"w": np.full(5, 20)}, 20)
    await archive(again)
    assert archive_key(8) in await archives(connect(url))
    assert (await tstore.restore(await tstore.open(url)))["w"][0] == 20


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_store_that_lost_its_first_archives_is_not_new(lost: int, url: str) -> None:
    """Nor is it if the hint is lost too, although all numbers that a search begins with are absent."""
    store = await fill(url, range(1, 4 * lost + 9))
    await archive(store)
    storage = connect(url)
    for number in range(lost):
        await storage.delete(archive_key(EVERY * (number + 1)))
    await storage.delete("latest")
    for number in (1, 2):
        assert await storage.size(commit_key(number)) is None
    with pytest.raises(Corrupt, match=f"{commit_key(1)} is missing"):
        await (await tstore.open(url)).snapshot()
    with pytest.raises(Corrupt, match=f"{commit_key(1)} is missing"):
        await tstore.steps(url)
    with pytest.raises(Corrupt, match=f"{commit_key(1)} is missing"):
        await tstore.save(url, {"w": np.zeros(3)}, 1)


# ---- servers


async def test_a_server_accepts_only_archives_of_its_own_records(tmp_path: Path) -> None:
    folder = str(tmp_path / "store")
    await fill(folder, range(1, 20))
    storage = connect(folder)
    own = tuple([await storage.get(commit_key(version)) for version in range(1, 5)])
    forged = (*own[:3], encode(Record("forged", 3, 0.0)))
    async with Server(folder, access=everybody()) as server, client_of(server, ADMIN) as admin:
        async with client_of(server, WRITE) as writer:
            assert (await writer.create(f"/{archive_key(4)}", encode(Archive(4, own)))).status == 403
            assert (await writer("DELETE", f"/{commit_key(1)}")).status == 403
        for end, listed in ((4, forged), (4, own[::-1]), (8, own), (20, own), (400, own)):
            response = await admin.create(f"/{archive_key(end)}", encode(Archive(end, listed)))
            assert response.status == 422, (end, response)
        assert (await admin.create(f"/{archive_key(8)}", encode(Archive(4, own)))).status == 422
        assert (await admin("DELETE", f"/{commit_key(1)}")).status == 403
        assert (await admin.create(f"/{archive_key(4)}", encode(Archive(4, own)))).status == 201
        assert (await admin("DELETE", f"/{commit_key(1)}")).status in (200, 204)
        assert (await admin("DELETE", f"/{archive_key(4)}")).status == 403
        assert (await admin.create(f"/{commit_key(1)}", encode(Record("again", 0, 0.0)))).status == 412
    await check(folder, list(range(1, 20)))


async def test_a_collection_over_http_archives(tmp_path: Path) -> None:
    folder = str(tmp_path / "store")
    await fill(folder, range(1, 4))
    async with Server(folder, access=everybody()) as server:
        opened = await tstore.open(server.url, storage_options={"token": ADMIN})
        faults = Faults(opened.log.storage)
        stalled = tstore.Store(faults, opened.marker, "a")
        async with held_commit(faults, commit(stalled, 0)) as task:
            async with await tstore.open(server.url, storage_options={"token": ADMIN}) as store:
                for value in range(4, 20):
                    await commit(store, value)
                await archive(store)
            assert len(await records(connect(folder))) == 7
        assert await task == 20
        async with await tstore.open(server.url, "r", storage_options={"token": ADMIN}) as store:
            assert await values(store) == [*range(1, 20), 0]
    await check(folder, [*range(1, 20), 0])


async def test_a_server_follows_a_folder_that_was_archived_beside_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "store")
    store = await fill(folder, range(1, 4))
    async with Server(folder, access=everybody()) as server:
        async with await tstore.open(server.url, storage_options={"token": WRITE}) as remote:
            assert await commit(remote, 4) == 4
            await fill(folder, range(5, 20))
            await archive(store)
            assert await commit(remote, 20) == 20
    await check(folder, list(range(1, 21)))


async def test_a_server_looks_for_the_archive_after_it_has_created_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are archived beside the server between its check that the version is free and the create."""
    folder = str(tmp_path / "store")
    store = await fill(folder, range(1, 4))
    faults = Faults(connect(folder))
    monkeypatch.setattr("tstore.service.server.server.connect", lambda *_: faults)
    async with Server(folder, access=everybody()) as server, client_of(server, WRITE) as writer:
        gate = faults.hold("create", commit_key(4))
        record = encode(Record("stalled", 3, 0.0))
        response = asyncio.create_task(writer.create(f"/{commit_key(4)}", record))
        await gate.reached()
        await fill(folder, range(4, 20))
        await archive(store)
        gate.release()
        assert (await response).status == 412
    await check(folder, list(range(1, 20)))


# ---- copies


async def test_copies_of_a_store_that_is_archived_meanwhile(url: str, tmp_path: Path) -> None:
    store = await fill(url, range(1, 10))
    target = str(tmp_path / "copy")
    assert (await tstore.copy(url, target)).commits == 9
    await fill(url, range(10, 30))
    await archive(store)
    report = await tstore.copy(url, target)
    assert (report.commits, report.version) == (20, 29)
    assert (await tstore.copy(url, target)).commits == 0  # this one deletes what the one before archived
    assert len(await records(connect(target))) == 5
    await check(target, list(range(1, 30)))
    fresh = str(tmp_path / "fresh")
    assert (await tstore.copy(url, fresh)).commits == 29
    await check(fresh, list(range(1, 30)))
    assert (await tstore.copy(target, fresh)).commits == 0
    await commit(await tstore.open(target), 30)
    await commit(store, -30)
    with pytest.raises(Conflict, match="version 30"):
        await tstore.copy(url, target)
    single = str(tmp_path / "single")
    await tstore.copy(url, single, at=6)
    async with await tstore.open(single) as one:
        assert await values(one) == list(range(1, 7))
        assert (await one.verify()).ok


async def test_a_record_that_is_copied_late_is_not_beside_its_archive(tmp_path: Path) -> None:
    """A copy stands still before it creates a record, until another copy has created, archived and deleted it."""
    source, target = str(tmp_path / "a"), f"memory://{uuid.uuid4()}"
    store = await fill(source, range(1, 20))
    slow = Faults(connect(target))
    gate = slow.hold("create", commit_key(3))
    late = asyncio.create_task(tstore.core.copying.copy.copy_to(store, slow))
    await gate.reached()
    for _ in range(2):
        await tstore.copy(source, target)
    gate.release()
    await late
    await check(target, list(range(1, 20)))


def test_ends() -> None:
    assert [archive_end(version) for version in (1, 4, 5, 8, 9)] == [4, 4, 8, 8, 12]


class Concurrent(Faults):
    """Gets many requests at once, as a bucket does."""

    tuning = Tuning(64, batch=1 << 20, piece=1 << 20, gap=0)


async def test_a_search_during_which_records_are_archived_and_deleted_goes_on_above_the_archive() -> None:
    """It looks for the archive before that exists, and for a record of it after that is deleted."""
    url = f"memory://{uuid.uuid4()}"
    store = await fill(url, range(19))
    await store.log.storage.delete("latest")
    faults = Concurrent(connect(url))
    gate = faults.hold("get", commit_key(8))
    snapshot = asyncio.create_task(Store(faults, store.marker, "r").snapshot())
    await gate.reached()
    await archive(store)
    gate.release()
    assert (await snapshot).version == 19


@pytest.mark.parametrize("known", [0, 7])
async def test_a_reader_that_stands_still_for_two_collections_goes_on_above_the_archive(known: int) -> None:
    """It has looked for the archive before, and reads the record's own object when that is deleted."""
    url = f"memory://{uuid.uuid4()}"
    store = await fill(url, range(1, known + 1))
    faults = Concurrent(connect(url))
    reader = Store(faults, store.marker, "r")
    if known:
        assert (await reader.snapshot()).version == known
    await fill(url, range(known + 1, 20))
    await store.log.storage.replace("latest", b"7")
    gate = faults.hold("get", commit_key(known or 8))
    with override_constants(_LONG=-1):
        snapshot = asyncio.create_task(reader.snapshot())
        await gate.reached()
        await archive(await tstore.open(url))
        gate.release()
        assert (await snapshot).version == 19
