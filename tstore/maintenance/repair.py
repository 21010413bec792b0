"""Repair: which versions have records that can't be read or name what is not there, and how such a one is voided.

A record is never rewritten; this is the one exception, an explicit act of an administrator at the storage itself.
Voiding version N, which may be repeated from any step on
1. Keep the bytes of its record as `damaged/<N>-<their checksum>`.
2. Delete the roots from N on, which may hold what it did.
3. Put a void record in its place, and make that durable. Delete the roots that others wrote meanwhile.
4. Commit what was done, so that the history tells it and open stores notice. Where the newest garbage collection
   lists N among the versions that live, this is the commit of a collection after which it does not; the version
   behind it holds from then on what it held and wrote, so that nothing which may be in use is ever removed.
5. Delete the roots from N on once more: until that commit, open stores may have made some of what they knew.

What the voided version had written is collected a week later, as the data of any transaction that did not commit.
Of a voided garbage collection nothing is known any more: what it had removed is missing, and `verify` lists it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from tstore.errors import AlreadyExists, Corrupt, Denied, InvalidArgument, NotFound, UnsupportedFormat
from tstore.format.encoding import encode
from tstore.format.layout import ROOT_EVERY, commit_key, is_record, is_transaction, root_key
from tstore.format.records import REPAIR, VOIDED, Collection, Record
from tstore.format.retention import Ledger
from tstore.log.expiry import (
    changes_nothing,
    existing_collection,
    last_collection,
    ledger_since,
    living_versions,
    named_collection,
)
from tstore.log.group_commit import Newer
from tstore.log.log import Log
from tstore.log.reader import LogReader
from tstore.runtime import world
from tstore.runtime.concurrency import batched, together
from tstore.storage.base import Storage
from tstore.storage.cache.store import uncached
from tstore.storage.objects import Durability

__all__ = ["DamagedVersion", "RepairReport", "repair_store"]

_UNREADABLE = (Corrupt, NotFound)
_MOST_MISSING = 1000


class DamagedVersion(NamedTuple):
    """A version whose record can't be read, or names what is not there (`readable`), and why."""

    version: int
    reason: str
    readable: bool


class RepairReport(NamedTuple):
    """The damaged versions that were found, and what was done about those that were to be voided.

    `kept` are the names of the objects that hold the bytes of the records that were replaced. `version` is the
    commit that tells of it, None where nothing was done.
    """

    damaged: list[DamagedVersion]
    voided: list[int]
    kept: list[str]
    version: int | None

    def __repr__(self) -> str:
        return f"<tstore.RepairReport {len(self.damaged)} damaged versions, voided={self.voided}>"

    @property
    def ok(self) -> bool:
        """Whether no damaged version is left."""
        return all(found.version in self.voided for found in self.damaged)


async def repair_store(backend: Storage, void: Sequence[int], void_readable: Sequence[int]) -> RepairReport:
    """Find the damaged versions and void those that are named, by the steps at the top of this file."""
    backend = uncached(backend)
    log = LogReader.strict(backend)
    damaged = await _damaged(log)
    wanted = sorted({*void, *void_readable})
    if not wanted:
        return RepairReport(damaged, [], [], None)
    if backend.url.startswith(("http://", "https://")):
        raise Denied(
            f"{backend.url}: a server never replaces a record; run the repair where the store lies, as `tstore "
            "repair FOLDER` on the host of `tstore serve`"
        )
    at = await log.newest()  # below the first that is missing
    newest = max([at, *(found.version for found in damaged)])
    for version in wanted:
        await _check_voidable(log, version, newest, damaged, void_readable)
    if left := [found.version for found in damaged if found.version > at and found.version not in wanted]:
        raise InvalidArgument(
            f"{backend.url}: {commit_key(left[0])} is missing, though later commits are there, so nothing can be "
            f"committed and nothing was voided; restore it from a copy, or void {', '.join(map(str, left))} too"
        )
    kept = [key for version in wanted for key in await _void(backend, version, newest)]
    told = await _tell(Log(LogReader.strict(backend)), wanted, kept)
    await _delete_roots(backend, wanted[0], told)  # writers that had not noticed may have made some until then
    return RepairReport(damaged, wanted, kept, told)


