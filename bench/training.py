"""The main thread of a training job: short steps of Python and NumPy, as if it fed an accelerator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bench import machine


class Rate(NamedTuple):
    """Steps per second, and the share of the time in which the thread waited for the interpreter's lock.

    Everything on the machine changes `steps`: its other programs, and the memory and the cores that a save shares
    with training. Only Python code in other threads of the process changes `lock`.
    """

    steps: float
    lock: float


class TrainingLoop:
    """Steps of about a fifth of a millisecond, which hold the interpreter's lock for half of their time."""

    def __init__(self) -> None:
        self._values = np.linspace(-1, 1, 1 << 16, dtype=np.float32)
        self._scratch = np.empty_like(self._values)

    def rate_during(self, wait: Callable[[], Any]) -> Rate:
        """Return the rate until `wait`, which is called in a thread, has returned; raise any error of `wait`."""
        errors: list[BaseException] = []

        def waiting() -> None:
            try:
                wait()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=waiting)
        thread.start()
        rate = self._rate_while(lambda _: thread.is_alive())
        thread.join()
        if errors:
            raise errors[0]
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
