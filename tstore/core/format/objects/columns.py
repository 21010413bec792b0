"""The columns of manifests: arrays of unsigned integers; pure, no I/O."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt

__all__ = ["SHORT_COLUMN", "largest", "parse_column", "ranges", "total"]

SHORT_COLUMN = 64
"""The length of a column up to which Python's loops are faster than NumPy's functions."""


_DTYPES = {name: np.dtype(name) for name in ("<u4", "<u8")}  # NumPy parses a name at each call


def parse_column(data: bytes, dtype: str) -> npt.NDArray[Any]:
    """Return the values of a column; raise `Corrupt` if the last value is cut short."""
    try:
        return np.frombuffer(data, _DTYPES[dtype])
    except ValueError:
        size = _DTYPES[dtype].itemsize
        raise Corrupt(f"a column has {len(data)} bytes, expected a multiple of {size}") from None


def largest(values: npt.NDArray[np.unsignedinteger[Any]]) -> int:
    """Return the largest value of a column, 0 if it is empty."""
    if len(values) > SHORT_COLUMN:
        return int(values.max())
    listed = values.tolist()
    return max(listed) if listed else 0


def total(values: npt.NDArray[np.uint64], max_value: int) -> int:
    """Return the sum of a column, or -1 if it is long and a value exceeds `max_value`: the sum might overflow."""
    if len(values) <= SHORT_COLUMN:
        return sum(values.tolist())
    return int(values.sum()) if largest(values) <= max_value else -1


def ranges(starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the integers of the ranges with these starts and sizes, one range after the other."""
    ends = np.cumsum(sizes)
    within = np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - sizes, sizes)
    values: npt.NDArray[np.int64] = within + np.repeat(starts, sizes)
    return values
