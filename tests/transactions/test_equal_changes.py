"""What is equal does not conflict, what is lost does, and a conflict names exactly what both changed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import tstore
from tstore.errors import Conflict

Step = Callable[[tstore.Transaction], Awaitable[object]]

BASE = {"kind": "group", "n": 1}


@pytest.fixture
async def store() -> tstore.Store:
    """Return a store of the group "g" with attributes, and in it "a" of four chunks of the value 3."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await tx.create_group("", {"root": True})
        await tx.create_group("g", BASE)
        await (await tx.create_array("g/a", (8,), "i4", (2,))).write(3)
    return store


def group(path: str, **attributes: Any) -> Step:
    return lambda tx: tx.create_group(path, attributes)


def write(value: int, start: int = 2) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        await (await tx.array("g/a"))[start : start + 2].write(value)

    return step


def create(path: str) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        await (await tx.create_array(path, (2,), "i4", (2,))).write(3)

    return step


def delete(path: str) -> Step:
    return lambda tx: tx.delete(path)


def resize(*shape: int) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        await (await tx.array("g/a")).resize(shape)

    return step


def each(*steps: Step) -> Step:
    async def step(tx: tstore.Transaction) -> None:
        for one in steps:
            await one(tx)

    return step


AS_IT_WAS = group("g", **BASE)
MEET: dict[str, tuple[Step, Step]] = {
    "equal new groups": (group("new", n=1), group("new", n=1)),
    "equal new groups, with keys in another order": (group("new", a=1, b=2), group("new", b=2, a=1)),
    "equal new groups with different arrays": (
        each(group("new", n=1), create("new/a")),
        each(group("new", n=1), create("new/b")),
    ),
    "a new group, and an array in it": (group("new", n=1), create("new/a")),
    "an array, and a new group above it": (create("new/a"), group("new", n=1)),
    "a new group, and one below it": (group("new", n=1), group("new/below", n=2)),
    "attributes as they were, by both": (AS_IT_WAS, AS_IT_WAS),
    "attributes as they were, in another order": (group("g", n=1, kind="group"), AS_IT_WAS),
    "attributes as they were, and then changed": (AS_IT_WAS, group("g", n=2)),
    "attributes as they were, and changes of arrays": (each(write(5), create("g/b")), AS_IT_WAS),
    "attributes changed, and changes of arrays": (group("g", n=2), each(write(5), create("g/b"))),
    "attributes as they were, and a resize": (resize(7), AS_IT_WAS),
    "the root as it was": (group("", root=True), group("", root=True)),
    "the root changed, and an array": (group("", root=False), create("b")),
    "a chunk written as it was, by both": (write(3), write(3)),
    "a chunk changed, over one written as it was": (write(3), write(5)),
}
CONFLICTS: dict[str, tuple[Step, Step, list[str]]] = {
    "different new groups": (group("new", n=1), group("new", n=2), ["new"]),
    "new groups of one and of true": (group("new", n=1), group("new", n=True), ["new"]),
    "new groups of one and of 1.0": (group("new", n=1), group("new", n=1.0), ["new"]),
    "attributes counted up by both": (group("g", n=2), group("g", n=2), ["g"]),
    "attributes as they were, over a change": (group("g", n=2), AS_IT_WAS, ["g"]),
    "attributes changed and set back, over a change": (
        group("g", n=2),
        each(group("g", n=3), AS_IT_WAS),
        ["g"],
    ),
    "attributes as they were, over a delete": (delete("g"), AS_IT_WAS, ["g"]),
    "attributes as they were, over a delete and a group": (
        each(delete("g"), group("g", n=5)),
        AS_IT_WAS,
        ["g"],
    ),
    "attributes as they were, over a delete and an array": (each(delete("g"), create("g")), AS_IT_WAS, ["g"]),
    "the root as it was, over a change": (group("", root=False), group("", root=True), [""]),
    "a group over an array": (create("new"), group("new"), ["new"]),
    "an array over a group": (group("new"), create("new"), ["new"]),
    "an array below an array": (create("new"), create("new/a"), ["new/a"]),
    "an array above a group": (group("new/a"), create("new"), ["new/a"]),
    "a chunk counted up by both": (write(4), write(4), ["g/a, chunk (1,)"]),
    "a chunk as it was, over a change": (write(4), write(3), ["g/a, chunk (1,)"]),
    "some chunks of many": (
        each(write(4, 6), write(3, 4), write(4, 0)),
        each(write(9, 6), write(9, 4), write(9, 0), create("b"), group("", root=True)),
        ["g/a, chunk (0,)", "g/a, chunk (3,)"],
    ),
    "a delete of what was written, beside innocent ones": (
        each(write(4, 6), create("b"), group("", root=True)),
        each(delete("g"), create("c"), create("g/b"), create("d")),
        ["g/a"],
    ),
    "several": (
        each(create("z"), group("new", n=1), write(4), create("b")),
        each(write(5), create("a"), group("new", n=2), create("z")),
        ["g/a, chunk (1,)", "new", "z"],
    ),
}


