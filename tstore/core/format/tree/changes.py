"""What a commit changes, and when two commits conflict; pure, no I/O.

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
    set a group                    set it, to any attributes                      Conflict
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
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.arguments import step_number
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import SHORT_COLUMN
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import EXTENDS, REPLACES, Manifest
from tstore.core.format.objects.segments import Segment, SortedRun
from tstore.core.format.objects.tables import Table, numbers_of
from tstore.core.format.paths import at_or_below, parents
from tstore.errors import Corrupt

__all__ = ["NO_NUMBERS", "Changes", "NodeChange", "Overlap", "same_json"]

NO_NUMBERS = np.empty(0, np.uint64)
"""The numbers of no chunks."""


class NodeChange(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The changes of a commit to one node: the chunks that it wrote.

    `numbers` are those of chunks whose references are not in `segments`; both are empty if `replaces_node`, which
    says that the commit created the node or changed its metadata. `has_segments` says that some references are in
    segments, which may be a compaction of older ones. `extends` says that it appended values. `group` is the
    `zarr.json` of a group that it wrote.

    Of a commit to come, `created` says that its base has no such node, and `restated` that its metadata was set to
    what it is in the base. A record does not say this about older commits.
    """

    replaces_node: bool
    numbers: npt.NDArray[np.uint64]
    segments: tuple[SortedRun, ...] = ()
    has_segments: bool = False
    extends: bool = False
    group: bytes | None = None
    created: bool = False
    restated: bool = False

    @staticmethod
    def from_tables(tables: Sequence[Table], *, has_segments: bool = False, extends: bool = False) -> NodeChange:
        """Return the change of a commit that wrote the chunks of these tables."""
        segments = tuple(table for table in tables if isinstance(table, SortedRun))
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

        Equal attributes prove nothing if both changed them: each may have incremented the same value.
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
            parts += [numbers_of([SortedRun([segment], table.source)]) for segment in near]
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
    extended = manifest.extended_paths()
    for at, (path, document, replaces, tables) in enumerate(manifest.nodes()):
        has_segments = bool(manifest.segments_at(at))
        change = NodeChange.from_tables(tables, has_segments=has_segments, extends=path in extended)
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
