"""Array metadata and the codecs that turn a chunk into bytes and back; pure, no I/O.

Metadata is a Zarr v3 `zarr.json` document, and the bytes of a chunk are what zarr-python would write for it:
C order, little-endian, edge chunks filled up to the full chunk shape. A chain is one array→bytes codec
(`bytes` or `exmy`) followed by bytes→bytes codecs (`zstd`, `gzip`).

A chunk encoded by `exmy` is an 8-byte header (the exponent bias as int16, then six zero bytes) followed by
the packed codes as `exmy` lays them out; the bias is chosen per chunk, so that no value clips.
"""

from __future__ import annotations

import functools
import gzip
import math
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import exmy
import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
from numcodecs import Zstd

from tstore.errors import Corrupt, InvalidArgument, NotFinite, UnsupportedFormat
from tstore.grid import chunk_counts

__all__ = ["ArrayMeta", "Chain", "Codecs", "dtype_named"]

Buffer = memoryview
Bytes = npt.NDArray[np.uint8]
Codecs = str | Sequence[Mapping[str, Any]] | None

_EXMY_HEADER = struct.Struct("<h6x")
_NATIVE_LITTLE = sys.byteorder == "little"


def dtype_named(name: Any) -> np.dtype[Any]:
    """The dtype of that name: NumPy's bool, ints, floats and complex, and the floats of ml_dtypes.

    Raises `InvalidArgument` for anything else (objects, strings, dates, structures, sub-byte types).
    """
    try:
        found = np.dtype(name)
    except TypeError:
        custom = getattr(ml_dtypes, str(name), None)
        if not isinstance(custom, type):
            raise InvalidArgument(f"dtype {name!r} is not known to NumPy or ml_dtypes") from None
        found = np.dtype(custom)
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


class _ArrayBytes(Protocol):
    """An array→bytes codec. `identity` says that the bytes are those of the C-ordered chunk itself."""

    identity: bool

    def size(self, count: int) -> int: ...
    def encode(self, chunk: npt.NDArray[Any], out: Bytes) -> None: ...
    def decode(self, data: Buffer, out: npt.NDArray[Any]) -> None: ...


class _Plain:
    """Zarr's `bytes` codec, little-endian."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.identity = _NATIVE_LITTLE or dtype.itemsize == 1
        self._itemsize = dtype.itemsize
        self._stored = dtype if self.identity else dtype.newbyteorder("<")

    def size(self, count: int) -> int:
        return count * self._itemsize

    def encode(self, chunk: npt.NDArray[Any], out: Bytes) -> None:
        np.copyto(out.view(self._stored).reshape(chunk.shape), chunk)

    def decode(self, data: Buffer, out: npt.NDArray[Any]) -> None:
        np.copyto(out, np.frombuffer(data, self._stored).reshape(out.shape))


class _Exmy:
    """The low-bit format `exmy.Format` with one exponent bias per chunk."""

    identity = False

    def __init__(self, dtype: np.dtype[Any], name: str) -> None:
        if dtype.name not in ("float16", "bfloat16", "float32", "float64"):
            raise InvalidArgument(
                f"codec exmy encodes float16, bfloat16, float32 and float64, not {dtype}; "
                "leave such an array without it"
            )
        try:
            self._format = exmy.Format(name)
        except ValueError as error:
            raise InvalidArgument(str(error)) from None
        self._dtype = dtype

    def size(self, count: int) -> int:
        return _EXMY_HEADER.size + exmy.packed_size(count, self._format.bits)

    def encode(self, chunk: npt.NDArray[Any], out: Bytes) -> None:
        try:
            fitted = self._format.fit(chunk)
            _EXMY_HEADER.pack_into(out.data, 0, fitted.bias)
            exmy.encode_packed(chunk, fitted, out=out[_EXMY_HEADER.size :])
        except exmy.NonFiniteError as error:
            raise NotFinite(
                f"{error.count} of {error.total} values are NaN or infinite, the first at {list(error.index)}; "
                "eXmY codes are all finite"
            ) from None

    def decode(self, data: Buffer, out: npt.NDArray[Any]) -> None:
        (bias,) = _EXMY_HEADER.unpack_from(data, 0)
        packed = np.frombuffer(data, np.uint8, offset=_EXMY_HEADER.size)
        target = out if out.flags.c_contiguous else np.empty(out.shape, out.dtype)
        exmy.decode_packed(packed, self._format.with_bias(bias), target.size, self._dtype, out=target.reshape(-1))
        if target is not out:
            np.copyto(out, target)


class _GZip:
    """Zarr's `gzip`, without the time of day in its header: equal chunks must have equal bytes."""

    def __init__(self, level: int = 5) -> None:
        self._level = level

    def encode(self, data: Any) -> bytes:
        return gzip.compress(data, self._level, mtime=0)

    def decode(self, data: Any) -> bytes:
        return gzip.decompress(data)


