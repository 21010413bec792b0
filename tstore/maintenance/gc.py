"""Garbage collection: versions that no rule keeps, and transactions that never became one.

1. Read the ledger of living versions: the newest gc's record has it as of then, newer records are added.
2. Choose the versions to expire. Each gives up what it alone needed: the objects that its transaction wrote and
   those of others that it holds. What the next living version is still made of, that version holds from now on.
   An object is dead once its transaction has no living version and no living version holds it.
3. Add the transactions under `txn/` that became no version and were not written to for a while. A folder there
   that holds other names than a transaction writes is another program's, and stays.
4. Append a record that carries the new ledger and condemns all this. A newer record met on the way becomes part
   of the ledger, and what it re-uses, and itself if it was taken for abandoned, is spared. If it is another gc's,
   begin again. Before it, delete an object that nobody made: who may delete nothing shall not expire anything.
5. Only then delete, once the record is durable. A gc that finds objects condemned by the one before it deletes
   them too, as far as a gc may condemn them; a record that it writes condemns them again, so that no death of a gc
   leaves anything for good.
6. Let the storage remove what killed creates have left beside the objects for a week (local folders alone).

A transaction that is condemned, or re-uses what is condemned, meets the record when it commits (`log.append`). So
nothing here rests on a clock: ages only decide what is worth condemning.

Cost: the records since the last gc; one deletion of nothing; one listing of the names under `txn/`, and in a
local folder one of those in `commits/`; for each version or transaction that goes one listing, and the size and
the deletion of each of its objects; for each run of expired versions without a whole save behind it, the tree of
the next living version. The ledger has about 100 bytes for each living version.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import NamedTuple

from tstore.errors import Denied, NotFound, StorageFull, Unavailable
from tstore.format.arguments import checked_duration
from tstore.format.condemned import is_collectable, packs_of
from tstore.format.layout import (
    ROOT_EVERY,
    is_manifest,
    is_object,
    is_pack,
    is_transaction,
    is_written,
    owner_of,
    root_key,
)
from tstore.format.records import Collection, Record
from tstore.format.references import ObjectRef
from tstore.format.retention import Keep, Ledger
from tstore.log.expiry import ledger_since, living_versions
from tstore.log.group_commit import Newer
from tstore.log.log import Log
from tstore.log.reader import LogReader
from tstore.runtime import world
from tstore.runtime.concurrency import together
from tstore.runtime.pool import uncancelled
from tstore.storage.objects import Durability

__all__ = ["ABANDONED_AFTER", "CollectReport", "collect"]

ABANDONED_AFTER = datetime.timedelta(days=7)


class CollectReport(NamedTuple):
    """What a gc removed, or would remove (`dry_run`).

    `version` is its own commit, None where nothing new was condemned. `versions` expired, with their `tags`.
    `transactions` went with all their objects: those of expired versions, and abandoned ones (`abandoned`).
    `packs` went one by one, of transactions of which others are still needed. `bytes` and `objects` count all
    that was deleted, also what an earlier gc had condemned and left.
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
    """Removes what no rule of `keep` keeps (None keeps every version) by the steps at the top of this file."""
    checked_duration("abandoned", abandoned)
    reader = log.reader
    while True:
        base = await reader.newest()
        try:
            plan = await _plan(reader, base, keep, abandoned)
            sizes = await _sizes(reader, plan)
        except NotFound:
            if await reader.newest() == base:
                raise
            continue  # another gc deleted what was looked at
        if dry_run or not plan.condemns:
            version = None
        else:
            transaction = f"gc-{world.token(12)}"
            await _try_to_delete(reader, transaction)
            try:
                version = await uncancelled(_append(log, plan, transaction))
            except _Overtaken:
                continue
            except StorageFull as error:
                raise StorageFull(
                    f"{error}. Nothing was collected: a gc writes its own record, of some KiB, before it removes "
                    "anything; free as much beside the store"
                ) from error
        if not dry_run:
            try:
                condemned = plan.collection()
                if version is None and (condemned.transactions or condemned.objects):
                    # by an earlier gc, which may have died before its record was durable
                    await log.backend.flush("commits", Durability.FSYNC)
                await _delete(reader, condemned)
                await log.backend.sweep()
            except (Denied, Unavailable) as error:
                if version is None:
                    raise
                raise type(error)(
                    f"{error}. Version {version}, the commit of this gc, stands all the same; repeat it to remove "
                    "the data that is left"
                ) from error
        return plan.report(version, sizes, dry_run)


class _Overtaken(Exception):
    """Another gc was committed since this one was planned."""


