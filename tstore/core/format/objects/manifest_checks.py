"""Checks of the columns of manifests, which any program may have written; pure, no I/O.

NumPy's calls would take most of reading a manifest of few chunks, so `surely_valid_rows` checks it without them.
"""

from __future__ import annotations

import itertools
import operator
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tstore.core.format.bounds import NODE_METADATA_LEVELS
from tstore.core.format.checksums import BLOCK, CHECK_SIZE
from tstore.core.format.objects.chunk_rows import ChunkRow, chunk_rows
from tstore.core.format.objects.columns import SHORT_COLUMN, largest, parse_column, total
from tstore.core.format.wellformed import check_paths
from tstore.errors import Corrupt

__all__ = ["NodeColumns", "check_nodes", "check_order", "surely_valid_rows"]

_U32 = [struct.Struct(f"<{count}I").unpack for count in range(SHORT_COLUMN + 1)]
_U64 = [struct.Struct(f"<{count}Q").unpack for count in range(SHORT_COLUMN + 1)]


class NodeColumns(NamedTuple):
    """The fields of a `Manifest` that describe its nodes."""

    documents: Sequence[bytes]
    paths: Sequence[str]
    document: bytes
    replaces_node: bytes
    counts: bytes


def surely_valid_rows(
    nodes: NodeColumns, packs: Sequence[bytes], chunks: tuple[bytes, bytes, bytes, bytes, bytes]
) -> list[ChunkRow] | None:
    """Return the few rows of a manifest without segments if it is certainly valid.

    `packs` are its packs, all inline, and `chunks` are its fields from `number` to `checks`. None says only that
    this check is too simple for the manifest.
    """
    number, pack, offset, length, checks = chunks
    n, rows = len(nodes.paths), len(pack) // 4
    if not (0 < n <= SHORT_COLUMN and 0 < rows <= SHORT_COLUMN):
        return None
    try:
        counts, positions = _U64[n](nodes.counts), _U32[n](nodes.document)
        numbers, lengths = _U64[rows](number), _U64[rows](length)
        places, offsets = _U32[rows](pack), _U64[rows](offset)
        check_paths(nodes.paths)
    except (struct.error, Corrupt):
        return None
    valid = (
        max(lengths) <= BLOCK  # so that each chunk has one checksum
        and len(checks) == CHECK_SIZE * rows
        and max(places) < len(packs)
        and (len(packs) == 1 or len(set(packs)) == len(packs))
        and max(offsets) < 1 << 62
        and sum(counts) == rows
        and (rows == 1 or all(map(operator.lt, numbers, numbers[1:])))
        and max(positions) < len(nodes.documents)
        and max(map(len, nodes.documents)) <= NODE_METADATA_LEVELS  # bytes, so it has no more levels or values
        and len(nodes.replaces_node) == n
        and max(nodes.replaces_node) <= 3
        and (n == 1 or all(map(operator.lt, nodes.paths, nodes.paths[1:])))
    )
    if not valid:
        return None
    split = [checks[at : at + CHECK_SIZE] for at in range(0, len(checks), CHECK_SIZE)]
    return chunk_rows(numbers, [packs[at] for at in places], offsets, lengths, split)


def check_nodes(nodes: NodeColumns, rows: int) -> None:
    """Raise `Corrupt` if the columns of the nodes are invalid, or their counts do not add up to `rows`."""
    n, paths = len(nodes.paths), nodes.paths
    if len(nodes.document) != 4 * n or len(nodes.replaces_node) != n or len(nodes.counts) != 8 * n:
        raise Corrupt("the columns of a manifest differ in length")
    if total(parse_column(nodes.counts, "<u8"), rows) != rows:
        raise Corrupt("the chunk counts in a manifest do not add up to its number of chunks")
    if n and largest(parse_column(nodes.document, "<u4")) >= len(nodes.documents):
        raise Corrupt("a manifest refers to a metadata document that it does not have")
    check_paths(list(filter(None, paths)))
    if not all(map(operator.lt, paths, itertools.islice(paths, 1, None))):
        raise Corrupt("the nodes of a manifest are out of order, or one is listed twice")
    if nodes.replaces_node.translate(None, b"\0\1\2\3"):
        raise Corrupt("a manifest has a flag that is none of 0, 1, 2 and 3")


def check_order(number: npt.NDArray[np.uint64], ends: npt.NDArray[np.int64]) -> None:
    """Raise `Corrupt` unless chunk numbers rise within each node; the rows of nodes end at `ends`."""
    rising = number[1:] > number[:-1]
    if rising.all():
        return
    rising[ends[(ends > 0) & (ends < len(number))] - 1] = True  # where the next node begins
    if not rising.all():
        raise Corrupt("the chunks of a node are out of order, or one is listed twice")
