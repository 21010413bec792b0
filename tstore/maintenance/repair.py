"""Repair: find versions whose records are damaged or name missing objects, and void them on request.

Records are never rewritten, with this one exception: an explicit act of an administrator with direct access to the
storage. A version N is voided in the following steps, which can be repeated after a failure at any of them.
1. Save the bytes of N's record as `damaged/<N>-<their checksum>`.
2. Delete the roots (saved trees) of version N and later ones: they may contain the changes of N.
3. Replace N's record by a void record, durably. Delete the roots that other processes wrote in the meantime.
4. Commit a record of the repair, so that the history shows it and open stores notice. It drops the tags that later
   commits set to N. If the newest garbage collection lists N as living, this commit is itself a collection that
   expires N: the objects that N wrote or needed become dependencies of the next living version, so that nothing
   that may be in use is deleted. If there is none, the newest state is that of a version before N, which may have
   expired. Unless it lacks data, that version is alive again and inherits what N needed, as later commits need it.
5. Delete the roots of N and later versions again: until that commit, open stores may have written stale roots.

The data of N is collected a week later, like that of any transaction that did not commit. If N was a garbage
collection, or its record is too damaged to tell, its list of expired versions is lost. Then the commit of step 4
expires the versions below N that lack an object, which N may have deleted. Other versions that N had expired are
alive again.
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import xxhash

from tstore.errors import AlreadyExists, Denied, InvalidArgument, NotFound
from tstore.format.layout import ROOT_EVERY, commit_key, is_transaction, owner_of, root_key
from tstore.format.objects.encoding import encode
from tstore.format.objects.object_ref import ObjectRef
from tstore.format.objects.records import REPAIR, VOIDED, Collection, Record
from tstore.format.plain_text import pluralize
from tstore.format.tree.retention import Condemned, Ledger, packs_of
from tstore.log.expiry import changes_nothing, ledger_at, named_collection
from tstore.log.group_commit import Newer
from tstore.log.log import Log
from tstore.log.reader import LogReader
from tstore.maintenance.damage import UNREADABLE, DamagedVersion, damaged_versions, incomplete_versions
from tstore.maintenance.gc import Overtaken
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
    collection had deleted their data.
    """

    damaged: list[DamagedVersion]
    voided: list[int]
    saved: list[str]
    version: int | None
    expired: list[int]

    def __repr__(self) -> str:
        voided = _shown(self.voided)
        return f"<tstore.RepairReport {pluralize(len(self.damaged), 'damaged version')}, voided=[{voided}]>"

    @property
    def ok(self) -> bool:
        """Whether no damaged version remains."""
        return all(damage.version in self.voided for damage in self.damaged)


async def repair_store(storage: Storage, void: Sequence[int], void_intact: Sequence[int]) -> RepairReport:
    """Find the damaged versions and void those requested, by the steps at the top of this file.

    `void` names versions with damaged or missing records, `void_intact` versions to void even if their records are
    intact. Raise `Denied` if the store is remote over HTTP, `InvalidArgument` if a version can't be voided.
    """
    storage = without_cache(storage)
    log = LogReader.strict(storage)
    damaged = await damaged_versions(log)
    wanted = sorted({*void, *void_intact})
    if not wanted:
        return RepairReport(damaged, [], [], None, [])
    # a damaged version may be above a gap in the log, where `newest` ends
    newest = max([await log.newest(), *(damage.version for damage in damaged)])
    await _check_voidable(log, wanted, newest, damaged, void_intact)
    # the newest voided version whose list of expired versions is lost
    gc = max([version for version in wanted if await _may_have_collected(log, version)], default=0)
    saved = [key for version in wanted if (key := await _void(storage, version, newest))]
    log = LogReader.strict(storage)  # a new reader, whose cache has none of the replaced records
    commit = await _commit_repair(Log(log), wanted, saved, gc)
    await _delete_roots(storage, wanted[0], commit)  # writers that missed the commit may have left stale roots
    collection = await log.collection(commit)
    expired = [] if collection is None else [version for version in collection.expired if version not in wanted]
    voided = [d for d in damaged if d.version in wanted]
    remaining = [d for d in await damaged_versions(LogReader.strict(storage)) if d.version not in wanted]
    return RepairReport(sorted([*voided, *remaining]), wanted, saved, commit, expired)


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


def _shown(versions: Sequence[int]) -> str:
    """Return versions as text, of many the first and their number."""
    shown = ", ".join(map(str, versions[:_MAX_SHOWN]))
    return shown if len(versions) <= _MAX_SHOWN else f"{shown}, … ({len(versions)} in all)"


async def _void(storage: Storage, version: int, newest: int) -> str:
    """Replace the record of a version by a void record; return the key of the saved record, "" for none."""
    log, key, saved_key = LogReader.strict(storage), commit_key(version), ""
    try:
        data = await storage.get(key)
    except NotFound:
        data = b""
    if not await _is_voided(log, version):
        if data:
            saved_key = f"damaged/{version:020d}-{xxhash.xxh3_128_hexdigest(data)}"
            with contextlib.suppress(AlreadyExists):  # an earlier repair was interrupted
                await storage.create(saved_key, data, Durability.FSYNC)
        await _delete_roots(storage, version, newest)
        void = Record(
            REPAIR + world.token(12),
            version - 1,
            world.now(),
            f"version {version} was voided" + (f"; its record was saved as {saved_key}" if saved_key else ""),
            void=True,
            durable=False,  # earlier versions may not be durable
            collected=await _gc_before(log, version),
        )
        await storage.replace(key, encode(void))
        await storage.sync()
    await _delete_roots(storage, version, newest)
    return saved_key


