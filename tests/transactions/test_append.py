"""Appends: each is whole and exactly once in the array, in the order of the commits, whoever appends meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import tstore
import tstore.sync as blocking
from tests.support import forks, http_server
from tests.support.polling import blocking_until
from tests.support.thresholds import Thresholds
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.remote import RemoteStorage, as_remote
from tstore.core.storage.retry import RetryPolicy
from tstore.core.transactions import appends
from tstore.errors import Conflict, InvalidArgument, Misuse
from tstore.lab.conformance.faults import Chances, Faults


async def made(url: str, length: int, chunk: int = 4, **options: Any) -> tstore.Store:
    """Return a store with the array "a" of this length, whose values are -1."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        array = await tx.create_array("a", (length,), "int32", (chunk,), **options)
        if length:
            await array.write(-1)
    return store


async def appending(
    store: tstore.Store, *parts: npt.ArrayLike
) -> tuple[tstore.Transaction, list[tstore.Appended]]:
    """Return an open transaction that has appended these values one after the other."""
    tx = store.transaction()
    array = await tx.array("a")
    return tx, [await array.append(part) for part in parts]


async def newest(store: tstore.Store) -> list[int]:
    snapshot = await (await tstore.open(store.url, "r")).snapshot()
    values: list[int] = (await (await snapshot.array("a")).read()).tolist()
    return values


@st.composite
def work(draw: st.DrawFn) -> tuple[int, int, int, list[list[int]]]:
    """The axis, the chunk length and the length of an array, and the lengths of the appends by transaction."""
    chunk = draw(st.integers(1, 5))
    lengths = st.one_of(st.sampled_from([0, chunk, 2 * chunk]), st.integers(0, 12))
    by_transaction = st.lists(st.lists(lengths, min_size=1, max_size=3), min_size=1, max_size=4)
    return draw(st.sampled_from([0, 1])), chunk, draw(lengths), draw(by_transaction)


