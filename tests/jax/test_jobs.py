"""States of JAX on 8 devices, of one process and of several."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("jax", "optax", "flax"))), reason="JAX, Optax or Flax is not installed"
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "checks",
    [
        ["one:1", "series:2", "late:2", "save:4", "restore:2"],
        pytest.param(["series:2", "save:4", "restore:4", "restore:2"], marks=pytest.mark.deep),
    ],
    ids=["one and several", "fewer and more"],
)
def test_a_job(tmp_path: Path, checks: list[str]) -> None:
    command = [sys.executable, "-m", "tests.jax.job", str(tmp_path), *checks]
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # compiling takes most of the time
    job = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
