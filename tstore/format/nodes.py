"""The nodes of a tree: those of a manifest, made at the first lookup, and later changes; pure, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeVar, overload

from tstore.errors import Corrupt
from tstore.format.documents import Document
from tstore.format.node import Node
from tstore.format.paths import at_or_below
from tstore.format.references import Manifest

__all__ = ["Nodes"]

T = TypeVar("T")


class Nodes(Mapping[str, Node]):
    """Nodes by path, immutable: those of a manifest, except for those in `changed` (None: deleted)."""

    __slots__ = ("_changed", "_count", "_stored")

    def __init__(
        self, stored: _StoredNodes | None = None, changed: Mapping[str, Node | None] = MappingProxyType({})
    ) -> None:
        self._stored = stored
        self._changed = changed
        self._count = -1  # not yet counted

    @staticmethod
    def from_manifest(manifest: Manifest) -> Nodes:
        """Return the nodes of a manifest."""
        return Nodes(_StoredNodes(manifest))

    def with_changes(self, changed: Mapping[str, Node | None]) -> Nodes:
        """Return the nodes after these changes; None deletes a node."""
        return Nodes(self._stored, {**self._changed, **changed} if self._changed else changed)

    def without(self, deleted: Iterable[str]) -> Nodes:
        """Return the nodes that are neither at nor below a deleted path."""
        removed = at_or_below(self, deleted)
        return self.with_changes(dict.fromkeys(removed)) if removed else self

    def __getitem__(self, path: str) -> Node:
        node = self.get(path)
        if node is None:
            raise KeyError(path)
        return node

    @overload
    def get(self, path: str, /) -> Node | None: ...
    @overload
    def get(self, path: str, /, default: Node | T) -> Node | T: ...
    def get(self, path: str, /, default: Node | T | None = None) -> Node | T | None:
        """Return the node at a path, or `default` if there is none."""
        stored = self._stored
        if stored is None or path in self._changed:
            node = self._changed.get(path)
        else:
            node = stored.made.get(path) or stored.get(path)
        return default if node is None else node

    def array_paths(self) -> list[str]:
        """Return the paths of all arrays, in any order."""
        paths = [path for path, node in self._changed.items() if node is not None and node.is_array]
        if self._stored is not None:
            paths += [path for path in self._stored.array_paths() if path not in self._changed]
        return paths

    def __iter__(self) -> Iterator[str]:
        if self._stored is not None:
            yield from (path for path in self._stored.paths if path not in self._changed)
        yield from (path for path, node in self._changed.items() if node is not None)

    def __len__(self) -> int:
        if self._count < 0:
            self._count = sum(1 for _ in self)
        return self._count

    def __bool__(self) -> bool:
        return any(True for _ in self)


class _StoredNodes:
    """The nodes of a manifest."""

    __slots__ = ("_manifest", "made", "paths")

    def __init__(self, manifest: Manifest) -> None:
        self.paths = manifest.paths
        self._manifest = manifest
        self.made: dict[str, Node] = {}

    def array_paths(self) -> Iterator[str]:
        documents = self._manifest.metadata()
        return (p for p, document in zip(self.paths, documents, strict=True) if self._is_array(p, document))

    def _is_array(self, path: str, document: Document) -> bool:
        try:
            return document.is_array
        except Corrupt as error:
            raise Corrupt(f"{path}: {error}") from error

    def get(self, path: str) -> Node | None:
        position = self._manifest.position(path)
        if position is None:
            return None
        node = self.made[path] = Node(path, *self._manifest.node(position))
        return node
