"""What a transaction has changed in one array and not yet committed.

Chunks written whole are encoded and put into packs at once, so that memory stays flat and the caller may use
its buffer again; `rows` refers to them. A write that covers only a part of a chunk is kept as a patch: the
region and a copy of its values. Patches are applied to the newest version of the chunk when the transaction
commits, and again when another commit changed that chunk meanwhile, so that writes of disjoint regions of one
chunk never conflict and never lose an update.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.chunk_reader import ReadJob, read_chunks
from tstore.chunk_writer import PackSet, WriteJob
from tstore.chunks import ChunkRow
from tstore.codec import ArrayMeta
from tstore.grid import AxisCover, Cover, Selection, along, chunk_counts, part_of
from tstore.kv.base import Backend

__all__ = ["StagedArray"]

_ROUND = 64 << 20

Patch = tuple[tuple[slice, ...], npt.NDArray[Any]]


class StagedArray:
    """The changes to one array.

    `fresh` tells that its metadata was created or changed; then `kept` holds the rows that stay of what it
    had before.
    """

    def __init__(self, path: str, meta: ArrayMeta, *, fresh: bool) -> None:
        self.path = path
        self.meta = meta
        self.fresh = fresh
        self.kept: dict[int, ChunkRow] = {}
        self.rows: dict[int, ChunkRow] = {}
        self.patches: dict[int, list[Patch]] = {}
        self.patched: dict[int, ChunkRow] = {}

    async def write(self, packs: PackSet, selection: Selection, values: npt.NDArray[Any]) -> None:
        """Writes the whole chunks of a selection into packs and keeps the rest as patches."""
        turned = tuple(slice(None, None, -1) if r.step < 0 else slice(None) for r in selection.axes)
        axes = tuple(r[::-1] if r.step < 0 else r for r in selection.axes)
        values = part_of(values, turned)
        per_axis = [along(r, n, c) for r, n, c in zip(axes, self.meta.shape, self.meta.chunks, strict=True)]
        if not all(per_axis):
            return
        pieces = [
            (tuple(r.chunk for r in runs), part_of(values, tuple(r.result for r in runs)))
            for runs in itertools.product(*[_runs(r, parts) for r, parts in zip(axes, per_axis, strict=True)])
        ]
        if pieces:
            job = WriteJob(self.path, self.meta, pieces)
            await packs.write([job])
            for row in job.rows:
                self.rows[row.number] = row
                if self.patches:
                    self.patches.pop(row.number, None)
                    self.patched.pop(row.number, None)
        for cover in _partial(per_axis):
            number = 0
            for i, n in zip(cover.chunk, self.meta.counts, strict=True):
                number = number * n + i
            copy = np.array(values[cover.result], self.meta.dtype)
            self.patches.setdefault(number, []).append((cover.inside, copy))
            self.patched.pop(number, None)

    async def apply_patches(
        self,
        backend: Backend,
        packs: PackSet,
        base: Mapping[int, ChunkRow],
        only: Iterable[int] | None = None,
    ) -> None:
        """Writes every patched chunk anew, on top of this transaction's own chunk or that of `base`."""
        numbers = [n for n in (self.patches if only is None else only) if n not in self.patched or only]
        size = max(1, self.meta.chunk_size * self.meta.dtype.itemsize)
        most = max(1, _ROUND // size)
        for some in (numbers[i : i + most] for i in range(0, len(numbers), most)):
            chunks = {n: np.full(self.meta.chunks, self.meta.fill_value, self.meta.dtype) for n in some}
            found = {n: r for n in some if (r := self.rows.get(n) or self.kept.get(n) or base.get(n))}
            await read_chunks(backend, [self._whole_chunk(n, r, chunks[n]) for n, r in found.items()])
            for number, chunk in chunks.items():
                for inside, values in self.patches[number]:
                    chunk[inside] = values
            at = [tuple(int(i) for i in np.unravel_index(n, self.meta.counts)) for n in some]
            job = WriteJob(self.path, self.meta, list(zip(at, chunks.values(), strict=True)))
            await packs.write([job])
            self.patched.update({row.number: row for row in job.rows})

    def _whole_chunk(self, number: int, row: ChunkRow, out: npt.NDArray[Any]) -> ReadJob:
        """Reads one chunk with what lies beyond the array's edge, as if the array were that chunk."""
        meta = self.meta.with_shape(self.meta.chunks)
        selection = Selection(tuple(range(n) for n in meta.shape))
        return ReadJob(f"{self.path} (chunk number {number})", meta, {0: row}, selection, out)

    def reshape(self, shape: tuple[int, ...], base: Mapping[int, ChunkRow]) -> None:
        """Takes another shape: chunks keep their place in the grid or are dropped."""
        new = self.meta.with_shape(shape)
        old_counts, counts = self.meta.counts, chunk_counts(new.shape, new.chunks)

        def moved(number: int) -> int | None:
            at = np.unravel_index(number, old_counts)
            inside = all(int(i) < n for i, n in zip(at, counts, strict=True))
            return int(np.ravel_multi_index(at, counts)) if inside else None

        before = {**base, **self.kept} if not self.fresh else self.kept
        self.kept = {m: r._replace(number=m) for n, r in before.items() if (m := moved(n)) is not None}
        self.rows = {m: r._replace(number=m) for n, r in self.rows.items() if (m := moved(n)) is not None}
        self.patched = {}
        self.patches = {m: p for n, p in self.patches.items() if (m := moved(n)) is not None}
        self.meta, self.fresh = new, True

    def written(self) -> dict[int, ChunkRow]:
        """The rows of all chunks that the commit refers to anew, sorted by number."""
        return dict(sorted({**self.kept, **self.rows, **self.patched}.items()))


def _runs(selected: range, parts: list[AxisCover]) -> list[AxisCover]:
    """The full chunks of one axis, those that lie together as one."""
    full = [p for p in parts if p.full]
    if selected.step != 1 or not full:
        return full
    return [full[0]._replace(result=slice(full[0].result.start, full[-1].result.stop))]


def _partial(per_axis: list[list[AxisCover]]) -> Iterator[Cover]:
    """The covers that are not full, each once: full before axis k, partial at k, any after it."""
    for k in range(len(per_axis)):
        sides = [[p for p in parts if (i > k) or p.full == (i < k)] for i, parts in enumerate(per_axis)]
        for parts in itertools.product(*sides):
            yield Cover(
                tuple(p.chunk for p in parts),
                tuple(p.inside for p in parts),
                tuple(p.result for p in parts),
                False,
            )
