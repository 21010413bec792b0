"""Garbage collection: expire versions that no retention rule keeps, and delete transactions that never committed.

1. Raise `Corrupt` if a record is missing although later ones exist: the data of its transaction would look
   abandoned. Read the ledger of living versions from the newest collection's record, and add the records since.
   Raise `Corrupt` also if one of these versions is void: a repair was interrupted.
2. Choose the versions to expire. A version needs what its transaction wrote, and dependencies: objects of other
   transactions that the ledger lists. An expiring version releases both. A released object that the next living
   version needs becomes a dependency of that version. Any other is condemned, unless a living version needs it.
   A copy needs only its own objects and its dependencies, and no later version builds on it.
3. Add the abandoned transactions: those under `txn/` without a version and without a write for a while. A folder
   with an object that no transaction would write belongs to another program and is left alone. One collection
   condemns at most 8 MiB of their ids, so that its record stays within its bounds; the next condemns the rest.
4. Delete an object that does not exist, as a check of permissions: a process that may not delete must not expire
   anything. Then append a record with the new ledger that condemns all of the above. A newer record met while
   appending is added to the ledger: what it reuses is spared, and so is its own transaction if it was considered
   abandoned. If the newer record is another collection's, begin again. If it tags a version that is to expire,
   begin again only a few times, so that no writer prevents a collection; then the tag expires too. If it drops
   tags, another step may be the newest: begin again, but after a few times keep all steps, so that none is lost.
5. Delete only after the record is durable, and of each condemned transaction only what was listed before the
   record was created. Read the record again before every few deletions, and end with `TimelineChanged` if a repair
   has voided it: what it expired may be alive again. (A repair that can read the record leaves expired what needs
   an object that it condemned, since a deletion may be under way.)
   A collection also condemns again, and deletes, what the previous one condemned but did not delete, unless a
   living version needs it (one that is alive again, or one that a forged record ignored). So a collection
   killed at any point leaves no garbage permanently.
6. Archive the records of old versions (`archiving`).
7. Remove temporary files that killed processes left beside the objects a week ago or earlier (local folders only).

A transaction that is condemned, or reuses a condemned object, reads the collection's record when it commits
(`log.log`), and fails. So safety does not depend on clocks: ages only select candidates.

Cost: the records since the last collection; the permission check; one listing each of `txn/`, `commits/` and
`damaged/`; for each expired version or deleted transaction that wrote objects one listing, and the deletion of
each of its objects (and of its folder, where the storage has folders); for each run of expired versions that is
not followed by a complete save, the tree of the next living version. The ledger takes about 100 bytes for each
living version.
"""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterable, Mapping, Sequence

from tstore.core.format.arguments import checked_duration
from tstore.core.format.layout import (
    is_collectable,
    is_manifest,
    is_object,
    is_pack,
    is_transaction,
    is_transaction_object,
    owner_of,
    root_key,
    roots_for,
    version_of,
)
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.records import Collection, Record
from tstore.core.format.tree.retention import Keep, Ledger, packs_of, step_of
from tstore.core.log.expiry import collections, last_collection, ledger_at
from tstore.core.log.group_commit import Newer
from tstore.core.log.log import Log
from tstore.core.log.reader import LogReader
from tstore.core.log.roots import are_usable, create_missing
from tstore.core.maintenance.archiving import archive_records
from tstore.core.maintenance.collect_report import CollectReport
from tstore.core.maintenance.damage import checked_newest
from tstore.core.maintenance.past_repairs import check_repairs_ended
from tstore.core.runtime import world
from tstore.core.runtime.concurrency import batched, together
from tstore.core.runtime.pool import run, run_to_end
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Durability
from tstore.errors import Denied, InvalidArgument, NotFound, StorageFull, Unavailable

__all__ = ["CollectReport", "Overtaken", "collect", "delete_condemned"]

_MAX_PLANS = 8  # restarts allowed because newer commits tag expiring versions, or drop tags
_MAX_ABANDONED = 8 << 20  # characters in the ids of all abandoned transactions that a record condemns


