"""The arrays of a version with their shapes, codecs and stored sizes, and the differences between two versions.

Only the values of float arrays are read, in bounded batches, and only from chunks that differ. All else is known
from metadata: chunks are compared by the checksums in their references.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import exmy
import numpy as np
import numpy.typing as npt

from tstore.data.pieces import ReadJob
from tstore.data.reader import read_chunks
from tstore.errors import NotFound
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import ChunkTable
from tstore.format.documents import Document
from tstore.format.grid import Selection, chunk_coordinates
from tstore.format.layout import owner_of
from tstore.format.patterns import compile_patterns
from tstore.format.tree import Node, Tree, in_order, is_at_or_below, same_metadata
from tstore.log.expiry import changes_nothing
from tstore.log.reader import LogReader
from tstore.runtime.pool import run
from tstore.snapshot import Snapshot
from tstore.storage.base import Storage

__all__ = [
    "ArrayDiff",
    "ArrayInfo",
    "Diff",
    "array_info",
    "contents",
    "detailed_listing",
    "diff_snapshots",
    "listing",
    "selected_by",
]

_BATCH_BYTES = 32 << 20

_FIELDS = ("shape", "dtype", "chunks", "codecs", "fill_value", "attributes", "dimension_names", "sparse")


class ArrayInfo(NamedTuple):
    """The type, shape, codec and size of one array. `stored_bytes` counts the encoded bytes of its chunks."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    codec: str
    stored_bytes: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def bits_per_value(self) -> float:
        """Stored bits per element, codec headers and the padding of edge chunks included; 0 for an empty array."""
        return 8 * self.stored_bytes / self.size if self.size else 0.0


def selected_by(snapshot: Snapshot, path: str) -> Callable[[str], bool]:
    """Return a function that tells whether a path is at or below this one, or matches it if it is a pattern.

    The path of an array or group that exists is no pattern, whatever characters it has.
    """
    top = path.strip("/")
    if not any(wildcard in top for wildcard in "*?") or top in snapshot.tree.nodes:
        return lambda p: is_at_or_below(p, top)
    return compile_patterns(top)


def contents(snapshot: Snapshot, path: str = "") -> list[ArrayInfo]:
    """Return the arrays at and below a path, or those that match a pattern such as `params/**/w`.

    Raise `NotFound`, naming the top-level paths, if the path is neither an array nor a group and matches none.
    """
    top, selects = path.strip("/"), selected_by(snapshot, path)
    nodes = snapshot.tree.nodes
    arrays = [array_info(p, nodes[p]) for p in in_order(nodes) if nodes[p].is_array and selects(p)]
    if not arrays and top and top not in nodes:
        names = list(dict.fromkeys(p.partition("/")[0] for p, n in nodes.items() if n.is_array))
        shown = f"its top-level paths are: {', '.join(names[:5])}" if names else "it has no arrays"
        more = ", …" if len(names) > 5 else ""
        below = compile_patterns(f"{top}/**")
        if any(n.is_array and below(p) for p, n in nodes.items()):  # the pattern matches groups only
            shown, more = f"to select the arrays below, pass {top + '/**'!r}", ""
        raise NotFound(f"{snapshot.location} has no array or group {path!r}; {shown}{more}")
    return arrays


def listing(snapshot: Snapshot, path: str = "") -> dict[str, Any]:
    """Return the version, its tags, its arrays (those of `contents`) and totals, as plain JSON values."""
    arrays = contents(snapshot, path)
    stored, values = sum(a.stored_bytes for a in arrays), sum(a.size for a in arrays)
    return {
        "version": snapshot.version,
        "tags": [tag for tag, version in snapshot.tags.items() if version == snapshot.version],
        "arrays": [{**a._asdict(), "bits_per_value": a.bits_per_value} for a in arrays],
        "total": {
            "arrays": len(arrays),
            "values": values,
            "stored_bytes": stored,
            "bits_per_value": 8 * stored / values if values else 0.0,
        },
    }


async def detailed_listing(log: LogReader, snapshot: Snapshot, path: str = "") -> dict[str, Any]:
    """Return the `listing` with the number of chunks, the bytes of the values and the shared bytes of each array.

    The shared bytes of a version are those of chunks in packs that earlier versions wrote. Chunks that are stored
    inline count as its own.
    """
    document = listing(snapshot, path)
    version = snapshot.version
    while version and changes_nothing(await log.record(version)):
        version -= 1
    own = frozenset((await log.record(version)).transactions) if version else frozenset()
    for array in document["arrays"]:
        node = snapshot.tree.nodes[array["path"]]
        array["chunk_count"] = len(node.chunks)
        array["value_bytes"] = node.meta.size * node.meta.dtype.itemsize
        array["shared_bytes"] = _shared_bytes(node.chunks, own)
    for name in ("value_bytes", "shared_bytes"):
        document["total"][name] = sum(array[name] for array in document["arrays"])
    return document


