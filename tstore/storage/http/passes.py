"""Reads from a server that ignores `Range`: one pass over an object serves all reads that are still ahead of it.

Callers request the reads of one object in the order of their offsets, many at a time. So an object is transferred
about once, not once per read, and only the requested bytes are copied. A read that begins behind the position of
the pass waits for the next pass; a pass ends as soon as it has no reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from tstore.storage.http.body import Sink
from tstore.storage.objects import Buffers, too_short

__all__ = ["Passes"]

Stream = Callable[[str], AsyncGenerator[bytes, None]]
"""Yields the bytes of the object with this key, from its start, as they arrive."""


class _Read(NamedTuple):
    offset: int
    end: int
    sink: Sink
    done: asyncio.Future[None]


class Passes:
    """The passes in progress, at most one per object."""

    def __init__(self) -> None:
        self._passes: dict[str, _Pass] = {}

    async def read(self, stream: Stream, key: str, offset: int, buffers: Buffers, size: int, label: str) -> None:
        """Fill the buffers from `offset`; raise `Corrupt` if the object ends before they are full."""
        loop = asyncio.get_running_loop()
        while True:
            current = self._passes.get(key)
            # a forked process inherits passes of another loop
            if current is None or current.over or current.loop is not loop:
                current = self._passes[key] = _Pass(loop)
                current.task = loop.create_task(current.run(stream(key)))
                current.task.add_done_callback(functools.partial(self._end, key, current, label))
            if current.at <= offset:
                break
            await asyncio.wait([current.task])
        read = _Read(offset, offset + size, Sink(buffers), loop.create_future())
        read.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # else asyncio logs it
        current.reads.append(read)
        try:
            await read.done
        finally:  # also if cancelled: nothing is written into the buffers from here on
            if read in current.reads:
                current.reads.remove(read)

    async def close(self) -> None:
        """End the passes of this event loop; their readers are cancelled."""
        loop = asyncio.get_running_loop()
        tasks = [p.task for p in self._passes.values() if p.loop is loop]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _end(self, key: str, ended: _Pass, label: str, _: asyncio.Task[None]) -> None:
        """Fail the reads that a pass has not served."""
        if self._passes.get(key) is ended:
            del self._passes[key]
        cancelled = ended.task.cancelled()
        error = None if cancelled else ended.task.exception()
        for read in ended.reads:
            if cancelled:
                read.done.cancel()
            elif not read.done.done():
                read.done.set_exception(error or too_short(label, read.offset, read.end, ended.at))


class _Pass:
    task: asyncio.Task[None]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.at = 0  # bytes passed
        self.over = False  # if True, no read may join
        self.reads: list[_Read] = []

    async def run(self, blocks: AsyncGenerator[bytes, None]) -> None:
        """Pass over the object until no read is left."""
        async with contextlib.aclosing(blocks):
            async for block in blocks:
                start, self.at = self.at, self.at + len(block)
                for read in [r for r in self.reads if r.offset < self.at]:
                    read.sink.write(memoryview(block)[max(0, read.offset - start) :])
                    if read.sink.full:
                        self.reads.remove(read)
                        if not read.done.done():
                            read.done.set_result(None)
                if not self.reads:
                    self.over = True
                    return
