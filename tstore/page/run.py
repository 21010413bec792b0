"""The view Run: the steps of a store on a time line, their copies in low bits, and what retention would remove."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import math
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from tstore.errors import Corrupt, InvalidArgument, NotFound
from tstore.format.arguments import quote
from tstore.format.objects.records import REPAIR
from tstore.format.tree.retention import Best, Keep
from tstore.log.expiry import last_collection
from tstore.log.history import Commit, history
from tstore.maintenance.contents import detailed_listing
from tstore.page.views import Document, Query, natural_order, shell_command
from tstore.quantization.report import read_report
from tstore.runtime.pool import run
from tstore.saved_steps import steps_of
from tstore.store import Store

__all__ = ["load", "load_version"]

_ROWS = 50
_MAX_METRICS = 32  # in the series
_MAX_ENTRIES = 64  # metrics of a commit, and tags that it set, moved or dropped
_MAX_MESSAGE = 4096  # characters
_MAX_NAMES = 1 << 14  # characters of the names of the metrics of one commit
_MAX_VERSIONS = 512  # whose details are kept in memory


async def load(query: Query) -> Document:
    """Return the steps of the store, the other commits, and what rules for retention would remove.

    A store without steps has its versions in their place. Rows and other commits are those of one page: the newest
    by default, or those before the version `before`; series have all.
    """
    newest = await query.store.log.reader.newest()
    before: _History | None = query.results.newest("history")
    current = await query.results.get(
        "history", (query.store, newest), lambda: _history(query.store, before), most=1
    )
    rows = current.rows
    keep = _keep(query)
    removed = None if keep is None else await _removed(query.store, keep)
    expiring = set(removed["versions"]) if removed else set()
    below = query.number("before") or math.inf
    page = [row for row in rows if row.version < below]
    shown = page[-_ROWS:][::-1]
    main = {row.version for row in rows} | {copy["version"] for row in rows for copy in row.copies}
    entries = [commit.entry for commit in current.commits]
    others = [
        entry | {"expiring": entry["version"] in expiring}
        for entry in entries
        if entry["version"] not in main and entry["version"] < below
    ]
    return {
        "command": shell_command("log", [query.address])
        if removed is None
        else shell_command("gc", [query.address], [*_options(query), "--dry-run"]),
        "python": _python(query, keep),
        "version": newest,
        "unit": "version" if not rows or rows[0].step is None else "step",
        "count": len(rows),
        "rows": [row.document(expiring) for row in shown],
        "older": shown[-1].version if len(page) > len(shown) else None,
        "newer": None if math.isinf(below) else True,
        "series": _series(rows),
        "others": others[:_ROWS],
        "other_count": len(others),
        "keep": {name: query.text(name) for name in _RULES},
        "removed": removed,
    }


async def load_version(query: Query) -> Document:
    """Return what one version stores, and shares with earlier ones; for a quantized one also its error."""
    version = query.number("at")
    if version is None:
        raise InvalidArgument("at: expected a version")
    return await query.results.get(
        "version", (query.store, version), lambda: _details(query.store, version), most=_MAX_VERSIONS
    )


async def _details(store: Store, version: int) -> Document:
    snapshot = await store.snapshot(version)
    total = (await detailed_listing(store.log.reader, snapshot))["total"]
    details: Document = {"version": version, **total, "sqnr_db": None, "quantized": False}
    try:
        report = read_report(snapshot).document()["total"]
    except (NotFound, Corrupt):  # no quantized copy, or its report is damaged or forged
        return details
    return details | {"sqnr_db": report["sqnr_db"], "bits_per_value": report["bits_per_value"], "quantized": True}


class _Commit(NamedTuple):
    """What the view keeps of a commit in memory, a bounded part of it."""

    entry: Document
    time: datetime.datetime
    source: int | None
    tags: tuple[str, ...]
    """The tags that the commit gave to its own version."""


class _Row(NamedTuple):
    """A step, or in a store without steps a version, with its quantized copies.

    Only the few rows shown at a time become documents.
    """

    step: int | None
    commit: _Commit
    seconds: float | None
    """The time since the commit of the row before."""
    copies: Sequence[Document]

    @property
    def version(self) -> int:
        version: int = self.commit.entry["version"]
        return version

    def document(self, expiring: Set[int]) -> Document:
        """Return the row as JSON values, marking what retention would remove."""
        copies = [copy | {"expiring": copy["version"] in expiring} for copy in self.copies]
        own = {"step": self.step, "seconds": self.seconds, "expiring": self.version in expiring, "copies": copies}
        return {**self.commit.entry, **own}


class _History(NamedTuple):
    """The commits of a store, the newest first, and a row for each step."""

    store: Store
    collection: int
    """The last garbage collection, which decides what has expired."""
    commits: list[_Commit]
    rows: list[_Row]


async def _history(store: Store, before: _History | None) -> _History:
    """Return the history of a store; read only the commits after those of `before`, if these have not changed."""
    log, commits, tags = store.log.reader, list[_Commit](), await store.tags()
    collection = await last_collection(log, await log.newest())
    known = before.commits if before and (before.store, before.collection) == (store, collection) else []
    newest = known[0].entry["version"] if known else 0
    async with contextlib.aclosing(history(log)) as newer:
        async for commit in newer:
            if commit.version <= newest:
                break
            if commit.transaction.startswith(REPAIR):  # it has replaced earlier records
                known, newest = [], 0
            commits.append(_Commit(_entry(commit, tags), commit.time, commit.source, commit.tags))
    commits += [_with_tags(commit, tags) for commit in known]
    return _History(store, collection, commits, await run(_rows, commits, tags))


def _with_tags(commit: _Commit, tags: dict[str, int]) -> _Commit:
    """Return a commit with those of its tags that have not moved since."""
    entry = commit.entry | _current(commit.tags, commit.entry["version"], tags)
    return commit if entry == commit.entry else commit._replace(entry=entry)


def _rows(commits: Sequence[_Commit], tags: dict[str, int]) -> list[_Row]:
    """Return a row for each step, the oldest first, with its quantized copies; without steps, for each commit."""
    steps = steps_of(tags)
    by_version = {commit.entry["version"]: commit for commit in commits}
    by_tag = {tag: commit for commit in reversed(commits) for tag in commit.tags}
    copies: dict[int, list[Document]] = {}
    origins: dict[int, int] = {}  # the version from which a copy was made, perhaps through other copies
    for commit in reversed(commits):
        if commit.source is not None:
            origin = origins[commit.entry["version"]] = origins.get(commit.source, commit.source)
            copies.setdefault(origin, []).append(commit.entry)
    chosen: list[tuple[int | None, _Commit]]
    if steps:
        tagged = [(step, tags[f"step/{step}"]) for step in steps]
        chosen = [
            (step, by_tag.get(f"step/{step}") or by_version[version])
            for step, version in tagged
            if version in by_version
        ]
    else:
        chosen = [(None, c) for c in reversed(commits) if c.source is None and c.entry["bytes_added"]]
    rows = []
    previous: _Commit | None = None
    for step, commit in chosen:
        seconds = None if previous is None else (commit.time - previous.time).total_seconds()
        rows.append(_Row(step, commit, seconds, copies.get(commit.entry["version"], ())))
        previous = commit
    return sorted(rows, key=lambda row: row.version)


def _entry(commit: Commit, tags: dict[str, int]) -> dict[str, Any]:
    metrics = commit.metadata.get("metrics")
    numbers = [(k, v) for k, v in metrics.items() if _is_number(v)] if isinstance(metrics, dict) else []
    return {
        "version": commit.version,
        "time": commit.time.isoformat(),
        "message": commit.message[:_MAX_MESSAGE],
        **_current(commit.tags, commit.version, tags),
        "tagged": dict(itertools.islice(commit.tagged.items(), _MAX_ENTRIES)),
        "dropped": list(commit.dropped[:_MAX_ENTRIES]),
        "bytes_added": commit.bytes_added,
        "source": commit.source,
        "expired": commit.expired,
        "metrics": _first_metrics(numbers),
        "metric_count": len(numbers),
    }


def _first_metrics(numbers: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the first metrics of a commit, a bounded number with names of a bounded length."""
    first = numbers[:_MAX_ENTRIES]
    lengths = itertools.accumulate(len(name) for name, _ in first)
    return {name: value for (name, value), length in zip(first, lengths, strict=True) if length <= _MAX_NAMES}


def _current(assigned: Sequence[str], version: int, tags: dict[str, int]) -> Document:
    """Return the first tags that a commit gave to its version and that have not moved, and their number."""
    current = [tag for tag in assigned if tags.get(tag) == version]
    return {"tags": current[:_MAX_ENTRIES], "tag_count": len(current)}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _series(rows: Sequence[_Row]) -> Document:
    """Return columns over all rows: the steps or versions, their metrics, bytes and seconds."""
    entries = [row.commit.entry for row in rows]
    names = list(dict.fromkeys(name for entry in entries for name in entry["metrics"]))
    return {
        "x": [row.version if row.step is None else row.step for row in rows],
        "versions": [row.version for row in rows],
        "bytes_added": [entry["bytes_added"] for entry in entries],
        "seconds": [row.seconds for row in rows],
        "metrics": {name: [entry["metrics"].get(name) for entry in entries] for name in names[:_MAX_METRICS]},
        "metric_count": max([len(names), *(entry["metric_count"] for entry in entries)]),
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
