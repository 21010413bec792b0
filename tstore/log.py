"""The log of commits: numbered records, each created once.

Finding the newest version
1. Start from the highest version this process has seen, or from the `latest` hint if that version exists.
2. Gallop: probe 1, 2, 4, … numbers further while they exist; numbers are dense and never deleted.
3. Bisect between the last that exists and the first that does not.

Appending a record (its data is durable already)
1. Read every record above the one it was validated against. If one carries the same transaction id, that is
   this very commit (a lost reply, or another finisher of the group): done. If one is a gc's and condemned this
   transaction or a pack that it re-uses: `Conflict`. Otherwise validate against each: the caller raises
   `Conflict`, or answers with the record to go on with (the same bytes, as a rule).
2. Create the first absent number (behind which no other exists, or the log has a hole). If created: done. A
   durable record makes sure first that the one before it is durable, and so by induction are all: where that was
   created with `durability="none"`, all is flushed.
3. If it exists by now, go to 1, after a back-off with decorrelated jitter: each pause is drawn between a shortest
   one and three times the one before. Whoever has lost often waits no longer but shorter, so that nobody starves.
   Commits of one process do not race: they take turns, or go out together (`commit_queue`).
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
from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec.structs import replace

from tstore.commit_queue import SHORTEST_PAUSE, CommitQueue, Entry, Retry, Validate, next_pause
from tstore.errors import (
    AlreadyExists,
    CommitOutcomeUnknown,
    Conflict,
    Corrupt,
    Denied,
    NotFound,
    StorageFull,
    TStoreError,
    Unavailable,
    UnsupportedFormat,
)
from tstore.kv.base import Backend, Durability
from tstore.manifest import Fragment, Manifest, ObjectRef, Record, Root, decode, encode
from tstore.retention import check_condemned
from tstore.tree import Changes, Tree

__all__ = ["HINT", "ROOT_EVERY", "Log", "commit_key", "root_key"]

ROOT_EVERY = 64

HINT = "latest"
_CACHED = 256

T = TypeVar("T", Record, Manifest, Fragment, Root)


def commit_key(version: int) -> str:
    """The key of a commit's record."""
    return f"commits/{version:020d}"


def root_key(version: int) -> str:
    """The key of the whole tree as of a version that is a multiple of `ROOT_EVERY`."""
    return f"roots/{version:020d}"


