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


async def test_a_loss_is_called_only_for_arrays_in_budgets(url: Path) -> None:
    calls = []

    def loss(arrays: dict[str, Any]) -> float:
        changed = [name for name in TREE if not np.array_equal(arrays[name], TREE[name])]
        calls.append(changed)
        return len(changed)

    report = await tstore.quantize(url, {"b": {"min_sqnr": 20}}, bits=6, sensitivity=loss)
    assert calls == [[], ["a"], ["c"]]
    assert len(report.encoded) == 3
    with pytest.raises(InvalidArgument, match="sensitivity: losses and numbers for arrays apply to budgets"):
        await tstore.quantize(url, min_sqnr=20, sensitivity=loss, tag="again")
    assert len(calls) == 3


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


@pytest.mark.parametrize(("columns", "most"), [(16, 0.9), (64, 0.45)])
async def test_small_values_that_alone_matter_get_the_bits_they_need(
    tmp_path: Path, columns: int, most: float
) -> None:
    """With the same bits as y, these columns of x would be zero: the relative errors would add up to 1."""
    x = TREE["a"].copy()
    x[:, :columns] *= 0.02
    importance = np.zeros(256)
    importance[:columns] = 1
    await tstore.save(tmp_path, {"x": x, "y": TREE["b"]}, 0)
    report = await tstore.quantize(tmp_path, bits=4, sensitivity={"x": importance})
    stored = await tstore.restore(tmp_path, at=report.tag)
    noise = {"x": (x - stored["x"])[:, :columns], "y": TREE["b"] - stored["y"]}
    signal = {"x": x[:, :columns], "y": TREE["b"]}
    assert sum(np.sum(noise[name] ** 2) / np.sum(signal[name] ** 2) for name in signal) < most
    assert 3.9 < report.bits_per_value <= 4


SCALES = ["search", "float", "e4m3", "6bit"]
PACKED: list[dict[str, Any]] = [
    {"formats": "e2m1"},
    {"formats": "e2m1", "axis": 1},
    {"formats": "e2m1", "block": 32},
    {"formats": {"x": {"bits": 4.6, "coding": "packed"}, "y": "e2m1"}},
    {"formats": {"x": {"bits": 5, "coding": "packed"}, "y": "e3m2"}, "block": 64},
    {"formats": {"x": {"bits": 4.3, "coding": "packed"}, "y": "e2m1"}, "axis": 1},
    {"min_sqnr": 15, "axis": 1},
]


