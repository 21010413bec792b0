"""The state of a transaction (open, committing, then committed or aborted) and its operations under way.

Operations of one transaction may run concurrently. A commit or abort waits for those that began before it; later
ones raise `Misuse`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator
from typing import Literal

from tstore.errors import Misuse

__all__ = ["Lifecycle"]


class Lifecycle:
    """The state of one transaction on the store at `url`, and the number of its operations under way."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._process = os.getpid()
        self._under_way = 0
        self._idle: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self.state: Literal["open", "committing", "committed", "aborted"] = "open"

    @property
    def ended(self) -> bool:
        """Whether the transaction has ended, even if the outcome of its commit is unknown."""
        return self.state in ("committed", "aborted")

    @property
    def inherited(self) -> bool:
        """Whether this process is a forked child of the one that began the transaction."""
        return self._process != os.getpid()

    def check_open(self) -> None:
        """Raise `Misuse` unless the transaction is open, in the process that began it."""
        if self.inherited:
            raise Misuse(
                f"{self._url}: a forked process cannot continue a transaction of its parent; begin another"
            )
        if self.state != "open":
            raise Misuse(f"this transaction on {self._url} is {self.state}; open a new one")

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Count the block as an operation under way; raise `Misuse` unless the transaction is open."""
        self.check_open()
        self._under_way += 1
        try:
            yield
        except Exception as error:
            if self.state == "committing":
                self._error = error
            raise
        finally:
            self._under_way -= 1
            if self._under_way == 0 and self._idle is not None and not self._idle.done():
                self._idle.set_result(None)

    def begin_commit(self) -> None:
        """Refuse operations from now on; raise `Misuse` unless the transaction is open."""
        self.check_open()
        self.state = "committing"

    async def wait_idle(self) -> None:
        """Wait until no operation is under way."""
        while self._under_way:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle

    def check_unfailed(self) -> None:
        """Raise `Misuse` if an operation failed, perhaps unnoticed, while the commit waited for it."""
        if self._error is not None:
            raise Misuse(
                f"{self._url}: an operation that was under way when commit() was called failed ({self._error}), "
                "so the transaction is not committed; await every operation before commit()"
            ) from self._error
