"""Damaged records: each is one fault of one version, and neither listed nor voided with it are the others."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.maintenance.test_repair import VALUES, check_works, damage
from tests.support.forging import place
from tstore import Keep
from tstore.cli import main
from tstore.core.format.layout import ROOT_EVERY, commit_key
from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.records import Part, Record
from tstore.core.log.reader import LogReader
from tstore.core.maintenance.damage import incomplete_versions
from tstore.core.storage.connect import connect
from tstore.core.storage.wrapper import Wrapper
from tstore.errors import Corrupt, InvalidArgument, SnapshotExpired


async def step(store: tstore.Store, number: int) -> None:
    await tstore.save(store, {"w": VALUES + number}, number)


async def filled(*steps: int) -> tstore.Store:
    """Return a store with these steps, none of which reuses data of another."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for number in steps:
        await step(store, number)
    return store


async def plain(store: tstore.Store) -> set[int]:
    await step(store, 3)
    return {3}


async def collection(store: tstore.Store) -> set[int]:
    await store.collect(Keep(last=2))
    return {0}


async def void(store: tstore.Store) -> set[int]:
    return await committed(store, Record("lost.void", 3, 1.0, void=True, durable=False))


async def parts(store: tstore.Store) -> set[int]:
    two = tuple(Part(name, 1.0, "", (name,), 0, {}) for name in ("a", "b"))
    return await committed(store, Record("both", 3, 1.0, tags=("a", "b"), parts=two))


async def committed(store: tstore.Store, record: Record) -> set[int]:
    await place(store.log.storage, 4, encode(record))
    return set()


async def voided_collection(store: tstore.Store) -> set[int]:
    """Leave as version 4 the void record of a repair, and as version 5 its commit, which is a collection."""
    await store.collect(Keep(last=2))
    await (await tstore.open(store.url)).repair(void_intact=[4])
    return {0}


KINDS = [(plain, 4), (collection, 4), (void, 4), (parts, 4), (voided_collection, 4), (voided_collection, 5)]


@pytest.mark.parametrize(("make", "bad"), KINDS)
async def test_a_damaged_record_is_one_fault_of_its_own_version(
    make: Callable[[tstore.Store], Awaitable[set[int]]], bad: int
) -> None:
    store = await filled(0, 1, 2)
    lost = await make(store)
    expired = [1] if lost == {0} and (make, bad) != (voided_collection, 4) else []
    steps = sorted({0, 1, 2, 4, 5, 6} - lost)
    store = await tstore.open(store.url)
    for number in (4, 5, 6):
        await step(store, number)
    before = await damage(store, bad)
    await damage(store, bad, before[:40] + bytes([before[40] ^ 1]) + before[41:])
    store = await tstore.open(store.url)
    assert [(one.version, one.record_intact) for one in (await store.repair()).damaged] == [(bad, False)]
    verified = await store.verify()
    [fault] = verified.faults
    assert commit_key(bad) in fault
    assert verified.unchecked == expired
    assert verified.chunks == len(steps)
    report = await store.repair([bad])
    assert report.ok
    assert [one.version for one in report.damaged] == [bad]
    assert report.expired == expired
    store = await tstore.open(store.url)
    assert (await store.verify()).faults == []
    assert await tstore.steps(store) == steps
    for number in steps:
        assert np.array_equal((await tstore.restore(store, number))["w"], VALUES + number)
    if lost == {0}:
        with pytest.raises(SnapshotExpired):
            await store.snapshot(1)
    await check_works(store.url)


async def test_damaged_objects_are_listed_beside_a_damaged_collection() -> None:
    """Version 2 lacks a pack, which the collection may have deleted; version 3 can't have expired."""
    store = await filled(0, 1, 2)
    await store.collect(Keep(last=2))
    await step(store, 4)
    packs = [
        next(
            k
            for k in await store.log.storage.list(f"txn/{(await store.log.reader.record(v)).transaction}/")
            if "/pack-" in k
        )
        for v in (2, 3, 5)
    ]
    for pack in packs:
        await store.log.storage.delete(pack)
    await damage(store, 4)
    store = await tstore.open(store.url)
    assert [(one.version, one.record_intact) for one in (await store.repair()).damaged] == [
        (3, True),
        (4, False),
        (5, True),
    ]
    verified = await store.verify()
    assert verified.unchecked == [1, 2]
    report = await store.repair([4])
    assert not report.ok
    assert [one.version for one in report.damaged] == [3, 4, 5]
    assert report.expired == [1, 2]


