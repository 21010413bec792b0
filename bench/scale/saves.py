"""Saves and restores of whole states by the contenders of `bench.save`, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from bench import machine
from bench.cost import Cost, measured
from bench.save.peers import CONTENDERS
from bench.save.workloads import Arrays, Workload


class SaveProcess:
    """A process with the arrays of a workload, which one contender saves and restores."""

    def __init__(self, number: int, count: int, name: str, workload: Workload) -> None:
        self._contender = CONTENDERS[name](workload)
        self._arrays = workload.make()

    def rehearse(self, folder: Path) -> None:
        """Save and restore once, since the first use of a library in a process costs more."""
        machine.clear(folder)
        self._contender.save(self._arrays, folder, durable=True)
        self._contender.restore(folder)
        machine.clear(folder)

    def save(self, folder: Path) -> Cost:
        """Save the arrays with fsync."""
        return measured(lambda: self._contender.save(self._arrays, folder, durable=True))

    def restore(self, folder: Path) -> Cost:
        """Restore the arrays and compare them; the memory is that beyond them."""
        restored: list[Arrays] = []
        cost = measured(lambda: restored.append(self._contender.restore(folder)))
        if restored[0].keys() != self._arrays.keys():
            raise ValueError("the restored names differ")
        for name, values in restored[0].items():
            if not np.array_equal(values, self._arrays[name]):
                raise ValueError(f"the restored values of {name} differ")
        return cost._replace(memory=max(0, cost.memory - sum(a.nbytes for a in restored[0].values())))


def speeds_of(checkout: Path, folder: Path) -> dict[str, float]:
    """Return the GB/s of tstore in one round of `bench.save` on the large state, with the code of a checkout."""
    machine.clear(folder)
    figures = folder / "figures.json"
    options = ["--only", "large", "--peers", "raw1", "--rounds", "1", "--dir", f"{folder}", "--json", f"{figures}"]
    environment = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{checkout / 'codecs'}"}
    command = [sys.executable, "-m", "bench.save", *options]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1])
    speeds: dict[str, float] = json.loads(figures.read_text())["workloads"]["large"]["tstore"]["median"]
    return speeds
