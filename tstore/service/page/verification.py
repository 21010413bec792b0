"""A verification of the store as a job of the server: one at a time, started and stopped by forms of the page."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import time
from typing import Any

from tstore.core.maintenance.verify import VerifyProgress, VerifyReport
from tstore.core.runtime.event_loops import LoopCall
from tstore.errors import TStoreError
from tstore.service.page.opening import OpenStore, start_apart

__all__ = ["Verification"]

_log = logging.getLogger("tstore.server")

_MAX_FAULTS = 1000  # in a document; the report of the command has all


class Verification:
    """The job, with the report of the last one that ended."""

    def __init__(self) -> None:
        self._call: LoopCall[None] | None = None
        self._progress = VerifyProgress(0, 0)
        self._report: VerifyReport | None = None
        self._error = ""
        self._started = 0.0
        self._seconds = 0.0
        self._ended: datetime.datetime | None = None

    @property
    def running(self) -> bool:
        """Whether the job is under way."""
        return self._call is not None and not self._call.future.done()

    def start(self, store: OpenStore) -> None:
        """Start the job, unless it is under way."""
        if not self.running:
            self._progress, self._started = VerifyProgress(0, 0), time.monotonic()
            self._report, self._error = None, ""  # a report of before must not stand for a job that was stopped
            self._call = start_apart(self._run(store))

    async def stop(self) -> None:
        """Stop the job, if it is under way, and wait for its end."""
        if self._call is not None:
            self._call.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wrap_future(self._call.future)

    async def _run(self, store: OpenStore) -> None:
        try:
            self._report = await (await store.get()).verify(self._note)
        except TStoreError as error:
            self._error = str(error)
        except asyncio.CancelledError:
            self._error = "it was stopped before its end"
            raise
        except Exception:
            self._error = "internal error; see the server's log"
            _log.exception("the verification of the store failed")
        finally:
            self._seconds = time.monotonic() - self._started
            self._ended = datetime.datetime.now(datetime.UTC)

    def _note(self, progress: VerifyProgress) -> None:
        self._progress = progress

    def document(self) -> dict[str, Any]:
        """Return the state of the job as JSON values."""
        report = self._report
        return {
            "running": self.running,
            "progress": self._progress._asdict() if self.running else None,
            "seconds": round(time.monotonic() - self._started if self.running else self._seconds, 1),
            "ended": None if self._ended is None else self._ended.isoformat(),
            "error": self._error,
            "report": None
            if report is None
            else {
                "ok": report.ok,
                **report._asdict(),
                "faults": report.faults[:_MAX_FAULTS],
                "foreign": report.foreign[:_MAX_FAULTS],
                "fault_count": len(report.faults),
                "foreign_count": len(report.foreign),
            },
        }
