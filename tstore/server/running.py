"""A server that runs: its socket, its connections, and its end."""

from __future__ import annotations

import asyncio
import os
import ssl
from types import TracebackType

from aiohttp import web

from tstore.kv.local import LocalBackend
from tstore.kv.url import connect
from tstore.server.app import App
from tstore.server.folder import ServedFolder
from tstore.server.limits import LIMITS, PIECE, Limits
from tstore.server.names import Names
from tstore.server.served import Served

__all__ = ["Server"]

_LINGER = 5.0


class Server:
    """Serves a store over HTTP, on the loop that enters it, until the block ends."""

    def __init__(
        self,
        store: str | os.PathLike[str],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        names: Names = "layout",
        limits: Limits = LIMITS,
    ) -> None:
        self.store = os.fspath(store)
        self._host, self._port = host, port
        self._names = names
        self._limits = limits
        self._tls: ssl.SSLContext | None = None

    @property
    def url(self) -> str:
        """The URL under which the store is served."""
        host, port = self._listening.sockets[0].getsockname()[:2]
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def __aenter__(self) -> Server:
        backend = connect(self.store)
        served = ServedFolder(backend) if isinstance(backend, LocalBackend) else Served(backend)
        self._app = App(served, self._names, self._limits)
        self._http = web.Server(
            self._app.answer,
            keepalive_timeout=self._limits.idle,
            lingering_time=_LINGER,
            read_bufsize=PIECE,
            auto_decompress=False,
        )
        self._listening = await asyncio.get_running_loop().create_server(
            self._http, self._host, self._port, ssl=self._tls
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.close()
        self._app.draining = True
        await asyncio.sleep(0)
        self._http.pre_shutdown()
        await self._http.shutdown(self._limits.drain)
        await self._app.served.backend.close()
