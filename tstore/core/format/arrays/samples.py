"""Samples of large arrays: regions spread evenly over an array and aligned to its chunks; pure, no I/O.

The regions are tiles of a regular grid: a part of a large chunk, or a box of small neighbouring chunks. A sample
takes one tile from each of many stretches of the grid, of equal length in C order, at a position in the stretch
that differs from one to the next, so that no period of the grid hides rows or columns. It depends only on the
arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tstore.core.format.arrays.grid import box_sides

__all__ = ["Tiling", "spread_indices"]

_MAX_VALUES = 1 << 22  # values of a tile: more than a chunk usually has, so that few chunks are decoded twice
_MAX_BYTES = 1 << 20  # bytes of a sampled tile: less would not be faster, since a checksum covers as much
_SAMPLED_TILES = 64  # minimum tiles of a sample, if chunks are small enough
_DECODED = 8  # bytes of chunks decoded for a sample, as a multiple of the budget
_LEAST_CHUNKS = 4  # minimum chunks of a sample, even long ones
_GOLDEN = 2654435769  # 2**32 / golden ratio: the fractions of its multiples are spread evenly


class Tiling(NamedTuple):
    """The tiles of an array, and how many of them a sample takes.

    A tile has `sides`; those at the end of a chunk of `chunks`, the chunk's shape or a multiple, may be smaller.
    """

    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    sides: tuple[int, ...]
    sampled: int
    """The number of sampled tiles."""

    @staticmethod
    def of(shape: Sequence[int], chunks: Sequence[int], itemsize: int, budget: int | None = None) -> Tiling:
        """Return tiles for a sample of about `budget` bytes of values, at least one tile; None takes all tiles."""
        size = math.prod(shape) * itemsize
        complete = budget is None or size <= budget
        whole = tuple(max(1, min(c, n)) for c, n in zip(chunks, shape, strict=True))
        most = _MAX_VALUES
        if budget is not None and not complete:
            chunk_bytes = math.prod(whole) * itemsize
            tiles = max(_LEAST_CHUNKS, min(_SAMPLED_TILES, _DECODED * budget // chunk_bytes))
            most = max(1, min(most, min(_MAX_BYTES, budget // tiles) // itemsize))
        if math.prod(whole) > most:
            sides = box_sides(whole, most)
        else:
            counts = [max(1, -(-n // c)) for n, c in zip(shape, whole, strict=True)]
            sides = tuple(s * c for s, c in zip(box_sides(counts, most // math.prod(whole)), whole, strict=True))
            whole = sides
        tiling = Tiling(tuple(shape), whole, sides, 0)
        if complete:
            return tiling._replace(sampled=tiling.tile_count)
        assert budget is not None
        taken = max(1, budget // max(1, math.prod(sides) * itemsize))
        chunk_bytes = math.prod(whole) * itemsize
        taken = min(taken, max(_LEAST_CHUNKS, _DECODED * budget // chunk_bytes))
        return tiling._replace(sampled=min(taken, tiling.tile_count))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of tiles along each axis."""
        axes = zip(self.shape, self.chunks, self.sides, strict=True)
        return tuple(n // c * -(-c // s) + -(-(n % c) // s) for n, c, s in axes)

    @property
    def tile_count(self) -> int:
        """The number of all tiles; 0 for an empty array."""
        return math.prod(self.counts)

    @property
    def sampled_values(self) -> int:
        """An upper estimate of the number of values in the sampled tiles."""
        return min(math.prod(self.shape), self.sampled * math.prod(self.sides))

    @property
    def complete(self) -> bool:
        """Whether all tiles are sampled."""
        return self.sampled == self.tile_count

    def regions(self) -> Iterator[tuple[slice, ...]]:
        """Yield the region of each sampled tile, in C order of the tiles."""
        counts = self.counts
        for index in spread_indices(self.tile_count, self.sampled):
            region = []
            for n, c, s, count in reversed(list(zip(self.shape, self.chunks, self.sides, counts, strict=True))):
                index, at = divmod(index, count)
                chunk, part = divmod(at, -(-c // s))
                start = chunk * c + part * s
                region.append(slice(start, min(start + s, (chunk + 1) * c, n)))
            yield tuple(reversed(region))


def spread_indices(count: int, taken: int) -> Iterator[int]:
    """Yield `taken` ascending indices below `count`, one from each of `taken` equal stretches.

    A single index is the middle one.
    """
    for i in range(taken):
        low, high = i * count // taken, (i + 1) * count // taken
        if taken == 1:
            low = high // 2
        yield low + ((high - low) * (i * _GOLDEN & 0xFFFFFFFF) >> 32)
