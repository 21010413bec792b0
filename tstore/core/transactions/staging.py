"""The internals of a transaction: its state and staged changes, and how they become packs and a manifest.

The arrays of a `Transaction`, the public face, read and write through its `Staging` (`handles`). `save` and
`quantize` stage whole trees with it: `Transaction.staging`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from tstore.core.data.writer import PackSet, WriteJob
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.layout import folder_of
from tstore.core.format.objects.chunk_refs import ChunkTable
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.pages import stored
from tstore.core.format.objects.records import INLINE_MANIFEST_BYTES
from tstore.core.format.objects.references import Manifest
from tstore.core.format.objects.segments import MIN_SEGMENTED
from tstore.core.format.objects.tables import Table
from tstore.core.format.paths import checked_path, parents
from tstore.core.format.tree.changes import Changes
from tstore.core.format.tree.tree import RESERVED_ATTRIBUTE, Tree
from tstore.core.log.expiry import check_alive, guard_expiry, newest_tree, state_of
from tstore.core.log.group_commit import Newer, Retry
from tstore.core.log.log import Log
from tstore.core.log.pages import read_pages
from tstore.core.runtime import world
from tstore.core.runtime.pool import give_way, run
from tstore.core.storage.objects import Durability
from tstore.core.transactions.lifecycle import Lifecycle, Operation
from tstore.core.transactions.membership import Membership
from tstore.core.transactions.staged_array import StagedArray
from tstore.core.transactions.staged_manifest import ReusedPacks
from tstore.core.transactions.staged_tree import StagedTree
from tstore.core.transactions.tag_edits import TagEdits
from tstore.errors import Conflict, Corrupt, NotFound

if TYPE_CHECKING:  # imported when a transaction of several hosts begins
    from tstore.core.transactions.pending import HeartbeatWriter

__all__ = ["Isolation", "Staging"]

T = TypeVar("T")
Isolation = Literal["snapshot", "serializable"]
MIN_HOST_ROWS = 64  # rows of an array in the fragment of one of many hosts


class Staging:
    """The staged changes of one transaction, its packs, and its operations under way.

    The hosts of a cooperative transaction must agree on `structure_check`, the checksum of the tree's structure,
    and on `replicated`, the checksums of values by path. `reused` are the packs of other
    transactions to which the last manifest refers.
    """

    def __init__(
        self, log: Log, tags: TagEdits, isolation: Isolation, durability: Durability, member: Membership | None
    ) -> None:
        self.log = log
        self.reader = log.reader
        self.tags = tags
        self._checks_tags = bool(tags.assigned or tags.dropped)
        self.isolation = isolation
        self._durability = durability
        self.segments = log.reader.objects.segments
        self._staged: StagedTree | None = None
        self._known_alive: set[int] = set()  # versions
        self._kept: set[str] = set()  # the paths of arrays made of chunks of other versions
        self.appending: dict[str, asyncio.Lock] = {}  # locks for appends, by path
        self._bytes_adopted = 0
        self._manifest_count = 0
        self.transaction = world.token(12) if member is None else member.transaction
        self.lifecycle = Lifecycle(log.storage.url)
        self.structure_check = b""
        self.replicated: Mapping[str, bytes] = {}
        self.reused: tuple[str, ...] = ()
        self._manifest_prefix = "" if member is None else f"{member.host:05d}-"
        self.packs = PackSet(log.storage, folder_of(self.transaction), durability)
        # so that the merged manifest of all hosts is as short as that of one
        self._max_rows = MIN_SEGMENTED if member is None else max(MIN_HOST_ROWS, MIN_SEGMENTED // member.hosts)
        self._heartbeat: HeartbeatWriter | None = None
        if member is not None:
            from tstore.core.transactions.pending import HeartbeatWriter

            self._heartbeat = HeartbeatWriter(log.storage, member)

    # ---- staging changes

    async def base(self) -> Tree:
        """Return the base of the transaction, which its first use fixes.

        What a caller looks up in this tree does not count as read by a serializable transaction.
        """
        async with Operation(self.lifecycle, self._staged_tree) as staged:
            return staged.base

    def operation(self) -> Operation[StagedTree]:
        """Return a context manager that enters the staged tree; a commit waits for the end of the block."""
        return Operation(self.lifecycle, self._checked_tree, None if self._checks_tags else self._staged)

    async def set_root_attributes(self, attributes: Mapping[str, Any], reserved: Mapping[str, Any]) -> None:
        """Stage the root group with a caller's attributes and, in `reserved`, those of tstore."""
        async with self.operation() as staged:
            staged.create_group("", attributes, reserved)

    async def tag_version(self, version: int) -> int:
        """Make the transaction's tags point to an earlier version, and return that version.

        Only a transaction of one host may do so. In place of a version that changed nothing, such as a gc, the
        head before it is tagged. Raise `NotFound` if there is no such version or commit, or `SnapshotExpired`.
        """
        async with self.operation() as staged:
            if version > staged.base.version:
                raise NotFound(f"{staged.origin}: there is no version {version} to tag")
            await check_alive(self.reader, version, staged.base.version)
            version = await state_of(self.reader, version)
            if version == 0:
                raise NotFound(f"{self.log.storage.url} has no commit to tag; save one first")
            self.tags = self.tags._replace(target=version)
            return version

    async def create_group(self, path: str, attributes: Mapping[str, Any]) -> None:
        """Stage a group with a caller's attributes; those of tstore stay, unless the caller passes them too."""
        async with self.operation() as staged:
            await self.read_nodes(staged, [path, *parents(path)] if isinstance(path, str) else ())
            root = staged.node("") if path in ("", "/") else None
            given = isinstance(attributes, Mapping) and RESERVED_ATTRIBUTE in attributes
            reserved = None if given or root is None else root.attributes.get(RESERVED_ATTRIBUTE)
            staged.create_group(path, attributes, reserved)

    async def paths(self) -> list[str]:
        """Return the sorted paths of all arrays, as the transaction sees them."""
        async with self.operation() as staged:
            await self.read_nodes(staged)
            return staged.paths()

    async def delete(self, path: str) -> None:
        """Stage the removal of everything at and below a path; raise `NotFound` if there is nothing."""
        async with self.operation() as staged:
            path = checked_path(path)
            await self.read_around(staged, [path])
            staged.delete(path)

    async def replace_all(
        self, structure_check: bytes, source: int = 0, replicated: Mapping[str, bytes] | None = None
    ) -> None:
        """Drop the base, so that the staged nodes are the whole tree, or the tree of a copy of version `source`.

        Raise `SnapshotExpired` unless that version is alive.
        """
        async with self.operation() as staged:
            if source:
                await check_alive(self.reader, source, staged.base.version)
            staged.replace_all(source)
            self.structure_check = structure_check
            self.replicated = replicated or {}

    async def write_arrays(self, jobs: Sequence[WriteJob]) -> None:
        """Create arrays from jobs of whole chunks; raise `AlreadyExists` unless all are new.

        Raise `Corrupt`, and create none, if a pack with unchanged chunks is lost.
        """
        async with self.operation() as staged:
            await self.read_around(staged, (job.path for job in jobs))
            staged.check_new(jobs)
            async with self.heartbeat():
                await self.packs.write(jobs)
                reused = ReusedPacks(self.transaction)
                reused.add_jobs(jobs)
                await reused.check(self.log.storage)
            staged.check_new(jobs)  # another operation may have created one meanwhile
            for job in jobs:
                job.take_references()
                staged.add_array(job, self.segments)
        await give_way()

    async def keep_array(self, path: str, meta: ArrayMeta, tables: tuple[Table, ...], version: int) -> None:
        """Stage an array made of chunks of another version; raise `SnapshotExpired` if gc removed that version."""
        async with self.operation() as staged:
            if version not in self._known_alive:
                await check_alive(self.reader, version, staged.base.version)
                self._known_alive.add(version)
            staged.keep_array(path, meta, tables)
            self._kept.add(path)

    async def adopt_array(self, path: str, meta: ArrayMeta, chunks: ChunkTable, reused: int = 0) -> None:
        """Stage an array whose chunks this or other processes wrote to the transaction's packs.

        `reused` bytes of them are in packs of earlier transactions.
        """
        async with self.operation() as staged:
            staged.keep_array(path, meta, (chunks,))
            self._bytes_adopted += int(chunks.length.sum()) - reused

    async def read_nodes(self, staged: StagedTree, paths: Iterable[str] | None = None) -> None:
        """Read the nodes of the base at these paths, or all, so that later lookups do not block."""
        if staged.base.nodes.is_paged and not staged.replaces:
            wanted = None if paths is None else list(paths)
            await self.await_read(staged, read_pages(staged.base.nodes, wanted))

    async def read_around(self, staged: StagedTree, paths: Iterable[object]) -> None:
        """Read the nodes of the base at, above and below these paths, so that later lookups do not block."""
        around = staged.base.nodes.around
        await self.read_nodes(staged, (p for path in paths if isinstance(path, str) for p in around(path)))

    # ---- committing the changes

    @property
    def tree(self) -> StagedTree:
        """The staged tree; the base must be fixed already."""
        assert self._staged is not None
        return self._staged

    @property
    def has_changes(self) -> bool:
        """Whether this process has changed arrays."""
        staged = self._staged
        return staged is not None and bool(staged.arrays or staged.deleted) and not self.lifecycle.inherited

    @property
    def base_version(self) -> int:
        """The head as of the first use of the transaction; 0 before it."""
        return 0 if self._staged is None else self._staged.base.head

    @property
    def bytes_added(self) -> int:
        """The number of bytes of chunks that the transaction has written."""
        return self.packs.bytes_written + self._bytes_adopted

    @property
    def bytes_reused(self) -> int:
        """The number of bytes of unchanged chunks that were compared, and not written again."""
        return self.packs.bytes_reused

    def changes(self) -> Changes:
        """Return the changes that a concurrent commit can conflict with."""
        return self.tree.changes(self.tags)

    @property
    def is_cooperative(self) -> bool:
        """Whether several hosts share the transaction."""
        return self._heartbeat is not None

    def heartbeat(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Renew the heartbeat of a cooperative transaction while the block runs."""
        return contextlib.nullcontext() if self._heartbeat is None else self._heartbeat.run()

    async def seal(self) -> ObjectRef | Manifest:
        """Apply all patches, make the packs durable, and return the manifest."""
        staged = await self._checked_tree()
        staged.check_placed()
        await self.read_nodes(staged, [a.path for a in staged.arrays.values() if not a.replaces_node])
        for array in staged.arrays.values():
            if array.patches:
                await self.apply_patches(staged, array)
            if self._heartbeat is None and not array.replaces_node:  # many hosts would compact the same ones
                await array.compact_base(staged.base_chunks(array.path), self.packs, self.segments)
        if self._kept:
            await self._check_kept(staged)
        return await self.manifest()

    async def manifest(self) -> ObjectRef | Manifest:
        """Make the packs durable and return the manifest; write a long one and return the reference to it."""
        staged = self.tree
        long = [a for a in staged.arrays.values() if a.has_long_tables(self._max_rows)]
        for array in long:
            await array.write_segments(self.packs, self.segments, self._max_rows)
        await self._flush_packs()
        manifest = await run(staged.manifest) if staged.reads_segments else staged.manifest()
        await give_way()
        self.reused = manifest.reused(self.transaction)
        if manifest.size <= INLINE_MANIFEST_BYTES:
            return manifest
        self._manifest_count += 1
        if self._manifest_count == 1:
            self._manifest_prefix += world.token(4)
        key = f"{folder_of(self.transaction)}/manifest-{self._manifest_prefix}-{self._manifest_count}"
        reference, data = stored(key, manifest)
        await self.log.storage.create(key, data, self._durability)
        return reference

    async def _flush_packs(self) -> None:
        """Make the packs durable; raise `Conflict` if they were deleted."""
        try:
            await self.packs.flush()
        except NotFound as error:
            await self.check_not_condemned()
            raise Conflict(
                f"{self.log.storage.url}: data of transaction {self.transaction} was deleted, probably by a "
                "garbage collection whose record was voided since, so nothing was committed; repeat it as a new "
                "transaction (if it is cooperative, with a new attempt)",
                [],
            ) from error

    async def validate(self, changes: Changes, newer: Newer) -> Retry | None:
        """Raise `Conflict` unless the changes of this transaction can be committed on top of newer commits.

        Return a `Retry` if changes were applied again on top of the newest version, which changes the manifest.
        """
        from tstore.core.transactions.conflicts import check_reads, reapply

        staged = self.tree
        if self.isolation == "serializable":
            await check_reads(self.reader, staged, self.tags, newer)
        return await reapply(self.reader, self.packs, staged, changes, newer)

    async def check_not_condemned(self) -> None:
        """Raise `Conflict` if a garbage collection has condemned the transaction."""
        if self._staged is not None:
            await self.log.check_not_condemned(self.transaction, self._staged.base.version)

    async def discard(self) -> None:
        """Delete the packs, once no operation is under way."""
        await self.lifecycle.wait_idle()
        await self.packs.discard()

    async def delete_heartbeat(self) -> None:
        """Delete the heartbeat of a cooperative transaction."""
        if self._heartbeat is not None:
            await self._heartbeat.delete()

    async def apply_patches(self, staged: StagedTree, array: StagedArray) -> None:
        """Write the patched chunks of an array."""
        work = array.apply_patches(self.log.storage, self.packs, staged.base_chunks(array.path))
        await self.await_read(staged, work)

    async def await_read(self, staged: StagedTree, work: Awaitable[T]) -> T:
        """Await work that reads the base or packs; raise `SnapshotExpired` or `Conflict` if gc deleted those."""
        try:
            return await guard_expiry(self.reader, staged.base.head, work)
        except (Corrupt, NotFound):
            await self.check_not_condemned()
            raise

    async def _check_kept(self, staged: StagedTree) -> None:
        """Raise `Corrupt` if a pack of an array made of chunks of another version is lost.

        Raise `SourceCondemned`, or `SnapshotExpired` if its record is lost, if a garbage collection deleted it.
        """
        tables = {path: staged.arrays[path].staged_chunks() for path in self._kept & staged.arrays.keys()}
        reused = ReusedPacks(self.transaction)
        try:
            await run(reused.add_arrays, tables)
            await reused.check(self.log.storage)
        except Corrupt:
            packs = {pack for table in itertools.chain(*tables.values()) for pack in table.packs}
            names = tuple(pack for pack in packs if isinstance(pack, str))
            await self.log.check_not_condemned(self.transaction, staged.base.version, names)
            for version in sorted(self._known_alive):
                await check_alive(self.reader, version)
            raise

    async def _checked_tree(self) -> StagedTree:
        """Return the staged tree; raise if its base does not permit the transaction's tags."""
        staged = await self._staged_tree()
        if self._checks_tags:
            self.tags.check(staged.base.tags, self.log.storage.url)
        self._checks_tags = False  # once: the base never changes
        return staged

    async def _staged_tree(self) -> StagedTree:
        """Return the staged tree, with the head as its base if this is the first use."""
        if self._staged is None:
            await self.log.ensure_created()
            tree = await newest_tree(self.reader)
            staged = StagedTree(tree, f"{self.log.storage.url} at version {tree.head}")
            self._staged = self._staged or staged  # two concurrent first uses must see one base
        return self._staged
