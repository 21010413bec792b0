"""A response and its body, received straight into the caller's memory and bounded in size and time.

1. The HTTP library sends the request and reads the head of the response. The part of the body that it has received
   by then is copied.
2. If the length of the body is known, the connection is then lent to a receiver: the socket, or TLS, writes into
   the caller's memory directly, without `bytes` objects in between. It is never offered more room than the rest of
   the body needs, so whatever a server sends after a body is left to the library.
3. On Linux, without TLS, the kernel is told to report no fewer than `_TOGETHER` bytes, or all that are left, so
   that a fast server's bytes are taken in a few long reads instead of many short ones. If a server has not sent
   that much within a moment, every byte is reported again, so that a slow server does not seem silent.
4. After the last byte the connection returns to the library, which is told that the body has ended and keeps it
   for the next request as usual. It is closed if more than the body has arrived.
5. A connection that breaks, whose server falls silent, or whose reader is cancelled is returned at once and torn
   down. Nothing is written into the caller's memory from then on.
6. The library streams a body of unknown length, or one that goes into many short buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import sys
from collections.abc import AsyncGenerator

import aiohttp
from multidict import CIMultiDictProxy
from yarl import URL

from tstore.format.bounds import HEAD_BYTES
from tstore.storage.http.responses import Range, content_range, short, wrong_range
from tstore.storage.limits import Deadline, ResponseMemory
from tstore.storage.objects import Buffers, bound, overlong

__all__ = ["Response", "Sink", "fill"]

_SHORT = 64 << 10  # about what a socket has at once
_TOGETHER = 1 << 20
_MOMENT = 0.1  # seconds
_LONGEST_REASON = 8 << 10


class Sink:
    """`count` buffers of `size` bytes in total, filled one after the other; `left` bytes are unfilled."""

    def __init__(self, buffers: Buffers) -> None:
        views = [view for view in (memoryview(b).cast("B") for b in buffers) if len(view)]
        self.size = self.left = sum(map(len, views))
        self.count = len(views)
        self._rest = iter(views)
        self.room = next(self._rest, memoryview(b""))
        """The unfilled part of the next buffer; empty when all are filled."""

    @property
    def full(self) -> bool:
        """Whether every buffer is filled."""
        return not self.room

    def filled(self, size: int) -> None:
        """Record that `size` bytes, at least one, were written into `room`."""
        self.left -= size
        self.room = self.room[size:] if size < len(self.room) else next(self._rest, memoryview(b""))

    def take(self, block: bytes | memoryview) -> bool:
        """Copy the bytes into the buffers; return False if some do not fit."""
        rest = memoryview(block)
        while rest and self.room:
            size = min(len(rest), len(self.room))
            self.room[:size] = rest[:size]
            rest = rest[size:]
            self.filled(size)
        return not len(rest)


class Response:
    """A response whose body is still to be read; valid inside the session's `request` block."""

    def __init__(self, response: aiohttp.ClientResponse, deadline: Deadline) -> None:
        self._response = response
        self._deadline = deadline

    @property
    def method(self) -> str:
        """The method of the request."""
        return self._response.method

    @property
    def url(self) -> URL:
        """The URL that responded, after all redirects."""
        return self._response.url

    @property
    def status(self) -> int:
        """The status code."""
        return self._response.status

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The headers."""
        return self._response.headers

    @property
    def content_length(self) -> int | None:
        """The length of the body, None if it was not sent."""
        return self._response.content_length

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives."""
        async for block in self._response.content.iter_any():
            self._deadline.moved(len(block))
            yield block

    async def whole(self, where: str, max_size: int, key: str = "") -> bytes:
        """Return the body; raise `Corrupt` if it is longer than `bound(key, max_size)` bytes."""
        announced, limit = self.content_length or 0, bound(key, max_size)
        if announced > limit:
            raise overlong(where, limit)
        # a BytesIO returns its bytes without another copy, and once closed keeps none in the traceback of an error
        with io.BytesIO() as body:
            async with ResponseMemory() as memory, contextlib.aclosing(self.blocks()) as blocks:
                async for block in blocks:
                    size = body.tell() + len(block)
                    if body.tell() < HEAD_BYTES <= size:
                        limit = bound(key, max_size, body.getvalue() + block[:HEAD_BYTES])
                    if max(announced, size) > limit:
                        raise overlong(where, limit)
                    if size == len(block) == announced:
                        return block
                    if not memory.take(len(block)):
                        await self._deadline.pause(memory.wait())
                    body.write(block)
            return body.getvalue()

    def range(self, where: str, offset: int, end: int) -> Range:
        """Return the range of the object in the body; raise `Corrupt` unless it is `offset` to `end`."""
        if self.status == 416:
            raise short(where, offset, end)
        if self.status == 200:  # the whole object, from a server that ignores ranges
            part = Range(0, self.content_length or 0, self.content_length)
        else:
            part = content_range(self, where)
        if part.start == offset and part.stop == part.total and part.stop < end:
            raise short(where, offset, end, part.total)
        if (part.start, part.stop) != (offset, end):
            raise wrong_range(where, offset, end, part.start, part.stop)
        return part

    async def fill(self, where: str, part: Range, buffers: Buffers) -> None:
        """Receive the body, which is this range, into the buffers; raise `Corrupt` if its length differs."""
        sink = Sink(buffers)
        if not await fill(sink, self._response, self._deadline):
            raise wrong_range(where, part.start, part.stop, part.start, None)
        if not sink.full:
            raise short(where, part.start, part.stop)

    async def reason(self) -> bytes:
        """Return the beginning of a body that explains a refusal, as far as it arrives."""
        said = bytearray()
        with contextlib.suppress(aiohttp.ClientError, OSError):  # the status says enough
            async with contextlib.aclosing(self.blocks()) as blocks:
                async for block in blocks:
                    said += block
                    if len(said) >= _LONGEST_REASON:
                        break
        return bytes(said[:_LONGEST_REASON])


