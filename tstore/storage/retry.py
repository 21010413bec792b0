"""Requests that were not answered, asked again.

1. Only `Unavailable` and `Throttled` are asked again. Reading, deleting and replacing may be done twice.
2. The pause before the next try is drawn between the shortest one and three times the one before, up to the
   longest (decorrelated jitter), or is what the server named as `retry_after`, if that is more.
3. No try begins later than `deadline` after the first. Until the server has answered once the deadline is
   `first_deadline`, and `connect_deadline` while no connection can be made: a wrong address shows at once.
   What all tries wait for the server and for each other has that deadline too (`pace.Call`), beyond what the bytes
   that they move take at the least rate.
4. A create that was not answered may have been done, or may be done later, so "exists already" from a later try
   can mean this very one: the object is read back and compared. The same bytes: it was created, by us or by one
   who wrote the same. Other bytes, or "exists already" to the first try: `AlreadyExists`. A refusal of a later try
   does not tell of the earlier one, so that the outcome stays unknown: `Unavailable`, which says both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, TypeVar

from tstore.errors import AlreadyExists, Denied, NotFound, Throttled, TStoreError, Unavailable, Unreachable
from tstore.runtime import world
from tstore.storage.base import Buffers
from tstore.storage.objects import Objects, Page, PutMode, Request, Span, Wrapper
from tstore.storage.pace import Call, one_call

__all__ = ["RETRY_POLICY", "Retry", "RetryPolicy"]

_COMPARED = 4 << 20
_ANSWERS = (AlreadyExists, Denied, NotFound)

T = TypeVar("T")


class RetryPolicy(NamedTuple):
    """How often and how long what was not answered is asked again, in seconds."""

    shortest: float = 0.1
    longest: float = 10.0
    deadline: float = 60.0
    first_deadline: float = 10.0
    connect_deadline: float = 1.0


RETRY_POLICY = RetryPolicy()

_log = logging.getLogger("tstore.storage")


class Retry(Wrapper):
    """Asks again what was not answered, by the steps above."""

    def __init__(self, inner: Objects, policy: RetryPolicy = RETRY_POLICY) -> None:
        super().__init__(inner)
        self._policy = policy
        self._answered = False

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """The result of the request, asked for as often as it takes."""
        return await self._repeated(request, call, None)

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        """See `Objects.put`."""
        if mode is not PutMode.CREATE:
            return await super().put(key, data, mode)

        async def read_back() -> None:
            if not await self._holds(key, data):
                raise AlreadyExists(f"{self.url}: {key} exists already, and holds something else")

        request = Request("put", key, sum(memoryview(buffer).nbytes for buffer in data), mode)
        return await self._repeated(request, lambda: self.inner.put(key, data, mode), read_back)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """See `Objects.pages`; a listing that broke off is begun again, and what was listed is left out."""
        pages = aiter(self.inner.pages(prefix, delimiter))
        begun, entry, folder = True, "", ""  # the last of each; some servers show all folders with the first page

        async def next_page() -> Page | None:
            nonlocal pages, begun
            if not begun:
                pages, begun = aiter(self.inner.pages(prefix, delimiter)), True
            try:
                return await anext(pages, None)
            except TStoreError:
                begun = False
                raise

        while (page := await self.around(Request("list", prefix), next_page)) is not None:
            entries = [e for e in page.entries if e.key > entry]
            folders = [f for f in page.folders if f > folder]
            entry, folder = max([entry, *(e.key for e in entries)]), max([folder, *folders])
            yield Page(entries, folders)

    async def _repeated(
        self, request: Request, call: Callable[[], Awaitable[T]], taken: Callable[[], Awaitable[T]] | None
    ) -> T:
        with one_call(self._policy.deadline) as whole:
            return await self._tried(request, call, taken, whole)

    async def _tried(
        self,
        request: Request,
        call: Callable[[], Awaitable[T]],
        taken: Callable[[], Awaitable[T]] | None,
        whole: Call,
    ) -> T:
        clock, policy = asyncio.get_running_loop().time, self._policy
        began, pause, unsure, creates = clock(), policy.shortest, False, taken is not None
        while True:
            try:
                result = await call()
                self._answered = True
                return result
            except Unavailable as error:
                unsure = True
                pause = min(policy.longest, world.uniform(policy.shortest, 3 * pause))
                named = error.retry_after if isinstance(error, Throttled) else None
                wait = pause if named is None else max(pause, named)
                self._answered |= isinstance(error, Throttled)
                if clock() - began + wait > self._deadline(error):
                    raise
                where = f"{self.url}: {request.operation} {request.key}"
                _log.info("%s: %s; asked again in %.1f s", where, error, wait)
            except TStoreError as error:
                self._answered |= isinstance(error, _ANSWERS)
                if not (unsure and creates):
                    raise
                if not isinstance(error, AlreadyExists):
                    raise Unavailable(
                        f"{error}. An earlier try was not answered, and may have been done, or be done yet"
                    ) from error
                if taken is None:
                    raise
                call, taken = taken, None
                continue
            whole.left -= wait
            await asyncio.sleep(wait)

    def _deadline(self, error: Unavailable) -> float:
        """The seconds after which a request that failed with this error is not repeated."""
        if self._answered:
            return self._policy.deadline
        if isinstance(error, Unreachable):
            return min(self._policy.deadline, self._policy.connect_deadline)
        return min(self._policy.deadline, self._policy.first_deadline)

    async def _holds(self, key: str, data: Buffers) -> bool:
        """Whether the object is the joined buffers; `Unavailable` where that can't be learned."""
        found = await self.inner.head(key)
        if found is None:
            raise Unavailable(f"{self.url}: {key} exists and does not; whether it was created is not known")
        views = [memoryview(buffer).cast("B") for buffer in data]
        if found.size != sum(map(len, views)):
            return False
        at = 0
        for view in views:
            for start in range(0, len(view), _COMPARED):
                part = view[start : start + _COMPARED]
                if await self.inner.get(key, Span(at, at + len(part))) != part:
                    return False
                at += len(part)
        return True
