"""Whether a version still lives, or was removed by a gc.

Every record names the newest gc before it, and a gc's record names all versions that live after it. So two small
reads tell, whatever the length of the log.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import TypeVar

from tstore.errors import Corrupt, NotFound, SnapshotExpired, TStoreError, Unavailable
from tstore.format.records import Alive, Collection, Record, date_of
from tstore.format.retention import Ledger
from tstore.format.tree import Tree
from tstore.log.log import Log
from tstore.runtime.concurrency import each

__all__ = [
    "changes_nothing",
    "check_alive",
    "check_tag",
    "collections",
    "ledger_since",
    "living",
    "newest_tree",
    "unexpired",
]

T = TypeVar("T")


async def living(log: Log, at: int) -> tuple[frozenset[int], int]:
    """The versions that a gc left alive as of version `at`, and the version of that gc; 0 where there is none.

    What was committed after the gc lives too.
    """
    last = await log.last_gc(at)
    collection = await log.collection(last) if last else None
    return (frozenset(), 0) if collection is None else (collection.versions, last)


async def check_alive(log: Log, version: int, at: int | None = None) -> None:
    """Raises `SnapshotExpired` where a gc up to version `at` (by default the newest) removed a version."""
    alive, last = await living(log, await log.newest() if at is None else at)
    state = version
    while 0 < state <= last and changes_nothing(await log.record(state)):
        state -= 1  # what it shows is the state that an older version made
    if 0 < state <= last and state not in alive:
        async for gc, collection in collections(log, last):
            if state in collection.expired:
                raise await _expired(log, f"version {version}", gc)
        raise Corrupt(
            f"{log.backend.url}: version {version} does not live by the record of version {last}, and no garbage "
            "collection removed it (tstore verify tells more)"
        )


async def check_tag(log: Log, tag: str) -> None:
    """Raises `SnapshotExpired` where the version that had a tag was removed by a gc."""
    async for gc, collection in collections(log, await log.last_gc(await log.newest())):
        if tag in collection.tags:
            raise await _expired(log, f"version {collection.tags[tag]}, tagged {tag!r},", gc)


async def unexpired(log: Log, version: int, work: Awaitable[T]) -> T:
    """The result of work on a version; `SnapshotExpired` where it failed because a gc removed that meanwhile."""
    try:
        return await work
    except (Corrupt, NotFound) as error:
        try:
            await check_alive(log, version)
        except SnapshotExpired as expired:
            raise expired from error
        except Unavailable as unknown:
            raise unknown from error  # it may have expired: nobody may be told that it is damaged
        except TStoreError:
            pass  # the log is damaged too; what failed first tells more
        raise


async def newest_tree(log: Log) -> Tree:
    """The tree of the newest version, however often a gc overtakes the reading."""
    while True:
        version = await log.newest()
        try:
            return await log.tree(version)
        except NotFound:
            if await log.newest() == version:
                raise


def changes_nothing(record: Record) -> bool:
    """Whether the version shows the state that an older one made."""
    return record.void or record.collection is not None


async def ledger_since(log: Log, gc: int, alive: Iterable[Alive], version: int) -> Ledger:
    """Return what lives as of a version: `alive` as of a gc (0 for none), and what was committed since then."""
    ledger = Ledger(alive)
    async for number, record in each(log.record, range(gc + 1, version + 1)):
        ledger.add(number, record)
    return ledger


async def collections(log: Log, last: int) -> AsyncIterator[tuple[int, Collection]]:
    """The gcs up to one, the newest first; each names an older one, so that their number is bounded."""
    while last and (collection := await log.collection(last)) is not None:
        yield last, collection
        del collection  # two of them may take too much memory
        last = await log.gc_named((await log.record(last)).collected)


async def _expired(log: Log, what: str, gc: int) -> SnapshotExpired:
    when = date_of((await log.record(gc)).time)
    return SnapshotExpired(
        f"{log.backend.url}: {what} was removed by the garbage collection of version {gc} at "
        f"{when:%Y-%m-%d %H:%M:%S} UTC; open a newer one (tstore log shows which live)"
    )
