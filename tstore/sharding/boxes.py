"""Boxes: the regions of an array in a layout of any kind, each as an index with a slice per dimension.

In spatial partitioning each device holds a tile of an array and a halo, the adjacent edges of the other tiles.

A halo has a width per dimension: one number for both sides, or a pair (before, after), cut off at the array's
edge. Tiles are saved without halos, so every element is saved once; a restore can read a tile with its halo.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from tstore.errors import InvalidArgument

__all__ = ["Halo", "Index", "checked_int", "common_shard_shape", "tile_in_halo", "with_halo"]

Index: TypeAlias = tuple[slice, ...]
"""A region of an array: a slice, with an integer start and stop, for each axis."""


def common_shard_shape(shape: Sequence[int], indices: Iterable[Index]) -> tuple[int, ...]:
    """Return the largest chunk shape such that no chunk crosses the edge of a shard.

    For a layout of `Mesh` this is its `shard_shape`. For the nested shards of a DTensor it may be smaller, because
    their lengths may differ. Pass the indices of all devices, so that every host gets the same result. Raise
    `InvalidArgument` for an index that does not lie within the array.
    """
    lengths = tuple(shape)
    edges: list[set[int]] = [set() for _ in lengths]
    for index in indices:
        if len(index) != len(lengths) or not all(
            0 <= part.start <= part.stop <= n for part, n in zip(index, lengths, strict=True)
        ):
            raise InvalidArgument(f"index {index!r} is not a region of shape {lengths}")
        for part, positions in zip(index, edges, strict=True):
            if part.start < part.stop:
                positions |= {part.start, part.stop}
    return tuple(math.gcd(*(positions - {n})) or n for positions, n in zip(edges, lengths, strict=True))


def checked_int(value: int, name: str, minimum: int) -> int:
    """Return the value as an int; raise `InvalidArgument` unless it is an integer of at least `minimum`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum:
        raise InvalidArgument(f"{name} must be an integer of at least {minimum}, not {value!r}")
    return number


Halo: TypeAlias = Sequence[int | tuple[int, int]]
"""The width of a halo along each dimension, in elements: on both sides, or (before, after)."""


def with_halo(tile: Index, shape: Sequence[int], halo: Halo) -> Index:
    """Return the index of a tile and its halo; an empty tile has none.

    Raise `InvalidArgument` unless the halo has a width of at least 0 for each dimension of the shape.

    Examples
    --------
    >>> from tstore.sharding import with_halo
    >>> with_halo((slice(4, 8), slice(0, 4)), (8, 8), halo=(1, 2))
    (slice(3, 8, None), slice(0, 6, None))
    """
    widths = _widths(shape, halo)
    if any(part.start >= part.stop for part in tile):
        return tile
    return tuple(
        slice(max(0, part.start - before), min(n, part.stop + after))
        for part, n, (before, after) in zip(tile, shape, widths, strict=True)
    )


def tile_in_halo(tile: Index, shape: Sequence[int], halo: Halo) -> Index:
    """Return the index of a tile within the local array of the tile and its halo.

    Raise `InvalidArgument` as `with_halo` does.
    """
    outer = with_halo(tile, shape, halo)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(tile, outer, strict=True))


def _widths(shape: Sequence[int], halo: Halo) -> list[tuple[int, int]]:
    if not isinstance(halo, Sequence) or isinstance(halo, str) or len(halo) != len(shape):
        raise InvalidArgument(f"halo={halo!r}: expected a width for each of the {len(shape)} dimensions")
    pairs = [width if isinstance(width, tuple) else (width, width) for width in halo]
    if any(len(pair) != 2 for pair in pairs):
        raise InvalidArgument(f"halo={halo!r}: expected a width, or one before and one after, for each dimension")
    return [(checked_int(a, "a width of a halo", 0), checked_int(b, "a width of a halo", 0)) for a, b in pairs]
