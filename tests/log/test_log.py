"""The log of commits under lost, late and failing requests."""

from __future__ import annotations

import asyncio
import contextlib
import tracemalloc
import uuid
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import tstore
from tests.support.forging import place
from tests.support.held_commit import held_commit
from tests.support.thresholds import Thresholds
from tstore.core.format.layout import ROOT_EVERY, commit_key, root_key
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.changes import Changes
from tstore.core.log.group_commit import QueuedCommit
from tstore.core.log.reader import LogReader
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Durability, Entry
from tstore.core.storage.remote import as_remote
from tstore.core.storage.wrapper import Wrapper
from tstore.errors import (
    CommitOutcomeUnknown,
    Conflict,
    Corrupt,
    InvalidArgument,
    NotFound,
    StorageFull,
    Unavailable,
)
from tstore.lab.conformance.faults import Faults, open_faulty
from tstore.service.server import Server

NONE = Durability.NONE


async def lose(url: str, versions: Iterable[int]) -> None:
    """Delete the records of some versions."""
    async with await tstore.open(url) as store:
        for version in versions:
            await store.log.storage.delete(commit_key(version))


def anew() -> str:
    return f"memory://{uuid.uuid4()}"


async def fill(url: str | Path, commits: int) -> None:
    """Make small commits: version v sets element v % 100 of "w" to v."""
    store = await tstore.open(url)
    start = (await store.snapshot()).version
    for version in range(start + 1, start + commits + 1):
        async with store.transaction(f"m{version}", durability="none") as tx:
            if version == 1:
                w = await tx.create_array("w", (100,), "int64", (10,))
                await w.write(0)
            w = await tx.array("w")
            await w[version % 100].write(version)


async def state(url: str | Path) -> tuple[int, list[int]]:
    """Return the newest version and the values of "w" as a new process reads them."""
    snapshot = await (await tstore.open(url, "r")).snapshot()
    return snapshot.version, (await (await snapshot.array("w")).read()).tolist()


def expected(version: int) -> list[int]:
    values = [0] * 100
    for v in range(1, version + 1):
        values[v % 100] = v
    return values


@pytest.mark.parametrize(
    "hint", [None, b"", b"garbage", b"0", b"-3", b"64", b"3", b"71", b"9999999", b"1" * 30, b"1" * 5000, b"\xff"]
)
async def test_the_newest_version_is_found_with_any_hint(hint: bytes | None) -> None:
    url = anew()
    await fill(url, 70)
    storage = (await tstore.open(url)).log.storage
    if hint is None:
        await storage.delete("latest")
    else:
        await storage.replace("latest", hint)
    assert await state(url) == (70, expected(70))
    await fill(url, 1)
    assert await state(url) == (71, expected(71))


async def test_the_hint_and_a_root_are_written_at_every_64th_version() -> None:
    url = anew()
    await fill(url, 130)
    storage = (await tstore.open(url)).log.storage
    assert await storage.list("roots/") == [root_key(64), root_key(128)]
    assert await storage.get("latest") == b"128"
    assert await state(url) == (130, expected(130))


async def test_roots_only_save_time() -> None:
    url = anew()
    await fill(url, 130)
    storage = (await tstore.open(url)).log.storage
    for key in await storage.list("roots/"):
        await storage.delete(key)
        assert await state(url) == (130, expected(130))


async def test_opening_and_following_cost_a_bounded_number_of_reads() -> None:
    url = anew()
    await fill(url, 3 * ROOT_EVERY - 1)
    store, faults = await open_faulty(url, "r")
    await store.snapshot()
    assert faults.count("get", "commits/*") <= ROOT_EVERY + 1  # that of the root below the newest one too
    assert faults.count("head", "commits/*") <= 2 * 8
    assert faults.count("get", "roots/*") <= 2
    before = len(faults.calls)
    await store.snapshot()
    assert len(faults.calls) - before == 4  # the newest record again, the next number, one behind it, an archive
    await fill(url, 2)
    before = len(faults.calls)
    assert (await store.snapshot()).version == 3 * ROOT_EVERY + 1
    assert len(faults.calls) - before <= 10


@pytest.mark.parametrize("kind", ["memory", "served"])
async def test_the_gallop_ends_at_the_newest(kind: str) -> None:
    memory = MemoryStorage(str(uuid.uuid4()))
    storage = as_remote(memory) if kind == "served" else memory
    for version in range(1, 140):
        await storage.create(commit_key(version), b"a record", NONE)
        if version % 11 == 1 or version % ROOT_EVERY < 4:
            for hint in (0, max(0, version - 70), version - 1, version + 1):
                assert await LogReader(storage, hint).newest() == version


