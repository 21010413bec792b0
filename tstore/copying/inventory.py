"""What versions of a store are made of: the objects that must be there to read them, and their checks.

Data is needed of the versions that live: what each of them wrote, and what it holds of older ones that expired.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tstore.format.checksums import BLOCK, digest
from tstore.format.chunk_refs import ChunkTable
from tstore.format.grid import chunk_coordinates
from tstore.format.records import Record
from tstore.format.references import Manifest, ObjectRef
from tstore.log.expiry import changes_nothing, living_versions
from tstore.log.reader import LogReader
from tstore.runtime.concurrency import batched, together

__all__ = ["Inventory", "Living", "PackBlocks", "PackCheck", "living_as_of", "of_all", "of_one", "place"]

Column = npt.NDArray[np.uint64]


class PackBlocks:
    """The blocks of one pack that have a checksum: where each begins, its size, and its check."""

    def __init__(self) -> None:
        self._parts: list[tuple[Column, Column, npt.NDArray[np.uint8]]] = []
        self._rows = self._settled = 0

    def add(self, table: ChunkTable) -> None:
        """Takes in the chunks of a table, all of which lie in this pack."""
        counts = np.diff(table.blocks)
        within = np.arange(int(table.blocks[-1])) - np.repeat(table.blocks[:-1], counts)
        skipped = within.astype("<u8") * np.uint64(BLOCK)
        sizes = np.minimum(np.repeat(table.length, counts) - skipped, np.uint64(BLOCK))
        self._parts.append((np.repeat(table.offset, counts) + skipped, sizes, table.checks))
        self._rows += len(sizes)
        if self._rows > max(1024, 2 * self._settled):
            self._settle()

    def _settle(self) -> None:
        """Sorts the blocks and drops those that are named twice."""
        starts, sizes, checks = (np.concatenate(column) for column in zip(*self._parts, strict=True))
        halves = np.ascontiguousarray(checks).view("<u8")
        order = np.lexsort((halves[:, 1], halves[:, 0], sizes, starts))
        rows = np.column_stack([starts, sizes, halves])[order]
        new = np.ones(len(rows), np.bool_)
        new[1:] = np.any(rows[1:] != rows[:-1], axis=1)
        kept = order[new]
        self._parts = [(starts[kept], sizes[kept], checks[kept])]
        self._rows = self._settled = len(kept)

    @property
    def end(self) -> int:
        """Where the last block ends."""
        return max(int((starts + sizes).max(initial=0)) for starts, sizes, _ in self._parts)

    def check(self) -> PackCheck:
        """A check of the pack, to be read from its begin to its end."""
        self._settle()
        starts, sizes, checks = self._parts[0]
        return PackCheck(starts, starts + sizes, checks)


class PackCheck:
    """Checks a pack that comes piece by piece, in order."""

    def __init__(self, starts: Column, stops: Column, checks: npt.NDArray[np.uint8]) -> None:
        self._starts = starts
        self._stops = stops.tolist()
        self._checks = checks.tobytes()
        self._next = self.at = 0
        self._open: list[tuple[int, int, xxhash.xxh3_128]] = []

    def take(self, piece: memoryview) -> int | None:
        """Where a block begins that is not as it should be, None where all that ended so far are."""
        begin, end = self.at, self.at + len(piece)
        still = []
        for number, stop, state in self._open:
            state.update(piece[: stop - begin])
            if stop > end:
                still.append((number, stop, state))
            elif state.digest() != self._check(number):
                return int(self._starts[number])
        last = int(np.searchsorted(self._starts, np.uint64(end)))
        for number in range(self._next, last):
            start, stop = int(self._starts[number]), self._stops[number]
            if stop > end:
                still.append((number, stop, xxhash.xxh3_128(piece[start - begin :])))
            elif digest(piece[start - begin : stop - begin]) != self._check(number):
                return start
        self._open, self._next, self.at = still, last, end
        return None

    def _check(self, number: int) -> bytes:
        return self._checks[16 * number : 16 * number + 16]


class Inventory(NamedTuple):
    """What `versions` are made of, as of version `base`.

    `manifests` are those that are objects of their own; `packs` come with the checks of all that is read of them.
    """

    base: int
    versions: tuple[int, ...]
    manifests: dict[str, ObjectRef]
    packs: dict[str, PackBlocks]

    def add(self, table: ChunkTable) -> None:
        """Takes in the packs of the chunks of a table."""
        order = np.argsort(table.pack, kind="stable")
        cuts = np.searchsorted(table.pack[order], np.arange(len(table.packs) + 1)).tolist()
        for pack, (low, high) in zip(table.packs, itertools.pairwise(cuts), strict=True):
            if isinstance(pack, str) and high > low:
                self.packs.setdefault(pack, PackBlocks()).add(table.take(order[low:high]))


class Living(NamedTuple):
    """Which versions live: those behind the newest gc, and those in `kept`, which hold the objects `held`."""

    gc: int
    kept: frozenset[int]
    held: frozenset[str]

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and (version > self.gc or version in self.kept)


async def living_as_of(log: LogReader, version: int) -> Living:
    """The versions that live as of one."""
    kept, gc = await living_versions(log, version)
    collection = await log.collection(gc) if gc else None
    entries = collection.alive if collection is not None else ()
    return Living(gc, kept, frozenset(key for entry in entries for key in entry.holds))


async def of_all(log: LogReader, base: int, alive: Living) -> Inventory:
    """What all versions up to `base` are made of that live."""
    found = Inventory(base, (), {}, {})
    versions = []
    orphaned = False  # whether the version below expired, so that what is left of it was not looked at

    async def manifests(numbered: tuple[int, Record]) -> list[Manifest]:
        return await log.objects.manifests(*numbered)

    for numbers in batched(range(1, base + 1)):
        records = await together(log.record, numbers)
        lives = [v in alive and not changes_nothing(r) for v, r in zip(numbers, records, strict=True)]
        numbered = zip(numbers, records, strict=True)
        read = iter(await together(manifests, itertools.compress(numbered, lives)))
        for version, record, live in zip(numbers, records, lives, strict=True):
            own = {m.key: m for m in record.manifests if isinstance(m, ObjectRef)}
            if live:
                versions.append(version)
                found.manifests.update(own)
                for manifest in next(read):
                    found.add(manifest.table)
                if orphaned and not record.replaces:
                    found.add((await log.tree(version)).manifest().table)
                orphaned = False
            elif not changes_nothing(record):
                orphaned = True
                found.manifests.update({key: own[key] for key in own if key in alive.held})
    return found._replace(versions=tuple(versions))


async def of_one(log: LogReader, version: int) -> Inventory:
    """What one version is made of; where it changed nothing, the one below that it shows."""
    base = version
    while version and changes_nothing(await log.record(version)):
        version -= 1
    found = Inventory(base, (version,) if version else (), {}, {})
    found.add((await log.tree(version)).manifest().table)
    for numbers in batched(range(version, 0, -1)):
        for record in await together(log.record, numbers):
            found.manifests.update({m.key: m for m in record.manifests if isinstance(m, ObjectRef)})
            if record.replaces:
                return found
    return found


async def place(log: LogReader, inventory: Inventory, pack: str, offset: int) -> str:
    """Which array and chunk has its bytes at that offset of a pack, for errors."""
    for version in reversed(inventory.versions):
        for path, node in (await log.tree(version)).nodes.items():
            if not node.is_array or pack not in node.chunks.packs:
                continue
            for row in node.chunks.rows:
                if row.pack == pack and row.offset <= offset < row.offset + max(1, row.length):
                    chunk = chunk_coordinates(row.number, node.meta.counts)
                    return f"version {version}: {path}, chunk {chunk}"
    return f"version {inventory.base}"
