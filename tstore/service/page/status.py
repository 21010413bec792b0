"""The Status view, also a part of Run: whether a run proceeds as usual, judged by cheap checks.

Four facts have a state, "good", "warn" or "bad", or "" if there is nothing to judge: the age of the newest step,
the hosts under way, whether its values are finite, and the result of the last verification. The worst is the
state of the run.
"""

from __future__ import annotations

import datetime
import math
import statistics
import time

from tstore.core.format.arguments import step_number
from tstore.errors import Corrupt, InvalidArgument, NotFound
from tstore.service.page import hosts
from tstore.service.page.timeline import Row, Timeline, read_timeline
from tstore.service.page.views import Document, Query, shell_command
from tstore.service.statistics.nonfinite import find_nonfinite

__all__ = ["describe", "load"]

_RECENT = 20  # the usual interval is the median over this many steps
_LATE, _LEAST = 3.0, 60.0
"""A step is late after this many of the usual intervals, and after at least this many seconds."""
_WORST = ("bad", "warn", "good", "")


async def load(query: Query) -> Document:
    """Return the status of the run and the hosts under way; read a sample of the newest step if nobody has yet."""
    timeline = await read_timeline(query)
    found = None
    if timeline.rows:
        version = timeline.rows[-1].version
        found = await query.results.get(
            "nonfinite", (query.store, version), lambda: _nonfinite(query, version), most=1
        )
    pending = await hosts.load(query)
    return {
        **pending,
        "command": shell_command("log", [query.address]),
        "python": "\n".join(
            [
                "import tstore.sync as tstore",
                "",
                f"store = tstore.open({query.address!r}, 'r')",
                "print(next(store.history()))",
                "print(store.pending())",
            ]
        ),
        "status": describe(query, timeline, pending, found),
    }


async def _nonfinite(query: Query, version: int) -> Document:
    """Search a version for NaN and infinity, and return the result."""
    try:
        found = await find_nonfinite(await query.store.snapshot(version))
    except (Corrupt, NotFound, InvalidArgument) as error:  # not temporary
        return {"version": version, "problem": query.message(error), "found": {}, "values_read": 0}
    return {"version": version, "problem": None, **found._asdict()}


def describe(query: Query, timeline: Timeline, pending: Document, found: Document | None) -> Document:
    """Return the status; `pending` is what `hosts.load` returned, and `found` the last search for NaN, if any."""
    rows = timeline.rows
    newest = rows[-1] if rows else None
    facts: dict[str, Document | None] = {
        "step": _step(rows) if rows else None,
        "hosts": _hosts(newest, pending),
        "values": _values(newest, found) if newest else None,
        "verified": _verified(query.verification.document()),
    }
    states = {name: fact["state"] for name, fact in facts.items() if fact}
    state = min(states.values(), key=_WORST.index)
    return {
        "state": state,
        "look_at": [name for name, of in states.items() if of == state and state in ("bad", "warn")],
        "bytes_added": sum(commit.entry.bytes_added for commit in timeline.commits),
        **facts,
    }


def _step(rows: list[Row]) -> Document:
    """Return the age of the newest step, and the usual interval between steps, in seconds."""
    newest = rows[-1]
    intervals = [row.seconds for row in rows[-_RECENT:] if row.seconds is not None and row.seconds > 0]
    usual = statistics.median(intervals) if intervals else None
    now = datetime.datetime.fromtimestamp(time.time(), datetime.UTC)
    age = max(0.0, (now - newest.commit.time).total_seconds())
    late = usual is not None and age > max(_LATE * usual, _LEAST)
    return {
        "state": "" if usual is None else "warn" if late else "good",
        "step": newest.step,
        "version": newest.version,
        "age": round(age, 3),
        "usual": usual,
        "bytes_added": newest.commit.entry.bytes_added,
    }


def _hosts(newest: Row | None, pending: Document) -> Document:
    """Return how many hosts saved the newest step, and what is under way, those with hosts at work first.

    An attempt without hosts at a step that later ones follow is what a killed job has left.
    """
    passed = -1 if newest is None or newest.step is None else newest.step
    current = [
        t
        for t in sorted(pending["pending"], key=lambda t: not t["active"])
        if t["committed"] is None and t["withdrawn_by"] is None
        if t["active"] or (step := step_number(t["name"])) is None or step > passed
    ]
    stuck = any(not t["active"] or t["counts"]["silent"] for t in current)
    return {
        "state": "warn" if stuck else "good" if current else "",
        "hosts": None if newest is None else newest.commit.entry.hosts,
        "under_way": [{key: t[key] for key in ("name", "hosts", "active", "counts")} for t in current],
    }


def _values(newest: Row, found: Document | None) -> Document:
    """Return whether the metrics and the arrays of the newest step have NaN or infinity, as far as known."""
    wrong = [name for name, value in newest.commit.entry.metrics.items() if not math.isfinite(value)]
    if found is not None and found["version"] != newest.version:
        found = None
    bad = bool(wrong) or (found is not None and bool(found["problem"] or found["found"]))
    return {
        "state": "bad" if bad else "good" if found and found["values_read"] else "",
        "version": newest.version,
        "metrics": wrong,
        "search": found,
    }


def _verified(job: Document) -> Document:
    """Return the result of the last verification since the start of the server, and the time since its end."""
    report, ended = job["report"], job["ended"]
    age = None
    if ended is not None:
        age = max(0.0, time.time() - datetime.datetime.fromisoformat(ended).timestamp())
    return {
        "state": "" if report is None else "good" if report["ok"] else "bad",
        "running": job["running"],
        "faults": None if report is None else report["fault_count"],
        "age": age,
    }
