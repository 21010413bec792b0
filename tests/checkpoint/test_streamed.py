"""Arrays that `save` reads region by region: every bit, in bounded memory, and chunks that are reused."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.weights import raw
from tstore.checkpoint.jobs import StreamedArray
from tstore.errors import Corrupt

SMALL = 1 << 16


@pytest.fixture(autouse=True)
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tstore.checkpoint.jobs._REGION_BYTES", SMALL)


@pytest.mark.parametrize(
    ("shape", "unit", "region"),
    [
        ((), None, ()),
        ((0, 5), None, (1, 5)),
        ((7,), None, (7,)),
        ((1000, 100), None, (128, 100)),
        ((1000, 100), (10, 100), (160, 100)),
        ((1000, 100), (300, 100), (300, 100)),
        ((100, 50_000), None, (1, 16_384)),
        ((1000, 1000), (7, 300), (14, 1000)),
        ((3, 30, 500), (3, 30, 70), (3, 30, 140)),
    ],
)
async def test_every_region_is_read_once(
    tmp_path: Path, shape: tuple[int, ...], unit: tuple[int, ...] | None, region: tuple[int, ...]
) -> None:
    values = np.random.default_rng(0).random(shape, np.float32)
    times = np.zeros(shape, int)

    def read(index: tuple[slice, ...]) -> Any:
        times[index] += 1
        return values[index]

    source = StreamedArray(shape, values.dtype, read, unit)
    assert source.region_shape == region
    async with await tstore.open(tmp_path / "store") as store:
        await tstore.save(store, {"x": source, "y": values}, 0)
        assert (times == 1).all()
        restored = await tstore.restore(store)
        assert raw(restored["x"]) == raw(restored["y"]) == raw(values)
        await tstore.save(store, {"x": source, "y": values}, 1)
        assert [c.bytes_added async for c in store.history()][0] == 0  # noqa: RUF015 - there is no anext here


async def test_few_regions_are_in_memory(tmp_path: Path) -> None:
    alive: set[int] = set()
    most = 0

    class Region(np.ndarray):  # type: ignore[type-arg]
        """An array that can be referenced weakly."""

    def read(index: tuple[slice, ...]) -> Any:
        nonlocal most
        number = index[0].start * SMALL + index[1].start
        values = np.ones([s.stop - s.start for s in index], np.float32).view(Region)
        alive.add(number)
        weakref.finalize(values, alive.discard, number)
        most = max(most, len(alive))
        return values

    await tstore.save(tmp_path / "store", {"x": StreamedArray((128, SMALL), np.dtype("f4"), read)}, 0)
    assert most < 256  # of 512 regions; batches of 2 MiB are 32 of them, of which each worker has two or three


async def test_a_source_that_lies_is_refused(tmp_path: Path) -> None:
    for wrong in (np.ones((3, 2), np.float32), np.ones((3, 3))):
        source = StreamedArray((3, 3), np.dtype("f4"), lambda _, wrong=wrong: wrong)
        with pytest.raises(Corrupt, match="x: its source returned"):
            await tstore.save(tmp_path / "store", {"x": source}, 0)