async def collect(log: Log, keep: Keep | None, abandoned: datetime.timedelta, *, dry_run: bool) -> CollectReport:
    """Collect garbage by the steps at the top of this file; `keep=None` keeps every version.

    Uncommitted transactions not written to for as long as `abandoned` are deleted. Raise `Denied` if the storage
    does not allow deletion, `Corrupt` if a record is missing, `NotFound` if no living version has a tag or metric
    of `keep`, `StorageFull` if the record of the collection does not fit, `InvalidArgument` if it is too long.
    """
    checked_duration("abandoned", abandoned)
    reader, plans, drops = log.reader, 0, 0
    while True:
        base, listed = await checked_newest(reader)
        plans += 1
        try:
            plan = _Plan(reader, base, *await ledger_at(reader, base), plans, drops)
            await plan.make(keep, abandoned.total_seconds())
        except NotFound:
            if await reader.newest() == base:
                raise
            continue  # another collection deleted the object meanwhile
        if dry_run:
            return plan.report(None, dry_run)
        try:
            await plan.complete_roots()
            version = await _commit(log, plan) if plan.condemns else None
        except Overtaken as overtaken:
            drops += overtaken.dropped_tags
            continue
        try:
            await _delete(reader, version, plan.collection(), plan.listed)
            await archive_records(reader, base, listed)
            await log.storage.sweep()
        except (Denied, Unavailable) as error:
            if version is None:
                raise
            raise type(error)(
                f"{error}. Version {version}, the commit of this gc, is durable; repeat the gc to delete the "
                "remaining data"
            ) from error
        return plan.report(version, dry_run)


class Overtaken(Exception):
    """A commit newer than the plan of a garbage collection or repair requires another plan.

    `dropped_tags` is whether this commit dropped tags.
    """

    def __init__(self, dropped_tags: bool = False) -> None:
        self.dropped_tags = dropped_tags


