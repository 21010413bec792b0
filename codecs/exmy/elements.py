"""The four float types that eXmY encodes and decodes, and their arrays as flat memory."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from exmy.errors import DtypeError, FormatError

try:
    import ml_dtypes
except ImportError:  # without it, there are no bfloat16 arrays
    _BFLOAT16: np.dtype[Any] | None = None
else:
    _BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

__all__ = [
    "EXPONENT_LIMIT",
    "Array",
    "Kind",
    "Layout",
    "NonFinite",
    "as_flat",
    "builtin_view",
    "clamp_infinities",
    "kind_of",
    "output_dtype",
    "output_kind",
    "saturates",
]

Array: TypeAlias = NDArray[Any]
NonFinite: TypeAlias = Literal["error", "saturate"]


class Layout(NamedTuple):
    """The three integers that define a format."""

    exponent_bits: int
    mantissa_bits: int
    bias: int

    @property
    def bits(self) -> int:
        """The width of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits


class Kind(IntEnum):
    """A float type, numbered as in the C kernels."""

    FLOAT16 = 0
    BFLOAT16 = 1
    FLOAT32 = 2
    FLOAT64 = 3


EXPONENT_LIMIT = {Kind.FLOAT16: 16, Kind.BFLOAT16: 128, Kind.FLOAT32: 128, Kind.FLOAT64: 1024}
"""Finite magnitudes of each kind are below 2 to this power."""

_INFINITY: dict[Kind, np.unsignedinteger[Any]] = {
    Kind.FLOAT16: np.uint16(0x7C00),
    Kind.BFLOAT16: np.uint16(0x7F80),
    Kind.FLOAT32: np.uint32(0x7F800000),
    Kind.FLOAT64: np.uint64(0x7FF0000000000000),
}
_KINDS = {kind.name.lower(): kind for kind in Kind}
_KIND_CACHE: dict[np.dtype[Any], Kind] = {}


def kind_of(dtype: np.dtype[Any]) -> Kind:
    """Return the kind of a dtype, by its name. Raise `DtypeError` for other dtypes."""
    kind = _KIND_CACHE.get(dtype)
    if kind is None:
        kind = _KINDS.get(dtype.name)
        if kind is None:
            raise DtypeError(
                f"dtype {dtype.name!r} cannot be encoded or decoded; expected float16, bfloat16, float32 or "
                "float64. Convert with x.astype('float32')"
            )
        _KIND_CACHE[dtype] = kind  # NumPy takes microseconds to build the name of a dtype
    return kind


def output_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the native NumPy dtype for the name or dtype of a kind. Raise `DtypeError` for others."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        if _BFLOAT16 is None:
            raise DtypeError("dtype 'bfloat16' needs the package ml_dtypes: pip install ml_dtypes")
        return _BFLOAT16
    try:
        native: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    except TypeError as cause:
        raise DtypeError(f"{dtype!r} is not a dtype; expected float16, bfloat16, float32 or float64") from cause
    kind_of(native)
    return native


def output_kind(dtype: Any) -> Kind:
    """Return the kind of `output_dtype(dtype)`."""
    if isinstance(dtype, np.dtype) and (kind := _KIND_CACHE.get(dtype)) is not None:
        return kind
    return kind_of(output_dtype(dtype))


def as_flat(x: Any) -> tuple[Array, Kind, tuple[int, ...]]:
    """Return x as a flat, contiguous array in C order, its kind and its shape.

    C-contiguous arrays in native byte order are not copied; bfloat16 is returned as its bits in uint16.
    """
    array = np.asarray(x)
    kind = kind_of(array.dtype)
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    return builtin_view(np.ascontiguousarray(native).reshape(-1), kind), kind, array.shape


def builtin_view(array: Array, kind: Kind) -> Array:
    """Return a view of the array in one of NumPy's built-in dtypes: bfloat16 as its bits in uint16."""
    return array.view(np.uint16) if kind is Kind.BFLOAT16 else array


def clamp_infinities(array: Array, kind: Kind) -> None:
    """Replace the infinities of a `builtin_view` by the largest finite values of their sign, in place."""
    infinity = _INFINITY[kind]
    words = array.view(infinity.dtype)
    words -= (words << 1) == infinity << 1  # the bits of infinity, minus 1, are the largest finite value


def saturates(nonfinite: str) -> bool:
    """Return whether `nonfinite` asks to saturate NaN and infinity. Raise `FormatError` if it is invalid."""
    if nonfinite not in ("error", "saturate"):
        raise FormatError(f"nonfinite is {nonfinite!r}; expected 'error' or 'saturate'")
    return nonfinite == "saturate"