async def started(url: str) -> tuple[tstore.Store, Faults, tstore.Transaction]:
    """Return a store with one commit, its faulty storage, and a transaction that is ready to commit."""
    await fill(url, 1)
    store, faults = await open_faulty(url)
    tx = store.transaction("mine")
    w = await tx.array("w")
    await w[50].write(99)
    return store, faults, tx


async def messages(url: str) -> list[str]:
    return [c.message async for c in (await tstore.open(url)).history()][::-1]


async def test_a_commit_is_recognised_after_a_lost_reply() -> None:
    url = anew()
    store, faults, tx = await started(url)
    faults.lose_reply("create", "commits/*")
    assert await tx.commit() == tx.version == 2
    assert await messages(url) == ["m1", "mine"]
    assert await store.outcome(tx.id) == 2


async def test_an_invalid_record_fails_alone_among_those_that_share_one() -> None:
    url = anew()
    await fill(url, 1)
    log = (await tstore.open(url)).log

    def enqueued(path: str, time: float) -> QueuedCommit:
        group = (path, b'{"zarr_format":3,"node_type":"group"}', True, (ChunkTable.from_rows([]),))
        manifest = Manifest.from_nodes([group])
        record = Record(uuid.uuid4().hex, 1, time, manifests=(manifest,), durable=False)

        async def unchanged(newer: Any) -> Record:
            return record

        return log.enqueue(record, unchanged, NONE, changes=Changes.from_record(record, [manifest]))

    commits = [enqueued(path, float("nan") if path == "b" else 0.0) for path in "abcd"]
    outcomes = await asyncio.gather(*[commit.outcome() for commit in commits], return_exceptions=True)
    assert isinstance(outcomes[1], InvalidArgument)
    assert sorted(v for v in outcomes if isinstance(v, int)) == [2, 3, 4]
    assert sorted((await (await tstore.open(url)).snapshot()).tree.nodes) == ["a", "c", "d", "w"]


@pytest.mark.parametrize("odd", [None, 5, b"x", "\ud800", "x" * (1 << 17)])
async def test_an_odd_transaction_id_has_no_outcome(odd: Any) -> None:
    store, _, _ = await started(anew())
    with pytest.raises(InvalidArgument, match="transaction"):
        await store.outcome(odd)


async def test_the_outcome_of_a_transaction_is_its_first_commit() -> None:
    """A client of a server may commit an id again that is older than those that the server remembers."""
    store, _, tx = await started(anew())
    assert await tx.commit() == 2
    await fill(store.url, 3)
    again = msgspec.structs.replace(await store.log.reader.record(2), base=5, message="forged")
    await place(store.log.storage, 6, encode(again))
    assert await store.outcome(tx.id) == 2
    assert await (await tstore.open(store.url)).outcome(tx.id) == 2
    await store.log.storage.delete(commit_key(1))
    await store.log.storage.create(commit_key(1), b"damaged", NONE)
    store = await tstore.open(store.url)
    assert await store.outcome(tx.id) == 2
    with pytest.raises(Corrupt):
        await store.outcome("unknown")


async def test_a_lost_request_is_sent_again_above_a_void_record() -> None:
    url = anew()
    store, faults, tx = await started(url)
    faults.fail("create", "commits/*")
    assert await tx.commit() == 3
    assert await messages(url) == ["m1", "mine"]  # the void at 2 is no commit
    assert await store.outcome(tx.id) == 3
    assert (await state(url))[0] == 3
    assert (await store.verify()).ok
    await fill(url, 2)
    assert await state(url) == (5, [0, 1, 0, 0, 4, 5, *[0] * 44, 99, *[0] * 49])


async def test_a_request_that_lands_late_changes_nothing() -> None:
    url = anew()
    _, faults, tx = await started(url)
    faults.postpone("create", "commits/*")
    assert await tx.commit() == 3
    [late] = await faults.do_postponed()
    assert isinstance(late, tstore.errors.AlreadyExists)
    assert await messages(url) == ["m1", "mine"]


