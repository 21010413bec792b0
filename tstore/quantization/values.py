"""The values of stored arrays for plain functions in threads: many small arrays at once, large ones in slabs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tstore.format.array_metadata import ArrayMeta
from tstore.format.grid import boxes, part_of
from tstore.runtime.pool import each, run
from tstore.snapshot import Snapshot

__all__ = ["SLAB", "Region", "Values", "batches", "in_threads", "read_batch"]

T = TypeVar("T")
R = TypeVar("R")

SLAB = 16 << 20
"""Bytes of values that are held together."""

_MOST = 64
"""Arrays of a batch: enough to make its cost small, few enough that several batches share the work."""

Region = tuple[slice, ...]


class Values:
    """The values of one array, in memory or read when asked for; to be used outside of the event loop."""

    def __init__(self, path: str, meta: ArrayMeta, read: Callable[[Region], npt.NDArray[Any]]) -> None:
        self.path = path
        self.meta = meta
        self.read = read

    @staticmethod
    def held(path: str, meta: ArrayMeta, values: npt.NDArray[Any]) -> Values:
        """The values of an array in memory."""
        return Values(path, meta, lambda region: part_of(values, region))

    def slabs(self) -> Iterator[npt.NDArray[Any]]:
        """All values in C order, a slab at a time."""
        for box in boxes(self.meta.shape, SLAB // self.meta.dtype.itemsize):
            yield self.read(tuple(slice(r.start, r.stop) for r in box))

    def sample(self, axis: int | None) -> npt.NDArray[Any]:
        """At most a slab of values, every k-th along the longest axis but `axis`, whose rows stay whole."""
        shape, size = self.meta.shape, self.meta.nbytes
        free = [k for k in range(len(shape)) if axis is None or k != axis % len(shape)]
        region = [slice(None)] * len(shape)
        if size > SLAB and free:
            region[max(free, key=lambda k: shape[k])] = slice(None, None, -(-size // SLAB))
        return self.read(tuple(region))


def batches(arrays: Mapping[str, ArrayMeta], paths: Sequence[str]) -> list[list[str]]:
    """The paths in batches of small arrays, a slab together or less; larger arrays are alone."""
    found: list[list[str]] = []
    room = 0
    for path in paths:
        size = arrays[path].nbytes
        if not found or size > room or len(found[-1]) == _MOST:
            found.append([])
            room = SLAB
        found[-1].append(path)
        room -= size
    return found


async def read_batch(snapshot: Snapshot, batch: Sequence[str]) -> list[Values]:
    """The values of the arrays of a batch: held, but for one beyond a slab."""
    metas = [snapshot.tree.nodes[path].meta for path in batch]
    if len(batch) == 1 and metas[0].nbytes > SLAB:
        loop, array = asyncio.get_running_loop(), await snapshot.array(batch[0])

        def read(region: Region) -> npt.NDArray[Any]:
            return asyncio.run_coroutine_threadsafe(array[region].read(), loop).result()

        return [Values(batch[0], metas[0], read)]
    held = [np.empty(meta.shape, meta.dtype) for meta in metas]
    await snapshot.read_many((path, None, out) for path, out in zip(batch, held, strict=True))
    return [Values.held(*found) for found in zip(batch, metas, held, strict=True)]


async def in_threads(call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """The results of a plain function for all items, in their order.

    One item alone runs in a thread that may wait for data threads, as the reading of a slab does.
    """
    if len(items) == 1:
        return [await run(call, items[0])]
    results: dict[int, R] = {}

    def work(i: int) -> None:
        results[i] = call(items[i])

    await each(work, range(len(items)))
    return [results[i] for i in range(len(items))]
