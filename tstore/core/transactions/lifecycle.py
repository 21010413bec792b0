"""The state of a transaction, and its pending operations, for which a commit or abort waits."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Generic, Literal, TypeVar

from tstore.errors import Misuse

__all__ = ["Lifecycle", "Operation"]

T = TypeVar("T")


class Lifecycle:
    """The state of one transaction on the store at `url`, and the number of its operations under way.

    Operations may run concurrently. A commit or abort waits for the operations that started before it; operations
    that start later raise `Misuse`. In the state "delivered", the fragment of this host is stored, and another
    host commits. In the state "undecided", `CommitOutcomeUnknown` was raised; another commit decides.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._process = os.getpid()
        self._under_way = 0
        self._idle: asyncio.Event | None = None  # while a commit or abort waits
        self._error: Exception | None = None
        self.state: Literal["open", "committing", "committed", "delivered", "undecided", "aborted"] = "open"

    @property
    def ended(self) -> bool:
        """Whether the transaction has ended, even if the outcome of its commit is unknown."""
        return self.state not in ("open", "committing")

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child of the one that opened the transaction."""
        return self._process != os.getpid()

    def check_open(self) -> None:
        """Raise `Misuse` unless the transaction is open, in the process that opened it."""
        if self.inherited:
            raise Misuse(
                f"{self._url}: a forked process cannot continue a transaction of its parent; open a new one"
            )
        if self.state == "undecided":
            raise Misuse(
                f"the outcome of the commit of this transaction on {self._url} is unknown; call commit() again to "
                "learn it"
            )
        if self.state != "open":
            raise Misuse(f"this transaction on {self._url} is {self.state}; open a new one")

    def check_committed(self, path: str) -> None:
        """Raise `Misuse` unless the transaction is committed: before, values appended to `path` have no region."""
        if self.state != "committed":
            raise Misuse(
                f"{path}: the commit allots the region of appended values, but the transaction is {self.state}; "
                "commit it first"
            )

    def start_commit(self) -> None:
        """Refuse operations from now on; raise `Misuse` unless the transaction is open, or undecided."""
        if self.state != "undecided" or self.inherited:
            self.check_open()
        self.state = "committing"

    async def wait_idle(self) -> None:
        """Wait until no operation is under way."""
        while self._under_way:
            self._idle = asyncio.Event()
            await self._idle.wait()

    def check_unfailed(self) -> None:
        """Raise `Misuse` if an operation failed, perhaps unnoticed, while the commit waited for it."""
        if self._error is not None:
            raise Misuse(
                f"{self._url}: an operation that was under way when commit() was called failed ({self._error}), "
                "so the transaction is not committed; await every operation before commit()"
            ) from self._error


class Operation(Generic[T]):
    """An operation of a transaction, the block of an `async with`, which enters the result of `start`.

    It is under way until the end of the block. It raises `Misuse` unless the transaction is open.
    `started` is that result if it is known. A small commit has three of them, and a generator would take several
    times as long to enter and leave.
    """

    __slots__ = ("_lifecycle", "_start", "_started")

    def __init__(self, lifecycle: Lifecycle, start: Callable[[], Awaitable[T]], started: T | None = None) -> None:
        self._lifecycle = lifecycle
        self._start = start
        self._started = started

    async def __aenter__(self) -> T:
        lifecycle = self._lifecycle
        if lifecycle.state != "open" or lifecycle._process != os.getpid():
            lifecycle.check_open()
        lifecycle._under_way += 1
        if self._started is not None:
            return self._started
        try:
            return await self._start()
        except BaseException as error:
            await self.__aexit__(None, error, None)
            raise

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        lifecycle = self._lifecycle
        if lifecycle.state == "committing" and isinstance(error, Exception):
            lifecycle._error = error  # the commit that waits for this operation fails too
        lifecycle._under_way -= 1
        if lifecycle._under_way == 0 and lifecycle._idle is not None:
            lifecycle._idle.set()
