"""Objects in this process's memory (`memory://name`): the reference of backends and of servers of objects."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import AsyncIterator

from tstore.errors import AlreadyExists, Corrupt, NotFound
from tstore.runtime.pool import WORKERS
from tstore.storage.base import (
    LONGEST,
    Buffers,
    BufferStream,
    Capabilities,
    Durability,
    Keys,
    Transfer,
    bound,
    checked_key,
    overlong,
)
from tstore.storage.objects import WHOLE, Entry, Page, PutMode, Span
from tstore.storage.plain import Plain

__all__ = ["MemoryBackend", "MemoryObjects"]

_PAGE = 1000


class MemoryBackend(Plain):
    """All objects of one name; every store opened under that name in this process shares them."""

    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=False)
    transfer = Transfer(streams=WORKERS, batch=4 << 20, piece=1 << 20, gap=0)

    _stores: dict[str, dict[str, bytes | bytearray]] = {}  # noqa: RUF012 - shared on purpose
    _written: dict[str, dict[str, float]] = {}  # noqa: RUF012 - when each object was made
    _lock = threading.Lock()

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        with self._lock:
            self._objects = self._stores.setdefault(name, {})
            self._times = self._written.setdefault(name, {})

    async def get(self, key: str, most: int | None = None) -> bytes:
        found = self._find(key)
        if len(found) > (most := bound(key, most, found)):
            raise overlong(f"{self.url}: {key}", most)
        return bytes(found)

    async def size(self, key: str) -> int | None:
        found = self._objects.get(checked_key(key, self.url))
        return None if found is None else len(found)

    async def create(self, key: str, data: bytes, durability: Durability) -> None:
        self.add(key, data)

    async def hint(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[checked_key(key, self.url)] = data
            self._times[key] = time.time()

    def since_written(self, key: str) -> float:
        """Seconds since the object was written."""
        return time.time() - self._times.get(key, time.time())

    async def empty(self) -> bool:
        return not self._objects

    async def list(self, prefix: str) -> Keys:
        with self._lock:
            return sorted(k for k in self._objects if k.startswith(prefix))

    async def folders(self, prefix: str) -> Keys:
        with self._lock:
            below = [k[len(prefix) :] for k in self._objects if k.startswith(prefix)]
        return sorted({k.partition("/")[0] for k in below if "/" in k})

    async def age(self, prefix: str) -> float | None:
        with self._lock:
            written = [t for k, t in self._times.items() if k.startswith(f"{prefix}/") and k in self._objects]
        return time.time() - max(written) if written else None

    async def delete(self, key: str) -> None:
        self.remove(key)

    async def settle(self, prefix: str, durability: Durability) -> None:
        return None

    async def flush(self) -> None:
        return None

    def writer(self, key: str, durability: Durability) -> _MemoryPack:
        data = bytearray()
        self.add(key, data)  # at once: a transaction reads its own writes before the pack is finished
        return _MemoryPack(self, key, data)

    def upload(self, key: str, size: int, durability: Durability) -> _MemoryUpload:
        return _MemoryUpload(self, checked_key(key, self.url))

    def reader(self, key: str) -> _MemoryReader:
        return _MemoryReader(f"{self.url}: {key}", self._find(key))

    async def close(self) -> None:
        return None

    def add(self, key: str, data: bytes | bytearray) -> None:
        with self._lock:
            if checked_key(key, self.url) in self._objects:
                raise AlreadyExists(f"{self.url}: {key} exists already")
            self._objects[key] = data
            self._times[key] = time.time()

    def remove(self, key: str) -> None:
        """Delete an object, if it is there; blocking, from any thread."""
        with self._lock:
            self._objects.pop(checked_key(key, self.url), None)
            self._times.pop(key, None)

    def _find(self, key: str) -> bytes | bytearray:
        try:
            return self._objects[checked_key(key, self.url)]
        except KeyError:
            raise NotFound(f"{self.url}: there is no object {key}") from None


class _Growing:
    """What all writers of one object do: add to its bytes."""

    def __init__(self, key: str, data: bytearray) -> None:
        self.key = key
        self._data = data

    def reserve(self, size: int) -> None:
        return None

    def append(self, buffers: BufferStream, size: int) -> int:
        offset = len(self._data)
        for buffer in buffers:
            self._data += buffer
        return offset


class _MemoryPack(_Growing):
    def __init__(self, backend: MemoryBackend, key: str, data: bytearray) -> None:
        super().__init__(key, data)
        self._backend = backend

    def finish(self) -> None:
        return None

    def discard(self) -> None:
        self._backend.remove(self.key)


class _MemoryUpload(_Growing):
    def __init__(self, backend: MemoryBackend, key: str) -> None:
        super().__init__(key, bytearray())
        self._backend = backend

    def finish(self) -> None:
        self._backend.add(self.key, self._data)

    def discard(self) -> None:
        self._data = bytearray()


class _MemoryReader:
    def __init__(self, where: str, data: bytes | bytearray) -> None:
        self._where = where
        self._data = data

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        if offset + size > len(self._data):
            raise Corrupt(
                f"{self._where}: {size} bytes expected at {offset}, the object has only {len(self._data)}"
            )
        for buffer in buffers:  # a slice is a copy, so the pack can still grow meanwhile
            memoryview(buffer)[:] = self._data[offset : offset + len(buffer)]
            offset += len(buffer)


class MemoryObjects:
    """The same objects as those of `MemoryBackend(name)`, as a server would give them."""

    capabilities = MemoryBackend.capabilities

    def __init__(self, name: str) -> None:
        self._backend = MemoryBackend(name)
        self.url = self._backend.url

    async def get(self, key: str, span: Span = WHOLE, most: int = LONGEST) -> bytes:
        found = (await self._backend.get(key))[slice(*span)]
        if len(found) > most:
            raise overlong(f"{self.url}: {key}", most)
        return found

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        self._backend.reader(key).read_into(offset, buffers, size)

    async def head(self, key: str) -> Entry | None:
        size = await self._backend.size(key)
        return None if size is None else Entry(key, size, self._backend.since_written(key))

    async def put(self, key: str, data: Buffers, mode: PutMode) -> None:
        joined = b"".join(data)
        if mode is PutMode.CREATE:
            await self._backend.create(key, joined, Durability.NONE)
        else:
            await self._backend.hint(key, joined)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        keys = await self._backend.list(prefix)
        at = 0
        while at < len(keys):
            page = Page([], [])
            while at < len(keys) and len(page.entries) + len(page.folders) < _PAGE:
                head, slash, _ = keys[at][len(prefix) :].partition("/")
                if delimiter and slash:
                    folder = f"{prefix}{head}/"
                    page.folders.append(folder)
                    at = bisect.bisect_left(keys, f"{prefix}{head}0", at)  # "0" is what follows "/"
                    continue
                found = await self.head(keys[at])
                if found is not None:
                    page.entries.append(found)
                at += 1
            yield page

    async def delete(self, key: str) -> None:
        await self._backend.delete(key)

    async def close(self) -> None:
        return None
