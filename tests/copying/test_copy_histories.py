"""Copies between stores with diverged histories, the objects a copy deletes, and its order of creation."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support import gcs_endpoint, http_server, s3_endpoint
from tstore import Keep
from tstore.core.copying.copy import copy_to
from tstore.core.format.layout import commit_key
from tstore.core.runtime.world import World, use_world
from tstore.core.storage.base import Storage
from tstore.core.storage.connect import connect
from tstore.core.storage.objects import Durability
from tstore.errors import AlreadyExists, Conflict, Corrupt, Denied, NotAStore, Unavailable
from tstore.lab.conformance.faults import Faults
from tstore.service.server import Server


def tree_of(step: int, writer: int = 0) -> dict[str, Any]:
    """Return 16 kB for a pack, and enough arrays for a separate manifest object."""
    rng = np.random.default_rng((step, writer))
    return {"own": rng.random(2000), "wide": {str(i): np.full(2, step) for i in range(400)}}


async def saved(url: str, steps: range, writer: int = 0) -> tstore.Store:
    store = await tstore.open(url)
    for step in steps:
        await tstore.save(store, tree_of(step, writer), step)
    return store


async def check_steps(url: str, *writers: int) -> None:
    """Check that the store is complete, and that step i was saved by the i-th writer."""
    store = await tstore.open(url, "r")
    report = await store.verify()
    assert report.ok, report.faults
    assert await tstore.steps(store) == list(range(len(writers)))
    for step, writer in enumerate(writers):
        assert np.array_equal((await tstore.restore(store, step))["own"], tree_of(step, writer)["own"])


def new() -> str:
    return f"memory://{uuid.uuid4()}"


class Interrupted(Faults):
    """Calls `between` once, before the object with a key is created."""

    def __init__(self, inner: Storage, key: str, between: Callable[[], Awaitable[object]]) -> None:
        super().__init__(inner)
        self._key = key
        self._between = between

    async def create(self, key: str, data: bytes, durability: Durability) -> None:
        if key == self._key:
            self._key = ""
            await self._between()
        await super().create(key, data, durability)


# ---- nothing good is deleted


def objects_of(store: str, name: str) -> list[Path]:
    return sorted(Path(store).glob(f"txn/*/{name}-*"))


def damage(path: Path) -> None:
    """Flip a bit, and change the size."""
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data + b"more")


async def test_an_intact_pack_of_the_destination_stays(tmp_path: Path) -> None:
    """The pack of the source has another size and is damaged."""
    source, target = str(tmp_path / "a"), str(tmp_path / "b")
    await saved(source, range(2))
    await tstore.copy(source, target)
    for path in objects_of(source, "pack"):
        damage(path)
    report = await tstore.copy(source, target)
    assert (report.objects, report.present) == (0, 4)
    await check_steps(target, 0, 0)


@pytest.mark.parametrize("name", ["pack", "manifest"])
async def test_a_damaged_object_is_replaced_only_by_an_intact_one(name: str, tmp_path: Path) -> None:
    source, target = str(tmp_path / "a"), str(tmp_path / "b")
    await saved(source, range(2))
    shutil.copytree(source, tmp_path / "backup")
    await tstore.copy(source, target)
    theirs = objects_of(target, name)[0]
    theirs.write_bytes(theirs.read_bytes()[:-1])
    left = theirs.read_bytes()
    damage(objects_of(source, name)[0])
    with pytest.raises(Corrupt, match=source):
        await tstore.copy(source, target)
    assert theirs.read_bytes() == left
    report = await tstore.copy(tmp_path / "backup", target)
    assert (report.objects, report.commits) == (1, 0)
    await check_steps(target, 0, 0)


PLACES = ["memory", "local", "gcs", "s3", "server", "server of a bucket"]


@pytest.fixture(params=PLACES)
async def places(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Storage, Storage]]:
    """Yield a destination as clients see it, and as it is where its objects are stored."""
    async with contextlib.AsyncExitStack() as running:
        match request.param:
            case "gcs":
                gcs = await running.enter_async_context(gcs_endpoint.Endpoint().running())
                target = connect(f"gs://{gcs.new_bucket()}/target", {"endpoint_url": gcs.url, "token": "anon"})
                yield target, target
            case "s3":
                s3 = await running.enter_async_context(s3_endpoint.Endpoint().running())
                target = connect(f"s3://{s3_endpoint.BUCKET}/target", s3.options())
                yield target, target
            case kind:
                target = connect(tmp_path / "target" if kind in ("local", "server") else new())
                if kind.startswith("server"):
                    server = await running.enter_async_context(
                        Server(target.url, access=http_server.everybody(), mode="a")
                    )
                    yield connect(server.url, {"token": http_server.ADMIN}), target
                else:
                    yield target, target


@pytest.mark.parametrize("name", ["pack", "manifest"])
async def test_a_late_repetition_of_a_delete_removes_no_replacement(
    name: str, places: tuple[Storage, Storage]
) -> None:
    """A DELETE whose response was lost is sent again, and either may arrive at any time."""
    target, behind = places
    store = await saved(new(), range(2))
    faults = Faults(target)
    await copy_to(store, faults)
    key, other = [key for key in await target.list("txn/") if f"/{name}" in key]
    data = await target.get(key)
    await behind.replace(key, data[:-1])
    report = await copy_to(store, faults)
    assert (report.objects, report.commits) == (1, 0)
    for call in faults.calls:
        if call.operation == "delete":
            await behind.delete(call.key)
    assert await target.get(key) == data
    assert await target.size(other) is not None
    assert (await (await tstore.open(target)).verify()).ok
    await target.close()


async def test_a_damaged_object_that_may_not_be_replaced() -> None:
    source, target = new(), new()
    store = await saved(source, range(1))
    await tstore.copy(source, target)
    storage = connect(target)
    [pack] = [key for key in await storage.list("txn/") if "/pack-" in key]
    data = await storage.get(pack)
    await storage.replace(pack, data[:-1])
    faulty = Faults(storage)
    faulty.fail("finish", error=Denied)
    with pytest.raises(Denied, match="is damaged and can't be replaced"):
        await copy_to(store, faulty)
    assert await storage.get(pack) == data[:-1]
    await copy_to(store, faulty)
    await check_steps(target, 0)


# ---- the order of creation


async def numbered(url: str, versions: range) -> tstore.Store:
    """Make a store whose versions each add their number to an element of an array."""
    store = await tstore.open(url)
    for version in versions:
        async with store.transaction() as tx:
            if version == 1:
                x = await tx.create_array("x", (200,), "i8", (200,))
                await x.write(0)
            await (await tx.array("x"))[version].write(version)
    return store


async def numbers(url: str, at: int | None = None) -> np.ndarray:
    """Return the values that a new process reads."""
    snapshot = await (await tstore.open(url, "r")).snapshot(at)
    x: np.ndarray = await (await snapshot.array("x")).read()
    return x


@pytest.mark.parametrize(("first", "most"), [(110, 20), pytest.param(60, 71, marks=pytest.mark.deep)])
async def test_a_copy_may_die_between_any_two_objects(first: int, most: int) -> None:
    """A new reader always sees the last copied version, with or without roots."""
    source, target = new(), new()
    store = await numbered(source, range(1, first + 1))
    await tstore.copy(source, target)
    await numbered(source, range(first + 1, 131))
    states = {v: await numbers(source, v) for v in range(first, 131)}
    deaths = 0
    while True:
        faulty = Faults(connect(target))
        faulty.fail("create", nth=2)
        faulty.fail("replace")
        try:
            report = await copy_to(store, faulty)
            break
        except Unavailable:
            deaths += 1
            newest = await (await tstore.open(target, "r")).log.reader.newest()
            assert newest == min(first + deaths, 130)
            assert np.array_equal(await numbers(target), states[newest])
    assert deaths == most
    assert report.objects <= 1
    assert await connect(target).list("roots/") == await connect(source).list("roots/")
    assert np.array_equal(await numbers(target), states[130])


async def test_commits_to_an_incomplete_copy_are_visible() -> None:
    """No root of the source is used for a version that was committed to the copy."""
    source, target = new(), new()
    store = await numbered(source, range(1, 61))
    await tstore.copy(source, target)
    await numbered(source, range(61, 70))
    faulty = Faults(connect(target))
    faulty.fail("create", "commits/*", nth=2)
    with pytest.raises(Unavailable):
        await copy_to(store, faulty)
    expected = await numbers(target)
    writer = await tstore.open(target)
    for version in range(62, 67):
        async with writer.transaction() as tx:
            await (await tx.array("x"))[version].write(-version)
        expected[version] = -version
    assert np.array_equal(await numbers(target), expected)
    assert (await writer.verify()).ok
    with pytest.raises(Conflict, match="diverged: their commits differ from version 62 on"):
        await copy_to(store, connect(target))
    assert np.array_equal(await numbers(target), expected)


@pytest.mark.parametrize("collected", [False, True])
async def test_a_writer_at_the_destination_takes_the_next_version(collected: bool) -> None:
    """No record of the source is created above it."""
    source, target = new(), new()
    store = await saved(source, range(2))
    await tstore.copy(source, target)
    await saved(source, range(2, 5))
    if collected:
        await store.collect(Keep(last=1))
    writer = await tstore.open(target)

    async def commit() -> None:
        await tstore.save(writer, tree_of(2, writer=1), 2)

    with pytest.raises(Conflict, match=r"diverged: their commits differ from version 3 on.* empty destination"):
        await copy_to(store, Interrupted(connect(target), commit_key(3), commit))
    assert await connect(target).list("commits/") == [commit_key(v) for v in (1, 2, 3)]
    await check_steps(target, 0, 0, 1)
    await tstore.save(writer, tree_of(3, writer=1), 3)
    await check_steps(target, 0, 0, 1, 1)


async def test_a_writer_at_the_destination_commits_above_the_copy() -> None:
    """Its commit is based on the source's history, so nothing is mixed."""
    source, target = new(), new()
    store = await saved(source, range(2))
    await tstore.copy(source, target)
    await saved(source, range(2, 4))
    writer = await tstore.open(target)

    async def commit() -> None:
        await tstore.save(writer, tree_of(9, writer=1), 9)

    with pytest.raises(Conflict, match="from version 4 on"):
        await copy_to(store, Interrupted(connect(target), commit_key(4), commit))
    assert [c.tag async for c in writer.history()] == ["step/9", "step/2", "step/1", "step/0"]
    assert (await writer.verify()).ok


