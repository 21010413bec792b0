"""The nodes of a tree: nodes parsed from manifests at the first lookup, and later changes; pure, no I/O.

1. The manifests are in memory, or pages of one object (`pages`) that a `PageSource` reads when a lookup needs one.
2. A commit that only writes chunks of an array reads no page and does no work for nodes that are never looked up:
   its tables are laid over those of the previous node at the first lookup (`Writes`).
3. The nodes are in `levels`. Each level has the changes since the level below, up to a version that has a root. So
   a root repeats only the changes since an earlier root (`layout.parent_root`), or since the last commit that
   replaced the whole tree by pages (`Nodes.base`). Its bytes depend on the log alone, not on how the tree was
   loaded.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, overload

from tstore.core.format.layout import parent_root
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.references import EXTENDS, REPLACES, Manifest
from tstore.core.format.paths import parents
from tstore.core.format.tree.node import Node, is_array
from tstore.core.format.tree.stored_nodes import (
    AHEAD,
    NO_DOCUMENT,
    OPEN,
    Change,
    InMemory,
    Level,
    Paged,
    PageNodes,
    PageSource,
    StoredNodes,
    Write,
    Writes,
    no_foundation,
    resolved,
)

__all__ = ["Nodes"]

T = TypeVar("T")

_MANY, _SHARE = 1024, 16  # a level of more changes is not copied for new ones, unless these exceed 1/16 of it
_WRITES = (0, EXTENDS)  # the flags of nodes that a manifest changes without replacing them
_MAX_WRITES = 64  # commits to a stored node after which it is read, and their tables are merged


class Nodes(Mapping[str, Node]):
    """An immutable mapping from paths to nodes: stored nodes overlaid by changes.

    Lookups may read pages of manifests, blocking, if `is_paged`; they raise `Corrupt` for a damaged page, and
    `NotFound` if the object is missing.
    """

    __slots__ = ("_changed", "_levels", "base", "is_paged")

    def __init__(self, levels: Sequence[Level] = (), base: ObjectRef | None = None) -> None:
        self.base = base
        """The paged manifest with the nodes of the lowest level, if a root may refer to it."""
        self._levels = tuple(levels) if levels and levels[-1].version == OPEN else (*levels, Level({}))
        self._changed = self._levels[-1].changed  # after the last root
        self.is_paged = True in [level.is_paged for level in self._levels]
        """Whether lookups may read pages, and so block."""

    @staticmethod
    def from_manifests(manifests: Iterable[Manifest], base: ObjectRef | None = None) -> Nodes:
        """Return the nodes of manifests whose paths ascend from one manifest to the next.

        `base` is the object that has the manifests as pages, if known.
        """
        listed = [manifest for manifest in manifests if manifest.paths]
        return Nodes([Level({}, InMemory(listed), 0)], base) if listed else Nodes()

    @staticmethod
    def from_pages(reference: ObjectRef, source: PageSource) -> Nodes:
        """Return the nodes of a manifest in pages."""
        return Nodes([Level({}, Paged(reference, source), 0)], reference)

    # ---- roots

    def sealed(self, version: int) -> Nodes:
        """Return the nodes of a version that has a root, in a form to which later roots may refer.

        Levels to which no later root will refer are merged, so that few remain.
        """
        *levels, level = self._levels
        while levels and levels[-1].version == OPEN:
            level = levels.pop().under(level)
        level, parent = level.sealed(version), parent_root(version)
        while level.stored is None and levels and levels[-1].stored is None and levels[-1].version > parent:
            level = levels.pop().under(level)
        return Nodes((*levels, level if levels else level.without_deletions()), self.base)

    def parent_of(self, version: int) -> int:
        """Return the version of the root to which the root of `version` refers, 0 if it replaces the tree."""
        parent = parent_root(version)
        return parent if self.knows(parent) else 0

    def knows(self, version: int) -> bool:
        """Return whether `up_to` can return the nodes of a version: it has a root, and was not replaced since."""
        return any(level.version == version for level in self._levels)

    def up_to(self, version: int) -> Nodes:
        """Return the nodes as of the version of an earlier root."""
        return Nodes([level for level in self._levels if level.version <= version], self.base)

    def with_root(self, version: int, stored: StoredNodes | None, deleted: Iterable[str]) -> Nodes:
        """Overlay the stored nodes of a root, and remove the deleted paths."""
        return Nodes((*self._levels[:-1], Level(dict.fromkeys(deleted), stored, version)), self.base)

    def changes(self, parent: int) -> tuple[Manifest, tuple[str, ...]]:
        """Return the nodes changed and the paths deleted since the root `parent`, both sorted.

        If `parent` is 0, return the changes since `base`, or all nodes if there is no base.
        """
        nodes = self.changed(parent)
        kept = [(p, n.document, True, n.tables) for p, n in nodes.items() if n is not None]
        return Manifest.from_nodes(kept), tuple(path for path, node in nodes.items() if node is None)

    def changed(self, parent: int) -> dict[str, Node | None]:
        """Return the nodes changed since the root `parent`, by ascending path, None for deleted ones.

        Nodes both created and deleted since `parent` are left out: a store that creates and deletes many arrays
        has far more such paths than nodes.
        """
        start = 0 if self.base is None else 1
        levels = [level for level in self._levels[start:] if level.version > parent or not parent]
        before = self.up_to(parent) if parent else Nodes(self._levels[:start])
        nodes = {path: self.get(path) for path in sorted({path for level in levels for path, _ in level.listed()})}
        return {path: node for path, node in nodes.items() if node is not None or path in before}

    def apart(self, other: Nodes) -> set[str]:
        """Return the paths at which two trees may differ: the paths in levels that they do not share."""
        pairs = zip(self._levels, other._levels, strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0].is_same(pair[1]), pairs))
        levels = (*self._levels[shared:], *other._levels[shared:])
        return {path for level in levels for path, _ in level.listed()}

    def compacted(self) -> Nodes:
        """Return the same nodes, with one table for each array changed in memory instead of one per commit."""
        levels = []
        for at, level in enumerate(self._levels):
            nodes = {path: self._node(path, at) for path in level.changed}
            kept = [(p, n.document, True, n.tables) for p, n in sorted(nodes.items()) if n is not None]
            changed = {p: Node(p, document, t) for p, document, _, t in Manifest.from_nodes(kept).nodes()}
            levels.append(Level({**nodes, **changed}, level.stored, level.version))
        return Nodes(levels, self.base)

    # ---- pages

    def _paged(self) -> Iterator[StoredNodes]:
        return (level.stored for level in reversed(self._levels) if level.stored is not None and level.is_paged)

    def reads(self, paths: Iterable[str]) -> bool:
        """Return whether looking up these paths may read pages from storage."""
        paths = list(paths)
        return any(
            stored.reads(at) for stored in self._paged() for at in set(map(stored.position, paths)) if at >= 0
        )

    def load(self, paths: Iterable[str] | None = None) -> None:
        """Read the pages that have these paths, or all pages, ahead of lookups; blocking.

        The pages stay in memory until the next call; if all were read, as long as this object.
        """
        wanted = None if paths is None else set(paths)
        for level in reversed(self._levels):
            if wanted is not None:
                wanted = {path for path in wanted if not level.has_in_memory(path)}
            if level.stored is not None and level.is_paged:
                level.stored.keep(_loaded(level.stored, wanted))
                if wanted is not None:
                    wanted = {path for path in wanted if not level.has_stored(path)}

    def around(self, path: str) -> list[str]:
        """Return paths whose pages contain all nodes at, above and below a path."""
        return [*parents(path), path, *self.around_start(f"{path}/")]

    def around_start(self, start: str) -> list[str]:
        """Return paths whose pages contain all nodes with paths that begin with `start`."""
        stop = _after(start)
        within: list[str] = []
        for stored in self._paged():
            firsts = stored.firsts
            within += firsts[bisect.bisect_right(firsts, start) : bisect.bisect_left(firsts, stop)]
        return [start, *within]

    # ---- changes

    def with_changes(self, changed: Mapping[str, Change]) -> Nodes:
        """Return the nodes after these changes; None deletes a node.

        If the top level already has many changes, a few new ones go into a separate level, which is cheaper.
        """
        *levels, top = self._levels
        if len(top.changed) > _MANY and len(changed) < len(top.changed) // _SHARE:
            return Nodes((*levels, top, Level(changed)), self.base)
        top = top.with_changes(changed)
        while levels and levels[-1].version == OPEN and len(top.changed) >= len(levels[-1].changed) // _SHARE:
            top = levels.pop().under(top)
        return Nodes((*levels, top), self.base)

    def without(self, deleted: Collection[str]) -> Nodes:
        """Return the nodes that are neither at nor below a deleted path."""
        if "" in deleted:
            return Nodes()
        removed = [path for top in deleted for path in self.at_or_below(top)]
        return self.with_changes(dict.fromkeys(removed)) if removed else self

    def after(self, manifests: Sequence[Manifest], base: ObjectRef | None = None) -> Nodes:
        """Return the nodes after a commit with these manifests.

        `base` is the object that has the manifests as pages, if known. Raise `Corrupt` if the commit writes to
        nodes that do not exist or have other metadata: see `check_foundation`.
        """
        if not self._surely_has_nodes() and _creates_all(manifests) and not self and _ascend(manifests):
            return Nodes.from_manifests(manifests, base)
        changed: dict[str, Change] = {}
        created: set[str] = set()
        for manifest in manifests:
            compactions = manifest.compactions_by_path() if manifest.compactions else {}
            for at, (path, flags) in enumerate(zip(manifest.paths, manifest.replaces_node, strict=True)):
                former = changed[path] if path in changed else self._former(path)
                if former is None and not flags & REPLACES:
                    raise no_foundation(path)
                if former is None or (flags & REPLACES and path not in created):
                    changed[path] = Node(path, *manifest.node(at))
                    created.add(path)
                    continue
                below, writes = (former.node, former.commits) if isinstance(former, Writes) else (former, ())
                write = Write(manifest, at, compactions.get(path))
                writes = (*writes, write)
                # a document is parsed only once, however many commits repeat it
                same = former.metadata.data == manifest.document_at(at)
                if not same and former.metadata is not NO_DOCUMENT:
                    write.check_above(path, former.metadata)
                changed[path] = Writes(former.metadata if same else manifest.node(at)[0], writes, below)
        return self.with_changes(changed)

    def after_reads(self, manifests: Iterable[Manifest]) -> bool:
        """Return whether `after` may read pages: for nodes with many writes, or if all nodes may be deleted."""
        if not self.is_paged:
            return False
        paths = itertools.chain.from_iterable(manifest.paths for manifest in manifests)
        return not self._surely_has_nodes() or any(_is_long(self._changed.get(path)) for path in paths)

    def _former(self, path: str) -> Change:
        """Return the node at a path, or the writes to it, without reading a page unless there are many writes.

        An empty `Writes` stands for a node on an unread page, without changes since the last root.
        """
        if path in self._changed:
            former = self._changed[path]
            return self.get(path) if _is_long(former) else former
        for level in reversed(self._levels):
            if path in level.changed and level.has_in_memory(path):
                return level.changed[path]
            if path in level.changed or level.is_paged:
                return Writes(NO_DOCUMENT, ())
            if (node := level.stored_node(path)) is not None:
                return node
        return None

    def __getitem__(self, path: str) -> Node:
        node = self.get(path)
        if node is None:
            raise KeyError(path)
        return node

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, str):
            return False
        for level in reversed(self._levels):
            if path in level.changed:
                return level.changed[path] is not None
            if level.has_stored(path):
                return True
        return False

    @overload
    def get(self, path: str, /) -> Node | None: ...
    @overload
    def get(self, path: str, /, default: Node | T) -> Node | T: ...
    def get(self, path: str, /, default: Node | T | None = None) -> Node | T | None:
        """Return the node at a path, or `default` if there is none."""
        node = self._node(path, len(self._levels) - 1)
        return default if node is None else node

    def many(self, paths: Collection[str]) -> Mapping[str, Node]:
        """Return the nodes at these paths, and perhaps more: if most are requested, all are read at once."""
        level, *above = self._levels
        stored = level.stored
        is_changed = level.changed or any(later.changed or later.stored is not None for later in above)
        if stored is None or is_changed or 2 * len(paths) < stored.count:
            return {path: self[path] for path in paths}
        nodes: Mapping[str, Node] = {}
        for held in stored.each():
            nodes = {**nodes, **held.all()} if nodes else held.all()
        return nodes

    def _node(self, path: str, top: int) -> Node | None:
        """Return the node at a path as of the level at position `top`."""
        for at in range(top, -1, -1):
            level = self._levels[at]
            if path in level.changed:
                change = level.changed[path]
                if not isinstance(change, Writes):
                    return change
                below = change.node or level.stored_node(path) or self._node(path, at - 1)
                node = resolved(path, below, change)
                if isinstance(level.changed, dict):
                    level.changed[path] = node  # kept for later lookups
                return node
            if (stored := level.stored_node(path)) is not None:
                return stored
        return None

    def array_paths(self) -> list[str]:
        """Return the paths of all arrays, in any order."""
        return [path for path, metadata in self._listed() if is_array(path, metadata)]

    def _listed(self) -> Iterator[tuple[str, Document]]:
        """Yield the path and the metadata of each node."""
        hidden: set[str] = set()  # paths changed in the levels above
        for level in reversed(self._levels):
            changed: list[str] = []
            for path, metadata in level.listed():
                if level is not self._levels[0]:
                    changed.append(path)
                if metadata is not None and path not in hidden:
                    yield path, metadata
            hidden.update(changed)

    def at_or_below(self, top: str) -> list[str]:
        """Return the paths at and below a path, in any order; reads only the pages that may have one."""
        if not top:
            return list(self)
        return [*([top] if top in self else ()), *self.starting_with(f"{top}/")]

    def starting_with(self, start: str) -> list[str]:
        """Return the paths that begin with `start`, in any order; reads only the pages that may have one."""
        if not start:
            return list(self)
        exist: dict[str, bool] = {}
        for level in self._levels:
            exist.update(level.between(start, _after(start)))
        return [path for path, exists in exist.items() if exists]

    def __iter__(self) -> Iterator[str]:
        return (path for path, _ in self._listed())

    def __bool__(self) -> bool:
        return self._surely_has_nodes() or next(self._listed(), None) is not None

    def _surely_has_nodes(self) -> bool:
        """Return whether there are certainly nodes, without reading a page."""
        hidden = 0  # how many nodes of a level the levels above may have deleted
        for level in reversed(self._levels):
            for change in () if hidden else level.changed.values():
                if change is not None:
                    return True
            hidden += len(level.changed)
            if level.stored is not None and level.stored.count > hidden:
                return True
        return False

    def __len__(self) -> int:
        lowest, *levels = self._levels
        changed = {path: change is not None for path, change in lowest.changed.items()}
        for level in levels:
            changed.update((path, metadata is not None) for path, metadata in level.listed())
        count = 0 if lowest.stored is None else lowest.stored.count
        return count + sum(exists - lowest.has_stored(path) for path, exists in changed.items())


def _after(start: str) -> str:
    """Return the lowest string above all strings that begin with `start` (not empty): "a/" → "a0"."""
    return start[:-1] + chr(ord(start[-1]) + 1)


def _is_long(change: Change) -> bool:
    return isinstance(change, Writes) and len(change.commits) >= _MAX_WRITES


def _loaded(stored: StoredNodes, paths: Collection[str] | None) -> dict[int, PageNodes]:
    """Read the pages that may have these paths, or all pages; consecutive pages are read together."""
    count = len(stored.firsts)
    wanted = range(count) if paths is None else sorted(set(map(stored.position, paths)) - {-1})
    loaded: dict[int, PageNodes] = {}
    for _, group in itertools.groupby(enumerate(wanted), lambda item: item[1] - item[0]):
        positions = [at for _, at in group]
        for start in range(positions[0], positions[-1] + 1, AHEAD):
            loaded.update(enumerate(stored.load(start, min(start + AHEAD, positions[-1] + 1)), start))
    return loaded


def _creates_all(manifests: Sequence[Manifest]) -> bool:
    """Return whether manifests create all of their nodes, so that no earlier node matters."""
    return not any(flag in manifest.replaces_node for manifest in manifests for flag in _WRITES)


def _ascend(manifests: Sequence[Manifest]) -> bool:
    """Return whether paths ascend from each manifest to the next."""
    listed = [manifest for manifest in manifests if manifest.paths]
    return all(a.paths[-1] < b.paths[0] for a, b in itertools.pairwise(listed))
