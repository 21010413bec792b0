"""A bounded map by version that several threads use at once."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

__all__ = ["Recent"]

V = TypeVar("V")


class Recent(Generic[V]):
    """The values of the last `most` versions that were put in, as far as their sizes together stay within `size`.

    Up to an eighth more stay for a while, so that the old ones go several at a time. Event loops of several
    threads share one: each step is a single operation of a dict, which is atomic, and expects nothing of the steps
    before it.
    """

    def __init__(self, most: int, size: float = math.inf) -> None:
        self._most = most
        self._room = most + most // 8
        self._size = size
        self._values: dict[int, tuple[V, int]] = {}  # with their sizes

    def get(self, version: int) -> V | None:
        """Return the value of a version, None where it is not known any more."""
        kept = self._values.get(version)
        return None if kept is None else kept[0]

    def put(self, version: int, value: V, size: int = 0) -> None:
        """Keep the value of a version, as the newest; the oldest may go for it."""
        self._values.pop(version, None)
        self._values[version] = value, size
        if len(self._values) > self._room:
            for old in list(self._values)[: -self._most]:
                self._values.pop(old, None)
        if size * self._room > self._size:  # else they can't be too large together
            self._shrink()

    def _shrink(self) -> None:
        """Let the oldest go while all are too large together; the newest stays."""
        kept = list(self._values.items())
        left = sum(size for _, (_, size) in kept)
        for old, (_, size) in kept[:-1]:
            if left <= self._size:
                return
            left -= size
            self._values.pop(old, None)

    def drop(self, version: int) -> None:
        """Forget the values of a version and of later ones."""
        for known in self.versions():
            if known >= version:
                self._values.pop(known, None)

    def versions(self) -> list[int]:
        """Return the versions whose values are known now."""
        return list(self._values)

    def __contains__(self, version: int) -> bool:
        return version in self._values
