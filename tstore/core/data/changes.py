"""What changed in an array between two versions: regions of chunks, and the values that differ in them.

1. The references tell which chunks differ, without reading any (`differing_chunks`). If dtype or shape differ, the
   arrays have no chunks in common.
2. Both versions of these chunks are read, in batches that bound the memory, and compared bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.data.pieces import ReadJob
from tstore.core.data.reader import new_values, read_chunks
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import Selection, chunk_coordinates, chunk_region, whole
from tstore.core.format.objects.tables import last_number, numbers_of
from tstore.core.format.tree.differing_chunks import differing_numbers
from tstore.core.format.tree.node import Node, check_in_grid
from tstore.core.runtime.concurrency import batched_by_size
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage

__all__ = ["Patch", "Region", "changed_regions", "patches", "region_job", "region_shape"]

_BATCH_BYTES = 32 << 20

Region = tuple[slice, ...]
"""A region of an array: a slice with a start and a stop for each axis."""


class Patch(NamedTuple):
    """The values of the array at `path` that differ from an earlier version.

    `indices` are their positions in the flattened array (C order), ascending: int32, or int64 in arrays of 2^31
    elements or more. They are None if the whole array is smaller than the patch, or is new, or has another shape
    or dtype; then `values` has the shape of the array.
    """

    path: str
    indices: npt.NDArray[np.integer[Any]] | None
    values: npt.NDArray[Any]

    def __repr__(self) -> str:
        count = "whole" if self.indices is None else f"{len(self.indices):,} values"
        return f"<tstore.Patch {self.path!r} {count} {self.values.dtype}>"


def changed_regions(old: Node | None, new: Node) -> list[Region] | None:
    """Return the regions of the chunks that may differ; None if the whole array is new. Reads segments."""
    meta = new.meta
    if old is None or not _is_comparable(old.meta, meta):
        return None
    if old.meta.chunks == meta.chunks and old.meta.codecs == meta.codecs:
        numbers = differing_numbers(old, new)
    elif meta.sparse:
        return None  # the chunks of the new grid do not tell which values of the old one are now the fill value
    else:
        check_in_grid(new.path, meta, last_number(new.tables))
        numbers = numbers_of(new.tables)
    places = (chunk_coordinates(number, meta.counts) for number in numbers.tolist())
    return [chunk_region(place, meta.chunks, meta.shape) for place in places]


def _is_comparable(old: ArrayMeta, new: ArrayMeta) -> bool:
    return (
        old.shape == new.shape
        and old.dtype == new.dtype
        and not new.dtype.hasobject
        and new.dtype.itemsize > 0
        and (not new.sparse or old.has_fill_value_of(new))
    )


def region_shape(region: Region) -> tuple[int, ...]:
    """Return the number of elements of a region on each axis."""
    return tuple(side.stop - side.start for side in region)


def region_job(node: Node, region: Region, out: npt.NDArray[Any]) -> ReadJob:
    """Return the job that reads a region of an array into `out`."""
    selection = Selection(tuple(range(side.start, side.stop) for side in region))
    return ReadJob(node.path, node.meta, node, selection, out)


async def patches(storage: Storage, pairs: Iterable[tuple[Node | None, Node]]) -> AsyncGenerator[Patch, None]:
    """Yield a patch for each pair of versions of an array, the earlier one first, if any value differs."""
    for old, new in pairs:
        regions = await run(changed_regions, old, new)
        patch = None if regions is None or old is None else await _patch(storage, old, new, regions)
        if regions is None or patch is None:
            values = new_values(new.path, new.meta.shape, new.meta.dtype)
            await read_chunks(storage, [ReadJob(new.path, new.meta, new, whole(new.meta.shape), values)])
            patch = Patch(new.path, None, values)
        if patch.indices is None or len(patch.indices):
            yield patch


async def _patch(storage: Storage, old: Node, new: Node, regions: Sequence[Region]) -> Patch | None:
    """Return the patch of an array, or None if it is not smaller than the whole array."""
    meta = new.meta
    index = np.dtype(np.int32 if meta.size < 1 << 31 else np.int64)
    found = [(np.empty(0, index), np.empty(0, meta.dtype))]
    room = meta.size * meta.dtype.itemsize
    width = meta.dtype.itemsize
    for batch in batched_by_size(regions, lambda region: math.prod(region_shape(region)) * width, _BATCH_BYTES):
        pairs = [tuple(np.empty(region_shape(region), meta.dtype) for _ in range(2)) for region in batch]
        jobs = [
            region_job(node, region, out)
            for region, outs in zip(batch, pairs, strict=True)
            for node, out in zip((old, new), outs, strict=True)
        ]
        await read_chunks(storage, jobs)
        for region, (before, after) in zip(batch, pairs, strict=True):
            found.append(await run(_differing, before, after, region, meta.shape, index))
            room -= len(found[-1][0]) * (index.itemsize + meta.dtype.itemsize)
        if room < 0:
            return None
    indices, values = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.argsort(indices, kind="stable")
    return Patch(new.path, indices[order], values[order])


def _differing(
    before: npt.NDArray[Any], after: npt.NDArray[Any], region: Region, shape: Sequence[int], index: np.dtype[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the elements of a region whose bits differ: flat indices in the whole array, and values."""
    width = after.dtype.itemsize
    a, b = (x.reshape(-1).view(np.uint8).reshape(-1, width) for x in (before, after))
    word = f"u{width}" if width in (1, 2, 4, 8) else "u1"
    differs = (a.view(word) != b.view(word)).any(axis=1)
    inside = np.flatnonzero(differs)
    if not shape:
        return inside.astype(index), after.reshape(-1)[inside]
    at = np.unravel_index(inside, after.shape)
    places = tuple(i + side.start for i, side in zip(at, region, strict=True))
    return np.ravel_multi_index(places, tuple(shape)).astype(index), after.reshape(-1)[inside]
