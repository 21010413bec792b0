"""The destination of a copy: its state, and the objects created and replaced in it."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Iterator, Sequence
from uuid import UUID

from tstore.core.copying.source_records import SourceRecords
from tstore.core.format.layout import MARKER, commit_key, is_record, root_key, version_of
from tstore.core.format.objects.encoding import decode
from tstore.core.format.objects.records import REPAIR, Record
from tstore.core.format.objects.roots import decode_root
from tstore.core.log.commits import CommitObjects, places_of
from tstore.core.log.marker import Marker, check_not_nested, read_marker
from tstore.core.log.reader import LogReader
from tstore.core.log.roots import has_lost_changes
from tstore.core.runtime.concurrency import together
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.storage.limits import checked_pages
from tstore.core.storage.objects import Durability, PutMode
from tstore.core.storage.probe import check_exclusive
from tstore.errors import AlreadyExists, Conflict, Corrupt, Denied, InvalidArgument, NotFound

__all__ = ["Destination"]


class Destination:
    """The destination of a copy: a store with `marker`, or one that the copy is creating.

    `objects` and `bytes` count what the copy created.
    """

    def __init__(self, storage: Storage, marker: Marker) -> None:
        self.storage = storage
        self.commits = CommitObjects(storage)
        self.objects = self.bytes = 0
        self._marker = marker

    @property
    def uuid(self) -> UUID:
        """The uuid of the store."""
        return self._marker.uuid

    @property
    def log_id(self) -> bytes:
        """The log id in the records of both stores."""
        return self._marker.log_id

    def reader(self) -> LogReader:
        """Return a reader of the store."""
        return LogReader(self.storage, log_id=self.log_id)

    async def newest(self, records: SourceRecords) -> int | None:
        """Return the newest version of the destination, or None if it is not a store yet.

        Raise `AlreadyExists` if this is another store, or `Conflict` if its records differ from the source's.
        """
        marker = await read_marker(self.storage)
        if not self.storage.capabilities.conditional_create:  # known after the first response
            await check_exclusive(self.storage)
        if marker is None:
            await check_not_nested(self.storage)
            return None
        self._check_marker(marker)
        newest = await self.reader().newest()
        common = min(newest, records.newest)
        while common and not await self.commits.existing([common]):
            common -= 1
        if common and not await self._agrees(records, common):
            version = await self._first_difference(records, common)
            await self._readable(version)
            raise self._diverged(records, version)
        return newest

    async def lost_records(self, records: SourceRecords, newest: int) -> list[int]:
        """List the records of both stores, and return the versions up to `newest` that the destination lacks.

        Compare records whose sizes differ: raise `Corrupt` for a damaged one, and `Conflict` for one of another
        history, as after `cp -rn` of a diverged copy.
        """
        sizes = await _record_sizes(self.storage)
        expected = await _record_sizes(records.storage)
        for version in sorted(sizes.keys() & expected.keys()):
            if sizes[version] != expected[version] and not (await self._readable(version)).was_voided:
                await self.check_same_records(records, [version])
        unlisted = [version for version in range(1, min(newest, records.newest) + 1) if version not in sizes]
        return sorted(set(unlisted) - await self.commits.existing(unlisted))

    async def check_same_records(self, records: SourceRecords, versions: Sequence[int]) -> None:
        """Raise `Conflict` if a record of these versions differs from the source's; lost records are ignored."""
        agree = await together(lambda version: self._agrees(records, version), versions)
        if not all(agree):
            raise self._diverged(records, versions[agree.index(False)])

    async def create(self, key: str, data: bytes) -> bool:
        """Create an object unless it exists; return whether this call created it."""
        return await self._count_created(self.storage.create(key, data, Durability.FSYNC), data)

    async def create_root(self, version: int, data: bytes) -> None:
        """Create the root of a version; a server may refuse it, and derive the root itself when it needs one.

        Raise `Denied` if the server can't, because only this root has the changes of a lost record.
        """
        try:
            await self.create(root_key(version), data)
        except InvalidArgument as error:
            if await has_lost_changes(self.storage, await run(decode_root, data)):
                raise Denied(
                    f"{self.storage.url}: the copy lacks {root_key(version)}, which alone has the changes of "
                    "a lost record; copy again with a token that has the scope admin"
                ) from error

    async def _count_created(self, creation: Awaitable[None], data: bytes) -> bool:
        """Await the creation of an object and count the object; return False if it existed."""
        try:
            await creation
        except AlreadyExists:
            return False
        self.objects += 1
        self.bytes += len(data)
        return True

    async def create_records(self, records: SourceRecords, batch: Sequence[tuple[int, bytes]]) -> int:
        """Create the records that do not exist, in order; return their number.

        The bytes of all records are durable before the first appears, since `write` of a staged object makes them
        so. Their keys are durable once the caller flushes the folder `commits`, hence `Durability.NONE`.
        Raise `Conflict` if a version exists with another record, or if a record is that of a repair that voided
        versions, and the destination has these as they were before: copies replace no records.
        """
        before = self.objects
        for version, data in batch:
            if REPAIR.encode() in data and (voids := decode(data, Record).voids):
                await self.check_same_records(records, [v for v in voids if 0 < v < version])
        staged = {version: self.storage.stage(data, Durability.NONE) for version, data in batch}
        try:
            await together(lambda version: staged[version].write(commit_key(version)), staged)
            for version, data in batch:
                creation = staged[version].create(*places_of(version))
                if not await self._count_created(creation, data) and not await self._has_record(version, data):
                    raise self._diverged(records, version)
        finally:
            for record in staged.values():
                await record.discard()
        return self.objects - before

    async def create_marker(self) -> None:
        """Create the marker, which makes this a store; raise `AlreadyExists` if it has become another store."""
        if not await self.create(MARKER, self._marker.encode()):
            marker = await read_marker(self.storage)
            if marker is not None:
                self._check_marker(marker)

    async def replace_damaged(self, key: str, data: bytes) -> None:
        """Replace a damaged object by bytes that have been checked, durably; raise `Denied` if it is refused."""
        with self.advice(key, PutMode.REPLACE):
            await self.storage.put(key, [data], PutMode.REPLACE, Durability.FSYNC)
        self.objects += 1
        self.bytes += len(data)

    @contextlib.contextmanager
    def advice(self, key: str, mode: PutMode) -> Iterator[None]:
        """Raise `Denied`, with advice, if the storage refuses to replace a damaged object in this block."""
        try:
            yield
        except (Denied, InvalidArgument) as error:
            if mode is PutMode.CREATE:
                raise
            raise Denied(
                f"{self.storage.url}: {key} is damaged and can't be replaced: {error}; delete it where it is "
                "stored, and repeat the copy"
            ) from error

    def _diverged(self, records: SourceRecords, version: int) -> Conflict:
        return Conflict(
            f"{self.storage.url} and {records.storage.url} have diverged: their commits differ from version "
            f"{version} on; copy to an empty destination",
            [],
        )

    def _check_marker(self, marker: Marker) -> None:
        if marker.uuid != self._marker.uuid:
            raise AlreadyExists(
                f"{self.storage.url} is another store: its uuid is {marker.uuid}, but that of the source is "
                f"{self._marker.uuid} (a copy of one version has a new uuid); choose an empty destination"
            )

    async def _readable(self, version: int) -> Record:
        """Return a record; raise `Corrupt` if it is damaged."""
        key = commit_key(version)
        try:
            return decode(await self.commits.get(version), Record)
        except Corrupt as error:
            raise Corrupt(
                f"{self.storage.url}: {key} is damaged: {error}; delete it where it is stored, while nothing is "
                "written to this store, and repeat the copy"
            ) from error

    async def _agrees(self, records: SourceRecords, version: int) -> bool:
        """Return whether the record of a version equals the source's, or is missing."""
        data = await records.read(version)
        with contextlib.suppress(NotFound):
            return await self._has_record(version, data)
        return True

    async def _has_record(self, version: int, data: bytes) -> bool:
        return await self.commits.get(version) == data

    async def _first_difference(self, records: SourceRecords, version: int) -> int:
        """Return the first version whose records differ, found by bisection; the records of `version` differ."""
        low, high = 0, version
        while high - low > 1:
            middle = (low + high) // 2
            if await self._agrees(records, middle):
                low = middle
            else:
                high = middle
        return high


async def _record_sizes(storage: Storage) -> dict[int, int]:
    """Return the size of each record by version; an empty dict if the storage can't be listed."""
    if not storage.capabilities.listing:
        return {}
    pages = checked_pages(storage.pages("commits/"), "commits/", storage.url)
    entries = [entry async for page in pages for entry in page.entries if is_record(entry.key)]
    return {version_of(entry.key): entry.size for entry in entries}
