"""Old records that a repair meets: lost ones whose effect roots have, and archives, lost, foreign and intact.

An archive has eight records here, and every fourth version has a root.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.http_server import ADMIN, WRITE, everybody
from tests.support.thresholds import Thresholds
from tstore import Keep
from tstore.cli import main
from tstore.core.format.layout import archive_key, commit_key, root_key
from tstore.core.maintenance.repair import repair_store
from tstore.core.storage.base import Storage
from tstore.core.storage.connect import connect
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Durability
from tstore.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    Denied,
    InvalidArgument,
    SnapshotExpired,
    TimelineChanged,
    TStoreError,
    Unavailable,
)
from tstore.lab.conformance.faults import Faults
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Server


@pytest.fixture(autouse=True)
def short_archives() -> Iterator[None]:
    with override_constants(ARCHIVE_EVERY=8, ROOT_EVERY=4):
        yield


async def commit(store: tstore.Store, value: int) -> None:
    """Set an element of "x" to a value, and tag the version with it; the first commit creates "x"."""
    async with store.transaction(str(value), tag=f"t{value}") as tx:
        if value == 1:
            await (await tx.create_array("x", (8,), "i8", (1,))).write(0)
        await (await tx.array("x"))[value % 8 : value % 8 + 1].write(np.array([value]))


async def filled(newest: int) -> tstore.Store:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for value in range(1, newest + 1):
        await commit(store, value)
    return store


def expected(version: int, *lost: int) -> list[int]:
    x = [0] * 8
    for value in range(1, version + 1):
        if value not in lost:
            x[value % 8] = value
    return x


async def read(url: str, at: int | str | None = None) -> list[int]:
    snapshot = await (await tstore.open(url)).snapshot(at)
    return (await (await snapshot.array("x")).read()).tolist()


async def damage(storage: Storage, key: str) -> None:
    data = bytearray(await storage.get(key))
    data[len(data) // 2] ^= 1
    await storage.replace(key, bytes(data))


# ---- verify above archives


async def forge_root(store: tstore.Store, version: int) -> None:
    """Replace the root of a version by one without the last write, but with the right checksum of its record."""
    log = (await tstore.open(store.url)).log.reader
    tree, older = await log.head(version), await log.head(version - 1)
    forged_root = await log.root(type(tree)(version, older.nodes.sealed(version), tree.tags))
    await store.log.storage.replace(root_key(version), forged_root.data)


@pytest.mark.parametrize("archived", [False, True])
async def test_a_wrong_root_above_archives_is_a_fault(archived: bool) -> None:
    """The tree of version 12 follows from the root of version 8, which is in the archive."""
    store = await filled(14)
    if archived:
        await store.collect(Keep(last=1))
        assert await store.log.storage.list("archives/") == [archive_key(8)]
    await forge_root(store, 12)
    [fault] = (await (await tstore.open(store.url)).verify()).faults
    assert f"{root_key(12)} differs from the records" in fault


async def test_a_root_at_a_copy_has_the_tree_of_the_head() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    await tstore.save(store, {"w": np.arange(64.0), "v": np.arange(64.0)}, 1)
    for _ in range(10):
        async with store.transaction() as tx:
            await (await tx.array("v"))[0:1].write(np.array([7.0]))
    async with store.transaction() as tx:
        await (await tx.create_array("only", (4,), "i8", (2,))).write(1)
    await tstore.quantize(store, formats={"w": "e4m3", "**": None}, at=1, tag="q")
    await tstore.quantize(store, formats={"w": "e5m2", "**": None}, at=1, tag="r")
    await tstore.quantize(store, formats={"w": "e3m4", "**": None}, at=1, tag="s")
    report = await tstore.quantize(store, formats={"w": "e2m1", "**": None}, at=1, tag="t")
    assert report.version == 16
    async with store.transaction() as tx:
        await (await tx.array("only"))[0:1].write(np.array([5]))
    await store.collect(Keep(tags=("t",), copies=0))
    assert await store.log.storage.list("roots/") == [root_key(16)]
    assert (await (await tstore.open(store.url)).verify()).faults == []


async def test_the_commit_of_a_repair_is_not_damaged() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for create in (False, True):
        async with store.transaction() as tx:
            if create:
                await tx.delete("b")
            await (await tx.create_array("b", (4,), "i4" if create else "f4", (2,))).write(7)
    async with store.transaction() as tx:
        await (await tx.array("b"))[0:2].write(9)
    async with store.transaction() as tx:
        await tx.create_group("g")
    await store.collect(Keep(last=1))
    await damage(store.log.storage, commit_key(2))
    await store.log.storage.delete(root_key(4))
    report = await (await tstore.open(store.url)).repair(void=[2])
    assert report.version == 6
    assert [one.version for one in report.damaged] == [2, 4]


# ---- archives of another history


async def diverged(tmp_path: Path, common: int) -> tuple[str, str]:
    """Two copies of a store that have some common commits, of which one has archived more than these."""
    urls = [str(tmp_path / name) for name in "ab"]
    store = await tstore.open(urls[0])
    for value in range(1, common + 1):
        await commit(store, value)
    await tstore.copy(urls[0], urls[1])
    for at, url in enumerate(urls):
        async with await tstore.open(url) as one:
            for value in range(common + 1, 30):
                async with one.transaction() as tx:
                    await (await tx.array("x"))[value % 8 : value % 8 + 1].write(np.array([value + 1000 * at]))
    other = await tstore.open(urls[1])
    for _ in range(2):
        await other.collect(None)
    return urls[0], urls[1]


async def test_an_archive_of_another_history_is_named(tmp_path: Path) -> None:
    url, other = await diverged(tmp_path, 10)
    before = await read(url)
    storage = connect(url)
    for end in (8, 16, 24):
        await storage.create(archive_key(end), await connect(other).get(archive_key(end)), Durability.FSYNC)
    with pytest.raises(Corrupt, match=archive_key(24)):
        await read(url)
    store = await tstore.open(url)
    faults = (await store.verify()).faults
    for end in (16, 24):
        assert any(f"{archive_key(end)} has records of another history" in fault for fault in faults)
    assert not any(f"{archive_key(8)} has" in fault for fault in faults)
    with pytest.raises(Corrupt, match=f"{archive_key(16)} .*Delete the archive"):
        await store.repair()
    with pytest.raises(TStoreError):
        await store.collect(None)
    for end in (16, 24):
        await storage.delete(archive_key(end))
    assert await read(url) == before
    assert (await (await tstore.open(url)).verify()).ok


async def test_a_collection_keeps_the_records_beside_a_foreign_archive(tmp_path: Path) -> None:
    """The archive lies below the newest root and collection, so readers do not notice."""
    url, other = await diverged(tmp_path, 5)
    storage = connect(url)
    await (await tstore.open(url)).collect(Keep(last=1))
    before = await read(url)
    own = await storage.get(archive_key(8))
    await storage.replace(archive_key(8), await connect(other).get(archive_key(8)))
    await (await tstore.open(url)).collect(None)
    assert commit_key(16) not in await storage.list("commits/")
    assert commit_key(8) in await storage.list("commits/")
    assert await read(url) == before
    await storage.replace(archive_key(8), own)
    store = await tstore.open(url)
    assert (await store.verify()).ok
    assert len([one async for one in store.history()]) == 30


async def test_records_beside_an_archive_of_another_history_are_named_and_kept(tmp_path: Path) -> None:
    """Two copies have parted, and the files of the longer one were added to those of the other."""
    url, other = str(tmp_path / "a"), str(tmp_path / "b")
    store = await tstore.open(url)
    for value in range(1, 11):
        await commit(store, value)
    await tstore.copy(url, other)
    for value in (11, 12, 13):
        await commit(store, value)
    longer = await tstore.open(other)
    for value in range(21, 50):
        await commit(longer, value)
    await longer.collect(Keep(last=1))
    await longer.collect(None)
    storage, source = connect(url), connect(other)
    for key in await source.list(""):
        with contextlib.suppress(AlreadyExists):
            await storage.create(key, await source.get(key), Durability.FSYNC)
    store = await tstore.open(url)
    [fault, *_] = (await store.verify()).faults
    assert f"{archive_key(16)} has records of another history of the store than {commit_key(12)}" in fault
    with pytest.raises(Corrupt, match=archive_key(16)):
        await store.repair()
    await store.collect(None)
    assert {commit_key(version) for version in (11, 12, 13)} < set(await storage.list("commits/"))


# ---- lost records whose changes a root has


async def lose(store: tstore.Store, *versions: int) -> None:
    for version in versions:
        await damage(store.log.storage, commit_key(version))


async def check_resumed(url: str, newest: int, readable: range, lost: tuple[int, ...]) -> None:
    """Check that versions are what they were, that others lack what was lost, and that all work goes on."""
    for version in readable:
        assert await read(url, version) == expected(version), version
        assert await read(url, f"t{version}") == expected(version)
    store = await tstore.open(url)
    assert not {f"t{version}" for version in lost} & set(await store.tags())
    report = await store.verify()
    assert report.faults == []
    assert (await store.repair()).damaged == []
    for value in range(newest + 1, newest + 10):
        await commit(store, value)
        await store.collect(Keep(last=1, tags=(f"t{readable[-1]}",)), abandoned=timedelta(0))
        assert await read(url) == expected(value)
        assert await read(url, f"t{readable[-1]}") == expected(readable[-1])
        report = await (await tstore.open(url)).verify()
        assert report.faults == []


@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize("lost", [(12,), (11, 12), (8, 12)])
async def test_a_root_vouches_for_a_record_that_was_deleted(lost: tuple[int, ...], hint: bool) -> None:
    """A search for the newest version ends there, but the commits after it follow the root."""
    store = await filled(14)
    for version in lost:
        await store.log.storage.delete(commit_key(version))
    if not hint:
        await store.log.storage.delete("latest")
    report = await (await tstore.open(store.url)).repair()
    assert [one.version for one in report.damaged] == list(lost)
    assert all("keep its changes" in one.reason for one in report.damaged)
    assert (await (await tstore.open(store.url)).repair(void=lost)).ok
    assert await read(store.url) == expected(14)


@pytest.mark.parametrize("lost", [(2,), (4,), (5,), (7, 8), (3, 9), (1, 2, 3, 4, 5), tuple(range(1, 9)), (8, 16)])
async def test_a_root_vouches_for_a_lost_record(lost: tuple[int, ...]) -> None:
    """From the next root on, nothing changes; the versions before it lack what was lost."""
    newest = 22
    store = await filled(newest)
    await lose(store, *lost)
    resumed = -(-lost[-1] // 4) * 4
    before = {version: await outcome(store.url, version) for version in range(1, newest + 1)}
    report = await (await tstore.open(store.url)).repair(void=lost)
    assert report.ok
    if 1 not in lost:  # the version that created the array
        unknown = [version for version in lost if -(-version // 4) * 4 >= resumed]
        assert await read(store.url, resumed - 1) == expected(resumed - 1, *unknown)
    for version, values in before.items():
        assert values is None or await read(store.url, version) == values
    await check_resumed(store.url, newest, range(resumed + 1, newest + 1), lost)


async def test_a_root_vouches_for_a_lost_record_although_none_does_for_a_later_one() -> None:
    """The root of version 12 was never written, as if its writer had died."""
    store = await filled(14)
    await lose(store, 6, 11)
    await store.log.storage.delete(root_key(12))
    assert (await (await tstore.open(store.url)).repair(void=[6, 11])).ok
    assert await read(store.url, 14) == expected(14, 11)
    assert await read(store.url, 9) == expected(9)
    assert (await (await tstore.open(store.url)).verify()).faults == []


async def test_an_intact_version_stays_whose_root_alone_has_the_changes_of_a_lost_record() -> None:
    """A collection deleted the root that vouched: no living version needed it beside the root of version 16."""
    store = await filled(11)
    await lose(store, 6)
    await (await tstore.open(store.url)).repair(void=[6])
    store = await tstore.open(store.url)
    for value in range(13, 19):
        await commit(store, value)
    await store.collect(Keep(last=1), abandoned=timedelta(0))
    assert root_key(8) not in await store.log.storage.list("roots/")
    before = await read(store.url)
    with pytest.raises(InvalidArgument, match=f"version 6 is lost and only {root_key(16)} has its changes"):
        await (await tstore.open(store.url)).repair(void_intact=[16])
    store = await tstore.open(store.url)
    assert (await store.repair()).damaged == []
    assert await read(store.url) == before
    assert (await store.repair(void_intact=[17])).ok
    assert (await (await tstore.open(store.url)).verify()).faults == []


async def outcome(url: str, version: int) -> list[int] | None:
    try:
        return await read(url, version)
    except TStoreError:
        return None


async def test_a_transaction_older_than_a_collection_does_not_take_expired_roots_for_damage() -> None:
    """To validate it, the trees of versions from 24 on are needed, which no root has any more."""
    store = await filled(21)
    await lose(store, 18)
    store = await tstore.open(store.url)
    assert (await store.repair(void=[18])).version == 22
    opened = await tstore.open(store.url)
    tx = opened.transaction(isolation="serializable")
    assert await tx.paths() == ["x"]
    await tx.create_group("g")
    for value in range(23, 34):
        await commit(store, value)
        await opened.snapshot()  # which takes the place of an older tree in memory
    await store.collect(Keep(last=1, newer_than=timedelta(0)))
    assert root_key(20) not in await store.log.storage.list("roots/")
    with pytest.raises(Conflict, match="the garbage collection recorded as version 34 removed a version"):
        await tx.commit()


async def test_versions_that_rest_on_a_lost_one_go_on_from_the_next_root() -> None:
    """Version 6 creates an array, 7 and 10 write to it; only version 7 is damaged without 6."""
    store = await filled(5)
    async with store.transaction() as tx:
        await (await tx.create_array("b", (4,), "i8", (2,))).write(6)
    for value in (7, 8, 9, 10):
        async with store.transaction() as tx:
            await (await tx.array("b"))[value % 4 : value % 4 + 1].write(np.array([value]))
    await lose(store, 6)
    before = {key: await store.log.storage.get(key) for key in await store.log.storage.list("")}
    with pytest.raises(InvalidArgument, match=r"without 7, 3 versions would be damaged, .*; void 6 first, alone$"):
        await (await tstore.open(store.url)).repair(void=[6], void_intact=[7])
    assert {key: await store.log.storage.get(key) for key in await store.log.storage.list("")} == before
    report = await (await tstore.open(store.url)).repair(void=[6])
    assert [one.version for one in report.damaged] == [6, 7]
    snapshot = await (await tstore.open(store.url)).snapshot()
    assert (await (await snapshot.array("b")).read()).tolist() == [8, 9, 10, 7]
    with pytest.raises(Corrupt, match=f"{store.url}: {commit_key(7)}: a record writes to 'b'.*tstore repair"):
        await read(store.url, 7)
    assert (await (await tstore.open(store.url)).repair(void_intact=[7])).ok
    assert await (await snapshot.array("b")).read() is not None


async def test_an_open_store_goes_on_after_a_lost_record_was_voided() -> None:
    store = await filled(6)
    opened = await tstore.open(store.url)
    assert await (await (await opened.snapshot()).array("x")).read() is not None
    for value in range(7, 15):
        await commit(store, value)
    await lose(store, 6)
    await (await tstore.open(store.url)).repair(void=[6])
    values = []
    for _ in range(3):
        try:
            values = (await (await (await opened.snapshot()).array("x")).read()).tolist()
        except TStoreError:
            continue
    assert values in ([], expected(14))
    await check_resumed(store.url, 14, range(8, 15), (6,))


async def test_a_store_that_has_read_all_records_reads_trees_from_roots() -> None:
    """The root that has the lost changes is collected once no living version needs it."""
    store = await filled(6)
    await lose(store, 2)
    assert (await (await tstore.open(store.url)).repair(void=[2])).ok
    store = await tstore.open(store.url)
    for value in range(8, 18):
        await commit(store, value)
    await store.collect(Keep(last=1))
    assert root_key(4) not in await store.log.storage.list("roots/")
    store = await tstore.open(store.url)
    assert (await store.repair()).ok
    await damage(store.log.storage, commit_key(17))
    assert [one.version for one in (await (await tstore.open(store.url)).repair()).damaged] == [17]
    await damage(store.log.storage, commit_key(17))  # back
    assert len([one async for one in store.history()]) == 17
    assert (await (await (await store.snapshot()).array("x")).read()).tolist() == expected(17, 7)


async def test_a_root_that_a_voided_collection_did_not_delete_is_kept() -> None:
    """Only it has the changes of a lost record, and the versions that need it are alive again."""
    store = await filled(6)
    await lose(store, 3)
    assert (await (await tstore.open(store.url)).repair(void=[3])).ok
    async with (await tstore.open(store.url)).transaction() as tx:  # its pack is deleted, so it stays expired
        await (await tx.create_array("big", (4000,), "f8")).write(1)
    async with (await tstore.open(store.url)).transaction() as tx:
        await tx.delete("big")
    for value in range(10, 18):
        await commit(await tstore.open(store.url), value)
    faults = Faults(store.log.storage)
    faults.fail("delete", root_key(4))
    with pytest.raises(Unavailable, match="Version 18, the commit of this gc, is durable"):
        await tstore.Store(faults, store.marker, "a").collect(Keep(last=1))
    assert (await (await tstore.open(store.url)).repair(void_intact=[18])).expired == [8]
    for keep in (None, Keep(tags=("t5",))):
        await (await tstore.open(store.url)).collect(keep)
        assert await read(store.url, "t5") == expected(5)
        assert (await (await tstore.open(store.url)).verify()).faults == []


async def test_without_its_root_a_lost_record_is_an_error_and_can_be_voided_again() -> None:
    store = await filled(11)
    await lose(store, 2)
    assert (await (await tstore.open(store.url)).repair(void=[2])).ok
    await store.log.storage.delete(root_key(8))
    await damage(store.log.storage, root_key(4))
    with pytest.raises(Corrupt, match=f"{root_key(4)}, .* changes of a lost record"):
        await read(store.url)
    store = await tstore.open(store.url)
    assert any(root_key(4) in fault and "only" in fault.lower() for fault in (await store.verify()).faults)
    assert [one.version for one in (await store.repair()).damaged] == [2]
    await store.repair(void=[2])
    assert await read(store.url) == expected(11, 2)
    assert (await (await tstore.open(store.url)).verify()).faults == []


async def test_a_lost_root_that_only_older_living_versions_need_is_listed() -> None:
    """The head has another root with the changes of the lost record, and keeps them."""
    store = await filled(18)
    await lose(store, 6)
    assert (await (await tstore.open(store.url)).repair(void=[6])).ok
    root = await store.log.storage.get(root_key(8))
    await damage(store.log.storage, root_key(8))
    assert await read(store.url) == expected(18)
    [damaged] = (await (await tstore.open(store.url)).repair()).damaged
    assert damaged.version == 6
    assert root_key(8) in damaged.reason
    assert "versions from 16 on keep its changes" in damaged.reason
    await store.log.storage.replace(root_key(8), root)
    assert (await (await tstore.open(store.url)).repair()).damaged == []
    await damage(store.log.storage, root_key(8))
    assert (await (await tstore.open(store.url)).repair(void=[6])).ok
    assert await read(store.url) == expected(18)
    assert await read(store.url, 10) == expected(10, 6)
    assert (await (await tstore.open(store.url)).verify()).faults == []


@pytest.mark.parametrize("with_root", [True, False])
async def test_what_a_root_had_for_a_lost_record_is_lost_with_it(with_root: bool) -> None:
    """The root of version 4 has the changes of version 2; then 4 and 5 are lost, perhaps with that root."""
    store = await filled(14)
    await lose(store, 2)
    assert (await (await tstore.open(store.url)).repair(void=[2])).ok
    await lose(store, 4, 5)
    if not with_root:
        await store.log.storage.delete(root_key(4))
    report = await (await tstore.open(store.url)).repair()
    assert [one.version for one in report.damaged if not one.record_intact] == [4, 5]
    report = await (await tstore.open(store.url)).repair(void=[4, 5])
    assert report.ok == with_root
    if not with_root:
        assert [one.version for one in report.damaged if one.version not in report.voided] == [2]
        assert (await (await tstore.open(store.url)).repair(void=[2])).ok
    assert await read(store.url, 3) == expected(3, 2)
    assert await read(store.url) == expected(14, *() if with_root else (2, 4, 5))
    assert (await (await tstore.open(store.url)).verify()).faults == []


async def test_a_collection_keeps_the_roots_with_lost_changes_below_a_damaged_root() -> None:
    store = await filled(18)
    await lose(store, 2)
    await (await tstore.open(store.url)).repair(void=[2])
    await damage(store.log.storage, root_key(16))
    store = await tstore.open(store.url)
    assert (await store.collect(Keep(last=1), abandoned=timedelta(0))).versions
    assert await read(store.url) == expected(18)
    await store.log.storage.delete(root_key(16))  # as `verify` advises
    store = await tstore.open(store.url)
    await commit(store, 19)
    await store.collect(Keep(last=1), abandoned=timedelta(0))
    assert await read(store.url) == expected(19)
    assert (await (await tstore.open(store.url)).verify()).faults == []


async def test_a_version_whose_changes_a_needed_root_has_is_not_voided() -> None:
    store = await filled(22)
    await lose(store, 6)
    await (await tstore.open(store.url)).repair(void=[6])
    before = {key: await store.log.storage.get(key) for key in await store.log.storage.list("")}
    for version in (5, 7, 8):
        with pytest.raises(InvalidArgument, match=f"version {version} can't be voided, .*{root_key(8)}"):
            await (await tstore.open(store.url)).repair(void_intact=[version])
    assert {key: await store.log.storage.get(key) for key in await store.log.storage.list("")} == before
    await (await tstore.open(store.url)).repair(void_intact=[22])
    assert await read(store.url) == expected(21)
    await (await tstore.open(store.url)).collect(Keep(last=1))
    assert await read(store.url) == expected(21)


@pytest.mark.parametrize(("collected", "paged"), [(False, False), (True, False), (True, True)])
async def test_a_collection_keeps_what_a_lost_record_wrote(
    collected: bool, paged: bool, thresholds: Thresholds
) -> None:
    """No record names its transaction any more; if its manifest is in pages, the root refers to that."""
    if paged:
        thresholds(PAGE_BYTES=500, SHORT_MANIFEST=500)
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    values = np.arange(30000.0)
    await tstore.save(store, {"w": values, **{f"many/{i}": np.arange(200.0) for i in range(200)}}, 1)
    for version in range(2, 12):
        async with store.transaction(tag="old" if version == 9 else None) as tx:
            await (await tx.array("w"))[version : version + 1].write(np.array([-1.0]))
    if collected:
        await store.collect(Keep(tags=("old",)), abandoned=timedelta(0))
    await lose(store, 1)
    resting = [one.version for one in (await (await tstore.open(store.url)).repair(void=[1])).damaged[1:]]
    assert resting == ([] if collected else [2, 3])
    if resting:
        assert (await (await tstore.open(store.url)).repair(void_intact=resting)).ok
    copied = f"memory://{uuid.uuid4()}"
    served = f"memory://{uuid.uuid4()}"
    await tstore.copy(store.url, copied)
    async with Server(served, access=everybody()) as server:
        await tstore.copy(store.url, server.url, storage_options={"token": ADMIN})
    for url in (store.url, copied, served):
        store = await tstore.open(url)
        for _ in range(2):
            await store.collect(Keep(tags=("old",)), abandoned=timedelta(0))
            async with store.transaction() as tx:
                await tx.create_group(f"g{uuid.uuid4()}")
        assert (await (await tstore.open(url)).verify()).faults == []
        for at in (9, None):
            w = await (await (await (await tstore.open(url)).snapshot(at)).array("w")).read()
            last = at or 11
            assert np.array_equal(w, np.where((np.arange(30000) >= 2) & (np.arange(30000) <= last), -1, values))
    single = f"memory://{uuid.uuid4()}"
    await tstore.copy(store.url, single, at="old")
    w = await (await (await (await tstore.open(single)).snapshot()).array("w")).read()
    assert np.array_equal(w, np.where((np.arange(30000) >= 2) & (np.arange(30000) <= 9), -1, values))


async def test_a_copy_to_a_server_has_the_root_that_alone_has_the_changes_of_a_lost_record() -> None:
    """The server can't derive it: a collection has deleted the one that the void record names."""
    store = await filled(11)
    await lose(store, 6)
    store = await tstore.open(store.url)
    await store.repair(void=[6])
    for value in range(13, 19):
        await commit(store, value)
    await store.collect(Keep(last=1), abandoned=timedelta(0))
    assert await store.log.storage.list("roots/") == [root_key(16)]
    served = f"memory://{uuid.uuid4()}"
    async with Server(served, access=everybody()) as server:
        await tstore.copy(store.url, server.url, storage_options={"token": ADMIN})
    assert await read(served) == await read(store.url)
    assert (await (await tstore.open(served)).verify()).faults == []


