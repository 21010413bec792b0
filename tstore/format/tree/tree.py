"""The tree of groups and arrays as of one version, and what a commit changes in it; pure, no I/O.

The outcomes for a transaction when another commit was added after its base:

    the transaction …              and the newer commit …                         outcome
    wrote a part of a chunk        wrote that chunk, in part or whole             re-applied over it; both remain
    wrote a part, as many hosts    wrote that chunk, in part or whole             Conflict
    wrote a whole chunk            wrote that chunk, in part or whole             Conflict
    wrote a whole chunk            wrote the bytes again that it had              both remain
    wrote chunks                   wrote other chunks                             both remain
    wrote or resized an array      resized, deleted or created it again           Conflict
    resized an array               wrote any chunk of it                          Conflict
    appended to an array           appended to it along the same axis             both remain, one after the other
    appended to an array           appended to it along another axis              Conflict
    appended to an array           wrote any chunk of it                          both remain
    appended to an array           resized, deleted or created it again           Conflict
    wrote chunks                   appended to it along the first axis            as if that wrote the new chunks
    wrote chunks                   appended to it along another axis              Conflict
    wrote chunks, as many hosts    appended to it                                 Conflict
    resized an array               appended to it                                 Conflict
    deleted a node                 wrote, resized or created at or below it       Conflict
    deleted a node                 deleted it too, or one above or below it       both remain
    created a node                 created another one there, or an array above   Conflict
    created an array               created a node below it                        Conflict
    created a node                 deleted a node above it                        Conflict
    created a node                 created one elsewhere, even in a common group  both remain
    created a group                created it with the same attributes            both remain
    created or set a group         created a node below it                        both remain
    set a group                    set it, to whatever attributes                 Conflict
    set metadata to what it was    changed the metadata of that node              Conflict
    set metadata to what it was    set it to what it was too, or wrote chunks     both remain
    changed metadata               set it to what it was                          both remain
    set or moved a tag             set, moved or dropped the same tag             Conflict
    dropped a tag                  set or moved the same tag                      Conflict
    dropped a tag                  dropped it too, or a gc did                    both remain
    dropped a tag (serializable)   dropped it too, or a gc did                    Conflict
    set the tag of any step        dropped the tag of any step, as rollback does  Conflict
    dropped the tag of any step    set the tag of any step                        Conflict
    touched any node               replaced the whole tree (a checkpoint)         Conflict
    replaced the whole tree        changed any node                               the change is replaced too
    changed any node               is a copy                                      both remain
    is a copy                      changed any node                               both remain
    read (serializable)            changed what was read                          Conflict (`read_set`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt, InvalidArgument
from tstore.format.arguments import checked_attributes, step_number
from tstore.format.bounds import MAX_NAMES, json_excess_message
from tstore.format.frame import NO_RECORD
from tstore.format.layout import ROOT_EVERY
from tstore.format.objects.chunk_refs import ChunkTable
from tstore.format.objects.columns import SHORT_COLUMN
from tstore.format.objects.documents import Document
from tstore.format.objects.layers import Table, numbers_of
from tstore.format.objects.object_ref import ObjectRef
from tstore.format.objects.records import Record, Root
from tstore.format.objects.references import EXTENDS, REPLACES, Manifest
from tstore.format.objects.roots import StoredRoot, stored_root
from tstore.format.objects.segments import Segment, SegmentedTable
from tstore.format.paths import at_or_below, parents
from tstore.format.tree.node import differs
from tstore.format.tree.nodes import Nodes
from tstore.format.tree.stored_nodes import NO_PAGES, InMemory, Paged, PageSource, StoredNodes

__all__ = [
    "NO_NUMBERS",
    "RESERVED_ATTRIBUTE",
    "Changes",
    "NodeChange",
    "Overlap",
    "Tree",
    "group_document",
    "same_json",
]

RESERVED_ATTRIBUTE = "tstore"
"""The attribute of the root group in which tstore stores its own metadata of a version."""


@dataclass(eq=False, repr=False)
class Tree:
    """All nodes by path, and all tags, as of `version`; immutable.

    The last `copies` versions up to this one are copies; the nodes are those of the head before them.
    """

    version: int
    nodes: Nodes
    tags: Mapping[str, int]
    copies: int = 0

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
            tags = dict(tags)  # fast, since every commit that sets a tag copies all tags
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
            nodes = Nodes() if record.replaces else self.nodes
            if record.deleted and not record.replaces:
                nodes = nodes.without(record.deleted)
            nodes = nodes.after(manifests, record.paged_manifest)
        copies = self.copies + 1 if record.source else 0
        return Tree(version, nodes if version % ROOT_EVERY else nodes.sealed(version), tags, copies)

    def after_writes(self, version: int, manifests: Sequence[Manifest]) -> Tree:
        """Return this tree after the commits up to `version`, which only wrote chunks; that one has no root."""
        if version == self.version:
            return self
        return Tree(version, self.nodes.after(manifests) if manifests else self.nodes, self.tags)

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
    def empty() -> Tree:
        """Return the tree before the first commit."""
        return Tree(0, Nodes(), {})

    def differences(self, other: Tree, nodes: bool) -> list[str]:
        """Return what differs in another tree of this version: tags, and with `nodes` the paths of nodes."""
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


NO_NUMBERS = np.empty(0, np.uint64)
"""The numbers of no chunks."""


class NodeChange(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The changes of a commit to one node: the chunks that it wrote.

    `numbers` are those of chunks whose references are not in `segments`; both are empty if `replaces_node`, which
    says that the commit created the node or changed its metadata. `has_segments` says that some references are in
    segments, which may be a merge of older ones. `extends` says that it appended values. `group` is the
    `zarr.json` of a group that it wrote.

    Of a commit to come, `created` says that its base has no such node, and `restated` that its metadata was set to
    what it is in the base. A record does not tell this of older commits.
    """

    replaces_node: bool
    numbers: npt.NDArray[np.uint64]
    segments: tuple[SegmentedTable, ...] = ()
    has_segments: bool = False
    extends: bool = False
    group: bytes | None = None
    created: bool = False
    restated: bool = False

    @staticmethod
    def from_tables(tables: Sequence[Table], *, has_segments: bool = False, extends: bool = False) -> NodeChange:
        """Return the change of a commit that wrote the chunks of these tables."""
        segments = tuple(table for table in tables if isinstance(table, SegmentedTable))
        numbers = numbers_of([table for table in tables if isinstance(table, ChunkTable)])
        return NodeChange(False, numbers, segments, has_segments or bool(segments), extends)

    def with_others(self, other: NodeChange) -> NodeChange:
        """Return these changes and those of another transaction that shares the record."""
        return NodeChange(
            self.replaces_node or other.replaces_node,
            np.union1d(self.numbers, other.numbers),  # each wrote different chunks
            (*self.segments, *other.segments),
            self.has_segments or other.has_segments,
            self.extends or other.extends,
            self.group,  # both wrote the same attributes
        )

    def permits(self, newer: NodeChange) -> bool:
        """Return whether a newer commit wrote the attributes of a group that these changes write too.

        That can't be said of a group that both changed: one may have counted up what the other has counted up.
        """
        if not (self.created or self.restated) or self.group is None or newer.group is None:
            return False
        return same_json(self.group, newer.group)

    def common(self, other: NodeChange) -> npt.NDArray[np.uint64]:
        """Return the numbers of the chunks that both wrote, sorted; reads segments whose ranges meet."""
        if self.segments or other.segments:
            return np.intersect1d(self._numbers_near(other), other._numbers_near(self))
        if len(self.numbers) + len(other.numbers) > SHORT_COLUMN:
            return np.intersect1d(self.numbers, other.numbers)
        both = set(self.numbers.tolist()).intersection(other.numbers.tolist())
        return np.array(sorted(both), np.uint64) if both else NO_NUMBERS

    def _numbers_near(self, other: NodeChange) -> npt.NDArray[np.uint64]:
        """Return `numbers`, and those in segments with whose ranges the other change has chunks or segments."""
        parts = [self.numbers]
        for table in self.segments:
            near = [segment for segment in table.segments if other._meets(segment)]
            parts += [numbers_of([SegmentedTable([segment], table.source)]) for segment in near]
        return np.concatenate(parts)

    def _meets(self, segment: Segment) -> bool:
        """Return whether a chunk, or the range of a segment, is in the range of another segment."""
        first, last = np.uint64(segment.first), np.uint64(segment.last)
        ranges = [(self.numbers, self.numbers), *((table.firsts, table.lasts) for table in self.segments)]
        ends = ((np.searchsorted(lasts, first), firsts) for firsts, lasts in ranges)
        return any(at < len(firsts) and firsts[at] <= last for at, firsts in ends)


