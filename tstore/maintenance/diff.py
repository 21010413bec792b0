"""What changed between two versions: arrays, chunks, and how far float values went.

Chunks are compared by the checksums in their references; no data is read for that. Of float arrays the chunks
that differ are read, a few at a time, and compared value by value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import exmy
import numpy as np
import numpy.typing as npt

from tstore.data.pieces import ReadJob
from tstore.data.reader import read_chunks
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import ChunkTable
from tstore.format.grid import Selection
from tstore.format.tree import Node, Tree
from tstore.maintenance.contents import ArrayInfo, array_info
from tstore.runtime.pool import run
from tstore.snapshot import Snapshot
from tstore.storage.base import Storage

__all__ = ["ArrayDiff", "Diff", "diff_snapshots"]

_ROUND = 32 << 20

_FIELDS = ("shape", "dtype", "chunks", "codecs", "fill_value", "attributes", "dimension_names", "sparse")


class ArrayDiff(NamedTuple):
    """How one array differs.

    `chunks` counts those that were added, removed or have other bytes; all of them where dtype, codecs or chunk
    shape differ. `fields` names what differs of the metadata. `distance` tells how far the values of those
    chunks lie from those before, for float arrays of one shape, else None.
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
        """The difference as JSON can hold it; infinity and NaN become None."""
        far = self.distance
        return {
            "path": self.path,
            "change": self.change,
            "before": _described(self.before),
            "after": _described(self.after),
            "fields": list(self.fields),
            "chunks": self.chunks,
            "values_compared": 0 if far is None else far.count,
            "largest": None if far is None else _finite(far.largest_error),
            "sqnr_db": None if far is None else _finite(far.sqnr),
        }


class Diff(NamedTuple):
    """What differs between the versions `before` and `after`; `arrays` and `groups` are sorted by path.

    `groups` are the paths of groups that were added or removed or whose attributes differ.
    """

    before: int
    after: int
    arrays: tuple[ArrayDiff, ...]
    groups: tuple[str, ...]

    def __repr__(self) -> str:
        counts = f"{len(self.arrays)} arrays, {len(self.groups)} groups"
        return f"<tstore.Diff before={self.before} after={self.after}: {counts}>"

    def document(self) -> dict[str, Any]:
        """The differences as JSON can hold them."""
        return {
            "before": self.before,
            "after": self.after,
            "arrays": [a.document() for a in self.arrays],
            "groups": list(self.groups),
        }


async def diff_snapshots(backend: Storage, before: Snapshot, after: Snapshot) -> Diff:
    """How `after` differs from `before`."""
    old, new = before.tree, after.tree
    paths = sorted(old.nodes.keys() | new.nodes.keys())
    touched = [p for p in paths if old.nodes.get(p) is not new.nodes.get(p)]  # the others no commit has touched
    pairs = {p: (_array(old, p), _array(new, p)) for p in touched}
    found = {p: _ArrayPair(p, a, b) for p, (a, b) in pairs.items() if a is not None and b is not None}
    distances = await _distances(backend, list(found.values()))
    arrays = []
    for path, (a, b) in pairs.items():
        both = found.get(path)
        if both is not None and (both.fields or len(both.numbers)):
            change: Literal["added", "removed", "changed"] = "changed"
            fields, chunks = both.fields, len(both.numbers)
        elif both is None and (a is not None or b is not None):
            only = a if b is None else b
            assert only is not None
            change, fields, chunks = "removed" if b is None else "added", (), len(only.chunks)
        else:
            continue
        infos = [None if node is None else array_info(path, node) for node in (a, b)]
        arrays.append(ArrayDiff(path, change, infos[0], infos[1], fields, chunks, distances.get(path)))
    groups = [p for p in touched if _group(old, p) != _group(new, p)]
    return Diff(before.version, after.version, tuple(arrays), tuple(groups))


