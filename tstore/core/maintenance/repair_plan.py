"""The plan of a repair: which versions stay alive, which expire, and what stays condemned.

1. Voided versions expire if the last collection lists them as living.
2. If a garbage collection was voided, the versions that it expired are alive again, unless an object of theirs is
   missing or was condemned by it, since it may still be deleting.
3. The objects that an expired version wrote or needed become dependencies of the next living version. Copies are
   excluded: no later version needs what only a copy needed.
4. The head must be living. If the version with the head's state has expired, it is revived, unless it lacks data.
   Then the repair must commit another state (`lacks_newest`).
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Sequence

import msgspec

from tstore.core.format.layout import is_transaction, owner_of
from tstore.core.format.objects.encoding import decode
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.records import Collection, Record
from tstore.core.format.tree.retention import Condemned, Ledger, packs_of
from tstore.core.format.tree.tree import Tree
from tstore.core.log.expiry import head_as_of, ledger_at, state_of
from tstore.core.log.reader import LogReader
from tstore.core.maintenance.damage import incomplete_versions
from tstore.core.maintenance.gc import Overtaken
from tstore.core.maintenance.replay import UNREADABLE
from tstore.core.runtime.concurrency import together
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage

__all__ = ["RepairPlan", "condemned_by"]


class RepairPlan:
    """What a repair expires, as of a version; later commits are added until the repair's record is appended."""

    def __init__(self, log: LogReader, base: int, voided: Sequence[int], revoked: Condemned) -> None:
        self._log = log
        self._base = base
        self._voided = voided
        self._revoked = revoked  # what voided collections condemned
        self._condemned = revoked  # and what the last collection that was not voided condemned
        self._tags: dict[str, int] = {}  # the tags of expired versions
        self._ledger = Ledger()
        self.expired: list[int] = []
        self._protects = False
        self.lacks_newest = False
        """Whether the version with the newest state lacks data, so that another state must be committed."""

    @staticmethod
    async def make(log: LogReader, base: int, voided: Sequence[int], gc: int, revoked: Condemned) -> RepairPlan:
        """Return the plan as of version `base`.

        `gc` is the newest voided version that may have been a garbage collection, 0 for none, and `revoked` what
        the voided collections are known to have condemned.
        """
        plan = RepairPlan(log, base, voided, revoked)
        await plan._expire(gc)
        return plan

    @property
    def collects(self) -> bool:
        """Whether the commit of the repair is that of a garbage collection."""
        return bool(self.expired) or self._protects

    async def protect(self, resumed: int) -> None:
        """Protect the objects of lost records that the tree of version `resumed` needs.

        No record names them any more, so a garbage collection would consider them abandoned. They become
        dependencies of a living version.
        """
        tree = await self._log.head(resumed)
        used = await run(packs_of, tree)
        used |= {base.key} if (base := tree.nodes.base) is not None else set()
        ledger = self._ledger
        version = min((v for v in ledger.alive.keys() - ledger.copies if v >= resumed), default=0)
        unknown = {owner_of(key) for key in used - ledger.dependencies} - ledger.transactions - {""}
        if version and unknown:
            written = await together(lambda owner: _transaction_objects(self._log, owner), sorted(unknown))
            objects = [key for keys in written for key in keys]
            ledger.inherit(version, objects, standalone=ledger.alive[version].standalone)
            self._protects = True

    def add(self, version: int, other: Record) -> None:
        """Add a newer commit; raise `Overtaken` if it requires another plan."""
        removed = {*self._voided, *self.expired}
        reuses = not removed.isdisjoint(other.named_versions) or any(map(self._revoked.includes, other.reused))
        if other.collection is not None or other.voids or reuses:
            raise Overtaken
        self._ledger.add(version, other)

    def collection(self) -> Collection:
        """Return the decisions of the repair in the form of a garbage collection."""
        living, needed = self._ledger.transactions, self._ledger.dependencies
        # a revived version may have left fragments, which nobody needs
        objects = [key for key in self._condemned.objects - needed if owner_of(key) not in living]
        return Collection(
            tuple(self._ledger.alive[version] for version in sorted(self._ledger.alive)),
            tuple(self.expired),
            self._tags,
            tuple(sorted(self._condemned.transactions - living)),
            tuple(sorted(objects)),
        )

    async def newest_complete(self) -> Tree:
        """Return the tree of the newest living version, not a copy, that lacks nothing; else an empty tree."""
        versions = sorted(self._ledger.alive.keys() - self._ledger.copies)
        incomplete = await incomplete_versions(self._log, versions)
        for version in reversed(versions):
            if version not in incomplete:
                with contextlib.suppress(*UNREADABLE):
                    return await self._log.tree(version)
        return Tree.empty()

    async def _expire(self, gc: int) -> None:
        """Choose the versions that expire, and pass on the objects that they wrote or needed."""
        log = self._log
        ledger, previous = await ledger_at(log, self._base)
        void = {version async for version, record in log.each_record(sorted(ledger.alive)) if record.void}
        remaining = sorted(ledger.alive.keys() - void)
        older = [version for version in remaining if version < gc]
        head = max(set(older) - ledger.copies, default=0)  # a collection keeps it
        incomplete = await incomplete_versions(log, [version for version in older if version != head])
        needing = await self._needing_revoked(remaining)
        stateless = [version for version in remaining if await self._lost_state(version)]
        self.expired = sorted({*void, *incomplete, *needing, *stateless})
        self._ledger = ledger
        if previous is not None:
            transactions = self._revoked.transactions.union(previous.transactions)
            self._condemned = Condemned(transactions, self._revoked.objects.union(previous.objects))
        if not self.expired:
            return
        kept = sorted(ledger.alive.keys() - set(self.expired) - ledger.copies)
        entries = [ledger.alive[version] for version in self.expired if version not in ledger.copies]
        written = await together(lambda entry: _transaction_objects(log, entry.transaction), entries)
        released: dict[int, list[str]] = {}  # what expired versions wrote or needed, by the next living version
        for entry, keys in zip(entries, written, strict=True):
            if (at := bisect.bisect(kept, entry.version)) < len(kept):
                stay = itertools.filterfalse(self._condemned.includes, (*entry.dependencies, *keys))
                released.setdefault(kept[at], []).extend(stay)
        for version, objects in released.items():
            ledger.inherit(version, objects, standalone=ledger.alive[version].standalone)
        self._ledger = ledger.without(self.expired)
        self.lacks_newest = not await self._revive_newest()
        self._tags = {tag: v for v in self.expired for tag in ledger.alive[v].tags}

    async def _needing_revoked(self, versions: Sequence[int]) -> list[int]:
        """Return the versions that need a manifest or pack condemned by a voided collection."""
        condemned = self._revoked
        if not (versions and (condemned.transactions or condemned.objects)):
            return []
        needing, manifest_gone, candidates = [], False, set(versions)
        async for version, record in self._log.each_record(range(1, versions[-1] + 1)):
            manifests = [m.key for m in record.manifests if isinstance(m, ObjectRef)]
            own_gone = any(map(condemned.includes, manifests))
            if not record.source:
                manifest_gone = (manifest_gone and not record.replaces) or own_gone
            if version not in candidates:
                continue
            gone = own_gone if record.source else manifest_gone
            with contextlib.suppress(*UNREADABLE):
                gone = gone or any(map(condemned.includes, await run(packs_of, await self._log.tree(version))))
            if gone:
                needing.append(version)
        return needing

    async def _revive_newest(self) -> bool:
        """Revive the version with the newest state; return False if it lacks data.

        The objects that its tree needs become its dependencies.
        """
        log = self._log
        version = await state_of(log, await head_as_of(log, self._base))
        if version == 0 or version in self._ledger.alive:
            return True
        if (objects := await self._complete(version)) is None:
            return False
        record = await log.record(version)
        self._ledger.add(version, msgspec.structs.replace(record, tags=(), dropped=(), tagged={}))
        entry = self._ledger.alive[version]
        others = [key for key in sorted(objects) if owner_of(key) != entry.transaction]
        self._ledger.inherit(version, others, standalone=entry.standalone)
        return True

    async def _lost_state(self, version: int) -> bool:
        """Return whether a version is the commit of an earlier repair whose state is voided now."""
        had_voided, below = False, version
        while below and _only_repairs(await self._log.record(below)):
            below = await state_of(self._log, await head_as_of(self._log, below - 1))
            had_voided = had_voided or any(below < voided < version for voided in self._voided)
        return had_voided and await self._complete(version) is None

    async def _complete(self, version: int) -> set[str] | None:
        """Return the packs and manifests that the tree of a version needs, None if one is missing or condemned."""
        try:
            tree = await self._log.tree(version)
            objects = await run(packs_of, tree)
            if (base := tree.nodes.base) is not None:
                objects.add(base.key)
            async for number, record in self._log.each_record(range(version, 0, -1)):
                if number == version or not record.source:
                    objects |= {m.key for m in record.manifests if isinstance(m, ObjectRef)}
                if record.replaces:
                    break
        except UNREADABLE:
            return None
        lacks = len(await self._log.storage.sizes(objects)) < len(objects)
        return None if lacks or any(map(self._condemned.includes, objects)) else objects


def _only_repairs(record: Record) -> bool:
    return bool(record.voids) and not record.changes_nodes


async def condemned_by(storage: Storage, voided: Sequence[int]) -> Condemned:
    """Return what the voided garbage collections condemned, from the copies of their records in damaged/."""
    transactions, objects = set[str](), set[str]()
    prefixes = tuple(f"damaged/{version:020d}-" for version in voided)
    for key in await storage.list("damaged/"):
        with contextlib.suppress(*UNREADABLE):
            record = decode(await storage.get(key), Record) if key.startswith(prefixes) else None
            if record is not None and record.collection is not None:
                transactions.update(record.collection.transactions)
                objects.update(record.collection.objects)
    return Condemned(frozenset(transactions), frozenset(objects))


async def _transaction_objects(log: LogReader, transaction: str) -> Sequence[str]:
    """Return the keys of a transaction's objects; an invalid id, as in a forged record, has none."""
    return await log.storage.list(f"txn/{transaction}/") if is_transaction(transaction) else []