async def _damaged(log: LogReader) -> list[DamagedVersion]:
    """The damaged versions, the oldest first; behind a missing one only further missing ones are looked for."""
    newest = await log.newest()
    try:
        alive, gc = await living_versions(log, newest)
    except _UNREADABLE:
        alive, gc = frozenset(), 0

    async def look(version: int) -> DamagedVersion | None:
        readable = False
        try:
            record = await log.record(version)
            readable = True
            await existing_collection(log, record.collected)
            if not changes_nothing(record) and (version > gc or version in alive):
                await _check_objects(log, version, record)
        except UnsupportedFormat as error:  # not damaged: a newer tstore reads it
            return DamagedVersion(version, str(error), True)
        except _UNREADABLE as error:
            return DamagedVersion(version, str(error).removesuffix(f"; {log.objects.advice}"), readable)
        return None

    found = [one for numbers in batched(range(1, newest + 1)) for one in await together(look, numbers) if one]
    return [*found, *await _missing(log, newest)]


async def _missing(log: LogReader, newest: int) -> list[DamagedVersion]:
    """The versions behind the newest whose records are missing, though later ones are there; the first of many."""
    if log.backend.capabilities.listing:
        there = {int(k.rpartition("/")[2]) for k in await log.backend.list("commits/") if is_record(k)}
    else:
        there = {newest + 2} if await log.backend.size(commit_key(newest + 2)) is not None else set()
    absent = (v for v in range(newest + 1, max(there, default=0)) if v not in there)
    reason = f"{log.backend.url}: {{}} is missing, though later commits are there"
    return [
        DamagedVersion(v, reason.format(commit_key(v)), False) for v in itertools.islice(absent, _MOST_MISSING)
    ]


async def _check_objects(log: LogReader, version: int, record: Record) -> None:
    """Raise `Corrupt` or `NotFound` where manifests are damaged or gone, or packs shorter than these say."""
    ends: dict[str, int] = {}
    for table in [manifest.table for manifest in await log.objects.manifests(version, record)]:
        stops = np.zeros(len(table.packs), np.uint64)
        np.maximum.at(stops, table.pack, table.offset + table.length)
        for key, stop in zip(table.packs, stops.tolist(), strict=True):
            if isinstance(key, str):
                ends[key] = max(ends.get(key, 0), stop)
    sizes = await together(log.backend.size, list(ends))
    for (key, end), size in zip(ends.items(), sizes, strict=True):
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size} bytes"
            raise NotFound(f"{log.backend.url}: {key} {found}; expected at least {end} bytes")


async def _check_voidable(
    log: LogReader, version: int, newest: int, damaged: Sequence[DamagedVersion], void_readable: Sequence[int]
) -> None:
    if not 1 <= version <= newest:
        raise InvalidArgument(f"{log.backend.url} has no version {version} to void; its newest is {newest}")
    unreadable = any(found.version == version and not found.readable for found in damaged)
    if unreadable or version in void_readable or await _is_voided(log, version):
        return  # the last: an earlier repair did not get to its end
    raise InvalidArgument(
        f"{log.backend.url}: the record of version {version} reads well, so it was not voided and nothing was "
        f"changed; if it shall go all the same, say --void-readable {version} (void_readable=({version},))"
    )


async def _void(backend: Storage, version: int, newest: int) -> list[str]:
    """Put a void record in the place of a version's, and return the names under which its bytes are kept."""
    log, key, kept = LogReader.strict(backend), commit_key(version), []
    try:
        data = await backend.get(key)
    except NotFound:
        data = b""
    if not await _is_voided(log, version):
        if data:
            kept = [f"damaged/{version:020d}-{xxhash.xxh3_128_hexdigest(data)}"]
            try:
                await backend.create(kept[0], data, Durability.FSYNC)
            except AlreadyExists:  # by a repair that ended early
                await backend.flush("damaged", Durability.FSYNC)
        await _delete_roots(backend, version, newest)
        void = Record(
            REPAIR + world.token(12),
            version - 1,
            world.now(),
            f"version {version} was voided" + (f"; its record is kept as {kept[0]}" if kept else ""),
            void=True,
            durable=False,  # those before it may not be
            collected=await _gc_before(log, version),
        )
        await backend.hint(key, encode(void))
        await backend.sync()
    await _delete_roots(backend, version, newest)
    return kept