async def fill(sink: Sink, response: aiohttp.ClientResponse, deadline: Deadline) -> bool:
    """Put the body of a response into the sink; return False if it is longer.

    Raise `aiohttp.ClientError` if the connection breaks. The caller must have entered `deadline`.
    """
    content = response.content
    announced = None if "Transfer-Encoding" in response.headers else response.content_length
    if announced == sink.size >= _SHORT * sink.count:
        while block := content.read_nowait():
            deadline.moved(len(block))
            sink.take(block)
        connection = response.connection  # None once the library has the whole body
        if connection is not None and connection.transport is not None and connection.protocol is not None:
            connection.protocol.pause_reading()  # and with it the library's own timeout
            await _Receiver(connection.transport, sink, deadline).received()
            await asyncio.sleep(0)  # lets the library see what came after the body
            if content.exception() is None and not content.read_nowait():
                content.feed_eof()
            else:
                response.close()
            return True
    async for block in content.iter_any():
        deadline.moved(len(block))
        if not sink.take(block):
            return False
    return True


class _Receiver(asyncio.BufferedProtocol):
    """Owns a connection until the sink is full."""

    def __init__(self, transport: asyncio.Transport, sink: Sink, deadline: Deadline) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._owner = transport.get_protocol()
        self._sink = sink
        self._deadline = deadline
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._heard = self._loop.time()
        plain = sys.platform == "linux" and transport.get_extra_info("sslcontext") is None
        self._socket = transport.get_extra_info("socket") if plain else None
        self._reported = 1  # the number of bytes that the kernel waits for before it reports them

    async def received(self) -> None:
        """Return when the sink is full; tear the connection down if that fails."""
        self._transport.set_protocol(self)
        self._report(min(_TOGETHER, self._sink.left))
        self._transport.resume_reading()
        try:
            while self._reported > 1 and not self._ended.done():
                left = self._heard + _MOMENT - self._loop.time()
                if left > 0:
                    await asyncio.wait([self._ended], timeout=left)
                else:
                    self._report(1)
            await asyncio.wait([self._ended])
            self._ended.result()
        finally:
            if not self._sink.full:
                self._transport.set_protocol(self._owner)
                self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes."""
        return self._sink.room

    def buffer_updated(self, nbytes: int) -> None:
        """Record that bytes have arrived."""
        self._heard = self._loop.time()
        self._deadline.moved(nbytes)
        self._sink.filled(nbytes)
        if self._sink.left < self._reported:
            self._report(max(1, self._sink.left))
        if self._sink.full:
            self._transport.set_protocol(self._owner)
            if not self._ended.done():
                self._ended.set_result(None)

    def _report(self, size: int) -> None:
        """Make the kernel report no fewer than `size` bytes, unless the connection ends."""
        if self._socket is not None and size != self._reported and not self._transport.is_closing():
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._reported = size

    def connection_lost(self, exc: Exception | None) -> None:
        """End the body with an error."""
        self._owner.connection_lost(exc)
        if not self._ended.done():
            self._ended.set_exception(exc or aiohttp.ClientPayloadError("the connection was closed"))
