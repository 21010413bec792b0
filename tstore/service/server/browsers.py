"""The interface of the web page at `/-/page/`, which `tstore.service.page` implements."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from aiohttp import web

from tstore.core.storage.base import Storage
from tstore.service.server.access import Access, Scope

__all__ = ["PAGE", "Page", "Visit", "is_browser"]

PAGE = "/-/page/"
"""The path of the page; everything below it belongs to the page."""


class Visit(NamedTuple):
    """A request for the page, the tokens that the server accepts, and the highest scope that it grants.

    The Host header has been checked, the sender has not: a browser uses a session in place of a token.
    """

    request: web.BaseRequest
    access: Access
    max_scope: Scope


class Page(Protocol):
    """Shows the store behind a server to browsers. It must not block the event loop of the server."""

    async def open(self, storage: Storage) -> None:
        """Prepare for requests; `storage` is the one that the server serves, and stays open until `close`."""

    async def respond(self, visit: Visit) -> web.StreamResponse:
        """Return the response to a request for a path below `PAGE`."""

    async def close(self) -> None:
        """End all work in the background."""


def is_browser(request: web.BaseRequest) -> bool:
    """Return whether a request accepts HTML, as a browser does and a store client does not."""
    return request.method in ("GET", "HEAD") and "text/html" in request.headers.get("Accept", "")
