"""Copies of the values of a save, made in worker threads, in memory that the next save reuses."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.data.write_job import StagedChunks
from tstore.core.data.writer import WriteJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import chunk_numbers, view_as_chunks
from tstore.core.format.checksums import BLOCK
from tstore.core.runtime.budget import aligned_offset, returnable_buffer
from tstore.core.runtime.pool import each

__all__ = ["StagingMemory"]

_BLOCK = 8 << 20  # bytes that a worker copies at a time
_MAX_PAIRS = 256  # arrays that a worker copies at a time
_MIN_COPY = 1 << 10  # contiguous bytes; copying shorter runs takes far longer

Values = npt.NDArray[Any]
Pair = tuple[Values, Values]
"""An array to fill, and the values to copy into it."""


class StagingMemory:
    """A reusable buffer for the values of one save; it grows to the largest save, and is freed with the object.

    Mapping fresh pages takes as long as the copy itself, so a series of saves should use one object.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    async def copy(self, jobs: Sequence[WriteJob]) -> None:
        """Replace the values of the jobs by copies, which are valid until the next call.

        Whole unencoded chunks, if more than `BLOCK` bytes together, are copied in their stored form
        (`WriteJob.staged`).
        """
        parts = [[part for region in job.regions for part in _parts(job.meta, *region)] for job in jobs]
        size = sum(aligned_offset(part.values.nbytes) for job_parts in parts for part in job_parts)
        if size > self._buffer.size:
            self._buffer = np.empty(0, np.uint8)  # free it before the larger one is allocated
            self._buffer = _large_buffer(size)
        pairs: list[Pair] = []
        copied = []
        offset = 0
        for job_parts in parts:
            staged: list[StagedChunks] = []
            regions: list[tuple[tuple[int, ...], Values]] = []
            for origin, values, numbers in job_parts:
                memory = self._buffer[offset : offset + values.nbytes]
                if numbers:
                    copy = memory.view(values.dtype).reshape(values.shape)
                    staged.append(StagedChunks(numbers, self._buffer, offset))
                else:
                    copy = _like(values, memory)
                    regions.append((origin, copy))
                pairs.append((copy, values))
                offset += aligned_offset(values.nbytes)
            copied.append((staged, regions))
        await each(_copy, _batches(pairs))
        for job, (staged, regions) in zip(jobs, copied, strict=True):
            job.staged, job.regions = staged, regions


class _Part(NamedTuple):
    """The values of a region, or a view of the chunks with the given `numbers`."""

    origin: tuple[int, ...]
    values: Values
    numbers: Sequence[int] = ()


def _parts(meta: ArrayMeta, origin: tuple[int, ...], values: Values) -> Iterator[_Part]:
    """Yield the leading whole chunks of a region, if they can be stored unchanged, and the rest."""
    rows = _rows_to_store(meta, values)
    if rows:
        chunks = view_as_chunks(values[:rows], meta.chunks)
        sides = [range(o, o + n) for o, n in zip(origin, chunks.shape, strict=False)]
        yield _Part(origin, chunks, chunk_numbers(sides, meta.counts).tolist())
        if rows == len(values):
            return
        origin, values = (origin[0] + rows // meta.chunks[0], *origin[1:]), values[rows:]
    yield _Part(origin, values)


def _rows_to_store(meta: ArrayMeta, values: Values) -> int:
    """Return how many leading rows of a region form whole chunks that can be stored unchanged.

    Return 0 if they have few bytes, or if copying them in chunk order would be slow.
    """
    if not (meta.chain.identity and values.dtype == meta.dtype and values.flags.c_contiguous):
        return 0
    if values.nbytes <= BLOCK or any(n % c for n, c in zip(values.shape[1:], meta.chunks[1:], strict=True)):
        return 0
    rows = len(values) // meta.chunks[0] * meta.chunks[0]
    chunks = view_as_chunks(values[:rows], meta.chunks)
    return rows if chunks.flags.c_contiguous or chunks.shape[-1] * chunks.itemsize >= _MIN_COPY else 0


def _large_buffer(size: int) -> npt.NDArray[np.uint8]:
    try:
        buffer = returnable_buffer(size)
    except OSError as error:
        raise MemoryError(f"no memory for a copy of {size:,} bytes; staging='turns' makes no copy") from error
    memory = buffer.base
    while isinstance(memory, memoryview):
        memory = memory.obj
    if isinstance(memory, mmap.mmap) and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # far fewer page faults
    return buffer


def _like(values: Values, memory: npt.NDArray[np.uint8]) -> Values:
    """View memory as an array with the shape, dtype and order of `values`."""
    flat = memory.view(values.dtype)
    if values.flags.f_contiguous and not values.flags.c_contiguous:
        return flat.reshape(values.shape[::-1]).T
    return flat.reshape(values.shape)


def _batches(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield batches of about `_BLOCK` bytes of pairs; longer arrays are split into blocks."""
    batch: list[Pair] = []
    size = 0
    for pair in pairs:
        if batch and (size + pair[1].nbytes > _BLOCK or len(batch) == _MAX_PAIRS):
            yield batch
            batch, size = [], 0
        if pair[1].nbytes > _BLOCK:
            yield from ([block] for block in _blocks(*pair))
        else:
            batch.append(pair)
            size += pair[1].nbytes
    if batch:
        yield batch


def _blocks(copy: Values, values: Values) -> Iterator[Pair]:
    """Yield a long array in blocks along its first axis; contiguous arrays are flattened first."""
    if copy.flags.f_contiguous and values.flags.f_contiguous:
        copy, values = copy.T, values.T
    if copy.flags.c_contiguous and values.flags.c_contiguous:
        copy, values = copy.reshape(-1), values.reshape(-1)
    while len(values) == 1:
        copy, values = copy[0], values[0]
    rows = max(1, _BLOCK // (values.nbytes // len(values)))
    for start in range(0, len(values), rows):
        yield copy[start : start + rows], values[start : start + rows]


def _copy(batch: Sequence[Pair]) -> None:
    for copy, values in batch:
        np.copyto(copy, values)