class Log:
    """The commits of one store. Records and trees never change, so what was read once is kept."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._newest = 0
        self._records: dict[int, Record] = {}
        self._trees: dict[int, Tree] = {0: Tree(0, {}, {})}
        self._changes: dict[int, tuple[Record, Changes]] = {}
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, CommitQueue]
        self._queues = weakref.WeakKeyDictionary()  # a loop has its own; a forked child has another loop

    @property
    def waiting(self) -> int:
        """How many commits of the running event loop wait while another is in flight."""
        queue = self._queues.get(asyncio.get_running_loop())
        return 0 if queue is None else len(queue)

    async def newest(self) -> int:
        """The highest version that is committed now; 0 for an empty log."""
        low = self._newest or await self._hinted()
        step = 1
        while await self._exists(low + step):
            low += step
            step *= 2
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if await self._exists(middle):
                low = middle
            else:
                high = middle
        self._newest = max(self._newest, low)
        return low

    async def record(self, version: int) -> Record:
        """The record of a version; `NotFound` where there is none."""
        found = self._records.get(version)
        if found is None:
            found = await self.read(commit_key(version), Record)
            self._records[version] = found
            if len(self._records) > _CACHED:
                del self._records[next(iter(self._records))]
        return found

    async def changes(self, version: int, record: Record) -> Changes:
        """What the record of a version changed; many transactions of a process validate against the same ones."""
        known, changes = self._changes.get(version, (None, None))
        if known is not record or changes is None:
            changes = Changes.of(record, await self.manifests(record))
            self._changes[version] = record, changes
            if len(self._changes) > _CACHED:
                del self._changes[next(iter(self._changes))]
        return changes

    async def manifests(self, record: Record) -> list[Manifest]:
        """The manifests of a record, read where they do not travel in it."""
        return list(await asyncio.gather(*[self.manifest(m) for m in record.manifests]))

    async def manifest(self, where: ObjectRef | Manifest) -> Manifest:
        """The manifest itself, or the one at that place, checked against its reference."""
        if isinstance(where, Manifest):
            return where
        data = await self.backend.get(where.key)
        if len(data) != where.length or data[-len(where.check) :] != where.check:
            raise Corrupt(
                f"{self.backend.url}: {where.key} is not the object that was committed: expected "
                f"{where.length} bytes, found {len(data)}, or another checksum; restore it from a copy"
            )
        return self._decoded(where.key, data, Manifest)

    async def read(self, key: str, kind: type[T]) -> T:
        """The object at a key; errors name it."""
        return self._decoded(key, await self.backend.get(key), kind)

    def _decoded(self, key: str, data: bytes, kind: type[T]) -> T:
        try:
            return decode(data, kind)
        except (Corrupt, UnsupportedFormat) as error:
            raise type(error)(f"{self.backend.url}: {key}: {error}") from error

    async def tree(self, version: int) -> Tree:
        """The tree as of a version that exists."""
        if version in self._trees:
            return self._trees[version]
        start = await self._nearest_tree(version)
        numbers = range(start.version + 1, version + 1)
        records = await asyncio.gather(*[self._record_below(v, version) for v in numbers])
        resets = [v for v, r in zip(numbers, records, strict=True) if r.replaces]
        tree = start
        for number, record in zip(numbers, records, strict=True):
            hidden = bool(resets) and number < resets[-1]  # a later commit replaces all that it wrote
            manifests: Sequence[Manifest] = () if hidden else await self.manifests(record)
            tree = tree.after(number, record, manifests)
        self._trees[version] = tree
        while len(self._trees) > 4:
            del self._trees[next(v for v in self._trees if v != 0)]
        return tree

    async def _nearest_tree(self, version: int) -> Tree:
        cached = self._trees[max(v for v in self._trees if v <= version)]  # held: others may evict it meanwhile
        rooted = version - version % ROOT_EVERY
        while rooted > cached.version:
            try:
                return Tree.of(await self.read(root_key(rooted), Root))
            except NotFound:
                rooted -= ROOT_EVERY
        return cached

    async def append(
        self,
        record: Record,
        validate: Validate,
        durability: Durability,
        retried: Callable[[Retry], object] = lambda retry: None,
        changes: Changes | None = None,
    ) -> int:
        """The version that the record became, by the steps at the top of this file.

        `validate(version, other)` is awaited for every newer commit that is not void; it raises `Conflict`,
        or returns the record to go on with. `retried` is told of every create that did not make it; their
        number, and one, is the fact "tries" of a record that needed more than one. A record whose `changes`
        are passed may go out together with others of this process, as `commit_queue` says.
        """
        queue = self._queues.setdefault(asyncio.get_running_loop(), CommitQueue())
        entry = Entry(record, validate, retried, changes)
        return await queue.append(entry, functools.partial(self._append, durability=durability))

    async def _append(
        self, record: Record, validate: Validate, retried: Callable[[Retry], object], durability: Durability
    ) -> int:
        seen, asked, tries = record.base, 0, 1  # asked: the number whose creation was last asked for
        collected, pause = await self.collected(seen), SHORTEST_PAUSE
        while True:
            newer = await self._above(seen, record.transaction, asked)
            for version, other in newer:
                if other.transaction == record.transaction:
                    await self._settle(version, record.transaction, durability)
                    return await self._appended(version)
                if other.collection is not None:
                    check_condemned(self.backend.url, record, version, other.collection)
                    collected = version
            whole = max((version for version, other in newer if other.replaces), default=0)
            try:
                for version, other in newer:
                    # the manifests below `whole` may be collected; it meets all that they could meet
                    met = other if version >= whole else replace(other, manifests=())
                    record = record if other.void else await validate(version, met)
                    seen = version
            except NotFound as error:
                if await self._record_or_none(newer[-1][0] + 1) is not None:
                    continue  # a gc that was committed meanwhile deleted what is validated against: look again
                if collected <= seen:
                    raise
                raise Conflict(
                    f"{self.backend.url}: version {seen + 1}, committed since then, was collected by version "
                    f"{collected}, so that it can't be compared with this transaction; nothing of it was "
                    "committed. Read again and repeat it",
                    [],
                ) from error
            record = replace(record, collected=collected)
            await self._check_no_hole(seen + 1)
            if record.durable and seen > 0 and not (await self.record(seen)).durable:
                await self.backend.flush()
            tried = replace(record, facts={**record.facts, "tries": tries}) if tries > 1 else record
            asked = seen + 1
            try:
                await self.backend.create(commit_key(asked), encode(tried), durability)
            except AlreadyExists:
                retried(Retry(asked, "another transaction became this version first"))
                await asyncio.sleep(pause := next_pause(pause, tries))
            except Unavailable as error:
                await self._decide(seen + 1, record, error)
                retried(Retry(seen + 1, f"no answer came to its creation: {error}"))
            except (Denied, StorageFull):
                if await self._met(asked, record.transaction, asked) is None:
                    raise  # else it landed before it failed, as when only its folder could not be made durable
            else:
                return await self._appended(seen + 1)
            tries += 1

    async def _above(self, version: int, transaction: str, asked: int = 0) -> list[tuple[int, Record]]:
        """The records above a version, with their versions, up to the transaction's own if it is there.

        That of the version `asked` may be it.
        """
        found: list[tuple[int, Record]] = []
        while (record := await self._met(version + 1, transaction, asked)) is not None:
            version += 1
            found.append((version, record))
            if record.transaction == transaction:
                break
        return found

    async def check_uncollected(self, transaction: str, base: int) -> None:
        """Raises `Conflict` where a gc above `base` condemned a transaction that did not commit before."""
        for version, other in await self._above(base, transaction):
            if other.transaction == transaction:
                return
            if other.collection is not None:
                check_condemned(self.backend.url, Record(transaction, base, 0.0), version, other.collection)

    async def collected(self, version: int) -> int:
        """The version of the newest gc up to a version, 0 where there is none."""
        if version == 0:
            return 0
        record = await self.record(version)
        return record.collected if record.collection is None else version

    async def _check_no_hole(self, version: int) -> None:
        """Raises `Corrupt` where a later commit exists but not this one: a new one must not take its place."""
        if await self._exists(version + 1) and await self._record_or_none(version) is None:
            raise self._hole(version)

    def _hole(self, version: int) -> Corrupt:
        return Corrupt(
            f"{self.backend.url}: {commit_key(version)} is missing, though later commits are there; restore it "
            "from a copy of the store, until then nothing can be committed (tstore verify tells more)"
        )

    async def _decide(self, version: int, record: Record, cause: Unavailable) -> None:
        """Makes sure that the unanswered create of `version` has landed or never will."""
        void = Record(record.transaction + ".void", record.base, record.time, void=True, durable=False)
        void = replace(void, collected=record.collected)
        try:
            if await self._record_or_none(version) is None:
                await self.backend.create(commit_key(version), encode(void), Durability.FSYNC)
        except AlreadyExists:
            return
        except Unavailable:
            raise self._unknown(version, record.transaction, cause) from cause

    async def _met(self, version: int, transaction: str, asked: int) -> Record | None:
        """The record of a version, if there is one; that of the version `asked` may be the transaction's own."""
        try:
            return await self._record_or_none(version)
        except Unavailable as error:
            if version == asked:
                raise self._unknown(version, transaction, error) from error
            raise

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
        if version % ROOT_EVERY == 0:
            try:
                root = (await self.tree(version)).root()
                await self.backend.create(root_key(version), encode(root), Durability.FSYNC)
            except AlreadyExists:
                pass  # another finisher wrote the same bytes
            except TStoreError:
                return version  # the commit stands; opening it costs more reads until the next root
            self._trees[version] = Tree.of(root)  # one span for each array in place of one for each commit
            await self._write_hint(version)
        return version

    async def _write_hint(self, version: int) -> None:
        try:
            await self.backend.hint(HINT, str(version).encode())
        except (Denied, StorageFull, Unavailable):
            return  # only a hint: the next reader gallops further

    async def _hinted(self) -> int:
        try:
            version = int(await self.backend.get(HINT))
        except (NotFound, ValueError):
            return 0
        return version if version > 0 and await self._exists(version) else 0

    async def _exists(self, version: int) -> bool:
        return version in self._records or await self.backend.size(commit_key(version)) is not None

    async def _record_below(self, version: int, later: int) -> Record:
        try:
            return await self.record(version)
        except NotFound:
            if version < later:
                raise self._hole(version) from None
            raise

    async def _record_or_none(self, version: int) -> Record | None:
        try:
            return await self.record(version)
        except NotFound:
            return None

    async def find(self, transaction: str, above: int = 0) -> int | None:
        """The version above `above` that a transaction became, None where it is not committed."""
        return (await self.scan(transaction, above))[0]

    async def scan(self, transaction: str, above: int) -> tuple[int | None, int]:
        """The version above `above` that a transaction became, if any, and the last version that was looked at."""
        version = above
        while (record := await self._record_or_none(version + 1)) is not None:
            version += 1
            if transaction in (record.transaction, *record.transactions):
                return version, version
        return None, version

    async def resolve(self, at: int | str) -> int:
        """The version of a number or tag; `NotFound` names what there is."""
        newest = await self.newest()
        if isinstance(at, int):
            if not 0 <= at <= newest:
                raise NotFound(f"{self.backend.url} has no version {at}; its newest is {newest}")
            return at
        tags = (await self.tree(newest)).tags
        if at not in tags:
            known = ", ".join(sorted(tags)[-10:]) or "none"
            raise NotFound(f"{self.backend.url} has no tag {at!r}; its tags are: {known}")
        return tags[at]
