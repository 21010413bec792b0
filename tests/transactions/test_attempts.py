"""Which starts of a job have a token in the environment of their hosts, and that two starts never share one."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
import tstore.sync as blocking
from tstore.core.transactions import attempts
from tstore.core.transactions.attempts import Attempt, detected_attempt
from tstore.errors import InvalidArgument

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_TASK_PID": str(os.getpid()),
}


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in os.environ:
        if name.startswith(("SLURM_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    attempts._start_in.cache_clear()
    yield
    attempts._start_in.cache_clear()


def agent(folder: Path, count: int = 0, run: str = "job", **changes: str) -> dict[str, str]:
    """Return the environment of a worker of torchrun, after its agent has made the folder of this start."""
    start = folder / f"{run}_{folder.name}" / f"attempt_{count}"
    (start / "0").mkdir(parents=True)
    os.utime(start, (count, count))
    return {
        "TORCHELASTIC_RUN_ID": run,
        "TORCHELASTIC_RESTART_COUNT": str(count),
        "TORCHELASTIC_ERROR_FILE": str(start / "0" / "error.json"),
        "GROUP_WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "2",
        **changes,
    }


def test_no_two_attempts_have_one_text() -> None:
    """Not even if the token of one start looks like an attempt of another."""
    tokens = ["job", "job.try.2", "job.after.7", "job.after.7.try.2", "job.anew", "job.over.3", "job.try.2.anew"]
    tokens += [f"{token}#{length}" for token in tokens for length in (3, 9)]
    fields = itertools.product(tokens, (None, 3, 7), (1, 2), (None, 3, 7), (False, True))
    made = [Attempt(*each) for each in fields]
    made += [Attempt(str(attempt)) for attempt in made]  # as `tstore.jax` does
    assert len({str(attempt) for attempt in made}) == len(set(made))
    assert str(Attempt("job")) == "job"


async def test_an_attempt_must_be_passed_or_detected(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match="attempt=''"):
        await tstore.save(url, {"x": np.zeros(3)}, 1, host=0, hosts=2, attempt="")
    with pytest.raises(InvalidArgument, match=r"attempt=….*same on every host and new with each start"):
        await tstore.save(url, {"x": np.zeros(3)}, 1, host=0, hosts=2)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    calls = [tstore.save(url, {"x": np.zeros(3)}, 1, host=h, hosts=2) for h in range(2)]
    assert await asyncio.gather(*calls) == [1, 1]
    with pytest.raises(InvalidArgument, match=r"attempt=….*SLURM.*not through a script"):
        await tstore.save(url, {"x": np.zeros(3)}, 2, host=0, hosts=3)  # the step has two tasks


def test_each_start_has_another_token(tmp_path: Path) -> None:
    starts = [
        STEP,
        {**STEP, "SLURM_RESTART_COUNT": "1"},
        {**STEP, "SLURM_STEP_ID": "4"},
        {**STEP, "SLURM_JOB_ID": "13"},
        agent(tmp_path / "a"),
        agent(tmp_path / "a", 1),
        agent(tmp_path / "b"),  # the same run id, used again
        {**STEP, **agent(tmp_path / "c")},
    ]
    tokens = [detected_attempt(start, 2) for start in starts]
    assert None not in tokens
    assert len(set(tokens)) == len(tokens)
    assert tokens == [detected_attempt(start, 2) for start in starts]


def test_a_restart_without_a_count_has_another_token(tmp_path: Path) -> None:
    """After a change of its members, an agent starts its workers again with the same count."""
    worker = agent(tmp_path)
    token = detected_attempt(worker, 2)
    os.utime(Path(worker["TORCHELASTIC_ERROR_FILE"]).parents[1], (1, 1))  # it makes the folder again
    attempts._start_in.cache_clear()  # in another process
    assert detected_attempt(worker, 2) not in (token, None)


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_TASK_PID": "1"},  # the task is a script, which may start this program again
        {"SLURM_TASK_PID": ""},
        {"SLURM_JOB_ID": ""},
        {"SLURM_STEP_ID": ""},
        {"SLURM_RESTART_COUNT": ""},
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": ""},
        {"SLURM_HET_SIZE": "2"},
        {"SLURM_JOB_ID_HET_GROUP_1": "13"},
        {"TORCHELASTIC_RUN_ID": "none"},  # and no other variable of an agent
    ],
    ids=str,
)
def test_a_step_of_slurm_without_a_token(change: dict[str, str]) -> None:
    assert detected_attempt(STEP, 2) is not None
    assert detected_attempt({**STEP, **change}, 2) is None


@pytest.mark.parametrize(
    "change",
    [
        {"GROUP_WORLD_SIZE": "2"},  # each agent counts for itself
        {"GROUP_WORLD_SIZE": ""},
        {"LOCAL_WORLD_SIZE": "1"},
        {"LOCAL_WORLD_SIZE": "x"},
        {"TORCHELASTIC_RUN_ID": ""},
        {"TORCHELASTIC_RUN_ID": "other"},
        {"TORCHELASTIC_RESTART_COUNT": ""},
        {"TORCHELASTIC_RESTART_COUNT": "1"},
        {"TORCHELASTIC_ERROR_FILE": ""},  # as with --log-dir /dev/null
        {"TORCHELASTIC_ERROR_FILE": "/nowhere/job_random/attempt_0/0/error.json"},
    ],
    ids=str,
)
def test_a_worker_of_torchrun_without_a_token(tmp_path: Path, change: dict[str, str]) -> None:
    worker = agent(tmp_path)
    assert detected_attempt(worker, 2) is not None
    assert detected_attempt({**worker, **change}, 2) is None


# ---- with real agents

WORKER = """
import os, signal, sys, time
from pathlib import Path
import numpy as np
import tstore.sync as tstore

