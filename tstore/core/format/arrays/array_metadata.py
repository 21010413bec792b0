"""Array metadata: the Zarr v3 `zarr.json` of an array, with the names of its chunks; pure, no I/O."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tstore.core.format.arguments import checked_attributes, checked_name, quote
from tstore.core.format.arrays.codecs import Chain, Codecs, chain_documents
from tstore.core.format.arrays.dtypes import (
    array_dtype,
    dtype_named,
    dtype_to_json,
    fill_from_argument,
    fill_from_json,
    fill_to_json,
    stored_dtype,
)
from tstore.core.format.arrays.grid import chunk_counts, default_chunks
from tstore.core.format.arrays.variable import NOMINAL_BYTES
from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat

__all__ = ["KNOWN_KEYS", "SHORT_DOCUMENT", "ArrayMeta", "ChunkNames", "Codecs", "dtype_named", "short_meta"]

_MAX_DIMENSIONS = 32
"""Half of NumPy's limit: a write views its values as a grid of chunks, which has two axes for each array axis."""

_MAX_LEVELS = 120
"""The maximum nesting of stored attributes: more than the 100 levels that `checked_attributes` allows in new ones,
so that the metadata of all arrays that tstore writes can be read."""

SHORT_DOCUMENT = 2048
"""The longest document, in bytes, whose parsed form is cached. 4,096 parsed forms take at most about 30 MiB."""

_MAX_BYTES = 1 << 62


def _check_supported(fields: Any) -> None:
    """Raise `UnsupportedFormat` for keys and values that this version of tstore does not support."""
    if not isinstance(fields, dict):
        raise TypeError(f"expected a JSON object, not {type(fields).__name__}")
    if fields["zarr_format"] != 3 or fields["node_type"] != "array":
        raise UnsupportedFormat(
            f"expected the metadata of a Zarr v3 array, not of Zarr {fields['zarr_format']!r:.40} and node type "
            f"{fields['node_type']!r:.40}"
        )
    if not isinstance(fields["chunk_grid"], dict):
        raise TypeError("expected a JSON object as the chunk grid")
    if fields["chunk_grid"]["name"] != "regular":
        raise UnsupportedFormat(
            f"chunk grid {fields['chunk_grid']['name']!r:.100} is not supported: expected 'regular'"
        )
    if fields.get("storage_transformers"):
        raise UnsupportedFormat(f"storage transformers {fields['storage_transformers']!r:.100} are not supported")
    for key in fields.keys() - KNOWN_KEYS:
        value = fields[key]
        if not isinstance(value, dict) or value.get("must_understand") is not False:
            raise UnsupportedFormat(
                f"the metadata of an array has the unsupported key {key!r:.100}, without 'must_understand': false"
            )


KNOWN_KEYS = frozenset(
    ("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs")
) | {"attributes", "dimension_names", "storage_transformers", "tstore"}
"""The keys of an array's metadata that are read."""


def _configuration(item: dict[str, Any]) -> dict[str, Any]:
    configuration = item.get("configuration", {})
    if not isinstance(configuration, dict):
        raise TypeError(f"expected a JSON object as the configuration, not {type(configuration).__name__}")
    return configuration


def _stored_lengths(what: str, values: Any, minimum: int) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(n) is int for n in values):
        raise TypeError(f"{what} is not a list of integers")
    if len(values) > _MAX_DIMENSIONS:
        raise UnsupportedFormat(f"{len(values)} dimensions; expected at most {_MAX_DIMENSIONS}")
    return _lengths(what, values, minimum)


