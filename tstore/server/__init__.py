"""A store over HTTP/1.1: `tstore serve`, or `async with Server("folder") as server: server.url`."""

from __future__ import annotations

from tstore.server.limits import Limits
from tstore.server.running import Server

__all__ = ["Limits", "Server"]
