"""The staged changes to one array.

Chunks that are written whole are encoded into packs at once, so that memory stays flat and the caller may reuse
its buffer. A write that covers only a part of a chunk is kept as a patch: the region and a copy of its values.
Patches are applied to the newest version of the chunk at the commit, and again if another commit changed that
chunk meanwhile, so writes to disjoint regions of one chunk never conflict and never lose an update.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.data.writer import PackSet, WriteJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import (
    Selection,
    axis_runs,
    chunk_number,
    full_boxes,
    part_of,
    partial_projections,
    renumbered,
)
from tstore.core.format.arrays.points import PointProjection, PointSelection, point_projections
from tstore.core.format.objects.chunk_refs import ChunkSource, ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.compactions import Compaction
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.references import EXTENDS
from tstore.core.format.objects.segments import SegmentSource, fitting
from tstore.core.format.objects.tables import Table, last_number, numbers_of, segments_first, sorted_runs, stack
from tstore.core.format.tree.changes import NO_NUMBERS, NodeChange
from tstore.core.format.tree.node import Node, check_in_grid, chunks_at_edge, resized, shrinking_axes
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.transactions.patches import Patch, Region, whole_chunk, write_patched
from tstore.errors import Corrupt, Misuse, NotFound

__all__ = ["Extension", "StagedArray"]


class Extension:
    """The appended part of an array: on `axis`, from `start` to the end.

    The commit moves it past the end of the newest version, and changes `start`. `kept` are the values, one array
    for each append, if the array's codecs are lossy: only these can be encoded again in other chunks.
    """

    __slots__ = ("axis", "kept", "start")

    def __init__(self, axis: int, start: int) -> None:
        self.axis = axis
        self.start = start
        self.kept: list[npt.NDArray[Any]] = []


_NO_PATCHES: Any = MappingProxyType({})  # shared by all arrays without patches
_ROUND_BYTES = 64 << 20  # bytes of chunks in memory while patches are applied


class StagedArray(msgspec.Struct, eq=False, gc=False):
    """The changes to one array.

    `replaces_node` says that the transaction created the array or changed its metadata. `tables` are the chunks
    that a new array has from the start, and later those that were written whole, the newest last. `extension` is
    the appended part, if the transaction has only appended to the array.
    """

    path: str
    meta: ArrayMeta
    replaces_node: bool
    tables: tuple[Table, ...] = ()
    patches: dict[int, tuple[Patch, ...]] = _NO_PATCHES
    compaction: Compaction | None = None  # compacts references of the base
    extension: Extension | None = None
    _unapplied: dict[int, None] = _NO_PATCHES  # chunks with patches that no rewritten chunk includes yet
    _rows: Sequence[ChunkRow] = ()  # chunks written whole, newer than those of `tables`
    _patched: tuple[Table, ...] = ()  # chunks rewritten with their patches; rows in memory may be outdated
    _applied: dict[int, tuple[Patch, ...]] = _NO_PATCHES  # the patches that each rewritten chunk includes

    @property
    def flags(self) -> int:
        """The flags of the array in a manifest."""
        return self.replaces_node | (0 if self.extension is None else EXTENDS)

    @property
    def has_unapplied(self) -> bool:
        """Whether some patches are in no rewritten chunk yet."""
        return bool(self._unapplied)

    @property
    def is_unchanged(self) -> bool:
        """Whether there are no changes yet."""
        return not (self.replaces_node or self._rows or self.tables or self.patches)

    @property
    def whole_chunks(self) -> Node:
        """The chunks that existed or were written whole."""
        if self._rows:
            self.tables = stack(self.tables, (ChunkTable.from_rows(self._rows).latest(),))
            self._rows = ()
        return Node(self.path, Document(self.meta.document), self.tables)

    @property
    def written_rows(self) -> Sequence[ChunkRow] | None:
        """The rows of the chunks written, if the array has no other changes; else None."""
        return self._rows if not self.tables and not self.patches else None

    def staged_chunks(self) -> tuple[Table, ...]:
        """Return tables of all chunks that the commit adds, the newest last."""
        whole = self.whole_chunks.tables
        if not self.patches:
            return whole
        segmented = [table for table in self._patched if not isinstance(table, ChunkTable)]
        return stack(whole, (*segmented, self._patched_rows()))

    def _patched_rows(self) -> ChunkTable:
        """Return the rows of rewritten chunks that are not in segments, which are older."""
        patched = ChunkTable.overlay([table for table in self._patched if isinstance(table, ChunkTable)])
        # a rewritten chunk without applied patches is outdated: it was written whole later
        return patched.take(np.flatnonzero(np.isin(patched.number, np.array(list(self._applied), np.uint64))))

    @property
    def change(self) -> NodeChange:
        """The change with which that of a concurrent commit can conflict."""
        extends = self.extension is not None
        if self.replaces_node:  # it conflicts regardless of its chunks
            return NodeChange(True, NO_NUMBERS, extends=extends)
        if self.written_rows is None:
            return NodeChange.from_tables(self.staged_chunks(), extends=extends)
        numbers = np.array(sorted({row.number for row in self.written_rows}), np.uint64)
        return NodeChange(False, numbers, extends=extends)

    def has_long_tables(self, max_rows: int) -> bool:
        """Return whether there are more than `max_rows` references that are not in segments."""
        tables = [table for table in (*self.tables, *self._patched) if isinstance(table, ChunkTable)]
        return len(self._rows) + sum(map(len, tables)) > max_rows

    async def compact_base(self, base: Node, packs: PackSet, source: SegmentSource) -> None:
        """Compact references of the base if that pays and they can be read; no commit fails because of this."""
        from tstore.core.transactions.compacting import compact_references

        added = len(self._rows) + sum(map(len, (*self.tables, *self._patched)))
        try:
            self.compaction = await compact_references(base.tables, added, packs, source)
        except (Corrupt, NotFound):
            self.compaction = None

    def revise_compaction(self, newer: NodeChange) -> bool:
        """Adapt the compaction to a newer commit that changed the array; return whether it is another one now."""
        former = self.compaction
        if former is None:
            return False
        self.compaction = None if newer.replaces_node or newer.has_segments else former.without(newer.numbers)
        return self.compaction is None or len(self.compaction.numbers) < len(former.numbers)

    @property
    def has_segments(self) -> bool:
        """Whether some references that the commit adds or compacts are in segments."""
        if self.compaction is None and not self.tables and not self._patched:
            return False  # the usual case for small commits
        return self.compaction is not None or any(
            not isinstance(table, ChunkTable) for table in (*self.tables, *self._patched)
        )

    async def write_segments(self, packs: PackSet, source: SegmentSource, max_rows: int) -> None:
        """Write the references that are not in segments into segments if there are more than `max_rows`."""
        self.tables = tables = await run(segments_first, self.whole_chunks.tables)
        chunks = ChunkTable.overlay([table for table in tables if isinstance(table, ChunkTable)])
        if len(chunks) > max_rows:
            long = [table for table in tables if not isinstance(table, ChunkTable)]
            self.tables = (*long, *await _in_segments(chunks, packs, source))
        # separately: these are replaced if another commit writes the same chunks first
        patched = self._patched_rows()
        if len(patched) > max_rows:
            long = [table for table in self._patched if not isinstance(table, ChunkTable)]
            self._patched = (*long, *await _in_segments(patched, packs, source))

    async def write(
        self,
        packs: PackSet,
        source: SegmentSource,
        selection: Selection | PointSelection,
        values: npt.NDArray[Any],
    ) -> None:
        """Write the whole chunks of a selection into packs and keep the rest as patches.

        Raise `Misuse` if the array was resized meanwhile.
        """
        meta = self.meta
        if isinstance(selection, PointSelection):
            await self._write_points(packs, source, selection, values)
            return
        at = selection.whole_chunk(meta.chunks)
        row = None if at is None else packs.write_inline(meta, chunk_number(at, meta.counts), values)
        if row is not None:
            self.add_rows([row])
            return
        # chunks are covered in ascending order: reverse axes with a negative step, and the values along them
        reverse = tuple(slice(None, None, -1) if r.step < 0 else slice(None) for r in selection.axes)
        axes = tuple(r[::-1] if r.step < 0 else r for r in selection.axes)
        values = part_of(values, reverse)
        if not all(axes):  # the selection is empty; its other axes may span any number of chunks
            return
        per_axis = list(map(axis_runs, axes, self.meta.shape, self.meta.chunks))
        regions = [(first, part_of(values, region)) for first, _, region in full_boxes(per_axis)]
        if regions:
            await self._write_whole(packs, source, regions)
        for projection in partial_projections(per_axis):
            number = chunk_number(projection.chunk, self.meta.counts)
            copy = np.array(values[projection.result], self.meta.dtype)
            self.add_patch(number, (projection.inside, copy))

    async def _write_points(
        self, packs: PackSet, source: SegmentSource, selection: PointSelection, values: npt.NDArray[Any]
    ) -> None:
        """Write the chunks whose elements are all selected into packs, and keep the rest as patches."""
        meta = self.meta
        whole: list[tuple[PointProjection, list[int]]] = []
        partial: list[PointProjection] = []
        for projection in point_projections(selection, meta.shape, meta.chunks):
            sides = zip(projection.chunk, meta.shape, meta.chunks, strict=True)
            inside = [min(c, n - i * c) for i, n, c in sides]
            if projection.covers(math.prod(inside)):
                whole.append((projection, inside))
            else:
                partial.append(projection)
        if whole:
            await self._write_whole(packs, source, (whole_chunk(meta, *chunk, values) for chunk in whole))
        for projection in partial:
            self.add_patch(chunk_number(projection.chunk, meta.counts), projection.patch(values, meta.dtype))

    async def _write_whole(self, packs: PackSet, source: SegmentSource, regions: Iterable[Region]) -> None:
        """Write regions of whole chunks."""
        meta = self.meta
        job = WriteJob(self.path, meta, regions, segments=[])
        await packs.write([job])
        in_segments = await self.numbers_in_segments(job, source)
        if self.meta.document != meta.document:
            raise Misuse(
                f"{self.path} was resized while it was being written, so this write is dropped; await one "
                "before starting the other"
            )
        self.add_chunks(job, source, in_segments)

    def add_patch(self, number: int, patch: Patch) -> None:
        """Stage values of a part of a chunk."""
        if not self.patches:
            self.patches, self._unapplied, self._applied = {}, {}, {}
        self.patches[number] = (*self.patches.get(number, ()), patch)
        self._unapplied[number] = None

    async def numbers_in_segments(self, job: WriteJob, source: SegmentSource) -> Collection[int]:
        """Return the numbers of chunks in a job's segments, if some chunks of the array have patches."""
        if not (job.segments and self.patches):
            return ()
        return set((await run(numbers_of, sorted_runs(job.segments, source))).tolist())

    def add_chunks(self, job: WriteJob, source: SegmentSource, in_segments: Collection[int] = ()) -> None:
        """Stage the chunks that a job has written whole, in place of earlier ones and their patches.

        `in_segments` are the numbers of those in segments; they are not needed if no chunk has patches.
        """
        if job.segments or job.tables:
            written_tables: list[Table] = [*sorted_runs(job.segments or (), source)]
            written_tables += [table.latest() for table in job.tables]
            self.tables = stack(self.whole_chunks.tables, written_tables)
        self.add_rows(job.rows)
        if self.patches:
            written = set[int]().union(*(table.number.tolist() for table in job.tables))
            for number in [n for n in self.patches if n in written or n in in_segments]:
                self._drop_patches(number)

    def add_rows(self, rows: Sequence[ChunkRow]) -> None:
        """Stage chunks that were written whole, in place of earlier ones and their patches."""
        self._rows = [*self._rows, *rows] if self._rows else rows
        if self.patches:
            for row in rows:
                self._drop_patches(row.number)

    def _drop_patches(self, number: int) -> None:
        for by_number in (self.patches, self._unapplied, self._applied):
            by_number.pop(number, None)

    async def apply_patches(
        self, storage: Storage, packs: PackSet, base: ChunkSource, only: Iterable[int] | None = None
    ) -> None:
        """Write patched chunks: this transaction's whole chunk, or else that of `base`, with the patches applied.

        `only` selects the chunks, by default those with unapplied patches. Other operations may patch, replace or
        resize meanwhile. A chunk that they patched is rewritten without their patches, which are left for later.
        """
        numbers = sorted(self._unapplied if only is None else only)
        meta = self.meta
        size = max(1, meta.chunk_size * meta.dtype.itemsize)
        per_round = max(1, _ROUND_BYTES // size)
        for batch in (numbers[i : i + per_round] for i in range(0, len(numbers), per_round)):
            if self.meta.document != meta.document:
                return
            patches = {n: self.patches[n] for n in batch if n in self.patches}
            rows = await write_patched(
                storage, packs, self.path, meta, patches, await self._rows_of(list(patches), base)
            )
            if self.meta.document != meta.document:
                return
            current = [i for i, (n, applied) in enumerate(patches.items()) if self._is_newest(n, applied)]
            written = ChunkTable.from_rows(rows).latest().take(np.array(current, np.intp))
            self._patched = stack(self._patched, (written,))
            for number in written.number.tolist():
                self._applied[number] = patches[number]
                if self.patches[number] is patches[number]:
                    self._unapplied.pop(number, None)

    def _is_newest(self, number: int, applied: tuple[Patch, ...]) -> bool:
        """Return whether a chunk with these patches is newer than the one before it, and was not written whole."""
        patches = self.patches.get(number, ())
        is_current = len(patches) >= len(applied) and patches[len(applied) - 1] is applied[-1]
        return is_current and len(applied) >= len(self._applied.get(number, ()))

    async def _rows_of(self, numbers: Sequence[int], base: ChunkSource) -> dict[int, ChunkRow]:
        """Return the references to chunks, this transaction's or else those of `base`."""
        whole = self.whole_chunks
        if not (whole.reads_segments or base.reads_segments):
            return {n: row for n in numbers if (row := whole.row(n) or base.row(n)) is not None}
        wanted = np.array(numbers, np.uint64)
        tables = await run(lambda: [source.select(wanted) for source in (base, whole)])
        return {row.number: row for table in tables for row in table.rows}

    async def resize(self, shape: Sequence[int], base: Node) -> None:
        """Change the shape; chunks keep their place in the grid, and those outside are dropped.

        `base` has no chunks if this transaction created the array, or has changed its metadata before. A chunk
        that extends beyond a new, closer edge is patched with the fill value there, so that the values cut off do
        not come back if the array grows again. Raise `Misuse` if the array was resized meanwhile.
        """
        meta, new = self.meta, self.meta.with_shape(shape)
        axes = shrinking_axes(meta, new)

        def changed(tables: Sequence[Table]) -> tuple[tuple[Table, ...], list[npt.NDArray[np.int64]]]:
            """Return the chunks that stay, and which of these extend beyond the new edge of each axis."""
            kept = resized(tables, meta, new)
            return kept, [chunks_at_edge(kept, new, axis) for axis in axes]

        while True:
            whole = self.whole_chunks
            tables = (*base.tables, *whole.tables)
            check_in_grid(self.path, meta, last_number(tables))
            in_thread = whole.reads_segments or base.reads_segments
            kept, at_edges = await run(changed, tables) if in_thread else changed(tables)
            if self.meta is not meta:
                raise Misuse(
                    f"{self.path} was resized twice at the same time; await one before starting the other"
                )
            if self.whole_chunks.tables is whole.tables:  # else another operation wrote chunks meanwhile
                break
        self.tables, self._patched = kept, ()
        self._applied = {}
        old = list(self.patches)
        positions, patched = renumbered(np.array(old, np.int64), meta.counts, new.counts)
        self.patches = {int(n): self.patches[old[i]] for i, n in zip(positions, patched, strict=True)}
        fill = np.array(new.fill_value, new.dtype)
        for axis, present in zip(axes, at_edges, strict=True):
            beyond = (slice(None),) * axis + (slice(new.shape[axis] % new.chunks[axis], None),)
            also = patched[np.unravel_index(patched, new.counts)[axis] == new.counts[axis] - 1]
            for number in np.union1d(present, also).tolist():
                self.add_patch(number, (beyond, fill))
        self._unapplied = dict.fromkeys(self.patches)
        self.meta, self.replaces_node, self.extension = new, True, None


async def _in_segments(chunks: ChunkTable, packs: PackSet, source: SegmentSource) -> Sequence[Table]:
    """Write references into segments; return these and, in a table, the references that fit in no segment."""
    fits = fitting(chunks)
    segments = await packs.write_segments(chunks.take(np.flatnonzero(fits)))
    return (*sorted_runs(segments, source), chunks.take(np.flatnonzero(~fits)))
