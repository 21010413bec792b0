"""Writing to packs: values are copied, encoded, checksummed and compared with an earlier version.

The bytes written are always those that were hashed, even if the caller changes its arrays meanwhile: every byte is
first copied into a worker's scratch memory, and the copy is encoded, hashed and written while it is in the CPU's
caches. Short chunks are written in batches, many of them gathered by one strided copy. A long unencoded chunk
that is contiguous in memory is copied, hashed and written block by block. If a chunk has the same checksums as in
the earlier version, the new version refers to the old bytes, and none are written.

A file system serializes the writers of one file, so each worker has its own pack. A full pack is finished and the
next one begun.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.errors import InvalidArgument, NotFinite
from tstore.format.array_metadata import ArrayMeta
from tstore.format.checksums import BLOCK, CHECK_SIZE, block_checks, digest
from tstore.format.chunk_refs import ChunkRow, ChunkSource, chunk_rows
from tstore.format.grid import boxes, by_chunk, chunk_coordinates, chunk_counts, chunk_number, chunk_numbers
from tstore.runtime import world
from tstore.runtime.budget import aligned_offset, scratch
from tstore.runtime.pool import WORKERS, each
from tstore.storage.base import PackWriter, Storage
from tstore.storage.objects import BufferStream, Durability

__all__ = ["PackSet", "WriteJob"]

_BATCH = 1 << 20  # bytes: stays in a core's cache on the way from the caller's memory to the pack
_BATCH_CHUNKS = 512
_WORKER_SHARE = 2 << 20  # bytes for which one more worker pays off
_MAX_INLINE = 4096  # maximum encoded bytes of a transaction that are stored in its manifest rather than in a pack

Values = npt.NDArray[Any]


@dataclass(slots=True, eq=False, repr=False)
class WriteJob:
    """Values for whole chunks of one array, and the references to these chunks once they are written (`rows`).

    Each of `regions` is the coordinates of its first chunk and its values; it ends at the edge of a chunk or of
    the array; they are taken one by one, as chunks are written. `prior_chunks` are those of an earlier version,
    reused if their bytes are equal. A job without regions may be the `same_as` another: then it has its `rows`.
    """

    path: str
    meta: ArrayMeta
    regions: Iterable[tuple[tuple[int, ...], Values]]
    prior_chunks: ChunkSource | None = None
    same_as: WriteJob | None = None
    rows: list[ChunkRow] = field(default_factory=list, init=False)


class _ChunkBox(NamedTuple):
    """Neighbouring chunks of a job, from `first` on; their values need `scratch_size` bytes of scratch memory."""

    job: WriteJob
    first: tuple[int, ...]
    values: Values
    chunk_count: int
    scratch_size: int


class _EncodedRun(NamedTuple):
    """Encoded chunks of a job, each of `length` bytes, one after the other in `data`."""

    job: WriteJob
    numbers: Sequence[int]
    data: memoryview
    length: int

    def checks(self) -> list[bytes]:
        """Return the joined checksums of each chunk."""
        check = block_checks if self.length > BLOCK else digest
        step, data = self.length, self.data
        return [check(data[i : i + step]) for i in range(0, len(data), step)]

    def add_rows(self, pack: str | bytes, offset: int, checks: Sequence[bytes]) -> None:
        """Add to the job the references to these chunks, which were written to a pack at `offset`."""
        offsets = range(offset, offset + len(self.data), self.length)
        self.job.rows += chunk_rows(self.numbers, repeat(pack), offsets, repeat(self.length), checks)


class PackSet:
    """The packs and the inline chunks of one host in one transaction."""

    def __init__(self, storage: Storage, folder: str, durability: Durability) -> None:
        self._storage = storage
        self._folder = folder
        self._durability = durability
        self._idle: list[PackWriter] = []
        self._all: list[PackWriter] = []
        self._lock = threading.Lock()
        self._prefix = f"{folder}/pack-{world.token(4)}"
        self._created = 0
        self._inline = 0
        self.bytes_written = 0

    async def write(self, jobs: Iterable[WriteJob]) -> None:
        """Write the chunks of all jobs and fill their `rows`; they are durable only after `flush`."""
        rest = _batches(jobs)
        head = list(itertools.islice(rest, WORKERS * _WORKER_SHARE // _BATCH))
        if not head:
            return
        if len(head) == 1 and self._inline + _encoded_size(head[0]) <= _MAX_INLINE:
            self._write_inline(head[0])  # takes less time than the hop to a thread
            return
        size = sum(box.scratch_size for batch in head for box in batch)
        workers = max(1, min(WORKERS, -(-size // _WORKER_SHARE)))
        batches = itertools.chain(head, rest)
        del head  # a written batch must not keep the values of a region in memory
        await each(self._write_batch, batches, workers)

    async def flush(self) -> None:
        """Finish all packs; return when they are as durable as the transaction requires."""
        if self._all:
            await each(lambda pack: pack.finish(), self._idle)  # the others were finished when full
            await self._storage.flush(self._folder, self._durability)
        self._all, self._idle = [], []

    async def discard(self) -> None:
        """Discard all packs written since the last `flush`."""
        packs, self._all, self._idle = self._all, [], []
        await each(lambda pack: pack.discard(), packs)

    def _append(self, buffers: BufferStream, size: int) -> tuple[str, int]:
        """Append the buffers to an idle or new pack; return its key and their offset in it."""
        while True:
            with self._lock:
                pack = self._idle.pop() if self._idle else None
                if pack is None:
                    pack = self._storage.writer(f"{self._prefix}-{self._created}", self._durability)
                    self._created += 1
                    self._all.append(pack)
            try:
                offset = pack.append(buffers, size)
            except BaseException:
                with self._lock:
                    self._idle.append(pack)
                raise
            if offset is not None:
                with self._lock:
                    self._idle.append(pack)
                    self.bytes_written += size
                return pack.key, offset
            pack.finish()  # it is full

    def _write_inline(self, batch: list[_ChunkBox]) -> None:
        with _encoded_chunks(batch) as encoded:
            for run, checks in _reuse_unchanged(encoded):
                data = bytes(run.data)
                run.add_rows(data, 0, checks)
                self._inline += len(data)
                self.bytes_written += len(data)

    def _write_batch(self, batch: list[_ChunkBox]) -> None:
        short = []
        for box in batch:
            if not _is_long(box):
                short.append(box)
            elif not _reuse_long(box):
                self._write_long(box)
        if short:
            self._write_short(short)

    def _write_short(self, batch: list[_ChunkBox]) -> None:
        with _encoded_chunks(batch) as encoded:
            fresh = _reuse_unchanged(encoded)
            if not fresh:
                return
            buffers = [run.data for run, _ in fresh]
            key, offset = self._append(buffers, sum(map(len, buffers)))
        for run, checks in fresh:
            run.add_rows(key, offset, checks)
            offset += len(run.data)

    def _write_long(self, box: _ChunkBox) -> None:
        data = _bytes_of(box.values)
        checks: list[bytes] = []

        def blocks(buffer: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
            for start in range(0, len(data), BLOCK):
                block = buffer[: len(data) - start]
                np.copyto(block, data[start : start + BLOCK])
                checks.append(digest(block.data))
                yield block.data

        with scratch(BLOCK) as buffer:
            key, offset = self._append(blocks(buffer), len(data))
        [number] = _numbers(box)
        box.job.rows.append(ChunkRow(number, key, offset, len(data), b"".join(checks)))


def _reuse_unchanged(encoded: list[_EncodedRun]) -> list[tuple[_EncodedRun, list[bytes]]]:
    """Reuse the prior chunks where the bytes are equal; return the other runs with their checksums."""
    fresh = []
    for run in encoded:
        checks, prior = run.checks(), run.job.prior_chunks
        old = None if prior is None else prior.row(run.numbers[0])  # with prior chunks, each run is one chunk
        if old is not None and old.length == run.length and old.checks == checks[0]:
            run.job.rows.append(old)
        else:
            fresh.append((run, checks))
    return fresh


def _batches(jobs: Iterable[WriteJob]) -> Iterator[list[_ChunkBox]]:
    """Yield boxes of chunks in batches of about `_BATCH` bytes of values; a longer chunk is a batch by itself."""
    batch: list[_ChunkBox] = []
    size = chunks = 0
    for job in jobs:
        for origin, values in job.regions:
            for box in _boxes(job, origin, values):
                if batch and (size + box.scratch_size > _BATCH or chunks + box.chunk_count > _BATCH_CHUNKS):
                    yield batch
                    batch, size, chunks = [], 0, 0
                batch.append(box)
                size += box.scratch_size
                chunks += box.chunk_count
    if batch:
        yield batch


def _boxes(job: WriteJob, origin: tuple[int, ...], values: Values) -> Iterator[_ChunkBox]:
    meta = job.meta
    if values.shape == meta.chunks:
        yield _ChunkBox(job, origin, values, 1, aligned_offset(values.size * meta.dtype.itemsize))
        return
    counts = chunk_counts(values.shape, meta.chunks)
    size = meta.chunk_size * meta.dtype.itemsize
    max_chunks = max(1, min(_BATCH_CHUNKS, _BATCH // max(1, size)))
    for box in boxes(counts, max_chunks):
        region = tuple(
            slice(r.start * c, min(r.stop * c, n)) for r, c, n in zip(box, meta.chunks, values.shape, strict=True)
        )
        first = tuple(o + r.start for o, r in zip(origin, box, strict=True))
        chunks = math.prod(len(r) for r in box)
        yield _ChunkBox(job, first, values[region], chunks, aligned_offset(chunks * size))


def _is_long(box: _ChunkBox) -> bool:
    """Return whether the box is one unencoded chunk, longer than a block and contiguous in the caller's memory."""
    meta, values = box.job.meta, box.values
    return (
        meta.encoded_size > BLOCK
        and meta.chain.identity
        and values.shape == meta.chunks
        and values.dtype == meta.dtype
        and values.flags.c_contiguous
    )


