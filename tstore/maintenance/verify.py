"""Verification of a store: every record and root, and the manifests and chunks of every living version."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tstore.data.reader import pack_reader
from tstore.errors import Corrupt, NotFound, UnsupportedFormat, parsing
from tstore.format.checksums import BLOCK, block_checks
from tstore.format.chunk_refs import ChunkRow
from tstore.format.grid import chunk_coordinates
from tstore.format.layout import ROOT_EVERY, commit_key, is_object, root_key
from tstore.format.records import Record, Root
from tstore.format.references import Manifest, ObjectRef
from tstore.format.tree import RESERVED_ATTRIBUTE, Node, Tree
from tstore.format.tree_document import is_document
from tstore.log.expiry import changes_nothing, existing_collection
from tstore.log.reader import LogReader
from tstore.maintenance.damage import UNREADABLE, check_reference, known_expiry, missing_records, perhaps_collected
from tstore.runtime.budget import scratch
from tstore.runtime.concurrency import together
from tstore.runtime.pool import each
from tstore.storage.base import Storage
from tstore.storage.objects import Tuning

__all__ = ["VerifyReport", "verify_store"]

_LabeledChunk = tuple[ChunkRow, str]
"""A chunk and its label in error messages: version, path and position in the grid."""

_Reference = tuple[str | bytes, int, int, bytes]
"""Pack, offset, length and checks of a chunk; chunks in which all four are equal are verified once."""


class VerifyReport(NamedTuple):
    """Counts of what was checked, and a sentence for each fault, which names the object, or the array and chunk.

    `foreign` lists the keys under the store's URL that no store writes, such as those of `zarr.open`. They are not
    faults, since nothing reads them. It omits hidden files, and is empty if the storage can't be listed.
    `unchecked` lists the versions that could not be checked completely because another version's record is
    damaged: their trees can't be built, or they lack objects that a gc with a damaged record may have deleted.
    """

    versions: int
    arrays: int
    chunks: int
    bytes: int
    faults: list[str]
    foreign: list[str]
    unchecked: list[int]

    def __repr__(self) -> str:
        counts = ", ".join(f"{getattr(self, name)} {name}" for name in ("versions", "arrays", "chunks", "bytes"))
        return f"<tstore.VerifyReport ok={self.ok}: {counts}, {len(self.faults)} faults>"

    @property
    def ok(self) -> bool:
        """Whether there are no faults."""
        return not self.faults


async def verify_store(log: LogReader) -> VerifyReport:
    """Read and check everything that living versions refer to; a chunk shared by versions is read once."""
    while True:
        report, collection = await _verify(log)
        if report.ok or collection == (await known_expiry(log, await log.newest())).collection:
            return report  # else a concurrent garbage collection may have deleted the missing objects


async def _verify(log: LogReader) -> tuple[VerifyReport, int]:
    faults: list[str] = []
    chunks: dict[_Reference, _LabeledChunk] = {}
    arrays: set[str] = set()
    replayed = _ReplayedTree(log)
    newest = await log.newest()
    known = await known_expiry(log, newest)
    incomplete = await perhaps_collected(log, known)
    inherited = _InheritedChunks(log)

    def expired(version: int) -> bool:
        return known.expired(version) or version in incomplete

    async def read(version: int) -> tuple[Record | None, list[Manifest]]:
        """Return the record, None if it is damaged, and the intact manifests of the version if it is living."""
        record = None
        with _reporting("", faults):
            record = (await log.records.stored_below(version, newest + 1)).record
            await check_reference(log, record)
        if record is None or changes_nothing(record) or expired(version):
            return record, []
        return record, [m for m in await together(functools.partial(manifest, version), record.manifests) if m]

    async def manifest(version: int, ref: ObjectRef | Manifest) -> Manifest | None:
        with _reporting(f"version {version}: ", faults):
            return await log.objects.manifest(ref)
        return None

    last = 0  # the newest garbage collection so far; -1 after a damaged record, which may have been one
    async for version, (record, manifests) in log.each(read, range(1, newest + 1)):
        last = await _check_collected(log, version, record, last, faults)
        if version % ROOT_EVERY == 0:
            await replayed.check_root(version, faults)
        inherited.advance(version, record)
        if record is None or changes_nothing(record):
            continue
        if expired(version):
            inherited.note_unchecked()
            continue
        for intact in (*manifests, *await inherited.manifests(version, record, faults)):
            with _reporting(f"version {version}: ", faults):
                _add_chunks(intact, version, chunks, arrays, faults)
    for absent in (await missing_records(log, newest))[:1]:
        reason = f"{log.storage.url}: {commit_key(absent)} is missing although later commits exist"
        faults.append(f"{reason}; restore it from a copy: until then the later commits can't be read")
    await _check_chunks(log.storage, chunks.values(), faults)
    size = sum(row.length for row, _ in chunks.values())
    foreign, unchecked = await _foreign_keys(log.storage), sorted({*incomplete, *inherited.unchecked})
    report = VerifyReport(newest, len(arrays), len(chunks), size, sorted(faults), foreign, unchecked)
    return report, known.collection


@contextlib.contextmanager
def _reporting(prefix: str, faults: list[str]) -> Iterator[None]:
    """Append the error that ends the block to `faults` if it is one of `UNREADABLE`."""
    try:
        yield
    except UNREADABLE as error:
        faults.append(f"{prefix}{error}")


class _InheritedChunks:
    """Chunks that a version inherits from expired or damaged versions, which were not checked themselves."""

    def __init__(self, log: LogReader) -> None:
        self.unchecked: list[int] = []
        self._log = log
        self._damaged: list[int] = []
        self._possible = False  # whether the next version may have such chunks
        self._possible_before = False  # the same before the newest damaged version

    def note_unchecked(self) -> None:
        """Note that the chunks of a version were not checked."""
        self._possible = True

    def advance(self, version: int, record: Record | None) -> None:
        """Note the record of the next version, None if it is damaged."""
        if record is None:
            self._damaged.append(version)
            self._possible_before = self._possible
            self.note_unchecked()
        elif self._damaged[-1:] == [version - 1] == [record.collected]:
            self._possible = self._possible_before  # the damaged version was a garbage collection: no chunks

    async def manifests(self, version: int, record: Record, faults: list[str]) -> list[Manifest]:
        """Return a manifest of all chunks of a living version if it may have such chunks, else nothing.

        If a damaged record prevents that, note the version as unchecked and try again for the next version.
        """
        manifests = []
        if self._possible and not record.replaces:
            try:
                manifests.append((await self._log.tree(version)).manifest())
            except UNREADABLE as error:
                if any(commit_key(damaged) in str(error) for damaged in self._damaged):
                    self.unchecked.append(version)
                    return []
                faults.append(f"version {version}, in chunks of older versions: {error}")
        self._possible = False
        return manifests


async def _check_collected(
    log: LogReader, version: int, record: Record | None, last: int, faults: list[str]
) -> int:
    """Check that a record names the newest garbage collection before it (`last`, -1 if unknown).

    Return the newest garbage collection up to this version, -1 if unknown.
    """
    if record is None:
        return -1
    with contextlib.suppress(*UNREADABLE):  # reported elsewhere
        named = await existing_collection(log, record.collected)
        if last >= 0 and named != last:
            faults.append(
                f"{log.storage.url}: {commit_key(version)} names version {named} as the last garbage collection "
                f"before it, but version {last} is; `tstore repair` can void {commit_key(version)}"
            )
    return last if record.collection is None else version


def _add_chunks(
    manifest: Manifest, version: int, chunks: dict[_Reference, _LabeledChunk], arrays: set[str], faults: list[str]
) -> None:
    for path, metadata, _, table in manifest.nodes():
        label = f"version {version}: {path or 'the root group'}"
        with _reporting(f"{label}: ", faults), parsing("its metadata"):
            node = Node(path, metadata, (table,))
            if not node.is_array:
                _check_group(path, node)
                continue
            meta = node.meta
            arrays.add(path)
            for row in table.rows:
                if row.number >= meta.chunk_count:
                    faults.append(f"{label} has a chunk number {row.number} outside of its grid")
                    continue
                position = chunk_coordinates(row.number, meta.counts)
                chunks.setdefault(row[1:], (row, f"{label}, chunk {position}"))


def _check_group(path: str, node: Node) -> None:
    """Raise `Corrupt` if a group's attributes, or the checkpoint structure in the root group's, do not parse."""
    node.metadata.check_group()
    if path:
        return
    reserved = node.attributes.get(RESERVED_ATTRIBUTE)
    if not isinstance(reserved, dict) or "structure" not in reserved:
        return
    if not is_document(reserved["structure"]):
        raise Corrupt("the structure of the saved tree does not parse; restore returns its arrays by path")


async def _foreign_keys(storage: Storage) -> list[str]:
    if not storage.capabilities.listing:
        return []
    keys = [key for key in await storage.list("") if not is_object(key)]
    return [key.encode(errors="backslashreplace").decode() for key in keys]  # file names may be invalid UTF-8


class _ReplayedTree:
    """The tree replayed from records alone, for comparison with every root."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._tree: Tree | None = Tree.empty()
        self._whole = True  # False after an unreadable manifest, such as that of an expired version

    async def check_root(self, version: int, faults: list[str]) -> None:
        """Report the root of a version if it is damaged, of another record, or differs from the replayed tree."""
        await self._advance(version)
        key = root_key(version)
        name, advice = f"{self._log.storage.url}: {key}", "delete this object: it only saves time"
        try:
            root, stored = await self._log.objects.read(key, Root), await self._log.stored(version)
            tree = Tree.from_root(root)
        except NotFound:  # no root, or no record, which is reported already
            return
        except (Corrupt, UnsupportedFormat) as error:
            reason = str(error) if key in str(error) else f"{name}: {error}"
            faults.append(f"{reason}. Readers ignore it; {advice}")
            return
        if (root.version, root.record_check) != (version, stored.check):
            faults.append(f"{name} is not the root of {commit_key(version)}. Readers ignore it; {advice}")
        elif self._tree is not None and (paths := self._tree.differences(tree, nodes=self._whole)):
            shown = ", ".join(p or "the root group" for p in paths[:5]) + (", …" if len(paths) > 5 else "")
            faults.append(f"{name} differs from the records up to version {version} in {shown}; {advice}")

    async def _advance(self, version: int) -> None:
        """Replay the records up to a version; a damaged or missing record ends the replay."""
        if self._tree is None:
            return
        log, versions = self._log, range(self._tree.version + 1, version + 1)
        try:
            last = max([v async for v, record in log.each(log.record, versions) if record.replaces], default=0)
            async for number, record in log.each(log.record, versions):
                manifests: list[Manifest] = []
                if number >= last:
                    self._whole = self._whole or number == last
                    try:
                        manifests = await log.objects.manifests(number, record)
                    except UNREADABLE:
                        self._whole = False
                record = await log.records.with_collection(number, record)
                self._tree = self._tree.after(number, record, manifests)
        except UNREADABLE:
            self._tree = None


