"""Arrays of JAX as NumPy arrays and `Shards`, which the core saves.

Two kinds of arrays are stored in a form that NumPy has. Those of numbers below 8 bits have a byte for each, at
"…/dtype=int4"; typed PRNG keys are their data, at "…/impl=threefry2x32".
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from tstore.checkpoint.leaves import Shards
from tstore.errors import InvalidArgument
from tstore.format.tree_document import SCALARS
from tstore.sharding import Index, ReplicaSplit, common_shard_shape

__all__ = ["Bounds", "bounds_of", "checked_leaf", "decoded", "dtype_node", "impl_node", "is_key", "values_of"]

Values = npt.NDArray[Any]
Bounds = tuple[tuple[int, int], ...]
"""The start and stop of a region along each axis."""

_NARROW = {
    np.dtype(getattr(ml_dtypes, name)): np.dtype(np.int8 if name.startswith("int") else np.uint8)
    for name in (
        "int1",
        "int2",
        "int4",
        "uint1",
        "uint2",
        "uint4",
        "float4_e2m1fn",
        "float6_e2m3fn",
        "float6_e3m2fn",
    )
    if hasattr(ml_dtypes, name)
}
"""For each dtype below 8 bits that of the bytes in which NumPy has its numbers."""

_DTYPE, _IMPL = "dtype=", "impl="

_MIN_PIECE = 4 << 20
"""Bytes of a piece, at least, if the processes with replicas of a shard share its save."""

_MAX_CACHED = 64 << 10
"""Bytes up to which JAX may keep the copy on the host, or the view, that NumPy gets of an array."""


def checked_leaf(path: str, leaf: Any) -> Any:
    """Return a leaf that can be stored; raise `InvalidArgument`, naming the path, for another."""
    if isinstance(leaf, jax.core.Tracer):
        raise InvalidArgument(f"{path}: a value that JAX traces has no values yet; call tstore outside of jit")
    if (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or type(leaf) in SCALARS:
        return leaf
    raise InvalidArgument(
        f"{path}: an object of type {type(leaf).__name__} can't be stored; expected arrays and scalars, in "
        "containers that JAX knows (a class with arrays needs jax.tree_util.register_dataclass)"
    )


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed PRNG keys, or its shape and dtype."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def impl_node(impl: Any, data: Any) -> dict[str, Any]:
    """Return the data of PRNG keys of an implementation as it is stored."""
    return {f"{_IMPL}{impl}": data}


def dtype_node(dtype: Any, make: Callable[[np.dtype[Any]], Any]) -> Any:
    """Return an array of a dtype as it is stored; `make` makes it of the dtype that it has there."""
    dtype = np.dtype(dtype)
    return {f"{_DTYPE}{dtype.name}": make(_NARROW[dtype])} if dtype in _NARROW else make(dtype)


def decoded(tree: Any) -> Any:
    """Return a restored tree with arrays of numbers below 8 bits, and with typed PRNG keys."""
    match tree:
        case dict() if len(tree) == 1:
            [(key, value)] = tree.items()
            if isinstance(key, str) and isinstance(value, np.ndarray):
                return _decoded(key, value)
            return {key: decoded(value)}
        case dict():
            return {key: decoded(value) for key, value in tree.items()}
        case list() | tuple():
            return type(tree)(map(decoded, tree))
    return tree


def _decoded(key: str, values: Values) -> Any:
    for dtype, stored in _NARROW.items():
        if key == f"{_DTYPE}{dtype.name}" and values.dtype == stored:
            return values.view(dtype)
    if key.startswith(_IMPL) and values.dtype == np.uint32:
        with contextlib.suppress(ValueError, TypeError):  # an implementation not registered here, or of other keys
            return jax.random.wrap_key_data(jnp.asarray(values), impl=key.removeprefix(_IMPL))
    return {key: values}


def values_of(path: str, leaf: Any, hosts: int) -> Callable[[], Any]:
    """Begin to copy a leaf to the host; return a function that returns what one of so many hosts saves of it.

    On the CPU nothing is copied. Raise `InvalidArgument`, naming the path, for a leaf that has no values.
    """
    checked_leaf(path, leaf)
    if not isinstance(leaf, jax.Array):
        return lambda: dtype_node(leaf.dtype, leaf.view) if isinstance(leaf, np.ndarray) else leaf
    with _named(path):
        begun = _array(path, jax.random.key_data(leaf) if is_key(leaf) else leaf, hosts)

    def finish() -> Any:
        with _named(path):
            if is_key(leaf):
                return impl_node(jax.random.key_impl(leaf), begun(np.dtype(np.uint32)))
            return dtype_node(leaf.dtype, begun)

    return finish


def bounds_of(index: Index, shape: Sequence[int]) -> Bounds:
    """Return a region as JAX gives it, possibly with None as a start or stop, with the bounds of each axis."""
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Raise the errors of JAX with the path of the array."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise InvalidArgument(
            f"{path}: the array has no values ({reason}); save it before it is donated or deleted"
        ) from error


def _array(path: str, array: jax.Array, hosts: int) -> Callable[[np.dtype[Any]], Values | Shards]:
    """Begin to copy an array to the host; return a function for its values, or `Shards`, viewed in a dtype."""
    if array.is_fully_addressable and array.is_fully_replicated:
        data = _on_host(array.addressable_data(0))
        return lambda dtype: np.asarray(data).view(dtype)
    if array.is_fully_addressable and hosts > 1:  # of this process alone, so equal on all of them
        return lambda dtype: np.asarray(array).view(dtype)
    layout = _layout(array.sharding, array.shape, array.dtype.itemsize, hosts == 1)
    offset = xxhash.xxh3_64_intdigest(path.encode()) if layout.split.replicas > 1 else 0
    pieces = []
    for shard in array.addressable_shards:
        region = layout.regions.get(shard.device)
        if region is None:
            continue
        index = layout.split.piece(region.whole, (region.number + offset) % region.holders)
        if index is not None:
            pieces.append((index, region.whole, _on_host(shard.data)))

    def shards(dtype: np.dtype[Any]) -> Shards:
        parts = [(index, _cut(np.asarray(data), whole, index).view(dtype)) for index, whole, data in pieces]
        return Shards(array.shape, dtype, parts, shard_shape=layout.split.piece_shape)

    return shards


def _cut(values: Values, whole: Index, index: Index) -> Values:
    """Return the view of a region of an array, from the values of a region around it."""
    if index is whole:
        return values
    cells: Any = tuple(slice(s.start - w.start, s.stop - w.start) for s, w in zip(index, whole, strict=True))
    view: Values = values[cells]
    return view


def _on_host(data: jax.Array) -> jax.Array:
    """Begin to copy an array of one device to the host; return one from which NumPy gets the copy.

    JAX keeps the copy, or on the CPU the view, for as long as the array exists, and does not donate a buffer that
    has a view. So the result is another array with the same buffer, unless it is small.
    """
    if data.nbytes > _MAX_CACHED:
        data = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    [device] = data.devices()
    if device.platform != "cpu":
        data.copy_to_host_async()
    return data


class _Region(NamedTuple):
    """A region that a device of this process holds: this process is number `number` of its `holders`."""

    whole: Index
    number: int
    holders: int


class _Layout(NamedTuple):
    """The different regions of an array on devices of this process, and how the processes share their save."""

    regions: dict[Any, _Region]
    split: ReplicaSplit


@functools.lru_cache(4096)
def _layout(sharding: jax.sharding.Sharding, shape: tuple[int, ...], itemsize: int, alone: bool) -> _Layout:
    """Return the layout of an array; `alone` if this process saves all that it holds."""
    own = jax.process_index()
    holders: dict[Bounds, set[int]] = {}
    device_of: dict[Bounds, Any] = {}
    devices: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
    for device, index in devices.items():
        bounds = bounds_of(index, shape)
        holders.setdefault(bounds, set()).add(own if alone else device.process_index)
        if device.process_index == own:
            device_of.setdefault(bounds, device)
    index_of = {bounds: tuple(slice(a, b) for a, b in bounds) for bounds in holders}
    counts = {len(processes) for processes in holders.values()}
    replicas = counts.pop() if len(counts) == 1 else 1
    shard_shape = common_shard_shape(shape, index_of.values())
    split = ReplicaSplit.choose(shape, shard_shape, replicas, itemsize, _MIN_PIECE)
    regions = {
        device: _Region(index_of[bounds], sorted(holders[bounds]).index(own), len(holders[bounds]))
        for bounds, device in device_of.items()
    }
    return _Layout(regions, split)
