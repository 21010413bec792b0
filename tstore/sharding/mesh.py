"""Sharding arithmetic: the slice of an array on each device, given a device mesh and a partition spec.

The semantics are those of JAX's NamedSharding (GSPMD):

* Devices are numbered in row-major order over the axes of the mesh.
* A dimension of length n sharded over k devices is split into shards of ceil(n / k); the last ones may be shorter
  or empty. Over a tuple of axes, the first axis varies slowest.
* Devices that differ only along axes that the spec does not use hold replicas of the same shard, numbered in
  device order; replica 0 writes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tstore.errors import InvalidArgument

__all__ = ["Index", "Mesh", "P", "Part", "Shard"]

Part: TypeAlias = str | tuple[str, ...] | None
Index: TypeAlias = tuple[slice, ...]


class P(tuple[Part, ...]):
    """A partition spec: for each leading dimension None (not sharded), an axis name, or a tuple of axis names.

    Further dimensions are not sharded. `("data",)` is the same as `"data"`, and `()` the same as None.
    Raise `InvalidArgument` for a part of another type, or an axis that is used twice.
    """

    __slots__ = ()

    def __new__(cls, *parts: Part) -> P:
        """Create the spec from parts, which are normalized."""
        used: set[str] = set()
        for part in parts:
            for axis in _axes_of(part):
                if axis in used:
                    raise InvalidArgument(
                        f"partition spec {parts!r} uses axis {axis!r} twice; use each axis at most once"
                    )
                used.add(axis)
        return super().__new__(cls, (_normalized(part) for part in parts))

    def __getnewargs__(self) -> tuple[Part, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


class Shard(NamedTuple):
    """The elements of an array on one device: `index` has a slice (start and stop integers) per dimension."""

    device: int
    host: int
    index: Index  # type: ignore[assignment]  # hides tuple.index
    replica: int


class Mesh:
    """A grid of devices with named axes; each host holds `devices_per_host` consecutive devices.

    `Mesh({"data": 4, "model": 2}, devices_per_host=4)` has 8 devices on 2 hosts. Meshes with the same axes in the
    same order and the same hosts are equal. Raise `InvalidArgument` for an axis of size below 1, or if
    `devices_per_host` does not divide the number of devices.
    """

    __slots__ = ("_sizes", "_strides", "axes", "devices", "devices_per_host", "hosts")

    axes: tuple[str, ...]
    """The names of the axes, slowest first."""
    devices: int
    """The number of devices."""
    devices_per_host: int
    """The number of consecutive devices that one host holds."""
    hosts: int
    """The number of hosts."""

    def __init__(self, shape: Mapping[str, int], devices_per_host: int = 1) -> None:
        if not isinstance(shape, Mapping):
            raise InvalidArgument(
                f"the shape of a mesh is {shape!r:.100}; expected a mapping of axis names to sizes, such as "
                "{'data': 4}"
            )
        sizes: dict[str, int] = {}
        for axis, size in shape.items():
            if not isinstance(axis, str) or not axis:
                raise InvalidArgument(f"the name of a mesh axis must be a non-empty string, not {axis!r}")
            sizes[axis] = _checked_int(size, f"the size of mesh axis {axis!r}", 1)
        self._sizes = sizes
        self.axes = tuple(sizes)
        self.devices = math.prod(sizes.values())
        self.devices_per_host = _checked_int(devices_per_host, "devices_per_host", 1)
        self.hosts, remainder = divmod(self.devices, self.devices_per_host)
        if remainder:
            raise InvalidArgument(
                f"mesh {sizes} has {self.devices} devices, which is not a multiple of devices_per_host="
                f"{self.devices_per_host}; pass a divisor of {self.devices}"
            )
        strides, stride = {}, self.devices
        for axis, size in sizes.items():
            stride //= size
            strides[axis] = stride
        self._strides = strides

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis by name, slowest first."""
        return dict(self._sizes)

    def shards(self, shape: Sequence[int], spec: P) -> list[Shard]:
        """Return the shard of every device for an array of this shape, in device order.

        The shards with replica 0 cover the array exactly, without overlap; every shard has the same number of
        replicas. Raise `InvalidArgument` for an unknown axis or a spec longer than the shape.
        """
        layout = self._layout(shape, spec)
        return [layout.shard(device) for device in range(self.devices)]

    def shard_shape(self, shape: Sequence[int], spec: P) -> tuple[int, ...]:
        """Return the shape of a full (interior) shard: ceil(n / k) along each dimension.

        No shard is larger, and every host gets the same result, so hosts that derive a chunk shape from it agree.
        Raise `InvalidArgument` as `shards` does.
        """
        return self._layout(shape, spec).shard_shape

    def host_shards(self, host: int, shape: Sequence[int], spec: P) -> list[Index]:
        """Return the index of each shard that a host must write: those with replica 0, without empty ones.

        Over all hosts they cover the array exactly, without overlap. Raise `InvalidArgument` if the host is not in
        range(hosts), and as `shards` does.
        """
        if _checked_int(host, "a host number", 0) >= self.hosts:
            raise InvalidArgument(
                f"host {host} is not on this mesh, whose {self.hosts} hosts are numbered "
                f"0 to {self.hosts - 1}; pass one of those"
            )
        layout = self._layout(shape, spec)
        first = operator.index(host) * self.devices_per_host
        shards = (layout.shard(device) for device in range(first, first + self.devices_per_host))
        return [s.index for s in shards if s.replica == 0 and all(i.start < i.stop for i in s.index)]

    def _layout(self, shape: Sequence[int], spec: P) -> _Layout:
        if not isinstance(spec, P):
            raise InvalidArgument(f"expected a partition spec such as P('data', None), not {spec!r}; use P(…)")
        lengths = tuple(_checked_int(n, f"a dimension of shape {tuple(shape)}", 0) for n in shape)
        if len(spec) > len(lengths):
            raise InvalidArgument(
                f"partition spec {spec!r} names {len(spec)} dimensions, but shape {lengths} has "
                f"{len(lengths)}; shorten the spec"
            )
        axes_by_dimension = [_axes_of(part) for part in spec] + [()] * (len(lengths) - len(spec))
        used = {axis for axes in axes_by_dimension for axis in axes}
        for axis in used:
            if axis not in self._sizes:
                raise InvalidArgument(
                    f"partition spec {spec!r} names axis {axis!r}, but the axes of the mesh are "
                    f"{', '.join(map(repr, self.axes)) or 'none'}; use one of those"
                )
        shard_shape = tuple(
            -(-n // math.prod(self._sizes[a] for a in axes))
            for n, axes in zip(lengths, axes_by_dimension, strict=True)
        )
        replica_axes = tuple(axis for axis in self.axes if axis not in used)
        return _Layout(self, lengths, shard_shape, tuple(axes_by_dimension), replica_axes)

    def _position(self, device: int, axes: tuple[str, ...]) -> int:
        """Return the number of a device among those that differ only along these axes, the first axis slowest."""
        position = 0
        for axis in axes:
            size = self._sizes[axis]
            position = position * size + device // self._strides[axis] % size
        return position

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[type[Mesh], tuple[dict[str, int], int]]:
        return Mesh, (self.shape, self.devices_per_host)

    def __repr__(self) -> str:
        return f"Mesh({self._sizes}, devices_per_host={self.devices_per_host})"

    def _key(self) -> tuple[tuple[tuple[str, int], ...], int]:
        return tuple(self._sizes.items()), self.devices_per_host


class _Layout(NamedTuple):
    """The layout of one array over a mesh: `axes` are the mesh axes that shard each dimension."""

    mesh: Mesh
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]
    replica_axes: tuple[str, ...]

    def shard(self, device: int) -> Shard:
        index = []
        for length, shard_length, axes in zip(self.shape, self.shard_shape, self.axes, strict=True):
            start = min(self.mesh._position(device, axes) * shard_length, length)
            index.append(slice(start, min(start + shard_length, length)))
        host = device // self.mesh.devices_per_host
        return Shard(device, host, tuple(index), self.mesh._position(device, self.replica_axes))


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


def _checked_int(value: int, name: str, minimum: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum:
        raise InvalidArgument(f"{name} must be an integer of at least {minimum}, not {value!r}")
    return number