# ---- diverged histories


class Together(Faults):
    """Lets a copy continue only once the other one has also seen the empty destination."""

    def __init__(self, inner: Storage, barrier: asyncio.Barrier) -> None:
        super().__init__(inner)
        self._barrier = barrier

    async def empty(self) -> bool:
        empty = await super().empty()
        await self._barrier.wait()
        return empty


@pytest.mark.parametrize("held", [1, 2, 3, 4])
@pytest.mark.parametrize("other_held", [1, 3, 4, 6])
async def test_concurrent_copies_of_diverged_histories_are_not_mixed(held: int, other_held: int) -> None:
    """The copy that creates the first different version wins; the other creates nothing above it."""
    first, second, target = new(), new(), new()
    await saved(first, range(2))
    await tstore.copy(first, second)
    await saved(first, range(2, 4))
    await saved(second, range(2, 6), writer=1)
    barrier = asyncio.Barrier(2)
    copies, gates = [], []
    for source, version in ((first, held), (second, other_held)):
        storage = Together(connect(target), barrier)
        gates.append(storage.hold("create", commit_key(version)))
        copies.append(asyncio.create_task(copy_to(await tstore.open(source), storage)))
    for gate, copied in zip(gates, copies, strict=True):
        await asyncio.wait([asyncio.create_task(gate.reached()), copied], return_when=asyncio.FIRST_COMPLETED)
        gate.release()
    ended = await asyncio.gather(*copies, return_exceptions=True)
    [lost] = [error for error in ended if isinstance(error, BaseException)]
    with pytest.raises(Conflict, match="from version 3 on"):
        raise lost
    await check_steps(target, *((0, 0, 0, 0) if ended[1] is lost else (0, 0, 1, 1, 1, 1)))


