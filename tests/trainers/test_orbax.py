"""The `CheckpointManager` for programs that were written for Orbax's."""

from __future__ import annotations

import importlib.util
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import tstore.sync as tstore
from tests.trainers.killing import KILLS, STEPS, jobs
from tstore.errors import InvalidArgument, NotAStore, StructureMismatch

if not all(map(importlib.util.find_spec, ("jax", "orbax"))):
    pytest.skip("JAX or Orbax is not installed", allow_module_level=True)

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from tstore.trainers.orbax import CheckpointManager

CONFIG = {"layers": 2, "lr": 0.1, "resume": None, "tags": [], "options": {}, "mixed": [1, 2.5, True, "x", None]}


def state(step: int) -> dict[str, Any]:
    return {"w": jnp.full((2, 3), step, "bfloat16"), "key": jax.random.key(step), "step": jnp.int32(step)}


def equal(a: Any, b: Any) -> bool:
    return bool(jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and (x == y).all(), a, b)))


@pytest.mark.parametrize("manager", [ocp.CheckpointManager, CheckpointManager])
def test_a_program_runs_with_either_manager(manager: Any, tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=10)
    with manager(tmp_path / "run", options=options) as steps:
        assert steps.latest_step() is None
        saved = [steps.save(step, args=ocp.args.StandardSave(state(step))) for step in (3, 5, 10, 20, 30)]
        steps.wait_until_finished()
        assert saved == [True, False, True, True, True]
        assert (list(steps.all_steps()), steps.latest_step()) == ([20, 30], 30)
    with manager(tmp_path / "run", options=options) as steps:
        abstract = jax.eval_shape(lambda: state(0))
        assert equal(steps.restore(30, args=ocp.args.StandardRestore(abstract)), state(30))
        assert equal(steps.restore(20, args=ocp.args.StandardRestore(abstract)), state(20))
        assert steps.item_metadata(30)["w"].shape == (2, 3)
        steps.delete(20)
        assert list(steps.all_steps()) == [30]
        assert [steps.should_save(step) for step in (31, 40)] == [False, True]
        for step in (40, 50):
            steps.save(step, args=ocp.args.StandardSave(state(step)))
        steps.wait_until_finished()
        for step in (50, 40):
            steps.delete(step)
            with pytest.raises(FileNotFoundError, match=str(step)):
                steps.delete(step)
        assert [steps.save(step, args=ocp.args.StandardSave(state(-step))) for step in (40, 45, 50)] == [
            True,
            False,
            True,
        ]
        steps.wait_until_finished()
        assert equal(steps.restore(40, args=ocp.args.StandardRestore(abstract)), state(-40))


@pytest.mark.parametrize("manager", [ocp.CheckpointManager, CheckpointManager])
def test_items_with_names_and_the_best_step(manager: Any, tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with manager(tmp_path / "run", options=options) as steps:
        for step, loss in enumerate((3.0, 1.0, 2.0, 4.0)):
            args = ocp.args.Composite(state=ocp.args.StandardSave(state(step)), config=ocp.args.JsonSave(CONFIG))
            steps.save(step, args=args, metrics={"loss": loss})
        steps.wait_until_finished()
        assert steps.best_step() == 1
        assert {1, 2} <= set(steps.all_steps())
        restored = steps.restore(1, args=ocp.args.Composite(config=ocp.args.JsonRestore()))
        assert (list(restored), restored["config"]) == (["config"], CONFIG)
        assert steps.restore(1)["config"] == CONFIG
        assert steps.item_metadata(1)["config"] is None
        abstract = jax.eval_shape(lambda: state(0))
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        assert equal(steps.restore(2, args=args)["state"], state(2))


def test_a_killed_run_has_the_losses_of_one_that_is_not(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with jobs("tests.trainers.orbax_job", tmp_path_factory) as job:
        whole = job("train", url=str(tmp_path / "whole"))
        assert len(whole) == STEPS
        assert job("train", url=str(tmp_path / "killed"), kills=KILLS) == whole
    assert tstore.steps(tmp_path / "killed") == [STEPS - 5, STEPS]
    with tstore.open(tmp_path / "killed") as store:
        store.collect(tstore.Keep(last=2), abandoned=timedelta())
        assert store.verify().faults == []
        assert store.collect(tstore.Keep(last=2), abandoned=timedelta(), dry_run=True).objects == 0


def test_what_goes_wrong_is_told(tmp_path: Path) -> None:
    nan = ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda metrics: metrics["loss"])
    with CheckpointManager(tmp_path / "nan", options=nan) as steps:
        for step, loss in enumerate((1.0, math.nan)):
            steps.save(step, args=ocp.args.StandardSave(state(step)), metrics={"loss": loss})
        steps.wait_until_finished()
        assert (steps.best_step(), steps.all_steps(), steps.metrics(0)) == (0, [0, 1], {"loss": 1.0})
        renamed = {**jax.eval_shape(lambda: state(0)), "v": jax.ShapeDtypeStruct((1,), "float32")}
        with pytest.raises(StructureMismatch, match=r"missing in the checkpoint: default/v"):
            steps.restore(1, args=ocp.args.StandardRestore(renamed))
        with (
            CheckpointManager(tmp_path / "nan") as second,
            pytest.raises(InvalidArgument, match="step 0 comes before step 1"),
        ):
            second.save(0, args=ocp.args.StandardSave(state(0)))  # of another job
    with (
        CheckpointManager(tmp_path / "new") as steps,
        pytest.raises(FileNotFoundError, match="no step to restore"),
    ):
        steps.restore()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(NotAStore, match="contains other files"):
        CheckpointManager(tmp_path / "other")
    with pytest.raises(InvalidArgument, match=r"should_save_fn=…\): not supported"):
        CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(should_save_fn=lambda step, last: True))
    assert tstore.steps(tmp_path / "nan") == [0, 1]
