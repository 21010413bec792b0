"""Saves in the background at the end of a process: finished, reported, or left to the parent."""

from __future__ import annotations

import signal
import textwrap
from pathlib import Path

import numpy as np
import pytest

import tstore.sync as blocking
from tests.support import processes

BEGIN = """
    import asyncio, os, signal, sys, threading, time, warnings
    from concurrent.futures import ThreadPoolExecutor
    import numpy as np
    import tstore as awaited, tstore.sync as tstore
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's advice about fork and threads
    url = sys.argv[1]
    tree = {"w": np.arange(2_000_000.0), "small": np.arange(5)}
    def save(step):
        return tstore.save_async(url, tree, step)
"""

# each ends with the status after it and leaves these steps
ENDINGS: dict[str, tuple[str, int, list[int]]] = {
    "every kind of thread": (
        """
        save(1)
        ThreadPoolExecutor(1).submit(save, 2)
        threading.Thread(target=save, args=(3,), daemon=True).start()
        def late():
            threading.main_thread().join()
            save(4)
        threading.Thread(target=late).start()
        asyncio.run(awaited.save_async(url, tree, 5))
        sys.exit(0)
        """,
        0,
        [1, 2, 3, 4, 5],
    ),
    "an uncaught exception": ("save(1)\nraise KeyError('mine')", 1, [1]),
    "a child of multiprocessing": (
        """
        import multiprocessing
        process = multiprocessing.get_context("fork").Process(target=save, args=(1,))
        process.start()
        process.join()
        sys.exit(process.exitcode)
        """,
        0,
        [1],
    ),
    "a forked child": (
        """
        other = tstore.save_async(url, {"w": np.zeros(3)}, 1, host=0, hosts=2, attempt="a")
        if os.fork() == 0:
            try:
                other.done()
            except awaited.errors.Misuse:
                sys.exit(7)  # at once: the save is its parent's
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
        tstore.save(url, {"w": np.zeros(3)}, 1, host=1, hosts=2, attempt="a")
        """,
        0,
        [1],
    ),
}


def run(url: Path, code: str, status: int) -> str:
    """Run a program to its end, and return what it wrote to stderr."""
    process = processes.start(textwrap.dedent(BEGIN) + textwrap.dedent(code), url)
    with processes.running(process):
        _, told = process.communicate(timeout=processes.DEADLINE)
    assert process.returncode == status, told
    return told


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_finishes_its_saves_before_it_ends(tmp_path: Path, ending: str) -> None:
    code, status, steps = ENDINGS[ending]
    run(tmp_path / "s", code, status)
    assert blocking.steps(tmp_path / "s") == steps
    assert blocking.open(tmp_path / "s").verify().ok


def test_a_failed_save_that_nobody_asked_about_fails_the_process(tmp_path: Path) -> None:
    blocking.save(tmp_path / "s", {}, 1)
    told = run(tmp_path / "s", "save(1)", 1)
    assert "tstore: the save of step 1 to" in told
    assert "step 1 is already saved, as version 1" in told
    assert run(tmp_path / "s", "try: save(1).wait()\nexcept awaited.errors.AlreadyExists: pass", 0) == ""


PREEMPTED = """
    from tstore.errors import DeadlineExceeded
    policy = tstore.EverySteps(10**6) | tstore.OnPreemption()
    with tstore.Checkpointer(url, every=policy) as checkpoints:
        print("ready", flush=True)
        for step in range(1, 10**9):
            if checkpoints.should_save(step):
                checkpoints.save(step, tree)
            if checkpoints.preempted:
                break
        assert not checkpoints.should_save(step + 1)  # the signal has its save
        ready, begun = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(begun, b"x")
            while True:
                time.sleep(0.01)  # its parent can end it: the handler takes no notice of signals to a child
        os.read(ready, 1)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGTERM
    group = dict(host=0, hosts=2, attempt="a")
    late = tstore.Checkpointer(url, every=tstore.OnPreemption(), agree=bool, **group)
    late.save(step + 1, tree)  # the other host never comes
    try:
        late.close(0.05)
    except DeadlineExceeded as error:
        print(error, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)  # of which the closed one takes no notice
"""


def test_a_preempted_job_saves_once_and_abandons_what_takes_too_long(tmp_path: Path) -> None:
    url = tmp_path / "s"
    blocking.save(url, {"w": np.zeros(3)}, 0)
    process = processes.start(textwrap.dedent(BEGIN) + textwrap.dedent(PREEMPTED), url)
    with processes.running(process):
        assert processes.line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        out, told = process.communicate(timeout=processes.DEADLINE)
    assert process.returncode == -signal.SIGTERM, told
    assert "so it was abandoned" in out
    steps = blocking.steps(url)
    assert len(steps) == 2
    assert blocking.restore(url, steps[1])["w"][-1] == 1_999_999
    assert blocking.save(url, {"w": np.ones(3)}, steps[1] + 1) == 3
    assert blocking.open(url).verify().ok
