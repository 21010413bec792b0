"""Requests and bytes by operation, counted and logged."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from tstore.errors import AlreadyExists, NotFound
from tstore.storage.base import Storage
from tstore.storage.objects import Page, Traffic
from tstore.storage.wrapper import Request, Wrapper

__all__ = ["Trace"]

T = TypeVar("T")

_log = logging.getLogger("tstore.storage")


class Trace(Wrapper):
    """Counts the requests, and logs each at DEBUG under `tstore.storage`."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._requests: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._read = 0
        self._written = 0

    @property
    def traffic(self) -> Traffic:
        """See `Storage.traffic`."""
        return Traffic(dict(self._requests), dict(self._failed), self._read, self._written)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """See `Storage.pages`; the end of a listing is no request, since the last page says so."""
        shown = False
        async for page in super().pages(prefix, delimiter):
            shown = True
            yield page
        if shown:
            self._requests["list"] -= 1

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Make the request and count it."""
        began, outcome = time.perf_counter(), "done"
        self._requests[request.operation] += 1
        try:
            result = await call()
        except (NotFound, AlreadyExists) as error:
            outcome = type(error).__name__
            raise
        except BaseException as error:
            self._failed[request.operation] += 1
            outcome = f"{type(error).__name__}: {error}"
            raise
        finally:
            if _log.isEnabledFor(logging.DEBUG):
                took = 1000 * (time.perf_counter() - began)
                where = f"{self.url}: {request.operation} {request.key}"
                _log.debug("%s (%d bytes): %s after %.1f ms", where, request.size, outcome, took)
        if request.operation in ("create", "hint"):
            self._written += request.size
        elif request.operation in ("get", "read"):
            self._read += len(result) if isinstance(result, bytes) else request.size
        return result
