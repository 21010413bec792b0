"""Shardings as arithmetic: a mesh of devices and a partition spec give the slices each device holds.

The semantics are those of JAX's NamedSharding (GSPMD):

* Devices are numbered row-major over the axes of the mesh, in the order in which they were given.
* A dimension of length n that is sharded over k devices is cut into pieces of ceil(n / k); the last
  pieces may be shorter or empty. Over a tuple of axes, the first of them is the slowest.
* Devices that differ only along axes that the spec does not use hold the same piece. They are numbered
  in device order; replica 0 is the one that writes.
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
    """A partition spec: for each leading dimension None (not sharded), an axis name, or a tuple of them.

    Dimensions beyond its length are not sharded. `("data",)` is the same as `"data"`, and `()` as None.
    Raises InvalidArgument for a part of another kind or an axis that is used twice.
    """

    __slots__ = ()

    def __new__(cls, *parts: Part) -> P:
        """The spec with those parts, normalised."""
        used: set[str] = set()
        for part in parts:
            for axis in _axes_of(part):
                if axis in used:
                    raise InvalidArgument(
                        f"partition spec {parts!r} uses axis {axis!r} twice; an axis can shard one dimension "
                        f"only, so take it out of the other"
                    )
                used.add(axis)
        return super().__new__(cls, (_normal(part) for part in parts))

    def __getnewargs__(self) -> tuple[Part, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


class Shard(NamedTuple):
    """What one device holds of an array: `index`, a slice (start and stop concrete) for each dimension."""

    device: int
    host: int
    index: Index  # type: ignore[assignment]  # hides tuple.index, which nobody wants of a shard
    replica: int


class Mesh:
    """A grid of devices with named axes, shared out to hosts in runs of `devices_per_host`.

    `Mesh({"data": 4, "model": 2}, devices_per_host=4)` is 8 devices on 2 hosts. Meshes with the same axes,
    in the same order, and the same hosts are equal. Raises InvalidArgument for an axis of size below 1 or
    hosts that do not come out even.
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
        sizes: dict[str, int] = {}
        for axis, size in shape.items():
            if not isinstance(axis, str) or not axis:
                raise InvalidArgument(f"a mesh axis is named by a non-empty string, not {axis!r}; rename it")
            sizes[axis] = _whole(size, f"the size of mesh axis {axis!r}", 1)
        self._sizes = sizes
        self.axes = tuple(sizes)
        self.devices = math.prod(sizes.values())
        self.devices_per_host = _whole(devices_per_host, "devices_per_host", 1)
        self.hosts, rest = divmod(self.devices, self.devices_per_host)
        if rest:
            raise InvalidArgument(
                f"mesh {sizes} has {self.devices} devices, which is no multiple of devices_per_host="
                f"{self.devices_per_host}; give a number that divides {self.devices}"
            )
        strides, stride = {}, self.devices
        for axis, size in sizes.items():
            stride //= size
            strides[axis] = stride
        self._strides = strides

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis by its name, slowest first."""
        return dict(self._sizes)

    def shards(self, shape: Sequence[int], spec: P) -> list[Shard]:
        """What every device holds of an array of that shape, in device order.

        The replicas 0 cut the array into pieces that cover it exactly, without overlap; every piece has the
        same number of replicas. Raises InvalidArgument for an unknown axis or a spec longer than the shape.
        """
        cut = self._cut(shape, spec)
        return [cut.shard(device) for device in range(self.devices)]

    def shard_shape(self, shape: Sequence[int], spec: P) -> tuple[int, ...]:
        """The shape of a full (interior) shard: ceil(n / k) along each dimension.

        It is the same on every host and no shard is larger, so it bounds the chunk shape on which all agree.
        Raises InvalidArgument as `shards` does.
        """
        return self._cut(shape, spec).piece

    def host_shards(self, host: int, shape: Sequence[int], spec: P) -> list[Index]:
        """The pieces that this host must write: those of which it holds replica 0, without the empty ones.

        Over all hosts they cover the array exactly, without overlap. Raises InvalidArgument for a host that
        is not in range(hosts), and as `shards` does.
        """
        if _whole(host, "a host number", 0) >= self.hosts:
            raise InvalidArgument(
                f"host {host} is not on this mesh, whose {self.hosts} hosts are numbered "
                f"0 to {self.hosts - 1}; pass one of those"
            )
        cut = self._cut(shape, spec)
        first = operator.index(host) * self.devices_per_host
        mine = (cut.shard(device) for device in range(first, first + self.devices_per_host))
        return [s.index for s in mine if s.replica == 0 and all(i.start < i.stop for i in s.index)]

    def _cut(self, shape: Sequence[int], spec: P) -> _Cut:
        if not isinstance(spec, P):
            raise InvalidArgument(f"a partition spec is a P, as P('data', None), not {spec!r}; wrap it in P(…)")
        lengths = tuple(_whole(n, f"a dimension of shape {tuple(shape)}", 0) for n in shape)
        if len(spec) > len(lengths):
            raise InvalidArgument(
                f"partition spec {spec!r} names {len(spec)} dimensions, but shape {lengths} has "
                f"{len(lengths)}; shorten the spec"
            )
        over = [_axes_of(part) for part in spec] + [()] * (len(lengths) - len(spec))
        used = {axis for axes in over for axis in axes}
        for axis in used:
            if axis not in self._sizes:
                raise InvalidArgument(
                    f"partition spec {spec!r} names axis {axis!r}, but the axes of the mesh are "
                    f"{', '.join(map(repr, self.axes)) or 'none'}; use one of those"
                )
        piece = tuple(
            -(-n // math.prod(self._sizes[a] for a in axes)) for n, axes in zip(lengths, over, strict=True)
        )
        replicas = tuple(axis for axis in self.axes if axis not in used)
        return _Cut(self, lengths, piece, tuple(over), replicas)

    def _position(self, device: int, axes: tuple[str, ...]) -> int:
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


class _Cut(NamedTuple):
    """One array laid over a mesh: its lengths, the length of a piece and the axes along each dimension."""

    mesh: Mesh
    lengths: tuple[int, ...]
    piece: tuple[int, ...]
    over: tuple[tuple[str, ...], ...]
    replicas: tuple[str, ...]

    def shard(self, device: int) -> Shard:
        index = []
        for length, piece, axes in zip(self.lengths, self.piece, self.over, strict=True):
            start = min(self.mesh._position(device, axes) * piece, length)
            index.append(slice(start, min(start + piece, length)))
        host = device // self.mesh.devices_per_host
        return Shard(device, host, tuple(index), self.mesh._position(device, self.replicas))


def _axes_of(part: Part) -> tuple[str, ...]:
    if part is None:
        return ()
    axes = (part,) if isinstance(part, str) else part
    if not isinstance(axes, tuple) or not all(isinstance(axis, str) and axis for axis in axes):
        raise InvalidArgument(
            f"a part of a partition spec is None, an axis name or a tuple of axis names, not {part!r}; mend it"
        )
    return axes


def _normal(part: Part) -> Part:
    axes = _axes_of(part)
    if len(axes) > 1:
        return axes
    return axes[0] if axes else None


def _whole(value: int, what: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise InvalidArgument(f"{what} is a whole number from {least} on, not {value!r}; mend it")
    return number
