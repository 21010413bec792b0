"""Objects in the memory of this process (`memory://name`): the reference implementation of `Storage`."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import AsyncIterator

from tstore.core.runtime.pool import WORKERS
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import (
    Buffers,
    BufferStream,
    Capabilities,
    Durability,
    Entry,
    Keys,
    Page,
    PutMode,
    Tuning,
    checked_key,
    overlong,
    read_limit,
    too_short,
)
from tstore.errors import AlreadyExists, NotFound

__all__ = ["MemoryStorage"]

_PAGE = 1000  # keys and folders


class MemoryStorage(Storage):
    """The objects under one name, shared by all stores that this process opens under that name."""

    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=False, native_io=True)
    tuning = Tuning(streams=WORKERS, batch=4 << 20, piece=1 << 20, gap=0)

    _objects_by_name: dict[str, dict[str, bytes | bytearray]] = {}  # noqa: RUF012 - shared on purpose
    _times_by_name: dict[str, dict[str, float]] = {}  # noqa: RUF012 - when each object was written
    _lock = threading.Lock()

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        with self._lock:
            self._objects = self._objects_by_name.setdefault(name, {})
            self._times = self._times_by_name.setdefault(name, {})

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        data = self._find(key)
        if len(data) > (max_size := read_limit(key, max_size, data)):
            raise overlong(f"{self.url}: {key}", max_size)
        return bytes(data)

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        self.reader(key).read_into(offset, buffers, size)

    async def head(self, key: str) -> Entry | None:
        data = self._objects.get(checked_key(key, self.url))
        return None if data is None else Entry(key, len(data), time.time() - self._times.get(key, time.time()))

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        data = bytes(buffers[0]) if len(buffers) == 1 else b"".join(buffers)
        self.add(key, data, mode)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        keys = self._keys(prefix)
        at = 0
        while at < len(keys):
            page = Page([], [])
            while at < len(keys) and len(page.entries) + len(page.folders) < _PAGE:
                part, slash, _ = keys[at][len(prefix) :].partition("/")
                if delimiter and slash:
                    page.folders.append(f"{prefix}{part}/")
                    at = bisect.bisect_left(keys, f"{prefix}{part}0", at)  # "0" follows "/" in ASCII
                    continue
                entry = await self.head(keys[at])
                if entry is not None:
                    page.entries.append(entry)
                at += 1
            yield page

    async def delete(self, key: str) -> None:
        self.remove(key)

    async def close(self) -> None:
        return None

    async def empty(self) -> bool:
        return not self._objects

    async def list(self, prefix: str) -> Keys:
        return self._keys(prefix)

    async def flush(self, prefix: str, durability: Durability) -> None:
        return None

    def writer(self, key: str, durability: Durability) -> _MemoryPack:
        data = bytearray()
        self.add(key, data)  # visible before it is finished, since a transaction reads its own writes
        return _MemoryPack(self, key, data)

    def reader(self, key: str) -> _MemoryReader:
        return _MemoryReader(f"{self.url}: {key}", self._find(key))

    def upload(self, key: str, size: int, durability: Durability, mode: PutMode = PutMode.CREATE) -> _MemoryUpload:
        return _MemoryUpload(self, checked_key(key, self.url), mode)

    def add(self, key: str, data: bytes | bytearray, mode: PutMode = PutMode.CREATE) -> None:
        """Create or replace an object; raise `AlreadyExists` if the key of a create is taken. Thread-safe."""
        with self._lock:
            if checked_key(key, self.url) in self._objects and mode is PutMode.CREATE:
                raise AlreadyExists(f"{self.url}: {key} already exists")
            self._objects[key] = data
            self._times[key] = time.time()

    def remove(self, key: str) -> None:
        """Delete an object, if it exists. Thread-safe."""
        with self._lock:
            self._objects.pop(checked_key(key, self.url), None)
            self._times.pop(key, None)

    def _keys(self, prefix: str) -> Keys:
        with self._lock:
            return sorted(key for key in self._objects if key.startswith(prefix))

    def _find(self, key: str) -> bytes | bytearray:
        try:
            return self._objects[checked_key(key, self.url)]
        except KeyError:
            raise NotFound(f"{self.url}: {key} does not exist") from None


class _MemoryWriter:
    """The base class of both writers: appends to the bytes of an object."""

    def __init__(self, storage: MemoryStorage, key: str, data: bytearray) -> None:
        self.key = key
        self._storage = storage
        self._data = data

    def append(self, buffers: BufferStream, size: int) -> int:
        offset = len(self._data)
        for buffer in buffers:
            self._data += buffer
        return offset


class _MemoryPack(_MemoryWriter):
    def finish(self) -> None:
        return None

    def discard(self) -> None:
        self._storage.remove(self.key)


class _MemoryUpload(_MemoryWriter):
    def __init__(self, storage: MemoryStorage, key: str, mode: PutMode) -> None:
        super().__init__(storage, key, bytearray())
        self._mode = mode

    def finish(self) -> None:
        self._storage.add(self.key, self._data, self._mode)

    def discard(self) -> None:
        self._data = bytearray()


class _MemoryReader:
    def __init__(self, name: str, data: bytes | bytearray) -> None:
        self._name = name
        self._data = data

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        if offset + size > len(self._data):
            raise too_short(self._name, offset, offset + size, len(self._data))
        for buffer in buffers:  # slicing copies; a view would keep the bytearray from growing
            memoryview(buffer)[:] = self._data[offset : offset + len(buffer)]
            offset += len(buffer)
