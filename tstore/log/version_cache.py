"""A bounded cache keyed by version, shared by the event loops of several threads."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

__all__ = ["VersionCache"]

V = TypeVar("V")


class VersionCache(Generic[V]):
    """The values put in last: about `most` of them, and at most `size` bytes in total.

    Up to an eighth more stay for a while, so that several are evicted at a time. Every step is a single dict
    operation, which is atomic, and assumes nothing about the steps before it, so that threads need no lock.
    """

    def __init__(self, most: int, size: float = math.inf) -> None:
        self._most = most
        self._room = most + most // 8
        self._size = size
        self._values: dict[int, tuple[V, int]] = {}  # with their sizes

    def get(self, version: int) -> V | None:
        """Return the value of a version, or None if it is not cached."""
        entry = self._values.get(version)
        return None if entry is None else entry[0]

    def put(self, version: int, value: V, size: int = 0) -> None:
        """Cache the value of a version as the most recent one; evict the oldest if there is no room."""
        self._values.pop(version, None)
        self._values[version] = value, size
        if len(self._values) > self._room:
            for old in list(self._values)[: -self._most]:
                self._values.pop(old, None)
        if size * self._room > self._size:  # smaller values cannot exceed the limit together
            self._shrink()

    def _shrink(self) -> None:
        """Evict the oldest until the rest fit; the most recent always stays."""
        entries = list(self._values.items())
        total = sum(size for _, (_, size) in entries)
        for old, (_, size) in entries[:-1]:
            if total <= self._size:
                return
            total -= size
            self._values.pop(old, None)

    def drop(self, version: int) -> None:
        """Evict a version and all later ones."""
        for cached in self.versions():
            if cached >= version:
                self._values.pop(cached, None)

    def versions(self) -> list[int]:
        """Return the cached versions, the oldest entry first."""
        return list(self._values)

    def __contains__(self, version: int) -> bool:
        return version in self._values
