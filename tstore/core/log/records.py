"""The records of a log: a cache that notices when the store was replaced, or a record is out of place (`chain`).

A log is append-only, so a cached record stays valid unless the store was replaced (by restoring a backup at its
URL, for instance). Every search for newer records therefore fetches the newest known record again. If that record
has changed or is gone, all later searches raise `TimelineChanged`: the cache may have records of both histories.

The record of a garbage collection may list a hundred thousand versions, which most readers do not need. So a
cached record has `UNREAD` in place of its collection. `Records.collection` reads the collection on demand. At most
one collection longer than `SHORT_OBJECT` is cached.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterable
from typing import Generic, TypeVar, cast

from msgspec.structs import replace

from tstore.core.format.frame import check_of, link_of
from tstore.core.format.layout import archive_key, commit_key
from tstore.core.format.objects.encoding import memory_of
from tstore.core.format.objects.records import Collection, Record, StoredRecord
from tstore.core.log.chain import Chain, OtherHistory
from tstore.core.log.objects import MetadataObjects
from tstore.core.storage.objects import SHORT_OBJECT
from tstore.errors import Corrupt, NotFound, TimelineChanged, UnsupportedFormat

__all__ = ["CACHED_RECORDS", "UNREAD", "Records", "VersionCache"]

V = TypeVar("V")

CACHED_RECORDS = 256
_CACHED_BYTES = 8 << 20  # of records in memory
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


UNREAD = cast(Collection, object())
"""A collection that has not been read. It has no attributes, so that code that should have read it fails."""


class Records:
    """The records of one log, cached. The event loops of several threads may share the cache.

    `log_id` is what the records name as the id of their log, None for that of the first record read.
    """

    def __init__(self, objects: MetadataObjects, log_id: bytes | None = None) -> None:
        self._objects = objects
        self._storage = objects.storage
        self._commits = objects.commits
        self.chain = Chain(log_id)
        """What is known of the links between the records."""
        self._cached: VersionCache[StoredRecord] = VersionCache(CACHED_RECORDS, _CACHED_BYTES)
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

    def cached(self, version: int) -> StoredRecord | None:
        """Return the record of a version if it is cached."""
        return self._cached.get(version)

    def cached_versions(self) -> list[int]:
        """Return the versions whose records are cached."""
        return self._cached.versions()

    def __contains__(self, version: int) -> bool:
        return version in self._cached

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
        """Do what `stored` does, but raise `Corrupt` for a missing record below version `newest`."""
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
        """Note that the store was replaced, and return the error; raise `Corrupt` if the bytes are damaged."""
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
