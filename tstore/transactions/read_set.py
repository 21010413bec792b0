"""What a transaction has read of the version it is based on, so that it can be seen whether it still holds.

A serializable transaction commits only on a version of which everything it has read is the same as in its base:
then it might as well have begun there, and all transactions stand in the order of their versions. Equal is what
has equal metadata and equal checksums; who wrote it in between does not matter.

Names count as read too: a transaction that listed the arrays, or was told that a path is free or taken, has
read what is not there as well (phantoms).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tstore.format.array_metadata import ArrayMeta
from tstore.format.grid import Selection
from tstore.format.tree import Node, Tree, is_below

__all__ = ["ReadSet"]


class ReadSet:
    """The metadata, chunks and names that were read, by path."""

    def __init__(self) -> None:
        self._nodes: set[str] = set()
        self._chunks: dict[str, set[int]] = {}
        self._tops: set[str] = set()
        self._arrays = False

    def nodes(self, paths: Iterable[str]) -> None:
        """Notes that the metadata of the nodes at these paths was read, or that there is none."""
        self._nodes.update(paths)

    def values(self, path: str, meta: ArrayMeta, selection: Selection) -> None:
        """Notes that these values of an array were read, and with them all of their chunks."""
        numbers = np.zeros(1, np.int64)
        for selected, chunk, count in zip(selection.axes, meta.chunks, meta.counts, strict=True):
            side = np.unique(np.arange(selected.start, selected.stop, selected.step) // chunk)
            numbers = (numbers[:, None] * count + side).reshape(-1)
        self._chunks.setdefault(path, set()).update(numbers.tolist())

    def names(self, tops: Iterable[str]) -> None:
        """Notes that it was read which nodes stand at and below these paths."""
        self._tops.update(tops)

    def arrays(self) -> None:
        """Notes that the paths of all arrays were read."""
        self._arrays = True

    def changed(self, base: Tree, now: Tree) -> list[str]:
        """What was read of `base` and is another in `now`, as readable paths; sorted."""
        if base.nodes is now.nodes:
            return []
        found = {p for p in self._nodes if _document(base.nodes.get(p)) != _document(now.nodes.get(p))}
        for path, numbers in self._chunks.items():
            found.update(_changed_chunks(path, numbers, base.nodes.get(path), now.nodes.get(path)))
        if self._arrays:
            found.update(_arrays(base) ^ _arrays(now))
        for path in base.nodes.keys() ^ now.nodes.keys() if self._tops else ():
            if any(is_below(path, top) for top in self._tops):
                found.add(path)
        return sorted(found)


def _document(node: Node | None) -> bytes | None:
    return None if node is None else node.document


def _arrays(tree: Tree) -> set[str]:
    return {path for path, node in tree.nodes.items() if node.is_array}


def _changed_chunks(path: str, numbers: set[int], before: Node | None, after: Node | None) -> list[str]:
    if before is None or before is after:
        return []
    if after is None or before.document != after.document:
        return [path]
    counts = before.meta.counts
    differing = [n for n in before.chunks.differing(after.chunks).tolist() if n in numbers]
    return [f"{path}, chunk {tuple(int(i) for i in np.unravel_index(n, counts))}" for n in differing]
