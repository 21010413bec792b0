"""Stores on object servers: round trips, packs uploaded in the background, bad networks."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import json
import os
import re
import threading
import uuid
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tests.support import processes
from tests.support.thresholds import Thresholds
from tstore.core.runtime import budget, event_loops
from tstore.core.storage.base import Storage
from tstore.core.storage.connect import connect
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Buffers, Durability, PutMode
from tstore.core.storage.packs import PACK
from tstore.core.storage.remote import RemoteStorage, as_remote
from tstore.core.storage.retry import RetryPolicy
from tstore.core.storage.wrapper import Request, Wrapper
from tstore.errors import (
    CommitOutcomeUnknown,
    Corrupt,
    Denied,
    InvalidArgument,
    Misuse,
    NotFound,
    SnapshotExpired,
    StorageFull,
    TStoreError,
    Unavailable,
)
from tstore.lab.conformance.faults import Chances, Faults

BRISK = RetryPolicy(min_pause=0.001, max_pause=0.02, deadline=30.0)


def anew() -> str:
    return str(uuid.uuid4())


async def open_remote(name: str, *around: Callable[[Storage], Storage]) -> tstore.Store:
    """Open a store in memory under a name, with wrappers around its storage."""
    objects: Storage = MemoryStorage(name)
    for wrap in around:
        objects = wrap(objects)
    return await tstore.open(as_remote(objects, BRISK))


def tree(arrays: int, values: int = 100) -> dict[str, Any]:
    return {f"w{i:04d}": np.full(values, float(i)) for i in range(arrays)}


# ---- round trips


class Rounds(Wrapper):
    """Responds only when each round has the expected number of concurrent requests."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._sizes: list[int] = []
        self._waiting: list[asyncio.Future[None]] = []

    async def around(self, request: Request, call: Any) -> Any:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        assert self._sizes, f"one more request than expected: {request}"
        if len(self._waiting) == self._sizes[0]:
            for waiting in self._waiting:
                waiting.set_result(None)
            self._waiting = []
            del self._sizes[0]
        await turn
        return await call()

    async def expect(self, work: Any, *sizes: int) -> Any:
        """Run work that makes exactly these numbers of requests in its rounds, and return its result."""
        self._sizes = list(sizes)
        async with asyncio.timeout(60):
            result = await work
        assert self._sizes == []
        return result


async def small_commit(store: tstore.Store, path: str) -> None:
    async with store.transaction() as tx:
        await (await tx.create_array(path, (3,), "f4")).write(np.ones(3, "f4"))


async def test_opening_restoring_and_saving_take_few_round_trips(thresholds: Thresholds) -> None:
    thresholds(_RECENTLY=60)  # so that a slow machine makes no difference
    name = anew()
    first = await open_remote(name)
    await tstore.save(first, tree(10, 20_000), step=1)
    rounds = Rounds(MemoryStorage(name))
    storage = RemoteStorage(rounds)
    store = await rounds.expect(tstore.open(storage), 2)  # the marker and the hint
    restored = await rounds.expect(tstore.restore(store), 4, 1)  # the numbers 1, 2 and 4, an archive; the pack
    assert np.array_equal(restored["w0003"], tree(10, 20_000)["w0003"])
    await rounds.expect(
        tstore.restore(store), 3, 1
    )  # the newest record again, the next number, an archive; the pack
    # the same; the pack; the newest record, the next two numbers, an archive; a first look far ahead, also in
    # archives; the record; its archive
    await rounds.expect(tstore.save(store, tree(1, 100_000), step=2), 3, 1, 4, 16 + 9, 1, 1)
    await rounds.expect(small_commit(store, "z"), 3, 1, 1)  # a recent commit has already read the next two numbers
    store = await rounds.expect(tstore.open(storage), 2)
    await rounds.expect(tstore.save(store, tree(2, 100_000), step=3), 4, 4, 1, 1, 16 + 9, 1, 1)