@pytest.mark.parametrize(
    ("scale", "options"),
    [
        pytest.param(scale, options, id=f"{options}-{scale}", marks=() if (i + j) % 4 == 0 else pytest.mark.deep)
        for i, options in enumerate(PACKED)
        for j, scale in enumerate(SCALES)
    ],
)
async def test_packed_codes_of_important_columns_have_less_error(
    tmp_path: Path, scale: Any, options: dict[str, Any]
) -> None:
    """Chunks at the edges are shorter; an array with equal weights is stored as without them."""
    x = (np.random.default_rng(1).standard_t(3, (330, 256)) * 0.1).astype("f4")
    x[:, ::16] *= 8  # larger than the others, so that they decide offsets and scales
    importance = np.ones(256)
    importance[::16] = 1e-4
    async with await tstore.open(tmp_path) as store, store.transaction("", "source") as tx:
        for name in ("x", "y"):
            await (await tx.create_array(name, shape=x.shape, dtype="float32", chunks=(100, 256))).write(x)
    error, size = {}, {}
    for name, sensitivity in {"plain": None, "given": {"x": importance, "y": np.full((330, 1), 0.3)}}.items():
        report = await tstore.quantize(
            tmp_path, scale=scale, sensitivity=sensitivity, at="source", tag=name, **options
        )
        stored = await tstore.restore(tmp_path, at=name)
        error[name] = float(np.sum((importance * (x - stored["x"]) ** 2), dtype="f8"))
        size[name] = report.arrays[0].bytes_after
        row = (await tstore.quantize_report(tmp_path, name)).arrays[0]
        if name == "plain":
            assert row.weighted_sqnr is None
        else:
            decibel = 10 * np.log10(float(np.sum(importance * x**2, dtype="f8")) / error[name])
            assert row.weighted_sqnr == pytest.approx(decibel, abs=0.01)
            assert f"{row.sqnr:.1f} (weighted {row.weighted_sqnr:.1f})" in report.table()
        codes = (await tstore.restore(tmp_path, at=name, packed=True))["x"] if report.arrays[0].format else None
        if codes is not None:
            np.testing.assert_array_equal(codes.dequantize(), stored["x"])
        if name == "plain":
            plain = stored["y"]
        else:
            np.testing.assert_array_equal(stored["y"], plain)
    if "min_sqnr" in options:
        signal = float(np.sum(importance * x**2, dtype="f8"))
        assert 15 <= 10 * np.log10(signal / error["given"]) < 23
    else:
        assert size["given"] <= size["plain"]
        assert error["given"] < 0.8 * error["plain"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5, "sensitivity": 3}, "sensitivity=3: expected weights by path, or a function"),
        ({"bits": 5, "sensitivity": {"aa": 1}}, "no array at these paths.*\n  'aa'"),
        ({"bits": 5, "sensitivity": {"a": -1}}, "sensitivity of a: expected finite numbers"),
        ({"bits": 5, "sensitivity": {"a": float("nan")}}, "sensitivity of a: expected finite numbers"),
        ({"bits": 5, "sensitivity": {"a": "high"}}, "sensitivity of a: 'high' is not a number"),
        ({"bits": 5, "sensitivity": {"a": "3"}}, "sensitivity of a: '3' is not a number"),
        ({"bits": 5, "sensitivity": {"a": np.full(256, 1 + 2j)}}, "sensitivity of a: .* is not a number"),
        ({"bits": 5, "sensitivity": {"a": np.array(["2026"], "M8[D]")}}, "sensitivity of a: .* is not a number"),
        ({"bits": 5, "sensitivity": {"a": [1, 2, 3]}}, r"sensitivity of a: the shape \(3,\) does not broadcast"),
        ({"min_sqnr": 5, "sensitivity": {"a": 2}}, "sensitivity of a: a number applies to budgets of bits"),
        (
            {"formats": "e4m3", "sensitivity": {"a": 1}},
            "sensitivity: losses and numbers for arrays apply to budgets",
        ),
        ({"formats": "e4m3", "sensitivity": lambda _: 1.0}, "losses and numbers for arrays apply to budgets"),
        (
            {"formats": "e4m3", "scale": "max", "sensitivity": {"a": np.arange(256)}},
            "sensitivity of a: importance of rows or columns can't affect the codes of its rule",
        ),
        ({"bits": 5, "sensitivity": lambda _: float("nan")}, "loss with the original arrays is nan"),
        ({"bits": 5, "sensitivity": lambda _: 1.0}, "the loss does not grow"),
    ],
)
async def test_bad_sensitivity_changes_nothing(url: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        await tstore.quantize(url, **options)
    async with await tstore.open(url) as store:
        assert await store.tags() == {"step/0": 1}


@pytest.mark.parametrize(
    ("shape", "advice"),
    [
        ((2, 3, 64), r"for each column, of shape \(64,\), or for each row, of shape \(2, 1, 1\)$"),
        ((64,), r"pass one number for each value, of shape \(64,\)$"),
        ((), "pass one number$"),
    ],
)
async def test_importance_of_the_wrong_shape_says_which_shapes_are_right(
    tmp_path: Path, shape: tuple[int, ...], advice: str
) -> None:
    await tstore.save(tmp_path, TREE | {"x": np.ones(shape, "f4")}, 0)
    with pytest.raises(InvalidArgument, match=advice):
        await tstore.quantize(tmp_path, bits=5, sensitivity={"x": np.arange(1, 6)})


async def sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: Any, **options: Any) -> Any:
    """Return the row of an array's report, for a quantization that studies a sample of every 16th row."""
    monkeypatch.setattr("tstore.quantization.values.SLAB", 1 << 14)
    monkeypatch.setattr("tstore.quantization.values._SAMPLE_BYTES", x.nbytes // 16)
    await tstore.save(tmp_path, {"x": x}, 0)
    [array] = (await tstore.quantize(tmp_path, **options)).arrays
    return array


@pytest.mark.parametrize("kind", ["f2", "f4"])
async def test_small_importance_counts_in_samples_of_any_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """In float16, it would be 0, and the first column would decide on its own."""
    x = (RNG.standard_normal((512, 256)) * 1000).astype(kind)
    x[:, 0] *= 1e-6
    importance = np.full(256, 1e-8)
    importance[0] = 1
    array = await sampled(tmp_path, monkeypatch, x, min_sqnr=20, sensitivity={"x": importance})
    assert array.weighted_sqnr >= 20
    assert array.bits_per_value < 5


@pytest.mark.parametrize("coding", ["entropy", "packed"])
async def test_importance_of_rows_that_no_sample_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coding: Any
) -> None:
    x = RNG.standard_normal((512, 256)).astype("f4")
    importance = np.zeros((512, 1))
    importance[7] = 1
    options = {"min_sqnr": 20, "coding": coding, "sensitivity": {"x": importance}}
    array = await sampled(tmp_path, monkeypatch, x, **options)
    assert array.weighted_sqnr >= 20
    assert array.bits_per_value < 5.5


