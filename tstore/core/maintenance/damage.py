"""Find the damaged and expired versions of a store, as far as its records can be read.

A version is damaged if its own record or objects are. A version whose tree can't be built because the record of
another version is damaged does not count as damaged.

1. Find the expired versions, from the newest garbage collection whose record can be read (`known_expiry`). A later
   record that can't be read may be that of another collection, which may have expired the versions that lack
   objects. So these do not count as damaged.
2. Check the record of each version, and the manifests and packs that it wrote or reused (`damaged_versions`).
3. Check that the changes of each living version follow from the tree before it, and that the manifests and packs
   of expired and voided versions that it needs exist (`replay`).
4. Look for repairs that have not ended, or were undone (`past_repairs`).
5. Look for gaps: records that are missing although later ones exist (`missing_records`).
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tstore.core.format.layout import ARCHIVE_EVERY, commit_key, is_record, owner_of, root_key, version_of
from tstore.core.format.objects.records import Record
from tstore.core.format.tree.retention import packs_of
from tstore.core.format.tree.validation import pack_ends, short_packs
from tstore.core.log.expiry import changes_nothing, living_versions, names_falsely
from tstore.core.log.objects import LostRoot
from tstore.core.log.reader import LogReader
from tstore.core.maintenance.archiving import foreign_archive
from tstore.core.maintenance.gaps import long_gap
from tstore.core.maintenance.past_repairs import PastRepairs, interrupted_message
from tstore.core.maintenance.replay import UNREADABLE, Replay
from tstore.core.runtime.concurrency import batched
from tstore.core.runtime.pool import run
from tstore.errors import Corrupt, NotFound, UnsupportedFormat

__all__ = [
    "DamagedVersion",
    "KnownExpiry",
    "check_named",
    "check_references",
    "checked_newest",
    "damaged_versions",
    "foreign_archives",
    "incomplete_versions",
    "known_expiry",
    "last_readable_collection",
    "listed_records",
    "missing_records",
    "newest_beyond_gaps",
]

_MAX_MISSING = 1000


class DamagedVersion(NamedTuple):
    """A version that is damaged, or written by a newer tstore.

    `record_intact` says whether its record is undamaged.
    """

    version: int
    reason: str
    record_intact: bool


class KnownExpiry(NamedTuple):
    """Which versions have expired, as far as the readable records tell.

    `collection` is the newest garbage collection with a readable record, 0 for none, and `alive` are the versions
    that it left alive. The `suspected` versions lack objects: a later collection, whose record is unreadable, may
    have deleted them.
    """

    collection: int
    alive: frozenset[int]
    suspected: frozenset[int]

    def expired(self, version: int) -> bool:
        """Return whether a garbage collection removed a version, or may have done so."""
        return (version <= self.collection and version not in self.alive) or version in self.suspected


async def last_readable_collection(log: LogReader, newest: int) -> tuple[int, int]:
    """Return the newest garbage collection whose record is readable, and the newest unreadable record above it.

    Only unreadable records that may be those of later collections count. Either number is 0 if there is none.
    """
    version, unreadable = newest, 0
    while version > 0:
        try:
            record = await log.record(version)
            if await log.collection(version) is not None:
                break
            version = version - 1 if await names_falsely(log, version, record) else record.collected
        except UNREADABLE:
            unreadable = unreadable or version
            version -= 1  # the record below may name an earlier collection
    return version, unreadable


async def known_expiry(log: LogReader, newest: int) -> KnownExpiry:
    """Return which versions up to the newest have expired, as far as the readable records tell."""
    last, unreadable = await last_readable_collection(log, newest)
    collection = await log.collection(last) if last else None
    known = KnownExpiry(last, frozenset() if collection is None else collection.versions, frozenset())
    candidates, head = [], 0  # versions that a collection with an unreadable record may have expired
    for batch in batched(version for version in range(1, unreadable) if not known.expired(version)):
        await log.records.short_records(batch)  # at once
        for version in batch:
            with contextlib.suppress(*UNREADABLE):
                record = await log.record(version)
                if not changes_nothing(record):
                    candidates.append(version)
                    head = head if record.source else version
    # without the head below it, which every collection keeps
    suspected = await incomplete_versions(log, [version for version in candidates if version != head])
    return known._replace(suspected=frozenset(suspected))


async def incomplete_versions(log: LogReader, versions: Iterable[int]) -> list[int]:
    """Return which of these versions lack an object, sorted, without those damaged or of a newer tstore."""
    present: set[str] = set()
    missing: set[str] = set()
    incomplete = []
    for batch in batched(versions):
        await log.records.short_records(batch)  # at once, for the trees
        unknown: dict[int, set[str]] = {}  # by version, the packs that are neither present nor missing so far
        for version in batch:
            try:
                packs = await run(packs_of, await log.tree(version))
            except NotFound:  # a manifest is missing
                incomplete.append(version)
            except LostRoot as error:
                if await log.storage.size(error.key) is None:
                    incomplete.append(version)
            except (Corrupt, UnsupportedFormat):
                pass
            else:
                if packs.isdisjoint(missing):
                    unknown[version] = packs - present
                else:
                    incomplete.append(version)
        wanted = set[str]().union(*unknown.values())
        found = set(await log.storage.sizes(wanted))
        present |= found
        missing |= wanted - found
        incomplete += [version for version, packs in unknown.items() if not packs <= found]
    return sorted(incomplete)


async def check_references(log: LogReader, version: int, record: Record) -> None:
    """Raise `Corrupt` if a record names a wrong version as the last garbage collection (`names_falsely`).

    Also raise it if `check_named` refuses the record.
    """
    if await names_falsely(log, version, record):
        raise Corrupt(
            f"{log.storage.url}: {commit_key(version)} names version {record.collected} as the last garbage "
            f"collection before it, but that is not the last; `tstore repair` can void {commit_key(version)}"
        )
    await check_named(log, version, record)


async def check_named(log: LogReader, version: int, record: Record) -> None:
    """Raise `Corrupt` if a record tags, or is a copy of, a version that was neither alive nor voided since."""
    if not record.named_versions:
        return
    not_alive: list[int] = []
    with contextlib.suppress(*UNREADABLE):
        alive, gc = await living_versions(log, record.collected)
        async for number, target in log.each_record(sorted(record.named_versions)):
            if not target.was_voided and (changes_nothing(target) or (number <= gc and number not in alive)):
                not_alive.append(number)
    if not_alive:
        raise Corrupt(
            f"{log.storage.url}: {commit_key(version)} {'tags' if record.tagged else 'is a copy of'} version "
            f"{not_alive[0]}, which was not alive; `tstore repair` can void {commit_key(version)}"
        )


async def damaged_versions(log: LogReader, voided: Mapping[int, int] = {}) -> list[DamagedVersion]:
    """Return the versions that are damaged or of a newer tstore, in order, also those above a gap.

    With `voided`, return those that would be damaged if these versions were void. It maps each to the version from
    which on its changes are known nevertheless, 0 for none (`Record.resumes`). Raise `Corrupt` if an archive is of
    another history than the records beside it, which it hides, or if more records are missing below the newest
    version than can be lost.
    """
    newest, records = await newest_beyond_gaps(log), await listed_records(log)
    if gap := await long_gap(log, newest, records):
        raise Corrupt(gap.message(log.storage.url))
    for fault in await foreign_archives(log, newest, records):
        raise Corrupt(fault)
    known = await known_expiry(log.anew(), newest)
    log = log.anew()  # reads in order, so that it is the later one of two records that is out of place

    def living(version: int) -> bool:
        return not (known.expired(version) or version in voided)

    async def check(version: int) -> tuple[Record | None, DamagedVersion | None]:
        record, intact = None, False
        try:
            record = (await log.records.stored_below(version, newest + 1)).record
            intact = True
            await check_references(log, version, record)
            if not changes_nothing(record) and living(version):
                await _check_objects(log, version, record)
        except UnsupportedFormat as error:  # not damaged, but of a newer tstore
            return record, DamagedVersion(version, str(error), True)
        except (Corrupt, NotFound) as error:  # without the advice to run `tstore repair`, which reports this
            return record, DamagedVersion(version, str(error).removesuffix(f"; {log.objects.advice}"), intact)
        return record, None

    damaged: list[DamagedVersion] = []
    inherited = _Inherited(log, Replay(log, living, voided), living)
    repairs = PastRepairs(log)
    resumed: dict[int, int] = {}  # by lost version, the one whose root has its changes
    changing: list[int] = []  # living versions that change the head
    async for version, (record, damage) in log.each(check, (v for v in range(1, newest + 1) if v not in voided)):
        if damage is not None:
            damaged.append(damage)
        elif record is not None and (fault := await inherited.fault(version, record)):
            damaged.append(DamagedVersion(version, fault, True))
        if record is not None:
            repairs.add(version, record)
            if record.resumes:
                resumed[version] = record.resumes
            if living(version) and not (changes_nothing(record) or record.source):
                changing.append(version)
    if damaged:
        latest = await known_expiry(log.anew(), await newest_beyond_gaps(log.anew()))
        if latest.collection != known.collection:  # what seems damaged may have expired meanwhile
            return await damaged_versions(log.anew(), voided)
    reasons = {v: reason for v, reason in (await repairs.restored()).items() if v not in voided}
    if not voided and all(damage.record_intact for damage in damaged):  # else another repair will list these too
        reasons |= {v: interrupted_message(log.storage.url, v) for v in repairs.unlisted}
    damaged = [damage for damage in damaged if damage.version not in reasons]
    damaged += [DamagedVersion(version, reason, True) for version, reason in reasons.items()]
    damaged += await _lost_with_roots(log, resumed, [*changing, newest])
    return sorted(damaged)


async def _lost_with_roots(
    log: LogReader, resumed: Mapping[int, int], needing: Sequence[int]
) -> list[DamagedVersion]:
    """Return the lost versions whose changes are lost too, because the root with these changes is lost.

    `needing` are the versions whose trees are needed, in order.
    """
    reasons: dict[int, str] = {}  # by root
    for root in set(resumed.values()):
        for version in needing[bisect.bisect_left(needing, root) :]:
            try:
                await log.head(version)
                break  # later versions can be read too
            except UNREADABLE as error:
                if root_key(root) in str(error):
                    reasons[root] = str(error)
                    break
    return [DamagedVersion(v, reasons[root], False) for v, root in resumed.items() if root in reasons]


class _Inherited:
    """Checks, in order, that versions follow from the versions before them."""

    def __init__(self, log: LogReader, replay: Replay, living: Callable[[int], bool]) -> None:
        self._log = log
        self._replay = replay
        self._living = living
        self._owners: set[str] = set()  # the transactions of living versions, which are checked with these
        self._is_complete = True  # False after a version that is not living, until a later one is complete
        self._resumes = 0  # the version that has the changes of lost records

    async def fault(self, version: int, record: Record) -> str:
        """Return the fault in what a version inherits; "" if there is none, or if the version is not living."""
        if fault := await self._replay.fault(version, record):
            return fault
        self._resumes = max(self._resumes, record.resumes)
        if 0 < self._resumes <= version:
            self._is_complete, self._resumes = False, 0
        if changes_nothing(record) or not self._living(version):
            self._is_complete &= not record.of_head.changes_nodes
            return ""
        if record.voids and not record.changes_nodes:  # the version whose state it has is checked
            return ""
        self._owners.update(record.transactions)
        if record.source:
            return ""
        if record.replaces or self._is_complete or (tree := await self._replay.tree(version)) is None:
            self._is_complete |= record.replaces
            return ""
        packs = {pack for pack in await run(packs_of, tree) if owner_of(pack) not in self._owners}
        missing = sorted(packs - set(await self._log.storage.sizes(packs)))
        self._is_complete = not missing
        return (
            f"{self._log.storage.url}: version {version} needs {missing[0]}, which is missing" if missing else ""
        )


async def checked_newest(log: LogReader) -> tuple[int, list[int]]:
    """Return the newest version, and the versions whose records have objects of their own, if these can be listed.

    Raise `Corrupt` if the record after the newest version is missing although later ones exist, or if more records
    are missing below it than can be lost.
    """
    while True:
        newest = await log.newest()
        listed = await listed_records(log)
        if gap := await long_gap(log, newest, listed):
            raise Corrupt(gap.message(log.storage.url))
        missing = await _missing_among(log, newest, listed)
        if not missing:
            return newest, listed
        if await log.records.stored_or_none(missing[0]) is None:  # the storage's listing and sizes may be stale
            raise log.records.missing_error(missing[0])


async def missing_records(log: LogReader, newest: int) -> list[int]:
    """Return the versions after `newest` that have no record although later ones exist, up to a limit.

    Readers stop at the first of them. On storage that can't be listed, only some of the later numbers are probed.
    """
    return await _missing_among(log, newest, await listed_records(log))


async def newest_beyond_gaps(log: LogReader) -> int:
    """Return the newest version if the missing ones existed, the first of which ends a search for it."""
    newest, listed = await log.newest(), await listed_records(log)
    existing = {*listed, *await _missing_among(log, newest, listed)}
    while newest + 1 in existing or await log.commits.existing([newest + 1]):  # in an archive
        newest += 1
    return newest


async def foreign_archives(log: LogReader, newest: int, listed: Sequence[int]) -> list[str]:
    """Return a sentence for each archive that is of another history than the records beside it.

    Only archives that have records beside them are read: those made by the last collection.
    """
    own = set(listed)
    ends = range(ARCHIVE_EVERY, newest + 1, ARCHIVE_EVERY)
    return [fault for end in ends if (fault := await foreign_archive(log, end, own))]


async def listed_records(log: LogReader) -> list[int]:
    """Return the versions whose records have objects of their own, none if the storage can't be listed."""
    if not log.storage.capabilities.listing:
        return []
    return [version_of(key) for key in await log.storage.list("commits/") if is_record(key)]


async def _missing_among(log: LogReader, newest: int, listed: Sequence[int]) -> list[int]:
    existing = set(listed) if log.storage.capabilities.listing else await log.probe_above(newest)
    unlisted = (v for v in range(newest + 1, max(existing, default=0)) if v not in existing)
    absent = list(itertools.islice(unlisted, _MAX_MISSING))
    found = await log.commits.existing(absent)  # in archives, or committed meanwhile
    return [version for version in absent if version not in found]


async def _check_objects(log: LogReader, version: int, record: Record) -> None:
    """Raise `Corrupt` or `NotFound` if a manifest is damaged or missing, or a pack is missing or too short."""
    ends = pack_ends(await log.objects.manifests(version, record))
    for fault in short_packs(ends, await log.storage.sizes(ends)).values():
        raise NotFound(f"{log.storage.url}: {fault}")
