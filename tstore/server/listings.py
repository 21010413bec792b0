"""The names in folders, in order; those of a long folder are kept, so that a list in pages reads it once.

What is kept counts as long as the folder's time of change is the same. That time advances in ticks (of some
milliseconds, on some file systems of two seconds), so names are kept only if the folder had been left alone for
longer than that when it was read: whatever changed since has another time.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from typing import NamedTuple

__all__ = ["Listings"]

_LONG = 1000  # names; fewer are read again in no time
_MOST = 500_000  # names of all folders that are kept
_TICK = 3_000_000_000  # nanoseconds


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
