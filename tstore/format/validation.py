"""Validation of a record as the next commit: its parts, its manifests, and their effect on the tree; pure, no I/O.

A function that may take seconds, because somebody wrote 10^6 documents or chunks, is a generator: it yields every
few milliseconds, so that the caller can serve others or stop, and returns its result at the end.

Decoding has checked each record and manifest on its own (`wellformed`). The caller reads the manifests and
compares the lengths of the packs with what `check_chunks` returns. `retention.check_collection` checks what a
garbage collection decides.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from tstore.errors import Corrupt, UnsupportedFormat
from tstore.format.array_metadata import ArrayMeta
from tstore.format.checksums import block_checks
from tstore.format.chunk_refs import SHORT_COLUMN, ChunkRow, ChunkTable, parse_column, ranges
from tstore.format.documents import Document
from tstore.format.records import Record
from tstore.format.references import Manifest, ObjectRef
from tstore.format.tree import Node, Tree, in_order, without_deleted

__all__ = [
    "MAX_PARTS",
    "Steps",
    "added_chunks",
    "advance",
    "check_chunks",
    "check_form",
    "check_reused",
    "chunk_ends",
    "next_tree",
    "run_steps",
]

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work in steps of a few milliseconds that returns a result."""

MAX_PARTS = 64
"""The maximum number of transactions that share one record, and so of manifests in it."""

_STEP_BYTES = 256 << 10  # of documents that are parsed in one step
_STEP_ROWS = 16 << 10  # of chunks that are verified in one step
_FEW = 16  # rows; fewer are looked up one by one


def run_steps(steps: Steps[T]) -> T:
    """Make all steps without a pause and return their result."""
    results: list[T] = []
    while not results:
        results = advance(steps)
    return results[0]


def advance(steps: Steps[T]) -> list[T]:
    """Make one step; return a list with the result after the last one, otherwise an empty one."""
    try:
        next(steps)
    except StopIteration as end:
        return [end.value]
    return []


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
        raise Corrupt("its list of reused packs differs from the packs to which its chunks refer")


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

    Chunks at the same place are hashed once. The distinct chunks of a pack must not be longer than it in total.
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
    """Yield once, sorted by pack key and offset, each chunk of a record that the nodes at its paths do not have.

    A table is yielded every few milliseconds, even an empty one. Chunks that are inline or in `absent` packs are
    left out. Raise `Corrupt` if chunks overlap in a pack, so that no byte is read twice.
    """
    joined = ChunkTable.concat([manifest.table for manifest in manifests])
    packs, own = joined.packs, f"txn/{record.transaction}/"
    stored = [at for at, pack in enumerate(packs) if isinstance(pack, str) and pack not in absent]
    rank = np.full(len(packs), -1, np.int64)
    rank[sorted(stored, key=packs.__getitem__)] = np.arange(len(stored))
    added = rank[joined.pack] >= 0
    foreign = (
        added & np.array([isinstance(p, str) and not p.startswith(own) for p in packs], np.bool_)[joined.pack]
    )
    for rows, known in _known_rows(joined, np.flatnonzero(foreign), manifests, nodes):
        added[rows] = ~known
        yield joined.part(0, 0)
    order = np.flatnonzero(added)
    order = order[np.lexsort((joined.offset[order], rank[joined.pack[order]]))]
    last, end = -1, 0  # the pack and the end of the last chunk yielded
    for start in range(0, len(order), _STEP_ROWS):
        first = max(0, start - 1)  # the last row of the step before, for comparison
        table = joined.take(order[first : start + _STEP_ROWS])
        differs = ~_equal(table.part(0, len(table) - 1), table.part(1, len(table)))
        table = table.take(np.flatnonzero(np.concatenate([[start == 0], differs])))
        if not len(table):
            continue
        pack, offset, stop = table.pack, table.offset, table.offset + table.length
        overlaps = (offset[1:] < stop[:-1]) & (pack[1:] == pack[:-1])
        if overlaps.any() or (pack[0] == last and offset[0] < end):
            raise Corrupt("its chunks overlap in a pack; write them one after the other")
        last, end = int(pack[-1]), int(stop[-1])
        yield table