async def test_noise_keeps_values_finite_and_leaves_out_arrays_that_are_not(tmp_path: Path) -> None:
    signs = np.where(np.tri(16) > 0, 1.0, -1.0)
    arrays = {"mask": np.where(signs > 0, 0, -np.inf), "f2": (65504 * signs).astype("f2"), "f8": signs * 2.0**600}
    await tstore.save(tmp_path, arrays, 0)

    def loss(noisy: dict[str, Any]) -> float:
        errors = [np.abs(noisy[path] / arrays[path] - 1).mean() for path in ("f2", "f8")]
        return float(np.exp(noisy["mask"]).mean() + sum(errors))

    report = await tstore.quantize(tmp_path, bits=45, sensitivity=loss)
    reasons = {a.path: a.reason for a in report.arrays}
    assert reasons["mask"] == "120 of 256 values are NaN or infinite"
    weights = {a.path: a.sensitivity for a in report.arrays}
    assert weights["mask"] == 1
    assert weights["f2"] > 1


async def test_weights_of_integers_are_refused(tmp_path: Path) -> None:
    await tstore.save(tmp_path, TREE | {"n": np.arange(1000).reshape(10, 100)}, 0)
    with pytest.raises(InvalidArgument, match="sensitivity of n: arrays of int64 are not encoded in eXmY"):
        await tstore.quantize(tmp_path, bits=5, sensitivity={"a": 2, "n": 2})
    with pytest.raises(InvalidArgument, match="sensitivity of n: arrays of int64 are not encoded in eXmY"):
        await tstore.quantize(tmp_path, bits=5, sensitivity={"n": np.arange(1, 11).reshape(10, 1)})


async def test_the_weights_of_a_report_are_accepted_again(tmp_path: Path) -> None:
    await tstore.save(tmp_path, TREE | {"n": np.arange(1000).reshape(10, 100)}, 0)
    first = await tstore.quantize(tmp_path, bits=5, sensitivity={"a": 2}, tag="first")
    weights = {array.path: array.sensitivity for array in first.arrays}
    again = await tstore.quantize(tmp_path, bits=5, sensitivity=weights, at="step/0", tag="again")
    assert [array.format for array in again.arrays] == [array.format for array in first.arrays]
