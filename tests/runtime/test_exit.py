"""Calls pending at the end of the process: they complete first, or the process reports that they did not."""

from __future__ import annotations

import contextlib
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import tstore.sync as blocking
from tests.support import http_server, processes

BEGIN = """
    import atexit, contextlib, os, signal, sys, threading, time
    from concurrent.futures import ThreadPoolExecutor
    import numpy as np
    import tstore.sync as tstore
    from tstore import errors
    url = sys.argv[1]
    tree = {"w": np.arange(1_000_000.0), "small": np.arange(5)}
"""

ENDINGS = {
    "an executor's thread": "ThreadPoolExecutor(1).submit(tstore.save, url, tree, 1)",
    "a thread": "threading.Thread(target=tstore.save, args=(url, tree, 1)).start()",
    "a thread that begins late": """
        def late():
            threading.main_thread().join()
            tstore.save(url, tree, 1)
        threading.Thread(target=late).start()
    """,
    "a thread with a loop of its own": """
        import asyncio
        import tstore as awaited
        def late():
            threading.main_thread().join()
            asyncio.run(awaited.save(url, tree, 1))
        threading.Thread(target=late).start()
    """,
    "many threads": """
        threads = ThreadPoolExecutor(8)
        for step in range(1, 9):
            threads.submit(tstore.save, url, tree, step)
    """,
    "sys.exit": """
        ThreadPoolExecutor(1).submit(tstore.save, url, tree, 1)
        sys.exit(0)
    """,
    "a function of atexit": "atexit.register(tstore.save, url, tree, 1)",
    "a function of atexit that others come before": """
        from tstore.core.runtime.event_loops import BACKGROUND
        atexit.unregister(BACKGROUND._finish)
        atexit.register(tstore.save, url, tree, 1)
        atexit.register(BACKGROUND._finish)
    """,
    "a child of multiprocessing": """
        import multiprocessing, warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's advice about fork and threads
        def child():
            ThreadPoolExecutor(1).submit(tstore.save, url, tree, 1)
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join()
        sys.exit(process.exitcode)
    """,
    "a forked child": """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        if os.fork() == 0:
            ThreadPoolExecutor(1).submit(tstore.save, url, tree, 1)
            sys.exit(0)
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
    """,
}

WARM = """
    tstore.restore(url, 0)  # loop and threads are there
"""


REMOTE = [
    "an executor's thread",
    "a thread that begins late",
    "a function of atexit",
    "a child of multiprocessing",
]


@contextlib.contextmanager
def stored(folder: Path, place: str) -> Iterator[object]:
    """Yield the URL of a store with a first step."""
    blocking.save(folder, {"w": np.zeros(2)}, 0)
    with contextlib.ExitStack() as stack:
        yield (
            folder
            if place == "local"
            else stack.enter_context(http_server.serving(folder, "--anonymous", "write")).url
        )


def program(*parts: str) -> str:
    """Join indented parts into one program."""
    return "\n".join(map(textwrap.dedent, [BEGIN, *parts]))


@pytest.mark.parametrize(
    ("ending", "first"),
    [
        *((ending, "cold") for ending in ENDINGS),
        *(
            pytest.param(ending, "warm", marks=() if ending in (*REMOTE, "a forked child") else pytest.mark.deep)
            for ending in ENDINGS
        ),
    ],
)
def test_a_pending_save_completes_at_exit(tmp_path: Path, ending: str, first: str) -> None:
    with stored(tmp_path / "s", "local") as url:
        processes.python(program(WARM if first == "warm" else "", ENDINGS[ending]), url)
    assert np.array_equal(blocking.restore(tmp_path / "s", 1)["w"], np.arange(1e6))


@pytest.mark.parametrize("ending", REMOTE)
def test_a_pending_save_to_a_server_completes_at_exit(tmp_path: Path, ending: str) -> None:
    with stored(tmp_path / "s", "served") as url:
        processes.python(program(WARM, ENDINGS[ending]), url)
    assert np.array_equal(blocking.restore(tmp_path / "s", 1)["w"], np.arange(1e6))


