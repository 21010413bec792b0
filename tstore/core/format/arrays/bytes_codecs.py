"""The bytes→bytes codecs of a chain: the usual compressors, and codecs of numcodecs; pure, no I/O.

Each decodes at most as many bytes as the encoder can have passed to it, even if a stored frame declares more.
"""

from __future__ import annotations

import bz2
import inspect
import lzma
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tstore.core.format.arrays.compressors import (
    COMPRESSORS,
    Bytes,
    Compressor,
    is_feasible,
    wrong_declaration,
    wrong_size,
)
from tstore.core.format.arrays.numcodecs_classes import checked_int, new_codec, settings_of, unsupported
from tstore.errors import Corrupt, InvalidArgument, UnsupportedFormat

__all__ = ["as_bytes_codec", "is_bytes_codec"]

Document = Mapping[str, Any]

_MAX_INT = (1 << 31) - 1
_DEFAULTS: dict[str, dict[str, Any]] = {"zstd": {"level": 0, "checksum": False}, "gzip": {"level": 5}}


def is_bytes_codec(name: str) -> bool:
    """Return whether a codec of this name is bytes→bytes."""
    return name in COMPRESSORS or name in _CODECS


def as_bytes_codec(document: Document, itemsize: int) -> Compressor:
    """Return the bytes→bytes codec of a `zarr.json`; raise `UnsupportedFormat` for an unknown one.

    `itemsize` is that of the array's dtype.
    """
    name = document.get("name")
    if name == "numcodecs.shuffle" and settings_of(document, elementsize=None)["elementsize"] is None:
        document = {"name": name, "configuration": {"elementsize": itemsize}}
    if not isinstance(name, str) or not is_bytes_codec(name):
        raise unsupported(document)
    defaults = _blosc_defaults(itemsize) if name == "blosc" else _DEFAULTS.get(name, {})
    settings = {**defaults, **(document.get("configuration") or {})}
    try:
        codec = _compressor(document, settings) if name in COMPRESSORS else _CODECS[name](document)
    except TypeError as error:
        raise unsupported(document, str(error)) from None
    if name.startswith("numcodecs.") or defaults:  # zarr-python requires a configuration
        document = {"name": name, "configuration": settings}
    codec.document = document
    return codec


def _blosc_defaults(itemsize: int) -> dict[str, Any]:
    """Return the settings of zarr-python's `BloscCodec()`."""
    shuffle = "bitshuffle" if itemsize == 1 else "shuffle"
    return {"typesize": itemsize, "cname": "zstd", "clevel": 5, "shuffle": shuffle, "blocksize": 0}


def _compressor(document: Document, settings: Mapping[str, Any]) -> Compressor:
    create = COMPRESSORS[document["name"]]
    if unknown := settings.keys() - inspect.signature(create).parameters.keys():
        raise unsupported(document, f"it has no setting {min(unknown)!r:.100}")
    return create(**settings)


class _Numcodec(Compressor):
    """A codec that numcodecs encodes."""

    def __init__(self, document: Document, settings: Mapping[str, Any]) -> None:
        self._name = document["name"]
        self._codec = new_codec(document, settings)

    def encode(self, data: Any) -> Any:
        try:
            return self._codec.encode(np.frombuffer(data, np.uint8))
        except (TypeError, ValueError, RuntimeError, lzma.LZMAError) as error:
            raise InvalidArgument(f"codec {self._name}: {error}") from None

    def _failed(self, error: Exception) -> Corrupt:
        return Corrupt(f"{self._name} bytes do not decode: {error}")

    def _streamed(self, decompressor: Any, data: memoryview, max_size: int) -> bytes:
        """Decode a single stream; raise `Corrupt` if it is too long, incomplete, or followed by other data."""
        try:
            decoded: bytes = decompressor.decompress(data, max_size + 1)
        except (zlib.error, OSError, lzma.LZMAError, EOFError) as error:
            raise self._failed(error) from error
        if len(decoded) > max_size:
            raise wrong_size(f"at most {max_size}", "more")
        if not decompressor.eof or decompressor.unused_data:
            raise Corrupt(f"{self._name} bytes are cut short, or others follow them")
        return decoded


