"""The parts of steps that this host holds, and the store that consists of the parts of one save."""

from __future__ import annotations

import bisect
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from tstore.core.format.checksums import BLOCK, CHECK_SIZE, digest
from tstore.core.format.layout import MARKER, is_pack, owner_of
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.pages import stored
from tstore.core.format.objects.records import INLINE_MANIFEST_BYTES, Fragment, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.log.group_commit import Newer
from tstore.core.runtime import world
from tstore.core.runtime.concurrency import together
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.core.steps import step_tag, steps_of
from tstore.core.storage.base import REMOTE, PackReader, Storage
from tstore.core.storage.connect import connect
from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Buffers, Durability, Entry
from tstore.core.store import Store
from tstore.core.store import open as open_store
from tstore.core.transactions.copies import verified_chunks
from tstore.core.transactions.fragments import check_complete, fragment_from_record, merge, record_from_fragment
from tstore.errors import Corrupt, NotFound, SnapshotExpired, TStoreError, Unavailable
from tstore.tiers.objects import Decision, Held, Holder, Part, Saved

__all__ = ["METADATA", "HeldStorage", "assembled", "held_parts", "part_of", "saved_of", "stores_below"]

METADATA = "tstore.tier"
"""The key of a commit's metadata under which a local store has its `Part`, and the durable store its `Saved`."""

_log = logging.getLogger("tstore.tiers")


def part_of(record: Record) -> Part | None:
    """Return what the record of a local commit says it is, None if it is no part of a step."""
    try:
        return msgspec.convert(record.metadata.get(METADATA), Part)
    except msgspec.ValidationError:
        return None


def saved_of(record: Record) -> Saved | None:
    """Return which save the record of a durable commit says it is, None if it was saved without tiers."""
    try:
        return msgspec.convert(record.metadata.get(METADATA), Saved)
    except msgspec.ValidationError:
        return None


async def held_parts(root: str, job: str) -> list[Held]:
    """Return the parts of a job's steps in the stores below a folder; read and verify every chunk of each.

    What is damaged, or was never committed, is left out, with a warning that names it.
    """
    held = []
    for folder in sorted(folder.name for folder in await run(stores_below, root)):
        try:
            async with await open_store(os.path.join(root, folder), "r") as store:
                tags = await store.tags()
                for step in reversed(steps_of(tags)):
                    version = tags[step_tag(step)]
                    if part := await _verified_part(store, version, job):
                        held.append(Held(part, folder, version))
        except TStoreError as error:
            _log.warning("%s: this local store can't be read, and its steps are left out: %s", folder, error)
    return held


def stores_below(root: str) -> list[Path]:
    """Return the folders of stores in a folder."""
    return [folder for folder in Path(root).iterdir() if (folder / MARKER).exists()]


async def _verified_part(store: Store, version: int, job: str) -> Part | None:
    """Return the part that a version is, None if it is damaged, or of another job."""
    try:
        part = part_of(await store.log.reader.record(version))
        if part is not None and part.job == job:
            await verified_chunks(await store.snapshot(version))
            return part
    except TStoreError as error:
        _log.warning("%s at version %d is damaged, and left out: %s", store.url, version, error)
    return None


class _Source(NamedTuple):
    """A storage with a part, and how messages name its holder."""

    storage: Storage
    name: str
    is_remote: bool


class _Blocks:
    """The checksums of blocks of packs by their place, as far as references in memory have them."""

    def __init__(self, tables: Iterable[ChunkTable]) -> None:
        by_pack: dict[str, list[tuple[int, int, bytes]]] = {}
        for table in tables:
            for row in table.rows:
                if isinstance(row.pack, str):
                    by_pack.setdefault(row.pack, []).append((row.offset, row.length, row.checks))
        self._by_pack = {pack: sorted(chunks) for pack, chunks in by_pack.items()}

    def damaged(self, key: str, offset: int, data: memoryview) -> int | None:
        """Return the offset of a damaged block among those that lie within these bytes of a pack, or None."""
        chunks = self._by_pack.get(key, [])
        end = offset + len(data)
        first = max(0, bisect.bisect_right(chunks, (offset,)) - 1)
        for start, length, checks in chunks[first:]:
            if start >= end:
                break
            for i, at in enumerate(range(start, start + length, BLOCK)):
                stop = min(at + BLOCK, start + length)
                if offset <= at and stop <= end:
                    check = checks[i * CHECK_SIZE : (i + 1) * CHECK_SIZE]
                    if digest(data[at - offset : stop - offset]) != check:
                        return at
        return None


