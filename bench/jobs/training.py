"""The main thread of a training job: short steps of Python and NumPy, as if it fed an accelerator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np


class TrainingLoop:
    """Steps of about half a millisecond, half of them without the interpreter's lock."""

    def __init__(self) -> None:
        self._values = np.linspace(-1, 1, 1 << 16, dtype=np.float32)
        self._scratch = np.empty_like(self._values)

    def rate_during(self, wait: Callable[[], Any]) -> float:
        """Return the steps per second until `wait`, called in a thread, has returned; raise what it raises."""
        errors: list[BaseException] = []

        def waiting() -> None:
            try:
                wait()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=waiting)
        thread.start()
        steps, start = 0, time.perf_counter()
        while thread.is_alive():
            self._step()
            steps += 1
        rate = steps / (time.perf_counter() - start)
        thread.join()
        if errors:
            raise errors[0]
        return rate

    def rate_alone(self, seconds: float) -> float:
        """Return the steps per second while nothing else is done."""
        steps, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds:
            self._step()
            steps += 1
        return steps / passed

    def _step(self) -> None:
        for _ in range(8):
            np.multiply(self._values, self._values, out=self._scratch)
            np.add(self._scratch, self._values, out=self._scratch)
        total = 0
        for i in range(4000):
            total += i & 7
