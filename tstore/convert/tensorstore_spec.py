"""Open a plain Zarr array from a TensorStore spec."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from tstore.convert.folder import Folder
from tstore.convert.zarr_folder import read_array
from tstore.core.array import Array
from tstore.core.format.arguments import quote
from tstore.core.format.arrays.dtypes import dtype_named
from tstore.errors import InvalidArgument

__all__ = ["open_spec"]

_FORMATS = {"zarr3": 3, "zarr": 2, "zarr2": 2}
_WITHOUT_EFFECT = {"context", "cache_pool", "data_copy_concurrency"}  # they only say how to read
_WITHOUT_EFFECT |= {"recheck_cached_data", "recheck_cached_metadata", "fill_missing_data_reads"}
_SUPPORTED = ("driver", "kvstore", "path", "dtype")
_OF_ARRAYS = {"metadata", "transform"}  # added by `array.spec().to_json()`
_MODES = {"open": True, "create": False, "delete_existing": False, "assume_metadata": False}
_BUCKETS = {"gcs": "gs", "s3": "s3"}
_SCHEMES = ("file", "gs", "s3", "http", "https")


async def open_spec(spec: Mapping[str, Any], storage_options: Mapping[str, Any] | None) -> Array:
    """Open the plain Zarr array of a spec, to be read in place."""
    spec = dict(spec)
    _check_keys(spec)
    driver = spec.pop("driver", None)
    if not isinstance(driver, str) or driver not in _FORMATS:
        raise InvalidArgument(f"driver {quote(driver)} can't be opened: expected 'zarr3' or 'zarr'")
    location, path = _location(spec.pop("kvstore", None)), spec.pop("path", "")
    dtype, metadata, transform = spec.pop("dtype", None), spec.pop("metadata", {}), spec.pop("transform", {})
    for key, value in _MODES.items():
        if spec.pop(key, value) is not value:
            raise InvalidArgument(f"{key}={not value} in a spec: a plain Zarr array is only read; leave it out")
    if not isinstance(path, str):
        raise InvalidArgument(f"path={quote(path)} in a spec: expected text")
    folder = Folder(f"{location.rstrip('/')}/{path.strip('/')}".rstrip("/") or "/", storage_options)
    source = await read_array(folder, "", _FORMATS[driver])
    if dtype is not None and dtype_named(dtype) != source.meta.dtype:
        raise InvalidArgument(f"{source.location} is {source.meta.dtype}, not the spec's dtype {quote(dtype)}")
    shape = list(source.meta.shape)
    if not isinstance(metadata, Mapping) or metadata.get("shape", shape) != shape:
        raise InvalidArgument(f"{source.location} has the shape {shape}, not that of the spec's metadata")
    if not _is_whole(transform, shape):
        raise InvalidArgument(
            f"the transform of the spec selects a part of {source.location}; leave it out, and index the array"
        )
    return Array(source, source.location, source.meta)


def _is_whole(transform: Any, shape: list[int]) -> bool:
    """Return whether a transform, possibly partial, is the identity on an array of this shape."""
    if not isinstance(transform, Mapping) or "output" in transform:
        return False
    first, stop = transform.get("input_inclusive_min"), transform.get("input_exclusive_max")
    return first in (None, [0] * len(shape)) and stop in (None, shape, [[n] for n in shape])


def _check_keys(spec: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument`, naming the keys and similar ones, if a spec has keys that are not supported."""
    known = {*_SUPPORTED, *_WITHOUT_EFFECT, *_MODES, *_OF_ARRAYS}
    unknown = sorted(spec.keys() - known, key=str)
    if not unknown:
        return
    names = ", ".join(map(quote, unknown))
    similar = {match for key in unknown for match in difflib.get_close_matches(str(key), known, 1)}
    if similar:
        advice = f"did you mean {' and '.join(map(repr, sorted(similar)))}?"
    else:
        advice = f"expected {', '.join(_SUPPORTED)} (to select a part, index the array)"
    raise InvalidArgument(f"the spec of a Zarr array has unsupported keys: {names}; {advice}")


def _location(kvstore: Any) -> str:
    """Return the path or URL of a key-value store as fsspec takes it."""
    if isinstance(kvstore, str):
        try:
            parts = urlsplit(kvstore)
        except ValueError as error:
            raise InvalidArgument(f"kvstore {quote(kvstore)} is not a URL: {error}") from None
        if parts.scheme not in _SCHEMES or "|" in kvstore:
            raise InvalidArgument(_unsupported(f"kvstore {quote(kvstore)}"))
        if parts.scheme == "file" and parts.netloc not in ("", "localhost"):
            raise InvalidArgument(
                f"kvstore {quote(kvstore)}: a file URL has an absolute path, such as file:///path; for a relative "
                "one pass {'driver': 'file', 'path': …}"
            )
        return unquote(parts.path) if parts.scheme == "file" else kvstore
    if not isinstance(kvstore, Mapping):
        raise InvalidArgument(f"kvstore={quote(kvstore)} in a spec: expected a URL or a mapping with a 'driver'")
    fields = {key: value for key, value in kvstore.items() if key != "context"}
    driver, path = fields.pop("driver", None), fields.pop("path", "")
    if not isinstance(path, str):
        raise InvalidArgument(f"path={quote(path)} in a kvstore: expected text")
    match driver, fields:
        case "file", {**rest} if not rest and path:
            return os.path.abspath(path)  # not a URL of fsspec
        case "gcs" | "s3", {"bucket": str(bucket), **rest} if not rest:
            return f"{_BUCKETS[driver]}://{bucket}/{path}"
        case "http", {"base_url": str(base), **rest} if not rest:
            return f"{base.rstrip('/')}/{path.lstrip('/')}"
        case "file" | "gcs" | "s3" | "http", _:
            keys = ", ".join(sorted(map(str, fields))) or "none"
            raise InvalidArgument(
                f"the kvstore {driver!r} has unsupported or missing keys (besides path: {keys}); expected "
                "'path' for file, 'bucket' and 'path' for gcs and s3, 'base_url' and 'path' for http"
            )
    raise InvalidArgument(_unsupported(f"the kvstore driver {quote(driver)}"))


def _unsupported(what: str) -> str:
    return f"{what} can't be opened: expected file, gcs, s3 or http, or a URL file://, gs://, s3:// or http(s)://"