class _Zlib(_Numcodec):
    def __init__(self, document: Document) -> None:
        settings = settings_of(document, level=1)
        checked_int(document, settings, "level", -1, 9)
        super().__init__(document, settings)

    def decode(self, data: memoryview, max_size: int) -> Any:
        return self._streamed(zlib.decompressobj(), data, max_size)


class _BZ2(_Numcodec):
    max_ratio = 1 << 21  # bzip2 encodes a run of 45.9 million equal bytes in about 40

    def __init__(self, document: Document) -> None:
        settings = settings_of(document, level=1)
        checked_int(document, settings, "level", 1, 9)
        super().__init__(document, settings)

    def decode(self, data: memoryview, max_size: int) -> Any:
        return self._streamed(bz2.BZ2Decompressor(), data, max_size)


_LZMA_MEMORY = 128 << 20  # bytes for a decoder; preset 9 takes 65 MiB
_LZMA_FORMATS = (lzma.FORMAT_XZ, lzma.FORMAT_ALONE, lzma.FORMAT_RAW)


class _LZMA(_Numcodec):
    def __init__(self, document: Document) -> None:
        settings = settings_of(document, format=1, check=-1, preset=None, filters=None)
        self._format = checked_int(document, settings, "format", _LZMA_FORMATS[0], _LZMA_FORMATS[-1])
        checked_int(document, settings, "check", -1, lzma.CHECK_SHA256)
        if settings["preset"] is not None:
            preset = checked_int(document, settings, "preset", 0, lzma.PRESET_EXTREME | 9)
            checked_int(document, {"preset": preset & ~lzma.PRESET_EXTREME}, "preset", 0, 9)
        self._filters = settings["filters"]
        if self._filters is not None:
            _check_lzma_filters(document, self._filters)
        elif self._format == lzma.FORMAT_RAW:
            raise unsupported(document, "its raw format needs 'filters'")
        super().__init__(document, settings)

    def decode(self, data: memoryview, max_size: int) -> Any:
        raw = self._format == lzma.FORMAT_RAW  # the metadata has its filters; other formats store them in the data
        try:
            decompressor = lzma.LZMADecompressor(
                self._format, None if raw else _LZMA_MEMORY, self._filters if raw else None
            )
        except (ValueError, lzma.LZMAError) as error:
            raise self._failed(error) from error
        try:
            return self._streamed(decompressor, data, max_size)
        except Corrupt as error:
            if "Memory usage limit" in str(error.__cause__):
                message = f"{self._name} bytes need more than {_LZMA_MEMORY} bytes of memory to decode"
                raise UnsupportedFormat(message) from error
            raise


def _check_lzma_filters(document: Document, filters: Any) -> None:
    if not isinstance(filters, (list, tuple)) or not 1 <= len(filters) <= 4:
        raise unsupported(document, "expected one to four 'filters'")
    for each in filters:
        if not isinstance(each, dict) or not all(type(value) is int for value in each.values()):
            raise unsupported(document, "expected 'filters' whose values are integers")
        if each.get("dict_size", 0) > _LZMA_MEMORY // 2:
            raise unsupported(document, f"expected a 'dict_size' of at most {_LZMA_MEMORY // 2}")


