"""Many awaited calls of which some are under way at once."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Generic, Self, TypeVar

__all__ = ["InTurn", "batched", "each", "together"]

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


async def each(call: Callable[[K], Awaitable[V]], items: Iterable[K]) -> AsyncIterator[tuple[K, V]]:
    """Yield each item with what the call returns for it, in order; some are under way at once."""
    for batch in batched(items):
        for item, found in zip(batch, await together(call, batch), strict=True):
            yield item, found


class InTurn(Generic[K, V]):
    """Each item with what the call returns for it, one at a time, for a caller that may stop early.

    The number of calls under way doubles with each batch, from one. A failure is raised at its item's turn.
    `aclose` cancels the calls under way. Not an async generator: an event loop that shuts down closes all of those
    at once, which fails for one that another is closing already.
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
            self._ahead = min(2 * self._ahead, _AT_ONCE)
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
