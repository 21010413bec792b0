"""A response and its body, received straight into the caller's memory and bounded in size and time.

1. The HTTP library sends the request and reads the head of the response. Any part of the body that it has received
   with the head is copied.
2. If the length of the body is known, a receiver then takes over the connection: the socket, or TLS, writes into
   the caller's memory directly, without `bytes` objects in between. The receiver never offers more room than the
   rest of the body needs, so the library receives anything that a server sends after the body.
3. On Linux, without TLS, the receiver wakes only when `_LOW_WATER` bytes, or the rest of the body, have arrived
   (SO_RCVLOWAT): a few long reads from a fast server instead of many short ones. If they do not arrive within
   `_QUIET_SECONDS`, it wakes for every byte, so that a slow server does not seem silent.
4. After the last byte the connection returns to the library, which learns that the body has ended and keeps the
   connection for the next request. The connection is closed if more than the body has arrived.
5. If the connection breaks, the server falls silent, or the reader is cancelled, the connection is closed at once.
   Nothing is written into the caller's memory from then on.
6. The library receives a body of unknown length, or a body for many short buffers, and its blocks are copied.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import sys
from collections.abc import AsyncGenerator

import aiohttp

from tstore.core.format.bounds import HEAD_BYTES
from tstore.core.storage.http.responses import Range, content_range, wrong_range
from tstore.core.storage.limits import Deadline, ResponseMemory
from tstore.core.storage.objects import Buffers, overlong, read_limit, too_short

__all__ = ["Response", "Sink", "fill"]

_MIN_DIRECT = 64 << 10  # bytes per buffer, on average, for a receiver; about what a socket buffers
_LOW_WATER = 1 << 20
_QUIET_SECONDS = 0.1
_MAX_REASON = 8 << 10


class Sink:
    """`count` buffers of `size` bytes in total, filled one after the other; `unfilled` bytes remain."""

    def __init__(self, buffers: Buffers) -> None:
        views = [view for view in (memoryview(b).cast("B") for b in buffers) if len(view)]
        self.size = self.unfilled = sum(map(len, views))
        self.count = len(views)
        self._rest = iter(views)
        self.room = next(self._rest, memoryview(b""))
        """The unfilled part of the next buffer; empty when all are filled."""

    @property
    def full(self) -> bool:
        """Whether every buffer is filled."""
        return not self.room

    def advance(self, size: int) -> None:
        """Record that `size` bytes, at least one, were written into `room`."""
        self.unfilled -= size
        self.room = self.room[size:] if size < len(self.room) else next(self._rest, memoryview(b""))

    def write(self, block: bytes | memoryview) -> bool:
        """Copy the block into the buffers; return False if some of its bytes do not fit."""
        rest = memoryview(block)
        while rest and self.room:
            size = min(len(rest), len(self.room))
            self.room[:size] = rest[:size]
            rest = rest[size:]
            self.advance(size)
        return not len(rest)


class Response:
    """A response whose body is still to be read; valid inside the session's `request` block."""

    def __init__(self, response: aiohttp.ClientResponse, deadline: Deadline) -> None:
        self._response = response
        self._deadline = deadline
        self.method = response.method
        self.url = response.url
        """The URL that responded, after all redirects."""
        self.status = response.status
        self.headers = response.headers
        self.content_length = response.content_length
        """The length of the body, None if the server did not send it."""

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives."""
        async for block in self._response.content.iter_any():
            self._deadline.extend(len(block))
            yield block

    async def read_all(self, label: str, max_size: int, key: str = "") -> bytes:
        """Return the body; raise `Corrupt` if it is longer than `read_limit(key, max_size)` bytes."""
        announced, limit = self.content_length or 0, read_limit(key, max_size)
        if announced > limit:
            raise overlong(label, limit)
        # a BytesIO returns its bytes without another copy, and once closed keeps none in the traceback of an error
        with io.BytesIO() as body:
            async with ResponseMemory() as memory, contextlib.aclosing(self.blocks()) as blocks:
                async for block in blocks:
                    size = body.tell() + len(block)
                    if body.tell() < HEAD_BYTES <= size:  # the head of a record determines its bound
                        limit = read_limit(key, max_size, body.getvalue() + block[:HEAD_BYTES])
                    if max(announced, size) > limit:
                        raise overlong(label, limit)
                    if size == len(block) == announced:
                        return block  # the whole body, without a copy
                    if not memory.take(len(block)):
                        await self._deadline.pause(memory.wait())
                    body.write(block)
            return body.getvalue()

    def checked_range(self, label: str, offset: int, end: int) -> Range:
        """Return the range of the object that the body has; raise `Corrupt` unless it is `offset` to `end`."""
        if self.status == 416:
            raise too_short(label, offset, end)
        if self.status == 200:  # the whole object, from a server that ignores ranges
            part = Range(0, self.content_length or 0, self.content_length)
        else:
            part = content_range(self, label)
        if part.start == offset and part.stop == part.total and part.stop < end:
            raise too_short(label, offset, end, part.total)
        if (part.start, part.stop) != (offset, end):
            raise wrong_range(label, offset, end, part.start, part.stop)
        return part

    async def fill(self, label: str, part: Range, buffers: Buffers) -> None:
        """Receive the body, which is the range `part`; raise `Corrupt` unless it fills the buffers exactly."""
        sink = Sink(buffers)
        if not await fill(sink, self._response, self._deadline):
            raise wrong_range(label, part.start, part.stop, part.start, None)
        if not sink.full:
            raise too_short(label, part.start, part.stop)

    async def read_reason(self) -> bytes:
        """Return the start of a refusal's body, which explains it, as far as it arrives."""
        reason = bytearray()
        with contextlib.suppress(aiohttp.ClientError, OSError):  # the status alone still makes an error
            async with contextlib.aclosing(self.blocks()) as blocks:
                async for block in blocks:
                    reason += block
                    if len(reason) >= _MAX_REASON:
                        break
        return bytes(reason[:_MAX_REASON])