@given(work(), st.sampled_from([None, "lossless"]), st.booleans())
@example((0, 4, 6, [[3], [9, 4], [1, 1, 1]]), None, False)
@example((1, 4, 8, [[4, 2], [8], [5]]), "lossless", True)
async def test_concurrent_appends_are_those_of_numpy_in_the_order_of_the_commits(
    shapes: tuple[int, int, int, list[list[int]]], codecs: str | None, is_shared: bool
) -> None:
    axis, chunk, length, by_transaction = shapes

    def oriented(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values if axis == 0 else values.T

    url = f"memory://{uuid.uuid4()}"
    store = await tstore.open(url)
    expected = np.full((length, 3), -1, "int32")
    async with store.transaction() as tx:
        shape, chunks = (length, 3), (chunk, 2)
        array = await tx.create_array(
            "a", shape[:: 1 - 2 * axis], "int32", chunks[:: 1 - 2 * axis], codecs=codecs, sparse=length == 0
        )
        await array.write(oriented(expected))
    begun = []
    for number, lengths in enumerate(by_transaction):
        tx = (store if is_shared else await tstore.open(url)).transaction()
        array = await tx.array("a")
        parts = [np.full((n, 3), 10 * number + i, "int32") for i, n in enumerate(lengths)]
        appended = [await array.append(oriented(part), axis) for part in parts]
        seen = np.concatenate([expected, *parts])
        assert np.array_equal(await array.read(), oriented(seen))  # this transaction's own, on top of its base
        begun.append((tx, parts, appended))
    versions = await asyncio.gather(*[tx.commit() for tx, _, _ in begun])
    assert len(set(versions)) == len(begun)
    for _, (_, parts, _) in sorted(zip(versions, begun, strict=True), key=lambda item: item[0]):
        expected = np.concatenate([expected, *parts])
    snapshot = await (await tstore.open(url, "r")).snapshot()
    result = await (await snapshot.array("a")).read()
    assert np.array_equal(result, oriented(expected))
    for _, parts, appended in begun:
        for part, handle in zip(parts, appended, strict=True):
            assert np.array_equal(result[handle.region], oriented(part))
    assert (await store.verify()).ok


async def test_moved_values_are_written_in_slabs_and_in_segments(thresholds: Thresholds, url: str) -> None:
    """Many chunks are renumbered or written again, also if their references are in segments."""
    thresholds(_SLAB_BYTES=100, MIN_SEGMENTED=4)
    thresholds(INLINE_BYTES=0)
    store = await made(url, 8)
    first, _ = await appending(store, range(40))  # renumbered
    second, _ = await appending(store, range(100, 151))  # at the end of a partial chunk
    third, _ = await appending(store, range(200, 240))
    for tx in (second, first, third):
        await tx.commit()
    assert await newest(store) == [-1] * 8 + [*range(100, 151), *range(40), *range(200, 240)]
    assert (await store.verify()).ok


async def test_an_append_at_the_end_of_a_chunk_moves_no_bytes(url: str) -> None:
    store = await made(url, 2000, 1000)
    first, _ = await appending(store, np.arange(3000))
    second, [appended] = await appending(store, np.arange(2000))
    await first.commit()
    await second.commit()
    bytes_added = {c.version: c.bytes_added async for c in store.history()}
    assert bytes_added[second.version or 0] == 2000 * 4
    assert appended.region == (slice(5000, 7000),)
    assert second.retries


async def test_the_metadata_of_an_append_does_not_grow_with_the_array(tmp_path: Path) -> None:
    store = await made(str(tmp_path), 5000, 1)
    for _ in range(2):
        tx, _ = await appending(store, [1])
        await tx.commit()
    assert (tmp_path / "commits" / f"{3:020}").stat().st_size < 2000


async def test_an_append_and_writes_to_the_same_array(url: str) -> None:
    """Both remain, in either order, even in the chunk that the append completes."""
    store = await made(url, 6)
    tx, [appended] = await appending(store, [7, 8, 9, 9])
    async with store.transaction() as other:
        await (await other.array("a"))[4:6].write([1, 2])
    await tx.commit()
    assert await newest(store) == [-1] * 4 + [1, 2, 7, 8, 9, 9]
    async with store.transaction() as later:
        array = await later.array("a")
        await array[0].write(5)
        await array[9].write(6)
        tx, _ = await appending(store, [10])
        await tx.commit()
    assert await newest(store) == [5] + [-1] * 3 + [1, 2, 7, 8, 9, 6, 10]
    assert appended.region == (slice(6, 10),)


async def test_writes_and_appends_of_one_group_commit(url: str) -> None:
    store = await made(url, 4)
    begun = [store.transaction() for _ in range(6)]
    for number, tx in enumerate(begun):
        array = await tx.array("a")
        if number % 2:
            await array[number // 2].write(number)
        else:
            await array.append([10 + number])
    versions = await asyncio.gather(*[tx.commit() for tx in begun])
    assert len(set(versions)) >= 3  # no two appends in one version
    values = await newest(store)
    assert values[:4] == [1, 3, 5, -1]
    assert sorted(values[4:]) == [10, 12, 14]


@pytest.mark.parametrize("change", ["shrink", "grow", "delete", "again", "other axis", "last chunk"])
async def test_what_conflicts(url: str, change: str) -> None:
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("a", (6, 6), "int32", (4, 4))).write(0)
    tx = store.transaction()
    array = await tx.array("a")
    if change == "last chunk":  # written whole by this transaction, and then in part by the append
        await array[4:6].write(1)
    else:
        await array.append(np.ones((1, 6), int))
    async with store.transaction() as other:
        theirs = await other.array("a")
        match change:
            case "shrink":
                await theirs.resize((5, 6))
            case "grow":
                await theirs.resize((7, 6))
            case "delete" | "again":
                await other.delete("a")
                if change == "again":
                    await other.create_array("a", (6, 6), "int32", (4, 4), sparse=True)
            case "other axis":
                await theirs.append(np.ones((6, 1), int), axis=1)
            case "last chunk":
                await theirs.append(np.ones((1, 6), int))
    with pytest.raises(Conflict) as raised:
        await tx.commit()
    assert all(path.startswith("a") for path in raised.value.paths)


@pytest.mark.parametrize("first", [0, 1])
async def test_appends_along_two_axes_conflict_with_another_append(url: str, first: int) -> None:
    """The two together are a change of the whole array, which the commit does not move."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("a", (4, 4), "int32", (4, 4))).write(0)
    tx = store.transaction()
    for axis in (first, 1 - first):
        array = await tx.array("a")
        shape = [1 if i == axis else n for i, n in enumerate(array.shape)]
        await array.append(np.ones(shape, int), axis=axis)
    async with store.transaction() as other:
        await (await other.array("a")).append(np.full((1, 4), 2))
    with pytest.raises(Conflict):
        await tx.commit()
    assert (await (await (await store.snapshot()).array("a")).read()).tolist() == [[0] * 4] * 4 + [[2] * 4]


@pytest.mark.parametrize("change", ["write before", "write and read before", "write after", "resize", "create"])
async def test_an_append_beside_other_changes_of_the_array(url: str, change: str) -> None:
    """The values are there, and a concurrent append conflicts as with a resize."""
    store = await made(url, 6)
    tx = store.transaction()
    if change == "create":
        array = await tx.create_array("b", (6,), "int32", (4,))
        await array.write(-1)
    else:
        array = await tx.array("a")
    if change == "write before":
        await array[:2].write(3)
    if change == "write and read before":
        await array[:4].write([3, 3, -1, -1])
        await array.read()
    appended = await array.append([1, 2])
    if change == "write after":
        await array[:2].write(3)
    if change == "resize":
        await array.resize((7,))
    await array.append([5])
    expected = (
        [3 if change.startswith("write") else -1] * 2 + [-1] * 4 + ([1] if change == "resize" else [1, 2]) + [5]
    )
    assert (await array.read()).tolist() == expected
    if change != "create":
        other, _ = await appending(store, [9])
        await other.commit()
        with pytest.raises(Conflict):
            await tx.commit()
        return
    await tx.commit()
    assert appended.region == (slice(6, 8),)
    assert (await (await (await store.snapshot()).array("b")).read()).tolist() == expected


async def test_concurrent_appends_of_one_transaction_follow_each_other(url: str) -> None:
    store = await made(url, 3)
    async with store.transaction() as tx:
        one, other = await tx.array("a"), await tx.array("a")
        handles = await asyncio.gather(*[(one, other)[i % 2].append([i] * 3000) for i in range(6)])
        await (await tx.create_array("b", (1,), "int8")).write(1)
    assert await newest(store) == [-1] * 3 + [i for i in range(6) for _ in range(3000)]
    assert [h.region[0].start for h in handles] == [3 + 3000 * i for i in range(6)]


async def test_a_lossy_codec_encodes_the_original_values(url: str) -> None:
    """Values that are moved to other chunks, in other groups of one scale, are not rounded twice."""
    store = await tstore.open(url)
    rng = np.random.default_rng(0)
    values = np.concatenate([np.ones(15), rng.normal(size=200) * np.exp2(rng.integers(-3, 3, 200))])
    for path in ("expected", "moved"):
        async with store.transaction() as tx:
            codecs = {"format": "e2m3", "block": 16}
            await (await tx.create_array(path, (32,), "float32", (32,), codecs=codecs)).write(1)
    for path in ("expected", "moved"):
        theirs, mine = store.transaction(), store.transaction()
        await (await theirs.array(path)).append([1])
        if path == "moved":
            await (await mine.array(path)).append(values)
        await theirs.commit()
        if path == "expected":
            await (await mine.array(path)).append(values)
        await mine.commit()
    snapshot = await store.snapshot()
    expected, moved = [await (await snapshot.array(path)).read() for path in ("expected", "moved")]
    assert np.array_equal(moved, expected)


async def test_a_serializable_append_has_read_the_shape(url: str) -> None:
    store = await made(url, 4)
    tx = store.transaction(isolation="serializable")
    await (await tx.array("a")).append([1])
    other, _ = await appending(store, [2])
    await other.commit()
    with pytest.raises(Conflict):
        await tx.commit()


async def test_misuse(url: str) -> None:
    store = await made(url, 4)
    array = await (await store.snapshot()).array("a")
    with pytest.raises(Misuse, match="snapshot"):
        await array.append([1])
    with pytest.raises(Misuse, match="several hosts"):
        await (await store.transaction(name="n", host=0, hosts=2, attempt="1").array("a")).append([1])
    tx = store.transaction()
    array = await tx.array("a")
    for values, axis in (([[1]], 0), (1, 0), ([1], 1), ([1], "0"), ([1], True), ([1.5], 0)):
        with pytest.raises(InvalidArgument):
            await array.append(values, axis)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="view"):
        await array[1:].append([1])
    appended = await array.append([1], -1)
    with pytest.raises(Misuse, match="commit"):
        _ = appended.region
    await tx.delete("a")
    await tx.create_array("a", (2, 2), "int32", sparse=True)
    with pytest.raises(Misuse):
        await array.append([1])
    await tx.abort()
    with pytest.raises(Misuse):
        _ = appended.region
    with pytest.raises(Misuse):
        await array.append([1])
    assert await newest(store) == [-1] * 4


@pytest.mark.parametrize("seed", range(4))
async def test_lost_and_repeated_requests_append_once(seed: int) -> None:
    name, rng = f"append-{uuid.uuid4()}", random.Random(seed)
    calm = await tstore.open(RemoteStorage(MemoryStorage(name)))
    async with calm.transaction() as tx:
        await tx.create_array("a", (0,), "int32", (4,))
    parts = [[100 * number + i for i in range(rng.randint(1, 9))] for number in range(6)]

    async def append(number: int) -> int:
        faults = Faults(MemoryStorage(name), Chances(0.05, 0.05, 0.05, 0.05, 0.05), seed=10 * seed + number)
        patient = RetryPolicy(min_pause=0.001, max_pause=0.01, deadline=60)
        tx, _ = await appending(tstore.Store(as_remote(faults, patient), calm.marker, "a"), parts[number])
        return await tx.commit()

    versions = await asyncio.gather(*map(append, range(6)))
    order = sorted(range(6), key=versions.__getitem__)
    values = await (await (await calm.snapshot()).array("a")).read()
    assert values.tolist() == [value for number in order for value in parts[number]]
    assert (await calm.verify()).ok


WRITER = """
import os
import numpy as np
import tstore.sync as tstore
url, token, number = arguments
store = tstore.open(url, storage_options={"token": token} if token else None)
for turn in range(10_000):
    rows = [3, 4, 100][turn % 3]
    with store.transaction() as tx:
        a, note = tx.array("a"), tx.array(f"last/{number}")
        appended = [a.append(np.full((rows, 2), (number, turn))) for _ in range(2)]
        note.write(turn)
    starts = [h.region[0].start for h in appended]
    os.write(out, f"{turn} {rows} {starts[0]} {starts[1]}\\n".encode())
"""


@pytest.mark.parametrize("kind", ["folder", "server"])
def test_processes_killed_at_random_moments_lose_nothing(tmp_path: Path, kind: str) -> None:
    """What was acknowledged is in its region; of each process, the rest is at most its last transaction, whole."""
    rng, writers = random.Random(3), 3
    with (
        http_server.serving(tmp_path / "s") as server,
        forks.forks(WRITER) as processes,
        blocking.open(server.url, storage_options={"token": http_server.WRITE}) as remote,
        blocking.open(tmp_path / "s") as local,
    ):
        store, token = (remote, http_server.WRITE) if kind == "server" else (local, "")
        with store.transaction() as tx:
            tx.create_array("a", (0, 2), "int64", (4, 2))
            for number in range(writers):
                tx.create_array(f"last/{number}", (), "int64").write(-1)
        outs = [tmp_path / f"out-{number}" for number in range(writers)]
        pids = [processes.start(out, store.url, token, number) for number, out in enumerate(outs)]
        for number in rng.sample(range(writers), writers):
            until = 1 + rng.randrange(4)

            def appended(out: Path = outs[number], until: int = until) -> bool:
                store.snapshot().array("a")[-2:].read()  # readers never see a part of an append
                return out.exists() and out.read_text().count("\n") >= until

            blocking_until(appended)
            os.kill(pids[number], signal.SIGKILL)
            assert processes.wait(pids[number]) == -signal.SIGKILL
        snapshot = store.snapshot()
        values, at = snapshot.array("a").read(), 0
        seen: dict[int, list[int]] = {number: [] for number in range(writers)}
        while at < len(values):
            number, turn = values[at]
            rows = 2 * [3, 4, 100][turn % 3]
            assert (values[at : at + rows] == (number, turn)).all()
            seen[number].append(at)
            at += rows
        for number, out in enumerate(outs):
            acknowledged = [list(map(int, line.split())) for line in out.read_text().splitlines()]
            starts = seen[number]
            assert len(starts) - len(acknowledged) in (0, 1)
            assert [values[at][1] for at in starts] == list(range(len(starts)))
            assert int(snapshot.array(f"last/{number}").read()) == len(starts) - 1
            for (_, rows, first, second), start in zip(acknowledged, starts, strict=False):
                assert (first, second) == (start, start + rows)
        assert store.verify().ok


async def test_moved_values_are_read_slab_by_slab(monkeypatch: pytest.MonkeyPatch, thresholds: Thresholds) -> None:
    store, sizes, read = await made(f"memory://{uuid.uuid4()}", 5), [], appends.read_chunks

    async def counted(storage: Any, jobs: Any) -> None:
        sizes.extend(job.out.nbytes for job in jobs)
        await read(storage, jobs)

    thresholds(_SLAB_BYTES=64)
    monkeypatch.setattr(appends, "read_chunks", counted)
    late, _ = await appending(store, list(range(100)))
    early, _ = await appending(store, [7, 8, 9])  # not a multiple of the chunk length
    await early.commit()
    await late.commit()
    assert await newest(store) == [-1] * 5 + [7, 8, 9] + list(range(100))
    assert sum(sizes) == 400
    assert max(sizes) <= 64
