"""The repr of each public object is one short line, however large the object is."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import exmy
import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tstore.core.maintenance.verify import VerifyReport

MANY = [f"name {number}" for number in range(10_000)]
NUMBERS = tuple(range(10_000))
NOW = datetime.datetime.now(datetime.UTC)

REPORTS = [
    tstore.CollectReport(7, list(NUMBERS), MANY, MANY, MANY, MANY, 5, 6, False),
    VerifyReport(1, 2, 3, 4, MANY, MANY, []),
    tstore.CopyReport(1, 2, 3, 4, 5),
    tstore.RestorePlan(1, 5, 6, dict.fromkeys(MANY, 1), {}),
    tstore.ArrayDiff("a/b", "changed", None, None, ("shape", "attributes"), 3, None),
    tstore.Diff(1, 2, (tstore.ArrayDiff("a/b", "added", None, None, (), 3, None),) * 10_000, tuple(MANY)),
    tstore.Commit(1, "step/1", "\n".join(MANY), NOW, tuple(MANY), "id", 5, dict.fromkeys(MANY)),
    tstore.PendingTransaction("id", "name", 20_000, NUMBERS, NUMBERS, dict.fromkeys(NUMBERS, 1.0)),
    tstore.Retry(3, "another commit came first"),
    tstore.Step(5, 6, NOW, dict.fromkeys(MANY, 1.0)),
    tstore.EverySteps(5),
    tstore.EverySeconds(600.0),
    tstore.OnPreemption(),
    tstore.Continuous(),
    tstore.SaveReport(10**9, 10**9, 1.0, 1.0, 1.0, 10**15, 10**15, 10**6),
    tstore.Keep(last=5, tags=("a", "b")),
    tstore.Tiers("local", "durable"),
    tstore.TierStep(5, "local", 3, 6, NOW, 10**15, True),
    tstore.Patch("a/b", np.arange(10_000), np.zeros(10_000)),
    tstore.Bits(5.0),
    tstore.MinSqnr(30.0),
    tstore.Cache("folder"),
    tstore.PerHost(np.zeros((100, 100))),
    tstore.Shards((10_000, 4), "int8", [((slice(n, n + 1), slice(0, 4)), None) for n in range(10_000)]),
    tstore.PackedShards(
        (4,), np.dtype("f4"), [((slice(0, 4),), exmy.quantize(np.ones(4, "f4"), "e4m3"))] * 10_000
    ),
]


def short(shown: str) -> bool:
    return len(shown) < 220 and "\n" not in shown


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: type(r).__name__)
def test_a_report_is_one_line(report: object) -> None:
    assert short(repr(report)), repr(report)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[blocking.Store]:
    blocking.save(tmp_path / "s", {"x": np.zeros((3, 2))}, 0)
    with blocking.open(tmp_path / "s") as store:
        yield store


def test_objects_of_a_store_have_a_repr_of_one_line(store: blocking.Store) -> None:
    snapshot, transaction = store.snapshot(), store.transaction()
    shown = [repr(thing) for thing in (store, snapshot, snapshot.array("x"), transaction, next(store.history()))]
    assert all(map(short, shown)), shown
    assert shown[1].endswith("/s at version 1>")
    assert shown[2] == "<tstore.sync.Array 'x' float64 (3, 2) chunks=(3, 2)>"
    assert shown[3].startswith("<tstore.sync.Transaction ")
    assert shown[3].endswith("/s: open>")
    assert "version=1 tag='step/0'" in shown[4]
    assert short(repr(blocking.restore(store, map=True)))
    with blocking.Checkpointer(store) as checkpointer:
        save = checkpointer.save(1, {"x": np.zeros(3)})
        assert short(repr(checkpointer))
        assert short(repr(save))
    assert short(repr(store.follow()))
    with store.transaction() as tx:
        tx.create_group("g")
    assert repr(tx).endswith("/s: committed>")
    assert "version=3 tag=None" in repr(next(store.history()))


def test_no_public_class_is_forgotten() -> None:
    public = {name for name in tstore.__all__ if isinstance(getattr(tstore, name), type)}
    shown = {type(report).__name__ for report in REPORTS}
    of_a_store = {
        "Store",
        "Snapshot",
        "Array",
        "Transaction",
        "Checkpointer",
        "BackgroundSave",
        "Appended",
        "Follower",
        "Mapped",
    }
    elsewhere = {"QuantizeReport", "QuantizedArray", "QuantizationLoss", "Summary", "HeatMap"}
    assert public == (shown | of_a_store | elsewhere) - {"VerifyReport"}
