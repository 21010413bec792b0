"""The differences between two versions: arrays that were added, removed or changed, and groups.

1. Compare the nodes of both trees by path, except for those that both trees have from the same roots.
2. Compare each array that both versions have by its metadata, and its chunks by the checksums in their references
   (`differing_chunks`).
3. If both arrays have float values and the same shape, read the chunks that differ, or as many of them as a budget
   allows, and measure the distance of their values, in batches that bound the memory.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import exmy
import numpy as np
import numpy.typing as npt

from tstore.core.data.pieces import ReadJob
from tstore.core.data.reader import read_chunks
from tstore.core.format.arguments import checked_budget
from tstore.core.format.arrays.dtypes import is_float
from tstore.core.format.arrays.grid import Selection, box_sides, chunk_coordinates
from tstore.core.format.arrays.samples import Tiling, spread_indices
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.tables import last_number, numbers_of
from tstore.core.format.plain_text import finite_or_none, pluralize, text_table
from tstore.core.format.tree.differing_chunks import differing_numbers
from tstore.core.format.tree.node import Node, check_in_grid, same_metadata
from tstore.core.log.expiry import guard_expiry
from tstore.core.log.reader import LogReader
from tstore.core.maintenance.contents import ArrayInfo, array_info
from tstore.core.runtime.concurrency import batched_by_size
from tstore.core.runtime.pool import run
from tstore.core.snapshot import Snapshot
from tstore.core.storage.base import Storage

__all__ = ["ArrayDiff", "Diff", "diff_snapshots"]

_BATCH_BYTES = 32 << 20
_REGION_BYTES = 1 << 10  # overhead per region, so that a batch has a bounded number of tiny chunks
_SLICE = 1 << 16  # chunk numbers
_TILES = 64  # tiles in a sample of an array, or more if it has more whole chunks
_SMALLEST_TILE = 16 << 10  # bytes, so that samples of many arrays have few tiles
_DECODED = 16  # bytes of chunks decoded for a sample, as a multiple of its size

_FIELDS = ("shape", "dtype", "chunks", "codecs", "attributes", "dimension_names", "sparse")


class ArrayDiff(NamedTuple):
    """The difference between two versions of the array at `path`.

    `change` is the kind of change; `before` and `after` are its metadata, None if it did not exist. `fields`
    names those that differ. `chunks` counts the chunks that were added, removed or changed; if dtype, codecs or
    chunk shape differ, it counts all chunks of the later version. `distance` compares the values of those chunks
    before and after; it is None unless both arrays have float dtypes and the same shape. With a budget it is
    that of a sample, `distance.count` of the `values` in those chunks.
    """

    path: str
    change: Literal["added", "removed", "changed"]
    before: ArrayInfo | None
    after: ArrayInfo | None
    fields: tuple[str, ...]
    chunks: int
    distance: exmy.Difference | None
    values: int = 0

    @property
    def relative_norm(self) -> float:
        """The norm of the difference, relative to the norm of the values before; NaN if no values were compared.

        Both norms are of the values that were compared: those of chunks that differ.
        """
        if self.distance is None or not self.distance.count:
            return math.nan
        noise, signal = self.distance.noise, self.distance.signal
        return math.sqrt(noise / signal) if signal else (math.inf if noise else 0.0)

    def __repr__(self) -> str:
        fields = f" fields={self.fields}" if self.fields else ""
        norm = "" if math.isnan(self.relative_norm) else f" relative_norm={self.relative_norm:.3g}"
        return f"<tstore.ArrayDiff {self.path!r} {self.change}{fields} chunks={self.chunks}{norm}>"

    def document(self) -> dict[str, Any]:
        """Return the difference as JSON values, with None for infinity and NaN."""
        distance = self.distance
        return {
            "path": self.path,
            "change": self.change,
            "before": _array_document(self.before),
            "after": _array_document(self.after),
            "fields": list(self.fields),
            "chunks": self.chunks,
            "values": self.values,
            "values_compared": 0 if distance is None else distance.count,
            "relative_norm": finite_or_none(self.relative_norm),
            "largest": None if distance is None else finite_or_none(distance.largest_error),
            "sqnr_db": None if distance is None else finite_or_none(distance.sqnr),
        }


class Diff(NamedTuple):
    """The differences between the versions `before` and `after`; `arrays` and `groups` are sorted by path.

    `groups` lists the paths of groups that were added or removed or whose attributes differ.
    """

    before: int
    after: int
    arrays: tuple[ArrayDiff, ...]
    groups: tuple[str, ...]

    def __repr__(self) -> str:
        counts = f"{pluralize(len(self.arrays), 'array')}, {pluralize(len(self.groups), 'group')}"
        return f"<tstore.Diff before={self.before} after={self.after}: {counts}>"

    @property
    def by_change(self) -> list[ArrayDiff]:
        """The arrays by the relative norm of their difference, the largest first; those not compared come last.

        Arrays with values that are not finite come first.
        """
        return sorted(self.arrays, key=_change_order)

    def table(self) -> str:
        """Return a line of text for each array, by the relative norm of the difference, and the counts."""
        rows = [("array", "change", "chunks", "relative norm", "largest")]
        for a in self.by_change:
            measured = (f"{a.relative_norm:.3g}", f"{a.distance.largest_error:.3g}") if a.distance else ("", "")
            rows.append((a.path, a.change, f"{a.chunks:,}", *measured))
        return f"{text_table(rows, left=(0, 1))}\n{self!r}"

    def document(self) -> dict[str, Any]:
        """Return the differences as JSON values."""
        return {
            "before": self.before,
            "after": self.after,
            "arrays": [a.document() for a in self.arrays],
            "groups": list(self.groups),
        }


def _change_order(array: ArrayDiff) -> tuple[int, float]:
    if array.distance is None or not array.distance.count:
        return 2, 0.0
    norm = array.relative_norm
    return (1, -norm) if math.isfinite(norm) else (0, 0.0)


async def diff_snapshots(log: LogReader, before: Snapshot, after: Snapshot, budget: int | None = None) -> Diff:
    """Compare two snapshots of one store; read about `budget` bytes of values, or all that differ."""
    comparison = _diff(log.storage, before, after, checked_budget(budget))
    return await guard_expiry(log, before.version, guard_expiry(log, after.version, comparison))


async def _diff(storage: Storage, before: Snapshot, after: Snapshot, budget: int | None) -> Diff:
    paths = await run(before.tree.nodes.apart, after.tree.nodes)
    for snapshot in (before, after):
        await snapshot.read_nodes(paths)
    arrays, pairs, groups = await run(_compare, before, after, paths)
    distances = await _distances(storage, pairs, budget)
    arrays += await run(lambda: [p.difference(distances.get(p.path)) for p in pairs if p.differs])
    arrays.sort(key=lambda diff: diff.path)
    return Diff(before.version, after.version, tuple(arrays), tuple(groups))


def _compare(
    before: Snapshot, after: Snapshot, paths: Collection[str]
) -> tuple[list[ArrayDiff], list[_ArrayPair], list[str]]:
    """Split these paths into arrays of one snapshot, arrays of both, and groups that differ."""
    old, new = before.tree.nodes, after.tree.nodes
    changed_fields = functools.cache(_changed_fields)  # many arrays have the same two documents
    arrays: list[ArrayDiff] = []
    pairs: list[_ArrayPair] = []
    groups: list[str] = []
    for path in sorted(p for p in paths if old.get(p) is not new.get(p)):
        a, b = old.get(path), new.get(path)
        if not same_metadata(_group(a), _group(b)):
            groups.append(path)
        a, b = _array(a), _array(b)
        if a is None and b is not None:
            arrays.append(ArrayDiff(path, "added", None, array_info(path, b), (), b.chunk_count, None))
        elif a is not None and b is None:
            arrays.append(ArrayDiff(path, "removed", array_info(path, a), None, (), a.chunk_count, None))
        elif a is not None and b is not None:
            pairs.append(_ArrayPair(path, a, b, changed_fields))
    return arrays, pairs, groups


def _changed_fields(before: Document, after: Document) -> tuple[str, ...]:
    """Return the names of the fields in which the metadata of two arrays differ."""
    if before.equals(after):
        return ()
    a, b = before.meta, after.meta
    fields = [field for field in _FIELDS if getattr(a, field) != getattr(b, field)]
    return tuple(fields if a.has_fill_value_of(b) else [*fields, "fill_value"])


class _ArrayPair:
    """One array in two versions, with the metadata fields and the chunks that differ.

    `differing` has the numbers of these chunks (`differing_numbers`). If the checksums can't be compared because
    the encodings differ, it has all chunks of the later version.
    """

    def __init__(self, path: str, before: Node, after: Node, fields_of: Callable[..., tuple[str, ...]]) -> None:
        self.path = path
        self.nodes = (before, after)
        self.metas = (before.meta, after.meta)
        self.fields = fields_of(before.metadata, after.metadata)
        self._same_encoding = not {"dtype", "chunks", "codecs"} & set(self.fields)
        if self._same_encoding:
            self.differing = differing_numbers(before, after)
        else:
            check_in_grid(path, after.meta, last_number(after.tables))
            self.differing = numbers_of(after.tables)

    @property
    def differs(self) -> bool:
        """Whether metadata or chunks differ."""
        return bool(self.fields) or len(self.differing) > 0

    def difference(self, distance: exmy.Difference | None) -> ArrayDiff:
        """Return the difference, with the distance between the values."""
        before, after = (array_info(self.path, node) for node in self.nodes)
        chunks, values = len(self.differing), self.values
        return ArrayDiff(self.path, "changed", before, after, self.fields, chunks, distance, values)

    @functools.cached_property
    def readable(self) -> npt.NDArray[np.uint64]:
        """The differing chunks to read; none if the shapes differ or a dtype is not a float."""
        a, b = self.metas
        comparable = a.shape == b.shape and is_float(a.dtype) and is_float(b.dtype)
        return self._readable_chunks() if comparable else np.empty(0, np.uint64)

    @property
    def width(self) -> int:
        """The bytes of a value in both versions together."""
        return sum(meta.dtype.itemsize for meta in self.metas)

    @functools.cached_property
    def values(self) -> int:
        """The number of values in the chunks to read."""
        b = self.metas[1]
        if not len(self.readable):
            return 0
        if len(self.readable) == b.chunk_count:
            return b.size
        values = 0
        for numbers in _slices(self.readable):
            at = np.unravel_index(numbers.astype(np.int64), b.counts)
            sides = [np.minimum(c, n - i * c) for i, c, n in zip(at, b.chunks, b.shape, strict=True)]
            values += int(np.prod(sides, axis=0).sum())
        return values

    def regions(self, share: float) -> Iterator[Selection]:
        """Yield the regions to read from both versions: all chunks that differ, or tiles spread over them.

        Tiles have about `share` bytes of values together, at least one value.
        """
        b, numbers = self.metas[1], self.readable
        chunk = b.chunk_size * self.width
        if share >= len(numbers) * chunk:
            yield from self._whole_regions(max(1, _BATCH_BYTES // chunk))
            return
        reads = int(max(1, share // chunk, min(_TILES, _DECODED * share // chunk, share // _SMALLEST_TILE)))
        chunks = min(len(numbers), reads)
        tiles = reads // chunks
        sides = box_sides(b.chunks, min(b.chunk_size, int(share) // (chunks * tiles * self.width)))
        for i in spread_indices(len(numbers), chunks):
            starts = [k * c for k, c in zip(chunk_coordinates(int(numbers[i]), b.counts), b.chunks, strict=True)]
            inside = tuple(min(c, n - at) for c, n, at in zip(b.chunks, b.shape, starts, strict=True))
            tiling = Tiling(inside, inside, sides, tiles)
            for region in tiling._replace(sampled=min(tiles, tiling.tile_count)).regions():
                yield Selection(
                    tuple(range(at + r.start, at + r.stop) for at, r in zip(starts, region, strict=True))
                )

    def _whole_regions(self, longest: int) -> Iterator[Selection]:
        """Yield the regions of all chunks that differ, up to `longest` that lie in a row in one region."""
        b, numbers = self.metas[1], self.readable
        row = b.counts[-1] if b.counts else 1
        breaks = np.flatnonzero((np.diff(numbers) != 1) | (numbers[1:] % np.uint64(row) == 0)) + 1
        for first, stop in itertools.pairwise([0, *breaks.tolist(), len(numbers)]):
            for at in range(first, stop, longest):
                sides = [*b.chunks[:-1], *(c * min(longest, stop - at) for c in b.chunks[-1:])]
                place = zip(chunk_coordinates(int(numbers[at]), b.counts), b.chunks, sides, b.shape, strict=True)
                yield Selection(tuple(range(i * c, min(i * c + side, n)) for i, c, side, n in place))

    def _readable_chunks(self) -> npt.NDArray[np.uint64]:
        """Return the differing chunks without those that are missing from an array that is not sparse.

        If the encodings differ and a chunk is missing, return none: the grids may differ, so a chunk that is
        missing from one array may be part of many chunks of the other.
        """
        numbers = self.differing
        for node, meta in zip(self.nodes, self.metas, strict=True):
            if meta.sparse or node.chunk_count == meta.chunk_count:
                continue
            if not self._same_encoding:
                return numbers[:0]
            present = [np.sort(node.select(part).number) for part in _slices(numbers)]
            numbers = np.concatenate([np.empty(0, np.uint64), *present])
        return numbers


_Regions = list[tuple[_ArrayPair, Selection]]


async def _distances(
    storage: Storage, pairs: Sequence[_ArrayPair], budget: int | None
) -> dict[str, exmy.Difference]:
    """Return the distance between the values of each pair, by path; omit pairs that have no regions to read."""
    distances: dict[str, exmy.Difference] = {}
    batches = _batches(pairs, await run(_largest_share, pairs, budget))
    while batch := await run(next, batches, None):
        outs, jobs = [], []
        for pair, region in batch:
            outs.append([np.empty(region.shape, meta.dtype) for meta in pair.metas])
            for node, meta, out in zip(pair.nodes, pair.metas, outs[-1], strict=True):
                jobs.append(ReadJob(pair.path, meta, node, region, out))
        await read_chunks(storage, jobs)
        await run(_add_distances, distances, batch, outs)
    return distances


def _largest_share(pairs: Sequence[_ArrayPair], budget: int | None) -> float:
    """Return how many bytes of each pair to read at most, so that all stay within the budget."""
    if budget is None:
        return math.inf
    sizes = sorted(size for pair in pairs if (size := pair.values * pair.width))
    room = float(budget)
    for i, size in enumerate(sizes):
        share = room / (len(sizes) - i)
        if size > share:
            return share
        room -= size
    return math.inf


def _batches(pairs: Sequence[_ArrayPair], share: float) -> Iterator[_Regions]:
    """Yield the regions of all pairs in batches, whose values take about `_BATCH_BYTES` in memory."""
    regions = ((pair, region) for pair in pairs for region in pair.regions(share))
    return batched_by_size(regions, lambda at: math.prod(at[1].shape) * at[0].width + _REGION_BYTES, _BATCH_BYTES)


def _add_distances(
    distances: dict[str, exmy.Difference], batch: _Regions, values: Sequence[Sequence[npt.NDArray[Any]]]
) -> None:
    for (pair, _), (a, b) in zip(batch, values, strict=True):
        distance = exmy.compare(a, b)
        if not math.isfinite(distance.noise):
            distance = exmy.compare(*_without_unchanged(a, b))
        distances[pair.path] = distances[pair.path] + distance if pair.path in distances else distance


def _without_unchanged(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Replace NaN and infinity that are the same in both by zeros."""
    unchanged = (np.isnan(a) & np.isnan(b)) | (np.isinf(a) & (a == b))
    return np.where(unchanged, np.zeros((), a.dtype), a), np.where(unchanged, np.zeros((), b.dtype), b)


def _array(node: Node | None) -> Node | None:
    return node if node is not None and node.is_array else None


def _group(node: Node | None) -> Node | None:
    return node if node is not None and not node.is_array else None


def _slices(numbers: npt.NDArray[np.uint64]) -> Iterator[npt.NDArray[np.uint64]]:
    return (numbers[at : at + _SLICE] for at in range(0, len(numbers), _SLICE))


def _array_document(info: ArrayInfo | None) -> dict[str, Any] | None:
    return None if info is None else {name: value for name, value in info._asdict().items() if name != "path"}
