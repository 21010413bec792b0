"""The commit records of the source of a copy, verified, from one unchanged history.

A source can be replaced while it is copied, as when its files are restored from a backup; its records then differ
from some version on. Two histories never share a record above the version at which they diverge, so comparing the
newest record suffices (except for those that a repair voided, which `Destination.create_records` compares). It is
read first, and read again and compared after each batch of records.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping
from typing import TypeVar

from tstore.core.format.frame import NO_RECORD, Link, check_of, link_of, linked
from tstore.core.format.layout import commit_key
from tstore.core.format.objects.encoding import decode, encode
from tstore.core.format.objects.records import Record
from tstore.core.log.commits import CommitObjects
from tstore.core.log.records import Chain
from tstore.core.runtime.concurrency import batched, together
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import SHORT_OBJECT
from tstore.errors import Conflict, Corrupt, NotFound

__all__ = ["SourceRecords"]

T = TypeVar("T")


class SourceRecords:
    """The records of a source up to version `base`, and by version the `overrides` that only the destination has.

    The record of version `base` is read first; later reads of it are compared with this one. `log_id` is the id
    that the records name as that of their log.
    """

    def __init__(
        self, storage: Storage, log_id: bytes, base: int, anchor: bytes = b"", overrides: Mapping[int, Record] = {}
    ) -> None:
        self.storage = storage
        self._commits = CommitObjects(storage)
        self.base = base
        self.overrides = overrides
        self.newest = max([base, *overrides])
        self._anchor = anchor
        self._log_id = log_id
        self._chain = Chain(log_id)

    @staticmethod
    async def up_to(storage: Storage, log_id: bytes, base: int) -> SourceRecords:
        """Return the records of a source up to `base`; raise `Corrupt` if the last one is damaged or missing."""
        records = SourceRecords(storage, log_id, base)
        records._anchor = await records.read(base) if base else b""
        return records

    def with_override(self, version: int, record: Record) -> SourceRecords:
        """Return these records with one replaced by the destination's: that of version `base` or the next."""
        return SourceRecords(
            self.storage, self._log_id, self.base, self._anchor, {**self.overrides, version: record}
        )

    async def read(self, version: int) -> bytes:
        """Return the bytes of one record; raise `Corrupt` if it is damaged, missing or out of place.

        Raise `Conflict` if the history changed.
        """
        if (override := self.overrides.get(version)) is not None:
            if version == self.base:
                return linked(encode(override), link_of(self._anchor))
            before = check_of(await self.read(version - 1)) if version > 1 else NO_RECORD
            return linked(encode(override), Link(self._log_id, version - 1, before))
        try:
            data = await self._commits.get(version)
            self._chain.add(version, decode(data, Record), data)
        except (Corrupt, NotFound) as error:
            if self._anchor:
                await self.check_unchanged()
            raise Corrupt(
                f"{self.storage.url}: {commit_key(version)} can't be copied: {error}; restore it from a copy"
            ) from error
        return data

    async def in_order(self, versions: Iterable[int]) -> AsyncGenerator[list[tuple[int, bytes]], None]:
        """Yield batches of versions with the bytes of their records; a long record is a batch by itself.

        Raise `Conflict` if the history changed, or `Corrupt` if a record is damaged or missing.
        """
        for numbers in batched(versions):
            records = await together(self._read_short, numbers)
            await self.check_unchanged()
            for long, batch in itertools.groupby(zip(numbers, records, strict=True), lambda pair: pair[1] is None):
                if not long:
                    yield [(version, data) for version, data in batch if data is not None]
                else:
                    for version, _ in batch:
                        yield [(version, await self._read_unchanged(version))]

    async def _read_short(self, version: int) -> bytes | None:
        """Return the bytes of one record, or None if it is long: a batch of long records takes too much memory."""
        data = await self.read(version)
        return data if len(data) <= SHORT_OBJECT else None

    async def _read_unchanged(self, version: int) -> bytes:
        data = await self.read(version)
        await self.check_unchanged()
        return data

    async def guard(self, work: Awaitable[T]) -> T:
        """Await work on the source and return its result.

        Raise `Conflict` if the work failed because the history changed.
        """
        try:
            return await work
        except (NotFound, Corrupt):
            await self.check_unchanged()
            raise

    async def check_unchanged(self) -> None:
        """Raise `Conflict` if the history of the source has changed since the copy began."""
        try:
            unchanged = not self.base or await self._commits.get(self.base) == self._anchor
        except NotFound:
            unchanged = False
        if not unchanged:
            raise Conflict(
                f"{self.storage.url} was replaced during the copy: version {self.base} is not the same as at the "
                "start; repeat the copy",
                [],
            )