async def test_one_of_two_damaged_records_is_not_voided_alone() -> None:
    store = await filled(0, 1, 2, 3)
    for version in (2, 3):
        await damage(store, version)
    store = await tstore.open(store.url)
    before = await store.log.storage.list("")
    with pytest.raises(InvalidArgument, match="nothing was voided; restore it from a copy, or void 3 too"):
        await store.repair([2])
    assert await store.log.storage.list("") == before
    assert (await store.repair([2, 3])).ok
    await check_works(store.url)


@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize(("deleted", "damaged"), [((1,), (2,)), ((2, 4), ()), ((1, 4), (3, 5))])
async def test_damage_above_a_gap_is_listed(
    deleted: tuple[int, ...], damaged: tuple[int, ...], hint: bool
) -> None:
    """A search for the newest version ends at the gap, but a repair has to void what is lost above it too."""
    store = await filled(0, 1, 2, 3, 4, 5)
    for version in deleted:
        await store.log.storage.delete(commit_key(version))
    for version in damaged:
        await damage(store, version)
    if not hint:
        await store.log.storage.delete("latest")
    store = await tstore.open(store.url)
    lost = sorted({*deleted, *damaged})
    assert [(one.version, one.record_intact) for one in (await store.repair()).damaged] == [
        (version, False) for version in lost
    ]
    before = await store.log.storage.list("")
    with pytest.raises(InvalidArgument, match="nothing was voided"):
        await store.repair(lost[:1])
    assert await store.log.storage.list("") == before
    assert (await store.repair(lost)).ok
    assert (await (await tstore.open(store.url)).verify()).faults == []
    await check_works(store.url)


