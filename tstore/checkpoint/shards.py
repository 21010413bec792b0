"""One host's part of an array that is sharded over many hosts; pure, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from tstore.checkpoint.leaves import as_values
from tstore.errors import InvalidArgument
from tstore.format.array_metadata import dtype_named
from tstore.sharding import Mesh, P

__all__ = ["Shards"]

Bounds = tuple[tuple[int, int], ...]


class Shards:
    """The regions of an array that one host saves, or wants restored.

    `parts` maps an index (a tuple of slices, one per axis) to its values, or is an iterable of such pairs (before
    Python 3.12 a slice can't be a key). None in place of values asks `restore` for them. `shard_shape` is the
    shape of a full shard, the same on every host; chunks never cross the edge of a shard. By default it is the
    shape of this host's largest part.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        parts: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (),
        *,
        shard_shape: Sequence[int] | None = None,
    ) -> None:
        self.shape = _lengths("shape", shape)
        self.dtype = dtype_named(dtype)
        self._parts: dict[Bounds, npt.NDArray[Any] | None] = {}
        for index, values in parts.items() if isinstance(parts, Mapping) else parts:
            bounds = self._bounds(index)
            if bounds in self._parts:
                raise InvalidArgument(f"the region {bounds} is passed twice; pass each region once")
            self._parts[bounds] = None if values is None else self._checked(bounds, values)
        if shard_shape is None:
            sizes = [[b - a for a, b in bounds] for bounds in self._parts]
            shard_shape = [max(s) for s in zip(*sizes, strict=True)] if sizes else self.shape
        self.shard_shape = _lengths("shard_shape", shard_shape)
        if len(self.shard_shape) != len(self.shape):
            raise InvalidArgument(
                f"shard_shape={self.shard_shape} and shape={self.shape} differ in their number of axes"
            )

    @staticmethod
    def of(values: npt.NDArray[Any], mesh: Mesh, spec: P, host: int) -> Shards:
        """Return what `host` of a mesh writes of a whole array: views of its shards that are replica 0."""
        parts = [(index, values[index]) for index in mesh.host_shards(host, values.shape, spec)]
        return Shards(values.shape, values.dtype, parts, shard_shape=mesh.shard_shape(values.shape, spec))

    @staticmethod
    def wanted(shape: Sequence[int], dtype: Any, mesh: Mesh, spec: P, host: int) -> Shards:
        """Return a target for `restore`: every region that a device of `host` needs, replicas included."""
        indices = {
            tuple((s.start, s.stop) for s in shard.index): shard.index
            for shard in mesh.shards(tuple(shape), spec)
            if shard.host == host
        }
        return Shards(shape, dtype, [(index, None) for index in indices.values()])

    @property
    def parts(self) -> list[tuple[tuple[slice, ...], npt.NDArray[Any] | None]]:
        """The regions with their values."""
        return [(tuple(slice(a, b) for a, b in bounds), v) for bounds, v in self._parts.items()]

    def filled(self, values: Sequence[npt.NDArray[Any]]) -> Shards:
        """Return the same regions with these values, in the order of `parts`."""
        pairs = [(index, v) for (index, _), v in zip(self.parts, values, strict=True)]
        return Shards(self.shape, self.dtype, pairs, shard_shape=self.shard_shape)

    def __repr__(self) -> str:
        return f"Shards({self.shape}, {self.dtype}, {len(self._parts)} parts)"

    def _bounds(self, index: Any) -> Bounds:
        items = index if isinstance(index, tuple) else (index,)
        if len(items) != len(self.shape):
            raise InvalidArgument(f"index {index!r} has {len(items)} axes, but the array has {len(self.shape)}")
        bounds = []
        for item, n in zip(items, self.shape, strict=True):
            try:
                item = item if isinstance(item, slice) else slice(*item)
                start, stop, step = item.indices(n)
            except TypeError:
                raise InvalidArgument(
                    f"index {index!r}: expected a slice, or (start, stop), for each axis"
                ) from None
            if step != 1 or (item.stop is not None and item.stop > n):
                raise InvalidArgument(f"index {index!r} is not a box within shape {self.shape}")
            bounds.append((start, max(start, stop)))
        return tuple(bounds)

    def _checked(self, bounds: Bounds, values: Any) -> npt.NDArray[Any]:
        array = as_values(f"the part at {bounds}", values)
        shape = tuple(b - a for a, b in bounds)
        if array.shape != shape or array.dtype != self.dtype:
            raise InvalidArgument(
                f"the part at {bounds} has shape {array.shape} and dtype {array.dtype}; expected {shape} and "
                f"{self.dtype}"
            )
        return array


def _lengths(what: str, values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(int(n.__index__()) for n in values)
    except (AttributeError, TypeError):
        raise InvalidArgument(f"{what}={values!r}: expected a sequence of integers") from None
