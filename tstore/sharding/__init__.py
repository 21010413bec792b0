"""Sharding arithmetic, without I/O: the part of an array on each device of a job, and who saves it.

1. `boxes`: the regions of an array in any layout, tiles with halos, and the chunk shape that fits all of them.
2. `spec`: `P`, the partition specs of GSPMD, GShard and JAX. Also specs from the layout rules of Mesh-TensorFlow.
3. `placements`: the placements of PyTorch's DTensor.
4. `mesh`: `Mesh` and `Shard`: devices, their hosts, and the layout of arrays over them; the stages of GPipe, and
   the meshes of TPU pods.
5. `replicas`: weight-update sharding, in which replicas share a save.
"""

from __future__ import annotations

from tstore.sharding.boxes import Halo, Index, common_shard_shape, tile_in_halo, with_halo
from tstore.sharding.mesh import Mesh, Pipeline, Shard, pod
from tstore.sharding.placements import Placements
from tstore.sharding.replicas import ReplicaSplit
from tstore.sharding.spec import P, Part, spec_from_rules

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
