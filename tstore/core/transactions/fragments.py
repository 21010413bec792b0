"""The fragments that hosts contribute to a cooperative transaction, and the tree in which they are merged.

1. A host whose fragment is durable lists the fragments of its block of `FAN_IN` hosts. If the block is complete,
   the first host that claims it (`merging-…`, created if absent) merges it into `merge-1-<block>-of-<hosts>`.
2. That host does the same with the block to which its merged fragment belongs, and so on up to the top
   level, which has at most `FAN_IN` members. A transaction of up to `FAN_IN` hosts has only the top level. The
   claim to the top level decides that the transaction may be committed, unless a host has withdrawn it
   (`decision`); all other claims only save work.
3. Now and then a waiting host merges a complete block that its claimant left behind. Merging is deterministic and
   objects are created once, so it is harmless if several hosts merge the same block.

Each merge checks its hosts against each other: same calls, same metadata, no chunk twice, and no path
with different values. Whether every chunk was written can only be checked at the top.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.dtypes import dtype_text
from tstore.core.format.arrays.grid import chunk_coordinates, region_text
from tstore.core.format.bounds import MAX_TAGS_SET
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.documents import Document
from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.records import Fragment, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.tables import Table, count_of, numbers_of
from tstore.core.format.paths import is_at_or_below, parents
from tstore.core.format.tree.node import Node
from tstore.core.log.reader import LogReader
from tstore.core.runtime import world
from tstore.core.runtime.pool import run
from tstore.core.storage.objects import Durability
from tstore.core.transactions.agreement import check_agreement, check_replicated
from tstore.core.transactions.decision import Decision
from tstore.core.transactions.membership import FAN_IN, Membership
from tstore.errors import AlreadyExists, DeadlineExceeded, Inconsistent, Unavailable

__all__ = [
    "FragmentTree",
    "check_complete",
    "fragment_from_record",
    "have_same_values",
    "merge",
    "record_from_fragment",
]

_SHARED = ("transaction", "base", "message", "tags", "replaces", "deleted", "bytes_added", "metadata", "durable")
"""The fields of a fragment that are also fields of a record."""


class FragmentTree:
    """The fragments of one cooperative transaction, as one host sees and merges them."""

    def __init__(self, log: LogReader, member: Membership, durability: Durability) -> None:
        self.decision = Decision(log.storage, member, durability)
        self._objects = log.objects
        self._storage = log.storage
        self._member = member
        self._durability = durability

    async def climb(self) -> bool:
        """Merge the complete blocks on the path from this host to the top level, unless another host claimed them.

        Return whether the top level is complete and this host claimed it, so that this host is to commit. Raise
        `DeadlineExceeded` if it is complete, but a host has withdrawn the transaction.
        """
        block = self._member.host // FAN_IN
        for level in range(self._member.top + 1):
            if len(await self._present_members(level, block)) < len(self._member.block(level, block)):
                return False
            if not await self._claim(level, block):
                return False
            if level < self._member.top:
                await self._create_merged(level, block)
                block //= FAN_IN
        return True

    async def help(self) -> bool:
        """Return whether the top level is complete; otherwise look for a complete block and merge it.

        The search descends from the top level into the branch of this host, or into a random unmerged branch if
        that one is already merged. So all hosts together find all blocks.
        """
        block, level = 0, self._member.top
        while True:
            present = await self._present_members(level, block)
            missing = [i for i in self._member.block(level, block) if i not in present]
            if not missing:
                break
            if level == 0:
                return False
            branch = self._member.host // FAN_IN**level
            block = branch if branch in missing else missing[int(world.uniform(0, len(missing)))]
            level -= 1
        if level < self._member.top:
            await self._create_merged(level, block)
        return level == self._member.top

    async def absent(self) -> list[int]:
        """Return the hosts that have not delivered their fragments."""
        fragments = set(await self._storage.list(f"{self._member.folder}/part-"))
        return [i for i in range(self._member.hosts) if self._member.fragment_key(0, i) not in fragments]

    async def merge_available(self) -> list[int]:
        """Merge every complete block that is not merged yet; return the hosts whose fragments are absent."""
        fragments = set(await self._storage.list(f"{self._member.folder}/part-"))

        async def absent_below(level: int, block: int) -> list[int]:
            members = self._member.block(level, block)
            if level == 0:
                return [i for i in members if self._member.fragment_key(0, i) not in fragments]
            present = await self._present_members(level, block)
            absent = []
            for number in members:
                if number not in present:
                    hosts = await absent_below(level - 1, number)
                    absent += hosts
                    if not hosts:
                        await self._create_merged(level - 1, number)
            return absent

        return await absent_below(self._member.top, 0)

    async def merge_block(self, level: int, block: int) -> Fragment:
        """Return the fragments of a block merged into one; raise `Inconsistent` if hosts contradict each other."""
        keys = [self._member.fragment_key(level, i) for i in self._member.block(level, block)]
        fragments = list(await asyncio.gather(*[self._objects.read(key, Fragment) for key in keys]))
        manifests = list(await asyncio.gather(*[self._objects.manifest(f.manifest) for f in fragments]))
        return await run(merge, self._member.name, fragments, manifests)

    async def _present_members(self, level: int, block: int) -> set[int]:
        """Return the members of a block whose fragment exists."""
        keys = set(await self._storage.list(self._member.block_prefix(level, block)))
        return {i for i in self._member.block(level, block) if self._member.fragment_key(level, i) in keys}

    async def _claim(self, level: int, block: int) -> bool:
        key, host = self._member.claim_key(level, block), str(self._member.host).encode()
        try:
            if level == self._member.top:
                return await self.decision.commit()
            await self._storage.create(key, host, Durability.NONE)
        except DeadlineExceeded:
            raise  # a host has withdrawn the transaction
        except (AlreadyExists, Unavailable):
            return False  # another host merges the block; if it dies, waiting hosts help
        return True

    async def _create_merged(self, level: int, block: int) -> None:
        data = encode(await self.merge_block(level, block))
        with contextlib.suppress(AlreadyExists):  # another host created the same bytes
            await self._storage.create(self._member.fragment_key(level + 1, block), data, self._durability)


class _NodePart(NamedTuple):
    """One host's part of a node; `replaces_node`: whether the host created the node or changed its metadata."""

    host: int
    path: str
    metadata: Document
    replaces_node: bool
    tables: tuple[Table, ...]


