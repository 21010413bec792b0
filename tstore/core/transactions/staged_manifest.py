"""The manifest of a transaction's staged changes, and a check of the other packs to which it refers.

A manifest of few chunks is built without NumPy, whose call overhead would dominate a small commit.

A save refers to the unchanged chunks of the newest step, and a copy to the chunks of its source, without reading
them. If one of their packs is lost or cut short, the commit would be acknowledged and could not be read. So each
pack is looked up once before the commit, even if this process has just written it. Bytes that changed in place are
noticed only when they are read.
"""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import astuple

from tstore.core.data.write_job import WriteJob
from tstore.core.format.bounds import NODE_METADATA_LEVELS
from tstore.core.format.checksums import BLOCK
from tstore.core.format.layout import folder_of
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import SHORT_COLUMN, ChunkRow
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.tables import Table, overlay, segments_first, segments_of
from tstore.core.format.tree.validation import chunk_ends, short_packs
from tstore.core.storage.base import Storage
from tstore.core.transactions.staged_array import StagedArray
from tstore.errors import Corrupt, NotFound

__all__ = ["ReusedPacks", "any_segments", "short_manifest", "staged_manifest"]


def short_manifest(
    nodes: Sequence[tuple[str, bytes, int]], counts: Sequence[int], rows: Sequence[ChunkRow]
) -> Manifest:
    """Build the manifest as `Manifest.from_table` does for a table of these rows, but without NumPy."""
    documents: dict[bytes, int] = {}
    packs: dict[str | bytes, int] = {}
    columns = zip(*map(astuple, rows), strict=True) if rows else ((),) * 5
    numbers, keys, offsets, lengths, checks = columns
    paths, per_node, flags = zip(*nodes, strict=True) if nodes else ((),) * 3
    positions = [documents.setdefault(document, len(documents)) for document in per_node]
    places = [packs.setdefault(key, len(packs)) for key in keys]
    u32, u64 = struct.Struct(f"<{len(rows)}I").pack, struct.Struct(f"<{len(rows)}Q").pack
    manifest = Manifest(
        packs=tuple([pack if isinstance(pack, str) else "" for pack in packs]),
        inline=tuple([pack for pack in packs if isinstance(pack, bytes)]),
        documents=tuple(documents),
        paths=paths,
        document=struct.pack(f"<{len(nodes)}I", *positions),
        replaces_node=bytes(flags),
        count=struct.pack(f"<{len(nodes)}Q", *counts),
        number=u64(*numbers),
        pack=u32(*places),
        offset=u64(*offsets),
        length=u64(*lengths),
        checks=b"".join(checks),
    )
    inline = len(manifest.inline) == len(packs)
    if inline and max(lengths, default=0) <= BLOCK and max(map(len, documents), default=0) <= NODE_METADATA_LEVELS:
        return manifest.with_table(ChunkTable.from_rows(rows))  # so nothing in it needs a check
    return manifest


_has_segments = operator.attrgetter("has_segments")


def any_segments(arrays: Mapping[str, StagedArray]) -> bool:
    """Return whether `staged_manifest` may read segments of the arrays, and so block."""
    return any(map(_has_segments, arrays.values()))


def staged_manifest(arrays: Mapping[str, StagedArray], groups: Mapping[str, bytes]) -> Manifest:
    """Return a manifest of staged arrays, and of groups given by their documents, sorted by path."""
    paths = sorted([*groups, *arrays])
    if any_segments(arrays):
        with_segments = [(p, a.meta.document, a.flags, a.staged_chunks()) for p, a in arrays.items()]
        compactions = {path: array.compaction for path, array in arrays.items() if array.compaction is not None}
        without_chunks = [(path, document, 1, ()) for path, document in groups.items()]
        return Manifest.from_nodes([*without_chunks, *with_segments], compactions)
    nodes: list[tuple[str, bytes, int]] = []
    counts: list[int] = []
    tables: list[ChunkTable] = []
    rows: list[ChunkRow] = []  # rows of the arrays since the last table
    for path in paths:
        array = arrays.get(path)
        if array is None:
            nodes.append((path, groups[path], 1))
            counts.append(0)
            continue
        nodes.append((path, array.meta.document, array.flags))
        written = array.written_rows
        if written is not None:
            rows += written
            counts.append(len(written))
        else:
            tables += [ChunkTable.from_rows(rows), overlay(array.staged_chunks())]
            rows = []
            counts.append(len(tables[-1]))
    if not tables and len(rows) <= SHORT_COLUMN and _rows_ascend(rows, counts):
        return short_manifest(nodes, counts, rows)
    last = ChunkTable.from_rows(rows)
    table = ChunkTable.concat([*tables, last]).with_used_packs() if tables else last
    if _ascend(table.number, counts):
        return Manifest.from_table(nodes, counts, table)
    stops = itertools.accumulate(counts)  # rows out of order, as worker threads wrote the chunks
    parts = [(table.part(stop - count, stop),) for stop, count in zip(stops, counts, strict=True)]
    return Manifest.from_nodes([(*node, part) for node, part in zip(nodes, parts, strict=True)])


