"""Concurrent operations of one transaction, and handles from before a change of an array."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import tstore
from tstore.core.storage.base import PackWriter
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import BufferStream, Durability
from tstore.core.storage.remote import as_remote
from tstore.core.transactions import staged_array
from tstore.errors import Misuse, StorageFull
from tstore.lab.conformance.faults import Faults, open_faulty

BIG = 200_000
"""Number of values of an array that takes several threads and more than one request."""


@pytest.fixture(params=["local", "memory", "remote"])
async def store(request: pytest.FixtureRequest, tmp_path: Any) -> tstore.Store:
    """Return the URL of an empty store; the remote one is on a slow server."""
    if request.param == "remote":
        return await tstore.open(as_remote(Faults(MemoryStorage(uuid.uuid4().hex), latency=0.005)))
    return await tstore.open(tmp_path / "store" if request.param == "local" else f"memory://{uuid.uuid4()}")


async def begun(work: Awaitable[Any]) -> asyncio.Task[Any]:
    """Return the task of an operation that has begun."""
    task = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    return task


async def read(store: tstore.Store, path: str) -> Any:
    return await (await (await store.snapshot()).array(path)).read()


# ---- a commit and the operations before it


def hold_packs(store: tstore.Store, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Let writes wait before their pack; return the event that one waits, and the one that ends the wait."""
    reached, released = threading.Event(), threading.Event()
    writer = store.log.storage.writer

    def held(key: str, durability: Durability) -> PackWriter:
        reached.set()
        released.wait(20)
        return writer(key, durability)

    monkeypatch.setattr(store.log.storage, "writer", held)
    return reached, released


