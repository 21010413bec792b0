"""Array metadata: a Zarr v3 `zarr.json` document, and what follows from it; pure, no I/O."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np

from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat
from tstore.format.arguments import checked_attributes, checked_name
from tstore.format.codecs import Chain, Codecs, chain_documents, without_clipping
from tstore.format.grid import chunk_counts, default_chunks

__all__ = ["ArrayMeta", "Codecs", "dtype_named"]


_MOST_DIMENSIONS = 32
"""Half of NumPy's: a write sees its values as a grid of chunks, with two axes for each of the array."""

_MOST_LEVELS = 120
"""Levels of nesting in stored attributes; `checked_attributes` takes 100 of a caller."""

_LONGEST_DTYPE = 40
_MOST_BYTES = 1 << 62

_WIDEST = {"f": np.dtype("float64"), "c": np.dtype("complex128")}
"""The widest floats that are the same everywhere, by kind."""


def dtype_named(name: Any) -> np.dtype[Any]:
    """The dtype of that name: NumPy's bool, ints, floats and complex, and the floats of ml_dtypes.

    Raises `InvalidArgument` for anything else (objects, strings, dates, structures, sub-byte types, long doubles).
    """
    try:
        found = np.dtype(name)
    except (TypeError, ValueError):
        custom = getattr(ml_dtypes, str(name), None)
        if not isinstance(custom, type):
            raise InvalidArgument(f"dtype {name!r} is not known to NumPy or ml_dtypes") from None
        found = np.dtype(custom)
    widest = _WIDEST.get(found.kind)
    if widest is not None and found.itemsize > widest.itemsize:
        raise InvalidArgument(
            f"dtype {found} can't be stored: other platforms have none, or another one, of that name; use {widest}"
        )
    ours = found.kind in "biufc" or (
        found.kind == "V" and (found.name == "bfloat16" or found.name.startswith("float8_"))
    )
    if not ours:
        raise InvalidArgument(
            f"dtype {found} can't be stored: expected bool, an integer, float or complex type of NumPy, "
            "bfloat16, or an 8-bit float of ml_dtypes"
        )
    native: np.dtype[Any] = found if found.kind == "V" else found.newbyteorder("=")
    return native


def _as_fill(value: Any, dtype: np.dtype[Any]) -> Any:
    """The fill value in the array's type; `ValueError` where that would change its kind or wrap it."""
    given = np.asarray(value)
    if given.ndim == 0 and (given.dtype.kind != "c" or dtype.kind == "c"):
        with np.errstate(all="ignore"):
            filled = given.astype(dtype)
        if dtype.kind not in "biu" or given == filled:
            return filled[()]
    raise ValueError(f"{value!r} is no value of {dtype}")


def _fill_to_json(value: Any, dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return bool(value)
    if dtype.kind in "iu":
        return int(value)
    if dtype.kind == "c":
        return [_fill_to_json(value.real, np.dtype("f8")), _fill_to_json(value.imag, np.dtype("f8"))]
    number = float(value)
    if math.isnan(number):
        return "NaN"
    if math.isinf(number):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def _fill_from_json(value: Any, dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "c":
        real, imaginary = value
        number = complex(_float_from_json(real), _float_from_json(imaginary))
        with np.errstate(all="ignore"):
            return dtype.type(number)
    if dtype.kind == "b":
        return np.bool_(_stored_flag(value))
    if dtype.kind in "iu":
        if type(value) is not int:
            raise TypeError(f"{value!r:.100} is no value of {dtype}")
        return dtype.type(value)  # OverflowError where it does not fit
    with np.errstate(all="ignore"):
        return np.asarray(_float_from_json(value)).astype(dtype)[()]


def _float_from_json(value: Any) -> float:
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.100} is no number")
    return float(value)


def _check_known(fields: Any) -> None:
    """Raise `UnsupportedFormat` for keys and values that this tstore does not know."""
    if not isinstance(fields, dict):
        raise TypeError(f"expected an object, found {type(fields).__name__}")
    if fields["zarr_format"] != 3 or fields["node_type"] != "array":
        raise UnsupportedFormat("expected the metadata of a Zarr v3 array")
    if fields["chunk_grid"]["name"] != "regular":
        raise UnsupportedFormat(f"chunk grid {fields['chunk_grid']['name']!r:.100} is not known")
    if fields.get("storage_transformers"):
        raise UnsupportedFormat("storage transformers are not known to this tstore")
    for key in fields.keys() - _KNOWN:
        value = fields[key]
        if not isinstance(value, dict) or value.get("must_understand") is not False:
            raise UnsupportedFormat(f"the metadata of an array has the key {key!r:.100}, which must be understood")


_KNOWN = frozenset(
    ("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs")
) | {"attributes", "dimension_names", "storage_transformers", "tstore"}


def _configuration(item: dict[str, Any]) -> dict[str, Any]:
    found = item.get("configuration", {})
    if not isinstance(found, dict):
        raise TypeError(f"a configuration is an object, not {type(found).__name__}")
    return found


def _stored_lengths(what: str, values: Any, least: int) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(n) is int for n in values):
        raise TypeError(f"{what} is no list of whole numbers")
    if len(values) > _MOST_DIMENSIONS:
        raise UnsupportedFormat(f"{len(values)} dimensions; expected at most {_MOST_DIMENSIONS}")
    return _lengths(what, values, least)


