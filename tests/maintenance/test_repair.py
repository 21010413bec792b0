"""`tstore repair`: the damage it lists, the void records it creates, and what works afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.forging import forged, place, placed
from tests.support.http_server import ADMIN, everybody
from tstore import Keep
from tstore.cli import main
from tstore.core.format.layout import ROOT_EVERY, commit_key, root_key
from tstore.core.format.objects.encoding import decode
from tstore.core.format.objects.records import Collection, Record
from tstore.core.maintenance import repair
from tstore.core.storage.memory import MemoryStorage
from tstore.errors import Corrupt, Denied, InvalidArgument, NotFound, SnapshotExpired, TimelineChanged, TStoreError
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Server

VALUES = np.arange(4000.0)


async def filled(*steps: int, url: str = "") -> tstore.Store:
    store = await tstore.open(url or f"memory://{uuid.uuid4()}")
    for step in steps:
        await tstore.save(store, {"w": VALUES + step, "b": np.arange(3)}, step)
    return store


async def damage(store: tstore.Store, version: int, data: bytes = b"garbage") -> bytes:
    """Replace the bytes of a record, and return the original ones."""
    before = await store.log.storage.get(commit_key(version))
    await store.log.storage.replace(commit_key(version), data)
    return before


async def check_works(url: str) -> None:
    """Check that readers, verify, gc and commits work."""
    store = await tstore.open(url)
    assert (await store.verify()).faults == []
    assert (await store.repair()).damaged == []
    assert [commit.version async for commit in store.history()]
    await tstore.restore(store)
    await tstore.save(store, {"w": VALUES}, 100)
    await store.collect(Keep(last=1))
    await tstore.save(store, {"w": VALUES}, 101)
    assert np.array_equal((await tstore.restore(store))["w"], VALUES)
    assert (await store.verify()).faults == []


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_a_record_that_cannot_be_read_is_listed_and_voided(version: int) -> None:
    store = await filled(0, 1, 2)
    await damage(store, version)
    store = await tstore.open(store.url)
    before = {key: await store.log.storage.get(key) for key in await store.log.storage.list("")}
    report = await store.repair()
    assert [(d.version, d.record_intact) for d in report.damaged] == [(version, False)]
    assert commit_key(version) in report.damaged[0].reason
    assert not report.ok
    assert {key: await store.log.storage.get(key) for key in await store.log.storage.list("")} == before
    report = await store.repair([version])
    assert (report.ok, report.voided) == (True, [version])
    [saved] = report.saved
    assert saved.startswith(f"damaged/{version:020d}-")
    assert await store.log.storage.get(saved) == b"garbage"
    store = await tstore.open(store.url)
    assert sorted(await tstore.steps(store)) == sorted({0, 1, 2} - {version - 1})
    await check_works(store.url)


async def test_voiding_a_readable_record_needs_confirmation() -> None:
    store = await filled(0, 1)
    with pytest.raises(InvalidArgument, match=r"pass void_intact=\[2\]"):
        await store.repair([2])
    with pytest.raises(NotFound, match="no version 3"):
        await store.repair([3])
    report = await store.repair(void_intact=[2])
    assert (report.voided, report.version) == ([2], 3)
    store = await tstore.open(store.url)
    assert await tstore.steps(store) == [0]
    assert await anext(c.message async for c in store.history()) == "repair: voided version 2"
    await check_works(store.url)


async def test_versions_to_void_are_passed_as_sequences() -> None:
    store = await filled(0)
    for argument in (1, "1", [None], None):
        with pytest.raises(InvalidArgument, match="expected a sequence of integers"):
            await store.repair(argument)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="void_intact=1: expected a sequence of integers"):
        await store.repair(void_intact=1)  # type: ignore[arg-type]


async def test_a_version_with_missing_objects_is_listed() -> None:
    store = await filled(0)
    async with store.transaction(tag="big") as tx:
        for i in range(150):
            await (await tx.create_array(f"many/{i}", (64,), "f4", (4,))).write(np.full(64, i))
    storage = store.log.storage
    [manifest] = [key for key in await storage.list("txn/") if "/manifest" in key]
    await storage.delete(manifest)
    store = await tstore.open(store.url)
    [damage] = (await store.repair()).damaged
    assert (damage.version, damage.record_intact) == (2, True)
    assert manifest in damage.reason
    await store.repair(void_intact=[2])
    await check_works(store.url)


async def test_a_missing_pack_is_listed() -> None:
    store = await filled(0)
    [pack] = [key for key in await store.log.storage.list("txn/") if "/pack-" in key]
    await store.log.storage.delete(pack)
    [damage] = (await (await tstore.open(store.url)).repair()).damaged
    assert pack in damage.reason


async def test_a_missing_record_is_filled() -> None:
    store = await filled(0, 1, 2)
    await store.log.storage.delete(commit_key(2))
    store = await tstore.open(store.url)
    assert [damage.version for damage in (await store.repair()).damaged] == [2]
    assert (await store.repair([2])).saved == []
    assert await tstore.steps(await tstore.open(store.url)) == [0, 2]
    await check_works(store.url)


@pytest.mark.parametrize("gone", [(3, 4), (2, 4), (3, 5), (2, 3, 4, 5)])
async def test_every_missing_record_is_listed_and_filled(gone: tuple[int, ...]) -> None:
    store = await filled(*range(6))
    for version in gone:
        await store.log.storage.delete(commit_key(version))
    store = await tstore.open(store.url)
    report = await store.repair()
    assert [one.version for one in report.damaged] == list(gone)
    assert not report.ok
    assert (await store.repair(gone)).ok
    await check_works(store.url)


async def test_nothing_is_voided_while_gaps_remain() -> None:
    """No commit is possible while records exist above a gap."""
    store = await filled(*range(6))
    for version in (3, 4):
        await store.log.storage.delete(commit_key(version))
    store = await tstore.open(store.url)
    before = await store.log.storage.list("")
    for void, intact in (((), (1,)), ((3,), ()), ((4,), (2,))):
        with pytest.raises(InvalidArgument, match=r"nothing was voided; restore it from a copy, or void [34]"):
            await store.repair(void, void_intact=intact)
    assert await store.log.storage.list("") == before


async def test_an_error_and_a_report_name_only_a_few_of_many_versions() -> None:
    store = await filled(*range(40))
    gone = range(3, 39)
    for version in gone:
        await store.log.storage.delete(commit_key(version))
    store = await tstore.open(store.url)
    with pytest.raises(InvalidArgument, match=r"void 4, 5, .*, 13, … \(35 in all\) too$"):
        await store.repair([3])
    report = await store.repair(gone)
    assert report.ok
    assert repr(report) == (
        "<tstore.RepairReport 36 damaged versions, voided=[3, 4, 5, 6, 7, 8, 9, 10, 11, 12, … (36 in all)]>"
    )


async def test_a_record_far_above_the_others_lists_a_bounded_number_of_gaps() -> None:
    store = await filled(0)
    await store.log.storage.replace(commit_key(10**19), b"garbage")
    assert len((await store.repair()).damaged) == 1000


async def test_roots_that_may_include_a_voided_version_are_written_anew() -> None:
    store = await filled(0)
    for i in range(ROOT_EVERY):
        async with store.transaction(tag=f"t{i}", durability="none") as tx:
            await tx.create_group(f"g{i}", {"i": i})
    former = await store.log.storage.get(root_key(ROOT_EVERY))
    store = await tstore.open(store.url)
    await store.repair(void_intact=[5])
    assert await store.log.storage.get(root_key(ROOT_EVERY)) not in (b"", former)
    store = await tstore.open(store.url)
    assert "t3" not in await store.tags()
    assert "t4" in await store.tags()
    await check_works(store.url)


async def test_a_root_created_during_a_repair_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the commit of the repair, the open store does not know that a version was voided."""
    store = await filled(0)
    for i in range(ROOT_EVERY - 4):
        async with store.transaction(tag=f"t{i}", durability="none") as tx:
            await tx.create_group(f"g{i}", {"i": i})
    commit, made = repair._commit_repair, []

    async def commit_late(*arguments: Any) -> int:
        for _ in range(3):
            async with store.transaction(durability="none"):
                pass
        made.append(await store.log.storage.size(root_key(ROOT_EVERY)))
        return await commit(*arguments)

    monkeypatch.setattr(repair, "_commit_repair", commit_late)
    await (await tstore.open(store.url)).repair(void_intact=[5])
    assert made != [None]
    assert "t3" not in await (await tstore.open(store.url)).tags()
    await check_works(store.url)