DAEMON = """
    begun = threading.Event()

    class Tree(dict):
        def items(self):
            begun.set()
            return super().items()

    def saves():
        # an error that Python reports while the interpreter ends may find its stderr locked, which is fatal
        with contextlib.suppress(errors.Misuse):
            for step in range(1, 1_000_000):
                tstore.save(url, Tree(tree), step)

    threading.Thread(target=saves, daemon=True).start()
    begun.wait()
"""


def test_a_daemon_thread_completes_its_call_and_starts_no_other(tmp_path: Path) -> None:
    url = tmp_path / "s"
    process = processes.start(program(DAEMON), url)
    with processes.running(process):
        _, told = process.communicate(timeout=processes.DEADLINE)
    assert process.returncode == 0, told
    store = blocking.open(url)
    steps = blocking.steps(store)
    assert steps[0] == 1
    assert [c.tag for c in store.history()] == [f"step/{step}" for step in reversed(steps)]
    assert store.verify().ok
    assert len(list((url / "txn").iterdir())) == len(steps)  # nothing was left unfinished


WAITING = """
    def waits():
        tstore.save(url, tree, 1, host=0, hosts=2, attempt="a", timeout=1000)

    threading.Thread(target=waits, daemon=True).start()
    def interrupts():
        while not [name for _, _, names in os.walk(url) for name in names if name.startswith("part-")]:
            time.sleep(0.01)
        delivered.set()
        main = threading.main_thread().ident
        while True:
            frame = sys._current_frames()[main]
            if frame.f_code.co_name == "wait" and frame.f_back.f_code.co_name == "_finish":
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # which does not wake the main thread
                return
            time.sleep(0.01)

    delivered = threading.Event()
    threading.Thread(target=interrupts, daemon=True).start()
    delivered.wait()
"""


def test_ctrl_c_at_exit_cancels_pending_calls_and_ends_the_process(tmp_path: Path) -> None:
    url = tmp_path / "s"
    process = processes.start(program(WAITING), url)
    with processes.running(process):
        _, told = process.communicate(timeout=processes.DEADLINE)
    assert process.returncode == -signal.SIGINT, told
    assert "Ctrl-C cancels 1 call" in told
    assert blocking.steps(url) == []
    assert blocking.save(url, {"w": np.zeros(1)}, 1) == 1


NO_THREADS = """
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")  # Python 3.12 does from then on

    def late():
        threading.main_thread().join()
        threading.Thread.start = refuse
        with contextlib.suppress(Exception):  # as an executor's future does at which nobody looks
            tstore.save(url, tree, 1)

    threading.Thread(target=late).start()
"""


def test_a_first_save_at_exit_needs_no_new_thread(tmp_path: Path) -> None:
    with stored(tmp_path / "s", "local") as url:
        processes.python(program(NO_THREADS), url)
    assert np.array_equal(blocking.restore(tmp_path / "s", 1)["w"], np.arange(1e6))


def test_a_first_save_that_cannot_be_made_without_a_thread_makes_the_process_fail(tmp_path: Path) -> None:
    with stored(tmp_path / "s", "served") as url:
        process = processes.start(program(NO_THREADS), url)
        with processes.running(process):
            _, told = process.communicate(timeout=processes.DEADLINE)
    assert process.returncode == 1
    assert "tstore: a call failed after the main thread had ended: no thread can be started" in told
    assert blocking.steps(tmp_path / "s") == [0]


TORN_DOWN = """
    class Late:
        def __del__(self):
            tstore.save(url, tree, 1)

    late = Late()
    late.itself = late  # only the interpreter's end collects it
"""


@pytest.mark.parametrize("first", ["cold", "warm"])
def test_a_save_while_the_interpreter_is_torn_down_is_refused(tmp_path: Path, first: str) -> None:
    with stored(tmp_path / "s", "local") as url:
        process = processes.start(program(WARM if first == "warm" else "", TORN_DOWN), url)
        with processes.running(process):
            _, told = process.communicate(timeout=processes.DEADLINE)
    assert "Misuse: the process is exiting" in told
    assert blocking.steps(tmp_path / "s") == [0]
