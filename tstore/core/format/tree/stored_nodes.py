"""The nodes of manifests, in memory or in pages that a `PageSource` reads, in levels by age; pure, no I/O.

Each level, a run sorted by path, has the changes since the level below it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from tstore.core.format.objects.compactions import Compaction, compacted
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.references import EXTENDS, REPLACES, Manifest
from tstore.core.format.objects.tables import Table, stack
from tstore.core.format.tree.node import Node, follows
from tstore.errors import Corrupt

__all__ = [
    "AHEAD",
    "NO_DOCUMENT",
    "NO_PAGES",
    "OPEN",
    "Change",
    "DerivedNodes",
    "InMemory",
    "Level",
    "ManifestNodes",
    "PageNodes",
    "PageSource",
    "Paged",
    "StoredNodes",
    "Write",
    "Writes",
    "combined",
    "no_foundation",
    "resolved",
]

AHEAD = 64
"""The pages that are read at once when many nodes are listed."""


class PageNodes(Protocol):
    """The nodes of one page in memory."""

    @property
    def paths(self) -> Sequence[str]:
        """The paths of the nodes, ascending."""

    def listed(self) -> Iterator[tuple[str, Document]]:
        """Yield the path and the metadata of each node."""

    def has(self, path: str) -> bool:
        """Return whether there is a node at a path."""

    def get(self, path: str) -> Node | None:
        """Return the node at a path, or None if there is none."""

    def all(self) -> Mapping[str, Node]:
        """Return all nodes by path."""

    def between(self, first: str, stop: str) -> Sequence[str]:
        """Return the paths from `first` up to `stop`."""


class DerivedNodes:
    """The nodes of one page, which are known without it; their paths ascend."""

    __slots__ = ("_nodes", "paths")

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.paths: Sequence[str] = tuple(nodes)
        self._nodes = nodes

    def listed(self) -> Iterator[tuple[str, Document]]:
        """Yield the path and the metadata of each node."""
        return ((path, node.metadata) for path, node in self._nodes.items())

    def has(self, path: str) -> bool:
        """Return whether there is a node at a path."""
        return path in self._nodes

    def get(self, path: str) -> Node | None:
        """Return the node at a path, or None if there is none."""
        return self._nodes.get(path)

    def all(self) -> Mapping[str, Node]:
        """Return all nodes by path."""
        return self._nodes

    def between(self, first: str, stop: str) -> Sequence[str]:
        """Return the paths from `first` up to `stop`."""
        return self.paths[bisect.bisect_left(self.paths, first) : bisect.bisect_left(self.paths, stop)]


class ManifestNodes:
    """The nodes of one manifest in memory."""

    __slots__ = ("_manifest", "made", "paths")

    def __init__(self, manifest: Manifest) -> None:
        self.paths: Sequence[str] = manifest.paths
        self._manifest = manifest
        self.made: dict[str, Node] = {}

    def listed(self) -> Iterator[tuple[str, Document]]:
        """Yield the path and the metadata of each node."""
        return zip(self._manifest.paths, self._manifest.metadata(), strict=True)

    def has(self, path: str) -> bool:
        """Return whether there is a node at a path."""
        return self._manifest.position(path) is not None

    def get(self, path: str) -> Node | None:
        """Return the node at a path, or None if there is none."""
        node = self.made.get(path)
        if node is None and (position := self._manifest.position(path)) is not None:
            node = self.made[path] = Node(path, *self._manifest.node(position))
        return node

    def all(self) -> Mapping[str, Node]:
        """Return all nodes by path; for most of them, this is faster than `get` for each."""
        if len(self.made) < len(self.paths):
            made, listed = self.made, self._manifest.nodes()
            self.made = {path: made.get(path) or Node(path, metadata, t) for path, metadata, _, t in listed}
        return self.made

    def between(self, first: str, stop: str) -> Sequence[str]:
        """Return the paths from `first` up to `stop`."""
        return self.paths[bisect.bisect_left(self.paths, first) : bisect.bisect_left(self.paths, stop)]


class PageSource(Protocol):
    """The source of the pages of manifests."""

    def load(self, reference: ObjectRef, start: int, stop: int) -> Sequence[PageNodes]:
        """Return the nodes of the pages from `start` up to `stop`; blocking.

        Raise `Corrupt`, or `NotFound` if the object is missing.
        """

    def has(self, reference: ObjectRef, at: int) -> bool:
        """Return whether a page is cached, so that loading it does not block."""


class _NoPages:
    def load(self, reference: ObjectRef, start: int, stop: int) -> Sequence[PageNodes]:
        raise RuntimeError("these pages can't be read: their reference was not attached to a store")

    def has(self, reference: ObjectRef, at: int) -> bool:
        return False


NO_PAGES: PageSource = _NoPages()
"""The source of the pages of a root that was decoded but not attached to a store."""


class StoredNodes:
    """The nodes of consecutive manifests, the nodes of each from the path in `firsts` on."""

    __slots__ = ("_last", "count", "firsts")

    def __init__(self, firsts: list[str], count: int) -> None:
        self.firsts = firsts
        self.count = count
        self._last: tuple[int, PageNodes] | None = None  # the position of the last lookup, and what is there

    def load(self, start: int, stop: int) -> Sequence[PageNodes]:
        """Return the nodes of the manifests from `start` up to `stop`."""
        raise NotImplementedError

    def reads(self, at: int) -> bool:
        """Return whether the nodes of a manifest have to be read from storage."""
        raise NotImplementedError

    def keep(self, loaded: Mapping[int, PageNodes]) -> None:
        """Keep what was loaded for the lookups that follow, in place of what was kept before."""

    def is_same(self, other: StoredNodes | None) -> bool:
        """Return whether these are surely the same nodes, without reading any."""
        return self is other

    def position(self, path: str) -> int:
        """Return the position of the manifest that may have the node at a path, -1 if none may."""
        return bisect.bisect_right(self.firsts, path) - 1

    def holding(self, path: str) -> PageNodes | None:
        """Return the nodes that may include the one at a path."""
        at, last = self.position(path), self._last
        if last is not None and last[0] == at:
            return last[1]
        if at < 0:
            return None
        [nodes] = self.load(at, at + 1)
        self._last = at, nodes
        return nodes

    def each(self) -> Iterator[PageNodes]:
        """Yield the nodes of all manifests, reading a few pages at once."""
        for start in range(0, len(self.firsts), AHEAD):
            yield from self.load(start, min(start + AHEAD, len(self.firsts)))

    def between(self, first: str, stop: str) -> Iterator[str]:
        """Yield the paths from `first` up to `stop`."""
        low, high = max(0, self.position(first)), bisect.bisect_left(self.firsts, stop)
        return (path for at in range(low, high) for path in self.load(at, at + 1)[0].between(first, stop))


class InMemory(StoredNodes):
    """The nodes of manifests in memory."""

    __slots__ = ("_loaded",)

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._loaded = list(map(ManifestNodes, manifests))
        super().__init__([n.paths[0] for n in self._loaded], sum(len(n.paths) for n in self._loaded))

    def load(self, start: int, stop: int) -> Sequence[PageNodes]:
        """Return the nodes of the manifests from `start` up to `stop`."""
        return self._loaded[start:stop]

    def reads(self, at: int) -> bool:
        """Return False: nothing is read."""
        return False


class Paged(StoredNodes):
    """The nodes of a manifest in pages."""

    __slots__ = ("_kept", "_reference", "_source")

    def __init__(self, reference: ObjectRef, source: PageSource) -> None:
        self._reference = reference
        self._source = source
        self._kept: Mapping[int, PageNodes] = {}
        super().__init__([page.first for page in reference.pages], sum(page.nodes for page in reference.pages))

    def load(self, start: int, stop: int) -> Sequence[PageNodes]:
        """Return the nodes of the pages from `start` up to `stop`; blocking, unless all are kept."""
        kept = self._kept
        if all(at in kept for at in range(start, stop)):
            return [kept[at] for at in range(start, stop)]
        return self._source.load(self._reference, start, stop)

    def keep(self, loaded: Mapping[int, PageNodes]) -> None:
        """Keep these pages, which may be more than the source caches, unless all are already kept."""
        if len(self._kept) < len(self.firsts):
            self._kept = loaded

    def is_same(self, other: StoredNodes | None) -> bool:
        """Return whether these are surely the same nodes, without reading any."""
        return self is other or (isinstance(other, Paged) and self._reference == other._reference)

    def reads(self, at: int) -> bool:
        """Return whether a page is neither kept nor cached."""
        return at not in self._kept and not self._source.has(self._reference, at)


NO_DOCUMENT = Document(b"")

OPEN = 1 << 62
"""In place of a version, of the top level: the changes of the next commits are added to it."""


class Write(NamedTuple):
    """A commit that wrote chunks of a node: the node's position in its manifest, and its compaction, if any."""

    manifest: Manifest
    position: int
    compaction: Compaction | None

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
        return stack(below if self.compaction is None else compacted(below, self.compaction), self.tables)


