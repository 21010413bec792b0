"""The place that a copy is made in: what is there already, and how objects are created and replaced in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from tstore.copying.source_records import SourceRecords
from tstore.errors import AlreadyExists, Conflict, Denied
from tstore.format.layout import MARKER, commit_key
from tstore.log.marker import Marker, read_marker
from tstore.log.reader import LogReader
from tstore.runtime.concurrency import together
from tstore.storage.base import Storage
from tstore.storage.objects import Durability
from tstore.storage.probe import prove

__all__ = ["Destination"]


class Destination:
    """A backend that becomes, or already is, the store of `marker`; counts what was created there."""

    def __init__(self, backend: Storage, marker: Marker) -> None:
        self.backend = backend
        self.objects = self.bytes = 0
        self._marker = marker

    @property
    def uuid(self) -> UUID:
        """The identity of the store that it becomes."""
        return self._marker.uuid

    async def newest(self, records: SourceRecords) -> int | None:
        """Return its newest version, None where it is no store yet.

        Raises `AlreadyExists` where it is another store, `Conflict` where its records are not those of the source.
        """
        marker = await read_marker(self.backend)
        if not self.backend.capabilities.conditional_create:  # known by the first answer
            await prove(self.backend)
        if marker is None:
            return None
        self._check_marker(marker)
        newest = await LogReader(self.backend).newest()
        common = min(newest, records.newest)
        if common and not await self._agrees(records, common):
            raise self.apart(records, await self._first_difference(records, common))
        return newest

    async def check_same(self, records: SourceRecords, versions: Sequence[int]) -> None:
        """Raise `Conflict` where the destination has another record of one of these versions than the source."""
        agree = await together(lambda version: self._agrees(records, version), versions)
        if not all(agree):
            raise self.apart(records, versions[agree.index(False)])

    def apart(self, records: SourceRecords, version: int) -> Conflict:
        """The error for a destination whose version is not that of the source."""
        return Conflict(
            f"{self.backend.url} has commits of its own: from version {version} on they are not those of "
            f"{records.backend.url}, though both were one store, and nothing was created behind them; copy to an "
            "empty destination",
            [],
        )

    async def create(self, key: str, data: bytes, durability: Durability = Durability.FSYNC) -> bool:
        """Create an object; whether it was made here and now, and not there already."""
        try:
            await self.backend.create(key, data, durability)
        except AlreadyExists:
            return False
        self.objects += 1
        self.bytes += len(data)
        return True

    async def create_record(
        self, records: SourceRecords, version: int, data: bytes, durability: Durability
    ) -> bool:
        """Create a record; whether it was made here and now. `Conflict` where the version is another."""
        if await self.create(commit_key(version), data, durability):
            return True
        if await self.backend.get(commit_key(version)) != data:
            raise self.apart(records, version)
        return False

    async def create_marker(self) -> None:
        """Make it a store; `AlreadyExists` where another copy has just made it another store."""
        if not await self.create(MARKER, self._marker.encode()):
            marker = await read_marker(self.backend)
            if marker is not None:
                self._check_marker(marker)

    async def remove_damaged(self, key: str) -> None:
        """Delete an object that is known to be damaged and whose replacement is at hand."""
        try:
            await self.backend.delete(key)
        except Denied as error:
            raise Denied(
                f"{self.backend.url}: {key} is damaged and can't be replaced: {error}; delete it where it is "
                "stored, and repeat the copy"
            ) from error

    async def sizes(self, keys: list[str]) -> Mapping[str, int]:
        """The sizes of those objects that are there."""
        found = zip(keys, await together(self.backend.size, keys), strict=True)
        return {key: size for key, size in found if size is not None}

    def _check_marker(self, marker: Marker) -> None:
        if marker.uuid != self._marker.uuid:
            raise AlreadyExists(
                f"{self.backend.url} is another store: its uuid is {marker.uuid}, that of the copy would be "
                f"{self._marker.uuid}; choose an empty destination"
            )

    async def _agrees(self, records: SourceRecords, version: int) -> bool:
        return await self.backend.get(commit_key(version)) == await records.read(version)

    async def _first_difference(self, records: SourceRecords, version: int) -> int:
        """The first version in which the two differ, of those up to one in which they do."""
        low, high = 0, version
        while high - low > 1:
            middle = (low + high) // 2
            if await self._agrees(records, middle):
                low = middle
            else:
                high = middle
        return high
