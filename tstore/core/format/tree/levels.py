"""The levels of a tree's nodes: each has what changed after those below it; pure, no I/O."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.layers import Table, stack
from tstore.core.format.objects.merges import Merge, merged
from tstore.core.format.objects.references import EXTENDS, REPLACES, Manifest
from tstore.core.format.tree.node import Node, follows
from tstore.core.format.tree.stored_nodes import Paged, StoredNodes
from tstore.errors import Corrupt

__all__ = [
    "NO_DOCUMENT",
    "OPEN",
    "Change",
    "Layer",
    "Level",
    "Overlay",
    "combined",
    "no_foundation",
    "resolved",
]

NO_DOCUMENT = Document(b"")

OPEN = 1 << 62
"""In place of a version, of the top level: the changes of the next commits are added to it."""


class Layer(NamedTuple):
    """A commit that wrote chunks of a node: the position of the node in its manifest, and its merge, if any."""

    manifest: Manifest
    position: int
    merge: Merge | None

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables that the commit added."""
        return self.manifest.tables_at(self.position)

    def check_above(self, path: str, below: Document | None) -> None:
        """Raise `Corrupt` if the commit can't have written to the node below (`validation.check_foundation`)."""
        flags = self.manifest.replaces_node[self.position]
        if flags & REPLACES:
            return
        if below is None or below.data != self.manifest.document_at(self.position):
            document, tables = self.manifest.node(self.position)
            if not (flags & EXTENDS and follows(below, document, tables)):
                raise no_foundation(path)

    def over(self, below: tuple[Table, ...]) -> tuple[Table, ...]:
        """Return the tables of the node after the commit."""
        return stack(below if self.merge is None else merged(below, self.merge), self.tables)


class Overlay(NamedTuple):
    """The commits that wrote chunks of a node, whose tables are laid over it, one after the other, at a lookup.

    `node` is None if the node is in a level below.
    """

    metadata: Document
    layers: tuple[Layer, ...]
    node: Node | None = None


Change = Node | Overlay | None  # None: deleted


def no_foundation(path: str) -> Corrupt:
    """Return the error for a write to a node that does not exist, or has other metadata than the writer saw."""
    return Corrupt(
        f"a record writes to {path!r}, which does not exist before it, or was replaced, resized or extended after "
        "the record's base"
    )


def resolved(path: str, former: Node | None, overlay: Overlay) -> Node:
    """Return a node with the tables of an overlay; raise `Corrupt` if the overlay was not written over it."""
    first, *later = overlay.layers
    first.check_above(path, None if former is None else former.metadata)
    assert former is not None
    tables = first.over(former.tables)
    newer: list[Table] = []
    for layer in later:
        if layer.manifest.segments:  # dense ones replace what is below, and so does a merge
            tables, newer = layer.over(stack(tables, newer)), []
        else:
            newer += layer.tables
    tables = stack(tables, newer)
    return Node(path, overlay.metadata, tables)


def combined(path: str, former: Change, change: Change) -> Change:
    """Return the change of a node that two changes make, one after the other."""
    if not isinstance(change, Overlay) or change.node is not None:
        return change
    if isinstance(former, Overlay):
        change.layers[0].check_above(path, former.metadata)
        return Overlay(change.metadata, (*former.layers, *change.layers), former.node)
    return resolved(path, former, change)


class Level:
    """Nodes that changed up to `version`: stored ones, except for those that `changed` in memory."""

    __slots__ = ("_sorted", "changed", "is_paged", "stored", "version")

    def __init__(
        self, changed: Mapping[str, Change], stored: StoredNodes | None = None, version: int = OPEN
    ) -> None:
        self.changed = changed
        self.stored = stored
        self.version = version
        self.is_paged = isinstance(stored, Paged)
        """Whether lookups may read pages, and so block."""
        self._sorted: list[str] | None = None  # the changed paths in order, once they were needed

    def with_changes(self, changed: Mapping[str, Change]) -> Level:
        """Return the level after these changes."""
        return Level({**self.changed, **changed} if self.changed else changed, self.stored, self.version)

    def sealed(self, version: int) -> Level:
        """Return the level with `version`, the last up to which it has changes."""
        return Level(self.changed, self.stored, version)

    def under(self, above: Level) -> Level:
        """Return the level of the changes in memory of this level and of one that follows it."""
        changed = dict(self.changed)
        for path, change in above.changed.items():
            changed[path] = combined(path, changed[path], change) if path in changed else change
        return Level(changed, version=above.version)

    def without_deletions(self) -> Level:
        """Return the level as the lowest one, below which there is no node that was deleted."""
        if self.stored is not None:
            return self
        return Level(
            {path: change for path, change in self.changed.items() if change is not None}, version=self.version
        )

    def is_same(self, other: Level) -> bool:
        """Return whether two levels surely have the same nodes, as those of one root do; this reads no page."""
        if self is other:
            return True
        # a level with stored nodes is that of a root or a whole tree, to whose pages nothing is added
        return self.version == other.version and self.stored is not None and self.stored.is_same(other.stored)

    def has_in_memory(self, path: str) -> bool:
        """Return whether the node at a path is known to exist, or not to exist, without reading a page."""
        if path in self.changed:
            change = self.changed[path]
            return not isinstance(change, Overlay) or change.node is not None
        return not self.is_paged and self.has_stored(path)

    def stored_node(self, path: str) -> Node | None:
        """Return the stored node at a path."""
        nodes = None if self.stored is None else self.stored.holding(path)
        return None if nodes is None else nodes.get(path)

    def has_stored(self, path: str) -> bool:
        """Return whether there is a stored node at a path."""
        nodes = None if self.stored is None else self.stored.holding(path)
        return nodes is not None and nodes.has(path)

    def listed(self) -> Iterator[tuple[str, Document | None]]:
        """Yield the path and the metadata of each node that changed, None if it was deleted."""
        for path, change in self.changed.items():
            yield path, None if change is None else change.metadata
        for nodes in () if self.stored is None else self.stored.each():
            yield from (item for item in nodes.listed() if item[0] not in self.changed)

    def between(self, first: str, stop: str) -> Iterator[tuple[str, bool]]:
        """Yield the paths from `first` up to `stop` of nodes that changed, and whether the node was not deleted.

        This reads only the pages that may have such a path.
        """
        if self._sorted is None:
            self._sorted = sorted(self.changed)
        changed: Sequence[str] = self._sorted
        for path in changed[bisect.bisect_left(changed, first) : bisect.bisect_left(changed, stop)]:
            yield path, self.changed[path] is not None
        if self.stored is not None:
            yield from ((path, True) for path in self.stored.between(first, stop) if path not in self.changed)
