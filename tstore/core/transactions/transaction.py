"""A transaction: changes staged on top of a snapshot, which become one commit or nothing.

1. The first use fixes the base, the head of that moment: all reads of the transaction see it, with its writes on
   top.
2. Whole chunks go into packs under `txn/<id>/` as they are written; parts of chunks are kept as patches.
3. The commit applies the patches, makes the packs durable, writes the manifest, and appends the record
   (`log.log`).
4. The write set is validated against all newer commits. If one wrote a chunk of which this transaction changed
   only a part, the patches are applied to that chunk once more, on top of the newest commit; any other overlap is
   a `Conflict`. What a serializable transaction has read must be unchanged too.
5. In a cooperative transaction each host delivers a fragment instead of the record, and the host that finds all
   fragments commits (`cooperative`).

The id of a transaction of one process is never used again, so what an aborted one leaves under `txn/<id>/` is
harmless.
"""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tstore.core.array import Array
from tstore.core.calls import ArrayCall
from tstore.core.format.arguments import checked_commit_timeout
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.arrays.codecs import Codecs
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.records import Fragment, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.changes import Changes
from tstore.core.log.group_commit import Newer, Retry, Validate
from tstore.core.log.log import Log
from tstore.core.runtime import world
from tstore.core.runtime.pool import give_way, run_to_end
from tstore.core.storage.objects import Durability
from tstore.core.transactions.handles import array_of, new_array
from tstore.core.transactions.membership import Membership
from tstore.core.transactions.staging import Isolation, Staging
from tstore.core.transactions.tag_edits import TagEdits
from tstore.errors import (
    CommitOutcomeUnknown,
    Conflict,
    DeadlineExceeded,
    Inconsistent,
    Misuse,
    NotFound,
    SnapshotExpired,
    SourceCondemned,
    TStoreError,
)

if TYPE_CHECKING:  # rarely used modules are imported on first use
    from tstore.core.transactions.cooperative import CooperativeCommit

__all__ = ["Isolation", "Transaction", "check_undelivered", "withdraw"]

_NO_EDITS = TagEdits()

Deliver = Callable[["CooperativeCommit", Fragment], Awaitable[int | None]]
"""Delivers the fragment of one host of a cooperative transaction; returns the version if it is committed."""