async def test_a_request_that_lands_before_its_void_is_the_commit() -> None:
    url = anew()
    _, faults, tx = await started(url)
    faults.postpone("create", "commits/*")
    void = faults.hold("create", "commits/*")
    commit = asyncio.create_task(tx.commit())
    await void.reached()
    assert await faults.do_postponed() == [None]
    void.release()
    assert await commit == 2
    assert await messages(url) == ["m1", "mine"]


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("operation", ["get", "create"])
async def test_a_repeated_commit_that_fails_does_not_deny_the_first_one(
    operation: str, exists: bool, thresholds: Thresholds
) -> None:
    """The first one exists, or its request may land later; the transaction can be committed a third time."""
    url = anew()
    thresholds(_RECENTLY=0.0)  # each commit looks for newer ones
    _, faults, tx = await started(url)
    (faults.lose_reply if exists else faults.postpone)("create", "commits/*")
    faults.fail("get", commit_key(2), nth=2)
    with pytest.raises(CommitOutcomeUnknown):
        await tx.commit()
    faults.fail(operation, "commits/*", error=Unavailable if operation == "get" else StorageFull)
    if exists and operation == "create":
        assert await tx.commit() == 2
        return
    with pytest.raises(CommitOutcomeUnknown, match="injected fault"):
        await tx.commit()
    await faults.do_postponed()
    assert await tx.commit() == tx.version == 2
    assert await messages(url) == ["m1", "mine"]


async def test_commits_that_shared_a_record_are_not_made_twice_if_they_are_repeated_together() -> None:
    store, faults = await open_faulty(anew())
    async with store.transaction() as tx:
        for name in ("a", "b"):
            await tx.create_array(name, (0,), "i4", (2,))
    both = [store.transaction() for _ in range(2)]
    for tx, name in zip(both, ("a", "b"), strict=True):
        await (await tx.array(name)).append(np.array([1]))
    faults.lose_reply("create", commit_key(2))
    faults.fail("get", commit_key(2))
    results = await asyncio.gather(*[tx.commit() for tx in both], return_exceptions=True)
    assert [type(result) for result in results] == [CommitOutcomeUnknown, CommitOutcomeUnknown]
    assert await asyncio.gather(*[tx.commit() for tx in reversed(both)]) == [2, 2]
    assert (await store.snapshot()).version == 2


async def test_a_repeated_commit_that_is_cancelled_can_be_repeated() -> None:
    url = anew()
    store, faults, tx = await started(url)
    faults.lose_reply("create", "commits/*")
    faults.fail("get", commit_key(2), nth=2)
    with pytest.raises(CommitOutcomeUnknown):
        await tx.commit()
    async with held_commit(faults, store.transaction().commit()):
        repeated = asyncio.create_task(tx.commit())  # waits for its turn
        await asyncio.sleep(0)
        repeated.cancel()
        with pytest.raises(asyncio.CancelledError):
            await repeated
    assert await tx.commit() == tx.version == 2


async def test_another_commit_takes_the_version_while_the_response_is_awaited() -> None:
    url = anew()
    _, faults, tx = await started(url)
    faults.postpone("create", "commits/*")
    void = faults.hold("create", "commits/*")
    commit = asyncio.create_task(tx.commit())
    await void.reached()
    await fill(url, 1)
    void.release()
    assert await commit == 3
    [late] = await faults.do_postponed()
    assert isinstance(late, tstore.errors.AlreadyExists)
    assert await messages(url) == ["m1", "m2", "mine"]
    assert (await state(url))[1][:3] == [0, 1, 2]
    assert (await state(url))[1][50] == 99


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("silent", ["get", "create"])
async def test_when_nothing_can_be_learned_the_outcome_is_unknown(landed: bool, silent: str) -> None:
    url = anew()
    store, faults, tx = await started(url)
    if landed and silent == "create":
        faults.lose_reply("create", "commits/*", times=5)
        assert await tx.commit() == 2
        return
    (faults.lose_reply if landed else faults.fail)("create", "commits/*", times=5)
    if silent == "get":
        faults.fail("get", commit_key(2), nth=2, times=5)
    before = await faults.inner.list("txn/")
    with pytest.raises(CommitOutcomeUnknown, match=tx.id) as caught:
        await tx.commit()
    assert caught.value.transaction == tx.id
    assert await faults.inner.list("txn/") == before  # nothing was deleted
    faults.clear_rules()
    assert await store.outcome(tx.id) == (2 if landed else None)
    assert await messages(url) == (["m1", "mine"] if landed else ["m1"])


async def test_a_commit_that_landed_but_could_not_be_synced_is_no_failure() -> None:
    url = anew()
    store, faults, tx = await started(url)
    faults.lose_reply("create", "commits/*")
    faults.fail("flush", "commits")
    with pytest.raises(CommitOutcomeUnknown, match=tx.id):
        await tx.commit()
    assert await store.outcome(tx.id) == 2


