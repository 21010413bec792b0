"""Repair: find versions whose records are damaged or name missing objects, and void them on request.

Records are never rewritten, with this one exception: an explicit act of an administrator with direct access to the
storage. A version N is voided in the following steps, which can be repeated after a failure at any of them.
0. If the record can be read, find out which later versions would be damaged if N were void (`damaged_versions`),
   and refuse unless they are to be voided too. They may have written chunks to an array that N created or resized,
   or need objects of versions before N that were collected because N had replaced the whole tree. If the record
   can't be read, such versions can't be read either; afterwards they are listed as damaged.
1. Save the bytes of N's record as `damaged/<N>-<their checksum>`, none if it is missing. By this name a garbage
   collection notices a repair that was interrupted before step 4, and refuses to begin.
2. Delete the roots (saved trees) of version N and later ones: they may contain the changes of N.
3. Replace N's record by a void record, durably. It has the checksums by which later records may refer to N
   (`_named`). Delete the roots that other processes wrote in the meantime.
4. Commit a record of the repair, so that the history shows it and open stores notice. It also lists the versions
   voided by earlier repairs whose own commits do not exist: they were interrupted or voided. It drops the tags
   that later commits set to N. If the newest garbage collection lists N as living, this commit is itself a
   collection that expires N: the objects that N wrote or needed become dependencies of the next living version, so
   that nothing that may be in use is deleted. If there is none, the newest state is that of a version before N,
   which may have expired. Unless it lacks data, that version is alive again and inherits what N needed, as later
   commits need it.
5. Delete the roots of N and later versions again: until that commit, open stores may have written stale roots.
   A store that writes one later notices the repair, and deletes it (`log.roots`).

The data of N is collected a week later, like that of any transaction that did not commit. After step 4, no
transaction that is based on N or a later version can be committed any more, nor one that may be N itself
(`log.log`, `cooperative`). One that is committed between steps 3 and 4 is checked like any later version, and is
listed as damaged if it rests on N.

If N was a garbage collection, or its record is too damaged to tell, its list of expired versions is lost. Then the
commit of step 4 expires the versions below N that lack an object, which N may have deleted. Other versions that N
had expired are alive again. If the record can be read, versions that need an object that N had condemned stay
expired too, since the collection may still be deleting (`repair_plan`). Otherwise the collection ends when it
notices that its record is void (`gc`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import xxhash

from tstore.errors import AlreadyExists, Corrupt, Denied, InvalidArgument, NotFound, UnsupportedFormat
from tstore.format.frame import SHORTEST_FRAME, check_of, link_of, linked, unseal
from tstore.format.layout import (
    ARCHIVE_EVERY,
    ROOT_EVERY,
    archive_end,
    archive_key,
    commit_key,
    first_link,
    folder_of,
    root_key,
)
from tstore.format.objects.encoding import decode, encode
from tstore.format.objects.object_ref import ObjectRef
from tstore.format.objects.pages import stored
from tstore.format.objects.records import INLINE_MANIFEST_BYTES, REPAIR, REPLACED, VOIDED, Record
from tstore.format.objects.references import Manifest
from tstore.format.plain_text import pluralize
from tstore.format.tree.retention import Condemned
from tstore.format.tree.tree import Tree
from tstore.log.chain import OtherHistory
from tstore.log.expiry import named_collection
from tstore.log.group_commit import Newer
from tstore.log.log import Log
from tstore.log.reader import LogReader
from tstore.maintenance.compaction import may_be_archived
from tstore.maintenance.damage import DamagedVersion, damaged_versions, unlisted_voids
from tstore.maintenance.gc import Overtaken
from tstore.maintenance.repair_plan import RepairPlan, condemned_by
from tstore.maintenance.replay import UNREADABLE
from tstore.runtime import world
from tstore.runtime.concurrency import batched, together
from tstore.runtime.pool import run
from tstore.storage.base import Storage
from tstore.storage.cache import without_cache
from tstore.storage.objects import Durability

__all__ = ["RepairReport", "repair_store"]


_MAX_SHOWN = 10


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
        """Whether no damaged version remains."""
        return all(damage.version in self.voided for damage in self.damaged)


async def repair_store(
    storage: Storage, log_id: bytes, void: Sequence[int], void_intact: Sequence[int]
) -> RepairReport:
    """Find the damaged versions and void those requested, by the steps at the top of this file.

    `void` names versions with damaged or missing records, `void_intact` versions to void even if their records are
    intact. Raise `Denied` if the store is remote over HTTP, `InvalidArgument` if a version can't be voided.
    """
    storage = without_cache(storage)
    log = LogReader.strict(storage, log_id)
    damaged = await damaged_versions(log)
    wanted = sorted({*void, *void_intact})
    if not wanted:
        return RepairReport(damaged, [], [], None, [])
    # a damaged version may be above a gap in the log, where `newest` ends
    newest = max([await log.newest(), *(damage.version for damage in damaged)])
    await _check_voidable(log, wanted, newest, damaged, void_intact)
    await _check_consequences(log, wanted, damaged)
    # the newest voided version whose list of expired versions is lost
    gc = max([version for version in wanted if await _may_have_collected(log, version)], default=0)
    saved = [key for version in wanted if (key := await _void(storage, log_id, version, newest))]
    log = LogReader.strict(storage, log_id)  # a new reader, whose cache has none of the replaced records
    unlisted = set(await unlisted_voids(log, await log.newest())).difference(wanted)
    voided = sorted({*wanted, *unlisted})
    condemned = await condemned_by(storage, voided)
    commit, restated = await _commit_repair(Log(log), voided, saved, max(gc, *unlisted, 0), condemned)
    await _delete_roots(storage, voided[0], commit)  # writers that missed the commit may have left stale roots
    collection = await log.collection(commit)
    expired = [] if collection is None else [version for version in collection.expired if version not in voided]
    repaired = [d for d in damaged if d.version in wanted]
    remaining = [d for d in await damaged_versions(LogReader.strict(storage, log_id)) if d.version not in wanted]
    return RepairReport(sorted([*repaired, *remaining]), wanted, saved, commit, expired, restated)


async def _check_voidable(
    log: LogReader,
    wanted: Sequence[int],
    newest: int,
    damaged: Sequence[DamagedVersion],
    void_intact: Sequence[int],
) -> None:
    """Raise an error unless all wanted versions can be voided; intact records need `void_intact`."""
    url = log.storage.url
    if url.startswith(("http://", "https://")):
        raise Denied(
            f"{url}: a server never replaces a record; run `tstore repair FOLDER` on the host of the server, "
            "where `tstore serve` runs"
        )
    unreadable = [damage.version for damage in damaged if not damage.record_intact]
    for version in wanted:
        if not 1 <= version <= newest:
            raise InvalidArgument(f"{url} has no version {version} to void; its newest is {newest}")
        await _check_not_archived(log, version)
        if may_be_archived(version, newest) and version not in unreadable and not await _is_voided(log, version):
            raise InvalidArgument(
                f"{url}: version {version} is so old that a garbage collection may be archiving its record, so it "
                "can't be voided; restore the store from a copy instead"
            )
        # a voided version passes too, so that an interrupted repair can be finished
        if not (version in unreadable or version in void_intact or await _is_voided(log, version)):
            raise InvalidArgument(
                f"{url}: the record of version {version} is intact, so nothing was voided; to void it anyway, "
                f"pass void_intact=[{version}]"
            )
    if others := [version for version in unreadable if version not in wanted]:
        raise InvalidArgument(
            f"{url}: {commit_key(others[0])} is missing or damaged too, so the repair can't be committed and "
            f"nothing was voided; restore it from a copy, or void {_shown(others)} too"
        )


async def _check_consequences(log: LogReader, wanted: Sequence[int], damaged: Sequence[DamagedVersion]) -> None:
    """Raise `InvalidArgument` if versions that can be read now would be damaged without the intact ones."""
    unreadable = [damage.version for damage in damaged if not damage.record_intact]
    if intact := [v for v in wanted if v not in unreadable and not await _is_voided(log, v)]:
        lost = set(wanted).difference(intact)
        before = {d.version for d in (await damaged_versions(log, lost) if lost else damaged)}
        after = [damage for damage in await damaged_versions(log, wanted) if damage.version not in before]
        if after:
            raise InvalidArgument(
                f"{log.storage.url}: without {_shown(intact)}, {pluralize(len(after), 'version')} would be "
                f"damaged, so nothing was voided: {after[0].reason}; to void all of these, pass "
                f"void_intact=[{_shown([*intact, *(damage.version for damage in after)])}]"
            )


async def _check_not_archived(log: LogReader, version: int) -> None:
    """Raise `InvalidArgument` if the record of a version is in an archive, intact or damaged."""
    key = archive_key(end := archive_end(version))
    if await log.storage.size(key) is not None:
        first = end - ARCHIVE_EVERY + 1
        raise InvalidArgument(
            f"{log.storage.url}: the record of version {version} is in {key}, which nothing changes, so it can't "
            "be voided; if it is damaged, restore that object from a copy of the store; without one, delete it "
            f"and void all versions from {first} to {end}"
        )


def _shown(versions: Sequence[int]) -> str:
    """Return versions as text, of many the first and their number."""
    shown = ", ".join(map(str, versions[:_MAX_SHOWN]))
    return shown if len(versions) <= _MAX_SHOWN else f"{shown}, … ({len(versions)} in all)"


async def _void(storage: Storage, log_id: bytes, version: int, newest: int) -> str:
    """Replace the record of a version by a void record; return the key of the saved record, "" for none."""
    log, key, saved_key = LogReader.strict(storage, log_id), commit_key(version), ""
    async for _ in log.each_record(range(first_link(version) or 1, version)):
        pass  # so that the record is compared with those before it
    try:
        data = await storage.get(key)
    except NotFound:
        data = b""
    if not await _is_voided(log, version):
        name = f"damaged/{version:020d}-{xxhash.xxh3_128_hexdigest(data)}"
        with contextlib.suppress(AlreadyExists):  # an earlier repair was interrupted
            await storage.create(name, data, Durability.FSYNC)
        saved_key = name if data else ""
        await _delete_roots(storage, version, newest)
        void = Record(
            REPAIR + world.token(12),
            version - 1,
            world.now(),
            f"version {version} was voided" + (f"; its record was saved as {saved_key}" if saved_key else ""),
            void=True,
            durable=False,  # earlier versions may not be durable
            collected=await _gc_before(log, version),
            metadata={
                VOIDED: await _ids(log, version),
                REPLACED: sorted(check.hex() for check in await _named(log, version, data)),
            },
        )
        link, _ = await log.link(version - 1)
        await storage.replace(key, linked(encode(void), link))
        await storage.sync()
    await _delete_roots(storage, version, newest)
    return saved_key


async def _named(log: LogReader, version: int, data: bytes) -> set[bytes]:
    """Return the checksums by which the links of later records may refer to a version to be voided.

    It is that of its record `data`. If this is damaged, missing or in the place of another one, those that later
    records name are accepted too. A record of another history has none: what refers to it belongs to that history.
    If the version was voided before, and its record restored, the repair may refer to the void record.
    """
    readable = False
    try:
        readable = await log.record(version) is not None
    except OtherHistory:
        return set()
    except UNREADABLE:
        pass
    named = {check_of(data)} if len(data) >= SHORTEST_FRAME else set()
    for later in range(version + 1, first_link(version + 1) + ROOT_EVERY + 1):
        with contextlib.suppress(NotFound, Corrupt, UnsupportedFormat):
            other = await log.commits.get(later)
            unseal(other, b"R")
            link = link_of(other)
            if link.version == version and (not readable or version in decode(other, Record).voids):
                named.add(link.check)
    return named


async def _is_voided(log: LogReader, version: int) -> bool:
    with contextlib.suppress(*UNREADABLE):
        return (await log.record(version)).was_voided
    return False


async def _ids(log: LogReader, version: int) -> list[str]:
    """Return the ids in the record of a version, none if it can't be read."""
    with contextlib.suppress(*UNREADABLE):
        return sorted((await log.record(version)).ids)
    return []