def _reuse_long(box: _ChunkBox) -> bool:
    """Reuse the prior chunk of a long chunk if its bytes are equal; return whether they are.

    The caller's bytes are hashed without a copy. If they differ, they are copied and hashed again to be written.
    """
    if box.job.prior_chunks is None:
        return False
    data = _bytes_of(box.values)
    old = box.job.prior_chunks.row(_numbers(box)[0])
    if old is None or old.length != len(data):
        return False
    for i, start in enumerate(range(0, len(data), BLOCK)):
        if digest(data[start : start + BLOCK].data) != old.checks[i * CHECK_SIZE : (i + 1) * CHECK_SIZE]:
            return False
    box.job.rows.append(old)
    return True


def _bytes_of(values: Values) -> npt.NDArray[np.uint8]:
    """Return the bytes of a contiguous array as a view."""
    return values.reshape(-1).view(np.uint8)


def _encoded_size(batch: list[_ChunkBox]) -> int:
    """Return the encoded length of all chunks of a batch before compression, in bytes."""
    return sum(box.job.meta.encoded_size * box.chunk_count for box in batch)


@contextlib.contextmanager
def _encoded_chunks(batch: list[_ChunkBox]) -> Iterator[list[_EncodedRun]]:
    """Yield the encoded chunks of a batch, in scratch memory until the context ends."""
    raw = sum(box.scratch_size for box in batch)
    code_size = _encoded_size([box for box in batch if not box.job.meta.chain.plain])
    with scratch(raw + code_size) as buffer:
        values, codes = buffer[:raw], buffer[raw:]  # the parts that are still unused
        encoded: list[_EncodedRun] = []
        for box in batch:
            meta = box.job.meta
            chunks = _gather(box, values)
            values = values[box.scratch_size :]
            if meta.chain.identity:
                encoded += _unencoded_runs(box, chunks)
            else:
                size = 0 if meta.chain.plain else meta.encoded_size * box.chunk_count
                encoded += _encoded_runs(box, chunks, codes[:size])
                codes = codes[size:]
        yield encoded


