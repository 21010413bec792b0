"""A storage behind a network, as a store uses it: counted, limited, retried, and awaited on the I/O loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tstore.runtime.event_loops import on_io
from tstore.runtime.pool import STREAMS
from tstore.storage.base import SERVED, Storage
from tstore.storage.concurrency import Concurrency
from tstore.storage.objects import Capabilities, Tuning, bound, checked_key, overlong
from tstore.storage.retry import RETRY_POLICY, Retry, RetryPolicy
from tstore.storage.trace import Trace
from tstore.storage.wrapper import Request, Wrapper

__all__ = ["Remote", "served"]

_IN_FLIGHT = 192 << 20

T = TypeVar("T")


def served(storage: Storage, policy: RetryPolicy = RETRY_POLICY) -> Remote:
    """Return the storage as stores use it: counted, limited, retried, and awaited on the I/O loop."""
    return Remote(Retry(Concurrency(Trace(storage), STREAMS, _IN_FLIGHT), policy))


class Remote(Wrapper):
    """The outermost wrapper of a storage that takes whole objects.

    Every request runs on the I/O loop, so that one session serves all threads and loops of the process. Packs are
    filled in memory here (`packs`).
    """

    @property
    def capabilities(self) -> Capabilities:
        """See `Storage.capabilities`; packs are not written in place, even if the inner storage could."""
        return self.inner.capabilities._replace(in_place=False)

    @property
    def tuning(self) -> Tuning:
        """See `Storage.tuning`."""
        return SERVED if self.inner.capabilities.in_place else self.inner.tuning

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Make the request on the I/O loop."""
        if request.operation not in ("list", "sync", "sweep"):
            checked_key(request.key, self.url)

        async def made() -> T:
            return await call()

        return await on_io(made())

    async def get(self, key: str, most: int | None = None) -> bytes:
        """See `Storage.get`; the bound of the object's kind is enforced for every storage."""
        data = await super().get(key, bound(key, most))
        if len(data) > (most := bound(key, most, data)):
            raise overlong(f"{self.url}: {key}", most)
        return data

    async def close(self) -> None:
        """See `Storage.close`."""
        await on_io(self.inner.close())
