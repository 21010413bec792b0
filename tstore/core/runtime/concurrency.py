"""Bounded concurrency for many awaited calls."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Generic, Self, TypeVar

__all__ = ["Prefetch", "batched", "together"]

_CONCURRENCY = 64

K = TypeVar("K")
V = TypeVar("V")


def batched(items: Iterable[K]) -> Iterator[list[K]]:
    """Yield the items in batches, each as large as the number of calls that `together` runs at once."""
    source = iter(items)
    while batch := list(itertools.islice(source, _CONCURRENCY)):
        yield batch


async def together(call: Callable[[K], Awaitable[V]], items: Iterable[K]) -> list[V]:
    """Return the results of a call for all items, with bounded concurrency; a failure cancels the other calls."""
    results: list[V] = []
    for batch in batched(items):
        calls = [asyncio.ensure_future(call(item)) for item in batch]
        try:
            results += await asyncio.gather(*calls)
        finally:
            for started in calls:
                started.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
    return results


class Prefetch(Generic[K, V]):
    """An async iterator over items and the results of a call for many of them, for a caller that may stop early.

    The first call gets one item, and each later one twice as many; a call returns a result for each of its items.
    """

    def __init__(self, call: Callable[[Sequence[K]], Awaitable[Sequence[V]]], items: Iterable[K]) -> None:
        self._call = call
        self._source = iter(items)
        self._ahead = 1
        self._results: collections.deque[tuple[K, V]] = collections.deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[K, V]:
        if not self._results:
            batch = list(itertools.islice(self._source, self._ahead))
            if not batch:
                raise StopAsyncIteration
            self._results.extend(zip(batch, await self._call(batch), strict=True))
            self._ahead = min(2 * self._ahead, _CONCURRENCY)
        return self._results.popleft()
