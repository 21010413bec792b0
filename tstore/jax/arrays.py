"""Arrays of JAX as NumPy arrays and `Shards`, which the core saves.

Two kinds of arrays are stored as arrays of another dtype: numbers of one bit as a byte each, at "…/dtype=int1",
and typed PRNG keys as their data, at "…/impl=threefry2x32".
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from tstore.checkpoint.leaves import HostValues, PerHost, Shards, state_advice
from tstore.checkpoint.per_host import naming
from tstore.checkpoint.replicated import REPLICA_WHOLE, array_checksum, sampled
from tstore.checkpoint.structure import flatten, unflatten_like
from tstore.core.format.tree_document import IMPL, SCALARS
from tstore.errors import InvalidArgument
from tstore.sharding import Index, ReplicaSplit, common_shard_shape

__all__ = [
    "FORMS",
    "Bounds",
    "begin_copy",
    "bounds_of",
    "checked_leaf",
    "decoded",
    "dtype_node",
    "impl_node",
    "is_key",
    "is_value",
    "own_value",
    "split_impl",
]

Values = npt.NDArray[Any]
Bounds = tuple[tuple[int, int], ...]
"""The start and stop of a region along each axis."""

_NARROW = {
    np.dtype(getattr(ml_dtypes, name)): np.dtype(stored)
    for name, stored in (("int1", np.int8), ("uint1", np.uint8))
    if hasattr(ml_dtypes, name)
}
"""For each dtype without a Zarr name, the dtype of the bytes in which NumPy stores its numbers."""

_DTYPE = "dtype="

FORMS = f"{_DTYPE}*", f"{IMPL}*"
"""Patterns of the names of both."""

_REFS = (jax.Ref,) if hasattr(jax, "Ref") else ()  # not in older versions of JAX

_NOT_STORED = (
    "can't be stored; expected arrays and scalars, in containers that JAX knows (a class with arrays needs "
    "jax.tree_util.register_dataclass, an Equinox module eqx.filter(module, eqx.is_array))"
)

_MIN_PIECE = 4 << 20
"""The smallest piece, in bytes, into which the processes that hold a shard divide it."""

_MAX_CACHED = 64 << 10
"""The size in bytes up to which JAX may keep the host copy or view of an array that NumPy reads."""


def is_value(leaf: Any) -> bool:
    """Return whether a leaf is an array with values, the shape and dtype of one, a scalar, or a `PerHost`."""
    if type(leaf) in SCALARS or isinstance(leaf, PerHost):
        return True
    if isinstance(leaf, (jax.core.Tracer, *_REFS)):
        return False
    return hasattr(leaf, "shape") and getattr(leaf, "dtype", jax.dtypes.float0) != jax.dtypes.float0


def checked_leaf(path: str, leaf: Any, other: str = _NOT_STORED) -> Any:
    """Return a leaf that `is_value`; raise `InvalidArgument`, naming the path, for another.

    `other` is the message for an object that is not an array.
    """
    if is_value(leaf):
        return leaf
    if isinstance(leaf, HostValues):
        raise leaf.refusal(path)
    if isinstance(leaf, jax.core.Tracer):
        raise InvalidArgument(f"{path}: a value that JAX traces has no values yet; call tstore outside of jit")
    if isinstance(leaf, _REFS):
        raise InvalidArgument(f"{path}: a jax.Ref may change while it is saved; pass its values, ref[...]")
    if hasattr(leaf, "dtype"):
        raise InvalidArgument(
            f"{path}: a gradient of dtype float0, that of integers, has no values; pass None in its place"
        )
    if advice := state_advice(leaf):
        other = f"can't be stored; {advice}"
    raise InvalidArgument(f"{path}: an object of type {type(leaf).__name__} {other}")


def _is_iterator(value: Any) -> bool:
    """Return whether a value is an iterator whose state can be set, such as those of Grain."""
    return all(hasattr(type(value), name) for name in ("__next__", "get_state", "set_state"))


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed PRNG keys, or the shape and dtype of such an array."""
    return not isinstance(leaf.dtype, np.dtype) and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def impl_node(impl: Any, data: Any) -> dict[str, Any]:
    """Return the stored form of PRNG keys: their data, under the name of the implementation."""
    return {f"{IMPL}{impl}": data}


