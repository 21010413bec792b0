"""Pieces: byte ranges of packs to read, which verify their bytes and deliver the values.

1. `divide` splits a selection into boxes of many small chunks that are contiguous in a pack (the writer puts
   the chunks of a box into its pack in C order), and a `Projection` for each chunk outside of these boxes.
2. A `BoxPiece` is such a box: one read fetches all of its chunks, and one strided copy stores them in the result.
   A `ChunkPiece` is one chunk, or those of its blocks that have selected values.
3. Pieces of several jobs that need the same bytes become a `SharedPiece`.
4. The reader sorts all pieces by pack and offset. It reads them in batches, straight into the `destination` of
   each piece that has one, and calls `deliver` with the bytes.
"""

from __future__ import annotations

import abc
import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.grid import (
    Projection,
    Selection,
    chunk_number,
    part_of,
    whole,
)
from tstore.core.format.arrays.points import PointSelection
from tstore.core.format.checksums import BLOCK, CHECK_SIZE, block_checks
from tstore.core.format.objects.chunk_refs import ChunkSource
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.tree.node import Node
from tstore.core.runtime.budget import scratch
from tstore.errors import Corrupt

__all__ = [
    "Bytes",
    "ChunkPiece",
    "Piece",
    "ReadJob",
    "StackJob",
    "Values",
    "can_decode_into",
    "chunk_memory",
    "with_shared_bytes",
]


@contextlib.contextmanager
def chunk_memory(meta: ArrayMeta) -> Iterator[npt.NDArray[Any]]:
    """Yield an array of the shape and dtype of a chunk; its memory is reused once the context ends."""
    if meta.dtype.hasobject:
        yield np.empty(meta.chunks, meta.dtype)
        return
    with scratch(meta.chunk_size * meta.dtype.itemsize) as buffer:
        yield buffer.view(meta.dtype).reshape(meta.chunks)


Values = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class ReadJob(msgspec.Struct, eq=False, gc=False):
    """A selection of one array, and the array `out` to read it into.

    `out` has the axes of the selection's result; that of a `Selection` has those of the stored array. Values are
    cast to the dtype of `out`. `source` looks up the array's chunks.
    """

    path: str
    meta: ArrayMeta
    source: ChunkSource
    selection: Selection | PointSelection
    out: Values

    @staticmethod
    def of(node: Node, out: Values, selection: Selection | None = None) -> ReadJob:
        """Return the job that reads a selection of an array, by default all of it."""
        meta = node.meta
        return ReadJob(node.path, meta, node, whole(meta.shape) if selection is None else selection, out)


class StackJob(msgspec.Struct, eq=False, gc=False):
    """A request to read chunks of one array that are unencoded, at most a block long and numbered consecutively.

    `out` is contiguous, has the array's dtype, and has one chunk at each position of its first axis.
    """

    path: str
    meta: ArrayMeta
    source: ChunkSource
    numbers: range
    out: Values


def can_decode_into(values: Values, meta: ArrayMeta) -> bool:
    """Return whether a chunk can be decoded straight into `values` of its shape, without a cast or a copy."""
    return values.flags.c_contiguous and values.dtype == meta.dtype


