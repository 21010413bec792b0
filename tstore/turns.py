"""Many awaited calls of which some are under way at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["batched", "together"]

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
        calls = [asyncio.ensure_future(call(item)) for item in batch]
        try:
            found += await asyncio.gather(*calls)
        except BaseException:
            for ended in calls:
                ended.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            raise
    return found