@pytest.mark.parametrize(
    ("commits", "looks"),
    [
        (0, [3 + 1, 16 + 8 + 8 + 7]),  # with each look at records, one at their archive; and far ahead
        (1, [3 + 1]),
        (2, [3 + 1, 1 + 2 + 1]),  # and two above
        (3, [3 + 1, 1 + 2 + 1]),
        (5, [3 + 1, 4 + 1, 3 + 2 + 1 + 1]),  # three between 4 and 8, two above, and the unknown one below 4
        (12, [3 + 1, 4 + 1, 7 + 2 + 4 + 1]),
        (64, [5 + 1]),  # the hint's version, its root, and three above
        (65, [5 + 1]),
        (67, [5 + 1, 1 + 2 + 1]),
        (70, [5 + 1, 4 + 1, 3 + 2 + 1 + 1]),
    ],
)
async def test_opening_a_snapshot_needs_only_the_requests_for_the_newest_version(
    commits: int, looks: list[int]
) -> None:
    name = anew()
    first = await open_remote(name)
    await first.log.ensure_created()
    for i in range(commits):
        await small_commit(first, f"a{i}")
    rounds = Rounds(MemoryStorage(name))
    store = await rounds.expect(tstore.open(RemoteStorage(rounds)), 2)  # the marker and the hint
    assert len((await rounds.expect(store.snapshot(), *looks)).paths()) == commits


async def test_new_commits_are_read_many_records_at_once() -> None:
    name = anew()
    first = await open_remote(name)
    await small_commit(first, "first")
    rounds = Rounds(MemoryStorage(name))
    store = await rounds.expect(tstore.open(RemoteStorage(rounds)), 2)
    await rounds.expect(store.snapshot(), 3 + 1)
    for i in range(40):
        await small_commit(first, f"a{i}")
    # the newest and the next; three more; up to 64 behind it; those between 34 and 66, two above, those below 34
    snapshot = await rounds.expect(store.snapshot(), 2 + 1, 3 + 1, 4 + 1, 31 + 2 + 26 + 1)
    assert snapshot.version == 41


async def test_the_history_is_read_in_growing_batches() -> None:
    name = anew()
    first = await open_remote(name)
    for i in range(84):
        await small_commit(first, f"a{i}")
    rounds = Rounds(MemoryStorage(name))

    async def reopened() -> tstore.Store:
        store = await rounds.expect(tstore.open(RemoteStorage(rounds)), 2)
        # 64, its root and up to 68; up to 128; those between 80 and 96, two above, and the unknown ones below 80
        await rounds.expect(store.log.reader.newest(), 5 + 1, 4 + 1, 15 + 2 + 11 + 1)
        return store

    async def versions(store: tstore.Store) -> list[int]:
        return [commit.version async for commit in store.history()]

    # with one look at their archive each: the newest and the next; far ahead; of the last two, four, … those not
    # known, and from 64 on all are
    assert await rounds.expect(versions(await reopened()), 3, 16 + 9, 11, 33, 22) == list(range(84, 0, -1))
    long_ago = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
    with pytest.raises(NotFound, match="no commit by"):
        await rounds.expect((await reopened()).snapshot(long_ago), 3, 11, 33, 22)
    # those that are known are looked at first, and then one, two, four …
    assert await rounds.expect((await reopened()).outcome("nobody's"), 3, 2, 3, 5, 9, 17, 33) is None
    store = await reopened()
    # the hint; which is the newest; the gaps in the list of records; all records, in order; the root; the list
    # of records, and its end
    assert (await rounds.expect(store.verify(), 1, 6, 5, 29, 1, 1, 65, 1, 21, 1, 1, 1, 1)).ok


async def test_an_abandoned_history_reads_no_further() -> None:
    store = await open_remote(anew())
    for i in range(12):
        await small_commit(store, f"a{i}")
    before = asyncio.all_tasks()
    async with contextlib.aclosing(store.history()) as commits:
        async for commit in commits:
            if commit.version == 8:
                break
    assert asyncio.all_tasks() == before
    reader = await open_remote(store.url.removeprefix("memory://"))
    assert (await anext(reader.history())).version == 12


async def test_verifying_reads_few_long_ranges() -> None:
    store = await open_remote(anew())
    await tstore.save(store, tree(1000, 4096), step=1)
    await tstore.save(store, {"w": np.arange(5.0 * (1 << 20))}, step=2)
    size = 1000 * 4096 * 8 + 40 * (1 << 20)
    reader = await open_remote(store.url.removeprefix("memory://"))
    assert (await reader.verify()).bytes == size
    assert reader.traffic is not None
    packs = [key for key in await reader.log.storage.list("txn/") if "/pack-" in key]
    assert reader.traffic.requests["read"] <= len(packs) + size // PACK


