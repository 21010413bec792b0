"""The way of values out of packs: read, verify, decode, scatter.

References of all arrays of a call are sorted by pack and offset; neighbours are read together, straight into
the destination where a chunk lies there as it is stored. Every block is verified while it is in the caches,
before any value is decoded from it. Of a long chunk that is stored as it is, only the blocks that hold selected
values are read. Boxes of many small chunks that lie one behind the other are read at once and put into the
destination with one strided copy. How much is read at once, and how many reads are under way, the backend says
(`Transfer`): a disk wants few threads, a server far away many requests.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.data.boxes import ChunkBox, chunk_boxes
from tstore.errors import Corrupt, InvalidArgument, NotFound
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import BLOCK, CHECK_SIZE, ChunkRow, ChunkSource, block_checks
from tstore.format.grid import Cover, Selection, chunk_number, part_of
from tstore.runtime.budget import scratch
from tstore.runtime.pool import each
from tstore.storage.base import Backend, PackReader, Transfer
from tstore.storage.cache.store import forget

__all__ = ["ReadJob", "new_values", "pack_reader", "read_chunks"]

_BATCH_CHUNKS = 512
_WORKER_SHARE = 2 << 20
_ALIGNED = 64

Values = npt.NDArray[Any]


class ReadJob:
    """A selection of one array and where its values go.

    `out` has one axis per axis of the array (length 1 where an index dropped it); `source` is where the
    array's chunks are looked up.
    """

    __slots__ = ("meta", "out", "path", "selection", "source")

    def __init__(self, path: str, meta: ArrayMeta, source: ChunkSource, selection: Selection, out: Values) -> None:
        self.path = path
        self.meta = meta
        self.source = source
        self.selection = selection
        self.out = out


def new_values(path: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Values:
    """Return an array to read into; `InvalidArgument` where it does not fit into memory."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        raise InvalidArgument(f"{path}: {error}, which is more memory than there is; read a part of it") from error


class _Task(NamedTuple):
    pack: str | bytes
    offset: int
    length: int
    row: ChunkRow
    job: ReadJob
    cover: Cover | None  # None: the whole array is this one chunk, and `out` takes it as it is stored

    @property
    def where(self) -> str:
        at = self.cover.chunk if self.cover else (0,) * len(self.job.meta.shape)
        return f"{self.job.path}, chunk {at}"


class _Part(NamedTuple):
    """The bytes of a task that are wanted: `size` bytes at `offset`, `skipped` bytes into the chunk.

    `target` is where they go as they are stored, if they do.
    """

    task: _Task
    offset: int
    size: int
    checks: bytes
    skipped: int
    target: Values | None = None

    def damaged(self, url: str) -> Corrupt:
        return Corrupt(f"{self.task.where}: {self.task.row.mismatch(self.skipped, url)}")


_Work = _Task | ChunkBox


