"""Copies of a store: complete, of one version, repeated, interrupted, and of stores that change concurrently."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tests.support import fileservers, gcs, http_server, moto_server, processes
from tests.support.thresholds import Thresholds
from tstore import Keep
from tstore.cli import main
from tstore.core.copying.copy import copy_to
from tstore.core.format.layout import commit_key
from tstore.core.log.expiry import living_versions
from tstore.core.storage.connect import connect
from tstore.core.storage.objects import Durability
from tstore.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    Denied,
    InvalidArgument,
    NotAStore,
    NotFound,
    SnapshotExpired,
    Unavailable,
)
from tstore.lab.conformance.faults import Faults

FROZEN = np.random.default_rng(0).random(4000)
KINDS = ["local", "memory"]
NewUrl = Callable[[str], str]


@pytest.fixture
def new(tmp_path: Path) -> NewUrl:
    """Return a function that gives a new URL of a kind."""

    def place(kind: str) -> str:
        name = uuid.uuid4().hex
        return str(tmp_path / name) if kind == "local" else f"memory://{name}"

    return place


@pytest.fixture
def source(new: NewUrl) -> str:
    return new("memory")


def tree_of(step: int) -> dict[str, Any]:
    """Return 32 kB that all steps share, 16 kB of the step's own, and a value small enough to be inline."""
    own = np.random.default_rng(step + 1).random(2000)
    return {"frozen": FROZEN, "moving": own, "wide": {str(i): np.full(2, step) for i in range(300)}}


async def saved(url: str, steps: int, above: int = 0) -> tstore.Store:
    store = await tstore.open(url)
    for step in range(above, steps):
        await tstore.save(store, tree_of(step), step, metrics={"loss": float(step)})
    return store


async def edited(url: str, count: int) -> tstore.Store:
    """Make a store whose versions depend on each other: each writes some chunks of one array."""
    store = await tstore.open(url)
    async with store.transaction(tag="begin") as tx:
        x = await tx.create_array("x", shape=(10, 1000), dtype="float64", chunks=(1, 1000))
        await x.write(np.zeros((10, 1000)))
    for i in range(1, count):
        async with store.transaction(tag=f"edit/{i}") as tx:
            await (await tx.array("x"))[i % 10].write(np.full(1000, float(i)))
    return store


async def values(store: tstore.Store, at: int | str | None = None) -> np.ndarray:
    x: np.ndarray = await (await (await store.snapshot(at)).array("x")).read()
    return x


async def check_step(store: tstore.Store, step: int) -> None:
    tree = await tstore.restore(store, step)
    for name in ("frozen", "moving"):
        assert np.array_equal(tree[name], tree_of(step)[name])
    assert tree["wide"]["7"].tolist() == [step, step]


async def check_whole(url: str, *steps: int) -> tstore.Store:
    store = await tstore.open(url, "r")
    report = await store.verify()
    assert report.ok, report.faults
    if steps:
        assert await tstore.steps(store) == list(steps)
    for step in steps:
        await check_step(store, step)
    return store


async def everything(url: str) -> dict[str, bytes]:
    storage = connect(url)
    keys = [k for k in await storage.list("") if k != "latest"]
    return dict(zip(keys, await asyncio.gather(*[storage.get(k) for k in keys]), strict=True))


# ---- whole stores


async def test_a_source_that_lost_records_is_not_copied(new: NewUrl) -> None:
    """Where it can be listed, however many were lost; one version below the gap can be copied."""
    source, target = new("memory"), new("memory")
    store = await saved(source, 9)
    for version in range(3, 9):
        await store.log.storage.delete(commit_key(version))
    with pytest.raises(Corrupt, match=f"{commit_key(3)} is missing, though later commits exist"):
        await tstore.copy(source, target)
    assert await connect(target).empty()
    assert (await tstore.copy(source, target, at=2)).version == 3


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("lost", [(5,), (4, 5), (3, 4, 5, 6), (1, 8)])
async def test_records_that_the_copy_lost_are_created_again(to: str, lost: tuple[int, ...], new: NewUrl) -> None:
    source, target = new("memory"), new(to)
    await saved(source, 8)
    await tstore.copy(source, target)
    for version in lost:
        await connect(target).delete(commit_key(version))
    assert (await tstore.copy(source, target)).commits == len(lost)
    assert await everything(target) == await everything(source)
    assert (await tstore.copy(source, target)).commits == 0


