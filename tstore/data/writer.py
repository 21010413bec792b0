"""From values to packs: copy, encode, checksum, compare with the previous version, write.

What is written is what was hashed, even if the caller changes its arrays meanwhile: every byte is first copied
into a worker's scratch memory, and only the copy is encoded, hashed and written, while it is in the caches. Short
chunks travel in batches, many of them copied by one strided copy. A long chunk that lies contiguous in memory is
copied, hashed and written block by block. A chunk whose checksums equal those of the previous version becomes a
reference to it and costs no bytes.

A file system serialises the writers of one file, so each worker has a pack of its own. A pack that takes no more
is finished, and another begun.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.errors import NotFinite
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import BLOCK, CHECK_SIZE, ChunkSource, Run, block_checks, digest
from tstore.format.grid import boxes, chunk_counts, chunk_number, chunk_numbers
from tstore.runtime import world
from tstore.runtime.budget import scratch
from tstore.runtime.pool import WORKERS, each
from tstore.storage.base import Backend, BufferStream, Durability, PackWriter

__all__ = ["PackSet", "WriteJob"]

_BATCH = 1 << 20  # stays in a core's cache on its way from the caller's memory to the pack
_BATCH_CHUNKS = 512
_ALIGNMENT = 64
_WORKER_SHARE = 2 << 20
INLINE = 4096
"""Encoded bytes of a transaction that travel in its manifest rather than in a pack."""

Values = npt.NDArray[Any]


class WriteJob:
    """Values for whole chunks of one array, and after the write the runs of chunks that refer to them.

    `pieces` are (chunk coordinates of the first element, values); values begin on a chunk's edge and end on
    one or at the array's edge. `prior` is where the chunks of the version to compare with are looked up.
    """

    __slots__ = ("meta", "path", "pieces", "prior", "runs")

    def __init__(
        self,
        path: str,
        meta: ArrayMeta,
        pieces: Sequence[tuple[tuple[int, ...], Values]],
        prior: ChunkSource | None = None,
    ) -> None:
        self.path = path
        self.meta = meta
        self.pieces = pieces
        self.prior = prior
        self.runs: list[Run] = []


class _Box(NamedTuple):
    """Some chunks of a job that are next to each other: `values` begin at chunk `first`.

    `room` is how much scratch their values need, up to where the next box may begin.
    """

    job: WriteJob
    first: tuple[int, ...]
    values: Values
    chunks: int
    room: int


class _Encoded(NamedTuple):
    """Chunks of a job, `length` bytes each, one behind the other in `data`."""

    job: WriteJob
    numbers: Sequence[int]
    data: memoryview
    length: int

    def checks(self) -> bytes:
        """The checks of all of them."""
        check = block_checks if self.length > BLOCK else digest
        step, data = self.length, self.data
        return b"".join([check(data[i : i + step]) for i in range(0, len(data), step)])


class PackSet:
    """The packs and the inline chunks of one host in one transaction."""

    def __init__(self, backend: Backend, folder: str, durability: Durability) -> None:
        self._backend = backend
        self._folder = folder
        self._durability = durability
        self._idle: list[PackWriter] = []
        self._all: list[PackWriter] = []
        self._lock = threading.Lock()
        self._prefix = f"{folder}/pack-{world.token(4)}"
        self._made = 0
        self._inline = 0
        self.bytes_written = 0

    async def write(self, jobs: Iterable[WriteJob]) -> None:
        """Fills the `runs` of the jobs; on return their bytes are written, though durable only later."""
        batches, first = itertools.tee(_batches(jobs))
        head = list(itertools.islice(first, WORKERS * _WORKER_SHARE // _BATCH))
        del first
        if not head:
            return
        if len(head) == 1 and self._inline + _encoded_size(head[0]) <= INLINE:
            self._write_inline(head[0])  # so little takes less time than the way to a thread
            return
        size = sum(box.room for batch in head for box in batch)
        workers = max(1, min(WORKERS, -(-size // _WORKER_SHARE)))
        await each(self._write_batch, batches, workers)

    async def settle(self) -> None:
        """Returns when all that was written is durable, if that was asked for."""
        if self._all:
            await each(lambda pack: pack.finish(), self._idle)  # the others were finished when they were full
            await self._backend.settle(self._folder, self._durability)
        self._all, self._idle = [], []

    async def discard(self) -> None:
        """Gives up what was written and not yet settled."""
        packs, self._all, self._idle = self._all, [], []
        await each(lambda pack: pack.discard(), packs)

    def _append(self, buffers: BufferStream, size: int) -> tuple[str, int]:
        """Puts the buffers into a pack; returns its key, and their offset in it."""
        while True:
            with self._lock:
                pack = self._idle.pop() if self._idle else None
                if pack is None:
                    pack = self._backend.writer(f"{self._prefix}-{self._made}", self._durability)
                    self._made += 1
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
                return pack.key, offset
            pack.finish()

    def _write_inline(self, batch: list[_Box]) -> None:
        with _encoded_chunks(batch) as pieces:
            for piece, checks in _fresh(pieces):
                data = bytes(piece.data)
                piece.job.runs.append(Run(piece.numbers, data, 0, piece.length, checks))
                self._inline += len(data)
                self.bytes_written += len(data)

    def _write_batch(self, batch: list[_Box]) -> None:
        short = []
        for box in batch:
            if not _is_long(box):
                short.append(box)
            elif not _is_unchanged(box):
                self._write_long(box)
        if short:
            self._write_short(short)

    def _write_short(self, batch: list[_Box]) -> None:
        with _encoded_chunks(batch) as pieces:
            fresh = _fresh(pieces)
            if not fresh:
                return
            buffers = [piece.data for piece, _ in fresh]
            size = sum(map(len, buffers))
            key, offset = self._append(buffers, size)
        for piece, checks in fresh:
            piece.job.runs.append(Run(piece.numbers, key, offset, piece.length, checks))
            offset += len(piece.data)
        with self._lock:
            self.bytes_written += size

    def _write_long(self, box: _Box) -> None:
        data = _bytes_of(box.values)
        checks: list[bytes] = []

        def blocks(room: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
            for start in range(0, len(data), BLOCK):
                block = room[: len(data) - start]
                np.copyto(block, data[start : start + BLOCK])
                checks.append(digest(block.data))
                yield block.data

        with scratch(BLOCK) as room:
            key, offset = self._append(blocks(room), len(data))
        box.job.runs.append(Run(_numbers(box), key, offset, len(data), b"".join(checks)))
        with self._lock:
            self.bytes_written += len(data)


def _fresh(pieces: list[_Encoded]) -> list[tuple[_Encoded, bytes]]:
    """What must be written, with its checks; what the previous version holds already becomes a run of that."""
    fresh = []
    for piece in pieces:
        checks = piece.checks()
        if piece.job.prior is None:
            fresh.append((piece, checks))
            continue
        old = piece.job.prior.row(piece.numbers[0])  # with a prior version, each piece is one chunk
        if old is not None and old.length == piece.length and old.checks == checks:
            piece.job.runs.append(Run(piece.numbers, old.pack, old.offset, old.length, checks))
        else:
            fresh.append((piece, checks))
    return fresh


def _batches(jobs: Iterable[WriteJob]) -> Iterator[list[_Box]]:
    """Boxes of chunks in batches of about `_BATCH` bytes of values; a longer chunk is a batch of its own."""
    batch: list[_Box] = []
    size = chunks = 0
    for job in jobs:
        for origin, values in job.pieces:
            for box in _boxes(job, origin, values):
                if batch and (size + box.room > _BATCH or chunks + box.chunks > _BATCH_CHUNKS):
                    yield batch
                    batch, size, chunks = [], 0, 0
                batch.append(box)
                size += box.room
                chunks += box.chunks
    if batch:
        yield batch


def _boxes(job: WriteJob, origin: tuple[int, ...], values: Values) -> Iterator[_Box]:
    meta = job.meta
    if values.shape == meta.chunks:
        yield _Box(job, origin, values, 1, _aligned(values.size * meta.dtype.itemsize))
        return
    counts = chunk_counts(values.shape, meta.chunks)
    size = meta.chunk_size * meta.dtype.itemsize
    most = max(1, min(_BATCH_CHUNKS, _BATCH // max(1, size)))
    for box in boxes(counts, most):
        region = tuple(
            slice(r.start * c, min(r.stop * c, n)) for r, c, n in zip(box, meta.chunks, values.shape, strict=True)
        )
        first = tuple(o + r.start for o, r in zip(origin, box, strict=True))
        chunks = math.prod(len(r) for r in box)
        yield _Box(job, first, values[region], chunks, _aligned(chunks * size))


def _is_long(box: _Box) -> bool:
    """Whether the box is one chunk of more than a block that lies in the caller's memory as it is stored."""
    meta, values = box.job.meta, box.values
    return (
        meta.encoded_bound > BLOCK
        and meta.chain.identity
        and values.shape == meta.chunks
        and values.dtype == meta.dtype
        and values.flags.c_contiguous
    )


