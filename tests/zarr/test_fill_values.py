"""zarr-python removes a chunk to write fill values: that is a write, and is stored and conflicts as one."""

from __future__ import annotations

import math
import uuid
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.sync import sync

import tstore
import tstore.sync
from tstore.errors import Conflict
from tstore.zarr import ZarrStore

FILLS: dict[str, tuple[str, Any, Any]] = {  # dtype, fill value, another value
    "zero": ("f4", 0, 5),
    "negative": ("i2", -7, 5),
    "nan": ("f8", math.nan, 5),
    "true": ("bool", True, False),
    "text": ("str", "none", "five"),
}
CODECS: dict[str, Any] = {
    "raw": None,
    "lossless": "lossless",
    "sharded": [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": [1],
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            },
        }
    ],
}


@pytest.fixture
def store() -> tstore.sync.Store:
    return tstore.sync.open(f"memory://{uuid.uuid4()}")


def create(store: tstore.sync.Store, *, sparse: bool, written: int = 0, **options: Any) -> None:
    """Commit an array of four chunks of two values, of which the first `written` values are 3."""
    arguments: dict[str, Any] = {"shape": (8,), "dtype": "f4", "chunks": (2,)} | options
    with store.transaction() as tx:
        array = tx.create_array("a", sparse=sparse, **arguments)
        if written:
            array[:written].write(3)


def zarr_array(tx: tstore.sync.Transaction) -> Any:
    return zarr.open_group(ZarrStore(tx), mode="r+")["a"]


def snapshot_array(store: tstore.sync.Store) -> Any:
    return zarr.open_group(ZarrStore(store.snapshot()), mode="r")["a"]


def values(store: tstore.sync.Store) -> Any:
    return store.snapshot().array("a").read()


@pytest.mark.parametrize("isolation", ["snapshot", "serializable"])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("written", [0, 8], ids=["absent", "present"])
@pytest.mark.parametrize("fill_first", [True, False])
def test_a_fill_value_and_another_value_of_one_chunk_conflict(
    store: tstore.sync.Store, isolation: Any, sparse: bool, written: int, fill_first: bool
) -> None:
    create(store, sparse=sparse, written=written)
    zeros, fives = store.transaction(isolation=isolation), store.transaction(isolation=isolation)
    zarr_array(zeros)[2:4] = 0
    zarr_array(fives)[2:4] = 5
    first, second = (zeros, fives) if fill_first else (fives, zeros)
    first.commit()
    with pytest.raises(Conflict) as caught:
        second.commit()
    assert caught.value.paths == ["a, chunk (1,)"]
    assert store.snapshot().array("a")[2:4].read().tolist() == [0 if fill_first else 5] * 2


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("written", [0, 8], ids=["absent", "present"])
def test_fill_values_do_not_conflict_with_writes_to_other_chunks(
    store: tstore.sync.Store, sparse: bool, written: int
) -> None:
    create(store, sparse=sparse, written=written)
    transactions = [store.transaction() for _ in range(4)]
    for number, tx in enumerate(transactions):
        zarr_array(tx)[2 * number : 2 * number + 2] = 7
        zarr_array(tx)[2 * number : 2 * number + 2] = number % 2
    for tx in transactions:
        tx.commit()
    assert values(store).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("codecs", CODECS)
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_fill_values_are_read_back(store: tstore.sync.Store, fill: str, codecs: str, sparse: bool) -> None:
    name, fill_value, other = FILLS[fill]
    dtype: Any = name
    if name == "str":
        if CODECS[codecs] is not None:
            pytest.skip("text has codecs of its own")
        dtype = np.dtypes.StringDType()
    create(store, sparse=sparse, dtype=dtype, fill_value=fill_value, codecs=CODECS[codecs])
    with store.transaction() as tx:
        array = zarr_array(tx)
        array[:] = np.full(8, fill_value, dtype)
        np.testing.assert_array_equal(tx.array("a").read(), np.full(8, fill_value, dtype))
        array[2:4] = np.full(2, other, dtype)
        array[4:6] = np.full(2, other, dtype)
        array[4:6] = np.full(2, fill_value, dtype)
    expected = np.array([fill_value] * 2 + [other] * 2 + [fill_value] * 4, dtype)
    np.testing.assert_array_equal(values(store), expected)
    np.testing.assert_array_equal(snapshot_array(store)[:], expected)
    assert store.verify().ok


def test_fill_values_of_many_chunks_are_stored_once(store: tstore.sync.Store) -> None:
    create(store, sparse=False, shape=(64 << 10,), chunks=(1 << 10,))
    with store.transaction() as tx:
        zarr_array(tx)[:] = 0
    assert [commit.bytes_added for commit in store.history()] == [4 << 10, 0]
    assert not values(store).any()