async def _check_chunks(storage: Storage, rows: Iterable[_LabeledChunk], faults: list[str]) -> None:
    in_order = sorted(rows, key=lambda r: (isinstance(r[0].pack, bytes), str(r[0].pack), r[0].offset))
    tuning = storage.tuning

    def check(batch: list[_LabeledChunk]) -> None:
        if len(batch) == 1:
            _check_alone(storage, *batch[0], tuning.piece, faults)
            return
        begin = batch[0][0].offset
        size = batch[-1][0].offset + batch[-1][0].length - begin
        with scratch(size) as buffer:
            try:
                pack_reader(storage, batch[0][0].pack, "").read_into(begin, [buffer], size)
            except (Corrupt, NotFound):  # check each chunk separately, to report the unreadable ones
                for row, label in batch:
                    _check_alone(storage, row, label, tuning.piece, faults)
                return
            for row, label in batch:
                start = row.offset - begin
                checks = block_checks(buffer[start : start + row.length].data)
                if checks != row.checks:
                    faults.append(f"{label}: {row.mismatch(checks, storage.url)}")

    await each(check, _batches(in_order, tuning), tuning.streams)


def _batches(rows: Iterable[_LabeledChunk], tuning: Tuning) -> Iterator[list[_LabeledChunk]]:
    """Group chunks that are close together in a pack, up to about `tuning.batch` bytes; keep longer ones alone."""
    batch: list[_LabeledChunk] = []
    begin = end = 0
    for row, label in rows:
        near = bool(batch) and batch[0][0].pack == row.pack and 0 <= row.offset - end <= tuning.gap
        if batch and not (near and row.offset + row.length - begin <= tuning.batch):
            yield batch
            batch = []
        if not batch:
            begin = row.offset
        batch.append((row, label))
        end = row.offset + row.length
    if batch:
        yield batch


def _check_alone(storage: Storage, row: ChunkRow, label: str, size: int, faults: list[str]) -> None:
    """Check one chunk in pieces of whole blocks, of about `size` bytes."""
    size = max(BLOCK, size - size % BLOCK)
    with scratch(min(row.length, size)) as buffer:
        checks = b""
        try:
            reader = pack_reader(storage, row.pack, label)
            for i in range(0, row.length, size):
                part = buffer[: min(size, row.length - i)]
                reader.read_into(row.offset + i, [part], len(part))
                checks += block_checks(part.data)
        except (Corrupt, NotFound) as error:
            faults.append(str(error) if str(error).startswith(label) else f"{label}: {error}")
            return
        if checks != row.checks:
            faults.append(f"{label}: {row.mismatch(checks, storage.url)}")
