"""Validation of a record as the next commit: its parts, its manifests, and their effect on the tree; pure, no I/O.

What can take seconds, because somebody wrote 10^6 documents or chunks, is a generator: it yields every few
milliseconds, so that the caller can serve others or stop, and returns its result at the end.

Decoding has checked each record and manifest on its own (`wellformed`). The caller reads the manifests and
compares the lengths of the packs with what `check_chunks` returns. `retention.check_collection` checks what a
garbage collection decides.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt, UnsupportedFormat
from tstore.format.array_metadata import ArrayMeta
from tstore.format.checksums import block_checks
from tstore.format.chunk_refs import SHORT_COLUMN, ChunkRow, ChunkTable, parse_column
from tstore.format.documents import Document
from tstore.format.records import Record
from tstore.format.references import Manifest, ObjectRef, gather
from tstore.format.tree import Node, Tree, in_order, without_deleted

__all__ = [
    "MAX_PARTS",
    "Steps",
    "added_chunks",
    "check_chunks",
    "check_form",
    "check_reused",
    "chunk_ends",
    "next_tree",
    "run_steps",
]

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work in steps of a few milliseconds, and its result."""

MAX_PARTS = 64
"""The maximum number of transactions that share one record, and so of manifests in it."""

_STEP_BYTES = 256 << 10  # of documents that are parsed in one step
_STEP_ROWS = 16 << 10  # of chunks that are verified in one step


