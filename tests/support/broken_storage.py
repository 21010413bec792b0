"""Storages whose creates are not exclusive although they appear to be."""

from __future__ import annotations

import asyncio
import contextlib
from typing import ClassVar

from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Buffers, Durability, PutMode
from tstore.errors import AlreadyExists

__all__ = ["LATENCY", "LastOneStays", "LooksThenWrites", "Overwrites"]

LATENCY = 0.002  # seconds until a broken storage responds


class Overwrites(MemoryStorage):
    """Overwrites: ignores the condition of a create."""

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        await super().put(key, buffers, PutMode.REPLACE)


class LooksThenWrites(MemoryStorage):
    """Checks whether the name is free and then writes, so that two creates can both succeed.

    A create waits until another one has checked too, for up to a tenth of a second.
    """

    _checked: ClassVar[dict[tuple[str, str], asyncio.Event]] = {}  # by storage and key

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        if mode is PutMode.CREATE:
            if await self.head(key) is not None:
                raise AlreadyExists(key)
            if (others := self._checked.pop((self.url, key), None)) is not None:
                others.set()
            else:
                self._checked[self.url, key] = event = asyncio.Event()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), 0.1)
                self._checked.pop((self.url, key), None)
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
