"""The nodes of a tree: those of manifests, made at the first lookup, and later changes; pure, no I/O.

1. The manifests are in memory, or pages of one object (`pages`) that a `PageSource` reads when a lookup needs one.
2. A commit that only writes chunks of an array needs no page: its tables are laid over those of the stored node at
   the first lookup (`_Overlay`).
3. A root refers to the pages that the last commit of a whole tree wrote (`Nodes.base`), and repeats only what has
   changed since, unless that is more than a share of the nodes: see `Nodes.bounded`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar, overload

from tstore.format.documents import Document
from tstore.format.layers import Table, stack
from tstore.format.merges import Merge, merged
from tstore.format.node import Node, is_array
from tstore.format.object_ref import ObjectRef
from tstore.format.paths import parents
from tstore.format.references import Manifest
from tstore.format.stored_nodes import AHEAD, InMemory, ManifestNodes, Paged, PageSource, StoredNodes

__all__ = ["Nodes"]

T = TypeVar("T")

_MIN_CHANGED, _MAX_SHARE = 4096, 8  # a root refers to its base up to so many changes, or one of so many nodes
_MAX_LAYERS = 64  # commits whose tables are laid over a stored node before it is read


class _Layer(NamedTuple):
    """The tables of one commit that wrote chunks of a node, and its merge of the tables below them, if any."""

    merge: Merge | None
    tables: tuple[Table, ...]

    def over(self, below: tuple[Table, ...]) -> tuple[Table, ...]:
        """Return the tables of the node after the commit."""
        return stack(below if self.merge is None else merged(below, self.merge), self.tables)


class _Overlay(NamedTuple):
    """The commits that wrote chunks of a stored node, whose tables are to be laid over it one after the other."""

    metadata: Document
    layers: tuple[_Layer, ...]


_Change = Node | _Overlay | None  # None: deleted


class Nodes(Mapping[str, Node]):
    """Nodes by path, immutable: stored ones, except for those that changed.

    Lookups may read pages of manifests, blocking, if `is_paged`; they raise `Corrupt` for a damaged page, and
    `NotFound` if the object is missing.
    """

    __slots__ = ("_changed", "_sorted", "_stored", "base")

    def __init__(
        self,
        stored: StoredNodes | None = None,
        changed: Mapping[str, _Change] = MappingProxyType({}),
        base: ObjectRef | None = None,
    ) -> None:
        self.base = base
        """The manifest in pages that has the stored nodes, if a root may refer to it."""
        self._stored = stored
        self._changed = changed
        self._sorted: list[str] | None = None  # the changed paths in order, once they were needed

    @staticmethod
    def from_manifests(manifests: Iterable[Manifest], base: ObjectRef | None = None) -> Nodes:
        """Return the nodes of manifests; the paths of each are above those of the one before it.

        `base` is the object of which they are the pages, if that is known.
        """
        listed = [manifest for manifest in manifests if manifest.paths]
        return Nodes(InMemory(listed), base=base) if listed else Nodes()

    @staticmethod
    def from_pages(reference: ObjectRef, source: PageSource) -> Nodes:
        """Return the nodes of a manifest in pages."""
        return Nodes(Paged(reference, source), base=reference)

    def changes(self) -> tuple[Manifest, tuple[str, ...]]:
        """Return the nodes that were changed since `base`, and the paths that were deleted, sorted."""
        paths = sorted(self._changed)
        nodes = [(p, n.document, True, n.tables) for p in paths if (n := self.get(p)) is not None]
        return Manifest.from_nodes(nodes), tuple(p for p in paths if self._changed[p] is None)

    def with_manifest(self, manifest: Manifest, deleted: Iterable[str]) -> Nodes:
        """Return the nodes with those of a manifest in place of stored ones, and without those deleted."""
        changed: dict[str, _Change] = {path: Node(path, document, t) for path, document, _, t in manifest.nodes()}
        return self.with_changes(changed | dict.fromkeys(deleted))

    def bounded(self) -> Nodes:
        """Return the nodes, without `base` if too many have changed since for roots to repeat them.

        The outcome depends only on what commits have changed, so all processes write the same roots.
        """
        if self.base is None or self._stored is None:
            return self
        is_short = len(self._changed) <= max(_MIN_CHANGED, self._stored.count // _MAX_SHARE)
        return self if is_short else Nodes(self._stored, self._changed)

    def compacted(self) -> Nodes:
        """Return the same nodes; each array that changed since `base` has one table, not one for each commit."""
        return Nodes(self._stored, base=self.base).with_manifest(*self.changes())

    @property
    def is_paged(self) -> bool:
        """Whether lookups may read pages, and so block."""
        return isinstance(self._stored, Paged)

    def reads(self, paths: Iterable[str]) -> bool:
        """Return whether looking up these paths reads pages from storage."""
        if (stored := self._stored) is None or not self.is_paged:
            return False
        return any(stored.reads(at) for at in set(map(stored.position, paths)) if at >= 0)

    def load(self, paths: Iterable[str] | None = None) -> None:
        """Read the pages that have these paths, or all pages, so that lookups that follow need not; blocking.

        They stay in memory until the next call, or as long as the nodes if they are all.
        """
        if (stored := self._stored) is None or not self.is_paged:
            return
        wanted = range(len(stored.firsts)) if paths is None else sorted(set(map(stored.position, paths)) - {-1})
        loaded: dict[int, ManifestNodes] = {}
        for _, group in itertools.groupby(enumerate(wanted), lambda item: item[1] - item[0]):
            positions = [at for _, at in group]
            for start in range(positions[0], positions[-1] + 1, AHEAD):
                loaded.update(enumerate(stored.load(start, min(start + AHEAD, positions[-1] + 1)), start))
        stored.keep(loaded)

    def around(self, path: str) -> list[str]:
        """Return paths whose pages have all nodes at, above and below a path."""
        first, stop = _below(path)
        firsts = [] if self._stored is None else self._stored.firsts
        within = firsts[bisect.bisect_right(firsts, first) : bisect.bisect_left(firsts, stop)]
        return [*parents(path), path, first, *within]

    def with_changes(self, changed: Mapping[str, _Change]) -> Nodes:
        """Return the nodes after these changes; None deletes a node."""
        return Nodes(self._stored, {**self._changed, **changed} if self._changed else changed, self.base)

    def without(self, deleted: Collection[str]) -> Nodes:
        """Return the nodes that are neither at nor below a deleted path."""
        if "" in deleted:
            return Nodes()
        removed = [path for top in deleted for path in self.at_or_below(top)]
        return self.with_changes(dict.fromkeys(removed)) if removed else self

    def after(self, manifests: Sequence[Manifest], base: ObjectRef | None = None) -> Nodes:
        """Return the nodes after a commit with these manifests, which are the pages of `base` if that is known."""
        if not self and _ascend(manifests):
            return Nodes.from_manifests(manifests, base)
        changed: dict[str, _Change] = {}
        created: set[str] = set()
        for manifest in manifests:
            merges = manifest.merges_by_path() if manifest.merges else {}
            for path, metadata, replaces_node, tables in manifest.nodes():
                former = changed[path] if path in changed else self._former(path)
                layer = _Layer(merges.get(path), tables)
                if former is None or (replaces_node and path not in created):
                    changed[path] = Node(path, metadata, tables)
                    created.add(path)
                elif isinstance(former, _Overlay):
                    changed[path] = _Overlay(metadata, (*former.layers, layer))
                else:
                    changed[path] = Node(path, metadata, layer.over(former.tables))
        return self.with_changes(changed)

    def after_reads(self, manifests: Iterable[Manifest]) -> bool:
        """Return whether `after` may read pages: for nodes with many layers, or if all nodes may be deleted."""
        if not self.is_paged:
            return False
        paths = itertools.chain.from_iterable(manifest.paths for manifest in manifests)
        return not self._surely_has_nodes() or any(_is_long(self._changed.get(path)) for path in paths)

    def _former(self, path: str) -> _Change:
        """Return what is known of the node at a path, without reading a page unless it has many layers."""
        if path in self._changed:
            former = self._changed[path]
            return self.get(path) if _is_long(former) else former
        return _Overlay(_NO_DOCUMENT, ()) if self.is_paged else self.get(path)

    def __getitem__(self, path: str) -> Node:
        node = self.get(path)
        if node is None:
            raise KeyError(path)
        return node

    def __contains__(self, path: object) -> bool:
        if path in self._changed:
            return self._changed[str(path)] is not None
        stored = self._stored
        if stored is None or not isinstance(path, str):
            return False
        nodes = stored.holding(path)
        return nodes is not None and nodes.has(path)

    @overload
    def get(self, path: str, /) -> Node | None: ...
    @overload
    def get(self, path: str, /, default: Node | T) -> Node | T: ...
    def get(self, path: str, /, default: Node | T | None = None) -> Node | T | None:
        """Return the node at a path, or `default` if there is none."""
        change = self._changed[path] if path in self._changed else self._stored_node(path)
        node = self._resolve(path, change) if isinstance(change, _Overlay) else change
        return default if node is None else node

    def _stored_node(self, path: str) -> Node | None:
        nodes = None if self._stored is None else self._stored.holding(path)
        return None if nodes is None else nodes.get(path)

    def _resolve(self, path: str, overlay: _Overlay) -> Node:
        """Return the stored node with the tables of an overlay, and keep it."""
        former, layers = self._stored_node(path), iter(overlay.layers)
        tables = next(layers).tables if former is None else former.tables  # a merge of nothing is ignored
        for layer in layers:
            tables = layer.over(tables)
        node = Node(path, overlay.metadata, tables)
        if isinstance(self._changed, dict):
            self._changed[path] = node
        return node

    def array_paths(self) -> list[str]:
        """Return the paths of all arrays, in any order."""
        paths = [
            path
            for path, change in self._changed.items()
            if change is not None and is_array(path, change.metadata)
        ]
        for nodes in () if self._stored is None else self._stored.each():
            paths += [path for path in nodes.array_paths() if path not in self._changed]
        return paths

    def at_or_below(self, top: str) -> list[str]:
        """Return the paths at and below a path, in any order; reads only the pages that may have one."""
        if not top:
            return list(self)
        first, stop = _below(top)
        paths = [top] if top in self else []
        if self._stored is not None:
            paths += [path for path in self._stored.between(first, stop) if path not in self._changed]
        return paths + [path for path in self._changed_between(first, stop) if self._changed[path] is not None]

    def _changed_between(self, first: str, stop: str) -> list[str]:
        if self._sorted is None:
            self._sorted = sorted(self._changed)
        return self._sorted[bisect.bisect_left(self._sorted, first) : bisect.bisect_left(self._sorted, stop)]

    def __iter__(self) -> Iterator[str]:
        for nodes in () if self._stored is None else self._stored.each():
            yield from (path for path in nodes.paths if path not in self._changed)
        yield from (path for path, change in self._changed.items() if change is not None)

    def __bool__(self) -> bool:
        return self._surely_has_nodes() or next(iter(self), None) is not None

    def _surely_has_nodes(self) -> bool:
        """Return whether there are nodes as far as that is known without reading a page."""
        stored = 0 if self._stored is None else self._stored.count
        return len(self._changed) < stored or any(change is not None for change in self._changed.values())

    def __len__(self) -> int:
        stored = self._stored
        count = 0 if stored is None else stored.count
        for path, change in self._changed.items():
            replaces = isinstance(change, _Overlay)
            if not replaces and stored is not None:
                nodes = stored.holding(path)
                replaces = nodes is not None and nodes.has(path)
            count += (change is not None) - replaces
        return count


_NO_DOCUMENT = Document(b"")


def _below(path: str) -> tuple[str, str]:
    """Return the range of all paths below a path: the lowest that can be one, and the lowest above them."""
    return f"{path}/", f"{path}0"  # "0" follows "/"


def _is_long(change: _Change) -> bool:
    return isinstance(change, _Overlay) and len(change.layers) >= _MAX_LAYERS


def _ascend(manifests: Sequence[Manifest]) -> bool:
    """Return whether the paths of each manifest are above those of the one before it."""
    listed = [manifest for manifest in manifests if manifest.paths]
    return all(a.paths[-1] < b.paths[0] for a, b in itertools.pairwise(listed))
