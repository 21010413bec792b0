"""Map each leaf of a restore's target to what is read for it, and the values read to arrays of JAX."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import layout as layouts
from jax.sharding import AbstractMesh, NamedSharding

from tstore.checkpoint.leaves import PerHost, Shards, dtype_of
from tstore.checkpoint.source import Source
from tstore.errors import InvalidArgument
from tstore.jax.arrays import Bounds, bounds_of, checked_leaf, dtype_node, impl_node, is_key, own_value

__all__ = ["TargetLeaf", "target_leaf"]

Values = npt.NDArray[Any]

_NUMBER_KINDS: dict[type, str] = {bool: "b", int: "iu", float: "fV", complex: "c"}
"""The kinds of NumPy dtypes that each type of Python number can represent."""


_NOT_RESTORED = (
    "in the target stands for no array; pass an array, its jax.ShapeDtypeStruct or a scalar there, or select "
    "other leaves: with only=…, or of an Equinox module with eqx.filter(module, eqx.is_array)"
)


class TargetLeaf(NamedTuple):
    """A leaf of the target of a restore.

    `core_leaf` replaces it in the core's target: an array's shape and dtype, `Shards`, a Python scalar, or a
    dict with one of these (`dtype_node`, `impl_node`). `path` is the path of what the core restores for it, and
    `finish` makes the leaf from that.
    """

    path: str
    core_leaf: Any
    finish: Callable[[Any], Any]


def target_leaf(path: str, leaf: Any, source: Source, mesh: Any) -> TargetLeaf:
    """Return how a leaf is restored; raise `InvalidArgument`, naming the path, if that is impossible.

    A number and an array without axes can be restored from each other, because jit and eval_shape return arrays in
    place of numbers. A sharding over a mesh without devices gets those of `mesh`.
    """
    name = path or "value"  # of an array
    checked_leaf(name, leaf, _NOT_RESTORED)
    if type(leaf) in _NUMBER_KINDS and source.selects(name):
        meta = source.node(name).meta
        if meta.shape == () and meta.dtype.kind in _NUMBER_KINDS[type(leaf)]:
            return TargetLeaf(name, _shape_struct((), meta.dtype), lambda values: type(leaf)(values[()]))
    if isinstance(leaf, PerHost):
        return TargetLeaf(name, leaf, functools.partial(own_value, name, leaf))
    if not hasattr(leaf, "dtype"):
        return TargetLeaf(path, leaf, lambda scalar: scalar)
    node, finish = _core_node(name, leaf, mesh)
    if tuple(leaf.shape) == () and path in source.scalars and not is_key(leaf):
        scalar = source.scalars[path]
        values = _scalar_values(name, scalar, np.dtype(leaf.dtype))
        return TargetLeaf(path, scalar, lambda _: finish(values))
    if not isinstance(node, dict):
        return TargetLeaf(name, node, finish)
    [form] = node
    return TargetLeaf(f"{path}/{form}" if path else form, node, finish)


def _core_node(path: str, leaf: Any, mesh: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the replacement of an array in the core's target, and the function from its values to the leaf."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return _array_node(path, leaf, mesh)
    if isinstance(leaf, Shards):
        return leaf, lambda shards: shards
    if isinstance(leaf, np.generic):
        return leaf, lambda values: values[()]
    dtype = dtype_of(path, leaf)
    return dtype_node(dtype, functools.partial(_shape_struct, leaf.shape)), lambda values: values.view(dtype)


def _scalar_values(path: str, scalar: Any, dtype: np.dtype[Any]) -> Values:
    """Return a Python number as an array without axes; raise `InvalidArgument` if the dtype can't hold it."""
    rounded = type(scalar) in (float, complex) and dtype.kind in _NUMBER_KINDS[type(scalar)]
    if type(scalar) in _NUMBER_KINDS:
        with np.errstate(all="ignore"), contextlib.suppress(TypeError, ValueError, OverflowError):
            values: Values = np.asarray(scalar).astype(dtype)
            if rounded or values == scalar:
                return values
    raise InvalidArgument(
        f"{path}: the checkpoint has {scalar!r:.100}, which the array of {dtype} in the target can't hold; pass "
        "a Python scalar of the same type there"
    )


def _shape_struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)  # type: ignore[no-untyped-call]


