"""Patches: values for a part of a chunk, applied to the chunk when the transaction commits.

A lossy codec must not change those values of a patched chunk that no patch covers. So the chunk is encoded without
clipping, which usually leaves values that were decoded from it unchanged, and decoded again to compare. If some of
these values change, for instance because a larger value raises the exponent offset of its scale group, the write
is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.errors import InvalidArgument
from tstore.format.arrays.array_metadata import ArrayMeta
from tstore.format.arrays.points import PointProjection, Target

__all__ = ["Patch", "Region", "assign", "check_unpatched", "whole_chunk"]

Patch = tuple[tuple[slice, ...] | Target, npt.NDArray[Any]]
"""The elements of a chunk to change, and their values."""
Region = tuple[tuple[int, ...], npt.NDArray[Any]]
"""The coordinates of the first chunk of some whole chunks, and their values."""


def whole_chunk(
    meta: ArrayMeta, points: PointProjection, shape: Sequence[int], values: npt.NDArray[Any]
) -> Region:
    """Return a chunk of this shape, of which all elements are selected."""
    chunk = np.empty(meta.chunks, meta.dtype)
    target, chosen = points.patch(values, meta.dtype)
    target.assign(chunk, chosen)
    return points.chunk, chunk[tuple(map(slice, shape))]


def assign(chunk: npt.NDArray[Any], inside: tuple[slice, ...] | Target, values: Any) -> None:
    """Set some elements of a chunk."""
    if isinstance(inside, Target):
        inside.assign(chunk, values)
    else:
        chunk[inside] = values


def check_unpatched(
    path: str, meta: ArrayMeta, patched: tuple[tuple[int, ...], npt.NDArray[Any], tuple[Patch, ...]]
) -> None:
    """Raise `InvalidArgument` if the codec changes values of a patched chunk that no patch covers."""
    coordinates, chunk, patches = patched
    decoded = np.empty_like(chunk)
    meta.chain.decode(meta.chain.encode(chunk, np.empty(meta.chain.out_size, np.uint8)), decoded)
    differ = decoded.reshape(-1, 1).view(np.uint8) != chunk.reshape(-1, 1).view(np.uint8)
    changed = differ.any(axis=1).reshape(chunk.shape)
    for inside, _ in patches:
        assign(changed, inside, False)
    in_array = tuple(slice(n - i * c) for i, n, c in zip(coordinates, meta.shape, meta.chunks, strict=True))
    count = np.count_nonzero(changed[in_array])
    if count:
        raise InvalidArgument(
            f"{path}, chunk {coordinates}: writing a part of it would change {count} other values, "
            "because its codec is lossy, so the write is refused; write the whole chunk, or create the array "
            "with smaller chunks or without a lossy codec"
        )
