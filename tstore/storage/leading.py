"""Reading the objects of consecutive keys up to the first gap, with single requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from tstore.errors import Corrupt, NotFound
from tstore.storage.objects import SHORT

__all__ = ["AT_ONCE", "TOGETHER", "Leading", "read_leading"]

AT_ONCE = 32
"""Concurrent requests to a server."""

TOGETHER = 32 << 20
"""Bytes of objects that are returned together, not counting the last."""


class Leading(NamedTuple):
    """The consecutive objects found, and whether a gap follows them."""

    objects: list[bytes]
    broken: bool
    """Whether the key after the first missing one exists."""
    cut: bool = False
    """Whether the objects reached `TOGETHER` bytes, so that more may follow."""


class _Source(Protocol):
    """The methods of a storage that are used here."""

    async def get(self, key: str, most: int | None = None) -> bytes: ...

    async def size(self, key: str) -> int | None: ...


async def read_leading(source: _Source, keys: Iterable[str], at_once: int) -> Leading:
    """Return the objects of the keys up to the first that is missing, with up to `at_once` requests at a time."""
    drawn, objects, size = _Drawn(keys), list[bytes](), 0
    ahead = min(3, at_once)  # what the caller knows, the next, and the one behind it
    while asked := drawn.slice(len(objects), ahead):
        gets = [_short_or_none(source, key) for key in asked]
        results = [await gets[0]] if len(gets) == 1 else await asyncio.gather(*gets)  # one needs no task
        exists = [result is not None for result in results]
        first_missing = [*exists, False].index(False)
        for key, result in zip(asked, results[:first_missing], strict=False):
            if result is not None:
                objects.append(await source.get(key) if isinstance(result, Corrupt) else result)
                size += len(objects[-1])
            if size > TOGETHER and len(objects) > 1:
                return Leading(objects, False, cut=True)
        if first_missing == len(asked):
            ahead = min(2 * ahead, at_once)
            continue
        following = exists[first_missing + 1 :]
        if not (following[0] if following else await _exists(source, drawn.slice(len(objects) + 1, 1))):
            break
        if await _get_or_none(source, asked[first_missing]) is None:
            return Leading(objects, True)
    return Leading(objects, False)


class _Drawn:
    """Keys drawn from an iterator as they are needed: usually the first two of many."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._rest = iter(keys)
        self._keys: list[str] = []

    def slice(self, at: int, count: int) -> list[str]:
        """Return up to `count` keys from index `at` on."""
        self._keys += itertools.islice(self._rest, max(0, at + count - len(self._keys)))
        return self._keys[at : at + count]


async def _exists(source: _Source, keys: list[str]) -> bool:
    return any([await source.size(key) is not None for key in keys])


async def _short_or_none(source: _Source, key: str) -> bytes | Corrupt | None:
    """Return an object, None if it is missing, or the error if it is too long to read many of its kind at once."""
    try:
        return await source.get(key, SHORT)
    except Corrupt as error:
        return error.with_traceback(None)
    except NotFound:
        return None


async def _get_or_none(source: _Source, key: str) -> bytes | None:
    try:
        return await source.get(key)
    except NotFound:
        return None
