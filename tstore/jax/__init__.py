"""Checkpoints of JAX: any pytree of arrays in any sharding, PRNG keys and 4-bit numbers. Needs the extra `jax`.

1. `pytree` takes trees apart into leaves with paths. `arrays` turns a jax.Array into NumPy arrays and `Shards`.
   `targets` decides what a restore reads for a leaf of its target, and makes the jax.Array. `processes`: the
   processes of `jax.distributed`.
2. `save`, `restore`, `checkpointer`, for a series of saves, and `metadata`, for targets. They convert between
   pytrees and the trees of NumPy arrays and `Shards` that `tstore.checkpoint`, called the core here, saves and
   restores.

`tstore.sync.jax` has blocking functions with the same names.
"""

from __future__ import annotations

from tstore.jax.checkpointer import Checkpointer
from tstore.jax.metadata import metadata
from tstore.jax.restore import explain, restore
from tstore.jax.save import save, save_async

__all__ = ["Checkpointer", "explain", "metadata", "restore", "save", "save_async"]
