"""Pieces of eXmY-encoded chunks longer than a block, of which only some tiles have selected values.

The header of a chunk is in its first blocks, and its tiles are in others. If there are blocks between, they are
not read: then a chunk has two pieces, and the one delivered last decodes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np

from tstore.data.pieces import Bytes, ChunkPiece, ReadJob
from tstore.format.arrays.array_codecs import Tiles
from tstore.format.arrays.grid import Projection
from tstore.format.checksums import BLOCK
from tstore.format.objects.chunk_rows import ChunkRow

__all__ = ["TilePiece", "tile_pieces"]


class _Halves:
    """The header and the tiles of a chunk that have been delivered, by threads that may differ."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delivered: dict[str, Bytes] = {}

    def swap(self, name: str, other: str, data: Bytes) -> Bytes | None:
        """Return the half `other` if it was delivered; else keep a copy of this one, and return None."""
        with self._lock:
            if other not in self._delivered:
                self._delivered[name] = np.array(data)
            return self._delivered.get(other)


class TilePiece(ChunkPiece):
    """The blocks of a chunk with its header, with the selected tiles, or with both."""

    __slots__ = ("_halves", "_tiles")

    def __init__(
        self,
        job: ReadJob,
        row: ChunkRow,
        projection: Projection,
        tiles: Tiles,
        blocks: tuple[int, int],
        halves: _Halves | None,
    ) -> None:
        super().__init__(job, row, projection, *blocks)
        self._tiles = tiles
        self._halves = halves  # None if the piece has both

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
        _, target = self._selected_and_target()
        tiles.decode(header, codes, target)


def tile_pieces(job: ReadJob, row: ChunkRow, projection: Projection, tiles: Tiles) -> Iterator[ChunkPiece]:
    """Yield the pieces with the header of a chunk and the tiles with selected values."""
    header = 0, -(-tiles.header_size // BLOCK)
    codes = tiles.first_byte // BLOCK, -(-tiles.end_byte // BLOCK)
    if codes[0] <= header[1]:
        yield TilePiece(job, row, projection, tiles, (0, max(header[1], codes[1])), None)
        return
    halves = _Halves()
    yield TilePiece(job, row, projection, tiles, header, halves)
    yield TilePiece(job, row, projection, tiles, codes, halves)
