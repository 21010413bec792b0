"""The log of commits: numbered records, each created once; and the protocol that appends a record.

The data that the record refers to is already durable. To append the record:
1. Read every record above the version that the record was validated against, unless a recent check showed
   that there is none.
   - A record with the same transaction id is this commit itself (its response was lost, or another host finished
     the cooperative commit): done.
   - A garbage collection may have condemned this transaction, or a pack that it reuses: `Conflict`. The collection
     may have removed a version that this record tags, or the source of this copy: `SnapshotExpired`.
   - A repair may have voided a version up to the one that this record was validated against: `Conflict`, whatever
     the record changes, since it may depend on what was voided. So too if it was this commit that was voided: the
     void record names the transaction, or no response came for that number.
   - A repair may have voided a version that this record tags or copies, or a garbage collection that has already
     deleted data of this transaction: `Conflict`.
   Otherwise the caller validates the transaction against all these records: it raises `Conflict`, or returns the
   record to continue with.
2. Create the first absent number, then look whether an archive has it, so that it existed before (`commits`). (If
   a later number is found, the log has a hole: `Corrupt`.) If the creation succeeds: done. The bytes, with
   a link to the newest record read (`records.Chain`), are written and fsynced once, however many numbers are tried
   (`Storage.stage`), except that numbers after a root need a newer link. A durable record requires a durable
   predecessor, so that all records below it are durable too: if the predecessor was created with
   `durability="none"`, everything is flushed first. Otherwise the predecessor's bytes were durable before it
   appeared, and one fsync of the folder makes the names of both durable.
3. If the number exists by now, go to 1 after a back-off with decorrelated jitter: each pause is drawn between the
   shortest one (2 ms, or as long as a quicker create) and three times the previous one. The longest pause shrinks
   with the number of attempts, so that no writer starves. It grows with the duration of an attempt (a server, many
   writers), so that fewer attempts fail. Commits of one process do not race: they take turns, or share a record
   (`group_commit`).
4. If the creation fails in any other way, read the record with that number. If it exists, go to 1: it may be this
   one, since it may have been linked before its folder could be fsynced. If it is absent after `Unavailable`,
   the request may yet arrive, so create a void record there, as durable as this record: once the void record
   exists, the late request can never succeed; continue with the next number. If it is absent after another error,
   it will never exist (`storage.base`): raise that error. As long as the fate of the number is unknown,
   every error is `CommitOutcomeUnknown`, and nothing is deleted. The append may then be repeated: it finds its
   record at 1, or creates it.
5. Every 64th version also writes `roots/<version>` (every process would write the same bytes, so a race is
   harmless) and then the `latest` hint. Losing either costs only time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import weakref
from collections.abc import Awaitable, Callable, Mapping

from msgspec.structs import replace

from tstore.core.format.frame import Link, linked
from tstore.core.format.layout import ROOT_EVERY, first_link
from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.records import VOID, Record
from tstore.core.format.tree.changes import Changes
from tstore.core.format.tree.retention import refuse_condemned
from tstore.core.log.commits import places_of
from tstore.core.log.expiry import check_unaffected, named_collection, refuse_voided
from tstore.core.log.group_commit import CommitQueue, Newer, QueuedCommit, Retry, Validate, next_pause
from tstore.core.log.reader import LogReader
from tstore.core.log.records import OtherHistory
from tstore.core.storage.base import StagedObject, Storage
from tstore.core.storage.objects import Durability
from tstore.errors import (
    AlreadyExists,
    CommitOutcomeUnknown,
    Conflict,
    Corrupt,
    NotFound,
    TimelineChanged,
    TStoreError,
    Unavailable,
    UnsupportedFormat,
)

__all__ = ["Append", "Log", "check_against_collection"]

_TICK = 0.5e-3  # seconds; an event loop rounds the time that it waits up to milliseconds
_QUICK = 1e-3  # seconds of a create


class Log:
    """The commits of one store: read through `reader`, extended by `append`, once `create` has created it."""

    def __init__(self, reader: LogReader, create: Callable[[], Awaitable[None]] | None = None) -> None:
        self.storage: Storage = reader.storage
        self.reader = reader
        self._create = create
        self._queues = weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, CommitQueue]()  # one per event loop

    async def ensure_created(self) -> None:
        """Create the store unless it exists; await this before anything else is written."""
        if self._create is not None:
            await self._create()
            self._create = None

    async def append(
        self, record: Record, validate: Validate, durability: Durability, changes: Changes | None = None
    ) -> int:
        """Append a record by the protocol above and return its version; see `enqueue`."""
        return await self.enqueue(record, validate, durability, changes=changes).outcome()

    def enqueue(
        self,
        record: Record,
        validate: Validate,
        durability: Durability,
        on_retry: Callable[[Retry], object] = lambda retry: None,
        changes: Changes | None = None,
    ) -> QueuedCommit:
        """Begin to append a record by the protocol above; `QueuedCommit.outcome` waits for the end.

        `validate(newer)` is awaited with the versions and records of newer commits, without void ones (except for
        those that a repair put in place of others); it raises `Conflict`, or returns the record to continue with.
        `on_retry` is called for every creation that failed or got no response. A commit passed with its `changes`
        may share a record with others of this process: see `group_commit`.
        Raise `InvalidArgument` if readers would refuse the record; that of a record with changes only is encoded
        later, perhaps with others, so the outcome may be this error. It may also be `Conflict` or
        `CommitOutcomeUnknown`.
        """
        data = b"" if changes is not None and record.is_plain else encode(record)

        async def check_and_validate(newer: Newer) -> Record:
            for version, other in newer:
                refuse_voided(self.storage.url, record, [v for v in other.voids if v <= record.base])
                await check_against_collection(self.reader, record, version, other)
            return await validate(newer)

        async def append_record(combined: Record, validate: Validate, on_retry: Callable[[Retry], object]) -> int:
            await self.ensure_created()
            # `combined` is `record` itself, unless several commits share it
            candidate = _CandidateRecord(self.storage, record, data, durability)
            try:
                return await Append(self.reader, combined, validate, on_retry, candidate, durability).run()
            finally:
                await candidate.discard()

        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None:
            queue = self._queues[loop] = CommitQueue()
        return QueuedCommit(queue, record, check_and_validate, on_retry, changes, data, append_record)

    async def check_not_condemned(self, transaction: str, base: int, reused: tuple[str, ...] = ()) -> None:
        """Raise `Conflict` if a garbage collection above `base` condemned an uncommitted transaction.

        Raise `SourceCondemned` if it condemned one of the packs that the transaction reuses.
        """
        record = Record(transaction, base, 0.0, reused=reused)
        for version, other in enumerate(await self.reader.above(base), base + 1):
            if other.transaction == transaction and not other.void:
                return
            await check_against_collection(self.reader, record, version, other)

    async def make_durable(self, version: int, durability: Durability) -> None:
        """Make an existing commit as durable as requested: its creator may have died before it did so."""
        if durability is Durability.FSYNC and not (await self.reader.record(version)).durable:
            await self.storage.sync()
        else:
            await self.storage.flush("commits", durability)


async def check_against_collection(log: LogReader, record: Record, version: int, newer: Record) -> None:
    """If a newer commit is a garbage collection, raise what `refuse_condemned` raises for a record."""
    if newer.collection is not None and (collection := await log.collection(version)) is not None:
        refuse_condemned(log.storage.url, record, version, collection)


class Append:
    """The append of one record, by the protocol above."""

    def __init__(
        self,
        log: LogReader,
        record: Record,
        validate: Validate,
        on_retry: Callable[[Retry], object],
        candidate: _CandidateRecord,
        durability: Durability,
    ) -> None:
        self._log = log
        self._record = record
        self._validate = validate
        self._on_retry = on_retry
        self._candidate = candidate
        self._durability = durability
        self._seen = record.base  # the record was validated against the versions up to this one
        self._requested = 0  # the number whose creation was requested last
        self._unanswered: set[int] = set()  # the numbers whose creation got no response
        self._requested_at = 0.0  # when, by the clock of the event loop
        self._undecided = 0  # the version that this record has or may still get; 0: none
        self._last_collection = 0  # the newest garbage collection up to `_seen`

    async def run(self) -> int:
        """Append the record and return its version."""
        try:
            self._last_collection = await named_collection(self._log, self._seen)
            pause, attempts, quickest, clock = 0.0, 0, math.inf, asyncio.get_running_loop().time
            while True:
                attempts += 1
                began = clock()
                version = await self._catch_up()
                if version is not None:
                    return await self._finish(version)
                try:
                    if await self._create():
                        return await self._finish(self._requested)
                except AlreadyExists:
                    self._on_retry(Retry(self._requested, "another transaction became this version first"))
                    quickest = min(quickest, clock() - self._requested_at)
                    # where a create is quick, what took long was reading newer records, or being descheduled
                    duration = quickest if quickest < _QUICK else clock() - began
                    pause = next_pause(pause, attempts, duration)
                    await asyncio.sleep(pause if pause >= _TICK else 0)
        except Exception as error:
            if isinstance(error, TimelineChanged | OtherHistory):
                with contextlib.suppress(Unavailable, NotFound, Corrupt, UnsupportedFormat):
                    await self._read_again()
            if self._undecided:
                raise self._outcome_unknown(error) from error
            raise

    async def _read_again(self) -> None:
        """Raise `Conflict` if a repair changed the records that were known, unless the record is in the log."""
        base = self._record.base
        newer = await self._log.anew().above(base)
        if any(other.commits(self._record.transaction) for other in newer):
            return
        if self._undecided <= base + len(newer):
            self._undecided = 0  # another record has the number
        refuse_voided(self._log.storage.url, self._record, [v for other in newer for v in other.voids])

    async def _catch_up(self) -> int | None:
        """Validate the record against all newer ones; return its version if it is among them."""
        while True:
            newer = await self._read_newer()
            version = await self._find_itself(newer)  # before validation, which may need data already deleted
            if version is not None or await self._revalidate(newer):
                return version

    async def _find_itself(self, newer: Newer) -> int | None:
        """Return the version of this record if it is one of the newer ones; raise if a gc condemned it."""
        for version, other in newer:
            if other.commits(self._record.transaction):
                self._undecided = version  # until its name is durable: its creator may have died before it did so
                await self._log.storage.flush("commits", self._durability)
                return version
            self._undecided = 0  # another record has the number
            if other.collection is not None:
                await check_against_collection(self._log, self._record, version, other)
                self._last_collection = version
            if other.by_repair:
                await check_unaffected(self._log, self._record, version, other)
                self._refuse_voided(version, other, dict(newer))
        return None

    def _refuse_voided(self, version: int, repair: Record, newer: Mapping[int, Record]) -> None:
        """Raise `Conflict` if a repair voided what the record was validated against, or the record itself."""
        # a record may have been read before it was voided, and the commit of the repair after that
        voided = [v for v in repair.voids if v <= self._seen or (v in newer and not newer[v].void)]
        if repair.void and (version in self._unanswered or repair.voided_transactions & self._record.ids):
            voided.append(version)
        refuse_voided(self._log.storage.url, self._record, voided)

    async def _revalidate(self, newer: Newer) -> bool:
        """Validate the record against newer ones; return False to read more records first.

        Validation may need an object that a garbage collection has deleted. If further records exist by now, one
        of them may be the record of that collection.
        """
        if not newer:
            return True
        replaced_at = max((v for v, other in newer if other.replaces), default=0)
        # older manifests may be deleted; what conflicts with them also conflicts with version `replaced_at`
        relevant = [
            (v, r if v >= replaced_at else replace(r, manifests=()))
            for v, r in newer
            if not r.void or r.was_voided
        ]
        try:
            if relevant:
                self._record = await self._validate(relevant)
        except NotFound as error:
            if await self._log.records.stored_or_none(newer[-1][0] + 1) is not None:
                return False
            if self._last_collection <= self._seen:
                raise
            raise Conflict(
                f"{self._log.storage.url}: the garbage collection recorded as version "
                f"{self._last_collection} removed a version newer than {self._seen}, against which this "
                "transaction must be validated, so it cannot be committed; read again and repeat it",
                [],
            ) from error
        self._seen += len(newer)
        return True

    async def _create(self) -> bool:
        """Create the next version or raise `AlreadyExists`; return False if only a read can tell the outcome."""
        link, is_durable = await self._log.link(self._seen)
        if self._record.durable and not is_durable:
            await self._log.storage.sync()
        await self._log.look_ahead(self._seen)
        await self._candidate.prepare(self._record, self._last_collection, link)
        version = self._requested = self._undecided = self._seen + 1
        self._requested_at = asyncio.get_running_loop().time()
        try:
            await self._candidate.create(version)
        except AlreadyExists:
            raise
        except Exception as error:
            self._unanswered.add(version)
            await self._decide(version, error)
            self._on_retry(Retry(version, f"no response to its creation: {error}"))
            return False
        self._log.records.append(version, self._candidate.record, self._candidate.data)
        return True

    async def _read_newer(self) -> list[tuple[int, Record]]:
        """Return the records above `_seen` with their versions."""
        if not self._requested and self._log.is_end(self._seen):
            return []
        return list(enumerate(await self._log.above(self._seen), self._seen + 1))

    async def _decide(self, version: int, failure: Exception) -> None:
        """Return once a version whose creation failed exists, as this record or another one.

        Raise the failure if the version does not exist, and this record can never become it.
        """
        if await self._log.records.stored_or_none(version) is not None:
            return
        if isinstance(failure, TStoreError) and not isinstance(failure, Unavailable):
            self._undecided = 0
            raise failure
        record = self._candidate.record
        void = Record(
            record.transaction + VOID,
            record.base,
            record.time,
            void=True,
            durable=record.durable,
            collected=record.collected,
        )
        with contextlib.suppress(AlreadyExists):
            link, _ = await self._log.link(version - 1)
            await self._log.commits.create(version, linked(encode(void), link), self._durability)

    def _outcome_unknown(self, cause: Exception) -> CommitOutcomeUnknown:
        transaction = self._record.transaction
        return CommitOutcomeUnknown(
            f"{self._log.storage.url}: it is unknown whether version {self._undecided} is this commit and durable "
            f"({cause}), so the commit may or may not exist; call commit() again, or "
            f"store.outcome({transaction!r}) later",
            transaction,
        )

    async def _finish(self, version: int) -> int:
        self._log.note_appended(version)
        if version % ROOT_EVERY == 0:
            from tstore.core.log.roots import write_root  # imported when a version has a root

            await write_root(self._log, version)
        return version


class _CandidateRecord:
    """A record and its bytes (empty: not yet encoded), staged once for all numbers that are tried."""

    def __init__(self, storage: Storage, record: Record, data: bytes, durability: Durability) -> None:
        self._storage = storage
        self._durability = durability
        self._staged: StagedObject | None = None
        self._link = Link()
        self.record = record
        self.data = data

    async def prepare(self, record: Record, collected: int, link: Link) -> None:
        """Encode a record, if it has changed, for the version after that of `link`.

        `collected` is the last garbage collection.
        """
        if record.collected != collected:
            record = replace(record, collected=collected)
        if record is not self.record and record != self.record:
            await self.discard()
            self.record, self.data, self._staged = record, encode(record), None
        if self._staged is not None and self._link.version < first_link(link.version + 1):
            await self.discard()
            self._staged = None
        if self._staged is None:
            self._link, self.data = link, linked(self.data or encode(record), link)
            self._staged = self._storage.stage(self.data, self._durability)

    async def create(self, version: int) -> None:
        """Create the prepared record as a version."""
        assert self._staged is not None
        await self._staged.create(*places_of(version))

    async def discard(self) -> None:
        if self._staged is not None:
            await self._staged.discard()