async def test_a_forged_garbage_collection_is_undone() -> None:
    store = await filled(0, 1, 2)
    gone = Collection((), (1, 2, 3), {}, (), ("txn/a/pack-0",))
    await place(store.log.storage, 4, forged(Record("gc-forged", 3, 1.0, collection=gone)))
    async with store.transaction():
        pass
    store = await tstore.open(store.url)
    with pytest.raises(TStoreError):
        await store.snapshot(2)
    await store.repair(void_intact=[4])
    store = await tstore.open(store.url)
    assert (await store.snapshot(2)).version == 2
    await check_works(store.url)


@pytest.mark.parametrize("later", ["nothing", "a commit", "a collection"])
@pytest.mark.parametrize("intact", [True, False])
async def test_versions_that_a_voided_gc_had_deleted_stay_expired(later: str, *, intact: bool) -> None:
    """Step 0 lacks a pack; step 1 was expired too, but step 2 still needs all of its data."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for step in range(4):
        async with store.transaction(tag=f"step/{step}") as tx:
            w = await (tx.array("w") if step else tx.create_array("w", (4000,), "f8", (1000,)))
            await w[: 2000 if step > 1 else 4000].write(VALUES[: 2000 if step > 1 else 4000] + step)
    assert (await store.collect(Keep(last=2))).version == 5
    if later != "nothing":
        async with store.transaction(tag="step/4") as tx:
            await (await tx.array("w"))[:1000].write(VALUES[:1000] + 4)
    if later == "a collection":
        await store.collect(Keep(last=2))
    if not intact:
        await damage(store, 5)
    store = await tstore.open(store.url)
    report = await store.repair(() if intact else [5], void_intact=[5] if intact else ())
    assert report.ok
    kept = {"nothing": [1, 2, 3], "a commit": [1, 2, 3, 4], "a collection": [3, 4]}[later]
    assert report.expired == ([] if later == "a collection" else [1])
    store = await tstore.open(store.url)
    assert await tstore.steps(store) == kept
    with pytest.raises(SnapshotExpired, match="version 1 was removed by"):
        await store.snapshot(1)
    served = f"memory://{uuid.uuid4()}"
    async with Server(served, access=everybody()) as server:
        await tstore.copy(store, server.url, storage_options={"token": ADMIN})
    for one in (store, await tstore.open(served)):
        assert (await one.verify()).faults == []
        for keep in (10, 2, 1):
            await one.collect(Keep(last=keep), abandoned=timedelta(0))
            one = await tstore.open(one.url)
            steps = await tstore.steps(one)
            assert steps == kept[-keep:]
            for step in steps:
                values = (await tstore.restore(one, step))["w"]
                expected = np.concatenate(
                    [VALUES[:1000] + step, VALUES[1000:2000] + min(step, 3), VALUES[2000:] + 1]
                )
                assert np.array_equal(values, expected)


async def test_the_work_of_voiding_a_gc_is_linear_in_the_versions_that_it_had_expired(tmp_path: Path) -> None:
    instructions = dict.fromkeys((40, 120), 0)  # of the interpreter in `repair.py`
    for count in instructions:
        store = await tstore.open(f"{tmp_path}/{count}")
        for value in range(count):
            async with store.transaction(durability="none") as tx:
                w = await (tx.array("w") if value else tx.create_array("w", (1000,), "f8", (1000,)))
                await w.write(float(value))
        collection = (await store.collect(Keep(last=1))).version
        assert collection is not None

        def add(frame: FrameType, event: str, _argument: object, count: int = count) -> Any:
            frame.f_trace_opcodes = True
            instructions[count] += event == "opcode"
            return add

        sys.settrace(lambda frame, *_: add if frame.f_code.co_filename == repair.__file__ else None)
        try:
            report = await store.repair(void_intact=[collection])
        finally:
            sys.settrace(None)
        assert report.expired == list(range(1, count))
    assert instructions[120] < 4 * instructions[40]


@pytest.mark.parametrize("last", [1, 2])
async def test_data_that_the_newest_state_needs_stays_after_the_newest_version_was_voided(last: int) -> None:
    """A gc expired the version before it, whose state is the newest again; later commits build on its chunks."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    expected = VALUES.copy()

    async def write(start: int, tag: str | None = None) -> None:
        async with store.transaction(tag=tag) as tx:
            await (await tx.array("w"))[start : start + 1000].write(expected[start : start + 1000])

    async with store.transaction(tag="step/0") as tx:
        await (await tx.create_array("w", (4000,), "f8", (1000,))).write(VALUES)
    expected[1000:2000] += 1
    await write(1000)
    await write(2000, "step/1")
    assert (await store.collect(Keep(last=last))).versions == ([2] if last == 2 else [1, 2])
    await damage(store, 3)
    assert (await (await tstore.open(store.url)).repair([3])).ok
    store = await tstore.open(store.url)
    assert (await store.snapshot(2)).version == 2
    assert await tstore.steps(store) == ([0] if last == 2 else [])
    expected[3000:] += 3
    await write(3000, "step/2")
    served = f"memory://{uuid.uuid4()}"
    async with Server(served, access=everybody()) as server:
        await tstore.copy(store, server.url, storage_options={"token": ADMIN})
    for url in (store.url, served):
        for keep in (2, 1):
            store = await tstore.open(url)
            await store.collect(Keep(last=keep), abandoned=timedelta(0))
            store = await tstore.open(url)
            assert (await store.verify()).faults == []
            values = await (await (await store.snapshot()).array("w")).read()
            assert np.array_equal(values, expected)