class Piece(abc.ABC):
    """`size` bytes at `offset` of a pack, their checksums, and the destination of their values."""

    __slots__ = ("checks", "job", "offset", "pack", "size")

    def __init__(self, job: ReadJob | StackJob, pack: str | bytes, offset: int, size: int, checks: bytes) -> None:
        self.job = job
        self.pack = pack
        self.offset = offset
        self.size = size
        self.checks = checks

    @property
    def jobs(self) -> Sequence[ReadJob | StackJob]:
        """The jobs that get its values."""
        return (self.job,)

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """The path and the chunk, for errors."""

    @property
    @abc.abstractmethod
    def chunks(self) -> Sequence[int]:
        """The numbers of its chunks."""

    def destination(self) -> Bytes | None:
        """Return the bytes of the result to read into, or None if the values need decoding or copying."""
        return None

    def split(self, max_size: int) -> Iterator[Piece]:
        """Yield the piece, or parts of at most `max_size` bytes (whole blocks) if it can be read in parts."""
        yield self

    @abc.abstractmethod
    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the bytes read and store their values in the result.

        `data` is the `destination` unless that is None. `url` names the store in errors. Raise `Corrupt`, naming
        the chunk, if the bytes are damaged.
        """


class ChunkPiece(Piece):
    """A chunk, or its blocks `first:last`, which start at byte `skipped` of the chunk.

    `projection` is None if the chunk is the whole array and its bytes are the result.
    """

    __slots__ = ("projection", "row", "skipped", "target")
    job: ReadJob

    def __init__(
        self, job: ReadJob, row: ChunkRow, projection: Projection | None, first: int = 0, last: int | None = None
    ):
        skipped = first * BLOCK
        size = (row.length if last is None else min(last * BLOCK, row.length)) - skipped
        checks = row.checks if last is None else row.checks[first * CHECK_SIZE : last * CHECK_SIZE]
        # not in the base class: a long array is read in many pieces
        self.job, self.pack, self.offset, self.size, self.checks = (
            job,
            row.pack,
            row.offset + skipped,
            size,
            checks,
        )
        self.row = row
        self.projection = projection
        self.skipped = skipped
        self.target: Bytes | None = None

    @staticmethod
    def from_projection(job: ReadJob, row: ChunkRow, projection: Projection | None) -> ChunkPiece:
        """Return a piece of the blocks with the selected values; raise `Corrupt` for an impossible length."""
        piece, meta = ChunkPiece(job, row, projection), job.meta
        piece.check_length()
        if projection is None or projection.full or row.length <= BLOCK or not meta.chain.identity:
            return piece
        return ChunkPiece(job, row, projection, *_selected_blocks(meta, projection))

    def check_length(self) -> None:
        """Raise `Corrupt`, naming the chunk, if no encoded chunk of the array can have its length."""
        try:
            self.job.meta.chain.check_length(self.row.length)
        except Corrupt as error:
            raise Corrupt(f"{self.label}: {error}") from error

    @property
    def label(self) -> str:
        """The path and the chunk, for errors."""
        at = self.projection.chunk if self.projection else (0,) * len(self.job.meta.shape)
        return f"{self.job.path}, chunk {at}"

    @property
    def chunks(self) -> Sequence[int]:
        """The number of the chunk."""
        return (self.row.number,)

    def destination(self) -> Bytes | None:
        """Return the bytes of the result into which the stored bytes can be read directly, or None."""
        if self.target is None:
            self.target = self._direct_target()
        return self.target

    def _direct_target(self) -> Bytes | None:
        meta, projection, out = self.job.meta, self.projection, self.job.out
        if self.size != meta.encoded_size or not meta.chain.identity:
            return None
        if projection is None:
            return out.reshape(-1).view(np.uint8)
        if not projection.full or any(s.step is not None and s.step < 0 for s in projection.result):
            return None
        target = part_of(out, projection.result)
        if target.shape != meta.chunks or not can_decode_into(target, meta):
            return None
        return target.reshape(-1).view(np.uint8)

    def split(self, max_size: int) -> Iterator[Piece]:
        """Yield parts of at most `max_size` bytes (whole blocks) if the bytes go straight into the result."""
        target = self.destination() if self.size > max_size else None
        if target is None:
            yield self
            return
        for start in range(0, self.size, max_size):
            first, last = (self.skipped + start) // BLOCK, -(-(self.skipped + self.size) // BLOCK)
            part = ChunkPiece(self.job, self.row, self.projection, first, min(first + max_size // BLOCK, last))
            part.target = target[start : start + max_size]
            yield part

    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the bytes read; decode them and store the selected values, unless they were read into `out`."""
        self.verify(data, url)
        if self.target is not None:
            return
        if self.job.meta.chain.identity:
            self._copy(data)
            return
        try:
            self._decode(data)
        except Corrupt as error:
            raise Corrupt(f"{self.label}: {error}") from error

    def verify(self, data: Bytes, url: str, first: int = 0) -> None:
        """Raise `Corrupt`, naming the chunk, if the bytes of its blocks from number `first` on are damaged."""
        checks = block_checks(data.data)
        if checks != self.checks[first * CHECK_SIZE : first * CHECK_SIZE + len(checks)]:
            raise Corrupt(f"{self.label}: {self.row.mismatch(checks, url, self.skipped // BLOCK + first)}")

    def _copy(self, data: Bytes) -> None:
        """Store the selected values of an unencoded chunk; `data` may be only some of its blocks."""
        meta = self.job.meta
        inside, target = self._selected_and_target()
        strides = [math.prod(meta.chunks[i + 1 :]) * meta.dtype.itemsize for i in range(len(meta.chunks))]
        values: Values = np.ndarray(
            tuple(len(range(s.start, s.stop, s.step)) for s in inside),
            meta.dtype,
            buffer=data,
            offset=sum(s.start * stride for s, stride in zip(inside, strides, strict=True)) - self.skipped,
            strides=tuple(stride * s.step for s, stride in zip(inside, strides, strict=True)),
        )
        np.copyto(target, values, casting="unsafe")

    def _decode(self, data: Bytes) -> None:
        meta = self.job.meta
        inside, target = self._selected_and_target()
        if target.shape == meta.chunks and can_decode_into(target, meta):
            meta.chain.decode(data.data, target)
            return
        if meta.chain.has_parts:
            meta.chain.decode_part(data.data, inside, target)
            return
        with chunk_memory(meta) as decoded:
            meta.chain.decode(data.data, decoded)
            self._select(decoded)

    def _select(self, decoded: Values) -> None:
        """Store the selected values of a decoded chunk."""
        inside, target = self._selected_and_target()
        np.copyto(target, decoded[inside], casting="unsafe")

    def _selected_and_target(self) -> tuple[tuple[slice, ...], Values]:
        """Return the selected elements of the chunk, and the part of the result for them."""
        assert self.projection is not None  # a chunk that is the whole array is read straight into the result
        return self.projection.inside, part_of(self.job.out, self.projection.result)


