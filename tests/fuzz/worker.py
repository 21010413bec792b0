"""A fuzzing worker, which calls random operations on a store and records them with their results.

It does not know the model, but queries the store for its contents. Expected errors of tstore are recorded as
failures, all others as faults.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tstore
from tests.fuzz.journal import (
    Acknowledged,
    Attempt,
    Create,
    Delete,
    Failed,
    Fault,
    Journal,
    Op,
    Resize,
    Write,
)
from tstore.errors import (
    AlreadyExists,
    CommitOutcomeUnknown,
    Conflict,
    DeadlineExceeded,
    Inconsistent,
    InvalidArgument,
    Misuse,
    NotFound,
    TStoreError,
    Unavailable,
)

__all__ = ["EXPECTED", "TAGS", "OpenTransaction", "Place", "Worker"]

TAGS = ("good", "best", "v1")
EXPECTED = (AlreadyExists, Conflict, NotFound, InvalidArgument, Misuse, Inconsistent, Unavailable)
"""The errors that a call may raise with concurrent workers; damaged bytes or a full disk are faults."""
_PATIENCE = 20  # seconds


class Place(NamedTuple):
    """The URLs of a store and its copies, its storage options, a scratch folder, and a cache folder.

    `constants` are those of the protocol that worker processes override, as this process does.
    """

    url: str
    copies: tuple[str, ...]
    scratch: Path
    options: Mapping[str, Any] = {}
    cache: Path | None = None
    constants: Mapping[str, int] = {}


class OpenTransaction:
    """An open transaction and its operations so far."""

    def __init__(self, tx: tstore.Transaction, attempt: Attempt, base: int, *, serializable: bool = False) -> None:
        self.tx = tx
        self.attempt = attempt
        self.base = base
        self.serializable = serializable
        self.ops: list[Op] = []
        self.reads: list[tuple[tuple[Op, ...], str, Any]] = []

    def deleted(self, paths: Sequence[str]) -> None:
        """Record deleted arrays, which removes the transaction's earlier operations on them."""
        own = {op.path for op in self.ops if isinstance(op, Create)}
        for path in paths:
            self.ops = [o for o in self.ops if not (isinstance(o, Create | Write | Resize) and o.path == path)]
            if path not in own:
                self.ops.append(Delete(path))

    def as_attempt(self, **changes: Any) -> Attempt:
        """Return the attempt with all operations so far."""
        reads = self.attempt._replace(ops=tuple(self.ops), base=self.base, reads=tuple(self.reads))
        return reads._replace(**changes)


class Worker:
    """A task that works on a store. If `alone`, no other does, so that conflicts are faults."""

    def __init__(self, name: str, place: Place, journal: Journal, choice: random.Random, *, alone: bool) -> None:
        self.name = name
        self.place = place
        self.journal = journal
        self.choice = choice
        self.alone = alone
        self.stores: list[tstore.Store] = []
        self.open: list[OpenTransaction] = []
        self.counts: dict[str, int] = {}
        self.log: list[str] = []
        self.disturbed = False
        """Whether handles are in use from before a backup or a repair, which they must notice."""
        self.rewound = False
        """Whether the store ever lost versions by a backup or a repair, so that copies may have diverged."""
        self._numbers = 0

    async def work(
        self, verbs: Mapping[str, tuple[float, Callable[[Worker], Awaitable[None]]]], count: int
    ) -> None:
        """Call `count` random operations, and then commit the transactions that are still open."""
        names = list(verbs)
        weights = [verbs[name][0] for name in names]
        for _ in range(count):
            [name] = self.choice.choices(names, weights)
            await self._call(name, verbs[name][1])
        while self.open:
            await self._call("commit", verbs["commit"][1])

    async def close(self) -> None:
        """Close the handles."""
        for store in self.stores:
            await store.close()

    async def _call(self, name: str, verb: Callable[[Worker], Awaitable[None]]) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        outcome = ""
        try:
            with _watched(name) if self.alone else contextlib.nullcontext():
                await verb(self)
        except DeadlineExceeded:
            outcome = "DeadlineExceeded"
        except EXPECTED as error:
            outcome = type(error).__name__
            if self.alone and not self.disturbed and isinstance(error, Unavailable | Inconsistent | Conflict):
                self.fault(name, error)
        except CommitOutcomeUnknown:
            outcome = "unknown"
        except TStoreError as error:
            outcome = type(error).__name__
            if not self.disturbed:
                self.fault(name, error)
            self.stores.clear()  # the error reports that its handles are outdated
        except Exception as error:
            self.fault(name, error)
        self.log.append(f"{name} {outcome}".rstrip())

    def fault(self, verb: str, error: BaseException | str, text: str = "") -> None:
        """Record a fault: an error, or its kind and a description."""
        kind = error if isinstance(error, str) else type(error).__name__
        self.journal.note(Fault(verb, kind, text or str(error)[:500]))

    def message(self) -> str:
        """Return a unique commit message."""
        self._numbers += 1
        return f"{self.name}-{self._numbers}"

    def seed(self) -> int:
        """Return a random seed for values."""
        return self.choice.randrange(1 << 30)

    async def store(self) -> tstore.Store:
        """Return one of several open handles of the store, some of them with a cache."""
        if len(self.stores) < 2 or self.choice.random() < 0.05:
            cached = self.place.cache is not None and self.choice.random() < 0.5
            opened = await tstore.open(
                self.place.url,
                "a",
                storage_options=dict(self.place.options) or None,
                cache=self.place.cache if cached else None,
            )
            self.stores.append(opened)
            if len(self.stores) > 4:
                await self.stores.pop(0).close()
            return opened
        return self.choice.choice(self.stores)

    @contextlib.asynccontextmanager
    async def committing(self, attempt: Attempt) -> AsyncIterator[Callable[[int], None]]:
        """Record an attempt and its outcome. The block calls the yielded function with the version."""
        self.journal.note(attempt)

        def acknowledge(version: int) -> None:
            self.journal.note(Acknowledged(attempt.message, version, time.monotonic()))

        try:
            yield acknowledge
        except (CommitOutcomeUnknown, DeadlineExceeded):
            raise  # it may still commit
        except TStoreError as error:
            self.journal.note(Failed(attempt.message, type(error).__name__))
            raise


@contextlib.contextmanager
def _watched(verb: str) -> Iterator[None]:
    """Raise `TimeoutError` if the block takes too much time of the processor, even if it blocks the event loop."""

    def ring(_signal: int, _frame: object) -> None:
        raise TimeoutError(f"{verb} did not end within {_PATIENCE} s of the processor's time")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, _PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
