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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat
from tstore.format.arguments import checked_attributes, checked_text, quote
from tstore.format.array_metadata import ArrayMeta
from tstore.format.bounds import MAX_NAMES, json_excess_message, path_excess_message
from tstore.format.chunk_refs import ChunkRow, ChunkTable
from tstore.format.documents import Document
from tstore.format.records import Record, Root, StoredRecord
from tstore.format.references import Manifest

__all__ = [
    "RESERVED_ATTRIBUTE",
    "Changes",
    "Node",
    "NodeChange",
    "Overlap",
    "Tree",
    "add_table",
    "checked_new_path",
    "checked_path",
    "depth_first_order",
    "group_document",
    "is_at_or_below",
    "parents",
    "same_metadata",
    "tree_of_root",
    "without_deleted",
]

RESERVED_ATTRIBUTE = "tstore"
"""The attribute of the root group in which tstore stores its own metadata of a version."""

_MERGE_COUNT = 16
"""The number of tables of about the same size that are merged into one."""


class Node(msgspec.Struct, eq=False, gc=False):
    """A group or an array of a tree; rows of later chunk tables replace those of earlier ones."""

    path: str
    metadata: Document
    tables: tuple[ChunkTable, ...]
    _chunks: ChunkTable | None = None

    @property
    def document(self) -> bytes:
        """The `zarr.json` of the node."""
        return self.metadata.data

    @property
    def is_array(self) -> bool:
        """Whether the node is an array, not a group."""
        try:
            return self.metadata.is_array
        except Corrupt as error:
            raise Corrupt(f"{self.path}: {error}") from error

    @property
    def meta(self) -> ArrayMeta:
        """The metadata of an array."""
        try:
            return self.metadata.meta
        except (Corrupt, UnsupportedFormat) as error:
            raise type(error)(f"{self.path}: {error}") from error

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the group or array."""
        try:
            return self.metadata.attributes
        except Corrupt as error:
            raise Corrupt(f"{self.path or 'the root group'}: {error}") from error

    def row(self, number: int) -> ChunkRow | None:
        """Return the reference to a chunk of the array, or None if it was never written."""
        return (self.tables[0] if len(self.tables) == 1 else self.chunks).row(number)

    def select(self, numbers: npt.NDArray[np.integer[Any]] | range) -> ChunkTable:
        """Return the references to these chunks, in their order, without those that were never written."""
        return (self.tables[0] if len(self.tables) == 1 else self.chunks).select(numbers)

    @property
    def chunks(self) -> ChunkTable:
        """The references to all chunks of the array, sorted by number."""
        if self._chunks is None:
            self._chunks = ChunkTable.overlay(self.tables)
        return self._chunks


@dataclass(eq=False, repr=False)
class Tree:
    """All nodes by path, and all tags, as of `version`; immutable."""

    version: int
    nodes: Mapping[str, Node]
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
        nodes = {} if record.replaces else dict(without_deleted(self.nodes, record.deleted))
        created: set[str] = set()
        for manifest in manifests:
            for path, metadata, replaces_node, table in manifest.nodes():
                former = nodes.get(path)
                if former is None or (replaces_node and path not in created):
                    nodes[path] = Node(path, metadata, (table,))
                    created.add(path)
                else:
                    nodes[path] = Node(path, metadata, add_table(former.tables, table))
        return Tree(version, nodes, tags)

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
        return Tree(0, {}, {})

    def differences(self, other: Tree, *, nodes: bool) -> list[str]:
        """Return the tags, and with `nodes` the paths of nodes, that differ in another tree of this version."""
        names = self.tags.keys() | other.tags.keys()
        differing = sorted(f"tag {t!r}" for t in names if self.tags.get(t) != other.tags.get(t))
        if nodes:
            paths = self.nodes.keys() | other.nodes.keys()
            differing += sorted(p for p in paths if not _same_node(self.nodes.get(p), other.nodes.get(p)))
        return differing

    @staticmethod
    def from_root(root: Root) -> Tree:
        """Return the tree of a root."""
        nodes = {path: Node(path, metadata, (table,)) for path, metadata, _, table in root.manifest.nodes()}
        return Tree(root.version, nodes, root.tags)


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
        for path, _, replaces_node, table in (node for manifest in manifests for node in manifest.nodes()):
            numbers = table.number
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
        conflicts += _at_or_below(self.nodes, other.deleted)
        conflicts += _at_or_below(other.nodes, self.deleted)
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


def same_metadata(mine: Node | None, other: Node | None) -> bool:
    """Return whether two nodes exist and have the same metadata, or neither exists."""
    if mine is None or other is None:
        return mine is other
    return mine.metadata.equals(other.metadata)


def _same_node(mine: Node | None, other: Node | None) -> bool:
    """Return whether two nodes have the same metadata and the same references to chunks."""
    if mine is None or other is None:
        return False
    return mine.metadata.equals(other.metadata) and mine.chunks.equals(other.chunks)


def _nested(mine: Mapping[str, NodeChange], theirs: Mapping[str, NodeChange]) -> list[str]:
    """Return the paths at which one side replaced a node below a node that the other side replaced."""
    created = {p for p, c in mine.items() if c.replaces_node}
    others = {p for p, c in theirs.items() if c.replaces_node}
    below = [p for p in created if not others.isdisjoint(parents(p))]
    return below + [p for p in others if not created.isdisjoint(parents(p))]


def depth_first_order(paths: Iterable[str]) -> list[str]:
    """Return paths sorted so that each is directly followed by the paths below it, however deep."""
    return sorted(paths, key=lambda path: path.replace("/", "\0"))


def parents(path: str) -> Iterable[str]:
    """Yield the paths above a path, the nearest first, without the root."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def is_at_or_below(path: str, top: str) -> bool:
    """Return whether a path is `top` or below it; every path is below the root, ""."""
    return path == top or not top or path.startswith(top + "/")