def _stored_dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, (str, dict)):
        raise TypeError(f"a data type is a name, not {type(name).__name__}")
    try:
        found = dtype_named(name) if isinstance(name, str) and len(name) <= _LONGEST_DTYPE else None
    except InvalidArgument:
        found = None
    if found is None or found.name != name:
        raise UnsupportedFormat(f"data type {name!r:.100} is not known to this tstore")
    return found


def _stored_codecs(documents: Any) -> list[dict[str, Any]]:
    if not isinstance(documents, list):
        raise TypeError("codecs are no list")
    for document in documents:
        if not isinstance(document, dict) or not isinstance(document.get("name"), str):
            raise TypeError(f"{document!r:.100} is no codec with a name")
        _configuration(document)
    return documents


def _stored_attributes(attributes: Any) -> dict[str, Any]:
    if not isinstance(attributes, dict):
        raise TypeError(f"attributes are an object, not {type(attributes).__name__}")
    if not _is_shallow(attributes):
        raise ValueError(f"attributes are nested more than {_MOST_LEVELS} levels deep")
    return attributes


def _is_shallow(value: dict[str, Any]) -> bool:
    level: list[Any] = [value]
    for _ in range(_MOST_LEVELS):
        inside = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for items in inside for v in items if isinstance(v, (dict, list))]
        if not level:
            return True
    return False


def _stored_names(names: Any, dimensions: int) -> tuple[str | None, ...] | None:
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != dimensions:
        raise ValueError(f"dimension names {names!r:.100} for {dimensions} dimensions")
    if not all(name is None or isinstance(name, str) for name in names):
        raise TypeError(f"dimension names {names!r:.100} are not all text")
    return tuple(names)


def _stored_sparse(own: Any) -> bool:
    """Return whether an array is sparse, from tstore's own field."""
    if not isinstance(own, dict):
        raise TypeError("the field 'tstore' is no object")
    if not own.keys() <= {"must_understand", "sparse"}:
        raise UnsupportedFormat("the field 'tstore' has keys that this tstore does not know")
    return _stored_flag(own.get("sparse", False))


def _stored_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.100} is neither true nor false")
    return value


