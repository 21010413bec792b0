"""The staged changes to one array.

Chunks that are written whole are encoded into packs at once, so that memory stays flat and the caller may reuse
its buffer. A write that covers only a part of a chunk is kept as a patch: the region and a copy of its values.
Patches are applied to the newest version of the chunk at the commit, and again if another commit changed that
chunk meanwhile, so writes to disjoint regions of one chunk never conflict and never lose an update.

A lossy codec must not change those values of a patched chunk that no patch covers. So the chunk is encoded without
clipping, which usually leaves values that were decoded from it unchanged, and decoded again to compare. If some of
these values change, for instance because a larger value raises the exponent offset of its scale group, the write
is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.data.pieces import ReadJob
from tstore.data.reader import read_chunks
from tstore.data.writer import PackSet, WriteJob
from tstore.errors import InvalidArgument, Misuse
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import ChunkRow, ChunkSource, ChunkTable
from tstore.format.documents import Document
from tstore.format.grid import (
    Selection,
    axis_runs,
    chunk_counts,
    chunk_number,
    full_boxes,
    part_of,
    partial_projections,
)
from tstore.format.layers import Table, layers, numbers_of, segments_first, stack
from tstore.format.node import Node
from tstore.format.segments import SegmentSource, fitting
from tstore.runtime.pool import each, run
from tstore.storage.base import Storage

__all__ = ["StagedArray"]

_ROUND_BYTES = 64 << 20  # of chunks in memory while patches are applied

_NO_CHUNKS = ChunkTable.from_rows([])

Patch = tuple[tuple[slice, ...], npt.NDArray[Any]]


class StagedArray(msgspec.Struct, eq=False, gc=False):
    """The changes to one array.

    `replaces_node` says that the transaction created the array or changed its metadata. `tables` are the chunks
    that a new array has from the start, and later those that were written whole, the newest last.
    """

    path: str
    meta: ArrayMeta
    replaces_node: bool
    tables: tuple[Table, ...] = ()
    patches: dict[int, tuple[Patch, ...]] = {}
    _unapplied: dict[int, None] = {}  # chunks with patches that no rewritten chunk includes yet
    _rows: Sequence[ChunkRow] = ()  # written whole, later than those of `tables`
    _patched: tuple[ChunkTable, ...] = ()  # rewritten with their patches; some may be outdated

    @property
    def whole_chunks(self) -> Node:
        """The chunks that existed or were written whole."""
        if self._rows:
            self.tables = stack(self.tables, (ChunkTable.from_rows(self._rows).latest(),))
            self._rows = ()
        return Node(self.path, Document(self.meta.document), self.tables or (_NO_CHUNKS,))

    @property
    def written_rows(self) -> Sequence[ChunkRow] | None:
        """The rows of the chunks written, if the array has no other changes; else None."""
        return self._rows if not self.tables and not self.patches else None

    def staged_chunks(self) -> tuple[Table, ...]:
        """Return tables of all chunks that the commit adds, the newest last."""
        whole = self.whole_chunks.tables
        if not self.patches:
            return whole
        patched = ChunkTable.overlay(self._patched)
        # a rewritten chunk that has no patches any more is outdated: it was written whole later
        current = np.isin(patched.number, np.array(list(self.patches), np.uint64))
        return stack(whole, (patched.take(np.flatnonzero(current)),))

    def staged_numbers(self) -> npt.NDArray[np.uint64]:
        """Return the numbers of these chunks, sorted."""
        if self.written_rows is None:
            return numbers_of(self.staged_chunks())
        return np.array(sorted({row.number for row in self.written_rows}), np.uint64)

    def has_long_tables(self, max_rows: int) -> bool:
        """Return whether there are more than `max_rows` references that are not in segments."""
        if not self.tables:
            return len(self._rows) > max_rows
        return (
            len(self._rows) + sum(len(table) for table in self.tables if isinstance(table, ChunkTable)) > max_rows
        )

    async def write_segments(self, packs: PackSet, source: SegmentSource, max_rows: int) -> None:
        """Write the references that are not in segments into segments if there are more than `max_rows`."""
        self.tables = tables = await run(segments_first, self.whole_chunks.tables)
        rest = [table for table in tables if isinstance(table, ChunkTable)]
        if sum(map(len, rest)) > max_rows:
            chunks = ChunkTable.overlay(rest)
            fits = fitting(chunks)
            segments = await packs.write_segments(chunks.take(np.flatnonzero(fits)))
            long = [table for table in tables if not isinstance(table, ChunkTable)]
            self.tables = (*long, *layers(segments, source), chunks.take(np.flatnonzero(~fits)))

    async def write(
        self, packs: PackSet, source: SegmentSource, selection: Selection, values: npt.NDArray[Any]
    ) -> None:
        """Write the whole chunks of a selection into packs and keep the rest as patches.

        Raise `Misuse` if the array was resized meanwhile.
        """
        meta = self.meta
        # chunks are covered in ascending order: reverse axes with a negative step, and the values along them
        reverse = tuple(slice(None, None, -1) if r.step < 0 else slice(None) for r in selection.axes)
        axes = tuple(r[::-1] if r.step < 0 else r for r in selection.axes)
        values = part_of(values, reverse)
        if not all(axes):  # the selection is empty; its other axes may span any number of chunks
            return
        per_axis = list(map(axis_runs, axes, self.meta.shape, self.meta.chunks))
        regions = [(first, part_of(values, region)) for first, _, region in full_boxes(per_axis)]
        if regions:
            job = WriteJob(self.path, self.meta, regions, segments=[])
            await packs.write([job])
            if self.meta.document != meta.document:
                raise Misuse(
                    f"{self.path} was resized while it was being written, so this write is dropped; await one "
                    "before starting the other"
                )
            self.add_chunks(job, source)
        for projection in partial_projections(per_axis):
            number = chunk_number(projection.chunk, self.meta.counts)
            copy = np.array(values[projection.result], self.meta.dtype)
            self._patch(number, (projection.inside, copy))

    def _patch(self, number: int, patch: Patch) -> None:
        self.patches[number] = (*self.patches.get(number, ()), patch)
        self._unapplied[number] = None

    def add_chunks(self, job: WriteJob, source: SegmentSource) -> None:
        """Stage the chunks that a job has written whole, in place of earlier ones and their patches."""
        tables: list[Table] = []
        if job.segments or job.tables:
            tables = [*layers(job.segments or (), source), *(table.latest() for table in job.tables)]
            self.tables = stack(self.whole_chunks.tables, tables)
        self._rows = [*self._rows, *job.rows] if self._rows else job.rows
        if self.patches:
            patched = np.array(list(self.patches), np.uint64)
            written = [row.number for row in job.rows]
            for number in itertools.chain(written, *(table.select(patched).number.tolist() for table in tables)):
                self.patches.pop(number, None)
                self._unapplied.pop(number, None)

    async def apply_patches(
        self, storage: Storage, packs: PackSet, base: ChunkSource, only: Iterable[int] | None = None
    ) -> None:
        """Write patched chunks: this transaction's whole chunk, or else that of `base`, with the patches applied.

        `only` selects the chunks, by default those with unapplied patches. Other operations may patch, replace or
        resize meanwhile; a chunk that they touched is left for later.
        """
        numbers = sorted(self._unapplied if only is None else only)
        meta = self.meta
        size = max(1, meta.chunk_size * meta.dtype.itemsize)
        per_round = max(1, _ROUND_BYTES // size)
        for batch in (numbers[i : i + per_round] for i in range(0, len(numbers), per_round)):
            if self.meta.document != meta.document:
                return
            patches = {n: self.patches[n] for n in batch if n in self.patches}
            chunks = {n: np.full(meta.chunks, meta.fill_value, meta.dtype) for n in patches}
            rows = {n: row for n in patches if (row := self.whole_chunks.row(n) or base.row(n)) is not None}
            await read_chunks(storage, [self._read_job(n, row, chunks[n]) for n, row in rows.items()])
            for number, chunk in chunks.items():
                for inside, values in patches[number]:
                    chunk[inside] = values
            coordinates = [tuple(int(i) for i in np.unravel_index(n, meta.counts)) for n in patches]
            job = WriteJob(self.path, meta.unclipped, list(zip(coordinates, chunks.values(), strict=True)))
            await packs.write([job])
            if not meta.chain.lossless:
                patched = zip(coordinates, chunks.values(), patches.values(), strict=True)
                await each(self._check_unpatched, list(patched))
            if self.meta.document != meta.document:
                return
            current = [i for i, n in enumerate(patches) if self.patches.get(n) is patches[n]]
            written = ChunkTable.from_rows(job.rows).latest().take(np.array(current, np.intp))
            self._patched = (*self._patched, written)
            for number in written.number.tolist():
                self._unapplied.pop(number, None)

    def _check_unpatched(self, patched: tuple[tuple[int, ...], npt.NDArray[Any], tuple[Patch, ...]]) -> None:
        """Raise `InvalidArgument` if the codec changes values of a patched chunk that no patch covers."""
        coordinates, chunk, patches = patched
        meta, decoded = self.meta.unclipped, np.empty_like(chunk)
        meta.chain.decode(meta.chain.encode(chunk, np.empty(meta.encoded_size, np.uint8)), decoded)
        unsigned = f"u{chunk.itemsize}"
        changed = decoded.view(unsigned) != chunk.view(unsigned)
        for inside, _ in patches:
            changed[inside] = False
        in_array = tuple(slice(n - i * c) for i, n, c in zip(coordinates, meta.shape, meta.chunks, strict=True))
        count = np.count_nonzero(changed[in_array])
        if count:
            raise InvalidArgument(
                f"{self.path}, chunk {coordinates}: writing a part of it would change {count} other values, which "
                "share an exponent offset or scale with those written, so the write is refused; write the whole "
                "chunk, or create the array with smaller chunks or without a lossy codec"
            )

    def _read_job(self, number: int, row: ChunkRow, out: npt.NDArray[Any]) -> ReadJob:
        """Return the job that reads one chunk, including its part beyond the array's edge."""
        meta = self.meta.with_shape(self.meta.chunks)
        selection = Selection(tuple(range(n) for n in meta.shape))
        source = ChunkTable.from_rows([msgspec.structs.replace(row, number=0)])
        return ReadJob(f"{self.path} (chunk number {number})", meta, source, selection, out)

    def resize(self, shape: Sequence[int], base: Node) -> None:
        """Change the shape; chunks keep their place in the grid, and those outside are dropped.

        A chunk that extends beyond a new, closer edge is patched with the fill value there, so that the values cut
        off do not come back if the array grows again.
        """
        new = self.meta.with_shape(shape)
        old_counts, counts = self.meta.counts, chunk_counts(new.shape, new.chunks)

        def renumber(numbers: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
            """Return the positions in `numbers` of chunks that are in the new grid, and their numbers there."""
            axes = np.unravel_index(numbers.astype(np.int64), old_counts)
            inside = [indices < n for indices, n in zip(axes, counts, strict=True)]
            kept = np.flatnonzero(np.logical_and.reduce(inside)) if inside else np.arange(len(numbers))
            return kept, np.ravel_multi_index([indices[kept] for indices in axes], counts) if counts else kept

        whole = self.whole_chunks.chunks
        if not self.replaces_node:
            whole = ChunkTable.overlay([base.chunks, whole])
        positions, numbers = renumber(whole.number)
        self.tables, self._patched = (whole.take(positions).with_numbers(numbers),), ()
        old = list(self.patches)
        positions, patched = renumber(np.array(old, np.int64))
        self.patches = {int(n): self.patches[old[i]] for i, n in zip(positions, patched, strict=True)}
        present = np.union1d(numbers, patched).astype(np.int64)
        for axis, (length, before, chunk) in enumerate(zip(new.shape, self.meta.shape, new.chunks, strict=True)):
            if length < before and length % chunk:
                beyond = (slice(None),) * axis + (slice(length % chunk, None),)
                fill = np.array(new.fill_value, new.dtype)
                at_edge = np.unravel_index(present, counts)[axis] == counts[axis] - 1
                for number in present[at_edge].tolist():
                    self._patch(number, (beyond, fill))
        self._unapplied = dict.fromkeys(self.patches)
        self.meta, self.replaces_node = new, True