def _shared_bytes(chunks: ChunkTable, own: frozenset[str]) -> int:
    """Return the encoded bytes of the chunks in packs of transactions other than `own`."""
    positions = np.unique(chunks.pack)
    packs = (chunks.packs[position] for position in positions.tolist())
    shared = positions[[isinstance(pack, str) and owner_of(pack) not in own for pack in packs]]
    return int(chunks.length[np.isin(chunks.pack, shared)].sum())


def array_info(path: str, node: Node) -> ArrayInfo:
    """Return the description of the array at a node."""
    meta = node.meta
    names = [c.get("configuration", {}).get("format", c["name"]) for c in meta.codecs]
    stored = int(node.chunks.length.sum())
    return ArrayInfo(path, meta.dtype.name, meta.shape, meta.chunks, "+".join(names), stored)


class ArrayDiff(NamedTuple):
    """The difference between two versions of one array.

    `fields` names the metadata fields that differ. `chunks` counts the chunks that were added, removed or changed;
    if dtype, codecs or chunk shape differ, it counts all chunks of the later version. `distance` compares the
    values of those chunks before and after; it is None unless both arrays have float dtypes and the same shape.
    """

    path: str
    change: Literal["added", "removed", "changed"]
    before: ArrayInfo | None
    after: ArrayInfo | None
    fields: tuple[str, ...]
    chunks: int
    distance: exmy.Difference | None

    def __repr__(self) -> str:
        fields = f" fields={self.fields}" if self.fields else ""
        return f"<tstore.ArrayDiff {self.path!r} {self.change}{fields} chunks={self.chunks}>"

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
            "values_compared": 0 if distance is None else distance.count,
            "largest": None if distance is None else _finite(distance.largest_error),
            "sqnr_db": None if distance is None else _finite(distance.sqnr),
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
        counts = f"{len(self.arrays)} arrays, {len(self.groups)} groups"
        return f"<tstore.Diff before={self.before} after={self.after}: {counts}>"

    def document(self) -> dict[str, Any]:
        """Return the differences as JSON values."""
        return {
            "before": self.before,
            "after": self.after,
            "arrays": [a.document() for a in self.arrays],
            "groups": list(self.groups),
        }


async def diff_snapshots(storage: Storage, before: Snapshot, after: Snapshot) -> Diff:
    """Compare two snapshots of one store."""
    old, new = before.tree, after.tree
    paths = sorted(old.nodes.keys() | new.nodes.keys())
    touched = [p for p in paths if old.nodes.get(p) is not new.nodes.get(p)]  # trees share unchanged nodes
    nodes = {p: (_array(old, p), _array(new, p)) for p in touched}
    known: _KnownFields = {}
    pairs = {p: _ArrayPair(p, a, b, known) for p, (a, b) in nodes.items() if a is not None and b is not None}
    distances = await _distances(storage, list(pairs.values()))
    arrays = []
    for path, (a, b) in nodes.items():
        pair = pairs.get(path)
        if pair is not None and (pair.fields or len(pair.differing)):
            change: Literal["added", "removed", "changed"] = "changed"
            fields, chunks = pair.fields, len(pair.differing)
        elif pair is None and (array := a if b is None else b) is not None:
            change, fields, chunks = "removed" if b is None else "added", (), len(array.chunks)
        else:
            continue
        infos = [None if node is None else array_info(path, node) for node in (a, b)]
        arrays.append(ArrayDiff(path, change, infos[0], infos[1], fields, chunks, distances.get(path)))
    groups = [p for p in touched if not same_metadata(_group(old, p), _group(new, p))]
    return Diff(before.version, after.version, tuple(arrays), tuple(groups))


_KnownFields = dict[tuple[Document, Document], tuple[str, ...]]
"""The result of `_changed_fields` for pairs of documents, which many nodes can share."""


def _changed_fields(before: Node, after: Node, known: _KnownFields) -> tuple[str, ...]:
    """Return the names of the fields in which the metadata of two arrays differ."""
    documents = before.metadata, after.metadata
    fields = known.get(documents)
    if fields is None:
        fields = ()
        if not before.metadata.equals(after.metadata):
            a, b = before.meta, after.meta
            fields = tuple(f for f in _FIELDS if not _same(getattr(a, f), getattr(b, f)))
        known[documents] = fields
    return fields


