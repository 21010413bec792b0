"""One checkpoint on its way into a store: its transaction, the chunks that it reuses, and its commit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from tstore.checkpoint.options import CommitSettings
from tstore.core.data.writer import WriteJob
from tstore.core.format.objects.records import Fragment
from tstore.core.format.tree.tree import group_document
from tstore.core.runtime.event_loops import BACKGROUND
from tstore.core.runtime.pool import give_way, has_low_priority, low_priority, run_to_end, wait_all
from tstore.core.snapshot import Snapshot, snapshot_of
from tstore.core.steps import step_tag, step_tags, steps_of
from tstore.core.storage.objects import checked_durability
from tstore.core.store import Store
from tstore.core.transactions.attempts import Attempt
from tstore.core.transactions.membership import Membership
from tstore.core.transactions.staging import Staging
from tstore.core.transactions.transaction import Transaction, check_undelivered, withdraw
from tstore.errors import (
    AlreadyExists,
    CommitOutcomeUnknown,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    Inconsistent,
    NotFound,
    SnapshotExpired,
    SourceCondemned,
    TStoreError,
    Unavailable,
)

__all__ = ["Checkpoint", "Saved"]

_log = logging.getLogger("tstore.checkpoint")

FindPrior = Callable[[Store, Mapping[str, int], int], Awaitable[Snapshot | None]]
"""Returns the snapshot whose unchanged chunks a save references; takes the store, its tags and its version."""


def _permit_all_tags(_: Mapping[str, int]) -> None:
    """Allow a save regardless of the tags of the store."""


_FINAL_ERRORS = AlreadyExists, CommitOutcomeUnknown, Conflict, DeadlineExceeded, Inconsistent
"""Errors to raise unchanged: they report all that is known of the outcome, even after this host has delivered."""


class Saved(NamedTuple):
    """The outcome of a save: its version, and the bytes of chunks that this host wrote, and left as they were."""

    version: int
    bytes_new: int
    bytes_shared: int


class Checkpoint(NamedTuple):
    """One call of `save`: what this host writes, and the settings and metadata of the commit.

    `reserved` are tstore's own attributes of the root group. `digest` is a checksum of these and the caller's
    attributes, on which all hosts must agree: only host 0 needs the attributes themselves. `replicated` has
    checksums of the values that must be equal on all hosts, by path. `check_tags` raises if the step must not be
    saved in a store with these tags; it is called before anything is written. If the checkpoint `withdraws`, a
    host whose save fails withdraws the transaction, so that the others need not wait for it. Otherwise hosts that
    are late, or `tstore finish`, may commit what a host has delivered. The chunks of `copied`, a snapshot of
    another store, are saved in place of those of the jobs.
    """

    step: int
    jobs: Sequence[WriteJob]
    settings: CommitSettings
    metadata: dict[str, Any]
    reserved: dict[str, Any]
    digest: bytes
    host: int
    hosts: int
    attempt: Attempt | None
    check_tags: Callable[[Mapping[str, int]], None] = _permit_all_tags
    withdraws: bool = False
    replicated: Mapping[str, bytes] = MappingProxyType({})
    copied: Snapshot | None = None

    @staticmethod
    def for_withdrawal(step: int, host: int, hosts: int, attempt: Attempt | None, overwrite: bool) -> Checkpoint:
        """Return an empty checkpoint, to withdraw one that could not be built on this host."""
        settings = CommitSettings(overwrite=overwrite)
        return Checkpoint(step, (), settings, {}, {}, b"", host, hosts, attempt, withdraws=True)

    async def save(self, store: Store, on_written: Callable[[], None] | None = None) -> Saved:
        """Commit the checkpoint and return its outcome.

        `on_written` is called when all values are written. The caller's arrays may change from then on, so the
        save fails if it would have to read them a second time.
        """
        if self.settings.priority == "low" and not has_low_priority():
            with low_priority():
                return await self.save(store, on_written)
        try:
            return await self._commit(store, self.attempt, _newest_step, on_written)
        except SourceCondemned:  # all hosts get this error, and save again under the same new attempt
            if on_written is not None:
                raise
            return await self._commit(store, self._rewriting_attempt(), _no_prior)

    @contextlib.asynccontextmanager
    async def withdrawn_on_error(self, opened: Callable[[], Awaitable[Store]]) -> AsyncIterator[None]:
        """Withdraw the checkpoint, if it `withdraws`, when the block, which prepares `save`, fails.

        `opened` returns the store on the background loop.
        """

        async def withdraw_it() -> None:
            tx, _ = await self._transaction(await opened(), self.attempt)
            await withdraw(tx)

        try:
            yield
        except BaseException as error:
            if self.withdraws and self.hosts > 1 and self.attempt is not None:
                try:
                    await wait_all([BACKGROUND.start(withdraw_it()).future], lambda: None)
                except TStoreError as failure:
                    error.add_note(
                        f"the other hosts wait until their timeout, because withdrawing the save failed: {failure}"
                    )
            raise

    async def stage(self, store: Store) -> Transaction:
        """Write the values into a transaction and return it; `commit_step` or `Transaction.deliver` ends it."""
        if self.settings.priority == "low" and not has_low_priority():
            with low_priority():
                return await self.stage(store)
        tx, replaced = await self._transaction(store, self.attempt)
        try:
            base = await tx.staging.base()
            version = self._other_save(base.tags, replaced)
            if version is not None:
                raise self._already_saved(store, version)
            await self._write(tx.staging, await _newest_step(store, base.tags, base.version))
            return tx
        except BaseException:
            await tx.abort()
            raise

    async def _commit(
        self,
        store: Store,
        attempt: Attempt | None,
        find_prior: FindPrior,
        on_written: Callable[[], None] | None = None,
    ) -> Saved:
        """Commit the checkpoint, with references to the unchanged chunks of a prior step."""
        tx, replaced = await self._transaction(store, attempt)
        try:
            base = await tx.staging.base()  # first, so that a concurrent save of this step conflicts
            version = self._other_save(base.tags, replaced)
            if version is not None and (await store.log.reader.record(version)).transaction in self._ids(tx):
                await tx.abort()
                try:
                    await self._confirm_repeated(store, version)
                except (Corrupt, NotFound) as error:
                    raise AlreadyExists(
                        f"{store.url}: this attempt saved step {self.step} as version {version}, which has been "
                        f"damaged since ({error}); pass overwrite=True to save it again"
                    ) from error
                return Saved(version, 0, 0)
            self.check_tags(base.tags)
            if version is not None:
                raise self._already_saved(store, version)
            reused = await self._write(tx.staging, await find_prior(store, base.tags, base.version))
            if on_written is not None:
                on_written()
            return Saved(await self.commit_step(store, tx), tx.staging.bytes_added, reused)
        except SourceCondemned:  # the other hosts get this error as well
            await tx.abort()
            raise
        except BaseException as error:
            await tx.abort()
            version = await self._version_after(error, tx)
            if version is None:
                raise
            return Saved(version, tx.staging.bytes_added, tx.staging.bytes_reused)

    async def _version_after(self, error: BaseException, tx: Transaction) -> int | None:
        """Withdraw the transaction of a failed save if the checkpoint `withdraws`; return its version, if any.

        Return None if the error holds and may be raised; otherwise raise another one.
        """
        if self.withdraws and self.hosts > 1:
            try:
                version = await run_to_end(withdraw(tx))
            except TStoreError as failure:
                error.add_note(f"late hosts may still commit the step, because withdrawing it failed: {failure}")
                if isinstance(error, DeadlineExceeded) and isinstance(failure, CommitOutcomeUnknown):
                    raise failure from error
            else:
                if version is not None and isinstance(error, DeadlineExceeded | CommitOutcomeUnknown):
                    return version
                if version is None and isinstance(error, CommitOutcomeUnknown):
                    raise Unavailable(
                        f"step {self.step} is not saved: host {self.host} of {self.hosts} withdrew it after an "
                        f"error ({error.__cause__ or error}), so no host will commit it; save again on every host"
                    ) from error
                if version is None:
                    return None
        if isinstance(error, TStoreError) and not isinstance(error, _FINAL_ERRORS):
            await run_to_end(check_undelivered(tx, error))
        return None

    async def _transaction(self, store: Store, attempt: Attempt | None) -> tuple[Transaction, int | None]:
        """Return a new transaction for this checkpoint, and the version of the step that it overwrites, if any."""
        tag = step_tag(self.step)
        tags = await store.tags() if self.settings.overwrite else {}
        replaced = tags.get(tag)
        if replaced is not None and attempt is not None:
            attempt = attempt._replace(replaced=replaced)
        tx = store.transaction(
            self.settings.message,
            None if self.settings.overwrite else tag,
            durability=self.settings.durability,
            move_tag=(*([tag] if self.settings.overwrite else []), *self.settings.tags) or None,
            # tags of copies; a cooperative transaction can't drop tags
            drop_tag=(step_tags(tags, self.step)[1:] or None) if tags and self.hosts == 1 else None,
            name=tag if self.hosts > 1 else None,
            host=self.host if self.hosts > 1 else 0,
            hosts=self.hosts,
            attempt=None if attempt is None else str(attempt),
            metadata=self.metadata,
        )
        return tx, replaced

    async def _write(self, staging: Staging, prior: Snapshot | None) -> int:
        """Write all values; return the number of bytes of the chunks of `prior` that did not change."""
        await staging.replace_all(self.digest, replicated=self.replicated)
        if self.host == 0:
            await staging.set_root_attributes(self.settings.attributes, self.reserved)
        await give_way()
        try:
            await self._write_arrays(staging, prior)
        except (Corrupt, NotFound) as error:
            if prior is None:
                raise
            _warn_lost(error)
            await self._write_arrays(staging, None)
            return 0
        return staging.bytes_reused

    async def _write_arrays(self, staging: Staging, prior: Snapshot | None) -> None:
        """Write the arrays; raise `Corrupt` or `NotFound`, having staged none, if some of `prior` is lost."""
        if self.copied is not None:
            from tstore.core.transactions.copies import copy_stored_chunks

            await copy_stored_chunks(staging, self.copied, prior)
            return
        if prior is not None:
            await prior.read_nodes([job.path for job in self.jobs if job.has_values])
        _set_prior(self.jobs, prior)
        await give_way()
        await staging.write_arrays(self.jobs)

    async def commit_step(self, store: Store, tx: Transaction) -> int:
        """Commit and return the version.

        Raise `AlreadyExists` if another commit of the same step came first, or if this attempt saved the step and
        the step was removed since.
        """
        try:
            return await tx.commit(self.settings.timeout)
        except Inconsistent as error:
            await self._check_not_removed(store, tx, error)
            raise
        except DeadlineExceeded as error:
            if steps_of(tx.staging.tree.base.tags)[-1:] > [self.step]:  # otherwise skip the costly search
                await self._check_not_removed(store, tx, error)
            raise
        except Conflict as conflict:
            if not conflict.paths:
                await self._check_not_removed(store, tx, conflict)
            if f"tag {(tag := step_tag(self.step))}" not in conflict.paths:
                raise
            version = (await store.tags()).get(tag)
            if version is None:
                raise Conflict(
                    f"{store.url}: steps were removed, as rollback does, after the save of step {self.step} had "
                    "begun, so it is not saved; go on from the newest step",
                    conflict.paths,
                ) from conflict
            raise self._already_saved(store, version) from conflict

    async def _check_not_removed(self, store: Store, tx: Transaction, error: Exception) -> None:
        """Raise `AlreadyExists` if an error is due to a step that the attempt saved, and that is gone since."""
        version = await store.log.reader.find(tx.id) if self.hosts > 1 else None
        if version is not None and (await store.tags()).get(step_tag(self.step)) != version:
            raise AlreadyExists(
                f"{store.url}: this attempt already saved step {self.step}, as version {version}, and the step "
                "was removed since; pass another attempt=… on every host to save it again"
            ) from error

    def _ids(self, tx: Transaction) -> set[str]:
        """Return the ids under which this attempt may have saved the step: see `save`."""
        attempt = self._rewriting_attempt()
        if self.hosts == 1 or attempt is None:
            return {tx.id}
        retry = Membership.from_arguments(step_tag(self.step), self.host, self.hosts, str(attempt))
        return {tx.id, retry.transaction}

    def _rewriting_attempt(self) -> Attempt | None:
        return None if self.attempt is None else self.attempt._replace(rewrites=True)

    def _other_save(self, tags: Mapping[str, int], replaced: int | None) -> int | None:
        """Return the version of a save of this step other than the replaced one, or None if there is none."""
        version = tags.get(step_tag(self.step))
        return None if version == replaced else version

    async def _confirm_repeated(self, store: Store, version: int) -> None:
        """Make the version of the step durable, which this attempt has already saved.

        Raise `Inconsistent` if this host passes data that differ from the saved ones, as another start of the job
        would.
        """
        saved = await store.snapshot(version)
        await saved.read_nodes()
        documents = {path: node.document for path, node in saved.tree.nodes.items() if node.is_array}
        passed = {job.path: job.meta.document for job in self.jobs}
        differing = sorted(path for path in passed if documents.get(path) != passed[path])
        if saved.tree.nodes[""].document != group_document(self.settings.attributes, self.reserved):
            differing.append("the attributes, or the structure of the tree")
        record = await store.log.reader.record(version)
        if _packed(record.metadata) != _packed(self.metadata):
            differing.append("the metrics")
        delivered = await self._delivered(store, record.transaction)
        differing += [p for p, checksum in self.replicated.items() if delivered.get(p, checksum) != checksum]
        if not differing:
            comparison = store.transaction()
            try:
                await comparison.staging.replace_all(self.digest)
                await self._write_arrays(comparison.staging, saved)  # refers to the chunks that are equal
                if comparison.staging.bytes_added:
                    differing.append("values of this host")
            finally:
                await comparison.abort()
        if differing:
            raise Inconsistent(
                f"{store.url}: this attempt already saved step {self.step}, as version {version}, with other data "
                f"than host {self.host} passes; another start of the job needs another attempt=…",
                differing,
            )
        await store.log.make_durable(version, checked_durability(self.settings.durability))

    async def _delivered(self, store: Store, transaction: str) -> Mapping[str, bytes]:
        """Return the checksums that this host delivered for values that other hosts may have written."""
        member = Membership.from_id(transaction)
        if member is None:
            return {}
        with contextlib.suppress(Corrupt, NotFound):  # nothing that is saved needs the fragment
            return (await store.log.reader.objects.read(member.fragment_key(0, self.host), Fragment)).replicated
        return {}

    def _already_saved(self, store: Store, version: int) -> AlreadyExists | Conflict:
        if self.settings.overwrite:
            return Conflict(
                f"{store.url}: another writer saved step {self.step} meanwhile, as version {version}, which is "
                "unchanged; save again to overwrite that one",
                [f"tag {step_tag(self.step)}"],
            )
        return AlreadyExists(
            f"{store.url}: step {self.step} is already saved, as version {version}, which is unchanged; save as "
            "another step, or pass overwrite=True"
        )


async def _newest_step(store: Store, tags: Mapping[str, int], newest: int) -> Snapshot | None:
    steps = steps_of(tags)
    try:
        return await snapshot_of(store.log.reader, tags[step_tag(steps[-1])], newest) if steps else None
    except SnapshotExpired:  # expired by a gc after a newer step was saved
        return None
    except (Corrupt, NotFound) as error:
        _warn_lost(error)
        return None


def _warn_lost(error: Exception) -> None:
    _log.warning("The save writes all chunks, as it cannot refer to those of the newest step: %s", error)


async def _no_prior(store: Store, tags: Mapping[str, int], newest: int) -> None:
    """Return None, so that every chunk is written."""


def _packed(metadata: Mapping[str, Any]) -> bytes:
    return msgspec.msgpack.encode(metadata, order="sorted")  # NaN equals NaN


def _set_prior(jobs: Iterable[WriteJob], prior: Snapshot | None) -> None:
    """Give each job with values the array of a prior step to compare them with; discard rows written before."""
    for job in jobs:
        node = prior.tree.nodes.get(job.path) if prior is not None and job.has_values else None
        same = node is not None and node.document == job.meta.document
        job.prior_chunks = node if same else None
        job.rows, job.tables, job.segments = job.rows and [], (), ()
