"""Boxes: the regions of an array in a layout of any kind, each as an index with a slice per dimension."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from tstore.errors import InvalidArgument

__all__ = ["Index", "checked_int", "common_shard_shape"]

Index: TypeAlias = tuple[slice, ...]
"""A region of an array: a slice, with an integer start and stop, for each axis."""


def common_shard_shape(shape: Sequence[int], indices: Iterable[Index]) -> tuple[int, ...]:
    """Return the largest chunk shape with which no chunk crosses the edge of a shard.

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
