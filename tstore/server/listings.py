"""The names in folders, and below prefixes, in order; long ones are kept, so that a list in pages reads them once.

What is kept of a folder counts as long as its time of change is the same. That time advances in ticks (of some
milliseconds, on some file systems of two seconds), so names are kept only if the folder had been left alone for
longer than that when it was read: whatever changed since has another time.

Nothing tells whether a storage that is no folder has changed. So the first page of a list is always read, and only
the pages behind it are taken from what is kept, which is at least as new as their first one.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from typing import NamedTuple

__all__ = ["Listings", "Pages"]

_LONG = 1000  # names; fewer are read again in no time
_MOST = 500_000  # names of all folders that are kept
_TICK = 3_000_000_000  # nanoseconds
_STALE = 60.0  # seconds from one page to the next


class _Listing(NamedTuple):
    changed: int
    names: list[str]


class Listings:
    """The names in folders of a file system."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Listing] = OrderedDict()
        self._lock = threading.Lock()

    def names(self, folder: str) -> list[str]:
        """The names in a folder in order, those of folders with "/" behind them, without hidden ones. Blocking."""
        changed = os.stat(folder).st_mtime_ns
        with self._lock:
            kept = self._kept.get(folder)
            if kept is not None and kept.changed == changed:
                self._kept.move_to_end(folder)
                return kept.names
        quiet = time.time_ns() - changed > _TICK
        with os.scandir(folder) as entries:
            names = [f"{e.name}/" if e.is_dir(follow_symlinks=False) else e.name for e in entries]
        names = sorted(name for name in names if not name.startswith("."))
        if quiet and len(names) >= _LONG:
            self._keep(folder, _Listing(changed, names))
        return names

    def _keep(self, folder: str, listing: _Listing) -> None:
        with self._lock:
            self._kept[folder] = listing
            self._kept.move_to_end(folder)
            while sum(len(kept.names) for kept in self._kept.values()) > _MOST:
                self._kept.popitem(last=False)


class _Pages(NamedTuple):
    used: float
    names: list[str]


class Pages:
    """The names below prefixes of a storage, as their first pages found them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], _Pages] = OrderedDict()

    def known(self, prefix: str, delimiter: str, after: str) -> list[str] | None:
        """The names of which a page behind `after` is a part; None for a first page, and what is not known."""
        kept = self._kept.pop((prefix, delimiter), None)
        if kept is None or not after or time.monotonic() > kept.used + _STALE:
            return None
        self._keep(prefix, delimiter, kept.names)
        return kept.names

    def put(self, prefix: str, delimiter: str, names: list[str]) -> None:
        """Keep names in their order for the pages that follow."""
        if len(names) >= _LONG:
            self._keep(prefix, delimiter, names)

    def _keep(self, prefix: str, delimiter: str, names: list[str]) -> None:
        self._kept[prefix, delimiter] = _Pages(time.monotonic(), names)
        self._kept.move_to_end((prefix, delimiter))
        while sum(len(kept.names) for kept in self._kept.values()) > _MOST:
            self._kept.popitem(last=False)
