"""The dtypes and fill values of arrays, in memory and in a Zarr v3 `zarr.json`; pure, no I/O.

These are the data types of fixed size: NumPy's numbers, bfloat16 and the floats and integers of up to 8 bits of
ml_dtypes, strings and bytes of fixed length, times, and structs of these. Structs have no padding, and their
fields are little-endian. A number of fewer than 8 bits is in the low bits of a byte; the high bits are ignored.
Variable-length types are in `variable`; they can't be fields of a struct.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import math
from typing import Any

import ml_dtypes
import numpy as np

from tstore.core.format.arguments import quote
from tstore.core.format.arrays.variable import (
    variable_dtype,
    variable_fill,
    variable_fill_from_json,
    variable_fill_to_json,
    variable_name,
)
from tstore.errors import InvalidArgument, UnsupportedFormat

__all__ = [
    "array_dtype",
    "as_records",
    "dtype_named",
    "dtype_text",
    "dtype_to_json",
    "fill_from_argument",
    "fill_from_json",
    "fill_to_json",
    "has_ml_dtype",
    "has_nonfinite",
    "is_float",
    "is_integer",
    "is_ml_dtype",
    "stored_dtype",
]

_LONGEST_NAME = 40  # characters
_MAX_ITEM = 1 << 20  # bytes of one value
_MAX_NESTED = 8  # levels of structs
_MAX_SCALE = (1 << 31) - 1

_WIDEST = {"f": np.dtype("float64"), "c": np.dtype("complex128")}
"""The widest floats that are the same on every platform, by kind."""

_UNITS = frozenset(("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "generic"))
_LENGTHS = {"fixed_length_utf32": "U", "null_terminated_bytes": "S", "raw_bytes": "V"}
_TIMES = {"numpy.datetime64": "M", "numpy.timedelta64": "m"}
_SUB_BYTE = ("int2", "int4", "uint2", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")
"""The types of fewer than 8 bits that have names in Zarr."""
_ML_DTYPES = frozenset(
    getattr(ml_dtypes, name)
    for name in dir(ml_dtypes)
    if name == "bfloat16" or name.startswith("float8_") or name in _SUB_BYTE
)
_ADVICE = (
    "only an array of a transaction can have values of variable length, with the dtype 'string' or "
    "'variable_length_bytes'; elsewhere use a fixed length, such as 'U20' or 'S20'"
)


def array_dtype(name: Any) -> np.dtype[Any]:
    """Return the dtype of this name, which may be of variable length; raise `InvalidArgument`."""
    variable = variable_dtype(name)
    return dtype_named(name) if variable is None else variable


def dtype_named(name: Any) -> np.dtype[Any]:
    """Return the dtype of this name, or equal to this dtype of PyTorch, in native byte order.

    Raise `InvalidArgument` for a dtype that can't be stored: objects, strings of variable length, numbers of one
    bit, long doubles, and structs with gaps or with an array as a field.
    """
    try:
        dtype = np.dtype(str(name) if name is None else name)  # NumPy takes None for float64
    except (TypeError, ValueError):
        if str(name).startswith("torch."):
            return dtype_named(str(name).removeprefix("torch."))
        custom = getattr(ml_dtypes, str(name), None)
        if not isinstance(custom, type):
            raise InvalidArgument(f"dtype {quote(name)} is unknown to NumPy and ml_dtypes") from None
        dtype = np.dtype(custom)
    return _storable(dtype, _MAX_NESTED)


def _storable(dtype: np.dtype[Any], max_nested: int) -> np.dtype[Any]:
    widest = _WIDEST.get(dtype.kind)
    if widest is not None and dtype.itemsize > widest.itemsize:
        raise InvalidArgument(f"dtype {dtype} can't be stored, because it differs between platforms; use {widest}")
    if dtype.fields is not None and dtype.names and max_nested:
        fields = [(field, _storable(dtype.fields[field][0], max_nested - 1)) for field in dtype.names]
        if not all(dtype.names):
            raise InvalidArgument(f"dtype {quote(dtype)} has a field without a name")
        native = np.dtype(fields)
        if native.itemsize != dtype.itemsize:
            raise InvalidArgument(
                f"dtype {quote(dtype)} has gaps between its fields, which are not stored: pass the values through "
                "numpy.lib.recfunctions.repack_fields"
            )
    elif dtype.kind in "OT" or (dtype.kind in "US" and not dtype.itemsize):
        raise InvalidArgument(f"dtype {dtype} can't be stored: {_ADVICE}")
    elif dtype.kind in "biufcmMUS":
        native = dtype.newbyteorder("=")
    elif is_ml_dtype(dtype) or (type(dtype) is np.dtypes.VoidDType and not dtype.subdtype and dtype.itemsize):
        native = dtype
    else:
        raise InvalidArgument(
            f"dtype {quote(dtype)} can't be stored: expected bool, a number type of NumPy, bfloat16, a float "
            "or integer of 2 to 8 bits of ml_dtypes, strings or bytes of fixed length, times, or a struct of these"
        )
    if native.itemsize > _MAX_ITEM:
        raise InvalidArgument(f"a value of {native.itemsize} bytes is too long: expected at most {_MAX_ITEM}")
    return native


def is_ml_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether this is a number type of ml_dtypes: of NumPy's kind "V", or "f" for float8_e5m2."""
    return dtype.kind in "Vf" and dtype.type in _ML_DTYPES


