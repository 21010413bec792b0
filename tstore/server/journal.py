"""The log of a server: what was asked and answered, as documents, and nothing secret.

`tstore.server.access` gets one entry a request, with a `document` that `JsonLines` makes a line of: from where,
the method, the path without its query, the status, the scope of the token, bytes received and sent (of objects),
and seconds.
"""

from __future__ import annotations

import datetime
import json
import logging
from contextvars import ContextVar
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

__all__ = ["AccessLog", "JsonLines", "tally"]

_LONGEST = 300


class Tally:
    """What the answering of one request found out; it goes into the log."""

    def __init__(self) -> None:
        self.scope = "none"
        self.received = 0
        self.sent = 0


def tally() -> Tally:
    """That of the request that the running task answers."""
    found = _tally.get()
    if found is None:
        _tally.set(found := Tally())
    return found


_tally: ContextVar[Tally | None] = ContextVar("tstore_server_tally", default=None)


class AccessLog(AbstractAccessLogger):
    """Logs each request that was answered."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Logs one."""
        counted = tally()
        document = {
            "remote": request.remote,
            "method": request.method[:16],
            "path": request.raw_path.partition("?")[0][:_LONGEST],
            "status": response.status,
            "scope": counted.scope,
            "received": counted.received,
            "sent": counted.sent,
            "seconds": round(time, 6),
        }
        self.logger.info("%(method)s %(path)s: %(status)s", document, extra={"document": document})

    @property
    def enabled(self) -> bool:
        """Whether anybody listens."""
        return self.logger.isEnabledFor(logging.INFO)


class JsonLines(logging.Formatter):
    """Each entry as one line of JSON, in ASCII: what a client sent can't begin a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "log": record.name}
        document = getattr(record, "document", None)
        line |= document if document is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
