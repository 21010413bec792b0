"""Sockets of connections to servers, which notice that the other machine is gone.

A server has a long time to respond to a long body (`limits.Deadline`). If its machine has vanished, or something
in between has dropped the connection silently, the kernel breaks the connection within two minutes.
"""

from __future__ import annotations

import socket

__all__ = ["open_socket"]

_GONE_SECONDS = 120
_OPTIONS = {  # as far as the system has them
    "TCP_KEEPIDLE": 30,
    "TCP_KEEPINTVL": 30,
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 1000 * _GONE_SECONDS,
}

_Address = tuple[int, int, int, str, tuple[object, ...]]


def open_socket(address: _Address) -> socket.socket:
    """Return a socket for an address as `socket.getaddrinfo` returns it."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS.items():
            if hasattr(socket, name):
                made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    except OSError:
        made.close()
        raise
    return made
