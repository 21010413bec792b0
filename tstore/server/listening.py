"""Where a server listens, and how connections come in.

The loop of `asyncio.create_server` tells of a TLS connection only once its handshake is done, so that those that
never finish one are neither counted nor can be ended. Here each is accepted by itself, one in a turn of the event
loop, and counted (`connections`) before its handshake begins.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl

from tstore.errors import Denied, Unavailable
from tstore.server.connections import Connections

__all__ = ["Listening"]

_BACKLOG = 512
_HANDSHAKE = 10.0
_GOODBYE = 2.0  # seconds in which a client answers the end of TLS
_PAUSE = 0.1
_NO_MORE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_log = logging.getLogger("tstore.server")


class Listening:
    """Accepts connections on the addresses of a host, from `open` until `close`."""

    def __init__(self, connections: Connections, tls: ssl.SSLContext | None) -> None:
        self._connections = connections
        self._tls = tls
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> tuple[str, int]:
        """The first address, and its port."""
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    async def open(self, host: str, port: int) -> None:
        """Listens on every address of the host; raises `Denied`, `Unavailable`."""
        loop = asyncio.get_running_loop()
        try:
            bound = await loop.create_server(asyncio.Protocol, host, port, start_serving=False)
        except PermissionError as error:
            raise Denied(f"can't listen on {host}:{port}: {error.strerror}; try another port") from error
        except socket.gaierror as error:
            raise Unavailable(
                f"can't listen on {host}: {error.strerror}; pass an address of this machine"
            ) from error
        except (OSError, OverflowError) as error:
            raise Unavailable(
                f"can't listen on {host}:{port}: {error}; pass another port, or 0 for any free one"
            ) from error
        self._sockets = [sock.dup() for sock in bound.sockets]
        bound.close()
        for sock in self._sockets:
            sock.setblocking(False)
            sock.listen(_BACKLOG)
        self._accepting = [loop.create_task(self._accept(sock)) for sock in self._sockets]

    def stop(self) -> None:
        """Accepts no more."""
        for task in self._accepting:
            task.cancel()

    async def close(self) -> None:
        """Stops, and waits until nothing is left that comes in; connections should be closed before."""
        self.stop()
        for tasks in (self._accepting, self._connecting):
            await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._sockets:
            sock.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in _NO_MORE:
                    _log.warning("a connection could not be accepted: %s", error.strerror)
                    self._connections.make_room()
                    await asyncio.sleep(_PAUSE)
            else:
                connecting = loop.create_task(self._connect(sock))
                self._connecting.add(connecting)
                connecting.add_done_callback(self._connecting.discard)
            await asyncio.sleep(0)  # accepting does not wait while there are more

    async def _connect(self, sock: socket.socket) -> None:
        connection = self._connections.accepted(sock)
        if connection is None:
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE,
                ssl_shutdown_timeout=None if self._tls is None else _GOODBYE,
            )
        except OSError as error:  # as those of TLS are
            self._connections.closed(connection)
            _log.info("a connection ended before its TLS handshake did: %s", error)
            error.__traceback__ = error.__context__ = (
                None  # its frames hold a quarter of a MiB for TLS, in a cycle
            )
