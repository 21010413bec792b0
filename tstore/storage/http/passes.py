"""Reads from a server that ignores `Range`: one pass over an object serves all reads that are still ahead of it.

Reads of one object arrive in the order of their offsets, many at a time. So an object is transferred about once,
not once per part, and only the requested bytes are kept. A read that a pass has left behind waits for the next
one; a pass without readers ends at once."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from tstore.storage.http.body import Sink
from tstore.storage.http.responses import short
from tstore.storage.objects import Buffers

__all__ = ["Passes"]

Blocks = Callable[[str], AsyncGenerator[bytes, None]]
"""Yields the bytes of an object from its start as they arrive."""


class _Wanted(NamedTuple):
    offset: int
    end: int
    sink: Sink
    filled: asyncio.Future[None]


class Passes:
    """The passes in progress, at most one per object."""

    def __init__(self) -> None:
        self._passes: dict[str, _Pass] = {}

    async def read(self, blocks: Blocks, key: str, offset: int, buffers: Buffers, size: int, where: str) -> None:
        """Fill the buffers from `offset`; raise `Corrupt` if the object ends before."""
        loop = asyncio.get_running_loop()
        while True:
            running = self._passes.get(key)
            if (
                running is None or running.over or running.loop is not loop
            ):  # another loop's: this process was forked
                running = self._passes[key] = _Pass(loop)
                running.task = loop.create_task(running.go(blocks(key)))
                running.task.add_done_callback(functools.partial(self._ended, key, running, where))
            if running.at <= offset:
                break
            await asyncio.wait([running.task])
        wanted = _Wanted(offset, offset + size, Sink(buffers), loop.create_future())
        wanted.filled.add_done_callback(lambda filled: filled.cancelled() or filled.exception())  # retrieved
        running.wanted.append(wanted)
        try:
            await wanted.filled
        finally:  # also if cancelled: nothing is written into the buffers from here on
            if wanted in running.wanted:
                running.wanted.remove(wanted)

    async def close(self) -> None:
        """End all passes; their readers are cancelled."""
        loop = asyncio.get_running_loop()
        tasks = [p.task for p in self._passes.values() if p.loop is loop]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, key: str, over: _Pass, where: str, _: asyncio.Task[None]) -> None:
        if self._passes.get(key) is over:
            del self._passes[key]
        cancelled = over.task.cancelled()
        error = None if cancelled else over.task.exception()
        for wanted in over.wanted:
            if cancelled:
                wanted.filled.cancel()
            elif not wanted.filled.done():
                wanted.filled.set_exception(error or short(where, wanted.offset, wanted.end, over.at))


class _Pass:
    task: asyncio.Task[None]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.at = 0
        self.over = False
        self.wanted: list[_Wanted] = []

    async def go(self, blocks: AsyncGenerator[bytes, None]) -> None:
        """Pass over the object for as long as reads are ahead."""
        async with contextlib.aclosing(blocks):
            async for block in blocks:
                start, self.at = self.at, self.at + len(block)
                for wanted in [w for w in self.wanted if w.offset < self.at]:
                    wanted.sink.take(memoryview(block)[max(0, wanted.offset - start) :])
                    if wanted.sink.full:
                        self.wanted.remove(wanted)
                        if not wanted.filled.done():
                            wanted.filled.set_result(None)
                if not self.wanted:
                    self.over = True  # from here on no read may join it
                    return
