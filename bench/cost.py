"""What a piece of work costs its process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench import machine


class Cost(NamedTuple):
    """What one piece of work cost its process.

    `seconds` is the time that passed, and `cpu` the CPU seconds of all threads, user and system. `memory` is the
    peak of resident bytes beyond those at the start. `read` and `written` are the bytes that system calls moved,
    also from and to the page cache.
    """

    seconds: float
    cpu: float
    memory: float
    read: float
    written: float

    def per(self, count: int) -> Cost:
        """Return the cost of one of `count` equal pieces; the peak memory is the same."""
        each = [value / count for value in self]
        return Cost(*each)._replace(memory=self.memory)


class Meter:
    """Measures the cost of what this process does from now on, with the memory beyond `resident` bytes."""

    def __init__(self, resident: int | None = None) -> None:
        gc.collect()
        now = machine.reset_peak()
        self._resident = now if resident is None else resident
        self._read, self._written = machine.bytes_moved()
        self._cpu, self._start = time.process_time(), time.perf_counter()

    def cost(self) -> Cost:
        """Return the cost so far."""
        seconds, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        read, written = machine.bytes_moved()
        memory = max(0, machine.peak() - self._resident)
        return Cost(seconds, cpu, memory, read - self._read, written - self._written)


def measured(work: Callable[[], Any]) -> Cost:
    """Return the cost of a call."""
    meter = Meter()
    work()
    return meter.cost()


def mean(costs: Sequence[Cost]) -> Cost:
    """Return the mean of some costs."""
    return Cost(*[sum(values) / len(costs) for values in zip(*costs, strict=True)])
