"""The demo, run as a user runs it: its report must match the store afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import tstore.sync as tstore
from tests.support.commands import Call
from tests.support.documents import README
from tests.support.polling import blocking_until
from tests.support.processes import start_tstore
from tests.support.weights import real_weights
from tstore.checkpoint.structure import flatten
from tstore.convert.safetensors import open_tensors
from tstore.errors import DeadlineExceeded, InvalidArgument, StorageFull, Unavailable
from tstore.lab.hosts.model import advance, transformer
from tstore.lab.hosts.processes import Job

SIZE = 8_000_000
NUMBER = re.compile(r"\d[\d.,]*(?: [kMG]?B\b)?")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@contextlib.contextmanager
def demo(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    process = start_tstore("demo", *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def report(*arguments: object) -> dict[str, Any]:
    with demo(*arguments, "--json") as process:
        out, err = process.communicate(timeout=250)
    assert (process.returncode, err) == (0, "")
    document: dict[str, Any] = json.loads(out)
    return document


def raw(tree: Any) -> dict[str, tuple[Any, ...]]:
    return {p: (a.dtype, a.shape, np.ascontiguousarray(a).tobytes()) for p, a in flatten(tree)[1].items()}


def hosts_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that this one has forked from another."""
    return [pid for launcher in children_of(process.pid) for pid in children_of(launcher)]


