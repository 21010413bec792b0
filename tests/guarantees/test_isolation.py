"""Serializable transactions: what they read is unchanged in the version before their own."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tstore
import tstore.sync as blocking
from tstore.errors import AlreadyExists, Conflict, InvalidArgument, NotFound

BASE = np.arange(64, dtype="i4").reshape(8, 8)


@pytest.fixture
async def store() -> tstore.Store:
    """Return a store whose version 1 has "w" (8×8, chunks 4×4, 0…63), "x" and "y" (1 each), "g/v" and "g"."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await (await tx.create_array("w", (8, 8), "int32", (4, 4))).write(BASE)
        for name in ("x", "y"):
            await (await tx.create_array(name, (1,), "int32", (1,))).write(1)
        await (await tx.create_array("g/v", (4,), "float64", (2,))).write(1.5)
        await tx.create_group("g", {"kind": "group"})
    return store


Step = Callable[[tstore.Transaction], Awaitable[object]]


def reads(path: str, index: Any = ...) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        await (await tx.array(path))[index].read()

    return step


async def reads_points(tx: tstore.Transaction, path: str, *points: list[int]) -> None:
    await (await tx.array(path)).vindex[tuple(points)].read()


def looks(path: str) -> Step:
    return lambda tx: tx.array(path)


def misses(path: str) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        with pytest.raises(NotFound):
            await tx.array(path)

    return step


def finds_taken(path: str) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        with pytest.raises(AlreadyExists):
            await tx.create_array(path, (1,), "int8")

    return step


def lists(tx: tstore.Transaction) -> Awaitable[object]:
    return tx.paths()


def writes(path: str, value: int, index: Any = ...) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        await (await tx.array(path))[index].write(value)

    return step


def creates(path: str) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        await (await tx.create_array(path, (2,), "int8", (2,))).write(0)

    return step


def creates_group(path: str) -> Step:
    return lambda tx: tx.create_group(path, {"a": 1})


def deletes(path: str) -> Step:
    return lambda tx: tx.delete(path)


def resizes(path: str, *shape: int) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        await (await tx.array(path)).resize(shape)

    return step


def appends(path: str, count: int, axis: int) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        array = await tx.array(path)
        shape = [count if i == axis else n for i, n in enumerate(array.shape)]
        await array.append(np.zeros(shape, array.dtype), axis)

    return step


def copies(path: str) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        await tx.copy_array(await tx.array(path), "copy")

    return step


def replaces(tx: tstore.Transaction) -> Awaitable[object]:
    return tx.staging.replace_all(b"")


def both(*steps: Step) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        for one in steps:
            await one(tx)

    return step


CHUNK = np.s_[0:4, 0:4]
OTHER = np.s_[4:8, 0:4]
AFTER_APPEND: dict[str, tuple[Step, Step, list[str]]] = {
    f"a value after an append of {count} along axis {axis}{name}": (
        both(*first, appends("w", count, axis), reads("w", OTHER)),
        writes("w", -1, OTHER),
        ["w, chunk (1, 0)"],
    )
    for axis in (0, 1)
    for count in (1, 4, 8)
    for name, first in {"": (), ", after one before": (appends("w", 4, 1),)}.items()
}

