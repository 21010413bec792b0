"""The void records that a repair puts in the place of others: one by one, or a whole archive with them.

A record is voided in one of two ways.
1. Its object is replaced.
2. An archive of its block is written, with the void record and the other records of the block. So it is if an
   archive is lost or damaged, whose records have no objects of their own; and for an intact record if its block is
   complete, since a garbage collection may archive it meanwhile. The latter archive is only created if it is
   absent, so either the collection archives the record or the repair the void one, never both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence, Set

import xxhash

from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound
from tstore.format.frame import Link, check_of, linked
from tstore.format.layout import ARCHIVE_EVERY, ROOT_EVERY, archive_end, archive_key, commit_key, root_key
from tstore.format.objects.archives import Archive
from tstore.format.objects.encoding import encode
from tstore.format.objects.records import REPAIR, REPLACED, RESUMES, VOIDED, Record
from tstore.log.commits import CommitObjects
from tstore.log.expiry import named_collection
from tstore.log.reader import LogReader
from tstore.maintenance.damage import newest_beyond_gaps
from tstore.maintenance.lost_records import named_checks, resumptions
from tstore.maintenance.replay import UNREADABLE
from tstore.runtime import world
from tstore.runtime.concurrency import batched, together
from tstore.runtime.pool import run
from tstore.storage.base import Storage
from tstore.storage.objects import Durability

__all__ = ["VoidRecords", "archived", "is_voided", "lost_with_archives", "resumed_without"]


async def lost_with_archives(log: LogReader, wanted: Sequence[int], lost: Set[int]) -> set[int]:
    """Return the versions wanted, with all others whose records were lost with an archive of wanted ones."""
    added = set(wanted)
    for end in {archive_end(version) for version in wanted if version in lost}:
        block = range(end - ARCHIVE_EVERY + 1, end + 1)
        if lost >= set(block):
            own = await _own_records(log, block)
            if len(own) == ARCHIVE_EVERY:
                raise InvalidArgument(
                    f"{log.storage.url}: {archive_key(end)} is damaged, but all of its records have objects of "
                    "their own, so nothing was voided; delete it: a garbage collection will create it again"
                )
            added = {*added, *block} - own.keys()
    return added


async def resumed_without(log: LogReader, lost: Set[int]) -> dict[int, int]:
    """Return by lost version the next one whose root has its changes, 0 for none."""
    records = dict.fromkeys(sorted(lost), b"")
    for version in records:
        with contextlib.suppress(Corrupt):  # it is too long
            records[version] = await _object(log, version)
    named = await named_checks(log, records)
    newest = await newest_beyond_gaps(log)
    return await resumptions(log, named, newest + 1, newest)


def archived(url: str, version: int) -> InvalidArgument:
    """Return the error for a version to be voided whose record is in an intact archive."""
    return InvalidArgument(
        f"{url}: the record of version {version} is in {archive_key(version)}, which nothing "
        "changes, so it can't be voided; restore the store from a copy instead, or copy the versions that you "
        "need (tstore.copy with `at`)"
    )


async def is_voided(log: LogReader, version: int) -> bool:
    """Return whether a repair has voided a version."""
    with contextlib.suppress(*UNREADABLE):
        return (await log.record(version)).was_voided
    return False


class VoidRecords:
    """The void records for some versions, and what else changes with them; `make` changes nothing yet."""

    def __init__(self, log: LogReader, newest: int) -> None:
        self._log = log
        self._newest = newest
        self._former: dict[int, bytes] = {}  # the records to replace, empty for one that is missing
        self._records: dict[int, bytes] = {}  # the void ones
        self._archives: dict[int, bytes] = {}  # the archives to write, by their last versions
        self._damaged: dict[int, bytes] = {}  # those to replace
        self.resumes: dict[int, int] = {}
        """By version the next one whose root has the changes of the lost record, 0 for none."""

    @staticmethod
    async def make(
        log: LogReader, versions: Sequence[int], lost: Set[int], damaged: Set[int], newest: int
    ) -> VoidRecords:
        """Return the void records for versions, in order; raise `InvalidArgument` if one can't be voided.

        Of these versions, the records of those in `lost` can't be read; those in `damaged` are damaged otherwise.
        """
        voids = VoidRecords(log, newest)
        for version in versions:
            if version in lost or not await is_voided(log, version):
                voids._former[version] = await _object(log, version)
            else:  # by an earlier repair, which was interrupted
                voids.resumes[version] = (await log.record(version)).resumes
        await voids._find_resumptions(lost, damaged)
        await voids._encode()
        await voids._plan_archives(lost)
        return voids

    async def _find_resumptions(self, lost: Set[int], damaged: Set[int]) -> None:
        """Find out for which versions a root vouches; raise `InvalidArgument` if roots of earlier ones must go.

        It also vouches for a damaged version that rests on one that was lost before.
        """
        self._named = await named_checks(self._log, self._former)
        earlier = {v: root for v, root in (await self._resumed()).items() if v not in self._former}
        for version in self._former:
            if version not in lost:
                roots = [root for v, root in earlier.items() if v < version < root and version in damaged]
                self.resumes[version] = max(roots, default=0)
        stop = min((v for v in self._former if not self.resumes.get(v, 1)), default=self._newest + 1)
        gone = {version: self._named[version] for version in self._former if version in lost}
        self.resumes |= await resumptions(self._log, gone, stop, self._newest)
        first = min((v for v in self._former if not self.resumes[v]), default=self._newest + 1)
        for version, resumes in earlier.items():
            if (root := await self._first_root(resumes)) >= first:
                raise InvalidArgument(
                    f"{self._log.storage.url}: version {first} can't be voided, because the record of version "
                    f"{version} is lost and only {root_key(root)} has its changes, with those of version {first}; "
                    "nothing was voided. Copy the versions that you need (tstore.copy with `at`)"
                )

    async def _first_root(self, resumes: int) -> int:
        """Return the first version from `resumes` on of whose root a tree can be made; `resumes` if there is none.

        A garbage collection deletes roots that no living version needs beside a later one.
        """
        for number in range(resumes, self._newest + 1, ROOT_EVERY):
            with contextlib.suppress(*UNREADABLE):
                await self._log.head(number)
                return number
        return resumes

    async def _resumed(self) -> dict[int, int]:
        """Return what earlier repairs have found out about lost records, by version."""
        resumed = {}
        for batch in batched(range(1, self._newest + 1)):
            for version, stored in zip(batch, await self._log.records.short_records(batch), strict=True):
                if stored is not None and stored.record.resumes:
                    resumed[version] = stored.record.resumes
        return resumed

    async def _encode(self) -> None:
        """Encode the void records, each of which has a link to the record before it."""
        log, collected = self._log, 0
        log_id = log.records.chain.log_id or bytes(16)
        for version, data in self._former.items():
            before, saved = self._records.get(version - 1), saved_key(version, data)
            if before is None:
                collected = await _gc_before(log, version)
                link, _ = await log.link(version - 1)
            else:
                link = Link(log_id, version - 1, check_of(before))
            resumes = {RESUMES: self.resumes[version]} if self.resumes[version] else {}
            void = Record(
                REPAIR + world.token(12),
                version - 1,
                world.now(),
                f"version {version} was voided" + (f"; its record was saved as {saved}" if data else ""),
                void=True,
                durable=False,  # earlier versions may not be durable
                collected=collected,
                metadata={
                    VOIDED: await _ids(log, version),
                    REPLACED: sorted(check.hex() for check in self._named[version]),
                    **resumes,
                },
            )
            self._records[version] = linked(encode(void), link)

    async def _plan_archives(self, lost: Set[int]) -> None:
        """Encode the archives to write."""
        for end in sorted({archive_end(version) for version in self._records}):
            block = range(end - ARCHIVE_EVERY + 1, end + 1)
            damaged = await self._archive(end)
            wanted = [version for version in block if version in self._records]
            intact = [v for v in wanted if v not in lost and end <= self._newest]
            if damaged is None and not intact and len(wanted) < ARCHIVE_EVERY:
                continue
            own = await _own_records(self._log, [v for v in block if v not in self._records])
            records = {**own, **{version: self._records[version] for version in wanted}}
            if missing := [version for version in block if version not in records]:
                raise InvalidArgument(
                    f"{self._log.storage.url}: version {wanted[0]} is so old that its void record has to be in "
                    f"{archive_key(end)}, but {commit_key(missing[0])} can't be read, so nothing was voided; void "
                    f"version {missing[0]} too, or restore its record from a copy"
                )
            self._archives[end] = await run(encode, Archive(end, tuple(records[version] for version in block)))
            if damaged is not None:
                self._damaged[end] = damaged

    async def _archive(self, end: int) -> bytes | None:
        """Return the bytes of an archive if it is damaged, None if it is absent; else raise `InvalidArgument`."""
        key = archive_key(end)
        try:
            if await CommitObjects(self._log.storage).archive(end) is None:
                return None
        except Corrupt:
            return await self._log.storage.get(key)
        version = next(version for version in self._records if archive_end(version) == end)
        raise archived(self._log.storage.url, version)

    @property
    def replaces_any(self) -> bool:
        """Whether a record has to be replaced: not all versions were voided by earlier repairs."""
        return bool(self._former)

    async def write(self) -> list[str]:
        """Write the records; return the keys at which those that they replace were saved."""
        storage = self._log.storage
        saved = [(saved_key(version, data), data) for version, data in self._former.items()]
        saved += [(saved_key(end, data), data) for end, data in self._damaged.items()]
        for some in batched(saved):
            await together(lambda item: _create(storage, *item), some)
        if self._archives:
            await storage.sync()  # before records that may be durable
        for end in sorted(self._archives.keys() - self._damaged.keys(), reverse=True):  # dependents first
            try:
                await storage.create(archive_key(end), self._archives[end], Durability.FSYNC)
            except AlreadyExists:
                raise InvalidArgument(
                    f"{storage.url}: a garbage collection has archived the versions up to {end} meanwhile, so "
                    "they can't be voided; restore the store from a copy instead"
                ) from None
        await self.delete_roots(self._newest)
        for end in self._damaged:
            await storage.replace(archive_key(end), self._archives[end])
        for version, data in self._records.items():
            if archive_end(version) not in self._archives:
                await storage.replace(commit_key(version), data)
        await storage.sync()
        for versions in batched(self._records):
            await together(self._check_in_force, versions)
        await self.delete_roots(self._newest)
        return [key for key, data in saved if data]

    async def _check_in_force(self, version: int) -> None:
        """Raise `InvalidArgument` if a collection has archived the former record of a version meanwhile."""
        if await self._log.anew().commits.get(version) != self._records[version]:
            raise InvalidArgument(
                f"{self._log.storage.url}: a garbage collection has archived version {version} meanwhile, so it "
                "can't be voided; restore the store from a copy instead"
            )

    async def delete_roots(self, newest: int) -> None:
        """Delete the roots that may have changes of voided versions, unless they vouch for lost records."""
        last = max(newest, await LogReader.strict(self._log.storage).newest())
        numbers = set[int]()
        for version, resumes in self.resumes.items():
            numbers.update(range(-(-version // ROOT_EVERY) * ROOT_EVERY, resumes or last + 1, ROOT_EVERY))
        for some in batched(sorted(numbers)):
            await together(self._log.storage.delete, map(root_key, some))

    async def delete_needless_roots(self) -> None:
        """Do what `delete_roots` does, unless a root vouches for the lost record of another version."""
        if not await self._resumed():
            await self.delete_roots(self._newest)


def saved_key(version: int, data: bytes) -> str:
    """Return the key at which the record of a voided version, or the damaged archive up to it, is saved."""
    return f"damaged/{version:020d}-{xxhash.xxh3_128_hexdigest(data)}"


async def _create(storage: Storage, key: str, data: bytes) -> None:
    with contextlib.suppress(AlreadyExists):  # an earlier repair was interrupted
        await storage.create(key, data, Durability.FSYNC)


async def _object(log: LogReader, version: int) -> bytes:
    """Return the object of a record, empty if it is missing."""
    try:
        return await log.storage.get(commit_key(version))
    except NotFound:
        return b""


async def _own_records(log: LogReader, versions: Iterable[int]) -> dict[int, bytes]:
    """Return the records that have objects of their own and can be read, by version."""
    found = {}
    for version in versions:
        with contextlib.suppress(*UNREADABLE):
            data = await log.storage.get(commit_key(version))
            log.objects.decode_record(version, data)
            found[version] = data
    return found


async def _ids(log: LogReader, version: int) -> list[str]:
    """Return the ids in the record of a version, none if it can't be read."""
    with contextlib.suppress(*UNREADABLE):
        return sorted((await log.record(version)).ids)
    return []


async def _gc_before(log: LogReader, version: int) -> int:
    """Return the newest garbage collection before a version, as named by the nearest readable record below it."""
    for before in range(version - 1, 0, -1):
        with contextlib.suppress(*UNREADABLE):
            return await named_collection(log, before)
    return 0
