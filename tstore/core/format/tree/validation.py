"""Validation of a record as the next commit: its parts, its manifests, and their effect on the tree; pure, no I/O.

A function that may take seconds, because a record has 10^6 documents or chunks, is a generator: it yields every
few milliseconds, so that the caller can serve others or stop, and returns its result at the end.

Decoding has checked each record and manifest on its own (`wellformed`). The server reads the manifests, then
1. checks the parts of the record, and its list of reused packs (`check_parts`, `check_reused`),
2. checks inline chunks, and compares the length of each pack with the end of its last chunk, which `check_chunks`
   returns,
3. compares compactions with the tree (`check_compactions`),
4. checks the nodes against those of the tree, and applies the record to it (`next_tree`),
5. reads back the chunks that are new (`added_chunks`).

`retention.check_collection` checks what a garbage collection decides.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.checksums import block_checks
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import SHORT_COLUMN, ChunkRow
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.paths import depth_first_order, parents
from tstore.core.format.tree.node import Node, follows
from tstore.core.format.tree.nodes import Nodes
from tstore.core.format.tree.stored_nodes import no_foundation
from tstore.core.format.tree.tree import Tree
from tstore.errors import Corrupt, NotFound, UnsupportedFormat

__all__ = [
    "MAX_PARTS",
    "Steps",
    "advance",
    "check_chunks",
    "check_compactions",
    "check_foundation",
    "check_parts",
    "check_reused",
    "chunk_ends",
    "next_tree",
    "pack_ends",
    "run_steps",
    "short_packs",
]

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work in steps of a few milliseconds that returns a result."""


@dataclass(frozen=True)
class Done(Generic[T]):
    """The result of work whose steps have all run."""

    result: T


MAX_PARTS = 64
"""The maximum number of transactions that share one record, and so of manifests in it."""

_STEP_BYTES = 256 << 10  # bytes of documents parsed in one step
_STEP_ROWS = 16 << 10  # chunks verified in one step


def run_steps(steps: Steps[T]) -> T:
    """Run all steps without a pause and return their result."""
    while (done := advance(steps)) is None:
        pass
    return done.result


def advance(steps: Steps[T]) -> Done[T] | None:
    """Run one step; return the result after the last one, None before that."""
    try:
        next(steps)
    except StopIteration as end:
        return Done(end.value)
    return None


def check_parts(record: Record) -> None:
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
    """Return the `pack_ends`; raise `Corrupt` for a pack without chunks, or an invalid inline chunk."""
    for manifest in manifests:
        unused = set(filter(None, manifest.packs))
        for table in manifest.tables():
            counts = np.bincount(table.pack, minlength=len(table.packs)).tolist()
            unused.difference_update(itertools.compress(table.packs, counts))
            if any(not count and isinstance(pack, bytes) for pack, count in zip(table.packs, counts, strict=True)):
                raise Corrupt("a manifest has an inline pack to which none of its chunks refers")
            yield from _check_inline(table)
        if unused:
            raise Corrupt("a manifest names a pack to which none of its chunks refers")
    return pack_ends(manifests)


def pack_ends(manifests: Iterable[Manifest]) -> dict[str, int]:
    """Return the end of the last chunk in each pack that is an object: the minimum length of the pack."""
    ends: dict[str, int] = {}
    for table in itertools.chain.from_iterable(manifest.tables() for manifest in manifests):
        for pack, end in zip(table.packs, chunk_ends(table), strict=True):
            if isinstance(pack, str):
                ends[pack] = max(end, ends.get(pack, 0))
    return ends


def short_packs(ends: Mapping[str, int], sizes: Mapping[str, int]) -> dict[str, str]:
    """Return a fault for each pack that is missing (has no size) or shorter than its end."""
    actual = {pack: f"has {sizes[pack]} bytes" if pack in sizes else "is missing" for pack in ends}
    return {
        pack: f"{pack} {actual[pack]}; expected at least {end} bytes"
        for pack, end in ends.items()
        if sizes.get(pack, -1) < end
    }


def chunk_ends(table: ChunkTable) -> list[int]:
    """Return the end of the last chunk in each pack of a table, 0 for a pack without chunks."""
    if len(table) > SHORT_COLUMN:
        maxima = np.zeros(len(table.packs), np.int64)
        np.maximum.at(maxima, table.pack, (table.offset + table.length).astype(np.int64))
        return maxima.tolist()
    ends = [0] * len(table.packs)
    for pack, row in zip(table.pack.tolist(), table.rows, strict=True):
        ends[pack] = max(ends[pack], row.offset + row.length)
    return ends


