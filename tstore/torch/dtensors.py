"""Distributed tensors: the regions that each process holds, and which process writes them."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
import xxhash

from tstore.errors import InvalidArgument
from tstore.sharding import Index, Placements

__all__ = ["Layout", "is_dtensor", "layout_of", "local_tensor"]


class Layout(NamedTuple):
    """The part of a distributed tensor that this process holds.

    `parts` has, for each region, the index in the whole tensor and the index in the local one. `shard_shape` is
    the same in every process. `writes` says whether this process writes the values; of the processes of the mesh
    that hold the same values, one does. `is_replica` says whether it has all values, as others have. `team` is a
    number that identifies the mesh, because other processes may have the same tensor on another mesh.
    """

    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    parts: list[tuple[Index, Index]]
    writes: bool
    is_replica: bool
    team: int


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing `torch.distributed.tensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return a view of the part of a tensor that this process holds: all of it unless it is a DTensor."""
    local: torch.Tensor = tensor.detach()
    return local.to_local() if is_dtensor(local) else local  # type: ignore[attr-defined]


def layout_of(path: str, tensor: Any) -> Layout:
    """Return the part of a DTensor that this process holds.

    Raise `InvalidArgument`, naming the path, for a partial tensor or a local part that does not fit its layout.
    """
    mesh = tensor.device_mesh
    try:
        layout = Placements(*tensor.placements).layout(tuple(mesh.shape), tensor.shape)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from None
    team = xxhash.xxh3_64_intdigest(str(mesh.mesh.tolist()).encode())
    position = mesh.get_coordinate()
    if position is None:  # the tensor lives on other processes
        return Layout(layout.shape, layout.shard_shape, [], False, False, team)
    planned_shape = tuple(
        sum(stop - start for start, stop in layout.runs(d, position)) for d in range(tensor.ndim)
    )
    local_shape = tuple(local_tensor(tensor).shape)
    if planned_shape != local_shape:
        raise InvalidArgument(
            f"{path}: the local tensor has shape {list(local_shape)}, but the placements "
            f"{tensor.placements} of shape {list(layout.shape)} give {list(planned_shape)}; create it with "
            "distribute_tensor, or with from_local(shape=…) and placements that fit"
        )
    replica, replicas = 0, math.prod(mesh.size(axis) for axis in layout.replica_axes)
    for axis in layout.replica_axes:
        replica = replica * mesh.size(axis) + position[axis]
    writer = xxhash.xxh3_64_intdigest(path.encode()) % replicas  # spreads the work over the replicas
    is_replica = replicas > 1 and local_shape == tuple(layout.shape)
    return Layout(layout.shape, layout.shard_shape, layout.parts(position), replica == writer, is_replica, team)