async def test_verify_checks_what_a_later_root_can_reach() -> None:
    """Versions between the damaged record and the root can't be built; the chunks of version 5 are in the root."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction(durability="none") as tx:
        await tx.create_array("w", (64000,), "f8", (1000,))
    for i in range(ROOT_EVERY + 4):
        async with store.transaction(durability="none") as tx:
            await (await tx.array("w"))[1000 * i % 64000 : 1000 * i % 64000 + 1000].write(np.full(1000, i))
    transaction = (await store.log.reader.record(5)).transaction
    await damage(store, 5)
    store = await tstore.open(store.url)
    verified = await store.verify()
    assert (len(verified.faults), verified.unchecked) == (1, list(range(6, ROOT_EVERY)))
    storage = store.log.storage
    [pack] = [key for key in await storage.list(f"txn/{transaction}/") if "/pack-" in key]
    await storage.delete(pack)
    faults = (await (await tstore.open(store.url)).verify()).faults
    assert len(faults) == 2
    assert any(fault.startswith(f"version {ROOT_EVERY}: w, chunk (3,): ") for fault in faults)


def test_the_command_advises_to_void_the_damaged_collection_only(tmp_path: Path, capsys: Any) -> None:
    import tstore.sync

    url = str(tmp_path / "store")
    for number in range(3):
        tstore.sync.save(url, {"w": VALUES + number}, number)
    with tstore.sync.open(url) as store:
        store.collect(Keep(last=2))
    for number in range(4, 7):
        tstore.sync.save(url, {"w": VALUES + number}, number)
    record = Path(url, commit_key(4))
    record.write_bytes(record.read_bytes()[:-1] + bytes([record.read_bytes()[-1] ^ 1]))
    assert main(["verify", url]) == 1
    out = capsys.readouterr().out
    assert out.count(commit_key(4)) == 1
    assert "not checked completely, because the record of another version is damaged: 1\n" in out
    assert main(["repair", url]) == 1
    out = capsys.readouterr().out
    assert [line.partition(":")[0] for line in out.splitlines() if line.startswith("version")] == [
        "version 4 (damaged)"
    ]
    assert out.endswith(f"\ntstore repair {url} --void 4\n")
    assert main(["repair", url, "--void", "4"]) == 0
    assert "damaged)" not in capsys.readouterr().out
    assert tstore.sync.steps(url) == [1, 2, 4, 5, 6]
    assert main(["verify", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unchecked"] == []


@pytest.mark.parametrize(("length", "at"), [(400_000, 3_000_000), (1 << 20, 4_000_000), (9 << 17, 8 << 20)])
async def test_verify_names_the_damaged_block_of_a_chunk(length: int, at: int, tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "store")
    async with store.transaction() as tx:
        for name in "ab":
            await (await tx.create_array(name, (length,), "i8", (length,))).write(np.arange(length))
    [pack] = (tmp_path / "store").glob("txn/*/pack-*")
    data = bytearray(pack.read_bytes())
    data[at] ^= 1
    pack.write_bytes(data)
    store = await tstore.open(tmp_path / "store")
    [fault] = (await store.verify()).faults
    assert f"(in the block at byte {at >> 20 << 20} of the chunk)" in fault
    with pytest.raises(Corrupt, match=f"in the block at byte {at >> 20 << 20} of the chunk"):
        await (await (await store.snapshot()).array("a")).read()


async def test_verify_counts_the_chunks_that_it_read(tmp_path: Path) -> None:
    store = await tstore.open(tmp_path)
    for value in range(3):
        async with store.transaction() as tx:
            await (await tx.create_array(f"w{value}", (4, 1000), "f8", (1, 1000))).write(float(value))
    lost, damaged = [
        next((tmp_path / "txn" / (await store.log.reader.record(version)).transaction).iterdir())
        for version in (1, 2)
    ]
    lost.unlink()
    data = damaged.read_bytes()
    damaged.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    seen = []
    report = await (await tstore.open(tmp_path)).verify(seen.append)
    assert (report.chunks, report.bytes, len(report.faults)) == (8, 8 * 8000, 5)
    assert (seen[-1].chunks, seen[-1].bytes, seen[-1].total_chunks) == (8, 8 * 8000, 12)


async def test_missing_objects_are_named_with_what_to_do(tmp_path: Path) -> None:
    store = await tstore.open(tmp_path / "store")
    await tstore.save(store, {"w": VALUES}, 0)
    async with store.transaction() as tx:
        for i in range(150):
            await (await tx.create_array(f"many/{i}", (64,), "i1", (4,))).write(np.full(64, 1))
    await tstore.save(store, {"w": VALUES + 1}, 1)
    names = ["txn/*/pack-*", "txn/*/manifest-*", commit_key(2)]
    for name in names:
        objects = sorted((tmp_path / "store").glob(name), key=lambda path: path.stat().st_size)
        data = objects[-1].read_bytes()
        objects[-1].unlink()
        key = str(objects[-1].relative_to(tmp_path / "store"))
        [fault] = (await (await tstore.open(store.url)).verify()).faults
        assert f"{key} is missing" in fault
        assert "restore it from a copy" in fault
        [damaged] = (await (await tstore.open(store.url)).repair()).damaged
        assert f"{key} is missing" in damaged.reason
        objects[-1].write_bytes(data)


async def test_lost_objects_of_many_versions_are_looked_up_at_once(tmp_path: Path) -> None:
    class Counted(Wrapper):
        """Counts the calls for sizes."""

        lookups = 0

        async def sizes(self, keys: Iterable[str]) -> dict[str, int]:
            self.lookups += 1
            return await super().sizes(keys)

    store = await tstore.open(tmp_path)
    for value in range(130):
        async with store.transaction(durability="none") as tx:
            w = await (tx.array("w") if value else tx.create_array("w", (2, 1000), "f8", (1, 1000)))
            await w[value % 2 if value else slice(None)].write(float(value))
    for version in (20, 21, 100):  # each is needed by the next version too
        for pack in (tmp_path / "txn" / (await store.log.reader.record(version)).transaction).iterdir():
            pack.unlink()
    storage = Counted(connect(str(tmp_path)))
    assert await incomplete_versions(LogReader(storage), range(1, 131)) == [20, 21, 22, 100, 101]
    assert storage.lookups <= 3
