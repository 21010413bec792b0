"""Pieces of eXmY-encoded chunks in which only some tiles have selected values.

The header of a chunk is in its first blocks, and its tiles are in later ones. Blocks in between are
not read: then a chunk has two pieces, and the piece delivered last decodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np

from tstore.core.data.pieces import Bytes, ChunkPiece, ReadJob
from tstore.core.format.arrays.array_codecs import TileRange, Tiles
from tstore.core.format.arrays.grid import Projection, part_of
from tstore.core.format.arrays.points import PointProjection
from tstore.core.format.checksums import BLOCK
from tstore.core.format.objects.chunk_rows import ChunkRow

__all__ = ["TilePiece", "box_tile_pieces", "point_tile_pieces"]

DecodeTiles = Callable[[Bytes, Bytes], None]
"""Stores selected values in a result, from the bytes of a chunk's header and of the tiles with these values."""


class _Halves:
    """The delivered halves of a chunk, header and tiles, possibly from different threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delivered: dict[str, Bytes] = {}

    def swap(self, name: str, other: str, data: Bytes) -> Bytes | None:
        """Return the `other` half if it was delivered; else keep a copy of this half, and return None."""
        with self._lock:
            if other not in self._delivered:
                self._delivered[name] = np.array(data)
            return self._delivered.get(other)


class TilePiece(ChunkPiece):
    """The blocks of a chunk with its header, with the selected tiles, or with both."""

    __slots__ = ("_chunk", "_decode_tiles", "_halves", "_tiles")

    def __init__(
        self,
        job: ReadJob,
        row: ChunkRow,
        projection: Projection | PointProjection,
        tiles: TileRange,
        decode_tiles: DecodeTiles,
        blocks: tuple[int, int],
        halves: _Halves | None,
    ) -> None:
        super().__init__(job, row, None, *blocks)
        self._chunk = projection.chunk
        self._tiles = tiles
        self._decode_tiles = decode_tiles
        self._halves = halves  # None if the piece has both

    @property
    def label(self) -> str:
        """The path and the chunk, for errors."""
        return f"{self.job.path}, chunk {self._chunk}"

    def destination(self) -> None:
        """Return None: the values need decoding."""

    def _decode(self, data: Bytes) -> None:
        tiles, begin = self._tiles, self.skipped
        header = data[: tiles.header_size]
        codes = data[tiles.first_byte - begin : tiles.end_byte - begin] if begin <= tiles.first_byte else data[:0]
        if self._halves is not None:
            other = (
                self._halves.swap("codes", "header", codes)
                if begin
                else self._halves.swap("header", "codes", header)
            )
            if other is None:
                return
            header, codes = (other, codes) if begin else (header, other)
        self._decode_tiles(header, codes)


def box_tile_pieces(job: ReadJob, row: ChunkRow, projection: Projection, tiles: Tiles) -> Iterator[TilePiece]:
    """Yield the pieces with the header of a chunk and the tiles with values of a box."""
    out = part_of(job.out, projection.result)
    yield from _pieces(job, row, projection, tiles, lambda header, codes: tiles.decode(header, codes, out))


def point_tile_pieces(
    job: ReadJob, row: ChunkRow, points: PointProjection, tiles: TileRange
) -> Iterator[TilePiece]:
    """Yield the pieces with the header of a chunk and the tiles with points."""
    yield from _pieces(
        job,
        row,
        points,
        tiles,
        lambda header, codes: points.read(tiles.elements(header, codes), tiles.start, job.out),
    )


def _pieces(
    job: ReadJob,
    row: ChunkRow,
    projection: Projection | PointProjection,
    tiles: TileRange,
    decode_tiles: DecodeTiles,
) -> Iterator[TilePiece]:
    header = 0, -(-tiles.header_size // BLOCK)
    codes = tiles.first_byte // BLOCK, -(-tiles.end_byte // BLOCK)
    if codes[0] <= header[1]:
        yield TilePiece(job, row, projection, tiles, decode_tiles, (0, max(header[1], codes[1])), None)
        return
    halves = _Halves()
    yield TilePiece(job, row, projection, tiles, decode_tiles, header, halves)
    yield TilePiece(job, row, projection, tiles, decode_tiles, codes, halves)
