"""A handle belongs to one array of one transaction: those of an array that was created again are refused."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from zarr.core.buffer import default_buffer_prototype

import tstore
from tstore.errors import Misuse, NotFound
from tstore.zarr import ZarrStore

Verb = Callable[[tstore.Transaction, tstore.Array], Awaitable[object]]

VERBS: dict[str, Verb] = {
    "read": lambda _, array: array.read(),
    "read of a view": lambda _, array: array[1:3].read(),
    "read of points": lambda _, array: array.vindex[[0, 3]].read(),
    "explain": lambda _, array: array.explain(),
    "write": lambda _, array: array.write(7),
    "write of a view": lambda _, array: array[1].write(7),
    "write of nothing": lambda _, array: array[:0].write(7),
    "write of points": lambda _, array: array.oindex[[0, 3]].write(7),
    "append": lambda _, array: array.append(np.ones(2)),
    "resize": lambda _, array: array.resize((6,)),
    "copy": lambda tx, array: tx.copy_array(array, "copy"),
    "copy in other chunks": lambda tx, array: tx.copy_array(array, "copy", chunks=(3,)),
    "copy with codecs": lambda tx, array: tx.copy_array(array, "copy", codecs="lossless"),
    "copy of a view": lambda tx, array: tx.copy_array(array[::2], "copy"),
}
CREATED_AGAIN: dict[str, dict[str, Any]] = {
    "the same": {"dtype": "float32"},
    "another dtype": {"dtype": "int32"},
    "another fill value": {"dtype": "float32", "fill_value": 5},
    "another shape": {"dtype": "float32", "shape": (5,)},
    "sparse": {"dtype": "float32", "sparse": True},
}


async def create(tx: tstore.Transaction, **options: Any) -> tstore.Array:
    arguments: dict[str, Any] = {"shape": (4,), "dtype": "float32", "chunks": (2,)} | options
    array = await tx.create_array("g/a", **arguments)
    await array.write(1)
    return array


@pytest.fixture
async def store() -> tstore.Store:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await create(tx)
    return store


@pytest.mark.parametrize("again", CREATED_AGAIN)
@pytest.mark.parametrize("deleted", ["g/a", "g"])
@pytest.mark.parametrize("of_base", [True, False], ids=["of the base", "of the transaction"])
async def test_a_handle_of_an_array_that_was_created_again_is_refused(
    store: tstore.Store, again: str, deleted: str, of_base: bool
) -> None:
    async with store.transaction() as tx:
        if not of_base:
            await tx.delete("g")
            await create(tx)
        handle = await tx.array("g/a")
        await tx.delete(deleted)
        current = await create(tx, **CREATED_AGAIN[again])
        for verb in VERBS.values():
            with pytest.raises(Misuse, match="deleted and created again"):
                await verb(tx, handle)
        assert (await current.read()).tolist() == [1] * current.shape[0]
        assert await tx.paths() == ["g/a"]


async def test_a_copy_to_a_path_with_slashes_is_an_array_like_others(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        copy = await tx.copy_array(await tx.array("g/a"), "/copy/")
        assert (copy.path, await tx.paths()) == ("copy", ["copy", "g/a"])
    assert (await store.snapshot()).paths() == ["copy", "g/a"]


async def test_a_handle_of_a_deleted_array_is_refused(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        handle = await tx.array("g/a")
        await tx.delete("g")
        for verb in VERBS.values():
            with pytest.raises(NotFound, match="deleted"):
                await verb(tx, handle)
        assert await tx.paths() == []


@pytest.mark.parametrize("verb", VERBS)
async def test_handles_of_one_array_are_equal(store: tstore.Store, verb: str) -> None:
    """Also after a resize and back."""
    async with store.transaction() as tx:
        handle = await tx.array("g/a")
        other = await tx.array("g/a")
        await other.resize((8,))
        await other.resize((4,))
        await VERBS[verb](tx, handle)


async def test_a_handle_made_again_by_zarr_is_another(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        handle = await tx.array("g/a")
        view, key = ZarrStore(tx), "g/a/zarr.json"
        document = await view.get(key, default_buffer_prototype())
        assert document is not None
        await view.delete_dir("g/a")
        await view.set(key, document)
        with pytest.raises(Misuse, match="created again"):
            await handle.write(7)


@pytest.mark.parametrize("verb", ["copy", "copy of a view", "copy in other chunks"])
async def test_a_handle_of_a_transaction_that_has_ended_is_refused(store: tstore.Store, verb: str) -> None:
    ended = store.transaction()
    handle = await ended.array("g/a")
    await ended.abort()
    async with store.transaction() as tx:
        with pytest.raises(Misuse, match="aborted"):
            await VERBS[verb](tx, handle)
        assert await tx.paths() == ["g/a"]


async def test_a_failed_copy_does_not_delete_what_was_created_at_its_path_meanwhile(
    store: tstore.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store.transaction() as tx:
        await tx.delete("g/a")
        source = await tx.create_array("source", (4,), "i4", (2,))
        await source[:2].write(5)  # the second chunk is missing, so the copy of values fails
        read = type(source).read

        async def read_and_replace(self: tstore.Array, out: None = None) -> object:
            await tx.delete("copy")
            await (await tx.create_array("copy", (1,), "i4", (1,))).write(9)
            return await read(self, out)

        monkeypatch.setattr(type(source), "read", read_and_replace)
        with pytest.raises(NotFound, match="never written"):
            await tx.copy_array(source, "copy", chunks=(4,))
        monkeypatch.undo()
        assert (await (await tx.array("copy")).read()).tolist() == [9]


async def test_values_appended_to_an_array_that_was_deleted_have_no_region(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        lost = await (await tx.array("g/a")).append([2])
        await tx.delete("g/a")
        kept = await (await create(tx)).append([3])
    assert kept.region == (slice(4, 5),)
    with pytest.raises(Misuse, match="deleted after values were appended"):
        _ = lost.region
