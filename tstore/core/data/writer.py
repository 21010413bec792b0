"""Write to packs: copy, encode and checksum values, and compare them with an earlier version.

The bytes written are always those that were hashed, even if the caller changes its arrays meanwhile: values are
first copied into a worker's scratch memory, and the copy is encoded, hashed and written while it is in the CPU's
caches. Short chunks are written in batches; one call gathers and hashes a batch (`batches`). A long
unencoded chunk, with any strides, is copied, hashed and written block by block: a copy of the whole chunk would
leave the caches. A save in the background takes the interpreter's
lock less often: its batches are longer than the caches, and long chunks are among them. Staged chunks, which
nothing can change, are not copied. If a chunk has the same checksums as in the earlier version, the new version
refers to the old bytes, and none are written.

A file system serializes the writers of one file, so each worker has its own pack. When a pack is full, it is
finished and the worker begins the next one.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.data.batches import (
    BATCH,
    Batch,
    BatchSize,
    ChunkBox,
    Stack,
    StagedRun,
    batches,
    box_numbers,
    encoded_chunks,
)
from tstore.core.data.write_job import EncodedRun, Values, WriteJob, joined_checks
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import PAGE
from tstore.core.format.checksums import BLOCK, CHECK_SIZE, digest
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.segments import MIN_SEGMENTED, SEGMENT_ROWS, Segment, cut, encode_segment
from tstore.core.runtime import pool, world
from tstore.core.runtime.budget import BUDGET, scratch
from tstore.core.runtime.pool import WORKERS, each, give_way_in_worker, has_low_priority
from tstore.core.storage.base import PackWriter, Storage
from tstore.core.storage.objects import BufferStream, Durability

__all__ = ["PackSet", "WriteJob", "blocks_of", "blocks_to_compare"]


def blocks_of(
    values: Values, dtype: np.dtype[Any], buffer: npt.NDArray[np.uint8]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield copies of the blocks of values in C order, cast to a dtype; each is valid until the next one.

    `buffer` has the size of a block. A block may end within a value.
    """
    size = values.size * dtype.itemsize
    per_block = BLOCK // dtype.itemsize
    if BLOCK % dtype.itemsize:
        data = np.ascontiguousarray(values, dtype).reshape(-1).view(np.uint8)
        for start in range(0, size, BLOCK):
            block = buffer[: size - start]
            np.copyto(block, data[start : start + BLOCK])
            yield block
        return
    flat = values.reshape(-1) if values.flags.c_contiguous else None
    for start in range(0, values.size, per_block):
        stop = min(start + per_block, values.size)
        block = buffer[: (stop - start) * dtype.itemsize]
        if flat is None:
            _copy_elements(values, start, stop, block.view(dtype))
        else:
            np.copyto(block.view(dtype), flat[start:stop], casting="same_kind")
        yield block


