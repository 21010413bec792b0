"""Ports of localhost that no other process takes meanwhile."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def refusing() -> Iterator[str]:
    """Yield an address where connections are refused: a port that is taken, but nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def unused() -> int:
    """Return a free port for a server that must be told one; the kernel gives those above 32767 to anybody."""
    for port in random.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("100 ports are taken")