class _Plan:
    """What is to be condemned as of `base`; `dead` are candidates by transaction, `left` of an earlier gc."""

    def __init__(self, base: int, ledger: Ledger) -> None:
        self.base = base
        self.ledger = ledger
        self.expired: list[int] = []
        self.tags: dict[str, int] = {}
        self.dead: dict[str, set[str]] = {}
        self.listed: dict[str, Sequence[str]] = {}
        self.roots: list[str] = []
        self.abandoned: set[str] = set()
        self.left_transactions: set[str] = set()
        self.left_objects: set[str] = set()

    @property
    def condemns(self) -> bool:
        """Whether there is more to condemn than a gc before has condemned."""
        return bool(self.expired or self.abandoned)

    def meet(self, version: int, other: Record) -> None:
        """Takes in a commit that came after `base`: what it re-uses lives on."""
        self.ledger.add(version, other)
        self.abandoned.discard(other.transaction)

    def collection(self) -> Collection:
        """All that is condemned, and what lives."""
        held, living = self.ledger.held, self.ledger.transactions
        shared = {owner_of(key) for key in held}
        whole = self.abandoned | self.left_transactions
        single = set(self.roots) | self.left_objects
        for transaction, keys in self.dead.items():
            if transaction in living:
                continue
            if transaction in shared:
                single |= keys - held
            else:
                whole.add(transaction)
        return Collection(
            tuple(self.ledger.alive[v] for v in sorted(self.ledger.alive)),
            tuple(self.expired),
            self.tags,
            tuple(sorted(filter(is_transaction, whole - living))),
            tuple(sorted(filter(is_collectable, single - held))),
        )

    def report(self, version: int | None, sizes: dict[str, int], dry_run: bool) -> CollectReport:
        """What goes, with the sizes by key of all that could go."""
        gone = self.collection()
        whole, single = set(gone.transactions), set(gone.objects)
        counted = [size for key, size in sizes.items() if key in single or owner_of(key) in whole]
        return CollectReport(
            version,
            self.expired,
            sorted(self.tags),
            list(gone.transactions),
            sorted(self.abandoned),
            [key for key in gone.objects if is_pack(key)],
            len(counted),
            sum(counted),
            dry_run,
        )


async def _plan(log: LogReader, base: int, keep: Keep | None, abandoned: datetime.timedelta) -> _Plan:
    _, last = await living_versions(log, base)
    earlier = await log.collection(last) if last else None
    ledger = await ledger_since(log, last, () if earlier is None else earlier.alive, base)
    kept = set(ledger.alive) if keep is None else keep.chosen(ledger.alive, world.now())
    plan = _Plan(base, ledger)
    plan.expired = sorted(set(ledger.alive) - kept)
    plan.tags = {tag: v for v in plan.expired for tag in ledger.alive[v].tags}
    for run, heir in _runs(ledger, kept):
        await _give_up(log, plan, run, heir)
    before, plan.ledger = ledger, ledger.without(plan.expired)
    plan.roots = _roots(plan)
    names = [name for name in await log.backend.folders("txn/") if is_transaction(name)]
    await _find_abandoned(log, plan, before, earlier, names, abandoned)
    if earlier is not None:
        plan.left_transactions = {t for t in earlier.transactions if t in names} - plan.ledger.transactions
        single = [key for key in earlier.objects if _may_be_condemned(key, plan.ledger)]
        found = await together(log.backend.size, single)
        plan.left_objects = {k for k, size in zip(single, found, strict=True) if size is not None}
    return plan


def _runs(ledger: Ledger, kept: set[int]) -> list[tuple[list[int], int]]:
    """The expired versions that follow each other, and the living one behind them."""
    runs: list[tuple[list[int], int]] = []
    run: list[int] = []
    for version in sorted(ledger.alive):
        if version not in kept:
            run.append(version)
        elif run:
            runs.append((run, version))
            run = []
    return runs  # the newest version is kept, so no run is without a heir


