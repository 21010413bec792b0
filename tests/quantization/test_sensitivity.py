"""Sensitivity: weights by path, importance of rows and columns, and a loss that measures them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tstore.errors import InvalidArgument

RNG = np.random.default_rng(0)
TREE = {name: RNG.laplace(0, 0.1, (200, 256)).astype("f4") for name in ("a", "b", "c")}


@pytest.fixture
async def url(tmp_path: Path) -> Path:
    await tstore.save(tmp_path, TREE, 0)
    return tmp_path


@pytest.mark.parametrize("coding", ["entropy", "packed"])
async def test_a_weight_buys_bits(url: Path, coding: Any) -> None:
    report = await tstore.quantize(url, bits=5, coding=coding, sensitivity={"b": 100.0, "c": np.float32(0.01)})
    a, b, c = report.arrays
    assert c.bits_per_value + 1.5 < a.bits_per_value < b.bits_per_value - 1.5
    assert [each.sensitivity for each in (a, b)] == [1, 100]
    assert report.bits_per_value <= 5
    stored = await tstore.quantize_report(url, report.tag)
    assert [each.sensitivity for each in stored.arrays] == [each.sensitivity for each in report.arrays]


async def test_a_loss_is_measured_for_each_array(url: Path) -> None:
    """The loss is 50 times the squared error of b plus that of a, each relative; c does not matter."""
    calls = []

    def loss(arrays: dict[str, Any]) -> float:
        calls.append([name for name in TREE if not np.array_equal(arrays[name], TREE[name])])
        assert sorted(arrays) == sorted(TREE)
        error = {
            n: np.sum((arrays[n] - TREE[n]) ** 2, dtype="f8") / np.sum(TREE[n] ** 2, dtype="f8") for n in TREE
        }
        return float(3 + 50 * error["b"] + error["a"])

    report = await tstore.quantize(url, bits=4, sensitivity=loss)
    assert calls == [[], ["a"], ["b"], ["c"]]
    a, b, c = (each.sensitivity for each in report.arrays)
    assert (a, b) == (pytest.approx(1, rel=0.05), pytest.approx(50, rel=0.05))
    assert c < 0.3
    again = await tstore.quantize(
        url, bits=4, sensitivity={each.path: each.sensitivity for each in report.arrays}, at="step/0", tag="again"
    )
    assert [each.bytes_after for each in again.arrays] == [each.bytes_after for each in report.arrays]


async def test_importance_of_rows_and_columns(tmp_path: Path) -> None:
    """The columns of x with large values do not matter, so that its step follows the others."""
    x = TREE["a"].copy()
    x[:, :64] *= 30
    importance = np.ones(256)
    importance[:64] = 0
    await tstore.save(tmp_path, {"x": x, "y": TREE["b"]}, 0)
    plain = await tstore.quantize(tmp_path, bits=5, tag="plain")
    weighted = await tstore.quantize(tmp_path, bits=5, sensitivity={"x": importance}, at="step/0", tag="weighted")
    error = {}
    for report in (plain, weighted):
        y = (await tstore.restore(tmp_path, at=report.tag))["x"]
        error[report.tag] = np.sum((x - y)[:, 64:] ** 2)
        assert report.bits_per_value <= 5
    assert error["weighted"] < error["plain"] / 4
    rows = await tstore.quantize(tmp_path, bits=5, sensitivity={"x": np.ones((200, 1))}, at="step/0", tag="rows")
    assert [each.bytes_after for each in rows.arrays] == pytest.approx(
        [each.bytes_after for each in plain.arrays], rel=0.02
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5, "sensitivity": 3}, "sensitivity=3: expected weights by path, or a function"),
        ({"bits": 5, "sensitivity": {"aa": 1}}, "no array at these paths.*\n  'aa'"),
        ({"bits": 5, "sensitivity": {"a": -1}}, "sensitivity of a: expected finite numbers"),
        ({"bits": 5, "sensitivity": {"a": float("nan")}}, "sensitivity of a: expected finite numbers"),
        ({"bits": 5, "sensitivity": {"a": "high"}}, "sensitivity of a: 'high' is not a number"),
        ({"bits": 5, "sensitivity": {"a": [1, 2, 3]}}, r"sensitivity of a: the shape \(3,\) does not broadcast"),
        ({"bits": 5, "coding": "packed", "sensitivity": {"a": np.ones(256)}}, "needs coding='entropy'"),
        ({"min_sqnr": 5, "sensitivity": {"a": 1}}, "sensitivity of a: it applies to budgets of bits"),
        ({"formats": "e4m3", "sensitivity": {"a": 1}}, "sensitivity applies to budgets"),
        ({"bits": 5, "sensitivity": lambda _: float("nan")}, "loss with the original arrays is nan"),
        ({"bits": 5, "sensitivity": lambda _: 1.0}, "the loss does not grow"),
    ],
)
async def test_bad_sensitivity_changes_nothing(url: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await tstore.quantize(url, **options)
    async with await tstore.open(url) as store:
        assert await store.tags() == {"step/0": 1}
