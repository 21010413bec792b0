"""Arrays that `save` reads region by region, so that they need never be in memory as a whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.errors import Corrupt

__all__ = ["StreamedArray", "StreamedRegions"]

_REGION_BYTES = 32 << 20

Region = tuple[slice, ...]
"""A slice with a start and a stop for each axis."""


class StreamedArray:
    """A leaf of `save` whose values `read` returns, region by region, in the threads that write them.

    `unit` is the shape that the source stores as one piece, if it has such pieces: regions consist of whole
    pieces, so that each piece is read once. A region is about 32 MiB, or one piece if that is larger. If a garbage
    collection intervenes, `save` reads all regions again.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: np.dtype[Any],
        read: Callable[[Region], npt.NDArray[Any]],
        unit: Sequence[int] | None = None,
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.read = read
        self.region_shape = _region_shape(self.shape, dtype.itemsize, unit or (1,) * len(self.shape))


class StreamedRegions:
    """The regions of a streamed array and their values, as `WriteJob` takes them; each iteration reads anew."""

    def __init__(self, path: str, source: StreamedArray, meta: ArrayMeta) -> None:
        self._path, self._source, self._meta = path, source, meta

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], npt.NDArray[Any]]]:
        source, chunks = self._source, self._meta.chunks
        if 0 in source.shape:
            return
        sides = zip(source.shape, source.region_shape, strict=True)
        for region in itertools.product(*([slice(i, min(i + r, n)) for i in range(0, n, r)] for n, r in sides)):
            values = source.read(region)
            shape = tuple(s.stop - s.start for s in region)
            if values.shape != shape or values.dtype != source.dtype:
                raise Corrupt(
                    f"{self._path}: its source returned {values.dtype} values of shape {values.shape} for a "
                    f"region of {source.dtype} values of shape {shape}; check the source"
                )
            yield tuple(s.start // c for s, c in zip(region, chunks, strict=True)), values


def _region_shape(shape: tuple[int, ...], itemsize: int, unit: Sequence[int]) -> tuple[int, ...]:
    """Return `unit`, grown to a multiple along the last axes until it has about `_REGION_BYTES`."""
    sides = [max(1, min(u, n)) for u, n in zip(unit, shape, strict=True)]
    for axis in reversed(range(len(sides))):
        factor = max(1, _REGION_BYTES // (math.prod(sides) * itemsize))
        factor = 1 << (factor.bit_length() - 1)  # so that chunks of a suitable size divide a region
        sides[axis] = min(sides[axis] * factor, max(1, shape[axis]))
        if sides[axis] < shape[axis]:
            break
    return tuple(sides)
