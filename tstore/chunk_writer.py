"""The way of values into packs: gather, encode, checksum, compare with what is stored, write.

A batch is a few MiB of chunks. One worker takes it through all steps while it is in the caches, and appends it
to a pack of its own with one gathered write; a file system serialises writers of one file, so each worker has
its own pack. Chunks that lie contiguous in the caller's memory and are stored as they are get written straight
from there. A chunk whose checks equal those of the previous version becomes a reference to it and costs no
bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.chunks import ChunkRow, block_checks
from tstore.codec import ArrayMeta
from tstore.errors import NotFinite
from tstore.grid import boxes
from tstore.kv.base import Backend, Durability, PackWriter
from tstore.pool import WORKERS, each, run, scratch

__all__ = ["PackSet", "WriteJob"]

_BATCH = 4 << 20
_BATCH_CHUNKS = 512
_WORKER_SHARE = 2 << 20
INLINE = 4096
"""Encoded bytes of a transaction that travel in its manifest rather than in a pack."""

Values = npt.NDArray[Any]


class WriteJob:
    """Values for whole chunks of one array, and after the write the rows that refer to them.

    `pieces` are (chunk coordinates of the first element, values); values begin on a chunk's edge and end on
    one or at the array's edge. `prior` holds the rows of the version to compare with, by number.
    """

    __slots__ = ("meta", "path", "pieces", "prior", "rows")

    def __init__(
        self,
        path: str,
        meta: ArrayMeta,
        pieces: Sequence[tuple[tuple[int, ...], Values]],
        prior: Mapping[int, ChunkRow] | None = None,
    ) -> None:
        self.path = path
        self.meta = meta
        self.pieces = pieces
        self.prior = prior
        self.rows: list[ChunkRow] = []


class _Box(NamedTuple):
    """Some chunks of a job that are next to each other: `values` begin at chunk `first`."""

    job: WriteJob
    first: tuple[int, ...]
    values: Values
    chunks: int


class PackSet:
    """The packs and the inline chunks of one host in one transaction."""

    def __init__(self, backend: Backend, folder: str, durability: Durability) -> None:
        self._backend = backend
        self._folder = folder
        self._durability = durability
        self._idle: list[PackWriter] = []
        self._all: list[PackWriter] = []
        self._lock = threading.Lock()
        self._prefix = f"{folder}/pack-{secrets.token_hex(4)}"
        self._made = 0
        self._inline = 0
        self.bytes_written = 0

    async def write(self, jobs: Iterable[WriteJob]) -> None:
        """Fills the `rows` of the jobs; on return their bytes are written, though durable only later."""
        batches, first = itertools.tee(_batches(jobs))
        head = list(itertools.islice(first, 2))
        size = sum(_encoded(box) for batch in head for box in batch)
        if not head:
            return
        if len(head) == 1 and size + self._inline <= INLINE:
            await run(self._write_inline, head[0])
            return
        workers = max(1, min(WORKERS, -(-size // _WORKER_SHARE)))
        await each(self._write_batch, batches, workers)

    async def settle(self) -> None:
        """Returns when all that was written is durable, if that was asked for."""
        packs, self._all, self._idle = self._all, [], []
        if packs:
            await each(lambda pack: pack.finish(self._durability), packs)
            await self._backend.settle(self._folder, self._durability)

    async def discard(self) -> None:
        """Gives up what was written."""
        packs, self._all, self._idle = self._all, [], []
        await each(lambda pack: pack.discard(), packs)

    @contextlib.contextmanager
    def _pack(self) -> Iterator[PackWriter]:
        with self._lock:
            pack = self._idle.pop() if self._idle else None
            if pack is None:
                pack = self._backend.writer(f"{self._prefix}-{self._made}")
                self._made += 1
                self._all.append(pack)
        try:
            yield pack
        finally:
            with self._lock:
                self._idle.append(pack)

    def _write_inline(self, batch: list[_Box]) -> None:
        with _encoded_chunks(batch) as chunks:
            for job, number, data in chunks:
                row = ChunkRow(number, bytes(data), 0, len(data), block_checks(data))
                job.rows.append(_reused(job, row) or row)
                self._inline += len(data)
                self.bytes_written += len(data)

    def _write_batch(self, batch: list[_Box]) -> None:
        with _encoded_chunks(batch) as chunks:
            fresh = []
            buffers = []
            size = 0
            for job, number, data in chunks:
                row = ChunkRow(number, "", size, len(data), block_checks(data))
                reused = _reused(job, row)
                if reused is not None:
                    job.rows.append(reused)
                    continue
                fresh.append((job, row))
                buffers.append(data)
                size += len(data)
            if not fresh:
                return
            with self._pack() as pack:
                base = pack.append(buffers, size)
                key = pack.key
            for job, row in fresh:
                job.rows.append(row._replace(pack=key, offset=base + row.offset))
            with self._lock:
                self.bytes_written += size


def _reused(job: WriteJob, row: ChunkRow) -> ChunkRow | None:
    """The row of the previous version, if it refers to the same bytes."""
    old = job.prior.get(row.number) if job.prior else None
    return old if old is not None and old.length == row.length and old.checks == row.checks else None


def _encoded(box: _Box) -> int:
    return box.job.meta.encoded_bound * box.chunks


def _batches(jobs: Iterable[WriteJob]) -> Iterator[list[_Box]]:
    """Boxes of chunks in batches of about `_BATCH` bytes; a longer chunk is a batch of its own."""
    batch: list[_Box] = []
    size = chunks = 0
    for job in jobs:
        for origin, values in job.pieces:
            for box in _boxes(job, origin, values):
                raw = box.values.nbytes
                if batch and (size + raw > _BATCH or chunks + box.chunks > _BATCH_CHUNKS):
                    yield batch
                    batch, size, chunks = [], 0, 0
                batch.append(box)
                size += raw
                chunks += box.chunks
    if batch:
        yield batch


def _boxes(job: WriteJob, origin: tuple[int, ...], values: Values) -> Iterator[_Box]:
    meta = job.meta
    if values.shape == meta.chunks:
        yield _Box(job, origin, values, 1)
        return
    counts = tuple(-(-n // c) for n, c in zip(values.shape, meta.chunks, strict=True))
    most = max(1, min(_BATCH_CHUNKS, _BATCH // max(1, meta.chunk_size * meta.dtype.itemsize)))
    for box in boxes(counts, most):
        region = tuple(
            slice(r.start * c, min(r.stop * c, n)) for r, c, n in zip(box, meta.chunks, values.shape, strict=True)
        )
        first = tuple(o + r.start for o, r in zip(origin, box, strict=True))
        yield _Box(job, first, values[region], math.prod(len(r) for r in box))


@contextlib.contextmanager
def _encoded_chunks(batch: list[_Box]) -> Iterator[list[tuple[WriteJob, int, memoryview]]]:
    """The encoded chunks of a batch: views of the caller's memory, or of scratch while inside."""
    gathered = [None if _contiguous(box) else box.job.meta for box in batch]
    raw = sum(m.chunk_size * m.dtype.itemsize * box.chunks for m, box in zip(gathered, batch, strict=True) if m)
    packed = sum(_encoded(box) for box in batch if not box.job.meta.chain.identity)
    with scratch(raw) as plain, scratch(packed) as encoded:
        found: list[tuple[WriteJob, int, memoryview]] = []
        a = b = 0
        for box in batch:
            meta = box.job.meta
            if _contiguous(box):
                chunks = box.values.reshape(1, *meta.chunks)
            else:
                size = meta.chunk_size * meta.dtype.itemsize * box.chunks
                chunks = _gather(box, plain[a : a + size])
                a += size
            numbers = _numbers(box)
            if meta.chain.identity:
                data = chunks.reshape(-1).view(np.uint8).data
                step = meta.encoded_bound
                for i, number in enumerate(numbers):
                    found.append((box.job, number, data[i * step : (i + 1) * step]))
                continue
            for number, chunk in zip(numbers, chunks, strict=True):
                try:
                    data = meta.chain.encode(chunk, encoded[b : b + meta.encoded_bound])
                except NotFinite as error:
                    at = tuple(int(i) for i in np.unravel_index(number, meta.counts)) if meta.counts else ()
                    raise NotFinite(
                        f"{box.job.path}, chunk {at}: {error}; save this array without a low-bit codec"
                    ) from error
                found.append((box.job, number, data))
                b += meta.encoded_bound
        yield found


