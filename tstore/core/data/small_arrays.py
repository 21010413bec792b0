"""Reading many small arrays: those that follow each other in a pack are read, verified and copied together.

A checkpoint has many arrays of one short, unencoded chunk. An object for each chunk, and a call for each step,
would take longer than the bytes. So their references are looked up in the columns of their manifest, and one piece
stands for up to `_MAX_BYTES` of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from tstore.core.data.pieces import Bytes, ReadJob, StackJob, can_decode_into
from tstore.core.data.runs import RunPiece
from tstore.core.format.arrays.grid import whole
from tstore.core.format.checksums import BLOCK
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.tree.node import Node

__all__ = ["SmallArraysPiece", "small_arrays"]

_MAX_BYTES = 1 << 20  # of a piece, read, verified and copied while they are in the CPU's caches
_MIN_JOBS = 16  # of one manifest, below which the columns do not pay


class SmallArraysPiece(RunPiece):
    """Arrays of equal metadata, each of one short unencoded chunk, that follow each other in a pack."""

    __slots__ = ("jobs",)

    def __init__(self, jobs: Sequence[ReadJob], references: ChunkTable) -> None:
        super().__init__(jobs[0], references, [0] * len(jobs), None)
        self.jobs = jobs

    def label_of(self, index: int) -> str:
        """Return the path of an array and its chunk."""
        return f"{self.jobs[index].path}, chunk {(0,) * len(self.job.meta.shape)}"

    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the chunks and copy their values; raise `Corrupt`, naming the first bad chunk."""
        super().deliver(data, url)
        meta = self.job.meta
        for job, values in zip(self.jobs, data.view(meta.dtype).reshape(-1, *meta.shape), strict=True):
            job.out[...] = values


def small_arrays(
    jobs: Sequence[ReadJob | StackJob],
) -> tuple[list[SmallArraysPiece], Sequence[ReadJob | StackJob]]:
    """Return pieces for the jobs that read small arrays, and the other jobs."""
    if len(jobs) < _MIN_JOBS:
        return [], jobs
    rest: list[ReadJob | StackJob] = []
    small: dict[int, tuple[list[ReadJob], list[int], ChunkTable]] = {}  # by the columns of the references
    for job in jobs:
        table = _reference(job)
        if table is None or isinstance(job, StackJob):
            rest.append(job)
            continue
        listed, starts, _ = small.setdefault(id(table.columns), ([], [], table))
        listed.append(job)
        starts.append(table.start)
    pieces: list[SmallArraysPiece] = []
    for listed, starts, table in small.values():
        if len(listed) < _MIN_JOBS:
            rest += listed
        else:
            pieces += _pieces(listed, ChunkTable(table.columns, 0, len(table.columns.number)), starts, rest)
    return pieces, rest


def _reference(job: ReadJob | StackJob) -> ChunkTable | None:
    """Return the reference of a small array that is read whole, None for any other job."""
    meta, source = job.meta, job.source
    if isinstance(job, StackJob) or not isinstance(source, Node) or len(source.tables) != 1:
        return None
    table = source.tables[0]
    if not isinstance(table, ChunkTable) or table.stop - table.start != 1 or meta.shape != meta.chunks:
        return None
    short = meta.chain.identity and meta.encoded_size <= BLOCK
    read_whole = job.selection is whole(meta.shape)  # an equal selection that is another object goes the usual way
    return table if short and read_whole and can_decode_into(job.out, meta) else None


def _pieces(
    jobs: Sequence[ReadJob], table: ChunkTable, starts: Sequence[int], rest: list[ReadJob | StackJob]
) -> Iterator[SmallArraysPiece]:
    """Yield pieces for jobs whose references are the rows `starts` of a table; add those without one to `rest`."""
    rows = np.array(starts)
    metas = np.array([id(job.meta) for job in jobs])
    lengths = np.array([job.meta.encoded_size for job in jobs], np.uint64)
    length, number, pack, offset = table.length[rows], table.number[rows], table.pack[rows], table.offset[rows]
    order = np.lexsort((offset, pack))
    wrong = (length != lengths) | (number != 0)  # reported by the usual way
    rest += [jobs[at] for at in np.flatnonzero(wrong).tolist()]
    order = order[~wrong[order]]
    if not len(order):
        return
    follows = (
        (pack[order[1:]] == pack[order[:-1]])
        & (metas[order[1:]] == metas[order[:-1]])
        & (offset[order[1:]] - offset[order[:-1]] == length[order[:-1]])
    )
    cuts = [0, *(np.flatnonzero(~follows) + 1).tolist(), len(order)]
    for begin, end in itertools.pairwise(cuts):
        step = max(1, _MAX_BYTES // max(1, int(length[order[begin]])))
        for start in range(begin, end, step):
            part = order[start : min(start + step, end)]
            yield SmallArraysPiece([jobs[at] for at in part.tolist()], table.take(rows[part]))
