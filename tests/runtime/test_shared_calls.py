"""Calls that many tasks make in one turn of an event loop."""

from __future__ import annotations

import asyncio

import pytest

from tstore.core.runtime.concurrency import SharedCalls


class Counter:
    """A call that returns how often it began, and fails while `broken`."""

    def __init__(self) -> None:
        self.begun = 0
        self.broken = False

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        await asyncio.sleep(0)
        if self.broken:
            raise OSError(f"call {number}")
        return number


async def test_tasks_that_call_together_share_a_call_and_one_that_is_alone_makes_its_own() -> None:
    counter = Counter()
    calls = SharedCalls(counter)
    assert await asyncio.gather(*[calls() for _ in range(8)]) == [1] * 8
    assert [await calls() for _ in range(3)] == [2, 3, 4]
    assert await asyncio.gather(*[calls() for _ in range(3)]) == [5] * 3


async def test_a_shared_call_begins_after_what_preceded_each_of_its_callers() -> None:
    value = 0

    async def read() -> int:
        return value + 1

    calls = SharedCalls(read)

    async def write_and_read(written: int) -> tuple[int, int]:
        nonlocal value
        value = written
        return written, await calls()

    for written, seen in await asyncio.gather(*[write_and_read(i) for i in range(6)]):
        assert seen >= written + 1


async def test_the_failure_of_a_shared_call_is_an_error_of_its_own_for_each_task() -> None:
    counter = Counter()
    counter.broken = True
    calls = SharedCalls(counter)
    errors = await asyncio.gather(*[calls() for _ in range(4)], return_exceptions=True)
    assert all(isinstance(error, OSError) for error in errors)
    assert len(set(map(str, errors))) == 4


async def test_a_cancelled_task_leaves_the_shared_call_to_the_others() -> None:
    counter = Counter()
    calls = SharedCalls(counter)
    tasks = [asyncio.create_task(calls()) for _ in range(4)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[2], asyncio.CancelledError)
    assert [results[0], results[1], results[3]] == [1, 1, 1]


@pytest.mark.parametrize("count", [1, 5])
def test_each_event_loop_has_its_own_turns(count: int) -> None:
    calls = SharedCalls(Counter())

    async def together() -> list[int]:
        return await asyncio.gather(*[calls() for _ in range(count)])

    assert len(asyncio.run(together())) == len(asyncio.run(together())) == count
