"""Calls of many items in the calling thread and others: each item once, errors, and Ctrl-C at every moment."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from tests.support import processes
from tests.support.interrupts import AT_EVERY_MOMENT
from tstore.core.runtime.concurrency import each_with_caller
from tstore.core.runtime.pool import WORKERS


@pytest.mark.parametrize("workers", [0, 1, 2, 100])
def test_every_item_is_taken_once(workers: int) -> None:
    taken: list[int] = []
    each_with_caller(taken.append, range(1000), workers)
    assert Counter(taken) == Counter(range(1000))


def test_the_caller_and_another_thread_work_at_once() -> None:
    both = threading.Barrier(2, timeout=20)  # which breaks unless two threads wait
    each_with_caller(lambda _: both.wait(), range(2), 2)


def test_threads_that_are_busy_are_not_waited_for() -> None:
    begun, end = threading.Semaphore(0), threading.Event()

    def wait(_: int) -> None:
        begun.release()
        end.wait(20)

    busy = threading.Thread(target=each_with_caller, args=(wait, range(WORKERS), WORKERS))
    busy.start()
    try:
        assert all(begun.acquire(timeout=20) for _ in range(WORKERS))
        threads: list[int] = []
        each_with_caller(lambda _: threads.append(threading.get_ident()), range(5), WORKERS)
        assert threads == [threading.get_ident()] * 5
    finally:
        end.set()
        busy.join()


@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt])
@pytest.mark.parametrize("fails_in_caller", [True, False])
def test_a_failure_of_any_thread_is_raised_once_all_have_ended(fails_in_caller: bool, error: type) -> None:
    both, later, ended = threading.Barrier(2, timeout=20), threading.Event(), []

    def call(item: int) -> None:
        both.wait()
        if (threading.current_thread() is threading.main_thread()) == fails_in_caller:
            threading.Timer(0.05, later.set).start()
            raise error("item")
        later.wait(20)
        ended.append(item)

    with pytest.raises(error, match="item"):
        each_with_caller(call, range(100), 2)
    assert len(ended) == 1


INTERRUPTED_ANYWHERE = (
    AT_EVERY_MOMENT
    + """
    import queue, threading
    from tstore.core.runtime.concurrency import each_with_caller

    def helped():
        helped, caller = queue.SimpleQueue(), threading.get_ident()

        def call(item):
            if threading.get_ident() == caller:
                helped.get(timeout=20)
            else:
                helped.put(None)
                helped.put(None)

        each_with_caller(call, range(3), 2)

    print(interrupted_at_every_moment(helped) > 5)
"""
)


def test_ctrl_c_at_any_moment_leaves_threads_to_help_the_next_call() -> None:
    assert processes.python(INTERRUPTED_ANYWHERE).split() == ["True"]
