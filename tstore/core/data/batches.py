"""Group the chunks of write jobs into batches, and encode a batch; pure, no I/O.

Values that are not staged are copied into scratch memory before they are encoded and hashed. One call copies and
hashes all unencoded chunks of a batch.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.data.write_job import EncodedRun, StagedChunks, Values, WriteJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.gather import Source, copy_chunks, gather
from tstore.core.format.arrays.grid import boxes, chunk_coordinates, chunk_counts, chunk_number, chunk_numbers
from tstore.core.format.arrays.variable import bytes_in
from tstore.core.format.checksums import BLOCK
from tstore.core.runtime.budget import aligned_offset, scratch
from tstore.errors import InvalidArgument, NotFinite

__all__ = [
    "BATCH",
    "Batch",
    "BatchSize",
    "ChunkBox",
    "EncodedRun",
    "Stack",
    "StagedChunks",
    "StagedRun",
    "Values",
    "WriteJob",
    "batches",
    "box_numbers",
    "encoded_chunks",
]

_BATCH_CHUNKS = 512  # maximum chunks in a batch


class ChunkBox(NamedTuple):
    """A box of adjacent chunks of a job; the first has the coordinates `first`.

    Copying their values needs `scratch_size` bytes of scratch memory.
    """

    job: WriteJob
    first: tuple[int, ...]
    values: Values
    chunk_count: int
    scratch_size: int

    @property
    def meta(self) -> ArrayMeta:
        """The metadata of the array."""
        return self.job.meta

    def sources(self, offset: int) -> list[Source]:
        """Return the sources to gather: the values, if their chunks are stored unencoded."""
        return [Source(self.values, self.meta, offset)] if self.meta.chain.identity else []

    def gathered(self, data: memoryview, checks: bytes) -> EncodedRun:
        """Return the gathered chunks as a run."""
        return EncodedRun((self.job,), box_numbers(self), data, self.meta.encoded_size, checks)


class Stack:
    """Unencoded chunks of arrays that share their metadata, each no longer than a block.

    A checkpoint has many small arrays. The chunks of a stack are gathered by one call and written as one run.
    """

    __slots__ = ("_number_cache", "jobs", "meta", "numbers", "values")

    def __init__(self, meta: ArrayMeta) -> None:
        self.meta = meta
        self.jobs: list[WriteJob] = []
        self.numbers: list[int] = []
        self.values: list[Values] = []
        self._number_cache: dict[tuple[int, ...], int] = {}  # by coordinates

    def add(self, job: WriteJob, at: tuple[int, ...], values: Values) -> None:
        """Add the chunk of a job at these coordinates."""
        number = self._number_cache.get(at)
        if number is None:
            number = self._number_cache[at] = chunk_number(at, self.meta.counts)
        self.jobs.append(job)
        self.numbers.append(number)
        self.values.append(values)

    @property
    def chunk_count(self) -> int:
        """The number of chunks."""
        return len(self.numbers)

    @property
    def scratch_size(self) -> int:
        """The bytes of scratch memory that the chunks need."""
        return aligned_offset(len(self.numbers) * self.meta.encoded_size)

    def sources(self, offset: int) -> list[Source]:
        """Return the sources to gather: the chunks."""
        return [Source(self.values, self.meta, offset)]

    def gathered(self, data: memoryview, checks: bytes) -> EncodedRun:
        """Return the gathered chunks as a run."""
        return EncodedRun(self.jobs, self.numbers, data, self.meta.encoded_size, checks)


class StagedRun:
    """Staged chunks of equal length, contiguous in memory; they are written from there."""

    __slots__ = ("_memory", "_start", "_stop", "jobs", "meta", "numbers")
    scratch_size = 0

    def __init__(self, meta: ArrayMeta, memory: npt.NDArray[np.uint8], start: int) -> None:
        self.meta = meta
        self.jobs: list[WriteJob] = []
        self.numbers: list[int] = []
        self._memory = memory
        self._start = self._stop = start

    def continues(self, meta: ArrayMeta, memory: npt.NDArray[np.uint8], start: int) -> bool:
        """Return whether chunks at offset `start` of the memory continue this run."""
        return meta.encoded_size == self.meta.encoded_size and memory is self._memory and start == self._stop

    def add(self, job: WriteJob, numbers: Sequence[int]) -> None:
        """Add the next chunks in memory, with these numbers."""
        self.jobs += [job] * len(numbers)
        self.numbers += numbers
        self._stop += len(numbers) * self.meta.encoded_size

    @property
    def chunk_count(self) -> int:
        """The number of chunks."""
        return len(self.numbers)

    def sources(self, _: int) -> list[Source]:
        """Return nothing to gather."""
        return []

    def encoded(self) -> EncodedRun:
        """Return the chunks as a run."""
        data = self._memory[self._start : self._stop].data
        return EncodedRun(self.jobs, self.numbers, data, self.meta.encoded_size)


class BatchSize(NamedTuple):
    """The maximum bytes of a batch: of values copied to scratch memory, and of staged chunks.

    `encoded` is the maximum of copied values if some of them are encoded.
    """

    copied: int
    encoded: int
    staged: int

    def scratch_limit(self, meta: ArrayMeta) -> int:
        """Return the maximum bytes of copied values once chunks with this metadata are among them."""
        return self.copied if meta.chain.identity else self.encoded


BATCH = BatchSize(copied=2 << 20, encoded=1 << 20, staged=1 << 20)
"""The size of a batch that stays in the CPU's caches between the caller's memory and the pack."""


class Batch:
    """Chunks within `limits`, or one longer chunk."""

    __slots__ = ("_copied", "_stacks", "boxes", "chunk_count", "limits", "size")

    def __init__(self, limits: BatchSize) -> None:
        self.limits = limits
        self.boxes: list[ChunkBox | Stack | StagedRun] = []
        self.size = 0  # bytes of all values
        self._copied = 0  # bytes of the copied values
        self.chunk_count = 0
        self._stacks: dict[ArrayMeta, Stack] = {}

    @property
    def encoded_size(self) -> int:
        """The length of all chunks in bytes, after the codecs of fixed size and before compression."""
        return sum(box.meta.encoded_size * box.chunk_count for box in self.boxes)

    def fits(self, meta: ArrayMeta, size: int, chunk_count: int) -> bool:
        """Return whether `size` more bytes in this many chunks fit; an empty batch accepts any."""
        if not self.chunk_count:
            return True
        limit = self.limits.scratch_limit(meta)
        return self._copied + size <= limit and self.chunk_count + chunk_count <= _BATCH_CHUNKS

    def add(self, box: ChunkBox) -> None:
        """Add a box."""
        self.boxes.append(box)
        self._count(box.scratch_size, box.chunk_count)
        self._copied += box.scratch_size

    def stack(self, job: WriteJob, at: tuple[int, ...], values: Values) -> None:
        """Add a chunk to the stack of its metadata."""
        meta = job.meta
        stack = self._stacks.get(meta)
        if stack is None:
            stack = self._stacks[meta] = Stack(meta)
            self.boxes.append(stack)
        stack.add(job, at, values)
        self._count(meta.encoded_size, 1)
        self._copied += meta.encoded_size

    def add_staged(self, job: WriteJob, staged: StagedChunks, begin: int) -> int:
        """Add the staged chunks from `begin` that fit, at least one to an empty batch; return their number."""
        size = job.meta.encoded_size
        room = self.limits.staged - (self.size - self._copied)
        fit = min(room // size, _BATCH_CHUNKS - self.chunk_count)
        numbers = staged.numbers[begin : begin + max(fit, not self.chunk_count)]
        if not numbers:
            return 0
        start = staged.start + begin * size
        run = self.boxes[-1] if self.boxes else None
        if not isinstance(run, StagedRun) or not run.continues(job.meta, staged.memory, start):
            run = StagedRun(job.meta, staged.memory, start)
            self.boxes.append(run)
        run.add(job, numbers)
        self._count(len(numbers) * size, len(numbers))
        return len(numbers)

    def _count(self, size: int, chunk_count: int) -> None:
        self.size += size
        self.chunk_count += chunk_count


def batches(jobs: Iterable[WriteJob], limits: BatchSize = BATCH) -> Iterator[Batch]:
    """Yield all chunks in batches within these limits."""
    batch = Batch(limits)
    for job in jobs:
        for staged in job.staged:
            begin = batch.add_staged(job, staged, 0)
            while begin < len(staged.numbers):
                yield batch
                batch = Batch(limits)
                begin += batch.add_staged(job, staged, begin)
        meta = job.meta
        short = meta.chain.identity and meta.encoded_size <= BLOCK
        for origin, values in job.regions:
            if short and values.shape == meta.chunks and values.dtype == meta.dtype:
                if not batch.fits(meta, meta.encoded_size, 1):
                    yield batch
                    batch = Batch(limits)
                batch.stack(job, origin, values)
                continue
            for box in _boxes(job, origin, values, limits.scratch_limit(meta)):
                if not batch.fits(meta, box.scratch_size, box.chunk_count):
                    yield batch
                    batch = Batch(limits)
                batch.add(box)
    if batch.chunk_count:
        yield batch


def _boxes(job: WriteJob, origin: tuple[int, ...], values: Values, batch_size: int) -> Iterator[ChunkBox]:
    meta = job.meta
    if values.shape == meta.chunks:
        yield ChunkBox(job, origin, values, 1, _scratch_size(meta, values, 1))
        return
    counts = chunk_counts(values.shape, meta.chunks)
    size = meta.chunk_size * meta.dtype.itemsize
    # a chunk of values of variable length may be of any size
    max_chunks = 1 if meta.dtype.hasobject else max(1, min(_BATCH_CHUNKS, batch_size // max(1, size)))
    for box in boxes(counts, max_chunks):
        region = tuple(
            slice(r.start * c, min(r.stop * c, n)) for r, c, n in zip(box, meta.chunks, values.shape, strict=True)
        )
        first = tuple(o + r.start for o, r in zip(origin, box, strict=True))
        chunk_count = math.prod(len(r) for r in box)
        part = values[region]
        yield ChunkBox(job, first, part, chunk_count, _scratch_size(meta, part, chunk_count))


def _scratch_size(meta: ArrayMeta, values: Values, chunk_count: int) -> int:
    """Return the bytes that a copy of the values needs; for variable-length values, a lower bound."""
    variable = meta.dtype.hasobject
    return aligned_offset(bytes_in(values) if variable else chunk_count * meta.chunk_size * meta.dtype.itemsize)


@contextlib.contextmanager
def encoded_chunks(parts: Sequence[ChunkBox | Stack | StagedRun]) -> Iterator[list[EncodedRun]]:
    """Yield the encoded chunks of boxes, stacks and runs; their scratch memory is reused once the context ends."""
    offsets = list(itertools.accumulate((box.scratch_size for box in parts), initial=0))
    code_size = sum(box.meta.chain.out_size * box.chunk_count for box in parts)
    with scratch(offsets[-1] + code_size) as buffer:
        codes = buffer[offsets[-1] :]
        sources = [source for box, offset in zip(parts, offsets, strict=False) for source in box.sources(offset)]
        checks = iter(gather(sources, buffer))
        encoded: list[EncodedRun] = []
        for box, offset in zip(parts, offsets, strict=False):
            meta = box.meta
            if isinstance(box, StagedRun):
                encoded.append(box.encoded())
            elif isinstance(box, Stack) or meta.chain.identity:
                data = buffer[offset : offset + meta.encoded_size * box.chunk_count].data
                encoded.append(box.gathered(data, next(checks)))
            else:
                size = meta.chain.out_size * box.chunk_count
                encoded += _encoded_runs(box, copy_chunks(box.values, meta, buffer[offset:]), codes[:size])
                codes = codes[size:]
        yield encoded


def _encoded_runs(box: ChunkBox, chunks: Values, out: npt.NDArray[np.uint8]) -> list[EncodedRun]:
    meta, encoded = box.job.meta, []
    size = meta.chain.out_size
    for i, number in enumerate(box_numbers(box)):
        chunk = chunks[i, ...]  # an array even if 0-d; iteration would yield a scalar
        try:
            data = meta.chain.encode(chunk, out[i * size : (i + 1) * size])
        except InvalidArgument as error:
            message = f"{box.job.path}, chunk {chunk_coordinates(number, meta.counts)}: {error}"
            if not isinstance(error, NotFinite):
                raise InvalidArgument(message) from error
            advice = "repair the values, or store this array without a format (None as its codecs or rule)"
            raise NotFinite(f"{message}; {advice}") from error
        if meta.chain.fixed_length is None:
            data = _moved(data, chunk)
        encoded.append(EncodedRun((box.job,), (number,), data, len(data)))
    return encoded


def _moved(data: memoryview, chunk: Values) -> memoryview:
    """Move encoded bytes into the memory of their chunk, no longer needed, if they fit; return them.

    So the encoder's buffer is freed before the next chunk is encoded, and malloc reuses it. If the buffers of
    several chunks were freed together, malloc would return them to the system, and mapping new pages takes a third
    of the time of zstd.
    """
    if data.nbytes > min(chunk.nbytes, BLOCK) or chunk.dtype.hasobject:
        return data
    memory = chunk.reshape(-1).view(np.uint8)[: data.nbytes]
    memory[...] = data
    return memory.data


def box_numbers(box: ChunkBox) -> Sequence[int]:
    """Return the numbers of the box's chunks in the array's grid, in C order."""
    meta = box.job.meta
    if box.chunk_count == 1:
        return (chunk_number(box.first, meta.counts),)
    counts = chunk_counts(box.values.shape, meta.chunks)
    sides = [range(f, f + n) for f, n in zip(box.first, counts, strict=True)]
    numbers: list[int] = chunk_numbers(sides, meta.counts).tolist()
    return numbers