class _ArrayPair:
    """One array in two versions, with the metadata fields and the chunks that differ.

    `differing` has the numbers of these chunks in the smallest grid that contains both versions' grids. If the
    checksums can't be compared because the encodings differ, it has all chunks of the later version.
    """

    def __init__(self, path: str, before: Node, after: Node, known: _KnownFields) -> None:
        self.path = path
        self.nodes = (before, after)
        self.metas = (before.meta, after.meta)
        a, b = self.metas
        self.fields = _changed_fields(before, after, known)
        self._same_encoding = not {"dtype", "chunks", "codecs"} & set(self.fields)
        if self._same_encoding:
            counts = tuple(max(n, m) for n, m in zip(a.counts, b.counts, strict=True))
            old, new = (_in_grid(n.chunks, m.counts, counts) for n, m in zip(self.nodes, self.metas, strict=True))
            self.differing = old.differing_numbers(new)
        else:
            self.differing = after.chunks.number

    @property
    def regions(self) -> Iterator[Selection]:
        """The regions to read from both versions and compare; none if shapes differ or dtypes are not floats.

        If chunks are missing from an array that is not sparse, their regions are left out, or all regions if the
        encodings differ.
        """
        a, b = self.metas
        if a.shape != b.shape or not (_is_float(a) and _is_float(b)):
            return
        numbers = self.differing
        for node, meta in zip(self.nodes, self.metas, strict=True):
            if meta.sparse:
                continue
            if self._same_encoding:
                numbers = numbers[node.chunks.locate(numbers) >= 0]
            elif len(node.chunks) < meta.chunk_count:
                return
        for number in numbers.tolist():
            axes = zip(chunk_coordinates(number, b.counts), b.chunks, b.shape, strict=True)
            yield Selection(tuple(range(i * c, min((i + 1) * c, n)) for i, c, n in axes))


async def _distances(storage: Storage, pairs: Sequence[_ArrayPair]) -> dict[str, exmy.Difference]:
    """Measure the distance between the values of each pair, one batch of chunks in memory at a time."""
    distances: dict[str, exmy.Difference] = {}
    batch: list[tuple[_ArrayPair, Selection]] = []
    size = 0
    for pair in pairs:
        width = sum(meta.dtype.itemsize for meta in pair.metas)
        for region in pair.regions:
            batch.append((pair, region))
            size += math.prod(region.shape) * width
            if size >= _BATCH_BYTES:
                await _compare(storage, batch, distances)
                batch, size = [], 0
    if batch:
        await _compare(storage, batch, distances)
    return distances


async def _compare(
    storage: Storage, batch: Sequence[tuple[_ArrayPair, Selection]], distances: dict[str, exmy.Difference]
) -> None:
    values: list[list[npt.NDArray[Any]]] = []
    jobs = []
    for pair, region in batch:
        values.append([np.empty(region.shape, meta.dtype) for meta in pair.metas])
        for node, meta, out in zip(pair.nodes, pair.metas, values[-1], strict=True):
            jobs.append(ReadJob(pair.path, meta, node, region, out))
    await read_chunks(storage, jobs)

    def measure() -> None:
        for (pair, _), (a, b) in zip(batch, values, strict=True):
            distance = exmy.compare(a, b)
            distances[pair.path] = distances[pair.path] + distance if pair.path in distances else distance

    await run(measure)


def _array(tree: Tree, path: str) -> Node | None:
    node = tree.nodes.get(path)
    return node if node is not None and node.is_array else None


def _group(tree: Tree, path: str) -> Node | None:
    node = tree.nodes.get(path)
    return node if node is not None and not node.is_array else None


def _in_grid(chunks: ChunkTable, counts: tuple[int, ...], larger: tuple[int, ...]) -> ChunkTable:
    """Renumber chunks for a grid that is at least as large along every axis, without reordering them."""
    if counts == larger or not len(chunks):
        return chunks
    return chunks.with_numbers(
        np.ravel_multi_index(np.unravel_index(chunks.number.astype(np.int64), counts), larger)
    )


def _is_float(meta: ArrayMeta) -> bool:
    return meta.dtype.kind in "fV"  # V: bfloat16 and the float8 types


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)  # noqa: PLR0124 - both fill values are NaN


def _array_document(info: ArrayInfo | None) -> dict[str, Any] | None:
    return None if info is None else {name: value for name, value in info._asdict().items() if name != "path"}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