def _rows_ascend(rows: Sequence[ChunkRow], counts: Sequence[int]) -> bool:
    """Return whether the numbers ascend within each of the consecutive ranges of rows of these lengths."""
    if len(rows) <= 1:
        return True
    ends = set(itertools.accumulate(counts))
    pairs = enumerate(itertools.pairwise(rows), 1)
    return all(before.number < after.number or at in ends for at, (before, after) in pairs)


def _ascend(numbers: npt.NDArray[np.uint64], counts: list[int]) -> bool:
    """Return whether the numbers ascend within each of the consecutive ranges of these lengths."""
    if len(numbers) < 2:
        return True
    falls = np.flatnonzero(numbers[1:] <= numbers[:-1]) + 1
    return bool(np.isin(falls, np.cumsum(counts)).all())


class ReusedPacks:
    """The packs to which a transaction refers, with the last end in each, and the array that refers to it."""

    def __init__(self, transaction: str) -> None:
        self._own = f"{folder_of(transaction)}/"
        self._ends: dict[str | bytes, int] = {}
        self._paths: dict[str | bytes, str] = {}

    def add_jobs(self, jobs: Iterable[WriteJob]) -> None:
        """Add the references of jobs that have compared their values with those of an earlier version."""
        ends, paths = self._ends, self._paths
        for job in jobs:
            if job.prior_chunks is not None:
                for row in job.rows:
                    end = row.offset + row.length
                    if end > ends.get(row.pack, -1):
                        ends[row.pack], paths[row.pack] = end, job.path

    def add_arrays(self, arrays: Mapping[str, Sequence[Table]]) -> None:
        """Add the references in the tables of arrays, given by path; reads all segments, one at a time.

        Raise `Corrupt` if one can't be read.
        """
        for path, tables in arrays.items():
            for segment in segments_of(tables):
                self._add(path, segment.pack, segment.offset + segment.length)
            try:
                first = segments_first(tables)
                # a collection may have deleted the packs of chunks that later rows replace
                newest = ChunkTable.overlay([table for table in first if isinstance(table, ChunkTable)])
                segmented = (table.tables() for table in first if not isinstance(table, ChunkTable))
                for part in itertools.chain([newest], *segmented):
                    for pack, end in zip(part.packs, chunk_ends(part), strict=True):
                        if end:
                            self._add(path, pack, end)
            except (Corrupt, NotFound) as error:
                raise Corrupt(f"{path}: {error}") from error

    def _add(self, path: str, pack: str | bytes, end: int) -> None:
        if end > self._ends.get(pack, -1):
            self._ends[pack], self._paths[pack] = end, path

    async def check(self, storage: Storage) -> None:
        """Raise `Corrupt`, naming an array, if a pack that another transaction wrote is missing or too short."""
        ends = {p: end for p, end in self._ends.items() if isinstance(p, str) and not p.startswith(self._own)}
        faults = short_packs(ends, await storage.sizes(ends)) if ends else {}
        for pack, fault in faults.items():
            raise Corrupt(
                f"{storage.url}: {self._paths[pack]} refers to chunks of an earlier commit, but {fault}; restore "
                "the pack from a copy of the store, or write the array's values again"
            )
