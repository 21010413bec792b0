"""The pushes of one host: the steps that are due for the durable store, one after the other.

Host 0 names the step of each push, the newest that is due there by then, and the other hosts push the steps that
it names, so that all of them skip the same ones. A push that fails on one host fails on all, because the host
withdraws the commit, and the next one has the next number. After a failure the step is not tried again: a newer
one follows, and at the end of the job the last. An unforeseen error is such a failure too, so that nobody waits
for a push that will never end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from tstore.core.runtime import world
from tstore.core.runtime.event_loops import BACKGROUND, LoopCall
from tstore.core.storage.base import Storage
from tstore.errors import AlreadyExists, DeadlineExceeded, NotFound, TStoreError, Unavailable
from tstore.tiers.objects import create, push_key, read

__all__ = ["Pushes"]

_MIN_POLL, _MAX_POLL = 0.02, 2.0  # seconds

_log = logging.getLogger("tstore.tiers")


class Pushes:
    """The pushes of a host since a decision; all methods are called on one event loop.

    `push` commits a step to the durable store and returns the version. `pending` has the steps that are due and
    were not passed over.
    """

    def __init__(
        self, storage: Storage, decision: int, host: int, hosts: int, push: Callable[[int], Awaitable[int]]
    ) -> None:
        self.pending: dict[int, asyncio.Future[int]] = {}
        self.pushed: int | None = None
        """The last step that was pushed."""
        self.failure: Exception | None = None
        """Why the last push failed, None if it did not."""
        self._storage = storage
        self._decision = decision
        self._host, self._hosts = host, hosts
        self._push = push
        self._number = 0
        self._named = -1  # the step of the last push
        self._work: LoopCall[None] | None = None

    def add(self, step: int) -> asyncio.Future[int]:
        """Push a step that this host has saved, unless a newer one is due when its turn comes.

        Return a future with the version, or the error of the push.
        """
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # marks it as seen
        if step <= self._named:
            future.set_exception(_passed_over(step, self._named))
            return future
        self.pending[step] = future
        if self._work is None or self._work.future.done():
            self._work = BACKGROUND.start(self._run())  # the process waits for it before it exits
        return future

    async def finish(self, timeout: float) -> None:
        """Wait until nothing is pending; raise the error of the last push, or `DeadlineExceeded`."""
        work = [] if self._work is None else [asyncio.wrap_future(self._work.future)]
        ended, late = await asyncio.wait(work, timeout=timeout) if work else (set(), set())
        if late:
            await self.cancel()
            steps = ", ".join(map(str, sorted(self.pending)))
            raise DeadlineExceeded(
                f"{self._storage.url}: step {steps} was not pushed within {timeout:g} s"
                + (": host 0 has not named the step of the next push" if self._host else ""),
                [0] if self._host else [],
            )
        for push in ended:
            push.result()
        if self.failure is not None:
            if not isinstance(self.failure, TStoreError):
                raise self.failure
            raise Unavailable(
                f"{self._storage.url}: the last push to the durable store failed, so it lacks the newest steps: "
                f"{self.failure}"
            ) from self.failure

    async def cancel(self) -> None:
        """Push no more; a commit that has begun goes on to its end."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([asyncio.wrap_future(self._work.future)])

    async def _run(self) -> None:
        while self.pending:
            self._named = step = await self._next()
            try:
                version = await self._push(step)
            except Exception as error:
                self._fail(error)
                outcome: Exception | int = error
            else:
                self.pushed, self.failure = step, None
                outcome = version
            for passed in [other for other in self.pending if other <= step]:
                future = self.pending.pop(passed)
                if passed < step:
                    future.set_exception(_passed_over(passed, step))
                elif isinstance(outcome, int):
                    future.set_result(outcome)
                else:
                    future.set_exception(outcome)

    def _fail(self, error: Exception) -> None:
        unforeseen = not isinstance(error, TStoreError)
        _log.warning("%s: a push failed; the job goes on: %s", self._storage.url, error, exc_info=unforeseen)
        self.failure = error

    async def _next(self) -> int:
        """Return the step of the next push, which host 0 names; wait while the durable store is away."""
        if self._hosts == 1:
            return max(self.pending)
        key, pause = push_key(self._decision, self._number), _MIN_POLL
        self._number += 1
        while True:
            try:
                if self._host == 0:
                    with contextlib.suppress(AlreadyExists):  # an earlier try, whose response was lost
                        await create(self._storage, key, max(self.pending))
                return await read(self._storage, key, int)
            except NotFound:
                pause = min(_MAX_POLL, pause * 1.5)
            except Exception as error:
                self._fail(error)
                pause = _MAX_POLL
            await asyncio.sleep(pause * world.uniform(0.5, 1))


def _passed_over(step: int, newer: int) -> Unavailable:
    return Unavailable(f"step {step} is not pushed to the durable store, because step {newer} was due by then")
