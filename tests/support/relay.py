"""A TCP relay that loses requests or responses between clients and a server on demand.

    async with Relay.to("127.0.0.1", port) as relay:
        ...                                  # clients connect to relay.host, relay.port
        with relay.losing("response"):       # the server does the next request; its response is lost
            ...

With "request" the connection is closed before any byte of the next request reaches the server. Only one request
is lost: a retry succeeds. `rewrite` changes the bytes that clients send, so that a correct server
seems to ignore the condition of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Literal

__all__ = ["Relay"]

_BUFFER_SIZE = 64 << 10

Loss = Literal["request", "response"]
Rewrite = Callable[[bytes], bytes]


class Relay:
    """A listener on `host` and `port` that forwards connections to a server."""

    host = "127.0.0.1"

    def __init__(self, server: str, server_port: int, rewrite: Rewrite | None = None) -> None:
        self.port = 0
        self.lost = 0
        """The number of requests or responses lost so far."""
        self.bytes_to_clients = 0
        """The number of bytes that the server has sent to clients so far."""
        self._server = (server, server_port)
        self._rewrite = rewrite
        self._loss: Loss | None = None
        self._clients: set[asyncio.StreamWriter] = set()
        self._quiet = asyncio.Event()  # no client is connected
        self._quiet.set()

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, server: str, port: int, rewrite: Rewrite | None = None) -> AsyncIterator[Relay]:
        """Relay to a server during the block; `rewrite` returns other bytes of the same length."""
        relay = cls(server, port, rewrite)
        listener = await asyncio.start_server(relay._serve, cls.host, 0)
        relay.port = listener.sockets[0].getsockname()[1]
        try:
            yield relay
        finally:
            listener.close()
            for writer in relay._clients:
                writer.transport.abort()
            await relay._quiet.wait()

    @contextlib.contextmanager
    def losing(self, loss: Loss) -> Iterator[None]:
        """Lose the next request, or the next response, within the block."""
        self._loss = loss
        try:
            yield
        finally:
            self._loss = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients.add(writer)
        self._quiet.clear()
        try:
            with contextlib.suppress(OSError):
                await self._forward(reader, writer)
        finally:
            self._clients.discard(writer)
            writer.close()
            if not self._clients:
                self._quiet.set()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(*self._server)
        try:
            copies = [
                asyncio.ensure_future(self._copy(reader, server_writer, "request")),
                asyncio.ensure_future(self._copy(server_reader, writer, "response")),
            ]
            try:
                await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in copies:
                    task.cancel()
                await asyncio.gather(*copies, return_exceptions=True)
        finally:
            server_writer.close()

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, direction: Loss) -> None:
        """Copy until the source ends, or until bytes of this direction are to be lost."""
        while data := await source.read(_BUFFER_SIZE):
            self.bytes_to_clients += len(data) if direction == "response" else 0
            if self._loss == direction:
                self._loss = None
                self.lost += 1
                return
            target.write(self._rewrite(data) if self._rewrite is not None and direction == "request" else data)
            await target.drain()