class HeldStorage(MemoryStorage):
    """The storage of a store with one save: its record in memory, its packs where hosts hold them.

    If a part has several holders, what one of them sends is verified, and the next is asked if it is wrong.
    """

    def __init__(self, url: str, sources: Mapping[str, Sequence[_Source]], blocks: _Blocks) -> None:
        self.url = url
        self._objects: dict[str, bytes | bytearray] = {}
        self._times: dict[str, float] = {}
        self._sources = sources  # by transaction
        self._blocks = blocks
        if any(source.is_remote for held in sources.values() for source in held):
            self.tuning = REMOTE

    def held(self, key: str) -> Sequence[_Source]:
        """Return the sources of a pack, the nearest first."""
        return self._sources.get(owner_of(key), ()) if is_pack(key) else ()

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        """Fill the buffers, as the base class does."""
        await run(self.reader(key).read_into, offset, buffers, size)

    async def head(self, key: str) -> Entry | None:
        """Return the size and age of an object; of a pack, from the first holder that has it."""
        failure: TStoreError | None = None
        for source in self.held(key):
            try:
                if (entry := await source.storage.head(key)) is not None:
                    return entry
            except TStoreError as error:
                failure = error
        if failure is not None:
            raise failure
        return await super().head(key)

    def reader(self, key: str) -> PackReader:  # type: ignore[override]
        """Return a reader of an object; that of a pack asks one holder after the other."""
        sources = self.held(key)
        return _HeldReader(key, sources, self._blocks) if sources else super().reader(key)

    async def close(self) -> None:
        """Close the storages of all holders."""
        for storage in {source.storage for held in self._sources.values() for source in held}:
            await storage.close()


class _HeldReader:
    def __init__(self, key: str, sources: Sequence[_Source], blocks: _Blocks) -> None:
        self._key = key
        self._sources = sources
        self._blocks = blocks

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        if len(self._sources) == 1:  # whoever reads verifies, and there is no other holder to ask
            self._sources[0].storage.reader(self._key).read_into(offset, buffers, size)
            return
        failures = []
        for source in self._sources:
            data = memoryview(bytearray(size))
            try:
                source.storage.reader(self._key).read_into(offset, [data], size)
                if (at := self._blocks.damaged(self._key, offset, data)) is None:
                    break
                failures.append(f"{source.name}: {self._key} is damaged at byte {at}")
            except TStoreError as error:
                failures.append(f"{source.name}: {error}")
            _log.warning("%s; another holder is asked", failures[-1])
        else:
            raise Corrupt(f"no holder has this chunk whole: {'; '.join(failures)}; start the job again")
        start = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            view[:] = data[start : start + len(view)]
            start += len(view)


class _ReadPart(NamedTuple):
    """A part of a save as its holders have it, and where its packs are."""

    record: Record
    manifests: list[Manifest]
    sources: list[_Source]

    @property
    def transactions(self) -> set[str]:
        """The transactions whose packs the part needs."""
        return {self.record.transaction, *map(owner_of, self.record.reused)}