def _zstd(level: int = 0, checksum: bool = False) -> Any:
    return Zstd(level, checksum)


_COMPRESSORS: dict[str, Any] = {"zstd": _zstd, "gzip": _GZip}


class Chain:
    """The codecs of one array; `identity` chains store the chunk's own bytes."""

    def __init__(self, dtype: np.dtype[Any], documents: Sequence[Mapping[str, Any]]) -> None:
        if not documents:
            raise InvalidArgument("a codec chain needs an array→bytes codec: 'bytes' or 'exmy'")
        first, *rest = documents
        settings = first.get("configuration") or {}
        self._array: _ArrayBytes
        match first.get("name"):
            case "bytes" if settings.get("endian", "little") == "little":
                self._array = _Plain(dtype)
            case "exmy" if set(settings) == {"format"}:
                self._array = _Exmy(dtype, settings["format"])
            case name:
                raise UnsupportedFormat(
                    f"codec {name!r} with configuration {dict(settings)} is not known to this tstore; "
                    "install a newer one, or use 'bytes' (little-endian) or 'exmy' first in a chain"
                )
        self._compressors = []
        for document in rest:
            compressor = _COMPRESSORS.get(document.get("name", ""))
            if compressor is None:
                raise UnsupportedFormat(
                    f"codec {document.get('name')!r} is not known to this tstore; "
                    f"expected one of {sorted(_COMPRESSORS)} after the first codec of a chain"
                )
            settings = document.get("configuration") or {}
            try:
                self._compressors.append(compressor(**settings))
            except TypeError:
                raise UnsupportedFormat(
                    f"codec {document['name']!r} with configuration {dict(settings)} is not known to this tstore"
                ) from None
        self.identity = self._array.identity and not self._compressors

    def bound(self, count: int) -> int:
        """The exact size of an encoded chunk of `count` values; before compressors, where there are any."""
        return self._array.size(count)

    @property
    def fixed(self) -> bool:
        """Whether every chunk of equal shape has an encoded size of exactly `bound`."""
        return not self._compressors

    def encode(self, chunk: npt.NDArray[Any], out: Bytes) -> Buffer:
        """The encoded bytes of a C-contiguous chunk: a view of `out` (of `bound` bytes), or new memory."""
        self._array.encode(chunk, out)
        data: Any = out
        for compressor in self._compressors:
            data = compressor.encode(data)
        return memoryview(data).cast("B")

    def decode(self, data: Buffer, out: npt.NDArray[Any]) -> None:
        """Fills `out`, of the chunk's shape, from encoded bytes; `Corrupt` where their length is wrong."""
        for compressor in reversed(self._compressors):
            try:
                data = memoryview(compressor.decode(data)).cast("B")
            except (RuntimeError, ValueError, OSError, EOFError, zlib.error) as error:
                raise Corrupt(f"compressed bytes do not decode: {error}") from error
        if len(data) != self._array.size(out.size):
            raise Corrupt(f"expected {self._array.size(out.size)} encoded bytes, found {len(data)}")
        self._array.decode(data, out)


