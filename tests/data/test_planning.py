"""What a read would read: `explain` tells just what `read` then asks of the storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
import tstore.sync
from tstore.core.storage.base import PackReader
from tstore.core.storage.local.store import LocalStorage
from tstore.errors import InvalidArgument, NotFound

Range = tuple[str, int, int]

VALUES = np.random.default_rng(5).integers(0, 1 << 12, (700, 300), np.int32)
CODECS: dict[str, Any] = {"raw": None, "lossless": "lossless", "short chunks": None, "long chunks": None}
CHUNKS = {"raw": (100, 90), "lossless": (100, 90), "short chunks": (7, 30), "long chunks": (700, 290)}
VIEWS = {
    "whole": np.s_[:],
    "rows": np.s_[100:200],
    "a box": np.s_[150:420, 33:190],
    "steps": np.s_[::-7, ::50],
    "an element": np.s_[333, 222],
    "nothing": np.s_[5:5],
    "points": np.s_[[3, 650, 650, 12], [299, 0, 1, 7]],
    "a mask": np.s_[np.arange(700) % 300 == 5],
}


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Range]:
    """The ranges that are read from packs."""
    seen: list[Range] = []
    reader = LocalStorage.reader

    class Recorded:
        def __init__(self, inner: PackReader, key: str) -> None:
            self._inner, self._key = inner, key

        def read_into(self, offset: int, buffers: Any, size: int) -> None:
            seen.append((self._key, offset, size))
            self._inner.read_into(offset, buffers, size)

    monkeypatch.setattr(LocalStorage, "reader", lambda self, key: Recorded(reader(self, key), key))
    return seen


@pytest.mark.parametrize("kind", CODECS)
async def test_a_plan_is_what_a_read_does(kind: str, tmp_path: Path, requests: list[Range]) -> None:
    store = await tstore.open(tmp_path)
    async with store.transaction() as tx:
        made = await tx.create_array("a", VALUES.shape, "i4", CHUNKS[kind], codecs=CODECS[kind])
        await made.write(VALUES)
        for view in VIEWS.values():  # before the commit
            plan, _ = await made[view].explain(), requests.clear()
            assert np.array_equal(await made[view].read(), VALUES[view])
            assert sorted(requests) == sorted(map(tuple, plan.requests))
    array = await (await store.snapshot()).array("a")
    for name, view in VIEWS.items():
        requests.clear()
        plan = await array[view].explain()
        assert requests == []
        assert np.array_equal(await array[view].read(), VALUES[view])
        assert sorted(requests) == sorted(map(tuple, plan.requests)), name
        assert plan.bytes_read == sum(size for *_, size in requests)
        assert plan.bytes_wanted == VALUES[view].nbytes
        counts = [-(-n // c) for n, c in zip(VALUES.shape, CHUNKS[kind], strict=True)]
        rows, columns = np.broadcast_arrays(*(np.indices(VALUES.shape, sparse=True)))
        numbers = rows[view] // CHUNKS[kind][0] * counts[1] + columns[view] // CHUNKS[kind][1]
        assert plan.chunks == sorted(set(np.asarray(numbers).reshape(-1).tolist())), name


async def test_a_plan_of_a_long_chunk_has_only_blocks_of_it(tmp_path: Path, requests: list[Range]) -> None:
    store, values = await tstore.open(tmp_path), np.arange(3 << 20)
    async with store.transaction() as tx:
        await (await tx.create_array("a", values.shape, "i8", values.shape)).write(values)
    array = await (await store.snapshot()).array("a")
    plan = await array[1 << 20 : (1 << 20) + 5].explain()
    assert plan.bytes_read <= 1 << 20
    requests.clear()
    assert (await array[1 << 20 : (1 << 20) + 5].read()).tolist() == values[1 << 20 : (1 << 20) + 5].tolist()
    assert requests == list(map(tuple, plan.requests))


async def test_a_long_plan_prints_less_than_a_screen(tmp_path: Path) -> None:
    store = await tstore.open(tmp_path)
    async with store.transaction() as tx:
        made = await tx.create_array("a", (1 << 20,), "i4", (1 << 10,), sparse=True)
        await made.write(np.arange(1 << 20))
    array = await (await store.snapshot()).array("a")
    plan = await array[:: 1 << 18].explain()
    assert plan.bytes_wanted == 16
    assert str(plan).startswith(
        f"{plan.bytes_read:,} bytes in {len(plan.requests)} requests, of 4 chunks, for 16 "
    )
    assert len(str(await array[::3].explain()).splitlines()) < 10


async def test_sparse_chunks_need_no_request_and_dense_ones_are_missed(tmp_path: Path) -> None:
    store = await tstore.open(tmp_path)
    async with store.transaction() as tx:
        await tx.create_array("sparse", (100,), "i4", (10,), sparse=True)
        await tx.create_array("dense", (100,), "i4", (10,))
    snapshot = await store.snapshot()
    plan = await (await snapshot.array("sparse")).explain()
    assert (plan.chunks, plan.requests, plan.bytes_read, plan.bytes_wanted) == ([], [], 0, 400)
    with pytest.raises(NotFound, match="never written"):
        await (await snapshot.array("dense")).explain()


async def test_many_views_are_read_together(tmp_path: Path, requests: list[Range]) -> None:
    store = await tstore.open(tmp_path)
    async with store.transaction() as tx:
        for number in range(100):
            made = await tx.create_array(f"a{number:02}", (40, 50), "f4", (40, 25))
            await made.write(np.full((40, 50), number))
    snapshot = await store.snapshot()
    arrays = [await snapshot.array(path) for path in snapshot.paths()]
    requests.clear()
    values = await snapshot.read_many([array[number % 40, ::-1] for number, array in enumerate(arrays)])
    assert [value.tolist() for value in values] == [[float(number)] * 50 for number in range(100)]
    assert len(requests) < 10
    assert await snapshot.read_many([]) == []
    scalars = await snapshot.read_many([arrays[3][1, 2], arrays[4].isel(), arrays[5][None, :2, 1]])
    assert [value.shape for value in scalars] == [(), (40, 50), (1, 2)]
    with pytest.raises(InvalidArgument, match="read it with its own snapshot"):
        await snapshot.read_many([arrays[0], await (await store.snapshot()).array("a01")])


async def test_short_gaps_are_read_with_their_neighbours_and_long_ones_are_not(
    tmp_path: Path, requests: list[Range]
) -> None:
    store = await tstore.open(tmp_path)
    gap, values = store.log.storage.tuning.gap, np.arange(1 << 20)
    async with store.transaction() as tx:
        await (await tx.create_array("short", (8, gap // 16), "i8", (1, gap // 16))).write(1)
        await (await tx.create_array("long", (8, gap // 4), "i8", (1, gap // 4))).write(values[: gap // 4])
    snapshot = await store.snapshot()
    for path, count in (("short", 1), ("long", 4)):
        array = await snapshot.array(path)
        requests.clear()
        await array[[0, 2, 4, 6]].read()
        assert len(requests) == len((await array[[0, 2, 4, 6]].explain()).requests) == count
        assert sum(size for *_, size in requests) == array.nbytes // 8 * (7 if count == 1 else 4)


def test_blocking_snapshots_read_many_blocking_views(tmp_path: Path) -> None:
    with tstore.sync.open(tmp_path) as store, store.transaction() as tx:
        tx.create_array("a", (20,), "i8").write(np.arange(20))
    snapshot = tstore.sync.open(tmp_path, "r").snapshot()
    array = snapshot.array("a")
    assert [values.tolist() for values in snapshot.read_many([array[3:5], array[7]])] == [[3, 4], 7]
    assert array[3:5].explain().bytes_wanted == 16
    with pytest.raises(InvalidArgument, match="not an array of"):
        snapshot.read_many(["a"])


async def test_a_request_for_many_chunks_is_no_longer_than_a_batch(tmp_path: Path, requests: list[Range]) -> None:
    """So encoded chunks, which need memory until they are decoded, fit in the budget."""
    store, values = await tstore.open(tmp_path), np.random.default_rng(1).integers(0, 1 << 62, 1 << 22)
    async with store.transaction(durability="none") as tx:
        await (await tx.create_array("a", values.shape, "i8", (1 << 15,), codecs=["bytes", "zstd"])).write(values)
    tuning = store.log.storage.tuning
    assert tuning.batch < values.nbytes / 2
    array = await (await store.snapshot()).array("a")
    plan = await array.explain()
    assert max(request.size for request in plan.requests) <= tuning.batch
    requests.clear()
    assert np.array_equal(await array.read(), values)
    assert max(size for *_, size in requests) <= tuning.batch
    assert len(requests) <= 4 * plan.bytes_read // tuning.batch


async def test_a_read_beyond_memory_is_explained(tmp_path: Path) -> None:
    store = await tstore.open(tmp_path)
    async with store.transaction() as tx:
        array = await tx.create_array("a", (1 << 14, 1 << 26), "u1", (1 << 7, 1 << 19), sparse=True)
        await array[5, 1 << 22 : (1 << 22) + 3].write(1)
    array = await (await store.snapshot()).array("a")
    with pytest.raises(InvalidArgument, match="does not fit in memory"):
        await array.read()
    for view, wanted in ((array, 1 << 40), (array[::-1, 1:].T, (1 << 14) * ((1 << 26) - 1))):
        plan = await view.explain()
        assert (plan.chunks, plan.bytes_wanted) == ([8], wanted)
        assert 0 < plan.bytes_read <= 1 << 26
