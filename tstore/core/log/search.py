"""The search for the newest of consecutively numbered objects.

1. Gallop: probe the numbers 1, 2, 4, … above one that exists, until one is absent.
2. Bisect between the last number that exists and the first that does not.

If probing many numbers takes no longer than probing one, they are probed in a few batches. The first batch is
enough if at most one number above the base exists. The second reaches up to 64 above the base, because a search
begins at a hint, which every 64th version renews. The last batch has all numbers between the bounds.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["NEVER", "Bounds", "Search"]

NEVER = 1 << 62
"""A number that no version has."""

_PROBES = 31  # in one batch
_RECENTLY = 1.0  # seconds


class Bounds(NamedTuple):
    """The bounds of a search: `low` exists, or is 0; `high` does not exist, and is `NEVER` if none was found."""

    low: int
    high: int


class Search:
    """The searches in one log, and what they have shown about its end.

    `exist` takes numbers and returns whether each exists. `batches` says that `exist` takes no longer for many
    numbers than for one. `highest` is the highest number known to exist.
    """

    def __init__(self, exist: Callable[[Sequence[int]], Awaitable[Sequence[bool]]], *, batches: bool) -> None:
        self._exist = exist
        self._batches = batches
        self.highest = 0
        self._end = 0, -math.inf

    def note_end(self, number: int, since: float) -> None:
        """Note that nothing existed above a number at time `since` of the event loop."""
        self._end = number, since

    def is_end(self, number: int) -> bool:
        """Return whether a check within the last second found nothing above a number."""
        end, since = self._end
        return number == end and asyncio.get_running_loop().time() - since < _RECENTLY

    async def gallop(self, base: int, low: int) -> Bounds:
        """Return bounds of the newest number; `high` is `NEVER` if all probed numbers exist.

        `low` exists, or is 0. If `base` is higher, it is probed too.
        """
        numbers = [base] if base > low else []
        for distances in _distances(self._batches):
            numbers += [base + distance for distance in distances]
            low, high = await self.narrow(Bounds(low, NEVER), numbers)
            if high < NEVER or low + distances[-1] >= NEVER:
                break
            numbers = []
        return Bounds(low, high)

    def between(self, bounds: Bounds) -> list[int]:
        """Return the numbers to probe next: all between the bounds, or some that divide the range evenly."""
        low, high = bounds
        limit = _PROBES if self._batches else 1
        if high - low - 1 <= limit:
            return list(range(low + 1, high))
        return [low + (high - low) * i // (limit + 1) for i in range(1, limit + 1)]

    async def narrow(self, bounds: Bounds, numbers: Sequence[int], above: Sequence[int] = ()) -> Bounds:
        """Probe numbers between the bounds, in ascending order, and return closer bounds.

        The numbers `above` the bounds are probed only for `highest`, and to see whether anything follows the end.
        """
        since = asyncio.get_running_loop().time()
        low, high = bounds
        probed = [*numbers, *above]
        exists = {high: False, **dict(zip(probed, await self._exist(probed), strict=True))}
        for number in numbers:
            if not exists[number]:
                high = number
                break
            low = number
        self.highest = max(self.highest, *(number for number in probed if exists[number]), 0)
        if high == low + 1 and exists.get(high + 1) is False:
            self.note_end(low, since)
        return Bounds(low, high)


def _distances(batches: bool) -> Iterator[list[int]]:
    """Yield the distances from the base at which to probe: each twice the one before, in batches."""
    yield [1, 2, 4]
    if batches:
        yield [8, 16, 32, 64]
    first, count = (7, 7) if batches else (3, 1)
    for exponent in itertools.count(first, count):
        yield [1 << i for i in range(exponent, exponent + count)]
