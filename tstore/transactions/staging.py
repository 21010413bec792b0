"""The private side of a transaction: its state and staged changes, and how they become packs and a manifest.

The arrays of a `Transaction`, the public face, read and write through its `Staging` (an `ArraySource`). `save` and
`quantize` stage whole trees with it: `transaction.staging_of` returns it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal

import numpy.typing as npt

from tstore.array import Array
from tstore.data.pieces import ReadJob
from tstore.data.reader import read_chunks
from tstore.data.writer import PackSet, WriteJob
from tstore.errors import Conflict, Corrupt, NotFound
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import ChunkTable
from tstore.format.encoding import encode
from tstore.format.grid import Selection
from tstore.format.layers import Table
from tstore.format.layout import folder_of
from tstore.format.paths import checked_path
from tstore.format.records import INLINE_MANIFEST_BYTES
from tstore.format.references import Manifest, ObjectRef, reference
from tstore.format.segments import MIN_SEGMENTED
from tstore.format.tree import Changes, Tree
from tstore.log.expiry import changes_nothing, check_alive, guard_expiry, newest_tree
from tstore.log.group_commit import Newer, Retry
from tstore.log.log import Log
from tstore.log.reader import LogReader
from tstore.runtime import world
from tstore.runtime.pool import give_way
from tstore.storage.objects import Durability
from tstore.transactions.lifecycle import Lifecycle, Operation
from tstore.transactions.membership import Membership
from tstore.transactions.pending import HeartbeatWriter
from tstore.transactions.staged_array import StagedArray
from tstore.transactions.staged_tree import StagedTree, TagEdits

__all__ = ["Isolation", "Staging"]

_MIN_OF_HOST = 64  # rows of an array in the fragment of one of many hosts

Isolation = Literal["snapshot", "serializable"]


class Staging:
    """The staged changes of one transaction, its packs, and its operations under way.

    The hosts of a cooperative transaction must agree on `structure_check`, the checksum of the tree's structure.
    `reused` are the packs of other transactions to which the last manifest refers.
    """

    def __init__(
        self, log: Log, tags: TagEdits, isolation: Isolation, durability: Durability, member: Membership | None
    ) -> None:
        self._log = log
        self.tags = tags
        self._isolation = isolation
        self._durability = durability
        self._segments = log.reader.objects.segments
        self._staged: StagedTree | None = None
        self._known_alive: set[int] = set()  # versions
        self._bytes_adopted = 0
        self._manifest_count = 0
        self.transaction = world.token(12) if member is None else member.transaction
        self.lifecycle = Lifecycle(log.storage.url)
        self.structure_check = b""
        self.reused: tuple[str, ...] = ()
        host = "" if member is None else f"{member.host:05d}-"
        self._suffix = f"{host}{world.token(4)}"  # of manifest keys
        self._packs = PackSet(log.storage, folder_of(self.transaction), durability)
        # so that the merged manifest of all hosts is as short as that of one
        self._max_inline_rows = (
            MIN_SEGMENTED if member is None else max(_MIN_OF_HOST, MIN_SEGMENTED // member.hosts)
        )
        self._heartbeat = None if member is None else HeartbeatWriter(log.storage, member)

    # ---- staging changes

    async def base(self) -> Tree:
        """Return the base of the transaction, which its first use fixes.

        What a caller looks up in this tree does not count as read by a serializable transaction.
        """
        async with Operation(self.lifecycle, self._staged_tree) as staged:
            return staged.base

    def operation(self) -> Operation[StagedTree]:
        """Return a context manager that enters the staged tree; a commit waits for the end of the block."""
        return Operation(self.lifecycle, self._checked_tree)

    async def array(self, path: str) -> Array:
        """Return the array at a path; raise `NotFound`."""
        async with self.operation() as staged:
            path = checked_path(path)
            return Array(self, path, staged.meta(path))

    async def create_array(self, path: str, meta: ArrayMeta) -> Array:
        """Stage a new array and return it; raise `AlreadyExists`."""
        async with self.operation() as staged:
            return Array(self, staged.create_array(path, meta), meta)

    async def set_root_attributes(self, attributes: Mapping[str, Any], reserved: Mapping[str, Any]) -> None:
        """Stage the root group with a caller's attributes and, in `reserved`, those of tstore."""
        async with self.operation() as staged:
            staged.create_group("", attributes, reserved)

    async def tag_version(self, version: int) -> int:
        """Make the transaction's tags point to an earlier version, and return that version.

        Only a transaction of one host may do so. In place of a version that changed nothing, such as a garbage
        collection, the one before it is tagged. Raise `NotFound` if the base has no such version or no commit up
        to it, `SnapshotExpired` if the version has expired.
        """
        async with self.operation() as staged:
            if version > staged.base.version:
                raise NotFound(f"{staged.origin}: there is no version {version} to tag")
            await check_alive(self._log.reader, version, staged.base.version)
            while version and changes_nothing(await self._log.reader.record(version)):
                version -= 1
            if version == 0:
                raise NotFound(f"{self._log.storage.url} has no commit to tag; save one first")
            self.tags = self.tags._replace(target=version)
            return version

    async def replace_all(self, structure_check: bytes) -> None:
        """Drop the base: the staged nodes are the whole tree."""
        async with self.operation() as staged:
            staged.replace_all()
            self.structure_check = structure_check

    async def write_arrays(self, jobs: Sequence[WriteJob]) -> None:
        """Create arrays from jobs of whole chunks; raise `AlreadyExists` unless all are new."""
        async with self.operation() as staged:
            staged.check_new(jobs)
            async with self.heartbeat():
                await self._packs.write(jobs)
            staged.check_new(jobs)  # another operation may have created one meanwhile
            for job in jobs:
                if job.same_as is not None:
                    job.rows, job.tables, job.segments = (
                        job.same_as.rows,
                        job.same_as.tables,
                        job.same_as.segments,
                    )
                staged.add_array(job, self._segments)
        await give_way()

    async def keep_array(self, path: str, meta: ArrayMeta, tables: tuple[Table, ...], version: int) -> None:
        """Stage an array of another version's chunks; raise `SnapshotExpired` if gc removed that version."""
        async with self.operation() as staged:
            if version not in self._known_alive:
                await check_alive(self._log.reader, version, staged.base.version)
                self._known_alive.add(version)
            staged.keep_array(path, meta, tables)

    async def adopt_array(self, path: str, meta: ArrayMeta, chunks: ChunkTable) -> None:
        """Stage an array whose chunks other processes have written durably to packs of this transaction."""
        async with self.operation() as staged:
            staged.keep_array(path, meta, (chunks,))
            self._bytes_adopted += int(chunks.length.sum())

    async def read_array(self, path: str, meta: ArrayMeta, selection: Selection, out: npt.NDArray[Any]) -> None:
        """Fill `out` with the values that the transaction sees: its own writes on top of its base."""
        async with self.operation() as staged:
            staged.check_handle(path, meta)
            array = staged.arrays.get(path)
            if self._isolation == "serializable" and (array is None or not array.replaces_node):
                staged.reads.add_values(path, meta, selection)
            if array is not None:
                await self._apply_patches(staged, array)
                staged.check_handle(path, meta)  # the array may have been resized or deleted meanwhile
            jobs = [ReadJob(path, meta, staged.chunks(path), selection, out)]
            await self._await_read(staged, read_chunks(self._log.storage, jobs))

    async def write_array(
        self, path: str, meta: ArrayMeta, selection: Selection, values: npt.NDArray[Any]
    ) -> None:
        """Stage values of a region; whole chunks are written now, parts of chunks later."""
        async with self.operation() as staged, self.heartbeat():
            await staged.array_to_change(path, meta).write(self._packs, self._segments, selection, values)

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Stage another shape and return the new metadata."""
        async with self.operation() as staged:
            array = staged.array_to_change(path, meta)
            array.resize(shape, staged.base_chunks(path))
            return array.meta

    # ---- committing the changes

    @property
    def tree(self) -> StagedTree:
        """The staged tree; the base must be fixed already."""
        assert self._staged is not None
        return self._staged

    @property
    def base_version(self) -> int:
        """The version of the base; 0 before the first use of the transaction."""
        return 0 if self._staged is None else self._staged.base.version

    @property
    def bytes_added(self) -> int:
        """The number of bytes of chunks that the transaction has written."""
        return self._packs.bytes_written + self._bytes_adopted

    def changes(self) -> Changes:
        """Return the changes that a concurrent commit can conflict with."""
        return self.tree.changes(self.tags)

    def heartbeat(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Renew the heartbeat of a cooperative transaction while the block runs."""
        return contextlib.nullcontext() if self._heartbeat is None else self._heartbeat.run()

    async def seal(self) -> ObjectRef | Manifest:
        """Apply all patches, make the packs durable, and return the manifest."""
        staged = await self._checked_tree()
        for array in staged.arrays.values():
            await self._apply_patches(staged, array)
        return await self.manifest()

    async def manifest(self) -> ObjectRef | Manifest:
        """Make the packs durable and return the manifest; write a long one and return the reference to it."""
        long = [a for a in self.tree.arrays.values() if a.has_long_tables(self._max_inline_rows)]
        for array in long:
            await array.write_segments(self._packs, self._segments, self._max_inline_rows)
        await self._packs.flush()
        manifest = self.tree.manifest()
        await give_way()
        self.reused = manifest.reused(self.transaction)
        if manifest.size <= INLINE_MANIFEST_BYTES:
            return manifest
        data = encode(manifest)
        self._manifest_count += 1
        key = f"{folder_of(self.transaction)}/manifest-{self._suffix}-{self._manifest_count}"
        await self._log.storage.create(key, data, self._durability)
        return reference(key, data, manifest.segment_bytes)

    async def validate(self, changes: Changes, newer: Newer) -> Retry | None:
        """Raise `Conflict` unless the changes of this transaction can be committed on top of newer commits.

        Return a `Retry` if patches were applied again on top of the newest version, which changes the manifest.
        """
        staged = self.tree
        if self._isolation == "serializable":
            await _check_reads(self._log.reader, staged, self.tags, newer)
        chunks = await _chunks_to_patch(self._log.reader, staged, changes, newer)
        if not chunks:
            return None
        version = newer[-1][0]  # older ones may have expired; if this one has too, the caller validates again
        nodes = (await self._log.reader.tree(version)).nodes
        for path, numbers in chunks.items():
            work = staged.arrays[path].apply_patches(self._log.storage, self._packs, nodes[path], numbers)
            await guard_expiry(self._log.reader, version, work)
        return Retry(version, f"it changed chunks that this transaction wrote in part: {', '.join(chunks)}")

    async def check_not_condemned(self) -> None:
        """Raise `Conflict` if a garbage collection has condemned the transaction."""
        if self._staged is not None:
            await self._log.check_not_condemned(self.transaction, self._staged.base.version)

    async def discard(self) -> None:
        """Delete the packs, once no operation is under way."""
        await self.lifecycle.wait_idle()
        await self._packs.discard()

    async def delete_heartbeat(self) -> None:
        """Delete the heartbeat of a cooperative transaction."""
        if self._heartbeat is not None:
            await self._heartbeat.delete()

    async def _apply_patches(self, staged: StagedTree, array: StagedArray) -> None:
        if array.patches:
            work = array.apply_patches(self._log.storage, self._packs, staged.base_chunks(array.path))
            await self._await_read(staged, work)

    async def _await_read(self, staged: StagedTree, work: Awaitable[None]) -> None:
        """Await work that reads the base or packs; raise `SnapshotExpired` or `Conflict` if gc deleted those."""
        try:
            await guard_expiry(self._log.reader, staged.base.version, work)
        except (Corrupt, NotFound):
            await self.check_not_condemned()
            raise

    async def _checked_tree(self) -> StagedTree:
        """Return the staged tree; raise if its base does not permit the transaction's tags."""
        staged = await self._staged_tree()
        self.tags.check(staged.base.tags, self._log.storage.url)
        return staged

    async def _staged_tree(self) -> StagedTree:
        """Return the staged tree, with the newest version as its base if this is the first use."""
        if self._staged is None:
            tree = await newest_tree(self._log.reader)
            if self._staged is None:  # two concurrent first uses must see one base
                self._staged = StagedTree(tree, f"{self._log.storage.url} at version {tree.version}")
        return self._staged