@pytest.mark.parametrize("version", [1, 5, 8])
async def test_a_truncated_record_of_the_copy_is_named(version: int, new: NewUrl) -> None:
    source, target = new("memory"), new("local")
    await saved(source, 8)
    await tstore.copy(source, target)
    await connect(target).replace(commit_key(version), b"torn")
    with pytest.raises(Corrupt, match=f"{commit_key(version)} is damaged: .*; delete it .* repeat the copy"):
        await tstore.copy(source, target)
    await connect(target).delete(commit_key(version))
    assert (await tstore.copy(source, target)).commits == 1
    assert await everything(target) == await everything(source)


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("of", KINDS)
async def test_a_copy_has_the_same_objects(of: str, to: str, new: NewUrl) -> None:
    source, target = new(of), new(to)
    store = await saved(source, 3)
    report = await tstore.copy(source, target)
    copied = await everything(target)
    assert copied == await everything(source)
    assert (report.version, report.commits, report.present) == (3, 3, 0)
    assert report.objects == len(copied)
    assert report.bytes == sum(map(len, copied.values()))
    other = await check_whole(target, 0, 1, 2)
    assert other.uuid == store.uuid
    assert [c.version async for c in other.history()] == [c.version async for c in store.history()]


async def test_an_empty_store_is_copied(source: str, new: NewUrl) -> None:
    with pytest.raises(NotAStore, match="does not exist yet"):
        await tstore.copy(await tstore.open(source), new("memory"))
    store = await tstore.open(source, "x")
    target = new("local")
    assert (await tstore.copy(store, target)).version == 0
    assert (await tstore.open(target, "r")).uuid == store.uuid


async def test_both_stores_can_be_written_after_a_copy(source: str, new: NewUrl) -> None:
    target = new("local")
    await saved(source, 2)
    await tstore.copy(source, target)
    await saved(target, 3, above=2)
    await saved(source, 4, above=2)
    await check_whole(target, 0, 1, 2)
    with pytest.raises(Conflict, match="diverged: their commits differ from version 3 on"):
        await tstore.copy(source, target)
    await check_whole(target, 0, 1, 2)


async def test_many_versions_with_roots(source: str, new: NewUrl) -> None:
    target = new("local")
    store = await edited(source, 130)
    await tstore.copy(source, target)
    assert set(await connect(target).list("roots/")) == set(await connect(source).list("roots/"))
    copied = await check_whole(target)
    for at in (1, 64, 100, 130):
        assert np.array_equal(await values(copied, at), await values(store, at))
    assert await connect(target).get("latest") == b"130"


async def test_expired_versions_are_not_copied(source: str, new: NewUrl) -> None:
    target = new("local")
    store = await saved(source, 6)
    await store.collect(Keep(last=1, every=3))
    await saved(source, 8, above=6)
    await tstore.copy(source, target)
    copied = await check_whole(target, 0, 3, 5, 6, 7)
    with pytest.raises(SnapshotExpired):
        await copied.snapshot("step/1")
    writer = await tstore.open(target)
    await writer.collect(Keep(last=1))
    await check_whole(target, 7)


async def test_a_living_version_based_on_expired_ones_is_copied(source: str, new: NewUrl) -> None:
    target = new("local")
    store = await edited(source, 20)
    await store.collect(Keep(tags=("edit/7",)))
    await tstore.copy(source, target)
    copied = await check_whole(target)
    for at in ("edit/7", "edit/19"):
        assert np.array_equal(await values(copied, at), await values(store, at))


async def test_manifest_objects_are_copied(source: str, new: NewUrl) -> None:
    store = await tstore.open(source)
    async with store.transaction() as tx:
        x = await tx.create_array("x", shape=(10, 1000), dtype="float64", chunks=(1, 5))
        await x.write(np.arange(10_000.0).reshape(10, 1000))
    for i in range(1, 4):
        async with store.transaction() as tx:
            await (await tx.array("x"))[i].write(np.full(1000, float(i)))
    await store.collect(Keep(newer_than=datetime.timedelta(0)))
    assert [k for k in await connect(source).list("txn/") if "/manifest" in k]
    for at in (None, 4):
        target = new("local")
        await tstore.copy(source, target, at)
        assert np.array_equal(await values(await check_whole(target)), await values(store))