class _LZ4(_Numcodec):
    """The `lz4` of numcodecs: the decoded size in four bytes, then a block."""

    max_ratio = 256

    def __init__(self, document: Document) -> None:
        settings = settings_of(document, acceleration=1)
        checked_int(document, settings, "acceleration", -_MAX_INT, _MAX_INT)
        super().__init__(document, settings)

    def check_input(self, least: int, most: int) -> None:
        if most > _LZ4_MAX_INPUT:
            raise InvalidArgument(f"a chunk of {most} bytes is too long for lz4; choose smaller chunks")

    def decode(self, data: memoryview, max_size: int) -> Any:
        size = int.from_bytes(data[:4], "little")
        if len(data) < 4 or size > max_size or not is_feasible(size, len(data), self.max_ratio):
            raise wrong_declaration(f"at most {max_size}", size)
        out = np.empty(size, np.uint8)
        self.decode_into(data, out)
        return out

    def decode_into(self, data: memoryview, out: Bytes) -> None:
        if len(data) < 4 or (size := int.from_bytes(data[:4], "little")) != out.size:
            raise wrong_declaration(out.size, size if len(data) >= 4 else 0)
        try:
            self._codec.decode(data, out)
        except (RuntimeError, ValueError) as error:
            raise self._failed(error) from error


_LZ4_MAX_INPUT = 0x7E000000  # bytes


class _Shuffle(_Numcodec):
    max_ratio, overhead = 1, 0

    def __init__(self, document: Document) -> None:
        settings = settings_of(document, elementsize=4)
        self._size = checked_int(document, settings, "elementsize", 0, _MAX_INT)
        super().__init__(document, settings)

    def check_input(self, least: int, most: int) -> None:
        if self._size > 1 and (least != most or most % self._size):
            length = str(most) if least == most else f"{least} to {most}"
            raise InvalidArgument(f"{self._name} with elements of {self._size} bytes can't encode {length} bytes")

    def decode(self, data: memoryview, max_size: int) -> Any:
        if len(data) > max_size:
            raise wrong_size(f"at most {max_size}", len(data))
        try:
            return self._codec.decode(np.frombuffer(data, np.uint8))
        except ValueError as error:
            raise self._failed(error) from error


_CHECKSUM_SIZE = 4  # bytes


class _Checksum(_Numcodec):
    """A checksum of four bytes before or after the data."""

    max_ratio, overhead = 1, _CHECKSUM_SIZE

    def __init__(self, document: Document) -> None:
        defaults: dict[str, Any] = _CHECKSUM_SETTINGS.get(document["name"], {})
        settings = settings_of(document, **defaults)
        if settings.get("location", "end") not in ("start", "end"):
            raise unsupported(document, "expected 'location' to be 'start' or 'end'")
        if "initval" in settings:
            checked_int(document, settings, "initval", 0, (1 << 32) - 1)
        if settings.get("prefix") is not None:
            raise unsupported(document, "its prefix can't be stored in JSON")
        super().__init__(document, settings)

    def decode(self, data: memoryview, max_size: int) -> Any:
        if not _CHECKSUM_SIZE <= len(data) <= max_size + _CHECKSUM_SIZE:
            raise wrong_size(f"at most {max_size}", len(data) - _CHECKSUM_SIZE)
        try:
            return self._codec.decode(np.frombuffer(data, np.uint8))
        except (RuntimeError, ValueError, IndexError) as error:  # IndexError: fletcher32 of empty data
            raise self._failed(error) from error


_CHECKSUM_SETTINGS: dict[str, dict[str, Any]] = {
    "numcodecs.adler32": {"location": "start"},
    "numcodecs.crc32": {"location": "start"},
    "numcodecs.crc32c": {"location": "end"},
    "numcodecs.jenkins_lookup3": {"initval": 0, "prefix": None},
}

_CODECS: dict[str, Callable[[Document], Compressor]] = {
    "crc32c": _Checksum,
    "numcodecs.adler32": _Checksum,
    "numcodecs.bz2": _BZ2,
    "numcodecs.crc32": _Checksum,
    "numcodecs.crc32c": _Checksum,
    "numcodecs.fletcher32": _Checksum,
    "numcodecs.jenkins_lookup3": _Checksum,
    "numcodecs.lz4": _LZ4,
    "numcodecs.lzma": _LZMA,
    "numcodecs.shuffle": _Shuffle,
    "numcodecs.zlib": _Zlib,
}
