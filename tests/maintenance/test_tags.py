"""Tags of earlier versions: what they name, and that collections, repairs, copies and servers respect them."""

from __future__ import annotations

import timeit
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.forging import forged, place, placed_in
from tests.support.held_commit import held_commit
from tests.support.http_server import ADMIN, WRITE, client_of, everybody
from tstore import Keep
from tstore.core.format.layout import commit_key
from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.records import Record
from tstore.core.format.tree.nodes import Nodes
from tstore.core.format.tree.tree import Tree
from tstore.core.maintenance import gc
from tstore.core.tags import drop_tag, move_tag, remove_step, set_tag
from tstore.errors import AlreadyExists, Conflict, Corrupt, NotFound, SnapshotExpired
from tstore.lab.conformance.faults import open_faulty
from tstore.service.server import Server

VALUES = np.arange(2000.0)
STEPS = {"step/0": 1, "step/1": 2, "step/2": 3}


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


async def saved(url: str) -> tstore.Store:
    """Save steps 0, 1 and 2 as versions 1, 2 and 3."""
    store = await tstore.open(url)
    for step in range(3):
        await tstore.save(store, {"w": VALUES + step, "frozen": VALUES}, step)
    return store


async def step_at(store: tstore.Store, at: int | str | None = None) -> int:
    """Return the step whose values a version has."""
    tree = await tstore.restore(store, at=at)
    assert np.array_equal(tree["frozen"], VALUES)
    assert np.array_equal(tree["w"], VALUES + tree["w"][0])
    return int(tree["w"][0])


async def test_a_tag_names_the_version_and_changes_nothing_else(url: str) -> None:
    store = await saved(url)
    assert await set_tag(store, "best", "step/0") == (1, 4)
    assert await set_tag(store, "last") == (3, 5)  # the newest step
    with pytest.raises(AlreadyExists, match="'best' already names version 1"):
        await set_tag(store, "best", 2)
    assert await move_tag(store, "best", 2) == (2, 6)
    store = await tstore.open(url)
    assert await store.tags() == {**STEPS, "best": 2, "last": 3}
    assert [await step_at(store, at) for at in ("best", "last", None, 6)] == [1, 2, 2, 2]
    commits = [commit async for commit in store.history()]
    assert [(c.tagged, c.tags, c.bytes_added) for c in commits[:3]] == [
        ({"best": 2}, (), 0),
        ({"last": 3}, (), 0),
        ({"best": 1}, (), 0),
    ]
    assert await drop_tag(store, "best") == 7
    assert await store.tags() == {**STEPS, "last": 3}
    assert (await store.verify()).ok


async def test_versions_of_transactions_are_tagged_too(url: str) -> None:
    store = await tstore.open(url)
    with pytest.raises(NotFound, match="no commit to tag"):
        await set_tag(store, "first")
    async with store.transaction() as tx:
        await (await tx.create_array("a", (2,), "int8")).write(1)
    async with store.transaction(tag="own") as tx:
        await (await tx.array("a")).write(2)
    assert await set_tag(store, "first", 1) == (1, 3)
    assert await move_tag(store, "own", "first") == (1, 4)
    assert await store.tags() == {"first": 1, "own": 1}
    for at, values in (("own", [1, 1]), (None, [2, 2])):
        assert (await (await (await store.snapshot(at)).array("a")).read()).tolist() == values


async def test_a_version_that_changed_nothing_stands_for_the_one_before(url: str) -> None:
    store = await saved(url)
    assert (await store.collect(Keep(last=1))).version == 4
    assert await set_tag(store, "x", 4) == (3, 5)
    for at in (0, 1):
        with pytest.raises(NotFound):
            await set_tag(store, "y", at)


async def test_a_version_newer_than_the_base_is_not_tagged(url: str) -> None:
    store = await saved(url)
    tagging = store.transaction(tag="x")
    async with store.transaction():
        assert (await tagging.staging.base()).version == 3
    with pytest.raises(NotFound, match="at version 3: there is no version 4 to tag"):
        await tagging.staging.tag_version(4)


