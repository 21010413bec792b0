"""Pauses of work in the background while the main thread is busy."""

from __future__ import annotations

import pytest

from tstore.core.runtime import pacing, pool
from tstore.core.runtime.pacing import Pace


class Clocks:
    """The time, which passes when it is told to, and the main thread's, which runs for a share of it."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.now = 0.0

    def __call__(self) -> tuple[float, float]:
        return self.now, self.now * self.share


def paused(pace: Pace, clocks: Clocks) -> float:
    """Return for how long a thread pauses."""
    begin = clocks.now
    while seconds := pace.next_sleep():
        clocks.now += seconds
    return clocks.now - begin


@pytest.mark.parametrize(("share", "least", "most"), [(0.9, 0.15, 0.4), (0.0, 0.0, 0.005)])
def test_a_thread_pauses_only_while_the_main_thread_is_busy(
    monkeypatch: pytest.MonkeyPatch, share: float, least: float, most: float
) -> None:
    clocks = Clocks(share)
    monkeypatch.setattr(pacing, "_clocks", clocks)
    pace = Pace()
    pace.add(0.006)
    assert least <= paused(pace, clocks) <= most
    assert paused(pace, clocks) == 0  # it has not worked since


def test_short_stretches_of_work_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "_clocks", Clocks(0.9))
    pace = Pace()
    for _ in range(6):
        pace.add(50e-6 - 1e-9)
        assert not pace.next_sleep()
    pace.add(50e-6)
    assert pace.next_sleep()


def test_a_pause_ends_once_the_main_thread_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(0.9)
    monkeypatch.setattr(pacing, "_clocks", clocks)
    pace = Pace()
    pace.add(0.006)
    clocks.now += pace.next_sleep()
    clocks.share = 0.0
    assert pace.next_sleep() == 0


async def test_only_work_of_low_priority_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeps = []

    def next_sleep(_: Pace) -> float:
        sleeps.append(1)
        return 0.0 if len(sleeps) > 1 else 1e-6

    monkeypatch.setattr(Pace, "next_sleep", next_sleep)
    await pool.give_way()
    assert not sleeps
    with pool.low_priority():
        await pool.give_way()
    assert len(sleeps) == 2
    await pool.each(lambda _: pool.give_way_in_worker(1.0), [1, 2])
    assert len(sleeps) == 2
    with pool.low_priority():
        await pool.each(lambda _: pool.give_way_in_worker(1.0), [1, 2])
    assert len(sleeps) == 4
