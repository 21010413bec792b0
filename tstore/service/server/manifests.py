"""Reading the manifests of a record that a client sent, with their segments, within bounds of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.pages import manifests_in
from tstore.core.format.objects.records import Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.segments import Segment
from tstore.core.format.tree.tree import Tree
from tstore.core.log.pages import SegmentReader
from tstore.core.storage.base import Storage
from tstore.errors import Corrupt
from tstore.service.server.chunk_checks import ChunkChecks
from tstore.service.server.log_state import LoadedTree, manifest_memory, tags_memory
from tstore.service.server.quotas import SIZE_ADVICE, Turns

__all__ = ["MAX_MEMORY", "ManifestReader", "ReceivedManifests", "bytes_to_read", "within_memory"]

_MAX_READ = 192 << 20
_MAX_DOCUMENTS = 1 << 17  # metadata documents in the manifests of one record: parsing these takes 2 to 4 seconds

MAX_MEMORY = 512 << 20
"""The most bytes of memory of the manifests of all records being validated, and of the tree of a version."""


class ReceivedManifests(NamedTuple):
    """A record's manifests, long ones in pages, the bytes they take in memory, and the keys of what is missing.

    `complete` is whether no manifest is missing; `absent` also lists packs.
    """

    manifests: list[Manifest]
    complete: bool
    memory: int
    absent: list[str]


def bytes_to_read(record: Record) -> int:
    """Return the bytes of a record's manifests and segments that are to be read; raise `Corrupt` for too many."""
    total = sum(
        ref.length + ref.segment_bytes if isinstance(ref, ObjectRef) else ref.segment_bytes
        for ref in record.manifests
    )
    if total > _MAX_READ:
        raise Corrupt(
            f"its manifests have {total} bytes; a server accepts {_MAX_READ} in one commit: {SIZE_ADVICE}"
        )
    return total


class ManifestReader:
    """Reads the manifests of records that clients sent."""

    def __init__(self, storage: Storage, chunks: ChunkChecks, turns: Turns) -> None:
        self._storage = storage
        self._chunks = chunks
        self._turns = turns
        self._segments = SegmentReader(storage)

    async def read(self, record: Record, client: Hashable) -> ReceivedManifests:
        """Return a record's manifests; segments in packs that are missing are empty."""
        manifests: list[Manifest] = []
        absent: list[str] = []
        total = documents = 0
        for ref in record.manifests:
            if isinstance(ref, Manifest):
                listed, memory = [ref], manifest_memory(ref)
            elif (data := await self._data(ref)) is None:
                absent.append(ref.key)
                continue
            else:
                listed, memory = await self._turns.run(client, _decoded, ref, data)
            manifests += listed
            total += memory
            documents += sum(len(manifest.documents) for manifest in listed)
            if total > MAX_MEMORY:
                raise too_large(total)
            if documents > _MAX_DOCUMENTS:
                raise Corrupt(f"it has over {_MAX_DOCUMENTS:,} metadata documents; write to the storage directly")
        missing = [
            key for manifest in manifests async for key in self._chunks.absent_packs(_segment_ends(manifest))
        ]
        source = _Present(self._segments, frozenset(missing)) if missing else self._segments
        for manifest in manifests:
            manifest.attach(source)
        return ReceivedManifests(manifests, not absent, total, [*absent, *missing])

    async def _data(self, ref: ObjectRef) -> bytes | None:
        """Return the bytes of a manifest, empty if its length is not as recorded; None if it is missing."""
        size = await self._storage.size(ref.key)
        if size is None:
            return None
        return await self._storage.get(ref.key) if size == ref.length else b""


def _decoded(reference: ObjectRef, data: bytes) -> tuple[list[Manifest], int]:
    """Return the manifests in an object, and the bytes they take in memory."""
    manifests = list(manifests_in(reference, data))
    return manifests, sum(map(manifest_memory, manifests))


class _Present:
    """The segments of packs that exist; those of missing packs, as in a copy of a collected store, are empty."""

    def __init__(self, source: SegmentReader, missing: Collection[str]) -> None:
        self._source = source
        self._missing = missing

    def load(self, segments: Sequence[Segment]) -> list[ChunkTable]:
        """Return the rows of each segment."""
        return [
            ChunkTable.from_rows([]) if segment.pack in self._missing else self._source.load((segment,))[0]
            for segment in segments
        ]


def _segment_ends(manifest: Manifest) -> dict[str, int]:
    """Return the end of the last segment in each pack."""
    ends: dict[str, int] = {}
    for row in manifest.segment_table.rows:
        assert isinstance(row.pack, str)
        ends[row.pack] = max(ends.get(row.pack, 0), row.offset + row.length)
    return ends


def too_large(memory: int) -> Corrupt:
    """Return the error for a version whose tree takes too much memory."""
    return Corrupt(
        f"all nodes, tags and the references to all chunks would take {memory} bytes of memory; a server accepts "
        f"{MAX_MEMORY}: {SIZE_ADVICE}"
    )


def within_memory(tree: Tree, memory: int) -> LoadedTree:
    """Return a complete tree; raise `Corrupt` if both its estimated `memory` and an exact count are too large."""
    if memory <= MAX_MEMORY:
        return LoadedTree(tree, True, memory)
    manifest = tree.manifest()
    memory = manifest_memory(manifest) + tags_memory(tree.tags)
    if memory > MAX_MEMORY:
        raise too_large(memory)
    return LoadedTree(dataclasses.replace(tree, nodes=tree.nodes.compacted()), True, memory)