async def test_a_tag_does_not_change_what_restore_reads_by_default(url: str) -> None:
    store = await tstore.open(url)
    async with store.transaction(tag="a") as tx:
        await (await tx.create_array("w", (2000,), "f8")).write(1.0)
    await tstore.quantize(store, "e4m3", tag="small")
    await set_tag(store, "tiny", "small")
    assert (await tstore.restore(store))["w"][0] == 1
    assert (await store.snapshot("tiny")).version == 2
    async with store.transaction() as tx:
        await (await tx.array("w")).write(2.0)
    await set_tag(store, "again", "a")
    assert (await store.collect(Keep(tags=("a",)))).versions == [
        3,
        4,
    ]  # 2 is a copy of 1, and 6 the head
    assert (await tstore.restore(store))["w"][0] == 2


# ---- garbage collection


async def test_a_rule_keeps_the_version_that_a_tag_names(url: str) -> None:
    store = await saved(url)
    await set_tag(store, "best", 1)
    await set_tag(store, "worst", 2)
    for _ in range(2):  # the second time from the record of the first
        report = await store.collect(Keep(last=1, tags=("best",)))
        store = await tstore.open(url)
        assert await store.tags() == {"step/0": 1, "best": 1, "step/2": 3}
        assert await step_at(store, "best") == 0
        await set_tag(store, "more", 3)
        await drop_tag(store, "more")
    assert report.versions == [5, 7]
    with pytest.raises(SnapshotExpired, match="version 2, tagged 'worst', was removed"):
        await store.snapshot("worst")
    report = await store.collect(Keep(last=1))
    assert (report.versions[0], report.tags) == (1, ["best", "step/0"])
    with pytest.raises(SnapshotExpired, match="version 1, tagged 'best', was removed"):
        await store.snapshot("best")
    with pytest.raises(NotFound, match="no living version has the tag 'best'"):
        await store.collect(Keep(tags=("best",)))
    assert (await store.verify()).ok


async def test_a_version_that_expires_during_the_commit_is_not_tagged(url: str) -> None:
    await saved(url)
    store, faults = await open_faulty(url)
    async with held_commit(faults, set_tag(store, "best", 1)) as tagging:
        await (await tstore.open(url)).collect(Keep(last=1))
    with pytest.raises(SnapshotExpired, match=r"version 1 was removed .* as version 4, so it cannot be tagged"):
        await tagging
    assert await store.tags() == {"step/2": 3}
    assert await store.log.reader.newest() == 4
    with pytest.raises(SnapshotExpired):
        await set_tag(store, "best", 1)


async def test_a_gc_begins_again_when_a_version_that_it_would_expire_is_tagged(url: str) -> None:
    store = await saved(url)
    await set_tag(store, "best", 2)
    collecting, faults = await open_faulty(url)
    async with held_commit(faults, collecting.collect(Keep(last=1, tags=("best",)))) as collection:
        assert await move_tag(store, "best", 1) == (1, 5)
    report = await collection
    assert (report.version, report.versions, report.tags) == (6, [2, 4], ["step/1"])
    assert await store.tags() == {"step/0": 1, "best": 1, "step/2": 3}
    assert await step_at(store, "best") == 0
    assert (await store.verify()).ok


