"""The filters of a codec chain: Zarr's array→array codecs, `transpose` and those of numcodecs; pure, no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.numcodecs_classes import new_codec, settings_of, stage_dtype, unsupported
from tstore.errors import Corrupt, InvalidArgument

__all__ = ["Filter", "Transpose", "as_filter"]

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