def has_ml_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether this is a number type of ml_dtypes, or a struct with one."""
    if dtype.names is not None:
        assert dtype.fields is not None
        return any(has_ml_dtype(dtype.fields[name][0]) for name in dtype.names)
    return is_ml_dtype(dtype)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether values of this dtype are real floats, of NumPy or of ml_dtypes."""
    return dtype.kind == "f" or (is_ml_dtype(dtype) and not is_integer(dtype))


def has_nonfinite(dtype: np.dtype[Any]) -> bool:
    """Return whether a float dtype has NaN; those of fewer than 8 bits have neither NaN nor infinity."""
    return dtype.kind != "V" or dtype.name not in _SUB_BYTE  # check the kind first: `name` is slow


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Return whether values of this dtype are integers, of NumPy or of ml_dtypes."""
    return dtype.kind in "iu" or (is_ml_dtype(dtype) and "int" in dtype.name)


def as_records(values: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """Return values as an array that can be cast to text, bytes or structs without loss, or else None.

    NumPy would truncate values that are too long.
    """
    if dtype.names is not None and not isinstance(values, np.ndarray | np.generic):
        try:
            return np.asarray(values, dtype)  # tuples
        except (TypeError, ValueError):
            return None
    array = np.asarray(values)
    if array.dtype.kind == dtype.kind and np.can_cast(array.dtype, dtype, "safe"):
        raw = dtype.kind == "V" and dtype.names is None
        return None if raw and array.dtype.itemsize < dtype.itemsize else array
    fits = array.dtype.kind == dtype.kind and dtype.kind in "US"
    longest = dtype.itemsize // (4 if dtype.kind == "U" else 1)
    return array if fits and np.strings.str_len(array).max(initial=0) <= longest else None


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return a short name for people, such as "float32", "U5" (5 characters), "S5" (5 bytes) or "{x: int8}"."""
    if dtype.hasobject:
        return "string" if dtype.kind == "T" else "bytes"
    if dtype.names is not None:
        assert dtype.fields is not None
        return "{" + ", ".join(f"{name}: {dtype_text(dtype.fields[name][0])}" for name in dtype.names) + "}"
    return dtype.str.lstrip("<>=|") if dtype.kind in "USV" and not is_ml_dtype(dtype) else dtype.name


def dtype_to_json(dtype: np.dtype[Any]) -> Any:
    """Return the data type of a `zarr.json`: a name, or an object with a name and a configuration."""
    if dtype.hasobject:
        return variable_name(dtype)
    if dtype.names is not None:
        assert dtype.fields is not None
        fields = [[name, dtype_to_json(dtype.fields[name][0])] for name in dtype.names]
        return {"name": "structured", "configuration": {"fields": fields}}
    if dtype.kind in "mM":
        unit, scale = np.datetime_data(dtype)
        name = next(name for name, kind in _TIMES.items() if kind == dtype.kind)
        return {"name": name, "configuration": {"unit": unit, "scale_factor": scale}}
    if dtype.kind in "USV" and not is_ml_dtype(dtype):
        name = next(name for name, kind in _LENGTHS.items() if kind == dtype.kind)
        return {"name": name, "configuration": {"length_bytes": dtype.itemsize}}
    return dtype.name


def stored_dtype(data_type: Any) -> np.dtype[Any]:
    """Return the dtype of a data type in a `zarr.json`; raise `UnsupportedFormat`, or `TypeError`."""
    name = data_type
    if isinstance(data_type, dict) and data_type.keys() <= {"name", "configuration"}:
        name = data_type.get("name") if not data_type.get("configuration") else None
    variable = variable_dtype(name) if isinstance(name, str) else None
    return _stored(data_type, _MAX_NESTED) if variable is None else variable


