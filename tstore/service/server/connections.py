"""The connections of a server: their limit, the order in which they are closed beyond it, and malformed HTTP.

A connection counts from the moment it is accepted. Beyond the limit one is closed, in the order of `Stage`: first
those in their TLS handshake, then those without a request, those with only refused requests, and idle ones; among
equals, the oldest. Connections with a request under way stay open; if all have one, the new connection is closed.
So a client that keeps opening silent connections soon displaces only silent ones.

A body in chunks of a few bytes costs far more time than its size suggests. So a connection is no longer read once
too much of its input is framing (`_FRAMING`). This counts bytes, not packets, so that slow lines are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import StreamReader, web
from aiohttp.http import HttpProcessingError

from tstore.service.server.access_log import AccessLog
from tstore.service.server.quotas import Limits
from tstore.service.server.responses import Refused, json_response

__all__ = ["Connection", "Connections"]

_FRAMING, _FRAMING_SHARE = 32 << 10, 16
"""The limit for the bytes of a request besides its body (its head and the framing of chunks): 32 KiB, and one byte
for each 16 of the body. That permits 5,000 chunks of any size; chunks of 100 bytes or more never exceed it."""
_LINGER = 2.0  # seconds for pending output before a connection is closed
_SHUTDOWN_TIMEOUT = 0.1
_HANDSHAKE_SHARE = 2  # at most 1 in 2 connections may be in a handshake, which takes half a MiB of memory
_READ_AHEAD = 256 << 10  # bytes buffered; at twice that, reading pauses
_REFUSALS = {400, 401, 403, 405}

_log = logging.getLogger("tstore.server")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Stage(enum.Enum):
    """The progress of a connection, in the order in which connections are closed to make room."""

    ACCEPTED = enum.auto()
    SILENT = enum.auto()
    REFUSED = enum.auto()
    SERVED = enum.auto()
    BUSY = enum.auto()


class Connections:
    """The open connections by stage."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self._handler = handler
        self._limits = limits
        self._open = {stage: OrderedDict[Connection, None]() for stage in Stage}
        self._http = web.Server(self._handle)
        self._settings: dict[str, Any] = {
            "loop": asyncio.get_running_loop(),
            "keepalive_timeout": limits.idle,
            "lingering_time": _LINGER,
            "read_bufsize": _READ_AHEAD,
            "auto_decompress": False,
            "access_log_class": AccessLog,
            "access_log": logging.getLogger("tstore.server.access"),
            "logger": _log,
        }

    def add(self, sock: socket.socket) -> Connection | None:
        """Return a connection for an accepted socket; close the socket and return None if there is no room."""
        full = sum(map(len, self._open.values())) >= self._limits.connections
        if len(self._open[Stage.ACCEPTED]) >= max(1, self._limits.connections // _HANDSHAKE_SHARE):
            self.make_room()
        elif full and not self.make_room():
            sock.close()
            return None
        new = Connection(self, sock, self._http, **self._settings)
        self._open[Stage.ACCEPTED][new] = None
        return new

    def make_room(self) -> bool:
        """Close the oldest connection of the earliest stage; return whether there was one to close."""
        for stage in (Stage.ACCEPTED, Stage.SILENT, Stage.REFUSED, Stage.SERVED):
            if self._open[stage]:
                oldest, _ = self._open[stage].popitem(last=False)
                oldest.abort()
                return True
        return False

    def advance(self, connection: Connection, stage: Stage) -> None:
        """Record the stage of a connection; one that was closed to make room is not counted again."""
        current = self._open[connection.stage]
        if connection in current:
            del current[connection]
            self._open[stage][connection] = None
        connection.stage = stage

    def remove(self, connection: Connection) -> None:
        """Stop counting a connection that has ended."""
        self._open[connection.stage].pop(connection, None)

    async def close(self) -> None:
        """Close all connections; requests should have ended."""
        self._http.pre_shutdown()
        await self._http.shutdown(_SHUTDOWN_TIMEOUT)
        while self.make_room():
            pass

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.start_request(request)
        response: web.StreamResponse | None = None
        try:
            response = await self._handler(request)
            with contextlib.suppress(ConnectionError):  # the client has left
                async with asyncio.timeout(self._limits.stall):
                    await response.prepare(request)
                    await response.write_eof()
            if response.status == 408 or connection.refused_body:  # do not wait for the rest of the body
                connection.force_close()
        except TimeoutError:
            connection.abort()
            if response is None:
                raise
        finally:
            connection.end_request(response)
        return response


class Connection(web.RequestHandler):
    """One client's connection, from when it is accepted."""

    __slots__ = ("_body", "_connections", "_deadline", "_received", "_served", "_socket", "refused_body", "stage")

    def __init__(self, connections: Connections, sock: socket.socket, http: web.Server, **settings: Any) -> None:
        super().__init__(http, **settings)
        self.stage = Stage.ACCEPTED
        self._connections = connections
        self._socket = sock
        self._deadline: asyncio.TimerHandle | None = None
        self._served = False
        self._received = 0  # bytes of the request that is being read
        self._body: StreamReader | None = None
        self.refused_body = False
        """Whether reading stopped because the chunks of a body were too small."""

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the parser."""
        if data:  # b"" resumes the parser; new bytes come only when all earlier ones are parsed
            self._check_framing()
        if not self.refused_body:
            self._received += len(data)
            super().data_received(data)

    def _check_framing(self) -> None:
        """Refuse the rest of a body whose chunks are too small."""
        body = self._body
        if body is None or body.is_eof() or self.refused_body:
            return
        if self._received - body.total_bytes <= _FRAMING + body.total_bytes // _FRAMING_SHARE:
            return
        self.refused_body = True
        if self.stage is Stage.BUSY:
            error = Refused(400, "the chunks of the body are too small; send longer ones", {"Connection": "close"})
            body.set_exception(error)
        else:  # the response has been sent
            self.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start waiting for the first request."""
        super().connection_made(transport)
        self._connections.advance(self, Stage.SILENT)
        self._abort_after(self.keepalive_timeout)  # unless a first request starts

    def connection_lost(self, exc: BaseException | None) -> None:
        """Stop counting the connection."""
        self._connections.remove(self)
        self._abort_after(None)
        super().connection_lost(exc)

    def start_request(self, request: web.BaseRequest) -> None:
        """Record the start of a request."""
        self._abort_after(None)
        self._connections.advance(self, Stage.BUSY)
        self._body = request.content

    def end_request(self, response: web.StreamResponse | None) -> None:
        """Record the end of a request with its response."""
        if response is not None and response.status not in _REFUSALS:
            self._served = True
        self._connections.advance(self, Stage.SERVED if self._served else Stage.REFUSED)
        if self._body is not None and self._body.is_eof():
            self._received, self._body = 0, None
        if response is None or not response.keep_alive:
            self._abort_after(self.keepalive_timeout)

    def force_close(self) -> None:
        """Close the connection after pending output is sent, but within `_LINGER` seconds."""
        super().force_close()
        self._abort_after(_LINGER)

    def abort(self) -> None:
        """Close the connection at once, at any stage, discarding pending output."""
        self._abort_after(None)
        if self.transport is not None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):  # closed already
                self._socket.shutdown(socket.SHUT_RDWR)

    def _abort_after(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self._loop.call_later(seconds, self.abort)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log errors of this server, but not malformed requests."""
        if not isinstance(kw.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to a malformed request or an internal error; the connection is closed."""
        if status >= 500:
            _log.error("internal error in a request from %s", request.remote, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the response had started")
        reason = "internal error; see the server's log" if status >= 500 else "malformed HTTP/1.1 request"
        response = json_response(status, {"error": reason})
        response.force_close()
        return response
