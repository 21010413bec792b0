"""Whether a record can be the next commit of a log: its form, and what it makes of the tree before it; pure.

`check_form` looks at the record alone, `pack_ends` and `applied` at its manifests and the tree that they change.
Objects by name are the caller's: it reads the manifests and compares the lengths of the packs. What a garbage
collection decides is checked by `condemned`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tstore.arguments import checked_facts, checked_name, checked_tag, checked_text
from tstore.chunks.metadata import ArrayMeta
from tstore.chunks.table import column
from tstore.commits.manifest import Manifest, Part, Record
from tstore.commits.tree import Node, Tree, checked_path, parents, spared
from tstore.errors import Corrupt, InvalidArgument
from tstore.layout import is_pack, is_transaction

__all__ = ["MOST_PARTS", "applied", "check_form", "pack_ends"]

MOST_PARTS = 64
"""Transactions that share one record, and so the manifests that it has at most."""

_MOST_LEVELS = 256


def check_form(record: Record) -> None:
    """Raise `Corrupt` where a record says what no transaction can have committed."""
    if not all(map(is_transaction, (record.transaction, *record.transactions))):
        raise Corrupt(f"it names the transaction {record.transaction!r}, or one within, which no transaction can")
    common = Record(
        record.transaction,
        record.base,
        record.time,
        record.message,
        durable=record.durable,
        collected=record.collected,
    )
    if record.void and record != _changed(common, void=True):
        raise Corrupt("a void record changes something")
    if record.collection is not None and record != _changed(common, collection=record.collection):
        raise Corrupt("the record of a garbage collection changes more than what lives")
    if len(record.manifests) > MOST_PARTS:
        raise Corrupt(f"it has {len(record.manifests)} manifests; expected at most {MOST_PARTS}")
    _check_parts(record, common)
    try:
        _check_values(record)
    except InvalidArgument as error:
        raise Corrupt(str(error)) from error


def _changed(record: Record, **fields: object) -> Record:
    return msgspec.structs.replace(record, **fields)


def _check_parts(record: Record, common: Record) -> None:
    """Raise `Corrupt` where the transactions that share a record do not add up to it."""
    if not record.parts:
        return
    ids = record.transactions
    together = _changed(
        common,
        message="",
        tags=tuple(tag for part in record.parts for tag in part.tags),
        deleted=record.deleted,
        manifests=record.manifests,
        bytes_added=sum(part.bytes_added for part in record.parts),
        parts=record.parts,
    )
    inline = all(isinstance(m, Manifest) and not any(m.packs) for m in record.manifests)
    if record != together or not inline or len(set(ids)) < len(ids) or len(ids) > MOST_PARTS:
        raise Corrupt("the transactions that it was made of do not add up to it")


def _check_values(record: Record) -> None:
    """Raise `InvalidArgument` for a text, tag, path or fact that no caller of a transaction may pass."""
    committed: list[Record | Part] = [record, *record.parts]
    for each in committed:
        checked_text("message", each.message)
        checked_facts(each.facts)
        if each.bytes_added < 0:
            raise InvalidArgument(f"it added {each.bytes_added} bytes")
    for tag in record.tags:
        checked_tag("tag", tag)
    for tag in record.dropped:
        checked_name("dropped tag", tag)
    named = (*record.tags, *record.dropped)
    if len(set(named)) < len(named):
        raise InvalidArgument("it names a tag twice")
    for path in record.deleted:
        _check_path(path)
    odd = next((key for key in record.reused if not is_pack(key)), None)
    if odd is not None:
        raise InvalidArgument(f"it re-uses {odd[:60]!r}, which is no pack")


def pack_ends(manifests: Sequence[Manifest]) -> dict[str, int]:
    """Return how long each pack must be at least for the chunks that lie in it; `Corrupt` for one without any.

    Packs that travel in the manifests are compared here.
    """
    found: dict[str, int] = {}
    for table in (manifest.table for manifest in manifests):
        ends = np.zeros(len(table.packs), np.uint64)
        np.maximum.at(ends, table.pack, table.offset + table.length)
        if np.bincount(table.pack, minlength=len(ends)).min(initial=1) == 0:
            raise Corrupt("a manifest names a pack in which none of its chunks lies")
        for pack, end in zip(table.packs, ends.tolist(), strict=True):
            if isinstance(pack, str):
                found[pack] = max(end, found.get(pack, 0))
            elif len(pack) < end:
                raise Corrupt(f"a chunk lies beyond the end of the {len(pack)} bytes that hold it")
    return found


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

    Raise `Corrupt` for a path or document that can't be one, for a change of a node that is not there, and for
    chunks that the array has no place for.
    """
    arrays: set[str] = set()
    limits: list[int] = []
    lengths: list[int] = []
    seen: set[str] = set()
    for path, document, fresh, span in manifest.nodes():
        if path:
            _check_path(path)
        if path in seen:
            raise Corrupt(f"a manifest holds {path!r} twice")
        seen.add(path)
        node = Node(path, document, (span,))
        if not fresh:
            before = made.get(path) or (base[path].document if path in base else None)
            if before != document:
                raise Corrupt(f"it writes into {path!r}, which is not there, or was created anew or resized since")
        if node.is_array and path:
            meta = ArrayMeta.parse(document)
            arrays.add(path)
            limits.append(meta.chunk_count)
            lengths.append(min(meta.encoded_bound, 1 << 63) if meta.chain.fixed else 0)
        else:
            _check_group(path, node)
            limits.append(0)
            lengths.append(0)
        made[path] = document
    _check_rows(manifest, np.array(limits, np.uint64), np.array(lengths, np.uint64))
    return arrays


def _check_group(path: str, node: Node) -> None:
    if msgspec.json.decode(node.document)["node_type"] != "group":
        raise Corrupt(f"the metadata of {path!r} is neither that of a group nor that of an array")
    _ = node.attributes  # `Corrupt` where they do not parse


def _check_rows(manifest: Manifest, limits: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64]) -> None:
    """Raise `Corrupt` for a chunk outside of its grid, of a wrong length, or not behind the one before it."""
    table, counts = manifest.table, column(manifest.count, "<u8").astype(np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    index, length = table.index, lengths[owner]
    wrong = (index >= limits[owner]) | ((length > 0) & (table.length != length))
    wrong[1:] |= (owner[1:] == owner[:-1]) & (index[1:] <= index[:-1])
    if wrong.any():
        at = int(np.argmax(wrong))
        path = manifest.paths[int(owner[at])]
        raise Corrupt(
            f"chunk {int(index[at])} of {path!r} is outside of its grid, out of order, or of a wrong length"
        )


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


def _check_path(path: str) -> None:
    if path.count("/") >= _MOST_LEVELS:
        raise Corrupt(f"{path[:60]!r}… has more than {_MOST_LEVELS} levels")
    try:
        fits = checked_path(path) == path
    except InvalidArgument as error:
        raise Corrupt(str(error)) from error
    if not fits:
        raise Corrupt(f"{path!r} is not the path of a node")
