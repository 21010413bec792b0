"""Arrays that other formats store in pieces in several files, as one leaf of `save` that is read by piece."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.checkpoint.jobs import StreamedArray
from tstore.errors import Corrupt

__all__ = ["FilePart", "joined"]

_MAX_BYTES = (1 << 63) - 1  # the limit of an array in memory
_MAX_CELLS = 1 << 22  # cells of the grid formed by the edges of all pieces


class FilePart(NamedTuple):
    """The values of a region of an array; `offsets` is its first index."""

    offsets: tuple[int, ...]
    values: npt.NDArray[Any]


def joined(
    subject: str, shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Sequence[FilePart]
) -> npt.NDArray[Any] | StreamedArray:
    """Return the array of these pieces; raise `Corrupt` unless they cover each element exactly once."""
    nonempty = [piece for piece in pieces if piece.values.size]
    if math.prod(n for n in shape if n) * dtype.itemsize > _MAX_BYTES:
        raise Corrupt(f"{subject} would have more than {_MAX_BYTES} bytes; check the checkpoint")
    _check_partition(subject, shape, nonempty)
    if len(nonempty) == 1:
        return nonempty[0].values
    if not nonempty:
        return np.empty(shape, dtype)

    def read(region: tuple[slice, ...]) -> npt.NDArray[Any]:
        out = np.empty([s.stop - s.start for s in region], dtype)
        for offsets, values in nonempty:
            # by axis: the slice of the region, and the offset and length of the piece
            sides = list(zip(region, offsets, values.shape, strict=True))
            overlap = [(max(s.start, o), min(s.stop, o + n)) for s, o, n in sides]
            if all(start < stop for start, stop in overlap):
                target = tuple(
                    slice(a - s.start, b - s.start) for (a, b), (s, _, _) in zip(overlap, sides, strict=True)
                )
                source = tuple(slice(a - o, b - o) for (a, b), (_, o, _) in zip(overlap, sides, strict=True))
                out[target] = values[source]
        return out

    return StreamedArray(shape, dtype, read)


def _check_partition(subject: str, shape: tuple[int, ...], pieces: Sequence[FilePart]) -> None:
    """Raise `Corrupt` unless the pieces partition an array of this shape."""
    for offsets, values in pieces:
        if len(offsets) != len(shape) or values.ndim != len(shape):
            raise Corrupt(f"{subject} has {len(shape)} axes, but a piece has {values.ndim}; check the checkpoint")
        if any(o < 0 or o + n > end for o, n, end in zip(offsets, values.shape, shape, strict=True)):
            raise Corrupt(
                f"{subject} has shape {shape}, but a piece of shape {values.shape} begins at {offsets}; check the "
                "checkpoint"
            )
    if sum(piece.values.size for piece in pieces) != math.prod(shape):
        raise Corrupt(
            f"{subject} has {math.prod(shape)} elements, but its pieces have "
            f"{sum(p.values.size for p in pieces)}: they overlap, or some are missing; check that all files of "
            "the checkpoint are there"
        )
    if len(pieces) < 2:
        return
    edges = [
        np.unique([e for p in pieces for e in (p.offsets[i], p.offsets[i] + p.values.shape[i])])
        for i in range(len(shape))
    ]
    if math.prod(len(e) - 1 for e in edges) > _MAX_CELLS:
        raise Corrupt(f"{subject} has {len(pieces)} pieces without a common grid; check the checkpoint")
    covered = np.zeros([len(e) - 1 for e in edges], bool)
    for offsets, values in pieces:
        sides = zip(edges, offsets, values.shape, strict=True)
        covered[tuple(slice(*np.searchsorted(e, (o, o + n))) for e, o, n in sides)] = True
    if not covered.all():
        raise Corrupt(f"{subject} has pieces that overlap and leave a hole; check the checkpoint")
