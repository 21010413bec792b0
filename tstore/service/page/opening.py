"""The store behind a server, opened for its page, whose work runs on an event loop apart from the server's.

Rendering and reading metadata take milliseconds of Python code at a time. On the server's loop they would hold up
the requests of hosts that are saving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web

from tstore.core.runtime.event_loops import BACKGROUND, LoopCall
from tstore.core.storage.base import Storage
from tstore.core.store import Store, open
from tstore.errors import TimelineChanged

__all__ = ["OpenStore", "start_apart", "wait_apart"]

T = TypeVar("T")

_LOOK = 0.25  # seconds between checks for a client that has left


class OpenStore:
    """The store at a storage, opened for reading when it is first needed."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._store: Store | None = None

    @property
    def url(self) -> str:
        """The URL or path of the storage."""
        return self._storage.url

    async def get(self) -> Store:
        """Return the open store; raise `NotAStore` if there is none yet."""
        if self._store is not None:
            try:
                self._store.log.reader.records.check_timeline()
            except TimelineChanged:  # a backup was restored: show that history
                self._store = None
        if self._store is None:
            self._store = await open(self._storage, "r")
        return self._store


def start_apart(work: Coroutine[Any, Any, T]) -> LoopCall[T]:
    """Start work on the loop of the page."""
    return BACKGROUND.start(work)


async def wait_apart(call: LoopCall[T], request: web.BaseRequest) -> T:
    """Return the result of work for a request; cancel the work, and wait for its end, if the client leaves."""
    future = asyncio.wrap_future(call.future)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # or asyncio logs it later
    try:
        while not future.done():
            await asyncio.wait([future], timeout=_LOOK)
            if not future.done() and (request.transport is None or request.transport.is_closing()):
                call.cancel()
                await asyncio.wait([future])
                raise ConnectionResetError("the client has left")
    except asyncio.CancelledError:
        call.cancel()
        await asyncio.wait([future])
        raise
    return future.result()
