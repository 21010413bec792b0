"""The values of arrays, for functions in threads: many small arrays at a time, large arrays slab by slab."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tstore.core.data.pieces import ReadJob
from tstore.core.data.reader import new_values
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import boxes, part_of
from tstore.core.runtime.budget import page_aligned, prefer_huge_pages, returnable_buffer
from tstore.core.runtime.pool import each, run
from tstore.core.snapshot import Snapshot

__all__ = ["MEMORY", "SLAB", "Region", "ReusedMemory", "Sample", "ValueCache", "Values", "batches", "in_threads"]

T = TypeVar("T")
R = TypeVar("R")

SLAB = 16 << 20
"""Bytes of values that are processed together."""

MEMORY = 256_000_000
"""Bytes of values that a quantization caches by default, so as not to read them again."""

_STREAMS = 4  # arrays read slab by slab at the same time

_SAMPLE_BYTES = 4 << 20
"""Bytes of values in a sample of an array, which suffice for the sizes and errors of all formats."""

_BATCH = 64
"""The maximum number of arrays in a batch: enough to make its overhead small, few enough for several batches."""

Region = tuple[slice, ...]


class Values(NamedTuple):
    """The values of one array, in memory or read a region at a time. Use it in threads only: `read` may block.

    The values of a region are valid until the next region is read.
    """

    path: str
    meta: ArrayMeta
    read: Callable[[Region], npt.NDArray[Any]]

    @staticmethod
    def in_memory(path: str, meta: ArrayMeta, values: npt.NDArray[Any]) -> Values:
        """Return the values of an array in memory."""
        return Values(path, meta, lambda region: part_of(values, region))

    def slabs(self) -> Iterator[tuple[Region, npt.NDArray[Any]]]:
        """Yield regions that cover the array in C order, each of at most a slab, with their values."""
        for box in boxes(self.meta.shape, SLAB // self.meta.dtype.itemsize):
            region = tuple(slice(r.start, r.stop) for r in box)
            yield region, self.read(region)


class Sample:
    """About 4 MiB of values of an array, from its slabs: every k-th index along the longest axis.

    Values that share an offset stay together: rows along `axis` are sampled along another axis, and if the longest
    axis is the one divided into blocks, the sample has every k-th block. An array of one slab is its own sample.
    `dtype` is that of the values, or of weights of the values.
    """

    def __init__(self, meta: ArrayMeta, dtype: np.dtype[Any], axis: int | None, block: int | None) -> None:
        shape = list(meta.shape)
        group_axis = -1 if axis is None and block is not None else axis  # a block alone divides the last axis
        group_axis = group_axis % len(shape) if group_axis is not None and shape else None
        axes = [k for k in range(len(shape)) if block is not None or k != group_axis]  # axes to sample along
        self._along = max(axes, key=lambda k: shape[k], default=0)
        self._unit = block if block is not None and self._along == group_axis else 1  # indices that stay together
        is_sampled = axes and meta.nbytes > _SAMPLE_BYTES
        self._step = -(-meta.nbytes // _SAMPLE_BYTES) if is_sampled else 1  # every k-th unit is sampled
        self._shape = meta.shape
        if shape:
            shape[self._along] = -(-shape[self._along] // (self._unit * self._step)) * self._unit
        self.values: npt.NDArray[Any] = page_aligned(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def add(self, region: Region, slab: npt.NDArray[Any]) -> None:
        """Add the values of a slab that belong to the sample."""
        if slab.shape == self._shape:
            self.values = slab
            return
        axis, unit, step = self._along, self._unit, self._step
        start, stop = region[axis].start, region[axis].stop
        first = -(-(start // unit) // step) * step  # the first unit to sample
        indices = (np.arange(first * unit, stop, step * unit)[:, None] + np.arange(unit)).ravel()
        indices = indices[(indices >= start) & (indices < stop)]
        if indices.size:
            sampled = slab.take(indices - start, axis=axis)
            position = indices[0] // unit // step * unit + indices[0] % unit  # the first index within the sample
            along = slice(position, position + sampled.shape[axis])
            self.values[(*region[:axis], along, *region[axis + 1 :])] = sampled


class ValueCache:
    """A cache of at most `limit` bytes, which keeps the values of arrays from their study to their encoding.

    An array that is larger than a slab is read slab by slab, for each pass, if it exceeds the limit. Otherwise it
    gets the memory of arrays that were dropped, since fresh memory would cost page faults. Smaller arrays are in
    memory while their batch is in use, even beyond the limit.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._size = 0  # bytes of the arrays that are in use or cached
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        self._slabs: list[ReusedMemory] = []  # unused slabs
        self._free: list[npt.NDArray[np.uint8]] = []  # memory of large arrays that were dropped

    @contextlib.asynccontextmanager
    async def read(self, snapshot: Snapshot, batch: Sequence[str]) -> AsyncIterator[list[Values]]:
        """Yield the values of the arrays of a batch (`batches`), and cache them afterwards if there is room."""
        metas = {path: snapshot.tree.nodes[path].meta for path in batch}
        arrays = {path: self._arrays.pop(path) for path in batch if path in self._arrays}
        absent = [path for path in batch if path not in arrays]
        size = sum(metas[path].nbytes for path in absent)
        if size > SLAB and not self._make_room(size):
            slabs = [self._slabs.pop() if self._slabs else ReusedMemory() for _ in batch]
            size = self._limit // _STREAMS
            yield [
                await _streamed_values(snapshot, path, slab, size) for path, slab in zip(batch, slabs, strict=True)
            ]
            self._slabs += slabs
            return
        self._size += size
        arrays.update({path: self._new_array(path, metas[path]) for path in absent})
        self._trim()
        try:
            await snapshot.read_jobs([ReadJob.of(snapshot.tree.nodes[path], arrays[path]) for path in absent])
            yield [Values.in_memory(path, metas[path], arrays[path]) for path in batch]
        except BaseException:
            self._size -= sum(array.nbytes for array in arrays.values())
            raise
        self._arrays.update(arrays)
        self._make_room(0)  # a batch in use may exceed the limit, cached arrays may not

    def _make_room(self, size: int) -> bool:
        """Drop cached arrays, the last one cached first, until `size` more bytes fit; return whether they do."""
        while self._size + size > self._limit and self._arrays:
            self.drop([next(reversed(self._arrays))])
        return self._size + size <= self._limit

    def _new_array(self, path: str, meta: ArrayMeta) -> npt.NDArray[Any]:
        """Return an uninitialized array, in the memory of one that was dropped if it is about as large."""
        fits = (i for i, memory in enumerate(self._free) if meta.nbytes <= memory.size < 2 * meta.nbytes)
        if meta.nbytes <= SLAB or (i := next(fits, None)) is None:
            return new_values(path, meta.shape, meta.dtype)
        return self._free.pop(i)[: meta.nbytes].view(meta.dtype).reshape(meta.shape)

    def drop(self, paths: Iterable[str]) -> None:
        """Drop the values of these arrays, which nothing uses any more."""
        for path in paths:
            if (array := self._arrays.pop(path, None)) is not None:
                self._size -= array.nbytes
                if array.nbytes > SLAB:
                    self._free.append(array.reshape(-1).view(np.uint8))
        self._trim()

    def _trim(self) -> None:
        """Return dropped memory beyond the limit to the system."""
        while self._free and self._size + sum(memory.size for memory in self._free) > self._limit:
            self._free.pop()

    def drop_others(self, paths: Container[str]) -> None:
        """Drop the values of all arrays but these."""
        self.drop([path for path in self._arrays if path not in paths])


