"""Device meshes: the part of an array on each device, and which host saves it.

The semantics are those of JAX's NamedSharding (GSPMD):

* Devices are numbered in row-major order over the axes of the mesh.
* A dimension of length n sharded over k devices is split into shards of ceil(n / k) elements; the last shards may
  be shorter or empty. Over a tuple of axes, the first axis varies slowest.
* Devices that differ only along axes that the spec does not use hold replicas of the same shard. Replicas are
  numbered in device order, and replica 0 is the one that is saved.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tstore.errors import InvalidArgument
from tstore.sharding.boxes import Index, checked_int
from tstore.sharding.placements import Placements, PlacementsLayout
from tstore.sharding.spec import P, SpecLayout

__all__ = ["Mesh", "Pipeline", "Shard", "pod"]


class Shard(NamedTuple):
    """The part of an array on one `device` of a `host`.

    `index` has a slice (integer start and stop) per dimension. Devices with the same part have `replica` 0, 1, ….
    """

    device: int
    host: int
    index: Index  # type: ignore[assignment]  # hides tuple.index
    replica: int


class Mesh:
    """A grid of devices with named axes, and the host of each device.

    `Mesh({"data": 4, "model": 2}, devices_per_host=4)` has 8 devices on 2 hosts, the first 4 on host 0. If the
    devices of a host are not consecutive, pass the host of each device, in row-major order, as `device_hosts`.
    `hosts` is the number of hosts of the job, by default the highest host number plus 1. Two meshes are equal if
    they have the same axes in the same order and the same hosts. Raise `InvalidArgument` for an axis of size below
    1, or if `devices_per_host` does not divide the number of devices.

    Examples
    --------
    >>> from tstore.sharding import Mesh, P
    >>> mesh = Mesh({"data": 2, "model": 2}, devices_per_host=2)
    >>> shards = mesh.shards((4, 6), P(None, "model"))
    >>> [(shard.device, shard.host, shard.index[1], shard.replica) for shard in shards][:2]
    [(0, 0, slice(0, 3, None), 0), (1, 0, slice(3, 6, None), 0)]
    >>> mesh.hosts, shards[2].replica
    (2, 1)
    """

    __slots__ = ("_devices_of", "_sizes", "axes", "device_hosts", "devices", "hosts")

    axes: tuple[str, ...]
    """The names of the axes, slowest first."""
    devices: int
    """The number of devices."""
    device_hosts: tuple[int, ...]
    """The host of each device."""
    hosts: int
    """The number of hosts."""

    def __init__(
        self,
        shape: Mapping[str, int],
        devices_per_host: int = 1,
        *,
        device_hosts: Sequence[int] | None = None,
        hosts: int | None = None,
    ) -> None:
        self._sizes = _checked_sizes(shape)
        self.axes = tuple(self._sizes)
        self.devices = math.prod(self._sizes.values())
        if device_hosts is None:
            per_host = checked_int(devices_per_host, "devices_per_host", 1)
            if self.devices % per_host:
                raise InvalidArgument(
                    f"mesh {self._sizes} has {self.devices} devices, which is not a multiple of devices_per_host="
                    f"{per_host}; pass a divisor of {self.devices}"
                )
            device_hosts = [device // per_host for device in range(self.devices)]
        self.device_hosts = tuple(checked_int(h, "a host number in device_hosts", 0) for h in device_hosts)
        if len(self.device_hosts) != self.devices:
            raise InvalidArgument(
                f"device_hosts has {len(self.device_hosts)} hosts, but mesh {self._sizes} has {self.devices} "
                "devices; pass the host of each device, in row-major order"
            )
        self._devices_of: dict[int, list[int]] = {}
        for device, host in enumerate(self.device_hosts):
            self._devices_of.setdefault(host, []).append(device)
        min_hosts = max(self.device_hosts) + 1
        self.hosts = min_hosts if hosts is None else checked_int(hosts, "hosts of a mesh", min_hosts)

    @staticmethod
    def of(mesh: Any, *, hosts: int | None = None) -> Mesh:
        """Convert a `jax.sharding.Mesh` or a torch `DeviceMesh`; return a `Mesh` unchanged.

        The hosts are the processes of JAX, or the ranks of torch. Pass `hosts`, the number of processes of the
        job, if the mesh spans only some of them. Raise `InvalidArgument` for a mesh without devices, such as a jax
        `AbstractMesh`, and for any other object.
        """
        if isinstance(mesh, Mesh):
            return mesh
        kind = type(mesh).__name__
        library = type(mesh).__module__.partition(".")[0]
        if library == "jax" and kind == "AbstractMesh":
            raise InvalidArgument(
                f"{mesh!r:.200} has no devices, so their hosts are unknown; pass "
                "Mesh(abstract_mesh.shape, devices_per_host=…)"
            )
        if library == "jax" and hasattr(mesh, "axis_names") and hasattr(mesh, "devices"):
            sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
            device_hosts = [] if mesh.empty else [device.process_index for device in mesh.devices.flat]
        elif library == "torch" and kind == "DeviceMesh":
            ranks = mesh.mesh
            names = mesh.mesh_dim_names or [f"dim{number}" for number in range(ranks.ndim)]
            sizes = dict(zip(names, ranks.shape, strict=True))
            device_hosts = ranks.flatten().tolist()
        else:
            raise InvalidArgument(
                f"expected a mesh such as Mesh({{'data': 4}}), a jax Mesh or a torch DeviceMesh, not {mesh!r:.100}"
            )
        if not device_hosts:
            raise InvalidArgument(f"{mesh!r:.200} has no devices; pass the mesh over which the array is sharded")
        return Mesh(sizes, device_hosts=device_hosts, hosts=hosts)

    @property
    def shape(self) -> dict[str, int]:
        """The size of each axis by name, slowest first."""
        return dict(self._sizes)

    def layout(self, shape: Sequence[int], spec: Any) -> SpecLayout | PlacementsLayout:
        """Return the layout of an array of this shape; `spec` is a `P`, a jax PartitionSpec, or `Placements`.

        Raise `InvalidArgument` for any other spec, for an unknown axis, and for a spec longer than the shape.
        """
        if isinstance(spec, Placements):
            return spec.layout(tuple(self._sizes.values()), shape)
        return P.of(spec).layout(self._sizes, shape)

    def shards(self, shape: Sequence[int], spec: Any, host: int | None = None) -> list[Shard]:
        """Return the shards of an array of this shape on all devices, or on one host's devices, in device order.

        The shards with replica 0 cover the array exactly, without overlap. Every shard has the same number of
        replicas. A device has one shard, possibly empty; with `Placements` it may also have several or none. Raise
        `InvalidArgument` if the host is not in range(hosts), and as `layout` does.
        """
        layout = self.layout(shape, spec)
        sizes = tuple(self._sizes.values())
        shards = []
        for device in range(self.devices) if host is None else self._devices_on(host):
            coordinates, rest = [0] * len(sizes), device
            for axis in range(len(sizes) - 1, -1, -1):
                rest, coordinates[axis] = divmod(rest, sizes[axis])
            replica = 0
            for axis in layout.replica_axes:
                replica = replica * sizes[axis] + coordinates[axis]
            device_host = self.device_hosts[device]
            shards += [Shard(device, device_host, index, replica) for index in layout.regions(coordinates)]
        return shards

    def shard_shape(self, shape: Sequence[int], spec: Any) -> tuple[int, ...]:
        """Return the shape of a full (interior) shard: ceil(n / k) along each dimension.

        No shard is larger, and every host gets the same result, so hosts that derive a chunk shape from it agree.
        For `Placements` it is the `common_shard_shape` of all shards. Raise `InvalidArgument` as `layout` does.
        """
        return self.layout(shape, spec).shard_shape

    def replicas(self, shape: Sequence[int], spec: Any) -> int:
        """Return how many devices hold each shard; raise `InvalidArgument` as `layout` does."""
        sizes = tuple(self._sizes.values())
        return math.prod(sizes[axis] for axis in self.layout(shape, spec).replica_axes)

    def host_shards(self, host: int, shape: Sequence[int], spec: Any) -> list[Index]:
        """Return the index of each shard that a host must save: its shards with replica 0 that are not empty.

        The shards of all hosts cover the array exactly, without overlap. Raise `InvalidArgument` as `shards` does.
        """
        shards = self.shards(shape, spec, host)
        return [s.index for s in shards if s.replica == 0 and all(i.start < i.stop for i in s.index)]

    def _devices_on(self, host: int) -> Sequence[int]:
        if checked_int(host, "a host number", 0) >= self.hosts:
            raise InvalidArgument(
                f"host {host} is not on this mesh, whose {self.hosts} hosts are numbered "
                f"0 to {self.hosts - 1}; pass one of those, or hosts=… if the job has more hosts than the mesh"
            )
        return self._devices_of.get(operator.index(host), ())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        per_host = self.device_hosts.count(self.device_hosts[0])
        if self.device_hosts == tuple(d // per_host for d in range(self.devices)) and (
            self.hosts == self.devices // per_host
        ):
            return f"Mesh({self._sizes}, devices_per_host={per_host})"
        return f"Mesh({self._sizes}, device_hosts={list(self.device_hosts)}, hosts={self.hosts})"

    def _key(self) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...], int]:
        return tuple(self._sizes.items()), self.device_hosts, self.hosts


def _checked_sizes(shape: Mapping[str, int]) -> dict[str, int]:
    if not isinstance(shape, Mapping):
        raise InvalidArgument(
            f"the shape of a mesh is {shape!r:.100}; expected a mapping of axis names to sizes, such as "
            "{'data': 4}"
        )
    sizes: dict[str, int] = {}
    for axis, size in shape.items():
        if not isinstance(axis, str) or not axis:
            raise InvalidArgument(f"the name of a mesh axis must be a non-empty string, not {axis!r}")
        sizes[axis] = checked_int(size, f"the size of mesh axis {axis!r}", 1)
    return sizes


_MULTIPOD = MappingProxyType({"x": 128, "y": 32})


def pod(shape: Mapping[str, int] = _MULTIPOD, host_block: Sequence[int] = (2, 2)) -> Mesh:
    """Return the mesh of a pod with these named axes: by default a TPU v3 multipod of 128 × 32 chips.

    `host_block` is the shape of the block of chips of one host. Hosts are numbered in row-major order. Name the
    axes as the specs of the arrays do, as in `pod({"data": 128, "model": 32})`. Raise `InvalidArgument` if the
    blocks do not fill the grid.
    """
    sizes = tuple(Mesh(shape).shape.values())
    block = tuple(checked_int(n, "a side of host_block", 1) for n in host_block)
    if len(block) != len(sizes) or any(n % b for n, b in zip(sizes, block, strict=True)):
        raise InvalidArgument(f"blocks of {block} chips do not fill a pod of {sizes}; pass host_block=…")
    grid = [n // b for n, b in zip(sizes, block, strict=True)]
    strides = [math.prod(grid[axis + 1 :]) for axis in range(len(grid))]
    device_hosts = [
        sum(x // b * stride for x, b, stride in zip(chip, block, strides, strict=True))
        for chip in itertools.product(*map(range, sizes))
    ]
    return Mesh(shape, device_hosts=device_hosts)


class Pipeline:
    """The layers and hosts of each stage of a pipeline.

    `Pipeline(4, 24, hosts_per_stage=2)` has layers 0 to 5 on hosts 0 and 1, and so on. If the layers do not divide
    evenly, the first stages have one layer more than the others. `layers` may also be the number of layers of each
    stage (GPipe's `balance`), 0 for a stage without layers. Raise `InvalidArgument` for a negative number of
    layers of a stage, for any other argument below 1, or if there is not one number of layers per stage.
    """

    __slots__ = ("_first", "hosts", "hosts_per_stage", "stages")

    stages: int
    """The number of stages."""
    hosts_per_stage: int
    """The number of hosts of each stage."""
    hosts: int
    """The number of hosts."""

    def __init__(self, stages: int, layers: int | Sequence[int], hosts_per_stage: int = 1) -> None:
        self.stages = checked_int(stages, "the number of stages", 1)
        self.hosts_per_stage = checked_int(hosts_per_stage, "hosts_per_stage", 1)
        self.hosts = self.stages * self.hosts_per_stage
        if isinstance(layers, Sequence):
            counts = [checked_int(count, "the number of layers of a stage", 0) for count in layers]
        else:
            each, remainder = divmod(checked_int(layers, "the number of layers", 1), self.stages)
            counts = [each + (stage < remainder) for stage in range(self.stages)]
        if len(counts) != self.stages:
            raise InvalidArgument(f"{len(counts)} numbers of layers for {self.stages} stages; pass one for each")
        self._first = [0, *itertools.accumulate(counts)]

    def layers(self, stage: int) -> range:
        """Return the layers of a stage; raise `InvalidArgument` if there is no such stage."""
        self._check("stage", stage, self.stages)
        return range(self._first[stage], self._first[stage + 1])

    def stage_of_layer(self, layer: int) -> int:
        """Return the stage of a layer; raise `InvalidArgument` if there is no such layer."""
        self._check("layer", layer, self._first[-1])
        return next(stage for stage in range(self.stages) if layer < self._first[stage + 1])

    def stage_of_host(self, host: int) -> int:
        """Return the stage of a host; raise `InvalidArgument` if there is no such host."""
        self._check("host", host, self.hosts)
        return host // self.hosts_per_stage

    def mesh(self, stage: int, shape: Mapping[str, int]) -> Mesh:
        """Return a mesh of this shape over the hosts of a stage, each with an equal number of consecutive devices.

        The hosts of other stages have no device on this mesh. Raise `InvalidArgument` if there is no such stage,
        or if the devices do not divide evenly over its hosts.
        """
        self._check("stage", stage, self.stages)
        devices = Mesh(shape).devices
        per_host, remainder = divmod(devices, self.hosts_per_stage)
        if remainder:
            raise InvalidArgument(
                f"a mesh of {devices} devices does not divide over the {self.hosts_per_stage} hosts of a stage; "
                f"pass a shape with a multiple of {self.hosts_per_stage} devices"
            )
        first = stage * self.hosts_per_stage
        return Mesh(shape, device_hosts=[first + d // per_host for d in range(devices)], hosts=self.hosts)

    def __repr__(self) -> str:
        counts = [len(self.layers(stage)) for stage in range(self.stages)]
        return f"Pipeline({self.stages}, {counts}, hosts_per_stage={self.hosts_per_stage})"

    def _check(self, name: str, number: int, count: int) -> None:
        if checked_int(number, f"the number of a {name}", 0) >= count:
            raise InvalidArgument(f"there is no {name} {number}; pass one of 0 to {count - 1}")
