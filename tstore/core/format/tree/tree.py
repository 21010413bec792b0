"""The tree of groups and arrays as of one version, and the application of commits to it; pure, no I/O."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tstore.core.format.arguments import checked_attributes
from tstore.core.format.bounds import MAX_NAMES, json_excess_message
from tstore.core.format.frame import NO_RECORD
from tstore.core.format.layout import ROOT_EVERY
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.records import Record, Root
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.roots import StoredRoot, stored_root
from tstore.core.format.tree.node import differs
from tstore.core.format.tree.nodes import Nodes
from tstore.core.format.tree.stored_nodes import NO_PAGES, InMemory, Paged, PageSource, StoredNodes
from tstore.errors import Corrupt, InvalidArgument

__all__ = [
    "RESERVED_ATTRIBUTE",
    "Tree",
    "group_document",
]

RESERVED_ATTRIBUTE = "tstore"
"""The attribute of the root group in which tstore stores its own metadata of a version."""


@dataclass(eq=False, repr=False)
class Tree:
    """All nodes by path, and all tags, as of `version`; immutable.

    The last `copies` versions up to this one are copies; the nodes are those of the head before them.
    `resumes` is not 0 if a record before this version is lost. Trees from version `resumes` on include its changes
    again, so they can't be derived from this tree (`Record.resumes`).
    """

    version: int
    nodes: Nodes
    tags: Mapping[str, int]
    copies: int = 0
    resumes: int = 0

    @property
    def head(self) -> int:
        """The newest version up to this one that is not a copy."""
        return self.version - self.copies

    def after(self, version: int, record: Record, manifests: Sequence[Manifest] | Nodes) -> Tree:
        """Return this tree, that of the head, after a commit; raise `Corrupt` if it then has too many tags.

        In place of the manifests, pass the nodes if the commit replaces the whole tree, or this tree is empty. The
        manifests of a copy are ignored.
        """
        tags = self.tags  # of the record, `tags` name this version, and `tagged` earlier ones
        if record.tags or record.dropped or record.tagged:
            tags = dict(tags)  # of the ways to copy, the fastest
            for tag in record.dropped:
                tags.pop(tag, None)
            tags.update(dict.fromkeys(record.tags, version) | record.tagged)
            if len(tags) > MAX_NAMES:
                raise Corrupt(f"version {version} has more than {MAX_NAMES:,} tags")
        if record.collection is not None:
            living = record.collection.versions | {version}
            tags = {t: v for t, v in tags.items() if v in living}
        if record.void or record.collection is not None or record.source:
            nodes = self.nodes
        elif isinstance(manifests, Nodes):
            nodes = manifests
        else:
            nodes = Tree.empty().nodes if record.replaces else self.nodes
            if record.deleted and not record.replaces:
                nodes = nodes.without(record.deleted)
            nodes = nodes.after(manifests, record.paged_manifest)
        copies = self.copies + 1 if record.source else 0
        resumes = max(self.resumes, record.resumes) if record.void else self.resumes
        return Tree(version, nodes if version % ROOT_EVERY else nodes.sealed(version), tags, copies, resumes)

    def after_writes(self, version: int, manifests: Sequence[Manifest]) -> Tree:
        """Return this tree after the commits up to `version`, which only wrote chunks; `version` has no root."""
        if version == self.version:
            return self
        nodes = self.nodes.after(manifests) if manifests else self.nodes
        return Tree(version, nodes, self.tags, resumes=self.resumes)

    def leads_to(self, version: int) -> bool:
        """Return whether the tree of a later version can be made from this one."""
        return not 0 < self.resumes <= version

    def manifest(self) -> Manifest:
        """Return one manifest of all nodes and their chunks; all have `replaces_node` set."""
        return Manifest.from_nodes([(path, n.document, True, n.tables) for path, n in self.nodes.items()])

    def root(self, record_check: bytes, parent_check: bytes = NO_RECORD) -> StoredRoot:
        """Return this tree as a root, from which it can be opened without the earlier records.

        `record_check` is the checksum of this version's record, `parent_check` that of the version whose root this
        one continues, if any. The bytes of the root depend only on the log, not on how the tree was loaded: a
        server compares the root that it receives with its own.
        """
        tags = dict(sorted(self.tags.items(), key=lambda item: (item[1], item[0])))
        parent = self.nodes.parent_of(self.version)
        manifest, deleted = self.nodes.changes(parent)
        base = None if parent else self.nodes.base
        root = Root(self.version, record_check, tags, manifest, base, deleted, parent, self.copies, parent_check)
        return stored_root(root)

    @staticmethod
    @functools.cache
    def empty() -> Tree:
        """Return the tree before the first commit."""
        return Tree(0, Nodes(), {})

    def differences(self, other: Tree, nodes: bool) -> list[str]:
        """Return the differences from another tree of this version: tags, and with `nodes` the paths of nodes."""
        names = self.tags.keys() | other.tags.keys()
        differing = sorted(f"tag {t!r}" for t in names if self.tags.get(t) != other.tags.get(t))
        differing += ["the number of copies"] if self.copies != other.copies else []
        if nodes:
            paths = self.nodes.keys() | other.nodes.keys()
            differing += sorted(p for p in paths if differs(self.nodes.get(p), other.nodes.get(p)))
        return differing

    @staticmethod
    def from_root(root: Root, source: PageSource = NO_PAGES, earlier: Tree | None = None) -> Tree:
        """Return the tree of a root; `source` reads the pages to which it refers.

        `earlier` is the tree of the parent of the root, or a later one, if the root has a parent.
        """
        if root.parent:
            if earlier is None or earlier.nodes.parent_of(root.version) != root.parent:
                raise Corrupt(f"the root of version {root.version} refers to nodes that have been replaced since")
            nodes = earlier.nodes.up_to(root.parent)
        else:
            nodes = Nodes() if root.base is None else Nodes.from_pages(root.base, source)
        nodes = nodes.with_root(root.version, _stored(root.manifest, source), root.deleted)
        return Tree(root.version, nodes, root.tags, root.copies)


def _stored(manifest: ObjectRef | Manifest, source: PageSource) -> StoredNodes | None:
    if isinstance(manifest, ObjectRef):
        return Paged(manifest, source)
    return InMemory([manifest]) if manifest.paths else None


def group_document(attributes: Mapping[str, Any], reserved: Mapping[str, Any] | None = None) -> bytes:
    """Return the `zarr.json` of a group with these attributes, and with `reserved` as tstore's own attribute."""
    checked = checked_attributes(attributes)
    if reserved is not None:
        checked[RESERVED_ATTRIBUTE] = reserved
    document = msgspec.json.encode({"zarr_format": 3, "node_type": "group", "attributes": checked})
    if excess := json_excess_message(document):
        raise InvalidArgument(
            f"the attributes of a group, or the structure of a checkpoint, have {excess}; store them as an array"
        )
    return document
