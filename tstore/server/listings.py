"""The names of a listing, cached between its pages.

Nothing tells whether a storage that is no folder has changed. So the first page of a listing is always read, and
only the following pages are taken from the cache, which is at least as new as the first.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple

__all__ = ["Pages"]

_LONG = 1000  # names; fewer are read again in no time
_MOST = 500_000  # cached names of all listings
_STALE = 60.0  # seconds from one page to the next


class _Pages(NamedTuple):
    used: float
    names: list[str]


class Pages:
    """The names of listings, as they were for their first pages."""

    def __init__(self) -> None:
        self._cached: OrderedDict[tuple[str, str], _Pages] = OrderedDict()

    def known(self, prefix: str, delimiter: str, after: str) -> list[str] | None:
        """Return the names of the listing of a page after `after`; None for a first page, or if not cached."""
        cached = self._cached.pop((prefix, delimiter), None)
        if cached is None or not after or time.monotonic() > cached.used + _STALE:
            return None
        self._keep(prefix, delimiter, cached.names)
        return cached.names

    def put(self, prefix: str, delimiter: str, names: list[str]) -> None:
        """Cache names, in order, for the following pages."""
        if len(names) >= _LONG:
            self._keep(prefix, delimiter, names)

    def _keep(self, prefix: str, delimiter: str, names: list[str]) -> None:
        self._cached[prefix, delimiter] = _Pages(time.monotonic(), names)
        self._cached.move_to_end((prefix, delimiter))
        while sum(len(listing.names) for listing in self._cached.values()) > _MOST:
            self._cached.popitem(last=False)