async def _give_up(log: LogReader, plan: _Plan, run: Sequence[int], heir: int) -> None:
    """Adds what the versions of a run needed to what may be dead, and lets the heir hold what it still needs."""
    entries = [plan.ledger.alive[v] for v in run]
    written = await together(lambda e: _objects(log, e.transaction), entries)
    for entry, keys in zip(entries, written, strict=True):
        for key in filter(is_written, (*keys, *entry.holds)):  # a forged record may name others
            plan.dead.setdefault(owner_of(key), set()).add(key)
        plan.dead.setdefault(entry.transaction, set())
        plan.listed[entry.transaction] = keys
    if plan.ledger.alive[heir].replaces:
        return  # it is made of its own objects, and of those that its record names
    first = max((i for i, e in enumerate(entries) if e.replaces), default=0)
    records = await together(log.record, run[first:])
    used = packs_of(await log.tree(heir))
    used |= {m.key for r in records for m in r.manifests if isinstance(m, ObjectRef)}
    used |= {key for e in entries[first:] for key in e.holds if is_manifest(key)}
    owners, held = {e.transaction for e in entries}, {key for e in entries for key in e.holds}
    given = [key for key in sorted(used) if key in held or owner_of(key) in owners]  # also what no list shows yet
    plan.ledger.inherit(heir, given, replaces=any(e.replaces for e in entries))


def _roots(plan: _Plan) -> list[str]:
    """The roots from which no living version and no new one is read."""
    needed = {v // ROOT_EVERY for v in plan.ledger.alive} | {plan.base // ROOT_EVERY}
    return [root_key(n * ROOT_EVERY) for n in sorted({v // ROOT_EVERY for v in plan.expired} - needed) if n]


async def _find_abandoned(
    log: LogReader,
    plan: _Plan,
    before: Ledger,
    earlier: Collection | None,
    names: Sequence[str],
    limit: datetime.timedelta,
) -> None:
    """Adds the transactions that became no version and that nobody has written to for a while.

    A folder with names that no object of a store has is left to whoever made it.
    """
    known = before.transactions | {owner_of(key) for key in before.held}
    known |= set(earlier.transactions) if earlier is not None else set()
    unknown = [name for name in names if name not in known]
    ages = await together(lambda name: log.backend.age(f"txn/{name}"), unknown)
    old = [n for n, age in zip(unknown, ages, strict=True) if age is not None and age >= limit.total_seconds()]
    for name, keys in zip(old, await together(lambda n: _objects(log, n), old), strict=True):
        if all(map(is_object, keys)):  # else another program uses the folder
            plan.abandoned.add(name)
            plan.listed[name] = keys


async def _try_to_delete(log: LogReader, transaction: str) -> None:
    """Raises `Denied` where nothing may be deleted, as with a token that is no admin's; then nothing expires."""
    try:
        await log.backend.delete(f"txn/{transaction}/pack-trial")
    except Denied as error:
        raise Denied(f"{error}. Nothing was collected: a gc needs to delete, so no version expired") from error


async def _append(log: Log, plan: _Plan, transaction: str) -> int:
    now = world.now()

    def record() -> Record:
        count = len(plan.expired)
        return Record(
            transaction,
            plan.base,
            now,
            f"gc: {count} version{'' if count == 1 else 's'} expired",
            collection=plan.collection(),
        )

    async def validate(newer: Newer) -> Record:
        for version, other in newer:
            if other.collection is not None:
                raise _Overtaken
            plan.meet(version, other)
        return record()

    return await log.append(record(), validate, Durability.FSYNC)


async def _sizes(log: LogReader, plan: _Plan) -> dict[str, int]:
    """The size of everything that may go, by key."""
    whole = sorted({*plan.dead, *plan.abandoned, *plan.left_transactions})
    new = [t for t in whole if t not in plan.listed]
    for transaction, keys in zip(new, await together(lambda t: _objects(log, t), new), strict=True):
        plan.listed[transaction] = keys
    keys = sorted({k for t in whole for k in plan.listed[t]} | {*plan.roots, *plan.left_objects})
    sizes = await together(log.backend.size, keys)
    return {key: size for key, size in zip(keys, sizes, strict=True) if size is not None}


async def _delete(log: LogReader, condemned: Collection) -> None:
    """Deletes what stands condemned; what is gone already is no error.

    Nothing else deletes here. Markers, records and hints stay, whatever a record of this or of another says.
    """
    await together(log.backend.delete, filter(is_collectable, condemned.objects))
    for transaction in filter(is_transaction, condemned.transactions):
        await together(log.backend.delete, await _objects(log, transaction))
        await log.backend.delete(f"txn/{transaction}")


def _may_be_condemned(key: str, ledger: Ledger) -> bool:
    """Whether a gc can have condemned the object; what a forged record names besides shall not be deleted."""
    if key.startswith("roots/"):
        return is_object(key)
    owner = owner_of(key)
    return is_object(key) and is_transaction(owner) and owner not in ledger.transactions


async def _objects(log: LogReader, transaction: str) -> Sequence[str]:
    """The objects of a transaction; none for what can't be the id of one, as in a forged record."""
    return await log.backend.list(f"txn/{transaction}/") if is_transaction(transaction) else []
