"""Turns with the processor: one client's large metadata does not delay another's for more than a step.

Decoding and checking metadata holds the GIL, so that more threads gain nothing, and it takes many times as much
memory as the encoded bytes. So one such step runs at a time, and a client gives up its turn after each. A request
that is cancelled, also when the server stops, ends after the step under way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from tstore.format.validation import Steps, advance
from tstore.runtime.pool import run
from tstore.server.limits import Shares

__all__ = ["Turns"]

T = TypeVar("T")


class Turns:
    """Calls in a thread, one at a time; clients take turns, and wait at most `wait` seconds for each."""

    def __init__(self, wait: float) -> None:
        self._shares = Shares(1, wait, "its turn to check metadata")

    async def run(self, client: Hashable, call: Callable[..., T], *args: Any) -> T:
        """Return the result of a call made at this client's next turn; raise `Refused` (503) after the wait."""
        async with self._shares.claim(client, 1):
            return await run(call, *args)

    async def complete(self, client: Hashable, steps: Steps[T]) -> T:
        """Return the result of work in steps, each of which runs at a turn of this client."""
        results: list[T] = []
        while not results:
            results = await self.run(client, advance, steps)
        return results[0]
