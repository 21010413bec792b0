"""Storages whose creates are not exclusive although they appear to be."""

from __future__ import annotations

import asyncio

from tstore.errors import AlreadyExists
from tstore.storage.memory import MemoryStorage
from tstore.storage.objects import Buffers, Durability, PutMode

__all__ = ["LATENCY", "LastOneStays", "LooksThenWrites", "Overwrites"]

LATENCY = 0.002  # seconds until a broken storage responds


class Overwrites(MemoryStorage):
    """Overwrites: ignores the condition of a create."""

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        await super().put(key, buffers, PutMode.REPLACE)


class LooksThenWrites(MemoryStorage):
    """Checks whether the name is free and then writes, so that two creates can both succeed."""

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        if mode is PutMode.CREATE and await self.head(key) is not None:
            raise AlreadyExists(key)
        await asyncio.sleep(LATENCY)
        await super().put(key, buffers, PutMode.REPLACE)


class LastOneStays(MemoryStorage):
    """Tells the losers that they lost, but stores their bytes."""

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        taken = await self.head(key) is not None
        await super().put(key, buffers, PutMode.REPLACE)
        if taken and mode is PutMode.CREATE:
            raise AlreadyExists(key)