async def test_a_state_is_newest_again_whose_fragments_a_gc_condemned() -> None:
    """The gc expired the version of two hosts, and condemned what the next version did not need of its objects."""
    store = await filled(2)
    parts = [tstore.Shards((4000,), "f8", [((slice(2000 * h, 2000 * h + 2000),), VALUES[:2000])]) for h in (0, 1)]
    saves = [tstore.save(store, {"w": part}, 1, host=h, hosts=2, attempt="a") for h, part in enumerate(parts)]
    await asyncio.gather(*saves)
    async with store.transaction(tag="newest"):
        pass
    assert (await store.collect(Keep(tags=("newest",)))).versions == [2]
    await damage(store, 3)
    report = await (await tstore.open(store.url)).repair([3])
    assert (report.ok, report.restated) == (True, None)
    assert np.array_equal((await tstore.restore(store.url, at=2))["w"], np.tile(VALUES[:2000], 2))
    await check_works(store.url)


async def test_an_expired_version_that_lacks_data_is_not_alive_again() -> None:
    store = await filled(0, 1, 2)
    await store.collect(Keep(last=1))
    await damage(store, 3)
    assert (await (await tstore.open(store.url)).repair([3])).ok
    store = await tstore.open(store.url)
    with pytest.raises(SnapshotExpired):
        await store.snapshot(2)
    await tstore.save(store, {"w": VALUES}, 50)
    await check_works(store.url)


