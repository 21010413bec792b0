"""Sharding arithmetic, without I/O: the part of an array on each device of a job, and who saves it.

1. `boxes`: the regions of an array in any layout, and the chunk shape that fits all of them.
2. `spec`: `P`, the partition specs of GSPMD, GShard and JAX. `dimensions`: specs from the layout rules of
   Mesh-TensorFlow.
3. `placements`: the placements of PyTorch's DTensor.
4. `mesh`: `Mesh` and `Shard`: devices, their hosts, and the layout of arrays over them.
5. `pipeline`: the stages of GPipe. `pod`: the meshes of TPU pods.
6. `replicas`: weight-update sharding, in which replicas share a save. `spatial`: tiles with halos.
"""

from __future__ import annotations

from tstore.sharding.boxes import Index, common_shard_shape
from tstore.sharding.dimensions import spec_from_rules
from tstore.sharding.mesh import Mesh, Shard
from tstore.sharding.pipeline import Pipeline
from tstore.sharding.placements import Placements
from tstore.sharding.pod import pod
from tstore.sharding.replicas import ReplicaSplit
from tstore.sharding.spatial import Halo, tile_in_halo, with_halo
from tstore.sharding.spec import P, Part

__all__ = [
    "Halo",
    "Index",
    "Mesh",
    "P",
    "Part",
    "Pipeline",
    "Placements",
    "ReplicaSplit",
    "Shard",
    "common_shard_shape",
    "pod",
    "spec_from_rules",
    "tile_in_halo",
    "with_halo",
]
