"""Whether a version is still alive, or was removed by a garbage collection or voided by a repair.

Every record names the newest garbage collection before it, and the record of a collection lists all versions that
stay alive. So three reads are enough, however long the log is. A garbage collection is identified by its version,
0 for none. A (forged) record is ignored if it names neither a collection nor a void record, or an older collection
than the record before it; that record is then used instead. So no later record repeats its claim.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import TypeVar

from tstore.core.format.layout import ARCHIVE_EVERY
from tstore.core.format.objects.records import Collection, LivingVersion, Record
from tstore.core.format.objects.wellformed import date_of
from tstore.core.format.tree.retention import Ledger
from tstore.core.format.tree.tree import Tree
from tstore.core.log.reader import LogReader
from tstore.errors import Conflict, Corrupt, NotFound, SnapshotExpired, TStoreError, Unavailable, UnsupportedFormat

__all__ = [
    "changes_nothing",
    "check_alive",
    "check_tag_alive",
    "check_unaffected",
    "collections",
    "existing_collection",
    "guard_expiry",
    "head_as_of",
    "last_collection",
    "ledger_at",
    "ledger_since",
    "living_versions",
    "named_collection",
    "names_falsely",
    "newest_tree",
    "refuse_voided",
    "state_of",
]

T = TypeVar("T")

_MAX_COLLECTIONS = 64  # collections to search for a tag that does not exist: it may be a typo


async def named_collection(log: LogReader, version: int) -> int:
    """Return the newest garbage collection up to a version, as that version's record names it."""
    while version and (record := await log.record(version)).collection is None:
        if not await names_falsely(log, version, record):
            return record.collected
        version -= 1
    return version


async def names_falsely(log: LogReader, version: int, record: Record) -> bool:
    """Return whether a version's record names a wrong last collection: not a collection, or an old one.

    It is old if the previous record names a newer one, or is one. Records that can't be read prove nothing.
    """
    try:
        if version > record.collected + 1:
            before = await log.record(version - 1)
            newer = version - 1 if before.collection is not None else before.collected
            if newer > record.collected and (await log.record(newer)).collection is not None:
                return True
        while record.collected:
            record = await log.record(record.collected)
            if record.collection is not None or not record.void:
                return record.collection is None
    except (Corrupt, NotFound, UnsupportedFormat):
        return False
    return False


async def existing_collection(log: LogReader, version: int) -> int:
    """Return `version`, a collection that a record names; if a repair voided it, return the one before it."""
    while version and (record := await log.record(version)).collection is None:
        version = record.collected
    return version


async def last_collection(log: LogReader, version: int) -> int:
    """Return the newest garbage collection up to a version, except voided ones."""
    return await existing_collection(log, await named_collection(log, version))


async def collections(log: LogReader, last: int) -> AsyncIterator[tuple[int, Collection]]:
    """Yield the garbage collection `last` and all earlier ones, with their versions, newest first."""
    while last and (collection := await log.collection(last)) is not None:
        yield last, collection
        del collection  # before the next is read: two may take too much memory
        last = await last_collection(log, last - 1)


async def living_versions(log: LogReader, at: int) -> tuple[frozenset[int], int]:
    """Return the versions that the newest garbage collection up to `at` left alive, and that collection.

    All versions above the collection are alive too.
    """
    last = await last_collection(log, at)
    collection = await log.collection(last) if last else None
    return (frozenset(), 0) if collection is None else (collection.versions, last)


async def check_alive(log: LogReader, version: int, at: int | None = None) -> None:
    """Raise `SnapshotExpired` if `version` was removed by a garbage collection up to `at` (None: the newest)."""
    alive, last = await living_versions(log, await log.newest() if at is None else at)
    changed = version if version > last else await state_of(log, version)
    if 0 < changed <= last and changed not in alive:
        async for number, collection in collections(log, last):
            if changed in collection.expired:
                raise await _expiry_error(log, f"version {version}", number)
        async for number, record in log.each_record(range(changed + 1, last)):
            if record.was_voided:
                raise SnapshotExpired(
                    f"{log.storage.url}: version {version} was removed by a garbage collection whose record is "
                    f"lost, because `tstore repair` voided version {number}; open a newer version (tstore log "
                    "lists those that are alive)"
                )
        raise Corrupt(
            f"{log.storage.url}: version {version} is not alive according to the record of version {last}, but no "
            "garbage collection removed it; run tstore verify for details"
        )


async def check_tag_alive(log: LogReader, tag: str) -> None:
    """Raise `SnapshotExpired` if one of the last garbage collections removed the version that had a tag."""
    unread = _MAX_COLLECTIONS
    async for number, collection in collections(log, await last_collection(log, await log.newest())):
        if tag in collection.tags:
            raise await _expiry_error(log, f"version {collection.tags[tag]}, tagged {tag!r},", number)
        if not (unread := unread - 1):
            return


