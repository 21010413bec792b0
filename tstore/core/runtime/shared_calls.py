"""Calls that many tasks of an event loop make at the same time, such as those that one event has woken.

1. A task that makes one call after the other makes each at once, so a task that is alone is not delayed.
2. If the last call was made by another task, the call is shared: it begins in the next turn of the loop, after all
   tasks that are ready have asked for it too. So each of them sees what preceded its own call.
3. If the shared call fails, each task makes the call again alone, and gets its own error.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from tstore.core.runtime.event_loops import PerLoop

__all__ = ["SharedCalls"]

T = TypeVar("T")


class _Turn(Generic[T]):
    """The tasks that wait for the next shared call of a loop."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[T | None]] = []
        self.task: asyncio.Task[None] | None = None  # kept, because a loop only has weak references to tasks


class SharedCalls(Generic[T]):
    """Makes a call whose result is never None for many tasks."""

    def __init__(self, call: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._call = call
        self._caller = 0  # the identity of the task that called last
        self._turns: PerLoop[_Turn[T]] = PerLoop(_Turn)

    async def __call__(self) -> T:
        """Return the result of a call that begins after this one was made; raise what the call raises."""
        caller = id(asyncio.current_task())
        if caller == self._caller:
            return await self._call()
        self._caller = caller
        turn, loop = self._turns.get(), asyncio.get_running_loop()
        if not turn.waiting:
            turn.task = loop.create_task(self._answer(turn))
        answer: asyncio.Future[T | None] = loop.create_future()  # its cancellation does not affect the others
        turn.waiting.append(answer)
        result = await answer
        return await self._call() if result is None else result

    async def _answer(self, turn: _Turn[T]) -> None:
        waiting, turn.waiting = turn.waiting, []
        result: T | None = None  # each of the tasks then makes the call again
        try:
            with contextlib.suppress(Exception):
                result = await self._call()
        finally:
            for answer in waiting:
                if not answer.done():
                    answer.set_result(result)
