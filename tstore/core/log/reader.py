"""Read a log: find its newest version, the records above a version, and the version of a transaction.

The search for the newest version (`search`) begins at the newest one that this process knows, or else at the
`latest` hint if that version exists. Versions have no gaps, so the first absent number
ends the log; old records lie in archives (`commits`).
- On storage whose requests mostly wait for a server, a probe fetches the record. The first probes are sent
  together with a request for the root at the hint, the last probes with requests for the older records that the
  tree needs, so that the tree of a new version takes no further requests.
- On a disk, a process that knows a version reads up to 64 newer records at once, up to the first absent one. So
  does one that needs the tree of a log without a hint, from the first record on.

A lost record looks like the end of the log. So a search also probes one or two of the four numbers above
the newest version, and `check_end` raises `Corrupt` if one exists above a missing record. Before its first
commit a writer looks further (`look_ahead`): at the numbers 2, 4, 8, … up to `1 << _FAR` after the newest version,
and if the log ends with the block of an archive, at the first numbers of the second, third, fifth, … block after
it. If n records or archives in a row were lost and at least n later ones exist, one of these numbers exists. A
reader looks there as well if the log seems to be empty, or to end with a block.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from tstore.core.format.frame import NO_RECORD, Link
from tstore.core.format.layout import ARCHIVE_EVERY, HINT, ROOT_EVERY, commit_key
from tstore.core.format.objects.encoding import decode
from tstore.core.format.objects.records import Collection, Record, StoredRecord
from tstore.core.format.objects.roots import StoredRoot
from tstore.core.format.tree.tree import Tree
from tstore.core.log.commits import NEVER, Bounds, Search
from tstore.core.log.objects import MetadataObjects
from tstore.core.log.records import Records
from tstore.core.log.trees import Trees
from tstore.core.runtime.concurrency import Prefetch, SharedCalls, batched, together
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.storage.connect import Address
from tstore.errors import Corrupt, NotFound, Unavailable, UnsupportedFormat

__all__ = ["LogReader", "read_hint"]

V = TypeVar("V")

_LONG = 1.0  # seconds of a search during which records may have been archived and deleted
_FAR = 16  # how many of the distances 2, 4, 8, … a writer probes
_MAX_AHEAD = ROOT_EVERY  # records read at once: all that a log without a hint has
_MAX_MEMORY = 4 << 20  # bytes of records decoded at once


async def read_hint(storage: Storage) -> int:
    """Return the newest version according to the hint, which may be wrong; 0 if there is none."""
    try:
        hint = int(await storage.get(HINT))
    except (NotFound, ValueError, Corrupt):
        return 0
    return hint if 0 < hint < NEVER else 0


class _NewerRecords(NamedTuple):
    """The next records above a version, whether a hole (a missing record) follows, and whether more may exist."""

    records: list[Record]
    hole: bool
    more: bool


class LogReader:
    """A reader of the commits of one store, which the event loops of several threads may share.

    `hint` is the result of `read_hint`, if the caller already has it; `log_id` is the log id in the records
    (`Marker.log_id`), None to take that of the first record read.
    """

    def __init__(
        self,
        storage: Storage,
        hint: int | None = None,
        *,
        log_id: bytes | None = None,
        address: Address | None = None,
        objects: MetadataObjects | None = None,
    ) -> None:
        self.storage = storage
        self.address = address
        """The arguments with which the store was opened, None for a `Storage`."""
        self.objects = MetadataObjects(storage) if objects is None else objects
        self.commits = self.objects.commits
        self.records = Records(self.objects, log_id)
        self.trees = Trees(self.objects, self.records)
        self._hint = hint
        self._newest = 0
        self._looked_ahead = False
        self._searches = SharedCalls(self._search_newest)
        self._readings = SharedCalls(self._read_newest)
        self._looks = SharedCalls(self._look_ahead)
        self._search = Search(self._probe, batches=storage.tuning.latency_bound)

    @staticmethod
    def strict(storage: Storage, log_id: bytes | None = None) -> LogReader:
        """Return a reader that checks each record completely when it is read, including its manifests."""
        objects = MetadataObjects(storage, functools.partial(decode, kind=Record))
        return LogReader(storage, log_id=log_id, objects=objects)

    def anew(self) -> LogReader:
        """Return a reader of the same log that knows nothing yet: it reads each record again."""
        return LogReader(
            self.storage,
            self._hint,
            log_id=self.records.chain.log_id,
            address=self.address,
            objects=self.objects.anew(),
        )

    async def record(self, version: int) -> Record:
        """Return the record of a version; if there is none, raise `NotFound`, or `Corrupt` if later ones exist."""
        cached = self.records.cached(version)
        if cached is not None:
            return cached.record
        return (await self.records.stored_below(version, self._newest)).record

    def stored(self, version: int) -> Coroutine[Any, Any, StoredRecord]:
        """Return the record of a version with its checksum; raise what `record` does."""
        return self.records.stored_below(version, self._newest)

    def collection(self, version: int) -> Coroutine[Any, Any, Collection | None]:
        """Return what the garbage collection of a version decided, or None if that version is not one."""
        return self.records.collection(version)

    def tree(self, version: int) -> Coroutine[Any, Any, Tree]:
        """Return the tree of a version that exists: of a copy its own, otherwise that of the head."""
        return self.trees.tree(version)

    def head(self, version: int) -> Coroutine[Any, Any, Tree]:
        """Return the tree of the head as of a version that exists, with the tags as of that version."""
        return self.trees.head(version)

    async def link(self, version: int) -> tuple[Link, bool]:
        """Return the link for a record validated up to a version, and whether that version is durable."""
        log_id = self.records.chain.log_id or bytes(16)
        if not version:
            return Link(log_id), True
        stored = self.records.cached(version) or await self.stored(version)
        return Link(log_id, version, stored.check), stored.record.durable

    async def root(self, tree: Tree) -> StoredRoot:
        """Return a tree of this log as a root."""
        parent = tree.nodes.parent_of(tree.version)
        check, parent_check = [(await self.stored(v)).check if v else NO_RECORD for v in (tree.version, parent)]
        return await run(tree.root, check, parent_check)

    async def each(
        self, call: Callable[[int], Awaitable[V]], versions: Iterable[int]
    ) -> AsyncIterator[tuple[int, V]]:
        """Yield each version with the result of `call(version)`, in order; a bounded number of calls run at once.

        `call` reads the record of the version. Long records are read one at a time.
        """

        for batch in batched(versions):
            records = await self.records.short_records(batch)
            short = [version for version, stored in zip(batch, records, strict=True) if stored is not None]
            results = dict(zip(short, await together(call, short), strict=True))
            for version in batch:
                yield version, results.pop(version) if version in results else await call(version)

    async def each_record(self, versions: Iterable[int]) -> AsyncIterator[tuple[int, Record]]:
        """Yield each version with its record, in order; many are read at once, long ones one at a time."""
        for batch in batched(versions):
            for version, short in zip(batch, await self.records.short_records(batch), strict=True):
                yield version, await self.record(version) if short is None else short.record

    def records_down(self, newest: int, above: int = 0) -> Prefetch[int, StoredRecord | None]:
        """Yield the versions from `newest` down to `above` + 1 with their records, read ahead.

        Instead of a record that must be read alone, to bound the memory or to report its fault, yield None.
        """
        return Prefetch(self.records.short_records, range(newest, above, -1))

    def newest(self) -> Coroutine[Any, Any, int]:
        """Return the newest version, 0 for an empty log; raise `TimelineChanged` if the store was replaced.

        Searches that begin in the same turn of the event loop are shared.
        """
        return self._searches()

    def newest_with_records(self) -> Coroutine[Any, Any, int]:
        """Return what `newest` returns; on a disk, also read the records of a log without a hint, for its tree."""
        return self._readings()

    def _read_newest(self) -> Coroutine[Any, Any, int]:
        is_unread = not self._newest and not self.storage.tuning.latency_bound
        return self._read_first() if is_unread else self._search_newest()

    async def _read_first(self) -> int:
        if not await self._read_hint() and not await self._read_newer(0):
            return self._newest
        return await self._search_newest()

    async def _search_newest(self) -> int:
        if self.records.voided:
            await self.trees.drop_voided()
        known = self._newest
        if known and not self.storage.tuning.latency_bound:
            if not await self._read_newer(known):
                return self._newest  # another task may have raised it further
            since = asyncio.get_running_loop().time()
            bounds = await self._gallop(self._newest)
        else:
            self.records.check_timeline()
            since = asyncio.get_running_loop().time()
            search = self._probe_newer(known) if known else self._gallop_from_hint()
            bounds, _ = await asyncio.gather(search, self.records.refetch(*self.records.last))
        newest = await self._bisect(bounds)
        # an archive that was created during the search hides records that were deleted during it
        if asyncio.get_running_loop().time() - since > _LONG:
            newest = await self._bisect(await self._gallop(newest))
        while newest < self.commits.last_archived:
            newest = await self._bisect(await self._gallop(self.commits.last_archived))
        self._newest = max(self._newest, newest)
        return newest

    async def _probe_newer(self, known: int) -> Bounds:
        """Return bounds of the newest version by probing the numbers above a known one."""
        return await self._gallop(known + 1) if await self._exists(known + 1) else Bounds(known, known + 1)

    async def _read_newer(self, known: int) -> bool:
        """Read the next records above a known version, or from the first; return whether more may exist."""
        try:
            records, hole, more = await self._read_above(known)
        except (Corrupt, UnsupportedFormat):
            if known:
                raise
            return True  # a damaged record exists too; whoever needs it gets the error
        last = known + len(records)
        self._newest = max(self._newest, last)
        if hole:  # the record after `last` is missing, so a later one exists
            self._search.highest = max(self._search.highest, last + 2)
        elif not known and not more:
            above = await self.commits.existing([last + 3, last + 4])
            self._search.highest = max(self._search.highest, *above, 0)
        return more

    async def _bisect(self, bounds: Bounds) -> int:
        """Return the newest version within the bounds."""
        while bounds.high - bounds.low > 1:
            numbers = self._search.between(bounds)
            if len(numbers) < bounds.high - bounds.low - 1:
                bounds = await self._search.narrow(bounds, numbers)
                continue
            # the last round; it also probes above the end, and reads what the tree of the newest version needs
            above = [bounds.high + 1, bounds.high + 3]
            needed = self.trees.missing_records(bounds.low) if self.storage.tuning.latency_bound else []
            bounds, _ = await asyncio.gather(self._search.narrow(bounds, numbers, above), self._probe(needed))
        return bounds.low

    async def checked_newest(self) -> int:
        """Return the newest version; raise `Corrupt` if `probe_above` finds a later one above a missing record."""
        while True:
            await self.probe_above(newest := await self.newest())
            await self.check_end(newest)
            if self._search.highest <= newest:
                return newest

    async def look_ahead(self, version: int) -> None:
        """Probe far above the newest version, unless that was done before; raise what `check_end` does."""
        if not self._looked_ahead:
            await self._looks()
        await self.check_end(version)

    async def _look_ahead(self) -> bool:
        with contextlib.suppress(Unavailable):  # then the next commit tries again
            await self.probe_above(max(self._newest, self.records.last[0]))
            self._looked_ahead = True
        return self._looked_ahead

    async def check_end(self, version: int) -> None:
        """Raise `Corrupt` if the record after a version is missing, although a later one has been found."""
        if self._search.highest > version + 1 and await self.records.stored_or_none(version + 1) is None:
            raise self.records.missing_error(version + 1)

    async def probe_above(self, version: int) -> set[int]:
        """Probe the numbers at which `look_ahead` looks, and return those that exist."""
        numbers = [version + (2 << i) for i in range(_FAR)]
        if version % ARCHIVE_EVERY == 0:  # the next archive may be lost
            numbers += [version + (ARCHIVE_EVERY << i) + 1 for i in range(_FAR // 2)]
        existing = await self.commits.existing(numbers)
        self._search.highest = max(self._search.highest, *existing, 0)
        return existing

    async def above(self, version: int) -> list[Record]:
        """Return the records above a version; raise `Corrupt` if a hole follows them, or `TimelineChanged`."""
        records: list[Record] = []
        while True:
            newer = await self._read_above(version + len(records))
            records += newer.records
            if newer.hole:
                raise self.records.missing_error(version + len(records) + 1)
            if not newer.more:
                return records

    def is_end(self, version: int) -> bool:
        """Return whether a check within the last second found nothing above a version."""
        return not self.records.replaced and self._search.is_end(version)

    def note_appended(self, version: int) -> None:
        """Record that this process has just appended a version."""
        self._newest = max(self._newest, version)
        self._search.note_end(version, asyncio.get_running_loop().time())

    async def find(self, transaction: str, above: int = 0) -> int | None:
        """Return the first version above `above` that committed a transaction, or None; read newer versions first.

        Writers never repeat an id, but a client of a server could: only the first commit with an id counts.
        """
        newest = unread = await self.newest()
        first = None
        while unread > above and (cached := self.records.cached(unread)) is not None:
            if cached.record.commits(transaction):
                first = unread
            unread -= 1

        try:
            async for version, short in self.records_down(unread, above):
                stored = short or await self.records.stored_below(version, newest + 1)
                first = version if stored.record.commits(transaction) else first
        except (Corrupt, UnsupportedFormat):  # an older record is damaged
            if first is None:
                raise
        return first

    async def scan(self, transaction: str, above: int) -> tuple[int | None, int]:
        """Find as `find` does, without a search for the newest version; also return the last version read."""
        version = above
        while version + 1 in self.records or await self.commits.existing([version + 1]):
            newer = (await self._read_above(version)).records
            if not newer:
                break
            for record in newer:
                version += 1
                if record.commits(transaction):
                    return version, version
        return None, version

    async def _read_above(self, version: int) -> _NewerRecords:
        """Return the next records above a version; raise `TimelineChanged` if known records have changed."""
        self.records.check_timeline()
        newest, check = self.records.last
        records = self._cached_above(version) if version < newest else []
        last, since = version + len(records), asyncio.get_running_loop().time()
        # `last` is read again, to compare
        objects, hole, truncated, _ = await self.commits.leading(max(1, last), version + _MAX_AHEAD + 2)
        objects.reverse()  # each is popped below, so that it is freed as soon as it is decoded
        if last:
            self.records.confirm(last, objects.pop() if objects else None)
        memory = 0
        while objects and memory <= _MAX_MEMORY:
            stored = self.records.add_bytes(version + len(records) + 1, objects.pop())
            records.append(stored.record)
            memory += stored.memory
        if not last <= newest <= version + len(records):  # the newest known record was not among those read
            await self.records.refetch(newest, check)
        if objects:
            return _NewerRecords(records, hole=False, more=True)
        more = truncated or len(records) >= _MAX_AHEAD
        if not more and not hole:
            self._search.note_end(version + len(records), since)
        return _NewerRecords(records, hole, more)

    def _cached_above(self, version: int) -> list[Record]:
        """Return the cached records that follow a version without a gap, at most `_MAX_AHEAD`."""
        records: list[Record] = []
        while len(records) < _MAX_AHEAD:
            cached = self.records.cached(version + len(records) + 1)
            if cached is None:
                break
            records.append(cached.record)
        return records

    async def _read_hint(self) -> int:
        if self._hint is None:
            self._hint = await read_hint(self.storage)
        return self._hint

    async def _gallop_from_hint(self) -> Bounds:
        """Gallop from the hint, or from version 0 if the hint is stale."""
        hint = await self._read_hint()
        if hint == 0:
            return await self._gallop(0)
        root_version = hint if self.storage.tuning.latency_bound and hint % ROOT_EVERY == 0 else 0
        bounds, root = await asyncio.gather(self._search.gallop(hint, low=0), self.trees.root(root_version))
        if bounds.low < hint:
            return await self._gallop(0)
        await self.trees.add_root(hint, root)
        return bounds if bounds.high < NEVER else await self._gallop(bounds.low)

    async def _gallop(self, base: int) -> Bounds:
        """Gallop from a version that exists, or 0; raise `Corrupt` if every version seems to exist."""
        bounds = await self._search.gallop(base, low=base)
        if bounds.high == NEVER:
            raise Corrupt(
                f"{self.storage.url} returns an object for every key, even {commit_key(bounds.low)}: expected 404 "
                "for an absent key; check the URL and the server"
            )
        return bounds

    async def _exists(self, version: int) -> bool:
        if version in self.records:
            return True
        try:  # a read takes as long as a request for the size, and the record is usually needed next
            return await self.records.stored_or_none(version) is not None
        except (Corrupt, UnsupportedFormat):
            return True

    async def _probe(self, versions: Sequence[int]) -> list[bool]:
        if self.storage.tuning.latency_bound:
            return list(await asyncio.gather(*[self._exists(v) for v in versions]))
        unknown = self.records.absent(versions)
        existing = await self.commits.existing(unknown)
        missing = self.records.absent(v for v in unknown if v not in existing)  # others may have been read since
        return [v not in missing for v in versions]
