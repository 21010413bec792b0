"""Streamed arrays: in which order they come, what is read ahead, and that a consumer that stops leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
import tstore.sync
from tests.support.counted_reads import count_reads
from tstore.core.storage.local.store import LocalStorage
from tstore.errors import Corrupt, InvalidArgument, NotFound, SnapshotExpired, StructureMismatch
from tstore.sharding import Mesh, P

rng = np.random.default_rng(0)

TREE = {f"w{i}": rng.random((1 << 17) * (1 + i % 3)) for i in range(12)} | {
    "small": {str(i): rng.random(9) for i in range(40)},
    "encoded": rng.random(5000).astype("f4"),
    "own": tstore.PerHost({"x": np.ones(3), "y": 2}),
    "step": 3,
}


@pytest.fixture
async def saved(url: str) -> str:
    await tstore.save(url, TREE, 1, codecs={"encoded": ["bytes", "zstd"]})
    return url


def expected(path: str) -> Any:
    return TREE["small"][path[6:]] if path.startswith("small/") else TREE[path]


async def collected(stream: AsyncIterator[tuple[str, Any]]) -> dict[str, Any]:
    pairs = [pair async for pair in stream]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


async def test_every_array_comes_once(saved: str, thresholds: Any) -> None:
    for together in (1, 1 << 20, 1 << 30):
        thresholds(_TOGETHER=together)
        arrays = await collected(tstore.stream(saved))
        assert arrays.pop("own").value["y"] == 2
        assert len(arrays) == 53
        for path, values in arrays.items():
            np.testing.assert_array_equal(values, expected(path))


async def test_arrays_come_in_the_order_of_their_bytes_or_the_caller_s(tmp_path: Path) -> None:
    names = [f"a{i}" for i in rng.permutation(30)]
    await tstore.save(tmp_path, {name: rng.random(1000) for name in names}, 1)  # in one pack
    assert list(await collected(tstore.stream(tmp_path))) == names
    assert list(await collected(tstore.stream(tmp_path, order=["a7", "a3"])))[:2] == ["a7", "a3"]
    assert list(await collected(tstore.stream(tmp_path, order=names[::-1]))) == names[::-1]
    for order, message in (("tree", "expected 'storage'"), (["a7", "b"], "'b' is not one of")):
        with pytest.raises(InvalidArgument, match=message):
            await collected(tstore.stream(tmp_path, order=order))


async def test_selections_names_dtypes_and_targets_apply(saved: str) -> None:
    arrays = await collected(tstore.stream(saved, only="net/*", rename={"small/*": "net/*"}, dtype="f4"))
    assert arrays.keys() == {f"net/{i}" for i in range(40)}
    assert arrays["net/7"].dtype == "f4"
    part = tstore.Shards(TREE["w1"].shape, "f8", [((slice(5, 9),), None)])
    [(_, shards)] = (await collected(tstore.stream(saved, target={"w1": part}, only="w1"))).items()
    np.testing.assert_array_equal(shards.values[0], TREE["w1"][5:9])
    with pytest.raises(StructureMismatch):
        await collected(tstore.stream(saved, target={"w1": np.zeros(3)}, only="w1"))
    with pytest.raises(NotFound):
        await collected(tstore.stream(saved, 2))


async def test_the_next_arrays_are_read_while_the_consumer_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Any
) -> None:
    await tstore.save(tmp_path, {f"w{i}": rng.random(1 << 17) for i in range(8)}, 1)
    thresholds(_TOGETHER=1, _AHEAD=2 << 20)
    reads, third = count_reads(monkeypatch), threading.Event()
    reader = LocalStorage.reader

    def noticed(self: LocalStorage, key: str) -> Any:
        if sum(size == 1 << 20 for size in reads) >= 2:
            third.set()
        return reader(self, key)

    monkeypatch.setattr(LocalStorage, "reader", noticed)
    async with contextlib.aclosing(tstore.stream(tmp_path)) as stream:
        await anext(stream)
        assert await asyncio.to_thread(third.wait, 30)  # the consumer asks for no more, and a third array is read
    assert sum(size == 1 << 20 for size in reads) <= 4  # the first, two ahead, and one in place of the first


class Stopped(Exception):
    """Raised by a consumer."""


@pytest.mark.parametrize("way", ["break", "raise", "cancel", "close"])
async def test_a_consumer_that_stops_leaves_nothing(saved: str, way: str, thresholds: Any) -> None:
    thresholds(_TOGETHER=1)
    before, received = len(asyncio.all_tasks()), asyncio.Event()

    async def consume() -> None:
        async for _ in tstore.stream(saved, only="w*"):
            received.set()
            if way == "break":
                break
            if way == "raise":
                raise Stopped
            await asyncio.Event().wait()

    if way == "close":
        stream = tstore.stream(saved, only="w*")
        await anext(stream)
        await stream.aclose()
    else:
        task = asyncio.create_task(consume())
        await received.wait()
        if way == "cancel":
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == (way == "cancel")
        assert task.cancelled() or isinstance(task.exception(), Stopped) == (way == "raise")
        del task
    gc.collect()
    for _ in range(1000):  # asyncio closes an abandoned iteration in a task
        if len(asyncio.all_tasks()) == before:
            break
        await asyncio.sleep(0.001)
    assert len(asyncio.all_tasks()) == before


async def test_damage_and_collections_are_reported(tmp_path: Path, thresholds: Any) -> None:
    tree = {f"w{i}": rng.random(1 << 17) for i in range(6)}
    await tstore.save(tmp_path, tree, 1)
    thresholds(_TOGETHER=1, _AHEAD=1)
    for pack in tmp_path.glob("txn/*/pack-*"):
        data = pack.read_bytes()
        if (at := data.find(tree["w3"].tobytes())) >= 0:
            pack.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    order = list(tree)
    arrays = []

    async def consume() -> None:
        async for path, _ in tstore.stream(tmp_path, order=order):
            arrays.append(path)

    with pytest.raises(Corrupt, match=r"^w3, chunk"):
        await consume()
    assert arrays == order[:3]
    await tstore.save(tmp_path, {"w": np.zeros(1000)}, 2)
    store = await tstore.open(tmp_path)

    async def collect_meanwhile() -> None:
        async for path, _ in tstore.stream(tmp_path, 1, order=order):
            if path == "w0":
                await store.collect(tstore.Keep(last=1))

    with pytest.raises(SnapshotExpired):
        await collect_meanwhile()


async def test_a_rank_reads_only_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of tensor parallelism split one matrix by columns, and the next one by rows."""
    shape, mesh = (2048, 2048), Mesh({"model": 8})
    values, specs = rng.random(shape).astype("f4"), {"up": P(None, "model"), "down": P("model")}

    def parts(path: str, ranks: Any) -> list[tuple[Any, Any]]:
        return [(s.index, values[s.index]) for s in mesh.shards(shape, specs[path]) if s.device in ranks]

    await tstore.save(tmp_path, {path: tstore.Shards(shape, "f4", parts(path, range(8))) for path in specs}, 1)
    sizes = count_reads(monkeypatch)
    target = {path: tstore.Shards.wanted(shape, "f4", mesh, spec, 5) for path, spec in specs.items()}
    arrays = await collected(tstore.stream(tmp_path, target=target))
    for path in specs:
        np.testing.assert_array_equal(arrays[path].values[0], parts(path, [5])[0][1])
    assert sum(sizes) <= 2 * values.nbytes * (1 / 8 + 0.02)


def test_blocking_streams(tmp_path: Path) -> None:
    tree = {f"w{i}": rng.random(1000) for i in range(5)}
    tstore.sync.save(tmp_path, tree, 1)
    for path, values in tstore.sync.stream(tmp_path):
        np.testing.assert_array_equal(values, tree[path])
    assert len(dict(tstore.sync.stream(tmp_path))) == 5
    for path, _ in tstore.sync.stream(tmp_path, order=["w3"]):
        assert path == "w3"
        break
