"""Pods of TPUs: grids of chips, of which each host holds a block."""

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

    A host holds the chips of a block of this shape, by default 2 × 2, and hosts are numbered in row-major order.
    The axes may have the names that the specs use, `pod({"data": 128, "model": 32})`. Raise `InvalidArgument` if
    the blocks do not fill the grid.
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