async def test_a_commit_that_landed_before_its_void_but_could_not_be_read_is_no_failure(
    thresholds: Thresholds,
) -> None:
    url = anew()
    thresholds(_RECENTLY=0.0)
    store, faults, tx = await started(url)
    faults.postpone("create", "commits/*")
    void = faults.hold("create", "commits/*")
    faults.fail("get", commit_key(2), nth=3)
    commit = asyncio.create_task(tx.commit())
    await void.reached()
    assert await faults.do_postponed() == [None]
    void.release()
    with pytest.raises(CommitOutcomeUnknown, match=tx.id):
        await commit
    assert await store.outcome(tx.id) == 2


async def test_a_failed_create_is_an_error_and_leaves_nothing() -> None:
    url = anew()
    store, faults, tx = await started(url)
    faults.fail("create", "commits/*", error=StorageFull)
    with pytest.raises(StorageFull):
        await tx.commit()
    assert await state(url) == (1, expected(1))
    assert await store.outcome(tx.id) is None


@pytest.mark.parametrize(
    ("operation", "pattern"),
    [("create", "roots/*"), ("replace", "latest"), ("get", "commits/*63"), ("get", "roots/*")],
)
async def test_a_failure_after_the_commit_does_not_fail_it(operation: str, pattern: str) -> None:
    url = anew()
    await fill(url, 63)
    store, faults = await open_faulty(url)
    tx = store.transaction()
    w = await tx.array("w")
    await w[64].write(64)
    await store.snapshot()  # looks for newer commits, so that the commit need not
    faults.fail(operation, pattern, times=100)
    assert await tx.commit() == 64
    faults.clear_rules()
    await fill(url, 3)
    assert await state(url) == (67, expected(67))


async def test_two_finishers_of_a_root_write_the_same() -> None:
    url = anew()
    await fill(url, 63)
    store, faults = await open_faulty(url)
    tx = store.transaction()
    await (await tx.array("w"))[64].write(64)
    root = faults.hold("create", "roots/*")
    commit = asyncio.create_task(tx.commit())
    await root.reached()
    mine = (await tstore.open(url)).log.reader
    await faults.inner.create(root_key(64), await the_root(mine, 64), NONE)
    root.release()
    assert await commit == 64
    assert await state(url) == (64, expected(64))


async def the_root(log: LogReader, version: int) -> bytes:
    return (await log.root(await log.tree(version))).data


async def test_a_long_lived_process_keeps_its_tree_small() -> None:
    url = anew()
    await fill(url, 1)
    store = await tstore.open(url)
    for version in range(2, 200):
        async with store.transaction(durability="none") as tx:
            await (await tx.array("w"))[version % 100].write(version)
    tree = (await store.snapshot()).tree
    assert len(tree.nodes["w"].tables) <= ROOT_EVERY
    assert await state(url) == (199, expected(199))


async def test_a_record_is_read_once_and_the_newest_with_each_look_for_others() -> None:
    url = anew()
    await fill(url, 5)
    store, faults = await open_faulty(url)
    for _ in range(3):
        await store.snapshot()
        assert [c.version async for c in store.history()] == [5, 4, 3, 2, 1]
    assert [faults.count("get", commit_key(v)) for v in range(1, 6)] == [1, 1, 1, 1, 6]


async def test_missing_versions_and_tags_are_named() -> None:
    url = anew()
    await fill(url, 2)
    store = await tstore.open(url)
    async with store.transaction(tag="good"):
        pass
    for at in (4, -1, "bad", "1"):
        with pytest.raises(NotFound, match=r"newest is 3|its tags are: good"):
            await store.snapshot(at)
    assert (await store.snapshot(0)).paths() == []
    assert (await store.snapshot("good")).version == 3


@pytest.mark.parametrize("operation", ["head", "get", "list"])
async def test_a_storage_that_does_not_respond_is_unavailable(operation: str) -> None:
    url = anew()
    await fill(url, 3)
    store, faults = await open_faulty(url)
    faults.fail(operation, "*", times=1000)
    with pytest.raises(Unavailable):
        await store.verify()
    faults.clear_rules()
    assert (await store.verify()).ok