# the reads of a transaction (which then writes "y"), the concurrent commit of another, and the invalidated reads
STALE: dict[str, tuple[Step, Step, list[str]]] = AFTER_APPEND | {
    "a value after a resize": (
        both(resizes("w", 8, 12), reads("w", OTHER)),
        writes("w", -1, OTHER),
        ["w, chunk (1, 0)"],
    ),
    "a value after a smaller shape": (
        both(resizes("w", 8, 4), reads("w", OTHER)),
        writes("w", -1, OTHER),
        ["w, chunk (1, 0)"],
    ),
    "points after an append": (
        both(appends("w", 4, 1), lambda tx: reads_points(tx, "w", [5, 6], [1, 2])),
        writes("w", -1, OTHER),
        ["w, chunk (1, 0)"],
    ),
    "a copy": (copies("w"), writes("w", -1, OTHER), ["w, chunk (1, 0)"]),
    "a copy after an append": (
        both(appends("w", 4, 1), copies("w")),
        writes("w", -1, OTHER),
        ["w, chunk (1, 0)"],
    ),
    "a value": (reads("x"), writes("x", 5), ["x, chunk (0,)"]),
    "an element, against another of its chunk": (
        reads("w", np.s_[0, 0]),
        writes("w", -1, np.s_[3, 3]),
        ["w, chunk (0, 0)"],
    ),
    "with a step": (reads("w", np.s_[::-5, 1]), writes("w", -1, CHUNK), ["w, chunk (0, 0)"]),
    "a value of an array that was resized": (reads("w"), resizes("w", 8, 9), ["w"]),
    "a shape": (looks("w"), resizes("w", 8, 9), ["w"]),
    "a value of an array that was deleted": (reads("g/v"), deletes("g"), ["g/v"]),
    "an array that was deleted and created anew": (looks("x"), both(deletes("x"), creates("x")), ["x"]),
    "a phantom in the list": (lists, creates("new"), ["new"]),
    "a phantom in the list, gone": (lists, deletes("g/v"), ["g/v"]),
    "all replaced": (reads("x"), replaces, ["x"]),
    "the list, all replaced": (lists, replaces, ["g/v", "w", "x", "y"]),
    "a path that was free": (misses("new"), creates("new"), ["new"]),
    "a path that was taken": (finds_taken("w"), deletes("w"), ["w"]),
    "a path that was taken above": (finds_taken("w/below"), deletes("w"), ["w"]),
    "a path that was taken below": (finds_taken("g"), deletes("g"), ["g", "g/v"]),
    "a delete of the same": (deletes("g/v"), deletes("g"), ["g/v"]),
}
RESTATED = ("all replaced", "after a resize", "smaller shape", "axis 0, after one before")
"""How the names of those end whose transaction sets a shape or meets one, so that it conflicts in any case."""
HOLDS: dict[str, tuple[Step, Step]] = {
    "appended values": (
        both(appends("w", 4, 1), reads("w", np.s_[:, 8:])),
        writes("w", -1, OTHER),
    ),
    "another chunk, after an append": (
        both(appends("w", 4, 1), reads("w", CHUNK)),
        writes("w", -1, OTHER),
    ),
    "an array created anew": (
        both(deletes("x"), creates("x"), reads("x")),
        writes("w", -1, OTHER),
    ),
    "another chunk": (reads("w", CHUNK), writes("w", -1, np.s_[4:, :4])),
    "chunks between those that were read": (reads("w", np.s_[::7, 0]), writes("w", -1, np.s_[:, 4:])),
    "the same values again": (reads("x"), writes("x", 1)),
    "another array": (reads("w"), writes("x", 5)),
    "metadata, against values": (looks("w"), writes("w", 5)),
    "the list, against values": (lists, writes("w", 5)),
    "the list, against a shape": (lists, resizes("w", 8, 9)),
    "the list, against a group": (lists, creates_group("h")),
    "another free path": (misses("new"), creates("other")),
    "an array created in one group": (creates("g/a"), creates("g/b")),
}


async def committed(
    store: tstore.Store, isolation: Literal["snapshot", "serializable"], first: Step, meanwhile: Step
) -> int:
    """Commit a transaction that does `first` and creates "out", while another commits `meanwhile`."""
    tx = store.transaction(isolation=isolation)
    await first(tx)
    await creates("out")(tx)
    async with store.transaction() as other:
        await meanwhile(other)
    return await tx.commit()


@pytest.mark.parametrize("name", STALE)
async def test_a_changed_read_is_a_conflict_that_names_it(store: tstore.Store, name: str) -> None:
    first, meanwhile, lost = STALE[name]
    with pytest.raises(Conflict, match="version 2") as caught:
        await committed(store, "serializable", first, meanwhile)
    assert "has read" in str(caught.value)
    assert caught.value.paths == lost
    assert "out" not in (await store.snapshot()).paths()


@pytest.mark.parametrize("name", [name for name in STALE if not name.endswith(RESTATED)])
async def test_snapshot_isolation_allows_it(store: tstore.Store, name: str) -> None:
    first, meanwhile, _ = STALE[name]
    assert await committed(store, "snapshot", first, meanwhile) == 3


@pytest.mark.parametrize("name", HOLDS)
async def test_an_unchanged_read_is_no_conflict(store: tstore.Store, name: str) -> None:
    assert await committed(store, "serializable", *HOLDS[name]) == 3


async def test_write_skew_is_refused(store: tstore.Store) -> None:
    """Each takes 1 if x + y ≥ 2, so that both together would make the sum 0."""

    async def take(isolation: Literal["snapshot", "serializable"], path: str) -> tstore.Transaction:
        tx = store.transaction(isolation=isolation)
        rows = [await (await tx.array(p)).read() for p in ("x", "y")]
        assert sum(int(r[0]) for r in rows) == 2
        await (await tx.array(path)).write(0)
        return tx

    first, second = await take("serializable", "x"), await take("serializable", "y")
    await first.commit()
    with pytest.raises(Conflict) as caught:
        await second.commit()
    assert caught.value.paths == ["x, chunk (0,)"]
    async with store.transaction() as tx:
        await (await tx.array("x")).write(1)
    first, second = await take("snapshot", "x"), await take("snapshot", "y")
    await first.commit()
    await second.commit()  # snapshot isolation allows this skew


