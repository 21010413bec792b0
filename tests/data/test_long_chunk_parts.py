"""Parts of a chunk longer than what is read at once: they are those of NumPy, and only what they need is read."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import tstore
from tstore.core.format.checksums import BLOCK

SHAPE = (24, 4, 65536)  # 24 MiB in float32, rows of 1 MiB
CODECS: dict[str, Any] = {
    "raw": None,
    "tensor": "e4m3",
    "blocks": {"format": "e4m3", "block": 16},
    "zstd": ["bytes", "zstd"],
}
READ_AT_ONCE = 18 << 20


@pytest.fixture(scope="module")
def values() -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(SHAPE, dtype="f4").astype("f2").astype("f4")


@pytest.fixture(params=CODECS)
async def array(request: pytest.FixtureRequest, values: npt.NDArray[np.float32]) -> tstore.Array:
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    async with store.transaction() as tx:
        await (await tx.create_array("a", SHAPE, "f4", SHAPE, codecs=CODECS[request.param])).write(values)
    return await (await store.snapshot()).array("a")


INDICES: list[Any] = [
    np.s_[:, :, 7],
    np.s_[::7, 1, :10],
    np.s_[1:],
    np.s_[::-1, ::-3, 5:900:7],
    np.s_[3:20:5, 1:3, ::-30001],
    np.s_[23],
    np.s_[..., -1],
    np.s_[::-23, 3:1:-1, 100:200],
    np.s_[2:3, 2:3, 2:3],
    np.s_[:, :, ::-1],
]


async def test_parts_are_those_of_numpy(array: tstore.Array) -> None:
    whole = await array.read()
    for number, index in enumerate(INDICES):
        if number % 2:
            np.testing.assert_array_equal(await array[index].read(), whole[index], strict=True)
        else:
            out = np.zeros(whole[index].shape, "f8")
            await array[index].read(out=out)
            np.testing.assert_array_equal(out, whole[index].astype("f8"))
    wide = np.zeros((*SHAPE[:2], SHAPE[2] * 2), "f4")[:, :, ::2]
    await array.read(out=wide)
    np.testing.assert_array_equal(wide, whole)


@pytest.mark.parametrize("array", ["raw", "tensor", "blocks"], indirect=True)
async def test_rows_far_apart_are_read_without_what_is_between(array: tstore.Array) -> None:
    plan = await array[::8, 2, :10].explain()
    assert len(plan.requests) <= 6
    assert plan.bytes_read <= 7 * BLOCK


@pytest.mark.parametrize("array", ["raw", "tensor", "blocks"], indirect=True)
@pytest.mark.parametrize("index", INDICES[:4])
async def test_no_request_is_much_longer_than_what_is_read_at_once(array: tstore.Array, index: Any) -> None:
    plan = await array[index].explain()
    assert max(request.size for request in plan.requests) <= READ_AT_ONCE
