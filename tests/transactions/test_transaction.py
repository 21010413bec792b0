"""Transactions are atomic and isolated, and conflict only if they touch the same chunks or metadata."""

from __future__ import annotations

import asyncio
import gc
import itertools
import subprocess
import sys
import uuid
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
from tests.support import forks
from tstore.errors import (
    AlreadyExists,
    Conflict,
    Denied,
    InvalidArgument,
    Misuse,
    NotFinite,
    NotFound,
    StorageFull,
    TStoreError,
)
from tstore.lab.conformance.faults import open_faulty


@pytest.fixture
async def store(url: str) -> tstore.Store:
    """Return a store whose version 1 has "w" (8×8, chunks 4×4, 0…63), "g/v" and the group "g"."""
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("w", (8, 8), "int32", (4, 4))).write(BASE)
        await (await tx.create_array("g/v", (4,), "float64", (2,))).write(1.5)
        await tx.create_group("g", {"kind": "group"})
    return store


async def test_the_attributes_of_a_group_are_a_mapping(store):
    with pytest.raises(InvalidArgument, match="attributes: expected a mapping of names to values"):
        async with store.transaction() as tx:
            await tx.create_group("h", np.array([1, 2]))


BASE = np.arange(64, dtype="i4").reshape(8, 8)


async def test_calls_chain(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        await tx["w"][0, :2].write([7, 8])
        await tx.array("g/v").write(2.5)
        await tx.create_array("new", (2,), "f4").write(3)
    assert (await store.snapshot().array("w")[0, :3].read()).tolist() == [7, 8, 2]
    assert (await store.snapshot(1)["w"][0, :3].read()).tolist() == [0, 1, 2]
    array, snapshot = await asyncio.gather(store.snapshot()["new"], asyncio.create_task(store.snapshot()))
    assert (await array.read()).tolist() == (await snapshot["new"].read()).tolist() == [3, 3]
    with pytest.raises(NotFound, match="has no array 'x'"):
        await store.snapshot()["x"].read()


async def test_a_misspelled_path_is_told_the_paths_beside_it(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        for i in range(20):
            await tx.create_array(f"layer.{i:02}.weight", (1,), "f4").write(0)
    with pytest.raises(NotFound, match=r"it has .*layer\.11\.weight, layer\.12\.weight"):
        await store.snapshot()["layer.12.wieght"].read()


async def test_a_snapshot_is_indexed_by_path_and_iterated(store: tstore.Store) -> None:
    snapshot = await store.snapshot()
    assert list(snapshot) == snapshot.paths() == ["g/v", "w"]
    assert ("w" in snapshot, "g" in snapshot, "x" in snapshot, 3 in snapshot) == (True, False, False, False)
    assert (await snapshot["g/v"]).attrs == {}


@pytest.mark.parametrize("data", [[[1, 2], [3, 4]], np.arange(6, dtype="f4"), np.float64(0.5), np.ones((0, 3))])
async def test_an_array_is_created_from_its_data(store: tstore.Store, data: Any) -> None:
    values = np.asarray(data)
    async with store.transaction() as tx:
        array = await tx.create_array("d", data=data)
        assert (array.shape, array.dtype) == (values.shape, values.dtype)
        await tx.create_array("cast", data=data, dtype="f8")
        with pytest.raises(
            InvalidArgument, match="'e': pass the shape and the dtype of the new array, or its data"
        ):
            await tx.create_array("e", (3,))
        with pytest.raises(InvalidArgument, match="do not fit the region"):
            await tx.create_array("e", (3, 9), data=np.ones((2, 2)))
        with pytest.raises(NotFinite):  # while chunks are written
            await tx.create_array("g/e", (3, 9), "f4", (1, 9), "e4m3", data=np.array([[0], [0], [np.nan]]))
        assert await tx.paths() == ["cast", "d", "g/v", "w"]
    snapshot = await store.snapshot()
    assert snapshot.paths() == ["cast", "d", "g/v", "w"]
    assert np.array_equal(await snapshot["d"].read(), values)
    assert (await snapshot["cast"].read()).tolist() == values.tolist()


async def test_a_transaction_dropped_with_changes_warns(store: tstore.Store) -> None:
    async def change(end: str) -> None:
        tx = store.transaction()
        await tx["w"].write(1)
        if end:
            await getattr(tx, end)()

    async def drop(end: str) -> None:
        await change(end)
        gc.collect()

    gc.collect()  # what other tests left
    with pytest.warns(ResourceWarning, match="was dropped with changes that are lost: call its commit"):
        await drop("")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for end in ("commit", "abort"):
            await drop(end)
    assert not [w for w in caught if "dropped" in str(w.message)]


async def read(source: tstore.Snapshot | tstore.Transaction, path: str = "w") -> Any:
    return await (await source.array(path)).read()


async def newest(store: tstore.Store, path: str = "w") -> Any:
    """Return the values as another process reads them."""
    other = await tstore.open(store.url, "r")
    return await read(await other.snapshot(), path)


def test_leaving_a_history_early_causes_no_warning(tmp_path: Path) -> None:
    script = f"""
import asyncio, tstore
async def main():
    store = await tstore.open({str(tmp_path / "s")!r})
    for step in range(9):
        async with store.transaction() as tx:
            await tx.create_group(str(step))
    async for commit in store.history():
        if commit.version < 5:
            return
asyncio.run(main())
"""
    command = [sys.executable, "-W", "error", "-c", script]  # not -X dev, which warns on a slow machine
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stderr) == (0, "")


async def test_a_commit_is_seen_whole_and_a_snapshot_never_changes(store: tstore.Store) -> None:
    old = await store.snapshot()
    async with store.transaction("second", tag="t") as tx:
        await (await tx.array("w")).write(7)
        await (await tx.array("g/v"))[1:].write(2)
        assert (await read(await store.snapshot()) == BASE).all()
    assert tx.version == 2
    assert (await newest(store) == 7).all()
    assert (await newest(store, "g/v")).tolist() == [1.5, 2, 2, 2]
    assert (await read(old) == BASE).all()
    assert (await read(await store.snapshot(1)) == BASE).all()
    assert (await read(await store.snapshot("t")) == 7).all()
    assert (await store.snapshot()).attributes("g") == {"kind": "group"}
    assert [(c.version, c.tag, c.message) async for c in store.history()] == [(2, "t", "second"), (1, None, "")]


async def test_a_transaction_reads_its_own_writes_over_its_base(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        w = await tx.array("w")
        await w[0, 0].write(-1)  # a part of a chunk
        await w[4:, 4:].write(-2)  # a whole chunk
        await w[5, 5].write(-3)  # a part of it
        await w[2:6, 2:6].write(-4)  # parts of four
        expected = BASE.copy()
        expected[0, 0], expected[4:, 4:], expected[5, 5], expected[2:6, 2:6] = -1, -2, -3, -4
        assert (await read(tx) == expected).all()
        async with store.transaction() as other:
            await (await other.array("w"))[0, 7].write(-9)
        assert (await read(tx) == expected).all()  # without what was committed meanwhile
        await w[4:, 4:].write(-5)
        expected[4:, 4:] = -5
        assert (await w[::-2, 1].read() == expected[::-2, 1]).all()
    expected[0, 7] = -9
    assert (await newest(store) == expected).all()


async def test_an_exception_aborts(store: tstore.Store) -> None:
    class Mine(Exception):
        pass

    objects = await store.log.storage.list("")
    tx = store.transaction()

    async def fails() -> None:
        async with tx:
            await (await tx.array("w")).write(7)
            await (await tx.create_array("big", (1 << 16,), "int64", (1 << 12,))).write(1)
            raise Mine

    with pytest.raises(Mine):
        await fails()
    assert tx.version is None
    assert (await newest(store) == BASE).all()
    assert (await store.snapshot()).version == 1
    assert await store.log.storage.list("") == objects
    assert await store.outcome(tx.id) is None


@pytest.mark.parametrize("end", ["commit", "abort", "conflict", "failure"])
async def test_use_after_the_end_is_misuse(url: str, end: str) -> None:
    store, faults = await open_faulty(url)
    tx = store.transaction()
    w = await tx.create_array("w", (4,), "int32", (2,))
    await w.write(1)
    if end == "conflict":
        async with store.transaction() as other:
            await other.create_array("w", (4,), "int32", (2,))
        with pytest.raises(Conflict):
            await tx.commit()
    elif end == "failure":
        faults.fail("create", "commits/*", error=StorageFull)
        with pytest.raises(StorageFull):
            await tx.commit()
    else:
        await getattr(tx, end)()
    calls: list[Callable[[], Awaitable[Any]]] = [
        lambda: w.write(1),
        w.read,
        lambda: w.resize((5,)),
        lambda: tx.array("w"),
        lambda: tx.create_array("x", (1,), "i4"),
        lambda: tx.create_group("x"),
        lambda: tx.delete("w"),
        tx.paths,
        tx.commit,
    ]
    for call in calls:
        with pytest.raises(Misuse, match="committed" if end == "commit" else "aborted"):
            await call()
    await tx.abort()  # harmless


async def test_a_resize_beyond_what_can_be_addressed_is_refused(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        with pytest.raises(InvalidArgument, match="too large"):
            await (await tx.array("w")).resize((1 << 40, 1 << 40))


async def test_a_snapshot_cannot_be_written(store: tstore.Store) -> None:
    w = await (await store.snapshot()).array("w")
    for call in (w.write(1), w.resize((9, 9))):
        with pytest.raises(Misuse, match="transaction"):
            await call


async def test_a_store_opened_for_reading_cannot_be_written(store: tstore.Store) -> None:
    with pytest.raises(Denied, match=r"mode='r\+'"):
        (await tstore.open(store.url, "r")).transaction()


# ---- conflicts

Change = Callable[[tstore.Transaction], Awaitable[None]]


def write(index: Any, value: int = 1) -> Change:
    async def change(tx: tstore.Transaction) -> None:
        await (await tx.array("w"))[index].write(value)

    return change


def create(path: str) -> Change:
    async def change(tx: tstore.Transaction) -> None:
        await (await tx.create_array(path, (2,), "i4", (2,))).write(3)

    return change


def group(path: str) -> Change:
    return lambda tx: tx.create_group(path, {"a": 1})


def delete(path: str) -> Change:
    return lambda tx: tx.delete(path)


def resize(*shape: int) -> Change:
    async def change(tx: tstore.Transaction) -> None:
        await (await tx.array("w")).resize(shape)

    return change


def replace(tx: tstore.Transaction) -> Awaitable[None]:
    return tx.staging.replace_all(b"")


CHUNK = np.s_[0:4, 0:4]
PART = np.s_[0, 0]


def both(first: Change, second: Change) -> Change:
    async def change(tx: tstore.Transaction) -> None:
        await first(tx)
        await second(tx)

    return change


CONFLICTS: dict[str, tuple[Change, Change]] = {
    "a part against a whole chunk and then a part": (write(PART), both(write(CHUNK), write(PART))),
    "a part against a part and then the whole chunk": (write(PART), both(write(PART), write(CHUNK))),
    "one chunk, written whole by both": (write(CHUNK), write(CHUNK)),
    "one chunk, in part by the first": (write(PART), write(CHUNK)),
    "all, against one chunk": (write(CHUNK), write(...)),
    "two creates of one path": (create("new"), create("new")),
    "a create below a create": (create("new"), create("new/x")),
    "a create above a create": (create("new/x"), create("new")),
    "an array and a group of one path": (group("new"), create("new")),
    "a delete against a write": (delete("w"), write(CHUNK)),
    "a write against a delete": (write(CHUNK), delete("w")),
    "a part against a delete": (write(PART), delete("w")),
    "a delete against a part": (delete("w"), write(PART)),
    "a create below a deleted group": (delete("g"), create("g/new")),
    "a deleted group with a create below": (create("g/new"), delete("g")),
    "a resize against a write": (resize(4, 8), write(CHUNK)),
    "a write against a resize": (write(CHUNK), resize(9, 9)),
    "a part against a resize": (write(PART), resize(9, 9)),
    "two resizes": (resize(4, 8), resize(8, 4)),
    "two resizes to one shape": (resize(7, 7), resize(7, 7)),
    "a delete against a resize": (delete("w"), resize(9, 9)),
    "a resize against a delete": (resize(7, 7), delete("w")),
    "a delete against a delete and a create": (delete("w"), both(delete("w"), create("w"))),
    "a delete and a create against a delete": (both(delete("w"), create("w")), delete("w")),
    "a write against a delete and a create": (both(delete("w"), create("w")), write(PART)),
    "a group against its delete": (delete("g"), group("g")),
    "all replaced against a write": (replace, write(PART)),
    "all replaced against a create": (replace, create("new")),
    "all replaced against a delete": (replace, delete("g")),
}
MEETS: dict[str, tuple[Change, Change]] = {
    "two chunks": (write(CHUNK), write(np.s_[4:, 4:])),
    "two parts of one chunk": (write(PART), write(np.s_[1, 1])),
    "one element twice": (write(PART, 5), write(PART, 6)),
    "a part over a whole chunk": (write(CHUNK, 5), write(PART, 6)),
    "two creates": (create("new"), create("other")),
    "two creates in one new group": (create("new/a"), create("new/b")),
    "a create and a delete": (create("new"), delete("g")),
    "a delete of the same": (delete("g"), delete("g")),
    "a delete below a delete": (delete("g"), delete("g/v")),
    "a delete elsewhere": (delete("g"), write(CHUNK)),
    "a resize elsewhere": (create("new"), resize(4, 8)),
    "a group above an array that is written": (write(PART), group("g")),
    "two equal groups of one path": (group("new"), group("new")),
    "a group above a create": (group("new"), create("new/x")),
    "a create below a group": (create("new/x"), group("new")),
    "a write against all replaced": (write(PART), both(replace, create("new"))),
    "a resize against all replaced": (resize(9, 9), replace),
    "two that replace all": (both(replace, create("new")), both(replace, create("other"))),
}


@pytest.mark.parametrize("name", CONFLICTS)
async def test_conflicts(store: tstore.Store, name: str) -> None:
    first, second = CONFLICTS[name]
    winner, loser = store.transaction(), store.transaction()
    await first(winner)
    await second(loser)
    await winner.commit()
    expected = await (await tstore.open(store.url, "r")).snapshot()
    with pytest.raises(Conflict, match="version 2") as caught:
        await loser.commit()
    assert any(p.split(",")[0] in str(CONFLICTED) for p in caught.value.paths)
    assert caught.value.paths
    actual = await (await tstore.open(store.url, "r")).snapshot()
    assert (actual.version, actual.paths()) == (2, expected.paths())
    for path in expected.paths():
        assert (await read(actual, path) == await read(expected, path)).all()
    async with store.transaction() as again:  # as the error advises
        if name.startswith("two resizes"):
            await second(again)
    assert (await store.verify()).ok


CONFLICTED = ["w", "new", "new/x", "g", "g/new", "g/v"]


@pytest.mark.parametrize("name", MEETS)
async def test_transactions_without_conflict_equal_a_serial_execution(store: tstore.Store, name: str) -> None:
    first, second = MEETS[name]
    a, b = store.transaction(), store.transaction()
    await first(a)
    await second(b)
    await a.commit()
    await b.commit()
    actual = await (await tstore.open(store.url, "r")).snapshot()
    assert actual.version == 3
    serial = await tstore.open(f"memory://{uuid.uuid4()}")
    async with serial.transaction() as tx:
        await (await tx.create_array("w", (8, 8), "int32", (4, 4))).write(BASE)
        await (await tx.create_array("g/v", (4,), "float64", (2,))).write(1.5)
    for change in (first, second):
        async with serial.transaction() as tx:
            try:
                await change(tx)
            except NotFound:
                assert "delete" in name
    expected = await serial.snapshot()
    assert actual.paths() == expected.paths()
    for path in expected.paths():
        assert (await read(actual, path) == await read(expected, path)).all()


async def test_tags_conflict(store: tstore.Store) -> None:
    a, b = store.transaction(tag="x"), store.transaction(tag="x")
    await a.array("w")
    await b.array("w")
    await a.commit()
    with pytest.raises(Conflict) as caught:
        await b.commit()
    assert caught.value.paths == ["tag x"]


DROPS = [
    # the edits of a transaction, those of a newer commit, and whether they conflict
    ({"drop_tag": "t"}, {"move_tag": "t"}, True),
    ({"move_tag": "t"}, {"drop_tag": "t"}, True),
    ({"drop_tag": "t"}, {"drop_tag": "t"}, False),
    ({"drop_tag": "t"}, {"drop_tag": "u"}, False),
    ({"drop_tag": "t"}, {"tag": "v"}, False),
]


@pytest.mark.parametrize(("mine", "newer", "conflict"), DROPS)
async def test_dropped_tags_conflict(
    store: tstore.Store, mine: dict[str, str], newer: dict[str, str], conflict: bool
) -> None:
    async with store.transaction(tag="t"):
        pass
    async with store.transaction(tag="u"):
        pass
    tx, other = store.transaction(**mine), store.transaction(**newer)  # type: ignore[arg-type]
    await tx.staging.base()
    await other.commit()
    if not conflict:
        assert await tx.commit() == 5
        return
    with pytest.raises(Conflict) as caught:
        await tx.commit()
    assert caught.value.paths == ["tag t"]


async def test_a_dropped_tag_names_nothing_and_may_be_set_again(store: tstore.Store) -> None:
    async with store.transaction(tag="t"):
        pass
    async with store.transaction("away with it", tag="u", drop_tag="t"):
        pass
    assert await store.tags() == {"u": 3}
    other = await tstore.open(store.url)
    with pytest.raises(NotFound, match="no tag 't'"):
        await other.snapshot("t")
    assert (await other.snapshot(2)).tags == {"t": 2}
    assert [(c.version, c.tags, c.dropped) async for c in other.history()][:2] == [
        (3, ("u",), ("t",)),
        (2, ("t",), ()),
    ]
    async with other.transaction(tag="t"):
        pass
    assert await store.tags() == {"u": 3, "t": 4}


async def test_partial_writes_of_many_transactions_to_one_chunk_all_survive(store: tstore.Store) -> None:
    open_ones = []
    for i in range(64):
        tx = store.transaction()
        await (await tx.array("w"))[i // 8, i % 8].write(1000 + i)
        open_ones.append(tx)
    versions = await asyncio.gather(*[tx.commit() for tx in open_ones])
    for chunk in (CHUNK, np.s_[0:4, 4:], np.s_[4:, 0:4], np.s_[4:, 4:]):  # other chunks may have the same version
        assert len({versions[i] for i in BASE[chunk].reshape(-1).tolist()}) == 16
    assert set(versions) == set(range(2, max(versions) + 1))
    assert (await newest(store) == 1000 + BASE).all()
    assert (await store.verify()).ok


async def test_a_transaction_deletes_and_creates_again(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        await tx.delete("w")
        with pytest.raises(NotFound):
            await tx.array("w")
        with pytest.raises(NotFound):
            await tx.delete("w")
        assert await tx.paths() == ["g/v"]
        w = await tx.create_array("w", (3,), "float32", (2,))
        await w.write([1, 2, 3])
        assert await tx.paths() == ["g/v", "w"]
    assert (await newest(store)).tolist() == [1, 2, 3]
    async with store.transaction() as tx:
        await tx.delete("g")
        await tx.create_array("g", (1,), "int8")
    assert (await store.snapshot()).paths() == ["g", "w"]


@pytest.mark.parametrize("path", ["w", "/w/", "w/x", "g", "g/v", "g/v/x"])
async def test_a_path_that_is_taken_is_refused(store: tstore.Store, path: str) -> None:
    tx = store.transaction()
    with pytest.raises(AlreadyExists):
        await tx.create_array(path, (1,), "int8")
    await tx.create_array("mine/x", (1,), "int8")
    for taken in ("mine", "mine/x", "mine/x/y"):
        with pytest.raises(AlreadyExists):
            await tx.create_array(taken, (1,), "int8")
    with pytest.raises(AlreadyExists):
        await tx.create_group("mine/x")
    await tx.abort()


@pytest.mark.parametrize("path", ["", "/", "a//b", ".", "..", "a/../b", "zarr.json", "a/zarr.json", "a\0b"])
async def test_an_invalid_path_is_refused(store: tstore.Store, path: str) -> None:
    tx = store.transaction()
    with pytest.raises(InvalidArgument):
        await tx.create_array(path, (1,), "int8")
    await tx.abort()


@pytest.mark.parametrize(
    "arguments",
    [
        {"isolation": "serial"},
        {"isolation": np.array([1, 2])},
        {"durability": "maybe"},
        {"durability": np.array([1, 2])},
        {"hosts": 2},
        {"tag": ""},
        {"tag": "12"},
        {"tag": "a\n"},
    ],
    ids=str,
)
async def test_arguments_that_do_not_fit_are_refused(store: tstore.Store, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        store.transaction(**arguments)


@pytest.mark.parametrize("mode", ["w", None, np.array([1, 2])], ids=str)
async def test_an_unknown_mode_is_refused(mode: Any) -> None:
    with pytest.raises(InvalidArgument, match="expected 'r'"):
        await tstore.open("memory://unknown-mode", mode)


async def test_resizing_keeps_the_values_in_range(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        w = await tx.array("w")
        await w[0, 0].write(-1)
        await w.resize((4, 12))
        assert w.shape == (4, 12)
        with pytest.raises(NotFound, match="never written"):
            await w.read()
        await w[:, 8:].write(5)
        await w[3, 3].write(-2)
    expected = np.full((4, 12), 5)
    expected[:, :8] = BASE[:4]
    expected[0, 0], expected[3, 3] = -1, -2
    assert (await newest(store) == expected).all()


async def test_a_patch_cut_off_by_a_resize_does_not_come_back(store: tstore.Store) -> None:
    """The chunk does not exist yet."""
    async with store.transaction() as tx:
        sparse = await tx.create_array("sparse", (8,), "i4", (4,), sparse=True)
        await sparse[5:7].write(9)
        for length in (6, 8):
            await (await tx.array("sparse")).resize((length,))
    assert (await (await (await store.snapshot()).array("sparse")).read()).tolist() == [0, 0, 0, 0, 0, 9, 0, 0]


@pytest.mark.parametrize("commits", ["one", "one for each step"])
@pytest.mark.parametrize("shape", [(5, 8), (8, 3), (5, 6), (1, 1), (4, 8), (0, 8)], ids=str)
async def test_values_cut_off_by_a_resize_do_not_come_back(
    store: tstore.Store, shape: tuple[int, int], commits: str
) -> None:
    async with store.transaction() as tx:
        s = await tx.create_array("s", (8, 8), "int32", (4, 4), fill_value=-7, sparse=True)
        await s[:, :6].write(BASE[:, :6])  # the last column of chunks is written in part
    async with store.transaction() as tx:
        s = await tx.array("s")
        await s[0, 0].write(99)
        await s.resize(shape)
        if commits == "one":
            await s.resize((8, 8))
    if commits != "one":
        async with store.transaction() as tx:
            await (await tx.array("s")).resize((8, 8))
    expected = np.full((8, 8), -7)
    expected[:, :6] = BASE[:, :6]
    expected[0, 0] = 99
    expected[shape[0] :], expected[:, shape[1] :] = -7, -7
    assert (await newest(store, "s") == expected).all()
    assert (await store.verify()).ok


async def test_writes_after_a_resize_survive_in_the_cut_off_region(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        w = await tx.array("w")
        await w.resize((6, 6))
        await w.resize((8, 8))
        await w[6:, 4:].write(1)
        await w[7, 7].write(2)
        assert (await w[4:, 4:].read()).tolist() == [[36, 37, 0, 0], [44, 45, 0, 0], [1, 1, 1, 1], [1, 1, 1, 2]]
    assert (await newest(store))[4:, 4:].tolist() == [[36, 37, 0, 0], [44, 45, 0, 0], [1, 1, 1, 1], [1, 1, 1, 2]]


async def test_concurrent_first_uses_see_one_base(url: str) -> None:
    store, faults = await open_faulty(url)
    async with store.transaction() as tx:
        for name in ("a", "b"):
            await (await tx.create_array(name, (2,), "int8", (2,))).write(1)
    store, faults = await open_faulty(url)
    tx = store.transaction()
    gate = faults.hold("get", "commits/*")
    first = asyncio.create_task(tx.array("a"))
    await gate.reached()
    async with (await tstore.open(url)).transaction() as other:
        for name in ("a", "b"):
            await (await other.array(name)).write(2)
    b = await tx.array("b")
    await b[0].write(5)
    gate.release()
    a = await first
    assert (await a.read()).tolist() == [2, 2]
    assert (await b.read()).tolist() == [5, 2]
    assert await tx.commit() == 3
    assert (await newest(store, "b")).tolist() == [5, 2]


async def test_cancelling_a_commit_learns_its_outcome(url: str) -> None:
    store, faults = await open_faulty(url)
    tx = store.transaction("cancelled")
    await (await tx.create_array("a", (2,), "int8", (2,))).write(1)
    gate = faults.hold("create", "commits/*")
    commit = asyncio.create_task(tx.commit())
    await gate.reached()
    commit.cancel()
    await asyncio.sleep(0)
    commit.cancel()  # a second Ctrl-C changes nothing
    await asyncio.sleep(0)
    assert not commit.done()
    gate.release()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert await store.outcome(tx.id) == 1
    assert tx.version == 1


async def test_a_failed_disk_leaves_no_packs_behind(url: str) -> None:
    store, faults = await open_faulty(url)
    tx = store.transaction()
    values = np.random.default_rng(0).integers(0, 255, (64, 1 << 18), "u1")
    await (await tx.create_array("a", values.shape, "uint8", (1, 1 << 18))).write(values)
    faults.fail("finish", "txn/*", error=StorageFull)
    with pytest.raises(StorageFull):
        await tx.commit()
    assert await faults.inner.list("txn/") == []


# ---- many writers

REGION = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 3), st.integers(0, 7), st.integers(0, 7))
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 2), REGION),
        st.tuples(st.just("commit"), st.integers(0, 2), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 2), st.none()),
        st.tuples(st.just("read"), st.integers(0, 2), st.none()),
    ),
    max_size=25,
)


@given(ACTIONS, st.sampled_from([(3, 4), (10, 2), (1, 8), (12, 9)]))
def test_interleaved_transactions_are_serial_in_commit_order(actions: list[Any], chunks: tuple[int, int]) -> None:
    asyncio.run(interleaved(actions, chunks))


async def interleaved(actions: list[Any], chunks: tuple[int, int]) -> None:
    """The committed array is the result of the committed transactions in the order of their versions."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await (await tx.create_array("w", (10, 8), "int32", chunks)).write(0)
    model = np.zeros((10, 8), "i4")
    value = itertools.count(1)
    writers: dict[int, tuple[tstore.Transaction, Any, list[Any]]] = {}

    def chunks_of(index: tuple[slice, slice]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        touched, whole = set(), set()
        for i, j in np.ndindex(-(-10 // chunks[0]), -(-8 // chunks[1])):
            box = np.zeros((10, 8), bool)
            box[i * chunks[0] : (i + 1) * chunks[0], j * chunks[1] : (j + 1) * chunks[1]] = True
            mine = np.zeros((10, 8), bool)
            mine[index] = True
            if (mine & box).any():
                touched.add((i, j))
            if (mine & box).sum() == box.sum():
                whole.add((i, j))
        return touched, whole

    committed: list[set[tuple[int, int]]] = []
    for action, number, region in [*actions, *[("commit", n, None) for n in range(3)]]:
        if number not in writers:
            if action != "write":
                continue
            tx = store.transaction()
            await tx.array("w")
            writers[number] = (tx, model.copy(), [len(committed), set(), set(), []])
        tx, view, log = writers[number]
        if action == "write":
            a, b, step, c, d = region
            index = (slice(min(a, b), max(a, b) + 1, step), slice(min(c, d), max(c, d) + 1))
            n = next(value)
            await (await tx.array("w"))[index].write(n)
            view[index] = n
            log[3].append((index, n))
            touched, whole = chunks_of(index)
            log[1] |= touched
            log[2] |= whole
        elif action == "read":
            assert (await (await tx.array("w")).read() == view).all()
        elif action == "abort":
            await tx.abort()
            del writers[number]
        else:
            del writers[number]
            rivals = set().union(*committed[log[0] :])
            if rivals & log[2]:  # another commit changed a chunk that it wrote whole
                with pytest.raises(Conflict):
                    await tx.commit()
                continue
            await tx.commit()
            for index, n in log[3]:
                model[index] = n
            committed.append(log[1])
        assert (await newest(store) == model).all()


def test_eight_processes_of_ten_commits_lose_nothing(tmp_path: Path) -> None:
    import tstore.sync as blocking

    with blocking.open(tmp_path / "s").transaction() as tx:
        tx.create_array("cells", (80,), "int64", (80,)).write(-1)
        tx.create_array("total", (1,), "int64", (1,)).write(0)
    code = """
        import os
        import tstore.sync as tstore
        from tstore.errors import Conflict
        url, me = arguments
        store = tstore.open(url)
        ready()
        for turn in range(10):
            while True:
                try:
                    with store.transaction(f"{me}.{turn}") as tx:
                        total = tx.array("total")
                        total.write(total.read() + 1)
                        tx.array("cells")[me * 10 + turn].write(me * 10 + turn)
                    break
                except Conflict:
                    continue
            os.write(out, f"{tx.version}\\n".encode())
    """
    with forks.forks(code) as server:
        writers = [server.start(tmp_path / "versions", tmp_path / "s", me) for me in range(8)]
        server.release(8)
        assert [server.wait(pid) for pid in writers] == [0] * 8
    acknowledged = [int(version) for version in (tmp_path / "versions").read_text().split()]
    store = blocking.open(tmp_path / "s", "r")
    snapshot = store.snapshot()
    assert sorted(acknowledged) == list(range(2, 82))
    assert snapshot.version == 81
    assert snapshot.array("cells").read().tolist() == list(range(80))
    assert snapshot.array("total").read().tolist() == [80]
    assert len({c.message for c in store.history()}) == 81
    assert store.verify().ok


async def test_errors_form_one_hierarchy() -> None:
    errors = [e for e in vars(tstore.errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert all(issubclass(e, TStoreError) for e in errors)
    assert {e.__name__ for e in errors} <= set(tstore.errors.__all__)


@pytest.mark.parametrize("order", ["group first", "array first"])
@pytest.mark.parametrize("path", ["new", "new/below"])
async def test_a_group_and_an_array_do_not_share_a_path(store: tstore.Store, order: str, path: str) -> None:
    """Neither can a group be below an array."""
    tx = store.transaction()
    if order == "array first":
        await (await tx.create_array("new", (1,), "int8")).write(1)
        with pytest.raises(AlreadyExists):
            await tx.create_group(path)
    else:
        await tx.create_group(path)
        with pytest.raises(AlreadyExists):
            await tx.create_array("new", (1,), "int8")
    with pytest.raises(AlreadyExists):
        await tx.create_group("w/below")
    await tx.commit()
    assert (await store.verify()).ok


async def test_an_absent_array_is_reported_with_the_staged_ones() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await tx.create_array("weights", (4,), "float32", sparse=True)
        with pytest.raises(NotFound, match="no array 'weihts', nor any other; this transaction has weights"):
            await tx.array("weihts")
