"""The void records that replace others in a repair: one by one, or in a whole archive.

A record is voided in one of two ways.
1. Its object is replaced.
2. An archive of its block is written, with the void record and the other records of the block. This is done if
   there is an archive, even a damaged one (`damaged_archives`), or if it is lost; and for an intact record if its
   block is complete, since a garbage collection may archive it meanwhile. The latter archive is only created if it
   is absent, so either the collection archives the record or the repair the void one, never both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set

import xxhash

from tstore.core.format.bounds import COLLECTION_BYTES
from tstore.core.format.frame import Link, check_of, linked
from tstore.core.format.layout import (
    ARCHIVE_EVERY,
    ROOT_EVERY,
    archive_end,
    archive_key,
    archive_versions,
    commit_key,
    root_key,
)
from tstore.core.format.objects.encoding import Archive, encode
from tstore.core.format.objects.records import REPAIR, REPLACED, RESUMES, VOIDED, Record
from tstore.core.log.commits import CommitObjects
from tstore.core.log.expiry import named_collection
from tstore.core.log.reader import LogReader
from tstore.core.maintenance.damage import newest_beyond_gaps
from tstore.core.maintenance.lost_records import named_checks, resumptions
from tstore.core.maintenance.replay import UNREADABLE
from tstore.core.runtime import world
from tstore.core.runtime.concurrency import batched, together
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Durability, Entry
from tstore.core.storage.wrapper import Wrapper
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound

__all__ = [
    "VoidRecords",
    "Without",
    "damaged_archives",
    "is_voided",
    "lost_with",
    "resumed_without",
    "stale_roots",
]


class Without(Wrapper):
    """A storage that hides the objects for which `hides(key)` is true, except in listings."""

    def __init__(self, inner: Storage, hides: Callable[[str], bool]) -> None:
        super().__init__(inner)
        self._hides = hides

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        """Return an object; raise `NotFound` for a hidden one."""
        if self._hides(key):
            raise NotFound(f"{self.url}: {key} is damaged, or a garbage collection is deleting it")
        return await super().get(key, max_size)

    async def head(self, key: str) -> Entry | None:
        """Return the entry of an object, None for a hidden one."""
        return None if self._hides(key) else await super().head(key)


async def damaged_archives(storage: Storage, lost: Set[int]) -> dict[int, bytes]:
    """Return the bytes of the damaged archives, by their last versions; `lost` are the unreadable versions.

    Some of their records may still have objects of their own; only the others are lost.
    """
    damaged = {}
    for end in {archive_end(version) for version in lost}:
        if lost >= set(archive_versions(end)):
            try:
                await CommitObjects(storage).archive(end)
            except Corrupt:
                damaged[end] = await storage.get(archive_key(end))
    return damaged


def lost_with(wanted: Set[int], lost: Set[int], damaged: Container[int]) -> set[int]:
    """Return the versions that are lost with an archive, which may be `damaged`, of the versions wanted."""
    blocks = {end: set(archive_versions(end)) for end in map(archive_end, wanted)}
    return {v for end, block in blocks.items() if end in damaged or lost >= block for v in block & lost}


async def resumed_without(log: LogReader, lost: Set[int]) -> dict[int, int]:
    """Return by lost version the next one whose root has its changes, 0 for none."""
    records = dict.fromkeys(sorted(lost), b"")
    for version in records:
        records[version] = await _object(log, version)
    named = await named_checks(log, records)
    newest = await newest_beyond_gaps(log)
    return await resumptions(log, named, newest + 1, newest)


async def is_voided(log: LogReader, version: int) -> bool:
    """Return whether a repair has voided a version."""
    with contextlib.suppress(*UNREADABLE):
        return (await log.record(version)).was_voided
    return False


class VoidRecords:
    """The void records for some versions, and what else changes with them; `make` changes nothing yet."""

    def __init__(
        self, storage: Storage, log: LogReader, newest: int, damaged_archives: Mapping[int, bytes]
    ) -> None:
        self._storage = storage
        self._log = log
        self._newest = newest
        self._former: dict[int, bytes] = {}  # the records to replace, empty if missing
        self._records: dict[int, bytes] = {}  # the void ones
        self._archives: dict[int, bytes] = {}  # the archives to write, by their last versions
        self._damaged = damaged_archives
        self._replaced = set(damaged_archives)  # the last versions of archives that exist
        self.resumes: dict[int, int] = {}
        """By version the next one whose root has the changes of the lost record, 0 for none."""

    @staticmethod
    async def make(
        storage: Storage,
        log: LogReader,
        versions: Sequence[int],
        lost: Set[int],
        damaged: Set[int],
        newest: int,
        damaged_archives: Mapping[int, bytes],
    ) -> VoidRecords:
        """Return the void records for versions, in order; raise `InvalidArgument` if one can't be voided.

        Of these versions, the records of those in `lost` can't be read; those in `damaged` are damaged otherwise.
        `log` reads as if there were no `damaged_archives`, which have all their records again afterwards.
        """
        voids = VoidRecords(storage, log, newest, damaged_archives)
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
        earlier = {
            v: root
            for v, root in (await self._resumed()).items()
            if v not in self._former and v not in self.resumes
        }
        for version in self._former:
            if version not in lost:
                roots = [root for v, root in earlier.items() if v < version < root and version in damaged]
                self.resumes[version] = max(roots, default=0)
        stop = min((v for v, resumes in self.resumes.items() if not resumes), default=self._newest + 1)
        gone = {version: self._named[version] for version in self._former if version in lost}
        self.resumes |= await resumptions(self._log, gone, stop, self._newest)
        first = min((v for v, resumes in self.resumes.items() if not resumes), default=self._newest + 1)
        for version, resumes in earlier.items():
            if (root := await self._first_root(resumes)) >= first:
                raise InvalidArgument(
                    f"{self._log.storage.url}: version {first} can't be voided, because the record of version "
                    f"{version} is lost and only {root_key(root)} has its changes, with those of version {first}; "
                    "nothing was voided. Copy the versions that you need (tstore.copy with `at`)"
                )

    async def _first_root(self, resumes: int) -> int:
        """Return the first version from `resumes` on of whose root a tree can be made.

        A garbage collection deletes roots that no living version needs beside a later one. If there is none,
        return `resumes`, or 0 if its root is gone, and with it what only that had.
        """
        for number in range(resumes, self._newest + 1, ROOT_EVERY):
            with contextlib.suppress(*UNREADABLE):
                await self._log.head(number)
                return number
        with contextlib.suppress(*UNREADABLE):
            await self._log.objects.whole_root(resumes)
            return resumes
        return 0

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
        for end in sorted({*self._damaged, *map(archive_end, self._records)}):
            block = archive_versions(end)
            records = {version: self._records[version] for version in block if version in self._records}
            existing = await self._log.commits.archive(end)
            intact = records.keys() - lost if end <= self._newest else ()
            if existing is not None:
                self._replaced.add(end)
                records = dict(zip(block, existing.records, strict=True)) | records
            elif end in self._damaged or intact or len(records) == ARCHIVE_EVERY:
                records = await _own_records(self._log, block) | records
            else:
                continue
            if missing := [version for version in block if version not in records]:
                raise InvalidArgument(
                    f"{self._log.storage.url}: {archive_key(end)} has to be written, with the void records, but "
                    f"{commit_key(missing[0])} can't be read, so nothing was voided; void version {missing[0]} "
                    "too, or restore its record from a copy"
                )
            self._archives[end] = await run(encode, Archive(end, tuple(records[version] for version in block)))

    @property
    def replaces_any(self) -> bool:
        """Whether a record or an archive has to be replaced: earlier repairs did not replace all."""
        return bool(self._former or self._archives)

    async def write(self) -> list[str]:
        """Write the records; return the keys at which those that they replace were saved."""
        storage = self._storage
        saved = [(saved_key(version, data), data) for version, data in self._former.items()]
        saved += [(saved_key(end, data), data) for end, data in self._damaged.items()]
        for some in batched(saved):
            await together(lambda item: _create(storage, *item), some)
        if self._archives:
            await storage.sync()  # before records that may be durable
        for end in sorted(self._archives.keys() - self._replaced, reverse=True):  # dependents first
            try:
                await storage.create(archive_key(end), self._archives[end], Durability.FSYNC)
            except AlreadyExists:
                raise InvalidArgument(
                    f"{storage.url}: a garbage collection has archived the versions up to {end} meanwhile; "
                    "repeat the repair"
                ) from None
        for versions in batched(stale_roots(self.resumes, self._newest)):
            await together(storage.delete, map(root_key, versions))
        for end in self._replaced:
            await storage.replace(archive_key(end), self._archives[end])
        for version, data in self._records.items():
            if archive_end(version) not in self._archives:
                await storage.replace(commit_key(version), data)
        await storage.sync()
        for versions in batched(self._records):
            await together(self._check_in_force, versions)
        return [key for key, data in saved if data]

    async def _check_in_force(self, version: int) -> None:
        """Raise `InvalidArgument` if a collection has archived the former record of a version meanwhile."""
        if await CommitObjects(self._storage).get(version) != self._records[version]:
            raise InvalidArgument(
                f"{self._storage.url}: a garbage collection has archived version {version} meanwhile; repeat the "
                "repair"
            )


def stale_roots(resumes: Mapping[int, int], newest: int) -> list[int]:
    """Return the versions up to `newest` whose roots may have changes of voided versions, and vouch for none.

    `resumes` maps each voided version to the one whose root vouches for its changes, 0 for none.
    """
    versions = set[int]()
    for version, resumed in resumes.items():
        versions.update(range(-(-version // ROOT_EVERY) * ROOT_EVERY, resumed or newest + 1, ROOT_EVERY))
    return sorted(versions)


def saved_key(version: int, data: bytes) -> str:
    """Return the key at which the record of a voided version, or the damaged archive up to it, is saved."""
    return f"damaged/{version:020d}-{xxhash.xxh3_128_hexdigest(data)}"


async def _create(storage: Storage, key: str, data: bytes) -> None:
    with contextlib.suppress(AlreadyExists):  # an earlier repair was interrupted
        await storage.create(key, data, Durability.FSYNC)


async def _object(log: LogReader, version: int) -> bytes:
    """Return the bytes of a record, or the first of its damaged object; empty if it is missing."""
    with contextlib.suppress(*UNREADABLE):
        return await log.commits.get(version)
    key = commit_key(version)
    try:
        return await log.storage.get(key)
    except NotFound:
        return b""
    except Corrupt:
        data = bytearray(min(COLLECTION_BYTES, await log.storage.size(key) or 0))
        await log.storage.read(key, 0, [data], len(data))
        return bytes(data)


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
