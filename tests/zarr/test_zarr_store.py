"""`ZarrStore` passes zarr-python's own tests of stores, on a transaction."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from zarr.abc.store import SupportsSyncStore
from zarr.core.buffer import Buffer, cpu
from zarr.testing.store import StoreTests

import tstore
from tstore.zarr import ZarrStore


class TestZarrStore(StoreTests[ZarrStore, cpu.Buffer]):
    """zarr-python's tests of a store that can be written."""

    store_cls = ZarrStore
    buffer_cls = cpu.Buffer

    @pytest.fixture
    async def store_kwargs(self, tmp_path: Path) -> AsyncIterator[dict[str, Any]]:  # type: ignore[override]
        store = await tstore.open(tmp_path / "store")
        transaction = store.transaction()
        yield {"source": transaction}
        await transaction.abort()

    async def set(self, store: ZarrStore, key: str, value: Buffer) -> None:
        staging = store._source.staging  # without a method of the store
        async with staging.operation() as staged:
            staged.unplaced[key] = value.to_bytes()

    async def get(self, store: ZarrStore, key: str) -> Buffer:
        staging = store._source.staging
        async with staging.operation() as staged:
            return self.buffer_cls.from_bytes(staged.unplaced[key])

    async def test_blocking_calls_are_never_skipped(self, store: ZarrStore) -> None:
        assert isinstance(store, SupportsSyncStore)

    def test_store_repr(self, store: ZarrStore) -> None:
        assert repr(store).startswith("<tstore.zarr.ZarrStore ")

    def test_store_supports_writes(self, store: ZarrStore) -> None:
        assert store.supports_writes

    def test_store_supports_listing(self, store: ZarrStore) -> None:
        assert store.supports_listing
