"""The store of background saves, which run on a separate event loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future

from tstore.checkpoint.checkpoint import Checkpoint, Saved
from tstore.core.storage.connect import storage_at
from tstore.core.store import Store, close_after, open
from tstore.errors import Denied, TimelineChanged, TStoreError

__all__ = ["BackgroundStore"]


class BackgroundStore:
    """The store of background saves, from a URL or a `Store`.

    Raise `InvalidArgument` for anything else, and `Denied` for a `Store` opened with mode "r".
    """

    def __init__(self, store: str | os.PathLike[str] | Store) -> None:
        if isinstance(store, Store) and store.mode == "r":
            raise Denied(f"{store.url} was opened with mode='r'; open it with mode='r+' to write")
        self._callers_store = store if isinstance(store, Store) else None
        self._storage = store.log.storage if isinstance(store, Store) else storage_at(store)
        self._opened: Store | None = None
        self.url = self._storage.url

    def close_after(self, work: Future[None]) -> None:
        """Make `close` of the caller's `Store` wait for `work`, which uses the connections of that `Store`."""
        if self._callers_store is not None:
            close_after(self._callers_store, work)

    async def save(self, checkpoint: Checkpoint, on_written: Callable[[], None] | None = None) -> Saved:
        """Save a checkpoint on the event loop of background saves, as `Checkpoint.save` does."""
        store = await self.opened()
        try:
            return await checkpoint.save(store, on_written)
        except TimelineChanged:  # as after a repair; later saves open the store again
            if self._opened is store:
                self._opened = None
            raise

    @property
    def failed_requests(self) -> int:
        """The number of requests that have failed so far; a storage without requests has none."""
        traffic = self._storage.traffic
        return 0 if traffic is None else sum(traffic.failed.values())

    async def opened(self) -> Store:
        """Return the store for the event loop of background saves, created if there is none."""
        if self._opened is None:
            if self._callers_store is None:
                self._opened = await open(self._storage, "a")
            else:
                self._opened = Store(self._storage, self._callers_store.marker, self._callers_store.mode)
        return self._opened

    async def close(self) -> None:
        """Release open files and connections, unless they are those of the caller's `Store`."""
        if self._callers_store is None:
            with contextlib.suppress(TStoreError):
                await self._storage.close()