async def _may_have_collected(log: LogReader, version: int) -> bool:
    """Return whether a version is a garbage collection, or may have been one before it was damaged or voided."""
    with contextlib.suppress(*UNREADABLE):
        record = await log.record(version)
        return record.collection is not None or record.was_voided
    return True


async def _gc_before(log: LogReader, version: int) -> int:
    """Return the newest garbage collection before a version, as named by the nearest readable record below it."""
    for before in range(version - 1, 0, -1):
        with contextlib.suppress(*UNREADABLE):
            return await named_collection(log, before)
    return 0


async def _delete_roots(storage: Storage, version: int, newest: int) -> None:
    """Delete the roots of a version and of all later ones, up to `newest` or the newest readable version."""
    first = -(-version // ROOT_EVERY) * ROOT_EVERY
    last = max(newest, await LogReader.strict(storage).newest())
    for numbers in batched(range(first, last + 1, ROOT_EVERY)):
        await together(storage.delete, [root_key(number) for number in numbers])


async def _commit_repair(
    log: Log, voided: Sequence[int], saved: Sequence[str], gc: int, condemned: Condemned
) -> tuple[int, int | None]:
    """Commit the record of the repair and return its version, and the version that it restated, if any.

    `gc` is the newest voided version that may have been a gc, 0 for none; `condemned` is what those had condemned.
    """
    restated = None
    while True:
        base = await log.reader.newest()
        record = Record(
            REPAIR + world.token(12),
            base,
            world.now(),
            f"repair: voided version{'' if len(voided) == 1 else 's'} {', '.join(map(str, voided))}"[:1000],
            metadata={VOIDED: list(voided), "saved": list(saved)},
        )
        plan = await RepairPlan.make(log.reader, base, voided, gc, condemned)
        with contextlib.suppress(Overtaken):
            if plan.lacks_newest:
                restated = await _restate(log, base, await plan.newest_complete(), voided)
            else:
                return await _append(log, record, voided, plan), restated


async def _append(log: Log, record: Record, voided: Sequence[int], plan: RepairPlan) -> int:
    if not plan.expired:
        record = msgspec.structs.replace(record, dropped=await _tags_of(log.reader, voided, record.base))

    async def validate(newer: Newer) -> Record:
        for version, other in newer:
            if not {*other.tags, *other.dropped, *other.tagged}.isdisjoint(record.dropped):
                raise Overtaken
            plan.add(version, other)
        return msgspec.structs.replace(record, collection=plan.collection()) if plan.expired else record

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
    tagged: dict[str, int] = {}
    async for _, record in log.each_record(range(voided[0] + 1, base + 1)):
        for tag in (*record.tags, *record.dropped):
            tagged.pop(tag, None)
        tagged |= record.tagged
    return tuple(tag for tag, version in tagged.items() if version in voided)