async def test_a_pack_lost_before_a_commit_is_voided_expires_nothing() -> None:
    """It may be restored from a copy."""
    store = await filled(0, 1, 2)
    first = (await store.log.reader.record(1)).transaction
    [pack] = [key for key in await store.log.storage.list(f"txn/{first}/") if "/pack-" in key]
    await store.log.storage.delete(pack)
    store = await tstore.open(store.url)
    report = await store.repair(void_intact=[3])
    assert (report.ok, report.voided, report.expired) == (False, [3], [])


async def test_a_version_that_the_last_gc_lists_does_not_live_on_in_its_ledger() -> None:
    """Otherwise Keep(last=1) would keep the voided version as the newest step, and expire a real one."""
    store = await filled(0, 1, 2)
    await store.collect(Keep(last=2))
    await damage(store, 3)
    store = await tstore.open(store.url)
    await store.repair([3])
    store = await tstore.open(store.url)
    assert await tstore.steps(store) == [1]
    await store.collect(Keep(last=1))
    assert np.array_equal((await tstore.restore(store, 1))["w"], VALUES + 1)
    assert (await store.verify()).faults == []


async def test_chunks_of_a_voided_version_in_use_stay() -> None:
    store = await filled(0)
    await tstore.save(store, {"w": VALUES, "b": np.arange(3)}, 1)  # reuses the pack of step 0
    await store.collect(Keep(last=1))
    async with store.transaction() as tx:
        await (await tx.array("b"))[0:1].write(np.array([7]))
    await store.collect()
    store = await tstore.open(store.url)
    await store.repair(void_intact=[2])
    for _ in range(2):
        store = await tstore.open(store.url)
        await store.collect(abandoned=timedelta(0))
        newest = await store.snapshot()
        for path in newest.paths():
            await (await newest.array(path))[0:1].read()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", range(12))
