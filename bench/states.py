"""Saves and restores of whole states: what a process does for its contender, and the rounds of all of them.

Each contender runs as a job of new processes in a round. Not timed are: starting processes, making the state,
emptying the folder, syncing the disk, filling or evicting the page cache, and providing free memory (see
`machine.Reserve`). The seconds of a job are those of its slowest process; the peaks of its processes are summed.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from bench import machine
from bench.contender import Contender, Piece
from bench.cost import Cost, Meter
from bench.figures import Figures
from bench.processes import Hosts
from bench.rounds import Rounds
from bench.workloads import Weights

CLEAR, WARM, EVICT = machine.clear, machine.warm, machine.evict

_ALONE = 0.4  # seconds of training before and after a save


class Rate(NamedTuple):
    """Steps per second, and the share of the time in which the thread waited for the interpreter's lock.

    Everything on the machine changes `steps`: its other programs, and the memory and the cores that a save shares
    with training. Only Python code in other threads of the process changes `lock`.
    """

    steps: float
    lock: float


class TrainingLoop:
    """The main thread of a job: steps of a fifth of a millisecond, which hold the lock for half of their time."""

    def __init__(self) -> None:
        self._values = np.linspace(-1, 1, 1 << 16, dtype=np.float32)
        self._scratch = np.empty_like(self._values)

    def rate_during(self, wait: Callable[[], Any]) -> Rate:
        """Return the rate until `wait`, which is called in a thread, has returned; raise any error of `wait`."""
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(wait)
            rate = self._rate_while(lambda _: not waiting.done())
            waiting.result()
        return rate

    def rate_alone(self, seconds: float) -> Rate:
        """Return the rate while nothing else is done."""
        return self._rate_while(lambda elapsed: elapsed < seconds)

    def _rate_while(self, condition: Callable[[float], bool]) -> Rate:
        steps, elapsed, start, before = 0, 0.0, time.perf_counter(), _clocks()
        while not steps or condition(elapsed):
            self._step()
            steps += 1
            elapsed = time.perf_counter() - start
        waited, own, cores, stolen = (now - then for now, then in zip(_clocks(), before, strict=True))
        # the clock of a thread does not run while the hypervisor keeps its core
        own += stolen * own / cores if cores else 0.0
        return Rate(steps / elapsed, 1 - (waited + own) / elapsed)

    def _step(self) -> None:
        for _ in range(8):
            np.multiply(self._values, self._values, out=self._scratch)
            np.add(self._scratch, self._values, out=self._scratch)
        total = 0
        for i in range(4000):
            total += i & 7


def _clocks() -> tuple[float, float, float, float]:
    """Return the times of this thread without a core and on one, and of all cores: running and stolen."""
    return machine.waited_for_core(), time.thread_time(), *machine.core_times()


class StateProcess:
    """A process of the job of a contender; its costs leave out what the state and the result take in memory."""

    def __init__(self, number: int, count: int, make: type[Contender], *arguments: Any) -> None:
        self._contender = make(number, count, *arguments)
        self._training = TrainingLoop()

    def rehearse(self) -> None:
        """Save and restore a small state, since the first use of a library in a process costs more."""
        folder, work = self._contender.folder, self._contender.work
        self._contender.enter(folder, work.small())
        self._contender.save(0, self._contender.durabilities[-1])
        if self._contender.restores:
            self._contender.restore(0, "same")
        self._contender.enter(folder, work)

    def make_state(self) -> None:
        """Make the state, which is no cost of what follows."""
        list(self._contender.values())
        gc.collect()
        self._resident = machine.reset_peak()

    def copy_state(self) -> Cost:
        """Copy the state to fresh memory."""
        arrays = list(self._contender.values())

        def copy() -> list[Any]:
            copies = [np.empty_like(array) for array in arrays]
            for array, new in zip(arrays, copies, strict=True):
                np.copyto(new, array)
            return copies

        return self._measured(copy)[0]

    def save(self, step: int, durable: bool) -> Cost:
        return self._measured(lambda: self._contender.save(step, durable))[0]

    def restore(self, step: int, what: str, checked: bool) -> Cost:
        """Restore, and compare all values with the saved ones if `checked`."""
        cost, restored = self._measured(lambda: self._contender.restore(step, what))
        pieces = list(self._contender.pieces(restored))
        if checked:
            check(self._contender.work, pieces, self._contender.exact)
        return cost._replace(memory=max(0.0, cost.memory - sum(values.nbytes for _, _, values in pieces)))

    def save_while_training(self, step: int, staging: str) -> tuple[Cost, float, float]:
        """Save in the background; return the cost of its start, and two shares.

        The first is how many fewer steps per second training makes during the save; the second that of the time in
        which it waits for the interpreter's lock.
        """
        before = self._training.rate_alone(_ALONE)
        meter = self._start()
        wait = self._contender.begin_save(step, staging)
        cost = meter.cost()
        meanwhile = self._training.rate_during(wait)
        peak = float(machine.peak() - self._resident)
        after = self._training.rate_alone(_ALONE)
        slower = 1 - 2 * meanwhile.steps / (before.steps + after.steps)
        return cost._replace(memory=peak), slower, meanwhile.lock

    def change_tenth(self) -> None:
        self._contender.change_tenth()

    def from_disk(self) -> int:
        """Return the bytes that this process has read from the disk so far."""
        return machine.bytes_from_disk()

    def _start(self) -> Meter:
        """Wait until all processes of the job are ready, so that none counts the lateness of another."""
        gc.collect()
        machine.reset_peak()
        self._contender.wait_for_others()
        return Meter(self._resident)

    def _measured(self, call: Callable[[], Any]) -> tuple[Cost, Any]:
        meter = self._start()
        result = call()
        return meter.cost(), result


def check(work: Weights, pieces: list[Piece], exact: bool = True) -> None:
    """Raise `ValueError` unless the pieces have the values of the workload, or an SQNR of 20 dB if not exact."""
    by_name: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_name.setdefault(piece[0], []).append(piece)
    for name, array in work.items():
        for _, index, values in by_name.pop(name):
            error = array[index] - values
            if np.any(error) if exact else float(np.square(error).mean()) > 0.01 * float(np.square(array).mean()):
                raise ValueError(f"the restored values of {name} differ")
    if by_name:
        raise ValueError(f"unexpected names were restored, such as {next(iter(by_name))}")


class StateRounds(Rounds):
    """Rounds of contenders that save and restore states."""

    large_only: Sequence[str] = ()
    """The contenders that save nothing but the large state."""

    def run(self, work: Weights, rounds: int) -> dict[str, Figures]:
        """Return the figures of all contenders on a workload."""
        names = [name for name in self.contenders if work.name == "large" or name not in self.large_only]
        for turn in range(rounds):
            self.log(f"{work.name}: round {turn + 1} of {rounds}")
            for name in self.names(names, turn, work.name):
                with self.attempt(work.name, name), self.job(name, work) as hosts:
                    self.measure(hosts, name, work, turn)
        return self.results[work.name]

    def measure(self, hosts: Hosts, name: str, work: Weights, turn: int) -> None:
        """Add the figures of a round of a contender, whose job has started."""
        raise NotImplementedError

    @contextlib.contextmanager
    def job(self, name: str, work: Weights) -> Iterator[Hosts]:
        """Start the processes of a job in an empty folder."""
        machine.clear(self.folder)
        contender = self.contenders[name]
        meeting = f"{self.folder.parent}/{self.folder.name}-{name}-{time.monotonic_ns()}"
        with Hosts(contender.processes, StateProcess, contender, self.folder, work, True, meeting) as hosts:
            yield hosts

    def timed(self, hosts: Hosts, spare: int, do: str, *arguments: Any) -> list[Any]:
        """Call a method of all processes, with some free memory; return what they return."""
        self.make_room(spare)
        return hosts.call(do, *arguments)


def slowest(costs: list[Cost]) -> Cost:
    """Return the cost of a job."""
    return costs[0]._replace(seconds=max(c.seconds for c in costs), memory=sum(c.memory for c in costs))
