"""Shared results: each is computed once, cached for a while, and cancelled if no request waits for it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

__all__ = ["Results"]

T = TypeVar("T")


class _Result:
    """A computation, and how many requests wait for it."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.waiting = 0


class Results:
    """The most recently used results of each kind, by key."""

    def __init__(self) -> None:
        self._kinds: dict[str, OrderedDict[Hashable, _Result]] = {}

    def newest(self, kind: str) -> Any:
        """Return the result of this kind that was requested last, None if there is none or it is not ready."""
        results = self._kinds.get(kind)
        task = next(reversed(results.values())).task if results else None
        return task.result() if task and task.done() and not task.cancelled() and not task.exception() else None

    async def get(self, kind: str, key: Hashable, make: Callable[[], Coroutine[Any, Any, T]], most: int) -> T:
        """Return the result for a key, or make it; keep at most `most` results of this kind.

        Requests for one key wait for the same computation. It is cancelled when all of them are, and made again
        after a failure.
        """
        results = self._kinds.setdefault(kind, OrderedDict())
        result = results.get(key)
        if result is None:
            result = results[key] = _Result(asyncio.create_task(make()))
        results.move_to_end(key)
        while len(results) > most:
            results.popitem(last=False)
        result.waiting += 1
        try:
            value: T = await asyncio.shield(result.task)
        except BaseException:
            if results.get(key) is result and (result.task.done() or result.waiting == 1):
                del results[key]
            if result.waiting == 1:
                result.task.cancel()
            raise
        finally:
            result.waiting -= 1
        return value