async def test_no_writer_prevents_a_gc_with_tags(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process tags the version that is to expire whenever the record is about to be appended."""
    store, other = await saved(url), await tstore.open(url)
    append = gc._append
    tagged: list[str] = []

    async def tag_and_append(*arguments: Any) -> int:
        tagged.append(f"x{len(tagged)}")
        await set_tag(other, tagged[-1], 1)
        return await append(*arguments)

    monkeypatch.setattr(gc, "_append", tag_and_append)
    report = await store.collect(Keep(last=1))
    assert report.versions[:2] == [1, 2]
    assert set(report.tags) == {*tagged, "step/0", "step/1"}
    assert len(tagged) > 3
    assert await store.tags() == {"step/2": 3}
    with pytest.raises(SnapshotExpired, match="version 1, tagged"):
        await store.snapshot(tagged[-1])
    assert (await store.verify()).ok


async def test_no_writer_prevents_a_gc_by_dropping_tags(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last plan keeps all steps: the tag that is dropped then may be that of the newest."""
    store, other = await saved(url), await tstore.open(url)
    append = gc._append
    races = 0

    async def drop_and_append(*arguments: Any) -> int:
        nonlocal races
        races += 1
        await move_tag(other, "x", 3)
        await (remove_step(other, 2) if races > gc._MAX_PLANS else drop_tag(other, "x"))
        return await append(*arguments)

    monkeypatch.setattr(gc, "_append", drop_and_append)
    report = await store.collect(Keep(last=1))
    assert races == gc._MAX_PLANS + 1
    assert {1, 2, 3}.isdisjoint(report.versions)
    assert report.versions
    assert await tstore.steps(store) == [0, 1]
    assert await step_at(store, 2) == 1
    assert (await store.verify()).ok


async def test_two_processes_tag_at_once(url: str) -> None:
    await saved(url)
    store, faults = await open_faulty(url)
    async with held_commit(faults, set_tag(store, "best", 1)) as tagging:
        await set_tag(await tstore.open(url), "best", 2)
    with pytest.raises(Conflict) as caught:
        await tagging
    assert caught.value.paths == ["tag best"]
    assert (await store.tags())["best"] == 2


# ---- damage, repair and copies


@pytest.mark.parametrize("collected", [False, True])
async def test_a_repair_drops_the_tags_of_a_voided_version(url: str, collected: bool) -> None:
    store = await saved(url)
    await set_tag(store, "best", 2)
    await set_tag(store, "moved", 2)
    await move_tag(store, "moved", 3)
    if collected:
        await store.collect(Keep(last=1, tags=("best",)))
    report = await store.repair(void_intact=[2])
    assert report.voided == [2]
    store = await tstore.open(url)
    kept = {"step/2": 3, "moved": 3}
    assert await store.tags() == (kept if collected else {"step/0": 1, **kept})
    with pytest.raises(NotFound, match="best"):
        await store.snapshot("best")
    assert (await store.verify()).faults == []
    assert (await store.repair()).damaged == []
    assert await set_tag(store, "best", 3)
    assert await step_at(store, "best") == 2


async def test_a_version_that_a_repair_voids_during_the_commit_is_not_tagged(url: str) -> None:
    await saved(url)
    store, faults = await open_faulty(url)
    async with held_commit(faults, set_tag(store, "best", 2)) as tagging:
        await (await tstore.open(url)).repair(void_intact=[2])
    with pytest.raises(Conflict, match="as version 4 voided version 2, which therefore cannot be tagged"):
        await tagging
    assert "best" not in await (await tstore.open(url)).tags()


async def test_a_version_tagged_during_its_repair_loses_the_tag(url: str) -> None:
    """The other process has read the version before the repair voids it."""
    await saved(url)
    other = await tstore.open(url)
    assert await step_at(other, 2) == 1
    store, faults = await open_faulty(url)
    async with held_commit(faults, store.repair(void_intact=[2])) as repair:
        assert await set_tag(other, "late", 2) == (2, 4)
    assert (await repair).version == 5
    store = await tstore.open(url)
    assert await store.tags() == {"step/0": 1, "step/2": 3}
    assert (await store.verify()).faults == []


@pytest.mark.parametrize("target", [1, 4])
async def test_a_tag_of_a_version_that_was_not_alive_is_a_fault(url: str, target: int) -> None:
    """Version 1 has expired, and version 4 is the collection that removed it."""
    store = await saved(url)
    await store.collect(Keep(last=1))
    record = Record("wrong", 4, 1.0, collected=4, tagged={"x": target})
    await place(store.log.storage, 5, encode(record))
    store = await tstore.open(url)
    reason = f"tags version {target}, which was not alive"
    [fault] = (await store.verify()).faults
    [damage] = (await store.repair()).damaged
    assert reason in fault
    assert (damage.version, damage.record_intact) == (5, True)
    assert reason in damage.reason
    with pytest.raises(Corrupt, match=reason):
        await tstore.copy(store, f"memory://{uuid.uuid4()}")
    await store.collect(Keep(last=1), abandoned=timedelta(0))
    await (await tstore.open(url)).repair(void_intact=[5])
    assert (await (await tstore.open(url)).verify()).ok


async def test_a_record_that_tags_later_versions_is_damaged(url: str) -> None:
    """Otherwise a reader could follow a tag to the version that it is reading."""
    store = await saved(url)
    await place(store.log.storage, 4, forged(Record("wrong", 3, 1.0, tagged={"x": 4})))
    with pytest.raises(Corrupt, match="tags a version that does not exist as of its base"):
        await (await tstore.open(url)).tags()


async def test_a_copy_has_the_tags(url: str) -> None:
    store = await saved(url)
    await set_tag(store, "best", 1)
    await set_tag(store, "worst", 2)
    await store.collect(Keep(last=1, tags=("best",)))
    copy = f"memory://{uuid.uuid4()}"
    await tstore.copy(store, copy)
    async with await tstore.open(copy) as copied:
        assert await copied.tags() == await store.tags() == {"step/0": 1, "best": 1, "step/2": 3}
        assert await step_at(copied, "best") == 0
        assert (await copied.verify()).ok
    one = f"memory://{uuid.uuid4()}"
    await tstore.copy(store, one, at=5)
    async with await tstore.open(one) as copied:
        assert await copied.tags() == {}
        assert await step_at(copied) == 2
        assert (await copied.verify()).ok


async def test_a_server_accepts_tags_of_living_versions_only(tmp_path: Path) -> None:
    await (await saved(str(tmp_path / "store"))).close()
    async with Server(tmp_path / "store", access=everybody()) as server, client_of(server, WRITE) as client:
        async with await tstore.open(server.url, storage_options={"token": ADMIN}) as store:
            assert await set_tag(store, "best", 1) == (1, 4)
            assert (await store.collect(Keep(last=1))).versions == [1, 2]
            assert await set_tag(store, "last", 3) == (3, 6)
            assert await store.tags() == {"step/2": 3, "last": 3}
        for target in (1, 5):
            record = encode(Record(f"t{target}", 6, 1.0, collected=5, tagged={"x": target}))
            for sender in (client, client.with_token(ADMIN)):
                response = await sender.create(f"/{commit_key(7)}", placed_in(tmp_path / "store", 7, record))
                assert response.status == 422
                assert f"it tags version {target}, which is not alive".encode() in response.body
    assert await (await tstore.open(tmp_path / "store")).tags() == {"step/2": 3, "last": 3}


def test_a_commit_of_a_tag_costs_a_copy_of_the_tags() -> None:
    """Opening a store applies up to 63 records, of which each may set a tag."""
    tags = {f"t{i}": i + 1 for i in range(20_000)}
    tree, record = Tree(20_000, Nodes(), tags), Record("a", 20_000, 0.0, tags=("new",), dropped=("t7", "absent"))

    def cost(call: Callable[[], object]) -> float:
        return min(timeit.repeat(call, number=1, repeat=20))

    after = tree.after(20_001, record, ()).tags
    assert after == {**{tag: v for tag, v in tags.items() if tag != "t7"}, "new": 20_001}
    assert cost(lambda: tree.after(20_001, record, ())) < 6 * cost(lambda: dict(tags))


async def test_a_mistyped_tag_costs_the_same_however_many_collections_there_were() -> None:
    url, counts = f"memory://{uuid.uuid4()}", []
    for first in (0, 80):
        for number in range(first, first + 80):
            store = await tstore.open(url)
            async with store.transaction(tag=f"t{number}", durability="none") as tx:
                await tx.create_group("g", {"number": number})
            if number:
                await store.collect(Keep(newer_than=timedelta(0)))
        store, faults = await open_faulty(url, "r")
        with pytest.raises(NotFound, match="no tag 'mistyped'"):
            await store.snapshot("mistyped")
        with pytest.raises(SnapshotExpired, match=f"tagged 't{number - 40}', was removed"):
            await store.snapshot(f"t{number - 40}")
        counts.append(len(faults.calls))
    assert counts[1] < 1.5 * counts[0]
