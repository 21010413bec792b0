"""Arrays that the caller changes while they are saved: every commit is readable, whichever values it has."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tests.support import http_server
from tstore.core.store import Store
from tstore.lab.conformance.faults import Faults

T = TypeVar("T")

ONES = np.ones((3, 512, 1024), "f4")  # 6 MiB, in one chunk
LEAVES: dict[str, Any] = {
    "one chunk of several blocks": ONES,
    "several chunks": np.ones((16, 512, 1024), "f4"),
    "a long chunk and a rest": np.ones((1 << 18) + 7, "f8"),
    "many short arrays": {f"w{i}": np.ones(1024, "f4") for i in range(100)},
    "a strided array": np.ones((1024, 1024), "f4")[:, ::2],
    "a transposed array": np.ones((512, 1024), "f4").T,
    "another byte order": np.ones((512, 1024), ">f4"),
    "a few bytes": np.ones(3, "f4"),
    "no axes": np.ones((), "f4"),
    "no values": np.ones((0, 4), "f4"),
}


class ChangingStorage(Faults):
    """A storage before which the caller changes its arrays: just before each append to a pack, and each create."""

    change: Callable[[], None]

    def call_blocking(self, operation: str, key: str, call: Callable[[], T]) -> T:
        if operation == "append":
            self.change()
        return super().call_blocking(operation, key, call)

    async def create(self, key: str, data: bytes, durability: Any) -> None:
        self.change()
        await super().create(key, data, durability)


async def changing(url: object, tree: Any) -> tuple[Store, ChangingStorage]:
    """A store whose storage adds one to the arrays of the tree whenever something is written."""
    store = await tstore.open(url)  # type: ignore[arg-type]
    storage = ChangingStorage(store.log.storage)
    storage.change = lambda: add_one(tree)
    return Store(storage, store.marker, "a"), storage


def arrays_of(tree: Any) -> list[np.ndarray[Any, Any]]:
    return list(tree.values()) if isinstance(tree, dict) else [tree]


def add_one(tree: Any) -> None:
    for array in arrays_of(tree):
        np.add(array, 1, out=array)


@pytest.mark.parametrize("codecs", [None, "lossless", "e4m3"])
@pytest.mark.parametrize("name", LEAVES)
async def test_a_save_of_changing_arrays_can_be_restored(tmp_path: Path, name: str, codecs: str | None) -> None:
    tree = {name: LEAVES[name]}
    store, _ = await changing(tmp_path / "s", LEAVES[name])
    for step in range(3):  # later steps compare with the previous one
        await tstore.save(store, tree, step, codecs=codecs)
    for step in range(3):
        restored = await tstore.restore(store, step)
        for array in arrays_of(restored[name]):
            assert (array >= 1).all()
    assert (await store.verify()).ok


@pytest.mark.parametrize("staging", ["memory", "turns", "reference"])
async def test_a_background_save_of_changing_arrays_can_be_restored(tmp_path: Path, staging: Any) -> None:
    store, _ = await changing(tmp_path / "s", ONES)
    for step in range(2):
        await (await tstore.save_async(store, {"w": ONES}, step, staging=staging)).committed
        assert ((await tstore.restore(store, step))["w"] >= 1).all()
    assert (await store.verify()).ok


@pytest.mark.parametrize("codecs", [None, [{"name": "bytes"}, {"name": "zstd"}], {"format": "e4m3", "block": 32}])
async def test_a_write_of_a_changing_array_can_be_read(tmp_path: Path, codecs: Any) -> None:
    values = np.ones((1024, 1024), "f4")
    store, _ = await changing(tmp_path / "s", values)
    async with store.transaction() as tx:
        whole = await tx.create_array("whole", values.shape, "f4", (1024, 1024), codecs)
        await whole.write(values)
        parts = await tx.create_array("parts", values.shape, "f4", (100, 96), codecs)
        await parts[:500].write(values[:500])
        await parts[500:].write(values[500:])
    snapshot = await store.snapshot()
    for path in snapshot.paths():
        assert ((await (await snapshot.array(path)).read()) >= 1).all()
    assert (await store.verify()).ok


async def test_shards_that_change_can_be_restored(tmp_path: Path) -> None:
    values = np.ones((1024, 1024), "f4")
    parts = {((0, 512), (0, 1024)): values[:512], ((512, 1024), (0, 1024)): values[512:]}
    store, _ = await changing(tmp_path / "s", values)
    await tstore.save(store, {"w": tstore.Shards(values.shape, "f4", parts)}, 0)
    assert (await tstore.restore(store))["w"].min() >= 1


@contextlib.contextmanager
def incremented(*arrays: np.ndarray[Any, Any]) -> Iterator[None]:
    """Add to the arrays in another thread for the duration of the block."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            for array in arrays:
                array += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("place", ["local", "served"])
@pytest.mark.parametrize("codecs", [None, "lossless", {"format": "e4m3", "axis": -1, "scale": "float"}])
def test_arrays_changed_by_a_thread_during_a_save(tmp_path: Path, place: str, codecs: Any) -> None:
    large, small = np.ones((2048, 1024), "f4"), np.ones(1000, "f4")
    with contextlib.ExitStack() as stack:
        url: Any = tmp_path / "s"
        if place == "served":
            url = stack.enter_context(http_server.serving(url, "--anonymous", "write")).url
        store = stack.enter_context(blocking.open(url))
        with incremented(large, small):
            for step in range(4):
                blocking.save(
                    store, {"large": large, "small": small, "strided": large[:, ::3]}, step, codecs=codecs
                )
        for step in range(4):
            assert blocking.restore(store, step)["large"].min() >= 1
        assert store.verify().ok


def test_a_frozen_array_is_referenced_and_a_changed_one_written(tmp_path: Path) -> None:
    frozen, changed = np.ones((2048, 1024), "f4"), np.ones((2048, 1024), "f4")
    store = blocking.open(tmp_path / "s")
    for step in range(3):
        changed[-1, -1] = step  # in the last block of the chunk
        blocking.save(store, {"frozen": frozen, "changed": changed}, step)
    newest, *_ = store.history()
    assert newest.bytes_added == changed.nbytes
    for step in range(3):
        assert blocking.restore(store, step)["changed"][-1, -1] == step