def _is_unchanged(box: _Box) -> bool:
    """Whether the previous version has the bytes of a long chunk, which then becomes a reference to them.

    Nothing is copied: the caller's bytes were equal when they were hashed, and they are not written.
    """
    numbers, data = _numbers(box), _bytes_of(box.values)
    old = None if box.job.prior is None else box.job.prior.row(numbers[0])
    if old is None or old.length != len(data):
        return False
    for i, start in enumerate(range(0, len(data), BLOCK)):
        if digest(data[start : start + BLOCK].data) != old.checks[i * CHECK_SIZE : (i + 1) * CHECK_SIZE]:
            return False
    box.job.runs.append(Run(numbers, old.pack, old.offset, old.length, old.checks))
    return True


def _bytes_of(values: Values) -> npt.NDArray[np.uint8]:
    """The bytes of a contiguous array, as a view."""
    return values.reshape(-1).view(np.uint8)


def _encoded_size(batch: list[_Box]) -> int:
    """Bytes that the chunks of a batch have at most once they are encoded."""
    return sum(box.job.meta.encoded_bound * box.chunks for box in batch)


@contextlib.contextmanager
def _encoded_chunks(batch: list[_Box]) -> Iterator[list[_Encoded]]:
    """The encoded chunks of a batch, in scratch while inside."""
    raw = sum(box.room for box in batch)
    encoded = _encoded_size([box for box in batch if not box.job.meta.chain.plain])
    with scratch(raw + encoded) as room:
        values, codes = room[:raw], room[raw:]
        pieces: list[_Encoded] = []
        for box in batch:
            meta = box.job.meta
            chunks, values = _gather(box, values), values[box.room :]
            if meta.chain.identity:
                pieces += _stored_as_is(box, chunks)
            else:
                size = 0 if meta.chain.plain else meta.encoded_bound * box.chunks
                pieces += _encode(box, chunks, codes[:size])
                codes = codes[size:]
        yield pieces


