"""Roots of other histories are not trusted, and open stores and caches notice a restored backup."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import tstore
from tests.support.forging import forged
from tstore import Keep
from tstore.core.format.layout import commit_key, root_key
from tstore.core.format.objects.encoding import decode
from tstore.core.format.objects.records import Root
from tstore.core.log.records import VersionCache
from tstore.core.storage.base import Storage
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Durability
from tstore.core.storage.remote import RemoteStorage
from tstore.errors import Conflict, TimelineChanged
from tstore.lab.simulation.scenario import override_constants


async def write(store: tstore.Store, upto: int, offset: int) -> None:
    """Commit up to a version; version v sets element v % 10 of "w" to v + offset."""
    for version in range((await store.snapshot()).version + 1, upto + 1):
        async with store.transaction(durability="none") as tx:
            if version == 1:
                await (await tx.create_array("w", (10,), "int64", (2,))).write(0)
            await (await tx.array("w"))[version % 10].write(version + offset)


async def fill(url: str | Path, upto: int, offset: int = 0) -> None:
    async with await tstore.open(url) as store:
        await write(store, upto, offset)


async def state(store: tstore.Store, at: int | None = None) -> list[int]:
    values: list[int] = (await (await (await store.snapshot(at)).array("w")).read()).tolist()
    return values


def expected(upto: int, since: int, offset: int) -> list[int]:
    """Return the values that `fill` makes up to a version, if those after `since` have an offset."""
    values = [0] * 10
    for version in range(1, upto + 1):
        values[version % 10] = version + (offset if version > since else 0)
    return values


# ---- roots

OFTEN = 16


@pytest.fixture
def frequent_roots() -> Iterator[None]:
    """Make every 16th commit write a root, so that a history with several roots is short."""
    with override_constants(ROOT_EVERY=OFTEN):
        yield


async def test_a_root_of_another_history_is_not_trusted(frequent_roots: None, tmp_path: Path) -> None:
    """An incremental copy that died, or a restore of files, leaves `roots/` ahead of `commits/`."""
    await fill(tmp_path / "a", 12)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    await fill(tmp_path / "a", 22)
    shutil.copytree(tmp_path / "a/roots", tmp_path / "b/roots")
    await fill(tmp_path / "b", 22, offset=1000)
    for reader in (await tstore.open(tmp_path / "b", "r"), await tstore.open(tmp_path / "b")):
        assert await state(reader) == expected(22, 12, 1000)
        assert await state(reader, 16) == expected(16, 12, 1000)
    [fault] = (await reader.verify()).faults
    assert root_key(OFTEN) in fault
    assert "is not the root of" in fault
    assert "delete this object" in fault
    (tmp_path / "b" / root_key(OFTEN)).unlink()
    assert (await reader.verify()).ok
    assert await state(await tstore.open(tmp_path / "b", "r")) == expected(22, 12, 1000)


def flipped(data: bytes) -> bytes:
    return data[:50] + bytes([data[50] ^ 1]) + data[51:]


def unfit(data: bytes) -> bytes:
    root = decode(data, Root)
    return forged(replace(root, manifest=replace(root.manifest, number=root.manifest.number[:-8])))


def later(data: bytes) -> bytes:
    return forged(replace(decode(data, Root), version=2 * OFTEN))


@pytest.mark.parametrize("change", [flipped, unfit, later, lambda data: data[:-1], lambda _: b"0"])
async def test_a_damaged_root_stops_no_reader_and_no_commit(
    frequent_roots: None, change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    await fill(tmp_path, 22)
    path = tmp_path / root_key(OFTEN)
    path.write_bytes(change(path.read_bytes()))
    assert await state(await tstore.open(tmp_path, "r")) == expected(22, 22, 0)
    await fill(tmp_path, 34)
    assert await state(await tstore.open(tmp_path, "r")) == expected(34, 34, 0)
    [fault] = (await (await tstore.open(tmp_path, "r")).verify()).faults
    assert root_key(OFTEN) in fault
    assert "Readers ignore it; delete this object" in fault


async def test_verify_detects_a_root_with_the_wrong_tree(frequent_roots: None, tmp_path: Path) -> None:
    await fill(tmp_path, 36)
    path = tmp_path / root_key(OFTEN)
    right = decode(path.read_bytes(), Root)
    before = right.manifest
    for wrong, names in [
        (replace(right, tags={"t": 3}), "tag 't'"),
        (replace(right, manifest=replace(before, paths=("v",))), "v, w"),
        (replace(right, manifest=replace(before, checks=before.checks[:-1] + b"?")), "w"),
        (replace(right, manifest=replace(before, inline=(*before.inline[:-1], b"other"))), "w"),
    ]:
        path.write_bytes(forged(wrong))
        faults = (await (await tstore.open(tmp_path, "r")).verify()).faults
        [fault] = [f for f in faults if root_key(OFTEN) in f]
        assert f"differs from the records up to version 16 in {names};" in fault
    path.write_bytes(forged(right))
    assert (await (await tstore.open(tmp_path, "r")).verify()).ok


@pytest.mark.parametrize("replaces", [True, False])
async def test_roots_of_versions_that_expired_are_no_fault(
    frequent_roots: None, replaces: bool, tmp_path: Path
) -> None:
    """The manifests that the records refer to are deleted; they are too long to be inline."""
    store = await tstore.open(tmp_path)
    for step in range(22):
        async with store.transaction(tag=f"step/{step}", durability="none") as tx:
            if replaces:
                await tx.staging.replace_all(b"")
            w = await (tx.create_array("w", (600,), "int64", (1,)) if replaces or not step else tx.array("w"))
            await w.write(step)
    await store.collect(Keep(tags=("step/17",)))
    assert (await store.verify()).faults == []
    fresh = await tstore.open(tmp_path, "r")
    for step in (17, 21):
        assert (await (await (await fresh.snapshot(f"step/{step}")).array("w")).read() == step).all()


# ---- open stores and caches beside a restored backup


async def put_back(storage: Storage, backup: dict[str, bytes]) -> None:
    """Restore a backup at the store's URL, and delete everything that is newer."""
    for key in await storage.list(""):
        await storage.delete(key)
    for key, data in backup.items():
        await storage.create(key, data, Durability.NONE)


