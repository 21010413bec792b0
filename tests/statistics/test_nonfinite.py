"""The search for NaN and infinity in a version: what it finds, and how much it reads."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np

import tstore
from tstore.service.statistics.nonfinite import Nonfinite, find_nonfinite


async def found(folder: Path) -> Nonfinite:
    async with await tstore.open(folder, "r") as store:
        return await find_nonfinite(await store.snapshot())


async def test_every_kind_of_floats_is_searched(tmp_path: Path) -> None:
    ones = np.ones((8, 4), "float32")
    wrong = ones.copy()
    wrong[1, 2], wrong[7, 3] = np.nan, np.inf
    tree = {
        "float32": wrong,
        "float16": wrong.astype("float16"),
        "bfloat16": wrong.astype(ml_dtypes.bfloat16),
        "float8": wrong.astype(ml_dtypes.float8_e5m2),
        "complex": wrong.astype("complex64"),
        "scalar": np.array(np.nan),
        "empty": np.zeros((0, 4)),
        "fine": ones,
        "whole": np.zeros(9, "int64"),
        "text": np.array(["nan"]),
    }
    await tstore.save(tmp_path, tree, step=1)
    result = await found(tmp_path)
    counts = {"float32": 2, "float16": 2, "bfloat16": 2, "float8": 2, "complex": 2, "scalar": 1}
    assert result.found == counts
    assert (result.arrays_read, result.values_read, result.complete) == (7, 6 * 32 + 1, True)


async def test_what_is_read_of_large_and_of_many_arrays_is_bounded(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path / "large") as store, store.transaction() as tx:
        await tx.create_array("w", (5000, 5000), "float32", chunks=(1000, 1000), fill_value=np.nan, sparse=True)
    large = await found(tmp_path / "large")
    assert large.found == {"w": large.values_read}
    assert 0 < 4 * large.values_read <= 33 << 20
    assert not large.complete
    await tstore.save(tmp_path / "many", {str(i): np.zeros(1) for i in range(1100)}, step=1)
    assert await found(tmp_path / "many") == ({}, 1024, 1024, False)
