"""The dtypes of PyTorch by name, as NumPy's: for tensors and for files of tensors. PyTorch is not imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from tstore.format.arrays.array_metadata import dtype_named

__all__ = ["TORCH_DTYPES"]

TORCH_DTYPES: dict[str, np.dtype[Any]] = {
    name: dtype_named(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
"""The dtypes whose elements are whole bytes. A version of PyTorch may lack some."""