class ArrayMeta:
    """Everything about an array but its chunks; equal documents share one instance.

    `shape`, `chunks` (of one chunk), `dtype`, `chain`, `fill_value`, `attributes`, `dimension_names`,
    `sparse`, and `document`, the bytes of its `zarr.json`.
    """

    def __init__(self, document: bytes) -> None:
        try:
            fields = msgspec.json.decode(document)
            _check_known(fields)
            self.document = document
            self.shape = _stored_lengths("shape", fields["shape"], 0)
            self.chunks = _stored_lengths("chunks", _configuration(fields["chunk_grid"])["chunk_shape"], 1)
            if len(self.shape) != len(self.chunks):
                raise ValueError(f"chunks {self.chunks} for the shape {self.shape}")
            self.dtype = _stored_dtype(fields["data_type"])
            _check_bytes("shape", self.shape, self.dtype)
            _check_bytes("chunks", self.chunks, self.dtype)
            self.codecs = _stored_codecs(fields["codecs"])
            self.chain = Chain(self.dtype, self.chunks, self.codecs)
            self.fill_value = _fill_from_json(fields["fill_value"], self.dtype)
            if self.chain.packed is not None and not np.isfinite(np.float64(self.fill_value)):
                raise ValueError(f"fill value {self.fill_value} can't be encoded by exmy")
            self.attributes = _stored_attributes(fields.get("attributes", {}))
            self.dimension_names = _stored_names(fields.get("dimension_names"), len(self.shape))
            self.sparse = _stored_sparse(fields.get("tstore", {}))
        except UnsupportedFormat:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            raise Corrupt(f"metadata of an array does not parse: {error!r:.300}") from error
        self.counts = chunk_counts(self.shape, self.chunks)
        self.chunk_size = math.prod(self.chunks)
        self.encoded_bound = self.chain.bound

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def chunk_count(self) -> int:
        """Number of chunks in the grid."""
        return math.prod(self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes of all values in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(
        shape: Sequence[int],
        dtype: Any,
        chunks: Sequence[int] | None,
        codecs: Codecs = None,
        fill_value: Any = 0,
        attributes: Mapping[str, Any] | None = None,
        dimension_names: Sequence[str | None] | None = None,
        *,
        sparse: bool = False,
    ) -> ArrayMeta:
        """The metadata of an array with these properties; `InvalidArgument` where they do not fit."""
        kind, shape = dtype_named(dtype), _lengths("shape", shape, 0)
        if len(shape) > _MOST_DIMENSIONS:
            raise InvalidArgument(f"{len(shape)} dimensions are too many: expected at most {_MOST_DIMENSIONS}")
        chunks = default_chunks(shape, kind.itemsize) if chunks is None else _lengths("chunks", chunks, 1)
        _check_bytes("shape", shape, kind)
        _check_bytes("chunks", chunks, kind)
        if len(chunks) != len(shape):
            raise InvalidArgument(f"chunks {chunks} and shape {shape} differ in their number of dimensions")
        if dimension_names is not None:
            listed = isinstance(dimension_names, Sequence) and not isinstance(dimension_names, str)
            if not listed or len(dimension_names) != len(shape):
                raise InvalidArgument(
                    f"dimension_names={dimension_names!r}: expected a name or None for each of the {len(shape)} "
                    "dimensions"
                )
            dimension_names = [n if n is None else checked_name("dimension_names", n) for n in dimension_names]
        attributes = checked_attributes(attributes)
        try:
            fill = _fill_to_json(_as_fill(fill_value, kind), kind)
            documents = [checked_attributes(d, "codecs") for d in chain_documents(kind, codecs)]
            Chain(kind, chunks, documents)  # refuses as the caller's error what in a stored document is corruption
            if documents[0].get("name") == "exmy" and not np.isfinite(np.asarray(fill_value, np.float64)):
                raise InvalidArgument(f"fill value {fill_value!r} can't be encoded by exmy; choose a finite one")
            return _meta(
                msgspec.json.encode(
                    {
                        "zarr_format": 3,
                        "node_type": "array",
                        "shape": shape,
                        "data_type": kind.name,
                        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
                        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
                        "fill_value": fill,
                        "codecs": documents,
                        "attributes": attributes,
                        **({} if dimension_names is None else {"dimension_names": list(dimension_names)}),
                        **({"tstore": {"must_understand": False, "sparse": True}} if sparse else {}),
                    }
                )
            )
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(f"fill value or codecs can't be stored: {error}") from None

    @staticmethod
    def parse(document: bytes) -> ArrayMeta:
        """The metadata in a `zarr.json` document; `Corrupt` or `UnsupportedFormat` where it is not."""
        return _meta(document)

    def with_shape(self, shape: Sequence[int]) -> ArrayMeta:
        """The same metadata with another shape."""
        fields = msgspec.json.decode(self.document)
        fields["shape"] = _lengths("shape", shape, 0)
        if len(fields["shape"]) != len(self.shape):
            raise InvalidArgument(f"an array of {len(self.shape)} dimensions can't take shape {tuple(shape)}")
        return _meta(msgspec.json.encode(fields))

    @functools.cached_property
    def unclipped(self) -> ArrayMeta:
        """The metadata to encode chunks with that hold stored values: their codec must not clip those."""
        if self.chain.lossless:
            return self
        fields = msgspec.json.decode(self.document)
        return _meta(msgspec.json.encode({**fields, "codecs": without_clipping(self.codecs)}))


@functools.lru_cache(maxsize=4096)
def _meta(document: bytes) -> ArrayMeta:
    return ArrayMeta(document)


def _lengths(what: str, values: Sequence[int], least: int) -> tuple[int, ...]:
    try:
        lengths = tuple(int(v.__index__()) for v in values)
    except (TypeError, AttributeError):
        raise InvalidArgument(f"{what} {values!r} is not a sequence of integers") from None
    if any(n < least for n in lengths):
        raise InvalidArgument(f"{what} {lengths} holds a length below {least}")
    if math.prod(n or 1 for n in lengths) >= _MOST_BYTES:
        raise InvalidArgument(f"{what} {lengths} holds more than 2^62 elements")
    return lengths


def _check_bytes(what: str, lengths: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise `InvalidArgument` for more values than NumPy can address, also where a length of zero hides them."""
    if math.prod(n or 1 for n in lengths) * dtype.itemsize >= _MOST_BYTES:
        raise InvalidArgument(f"{what} {lengths} of {dtype} takes more than 2^62 bytes")
