"""Train a small model on a mesh of 8 devices; run again after a crash, it resumes, on another mesh if you like.

    python examples/jax_resume.py STORE --steps 30
    python examples/jax_resume.py STORE --steps 60 --mesh 2x4

Kill it at any step. Without accelerators it simulates 8 devices on the CPU. It needs optax.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX is imported

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tstore import EverySteps, OnPreemption
from tstore.sync.jax import Checkpointer

WIDTH, HIDDEN, BATCH = 32, 64, 16
OPTIMIZER = optax.adam(3e-3)

State = dict[str, Any]


def init() -> State:
    """Return the state before the first step."""
    up, down = jax.random.split(jax.random.key(0))
    params = {
        "up": jax.random.normal(up, (WIDTH, HIDDEN)) / WIDTH**0.5,
        "bias": jnp.zeros(HIDDEN),
        "down": jax.random.normal(down, (HIDDEN, WIDTH)) / HIDDEN**0.5,
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params), "key": jax.random.key(1), "step": 0}


def loss_of(params: Any, x: jax.Array) -> jax.Array:
    """Return how far the model is from turning each vector around."""
    y = jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"]
    return jnp.mean(jnp.square(y - x[:, ::-1]))


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: State) -> tuple[State, jax.Array]:
    """Make one step of training; return the new state and the loss."""
    step = state["step"] + 1
    x = jax.random.normal(jax.random.fold_in(state["key"], step), (BATCH, WIDTH))  # the data of this step
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], x)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"])
    params = optax.apply_updates(state["params"], updates)
    return {**state, "params": params, "optimizer": optimizer, "step": step}, loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", help="a folder or URL")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--mesh", default="4x2", help="devices along the axes data x model")
    args = parser.parse_args()

    data, model = map(int, args.mesh.split("x"))
    mesh = Mesh(np.array(jax.devices()).reshape(data, model), ("data", "model"))

    def sharding(leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, P("data", "model") if leaf.ndim == 2 else P())

    create = jax.jit(init, out_shardings=jax.tree.map(sharding, jax.eval_shape(init)))
    policy = EverySteps(args.save_every) | OnPreemption()
    with Checkpointer(args.store, every=policy, keep=3) as checkpoints:
        state = checkpoints.restore_latest(target=create.eval_shape()) or create()
        for step in range(int(state["step"]) + 1, args.steps + 1):
            state, loss = train_step(state)
            print(f"step {step}: loss {loss:.6f}", flush=True)
            if checkpoints.should_save(step) or step == args.steps:
                checkpoints.save(step, state, metrics={"loss": loss})
            if checkpoints.preempted:
                break


if __name__ == "__main__":
    main()