async def backed_up(storage: Storage) -> dict[str, bytes]:
    return {key: await storage.get(key) for key in await storage.list("")}


@pytest.fixture(params=["local", "server"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    """Return another storage of the same store, as another process has one."""
    name = str(uuid.uuid4())
    return lambda: tmp_path / "store" if request.param == "local" else RemoteStorage(MemoryStorage(name))


@pytest.mark.parametrize("since", [0, 1, 5, 9])
async def test_an_open_store_notices_that_a_backup_was_restored(connect: Callable[[], Any], since: int) -> None:
    """`since` is the number of commits since the backup, before the open store is used again."""
    other = await tstore.open(connect())
    await write(other, 5, 0)
    backup = await backed_up(other.log.storage)
    handle = await tstore.open(connect())
    await write(handle, 8, 0)
    late = handle.transaction()
    await (await late.array("w"))[0].write(-1)
    await put_back(other.log.storage, backup)
    if since:
        await fill(connect(), 5 + since, 1000)
    before = await backed_up(other.log.storage)
    for work in (handle.snapshot(), handle.snapshot(3), handle.tags(), write(handle, 20, 0), handle.outcome("t")):
        with pytest.raises(TimelineChanged, match="open it again"):
            await work
    with pytest.raises(TimelineChanged):
        await late.commit()
    after = await backed_up(other.log.storage)
    assert {key for key in after if key.startswith("commits/")} == {k for k in before if k.startswith("commits/")}
    fresh = await tstore.open(connect())
    assert await state(fresh) == expected(5 + since, 5, 1000)
    await write(fresh, 20, 1000)
    assert (await fresh.verify()).ok


async def test_a_damaged_newest_record_is_not_taken_for_another_history(connect: Callable[[], Any]) -> None:
    handle = await tstore.open(connect())
    await write(handle, 3, 0)
    record = await handle.log.storage.get(commit_key(3))
    await handle.log.storage.delete(commit_key(3))
    await handle.log.storage.create(commit_key(3), record[:-1] + b"?", Durability.NONE)
    with pytest.raises(tstore.errors.Corrupt, match=commit_key(3)):
        await handle.snapshot()


async def test_a_replaced_newest_record_is_noticed_though_it_was_evicted(connect: Callable[[], Any]) -> None:
    """Opening and the history read the newest record first, so it is the first to be evicted; its tree stays."""
    other = await tstore.open(connect())
    await write(other, 329, 0)
    backup = await backed_up(other.log.storage)
    await write(other, 330, 0)
    handle = await tstore.open(connect())
    assert await state(handle) == expected(330, 330, 0)
    assert len([c async for c in handle.history()]) == 330
    assert 330 not in handle.log.reader.records
    late = handle.transaction()
    await (await late.array("w"))[0].write(-1)
    await put_back(other.log.storage, backup)
    await fill(connect(), 330, 1000)
    await noticed(handle, late)
    assert await state(await tstore.open(connect())) == expected(330, 329, 1000)


async def noticed(handle: tstore.Store, *late: tstore.Transaction) -> None:
    for work in (*(tx.commit() for tx in late), handle.snapshot(), write(handle, 320, 0), handle.outcome("t")):
        with pytest.raises(TimelineChanged, match="open it again"):
            await work


async def open_at_the_newest(url: Any, store: tstore.Store) -> tstore.Store:
    await write(store, 13, 0)
    handle = await tstore.open(url)
    await handle.snapshot()
    return handle


async def open_at_an_older_version(url: Any, store: tstore.Store) -> tstore.Store:
    await write(store, 13, 0)
    handle = await tstore.open(url)
    await handle.snapshot(12)
    return handle


async def open_before_the_first_commit(url: Any, store: tstore.Store) -> tstore.Store:
    """It knows the records from a commit that they prevented."""
    handle = await tstore.open(url)
    async with handle.transaction() as tx:
        await tx.create_array("w", (10,), "int64", (2,))
        await write(store, 13, 0)
        with pytest.raises(Conflict):
            await tx.commit()
    return handle


async def open_long_before(url: Any, store: tstore.Store) -> tstore.Store:
    """It knows most records from a commit that they prevented."""
    await write(store, 2, 0)
    handle = await tstore.open(url)
    async with handle.transaction() as tx:
        await (await tx.array("w")).resize((5,))
        await write(store, 13, 0)
        with pytest.raises(Conflict):
            await tx.commit()
    return handle


OPENED = [open_at_the_newest, open_at_an_older_version, open_before_the_first_commit, open_long_before]
UPTO = [10, 13, 18]


@pytest.mark.parametrize("connect", ["local", "server"], indirect=True)
@pytest.mark.parametrize(
    ("opened", "upto", "evicted"),  # each two of them together
    [
        pytest.param(opened, upto, evicted, marks=() if evicted == ((at + number) % 2) else pytest.mark.deep)
        for at, opened in enumerate(OPENED)
        for number, upto in enumerate(UPTO)
        for evicted in (True, False)
    ],
)
async def test_a_replaced_store_is_noticed_whatever_was_read_of_it(
    frequent_roots: None, opened: Callable[..., Any], upto: int, evicted: bool, connect: Callable[[], Any]
) -> None:
    """Whatever was read of 13 versions; the backup is of version 10, and went on to another version."""
    other = await tstore.open(connect())
    handle = await opened(connect(), other)
    if evicted:
        await handle.snapshot(10)
        handle.log.reader.records._cached.drop_from(0)
    backup = {k: d for k, d in (await backed_up(other.log.storage)).items() if not k.startswith("commits/")}
    for version in range(1, 11):
        backup[commit_key(version)] = await other.log.storage.get(commit_key(version))
    await put_back(other.log.storage, backup)
    await fill(connect(), upto, 1000)
    await noticed(handle)


@pytest.mark.parametrize("upto", [22, 18])
async def test_a_cache_shows_nothing_that_a_restored_backup_lacks(
    frequent_roots: None, upto: int, connect: Callable[[], Any], tmp_path: Path
) -> None:
    await fill(connect(), 12)
    plain = await tstore.open(connect())
    backup = await backed_up(plain.log.storage)
    await fill(connect(), 22)
    for at in (None, 14, 16, 22):
        await state(await tstore.open(connect(), "r", cache=tmp_path / "cache"), at)
    await put_back(plain.log.storage, backup)
    reader = await tstore.open(connect(), "r", cache=tmp_path / "cache")
    assert (await reader.snapshot()).version == 12
    await fill(connect(), upto, 1000)
    reader = await tstore.open(connect(), "r", cache=tmp_path / "cache")
    assert await state(reader) == expected(upto, 12, 1000)
    for at in (14, 16, 17):
        assert await state(reader, at) == expected(at, 12, 1000)


# ---- many commits, many threads


async def test_a_store_serves_the_event_loops_of_several_threads(tmp_path: Path) -> None:
    await fill(tmp_path, 300)
    store = await tstore.open(tmp_path)
    barrier, failures = threading.Barrier(4), list[BaseException]()

    async def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(4):
            assert len([c async for c in store.history()]) >= 300
            for at in rng.integers(1, 300, 10).tolist():
                assert await state(store, at) == expected(at, 300, 0)
            async with store.transaction(durability="none") as tx:
                await tx.create_array(f"a{number}/{rng.integers(1 << 60)}", (1,), "int8", sparse=True)

    def thread(number: int) -> None:
        barrier.wait()
        try:
            asyncio.run(work(number))
        except (Exception, asyncio.CancelledError) as error:
            failures.append(error)

    threads = [threading.Thread(target=thread, args=(i,)) for i in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        await asyncio.to_thread(each.join)
    assert failures == []
    assert (await (await tstore.open(tmp_path, "r")).snapshot()).version == 316


def test_cached_records_are_shared_by_threads() -> None:
    recent: VersionCache[int] = VersionCache(4)
    failures = list[BaseException]()
    before = sys.getswitchinterval()

    def work(number: int) -> None:
        try:
            for i in range(20_000):
                version = (number * 7919 + i * 31) % 97
                recent.put(version, version)
                assert recent.get(version) in (version, None)
                assert all(0 <= v < 97 for v in recent.versions())
        except Exception as error:
            failures.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(before)
    assert failures == []
    recent.put(1, 1)
    assert len(recent.versions()) <= 4


async def test_a_reader_that_never_commits_keeps_its_trees_small(tmp_path: Path) -> None:
    reader, writer = await tstore.open(tmp_path), await tstore.open(tmp_path)
    most = 0
    for version in range(1, 260):
        await write(writer, version, 0)
        tables = (await reader.snapshot()).tree.nodes["w"].tables
        most = max(most, len(tables))
        assert sum(len(table.packs) for table in tables) <= 50, "overwritten chunks are released"
    assert most <= 35
    assert await state(reader) == expected(259, 259, 0)
    for at in (1, 40, 130, 200):
        assert await state(reader, at) == expected(at, 259, 0)


async def test_a_conflict_names_chunks_that_many_hosts_wrote_twice(tmp_path: Path) -> None:
    """In any order in which the fragments of the other hosts are merged."""
    store = await tstore.open(tmp_path)
    async with store.transaction() as tx:
        await tx.create_array("w", (40,), "int64", (1,))

    async def host(number: int) -> None:
        tx = store.transaction(name="n", host=number, hosts=40, attempt="a")
        await (await tx.array("w"))[number // 2 * 2].write(number)
        await tx.commit(20)

    done = await asyncio.gather(*[host(i) for i in range(40)], return_exceptions=True)
    errors = [e for e in done if isinstance(e, tstore.errors.Inconsistent)]
    assert errors
    assert errors[0].paths == ["w: chunks at [0:1], [2:3], [4:5], [6:7], [8:9]"]
    assert not any(isinstance(e, Conflict) for e in done)
