"""Inventories: the manifests and packs that versions need, with the checksum of each block.

A version is living if no garbage collection has expired it. It needs the objects that it wrote, and older objects
to which it refers.
"""

from __future__ import annotations

import itertools
import uuid
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from tstore.format.arrays.grid import chunk_coordinates
from tstore.format.checksums import BLOCK, digest
from tstore.format.layout import owner_of
from tstore.format.objects.chunk_refs import ChunkTable
from tstore.format.objects.object_ref import ObjectRef
from tstore.format.objects.records import Collection, Record
from tstore.format.objects.references import Manifest
from tstore.format.tree.tree import Tree
from tstore.log.expiry import changes_nothing, last_collection, ledger_at, living_versions
from tstore.log.reader import LogReader
from tstore.maintenance.damage import check_tagged
from tstore.runtime.pool import run

__all__ = [
    "Inventory",
    "LivingSet",
    "PackBlocks",
    "PackCheck",
    "chunk_label",
    "expiry_of_other_versions",
    "living_as_of",
    "take_inventory",
    "take_version_inventory",
]

Column = npt.NDArray[np.uint64]


class PackBlocks:
    """The blocks of one pack that have a checksum: the offset, size and checksum of each."""

    def __init__(self) -> None:
        self._parts: list[tuple[Column, Column, npt.NDArray[np.uint8]]] = []
        self._rows = 0  # in all parts
        self._distinct = 0  # rows after the last removal of duplicates

    def add(self, table: ChunkTable) -> None:
        """Add the chunks of a table, all of which are in this pack."""
        counts = np.diff(table.blocks)
        number_in_chunk = np.arange(int(table.blocks[-1])) - np.repeat(table.blocks[:-1], counts)
        offset_in_chunk = number_in_chunk.astype("<u8") * np.uint64(BLOCK)
        sizes = np.minimum(np.repeat(table.length, counts) - offset_in_chunk, np.uint64(BLOCK))
        self._parts.append((np.repeat(table.offset, counts) + offset_in_chunk, sizes, table.checks))
        self._rows += len(sizes)
        if self._rows > max(1024, 2 * self._distinct):  # many versions refer to the same chunks
            self._deduplicate()

    def _deduplicate(self) -> None:
        """Sort the blocks and drop duplicates."""
        starts, sizes, checks = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        halves = np.ascontiguousarray(checks).view("<u8")  # each checksum as two integers, to be sorted
        order = np.lexsort((halves[:, 1], halves[:, 0], sizes, starts))
        rows = np.column_stack([starts, sizes, halves])[order]
        is_new = np.ones(len(rows), np.bool_)
        is_new[1:] = np.any(rows[1:] != rows[:-1], axis=1)
        distinct = order[is_new]
        self._parts = [(starts[distinct], sizes[distinct], checks[distinct])]
        self._rows = self._distinct = len(distinct)

    @property
    def end(self) -> int:
        """The offset at which the last block ends."""
        return max(int((starts + sizes).max(initial=0)) for starts, sizes, _ in self._parts)

    def new_check(self) -> PackCheck:
        """Return a new `PackCheck`, for one sequential read of the pack."""
        self._deduplicate()
        starts, sizes, checks = self._parts[0]
        return PackCheck(starts, starts + sizes, checks)


class PackCheck:
    """The verification of a pack's blocks while the pack is read sequentially, in pieces of any size.

    `position` is the offset of the next piece.
    """

    def __init__(self, starts: Column, stops: Column, checks: npt.NDArray[np.uint8]) -> None:
        self._starts = starts
        self._stops = stops.tolist()
        self._checks = checks.tobytes()
        self._next = 0  # the first block that no piece has reached
        self.position = 0
        self._unfinished: list[tuple[int, int, xxhash.xxh3_128]] = []  # blocks that began in earlier pieces

    def update(self, piece: memoryview) -> int | None:
        """Verify the blocks that end in the next piece; return the offset of a damaged block, or None."""
        piece_start, piece_end = self.position, self.position + len(piece)
        unfinished = []
        for number, stop, state in self._unfinished:
            state.update(piece[: stop - piece_start])
            if stop > piece_end:
                unfinished.append((number, stop, state))
            elif state.digest() != self._check(number):
                return int(self._starts[number])
        last = int(np.searchsorted(self._starts, np.uint64(piece_end)))
        for number in range(self._next, last):
            start, stop = int(self._starts[number]), self._stops[number]
            if stop > piece_end:
                unfinished.append((number, stop, xxhash.xxh3_128(piece[start - piece_start :])))
            elif digest(piece[start - piece_start : stop - piece_start]) != self._check(number):
                return start
        self._unfinished, self._next, self.position = unfinished, last, piece_end
        return None

    def _check(self, number: int) -> bytes:
        return self._checks[16 * number : 16 * number + 16]


