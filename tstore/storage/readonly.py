"""Objects that are only read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tstore.errors import Denied
from tstore.storage.base import Capabilities
from tstore.storage.objects import Request, Wrapper

__all__ = ["ReadOnly"]

T = TypeVar("T")


class ReadOnly(Wrapper):
    """Refuses whatever would change something: `Denied`."""

    @property
    def capabilities(self) -> Capabilities:
        """What the server has, but for creating."""
        return self.inner.capabilities._replace(conditional_create=False, durable=False)

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Makes the request if it reads."""
        if request.operation in ("put", "delete"):
            raise Denied(f"{self.url}: can't {request.operation} {request.key}: it was opened to be read only")
        return await call()
