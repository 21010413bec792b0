"""Reading from packs: bytes are verified and decoded to values.

The pieces of all arrays of a call are sorted by pack and offset, and neighbours are read together. Bytes that
several pieces need are read once, for example if regions of one array share a chunk. An unencoded chunk is read
straight into the result where the chunk's part of the result is contiguous. Of a long unencoded chunk, only the
blocks with selected values are read. Every block is verified while it is in the CPU's caches, before any value is
decoded.

The storage's `Tuning` says how much to read at once and how many reads to have in flight: a disk performs best
with a few threads, a remote server with many requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tstore.data.pieces import Bytes, ChunkPiece, Piece, ReadJob, StackJob, Values, can_decode_into
from tstore.data.point_pieces import point_pieces
from tstore.data.runs import divide, stacked_pieces
from tstore.data.small_arrays import small_arrays
from tstore.errors import Corrupt, InvalidArgument, NotFound
from tstore.format.chunk_refs import ChunkRow, ChunkSource
from tstore.format.grid import Projection, Selection, chunk_coordinates, chunk_number
from tstore.format.points import PointProjection
from tstore.runtime.budget import aligned_offset, scratch
from tstore.runtime.pool import each, run
from tstore.storage.base import PackReader, Storage
from tstore.storage.cache import forget
from tstore.storage.objects import Tuning

__all__ = ["ReadJob", "new_values", "pack_reader", "planned_bytes", "read_chunks"]

AnyProjection = Projection | PointProjection

_BATCH_PIECES = 512  # at most in a batch
_LOOKUPS = 4096  # chunks that are looked up in segments at once
_WORKER_SHARE = 2 << 20  # bytes of pieces for which one more worker pays off


def new_values(path: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Values:
    """Return an uninitialized array to read into; raise `InvalidArgument` if it does not fit in memory."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        raise InvalidArgument(f"{path} does not fit in memory ({error}); read a part of it") from error


