"""Verification: read and check everything that living versions refer to; a fault does not end it.

1. Read all archives of old records (`log.commits`). Among their versions, check further only the living ones,
   and those whose roots others need, so that the cost follows the living data.
2. Read all other records in order, and the manifests of living versions. Every record must name the last garbage
   collection before it, and no two may commit the same transaction (`transaction_ids`). Every root, a stored copy
   of the tree, must equal the tree of the records up to its version, and every record must follow from that tree
   (`replay`).
3. List the chunks to check, from these manifests, without keeping their references (`distinct_chunks`). Skip the
   segments that an earlier version had. If an older manifest was not read, because its version has expired or is
   damaged, list all chunks of the next living version, which may have inherited some.
4. Look for a gap: a missing record although later ones exist.
5. Read the segments again and each chunk once, and compare it with its checksums (`read_back`). List the keys
   that no store writes.
6. If there are faults and a garbage collection was committed meanwhile, begin again: the collection may have
   deleted what is missing.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tstore.core.format.layout import ARCHIVE_EVERY, ROOT_EVERY, commit_key, is_object, roots_for
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.segments import Segment, SegmentSource
from tstore.core.format.plain_text import pluralize
from tstore.core.format.tree.node import Node
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE
from tstore.core.format.tree_document import is_document
from tstore.core.log.expiry import changes_nothing, existing_collection, names_falsely
from tstore.core.log.reader import LogReader
from tstore.core.maintenance.damage import (
    KnownExpiry,
    check_references,
    foreign_archives,
    known_expiry,
    last_readable_collection,
    listed_records,
    missing_records,
)
from tstore.core.maintenance.distinct_chunks import ChunkList, DistinctChunks, array_label
from tstore.core.maintenance.gaps import Gap, long_gap
from tstore.core.maintenance.past_repairs import PastRepairs, interrupted_message
from tstore.core.maintenance.read_back import read_back
from tstore.core.maintenance.replay import UNREADABLE, Replay
from tstore.core.maintenance.transaction_ids import TransactionIds
from tstore.core.runtime.concurrency import together
from tstore.core.runtime.pool import run
from tstore.core.storage.base import Storage
from tstore.errors import Corrupt, parsing

__all__ = ["VerifyProgress", "VerifyReport", "verify_store"]

_ARCHIVES = 8  # archives read at once


class VerifyReport(NamedTuple):
    """Counts of what was checked, and a sentence for each of the `faults`: the object, or the array and chunk.

    `versions` and `arrays` count what was checked; `chunks` and `bytes` what could be read, right or damaged.
    `foreign` lists the keys under the store's URL that no store writes, such as those of `zarr.open`. Such objects
    are not faults, since nothing reads them. The list omits hidden files; it is empty if storage can't be listed.
    `unchecked` lists the versions that could not be checked completely because the record of another version is
    damaged: their trees can't be built, or they lack objects that a gc with a damaged record may have deleted.
    """

    versions: int
    arrays: int
    chunks: int
    bytes: int
    faults: list[str]
    foreign: list[str]
    unchecked: list[int]

    def __repr__(self) -> str:
        nouns = ("version", "array", "chunk", "byte")
        counts = ", ".join(pluralize(getattr(self, f"{noun}s"), noun) for noun in nouns)
        return f"<tstore.VerifyReport ok={self.ok}: {counts}, {pluralize(len(self.faults), 'fault')}>"

    @property
    def ok(self) -> bool:
        """Whether there are no faults."""
        return not self.faults


class VerifyProgress(NamedTuple):
    """How much of a verification is done.

    `total_chunks` and `total_bytes` are 0 until all versions have been read; they include chunks that are missing.
    """

    versions: int
    total_versions: int
    chunks: int = 0
    total_chunks: int = 0
    bytes: int = 0
    total_bytes: int = 0
    faults: int = 0


async def verify_store(log: LogReader, progress: Callable[[VerifyProgress], object] | None = None) -> VerifyReport:
    """Read and check everything that living versions refer to; a chunk shared by versions is read once.

    Call `progress` after each version and each read, also from worker threads.
    """
    while True:
        newest = await log.newest()
        gap = await long_gap(log, newest, await listed_records(log))
        newest = gap.first - 1 if gap else newest
        known = await known_expiry(log, newest)
        # a reader that reads in order, so that it is the later one of two records that is out of place
        report = await _Verification(log.anew(), newest, known, gap, progress).run()
        if gap or report.ok:
            return report
        collection, _ = await last_readable_collection(log, await log.newest())
        if collection == known.collection:
            return report


class _Verification:
    """One verification of the versions up to the newest."""

    def __init__(
        self,
        log: LogReader,
        newest: int,
        known: KnownExpiry,
        gap: Gap | None,
        progress: Callable[[VerifyProgress], object] | None,
    ) -> None:
        self._log = log
        self._newest = newest
        self._progress = VerifyProgress(0, newest)
        self._report_progress = progress or (lambda progress: None)
        self._lock = threading.Lock()  # guards the progress, which worker threads update
        self._known = known
        self._gap = gap  # above the newest version, if it is a long one
        self._replayed = Replay(log, lambda version: not known.expired(version))
        self._last_collection: int | None = 0  # None after a damaged record, which may be that of a collection
        self._damaged: list[int] = []
        self._repairs = PastRepairs(log)
        self._archived: set[int] = set()  # the last version of each archive
        self._unlisted: set[int] = set()  # versions whose chunks are not listed; a later version may need some
        self._resumes = 0  # the version that has the changes of lost records
        self._unchecked = set(known.suspected)
        self._arrays: set[str] = set()
        self._nodes: dict[str, tuple[str, Document]] = {}
        self._chunks = DistinctChunks()
        self._transactions = TransactionIds()
        self._faults: list[str] = []
        self._compaction_faults: dict[int, str] = {}  # by version

    async def run(self) -> VerifyReport:
        """Verify the versions in order, then their chunks; return the report."""
        log, faults = self._log, self._faults
        previous = 0
        async for version, (record, manifests) in log.each(self._read, await self._versions_to_check()):
            if version > previous + 1:
                await self._skip_archived(version, record)
            previous = version
            await self._check_last_collection(version, record)
            if fault := await self._replayed.compaction_fault(version, record, manifests):
                self._compaction_faults[version] = fault
            if record is not None and (fault := await self._replayed.fault(version, record)):
                faults.append(fault)
            if record is not None:
                self._repairs.add(version, record)
            if record is not None and record.voids:  # compactions between have restated what it voided
                first = min(record.voids)
                self._compaction_faults = {v: f for v, f in self._compaction_faults.items() if v < first}
            if version % ROOT_EVERY == 0 and (fault := await self._replayed.root_fault(version)):
                faults.append(fault)
            for manifest in [*manifests, *await self._inherited(version, record)]:
                with self._reporting(f"version {version}: "):
                    await run(self._list_chunks, version, manifest)
            self._progress = self._progress._replace(versions=version, faults=len(faults))
            self._report_progress(self._progress)
        if self._gap is not None:
            faults.append(self._gap.message(log.storage.url))
        for missing in [] if self._gap else (await missing_records(log, self._newest))[:1]:
            reason = f"{log.storage.url}: {commit_key(missing)} is missing although later commits exist"
            faults.append(f"{reason}; restore it from a copy: until then the later commits can't be read")
        faults += (await self._repairs.restored()).values()
        if self._repairs.unlisted and not self._damaged:  # a record that was not read may list them
            with self._reporting(""):
                repairs = await PastRepairs.up_to(log, self._newest)
                faults += [interrupted_message(log.storage.url, version) for version in repairs.unlisted]
        faults += [*self._compaction_faults.values(), *await self._transactions.faults(log)]
        self._chunks.flush()
        totals = {"total_chunks": self._chunks.count, "total_bytes": self._chunks.bytes}
        self._progress = self._progress._replace(**totals, faults=len(faults))
        faults += await read_back(log.storage, self._chunks, self._add_read)
        counts = self._newest, len(self._arrays), self._progress.chunks, self._progress.bytes
        return VerifyReport(*counts, sorted(faults), await _foreign_keys(log.storage), sorted(self._unchecked))

    async def _versions_to_check(self) -> list[int]:
        """Check the archives; return the versions in none of them, the living ones, and those with their roots."""
        ends = range(ARCHIVE_EVERY, self._newest + 1, ARCHIVE_EVERY)
        for first in range(0, len(ends), _ARCHIVES):
            some = ends[first : first + _ARCHIVES]
            exist = await asyncio.gather(*map(self._check_archive, some))
            self._archived.update(itertools.compress(some, exist))
        if not self._archived:
            return list(range(1, self._newest + 1))
        self._faults += await foreign_archives(self._log, self._newest, await listed_records(self._log))
        alive = [*self._known.alive, *range(self._known.collection + 1, self._newest + 1)]
        kept = sorted({*alive, *roots_for(alive)})
        versions = list[int]()
        for end in range(ARCHIVE_EVERY, self._newest + ARCHIVE_EVERY, ARCHIVE_EVERY):
            first, stop = end - ARCHIVE_EVERY + 1, min(end, self._newest) + 1
            if end in self._archived:
                versions += kept[bisect.bisect_left(kept, first) : bisect.bisect_left(kept, stop)]
            else:
                versions += range(first, stop)
        return versions

    async def _check_archive(self, end: int) -> bool:
        """Return whether the archive that ends at a version exists; add a fault if it is damaged."""
        with self._reporting(""):
            return await self._log.commits.check_archive(end)
        return True

    async def _skip_archived(self, version: int, record: Record | None) -> None:
        """Continue at a version that follows archived records."""
        self._last_collection = None
        if record is not None and not await names_falsely(self._log, version, record):
            with contextlib.suppress(*UNREADABLE):
                self._last_collection = await existing_collection(self._log, record.collected)
        self._unlisted.add(version - 1)
        self._replayed.skip(version)

    def _add_read(self, chunks: int, size: int) -> None:
        """Report that chunks have been read."""
        with self._lock:
            done = self._progress
            self._progress = done._replace(chunks=done.chunks + chunks, bytes=done.bytes + size)
            self._report_progress(self._progress)

    @contextlib.contextmanager
    def _reporting(self, prefix: str) -> Iterator[None]:
        """Suppress an error of `UNREADABLE` in the block and add it to the faults."""
        try:
            yield
        except UNREADABLE as error:
            if (fault := f"{prefix}{error}") not in self._faults[-1:]:  # many segments may need one missing pack
                self._faults.append(fault)

    async def _read(self, version: int) -> tuple[Record | None, list[Manifest]]:
        """Return the record, None if it is damaged, and the intact manifests of the version if it is living."""
        record = None
        with self._reporting(""):
            record = (await self._log.records.stored_below(version, self._newest + 1)).record
            self._transactions.add(version, record)
            await check_references(self._log, version, record)
        if record is None or changes_nothing(record) or self._known.expired(version):
            return record, []
        manifests = await together(functools.partial(self._manifest, version), record.manifests)
        return record, list(itertools.chain.from_iterable(manifests))

    async def _manifest(self, version: int, reference: ObjectRef | Manifest) -> list[Manifest]:
        with self._reporting(f"version {version}: "):
            return await self._log.objects.manifest(reference)
        return []

    async def _check_last_collection(self, version: int, record: Record | None) -> None:
        """Add a fault if a record does not name the last garbage collection before it."""
        if record is None:
            self._last_collection = None
            return
        last = self._last_collection
        with contextlib.suppress(*UNREADABLE):  # reported by `_read`, for the version at fault
            named = await existing_collection(self._log, record.collected)
            if last is not None and named != last and not await names_falsely(self._log, version, record):
                self._faults.append(
                    f"{self._log.storage.url}: {commit_key(version)} names version {named} as the last garbage "
                    f"collection before it, but version {last} is; `tstore repair` can void {commit_key(version)}"
                )
        if record.collection is not None:
            self._last_collection = version

    async def _inherited(self, version: int, record: Record | None) -> list[Manifest]:
        """Return a manifest of the whole tree of a living version that may need unlisted chunks, or nothing."""
        if record is None:
            self._damaged.append(version)
            self._unlisted.add(version)
            return []
        if self._damaged[-1:] == [version - 1] == [record.collected]:
            self._unlisted.discard(version - 1)  # the damaged version is a garbage collection: it has no chunks
        self._resumes = max(self._resumes, record.resumes)
        if 0 < self._resumes <= version:
            self._unlisted.add(self._resumes)
            self._resumes = 0
        if changes_nothing(record) or record.source:  # a copy has no chunks but those that it lists
            return []
        if self._known.expired(version):
            self._unlisted.add(version)
            return []
        manifests = []
        if self._unlisted and not record.replaces:
            try:
                manifests.append(await run((await self._log.tree(version)).manifest))
            except UNREADABLE as error:
                if any(commit_key(damaged) in str(error) for damaged in self._damaged):
                    self._unchecked.add(version)
                    return []  # the next version tries again
                self._faults.append(f"version {version}, in chunks of older versions: {error}")
        self._unlisted.clear()
        return manifests

    def _list_chunks(self, version: int, manifest: Manifest) -> None:
        nodes, counts, limits = [], [], []  # per node: its rows in the manifest, the chunks in its grid
        for at, (path, metadata, _, tables) in enumerate(manifest.nodes()):
            node, limit = self._shared(path, metadata), self._chunks_in_grid(version, Node(path, metadata, tables))
            nodes.append(node)
            counts.append(sum([len(table) for table in tables if isinstance(table, ChunkTable)]))
            limits.append(limit)
            if limit is None:
                continue
            for segment in manifest.segments_at(at):
                with self._reporting(f"{array_label(version, path)}: "):
                    self._list_segment(version, node, limit, segment, manifest.source)
        owners = np.repeat(np.arange(len(nodes)), counts)
        self._chunks.add(self._inside(ChunkList([version] * len(nodes), nodes, owners, manifest.table), limits))

    def _shared(self, path: str, metadata: Document) -> tuple[str, Document]:
        """Return a node, the same object for many versions."""
        node = self._nodes.get(path)
        if node is None or not node[1].equals(metadata):
            node = self._nodes[path] = path, metadata
        return node

    def _chunks_in_grid(self, version: int, node: Node) -> int | None:
        """Return the chunks in the grid of an array, None if its metadata is damaged or it is a group."""
        with self._reporting(f"{array_label(version, node.path)}: "), parsing("its metadata"):
            if not node.is_array:
                _check_group(node.path, node)
                return None
            count = node.meta.chunk_count
            self._arrays.add(node.path)
            return count
        return None

    def _list_segment(
        self, version: int, node: tuple[str, Document], limit: int, segment: Segment, source: SegmentSource
    ) -> None:
        if segment.last < limit and segment in self._chunks:
            return
        [rows] = source.load((segment,))
        if segment.last < limit:
            self._chunks.add_segment(version, node, segment, source, rows)
        else:
            chunks = ChunkList([version], [node], np.zeros(len(rows), np.int64), rows)
            self._chunks.add(self._inside(chunks, [limit]))

    def _inside(self, chunks: ChunkList, limits: Sequence[int | None]) -> ChunkList:
        """Return the chunks in the grids of their arrays; add a fault for each chunk outside."""
        number, owners = chunks.rows.number, chunks.owners
        highest = np.array([min(limit or 0, 1 << 63) for limit in limits], np.uint64)
        outside = np.flatnonzero(number >= highest[owners])
        for at in outside.tolist():
            if limits[owners[at]] is not None:
                label = array_label(chunks.versions[owners[at]], chunks.nodes[owners[at]][0])
                self._faults.append(f"{label} has a chunk number {number[at]} outside of its grid")
        if not len(outside):
            return chunks
        kept = np.flatnonzero(number < highest[owners])
        return chunks._replace(owners=owners[kept], rows=chunks.rows.take(kept))


def _check_group(path: str, node: Node) -> None:
    """Raise `Corrupt` if the attributes of a group, or the structure of a checkpoint in them, do not parse."""
    node.metadata.check_group()
    reserved = None if path else node.attributes.get(RESERVED_ATTRIBUTE)
    if isinstance(reserved, dict) and "structure" in reserved and not is_document(reserved["structure"]):
        raise Corrupt("the structure of the saved tree does not parse; restore returns its arrays by path")


async def _foreign_keys(storage: Storage) -> list[str]:
    if not storage.capabilities.listing:
        return []
    keys = [key for key in await storage.list("") if not is_object(key)]
    return [key.encode(errors="backslashreplace").decode() for key in keys]  # file names may be invalid UTF-8
