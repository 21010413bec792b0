"""The nodes of manifests: in memory, or in pages that a `PageSource` reads when needed; pure, no I/O."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.node import Node

__all__ = [
    "AHEAD",
    "NO_PAGES",
    "DerivedNodes",
    "InMemory",
    "ManifestNodes",
    "PageNodes",
    "PageSource",
    "Paged",
    "StoredNodes",
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
    """Where the pages of manifests are read."""

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
