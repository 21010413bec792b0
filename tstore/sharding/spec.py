"""Partition specs: which axes of a mesh shard each dimension of an array, as in GSPMD, GShard and JAX.

`spec_from_rules` makes them from the layout rules of Mesh-TensorFlow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from tstore.errors import InvalidArgument
from tstore.sharding.boxes import Index, checked_int

__all__ = ["P", "Part", "SpecLayout", "spec_from_rules"]

Part: TypeAlias = str | tuple[str, ...] | None
"""How one dimension is sharded: not at all (None), along an axis of the mesh, or along several."""


class P(tuple[Part, ...]):
    """A partition spec: for each leading dimension None (not sharded), an axis name, or a tuple of axis names.

    Further dimensions are not sharded. `("data",)` is the same as `"data"`, and `()` the same as None.
    Raise `InvalidArgument` for a part of another type, or an axis that is used twice.
    """

    __slots__ = ()

    def __new__(cls, *parts: Part) -> P:
        """Create the spec, with each part in its shortest form: `("data",)` becomes "data", and `()` None."""
        used: set[str] = set()
        for part in parts:
            for axis in _axes_of(part):
                if axis in used:
                    raise InvalidArgument(
                        f"partition spec {parts!r} uses axis {axis!r} twice; use each axis at most once"
                    )
                used.add(axis)
        return super().__new__(cls, (_normalized(part) for part in parts))

    @staticmethod
    def of(spec: Any) -> P:
        """Convert a `jax.sharding.PartitionSpec`; return a `P` unchanged.

        Raise `InvalidArgument` for a spec that leaves a dimension unconstrained or values unreduced, and for any
        other object.
        """
        if isinstance(spec, P):
            return spec
        kind = type(spec)
        if kind.__module__.partition(".")[0] != "jax" or not hasattr(kind, "UNCONSTRAINED"):
            raise InvalidArgument(
                f"expected a partition spec such as P('data', None), or a jax PartitionSpec, not {spec!r:.100}"
            )
        if getattr(spec, "unreduced", None):
            raise InvalidArgument(
                f"{spec!r} has unreduced values, whose sum over axes of the mesh is still to be taken; reduce them"
            )
        parts = tuple(getattr(spec, "partitions", spec))  # in older versions the spec is a tuple
        if any(part is kind.UNCONSTRAINED for part in parts):
            raise InvalidArgument(
                f"{spec!r} leaves a dimension unconstrained, so the layout is the compiler's choice; pass the "
                "spec of the array's own sharding"
            )
        return P(*parts)

    def layout(self, sizes: Mapping[str, int], shape: Sequence[int]) -> SpecLayout:
        """Return the layout of an array over a mesh with axes of these sizes.

        Raise `InvalidArgument` for an unknown axis or a spec longer than the shape.
        """
        lengths = tuple(checked_int(n, f"a dimension of shape {tuple(shape)}", 0) for n in shape)
        if len(self) > len(lengths):
            raise InvalidArgument(
                f"partition spec {self!r} names {len(self)} dimensions, but shape {lengths} has "
                f"{len(lengths)}; shorten the spec"
            )
        numbers = {axis: number for number, axis in enumerate(sizes)}
        dimensions = []
        for part in (*self, *[None] * (len(lengths) - len(self))):
            for axis in _axes_of(part):
                if axis not in sizes:
                    raise InvalidArgument(
                        f"partition spec {self!r} names axis {axis!r}, but the axes of the mesh are "
                        f"{', '.join(map(repr, sizes)) or 'none'}; use one of those"
                    )
            dimensions.append(tuple((numbers[axis], sizes[axis]) for axis in _axes_of(part)))
        shard_shape = tuple(
            -(-n // math.prod(size for _, size in axes)) for n, axes in zip(lengths, dimensions, strict=True)
        )
        used = {number for axes in dimensions for number, _ in axes}
        replica_axes = tuple(number for number in numbers.values() if number not in used)
        return SpecLayout(lengths, shard_shape, tuple(dimensions), replica_axes)

    def __getnewargs__(self) -> tuple[Part, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


class SpecLayout(NamedTuple):
    """The layout of one array over a mesh.

    For each dimension, `axes` has the number and size of every mesh axis that shards it. `replica_axes` has the
    numbers of the mesh axes that shard no dimension.
    """

    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    axes: tuple[tuple[tuple[int, int], ...], ...]
    replica_axes: tuple[int, ...]

    def regions(self, coordinates: Sequence[int]) -> list[Index]:
        """Return the one region, possibly empty, of the device with these coordinates on the mesh."""
        index = []
        for length, shard_length, axes in zip(self.shape, self.shard_shape, self.axes, strict=True):
            position = 0
            for axis, size in axes:
                position = position * size + coordinates[axis]
            start = min(position * shard_length, length)
            index.append(slice(start, min(start + shard_length, length)))
        return [tuple(index)]


def _axes_of(part: Part) -> tuple[str, ...]:
    if part is None:
        return ()
    axes = (part,) if isinstance(part, str) else part
    if not isinstance(axes, tuple) or not all(isinstance(axis, str) and axis for axis in axes):
        raise InvalidArgument(
            f"expected None, an axis name or a tuple of axis names in a partition spec, not {part!r}"
        )
    return axes


def _normalized(part: Part) -> Part:
    axes = _axes_of(part)
    if len(axes) > 1:
        return axes
    return axes[0] if axes else None


def spec_from_rules(dimensions: Sequence[str | None], rules: Mapping[str, str] | str) -> P:
    """Return the spec of a tensor with these named dimensions.

    `rules` maps names of dimensions to axes of the mesh, as {"batch": "data", "hidden": "model"} or in the syntax
    of Mesh-TensorFlow, "batch:data;hidden:model". A dimension without a rule or a name is not sharded. Raise
    `InvalidArgument` if two dimensions of the tensor have the same name or the same axis.

    Examples
    --------
    >>> from tstore.sharding import spec_from_rules
    >>> spec_from_rules(("batch", "length", "hidden"), "batch:data;hidden:model")
    P('data', None, 'model')
    """
    axis_of = _parsed(rules) if isinstance(rules, str) else rules
    if isinstance(dimensions, str) or not isinstance(axis_of, Mapping):
        raise InvalidArgument(
            f"expected names of dimensions and rules such as {{'batch': 'data'}}, not {dimensions!r:.100} and "
            f"{rules!r:.100}"
        )
    dimension_on: dict[str, str] = {}
    for number, name in enumerate(dimensions):
        if name is not None and name in dimensions[:number]:
            raise InvalidArgument(f"two dimensions of {tuple(dimensions)} are named {name!r}; rename one")
        axis = None if name is None else axis_of.get(name)
        if name is None or axis is None:
            continue
        if other := dimension_on.get(axis):
            raise InvalidArgument(
                f"the rules put the dimensions {other!r} and {name!r} of {tuple(dimensions)} on the mesh axis "
                f"{axis!r}; an axis can shard one dimension of a tensor"
            )
        dimension_on[axis] = name
    return P(*(None if name is None else axis_of.get(name) for name in dimensions))


def _parsed(rules: str) -> dict[str, str]:
    axis_of: dict[str, str] = {}
    for rule in rules.split(";"):
        name, colon, axis = (part.strip() for part in rule.partition(":"))
        if not (name and colon and axis) or name in axis_of:
            raise InvalidArgument(f"layout rules {rules!r}: expected 'dimension:axis;…', each dimension once")
        axis_of[name] = axis
    return axis_of