async def _check_reads(log: LogReader, staged: StagedTree, tags: TagEdits, newer: Newer) -> None:
    """Raise `Conflict` if newer commits changed what a serializable transaction has read."""
    base = staged.base
    for version, _ in newer:
        tree = await log.tree(version)
        changed = [*staged.reads.changed(base, tree), *tags.changed(base.tags, tree.tags)]
        if changed:
            raise Conflict(
                f"{staged.origin}: version {version}, committed since then, changed what this serializable "
                "transaction has read, so it is not committed; read again and repeat it",
                changed,
            )


async def _chunks_to_patch(
    log: LogReader, staged: StagedTree, changes: Changes, newer: Newer
) -> dict[str, set[int]]:
    """Return the chunks, by path, that newer commits wrote and this transaction wrote in part.

    Raise `Conflict` if the changes of this transaction overlap with a newer commit in any other way.
    """
    chunks: dict[str, set[int]] = {}
    for version, other in newer:
        overlap = changes.overlap(await log.trees.changes(version, other))
        patched, lost = staged.split_overlap(overlap.chunks)
        conflicts = [*overlap.conflicts, *lost]
        if conflicts:
            raise Conflict(
                f"{staged.origin}: version {version}, committed since then, and this transaction changed the same "
                "chunks or metadata, so the transaction is not committed; read again and repeat it",
                conflicts,
            )
        for path, numbers in patched.items():
            chunks.setdefault(path, set()).update(numbers)
    return chunks