class Numbers(World):
    """Tokens that are the same in every store, so that its transactions have the same ids."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def token(self, size: int) -> str:
        return f"{next(self._count):0{2 * size}x}"


@pytest.mark.parametrize("name", ["pack", "manifest"])
async def test_an_object_of_a_diverged_copy_is_not_replaced(name: str, tmp_path: Path) -> None:
    """`cp -rn` has added the newest record of the source to a copy whose earlier one differs."""
    source, target = tmp_path / "a", tmp_path / "b"
    await saved(str(source), range(1))
    await tstore.copy(source, target)
    for store, longer in ((source, 0), (target, 5)):
        # with a short manifest, which is in the record, only the packs tell
        tree = {"own": np.arange(2000.0 + longer) + longer} if name == "pack" else tree_of(1)["wide"]
        with use_world(Numbers()):
            await tstore.save(store, tree, 1, attributes={"longer": "x" * longer})
    await saved(str(source), range(2, 3))
    for path in [p for p in source.rglob("*") if p.is_file()]:
        if not (theirs := target / path.relative_to(source)).exists():
            theirs.parent.mkdir(exist_ok=True)
            shutil.copy(path, theirs)
    before = {path: path.read_bytes() for path in target.rglob(f"{name}*")}
    with pytest.raises(Conflict, match="from version 2 on"):
        await tstore.copy(source, target)
    assert {path: path.read_bytes() for path in target.rglob(f"{name}*")} == before


@pytest.mark.parametrize("alike", [False, True])
async def test_a_copy_to_a_merged_store_notices_records_of_other_lengths(alike: bool, tmp_path: Path) -> None:
    """Those of equal lengths pass, as "Not promised" says; `verify` of the destination names them."""
    source, target = tmp_path / "a", tmp_path / "b"
    await saved(str(source), range(2))
    shutil.copytree(source, target)
    for store, writer in ((source, "a"), (target, "b" if alike else "other")):
        opened = await tstore.open(store)
        for number in range(3):
            async with opened.transaction(f"{writer}/{number}") as tx:
                await tx.create_group(f"{writer}/{number}")
    await saved(str(source), range(2, 4))
    for path in [p for p in source.rglob("*") if p.is_file()]:  # as `cp -rn` does
        if not (theirs := target / path.relative_to(source)).exists():
            theirs.parent.mkdir(exist_ok=True)
            shutil.copy(path, theirs)
    await saved(str(source), range(4, 5))
    if alike:
        await tstore.copy(source, target)
    else:
        with pytest.raises(Conflict, match="from version 3 on"):
            await tstore.copy(source, target)
    faults = (await (await tstore.open(target)).verify()).faults
    assert f"{commit_key(6)}: it follows another {commit_key(5)}" in faults[0]


async def test_objects_of_another_copy_are_synced() -> None:
    """The other copy may have died before it synced them."""
    source, target = new(), new()
    store = await saved(source, range(2))
    await tstore.copy(source, target)
    await connect(target).delete("tstore.json")
    storage = Faults(connect(target))
    assert (await copy_to(store, storage)).objects == 1
    assert storage.count("sync") == 1


async def test_concurrent_copies_of_one_history_agree() -> None:
    source, target = new(), new()
    store = await saved(source, range(4))
    reports = await asyncio.gather(*[copy_to(store, connect(target)) for _ in range(3)])
    assert {report.version for report in reports} == {4}
    await check_steps(target, 0, 0, 0, 0)


async def test_a_concurrent_copy_completes_before_the_destination_is_listed() -> None:
    source, target = new(), new()
    store = await saved(source, range(4))

    class Overtaken(Faults):
        async def empty(self) -> bool:
            await copy_to(store, connect(target))
            return await super().empty()

    report = await copy_to(store, Overtaken(connect(target)))
    assert (report.version, report.objects, report.commits) == (4, 0, 0)
    await check_steps(target, 0, 0, 0, 0)


async def test_copies_of_a_store_and_of_one_version_to_one_destination_conflict() -> None:
    """The second copy is a conflict."""
    source, target = new(), new()
    store = await saved(source, range(2))

    async def other() -> None:
        await copy_to(store, connect(target))

    with pytest.raises(AlreadyExists, match="is another store"):
        await copy_to(store, Interrupted(connect(target), "tstore.json", other), at=1)


async def test_a_destination_ahead_of_the_source_is_left_unchanged() -> None:
    """It has every version of the source; what it collected does not come back."""
    source, target = new(), new()
    store = await saved(source, range(3))
    await tstore.copy(source, target)
    ahead = await saved(target, range(3, 5))
    await ahead.collect(Keep(last=2))
    before = await connect(target).list("")
    report = await tstore.copy(source, target)
    assert (report.version, report.objects, report.commits) == (6, 0, 0)
    assert await connect(target).list("") == before
    alone = new()
    await tstore.copy(source, alone, at=2)
    further = await tstore.open(alone)
    await tstore.save(further, tree_of(7), 7)
    await further.collect(Keep(last=1))
    before = await connect(alone).list("")
    assert (await tstore.copy(source, alone, at=2)).objects == 0
    assert await connect(alone).list("") == before
    assert (await tstore.copy(target, source)).commits == 3
    assert await tstore.steps(store) == [3, 4]


async def test_a_damaged_destination_ahead_of_the_source_is_repaired() -> None:
    source, target = new(), new()
    await saved(source, range(3))
    await tstore.copy(source, target)
    ahead = await saved(target, range(3, 4))
    await ahead.collect(Keep(last=2))
    storage = connect(target)
    [pack] = [p for p in (await ahead.snapshot("step/2")).tree.nodes["own"].chunks.packs if isinstance(p, str)]
    await storage.delete(pack)
    assert not (await ahead.verify()).ok
    assert (await tstore.copy(source, target)).objects == 1
    assert (await ahead.verify()).ok


async def test_a_copy_to_the_source_under_another_name_changes_nothing(tmp_path: Path) -> None:
    source = tmp_path / "a"
    await saved(str(source), range(2))
    before = {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in source.rglob("*") if p.is_file()}
    (tmp_path / "b").symlink_to(source)
    report = await tstore.copy(source, tmp_path / "b")
    assert (report.objects, report.commits, report.version) == (0, 0, 2)
    assert {p: (p.stat().st_ino, p.stat().st_mtime_ns) for p in source.rglob("*") if p.is_file()} == before
    with pytest.raises(AlreadyExists):
        await tstore.copy(source, tmp_path / "b", at=1)


async def parted(tmp_path: Path) -> tuple[str, str]:
    """Make a store of four steps, and one whose third and fourth steps differ."""
    source, other = str(tmp_path / "source"), str(tmp_path / "other")
    await saved(source, range(2))
    shutil.copytree(source, other)
    await saved(source, range(2, 4))
    await saved(other, range(2, 4), writer=1)
    return source, other


@pytest.mark.parametrize("moment", ["pack", "manifest", "marker"])
async def test_a_source_replaced_during_a_copy_is_a_conflict(moment: str, tmp_path: Path) -> None:
    """For example by a restored backup: records of one history are never copied with data of another."""
    source, other = await parted(tmp_path)
    target = str(tmp_path / "target")
    store = await tstore.open(source)

    def replace() -> None:
        os.rename(source, tmp_path / "gone")
        os.rename(other, source)

    class Replacing(Faults):
        manifests = 0

        async def flush(self, prefix: str, durability: Durability) -> None:
            await super().flush(prefix, durability)
            if moment == "pack" and os.path.exists(other):
                replace()

        async def create(self, key: str, data: bytes, durability: Durability) -> None:
            await super().create(key, data, durability)
            self.manifests += "/manifest-" in key
            if (moment == "manifest" and self.manifests == 4) or (moment == "marker" and key == "tstore.json"):
                self.manifests = 0
                replace()

    copying = copy_to(store, Replacing(connect(target)))
    if moment == "marker":  # everything had been read by then
        await copying
        await check_steps(target, 0, 0, 0, 0)
        return
    with pytest.raises(Conflict, match="version 4 is not the same as at the start"):
        await copying
    assert not await connect(target).list("commits/")
    with pytest.raises(NotAStore):
        await tstore.open(target, "r")


async def test_an_old_handle_copies_the_replaced_source(tmp_path: Path) -> None:
    """The copy has the current contents of the source."""
    source, other = await parted(tmp_path)
    async with await tstore.open(source) as store:
        await tstore.restore(store)
        assert len([c async for c in store.history()]) == 4
        os.rename(source, tmp_path / "gone")
        os.rename(other, source)
        await copy_to(store, connect(str(tmp_path / "target")))
    await check_steps(str(tmp_path / "target"), 0, 0, 1, 1)