async def assembled(decision: Decision, root: str, place: str) -> HeldStorage:
    """Return the storage of a store with the decided step, made of the parts that its holders have.

    `root` is this host's folder of the job, and `place` identifies it. Raise `Unavailable`, which names the parts
    and their holders, if a part can't be read anywhere, and `Inconsistent` if the parts contradict each other.
    """
    saved = decision.saved
    assert saved is not None
    hosts = len(decision.holders)

    async def read(host: int) -> _ReadPart:
        sources = sorted(
            (_source(holder, root, place) for holder in decision.holders[host]),
            key=lambda source: source[0].is_remote,
        )
        failures = []
        for source, version in sources:
            try:
                record, manifests = await _read_part(source.storage, version, saved, host, hosts)
                return _ReadPart(record, manifests, [source, *(s for s, _ in sources if s is not source)])
            except TStoreError as error:
                failures.append(f"{source.name}: {error}")
                _log.warning(
                    "the part of host %d in step %d: %s; another holder is asked", host, saved.step, failures[-1]
                )
        raise Unavailable(
            f"step {saved.step}: no holder has the part of host {host} of {hosts} ({'; '.join(failures)}); start "
            "the job again"
        )

    parts = await together(read, range(hosts))
    record, tables = await run(_merged, saved, parts)
    sources = {transaction: part.sources for part in parts for transaction in part.transactions}
    storage = HeldStorage(f"step {saved.step} of {hosts} hosts", sources, _Blocks(tables))
    [manifest] = record.manifests
    if isinstance(manifest, Manifest) and manifest.size > INLINE_MANIFEST_BYTES:
        reference, data = stored(f"txn/{record.transaction}/manifest", manifest)
        await storage.create(reference.key, data, Durability.NONE)
        record = msgspec.structs.replace(record, manifests=(reference,))

    async def validate(_: Newer) -> Record:
        return record

    await (await open_store(storage, "a")).log.append(record, validate, Durability.NONE)
    return storage


def _source(holder: Holder, root: str, place: str) -> tuple[_Source, int]:
    path = os.path.join(root, holder.folder)
    if holder.place == place and (not holder.url or os.path.exists(path)):
        return _Source(LocalStorage(path), path, False), holder.version
    url = f"{holder.url}/{holder.folder}"
    options = {"token": holder.token, "retry_timeout": 10}
    return _Source(connect(url, options), url, True), holder.version


async def _read_part(
    storage: Storage, version: int, saved: Saved, host: int, hosts: int
) -> tuple[Record, list[Manifest]]:
    """Return the record and the manifests of a part; raise `NotFound` if the version is another one."""
    store = await open_store(storage, "r")
    snapshot: Snapshot = await store.snapshot(version)
    record = await snapshot.log.record(version)
    part = part_of(record)
    if part is None or (part.saved, part.host, part.hosts) != (saved, host, hosts):
        raise NotFound(f"{store.url}: version {version} is another part than it was when it was offered")
    try:
        return record, await snapshot.log.objects.manifests(version, record)
    except SnapshotExpired as error:
        raise NotFound(str(error)) from error


def _merged(saved: Saved, parts: Sequence[_ReadPart]) -> tuple[Record, list[ChunkTable]]:
    """Return the record of the whole save, and the tables of its chunks; check that the parts fit together."""
    fragments: list[Fragment] = []
    for host, part in enumerate(parts):
        metadata = {key: value for key, value in part.record.metadata.items() if key != METADATA}
        record = msgspec.structs.replace(
            part.record,
            transaction=f"held-{world.token(12)}",
            base=0,
            message="",
            tags=(step_tag(saved.step),),
            bytes_added=0,
            metadata=metadata,
            manifests=(Manifest.from_nodes([]),),
        )
        fragments.append(fragment_from_record(record, host, len(parts), b"", {}))
    first = fragments[0].transaction
    fragments = [msgspec.structs.replace(fragment, transaction=first) for fragment in fragments]
    merged = merge(step_tag(saved.step), fragments, [part.manifests for part in parts])
    manifest = merged.manifest
    assert isinstance(manifest, Manifest)
    check_complete(step_tag(saved.step), manifest)
    record = msgspec.structs.replace(
        record_from_fragment(merged, parts[0].record.time), reused=manifest.reused(merged.transaction)
    )
    tables = [t for part in parts for m in part.manifests for _, _, _, ts in m.nodes() for t in ts]
    return record, [table for table in tables if isinstance(table, ChunkTable)]
