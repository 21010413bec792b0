"""The staged changes of a transaction on top of its base: arrays, groups and deletions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.data.writer import WriteJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import Selection
from tstore.core.format.arrays.points import PointSelection
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.segments import SegmentSource
from tstore.core.format.objects.tables import Table, stack
from tstore.core.format.paths import checked_new_path, checked_path, is_at_or_below, parents
from tstore.core.format.tree.changes import NO_NUMBERS, Changes, NodeChange, same_json
from tstore.core.format.tree.node import Node
from tstore.core.format.tree.tree import Tree, group_document
from tstore.core.snapshot import array_node
from tstore.core.transactions.read_set import ReadSet
from tstore.core.transactions.staged_array import StagedArray
from tstore.core.transactions.staged_manifest import any_segments, staged_manifest
from tstore.core.transactions.tag_edits import TagEdits
from tstore.errors import AlreadyExists, InvalidArgument, Misuse, NotFound, bullet_list

__all__ = ["StagedTree"]


class StagedTree:
    """The changes on top of `base`; if `replaces`, they are the whole tree. `origin` names the base in errors.

    If there is a `source`, the tree is a copy of that version, which leaves the head unchanged.
    """

    def __init__(self, base: Tree, origin: str) -> None:
        self.base = base
        self.origin = origin
        self.replaces = False
        self.source = 0
        self.reads = ReadSet()
        self.arrays: dict[str, StagedArray] = {}
        self.deleted: dict[str, None] = {}  # the topmost deleted paths, in order
        self.unplaced: dict[str, bytes] = {}  # by Zarr key, bytes that are not a group, array or chunk
        self.fill_chunks: dict[bytes, ChunkRow] = {}  # replacements of removed chunks: see `_fill_key`
        self._groups: dict[str, bytes] = {}
        # nodes of the base whose metadata was set to the same value, with the documents of groups
        self._restated: dict[str, bytes | None] = {}
        self._base_metas: dict[str, ArrayMeta] = {}  # metadata of arrays looked up in the base
        self.deletion_count = 0
        self._last_deletions: dict[str, int] = {}  # the number of the last deletion at each path
        # maps a path to a staged node at or below it; None until that is needed
        self._occupied: dict[str, str] | None = None

    def create_array(self, path: str, meta: ArrayMeta) -> str:
        """Stage a new array and return its path; raise `AlreadyExists` if the path is taken."""
        path = checked_new_path(path)
        self._check_free(path)
        self._stage(StagedArray(path, meta, replaces_node=True))
        return path

    def create_group(
        self, path: str, attributes: Mapping[str, Any], reserved: Mapping[str, Any] | None = None
    ) -> None:
        """Stage a group with a caller's attributes and, in `reserved`, those of tstore.

        Raise `AlreadyExists` if there is an array at or above its path.
        """
        path = "" if path in ("", "/") else checked_new_path(path)
        if any(self._is_array(p) for p in (path, *parents(path))):
            self.reads.add_metadata((path, *parents(path)))
            raise AlreadyExists(
                f"{self.origin}: there is an array at or above {path!r}, so no group can be created there; choose "
                "another path"
            )
        document = group_document(attributes, reserved)
        former = self._stored_node(path)
        if former is not None and same_json(former.document, document):
            self._restated[path] = former.document
            if self._groups.pop(path, None) is not None:
                self._occupied = None
            return
        self._groups[path] = document
        self._occupy(path)

    def restate(self, path: str) -> None:
        """Record that the metadata of an array was set to the same value, which conflicts with a change of it."""
        self._restated[path] = None

    def replace_all(self, source: int = 0) -> None:
        """Drop everything in the base, for a copy of version `source` if that is not 0."""
        self._groups |= {path: document for path, document in self._restated.items() if document is not None}
        self._restated = {}
        self.replaces, self.source = True, source
        self._count_deletion("")

    def _count_deletion(self, top: str) -> None:
        self.deletion_count += 1
        self._last_deletions[top] = self.deletion_count

    def keep_array(self, path: str, meta: ArrayMeta, tables: tuple[Table, ...]) -> None:
        """Stage an array that consists of existing chunks; `tables` are as those of a `Node`."""
        self._stage(StagedArray(path, meta, replaces_node=True, tables=tables))

    def check_new(self, jobs: Sequence[WriteJob]) -> None:
        """Raise `AlreadyExists` if the path of a job is taken in the base or among the staged arrays."""
        for job in jobs:
            if job.path in self.arrays:
                raise AlreadyExists(f"{self.origin}: {job.path!r} is written twice in one transaction")
            if not self.replaces:
                self._check_free(job.path)

    def add_array(self, job: WriteJob, source: SegmentSource) -> None:
        """Stage the new array that a job has written."""
        self._stage(StagedArray(job.path, job.meta, replaces_node=True)).add_chunks(job, source)

    def delete(self, path: str) -> None:
        """Stage the removal of everything at and below a path; raise `NotFound` if there is nothing."""
        path = checked_path(path)
        if not self.remove(path):
            raise NotFound(f"{self.origin} has nothing at {path!r} to delete")

    def remove(self, path: str) -> bool:
        """Stage the removal of everything at and below a path, "" for all; return whether there was anything."""
        self.reads.add_subtrees([path])
        staged = self._staged_at_or_below(path)
        stored = self._stored_at_or_below(path) is not None
        for p in staged:
            self.arrays.pop(p, None)
            self._groups.pop(p, None)
        if staged:
            self._occupied = None
        if stored:
            self.deleted[path] = None
        self._count_deletion(path)
        if self._restated:
            self._restated = {p: d for p, d in self._restated.items() if not is_at_or_below(p, path)}
        return bool(staged) or stored

    def meta(self, path: str) -> ArrayMeta:
        """Return the metadata of an array as the transaction sees it; raise `NotFound`."""
        staged = self.arrays.get(path)
        if staged is not None:
            return staged.meta
        meta = self._base_metas.get(path)
        if meta is None:
            self.reads.add_metadata([path])
            meta = self._base_metas[path] = self._base_array(path).meta
        if self.replaces or (self.deleted and self._is_deleted(path)):
            raise NotFound(f"{self.origin}: {path!r} was deleted in this transaction")
        return meta

    def check_handle(self, path: str, meta: ArrayMeta, taken: int) -> None:
        """Raise `Misuse` if a handle is of another array, or of former metadata; `NotFound` if it was deleted.

        `taken` is the number of deletions before the handle was taken.
        """
        current = self.meta(path)
        is_same = current is meta or current.document == meta.document
        if not is_same or (self.deletion_count > taken and self.was_deleted(path, taken)):
            raise Misuse(
                f"{self.origin}: {path!r} was resized, or deleted and created again, in this transaction since "
                "this handle or view of it was taken; take another one, from the transaction or from the handle "
                "that was resized"
            )

    def was_deleted(self, path: str, taken: int) -> bool:
        """Return whether the node at a path was deleted after the first `taken` deletions."""
        return any(self._last_deletions.get(p, 0) > taken for p in ("", path, *parents(path)))

    def array_to_change(self, path: str, meta: ArrayMeta) -> StagedArray:
        """Return the staged changes to an array, given its metadata as the transaction sees it."""
        staged = self.arrays.get(path)
        if staged is None:
            staged = self.arrays[path] = StagedArray(path, meta, replaces_node=False)
            if self._occupied is not None:
                self._occupy(path)
        return staged

    def _base_array(self, path: str) -> Node:
        """Return an array of the base; raise `NotFound`, which also names staged arrays, if it has none there."""
        try:
            return array_node(self.base, path, self.origin)
        except NotFound as error:
            if not self.arrays:
                raise
            raise NotFound(f"{error}; this transaction has {', '.join(sorted(self.arrays)[:5])}") from None

    def note_values(self, path: str, selection: Selection | PointSelection) -> None:
        """Record that a selection of an array was read, as far as the array has chunks of the base."""
        base = self._stored_node(path)
        if base is not None and base.is_array:
            self.reads.add_values(path, self.meta(path), selection, base.meta.counts)

    def note_chunks(self, path: str, numbers: Sequence[int]) -> None:
        """Record that chunks of an array were looked up, as far as the array has chunks of the base."""
        base = self._stored_node(path)
        if base is not None and base.is_array:
            self.reads.add_chunks(path, np.array(numbers, np.int64), self.meta(path).counts, base.meta.counts)

    def note_chunk_names(self, path: str) -> None:
        """Record a query for the chunks of an array that exist."""
        if self._stored_node(path) is not None:
            self.reads.add_chunk_names(path)

    def base_chunks(self, path: str) -> Node:
        """Return the array in the base, without chunks if this transaction deleted, replaced or resized it."""
        staged = self.arrays.get(path)
        hidden = self.replaces or self._is_deleted(path) or (staged is not None and staged.replaces_node)
        node = None if hidden else self.base.nodes.get(path)
        return Node(path, Document(b""), ()) if node is None else node

    def chunks(self, path: str) -> Node:
        """Return the array with its chunks as the transaction sees them."""
        staged, base = self.arrays.get(path), self.base_chunks(path)
        if staged is None:
            return base
        tables = stack(base.tables, staged.staged_chunks())
        return Node(path, Document(staged.meta.document), tables)

    def node(self, path: str) -> Node | None:
        """Return the group or array at a path as the transaction sees it, None if there is none."""
        self.reads.add_metadata([path])
        return self._node(path)

    def first_array(self, paths: Sequence[str]) -> Node | None:
        """Return the array at the first of these paths that has one, or None."""
        nodes = map(self._node, paths)
        array = next((node for node in nodes if node is not None and node.is_array), None)
        if array is None:
            self.reads.add_kinds(paths)
        else:  # none of the others is an array
            self.reads.add_metadata([array.path])
        return array

    def has_nodes(self, path: str) -> bool:
        """Return whether there is a group or an array at or below a path, as the transaction sees it."""
        self.reads.add_presence(path)
        return bool(self._staged_at_or_below(path)) or self._stored_at_or_below(path) is not None

    def nodes_starting(self, prefix: str) -> list[Node]:
        """Return the groups and arrays whose paths begin with a prefix, sorted by path.

        Only their paths count as read.
        """
        self.reads.add_prefix(prefix)
        stored = [] if self.replaces else self.base.nodes.starting_with(prefix)
        staged = [p for p in (*self.arrays, *self._groups) if p.startswith(prefix)]
        nodes = map(self._node, sorted({*stored, *staged}))
        return [node for node in nodes if node is not None]

    def _node(self, path: str) -> Node | None:
        if path in self.arrays:
            return self.chunks(path)
        if path in self._groups:
            return Node(path, Document(self._groups[path]), ())
        return self._stored_node(path)

    def _stored_node(self, path: str) -> Node | None:
        """Return the node of the base at a path, unless this transaction deleted it."""
        return None if self.replaces or self._is_deleted(path) else self.base.nodes.get(path)

    def paths(self) -> list[str]:
        """Return the paths of all arrays as the transaction sees them, sorted."""
        self.reads.add_all_arrays()
        stored = [] if self.replaces else self.base.nodes.array_paths()
        return sorted({p for p in stored if not self._is_deleted(p)} | self.arrays.keys())

    def check_placed(self) -> None:
        """Raise `InvalidArgument` if there are bytes by Zarr key that a version can't have."""
        if self.unplaced:
            raise InvalidArgument(
                f"{self.origin}: these keys of Zarr can't be committed, since none is the metadata of a group or "
                "array of Zarr v3, or a chunk in the grid of one; delete them, or store their values as arrays or "
                f"attributes:{bullet_list([_shown(key) for key in sorted(self.unplaced)])}"
            )

    @property
    def reads_segments(self) -> bool:
        """Whether `manifest` may read segments of staged arrays, and so block."""
        return any_segments(self.arrays)

    @property
    def deleted_paths(self) -> tuple[str, ...]:
        """The deleted paths as listed in a record: for the root, all top-level nodes."""
        if "" not in self.deleted:
            return tuple(self.deleted)
        tops = (path.partition("/")[0] for path in self.base.nodes.at_or_below(""))
        return tuple(sorted({top for top in tops if top}))

    @property
    def _written_groups(self) -> dict[str, bytes]:
        """The groups that the commit writes; a root that was deleted becomes one without attributes."""
        cleared = "" in self.deleted and "" in self.base.nodes
        return {"": group_document({})} | self._groups if cleared else self._groups

    def manifest(self) -> Manifest:
        """Return the staged arrays and groups as a manifest, sorted by path."""
        return staged_manifest(self.arrays, self._written_groups)

    def changes(self, tags: TagEdits) -> Changes:
        """Return the changes that a concurrent commit can conflict with."""
        if self.source:
            return Changes({}, tags=tags.assigned, dropped=tags.dropped)
        nodes: dict[str, NodeChange] = {}
        for path, document in self._written_groups.items():
            created = self._stored_node(path) is None
            nodes[path] = NodeChange(True, NO_NUMBERS, group=document, created=created)
        for path, staged in self.arrays.items():
            nodes[path] = staged.change
        for path, restated in self._restated.items():
            change = nodes.get(path) or NodeChange(False, NO_NUMBERS, group=restated)
            nodes[path] = msgspec.structs.replace(change, restated=True)
        return Changes(nodes, self.deleted_paths, self.replaces, tags.assigned, tags.dropped)

    def drop_compactions(self) -> bool:
        """Drop the compactions, which only save time; return whether there were any."""
        compacting = [array for array in self.arrays.values() if array.compaction is not None]
        for array in compacting:
            array.compaction = None
        return bool(compacting)

    def split_overlap(
        self, chunks: Mapping[str, npt.NDArray[np.uint64]]
    ) -> tuple[dict[str, list[int]], dict[str, npt.NDArray[np.uint64]]]:
        """Split the chunks (by path) that both this transaction and a newer version wrote.

        Return those to which patches can be applied again, and those that were written whole, so that one of the
        two writes would be lost.
        """
        patched: dict[str, list[int]] = {}
        whole: dict[str, npt.NDArray[np.uint64]] = {}
        for path, numbers in chunks.items():
            array = self.arrays[path]
            source = array.whole_chunks
            again = [n for n in numbers.tolist() if n in array.patches and source.row(n) is None]
            if again:
                patched[path] = again
            if len(again) < len(numbers):
                whole[path] = np.setdiff1d(numbers, np.array(again, np.uint64))
        return patched, whole

    def _stored_at_or_below(self, path: str) -> str | None:
        """Return the path of a node of the base at or below a path, unless this transaction deleted it."""
        if self.replaces:
            return None
        return next((p for p in self.base.nodes.at_or_below(path) if not self._is_deleted(p)), None)

    def _is_deleted(self, path: str) -> bool:
        return bool(self.deleted) and not self.deleted.keys().isdisjoint((path, "", *parents(path)))

    def _is_array(self, path: str) -> bool:
        if path in self.arrays or self.replaces or self._is_deleted(path):
            return path in self.arrays
        node = self.base.nodes.get(path)
        return node is not None and node.is_array

    def _stage(self, array: StagedArray) -> StagedArray:
        self.arrays[array.path] = array
        self._occupy(array.path)
        return array

    def _staged_at_or_below(self, path: str) -> list[str]:
        """Return the paths of staged nodes at and below a path."""
        if path and path not in self._known_occupied():
            return []
        return [p for p in (*self.arrays, *self._groups) if is_at_or_below(p, path)]

    def _known_occupied(self) -> dict[str, str]:
        """Return a staged node at or below each path that has one, except for the root."""
        if self._occupied is None:
            self._occupied = {}
            for path in (*self.arrays, *self._groups):
                self._occupy(path)
        return self._occupied

    def _occupy(self, path: str) -> None:
        """Record a node at a path, which occupies that path and all above it."""
        if self._occupied is not None and path:
            self._occupied[path] = path
            for above in parents(path):
                self._occupied.setdefault(above, path)

    def _check_free(self, path: str) -> None:
        below = self._known_occupied().get(path) or self._stored_at_or_below(path)
        taken = below or next((p for p in parents(path) if self._is_array(p)), None)
        if taken is not None:
            self.reads.add_subtrees([path])
            self.reads.add_metadata(parents(path))
            raise AlreadyExists(
                f"{self.origin}: no array can be created at {path!r}, since {taken!r} exists; delete that first, "
                "or choose another path"
            )


def _shown(key: str) -> str:
    """Return a key as a short line of a message."""
    text = key.encode("unicode_escape").decode()
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


_MAX_SHOWN = 100
