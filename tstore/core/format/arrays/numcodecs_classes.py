"""The codecs of numcodecs under Zarr's names, `numcodecs.*`, and the filters of a codec chain; pure, no I/O.

Metadata comes from whoever wrote a store, so only the classes in this table are loaded, by the names of their
modules: numcodecs' own registry would load any codec that an installed package registers, and it has `pickle`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import exmy
import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.dtypes import dtype_named
from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat

__all__ = [
    "Filter",
    "Transpose",
    "as_filter",
    "checked_int",
    "misread_by_zarr",
    "new_codec",
    "settings_of",
    "stage_dtype",
    "unsupported",
]

_CLASSES = {
    "adler32": ("checksum32", "Adler32"),
    "astype": ("astype", "AsType"),
    "bitround": ("bitround", "BitRound"),
    "bz2": ("bz2", "BZ2"),
    "crc32": ("checksum32", "CRC32"),
    "crc32c": ("checksum32", "CRC32C"),
    "delta": ("delta", "Delta"),
    "fixedscaleoffset": ("fixedscaleoffset", "FixedScaleOffset"),
    "fletcher32": ("fletcher32", "Fletcher32"),
    "jenkins_lookup3": ("checksum32", "JenkinsLookup3"),
    "lz4": ("lz4", "LZ4"),
    "lzma": ("lzma", "LZMA"),
    "packbits": ("packbits", "PackBits"),
    "pcodec": ("pcodec", "PCodec"),
    "quantize": ("quantize", "Quantize"),
    "shuffle": ("shuffle", "Shuffle"),
    "vlen-bytes": ("vlen", "VLenBytes"),
    "vlen-utf8": ("vlen", "VLenUTF8"),
    "zfpy": ("zfpy", "ZFPY"),
    "zlib": ("zlib", "Zlib"),
    "zstd": ("zstd", "Zstd"),
}
_NAMES = {"bytes", "exmy", "sharding_indexed", "transpose", "zstd", "gzip", "blosc", "crc32c"}
_NAMES |= {"vlen-bytes", "vlen-utf8"}
_NAMES |= {f"numcodecs.{name}" for name in (*_CLASSES, "blosc", "gzip") if not name.startswith("vlen")}
_PACKAGES = {"crc32c": "google-crc32c", "numcodecs.crc32c": "google-crc32c"}
_PACKAGES |= {name: name.partition(".")[2] for name in ("numcodecs.pcodec", "numcodecs.zfpy")}
_ELSEWHERE = {
    "imagecodecs_": "imagecodecs",
    "numcodecs.imagecodecs": "imagecodecs",
    "omfiles.": "omfiles",
}
"""Packages with codecs that are not supported, by the beginnings of these codecs' names."""


def unsupported(document: Mapping[str, Any], reason: str = "") -> UnsupportedFormat | InvalidArgument:
    """Return the error for a codec in a `zarr.json`; it names the package that provides the codec, if known."""
    if not reason and document.get("name") in _NAMES:
        return InvalidArgument(
            f"codec {document['name']!r} is in the wrong place of the chain: first come array→array codecs, then "
            "exactly one array→bytes codec, such as 'bytes' or 'exmy', and then bytes→bytes codecs"
        )
    name, settings = document.get("name"), document.get("configuration") or {}
    if not reason and isinstance(name, str):
        reason = _why_unknown(name)
    configuration = f" with configuration {settings!r:.200}" if settings else ""
    return UnsupportedFormat(f"codec {name!r:.100}{configuration} is not supported: {reason:.300}")


def _why_unknown(name: str) -> str:
    """Return why a codec of this name is not supported, and what was probably meant."""
    for prefix, package in _ELSEWHERE.items():
        if name.startswith(prefix):
            return f"it is a codec of the package {package}"
    with contextlib.suppress(exmy.ExmyError):
        exmy.Format(name)
        return f"it is an eXmY format; pass codecs={name!r}, without a list"
    numcodecs_name = f"numcodecs.{name}"
    similar = [numcodecs_name] if numcodecs_name in _NAMES else difflib.get_close_matches(name, _NAMES, 1)
    return "".join(["this version of tstore does not know it", *(f"; did you mean {each!r}?" for each in similar)])