class SharedPiece(Piece):
    """A chunk whose values several jobs select: its bytes are verified and decoded once."""

    __slots__ = ("_pieces",)

    def __init__(self, first: ChunkPiece) -> None:
        super().__init__(first.job, first.pack, first.offset, first.size, first.checks)
        self._pieces = [first]

    @property
    def jobs(self) -> Sequence[ReadJob | StackJob]:
        """The jobs that select values of the chunk."""
        return [piece.job for piece in self._pieces]

    def add(self, piece: ChunkPiece) -> None:
        """Add a piece with the same bytes."""
        self._pieces.append(piece)

    @property
    def label(self) -> str:
        """The path and the chunk, for errors."""
        return self._pieces[0].label

    @property
    def chunks(self) -> Sequence[int]:
        """The number of the chunk."""
        return self._pieces[0].chunks

    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the bytes, and deliver them to each piece."""
        first, meta = self._pieces[0], self.job.meta
        first.verify(data, url)
        if meta.chain.identity:
            for piece in self._pieces:
                target = piece.destination()
                if target is None:
                    piece._copy(data)
                else:
                    target[:] = data
            return
        try:
            if meta.chain.has_parts:
                for piece in self._pieces:
                    piece._decode(data)
                return
            with chunk_memory(meta) as decoded:
                meta.chain.decode(data.data, decoded)
                for piece in self._pieces:
                    piece._select(decoded)
        except Corrupt as error:
            raise Corrupt(f"{self.label}: {error}") from error


def with_shared_bytes(pieces: Iterable[Piece]) -> list[Piece]:
    """Join sorted pieces that have the same bytes of a chunk."""
    merged: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, ChunkPiece) and merged and _have_same_bytes(last := merged[-1], piece):
            if isinstance(last, ChunkPiece):
                merged[-1] = last = SharedPiece(last)
            if isinstance(last, SharedPiece):
                last.add(piece)
                continue
        merged.append(piece)
    return merged


def _have_same_bytes(one: Piece, other: Piece) -> bool:
    if one.offset != other.offset or one.size != other.size or one.pack != other.pack:
        return False
    # a long unencoded chunk is read into each result block by block, which takes no memory
    return one.job.meta is other.job.meta and (one.size <= BLOCK or not one.job.meta.chain.identity)


def _selected_blocks(meta: ArrayMeta, projection: Projection) -> tuple[int, int]:
    """Return the first block of an unencoded chunk that has selected values, and the block after the last one."""
    first = chunk_number([s.start for s in projection.inside], meta.chunks)  # elements are numbered in C order
    last = chunk_number([s.stop - 1 for s in projection.inside], meta.chunks)
    size = meta.dtype.itemsize
    return first * size // BLOCK, -(-(last + 1) * size // BLOCK)
