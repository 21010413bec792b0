"""Turns of views: few at once, shared by clients, and given on if a request leaves while it waits."""

from __future__ import annotations

import asyncio

import pytest

from tstore.service.page.results import Results
from tstore.service.page.turns import Turns


async def test_one_client_leaves_a_turn_for_others() -> None:
    turns, end = Turns(3), asyncio.Event()
    entered: list[str] = []

    async def work(client: str) -> None:
        async with turns.turn(client, 30):
            entered.append(client)
            await end.wait()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(work("greedy"))
        await asyncio.sleep(0)
        tasks.create_task(work("modest"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert entered == ["greedy", "greedy", "modest"]
        end.set()
    assert sorted(entered) == ["greedy"] * 4 + ["modest"]


async def test_a_request_that_is_cancelled_while_a_turn_becomes_free_takes_none() -> None:
    turns = Turns(2)

    async def work() -> None:
        async with turns.turn("b", 30):
            raise AssertionError("it was cancelled")

    async with turns.turn("a", 30):
        async with turns.turn("b", 30):
            waiting = asyncio.create_task(work())
            await asyncio.sleep(0)
            waiting.cancel()  # the turn ends before the task can see this
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with turns.turn("c", 0.0), turns.turn("d", 0.0):
        pass


async def test_a_result_is_cancelled_when_the_last_request_for_it_leaves() -> None:
    results, cancelled = Results(), asyncio.Event()

    async def long_work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    first, second = (asyncio.create_task(results.get("kind", "key", long_work, 3)) for _ in range(2))
    for _ in range(3):
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    await asyncio.sleep(0)
    assert not cancelled.is_set()
    second.cancel()
    await asyncio.wait([second])
    await asyncio.wait_for(cancelled.wait(), 30)