class Writes(NamedTuple):
    """The commits that wrote chunks of a node, whose tables are laid over it, one after the other, at a lookup.

    `node` is None if the node is in a level below.
    """

    metadata: Document
    commits: tuple[Write, ...]
    node: Node | None = None


Change = Node | Writes | None  # None for a deleted node


def no_foundation(path: str) -> Corrupt:
    """Return the error for a write to a node that does not exist, or has other metadata than the writer saw."""
    return Corrupt(
        f"a record writes to {path!r}, which does not exist before it, or was replaced, resized or extended after "
        "the record's base"
    )


def resolved(path: str, former: Node | None, writes: Writes) -> Node:
    """Return a node with the tables of writes over it; raise `Corrupt` if they were not made over this node."""
    first, *later = writes.commits
    first.check_above(path, None if former is None else former.metadata)
    assert former is not None
    tables = first.over(former.tables)
    newer: list[Table] = []
    for write in later:
        if write.manifest.segments:  # dense ones replace what is below, and so does a compaction
            tables, newer = write.over(stack(tables, newer)), []
        else:
            newer += write.tables
    tables = stack(tables, newer)
    return Node(path, writes.metadata, tables)


def combined(path: str, former: Change, change: Change) -> Change:
    """Return the change of a node that two changes make, one after the other."""
    if not isinstance(change, Writes) or change.node is not None:
        return change
    if isinstance(former, Writes):
        change.commits[0].check_above(path, former.metadata)
        return Writes(change.metadata, (*former.commits, *change.commits), former.node)
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
        """Return whether two levels certainly have the same nodes, as levels of one root do; reads no page."""
        if self is other:
            return True
        # stored nodes are those of a root or a whole tree, whose pages never change
        return self.version == other.version and self.stored is not None and self.stored.is_same(other.stored)

    def has_in_memory(self, path: str) -> bool:
        """Return whether the node at a path is known to exist, or not to exist, without reading a page."""
        if path in self.changed:
            change = self.changed[path]
            return not isinstance(change, Writes) or change.node is not None
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
