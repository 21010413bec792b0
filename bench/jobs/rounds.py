"""Interleaved rounds of all contenders on one workload.

In a round each contender runs as a job of new processes, in an order that rotates by one each round. Not timed
are: starting processes, making the state, emptying the folder, syncing the disk, filling or evicting the page
cache, and providing free memory (see `machine.Reserve`). Figures are seconds, unless they are peaks of memory or
shares. The seconds of a job are those of its slowest process; the peaks of its processes are summed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from bench import machine
from bench.figures import Figures
from bench.jobs.contenders import CONTENDERS
from bench.jobs.host import JobProcess, Measured
from bench.processes import HostError, Hosts
from bench.save.workloads import Workload

COPY = "memory copy"
SAVES = {True: "save durable", False: "save not durable"}
RESTORES = {"same": "restore warm", "other": "reshard warm", "tenth": "restore 10 % warm"}
COLD = "restore cold"
WRITTEN = "written by frozen steps"  # share of the bytes of the state
_FROZEN_STEPS = 3


def blocking(staging: str) -> str:
    """Return the measure of how long a save in the background blocks its caller."""
    return "blocking" if staging == "memory" else f"blocking, {staging}"


def slowed(staging: str) -> str:
    """Return the measure of the share by which training is slower during a save in the background."""
    return "training slowed" if staging == "memory" else f"training slowed, {staging}"


def lock(staging: str) -> str:
    """Return the measure of the share of the time in which training waits for the lock during such a save."""
    return "waits for lock" if staging == "memory" else f"waits for lock, {staging}"


def peak(measure: str) -> str:
    """Return the measure of the peak memory during another measure, in bytes."""
    return f"{measure}: peak memory"


class Race:
    """A run of all contenders on one workload; one that has taken `limit` seconds gets no more rounds."""

    limit = 240.0

    def __init__(self, workload: Workload, names: list[str], folder: Path, log: Callable[[str], None]) -> None:
        self.workload = workload
        self.folder = folder / workload.name
        self.log = log
        self.reserve = machine.Reserve()
        self.figures = {name: Figures(CONTENDERS[name].title) for name in names}
        self._spent = dict.fromkeys(names, 0.0)

    def run(self, rounds: int) -> dict[str, Figures]:
        names = list(self.figures)
        for turn in range(rounds):
            self.log(f"{self.workload.name}: round {turn + 1} of {rounds}")
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                if not self.figures[name].error and self._spent[name] < self.limit:
                    self._attempt(name, turn)
        self.reserve.release()
        machine.clear(self.folder)
        return self.figures

    def _attempt(self, name: str, turn: int) -> None:
        contender, start = CONTENDERS[name], time.monotonic()
        machine.clear(self.folder)
        rendezvous = self.folder.parent / f"{self.workload.name}-{name}-{turn}"
        try:
            with Hosts(contender.processes, JobProcess, name, self.workload, rendezvous) as hosts:
                self._round(hosts, name, turn)
        except HostError as error:  # the others go on if a contender fails
            absent = "ModuleNotFoundError" in str(error)
            self.figures[name].error = f"{'absent' if absent else 'failed'}: {error}"
            self.log(f"{self.workload.name}: {name} {self.figures[name].error}")
        self._spent[name] += time.monotonic() - start
        self.log(f"{self.workload.name}: {name} took {time.monotonic() - start:.0f} s")

    def _round(self, hosts: Hosts, name: str, turn: int) -> None:
        contender, figures, once = CONTENDERS[name], self.figures[name], self.workload.nbytes

        def timed(measure: str, spare: int, do: str, *arguments: object) -> list[Measured]:
            self.reserve.acquire(spare)
            self.reserve.release()
            measured: list[Measured] = hosts.call(do, *arguments)
            figures.add(measure, turn, max(each["seconds"] for each in measured))
            if "peak" in measured[0]:
                figures.add(peak(measure), turn, max(0.0, sum(each["peak"] for each in measured)))
            return measured

        hosts.call("copy_state")  # the first call makes the state
        timed(COPY, once, "copy_state")
        for durable in reversed(contender.durabilities):
            machine.clear(self.folder)
            timed(SAVES[durable], 2 * once, "save", self.folder, 1, durable)
        machine.warm(self.folder)
        for what, measure in RESTORES.items():
            if (what == "same" or contender.parts) and (what != "other" or contender.reshards):
                timed(measure, once, "restore", self.folder, 1, what, turn == 0 and what != "tenth")
        machine.evict(self.folder)
        timed(COLD, 2 * once, "restore", self.folder, 1, "same", False)
        if contender.parts and turn == 0:  # the bytes are the same in each round
            before = machine.stored_bytes(self.folder)
            for step in range(2, 2 + _FROZEN_STEPS):
                hosts.call("change_tenth")
                hosts.call("save", self.folder, step, True)
            written = machine.stored_bytes(self.folder) - before
            figures.add(WRITTEN, turn, written / (_FROZEN_STEPS * once))
        for staging in contender.stagings:
            machine.clear(self.folder)
            measured = timed(blocking(staging), 2 * once, "save_while_training", self.folder, 1, staging)
            for measure, key in ((slowed(staging), "slowed"), (lock(staging), "lock")):
                figures.add(measure, turn, sum(each[key] for each in measured) / len(measured))