@pytest.mark.parametrize("where", ["memory", "folder"])
@pytest.mark.parametrize("hole", [1, 4, 8])
async def test_a_hole_is_told_by_the_history_a_verification_and_gc(hole: int, where: str, tmp_path: Path) -> None:
    """Also directly below the newest version, and a gc then deletes nothing."""
    url = anew() if where == "memory" else str(tmp_path / "store")
    await fill(url, 9)
    store = await tstore.open(url)
    await store.log.storage.delete(commit_key(hole))
    keys = sorted(await store.log.storage.list(""))
    damaged = await tstore.open(url)
    with pytest.raises(tstore.errors.Corrupt, match=commit_key(hole)):
        _ = [commit async for commit in damaged.history()]
    [fault] = (await damaged.verify()).faults
    assert commit_key(hole) in fault
    with pytest.raises(tstore.errors.Corrupt, match=commit_key(hole)):
        await damaged.collect(tstore.Keep(last=1), abandoned=timedelta(0))
    assert sorted(await store.log.storage.list("")) == keys


@pytest.mark.parametrize("count", [1, 2, 3, 5])
async def test_a_gap_in_the_log_is_not_filled(count: int, tmp_path: Path) -> None:
    """A new store finds the records above a gap that is no longer than they are, before its first commit."""
    url = str(tmp_path / "store")
    await fill(url, 3 + 2 * count)
    await lose(url, range(4, 4 + count))
    records = sorted((tmp_path / "store" / "commits").iterdir())
    with pytest.raises(Corrupt, match=commit_key(4)):
        await tstore.save(url, {"x": np.arange(3)}, 9)
    with pytest.raises(Corrupt, match=commit_key(4)):
        _ = [commit async for commit in (await tstore.open(url)).history()]
    assert sorted((tmp_path / "store" / "commits").iterdir()) == records


@pytest.mark.parametrize("where", ["memory", "folder", "server"])
@pytest.mark.parametrize("lost", [(4, 5), (5,), (3, 4, 5)])
async def test_readers_of_the_newest_version_see_a_short_gap(
    where: str, lost: tuple[int, ...], tmp_path: Path
) -> None:
    """Versions below the gap can be read by number."""
    url = anew() if where == "memory" else str(tmp_path / "store")
    await fill(url, 8)
    await lose(url, lost)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server(url)) if where == "server" else None
        store = await stack.enter_async_context(await tstore.open(server.url if server else url, "r"))
        for read in (store.snapshot, store.tags, lambda: tstore.steps(store)):
            with pytest.raises(Corrupt, match=f"{commit_key(lost[0])} is missing, though later commits exist"):
                await read()
        assert (await store.snapshot(lost[0] - 1)).version == lost[0] - 1


async def test_only_the_first_commit_of_a_store_looks_ahead() -> None:
    url = anew()
    store, faults = await open_faulty(url)
    heads = []
    for i in range(3):
        before = faults.count("head", "commits/*")
        async with store.transaction() as tx:
            await tx.create_group(f"g{i}")
        heads.append(faults.count("head", "commits/*") - before)
    assert heads[0] >= 16 > heads[1] == heads[2]


async def test_a_log_without_a_hint_is_read_from_its_first_record_at_once() -> None:
    """The tree needs the records, so they are not probed before they are read."""
    url = anew()
    await fill(url, 5)
    store, faults = await open_faulty(url)
    assert (await store.snapshot()).version == 5
    read = [c.key for c in faults.calls if c.operation == "get" and c.key.startswith("commits/")]
    probed = [c.key for c in faults.calls if c.operation == "head" and c.key.startswith("commits/")]
    assert read == [commit_key(version) for version in range(1, 7)]
    assert probed == [commit_key(version) for version in (7, 8, 9)]


async def test_tasks_that_need_the_newest_version_at_once_read_it_once(tmp_path: Path) -> None:
    url = tmp_path / "s"
    async with await tstore.open(url) as store:
        for i in range(20):
            async with store.transaction() as tx:
                await (await tx.create_array(f"a{i}", (4,), "f4")).write(i)
    readers, faults = await open_faulty(url, "r")
    snapshots = await asyncio.gather(*(readers.snapshot() for _ in range(50)))
    assert {snapshot.version for snapshot in snapshots} == {20}
    assert faults.count("get", "commits/*") <= 2 * 20
    async with await tstore.open(url) as store, store.transaction() as tx:
        await (await tx.array("a3")).write(7)
    array = await (await readers.snapshot()).array("a3")
    assert (await array.read()).tolist() == [7] * 4