async def test_a_copy_that_may_not_bring_the_root_with_lost_changes_is_denied() -> None:
    """A copy that was killed has left all records, but no root; one with another token completes it."""
    store = await filled(11)
    await lose(store, 6)
    await (await tstore.open(store.url)).repair(void=[6])
    served = f"memory://{uuid.uuid4()}"
    await tstore.copy(store.url, served)
    for version in (8, 12):
        await (await tstore.open(served)).log.storage.delete(root_key(version))
    async with Server(served, access=everybody()) as server:
        with pytest.raises(Denied, match=f"the copy lacks {root_key(8)}, .* scope admin"):
            await tstore.copy(store.url, server.url, storage_options={"token": WRITE})
        await tstore.copy(store.url, server.url, storage_options={"token": ADMIN})
    assert await read(served) == await read(store.url)
    assert (await (await tstore.open(served)).verify()).faults == []


async def test_a_collection_with_the_state_of_a_lost_version_expires() -> None:
    """Root 4, at the collection, has the changes of the lost records; their data goes with the next collection."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for step in (1, 2, 3):
        await tstore.save(store, {"w": np.full(4000, step)}, step)
    assert (await store.collect(Keep(last=1))).version == 4
    await tstore.save(store, {"w": np.full(4000, 5)}, 5)
    await lose(store, 1, 2, 3)
    store = await tstore.open(store.url)
    assert (await store.repair(void=[1, 2, 3])).ok
    assert ((await tstore.restore(store, at=4))["w"] == 3).all()
    await tstore.save(store, {"w": np.full(4000, 6)}, 6)
    await store.collect(Keep(last=1), abandoned=timedelta(0))
    store = await tstore.open(store.url)
    with pytest.raises(SnapshotExpired, match="version 4 "):
        await tstore.restore(store, at=4)


async def test_versions_that_a_lost_collection_expired_with_their_root_are_not_damaged() -> None:
    """Version 8 can't be read without its root, which that collection deleted, after the loss of version 6."""
    store = await filled(11)
    await lose(store, 6)
    store = await tstore.open(store.url)
    await store.repair(void=[6])
    for step in range(13, 20):
        await tstore.save(store, {"w": np.full(4, step)}, step)
    collection = (await store.collect(Keep(last=1), abandoned=timedelta(0))).version
    assert collection is not None
    assert root_key(8) not in await store.log.storage.list("roots/")
    await tstore.save(store, {"w": np.full(4, 20)}, 20)
    await lose(store, collection)
    store = await tstore.open(store.url)
    assert [one.version for one in (await store.repair()).damaged] == [collection]
    assert {8, 9, 10, 11} <= set((await store.repair(void=[collection])).expired)
    store = await tstore.open(store.url)
    assert (await store.verify()).faults == []
    assert (await tstore.restore(store))["w"].tolist() == [20] * 4


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", range(0, 24, 2))
@pytest.mark.parametrize("case", ["lost", "archive", "fence"])
async def test_a_repair_of_old_records_that_is_killed_is_finished_by_another(
    case: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await filled(22)
    void, intact = ([6], []) if case == "lost" else ([5], []) if case == "archive" else ([], [6])
    if case == "lost":
        await lose(store, 6)
    elif case == "archive":
        for _ in range(2):
            await store.collect(None)
        await damage(store.log.storage, archive_key(8))
    newest, calls = (await store.snapshot()).version, iter(range(1000))

    def killing(name: str) -> Any:
        real = getattr(MemoryStorage, name)

        async def call(self: Any, *arguments: Any) -> Any:
            if next(calls) == step:
                raise Killed
            return await real(self, *arguments)

        return call

    with monkeypatch.context() as patched:
        for name in ("create", "replace", "delete", "flush"):
            patched.setattr(MemoryStorage, name, killing(name))
        with contextlib.suppress(Killed):
            await (await tstore.open(store.url)).repair(void, void_intact=intact)
    assert (await (await tstore.open(store.url)).repair(void, void_intact=intact)).ok
    if case == "fence":
        assert await read(store.url) == expected(newest, 6)
        assert (await (await tstore.open(store.url)).verify()).faults == []
    else:
        assert await read(store.url, 22) == expected(22)
        assert (await (await tstore.open(store.url)).verify()).faults == []


# ---- lost and damaged archives


@pytest.mark.parametrize("end", [16, 24])
@pytest.mark.parametrize("deleted", [False, True])
async def test_a_lost_archive_is_voided_at_once(deleted: bool, end: int) -> None:
    """The newest root continues that of version 16, which is in one of the archives."""
    store = await filled(46)
    for _ in range(2):
        await store.collect(None)
    storage = store.log.storage
    assert await storage.list("archives/") == [archive_key(one) for one in (8, 16, 24, 32, 40)]
    if deleted:
        await storage.delete(archive_key(end))
    else:
        await damage(storage, archive_key(end))
    before = {version: await outcome(store.url, version) for version in range(1, 47)}
    assert before[46] == (expected(46) if end == 24 else None)
    report = await (await tstore.open(store.url)).repair(void=[end - 6])
    assert report.voided == list(range(end - 7, end + 1))
    assert report.ok
    for version, values in before.items():
        assert values is None or await read(store.url, version) == values
    await check_resumed(store.url, 46, range(end + 1, 47), tuple(range(end - 7, end + 1)))


async def test_an_open_store_notices_that_an_archive_in_memory_was_voided() -> None:
    store = await filled(22)
    for _ in range(2):
        await store.collect(None)
    opened = await tstore.open(store.url)
    assert await (await (await opened.snapshot(7)).array("x")).read() is not None
    await damage(store.log.storage, archive_key(8))
    assert (await (await tstore.open(store.url)).repair(void=[7])).ok
    for _ in range(2):
        with pytest.raises(TimelineChanged, match="a repair voided version 4 while the store was open"):
            await opened.snapshot()


@pytest.mark.parametrize("deleted", [False, True])
def test_the_commands_summarize_a_lost_archive(deleted: bool, tmp_path: Path, capsys: Any) -> None:
    async def fill() -> None:
        store = await tstore.open(tmp_path / "store")
        for value in range(1, 47):
            await commit(store, value)
        for _ in range(2):
            await store.collect(None)

    asyncio.run(fill())
    url = str(tmp_path / "store")
    archive = tmp_path / "store" / archive_key(16)
    if deleted:
        archive.unlink()
    else:
        archive.write_bytes(archive.read_bytes()[:-1])
    assert main(["verify", url]) == 1
    assert len(capsys.readouterr().out.splitlines()) <= 4
    assert main(["repair", url]) == 1
    damaged = [line for line in capsys.readouterr().out.splitlines() if line.startswith("version")]
    assert [line.partition(" (damaged): ")[0] for line in damaged] == ["versions 9-16"]
    assert all("keep its changes if it is voided" in line for line in damaged)
    assert main(["repair", url, "--json"]) == 1
    assert [one["version"] for one in json.loads(capsys.readouterr().out)["damaged"]] == list(range(9, 17))
    assert main(["repair", url]) == 1
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command == ["tstore", "repair", url, "--void", "9"]
    assert main(command[1:]) == 0
    assert "voided 9-16; recorded as version 47" in capsys.readouterr().out
    assert main(["verify", url]) == 0


@pytest.mark.parametrize("lost", [(), (6,), (2, 8), (2, 3, 4, 5, 6)])
async def test_of_a_damaged_archive_only_those_records_are_lost_that_have_no_objects(
    lost: tuple[int, ...],
) -> None:
    """As after a collection that was killed while it deleted the others, which it had archived."""
    store = await filled(22)
    await store.collect(None)
    await damage(store.log.storage, archive_key(8))
    for version in lost:
        await store.log.storage.delete(commit_key(version))
    report = await (await tstore.open(store.url)).repair(void=[5])
    assert report.ok
    assert report.voided == list(lost)
    store = await tstore.open(store.url)
    assert (await store.verify()).faults == []
    assert await read(store.url, 22) == expected(22)
    assert (await store.tags()).keys() == {f"t{value}" for value in range(1, 23) if value not in lost}
    assert await read(store.url, 7) == expected(7, *[version for version in lost if version > 4])
    await store.collect(None)
    assert commit_key(1) not in await store.log.storage.list("commits/")
    assert (await (await tstore.open(store.url)).verify()).faults == []


@pytest.mark.parametrize("latency", [False, True])
async def test_an_open_store_goes_on_after_a_damaged_archive_was_deleted(
    latency: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its records have objects of their own; few archives are in memory."""
    tuning = MemoryStorage.tuning
    monkeypatch.setattr(MemoryStorage, "tuning", tuning._replace(streams=tuning.streams + latency))
    store = await filled(38)
    await store.collect(None)
    with override_constants(CACHED_RECORDS=4):
        opened = [await tstore.open(store.url) for _ in range(4)]
    for one in opened:
        for version in range(1, 39):
            await one.snapshot(version)
    await store.log.storage.delete(archive_key(8))
    assert (await opened[0].verify()).ok
    assert len([commit async for commit in opened[1].history()]) == 38
    assert (await (await (await opened[2].snapshot(6)).array("x")).read()).tolist() == expected(6)
    await opened[3].collect(None)
    await commit(opened[3], 39)
    assert await read(store.url) == expected(39)


# ---- old intact records


async def test_an_old_intact_version_is_voided_by_an_archive() -> None:
    """It rests on a lost one, for which no root vouches any more."""
    store = await filled(5)
    async with store.transaction() as tx:
        await (await tx.create_array("b", (4,), "i8", (2,))).write(6)
    await commit(store, 7)
    async with store.transaction() as tx:
        await (await tx.array("b"))[0:1].write(np.array([8]))
    for value in range(9, 30):
        await commit(store, value)
    storage = store.log.storage
    for key in await storage.list("roots/"):
        await storage.delete(key)
    await lose(store, 6)
    report = await (await tstore.open(store.url)).repair(void=[6])
    assert [one.version for one in report.damaged] == [6, 8]
    report = await (await tstore.open(store.url)).repair(void_intact=[8])
    assert report.ok
    assert await storage.list("archives/") == [archive_key(8)]
    assert await read(store.url) == expected(29, 6, 8)
    for _ in range(2):
        store = await tstore.open(store.url)
        await store.collect(None)
        assert (await store.verify()).faults == []
    assert commit_key(8) not in await storage.list("commits/")
    assert await read(store.url) == expected(29, 6, 8)


async def test_an_archived_record_that_is_intact_is_voided_in_its_archive() -> None:
    store = await filled(29)
    for _ in range(2):
        await store.collect(None)
    opened = await tstore.open(store.url)
    assert (await opened.snapshot(6)).version == 6
    with pytest.raises(InvalidArgument, match="version 6 is intact, so nothing was voided"):
        await store.repair(void=[6])
    assert (await store.repair(void_intact=[6])).voided == [6]
    with pytest.raises(TimelineChanged, match="a repair voided version"):
        await opened.snapshot()
    for _ in range(2):
        assert await read(store.url) == expected(29, 6)
        assert await read(store.url, 7) == expected(7, 6)
        assert await read(store.url, 5) == expected(5)
        store = await tstore.open(store.url)
        assert "t6" not in await store.tags()
        assert (await store.verify()).faults == []
        await store.collect(Keep(tags=("t5", "t7")))


async def test_a_collection_that_archives_first_prevents_the_void() -> None:
    store = await filled(22)
    faults = Faults(store.log.storage)
    gate = faults.hold("create", archive_key(8))
    task = asyncio.create_task(repair_store(faults, store.marker.log_id, [], [6]))
    await gate.reached()
    await (await tstore.open(store.url)).collect(None)
    gate.release()
    with pytest.raises(InvalidArgument, match="has archived the versions up to 8 meanwhile"):
        await task
    assert await read(store.url) == expected(22)
    store = await tstore.open(store.url)
    assert (await store.verify()).faults == []
    await store.collect(Keep(last=1))


async def test_a_void_record_whose_version_is_archived_meanwhile_is_not_in_force() -> None:
    store = await filled(7)
    faults = Faults(store.log.storage)
    gate = faults.hold("replace", commit_key(6))
    task = asyncio.create_task(repair_store(faults, store.marker.log_id, [], [6]))
    await gate.reached()
    for value in range(8, 15):
        await commit(store, value)
    await store.collect(None)
    gate.release()
    with pytest.raises(InvalidArgument, match="has archived version 6 meanwhile"):
        await task
    assert await read(store.url) == expected(14)
    assert (await (await tstore.open(store.url)).verify()).ok
