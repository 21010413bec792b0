"""The metadata of Zarr v2 arrays as that of Zarr v3: the same chunks, byte for byte; pure, no I/O.

Both formats encode a chunk with a chain of codecs; only the names in the metadata differ. So each v2 array
whose dtype v3 has is also a v3 array with other names: order F is the codec `transpose`, the byte order of the
dtype is a setting of `bytes`, and filters and compressors are codecs of numcodecs, or of Zarr.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from tstore.core.format.arrays.dtypes import array_dtype, dtype_named, dtype_to_json, fill_to_json
from tstore.core.format.arrays.variable import variable_dtype
from tstore.core.format.plain_text import with_json_numbers
from tstore.errors import UnsupportedFormat

__all__ = ["V2_KEYS", "v3_array"]

V2_KEYS = frozenset(
    (
        "zarr_format",
        "shape",
        "chunks",
        "dtype",
        "compressor",
        "fill_value",
        "order",
        "filters",
        "dimension_separator",
    )
)
"""The keys of a `.zarray`, of which a `.zgroup` has the first."""

_DIMENSIONS = "_ARRAY_DIMENSIONS"  # the attribute in which xarray stores dimension names
_ARRAY_FILTERS = frozenset(("delta", "fixedscaleoffset", "quantize", "bitround", "astype", "packbits"))
_ARRAY_COMPRESSORS = frozenset(("pcodec", "zfpy"))  # from numbers to bytes; in v3 they replace `bytes`
_VARIABLE = {"vlen-utf8": "string", "vlen-bytes": "variable_length_bytes"}  # these replace `bytes`
_SHUFFLES = {0: "noshuffle", 1: "shuffle", 2: "bitshuffle"}


def v3_array(fields: Mapping[str, Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `zarr.json` for the fields of a `.zarray` and of its `.zattrs`.

    A fill value of null becomes NaT or zero, and the attribute with xarray's dimension names `dimension_names`.
    Raise `UnsupportedFormat` for a dtype or an order that v3 lacks, and LookupError, TypeError or ValueError for
    fields that are invalid.
    """
    if fields["zarr_format"] != 2:
        raise UnsupportedFormat(
            f"expected the metadata of a Zarr v2 array, not of Zarr {fields['zarr_format']!r:.40}"
        )
    dtype, order = _dtype(fields["dtype"], fields.get("filters")), fields.get("order", "C")
    if order not in ("C", "F"):
        raise UnsupportedFormat(f"order {order!r:.40} is not supported: expected 'C' or 'F'")
    shape = list(fields["shape"])
    names = attributes.get(_DIMENSIONS)
    named = isinstance(names, list) and len(names) == len(shape) and all(isinstance(name, str) for name in names)
    kept = with_json_numbers({k: v for k, v in attributes.items() if not (named and k == _DIMENSIONS)})
    native = array_dtype(dtype)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype_to_json(native),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(fields["chunks"])}},
        "chunk_key_encoding": {
            "name": "v2",
            "configuration": {"separator": fields.get("dimension_separator", ".")},
        },
        "fill_value": _fill_value(fields.get("fill_value"), native),
        "codecs": _codecs(fields, dtype, len(shape), order == "F"),
        "attributes": kept,
        **({"dimension_names": names} if named else {}),
    }


def _dtype(name: Any, filters: Any) -> np.dtype[Any]:
    """Return the dtype, in its stored byte order; a filter says what the objects of an array are."""
    if name == "|O":
        ids = [each["id"] for each in filters or ()]
        variable = variable_dtype(_VARIABLE[ids[-1]]) if ids and ids[-1] in _VARIABLE else None
        if variable is None:
            raise UnsupportedFormat(
                f"dtype '|O' (objects) with the filters {ids} is not supported: expected the filter "
                f"{' or '.join(_VARIABLE)}"
            )
        return variable
    if isinstance(name, list):
        name = [tuple(field) for field in name]
    try:
        dtype: np.dtype[Any] = np.dtype(name)
    except TypeError:
        return dtype_named(name)  # bfloat16 and other ml_dtypes, by TensorStore's names
    if dtype.names is not None and any(dtype[field].byteorder == ">" for field in dtype.names):
        raise UnsupportedFormat(f"dtype {name!r:.100} is not supported: fields must be little-endian")
    return dtype


