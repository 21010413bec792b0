"""Validation of a record as the next commit: its parts, its manifests, and their effect on the tree; pure, no I/O.

Decoding has checked each record and manifest on its own (`wellformed`). The caller reads the manifests and
compares the lengths of the packs with `pack_ends`. `retention.check_collection` checks what a garbage collection
decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tstore.errors import Corrupt, UnsupportedFormat
from tstore.format.array_metadata import ArrayMeta
from tstore.format.checksums import block_checks
from tstore.format.chunk_refs import SHORT, ChunkTable, parse_column
from tstore.format.documents import Document
from tstore.format.records import Record
from tstore.format.references import Manifest, ObjectRef
from tstore.format.tree import Node, Tree, parents, without_deleted

__all__ = ["MAX_PARTS", "applied", "check_form", "check_inline", "check_reused", "chunk_ends", "pack_ends"]

MAX_PARTS = 64
"""The maximum number of transactions that share one record, and so of manifests in it."""


def check_form(record: Record) -> None:
    """Raise `Corrupt` if too many transactions share a record, or several whose chunks are not all inline."""
    if max(len(record.manifests), len(record.parts)) > MAX_PARTS:
        raise Corrupt(f"it has more than {MAX_PARTS} manifests or parts")
    if record.parts and any(isinstance(m, ObjectRef) or any(m.packs) for m in record.manifests):
        raise Corrupt("several transactions share it, but their chunks are not all inline")


def check_reused(record: Record, manifests: Iterable[Manifest]) -> None:
    """Raise `Corrupt` unless a record lists the packs of other transactions to which its manifests refer."""
    reused = {pack for manifest in manifests for pack in manifest.reused(record.transaction)}
    if reused != set(record.reused):
        raise Corrupt("its list of re-used packs differs from the packs to which its chunks refer")


def pack_ends(manifests: Sequence[Manifest]) -> dict[str, int]:
    """Return the minimum length that each pack must have to contain all of its chunks.

    Raise `Corrupt` for a pack without chunks, or an inline pack that is too short.
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
    return ends


def chunk_ends(table: ChunkTable) -> list[int]:
    """Return the end of the last chunk in each pack, -1 for a pack without chunks."""
    if len(table) > SHORT:
        maxima = np.full(len(table.packs), -1, np.int64)
        np.maximum.at(maxima, table.pack, (table.offset + table.length).astype(np.int64))
        return maxima.tolist()
    ends = [-1] * len(table.packs)
    for pack, row in zip(table.pack.tolist(), table.rows, strict=True):
        ends[pack] = max(ends[pack], row.offset + row.length)
    return ends


def check_inline(manifests: Sequence[Manifest]) -> None:
    """Raise `Corrupt` if an inline chunk fails its checksum.

    Chunks may have exactly the same bytes but not overlap otherwise, so that no byte is hashed twice.
    """
    for table in (manifest.table for manifest in manifests):
        unhashed = {id(pack): len(pack) for pack in table.packs if isinstance(pack, bytes)}
        if not unhashed:
            continue
        computed: dict[tuple[int, int, int], bytes] = {}
        for number, pack, offset, length, checks in table.rows:
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


def applied(version: int, record: Record, manifests: Sequence[Manifest], tree: Tree) -> Tree:
    """Return the tree after a record; raise `Corrupt` if no transaction could have made this change."""
    if not record.parts:  # the base of a shared record is the oldest of its parts', so a tag may be newer
        for tag in (*record.tags, *record.dropped):
            if tree.tags.get(tag, 0) > record.base:
                raise Corrupt(
                    f"version {tree.tags[tag]} set the tag {tag!r} after the base of the record, {record.base}"
                )
    base = {} if record.replaces else without_deleted(tree.nodes, record.deleted)
    arrays: set[str] = set()
    documents: dict[str, Document] = {}
    for manifest in manifests:
        arrays |= _check_nodes(manifest, base, documents)
    result = tree.after(version, record, manifests)
    _check_nesting(result, documents, {p for p in arrays if p not in base or not base[p].is_array})
    return result


def _check_nodes(manifest: Manifest, base: Mapping[str, Node], documents: dict[str, Document]) -> set[str]:
    """Return the paths of the arrays in a manifest; add the metadata of all its nodes to `documents`.

    Raise `Corrupt` for an invalid document, a change of a node that does not exist, and chunks outside of the
    grid.
    """
    arrays: set[str] = set()
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
        limits.append(limit)
        if metadata.is_array:
            if not path:
                raise Corrupt("the metadata of the root is that of an array")
            arrays.add(path)
        documents[path] = metadata
    wrong = _wrong_row(manifest, limits)
    if wrong is not None:
        path, number = wrong
        raise Corrupt(f"chunk {number} of {path!r} is outside of the grid, or its length is wrong")
    return arrays


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
    if len(table) <= SHORT:
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


def _check_nesting(tree: Tree, changed: Iterable[str], new: set[str]) -> None:
    """Raise `Corrupt` if a `changed` node is below an array, or a `new` array is above another node."""
    for path in changed:
        above = next((p for p in parents(path) if p in tree.nodes and tree.nodes[p].is_array), None)
        if above is not None:
            raise Corrupt(f"{path!r} would be below the array {above!r}")
    if new:
        taken = next((above for path in tree.nodes for above in parents(path) if above in new), None)
        if taken is not None:
            raise Corrupt(f"an array cannot be created at {taken!r}, because there are nodes below it")