def same_json(mine: bytes, other: bytes) -> bool:
    """Return whether two documents are equal, except for the order of keys."""
    if mine == other:
        return True
    try:
        one, another = (msgspec.json.encode(msgspec.json.decode(d), order="sorted") for d in (mine, other))
    except (msgspec.DecodeError, RecursionError):
        return False
    return one == another


def _group(document: Document) -> bytes | None:
    """Return the `zarr.json` of a group, or None for that of an array."""
    try:
        return None if document.is_array else document.data
    except Corrupt:
        return None  # readers of the node raise the error


def _node_changes(manifest: Manifest) -> Iterator[tuple[str, NodeChange]]:
    """Yield the path of each node and its changes."""
    # a replaced node conflicts regardless of its chunks
    if not manifest.segments:
        for at, (path, flags, numbers) in enumerate(manifest.numbers()):
            extends = bool(flags & EXTENDS)
            if flags & REPLACES:
                yield path, NodeChange(True, NO_NUMBERS, extends=extends, group=_group(manifest.node(at)[0]))
            else:
                yield path, NodeChange(False, numbers, extends=extends)
        return
    merged, extended = manifest.merges_by_path(), manifest.extended_paths()
    for path, document, replaces, tables in manifest.nodes():
        change = NodeChange.from_tables(tables, has_segments=path in merged, extends=path in extended)
        if replaces:
            change = NodeChange(True, NO_NUMBERS, (), change.has_segments, change.extends, _group(document))
        yield path, change


