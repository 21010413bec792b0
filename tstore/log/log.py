"""The log of commits: numbered records, each created once, and how one is appended.

Appending a record (its data is durable already)
1. Read every record above the one it was validated against, unless a look a moment ago found none. If one carries
   the same transaction id, that is this very commit (a lost reply, or another finisher of the group): done. If one
   is a gc's and condemned this transaction or a pack that it re-uses: `Conflict`. Otherwise validate against all:
   the caller raises `Conflict`, or returns the record to go on with (the same bytes, as a rule).
2. Create the first absent number (behind which no other exists, or the log has a hole). If created: done. The same
   bytes can take any number, so that they are written and forced once, however many are tried (`Backend.offer`).
   A durable record makes sure first that the one before it is durable, and so by induction are all: where that was
   created with `durability="none"`, all is flushed.
3. If it exists by now, go to 1, after a back-off with decorrelated jitter: each pause is drawn between a shortest
   one and three times the one before. Whoever has lost often waits no longer but shorter, so that nobody starves;
   where a try takes long, as with a server or many writers, all wait longer, so that fewer tries are lost.
   Commits of one process do not race: they take turns, or go out together (`log.group_commit`).
4. If no answer came, read the number. If it is still absent the request may yet land, so create a void record
   there: if that succeeds, the late one can never land; go on with the next number. If it exists, go to 1. If
   nothing can be learned, raise `CommitOutcomeUnknown` and delete nothing.
5. Every 64th version also writes `roots/<version>` (its content is determined, so a race is harmless) and then
   the `latest` hint; their loss costs nothing but time.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from tstore.errors import (
    AlreadyExists,
    CommitOutcomeUnknown,
    Conflict,
    Denied,
    NotFound,
    StorageFull,
    TStoreError,
    Unavailable,
)
from tstore.format.encoding import encode, framed
from tstore.format.frame import check_of
from tstore.format.layout import commit_key, root_key
from tstore.format.records import Record, Stored
from tstore.format.retention import check_condemned
from tstore.format.tree import Changes, Tree
from tstore.log.group_commit import SHORTEST_PAUSE, CommitQueue, Entry, Newer, Retry, Validate, next_pause
from tstore.log.reader import HINT, ROOT_EVERY, Records
from tstore.storage.base import Backend, Durability, Offer

__all__ = ["CheckedLog", "Log"]


class _Framed(NamedTuple):
    """A record, its bytes, and what readers will find in these; made once, as it is checked on the way."""

    record: Record
    data: bytes
    parsed: Record

    @staticmethod
    def of(record: Record) -> _Framed:
        """The frame of a record; `InvalidArgument` where readers would refuse it."""
        return _Framed(record, *framed(record))


class _Offer:
    """The bytes of a record, prepared once for as many numbers as must be tried."""

    def __init__(self, backend: Backend, durability: Durability, first: _Framed) -> None:
        self.durability = durability
        self._backend = backend
        self._framed = first
        self._offer: Offer | None = None

    async def create(self, version: int, record: Record, collected: int) -> Stored:
        """Creates the record of a version, where `collected` is the newest gc before it, and returns it."""
        if record.collected != collected:
            record = replace(record, collected=collected)
        if record is not self._framed.record and record != self._framed.record:
            await self.withdraw()
            self._framed, self._offer = _Framed.of(record), None
        if self._offer is None:
            self._offer = self._backend.offer(self._framed.data, self.durability)
        await self._offer.create(commit_key(version))
        return Stored(self._framed.parsed, check_of(self._framed.data))

    @property
    def size(self) -> int:
        """How many bytes the record has."""
        return len(self._framed.data)

    async def withdraw(self) -> None:
        """Gives back what was prepared."""
        if self._offer is not None:
            await self._offer.withdraw()


class Log(Records):
    """The commits of one store, to be read and appended to."""

    def __init__(self, backend: Backend, hint: int | None = None) -> None:
        super().__init__(backend, hint)
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, CommitQueue]
        self._queues = weakref.WeakKeyDictionary()  # a loop has its own; a forked child has another loop

    @property
    def waiting(self) -> int:
        """How many commits of the running event loop wait while another is in flight."""
        queue = self._queues.get(asyncio.get_running_loop())
        return 0 if queue is None else len(queue)

    async def append(
        self,
        record: Record,
        validate: Validate,
        durability: Durability,
        retried: Callable[[Retry], object] = lambda retry: None,
        changes: Changes | None = None,
    ) -> int:
        """The version that the record became, by the steps at the top of this file.

        `validate(newer)` is awaited with the versions and records of newer commits, without void ones; it raises
        `Conflict`, or returns the record to go on with. `retried` is told of every create that did not make it. A
        record whose `changes` are passed may go out together with others of this process: see `log.group_commit`.
        """
        first = _Framed.of(record)  # `InvalidArgument` here, before it could fail with others that go out together
        queue = self._queues.setdefault(asyncio.get_running_loop(), CommitQueue())

        async def checked(newer: Newer) -> Record:
            for version, other in newer:
                await self._check_condemned(record, version, other)  # of several that go together each may be
            return await validate(newer)

        entry = Entry(record, checked, retried, changes, len(first.data))
        return await queue.append(entry, functools.partial(self._append, durability=durability, first=first))

    async def _append(
        self,
        record: Record,
        validate: Validate,
        retried: Callable[[Retry], object],
        durability: Durability,
        first: _Framed,
    ) -> int:
        offer = _Offer(self.backend, durability, first)
        try:
            return await self._race(record, validate, retried, offer)
        finally:
            await offer.withdraw()

    async def _race(
        self, record: Record, validate: Validate, retried: Callable[[Retry], object], offer: _Offer
    ) -> int:
        seen, asked, tries = record.base, 0, 1  # asked: the number whose creation was last asked for
        collected, pause = await self.collected(seen), SHORTEST_PAUSE
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            fresh = not asked and self.is_end(seen)
            newer = [] if fresh else await self._above(seen, asked, record.transaction)
            for version, other in newer:
                if other.transaction == record.transaction:
                    await self._settle(version, record.transaction, offer.durability)
                    return await self._appended(version)
                if other.collection is not None:  # before any is validated, as what it condemned may be gone
                    await self._check_condemned(record, version, other)
                    collected = version
            whole = max((version for version, other in newer if other.replaces), default=0)
            # the manifests below `whole` may be collected; it meets all that they could meet
            met = [(v, r if v >= whole else replace(r, manifests=())) for v, r in newer if not r.void]
            try:
                record = await validate(met) if met else record
            except NotFound as error:
                if await self._stored_or_none(newer[-1][0] + 1) is not None:
                    continue  # a gc that was committed meanwhile deleted what is validated against: look again
                if collected <= seen:
                    raise
                raise Conflict(
                    f"{self.backend.url}: a version committed since version {seen} was collected by version "
                    f"{collected}, so that it can't be compared with this transaction; nothing of it was "
                    "committed. Read again and repeat it",
                    [],
                ) from error
            seen += len(newer)
            if record.durable and seen > 0 and not (await self.record(seen)).durable:
                await self.backend.flush()
            asked = seen + 1
            try:
                made = await offer.create(asked, record, collected)
            except AlreadyExists:
                retried(Retry(asked, "another transaction became this version first"))
                await asyncio.sleep(pause := next_pause(pause, tries, clock() - began))
            except Unavailable as error:
                await self._decide(asked, replace(record, collected=collected), error)
                retried(Retry(asked, f"no answer came to its creation: {error}"))
            except TStoreError:
                if await self._met(asked, record.transaction) is None:
                    raise  # else it landed before it failed, as when only its folder could not be made durable
            else:
                self.keep(asked, made, offer.size)
                return await self._appended(asked)
            tries += 1

    async def _above(self, version: int, asked: int, transaction: str) -> list[tuple[int, Record]]:
        """The records above a version, with their versions; that of `asked` may be the transaction's own."""
        try:
            return list(enumerate(await self.above(version), version + 1))
        except Unavailable as error:
            if version < asked:
                raise self._unknown(asked, transaction, error) from error
            raise

    async def check_uncollected(self, transaction: str, base: int) -> None:
        """Raises `Conflict` where a gc above `base` condemned a transaction that did not commit before."""
        for version, other in enumerate(await self.above(base), base + 1):
            if other.transaction == transaction:
                return
            await self._check_condemned(Record(transaction, base, 0.0), version, other)

    async def _check_condemned(self, record: Record, version: int, other: Record) -> None:
        """Raises `Conflict` where a newer commit is a gc's that condemned the record, or what that re-uses."""
        if other.collection is not None and (gone := await self.collection(version)) is not None:
            check_condemned(self.backend.url, record, version, gone)

    async def _decide(self, version: int, record: Record, cause: Unavailable) -> None:
        """Makes sure that the unanswered create of `version` has landed or never will."""
        void = Record(record.transaction + ".void", record.base, record.time, void=True, durable=False)
        void = replace(void, collected=record.collected)
        try:
            if await self._stored_or_none(version) is None:
                await self.backend.create(commit_key(version), encode(void), Durability.FSYNC)
        except AlreadyExists:
            return
        except TStoreError:
            raise self._unknown(version, record.transaction, cause) from cause

    async def _met(self, asked: int, transaction: str) -> Stored | None:
        """The record of the version that was asked for, if there is one; it may be the transaction's own."""
        try:
            return await self._stored_or_none(asked)
        except Unavailable as error:
            raise self._unknown(asked, transaction, error) from error

    async def confirm(self, version: int, durability: Durability) -> None:
        """Make a commit that exists as durable as asked; whoever created it may have died before it did so."""
        if durability is Durability.FSYNC and not (await self.record(version)).durable:
            await self.backend.flush()
        else:
            await self.backend.settle("commits", durability)

    async def _settle(self, version: int, transaction: str, durability: Durability) -> None:
        """Makes a commit durable that stands already; its creator may not have got to it."""
        try:
            await self.backend.settle("commits", durability)
        except Unavailable as error:
            raise self._unknown(version, transaction, error) from error

    def _unknown(self, version: int, transaction: str, cause: Unavailable) -> CommitOutcomeUnknown:
        return CommitOutcomeUnknown(
            f"{self.backend.url}: no answer came to the creation of version {version} ({cause}), nor when "
            f"asked again; nothing was deleted. Ask store.outcome({transaction!r}) later",
            transaction,
        )

    async def _appended(self, version: int) -> int:
        self._newest = max(self._newest, version)
        self._search.ends_at(version, asyncio.get_running_loop().time())
        if version % ROOT_EVERY == 0:
            try:
                root = (await self.tree(version)).root((await self.stored(version)).check)
                await self.backend.create(root_key(version), encode(root), Durability.FSYNC)
            except AlreadyExists:
                pass  # another finisher wrote the same bytes
            except TStoreError:
                return version  # the commit stands; opening it costs more reads until the next root
            self._trees.put(version, Tree.of(root))  # one span for each array in place of one for each commit
            await self._write_hint(version)
        return version

    async def _write_hint(self, version: int) -> None:
        try:
            await self.backend.hint(HINT, str(version).encode())
        except (Denied, StorageFull, Unavailable):
            return  # only a hint: the next reader gallops further


class CheckedLog(Log):
    """A log of which each record is checked whole as it is read, whether or not its manifests are asked for."""

    def decoded_record(self, key: str, data: bytes) -> Record:
        """The record in the bytes at a key."""
        return self.decoded(key, data, Record)