def _contiguous(box: _Box) -> bool:
    """Whether the box is one whole chunk that lies in memory as its codec reads it."""
    meta = box.job.meta
    values = box.values
    return values.shape == meta.chunks and values.dtype == meta.dtype and values.flags.c_contiguous


def _gather(box: _Box, buffer: npt.NDArray[np.uint8]) -> Values:
    """The chunks of a box, each contiguous, in C order; chunks at the array's edge are filled up."""
    meta = box.job.meta
    chunks, values = meta.chunks, box.values
    counts = tuple(-(-n // c) for n, c in zip(values.shape, chunks, strict=True))
    target = buffer.view(meta.dtype).reshape(*counts, *chunks)
    rank = len(chunks)
    order = tuple(i for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for i in pair)
    apart = target.transpose(order)  # count, length, count, length, …
    if all(n % c == 0 for n, c in zip(values.shape, chunks, strict=True)):
        split = tuple(x for pair in zip(counts, chunks, strict=True) for x in pair)
        np.copyto(apart, values.reshape(split), casting="same_kind")
        return target.reshape(-1, *chunks)
    for at in np.ndindex(*counts):
        inner = tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunks, strict=True))
        part = values[inner]
        if part.shape != chunks:
            target[at] = meta.fill_value
        target[at][tuple(slice(n) for n in part.shape)] = part
    return target.reshape(-1, *chunks)


def _numbers(box: _Box) -> list[int]:
    """The numbers of the box's chunks in the array's grid, in C order."""
    meta = box.job.meta
    if box.chunks == 1:
        number = 0
        for i, n in zip(box.first, meta.counts, strict=True):
            number = number * n + i
        return [number]
    sides = [
        np.arange(f, f + -(-n // c)) for f, n, c in zip(box.first, box.values.shape, meta.chunks, strict=True)
    ]
    grid = np.ix_(*sides)
    found: list[int] = np.ravel_multi_index(np.broadcast_arrays(*grid), meta.counts).reshape(-1).tolist()
    return found
