"""The listening sockets of a server.

`asyncio.create_server` reports a TLS connection only after its handshake, so connections that never finish one
could be neither counted nor closed. Here each connection is accepted individually, one per iteration of the event
loop, and counted (`connections`) before its handshake starts.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl

from tstore.errors import Denied, Unavailable
from tstore.service.server.connections import Connections

__all__ = ["Listener"]

_BACKLOG = 512
_HANDSHAKE_TIMEOUT = 10.0
_SHUTDOWN_TIMEOUT = 2.0  # seconds for a client to answer close_notify of TLS
_PAUSE = 0.1
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_log = logging.getLogger("tstore.server")


class Listener:
    """Accepts connections on the addresses of a host, from `open` until `close`."""

    def __init__(self, connections: Connections, tls: ssl.SSLContext | None) -> None:
        self._connections = connections
        self._tls = tls
        self._sockets: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._handshakes: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> tuple[str, int]:
        """The first address, and its port."""
        host, port = self._sockets[0].getsockname()[:2]
        return host, port

    async def open(self, host: str, port: int) -> None:
        """Listen on every address of the host; raise `Denied` or `Unavailable`."""
        loop = asyncio.get_running_loop()
        try:
            # only to resolve the host and bind its addresses; `bound` accepts no connection
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
        """Stop accepting connections."""
        for task in self._accepting:
            task.cancel()

    async def close(self) -> None:
        """Stop, and wait for handshakes under way. The caller must have closed all established connections."""
        self.stop()
        for tasks in (self._accepting, self._handshakes):
            await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._sockets:
            sock.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    _log.warning("a connection could not be accepted: %s", error.strerror)
                    self._connections.make_room()
                    await asyncio.sleep(_PAUSE)
            else:
                handshake = loop.create_task(self._handshake(sock))
                self._handshakes.add(handshake)
                handshake.add_done_callback(self._handshakes.discard)
            await asyncio.sleep(0)  # since sock_accept does not yield while connections are queued

    async def _handshake(self, sock: socket.socket) -> None:
        """Count an accepted connection and complete its TLS handshake, if it uses TLS."""
        connection = self._connections.add(sock)
        if connection is None:
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(
                lambda: connection,
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_TIMEOUT,
                ssl_shutdown_timeout=None if self._tls is None else _SHUTDOWN_TIMEOUT,
            )
        except OSError as error:  # ssl.SSLError is a subclass
            self._connections.remove(connection)
            _log.info("a connection failed in its TLS handshake: %s", error)
            error.__traceback__ = error.__context__ = None  # break a cycle that keeps 256 KiB of TLS buffers
