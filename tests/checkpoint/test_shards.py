"""Small arrays in shards, which are saved and restored many at a time."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tstore.errors import Corrupt, NotFound
from tstore.sharding import Mesh, P

SHAPE = (8, 6)


@pytest.fixture
def url() -> str:
    return f"memory://{uuid.uuid4()}"


def values_of(leaf: int) -> Any:
    return np.arange(48, dtype="f4").reshape(SHAPE) + 100 * leaf


def shards(values: Any, *, along: int = 0, order: Any = range(4)) -> tstore.Shards:
    """Return the shards of an array of `SHAPE`: four along the first dimension, or three along the second."""
    size = 2
    parts = []
    for i in order:
        index = [slice(None), slice(None)]
        index[along] = slice(i * size, (i + 1) * size)
        parts.append((tuple(index), None if values is None else values[tuple(index)]))
    return tstore.Shards(SHAPE, "f4", parts)


def whole(restored: tstore.Shards) -> Any:
    out = np.full(SHAPE, np.nan, "f4")
    for index, part in restored.parts:
        out[index] = part
    return out


async def bytes_added(url: str | Path) -> int:
    """Return the bytes that the newest commit wrote."""
    async with await tstore.open(url, "r") as store:
        async for commit in store.history():
            return commit.bytes_added
    raise AssertionError("the store is empty")


@pytest.mark.parametrize("saved", [0, 1])
@pytest.mark.parametrize("wanted", [0, 1])
async def test_each_leaf_gets_its_own_shards(url: str, saved: int, wanted: int) -> None:
    counts = (4, 3)
    tree = {f"w{i}": shards(values_of(i), along=saved, order=range(counts[saved])) for i in range(50)}
    await tstore.save(url, tree, 0)
    target = {name: shards(None, along=wanted, order=reversed(range(counts[wanted]))) for name in tree}
    restored = await tstore.restore(url, target=target)
    for i in range(50):
        np.testing.assert_array_equal(whole(restored[f"w{i}"]), values_of(i))


async def test_half_of_the_shards_are_restored_alone(url: str) -> None:
    await tstore.save(url, {"w": shards(values_of(1))}, 0)
    for order in ([2, 1], [0, 3]):  # chunks that follow each other, and chunks that don't
        restored = await tstore.restore(url, target={"w": shards(None, order=order)})
        np.testing.assert_array_equal(
            [part for _, part in restored["w"].parts], [values_of(1)[2 * i : 2 * i + 2] for i in order]
        )


async def test_a_step_writes_only_the_shards_that_changed(tmp_path: Path) -> None:
    """So the shards of a leaf lie in several packs."""
    url = str(tmp_path / "store")
    first = {f"w{i}": values_of(i) + np.float32(0.5) for i in range(300)}
    await tstore.save(url, {name: shards(values) for name, values in first.items()}, 0)
    second = {name: values.copy() for name, values in first.items()}
    for name in ("w7", "w8", "w200"):
        second[name][2:6] += 1000
    await tstore.save(url, {name: shards(values) for name, values in second.items()}, 1)
    assert await bytes_added(url) == 3 * 2 * 48
    for step, values in ((0, first), (1, second)):
        restored = await tstore.restore(url, step, target={name: shards(None) for name in values})
        for name, expected in values.items():
            np.testing.assert_array_equal(whole(restored[name]), expected)


async def test_damage_names_the_shard(tmp_path: Path) -> None:
    url = tmp_path / "store"
    await tstore.save(url, {f"w{i}": shards(values_of(i)) for i in range(200)}, 0)
    [pack] = url.glob("txn/*/pack-*")
    data = pack.read_bytes()
    at = data.index(values_of(9)[4:6].tobytes())
    pack.write_bytes(data[: at + 5] + bytes([data[at + 5] ^ 1]) + data[at + 6 :])
    with pytest.raises(Corrupt, match=r"w9, chunk \(2, 0\): checksum mismatch"):
        await tstore.restore(url, target={f"w{i}": shards(None) for i in range(200)})


async def test_a_shard_that_was_never_written_is_named(url: str) -> None:
    async with await tstore.open(url) as store:
        async with store.transaction(tag="step/0") as tx:
            w = await tx.create_array("w", SHAPE, "f4", chunks=(2, 6))
            await w[:4].write(values_of(0)[:4])
            await w[6:].write(values_of(0)[6:])
        with pytest.raises(NotFound, match=r"chunk \(2, 0\) of w was never written"):
            await tstore.restore(store, target={"w": shards(None)})


async def test_shards_are_cast(url: str) -> None:
    await tstore.save(url, {"w": shards(values_of(3))}, 0)
    target = {"w": tstore.Shards(SHAPE, "f8", [(index, None) for index, _ in shards(None).parts])}
    restored = await tstore.restore(url, target=target, dtype="target")
    assert restored["w"].parts[0][1].dtype == np.float64
    np.testing.assert_array_equal(whole(restored["w"]), values_of(3))


async def test_arrays_of_no_dimension_and_of_any_layout_are_gathered(url: str) -> None:
    tree = {f"s{i}": np.array(i, "i4") for i in range(40)}
    tree |= {f"t{i}": values_of(i).T for i in range(40)}
    tree |= {f"b{i}": values_of(i)[::-2, 1:4] for i in range(40)}
    await tstore.save(url, tree, 0)
    restored = await tstore.restore(url)
    for name, expected in tree.items():
        np.testing.assert_array_equal(restored[name], expected)


async def test_a_save_in_the_background_writes_long_chunks(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((3 << 20) + 5, np.float32)
    saving = await tstore.save_async(tmp_path, {"w": values}, 0)
    expected = values.copy()
    values[:] = 0
    await saving.committed
    np.testing.assert_array_equal((await tstore.restore(tmp_path))["w"], expected)
    changed = expected.copy()
    changed[-1] = 2
    await (await tstore.save_async(tmp_path, {"w": changed}, 1)).committed
    np.testing.assert_array_equal((await tstore.restore(tmp_path))["w"], changed)
    await (await tstore.save_async(tmp_path, {"w": changed}, 2)).committed
    assert await bytes_added(tmp_path) == 0


@pytest.mark.parametrize("min_bytes", [0, 1, 1 << 20])
def test_replicas_of_a_scalar_share_nothing(min_bytes: int) -> None:
    mesh, x = Mesh({"x": 4}), np.float32(3)
    counts = [
        len(tstore.Shards.of(x, mesh, P(), i, replicas="split", min_bytes=min_bytes).parts) for i in range(4)
    ]
    assert counts == [1, 0, 0, 0]