def _stored(data_type: Any, max_nested: int) -> np.dtype[Any]:
    if isinstance(data_type, str):
        dtype = _known_dtype(data_type) if len(data_type) <= _LONGEST_NAME else None
        name, configuration = data_type, None
    elif isinstance(data_type, dict) and isinstance(data_type.get("name"), str):
        name, configuration = data_type["name"], data_type.get("configuration", {})
        dtype = _configured_dtype(name, configuration, max_nested) if isinstance(configuration, dict) else None
    else:
        raise TypeError(f"{data_type!r:.100} is not a data type with a name")
    if dtype is None:
        reason = f": {_ADVICE}" if variable_dtype(name) is not None else ""
        with_configuration = f" with configuration {configuration!r:.100}" if configuration else ""
        raise UnsupportedFormat(f"data type {name!r:.100}{with_configuration} is not supported{reason}")
    return dtype


@functools.lru_cache(maxsize=256)
def _known_dtype(name: str) -> np.dtype[Any] | None:
    try:
        dtype = dtype_named(name)
    except InvalidArgument:
        return None
    return dtype if dtype.name == name and dtype_to_json(dtype) == name else None


def _configured_dtype(name: str, configuration: dict[str, Any], max_nested: int) -> np.dtype[Any] | None:
    """Return the dtype, or None if this version of tstore does not support it."""
    match configuration:
        case {"length_bytes": int(length), **rest} if name in _LENGTHS and not rest:
            width = 4 if name == "fixed_length_utf32" else 1
            if 0 < length <= _MAX_ITEM and not length % width and type(length) is int:
                return np.dtype(f"{_LENGTHS[name]}{length // width}")
        case {"unit": str(unit), "scale_factor": int(scale), **rest} if name in _TIMES and not rest:
            unit = "us" if unit == "μs" else unit
            if unit in _UNITS and type(scale) is int and 1 <= scale <= (1 if unit == "generic" else _MAX_SCALE):
                kind = _TIMES[name]
                return np.dtype(f"{kind}8" if unit == "generic" else f"{kind}8[{scale}{unit}]")
        case {"fields": [_, *_] as fields, **rest} if name == "structured" and not rest and max_nested:
            return _struct(fields, max_nested - 1)
        case {} if not configuration:
            return _known_dtype(name) if len(name) <= _LONGEST_NAME else None
    return None


def _struct(fields: list[Any], max_nested: int) -> np.dtype[Any]:
    for field in fields:
        if not (isinstance(field, list) and len(field) == 2 and isinstance(field[0], str) and field[0]):
            raise TypeError(f"{field!r:.100} is not the name and data type of a field")
    dtype = np.dtype([(field, _stored(data_type, max_nested)) for field, data_type in fields])
    if dtype.itemsize > _MAX_ITEM:
        raise UnsupportedFormat(f"a value of {dtype.itemsize} bytes is too long: expected at most {_MAX_ITEM}")
    return dtype


def fill_from_argument(value: Any, dtype: np.dtype[Any]) -> Any:
    """Cast the fill value to a dtype; raise `InvalidArgument` if that fails, or changes anything but a float.

    Zero stands for the zero of every dtype: an empty string, the first moment, a struct of zeros.
    """
    if dtype.hasobject:
        try:
            return variable_fill(value, dtype)
        except TypeError:
            raise InvalidArgument(f"fill_value={quote(value)}: expected a value of {dtype_text(dtype)}") from None
    if type(value) is int and value == 0:
        return np.zeros((), dtype)[()]
    with np.errstate(all="ignore"), contextlib.suppress(TypeError, ValueError, OverflowError, LookupError):
        if dtype.kind in "SV" and not is_ml_dtype(dtype):
            return _bytes_fill(value, dtype)
        scalar = np.asarray(value)
        if scalar.ndim == 0 and value is not None and _is_castable(scalar.dtype.kind, dtype.kind):
            fill = scalar.astype(dtype)
            exact = dtype.kind in "bU" or is_integer(dtype)
            if scalar == fill if exact else has_nonfinite(dtype) or np.isfinite(scalar):
                return fill[()]
    raise InvalidArgument(f"fill_value={quote(value)}: expected a value of dtype {dtype}")


