"""JSON responses and their headers, and the mapping from errors to status codes."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from tstore.errors import (
    AlreadyExists,
    Denied,
    InvalidArgument,
    NotFound,
    StorageFull,
    Throttled,
    TStoreError,
    Unavailable,
)

__all__ = ["Refused", "common_headers", "json_response", "refusal_from"]

_VERSION = importlib.metadata.version("tstore")
_log = logging.getLogger("tstore.server")

_RESPONSES: list[tuple[type[TStoreError], int, str]] = [
    (AlreadyExists, 412, "the object already exists; it was not changed"),
    (NotFound, 404, "there is no such object"),
    (InvalidArgument, 400, "no object can have that name"),
    (Denied, 403, "the server's storage denied the operation (it may be read-only); see the server's log"),
    (StorageFull, 507, "the server's storage is full; stored objects are not affected"),
    (Throttled, 503, "the server's storage is throttling requests; try again"),
    (Unavailable, 503, "the server's storage does not respond; try again"),
]


class Refused(Exception):
    """A request that the server refuses, with the status, message and headers of the response."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.message = message
        self.headers = dict(headers or {})
        super().__init__(message)


def refusal_from(error: TStoreError) -> Refused:
    """Translate an error of the storage for a client; its message, which may contain paths, is not sent."""
    default = (500, "the server's storage failed; see the server's log")
    status, message = next(((s, text) for type_, s, text in _RESPONSES if isinstance(error, type_)), default)
    if status not in (404, 412):
        _log.warning("%s: %s", type(error).__name__, error)
    return Refused(status, message, {"Retry-After": "1"} if status == 503 else None)


def common_headers(**headers: str) -> dict[str, str]:
    """Return the headers of every response, and further `headers`."""
    always = {"Server": f"tstore/{_VERSION}", "X-TStore-Version": _VERSION, "X-Content-Type-Options": "nosniff"}
    return always | headers


def json_response(
    status: int, document: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return a response with a document as its body."""
    body = b"" if document is None else json.dumps(document).encode()
    combined = common_headers() | {"Cache-Control": "no-store"} | dict(headers or {})
    return web.Response(status=status, body=body, headers=combined, content_type="application/json")
