"""One run of a host of the simulation: its store, and the notes it takes of what it does and sees."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import tstore
from tstore.errors import CommitOutcomeUnknown, DeadlineExceeded, SourceCondemned, TStoreError, Unavailable
from tstore.simulation.history import Attempt, History, cells_of
from tstore.simulation.storage import HostStorage, SharedObjects
from tstore.simulation.weather import CALM, Host
from tstore.snapshot import Snapshot
from tstore.storage.cache.folder import Cache
from tstore.store import Store
from tstore.transactions.transaction import Transaction

__all__ = ["PATHS", "Darkroom", "Site", "read_state"]

PATHS = ("big/0", "big/1", "small/0", "small/1", "small/2")


class Darkroom:
    """Photographs of the storage at a moment when something was acknowledged, for the power to fail there."""

    def __init__(self) -> None:
        self.photograph: SharedObjects | None = None
        self.acknowledged = 0
        """The highest version that must survive."""

    def acknowledge(self, host: Host, storage: SharedObjects, version: int) -> None:
        """Keep a picture of some of these moments, the last of them."""
        if storage.volatile and host.chance(0.3):
            self.photograph, self.acknowledged = storage.photograph(), version


class Site:
    """One run of a host: its store, and the history in which it notes what it does and sees."""

    def __init__(
        self, host: Host, store: Store, storage: SharedObjects, history: History, darkroom: Darkroom
    ) -> None:
        self.host = host
        self.history = history
        self.store = store
        self.storage = storage
        self.darkroom = darkroom
        self.random = host.random
        self.loop = asyncio.get_running_loop()

    @classmethod
    async def of(
        cls, host: Host, storage: SharedObjects, history: History, darkroom: Darkroom, cache: Cache | None = None
    ) -> Site:
        """A host with the storage open, which nothing hinders."""
        weather, host.weather = host.weather, CALM
        try:
            store = await tstore.open(HostStorage(storage, host), "a", cache=cache)
        finally:
            host.weather = weather
        return cls(host, store, storage, history, darkroom)

    def acknowledge(self, version: int, transaction: str, *, durable: bool) -> None:
        """Note that the host was told of a commit, which now must be durable if that was asked for."""
        self.history.acknowledged.append((self.loop.time(), version, transaction))
        if durable:
            lost = sorted(k for k in self.storage.volatile if k.startswith("commits/") and int(k[8:]) <= version)
            if lost:
                self.history.note(f"{transaction} was told to be version {version}, while {lost} were not durable")
            self.darkroom.acknowledge(self.host, self.storage, version)

    async def end(
        self, tx: Transaction | None, attempt: Attempt, host: int, call: Awaitable[int | None], part: str = ""
    ) -> None:
        """Note how a transaction ended for this host, and ask again where the outcome is not known.

        `part` is the key of the host's fragment, if it is one of a group: once told anything, that is durable.
        """
        try:
            outcome = await call
        except TStoreError as error:
            self.host.tell(f"{attempt.transaction}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
            attempt.outcomes.append(error)
            if tx is not None:
                await tx.abort()
            if isinstance(error, CommitOutcomeUnknown):
                await self._ask(attempt)
            if isinstance(error, DeadlineExceeded):
                self._check_fragment(attempt, host, part)
            if isinstance(error, SourceCondemned) and tx is None:
                self.history.note(f"{attempt.transaction} was saved twice over what a gc had taken: {error}")
            return
        if outcome is not None:
            self.host.tell(f"{attempt.transaction} is version {outcome}, by {attempt.ops[host]}")
            attempt.outcomes.append(outcome)
            self.acknowledge(outcome, attempt.transaction, durable=attempt.durable)
            self._check_fragment(attempt, host, part)

    def _check_fragment(self, attempt: Attempt, host: int, part: str) -> None:
        if attempt.durable and part in self.storage.volatile:
            self.history.note(f"host {host} of {attempt.transaction} was told while {part} was not durable")

    async def _ask(self, attempt: Attempt) -> None:
        """What became of an attempt; only that it stands is told for good."""
        try:
            version = await self.store.outcome(attempt.transaction)
        except Unavailable:
            return
        if version is not None:
            self.history.told.setdefault(attempt.transaction, []).append(version)

    def fault(self, doing: str, error: BaseException) -> None:
        """Note that something failed which has no reason to."""
        self.history.note(f"{self.host.name} could not {doing}: {type(error).__name__}: {error}")


async def read_state(snapshot: Snapshot) -> dict[str, tuple[int, ...]]:
    """The cells of every array of a snapshot."""
    return {path: cells_of(path, await (await snapshot.array(path)).read()) for path in snapshot.paths()}
