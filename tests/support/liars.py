"""Storages that only seem to create exclusively."""

from __future__ import annotations

import asyncio

from tstore.errors import AlreadyExists
from tstore.storage.base import Buffers
from tstore.storage.memory import MemoryObjects
from tstore.storage.objects import PutMode

__all__ = ["LATENCY", "LastOneStays", "LooksThenWrites", "Overwrites"]

LATENCY = 0.002  # what a liar on this machine takes to answer


class Overwrites(MemoryObjects):
    """Ignores the condition of a create."""

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        await super().put(key, data, PutMode.REPLACE)


class LooksThenWrites(MemoryObjects):
    """Asks whether the name is free, and then writes, whatever has happened meanwhile."""

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        if mode is PutMode.CREATE and await self.head(key) is not None:
            raise AlreadyExists(key)
        await asyncio.sleep(LATENCY)
        await super().put(key, data, PutMode.REPLACE)


class LastOneStays(MemoryObjects):
    """Tells the losers that they have lost, and stores what they sent."""

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        taken = await self.head(key) is not None
        await super().put(key, data, PutMode.REPLACE)
        if taken and mode is PutMode.CREATE:
            raise AlreadyExists(key)
