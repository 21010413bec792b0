"""Convert values that a caller passes to arrays that can be cast to an array's dtype by NumPy's rules; no I/O.

PyTorch is imported only when a tensor is passed, so files of tensors are read without it. NumPy lacks bfloat16 and
the 8-bit floats: such tensors are viewed as integers of the same width, and then as the type of ml_dtypes.
"""

from __future__ import annotations

import sys
from typing import Any, Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
from exmy.user_warnings import warn

from tstore.core.format.arguments import quote
from tstore.core.format.arrays.dtypes import (
    as_records,
    dtype_named,
    has_nonfinite,
    is_float,
    is_integer,
    is_ml_dtype,
)
from tstore.core.format.arrays.variable import as_variable
from tstore.errors import InvalidArgument

__all__ = ["TORCH_DTYPES", "Casting", "as_castable", "can_cast", "tensor_values"]

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


Casting = Literal["no", "equiv", "safe", "same_kind", "unsafe"]
"""NumPy's rules for casting."""

_CASTINGS: tuple[Casting, ...] = get_args(Casting)


def can_cast(source: np.dtype[Any], target: np.dtype[Any], casting: Casting) -> bool:
    """Return whether NumPy's rule allows the cast; the usual case of equal dtypes is the quickest."""
    return source == target or np.can_cast(source, target, casting)


def as_castable(path: str, values: npt.ArrayLike, dtype: np.dtype[Any], casting: Casting) -> npt.NDArray[Any]:
    """Return the values as an array that can be cast to the dtype of the array at a path."""
    if casting not in _CASTINGS:
        raise InvalidArgument(f"casting must be one of {', '.join(_CASTINGS)}, not {quote(casting)}")
    if isinstance(values, np.ndarray) and hasattr(values, "mask"):
        raise InvalidArgument(
            f"{path}: a masked array would lose its mask; write its data and its mask as two arrays"
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        values = _values_of_tensor(path, values)
    try:
        array = _converted(values, dtype, casting)
    except ValueError as error:  # for example, for sequences of different lengths
        raise InvalidArgument(f"{path}: the values can't be converted to an array ({error})") from error
    if array is None:
        raise InvalidArgument(
            f"{path}: NumPy's rule '{casting}' does not allow casting {_describe(values, dtype, casting)} to the "
            f'array\'s dtype {dtype}; cast the values first, or write them with casting="unsafe"'
        )
    if not has_nonfinite(dtype) and is_float(array.dtype) and not np.isfinite(array).all():
        raise InvalidArgument(
            f"{path}: the values have NaN or infinity, which the array's dtype {dtype} lacks; replace them first"
        )
    if _is_untyped(values) and dtype.itemsize < array.dtype.itemsize and (is_float(dtype) or dtype.kind == "c"):
        with np.errstate(over="ignore"):
            narrowed = array.astype(dtype)
        if not np.array_equal(np.isfinite(narrowed), np.isfinite(array)):  # as in an assignment of NumPy
            message = f"{path}: some values are beyond the range of {dtype}, and become infinity or NaN"
            warn(message, RuntimeWarning)
        return narrowed
    return array


def _values_of_tensor(path: str, tensor: Any) -> npt.NDArray[Any]:
    """Return the values of a PyTorch tensor; raise `InvalidArgument`, with the path, if NumPy can't hold them."""
    try:
        return tensor_values(tensor, dtype_named(str(tensor.dtype).removeprefix("torch.")))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(
            f"{path}: a tensor of {tensor.dtype} on {tensor.device} can't be converted ({error}); pass a NumPy "
            "array"
        ) from error


def _converted(values: npt.ArrayLike, dtype: np.dtype[Any], casting: Casting) -> npt.NDArray[Any] | None:
    """Return the values as an array that can be cast to `dtype`, or None if they must be refused."""
    if dtype.hasobject:
        return as_variable(values, dtype)
    array = np.asarray(values)
    if not array.size and _is_untyped(values):
        return array.astype(dtype)
    if casting == "unsafe" and array.dtype != dtype:
        if array.dtype.kind not in "biufcV" and array.dtype.kind != dtype.kind:
            return None
        return array.astype(dtype)  # here, not in the encoder: the caller gets errors and warnings
    if dtype.kind in "USV" and array.dtype != dtype and not is_ml_dtype(dtype):
        return as_records(values, dtype)
    if array.dtype == dtype:
        return array
    if casting == "same_kind" and is_integer(dtype) and not np.can_cast(array.dtype, dtype, "safe"):
        # NumPy would let integers that do not fit wrap around, and ml_dtypes applies this rule to floats too
        untyped = _is_untyped(values) or is_ml_dtype(dtype)
        if not (
            is_integer(array.dtype) and _fit(array, dtype) and (untyped or can_cast(array.dtype, dtype, casting))
        ):
            return None
        return array.astype(dtype) if untyped else array
    if np.can_cast(array.dtype, dtype, casting):
        return array
    if not isinstance(values, (bool, int, float, complex)):
        return None
    # a Python scalar has no dtype: it is converted if it fits (kind V: the dtypes of ml_dtypes)
    kinds = "iufcV" if isinstance(values, (bool, int)) else "fcV" if isinstance(values, float) else "c"
    try:
        return np.asarray(values, dtype) if dtype.kind in kinds else None
    except OverflowError:
        return None


def _fit(integers: npt.NDArray[Any], dtype: np.dtype[Any]) -> bool:
    """Return whether all integers are in the range of an integer dtype."""
    bounds = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    return not integers.size or bool(bounds.min <= integers.min() and integers.max() <= bounds.max)


def _is_untyped(values: npt.ArrayLike) -> bool:
    """Return whether these are Python numbers, or sequences of them."""
    return not hasattr(values, "dtype")


def _describe(values: npt.ArrayLike, dtype: np.dtype[Any], casting: Casting) -> str:
    if isinstance(values, (bool, int, float, complex)):
        return repr(values)
    array = np.asarray(values)
    if is_integer(array.dtype) and (_is_untyped(values) or can_cast(array.dtype, dtype, casting)):
        return f"values from {array.min()} to {array.max()}"
    return f"dtype {array.dtype}"
