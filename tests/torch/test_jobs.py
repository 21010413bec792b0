"""Jobs of several processes: what one number of them saves, another restores."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed")

ROOT = Path(__file__).resolve().parents[2]


def test_four_processes_save_and_two_restore(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.torch.job", str(tmp_path), "save:4", "restore:2"]
    job = subprocess.run(
        command, check=False, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert job.returncode == 0, job.stderr