async def fill(sink: Sink, response: aiohttp.ClientResponse, deadline: Deadline) -> bool:
    """Write the body of a response into the sink; return False if the body is longer.

    Raise `aiohttp.ClientError` or `OSError` if the connection breaks. The caller must have entered `deadline`.
    """
    content = response.content
    announced = None if "Transfer-Encoding" in response.headers else response.content_length
    if announced == sink.size >= _MIN_DIRECT * sink.count:
        while block := content.read_nowait():
            deadline.extend(len(block))
            sink.write(block)
        connection = response.connection  # None once the library has the whole body
        if connection is not None and connection.transport is not None and connection.protocol is not None:
            connection.protocol.pause_reading()  # this also stops the library's own timeout
            await _Receiver(connection.transport, sink, deadline).receive()
            await asyncio.sleep(0)  # lets the library see what came after the body
            if content.exception() is None and not content.read_nowait():
                content.feed_eof()
            else:
                response.close()
            return True
    async for block in content.iter_any():
        deadline.extend(len(block))
        if not sink.write(block):
            return False
    return True


class _Receiver(asyncio.BufferedProtocol):
    """The protocol of a connection until the sink is full."""

    def __init__(self, transport: asyncio.Transport, sink: Sink, deadline: Deadline) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._library_protocol = transport.get_protocol()
        self._sink = sink
        self._deadline = deadline
        self._finished: asyncio.Future[None] = self._loop.create_future()
        self._last_data = self._loop.time()
        has_low_water = sys.platform == "linux" and transport.get_extra_info("sslcontext") is None
        self._socket = transport.get_extra_info("socket") if has_low_water else None
        self._low_water = 1  # bytes

    async def receive(self) -> None:
        """Fill the sink; abort the connection if that fails."""
        self._transport.set_protocol(self)
        self._set_low_water(min(_LOW_WATER, self._sink.unfilled))
        self._transport.resume_reading()
        try:
            while self._low_water > 1 and not self._finished.done():
                wait = self._last_data + _QUIET_SECONDS - self._loop.time()
                if wait > 0:
                    await asyncio.wait([self._finished], timeout=wait)
                else:
                    self._set_low_water(1)
            await asyncio.wait([self._finished])
            self._finished.result()
        finally:
            if not self._sink.full:
                self._transport.set_protocol(self._library_protocol)
                self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._sink.room

    def buffer_updated(self, nbytes: int) -> None:
        self._last_data = self._loop.time()
        self._deadline.extend(nbytes)
        self._sink.advance(nbytes)
        if self._sink.unfilled < self._low_water:
            self._set_low_water(max(1, self._sink.unfilled))
        if self._sink.full:
            self._transport.set_protocol(self._library_protocol)
            if not self._finished.done():
                self._finished.set_result(None)

    def _set_low_water(self, size: int) -> None:
        """Make the kernel wait for `size` bytes, or the end of the connection, before it wakes the receiver."""
        if self._socket is not None and size != self._low_water and not self._transport.is_closing():
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._low_water = size

    def connection_lost(self, exc: Exception | None) -> None:
        self._library_protocol.connection_lost(exc)
        if not self._finished.done():
            self._finished.set_exception(exc or aiohttp.ClientPayloadError("the connection was closed"))