def _known_rows(
    joined: ChunkTable, rows: npt.NDArray[np.int64], manifests: Sequence[Manifest], nodes: Mapping[str, Node]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]]:
    """Yield batches of these rows of the joined tables, and for each row whether its node has the same chunk."""
    if not len(rows):
        return
    paths = [path for manifest in manifests for path in manifest.paths]
    documents = [document for manifest in manifests for document in manifest.metadata()]
    counts = [parse_column(manifest.count, "<u8") for manifest in manifests]
    ends = np.cumsum(np.concatenate(counts)).astype(np.int64)
    for start in range(0, len(rows), _STEP_ROWS):
        some = rows[start : start + _STEP_ROWS]
        owners, owner = np.unique(np.searchsorted(ends, some, "right"), return_inverse=True)
        table = joined.take(some)
        number, tables = table.number, []
        for at, changed in enumerate(owners.tolist()):
            node = nodes.get(paths[changed])
            tables.append(() if node is None else node.tables)
            if node is not None and not node.metadata.equals(documents[changed]):
                own = slice(*np.searchsorted(owner, [at, at + 1]))
                number[own] = _numbers_before(number[own], documents[changed], node.metadata)
        yield some, _known(table.with_numbers(number), owner, tables)


def _numbers_before(
    numbers: npt.NDArray[np.uint64], metadata: Document, before: Document
) -> npt.NDArray[np.integer[Any]]:
    """Return the numbers of a resized array's chunks in its former grid, and arbitrary ones for new chunks."""
    with contextlib.suppress(Corrupt, UnsupportedFormat, ValueError):  # no array, or another number of dimensions
        axes = np.unravel_index(numbers.astype(np.int64), ArrayMeta.parse(metadata.data).counts)
        return np.ravel_multi_index(axes, ArrayMeta.parse(before.data).counts, mode="clip")
    return numbers


def _known(
    rows: ChunkTable, owner: npt.NDArray[np.int64], tables: Sequence[Sequence[ChunkTable]]
) -> npt.NDArray[np.bool_]:
    """Return for each row whether it equals the newest row of its number in `tables[owner]`.

    `owner` is sorted; the newest of a node's tables is the last. Tables are bisected, so the time depends little
    on their length; those that share their columns are bisected together.
    """
    known, left, depth = np.zeros(len(rows), np.bool_), np.arange(len(rows)), 0
    listed: list[ChunkRow] = []
    while len(left):
        depth += 1
        missing: list[int] = []
        owners, begin = np.unique(owner[left], return_index=True)
        sharing: dict[int, list[tuple[ChunkTable, int, int]]] = {}
        for at, first, stop in zip(owners.tolist(), begin.tolist(), [*begin[1:].tolist(), len(left)], strict=True):
            if len(tables[at]) >= depth:
                table = tables[at][-depth]
                sharing.setdefault(id(table.columns), []).append((table, first, stop))
        for parts in sharing.values():
            if sum(stop - first for _, first, stop in parts) < _FEW:
                listed = listed or rows.rows
                for table, first, stop in parts:
                    for at in left[first:stop].tolist():
                        found = table.find(listed[at].number)
                        known[at] = found == listed[at]
                        missing += [at] if found is None else []
                continue
            low, high, begin, end = np.array([(t.start, t.stop, *part) for t, *part in parts]).T
            mine, columns = left[ranges(begin, end - begin)], parts[0][0].columns
            low, high = np.repeat([low, high], end - begin, axis=1)
            position = _search(columns.number, low, high, rows.number[mine])
            present = position < high
            present[present] = columns.number[position[present]] == rows.number[mine[present]]
            whole = ChunkTable(columns, 0, len(columns.number))
            known[mine[present]] = _equal(rows.take(mine[present]), whole.take(position[present]))
            missing += mine[~present].tolist()
        left = np.sort(np.array(missing, np.int64))
    return known


