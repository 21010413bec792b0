"""Weight-update sharding for saves: each of the R replicas of a shard saves its 1/R of it.

Otherwise replica 0 saves a shard whole, and the hosts of the other replicas have nothing to do. A shard is split
along one dimension, the same on all devices, into pieces on a grid that every shard's edge lies on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from tstore.sharding.boxes import Index

__all__ = ["ReplicaSplit"]


class ReplicaSplit(NamedTuple):
    """How the replicas of a shard share its save.

    `shard_shape` is the shape of a piece, with which all hosts save, and `dimension` that along which shards are
    split, or None for shards that replica 0 saves whole.
    """

    shard_shape: tuple[int, ...]
    dimension: int | None
    replicas: int

    @staticmethod
    def choose(
        shape: Sequence[int], shard_shape: Sequence[int], replicas: int, itemsize: int, min_bytes: int = 1 << 20
    ) -> ReplicaSplit:
        """Return the split into the most pieces of about `min_bytes` or more, at most one for each replica.

        A dimension that is itself sharded can be split only into equal pieces, so that there may be fewer.
        """
        whole = tuple(shard_shape)
        count = min(replicas, math.prod(whole) * itemsize // max(1, min_bytes))
        if count <= 1:
            return ReplicaSplit(whole, None, replicas)
        lengths = [_piece_length(n, length, count) for n, length in zip(shape, whole, strict=True)]
        counts = [-(-length // piece) for length, piece in zip(whole, lengths, strict=True)]
        dimension = counts.index(max(counts))
        pieces = (*whole[:dimension], lengths[dimension], *whole[dimension + 1 :])
        return ReplicaSplit(pieces, dimension, replicas)

    def piece(self, index: Index, replica: int) -> Index | None:
        """Return the piece of a shard that a replica saves, or None; those of all replicas are the whole shard."""
        if any(part.start >= part.stop for part in index) or (self.dimension is None and replica > 0):
            return None
        if self.dimension is None:
            return index
        part, length = index[self.dimension], self.shard_shape[self.dimension]
        count = -(-(part.stop - part.start) // length)
        first, end = count * replica // self.replicas, count * (replica + 1) // self.replicas
        if first == end:
            return None
        piece = slice(part.start + first * length, min(part.start + end * length, part.stop))
        return (*index[: self.dimension], piece, *index[self.dimension + 1 :])


def _piece_length(n: int, length: int, count: int) -> int:
    """Return the length of each of `count` pieces, or fewer, of shards of this length of a dimension of n."""
    if length == n:
        return -(-length // count)
    return length // next(k for k in range(min(count, length), 0, -1) if length % k == 0)