async def commit_both(store: tstore.Store, first: Step, second: Step) -> None:
    winner, loser = store.transaction(), store.transaction()
    await first(winner)
    await second(loser)
    await winner.commit()
    await loser.commit()


async def contents(store: tstore.Store) -> dict[str, Any]:
    snapshot = await store.snapshot()
    values = {path: (await (await snapshot.array(path)).read()).tolist() for path in snapshot.paths()}
    return values | {f"{path}.": snapshot.attributes(path) for path in ("", "g", "new", "new/below")}


@pytest.mark.parametrize("name", MEET)
async def test_both_remain(store: tstore.Store, name: str) -> None:
    first, second = MEET[name]
    await commit_both(store, first, second)
    actual = await contents(store)
    both = [dict[str, Any](), dict[str, Any]()]
    for order, result in zip([(first, second), (second, first)], both, strict=True):
        async with store.transaction() as tx:
            await staged_anew(tx)
        for step in order:
            async with store.transaction() as tx:
                await step(tx)
        result.update(await contents(store))
    assert actual in both  # a serial execution
    assert (await store.verify()).ok


async def staged_anew(tx: tstore.Transaction) -> None:
    for path in {path.partition("/")[0] for path in await tx.paths()} | {"new"}:
        try:
            await tx.delete(path)
        except tstore.errors.NotFound:
            assert path == "new"
    await tx.create_group("", {"root": True})
    await tx.create_group("g", BASE)
    await (await tx.create_array("g/a", (8,), "i4", (2,))).write(3)


@pytest.mark.parametrize("name", CONFLICTS)
async def test_a_conflict_names_what_both_changed(store: tstore.Store, name: str) -> None:
    first, second, paths = CONFLICTS[name]
    with pytest.raises(Conflict) as caught:
        await commit_both(store, first, second)
    assert caught.value.paths == paths
    assert ("\n  the root group" in str(caught.value)) == ("" in paths)


async def test_equal_groups_go_out_in_one_record_and_changed_ones_do_not(store: tstore.Store) -> None:
    steps = [each(group("new", n=1), create(f"new/{i}"), AS_IT_WAS) for i in range(5)]
    steps += [group("g", n=2)]
    transactions = [store.transaction() for _ in steps]
    for step, tx in zip(steps, transactions, strict=True):
        await step(tx)
    await asyncio.gather(*[tx.commit() for tx in transactions])
    snapshot = await store.snapshot()
    assert snapshot.paths() == ["g/a", *(f"new/{i}" for i in range(5))]
    assert (snapshot.attributes("g"), snapshot.attributes("new")) == ({"n": 2}, {"n": 1})
    assert (await store.verify()).ok


async def test_the_paths_of_a_conflict_are_sorted_and_unique() -> None:
    error = Conflict("m", ["b", "a", "", "b"])
    assert error.paths == ["", "a", "b"]
    assert str(error) == "m:\n  the root group\n  a\n  b"
