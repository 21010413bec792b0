"""A worker of a fuzzing run: it calls every verb of a store at random, and notes what it did, was told and saw.

It knows nothing of the model; what is there it asks the store. Errors of tstore's that a call may raise are noted
as failures, all others as faults.
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
from tstore.fuzz.journal import (
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

__all__ = ["EXPECTED", "TAGS", "Open", "Place", "Worker"]

TAGS = ("good", "best", "v1")
EXPECTED = (AlreadyExists, Conflict, NotFound, InvalidArgument, Misuse, Inconsistent, Unavailable)
"""What a call may raise while others are at work; that bytes are damaged or a disk is full is a fault."""
_PATIENCE = 20  # seconds


class Place(NamedTuple):
    """Where a store lies, and where its copies may; `options` reach it, `cache` is a folder for what is read."""

    url: str
    copies: tuple[str, ...]
    scratch: Path
    options: Mapping[str, Any] = {}
    cache: Path | None = None


class Open:
    """A transaction that is under way, and what was done in it."""

    def __init__(self, tx: tstore.Transaction, attempt: Attempt, base: int, *, serializable: bool = False) -> None:
        self.tx = tx
        self.attempt = attempt
        self.base = base
        self.serializable = serializable
        self.ops: list[Op] = []
        self.reads: list[tuple[tuple[Op, ...], str, Any]] = []

    def deleted(self, paths: Sequence[str]) -> None:
        """Note that arrays were deleted; of what the transaction did to them before no trace is left."""
        own = {op.path for op in self.ops if isinstance(op, Create)}
        for path in paths:
            self.ops = [o for o in self.ops if not (isinstance(o, Create | Write | Resize) and o.path == path)]
            if path not in own:
                self.ops.append(Delete(path))

    def noted(self, **changes: Any) -> Attempt:
        """The attempt with all that was done so far."""
        reads = self.attempt._replace(ops=tuple(self.ops), base=self.base, reads=tuple(self.reads))
        return reads._replace(**changes)


class Worker:
    """One of the tasks that work on a store. `alone`: nobody else does, so that nothing may get in its way."""

    def __init__(self, name: str, place: Place, journal: Journal, choice: random.Random, *, alone: bool) -> None:
        self.name = name
        self.place = place
        self.journal = journal
        self.choice = choice
        self.alone = alone
        self.stores: list[tstore.Store] = []
        self.open: list[Open] = []
        self.counted: dict[str, int] = {}
        self.told: list[str] = []
        self.disturbed = False
        """Whether the store was put back to an earlier time, which its handles are to notice."""
        self.rewound = False
        """Whether that was ever done, so that copies may have gone their own way."""
        self._numbers = 0

    async def work(
        self, verbs: Mapping[str, tuple[float, Callable[[Worker], Awaitable[None]]]], count: int
    ) -> None:
        """Call that many verbs, until a fault is noted, and then end the transactions that are still open."""
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
        self.counted[name] = self.counted.get(name, 0) + 1
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
            self.stores.clear()  # it was told that its handles are of another time
        except Exception as error:
            self.fault(name, error)
        self.told.append(f"{name} {outcome}".rstrip())

    def fault(self, verb: str, error: BaseException | str, text: str = "") -> None:
        """Note what never may happen: an error, or a short name and what it was."""
        kind = error if isinstance(error, str) else type(error).__name__
        self.journal.note(Fault(verb, kind, text or str(error)[:500]))

    def message(self) -> str:
        """A message that no other commit has."""
        self._numbers += 1
        return f"{self.name}-{self._numbers}"

    def seed(self) -> int:
        """A seed for values."""
        return self.choice.randrange(1 << 30)

    async def store(self) -> tstore.Store:
        """One of some handles of the store, some with a cache, that live as long as the worker."""
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
        """Note an attempt, and how it ended: the block calls what it is given with the version."""
        self.journal.note(attempt)

        def acknowledge(version: int) -> None:
            self.journal.note(Acknowledged(attempt.message, version, time.monotonic()))

        try:
            yield acknowledge
        except (CommitOutcomeUnknown, DeadlineExceeded):
            raise  # it may yet become a version
        except TStoreError as error:
            self.journal.note(Failed(attempt.message, type(error).__name__))
            raise


@contextlib.contextmanager
def _watched(verb: str) -> Iterator[None]:
    """Raise `TimeoutError` where a call never ends, also one that never lets go of the event loop."""

    def ring(_signal: int, _frame: object) -> None:
        raise TimeoutError(f"{verb} did not end within {_PATIENCE} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(_PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