async def read_chunks(storage: Storage, jobs: Iterable[ReadJob | StackJob]) -> None:
    """Fill the `out` of every job.

    Raise `NotFound` for an unwritten chunk of a dense array, `Corrupt` for a damaged chunk or a missing pack, or
    `InvalidArgument` if memory is short.
    """

    def plan() -> list[Piece]:
        together, others = small_arrays(listed)
        pieces = (piece for job in others for piece in _pieces(job, storage.url, _store_fill_value))
        return [*together, *pieces]

    listed = list(jobs)
    pieces = await run(plan) if any(job.source.reads_segments for job in listed) else plan()
    if not pieces:
        return
    pieces.sort(key=_sort_key)
    tuning = storage.tuning
    batches = _batches(pieces, tuning)
    first = list(itertools.islice(batches, tuning.streams))
    workers = len(first)
    if not tuning.latency_bound:
        workers = min(workers, -(-sum(piece.size for piece in pieces) // _WORKER_SHARE))

    def read(batch: list[Piece]) -> None:
        try:
            _read_batch(storage, batch)
        except MemoryError as error:
            raise InvalidArgument(f"{batch[0].label}: too little memory to read it ({error})") from error
        except Corrupt:
            pack = batch[0].pack
            if isinstance(pack, bytes) or not forget(storage, pack):
                raise
            _read_batch(storage, batch)  # the damage may have been in a cached copy, which is deleted now

    await each(read, itertools.chain(first, batches), workers)


def planned_bytes(storage: Storage, jobs: Iterable[ReadJob | StackJob]) -> int:
    """Return how many bytes of packs `read_chunks` would read, gaps between pieces included.

    Raise `NotFound` for an unwritten chunk of a dense array. The `out` of the jobs is not changed.
    """
    pieces = [piece for job in jobs for piece in _pieces(job, storage.url, _leave_unchanged)]
    pieces.sort(key=_sort_key)
    spans = [
        (batch[0].offset, max(p.offset + p.size for p in batch)) for batch in _batches(pieces, storage.tuning)
    ]
    return sum(end - begin for begin, end in spans)


def _sort_key(piece: Piece) -> tuple[bool, str, int]:
    """Return a key that sorts pieces by pack and offset; those of inline packs come last."""
    pack = piece.pack
    return (True, "", piece.offset) if isinstance(pack, bytes) else (False, pack, piece.offset)


def _store_fill_value(job: ReadJob, projection: AnyProjection) -> None:
    job.out[projection.result] = job.meta.fill_value


def _leave_unchanged(job: ReadJob, projection: AnyProjection) -> None:
    pass


def _pieces(job: ReadJob | StackJob, url: str, fill: Callable[[ReadJob, AnyProjection], None]) -> Iterator[Piece]:
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
    if (
        meta.chunk_count == 1
        and meta.shape == meta.chunks
        and job.out.shape == meta.shape
        and isinstance(selection, Selection)
    ):
        reference = source.row(0)
        direct = meta.chain.identity and can_decode_into(job.out, meta)
        direct = direct and all(r.step == 1 for r in selection.axes)
        if reference is not None and direct:
            yield ChunkPiece.from_projection(job, reference, None)
            return
    pieces, projections = divide(job)
    yield from pieces
    for projection, reference in _references(projections, meta.counts, source):
        if reference is not None:
            if isinstance(projection, PointProjection):
                yield from point_pieces(job, reference, projection)
            else:
                yield ChunkPiece.from_projection(job, reference, projection)
            continue
        if not meta.sparse:
            raise _unwritten(job, url, projection.chunk)
        fill(job, projection)


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


def _batches(pieces: Iterable[Piece], tuning: Tuning) -> Iterator[list[Piece]]:
    """Yield batches of pieces that overlap or are close together in one pack, of up to about `tuning.batch` bytes.

    The pieces are sorted. A piece whose bytes the batch covers already is added even if the batch has that size.
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


def _read_batch(storage: Storage, batch: list[Piece]) -> None:
    """Read the pieces of a batch, with the gaps between them, in one call, and deliver them."""
    first = batch[0]
    reader = pack_reader(storage, first.pack, first.label)
    targets = [piece.destination() for piece in batch]
    if len(batch) == 1 and targets[0] is not None:
        _read_into(reader, first, storage)
        return
    if any(after.offset < before.offset + before.size for before, after in itertools.pairwise(batch)):
        _read_overlapping(reader, batch, targets, storage)
        return
    size = sum(aligned_offset(piece.size) for piece, target in zip(batch, targets, strict=True) if target is None)
    gap = max((b.offset - a.offset - a.size for a, b in itertools.pairwise(batch)), default=0)
    with scratch(size + gap) as memory:
        buffers: list[Any] = []
        data: list[Any] = []
        at, end = 0, first.offset
        for piece, target in zip(batch, targets, strict=True):
            if piece.offset > end:  # all gaps are read into the same memory, and ignored
                buffers.append(memory[size : size + piece.offset - end])
            if target is None:
                target = memory[at : at + piece.size]
                at += aligned_offset(piece.size)
            buffers.append(target)
            data.append(target)
            end = piece.offset + piece.size
        try:
            if end > first.offset:
                reader.read_into(first.offset, buffers, end - first.offset)
        except Corrupt as error:
            others = f" (or one of the {len(batch) - 1} after it)" if len(batch) > 1 else ""
            raise Corrupt(f"{first.label}{others}: {error}") from error
        for piece, buffer in zip(batch, data, strict=True):
            piece.deliver(buffer, storage.url)


def _read_overlapping(
    reader: PackReader, batch: list[Piece], targets: list[Bytes | None], storage: Storage
) -> None:
    """Read all bytes from the first piece to the last once, and deliver each piece from there."""
    begin, end = batch[0].offset, max(piece.offset + piece.size for piece in batch)
    with scratch(end - begin) as memory:
        read = memory[: end - begin]
        try:
            reader.read_into(begin, [read], end - begin)
        except Corrupt as error:
            raise Corrupt(f"{batch[0].label} (or one of the {len(batch) - 1} after it): {error}") from error
        for piece, target in zip(batch, targets, strict=True):
            data = read[piece.offset - begin : piece.offset - begin + piece.size]
            if target is not None:
                target[:] = data
                data = target
            piece.deliver(data, storage.url)


def _read_into(reader: PackReader, piece: Piece, storage: Storage) -> None:
    """Read a piece straight into the result, in parts that are verified while they are in the CPU's caches."""
    for part in piece.split(storage.tuning.piece):
        target = part.destination()
        assert target is not None
        try:
            reader.read_into(part.offset, [target], part.size)
        except Corrupt as error:
            raise Corrupt(f"{part.label}: {error}") from error
        part.deliver(target, storage.url)


def pack_reader(storage: Storage, pack: str | bytes, label: str) -> PackReader:
    """Return the reader of a pack; raise `Corrupt`, naming the chunk `label`, if the pack does not exist.

    With some storages, the first read raises the error instead, without naming the chunk.
    """
    if isinstance(pack, bytes):
        return _InlinePack(pack)
    try:
        return _RequiredPack(storage.reader(pack), pack, storage.url)
    except NotFound as error:
        raise Corrupt(f"{label}: {_missing_message(pack, storage.url)}") from error


def _missing_message(pack: str, url: str) -> str:
    return f"its pack {pack} is missing in {url}; restore it from a copy, or read another version"


class _InlinePack:
    """A pack stored inline in a manifest."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, offset: int, buffers: Sequence[Any], size: int) -> None:
        if offset + size > len(self._data):
            raise Corrupt(
                f"an inline pack of {len(self._data)} bytes ends before byte {offset + size}, where a chunk ends"
            )
        for buffer in buffers:
            buffer[:] = np.frombuffer(self._data, np.uint8, len(buffer), offset)
            offset += len(buffer)


class _RequiredPack:
    """A pack to which chunks refer: if it is missing, reading raises `Corrupt`."""

    def __init__(self, reader: PackReader, pack: str, url: str) -> None:
        self._reader = reader
        self._pack = pack
        self._url = url

    def read_into(self, offset: int, buffers: Sequence[Any], size: int) -> None:
        try:
            self._reader.read_into(offset, buffers, size)
        except NotFound as error:
            raise Corrupt(_missing_message(self._pack, self._url)) from error
