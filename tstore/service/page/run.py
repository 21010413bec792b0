"""The Run view: the steps of a store on a time line, their copies in low bits, and what retention would remove."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence

import msgspec

from tstore.core.format.arguments import quote
from tstore.core.format.tree.retention import Best, Keep
from tstore.core.maintenance.contents import detailed_listing
from tstore.core.store import Store
from tstore.errors import Corrupt, InvalidArgument, NotFound
from tstore.quantization.report import read_report
from tstore.service.page import hosts, status
from tstore.service.page.timeline import Row, read_timeline
from tstore.service.page.views import Document, Query, natural_order, shell_command

__all__ = ["load", "load_version"]

_ROWS = 50
_MAX_METRICS = 32  # metrics in the series
_MAX_VERSIONS = 512  # versions whose details are kept in memory


async def load(query: Query) -> Document:
    """Return the steps of the store, the other commits, and what rules for retention would remove.

    If the store has no steps, the rows are its versions. Rows and other commits are one page: the newest ones, or
    those before the version `before`; series cover all.
    """
    current = await read_timeline(query)
    rows = current.rows
    keep = _keep(query)
    removed = None if keep is None else await _removed(query.store, keep)
    expiring = set(removed["versions"]) if removed else set()
    below = query.number("before") or math.inf
    page = [row for row in rows if row.version < below]
    shown = page[-_ROWS:][::-1]
    main = {row.version for row in rows} | {copy.version for row in rows for copy in row.copies}
    entries = [commit.entry for commit in current.commits]
    others = [
        msgspec.structs.replace(entry, expiring=entry.version in expiring)
        for entry in entries
        if entry.version not in main and entry.version < below
    ]
    return {
        "command": shell_command("log", [query.address])
        if removed is None
        else shell_command("gc", [query.address], [*_options(query), "--dry-run"]),
        "python": _python(query, keep),
        "version": current.version,
        "unit": "version" if not rows or rows[0].step is None else "step",
        "count": len(rows),
        "status": status.describe(query, current, await hosts.load(query), query.results.newest("nonfinite")),
        "rows": [row.shown(expiring) for row in shown],
        "older": shown[-1].version if len(page) > len(shown) else None,
        "newer": None if math.isinf(below) else True,
        "series": _series(rows),
        "others": others[:_ROWS],
        "other_count": len(others),
        "keep": {name: query.text(name) for name in _RULES},
        "removed": removed,
    }


async def load_version(query: Query) -> Document:
    """Return the bytes that a version stores and shares with earlier ones; for a quantized one, also its error."""
    version = query.number("at")
    if version is None:
        raise InvalidArgument("at: expected a version")
    return await query.results.get(
        "version", (query.store, version), lambda: _details(query.store, version), most=_MAX_VERSIONS
    )


async def _details(store: Store, version: int) -> Document:
    snapshot = await store.snapshot(version)
    total = (await detailed_listing(store.log.reader, snapshot)).total
    details: Document = {"version": version, **msgspec.structs.asdict(total), "sqnr_db": None, "quantized": False}
    try:
        report = read_report(snapshot).document()["total"]
    except (NotFound, Corrupt):  # no quantized copy, or its report is damaged or forged
        return details
    return details | {"sqnr_db": report["sqnr_db"], "bits_per_value": report["bits_per_value"], "quantized": True}


def _series(rows: Sequence[Row]) -> Document:
    """Return columns over all rows: the steps or versions, their metrics, bytes and seconds."""
    entries = [row.commit.entry for row in rows]
    names = list(dict.fromkeys(name for entry in entries for name in entry.metrics))
    return {
        "x": [row.version if row.step is None else row.step for row in rows],
        "versions": [row.version for row in rows],
        "bytes_added": [entry.bytes_added for entry in entries],
        "seconds": [row.seconds for row in rows],
        "metrics": {name: [entry.metrics.get(name) for entry in entries] for name in names[:_MAX_METRICS]},
        "metric_count": max([len(names), *(entry.metric_count for entry in entries)]),
    }


_RULES = ("keep_last", "keep_every", "keep_best", "keep_tags", "keep_days", "keep_copies")


def _keep(query: Query) -> Keep | None:
    """Return the rules in the parameters, or None if there are none."""
    best: Best | None = None
    if text := query.text("keep_best"):
        count, _, metric = text.partition(":")
        if not (count.isascii() and count.isdigit() and len(count) < 10 and metric):
            raise InvalidArgument(f"keep_best={quote(text)}: expected N:METRIC or N:METRIC:max, such as 3:loss")
        highest = metric.endswith(":max")
        best = (int(count), metric.removesuffix(":max"), "max" if highest else "min")
    days = query.number("keep_days")
    tags = tuple(tag for tag in (part.strip() for part in query.text("keep_tags").split(",")) if tag)
    if not any(query.text(name) for name in _RULES):
        return None
    return Keep(
        last=query.number("keep_last"),
        every=query.number("keep_every"),
        best=best,
        newer_than=None if days is None else datetime.timedelta(days=min(days, 100_000)),
        tags=tags,
        copies=query.number("keep_copies"),
    )


async def _removed(store: Store, keep: Keep) -> Document:
    """Return what a collection with these rules would remove; nothing is removed."""
    report = await store.collect(keep, dry_run=True)
    removed = {name: getattr(report, name) for name in ("versions", "tags", "abandoned", "objects", "bytes")}
    return removed | {"tags": sorted(report.tags, key=natural_order)}


def _options(query: Query) -> list[str]:
    """Return the rules as options of `tstore gc`."""
    options = []
    for name in ("keep_last", "keep_every", "keep_best", "keep_copies"):
        if text := query.text(name):
            options += [f"--{name.replace('_', '-')}", text]
    for tag in query.text("keep_tags").split(","):
        if tag.strip():
            options += ["--keep-tag", tag.strip()]
    if days := query.text("keep_days"):
        options += ["--keep-days", days]
    return options


def _python(query: Query, keep: Keep | None) -> str:
    opening = f"import tstore.sync as tstore\n\nstore = tstore.open({query.address!r}, 'r')\n"
    if keep is None:
        return opening + "for commit in store.history():\n    print(commit)"
    rules = {name: value for name, value in vars(keep).items() if value not in (None, ())}
    arguments = ", ".join(f"{name}={value!r}" for name, value in rules.items())
    imports = "import datetime\n" if "newer_than" in rules else ""
    return f"{imports}{opening}print(store.collect(tstore.Keep({arguments}), dry_run=True))"
