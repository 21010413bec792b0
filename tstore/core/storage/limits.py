"""Limits on what a server may cost: the time of a request, the memory of responses, the length of listings.

Time (`Deadline`)
1. A connection is established within `CONNECT_SECONDS`. These seconds are added to the limit of the first phase.
2. A request has up to three phases: sending its body, receiving the head of the response, receiving its body. Each
   fails after `IDLE_SECONDS` without a byte of a body. Nothing else extends a phase: interim responses (100
   Continue), parts of a header and redirects all belong to the phase of the head. After a body was sent, the phase
   of the head begins when the body would have been sent at `BODY_RATE`, since its bytes may still be on their way,
   in the buffers of this machine or of a proxy.
3. A body must reach `BODY_RATE` bytes a second, on average over its phase and after the first `IDLE_SECONDS`. So
   an object of any length gets the time that a slow line needs, but no more: two and a half minutes for 1 MiB.
4. All requests of one call, also those that `retry` repeats, share the seconds of one `CallTime`. The time that
   their bodies take at `BODY_RATE` does not count, nor does waiting for a turn (`remote.LimitedStorage`). So a
   server that never responds does not cost the full time at each attempt.
`storage_options={"timeout": …}` replaces `IDLE_SECONDS`; if it exceeds the seconds of a `CallTime`, it alone
limits a request, and a request that took as long is not repeated.

Memory (`ResponseMemory`)
5. Each object that is read whole may take `FREE_BYTES`. Beyond these, all objects that are read at the same
   time share `SHARED_BYTES`. Only the object that took shared bytes first may exceed them, so that no object waits
   forever.

Listings (`checked_pages`)
6. Each name starts with the prefix, and at most `EMPTY_PAGES` pages in a row have no new name.
7. Names come at `LISTING_RATE` a second on average, after the first `LISTING_GRACE` seconds.
8. All names of a listing together take at most `LISTING_BYTES`, each with `_OVERHEAD` bytes for its Python object.
   Callers consume a listing page by page and keep only names, so this bounds its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextvars import ContextVar
from types import TracebackType
from typing import Self

from tstore.core.runtime.event_loops import PerLoop
from tstore.core.storage.objects import Page
from tstore.errors import Corrupt, InvalidArgument, Unavailable

__all__ = [
    "BODY_RATE",
    "CONNECT_SECONDS",
    "FREE_BYTES",
    "IDLE_SECONDS",
    "SHARED_BYTES",
    "Deadline",
    "ResponseMemory",
    "charged",
    "checked_pages",
    "checked_timeout",
    "one_call",
]

CONNECT_SECONDS = 10.0
"""The limit for a new connection, from the lookup of the host to the end of the TLS handshake."""

IDLE_SECONDS = 30.0
"""How long a server may be silent: before it responds, between two bytes, and while it receives a body."""

BODY_RATE = 8 << 10
"""Bytes a second that a body must reach: 2 Mbit/s for 32 concurrent requests."""

FREE_BYTES = 1 << 20  # per object
SHARED_BYTES = 128 << 20  # for all objects of one event loop

EMPTY_PAGES = 1000
"""More empty pages than servers return in a row while they skip many deleted objects."""

LISTING_BYTES = 160 << 20
"""A million names of a hundred characters, or two million short ones."""

LISTING_GRACE = 300.0  # seconds
LISTING_RATE = 100  # names a second

_OVERHEAD = 64  # bytes per name


class CallTime:
    """The seconds that all requests of one call share; the time that their bytes take does not count."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.spent = 0.0
        self.deadlines = 0  # of requests so far; each charges the call exactly

    @property
    def remaining(self) -> float:
        """The seconds that are left, less than 0 if more were spent."""
        return self.seconds - self.spent


_call: ContextVar[CallTime | None] = ContextVar("tstore_storage_call", default=None)


@contextlib.contextmanager
def one_call(seconds: float) -> Iterator[CallTime]:
    """Make all requests that the current task makes in this block share `seconds`."""
    reset_token = _call.set(call := CallTime(seconds))
    try:
        yield call
    finally:
        _call.reset(reset_token)


@contextlib.contextmanager
def charged(size: int = 0) -> Iterator[None]:
    """Charge the current call for the time of this block, unless a `Deadline` in it does.

    The time that `size` bytes take at `BODY_RATE` does not count.
    """
    call = _call.get()
    if call is None:
        yield
        return
    clock = asyncio.get_running_loop().time
    started, deadlines = clock(), call.deadlines
    try:
        yield
    finally:
        if call.deadlines == deadlines:
            call.spent += max(0.0, clock() - started - size / BODY_RATE)


