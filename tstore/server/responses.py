"""What the server says when it does not give or take an object; every answer is one sentence of JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web

import tstore
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

__all__ = ["NAME", "Refused", "answer", "headers", "refusal_of"]

NAME = f"tstore/{tstore.__version__}"

_log = logging.getLogger("tstore.server")

_SAID: list[tuple[type[TStoreError], int, str]] = [
    (AlreadyExists, 412, "the name is taken; what stands there was left as it is"),
    (NotFound, 404, "there is no such object"),
    (InvalidArgument, 400, "there can be no object of that name"),
    (Denied, 403, "the server may not do that with its storage, which may be read-only; its log tells more"),
    (StorageFull, 507, "its storage is full, and nothing that is stored was harmed"),
    (Throttled, 503, "the server's storage refuses for now; try again"),
    (Unavailable, 503, "the server's storage does not answer; try again"),
]


class Refused(Exception):
    """A request that is not done, with the status that tells why."""

    def __init__(self, status: int, message: str, more: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.message = message
        self.more = dict(more or {})
        super().__init__(message)


def refusal_of(error: TStoreError) -> Refused:
    """How an error of the storage is told to a client: without the paths of this machine, which are logged."""
    odd = (500, "the server's storage is not as it should be; its log tells more")
    status, said = next(((status, said) for kind, status, said in _SAID if isinstance(error, kind)), odd)
    if status not in (404, 412):
        _log.warning("%s: %s", type(error).__name__, error)
    return Refused(status, said, {"Retry-After": "1"} if status == 503 else None)


def headers(**more: str) -> dict[str, str]:
    """The headers of every answer, and these."""
    return {"Server": NAME, "X-TStore-Version": tstore.__version__, "X-Content-Type-Options": "nosniff"} | more


def answer(
    status: int, document: Mapping[str, Any] | None = None, more: Mapping[str, str] | None = None
) -> web.Response:
    """A document as the answer."""
    body = b"" if document is None else json.dumps(document).encode()
    said = headers() | {"Cache-Control": "no-store"} | dict(more or {})
    return web.Response(status=status, body=body, headers=said, content_type="application/json")
