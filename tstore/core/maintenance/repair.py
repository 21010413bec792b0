"""Repair: find versions whose records are damaged or name missing objects, and void them on request.

Records are never rewritten, with this one exception: an explicit act of an administrator with direct access to the
storage. A version N is voided in the following steps, which can be repeated after a failure at any of them.
0. If the record can be read, find out which later versions would be damaged if N were void (`damaged_versions`),
   and refuse unless they are to be voided too. They may have written chunks to an array that N created or
   resized, or need objects of versions before N that were collected because N had replaced the whole tree. What
   the last collection condemned counts as missing, since it may still be deleting.
   If the record can't be read, find out which later root vouches for its changes (`lost_records`). From the
   version R of that root on, the state of the store is known, although the record is lost. The versions between N
   and R, or all later ones if there is no such root, can't be read before the repair; those that need N are listed
   as damaged after it.
   Every refusal comes before the first change (but a collection may archive an intact record first).
1. Save the bytes of N's record as `damaged/<N>-<their checksum>`, none if it is missing. By this name a garbage
   collection notices a repair that was interrupted before step 5, and refuses to begin.
2. Delete the roots (saved trees) of version N and later ones, which may contain the changes of N. But if there is
   a version R, keep its root and later ones, which have to contain these changes.
3. Replace N's record by a void record, durably, alone or in an archive (`void_records`). It has the checksums by
   which later records may refer to N (`lost_records.named_checks`), and names R. Readers make the trees of
   versions from R on from the root of R or a later one, and those of versions below R without N.
4. Put empty objects in place of the roots of step 2, durably: until they read the commit of step 5, open stores
   may write stale roots, which have the changes of N. Readers ignore empty roots, and no store can create a root
   where an object is. If a version that has such a root is committed before step 5, begin this step again. The
   roots that open stores write from R on are not stale: they have the changes of N too.
5. Commit a record of the repair, so that the history shows it and open stores notice. It also lists the versions
   voided by earlier repairs whose own commits do not exist: they were interrupted or voided. It drops the tags
   that name N. If the newest garbage collection lists N as living, this commit is itself a collection that
   expires N: the objects that N wrote or needed become dependencies of the next living version, so that nothing
   that may be in use is deleted. If there is none, the newest state is that of a version before N, which may have
   expired. Unless it lacks data, that version is alive again, with the objects that it needs as dependencies.
   If there is a version R, and no record names N's transaction, the objects of this transaction that the tree of
   R needs become dependencies of the next living version too (`RepairPlan.protect`).
6. Write the roots of step 4 that living versions need; delete the others.

The data of N is collected a week later, like that of any transaction that did not commit. After step 5, no
transaction that is based on N or a later version can be committed any more, nor one that may be N itself
(`log.log`, `cooperative`). One that is committed between steps 3 and 5 is checked like any later version, and is
listed as damaged if it needs the changes of N.

If N was a garbage collection, or its record is too damaged to tell, its list of expired versions is lost. Then the
commit of step 5 expires the versions below N that lack an object, which N may have deleted. Other versions that N
had expired are alive again. If the record can be read, versions that need an object that N had condemned stay
expired too, since the collection may still be deleting (`repair_plan`). Otherwise the collection ends when it
notices that its record is void (`gc`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import msgspec

from tstore.core.format.layout import ROOT_EVERY, archive_key, commit_key, folder_of, roots_for
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.pages import stored
from tstore.core.format.objects.records import INLINE_MANIFEST_BYTES, REPAIR, VOIDED, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.plain_text import pluralize
from tstore.core.format.tree.retention import Condemned
from tstore.core.format.tree.tree import Tree
from tstore.core.log.expiry import ledger_at
from tstore.core.log.group_commit import Newer
from tstore.core.log.log import Log
from tstore.core.log.reader import LogReader
from tstore.core.log.roots import empty_roots, renew_roots
from tstore.core.maintenance.damage import (
    DamagedVersion,
    damaged_versions,
    last_readable_collection,
    newest_beyond_gaps,
)
from tstore.core.maintenance.gc import Overtaken
from tstore.core.maintenance.past_repairs import PastRepairs
from tstore.core.maintenance.repair_plan import RepairPlan, condemned_by
from tstore.core.maintenance.replay import UNREADABLE
from tstore.core.maintenance.void_records import (
    VoidRecords,
    Without,
    damaged_archives,
    is_voided,
    lost_with,
    resumed_without,
    stale_roots,
)
from tstore.core.runtime import world
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.storage.cache import without_cache
from tstore.core.storage.objects import Durability
from tstore.errors import Denied, InvalidArgument, NotFound

__all__ = ["RepairReport", "repair_store"]


class RepairReport(NamedTuple):
    """The result of a repair. `damaged` lists the damaged versions, `voided` the versions that it voided.

    `saved` lists the keys at which replaced records were saved. `version` is the commit that records the repair,
    None if nothing was voided. `expired` lists the versions that this commit expires, because a voided garbage
    collection had deleted their data. `restated` is the version whose state the repair committed once more,
    because the newest state has expired and lacks data: 0 for an empty tree, None if that was not necessary.
    """

    damaged: list[DamagedVersion]
    voided: list[int]
    saved: list[str]
    version: int | None
    expired: list[int]
    restated: int | None = None

    def __repr__(self) -> str:
        voided = _shown(self.voided)
        return f"<tstore.RepairReport {pluralize(len(self.damaged), 'damaged version')}, voided=[{voided}]>"

    @property
    def ok(self) -> bool:
        """Whether no damaged version remains, so that living versions can be read, and new ones committed.

        A version does not count as damaged if only the record of another one prevents that it is read. Chunks are
        not read: `verify` does that.
        """
        return all(damage.version in self.voided for damage in self.damaged)


async def repair_store(
    storage: Storage, log_id: bytes | None, void: Sequence[int], void_intact: Sequence[int]
) -> RepairReport:
    """Find the damaged versions and void those requested, by the steps at the top of this file.

    `void` names versions with damaged or missing records, `void_intact` versions to void even if their records are
    intact. If repairs that have ended voided all of them before, commit nothing. Raise `Denied` if the store is
    remote over HTTP, `InvalidArgument` if a version can't be voided.
    """
    storage = without_cache(storage)
    log = LogReader.strict(storage, log_id)
    requested = {*void, *void_intact}
    damaged = await damaged_versions(log)
    # `log.newest` ends at a gap in the log, but later commits decide what is lost
    newest = await newest_beyond_gaps(log.anew())
    doomed = await _doomed(log.anew(), newest, requested)
    if any(doomed):
        log = LogReader.strict(Without(storage, doomed.includes), log_id)
        damaged = await damaged_versions(log)
    lost = {damage.version for damage in damaged if not damage.record_intact}
    if not requested:
        known = await resumed_without(LogReader.strict(storage, log_id), lost)
        return RepairReport([_with_consequence(one, known) for one in damaged], [], [], None, [])
    archives = await damaged_archives(storage, lost)
    unreadable = lost
    if archives:
        log = LogReader.strict(Without(log.storage, {*map(archive_key, archives)}.__contains__), log_id)
        damaged = await damaged_versions(log)
        lost = {damage.version for damage in damaged if not damage.record_intact}
    wanted = sorted((requested - (unreadable - lost)) | lost_with(requested, lost, archives))
    repairs = await PastRepairs.up_to(log.anew(), newest, wanted)
    await _check_voidable(log, wanted, newest, lost, void_intact)
    named = {damage.version for damage in damaged}
    to_void = sorted({*wanted, *repairs.unlisted} - (repairs.ended - lost))
    records = await VoidRecords.make(storage, log.anew(), to_void, lost, named, newest, archives)
    await _check_consequences(log, records.resumes, lost, damaged)
    # the newest voided version whose list of expired versions is lost
    gc = max([version for version in to_void if await _may_have_collected(log, version)], default=0)
    if not records.replaces_any and not repairs.unlisted:
        return RepairReport(damaged, [], [], None, [])
    saved = await records.write()
    # a new reader, whose cache has none of the replaced records
    log = LogReader.strict(Without(storage, doomed.includes), log_id)
    if not wanted:  # the records of a damaged archive had objects of their own, all of them
        return RepairReport(await damaged_versions(log), [], saved, None, [])
    condemned = await condemned_by(storage, to_void)
    commit, restated = await _commit_repair(log, records.resumes, saved, gc, condemned)
    log = log.anew()
    ledger, _ = await ledger_at(log, commit)
    await renew_roots(log, stale_roots(records.resumes, commit - 1), roots_for(ledger.alive))
    collection = await log.collection(commit)
    expired = [] if collection is None else [version for version in collection.expired if version not in to_void]
    repaired = [d for d in damaged if d.version in wanted]
    remaining = [d for d in await damaged_versions(log.anew()) if d.version not in wanted]
    return RepairReport(sorted([*repaired, *remaining]), wanted, saved, commit, expired, restated)


async def _doomed(log: LogReader, newest: int, requested: Set[int]) -> Condemned:
    """Return what the last collection that is not to be voided condemned, unless all void versions are above it.

    It may still be deleting what no version needed while those below it were not void.
    """
    repairs = await PastRepairs.up_to(log, newest, requested)
    last, _ = await last_readable_collection(log, newest)
    while last in requested:
        last, _ = await last_readable_collection(log, last - 1)
    void = {*requested, *repairs.ended, *repairs.unlisted}
    collection = await log.collection(last) if min(void, default=last) < last else None
    return Condemned(frozenset(), frozenset()) if collection is None else Condemned.from_collection(collection)


def _with_consequence(damage: DamagedVersion, known: Mapping[int, int]) -> DamagedVersion:
    """Return a damaged version with a reason that says what voiding it would take away."""
    if damage.version not in known:
        return damage
    if root := known[damage.version]:
        return damage._replace(reason=f"{damage.reason}; versions from {root} on keep its changes if it is voided")
    return damage._replace(reason=f"{damage.reason}; its changes are lost if it is voided")


async def _check_voidable(
    log: LogReader,
    wanted: Sequence[int],
    newest: int,
    lost: Set[int],
    void_intact: Sequence[int],
) -> None:
    """Raise an error unless all wanted versions can be voided; intact records need `void_intact`."""
    url = log.storage.url
    if url.startswith(("http://", "https://")):
        raise Denied(
            f"{url}: a server never replaces a record; run `tstore repair FOLDER` on the host of the server, "
            "where `tstore serve` runs"
        )
    for version in wanted:
        if not 1 <= version <= newest:
            raise NotFound(f"{url} has no version {version} to void; its newest is {newest}")
        # a voided version passes too, so that an interrupted repair can be finished
        if not (version in lost or version in void_intact or await is_voided(log, version)):
            raise InvalidArgument(
                f"{url}: the record of version {version} is intact, so nothing was voided; to void it anyway, "
                f"pass void_intact=[{version}]"
            )
    if others := sorted(lost - set(wanted)):
        raise InvalidArgument(
            f"{url}: {commit_key(others[0])} is missing or damaged too, so the repair can't be committed and "
            f"nothing was voided; restore it from a copy, or void {_shown(others)} too"
        )


async def _check_consequences(
    log: LogReader, wanted: Mapping[int, int], lost: Set[int], damaged: Sequence[DamagedVersion]
) -> None:
    """Raise `InvalidArgument` if versions that can be read now would be damaged without the intact ones."""
    if intact := sorted([v for v in wanted if v not in lost and not await is_voided(log, v)]):
        others = {version: resumes for version, resumes in wanted.items() if version not in intact}
        others |= await resumed_without(log.anew(), lost & others.keys())  # as if these were voided alone
        before = {d.version for d in (await damaged_versions(log, others) if others else damaged)}
        after = [damage for damage in await damaged_versions(log, wanted) if damage.version not in before]
        if after:
            first = [version for version, resumes in others.items() if resumes != wanted[version]]
            all_intact = _shown(sorted({*intact, *(damage.version for damage in after)}), 100)
            advice = f"to void all of these, pass void_intact=[{all_intact}]"
            raise InvalidArgument(
                f"{log.storage.url}: without {_shown(intact)}, {pluralize(len(after), 'version')} would be "
                f"damaged, so nothing was voided: {after[0].reason}; "
                + (f"void {_shown(first)} first, alone" if first else advice)
            )


def _shown(versions: Sequence[int], limit: int = 10) -> str:
    """Format versions as text; of many, only the first and their number."""
    shown = ", ".join(map(str, versions[:limit]))
    return shown if len(versions) <= limit else f"{shown}, … ({len(versions)} in all)"


async def _may_have_collected(log: LogReader, version: int) -> bool:
    """Return whether a version is a garbage collection, or may have been one before it was damaged or voided."""
    with contextlib.suppress(*UNREADABLE):
        record = await log.record(version)
        return record.collection is not None or record.was_voided
    return True


async def _commit_repair(
    reader: LogReader, resumes: Mapping[int, int], saved: Sequence[str], gc: int, condemned: Condemned
) -> tuple[int, int | None]:
    """Commit the record of the repair and return its version, and the version that it restated, if any.

    `resumes` maps the voided versions to those whose roots have their changes, 0 for none. `gc` is the newest
    voided version that may have been a gc, 0 for none; `condemned` is what those had condemned.
    """
    restated, voided = None, sorted(resumes)
    while True:
        base = await reader.newest()
        await empty_roots(reader.storage, stale_roots(resumes, base))
        log = Log(reader := reader.anew())  # the previous reader may have read a stale root
        record = Record(
            REPAIR + world.token(12),
            base,
            world.now(),
            f"repair: voided version{'' if len(voided) == 1 else 's'} {', '.join(map(str, voided))}"[:1000],
            metadata={VOIDED: list(voided), "saved": list(saved)},
        )
        plan = await RepairPlan.make(reader, base, voided, gc, condemned)
        for version in sorted({*resumes.values()} - {0}):
            await plan.protect(version)
        with contextlib.suppress(Overtaken):
            if plan.lacks_newest:
                restated = await _restate(log, base, await plan.newest_complete(), voided)
            else:
                return await _append(log, record, voided, plan), restated


async def _append(log: Log, record: Record, voided: Sequence[int], plan: RepairPlan) -> int:
    if not plan.collects:
        record = msgspec.structs.replace(record, dropped=await _tags_of(log.reader, voided, record.base))

    async def validate(newer: Newer) -> Record:
        for version, other in newer:
            retags = not {*other.tags, *other.dropped, *other.tagged}.isdisjoint(record.dropped)
            if retags or version % ROOT_EVERY == 0:  # its writer may write a stale root
                raise Overtaken
            plan.add(version, other)
        return msgspec.structs.replace(record, collection=plan.collection()) if plan.collects else record

    return await log.append(await validate(()), validate, Durability.FSYNC)


async def _restate(log: Log, base: int, tree: Tree, voided: Sequence[int]) -> int:
    """Commit a tree as the newest state, and return its version; raise `Overtaken` after any newer commit."""
    transaction = REPAIR + world.token(12)
    manifest = await run(tree.manifest)
    manifests: tuple[ObjectRef | Manifest, ...] = (manifest,)
    if manifest.size > INLINE_MANIFEST_BYTES:
        reference, data = stored(f"{folder_of(transaction)}/manifest", manifest)
        await log.storage.create(reference.key, data, Durability.FSYNC)
        await log.storage.flush(folder_of(transaction), Durability.FSYNC)
        manifests = (reference,)
    record = Record(
        transaction,
        base,
        world.now(),
        f"repair: the state of version {tree.version} again" if tree.version else "repair: no version is left",
        replaces=True,
        manifests=manifests if tree.version else (),
        reused=manifest.reused(transaction),
        metadata={VOIDED: list(voided)},
    )

    async def validate(newer: Newer) -> Record:
        if newer:
            raise Overtaken
        return record

    await log.append(record, validate, Durability.FSYNC)
    return tree.version


async def _tags_of(log: LogReader, voided: Sequence[int], base: int) -> tuple[str, ...]:
    """Return the tags that commits up to `base` set to voided versions, and that still name these versions."""
    with contextlib.suppress(*UNREADABLE):
        return tuple(tag for tag, version in (await log.head(base)).tags.items() if version in voided)
    tagged: dict[str, int] = {}
    async for _, record in log.each_record(range(voided[0] + 1, base + 1)):
        for tag in (*record.tags, *record.dropped):
            tagged.pop(tag, None)
        tagged |= record.tagged
    return tuple(tag for tag, version in tagged.items() if version in voided)
