"""The codecs of numcodecs under Zarr's names, `numcodecs.*`; pure, no I/O.

Metadata comes from whoever wrote a store, so only the classes in this table are loaded, by the names of their
modules: numcodecs' own registry would load any codec that an installed package registers, and it has `pickle`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import exmy
import numpy as np

from tstore.core.format.arrays.dtypes import dtype_named
from tstore.errors import InvalidArgument, UnsupportedFormat

__all__ = ["checked_int", "misread_by_zarr", "new_codec", "settings_of", "stage_dtype", "unsupported"]

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