class _Plan:
    """The plan of a collection: what to condemn as of version `base`.

    `number` counts the plans of one collection, from 1. `drops` counts the earlier plans that were overtaken by
    commits that dropped tags.

    `make` removes the expired versions from the ledger and finds all candidates for deletion. Commits newer than
    `base` are added to the ledger until the record is appended; `collection` condemns the candidates that no
    version needs.
    """

    def __init__(
        self, log: LogReader, base: int, ledger: Ledger, previous: Collection | None, number: int, drops: int
    ) -> None:
        self.base = base
        self.number = number
        self.ledger = ledger
        self.expired: list[int] = []
        self.abandoned: set[str] = set()
        self.listed: dict[str, Mapping[str, int]] = {}  # the sizes of all objects by key, by transaction
        self._keeps_steps = drops >= _MAX_PLANS
        self._log = log
        self._previous = Collection((), (), {}, (), ()) if previous is None else previous  # the last collection
        self._in_use = {*ledger.transactions, *map(owner_of, ledger.dependencies), *self._previous.transactions}
        self._tags: dict[str, int] = {}  # the tags of expired versions
        self._released: dict[str, set[str]] = {}  # objects that expired versions wrote or needed, by transaction
        self._roots: list[str] = []
        self._leftover_transactions: set[str] = set()  # condemned by the last collection, but not deleted
        self._leftover_objects: Mapping[str, int] = {}  # their sizes
        self._sizes: dict[str, int] = {}  # of all candidates for deletion
        self._names: set[str] = set()  # the transactions that have objects; only these need to be listed

    async def make(self, keep: Keep | None, min_age: float) -> None:
        """Choose what to condemn: steps 2 and 3 at the top of this file. `min_age` is in seconds."""
        alive = self.ledger.alive
        await check_repairs_ended(self._log, alive)  # for each plan: one may have begun since the plan before
        if keep is not None:
            keep.check(alive)
        retained = set(alive) if keep is None else keep.select(alive, world.now())
        if self._keeps_steps:
            retained |= {version for version, entry in alive.items() if step_of(entry.tags) is not None}
        names = [name for name in await self._log.storage.folders("txn/") if is_transaction(name)]
        self._names = set(names)
        await self._expire(retained)
        # except objects that a revived version needs, or that a forged record condemned
        needed = {*self.ledger.dependencies, *map(root_key, self._needed_roots)}
        in_use = {*self.ledger.transactions, *map(owner_of, self.ledger.dependencies)}
        self._leftover_transactions = self._names.intersection(self._previous.transactions) - in_use
        self._leftover_objects = await self._log.storage.sizes(
            key
            for key in self._previous.objects
            if key not in needed and owner_of(key) not in self.ledger.transactions
        )
        await self._find_abandoned(names, min_age)
        await self._measure()

    async def _expire(self, retained: set[int]) -> None:
        """Remove versions that are not retained from the ledger, and release their objects and roots."""
        self.expired = sorted(set(self.ledger.alive) - retained)
        self._tags = {tag: v for v in self.expired for tag in self.ledger.alive[v].tags}
        copies = self.ledger.copies
        await self._release(sorted(copies - retained))
        expiring: list[int] = []
        for version in sorted(self.ledger.alive.keys() - copies):
            if version not in retained:
                expiring.append(version)
            elif expiring:  # every run of versions ends here, because the head is always retained
                await self._release(expiring, version)
                expiring = []
        self.ledger = self.ledger.without(self.expired)
        self._roots = [root_key(version) for version in sorted(roots_for(self.expired) - self._needed_roots)]

    @property
    def _needed_roots(self) -> set[int]:
        """The roots from which trees are read: the nearest at or below each version, and those it refers to."""
        return roots_for([*self.ledger.alive, self.base])

    async def _release(self, expired: Sequence[int], next_living: int | None = None) -> None:
        """Release what expired copies, or consecutive other versions, wrote or needed; `next_living` inherits."""
        entries = [self.ledger.alive[v] for v in expired]
        written = await together(lambda e: self._objects(e.transaction), entries)
        for entry, keys in zip(entries, written, strict=True):
            self.listed[entry.transaction] = keys
            self._released.setdefault(entry.transaction, set())
            # filtered, because a forged record may name any key
            for key in filter(is_transaction_object, (*keys, *entry.dependencies)):
                self._released.setdefault(owner_of(key), set()).add(key)
        if next_living is None or self.ledger.alive[next_living].standalone:
            return  # the ledger has all dependencies of a standalone version
        # the next living version needs no object of the entries before the last standalone one
        last_standalone = max((i for i, e in enumerate(entries) if e.standalone), default=0)
        used = await run(packs_of, await self._log.tree(next_living))
        async for _, record in self._log.each_record(expired[last_standalone:]):
            used |= {m.key for m in record.manifests if isinstance(m, ObjectRef)}
        used |= {key for e in entries[last_standalone:] for key in e.dependencies if is_manifest(key)}
        owners, dependencies = {e.transaction for e in entries}, {key for e in entries for key in e.dependencies}
        # compared by owner too, since a listing may lack some objects
        inherited = [k for k in sorted(used) if k in dependencies or owner_of(k) in owners]
        self.ledger.inherit(next_living, inherited, standalone=any(e.standalone for e in entries))

    async def _find_abandoned(self, names: Sequence[str], min_age: float) -> None:
        """Find transactions without a version and without a write for `min_age`.

        Stop when their ids have `_MAX_ABANDONED` characters in total.
        """
        log, characters_left = self._log, _MAX_ABANDONED - sum(map(len, self._leftover_transactions))
        for unused in batched(name for name in names if name not in self._in_use):
            ages = await together(lambda name: log.storage.age(f"txn/{name}"), unused)
            old = [name for name, age in zip(unused, ages, strict=True) if age is not None and age >= min_age]
            for name, keys in zip(old, await together(self._objects, old), strict=True):
                if characters_left > 0 and all(map(is_object, keys)):
                    characters_left -= len(name)
                    self.abandoned.add(name)
                    self.listed[name] = keys
            if characters_left <= 0:
                return

    async def _measure(self) -> None:
        """List the transactions not yet listed, and collect the size of every candidate for deletion."""
        transactions = sorted({*self._released, *self.abandoned, *self._leftover_transactions})
        unlisted = [t for t in transactions if t not in self.listed]
        listings = await together(self._objects, unlisted)
        self.listed.update(zip(unlisted, listings, strict=True))
        self._sizes = {**await self._log.storage.sizes(self._roots), **self._leftover_objects}
        for transaction in transactions:
            self._sizes.update(self.listed[transaction])

    async def _objects(self, transaction: str) -> Mapping[str, int]:
        """Return the sizes of a transaction's objects by key; many transactions wrote none beside their record."""
        if transaction not in self._names:
            return {}
        return {entry.key: entry.size for entry in await self._log.storage.entries(f"txn/{transaction}/")}

    @property
    def condemns(self) -> bool:
        """Whether anything expires or is to be deleted, so that a record is needed."""
        leftovers = self._leftover_objects or any(self.listed[t] for t in self._leftover_transactions)
        return bool(self.expired or self.abandoned or leftovers)

    async def complete_roots(self) -> None:
        """Create the needed roots that are missing, or spare those from which they would follow if that fails.

        Spare them too if the root above one can't be used: they may have the changes of a lost record.
        """
        if self._roots:
            needed, numbers = sorted(self._needed_roots), map(version_of, self._roots)
            above = {min((n for n in needed if n > number), default=0) for number in numbers} - {0}
            if not (await create_missing(self._log, needed) and await are_usable(self._log, above)):
                self._roots = []

    def spare(self, version: int, other: Record) -> None:
        """Add a commit newer than `base` to the ledger, so that its transaction and what it reuses are spared.

        Raise `Overtaken` if the commit is a collection or a repair. Raise it also if the commit drops tags or tags
        a version that is to expire, but each only up to `_MAX_PLANS` times.
        """
        expired = set(other.tagged.values()).intersection(self.expired)
        dropped = bool(other.dropped) and not self._keeps_steps
        changes_ledger = other.collection is not None or bool(other.voids)
        if changes_ledger or dropped or (expired and self.number < _MAX_PLANS):
            raise Overtaken(dropped)
        self._tags |= {tag: target for tag, target in other.tagged.items() if target in expired}
        self.ledger.add(version, other)
        self.abandoned.discard(other.transaction)

    def collection(self) -> Collection:
        """Return everything that is condemned, with the ledger of living versions."""
        needed, living = self.ledger.dependencies, self.ledger.transactions
        shared = {owner_of(key) for key in needed}
        transactions = self.abandoned | self._leftover_transactions
        objects = {*self._roots, *self._leftover_objects}
        for transaction, keys in self._released.items():
            if transaction in living:
                continue
            if transaction in shared:  # some of its objects stay
                objects |= keys
            else:
                transactions.add(transaction)
        return Collection(
            tuple(self.ledger.alive[v] for v in sorted(self.ledger.alive)),
            tuple(self.expired),
            self._tags,
            tuple(sorted(transactions - living)),
            tuple(sorted(objects - needed)),
        )

    def report(self, version: int | None, dry_run: bool) -> CollectReport:
        """Return the report; `version` is the commit of the collection, None if there was none."""
        condemned = self.collection()
        transactions, objects = set(condemned.transactions), set(condemned.objects)
        sizes = [size for key, size in self._sizes.items() if key in objects or owner_of(key) in transactions]
        return CollectReport(
            version,
            self.expired,
            sorted(self._tags),
            list(condemned.transactions),
            sorted(self.abandoned),
            [key for key in condemned.objects if is_pack(key)],
            len(sizes),
            sum(sizes),
            dry_run,
        )