def split_impl(path: str) -> tuple[str, str | None]:
    """Return the path of the leaf that is stored at a path, and its implementation if it is PRNG keys."""
    above, _, name = path.rpartition("/")
    return (above or "value", name.removeprefix(IMPL)) if name.startswith(IMPL) else (path, None)


def dtype_node(dtype: Any, make: Callable[[np.dtype[Any]], Any]) -> Any:
    """Return the stored form of an array; `make` returns the array in the dtype in which it is stored."""
    dtype = np.dtype(dtype)
    return {f"{_DTYPE}{dtype.name}": make(_NARROW[dtype])} if dtype in _NARROW else make(dtype)


def decoded(tree: Any) -> Any:
    """Return a restored tree with the stored forms of arrays of one bit and of typed PRNG keys decoded."""
    match tree:
        case PerHost():
            return PerHost(decoded(tree.value))
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
    if key.startswith(IMPL) and values.dtype == np.uint32:
        with contextlib.suppress(ValueError, TypeError):  # not registered here, or its keys have another shape
            return jax.random.wrap_key_data(jnp.asarray(values), impl=key.removeprefix(IMPL))
    return {key: values}


def _plain_value(path: str, leaf: PerHost) -> PerHost:
    """Return the value of a `PerHost` as the core saves it: NumPy arrays, and the state of an iterator."""
    value = leaf.value.get_state() if _is_iterator(leaf.value) else leaf.value
    with naming(path):
        arrays = flatten(value)[1]
    values = {inner: _plain(f"{path}/{inner}", array) for inner, array in arrays.items()}
    return PerHost(unflatten_like(value, values, {}))


def _plain(path: str, leaf: Any) -> Any:
    checked_leaf(path, leaf)
    if not isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise InvalidArgument(
            f"{path}: other processes have parts of the array; move it out of the PerHost, which is for values of "
            "this process alone"
        )
    if is_key(leaf):
        return impl_node(jax.random.key_impl(leaf), np.asarray(jax.random.key_data(leaf)))
    values = np.asarray(leaf)
    return dtype_node(values.dtype, values.view)


def own_value(path: str, target: PerHost, restored: Any) -> Any:
    """Return a restored `PerHost` with arrays of JAX where the target has them, or the list of all values.

    If the target has an iterator, set its state and return the target.
    """
    restored = decoded(restored)
    if not isinstance(restored, PerHost):
        return restored
    if _is_iterator(target.value):
        return _with_state(path, target, restored.value)
    wanted = {path: leaf for path, leaf in flatten(target.value)[1].items() if isinstance(leaf, jax.Array)}
    arrays = {
        path: jax.device_put(leaf, wanted[path].sharding if wanted[path].committed else None)
        for path, leaf in flatten(restored.value)[1].items()
        if path in wanted
    }
    return PerHost(unflatten_like(restored.value, arrays, {}))


def _with_state(path: str, target: PerHost, state: Any) -> PerHost:
    """Set the state of the iterator in a target; raise `InvalidArgument` if it refuses the state."""
    try:
        target.value.set_state(state)
    except Exception as error:  # code of the class may raise anything
        raise InvalidArgument(
            f"{path}: the {type(target.value).__name__} of the target can't take the state that the checkpoint "
            f"has for it ({type(error).__name__}: {error!s:.300}); restore the other leaves with only=…"
        ) from error
    return target


