"""Chunks outside of the grid of their array, in a forged record: what renumbers or names all chunks fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

import tstore
from tests.support.forging import forged, placed_in
from tstore.core.format.layout import commit_key
from tstore.core.format.objects.encoding import decode
from tstore.core.format.objects.records import Record
from tstore.errors import Corrupt
from tstore.zarr import ZarrStore


async def resize(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        await (await tx.array("w")).resize((9, 6))


async def append(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        await (await tx.array("w")).append(np.ones((8, 3), "f4"), axis=1)


async def diff(store: tstore.Store) -> None:
    await store.diff(1, 2)


async def list_keys(store: tstore.Store) -> None:
    async for _ in ZarrStore(await store.snapshot()).list():
        pass


@pytest.mark.parametrize("number", [8, 1 << 50, (1 << 63) + 5, (1 << 64) - 1])
@pytest.mark.parametrize("use", [resize, append, diff, list_keys])
async def test_a_chunk_outside_of_the_grid_is_corrupt(
    use: Callable[[tstore.Store], Awaitable[None]], number: int, tmp_path: Path
) -> None:
    store = await tstore.open(str(tmp_path / "store"))
    async with store.transaction() as tx:
        await (await tx.create_array("w", (8, 6), "f4", (2, 3), sparse=True)).write(1)
    async with store.transaction() as tx:
        await (await tx.array("w"))[:2, :3].write(2)
    file = tmp_path / "store" / commit_key(2)
    record = decode(file.read_bytes(), Record)
    [manifest] = record.manifests
    fields = [getattr(manifest, field) for field in manifest.__struct_fields__]
    fields[manifest.__struct_fields__.index("number")] = number.to_bytes(8, "little")
    file.chmod(0o644)
    file.write_bytes(placed_in(tmp_path / "store", 2, forged(record, manifests=[["manifest", *fields]])))

    store = await tstore.open(store.url)
    assert (await (await (await store.snapshot()).array("w")).read() == 1).all()  # needs none of these chunks
    with pytest.raises(Corrupt, match=f"w has a chunk number {number} outside of its grid of 8 chunks"):
        await use(store)
    [fault] = (await store.verify()).faults
    assert f"w has a chunk number {number} outside of its grid" in fault
