"""The distinct references to chunks in many manifests, each with the label of the first version that has it.

Two references are equal if pack, offset, length and checksums are. Each has a 64-bit key in memory,
and each row a bit that says whether it is the first with its key. Segments are not kept, but read again.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from tstore.core.format.arrays.grid import chunk_coordinates
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.segments import Segment, SegmentSource

__all__ = ["ChunkList", "DistinctChunks", "array_label"]

_ROWS_TOGETHER = 4096

_Bits = npt.NDArray[np.uint8]


def array_label(version: int, path: str) -> str:
    """Return the name of an array or a group of a version in faults."""
    return f"version {version}: {path or 'the root group'}"


class ChunkList(NamedTuple):
    """Chunks of manifests or of a segment; `owners` has the position of each in `nodes` and `versions`."""

    versions: Sequence[int]
    nodes: Sequence[tuple[str, Document]]
    owners: npt.NDArray[np.integer[Any]]
    rows: ChunkTable

    def label(self, position: int) -> str:
        """Return the name of the chunk at a position in faults: its version, path and place in the grid."""
        owner = self.owners[position]
        path, metadata = self.nodes[owner]
        place = chunk_coordinates(int(self.rows.number[position]), metadata.meta.counts)
        return f"{array_label(self.versions[owner], path)}, chunk {place}"

    @staticmethod
    def concat(lists: Sequence[ChunkList]) -> ChunkList:
        """Return the chunks of all lists, one list after the other."""
        if len(lists) == 1:
            return lists[0]
        starts = itertools.accumulate([len(chunks.nodes) for chunks in lists], initial=0)
        return ChunkList(
            [version for chunks in lists for version in chunks.versions],
            [node for chunks in lists for node in chunks.nodes],
            np.concatenate([chunks.owners + start for chunks, start in zip(lists, starts, strict=False)]),
            ChunkTable.concat([chunks.rows for chunks in lists]),
        )


class UnreadSegment(NamedTuple):
    """A segment to read again; `first` has a bit for each row, or None if every chunk is listed here first."""

    version: int
    node: tuple[str, Document]
    segment: Segment
    source: SegmentSource
    first: _Bits | None

    def load(self) -> ChunkList:
        """Return the chunks that are listed here first; reads the segment."""
        [rows] = self.source.load((self.segment,))
        if self.first is not None:
            rows = rows.take(np.flatnonzero(np.unpackbits(self.first, count=len(rows))))
        return ChunkList((self.version,), (self.node,), np.zeros(len(rows), np.uint8), rows)

    @property
    def label(self) -> str:
        """The name of the array in faults."""
        return array_label(self.version, self.node[0])


class DistinctChunks:
    """The distinct references to chunks, in the order in which they were added."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self._keys = _Keys()
        self._segments: set[Segment] = set()
        self._lists: list[ChunkList | UnreadSegment] = []
        self._pending: list[ChunkList] = []  # those of many small commits are added together
        self._pending_rows = 0

    def __contains__(self, segment: Segment) -> bool:
        """Return whether all chunks of a segment were added."""
        return segment in self._segments

    def __iter__(self) -> Iterator[ChunkList | UnreadSegment]:
        return iter(self._lists)

    def add(self, chunks: ChunkList) -> None:
        """Add chunks, or wait for more; keep those that are new."""
        self._pending.append(chunks)
        self._pending_rows += len(chunks.rows)
        if self._pending_rows >= _ROWS_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Add the chunks that wait for more."""
        if not self._pending_rows:
            self._pending.clear()
            return
        chunks = ChunkList.concat([chunks for chunks in self._pending if len(chunks.rows)])
        self._pending.clear()
        self._pending_rows = 0
        rows, owners = chunks.rows, chunks.owners
        first = self._first(rows)
        if not first.all():
            at = np.flatnonzero(first)
            rows, owners = rows.take(at), owners[at]
        if len(rows):
            self._lists.append(chunks._replace(owners=owners, rows=rows))

    def add_segment(
        self, version: int, node: tuple[str, Document], segment: Segment, source: SegmentSource, rows: ChunkTable
    ) -> None:
        """Add the chunks of a segment, all of which are in the grid of its array."""
        self.flush()
        self._segments.add(segment)
        first = self._first(rows)
        if first.any():
            bits = None if first.all() else np.packbits(first)
            self._lists.append(UnreadSegment(version, node, segment, source, bits))

    def _first(self, rows: ChunkTable) -> npt.NDArray[np.bool_]:
        first = self._keys.add(_keys_of(rows))
        self.count += int(first.sum())
        self.bytes += int(rows.length[first].sum())
        return first


class _Keys:
    """A set of keys in sorted columns, each at most half as long as the one before it."""

    def __init__(self) -> None:
        self._columns: list[npt.NDArray[np.uint64]] = []

    def add(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Add keys; return for each whether it is the first of its value."""
        order = np.argsort(keys, kind="stable")
        values = keys[order]
        first = np.ones(len(keys), np.bool_)
        first[1:] = values[1:] != values[:-1]
        for column in self._columns:
            at = np.minimum(np.searchsorted(column, values), len(column) - 1)
            first &= column[at] != values
        if first.any():
            self._push(values[first])
        mask = np.empty(len(keys), np.bool_)
        mask[order] = first
        return mask

    def _push(self, values: npt.NDArray[np.uint64]) -> None:
        columns = self._columns
        columns.append(values)
        while len(columns) > 1 and len(columns[-2]) < 2 * len(columns[-1]):
            merged = np.concatenate(columns[-2:])
            merged.sort()
            columns[-2:] = [merged]


_SALT = secrets.randbits(63)  # prevents crafted references with colliding keys, which would be skipped


def _keys_of(rows: ChunkTable) -> npt.NDArray[np.uint64]:
    """Return a key of 64 bits for each row, of its pack, offset, length and checksums."""
    names = (pack if isinstance(pack, bytes) else f"\0{pack}".encode() for pack in rows.packs)
    packs = [xxhash.xxh3_64_intdigest(name, _SALT) for name in names]
    halves = np.ascontiguousarray(rows.checks).view("<u8")
    checks = _mixed(_mixed(halves[:, 0] + np.uint64(_SALT)) + halves[:, 1])
    if len(checks) != len(rows):  # some chunk has many blocks
        first = rows.blocks[:-1]
        place = np.arange(len(checks)) - np.repeat(first, np.diff(rows.blocks))
        checks = np.add.reduceat(_mixed(checks + place.astype(np.uint64)), first)
    parts = (rows.offset, rows.length, checks)
    return functools.reduce(lambda key, part: _mixed(key + part), parts, np.array(packs, np.uint64)[rows.pack])


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the values permuted by the finalizer of splitmix64, so that each bit depends on all."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
