"""Copying a store from one URL to another: the committed objects, unchanged, under the same names.

1. Fix a version: the newest of the source, or the one requested. Later commits are not copied. If a record of the
   source is missing although later ones exist, only a requested version can be copied.
2. Check the destination. It must be empty, or contain an interrupted copy of this store (objects of its
   transactions, and no marker), or be this store, at any version of the same history. Anything else is refused.
3. List the objects of all versions that are living (not expired) in the newer of the two stores (`inventory`).
4. Copy the manifests, then the packs, that the destination lacks. Each appears whole or not at all, after every
   checksum that covers it has been verified (`transfer`). An existing object whose size differs from the source's
   is read; if it is damaged, it is replaced atomically. (A server needs its manifests to check such a pack.)
5. Create the records strictly in order, each only if it is absent, and only after its bytes are durable. A record
   may already exist: a concurrent copy may have created it, or, once that copy has completed, a commit to the
   destination. An existing record must have the same bytes; otherwise the two stores have diverged, and the copy
   ends without creating any later record. Records that the destination has lost are created first; a damaged
   record is an error.
6. Create the roots, whose records exist by now. A server refuses a root that it can't derive from its own records;
   the root is then omitted, since it only saves time. One with the changes of a lost record is needed
   (`Record.resumes`): the server accepts it with the scope admin; without that, the copy is `Denied`.
7. If the destination was not a store, create the marker.
8. Write the `latest` hint.
9. Archive the records of old versions (`archiving`), which were created one by one.

The state of the destination after a copy was killed in one of these steps, until the copy is repeated:

    step   state
    4      objects that no record refers to
    5      if new: no marker, so no store. Otherwise: a store at an older version of this history. A commit to it
           makes the two stores diverge, so that no copy can continue
    6      if new: no marker, so no store. Otherwise: the whole copy; opening it takes more reads
    7      no marker, so no store
    8      the whole copy; opening it takes more reads
    9      the whole copy

For a version that the source has expired, the record is copied, but not the data. After a copy has created such a
record, reading that version, or a newer one that needs its data, fails at the destination with `NotFound`, or with
`Corrupt` where the manifest is in the record, until the copy has also created the record of the garbage collection
that expired the version. If a copy is killed in between, repeat it before the destination is used.

If a garbage collection of the source deletes objects still to be copied, the copy starts again from the newest
version; a copy of one version fails if that version has expired.

A copy is the same store as its source, with the same uuid and version numbers, as after `cp -r`. If both are
written to, they diverge, and copying from one to the other is refused; if only the destination is written to, it
has everything that the source has. A copy of one version (`at`) has the log up to that version, the
version's data, and one more commit: a garbage collection that expires all other versions. It is a separate store,
whose uuid is derived from the source's uuid and the version. A quantized version is the head of its new store:
there its record is that of a commit of a whole tree, not of a copy.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from tstore.core.copying.destination import Destination
from tstore.core.copying.inventory import (
    Inventory,
    chunk_label,
    expiry_of_other_versions,
    living_as_of,
    take_inventory,
    take_version_inventory,
)
from tstore.core.copying.source_records import SourceRecords
from tstore.core.copying.transfer import DamagedPack, PackTransfer, is_intact
from tstore.core.format.layout import HINT, MARKER, ROOT_EVERY, commit_key, owner_of, root_chain, root_key
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.roots import decode_root
from tstore.core.log.expiry import guard_expiry, named_collection
from tstore.core.log.marker import read_marker
from tstore.core.log.reader import LogReader
from tstore.core.maintenance.archiving import archive_records
from tstore.core.maintenance.damage import checked_newest, listed_records
from tstore.core.runtime.concurrency import batched, together
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.core.storage.cache import without_cache
from tstore.core.storage.connect import connect
from tstore.core.storage.objects import Durability
from tstore.core.store import Store, opened
from tstore.errors import AlreadyExists, Corrupt, Denied, InvalidArgument, NotAStore, NotFound, UnsupportedFormat

__all__ = ["CopyReport", "copy", "copy_to"]

At = int | str | datetime.datetime | None

_BATCH_BYTES = 64 << 20


class CopyReport(NamedTuple):
    """The result of a copy.

    `version` is the newest version of the destination. `commits`, `objects` and `bytes` count what the copy
    created there, and `present` counts the packs and manifests that were there already.
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

    After a failure call it again: it transfers only what is missing. `progress(done, total)` is called with the
    bytes of packs copied so far and the total. `storage_options` configure the destination; for a source that
    needs options pass an open `Store`. Raise `AlreadyExists` if the destination has other contents, `Conflict` if
    it is a copy of the source that has diverged from it, `Corrupt` if the source is damaged (damaged data are not
    copied), `NotFound` or `SnapshotExpired` if the source does not have the version, or `Denied` if a storage
    refuses access.
    """
    async with opened(source, "r") as store:
        if isinstance(destination, Store):
            return await copy_to(store, without_cache(destination.log.storage), at, progress)
        target = connect(destination, storage_options)
        try:
            return await copy_to(store, target, at, progress)
        finally:
            await target.close()


async def copy_to(
    store: Store, target: Storage, at: At = None, progress: Callable[[int, int], None] = lambda done, total: None
) -> CopyReport:
    """Copy an open store to a destination, as `copy` does."""
    if target.url == store.url:
        raise InvalidArgument(f"{store.url} can't be copied to itself; choose another destination")
    if target.url.startswith(f"{store.url}/"):
        raise InvalidArgument(f"{target.url} is inside the store to copy, {store.url}; choose another destination")
    while True:
        # a fresh Store: `store` may have cached records of an earlier history
        source = Store(without_cache(store.log.storage), store.marker, "r")
        log = source.log.reader
        marker = await read_marker(log.storage)
        if marker is None and store.marker is None:
            raise NotAStore(
                f"{store.url} does not exist yet, so it can't be copied; its first transaction creates it"
            )
        if marker is None:
            raise NotFound(f"{store.url} has lost its marker; restore it from a copy")
        if at is not None:
            version = (await source.snapshot(at)).version
            alone = uuid.uuid5(marker.uuid, f"version {version} alone")
            origin = marker.origin or marker.uuid
            destination = Destination(target, replace(marker, uuid=alone, origin=origin))
            return await guard_expiry(log, version, _copy_one(log, version, destination, progress))
        newest, _ = await checked_newest(log)
        try:
            return await _copy_all(log, newest, Destination(target, marker), progress)
        except (NotFound, Corrupt):
            if await named_collection(log, await log.newest()) == await named_collection(log, newest):
                raise  # otherwise a concurrent garbage collection deleted the missing object


async def _copy_all(
    log: LogReader, version: int, destination: Destination, progress: Callable[[int, int], None]
) -> CopyReport:
    records = await SourceRecords.up_to(log.storage, destination.log_id, version)
    target_version = await destination.newest(records)
    ahead = target_version is not None and target_version > version
    living = await (
        living_as_of(destination.reader(), target_version or 0) if ahead else living_as_of(log, version)
    )
    inventory = await records.guard(take_inventory(log, version, living))
    return await _Copy(log, records, destination, inventory, target_version, progress).run()


async def _copy_one(
    log: LogReader, version: int, destination: Destination, progress: Callable[[int, int], None]
) -> CopyReport:
    records = await SourceRecords.up_to(log.storage, destination.log_id, version)
    inventory = await records.guard(take_version_inventory(log, version))
    expiry = await expiry_of_other_versions(log, inventory, destination.uuid)
    records = records if expiry is None else records.with_override(version + 1, expiry)
    if version and (record := await log.record(version)).source:
        records = records.with_override(version, replace(record, source=0, replaces=True))
    target_version = await destination.newest(records)
    if target_version is not None and target_version > records.newest:
        living = await living_as_of(destination.reader(), target_version)
        if not all(v in living for v in inventory.versions):
            inventory = Inventory(version, (), {}, {}, set())  # the destination expired it: nothing to copy
    return await _Copy(log, records, destination, inventory, target_version, progress).run()


class _Copy:
    """One copy of an inventory to a destination.

    `target_version` is the newest version of the destination, None if it is not a store yet.
    """

    def __init__(
        self,
        log: LogReader,
        records: SourceRecords,
        destination: Destination,
        inventory: Inventory,
        target_version: int | None,
        progress: Callable[[int, int], None],
    ) -> None:
        self._log = log
        self._source = log.storage
        self._records = records
        self._destination = destination
        self._target = destination.storage
        self._inventory = inventory
        self._target_version = target_version
        self._progress = progress
        self._present = self._commits = 0

    async def run(self) -> CopyReport:
        """Run steps 4 to 9 at the top of this file."""
        partial_keys = await self._keys_of_partial_copy() if self._target_version is None else None
        await self._records.guard(self._copy_manifests(partial_keys))
        await self._records.guard(self._copy_packs(partial_keys))
        if self._present:
            await self._target.sync()  # an interrupted copy may have left objects that are not durable
        await self._create_records()
        await self._create_roots()
        newest = max(self._records.newest, self._target_version or 0)
        if self._target_version is None:
            await self._destination.create_marker()
        if self._target_version is None or self._commits:
            await self._target.replace(HINT, str(newest).encode())
        with contextlib.suppress(Denied):  # a server requires the scope admin
            log = self._destination.reader()
            await archive_records(log, newest, await listed_records(log))
        return CopyReport(newest, self._commits, self._destination.objects, self._destination.bytes, self._present)

    async def _keys_of_partial_copy(self) -> set[str] | None:
        """Return the keys that an interrupted copy left; raise `AlreadyExists` if there are any others.

        Return None, and set the destination's version, if a concurrent copy has just made it a store.
        """
        if await self._target.empty():
            return set()
        keys = set(await self._target.list(""))
        if MARKER in keys:
            self._target_version = await self._destination.newest(self._records)
            return None
        owners = {owner_of(key) for key in (*self._inventory.packs, *self._inventory.manifests)}
        async for _, record in self._log.each_record(range(1, self._inventory.base + 1)):
            owners.update((record.transaction, *record.transactions))
        expected = {HINT, *(commit_key(v) for v in range(1, self._records.newest + 1))}
        expected |= {root_key(v) for v in range(ROOT_EVERY, self._records.newest + 1, ROOT_EVERY)}
        foreign = sorted(
            k for k in keys if k not in expected and not (k[:4] == "txn/" and k.split("/")[1] in owners)
        )
        if foreign:
            raise AlreadyExists(
                f"{self._target.url} is neither empty nor an interrupted copy of {self._source.url}: it has "
                f"{foreign[0]}; choose an empty destination"
            )
        return keys

    async def _sizes(self, keys: Iterable[str], partial_keys: set[str] | None) -> Mapping[str, int]:
        """Return the sizes of the keys that the destination has; a partial copy has only `partial_keys`."""
        return await self._target.sizes(key for key in keys if partial_keys is None or key in partial_keys)

    async def _copy_packs(self, partial_keys: set[str] | None) -> None:
        """Copy the packs missing or damaged at the destination; raise `Corrupt` for damage in the source."""
        packs = self._inventory.packs
        sizes = await self._source.sizes(packs)
        for key, blocks in packs.items():
            end = blocks.end
            if sizes.get(key, -1) < end:
                actual = f"is truncated to {sizes[key]} bytes, expected {end}" if key in sizes else "is missing"
                raise Corrupt(
                    f"{await self._label(key, end - 1)}: its pack {key} {actual}; restore the file from a copy"
                )
        target_sizes = await self._sizes(packs, partial_keys)
        suspect = [key for key, size in target_sizes.items() if size != sizes[key]]
        damaged = {k for k in suspect if not await is_intact(self._target, k, target_sizes[k], packs[k])}
        missing = [key for key in packs if key not in target_sizes or key in damaged]
        self._present += len(packs) - len(missing)
        if damaged:
            await self._check_common_records()
        total = sum(sizes[key] for key in missing)
        transfer = PackTransfer(self._source, self._destination, damaged, total, self._progress)
        try:
            created = await transfer.run([(key, sizes[key], packs[key]) for key in missing])
        except DamagedPack as error:
            raise Corrupt(
                f"{await self._label(error.key, error.offset)}: checksum mismatch in {error.key} at byte "
                f"{error.offset}; the bytes have changed since they were committed: restore the file from a copy"
            ) from error
        self._destination.objects += len(created)
        self._destination.bytes += sum(sizes[key] for key in created)

    async def _label(self, pack: str, offset: int) -> str:
        """Return the version, array and chunk to which the bytes at an offset of a source pack belong."""
        return f"{self._source.url}: {await chunk_label(self._log, self._inventory, pack, offset)}"

    async def _copy_manifests(self, partial_keys: set[str] | None) -> None:
        """Copy the manifests missing or damaged at the destination; raise `Corrupt` for damage in the source."""
        manifests = self._inventory.manifests
        target_sizes = await self._sizes(manifests, partial_keys)
        missing = [key for key, ref in manifests.items() if target_sizes.get(key) != ref.length]
        self._present += len(manifests) - len(missing)
        if any(key in target_sizes for key in missing):
            await self._check_common_records()

        async def copy_manifest(key: str) -> None:
            data = await self._source.get(key, manifests[key].length)
            if not manifests[key].matches(data):
                raise Corrupt(
                    f"{self._source.url}: {key} ({len(data)} bytes) differs in length or checksum from the "
                    f"manifest that was committed ({manifests[key].length} bytes); restore it from another copy"
                )
            if key in target_sizes:
                await self._destination.replace_damaged(key, data)
            else:
                await self._destination.create(key, data)

        for keys in _batch_by_size(missing, manifests):
            await together(copy_manifest, keys)

    async def _check_common_records(self) -> None:
        """Raise `Conflict` unless both stores have the same records, up to the newest version that both have.

        Only then do the checksums in the source's records apply to objects at the destination.
        """
        for versions in batched(range(1, min(self._target_version or 0, self._records.newest) + 1)):
            await self._destination.check_same_records(self._records, versions)

    async def _create_records(self) -> None:
        newest = self._target_version or 0
        lost = await self._destination.lost_records(self._records, newest) if newest else []
        versions = [*lost, *range(newest + 1, self._records.newest + 1)]
        async with contextlib.aclosing(self._records.in_order(versions)) as batches:
            async for batch in batches:
                self._commits += await self._destination.create_records(self._records, batch)
        if self._records.newest:
            await self._target.flush("commits", Durability.FSYNC)  # including the records of a killed copy

    async def _create_roots(self) -> None:
        """Create the newest roots that the destination lacks; roots only save time."""
        base, target_version = self._inventory.base, self._target_version or 0
        last = base - base % ROOT_EVERY
        first = target_version - target_version % ROOT_EVERY
        versions: Sequence[int]
        if self._records.newest > base:
            # a single version needs no root of another record
            versions = [number for number in root_chain(last) if number not in self._records.overrides]
        elif target_version > base:
            return  # the destination's own garbage collections may have deleted roots
        else:
            while first > 0 and await self._lacks_root(first):
                first -= ROOT_EVERY
            versions = range(first + ROOT_EVERY, last + 1, ROOT_EVERY)
        for version in versions:  # one at a time: each may be large
            if (data := await self._root(version)) is not None:
                await self._records.check_unchanged()
                await self._destination.create_root(version, data)

    async def _lacks_root(self, version: int) -> bool:
        """Return whether the destination lacks a root that the source has, for example after a killed copy."""
        storages = [self._target, self._source]
        target, source = await together(lambda storage: storage.size(root_key(version)), storages)
        return target is None and source is not None

    async def _root(self, version: int) -> bytes | None:
        """Return the source's root of a version, or None if it can't be used."""
        try:
            data = await self._source.get(root_key(version))
            root, stored = await run(decode_root, data), await self._log.stored(version)
        except (NotFound, Corrupt, UnsupportedFormat):
            return None
        return data if root.version == version and stored.has_root(root) else None


def _batch_by_size(keys: Iterable[str], manifests: Mapping[str, ObjectRef]) -> Iterator[list[str]]:
    """Group keys into batches of manifests that fit in memory together; a large manifest is a batch by itself."""
    batch, size = list[str](), 0
    for key in keys:
        if batch and size + manifests[key].length > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(key)
        size += manifests[key].length
    if batch:
        yield batch
