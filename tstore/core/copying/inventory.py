"""Inventories: the manifests and packs that versions need, with the checksum of each block.

A version is living if no garbage collection has expired it. It needs the objects that it wrote, and older objects
to which it refers.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from tstore.core.format.arrays.grid import chunk_coordinates
from tstore.core.format.checksums import BLOCK, checks_in
from tstore.core.format.layout import owner_of
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.records import REPAIR, VOIDED, Collection, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.segments import Segment, SegmentSource
from tstore.core.format.tree.tree import Tree
from tstore.core.log.expiry import changes_nothing, last_collection, ledger_at, living_versions, state_of
from tstore.core.log.reader import LogReader
from tstore.core.maintenance.damage import check_named
from tstore.core.maintenance.past_repairs import PastRepairs
from tstore.core.runtime.pool import run

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

_STEP = 2 << 20  # bytes of a pack whose blocks are in memory at once
_READ_AHEAD = 128 << 10  # blocks read from segments together, since every segment may have some in each step

Column = npt.NDArray[np.uint64]


class _Blocks(NamedTuple):
    """Blocks that have a checksum: the offset, size and checksum of each."""

    starts: Column
    sizes: Column
    checks: npt.NDArray[np.uint8]

    @staticmethod
    def of(table: ChunkTable) -> _Blocks:
        """Return the blocks of the chunks of a table, which are in one pack."""
        counts = np.diff(table.blocks)
        number_in_chunk = np.arange(int(table.blocks[-1])) - np.repeat(table.blocks[:-1], counts)
        offset_in_chunk = number_in_chunk.astype("<u8") * np.uint64(BLOCK)
        sizes = np.minimum(np.repeat(table.length, counts) - offset_in_chunk, np.uint64(BLOCK))
        return _Blocks(np.repeat(table.offset, counts) + offset_in_chunk, sizes, table.checks)

    @staticmethod
    def distinct(parts: Sequence[_Blocks]) -> _Blocks:
        """Return the distinct blocks of all parts, sorted."""
        starts, sizes, checks = (np.concatenate(column) for column in zip(*parts, strict=True))
        halves = np.ascontiguousarray(checks).view("<u8")  # each checksum as two integers, to be sorted
        if not (starts[1:] > starts[:-1]).all():
            order = np.lexsort((halves[:, 1], halves[:, 0], sizes, starts))
            rows = np.column_stack([starts, sizes, halves])[order]
            is_new = np.ones(len(rows), np.bool_)
            is_new[1:] = np.any(rows[1:] != rows[:-1], axis=1)
            order = order[is_new]
            starts, sizes, checks = starts[order], sizes[order], checks[order]
        return _Blocks(starts, sizes, checks)

    @property
    def end(self) -> int:
        """The offset at which the last block ends."""
        return int((self.starts + self.sizes).max(initial=0))

    def within(self, start: int, stop: int) -> _Blocks:
        """Return the sorted blocks that begin in `start:stop`."""
        first, last = np.searchsorted(self.starts, np.array([start, stop], np.uint64)).tolist()
        return _Blocks(self.starts[first:last], self.sizes[first:last], self.checks[first:last])


class _Extent(NamedTuple):
    """A segment that refers to blocks of a pack, and the extent of these blocks in the pack."""

    segment: Segment
    source: SegmentSource
    start: int
    end: int

    def blocks(self, pack: str, start: int, stop: int) -> _Blocks:
        """Return all blocks that begin in `start:stop`, and perhaps others; reads the segment."""
        [rows] = self.source.load((self.segment,))
        near = (rows.offset < np.uint64(stop)) & (rows.offset + rows.length >= np.uint64(start))
        return _Blocks.of(rows.take(np.flatnonzero(near & (rows.pack == rows.packs.index(pack)))))


class PackBlocks:
    """The blocks of one pack that have a checksum. Those in segments are not kept, but read again when needed."""

    def __init__(self, pack: str) -> None:
        self._pack = pack
        self._parts: list[_Blocks] = [_Blocks.of(ChunkTable.concat([]))]
        self._rows = 0  # total rows of all parts
        self._distinct = 0  # rows left by the last deduplication
        self._extents: list[_Extent] = []

    def add(self, table: ChunkTable) -> None:
        """Add the chunks of a table, all of which are in this pack."""
        self._parts.append(_Blocks.of(table))
        self._rows += len(self._parts[-1].starts)
        if self._rows > max(1024, 2 * self._distinct):  # many versions refer to the same chunks
            self._deduplicate()

    def add_segment(self, segment: Segment, source: SegmentSource, table: ChunkTable) -> None:
        """Add the chunks of a segment that are in this pack, which the table has."""
        start, end = int(table.offset.min()), int((table.offset + table.length).max())
        self._extents.append(_Extent(segment, source, start, end))

    def _deduplicate(self) -> None:
        self._parts = [_Blocks.distinct(self._parts)]
        self._rows = self._distinct = len(self._parts[0].starts)

    @property
    def end(self) -> int:
        """The offset at which the last block ends."""
        return max([part.end for part in self._parts] + [extent.end for extent in self._extents])

    def new_check(self) -> PackCheck:
        """Return a new `PackCheck`, for one sequential read of the pack."""
        self._deduplicate()
        return PackCheck(self._pack, self._parts[0], self._extents)


class PackCheck:
    """The verification of a pack's blocks while the pack is read sequentially, in pieces of any size.

    `position` is the offset of the next piece.
    """

    def __init__(self, pack: str, blocks: _Blocks, extents: Sequence[_Extent]) -> None:
        self._pack = pack
        self._blocks = blocks
        self._extents = sorted(extents, key=lambda extent: extent.start)
        self._ahead, self._ahead_stop = blocks.within(0, 0), 0  # blocks read ahead from the extents
        self.position = 0
        self._unfinished: list[tuple[int, int, bytes, xxhash.xxh3_128]] = []  # blocks that began in earlier pieces

    def update(self, piece: memoryview) -> int | None:
        """Verify the blocks that end in the next piece; return the offset of a damaged block, or None."""
        for start in range(0, len(piece), _STEP):
            if (damaged := self._advance(piece[start : start + _STEP])) is not None:
                return damaged
        return None

    def _within(self, start: int, stop: int) -> _Blocks:
        """Return the distinct blocks that begin in `start:stop`, sorted; reads segments."""
        if not self._extents:
            return self._blocks.within(start, stop)
        if stop > self._ahead_stop:
            self._read_ahead(start, stop)
        return _Blocks.distinct([self._blocks.within(start, stop), self._ahead.within(start, stop)])

    def _read_ahead(self, start: int, stop: int) -> None:
        """Read the next `_READ_AHEAD` blocks, but at least those that begin before `stop`, from the segments."""
        end, parts, count, kept = 1 << 63, [self._ahead.within(0, 0)], 0, _READ_AHEAD
        for extent in self._extents:
            if extent.end < start or extent.start >= end:
                continue
            parts.append(extent.blocks(self._pack, start, end))
            count += len(parts[-1].starts)
            if count > 2 * kept:
                blocks = _Blocks.distinct(parts).within(start, end)
                if len(blocks.starts) > _READ_AHEAD:
                    end = max(stop, int(blocks.starts[_READ_AHEAD]))
                parts = [blocks.within(start, end)]
                count = len(parts[0].starts)
                kept = max(_READ_AHEAD, count)
        self._ahead, self._ahead_stop = _Blocks.distinct(parts).within(start, end), end

    def _advance(self, piece: memoryview) -> int | None:
        piece_start, piece_end = self.position, self.position + len(piece)
        unfinished = []
        for start, stop, check, state in self._unfinished:
            state.update(piece[: stop - piece_start])
            if stop > piece_end:
                unfinished.append((start, stop, check, state))
            elif state.digest() != check:
                return start
        blocks = self._within(piece_start, piece_end)
        starts, sizes = blocks.starts.astype(np.int64), blocks.sizes.astype(np.int64)
        whole = starts + sizes <= piece_end
        checks = checks_in(piece, starts[whole] - piece_start, sizes[whole])
        damaged = np.flatnonzero((checks != blocks.checks[whole]).any(axis=1))
        if len(damaged):
            return int(starts[whole][damaged[0]])
        for at in np.flatnonzero(~whole).tolist():
            start, stop = int(starts[at]), int(starts[at] + sizes[at])
            state = xxhash.xxh3_128(piece[start - piece_start :])
            unfinished.append((start, stop, blocks.checks[at].tobytes(), state))
        self._unfinished, self.position = unfinished, piece_end
        return None


class Inventory(NamedTuple):
    """The objects that `versions` need, as of version `base`.

    `manifests` maps keys to references; manifests inside records have no key and are omitted. `packs` maps keys to
    the blocks to which the versions refer. `segments` are those in `packs`.
    """

    base: int
    versions: tuple[int, ...]
    manifests: dict[str, ObjectRef]
    packs: dict[str, PackBlocks]
    segments: set[Segment]

    def add(self, manifest: Manifest) -> None:
        """Add the chunks of a manifest, and its segments, to their packs."""
        for table in (manifest.segment_table, manifest.table) if manifest.segments else (manifest.table,):
            for pack, part in _by_pack(table):
                self._blocks_of(pack).add(part)
        for segment in manifest.all_segments:
            if segment not in self.segments:
                [rows] = manifest.source.load((segment,))
                for pack, part in _by_pack(rows):
                    self._blocks_of(pack).add_segment(segment, manifest.source, part)
                self.segments.add(segment)

    def _blocks_of(self, pack: str) -> PackBlocks:
        if pack not in self.packs:
            self.packs[pack] = PackBlocks(pack)
        return self.packs[pack]

    def add_tree(self, tree: Tree) -> None:
        """Add the chunks and segments of all nodes of a tree to their packs."""
        self.add(tree.manifest())

    def add_base(self, tree: Tree) -> None:
        """Add the manifest that a tree builds on; no record names it if the record that wrote it was lost."""
        if (base := tree.nodes.base) is not None:
            self.manifests[base.key] = base


def _by_pack(table: ChunkTable) -> Iterator[tuple[str, ChunkTable]]:
    """Yield each pack that is not inline, with the chunks in it."""
    order = np.argsort(table.pack, kind="stable")
    cuts = np.searchsorted(table.pack[order], np.arange(len(table.packs) + 1)).tolist()
    for pack, (low, high) in zip(table.packs, itertools.pairwise(cuts), strict=True):
        if isinstance(pack, str) and high > low:
            yield pack, table.take(order[low:high])


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
    """Return the inventory of all living versions up to `base`; raise the errors of `check_named`."""
    inventory = Inventory(base, (), {}, {}, set())
    versions = []
    previous_expired = False  # its chunks were not added, but a later version may refer to them
    resumes = 0  # the version that has the changes of a lost record

    async def read_version(version: int) -> tuple[Record, list[Manifest]]:
        """Return the record, and its manifests if the version is living."""
        record = await log.record(version)
        await check_named(log, version, record)
        needed = version in living and not changes_nothing(record)
        return record, await log.objects.manifests(version, record) if needed else []

    async for version, (record, manifests) in log.each(read_version, range(1, base + 1)):
        resumes = max(resumes, record.resumes)
        if 0 < resumes <= version:
            previous_expired, resumes = True, 0
        if changes_nothing(record):
            continue
        written = {m.key: m for m in record.manifests if isinstance(m, ObjectRef)}
        if version in living:
            versions.append(version)
            inventory.manifests.update(written)
            for manifest in manifests:
                await run(inventory.add, manifest)
            if record.source:  # a copy has only the chunks that it lists
                continue
            if previous_expired and not record.replaces:
                tree = await log.tree(version)
                await run(inventory.add_tree, tree)
                inventory.add_base(tree)
            previous_expired = False
        else:
            previous_expired = previous_expired or not record.source
            inventory.manifests.update({key: written[key] for key in written if key in living.shared})
    return inventory._replace(versions=tuple(versions))


async def take_version_inventory(log: LogReader, version: int) -> Inventory:
    """Return the inventory of a version; if it changed nothing, that of the head before it."""
    base, version = version, await state_of(log, version)
    inventory = Inventory(base, (version,) if version else (), {}, {}, set())
    tree = await log.tree(version)
    await run(inventory.add_tree, tree)
    inventory.add_base(tree)
    async for number, record in log.each_record(range(version, 0, -1)):
        if number == version or not record.source:
            inventory.manifests.update({m.key: m for m in record.manifests if isinstance(m, ObjectRef)})
        if record.replaces or (number == version and record.source):
            break
    return inventory


async def expiry_of_other_versions(log: LogReader, inventory: Inventory, copy_uuid: uuid.UUID) -> Record | None:
    """Return the record of a garbage collection that expires all versions but the inventory's.

    It also lists the versions that are void by repairs whose commits are above the inventory's base. Return None
    if there are none, and no other version is living.
    """
    base = inventory.base
    ledger, _ = await ledger_at(log, base)
    expired = tuple(sorted(set(ledger.alive) - set(inventory.versions)))
    void = (await PastRepairs.up_to(log, base)).unlisted
    if not expired and not void:
        return None
    keys = sorted([*inventory.manifests, *inventory.packs])
    alive = []
    for entry in map(ledger.alive.__getitem__, inventory.versions):
        shared = tuple(key for key in keys if owner_of(key) != entry.transaction)
        alive.append(replace(entry, standalone=True, dependencies=shared, source=0))
    return Record(
        f"{REPAIR if void else ''}copy-{copy_uuid.hex}",
        base,
        (await log.record(base)).time,
        f"copied version {max(inventory.versions, default=0)} without {len(expired)} others",
        collected=await last_collection(log, base),
        metadata={VOIDED: void} if void else {},
        collection=Collection(
            tuple(alive),
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
        for part in node.parts():
            at = part.packs.index(pack) if pack in part.packs else -1
            ends = part.offset + np.maximum(part.length, np.uint64(1))
            found = part.number[(part.pack == at) & (part.offset <= offset) & (offset < ends)]
            if len(found):
                return f"{path}, chunk {chunk_coordinates(int(found[0]), node.meta.counts)}"
    return None