async def read_chunks(backend: Backend, jobs: Iterable[ReadJob]) -> None:
    """Fills the `out` of every job; `NotFound` for a chunk that was never written, `Corrupt` for a bad one."""
    tasks = [task for job in jobs for task in _tasks(job, backend.url)]
    if not tasks:
        return
    tasks.sort(key=_place)
    transfer = backend.transfer
    batches = _batches(tasks, transfer)
    first = list(itertools.islice(batches, transfer.streams))
    workers = len(first)
    if not transfer.waits:
        workers = min(workers, -(-sum(t.length for t in tasks) // _WORKER_SHARE))

    def read(batch: list[ChunkBox | _Part]) -> None:
        try:
            _read_batch(backend, batch)
        except MemoryError as error:
            where = batch[0].where if isinstance(batch[0], ChunkBox) else batch[0].task.where
            raise InvalidArgument(f"{where}: there is too little memory to read it ({error})") from error
        except Corrupt:
            pack = batch[0].pack if isinstance(batch[0], ChunkBox) else batch[0].task.pack
            if isinstance(pack, bytes) or not forget(backend, pack):
                raise
            _read_batch(backend, batch)

    await each(read, itertools.chain(first, batches), workers)


def _place(task: _Work) -> tuple[bool, str, int]:
    pack = task.pack
    return (True, "", task.offset) if isinstance(pack, bytes) else (False, pack, task.offset)


def _tasks(job: ReadJob, url: str) -> Iterator[_Work]:
    meta, source = job.meta, job.source
    if meta.chunk_count == 1 and meta.shape == meta.chunks and job.out.shape == meta.shape:
        row = source.row(0)
        if row is not None and _as_stored(job.out, meta) and all(r.step == 1 for r in job.selection.axes):
            yield _task(job, row, None)
            return
    found = chunk_boxes(job.path, meta, source, job.selection, job.out)
    yield from found.boxes
    for cover in found.others:
        row = source.row(chunk_number(cover.chunk, meta.counts))
        if row is not None:
            yield _task(job, row, cover)
            continue
        if not meta.sparse:
            raise NotFound(
                f"{url}: chunk {cover.chunk} of {job.path} was never written; write it, or create the array "
                "with sparse=True to read its fill value there"
            )
        part_of(job.out, cover.result)[...] = meta.fill_value


def _task(job: ReadJob, row: ChunkRow, cover: Cover | None) -> _Task:
    task = _Task(row.pack, row.offset, row.length, row, job, cover)
    try:
        job.meta.chain.check(row.length)
    except Corrupt as error:
        raise Corrupt(f"{task.where}: {error}") from error
    return task


def _as_stored(target: Values, meta: ArrayMeta) -> bool:
    return meta.chain.identity and target.flags.c_contiguous and target.dtype == meta.dtype


def _batches(tasks: Iterable[_Work], transfer: Transfer) -> Iterator[list[ChunkBox | _Part]]:
    """Boxes and parts of one pack that lie close together, up to about `transfer.batch` bytes."""
    batch: list[ChunkBox | _Part] = []
    begin = end = 0
    pack: str | bytes | None = None
    for task in tasks:
        for part in [task] if isinstance(task, ChunkBox) else _cut(_wanted(task), transfer.batch):
            near = (task.pack is pack or task.pack == pack) and 0 <= part.offset - end <= transfer.gap
            long = part.offset + part.size - begin > transfer.batch
            if batch and (not near or long or len(batch) == _BATCH_CHUNKS):
                yield batch
                batch = []
            if not batch:
                begin = part.offset
            batch.append(part)
            end, pack = part.offset + part.size, task.pack
    if batch:
        yield batch


def _cut(part: _Part, most: int) -> Iterator[_Part]:
    """The part; or its pieces, if it is longer than `most` and goes to its place as it is stored."""
    target = _destination(part) if part.size > most else None
    if target is None:
        yield part
        return
    for i in range(0, part.size, most):
        checks = part.checks[i // BLOCK * CHECK_SIZE : (i + most) // BLOCK * CHECK_SIZE]
        inside = target[i : i + most]
        yield _Part(part.task, part.offset + i, len(inside), checks, part.skipped + i, inside)


def _wanted(task: _Task) -> _Part:
    meta, cover, row = task.job.meta, task.cover, task.row
    if cover is None or cover.full or row.length <= BLOCK or not meta.chain.identity:
        return _Part(task, row.offset, row.length, row.checks, 0)
    low = high = 0
    for s, n in zip(cover.inside, meta.chunks, strict=True):
        low, high = low * n + s.start, high * n + s.stop - 1
    size = meta.dtype.itemsize
    first, last = low * size // BLOCK, -(-(high + 1) * size // BLOCK)
    skipped = first * BLOCK
    return _Part(
        task,
        row.offset + skipped,
        min(last * BLOCK, row.length) - skipped,
        row.checks[first * CHECK_SIZE : last * CHECK_SIZE],
        skipped,
    )


def _read_batch(backend: Backend, batch: list[ChunkBox | _Part]) -> None:
    first = batch[0] if isinstance(batch[0], ChunkBox) else batch[0].task
    reader = pack_reader(backend, first.pack, first.where)
    direct = [None if isinstance(part, ChunkBox) else _destination(part) for part in batch]
    if len(batch) == 1 and isinstance(batch[0], _Part) and direct[0] is not None:
        _read_long(reader, batch[0], direct[0], backend)
        return
    room = sum(-(-part.size // _ALIGNED) * _ALIGNED for part, d in zip(batch, direct, strict=True) if d is None)
    between = [b.offset - a.offset - a.size for a, b in itertools.pairwise(batch)]
    skipped = max(between, default=0)
    with scratch(room + skipped) as buffer:
        buffers: list[Any] = []
        data: list[Any] = []
        at, end = 0, batch[0].offset
        for part, target in zip(batch, direct, strict=True):
            if part.offset > end:
                buffers.append(buffer[room : room + part.offset - end])
            if target is None:
                target = buffer[at : at + part.size]
                at += -(-part.size // _ALIGNED) * _ALIGNED
            buffers.append(target)
            data.append(target)
            end = part.offset + part.size
        try:
            if end > batch[0].offset:
                reader.read_into(batch[0].offset, buffers, end - batch[0].offset)
        except Corrupt as error:
            behind = f" (or one of the {len(batch) - 1} behind it)" if len(batch) > 1 else ""
            raise Corrupt(f"{first.where}{behind}: {error}") from error
        for part, piece, target in zip(batch, data, direct, strict=True):
            if isinstance(part, ChunkBox):
                part.deliver(piece, backend.url)
            elif block_checks(piece.data) != part.checks:
                raise part.damaged(backend.url)
            elif target is None:
                _deliver(part, piece)


def _read_long(reader: PackReader, part: _Part, target: Values, backend: Backend) -> None:
    """One chunk straight into its place, verified piece by piece while each is in the caches."""
    most = backend.transfer.piece
    for i in range(0, part.size, most):
        piece = target[i : i + most]
        try:
            reader.read_into(part.offset + i, [piece], len(piece))
        except Corrupt as error:
            raise Corrupt(f"{part.task.where}: {error}") from error
        at = i // BLOCK * CHECK_SIZE
        checks = block_checks(piece.data)
        if checks != part.checks[at : at + len(checks)]:
            raise part.damaged(backend.url)


def _destination(part: _Part) -> Values | None:
    """The bytes of the result that the chunk fills as it is stored, if there are such."""
    if part.target is not None:
        return part.target
    task = part.task
    job, meta = task.job, task.job.meta
    if part.size != meta.encoded_bound or not meta.chain.identity:
        return None
    if task.cover is None:
        return job.out.reshape(-1).view(np.uint8)
    if not task.cover.full or any(s.step is not None and s.step < 0 for s in task.cover.result):
        return None
    target = part_of(job.out, task.cover.result)
    if target.shape != meta.chunks or not _as_stored(target, meta):
        return None
    return target.reshape(-1).view(np.uint8)


def _deliver(part: _Part, data: npt.NDArray[np.uint8]) -> None:
    """Decodes a verified chunk and puts the selected values in their places."""
    task = part.task
    job, meta, cover = task.job, task.job.meta, task.cover
    if cover is None:
        inside: tuple[slice, ...] = tuple(slice(0, n, 1) for n in meta.chunks)
        target = job.out
    else:
        inside, target = cover.inside, part_of(job.out, cover.result)
    if meta.chain.identity:
        strides = [math.prod(meta.chunks[i + 1 :]) * meta.dtype.itemsize for i in range(len(meta.chunks))]
        start = sum(s.start * t for s, t in zip(inside, strides, strict=True)) - part.skipped
        values: Values = np.ndarray(
            tuple(len(range(s.start, s.stop, s.step)) for s in inside),
            meta.dtype,
            buffer=data,
            offset=start,
            strides=tuple(t * s.step for s, t in zip(inside, strides, strict=True)),
        )
        np.copyto(target, values)
        return
    try:
        if target.shape == meta.chunks and target.dtype == meta.dtype and target.flags.c_contiguous:
            meta.chain.decode(data.data, target)
            return
        with scratch(meta.chunk_size * meta.dtype.itemsize) as room:
            decoded = room.view(meta.dtype).reshape(meta.chunks)
            meta.chain.decode(data.data, decoded)
            np.copyto(target, decoded[inside])
    except Corrupt as error:
        raise Corrupt(f"{task.where}: {error}") from error


class _InlinePack:
    """A pack that travels in a manifest."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, offset: int, buffers: Sequence[Any], size: int) -> None:
        if offset + size > len(self._data):
            raise Corrupt(f"an inline pack of {len(self._data)} bytes has no {size} bytes at {offset}")
        for buffer in buffers:
            buffer[:] = np.frombuffer(self._data, np.uint8, len(buffer), offset)
            offset += len(buffer)


class _NeededPack:
    """A pack that chunks refer to, so that it is `Corrupt` of the store where it is not there."""

    def __init__(self, reader: PackReader) -> None:
        self._reader = reader

    def read_into(self, offset: int, buffers: Sequence[Any], size: int) -> None:
        try:
            self._reader.read_into(offset, buffers, size)
        except NotFound as error:
            raise Corrupt(f"its pack is gone: {error}") from error


def pack_reader(backend: Backend, pack: str | bytes, where: str) -> PackReader:
    """The reader of a pack; `Corrupt` where it is gone, naming `where` the chunk is that needs it.

    Where that shows only in a read, its error does not name the chunk.
    """
    if isinstance(pack, bytes):
        return _InlinePack(pack)
    try:
        return _NeededPack(backend.reader(pack))
    except NotFound as error:
        raise Corrupt(f"{where}: its pack is gone: {error}") from error
