"""Weight-update sharding for saves: each of the R replicas of a shard saves 1/R of the shard.

Without it replica 0 saves the whole shard, and the hosts of other replicas have nothing to do. Shards are split
along one dimension, the same on all devices, into pieces of one shape, which never cross the edge of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tstore.sharding.boxes import Index

__all__ = ["ReplicaSplit"]


class ReplicaSplit(NamedTuple):
    """How the `replicas` of a shard, 0, 1, and so on, share its save.

    Shards are split along `dimension` into pieces of `piece_shape`. All hosts save with that shape, as the
    `shard_shape` of `Shards`. If `dimension` is None, replica 0 saves every shard whole.
    """

    piece_shape: tuple[int, ...]
    dimension: int | None
    replicas: int

    @staticmethod
    def choose(
        shape: Sequence[int], shard_shape: Sequence[int], replicas: int, itemsize: int, min_bytes: int = 1 << 20
    ) -> ReplicaSplit:
        """Return the split into the most pieces of about `min_bytes` or more, at most one for each replica.

        A dimension that is itself sharded can be split only into equal pieces, so there may be fewer pieces.
        """
        whole = tuple(shard_shape)
        count = min(replicas, math.prod(whole) * itemsize // max(1, min_bytes))
        if count <= 1 or not whole:
            return ReplicaSplit(whole, None, replicas)
        lengths = [_piece_length(n, length, count) for n, length in zip(shape, whole, strict=True)]
        counts = [-(-length // piece) for length, piece in zip(whole, lengths, strict=True)]
        dimension = counts.index(max(counts))
        piece_shape = (*whole[:dimension], lengths[dimension], *whole[dimension + 1 :])
        return ReplicaSplit(piece_shape, dimension, replicas)

    def piece(self, index: Index, replica: int) -> Index | None:
        """Return the part of a shard that a replica saves, if any; the parts of all replicas form the shard."""
        if any(part.start >= part.stop for part in index) or (self.dimension is None and replica > 0):
            return None
        if self.dimension is None:
            return index
        part, length = index[self.dimension], self.piece_shape[self.dimension]
        count = -(-(part.stop - part.start) // length)
        first, end = count * replica // self.replicas, count * (replica + 1) // self.replicas
        if first == end:
            return None
        piece = slice(part.start + first * length, min(part.start + end * length, part.stop))
        return (*index[: self.dimension], piece, *index[self.dimension + 1 :])


def _piece_length(n: int, length: int, count: int) -> int:
    """Return the length of the pieces that split a shard of this length into at most `count` pieces.

    n is the length of the whole dimension. If it is sharded, the pieces of a shard are of equal length.
    """
    if length == n:
        return -(-length // count)
    return length // next(k for k in range(min(count, length), 0, -1) if length % k == 0)
