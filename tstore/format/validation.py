"""Whether a record can be the next commit of a log: its form, and what it makes of the tree before it; pure.

What can be seen in a record or manifest alone is checked as it is decoded (`wellformed`). `check_form` looks at
what shares one record, `pack_ends`, `check_inline` and `applied` at its manifests and the tree that they change.
Objects by name are the caller's: it reads the manifests and compares the lengths of the packs. What a garbage
collection decides is checked by `condemned`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from tstore.errors import Corrupt
from tstore.format.array_metadata import ArrayMeta
from tstore.format.checksums import block_checks
from tstore.format.chunk_refs import SHORT, ChunkTable, column
from tstore.format.records import Record
from tstore.format.references import Manifest, ObjectRef
from tstore.format.tree import Node, Tree, parents, spared

__all__ = ["MOST_PARTS", "applied", "check_form", "check_inline", "pack_ends"]

MOST_PARTS = 64
"""Transactions that share one record, and so the manifests that it has at most."""


def check_form(record: Record) -> None:
    """Raise `Corrupt` where a record is made of more than transactions that share one are.

    All else that can be seen in the record alone was checked when it was decoded.
    """
    if max(len(record.manifests), len(record.parts)) > MOST_PARTS:
        raise Corrupt(f"it has more manifests, or parts, than {MOST_PARTS}")
    if record.parts and any(isinstance(m, ObjectRef) or any(m.packs) for m in record.manifests):
        raise Corrupt("transactions share it of which the chunks do not travel in it")


def pack_ends(manifests: Sequence[Manifest]) -> dict[str, int]:
    """Return how long each pack must be at least for the chunks that lie in it; `Corrupt` for one without any.

    Packs that travel in the manifests are compared here.
    """
    found: dict[str, int] = {}
    for table in (manifest.table for manifest in manifests):
        for pack, end in zip(table.packs, _ends(table), strict=True):
            if end < 0:
                raise Corrupt("a manifest names a pack in which none of its chunks lies")
            if isinstance(pack, str):
                found[pack] = max(end, found.get(pack, 0))
            elif len(pack) < end:
                raise Corrupt(f"a chunk lies beyond the end of the {len(pack)} bytes that hold it")
    return found


def _ends(table: ChunkTable) -> list[int]:
    """Return where the last chunk in each pack ends, -1 for a pack without one."""
    if len(table) > SHORT:
        far = np.full(len(table.packs), -1, np.int64)
        np.maximum.at(far, table.pack, (table.offset + table.length).astype(np.int64))
        return far.tolist()
    ends = [-1] * len(table.packs)
    for at, row in zip(table.pack.tolist(), table.rows, strict=True):
        ends[at] = max(ends[at], row.offset + row.length)
    return ends


def check_inline(manifests: Sequence[Manifest]) -> None:
    """Raise `Corrupt` where chunks that travel in manifests do not have their checksums.

    Chunks may be the same bytes, but do not overlap otherwise, so that no byte is looked at many times.
    """
    for table in (manifest.table for manifest in manifests):
        left = {id(pack): len(pack) for pack in table.packs if isinstance(pack, bytes)}
        if not left:
            continue
        seen: dict[tuple[int, int, int], bytes] = {}
        for number, pack, offset, length, checks in table.rows:
            if not isinstance(pack, bytes):
                continue
            made = seen.get(place := (id(pack), offset, length))
            if made is None:
                left[id(pack)] -= length
                if left[id(pack)] < 0:
                    raise Corrupt(f"chunk {number} overlaps others in the bytes that hold it")
                made = seen[place] = block_checks(memoryview(pack)[offset : offset + length])
            if made != checks:
                raise Corrupt(f"chunk {number}, which travels in a manifest, has another checksum than it says")


def applied(version: int, record: Record, manifests: Sequence[Manifest], tree: Tree) -> Tree:
    """Return the tree that a record makes of the one before it; `Corrupt` where no transaction does so."""
    reused = {pack for manifest in manifests for pack in manifest.reused(record.transaction)}
    if reused != set(record.reused):
        raise Corrupt("the packs of other transactions that it names are not those that its chunks lie in")
    if not record.parts:  # else the base is that of the part that was validated the least
        for tag in (*record.tags, *record.dropped):
            if tree.tags.get(tag, 0) > record.base:
                raise Corrupt(f"the tag {tag!r} was set by version {tree.tags[tag]}, above its base {record.base}")
    base = {} if record.replaces else spared(tree.nodes, record.deleted)
    arrays: set[str] = set()
    made: dict[str, bytes] = {}
    for manifest in manifests:
        arrays |= _check_nodes(manifest, base, made)
    result = tree.after(version, record, manifests)
    _check_places(result, made, arrays, {p for p in arrays if p not in base or not base[p].is_array})
    return result


def _check_nodes(manifest: Manifest, base: Mapping[str, Node], made: dict[str, bytes]) -> set[str]:
    """Return the paths of the arrays in a manifest; note all its nodes in `made`.

    Raise `Corrupt` for a document that can't be one, for a change of a node that is not there, and for
    chunks that the array has no place for.
    """
    arrays: set[str] = set()
    limits: list[tuple[int, int]] = []  # of each node: chunks, and bytes of each chunk, 0 for any number
    for path, document, fresh, table in manifest.nodes():
        node = Node(path, document, (table,))
        if not fresh:
            before = made.get(path) or (base[path].document if path in base else None)
            if before != document:
                raise Corrupt(f"it writes into {path!r}, which is not there, or was created anew or resized since")
        if node.is_array and path:
            meta = ArrayMeta.parse(document)
            arrays.add(path)
            limits.append((meta.chunk_count, min(meta.encoded_bound, 1 << 63) if meta.chain.fixed else 0))
        else:
            _check_group(path, node)
            limits.append((0, 0))
        made[path] = document
    wrong = _wrong_row(manifest, limits)
    if wrong is not None:
        path, number = wrong
        raise Corrupt(f"chunk {number} of {path!r} is outside of its grid, or of a wrong length")
    return arrays


def _check_group(path: str, node: Node) -> None:
    if msgspec.json.decode(node.document)["node_type"] != "group":
        raise Corrupt(f"the metadata of {path!r} is neither that of a group nor that of an array")
    _ = node.attributes  # `Corrupt` where they do not parse


def _wrong_row(manifest: Manifest, limits: Sequence[tuple[int, int]]) -> tuple[str, int] | None:
    """Return the node and the number of a chunk outside of its grid, or of a wrong length; None where none is."""
    table, counts = manifest.table, column(manifest.count, "<u8").astype(np.int64)
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


def _check_places(tree: Tree, made: Mapping[str, bytes], arrays: set[str], new: set[str]) -> None:
    """Raise `Corrupt` where what was made stands below an array, or above another node as an array."""
    for path in made:
        above = next((p for p in parents(path) if p in tree.nodes and tree.nodes[p].is_array), None)
        if above is not None:
            raise Corrupt(f"{path!r} would stand below the array {above!r}")
    if new:
        taken = {above for path in tree.nodes for above in parents(path)} & new
        if taken:
            raise Corrupt(f"an array can't stand at {min(taken)!r}, below which there are others")
