"""Whether a call in one thread lets the other threads run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def assert_releases_interpreter(call: Callable[[], object]) -> None:
    """Fail unless this thread runs while another one makes the call, which takes 20 ms or more."""
    done = threading.Event()

    def work() -> None:
        call()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    wakeups = 0
    while not done.is_set():
        time.sleep(0.001)
        wakeups += 1
    thread.join()
    assert wakeups > 4  # one or two if the call held the interpreter's lock