async def test_a_store_that_has_lost_its_marker_is_not_copied(new: NewUrl) -> None:
    store = await saved(new("memory"), 1)
    await store.log.storage.delete("tstore.json")
    with pytest.raises(NotFound, match="lost its marker; restore it"):
        await tstore.copy(store, new("memory"))


async def test_remains_and_pending_transactions_are_not_copied(source: str, new: NewUrl) -> None:
    target = new("local")
    store = await saved(source, 1)
    part = tstore.Shards((4, 3000), "float64", [((slice(0, 2), slice(0, 3000)), np.ones((2, 3000)))])
    with pytest.raises(tstore.errors.DeadlineExceeded):
        await tstore.save(store, {"w": part}, 1, host=0, hosts=2, attempt="a", timeout=0.01)
    await tstore.copy(source, target)
    assert len(await connect(target).folders("txn/")) == 1
    await check_whole(target, 0)


# ---- one version


@pytest.mark.parametrize("to", KINDS)
async def test_one_version_is_copied_alone(source: str, to: str, new: NewUrl) -> None:
    target = new(to)
    store = await saved(source, 5)
    report = await tstore.copy(store, target, at="step/2")
    copied = await check_whole(target, 2)
    assert report.bytes < 0.5 * sum(map(len, (await everything(source)).values()))
    assert copied.uuid != store.uuid
    assert (await copied.snapshot(3)).tags["step/2"] == 3
    for at in (1, "step/1"):
        with pytest.raises(SnapshotExpired):
            await copied.snapshot(at)
    with pytest.raises(NotFound):
        await copied.snapshot("step/3")
    again = await tstore.copy(store, target, at=3)
    assert (again.objects, again.commits, again.version) == (0, 0, report.version)
    await saved(target, 4, above=3)
    writer = await tstore.open(target)
    await check_step(await tstore.open(target), 2)
    await writer.collect(Keep(last=1))
    await check_whole(target, 3)


async def test_one_version_is_copied_with_the_chunks_of_others(source: str, new: NewUrl) -> None:
    store = await edited(source, 90)
    await store.collect(Keep(tags=("edit/20", "edit/70")))
    for at in ("edit/20", "edit/70", 90, 91):
        target = new("local")
        await tstore.copy(source, target, at)
        copied = await check_whole(target)
        assert np.array_equal(await values(copied), await values(store, at))
        assert np.array_equal(await values(copied, at), await values(store, at))
        writer = await tstore.open(target)
        async with writer.transaction() as tx:
            await (await tx.array("x"))[0].write(np.ones(1000))
        await writer.collect(abandoned=datetime.timedelta(0))
        assert np.array_equal(await values(await check_whole(target), at), await values(store, at))
        await writer.collect(Keep(newer_than=datetime.timedelta(0)), abandoned=datetime.timedelta(0))
        assert (await values(await check_whole(target)))[1:].tolist() == (await values(store, at))[1:].tolist()


async def test_the_first_version_alone(source: str, new: NewUrl) -> None:
    target = new("local")
    await saved(source, 2)
    assert (await tstore.copy(source, target, at=1)).version == 1
    await check_whole(target, 0)


async def test_an_expired_or_missing_version_is_named(source: str, new: NewUrl) -> None:
    target = new("memory")
    store = await saved(source, 3)
    await store.collect(Keep(last=1))
    with pytest.raises(SnapshotExpired):
        await tstore.copy(source, target, at="step/0")
    with pytest.raises(NotFound):
        await tstore.copy(source, target, at=99)
    assert await connect(target).empty()


# ---- existing objects at the destination


async def test_only_missing_objects_are_copied(source: str, new: NewUrl) -> None:
    target = new("local")
    await saved(source, 3)
    await tstore.copy(source, target)
    again = await tstore.copy(source, target)
    assert (again.objects, again.bytes, again.commits, again.version) == (0, 0, 0, 3)
    await saved(source, 5, above=3)
    more = await tstore.copy(source, target)
    assert (more.commits, more.version) == (2, 5)
    assert more.bytes < 100_000  # the two steps' own arrays
    assert await everything(target) == await everything(source)


