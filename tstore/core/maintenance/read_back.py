"""Read chunks back from their packs, and compare their bytes with their checksums.

1. Take the chunks of one manifest or segment at a time. Sort them by pack and offset, and read chunks that are
   close together in one read.
2. Compare each chunk with its checksums. If a read of several chunks fails, read them one by one, to find those
   that can't be read.
3. Read a chunk without near neighbours in pieces, so that memory does not depend on its length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.data.reader import pack_reader, unreadable
from tstore.core.format.checksums import BLOCK, block_checks, checks_in
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.maintenance.distinct_chunks import ChunkList, UnreadSegment
from tstore.core.runtime.budget import scratch
from tstore.core.runtime.pool import each
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Tuning
from tstore.errors import Corrupt, NotFound

__all__ = ["read_back"]


class _Batch(NamedTuple):
    """The chunks from `start` to `stop` of a list, which is in the order of packs and offsets."""

    chunks: ChunkList
    start: int
    stop: int


class _Fault(NamedTuple):
    """The fault of a chunk; `unread` is its length if it could not be read."""

    sentence: str
    unread: int | None


async def read_back(
    storage: Storage, lists: Iterable[ChunkList | UnreadSegment], report: Callable[[int, int], object]
) -> list[str]:
    """Return a sentence for each chunk that can't be read or does not have its checksums.

    After each read, call `report`, in a worker thread, with the number and the bytes of the chunks that it read.
    """
    faults: list[str] = []

    def check(batch: _Batch) -> None:
        found = list(_faults(storage, batch))
        faults.extend(fault.sentence for fault in found)
        lengths = batch.chunks.rows.length[batch.start : batch.stop]
        unread = [fault.unread for fault in found if fault.unread is not None]
        report(len(lengths) - len(unread), int(lengths.sum()) - sum(unread))

    def batches() -> Iterator[_Batch]:
        for chunks in lists:
            if isinstance(chunks, UnreadSegment):
                try:
                    chunks = chunks.load()
                except (Corrupt, NotFound) as error:
                    faults.append(f"{chunks.label}: {error}")
                    continue
            yield from _batches(_sorted(chunks), storage.tuning)

    await each(check, batches(), storage.tuning.streams)
    return faults


def _sorted(chunks: ChunkList) -> ChunkList:
    """Return chunks by pack and offset."""
    rows = chunks.rows
    packs = sorted(enumerate(rows.packs), key=lambda item: (isinstance(item[1], bytes), str(item[1])[:1000]))
    rank = np.empty(len(packs), np.int64)
    rank[[position for position, _ in packs]] = np.arange(len(packs))
    rank = rank[rows.pack]
    rising = (rank[1:] > rank[:-1]) | ((rank[1:] == rank[:-1]) & (rows.offset[1:] >= rows.offset[:-1]))
    if rising.all():
        return chunks
    order = np.lexsort((rows.offset, rank))
    return chunks._replace(owners=chunks.owners[order], rows=rows.take(order))


def _batches(chunks: ChunkList, tuning: Tuning) -> Iterator[_Batch]:
    """Group chunks that are close together in a pack, up to about `tuning.batch` bytes; a long chunk is alone."""
    offset, pack = chunks.rows.offset.astype(np.int64), chunks.rows.pack
    end = offset + chunks.rows.length.astype(np.int64)
    gap = offset[1:] - end[:-1]
    apart = np.flatnonzero((pack[1:] != pack[:-1]) | (gap < 0) | (gap > tuning.gap)) + 1
    for first, last in itertools.pairwise([0, *apart.tolist(), len(pack)]):
        start = first
        while start < last:
            fitting = first + int(np.searchsorted(end[first:last], offset[start] + tuning.batch, "right"))
            stop = max(start + 1, fitting)
            yield _Batch(chunks, start, stop)
            start = stop


def _faults(storage: Storage, batch: _Batch) -> Iterator[_Fault]:
    """Yield the fault of each chunk of a batch that has one; read all chunks in one read if possible."""
    rows = batch.chunks.rows.part(batch.start, batch.stop)
    if len(rows) > 1:
        first, size = int(rows.offset[0]), int(rows.offset[-1] + rows.length[-1] - rows.offset[0])
        with scratch(size) as buffer:
            try:
                pack_reader(storage, rows.packs[rows.pack[0]]).read_into(first, [buffer], size)
            except (Corrupt, NotFound):
                pass  # at least one of the chunks can't be read
            else:
                starts = (rows.offset - rows.offset[0]).astype(np.int64)
                checks = checks_in(buffer.data, starts, rows.length.astype(np.int64))
                for at in _differing(rows, checks).tolist():
                    [row] = rows.part(at, at + 1).with_used_packs().rows
                    blocks = rows.blocks[at : at + 2].tolist()
                    mismatch = row.mismatch(checks[slice(*blocks)].tobytes(), storage.url)
                    yield _Fault(f"{batch.chunks.label(batch.start + at)}: {mismatch}", None)
                return
    for at in range(batch.start, batch.stop):
        label = batch.chunks.label(at)
        [row] = rows.take(np.array([at - batch.start])).rows
        try:
            checks_read = _checks_in_pack(storage, row)
        except (Corrupt, NotFound) as error:
            yield _Fault(str(unreadable(label, row.pack, storage.url, error)), row.length)
        else:
            if checks_read != row.checks:
                yield _Fault(f"{label}: {row.mismatch(checks_read, storage.url)}", None)


def _differing(rows: ChunkTable, checks: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    """Return the positions of the chunks whose checksums differ from these."""
    unequal = (rows.checks != checks).any(axis=1)
    if not unequal.any():
        return np.empty(0, np.intp)
    return np.flatnonzero(np.logical_or.reduceat(unequal, rows.blocks[:-1]))


def _checks_in_pack(storage: Storage, row: ChunkRow) -> bytes:
    """Return the checksums of the bytes at a chunk's offset in its pack, read in pieces of whole blocks."""
    size = max(BLOCK, storage.tuning.piece // BLOCK * BLOCK)
    checks = b""
    with scratch(min(row.length, size)) as buffer:
        reader = pack_reader(storage, row.pack)
        for start in range(0, row.length, size):
            piece = buffer[: min(size, row.length - start)]
            reader.read_into(row.offset + start, [piece], len(piece))
            checks += block_checks(piece.data)
    return checks
