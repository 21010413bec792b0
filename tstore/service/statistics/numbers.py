"""Values of every number type as float32 or float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.dtypes import dtype_text, is_integer, is_ml_dtype
from tstore.errors import InvalidArgument

__all__ = ["Floats", "as_floats", "check_numbers", "is_number"]

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]

_EXACT_IN_FLOAT32 = 2  # bytes of the longest integers that float32 represents exactly


def is_number(dtype: np.dtype[Any]) -> bool:
    """Return whether values of this dtype are numbers or booleans."""
    return dtype.kind in "biufc" or is_ml_dtype(dtype)


def check_numbers(path: str, dtype: np.dtype[Any]) -> None:
    """Raise `InvalidArgument` unless values of this dtype are numbers or booleans."""
    if not is_number(dtype):
        raise InvalidArgument(
            f"{path} has dtype {dtype_text(dtype)}, whose values are not numbers; statistics are of numbers only"
        )


def as_floats(values: npt.NDArray[Any]) -> Floats:
    """Return values as floats: the magnitudes of complex ones; integers beyond 2^53 are rounded."""
    dtype = values.dtype
    if dtype.kind == "c":
        with np.errstate(all="ignore"):
            values = np.abs(values)
    if values.dtype in (np.float32, np.float64):
        return values
    wide = is_integer(dtype) and dtype.itemsize > _EXACT_IN_FLOAT32
    return values.astype(np.float64) if wide else values.astype(np.float32)
