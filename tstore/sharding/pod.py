"""TPU pods: grids of chips, divided into equal blocks, one per host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tstore.errors import InvalidArgument
from tstore.sharding.boxes import checked_int
from tstore.sharding.mesh import Mesh

__all__ = ["pod"]

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
