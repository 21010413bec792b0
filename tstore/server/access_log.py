"""The log of a server: what was asked and answered, as documents, and nothing secret.

`tstore.server.access` gets one entry a request, with a `document` that `JsonLines` makes a line of: from where,
the method, the path without its query, the status, the scope of the token, bytes received and sent (of objects),
and seconds.

What clients can bring about is logged at a bounded rate (`Sparing`), their requests apart: a few entries of a kind
in each period, and how many were left out.

`written` puts the entries on a queue of bounded length, from which a thread of the standard library writes them: a
reader that is slow, or gone, costs entries, whose number is told, and delays no request.
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

__all__ = ["AccessLog", "JsonLines", "Sparing", "tally", "written"]

_LONGEST = 300
_WAITING = 10_000  # entries
_PATIENCE = 2.0  # seconds that entries are given at the end
_FEW, _PERIOD = 5, 10.0  # entries of one place, and seconds


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


@contextlib.contextmanager
def written(descriptor: int) -> Iterator[None]:
    """Has what servers log written to a file or pipe, as lines of JSON, as long as the block takes."""
    entries: queue.Queue[logging.LogRecord] = queue.Queue(_WAITING)
    handler = _Queued(entries)
    writer = logging.handlers.QueueListener(entries, _Lines(descriptor))
    logs, sparing = [logging.getLogger("tstore.server"), logging.getLogger("asyncio")], Sparing()
    logs[0].setLevel(logging.INFO)
    for log in logs:
        log.addHandler(handler)
        log.addFilter(sparing)  # of what is logged there, not of the requests below it
    writer.start()
    try:
        yield
    finally:
        for log in logs:
            log.removeHandler(handler)
            log.removeFilter(sparing)
        logs[0].setLevel(logging.NOTSET)
        with entries.all_tasks_done:
            done = entries.all_tasks_done.wait_for(lambda: not entries.unfinished_tasks, _PATIENCE)
        if done:  # else nobody reads; the thread ends with the process
            handler.tell_dropped()
            writer.stop()


class Sparing(logging.Filter):
    """Passes a few entries of each line of code in a period; the first of the next tells how many it left out."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, int], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the entry is logged."""
        place = record.pathname, record.lineno
        begin, count = self._counts.get(place, (0.0, 0))
        if record.created - begin < _PERIOD:
            self._counts[place] = begin, count + 1
            return count < _FEW
        self._counts[place] = record.created, 1
        if count > _FEW:
            record.msg = f"{record.getMessage()} ({count - _FEW} more such entries were left out)"
            record.args = None
        return True


class _Queued(logging.handlers.QueueHandler):
    """Leaves entries to another thread; those for which there is no room are counted."""

    def __init__(self, entries: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(entries)
        self._dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """The entry itself: it does not leave the process."""
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """Puts it on the queue."""
        try:
            self.tell_dropped()
            self.queue.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def tell_dropped(self) -> None:
        """Puts how many were dropped since it was told last, if any, on the queue; `queue.Full`."""
        if self._dropped:
            said = f"{self._dropped} entries of the log were dropped, since they were read too slowly"
            told = logging.LogRecord("tstore.server", logging.WARNING, __file__, 0, said, None, None)
            self.queue.put_nowait(told)
            self._dropped = 0


class _Lines(logging.Handler):
    """Writes entries to a descriptor; one that nobody reads any more costs nothing but the entries."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self.setFormatter(JsonLines())

    def createLock(self) -> None:
        """Makes none: one thread writes, and the end of the process would wait for one that nobody reads."""
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one."""
        line = f"{self.format(record)}\n".encode()
        with contextlib.suppress(OSError):
            while line:
                line = line[os.write(self._descriptor, line) :]
