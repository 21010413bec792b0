"""Verification of a whole store: every record, root, manifest and chunk of every version."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tstore.chunk_reader import verify_chunks
from tstore.chunks import ChunkRow
from tstore.errors import Corrupt, NotFound, UnsupportedFormat
from tstore.log import ROOT_EVERY, Log, commit_key, root_key
from tstore.manifest import Manifest, Record, Root
from tstore.tree import Node, Tree

__all__ = ["VerifyReport", "verify_store"]


class VerifyReport(NamedTuple):
    """What was checked, and one sentence for each fault, naming the object or the array and chunk."""

    versions: int
    arrays: int
    chunks: int
    bytes: int
    faults: list[str]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults


async def verify_store(log: Log) -> VerifyReport:
    """Reads everything that any version refers to; each chunk once, however many versions share it."""
    faults: list[str] = []
    wanted: dict[tuple[str | bytes, int], tuple[ChunkRow, str]] = {}
    arrays: set[str] = set()
    newest = await log.newest()
    for version in range(1, newest + 1):
        try:
            record = await log.read(commit_key(version), Record)
        except (Corrupt, NotFound, UnsupportedFormat) as error:
            faults.append(str(error))
            continue
        for where in record.manifests:
            try:
                _collect(await log.manifest(where), version, wanted, arrays, faults)
            except (Corrupt, NotFound, UnsupportedFormat) as error:
                faults.append(f"version {version}: {error}")
        if version % ROOT_EVERY == 0:
            await _check_root(log, version, faults)
    await verify_chunks(log.backend, wanted.values(), faults.append)
    size = sum(row.length for row, _ in wanted.values())
    return VerifyReport(newest, len(arrays), len(wanted), size, sorted(faults))


def _collect(
    manifest: Manifest,
    version: int,
    wanted: dict[tuple[str | bytes, int], tuple[ChunkRow, str]],
    arrays: set[str],
    faults: list[str],
) -> None:
    for path, document, _, span in manifest.nodes():
        node = Node(document, (span,))
        if not node.is_array:
            continue
        meta = node.meta
        arrays.add(path)
        for number, pack, offset, length, checks in span.table.rows[span.start : span.stop]:
            if number >= meta.chunk_count:
                faults.append(f"version {version}: {path} has a chunk number {number} outside of its grid")
                continue
            key = span.table.packs[pack]
            at = tuple(int(i) for i in np.unravel_index(number, meta.counts)) if meta.counts else ()
            row = ChunkRow(number, key, offset, length, checks)
            wanted.setdefault((key, offset), (row, f"version {version}: {path}, chunk {at}"))


async def _check_root(log: Log, version: int, faults: list[str]) -> None:
    try:
        Tree.of(await log.read(root_key(version), Root))
    except NotFound:
        return  # a root only saves time; the records hold everything
    except (Corrupt, UnsupportedFormat) as error:
        faults.append(str(error))
