"""Copies of chunks from and to arrays, with their checksums; pure, no I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import chunk_counts, view_as_chunks
from tstore.core.format.checksums import BLOCK, block_checks

try:
    from tstore.core.format import kernels
except ImportError:  # installed without a C compiler
    kernels = None  # type: ignore[assignment]

__all__ = ["Source", "copy_chunks", "gather", "scatter", "scatter_region"]

Values = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class Source(NamedTuple):
    """Values to copy to an offset of a buffer: chunks of one array, or a list of whole chunks.

    The values of one array begin at a chunk boundary. Those of a list have the shape and dtype of the metadata.
    """

    values: Values | list[Values]
    meta: ArrayMeta
    offset: int


def gather(sources: Sequence[Source], buffer: Bytes) -> list[bytes]:
    """Copy the chunks of the sources to a buffer as `copy_chunks` does; return the joined checksums of each.

    One call in C copies and hashes all chunks, unless their values must be cast. It takes the interpreter's lock
    once, and hashes each block while it is in the CPU's caches.
    """
    in_c: list[tuple[Values | list[Values], tuple[int, ...], bytes, int]] = []
    checks: list[bytes] = []
    for values, meta, offset in sources:
        if kernels is None or (isinstance(values, np.ndarray) and values.dtype != meta.dtype):
            checks.append(_gather_one(values, meta, buffer[offset:]))
        else:
            checks.append(b"")
            in_c.append((values, meta.chunks, _padding(values, meta), offset))
    if not in_c:
        return checks
    from_c = iter(kernels.gather(in_c, buffer, BLOCK))
    return [check or next(from_c) for check in checks]


def scatter(data: Bytes, target: Values) -> bytes:
    """Copy chunks, contiguous in `data`, to a view made by `view_as_chunks`; return their joined checksums.

    One call in C hashes each chunk, and copies it while it is in the CPU's caches.
    """
    first = target.ndim // 2
    if kernels is not None:
        return kernels.scatter(data, target, first, BLOCK)
    target[...] = data.view(target.dtype).reshape(target.shape)
    return block_checks(data.data, len(data) // math.prod(target.shape[:first]))


def scatter_region(data: Bytes, target: Values, chunks: tuple[int, ...], start: tuple[int, ...]) -> bytes:
    """Copy a region of a box of chunks, contiguous in `data`; return the joined checksums of the chunks.

    The chunks have the shape `chunks`. The region has the shape of the target, and begins at `start` in the first
    chunk. One call in C hashes each chunk, and copies from it while it is in the CPU's caches.
    """
    if kernels is not None:
        return kernels.scatter_region(data, target, chunks, start, BLOCK)
    counts = chunk_counts([s + n for s, n in zip(start, target.shape, strict=True)], chunks)
    values = data.view(target.dtype).reshape((*counts, *chunks))
    for at in np.ndindex(*counts):
        inside, part = [], []
        for i, c, s, n in zip(at, chunks, start, target.shape, strict=True):
            low, high = max(s, i * c), min(s + n, (i + 1) * c)
            inside.append(slice(low - i * c, high - i * c))
            part.append(slice(low - s, high - s))
        target[tuple(part)] = values[(*at, *inside)]
    return block_checks(data.data, len(data) // math.prod(counts))


def copy_chunks(values: Values, meta: ArrayMeta, buffer: Bytes) -> Values:
    """Copy the chunks of values in C order to the front of a buffer, padded at the array's edge; return them.

    Values of variable length are copied to new memory.
    """
    chunks = meta.chunks
    counts = chunk_counts(values.shape, chunks)
    if meta.dtype.hasobject:
        if values.shape == chunks:
            return np.array(values, meta.dtype)[np.newaxis]
        return _copy_padded(values, meta, np.empty((*counts, *chunks), meta.dtype)).reshape(-1, *chunks)
    buffer = buffer[: meta.chunk_size * meta.dtype.itemsize * math.prod(counts)]
    target = buffer.view(meta.dtype).reshape((*counts, *chunks))
    if kernels is not None and values.dtype == meta.dtype:
        kernels.gather([(values, chunks, _padding(values, meta), 0)], buffer, BLOCK)  # in less time than NumPy
        return target.reshape(-1, *chunks)
    if all(n % c == 0 for n, c in zip(values.shape, chunks, strict=True)):
        np.copyto(target, view_as_chunks(values, chunks), casting="same_kind")
        return target.reshape(-1, *chunks)
    return _copy_padded(values, meta, target)


def _copy_padded(values: Values, meta: ArrayMeta, target: Values) -> Values:
    """Copy the chunks of values to `target`, whose first axes are those of their grid."""
    chunks = meta.chunks
    for at in np.ndindex(*chunk_counts(values.shape, chunks)):
        part = values[tuple(slice(i * c, (i + 1) * c) for i, c in zip(at, chunks, strict=True))]
        if part.shape != chunks:
            target[at] = meta.fill_value
        target[at][tuple(slice(n) for n in part.shape)] = part
    return target.reshape(-1, *chunks)


def _gather_one(values: Values | list[Values], meta: ArrayMeta, buffer: Bytes) -> bytes:
    if isinstance(values, np.ndarray):
        chunks = copy_chunks(values, meta, buffer)
    else:
        chunks = buffer[: len(values) * meta.encoded_size].view(meta.dtype).reshape(len(values), *meta.chunks)
        np.stack(values, out=chunks)
    return block_checks(chunks.reshape(-1).view(np.uint8).data, meta.encoded_size)


def _padding(values: Values | list[Values], meta: ArrayMeta) -> bytes:
    """Return the bytes of the fill value, or zeros if no chunk needs padding."""
    if isinstance(values, list) or all(n % c == 0 for n, c in zip(values.shape, meta.chunks, strict=True)):
        return bytes(meta.dtype.itemsize)
    return np.full((), meta.fill_value, meta.dtype).tobytes()
