"""Commits of one process that wait while another is in flight, and go out together as one record.

1. The first to arrive appends at once. Those that arrive meanwhile wait, in their order.
2. The next one takes along all that wait and may share its record, and appends one record for all of them.
3. Commits that share a record are small (all of it travels in the record), equally durable, and disjoint: none
   would conflict with another, so that every order gives the same result. A commit that replaces the tree, drops
   tags, or has metrics goes alone: retention reads the metrics of a version, not those of its parts.
4. Each is validated by itself against all newer commits. One that conflicts or fails drops out. One that can't be
   validated because a garbage collection came between, or that grew because it had to be written again, drops out
   too and goes alone, in the next turn. So no commit fails because of another that shared its record.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from tstore.errors import CommitOutcomeUnknown, NotFound, TStoreError
from tstore.format.bounds import RECORD_BYTES
from tstore.format.records import Part, Record
from tstore.format.references import Manifest
from tstore.format.tree import Changes
from tstore.runtime import world

__all__ = ["SHORTEST_PAUSE", "CommitQueue", "Entry", "Newer", "Retry", "Validate", "next_pause"]

_logger = logging.getLogger("tstore.log")

SHORTEST_PAUSE = 0.002
_LONGEST_PAUSE = 0.1
_TRIES = 12  # that the longest pause takes beyond that: where one takes long, those of the others do too
_MOST, _MOST_BYTES = 64, RECORD_BYTES // 2  # room to grow, where partial chunks are written again

Newer = Sequence[tuple[int, Record]]
"""Newer commits and their versions, in order."""

Validate = Callable[[Newer], Awaitable[Record]]


class Retry(NamedTuple):
    """Why something was done again: `version` is the one that came between, `reason` says how."""

    version: int
    reason: str


Append = Callable[[Record, Validate, Callable[[Retry], object]], Awaitable[int]]


class _NoneLeft(Exception):
    """None of the transactions that were to go together can."""


class Entry:
    """A record of `size` bytes to be appended; `changes` is what it changes, None where it must go alone."""

    def __init__(
        self,
        record: Record,
        validate: Validate,
        retried: Callable[[Retry], object],
        changes: Changes | None,
        size: int,
    ) -> None:
        self.record = record
        self.size = size
        self.validate = validate
        self.retried = retried
        alone = changes is None or changes.replaces or changes.dropped or "metrics" in record.metadata
        self.changes = None if alone else changes
        self.may_share()
        self.version: int | None = None
        self.error: BaseException | None = None
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def settled(self) -> bool:
        """Whether its outcome is known."""
        return self.version is not None or self.error is not None

    def may_share(self) -> bool:
        """Return whether it may share a record; once it has grown beyond that, it goes alone for good."""
        small = all(isinstance(m, Manifest) and not any(m.packs) for m in self.record.manifests)
        self.changes = self.changes if small else None
        return self.changes is not None

    def goes_with(self, others: Sequence[Entry]) -> bool:
        """Whether it may go out in one record with all of the others."""
        return all(self._disjoint(other) for other in others)

    def _disjoint(self, other: Entry) -> bool:
        if self.changes is None or other.changes is None or self.record.durable != other.record.durable:
            return False
        overlap = self.changes.overlap(other.changes)
        return not overlap.fatal and not overlap.chunks


class CommitQueue:
    """The entries of one event loop that wait for the log."""

    def __init__(self) -> None:
        self._waiting: list[Entry] = []
        self._busy = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def append(self, entry: Entry, append: Append) -> int:
        """The version that the entry's record became, or part of; raises what came in its way."""
        if self._busy:
            self._waiting.append(entry)
            await self._turn(entry)
        else:
            self._busy = True
        if not entry.settled:
            try:
                await self._append(entry, append)
            finally:
                self._pass_on()
        if entry.error is not None:
            raise entry.error
        assert entry.version is not None
        return entry.version

    async def _turn(self, entry: Entry) -> None:
        try:
            await entry.woken
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif entry.woken.done() and not entry.settled:  # it was its turn
                self._pass_on()
            raise

    async def _append(self, entry: Entry, append: Append) -> None:
        while not entry.settled:
            taken = self._taken(entry)
            try:
                await _append_together(taken, append)
            finally:
                for other in taken[1:]:
                    if other.settled:
                        _wake(other)
                self._waiting[:0] = [other for other in taken[1:] if not other.settled]

    def _taken(self, entry: Entry) -> list[Entry]:
        taken, size = [entry], entry.size
        for other in self._waiting:
            if len(taken) < _MOST and size + other.size <= _MOST_BYTES and other.goes_with(taken):
                taken.append(other)
                size += other.size
        self._waiting = [e for e in self._waiting if e not in taken]
        return taken

    def _pass_on(self) -> None:
        if self._waiting:
            _wake(self._waiting.pop(0))
        else:
            self._busy = False


async def _append_together(entries: list[Entry], append: Append) -> None:
    """Settle the entries, except those that must go alone from now on."""
    going = entries
    together = entries[0].record.transaction if len(entries) == 1 else f"{entries[0].record.transaction}.together"

    async def validate(newer: Newer) -> Record:
        nonlocal going
        for entry in going:
            try:
                entry.record = await entry.validate([(v, other) for v, other in newer if v > entry.record.base])
            except NotFound:
                if len(entries) == 1:
                    raise  # a gc came between: the log looks again
                entry.changes = None
            except Exception as error:
                entry.error = error
        going = [e for e in going if not e.settled and (len(entries) == 1 or e.may_share())]
        if not going:
            raise _NoneLeft
        return _combined(together, entries, going)

    def retried(retry: Retry) -> None:
        for entry in going:
            _logger.info(
                "transaction %s is tried again after version %d: %s",
                entry.record.transaction,
                retry.version,
                retry.reason,
            )
            entry.retried(retry)

    try:
        version = await append(_combined(together, entries, going), validate, retried)
        for entry in going:
            entry.version = version
    except _NoneLeft:
        pass  # each has its error, or goes alone
    except BaseException as error:
        for entry in [e for e in going if not e.settled]:
            entry.error = error
            if isinstance(error, CommitOutcomeUnknown):
                entry.error = CommitOutcomeUnknown(str(error), entry.record.transaction)
        if not isinstance(error, (TStoreError, asyncio.CancelledError)):
            raise


def _combined(transaction: str, entries: Sequence[Entry], going: Sequence[Entry]) -> Record:
    """One record of all that go, with the base of the one that was validated the least."""
    if len(entries) == 1:
        return entries[0].record
    records = [entry.record for entry in going]
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


def _wake(entry: Entry) -> None:
    if not entry.woken.done():
        entry.woken.set_result(None)


def next_pause(pause: float, tries: int, took: float) -> float:
    """Seconds to wait after the `tries`-th try was lost, which `took` so long, and the pause before that."""
    longest = max(SHORTEST_PAUSE, (_LONGEST_PAUSE + _TRIES * took) / math.sqrt(tries))
    return min(longest, world.uniform(SHORTEST_PAUSE, 3 * pause))