def _is_castable(kind: str, to: str) -> bool:
    if to in "UmM":
        return kind in {"U": "U", "m": "miuU", "M": "MiuU"}[to]
    return kind != "c" or to == "c"


def _bytes_fill(value: Any, dtype: np.dtype[Any]) -> Any:
    if dtype.names is not None:
        fill = np.array(value, dtype)
    elif isinstance(value, (bytes, np.void)):
        data = bytes(value) if isinstance(value, bytes) else value.tobytes()
        if len(data) > dtype.itemsize or (dtype.kind == "V" and len(data) < dtype.itemsize):
            raise ValueError
        fill = np.frombuffer(data.ljust(dtype.itemsize, b"\0"), dtype).reshape(())
    else:
        raise TypeError
    if fill.ndim:
        raise TypeError
    return fill[()]


def fill_to_json(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return the JSON form of a fill value in a `zarr.json`."""
    if dtype.hasobject:
        return variable_fill_to_json(value)
    if dtype.kind == "b":
        return bool(value)
    if is_integer(dtype):
        return int(value)
    if dtype.kind in "mM":
        return int(np.asarray(value, dtype).view(np.int64))
    if dtype.kind == "c":
        return [_float_to_json(float(value.real)), _float_to_json(float(value.imag))]
    if dtype.kind == "U":
        return str(value)
    if dtype.kind in "SV" and not is_ml_dtype(dtype):
        data = bytes(value) if dtype.kind == "S" else np.asarray(value).astype(dtype.newbyteorder("<")).tobytes()
        return base64.standard_b64encode(data).decode()
    return _float_to_json(float(value))


def _float_to_json(number: float) -> Any:
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def fill_from_json(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return the fill value in a `zarr.json`; raise `TypeError`, `ValueError` or `OverflowError`."""
    if dtype.hasobject:
        return variable_fill_from_json(value, dtype)
    if dtype.kind == "c":
        real, imaginary = value
        with np.errstate(all="ignore"):
            part = np.dtype(f"f{dtype.itemsize // 2}")
            return dtype.type(complex(_float_from_json(real, part), _float_from_json(imaginary, part)))
    if dtype.kind == "b":
        if not isinstance(value, bool):
            raise TypeError(f"{value!r:.100} is neither true nor false")
        return np.bool_(value)
    if dtype.kind in "mM" or is_integer(dtype):
        if value == "NaT" and dtype.kind in "mM":
            return np.array("NaT", dtype)[()]
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # as other readers do
        if type(value) is not int:
            raise TypeError(f"{value!r:.100} is not a value of {dtype}")
        if dtype.kind in "mM":
            return np.array(value, np.int64).view(dtype)[()]
        return _integer(value, dtype)
    if dtype.kind in "USV" and not is_ml_dtype(dtype):
        return _string_from_json(value, dtype)
    number = _float_from_json(value, dtype)
    if not (has_nonfinite(dtype) or math.isfinite(number)):
        raise ValueError(f"{value!r:.100} is not a value of {dtype}")
    with np.errstate(all="ignore"):
        return np.asarray(number).astype(dtype)[()]


def _integer(value: int, dtype: np.dtype[Any]) -> Any:
    """Return an integer of a dtype; raise `OverflowError` if it does not fit."""
    if is_ml_dtype(dtype):
        limits = ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
        if not limits.min <= value <= limits.max:
            raise OverflowError(f"{value} is not a value of {dtype}")
    return dtype.type(value)


def _string_from_json(value: Any, dtype: np.dtype[Any]) -> Any:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.100} is not a string")
    if dtype.kind == "U":
        if 4 * len(value) > dtype.itemsize:
            raise ValueError(f"{value!r:.100} is longer than a value of {dtype}")
        return np.array(value, dtype)[()]
    data = base64.b64decode(value, validate=True)
    if len(data) > dtype.itemsize or (dtype.kind == "V" and len(data) < dtype.itemsize):
        raise ValueError(f"{len(data)} bytes are not a value of {dtype.itemsize} bytes")
    stored = np.frombuffer(data.ljust(dtype.itemsize, b"\0"), dtype.newbyteorder("<"))
    return stored.astype(dtype, copy=False).reshape(())[()]


def _float_from_json(value: Any, dtype: np.dtype[Any]) -> Any:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, str) and value.startswith("0x") and len(value) == 2 + 2 * dtype.itemsize:
        return np.frombuffer(bytes.fromhex(value[2:])[::-1], dtype.newbyteorder("<"))[0]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.100} is not a number")
    return float(value)
