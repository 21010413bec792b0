"""Records at another number, of another store or of another history: whoever reads one notices."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import tstore
from tests.support.forging import placed_in
from tests.support.http_server import WRITE, client_of, everybody
from tstore.core.format.frame import Link, link_of, linked
from tstore.core.format.layout import ROOT_EVERY, archive_key, commit_key
from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.records import Record
from tstore.core.maintenance.archiving import archive_records
from tstore.errors import Corrupt, TStoreError
from tstore.lab.conformance.faults import open_faulty
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Server

Verb = Callable[[tstore.Store, Path], Awaitable[Any]]


async def filled(folder: Path, versions: int, tag: str = "v") -> tstore.Store:
    """Return a store at a version: versions of one tag each, after those that it has."""
    store = await tstore.open(folder)
    for version in range((await store.log.reader.newest()) + 1, versions + 1):
        async with store.transaction(tag=f"{tag}{version}", durability="none") as tx:
            await tx.create_group(f"{tag}/{version}", {"at": version})
    return store


def move(source: Path, number: int, target: Path, other: int) -> None:
    """Copy a record over another number, perhaps of another store."""
    data = (source / commit_key(number)).read_bytes()
    (target / commit_key(other)).unlink(missing_ok=True)
    (target / commit_key(other)).write_bytes(data)


def merge(source: Path, target: Path) -> None:
    """Copy every file that the target lacks, as `cp -rn` and `rsync --ignore-existing` do."""
    for path in source.rglob("*"):
        other = target / path.relative_to(source)
        if path.is_file() and not other.exists():
            other.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, other)


async def opened(store: tstore.Store, _: Path) -> None:
    await store.snapshot()


async def listed(store: tstore.Store, _: Path) -> None:
    [commit async for commit in store.history()]


async def collected(store: tstore.Store, _: Path) -> None:
    await store.collect(tstore.Keep(last=1))


async def copied(store: tstore.Store, folder: Path) -> None:
    await tstore.copy(store, folder / "copied")


async def committed(store: tstore.Store, _: Path) -> None:
    async with store.transaction():
        pass


async def served(store: tstore.Store, _: Path) -> None:
    async with Server(store.url) as server:
        await (await tstore.open(server.url)).snapshot()


VERBS: list[Verb] = [opened, listed, collected, copied, committed, served]


@pytest.fixture
async def ours(tmp_path: Path) -> Path:
    await (await filled(tmp_path / "ours", 6)).close()
    return tmp_path / "ours"


@pytest.fixture
async def theirs(tmp_path: Path) -> Path:
    await (await filled(tmp_path / "theirs", 6)).close()
    return tmp_path / "theirs"


async def check_noticed(folder: Path, version: int) -> None:
    """Check that every verb, `verify` and `repair` name a record."""
    for verb in VERBS:
        with pytest.raises(TStoreError, match=commit_key(version)):
            await verb(await tstore.open(folder), folder.parent)
    report = await (await tstore.open(folder)).verify()
    assert any(commit_key(version) in fault for fault in report.faults)
    damaged = (await (await tstore.open(folder)).repair()).damaged
    assert (version, False) in [(damage.version, damage.record_intact) for damage in damaged]


@pytest.mark.parametrize(("number", "over"), [(2, 3), (5, 6), (1, 6), (6, 2), (6, 7)])
async def test_a_record_at_another_number_is_noticed(number: int, over: int, ours: Path) -> None:
    move(ours, number, ours, over)
    await check_noticed(ours, over)


@pytest.mark.parametrize(("number", "at"), [(3, 3), (6, 6), (1, 1), (3, 7)])
async def test_a_record_of_another_store_is_noticed(number: int, at: int, ours: Path, theirs: Path) -> None:
    move(theirs, number, ours, at)
    await check_noticed(ours, at)


@pytest.mark.parametrize(
    ("common", "ahead"),
    [
        *((3, ahead) for ahead in range(3)),
        *((ROOT_EVERY + more, 1) for more in (-1, 0, 2)),
        (ROOT_EVERY, ROOT_EVERY),
    ],
)
async def test_merged_copies_are_noticed(common: int, ahead: int, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    await (await filled(ours, common)).close()
    shutil.copytree(ours, theirs)
    last = common + 1 + ahead
    await (await filled(ours, last, "a")).close()
    await (await filled(theirs, last + 3, "b")).close()
    merge(theirs, ours)
    await check_noticed(ours, last + 1)


async def test_copies_merged_below_the_newest_root_are_noticed(tmp_path: Path) -> None:
    """The newest root refers to an older one, of which the merged store has that of the other history."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with override_constants(ROOT_EVERY=8):
        await (await filled(ours, 4)).close()
        shutil.copytree(ours, theirs)
        await (await filled(ours, 10, "a")).close()
        await (await filled(theirs, 20, "b")).close()
        merge(theirs, ours)
        await check_noticed(ours, 11)


