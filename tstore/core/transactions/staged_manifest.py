"""The manifest of the staged changes of a transaction."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.columns import SHORT_COLUMN
from tstore.core.format.objects.layers import overlay
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.short_manifests import short_manifest
from tstore.core.transactions.staged_array import StagedArray

__all__ = ["any_segments", "staged_manifest"]

_has_segments = operator.attrgetter("has_segments")


def any_segments(arrays: Mapping[str, StagedArray]) -> bool:
    """Return whether `staged_manifest` may read segments of the arrays, and so block."""
    return any(map(_has_segments, arrays.values()))


def staged_manifest(arrays: Mapping[str, StagedArray], groups: Mapping[str, bytes]) -> Manifest:
    """Return a manifest of staged arrays, and of groups given by their documents, sorted by path."""
    paths = sorted([*groups, *arrays])
    if any_segments(arrays):
        with_segments = [(p, a.meta.document, a.flags, a.staged_chunks()) for p, a in arrays.items()]
        merges = {path: array.merge for path, array in arrays.items() if array.merge is not None}
        without_chunks = [(path, document, 1, ()) for path, document in groups.items()]
        return Manifest.from_nodes([*without_chunks, *with_segments], merges)
    nodes: list[tuple[str, bytes, int]] = []
    counts: list[int] = []
    tables: list[ChunkTable] = []
    rows: list[ChunkRow] = []  # of the arrays since the last table
    for path in paths:
        array = arrays.get(path)
        if array is None:
            nodes.append((path, groups[path], 1))
            counts.append(0)
            continue
        nodes.append((path, array.meta.document, array.flags))
        written = array.written_rows
        if written is not None:
            rows += written
            counts.append(len(written))
        else:
            tables += [ChunkTable.from_rows(rows), overlay(array.staged_chunks())]
            rows = []
            counts.append(len(tables[-1]))
    if not tables and len(rows) <= SHORT_COLUMN and _rows_ascend(rows, counts):
        return short_manifest(nodes, counts, rows)
    last = ChunkTable.from_rows(rows)
    table = ChunkTable.concat([*tables, last]).compact() if tables else last
    if _ascend(table.number, counts):
        return Manifest.from_table(nodes, counts, table)
    stops = itertools.accumulate(counts)  # rows out of order, as worker threads wrote the chunks
    parts = [(table.part(stop - count, stop),) for stop, count in zip(stops, counts, strict=True)]
    return Manifest.from_nodes([(*node, part) for node, part in zip(nodes, parts, strict=True)])


def _rows_ascend(rows: Sequence[ChunkRow], counts: Sequence[int]) -> bool:
    """Return whether the numbers ascend within each of the consecutive ranges of rows of these lengths."""
    if len(rows) <= 1:
        return True
    ends = set(itertools.accumulate(counts))
    pairs = enumerate(itertools.pairwise(rows), 1)
    return all(before.number < after.number or at in ends for at, (before, after) in pairs)


def _ascend(numbers: npt.NDArray[np.uint64], counts: list[int]) -> bool:
    """Return whether the numbers ascend within each of the consecutive ranges of these lengths."""
    if len(numbers) < 2:
        return True
    falls = np.flatnonzero(numbers[1:] <= numbers[:-1]) + 1
    return bool(np.isin(falls, np.cumsum(counts)).all())
