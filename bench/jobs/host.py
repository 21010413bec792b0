"""One process of a job: the methods that the driver calls, each of which returns its duration and peak memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import machine
from bench.jobs.contenders import CONTENDERS
from bench.jobs.states import check
from bench.jobs.training import TrainingLoop
from bench.save.workloads import Workload

Measured = dict[str, float]
"""`seconds`, and `peak`: the peak of resident bytes, without the new process, its state and the result."""

_ALONE = 0.4  # seconds of training before and after a save


class JobProcess:
    """Process `number` of the job of a contender."""

    def __init__(self, number: int, count: int, name: str, workload: Workload, rendezvous: Path) -> None:
        self._workload = workload
        self._contender = CONTENDERS[name](workload, number, count, rendezvous)
        self._training = TrainingLoop()
        gc.collect()
        self._resident = machine.reset_peak()

    def copy_state(self) -> Measured:
        """Copy the state to fresh memory."""
        arrays = list(self._contender.values())
        copies = []
        start = time.perf_counter()
        for array in arrays:
            copy = np.empty_like(array)
            np.copyto(copy, array)
            copies.append(copy)
        return {"seconds": time.perf_counter() - start}

    def save(self, folder: Path, step: int, durable: bool) -> Measured:
        return self._measured(lambda: self._contender.save(folder, step, durable))

    def save_while_training(self, folder: Path, step: int, staging: str) -> Measured:
        """Save in the background; return also how much slower training is during the save, and how long it waits.

        `slowed` is the share by which there are fewer steps per second. `lock` is the share of the time in which
        training waits for the interpreter's lock.
        """
        before = self._training.rate_alone(_ALONE)
        start = self._start()
        wait = self._contender.begin_save(folder, step, staging)
        seconds = time.perf_counter() - start
        meanwhile = self._training.rate_during(wait)
        peak = machine.peak() - self._resident
        after = self._training.rate_alone(_ALONE)
        return {
            "seconds": seconds,
            "peak": float(peak),
            "slowed": 1 - 2 * meanwhile.steps / (before.steps + after.steps),
            "lock": meanwhile.lock,
        }

    def restore(self, folder: Path, step: int, what: str, checked: bool) -> Measured:
        """Restore, and compare all values with the saved ones if `checked`."""
        results: list[Any] = []
        measured = self._measured(lambda: results.append(self._contender.restore(folder, step, what)))
        pieces = list(self._contender.pieces(results[0]))
        measured["peak"] -= sum(values.nbytes for _, _, values in pieces)
        if checked:
            check(self._workload, pieces)
        return measured

    def change_tenth(self) -> None:
        self._contender.change_tenth()

    def _start(self) -> float:
        """Wait until all processes of the job are ready, so that none counts the lateness of another."""
        gc.collect()
        machine.reset_peak()
        self._contender.wait_for_others()
        return time.perf_counter()

    def _measured(self, call: Callable[[], Any]) -> Measured:
        start = self._start()
        call()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "peak": float(machine.peak() - self._resident)}
