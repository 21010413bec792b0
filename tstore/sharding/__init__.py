"""Sharding arithmetic, without I/O: the part of an array on each device of a job.

1. `mesh`: `Mesh`, `P` and `Shard`, with the semantics of JAX's NamedSharding.
2. `boxes`: the regions of an array in any layout, and the shape of shards that fits all of them.
"""

from __future__ import annotations

from tstore.sharding.boxes import common_shard_shape
from tstore.sharding.mesh import Index, Mesh, P, Part, Shard

__all__ = ["Index", "Mesh", "P", "Part", "Shard", "common_shard_shape"]
