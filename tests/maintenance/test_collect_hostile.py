"""Garbage collection with foreign files, forged records and dead gcs: it deletes nothing else."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.collisions import long_walks
from tests.support.forging import forged, place
from tests.support.fuzzing import bounded_time
from tstore import Keep
from tstore.core.format.layout import commit_key, owner_of
from tstore.core.format.objects.records import Collection, LivingVersion, Record
from tstore.errors import Conflict, Corrupt, InvalidArgument, Unavailable
from tstore.lab.conformance.faults import Faults, open_faulty
from tstore.lab.simulation.scenario import override_constants

NOW = timedelta(0)


def tree_of(step: int) -> dict[str, Any]:
    return {"w": np.random.default_rng(step).random(2000)}


async def saved(url: str, *steps: int) -> tstore.Store:
    store = await tstore.open(url)
    for step in steps:
        await tstore.save(store, tree_of(step), step)
    return store


async def check_step(store: tstore.Store, step: int) -> None:
    assert np.array_equal((await tstore.restore(store, step))["w"], tree_of(step)["w"])


async def forge(store: tstore.Store, record: Record) -> None:
    """Create a record with a valid checksum as the next commit, as another program could."""
    version = await store.log.reader.newest() + 1
    await place(store.log.storage, version, forged(record))


async def test_folders_of_other_programs_stay(tmp_path: Path) -> None:
    """One has a name that is invalid in a URL; the remains of a transaction beside them are deleted."""
    store = await saved(str(tmp_path), 0)
    tx = store.transaction()
    await (await tx.create_array("x", (2000,), "f8", (2000,))).write(np.ones(2000))  # then its process dies
    left = next(path for path in (tmp_path / "txn").iterdir() if path.name == tx.id)
    foreign = [tmp_path / "txn/mine/notes.txt", tmp_path / "txn/my notes/a", tmp_path / "txn/caf\udce9/pack-0"]
    for path in foreign:
        path.parent.mkdir()
        path.write_text("mine")
        os.utime(path, (0, 0))
    report = await store.collect(Keep(last=1), abandoned=NOW)
    assert report.abandoned == [tx.id]
    assert not left.exists()
    assert [path.read_text() for path in foreign] == ["mine"] * 3
    assert (await store.verify()).foreign == ["txn/caf\\udce9/pack-0", "txn/mine/notes.txt", "txn/my notes/a"]
    await check_step(store, 0)


@pytest.mark.parametrize("kind", ["local", "memory"])
async def test_a_forged_gc_makes_no_later_one_delete_living_data(kind: str, tmp_path: Path) -> None:
    store = await saved(str(tmp_path / "s") if kind == "local" else f"memory://{uuid.uuid4()}", 0, 1, 2)
    ids = [(await store.log.reader.record(v)).transaction for v in (1, 2, 3)]
    entries = tuple(LivingVersion(v, ids[v - 1], 1.0, (f"step/{v - 1}",), True, {}, ()) for v in (1, 2, 3))
    living = [key for key in await store.log.storage.list("txn/") if "/pack-" in key]
    names = ("tstore.json", "latest", commit_key(1), "", "..", "../x", "txn", "txn//x", "a\0b", *living)
    await forge(store, Record("forged", 3, 1.0, collection=Collection(entries, (), {}, ("", "..", "x/y"), names)))
    store = await tstore.open(store.url)
    with pytest.raises(Corrupt, match=commit_key(4)):
        await store.collect()
    await (await tstore.open(store.url)).repair([4])
    store = await tstore.open(store.url)
    report = await store.collect()
    assert (report.objects, report.bytes) == (0, 0)
    await tstore.save(store, tree_of(3), 3)
    await store.collect(Keep(last=2))
    assert await tstore.steps(store) == [2, 3]
    assert (await store.verify()).ok
    for step in (2, 3):
        await check_step(store, step)


@pytest.mark.parametrize("whole", [False, True])
async def test_a_forged_gc_condemns_what_living_versions_need(whole: bool) -> None:
    """Its record is valid. It names data of step 0 that step 1 needs, and the pack of a pending transaction."""
    store = await saved(f"memory://{uuid.uuid4()}", 0)
    await tstore.save(store, tree_of(0) | {"x": np.ones(2000)}, 1)  # reuses the pack of step 0
    await store.collect(Keep(last=1))
    tx = store.transaction()
    await (await tx.create_array("y", (2000,), "f8", (2000,))).write(np.ones(2000))
    own = await store.log.storage.list(f"txn/{tx.id}/")
    assert len(own) == 1
    gc = await store.log.reader.collection(3)
    assert gc is not None
    [owner], shared = {owner_of(key) for key in gc.alive[0].dependencies}, gc.alive[0].dependencies
    forgery = Collection(gc.alive, (), {}, (owner,) if whole else (), tuple(own) if whole else (*own, *shared))
    await forge(store, Record("forged", 3, 1.0, collected=3, collection=forgery))
    assert await tx.commit() == 5
    for _ in range(2):
        store = await tstore.open(store.url)
        await store.collect(abandoned=NOW)
        assert np.array_equal((await tstore.restore(store, 1))["w"], tree_of(0)["w"])
        assert (await (await (await store.snapshot()).array("y")).read()).sum() == 2000
        assert (await store.verify()).faults == []


@pytest.mark.parametrize(
    "record",
    [
        Record("", 1, 1.0),
        Record("../../..", 1, 1.0, replaces=True),
        Record("a/b", 1, 1.0, reused=("x", "", "/", "txn/../y", "txn//")),
        Record("t", 1, float("nan"), reused=("commits/00000000000000000001", "tstore.json")),
        Record("t", 1, -1e300, message="\0", tags=("", "\n", "step/", "step/x"), deleted=("..",)),
        Record("t", 1, 1e300, metadata={"step": None, "x": [{"y": {}}]}, bytes_added=-1),
    ],
)
async def test_voided_absurd_records_block_no_gc(record: Record, tmp_path: Path) -> None:
    store = await saved(str(tmp_path), 0)
    await forge(store, record)
    with pytest.raises(Corrupt, match=commit_key(2)):
        await (await tstore.open(tmp_path)).collect(Keep(last=1), abandoned=NOW)
    await (await tstore.open(tmp_path)).repair([2])
    store = await tstore.open(tmp_path)
    for step in (1, 2, 3):
        await tstore.save(store, tree_of(step), step)
        await store.collect(Keep(last=1), abandoned=NOW)
        assert await tstore.steps(store) == [step]
        await check_step(store, step)
    assert (await (await tstore.open(tmp_path, "r")).verify()).ok


async def test_objects_condemned_by_a_dead_gc_are_deleted_only_after_its_record_is_durable() -> None:
    """The gc died between the creation of its record and the fsync of the folder."""
    store, faults = await open_faulty(f"memory://{uuid.uuid4()}")
    for step in range(3):
        await tstore.save(store, tree_of(step), step)
    faults.fail("delete", "txn/*/pack-*", nth=2)  # the first is the trial
    with pytest.raises(Unavailable):
        await store.collect(Keep(last=1))
    second = Faults(faults.inner)
    report = await (await tstore.open(second)).collect()
    assert report.version == 5
    assert report.objects > 0
    calls = [call for call in second.calls if not call.key.endswith("pack-trial")]
    created = next(i for i, call in enumerate(calls) if call.key == commit_key(5) and call.operation == "create")
    deleted = [i for i, call in enumerate(calls) if call.operation == "delete"]
    assert len(deleted) >= report.objects
    assert min(deleted) > created


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("damaged", [False, True])
async def test_a_transaction_whose_data_a_voided_gc_deleted_is_not_committed(
    *, damaged: bool, local: bool, tmp_path: Path
) -> None:
    """The list of what that gc condemned may be lost, so the transaction looks for its packs itself.

    In a folder, those are missing already when they are to be made durable.
    """
    store = await saved(str(tmp_path) if local else f"memory://{uuid.uuid4()}", 0, 1)
    lost, whole = store.transaction(), (await tstore.open(store.url)).transaction()
    x, y = [await tx.create_array(name, (2000,), "f8", (2000,)) for name, tx in (("x", lost), ("y", whole))]
    await x.write(np.ones(2000))
    report = await (await tstore.open(store.url)).collect(abandoned=NOW)
    assert report.abandoned == [lost.id]
    await y.write(np.ones(2000))
    if damaged:
        await store.log.storage.replace(commit_key(3), b"garbage")
    assert (await (await tstore.open(store.url)).repair(void_intact=[3])).ok
    with pytest.raises(Conflict, match="was deleted, probably by a garbage collection whose record was voided"):
        await lost.commit()
    assert await whole.commit() == 5
    assert (await (await tstore.open(store.url)).verify()).faults == []


async def test_a_collection_with_too_many_metrics_says_what_to_do() -> None:
    """Each commit may have 1 MiB of them, and the record of a collection, here of 4 MiB, has those of all."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for step in range(6):
        metrics = {f"{i:04}".ljust(240, "m"): float(i) for i in range(4000)}
        await tstore.save(store, {"w": np.array([step])}, step, metrics=metrics)
    with override_constants(COLLECTION_BYTES=4 << 20):
        with pytest.raises(InvalidArgument, match=r"exceeds the limit.*Nothing was collected.*fewer versions"):
            await store.collect(Keep(last=5))
        assert (await store.collect(Keep(last=3))).versions == [1, 2, 3]


def test_steps_whose_hashes_collide_are_compared_quickly() -> None:
    tags = tuple(f"step/{step}" for step in long_walks(17))
    alive = {1: LivingVersion(1, "t", 1.0, tags, True, {"loss": 1.0}, ())}
    with bounded_time(3):
        assert Keep(last=1, every=7, best=(1, "loss")).select(alive, 0.0) == {1}
