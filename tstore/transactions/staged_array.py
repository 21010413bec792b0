"""The staged changes to one array.

Chunks that are written whole are encoded into packs at once, so that memory stays flat and the caller may reuse
its buffer. A write that covers only a part of a chunk is kept as a patch: the region and a copy of its values.
Patches are applied to the newest version of the chunk at the commit, and again if another commit changed that
chunk meanwhile, so writes to disjoint regions of one chunk never conflict and never lose an update.

A lossy codec must not change the values of a chunk that no patch covers. So a patched chunk is encoded without
clipping, which usually keeps values decoded from that chunk exact, and decoded again to compare. If some differ,
as when a much larger value coarsens the offset that they share with it, the write is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.data.pieces import ReadJob
from tstore.data.reader import read_chunks
from tstore.data.writer import PackSet, WriteJob
from tstore.errors import InvalidArgument, Misuse
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import ChunkRow, ChunkSource, ChunkTable
from tstore.format.grid import (
    Selection,
    axis_covers,
    chunk_counts,
    chunk_number,
    full_boxes,
    part_of,
    partial_covers,
)
from tstore.runtime.pool import each
from tstore.storage.base import Storage

__all__ = ["StagedArray"]

_ROUND_BYTES = 64 << 20

Patch = tuple[tuple[slice, ...], npt.NDArray[Any]]


class StagedArray:
    """The changes to one array.

    `fresh` means that its metadata was created or changed; `kept` are the chunks that such an array begins with.
    """

    def __init__(self, path: str, meta: ArrayMeta, *, fresh: bool, kept: ChunkTable | None = None) -> None:
        self.path = path
        self.meta = meta
        self.fresh = fresh
        self.patches: dict[int, tuple[Patch, ...]] = {}
        self._unapplied: set[int] = set()
        self._whole: list[ChunkTable] = [] if kept is None else [kept]
        self._rows: list[ChunkRow] = []
        self._patched: list[ChunkTable] = []

    @property
    def whole(self) -> ChunkTable:
        """Chunks that were kept or written whole."""
        if self._rows or len(self._whole) != 1:
            self._whole = [ChunkTable.overlay([*self._whole, ChunkTable.from_rows(self._rows)])]
            self._rows = []
        return self._whole[0]

    @property
    def only_rows(self) -> list[ChunkRow] | None:
        """The rows written, or None if the array has other changes; small arrays share one table."""
        return self._rows if not self._whole and not self.patches else None

    def adopt(self, table: ChunkTable) -> ChunkTable:
        """Replace the rows written by a table of them, and return it sorted by number."""
        self._whole, self._rows = [table.latest()], []
        return self._whole[0]

    def written(self) -> ChunkTable:
        """Return all chunks that the commit adds, sorted by number."""
        if not self.patches:
            return self.whole
        patched = ChunkTable.overlay(self._patched)
        still = np.isin(patched.number, np.array(list(self.patches), np.uint64))
        return ChunkTable.overlay([self.whole, patched.take(np.flatnonzero(still))])

    async def write(self, packs: PackSet, selection: Selection, values: npt.NDArray[Any]) -> None:
        """Write the whole chunks of a selection into packs and keep the rest as patches.

        Raises `Misuse` if the array was resized meanwhile.
        """
        meta = self.meta
        turned = tuple(slice(None, None, -1) if r.step < 0 else slice(None) for r in selection.axes)
        axes = tuple(r[::-1] if r.step < 0 else r for r in selection.axes)
        values = part_of(values, turned)
        if not all(axes):  # an empty selection, whose other axes may have any number of chunks
            return
        per_axis = [axis_covers(r, n, c) for r, n, c in zip(axes, self.meta.shape, self.meta.chunks, strict=True)]
        regions = [(first, part_of(values, region)) for first, _, region in full_boxes(per_axis)]
        if regions:
            job = WriteJob(self.path, self.meta, regions)
            await packs.write([job])
            if self.meta.document != meta.document:
                raise Misuse(
                    f"{self.path} was resized while it was being written, so this write is dropped; await one "
                    "before the other"
                )
            self.wrote(job)
        for cover in partial_covers(per_axis):
            number = chunk_number(cover.chunk, self.meta.counts)
            copy = np.array(values[cover.result], self.meta.dtype)
            self._patch(number, (cover.inside, copy))

    def _patch(self, number: int, patch: Patch) -> None:
        self.patches[number] = (*self.patches.get(number, ()), patch)
        self._unapplied.add(number)

    def wrote(self, job: WriteJob) -> None:
        """Add the chunks that a job has written whole, in place of earlier ones and their patches."""
        self._rows += job.rows
        if self.patches:
            for row in job.rows:
                self.patches.pop(row.number, None)
                self._unapplied.discard(row.number)

    async def apply_patches(
        self,
        storage: Storage,
        packs: PackSet,
        base: ChunkSource,
        only: Iterable[int] | None = None,
    ) -> None:
        """Rewrite every patched chunk, on top of this transaction's own chunk or that of `base`.

        Other operations may patch, replace or resize meanwhile; a chunk that they touched is left for later.
        """
        numbers = sorted(self._unapplied if only is None else only)
        meta = self.meta
        size = max(1, meta.chunk_size * meta.dtype.itemsize)
        most = max(1, _ROUND_BYTES // size)
        for some in (numbers[i : i + most] for i in range(0, len(numbers), most)):
            if self.meta.document != meta.document:
                return
            layers = {n: self.patches[n] for n in some if n in self.patches}
            chunks = {n: np.full(meta.chunks, meta.fill_value, meta.dtype) for n in layers}
            rows = {n: row for n in layers if (row := self.whole.row(n) or base.row(n)) is not None}
            await read_chunks(storage, [self._whole_chunk(n, row, chunks[n]) for n, row in rows.items()])
            for number, chunk in chunks.items():
                for inside, values in layers[number]:
                    chunk[inside] = values
            at = [tuple(int(i) for i in np.unravel_index(n, meta.counts)) for n in layers]
            job = WriteJob(self.path, meta.unclipped, list(zip(at, chunks.values(), strict=True)))
            await packs.write([job])
            if not meta.chain.lossless:
                await each(self._check_kept, list(zip(at, chunks.values(), layers.values(), strict=True)))
            if self.meta.document != meta.document:
                return
            current = [i for i, n in enumerate(layers) if self.patches.get(n) is layers[n]]
            written = ChunkTable.from_rows(job.rows).latest().take(np.array(current, np.intp))
            self._patched.append(written)
            self._unapplied.difference_update(written.number.tolist())

    def _check_kept(self, patched: tuple[tuple[int, ...], npt.NDArray[Any], tuple[Patch, ...]]) -> None:
        """Raise `InvalidArgument` if the codec changes values of a patched chunk that no patch covers."""
        at, chunk, patches = patched
        meta, decoded = self.meta.unclipped, np.empty_like(chunk)
        meta.chain.decode(meta.chain.encode(chunk, np.empty(meta.encoded_bound, np.uint8)), decoded)
        bits = f"u{chunk.itemsize}"
        changed = decoded.view(bits) != chunk.view(bits)
        for inside, _ in patches:
            changed[inside] = False
        in_array = tuple(slice(n - i * c) for i, n, c in zip(at, meta.shape, meta.chunks, strict=True))
        count = np.count_nonzero(changed[in_array])
        if count:
            raise InvalidArgument(
                f"{self.path}, chunk {at}: writing a part of it would change {count} other values, which share an "
                "exponent offset or scale with those written, so it is refused; write the whole chunk, or create "
                "the array with smaller chunks or without a lossy codec"
            )

    def _whole_chunk(self, number: int, row: ChunkRow, out: npt.NDArray[Any]) -> ReadJob:
        """Return the job that reads one chunk, including its part beyond the array's edge."""
        meta = self.meta.with_shape(self.meta.chunks)
        selection = Selection(tuple(range(n) for n in meta.shape))
        source = ChunkTable.from_rows([row._replace(number=0)])
        return ReadJob(f"{self.path} (chunk number {number})", meta, source, selection, out)

    def reshape(self, shape: Sequence[int], base: ChunkTable) -> None:
        """Change the shape: chunks keep their place in the grid or are dropped.

        What a new edge cuts off within a chunk is patched with the fill value, so that growing does not restore
        it.
        """
        new = self.meta.with_shape(shape)
        old_counts, counts = self.meta.counts, chunk_counts(new.shape, new.chunks)

        def moved(numbers: npt.NDArray[np.integer[Any]]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
            at = np.unravel_index(numbers.astype(np.int64), old_counts)
            inside = [side < n for side, n in zip(at, counts, strict=True)]
            kept = np.flatnonzero(np.logical_and.reduce(inside)) if inside else np.arange(len(numbers))
            return kept, np.ravel_multi_index([side[kept] for side in at], counts) if counts else kept

        before = self.whole if self.fresh else ChunkTable.overlay([base, self.whole])
        kept, numbers = moved(before.number)
        self._whole, self._patched = [before.take(kept).renumbered(numbers)], []
        old = list(self.patches)
        kept, still = moved(np.array(old, np.int64))
        self.patches = {int(m): self.patches[old[k]] for k, m in zip(kept, still, strict=True)}
        present = np.union1d(numbers, still).astype(np.int64)
        for axis, (n, had, chunk) in enumerate(zip(new.shape, self.meta.shape, new.chunks, strict=True)):
            if n < had and n % chunk:
                beyond = (slice(None),) * axis + (slice(n % chunk, None),)
                fill = np.array(new.fill_value, new.dtype)
                cut = np.unravel_index(present, counts)[axis] == counts[axis] - 1
                for number in present[cut].tolist():
                    self._patch(number, (beyond, fill))
        self._unapplied = set(self.patches)
        self.meta, self.fresh = new, True
