"""Calls with odd arguments on a small store.

A call must either raise a `TStoreError` or succeed; afterwards the store must be as readable and writable as
before.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import numpy as np

import tstore
from tests.fuzz.journal import Fault
from tstore import Keep
from tstore.errors import TStoreError

__all__ = ["CALLS", "VALUES", "odd_call"]

VALUES: tuple[Any, ...] = (
    None,
    True,
    5,
    -1,
    0.5,
    float("nan"),
    float("inf"),
    10**30,
    b"bytes",
    "",
    "\ud800",
    "x" * 5000,
    "a//b",
    "../up",
    "a\0b",
    "step/007",
    "step/" + "9" * 5000,
    np.int64(3),
    np.float32(0.5),
    np.array(2.0),
    np.array([1, 2]),
    np.datetime64("2020-01-01"),
    [],
    [None],
    {},
    {1: "x"},
    {"x": float("nan")},
    {"k": {2: b""}},
    {"metrics": 5},
    {"metrics": {0: 0.5}},
    (3, "loss"),
    object(),
    timedelta(-1),
)

_TREE = {"w": np.arange(6.0)}

Call = Callable[[tstore.Store, Any], Awaitable[object]]


def _begin_with(name: str) -> Call:
    async def call(store: tstore.Store, value: Any) -> None:
        async with store.transaction(**{name: value}) as tx:
            await tx.create_array("odd", (2,), "int64", sparse=True)

    return call


def _create_with(name: str) -> Call:
    async def call(store: tstore.Store, value: Any) -> None:
        arguments: dict[str, Any] = {"path": "odd", "shape": (4,), "dtype": "int64", "sparse": True} | {
            name: value
        }
        async with store.transaction() as tx:
            await tx.create_array(**arguments)

    return call


def _in_transaction(work: Callable[[tstore.Transaction, Any], Awaitable[object]]) -> Call:
    async def call(store: tstore.Store, value: Any) -> None:
        async with store.transaction() as tx:
            await tx.create_array("odd", (4,), "float64", sparse=True)
            await work(tx, value)

    return call


def _save_with(name: str) -> Call:
    async def call(store: tstore.Store, value: Any) -> None:
        arguments: dict[str, Any] = {"tree": _TREE, "step": 7} | {name: value}
        await tstore.save(store, **arguments)

    return call


def _restore_with(name: str) -> Call:
    return lambda store, value: tstore.restore(store, **{name: value})


def _quantize_with(name: str) -> Call:
    return lambda store, value: tstore.quantize(store, **{name: value})


async def _write(tx: tstore.Transaction, value: Any) -> None:
    await (await tx.array("odd")).write(value)


async def _resize(tx: tstore.Transaction, value: Any) -> None:
    await (await tx.array("odd")).resize(value)


async def _index(tx: tstore.Transaction, value: Any) -> None:
    await (await tx.array("odd"))[value].read()


async def _read_into(store: tstore.Store, value: Any) -> None:
    await (await (await store.snapshot()).array("w")).read(value)


async def _collect(store: tstore.Store, value: Any, name: str) -> None:
    await store.collect(Keep(**{name: value}))


def _collect_with(name: str) -> Call:
    return lambda store, value: _collect(store, value, name)


CALLS: dict[str, Call] = {
    **{
        f"transaction({n})": _begin_with(n)
        for n in (
            "message",
            "tag",
            "move_tag",
            "drop_tag",
            "metadata",
            "isolation",
            "durability",
            "name",
            "attempt",
        )
    },
    **{
        f"create_array({n})": _create_with(n)
        for n in (
            "path",
            "shape",
            "dtype",
            "chunks",
            "codecs",
            "fill_value",
            "attributes",
            "dimension_names",
        )
    },
    "metadata[key]": lambda store, value: _begin_with("metadata")(store, {"k": value}),
    "create_group": _in_transaction(lambda tx, value: tx.create_group(value)),
    "create_group(attributes)": _in_transaction(lambda tx, value: tx.create_group("g", value)),
    "delete": _in_transaction(lambda tx, value: tx.delete(value)),
    "array": _in_transaction(lambda tx, value: tx.array(value)),
    "write": _in_transaction(_write),
    "resize": _in_transaction(_resize),
    "index": _in_transaction(_index),
    "read(out)": _read_into,
    **{
        f"save({n})": _save_with(n)
        for n in (
            "tree",
            "step",
            "metrics",
            "attributes",
            "message",
            "codecs",
            "host",
            "hosts",
            "attempt",
            "timeout",
            "durability",
        )
    },
    "save(metrics[loss])": lambda store, value: tstore.save(store, _TREE, 7, metrics={"loss": value}),
    "save(leaf)": lambda store, value: tstore.save(store, {"w": value}, 7),
    **{f"restore({n})": _restore_with(n) for n in ("step", "at", "target", "only")},
    **{
        f"quantize({n})": _quantize_with(n)
        for n in ("formats", "min_sqnr", "bits", "at", "tag", "message", "axis", "block", "scale")
    },
    **{f"Keep({n})": _collect_with(n) for n in ("last", "every", "best", "newer_than", "tags")},
    "collect(abandoned)": lambda store, value: store.collect(None, abandoned=value),
    "collect(keep)": lambda store, value: store.collect(value),
    "snapshot": lambda store, value: store.snapshot(value),
    "outcome": lambda store, value: store.outcome(value),
    "finish": lambda store, value: store.finish(value),
    "diff": lambda store, value: store.diff(value),
    "open(mode)": lambda store, value: tstore.open(store.url, value),
}


async def odd_call(url: str, choice: random.Random) -> tuple[str, Fault | None]:
    """Make one odd call on a new store at the URL, and return its name and the fault, if any."""
    name = choice.choice(list(CALLS))
    value = choice.choice(VALUES)
    shown = f"{name} with {repr(value)[:60]}"
    async with await tstore.open(url, "x") as store:
        await tstore.save(store, _TREE, 1, metrics={"loss": 1.0})
        await tstore.save(store, _TREE, 2, metrics={"loss": 2.0})
        try:
            await CALLS[name](store, value)
        except TStoreError:
            pass
        except Exception as error:
            return name, Fault(
                f"odd {name}", type(error).__name__, f"{shown}: {type(error).__name__}: {error}"[:300]
            )
    try:
        await _check_usable(url)
    except Exception as error:
        return name, Fault(
            f"odd {name}",
            f"bricked: {type(error).__name__}",
            f"{shown}, then {type(error).__name__}: {error}"[:400],
        )
    return name, None


async def _check_usable(url: str) -> None:
    """Raise unless the store can still be read, committed to, saved to and collected."""
    async with await tstore.open(url) as store:
        if (await tstore.restore(store, 2))["w"].tolist() != _TREE[
            "w"
        ].tolist():  # the newest step, which no rule expires
            raise AssertionError("other values")
        [c async for c in store.history()]
        async with store.transaction("after"):
            pass
        await store.snapshot()
        await tstore.steps(store)
        await tstore.save(store, _TREE, 100)
        await store.collect(Keep(last=2))
        await tstore.save(store, _TREE, 101)
        await tstore.restore(store)
        report = await store.verify()
        if not report.ok:
            raise AssertionError(report.faults[0])
