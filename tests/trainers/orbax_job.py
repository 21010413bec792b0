"""Training with a loop as for Orbax's `CheckpointManager`, for the tests."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from tests.trainers.killing import STEPS, losses
from tstore.trainers.orbax import CheckpointManager


def train(url: str, kills: int = 0) -> dict[int, float]:
    return losses(lambda report: _train(url, report), kills)


def _train(url: str, report: Callable[[int, float], None]) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=5)
    state = {"w": jnp.ones(1000), "key": jax.random.key(3)}
    with CheckpointManager(url, options=options) as steps:
        latest = steps.latest_step()
        if latest is not None:
            state = steps.restore(latest, args=ocp.args.StandardRestore(jax.eval_shape(lambda: state)))
        for step in range((latest or 0) + 1, STEPS + 1):
            key, noise = jax.random.split(state["key"])
            state = {"w": state["w"] * 0.9 + jax.random.normal(noise, (1000,)), "key": key}
            report(step, float(state["w"].sum()))
            steps.save(step, args=ocp.args.StandardSave(state))
