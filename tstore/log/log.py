"""The log of commits: numbered records, each created once."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

from tstore.format.records import Record
from tstore.format.tree import Changes
from tstore.log.append import Append, FramedRecord, check_not_condemned
from tstore.log.group_commit import CommitQueue, Newer, QueuedCommit, Retry, Validate
from tstore.log.reader import LogReader
from tstore.storage.base import Storage
from tstore.storage.objects import Durability

__all__ = ["Log"]


class Log:
    """The commits of one store: read through `reader`, extended by `append`."""

    def __init__(self, reader: LogReader) -> None:
        self.storage: Storage = reader.storage
        self.reader = reader
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, CommitQueue]
        self._queues = weakref.WeakKeyDictionary()  # one for each loop; a forked child has another loop

    async def append(
        self,
        record: Record,
        validate: Validate,
        durability: Durability,
        retried: Callable[[Retry], object] = lambda retry: None,
        changes: Changes | None = None,
    ) -> int:
        """Append a record by the protocol in `log.append` and return its version.

        `validate(newer)` is awaited with the versions and records of newer commits, without void ones; it raises
        `Conflict`, or returns the record to continue with. `retried` is called for every creation that failed. A
        record passed with its `changes` may share a record with other commits of this process: see `group_commit`.
        Raises `InvalidArgument` if readers would refuse the record, `Conflict`, `CommitOutcomeUnknown`.
        """
        first = FramedRecord.from_record(record)  # raises before the record is combined with others
        queue = self._queues.setdefault(asyncio.get_running_loop(), CommitQueue())

        async def checked(newer: Newer) -> Record:
            for version, other in newer:
                await check_not_condemned(self.reader, record, version, other)
            return await validate(newer)

        async def append(record: Record, validate: Validate, retried: Callable[[Retry], object]) -> int:
            return await Append(self.reader, record, validate, retried, first, durability).run()

        return await queue.append(QueuedCommit(record, checked, retried, changes, len(first.data)), append)

    async def check_not_condemned(self, transaction: str, base: int) -> None:
        """Raise `Conflict` if a garbage collection above `base` condemned a transaction that is not committed."""
        for version, other in enumerate(await self.reader.above(base), base + 1):
            if other.transaction == transaction:
                return
            await check_not_condemned(self.reader, Record(transaction, base, 0.0), version, other)

    async def make_durable(self, version: int, durability: Durability) -> None:
        """Make an existing commit as durable as requested; its creator may have died before doing so."""
        if durability is Durability.FSYNC and not (await self.reader.record(version)).durable:
            await self.storage.sync()
        else:
            await self.storage.flush("commits", durability)
