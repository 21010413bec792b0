"""A group or array of a tree, and the lookup of its chunks; pure, no I/O.

The chunks of an array that gets another shape keep their place in the grid. If only the first axis changes, chunks
keep their numbers, so tables with segments stay as they are. Otherwise the references are restated; so they are if
the segments are in many sorted runs, all of which a lookup would have to ask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import renumbered
from tstore.core.format.objects import compactions
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.segments import Segment, SegmentSource, SortedRun
from tstore.core.format.objects.tables import (
    Table,
    between,
    last_number,
    numbers_of,
    overlay,
    segment_ranges,
    segments_first,
    segments_of,
    sorted_runs,
    totals,
)
from tstore.errors import Corrupt, NotFound, UnsupportedFormat

__all__ = [
    "Node",
    "check_in_grid",
    "chunks_at_edge",
    "differs",
    "follows",
    "is_array",
    "resized",
    "same_metadata",
    "shrinking_axes",
]


class Node(msgspec.Struct, eq=False, gc=False):
    """A group or an array of a tree; rows of later chunk tables replace those of earlier ones."""

    path: str
    metadata: Document
    tables: tuple[Table, ...]
    _chunks: ChunkTable | None = None

    @property
    def document(self) -> bytes:
        """The `zarr.json` of the node."""
        return self.metadata.data

    @property
    def is_array(self) -> bool:
        """Whether the node is an array, not a group."""
        return is_array(self.path, self.metadata)

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

    @property
    def reads_segments(self) -> bool:
        """Whether lookups may read segments from storage, and so block."""
        if len(self.tables) == 1:
            return isinstance(self.tables[0], SortedRun)
        return any(isinstance(table, SortedRun) for table in self.tables)

    def row(self, number: int) -> ChunkRow | None:
        """Return the reference to a chunk of the array, or None if it was never written."""
        if len(self.tables) == 1:
            return self.tables[0].row(number)
        if not self.reads_segments:
            return self.chunks.row(number)
        return next((row for table in reversed(self.tables) if (row := table.row(number)) is not None), None)

    def select(self, numbers: npt.NDArray[np.integer[Any]] | range) -> ChunkTable:
        """Return the references to these chunks, in their order, without those that were never written."""
        if len(self.tables) == 1:
            return self.tables[0].select(numbers)
        if not self.reads_segments:
            return self.chunks.select(numbers)
        return ChunkTable.overlay([table.select(numbers) for table in self.tables]).select(numbers)

    @property
    def chunks(self) -> ChunkTable:
        """The references to all chunks of the array, sorted by number; reads all segments."""
        if self._chunks is None:
            chunks = overlay(self.tables)
            if self.reads_segments:
                return chunks  # too long to cache
            self._chunks = chunks
        return self._chunks

    def parts(self) -> Iterator[ChunkTable]:
        """Yield the references to all chunks, by ascending ranges of numbers; few segments are in memory."""
        for first, last in segment_ranges(self.tables):
            yield ChunkTable.overlay([between(table, first, last) for table in self.tables])

    @property
    def chunks_in_grid(self) -> ChunkTable:
        """The same as `chunks`; raises `Corrupt` if one is outside of the array's grid."""
        chunks = self.chunks
        check_in_grid(self.path, self.meta, last_number([chunks]))
        return chunks

    def numbers(self) -> npt.NDArray[np.int64]:
        """Return the numbers of all chunks, ascending; may read segments. Raise what `chunks_in_grid` raises."""
        check_in_grid(self.path, self.meta, last_number(self.tables))
        return numbers_of(self.tables).astype(np.int64)

    @property
    def packs(self) -> set[str]:
        """The packs to which the references refer; those of segments include packs of replaced chunks."""
        packs: set[str] = set()
        for table in segments_first(self.tables) if self.reads_segments else (self.chunks,):
            if isinstance(table, SortedRun):
                packs |= table.packs
            else:
                packs.update(p for at in np.unique(table.pack).tolist() if isinstance(p := table.packs[at], str))
        return packs

    @property
    def chunk_count(self) -> int:
        """The number of chunks that were written."""
        return len(self.tables[0]) if len(self.tables) == 1 else self._totals[0]

    @property
    def stored_bytes(self) -> int:
        """The encoded bytes of all chunks."""
        return self.tables[0].stored_bytes if len(self.tables) == 1 else self._totals[1]

    @property
    def _totals(self) -> tuple[int, int]:
        """The number and the encoded bytes of all chunks; reads only segments in the range of other tables."""
        if self.reads_segments:
            return totals(self.tables)
        return len(self.chunks), int(self.chunks.length.sum())


def check_in_grid(path: str, meta: ArrayMeta, last: int) -> None:
    """Raise `Corrupt` if the highest chunk number is outside of the grid; no transaction writes such a chunk.

    Reads and writes of other chunks do not notice it, so what renumbers or names all chunks checks them.
    """
    if last >= meta.chunk_count:
        raise Corrupt(
            f"{path} has a chunk number {last} outside of its grid of {meta.chunk_count} chunks; read an older "
            "version, or write the array again"
        )


def is_array(path: str, document: Document) -> bool:
    """Return whether a document is that of an array; raise `Corrupt`, naming the path, if it does not parse."""
    try:
        return document.is_array
    except Corrupt as error:
        raise Corrupt(f"{path or 'the root group'}: {error}") from error


