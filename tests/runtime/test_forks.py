"""What a forked child must not share with its parent: threads, claimed memory, and events of the system."""

from __future__ import annotations

from pathlib import Path

from tests.support import processes

CHILD = """
    import os, signal, sys, threading, warnings
    import numpy as np
    import tstore.sync as tstore
    warnings.simplefilter("ignore", DeprecationWarning)  # Python's own advice about fork and threads

    def in_child(call):
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # ends a child that waits
            os._exit(0 if call() else 1)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


def test_a_long_read_in_a_child_is_helped_by_threads_of_its_own(tmp_path: Path) -> None:
    code = """
    values = np.arange((16 << 20) // 4, dtype="f4")
    with tstore.open(sys.argv[1]) as store, store.transaction(durability="none") as tx:
        tx.create_array("a", values.shape, "f4", (1 << 18,)).write(values)
    array = tstore.open(sys.argv[1]).snapshot().array("a")

    def read():
        ok = np.array_equal(array.read(), values)
        return ok and any(thread.name == "tstore-read" for thread in threading.enumerate())

    print(read(), in_child(read))
    """
    assert processes.python(CHILD + code, tmp_path / "s").split() == ["True", "0"]


def test_memory_that_the_parent_has_claimed_is_free_in_a_child() -> None:
    code = """
    from tstore.core.runtime import budget
    budget.acquire(budget.BUDGET)

    def claim():
        budget.acquire(budget.BUDGET)
        return True

    print(in_child(claim))
    """
    assert processes.python(CHILD + code).split() == ["0"]


def test_a_child_takes_no_events_of_its_parent() -> None:
    """A descriptor of inotify that is kept for the next wait is closed in a child."""
    code = """
    from tstore.core.storage import watch
    fd, other = os.pipe()
    watch._free_descriptors.append(fd)

    def is_closed():
        try:
            os.fstat(fd)
        except OSError:
            return not watch._free_descriptors
        return False

    print(in_child(is_closed), watch._free_descriptors == [fd])
    """
    assert processes.python(CHILD + code).split() == ["0", "True"]
