"""The tree of groups and arrays as of one version, and what a commit changes in it; pure, no I/O.

The outcomes for a transaction when another commit was added after its base:

    the transaction …              and the newer commit …                         outcome
    wrote a part of a chunk        wrote that chunk, in part or whole             re-applied over it; both remain
    wrote a part, as many hosts    wrote that chunk, in part or whole             Conflict
    wrote a whole chunk            wrote that chunk, in part or whole             Conflict
    wrote chunks                   wrote other chunks                             both remain
    wrote or resized an array      resized, deleted or created it again           Conflict
    resized an array               wrote any chunk of it                          Conflict
    deleted a node                 wrote, resized or created at or below it       Conflict
    deleted a node                 deleted it too, or one above or below it       both remain
    created a node                 created one there, above it or below it        Conflict
    created a node                 deleted a node above it                        Conflict
    created a node                 created one elsewhere, even in a common group  both remain
    set or moved a tag             set, moved or dropped the same tag             Conflict
    dropped a tag                  set or moved the same tag                      Conflict
    dropped a tag                  dropped it too, or a gc did                    both remain
    dropped a tag (serializable)   dropped it too, or a gc did                    Conflict
    touched any node               replaced the whole tree (a checkpoint)         Conflict
    replaced the whole tree        changed any node                               the change is replaced too
    read (serializable)            changed what was read                          Conflict (`read_set`)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt, InvalidArgument
from tstore.format.arguments import checked_attributes
from tstore.format.bounds import MAX_NAMES, json_excess_message
from tstore.format.layers import numbers_of, stack
from tstore.format.node import Node, same_node
from tstore.format.nodes import Nodes
from tstore.format.paths import at_or_below, parents
from tstore.format.records import Record, Root, StoredRecord
from tstore.format.references import Manifest

__all__ = [
    "RESERVED_ATTRIBUTE",
    "Changes",
    "NodeChange",
    "Overlap",
    "Tree",
    "group_document",
    "tree_of_root",
]

RESERVED_ATTRIBUTE = "tstore"
"""The attribute of the root group in which tstore stores its own metadata of a version."""


@dataclass(eq=False, repr=False)
class Tree:
    """All nodes by path, and all tags, as of `version`; immutable."""

    version: int
    nodes: Nodes
    tags: Mapping[str, int]

    def after(self, version: int, record: Record, manifests: Sequence[Manifest]) -> Tree:
        """Return this tree after a commit; raise `Corrupt` if it then has too many tags."""
        tags = self.tags  # of the record, `tags` name this version, and `tagged` earlier ones
        if record.tags or record.dropped or record.tagged:
            tags = dict(tags)  # fast, since every commit that sets a tag copies all tags
            for tag in record.dropped:
                tags.pop(tag, None)
            tags.update(dict.fromkeys(record.tags, version) | record.tagged)
            if len(tags) > MAX_NAMES:
                raise Corrupt(f"version {version} has more than {MAX_NAMES:,} tags")
        if record.collection is not None:
            living = record.collection.versions | {version}
            tags = {t: v for t, v in tags.items() if v in living}
        if record.void or record.collection is not None:
            return Tree(version, self.nodes, tags)
        nodes = Nodes() if record.replaces else self.nodes.without(record.deleted)
        changed: dict[str, Node | None] = {}
        if len(manifests) == 1 and not nodes:
            return Tree(version, Nodes.from_manifest(manifests[0]), tags)
        created: set[str] = set()
        for manifest in manifests:
            for path, metadata, replaces_node, tables in manifest.nodes():
                former = changed[path] if path in changed else nodes.get(path)
                if former is None or (replaces_node and path not in created):
                    changed[path] = Node(path, metadata, tables)
                    created.add(path)
                else:
                    changed[path] = Node(path, metadata, stack(former.tables, tables))
        return Tree(version, nodes.with_changes(changed), tags)

    def manifest(self) -> Manifest:
        """Return one manifest of all nodes and their chunks, sorted by path; all have `replaces_node` set."""
        return Manifest.from_nodes([(path, n.document, True, n.tables) for path, n in sorted(self.nodes.items())])

    def root(self, record_check: bytes) -> Root:
        """Return this tree as a root, from which it can be opened without the earlier records.

        `record_check` is the checksum of this version's record. The bytes of the root depend only on the tree, not
        on how it was loaded: a server compares the root that it receives with its own.
        """
        tags = dict(sorted(self.tags.items(), key=lambda item: (item[1], item[0])))
        return Root(self.version, record_check, tags, self.manifest())

    @staticmethod
    def empty() -> Tree:
        """Return the tree before the first commit."""
        return Tree(0, Nodes(), {})

    def differences(self, other: Tree, *, nodes: bool) -> list[str]:
        """Return the tags, and with `nodes` the paths of nodes, that differ in another tree of this version."""
        names = self.tags.keys() | other.tags.keys()
        differing = sorted(f"tag {t!r}" for t in names if self.tags.get(t) != other.tags.get(t))
        if nodes:
            paths = self.nodes.keys() | other.nodes.keys()
            differing += sorted(p for p in paths if not same_node(self.nodes.get(p), other.nodes.get(p)))
        return differing

    @staticmethod
    def from_root(root: Root) -> Tree:
        """Return the tree of a root."""
        return Tree(root.version, Nodes.from_manifest(root.manifest), root.tags)


_NO_NUMBERS = np.empty(0, np.uint64)


class NodeChange(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The changes of a commit to one node: the chunks that it wrote.

    `replaces_node` says that the commit created the node or changed its metadata.
    """

    replaces_node: bool
    numbers: npt.NDArray[np.uint64]


