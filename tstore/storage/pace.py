"""How long one request to a server may take, from its first byte to the last of the answer.

1. A connection is there within `CONNECT_SECONDS`, which the first phase has besides.
2. A request has up to three phases: its body is sent, the head of the answer comes, and the body of the answer
   comes. Each ends after `IDLE_SECONDS` in which no byte of a body was moved. Nothing else that a server sends
   puts that off: neither interim answers (100 Continue), nor parts of a header, nor redirects, all of one phase.
3. A body goes on at `SLOWEST` bytes a second at least, on average over its phase and beyond the first
   `IDLE_SECONDS`. So an object of any length has the time that it needs on a slow line, and the time of one whose
   length is bounded is bounded too: two minutes and a half for 1 MiB.
4. All requests of one call, which asks again what was not answered (`retry`), have the seconds of its `Call`
   together, beyond the time that the bytes of their bodies take at `SLOWEST`. So no answer that leads nowhere is
   waited for at full length each time. The time in which a call waits for its turn here does not count.

`storage_options={"timeout": …}` takes the place of `IDLE_SECONDS`; where it is more than a `Call` has, the first
three bounds are all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from tstore.errors import InvalidArgument

__all__ = ["CONNECT_SECONDS", "IDLE_SECONDS", "SLOWEST", "Call", "Pace", "checked_timeout", "one_call"]

CONNECT_SECONDS = 10.0
"""How long a new connection may take, from the look-up of its name to the end of the TLS handshake."""

IDLE_SECONDS = 30.0
"""How long a server may be silent: before it answers, between two bytes, and while it takes a body."""

SLOWEST = 8 << 10
"""Bytes a second at which a body is still waited for: 2 Mbit/s where 32 are under way at once."""


class Call:
    """The seconds that all requests of one call may take together, beyond what their bytes do."""

    def __init__(self, seconds: float) -> None:
        self.seconds = self.left = seconds


_call: ContextVar[Call | None] = ContextVar("tstore_kv_call", default=None)


@contextlib.contextmanager
def one_call(seconds: float) -> Iterator[Call]:
    """Bound what the running task asks of a server in the block."""
    before = _call.set(call := Call(seconds))
    try:
        yield call
    finally:
        _call.reset(before)


class Pace:
    """The deadline of one request, which what is moved puts off; entered by the task that waits for it."""

    def __init__(self, silence: float | None = None) -> None:
        self.silence = IDLE_SECONDS if silence is None else silence
        call = _call.get()
        self._call = call if call is not None and self.silence <= call.seconds else None
        self._clock = asyncio.get_running_loop().time
        self._began, self._moved = self._clock(), 0
        self._due = self._began  # when the request would have to be done, had its call no seconds left
        self._last = False
        self._timeout = asyncio.timeout_at(self._at_most(self._began + CONNECT_SECONDS + self.silence))

    def begin(self) -> None:
        """Begin the next phase."""
        self._began, self._moved = self._clock(), 0
        self._timeout.reschedule(self._at_most(self._began + self.silence))

    def moved(self, size: int) -> None:
        """Note that this many bytes of a body were moved."""
        self._moved += size
        self._due += size / SLOWEST
        end = min(self._clock(), self._began + self._moved / SLOWEST) + self.silence
        self._timeout.reschedule(self._at_most(end))

    def _at_most(self, end: float) -> float:
        return end if self._call is None else min(end, self._due + self._call.left)

    async def pause(self, waiting: Awaitable[None]) -> None:
        """Await something that is not the server's affair; that time does not count."""
        paused = self._clock()
        self._timeout.reschedule(None)
        await waiting
        paused = self._clock() - paused
        self._began, self._due = self._began + paused, self._due + paused
        self.moved(0)

    @property
    def lost(self) -> str:
        """What was wrong with a server that was waited for too long."""
        if self._call is not None and self._last:
            return f"no whole answer came within {self._call.seconds:g} s, in all tries"
        took = self._clock() - self._began
        if self._moved and self._began + self._moved / SLOWEST < self._clock() - self.silence:
            return (
                f"only {self._moved} bytes were moved within {took:.3g} s, slower than {SLOWEST} bytes a second; "
                "the network or the server is too slow"
            )
        return f"the server was silent for {self.silence:g} s"

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        finally:
            if self._call is not None:
                self._call.left -= max(0.0, self._clock() - self._due)
                self._last = self._call.left <= 0


def checked_timeout(timeout: float | None) -> float | None:
    """Return the seconds that a caller gives a server; `InvalidArgument` where they leave it none."""
    if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout < float("inf")):
        raise InvalidArgument(
            f"timeout={timeout!r}: expected seconds, more than 0, for which a server may be silent"
        )
    return timeout
