"""Copying a store between any two backends: what was committed, unchanged, under the same names.

1. Fix a version: the newest of the source, or the one that was asked for. What is committed later is not copied.
2. Take the inventory of what the versions that live are made of.
3. Look at the destination. It is empty; or it has the begin of such a copy, objects of this store's transactions
   and no marker; or it is this store, at an older version perhaps. Anything else is refused.
4. Move the packs, then the manifests and roots, that are not there. Each appears whole or not at all, once every
   checksum that covers it was found right on the way (`shipment`).
5. Create the records. Where there was no store: all of them, and then the marker; until then nothing there can be
   opened. Where there was one: in order, so that it is a whole store at every moment. Records up to the newest gc
   become visible at once, since the data that this gc deleted was not copied: they are created with the lowest
   last, before which a reader does not find the others. Where a server refuses that (`tstore serve` leaves no
   number out), they come in order too, and for that moment the newest version may be one without its data.
6. Write the `latest` hint.

A copy that died is repeated, and moves what is missing. If a gc deletes in the source what is still to be copied,
the copy goes on with the newest version instead.

A copy is the same store as its source, with its uuid and version numbers, as after `cp -r`. Where both are written
to, they go apart, and copying from one to the other is refused. A copy of one version alone (`at`) has the log up
to it and its data, and behind it the commit of a gc by which all other versions have expired. So it is a store of
its own: its uuid is made of the source's and the version.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from tstore.commits.expiry import unexpired
from tstore.commits.log import Log
from tstore.commits.manifest import Collection, Record, Root, decode, encode, reference
from tstore.commits.records import HINT, ROOT_EVERY, commit_key, root_key
from tstore.commits.retention import Ledger
from tstore.copying.inventory import Inventory, of_all, of_one, place
from tstore.copying.shipment import DamagedPack, Shipment
from tstore.errors import AlreadyExists, Conflict, Corrupt, InvalidArgument, NotFound, UnsupportedFormat
from tstore.kv.base import Backend, Durability
from tstore.kv.cached import uncached
from tstore.kv.probe import prove
from tstore.kv.url import connect
from tstore.marker import MARKER, Marker, read_marker
from tstore.store import Store, opened
from tstore.turns import batched, together

__all__ = ["CopyReport", "copy", "copy_to"]

At = int | str | datetime.datetime | None


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
    """What was moved to make the destination a copy of the source, or, with `at`, of one version alone.

    Repeat it after any failure: only what is missing moves. `progress(done, total)` is told of the bytes of packs.
    `storage_options` are those of the destination; a source that needs some is passed as an opened store.
    Raises `AlreadyExists` where the destination holds something else, `Conflict` where it is this store with
    commits of its own, `Corrupt` where the source is damaged (nothing damaged is copied), `NotFound` and
    `SnapshotExpired` for a version that is not there, `Denied`.
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
    store: Store, target: Backend, at: At = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> CopyReport:
    """The same as `copy`, to a backend."""
    log = store.log
    if target.url == store.url:
        raise InvalidArgument(f"{store.url} can't be copied to itself; choose another destination")
    marker = await read_marker(log.backend)
    assert marker is not None
    if at is not None:
        version = (await store.snapshot(at)).version
        marker = replace(marker, uuid=uuid.uuid5(marker.uuid, f"version {version} alone"))
        return await unexpired(log, version, _copy_one(log, version, target, marker, progress))
    while True:
        newest = await log.newest()
        try:
            inventory = await of_all(log, newest)
            return await _Copy(log, target, inventory, marker, progress).make()
        except (NotFound, Corrupt):
            if await log.collected(await log.newest()) == await log.collected(newest):
                raise  # else a gc deleted meanwhile what was looked for


async def _copy_one(
    log: Log, version: int, target: Backend, marker: Marker, progress: Callable[[int, int], None]
) -> CopyReport:
    inventory = await of_one(log, version)
    alone = await _alone(log, inventory, marker.uuid.hex)
    return await _Copy(log, target, inventory, marker, progress, alone).make()


