"""The examples: every one runs, and training jobs that are killed resume where they were."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tstore.sync as blocking
from tests.support.documents import ROOT

EXAMPLES = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
JOBS = ("pytorch_fsdp", "jax_resume")
"""The examples that are killed and run again."""

SIDE = "144"
"""The argument that makes the example of a volume short."""

OPTIONS = ("--save-every", "5", "--steps", "14")
FRUGAL = {"OMP_NUM_THREADS": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {*JOBS, "volume"}))
def test_examples(name: str, tmp_path: Path) -> None:
    assert run([sys.executable, "-W", "error", str(EXAMPLES[name])], tmp_path)


def test_a_volume_is_sliced_over_http_for_a_part_of_its_bytes(tmp_path: Path) -> None:
    printed = run([sys.executable, "-W", "error", str(EXAMPLES["volume"]), SIDE], tmp_path)
    everything, *parts = (float(size) for size in re.findall(r": ([\d.]+) MB", printed))
    assert len(parts) == 3
    assert all(0 < part < everything for part in parts)
    assert (tmp_path / "slice.png").read_bytes().startswith(b"\x89PNG")


def test_an_fsdp_job_that_is_killed_resumes_in_other_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = (str(EXAMPLES["pytorch_fsdp"]), "store", *OPTIONS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    before = killed_after(13, [*torchrun, *script], tmp_path)
    one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    check_resumed(before, losses(run([sys.executable, "-W", "error", *script], tmp_path, one)))
    assert blocking.steps(tmp_path / "store")[-1] == 14  # the last one


def test_a_jax_job_that_is_killed_resumes_on_another_mesh(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    command = [sys.executable, "-W", "error", str(EXAMPLES["jax_resume"]), "store", *OPTIONS]
    before = killed_after(13, command, tmp_path)
    check_resumed(before, losses(run([*command, "--mesh", "2x4"], tmp_path)))
    assert blocking.steps(tmp_path / "store")[-1] == 14


def run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **FRUGAL, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def killed_after(step: int, command: list[str], folder: Path) -> dict[int, float]:
    """Run a job, and kill all its processes once it has printed the loss of a step; return the losses."""
    printed = ""
    with subprocess.Popen(
        command, cwd=folder, env={**os.environ, **FRUGAL}, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            printed += line
            if step in losses(line):
                break
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        for pid in [*map(int, children), job.pid]:
            os.kill(pid, signal.SIGKILL)
    assert step in losses(printed), printed
    return losses(printed)


def losses(text: str) -> dict[int, float]:
    """Return the losses that a job printed, by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)$", text, re.M)}


def check_resumed(before: dict[int, float], after: dict[int, float]) -> None:
    """Check that a killed job went on after a step that it had saved, as if it had not been killed."""
    assert list(before) == list(range(1, 14))
    assert min(after) in (6, 11)  # by step 11 the save of step 10 has begun, so that of step 5 has ended
    assert list(after) == list(range(min(after), 15))
    for step in before.keys() & after.keys():
        assert after[step] == pytest.approx(before[step], rel=1e-5), step
