"""How a backend without a quicker way does what a log of numbered objects needs: with its single calls."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence

from tstore.errors import Corrupt, NotFound
from tstore.storage.base import SHORT, TOGETHER, Backend, Durability, Leading, Offer

__all__ = ["Plain"]

_MOST_AT_ONCE = 32


class Plain:
    """The base of such a backend."""

    async def leading(self: Backend, keys: Iterable[str]) -> Leading:
        """See `Backend.leading`; many requests at once where each waits for a server."""
        drawn, found, size = _Drawn(keys), list[bytes](), 0
        at_once = _MOST_AT_ONCE if self.transfer.waits else 1
        ahead = min(3, at_once)  # what the caller knows, the next, and the one behind that
        while asked := drawn.some(len(found), ahead):
            gets = [_short_or_none(self, key) for key in asked]
            got = [await gets[0]] if len(gets) == 1 else await asyncio.gather(*gets)  # one needs no task
            stand = [data is not None for data in got]
            first_free = [*stand, False].index(False)
            for key, data in zip(asked, got[:first_free], strict=False):
                if data is not None:
                    found.append(await self.get(key) if isinstance(data, Corrupt) else data)
                    size += len(found[-1])
                if size > TOGETHER and len(found) > 1:
                    return Leading(found, False, cut=True)
            if first_free == len(asked):
                ahead = min(2 * ahead, at_once)
                continue
            if not await _stands(self, drawn, len(found) + 1, stand[first_free + 1 :]):
                break
            if await _get_or_none(self, asked[first_free]) is None:
                return Leading(found, True)
        return Leading(found, False)

    async def sweep(self) -> None:
        """See `Backend.sweep`; nothing can be left."""

    def offer(self: Backend, data: bytes, durability: Durability) -> Offer:
        """See `Backend.offer`; nothing can be prepared."""
        return _PlainOffer(self, data, durability)


class _PlainOffer:
    def __init__(self, backend: Backend, data: bytes, durability: Durability) -> None:
        self._backend = backend
        self._data = data
        self._durability = durability

    async def create(self, key: str) -> None:
        await self._backend.create(key, self._data, self._durability)

    async def withdraw(self) -> None:
        return None


class _Drawn:
    """Keys that are made as they are asked for: as a rule the first two of many."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._rest = iter(keys)
        self._keys: list[str] = []

    def some(self, at: int, count: int) -> list[str]:
        """The keys from a place on, as many as there are."""
        self._keys += itertools.islice(self._rest, max(0, at + count - len(self._keys)))
        return self._keys[at : at + count]


async def _stands(backend: Backend, keys: _Drawn, at: int, seen: Sequence[bool]) -> bool:
    """Whether an object stands under the key at a place; `seen` tells, where that was asked already."""
    if seen:
        return seen[0]
    return any([await backend.size(key) is not None for key in keys.some(at, 1)])


async def _short_or_none(backend: Backend, key: str) -> bytes | Corrupt | None:
    """What stands under a key; the error where that is long, of which many together would take too much memory."""
    try:
        return await backend.get(key, SHORT)
    except Corrupt as error:
        return error.with_traceback(None)
    except NotFound:
        return None


async def _get_or_none(backend: Backend, key: str) -> bytes | None:
    try:
        return await backend.get(key)
    except NotFound:
        return None