async def test_a_repeated_copy_restores_lost_objects(source: str, new: NewUrl) -> None:
    target = new("local")
    await saved(source, 3)
    await tstore.copy(source, target)
    packs = sorted(k for k in await connect(target).list("txn/") if "/pack-" in k)
    Path(target, packs[0]).unlink()
    Path(target, packs[1]).write_bytes(b"short")  # as a killed copy program leaves it
    report = await tstore.copy(source, target)
    assert (report.objects, report.commits) == (2, 0)
    await check_whole(target, 0, 1, 2)


async def test_an_older_version_is_not_copied_over_a_newer_one(source: str, new: NewUrl) -> None:
    first, second = new("memory"), new("memory")
    await saved(source, 2)
    await tstore.copy(source, first)
    await saved(source, 4, above=2)
    await tstore.copy(source, second)
    report = await tstore.copy(first, second)
    assert (report.version, report.objects) == (4, 0)
    await check_whole(second, 0, 1, 2, 3)


async def test_another_store_is_refused(source: str, new: NewUrl, tmp_path: Path) -> None:
    await saved(source, 1)
    other = new("local")
    await saved(other, 2)
    with pytest.raises(AlreadyExists, match="is another store"):
        await tstore.copy(source, other)
    with pytest.raises(AlreadyExists, match="is another store"):
        await tstore.copy(source, other, at=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("mine")
    with pytest.raises(AlreadyExists, match=r"has notes\.txt"):
        await tstore.copy(source, tmp_path / "mine")
    with pytest.raises(InvalidArgument, match="itself"):
        await tstore.copy(source, source)
    with pytest.raises(NotAStore):
        await tstore.copy(tmp_path / "nothing", new("local"))
    await check_whole(other, 0, 1)


# ---- failures


@pytest.mark.parametrize("operation", ["upload", "append", "finish", "flush", "create", "replace"])
async def test_a_copy_that_fails_anywhere_can_be_repeated(operation: str, source: str, new: NewUrl) -> None:
    """Nothing can be opened until the copy is complete; then no object was transferred twice."""
    store = await saved(source, 3)
    await store.collect(Keep(last=2))
    await saved(source, 5, above=3)
    target = new("memory")
    failures = 0
    while True:
        faulty = Faults(connect(target))
        faulty.fail(operation, nth=failures + 1)
        try:
            await copy_to(store, faulty)
            break
        except Unavailable:
            failures += 1
        if operation != "replace" and not await connect(target).empty():
            with pytest.raises(NotAStore):
                await tstore.open(target, "r")
            with pytest.raises(NotAStore):
                await tstore.open(target)
    assert failures
    await check_whole(target, 1, 2, 3, 4)
    before, after = await everything(source), await everything(target)
    assert after == {key: before[key] for key in after}


async def check_prefix(url: str, source: tstore.Store, known: int) -> int:
    """Check that the copy is a prefix of the source, with a readable newest version; return that version.

    `known` is the version from which a copy continues; versions above it, up to the newest gc, may lack data.
    """
    reader = await tstore.open(url, "r")
    newest = await reader.log.reader.newest()
    for version in range(1, newest + 1):
        key = commit_key(version)
        assert await reader.log.storage.get(key) == await source.log.storage.get(key)
    alive, gc = await living_versions(source.log.reader, await source.log.reader.newest())
    if known < newest < gc and newest not in alive:
        with pytest.raises(NotFound):
            await tstore.restore(reader)
        moving = (await tstore.restore(reader, at=known))["moving"]
        assert np.array_equal(moving, tree_of(known - 1)["moving"])
    else:
        await check_step(reader, max(await tstore.steps(reader)))
    return newest


@pytest.mark.parametrize("operation", ["append", "create", "flush", "replace"])
async def test_an_interrupted_copy_leaves_a_prefix_of_the_history(
    operation: str, source: str, new: NewUrl
) -> None:
    """At every moment, the destination has a prefix of the source's history."""
    store = await saved(source, 3)
    target = new("memory")
    await tstore.copy(store, target)
    await saved(source, 6, above=3)
    await store.collect(Keep(last=2))
    await saved(source, 8, above=6)
    nth, seen = 0, 3
    while True:
        nth += 1
        faulty = Faults(connect(target))
        faulty.fail(operation, nth=nth)
        try:
            await copy_to(store, faulty)
            break
        except Unavailable:
            newest = await check_prefix(target, store, 3)
            assert newest >= seen
            seen = newest
    assert nth > 1
    await check_whole(target, 4, 5, 6, 7)


async def test_readers_work_during_a_copy(source: str, new: NewUrl) -> None:
    """The reader checks after each created object."""
    store = await saved(source, 2)
    target = new("memory")
    await tstore.copy(store, target)
    await saved(source, 5, above=2)
    await store.collect(Keep(last=1))
    await saved(source, 7, above=5)
    seen = []

    class Watched(Faults):
        async def create(self, key: str, data: bytes, durability: Durability) -> None:
            await super().create(key, data, durability)
            seen.append(await check_prefix(target, store, 2))

    await copy_to(store, Watched(connect(target)))
    assert sorted(set(seen)) == list(range(2, 9))
    assert seen == sorted(seen)


async def test_a_block_that_ends_with_its_pack_is_verified(new: NewUrl) -> None:
    """Of 2.25 MiB, 2 are verified at once; the last block begins at 1.5 MiB."""
    source, target = new("memory"), new("memory")
    await tstore.save(source, {name: np.arange(3 << 15, dtype="i8") for name in "abc"}, 1, codecs=None)
    storage = (await tstore.open(source)).log.storage
    [pack] = [key for key in await storage.list("txn/") if "/pack-" in key]
    data = await storage.get(pack)
    assert len(data) == 9 << 18
    await storage.replace(pack, data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Corrupt, match=f"checksum mismatch in {pack} at byte {3 << 19}"):
        await tstore.copy(source, target)


async def test_a_damaged_source_is_not_copied(new: NewUrl) -> None:
    source, target = new("local"), new("local")
    await edited(source, 3)
    pack = next(p for p in Path(source, "txn").glob("*/pack-*") if p.stat().st_size == 80_000)
    data = bytearray(pack.read_bytes())
    data[25_000] ^= 1
    pack.write_bytes(data)
    with pytest.raises(Corrupt, match=r"x, chunk \(3, 0\): checksum mismatch in txn/.*/pack-") as error:
        await tstore.copy(source, target)
    assert source in str(error.value)
    assert not Path(target, pack.relative_to(source)).exists()
    pack.write_bytes(data[:79_999])
    with pytest.raises(Corrupt, match=r"x, chunk \(9, 0\): its pack .* is truncated"):
        await tstore.copy(source, target)
    pack.unlink()
    with pytest.raises(Corrupt, match="is missing"):
        await tstore.copy(source, target)
    with pytest.raises(NotAStore):
        await tstore.open(target, "r")


async def test_damage_at_the_border_of_pieces_is_detected(new: NewUrl) -> None:
    """Checksummed blocks extend across the pieces in which a pack is transferred."""
    source, target = new("local"), new("memory")
    store = await tstore.open(source)
    async with store.transaction() as tx:
        small = await tx.create_array("small", shape=(1000,), dtype="float64", chunks=(1000,))
        await small.write(np.ones(1000))
        x = await tx.create_array("x", shape=(3, 430_000), dtype="float64", chunks=(3, 430_000))
        await x.write(np.random.default_rng(0).random((3, 430_000)))
    [pack] = Path(source).glob("txn/*/pack-*")
    data = bytearray(pack.read_bytes())
    assert len(data) > (8 << 20) + (1 << 20)
    for at in ((8 << 20) - 1, 8 << 20, len(data) - 1):
        pack.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(Corrupt, match=r"x, chunk \(0, 0\): checksum mismatch"):
            await tstore.copy(source, target)
    pack.write_bytes(data)
    await tstore.copy(source, target)
    await check_whole(target)


async def test_a_source_collected_during_a_copy(source: str, new: NewUrl) -> None:
    store = await saved(source, 4)

    class Late(Faults):
        """Collects after some manifests were copied."""

        async def create(self, key: str, data: bytes, durability: Durability) -> None:
            if self.count("create") == 3:
                other = await tstore.open(source)
                await other.collect(Keep(last=1))
                assert len(await tstore.steps(other)) == 1
            await super().create(key, data, durability)

    target = new("local")
    await copy_to(store, Late(connect(target)))
    await check_whole(target, 3)
    with pytest.raises(SnapshotExpired):
        await copy_to(store, connect(new("memory")), at="step/1")


async def test_commits_during_a_copy_are_not_copied(source: str, new: NewUrl) -> None:
    store = await saved(source, 2)

    class Busy(Faults):
        async def flush(self, prefix: str, durability: Durability) -> None:
            async with (await tstore.open(source)).transaction():
                pass
            await super().flush(prefix, durability)

    target = new("local")
    assert (await copy_to(store, Busy(connect(target)))).version == 2
    await check_whole(target, 0, 1)
    assert (await tstore.copy(store, target)).version >= 3


COPY = """
import os, sys
import tstore.sync as tstore

source, target, number, pieces = sys.argv[1:]

def tell(done, total):
    tell.times += 1
    if tell.times > int(pieces):
        os.kill(os.getpid(), int(number))

tell.times = 0
tstore.copy(source, target, progress=tell)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_copy_can_be_repeated(number: signal.Signals, new: NewUrl) -> None:
    source, target = new("local"), new("local")
    big = {str(i): np.random.default_rng(i).random(2 << 20) for i in range(2)}
    for step in range(3):
        blocking.save(source, {**big, "own": np.full(10_000, float(step))}, step, durability="none")
    for pieces in (1, 3):
        process = processes.start(COPY, source, target, int(number), pieces)
        with processes.running(process):
            process.communicate(timeout=processes.DEADLINE)
        if number is signal.SIGKILL:  # the other signal is handled later, perhaps after the end
            assert process.returncode == -number
            assert not Path(target, "tstore.json").exists()
    assert blocking.copy(source, target).version == 3
    left = list(Path(target).rglob(".*"))  # by a kill between the link of an object and the end of its first name
    assert all(path.stat().st_nlink == 2 for path in left)
    store = blocking.open(target, "r")
    assert store.verify().ok
    assert (blocking.restore(store, 2)["own"] == 2).all()


# ---- other programs that copy


@pytest.mark.parametrize("command", [["cp", "-r"], ["rsync", "-a"]])
async def test_copies_by_other_programs_are_continued(command: list[str], new: NewUrl) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    source, target = new("local"), new("local")
    await saved(source, 2)
    subprocess.run([*command, f"{source}/.", target], check=True)
    await check_whole(target, 0, 1)
    await saved(source, 3, above=2)
    assert (await tstore.copy(source, target)).commits == 1  # each continues from the other
    await check_whole(target, 0, 1, 2)


# ---- the command


def test_the_command(new: NewUrl, capfd: pytest.CaptureFixture[str]) -> None:
    source, target = new("local"), new("local")
    for step in range(3):
        blocking.save(source, tree_of(step), step)
    assert main(["copy", source, target]) == 0
    assert f"{target} is at version 3: copied and verified 3 commits, " in capfd.readouterr().out
    assert main(["copy", source, target]) == 0
    assert capfd.readouterr().out == f"{target} is already at version 3: nothing to copy\n"
    assert main(["copy", source, target, "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert {**report, "present": 0} == {
        "source": source,
        "destination": target,
        "at": None,
        "version": 3,
        "commits": 0,
        "objects": 0,
        "bytes": 0,
        "present": 0,
    }
    alone = new("local")
    assert main(["copy", source, alone, "--at", "step/1"]) == 0
    capfd.readouterr()
    assert blocking.steps(alone) == [1]
    assert main(["copy", source, alone]) == 1
    assert "is another store" in capfd.readouterr().err
    assert main(["copy", source, new("local"), "--at", "step/9"]) == 1
    assert "has no step 9" in capfd.readouterr().err


# ---- servers


@contextlib.contextmanager
def served_by(kind: str, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield an empty URL on a real server, and its storage_options."""
    if kind == "gcs":
        with gcs.fake_gcs_server(folder) as endpoint:
            yield f"gs://{gcs.new_bucket(endpoint)}/copy", {"endpoint_url": endpoint, "token": "anon"}
    elif kind == "s3":
        with moto_server.running() as server:
            yield f"s3://{moto_server.BUCKET}/copy", server.options
    else:
        token = "admin-0123456789"  # a history of which versions were collected takes no other scope
        with http_server.serving(folder / "served", tokens=f"admin {token}") as served:
            yield served.url, {"token": token}


@pytest.mark.parametrize("kind", ["serve", "gcs", "s3"])
async def test_to_a_server_and_back(kind: str, new: NewUrl, tmp_path: Path, thresholds: Thresholds) -> None:
    """With a pack too long for memory; the second copy is interrupted."""
    thresholds(IN_MEMORY=1 << 20)
    source = new("local")
    big = {str(i): np.random.default_rng(i).random(1 << 19) for i in range(3)}
    store = await tstore.open(source)
    await tstore.save(store, big, 0)
    with served_by(kind, tmp_path) as (url, options):
        target = connect(url, options)
        first = await copy_to(store, target)
        assert (first.commits, first.version) == (1, 1)
        await tstore.save(store, {**big, "own": np.ones(2000)}, 1)
        await store.collect(Keep(last=1))
        await tstore.save(store, {**big, "own": np.ones(3000)}, 2)
        faulty = Faults(target)
        faulty.fail("create", nth=3)
        with pytest.raises(Unavailable):
            await copy_to(store, faulty)
        again = await copy_to(store, target)
        assert again.bytes < 100_000
        assert (await tstore.copy(store, url, storage_options=options)).objects == 0
        async with await tstore.open(target, "r") as copied:
            assert (await copied.verify()).ok
            assert await tstore.steps(copied) == [1, 2]
            back = new("local")
            await tstore.copy(copied, back)
            alone = new("local")
            await tstore.copy(copied, alone, at="step/2")
        await target.close()
    there, objects = await everything(back), await everything(source)
    assert there == {key: objects[key] for key in there}
    for place, steps in ((back, [1, 2]), (alone, [2])):
        reader = await tstore.open(place, "r")
        assert (await reader.verify()).ok
        assert await tstore.steps(reader) == steps
        assert (await tstore.restore(reader))["own"].sum() == 3000


async def test_from_a_server_of_files(new: NewUrl) -> None:
    """The server lists nothing."""
    source, target = new("local"), new("local")
    await saved(source, 3)
    async with fileservers.aiohttp_files(Path(source)) as url:
        await tstore.copy(url, target)
    await check_whole(target, 0, 1, 2)
    assert await everything(target) == await everything(source)
    await saved(target, 4, above=3)
    async with fileservers.aiohttp_files(Path(source)) as url:
        with pytest.raises(Denied):
            await tstore.copy(target, url)


async def test_a_destination_that_is_no_location_is_refused(tmp_path: Path) -> None:
    await tstore.save(tmp_path / "store", {"w": np.arange(3)}, 0)
    with pytest.raises(InvalidArgument, match="None is not the location of a store; pass a URL or a path"):
        await tstore.copy(tmp_path / "store", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [(), ("q",)])
async def test_a_living_version_based_on_an_expired_one_below_a_copy_is_copied(
    kept: tuple[str, ...], tmp_path: Path
) -> None:
    values = np.sqrt(np.arange(20_000, dtype="f4")).reshape(200, 100)
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        for name in ("a", "b"):
            await (await tx.create_array(name, (200, 100), "f4")).write(values)
    assert (await tstore.quantize(store, formats="e4m3", tag="q")).version == 2
    async with store.transaction(tag="head") as tx:
        await (await tx.array("a")).write(2)
    report = await store.collect(Keep(tags=("head", *kept)))
    assert report.versions == ([1] if kept else [1, 2])
    await tstore.copy(store, tmp_path / "s")
    copied = await tstore.open(tmp_path / "s")
    assert np.array_equal(await (await (await copied.snapshot()).array("b")).read(), values)
    assert (await copied.verify()).faults == []


async def test_a_copy_of_a_quantized_version_has_its_manifest(tmp_path: Path) -> None:
    """The manifest is an object of its own."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    await tstore.save(store, {f"w{i}": np.full((8, 10), i % 8, "f4") for i in range(150)}, 1)
    report = await tstore.quantize(store, formats="e4m3", tag="q")
    assert any("/manifest" in key for key in await store.log.storage.list("txn/"))
    await tstore.copy(store, tmp_path / "s", at="q")
    copied = await tstore.open(tmp_path / "s")
    assert (await (await (await copied.snapshot()).array("w149")).read())[0, 0] == 149 % 8
    assert (await copied.verify()).faults == []
    assert report.version == 2
