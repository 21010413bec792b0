"""Interleaved rounds of all contenders on one workload, and their figures.

A round is two passes over the contenders, whose order rotates by one each round: first saves without fsync; then a
durable save, with a warm and a cold restore. Not timed are: emptying the folder, syncing the disk, filling or
evicting the page cache, freeing the results, and providing free memory (see `machine.Reserve`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench import machine
from bench.figures import Figures
from bench.save import memory
from bench.save.peers import CONTENDERS, Contender
from bench.save.workloads import Arrays, Workload

MEASURES = ("save durable", "save not durable", "restore warm", "restore cold")


@dataclass
class SaveFigures(Figures):
    """The figures in GB/s of one contender on one workload, and what else was measured."""

    cold_share: list[float] = field(default_factory=list)  # share of the stored bytes read from disk, by round
    peak: dict[str, int] = field(default_factory=dict)  # bytes by "save", "restore"
    seconds: float = 0.0


class Race:
    """A run of all contenders on one workload; one that has taken `limit` seconds gets no more rounds."""

    limit = 25.0

    def __init__(self, workload: Workload, names: list[str], folder: Path, log: Callable[[str], None]) -> None:
        self.workload = workload
        self.folder = folder / workload.name
        self.log = log
        self.reserve = machine.Reserve()
        self.figures = {name: SaveFigures(CONTENDERS[name].title) for name in names}
        self.contenders: dict[str, Contender] = {}
        for name in names:
            try:
                self.contenders[name] = CONTENDERS[name](workload)
            except ImportError as error:
                self._drop(name, f"absent: {error}")

    def run(self, rounds: int) -> dict[str, SaveFigures]:
        arrays = self.workload.make()
        for i in range(rounds):
            names = list(self.contenders)
            names = names[i % len(names) :] + names[: i % len(names)]
            self.log(f"{self.workload.name}: round {i + 1} of {rounds}")
            for one_pass in (self._save_not_durable, self._save_and_restore):
                for name in names:
                    if name in self.contenders and self.figures[name].seconds < self.limit:
                        self._attempt(name, one_pass, arrays, i)
        del arrays
        self.reserve.release()
        self.log(f"{self.workload.name}: peak memory")
        for name in list(self.contenders):
            self._measure_memory(name)
        machine.clear(self.folder)
        return self.figures

    def _attempt(self, name: str, one_pass: Callable[[str, Arrays, int], None], arrays: Arrays, i: int) -> None:
        try:
            one_pass(name, arrays, i)
        except Exception as error:  # the others go on if a contender fails
            self._drop(name, f"failed: {type(error).__name__}: {error}")

    def _save_not_durable(self, name: str, arrays: Arrays, i: int) -> None:
        contender, spare = self.contenders[name], 2 * self.workload.nbytes
        machine.clear(self.folder)
        with self._timed(name, "save not durable", i, spare):
            contender.save(arrays, self.folder, durable=False)
        machine.clear(self.folder)
        self.reserve.acquire(spare)

    def _save_and_restore(self, name: str, arrays: Arrays, i: int) -> None:
        contender, figures = self.contenders[name], self.figures[name]
        once, twice = self.workload.nbytes, 2 * self.workload.nbytes
        machine.clear(self.folder)
        with self._timed(name, "save durable", i, twice):
            contender.save(arrays, self.folder, durable=True)
        if not contender.restores:
            return
        machine.warm(self.folder)
        with self._timed(name, "restore warm", i, once):
            restored = contender.restore(self.folder)
        if i == 0:
            _check(arrays, restored, contender.exact)
        del restored
        machine.evict(self.folder)
        before = machine.bytes_from_disk()
        with self._timed(name, "restore cold", i, twice):
            restored = contender.restore(self.folder)
        figures.cold_share.append((machine.bytes_from_disk() - before) / machine.stored_bytes(self.folder))
        del restored
        machine.clear(self.folder)
        self.reserve.acquire(twice)

    def _measure_memory(self, name: str) -> None:
        machine.clear(self.folder)
        for phase in ("save", "restore") if self.contenders[name].restores else ("save",):
            try:
                peak = memory.beyond_arrays(name, self.workload.name, phase, self.folder)
            except RuntimeError as error:
                self.log(f"{self.workload.name}: no peak memory of {name} in {phase}: {error}")
                return
            self.figures[name].peak[phase] = peak

    def _timed(self, name: str, measure: str, i: int, spare: int) -> _Timed:
        """Return a timer for a block that begins with `spare` bytes of free memory."""
        self.reserve.acquire(spare)
        self.reserve.release()
        return _Timed(self.figures[name], measure, i, self.workload.nbytes)

    def _drop(self, name: str, why: str) -> None:
        self.contenders.pop(name, None)
        self.figures[name].error = why
        self.log(f"{self.workload.name}: {name} {why}")


class _Timed:
    def __init__(self, figures: SaveFigures, measure: str, i: int, nbytes: int) -> None:
        self.figures, self.measure, self.i, self.nbytes = figures, measure, i, nbytes

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        seconds = time.perf_counter() - self.start
        if kind is None:
            self.figures.add(self.measure, self.i, self.nbytes / 1e9 / seconds)
            self.figures.seconds += seconds


def _check(arrays: Arrays, restored: Arrays, exact: bool) -> None:
    """Raise `ValueError` unless the restored values equal the saved ones, or reach 20 dB of SQNR if not exact."""
    if arrays.keys() != restored.keys():
        raise ValueError("the restored names differ")
    for name, x in arrays.items():
        y = restored[name]
        if exact and not np.array_equal(x, y):
            raise ValueError(f"the restored values of {name} differ")
        if x.shape != y.shape or float(np.square(x - y).mean()) > 0.01 * float(np.square(x).mean()):
            raise ValueError(f"the restored values of {name} have an SQNR below 20 dB")
