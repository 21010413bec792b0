"""Distributed tensors: the regions that each process holds, and which process writes them.

The placements of a DTensor say which dimension each axis of its device mesh shards. Placements apply from left to
right: `Shard` cuts what is left of a dimension into as many pieces as the axis has devices, as `torch.chunk` does;
`_StridedShard`, which FSDP2 uses over tensor parallelism, first cuts it into `split_factor` pieces, each of these
into pieces for the devices, and gives every device one of each. So what a process holds of a dimension is one or
several runs, and what it holds of the tensor are their products.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from tstore.errors import InvalidArgument
from tstore.sharding import Index, common_shard_shape

__all__ = ["Layout", "is_dtensor", "layout_of", "local_tensor"]

Runs = tuple[tuple[int, int], ...]
"""The start and stop of each piece of a dimension, in the order of the local tensor."""

Cut = tuple[int, int]
"""The number of devices that share a dimension, and the split factor of the placement, 1 for `Shard`."""


class Layout(NamedTuple):
    """What this process holds of a distributed tensor.

    `parts` has for each region its index in the whole tensor and in the local one. `shard_shape` is the same in
    every process. `writes` says whether this process, of those of the mesh that hold the same values, is the one
    to write them. `team` is a number for the processes of the mesh: others may have the same tensor on their own
    mesh.
    """

    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    parts: list[tuple[Index, Index]]
    writes: bool
    team: int


def is_dtensor(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor, without importing what only a program that makes them has imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return the part of a distributed tensor in this process, in its own memory."""
    local: torch.Tensor = tensor.detach().to_local()
    return local


def layout_of(path: str, tensor: Any) -> Layout:
    """Return what this process holds of a DTensor; raise `InvalidArgument`, naming the path, for a partial one."""
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    cuts: list[list[Cut]] = [[] for _ in shape]  # for each dimension
    axes: list[list[int]] = [[] for _ in shape]  # the axes of the mesh that cut it
    replicas: list[int] = []  # the axes along which the values are equal
    for axis, placement in enumerate(tensor.placements):
        dimension = getattr(placement, "dim", None)
        if placement.is_replicate():
            replicas.append(axis)
        elif placement.is_partial() or dimension is None:
            raise InvalidArgument(
                f"{path}: a DTensor placed {placement} has no values of its own yet; call "
                "tensor.redistribute(placements=…) with Shard or Replicate first"
            )
        else:
            cuts[dimension].append((mesh.size(axis), int(getattr(placement, "split_factor", 1))))
            axes[dimension].append(axis)
    shard_shape = tuple(_shard_length(n, tuple(c)) for n, c in zip(shape, cuts, strict=True))
    position = mesh.get_coordinate()
    team = xxhash.xxh3_64_intdigest(str(mesh.mesh.tolist()).encode())
    if position is None:  # the tensor lives on other processes
        return Layout(shape, shard_shape, [], False, team)
    runs = [
        _runs(n, tuple(c), tuple(position[a] for a in own)) for n, c, own in zip(shape, cuts, axes, strict=True)
    ]
    held = tuple(sum(b - a for a, b in of_dimension) for of_dimension in runs)
    local_shape = tuple(local_tensor(tensor).shape)
    if held != local_shape:
        raise InvalidArgument(
            f"{path}: the local tensor has shape {list(local_shape)}, but the placements "
            f"{tensor.placements} of shape {list(shape)} give {list(held)}; create it with distribute_tensor, or "
            "with from_local(shape=…) and placements that fit"
        )
    sizes = [mesh.size(axis) for axis in replicas]
    replica = functools.reduce(lambda number, a: number * mesh.size(a) + position[a], replicas, 0)
    writer = xxhash.xxh3_64_intdigest(path.encode()) % math.prod(sizes)  # so that the replicas share the work
    return Layout(shape, shard_shape, _parts(runs), replica == writer, team)


def _parts(runs: Sequence[Runs]) -> list[tuple[Index, Index]]:
    """Return the products of the runs of each dimension, with their place in the local tensor."""
    parts = []
    for product in itertools.product(*(_with_local(of_dimension) for of_dimension in runs)):
        parts.append((tuple(whole for whole, _ in product), tuple(local for _, local in product)))
    return parts


def _with_local(runs: Runs) -> list[tuple[slice, slice]]:
    placed, start = [], 0
    for a, b in runs:
        placed.append((slice(a, b), slice(start, start + b - a)))
        start += b - a
    return placed


@functools.cache
def _shard_length(n: int, cuts: tuple[Cut, ...]) -> int:
    """Return the largest length of which all runs, on any device, begin and end at a multiple, or at the end."""
    positions = itertools.product(*(range(devices) for devices, _ in cuts))
    runs = {run for position in positions for run in _runs(n, cuts, position)}
    [length] = common_shard_shape((n,), [(slice(a, b),) for a, b in runs])
    return length


def _runs(n: int, cuts: tuple[Cut, ...], position: tuple[int, ...]) -> Runs:
    """Return what a device holds of a dimension of length n, from its position along the axes that cut it."""
    runs: Runs = ((0, n),) if n else ()
    for (devices, split_factor), number in zip(cuts, position, strict=True):
        pieces = [_chunk(runs, split_factor, i) for i in range(split_factor)]
        runs = _joined([run for piece in pieces for run in _chunk(piece, devices, number)])
    return runs


def _chunk(runs: Runs, count: int, number: int) -> Runs:
    """Return one of `count` pieces of the runs, of equal length but for the last ones."""
    total = sum(b - a for a, b in runs)
    length = -(-total // count)
    start, stop = number * length, (number + 1) * length
    piece, before = [], 0
    for a, b in runs:
        low, high = max(a, a + start - before), min(b, a + stop - before)
        if low < high:
            piece.append((low, high))
        before += b - a
    return tuple(piece)


def _joined(runs: Sequence[tuple[int, int]]) -> Runs:
    """Return the runs with neighbours made one."""
    joined: list[tuple[int, int]] = []
    for a, b in runs:
        if joined and joined[-1][1] == a:
            a = joined.pop()[0]
        joined.append((a, b))
    return tuple(joined)
