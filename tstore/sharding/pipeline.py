"""Pipeline parallelism as in GPipe: consecutive layers form stages, and each stage has separate hosts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from tstore.errors import InvalidArgument
from tstore.sharding.boxes import checked_int
from tstore.sharding.mesh import Mesh

__all__ = ["Pipeline"]


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
