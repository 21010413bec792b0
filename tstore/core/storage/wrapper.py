"""The base of storages that pass requests on to another storage, to retry, limit, count, cache or fail them.

The server of a read-only storage may answer 403 for what does not exist. For an absent object, buckets and CDNs
send 403 instead of 404 to those who may not list (S3, Google Cloud Storage, and what stands in front of them). A
reader probes for objects that do not exist yet, so it could not read there.

1. A forbidden object counts as absent if the store's marker can be read after the refusal. Without this check, a
   reader whose credentials have expired would forever take the version that it knows for the newest.
2. Only a reader may assume this. A writer would commit on an old version, or collect what only looks like garbage.
   So every write through this class is refused, even if the server would permit it.
3. An existing object that is forbidden by its own permissions looks absent too: then a reader sees the newest
   version before it, or an object of a version is reported as missing. Such errors name both reasons.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, TypeVar, cast

from tstore.core.format.layout import MARKER
from tstore.core.storage.base import PackReader, PackWriter, Storage
from tstore.core.storage.objects import (
    Buffers,
    Capabilities,
    Durability,
    Entry,
    Keys,
    Page,
    PutMode,
    Traffic,
    Tuning,
)
from tstore.errors import Denied, NotFound, TStoreError

__all__ = ["ReadOnlyStorage", "Request", "Wrapper", "request_of_put"]

T = TypeVar("T")


class Request(NamedTuple):
    """One request as a wrapper sees it."""

    operation: str
    """One of "get", "read", "head", "create", "replace", "list" (one page), "delete", "sync" and "sweep"; with
    `Capabilities.native_io` also "folders", "age", "empty" and "flush"."""
    key: str
    size: int = 0
    """The number of object bytes that the request sends or asks for, 0 if unknown."""


def request_of_put(key: str, buffers: Buffers, mode: PutMode) -> Request:
    """Return the request that a `put` makes."""
    size = sum(memoryview(buffer).nbytes for buffer in buffers)
    return Request("create" if mode is PutMode.CREATE else "replace", key, size)


class Wrapper(Storage):
    """Passes every request on; subclasses override `around`.

    Calls for packs and listings are passed on only if the inner storage implements them itself
    (`Capabilities.native_io`). Otherwise `Storage` derives them from requests of this wrapper, so that packs are
    uploaded through `around`.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def tuning(self) -> Tuning:
        return self.inner.tuning

    @property
    def traffic(self) -> Traffic | None:
        return self.inner.traffic

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a request; each call of `call` makes the request once."""
        return await call()

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        return await self.around(Request("get", key), lambda: self.inner.get(key, max_size))

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        await self.around(Request("read", key, size), lambda: self.inner.read(key, offset, buffers, size))

    async def head(self, key: str) -> Entry | None:
        return await self.around(Request("head", key), lambda: self.inner.head(key))

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        request = request_of_put(key, buffers, mode)
        await self.around(request, lambda: self.inner.put(key, buffers, mode, durability))

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        pages = aiter(self.inner.pages(prefix, delimiter))
        while (page := await self.around(Request("list", prefix), lambda: anext(pages, None))) is not None:
            yield page

    async def delete(self, key: str) -> None:
        await self.around(Request("delete", key), lambda: self.inner.delete(key))

    async def close(self) -> None:
        await self.inner.close()

    async def empty(self) -> bool:
        if not self.capabilities.native_io:
            return await super().empty()
        return await self.around(Request("empty", ""), self.inner.empty)

    async def enclosing(self, key: str) -> str | None:
        return await self.around(Request("enclosing", key), lambda: self.inner.enclosing(key))

    async def list(self, prefix: str) -> Keys:
        if not self.capabilities.native_io:
            return await super().list(prefix)
        return await self.around(Request("list", prefix), lambda: self.inner.list(prefix))

    async def folders(self, prefix: str) -> Keys:
        if not self.capabilities.native_io:
            return await super().folders(prefix)
        return await self.around(Request("folders", prefix), lambda: self.inner.folders(prefix))

    async def age(self, prefix: str) -> float | None:
        if not self.capabilities.native_io:
            return await super().age(prefix)
        return await self.around(Request("age", prefix), lambda: self.inner.age(prefix))

    def writer(self, key: str, durability: Durability) -> PackWriter:
        native_io = self.capabilities.native_io
        return self.inner.writer(key, durability) if native_io else super().writer(key, durability)

    def reader(self, key: str) -> PackReader:
        return self.inner.reader(key) if self.capabilities.native_io else super().reader(key)

    def upload(self, key: str, size: int, durability: Durability, mode: PutMode = PutMode.CREATE) -> PackWriter:
        native_io = self.capabilities.native_io
        upload = self.inner.upload if native_io else super().upload
        return upload(key, size, durability, mode)

    async def flush(self, prefix: str, durability: Durability) -> None:
        if not self.capabilities.native_io:
            return await super().flush(prefix, durability)
        return await self.around(Request("flush", prefix), lambda: self.inner.flush(prefix, durability))

    async def sync(self) -> None:
        await self.around(Request("sync", ""), self.inner.sync)

    async def sweep(self) -> None:
        await self.around(Request("sweep", ""), self.inner.sweep)


_READS = ("get", "read", "head")


class ReadOnlyStorage(Wrapper):
    """Reads from a server by the rules at the top of this file, and refuses to write."""

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        """Make a read; treat a forbidden object as absent by rule 1. Refuse a write."""
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
