"""The packs of other transactions to which a transaction refers: whether they still have its chunks.

A save refers to the unchanged chunks of the newest step, and a copy to the chunks of its source, without reading
them. If one of their packs is lost or cut short, the commit would be acknowledged and could not be read. So each
pack is looked up once before the commit, even if this process has just written it. Bytes that changed in place are
noticed only when they are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from tstore.core.data.write_job import WriteJob
from tstore.core.format.layout import folder_of
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.layers import Table, segments_first, segments_of
from tstore.core.format.tree.validation import chunk_ends, short_packs
from tstore.core.storage.base import Storage
from tstore.errors import Corrupt, NotFound

__all__ = ["ReusedPacks"]


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
        for pack, fault in short_packs(ends, await storage.sizes(ends)).items():
            raise Corrupt(
                f"{storage.url}: {self._paths[pack]} refers to chunks of an earlier commit, but {fault}; restore "
                "the pack from a copy of the store, or write the array's values again"
            )
