"""Keras's training with callbacks that save to a store: killed, resumed, and misused."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import tstore.sync as tstore
from tests.trainers.killing import KILLS, STEPS, Jobs, jobs

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("keras", "jax", "torch"))),
    reason="Keras, JAX or PyTorch is not installed",
)


@pytest.fixture(scope="module", params=["jax", "torch"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", request.param)
        # compiling takes most of the time
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        with jobs("tests.trainers.keras_job", tmp_path_factory) as calls:
            yield calls


def test_a_killed_run_has_the_losses_of_one_that_is_not(job: Jobs, tmp_path: Path) -> None:
    whole = job("train", url=str(tmp_path / "whole"))
    assert len(whole) == STEPS
    assert job("train", url=str(tmp_path / "killed"), kills=KILLS) == whole
    assert tstore.steps(tmp_path / "killed") == tstore.steps(tmp_path / "whole") == [STEPS - 5, STEPS]
    with tstore.open(tmp_path / "killed") as store:
        store.collect(tstore.Keep(last=2), abandoned=timedelta())
        assert store.verify().faults == []
        assert store.collect(tstore.Keep(last=2), abandoned=timedelta(), dry_run=True).objects == 0


@pytest.mark.parametrize("job", ["torch"], indirect=True)  # compiling for JAX takes long
def test_which_steps_are_saved_and_kept(job: Jobs, tmp_path: Path) -> None:
    job("check_best", url=str(tmp_path))


@pytest.mark.parametrize("job", ["torch"], indirect=True)
def test_what_users_of_the_callbacks_reported(job: Jobs, tmp_path: Path) -> None:
    job("check", url=str(tmp_path))