class Transaction:
    """Staged changes on top of a snapshot; `async with` commits on exit and aborts on an exception.

    `version` is the version that the transaction became, None before. `retries` has a `Retry` for each time that
    its commit was tried again. A forked child cannot continue the transaction.

    Operations may run concurrently; the result is as if they ran one after another. `commit` and `abort` wait for
    operations under way; later ones raise `Misuse`, as does the use of an array handle or view from before a
    change of the array's metadata.
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
        self._isolation = isolation
        self._durability = durability
        self._member = member
        self._metadata = dict(metadata or {})
        self.staging = Staging(log, tags, isolation, durability, member)
        """The side for packages that stage whole trees; it may change with any release."""
        self._lifecycle = self.staging.lifecycle
        self.id = self.staging.transaction
        self._sealed: Record | None = None  # what remains to be appended, or delivered as a fragment
        self.version: int | None = None
        self.retries: list[Retry] = []

    def __repr__(self) -> str:
        return f"<tstore.Transaction {self.id} on {self._log.storage.url}: {self._lifecycle.state}>"

    @property
    def ended(self) -> bool:
        """Whether the transaction has ended, even if the outcome of its commit is unknown."""
        return self._lifecycle.ended

    def __del__(self) -> None:
        lifecycle = getattr(self, "_lifecycle", None)  # absent if an argument was wrong
        if lifecycle is not None and lifecycle.state == "open" and self.staging.has_changes:
            warnings.warn(
                f"{self!r} was dropped with changes that are lost: call its commit() or abort(), or use `with`",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    async def __aenter__(self) -> Transaction:
        async with self.staging.operation():
            return self

    async def __aexit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            await self.abort()
        elif not self.ended:
            await self.commit()

    def create_array(
        self,
        path: str,
        shape: Sequence[int] | None = None,
        dtype: Any = None,
        chunks: Sequence[int] | None = None,
        codecs: Codecs = None,
        fill_value: Any = 0,
        attributes: Mapping[str, Any] | None = None,
        dimension_names: Sequence[str | None] | None = None,
        *,
        data: Any = None,
        sparse: bool = False,
    ) -> ArrayCall:
        """Stage a new array and return it; write its values next, or pass them as `data`.

        Slashes around `path` are ignored, as in Zarr: "/a/b" is "a/b". `dtype` is one of NumPy, ml_dtypes or
        PyTorch, or a name. `chunks` is the shape of a chunk, by default one of about 8 MiB. `codecs` is None
        (uncompressed), "lossless" (compressed), an eXmY format ("e4m3"), its configuration ({"format": "e3m2",
        "block": 32}), or a Zarr v3 codec list. `data` has the values, by default also the shape and the dtype.
        Reading a chunk that was never written is an error, or gives the fill value if the array is `sparse`.
        Raise `AlreadyExists` if the path is in use, `InvalidArgument` if the arguments contradict each other.
        """
        rest = (chunks, codecs, fill_value, attributes, dimension_names)

        def meta(shape: Sequence[int], dtype: Any) -> ArrayMeta:
            return ArrayMeta.new(shape, dtype, *rest, sparse=sparse)

        return ArrayCall(new_array(self.staging, path, shape, dtype, data, meta))

    async def copy_array(
        self,
        source: Array,
        path: str,
        chunks: Sequence[int] | None = None,
        codecs: Codecs | Literal["same"] = "same",
    ) -> Array:
        """Stage a new array with the values and the metadata of another one, or of a view, and return it.

        `source` is an array of a snapshot or a transaction, of this store or another, or a plain Zarr array, which
        `tstore.open` returns for a spec. By default the copy has the source's chunks and codecs. Then encoded
        chunks are verified and copied, not decoded; from a snapshot of this store, the copy refers to the chunks
        that exist. With other `chunks` or `codecs` (see `create_array`), and of a view or a plain array, each new
        chunk is written once, from values of which at most 48 MiB are read at a time, or one chunk if that is
        larger. A sparse array keeps its holes.

        Raise `AlreadyExists` if the path is in use, `NotFound` if a chunk of a dense source was never written
        (unless the copy refers to chunks, of which it then lacks the same), `Corrupt` if one is damaged,
        `InvalidArgument` for chunks or codecs that do not fit.
        """
        from tstore.core.transactions.copies import copy_array

        same = codecs == "same"
        return await copy_array(self.staging, source, path, chunks, None if same else codecs, same_codecs=same)

    async def create_group(self, path: str, attributes: Mapping[str, Any] | None = None) -> None:
        """Stage a group with these attributes, which replace all that it had; the root's path is "".

        Groups need not be created: an array may have any path. Raise `AlreadyExists` if an array is in the way.
        """
        await self.staging.create_group(path, {} if attributes is None else attributes)

    def array(self, path: str) -> ArrayCall:
        """Return the array at a path as this transaction sees it, to read and write; raise `NotFound`.

        Values can be written at once: `tx.array("w")[0:10].write(values)`.
        """
        return ArrayCall(array_of(self.staging, path))

    def __getitem__(self, path: str) -> ArrayCall:
        """Return the array at a path, as `array` does."""
        return self.array(path)

    __iter__ = None

    async def paths(self) -> list[str]:
        """Return the sorted paths of all arrays, as this transaction sees them."""
        return await self.staging.paths()

    async def delete(self, path: str) -> None:
        """Stage the removal of an array, or of a group with all below it; raise `NotFound` if there is neither."""
        await self.staging.delete(path)

    async def commit(self, timeout: float | None = None) -> int:
        """Commit and return the version that the transaction became, as durable as requested.

        The commit waits for operations of this transaction that are under way, and includes their changes.
        `timeout` (seconds; 300 by default) bounds the wait for the other hosts of a cooperative transaction.
        Raise `Conflict`, `Inconsistent` (hosts disagree), `DeadlineExceeded` (names the absent hosts),
        `CommitOutcomeUnknown`, `StorageFull`; `Misuse` if an operation that was under way failed. After an
        error nothing is committed, and never will be, with two exceptions: after `DeadlineExceeded`, absent hosts
        may still deliver their fragments. After `CommitOutcomeUnknown`, call `commit` again once the storage
        responds: it returns the version if the transaction is committed, and otherwise commits it.
        """
        seconds = checked_commit_timeout(timeout)  # before anything changes, so that the transaction stays open
        version = await self._end(lambda commit, fragment: commit.commit(fragment, seconds))
        assert version is not None
        return version

    async def deliver(self) -> int | None:
        """Deliver this host's fragment, as durable as requested, without waiting for the other hosts.

        Return the version if this host was the last, so that it has committed, else None: the transaction is
        committed when all hosts have delivered. Raise what `commit` raises, also if it is known by now that the
        transaction can't be committed any more, and `Misuse` for a transaction of one host.
        """
        if self._member is None:
            raise Misuse(f"{self._log.storage.url}: this transaction has one host; call commit(), not deliver()")
        return await self._end(lambda commit, fragment: commit.deliver(fragment))

    async def abort(self) -> None:
        """Drop all staged changes, once operations under way have ended.

        Do nothing after the end of the transaction, or in a forked child; raise `Misuse` during its commit.
        """
        if self.ended or self._lifecycle.inherited:  # a forked child shares the packs of its parent
            return
        self._lifecycle.check_open()
        self._lifecycle.state = "aborted"
        await run_to_end(self.staging.discard())
        await self.staging.delete_heartbeat()

    async def _end(self, deliver: Deliver) -> int | None:
        self._lifecycle.start_commit()
        if self._member is None:
            return await self._commit(deliver)
        try:
            async with self.staging.heartbeat():
                return await self._commit(deliver)
        finally:
            await self.staging.delete_heartbeat()

    async def _commit(self, deliver: Deliver) -> int | None:
        in_doubt = repeated = self._sealed is not None  # after `CommitOutcomeUnknown`
        record = self._sealed = self._sealed or await self._seal()
        try:
            await self._commit_sealed(record, deliver, repeated)
        except (Conflict, Inconsistent, SnapshotExpired, DeadlineExceeded):
            in_doubt = False  # these errors follow from the stored data
            raise
        except CommitOutcomeUnknown:
            in_doubt = True
            raise
        except Exception as error:
            if repeated:
                raise self._still_unknown(error) from error
            raise
        finally:
            if self.version is not None:
                self._lifecycle.state = "committed"
            elif self._lifecycle.state == "committing":
                self._lifecycle.state = "undecided" if in_doubt else "aborted"
        return self.version

    async def _commit_sealed(self, record: Record, deliver: Deliver, repeated: bool) -> None:
        try:
            if self._member is None:
                await self._append(record, repeated)
                return
            from tstore.core.transactions.fragments import fragment_from_record

            member = self._member
            checks = self.staging.structure_check, self.staging.replicated
            fragment = fragment_from_record(record, member.host, member.hosts, *checks)
            commit = _cooperative(self)
            assert commit is not None
            self.version = await deliver(commit, fragment)
            self._lifecycle.state = "delivered"
        except NotFound:
            await self.staging.check_not_condemned()
            raise

    def _still_unknown(self, cause: Exception) -> CommitOutcomeUnknown:
        return CommitOutcomeUnknown(
            f"{self._log.storage.url}: whether an earlier call of commit() has committed transaction {self.id} is "
            f"still unknown ({cause}); call commit() again, or store.outcome({self.id!r})",
            self.id,
        )

    async def _seal(self) -> Record:
        """Write what the record refers to, and return the record; after an error the transaction is aborted."""
        try:
            await self._lifecycle.wait_idle()
            self._lifecycle.check_unfailed()
            manifest = await self.staging.seal()
            return self._record(self.staging.tree.base.version, manifest)
        except BaseException as error:
            self._lifecycle.state = "aborted"
            await run_to_end(self.staging.discard())
            if isinstance(error, NotFound):
                await self.staging.check_not_condemned()
            if isinstance(error, TStoreError):
                await check_undelivered(self, error)
            raise

    async def _append(self, record: Record, repeated: bool) -> None:
        await give_way()
        changes = self.staging.changes()
        await give_way()

        async def validate(newer: Newer) -> Record:
            nonlocal record
            if not newer:
                return record
            from tstore.core.transactions.conflicts import revise_compactions

            retry = await self.staging.validate(changes, newer)
            revised = await revise_compactions(self._log.reader, self.staging.tree, newer)
            if retry is not None:
                self.retries.append(retry)
            if retry is not None or revised:
                base = record.base if retry is None else retry.version
                record = self._sealed = self._record(base, await self.staging.manifest())
            return record

        # A serializable transaction takes part in no group commit, so it passes no changes. Nor does a repeated
        # one: only alone it finds a record that it shared with others.
        shared = changes if self._isolation == "snapshot" and not repeated else None
        try:
            await self._enqueue(record, validate, shared)
        except SourceCondemned:
            if not self.staging.tree.drop_compactions():
                raise
            # perhaps nothing but a compaction refers to what was condemned
            record = self._sealed = self._record(record.base, await self.staging.manifest())
            await self._enqueue(record, validate, shared)

    async def _enqueue(self, record: Record, validate: Validate, changes: Changes | None) -> None:
        commit = self._log.enqueue(record, validate, self._durability, self.retries.append, changes)
        try:
            await commit.outcome()
        finally:
            self.version = commit.version  # known also if this task was cancelled
            if isinstance(commit.error, CommitOutcomeUnknown):
                self._lifecycle.state = "undecided"

    def _record(self, base: int, manifest: ObjectRef | Manifest) -> Record:
        staged, tags = self.staging.tree, self.staging.tags
        return Record(
            transaction=self.id,
            base=base,
            time=world.now(),
            message=self._message,
            tags=tags.assigned if tags.target is None else (),
            replaces=staged.replaces and not staged.source,
            deleted=staged.deleted_paths,
            manifests=(manifest,),
            bytes_added=self.staging.bytes_added,
            metadata=self._metadata,
            durable=self._durability is Durability.FSYNC,
            reused=self.staging.reused,
            dropped=tags.dropped,
            tagged={} if tags.target is None else dict.fromkeys(tags.assigned, tags.target),
            source=staged.source,
        )


async def withdraw(transaction: Transaction) -> int | None:
    """Ensure that a cooperative transaction that this host has given up is never committed by others.

    Return the version if it is already committed; raise `CommitOutcomeUnknown` if another host is about to commit
    it. Do nothing, and return None, for a transaction of one host.
    """
    commit = _cooperative(transaction)
    return None if commit is None else await commit.withdraw(transaction.staging.base_version)


async def check_undelivered(transaction: Transaction, failure: TStoreError) -> None:
    """Raise `CommitOutcomeUnknown` if an earlier run of this host may have delivered; this run met `failure`."""
    if (commit := _cooperative(transaction)) is not None:
        await commit.check_undelivered(failure)


def _cooperative(transaction: Transaction) -> CooperativeCommit | None:
    member = transaction._member
    if member is None:
        return None
    from tstore.core.transactions.cooperative import CooperativeCommit

    return CooperativeCommit(transaction._log, member, transaction._durability)
