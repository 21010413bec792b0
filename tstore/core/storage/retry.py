"""Retries of requests that were throttled, or to which the server did not respond.

1. Only `Unavailable` and its subclass `Throttled` are retried. Reads, deletes and replacements may be done twice.
2. The pause before the next attempt is drawn between `min_pause` and three times the previous pause, up to
   `max_pause` (decorrelated jitter). If the server's `retry_after` is longer, it is the pause.
3. The pauses, and the time for which the attempts wait for the server, share `deadline`. The time that their bytes
   take does not count, nor does waiting for a turn (`limits.CallTime`): an upload that breaks after an hour is
   repeated like any other. Until the server has responded once, with any status, the deadline is
   `first_deadline`, or `connect_deadline` if no connection can be made: a wrong address fails fast. If the server
   asks for a pause that is longer than the rest of the deadline, but at most twice as long as the whole, it gets
   this pause and one more attempt; if it asks for more, the last attempt starts when the deadline ends.
4. A create without a response may have taken effect, or may still do so. If a later attempt finds that the key is
   taken, the object is therefore read back and compared: equal bytes mean that this create, or another with the
   same bytes, succeeded; other bytes mean `AlreadyExists`. A key that is taken at the first attempt means
   `AlreadyExists` as well. If a later attempt is refused, the outcome of the earlier one remains unknown, and the
   error is `Unavailable`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, TypeVar

from tstore.core.runtime import world
from tstore.core.storage.base import Storage
from tstore.core.storage.environment import VARIABLE
from tstore.core.storage.limits import one_call
from tstore.core.storage.objects import Buffers, Durability, Page, PutMode
from tstore.core.storage.wrapper import Request, Wrapper, request_of_put
from tstore.errors import (
    AlreadyExists,
    Denied,
    InvalidArgument,
    NotFound,
    TemporaryFailure,
    Throttled,
    TStoreError,
    Unavailable,
    Unreachable,
)

__all__ = ["RETRY_POLICY", "RetryPolicy", "RetryingStorage"]

_PIECE = 4 << 20  # bytes that are compared at a time
_LAST_SECONDS = 10.0  # for the attempt after a pause that took the rest of the deadline
_RESPONSES = (AlreadyExists, Denied, NotFound, TemporaryFailure)  # errors that only a response can cause

T = TypeVar("T")

_log = logging.getLogger("tstore.storage")


class RetryPolicy(NamedTuple):
    """Pauses and deadlines of retries, in seconds."""

    min_pause: float = 0.1
    max_pause: float = 10.0
    deadline: float = 60.0
    first_deadline: float = 10.0
    connect_deadline: float = 1.0

    @classmethod
    def lasting(cls, seconds: float) -> RetryPolicy:
        """Return the policy with one deadline for all failures; raise `InvalidArgument` unless it is a time."""
        if not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
            raise InvalidArgument(
                f"retry_timeout={seconds!r}: expected the seconds for which a request is repeated, 0 or more"
            )
        return cls(deadline=seconds, first_deadline=seconds, connect_deadline=seconds)


RETRY_POLICY = RetryPolicy()


class RetryingStorage(Wrapper):
    """Retries requests by the rules at the top of this file."""

    def __init__(self, inner: Storage, policy: RetryPolicy = RETRY_POLICY) -> None:
        super().__init__(inner)
        self._policy = policy
        self._responded = False  # whether the server has ever responded

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Make a request, and repeat it after failures by rules 1 to 3."""
        policy = self._policy
        pause, repeated = policy.min_pause, False
        with one_call(policy.deadline) as call_time:
            while True:
                try:
                    result = await call()
                except Unavailable as error:
                    self._responded |= isinstance(error, _RESPONSES)
                    pause = min(policy.max_pause, world.uniform(policy.min_pause, 3 * pause))
                    wait = self._wait(error, pause, self._deadline(error) - call_time.spent)
                    if wait is None:
                        if repeated:
                            setting = f"storage_options={{'retry_timeout': …}} or {VARIABLE} sets how long"
                            error.args = (f"{error}; repeated for {call_time.spent:.3g} s ({setting})",)
                        raise
                    operation = f"{request.operation} {request.key}"
                    _log.info("%s: %s: %s; next attempt in %.1f s", self.url, operation, error, wait)
                except TStoreError as error:
                    self._responded |= isinstance(error, _RESPONSES)
                    raise
                else:
                    self._responded = True
                    return result
                await asyncio.sleep(wait)
                repeated = True
                call_time.spent += wait
                if call_time.remaining <= 0:  # after a pause that the server asked for
                    call_time.seconds = call_time.spent + min(_LAST_SECONDS, policy.deadline)

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        """See `Storage.put`. A create is repeated by rule 4."""
        if mode is not PutMode.CREATE:
            return await super().put(key, buffers, mode, durability)
        uncertain = False  # whether an attempt had no response
        taken = False  # whether a later attempt then found the key taken

        async def create() -> None:
            nonlocal uncertain, taken
            if not taken:
                try:
                    await self.inner.put(key, buffers, mode, durability)
                except Unavailable:
                    uncertain = True
                    raise
                except AlreadyExists:
                    if not uncertain:
                        raise
                    taken = self._responded = True
            if taken and not await self._equals(key, buffers):
                raise AlreadyExists(f"{self.url}: {key} already exists, with other contents")

        try:
            await self.around(request_of_put(key, buffers, mode), create)
        except TStoreError as error:
            if not uncertain or isinstance(error, AlreadyExists | Unavailable):
                raise
            uncertainty = "An earlier attempt had no response; it may have taken effect, or may still do so"
            raise Unavailable(f"{error}. {uncertainty}") from error

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """See `Storage.pages`. A listing that broke off is restarted, and names yielded already are skipped."""
        pages: AsyncIterator[Page] | None = None
        last_key = last_folder = ""  # separate, because some servers send all folders with the first page

        async def next_page() -> Page | None:
            nonlocal pages
            if pages is None:
                pages = aiter(self.inner.pages(prefix, delimiter))
            try:
                return await anext(pages, None)
            except TStoreError:
                pages = None
                raise

        while (page := await self.around(Request("list", prefix), next_page)) is not None:
            entries = [e for e in page.entries if e.key > last_key]
            folders = [f for f in page.folders if f > last_folder]
            last_key, last_folder = max([last_key, *(e.key for e in entries)]), max([last_folder, *folders])
            yield Page(entries, folders)

    def _deadline(self, error: Unavailable) -> float:
        """Return the seconds after which a request that fails with this error is no longer retried."""
        if self._responded:
            return self._policy.deadline
        unreachable, policy = isinstance(error, Unreachable), self._policy
        return min(policy.deadline, policy.connect_deadline if unreachable else policy.first_deadline)

    def _wait(self, error: Unavailable, pause: float, left: float) -> float | None:
        """Return the pause before the next attempt, None if there is none; `left` is the rest of the deadline."""
        asked = error.retry_after if isinstance(error, Throttled) and error.retry_after is not None else 0.0
        if max(pause, asked) <= left:
            return max(pause, asked)
        if asked <= left or left <= 0:
            return None
        return asked if asked <= 2 * self._policy.deadline else left

    async def _equals(self, key: str, buffers: Buffers) -> bool:
        """Return whether the object equals the joined buffers; raise `Unavailable` if that is unknown."""
        entry = await self.inner.head(key)
        if entry is None:
            raise Unavailable(f"{self.url}: {key} existed, then did not; whether this create succeeded is unknown")
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if entry.size != sum(map(len, views)):
            return False
        offset = 0
        for view in views:
            for start in range(0, len(view), _PIECE):
                part = view[start : start + _PIECE]
                stored = bytearray(len(part))
                await self.inner.read(key, offset, [stored], len(stored))
                if stored != part:
                    return False
                offset += len(part)
        return True
