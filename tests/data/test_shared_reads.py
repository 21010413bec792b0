"""Small reads of one turn of the event loop are one call, and each ends with its own outcome."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tstore.core.data import reader
from tstore.core.format.arrays.codecs import Chain
from tstore.errors import Corrupt, NotFound

VALUES = np.arange(64 * 4096, dtype="i4").reshape(64, 4096)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of jobs of each call that reads."""
    counts: list[int] = []
    read_chunks = reader.read_chunks

    async def counted(storage: Any, jobs: Any) -> None:
        listed = list(jobs)
        counts.append(len(listed))
        await read_chunks(storage, listed)

    monkeypatch.setattr(reader, "read_chunks", counted)
    return counts


async def written(folder: Path) -> tstore.Array:
    store = await tstore.open(folder)
    async with store.transaction() as transaction:
        await (await transaction.create_array("a", VALUES.shape, "i4", (1, 4096))).write(VALUES)
        dense = await transaction.create_array("dense", (20,), "i4", (10,))
        await dense[:10].write(np.arange(10))
    return await (await store.snapshot()).array("a")


def damage(folder: Path, row: int) -> None:
    [pack] = folder.glob("txn/*/pack*")
    data = bytearray(pack.read_bytes())
    at = bytes(data).index(VALUES[row].tobytes())
    data[at] ^= 1
    pack.write_bytes(data)


async def test_reads_of_one_turn_are_two_calls(tmp_path: Path, calls: list[int]) -> None:
    array = await written(tmp_path)
    rows = await asyncio.gather(*(array[row, row:].read() for row in range(50)))
    assert all(np.array_equal(read, VALUES[row, row:]) for row, read in enumerate(rows))
    assert calls == [1, 49]
    await array[3].read()
    await array[4].read()
    assert calls[2:] == [1, 1]


async def test_a_large_read_does_not_wait_for_others(tmp_path: Path, calls: list[int]) -> None:
    array = await written(tmp_path)
    out = np.empty((2, *VALUES.shape), "f8")  # 2 MiB each
    await asyncio.gather(array[0].read(), array[1].read(), array.read(out[0]), array.read(out[1]), array[2].read())
    assert np.array_equal(out, [VALUES, VALUES])
    assert sorted(calls) == [1, 1, 1, 2]


async def test_a_damaged_chunk_fails_only_its_own_read(tmp_path: Path) -> None:
    array = await written(tmp_path)
    damage(tmp_path, 7)
    results = await asyncio.gather(*(array[row].read() for row in range(20)), return_exceptions=True)
    for row, result in enumerate(results):
        if row == 7:
            assert isinstance(result, Corrupt)
            assert "a, chunk (7, 0)" in str(result)
        else:
            assert isinstance(result, np.ndarray)
            assert np.array_equal(result, VALUES[row])


async def test_an_unwritten_chunk_fails_only_its_own_read(tmp_path: Path) -> None:
    await written(tmp_path)
    dense = await (await (await tstore.open(tmp_path, "r")).snapshot()).array("dense")
    first, missing, last = await asyncio.gather(
        dense[0].read(), dense[15].read(), dense[9].read(), return_exceptions=True
    )
    assert (first, last) == (0, 9)
    assert isinstance(missing, NotFound)


async def test_cancelled_reads_leave_the_others(tmp_path: Path) -> None:
    array = await written(tmp_path)
    reads = [asyncio.ensure_future(array[row].read()) for row in range(20)]
    await asyncio.sleep(0)  # all have begun
    for read in reads[::2]:
        read.cancel()
    results = await asyncio.gather(*reads, return_exceptions=True)
    for row in range(1, 20, 2):
        assert np.array_equal(results[row], VALUES[row])
    assert all(isinstance(result, asyncio.CancelledError | np.ndarray) for result in results[::2])
    assert any(isinstance(result, asyncio.CancelledError) for result in results[2::2])


async def test_the_call_ends_when_all_its_reads_are_cancelled(tmp_path: Path) -> None:
    array = await written(tmp_path)
    reads = [asyncio.ensure_future(array[row].read()) for row in range(20)]
    await asyncio.sleep(0)
    for read in reads:
        read.cancel()
    results = await asyncio.gather(*reads, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[1:])
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert np.array_equal(await array[5].read(), VALUES[5])


TRANSPOSED = [{"name": "transpose", "configuration": {"order": [1, 0]}}, {"name": "bytes"}, {"name": "zstd"}]


@pytest.mark.parametrize("codecs", [None, "lossless", "e4m3", TRANSPOSED])
async def test_reads_of_the_same_chunks_have_each_its_own_values(tmp_path: Path, codecs: Any) -> None:
    values = (np.arange(300 * 200, dtype="f4") % 251 - 100).reshape(300, 200)
    store = await tstore.open(tmp_path)
    async with store.transaction() as transaction:
        await (await transaction.create_array("a", values.shape, "f4", (100, 200), codecs)).write(values)
    snapshot = await store.snapshot()
    array = await snapshot.array("a")
    stored = await array.read()
    rng = np.random.default_rng(1)
    indices: list[Any] = [(int(y), int(x)) for y, x in rng.integers(0, 200, (40, 2))]
    indices += [..., slice(50, 250), (slice(None, None, -7), 3), ([5, 299, 5], slice(2)), (slice(100, 200),) * 2]
    indices += [slice(100, 200), stored[:, 0] > 0]
    indices += indices
    read = await asyncio.gather(*(array[index].read() for index in indices))
    assert all(np.array_equal(part, stored[index]) for index, part in zip(indices, read, strict=True))
    outs = await snapshot.read_many([array[index] for index in indices])
    assert all(np.array_equal(part, stored[index]) for index, part in zip(indices, outs, strict=True))


async def test_a_chunk_of_many_reads_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await tstore.open(tmp_path)
    async with store.transaction() as transaction:
        await (await transaction.create_array("a", VALUES.shape, "i4", (16, 4096), "lossless")).write(VALUES)
    array = await (await store.snapshot()).array("a")
    decode, decoded = Chain.decode, []

    def counted(self: Chain, data: memoryview, out: Any) -> None:
        decoded.append(len(data))
        decode(self, data, out)

    monkeypatch.setattr(Chain, "decode", counted)
    await asyncio.gather(*(array[row, :2].read() for row in range(64)))
    assert len(decoded) == 1 + 4  # the first read of a turn does not wait for the others
