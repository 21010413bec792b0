"""The history of a store: its commits, newest first, and versions by tag or time."""

from __future__ import annotations

import datetime
import textwrap
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple

from tstore.core.format.arguments import quote
from tstore.core.format.objects.records import Part, Record
from tstore.core.format.objects.wellformed import date_of
from tstore.core.format.tree.retention import step_of
from tstore.core.log.expiry import living_versions
from tstore.core.log.reader import LogReader
from tstore.errors import InvalidArgument, NotFound, name_list

__all__ = ["Commit", "commits_of", "history", "version_at", "version_named"]


class Commit(NamedTuple):
    """One transaction in the history. Transactions that share a record have the same `version`."""

    version: int
    tag: str | None
    """A tag that the transaction gave to its version; None without one."""
    message: str
    """The message that the writer passed."""
    time: datetime.datetime
    """When it was committed, in UTC, by the writer's clock."""
    tags: tuple[str, ...]
    """The tags that the transaction gave to its own version; `tag` is the first of them, or None."""
    transaction: str
    """The id of the transaction."""
    bytes_added: int
    """The encoded bytes of the chunks that the transaction wrote."""
    metadata: dict[str, Any]
    """The JSON object that the writer passed; of a step, its number and metrics."""
    expired: bool = False
    """Whether garbage collection removed the version."""
    dropped: tuple[str, ...] = ()
    """The tags that the transaction removed."""
    base: int = 0
    """The version that the transaction is based on; if several share a record, the oldest of their bases."""
    tagged: Mapping[str, int] = {}
    """The tags that the transaction gave to earlier versions, with these versions."""
    source: int | None = None
    """The version of which this one is a copy, such as a quantized checkpoint; None if it is not a copy."""

    def __repr__(self) -> str:
        message, tag = textwrap.shorten(self.message, 60, placeholder="…"), self.tag and self.tag[:60]
        expired = " expired" if self.expired else ""
        return (
            f"<tstore.Commit version={self.version} tag={tag!r} time={self.time.isoformat()} {message!r}{expired}>"
        )


async def history(log: LogReader) -> AsyncGenerator[Commit, None]:
    """Yield every commit, newest first, including those whose version has expired.

    Manifests are not checked, so a version whose manifest is damaged is listed too. Raise `Corrupt` if a record is
    damaged, or `NotFound` if one before the newest is missing.
    """
    newest = await log.checked_newest()
    alive, last_collection = await living_versions(log, newest)
    collections: list[Commit] = []  # garbage collections, which expire with the version below them
    async for version, record in _records_down(log, newest):
        if record.void:
            continue
        if record.collection is not None:
            collections += commits_of(version, record)
            continue
        expired = version <= last_collection and version not in alive
        for commit in (*collections, *commits_of(version, record)):
            yield commit._replace(expired=True) if expired else commit
        collections.clear()
    for commit in collections:
        yield commit


async def version_named(log: LogReader, at: int | str, newest: int) -> int:
    """Return the version with this number, or with this tag as of `newest`; raise `NotFound` if there is none."""
    if isinstance(at, int):
        if at < 0 or (at > newest and await log.records.stored_or_none(at) is None):  # `newest` may be stale
            tags = (await log.head(newest)).tags
            hint = f"; to select step {at}, pass 'step/{at}'" if f"step/{at}" in tags else ""
            raise NotFound(f"{log.storage.url} has no version {at}; its newest is {newest}{hint}")
        return at
    tags = (await log.head(newest)).tags
    if at not in tags:
        if (step := step_of([at])) is not None:
            steps = sorted(s for tag in tags if (s := step_of([tag])) is not None)
            raise NotFound(f"{log.storage.url} has no step {step}; {name_list('steps', steps)}")
        raise NotFound(
            f"{log.storage.url} has no tag {quote(at)}; {name_list('tags', sorted(tags, key=tags.__getitem__))}"
        )
    return tags[at]


async def _records_down(log: LogReader, newest: int) -> AsyncGenerator[tuple[int, Record], None]:
    async for version, short in log.records_down(newest):
        yield version, (short or await log.stored(version)).record


async def version_at(log: LogReader, at: datetime.datetime, newest: int) -> int:
    """Return the newest version, not a copy, committed by a time: the head at that time; raise `NotFound`.

    Raise `InvalidArgument` if the time has no time zone.
    """
    if at.tzinfo is None:
        raise InvalidArgument(f"the time {at} has no time zone; pass an aware datetime")
    async for version, record in _records_down(log, newest):
        if not record.source and min(date_of(part.time) for part in record.parts or (record,)) <= at:
            return version
    raise NotFound(f"{log.storage.url} had no commit by {at.isoformat()}")


def commits_of(version: int, record: Record) -> list[Commit]:
    """Return the transactions that were committed as one version, the last first."""
    parts: Sequence[Part | Record] = record.parts or (record,)
    return [
        Commit(
            version,
            part.tags[0] if part.tags else None,
            part.message,
            date_of(part.time),
            part.tags,
            part.transaction,
            part.bytes_added,
            {**part.metadata, **record.metadata},
            dropped=record.dropped,
            base=record.base,
            tagged=record.tagged,
            source=record.source or None,
        )
        for part in reversed(parts)
    ]