async def test_a_repair_that_is_killed_is_finished_by_another(step: int, monkeypatch: Any) -> None:
    store = await filled(0, 1, 2)
    for _ in range(ROOT_EVERY):
        async with store.transaction(durability="none"):
            pass
    await damage(store, 2)
    calls = iter(range(100))

    def killing(name: str) -> None:
        real = getattr(MemoryStorage, name)

        async def call(self: Any, *arguments: Any) -> Any:
            if next(calls) == step:
                raise Killed
            return await real(self, *arguments)

        monkeypatch.setattr(MemoryStorage, name, call)

    with monkeypatch.context() as patched:
        monkeypatch = patched
        for name in ("create", "replace", "delete", "flush"):
            killing(name)
        try:
            await (await tstore.open(store.url)).repair([2])
        except Killed:
            assert step < 11
    report = await (await tstore.open(store.url)).repair([2])
    assert report.ok
    keys = await store.log.storage.list("damaged/")
    assert [await store.log.storage.get(key) for key in keys] == [b"garbage"]
    await check_works(store.url)


@pytest.mark.parametrize("version", [2, 3])
async def test_an_open_store_says_that_the_timeline_changed(version: int) -> None:
    store = await filled(0, 1, 2)
    await store.snapshot()
    other = await tstore.open(store.url)
    await other.repair(void_intact=[version])
    with contextlib.suppress(TimelineChanged):
        await store.snapshot()  # may itself find the commit of the repair
    with pytest.raises(TimelineChanged):
        await store.snapshot()


async def test_a_cache_on_disk_forgets_the_voided_record(tmp_path: Path) -> None:
    store = await filled(0, 1, 2)
    cached = await tstore.open(store.log.storage, "r", cache=tmp_path)
    assert await tstore.steps(cached) == [0, 1, 2]
    await (await tstore.open(store.url)).repair(void_intact=[2])
    for _ in range(2):
        cached = await tstore.open((await tstore.open(store.url)).log.storage, "r", cache=tmp_path)
        try:
            assert await tstore.steps(cached) == [0, 2]
        except TimelineChanged:
            continue
        break
    else:
        pytest.fail("it is never forgotten")


async def test_a_cache_on_disk_forgets_roots_that_may_include_the_voided_version(tmp_path: Path) -> None:
    with override_constants(ROOT_EVERY=4):
        store = await filled(*range(5))
        cached = await tstore.open(store.log.storage, "r", cache=tmp_path)
        assert await tstore.steps(cached) == [0, 1, 2, 3, 4]
        await (await tstore.open(store.url)).repair(void_intact=[2])
        for _ in range(3):
            cached = await tstore.open((await tstore.open(store.url)).log.storage, "r", cache=tmp_path)
            with contextlib.suppress(TimelineChanged):
                assert await tstore.steps(cached) == [0, 2, 3, 4]
                assert await tstore.steps(cached) == [0, 2, 3, 4]
                return
        pytest.fail("they are never forgotten")


