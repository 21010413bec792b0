"""Blocking calls are made in the event loop's thread only where they are quick."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import pytest

from tstore.core.runtime import pool
from tstore.core.runtime.concurrency import QuickCalls


class Clock:
    """A clock that only `take` advances; `take` is a call that takes the time passed to it, most of it waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0.0

    def take(self, seconds: float) -> bool:
        """Return whether the call was made in the main thread, the one of the event loop."""
        self.waits += 1
        return self.work(seconds)

    def work(self, seconds: float) -> bool:
        """Do what `take` does without waiting for anything."""
        self.now += seconds
        return threading.current_thread() is threading.main_thread()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    time = SimpleNamespace(perf_counter=lambda: clock.now)
    monkeypatch.setattr("tstore.core.runtime.concurrency.time", time)
    monkeypatch.setattr("tstore.core.runtime.concurrency._waits", lambda: clock.waits)
    return clock


async def test_quick_calls_leave_the_threads_and_slow_ones_return_to_them(clock: Clock) -> None:
    calls = QuickCalls()
    where = [await calls.run(clock.take, 50e-6) for _ in range(50)]
    assert not where[0]  # nothing is known yet
    assert where == sorted(where)
    assert where[20]
    where = [await calls.run(clock.take, 5.0) for _ in range(10)]  # the storage stalls
    assert sum(where) <= 3
    assert not where[-1]
    assert not any([await calls.run(clock.take, 1e-3) for _ in range(100)])


async def test_single_long_calls_change_nothing(clock: Clock) -> None:
    """The process may have been descheduled meanwhile."""
    calls = QuickCalls()
    for _ in range(50):
        await calls.run(clock.take, 20e-6)
    assert all([await calls.run(clock.take, 20e-6 if i % 20 else 1.0) for i in range(200)])


async def test_calls_stay_where_they_are_if_other_processes_have_the_processor(clock: Clock) -> None:
    calls = QuickCalls()
    for _ in range(50):
        await calls.run(clock.work, 20e-6)
    assert all([await calls.run(clock.work, 20e-3) for _ in range(200)])
    assert not all([await calls.run(clock.take, 20e-3 if i % 2 else 20e-6) for i in range(40)])
    clock.waits = math.nan  # it is not known whether the thread waited
    calls = QuickCalls()
    for _ in range(50):
        await calls.run(clock.work, 20e-6)
    assert not all([await calls.run(clock.work, 20e-3) for _ in range(200)])


async def test_calls_that_are_never_quick_stay_in_threads(clock: Clock) -> None:
    calls = QuickCalls()
    assert not any([await calls.run(clock.take, 500e-6) for _ in range(100)])


async def test_calls_that_are_quick_at_times_rarely_stop_the_loop(clock: Clock) -> None:
    calls = QuickCalls()
    where = [await calls.run(clock.take, 5e-3 if i % 8 else 50e-6) for i in range(5000)]
    assert sum(where) < 60


async def test_waits_for_the_lock_of_the_interpreter_do_not_count(clock: Clock) -> None:
    """Other threads run meanwhile, and most calls seem to take longer than they do."""
    calls = QuickCalls()
    for i in range(8):
        await calls.run(clock.take, 10e-3 if i != 3 else 50e-6)
    assert await calls.run(clock.take, 50e-6)


async def test_failures_count_like_other_calls(clock: Clock) -> None:
    calls = QuickCalls()

    def fail() -> None:
        clock.take(20e-6)
        raise FileNotFoundError

    for _ in range(50):
        with pytest.raises(FileNotFoundError):
            await calls.run(fail)
    assert await calls.run(clock.take, 20e-6)


async def test_tasks_without_threads_wait_before_each_call(clock: Clock) -> None:
    calls, waits = QuickCalls(), []

    async def before_call() -> None:
        waits.append(1)

    with pool.without_threads(before_call):
        for _ in range(50):
            await calls.run(clock.take, 20e-6)
    assert len(waits) == 50
