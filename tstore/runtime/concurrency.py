"""Bounded concurrency for many awaited calls."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Generic, Self, TypeVar

__all__ = ["Prefetch", "batched", "each_result", "together"]

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


async def each_result(call: Callable[[K], Awaitable[V]], items: Iterable[K]) -> AsyncIterator[tuple[K, V]]:
    """Yield each item with the result of the call, in order, with bounded concurrency."""
    for batch in batched(items):
        for item, result in zip(batch, await together(call, batch), strict=True):
            yield item, result


class Prefetch(Generic[K, V]):
    """An async iterator over items and the results of calls made ahead, for a caller that may stop early.

    The number of concurrent calls doubles with each batch, from one. A failure is raised at the position of its
    item. This is not an async generator, because an event loop closes all async generators at shutdown, which
    fails for one that is being closed already.
    """

    def __init__(self, call: Callable[[K], Awaitable[V]], items: Iterable[K]) -> None:
        self._call = call
        self._source = iter(items)
        self._ahead = 1
        self._calls: collections.deque[tuple[K, asyncio.Future[V]]] = collections.deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[K, V]:
        if not self._calls:
            batch = itertools.islice(self._source, self._ahead)
            self._calls.extend([(item, asyncio.ensure_future(self._call(item))) for item in batch])
            self._ahead = min(2 * self._ahead, _CONCURRENCY)
        if not self._calls:
            raise StopAsyncIteration
        item, call = self._calls.popleft()
        return item, await call

    async def aclose(self) -> None:
        """Cancel the calls under way and wait until they have ended."""
        calls = [call for _, call in self._calls]
        self._calls.clear()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