async def guard_expiry(log: LogReader, version: int, work: Awaitable[T]) -> T:
    """Await work on a version; raise `SnapshotExpired` if it failed because the version has expired."""
    try:
        return await work
    except (Corrupt, NotFound) as error:
        try:
            await check_alive(log, version)
            await _check_lost_state(log, version)
        except SnapshotExpired as expired:
            raise expired from error
        except Unavailable as unknown:
            raise unknown from error  # the version may have expired, so it must not be reported as damaged
        except TStoreError:
            pass  # the log is damaged too; the first error is more useful
        raise


async def _check_lost_state(log: LogReader, version: int) -> None:
    """Raise `SnapshotExpired` if the state of a version below the last collection is that of a lost record.

    Only a root has that state, and no collection lists the other users of its data.
    """
    if version < await last_collection(log, await log.newest()) and await state_of(log, version) == 0:
        raise SnapshotExpired(
            f"{log.storage.url}: version {version} has the state of a version whose record is lost, and a garbage "
            "collection has deleted data of it; open a newer version (tstore log lists those that are alive)"
        )


async def newest_tree(log: LogReader) -> Tree:
    """Return the tree of the head as of the newest version; retry while garbage collections expire it mid-read.

    Raise `Corrupt` if the search for that version has found a later one above a missing record.
    """
    while True:
        version = await log.newest_with_records()
        await (log.check_end if version % ARCHIVE_EVERY else log.look_ahead)(version)
        try:
            return await log.head(version)
        except NotFound:
            if await log.newest() == version:
                raise


async def head_as_of(log: LogReader, version: int) -> int:
    """Return the head as of a version: the newest version up to it that is not a copy, 0 if there is none."""
    while version and (await log.record(version)).source:
        version -= 1
    return version


async def state_of(log: LogReader, version: int) -> int:
    """Return the version that wrote the state of a version: itself, or the head before it if it has no changes."""
    while version and changes_nothing(await log.record(version)):
        version = await head_as_of(log, version - 1)
    return version


def changes_nothing(record: Record) -> bool:
    """Return whether a version leaves the state of the head unchanged: a void record or a garbage collection."""
    return record.void or record.collection is not None


async def ledger_since(log: LogReader, collection: int, alive: Iterable[LivingVersion], version: int) -> Ledger:
    """Return the living versions as of `version`: those above `collection`, and those that it left `alive`."""
    ledger = Ledger(alive)
    async for number, record in log.each_record(range(collection + 1, version + 1)):
        ledger.add(number, record)
    return ledger


async def ledger_at(log: LogReader, version: int) -> tuple[Ledger, Collection | None]:
    """Return the living versions as of a version, and what the newest garbage collection decided, if any."""
    last = await last_collection(log, version)
    collection = await log.collection(last) if last else None
    return await ledger_since(log, last, () if collection is None else collection.alive, version), collection


async def _expiry_error(log: LogReader, what: str, collection: int) -> SnapshotExpired:
    when = date_of((await log.record(collection)).time)
    return SnapshotExpired(
        f"{log.storage.url}: {what} was removed by the garbage collection recorded as version "
        f"{collection} at {when:%Y-%m-%d %H:%M:%S} UTC; open a newer version (tstore log "
        "lists those that are alive)"
    )


def refuse_voided(url: str, record: Record, voided: Sequence[int]) -> None:
    """Raise `Conflict` if a repair voided versions that a record may depend on, or the record itself.

    A garbage collection, and another repair, begin again by themselves.
    """
    if voided and record.collection is None and not record.voids:
        raise Conflict(
            f"{url}: a repair voided version {min(voided)}, on which transaction {record.transaction} is based or "
            "which it had become, so it is not committed; read again and repeat it",
            [],
        )


async def check_unaffected(log: LogReader, record: Record, version: int, repair: Record) -> None:
    """Raise `Conflict` if a repair voided a version that the record names, or if data of the record is gone.

    Data is gone if the repair voided the garbage collection that had deleted it.
    """
    if voided := record.named_versions.intersection(repair.voids):
        raise Conflict(
            f"{log.storage.url}: the repair recorded as version {version} voided version {min(voided)}, which "
            "therefore cannot be tagged or copied; choose another version",
            [],
        )
    try:
        manifests = await log.objects.manifests(version, record)
        packs = {pack for manifest in manifests for pack in manifest.packs if pack}
        missing = len(await log.storage.sizes(packs)) < len(packs)
    except NotFound:
        missing = True
    if missing:
        raise Conflict(
            f"{log.storage.url}: data of transaction {record.transaction} was deleted, probably by a garbage "
            f"collection whose record was voided by the repair in version {version}, so the transaction cannot be "
            "committed; repeat it as a new transaction (if it is cooperative, with a new attempt)",
            [],
        )