def test_arrays_of_one_transaction_have_fill_values_of_their_own(store: tstore.sync.Store) -> None:
    others: dict[str, dict[str, Any]] = {
        "usual": {},
        "fill value": {"fill_value": 7},
        "codecs": {"codecs": "lossless"},
        "chunks": {"chunks": (4,)},
        "dtype": {"dtype": "f8"},
    }
    with store.transaction() as tx:
        for path, options in others.items():
            tx.create_array(path, **{"shape": (8,), "dtype": "f4", "chunks": (2,), **options})
    with store.transaction() as tx:
        for path in others:
            array = zarr.open_group(ZarrStore(tx), mode="r+")[path]
            array[:] = array.fill_value
    snapshot = store.snapshot()
    assert {path: set(snapshot.array(path).read().tolist()) for path in others} == {
        path: {options.get("fill_value", 0)} for path, options in others.items()
    }


def test_fill_values_hide_no_other_chunk_of_their_pack(store: tstore.sync.Store) -> None:
    create(store, sparse=False, shape=(64 << 10,), chunks=(16 << 10,))
    with store.transaction() as tx:
        array = zarr_array(tx)
        array[: 16 << 10] = 0
        array[16 << 10 : 32 << 10] = 5
        array[20 << 10] = 6  # zarr reads the chunk, and writes all of it
        assert array.nchunks_initialized == 1
    assert np.unique(store.snapshot().array("a")[16 << 10 : 32 << 10].read(), return_counts=True)[1].tolist() == [
        (16 << 10) - 1,
        1,
    ]


def test_a_new_sparse_array_stores_no_fill_values(store: tstore.sync.Store) -> None:
    with store.transaction() as tx:
        zarr.open_group(ZarrStore(tx), mode="a").create_array("a", shape=(8,), chunks=(2,), dtype="f4")[:] = 0
    assert snapshot_array(store).nchunks_initialized == 0
    assert values(store).tolist() == [0] * 8


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_a_removed_chunk_does_not_exist_in_its_transaction(store: tstore.sync.Store, sparse: bool) -> None:
    create(store, sparse=sparse, written=8)
    with store.transaction() as tx:
        view = ZarrStore(tx)
        array = zarr_array(tx)
        sync(view.delete("a/c/1"))
        assert not sync(view.exists("a/c/1"))
        assert array.nchunks_initialized == 3
        with pytest.raises(FileNotFoundError):
            sync(view.getsize("a/c/1"))
        assert array[:].tolist() == tx.array("a").read().tolist() == [3, 3, 0, 0, 3, 3, 3, 3]
        tx.array("a")[2].write(9)
        assert sync(view.exists("a/c/1"))
        assert array[:4].tolist() == [3, 3, 9, 0]
    assert values(store)[:4].tolist() == [3, 3, 9, 0]


@pytest.mark.parametrize("change", ["append", "append along the second axis", "resize", "attributes"])
def test_fill_values_beside_other_changes_of_the_array(store: tstore.sync.Store, change: str) -> None:
    with store.transaction() as tx:
        tx.create_array("a", (4, 4), "f4", (2, 2)).write(3)
    with store.transaction() as tx:
        array = zarr_array(tx)
        array[:2] = 0
        match change:
            case "append":
                tx.array("a").append(np.full((2, 4), 3))
            case "append along the second axis":
                tx.array("a").append(np.full((4, 2), 3), axis=1)
            case "resize":
                tx.array("a").resize((4, 3))
            case "attributes":
                array.attrs["unit"] = "m"
        zarr_array(tx)[2:4, :2] = 0
    expected = np.full(store.snapshot().array("a").shape, 3)
    expected[:2, :4] = 0
    expected[2:4, :2] = 0
    np.testing.assert_array_equal(values(store), expected)
    assert store.verify().ok


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_random_writes_through_zarr_equal_those_to_numpy(store: tstore.sync.Store, sparse: bool) -> None:
    """Concurrent transactions, some of which conflict, of writes of which half are fill values."""
    rng = np.random.default_rng(0)
    create(store, sparse=sparse)
    with store.transaction() as tx:
        zarr_array(tx)[:] = 0
    model = np.zeros(8, "f4")
    for _ in range(60):
        transactions, writes = [store.transaction() for _ in range(3)], []
        for tx in transactions:
            start, value = int(rng.integers(0, 7)), int(rng.integers(0, 2)) * 5
            where = slice(start, int(rng.integers(start + 1, 9)))
            zarr_array(tx)[where] = value
            writes.append((where, value))
        for tx, (where, value) in zip(transactions, writes, strict=True):
            try:
                tx.commit()
            except Conflict:
                continue
            model[where] = value
        assert values(store).tolist() == model.tolist()
