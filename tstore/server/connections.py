"""The connections of a server: how many there may be, and what is said where no request can be made out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from tstore.server.answers import answer
from tstore.server.journal import AccessLog
from tstore.server.limits import PIECE, Limits

__all__ = ["Connections"]

_LINGER = 2.0
_CUT = 0.1

_log = logging.getLogger("tstore.server")

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Connections:
    """Makes a connection for each client that calls; beyond the limit the longest open idle one has to go."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self._handler = handler
        self._most = limits.connections
        self._open: dict[_Connection, None] = {}
        self._http = web.Server(self._answer)
        self._settings: dict[str, Any] = {
            "loop": asyncio.get_running_loop(),
            "keepalive_timeout": limits.idle,
            "lingering_time": _LINGER,
            "read_bufsize": PIECE,
            "auto_decompress": False,
            "access_log_class": AccessLog,
            "access_log": logging.getLogger("tstore.server.access"),
            "logger": _log,
        }

    def __call__(self) -> web.RequestHandler:
        """A new connection."""
        return _Connection(self, self._http, **self._settings)

    async def close(self) -> None:
        """Closes all of them; requests should have ended."""
        self._http.pre_shutdown()
        await self._http.shutdown(_CUT)

    def opened(self, new: _Connection) -> None:
        """Makes room for a connection."""
        if len(self._open) >= self._most:
            gone = next((c for c in self._open if not c.answering), new)
            self._open.pop(gone, None)
            gone.force_close()
            if gone is new:
                return
        self._open[new] = None

    def closed(self, gone: _Connection) -> None:
        """Takes note that a connection has ended."""
        self._open.pop(gone, None)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, _Connection)
        connection.answering = connection.asked = True
        try:
            response = await self._handler(request)
            if response.status == 408:  # no use in waiting for the rest of the body
                await response.prepare(request)
                await response.write_eof()
                connection.force_close()
            return response
        finally:
            connection.answering = False


class _Connection(web.RequestHandler):
    __slots__ = ("_connections", "_first", "answering", "asked")

    def __init__(self, connections: Connections, http: web.Server, **settings: Any) -> None:
        super().__init__(http, **settings)
        self._connections = connections
        self._first: asyncio.TimerHandle | None = None
        self.answering = self.asked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.opened(self)
        # aiohttp watches over the head of a first request in its newest versions only
        self._first = asyncio.get_running_loop().call_later(self.keepalive_timeout, self._end_unasked)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.closed(self)
        if self._first is not None:
            self._first.cancel()
        super().connection_lost(exc)

    def _end_unasked(self) -> None:
        if not self.asked:
            self.force_close()

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
