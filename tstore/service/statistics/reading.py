"""Read samples of arrays: choose tiles, count the bytes to read, and yield the values in batches."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.array import Array, ArraySource
from tstore.core.format.arrays.grid import boxes, part_of
from tstore.core.format.arrays.samples import Tiling
from tstore.core.format.plain_text import pluralize
from tstore.core.format.tree.node import Node
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot, array_node
from tstore.errors import InvalidArgument
from tstore.service.statistics.results import result_key

__all__ = ["SAMPLE_BYTES", "Batch", "Coverage", "Region", "Sample", "SampleCounts", "parts", "sample_of"]

SAMPLE_BYTES = 8 << 20
"""The default bytes of values to read from an array."""

_BATCH_BYTES = 16 << 20  # bytes of values read together
_BATCH_TILES = 1024
_PART_VALUES = 1 << 20  # values processed together, so that temporary float64 arrays stay small
_MAX_PLANNED = 1024  # tiles whose chunks are looked up before they are read
_LONGEST_CHUNK = 512 << 20  # bytes to decode for reading a part of a chunk

Region = tuple[slice, ...]
Batch = Sequence[tuple[Region, npt.NDArray[Any], npt.NDArray[Any]]]
"""Tiles: the region of each, its values, and those of the same region of another array."""


@dataclass(frozen=True)
class Coverage:
    """How much of an array was read for its statistics: all values, or a sample."""

    values: int
    """The number of values of the array or view."""
    values_read: int
    """The number of values that were read."""
    nbytes: int
    """The bytes of all values, decoded."""
    bytes_read: int
    """The bytes of the values that were read, decoded."""
    stored_bytes_read: int
    """The bytes read from packs, which are those of whole chunks or blocks; 0 for chunks in the metadata."""

    @property
    def complete(self) -> bool:
        """Whether all values were read."""
        return self.values_read == self.values

    def __str__(self) -> str:
        if self.complete:
            return "1 value" if self.values == 1 else f"all {self.values:,} values"
        return f"{self.values_read:,} of {pluralize(self.values, 'value')}"

    def document(self) -> dict[str, Any]:
        """Return the coverage as JSON values."""
        return {**vars(self), "complete": self.complete}


class SampleCounts:
    """The values and bytes that were read so far."""

    def __init__(self) -> None:
        self.values = self.nbytes = self.stored = 0

    def coverage(self, view: Array) -> Coverage:
        """Return how much of a view was read."""
        return Coverage(view.size, self.values, view.nbytes, self.nbytes, self.stored)


class Sample:
    """The tiles of a view to read; `chunks` are the numbers of their stored chunks, if the tiles are few."""

    def __init__(self, view: Array, tiling: Tiling, chunks: Sequence[int] | None, stored: Sequence[int]) -> None:
        self.view = view
        self.tiling = tiling
        self.chunks = chunks
        self._stored = stored

    @property
    def source(self) -> ArraySource:
        """The snapshot or transaction of the array."""
        return self.view.parts.source

    @property
    def node(self) -> Node | None:
        """The array in its snapshot; None for an array of a transaction."""
        source, path, _, _ = self.view.parts
        return array_node(source.tree, path, source.location) if isinstance(source, Snapshot) else None

    async def key(self, *arguments: object) -> bytes | None:
        """Return the key of a result of these tiles: their chunks and how they are decoded, but not the path.

        Return None if the chunks are not known, or may change as in a transaction.
        """
        node, chunks = self.node, self.chunks
        if node is None or chunks is None:
            return None
        references = await run(node.select, np.array(chunks, np.uint64))
        view = self.view.parts.view
        selection = repr((view.shape, view.follows, self.tiling, arguments))
        positions = [p.tobytes() if isinstance(p, np.ndarray) else repr(p).encode() for p in view.positions]
        numbers, checks = references.number.tobytes(), references.checks.tobytes()
        return result_key([selection.encode(), node.document, *positions, numbers, checks])

    async def batches(self, counts: SampleCounts, other: Array | None = None) -> AsyncIterator[Batch]:
        """Yield the tiles in batches: the region, its values, and those of the same region of another array.

        Without another array, the values are repeated. Count what is read in `counts`.
        """
        views = [self.view] if other is None else [self.view, other]
        stored = iter(self._stored)
        for batch in _batched(self.tiling, sum(view.dtype.itemsize for view in views)):
            tiles = [view[region] for view in views for region in batch]
            planned = list(itertools.islice(stored, len(batch)))
            counts.stored += sum(planned) if planned else sum(await _stored_bytes(tiles))
            values = await _read(tiles)
            counts.values += sum(array.size for array in values[: len(batch)])
            counts.nbytes += sum(array.nbytes for array in values[: len(batch)])
            yield list(zip(batch, values[: len(batch)], values[-len(batch) :], strict=True))


async def sample_of(view: Array, budget: int | None) -> Sample:
    """Return a sample of a view of about `budget` bytes of values, or all of it.

    Raise `NotFound` if a chunk of it was never written and the array is not sparse, and `InvalidArgument` for
    chunks that are too long to decode for a part of them.
    """
    source, path, _, _ = view.parts
    if isinstance(source, Snapshot):
        await source.read_nodes([path])
        meta = array_node(source.tree, path, source.location).meta
        size = meta.chunk_size * meta.dtype.itemsize
        if size > _LONGEST_CHUNK and not meta.chain.identity:
            raise InvalidArgument(
                f"{path} has chunks of {size / 1e9:,.1f} GB, which must be decoded whole to read a part; "
                f"statistics are computed for chunks of at most {_LONGEST_CHUNK >> 20} MiB"
            )
    tiling = Tiling.of(view.shape, view.chunks, view.dtype.itemsize, budget)
    if not isinstance(source, Snapshot) or tiling.sampled > _MAX_PLANNED:
        return Sample(view, tiling, None, ())
    plans = await asyncio.gather(*(view[region].explain() for region in tiling.regions()))
    chunks = sorted({number for plan in plans for number in plan.chunks})
    return Sample(view, tiling, chunks, [plan.bytes_read for plan in plans])


async def _stored_bytes(tiles: Sequence[Array]) -> list[int]:
    return [plan.bytes_read for plan in await asyncio.gather(*(tile.explain() for tile in tiles))]


async def _read(tiles: Sequence[Array]) -> list[npt.NDArray[Any]]:
    """Return the values of tiles, those of a snapshot in one call."""
    values: list[npt.NDArray[Any]] = []
    for source, group in itertools.groupby(tiles, lambda tile: tile.parts.source):
        listed = list(group)
        if isinstance(source, Snapshot):
            values += await source.read_many(listed)
        else:
            values += [await tile.read() for tile in listed]
    return values


def _batched(tiling: Tiling, width: int) -> Iterator[list[Region]]:
    batch: list[Region] = []
    size = 0
    for region in tiling.regions():
        batch.append(region)
        size += width * int(np.prod([side.stop - side.start for side in region], dtype=np.int64))
        if size >= _BATCH_BYTES or len(batch) == _BATCH_TILES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def parts(
    region: Region, *arrays: npt.NDArray[Any], most: int = _PART_VALUES
) -> Iterator[tuple[tuple[int, ...], list[npt.NDArray[Any]]]]:
    """Yield parts of a tile, of at most `most` values each: where they begin in the array, and their values."""
    for box in boxes(arrays[0].shape, most):
        inside = tuple(slice(side.start, side.stop) for side in box)
        starts = tuple(side.start + part.start for side, part in zip(region, inside, strict=True))
        yield starts, [part_of(array, inside) for array in arrays]