async def _alone(log: Log, inventory: Inventory, name: str) -> Record | None:
    """The record of a gc that leaves one version; None where no other lives."""
    base = inventory.base
    last = await log.collected(base)
    earlier = (await log.record(last)).collection if last else None
    ledger = Ledger(earlier.alive if earlier is not None else ())
    for version in range(last + 1, base + 1):
        ledger.add(version, await log.record(version))
    expired = tuple(sorted(set(ledger.alive) - set(inventory.versions)))
    if not expired:
        return None
    entry = ledger.alive[inventory.versions[0]]
    others = [k for k in (*inventory.manifests, *inventory.packs) if k.split("/")[1] != entry.transaction]
    return Record(
        f"copy-{name}",
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
    """One copy of one inventory; `alone` is a last record that the source does not have."""

    def __init__(
        self,
        log: Log,
        target: Backend,
        inventory: Inventory,
        marker: Marker,
        progress: Callable[[int, int], None],
        alone: Record | None = None,
    ) -> None:
        self._log = log
        self._source = uncached(log.backend)
        self._target = target
        self._inventory = inventory
        self._marker = marker
        self._progress = progress
        self._alone = alone
        self._newest = inventory.base + (alone is not None)
        self._objects = self._bytes = self._present = 0
        self._commits = 0
        self._there: set[int] = set()  # versions whose records are at the destination

    async def make(self) -> CopyReport:
        """Does it, by the steps at the top of this file."""
        known = await self._known()
        begun = None if known is not None else await self._begun()
        await self._move_packs(begun)
        await self._move_manifests(begun)
        await self._move_roots(known or 0)
        await self._create_records(known)
        if known is None:
            await self._create(MARKER, self._marker.encode())
        if self._commits or known is None:
            await self._target.hint(HINT, str(max(self._newest, known or 0)).encode())
        newest = max(self._newest, known or 0)
        return CopyReport(newest, self._commits, self._objects, self._bytes, self._present)

    async def _known(self) -> int | None:
        """The newest version that the destination has of this store, None where it is no store yet."""
        found = await read_marker(self._target)
        if not self._target.capabilities.conditional_create:  # known by the first answer
            await prove(self._target)
        if found is None:
            return None
        if found.uuid != self._marker.uuid:
            raise AlreadyExists(
                f"{self._target.url} is another store: its uuid is {found.uuid}, that of the copy would be "
                f"{self._marker.uuid}; choose an empty destination"
            )
        newest = await Log(self._target).newest()
        common = min(newest, self._newest)
        if common and await self._target.get(commit_key(common)) != await self._record(common):
            raise self._apart(common)
        return newest

    def _apart(self, version: int) -> Conflict:
        return Conflict(
            f"{self._target.url} has commits of its own: its version {version} is not that of {self._source.url}, "
            "though they were one store; copy to an empty destination",
            [],
        )

    async def _begun(self) -> set[str]:
        """The keys that an earlier copy has left in the destination, which is no store yet; `AlreadyExists`."""
        if await self._target.empty():
            return set()
        keys = set(await self._target.list(""))
        owners: set[str] = set()
        for numbers in batched(range(1, self._inventory.base + 1)):
            for record in await together(self._log.record, numbers):
                owners.update((record.transaction, *record.transactions))
        own = {HINT, *(commit_key(v) for v in range(1, self._newest + 1))}
        own |= {root_key(v) for v in range(ROOT_EVERY, self._newest + 1, ROOT_EVERY)}
        foreign = sorted(k for k in keys if k not in own and not (k[:4] == "txn/" and k.split("/")[1] in owners))
        if foreign:
            raise AlreadyExists(
                f"{self._target.url} holds other things than the begin of a copy of {self._source.url}, as "
                f"{foreign[0]}; choose an empty destination"
            )
        return keys

    async def _missing(self, sizes: dict[str, int], begun: set[str] | None) -> list[str]:
        """Which objects of these sizes are not in the destination; what has another size there is deleted."""
        asked = [key for key in sizes if begun is None or key in begun]
        found = dict(zip(asked, await together(self._target.size, asked), strict=True))
        for key in (k for k, size in found.items() if size not in (None, sizes[k])):
            await self._target.delete(key)  # cut short by another program, or by another protocol than this
            found[key] = None
        missing = [key for key in sizes if found.get(key) is None]
        self._present += len(sizes) - len(missing)
        return missing

    async def _move_packs(self, begun: set[str] | None) -> None:
        packs = self._inventory.packs
        found = await together(self._source.size, packs)
        sizes: dict[str, int] = {}
        for key, size in zip(packs, found, strict=True):
            end = packs[key].end
            if size is None or size < end:
                lost = "is gone" if size is None else f"is cut short: it has {size} bytes, expected {end}"
                raise Corrupt(
                    f"{await self._place(key, end - 1)}: its pack {key} {lost}; restore the file from a copy"
                )
            sizes[key] = size
        missing = await self._missing(sizes, begun)
        shipment = Shipment(self._source, self._target, sum(sizes[k] for k in missing), self._progress)
        try:
            moved = await shipment.move([(key, sizes[key], packs[key]) for key in missing])
        except DamagedPack as error:
            raise Corrupt(
                f"{await self._place(error.key, error.offset)}: checksum mismatch in {error.key} at byte "
                f"{error.offset}; the bytes have changed since they were committed: restore the file from a copy"
            ) from error
        self._objects += len(moved)
        self._bytes += sum(sizes[key] for key in moved)

    async def _place(self, pack: str, offset: int) -> str:
        return f"{self._source.url}: {await place(self._log, self._inventory, pack, offset)}"

    async def _move_manifests(self, begun: set[str] | None) -> None:
        manifests = self._inventory.manifests
        missing = await self._missing({key: ref.length for key, ref in manifests.items()}, begun)

        async def move(key: str) -> None:
            data = await self._source.get(key)
            if reference(key, data) != manifests[key]:
                raise Corrupt(
                    f"{self._source.url}: {key} is not the object that was committed: expected "
                    f"{manifests[key].length} bytes, found {len(data)}, or another checksum; restore it from "
                    "another copy"
                )
            await self._create(key, data)

        await together(move, missing)

    async def _move_roots(self, known: int) -> None:
        """Copies the roots above a version, or the one that the version alone is read from."""
        base = self._inventory.base
        last = base - base % ROOT_EVERY
        first = last if self._alone is not None else known - known % ROOT_EVERY + ROOT_EVERY

        async def move(version: int) -> None:
            try:
                data = await self._source.get(root_key(version))
                decode(data, Root)
            except (NotFound, Corrupt, UnsupportedFormat):
                return  # its loss costs nothing but time
            await self._create(root_key(version), data)

        await together(move, range(max(first, ROOT_EVERY), last + 1, ROOT_EVERY))

    async def _record(self, version: int) -> bytes:
        """The bytes of a record, checked."""
        if version > self._inventory.base and self._alone is not None:
            return encode(self._alone)
        try:
            data = await self._source.get(commit_key(version))
            decode(data, Record)
        except (Corrupt, NotFound) as error:
            raise Corrupt(
                f"{self._source.url}: {commit_key(version)} can't be copied: {error}; restore it from a copy"
            ) from error
        return data

    async def _create_records(self, known: int | None) -> None:
        versions = range((known or 0) + 1, self._newest + 1)
        hidden = versions  # until the marker is there, or the first of them
        if known is not None and versions:
            await self._target.hint(HINT, str(known).encode())  # from there readers look for what comes next
            gc = self._newest if self._alone is not None else await self._log.collected(self._newest)
            hidden = versions[: max(0, gc - known)]
        with contextlib.suppress(InvalidArgument):  # a server takes no record before the one below it is there
            await together(self._create_record, hidden[1:])
        for version in versions:
            if version not in self._there:
                await self._create_record(version)

    async def _create_record(self, version: int) -> None:
        data = await self._record(version)
        if await self._create(commit_key(version), data):
            self._commits += 1
        elif await self._target.get(commit_key(version)) != data:
            raise self._apart(version)
        self._there.add(version)

    async def _create(self, key: str, data: bytes) -> bool:
        """Whether the object was made here and now."""
        try:
            await self._target.create(key, data, Durability.FSYNC)
        except AlreadyExists:
            return False
        self._objects += 1
        self._bytes += len(data)
        return True