class ReusedMemory:
    """Memory that successive values or chunks reuse, because fresh memory costs page faults."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Return `size` bytes; those taken before are no longer valid."""
        if size > self._memory.size:
            self._memory = returnable_buffer(size)
            prefer_huge_pages(self._memory.ctypes.data, self._memory.size)
        return self._memory[:size]


async def _streamed_values(snapshot: Snapshot, path: str, memory: ReusedMemory, size: int) -> Values:
    """Return the values of an array, which are read from the store at each use.

    If chunks are only decoded whole, `read` decodes them for several slabs at once: as many as fit in `size`
    bytes, or in the size of a chunk, which is in memory anyway.
    """
    loop, array = asyncio.get_running_loop(), await snapshot.array(path)
    meta = snapshot.tree.nodes[path].meta
    is_decoded_whole = not (meta.chain.identity or meta.chain.has_parts)
    band_size = max(size, meta.chunk_size * meta.dtype.itemsize) if is_decoded_whole else 0
    band: Region = ()
    band_values: npt.NDArray[Any] = np.empty(0)

    def read(region: Region) -> npt.NDArray[Any]:
        nonlocal band, band_values
        if not (band and all(map(_contains, band, region))):
            band = _band(meta, region, band_size)
            view = array[band]
            out = memory.take(view.nbytes).view(view.dtype).reshape(view.shape)
            values = snapshot.read_in_this_thread(view, out)
            band_values = (
                values if values is not None else asyncio.run_coroutine_threadsafe(view.read(out), loop).result()
            )
        return band_values[
            tuple(slice(r.start - b.start, r.stop - b.start) for r, b in zip(region, band, strict=True))
        ]

    return Values(path, meta, read)


def _contains(outer: slice, inner: slice) -> bool:
    return bool(outer.start <= inner.start and inner.stop <= outer.stop)


def _band(meta: ArrayMeta, region: Region, size: int) -> Region:
    """Return a slab extended by those after it, to about `size` bytes, and up to the edge of a chunk if it can."""
    axis = next((k for k, (r, n) in enumerate(zip(region, meta.shape, strict=True)) if r.stop - r.start > 1), None)
    if axis is None or region[axis].stop - region[axis].start == meta.shape[axis]:
        return region
    start, chunk = region[axis].start, meta.chunks[axis]
    row_bytes = math.prod(r.stop - r.start for r in region[axis + 1 :]) * meta.dtype.itemsize
    stop = start + size // max(1, row_bytes)
    stop = max(stop // chunk * chunk if stop // chunk * chunk > start else stop, region[axis].stop)
    return (*region[:axis], slice(start, min(stop, meta.shape[axis])), *region[axis + 1 :])


def batches(arrays: Mapping[str, ArrayMeta], paths: Sequence[str]) -> list[list[str]]:
    """Group paths into batches of at most a slab of values and `_BATCH` arrays; a larger array is one batch."""
    result: list[list[str]] = []
    room = 0
    for path in paths:
        size = arrays[path].nbytes
        if not result or size > room or len(result[-1]) == _BATCH:
            result.append([])
            room = SLAB
        result[-1].append(path)
        room -= size
    return result


async def in_threads(call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return the results of a plain function for all items, in their order.

    A single item does not take a thread of `each`: it may be a large array, and reading its slabs needs those
    threads.
    """
    if len(items) == 1:
        return [await run(call, items[0])]
    results: dict[int, R] = {}

    def work(i: int) -> None:
        results[i] = call(items[i])

    await each(work, range(len(items)))
    return [results[i] for i in range(len(items))]