async def test_a_restore_of_many_arrays_reads_few_long_ranges() -> None:
    name = anew()
    store = await open_remote(name)
    arrays = tree(1000, 4096) | {"small chunks": np.arange(250_000.0)}
    async with store.transaction() as tx:
        for path, values in arrays.items():
            array = await tx.create_array(path.replace(" ", "_"), values.shape, "f8", (2048,))
            await array.write(values)
    reader = await open_remote(name)
    before = reader.traffic
    assert before is not None
    restored = await tstore.restore(reader)
    after = reader.traffic
    assert after is not None
    assert all(np.array_equal(values, restored[path.replace(" ", "_")]) for path, values in arrays.items())
    size = sum(v.nbytes for v in arrays.values())
    packs = [key for key in await reader.log.storage.list("txn/") if "/pack-" in key]
    assert after.requests["read"] - before.requests.get("read", 0) <= len(packs) + size // PACK
    assert after.bytes_read - before.bytes_read < 1.1 * size


# ---- packs


async def test_a_save_uploads_packs_in_the_background_and_reads_its_own_writes() -> None:
    store = await open_remote(anew())
    values = np.arange(3 * PACK // 4, dtype="f4").reshape(3, -1)  # three packs
    async with store.transaction() as tx:
        array = await tx.create_array("w", values.shape, "f4", (1, values.shape[1] // 4))
        await array.write(values)
        assert np.array_equal(await array[1:, 5:9].read(), values[1:, 5:9])
        await array[0, :10].write(np.zeros(10, "f4"))
        assert (await array[0, :10].read()).sum() == 0
    values[0, :10] = 0
    assert np.array_equal(await (await (await store.snapshot()).array("w")).read(), values)
    packs = [key for key in await store.log.storage.list("txn/") if "/pack-" in key]
    assert len(packs) >= 3
    assert (await store.verify()).ok


async def test_aborted_uploads_are_removed_and_their_memory_released() -> None:
    store = await open_remote(anew())
    for _ in range(3):
        tx = store.transaction()
        array = await tx.create_array("w", (3, PACK // 4), "f4", (1, PACK // 16))
        await array.write(np.ones((3, PACK // 4), "f4"))
        await tx.abort()
    assert await store.log.storage.list("txn/") == []
    assert_all_memory_is_free()


def assert_all_memory_is_free() -> None:
    """Assert that two threads can claim the whole budget, which would fail if any of it were still claimed."""
    both = threading.Barrier(2, timeout=20)

    def half() -> None:
        budget.acquire(budget.BUDGET // 4)
        both.wait()
        budget.release(budget.BUDGET // 4)

    other = threading.Thread(target=half, daemon=True)
    other.start()
    half()
    other.join()


async def test_an_upload_that_fails_fails_the_commit_and_nothing_is_visible() -> None:
    class Full(Wrapper):
        async def put(self, key: str, data: Any, mode: PutMode, durability: Durability = Durability.FSYNC) -> None:
            if "/pack-" in key:
                raise Denied(f"{key}: no more packs")
            await self.inner.put(key, data, mode)

    store = await open_remote(anew(), Full)
    with pytest.raises(Denied, match="no more packs"):
        await tstore.save(store, tree(3, PACK // 8), step=1)
    assert (await store.snapshot()).version == 0
    assert_all_memory_is_free()


@pytest.mark.parametrize("error", [Denied("expired"), StorageFull("full"), Corrupt("a web page")])
@pytest.mark.parametrize("lands", [False, True])
async def test_a_commit_refused_after_a_lost_response_is_not_a_failure(error: TStoreError, lands: bool) -> None:
    """The request without a response may land late, so the commit is not reported as failed."""

    class Fails(Wrapper):
        tries: ClassVar[list[Any]] = []

        async def put(self, key: str, data: Any, mode: PutMode, durability: Durability = Durability.FSYNC) -> None:
            if not key.startswith("commits/"):
                return await self.inner.put(key, data, mode)
            self.tries.append(lambda: self.inner.put(key, data, mode))
            raise error if len(self.tries) > 1 else Unavailable("lost")

    name = anew()
    store = await open_remote(name, Fails)
    with pytest.raises(CommitOutcomeUnknown, match=str(error)) as caught:
        await tstore.save(store, {"x": np.arange(3)}, step=1)
    if lands:
        await Fails.tries[0]()
    assert await store.outcome(caught.value.transaction) == (1 if lands else None)
    assert await tstore.save(await open_remote(name), {"x": np.arange(4)}, step=2) == (2 if lands else 1)
    assert await tstore.steps(store) == ([1, 2] if lands else [2])


async def test_a_flush_reports_a_failed_upload_of_a_forgotten_writer() -> None:
    class Full(Wrapper):
        async def put(
            self, key: str, data: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
        ) -> None:
            raise StorageFull("no room")

    storage = RemoteStorage(Full(MemoryStorage(anew())))
    pack = storage.writer("txn/a/pack-0", Durability.FSYNC)
    pack.append([b"x"], 1)
    pack.finish()
    ended = pack.upload.future  # type: ignore[union-attr]
    assert isinstance(await asyncio.to_thread(ended.exception), StorageFull)
    del pack, ended
    gc.collect()
    with pytest.raises(StorageFull):
        await storage.flush("txn/a", Durability.FSYNC)


async def test_open_transactions_that_use_all_memory_do_not_block_each_other() -> None:
    name = anew()
    store = await open_remote(name, lambda objects: Faults(objects, latency=0.005))
    values = np.ones((3, 1 << 20), "f4")  # 12 MiB: less than a pack, so that none is full
    open_ones = []
    for i in range(budget.BUDGET // 2 // values.nbytes + 4):
        tx = store.transaction()
        await (await tx.create_array(f"w{i}", values.shape, "f4", (1, 1 << 20))).write(values * i)
        open_ones.append(tx)
    assert (await (await open_ones[0].array("w0")).read()).sum() == 0  # already uploaded, to free memory
    for tx in open_ones:
        await tx.commit()
    restored = await tstore.restore(store)
    assert [restored[f"w{i}"][2, 7] for i in range(len(open_ones))] == list(range(len(open_ones)))


FLAT = """
    import asyncio, json
    import numpy as np
    import tstore
    from tstore.core.storage.memory import MemoryStorage
    from tstore.core.storage.remote import as_remote
    from tstore.core.storage.wrapper import Wrapper

    class Sink(Wrapper):
        async def put(self, key, data, mode, durability):
            await asyncio.sleep(0.4)
            await self.inner.put(key, data if "/pack-" not in key else [b""], mode)

    def peak():
        with open("/proc/self/status") as file:
            return 1024 * int(next(l for l in file if l.startswith("VmHWM")).split()[1])

    async def main():
        store = await tstore.open(as_remote(Sink(MemoryStorage("x"))))
        tree = {f"w{i}": v for i, v in enumerate(np.ones((1 << 27), "f4").reshape(32, 1024, -1))}
        before = peak()
        await tstore.save(store, tree, step=1)
        print(peak() - before)

    asyncio.run(main())
"""


def test_a_save_over_a_slow_network_stays_within_the_byte_budget() -> None:
    assert int(processes.fresh_python(FLAT)) < budget.BUDGET


async def test_a_reader_overtaken_by_a_gc_gets_snapshot_expired() -> None:
    name = anew()
    store = await open_remote(name)
    await tstore.save(store, tree(1, 100_000), step=1)
    snapshot = await store.snapshot()
    await tstore.save(store, {"v": np.arange(100_000.0)}, step=2)
    await store.collect(tstore.Keep(last=1))
    with pytest.raises(SnapshotExpired):
        await (await snapshot.array("w0000")).read()
    pack = next(key for key in await store.log.storage.list("txn/") if "/pack-" in key)
    await store.log.storage.delete(pack)  # not by a gc
    with pytest.raises(Corrupt, match=r"v, chunk .*: its pack txn/.* is missing"):
        await tstore.restore(store)


# ---- the I/O loop


def test_one_session_serves_blocking_calls_and_many_loops() -> None:
    name = anew()

    class Loops(Wrapper):
        seen: set[object] = set()  # noqa: RUF012 - of all of them

        async def around(self, request: Request, call: Any) -> Any:
            self.seen.add(asyncio.get_running_loop())
            return await call()

    storage = as_remote(Loops(MemoryStorage(name)))
    with blocking.open(storage) as store:
        blocking.save(store, tree(5, 10_000), step=1)

    async def restore() -> Any:
        return await tstore.restore(await tstore.open(storage))

    for _ in range(2):
        assert asyncio.run(restore())["w0004"][7] == 4
    assert len(Loops.seen) == 1


async def test_a_cancelled_request_is_cancelled_and_waited_for() -> None:
    began, ended = threading.Event(), threading.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.set()

    task = asyncio.create_task(event_loops.on_io(work()))
    await asyncio.to_thread(began.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_restore_that_is_cancelled_does_not_wait_for_a_server_that_hangs() -> None:
    reached = threading.Event()

    class Hanging(Wrapper):
        async def read(self, key: str, offset: int, buffers: Any, size: int) -> None:
            reached.set()
            await asyncio.Event().wait()

    store = await open_remote(anew(), Hanging)
    await tstore.save(store, tree(2, 10_000), step=1)
    task = asyncio.create_task(tstore.restore(store))
    await asyncio.to_thread(reached.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_io_loop_does_not_wait_for_itself() -> None:
    async def work() -> None:
        with pytest.raises(Misuse):
            event_loops.wait_io(asyncio.sleep(0))
        assert await event_loops.on_io(asyncio.sleep(0, "nested")) == "nested"

    await event_loops.on_io(work())


def test_a_forked_child_has_its_own_loop() -> None:
    store = blocking.open(as_remote(MemoryStorage(anew())))
    blocking.save(store, tree(5, 10_000), step=1)
    tx = store.transaction()
    tx.create_array("unfinished", (100_000,), "f8").write(np.ones(100_000))
    child = os.fork()
    if child == 0:
        ok = False
        try:
            ok = blocking.restore(store)["w0004"][7] == 4
            blocking.save(store, tree(5, 10_001), step=2)
        finally:
            os._exit(0 if ok else 1)
    assert os.waitpid(child, 0)[1] == 0
    tx.commit()  # in the parent, where it is still open
    assert store.snapshot().array("unfinished").read().sum() == 100_000


# ---- a bad network


class World:
    """Hosts that commit to one store, each over its own bad network."""

    def __init__(self, seed: int, chances: Chances) -> None:
        self.name = anew()
        self.acknowledged: dict[str, int] = {}
        self._seed = seed
        self._chances = chances

    async def host(self, number: int) -> tstore.Store:
        faults = Faults(MemoryStorage(self.name), self._chances, jitter=0.002, seed=self._seed * 100 + number)
        return await tstore.open(as_remote(faults, BRISK))

    async def calm(self) -> tstore.Store:
        return await tstore.open(RemoteStorage(MemoryStorage(self.name)))


CHANCES = Chances(throttled=0.04, lost=0.04, unanswered=0.04, late=0.04, repeated=0.04)


@pytest.mark.parametrize("seed", range(2))
async def test_no_acknowledged_commit_is_lost_to_a_bad_network(seed: int) -> None:
    world = World(seed, CHANCES)
    async with (await world.calm()).transaction() as tx:
        await (await tx.create_array("shared", (40,), "i8", (40,))).write(np.zeros(40, "i8"))

    async def work(number: int) -> None:
        store = await world.host(number)
        for turn in range(5):
            tag = f"{number}/{turn}"
            async with store.transaction(tag=tag) as tx:
                array = await tx.create_array(f"h{number}/t{turn}", (3000,), "f8", (1000,))
                await array.write(np.full(3000, 10.0 * number + turn))
                shared = await tx.array("shared")
                await shared[5 * number + turn : 5 * number + turn + 1].write(np.array([number + 1]))
            assert tx.version is not None
            world.acknowledged[tag] = tx.version

    await asyncio.gather(*[work(number) for number in range(8)])
    store = await world.calm()
    assert (await store.verify()).ok
    tags = await store.tags()
    assert tags == world.acknowledged
    snapshot = await store.snapshot()
    shared = await (await snapshot.array("shared")).read()
    assert shared.tolist() == [number + 1 for number in range(8) for _ in range(5)]
    for tag in tags:
        number, turn = map(int, tag.split("/"))
        values = await (await snapshot.array(f"h{number}/t{turn}")).read()
        assert set(values) == {10.0 * number + turn}


async def landed(faults: Faults) -> None:
    """Wait for late and repeated requests."""
    while faults._late:
        await asyncio.wait(faults._late)


@pytest.mark.parametrize("seed", range(4))
async def test_an_unknown_outcome_is_reported_and_learned_later(seed: int) -> None:
    name = anew()
    calm = await tstore.open(RemoteStorage(MemoryStorage(name)))
    faults = Faults(MemoryStorage(name), Chances(0.03, 0.05, 0.05, 0.05, 0.03), seed=seed)
    impatient = RetryPolicy(min_pause=0.001, max_pause=0.001, deadline=0.0, first_deadline=0.0)
    store = tstore.Store(as_remote(faults, impatient), calm.marker, "a")
    outcomes: dict[str, int | None] = {}
    named: list[bool] = []
    for turn in range(60):
        tx = store.transaction()
        try:
            await (await tx.create_array(f"t{turn}", (1000,), "f8")).write(np.full(1000, turn))
            outcomes[tx.id] = await tx.commit()
        except CommitOutcomeUnknown as unknown:
            named.append(unknown.transaction == tx.id)
        except Unavailable:
            outcomes[tx.id] = None
            await tx.abort()
    await event_loops.on_io(landed(faults))
    assert len({v for v in outcomes.values() if v is not None}) > 2
    assert all(named)
    for transaction, version in outcomes.items():
        assert await calm.outcome(transaction) == version
    assert (await calm.verify()).ok


@pytest.mark.parametrize("seed", range(3))
async def test_hosts_save_one_checkpoint_over_a_bad_network_while_another_collects(seed: int) -> None:
    world = World(seed, CHANCES)
    await tstore.save(await world.calm(), tree(2), step=0)

    async def save(number: int) -> None:
        store = await world.host(number)
        for step in range(1, 4):
            await tstore.save(
                store, tree(20, 1000 * step), step=step, host=number, hosts=3, attempt="a", timeout=60
            )

    async def collect() -> None:
        store = await world.host(7)
        for _ in range(3):
            await store.collect(tstore.Keep(last=2))

    await asyncio.gather(*[save(number) for number in range(3)], collect())
    store = await world.calm()
    assert await tstore.steps(store) == [2, 3] or (await tstore.steps(store))[-1] == 3
    restored = await tstore.restore(store)
    assert all(np.array_equal(values, restored[path]) for path, values in tree(20, 3000).items())
    assert (await store.verify()).ok


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/s", "gs://bucket/s", "s3://bucket/s", "abfs://x/y"])
@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "1"])
async def test_the_time_for_retries_is_an_option_of_every_server(url: str, seconds: object) -> None:
    with pytest.raises(InvalidArgument, match=r"retry_timeout=.*expected the seconds"):
        await tstore.open(url, storage_options={"retry_timeout": seconds})


@pytest.mark.parametrize("url", ["memory://x", "file:///x"])
async def test_local_stores_take_no_time_for_retries(url: str) -> None:
    with pytest.raises(InvalidArgument, match="takes no storage_options; got retry_timeout"):
        await tstore.open(url, storage_options={"retry_timeout": 1})


# ---- options from the environment


VARIABLE = "TSTORE_STORAGE_OPTIONS"


async def repeated_for(url: str, options: dict[str, Any] | None = None) -> float:
    """Return for how many seconds a request was repeated to a server that nobody runs."""
    with pytest.raises(Unavailable) as raised:
        await connect(url, options).get("k")
    spent = re.search(rf"repeated for (\S+) s \(.* or {VARIABLE} sets how long\)", str(raised.value))
    return float(spent[1]) if spent else 0.0


async def test_options_come_from_the_environment_for_the_urls_that_begin_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The longest beginning counts, and what is passed counts before all."""
    server = "http://127.0.0.1:9"  # where nobody listens
    none, some = {"retry_timeout": 0}, {"retry_timeout": 0.4}
    monkeypatch.setenv(VARIABLE, json.dumps({f"{server}/a": some, "http://": none, "gs://": {"no": "such"}}))
    for name in ("b", "ab"):
        assert await repeated_for(f"{server}/{name}") == 0.0  # and no error says that it was repeated
    for name in ("a", "a/b/"):
        assert await repeated_for(f"{server}/{name}") >= 0.1
    assert await repeated_for(f"{server}/a", none) < 0.1
    with pytest.raises(InvalidArgument, match=rf"unknown storage_options 'no' \(passed, or in {VARIABLE}\)"):
        connect("gs://bucket")
    assert connect("memory://x").url == "memory://x"


@pytest.mark.parametrize("text", ["{", "[]", '{"gs://": 1}', '{"gs://": "secret"}', '{"gs": {"token": "secret"}}'])
async def test_wrong_options_in_the_environment_are_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InvalidArgument, match=f"^{VARIABLE}: ") as raised:
        connect("gs://bucket")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://checkpoints/run", "s3://checkpoints/run"),
        ("http://user:secret@127.0.0.1:9/x", "http://…"),
        ("memory://x", None),
        ("relative/path", None),
        ("s3://checkpoint/run", None),
    ],
)
def test_a_url_to_which_no_options_apply_is_named(
    url: str, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A beginning that is misspelt applies to nothing."""
    monkeypatch.setenv(VARIABLE, '{"s3://checkpoint": {"key": "secret"}, "gs://": {}}')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(InvalidArgument):
            connect(url)
    expected = f"{VARIABLE} has no options for {shown}: it has only those for s3://checkpoint, gs://"
    assert [str(warning.message) for warning in caught] == ([] if shown is None else [expected])
