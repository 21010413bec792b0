"""Wait for what no event tells, for a bounded time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import tstore

SECONDS = 120


async def until(condition: Callable[[], Awaitable[object]], *tasks: asyncio.Task[Any]) -> None:
    """Wait until the condition holds; fail if a task that shall bring it about ends before."""
    async with asyncio.timeout(SECONDS):
        while not await condition():
            assert not [task for task in tasks if task.done()]
            await asyncio.sleep(0)


def blocking_until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


async def delivered(store: tstore.Store, hosts: int) -> bool:
    """Return whether this many hosts of a cooperative transaction have delivered."""
    return any(len(transaction.delivered) >= hosts for transaction in await store.pending())
