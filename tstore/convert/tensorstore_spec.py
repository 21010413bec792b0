"""`tstore.open`: a store by its URL, or a plain Zarr array by a spec of TensorStore."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any, overload
from urllib.parse import unquote, urlsplit

from tstore.array import Array
from tstore.convert.folder import Folder
from tstore.convert.zarr_folder import read_array
from tstore.errors import InvalidArgument
from tstore.format.arguments import quote
from tstore.format.arrays.dtypes import dtype_named
from tstore.storage.base import Storage
from tstore.storage.cache import Cache
from tstore.store import Mode, Store
from tstore.store import open as open_store

__all__ = ["open"]

_FORMATS = {"zarr3": 3, "zarr": 2, "zarr2": 2}
_WITHOUT_EFFECT = {"context", "cache_pool", "data_copy_concurrency"}  # they only say how to read
_WITHOUT_EFFECT |= {"recheck_cached_data", "recheck_cached_metadata", "fill_missing_data_reads"}
_SUPPORTED = ("driver", "kvstore", "path", "dtype")
_MODES = {"open": True, "create": False, "delete_existing": False, "assume_metadata": False}
_BUCKETS = {"gcs": "gs", "s3": "s3"}
_PIPELINE = re.compile(r"(\w+://[^|]*)\|(zarr[23]?):")
_SCHEMES = ("file", "gs", "s3", "http", "https")


@overload
async def open(
    url: str | os.PathLike[str] | Storage,
    mode: Mode = "a",
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: Cache | str | os.PathLike[str] | None = None,
) -> Store: ...


@overload
async def open(
    url: Mapping[str, Any],
    mode: Mode = "a",
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: Cache | str | os.PathLike[str] | None = None,
) -> Array: ...


async def open(
    url: str | os.PathLike[str] | Storage | Mapping[str, Any],
    mode: Mode = "a",
    *,
    storage_options: Mapping[str, Any] | None = None,
    cache: Cache | str | os.PathLike[str] | None = None,
) -> Store | Array:
    """Open the store at a URL or path, or on a `Storage`.

    URLs begin with `file://`, `memory://`, `http(s)://`, `gs://`, `s3://` or another scheme that fsspec knows.
    `storage_options` are options of that storage, such as a `token`; they are never shown. `cache` is a local
    folder of at most 10 GiB for objects read from a server; pass a `Cache` for another limit.

    The modes "r" (read) and "r+" (read and write) require a store and create nothing. The mode "a" opens a store
    for reading and writing and creates it if it is missing; "x" creates a store and fails if there is one. Raise
    `NotAStore` (there is no store, or the folder has other files), `AlreadyExists` (mode "x"), `UnsupportedFormat`
    (written by a newer tstore), `Denied` (no permission, or a test found that the storage does not create objects
    exclusively), `InvalidArgument` (a wrong URL, option or mode).

    In place of a URL, pass the spec of a plain Zarr array, v3 or v2, as TensorStore takes it: `{"driver": "zarr3",
    "kvstore": "file:///folder/"}`. That returns a read-only array, which is read in place. Chunks that do not
    exist have the fill value; others have no checksums, so a damaged one is noticed only if it does not decode.
    """
    if isinstance(url, str) and (pipeline := _PIPELINE.fullmatch(url)):
        raise InvalidArgument(
            f"{quote(url)} is a URL pipeline of TensorStore; pass a spec, such as "
            f"{{'driver': {pipeline[2]!r}, 'kvstore': {pipeline[1]!r}}}"
        )
    if not isinstance(url, Mapping):
        return await open_store(url, mode, storage_options=storage_options, cache=cache)
    if mode in ("r+", "x") or cache is not None:
        raise InvalidArgument("a plain Zarr array is only read, in place: pass no mode and no cache with a spec")
    spec = dict(url)
    _check_keys(spec)
    driver = spec.pop("driver", None)
    if not isinstance(driver, str) or driver not in _FORMATS:
        raise InvalidArgument(f"driver {quote(driver)} can't be opened: expected 'zarr3' or 'zarr'")
    location, path = _location(spec.pop("kvstore", None)), spec.pop("path", "")
    dtype = spec.pop("dtype", None)
    for key, value in _MODES.items():
        if spec.pop(key, value) is not value:
            raise InvalidArgument(f"{key}={not value} in a spec: a plain Zarr array is only read; leave it out")
    if not isinstance(path, str):
        raise InvalidArgument(f"path={quote(path)} in a spec: expected text")
    folder = Folder(f"{location.rstrip('/')}/{path.strip('/')}".rstrip("/") or "/", storage_options)
    source = await read_array(folder, "", _FORMATS[driver])
    if dtype is not None and dtype_named(dtype) != source.meta.dtype:
        raise InvalidArgument(f"{source.location} is {source.meta.dtype}, not the spec's dtype {quote(dtype)}")
    return Array(source, source.location, source.meta)


def _check_keys(spec: Mapping[str, Any]) -> None:
    """Raise `InvalidArgument`, naming the keys and similar ones, if a spec has keys that are not supported."""
    known = {*_SUPPORTED, *_WITHOUT_EFFECT, *_MODES}
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