class Overlap(NamedTuple):
    """The overlap of two commits: the paths or tags in conflict, and the chunks by path that both wrote."""

    conflicts: list[str]
    chunks: dict[str, npt.NDArray[np.uint64]]


class Changes(NamedTuple):
    """The changes of a commit that others can conflict with."""

    nodes: Mapping[str, NodeChange]
    deleted: tuple[str, ...] = ()
    replaces: bool = False
    tags: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()

    @staticmethod
    def from_record(record: Record, manifests: Sequence[Manifest]) -> Changes:
        """Return the changes of a committed record."""
        nodes: dict[str, NodeChange] = {}
        for path, _, replaces_node, tables in (node for manifest in manifests for node in manifest.nodes()):
            # a node that is replaced conflicts whatever its chunks are
            numbers = _NO_NUMBERS if replaces_node else numbers_of(tables)
            if path in nodes:  # transactions that share the record wrote different chunks of the array
                replaces_node = replaces_node or nodes[path].replaces_node
                numbers = np.union1d(nodes[path].numbers, numbers)
            nodes[path] = NodeChange(replaces_node, numbers)
        tags = (*record.tags, *record.tagged)
        return Changes(nodes, record.deleted, record.replaces, tags, record.dropped)

    def overlap(self, other: Changes) -> Overlap:
        """Return the overlap of these changes, not yet committed, with those of a newer commit."""
        conflicts = [f"tag {t}" for t in self.tags if t in other.tags or t in other.dropped]
        conflicts += [f"tag {t}" for t in self.dropped if t in other.tags]
        if self.replaces:
            return Overlap(conflicts, {})
        if other.replaces:
            return Overlap([*conflicts, *self.nodes, *self.deleted], {})
        chunks = {}
        conflicts += at_or_below(self.nodes, other.deleted)
        conflicts += at_or_below(other.nodes, self.deleted)
        conflicts += _nested(self.nodes, other.nodes)
        for path in self.nodes.keys() & other.nodes.keys():
            mine, theirs = self.nodes[path], other.nodes[path]
            if mine.replaces_node or theirs.replaces_node:
                conflicts.append(path)
                continue
            both = np.intersect1d(mine.numbers, theirs.numbers)
            if len(both):
                chunks[path] = both
        return Overlap(conflicts, chunks)


def _nested(mine: Mapping[str, NodeChange], theirs: Mapping[str, NodeChange]) -> list[str]:
    """Return the paths at which one side replaced a node below a node that the other side replaced."""
    created = {p for p, c in mine.items() if c.replaces_node}
    others = {p for p, c in theirs.items() if c.replaces_node}
    below = [p for p in created if not others.isdisjoint(parents(p))]
    return below + [p for p in others if not created.isdisjoint(parents(p))]


def tree_of_root(root: Root | None, version: int, stored: StoredRecord | None) -> Tree | None:
    """Return the tree of a root that was written for exactly this record of this version, otherwise None."""
    if root is None or stored is None or (root.version, root.record_check) != (version, stored.check):
        return None
    return Tree.from_root(root)


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
