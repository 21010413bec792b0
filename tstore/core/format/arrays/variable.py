"""Variable-length strings and bytes: their dtypes, and the conversion of values that callers pass; pure, no I/O.

As in zarr-python, strings have NumPy's `StringDType` and bytes have `object`. These are the dtypes
with `hasobject`: the memory of such an array only points to the values, so it is never read from or written to a
file directly.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.format.arguments import quote

__all__ = [
    "MAX_ENCODED",
    "NOMINAL_BYTES",
    "as_variable",
    "bytes_in",
    "variable_dtype",
    "variable_fill",
    "variable_fill_from_json",
    "variable_fill_to_json",
    "variable_name",
]

_STRING, _BYTES = np.dtypes.StringDType(), np.dtype(object)
_NAMES: dict[str, np.dtype[Any]] = {
    "string": _STRING,
    "variable_length_utf8": _STRING,
    "variable_length_bytes": _BYTES,
    "bytes": _BYTES,
}

MAX_ENCODED = 256 << 20
"""The maximum bytes of an encoded chunk before compression, since the metadata of an array implies none."""

NOMINAL_BYTES = 256
"""The assumed length of a value, from which default chunks are computed."""


def variable_dtype(name: Any) -> np.dtype[Any] | None:
    """Return the variable-length dtype for an argument or a Zarr data type, None if it is not variable.

    `name` may also be `str`, `bytes` or a NumPy dtype.
    """
    if isinstance(name, str):
        return _NAMES.get(name)
    if name is str or name is bytes:
        return _STRING if name is str else _BYTES
    if isinstance(name, np.dtypes.StringDType):
        return None if hasattr(name, "na_object") else _STRING
    return _BYTES if isinstance(name, np.dtype) and name == _BYTES else None


def variable_name(dtype: np.dtype[Any]) -> str:
    """Return the name of the dtype in a `zarr.json`, as zarr-python writes it."""
    return "string" if dtype.kind == "T" else "variable_length_bytes"


def as_variable(values: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return strings or bytes as an array of this dtype; raise `ValueError` for any other value."""
    array = values if isinstance(values, np.ndarray) else np.asarray(values, object)
    if array.dtype.kind == ("U" if dtype.kind == "T" else "S") or array.dtype == dtype == _STRING:
        return array.astype(dtype, copy=False)
    expected = str if dtype.kind == "T" else bytes
    if array.dtype.kind not in "TO":
        raise ValueError(f"expected values of type {expected.__name__}, not of dtype {array.dtype}")
    objects = array.astype(object, copy=False)
    for number, value in enumerate(objects.flat):
        if not isinstance(value, expected):
            at = [int(i) for i in np.unravel_index(number, objects.shape)]
            where = f" at {at}" if at else ""
            raise ValueError(f"expected values of type {expected.__name__}, got {quote(value)}{where}")
    return objects.astype(dtype, copy=False)


def bytes_in(values: npt.NDArray[Any]) -> int:
    """Return a lower bound of the bytes in the values: strings are counted in characters."""
    if values.dtype.kind == "T":
        return int(np.strings.str_len(values).sum())
    return sum(map(len, values.flat))


def variable_fill(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a fill value, empty for 0; raise `TypeError` for a value of another type."""
    if type(value) is int and value == 0:
        return "" if dtype.kind == "T" else b""
    if isinstance(value, np.ndarray) and not value.ndim:
        value = value[()]
    if dtype.kind == "T" and isinstance(value, str):
        return str(value)  # not a NumPy scalar
    if dtype.kind == "O" and isinstance(value, bytes):
        return bytes(value)
    raise TypeError(f"{value!r:.100} is not a value of {variable_name(dtype)}")


def variable_fill_to_json(value: Any) -> str:
    """Return the JSON form of a fill value in a `zarr.json`: bytes in base 64."""
    return value if isinstance(value, str) else base64.standard_b64encode(value).decode()


def variable_fill_from_json(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return the fill value in a `zarr.json`; raise `TypeError` or `ValueError`."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is not a string")
    return value if dtype.kind == "T" else base64.b64decode(value, validate=True)
