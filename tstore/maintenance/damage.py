"""Find the damaged versions of a store, and, as far as its records can be read, those that have expired.

A version whose own record and objects are intact is not damaged, even if its tree can't be built because the
record of another version is damaged: only that other version is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from tstore.errors import Corrupt, NotFound, UnsupportedFormat
from tstore.format.layout import commit_key, is_record, version_of
from tstore.format.records import Record
from tstore.format.retention import packs_of
from tstore.format.validation import chunk_ends
from tstore.log.expiry import changes_nothing, existing_collection
from tstore.log.reader import LogReader

__all__ = [
    "UNREADABLE",
    "DamagedVersion",
    "KnownExpiry",
    "check_reference",
    "checked_newest",
    "damaged_versions",
    "incomplete_versions",
    "known_expiry",
    "missing_records",
    "perhaps_collected",
]

UNREADABLE = (Corrupt, NotFound, UnsupportedFormat)
"""The errors from reading a record that is damaged, missing or of a newer tstore."""

_MAX_MISSING = 1000


class DamagedVersion(NamedTuple):
    """A version that is damaged, or intact but of a newer tstore; `record_intact` tells this of its record."""

    version: int
    reason: str
    record_intact: bool


class KnownExpiry(NamedTuple):
    """Which versions have expired, according to the newest garbage collection whose record is readable.

    `collection` is its version (0 for none), `alive` has the versions that it left. `doubtful` is the newest
    version with an unreadable record, which may be a later garbage collection; 0 for none.
    """

    alive: frozenset[int]
    collection: int
    doubtful: int

    def expired(self, version: int) -> bool:
        """Return whether the garbage collection removed a version."""
        return version <= self.collection and version not in self.alive


async def known_expiry(log: LogReader, newest: int) -> KnownExpiry:
    """Return which versions have expired as of the newest one, as far as the readable records tell."""
    version, doubtful = newest, 0
    while version > 0:
        try:
            record, collection = await log.record(version), await log.collection(version)
        except UNREADABLE:
            doubtful, version = doubtful or version, version - 1
            continue
        if collection is not None:
            return KnownExpiry(collection.versions, version, doubtful)
        version = record.collected
    return KnownExpiry(frozenset(), 0, doubtful)


async def perhaps_collected(log: LogReader, known: KnownExpiry) -> frozenset[int]:
    """Return the versions that lack objects, which an unreadable garbage collection may have deleted.

    The newest version below that collection is not among them, because every collection keeps it.
    """
    present: list[int] = []
    for version in range(1, known.doubtful):
        try:
            if not (known.expired(version) or changes_nothing(await log.record(version))):
                present.append(version)
        except UNREADABLE:
            continue
    return frozenset(await incomplete_versions(log, present[:-1]))


async def incomplete_versions(log: LogReader, versions: Iterable[int]) -> list[int]:
    """Return which of these versions lack an object, except damaged ones and those of a newer tstore."""
    existing: dict[str, bool] = {}
    incomplete = []
    for version in versions:
        try:
            packs = packs_of(await log.tree(version))
        except NotFound:
            incomplete.append(version)
            continue
        except (Corrupt, UnsupportedFormat):
            continue
        unknown = [key for key in packs if key not in existing]
        sizes = await log.storage.sizes(unknown)
        existing |= {key: key in sizes for key in unknown}
        if not all(existing[key] for key in packs):
            incomplete.append(version)
    return incomplete


async def check_reference(log: LogReader, record: Record) -> None:
    """Raise `Corrupt` unless the version that a record names as a garbage collection is one, or void.

    If that version's record is unreadable, only that version is at fault.
    """
    try:
        named = await log.record(record.collected) if record.collected else None
    except UNREADABLE:
        return
    if named is not None and not named.void:
        await existing_collection(log, record.collected)


async def damaged_versions(log: LogReader) -> list[DamagedVersion]:
    """Return damaged versions and those of a newer tstore, in order. After a gap, no record is read."""
    newest = await log.newest()
    known = await known_expiry(log, newest)
    incomplete = await perhaps_collected(log, known)

    async def check(version: int) -> DamagedVersion | None:
        intact = False
        try:
            record = (await log.records.stored_below(version, newest + 1)).record
            intact = True
            await check_reference(log, record)
            if not (changes_nothing(record) or known.expired(version) or version in incomplete):
                await _check_objects(log, version, record)
        except UnsupportedFormat as error:  # not damaged, but of a newer tstore
            return DamagedVersion(version, str(error), True)
        except (Corrupt, NotFound) as error:
            return DamagedVersion(version, str(error).removesuffix(f"; {log.objects.advice}"), intact)
        return None

    damaged = [result async for _, result in log.each(check, range(1, newest + 1)) if result]
    reason = f"{log.storage.url}: {{}} is missing although later commits exist"
    missing = await missing_records(log, newest)
    return [*damaged, *(DamagedVersion(v, reason.format(commit_key(v)), False) for v in missing)]


async def checked_newest(log: LogReader) -> int:
    """Return the newest version; raise `Corrupt` if the next record is missing although later ones exist."""
    while True:
        newest = await log.newest()
        missing = await missing_records(log, newest)
        if not missing:
            return newest
        if await log.records.stored_or_none(missing[0]) is None:  # reads the object: a size may be stale
            raise log.records.missing_error(missing[0])


async def missing_records(log: LogReader, newest: int) -> list[int]:
    """Return the versions after `newest` that have no record although later ones exist, up to a limit.

    Readers stop at the first of them. On storage that can't be listed, only some numbers above are checked.
    """
    if log.storage.capabilities.listing:
        existing = {version_of(k) for k in await log.storage.list("commits/") if is_record(k)}
    else:
        existing = await log.probe_above(newest)
    unlisted = (v for v in range(newest + 1, max(existing, default=0)) if v not in existing)
    absent = list(itertools.islice(unlisted, _MAX_MISSING))
    committed = await log.storage.sizes(map(commit_key, absent))  # some may have been committed meanwhile
    return [version for version in absent if commit_key(version) not in committed]


async def _check_objects(log: LogReader, version: int, record: Record) -> None:
    """Raise `Corrupt` or `NotFound` if a manifest is damaged or missing, or a pack is missing or too short."""
    ends: dict[str, int] = {}
    for table in [manifest.table for manifest in await log.objects.manifests(version, record)]:
        for key, end in zip(table.packs, chunk_ends(table), strict=True):
            if isinstance(key, str):
                ends[key] = max(ends.get(key, 0), end)
    sizes = await log.storage.sizes(ends)
    for key, end in ends.items():
        if sizes.get(key, -1) < end:
            actual = f"has {sizes[key]} bytes" if key in sizes else "is missing"
            raise NotFound(f"{log.storage.url}: {key} {actual}; expected at least {end} bytes")
