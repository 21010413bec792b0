"""The log of a server: one JSON entry per request, without secrets, written off the event loop.

The logger `tstore.server.access` gets one entry per request, with a `document` that `JsonLines` formats as a line:
the remote address, method, path without its query, status, scope of the token, bytes of objects received and sent,
and seconds.

Other entries that clients can cause are rate-limited (`RateLimit`). `logging_to` puts the entries on a bounded
queue, from which a thread writes them. So a slow or vanished reader of the log delays no request. While the queue
is full, new entries are dropped, and their number is logged.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import logging.handlers
import os
import queue
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

__all__ = ["AccessLog", "JsonLines", "RateLimit", "current_tally", "logging_to"]

_MAX_PATH = 300
_MAX_QUEUED = 10_000  # entries
_FLUSH_TIMEOUT = 2.0  # seconds to write the queued entries at the end
_MAX_ENTRIES, _PERIOD = 5, 10.0  # entries from one line of code per period; seconds of a period


class Tally:
    """The figures of one request for its log entry: the scope, and bytes received and sent."""

    scope = "none"
    received = 0
    sent = 0


_tally: ContextVar[Tally | None] = ContextVar("tstore_server_tally", default=None)


def current_tally() -> Tally:
    """Return the tally of the request that the running task handles."""
    tally = _tally.get()
    if tally is None:
        _tally.set(tally := Tally())
    return tally


class AccessLog(AbstractAccessLogger):
    """Logs each request with its response."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        """Log a request."""
        tally = current_tally()
        document = {
            "remote": request.remote,
            "method": request.method[:16],
            "path": request.raw_path.partition("?")[0][:_MAX_PATH],
            "status": response.status,
            "scope": tally.scope,
            "received": tally.received,
            "sent": tally.sent,
            "seconds": round(time, 6),
        }
        self.logger.info("%(method)s %(path)s: %(status)s", document, extra={"document": document})

    @property
    def enabled(self) -> bool:
        """Whether the entries are handled at all."""
        return self.logger.isEnabledFor(logging.INFO)


class JsonLines(logging.Formatter):
    """Formats each entry as one line of ASCII JSON, so that text from a client can't start a new line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "log": record.name}
        document = getattr(record, "document", None)
        line |= document if document is not None else {"message": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


@contextlib.contextmanager
def logging_to(descriptor: int) -> Iterator[None]:
    """Write the logs of servers to a file or pipe, as lines of JSON, during the block."""
    entries: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_QUEUED)
    handler = _LossyQueueHandler(entries)
    writer = logging.handlers.QueueListener(entries, _DescriptorHandler(descriptor))
    logs, limit = [logging.getLogger("tstore.server"), logging.getLogger("asyncio")], RateLimit()
    logs[0].setLevel(logging.INFO)
    for log in logs:
        log.addHandler(handler)
        log.addFilter(limit)  # applies to this logger only, not to the access log below it
    writer.start()
    try:
        yield
    finally:
        for log in logs:
            log.removeHandler(handler)
            log.removeFilter(limit)
        logs[0].setLevel(logging.NOTSET)
        with entries.all_tasks_done:
            done = entries.all_tasks_done.wait_for(lambda: not entries.unfinished_tasks, _FLUSH_TIMEOUT)
        if done:  # otherwise nobody reads the pipe; the thread ends with the process
            handler.report_dropped()
            writer.stop()


class RateLimit(logging.Filter):
    """Passes a few entries from each line of code per period; the next entry tells how many were omitted."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log an entry."""
        source = record.pathname, record.lineno
        start, count = self._counts.get(source, (0.0, 0))
        if record.created - start < _PERIOD:
            self._counts[source] = start, count + 1
            return count < _MAX_ENTRIES
        self._counts[source] = record.created, 1
        if count > _MAX_ENTRIES:
            record.msg = f"{record.getMessage()} ({count - _MAX_ENTRIES} more such entries were omitted)"
            record.args = None
        return True


class _LossyQueueHandler(logging.handlers.QueueHandler):
    """Queues entries for another thread; counts those dropped because the queue is full."""

    def __init__(self, entries: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(entries)
        self._dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return the entry itself: it does not leave the process."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Queue an entry, or count it as dropped."""
        try:
            self.report_dropped()
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def report_dropped(self) -> None:
        """Queue an entry with the number of entries dropped since the last report, if any; raise `queue.Full`."""
        if self._dropped:
            message = f"{self._dropped} log entries were dropped because the log is read too slowly"
            entry = logging.LogRecord("tstore.server", logging.WARNING, __file__, 0, message, None, None)
            self.queue.put_nowait(entry)
            self._dropped = 0


class _DescriptorHandler(logging.Handler):
    """Writes entries to a file descriptor; discards them if it is closed."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.setFormatter(JsonLines())

    def createLock(self) -> None:
        """Create no lock: only one thread writes, and a stuck write would hold the lock when the process exits."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write an entry."""
        line = f"{self.format(record)}\n".encode()
        with contextlib.suppress(OSError):
            while line:
                line = line[os.write(self._descriptor, line) :]