def _array_node(path: str, leaf: Any, mesh: Any) -> tuple[Any, Callable[[Any], jax.Array]]:
    """Return what `_core_node` returns, for an array of JAX or its shape and dtype."""
    sharding = leaf.sharding
    if isinstance(leaf, jax.Array) and not leaf.committed:
        sharding = None
    impl, data = _key_data(leaf) if is_key(leaf) else (None, leaf)
    shape, dtype = tuple(data.shape), np.dtype(data.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise InvalidArgument(
            f"{path}: an array of JAX has dtype {dtype} only with jax_enable_x64; set that, or pass a NumPy array "
            "in the target"
        )
    try:
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, AbstractMesh):
            if mesh is None or mesh.empty:
                raise InvalidArgument(
                    f"{path}: the sharding of the target has the axes of a mesh, {sharding.mesh.axis_names}, but "
                    "no devices; call restore inside jax.set_mesh(mesh), or pass shardings over devices"
                )
            sharding = NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
        regions = _regions(sharding, shape)
    except (ValueError, RuntimeError, AttributeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        reason = str(error).splitlines()[0].rstrip(".")
        raise InvalidArgument(
            f"{path}: an array of shape {list(shape)} can't have the sharding of the target ({reason}); pass a "
            "sharding over devices that divides the shape"
        ) from error
    layout, weak_type = _layout(data), data.weak_type

    def finish(restored: Any) -> jax.Array:
        array = _placed(sharding, regions, shape, dtype, restored)
        if weak_type:
            array = jax.jit(_weakly_typed, out_shardings=sharding)(array)
        if layout not in (None, _layout(array)):
            array = jax.device_put(array, layouts.Format(layout, array.sharding))
        return array if impl is None else jax.random.wrap_key_data(array, impl=impl)

    core_leaf = functools.partial(_core_leaf, sharding, shape)
    return dtype_node(dtype, core_leaf) if impl is None else impl_node(impl, core_leaf(dtype)), finish


def _weakly_typed(array: jax.Array) -> Any:
    return jax.lax.convert_element_type_p.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def _layout(leaf: Any) -> Any:
    """Return the layout of an array in the memory of a device; None if it is left to JAX, as in older versions."""
    return getattr(getattr(leaf, "format", None), "layout", None)


def _key_data(leaf: Any) -> tuple[str, jax.ShapeDtypeStruct]:
    """Return the implementation of typed PRNG keys, and the shape and dtype of their data."""
    impls: list[Any] = []

    def data(keys: jax.Array) -> jax.Array:
        impls.append(jax.random.key_impl(keys))
        return jax.random.key_data(keys)

    data_struct = jax.eval_shape(data, _shape_struct(leaf.shape, leaf.dtype))
    return impls[0], data_struct


@functools.lru_cache(4096)
def _regions(sharding: jax.sharding.Sharding | None, shape: tuple[int, ...]) -> tuple[Bounds, ...] | None:
    """Return the different regions of an array on this process's devices; None if each device has all of it."""
    if sharding is None:
        return None
    indices = sharding.addressable_devices_indices_map(shape).values()
    regions = tuple(dict.fromkeys(bounds_of(index, shape) for index in indices if index is not None))
    return None if regions == (tuple((0, n) for n in shape),) else regions


@functools.lru_cache(4096)
def _core_leaf(sharding: jax.sharding.Sharding | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Return the leaf of the core's target for an array of JAX; equal arguments give the same object."""
    regions = _regions(sharding, shape)
    if regions is None:
        return _shape_struct(shape, dtype)
    return Shards(shape, dtype, [(tuple(slice(a, b) for a, b in bounds), None) for bounds in regions])


def _placed(
    sharding: jax.sharding.Sharding | None,
    regions: tuple[Bounds, ...] | None,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    restored: Any,
) -> jax.Array:
    """Return an array made of its restored parts; without a sharding, of one part on the default device."""
    if sharding is None or regions is None:
        values: Values = restored.view(dtype)
        if sharding is None:
            array: jax.Array = jax.device_put(values)
            return array
        return jax.make_array_from_callback(shape, sharding, lambda _: values, dtype=dtype)
    values_at: dict[Bounds, Values] = dict(
        zip(regions, [part.view(dtype) for part in restored.values], strict=True)
    )

    def part(index: Any) -> Values:
        return values_at[bounds_of(index, shape)]

    return jax.make_array_from_callback(shape, sharding, part, dtype=dtype)
