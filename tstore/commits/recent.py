"""A bounded map by version that several threads use at once."""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ["Recent"]

V = TypeVar("V")


class Recent(Generic[V]):
    """The values of the last `most` versions that were put in.

    Event loops of several threads share one: each step is a single operation of a dict, which is atomic, and
    expects nothing of the steps before it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[int, V] = {}

    def get(self, version: int) -> V | None:
        """Return the value of a version, None where it is not known any more."""
        return self._values.get(version)

    def put(self, version: int, value: V) -> None:
        """Keep the value of a version, as the newest; the oldest may go for it."""
        self._values.pop(version, None)
        self._values[version] = value
        if len(self._values) > self._most:
            for old in list(self._values)[: -self._most]:
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