def children_of(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # it has ended
        return []


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_the_story(tmp_path: Path, temporary: Path) -> None:
    told = report("--store", tmp_path / "store", "--size", SIZE // 1_000_000)
    assert os.listdir(temporary) == []
    killed, restored = told["killed"], told["restored"]

    assert (killed["step"], killed["host"], killed["absent"], killed["survivors"]) == (1, 5, [5], 7)
    assert 0 < killed["written"] <= SIZE / 8
    assert killed["error"] == "DeadlineExceeded"
    assert "hosts [5] of 8" in killed["message"]
    assert killed["steps_after"] == [0]
    assert killed["previous_step_equal"] is True

    assert (restored["step"], restored["hosts"], restored["equal"]) == (1, 3, True)
    assert restored["bytes"] >= told["bytes"] > 0.97 * SIZE

    tags = ["step/0", "step/1", "step/1/e4m3", "step/1/e3m2"]
    commits = told["commits"]
    assert [(c["version"], c["tag"]) for c in commits] == list(enumerate(tags, 1))
    assert [c["bits_per_value"] for c in commits] == pytest.approx([32, 32, 8, 6], abs=0.1)
    assert [c["sqnr_db"] for c in commits[:2]] == [None, None]
    assert 28 < commits[2]["sqnr_db"] < 34
    assert 20 < commits[3]["sqnr_db"] < 28
    assert commits[1]["bytes_added"] < 0.9 * commits[0]["bytes_added"]  # the embedding is frozen
    assert all(c["seconds"] > 0 and c["gb_per_s"] > 0 for c in commits)

    # the actual contents
    store = tstore.open(tmp_path / "store", "r")
    assert tstore.steps(tmp_path / "store") == [0, 1]
    assert {t: v for v, t in enumerate(tags, 1)} == store.tags()
    history = {c.version: c for c in store.history()}
    assert [history[c["version"]].bytes_added for c in commits] == [c["bytes_added"] for c in commits]
    before = {**transformer(SIZE), "step": np.int64(0)}
    after = advance(before, 1)
    assert raw(tstore.restore(tmp_path / "store", 0)) == raw(before)
    assert raw(tstore.restore(tmp_path / "store")) == raw(after)
    exact = flatten(after)[1]
    for commit in commits[2:]:
        decoded = flatten(tstore.restore(tmp_path / "store", at=commit["tag"]))[1]
        measured = tstore.quantize_report(tmp_path / "store", at=commit["tag"])
        quantized = [a.path for a in measured.arrays if a.format]  # vectors are kept, and not counted
        signal_ = sum(float(np.sum(np.square(exact[p], dtype=np.float64))) for p in quantized)
        noise = sum(float(np.sum(np.square(exact[p] - decoded[p], dtype=np.float64))) for p in quantized)
        assert 10 * np.log10(signal_ / noise) == pytest.approx(commit["sqnr_db"], abs=0.05)
    assert store.verify().ok


@pytest.fixture(params=["small", pytest.param("real", marks=pytest.mark.deep)])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A file of weights and of integers."""
    if request.param == "real":
        return real_weights()
    tensors = flatten(transformer(SIZE))[1] | {"embeddings.position_ids": np.arange(512)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_model_of_the_users(tmp_path: Path, temporary: Path, model: Path) -> None:
    document = report("--store", tmp_path / "store", "--model", model)
    assert os.listdir(temporary) == []
    tensors, _ = open_tensors(model)
    assert document["model"] == "model.safetensors"
    assert document["arrays"] == len(tensors)
    assert (document["killed"]["step"], document["killed"]["steps_after"]) == (1, [0])
    assert (document["restored"]["step"], document["restored"]["equal"]) == (1, True)
    tags = ["step/0", "step/1", "step/1/e4m3", "step/1/e3m2"]
    assert [(c["version"], c["tag"]) for c in document["commits"]] == list(enumerate(tags, 1))
    assert [c["bits_per_value"] for c in document["commits"]] == pytest.approx([32, 32, 8, 6], abs=0.1)
    assert 28 < document["commits"][2]["sqnr_db"] < 34
    assert 20 < document["commits"][3]["sqnr_db"] < 30
    assert raw(tstore.restore(tmp_path / "store", 0)) == raw(tensors)
    moved = tstore.restore(tmp_path / "store", 1)
    assert raw(moved)["embeddings.position_ids"] == raw(tensors)["embeddings.position_ids"]
    assert raw(moved) != raw(tensors)


def test_it_prints_what_the_readme_shows(temporary: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare line by line, except numbers; the commands at the end must work."""
    monkeypatch.chdir(temporary)
    with demo("--size", SIZE // 1_000_000) as process:
        out, err = process.communicate(timeout=250)
    assert (process.returncode, err) == (0, "")
    *recording, cut = README.of_language("text")[0].splitlines()
    lines = [NUMBER.sub("#", line) for line in out.splitlines()]
    assert [NUMBER.sub("#", line) for line in recording] == lines[: len(recording)]
    assert cut == "…"
    rows = [line.split() for line in out.splitlines() if " step/1/e" in line and "tstore" not in line]
    assert [row[:2] for row in rows] == [["3", "step/1/e4m3"], ["4", "step/1/e3m2"]]
    [kept] = temporary.iterdir()
    commands = [line.strip() for line in out.splitlines() if line.startswith("  tstore ")]
    assert [c.split()[1] for c in commands] == ["log", "view", "ls", "verify", "export"]
    for command in commands:
        if command.split()[1] == "view":  # goes on until Ctrl-C; `tests/page` has its tests
            continue
        assert call(*command.split()[1:])[0] == 0
    assert out.splitlines()[-1].split() == ["rm", "-r", str(kept)]


@pytest.mark.parametrize(
    ("hosts", "stop"),
    [
        (1, signal.SIGINT),
        pytest.param(1, signal.SIGTERM, marks=pytest.mark.deep),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.deep),
        (8, signal.SIGINT),
        pytest.param(8, signal.SIGTERM, marks=pytest.mark.deep),  # the test below sends it too
        (8, signal.SIGKILL),
    ],
)
def test_no_process_outlives_the_demo(temporary: Path, hosts: int, stop: signal.Signals) -> None:
    with demo("--size", SIZE // 1_000_000) as process:
        blocking_until(lambda: len(hosts_of(process)) >= hosts)
        started = hosts_of(process)
        if hosts == 8:
            assert process.stdout is not None
            assert any("saved step 0" in line for line in process.stdout)  # in the midst of the story
        process.send_signal(stop)
        _, err = process.communicate(timeout=250)
    blocking_until(lambda: all(gone(pid) for pid in started))
    if stop != signal.SIGKILL:
        what, code = ("interrupted", 130) if stop == signal.SIGINT else ("terminated", 143)
        assert process.returncode == code
        assert err.splitlines() == [f"tstore: {what}; every commit is complete or absent"]
        assert os.listdir(temporary) == []


def test_sigterm_ends_it_in_the_background_of_a_script(temporary: Path) -> None:
    """A shell without job control ignores SIGINT in commands started with `&`."""
    words = [sys.executable, "-m", "tstore", "demo", "--size", str(SIZE // 1_000_000)]
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            blocking_until(lambda: len(hosts_of(process)) >= 8)
            started = hosts_of(process)
            process.send_signal(signal.SIGINT)
            assert process.stdout is not None
            assert any("saved step 0" in line for line in process.stdout)
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=250)
        finally:
            process.kill()
    blocking_until(lambda: all(gone(pid) for pid in started))
    assert process.returncode == 143
    assert err.splitlines() == ["tstore: terminated; every commit is complete or absent"]
    assert os.listdir(temporary) == []


def test_bad_input(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("x")
    tstore.save(tmp_path / "store", {"x": np.arange(3)}, 6)
    cases = [
        (["--store", tmp_path / "store"], 1, "already a store"),
        (["--store", tmp_path / "folder"], 1, "other files"),
        (["--store", "memory://a"], 2, "pass a folder"),
        (["--model", tmp_path / "none"], 1, "none"),
        (["--model", tmp_path / "folder" / "file"], 1, "safetensors"),
    ]
    for arguments, code, words in cases:
        with demo(*arguments) as process:
            out, err = process.communicate(timeout=250)
        assert (process.returncode, out) == (code, "")
        assert err.startswith("tstore: ")
        assert err.count("\n") == 1
        assert words in err
        assert os.listdir(temporary) == []
    assert os.listdir(tmp_path / "folder") == ["file"]
    assert tstore.steps(tmp_path / "store") == [6]


# ---- the simulated hosts


@pytest.fixture
def weights(tmp_path: Path) -> str:
    """A small file of weights."""
    safetensors.numpy.save_file({"w": np.arange(64_000, dtype=np.float32)}, tmp_path / "weights")
    return str(tmp_path / "weights")


async def test_hosts_answer_and_report_errors(tmp_path: Path, weights: str) -> None:
    async with Job(2) as job:
        assert await job.ask("ready") == [None, None]
        await job.ask("load", weights=weights, mesh={"data": 2, "model": 1})
        reply = await job.hosts[0].ask("save", store=str(tmp_path / "s"), step=0, attempt="a", timeout=0.2)
        assert isinstance(reply.error, DeadlineExceeded)
        assert reply.error.absent == [1]
        assert "hosts [1] of 2" in str(reply.error)
        pids = [host.pid for host in job.hosts]
        await job.hosts[1].kill()
        with pytest.raises(Unavailable, match="host 1 ended with code -9"):
            await job.hosts[1].ask("ready")
    assert all(gone(pid) for pid in pids)


def fill_disk_of(pid: int) -> None:
    """Make every larger write of a process fail as on a full disk."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (10_000, 10_000))


async def test_one_host_that_fails_ends_the_job_with_its_error(tmp_path: Path, weights: str) -> None:
    async with Job(2) as job:
        with pytest.raises(InvalidArgument, match="step -1"):
            await job.ask("save", store=str(tmp_path / "s"), step=-1, attempt="a", timeout=1)
    async with Job(2) as job:
        await job.ask("load", weights=weights, mesh={"data": 2, "model": 1})
        fill_disk_of(job.hosts[1].pid)
        with pytest.raises(StorageFull, match="free space"):
            async with asyncio.timeout(30):
                await job.ask("save", store=str(tmp_path / "s"), step=0, attempt="a", timeout=100)
        assert all(gone(host.pid) for host in job.hosts)


def test_a_full_disk_ends_it_with_the_error_of_a_host(tmp_path: Path, temporary: Path) -> None:
    with demo("--store", tmp_path / "store", "--size", SIZE // 1_000_000) as process:
        blocking_until(lambda: len(hosts_of(process)) == 8)
        fill_disk_of(hosts_of(process)[3])
        out, err = process.communicate(timeout=100)  # the other hosts wait for 120 s
    assert process.returncode == 1
    assert err.startswith("tstore: ")
    assert err.count("\n") == 1
    assert "free space" in err
    assert "saved step 0" not in out
    assert os.listdir(temporary) == []
    assert tstore.open(tmp_path / "store", "r").verify().ok


async def test_hosts_of_a_new_store_may_all_create_it(tmp_path: Path, weights: str) -> None:
    async with Job(4) as job:
        await job.ask("load", weights=weights, mesh={"data": 4, "model": 1})
        for i in range(5):
            store = str(tmp_path / str(i))
            replies = await job.ask("save", store=store, step=0, attempt="a", timeout=30)
            assert [answer["version"] for answer in replies] == [1] * 4


async def test_a_host_that_fails_says_why() -> None:
    async with Job(1) as job:
        with pytest.raises(Unavailable, match="ended with code 1: AttributeError"):
            await job.hosts[0].ask("nonsense")