class _ArrayPair:
    """One array in two versions: what of its metadata differs, and which chunks of the later grid."""

    def __init__(self, path: str, before: Node, after: Node) -> None:
        self.path = path
        self.nodes = (before, after)
        self.metas = (before.meta, after.meta)
        a, b = self.metas
        self.fields = tuple(f for f in _FIELDS if not _same(getattr(a, f), getattr(b, f)))
        self._alike = not {"dtype", "chunks", "codecs"} & set(self.fields)
        if self._alike and len(a.shape) == len(b.shape):
            counts = tuple(max(n, m) for n, m in zip(a.counts, b.counts, strict=True))
            one, other = (
                _in_grid(n.chunks, m.counts, counts) for n, m in zip(self.nodes, self.metas, strict=True)
            )
            self.numbers = one.differing(other)
        else:
            self.numbers = after.chunks.number

    @property
    def regions(self) -> Iterator[Selection]:
        """The chunks to be read of both and compared; none where the values can't be."""
        a, b = self.metas
        if a.shape != b.shape or not (_is_float(a) and _is_float(b)):
            return
        numbers = self.numbers
        for node, meta in zip(self.nodes, self.metas, strict=True):
            if meta.sparse:
                continue
            if self._alike:
                numbers = numbers[node.chunks.locate(numbers) >= 0]
            elif len(node.chunks) < meta.chunk_count:
                return
        for number in numbers.tolist():
            at = np.unravel_index(number, b.counts)
            yield Selection(
                tuple(
                    range(int(i) * c, min((int(i) + 1) * c, n))
                    for i, c, n in zip(at, b.chunks, b.shape, strict=True)
                )
            )


async def _distances(backend: Storage, pairs: Sequence[_ArrayPair]) -> dict[str, exmy.Difference]:
    """How far the values went, by path; a round of chunks at a time is in memory."""
    found: dict[str, exmy.Difference] = {}
    batch: list[tuple[_ArrayPair, Selection]] = []
    size = 0
    for pair in pairs:
        width = sum(meta.dtype.itemsize for meta in pair.metas)
        for region in pair.regions:
            batch.append((pair, region))
            size += math.prod(region.shape) * width
            if size >= _ROUND:
                await _compare(backend, batch, found)
                batch, size = [], 0
    if batch:
        await _compare(backend, batch, found)
    return found


async def _compare(
    backend: Storage, batch: Sequence[tuple[_ArrayPair, Selection]], found: dict[str, exmy.Difference]
) -> None:
    values: list[list[npt.NDArray[Any]]] = []
    jobs = []
    for pair, region in batch:
        values.append([np.empty(region.shape, meta.dtype) for meta in pair.metas])
        for node, meta, out in zip(pair.nodes, pair.metas, values[-1], strict=True):
            jobs.append(ReadJob(pair.path, meta, node, region, out))
    await read_chunks(backend, jobs)

    def measure() -> None:
        for (pair, _), (a, b) in zip(batch, values, strict=True):
            far = exmy.compare(a, b)
            found[pair.path] = found[pair.path] + far if pair.path in found else far

    await run(measure)


def _array(tree: Tree, path: str) -> Node | None:
    node = tree.nodes.get(path)
    return node if node is not None and node.is_array else None


def _group(tree: Tree, path: str) -> bytes | None:
    node = tree.nodes.get(path)
    return node.document if node is not None and not node.is_array else None


def _in_grid(chunks: ChunkTable, counts: tuple[int, ...], larger: tuple[int, ...]) -> ChunkTable:
    """The chunks numbered as in a grid that is at least as long on every side; their order stays."""
    if counts == larger or not len(chunks):
        return chunks
    return chunks.renumbered(
        np.ravel_multi_index(np.unravel_index(chunks.number.astype(np.int64), counts), larger)
    )


def _is_float(meta: ArrayMeta) -> bool:
    return meta.dtype.kind in "fV"  # V: bfloat16 and the float8 types


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) or (a != a and b != b)  # noqa: PLR0124 - NaN as the fill value of both


def _described(info: ArrayInfo | None) -> dict[str, Any] | None:
    if info is None:
        return None
    return {
        "dtype": info.dtype,
        "shape": info.shape,
        "chunks": info.chunks,
        "codec": info.codec,
        "stored_bytes": info.stored,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