def merge(name: str, fragments: Sequence[Fragment], manifests: Sequence[Sequence[Manifest]]) -> Fragment:
    """Return one fragment with the contents of all, and an inline manifest made of the `manifests` of each.

    Raise `Inconsistent` if they contradict each other. `name` is the transaction's name in errors.
    """
    first = fragments[0]
    if any(manifest.compactions for manifest in itertools.chain.from_iterable(manifests)):
        raise Inconsistent(
            f"transaction {name!r}: a fragment compacts references of earlier versions, which only a transaction "
            "of one host may; no tstore writes such a fragment, so save again with another attempt",
            [],
        )
    parts = [
        _NodePart(f.host, *node)
        for f, listed in zip(fragments, manifests, strict=True)
        for manifest in listed
        for node in manifest.nodes()
    ]
    _check_nodes(name, parts)
    replicated = check_replicated(
        [([f.host], f.replicated) for f in fragments], f"transaction {name!r} is not committed: "
    )
    check_agreement(name, fragments)
    _check_paths(name, fragments, parts)
    result = msgspec.structs.replace(
        first,
        base=min(f.base for f in fragments),
        deleted=tuple(dict.fromkeys(d for f in fragments for d in f.deleted)),
        bytes_added=sum(f.bytes_added for f in fragments),
        replicated=dict(itertools.islice(replicated.items(), MAX_TAGS_SET)),
    )
    by_path: dict[str, list[_NodePart]] = {}
    for part in parts:
        by_path.setdefault(part.path, []).append(part)
    _check_once(name, by_path)
    nodes = []
    for path, same in by_path.items():
        tables = list(itertools.chain.from_iterable(part.tables for part in same))
        nodes.append((path, same[0].metadata.data, same[0].replaces_node, tables))
    return msgspec.structs.replace(result, manifest=Manifest.from_nodes(nodes))


def have_same_values(fragments: Sequence[Fragment], manifests: Sequence[Sequence[Manifest]]) -> bool:
    """Return whether two fragments, with these manifests, differ at most in their bases and where chunks are."""
    plain = [
        encode(msgspec.structs.replace(f, base=0, bytes_added=0, manifest=Manifest.from_nodes([])))
        for f in fragments
    ]
    nodes = [[node for manifest in listed for node in manifest.nodes()] for listed in manifests]
    documents = [[(path, document.data, replaced) for path, document, replaced, _ in listed] for listed in nodes]
    if plain[0] != plain[1] or documents[0] != documents[1]:
        return False
    chunks = ([Node(path, document, tables).chunks for path, document, _, tables in listed] for listed in nodes)
    return not any(len(one.differing_numbers(other)) for one, other in zip(*chunks, strict=True))


def fragment_from_record(
    record: Record, host: int, hosts: int, structure: bytes, replicated: Mapping[str, bytes]
) -> Fragment:
    """Return the fragment of one host, from the record that it would commit alone."""
    [manifest] = record.manifests
    return Fragment(
        host=host,
        hosts=hosts,
        manifest=manifest,
        structure=structure,
        replicated=dict(replicated),
        **_shared_fields(record),
    )