def _chain_documents(dtype: np.dtype[Any], codecs: Codecs) -> list[dict[str, Any]]:
    if codecs is None:
        plain: dict[str, Any] = {"name": "bytes"}
        if dtype.itemsize > 1:
            plain["configuration"] = {"endian": "little"}
        return [plain]
    if isinstance(codecs, str):
        return [{"name": "exmy", "configuration": {"format": codecs}}]
    return [dict(c) for c in codecs]


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
        value = complex(float(value[0]), float(value[1]))
    elif isinstance(value, str):
        value = float(value)
    filled: Any = np.asarray(value).astype(dtype)[()]
    return filled


class ArrayMeta:
    """Everything about an array but its chunks; equal documents share one instance.

    `shape`, `chunks` (of one chunk), `dtype`, `chain`, `fill_value`, `attributes`, `dimension_names`,
    `sparse`, and `document`, the bytes of its `zarr.json`.
    """

    def __init__(self, document: bytes) -> None:
        try:
            fields = msgspec.json.decode(document)
            if fields["zarr_format"] != 3 or fields["node_type"] != "array":
                raise UnsupportedFormat("expected the metadata of a Zarr v3 array")
            if fields["chunk_grid"]["name"] != "regular":
                raise UnsupportedFormat(f"chunk grid {fields['chunk_grid']['name']!r} is not known")
            self.document = document
            self.shape: tuple[int, ...] = tuple(fields["shape"])
            self.chunks: tuple[int, ...] = tuple(fields["chunk_grid"]["configuration"]["chunk_shape"])
            self.dtype = dtype_named(fields["data_type"])
            self.codecs: list[dict[str, Any]] = fields["codecs"]
            self.chain = Chain(self.dtype, self.codecs)
            self.fill_value = _fill_from_json(fields["fill_value"], self.dtype)
            self.attributes: dict[str, Any] = fields.get("attributes", {})
            self.dimension_names: tuple[str | None, ...] | None = (
                tuple(fields["dimension_names"]) if fields.get("dimension_names") is not None else None
            )
            self.sparse: bool = fields.get("tstore", {}).get("sparse", False)
        except (KeyError, TypeError, ValueError, msgspec.DecodeError) as error:
            raise Corrupt(f"metadata of an array does not parse: {error!r}") from error
        self.counts = chunk_counts(self.shape, self.chunks)
        self.chunk_size = math.prod(self.chunks)
        self.encoded_bound = self.chain.bound(self.chunk_size)

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
        chunks: Sequence[int],
        codecs: Codecs = None,
        fill_value: Any = 0,
        attributes: Mapping[str, Any] | None = None,
        dimension_names: Sequence[str | None] | None = None,
        *,
        sparse: bool = False,
    ) -> ArrayMeta:
        """The metadata of an array with these properties; `InvalidArgument` where they do not fit."""
        shape = _lengths("shape", shape, 0)
        chunks = _lengths("chunks", chunks, 1)
        if len(chunks) != len(shape):
            raise InvalidArgument(f"chunks {chunks} and shape {shape} differ in their number of dimensions")
        if dimension_names is not None and len(dimension_names) != len(shape):
            raise InvalidArgument(f"{len(dimension_names)} dimension names for {len(shape)} dimensions")
        kind = dtype_named(dtype)
        try:
            fill = _fill_to_json(_as_fill(fill_value, kind), kind)
            documents = _chain_documents(kind, codecs)
            Chain(kind, documents)  # refuses as the caller's error what in a stored document is corruption
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
                        "attributes": dict(attributes or {}),
                        **({} if dimension_names is None else {"dimension_names": list(dimension_names)}),
                        **({"tstore": {"must_understand": False, "sparse": True}} if sparse else {}),
                    }
                )
            )
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(f"fill value or attributes can't be stored: {error}") from None

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
    if math.prod(lengths) >= 1 << 62:
        raise InvalidArgument(f"{what} {lengths} holds more than 2^62 elements")
    return lengths
