"""One pass over an object of a server that ignores `Range`: it serves every read that still lies ahead of it.

Reads of one object come in the order of their offsets, many at a time. So an object is transferred about once, not
once for each of its parts, and nothing of it is kept but what was asked for. A read that lies behind the pass
waits for the next one; a pass that nobody wants any more ends, wherever it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from tstore.storage.base import Buffers
from tstore.storage.http.responses import Sink, short

__all__ = ["Passes"]

Blocks = Callable[[str], AsyncGenerator[bytes, None]]
"""The bytes of an object, from its start, as they come."""


class _Wanted(NamedTuple):
    offset: int
    end: int
    sink: Sink
    filled: asyncio.Future[None]


class Passes:
    """The passes under way, at most one for each object."""

    def __init__(self) -> None:
        self._passes: dict[str, _Pass] = {}

    async def read(self, blocks: Blocks, key: str, offset: int, buffers: Buffers, size: int, where: str) -> None:
        """Fills the buffers from `offset`; `Corrupt` where the object ends before."""
        loop = asyncio.get_running_loop()
        while True:
            found = self._passes.get(key)
            if found is None or found.over or found.loop is not loop:  # that of the parent, before a fork
                found = self._passes[key] = _Pass(loop)
                found.task = loop.create_task(found.go(blocks(key)))
                found.task.add_done_callback(functools.partial(self._ended, key, found, where))
            if found.at <= offset:
                break
            await asyncio.wait([found.task])
        wanted = _Wanted(offset, offset + size, Sink(buffers), loop.create_future())
        wanted.filled.add_done_callback(lambda filled: filled.cancelled() or filled.exception())  # looked at
        found.wanted.append(wanted)
        try:
            await wanted.filled
        finally:  # where cancelled, nothing is written into the buffers from here on
            if wanted in found.wanted:
                found.wanted.remove(wanted)

    async def close(self) -> None:
        """Ends all passes; whoever waits for one is cancelled."""
        loop = asyncio.get_running_loop()
        tasks = [p.task for p in self._passes.values() if p.loop is loop]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _ended(self, key: str, found: _Pass, where: str, _: asyncio.Task[None]) -> None:
        if self._passes.get(key) is found:
            del self._passes[key]
        cancelled = found.task.cancelled()
        error = None if cancelled else found.task.exception()
        for wanted in found.wanted:
            if cancelled:
                wanted.filled.cancel()
            elif not wanted.filled.done():
                wanted.filled.set_exception(error or short(where, wanted.offset, wanted.end, found.at))


class _Pass:
    task: asyncio.Task[None]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.at = 0
        self.over = False
        self.wanted: list[_Wanted] = []

    async def go(self, blocks: AsyncGenerator[bytes, None]) -> None:
        """Passes over the object as long as something of it is wanted."""
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
                    self.over = True  # from here on nobody joins it
                    return