def _check_inline(table: ChunkTable) -> Steps[None]:
    """Raise `Corrupt` if an inline chunk is outside of its pack, or fails its checksum.

    Chunks at the same place are hashed once. In total, distinct chunks must not be longer than their pack.
    """
    unhashed = {id(pack): len(pack) for pack in table.packs if isinstance(pack, bytes)}
    if not unhashed:
        return
    computed: dict[tuple[int, int, int], bytes] = {}
    for at, row in enumerate(_each_row(table)):
        if at % _STEP_ROWS == _STEP_ROWS - 1:
            yield
        pack, offset, length = row.pack, row.offset, row.length
        if not isinstance(pack, bytes):
            continue
        location = id(pack), offset, length
        if location not in computed:
            if offset + length > len(pack):
                raise Corrupt(f"a chunk ends beyond its inline pack of {len(pack)} bytes")
            unhashed[id(pack)] -= length
            if unhashed[id(pack)] < 0:
                raise Corrupt(f"chunk {row.number} overlaps others in its inline pack")
            computed[location] = block_checks(memoryview(pack)[offset : offset + length])
        if computed[location] != row.checks:
            raise Corrupt(f"the inline chunk {row.number} does not match its checksum")


def _each_row(table: ChunkTable) -> Iterator[ChunkRow]:
    """Yield all rows of a table; of a long one, only a few at a time are Python objects."""
    for start in range(0, len(table), _STEP_ROWS):
        stop = min(start + _STEP_ROWS, len(table))
        yield from table.rows if stop - start == len(table) else table.take(np.arange(start, stop)).rows


def next_tree(version: int, record: Record, manifests: Sequence[Manifest], tree: Tree) -> Steps[Tree]:
    """Return the tree of the head after a record; raise `Corrupt` if no transaction can have made it."""
    if not record.parts:  # the base of a shared record is the lowest base of its parts, so a tag may be newer
        for tag in (*record.tags, *record.dropped, *record.tagged):
            if tree.tags.get(tag, 0) > record.base:
                raise Corrupt(
                    f"version {tree.tags[tag]} set the tag {tag!r} after the base of the record, {record.base}"
                )
    base = Nodes() if record.replaces or record.source else tree.nodes.without(record.deleted)
    documents: dict[str, Document] = {}
    for manifest in manifests:
        yield from _check_nodes(manifest, base, documents)
        yield
    result = tree.after(version, record, manifests)
    yield
    if any(path not in base or base[path].is_array != after.is_array for path, after in documents.items()):
        _check_nesting(Nodes().after(manifests) if record.source else result.nodes)
    return result


def check_compactions(record: Record, manifests: Sequence[Manifest], nodes: Mapping[str, Node]) -> Steps[None]:
    """Raise `Corrupt` if a compaction in a record changes chunks of the nodes before it; reads segments.

    A derived copy has none. A compaction with missing segments, as in a copy of a collected store, can't be
    checked.
    """
    for manifest in manifests:
        for path, compaction in manifest.compactions_by_path().items():
            if len(record.manifests) > 1 or record.source or path not in nodes:
                raise Corrupt(f"it has a compaction of {path!r} that no transaction makes")
            present = 0
            for table in compaction.run.tables():
                present += len(table)
                yield
            if present < len(compaction.run):
                continue
            with contextlib.suppress(NotFound):
                for differs in compaction.differences(nodes[path].tables):
                    if differs:
                        raise Corrupt(f"its compaction of {path!r} changes chunks")
                    yield


class _ChunkLimits(NamedTuple):
    """The number of chunks in the grid of a node, and the encoded length of every chunk (0 if it varies)."""

    grid_size: int
    chunk_length: int