class Inventory(NamedTuple):
    """The objects that `versions` need, as of version `base`.

    `manifests` maps keys to references; manifests inside records have no key and are omitted. `packs` maps keys to
    the blocks to which the versions refer.
    """

    base: int
    versions: tuple[int, ...]
    manifests: dict[str, ObjectRef]
    packs: dict[str, PackBlocks]

    def add(self, manifest: Manifest) -> None:
        """Add the chunks of a manifest, and its segments, to their packs."""
        for table in manifest.tables():
            order = np.argsort(table.pack, kind="stable")
            cuts = np.searchsorted(table.pack[order], np.arange(len(table.packs) + 1)).tolist()
            for pack, (low, high) in zip(table.packs, itertools.pairwise(cuts), strict=True):
                if isinstance(pack, str) and high > low:
                    self.packs.setdefault(pack, PackBlocks()).add(table.take(order[low:high]))

    def add_tree(self, tree: Tree) -> None:
        """Add the chunks and segments of all nodes of a tree to their packs."""
        self.add(tree.manifest())


class LivingSet(NamedTuple):
    """The living versions: those after the newest garbage collection `gc`, and those that it left `alive`.

    `shared` has the keys of objects that the versions in `alive` need, but other versions wrote.
    """

    gc: int
    alive: frozenset[int]
    shared: frozenset[str]

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and (version > self.gc or version in self.alive)


async def living_as_of(log: LogReader, version: int) -> LivingSet:
    """Return the versions that are living as of a version."""
    alive, gc = await living_versions(log, version)
    collection = await log.collection(gc) if gc else None
    entries = collection.alive if collection is not None else ()
    return LivingSet(gc, alive, frozenset(key for entry in entries for key in entry.dependencies))


async def take_inventory(log: LogReader, base: int, living: LivingSet) -> Inventory:
    """Return the inventory of all living versions up to `base`; raise the errors of `check_tagged`."""
    inventory = Inventory(base, (), {}, {})
    versions = []
    previous_expired = False  # if so, its chunks were not added, but a later version may refer to them

    async def read_version(version: int) -> tuple[Record, list[Manifest]]:
        """Return the record, and its manifests if the version is living."""
        record = await log.record(version)
        await check_tagged(log, version, record)
        needed = version in living and not changes_nothing(record)
        return record, await log.objects.manifests(version, record) if needed else []

    async for version, (record, manifests) in log.each(read_version, range(1, base + 1)):
        if changes_nothing(record):
            continue
        written = {m.key: m for m in record.manifests if isinstance(m, ObjectRef)}
        if version in living:
            versions.append(version)
            inventory.manifests.update(written)
            for manifest in manifests:
                await run(inventory.add, manifest)
            if previous_expired and not record.replaces:
                await run(inventory.add_tree, await log.tree(version))
            previous_expired = False
        else:
            previous_expired = True
            inventory.manifests.update({key: written[key] for key in written if key in living.shared})
    return inventory._replace(versions=tuple(versions))


async def take_version_inventory(log: LogReader, version: int) -> Inventory:
    """Return the inventory of a version; if it changed nothing, that of the last one that did."""
    base = version
    while version and changes_nothing(await log.record(version)):
        version -= 1
    inventory = Inventory(base, (version,) if version else (), {}, {})
    await run(inventory.add_tree, await log.tree(version))
    async for _, record in log.each_record(range(version, 0, -1)):
        inventory.manifests.update({m.key: m for m in record.manifests if isinstance(m, ObjectRef)})
        if record.replaces:
            break
    return inventory


async def expiry_of_other_versions(log: LogReader, inventory: Inventory, copy_uuid: uuid.UUID) -> Record | None:
    """Return the record of a garbage collection that expires all versions but the inventory's.

    Return None if no other version is living.
    """
    base = inventory.base
    ledger, _ = await ledger_at(log, base)
    expired = tuple(sorted(set(ledger.alive) - set(inventory.versions)))
    if not expired:
        return None
    entry = ledger.alive[inventory.versions[0]]
    shared = [k for k in (*inventory.manifests, *inventory.packs) if owner_of(k) != entry.transaction]
    return Record(
        f"copy-{copy_uuid.hex}",
        base,
        (await log.record(base)).time,
        f"copied version {entry.version} without {len(expired)} others",
        collected=await last_collection(log, base),
        collection=Collection(
            (replace(entry, standalone=True, dependencies=tuple(sorted(shared))),),
            expired,
            {tag: v for v in expired for tag in ledger.alive[v].tags},
            (),
            (),
        ),
    )


async def chunk_label(log: LogReader, inventory: Inventory, pack: str, offset: int) -> str:
    """Return, for errors, the version, array and chunk at an offset of a pack, or the base version if unknown."""
    for version in reversed(inventory.versions):
        chunk = await run(_chunk_at, await log.tree(version), pack, offset)
        if chunk is not None:
            return f"version {version}: {chunk}"
    return f"version {inventory.base}"


def _chunk_at(tree: Tree, pack: str, offset: int) -> str | None:
    """Return the path and the chunk at an offset of a pack, or None if the tree has none there."""
    for path, node in tree.nodes.items():
        if not node.is_array or pack not in node.packs:
            continue
        for row in node.chunks.rows:
            if row.pack == pack and row.offset <= offset < row.offset + max(1, row.length):
                return f"{path}, chunk {chunk_coordinates(row.number, node.meta.counts)}"
    return None
