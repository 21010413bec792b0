"""A read-only storage, whose server may answer 403 for what does not exist.

For an absent object, buckets and CDNs send 403 instead of 404 to those who may not list (S3, Google Cloud Storage,
and what stands in front of them). A reader probes for objects that do not exist yet, so it could not read there.

1. A forbidden object counts as absent if the store's marker can be read after the refusal. Without this check, a
   reader whose credentials have expired would take the version that it knows for the newest one for ever.
2. Only a reader may assume this. A writer would commit on an old version, or collect what it takes for garbage. So
   every write through this class is refused, whatever the server would permit.
3. What is forbidden although it exists (by the rights of single objects) looks absent too: then a reader sees the
   newest version below it, or an object of a version is reported as missing. Such errors name both reasons.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from tstore.core.format.layout import MARKER
from tstore.core.storage.base import Storage
from tstore.core.storage.wrapper import Request, Wrapper
from tstore.errors import Denied, NotFound, TStoreError

__all__ = ["ReadOnlyStorage", "only_reading"]

_READS = ("get", "read", "head")

T = TypeVar("T")


def only_reading(storage: Storage) -> Storage:
    """Return a storage behind a network for reading only, and a local one unchanged."""
    return storage if storage.capabilities.native_io else ReadOnlyStorage(storage)


class ReadOnlyStorage(Wrapper):
    """Reads by the rules at the top of this file, and refuses to write."""

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Make a read; take a forbidden object for absent by rule 1. Refuse a write."""
        if request.operation in ("create", "replace", "delete", "sweep"):
            raise Denied(
                f"{self.url}: {request.key} can't be written: the store was opened for reading, with mode='r' or "
                "since the storage permits no writes or does not create exclusively; write elsewhere"
            )
        try:
            return await call()
        except Denied as error:
            if request.operation not in _READS or request.key == MARKER:
                raise
            try:
                await self.inner.get(MARKER)
            except TStoreError:
                raise error from None
            if request.operation == "head":
                return cast(T, None)
            raise NotFound(f"{self.url}: {request.key} does not exist, or is forbidden ({error})") from None
