"""The read set of a serializable transaction, to check that what it read is the same in a newer version.

Such a transaction commits only on a version in which everything it has read is the same as in its base. It could
have started on that version, so the outcome is that of running such transactions one after another, in the order
of their versions. Two things are the same if their metadata and checksums are equal, no matter who wrote them.

Names are read too: a transaction that listed the arrays or the chunks of one, or learned that a path or a chunk is
free or taken, has also read what does not exist (phantoms).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import Selection, chunk_coordinates, renumbered
from tstore.core.format.arrays.points import PointSelection, touched_chunks
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.tree.node import Node, same_metadata
from tstore.core.format.tree.tree import Tree

__all__ = ["ReadSet", "differing_chunks"]


class ReadSet(msgspec.Struct, eq=False):
    """The metadata, chunks and names that were read, by path."""

    _metadata_paths: set[str] = set()
    _kinds: set[str] = set()
    _presence: set[str] = set()
    _chunks: dict[str, set[int]] = {}
    _chunk_names: set[str] = set()
    _subtrees: set[str] = set()
    _prefixes: set[str] = set()
    _all_arrays: bool = False

    def add_metadata(self, paths: Iterable[str]) -> None:
        """Record that the metadata at these paths was read, or found to be absent."""
        self._metadata_paths.update(paths)

    def add_kinds(self, paths: Iterable[str]) -> None:
        """Record a check whether there are arrays at these paths."""
        self._kinds.update(paths)

    def add_presence(self, path: str) -> None:
        """Record a check whether there is a node at or below a path."""
        self._presence.add(path)

    def add_values(
        self, path: str, meta: ArrayMeta, selection: Selection | PointSelection, counts: Sequence[int]
    ) -> None:
        """Record that a selection of an array was read, and with it every chunk that it touches.

        `counts` are the numbers of chunks along the axes of the array in the base; `meta` may have another shape.
        """
        if isinstance(selection, PointSelection):
            numbers = touched_chunks(selection, meta.chunks, meta.counts)
        else:
            numbers = np.zeros(1, np.int64)
            for selected, chunk, count in zip(selection.axes, meta.chunks, meta.counts, strict=True):
                indices = np.unique(np.arange(selected.start, selected.stop, selected.step) // chunk)
                numbers = (numbers[:, None] * count + indices).reshape(-1)
        self.add_chunks(path, numbers, meta.counts, counts)

    def add_chunks(
        self, path: str, numbers: npt.NDArray[np.int64], seen: Sequence[int], counts: Sequence[int]
    ) -> None:
        """Record that chunks of an array were read, or found to be absent.

        `seen` are the numbers of chunks along its axes as the transaction sees it, and `counts` those in the base.
        """
        if tuple(seen[1:]) != tuple(counts[1:]):
            _, numbers = renumbered(numbers, seen, counts)
        self._chunks.setdefault(path, set()).update(numbers.tolist())

    def add_chunk_names(self, path: str) -> None:
        """Record a query for the chunks of an array that exist."""
        self._chunk_names.add(path)

    def add_subtrees(self, paths: Iterable[str]) -> None:
        """Record that the paths of all nodes at and below these paths were read."""
        self._subtrees.update(paths)

    def add_prefix(self, prefix: str) -> None:
        """Record that the paths of all nodes that begin with a prefix were read."""
        self._prefixes.add(prefix)

    def add_all_arrays(self) -> None:
        """Record that the paths of all arrays were read."""
        self._all_arrays = True

    def changed(self, base: Tree, newer: Tree) -> list[str]:
        """Return sorted descriptions of what was read from `base` and differs in `newer`."""
        if base.nodes is newer.nodes:
            return []
        before, after = base.nodes, newer.nodes
        changed = {p for p in self._metadata_paths if not same_metadata(before.get(p), after.get(p))}
        changed.update(p for p in self._kinds if _is_array(before.get(p)) != _is_array(after.get(p)))
        changed.update(p for p in self._presence if bool(before.at_or_below(p)) != bool(after.at_or_below(p)))
        for path, numbers in self._chunks.items():
            read = np.array(sorted(numbers), np.uint64)
            changed.update(_changed_chunks(path, read, before.get(path), after.get(path)))
        for path in self._chunk_names:
            changed.update(_changed_chunks(path, None, before.get(path), after.get(path)))
        if self._all_arrays:
            changed.update(set(before.array_paths()).symmetric_difference(after.array_paths()))
        for top in self._subtrees:
            changed.update(set(before.at_or_below(top)).symmetric_difference(after.at_or_below(top)))
        for prefix in self._prefixes:
            changed.update(set(before.starting_with(prefix)).symmetric_difference(after.starting_with(prefix)))
        return sorted(changed)


def _is_array(node: Node | None) -> bool:
    return node is not None and node.is_array


def _changed_chunks(
    path: str, numbers: npt.NDArray[np.uint64] | None, before: Node | None, after: Node | None
) -> list[str]:
    """Describe which of these chunks of an array differ, or for `numbers=None`, which only one version has."""
    if before is None or before is after:
        return []
    if after is None or not same_metadata(before, after):
        return [path]
    if numbers is not None:
        return differing_chunks(before, after, numbers)
    only_one = np.setxor1d(before.numbers(), after.numbers()).tolist()
    return [f"{path}, chunk {chunk_coordinates(number, before.meta.counts)}" for number in only_one]


def differing_chunks(before: Node, after: Node | None, numbers: npt.NDArray[np.uint64]) -> list[str]:
    """Describe which of these chunks differ between two versions of an array that have the same grid."""
    newer = ChunkTable.from_rows([]) if after is None else after.select(numbers)
    differing = before.select(numbers).differing_numbers(newer).tolist()
    return [f"{before.path}, chunk {chunk_coordinates(number, before.meta.counts)}" for number in differing]
