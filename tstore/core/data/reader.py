"""Read from packs: verify bytes and decode them to values.

The pieces of all arrays of a call are sorted by pack and offset, and adjacent ones are read together. Bytes that
several pieces need are read once, for example if regions of one array share a chunk. An unencoded chunk is read
straight into the result where the chunk's part of the result is contiguous. Of a long unencoded chunk, only the
blocks with selected values are read. Every block is verified while it is in the CPU's caches, before any value is
decoded.

A blocking read of local chunks runs in the calling thread (`read_local`), and in worker threads too if it is long.

The storage's `Tuning` says how much to read at once and how many reads to have in flight: a disk performs best
with a few threads, a remote server with many requests.

Small reads that begin in the same turn of an event loop, such as those of `asyncio.gather`, are shared:

1. The first read of a turn runs by itself, so a read that is alone is not delayed. The others become one call, in
   which adjacent pieces of a pack are read together, and which crosses to threads once.
2. If that call fails, each read is retried alone, and raises its own error.
3. A cancelled read waits for the call, which may still write to its result. If all reads are cancelled, so is the
   call.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import mmap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tstore.core.data.destinations import partly_read
from tstore.core.data.pieces import Bytes, ChunkPiece, Piece, ReadJob, StackJob, Values
from tstore.core.data.planning import batches_of, direct_chunk, pieces_of
from tstore.core.format.checksums import BLOCK
from tstore.core.runtime.budget import aligned_offset, page_aligned, populate, scratch
from tstore.core.runtime.concurrency import each_with_caller
from tstore.core.runtime.event_loops import PerLoop
from tstore.core.runtime.pool import each, run
from tstore.core.storage.base import PackReader, Storage
from tstore.core.storage.cache import forget
from tstore.errors import Corrupt, InvalidArgument, NotFound

__all__ = [
    "SharedReads",
    "is_local",
    "missing_message",
    "new_values",
    "pack_reader",
    "read_chunks",
    "read_local",
    "unreadable",
    "values_to_plan",
]

_WORKER_SHARE = 2 << 20  # bytes of pieces that make another worker worthwhile
_MIN_ALIGNED = 64 << 10  # bytes; longer results are page-aligned


def new_values(path: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Values:
    """Return an uninitialized array to read into; raise `InvalidArgument` if it does not fit in memory."""
    size = math.prod(shape) * dtype.itemsize
    try:
        if size < _MIN_ALIGNED or dtype.hasobject:
            return np.empty(shape, dtype)
        return page_aligned(size).view(dtype).reshape(shape)
    except (MemoryError, ValueError, OverflowError) as error:  # the size exceeds any memory
        raise InvalidArgument(f"{path} does not fit in memory ({error}); read a part of it") from error


def values_to_plan(path: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Values:
    """Return a read-only array, possibly larger than memory, as the destination of a read that is only planned."""
    size = math.prod(shape) * dtype.itemsize
    if size < _MIN_ALIGNED or dtype.hasobject:
        return new_values(path, shape, dtype)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"{path} is too large to explain ({error}); explain a part of it") from error
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


async def read_chunks(
    storage: Storage, jobs: Iterable[ReadJob | StackJob], unfinished: set[str] | None = None
) -> None:
    """Fill the `out` of every job.

    Raise `NotFound` for an unwritten chunk of a dense array, `Corrupt` for a damaged chunk or a missing pack, or
    `InvalidArgument` if memory is short. If it fails, the paths of partly filled arrays are added to
    `unfinished`.
    """
    listed = list(jobs)
    if any(job.source.reads_segments for job in listed):
        pieces = await run(pieces_of, listed, storage.url)
    else:
        pieces = pieces_of(listed, storage.url)
    if not pieces:
        return
    tuning = storage.tuning
    batches = batches_of(pieces, tuning)
    first = list(itertools.islice(batches, tuning.streams))
    workers = len(first)
    if not tuning.latency_bound:
        workers = min(workers, -(-sum(piece.size for piece in pieces) // _WORKER_SHARE))
    batches = itertools.chain(first, batches)
    begun: list[list[Piece]] = []
    ended: list[list[Piece]] = []

    def read(batch: list[Piece]) -> None:
        begun.append(batch)
        _read_again_if_cached(storage, batch)
        ended.append(batch)

    try:
        await each(read, batches, workers)
    except BaseException:
        if unfinished is not None:
            unfinished |= partly_read(listed, begun, ended, batches)
        raise
    finally:
        begun.clear()  # a reference cycle may keep `read`, but must not keep the caller's arrays
        ended.clear()


def is_local(storage: Storage) -> bool:
    """Return whether reading takes little more time than copying memory."""
    return storage.capabilities.native_io and not storage.tuning.latency_bound


def read_local(storage: Storage, job: ReadJob, threads: int) -> None:
    """Fill the `out` of a job in the calling thread, with up to `threads` threads if that pays off. Blocking.

    Raise what `read_chunks` raises.
    """
    pieces = pieces_of([job], storage.url)
    batches = batches_of(pieces, storage.tuning)
    workers = min(threads, -(-sum(piece.size for piece in pieces) // _WORKER_SHARE))
    if workers <= 1:
        populate(job.out)
        for batch in batches:
            _read_again_if_cached(storage, batch)
        return

    def read(batch: list[Piece] | None) -> None:
        if batch is None:
            populate(job.out)
        else:
            _read_again_if_cached(storage, batch)

    each_with_caller(read, itertools.chain([None], batches), workers)


def _read_again_if_cached(storage: Storage, batch: list[Piece]) -> None:
    """Read a batch; retry once if its bytes are damaged and may have come from a cache."""
    try:
        _read_batch(storage, batch)
    except MemoryError as error:
        raise InvalidArgument(f"{batch[0].label}: too little memory to read it ({error})") from error
    except Corrupt:
        pack = batch[0].pack
        if isinstance(pack, bytes) or not forget(storage, pack):
            raise
        _read_batch(storage, batch)  # the damage may have been in a cached copy, which is deleted now


def _read_batch(storage: Storage, batch: list[Piece]) -> None:
    """Read the pieces of a batch in one call, including the gaps between them, and deliver them."""
    first = batch[0]
    try:
        reader = pack_reader(storage, first.pack)
    except NotFound as error:
        raise unreadable(first.label, first.pack, storage.url, error) from error
    if (direct := direct_chunk(batch)) is not None:
        _read_into(reader, *direct, storage)
        return
    targets = [piece.destination() for piece in batch]
    if any(after.offset < before.offset + before.size for before, after in itertools.pairwise(batch)):
        _read_overlapping(reader, batch, targets, storage)
        return
    size = sum(aligned_offset(piece.size) for piece, target in zip(batch, targets, strict=True) if target is None)
    gap = max((b.offset - a.offset - a.size for a, b in itertools.pairwise(batch)), default=0)
    with scratch(size + gap) as memory:
        buffers: list[Any] = []
        data: list[Any] = []
        at, end = 0, first.offset
        for piece, target in zip(batch, targets, strict=True):
            if piece.offset > end:  # all gaps are read into the same memory, and ignored
                buffers.append(memory[size : size + piece.offset - end])
            if target is None:
                target = memory[at : at + piece.size]
                at += aligned_offset(piece.size)
            buffers.append(target)
            data.append(target)
            end = piece.offset + piece.size
        if end > first.offset:
            _read(reader, batch, first.offset, buffers, end - first.offset, storage.url)
        for piece, buffer in zip(batch, data, strict=True):
            piece.deliver(buffer, storage.url)


def _read(reader: PackReader, batch: list[Piece], offset: int, buffers: list[Any], size: int, url: str) -> None:
    """Read bytes for a batch; raise `Corrupt`, naming its first chunk, if that fails."""
    try:
        reader.read_into(offset, buffers, size)
    except (Corrupt, NotFound) as error:
        others = f" (or one of the {len(batch) - 1} after it)" if len(batch) > 1 else ""
        raise unreadable(batch[0].label + others, batch[0].pack, url, error) from error


def _read_overlapping(
    reader: PackReader, batch: list[Piece], targets: list[Bytes | None], storage: Storage
) -> None:
    """Read all bytes from the first piece to the last once, and deliver each piece from that buffer."""
    begin, end = batch[0].offset, max(piece.offset + piece.size for piece in batch)
    with scratch(end - begin) as memory:
        read = memory[: end - begin]
        _read(reader, batch, begin, [read], end - begin, storage.url)
        for piece, target in zip(batch, targets, strict=True):
            data = read[piece.offset - begin : piece.offset - begin + piece.size]
            if target is not None:
                target[:] = data
                data = target
            piece.deliver(data, storage.url)


def _read_into(reader: PackReader, piece: ChunkPiece, target: Bytes, storage: Storage) -> None:
    """Read a chunk straight into the result, in parts: each is verified while it is in the CPU's caches."""
    size = storage.tuning.piece
    for start in range(0, piece.size, size):
        part = target[start : start + size]
        try:
            reader.read_into(piece.offset + start, [part], len(part))
        except (Corrupt, NotFound) as error:
            raise unreadable(piece.label, piece.pack, storage.url, error) from error
        piece.verify(part, storage.url, start // BLOCK)


def pack_reader(storage: Storage, pack: str | bytes) -> PackReader:
    """Return the reader of a pack; it, or its first read, raises `NotFound` if the pack does not exist."""
    return _InlinePack(pack) if isinstance(pack, bytes) else storage.reader(pack)


def unreadable(label: str, pack: str | bytes, url: str, error: Corrupt | NotFound) -> Corrupt:
    """Return the error for chunks whose pack could not be read."""
    reason = missing_message(str(pack), url) if isinstance(error, NotFound) else error
    return Corrupt(f"{label}: {reason}")


def missing_message(pack: str, url: str) -> str:
    """Return the message for a pack that does not exist."""
    return f"its pack {pack} is missing in {url}; restore it from a copy, or read another version"


class _InlinePack:
    """A pack stored inline in a manifest."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read_into(self, offset: int, buffers: Sequence[Any], size: int) -> None:
        if offset + size > len(self._data):
            raise Corrupt(
                f"an inline pack of {len(self._data)} bytes ends before byte {offset + size}, where a chunk ends"
            )
        for buffer in buffers:
            buffer[:] = np.frombuffer(self._data, np.uint8, len(buffer), offset)
            offset += len(buffer)


_SMALL = 1 << 20  # bytes of values; larger reads are not shared


class _Call:
    """A call shared by several reads; `_waiting` counts those that are not cancelled."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._jobs: list[ReadJob] = []
        self._waiting = 0
        self._task = asyncio.get_running_loop().create_task(self._read())
        self._task.add_done_callback(_note_error)

    async def _read(self) -> None:
        await read_chunks(self._storage, self._jobs)

    async def read(self, job: ReadJob) -> bool:
        """Read a job with the others; return whether that succeeded. The call must not have begun."""
        self._jobs.append(job)
        self._waiting += 1
        try:
            await asyncio.wait([self._task])
        except asyncio.CancelledError:
            self._waiting -= 1
            if not self._waiting:
                self._task.cancel()
            while not self._task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([self._task])
            raise
        return not self._task.cancelled() and self._task.exception() is None


def _note_error(task: asyncio.Task[None]) -> None:
    """Retrieve the error of a call, which asyncio would log if all reads were cancelled."""
    if not task.cancelled():
        task.exception()


class _Turn:
    """The current turn of an event loop: whether a read has begun, and the call shared by later reads."""

    def __init__(self) -> None:
        self.has_begun = False
        self.call: _Call | None = None

    def end(self) -> None:
        """Begin the next turn."""
        self.has_begun, self.call = False, None


class SharedReads:
    """The reads of one snapshot."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._turns = PerLoop(_Turn)

    async def read(self, job: ReadJob) -> None:
        """Fill the `out` of a job; raise what `read_chunks` raises."""
        if job.out.nbytes <= _SMALL:
            turn = self._turns.get()
            if turn.has_begun:
                turn.call = turn.call or _Call(self._storage)
                if await turn.call.read(job):
                    return
            else:
                turn.has_begun = True
                asyncio.get_running_loop().call_soon(turn.end)  # runs before tasks created from now on
        await read_chunks(self._storage, [job])
