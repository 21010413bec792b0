"""A store over HTTP/1.1: `tstore serve STORE`, or `async with Server("folder") as server: …`, at `server.url`.

Read `app` first: it has the dialect.
"""

from __future__ import annotations

from tstore.server.access import Access, Scope
from tstore.server.journal import JsonLines, written
from tstore.server.limits import Limits
from tstore.server.running import Certificate, Server

__all__ = ["Access", "Certificate", "JsonLines", "Limits", "Scope", "Server", "written"]
