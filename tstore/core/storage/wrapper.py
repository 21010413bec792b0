"""The base of storages that pass requests on to another storage, to retry, limit, count, cache or fail them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple, TypeVar

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

__all__ = ["Request", "Wrapper", "request_of_put"]

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
