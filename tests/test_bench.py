"""The programs of `bench/` that other tests do not run, with tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bench.breadth import Profile
from bench.workloads import flat, large, leaves, tenth
from bench.writers import report
from bench.writers.rounds import Bench

ROOT = Path(__file__).resolve().parent.parent


def figures_of(program: str, folder: Path, options: str) -> Any:
    """Run a program in a folder that it leaves as it was, and return its figures."""
    figures = folder / "figures.json"
    command = [sys.executable, "-m", f"bench.{program}", *options.split(), "--json", str(figures)]
    if program != "breadth":
        command += ["--rounds", "1", "--dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.iterdir()) == [figures]
    return json.loads(figures.read_text())


def not_measured(data: Any) -> set[str]:
    """Return the bars of the figures whose value no workload has measured."""
    return {bar["what"] for bar in data["bars"] if bar["met"] is None}


@pytest.mark.deep
def test_jobs_measures_what_its_bars_need(tmp_path: Path) -> None:
    data = figures_of("jobs", tmp_path, "--only large --size 3 --contenders tstore")
    for measured in data["workloads"].values():
        assert [figures["error"] for figures in measured.values()] == ["", ""]
        assert 0 < measured["tstore"]["median"]["written by frozen steps"] < 1
        assert measured["raw"]["median"]["memory copy"] > 0
    assert data["bars"]
    assert not not_measured(data)


@pytest.mark.parametrize("hosts", [(8,), (1, 8)])
def test_writers_plots_one_number_of_hosts_and_several(tmp_path: Path, hosts: tuple[int, ...]) -> None:
    row = {"question": "independent", "tasks": 1, "durable": True, "round": 0}
    rows = [{**row, "contender": "tstore", "hosts": count, "rate": 100.0 * count} for count in hosts]
    rows.append({**row, "contender": "icechunk", "hosts": 8, "error": "not installed"})
    [plot] = report.plot(rows, [], tmp_path / "new" / "plots", skipped=3)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.name == "independent.png"


def test_writers_begins_no_measurement_after_its_time(tmp_path: Path) -> None:
    logged: list[str] = []
    bench = Bench(tmp_path, logged.append, time.monotonic() - 1)
    bench.independent(2, 1, True, 0, 1.0)
    assert len(bench.skipped) == 3
    assert bench.skipped[0].endswith(", 2 hosts")
    assert bench.rows == logged == []


@pytest.mark.parametrize(
    ("rows", "works", "bars"),
    [
        ("open,poll", 5, 9),
        pytest.param("write,open,change,arrays,leaves,group,commits,poll", 18, 20, marks=pytest.mark.deep),
    ],
)
def test_scale_measures_what_its_bars_need(rows: str, works: int, bars: int, tmp_path: Path) -> None:
    sizes = "--chunks 20000 --arrays 50 --leaves 100 --hosts 72 --commits 30 --size 4 --seconds 0"
    data = figures_of("scale", tmp_path, f"--only {rows} --peers safetensors {sizes}")
    errors = [figures["error"] for work in data["works"].values() for figures in work.values()]
    assert not any(errors), errors
    assert len(data["works"]) >= works
    assert all("tensorstore" in what for what in not_measured(data))
    assert len(data["bars"]) - len(not_measured(data)) >= bars


@pytest.mark.parametrize(
    ("codecs", "only"), [("raw", "--only read,boxes"), pytest.param("raw,zstd", "", marks=pytest.mark.deep)]
)
def test_arrays_measures_what_its_bars_need(codecs: str, only: str, tmp_path: Path) -> None:
    sizes = "--side 32 --chunks 16 --boxes 3 --arrays 20 --singles 5 --elements 5"
    data = figures_of("arrays", tmp_path, f"--peers zarr --codecs {codecs} {sizes} {only}")
    assert len(data["works"]) == (3 if only else 18)
    for work, measured in data["works"].items():
        assert not any(figures["error"] for figures in measured.values()), work
        assert measured["tstore"]["median"]["cpu"] > 0
        assert ("zarr" in measured) == (not work.endswith("durable")), work
    assert not_measured(data) >= {"16³ raw: read: tensorstore ÷ tstore"}


@pytest.mark.deep
def test_page_measures_what_its_bars_need(tmp_path: Path) -> None:
    data = figures_of("page", tmp_path, "--steps 3 --arrays 20 --many 20 --gets 10")
    assert len(data["views"]) == 7
    for measured in data["views"].values():
        assert all(value > 0 for value in measured["median"].values())
    assert not not_measured(data)


def test_breadth_counts_what_each_call_enters(tmp_path: Path) -> None:
    data = figures_of("breadth", tmp_path, "--repeats 2")
    assert data.pop("import tstore") == {"loaded": 1}
    imported = data.pop("import tstore.sync")["loaded"]
    assert {"save", "restore", "read", "commit"} == data.keys() - {"machine", "bars"}
    for row in (data[work] for work in ("save", "restore", "read", "commit")):
        assert 0 < row["modules"] <= row["functions"] <= row["calls"]
        assert imported <= row["loaded"]
    assert data["read"]["calls"] < data["restore"]["calls"]  # a restore opens a store and reads its only array


def test_a_call_counts_once_however_often_it_waits() -> None:
    code = "import asyncio\nasync def wait():\n  for _ in range(9): await asyncio.sleep(0)\nasyncio.run(wait())"
    profile = Profile()
    before = threading.getprofile(), sys.getprofile()
    profile.install()
    profile.on = True
    exec(compile(code, "waiting", "exec"), {"__name__": "tstore.waiting"})
    threading.setprofile(before[0])
    sys.setprofile(before[1])
    assert profile.figures() == {"calls": 2, "functions": 2, "modules": 1}  # the module, and `wait`


def test_a_tenth_of_a_state_is_its_first_group() -> None:
    for workload in (large(2**31), leaves(10_000)):
        tree = workload.tree((name, None) for name in workload.names)
        assert [name for name, _ in flat(tree)] == workload.names
        assert len(dict(flat(tenth(tree)))) * 10 == workload.count
    assert abs(large(2**31).nbytes - 2**31) < 2**24


@pytest.mark.deep
def test_loading_measures_what_its_bars_need(tmp_path: Path) -> None:
    data = figures_of("loading", tmp_path, "--size 2 --leaves 50")
    for measured in data["workloads"].values():
        installed = {name: figures for name, figures in measured.items() if not figures["error"]}
        assert {"raw", "tstore into", "tstore map", "tstore stream", "safetensors", "torch.load mmap"} <= set(
            installed
        )
        assert all(set(figures["median"]) == {"first", "whole", "read", "cold"} for figures in installed.values())
    assert all("runai" in bar or "fastsafetensors" in bar for bar in not_measured(data))


@pytest.mark.deep
def test_tiers(tmp_path: Path) -> None:
    assert not not_measured(figures_of("tiers", tmp_path, "--mib 8 --hosts 4"))
