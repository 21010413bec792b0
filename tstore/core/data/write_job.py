"""The chunks to write of one array, and the references to them once they are written; pure, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import PAGE
from tstore.core.format.checksums import BLOCK, CHECK_SIZE, as_checks, block_checks
from tstore.core.format.objects.chunk_refs import ChunkSource, ChunkTable
from tstore.core.format.objects.chunk_rows import SHORT_COLUMN, ChunkRow, chunk_rows
from tstore.core.format.objects.segments import Segment

__all__ = ["EncodedRun", "StagedChunks", "Values", "WriteJob", "joined_checks"]

_MIN_PAGED = 128 << 10  # bytes of a run that is page-aligned; the padding is at most 3 % of it
_ALIGNMENT = 64  # suits every dtype, and the vector instructions of processors

Values = npt.NDArray[Any]


class StagedChunks(NamedTuple):
    """Whole unencoded chunks with these numbers, contiguous in `memory` from offset `start`.

    Nothing changes the bytes until they are written, so they are not copied again.
    """

    numbers: Sequence[int]
    memory: npt.NDArray[np.uint8]
    start: int


class WriteJob(msgspec.Struct, eq=False, gc=False):
    """Values for whole chunks of one array, and the references to these chunks once they are written (`rows`).

    Each of `regions` has the coordinates of its first chunk and its values, and ends at the edge of a chunk or of
    the array. Regions are taken one by one, as chunks are written. `prior_chunks` are those of an earlier version:
    a chunk with equal bytes is reused. A job without regions may name another job in `same_as`: it then gets the
    references of that job. `staged` are further chunks, already in their stored form.

    Unless `segments` is None, references to many chunks do not go to `rows`: they are collected in `tables`, and
    those of a long array are written as segments.
    """

    path: str
    meta: ArrayMeta
    regions: Iterable[tuple[tuple[int, ...], Values]]
    prior_chunks: ChunkSource | None = None
    same_as: WriteJob | None = None
    staged: Sequence[StagedChunks] = ()
    rows: list[ChunkRow] = []
    tables: Sequence[ChunkTable] = ()
    segments: Sequence[Segment] | None = None

    @property
    def has_values(self) -> bool:
        """Whether there is anything to write: a host may have no values of an array."""
        return bool(self.regions or self.staged)

    def take_references(self) -> None:
        """Take the references of the job in `same_as`, if there is one."""
        if (other := self.same_as) is not None:
            self.rows, self.tables, self.segments = other.rows, other.tables, other.segments


class EncodedRun(NamedTuple):
    """Encoded chunks, each of `length` bytes, in sequence in `data`; `jobs` has one job, or one per chunk.

    `known_checks` are the joined checksums, if they are already known.
    """

    jobs: Sequence[WriteJob]
    numbers: Sequence[int]
    data: memoryview
    length: int
    known_checks: bytes = b""

    @property
    def check_size(self) -> int:
        """The length of the joined checksums of one chunk."""
        return CHECK_SIZE * max(1, -(-self.length // BLOCK))

    def checks(self) -> bytes:
        """Return the joined checksums of all chunks."""
        return self.known_checks or block_checks(self.data, self.length)

    @property
    def alignment(self) -> int:
        """The alignment of the run's offset in its pack, so that its values can be mapped."""
        if not self.jobs[0].meta.chain.identity:
            return 1
        return PAGE if len(self.data) >= _MIN_PAGED else _ALIGNMENT

    def part(self, start: int, stop: int) -> EncodedRun:
        """Return the chunks from the position `start` up to `stop`."""
        jobs = self.jobs if len(self.jobs) == 1 else self.jobs[start:stop]
        data = self.data[start * self.length : stop * self.length]
        return EncodedRun(jobs, self.numbers[start:stop], data, self.length)

    def add_rows(self, pack: str | bytes, offset: int, checks: bytes) -> None:
        """Add to each job the references to its chunks; the run was written to a pack at `offset`."""
        offsets = range(offset, offset + len(self.data), self.length)
        each_checks = joined_checks(checks, self.check_size)
        rows = chunk_rows(self.numbers, repeat(pack), offsets, repeat(self.length), each_checks)
        if len(self.jobs) == 1:
            self.jobs[0].rows += rows
            return
        for job, row in zip(self.jobs, rows, strict=True):
            job.rows.append(row)

    @property
    def is_of_long_array(self) -> bool:
        """Whether these are many chunks of one job that collects `tables`."""
        return len(self.jobs) == 1 and self.jobs[0].segments is not None and len(self.numbers) > SHORT_COLUMN

    def table(self, pack: str, offset: int, checks: bytes) -> ChunkTable:
        """Return the references to the chunks; the run was written to a pack at `offset`."""
        count = len(self.numbers)
        return ChunkTable.from_columns(
            (pack,),
            np.asarray(self.numbers, "<u8"),
            np.zeros(count, "<u4"),
            np.arange(offset, offset + len(self.data), self.length, dtype="<u8"),
            np.full(count, self.length, "<u8"),
            as_checks(checks),
        )


def joined_checks(checks: bytes, size: int) -> list[bytes]:
    """Split joined checksums of many chunks, `size` bytes per chunk."""
    return [checks[i : i + size] for i in range(0, len(checks), size)]
