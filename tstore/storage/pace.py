"""The time bounds of one request to a server, from its first byte to the last of the response.

1. A connection is established within `CONNECT_SECONDS`, which extend the first phase.
2. A request has up to three phases: sending its body, receiving the head of the response, receiving its body. Each
   ends after `IDLE_SECONDS` in which no byte of a body was moved. Nothing else that a server sends extends that:
   neither interim responses (100 Continue), nor parts of a header, nor redirects, all of one phase.
3. A body must reach `SLOWEST` bytes a second, on average over its phase and beyond the first `IDLE_SECONDS`. So an
   object of any length has the time that it needs on a slow line, and a bounded object has a bounded time: two and
   a half minutes for 1 MiB.
4. All requests of one call, which `retry` repeats, share the seconds of its `Call`, beyond the time that the bytes
   of their bodies take at `SLOWEST`. So a server that never responds is not waited for at full length each time.
   The time in which a call waits for its turn does not count.

`storage_options={"timeout": …}` replaces `IDLE_SECONDS`; if it exceeds the seconds of a `Call`, only the first
three bounds apply."""

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
"""The bound of a new connection, from the look-up of its name to the end of the TLS handshake."""

IDLE_SECONDS = 30.0
"""The bound of a server's silence: before it responds, between two bytes, and while it receives a body."""

SLOWEST = 8 << 10
"""Bytes a second that a body must reach: 2 Mbit/s for 32 concurrent requests."""


class Call:
    """The seconds that all requests of one call share, beyond those of their bytes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = self.left = seconds


_call: ContextVar[Call | None] = ContextVar("tstore_kv_call", default=None)


@contextlib.contextmanager
def one_call(seconds: float) -> Iterator[Call]:
    """Bound the requests of the running task in the block."""
    before = _call.set(call := Call(seconds))
    try:
        yield call
    finally:
        _call.reset(before)


class Pace:
    """The deadline of one request, extended by the bytes moved; entered by the task that waits for it."""

    def __init__(self, silence: float | None = None) -> None:
        self.silence = IDLE_SECONDS if silence is None else silence
        call = _call.get()
        self._call = call if call is not None and self.silence <= call.seconds else None
        self._clock = asyncio.get_running_loop().time
        self._began, self._moved = self._clock(), 0
        self._due = self._began  # the deadline if its call had no seconds left
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
        """Await something that does not depend on the server; that time does not count."""
        paused = self._clock()
        self._timeout.reschedule(None)
        await waiting
        paused = self._clock() - paused
        self._began, self._due = self._began + paused, self._due + paused
        self.moved(0)

    @property
    def lost(self) -> str:
        """What is wrong with a server that exceeded its time."""
        if self._call is not None and self._last:
            return f"no complete response within {self._call.seconds:g} s, in all tries"
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
    """Return the timeout in seconds; raise `InvalidArgument` unless it is positive and finite."""
    if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout < float("inf")):
        raise InvalidArgument(
            f"timeout={timeout!r}: expected seconds, more than 0, for which a server may be silent"
        )
    return timeout
