"""The copies of a save in the background: they give the same chunks as a save without copies, in fewer steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

import tstore
import tstore.sync as blocking
from tstore.conformance.faults import Faults
from tstore.store import Store

T = TypeVar("T")
Values = npt.NDArray[Any]


def numbered(*shape: int, dtype: str = "<f4") -> Values:
    return (np.arange(np.prod(shape), dtype=np.int64) % 251).reshape(shape).astype(dtype)


def sharded(values: Values, *grid: int) -> tstore.Shards:
    """Return an array in a grid of equal shards, each with its own memory."""
    sides = [n // g for n, g in zip(values.shape, grid, strict=True)]
    indices = [
        tuple(slice(i * side, (i + 1) * side) for i, side in zip(at, sides, strict=True))
        for at in np.ndindex(*grid)
    ]
    return tstore.Shards(values.shape, values.dtype, [(index, values[index].copy()) for index in indices])


LEAVES: dict[str, Any] = {
    "one long chunk": numbered(3, 512, 1024),
    "several chunks": numbered(16, 512, 1024),
    "several chunks and a shorter one": numbered((5 << 20) + 5, dtype="<f2"),
    "several chunks and shorter ones on two axes": numbered(3, 4_500_001, dtype="|u1"),
    "shards cut along another axis": sharded(numbered(512, 8192), 8, 1),
    "shards cut along another axis into short rows": sharded(numbered(1 << 16, 128), 8, 1),
    "shards of one chunk": sharded(numbered(1024, 2048), 1, 4),
    "many short arrays": {f"w{i}": numbered(1024) + i for i in range(600)},
    "arrays with an odd length": {f"w{i}": numbered((1 << 19) + i) for i in range(4)},
    "strided": numbered(2048, 2048)[:, ::2],
    "transposed": numbered(1024, 1024).T,
    "another byte order": numbered(1024, 1024, dtype=">f4"),
    "no axes": numbered().reshape(()),
    "no values": numbered(0, 4),
}


def packs(folder: Path) -> set[Path]:
    return set(folder.glob("txn/*/pack-*"))


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=list(LEAVES))
def test_a_save_in_the_background_reuses_each_chunk_of_a_save_without_copies(tmp_path: Path, leaf: Any) -> None:
    blocking.save(tmp_path, {"a": leaf}, 1)
    before = packs(tmp_path)
    blocking.save_async(tmp_path, {"a": leaf}, 2).wait()
    assert packs(tmp_path) == before


@pytest.mark.parametrize("leaf", LEAVES.values(), ids=list(LEAVES))
def test_a_save_without_copies_reuses_each_chunk_of_a_save_in_the_background(tmp_path: Path, leaf: Any) -> None:
    blocking.save_async(tmp_path, {"a": leaf}, 1).wait()
    before = packs(tmp_path)
    blocking.save(tmp_path, {"a": leaf}, 2)
    assert packs(tmp_path) == before
    if isinstance(leaf, np.ndarray):
        np.testing.assert_array_equal(blocking.restore(tmp_path, 2)["a"], leaf)


def test_only_the_changed_chunks_of_an_array_are_written(tmp_path: Path) -> None:
    values = numbered(32, 512, 1024)
    blocking.save_async(tmp_path, {"a": values}, 1).wait()
    before = packs(tmp_path)
    values[17] += 1
    values[31] += 1  # in another chunk
    blocking.save_async(tmp_path, {"a": values}, 2).wait()
    written = sum(pack.stat().st_size for pack in packs(tmp_path) - before)
    assert 0 < written < values.nbytes / 1.9
    np.testing.assert_array_equal(blocking.restore(tmp_path, 2)["a"], values)


class CountingStorage(Faults):
    """A storage that counts the appends to packs."""

    appends = 0

    def call_blocking(self, operation: str, key: str, call: Callable[[], T]) -> T:
        self.appends += operation == "append"
        return super().call_blocking(operation, key, call)


@pytest.mark.parametrize("shards", [1, 4])
async def test_a_save_in_the_background_writes_many_arrays_at_a_time(tmp_path: Path, shards: int) -> None:
    tree = {f"w{i}": sharded(numbered(2048, 1024), shards, 1) for i in range(12)}  # 96 MiB
    store = await tstore.open(tmp_path)
    storage = CountingStorage(store.log.storage)
    saving = await tstore.save_async(Store(storage, store.uuid, "a"), tree, 1)
    await saving.committed
    assert storage.appends <= 3
