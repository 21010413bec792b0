"""The steps of a store, each with its commit, its metrics and its quantized copies; read once, then added to."""

from __future__ import annotations

import contextlib
import datetime
import itertools
from collections.abc import Sequence, Set
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import asdict, replace

from tstore.core.format.objects.records import REPAIR
from tstore.core.log.expiry import last_collection
from tstore.core.log.history import Commit, history
from tstore.core.runtime.pool import run
from tstore.core.steps import steps_of
from tstore.core.store import Store
from tstore.core.transactions.membership import Membership
from tstore.service.page.views import Query

__all__ = ["CommitRow", "Row", "StepRow", "Timeline", "read_timeline"]

_MAX_ENTRIES = 64  # metrics of a commit, and tags that it set, moved or dropped
_MAX_MESSAGE = 4096  # characters
_MAX_NAMES = 1 << 14  # characters of the names of the metrics of one commit


async def read_timeline(query: Query) -> Timeline:
    """Return the timeline of the store; read only the commits that no earlier request has read."""
    newest = await query.store.log.reader.newest()
    before: Timeline | None = query.results.newest("timeline")
    return await query.results.get(
        "timeline", (query.store, newest), lambda: _read(query.store, newest, before), most=1
    )


class CommitRow(Struct):
    """A commit as the page shows it: a bounded part of it. `tags` are those that have not moved since."""

    version: int
    time: str
    message: str
    tags: list[str]
    tag_count: int
    tagged: dict[str, int]
    dropped: list[str]
    bytes_added: int
    hosts: int
    source: int | None
    expired: bool
    metrics: dict[str, float]
    metric_count: int
    expiring: bool = False
    """Whether the rules for retention that a user tries out would remove the version."""


class StepRow(CommitRow, kw_only=True):
    """A step, or a version, with its quantized copies; `seconds` is the time since the row before."""

    step: int | None
    seconds: float | None
    copies: list[CommitRow]


class Entry(NamedTuple):
    """The parts of a commit that are kept in memory."""

    entry: CommitRow
    time: datetime.datetime
    source: int | None
    tags: tuple[str, ...]
    """The tags that the commit gave to its own version."""


class Row(NamedTuple):
    """A step, or in a store without steps a version, with its quantized copies.

    Only the few rows shown at a time become a `StepRow`.
    """

    step: int | None
    commit: Entry
    seconds: float | None
    """The time since the commit of the row before."""
    copies: Sequence[CommitRow]

    @property
    def version(self) -> int:
        """The version of the commit."""
        return self.commit.entry.version

    def shown(self, expiring: Set[int]) -> StepRow:
        """Return the row as the page shows it, marking what retention would remove."""
        fields = asdict(self.commit.entry) | {"expiring": self.version in expiring}
        copies = [replace(copy, expiring=copy.version in expiring) for copy in self.copies]
        return StepRow(**fields, step=self.step, seconds=self.seconds, copies=copies)


class Timeline(NamedTuple):
    """The commits of a store, the newest first, and a row for each step."""

    store: Store
    version: int
    """The newest version."""
    collection: int
    """The last garbage collection, which decides what has expired."""
    commits: list[Entry]
    rows: list[Row]


async def _read(store: Store, version: int, before: Timeline | None) -> Timeline:
    """Return the history of a store; read only the commits after those of `before`, if these have not changed."""
    log, commits, tags = store.log.reader, list[Entry](), await store.tags()
    collection = await last_collection(log, await log.newest())
    known = before.commits if before and (before.store, before.collection) == (store, collection) else []
    newest = known[0].entry.version if known else 0
    async with contextlib.aclosing(history(log)) as newer:
        async for commit in newer:
            if commit.version <= newest:
                break
            if commit.transaction.startswith(REPAIR):  # it has replaced earlier records
                known, newest = [], 0
            commits.append(Entry(_entry(commit, tags), commit.time, commit.source, commit.tags))
    commits += [_with_tags(commit, tags) for commit in known]
    return Timeline(store, version, collection, commits, await run(_rows, commits, tags))


def _with_tags(commit: Entry, tags: dict[str, int]) -> Entry:
    """Return a commit with those of its tags that have not moved since."""
    shown, count = _current(commit.tags, commit.entry.version, tags)
    if (shown, count) == (commit.entry.tags, commit.entry.tag_count):
        return commit
    return commit._replace(entry=replace(commit.entry, tags=shown, tag_count=count))


def _rows(commits: Sequence[Entry], tags: dict[str, int]) -> list[Row]:
    """Return a row for each step, the oldest first, with its quantized copies; without steps, for each commit."""
    steps = steps_of(tags)
    by_version = {commit.entry.version: commit for commit in commits}
    by_tag = {tag: commit for commit in reversed(commits) for tag in commit.tags}
    copies: dict[int, list[CommitRow]] = {}
    origins: dict[int, int] = {}  # the version from which a copy was made, perhaps through other copies
    for commit in reversed(commits):
        if commit.source is not None:
            origin = origins[commit.entry.version] = origins.get(commit.source, commit.source)
            copies.setdefault(origin, []).append(commit.entry)
    chosen: list[tuple[int | None, Entry]]
    if steps:
        tagged = [(step, tags[f"step/{step}"]) for step in steps]
        chosen = [
            (step, by_tag.get(f"step/{step}") or by_version[version])
            for step, version in tagged
            if version in by_version
        ]
    else:
        chosen = [(None, c) for c in reversed(commits) if c.source is None and c.entry.bytes_added]
    rows = []
    previous: Entry | None = None
    for step, commit in chosen:
        seconds = None if previous is None else (commit.time - previous.time).total_seconds()
        rows.append(Row(step, commit, seconds, copies.get(commit.entry.version, ())))
        previous = commit
    return sorted(rows, key=lambda row: row.version)


def _entry(commit: Commit, tags: dict[str, int]) -> CommitRow:
    metrics = commit.metadata.get("metrics")
    numbers = [(k, v) for k, v in metrics.items() if _is_number(v)] if isinstance(metrics, dict) else []
    member = Membership.from_id(commit.transaction)
    shown, count = _current(commit.tags, commit.version, tags)
    return CommitRow(
        version=commit.version,
        time=commit.time.isoformat(),
        message=commit.message[:_MAX_MESSAGE],
        tags=shown,
        tag_count=count,
        tagged=dict(itertools.islice(commit.tagged.items(), _MAX_ENTRIES)),
        dropped=list(commit.dropped[:_MAX_ENTRIES]),
        bytes_added=commit.bytes_added,
        hosts=1 if member is None else member.hosts,
        source=commit.source,
        expired=commit.expired,
        metrics=_first_metrics(numbers),
        metric_count=len(numbers),
    )


def _first_metrics(numbers: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Return the first metrics of a commit, a bounded number with names of a bounded length."""
    first = numbers[:_MAX_ENTRIES]
    lengths = itertools.accumulate(len(name) for name, _ in first)
    return {name: value for (name, value), length in zip(first, lengths, strict=True) if length <= _MAX_NAMES}


def _current(assigned: Sequence[str], version: int, tags: dict[str, int]) -> tuple[list[str], int]:
    """Return the first tags that a commit gave to its version and that have not moved, and their number."""
    current = [tag for tag in assigned if tags.get(tag) == version]
    return current[:_MAX_ENTRIES], len(current)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