def _stored_chunks(values: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a chunk; on an axis without elements, zarr-python may store a length of 0 for it."""
    chunks = _stored_lengths("chunks", values, 0)
    if len(shape) != len(chunks):
        raise ValueError(f"chunks {chunks} and shape {shape} differ in their number of dimensions")
    if any(chunk == 0 and length for chunk, length in zip(chunks, shape, strict=True)):
        raise ValueError(f"chunks {chunks} of an array of shape {shape} have a length below 1")
    return tuple(max(1, chunk) for chunk in chunks)


def _stored_codecs(codecs: Any) -> list[dict[str, Any]]:
    if not isinstance(codecs, list):
        raise TypeError("codecs are not a list")
    documents: list[Any] = [{"name": codec} if isinstance(codec, str) else codec for codec in codecs]
    for document in documents:
        if not isinstance(document, dict) or not isinstance(document.get("name"), str):
            raise TypeError(f"{document!r:.100} is not a codec with a name")
        _configuration(document)
    return documents


def _check_attributes(attributes: Any) -> None:
    if not isinstance(attributes, dict):
        raise TypeError(f"expected a JSON object as the attributes, not {type(attributes).__name__}")
    level: list[Any] = [attributes]
    for _ in range(_MAX_LEVELS):
        inside = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for items in inside for v in items if isinstance(v, (dict, list))]
        if not level:
            return
    raise ValueError(f"attributes are nested more than {_MAX_LEVELS} levels deep")


def _stored_names(names: Any, dimensions: int) -> tuple[str | None, ...] | None:
    if names is None:
        return None
    if not isinstance(names, list) or len(names) != dimensions:
        raise ValueError(f"expected {dimensions} dimension names, not {names!r:.100}")
    if not all(name is None or isinstance(name, str) for name in names):
        raise TypeError(f"dimension names {names!r:.100} are not all strings or null")
    return tuple(names)


def _stored_sparse(extension: Any) -> bool:
    """Return whether an array is sparse, from the value of the key "tstore" of its metadata."""
    if not isinstance(extension, dict):
        raise TypeError("the value of 'tstore' is not a JSON object")
    if not extension.keys() <= {"must_understand", "sparse"}:
        raise UnsupportedFormat("the value of 'tstore' has unsupported keys")
    return _stored_flag(extension.get("sparse", False))


def _stored_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.100} is neither true nor false")
    return value


class ArrayMeta:
    """The metadata of an array, without the references to its chunks; equal short documents share one instance.

    `document` is the `zarr.json`; `shape`, `chunks` (the shape of one chunk), `dtype`, `codecs`, `fill_value`,
    `dimension_names` and `sparse` are its contents, and `chain` encodes and decodes chunks with these codecs. The
    attributes may be large, so they are parsed when they are read. `counts` is the number of chunks along each
    axis, `chunk_size` the number of values in a chunk, and `encoded_size` the number of bytes that encoding a
    chunk needs: its encoded length before compression.
    """

    def __init__(self, document: bytes) -> None:
        try:
            fields = msgspec.json.decode(document)
            _check_supported(fields)
            self.document = document
            self.shape = _stored_lengths("shape", fields["shape"], 0)
            self.chunks = _stored_chunks(_configuration(fields["chunk_grid"])["chunk_shape"], self.shape)
            self.dtype = stored_dtype(fields["data_type"])
            _check_bytes("shape", self.shape, self.dtype)
            _check_bytes("chunks", self.chunks, self.dtype)
            self.codecs = _stored_codecs(fields["codecs"])
            if len(document) > SHORT_DOCUMENT and len(msgspec.json.encode(self.codecs)) > SHORT_DOCUMENT:
                raise UnsupportedFormat(f"codecs of more than {SHORT_DOCUMENT} bytes are not supported")
            self.fill_value = fill_from_json(fields["fill_value"], self.dtype)
            self.chain = Chain(self.dtype, self.chunks, self.codecs, self.fill_value)
            if self.chain.finite and not np.isfinite(np.float64(self.fill_value)):
                raise ValueError(f"fill value {self.fill_value} can't be encoded, because it is not finite")
            _check_attributes(fields.get("attributes", {}))
            self.dimension_names = _stored_names(fields.get("dimension_names"), len(self.shape))
            self.sparse = _stored_sparse(fields.get("tstore", {}))
        except UnsupportedFormat:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
            reason = str(error) if isinstance(error, TypeError | ValueError) else repr(error)
            raise Corrupt(f"the metadata of an array does not parse: {reason:.300}") from error
        self.counts = chunk_counts(self.shape, self.chunks)
        self.chunk_size = math.prod(self.chunks)
        self.encoded_size = self.chain.encoded_size

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes, parsed again at each access."""
        attributes: dict[str, Any] = msgspec.json.decode(self.document).get("attributes", {})
        return attributes

    @property
    def size(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def chunk_count(self) -> int:
        """The number of chunks in the grid."""
        return math.prod(self.counts)

    @property
    def nbytes(self) -> int:
        """The bytes of all values in memory."""
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def new(
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
        """Return new metadata.

        Raise `InvalidArgument` for values that can't be stored, and `UnsupportedFormat` for unknown codecs.
        """
        dtype, shape = array_dtype(dtype), _lengths("shape", shape, 0)
        if len(shape) > _MAX_DIMENSIONS:
            raise InvalidArgument(f"{len(shape)} dimensions are too many: expected at most {_MAX_DIMENSIONS}")
        itemsize = NOMINAL_BYTES if dtype.hasobject else dtype.itemsize
        chunks = default_chunks(shape, itemsize) if chunks is None else _lengths("chunks", chunks, 1)
        _check_bytes("shape", shape, dtype)
        _check_bytes("chunks", chunks, dtype)
        if len(chunks) != len(shape):
            raise InvalidArgument(f"chunks {chunks} and shape {shape} differ in their number of dimensions")
        if dimension_names is not None:
            listed = isinstance(dimension_names, Sequence) and not isinstance(dimension_names, str)
            if not listed or len(dimension_names) != len(shape):
                raise InvalidArgument(
                    f"dimension_names={quote(dimension_names)}: expected a name or None for each of the "
                    f"{len(shape)} dimensions"
                )
            dimension_names = [n if n is None else checked_name("dimension_names", n) for n in dimension_names]
        attributes = checked_attributes(attributes)
        try:
            fill = fill_from_argument(fill_value, dtype)
            documents = [checked_attributes(d, "codecs") for d in chain_documents(dtype, codecs)]
            chain = Chain(dtype, chunks, documents, fill)  # else `_meta` would raise `Corrupt`
            if chain.finite and not np.isfinite(np.float64(fill)):
                raise InvalidArgument(f"fill value {fill_value!r} can't be encoded by exmy; choose a finite one")
            return _meta(
                msgspec.json.encode(
                    {
                        "zarr_format": 3,
                        "node_type": "array",
                        "shape": shape,
                        "data_type": dtype_to_json(dtype),
                        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
                        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
                        "fill_value": fill_to_json(fill, dtype),
                        "codecs": chain.documents,
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
        """Parse a `zarr.json`; raise `Corrupt`, or `UnsupportedFormat` for features that are not supported."""
        return _meta(document)

    def plain_fields(self) -> dict[str, Any]:
        """Return the `zarr.json` in the spelling that both zarr-python and TensorStore accept."""
        fields: dict[str, Any] = msgspec.json.decode(self.document)
        fields["data_type"] = dtype_to_json(self.dtype)
        fields["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": self.chunks}}
        fields["codecs"] = self.chain.documents
        if fields.get("dimension_names") is None:
            fields.pop("dimension_names", None)
        return fields

    def with_shape(self, shape: Sequence[int]) -> ArrayMeta:
        """Return the metadata with another shape; raise `InvalidArgument` for another number of dimensions."""
        fields = msgspec.json.decode(self.document)
        fields["shape"] = _lengths("shape", shape, 0)
        if len(fields["shape"]) != len(self.shape):
            raise InvalidArgument(f"an array of {len(self.shape)} dimensions can't take shape {tuple(shape)}")
        _check_bytes("shape", fields["shape"], self.dtype)
        fields["chunk_grid"]["configuration"]["chunk_shape"] = self.chunks
        return _meta(msgspec.json.encode(fields))

    def has_fill_value_of(self, other: ArrayMeta) -> bool:
        """Return whether two arrays have the same fill value; NaN equals NaN, and 0 equals 0.0."""
        if self.dtype == other.dtype and not self.dtype.hasobject:
            mine, theirs = (np.asarray(meta.fill_value, meta.dtype).tobytes() for meta in (self, other))
            return mine == theirs
        try:
            return bool(self.fill_value == other.fill_value)
        except TypeError:  # NumPy can't compare numbers with structs or dates
            return False


def _meta(document: bytes) -> ArrayMeta:
    return short_meta(document) if len(document) <= SHORT_DOCUMENT else ArrayMeta(document)


short_meta = functools.lru_cache(maxsize=4096)(ArrayMeta)
"""Return the metadata in a document of at most `SHORT_DOCUMENT` bytes."""


def _lengths(what: str, values: Sequence[int], minimum: int) -> tuple[int, ...]:
    try:
        lengths = tuple(int(v.__index__()) for v in values)
    except (TypeError, AttributeError):
        example = f", such as ({values},)" if isinstance(values, int) and not isinstance(values, bool) else ""
        if what == "chunks" and not example:
            example = "; leave it out to have it chosen"
        raise InvalidArgument(f"{what} {values!r:.100} is not a sequence of integers{example}") from None
    if any(n < minimum for n in lengths):
        raise InvalidArgument(f"{what} {lengths} has a length below {minimum}")
    if math.prod(n or 1 for n in lengths) >= _MAX_BYTES:
        raise InvalidArgument(f"{what} {lengths} is too large: expected fewer than 2^62 elements")
    return lengths


def _check_bytes(what: str, lengths: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise `InvalidArgument` for more bytes than NumPy can address, even if an axis has a length of zero."""
    if math.prod(n or 1 for n in lengths) * dtype.itemsize >= _MAX_BYTES:
        raise InvalidArgument(f"{what} {lengths} of {dtype} is too large: expected fewer than 2^62 bytes")


_SEPARATORS = {"default": "/", "v2": "."}  # defaults if the metadata has none

_MAX_DIGITS = 19  # digits of a coordinate; Python refuses to parse thousands


class ChunkNames(NamedTuple):
    """The names of an array's chunks, below the array's path.

    With the encoding "default" they begin with "c", with "v2" they do not.
    """

    first: str
    separator: str

    @staticmethod
    def parse(encoding: Any) -> ChunkNames:
        """Parse a `chunk_key_encoding`; raise `UnsupportedFormat` for one that is not in the core of Zarr v3."""
        document = encoding if isinstance(encoding, Mapping) else {"name": encoding}
        name, settings = document.get("name"), document.get("configuration") or {}
        if not isinstance(name, str) or name not in _SEPARATORS or not isinstance(settings, Mapping):
            raise UnsupportedFormat(
                f"chunk keys of the kind {encoding!r:.100} are not supported: expected 'default' or 'v2'"
            )
        separator = settings.get("separator", _SEPARATORS[name])
        if separator not in ("/", "."):
            raise UnsupportedFormat(
                f"the separator {separator!r:.40} of chunk keys is not supported: use '/' or '.'"
            )
        return ChunkNames("c" if name == "default" else "", separator)

    def name(self, coordinates: Sequence[int]) -> str:
        """Return the name of the chunk at these coordinates of the grid."""
        parts = [*([self.first] if self.first else ()), *map(str, coordinates)]
        return self.separator.join(parts) or "0"

    def coordinates(self, name: str, dimensions: int) -> tuple[int, ...] | None:
        """Return the coordinates of the chunk with this name in a grid, or None if no chunk has this name."""
        parts = name.split(self.separator)
        if self.first:
            if parts.pop(0) != self.first:
                return None
        elif not dimensions:
            return () if name == "0" else None
        digits = (part.isascii() and part.isdigit() and len(part) <= _MAX_DIGITS for part in parts)
        if len(parts) != dimensions or not all(digits):
            return None
        coordinates = tuple(map(int, parts))
        return coordinates if parts == list(map(str, coordinates)) else None  # refuses "01"