async def test_a_poll_notices_a_record_that_does_not_follow(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    await (await filled(ours, 3)).close()
    shutil.copytree(ours, theirs)
    store = await filled(ours, 5, "a")
    await store.snapshot()
    await (await filled(theirs, 6, "b")).close()
    move(theirs, 6, ours, 6)
    with pytest.raises(Corrupt, match=commit_key(6)):
        await store.snapshot()
    with pytest.raises(Corrupt, match=commit_key(6)):
        await committed(store, tmp_path)


@pytest.mark.parametrize("others", [1, 2, 6])
async def test_a_record_is_made_again_only_beyond_a_root(others: int, tmp_path: Path) -> None:
    """A writer that lost races for numbers creates the same bytes, with a link to an older record of the block."""
    last = ROOT_EVERY - 3
    await (await filled(tmp_path / "store", last)).close()
    store, faults = await open_faulty(tmp_path / "store")
    gate = faults.hold("create", commit_key(last + 1))
    commit = asyncio.create_task(committed(store, tmp_path))
    await gate.reached()
    await (await filled(tmp_path / "store", last + others, "others")).close()
    gate.release()
    await commit
    version = last + others + 1
    link = link_of((tmp_path / "store" / commit_key(version)).read_bytes())
    assert link.version == (last if version <= ROOT_EVERY else version - 1)
    assert (await (await tstore.open(tmp_path / "store")).verify()).ok


@pytest.mark.parametrize(("number", "over"), [(2, 3), (6, 2), (64, 5), (5, 64), (3, 65)])
async def test_a_record_out_of_place_can_be_voided(number: int, over: int, tmp_path: Path) -> None:
    """Later records may refer to the one that is lost."""
    await (await filled(tmp_path / "ours", ROOT_EVERY + 2)).close()
    move(tmp_path / "ours", number, tmp_path / "ours", over)
    store = await tstore.open(tmp_path / "ours")
    assert [damage.version for damage in (await store.repair()).damaged] == [over]
    assert (await store.repair([over])).ok
    store = await tstore.open(tmp_path / "ours")
    assert (await store.verify()).ok
    assert f"v{over}" not in await store.tags()
    await tstore.copy(store, tmp_path / "copy")
    assert (await (await tstore.open(tmp_path / "copy")).verify()).ok


async def test_the_rest_of_another_history_can_be_voided(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    await (await filled(ours, 3)).close()
    shutil.copytree(ours, theirs)
    await (await filled(ours, 5, "a")).close()
    await (await filled(theirs, 8, "b")).close()
    merge(theirs, ours)
    store = await tstore.open(ours)
    assert [damage.version for damage in (await store.repair()).damaged] == [6, 7, 8]
    assert (await store.repair([6, 7, 8])).ok
    store = await tstore.open(ours)
    assert (await store.verify()).ok
    assert set(await store.tags()) == {"v1", "v2", "v3", "a4", "a5"}


async def test_links_over_a_voided_record_stay_verifiable(ours: Path) -> None:
    store = await tstore.open(ours)
    await store.repair(void_intact=[4])
    await store.repair(void_intact=[3])
    assert (await (await tstore.open(ours)).verify()).ok
    data = (ours / commit_key(4)).read_bytes()
    (ours / commit_key(4)).unlink()
    (ours / commit_key(4)).write_bytes(linked(data, link_of(data)._replace(check=b"x" * 16)))
    assert not (await (await tstore.open(ours)).verify()).ok


@pytest.mark.parametrize("version", range(3, 9))
async def test_a_damaged_record_to_which_one_later_record_refers_can_be_voided(
    version: int, tmp_path: Path
) -> None:
    """That may be the last one of the same block."""
    with override_constants(ROOT_EVERY=4):
        store = await filled(tmp_path / "s", 9)
        await store.log.storage.replace(commit_key(version), b"garbage")
        assert (await (await tstore.open(tmp_path / "s")).repair([version])).ok
        assert (await (await tstore.open(tmp_path / "s")).verify()).faults == []


async def test_a_server_refuses_a_record_that_does_not_follow(ours: Path) -> None:
    right = link_of(placed_in(ours, 7, encode(Record("a", 6, 1.0))))
    data = encode(Record("a", 6, 1.0))
    async with (
        Server(ours, access=everybody()) as server,
        client_of(server, WRITE) as client,
    ):
        for wrong in (
            Link(),
            right._replace(log_id=b"x" * 16),
            right._replace(check=b"x" * 16),
            right._replace(version=5),
            right._replace(version=7),
        ):
            response = await client("PUT", f"/{commit_key(7)}", linked(data, wrong), If_None_Match="*")
            assert response.status == 422
        assert (await client.create(f"/{commit_key(7)}", data)).status == 201
    assert (await (await tstore.open(ours)).verify()).ok


async def test_a_copy_of_one_version_has_the_records_of_its_source(ours: Path, theirs: Path) -> None:
    one, again = ours.parent / "one", ours.parent / "again"
    await tstore.copy(ours, one, at=4)
    await tstore.copy(one, again)
    await tstore.copy(one, ours.parent / "third", at=4)
    for folder in (one, again, ours.parent / "third"):
        assert (await (await tstore.open(folder)).verify()).ok
        await committed(await tstore.open(folder), folder)
    move(ours, 6, one, 6)
    with pytest.raises(Corrupt, match=commit_key(6)):
        await listed(await tstore.open(one), one)


async def test_the_only_record_of_another_store_is_noticed(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        await (await filled(tmp_path / name, 1)).close()
    move(tmp_path / "theirs", 1, tmp_path / "ours", 1)
    await check_noticed(tmp_path / "ours", 1)


async def test_a_record_of_another_block_is_noticed_by_itself(tmp_path: Path) -> None:
    """Whoever opens the store reads no record of that block."""
    await (await filled(tmp_path / "ours", ROOT_EVERY + 2)).close()
    move(tmp_path / "ours", 3, tmp_path / "ours", ROOT_EVERY + 2)
    await check_noticed(tmp_path / "ours", ROOT_EVERY + 2)


async def test_records_out_of_place_are_not_archived(tmp_path: Path) -> None:
    with override_constants(ARCHIVE_EVERY=4, ROOT_EVERY=4):
        store = await filled(tmp_path / "ours", 20)
        move(tmp_path / "ours", 6, tmp_path / "ours", 7)
        await archive_records(store.log.reader, 20, range(1, 21))
        ends = [archive_key(end) for end in (4, 8, 12, 16)]
        assert list(await store.log.storage.sizes(ends)) == [ends[0], *ends[2:]]