url, folder = sys.argv[1], Path(sys.argv[2])
host, hosts = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
me = f"{os.environ['AGENT']}-{os.environ['LOCAL_RANK']}"
start = len(list(folder.glob(f"{me}-*")))
rows = slice(host, host + 1)
part = tstore.Shards((2, 4), "i4", [((rows, slice(0, 4)), np.full((1, 4), 1000 * start + host, "i4"))])
told = [os.environ["TORCHELASTIC_RESTART_COUNT"]]
last = os.environ["AGENT"] == "0" and int(os.environ["LOCAL_RANK"]) == int(os.environ["LOCAL_WORLD_SIZE"]) - 1
try:
    if not (start == 0 and last):
        told.append(tstore.save(url, part, 1, host=host, hosts=hosts, timeout=60 if start else 0.2))
except tstore.errors.TStoreError as error:
    told.append(f"{type(error).__name__}: {error}")
(folder / f"{me}-{start}").write_text(repr(told))
if start == 0:
    if last:
        while len(list(folder.glob("*-0"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the agent ends this
"""


AGENTS = """
import os, sys
import torch.distributed.run

folder, agents, (reading, writing) = sys.argv[1], [], os.pipe()
two = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-conf"]
two += ["is_host=0", "--rdzv-endpoint"]
one = ["--nnodes", "1", "--nproc-per-node", "2", "--standalone"]
for job, number, options in (("two", 0, two), ("two", 1, two), ("one", 0, one)):
    agents.append(os.fork())
    if agents[-1] == 0:
        if job == "two":
            options.append(f"127.0.0.1:{int(os.read(reading, 5))}")
        os.environ["AGENT"] = str(number)
        common = ["--max-restarts", "2", "--monitor-interval", "0.05"]
        script = [f"{folder}/worker.py", f"{folder}/{job}/store", f"{folder}/{job}"]
        torch.distributed.run.main([*options, *common, *script])
        sys.exit()
server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
os.write(writing, f"{server.port:5}".encode() * 2)
statuses = [os.waitpid(pid, 0)[1] for pid in agents]
assert not any(statuses), statuses
"""
"""Agents of two jobs, forked from one process, since each import of PyTorch takes seconds."""


def run_agents(folder: Path) -> None:
    for job in ("one", "two"):
        (folder / job).mkdir()
    (folder / "worker.py").write_text(WORKER)
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), str(root / "codecs"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-c", AGENTS, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


def told(folder: Path) -> dict[str, list[Any]]:
    return {path.name: eval(path.read_text()) for path in folder.glob("*-*-*")}


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="PyTorch is not installed")
def test_a_worker_of_torchrun_is_killed_and_all_are_started_again(tmp_path: Path) -> None:
    """One agent has a token for each start. Of two agents, one restarts its worker with the same variables."""
    run_agents(tmp_path)
    by_one, by_two = told(tmp_path / "one"), told(tmp_path / "two")
    assert by_one["0-0-0"][1].startswith("DeadlineExceeded")
    assert {name: lines for name, lines in by_one.items() if name.endswith("-1")} == {
        "0-0-1": ["1", 1],
        "0-1-1": ["1", 1],
    }
    assert blocking.restore(tmp_path / "one" / "store")[:, 0].tolist() == [1000, 1001]
    assert [by_two[name][0] for name in ("0-0-1", "1-0-1")] == ["1", "0"]  # as those of another start
    refusals = [by_two[name][1] for name in ("1-0-0", "0-0-1", "1-0-1")]
    assert all("attempt=…" in text and "one agent" in text for text in refusals)
    assert not (tmp_path / "two" / "store").exists()
