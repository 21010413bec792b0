"""Chunks that are longer than a block, written from memory with any strides."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest

import tstore
from tstore.core.format.checksums import BLOCK


@pytest.mark.parametrize(
    ("shape", "dtype", "chunks"),
    [
        ((2, 700, 900), "int32", (2, 700, 450)),
        ((700, 3, 1001), "uint8", (700, 3, 1001)),
        ((3, 200_000), "V7", (3, 200_000)),
        ((2, 600_000), "uint16", (1, 600_000)),
        ((300, 40, 50), "float64", (300, 20, 50)),
    ],
)
@pytest.mark.parametrize("axes", [None, "reversed", "step"])
async def test_values_of_any_strides(shape: Any, dtype: str, chunks: Any, axes: str | None) -> None:
    rng = np.random.default_rng(1)
    size = int(np.prod(shape))
    memory = rng.integers(0, 256, size * np.dtype(dtype).itemsize, np.uint8).view(dtype).reshape(shape[::-1])
    values = memory.T if axes == "reversed" else memory.reshape(shape)
    if axes == "step":
        values = np.repeat(values, 2, axis=0)[::-2]
    assert np.prod(chunks) * values.itemsize > BLOCK
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        array = await tx.create_array("a", shape, dtype, chunks)
        await array.write(values)
    read = await (await (await store.snapshot()).array("a")).read()
    assert read.tobytes() == values.tobytes()
    assert (await store.verify()).ok


async def test_a_cast_to_the_dtype_of_the_array() -> None:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    values = np.arange(3 << 19).reshape(3, -1).T
    async with store.transaction() as tx:
        array = await tx.create_array("a", values.shape, "float32", values.shape)
        await array.write(values)
    assert np.array_equal(await (await (await store.snapshot()).array("a")).read(), values.astype("float32"))


@pytest.mark.parametrize("contiguous", [False, True])
async def test_a_save_refers_to_long_chunks_that_did_not_change(tmp_path: Any, contiguous: bool) -> None:
    values = np.random.default_rng(2).normal(size=(3, 700, 900)).astype("float32").transpose(1, 0, 2)
    values = np.ascontiguousarray(values) if contiguous else values
    changed = values.copy()
    changed[-1, -1, -1] += 1
    for step, tree in enumerate(({"w": values}, {"w": values}, {"w": changed})):
        await tstore.save(str(tmp_path), tree, step)
    written = [sum(file.stat().st_size for file in tmp_path.glob("txn/*/pack*"))]
    assert written[0] < 2.5 * values.nbytes
    assert np.array_equal((await tstore.restore(str(tmp_path), step=2))["w"], changed)