def _check_nodes(manifest: Manifest, base: Mapping[str, Node], documents: dict[str, Document]) -> Steps[None]:
    """Add the metadata of all nodes of a manifest to `documents`.

    Raise `Corrupt` for an invalid document, a change of a node that does not exist, or a chunk outside of the grid
    or of a wrong length, and `UnsupportedFormat` for an array of a newer tstore.
    """
    parsed = 0
    limits: list[_ChunkLimits] = []  # per node
    known: dict[Document, _ChunkLimits] = {}  # each document is parsed once, however many nodes share it
    extended = manifest.extended_paths()
    for path, metadata, replaces_node, tables in manifest.nodes():
        if not replaces_node:
            before = documents.get(path) or (base[path].metadata if path in base else None)
            if not follows(before, metadata, tables if path in extended else None):
                raise no_foundation(path)
        if metadata not in known:
            known[metadata] = _limits(path, metadata)
            parsed += len(metadata.data)
            if parsed > _STEP_BYTES:
                parsed = 0
                yield
        limits.append(known[metadata])
        if not path and metadata.is_array:
            raise Corrupt("the metadata of the root group is that of an array")
        documents[path] = metadata
    for owners, table in manifest.chunks_by_node():
        wrong = _wrong_row(owners, table, limits)
        if wrong is not None:
            owner, number = wrong
            path = manifest.paths[owner]
            raise Corrupt(f"chunk {number} of {path!r} is outside of the grid, or its length is wrong")
        yield


def check_foundation(record: Record, manifests: Sequence[Manifest], nodes: Nodes) -> None:
    """Raise `Corrupt` if a record writes to nodes other than those that its writer saw; may read segments.

    That happens if the version that created or resized a node is no longer part of the history, because it is
    damaged or a repair voided it. A node keeps its metadata until it is created again or resized, except that
    appended values make its first axis longer.
    """
    if record.replaces:
        return
    below = nodes.without(record.deleted) if record.deleted else nodes
    documents: dict[str, Document] = {}  # documents of the nodes in the record, by path
    for manifest in manifests:
        extended, created = manifest.extended_paths(), list[str]()
        for path, metadata, replaces_node, tables in manifest.nodes():
            before = documents.get(path) or (below[path].metadata if path in below else None)
            if replaces_node:
                if before is None or before.is_array != metadata.is_array:
                    created.append(path)
            elif not follows(before, metadata, tables if path in extended else None):
                raise no_foundation(path)
            documents[path] = metadata
        for path in created:
            for above in parents(path):
                document = documents.get(above) or (below[above].metadata if above in below else None)
                if document is not None and document.is_array:
                    raise Corrupt(f"it creates {path!r} below the array {above!r}")
            inside = below.starting_with(f"{path}/") if path and documents[path].is_array else []
            if inside:
                raise Corrupt(f"it creates the array {path!r} above {inside[0]!r}")


def _limits(path: str, metadata: Document) -> _ChunkLimits:
    """Return the limits of nodes with this metadata; the error names `path`, one of these nodes."""
    try:
        if not metadata.is_array:
            metadata.check_group()
            return _ChunkLimits(0, 0)
        meta = ArrayMeta.parse(metadata.data)  # `metadata.meta` would keep it in memory with the tree
        length = meta.chain.fixed_length or 0
        return _ChunkLimits(meta.chunk_count, length)
    except (Corrupt, UnsupportedFormat) as error:
        raise type(error)(f"{path or 'the root group'}: {error}") from error


def _wrong_row(
    owners: npt.NDArray[np.int64], table: ChunkTable, limits: Sequence[_ChunkLimits]
) -> tuple[int, int] | None:
    """Return the node and the number of a chunk outside of the grid or of a wrong length, or None."""
    if len(table) <= SHORT_COLUMN:
        for at, row in zip(owners.tolist(), table.rows, strict=True):
            grid_size, expected = limits[at]
            if row.number >= grid_size or (expected and row.length != expected):
                return at, row.number
        return None
    if owners[0] == owners[-1]:
        grid_size, expected = map(np.uint64, limits[int(owners[0])])
    else:
        grid_size, expected = np.array(limits, np.uint64)[owners].T
    wrong = (table.number >= grid_size) | ((expected > 0) & (table.length != expected))
    if not wrong.any():
        return None
    first = int(np.argmax(wrong))
    return int(owners[first]), int(table.number[first])


def _check_nesting(nodes: Mapping[str, Node]) -> None:
    """Raise `Corrupt` if a node is below an array."""
    for path, following in itertools.pairwise(depth_first_order(nodes)):
        if path and following.startswith(path) and following[len(path)] == "/" and nodes[path].is_array:
            raise Corrupt(f"{following!r} would be below the array {path!r}")
