"""Keras's training with callbacks that save to a store: killed, resumed, and misused."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import tstore.sync as tstore
from tests.support.forks import Forks, forks

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("keras", "jax", "torch"))),
    reason="Keras, JAX or PyTorch is not installed",
)

EPOCHS = 12
KILLS = int(os.environ.get("TSTORE_KILLS", "3"))
"""How often a run is killed."""

CODE = """
    import os, traceback
    import tests.trainers.keras_job as job

    name, *rest = arguments
    try:
        getattr(job, name)(out, *rest)
    except Exception:
        os.write(out, traceback.format_exc().encode())
        raise
"""


class Jobs:
    """Calls functions of `keras_job` in processes of their own."""

    def __init__(self, processes: Forks, backend: str) -> None:
        self._processes, self.backend = processes, backend

    def run(self, out: Path, name: str, *arguments: object) -> bool:
        """Return whether the call returned; False if it was killed. What it reports is added to a file."""
        status = self._processes.wait(self._processes.start(out, name, *arguments))
        assert status in (0, -signal.SIGKILL), out.read_text()
        return status == 0


@pytest.fixture(scope="module", params=["jax", "torch"])
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", request.param)
        # compiling takes most of the time
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        with forks(CODE, "tests.trainers.keras_job") as processes:
            yield Jobs(processes, request.param)


def test_a_killed_run_has_the_losses_of_one_that_is_not(jobs: Jobs, tmp_path: Path) -> None:
    chance = random.Random(1)

    def run(name: str, kill_at: int, pause: float = 0) -> bool:
        return jobs.run(tmp_path / f"{name}.txt", "train", tmp_path / name, EPOCHS, kill_at, pause)

    assert run("whole", -1)
    kills = 0
    while kills < KILLS:
        if not run("killed", chance.randrange(1, 15), chance.random() / 50):
            kills += 1
        else:  # it came to its end
            with tstore.Checkpointer(tmp_path / "killed") as checkpoints:
                checkpoints.rollback(checkpoints.steps()[0].step)
    run("killed", -1)
    whole, killed = (
        [json.loads(line) for line in (tmp_path / f"{name}.txt").read_text().splitlines()]
        for name in ("whole", "killed")
    )
    assert [epoch for epoch, _ in whole] == list(range(EPOCHS))
    assert len(killed) >= EPOCHS
    assert all(report in whole for report in killed)
    assert tstore.steps(tmp_path / "killed") == tstore.steps(tmp_path / "whole")
    with tstore.open(tmp_path / "killed") as store:
        store.collect(tstore.Keep(last=2), abandoned=timedelta())
        assert store.verify().faults == []
        assert store.collect(tstore.Keep(last=2), abandoned=timedelta(), dry_run=True).objects == 0


def test_which_steps_are_saved_and_kept(jobs: Jobs, tmp_path: Path) -> None:
    assert jobs.run(tmp_path / "out", "check_best", tmp_path)


def test_what_users_of_the_callbacks_reported(jobs: Jobs, tmp_path: Path) -> None:
    if jobs.backend == "jax":
        pytest.skip("it does not depend on the backend, and compiling takes long")
    assert jobs.run(tmp_path / "out", "check", tmp_path)