def record_from_fragment(merged: Fragment, time: float) -> Record:
    """Return the record of a cooperative commit from the merged fragment."""
    return Record(time=time, manifests=(merged.manifest,), **_shared_fields(merged))


def _shared_fields(source: Fragment | Record) -> dict[str, Any]:
    return {name: getattr(source, name) for name in _SHARED}


def check_complete(name: str, manifest: Manifest) -> None:
    """Raise `Inconsistent` if an array that the transaction created lacks chunks."""
    incomplete = []
    for path, metadata, replaces_node, tables in manifest.nodes():
        node = Node(path, metadata, tables)
        if not replaces_node or not node.is_array or node.meta.sparse:
            continue
        meta, absent = node.meta, node.meta.chunk_count - count_of(tables)
        if absent:
            first = _region(meta, _first_absent(node.chunks))
            incomplete.append(f"{path}: {absent} of {meta.chunk_count} chunks, the first at {first}")
    if incomplete:
        raise Inconsistent(f"transaction {name!r} is not committed: some chunks were not written", incomplete)


def _check_nodes(name: str, parts: Sequence[_NodePart]) -> None:
    """Raise `Inconsistent` if hosts have the same node with different metadata, or only one of them created it."""
    first: dict[str, _NodePart] = {}
    differing = []
    for part in parts:
        other = first.setdefault(part.path, part)
        if not other.metadata.equals(part.metadata):
            one, another = (f"host {p.host} has {_summary(p)}" for p in (other, part))
            differing.append(f"{part.path}: {one}, {another}")
        elif other.replaces_node != part.replaces_node:
            # writes into the old array must not become part of the new one
            creator, writer = (other, part) if other.replaces_node else (part, other)
            differing.append(f"{part.path}: host {creator.host} created or resized it, host {writer.host} did not")
    if differing:
        raise Inconsistent(
            f"transaction {name!r} is not committed: hosts disagree on the metadata of arrays", differing
        )


def _check_paths(name: str, fragments: Sequence[Fragment], parts: Sequence[_NodePart]) -> None:
    """Raise `Inconsistent` if a host wrote into what another deleted, or created a node below another's array."""
    deleted = {top: f.host for f in fragments for top in f.deleted}
    nodes = {part.path: part for part in parts}
    colliding = []
    for path, part in nodes.items():
        if not part.replaces_node:
            tops = [top for top in deleted if is_at_or_below(path, top)]
            colliding += [f"{path}: host {deleted[t]} deleted {t}, host {part.host} wrote into it" for t in tops]
        for above in parents(path):
            if above in nodes and Node(above, nodes[above].metadata, ()).is_array:
                owner = nodes[above].host
                colliding.append(f"{path}: host {part.host} created it below {above}, an array of host {owner}")
    if colliding:
        raise Inconsistent(
            f"transaction {name!r} is not committed: the paths of its hosts collide; every host must make the "
            "same deletions and use the same paths",
            colliding,
        )


def _check_once(name: str, by_path: Mapping[str, Sequence[_NodePart]]) -> None:
    """Raise `Inconsistent` if several parts of a node have the same chunk."""
    twice = []
    for path, parts in by_path.items():
        written = [part.tables for part in parts]
        if sum(map(count_of, written)) != count_of(list(itertools.chain.from_iterable(written))):
            twice.append(f"{path}: chunks at {_written_twice(parts[0].metadata.meta, written)}")
    if twice:
        raise Inconsistent(
            f"transaction {name!r}: several hosts wrote the same chunks; exactly one host must write each (to "
            "resize an array, do so in an earlier transaction)",
            twice,
        )


def _written_twice(meta: ArrayMeta, by_part: Sequence[Sequence[Table]]) -> str:
    numbers, times = np.unique(np.concatenate(list(map(numbers_of, by_part))), return_counts=True)
    return ", ".join(_region(meta, n) for n in numbers[times > 1][:5].tolist())


def _first_absent(table: ChunkTable) -> int:
    numbers = table.number
    gaps = np.flatnonzero(numbers != np.arange(len(numbers)))
    return int(gaps[0]) if len(gaps) else len(numbers)


def _region(meta: ArrayMeta, number: int) -> str:
    """Return the index that selects a chunk, as text."""
    return region_text(chunk_coordinates(number, meta.counts), meta.chunks, meta.chunks, meta.shape)


def _summary(part: _NodePart) -> str:
    node = Node(part.path, part.metadata, ())
    if not node.is_array:
        return "a group"
    meta = node.meta
    codec = meta.codecs[0]["configuration"]["format"] if meta.codecs[0]["name"] == "exmy" else ""
    return f"{dtype_text(meta.dtype)}{list(meta.shape)} chunks={list(meta.chunks)} {codec}".strip()
