"""Encode the value of one host as bytes, and decode such values in a restore; pure, no I/O.

Each host stores its value as an array of bytes: a msgpack map with the `structure` of the value, as
`tree_document` of the format describes it, and its `arrays`: for each path, the data type as in a `zarr.json`, the
shape, and the bytes in C order. So the values of hosts may differ in their structure.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.checkpoint.leaves import HostValues, PerHost, Shards, as_values
from tstore.checkpoint.structure import flatten, unflatten
from tstore.core.format.arrays.dtypes import dtype_named, dtype_to_json, stored_dtype
from tstore.core.format.bounds import NODE_METADATA_LEVELS, NODE_METADATA_VALUES, msgpack_excess_message
from tstore.core.format.tree_document import is_document, paths_in
from tstore.errors import InvalidArgument, parsing

__all__ = ["encoded", "naming", "with_values"]


_MAX_BYTES = 1 << 32
"""The exclusive limit on the length of a msgpack binary."""

_Shape = Annotated[tuple[int, ...], msgspec.Meta(max_length=64)]  # as many axes as NumPy has


class _Stored(msgspec.Struct):
    structure: Any
    arrays: dict[str, tuple[Any, _Shape, bytes]]


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Add the path of the `PerHost` to an `InvalidArgument` about its value."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}, in the PerHost: {str(error).removeprefix('the tree: ')}") from None


def encoded(path: str, value: Any) -> npt.NDArray[np.uint8]:
    """Return a host's value as bytes; raise `InvalidArgument`, naming the path, if it can't be stored."""
    with naming(path):
        structure, leaves = flatten(value)
        arrays = {inner: _parts(inner, leaf) for inner, leaf in leaves.items()}
    data = msgspec.msgpack.encode(_Stored(structure, arrays))
    if excess := _excess_message(data):
        raise InvalidArgument(f"{path}: the PerHost has {excess}; use arrays for long lists of numbers")
    return np.frombuffer(data, np.uint8)


def _excess_message(data: bytes | memoryview) -> str:
    return msgpack_excess_message(data, NODE_METADATA_VALUES, NODE_METADATA_LEVELS)


def _parts(path: str, leaf: Any) -> tuple[Any, tuple[int, ...], bytes]:
    if isinstance(leaf, PerHost | Shards):
        raise InvalidArgument(
            f"{path}: a {type(leaf).__name__} is not a value of one host alone; move it out of the PerHost"
        )
    values = as_values(path, leaf)
    dtype = dtype_named(values.dtype)
    if values.nbytes >= _MAX_BYTES:
        raise InvalidArgument(f"{path}: the array takes {values.nbytes} bytes; use several of less than 4 GiB")
    return dtype_to_json(dtype), values.shape, values.astype(dtype, copy=False).tobytes()


def _decoded(data: npt.NDArray[np.uint8]) -> Any:
    if data.dtype != np.uint8 or data.ndim != 1:
        raise ValueError(f"expected bytes, got {data.dtype}{list(data.shape)}")
    if excess := _excess_message(data.data):
        raise ValueError(excess)
    stored = msgspec.msgpack.decode(data.data, type=_Stored)
    if not is_document(stored.structure) or set(paths_in(stored.structure)) != stored.arrays.keys():
        raise ValueError("its structure and its arrays do not match")
    return unflatten(stored.structure, {path: _array(*parts) for path, parts in stored.arrays.items()})


def _array(data_type: Any, shape: tuple[int, ...], data: bytes) -> npt.NDArray[Any]:
    dtype = stored_dtype(data_type)
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are not an array of {dtype}{list(shape)}")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)


def with_values(
    arrays: Mapping[str, Any], places: Mapping[str, str], location: str, *, of_all_hosts: bool
) -> dict[str, Any]:
    """Return restored arrays with the values of hosts in place of their bytes, under the path of the value.

    `places` has these paths, as `host_places` returns them. A value is a `PerHost`, or the `HostValues` of all
    hosts.
    """
    result = {path: array for path, array in arrays.items() if path not in places}
    for path in filter(places.__contains__, arrays):
        place = places[path]
        with parsing(f"{location}: {path}"):
            value = _decoded(arrays[path])
        if of_all_hosts:
            result.setdefault(place, HostValues()).append(value)
        else:
            result[place] = PerHost(value)
    return result