async def _is_voided(log: LogReader, version: int) -> bool:
    with contextlib.suppress(*UNREADABLE):
        return (await log.record(version)).was_voided
    return False


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


async def _commit_repair(log: Log, voided: Sequence[int], saved: Sequence[str], gc: int) -> int:
    """Commit the record of the repair; `gc` is the newest voided version that may have been a gc, 0 for none."""
    record = Record(
        REPAIR + world.token(12),
        await log.reader.newest(),
        world.now(),
        f"repair: voided version{'' if len(voided) == 1 else 's'} {', '.join(map(str, voided))}"[:1000],
        metadata={VOIDED: list(voided), "saved": list(saved)},
    )
    while True:
        with contextlib.suppress(Overtaken):
            return await _append(log, msgspec.structs.replace(record, base=await log.reader.newest()), voided, gc)


async def _append(log: Log, record: Record, voided: Sequence[int], gc: int) -> int:
    ledger, condemned = await _expire(log.reader, record.base, voided, gc)
    removed = {*voided, *(() if condemned is None else condemned.expired)}
    if condemned is None:
        record = msgspec.structs.replace(record, dropped=await _tags_of(log.reader, voided, record.base))

    async def validate(newer: Newer) -> Record:
        for version, other in newer:
            retagged = not {*other.tags, *other.dropped, *other.tagged}.isdisjoint(record.dropped)
            if other.collection is not None or retagged or not removed.isdisjoint(other.tagged.values()):
                raise Overtaken
            ledger.add(version, other)
        return record if condemned is None else _as_collection(record, ledger, condemned)

    return await log.append(await validate(()), validate, Durability.FSYNC)


def _as_collection(record: Record, ledger: Ledger, condemned: Collection) -> Record:
    """Return the record as that of a garbage collection that leaves the versions of a ledger alive."""
    living, needed = ledger.transactions, ledger.dependencies
    collection = msgspec.structs.replace(
        condemned,
        alive=tuple(ledger.alive[v] for v in sorted(ledger.alive)),
        transactions=tuple(t for t in condemned.transactions if t not in living),
        objects=tuple(k for k in condemned.objects if k not in needed),
    )
    return msgspec.structs.replace(record, collection=collection)


async def _tags_of(log: LogReader, voided: Sequence[int], base: int) -> tuple[str, ...]:
    """Return the tags that commits up to `base` set to voided versions, and that still name these versions."""
    tagged: dict[str, int] = {}
    async for _, record in log.each_record(range(voided[0] + 1, base + 1)):
        for tag in (*record.tags, *record.dropped):
            tagged.pop(tag, None)
        tagged |= record.tagged
    return tuple(tag for tag, version in tagged.items() if version in voided)


async def _expire(log: LogReader, base: int, voided: Sequence[int], gc: int) -> tuple[Ledger, Collection | None]:
    """Return the versions that stay alive, and what to condemn: an empty ledger and None if none expires.

    Voided versions expire. So do versions below `gc` that lack an object: `gc` may have expired these versions.
    """
    ledger, earlier = await ledger_at(log, base)
    older = sorted(v for v in ledger.alive.keys() - set(voided) if v < gc)
    incomplete = await incomplete_versions(log, older[:-1])  # a collection keeps the newest version
    expired = sorted({*ledger.alive.keys() & voided, *incomplete})
    if not expired:
        return Ledger(), None
    kept = sorted(ledger.alive.keys() - set(expired))
    entries = [ledger.alive[version] for version in expired]
    written = await together(lambda entry: _transaction_objects(log, entry.transaction), entries)
    released: dict[int, list[str]] = {}  # what expired versions wrote or needed, by the next living version
    orphaned: list[str] = []  # what expired versions above all living ones needed
    for entry, keys in zip(entries, written, strict=True):
        at = bisect.bisect(kept, entry.version)
        if at < len(kept):
            released.setdefault(kept[at], []).extend((*entry.dependencies, *keys))
        else:
            orphaned += entry.dependencies
    for version, objects in released.items():
        ledger.inherit(version, objects, standalone=ledger.alive[version].standalone)
    tags = {tag: v for v in expired for tag in ledger.alive[v].tags}
    ledger = ledger.without(expired)
    condemned = Collection((), (), {}, (), ()) if earlier is None else earlier
    await _revive_newest(log, base, ledger, Condemned.from_collection(condemned), orphaned)
    return ledger, Collection((), tuple(expired), tags, condemned.transactions, condemned.objects)


async def _revive_newest(
    log: LogReader, base: int, ledger: Ledger, condemned: Condemned, needed: Sequence[str]
) -> None:
    """Add the version whose state is that of `base` to the living ones, unless it lacks data.

    It depends on the objects `needed`, and on the packs to which its tree refers.
    """
    version = base
    while version and changes_nothing(record := await log.record(version)):
        version -= 1
    if version == 0 or version in ledger.alive:
        return
    try:
        await log.objects.manifests(version, record)
        packs = await run(packs_of, await log.tree(version))
    except UNREADABLE:
        return
    objects = {*packs, *(m.key for m in record.manifests if isinstance(m, ObjectRef))}
    if any(map(condemned.includes, objects)) or len(await log.storage.sizes(objects)) < len(objects):
        return
    ledger.add(version, msgspec.structs.replace(record, tags=(), dropped=(), tagged={}))
    entry = ledger.alive[version]
    others = [key for key in sorted({*needed, *packs}) if owner_of(key) != entry.transaction]
    ledger.inherit(version, others, standalone=entry.standalone)


async def _transaction_objects(log: LogReader, transaction: str) -> Sequence[str]:
    """Return the keys of a transaction's objects; an invalid id, as in a forged record, has none."""
    return await log.storage.list(f"txn/{transaction}/") if is_transaction(transaction) else []
