"""The history of a store: what its records tell of each version, newest first."""

from __future__ import annotations

import contextlib
import datetime
import textwrap
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

from tstore.errors import InvalidArgument, NotFound, inventory
from tstore.format.arguments import shown
from tstore.format.records import Part, Record, date_of
from tstore.log.expiry import living
from tstore.log.log import Log
from tstore.runtime.concurrency import InTurn

__all__ = ["Commit", "history", "version_at", "version_named"]


class Commit(NamedTuple):
    """What the history tells of one version."""

    version: int
    tag: str | None
    message: str
    time: datetime.datetime
    tags: tuple[str, ...]
    transaction: str
    bytes_added: int
    metadata: dict[str, Any]
    expired: bool = False
    dropped: tuple[str, ...] = ()
    base: int = 0
    """The version that the transaction was based on; those between were committed meanwhile by others."""

    def __repr__(self) -> str:
        message, tag = textwrap.shorten(self.message, 60, placeholder="…"), self.tag and self.tag[:60]
        expired = " expired" if self.expired else ""
        return (
            f"<tstore.Commit version={self.version} tag={tag!r} time={self.time.isoformat()} {message!r}{expired}>"
        )


async def history(log: Log) -> AsyncGenerator[Commit, None]:
    """Every commit, newest first, also those whose version has expired."""
    newest = await log.newest()
    alive, last = await living(log, newest)
    same: list[tuple[int, Record]] = []  # commits of gcs, which show the state that an older version made
    async with contextlib.aclosing(InTurn(log.record, range(newest, 0, -1))) as records:
        async for version, record in records:
            if record.void:
                continue
            same.append((version, record))
            if record.collection is None:
                for number, found in same:
                    for commit in _commits(number, found, expired=version <= last and version not in alive):
                        yield commit
                same = []
    for number, found in same:
        for commit in _commits(number, found, expired=False):
            yield commit


async def version_named(log: Log, at: int | str, newest: int) -> int:
    """Return the version of a number or tag, as of the version `newest`; `NotFound` names what there is."""
    if isinstance(at, int):
        if not 0 <= at <= newest:
            raise NotFound(f"{log.backend.url} has no version {at}; its newest is {newest}")
        return at
    tags = (await log.tree(newest)).tags
    if at not in tags:
        raise NotFound(
            f"{log.backend.url} has no tag {shown(at)}; {inventory('tags', sorted(tags, key=tags.__getitem__))}"
        )
    return tags[at]


async def version_at(log: Log, at: datetime.datetime, newest: int) -> int:
    """The newest version by that time, as the history tells it; `NotFound` where there is none."""
    if at.tzinfo is None:
        raise InvalidArgument(f"the time {at} has no time zone; pass an aware datetime")
    async with contextlib.aclosing(InTurn(log.record, range(newest, 0, -1))) as records:
        async for version, record in records:
            if min(date_of(part.time) for part in record.parts or (record,)) <= at:
                return version
    raise NotFound(f"{log.backend.url} had no commit by {at.isoformat()}")


def _commits(version: int, record: Record, *, expired: bool) -> list[Commit]:
    """The transactions that were committed as one version, the last first; one, as a rule."""
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
            expired,
            record.dropped,
            record.base,
        )
        for part in reversed(parts)
    ]