def begin_copy(path: str, leaf: Any, hosts: int) -> Callable[[], Any]:
    """Start copying a leaf to the host; return a function for the part that this host saves.

    The leaf is saved by `hosts` hosts.

    On the CPU nothing is copied. Raise `InvalidArgument`, naming the path, for a leaf that has no values.
    """
    checked_leaf(path, leaf)
    if isinstance(leaf, PerHost):
        return functools.partial(_plain_value, path, leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise InvalidArgument(f"{path}: a jax.ShapeDtypeStruct has no values; pass the tree with its arrays")
    if not isinstance(leaf, jax.Array):
        return lambda: dtype_node(leaf.dtype, leaf.view) if isinstance(leaf, np.ndarray) else leaf
    typed_key = is_key(leaf)
    dtype = np.dtype(np.uint32) if typed_key else _NARROW.get(leaf.dtype, leaf.dtype)
    try:
        finish_copy = _array_copy(path, jax.random.key_data(leaf) if typed_key else leaf, dtype, hosts)
    except RuntimeError as error:
        raise _without_values(path, error) from error

    def finish() -> Any:
        try:
            values = finish_copy()
        except RuntimeError as error:
            raise _without_values(path, error) from error
        if typed_key:
            return impl_node(jax.random.key_impl(leaf), values)
        return dtype_node(leaf.dtype, lambda _: values)

    return finish


def bounds_of(index: Index, shape: Sequence[int]) -> Bounds:
    """Return the start and stop of a region along each axis; the slices of JAX may have None for either."""
    return tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))


def _without_values(path: str, error: RuntimeError) -> InvalidArgument:
    """Return the error for an array from which JAX can't get values."""
    reason = str(error).splitlines()[0].rstrip(".")
    return InvalidArgument(f"{path}: the array has no values ({reason}); save it before it is donated or deleted")


def _array_copy(path: str, array: jax.Array, dtype: np.dtype[Any], hosts: int) -> Callable[[], Values | Shards]:
    """Start copying an array to the host; return a function for its values or `Shards`, viewed in a dtype."""
    sharding, shape = array.sharding, array.shape
    if sharding.is_fully_addressable and hosts > 1 and not sharding.is_fully_replicated:
        return lambda: np.asarray(array).view(dtype)  # each process has its own array, equal in all
    layout = _layout(sharding, shape, dtype.itemsize, hosts == 1)
    # the path decides which replica saves the first piece, so that small arrays are spread over the replicas
    offset = xxhash.xxh3_64_intdigest(path.encode()) % layout.replicas if layout.replicas > 1 else 0
    template, pieces = _saved_pieces(sharding, shape, dtype, hosts == 1, offset)
    data = [_on_host(array.addressable_data(piece.position), piece) for piece in pieces]
    replica = None
    if layout.regions and sharding.is_fully_replicated and not sharding.is_fully_addressable and hosts > 1:
        replica = _replica(array, layout.regions[0])

    def finish() -> Values | Shards:
        values = [_viewed(values, piece, dtype) for values, piece in zip(data, pieces, strict=True)]
        if template is None:
            return values[0]
        shards = template.with_values(values)
        if replica is not None:
            shards.replica_checksum = array_checksum(np.asarray(replica), REPLICA_WHOLE)
        return shards

    return finish


def _replica(array: jax.Array, region: _Region) -> jax.Array | None:
    """Start copying a whole array to the host, to compare it with the array of other processes.

    On an accelerator, None stands for an array of more than 64 KiB: copying it would take as long as its save.
    """
    if region.platform != "cpu" and sampled(array.size, array.dtype.itemsize, REPLICA_WHOLE) is not None:
        return None
    return _on_host(array.addressable_data(region.position), _piece(region, None, array.dtype.itemsize))


class _Piece(NamedTuple):
    """The part of one device's data that this process saves.

    `position` is the number of the device's data in `jax.Array.addressable_data`. `cells` is an index into this
    data, or None for all of it. `is_cached` says whether JAX may keep the host copy or view.
    """

    position: int
    cells: Any
    is_cached: bool
    on_cpu: bool


