"""Small reads that begin in the same turn of an event loop, such as those of `asyncio.gather`, read together.

1. The first read of a turn runs by itself, so a read that is alone is not delayed. The others become one call, in
   which neighbours in a pack are read together, and which crosses to threads once.
2. If that call fails, each read is made again alone, and raises its own error.
3. A cancelled read ends with the call, which writes its result until then; if all are cancelled, so is the call.
"""

from __future__ import annotations

import asyncio
import contextlib

from tstore.core.data.pieces import ReadJob
from tstore.core.data.reader import read_chunks
from tstore.core.runtime.event_loops import PerLoop
from tstore.core.storage.base import Storage

__all__ = ["SharedReads"]

_SMALL = 1 << 20  # bytes of values; a read of more does not wait for others


class _Call:
    """A call for several reads; `waiting` of them are not cancelled."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._jobs: list[ReadJob] = []
        self._waiting = 0
        self._task = asyncio.get_running_loop().create_task(self._read())
        self._task.add_done_callback(_note_error)

    async def _read(self) -> None:
        await read_chunks(self._storage, self._jobs)

    async def read(self, job: ReadJob) -> bool:
        """Read a job with the others; return whether that succeeded. The call must not have begun."""
        self._jobs.append(job)
        self._waiting += 1
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self._waiting -= 1
            if not self._waiting:
                self._task.cancel()
            while not self._task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([self._task])
            raise
        return not self._task.cancelled() and self._task.exception() is None


def _note_error(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a call, which asyncio would log if all reads were cancelled."""
    if not task.cancelled():
        task.exception()


class _Turn:
    """Whether a read has begun in the current turn of a loop, and the call for the reads after it."""

    def __init__(self) -> None:
        self.has_begun = False
        self.call: _Call | None = None

    def end(self) -> None:
        """Begin the next turn."""
        self.has_begun, self.call = False, None


class SharedReads:
    """The reads of one snapshot."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._turns = PerLoop(_Turn)

    async def read(self, job: ReadJob) -> None:
        """Fill the `out` of a job; raise what `read_chunks` raises."""
        if job.out.nbytes <= _SMALL:
            turn = self._turns.get()
            if turn.has_begun:
                turn.call = turn.call or _Call(self._storage)
                if await turn.call.read(job):
                    return
            else:
                turn.has_begun = True
                asyncio.get_running_loop().call_soon(turn.end)  # before the tasks that are created from now on run
        await read_chunks(self._storage, [job])
