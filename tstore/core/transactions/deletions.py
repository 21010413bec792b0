"""The deletions of a transaction, which tell the arrays that it has had at one path from each other."""

from __future__ import annotations

from tstore.core.format.paths import parents

__all__ = ["Deletions"]


class Deletions:
    """The number of deletions so far, and that of the last one at each path."""

    def __init__(self) -> None:
        self.count = 0
        self._last: dict[str, int] = {}

    def add(self, top: str) -> None:
        """Note that everything at and below a path is deleted, "" for all."""
        self.count += 1
        self._last[top] = self.count

    def include(self, path: str, after: int) -> bool:
        """Return whether what was at a path after so many deletions was deleted later."""
        return any(self._last.get(p, 0) > after for p in ("", path, *parents(path)))
