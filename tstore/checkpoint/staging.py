"""Copies of the values of a save, made in worker threads, in memory that the next save uses again."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.data.writer import WriteJob
from tstore.runtime.budget import aligned_offset, returnable_buffer
from tstore.runtime.pool import each

__all__ = ["StagingMemory"]

_BLOCK = 8 << 20  # bytes that a worker copies at a time
_MAX_PAIRS = 256  # arrays that a worker copies at a time

Values = npt.NDArray[Any]
Pair = tuple[Values, Values]
"""An array to fill, and the values to copy into it."""


class StagingMemory:
    """Memory for the values of one save at a time; it grows to the largest save, and is freed with the object.

    Mapping fresh pages takes as long as the copy itself, so a series of saves should use one object.
    """

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    async def copy(self, jobs: Sequence[WriteJob]) -> None:
        """Replace the values of the jobs by copies, which are valid until the next call."""
        size = sum(aligned_offset(values.nbytes) for job in jobs for _, values in job.regions)
        if size > self._buffer.size:
            self._buffer = np.empty(0, np.uint8)  # freed before the larger one is made
            self._buffer = _large_buffer(size)
        pairs: list[Pair] = []
        copied: list[list[tuple[tuple[int, ...], Values]]] = []
        offset = 0
        for job in jobs:
            regions = []
            for origin, values in job.regions:
                copy = _like(values, self._buffer[offset : offset + values.nbytes])
                offset += aligned_offset(values.nbytes)
                pairs.append((copy, values))
                regions.append((origin, copy))
            copied.append(regions)
        await each(_copy, _batches(pairs))
        for job, regions in zip(jobs, copied, strict=True):
            job.regions = regions


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
    """Return memory as an array of the shape, dtype and order of some values."""
    flat = memory.view(values.dtype)
    if values.flags.f_contiguous and not values.flags.c_contiguous:
        return flat.reshape(values.shape[::-1]).T
    return flat.reshape(values.shape)


def _batches(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield the pairs in lists of about `_BLOCK` bytes, and longer arrays in blocks."""
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
    """Yield a long array in blocks along its first axis; a contiguous array is flattened first."""
    if values.flags.f_contiguous:
        copy, values = copy.T, values.T
    if values.flags.c_contiguous:
        copy, values = copy.reshape(-1), values.reshape(-1)
    rows = max(1, _BLOCK // (values.nbytes // len(values)))
    for start in range(0, len(values), rows):
        yield copy[start : start + rows], values[start : start + rows]


def _copy(batch: Sequence[Pair]) -> None:
    for copy, values in batch:
        np.copyto(copy, values)
