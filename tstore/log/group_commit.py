"""Group commit: commits of one process that wait while another is in flight share one record.

1. The first commit to arrive is appended at once. Those that arrive meanwhile wait, in order.
2. The next commit takes along all waiting ones that may share its record, and one record is appended for them all.
3. Commits that share a record are small (all of their data is inline, and together they are within the bounds of
   one record), equally durable, and disjoint: none conflicts with another, so every order gives the same
   result. A commit that replaces the tree, drops tags, tags earlier versions or has metrics is appended alone:
   retention reads the metrics of a version, not those of its parts.
4. Each commit is validated alone against all newer commits, and drops out if it conflicts or fails. It also drops
   out if it cannot be validated because a garbage collection was committed meanwhile, or if it grew because
   partial chunks had to be written again; it is then appended alone in the next turn. So no commit fails because
   of another that shared its record.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from tstore.errors import CommitOutcomeUnknown, NotFound, TStoreError
from tstore.format.bounds import RECORD_BYTES, RECORD_VALUES
from tstore.format.encoding import max_value_count
from tstore.format.records import Part, Record
from tstore.format.references import Manifest
from tstore.format.tree import Changes
from tstore.format.validation import MAX_PARTS
from tstore.runtime import world

__all__ = ["SHORTEST_PAUSE", "CommitQueue", "Newer", "QueuedCommit", "Retry", "Validate", "next_pause"]

_logger = logging.getLogger("tstore.log")

SHORTEST_PAUSE = 0.002
_LONGEST_PAUSE = 0.1
_ATTEMPTS = 12  # attempts of other writers that fit into the longest pause, each as slow as the last one here
_MAX_BYTES = RECORD_BYTES // 2  # leaves room for partial chunks that are written again
_MAX_VALUES = RECORD_VALUES - 1  # one value is the empty metadata of the shared record

Newer = Sequence[tuple[int, Record]]
"""Newer commits with their versions, in order."""

Validate = Callable[[Newer], Awaitable[Record]]


class Retry(NamedTuple):
    """Why a commit was tried again: the version to which the reason refers, and the reason in words."""

    version: int
    reason: str


AppendRecord = Callable[[Record, Validate, Callable[[Retry], object]], Awaitable[int]]


class _AllDroppedOut(Exception):
    """All commits that were to share a record have dropped out."""


class QueuedCommit:
    """A record to be appended, with its bytes `data`; `changes` is None if it must be appended alone."""

    def __init__(
        self,
        record: Record,
        validate: Validate,
        on_retry: Callable[[Retry], object],
        changes: Changes | None,
        data: bytes,
    ) -> None:
        self.record = record
        self.size = len(data)
        self.validate = validate
        self.on_retry = on_retry
        alone = changes is None or changes.replaces or changes.dropped
        self.changes = None if alone or record.tagged or "metrics" in record.metadata else changes
        self.value_count = max_value_count(data) if self.may_share() else 0
        self.version: int | None = None
        self.error: BaseException | None = None
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self.version is not None or self.error is not None

    def may_share(self) -> bool:
        """Return whether the commit may share a record; if some of its data is not inline, it never may again."""
        inline = all(isinstance(m, Manifest) and not any(m.packs) for m in self.record.manifests)
        self.changes = self.changes if inline else None
        return self.changes is not None

    def wake(self) -> None:
        """Let the task of the commit continue."""
        if not self.turn.done():
            self.turn.set_result(None)

    def may_share_with(self, other: QueuedCommit) -> bool:
        """Return whether the commit may share a record with another one."""
        if self.changes is None or other.changes is None or self.record.durable != other.record.durable:
            return False
        overlap = self.changes.overlap(other.changes)
        return not overlap.conflicts and not overlap.chunks


class CommitQueue:
    """The commits of one event loop that wait for their turn."""

    def __init__(self) -> None:
        self.waiting: list[QueuedCommit] = []
        self._busy = False

    async def append(self, commit: QueuedCommit, append_record: AppendRecord) -> int:
        """Append a commit when its turn comes and return its version; raise the error that prevented it."""
        if self._busy:
            self.waiting.append(commit)
            await self._wait(commit)
        else:
            self._busy = True
        if not commit.done:
            try:
                await self._append(commit, append_record)
            finally:
                self._start_next()
        if commit.error is not None:
            raise commit.error
        assert commit.version is not None
        return commit.version

    async def _wait(self, commit: QueuedCommit) -> None:
        try:
            await commit.turn
        except asyncio.CancelledError:
            if commit in self.waiting:
                self.waiting.remove(commit)
            elif commit.turn.done() and not commit.done:  # its turn has come, and passes to the next commit
                self._start_next()
            raise

    async def _append(self, commit: QueuedCommit, append_record: AppendRecord) -> None:
        while not commit.done:
            commits = self._take_along(commit)
            try:
                await _append_together(commits, append_record)
            finally:
                for other in commits[1:]:
                    if other.done:
                        other.wake()
                self.waiting[:0] = [other for other in commits[1:] if not other.done]

    def _take_along(self, commit: QueuedCommit) -> list[QueuedCommit]:
        """Remove the commits that can share a record with this one from the queue; return all, this one first."""
        commits, size, values = [commit], commit.size, commit.value_count
        for other in self.waiting:
            fits = size + other.size <= _MAX_BYTES and values + other.value_count <= _MAX_VALUES
            if len(commits) < MAX_PARTS and fits and all(map(other.may_share_with, commits)):
                commits.append(other)
                size += other.size
                values += other.value_count
        self.waiting = [other for other in self.waiting if other not in commits]
        return commits

    def _start_next(self) -> None:
        if self.waiting:
            self.waiting.pop(0).wake()
        else:
            self._busy = False


async def _append_together(commits: list[QueuedCommit], append_record: AppendRecord) -> None:
    """Append one record for all commits; those that have no outcome afterwards must be appended alone."""
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
        version = await append_record(_combine(transaction, commits, sharing), validate, on_retry)
        for commit in sharing:
            commit.version = version
    except _AllDroppedOut:
        pass  # each commit has an error, or is appended alone later
    except BaseException as error:
        unknown = isinstance(error, CommitOutcomeUnknown)
        for commit in [c for c in sharing if not c.done]:
            commit.error = CommitOutcomeUnknown(str(error), commit.record.transaction) if unknown else error
        if not isinstance(error, (TStoreError, asyncio.CancelledError)):
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
    """Return the next back-off; its bound falls with the number of attempts, so that no writer starves."""
    longest = max(SHORTEST_PAUSE, (_LONGEST_PAUSE + _ATTEMPTS * duration) / math.sqrt(attempts))
    return min(longest, world.uniform(SHORTEST_PAUSE, 3 * pause))