def settings_of(document: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return the configuration of a codec, with defaults for absent keys; raise for keys that have no default."""
    settings = document.get("configuration") or {}
    unknown = settings.keys() - defaults.keys()
    if unknown:
        raise unsupported(document, f"it has no setting {min(unknown)!r:.100}")
    return {**defaults, **settings}


def new_codec(document: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    """Return an instance of the codec's class; raise `UnsupportedFormat` if its package is not installed."""
    name = str(document["name"])
    module, class_name = _CLASSES[name.removeprefix("numcodecs.")]
    try:
        found = getattr(importlib.import_module(f"numcodecs.{module}"), class_name)
    except (ImportError, AttributeError):
        package = _PACKAGES.get(name, "a newer numcodecs")
        raise unsupported(document, f"it needs the package {package}, which is not installed") from None
    try:
        return found(**settings)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise unsupported(document, str(error)) from None


def checked_int(document: Mapping[str, Any], settings: Mapping[str, Any], key: str, low: int, high: int) -> int:
    """Return a setting; raise `UnsupportedFormat` unless it is an integer in this range."""
    value = settings[key]
    if type(value) is not int or not low <= value <= high:
        raise unsupported(document, f"expected {key!r} to be an integer from {low} to {high}")
    return value


def stage_dtype(document: Mapping[str, Any], name: Any) -> np.dtype[Any]:
    """Return the dtype of this name in a configuration: bool or a number type of NumPy, in native byte order."""
    try:
        dtype = dtype_named(name) if isinstance(name, str) else None
    except InvalidArgument:
        dtype = None
    if dtype is None or dtype.kind not in "biufc" or not np.dtype(name).isnative:
        raise unsupported(document, f"{name!r:.100} is not a little-endian number type of NumPy")
    return dtype


def misread_by_zarr(codecs: Sequence[Mapping[str, Any]], itemsize: int) -> str | None:
    """Return why zarr-python misreads chunks of a chain for a dtype of `itemsize` bytes, None if it does not."""
    filtered = False
    for codec in codecs:
        settings = codec.get("configuration") or {}
        if codec["name"] == "bytes" and filtered:
            if settings.get("endian") == "big":
                return "has a filter of numcodecs before big-endian bytes, which zarr-python misreads"
            if settings.get("endian") and itemsize == 1:
                return "has a filter of numcodecs from one byte to several, which zarr-python misreads"
        filtered |= codec["name"].startswith("numcodecs.")
        inner = misread_by_zarr(settings.get("codecs") or (), itemsize)
        if inner is not None:
            return inner
    return None


Values = npt.NDArray[Any]
Document = Mapping[str, Any]


class Filter(Protocol):
    """An array→array codec for chunks of one shape and dtype.

    `document` is its entry in a `zarr.json`, with all settings; `dtype` and `shape` are those of an encoded chunk.
    """

    document: Document
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    lossless: bool

    def encode(self, chunk: Values) -> Values:
        """Return the encoded chunk, which may be a view; raise `InvalidArgument` for values that do not fit."""

    def decode(self, encoded: Values, out: Values) -> None:
        """Decode a C-contiguous array of the encoded shape and dtype into `out`; raise `Corrupt`."""


def as_filter(document: Document, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Filter | None:
    """Return the filter for chunks of this dtype and shape, or None for a codec of another kind."""
    name = document.get("name")
    if name == "transpose":
        return Transpose(document, dtype, shape)
    make = _NUMCODECS.get(name) if isinstance(name, str) else None
    return None if make is None else make(document, dtype, shape)


class Transpose:
    """Zarr's `transpose`: a permutation of the axes."""

    lossless = True

    def __init__(self, document: Document, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        order = settings_of(document, order=None)["order"]
        if isinstance(order, str) and order in ("C", "F"):  # of drafts of the format
            order = list(range(len(shape)))[:: 1 if order == "C" else -1]
        listed = isinstance(order, (list, tuple)) and all(type(axis) is int for axis in order)
        if not listed or sorted(order) != list(range(len(shape))):
            raise unsupported(document, f"expected 'order' to be a permutation of {len(shape)} axes")
        self.document: Document = {"name": "transpose", "configuration": {"order": list(order)}}
        self.dtype = dtype
        self.shape = tuple(shape[axis] for axis in order)
        self._order = tuple(order)

    def encode(self, chunk: Values) -> Values:
        """Return the transposed view."""
        return chunk.transpose(self._order)

    def decode(self, encoded: Values, out: Values) -> None:
        """Undo the transposition."""
        np.copyto(self.encode(out), encoded)


class _Numcodec:
    """A filter of numcodecs. Each encodes or decodes all elements at once, in C order."""

    def __init__(
        self,
        document: Document,
        settings: Mapping[str, Any],
        decoded: np.dtype[Any],
        dtype: np.dtype[Any],
        shape: tuple[int, ...],
        *,
        lossless: bool = False,
    ) -> None:
        self.document: Document = {"name": document["name"], "configuration": dict(settings)}
        self.dtype = dtype
        self.shape = shape
        self.lossless = lossless
        self._decoded = decoded
        if (decoded.kind == "c") != (dtype.kind == "c"):
            raise unsupported(document, f"values of {decoded} can't be encoded as {dtype}")
        self._codec = new_codec(document, settings)
        try:  # one element has all errors of settings and dtypes
            with np.errstate(all="ignore"):
                self._codec.decode(np.asarray(self._codec.encode(np.zeros(1, decoded))).view(dtype))
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise unsupported(document, f"values of {decoded} can't be encoded: {error}") from None

    def encode(self, chunk: Values) -> Values:
        # numcodecs would flatten a Fortran-contiguous array in the order of its memory
        contiguous = np.ascontiguousarray(chunk).reshape(-1)
        try:
            with np.errstate(all="ignore"):
                return np.asarray(self._codec.encode(contiguous)).view(self.dtype).reshape(self.shape)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise InvalidArgument(f"codec {self.document['name']}: {error}") from None

    def decode(self, encoded: Values, out: Values) -> None:
        try:
            with np.errstate(all="ignore"):
                decoded = np.asarray(self._codec.decode(encoded.reshape(-1))).view(self._decoded)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise Corrupt(f"codec {self.document['name']}: {error}") from error
        if decoded.size != out.size:
            raise Corrupt(f"codec {self.document['name']}: expected {out.size} values, got {decoded.size}")
        np.copyto(out, decoded.reshape(out.shape))


def _own_dtype(document: Document, settings: Mapping[str, Any], key: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that a setting names; raise `UnsupportedFormat` if it is not that of the chunks."""
    named = stage_dtype(document, settings[key])
    if named != dtype:
        raise unsupported(document, f"{key!r} is {named}, but the chunks are of {dtype}")
    return named


def _number(document: Document, settings: Mapping[str, Any], key: str) -> None:
    if type(settings[key]) not in (int, float):
        raise unsupported(document, f"expected {key!r} to be a number")


def _delta(document: Document, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Filter:
    settings = settings_of(document, dtype=dtype.str, astype=None)
    if settings["astype"] is None:
        settings["astype"] = settings["dtype"]
    own, encoded = _own_dtype(document, settings, "dtype", dtype), stage_dtype(document, settings["astype"])
    if own.kind == "b":
        raise unsupported(document, "differences of bool can't be decoded")
    return _Numcodec(document, settings, own, encoded, shape, lossless=own.kind in "iu" and own == encoded)


def _scale(document: Document, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Filter:
    settings = settings_of(document, offset=None, scale=None, dtype=dtype.str, astype=None)
    if settings["astype"] is None:
        settings["astype"] = settings["dtype"]
    _number(document, settings, "offset")
    _number(document, settings, "scale")
    own, encoded = _own_dtype(document, settings, "dtype", dtype), stage_dtype(document, settings["astype"])
    return _Numcodec(document, settings, own, encoded, shape)


def _quantize(document: Document, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Filter:
    settings = settings_of(document, digits=None, dtype=dtype.str, astype=None)
    if settings["astype"] is None:
        settings["astype"] = settings["dtype"]
    _number(document, settings, "digits")
    own, encoded = _own_dtype(document, settings, "dtype", dtype), stage_dtype(document, settings["astype"])
    return _Numcodec(document, settings, own, encoded, shape)


def _as_type(document: Document, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Filter:
    settings = settings_of(document, encode_dtype=None, decode_dtype=dtype.str)
    own = _own_dtype(document, settings, "decode_dtype", dtype)
    encoded = stage_dtype(document, settings["encode_dtype"])
    exact = np.can_cast(own, encoded, "safe") and not (own.kind in "iu" and encoded.kind in "fc")
    return _Numcodec(document, settings, own, encoded, shape, lossless=exact)


def _round(document: Document, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Filter:
    settings = settings_of(document, keepbits=None)
    if type(settings["keepbits"]) is not int or dtype.kind != "f":
        raise unsupported(document, f"expected floats and an integer 'keepbits', not {dtype}")
    return _Numcodec(document, settings, dtype, dtype, shape)


def _pack_bits(document: Document, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Filter:
    settings = settings_of(document)
    if dtype.kind != "b":
        raise unsupported(document, f"it encodes bool, not {dtype}")
    packed = (1 + -(-math.prod(shape) // 8),)
    return _Numcodec(document, settings, dtype, np.dtype(np.uint8), packed, lossless=True)


_NUMCODECS: dict[str, Callable[[Document, np.dtype[Any], tuple[int, ...]], Filter]] = {
    "numcodecs.astype": _as_type,
    "numcodecs.bitround": _round,
    "numcodecs.delta": _delta,
    "numcodecs.fixedscaleoffset": _scale,
    "numcodecs.packbits": _pack_bits,
    "numcodecs.quantize": _quantize,
}
