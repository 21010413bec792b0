"""A transaction: changes staged over a snapshot, which become one commit or nothing.

1. The first use fixes the base version, which all reads of the transaction see (with its own writes on top).
2. Whole chunks go into packs under `txn/<id>/` as they are written; parts of chunks are kept as patches.
3. Commit applies the patches, makes the packs durable, writes the manifest, appends the record (`log.log`).
4. Validate the write set against all newer commits. Where one wrote a chunk of which this transaction changed only
   a part, patch that chunk again, once, over the newest commit; any other overlap is a `Conflict`. Of a
   serializable transaction, what it has read must be unchanged too.
5. A host of a group delivers its fragment instead of 4, and whoever sees all of them commits (`group`).

The id of a transaction is never used again, so what an aborted one leaves under `txn/<id>/` harms nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import numpy.typing as npt

from tstore.array import Array
from tstore.data.pieces import ReadJob
from tstore.data.reader import read_chunks
from tstore.data.writer import PackSet, WriteJob
from tstore.errors import Corrupt, DeadlineExceeded, NotFound
from tstore.format.array_metadata import ArrayMeta
from tstore.format.chunk_refs import ChunkTable
from tstore.format.codecs import Codecs
from tstore.format.encoding import encode, size_of
from tstore.format.grid import Selection
from tstore.format.records import INLINE_MANIFEST, Record
from tstore.format.references import Manifest, ObjectRef, reference
from tstore.format.tree import Changes, Tree, checked_path
from tstore.log.expiry import check_alive, newest_tree, unexpired
from tstore.log.group_commit import Newer, Retry
from tstore.log.log import Log
from tstore.runtime import world
from tstore.runtime.pool import uncancelled
from tstore.storage.base import Durability
from tstore.transactions.fragments import fragment_of
from tstore.transactions.group import Membership, checked_timeout, commit_group
from tstore.transactions.lifecycle import Lifecycle
from tstore.transactions.pending import HeartbeatWriter
from tstore.transactions.staged_array import StagedArray
from tstore.transactions.staged_tree import StagedTree
from tstore.transactions.tags import TagEdits
from tstore.transactions.validation import check_reads, chunks_to_patch

__all__ = ["Isolation", "Transaction"]

_NO_EDITS = TagEdits()

Isolation = Literal["snapshot", "serializable"]


class Transaction:
    """Staged changes over a snapshot; `async with` commits on exit and aborts on an exception.

    `version` is the version it became, None before. `retries` lists the versions that the commit had to get past.
    A forked child cannot go on with it.

    Operations may run concurrently, as if one after another. `commit` and `abort` wait for those under way; later
    ones are `Misuse`, as is the use of an array handle or view from before a change of its metadata.
    """

    def __init__(
        self,
        log: Log,
        *,
        message: str = "",
        tags: TagEdits = _NO_EDITS,
        isolation: Isolation = "snapshot",
        durability: Durability = Durability.FSYNC,
        member: Membership | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self._log = log
        self._message = message
        self._tags = tags
        self._isolation = isolation
        self._durability = durability
        self._member = member
        self._metadata = dict(metadata or {})
        self._structure = b""
        self._staged: StagedTree | None = None
        self._life = Lifecycle(log.backend.url)
        self._manifests_written = 0
        self._adopted = 0
        self._reused: tuple[str, ...] = ()
        self._sources: set[int] = set()
        self.id = world.token(12) if member is None else member.transaction
        self.version: int | None = None
        self.retries: list[Retry] = []
        host = "" if member is None else f"{member.host:05d}-"
        self._suffix = f"{host}{world.token(4)}"
        self._packs = PackSet(log.backend, f"txn/{self.id}", durability)
        self._heart = None if member is None else HeartbeatWriter(log.backend, member)

    def __repr__(self) -> str:
        return f"<tstore.Transaction {self.id} on {self._log.backend.url}: {self._life.state}>"

    @property
    def ended(self) -> bool:
        """Whether it was committed or aborted, so that it takes no more changes."""
        return self._life.ended

    async def __aenter__(self) -> Transaction:
        async with self._operation():
            return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            await self.abort()
        elif not self.ended:
            await self.commit()

    async def create_array(
        self,
        path: str,
        shape: Sequence[int],
        dtype: Any,
        chunks: Sequence[int] | None = None,
        codecs: Codecs = None,
        fill_value: Any = 0,
        attributes: Mapping[str, Any] | None = None,
        dimension_names: Sequence[str | None] | None = None,
        *,
        sparse: bool = False,
    ) -> Array:
        """Stage a new array and return it; write its values next.

        `chunks` is the shape of a chunk, by default one of about 8 MiB. `codecs` is None (uncompressed),
        "lossless" (compressed), an eXmY format ("e4m3"), its configuration ({"format": "e3m2", "block": 32}), or
        a Zarr v3 codec list. Reading a chunk that was never written is an error, or gives the fill value if the
        array is `sparse`.
        Raises `AlreadyExists` if the path is in use, `InvalidArgument` if the arguments contradict each other.
        """
        meta = ArrayMeta.new(shape, dtype, chunks, codecs, fill_value, attributes, dimension_names, sparse=sparse)
        async with self._operation() as staged:
            return Array(self, staged.create_array(path, meta), meta)

    async def create_group(self, path: str, attributes: Mapping[str, Any] | None = None) -> None:
        """Stage a group with attributes; one without need not be created. The root's path is ""."""
        async with self._operation() as staged:
            staged.create_group(path, attributes or {})

    async def describe(self, attributes: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        """Stage the root group with the attributes of a caller, and with what tstore itself keeps there."""
        async with self._operation() as staged:
            staged.create_group("", attributes, own)

    async def array(self, path: str) -> Array:
        """Return the array at a path, for reading and writing, as this transaction sees it, or `NotFound`."""
        async with self._operation() as staged:
            path = checked_path(path)
            return Array(self, path, staged.meta(path))

    async def paths(self) -> list[str]:
        """Return the sorted paths of all arrays, as this transaction sees them."""
        async with self._operation() as staged:
            return staged.paths()

    async def delete(self, path: str) -> None:
        """Stage the removal of an array, or of a group with all below it; raise `NotFound` if there is neither."""
        async with self._operation() as staged:
            staged.delete(path)

    async def base(self) -> Tree:
        """The tree this transaction is based on; the first use of the transaction fixes it.

        What is looked up in it does not count as read by a serializable transaction.
        """
        with self._life.operation():
            return (await self._based()).base

    async def replace_all(self, structure: bytes) -> None:
        """Makes this commit the whole tree: nothing that was there before stays.

        `structure` is what all hosts of a group must agree on beside their arrays.
        """
        async with self._operation() as staged:
            staged.replace_all()
            self._structure = structure

    async def write_arrays(self, jobs: Iterable[WriteJob]) -> None:
        """Creates arrays from whole-chunk jobs, all in one call; the arrays must be new."""
        async with self._operation() as staged:
            listed = list(jobs)
            staged.check_new(listed)
            async with self._alive():
                await self._packs.write(listed)
            staged.check_new(listed)  # another operation may have created one meanwhile
            for job in listed:
                staged.wrote(job)

    async def keep_array(self, path: str, meta: ArrayMeta, chunks: ChunkTable, version: int) -> None:
        """Stages an array whose chunks are those of another version; no data is written.

        Raises `SnapshotExpired` where that version does not live at this transaction's base.
        """
        async with self._operation() as staged:
            if version not in self._sources:
                await check_alive(self._log, version, staged.base.version)
                self._sources.add(version)
            staged.keep_array(path, meta, chunks)

    async def adopt_array(self, path: str, meta: ArrayMeta, chunks: ChunkTable) -> None:
        """Stages an array whose chunks others wrote into packs of this transaction, durable already."""
        async with self._operation() as staged:
            staged.keep_array(path, meta, chunks)
            self._adopted += int(chunks.length.sum())

    async def read_array(self, path: str, meta: ArrayMeta, selection: Selection, out: npt.NDArray[Any]) -> None:
        """Fills `out` with what this transaction sees: its own writes over its base."""
        async with self._operation() as staged:
            staged.check_handle(path, meta)
            own = staged.arrays.get(path)
            if self._isolation == "serializable" and (own is None or not own.fresh):
                staged.reads.values(path, meta, selection)
            if own is not None:
                await self._patch(staged, own)
                staged.check_handle(path, meta)  # it may have been resized or deleted meanwhile
            jobs = [ReadJob(path, meta, staged.chunks(path), selection, out)]
            await self._uncollected(staged, read_chunks(self._log.backend, jobs))

    async def write_array(
        self, path: str, meta: ArrayMeta, selection: Selection, values: npt.NDArray[Any]
    ) -> None:
        """Stages values of a region; whole chunks are written at once, parts of chunks at the commit."""
        async with self._operation() as staged:
            async with self._alive():
                await staged.change(path, meta).write(self._packs, selection, values)

    async def resize_array(self, path: str, meta: ArrayMeta, shape: Sequence[int]) -> ArrayMeta:
        """Stages another shape and returns the metadata with it."""
        async with self._operation() as staged:
            changed = staged.change(path, meta)
            changed.reshape(shape, staged.below(path))
            return changed.meta

    async def commit(self, timeout: float | None = None) -> int:
        """Commit and return the version that the transaction became; it is as durable as was asked for.

        The commit waits for operations of this transaction that are under way, and includes what they do.
        `timeout` (seconds; a group's default is 300) bounds the wait for the other hosts of a group.
        Raises `Conflict`, `Inconsistent` (hosts disagree), `DeadlineExceeded` (names the absent hosts),
        `CommitOutcomeUnknown`, `StorageFull`; `Misuse` where an operation that was under way failed. After an
        error nothing of it is visible, unless the error says that the outcome is unknown.
        """
        checked_timeout(timeout)  # before anything is done: the transaction stays open
        self._life.begin_commit()
        try:
            async with self._alive():
                return await self._commit(timeout)
        finally:
            if self._heart is not None:
                await self._heart.stop()

    async def _commit(self, timeout: float | None) -> int:
        try:
            await self._life.idle()
            self._life.check_unfailed()
            staged = await self._begin()
            for array in staged.arrays.values():
                await self._patch(staged, array)
            await self._packs.flush()
            manifest = await self._manifest(staged)
        except BaseException as error:
            self._life.state = "aborted"
            await uncancelled(self._discard())
            if isinstance(error, NotFound) and self._staged is not None:
                await self._log.check_uncollected(self.id, self._staged.base.version)
            raise
        try:
            if self._member is None:
                await uncancelled(self._append(staged, manifest))
            else:
                record = self._record(staged, staged.base.version, manifest)
                fragment = fragment_of(record, self._member.host, self._member.hosts, self._structure)
                self.version = await commit_group(self._log, self._member, fragment, self._durability, timeout)
        except (NotFound, DeadlineExceeded):
            await self._log.check_uncollected(self.id, staged.base.version)
            raise
        finally:
            self._life.state = "aborted" if self.version is None else "committed"
        assert self.version is not None
        return self.version

    async def abort(self) -> None:
        """Drop all that was staged, once operations under way have ended; nothing of it will ever be visible.

        Does nothing after the end of the transaction; raises `Misuse` while a commit of it is under way.
        """
        if self.ended or self._life.inherited:  # a forked child has packs in common with it
            return
        self._life.check_open()
        self._life.state = "aborted"
        await uncancelled(self._discard())
        if self._heart is not None:
            await self._heart.stop()

    async def _discard(self) -> None:
        """Delete what was written, once no operation writes any more."""
        await self._life.idle()
        await self._packs.discard()

    def _alive(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Shows that this host of a group is at work, as long as the block takes."""
        return contextlib.nullcontext() if self._heart is None else self._heart.beating()

    async def _append(self, staged: StagedTree, manifest: ObjectRef | Manifest) -> None:
        record = self._record(staged, staged.base.version, manifest)
        mine = staged.changes(self._tags)

        async def validate(newer: Newer) -> Record:
            nonlocal record
            if newer and await self._validate(staged, mine, newer):
                record = self._record(staged, newer[-1][0], await self._manifest(staged))
            return record

        changes = mine if self._isolation == "snapshot" else None
        self.version = await self._log.append(record, validate, self._durability, self.retries.append, changes)

    def _record(self, staged: StagedTree, base: int, manifest: ObjectRef | Manifest) -> Record:
        return Record(
            transaction=self.id,
            base=base,
            time=world.now(),
            message=self._message,
            tags=self._tags.named,
            replaces=staged.replaces,
            deleted=tuple(staged.deleted),
            manifests=(manifest,),
            bytes_added=self._packs.bytes_written + self._adopted,
            metadata=self._metadata,
            durable=self._durability is Durability.FSYNC,
            reused=self._reused,
            dropped=self._tags.dropped,
        )

    async def _patch(self, staged: StagedTree, array: StagedArray) -> None:
        if array.patches:
            work = array.apply_patches(self._log.backend, self._packs, staged.below(array.path))
            await self._uncollected(staged, work)

    async def _uncollected(self, staged: StagedTree, work: Awaitable[None]) -> None:
        """Awaits what reads the base or this transaction's own packs, and tells where a gc has deleted these."""
        try:
            await unexpired(self._log, staged.base.version, work)
        except (Corrupt, NotFound):
            await self._log.check_uncollected(self.id, staged.base.version)
            raise

    async def _validate(self, staged: StagedTree, mine: Changes, newer: Newer) -> bool:
        """Return whether chunks were patched again, over the newest commit; raise `Conflict`."""
        if self._isolation == "serializable":
            await check_reads(self._log, staged, self._tags, newer)
        chunks = await chunks_to_patch(self._log, staged, mine, newer)
        if chunks:
            version = newer[-1][0]  # older ones may have expired; should this one, there is a newer one to look at
            nodes = (await self._log.tree(version)).nodes
            for path, numbers in chunks.items():
                work = staged.arrays[path].apply_patches(self._log.backend, self._packs, nodes[path], numbers)
                await unexpired(self._log, version, work)
            await self._packs.flush()
            self.retries.append(Retry(version, f"it changed chunks written in part here: {', '.join(chunks)}"))
        return bool(chunks)

    async def _manifest(self, staged: StagedTree) -> ObjectRef | Manifest:
        """The manifest of all that is staged: itself if it is small, else where it was written."""
        manifest = staged.manifest()
        self._reused = manifest.reused(self.id)
        if size_of(manifest) <= INLINE_MANIFEST:
            return manifest
        self._manifests_written += 1
        data = encode(manifest)
        key = f"txn/{self.id}/manifest-{self._suffix}-{self._manifests_written}"
        await self._log.backend.create(key, data, self._durability)
        return reference(key, data)

    @contextlib.asynccontextmanager
    async def _operation(self) -> AsyncIterator[StagedTree]:
        """Yield what is staged, for an operation for which a commit has to wait."""
        with self._life.operation():
            yield await self._begin()

    async def _begin(self) -> StagedTree:
        staged = await self._based()
        self._tags.check(staged.base.tags, self._log.backend.url)
        return staged

    async def _based(self) -> StagedTree:
        if self._staged is None:
            tree = await newest_tree(self._log)
            if self._staged is None:  # two first uses at once must see one base
                self._staged = StagedTree(tree, f"{self._log.backend.url} at version {tree.version}")
        return self._staged
