"""A look at what exists is a read: a serializable transaction notices when it would see something else."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

import tstore
import tstore.sync
from tstore.errors import Conflict
from tstore.zarr import ZarrStore

Look = Callable[[ZarrStore], object]
Change = Callable[[tstore.sync.Transaction], object]


def listed(keys: AsyncIterator[str]) -> list[str]:
    async def collected() -> list[str]:
        return [key async for key in keys]

    return sync(collected())


def size(view: ZarrStore, key: str) -> int | None:
    try:
        return sync(view.getsize(key))
    except FileNotFoundError:
        return None


def get(view: ZarrStore, key: str) -> bytes | None:
    data = sync(view.get(key, default_buffer_prototype()))
    return None if data is None else data.to_bytes()


def group(view: ZarrStore, mode: Any = "r+") -> Any:
    return zarr.open_group(view, mode=mode)


def write(path: str, start: int, value: int = 1) -> Change:
    return lambda tx: tx.array(path)[start : start + 2].write(value)


def create(path: str) -> Change:
    return lambda tx: tx.create_array(path, (2,), "i4", (2,)).write(1)


# the look; a concurrent change that it must notice, what the conflict names, and one that it must not notice
LOOKS: dict[str, tuple[Look, Change, str, Change]] = {
    "exists, of an absent chunk": (
        lambda view: sync(view.exists("g/a/c/3")),
        write("g/a", 6),
        "g/a, chunk (3,)",
        write("g/a", 4),
    ),
    "exists, of a chunk": (
        lambda view: sync(view.exists("g/a/c/0")),
        lambda tx: tx.delete("g/a"),
        "g/a",
        write("g/a", 4),
    ),
    "exists, of metadata": (
        lambda view: sync(view.exists("new/zarr.json")),
        create("new"),
        "new",
        create("other"),
    ),
    "exists, of a group without metadata": (
        lambda view: sync(view.exists("new/zarr.json")),
        create("new/a"),
        "new",
        create("newer"),
    ),
    "exists, of a chunk of no array": (
        lambda view: sync(view.exists("new/c/0")),
        create("new"),
        "new",
        create("other"),
    ),
    "list": (lambda view: listed(view.list()), write("g/a", 6), "g/a, chunk (3,)", write("g/a", 0)),
    "list, against an array": (lambda view: listed(view.list()), create("h/new"), "h/new", write("g/b", 0, 9)),
    "list_prefix": (
        lambda view: listed(view.list_prefix("g/a/")),
        write("g/a", 6),
        "g/a, chunk (3,)",
        create("g/c"),
    ),
    "list_prefix, of a group": (
        lambda view: listed(view.list_prefix("g/")),
        write("g/a", 6),
        "g/a, chunk (3,)",
        create("h/new"),
    ),
    "list_prefix, of a part of a name": (
        lambda view: listed(view.list_prefix("g/a")),
        create("g/ab"),
        "g/ab",
        create("g/c"),
    ),
    "list_prefix, of metadata": (
        lambda view: listed(view.list_prefix("new/z")),
        create("new/a"),
        "new",
        create("other"),
    ),
    "list_dir, of chunks": (
        lambda view: listed(view.list_dir("g/a/c")),
        write("g/a", 6),
        "g/a, chunk (3,)",
        write("g/a", 2, 9),
    ),
    "list_dir, of a group": (lambda view: listed(view.list_dir("g")), create("g/new"), "g/new", write("g/a", 6)),
    "getsize": (lambda view: size(view, "g/a/c/1"), write("g/a", 2, 9), "g/a, chunk (1,)", write("g/a", 6)),
    "getsize, of an absent chunk": (
        lambda view: size(view, "g/a/c/3"),
        write("g/a", 6),
        "g/a, chunk (3,)",
        write("g/b", 0, 9),
    ),
    "getsize_prefix": (
        lambda view: sync(view.getsize_prefix("g/a/")),
        write("g/a", 6),
        "g/a, chunk (3,)",
        create("g/c"),
    ),
    "is_empty": (lambda view: sync(view.is_empty("new")), create("new/a"), "new & new/a", create("newer")),
    "is_empty, of chunks": (
        lambda view: sync(view.is_empty("h/empty/c")),
        write("h/empty", 0),
        "h/empty, chunk (0,)",
        write("g/a", 6),
    ),
    "get, of an absent chunk": (
        lambda view: get(view, "g/a/c/3"),
        write("g/a", 6),
        "g/a, chunk (3,)",
        write("g/a", 4),
    ),
    "nchunks_initialized": (
        lambda view: group(view)["g/a"].nchunks_initialized,
        write("g/a", 6),
        "g/a, chunk (3,)",
        write("g/a", 0, 9),
    ),
    "members": (lambda view: list(group(view)["g"].members()), create("g/new"), "g/new", write("g/a", 6)),
    "in": (lambda view: "new" in group(view)["g"], create("g/new"), "g/new", create("g/other")),
    "keys": (lambda view: list(group(view)["g"].keys()), create("g/new"), "g/new", create("h/new")),
    "shape": (
        lambda view: group(view)["g/a"].shape,
        lambda tx: tx.array("g/a").resize((9,)),
        "g/a",
        write("g/a", 6),
    ),
    "attributes": (
        lambda view: dict(group(view)["g"].attrs),
        lambda tx: tx.create_group("g", {"kind": "other"}),
        "g",
        create("g/new"),
    ),
    "list_prefix, beside fill values": (
        lambda view: (sync(view.delete("g/a/c/2")), listed(view.list_prefix("h/zeros/"))),
        write("h/zeros", 0),
        "h/zeros, chunk (0,)",
        write("g/a", 6),
    ),
    "delete_dir, of chunks": (
        lambda view: sync(view.delete_dir("h/empty/c")),
        write("h/empty", 0),
        "h/empty, chunk (0,)",
        write("g/a", 6),
    ),
}


@pytest.fixture
def store() -> tstore.sync.Store:
    """Return a store of "g/a" (4 chunks, the last two missing), "g/b", "h/empty", "h/zeros" and the group "g"."""
    store = tstore.sync.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        tx.create_array("g/a", (8,), "i4", (2,), sparse=True)[:4].write([1, 2, 3, 4])
        tx.create_array("g/b", (2,), "i4", (2,)).write(1)
        tx.create_array("h/empty", (2,), "i4", (2,), sparse=True)
        tx.create_array("h/zeros", (2,), "i4", (2,)).write(0)
        tx.create_group("g", {"kind": "group"})
    return store


def committed(store: tstore.sync.Store, look: Look, change: Change, isolation: Any = "serializable") -> None:
    tx = store.transaction(isolation=isolation)
    look(ZarrStore(tx))
    tx.create_array("out", (1,), "i4", (1,)).write(1)
    with store.transaction() as other:
        change(other)
    tx.commit()


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_that_would_see_something_else_is_a_conflict(store: tstore.sync.Store, name: str) -> None:
    look, change, lost, _ = LOOKS[name]
    with pytest.raises(Conflict, match="has read") as caught:
        committed(store, look, change)
    assert caught.value.paths == lost.split(" & ")
    assert "out" not in store.snapshot().paths()


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_that_would_see_the_same_is_none(store: tstore.sync.Store, name: str) -> None:
    look, _, _, unseen = LOOKS[name]
    committed(store, look, unseen)


@pytest.mark.parametrize("name", [name for name in LOOKS if not name.startswith("delete")])
def test_snapshot_isolation_allows_both(store: tstore.sync.Store, name: str) -> None:
    look, change, _, _ = LOOKS[name]
    committed(store, look, change, "snapshot")


def test_what_the_transaction_itself_created_was_not_read(store: tstore.sync.Store) -> None:
    tx = store.transaction(isolation="serializable")
    array = group(ZarrStore(tx)).create_array("new", shape=(4,), chunks=(2,), dtype="i4")
    array[:2] = 1
    assert array.nchunks_initialized == 1
    assert array[:].tolist() == [1, 1, 0, 0]
    with store.transaction() as other:
        write("g/a", 6)(other)
    tx.commit()


@pytest.mark.parametrize("read", ["natively", "by zarr", "by a look"])
def test_write_skew_over_which_chunks_exist_is_refused(store: tstore.sync.Store, read: str) -> None:
    """Each writes one chunk if the other is absent."""
    pair = [store.transaction(isolation="serializable") for _ in range(2)]
    for tx, mine, theirs in zip(pair, (2, 3), (3, 2), strict=True):
        match read:
            case "natively":
                assert not tx.array("g/a")[2 * theirs].read()
            case "by zarr":
                assert not group(ZarrStore(tx))["g/a"][2 * theirs]
            case _:
                assert not sync(ZarrStore(tx).exists(f"g/a/c/{theirs}"))
        tx.array("g/a")[2 * mine : 2 * mine + 2].write(np.array([1, 1]))
    pair[0].commit()
    with pytest.raises(Conflict):
        pair[1].commit()
