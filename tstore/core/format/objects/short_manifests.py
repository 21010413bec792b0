"""Manifests of few chunks, made without NumPy, whose calls would take most of a small commit; pure, no I/O.

`manifest_checks` has the same for reading them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from msgspec.structs import astuple

from tstore.core.format.bounds import NODE_METADATA_LEVELS
from tstore.core.format.checksums import BLOCK
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.chunk_rows import ChunkRow
from tstore.core.format.objects.references import Manifest

__all__ = ["short_manifest"]


def short_manifest(
    nodes: Sequence[tuple[str, bytes, int]], counts: Sequence[int], rows: Sequence[ChunkRow]
) -> Manifest:
    """Return what `Manifest.from_table` does for a table of these rows."""
    documents: dict[bytes, int] = {}
    packs: dict[str | bytes, int] = {}
    columns = zip(*map(astuple, rows), strict=True) if rows else ((),) * 5
    numbers, keys, offsets, lengths, checks = columns
    paths, per_node, flags = zip(*nodes, strict=True) if nodes else ((),) * 3
    positions = [documents.setdefault(document, len(documents)) for document in per_node]
    places = [packs.setdefault(key, len(packs)) for key in keys]
    u32, u64 = struct.Struct(f"<{len(rows)}I").pack, struct.Struct(f"<{len(rows)}Q").pack
    manifest = Manifest(
        packs=tuple([pack if isinstance(pack, str) else "" for pack in packs]),
        inline=tuple([pack for pack in packs if isinstance(pack, bytes)]),
        documents=tuple(documents),
        paths=paths,
        document=struct.pack(f"<{len(nodes)}I", *positions),
        replaces_node=bytes(flags),
        count=struct.pack(f"<{len(nodes)}Q", *counts),
        number=u64(*numbers),
        pack=u32(*places),
        offset=u64(*offsets),
        length=u64(*lengths),
        checks=b"".join(checks),
    )
    inline = len(manifest.inline) == len(packs)
    if inline and max(lengths, default=0) <= BLOCK and max(map(len, documents), default=0) <= NODE_METADATA_LEVELS:
        return manifest.with_table(ChunkTable.from_rows(rows))  # so nothing in it needs a check
    return manifest