@pytest.mark.parametrize("voided", [[-5, "x", 10**9], [1, 2, -5]])
async def test_a_commit_that_claims_to_be_a_repair_can_be_voided(voided: list[object]) -> None:
    store = await filled(0, 1)
    await store.snapshot()
    await place(store.log.storage, 3, forged(Record("repair-forged", 2, 1.0, metadata={"voided": voided})))
    if 1 in voided:
        with pytest.raises(Corrupt, match="a repair voided"):
            await tstore.steps(store)
        assert [damage.version for damage in (await store.repair()).damaged] == [1, 2]
        await store.repair(void_intact=[3])
        store = await tstore.open(store.url)
    assert await tstore.steps(store) == [0, 1]
    await check_works(store.url)


async def test_a_server_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await filled(0)
    monkeypatch.setattr(store.log.storage, "url", "https://example.org/store")
    assert (await store.repair()).ok
    with pytest.raises(Denied, match="on the host of the server"):
        await store.repair(void_intact=[1])


def test_the_command(tmp_path: Path, capsys: Any) -> None:
    import tstore.sync

    url = str(tmp_path / "store")
    for step in range(2):
        tstore.sync.save(url, {"w": VALUES}, step)
    assert main(["repair", url]) == 0
    Path(url, commit_key(2)).write_bytes(b"garbage")
    assert main(["repair", url]) == 1
    said = capsys.readouterr().out
    assert "version 2 (damaged)" in said
    assert said.endswith(f"\ntstore repair {url} --void 2\n")
    assert main(["repair", url, "--void", "1"]) == 2
    assert capsys.readouterr().err.endswith("to void it anyway, pass --void-intact 1\n")
    assert main(["repair", url, "--void", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["voided"]) == (True, [2])
    assert Path(url, document["saved"][0]).read_bytes() == b"garbage"
    assert main(["verify", url]) == 0
    assert "contains files" not in capsys.readouterr().out
    assert tstore.sync.steps(url) == [0]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "garbage": lambda data: b"garbage",
    "a flipped bit": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "another version's": lambda data: forged(decode(data, Record), base=7),
    "too long": lambda data: data + bytes(9 << 20),
}
COMMANDS = [["log"], ["ls"], ["gc", "--keep-last", "1"]]


def with_damaged_record(folder: Path, damage: Callable[[bytes], bytes]) -> str:
    import tstore.sync

    url = str(folder / "store")
    for step in range(3):
        tstore.sync.save(url, {"w": VALUES}, step)
    record = Path(url, commit_key(3))
    record.write_bytes(damage(record.read_bytes()))
    return url


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_meet_a_damaged_record_name_the_repair(
    command: list[str], damage: str, tmp_path: Path, capsys: Any
) -> None:
    url = with_damaged_record(tmp_path, DAMAGES[damage])
    assert main([command[0], url, *command[1:]]) == 1
    said = capsys.readouterr().err
    assert commit_key(3) in said
    assert "run tstore repair" in said
    assert main(["repair", url]) == 1
    out = capsys.readouterr().out
    assert out.startswith("version 3 (damaged)")
    assert "or run tstore repair" not in out


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_record_damaged_in_any_way_can_be_voided(damage: str, tmp_path: Path) -> None:
    import tstore.sync

    url = with_damaged_record(tmp_path, DAMAGES[damage])
    former = Path(url, commit_key(3)).read_bytes()
    report = tstore.sync.open(url).repair([3])
    assert (report.ok, report.voided) == (True, [3])
    assert [Path(url, key).read_bytes() for key in report.saved] == [former]
    assert tstore.sync.steps(url) == [0, 1]


@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[2]])
def test_a_record_that_names_no_collection_names_the_repair(
    command: list[str], tmp_path: Path, capsys: Any
) -> None:
    url = with_damaged_record(tmp_path, lambda data: forged(decode(data, Record), collected=1))
    assert main([command[0], url, *command[1:]]) == 1
    assert f"run tstore repair {url}" in capsys.readouterr().err


async def test_verify_reports_a_record_that_names_no_gc() -> None:
    store = await filled(0, 1)
    record = decode(await store.log.storage.get(commit_key(2)), Record)
    changed = forged(msgspec.structs.replace(record, collected=1))
    await damage(store, 2, await placed(store.log.storage, 2, changed))
    store = await tstore.open(store.url)
    [fault] = (await store.verify()).faults
    assert (
        f"{commit_key(2)} names version 1 as the last garbage collection before it, but that is not the last"
        in fault
    )
    await store.snapshot(1)  # the record before tells that it has not expired


