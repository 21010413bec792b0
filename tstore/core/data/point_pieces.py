"""Pieces of chunks for selections by index arrays."""

from __future__ import annotations

from collections.abc import Iterator

from tstore.core.data.pieces import Bytes, ChunkPiece, ReadJob, Values, chunk_memory
from tstore.core.data.tile_pieces import point_tile_pieces
from tstore.core.format.arrays.points import PointProjection
from tstore.core.format.checksums import BLOCK
from tstore.core.format.objects.chunk_rows import ChunkRow

__all__ = ["PointPiece", "point_pieces"]

_TILED = 1 << 16  # elements decoded together
_RUN_COST = 1 << 18  # the fixed cost of decoding a run of tiles, in elements of a chunk decoded whole


class PointPiece(ChunkPiece):
    """A chunk, or its blocks `first:last`, from which points are selected."""

    __slots__ = ("points",)

    def __init__(
        self, job: ReadJob, row: ChunkRow, points: PointProjection, first: int = 0, last: int | None = None
    ):
        super().__init__(job, row, None, first, last)
        self.points = points

    @property
    def label(self) -> str:
        """The path and the chunk, for errors."""
        return f"{self.job.path}, chunk {self.points.chunk}"

    def destination(self) -> None:
        """Return None: the bytes of a chunk are never those of the result."""

    def _copy(self, data: Bytes) -> None:
        dtype = self.job.meta.dtype
        self.points.read(data.view(dtype), self.skipped // dtype.itemsize, self.job.out)

    def _decode(self, data: Bytes) -> None:
        meta = self.job.meta
        with chunk_memory(meta) as decoded:
            meta.chain.decode(data.data, decoded)
            self._select(decoded)

    def _select(self, decoded: Values) -> None:
        self.points.read(decoded.reshape(-1), 0, self.job.out)


def point_pieces(job: ReadJob, row: ChunkRow, points: PointProjection) -> Iterator[ChunkPiece]:
    """Yield pieces with the blocks of a chunk that contain points; raise `Corrupt` for an impossible length.

    Pieces of an eXmY-encoded chunk decode only the tiles with points if that takes at most half the time.
    """
    meta = job.meta
    piece = PointPiece(job, row, points)
    piece.check_length()
    if meta.chain.has_tiles and meta.chunk_size > 2 * _TILED:
        runs = list(points.divide(_TILED))
        decoded = _TILED * sum(last - first for first, last, _ in runs)
        if 2 * (decoded + _RUN_COST * len(runs)) <= meta.chunk_size:
            for first, last, part in runs:
                tiles = meta.chain.tile_range(first * _TILED, min(last * _TILED, meta.chunk_size))
                yield from point_tile_pieces(job, row, part, tiles)
            return
    if row.length <= BLOCK or not meta.chain.identity:
        yield piece
        return
    for first, last, part in points.divide(BLOCK // meta.dtype.itemsize):
        yield PointPiece(job, row, part, first, last)
