"""Pieces: byte ranges of packs to be read, each of which verifies its bytes and delivers their values.

A read is planned as pieces, sorted by pack and offset, and read in batches; the reader treats all alike. A
`ChunkPiece` is a chunk or the wanted part of one; `boxes` has another kind, many small chunks in one.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt
from tstore.format.array_metadata import ArrayMeta
from tstore.format.checksums import BLOCK, CHECK_SIZE, block_checks
from tstore.format.chunk_refs import ChunkRow, ChunkSource
from tstore.format.grid import Cover, Selection, part_of
from tstore.runtime.budget import scratch

__all__ = ["Bytes", "ChunkPiece", "Piece", "ReadJob", "Values", "fits"]

Values = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class ReadJob:
    """A selection of one array, and the array `out` to read it into.

    `out` has one axis per axis of the stored array, of length 1 if an index dropped it. `source` looks up the
    array's chunks.
    """

    __slots__ = ("meta", "out", "path", "selection", "source")

    def __init__(self, path: str, meta: ArrayMeta, source: ChunkSource, selection: Selection, out: Values) -> None:
        self.path = path
        self.meta = meta
        self.source = source
        self.selection = selection
        self.out = out


def fits(values: Values, meta: ArrayMeta) -> bool:
    """Return whether a decoded chunk can go into `values` without a cast or a strided copy."""
    return values.flags.c_contiguous and values.dtype == meta.dtype


class Piece(abc.ABC):
    """`size` bytes at `offset` of a pack, their checksums, and the destination of their values."""

    __slots__ = ("checks", "job", "offset", "pack", "size")

    def __init__(self, job: ReadJob, pack: str | bytes, offset: int, size: int, checks: bytes) -> None:
        self.job = job
        self.pack = pack
        self.offset = offset
        self.size = size
        self.checks = checks

    @property
    @abc.abstractmethod
    def label(self) -> str:
        """The path and the chunk, for errors."""

    def destination(self) -> Bytes | None:
        """Return the bytes of the result to read into, or None if the values need decoding or copying."""
        return None

    def split(self, most: int) -> Iterator[Piece]:
        """Yield the piece, or parts of at most `most` bytes (whole blocks) if it can be read in parts."""
        yield self

    @abc.abstractmethod
    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the bytes read and store their values in the result; raise `Corrupt`, naming the chunk.

        `data` is the `destination` if there is one. `url` names the store.
        """


class ChunkPiece(Piece):
    """A chunk, or its blocks from `first` up to `last`, which begin `skipped` bytes into it.

    `cover` is None if the chunk is the whole array and the result takes its bytes unchanged.
    """

    __slots__ = ("cover", "row", "skipped", "target")

    def __init__(self, job: ReadJob, row: ChunkRow, cover: Cover | None, first: int = 0, last: int | None = None):
        skipped = first * BLOCK
        size = (row.length if last is None else min(last * BLOCK, row.length)) - skipped
        checks = row.checks if last is None else row.checks[first * CHECK_SIZE : last * CHECK_SIZE]
        super().__init__(job, row.pack, row.offset + skipped, size, checks)
        self.row = row
        self.cover = cover
        self.skipped = skipped
        self.target: Bytes | None = None

    @staticmethod
    def covering(job: ReadJob, row: ChunkRow, cover: Cover | None) -> ChunkPiece:
        """Return the piece with all blocks of selected values; raise `Corrupt` for an impossible length."""
        meta = job.meta
        try:
            meta.chain.check(row.length)
        except Corrupt as error:
            raise Corrupt(f"{ChunkPiece(job, row, cover).label}: {error}") from error
        if cover is None or cover.full or row.length <= BLOCK or not meta.chain.identity:
            return ChunkPiece(job, row, cover)
        low = high = 0
        for s, n in zip(cover.inside, meta.chunks, strict=True):
            low, high = low * n + s.start, high * n + s.stop - 1
        size = meta.dtype.itemsize
        return ChunkPiece(job, row, cover, low * size // BLOCK, -(-(high + 1) * size // BLOCK))

    @property
    def label(self) -> str:
        """The path and the chunk, for errors."""
        at = self.cover.chunk if self.cover else (0,) * len(self.job.meta.shape)
        return f"{self.job.path}, chunk {at}"

    def destination(self) -> Bytes | None:
        """Return the bytes of the result that are the chunk as stored, or None."""
        if self.target is None:
            self.target = self._target()
        return self.target

    def _target(self) -> Bytes | None:
        meta, cover, out = self.job.meta, self.cover, self.job.out
        if self.size != meta.encoded_bound or not meta.chain.identity:
            return None
        if cover is None:
            return out.reshape(-1).view(np.uint8)
        if not cover.full or any(s.step is not None and s.step < 0 for s in cover.result):
            return None
        target = part_of(out, cover.result)
        if target.shape != meta.chunks or not fits(target, meta):
            return None
        return target.reshape(-1).view(np.uint8)

    def split(self, most: int) -> Iterator[Piece]:
        """Yield parts of at most `most` bytes (whole blocks) if the bytes go straight into the result."""
        target = self.destination() if self.size > most else None
        if target is None:
            yield self
            return
        for start in range(0, self.size, most):
            first, last = (self.skipped + start) // BLOCK, -(-(self.skipped + self.size) // BLOCK)
            part = ChunkPiece(self.job, self.row, self.cover, first, min(first + most // BLOCK, last))
            part.target = target[start : start + most]
            yield part

    def deliver(self, data: Bytes, url: str) -> None:
        """Verify the bytes read; decode them and store the selected values, unless they are in place already."""
        if block_checks(data.data) != self.checks:
            raise Corrupt(f"{self.label}: {self.row.mismatch(self.skipped, url)}")
        if self.target is not None:
            return
        if self.job.meta.chain.identity:
            self._copy(data)
            return
        try:
            self._decode(data)
        except Corrupt as error:
            raise Corrupt(f"{self.label}: {error}") from error

    def _copy(self, data: Bytes) -> None:
        meta = self.job.meta
        inside, target = self._places()
        strides = [math.prod(meta.chunks[i + 1 :]) * meta.dtype.itemsize for i in range(len(meta.chunks))]
        values: Values = np.ndarray(
            tuple(len(range(s.start, s.stop, s.step)) for s in inside),
            meta.dtype,
            buffer=data,
            offset=sum(s.start * t for s, t in zip(inside, strides, strict=True)) - self.skipped,
            strides=tuple(t * s.step for s, t in zip(inside, strides, strict=True)),
        )
        np.copyto(target, values)

    def _decode(self, data: Bytes) -> None:
        meta = self.job.meta
        inside, target = self._places()
        if target.shape == meta.chunks and fits(target, meta):
            meta.chain.decode(data.data, target)
            return
        with scratch(meta.chunk_size * meta.dtype.itemsize) as room:
            decoded = room.view(meta.dtype).reshape(meta.chunks)
            meta.chain.decode(data.data, decoded)
            np.copyto(target, decoded[inside])

    def _places(self) -> tuple[tuple[slice, ...], Values]:
        """Return the selected elements of the chunk, and the part of the result for them."""
        if self.cover is None:
            return tuple(slice(0, n, 1) for n in self.job.meta.chunks), self.job.out
        return self.cover.inside, part_of(self.job.out, self.cover.result)
