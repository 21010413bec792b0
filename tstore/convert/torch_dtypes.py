"""The dtypes of PyTorch by name, as NumPy's, and tensors from and to arrays of the same bits.

Only the functions on tensors import torch, and only when they are called.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tstore.errors import InvalidArgument

__all__ = ["DTYPES", "STORAGES", "array_of", "tensor_of", "torch_dtype"]

DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name) for name in ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64")},
    **{name: np.dtype(name) for name in ("int64", "float16", "float32", "float64", "complex64", "complex128")},
    **{
        name: np.dtype(getattr(ml_dtypes, name))
        for name in (
            "bfloat16",
            "float8_e4m3fn",
            "float8_e5m2",
            "float8_e4m3fnuz",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        )
    },
}
"""The dtypes whose elements are whole bytes, by their names in PyTorch."""

STORAGES: dict[str, np.dtype[Any]] = {
    "BoolStorage": DTYPES["bool"],
    "ByteStorage": DTYPES["uint8"],
    "CharStorage": DTYPES["int8"],
    "ShortStorage": DTYPES["int16"],
    "IntStorage": DTYPES["int32"],
    "LongStorage": DTYPES["int64"],
    "HalfStorage": DTYPES["float16"],
    "BFloat16Storage": DTYPES["bfloat16"],
    "FloatStorage": DTYPES["float32"],
    "DoubleStorage": DTYPES["float64"],
    "ComplexFloatStorage": DTYPES["complex64"],
    "ComplexDoubleStorage": DTYPES["complex128"],
    "UntypedStorage": DTYPES["uint8"],
}
"""The dtype of each class of storage that a file may name."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def torch_dtype(path: str, dtype: np.dtype[Any]) -> Any:
    """Return the torch dtype of a NumPy dtype; raise `InvalidArgument` if there is none."""
    import torch

    found = getattr(torch, _NAMES.get(dtype, ""), None)
    if found is None:
        raise InvalidArgument(f"{path} is {dtype}, which PyTorch {torch.__version__} lacks; convert it first")
    return found


def tensor_of(array: npt.NDArray[Any], dtype: Any) -> Any:
    """Return a tensor of this dtype with the bytes of a contiguous array, in the same memory."""
    import torch

    flat = array.reshape(-1).view(np.uint8)
    if not flat.size:
        return torch.empty(array.shape, dtype=dtype)
    return torch.from_numpy(flat).view(dtype).reshape(array.shape)


def array_of(path: str, tensor: Any) -> npt.NDArray[Any]:
    """Return an array with the values of a dense tensor, in the same memory if that is the CPU's."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_quantized or name not in DTYPES:
        raise InvalidArgument(
            f"{path} is a tensor of layout {tensor.layout} and dtype {tensor.dtype}; convert it to a dense tensor "
            f"of {', '.join(DTYPES)}"
        )
    values = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if values.numel() == 0:
        return np.empty(tuple(values.shape), DTYPES[name])
    flat: npt.NDArray[Any] = values.reshape(-1).view(torch.uint8).numpy()
    return flat.view(DTYPES[name]).reshape(tuple(values.shape))
