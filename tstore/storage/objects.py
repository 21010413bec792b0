"""What a server of objects must be able to do: a small protocol, from which `remote` makes a whole backend.

Whoever adds a kind of storage writes these seven methods and lets `tstore.conformance` judge them. Keys
are relative and `/`-separated (`checked_key`). Every method is awaited on the pool's I/O loop, so that one session
with the server serves all threads and loops of the process; many calls are under way at the same time. The loop of
a forked child is another: a session belongs to the loop on which it was begun. After `close` another call begins
another session.

One mapping of errors, whatever the server says:

    NotFound        there is no such object
    AlreadyExists   `put` with `PutMode.CREATE`: the key is taken, and this request has not written it
    Denied          credentials or permissions; trying again would not help
    StorageFull     a quota, or an object longer than the server takes
    Corrupt         the answer is not what was asked for: another length, another range, no object at all
    Throttled       too many requests; `retry_after` where the server said when
    Unavailable     no answer, half an answer, or one that says "not now"

After `Unavailable` or `Throttled` from a write nobody knows whether it has landed or still will: the outcome is
unknown, and only a read tells. Retrying, limits and tracing are wrappers around this protocol (`Wrapper`), not
part of it.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, Protocol, TypeVar

from tstore.storage.base import LONGEST, Buffers, Capabilities

__all__ = ["WHOLE", "Entry", "Objects", "Page", "PutMode", "Request", "Span", "Wrapper"]

T = TypeVar("T")


class PutMode(enum.Enum):
    """What `put` does where the key is taken."""

    CREATE = "create"
    """Raises `AlreadyExists`; of any number of racing writers exactly one wins."""
    REPLACE = "replace"
    """Puts the new object in place of the old one."""


class Span(NamedTuple):
    """Which bytes of an object: as a slice, from `start` (from the end where negative) up to `stop`."""

    start: int = 0
    stop: int | None = None


WHOLE = Span()


class Entry(NamedTuple):
    """An object as a listing shows it."""

    key: str
    size: int
    age: float | None = None
    """Seconds since it was written, by the server's clock; None where that is not known."""


class Page(NamedTuple):
    """Some of the names below a prefix, in the order of the keys."""

    entries: list[Entry]
    folders: list[str]
    """With `delimiter="/"`: the prefixes, each with its final `/`, below which the deeper keys lie."""


class Objects(Protocol):
    """Bytes by key on a server."""

    @property
    def url(self) -> str:
        """Where they are, without any secret; it stands in errors and logs."""

    @property
    def capabilities(self) -> Capabilities:
        """What the server has, as far as that is known yet."""

    async def get(self, key: str, span: Span = WHOLE, most: int = LONGEST) -> bytes:
        """The bytes of the span; fewer, or none, where the object ends before, as slices have it. `NotFound`.

        `Corrupt` where they are more than `most`, whatever length the server tells, and no more are received.
        """

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        """Fills the buffers (`size` bytes in all) from `offset`; `NotFound`, `Corrupt` where it ends before."""

    async def head(self, key: str) -> Entry | None:
        """The object's length and age, None where it does not exist."""

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        """Stores the joined buffers as one object, all of it or nothing, durable once answered."""

    def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """The objects whose keys begin with the prefix, page by page as the server gives them."""

    async def delete(self, key: str) -> None:
        """Removes the object; no error where it does not exist."""

    async def close(self) -> None:
        """Ends the session with the server."""


class Request(NamedTuple):
    """One call of `Objects`, as a wrapper sees it."""

    operation: str
    """ "get", "read", "head", "put", "list" (one page) or "delete"."""
    key: str
    size: int = 0
    """The bytes that it carries or asks for, as far as that is known before."""
    mode: PutMode | None = None


class Wrapper:
    """Passes every request on to other objects; what lies between is `around`."""

    def __init__(self, inner: Objects) -> None:
        self.inner = inner

    @property
    def url(self) -> str:
        """Where the objects are."""
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        """What the server has."""
        return self.inner.capabilities

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a request; `call` makes it, each time it is called."""
        return await call()

    async def get(self, key: str, span: Span = WHOLE, most: int = LONGEST) -> bytes:
        """See `Objects.get`."""
        size = 0 if span.stop is None else max(0, span.stop - span.start)
        return await self.around(Request("get", key, size), lambda: self.inner.get(key, span, most))

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        """See `Objects.read`."""
        await self.around(Request("read", key, size), lambda: self.inner.read(key, offset, buffers, size))

    async def head(self, key: str) -> Entry | None:
        """See `Objects.head`."""
        return await self.around(Request("head", key), lambda: self.inner.head(key))

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        """See `Objects.put`."""
        size = sum(memoryview(buffer).nbytes for buffer in data)
        await self.around(Request("put", key, size, mode), lambda: self.inner.put(key, data, mode))

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """See `Objects.pages`."""
        pages = aiter(self.inner.pages(prefix, delimiter))
        while (page := await self.around(Request("list", prefix), lambda: _next(pages))) is not None:
            yield page

    async def delete(self, key: str) -> None:
        """See `Objects.delete`."""
        await self.around(Request("delete", key), lambda: self.inner.delete(key))

    async def close(self) -> None:
        """See `Objects.close`."""
        await self.inner.close()


async def _next(pages: AsyncIterator[Page]) -> Page | None:
    return await anext(pages, None)
