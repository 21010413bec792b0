"""The segments of a store's manifests: read when a lookup needs them, verified, and cached up to a bound."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.segments import Segment, decode_segment
from tstore.core.log.ranges import Ranges, read_range
from tstore.core.storage.base import Storage

__all__ = ["SegmentReader"]


class SegmentReader:
    """Reads the segments of one store; threads may share it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._cached: Ranges[Segment, ChunkTable] = Ranges()

    def load(self, segments: Sequence[Segment]) -> list[ChunkTable]:
        """Return the rows of each segment; blocking. Raise `Corrupt`, or `NotFound` if a pack is missing."""
        return [self._load(segment) for segment in segments]

    def _load(self, segment: Segment) -> ChunkTable:
        table = self._cached.get(segment)
        if table is None:
            table = self._cached.put(segment, self._read(segment), segment.length)
        return table

    def _read(self, segment: Segment) -> ChunkTable:
        decode = functools.partial(decode_segment, segment=segment)
        return read_range(self._storage, segment.pack, segment.offset, segment.length, decode)
