"""The dtypes of PyTorch by name, as NumPy's, and the values of tensors as arrays; pure, no I/O.

PyTorch is imported only when a tensor is passed, so files of tensors are read without it. NumPy lacks bfloat16 and
the 8-bit floats: such tensors are viewed as integers of the same width, and these as the type of ml_dtypes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.dtypes import dtype_named, is_ml_dtype

__all__ = ["TORCH_DTYPES", "tensor_values"]

TORCH_DTYPES: dict[str, np.dtype[Any]] = {
    name: dtype_named(name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
}
"""The dtypes whose elements are whole bytes. A version of PyTorch may lack some."""


def tensor_values(tensor: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the values of a dense CPU tensor as an array of the NumPy dtype of the same name.

    The array is a view of the tensor's memory, or a copy if the tensor is lazily conjugated or negated. Raise what
    PyTorch raises for other tensors: `TypeError`, `RuntimeError` or `NotImplementedError`.
    """
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    if is_ml_dtype(dtype):
        tensor = tensor.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
    values: npt.NDArray[Any] = tensor.numpy()
    return values.view(dtype)
