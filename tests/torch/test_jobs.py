"""Jobs of several processes: what one number of them saves, another restores."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

import tstore.sync as tstore

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed")

ROOT = Path(__file__).resolve().parents[2]


def test_four_processes_save_and_two_restore(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.job", str(tmp_path), "save:4", "restore:2"]
    job = subprocess.run(
        command, check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert job.returncode == 0, job.stderr


def test_a_job_that_is_killed_inside_saves_resumes(tmp_path: Path) -> None:
    url = tmp_path / "s"
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.restarted", str(url)]
    # otherwise the agent keeps one TCPStore, and processes that start again get the addresses of those before
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    job = subprocess.run(command, check=False, cwd=ROOT, env=os.environ | fresh, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    assert {"after step 0", "after step 1", "after step 3"} <= set(job.stdout.splitlines())
    assert {path.name for path in tmp_path.iterdir()} == {"s", "s.killed-2", "s.killed-4"}
    assert {step: set(tstore.restore(url, step)["w"]) for step in tstore.steps(url)} == {
        step: {step} for step in (1, 2, 3, 4, 5)
    }
    with tstore.open(url) as store:
        assert store.verify().ok
        assert len(list((url / "txn").glob("step-*"))) >= 5 + 2
        store.collect(abandoned=timedelta(0))
        assert len(list((url / "txn").glob("step-*"))) == 5