def without_deleted(nodes: Mapping[str, Node], deleted: Iterable[str]) -> Mapping[str, Node]:
    """Return the nodes that are neither at nor below a deleted path."""
    removed = set(_at_or_below(nodes, deleted))
    return {p: n for p, n in nodes.items() if p not in removed} if removed else nodes


def _at_or_below(paths: Collection[str], deleted: Iterable[str]) -> list[str]:
    """Return the paths that are at or below a deleted path, in their order."""
    tops = frozenset(deleted)
    if not tops or "" in tops:
        return list(paths) if tops else []
    removed, top = set(), "/"
    for path in depth_first_order(tops.union(paths)):
        if not path.startswith(top):
            if path not in tops:
                continue
            top = path + "/"
        removed.add(path)
    return [p for p in paths if p in removed]


def tree_of_root(root: Root | None, version: int, stored: StoredRecord | None) -> Tree | None:
    """Return the tree of a root that was written for exactly this record of this version, otherwise None."""
    if root is None or stored is None or (root.version, root.record_check) != (version, stored.check):
        return None
    return Tree.from_root(root)


def add_table(tables: tuple[ChunkTable, ...], newest: ChunkTable) -> tuple[ChunkTable, ...]:
    """Return the tables with a newer one after them, merging many small ones at the end into one.

    The level of a table is its length as a power of sixteen. Sixteen or more tables at the end are merged if none
    has a higher level than the last. So each row is copied only a few times, however many commits follow, and
    about fifteen tables remain for each level.
    """
    tables = (*tables, newest)
    while len(tables) >= _MERGE_COUNT:
        level = _level(tables[-1])
        first = len(tables) - 1
        while first and _level(tables[first - 1]) <= level:
            first -= 1
        if len(tables) - first < _MERGE_COUNT:
            break
        tables = (*tables[:first], ChunkTable.overlay(tables[first:]).compact())
    return tables


def _level(table: ChunkTable) -> int:
    """Return the exponent of the lowest power of sixteen that exceeds the number of rows."""
    return -(-len(table).bit_length() // 4)


def checked_path(path: str) -> str:
    """Return the path of a node without outer slashes; raise `InvalidArgument` if it is not a path."""
    stripped = checked_text("path", path).strip("/")
    if any(part in ("", ".", "..", "zarr.json") for part in stripped.split("/")) or min(stripped) < " ":
        raise InvalidArgument(
            f"{path!r} is not the path of a node: expected names joined by '/', without control characters, none "
            "of them '', '.', '..' or 'zarr.json'"
        )
    return stripped


def checked_new_path(path: str) -> str:
    """Return the path of a new node as `checked_path` does; refuse a path that is too long or too deep as well."""
    checked = checked_path(path)
    if excess := path_excess_message(checked):
        raise InvalidArgument(f"the path {quote(checked)} has {excess}; choose a shorter one")
    return checked


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