def _on_host(data: jax.Array, piece: _Piece) -> jax.Array:
    """Start copying an array of one device to the host; return the array from which NumPy gets the copy.

    JAX keeps the copy, or on the CPU the view, for as long as the array exists, and does not donate a buffer that
    has a view. So a large buffer is returned in another array object, which the caller frees.
    """
    if not piece.is_cached:
        data = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
    if not piece.on_cpu:
        data.copy_to_host_async()
    return data


def _viewed(data: jax.Array, piece: _Piece, dtype: np.dtype[Any]) -> Values:
    """Return a piece of a device's data, viewed in the dtype in which it is stored."""
    values: Values = np.asarray(data)
    if values.dtype != dtype:
        values = values.view(dtype)
    return values if piece.cells is None else values[piece.cells]


@functools.lru_cache(4096)
def _saved_pieces(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], dtype: np.dtype[Any], alone: bool, offset: int
) -> tuple[Shards | None, list[_Piece]]:
    """Return what this process saves of an array: a `Shards` without values, and the piece of each of its parts.

    For an array that only devices of this process hold, and each of them in full, return None and one piece.
    """
    layout = _layout(sharding, shape, dtype.itemsize, alone)
    if sharding.is_fully_addressable and sharding.is_fully_replicated:
        return None, [_piece(layout.regions[0], None, dtype.itemsize)]
    parts, pieces = [], []
    for region in layout.regions:
        index = layout.split.piece(region.slices, (region.number + offset) % region.holders)
        if index is not None:
            parts.append((index, None))
            pieces.append(_piece(region, None if index == region.slices else index, dtype.itemsize))
    return Shards(shape, dtype, parts, shard_shape=layout.split.piece_shape), pieces


def _piece(region: _Region, index: Index | None, itemsize: int) -> _Piece:
    nbytes = math.prod(side.stop - side.start for side in region.slices) * itemsize
    cells = index and tuple(
        slice(s.start - r.start, s.stop - r.start) for s, r in zip(index, region.slices, strict=True)
    )
    return _Piece(region.position, cells, nbytes <= _MAX_CACHED, region.platform == "cpu")


class _Region(NamedTuple):
    """A region of an array on a device of this process; `slices` is its index in the array.

    `holders` is the number of processes that hold the region, and `number` is this process's number among them.
    """

    slices: Index
    position: int
    platform: str
    number: int
    holders: int


class _Layout(NamedTuple):
    """The distinct regions of an array on devices of this process, and how the processes share their save.

    `replicas` is the number of processes that hold each shard of the array, or 1 if that number differs.
    """

    regions: list[_Region]
    split: ReplicaSplit
    replicas: int


@functools.lru_cache(4096)
def _layout(sharding: jax.sharding.Sharding, shape: tuple[int, ...], itemsize: int, alone: bool) -> _Layout:
    """Return the layout of an array; `alone` says whether this process saves alone."""
    this_process = jax.process_index()
    holders: dict[Bounds, set[int]] = {}
    devices: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
    for device, index in devices.items():
        holders.setdefault(bounds_of(index, shape), set()).add(this_process if alone else device.process_index)
    own_devices: dict[Bounds, tuple[int, Any]] = {}  # in the order in which an array has their data
    for position, device in enumerate(sharding.addressable_devices_indices_map(shape)):
        index = devices[device]
        own_devices.setdefault(bounds_of(index, shape), (position, device))
    index_of = {bounds: tuple(slice(a, b) for a, b in bounds) for bounds in holders}
    holder_counts = {len(processes) for processes in holders.values()}
    # shards with different numbers of holders are not divided
    replicas = holder_counts.pop() if len(holder_counts) == 1 else 1
    shard_shape = common_shard_shape(shape, index_of.values())
    split = ReplicaSplit.choose(shape, shard_shape, replicas, itemsize, _MIN_PIECE)
    regions = [
        _Region(
            index_of[bounds],
            position,
            device.platform,
            sorted(holders[bounds]).index(this_process),
            len(holders[bounds]),
        )
        for bounds, (position, device) in own_devices.items()
    ]
    return _Layout(regions, split, replicas)
