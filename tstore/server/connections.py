"""The connections of a server: how many there may be, which are closed first, and the answer to what is no HTTP.

They are counted from when they are accepted. Beyond the limit the one is closed that has come least far: one that
has not finished its TLS handshake before one that has sent no request, that before one whose requests were all
refused, and that before one that is idle; among equals the one that has been there for longest. Those whose
requests are being answered stay; if all are, the new one is closed. So a client that opens silent connections
without end closes only its own.

A body in chunks of a few bytes costs far more time than its bytes would: its connection is no longer read once too
much of what came was framing (`FRAMING`), which counts bytes and not packets, so that no slow line is mistaken.
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

from tstore.server.access_log import AccessLog
from tstore.server.limits import FRAMING, FRAMING_SHARE, Limits
from tstore.server.responses import Refused, answer

__all__ = ["Connection", "Connections"]

_LINGER = 2.0
_CUT = 0.1
_SHAKING = 2  # one of so many connections may be in a handshake: each takes half a MiB meanwhile
_READ = 256 << 10  # bytes received ahead of who wants them; twice that at most
_IN_VAIN = {400, 401, 403, 405}

_log = logging.getLogger("tstore.server")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Stage(enum.Enum):
    """How far a connection has come; those of an earlier one go first."""

    ACCEPTED = enum.auto()
    SILENT = enum.auto()
    REFUSED = enum.auto()
    SERVED = enum.auto()
    ANSWERING = enum.auto()


class Connections:
    """The open connections, by how far they have come."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self._handler = handler
        self._limits = limits
        self._open = {stage: OrderedDict[Connection, None]() for stage in Stage}
        self._http = web.Server(self._answer)
        self._settings: dict[str, Any] = {
            "loop": asyncio.get_running_loop(),
            "keepalive_timeout": limits.idle,
            "lingering_time": _LINGER,
            "read_bufsize": _READ,
            "auto_decompress": False,
            "access_log_class": AccessLog,
            "access_log": logging.getLogger("tstore.server.access"),
            "logger": _log,
        }

    def accepted(self, sock: socket.socket) -> Connection | None:
        """The connection that a socket becomes; None, and the socket is closed, where there is no room."""
        full = sum(map(len, self._open.values())) >= self._limits.connections
        if len(self._open[Stage.ACCEPTED]) >= max(1, self._limits.connections // _SHAKING):
            self.make_room()
        elif full and not self.make_room():
            sock.close()
            return None
        new = Connection(self, sock, self._http, **self._settings)
        self._open[Stage.ACCEPTED][new] = None
        return new

    def make_room(self) -> bool:
        """Whether a connection was ended that could be."""
        for stage in (Stage.ACCEPTED, Stage.SILENT, Stage.REFUSED, Stage.SERVED):
            if self._open[stage]:
                gone, _ = self._open[stage].popitem(last=False)
                gone.cut()
                return True
        return False

    def moved(self, connection: Connection, stage: Stage) -> None:
        """Takes note of how far a connection has come; one that had to go is not counted again."""
        if self._open[connection.stage].pop(connection, self) is None:
            self._open[stage][connection] = None
        connection.stage = stage

    def closed(self, gone: Connection) -> None:
        """Takes note that a connection has ended."""
        self._open[gone.stage].pop(gone, None)

    async def close(self) -> None:
        """Closes all of them; requests should have ended."""
        self._http.pre_shutdown()
        await self._http.shutdown(_CUT)
        while self.make_room():
            pass

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.begin(request)
        response: web.StreamResponse | None = None
        try:
            response = await self._handler(request)
            with contextlib.suppress(ConnectionError):  # then nobody waits for it
                async with asyncio.timeout(self._limits.stall):
                    await response.prepare(request)
                    await response.write_eof()
            if response.status == 408 or connection.refused_body:  # no use in waiting for the rest of the body
                connection.force_close()
        except TimeoutError:
            connection.cut()
            if response is None:
                raise
        finally:
            connection.end(response)
        return response


class Connection(web.RequestHandler):
    """One client's connection, from when it is accepted."""

    __slots__ = ("_body", "_connections", "_deadline", "_served", "_socket", "_taken", "refused_body", "stage")

    def __init__(self, connections: Connections, sock: socket.socket, http: web.Server, **settings: Any) -> None:
        super().__init__(http, **settings)
        self.stage = Stage.ACCEPTED
        self._connections = connections
        self._socket = sock
        self._deadline: asyncio.TimerHandle | None = None
        self._served = False
        self._taken = 0  # bytes of the request that is being read
        self._body: StreamReader | None = None
        self.refused_body = False
        """Whether nothing more is read, as the chunks of a body were too small."""

    def data_received(self, data: bytes) -> None:
        """Takes in what has come."""
        if data:  # what came before has been taken apart by now, as reading goes on
            self._check_framing()
        if not self.refused_body:
            self._taken += len(data)
            super().data_received(data)

    def _check_framing(self) -> None:
        """Refuses the rest of a body that came in too small chunks."""
        body = self._body
        if body is None or body.is_eof() or self.refused_body:
            return
        if self._taken - body.total_bytes <= FRAMING + body.total_bytes // FRAMING_SHARE:
            return
        self.refused_body = True
        if self.stage is Stage.ANSWERING:
            body.set_exception(
                Refused(400, "the chunks of the body are too small; send longer ones", {"Connection": "close"})
            )
        else:  # it has its answer
            self.cut()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self._connections.moved(self, Stage.SILENT)
        self._cut_after(self.keepalive_timeout)  # a first request begins before that

    def connection_lost(self, exc: BaseException | None) -> None:
        """Takes note of the end."""
        self._connections.closed(self)
        self._cut_after(None)
        super().connection_lost(exc)

    def begin(self, request: web.BaseRequest) -> None:
        """Takes note of a request."""
        self._cut_after(None)
        self._connections.moved(self, Stage.ANSWERING)
        self._body = request.content

    def end(self, response: web.StreamResponse | None) -> None:
        """Takes note of the end of a request, and how it was answered."""
        if response is not None and response.status not in _IN_VAIN:
            self._served = True
        self._connections.moved(self, Stage.SERVED if self._served else Stage.REFUSED)
        if self._body is not None and self._body.is_eof():
            self._taken, self._body = 0, None
        if response is None or not response.keep_alive:
            self._cut_after(self.keepalive_timeout)

    def force_close(self) -> None:
        """Closes the connection once what was written is sent, or soon in any case."""
        super().force_close()
        self._cut_after(_LINGER)

    def cut(self) -> None:
        """Ends the connection at once, whatever is still to be sent, in whatever stage it is."""
        self._cut_after(None)
        if self.transport is not None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)

    def _cut_after(self, seconds: float | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self._loop.call_later(seconds, self.cut)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Logs what is a fault of this server; bytes of a client that are no request stay out of the log."""
        if not isinstance(kw.get("exc_info"), HttpProcessingError):
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no request, or where this server is at fault; the connection is closed."""
        if status >= 500:
            _log.error("a request from %s could not be answered", request.remote, exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer had begun")
        said = "the server is at fault; its log tells more" if status >= 500 else "that is no request of HTTP/1.1"
        response = answer(status, {"error": said})
        response.force_close()
        return response
