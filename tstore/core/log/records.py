"""The records of a log: a cache that detects a replaced store and misplaced records.

A log is append-only, so a cached record stays valid unless the store was replaced (by restoring a backup at its
URL, for instance). Every search for newer records therefore fetches the newest known record again. If that record
has changed or is gone, all later searches raise `TimelineChanged`: the cache may have records of both histories.

The record of a garbage collection may list a hundred thousand versions, which most readers do not need. So a
cached record has `UNREAD` in place of its collection. `Records.collection` reads the collection on demand. At most
one collection longer than `SHORT_OBJECT` is cached.

Records form a chain: each is checked to be in its place, in the history of one store.
The bytes of a record do not depend on its version, so a writer that lost a race for a number need not write and
fsync them again. But each has a link: the id of the log, and the version and checksum of the newest record that
its writer had validated it against when it made the bytes (`frame.Link`). The rules are:
1. The link of version N refers to a version from the newest one with a root below N, 64 * ((N - 1) // 64), up to
   N - 1. A writer whose attempts pass a version with a root makes its bytes again.
2. A reader begins at a root, which has the checksum of its version's record, and reads all records after it. So it
   knows all records to which these may refer, and checks every link without a further request.
3. A record that was copied over another number of the same block of 64 is noticed because its bytes are there
   twice, or because later links refer to those that it replaced; in another block, by rule 1.
4. A record that a repair put in the place of a voided one lists the checksums by which later links may refer to
   it.
5. A root that builds on an earlier one names the checksum of the record of that version.

A link may refer to any record of its block, so one case passes undetected: the writer of the record had read only
versions that the other history has too. This takes a writer that was about to commit when the histories parted.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from typing import Any, Generic, TypeVar, cast
from uuid import UUID

from msgspec.structs import replace

from tstore.core.format.frame import NO_RECORD, Link, check_of, link_of
from tstore.core.format.layout import archive_key, commit_key, first_link
from tstore.core.format.objects.encoding import memory_of
from tstore.core.format.objects.records import Collection, Record, StoredRecord
from tstore.core.log.objects import MetadataObjects
from tstore.core.storage.objects import SHORT_OBJECT
from tstore.errors import Corrupt, NotFound, TimelineChanged, UnsupportedFormat

__all__ = ["CACHED_RECORDS", "UNREAD", "Chain", "OtherHistory", "Records", "VersionCache"]

_MAX_CHECKS = 1024
_NOTHING: dict[bytes, int] = {}
_TWO_HISTORIES = "the store has records of two histories (diverged copies that were merged?)"


class OtherHistory(Corrupt):
    """Raised if the link of a record does not match the linked record: it is of another history of the store."""


class Chain:
    """The checksums of records, as read and as links name them, with which further records are compared.

    `log_id` is the id of the log, None for that of the first record added. Threads may share a chain.
    """

    def __init__(self, log_id: bytes | None = None) -> None:
        self.log_id = log_id
        self._accepted: dict[int, tuple[bytes, ...]] = {}  # by version, the checksums that links to it may name
        self._named: dict[int, dict[bytes, int]] = {}  # by version, the checksums that links to it name, and where
        self._versions: dict[bytes, int] = {}  # by checksum

    def add(self, version: int, record: Record, data: bytes) -> None:
        """Check and add the record of a version; raise what `check` raises."""
        check = check_of(data)
        if self._versions.get(check) == version:
            return
        try:
            link, accepted = self.check(version, record, data)
        except OtherHistory:
            self._accepted.setdefault(version, ())  # records that refer to it are of that history too
            raise
        self.log_id = link.log_id
        self.append(version, check, accepted)
        if (named := self._named.get(link.version)) is None:
            named = self._named[link.version] = {}
        named[link.check] = version

    def append(self, version: int, check: bytes, accepted: tuple[bytes, ...] = ()) -> None:
        """Add the record of a version, unchecked; links may refer to it by the checksums `accepted`, if any."""
        self._accepted[version] = accepted or (check,)
        self._versions[check] = version
        if len(self._versions) > _MAX_CHECKS or len(self._named) > _MAX_CHECKS:
            self._forget_oldest()

    def check(self, version: int, record: Record, data: bytes) -> tuple[Link, tuple[bytes, ...]]:
        """Return the link of a record, and the checksums by which links may refer to it.

        Raise `Corrupt` unless the record may be that of a version of this log.
        """
        check, link = check_of(data), link_of(data)
        accepted = (check, *record.replaced) if record.void else (check,)
        if self.log_id is not None and link.log_id != self.log_id:
            raise Corrupt(f"it is a record of another store, whose log has the id {UUID(bytes=link.log_id)}")
        first = first_link(version)
        if not first <= link.version < version:
            raise Corrupt(
                f"it is the record of another version: it refers to version {link.version}; expected one from "
                f"{first} to {version - 1}"
            )
        if (other := self._versions.get(check, version)) != version:
            raise Corrupt(f"it equals {commit_key(other)}, so one of them is in the place of another record")
        for named, later in list(self._named.get(version, _NOTHING).items()):
            if named not in accepted:
                raise Corrupt(
                    f"{commit_key(later)} follows another record {version} than this one: {_TWO_HISTORIES}"
                )
        if not self.agrees(link.version, link.check):
            raise OtherHistory(
                f"it follows another {commit_key(link.version)} than the one here: {_TWO_HISTORIES}"
            )
        return link, accepted

    def agrees(self, version: int, check: bytes) -> bool:
        """Return whether the record of a version may have a checksum, as far as is known."""
        return check in self._accepted.get(version, (check if version else NO_RECORD,))

    def forget(self, version: int) -> None:
        """Forget what is known of the record of a version, which a repair has replaced."""
        for check in self._accepted.pop(version, ()):
            self._versions.pop(check, None)
        self._named.pop(version, None)

    def _forget_oldest(self) -> None:
        tables: tuple[dict[Any, Any], ...] = self._accepted, self._named, self._versions
        for known in tables:
            for oldest in list(known)[: len(known) - _MAX_CHECKS // 2]:
                known.pop(oldest, None)


V = TypeVar("V")

CACHED_RECORDS = 256
_CACHED_BYTES = 8 << 20  # bytes of records in memory
_COLLECTIONS, _COLLECTIONS_BYTES = 16, 2 << 20  # the most recent one is cached regardless of its length


class VersionCache(Generic[V]):
    """A bounded cache of values by version: the newest entries, up to about `max_count` and `max_bytes` in total.

    Eviction starts an eighth above `max_count` and removes several entries at a time. Every step is a single dict
    operation, which is atomic, and assumes nothing about the steps before it, so threads need no lock.
    """

    def __init__(self, max_count: int, max_bytes: float = math.inf) -> None:
        self._max_count = max_count
        self._high_water = max_count + max_count // 8
        self._max_bytes = max_bytes
        self._values: dict[int, tuple[V, int]] = {}  # with their sizes
        self._unchecked = 0  # bytes added since the total was last compared with the limit

    def get(self, version: int) -> V | None:
        """Return the value of a version, or None if it is not cached."""
        entry = self._values.get(version)
        return None if entry is None else entry[0]

    def put(self, version: int, value: V, size: int = 0) -> None:
        """Cache the value of a version as the newest entry; evict the oldest entries beyond the limits."""
        self._values.pop(version, None)
        self._values[version] = value, size
        if len(self._values) > self._high_water:
            for old in list(self._values)[: -self._max_count]:
                self._values.pop(old, None)
        if size * self._high_water <= self._max_bytes:
            return  # values as small as this one cannot exceed the limit together
        self._unchecked += size
        if self._unchecked > self._max_bytes / 8:
            self._unchecked = 0
            entries = list(self._values.items())
            total = sum(entry_size for _, (_, entry_size) in entries)
            for old, (_, old_size) in entries[:-1]:  # the newest entry always stays
                if total <= self._max_bytes:
                    return
                total -= old_size
                self._values.pop(old, None)

    def drop_from(self, version: int) -> None:
        """Evict a version and all later ones."""
        for cached in self.versions():
            if cached >= version:
                self._values.pop(cached, None)

    def versions(self) -> list[int]:
        """Return the cached versions, the oldest entry first."""
        return list(self._values)

    def __contains__(self, version: int) -> bool:
        return version in self._values

    def absent(self, versions: Iterable[int]) -> list[int]:
        """Return the versions that are not cached."""
        return [version for version in versions if version not in self._values]


UNREAD = cast(Collection, object())
"""A collection that has not been read. It has no attributes, so that code that should have read it fails."""


class Records:
    """The records of one log, cached. The event loops of several threads may share the cache.

    `log_id` is the log id in the records, None to take that of the first record read.
    """

    def __init__(self, objects: MetadataObjects, log_id: bytes | None = None) -> None:
        self._objects = objects
        self._storage = objects.storage
        self._commits = objects.commits
        self.chain = Chain(log_id)
        """What is known of the links between the records."""
        self._cached: VersionCache[StoredRecord] = VersionCache(CACHED_RECORDS, _CACHED_BYTES)
        self.cached = self._cached.get
        """Returns the record of a version, or None if it is not cached."""
        self._collections: VersionCache[Collection] = VersionCache(_COLLECTIONS, _COLLECTIONS_BYTES)
        self.last: tuple[int, bytes] = (0, b"")
        """The newest version read or appended (0: none), and its record's checksum; never evicted."""
        self.replaced = ""
        """The message of `TimelineChanged` once the store was replaced; empty until then."""
        self._repairs: set[int] = set()  # versions of the commits that record a repair
        self.voided: set[int] = set()
        """Versions known to be voided: a repair replaced their records with void ones. See `Trees.drop_voided`."""

    def check_timeline(self) -> None:
        """Raise `TimelineChanged` if the store is known to have been replaced since it was opened."""
        if self.replaced:
            raise TimelineChanged(self.replaced)

    def __contains__(self, version: int) -> bool:
        return version in self._cached

    def absent(self, versions: Iterable[int]) -> list[int]:
        """Return the versions whose records are not cached."""
        return self._cached.absent(versions)

    async def record(self, version: int) -> Record:
        """Return the record of a version; raise `NotFound` if there is none."""
        return (await self.stored(version)).record

    async def stored(self, version: int) -> StoredRecord:
        """Return the record of a version with its checksum; raise `NotFound` if there is none."""
        if (cached := self._cached.get(version)) is not None:
            return cached
        try:  # like `MetadataObjects.load`, but with one call fewer for each of thousands of records
            data = await self._commits.get(version, SHORT_OBJECT)
        except Corrupt:  # longer than `SHORT_OBJECT`, or damaged
            return await self._objects.load_long(
                version, lambda data: self.add_bytes(version, data), lambda: self._cached.get(version)
            )
        return self.add_bytes(version, data)

    async def short_records(self, versions: Iterable[int]) -> list[StoredRecord | None]:
        """Return the records of versions, in their order; None for one that is long, missing or damaged.

        Callers read these again later, one at a time.
        """
        found = {version: self._cached.get(version) for version in versions}
        absent = [version for version, stored in found.items() if stored is None]
        objects = await self._commits.short_objects(absent) if absent else []
        objects.reverse()  # each is popped below, so that it is freed as soon as it is decoded
        for version in absent:
            if (data := objects.pop()) is not None:
                with contextlib.suppress(Corrupt, UnsupportedFormat):
                    stored = self.add_bytes(version, data)
                    found[version] = None if stored.is_long else stored  # at once, so that few are in memory
        return [None if stored is None or stored.is_long else stored for stored in found.values()]

    async def stored_or_none(self, version: int) -> StoredRecord | None:
        """Return the record of a version with its checksum, or None if it does not exist."""
        try:
            return await self.stored(version)
        except NotFound:
            return None

    async def stored_below(self, version: int, newest: int) -> StoredRecord:
        """Return what `stored` returns, but raise `Corrupt` for a missing record below version `newest`."""
        try:
            return await self.stored(version)
        except NotFound:
            if version < newest:
                raise self.missing_error(version) from None
            raise

    async def collection(self, version: int) -> Collection | None:
        """Return what the garbage collection of a version decided, or None if it is not a collection."""
        if (await self.record(version)).collection is None:
            return None
        if (cached := self._collections.get(version)) is not None:
            return cached

        def decode(data: bytes) -> Collection | None:
            self.confirm(version, data)
            record = self._decode(version, data)
            self._without_collection(version, record, len(data))
            return record.collection

        return await self._objects.load(version, decode, lambda: self._collections.get(version))

    async def with_collection(self, version: int, record: Record) -> Record:
        """Return the record of a version with its garbage collection read, as `Tree.after` needs it."""
        return record if record.collection is None else replace(record, collection=await self.collection(version))

    def append(self, version: int, record: Record, data: bytes) -> None:
        """Cache a record that this process has created as a version, with its bytes."""
        self.chain.append(version, self.add(version, record, data).check)

    def add(self, version: int, record: Record, data: bytes) -> StoredRecord:
        """Cache the record of a version, whose place has been checked, and return it as `stored` does."""
        stored = StoredRecord(record, check_of(data), memory_of(data))
        if stored.record.collection is not None:
            stored = stored._replace(record=self._without_collection(version, record, len(data)))
        self._cached.put(version, stored, stored.memory)
        last = version, stored.check
        if version > self.last[0]:
            self.last = last  # no lock: the GIL is not released between the comparison and the assignment
        return stored

    def add_bytes(self, version: int, data: bytes) -> StoredRecord:
        """Decode and cache the bytes of a record; raise `Corrupt`, `UnsupportedFormat` or `TimelineChanged`."""
        record = self._decode(version, data)
        if version == self.last[0]:
            self.confirm(version, data)
        if record.metadata and record.voids and version not in self._repairs:
            self._repairs.add(version)
            voided = [v for v in record.voids if 0 < v < version]
            self.voided.update(voided)
            for each in voided:
                if (cached := self._cached.get(each)) is None or not cached.record.void:
                    self.chain.forget(each)  # it may be the record before the repair
        try:
            self.chain.add(version, record, data)
        except Corrupt as error:
            raise self._objects.with_key(commit_key(version), self._in_archive(version, data, error)) from error
        return self.add(version, record, data)

    def _in_archive(self, version: int, data: bytes, error: Corrupt) -> Corrupt:
        """Return the error of a record, with the archive that has it, or the one to which it refers."""
        archived = [v for v in (link_of(data).version, version) if self._commits.is_archived(v)]
        if not archived or isinstance(error, OtherHistory) == self._commits.is_archived(version):
            return error
        key = archive_key(archived[0])
        return type(error)(f"{error}; {key}, which has {commit_key(archived[0])}, may be that of a diverged copy")

    async def refetch(self, version: int, check: bytes) -> None:
        """Read the record of a version again; raise `TimelineChanged` unless it has this checksum."""
        if version == 0:
            return

        def compare(data: bytes) -> None:
            if check_of(data) != check:
                raise self._timeline_changed(version, data)

        self._commits.forget(version)
        load = functools.partial(self._objects.load, version, compare, lambda: None)
        try:
            try:
                await load()
            except NotFound:  # a first look may miss a record that is archived meanwhile (`log.commits`)
                await load()
        except NotFound:
            raise self._timeline_changed(version, None) from None

    def confirm(self, version: int, data: bytes | None) -> None:
        """Raise `TimelineChanged` if a known record is absent now (`data` is None) or differs from `data`."""
        if data is None:
            raise self._timeline_changed(version, data)
        cached, (last, check) = self._cached.get(version), self.last
        if cached is not None:
            check = cached.check
        elif version != last:
            return  # nothing is known of this record
        if check_of(data) != check:
            raise self._timeline_changed(version, data)

    def _timeline_changed(self, version: int, data: bytes | None) -> TimelineChanged:
        """Record that the store was replaced, and return the error; raise `Corrupt` if the bytes are damaged."""
        record = None if data is None else self._objects.decode(commit_key(version), data, Record)
        what = "is gone" if data is None else "differs from the record read before"
        cause = f"{commit_key(version)} {what}: the store was replaced while it was open, as by a restored backup"
        if record is not None and record.was_voided:
            cause = f"a repair voided version {version} while the store was open"
        self.replaced = f"{self._storage.url}: {cause}; open it again"
        return TimelineChanged(self.replaced)

    def missing_error(self, version: int) -> Corrupt:
        """Return the error for a record that is missing although later ones exist."""
        return Corrupt(
            f"{self._storage.url}: {commit_key(version)} is missing, though later commits exist, so they can't be "
            f"read and nothing can be committed; {self._objects.advice}"
        )

    def _decode(self, version: int, data: bytes) -> Record:
        if len(data) > SHORT_OBJECT:
            self._collections.drop_from(0)  # two long collections would take too much memory
        return self._objects.decode_record(version, data)

    def _without_collection(self, version: int, record: Record, size: int) -> Record:
        """Cache the collection of a record separately, and return the record with `UNREAD` in its place."""
        if record.collection is None or record.collection is UNREAD:
            return record
        self._collections.put(version, record.collection, size)
        return replace(record, collection=UNREAD)
