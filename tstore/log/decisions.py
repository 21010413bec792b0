"""What garbage collections decided: kept apart from their records, of which many are in memory at once.

A gc's record may list a hundred thousand versions. Whoever walks the log has many records at hand, and as a rule
needs no more of a gc's than that it is one. So a record that is read has `UNREAD` in place of its collection, and
`collection` reads that when it is needed; only one long collection is kept.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import cast

from msgspec.structs import replace

from tstore.errors import Corrupt
from tstore.format.layout import commit_key
from tstore.format.records import Collection, Record
from tstore.log.objects import Objects
from tstore.log.recent import Recent
from tstore.storage.base import SHORT, Backend

__all__ = ["UNREAD", "Deciding"]

_KEPT, _KEPT_BYTES = 16, 2 << 20  # collections, and the bytes of their records; the newest stays, however long


class _Unread:
    """Has no field of a collection, so that code fails which has not asked for it."""


UNREAD = cast(Collection, _Unread())
"""Stands in a record that was read for what the gc decided."""


class Deciding(Objects):
    """The metadata objects of one store, and what its gcs decided."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self._decided: Recent[Collection] = Recent(_KEPT, _KEPT_BYTES)

    @abstractmethod
    async def record(self, version: int) -> Record:
        """The record of a version; `NotFound` where there is none."""

    @abstractmethod
    def _confirm(self, version: int, data: bytes | None) -> None:
        """Raises `TimelineChanged` where these bytes, read just now, are not of the record that is known."""

    async def collection(self, version: int) -> Collection | None:
        """What the gc of a version decided, None where that is no gc's."""
        if (await self.record(version)).collection is None:
            return None
        if (known := self._decided.get(version)) is not None:
            return known

        def read(data: bytes) -> Collection | None:
            self._confirm(version, data)
            record = self._record_in(version, data)
            self._apart(version, record, len(data))
            return record.collection

        return await self.taken(commit_key(version), read, lambda: self._decided.get(version))

    async def whole(self, version: int, record: Record) -> Record:
        """The record of a version with what its gc decided, as `Tree.after` needs it."""
        return record if record.collection is None else replace(record, collection=await self.collection(version))

    async def collected(self, version: int) -> int:
        """What the record of a version says is the newest gc up to it, 0 for none."""
        if version == 0:
            return 0
        record = await self.record(version)
        return record.collected if record.collection is None else version

    async def last_gc(self, version: int) -> int:
        """The version of the newest gc up to a version, 0 where there is none; `Corrupt`."""
        return await self.gc_named(await self.collected(version))

    async def gc_named(self, last: int) -> int:
        """The version of the gc that a record names as the last before it.

        Raises `Corrupt` where that is none. A void record stands for the gc before it: `tstore repair` may have
        put it in the place of a gc's.
        """
        while last and (record := await self.record(last)).collection is None:
            if not record.void:
                raise Corrupt(
                    f"{self.backend.url}: {commit_key(last)} is named as the record of a garbage collection, and "
                    f"is none; {self.advice}"
                )
            last = record.collected
        return last

    def _record_in(self, version: int, data: bytes) -> Record:
        """The record in what was read of a version, with what a gc decided."""
        if len(data) > SHORT:
            self._decided.drop(0)  # two long ones take too much memory
        record = self.decoded_record(commit_key(version), data)
        try:
            record.check_number(version)
        except Corrupt as error:
            raise Corrupt(f"{self.backend.url}: {commit_key(version)}: {error}; {self.advice}") from error
        return record

    def _apart(self, version: int, record: Record, size: int) -> Record:
        """The record of a version, of `size` bytes, without what a gc decided, which is kept here."""
        if record.collection is None or record.collection is UNREAD:
            return record
        self._decided.put(version, record.collection, size)
        return replace(record, collection=UNREAD)
