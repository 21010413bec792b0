"""The chunks that a record adds to a store: a server reads them back before it accepts the record; pure, no I/O.

1. Take the rows of all manifests of the record, except those of inline chunks and of packs that the store lacks.
2. Drop the chunks that their nodes have already. Only chunks in packs of other transactions are looked up, because
   no node can have a chunk of the new transaction.
3. Sort the remaining chunks by pack key and offset, drop repetitions, and refuse chunks that overlap.

The work is done in steps of a few milliseconds. Its time depends on the record, not on the size of the tree.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.node import Node
from tstore.errors import Corrupt, UnsupportedFormat

__all__ = ["added_chunks"]

_STEP_ROWS = 16 << 10  # rows that are looked up or yielded at once
_MIN_TOGETHER = 16  # rows; fewer are looked up one by one

_Positions = npt.NDArray[np.int64]


def added_chunks(
    record: Record, manifests: Sequence[Manifest], nodes: Mapping[str, Node], absent: Collection[str]
) -> Iterator[ChunkTable]:
    """Yield the chunks of a record that the `nodes` at its paths do not have, once each, by pack key and offset.

    A table is yielded every few milliseconds, even an empty one. Inline chunks, and the chunks of packs that the
    store lacks (`absent`), are left out. Raise `Corrupt` if chunks overlap in a pack: no byte may be read twice.
    """
    joined, owners = _joined(manifests)
    packs, own_folder = joined.packs, f"txn/{record.transaction}/"
    stored = [at for at, pack in enumerate(packs) if isinstance(pack, str) and pack not in absent]
    rank = np.full(len(packs), -1, np.int64)  # the position of each stored pack in the order of keys
    rank[sorted(stored, key=packs.__getitem__)] = np.arange(len(stored))
    reused = np.array([isinstance(pack, str) and not pack.startswith(own_folder) for pack in packs], np.bool_)
    added = rank[joined.pack] >= 0
    # no node has chunks of a new transaction
    candidates = np.flatnonzero(added & reused[joined.pack] & (owners >= 0))
    for rows, known in _known_rows(joined, owners, candidates, manifests, nodes):
        added[rows] = ~known
        yield joined.part(0, 0)
    order = np.flatnonzero(added)
    order = order[np.lexsort((joined.offset[order], rank[joined.pack[order]]))]
    yield from _distinct(joined, order)


def _joined(manifests: Sequence[Manifest]) -> tuple[ChunkTable, _Positions]:
    """Return the chunks of all manifests, and those that are segments, in one table.

    Return also the position of each chunk's node among the nodes of all manifests, -1 for a segment.
    """
    tables: list[ChunkTable] = []
    owners: list[_Positions] = []
    first = 0  # the first node of a manifest
    for manifest in manifests:
        segments = manifest.segment_table
        tables.append(segments)
        owners.append(np.full(len(segments), -1))
        for nodes, table in manifest.chunks_by_node():
            tables.append(table)
            owners.append(nodes + first)
        first += len(manifest.paths)
    return ChunkTable.concat(tables), np.concatenate([np.empty(0, np.int64), *owners])


def _distinct(joined: ChunkTable, order: _Positions) -> Iterator[ChunkTable]:
    """Yield the rows at these positions without repetitions; raise `Corrupt` if two overlap in a pack."""
    last_pack, end = -1, 0  # pack and end of the last chunk yielded
    for start in range(0, len(order), _STEP_ROWS):
        first = max(0, start - 1)  # the last row of the step before, for comparison
        table = joined.take(order[first : start + _STEP_ROWS])
        differs = ~_equal(table.part(0, len(table) - 1), table.part(1, len(table)))
        table = table.take(np.flatnonzero(np.concatenate([[start == 0], differs])))
        if not len(table):
            continue
        pack, offset, stop = table.pack, table.offset, table.offset + table.length
        overlaps = (offset[1:] < stop[:-1]) & (pack[1:] == pack[:-1])
        if overlaps.any() or (pack[0] == last_pack and offset[0] < end):
            raise Corrupt("its chunks overlap in a pack; write them one after the other")
        last_pack, end = int(pack[-1]), int(stop[-1])
        yield table


def _known_rows(
    joined: ChunkTable,
    owners: _Positions,
    rows: _Positions,
    manifests: Sequence[Manifest],
    nodes: Mapping[str, Node],
) -> Iterator[tuple[_Positions, npt.NDArray[np.bool_]]]:
    """Yield batches of these rows of the joined tables, and for each row whether its node has the same chunk."""
    if not len(rows):
        return
    paths = [path for manifest in manifests for path in manifest.paths]
    documents = [document for manifest in manifests for document in manifest.metadata()]
    rows = rows[np.argsort(owners[rows], kind="stable")]
    for start in range(0, len(rows), _STEP_ROWS):
        batch = rows[start : start + _STEP_ROWS]
        touched, owner = np.unique(owners[batch], return_inverse=True)
        table = joined.take(batch)
        number, tables = table.number, []
        for at, position in enumerate(touched.tolist()):
            node = nodes.get(paths[position])
            node_rows = slice(*np.searchsorted(owner, [at, at + 1]))
            if node is not None and not node.metadata.equals(documents[position]):
                number[node_rows] = _former_numbers(number[node_rows], documents[position], node.metadata)
            tables.append(() if node is None else _tables_with(node, np.unique(number[node_rows])))
        yield batch, _known(table.with_numbers(number), owner, tables)


def _tables_with(node: Node, numbers: npt.NDArray[np.uint64]) -> tuple[ChunkTable, ...]:
    """Return the tables of a node; of those with segments only the rows of these chunks."""
    return tuple(t if isinstance(t, ChunkTable) else t.select(numbers) for t in node.tables)


def _former_numbers(
    numbers: npt.NDArray[np.uint64], metadata: Document, former: Document
) -> npt.NDArray[np.integer[Any]]:
    """Return the numbers of a resized array's chunks in its former grid, and arbitrary numbers for new chunks.

    Return `numbers` unchanged if the former grid has another number of dimensions, or a node is not an array.
    """
    with contextlib.suppress(Corrupt, UnsupportedFormat, ValueError):
        axes = np.unravel_index(numbers.astype(np.int64), ArrayMeta.parse(metadata.data).counts)
        return np.ravel_multi_index(axes, ArrayMeta.parse(former.data).counts, mode="clip")
    return numbers


_Group = list[tuple[ChunkTable, _Positions]]
"""Tables that share their columns, with the positions of the rows to look up in each."""


def _known(rows: ChunkTable, owner: _Positions, tables: Sequence[Sequence[ChunkTable]]) -> npt.NDArray[np.bool_]:
    """Return for each row whether it equals the newest row of its number in `tables[owner]`.

    `owner` is sorted; the newest of a node's tables is the last. Tables are bisected, so the time depends little
    on their length.
    """
    known = np.zeros(len(rows), np.bool_)
    remaining, depth = np.arange(len(rows)), 1
    while len(remaining):  # the rows whose number no newer table has
        missing = [remaining[:0]]
        for group in _groups(remaining, owner, tables, depth):
            few = sum(len(positions) for _, positions in group) < _MIN_TOGETHER
            missing.append((_find_each if few else _find_together)(rows, group, known))
        remaining, depth = np.sort(np.concatenate(missing)), depth + 1
    return known


def _groups(
    remaining: _Positions, owner: _Positions, tables: Sequence[Sequence[ChunkTable]], depth: int
) -> Iterable[_Group]:
    """Group rows by the columns of table number `depth` of their owner, counted from the newest, which is 1.

    Rows whose owner has fewer tables are omitted.
    """
    owners, starts = np.unique(owner[remaining], return_index=True)
    bounds = itertools.pairwise([*starts.tolist(), len(remaining)])
    groups: dict[int, _Group] = {}
    for at, (start, stop) in zip(owners.tolist(), bounds, strict=True):
        if len(tables[at]) >= depth:
            table = tables[at][-depth]
            groups.setdefault(id(table.columns), []).append((table, remaining[start:stop]))
    return groups.values()


def _find_each(rows: ChunkTable, group: _Group, known: npt.NDArray[np.bool_]) -> _Positions:
    """Set `known` for the rows of a group; return the positions of rows whose number their table does not have."""
    missing = []
    all_rows = rows.columns.rows
    for table, positions in group:
        for at in positions.tolist():
            row = table.find(all_rows[at].number)
            known[at] = row == all_rows[at]
            if row is None:
                missing.append(at)
    return np.array(missing, np.int64)


def _find_together(rows: ChunkTable, group: _Group, known: npt.NDArray[np.bool_]) -> _Positions:
    """Find rows as `_find_each` does, but in all tables at once."""
    columns = group[0][0].columns
    counts = [len(positions) for _, positions in group]
    start = np.repeat([table.start for table, _ in group], counts)
    stop = np.repeat([table.stop for table, _ in group], counts)
    positions = np.concatenate([positions for _, positions in group])
    wanted = rows.number[positions]
    index = _bisect(columns.number, start, stop, wanted)
    present = index < stop
    present[present] = columns.number[index[present]] == wanted[present]
    whole = ChunkTable(columns, 0, len(columns.number))
    known[positions[present]] = _equal(rows.take(positions[present]), whole.take(index[present]))
    return positions[~present]


def _bisect(
    numbers: npt.NDArray[np.uint64], low: _Positions, stop: _Positions, wanted: npt.NDArray[np.uint64]
) -> _Positions:
    """Return the position of each wanted number in its sorted range, or the position of the next larger number."""
    high = stop
    while (low < high).any():
        middle = (low + high) // 2
        less = (low < high) & (numbers[np.minimum(middle, len(numbers) - 1)] < wanted)
        low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
    return low


def _equal(a: ChunkTable, b: ChunkTable) -> npt.NDArray[np.bool_]:
    """Return whether each row of a table equals the row at the same position of another, apart from the number."""
    pack: npt.NDArray[np.integer[Any]] = b.pack
    if a.packs is not b.packs:  # number the packs of `b` as in `a`
        used, inverse = np.unique(b.pack, return_inverse=True)
        positions = {a.packs[p]: p for p in np.unique(a.pack).tolist()}
        pack = np.array([positions.get(b.packs[p], len(a.packs)) for p in used.tolist()], np.int64)[inverse]
    same: npt.NDArray[np.bool_] = (a.pack == pack) & (a.offset == b.offset) & (a.length == b.length)
    if len(at := np.flatnonzero(same)):
        x, y = a.take(at), b.take(at)
        unequal = (x.checks != y.checks).any(axis=1)
        same[at[np.repeat(np.arange(len(at)), np.diff(x.blocks))[unequal]]] = False
    return same
