"""What tells the arrays that a transaction has had at one path from each other."""

from __future__ import annotations

from typing import NamedTuple

from tstore.format.paths import parents

__all__ = ["Deletions", "Incarnation"]


class Deletions:
    """The deletions of a transaction so far, by path, with the number of the last one at each."""

    def __init__(self) -> None:
        self.count = 0
        self.last: dict[str, int] = {}

    def add(self, top: str) -> None:
        """Note that everything at and below a path is deleted, "" for all."""
        self.count += 1
        self.last[top] = self.count


class Incarnation(NamedTuple):
    """The array that was at a path after some number of deletions."""

    path: str
    deletions: Deletions
    after: int

    @property
    def deleted(self) -> bool:
        """Whether the array, or a group above it, was deleted later."""
        last = self.deletions.last
        return bool(last) and any(last.get(p, 0) > self.after for p in ("", self.path, *parents(self.path)))