def _aligned(size: int) -> int:
    """The first offset behind that many bytes at which values of any dtype are aligned."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _stored_as_is(box: _Box, chunks: Values) -> list[_Encoded]:
    data, numbers, length = _bytes_of(chunks).data, _numbers(box), box.job.meta.encoded_bound
    if box.job.prior is None or len(numbers) == 1:
        return [_Encoded(box.job, numbers, data, length)]
    return [
        _Encoded(box.job, (number,), data[i * length : (i + 1) * length], length)
        for i, number in enumerate(numbers)
    ]


def _encode(box: _Box, chunks: Values, out: npt.NDArray[np.uint8]) -> list[_Encoded]:
    meta, pieces = box.job.meta, []
    for i, (number, chunk) in enumerate(zip(_numbers(box), chunks, strict=True)):
        try:
            room = out[i * meta.encoded_bound : (i + 1) * meta.encoded_bound]
            data = meta.chain.encode(chunk, room)
        except NotFinite as error:
            at = tuple(int(k) for k in np.unravel_index(number, meta.counts)) if meta.counts else ()
            raise NotFinite(
                f"{box.job.path}, chunk {at}: {error}; repair the values, or leave this array as it is by a "
                "rule with None"
            ) from error
        pieces.append(_Encoded(box.job, (number,), data, len(data)))
    return pieces


def _gather(box: _Box, buffer: npt.NDArray[np.uint8]) -> Values:
    """A copy of the chunks of a box at the front of a buffer, in C order; those at the edge are filled up."""
    meta, values = box.job.meta, box.values
    chunks = meta.chunks
    buffer = buffer[: meta.chunk_size * meta.dtype.itemsize * box.chunks]
    if values.shape == chunks:
        target = buffer.view(meta.dtype).reshape(chunks)
        np.copyto(target, values, casting="same_kind")
        return target[np.newaxis]
    counts = chunk_counts(values.shape, chunks)
    target = buffer.view(meta.dtype).reshape((*counts, *chunks))
    if all(n % c == 0 for n, c in zip(values.shape, chunks, strict=True)):
        rank = len(chunks)
        order = [i for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for i in pair]
        split = [x for pair in zip(counts, chunks, strict=True) for x in pair]
        np.copyto(target.transpose(order), values.reshape(split), casting="same_kind")
        return target.reshape(-1, *chunks)
    for at in np.ndindex(*counts):
        part = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunks, strict=True))]
        if part.shape != chunks:
            target[at] = meta.fill_value
        target[at][tuple(slice(n) for n in part.shape)] = part
    return target.reshape(-1, *chunks)


def _numbers(box: _Box) -> Sequence[int]:
    """The numbers of the box's chunks in the array's grid, in C order."""
    meta = box.job.meta
    if box.chunks == 1:
        return (chunk_number(box.first, meta.counts),)
    counts = chunk_counts(box.values.shape, meta.chunks)
    sides = [range(f, f + n) for f, n in zip(box.first, counts, strict=True)]
    found: list[int] = chunk_numbers(sides, meta.counts).tolist()
    return found