async def test_a_serializable_transaction_reads_its_own_writes(store: tstore.Store) -> None:
    async with store.transaction(isolation="serializable") as tx:
        a = await tx.create_array("a", (4,), "int32", (2,))
        await a.write([1, 2, 3, 4])
        await (await tx.array("x")).write(7)
        assert (await a.read()).tolist() == [1, 2, 3, 4]
        assert (await (await tx.array("x")).read()).tolist() == [7]
        assert await tx.paths() == ["a", "g/v", "w", "x", "y"]
        await tx.delete("a")
        assert await tx.paths() == ["g/v", "w", "x", "y"]
    assert tx.version == 2


async def test_reads_are_validated_against_each_newer_version(store: tstore.Store) -> None:
    tx = store.transaction(isolation="serializable")
    await reads("x")(tx)
    for path, value in (("y", 2), ("x", 9), ("y", 3)):
        async with store.transaction() as other:
            await writes(path, value)(other)
    with pytest.raises(Conflict, match="version 3"):
        await tx.commit()


TAGS = [
    # the tag edits of the transaction, those of newer ones in order, and the tags whose lookups changed
    ({"drop_tag": "t"}, [{"drop_tag": "t"}], ["tag t"]),
    ({"drop_tag": "t"}, [{"drop_tag": "u"}, {"tag": "v"}], []),
    ({"tag": "v"}, [{"tag": "w"}, {"drop_tag": "w"}], []),
    ({"move_tag": "w"}, [{"drop_tag": "t"}], []),
]


@pytest.mark.parametrize(("mine", "newer", "lost"), TAGS)
async def test_a_tag_lookup_counts_as_a_read(
    store: tstore.Store, mine: dict[str, str], newer: list[dict[str, str]], lost: list[str]
) -> None:
    for tag in "tu":
        async with store.transaction(tag=tag):
            pass
    tx = store.transaction(isolation="serializable", **mine)  # type: ignore[arg-type]
    await creates("out")(tx)
    for edits in newer:
        async with store.transaction(**edits):  # type: ignore[arg-type]
            pass
    if not lost:
        assert await tx.commit() == 4 + len(newer)
        return
    with pytest.raises(Conflict, match="version 4") as caught:
        await tx.commit()
    assert caught.value.paths == lost


async def test_a_tag_removed_by_a_gc_counts_as_changed(store: tstore.Store) -> None:
    async with store.transaction(tag="t"):
        pass
    async with store.transaction() as other:
        await creates("y2")(other)
    serial = store.transaction(isolation="serializable", drop_tag="t")
    snapshot = store.transaction(drop_tag="t")
    await creates("out")(serial)
    await creates("out")(snapshot)
    assert (await store.collect(tstore.Keep(last=1))).tags == ["t"]
    with pytest.raises(Conflict) as caught:
        await serial.commit()
    assert caught.value.paths == ["tag t"]
    await snapshot.commit()


async def test_a_host_of_a_group_cannot_be_serializable(store: tstore.Store) -> None:
    with pytest.raises(InvalidArgument, match="fragment"):
        store.transaction(isolation="serializable", name="n", host=0, hosts=2, attempt="a")


def test_blocking_transactions_can_be_serializable() -> None:
    store = blocking.open(f"memory://{uuid.uuid4()}")
    with store.transaction() as tx:
        tx.create_array("x", (1,), "int32").write(1)
    tx = store.transaction(isolation="serializable")
    tx.array("x").read()
    with store.transaction() as other:
        other.array("x").write(2)
    with pytest.raises(Conflict):
        tx.commit()


CELLS = st.lists(st.integers(0, 5), max_size=3)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 2), st.tuples(CELLS, st.integers(0, 5))),
        st.tuples(st.just("commit"), st.integers(0, 2), st.none()),
    ),
    max_size=20,
)


@given(ACTIONS, st.sampled_from([1, 2]))
def test_committed_transactions_are_serial_in_their_order(actions: list[Any], chunk: int) -> None:
    asyncio.run(serial(actions, chunk))


async def serial(actions: list[Any], chunk: int) -> None:
    """Each transaction sets a cell to 1 + the sum of others; the result is that of a serial execution."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await (await tx.create_array("w", (6,), "int64", (chunk,))).write(0)
    model = [0] * 6
    open_ones: dict[int, tuple[tstore.Transaction, list[tuple[list[int], int]]]] = {}
    for action, number, step in [*actions, *[("commit", n, None) for n in range(3)]]:
        if action == "add":
            tx, steps = open_ones.setdefault(number, (store.transaction(isolation="serializable"), []))
            w = await tx.array("w")
            cells, target = step
            await w[target].write(1 + sum([int(await w[c].read()) for c in cells]))
            steps.append((cells, target))
        elif number in open_ones:
            tx, steps = open_ones.pop(number)
            try:
                await tx.commit()
            except Conflict:
                continue
            for cells, target in steps:
                model[target] = 1 + sum(model[c] for c in cells)
            actual = await (await (await store.snapshot()).array("w")).read()
            assert actual.tolist() == model
