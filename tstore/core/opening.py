"""`tstore.open`: open a store by URL, or a plain Zarr array by a TensorStore spec."""

from __future__ import annotations

import os
import pkgutil
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, overload

from tstore.core import pickling as _pickling  # noqa: F401 - registers how stores, snapshots and arrays are pickled
from tstore.core.array import Array
from tstore.core.format.arguments import quote
from tstore.core.storage.base import Storage
from tstore.core.storage.cache import Cache
from tstore.core.store import Mode, Store
from tstore.core.store import open as open_store
from tstore.errors import InvalidArgument

__all__ = ["open"]

_SPECS = "tstore.convert.tensorstore_spec:open_spec"  # by name, so that converters are imported only when needed
_PIPELINE = re.compile(r"(\w+://[^|]*)\|(zarr[23]?):")


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
    for reading and writing; if it is missing, its first transaction creates it. "x" creates a store and fails if
    there is one. Raise `NotAStore` (there is no store, or the folder has other files), `AlreadyExists` (mode "x"),
    `UnsupportedFormat` (written by a newer tstore), `Denied` (no permission, or a test found that the storage does
    not create objects exclusively), `InvalidArgument` (a wrong URL, option or mode).

    In place of a URL, pass the spec of a plain Zarr array, v3 or v2, as TensorStore takes it: `{"driver": "zarr3",
    "kvstore": "file:///folder/"}`. That returns a read-only array, which is read in place. Chunks that do not
    exist have the fill value; others have no checksums, so a damaged one is noticed only if it does not decode.

    Examples
    --------
    >>> import tstore.sync as tstore
    >>> store = tstore.open("memory://of-open")
    >>> with store.transaction(tag="first") as tx:
    ...     w = tx.create_array("w", data=np.arange(6.0))
    >>> store.snapshot("first").array("w")[2:4].read()
    array([2., 3.])
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
    open_spec: Callable[..., Awaitable[Array]] = pkgutil.resolve_name(_SPECS)
    return await open_spec(url, storage_options)
