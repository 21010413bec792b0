"""The examples: every one runs, and training jobs that are killed resume where they were."""

from __future__ import annotations

import asyncio
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tests.support.documents import ROOT
from tests.support.modules import module_at
from tstore.core.storage.http.store import HttpStorage
from tstore.core.storage.objects import Buffers
from tstore.service.server import Server

EXAMPLES = {path.stem: path for path in (ROOT / "examples").glob("*.py")}
JOBS = ("pytorch_fsdp", "jax_resume")
"""The examples that are killed and run again. That for vLLM has a test beside those of its loader."""

SIDE = "144"
"""The argument that makes the example of a volume short."""

OPTIONS = ("--save-every", "5", "--steps", "14")
FRUGAL = {"OMP_NUM_THREADS": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - {*JOBS, "volume", "vllm_loader"}))
def test_examples(name: str, tmp_path: Path) -> None:
    assert run([sys.executable, "-W", "error", str(EXAMPLES[name])], tmp_path)


def test_a_volume_is_sliced_over_http_for_a_part_of_its_bytes(tmp_path: Path) -> None:
    printed = run([sys.executable, "-W", "error", str(EXAMPLES["volume"]), SIDE], tmp_path)
    everything, *parts = (float(size) for size in re.findall(r": ([\d.]+) MB", printed))
    assert len(parts) == 3
    assert all(0 < part < everything for part in parts)
    assert (tmp_path / "slice.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def volume() -> ModuleType:
    """The example as a module; its processes are threads here."""
    return module_at(EXAMPLES["volume"])


async def test_the_volume_prints_the_bytes_that_are_transferred(
    volume: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    writes = [asyncio.to_thread(volume.write, str(tmp_path / "store"), h, int(SIDE)) for h in range(volume.HOSTS)]
    await asyncio.gather(*writes)
    transferred, read = [], volume.read

    async def measured(what: str, view: tstore.Array) -> Any:
        sizes.clear()
        values = await read(what, view)
        transferred.append(f"{sum(sizes) / 1e6:.2f}")
        return values

    sizes: list[int] = []
    inner = HttpStorage.read

    async def counted(self: HttpStorage, key: str, offset: int, buffers: Buffers, size: int) -> None:
        sizes.append(size)
        await inner(self, key, offset, buffers, size)

    monkeypatch.setattr(HttpStorage, "read", counted)
    monkeypatch.setattr(volume, "read", measured)
    monkeypatch.chdir(tmp_path)
    async with Server(tmp_path / "store") as server:
        await volume.look(server.url)
    assert re.findall(r": ([\d.]+) MB \(", capsys.readouterr().out) == transferred
    assert len(set(transferred)) == 3


def test_the_oblique_slab_of_the_volume_is_tilted_by_30_degrees(volume: ModuleType) -> None:
    side = 144
    z, y, x = volume.oblique(side)
    assert z.shape == y.shape == x.shape == (2, side // 2, side // 2)
    assert all(0 <= axis.min() <= axis.max() < side for axis in (z, y, x))
    assert (np.diff(x, axis=2) == 1).all()
    assert not np.diff(z, axis=2).any()
    assert not np.diff(y, axis=2).any()
    rise, run_ = (axis[0, -1, 0] - axis[0, 0, 0] for axis in (z, y))
    assert math.degrees(math.atan2(rise, run_)) == pytest.approx(30, abs=1)
    assert math.hypot(rise, run_) == pytest.approx(side // 2 - 1, abs=1)
    between = [(axis[1] - axis[0]).mean() for axis in (z, y)]  # the second layer is one voxel above the first
    assert between == pytest.approx([math.cos(math.pi / 6), -math.sin(math.pi / 6)], abs=0.15)


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
