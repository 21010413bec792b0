"""Group commit: commits of one process that are ready at the same time share one record.

1. A separate task appends the commits, in the order of their arrival. It begins when the other tasks that are
   ready to run have done so, and their commits have arrived too. Those that arrive while it appends wait.
2. It takes all waiting commits that may share a record with the first, and appends one record for all of them.
3. Commits that share a record are small (all of their data is inline, and together they are within the bounds of
   one record), equally durable, and disjoint: none conflicts with another, so every order gives the same
   result. A commit that replaces the tree, is a copy, drops tags, tags earlier versions or has metrics is appended
   alone: retention reads the metrics of a version, not those of its parts.
4. Each commit is validated alone against all newer commits, and drops out if it conflicts or fails. It also drops
   out if it cannot be validated because a garbage collection was committed meanwhile, or if it grew because
   partial chunks had to be written again; it is then appended alone in the next turn. So no commit fails because
   of another that shared its record.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from tstore.core.format.bounds import RECORD_BYTES, RECORD_VALUES
from tstore.core.format.objects.encoding import max_value_count
from tstore.core.format.objects.records import Part, Record
from tstore.core.format.objects.references import Manifest
from tstore.core.format.tree.changes import Changes
from tstore.core.format.tree.validation import MAX_PARTS
from tstore.core.runtime import world
from tstore.errors import CommitOutcomeUnknown, InvalidArgument, NotFound

__all__ = ["CommitQueue", "Newer", "QueuedCommit", "Retry", "Validate", "next_pause"]

_logger = logging.getLogger("tstore.log")

_SHORTEST_PAUSE = 0.002  # seconds
_LONGEST_PAUSE = 0.1
_QUICK_ATTEMPTS = 20  # the longest pause is at most as long as this many attempts like the last one
_ATTEMPTS = 12  # the longest pause also lasts at most as long as this many attempts by other writers
_MAX_BYTES = RECORD_BYTES // 2  # leaves room for partial chunks that are written again
_PLAIN_BYTES = 1024  # an upper bound of a plain record without its manifests
_MAX_VALUES = RECORD_VALUES - 1  # one value is the empty metadata of the shared record

Newer = Sequence[tuple[int, Record]]
"""Newer commits with their versions, in order."""

Validate = Callable[[Newer], Awaitable[Record]]


class Retry(NamedTuple):
    """The reason for retrying a commit: the `version` to which it refers, and the `reason` in words."""

    version: int
    reason: str


AppendRecord = Callable[[Record, Validate, Callable[[Retry], object]], Awaitable[int]]


class _AllDroppedOut(Exception):
    """All commits that were to share a record have dropped out."""


class QueuedCommit:
    """A record to be appended, with its bytes `data`; `changes` is None if it must be appended alone.

    `data` is empty if the record is plain (`Record.is_plain`) and not yet encoded.
    """

    def __init__(
        self,
        queue: CommitQueue,
        record: Record,
        validate: Validate,
        on_retry: Callable[[Retry], object],
        changes: Changes | None,
        data: bytes,
        append_record: AppendRecord,
    ) -> None:
        """Queue the commit; its turn comes once the tasks that are ready to run have queued theirs."""
        self.record = record
        self.validate = validate
        self.on_retry = on_retry
        self.append_record = append_record
        alone = changes is None or changes.replaces or changes.dropped or record.source
        self.changes = None if alone or record.tagged or "metrics" in record.metadata else changes
        self._data = data
        self.version: int | None = None
        self.error: BaseException | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue = queue
        queue.add(self)

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.version is not None or self.error is not None

    async def outcome(self) -> int:
        """Return the version of the commit, or raise the error that prevented it.

        If the caller is cancelled while the commit waits for its turn, the commit is dropped. Otherwise the
        cancellation is raised once the outcome is known, and `version` is set if the record was appended.
        """
        cancelled: asyncio.CancelledError | None = None
        while not self.done:
            if self._ended.done():  # it was cancelled with the caller
                self._ended = asyncio.get_running_loop().create_future()
            try:
                await self._ended
            except asyncio.CancelledError as error:
                if self._queue.drop(self):
                    raise
                cancelled = error
        try:
            if cancelled is not None:
                raise cancelled
            if self.error is not None:
                raise self.error
        finally:
            cancelled = None  # breaks the reference cycle of the exception and this frame
        assert self.version is not None
        return self.version

    @functools.cached_property
    def size(self) -> int:
        """About how many bytes the record takes."""
        manifests = [manifest for manifest in self.record.manifests if isinstance(manifest, Manifest)]
        return len(self._data) or _PLAIN_BYTES + sum(manifest.size for manifest in manifests)

    @functools.cached_property
    def value_count(self) -> int:
        """An upper bound of the values in the record, if the commit may share a record."""
        return max_value_count(self._data) if self.may_share() and self._data else 1

    @functools.cached_property
    def _few_chunks(self) -> frozenset[tuple[str, int]] | None:
        return None if self.changes is None else self.changes.few_chunks()

    def wake(self) -> None:
        """Let the task that waits for the outcome continue."""
        if not self._ended.done():
            self._ended.set_result(None)

    def may_share(self) -> bool:
        """Return whether the commit may share a record; once some of its data is not inline, it never may."""
        inline = all(isinstance(m, Manifest) and not any(m.packs) for m in self.record.manifests)
        self.changes = self.changes if inline else None
        return self.changes is not None

    def may_share_with(self, other: QueuedCommit) -> bool:
        """Return whether the commit may share a record with another one."""
        if self.changes is None or other.changes is None or self.record.durable != other.record.durable:
            return False
        if self._few_chunks is not None and other._few_chunks is not None:
            return self._few_chunks.isdisjoint(other._few_chunks)
        return not any(self.changes.overlap(other.changes))


class CommitQueue:
    """The commits of one event loop that wait to be appended, and the task that appends them."""

    def __init__(self) -> None:
        self.waiting: list[QueuedCommit] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, commit: QueuedCommit) -> None:
        """Add a commit at the end."""
        self.waiting.append(commit)
        self._start()

    def drop(self, commit: QueuedCommit) -> bool:
        """Remove a commit; return False if it is being appended, or has been."""
        if commit not in self.waiting:
            return False
        self.waiting.remove(commit)
        return True

    def _start(self) -> None:
        if self._task is None and self.waiting:
            # no commit's own task appends, so that the cancellation of one does not affect the others
            self._task = asyncio.get_running_loop().create_task(self._append_all())

    async def _append_all(self) -> None:
        try:
            while self.waiting:
                commits = self._take_along()
                try:
                    await _append_together(commits)
                finally:
                    self.waiting[:0] = [commit for commit in commits if not commit.done]
                    for commit in commits:
                        if commit.done:
                            commit.wake()
        finally:
            self._task = None
            self._start()

    def _take_along(self) -> list[QueuedCommit]:
        """Remove the first commit, and those that can share a record with it, from the queue; return them."""
        commit = self.waiting[0]
        if len(self.waiting) == 1:  # the usual case, which needs no check for sharing
            self.waiting = []
            return [commit]
        commits, rest, size, values = [commit], list[QueuedCommit](), commit.size, commit.value_count
        for other in self.waiting[1:]:
            fits = size + other.size <= _MAX_BYTES and values + other.value_count <= _MAX_VALUES
            if len(commits) < MAX_PARTS and fits and all(map(other.may_share_with, commits)):
                commits.append(other)
                size += other.size
                values += other.value_count
            else:
                rest.append(other)
        self.waiting = rest
        return commits


async def _append_together(commits: list[QueuedCommit]) -> None:
    """Append one record for all commits; commits without an outcome afterwards must be appended alone."""
    sharing = commits
    transaction = f"{commits[0].record.transaction}.together"

    async def validate(newer: Newer) -> Record:
        nonlocal sharing
        for commit in sharing:
            try:
                commit.record = await commit.validate([(v, other) for v, other in newer if v > commit.record.base])
            except NotFound:
                if len(commits) == 1:
                    raise  # a garbage collection deleted an object that is needed; `Append` reads newer records
                commit.changes = None  # so that the commit drops out, and is appended alone later
            except Exception as error:
                commit.error = error
        sharing = [c for c in sharing if not c.done and (len(commits) == 1 or c.may_share())]
        if not sharing:
            raise _AllDroppedOut
        return _combine(transaction, commits, sharing)

    def on_retry(retry: Retry) -> None:
        for commit in sharing:
            name = commit.record.transaction
            _logger.info("retrying transaction %s after version %d: %s", name, retry.version, retry.reason)
            commit.on_retry(retry)

    try:
        version = await commits[0].append_record(_combine(transaction, commits, sharing), validate, on_retry)
        for commit in sharing:
            commit.version = version
    except _AllDroppedOut:
        pass  # each commit has an error, or is appended alone later
    except InvalidArgument as error:
        if len(sharing) == 1:
            sharing[0].error = error
        for commit in sharing:
            commit.changes = None  # so that each is appended alone later, and only the invalid one raises an error
    except BaseException as error:  # each commit raises it
        unknown = isinstance(error, CommitOutcomeUnknown)
        for commit in [c for c in sharing if not c.done]:
            commit.error = CommitOutcomeUnknown(str(error), commit.record.transaction) if unknown else error
        if not isinstance(error, (Exception, asyncio.CancelledError)):
            raise


def _combine(transaction: str, commits: Sequence[QueuedCommit], sharing: Sequence[QueuedCommit]) -> Record:
    """Return one record for the commits that share it, or the record of a commit that is appended alone."""
    if len(commits) == 1:
        return commits[0].record
    records = [commit.record for commit in sharing]
    return Record(
        transaction=transaction,
        base=min(r.base for r in records),
        time=max(r.time for r in records),
        tags=tuple(tag for r in records for tag in r.tags),
        deleted=tuple(path for r in records for path in r.deleted),
        manifests=tuple(m for r in records for m in r.manifests),
        bytes_added=sum(r.bytes_added for r in records),
        durable=records[0].durable,
        parts=tuple(Part(r.transaction, r.time, r.message, r.tags, r.bytes_added, r.metadata) for r in records),
    )


def next_pause(pause: float, attempts: int, duration: float) -> float:
    """Return the next back-off, given the previous one (0: none) and the duration of an attempt.

    Its bound falls with the number of attempts, so that no writer starves. Pauses are in proportion to quick
    attempts, since others would make hundreds of commits while one writer sleeps for 100 ms.
    """
    shortest = min(_SHORTEST_PAUSE, duration)
    longest = (min(_LONGEST_PAUSE, _QUICK_ATTEMPTS * duration) + _ATTEMPTS * duration) / math.sqrt(attempts)
    return min(max(shortest, longest), world.uniform(shortest, 3 * max(shortest, pause)))