async def _is_voided(log: LogReader, version: int) -> bool:
    try:
        record = await log.record(version)
    except (*_UNREADABLE, UnsupportedFormat):
        return False
    return record.is_repair


async def _gc_before(log: LogReader, version: int) -> int:
    """The newest gc before a version, as the nearest record below it that can be read tells."""
    for before in range(version - 1, 0, -1):
        try:
            return await named_collection(log, before)
        except (*_UNREADABLE, UnsupportedFormat):
            continue
    return 0


async def _delete_roots(backend: Storage, version: int, newest: int) -> None:
    first = -(-version // ROOT_EVERY) * ROOT_EVERY
    last = max(newest, await LogReader.strict(backend).newest())
    for numbers in batched(range(first, last + 1, ROOT_EVERY)):
        await together(backend.delete, [root_key(number) for number in numbers])


class _Overtaken(Exception):
    """A gc was committed since the ledger was read."""


async def _tell(log: Log, voided: Sequence[int], kept: Sequence[str]) -> int:
    """Commit what was done, and return the version of that."""
    plain = Record(
        REPAIR + world.token(12),
        await log.reader.newest(),
        world.now(),
        f"repair: voided version{'' if len(voided) == 1 else 's'} {', '.join(map(str, voided))}"[:1000],
        metadata={VOIDED: list(voided), "kept": list(kept)},
    )
    while True:
        with contextlib.suppress(_Overtaken):
            return await _append(log, msgspec.structs.replace(plain, base=await log.reader.newest()), voided)


async def _append(log: Log, plain: Record, voided: Sequence[int]) -> int:
    ledger, gone = await _ledger(log.reader, plain.base, voided)

    async def validate(newer: Newer) -> Record:
        for version, other in newer:
            if other.collection is not None:
                raise _Overtaken
            ledger.add(version, other)
        return plain if gone is None else _with(plain, ledger, gone)

    return await log.append(await validate(()), validate, Durability.FSYNC)


def _with(record: Record, ledger: Ledger, gone: Collection) -> Record:
    """The record as that of a gc after which the versions of a ledger live."""
    alive = tuple(ledger.alive[v] for v in sorted(ledger.alive))
    living_ones = ledger.transactions
    return Record(
        record.transaction,
        record.base,
        record.time,
        record.message,
        metadata=record.metadata,
        collection=Collection(
            alive,
            gone.expired,
            gone.tags,
            tuple(t for t in gone.transactions if t not in living_ones),
            tuple(k for k in gone.objects if k not in ledger.held),
        ),
    )


async def _ledger(log: LogReader, base: int, voided: Sequence[int]) -> tuple[Ledger, Collection | None]:
    """The versions that live, and what a gc is to tell of those voided; None where the last one lists none."""
    last = await last_collection(log, base)
    earlier = await log.collection(last) if last else None
    listed = [] if earlier is None else [v for v in voided if v in earlier.versions]
    if earlier is None or not listed:
        return Ledger(), None
    ledger = await ledger_since(log, last, earlier.alive, base)
    for version in listed:
        entry = ledger.alive[version]
        heir = min((v for v in ledger.alive if v > version and v not in listed), default=None)
        if heir is not None:
            written = is_transaction(entry.transaction) and await log.backend.list(f"txn/{entry.transaction}/")
            ledger.inherit(heir, [*entry.holds, *(written or ())], replaces=ledger.alive[heir].replaces)
    tags = {tag: v for v in listed for tag in ledger.alive[v].tags}
    gone = Collection((), tuple(listed), tags, earlier.transactions, earlier.objects)
    return ledger.without(listed), gone
