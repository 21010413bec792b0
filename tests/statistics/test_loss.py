"""`quantization_loss` and `baseline`: quantized copies against their sources."""

from __future__ import annotations

import json
import uuid
from typing import Any

import exmy
import numpy as np
import pytest

import tstore
from tstore.errors import InvalidArgument, NotFound, SnapshotExpired

ROWS = np.random.default_rng(0).standard_normal((512, 256)).astype("f4")
ROWS *= np.linspace(1, 3, 512, dtype="f4")[:, None]


async def quantized(**options: Any) -> tuple[tstore.Store, tstore.QuantizeReport]:
    """Return a store with step 1 and a quantized copy of it."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    await tstore.save(store, {"w": ROWS, "bias": np.ones(64, "f4")}, 1)
    return store, await tstore.quantize(store, **options)


@pytest.mark.parametrize(
    "options", [{"formats": "e4m3"}, {"bits": 4}, {"bits": 5, "block": 32}, {"formats": "e2m1", "axis": 1}]
)
async def test_all_values_give_the_error_of_the_report(options: dict[str, Any]) -> None:
    store, report = await quantized(**options)
    loss = await tstore.quantization_loss(store, "w", budget=None)
    [row] = [row for row in report.arrays if row.path == "w"]
    assert (loss.version, loss.source, loss.quantized) == (2, 1, row)
    assert loss.coverage.complete
    assert loss.sqnr == pytest.approx(row.sqnr)
    assert loss.difference.largest_error == row.largest_error
    decoded = await (await (await store.snapshot(report.tag)).array("w")).read()
    assert loss.rows is not None
    assert loss.columns is not None
    pairs = [(ROWS[a:b], decoded[a:b]) for a, b in zip(loss.rows.bounds[:-1], loss.rows.bounds[1:], strict=True)]
    assert loss.rows.sqnr.tolist() == pytest.approx([exmy.sqnr(x, y) for x, y in pairs])
    assert loss.rows.worst is not None
    assert loss.rows.worst.start == loss.rows.bounds[int(np.argmin(loss.rows.sqnr))]
    columns = [exmy.sqnr(ROWS[:, k], decoded[:, k]) for k in range(256)]
    assert loss.columns.sqnr.tolist() == pytest.approx(columns)
    assert loss.worst is not None
    assert loss.worst_sqnr == pytest.approx(exmy.sqnr(ROWS[loss.worst], decoded[loss.worst]))


async def test_the_worst_region_is_that_of_small_values_with_a_common_offset() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    values = np.random.default_rng(0).uniform(1, 2, (512, 512)).astype("f4")
    values[320:352] *= 2.0**-16
    await tstore.save(store, {"w": values}, 1)
    await tstore.quantize(store, "e4m3")
    loss = await tstore.quantization_loss(store, "w")
    assert loss.worst == (slice(320, 352), slice(0, 512))
    assert loss.worst_sqnr < loss.sqnr - 10


async def test_other_formats_have_about_the_same_size() -> None:
    store, _ = await quantized(formats="e1m2")
    loss = await tstore.quantization_loss(store, "w")
    assert {exmy.Format(other.format).bits for other in loss.others} == {4}
    assert [other.sqnr for other in loss.others] == sorted((other.sqnr for other in loss.others), reverse=True)
    assert {other.granularity for other in loss.others} == {"tensor", "block of 32"}
    [own] = [other for other in loss.others if other[:2] == ("e1m2", "tensor")]
    assert own.sqnr == pytest.approx(loss.sqnr, abs=0.5)
    assert "e1m2 packed (stored)" in loss.table()


async def test_a_sample_says_what_it_read() -> None:
    store, _ = await quantized(formats="e4m3")
    loss = await tstore.quantization_loss(store, "w", budget=1 << 14)
    assert 0 < loss.coverage.bytes_read <= 1 << 14
    full = await tstore.quantization_loss(store, "w", budget=None)
    assert loss.sqnr == pytest.approx(full.sqnr, abs=1)
    assert json.loads(json.dumps(loss.document(), allow_nan=False))["coverage"]["complete"] is False


async def test_what_is_not_quantized_is_refused() -> None:
    store, _ = await quantized(formats="e4m3")
    with pytest.raises(NotFound, match="has no report"):
        await tstore.quantization_loss(store, "w", at=1)
    with pytest.raises(InvalidArgument, match="bias is exact in version 2"):
        await tstore.quantization_loss(store, "bias")
    with pytest.raises(NotFound, match="no array"):
        await tstore.quantization_loss(store, "v")
    with pytest.raises(InvalidArgument, match="budget=0"):
        await tstore.quantization_loss(store, "w", budget=0)


async def test_a_source_that_has_expired_is_named() -> None:
    store, _ = await quantized(formats="e4m3")
    await tstore.save(store, {"w": ROWS}, 2)
    await store.collect(tstore.Keep(last=1, tags=("step/1/e4m3",)))
    with pytest.raises(SnapshotExpired):
        await tstore.quantization_loss(store, "w", at="step/1/e4m3")


async def test_the_baseline_is_the_source_the_step_before_or_the_version_before() -> None:
    store, _ = await quantized(formats="e4m3")
    async with store.transaction() as tx:
        await tx.create_group("g")
    await tstore.save(store, {"w": ROWS + 1}, 7)
    await tstore.quantize(store, "e2m3", at=1)
    assert [await tstore.baseline(store, at) for at in (2, 3, 4, "step/7", 5, None)] == [1, 1, 1, 1, 1, 1]
    with pytest.raises(NotFound, match="no version before 1"):
        await tstore.baseline(store, 1)
    with pytest.raises(NotFound):
        await tstore.baseline(store, "nothing")
    empty = await tstore.open(f"memory://{uuid.uuid4()}")
    with pytest.raises(NotFound, match="no commit yet"):
        await tstore.baseline(empty)


async def test_a_baseline_copies_the_tags_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store = await tstore.open("memory://")
    for step in range(40):
        await tstore.save(store, {"w": np.full(4, step, "float32")}, step=step)
    copied = 0

    def tags(snapshot: tstore.Snapshot) -> dict[str, int]:
        nonlocal copied
        copied += 1
        return dict(snapshot.tree.tags)

    monkeypatch.setattr(tstore.Snapshot, "tags", property(tags))
    assert await tstore.baseline(store) == 39
    assert copied < 4  # and not once a step
