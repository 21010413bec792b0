"""Saves checkpoints with Orbax and prints what is in them: run with a folder."""

import os
import sys
from typing import Any, NamedTuple

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class Moments(NamedTuple):
    """State of an optimizer."""

    mean: Any
    count: Any


def tree() -> dict[str, Any]:
    """Return a tree with what training states have."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    sharded = NamedSharding(mesh, PartitionSpec("x", "y"))
    numbers = jnp.arange(1024 * 512, dtype=jnp.float32)
    return {
        "params": {
            "w": jax.device_put(numbers.reshape(1024, 512), sharded),
            "long": jax.device_put(numbers.reshape(256, 2048).astype(jnp.bfloat16), sharded),
            "a.b": jnp.zeros(3),
            "f8": jnp.arange(4).astype(jnp.float8_e4m3fn),
            "i4": jnp.arange(-4, 4).astype(jnp.int4),
        },
        "opt": [Moments(jnp.full(3, 2.0), jnp.int32(4)), {}, (jnp.ones(2),), *([jnp.ones(1)] * 9)],
        "step": 7,
        "lr": 0.5,
        "none": None,
        "np": np.arange(3),
        "flag": np.float32(3),
    }


def main(folder: str) -> None:
    """Save a tree in each layout, and steps of managers."""
    layouts = {"zarr": {}, "files": {"use_ocdbt": False}, "zarr3": {"use_zarr3": True}}
    layouts["files3"] = {"use_ocdbt": False, "use_zarr3": True}
    for name, options in layouts.items():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
            checkpointer.save(f"{folder}/{name}", {**tree(), "name": "run"})
    with ocp.CheckpointManager(f"{folder}/steps", item_names=("model", "extra")) as manager:
        extra = ocp.args.StandardSave({"x": jnp.ones(2)})
        manager.save(3, args=ocp.args.Composite(model=ocp.args.StandardSave(tree()), extra=extra))
    keys = {
        "keys": [jax.random.key(3), jax.random.split(jax.random.key(1, impl="rbg"))],
        "raw": jax.random.PRNGKey(3),
    }
    with ocp.CheckpointManager(f"{folder}/unnamed") as manager:
        manager.save(3, args=ocp.args.StandardSave(keys))
    best = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    with ocp.CheckpointManager(f"{folder}/measured", options=best) as manager:
        config = ocp.args.JsonSave({"layers": 2})
        args = ocp.args.Composite(state=ocp.args.StandardSave({"x": jnp.ones(2)}), config=config)
        manager.save(3, args=args, metrics={"loss": 0.5})


if __name__ == "__main__":
    main(sys.argv[1])
