"""Reads from a server that ignores `Range`: one pass over an object serves all reads ahead of its position.

Callers request the reads of one object in the order of their offsets, many at a time. So an object is transferred
about once, not once per read, and only the requested bytes are copied. A read that starts before the position of
the pass waits for the next pass; a pass ends as soon as it has no reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from tstore.core.storage.http.body import Sink
from tstore.core.storage.objects import Buffers, too_short

__all__ = ["Passes"]

Stream = Callable[[str], AsyncGenerator[bytes, None]]
"""Yields the bytes of the object with this key, from its start, as they arrive."""


class _Read(NamedTuple):
    offset: int
    end: int
    sink: Sink
    filled: asyncio.Future[None]


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
                current.task.add_done_callback(functools.partial(self._on_end, key, current, label))
            if current.position <= offset:
                break
            await asyncio.wait([current.task])
        read = _Read(offset, offset + size, Sink(buffers), loop.create_future())
        # otherwise asyncio logs the exception if the reader was cancelled
        read.filled.add_done_callback(lambda filled: filled.cancelled() or filled.exception())
        current.reads.append(read)
        try:
            await read.filled
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

    def _on_end(self, key: str, finished: _Pass, label: str, _: asyncio.Task[None]) -> None:
        """Fail the reads that a pass has not served."""
        if self._passes.get(key) is finished:
            del self._passes[key]
        cancelled = finished.task.cancelled()
        error = None if cancelled else finished.task.exception()
        for read in finished.reads:
            if cancelled:
                read.filled.cancel()
            elif not read.filled.done():
                read.filled.set_exception(error or too_short(label, read.offset, read.end, finished.position))


class _Pass:
    """One pass over an object, and the reads that it serves."""

    task: asyncio.Task[None]

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.position = 0  # bytes of the object that were received
        self.over = False  # if True, no read may join
        self.reads: list[_Read] = []

    async def run(self, blocks: AsyncGenerator[bytes, None]) -> None:
        """Pass over the object until no read is left."""
        async with contextlib.aclosing(blocks):
            async for block in blocks:
                start, self.position = self.position, self.position + len(block)
                for read in [r for r in self.reads if r.offset < self.position]:
                    read.sink.write(memoryview(block)[max(0, read.offset - start) :])
                    if read.sink.full:
                        self.reads.remove(read)
                        if not read.filled.done():
                            read.filled.set_result(None)
                if not self.reads:
                    self.over = True
                    return
