"""Many awaited calls of which some are under way at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TypeVar

__all__ = ["batched", "in_turn", "together"]

_AT_ONCE = 64

K = TypeVar("K")
V = TypeVar("V")


def batched(items: Iterable[K]) -> Iterator[list[K]]:
    """The items in lists of as many as `together` asks for at once."""
    source = iter(items)
    while batch := list(itertools.islice(source, _AT_ONCE)):
        yield batch


async def together(call: Callable[[K], Awaitable[V]], items: Iterable[K]) -> list[V]:
    """What the call returns for each item, some at once; the first failure ends the others."""
    found: list[V] = []
    for batch in batched(items):
        async with _begun(call, batch) as calls:
            found += await asyncio.gather(*calls)
    return found


async def in_turn(call: Callable[[K], Awaitable[V]], items: Iterable[K]) -> AsyncGenerator[tuple[K, V], None]:
    """Each item and what the call returns for it, one by one, for whoever may stop early.

    Ever more are asked for ahead: one, then two, then four. A failure comes in its item's turn.
    """
    source, ahead = iter(items), 1
    while batch := list(itertools.islice(source, ahead)):
        async with _begun(call, batch) as calls:
            for item, ended in zip(batch, calls, strict=True):
                yield item, await ended
        ahead = min(2 * ahead, _AT_ONCE)


@contextlib.asynccontextmanager
async def _begun(
    call: Callable[[K], Awaitable[V]], batch: Iterable[K]
) -> AsyncIterator[Sequence[asyncio.Future[V]]]:
    """The calls under way; those that have not ended with the block are cancelled, and awaited."""
    calls = [asyncio.ensure_future(call(item)) for item in batch]
    try:
        yield calls
    finally:
        for ended in calls:
            ended.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
