"""A client of the store on a simulated host. It records the host's actions and observations in a history."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterator

import tstore
from tstore.core.format.layout import archive_key
from tstore.core.snapshot import Snapshot
from tstore.core.storage.cache import Cache
from tstore.core.store import Store
from tstore.core.transactions.transaction import Transaction
from tstore.errors import (
    CommitOutcomeUnknown,
    Corrupt,
    DeadlineExceeded,
    SourceCondemned,
    TimelineChanged,
    TStoreError,
    Unavailable,
)
from tstore.lab.simulation.history import Attempt, History, Traits, cells_of
from tstore.lab.simulation.storage import HostStorage, SharedObjects
from tstore.lab.simulation.virtual import NO_FAULTS, Host

__all__ = ["PATHS", "Client", "SimulatedStore", "read_state"]

PATHS = ("big/0", "big/1", "small/0", "small/1", "small/2")
"""The arrays that transactions change."""


class SimulatedStore:
    """The storage of the primary store or its mirror, with the history of its hosts since version `start`.

    `image` is a copy of the storage from the moment when version `image_version` was acknowledged, to simulate a
    power failure at that moment.
    """

    def __init__(self, storage: SharedObjects, start: int, traits: Traits) -> None:
        self.storage = storage
        self.history = History(start, traits)
        self.image: SharedObjects | None = None
        self.image_version = 0


class Client:
    """A host's store, and the history in which the host records its actions and observations."""

    def __init__(self, host: Host, store: Store, simulated: SimulatedStore) -> None:
        self.host = host
        self.store = store
        self.history = simulated.history
        self.storage = simulated.storage
        self._simulated = simulated
        self.random = host.random
        self.loop = asyncio.get_running_loop()

    async def follow_repair(self) -> None:
        """Open the store again if a repair has changed its history."""
        if self.store.log.reader.records.replaced:
            with self.expecting("open again", Unavailable):
                self.store = await tstore.open(HostStorage(self.storage, self.host), "a")

    @classmethod
    async def open(cls, host: Host, simulated: SimulatedStore, cache: Cache | None) -> Client:
        """Open the store on a host, without faults."""
        rates, host.rates = host.rates, NO_FAULTS
        try:
            store = await tstore.open(HostStorage(simulated.storage, host), "a", cache=cache)
        finally:
            host.rates = rates
        return cls(host, store, simulated)

    def acknowledge(self, version: int, transaction: str, *, durable: bool) -> None:
        """Record an acknowledged commit.

        If the commit is `durable`, check that its record and all earlier ones are durable, and perhaps take the
        image for a power failure.
        """
        self.history.acknowledged.append((self.loop.time(), version, transaction))
        if durable:
            # an object that a stalled host creates next to an archive is not a commit
            archives = self.storage.objects.keys() - self.storage.volatile
            records = sorted(
                k for k in self.storage.volatile if k.startswith("commits/") and int(k[8:]) <= version
            )
            lost = [k for k in records if archive_key(int(k[8:])) not in archives]
            if lost:
                self.history.add_violation(
                    f"{transaction} was acknowledged as version {version} before {lost} were durable"
                )
            if self.storage.volatile and self.host.chance(0.3):
                self._simulated.image, self._simulated.image_version = self.storage.copy(), version

    async def conclude(
        self, tx: Transaction | None, attempt: Attempt, host: int, call: Awaitable[int | None], fragment: str = ""
    ) -> None:
        """Await the commit of a transaction and record the outcome; query the store if the outcome is unknown.

        `tx` is None for `tstore.save`, which makes a transaction itself, and a second one if a gc condemned chunks
        that the first referenced. `fragment` is the key of the host's fragment in a cooperative transaction, which
        must be durable once the call returns or its deadline passes; "" if it need not be.
        """
        try:
            outcome = await call
        except TStoreError as error:
            self.host.log(f"{attempt.transaction}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            parts = attempt.parts_of_two_runs.get(host)
            if parts is None or not self.storage.created.keys().isdisjoint(parts):
                attempt.outcomes.append(error)  # otherwise the other run may deliver the part later
            if tx is not None:
                await tx.abort()
            if isinstance(error, CommitOutcomeUnknown):
                await self._query_outcome(attempt)
            if isinstance(error, DeadlineExceeded):
                self._check_fragment(attempt, host, fragment)
            if isinstance(error, SourceCondemned) and tx is None:
                self.history.add_violation(
                    f"{attempt.transaction} was retried, and again referenced chunks condemned by a gc: {error}"
                )
            return
        if outcome is not None:
            self.host.log(f"{attempt.transaction} is version {outcome}, by {attempt.ops[host]}")
            attempt.outcomes.append(outcome)
            self.acknowledge(outcome, attempt.transaction, durable=attempt.durable)
            self._check_fragment(attempt, host, fragment)

    def _check_fragment(self, attempt: Attempt, host: int, fragment: str) -> None:
        if attempt.durable and fragment in self.storage.volatile:
            self.history.add_violation(
                f"host {host} of {attempt.transaction} was told that it delivered before {fragment} was durable"
            )

    async def _query_outcome(self, attempt: Attempt) -> None:
        """Query and record the version of an attempt. If it has none, record nothing: it may still get one."""
        try:
            version = await self.store.outcome(attempt.transaction)
        except (Unavailable, TimelineChanged):
            return
        except Corrupt:
            if not self.history.misplaced:
                raise
            return
        if version is not None:
            self.history.reported.setdefault(attempt.transaction, []).append(version)

    @contextlib.contextmanager
    def expecting(self, action: str, *errors: type[TStoreError]) -> Iterator[None]:
        """End the block at one of these expected errors; record any other `TStoreError` as a violation."""
        repairing, repaired = self.history.repairing, self.history.repaired
        try:
            yield
        except errors as error:
            self.host.log(f"{action}: {type(error).__name__}: {error}")
        except TStoreError as error:
            beside = repairing or self.history.repairing or repaired is not self.history.repaired
            if isinstance(error, TimelineChanged | Corrupt if beside else TimelineChanged) and (
                beside or self.history.repaired
            ):
                self.host.log(f"{action}, at a repair: {type(error).__name__}: {error}")
                return
            self.history.add_violation(f"{self.host.name} could not {action}: {type(error).__name__}: {error}")


async def read_state(snapshot: Snapshot) -> dict[str, tuple[int, ...]]:
    """Return the cells of every array of a snapshot."""
    return {path: cells_of(path, await (await snapshot.array(path)).read()) for path in snapshot.paths()}