def _fill_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a fill value in the form of a v3 `zarr.json`."""
    if value is None and dtype.kind in "mM":
        return fill_to_json(np.array("NaT", dtype)[()], dtype)  # as zarr-python reads it
    if value is None or (dtype.kind in "USVTO" and value in (0, "")):
        return "" if dtype.hasobject else fill_to_json(np.zeros((), dtype)[()], dtype)
    if dtype.kind == "b":
        return bool(value)
    if dtype.kind in "iu" and isinstance(value, float) and value.is_integer():
        return int(value)
    if dtype.kind == "c" and not isinstance(value, list):
        return [value, 0.0]
    if dtype.kind == "S":
        return base64.standard_b64encode(base64.b64decode(value).rstrip(b"\0")).decode()
    return with_json_numbers(value)


def _codecs(fields: Mapping[str, Any], dtype: np.dtype[Any], ndim: int, transposed: bool) -> list[dict[str, Any]]:
    """Return the chain of codecs; of several filters, the last that encodes arrays decides the byte order."""
    codecs: list[dict[str, Any]] = []
    if transposed and ndim > 1:
        codecs.append({"name": "transpose", "configuration": {"order": list(range(ndim))[::-1]}})
    filters, stage = list(fields.get("filters") or ()), dtype
    while filters and filters[0]["id"] in _ARRAY_FILTERS:
        original = filters.pop(0)
        settings = {key: value for key, value in original.items() if key != "id"}
        for key in ("dtype", "astype", "encode_dtype", "decode_dtype"):
            if settings.get(key) is not None:
                settings[key] = np.dtype(settings[key]).newbyteorder("<").str
        codecs.append({"name": f"numcodecs.{original['id']}", "configuration": settings})
        stage = _encoded_dtype(original, stage)
    endian = "big" if stage.byteorder == ">" else "little"
    compressor = fields.get("compressor")
    rest = [*filters, *([] if compressor is None else [compressor])]
    if dtype.hasobject:
        codecs.append({"name": rest.pop(0)["id"]})
    elif not (rest and rest[0]["id"] in _ARRAY_COMPRESSORS):
        codecs.append({"name": "bytes", **({"configuration": {"endian": endian}} if stage.itemsize > 1 else {})})
    codecs += [_bytes_codec(settings, dtype.itemsize) for settings in rest]
    return codecs


def _encoded_dtype(settings: Mapping[str, Any], before: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype, in its byte order, of what a filter encodes."""
    if settings["id"] == "packbits":
        return np.dtype(np.uint8)
    if settings["id"] == "astype":
        encoded: np.dtype[Any] = np.dtype(settings["encode_dtype"])
    else:
        encoded = np.dtype(settings.get("astype") or settings.get("dtype") or before)
    return encoded


def _bytes_codec(settings: Mapping[str, Any], itemsize: int) -> dict[str, Any]:
    """Return the codec for a compressor, or for a filter that encodes bytes."""
    name, configuration = settings["id"], {key: value for key, value in settings.items() if key != "id"}
    match name:
        case "blosc":
            automatic = "bitshuffle" if itemsize == 1 else "shuffle"
            configuration["shuffle"] = _SHUFFLES.get(configuration.get("shuffle", 1), automatic)
            return {"name": "blosc", "configuration": {"typesize": max(1, min(itemsize, 255)), **configuration}}
        case "zstd":
            configuration = {
                "level": configuration.get("level", 0),
                "checksum": bool(configuration.get("checksum")),
            }
            return {"name": "zstd", "configuration": configuration}
        case "gzip":
            return {"name": "gzip", "configuration": {"level": configuration.get("level", 1)}}
    return {"name": f"numcodecs.{name}", "configuration": configuration}
