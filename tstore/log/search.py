"""The search for the newest of consecutively numbered objects: gallop, then bisect.

Where a request mostly waits for a server, many are sent at once: first the next two numbers, which is enough if at
most one was committed since; then those up to the 64th, the next that writes a hint; then all between the last
that exists and the first that does not.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence

__all__ = ["NEVER", "Search"]

NEVER = 1 << 62
"""A number that no version has."""

_PROBES = 31  # at once, on storage whose requests wait for a server
_DOUBLINGS = 7  # up to the 64th
_RECENTLY = 1.0  # seconds


class Search:
    """A search by `exist`, which returns for each of some numbers whether it exists.

    `waits` means that probing many numbers takes no longer than probing one.
    """

    def __init__(self, exist: Callable[[Sequence[int]], Awaitable[Sequence[bool]]], *, waits: bool) -> None:
        self._exist = exist
        self._waits = waits
        self._end = 0, -math.inf

    def ends_at(self, number: int, since: float) -> None:
        """Note that nothing existed above a number at that time of the event loop."""
        self._end = number, since

    def is_end(self, number: int) -> bool:
        """Return whether nothing existed above a number when that was last checked, within the last second."""
        end, since = self._end
        return number == end and asyncio.get_running_loop().time() - since < _RECENTLY

    async def gallop(self, base: int, *, sure: bool = True) -> tuple[int, int]:
        """Return a number that exists (or 0) and one above it that does not, starting from `base`.

        The second is `NEVER` if every probed number exists. If not `sure`, `base` itself may not exist; then the
        first is 0.
        """
        low = base if sure else 0
        for steps in _probes(self._waits):
            low, high = await self.narrowed(low, [base + step for step in (steps if sure else [0, *steps])], NEVER)
            sure = True
            if high < NEVER or low + steps[-1] >= NEVER:
                break
        return low, high

    def between(self, low: int, high: int) -> list[int]:
        """Return the numbers to probe next: all between the two, or some that divide the range evenly."""
        most = _PROBES if self._waits else 1
        if high - low - 1 <= most:
            return list(range(low + 1, high))
        return [low + (high - low) * i // (most + 1) for i in range(1, most + 1)]

    async def narrowed(self, low: int, numbers: list[int], high: int) -> tuple[int, int]:
        """Return the last number that exists and the first that does not; `low` exists or is 0, not `high`."""
        since = asyncio.get_running_loop().time()
        exist = await self._exist(numbers)
        at = [*exist, False].index(False)
        low, high = [low, *numbers][at], [*numbers, high][at]
        if high == low + 1 and numbers[at + 1 : at + 2] == [high + 1] and not exist[at + 1]:
            self.ends_at(low, since)
        return low, high


def _probes(waits: bool) -> Iterator[list[int]]:
    """Yield the distances to probe, one batch after the other."""
    if waits:
        yield [1, 2]
        yield [3, 4, 8, 16, 32, 64]
    many = _DOUBLINGS if waits else 1
    for done in itertools.count(_DOUBLINGS if waits else 0, many):
        yield [1 << i for i in range(done, done + many)]
