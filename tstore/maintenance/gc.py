"""Garbage collection: expire versions that no retention rule keeps, and delete transactions that never committed.

1. Raise `Corrupt` if a record is missing although later ones exist: the data of its transaction would look
   abandoned. Read the ledger of living versions from the newest collection's record, and add the records since.
2. Choose the versions to expire. A version holds the objects of expired versions that it refers to. An expiring
   version releases these and all that its transaction wrote; the next living version then holds those that it
   refers to. A released object is condemned unless a living version holds it or is of its transaction.
3. Add the abandoned transactions: those under `txn/` without a version and without a write for a while. A folder
   with an object that no transaction would write belongs to another program and is left alone. One collection
   condemns at most 8 MiB of their ids, so that its record stays within its bounds; the next takes the rest.
4. Delete an object that does not exist, as a check of permissions: a process that may not delete must not expire
   anything. Then append a record with the new ledger that condemns all of the above. A newer record met while
   appending is added to the ledger: what it reuses is spared, and so is its own transaction if it was considered
   abandoned. If the newer record is another collection's, begin again.
5. Delete only after the record is durable, and of each condemned transaction only what was listed before the
   record was created. A collection also deletes objects condemned by the previous one (except keys that no
   collection may condemn, which a forged record could name), and condemns them again. So a collection killed at
   any point leaves no garbage permanently.
6. Remove temporary files that killed processes left beside the objects a week ago or earlier (local folders only).

A transaction that is condemned, or reuses a condemned object, reads that record when it commits (`log.log`) and
fails. So safety does not depend on clocks: ages only select candidates.

Cost: the records since the last collection; the permission check; one listing each of `txn/` and `commits/`; for
each expired version or deleted transaction one listing, and the size and deletion of each of its objects; for each
run of expired versions that is not followed by a complete save, the tree of the next living version. The ledger
takes about 100 bytes for each living version.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tstore.errors import Denied, NotFound, StorageFull, Unavailable
from tstore.format.arguments import checked_duration
from tstore.format.layout import (
    ROOT_EVERY,
    is_collectable,
    is_manifest,
    is_object,
    is_pack,
    is_transaction,
    is_transaction_object,
    owner_of,
    root_key,
)
from tstore.format.records import Collection, Record
from tstore.format.references import ObjectRef
from tstore.format.retention import Keep, Ledger, packs_of
from tstore.log.expiry import ledger_since, living_versions
from tstore.log.group_commit import Newer
from tstore.log.log import Log
from tstore.log.reader import LogReader
from tstore.maintenance.damage import checked_newest
from tstore.runtime import world
from tstore.runtime.concurrency import batched, together
from tstore.runtime.pool import uncancelled
from tstore.storage.objects import Durability

__all__ = ["ABANDONED_AFTER", "CollectReport", "collect"]

ABANDONED_AFTER = datetime.timedelta(days=7)
_MAX_ABANDONED = 8 << 20  # characters in the ids of all abandoned transactions that a record condemns


class CollectReport(NamedTuple):
    """The result of a garbage collection, or with `dry_run` what it would do.

    `version` is the commit of the collection, None for a dry run or if there was nothing to collect. `versions`
    lists those that expired, `tags` their tags. `transactions` were deleted with all their objects: those of
    expired versions, the `abandoned` ones, and those that an earlier collection left. `packs` were deleted alone,
    because other objects of their transactions are still needed. `bytes` and `objects` count all deletions.
    """

    version: int | None
    versions: list[int]
    tags: list[str]
    transactions: list[str]
    abandoned: list[str]
    packs: list[str]
    objects: int
    bytes: int
    dry_run: bool

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(getattr(self, name))} {name}" for name in ("versions", "transactions", "packs"))
        sizes = f"{self.objects} objects, {self.bytes} bytes"
        return f"<tstore.CollectReport version={self.version} dry_run={self.dry_run}: {counts}, {sizes}>"


async def collect(log: Log, keep: Keep | None, abandoned: datetime.timedelta, *, dry_run: bool) -> CollectReport:
    """Collect garbage by the steps at the top of this file; `keep=None` keeps every version.

    Uncommitted transactions not written to for as long as `abandoned` are deleted. Raise `Denied` if the storage
    does not allow deletion, `Corrupt` if a record is missing, `NotFound` if no living version has a tag or metric
    of `keep`, `StorageFull` if the record of the collection does not fit.
    """
    checked_duration("abandoned", abandoned)
    reader = log.reader
    while True:
        base = await checked_newest(reader)
        try:
            plan = await _plan(reader, base, keep, abandoned)
            sizes = await _sizes(reader, plan)
        except NotFound:
            if await reader.newest() == base:
                raise
            continue  # another collection deleted the object meanwhile
        if dry_run or not plan.condemns:
            version = None
        else:
            transaction = f"gc-{world.token(12)}"
            await _check_may_delete(reader, transaction)
            try:
                version = await uncancelled(_append(log, plan, transaction))
            except _Overtaken:
                continue
            except StorageFull as error:
                raise StorageFull(
                    f"{error}. Nothing was collected, because a gc writes a record of some KiB before it deletes: "
                    "free that much space outside the store and repeat the gc"
                ) from error
        if not dry_run:
            try:
                await _delete(reader, plan.collection(), plan.listed)
                await log.storage.sweep()
            except (Denied, Unavailable) as error:
                if version is None:
                    raise
                raise type(error)(
                    f"{error}. Version {version}, the commit of this gc, is durable; repeat the gc to delete the "
                    "remaining data"
                ) from error
        return plan.report(version, sizes, dry_run)


class _Overtaken(Exception):
    """Another collection was committed after this one was planned."""


class _Plan:
    """What to condemn as of version `base`.

    `released` maps transactions to the objects that expired versions release, `listed` to all of their objects.
    `leftover_transactions` and `leftover_objects` were condemned by an earlier collection, but not deleted.
    """

    def __init__(self, base: int, ledger: Ledger) -> None:
        self.base = base
        self.ledger = ledger
        self.expired: list[int] = []
        self.tags: dict[str, int] = {}
        self.released: dict[str, set[str]] = {}
        self.listed: dict[str, Sequence[str]] = {}
        self.roots: list[str] = []
        self.abandoned: set[str] = set()
        self.leftover_transactions: set[str] = set()
        self.leftover_objects: set[str] = set()

    @property
    def condemns(self) -> bool:
        """Whether anything expires or is to be deleted, so that a record is needed."""
        leftovers = self.leftover_objects or any(self.listed[t] for t in self.leftover_transactions)
        return bool(self.expired or self.abandoned or leftovers)

    def spare(self, version: int, other: Record) -> None:
        """Add a commit newer than `base` to the ledger: its transaction and the objects it reuses are spared."""
        self.ledger.add(version, other)
        self.abandoned.discard(other.transaction)

    def collection(self) -> Collection:
        """Return everything that is condemned, with the ledger of living versions."""
        needed, living = self.ledger.holds, self.ledger.transactions
        shared = {owner_of(key) for key in needed}
        transactions = self.abandoned | self.leftover_transactions
        objects = set(self.roots) | self.leftover_objects
        for transaction, keys in self.released.items():
            if transaction in living:
                continue
            if transaction in shared:
                objects |= keys - needed
            else:
                transactions.add(transaction)
        return Collection(
            tuple(self.ledger.alive[v] for v in sorted(self.ledger.alive)),
            tuple(self.expired),
            self.tags,
            tuple(sorted(filter(is_transaction, transactions - living))),
            tuple(sorted(filter(is_collectable, objects - needed))),
        )

    def report(self, version: int | None, sizes: dict[str, int], dry_run: bool) -> CollectReport:
        """Return the report; `sizes` maps the keys of all candidates to bytes."""
        condemned = self.collection()
        transactions, objects = set(condemned.transactions), set(condemned.objects)
        counted = [size for key, size in sizes.items() if key in objects or owner_of(key) in transactions]
        return CollectReport(
            version,
            self.expired,
            sorted(self.tags),
            list(condemned.transactions),
            sorted(self.abandoned),
            [key for key in condemned.objects if is_pack(key)],
            len(counted),
            sum(counted),
            dry_run,
        )


async def _plan(log: LogReader, base: int, keep: Keep | None, abandoned: datetime.timedelta) -> _Plan:
    _, last = await living_versions(log, base)
    earlier = await log.collection(last) if last else None
    ledger = await ledger_since(log, last, () if earlier is None else earlier.alive, base)
    retained = set(ledger.alive) if keep is None else keep.select(ledger.alive, world.now())
    plan = _Plan(base, ledger)
    plan.expired = sorted(set(ledger.alive) - retained)
    plan.tags = {tag: v for v in plan.expired for tag in ledger.alive[v].tags}
    for run, heir in _expired_runs(ledger, retained):
        await _release(log, plan, run, heir)
    before, plan.ledger = ledger, ledger.without(plan.expired)
    plan.roots = _roots(plan)
    names = [name for name in await log.storage.folders("txn/") if is_transaction(name)]
    if earlier is not None:
        plan.leftover_transactions = set(names).intersection(earlier.transactions) - plan.ledger.transactions
    await _find_abandoned(log, plan, before, earlier, names, abandoned)
    if earlier is not None:
        objects = [key for key in earlier.objects if _may_be_condemned(key, plan.ledger)]
        plan.leftover_objects = set(await log.storage.sizes(objects))
    return plan


def _expired_runs(ledger: Ledger, retained: set[int]) -> list[tuple[list[int], int]]:
    """Return each run of consecutive expired versions with its heir, the next living version."""
    runs: list[tuple[list[int], int]] = []
    run: list[int] = []
    for version in sorted(ledger.alive):
        if version not in retained:
            run.append(version)
        elif run:
            runs.append((run, version))
            run = []
    return runs  # the newest version is always retained, so every run has an heir


async def _release(log: LogReader, plan: _Plan, run: Sequence[int], heir: int) -> None:
    """Add the objects of a run of expired versions to `plan.released`; let the heir hold those it refers to."""
    entries = [plan.ledger.alive[v] for v in run]
    written = await together(lambda e: _objects(log, e.transaction), entries)
    for entry, keys in zip(entries, written, strict=True):
        for key in filter(is_transaction_object, (*keys, *entry.holds)):  # a forged record may name other keys
            plan.released.setdefault(owner_of(key), set()).add(key)
        plan.released.setdefault(entry.transaction, set())
        plan.listed[entry.transaction] = keys
    if plan.ledger.alive[heir].replaces:
        return  # it refers only to its own objects and to those that its record names
    first = max((i for i, e in enumerate(entries) if e.replaces), default=0)
    used = packs_of(await log.tree(heir))
    async for _, record in log.each(log.record, run[first:]):
        used |= {m.key for m in record.manifests if isinstance(m, ObjectRef)}
    used |= {key for e in entries[first:] for key in e.holds if is_manifest(key)}
    owners, held = {e.transaction for e in entries}, {key for e in entries for key in e.holds}
    inherited = [k for k in sorted(used) if k in held or owner_of(k) in owners]  # a listing may lack some
    plan.ledger.inherit(heir, inherited, replaces=any(e.replaces for e in entries))


def _roots(plan: _Plan) -> list[str]:
    """Return the keys of the roots from which no living or future version is read."""
    needed = {v // ROOT_EVERY for v in plan.ledger.alive} | {plan.base // ROOT_EVERY}
    return [root_key(n * ROOT_EVERY) for n in sorted({v // ROOT_EVERY for v in plan.expired} - needed) if n]


async def _find_abandoned(
    log: LogReader,
    plan: _Plan,
    before: Ledger,
    earlier: Collection | None,
    names: Sequence[str],
    min_age: datetime.timedelta,
) -> None:
    """Add transactions without a version whose newest write is at least `min_age` ago, up to `_MAX_ABANDONED`."""
    known = before.transactions | {owner_of(key) for key in before.holds}
    known |= set(earlier.transactions) if earlier is not None else set()
    room, seconds = _MAX_ABANDONED - sum(map(len, plan.leftover_transactions)), min_age.total_seconds()
    for unknown in batched(name for name in names if name not in known):
        ages = await together(lambda name: log.storage.age(f"txn/{name}"), unknown)
        old = [name for name, age in zip(unknown, ages, strict=True) if age is not None and age >= seconds]
        for name, keys in zip(old, await together(lambda n: _objects(log, n), old), strict=True):
            if room > 0 and all(map(is_object, keys)):
                room -= len(name)
                plan.abandoned.add(name)
                plan.listed[name] = keys
        if room <= 0:
            return


async def _check_may_delete(log: LogReader, transaction: str) -> None:
    """Raise `Denied` if deletion is not allowed, as with a token without the admin scope."""
    try:
        await log.storage.delete(f"txn/{transaction}/pack-trial")
    except Denied as error:
        raise Denied(f"{error}. Nothing was collected, because a gc needs permission to delete") from error


async def _append(log: Log, plan: _Plan, transaction: str) -> int:
    now, count = world.now(), len(plan.expired)
    message = f"gc: {count} version{'' if count == 1 else 's'} expired"

    def record() -> Record:
        return Record(transaction, plan.base, now, message, collection=plan.collection())

    async def validate(newer: Newer) -> Record:
        for version, other in newer:
            if other.collection is not None:
                raise _Overtaken
            plan.spare(version, other)
        return record()

    return await log.append(record(), validate, Durability.FSYNC)


async def _sizes(log: LogReader, plan: _Plan) -> dict[str, int]:
    """Return the size of every candidate for deletion by key, and list the transactions not yet listed."""
    transactions = sorted({*plan.released, *plan.abandoned, *plan.leftover_transactions})
    unlisted = [t for t in transactions if t not in plan.listed]
    plan.listed.update(zip(unlisted, await together(lambda t: _objects(log, t), unlisted), strict=True))
    keys = sorted({k for t in transactions for k in plan.listed[t]} | {*plan.roots, *plan.leftover_objects})
    return await log.storage.sizes(keys)


async def _delete(log: LogReader, condemned: Collection, listed: Mapping[str, Sequence[str]]) -> None:
    """Delete everything condemned; objects already deleted are not an error.

    Markers, records and hints are never deleted, even if a (forged) record condemns them. Of a condemned
    transaction only the objects `listed` before the record was created are deleted: a host of a cooperative
    transaction that starts later may use the id again, and does not read the record when it commits.
    """
    await together(log.storage.delete, filter(is_collectable, condemned.objects))
    for transaction in filter(is_transaction, condemned.transactions):
        await together(log.storage.delete, listed[transaction])
        await log.storage.delete(f"txn/{transaction}")


def _may_be_condemned(key: str, ledger: Ledger) -> bool:
    """Return whether a collection may condemn an object that an earlier record, perhaps forged, condemned."""
    if key.startswith("roots/"):
        return is_object(key)
    owner = owner_of(key)
    return is_object(key) and is_transaction(owner) and owner not in ledger.transactions


async def _objects(log: LogReader, transaction: str) -> Sequence[str]:
    """Return the keys of a transaction's objects; an invalid id, as in a forged record, has none."""
    return await log.storage.list(f"txn/{transaction}/") if is_transaction(transaction) else []
