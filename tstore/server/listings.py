"""Cached listings, so that a listing in pages reads the names only once.

A storage that is not a folder does not tell whether it has changed. So the first page of a listing is always read,
and only the pages after it come from the cache, which is at least as new as their first page.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

__all__ = ["Pages"]

_MIN_CACHED = 1000  # names; shorter listings are cheap to read again
_MAX_CACHED = 500_000  # names of all listings
_STALE = 60.0  # seconds from one page to the next


class _Pages(NamedTuple):
    used: float
    names: list[str]


class Pages:
    """A cache of the names under prefixes of a storage, for the pages after the first."""

    def __init__(self) -> None:
        self._cache: OrderedDict[tuple[str, str], _Pages] = OrderedDict()

    def known(self, prefix: str, delimiter: str, after: str) -> list[str] | None:
        """Return the cached names for a page after `after`; None for a first page, or if not cached."""
        cached = self._cache.pop((prefix, delimiter), None)
        if cached is None or not after or time.monotonic() > cached.used + _STALE:
            return None
        self._put(prefix, delimiter, cached.names)
        return cached.names

    def put(self, prefix: str, delimiter: str, names: list[str]) -> None:
        """Cache sorted names for the following pages."""
        if len(names) >= _MIN_CACHED:
            self._put(prefix, delimiter, names)

    def _put(self, prefix: str, delimiter: str, names: list[str]) -> None:
        self._cache[prefix, delimiter] = _Pages(time.monotonic(), names)
        self._cache.move_to_end((prefix, delimiter))
        while sum(len(cached.names) for cached in self._cache.values()) > _MAX_CACHED:
            self._cache.popitem(last=False)
