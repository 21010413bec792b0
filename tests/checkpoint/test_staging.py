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
from tstore.core.store import Store
from tstore.lab.conformance.faults import Faults

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


LEAVES: dict[str, Callable[[], Any]] = {  # made by their tests, since every worker collects this module
    "one long chunk": lambda: numbered(3, 512, 1024),
    "several chunks": lambda: numbered(16, 512, 1024),
    "several chunks and a shorter one": lambda: numbered((5 << 20) + 5, dtype="<f2"),
    "several chunks and shorter ones on two axes": lambda: numbered(3, 4_500_001, dtype="|u1"),
    "shards cut along another axis": lambda: sharded(numbered(512, 8192), 8, 1),
    "shards cut along another axis into short rows": lambda: sharded(numbered(1 << 16, 128), 8, 1),
    "shards of one chunk": lambda: sharded(numbered(1024, 2048), 1, 4),
    "many short arrays": lambda: {f"w{i}": numbered(1024) + i for i in range(600)},
    "arrays with an odd length": lambda: {f"w{i}": numbered((1 << 19) + i) for i in range(4)},
    "strided": lambda: numbered(2048, 2048)[:, ::2],
    "transposed": lambda: numbered(1024, 1024).T,
    "another byte order": lambda: numbered(1024, 1024, dtype=">f4"),
    "no axes": lambda: numbered().reshape(()),
    "no values": lambda: numbered(0, 4),
}


def packs(folder: Path) -> set[Path]:
    return set(folder.glob("txn/*/pack-*"))


@pytest.mark.parametrize("staging", ["memory", "reference"])
@pytest.mark.parametrize("name", LEAVES)
def test_a_save_in_the_background_reuses_each_chunk_of_one_at_once(
    tmp_path: Path, name: str, staging: Any
) -> None:
    leaf = LEAVES[name]()
    blocking.save(tmp_path, {"a": leaf}, 1)
    before = packs(tmp_path)
    blocking.save_async(tmp_path, {"a": leaf}, 2, staging=staging).wait()
    assert packs(tmp_path) == before


@pytest.mark.parametrize("name", LEAVES)
def test_a_save_at_once_reuses_each_chunk_of_one_in_the_background(tmp_path: Path, name: str) -> None:
    leaf = LEAVES[name]()
    blocking.save_async(tmp_path, {"a": leaf}, 1, staging="memory").wait()
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


async def appends(folder: Path, tree: Any, staging: Any, codecs: str | None = None) -> int:
    """Return how often a save in the background appends to a pack."""
    store = await tstore.open(folder)
    storage = CountingStorage(store.log.storage)
    save = await tstore.save_async(Store(storage, store.marker, "a"), tree, 1, staging=staging, codecs=codecs)
    await save.committed
    return storage.appends


@pytest.mark.parametrize("shards", [1, 4])
async def test_a_save_in_the_background_writes_many_arrays_at_a_time(tmp_path: Path, shards: int) -> None:
    tree = {f"w{i}": sharded(numbered(2048, 1024), shards, 1) for i in range(12)}  # 96 MiB
    assert await appends(tmp_path, tree, "memory") <= 3


@pytest.mark.parametrize("shards", [1, 4])  # chunks of 8 MiB, which are contiguous, or of 512 KiB, which are not
async def test_chunks_that_are_not_staged_are_also_written_many_at_a_time(tmp_path: Path, shards: int) -> None:
    tree = {f"w{i}": sharded(numbered(2048, 1024), shards, 1) for i in range(12)}  # 96 MiB
    assert await appends(tmp_path, tree, "reference") <= 8


async def test_encoded_chunks_are_written_in_shorter_batches(tmp_path: Path) -> None:
    tree = {f"w{i}": numbered(2048, 1024) for i in range(12)}  # 96 MiB, in chunks of 8 MiB, which also need codes
    assert await appends(tmp_path, tree, "reference", "e4m3") == 12