async def _commit(log: Log, plan: _Plan) -> int:
    """Check the permission to delete, and commit the plan's record: step 4 at the top of this file."""
    transaction = f"gc-{world.token(12)}"
    try:
        await log.storage.delete(f"txn/{transaction}/pack-trial")
    except Denied as error:  # as with a token without the admin scope
        raise Denied(f"{error}. Nothing was collected, because a gc needs permission to delete") from error
    try:
        return await run_to_end(_append(log, plan, transaction))
    except StorageFull as error:
        raise StorageFull(
            f"{error}. Nothing was collected, because a gc writes a record of some KiB before it deletes: "
            "free that much space outside the store and repeat the gc"
        ) from error
    except InvalidArgument as error:
        raise InvalidArgument(
            f"{error}. Nothing was collected, because the record of a gc lists all living versions with their "
            "tags and metrics; keep fewer versions"
        ) from error


async def _append(log: Log, plan: _Plan, transaction: str) -> int:
    now, count = world.now(), len(plan.expired)
    message = f"gc: {count} version{'' if count == 1 else 's'} expired"

    def record() -> Record:
        return Record(transaction, plan.base, now, message, collection=plan.collection())

    async def validate(newer: Newer) -> Record:
        for version, other in newer:
            plan.spare(version, other)
        return record()

    return await log.append(record(), validate, Durability.FSYNC)


async def delete_condemned(storage: Storage, log_id: bytes | None, after: int) -> None:
    """Delete from a copy of a store what the collections above version `after` condemned in its source."""
    reader = LogReader(storage, log_id=log_id)
    async for version, condemned in collections(reader, await last_collection(reader, await reader.newest())):
        if version <= after:
            break
        names = list(filter(is_transaction, condemned.transactions))
        listed = await together(lambda name: storage.list(f"txn/{name}/"), names)
        await _delete(reader, version, condemned, dict(zip(names, listed, strict=True)))


async def _delete(
    log: LogReader, version: int | None, condemned: Collection, listed: Mapping[str, Iterable[str]]
) -> None:
    """Delete everything condemned by the collection of a version; objects already deleted are not an error.

    Markers, records and hints are never deleted, even if a (forged) record condemns them. Of a condemned
    transaction only the objects `listed` before the record was created are deleted. Hosts of the same cooperative
    transaction that begin again after that, and would use these keys again, are refused until another collection
    is the last one; then they use others for what a commit needs (`transactions.cooperative`).
    """

    async def delete(keys: Iterable[str]) -> None:
        for batch in batched(keys):
            if version is not None:
                await log.records.refetch(version, (await log.stored(version)).check)
            await together(log.storage.delete, batch)

    await delete(filter(is_collectable, condemned.objects))
    for transactions in batched(filter(is_transaction, condemned.transactions)):
        await delete(itertools.chain.from_iterable(listed[t] for t in transactions))
        if log.storage.capabilities.folders:
            await together(log.storage.delete, [f"txn/{transaction}" for transaction in transactions])