def run_steps(steps: Steps[T]) -> T:
    """Make all steps without a pause and return their result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def check_form(record: Record) -> None:
    """Raise `Corrupt` if a record has too many manifests or parts, or parts whose chunks are not all inline."""
    if max(len(record.manifests), len(record.parts)) > MAX_PARTS:
        raise Corrupt(f"it has more than {MAX_PARTS} manifests or parts")
    if record.parts and any(isinstance(m, ObjectRef) or any(m.packs) for m in record.manifests):
        raise Corrupt("several transactions share it, but their chunks are not all inline")


def check_reused(record: Record, manifests: Iterable[Manifest]) -> None:
    """Raise `Corrupt` unless a record lists the packs of other transactions to which its manifests refer."""
    reused = {pack for manifest in manifests for pack in manifest.reused(record.transaction)}
    if reused != set(record.reused):
        raise Corrupt("its list of re-used packs differs from the packs to which its chunks refer")


def check_chunks(manifests: Sequence[Manifest]) -> Steps[dict[str, int]]:
    """Return the minimum length that each pack must have to contain all of its chunks.

    Raise `Corrupt` for a pack without chunks, an inline pack that is too short, or a wrong checksum of its chunks.
    """
    ends: dict[str, int] = {}
    for table in (manifest.table for manifest in manifests):
        for pack, end in zip(table.packs, chunk_ends(table), strict=True):
            if end < 0:
                raise Corrupt("a manifest names a pack to which none of its chunks refers")
            if isinstance(pack, str):
                ends[pack] = max(end, ends.get(pack, 0))
            elif len(pack) < end:
                raise Corrupt(f"a chunk ends beyond its inline pack of {len(pack)} bytes")
        yield from _check_inline(table)
    return ends


def chunk_ends(table: ChunkTable) -> list[int]:
    """Return the end of the last chunk in each pack, -1 for a pack without chunks."""
    if len(table) > SHORT_COLUMN:
        maxima = np.full(len(table.packs), -1, np.int64)
        np.maximum.at(maxima, table.pack, (table.offset + table.length).astype(np.int64))
        return maxima.tolist()
    ends = [-1] * len(table.packs)
    for pack, row in zip(table.pack.tolist(), table.rows, strict=True):
        ends[pack] = max(ends[pack], row.offset + row.length)
    return ends


def _check_inline(table: ChunkTable) -> Steps[None]:
    """Raise `Corrupt` if an inline chunk fails its checksum.

    Chunks at the same place are hashed once. All others in a pack must not be longer than it in total.
    """
    unhashed = {id(pack): len(pack) for pack in table.packs if isinstance(pack, bytes)}
    computed: dict[tuple[int, int, int], bytes] = {}
    for at, (number, pack, offset, length, checks) in enumerate(_each_row(table) if unhashed else ()):
        if at % _STEP_ROWS == _STEP_ROWS - 1:
            yield
        if not isinstance(pack, bytes):
            continue
        actual = computed.get(span := (id(pack), offset, length))
        if actual is None:
            unhashed[id(pack)] -= length
            if unhashed[id(pack)] < 0:
                raise Corrupt(f"chunk {number} overlaps others in its inline pack")
            actual = computed[span] = block_checks(memoryview(pack)[offset : offset + length])
        if actual != checks:
            raise Corrupt(f"the inline chunk {number} does not match its checksum")


def _each_row(table: ChunkTable) -> Iterable[ChunkRow]:
    """Return all rows of a table; of a long one, only a few at a time are Python objects."""
    if len(table) <= _STEP_ROWS:
        return table.rows
    starts = range(0, len(table), _STEP_ROWS)
    parts = (np.arange(start, min(start + _STEP_ROWS, len(table))) for start in starts)
    return itertools.chain.from_iterable(table.take(part).rows for part in parts)


def added_chunks(
    record: Record, manifests: Sequence[Manifest], nodes: Mapping[str, Node], absent: Collection[str]
) -> Iterator[ChunkTable]:
    """Yield the chunks of a record that the nodes at its paths do not have, each once, by pack and offset.

    Chunks that are inline or in `absent` packs are left out. Raise `Corrupt` if chunks overlap in a pack, so that
    no byte is read twice.
    """
    tables, known = [manifest.table for manifest in manifests], 0
    if reusing := [manifest for manifest in manifests if manifest.reused(record.transaction)]:
        paths = (path for manifest in reusing for path in manifest.paths)
        table, _ = gather([nodes[path].tables if path in nodes else () for path in paths])
        tables, known = [table, *tables], len(table)
    joined = ChunkTable.concat(tables)
    stored = np.array([isinstance(pack, str) and pack not in absent for pack in joined.packs], np.bool_)
    order = np.lexsort((joined.offset, joined.pack))  # stable: of equal rows a known one is first
    order = order[stored[joined.pack[order]]]
    last, end = -1, 0  # the pack and the end of the last chunk yielded
    for start in range(0, len(order), _STEP_ROWS):
        first = max(0, start - 1)  # the last row of the step before, for comparison
        positions = order[first : start + _STEP_ROWS]
        rows = joined.take(positions)
        added = _differs_from_previous(rows) & (positions >= known)
        added[: start - first] = False
        if not added.all():
            rows = rows.take(np.flatnonzero(added))
        if not len(rows):
            continue
        pack, offset, stop = rows.pack, rows.offset, rows.offset + rows.length
        overlaps = (offset[1:] < stop[:-1]) & (pack[1:] == pack[:-1])
        if overlaps.any() or (pack[0] == last and offset[0] < end):
            raise Corrupt("its chunks overlap in a pack; write them one after the other")
        last, end = int(pack[-1]), int(stop[-1])
        yield rows


def _differs_from_previous(rows: ChunkTable) -> npt.NDArray[np.bool_]:
    """Return for each row whether it differs from the one before it, apart from the number."""
    differs = np.ones(len(rows), np.bool_)
    pack, offset, length = rows.pack, rows.offset, rows.length
    differs[1:] = (pack[1:] != pack[:-1]) | (offset[1:] != offset[:-1]) | (length[1:] != length[:-1])
    at = np.flatnonzero(~differs)
    if len(at):
        a, b = rows.take(at - 1), rows.take(at)
        unequal = (a.checks != b.checks).any(axis=1)
        differs[at[np.repeat(np.arange(len(at)), np.diff(a.blocks))[unequal]]] = True
    return differs


def next_tree(version: int, record: Record, manifests: Sequence[Manifest], tree: Tree) -> Steps[Tree]:
    """Return the tree after a record; raise `Corrupt` for a record that no transaction could have made."""
    if not record.parts:  # the base of a shared record is the oldest of its parts', so a tag may be newer
        for tag in (*record.tags, *record.dropped):
            if tree.tags.get(tag, 0) > record.base:
                raise Corrupt(
                    f"version {tree.tags[tag]} set the tag {tag!r} after the base of the record, {record.base}"
                )
    base = {} if record.replaces else without_deleted(tree.nodes, record.deleted)
    documents: dict[str, Document] = {}
    for manifest in manifests:
        yield from _check_nodes(manifest, base, documents)
        yield
    result = tree.after(version, record, manifests)
    yield
    if any(path not in base or base[path].is_array != after.is_array for path, after in documents.items()):
        _check_nesting(result.nodes)
    return result


def _check_nodes(manifest: Manifest, base: Mapping[str, Node], documents: dict[str, Document]) -> Steps[None]:
    """Add the metadata of all nodes of a manifest to `documents`.

    Raise `Corrupt` for an invalid document, a change of a node that does not exist, or a chunk outside of the grid
    or of a wrong length, and `UnsupportedFormat` for an array of a newer tstore.
    """
    parsed = 0
    limits: list[tuple[int, int]] = []  # per node: the size of its grid, and the chunk length (0: any)
    checked: dict[Document, tuple[int, int]] = {}
    for path, metadata, fresh, _ in manifest.nodes():
        if not fresh:
            before = documents.get(path) or (base[path].metadata if path in base else None)
            if before is None or not before.equals(metadata):
                raise Corrupt(
                    f"it writes to {path!r}, which does not exist, or was replaced or resized after its base"
                )
        limit = checked.get(metadata)
        if limit is None:
            limit = checked[metadata] = _limits(path, metadata)
            parsed += len(metadata.data)
            if parsed > _STEP_BYTES:
                parsed = 0
                yield
        limits.append(limit)
        if not path and metadata.is_array:
            raise Corrupt("the metadata of the root is that of an array")
        documents[path] = metadata
    wrong = _wrong_row(manifest, limits)
    if wrong is not None:
        path, number = wrong
        raise Corrupt(f"chunk {number} of {path!r} is outside of the grid, or its length is wrong")


def _limits(path: str, metadata: Document) -> tuple[int, int]:
    """Return the size of the grid of nodes with this metadata, and the length of their chunks, 0 for any.

    `path` is that of one of them, for the error.
    """
    try:
        if not metadata.is_array:
            metadata.check_group()
            return 0, 0
        meta = ArrayMeta.parse(metadata.data)  # `metadata.meta` would keep it as long as the tree
        return meta.chunk_count, min(meta.encoded_size, 1 << 63) if meta.chain.fixed else 0
    except (Corrupt, UnsupportedFormat) as error:
        raise type(error)(f"{path or 'the root group'}: {error}") from error


def _wrong_row(manifest: Manifest, limits: Sequence[tuple[int, int]]) -> tuple[str, int] | None:
    """Return the path and the number of a chunk outside of the grid or of a wrong length, or None."""
    table, counts = manifest.table, parse_column(manifest.count, "<u8").astype(np.int64)
    if len(table) <= SHORT_COLUMN:
        owners = [at for at, count in enumerate(counts.tolist()) for _ in range(count)]
        for at, (number, _, _, length, _) in zip(owners, table.rows, strict=True):
            most, expected = limits[at]
            if number >= most or (expected and length != expected):
                return manifest.paths[at], number
        return None
    owner = np.repeat(np.arange(len(counts)), counts)
    most, expected = np.array(limits, np.uint64)[owner].T
    wrong = (table.number >= most) | ((expected > 0) & (table.length != expected))
    if not wrong.any():
        return None
    row = int(np.argmax(wrong))
    return manifest.paths[int(owner[row])], int(table.number[row])


def _check_nesting(nodes: Mapping[str, Node]) -> None:
    """Raise `Corrupt` if a node is below an array."""
    for path, following in itertools.pairwise(in_order(nodes)):
        if path and following.startswith(path) and following[len(path)] == "/" and nodes[path].is_array:
            raise Corrupt(f"{following!r} would be below the array {path!r}")
