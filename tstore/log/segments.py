"""The segments of a store's manifests: read when a lookup needs them, verified, and cached up to a bound."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from tstore.errors import Corrupt, NotFound
from tstore.format.chunk_refs import ChunkTable
from tstore.format.segments import Segment, decode_segment
from tstore.storage.base import Storage
from tstore.storage.cache import forget

__all__ = ["SegmentReader"]

_CACHED_BYTES = 32 << 20


class SegmentReader:
    """Reads the segments of one store; threads may share it."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._cached: OrderedDict[Segment, ChunkTable] = OrderedDict()
        self._size = 0

    def load(self, segments: Sequence[Segment]) -> list[ChunkTable]:
        """Return the rows of each segment; blocking. Raise `Corrupt`, or `NotFound` if a pack is missing."""
        return [self._load(segment) for segment in segments]

    def _load(self, segment: Segment) -> ChunkTable:
        with self._lock:
            table = self._cached.get(segment)
            if table is not None:
                self._cached.move_to_end(segment)
                return table
        try:
            table = self._read(segment)
        except Corrupt:
            if not forget(self._storage, segment.pack):
                raise
            table = self._read(segment)  # the damage may have been in a cached copy, which is deleted now
        with self._lock:
            if self._cached.setdefault(segment, table) is table:
                self._size += segment.length
            while self._size > _CACHED_BYTES and len(self._cached) > 1:
                self._size -= self._cached.popitem(last=False)[0].length
        return table

    def _read(self, segment: Segment) -> ChunkTable:
        data = bytearray(segment.length)
        try:
            self._storage.reader(segment.pack).read_into(segment.offset, [memoryview(data)], segment.length)
            return decode_segment(bytes(data), segment)
        except NotFound as error:
            raise NotFound(f"{self._storage.url}: {segment.pack} is missing; restore it from a copy") from error
        except Corrupt as error:
            raise Corrupt(f"{self._storage.url}: {error}") from error
