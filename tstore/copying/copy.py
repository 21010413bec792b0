"""Copying a store between any two backends: what was committed, unchanged, under the same names.

1. Fix a version: the newest of the source, or the one that was asked for. What is committed later is not copied.
2. Look at the destination. It is empty; or it has the beginning of such a copy, objects of this store's
   transactions and no marker; or it is this store, at a version of the same history. Anything else is refused.
3. Take the inventory of what the versions that live are made of: those that live in the newer one of the two.
4. Move the packs, then the manifests, that are not there. Each appears whole or not at all, once every checksum
   that covers it was found right on the way (`shipment`). An object whose size is not the source's is read; where
   it is damaged it is deleted, but not before its replacement has been read and checked.
5. Create the records strictly in order, each only if absent. One that is there already must have the same bytes;
   otherwise the destination has commits of its own, and the copy ends with nothing created behind it.
6. Create the roots, whose records are there by now. One that the destination refuses, as a server does that can't
   make the same of its own records, is left out: it only saves time.
7. Where there was no store, create the marker.
8. Write the `latest` hint.

What a death between any two of these objects leaves, until the copy is repeated and moves what is missing:

    4      objects that no record refers to; where a damaged one was just deleted, none in its place
    5      of a new copy: no marker, so no store. Of an older one: a store at an older version of this history. If
           that is committed to it has commits of its own, and no copy goes on with it
    6, 8   the whole copy; opening it takes more reads
    7      no store

A gc of the source has deleted the data of the versions that it expired, so it can't be copied. Where a copy goes
on from a version below such a gc, the newest version of the destination may be one without data until the record
of the gc is there: reading it fails with `NotFound`, and works again a moment later. A copy that dies in that
moment must be repeated before its destination is used; the versions from before can be read by their numbers.

If a gc deletes in the source what is still to be copied, the copy goes on with the newest version instead.

A copy is the same store as its source, with its uuid and version numbers, as after `cp -r`. Where both are written
to, they go apart, and copying from one to the other is refused; a destination that only went on has all that the
source has. A copy of one version alone (`at`) has the log up
to it and its data, and behind it the commit of a gc by which all other versions have expired. So it is a store of
its own: its uuid is made of the source's and the version.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from tstore.copying.destination import Destination
from tstore.copying.inventory import Inventory, living_as_of, of_all, of_one, place
from tstore.copying.source_records import SourceRecords
from tstore.copying.transfer import DamagedPack, Shipment, is_sound
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, UnsupportedFormat
from tstore.format.encoding import decode, encode
from tstore.format.layout import HINT, ROOT_EVERY, commit_key, owner_of, root_key
from tstore.format.records import Collection, Record, Root
from tstore.format.references import ObjectRef, reference
from tstore.format.tree import Tree
from tstore.log.expiry import last_collection, ledger_since, named_collection, unexpired
from tstore.log.marker import read_marker
from tstore.log.reader import LogReader
from tstore.runtime.concurrency import batched, together
from tstore.runtime.pool import run
from tstore.storage.base import Storage
from tstore.storage.cache.store import uncached
from tstore.storage.connect import connect
from tstore.storage.objects import Durability
from tstore.store import Store, opened

__all__ = ["CopyReport", "copy", "copy_to"]

At = int | str | datetime.datetime | None

_IN_MEMORY = 64 << 20


class CopyReport(NamedTuple):
    """What a copy did.

    `version` is the newest of the destination, `commits` how many were created there. `objects` and `bytes` count
    what was moved, `present` the packs and manifests that were there already.
    """

    version: int
    commits: int
    objects: int
    bytes: int
    present: int


async def copy(
    source: str | os.PathLike[str] | Store,
    destination: str | os.PathLike[str] | Store,
    at: At = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> CopyReport:
    """Copy a store, or with `at` one version of it, and return what was transferred.

    After a failure call it again: it transfers only what is missing. `progress(done, total)` is called with bytes
    of packs. `storage_options` are those of the destination; for a source that needs options pass an open `Store`.
    Raises `AlreadyExists` if the destination has other contents, `Conflict` if it is a copy of the source with
    commits that the source does not have, `Corrupt` if the source is damaged (damaged data is not copied),
    `NotFound` and `SnapshotExpired` if the source does not have the version, `Denied`.
    """
    async with opened(source, "r") as store:
        if isinstance(destination, Store):
            return await copy_to(store, uncached(destination.log.backend), at, progress)
        target = connect(destination, storage_options)
        try:
            return await copy_to(store, target, at, progress)
        finally:
            await target.close()


async def copy_to(
    store: Store, target: Storage, at: At = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> CopyReport:
    """The same as `copy`, to a backend."""
    if target.url == store.url:
        raise InvalidArgument(f"{store.url} can't be copied to itself; choose another destination")
    while True:
        source = Store(
            uncached(store.log.backend), store.uuid, "r"
        )  # which has read nothing of an earlier history
        log = source.log.reader
        marker = await read_marker(log.backend)
        if marker is None:
            raise NotFound(f"{store.url} has lost its marker; restore it from a copy")
        if at is not None:
            version = (await source.snapshot(at)).version
            destination = Destination(
                target, replace(marker, uuid=uuid.uuid5(marker.uuid, f"version {version} alone"))
            )
            return await unexpired(log, version, _copy_one(log, version, destination, progress))
        newest = await log.newest()
        try:
            return await _copy_all(log, newest, Destination(target, marker), progress)
        except (NotFound, Corrupt):
            if await named_collection(log, await log.newest()) == await named_collection(log, newest):
                raise  # else a gc deleted meanwhile what was looked for


async def _copy_all(
    log: LogReader, version: int, destination: Destination, progress: Callable[[int, int], None]
) -> CopyReport:
    records = await SourceRecords.up_to(log.backend, version)
    known = await destination.newest(records)
    ahead = known is not None and known > version
    alive = await (
        living_as_of(LogReader(destination.backend), known or 0) if ahead else living_as_of(log, version)
    )
    inventory = await records.explaining(of_all(log, version, alive))
    return await _Copy(log, records, destination, inventory, known, progress).make()


async def _copy_one(
    log: LogReader, version: int, destination: Destination, progress: Callable[[int, int], None]
) -> CopyReport:
    records = await SourceRecords.up_to(log.backend, version)
    inventory = await records.explaining(of_one(log, version))
    last = await _expiry_of_others(log, inventory, destination.uuid)
    records = records if last is None else records.followed_by(last)
    known = await destination.newest(records)
    if known is not None and known > records.newest:
        alive = await living_as_of(LogReader(destination.backend), known)
        if not all(v in alive for v in inventory.versions):
            inventory = Inventory(version, (), {}, {})
    return await _Copy(log, records, destination, inventory, known, progress).make()


async def _expiry_of_others(log: LogReader, inventory: Inventory, name: uuid.UUID) -> Record | None:
    """The record of a gc that leaves one version; None where no other lives."""
    base = inventory.base
    last = await last_collection(log, base)
    earlier = await log.collection(last) if last else None
    ledger = await ledger_since(log, last, () if earlier is None else earlier.alive, base)
    expired = tuple(sorted(set(ledger.alive) - set(inventory.versions)))
    if not expired:
        return None
    entry = ledger.alive[inventory.versions[0]]
    others = [k for k in (*inventory.manifests, *inventory.packs) if owner_of(k) != entry.transaction]
    return Record(
        f"copy-{name.hex}",
        base,
        (await log.record(base)).time,
        f"copied version {entry.version} alone; {len(expired)} others stayed behind",
        collected=last,
        collection=Collection(
            (replace(entry, replaces=True, holds=tuple(sorted(others))),),
            expired,
            {tag: v for v in expired for tag in ledger.alive[v].tags},
            (),
            (),
        ),
    )


class _Copy:
    """One copy of one inventory to a destination that is at the version `known`, None for no store."""

    def __init__(
        self,
        log: LogReader,
        records: SourceRecords,
        destination: Destination,
        inventory: Inventory,
        known: int | None,
        progress: Callable[[int, int], None],
    ) -> None:
        self._log = log
        self._source = log.backend
        self._records = records
        self._destination = destination
        self._target = destination.backend
        self._inventory = inventory
        self._known = known
        self._progress = progress
        self._present = self._commits = 0

    async def make(self) -> CopyReport:
        """Make the copy, by the steps at the top of this file."""
        begun = await self._begun() if self._known is None else None
        await self._records.explaining(self._move_packs(begun))
        await self._records.explaining(self._move_manifests(begun))
        if self._present and self._known is not None:
            await self._target.sync()  # another copy may have died before what it made there was durable
        await self._create_records()
        await self._create_roots()
        newest = max(self._records.newest, self._known or 0)
        if self._known is None:
            await self._destination.create_marker()
        if self._known is None or self._commits:
            await self._target.hint(HINT, str(newest).encode())
        return CopyReport(newest, self._commits, self._destination.objects, self._destination.bytes, self._present)

    async def _begun(self) -> set[str]:
        """The keys that an earlier copy has left in the destination, which is no store yet; `AlreadyExists`."""
        if await self._target.empty():
            return set()
        keys = set(await self._target.list(""))
        owners = {owner_of(key) for key in (*self._inventory.packs, *self._inventory.manifests)}
        for numbers in batched(range(1, self._inventory.base + 1)):
            for record in await together(self._log.record, numbers):
                owners.update((record.transaction, *record.transactions))
        own = {HINT, *(commit_key(v) for v in range(1, self._records.newest + 1))}
        own |= {root_key(v) for v in range(ROOT_EVERY, self._records.newest + 1, ROOT_EVERY)}
        foreign = sorted(k for k in keys if k not in own and not (k[:4] == "txn/" and k.split("/")[1] in owners))
        if foreign:
            raise AlreadyExists(
                f"{self._target.url} holds other things than the beginning of a copy of {self._source.url}, as "
                f"{foreign[0]}; choose an empty destination"
            )
        return keys

    async def _there(self, keys: Iterable[str], begun: set[str] | None) -> Mapping[str, int]:
        """The sizes of those objects that are at the destination."""
        return await self._destination.sizes([key for key in keys if begun is None or key in begun])

    async def _move_packs(self, begun: set[str] | None) -> None:
        packs = self._inventory.packs
        sizes: dict[str, int] = {}
        for key, size in zip(packs, await together(self._source.size, packs), strict=True):
            end = packs[key].end
            if size is None or size < end:
                lost = "is gone" if size is None else f"is cut short: it has {size} bytes, expected {end}"
                raise Corrupt(
                    f"{await self._place(key, end - 1)}: its pack {key} {lost}; restore the file from a copy"
                )
            sizes[key] = size
        there = await self._there(packs, begun)
        doubtful = [key for key, size in there.items() if size != sizes[key]]
        damaged = {k for k in doubtful if not await is_sound(self._target, k, there[k], packs[k])}
        missing = [key for key in packs if key not in there or key in damaged]
        self._present += len(packs) - len(missing)
        if damaged:
            await self._check_common_records()
        total = sum(sizes[key] for key in missing)
        shipment = Shipment(self._source, self._destination, damaged, total, self._progress)
        try:
            moved = await shipment.move([(key, sizes[key], packs[key]) for key in missing])
        except DamagedPack as error:
            raise Corrupt(
                f"{await self._place(error.key, error.offset)}: checksum mismatch in {error.key} at byte "
                f"{error.offset}; the bytes have changed since they were committed: restore the file from a copy"
            ) from error
        self._destination.objects += len(moved)
        self._destination.bytes += sum(sizes[key] for key in moved)

    async def _place(self, pack: str, offset: int) -> str:
        return f"{self._source.url}: {await place(self._log, self._inventory, pack, offset)}"

    async def _move_manifests(self, begun: set[str] | None) -> None:
        manifests = self._inventory.manifests
        there = await self._there(manifests, begun)
        missing = [key for key, ref in manifests.items() if there.get(key) != ref.length]
        self._present += len(manifests) - len(missing)
        if any(key in there for key in missing):
            await self._check_common_records()

        async def move(key: str) -> None:
            data = await self._source.get(key, manifests[key].length)
            if reference(key, data) != manifests[key]:
                raise Corrupt(
                    f"{self._source.url}: {key} is not the object that was committed: expected "
                    f"{manifests[key].length} bytes, found {len(data)}, or another checksum; restore it from "
                    "another copy"
                )
            if key in there:
                await self._destination.remove_damaged(key)
            await self._destination.create(key, data)

        for keys in _by_size(missing, manifests):
            await together(move, keys)

    async def _check_common_records(self) -> None:
        """Raise `Conflict` unless the destination has all records of the source, up to the newest that both have.

        What the source's records say of an object at the destination counts only where that has the same ones.
        """
        for versions in batched(range(1, min(self._known or 0, self._records.newest) + 1)):
            await self._destination.check_same(self._records, versions)

    async def _create_records(self) -> None:
        versions = range((self._known or 0) + 1, self._records.newest + 1)
        # nobody reads a new copy before its marker is there: all of it is made durable at once, before that
        durability = Durability.NONE if self._known is None else Durability.FSYNC
        async with contextlib.aclosing(self._records.in_order(versions)) as records:
            async for version, data in records:
                self._commits += await self._destination.create_record(self._records, version, data, durability)
        if self._known is None:
            await self._target.sync()
        elif self._commits < len(versions):
            await self._target.flush("commits", Durability.FSYNC)  # who created the others may have died before

    async def _create_roots(self) -> None:
        """Create the roots that the destination lacks; their loss costs nothing but time."""
        base, known = self._inventory.base, self._known or 0
        last = base - base % ROOT_EVERY
        first = known - known % ROOT_EVERY
        if self._records.newest > base:
            first = max(0, last - ROOT_EVERY)  # one version alone is read from the last one
        elif known > base:
            return  # its own gcs may have removed them
        else:
            while first > 0 and await self._lacks_root(first):
                first -= ROOT_EVERY
        for versions in batched(range(first + ROOT_EVERY, last + 1, ROOT_EVERY)):
            for version in versions:  # one at a time: each may be long
                if (data := await self._root(version)) is not None:
                    await self._records.check_unchanged()
                    with contextlib.suppress(InvalidArgument):  # a server takes none that it does not make itself
                        await self._destination.create(root_key(version), data)

    async def _lacks_root(self, version: int) -> bool:
        """Whether the destination, where an earlier copy may have died, lacks a root that the source has."""
        there, source = await together(lambda b: b.size(root_key(version)), [self._target, self._source])
        return there is None and source is not None

    async def _root(self, version: int) -> bytes | None:
        """The root of a version as this tstore makes it: an older one had its parts in another order."""
        try:
            root = decode(await self._source.get(root_key(version)), Root)
            return await run(lambda: encode(Tree.of(root).root(root.record)))
        except (NotFound, Corrupt, UnsupportedFormat):
            return None


def _by_size(keys: Iterable[str], manifests: Mapping[str, ObjectRef]) -> Iterator[list[str]]:
    """The keys in lists of manifests that may be in memory together; a long one is alone."""
    batch, size = list[str](), 0
    for key in keys:
        if batch and size + manifests[key].length > _IN_MEMORY:
            yield batch
            batch, size = [], 0
        batch.append(key)
        size += manifests[key].length
    if batch:
        yield batch
