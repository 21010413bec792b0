"""The blocks of a long unencoded chunk, one after the other, for values with any strides; no I/O.

A copy of the whole chunk would leave the CPU's caches before it is hashed and written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.format.checksums import BLOCK

__all__ = ["blocks_of", "blocks_to_compare"]

Values = npt.NDArray[Any]


def blocks_of(
    values: Values, dtype: np.dtype[Any], buffer: npt.NDArray[np.uint8]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield copies of the blocks of values in C order, cast to a dtype; each is valid until the next one.

    `buffer` has the size of a block. A block may end within a value.
    """
    size = values.size * dtype.itemsize
    per_block = BLOCK // dtype.itemsize
    if BLOCK % dtype.itemsize:
        data = np.ascontiguousarray(values, dtype).reshape(-1).view(np.uint8)
        for start in range(0, size, BLOCK):
            block = buffer[: size - start]
            np.copyto(block, data[start : start + BLOCK])
            yield block
        return
    for start in range(0, values.size, per_block):
        stop = min(start + per_block, values.size)
        block = buffer[: (stop - start) * dtype.itemsize]
        _copy_elements(values, start, stop, block.view(dtype))
        yield block


def blocks_to_compare(
    values: Values, dtype: np.dtype[Any], buffer: npt.NDArray[np.uint8]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the blocks as `blocks_of` does, but without a copy where the values are contiguous.

    They are for a comparison alone: the caller of a save may change its values before they could be written.
    """
    if values.dtype != dtype or not values.flags.c_contiguous:
        yield from blocks_of(values, dtype, buffer)
        return
    data = values.reshape(-1).view(np.uint8)
    yield from (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))


def _copy_elements(values: Values, start: int, stop: int, out: Values) -> None:
    """Copy the elements with the C-order numbers from `start` up to `stop`: whole rows, and parts of others."""
    if values.ndim < 2 or values.flags.c_contiguous:
        np.copyto(out, values.reshape(-1)[start:stop], casting="same_kind")
        return
    row = math.prod(values.shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # a part of one row
        _copy_elements(values[last], start - last * row, stop - last * row, out)
        return
    before, inside = first * row - start, (last - first) * row
    if before:
        _copy_elements(values[first - 1], row - before, row, out[:before])
    target = out[before : before + inside].reshape(last - first, *values.shape[1:])
    np.copyto(target, values[first:last], casting="same_kind")
    if stop > last * row:
        _copy_elements(values[last], 0, stop - last * row, out[before + inside :])