async def test_a_commit_waits_for_pending_writes(store: tstore.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, released = hold_packs(store, monkeypatch)
    tx = store.transaction()
    arrays = [await tx.create_array(f"a{i}", (BIG,), "f8", (BIG // 4,)) for i in range(4)]
    writes = [await begun(a.write(np.full(BIG, float(i)))) for i, a in enumerate(arrays)]
    await asyncio.to_thread(reached.wait, 20)
    commit = await begun(tx.commit())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(w.done() for w in writes)
    released.set()
    await commit
    assert all(w.done() and w.exception() is None for w in writes)
    for i in range(4):
        assert (await read(store, f"a{i}") == i).all()
    assert (await store.verify()).ok


async def test_the_end_of_a_block_waits_for_pending_writes(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        a = await tx.create_array("a", (BIG,), "f8", (BIG // 4,))
        write = await begun(a.write(np.ones(BIG)))
    await write
    assert (await read(store, "a") == 1).all()


async def test_a_pending_first_operation_is_part_of_the_commit(store: tstore.Store) -> None:
    """Neither operation had fixed the base before."""
    tx = store.transaction()
    create = await begun(tx.create_array("a", (4,), "i4"))
    await tx.commit()
    await create
    assert (await store.snapshot()).paths() == ["a"]


async def test_a_second_concurrent_commit_is_misuse(store: tstore.Store) -> None:
    tx = store.transaction()
    results = await asyncio.gather(tx.commit(), tx.commit(), return_exceptions=True)
    assert results[0] == 1
    assert isinstance(results[1], Misuse)
    assert (await store.snapshot()).version == 1


async def test_an_operation_that_begins_after_the_commit_is_misuse(url: str) -> None:
    store, faults = await open_faulty(url)
    tx = store.transaction()
    a = await tx.create_array("a", (4,), "i4", (2,))
    await a.write(1)
    gate = faults.hold("create", "commits/*")
    commit = asyncio.create_task(tx.commit())
    await gate.reached()
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: a.write(2),
        lambda: a[1].write(2),
        a.read,
        lambda: a.resize((8,)),
        lambda: tx.array("a"),
        lambda: tx.create_array("b", (1,), "i4"),
        lambda: tx.create_group("g"),
        lambda: tx.delete("a"),
        tx.paths,
        tx.staging.base,
        tx.abort,
        tx.commit,
        lambda: tx.__aexit__(None, None, None),
    ]
    for call in calls:
        with pytest.raises(Misuse, match="committing"):
            await call()
    gate.release()
    assert await commit == 1
    await tx.abort()  # does nothing after the end
    assert (await read(store, "a")).tolist() == [1] * 4


@pytest.mark.parametrize("operation", ["append", "finish"])
async def test_a_pending_write_that_fails_fails_the_commit(url: str, operation: str) -> None:
    store, faults = await open_faulty(url)
    tx = store.transaction()
    a = await tx.create_array("a", (BIG,), "f8", (BIG // 4,))
    committing = threading.Event()

    def full(message: str) -> StorageFull:
        assert committing.wait(20)  # a write that fails before the commit is not under way any more
        return StorageFull(message)

    faults.fail(operation, "*/pack-*", error=full)
    write = await begun(a.write(np.ones(BIG)))
    commit = await begun(tx.commit())
    committing.set()
    with pytest.raises(Misuse if operation == "append" else StorageFull, match="injected fault"):
        await commit
    assert isinstance((await asyncio.gather(write, return_exceptions=True))[0], StorageFull | None)
    assert (await store.snapshot()).version == 0
    assert await store.log.storage.list("txn/") == []


async def test_a_cancelled_write_leaves_nothing_half_done(
    store: tstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, released = hold_packs(store, monkeypatch)
    tx = store.transaction()
    a = await tx.create_array("a", (BIG,), "f8", (BIG // 4,), sparse=True)
    write = await begun(a.write(np.ones(BIG)))
    await asyncio.to_thread(reached.wait, 20)
    write.cancel()  # its threads still run
    released.set()
    await tx.commit()
    with pytest.raises(asyncio.CancelledError):
        await write
    assert (await read(store, "a") == 0).all()
    assert (await store.verify()).ok


async def test_an_abort_waits_for_pending_writes(store: tstore.Store) -> None:
    tx = store.transaction()
    a = await tx.create_array("a", (BIG,), "f8", (BIG // 4,))
    write = await begun(a.write(np.ones(BIG)))
    await tx.abort()
    assert write.done()
    assert await store.log.storage.list("txn/") == []
    with pytest.raises(Misuse, match="aborted"):
        await a.write(1)


class HeldPacks(MemoryStorage):
    """Writes to a pack wait from `reached` until `released`."""

    def __init__(self) -> None:
        super().__init__(uuid.uuid4().hex)
        self.reached, self.released = threading.Event(), threading.Event()

    def writer(self, key: str, durability: Durability) -> PackWriter:
        pack = super().writer(key, durability)
        append = pack.append

        def held(buffers: BufferStream, size: int) -> int:
            self.reached.set()
            self.released.wait(20)
            return append(buffers, size)

        pack.append = held  # type: ignore[method-assign]
        return pack


@pytest.mark.parametrize("how", ["abort", "commit that is cancelled"])
async def test_no_pack_is_discarded_while_a_thread_writes_it(how: str) -> None:
    storage = HeldPacks()
    store = await tstore.open(storage)
    tx = store.transaction()
    a = await tx.create_array("a", (BIG,), "f8", (BIG // 4,))
    write = await begun(a.write(np.ones(BIG)))
    await asyncio.to_thread(storage.reached.wait, 20)
    end = await begun(tx.abort() if how == "abort" else tx.commit())
    if how != "abort":
        end.cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not end.done()
    assert await storage.list("txn/") != []
    storage.released.set()
    await asyncio.wait([end])
    await write
    assert tx.ended
    assert await storage.list("txn/") == []
    assert (await store.snapshot()).version == 0


async def test_a_commit_that_is_cancelled_while_it_waits_aborts(
    store: tstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, released = hold_packs(store, monkeypatch)
    tx = store.transaction()
    a = await tx.create_array("a", (BIG,), "f8", (BIG // 4,))
    write = await begun(a.write(np.ones(BIG)))
    await asyncio.to_thread(reached.wait, 20)
    commit = await begun(tx.commit())
    commit.cancel()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert write.done()
    assert tx.ended
    assert await store.log.storage.list("txn/") == []
    assert (await store.snapshot()).version == 0


# ---- other operations at once


async def test_parts_written_during_a_read_are_kept(store: tstore.Store) -> None:
    """A read applies patches, while more patches are written."""
    count, size = 64, 1000
    async with store.transaction() as tx:
        await (await tx.create_array("a", (count * size,), "f8", (size,))).write(0)
    async with store.transaction() as tx:
        a = await tx.array("a")
        for chunk in range(count):
            await a[chunk * size].write(1)
        reading, chunk = asyncio.create_task(a.read()), 0
        while not reading.done():
            await a[chunk % count * size + 1 + chunk // count].write(chunk + 2)
            chunk += 1
            await asyncio.sleep(0)
        await reading
        expected = np.zeros((count, size))
        expected[:, 0] = 1
        for i in range(chunk):
            expected[i % count, 1 + i // count] = i + 2
        assert (await a.read() == expected.reshape(-1)).all()
    assert (await read(store, "a") == expected.reshape(-1)).all()


@pytest.mark.parametrize("codecs", [None, "lossless"])
async def test_a_task_reads_what_it_wrote_while_others_write_parts_of_the_same_chunks(
    store: tstore.Store, codecs: str | None
) -> None:
    tasks, turns = 8, 12
    async with store.transaction() as tx:
        a = await tx.create_array("a", (2 * tasks,), "i8", (tasks,), codecs)
        await a.write(-1)

        async def count(element: int) -> None:
            before = await a.read()
            for turn in range(turns):
                await a[element::tasks].write(turn)
                now = await a.read()
                assert now[element::tasks].tolist() == [turn, turn]
                assert (now >= before).all()  # the other tasks never go back
                before = now

        await asyncio.gather(*map(count, range(tasks)))
    assert (await read(store, "a") == turns - 1).all()


async def test_parts_of_a_chunk_that_was_written_whole_since(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        a = await tx.create_array("a", (4,), "i8", (4,))
        for turn in range(3):
            await a[0].write(turn)
            assert (await a.read()).tolist() == [turn, *[turn + 9 if turn else 0] * 3]
            await a.write(turn + 10)
            reads = [asyncio.create_task(a.read())]
            for element in range(1, 4):
                await a[element].write(turn + 10)
                reads.append(asyncio.create_task(a.read()))
                await asyncio.sleep(0)
            assert [(await task).tolist() for task in reads] == [[turn + 10] * 4] * 4


async def test_whole_chunks_written_during_a_read_win_over_parts(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        await (await tx.create_array("a", (BIG,), "f8", (BIG // 8,))).write(0)
    async with store.transaction() as tx:
        a = await tx.array("a")
        await a[1:-1].write(1)
        results = await asyncio.gather(a.read(), a.write(np.full(BIG, 2.0)), a.read())
        assert results[1] is None
        assert (await a.read() == 2).all()
    assert (await read(store, "a") == 2).all()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
@pytest.mark.parametrize("also", ["", "read", "patch"])
async def test_one_commit_has_arrays_written_in_any_order(
    store: tstore.Store, order: tuple[int, ...], also: str
) -> None:
    expected = np.repeat(np.arange(4), 2)
    async with store.transaction() as tx:
        for path in "abc":
            array = await tx.create_array(path, (8,), "int64", chunks=(2,))
            await array[2:4].write(7)  # replaced below
            for chunk in order:
                await array[2 * chunk : 2 * chunk + 2].write(chunk)
            if path == "b" and also == "read":
                assert (await array.read() == expected).all()
            if path == "b" and also == "patch":
                await array[5].write(2)
    assert [(await read(store, path)).tolist() for path in "abc"] == [expected.tolist()] * 3
    async with store.transaction() as tx:
        for chunk in order:
            await (await tx.array("a"))[2 * chunk : 2 * chunk + 2].write(chunk + 1)
        if also:
            await (await tx.array("c"))[5].write(2)
    assert (await read(store, "a")).tolist() == (expected + 1).tolist()
    assert (await store.verify()).ok


async def test_a_resize_during_a_write_makes_the_write_misuse(
    store: tstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write numbered its chunks in the old grid."""
    encoding, release = hold_packs(store, monkeypatch)
    async with store.transaction() as tx:
        a = await tx.create_array("a", (400, 500), "f8", (100, 100), sparse=True)
        write = await begun(a.write(np.ones((400, 500))))
        await asyncio.to_thread(encoding.wait, 60)
        await a.resize((400, 1000))
        release.set()
        with pytest.raises(Misuse, match="resized while"):
            await write
        await a[:, 500:].write(2)
    assert (await read(store, "a") == np.repeat([0, 2], 500)).all()


async def test_a_resize_during_a_read_makes_the_read_misuse(store: tstore.Store) -> None:
    """The read applies patches first."""
    expected = np.ones((400, 1000))
    expected[1:399, 1:499] = 2
    expected[:, 500:] = 3
    async with store.transaction() as tx:
        a = await tx.create_array("a", (400, 500), "f8", (100, 100))
        await a.write(1)
        await a[1:399, 1:499].write(2)
        reading = await begun(a.read())
        other = await tx.array("a")
        await other.resize((400, 1000))
        with pytest.raises(Misuse, match="resized"):
            await reading
        await other[:, 500:].write(3)
        assert (await other.read() == expected).all()
    assert (await read(store, "a") == expected).all()


async def test_concurrent_writes_of_one_array_are_all_kept(store: tstore.Store) -> None:
    rng = np.random.default_rng(0)
    values = rng.random((64, 5000))
    async with store.transaction() as tx:
        a = await tx.create_array("a", (64, 5000), "f8", (4, 1000))
        order = rng.permutation(64)
        await asyncio.gather(*[a[i].write(values[i]) for i in order])
    assert (await read(store, "a") == values).all()


# ---- handles from before a change


async def handles(tx: tstore.Transaction) -> dict[str, tstore.Array]:
    """Return every kind of handle of one array of 8 elements in chunks of 4."""
    whole = await tx.array("a")
    return {
        "another": await tx.array("a"),
        "a view of all": whole[:],
        "a view of a view": whole[2:][1:],
        "an element": whole[5],
        "backwards": whole[::-1],
    }


KINDS = ["another", "a view of all", "a view of a view", "an element", "backwards"]


@pytest.fixture
async def eight(url: str) -> tstore.Store:
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("a", (8,), "i4", (4,))).write(np.arange(8))
    return store


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [3, 12])
async def test_a_handle_from_before_a_resize_is_misuse(eight: tstore.Store, kind: str, shape: int) -> None:
    async with eight.transaction() as tx:
        old = (await handles(tx))[kind]
        await old.read()
        await old.write(old.size)
        a = await tx.array("a")
        expected = (await a.read())[:3]
        await a.resize((shape,))
        for call in (old.read, lambda: old.write(7), old[...].read):
            with pytest.raises(Misuse, match="'a' was resized"):
                await call()
        if kind in ("another", "a view of all"):
            with pytest.raises(Misuse, match="'a' was resized"):
                await old.resize((5,))
        assert (await a[:3].read() == expected).all()  # the handle that was resized
        await a[1:2].write(9)
        assert int(await (await tx.array("a"))[1].read()) == 9
        assert (await a[:3].read()).tolist() == [expected[0], 9, expected[2]]


async def test_values_are_written_in_the_order_and_as_of_the_call(eight: tstore.Store) -> None:
    """A reversed view takes the values in its own order, and the caller's buffer may change after the call."""
    async with eight.transaction() as tx:
        array, part = await tx.array("a"), np.array([10, 11], "i4")
        await array[1:3].write(part)
        part[:] = -1
        await array[:3:-1].write(np.arange(20, 24))
    assert (await (await (await eight.snapshot()).array("a")).read()).tolist() == [0, 10, 11, 3, 23, 22, 21, 20]


async def test_a_part_written_after_a_resize_is_that_of_its_new_chunk(url: str) -> None:
    """Chunk (1, 0) gets the number that chunk (0, 1) had, in which two parts were written."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("a", (2, 8), "i4", (1, 4))).write(0)
    async with store.transaction() as tx:
        array = await tx.array("a")
        await array[0, 0].write(7)
        await array[0, 4].write(1)
        await array[0, 5].write(1)
        await array.read()
        await array.resize((2, 4))
        await array[1, 0].write(5)
        assert (await array.read()).tolist() == [[7, 0, 0, 0], [5, 0, 0, 0]]
    assert (await (await (await store.snapshot()).array("a")).read()).tolist() == [[7, 0, 0, 0], [5, 0, 0, 0]]


async def test_a_resize_to_the_same_shape_changes_nothing(eight: tstore.Store) -> None:
    async with eight.transaction() as tx:
        a = await tx.array("a")
        view = a[2:4]
        await a.resize((8,))
        assert (await view.read()).tolist() == [2, 3]


@pytest.mark.parametrize("committed", [False, True])
async def test_an_array_without_axes_is_resized_to_its_shape(store: tstore.Store, committed: bool) -> None:
    async with store.transaction() as tx:
        scalar = await tx.create_array("scalar", (), "float32")
        await scalar.write(2.5)
        if committed:
            await tx.commit()
            async with store.transaction() as tx:
                await (await tx.array("scalar")).resize(())
        else:
            await scalar.resize(())
    assert await (await (await store.snapshot()).array("scalar")).read() == 2.5


async def test_handles_of_snapshots_stay_valid(eight: tstore.Store) -> None:
    old = await (await eight.snapshot()).array("a")
    view = old[2:4]
    async with eight.transaction() as tx:
        await (await tx.array("a")).resize((3,))
    assert (await view.read()).tolist() == [2, 3]
    assert (await old.read()).tolist() == list(range(8))


# ---- chunks that are rewritten with their patches


async def begun_with_zeros(store: tstore.Store) -> tuple[tstore.Transaction, tstore.Array]:
    """Return a transaction on an array of zeros in two chunks, and the array."""
    async with store.transaction() as tx:
        await (await tx.create_array("a", (8,), "i4", (4,))).write(0)
    tx = store.transaction()
    return tx, await tx.array("a")


async def test_an_older_rewrite_that_ends_later_does_not_replace_a_newer_one(
    store: tstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    rewrite, pending, reached, released = staged_array.write_patched, [True], asyncio.Event(), asyncio.Event()

    async def held(*arguments: Any) -> Any:
        first = bool(pending)
        pending.clear()
        rows = await rewrite(*arguments)
        if first:
            reached.set()
            await released.wait()
        return rows

    monkeypatch.setattr(staged_array, "write_patched", held)
    tx, a = await begun_with_zeros(store)
    await a[0:1].write(1)
    older = asyncio.create_task(a.read())
    await reached.wait()
    await a[1:2].write(2)
    assert (await a.read()).tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    released.set()
    await older
    await tx.commit()
    assert (await read(store, "a")).tolist() == [1, 2, 0, 0, 0, 0, 0, 0]


async def test_a_rewritten_chunk_does_not_replace_one_written_whole_later(store: tstore.Store) -> None:
    tx, a = await begun_with_zeros(store)
    await a[0:1].write(1)
    await a.read()
    await a[0:4].write(2)
    await a[4:5].write(3)
    await tx.commit()
    assert (await read(store, "a")).tolist() == [2, 2, 2, 2, 3, 0, 0, 0]