def _search(
    numbers: npt.NDArray[np.uint64],
    low: npt.NDArray[np.int64],
    stop: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.uint64],
) -> npt.NDArray[np.int64]:
    """Return the position of each wanted number in its own sorted range, or that of the next larger number."""
    high = stop
    while (low < high).any():
        middle = (low + high) // 2
        less = (low < high) & (numbers[np.minimum(middle, len(numbers) - 1)] < wanted)
        low, high = np.where(less, middle + 1, low), np.where(less, high, middle)
    return low


def _equal(a: ChunkTable, b: ChunkTable) -> npt.NDArray[np.bool_]:
    """Return whether each row of a table equals the row at the same position of another, apart from the number."""
    pack: npt.NDArray[np.integer[Any]] = b.pack
    if a.packs is not b.packs:
        others, theirs = np.unique(b.pack, return_inverse=True)
        names = {a.packs[p]: p for p in np.unique(a.pack).tolist()}
        pack = np.array([names.get(b.packs[p], len(a.packs)) for p in others.tolist()], np.int64)[theirs]
    same: npt.NDArray[np.bool_] = (a.pack == pack) & (a.offset == b.offset) & (a.length == b.length)
    if len(at := np.flatnonzero(same)):
        x, y = a.take(at), b.take(at)
        unequal = (x.checks != y.checks).any(axis=1)
        same[at[np.repeat(np.arange(len(at)), np.diff(x.blocks))[unequal]]] = False
    return same


def next_tree(version: int, record: Record, manifests: Sequence[Manifest], tree: Tree) -> Steps[Tree]:
    """Return the tree after a record; raise `Corrupt` for a record that no transaction could have made."""
    if not record.parts:  # the base of a shared record is the lowest base of its parts, so a tag may be newer
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

    `path` is the path of one such node, for the error.
    """
    try:
        if not metadata.is_array:
            metadata.check_group()
            return 0, 0
        meta = ArrayMeta.parse(metadata.data)  # `metadata.meta` would keep it in memory with the tree
        return meta.chunk_count, min(meta.encoded_size, 1 << 63) if meta.chain.fixed else 0
    except (Corrupt, UnsupportedFormat) as error:
        raise type(error)(f"{path or 'the root group'}: {error}") from error


def _wrong_row(manifest: Manifest, limits: Sequence[tuple[int, int]]) -> tuple[str, int] | None:
    """Return the path and the number of a chunk outside of the grid or of a wrong length, or None."""
    table, counts = manifest.table, parse_column(manifest.count, "<u8").astype(np.int64)
    if len(table) <= SHORT_COLUMN:
        owners = [at for at, count in enumerate(counts.tolist()) for _ in range(count)]
        for at, (number, _, _, length, _) in zip(owners, table.rows, strict=True):
            grid_size, expected = limits[at]
            if number >= grid_size or (expected and length != expected):
                return manifest.paths[at], number
        return None
    owner = np.repeat(np.arange(len(counts)), counts)
    grid_size, expected = np.array(limits, np.uint64)[owner].T
    wrong = (table.number >= grid_size) | ((expected > 0) & (table.length != expected))
    if not wrong.any():
        return None
    row = int(np.argmax(wrong))
    return manifest.paths[int(owner[row])], int(table.number[row])


def _check_nesting(nodes: Mapping[str, Node]) -> None:
    """Raise `Corrupt` if a node is below an array."""
    for path, following in itertools.pairwise(in_order(nodes)):
        if path and following.startswith(path) and following[len(path)] == "/" and nodes[path].is_array:
            raise Corrupt(f"{following!r} would be below the array {path!r}")
