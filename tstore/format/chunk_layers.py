"""Layers of chunk tables: what each commit wrote of an array, one table over the other; pure, no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tstore.format.chunk_refs import ChunkTable, ranges

__all__ = ["gather", "layered"]

_MERGED = 16
"""Tables of about one size before they are merged."""


def layered(tables: tuple[ChunkTable, ...], newest: ChunkTable) -> tuple[ChunkTable, ...]:
    """Return the tables with one more over them; many small ones at the end are merged into one.

    Sixteen or more tables at the end are merged once they are of about the same length, to a power of sixteen, or
    shorter. So each row is copied a few times however many commits follow, and about fifteen tables remain for
    each power.
    """
    layers = (*tables, newest)
    while len(layers) >= _MERGED:
        level = _level(layers[-1])
        first = len(layers) - 1
        while first and _level(layers[first - 1]) <= level:
            first -= 1
        if len(layers) - first < _MERGED:
            break
        layers = (*layers[:first], ChunkTable.overlay(layers[first:]).compact())
    return layers


def _level(table: ChunkTable) -> int:
    """Return the power of sixteen that exceeds the number of rows."""
    return -(-len(table).bit_length() // 4)


def gather(nodes: Sequence[Sequence[ChunkTable]]) -> tuple[ChunkTable, npt.NDArray[np.int64]]:
    """Return the overlaid rows of each node, node after node in one table, and their number for each node.

    The result depends on the rows alone, not on how they are divided into tables. Columns that many tables share
    are joined once.
    """
    base: dict[int, int] = {}
    shared: list[ChunkTable] = []
    size = 0
    for table in itertools.chain.from_iterable(nodes):
        columns = table.columns
        if id(columns) not in base:
            base[id(columns)] = size
            shared.append(ChunkTable(columns, 0, len(columns.number)))
            size += len(columns.number)
    joined = ChunkTable.concat(shared)
    owners = np.array([i for i, tables in enumerate(nodes) for _ in tables], np.int64)
    starts = np.array([base[id(t.columns)] + t.start for tables in nodes for t in tables], np.int64)
    sizes = np.array([t.stop - t.start for tables in nodes for t in tables], np.int64)
    at, owner = ranges(starts, sizes), np.repeat(owners, sizes)
    order = np.lexsort((joined.number[at], owner))  # stable: of equal numbers the newest is the last
    at, owner = at[order], owner[order]
    number = joined.number[at]
    newest = np.ones(len(at), np.bool_)
    newest[:-1] = (owner[1:] != owner[:-1]) | (number[1:] != number[:-1])
    counts = np.bincount(owner[newest], minlength=len(nodes)).astype(np.int64)
    return joined.take(at[newest]).compact(), counts
