"""Reading chunks back from their packs, to compare their bytes with their checksums.

1. Sort the chunks by pack and offset, and read chunks that are close together in one read.
2. Compare each chunk with its checksums. If a read of several chunks fails, read them one by one, to find those
   that can't be read.
3. Read a chunk without near neighbours in pieces, so that memory does not depend on its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tstore.data.reader import pack_reader
from tstore.errors import Corrupt, NotFound
from tstore.format.checksums import BLOCK, block_checks
from tstore.format.objects.chunk_rows import ChunkRow
from tstore.runtime.budget import scratch
from tstore.runtime.pool import each
from tstore.storage.base import Storage
from tstore.storage.objects import Tuning

__all__ = ["LabeledChunk", "read_back"]


class LabeledChunk(NamedTuple):
    """A chunk and its label in error messages: version, path and position in the grid."""

    row: ChunkRow
    label: str


async def read_back(
    storage: Storage, chunks: Iterable[LabeledChunk], report: Callable[[int, int], object]
) -> list[str]:
    """Return a sentence for each chunk that can't be read or does not have its checksums.

    Call `report`, in worker threads, with the number of chunks read and their bytes after each read.
    """
    in_order = sorted(chunks, key=lambda c: (isinstance(c.row.pack, bytes), str(c.row.pack), c.row.offset))
    faults: list[str] = []

    def check(batch: list[LabeledChunk]) -> None:
        faults.extend(list(_faults(storage, batch)))
        report(len(batch), sum(chunk.row.length for chunk in batch))

    await each(check, _batches(in_order, storage.tuning), storage.tuning.streams)
    return faults


def _batches(chunks: Iterable[LabeledChunk], tuning: Tuning) -> Iterator[list[LabeledChunk]]:
    """Group chunks that are close together in a pack, up to about `tuning.batch` bytes; a long chunk is alone."""
    batch: list[LabeledChunk] = []
    batch_start = batch_end = 0
    for chunk in chunks:
        pack, offset, chunk_end = chunk.row.pack, chunk.row.offset, chunk.row.offset + chunk.row.length
        near = bool(batch) and batch[0].row.pack == pack and 0 <= offset - batch_end <= tuning.gap
        if batch and not (near and chunk_end - batch_start <= tuning.batch):
            yield batch
            batch = []
        if not batch:
            batch_start = offset
        batch.append(chunk)
        batch_end = chunk_end
    if batch:
        yield batch


def _faults(storage: Storage, batch: list[LabeledChunk]) -> Iterator[str]:
    """Yield a sentence for each chunk of a batch that has a fault; read all chunks in one read if possible."""
    if len(batch) > 1:
        first, last = batch[0].row, batch[-1].row
        size = last.offset + last.length - first.offset
        with scratch(size) as buffer:
            try:
                pack_reader(storage, first.pack).read_into(first.offset, [buffer], size)
            except (Corrupt, NotFound):
                pass  # at least one of the chunks can't be read
            else:
                for row, label in batch:
                    start = row.offset - first.offset
                    checks = block_checks(buffer[start : start + row.length].data)
                    if checks != row.checks:
                        yield f"{label}: {row.mismatch(checks, storage.url)}"
                return
    for row, label in batch:
        try:
            checks = _checks_in_pack(storage, row)
        except (Corrupt, NotFound) as error:
            yield f"{label}: {error}"
        else:
            if checks != row.checks:
                yield f"{label}: {row.mismatch(checks, storage.url)}"


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
