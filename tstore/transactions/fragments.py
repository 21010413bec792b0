"""What the hosts of a cooperative transaction contribute, merged; pure, no I/O.

Merging is a tree: the fragments of `FAN` hosts become one, which is merged like a fragment, and so on until at
most `FAN` are left, which become the record. The result does not depend on who merges, nor on how often. Each
merge checks what it can see of the hosts: same calls, same metadata, no chunk twice. Chunks that no host wrote
show at the top.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from tstore.errors import Inconsistent
from tstore.format.chunk_refs import ChunkTable
from tstore.format.records import Fragment, Record
from tstore.format.references import Manifest
from tstore.format.tree import Node, Tree, is_below, parents

__all__ = ["FAN", "check_complete", "fragment_from_record", "merged", "record_of"]

FAN = 100
"""How many fragments are merged at once; a power of ten, so that a block's keys share a prefix."""

_AGREED = {
    "tags": "tag",
    "replaces": "kind of commit",
    "structure": "structure",
    "durable": "durability",
}


def merged(name: str, fragments: Sequence[Fragment], manifests: Sequence[Manifest]) -> Fragment:
    """Return one fragment with all that these contain, and with its manifest inline; `manifests` are theirs.

    Raises `Inconsistent` if they contradict each other. `name` is the transaction's name in errors.
    """
    first = fragments[0]
    _check_agreement(name, fragments)
    _check_nodes(name, fragments, manifests)
    _check_paths(name, fragments, manifests)
    result = msgspec.structs.replace(
        first,
        base=min(f.base for f in fragments),
        deleted=tuple(dict.fromkeys(d for f in fragments for d in f.deleted)),
        bytes_added=sum(f.bytes_added for f in fragments),
    )
    tree = Tree(0, {}, {}).after(1, record_of(result, 0.0), manifests)
    fresh = {path: f for m in manifests for path, _, f, _ in m.nodes()}
    manifest = Manifest.from_nodes([(p, n.document, fresh[p], n.tables) for p, n in tree.nodes.items()])
    _check_once(name, tree, manifests, manifest)
    return msgspec.structs.replace(result, manifest=manifest)


def fragment_from_record(record: Record, host: int, hosts: int, structure: bytes) -> Fragment:
    """Return the fragment of one host, from the record that it would commit alone."""
    [manifest] = record.manifests
    return Fragment(
        transaction=record.transaction,
        host=host,
        hosts=hosts,
        base=record.base,
        message=record.message,
        tags=record.tags,
        replaces=record.replaces,
        deleted=record.deleted,
        manifest=manifest,
        bytes_added=record.bytes_added,
        structure=structure,
        metadata=record.metadata,
        durable=record.durable,
    )


def record_of(whole: Fragment, time: float) -> Record:
    """Return the record of a cooperative commit, from the fragment into which all were merged."""
    return Record(
        transaction=whole.transaction,
        base=whole.base,
        time=time,
        message=whole.message,
        tags=whole.tags,
        replaces=whole.replaces,
        deleted=whole.deleted,
        manifests=(whole.manifest,),
        bytes_added=whole.bytes_added,
        metadata=whole.metadata,
        durable=whole.durable,
    )


def check_complete(name: str, manifest: Manifest) -> None:
    """Raise `Inconsistent` if an array that the transaction created lacks chunks."""
    incomplete = []
    for path, document, fresh, span in manifest.nodes():
        node = Node(path, document, ())
        if fresh and node.is_array:
            meta = node.meta
            count = span.stop - span.start
            if count != meta.chunk_count and not meta.sparse:
                incomplete.append(f"{path}: {meta.chunk_count - count} of {meta.chunk_count} chunks")
    if incomplete:
        raise Inconsistent(f"transaction {name!r} is not committed: no host wrote some chunks", incomplete)


def _check_agreement(name: str, fragments: Sequence[Fragment]) -> None:
    first = fragments[0]
    for field, what in _AGREED.items():
        odd = [f.host for f in fragments if getattr(f, field) != getattr(first, field)]
        if odd:
            raise Inconsistent(
                f"transaction {name!r}: hosts {odd} differ from host {first.host} in the {what}; every host must "
                "make the same call with a tree of the same structure",
                [],
            )


def _check_nodes(name: str, fragments: Iterable[Fragment], manifests: Iterable[Manifest]) -> None:
    first: dict[str, tuple[int, bytes, bool]] = {}
    differing = []
    for fragment, manifest in zip(fragments, manifests, strict=True):
        for path, document, fresh, _ in manifest.nodes():
            host, expected, created = first.setdefault(path, (fragment.host, document, fresh))
            if expected != document:
                one, other = _summary(path, expected), _summary(path, document)
                differing.append(f"{path}: host {host} has {one}, host {fragment.host} has {other}")
            elif created != fresh:  # what the others wrote into the old array would become part of the new one
                creator, writer = (host, fragment.host) if created else (fragment.host, host)
                differing.append(f"{path}: host {creator} created or resized it, host {writer} did not")
    if differing:
        raise Inconsistent(
            f"transaction {name!r} is not committed: hosts disagree on the metadata of arrays",
            differing,
        )


def _check_paths(name: str, fragments: Sequence[Fragment], manifests: Sequence[Manifest]) -> None:
    """Raise `Inconsistent` if a host wrote into what another deleted, or created a node below another's array."""
    deleted = {top: f.host for f in fragments for top in f.deleted}
    nodes = {
        path: (fragment.host, document, fresh)
        for fragment, manifest in zip(fragments, manifests, strict=True)
        for path, document, fresh, _ in manifest.nodes()
    }
    colliding = []
    for path, (host, _, fresh) in nodes.items():
        if not fresh:
            tops = [top for top in deleted if is_below(path, top)]
            colliding += [f"{path}: host {deleted[top]} deleted {top}, host {host} wrote into it" for top in tops]
        for above in parents(path):
            if above in nodes and Node(above, nodes[above][1], ()).is_array:
                colliding.append(
                    f"{path}: host {host} created it below {above}, an array of host {nodes[above][0]}"
                )
    if colliding:
        raise Inconsistent(
            f"transaction {name!r} is not committed: the paths of its hosts collide; every host must make the "
            "same deletions and use the same paths",
            colliding,
        )


def _check_once(name: str, tree: Tree, manifests: Sequence[Manifest], manifest: Manifest) -> None:
    written: dict[str, list[ChunkTable]] = {}
    for each in manifests:
        for path, _, _, table in each.nodes():
            written.setdefault(path, []).append(table)
    twice = [
        f"{path}: chunks {_written_twice(tree.nodes[path], written[path])}"
        for path, _, _, table in manifest.nodes()
        if sum(map(len, written[path])) != len(table)
    ]
    if twice:
        raise Inconsistent(
            f"transaction {name!r}: several hosts wrote the same chunks; exactly one host must write each",
            twice,
        )


def _written_twice(node: Node, tables: Sequence[ChunkTable]) -> list[tuple[int, ...]]:
    numbers, times = np.unique(np.concatenate([t.number for t in tables]), return_counts=True)
    counts = node.meta.counts
    return [tuple(int(i) for i in np.unravel_index(n, counts)) for n in numbers[times > 1][:5].tolist()]


def _summary(path: str, document: bytes) -> str:
    node = Node(path, document, ())
    if not node.is_array:
        return "a group"
    meta = node.meta
    codec = meta.codecs[0].get("configuration", {}).get("format", "")
    return f"{meta.dtype}{list(meta.shape)} chunks={list(meta.chunks)} {codec}".strip()