@pytest.mark.parametrize("named", [1, 4])
@pytest.mark.parametrize("served", [False, True])
async def test_no_commit_repeats_a_forged_record_that_names_a_wrong_gc(
    named: int, served: bool, tmp_path: Path
) -> None:
    """Also not through a server, which was running when the record was forged."""
    store = await filled(0, 1, url=str(tmp_path / "store"))
    await store.collect(Keep(last=1))
    await tstore.save(store, {"w": VALUES + 2}, 2)
    async with Server(tmp_path / "store", access=everybody()) as server:
        url = server.url if served else store.url
        async with await tstore.open(url, storage_options={"token": ADMIN} if served else None) as writer:
            await tstore.save(writer, {"w": VALUES + 3}, 3)
            forgery = Record("forged", 5, 1.0, collected=named)
            await place(store.log.storage, 6, forged(forgery))
            assert await tstore.save(writer, {"w": VALUES + 4}, 4) == 7
            assert (await writer.collect(Keep(last=2))).versions == [2, 4, 6]
            assert await tstore.save(writer, {"w": VALUES + 5}, 5) == 9
    store = await tstore.open(store.url)
    assert [(await store.log.reader.record(version)).collected for version in (5, 7, 8, 9)] == [3, 3, 3, 8]
    assert [fault for fault in (await store.verify()).faults if commit_key(6) not in fault] == []
    report = await store.repair(void_intact=[6])
    assert (report.voided, report.damaged[1:]) == ([6], [])
    await check_works(store.url)


@pytest.mark.parametrize("served", [False, True])
async def test_a_forged_record_that_names_an_older_gc_is_ignored(served: bool, tmp_path: Path) -> None:
    """Otherwise what the newer one expired would count as living, and later commits would repeat the claim."""
    store = await filled(0, 1, url=str(tmp_path / "store"))
    for step in (2, 3):
        await store.collect(Keep(last=1))
        await tstore.save(store, {"w": VALUES + step}, step)
    async with Server(tmp_path / "store", access=everybody()) as server:
        await place(store.log.storage, 7, forged(Record("forged", 6, 1.0, collected=3)))
        url, options = (server.url, {"token": ADMIN}) if served else (store.url, None)
        async with await tstore.open(url, storage_options=options) as writer:
            with pytest.raises(SnapshotExpired):
                await writer.snapshot(2)
            assert await tstore.save(writer, {"w": VALUES + 4}, 4) == 8
            assert (await writer.collect(Keep(last=1))).versions == [4, 6, 7]
    store = await tstore.open(store.url)
    assert [(await store.log.reader.record(version)).collected for version in (6, 8, 9)] == [5, 5, 5]
    [fault] = (await store.verify()).faults
    assert f"{commit_key(7)} names version 3 as the last garbage collection before it, but that is not" in fault
    assert [one.version for one in (await store.repair()).damaged] == [7]
    assert (await store.repair(void_intact=[7])).ok
    await check_works(store.url)


async def test_a_repair_far_below_the_newest_version_is_noticed_once() -> None:
    """There is no root in between, and there are more records than are cached."""
    store = await filled(0, 1)
    await store.repair(void_intact=[2])
    store = await tstore.open(store.url)
    for _ in range(330):
        async with store.transaction(durability="none"):
            pass
    storage = store.log.storage
    for key in await storage.list("roots/"):
        await storage.delete(key)
    store = await tstore.open(store.url)
    assert await tstore.steps(store) == [0]
    assert (await store.snapshot(300)).paths() == ["b", "w"]
    assert (await store.snapshot()).paths() == ["b", "w"]


async def test_a_transaction_of_a_user_may_be_named_like_a_repair() -> None:
    async with await tstore.open("memory://named-like-a-repair") as store:
        async with store.transaction(name="repair-1", host=0, hosts=1, attempt="a") as tx:
            await (await tx.create_array("a", (4,), "f4", (4,))).write(np.ones(4))
        with pytest.raises(InvalidArgument, match="is intact"):
            await store.repair([1])
        assert (await (await store.snapshot()).array("a")).shape == (4,)