class Overlap(NamedTuple):
    """The overlap of two commits: the paths or tags in conflict, and the chunks by path that both wrote.

    `extended` are the arrays that both changed and to which at least one of them appended: the changes to these
    must be moved to the newer version.
    """

    conflicts: list[str]
    chunks: dict[str, npt.NDArray[np.uint64]]
    extended: list[str]


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
        for manifest in manifests:
            for path, change in _node_changes(manifest):
                nodes[path] = nodes[path].with_others(change) if path in nodes else change
        tags = (*record.tags, *record.tagged)
        return Changes(nodes, record.deleted, record.replaces, tags, record.dropped)

    def few_chunks(self) -> frozenset[tuple[str, int]] | None:
        """Return the chunks written, as pairs of path and number; None if there are many or other changes."""
        if self.deleted or self.replaces or self.tags or self.dropped:
            return None
        nodes = self.nodes.items()
        if any(n.replaces_node or n.extends or n.segments or len(n.numbers) > SHORT_COLUMN for _, n in nodes):
            return None
        return frozenset([(path, number) for path, n in nodes for number in n.numbers.tolist()])

    @property
    def in_segments(self) -> bool:
        """Whether `overlap` may read segments, and so block."""
        return any(node.segments for node in self.nodes.values())

    def overlap(self, other: Changes) -> Overlap:
        """Return the overlap of these changes, not yet committed, with those of a newer commit."""
        conflicts = []
        if self.tags or self.dropped:
            conflicts += [f"tag {t}" for t in self.tags if t in other.tags or t in other.dropped]
            conflicts += [f"tag {t}" for t in self.dropped if t in other.tags]
            conflicts = conflicts or self._step_conflicts(other)
        if self.replaces:
            return Overlap(conflicts, {}, [])
        if other.replaces:
            return Overlap([*conflicts, *self.nodes, *self.deleted], {}, [])
        chunks, extended = {}, []
        if other.deleted:
            conflicts += at_or_below(self.nodes, other.deleted)
        if self.deleted:
            conflicts += at_or_below(other.nodes, self.deleted)
        conflicts += _nested(self.nodes, other.nodes)
        for path in self.nodes.keys() & other.nodes.keys():
            mine, theirs = self.nodes[path], other.nodes[path]
            if mine.permits(theirs):
                continue
            if mine.restated and theirs.extends:
                conflicts.append(path)
                continue
            if mine.extends and (theirs.extends or not theirs.replaces_node):
                extended.append(path)
                continue
            if mine.replaces_node or theirs.replaces_node:
                conflicts.append(path)
                continue
            if theirs.extends:
                extended.append(path)
            both = mine.common(theirs)
            if len(both):
                chunks[path] = both
        return Overlap(conflicts, chunks, extended)

    def _step_conflicts(self, other: Changes) -> list[str]:
        """Return the tags of steps that one sets, if the other drops any, because that may be a rollback.

        A save that wakes up behind a rollback must not add the step of the abandoned run, and a rollback must not
        leave a later step that was saved meanwhile.
        """
        tags = [
            t for one, two in ((self, other), (other, self)) if any(map(_is_step, two.dropped)) for t in one.tags
        ]
        return [f"tag {t}" for t in tags if _is_step(t)]


def _is_step(tag: str) -> bool:
    return step_number(tag) is not None


def _nested(mine: Mapping[str, NodeChange], theirs: Mapping[str, NodeChange]) -> list[str]:
    """Return the paths at which one side replaced a node below an array that the other side replaced."""
    created = [p for p, c in mine.items() if c.replaces_node]
    if not created:
        return []
    others = [p for p, c in theirs.items() if c.replaces_node]
    arrays = {p for p in created if mine[p].group is None}
    other_arrays = {p for p in others if theirs[p].group is None}
    below = [p for p in created if not other_arrays.isdisjoint(parents(p))]
    return below + [p for p in others if not arrays.isdisjoint(parents(p))]


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
