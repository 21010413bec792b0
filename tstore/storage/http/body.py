"""The body of an answer, received straight into the caller's memory.

1. The HTTP library sends the request and reads the answer's head. What it has of the body by then is copied.
2. Where the body's length was told, the connection is then lent to a receiver: the socket, or TLS, writes into
   the caller's memory itself, and no `bytes` are made and copied. It is never offered more room than the body has
   bytes left, so whatever a server sends behind a body is the library's to judge.
3. The kernel is told (on Linux, without TLS) to report no fewer bytes than `_TOGETHER`, or all that are left, so
   that a fast server's bytes are taken in few long reads instead of many short ones. From a server that has not
   sent that much within a moment every byte is reported, as ever: it may be slow, and is not silent then.
4. With the last byte the connection goes back to the library, which is told that the body has ended, and which
   keeps it for the next request as it keeps any other; but closes one on which more has come than the body.
5. A connection that breaks, whose server falls silent, or whose reader is cancelled goes back at once and is torn
   down. Nothing is written into the caller's memory from then on.
6. A body of untold length, or one that goes into many short buffers, is streamed by the library.
"""

from __future__ import annotations

import asyncio
import socket
import sys

import aiohttp

from tstore.storage.http.responses import Sink
from tstore.storage.pace import Pace

__all__ = ["fill"]

_SHORT = 64 << 10  # about what a socket has at once
_TOGETHER = 1 << 20
_MOMENT = 0.1  # seconds


async def fill(sink: Sink, response: aiohttp.ClientResponse, pace: Pace) -> bool:
    """Puts the body into the sink; False where it has more bytes than there is room for.

    `aiohttp.ClientError` where the connection breaks. `pace`, which the caller has entered, is told of all bytes.
    """
    content = response.content
    told = None if "Transfer-Encoding" in response.headers else response.content_length
    if told == sink.size >= _SHORT * sink.count:
        while block := content.read_nowait():
            pace.moved(len(block))
            sink.take(block)
        connection = response.connection  # none once the library has the whole body
        if connection is not None and connection.transport is not None and connection.protocol is not None:
            connection.protocol.pause_reading()  # and, with it, its watch over silence
            await _Receiver(connection.transport, sink, pace).received()
            await asyncio.sleep(0)  # by then the library has seen what came behind the body
            if content.exception() is None and not content.read_nowait():
                content.feed_eof()
            else:
                response.close()
            return True
    async for block in content.iter_any():
        pace.moved(len(block))
        if not sink.take(block):
            return False
    return True


class _Receiver(asyncio.BufferedProtocol):
    """Has a connection until the sink is full."""

    def __init__(self, transport: asyncio.Transport, sink: Sink, pace: Pace) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._owner = transport.get_protocol()
        self._sink = sink
        self._pace = pace
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._heard = self._loop.time()
        plain = sys.platform == "linux" and transport.get_extra_info("sslcontext") is None
        self._socket = transport.get_extra_info("socket") if plain else None
        self._reported = 1  # bytes that must have come

    async def received(self) -> None:
        """Returns when the sink is full; whatever else ends it tears the connection down."""
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
        """Where the next bytes go."""
        return self._sink.room

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes are there."""
        self._heard = self._loop.time()
        self._pace.moved(nbytes)
        self._sink.filled(nbytes)
        if self._sink.left < self._reported:
            self._report(max(1, self._sink.left))
        if self._sink.full:
            self._transport.set_protocol(self._owner)
            if not self._ended.done():
                self._ended.set_result(None)

    def _report(self, size: int) -> None:
        """Has the kernel report no fewer bytes than that, unless the connection ends."""
        if self._socket is not None and size != self._reported and not self._transport.is_closing():
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._reported = size

    def connection_lost(self, exc: Exception | None) -> None:
        """The body ends here."""
        self._owner.connection_lost(exc)
        if not self._ended.done():
            self._ended.set_exception(exc or aiohttp.ClientPayloadError("the connection was closed"))