async def test_a_stale_size_is_no_hole() -> None:
    """Some storage answers a `head` from a cache that is older than the object."""

    class StaleHeads(Wrapper):
        async def head(self, key: str) -> Entry | None:
            return None if key == commit_key(6) else await super().head(key)

    name = str(uuid.uuid4())
    await fill(f"memory://{name}", 7)
    assert await LogReader(StaleHeads(MemoryStorage(name))).newest() == 5  # the search probes 4, 8, 6 and 5
    assert await LogReader(StaleHeads(MemoryStorage(name))).checked_newest() == 7
    store = await tstore.open(StaleHeads(MemoryStorage(name)), "r")
    assert (await store.snapshot(6)).version == 6


async def test_long_records_are_held_one_at_a_time() -> None:
    """Eight records take 2.1 MB each."""
    url = anew()
    async with await tstore.open(url) as store:
        for _ in range(8):
            async with store.transaction(metadata={"lists": [[]] * 30_000}, durability="none"):
                pass
    for kind in ("snapshot", "history"):
        store = await tstore.open(url)
        tracemalloc.start()
        try:
            if kind == "snapshot":
                assert (await store.snapshot()).version == 8
            else:
                assert len([commit.version async for commit in store.history()]) == 8
            assert tracemalloc.get_traced_memory()[1] < 12 << 20, kind
        finally:
            tracemalloc.stop()


async def test_commits_during_a_verification_are_no_faults() -> None:
    url = anew()
    await fill(url, 3)
    store, faults = await open_faulty(url)
    listing = faults.hold("list", "commits/*")
    verified = asyncio.create_task(store.verify())
    await listing.reached()
    await fill(url, 2)
    listing.release()
    assert (await verified).faults == []
    listing = faults.hold("list", "commits/*")
    verified = asyncio.create_task(store.verify())
    await listing.reached()
    await fill(url, 3)
    await faults.inner.delete(commit_key(7))
    listing.release()
    [fault] = (await verified).faults
    assert commit_key(7) in fault


async def test_a_damaged_record_fails_only_operations_that_need_it() -> None:
    url = anew()
    await fill(url, 5)
    store = await tstore.open(url)
    data = bytearray(await store.log.storage.get(commit_key(4)))
    data[20] ^= 1
    await store.log.storage.delete(commit_key(4))
    await store.log.storage.create(commit_key(4), bytes(data), NONE)
    fresh = await tstore.open(url)
    with pytest.raises(Corrupt, match=commit_key(4)):
        await fresh.snapshot()
    assert (await (await (await fresh.snapshot(3)).array("w")).read()).tolist() == expected(3)


async def test_a_conflict_is_final_though_replies_are_lost() -> None:
    url = anew()
    await fill(url, 1)
    store, faults = await open_faulty(url)
    first, second = store.transaction(), store.transaction()
    for tx in (first, second):
        await (await tx.array("w"))[0:10].write(np.arange(10))
    faults.lose_reply("create", "commits/*", times=10)
    assert await first.commit() == 2
    with pytest.raises(Conflict) as caught:
        await second.commit()
    assert caught.value.paths == ["w, chunk (0,)"]


@pytest.mark.parametrize("where", ["memory", "folder"])
async def test_a_hole_above_what_an_open_store_knows_is_not_filled(where: str, tmp_path: Path) -> None:
    """The store has looked for later records before its first commit; then others commit, and a record is lost."""
    url = anew() if where == "memory" else str(tmp_path / "store")
    await fill(url, 2)
    store = await tstore.open(url)
    async with store.transaction():
        pass
    await fill(url, 2)
    await lose(url, [4])
    with pytest.raises(Corrupt, match=commit_key(4)):
        await store.snapshot()
    for _ in range(2):
        with pytest.raises(Corrupt, match=commit_key(4)):
            async with store.transaction():
                pass
    assert commit_key(4) not in await store.log.storage.list("commits/")


async def test_a_tree_may_be_evicted_while_a_root_is_read() -> None:
    """Readers of one store use many versions at once, but only a few trees are cached."""
    url = f"memory://{uuid.uuid4()}"
    store, faults = await open_faulty(url)
    for step in range(ROOT_EVERY + 2):
        await tstore.save(store, {"x": step}, step)
    await store.log.storage.delete(root_key(ROOT_EVERY))
    reader, faults = await open_faulty(url, "r")
    await reader.log.reader.tree(1)
    gate = faults.hold("get", root_key(ROOT_EVERY))
    late = asyncio.create_task(reader.log.reader.tree(ROOT_EVERY + 1))
    await gate.reached()
    for version in range(2, 8):
        await reader.log.reader.tree(version)
    gate.release()
    assert (await late).version == ROOT_EVERY + 1
