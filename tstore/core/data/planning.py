"""The plan of a read: the byte ranges that it needs from each pack. Planning looks up chunks and reads none.

1. Each job becomes pieces, one for each chunk, or for each part of a chunk or run of chunks (`_pieces`).
2. The pieces of all jobs are sorted by pack and offset (`pieces_of`).
3. Adjacent pieces become batches, each read with one call (`batches_of`).

`reader` reads by this plan; `read_plan` returns it.

Small arrays that are contiguous in a pack are read, verified and copied together. A checkpoint has many arrays
with one short, unencoded chunk. An object for each chunk, and a call for each step, would take longer than the
I/O. So their references are looked up in the columns of their manifest, and one piece covers up to
`_MAX_BYTES` of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tstore.core.data.pieces import Bytes, ChunkPiece, Piece, ReadJob, StackJob, can_decode_into, with_shared_bytes
from tstore.core.data.point_pieces import point_pieces
from tstore.core.data.runs import Fill, RunPiece, divide, stacked_pieces
from tstore.core.data.tile_pieces import box_tile_pieces
from tstore.core.format.arrays.grid import Projection, Selection, chunk_coordinates, chunk_number, whole
from tstore.core.format.arrays.points import PointProjection
from tstore.core.format.checksums import BLOCK
from tstore.core.format.objects.chunk_refs import ChunkSource, ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.plain_text import pluralize
from tstore.core.format.tree.node import Node
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Tuning
from tstore.errors import NotFound

__all__ = [
    "ByteRange",
    "ReadPlan",
    "SmallArraysPiece",
    "batches_of",
    "direct_chunk",
    "pieces_of",
    "planned_bytes",
    "read_plan",
    "small_arrays",
]

_MAX_BYTES = 1 << 20  # maximum bytes of a piece, so that it stays in the CPU's caches
_MIN_JOBS = 16  # jobs of one manifest that make a lookup in columns worthwhile


class SmallArraysPiece(RunPiece):
    """Arrays with equal metadata and one short unencoded chunk each, contiguous in a pack."""

    __slots__ = ("_jobs",)

    def __init__(self, jobs: Sequence[ReadJob], references: ChunkTable) -> None:
        super().__init__(jobs[0], references, [0] * len(jobs), None)
        self._jobs = jobs

    @property
    def jobs(self) -> Sequence[ReadJob]:
        """The jobs, one for each array."""
        return self._jobs

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
    small: dict[int, tuple[list[ReadJob], list[int], ChunkTable]] = {}  # keyed by the columns of the references
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
            pieces += _small_pieces(listed, ChunkTable(table.columns, 0, len(table.columns.number)), starts, rest)
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
    read_whole = job.selection is whole(meta.shape)  # an equal but distinct selection takes the general path
    return table if short and read_whole and can_decode_into(job.out, meta) else None


def _small_pieces(
    jobs: Sequence[ReadJob], table: ChunkTable, starts: Sequence[int], rest: list[ReadJob | StackJob]
) -> Iterator[SmallArraysPiece]:
    """Yield pieces for jobs whose references are the rows `starts` of a table; add those without one to `rest`."""
    rows = np.array(starts)
    metas = np.array([id(job.meta) for job in jobs])
    lengths = np.array([job.meta.encoded_size for job in jobs], np.uint64)
    length, number, pack, offset = table.length[rows], table.number[rows], table.pack[rows], table.offset[rows]
    order = np.lexsort((offset, pack))
    wrong = (length != lengths) | (number != 0)  # left to the general path, which reports it
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


AnyProjection = Projection | PointProjection

_BATCH_PIECES = 512  # maximum pieces in a batch
_LOOKUPS = 4096  # chunks looked up in segments at once
_READ = 16 << 20  # bytes of an unencoded chunk read at once if they can't be read into the result
_DECODED = 16 << 20  # bytes of values decoded at once to select a part of them
_APART = 2 * BLOCK  # bytes; elements farther apart are read separately
_MAX_SHOWN = 5  # requests listed in a repr


class ByteRange(NamedTuple):
    """A range of bytes of an object."""

    key: str
    offset: int
    size: int


class ReadPlan(NamedTuple):
    """The bytes that a read requests from the storage.

    `requests` are ranges of packs, one call each. `bytes_read` is their total size, including small gaps between
    adjacent pieces. Chunks stored in the metadata need no request. `chunks` are the numbers of the stored
    chunks that contain selected values; `bytes_wanted` is the size of these values in memory.
    """

    chunks: list[int]
    requests: list[ByteRange]
    bytes_wanted: int

    @property
    def bytes_read(self) -> int:
        """The bytes of all requests."""
        return sum(request.size for request in self.requests)

    def __str__(self) -> str:
        lines = [
            f"{self.bytes_read:,} bytes in {pluralize(len(self.requests), 'request')}, of "
            f"{pluralize(len(self.chunks), 'chunk')}, for {self.bytes_wanted:,} bytes of values"
        ]
        lines += [f"  {key} {offset}:{offset + size}" for key, offset, size in self.requests[:_MAX_SHOWN]]
        rest = len(self.requests) - _MAX_SHOWN
        return "\n".join([*lines, f"  and {rest:,} more"] if rest > 0 else lines)


def read_plan(storage: Storage, job: ReadJob) -> ReadPlan:
    """Return what `read_chunks` would read for a job, whose `out` is not changed.

    Raise `NotFound` for an unwritten chunk of a dense array.
    """
    pieces = sorted(_pieces(job, storage.url, _leave_unchanged), key=_sort_key)
    requests = [
        ByteRange(batch[0].pack, start, stop - start)
        for batch in batches_of(pieces, storage.tuning)
        if isinstance(batch[0].pack, str)
        for start, stop in _spans(batch, storage.tuning)
    ]
    return ReadPlan(sorted({number for piece in pieces for number in piece.chunks}), requests, job.out.nbytes)


def planned_bytes(storage: Storage, jobs: Iterable[ReadJob | StackJob]) -> int:
    """Return how many bytes of packs `read_chunks` would read, gaps between pieces included.

    Raise `NotFound` for an unwritten chunk of a dense array. The `out` of the jobs is not changed.
    """
    pieces = [piece for job in jobs for piece in _pieces(job, storage.url, _leave_unchanged)]
    pieces.sort(key=_sort_key)
    batches = (b for b in batches_of(pieces, storage.tuning) if isinstance(b[0].pack, str))
    return sum(stop - start for batch in batches for start, stop in _spans(batch, storage.tuning))


def pieces_of(jobs: Sequence[ReadJob | StackJob], url: str) -> list[Piece]:
    """Return the pieces to read, sorted, and store the fill value for chunks that were never written."""
    together, others = small_arrays(jobs)
    pieces = [*together, *(piece for job in others for piece in _pieces(job, url, _store_fill_value))]
    pieces.sort(key=_sort_key)
    return with_shared_bytes(pieces)


def direct_chunk(batch: Sequence[Piece]) -> tuple[ChunkPiece, Bytes] | None:
    """Return the only piece of a batch and its destination, None if it is not a chunk that has one."""
    piece = batch[0]
    if len(batch) > 1 or not isinstance(piece, ChunkPiece) or (target := piece.destination()) is None:
        return None
    return piece, target


def _spans(batch: Sequence[Piece], tuning: Tuning) -> list[tuple[int, int]]:
    """Return the start and the stop of each call that reads a batch."""
    start, stop = batch[0].offset, max(piece.offset + piece.size for piece in batch)
    size = stop - start if direct_chunk(batch) is None else tuning.piece
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]


def _sort_key(piece: Piece) -> tuple[bool, str, int, int]:
    """Return a key that sorts pieces by pack, offset and size; those of inline packs come last."""
    pack = piece.pack
    return isinstance(pack, bytes), "" if isinstance(pack, bytes) else pack, piece.offset, piece.size


def _store_fill_value(job: ReadJob, part: Any) -> None:
    job.out[part] = job.meta.fill_value


def _leave_unchanged(job: ReadJob, part: Any) -> None:
    pass


def _pieces(job: ReadJob | StackJob, url: str, fill: Fill) -> Iterator[Piece]:
    """Yield the pieces of a job.

    A chunk that was never written has no piece. In a sparse array, call `fill` for its part of the result; raise
    `NotFound` if the array is dense.
    """
    meta, source = job.meta, job.source
    if isinstance(job, StackJob):
        references = source.select(job.numbers)
        if len(references) < len(job.numbers):
            absent = min(set(job.numbers).difference(references.number.tolist()))
            raise _unwritten(job, url, chunk_coordinates(absent, meta.counts))
        yield from stacked_pieces(job, references)
        return
    selection = job.selection
    if meta.shape == meta.chunks and job.out.shape == meta.shape and isinstance(selection, Selection):
        reference = source.row(0)
        direct = meta.chain.identity and can_decode_into(job.out, meta)
        direct = direct and all(r.step == 1 for r in selection.axes)
        if reference is not None and direct:
            yield ChunkPiece.from_projection(job, reference, None)
            return
    pieces, projections = divide(job, fill)
    yield from pieces
    for projection, reference in _references(projections, meta.counts, source):
        if reference is not None:
            if isinstance(projection, PointProjection):
                yield from point_pieces(job, reference, projection)
            else:
                yield from _chunk_pieces(job, reference, projection)
            continue
        if not meta.sparse:
            raise _unwritten(job, url, projection.chunk)
        fill(job, projection.result)


def _chunk_pieces(job: ReadJob, row: ChunkRow, projection: Projection) -> Iterator[ChunkPiece]:
    """Yield the pieces of one chunk; raise `Corrupt` for an impossible length.

    A part of a long chunk is read piece by piece, skipping the blocks (and eXmY tiles) between the pieces.
    """
    piece, chain = ChunkPiece.from_projection(job, row, projection), job.meta.chain
    if row.length <= BLOCK:
        yield piece
    elif chain.has_tiles and not projection.full:
        header_size = chain.tile_range(0, 1).header_size  # every part needs it
        for part in _parts(job, projection, max(_DECODED, 16 * header_size)):
            tiles = chain.tiles(part.inside)
            assert tiles is not None
            yield from box_tile_pieces(job, row, part, tiles)
    elif chain.identity and piece.size > _READ and piece.destination() is None:
        for part in _parts(job, projection, _READ):
            yield ChunkPiece.from_projection(job, row, part)
    else:
        yield piece


def _parts(job: ReadJob, projection: Projection, limit: int) -> Iterator[Projection]:
    """Divide the selected elements of a chunk into parts, each within about `limit` bytes of the decoded chunk.

    Elements that are several blocks apart along an axis are in different parts: for float32 [4096, 1 << 20],
    `[::1024, :9]` has four parts, and `[:100, 7]` one hundred.
    """
    counts = [len(range(s.start, s.stop, s.step)) for s in projection.inside]
    axis = next((k for k, count in enumerate(counts) if count > 1), None)
    if axis is None:
        yield projection
        return
    inside, result = projection.inside[axis], projection.result[axis]
    row_bytes = math.prod(job.meta.chunks[axis + 1 :]) * job.meta.dtype.itemsize
    per_part = 1 if row_bytes * inside.step > _APART else max(1, limit // row_bytes)  # indices along the axis
    selected, targets = range(inside.start, inside.stop, inside.step), range(*result.indices(job.out.shape[axis]))
    start = 0
    while start < len(selected):
        edge = selected[start] // per_part * per_part + per_part
        count = -(-(edge - selected[start]) // inside.step) if per_part > 1 else 1
        stop = min(start + count, len(selected))
        at = targets[start:stop]
        end = at.stop if at.stop >= 0 else None  # a negative one would count from the end of the axis
        part = projection._replace(
            inside=_with(projection.inside, axis, slice(selected[start], selected[stop - 1] + 1, inside.step)),
            result=_with(projection.result, axis, slice(at.start, end, at.step)),
            full=False,
        )
        if per_part == 1:
            yield from _parts(job, part, limit)
        else:
            yield part
        start = stop


def _with(slices: tuple[slice, ...], axis: int, part: slice) -> tuple[slice, ...]:
    return (*slices[:axis], part, *slices[axis + 1 :])


def _references(
    projections: Iterable[AnyProjection], counts: tuple[int, ...], source: ChunkSource
) -> Iterator[tuple[AnyProjection, ChunkRow | None]]:
    """Yield each projection with the reference to its chunk, or None if that was never written."""
    if not source.reads_segments:
        for projection in projections:
            yield projection, source.row(chunk_number(projection.chunk, counts))
        return
    remaining = iter(projections)
    while batch := list(itertools.islice(remaining, _LOOKUPS)):  # each table is searched once for a batch
        numbers = [chunk_number(projection.chunk, counts) for projection in batch]
        rows = {row.number: row for row in source.select(np.array(numbers, np.int64)).rows}
        yield from zip(batch, map(rows.get, numbers), strict=True)


def _unwritten(job: ReadJob | StackJob, url: str, chunk: tuple[int, ...]) -> NotFound:
    return NotFound(
        f"{url}: chunk {chunk} of {job.path} was never written; write it, or create the array with sparse=True to "
        "read the fill value there"
    )


def batches_of(pieces: Iterable[Piece], tuning: Tuning) -> Iterator[list[Piece]]:
    """Yield batches of up to about `tuning.batch` bytes: pieces that overlap or are close together in one pack.

    The pieces must be sorted. A piece whose bytes a batch already covers is added even to a full batch.
    """
    batch: list[Piece] = []
    begin = end = 0
    pack: str | bytes | None = None
    for part in itertools.chain.from_iterable(piece.split(tuning.batch) for piece in pieces):
        near = (part.pack is pack or part.pack == pack) and begin <= part.offset <= end + tuning.gap
        too_long = part.offset + part.size > max(end, begin + tuning.batch)
        if batch and (not near or too_long or len(batch) == _BATCH_PIECES):
            yield batch
            batch = []
        if not batch:
            begin, end, pack = part.offset, 0, part.pack
        batch.append(part)
        end = max(end, part.offset + part.size)
    if batch:
        yield batch