class Deadline:
    """The deadline of one request, extended by each byte moved; entered by the task that makes the request."""

    def __init__(self, idle_seconds: float | None = None) -> None:
        self.idle_seconds = IDLE_SECONDS if idle_seconds is None else idle_seconds
        self._call = _call.get()
        if self._call is not None:
            self._call.deadlines += 1
        self._sent = 0  # bytes of a body that was sent completely; its response is awaited
        self._clock = asyncio.get_running_loop().time
        self._phase_start, self._bytes = self._clock(), 0  # start and bytes of the current phase
        self._charged_from = self._phase_start  # start of the time charged to the call; bytes and pauses delay it
        self._call_exhausted = False
        first_end = self._phase_start + CONNECT_SECONDS + self.idle_seconds
        self._timeout = asyncio.timeout_at(self._within_call(first_end))

    def start_phase(self) -> None:
        """End the current phase and start the next one."""
        self._phase_start, self._bytes, self._sent = self._clock(), 0, 0
        self._end_at(self._phase_start + self.idle_seconds)

    def await_response(self) -> None:
        """End the phase in which a body was sent, and start that of the response's head."""
        start = max(self._clock(), self._due())
        self._sent, self._bytes = self._bytes, 0
        self._phase_start = self._clock()
        self._end_at(start + self.idle_seconds)

    def extend(self, size: int) -> None:
        """Extend the deadline for `size` bytes of a body that were sent or received."""
        self._bytes += size
        self._charged_from += size / BODY_RATE
        self._end_at(min(self._clock(), self._due()) + self.idle_seconds)

    def _due(self) -> float:
        """Return when a transfer at `BODY_RATE` would have moved the bytes of this phase."""
        return self._phase_start + self._bytes / BODY_RATE

    def _end_at(self, end: float) -> None:
        """Set the deadline, unless that would change it by less than 1 % of the idle limit."""
        end, current = self._within_call(end), self._timeout.when()
        if current is None or abs(end - current) > self.idle_seconds / 100:
            self._timeout.reschedule(end)

    def _within_call(self, end: float) -> float:
        """Return `end`, or the end of the time of the call if that is earlier."""
        if self._call is None or self.idle_seconds > self._call.seconds:
            return end
        return min(end, self._charged_from + self._call.remaining)

    async def pause(self, waiting: Awaitable[None]) -> None:
        """Await something that does not depend on the server; its time does not count."""
        start = self._clock()
        self._timeout.reschedule(None)
        await waiting
        paused = self._clock() - start
        self._phase_start += paused
        self._charged_from += paused
        self.extend(0)

    @property
    def message(self) -> str:
        """Why the deadline was exceeded, for the error."""
        if self._call is not None and self._call_exhausted:
            return f"no complete response within {self._call.seconds:g} s, in all attempts"
        elapsed = self._clock() - self._phase_start
        # 0.98, not 1: `_end_at` may leave the deadline a little early
        if self._bytes and self._due() < self._clock() - 0.98 * self.idle_seconds:
            return (
                f"only {self._bytes} bytes were moved within {elapsed:.3g} s, slower than {BODY_RATE} bytes a "
                "second; the network or the server is too slow"
            )
        if self._sent and elapsed > 1.1 * self.idle_seconds:
            return f"the server was silent for {elapsed:.3g} s after it was sent {self._sent} bytes"
        return f"the server was silent for {self.idle_seconds:g} s"

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
                self._call.spent += max(0.0, self._clock() - self._charged_from)
                self._call_exhausted = self._call.remaining <= 0 and self.idle_seconds <= self._call.seconds


def checked_timeout(timeout: float | None) -> float | None:
    """Return the timeout in seconds, or None; raise `InvalidArgument` unless it is positive and finite."""
    if timeout is not None and not (isinstance(timeout, (int, float)) and 0 < timeout < float("inf")):
        raise InvalidArgument(
            f"timeout={timeout!r}: expected the seconds for which a server may be silent, more than 0"
        )
    return timeout


class _SharedBytes:
    """The shared bytes that each object of one event loop has taken, in the order in which they first took any."""

    def __init__(self) -> None:
        self.taken: dict[ResponseMemory, int] = {}
        self.changed = asyncio.Event()


_shared = PerLoop(_SharedBytes)


class ResponseMemory:
    """The memory of one object that is being received, until the end of the `async with` block."""

    def __init__(self) -> None:
        self._size = 0
        self._shared = _shared.get()

    def take(self, size: int) -> bool:
        """Take `size` more bytes; if this returns False, await `wait` before using them."""
        self._size += size
        if self._size <= FREE_BYTES:
            return True
        taken = self._shared.taken
        taken[self] = self._size - FREE_BYTES
        return self._is_first() or sum(taken.values()) <= SHARED_BYTES

    async def wait(self) -> None:
        """Wait until all bytes taken are available."""
        while not self._is_first() and sum(self._shared.taken.values()) > SHARED_BYTES:
            await self._shared.changed.wait()

    def _is_first(self) -> bool:
        return next(iter(self._shared.taken)) is self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shared.taken.pop(self, None) is not None:
            self._shared.changed.set()
            self._shared.changed = asyncio.Event()


async def checked_pages(pages: AsyncIterator[Page], prefix: str, url: str) -> AsyncIterator[Page]:
    """Yield the pages of a listing of `prefix`; raise `Corrupt` or `Unavailable` beyond its limits."""
    clock, label = asyncio.get_running_loop().time, f"{url}: the list of {prefix!r}"
    started, size, count, empty_pages, last_name = clock(), 0, 0, 0, ""
    async for page in pages:
        names = [entry.key for entry in page.entries] + page.folders
        unrequested = next((name for name in names if not name.startswith(prefix)), None)
        if unrequested is not None:
            raise Corrupt(f"{label} has {unrequested[:100]!r}, which was not requested; check the server")
        highest = max(names, default="")
        empty_pages = 0 if highest > last_name else empty_pages + 1
        last_name = max(last_name, highest)
        count += len(names)
        size += sum(len(name) + _OVERHEAD for name in names)
        if empty_pages > EMPTY_PAGES:
            raise Corrupt(f"{label} has no new name for {EMPTY_PAGES} pages; check the server at that URL")
        if size > LISTING_BYTES:
            raise Corrupt(f"{label} is longer than {LISTING_BYTES} bytes ({count} names); no store has that many")
        if clock() - started > LISTING_GRACE + count / LISTING_RATE:
            raise Unavailable(
                f"{label} has only {count} names after {clock() - started:.0f} s; the server is too slow"
            )
        yield page
