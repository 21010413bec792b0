"""What a serializable transaction has read of its base, to check whether it is the same in a newer version.

Such a transaction commits only on a version in which everything it has read is the same as in its base. It could
have started on that version, so the outcome is that of running such transactions one after another, in the order
of their versions. Two things are the same if their metadata and checksums are equal, no matter who wrote them.

Names are read too: a transaction that listed the arrays, or learned that a path is free or taken, has also read
what does not exist (phantoms).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tstore.format.arrays.array_metadata import ArrayMeta
from tstore.format.arrays.grid import Selection
from tstore.format.arrays.points import PointSelection, touched_chunks
from tstore.format.tree.node import Node, same_metadata
from tstore.format.tree.tree import Tree

__all__ = ["ReadSet"]


class ReadSet:
    """The metadata, chunks and names that were read, by path."""

    def __init__(self) -> None:
        self._metadata_paths: set[str] = set()
        self._chunks: dict[str, set[int]] = {}
        self._subtrees: set[str] = set()
        self._all_arrays = False

    def add_metadata(self, paths: Iterable[str]) -> None:
        """Note that the metadata at these paths was read, or found to be absent."""
        self._metadata_paths.update(paths)

    def add_values(self, path: str, meta: ArrayMeta, selection: Selection | PointSelection) -> None:
        """Note that a selection of an array was read, and with it every chunk that it touches."""
        if isinstance(selection, PointSelection):
            numbers = touched_chunks(selection, meta.chunks, meta.counts)
        else:
            numbers = np.zeros(1, np.int64)
            for selected, chunk, count in zip(selection.axes, meta.chunks, meta.counts, strict=True):
                indices = np.unique(np.arange(selected.start, selected.stop, selected.step) // chunk)
                numbers = (numbers[:, None] * count + indices).reshape(-1)
        self.add_chunks(path, numbers.tolist())

    def add_chunks(self, path: str, numbers: Iterable[int]) -> None:
        """Note that chunks of an array were read, or found to be absent."""
        self._chunks.setdefault(path, set()).update(numbers)

    def add_subtrees(self, paths: Iterable[str]) -> None:
        """Note that the paths of all nodes at and below these paths were read."""
        self._subtrees.update(paths)

    def add_all_arrays(self) -> None:
        """Note that the paths of all arrays were read."""
        self._all_arrays = True

    def changed(self, base: Tree, newer: Tree) -> list[str]:
        """Return sorted descriptions of what was read from `base` and differs in `newer`."""
        if base.nodes is newer.nodes:
            return []
        before, after = base.nodes, newer.nodes
        changed = {p for p in self._metadata_paths if not same_metadata(before.get(p), after.get(p))}
        for path, numbers in self._chunks.items():
            changed.update(_changed_chunks(path, numbers, before.get(path), after.get(path)))
        if self._all_arrays:
            changed.update(set(before.array_paths()).symmetric_difference(after.array_paths()))
        for top in self._subtrees:
            changed.update(set(before.at_or_below(top)).symmetric_difference(after.at_or_below(top)))
        return sorted(changed)


def _changed_chunks(path: str, numbers: set[int], before: Node | None, after: Node | None) -> list[str]:
    if before is None or before is after:
        return []
    if after is None or not same_metadata(before, after):
        return [path]
    counts, read = before.meta.counts, np.array(sorted(numbers), np.uint64)
    differing = before.select(read).differing_numbers(after.select(read)).tolist()
    return [f"{path}, chunk {tuple(int(i) for i in np.unravel_index(n, counts))}" for n in differing]