def _unencoded_runs(box: _ChunkBox, chunks: Values) -> list[_EncodedRun]:
    data, numbers, length = _bytes_of(chunks).data, _numbers(box), box.job.meta.encoded_size
    count = len(numbers) if box.job.prior_chunks is None else 1  # each prior chunk is reused, or not, by itself
    return [
        _EncodedRun(box.job, numbers[i : i + count], data[i * length : (i + count) * length], length)
        for i in range(0, len(numbers), count)
    ]


def _encoded_runs(box: _ChunkBox, chunks: Values, out: npt.NDArray[np.uint8]) -> list[_EncodedRun]:
    meta, encoded = box.job.meta, []
    for i, (number, chunk) in enumerate(zip(_numbers(box), chunks, strict=True)):
        try:
            data = meta.chain.encode(chunk, out[i * meta.encoded_size : (i + 1) * meta.encoded_size])
        except InvalidArgument as error:
            message = f"{box.job.path}, chunk {chunk_coordinates(number, meta.counts)}: {error}"
            if not isinstance(error, NotFinite):
                raise InvalidArgument(message) from error
            advice = "repair the values, or store this array without a format (None as its codecs or rule)"
            raise NotFinite(f"{message}; {advice}") from error
        encoded.append(_EncodedRun(box.job, (number,), data, len(data)))
    return encoded


def _gather(box: _ChunkBox, buffer: npt.NDArray[np.uint8]) -> Values:
    """Copy the chunks of a box in C order to the front of a buffer, padded at the array's edge; return them."""
    meta, values = box.job.meta, box.values
    chunks = meta.chunks
    buffer = buffer[: meta.chunk_size * meta.dtype.itemsize * box.chunk_count]
    if values.shape == chunks:
        target = buffer.view(meta.dtype).reshape(chunks)
        np.copyto(target, values, casting="same_kind")
        return target[np.newaxis]
    counts = chunk_counts(values.shape, chunks)
    target = buffer.view(meta.dtype).reshape((*counts, *chunks))
    if all(n % c == 0 for n, c in zip(values.shape, chunks, strict=True)):
        np.copyto(target, by_chunk(values, chunks), casting="same_kind")
        return target.reshape(-1, *chunks)
    for at in np.ndindex(*counts):
        part = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunks, strict=True))]
        if part.shape != chunks:
            target[at] = meta.fill_value
        target[at][tuple(slice(n) for n in part.shape)] = part
    return target.reshape(-1, *chunks)


def _numbers(box: _ChunkBox) -> Sequence[int]:
    """Return the numbers of the box's chunks in the array's grid, in C order."""
    meta = box.job.meta
    if box.chunk_count == 1:
        return (chunk_number(box.first, meta.counts),)
    counts = chunk_counts(box.values.shape, meta.chunks)
    sides = [range(f, f + n) for f, n in zip(box.first, counts, strict=True)]
    numbers: list[int] = chunk_numbers(sides, meta.counts).tolist()
    return numbers