def blocks_to_compare(
    values: Values, dtype: np.dtype[Any], buffer: npt.NDArray[np.uint8]
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the blocks as `blocks_of` does, but without a copy where the values are contiguous.

    Use them only for a comparison: the caller of a save may change its values before they could be written.
    """
    if values.dtype != dtype or not values.flags.c_contiguous:
        yield from blocks_of(values, dtype, buffer)
        return
    data = values.reshape(-1).view(np.uint8)
    yield from (data[start : start + BLOCK] for start in range(0, len(data), BLOCK))


def _copy_elements(values: Values, start: int, stop: int, out: Values) -> None:
    """Copy the elements `start:stop` in C order: whole rows, and parts of the first and last row."""
    if values.ndim < 2 or values.flags.c_contiguous:
        np.copyto(out, values.reshape(-1)[start:stop], casting="same_kind")
        return
    row = math.prod(values.shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # a part of one row
        _copy_elements(values[last], start - last * row, stop - last * row, out)
        return
    before, inside = first * row - start, (last - first) * row
    if before:
        _copy_elements(values[first - 1], row - before, row, out[:before])
    target = out[before : before + inside].reshape(last - first, *values.shape[1:])
    np.copyto(target, values[first:last], casting="same_kind")
    if stop > last * row:
        _copy_elements(values[last], 0, stop - last * row, out[before + inside :])


_ZEROS = bytes(PAGE)
_WORKER_SHARE = 2 << 20  # bytes that make another worker worthwhile
_BATCH_SECONDS, _CHUNK_SECONDS = 60e-6, 4e-6  # time with the interpreter's lock held, per batch and per chunk
# Each batch of a background save takes the interpreter's lock a few times. The buffers of its workers stay within
# the half of the budget that threads retain; chunks that are encoded one by one gain nothing from longer batches.
_BACKGROUND_BATCH = BatchSize(copied=min(32 << 20, BUDGET // WORKERS), encoded=8 << 20, staged=64 << 20)
_BACKGROUND_UPLOAD = BatchSize(copied=8 << 20, encoded=8 << 20, staged=8 << 20)  # packs in memory are shorter
_MIN_TABLES = 16  # tables collected before they are counted
INLINE_BYTES = 4096  # maximum encoded bytes of a transaction that are stored in its manifest rather than in a pack


class PackSet:
    """The packs and the inline chunks of one host in one transaction."""

    def __init__(self, storage: Storage, folder: str, durability: Durability) -> None:
        self._storage = storage
        self._folder = folder
        self._durability = durability
        self._background_limits = _BACKGROUND_BATCH if storage.capabilities.native_io else _BACKGROUND_UPLOAD
        self._idle: list[PackWriter] = []  # not full, and not in use by a worker
        self._ends: dict[str, int] = {}  # the length of each pack
        self._all: list[PackWriter] = []  # written since the last `flush`
        self._lock = threading.Lock()
        self._prefix = ""  # the prefix of pack keys, chosen before the first pack is written
        self._pack_count = 0
        self._inline_size = 0
        self.bytes_written = 0
        self.bytes_reused = 0  # of unchanged chunks, to which the new version refers

    async def write(self, jobs: Iterable[WriteJob]) -> None:
        """Write the chunks of all jobs, and fill in the references; they are durable only after `flush`."""
        limits = self._background_limits if has_low_priority() else BATCH
        rest = batches(jobs, limits)
        # enough for all workers, and at least two: then a single batch in `head` is the whole write
        shortest = min(limits.copied, limits.encoded)
        most = max(2, WORKERS * _WORKER_SHARE // shortest)
        head = deque(itertools.islice(rest, most))
        if not head:
            return
        if len(head) == 1 and self._inline_size + head[0].encoded_size <= INLINE_BYTES:
            self._write_inline(head[0])  # takes less time than the hop to a thread
            return
        self._choose_prefix()
        size = sum(batch.size for batch in head)
        workers = max(1, min(-(-size // _WORKER_SHARE), len(head) if len(head) < most else WORKERS, WORKERS))
        all_batches = itertools.chain(_popped(head), rest)
        collecting: list[WriteJob] = []  # jobs with tables or segments
        await each(functools.partial(self._write_batch, collecting), all_batches, workers)
        for job in collecting:
            if job.segments or sum(map(len, job.tables)) > MIN_SEGMENTED:
                segments = await self.write_segments(ChunkTable.overlay(job.tables))
                job.tables, job.segments = (), (*(job.segments or ()), *segments)

    def write_inline(self, meta: ArrayMeta, number: int, values: Values) -> ChunkRow | None:
        """Write one whole chunk into the manifest; return None if `write` would not write it there unencoded."""
        if not meta.chain.identity or self._inline_size + meta.encoded_size > INLINE_BYTES:
            return None
        data = values.astype(meta.dtype, casting="same_kind", copy=False).tobytes()
        self._inline_size += len(data)
        self.bytes_written += len(data)
        return ChunkRow(number, data, 0, len(data), digest(data))

    async def flush(self) -> None:
        """Finish all packs; return when they are as durable as the transaction requires."""
        if self._all:
            # the others were finished when full
            await each(methodcaller("finish"), self._idle, min(WORKERS, len(self._idle)))
            await self._storage.flush(self._folder, self._durability)
        self._all, self._idle = [], []

    async def write_segments(self, table: ChunkTable) -> list[Segment]:
        """Write the rows of a table as segments and return the references to them."""
        self._choose_prefix()
        return await pool.run(self._write_table, table)

    async def write_bytes(self, chunks: Sequence[bytes | memoryview]) -> tuple[str, int]:
        """Write the bytes of chunks of earlier commits; return their pack, and the offset of the first."""
        self._choose_prefix()
        return await pool.run(self._append, chunks, sum(map(len, chunks)))

    def _choose_prefix(self) -> None:
        self._prefix = self._prefix or f"{self._folder}/pack-{world.token(4)}"

    def _collect(self, collecting: list[WriteJob], job: WriteJob, table: ChunkTable) -> None:
        """Add references to a job; if it has collected many, write the first of them as segments.

        The last ones are kept, since a chunk with a smaller number may be written later, by another thread.
        """
        with self._lock:
            job.tables = [*job.tables, table]
            if job not in collecting:
                collecting.append(job)
            if len(job.tables) < _MIN_TABLES or sum(map(len, job.tables)) < 4 * SEGMENT_ROWS:
                return
            collected = ChunkTable.overlay(job.tables)
            kept = len(collected) - SEGMENT_ROWS
            job.tables = [collected.part(kept, len(collected))]
        segments = self._write_table(collected.part(0, kept))
        with self._lock:
            job.segments = (*(job.segments or ()), *segments)

    def _write_table(self, table: ChunkTable) -> list[Segment]:
        return list(map(self._write_segment, cut(table)))

    def _write_segment(self, part: ChunkTable) -> Segment:
        data, packs = encode_segment(part)
        number, stored = part.number, int(part.length.sum())
        key, offset = self._append([data], len(data))
        first, last = int(number[0]), int(number[-1])
        return Segment(first, last, len(part), stored, packs, key, offset, len(data), digest(data))

    async def discard(self) -> None:
        """Discard all packs written since the last `flush`."""
        packs, self._all, self._idle = self._all, [], []
        await each(methodcaller("discard"), packs)

    def _append(self, buffers: BufferStream, size: int, alignment: int = 1) -> tuple[str, int]:
        """Append the buffers to a pack at a multiple of `alignment`; return its key and the offset."""
        while True:
            with self._lock:
                pack = self._idle.pop() if self._idle else None
                if pack is None:
                    pack = self._storage.writer(f"{self._prefix}-{self._pack_count}", self._durability)
                    self._pack_count += 1
                    self._all.append(pack)
            gap = -self._ends.get(pack.key, 0) % alignment
            try:
                offset = pack.append(itertools.chain([_ZEROS[:gap]], buffers) if gap else buffers, gap + size)
            except BaseException:
                with self._lock:
                    self._idle.append(pack)
                raise
            if offset is not None:
                self._ends[pack.key] = offset + gap + size
                with self._lock:
                    self._idle.append(pack)
                return pack.key, offset + gap
            pack.finish()  # it is full

    def _count(self, size: int) -> None:
        """Count the bytes of chunks that were appended."""
        with self._lock:
            self.bytes_written += size

    def _write_inline(self, batch: Batch) -> None:
        with encoded_chunks(batch.boxes) as encoded:
            for run, checks in self._changed(encoded):
                data = bytes(run.data)
                run.add_rows(data, 0, checks)
                self._inline_size += len(data)
                self.bytes_written += len(data)

    def _changed(self, encoded: list[EncodedRun]) -> list[tuple[EncodedRun, bytes]]:
        """Return what `_reuse_unchanged` returns, and count the bytes that are reused."""
        changed = _reuse_unchanged(encoded)
        reused = sum(len(run.data) for run in encoded) - sum(len(run.data) for run, _ in changed)
        with self._lock:
            self.bytes_reused += reused
        return changed

    def _write_batch(self, collecting: list[WriteJob], batch: Batch) -> None:
        short: list[ChunkBox | Stack | StagedRun] = []
        for box in batch.boxes:
            if isinstance(box, ChunkBox) and box.scratch_size > batch.limits.copied and _is_long(box):
                self._write_long(box)
            else:
                short.append(box)
        if short:
            self._write_short(collecting, short)
        give_way_in_worker(_BATCH_SECONDS + _CHUNK_SECONDS * batch.chunk_count)

    def _write_short(self, collecting: list[WriteJob], boxes: list[ChunkBox | Stack | StagedRun]) -> None:
        with encoded_chunks(boxes) as encoded:
            changed = self._changed(encoded)
            if not changed:
                return
            buffers: list[Any] = []
            starts, size = [], 0  # of the runs, from that of the first
            for run, _ in changed:
                gap = -size % run.alignment
                buffers += (_ZEROS[:gap], run.data) if gap else (run.data,)
                starts.append(size + gap)
                size += gap + len(run.data)
            key, offset = self._append(buffers, size, max(run.alignment for run, _ in changed))
            self._count(sum(len(run.data) for run, _ in changed))
        for (run, checks), start in zip(changed, starts, strict=True):
            if run.is_of_long_array:
                self._collect(collecting, run.jobs[0], run.table(key, offset + start, checks))
            else:
                run.add_rows(key, offset + start, checks)

    def _write_long(self, box: ChunkBox) -> None:
        """Write a copy of each block of a long chunk, unless the prior chunk has the same bytes."""
        job, size = box.job, box.meta.encoded_size
        [number] = box_numbers(box)
        prior = None if job.prior_chunks is None else job.prior_chunks.row(number)
        checks: list[bytes] = []

        def hashed(buffer: npt.NDArray[np.uint8]) -> Iterator[memoryview]:
            for block in blocks_of(box.values, box.meta.dtype, buffer):
                checks.append(digest(block.data))
                yield block.data

        with scratch(BLOCK) as buffer:
            if prior is not None and prior.length == size:
                blocks = blocks_to_compare(box.values, box.meta.dtype, buffer)
                before = joined_checks(prior.checks, CHECK_SIZE)
                # stop at the first difference
                if all(digest(block.data) == check for block, check in zip(blocks, before, strict=True)):
                    job.rows.append(prior)
                    with self._lock:
                        self.bytes_reused += size
                    return
            key, offset = self._append(hashed(buffer), size, PAGE)
        self._count(size)
        job.rows.append(ChunkRow(number, key, offset, size, b"".join(checks)))


def _popped(batches: deque[Batch]) -> Iterator[Batch]:
    """Yield batches and forget them, so that their values are not in memory until the end of the write."""
    while batches:
        yield batches.popleft()


def _reuse_unchanged(encoded: list[EncodedRun]) -> list[tuple[EncodedRun, bytes]]:
    """Reuse the prior chunks where the bytes are equal; return the other runs with their checksums."""
    changed = []
    for run in encoded:
        checks, size = run.checks(), run.check_size
        if all(job.prior_chunks is None for job in run.jobs):
            changed.append((run, checks))
            continue
        jobs = run.jobs if len(run.jobs) > 1 else repeat(run.jobs[0])
        start = 0
        each_checks = joined_checks(checks, size)
        for i, (job, number, check) in enumerate(zip(jobs, run.numbers, each_checks, strict=False)):
            prior = None if job.prior_chunks is None else job.prior_chunks.row(number)
            if prior is not None and prior.length == run.length and prior.checks == check:
                job.rows.append(prior)
                if start < i:
                    changed.append((run.part(start, i), checks[start * size : i * size]))
                start = i + 1
        if start < len(run.numbers):
            changed.append((run.part(start, len(run.numbers)), checks[start * size :]))
    return changed


def _is_long(box: ChunkBox) -> bool:
    """Return whether the box is one whole unencoded chunk, longer than a block."""
    meta = box.job.meta
    return meta.encoded_size > BLOCK and meta.chain.identity and box.values.shape == meta.chunks