def follows(before: Document | None, after: Document, appended: Sequence[Table] | None) -> bool:
    """Return whether a node can have been written with the metadata `after` over one with `before`.

    `appended` are the tables of a commit that appended values: then the first axis may be longer, and the first
    chunk that has some of its new part must be in one of the tables.
    """
    if before is None or appended is None:
        return before is not None and before.equals(after)
    if not (before.is_array and after.is_array):
        return False
    former, meta = ArrayMeta.parse(before.data), ArrayMeta.parse(after.data)
    if len(meta.shape) != len(former.shape) or not meta.shape or meta.shape[0] < former.shape[0]:
        return False
    if former.with_shape((meta.shape[0], *former.shape[1:])).document != after.data:
        return False
    if meta.shape[0] == former.shape[0] or 0 in meta.shape:
        return True
    row = former.shape[0] // meta.chunks[0]
    width = math.prod(meta.counts[1:])
    return any(_has_between(table, row * width, (row + 1) * width - 1) for table in appended)


def _has_between(table: Table, first: int, last: int) -> bool:
    """Return whether a table has a chunk, or a segment that may have one, with a number in a range."""
    if isinstance(table, SortedRun):
        return any(segment.first <= last and segment.last >= first for segment in table.segments)
    at = int(np.searchsorted(table.number, np.uint64(first)))
    return at < len(table) and int(table.number[at]) <= last


def same_metadata(mine: Node | None, other: Node | None) -> bool:
    """Return whether two nodes exist and have the same metadata, or neither exists."""
    if mine is None or other is None:
        return mine is other
    return mine.metadata.equals(other.metadata)


def _same_node(mine: Node | None, other: Node | None) -> bool:
    """Return whether two nodes have the same metadata and the same references to chunks."""
    if mine is None or other is None or not mine.metadata.equals(other.metadata):
        return False
    if mine.reads_segments and other.reads_segments and _same_tables(mine, other):
        return True  # without reading segments, which may be gone: both nodes may be of an expired version
    return mine.chunks.equals(other.chunks)


def differs(mine: Node | None, other: Node | None) -> bool:
    """Return whether two nodes differ, as far as their segments can be read.

    If some can't, the nodes differ if one of these is a segment of `other` alone. Those of both say nothing: they
    are damaged, or gone because the nodes are of an expired version.
    """
    try:
        return not _same_node(mine, other)
    except (Corrupt, NotFound):
        assert mine is not None
        assert other is not None
        known = set(segments_of(mine.tables))
        segmented = [table for table in other.tables if isinstance(table, SortedRun)]
        return any(_is_lost(s, table.source) for table in segmented for s in table.segments if s not in known)


def _is_lost(segment: Segment, source: SegmentSource) -> bool:
    try:
        source.load((segment,))
    except (Corrupt, NotFound):
        return True
    return False


def _same_tables(mine: Node, other: Node) -> bool:
    """Return whether two nodes refer to the same segments, and above these to the same chunks."""
    segments, rest = zip(*map(_divided, (mine, other)), strict=True)
    return bool(segments[0] == segments[1]) and rest[0].equals(rest[1])


def _divided(node: Node) -> tuple[list[Segment], ChunkTable]:
    """Return all segments of a node, and the chunks above them."""
    tables = segments_first(node.tables)
    return segments_of(tables), ChunkTable.overlay([table for table in tables if isinstance(table, ChunkTable)])


def resized(tables: Sequence[Table], before: ArrayMeta, after: ArrayMeta) -> tuple[Table, ...]:
    """Return tables of the chunks that are in another grid too, with their numbers there.

    This reads all segments if the references are restated, otherwise those with chunks on both sides of the end.
    """
    if before.counts == after.counts:
        return tuple(tables)
    segmented = [table for table in tables if isinstance(table, SortedRun)]
    runs = sorted_runs(segments_of(segmented), segmented[0].source) if segmented else []
    if before.counts[1:] != after.counts[1:] or len(runs) > compactions.MAX_RUNS:
        chunks = overlay(tables)
        positions, numbers = renumbered(chunks.number, before.counts, after.counts)
        return (chunks.take(positions).with_numbers(numbers),)
    parts = (part for table in tables for part in _up_to(table, after.chunk_count - 1))
    return tuple(part for part in parts if len(part))


def _up_to(table: Table, last: int) -> Iterator[Table]:
    """Yield tables of the chunks of a table up to a number."""
    if isinstance(table, ChunkTable):
        yield between(table, 0, last)
        return
    whole = [segment for segment in table.segments if segment.last <= last]
    if whole:
        yield SortedRun(whole, table.source)
    cut = [segment for segment in table.segments if segment.first <= last < segment.last]
    if cut:
        yield between(SortedRun(cut, table.source), 0, last)


def shrinking_axes(before: ArrayMeta, after: ArrayMeta) -> list[int]:
    """Return the axes along which the array ends closer, and within a chunk."""
    sides = enumerate(zip(before.shape, after.shape, after.chunks, strict=True))
    return [axis for axis, (former, length, chunk) in sides if length < former and length % chunk]


def chunks_at_edge(tables: Sequence[Table], meta: ArrayMeta, axis: int) -> npt.NDArray[np.int64]:
    """Return the numbers of the last chunks along an axis; along the first, this reads only the segments there."""
    if axis == 0:
        row = math.prod(meta.counts[1:])
        last = meta.chunk_count - 1
        return numbers_of([between(table, last + 1 - row, last) for table in tables]).astype(np.int64)
    numbers = numbers_of(tables).astype(np.int64)
    is_last = np.unravel_index(numbers, meta.counts)[axis] == meta.counts[axis] - 1
    return numbers[np.flatnonzero(is_last)]
