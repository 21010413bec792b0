"""Verification of a whole store: every record and root, and the manifests and chunks of every living version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tstore.chunks.reader import pack_reader
from tstore.chunks.table import BLOCK, ChunkRow, block_checks
from tstore.errors import Corrupt, NotFound, UnsupportedFormat
from tstore.expiry import living
from tstore.kv.base import Backend
from tstore.log import Log
from tstore.manifest import Manifest, Record, Root
from tstore.pool import each, scratch
from tstore.records import ROOT_EVERY, commit_key, root_key
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
    """Reads everything that any living version refers to; each chunk once, however many versions share it."""
    while True:
        report, gc = await _verify(log)
        if report.ok or gc == (await _living(log, await log.newest()))[1]:
            return report  # else a gc removed meanwhile what was missed


async def _verify(log: Log) -> tuple[VerifyReport, int]:
    faults: list[str] = []
    wanted: dict[tuple[str | bytes, int], tuple[ChunkRow, str]] = {}
    arrays: set[str] = set()
    newest = await log.newest()
    alive, gc = await _living(log, newest)
    orphaned = False  # whether the version below expired, so that its chunks were not looked at
    for version in range(1, newest + 1):
        if version % ROOT_EVERY == 0:
            await _check_root(log, version, faults)
        try:
            record = await log.read(commit_key(version), Record)
        except (Corrupt, NotFound, UnsupportedFormat) as error:
            faults.append(str(error))
            continue
        if record.void or record.collection is not None:
            continue
        if version <= gc and version not in alive:
            orphaned = True
            continue
        for where in record.manifests:
            try:
                _collect(await log.manifest(where), version, wanted, arrays, faults)
            except (Corrupt, NotFound, UnsupportedFormat) as error:
                faults.append(f"version {version}: {error}")
        if orphaned and not record.replaces:
            try:
                _collect((await log.tree(version)).manifest(), version, wanted, arrays, faults)
            except (Corrupt, NotFound, UnsupportedFormat) as error:
                faults.append(f"version {version}, of what older ones wrote: {error}")
        orphaned = False
    await _check_numbers(log, newest, faults)
    await _check_chunks(log.backend, wanted.values(), faults)
    size = sum(row.length for row, _ in wanted.values())
    return VerifyReport(newest, len(arrays), len(wanted), size, sorted(faults)), gc


async def _living(log: Log, newest: int) -> tuple[frozenset[int], int]:
    """What `living` tells; where the log is too damaged to tell, every version counts as living."""
    try:
        return await living(log, newest)
    except (Corrupt, NotFound, UnsupportedFormat):
        return frozenset(), 0


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


async def _check_numbers(log: Log, newest: int, faults: list[str]) -> None:
    """Commits are numbered without a gap; behind a missing one the later are not found."""
    if not log.backend.capabilities.listing:
        return
    beyond = [k for k in await log.backend.list("commits/") if k > commit_key(newest)]
    absent = newest + 1
    while beyond and await log.backend.size(commit_key(absent)) is not None:  # committed since we began
        beyond = [k for k in beyond if k > commit_key(absent)]
        absent += 1
    if beyond:
        faults.append(
            f"{log.backend.url}: {commit_key(absent)} is missing, though {len(beyond)} later commits up to "
            f"{beyond[-1]} are there; restore it from a copy, until then they can't be read"
        )


async def _check_root(log: Log, version: int, faults: list[str]) -> None:
    try:
        Tree.of(await log.read(root_key(version), Root))
    except NotFound:
        return  # a root only saves time; the records hold everything
    except (Corrupt, UnsupportedFormat) as error:
        faults.append(str(error))


async def _check_chunks(backend: Backend, rows: Iterable[tuple[ChunkRow, str]], faults: list[str]) -> None:
    in_order = sorted(rows, key=lambda r: (isinstance(r[0].pack, bytes), str(r[0].pack), r[0].offset))

    def check(task: tuple[ChunkRow, str]) -> None:
        row, where = task
        with scratch(min(row.length, BLOCK)) as buffer:
            found = b""
            try:
                reader = pack_reader(backend, row.pack, where)
                for i in range(0, row.length, BLOCK):
                    part = buffer[: min(BLOCK, row.length - i)]
                    reader.read_into(row.offset + i, [part], len(part))
                    found += block_checks(part.data)
            except Corrupt as error:
                faults.append(str(error) if str(error).startswith(where) else f"{where}: {error}")
                return
            if found != row.checks:
                faults.append(f"{where}: {row.mismatch(0)}")

    await each(check, in_order)
