"""A backend made of objects on a server.

1. A pack is filled in memory. Where the next chunks would make it longer than `PACK` it is full: its upload begins
   in the background, as one `put`, and its writer takes no more. So a save of any size sends several packs at
   once, and an encoder never waits for a server unless memory is short.
2. The bytes of packs, being filled or on their way, are drawn from the pool's budget. Who finds none left waits;
   where few uploads are under way he first has the fullest packs uploaded, whosesoever they are.
3. `settle` waits for the uploads below a folder, and raises what went wrong with one. Only then may a record refer
   to them. The server's answer to a `put` means that the object is durable, so that is all.
4. Packs are put with `PutMode.CREATE`, like all other objects but hints: their names are never used twice, so a
   put can only meet itself, whose reply was lost (`retry` then reads back); and a server need not let anybody
   replace anything.
5. Until a pack has been uploaded it is read from memory, so that a transaction reads its own writes.

A pack that was given up after its upload began may still appear, as garbage of its transaction (`collect`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import weakref

import numpy as np
import numpy.typing as npt

from tstore.errors import AlreadyExists, Corrupt, Misuse, TStoreError
from tstore.runtime.budget import acquire, on_shortage, release
from tstore.runtime.io_loop import IoCall, on_io, start_io, wait_io
from tstore.runtime.pool import STREAMS
from tstore.storage.base import (
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
from tstore.storage.concurrency import Limits
from tstore.storage.listing import listed
from tstore.storage.objects import WHOLE, Objects, PutMode
from tstore.storage.plain import Plain
from tstore.storage.retry import RETRY_POLICY, Retry, RetryPolicy
from tstore.storage.trace import Trace, Traffic
from tstore.storage.upload import Upload

__all__ = ["PACK", "RemoteBackend", "served"]

PACK = 16 << 20
"""Bytes of a full pack; one longer batch of chunks is a pack of its own."""

_BLOCK = 1 << 20
_FEW_UPLOADS = 4
_IN_FLIGHT = 192 << 20


def served(objects: Objects, policy: RetryPolicy = RETRY_POLICY) -> RemoteBackend:
    """The backend of a server's objects as users have it: counted, limited, and asked again where not answered."""
    trace = Trace(objects)
    return RemoteBackend(Retry(Limits(trace, STREAMS, _IN_FLIGHT), policy), trace)


class RemoteBackend(Plain):
    """Packs, records and hints as objects."""

    transfer = Transfer(streams=STREAMS, batch=PACK, piece=PACK, gap=256 << 10)

    def __init__(self, objects: Objects, trace: Trace | None = None) -> None:
        self.objects = objects
        self.url = objects.url
        self._trace = trace
        self._unfinished: weakref.WeakValueDictionary[str, _RemotePack] = weakref.WeakValueDictionary()
        self._failed: dict[str, _RemotePack] = {}  # `settle` must tell of them, whoever holds their writers
        self._lock = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """What the server has."""
        return self.objects.capabilities

    @property
    def traffic(self) -> Traffic | None:
        """What was asked of the server, None where it is not counted."""
        return None if self._trace is None else self._trace.traffic

    async def get(self, key: str, most: int | None = None) -> bytes:
        """See `Backend.get`."""
        data = await on_io(self.objects.get(checked_key(key, self.url), WHOLE, bound(key, most)))
        if len(data) > (most := bound(key, most, data)):
            raise overlong(f"{self.url}: {key}", most)
        return data

    async def size(self, key: str) -> int | None:
        """See `Backend.size`."""
        found = await on_io(self.objects.head(checked_key(key, self.url)))
        return None if found is None else found.size

    async def create(self, key: str, data: bytes, durability: Durability) -> None:
        """See `Backend.create`."""
        await on_io(self.objects.put(checked_key(key, self.url), [data], PutMode.CREATE))

    async def hint(self, key: str, data: bytes) -> None:
        """See `Backend.hint`."""
        await on_io(self.objects.put(checked_key(key, self.url), [data], PutMode.REPLACE))

    async def empty(self) -> bool:
        """See `Backend.empty`."""
        return not await on_io(_any(self.objects))

    async def list(self, prefix: str) -> Keys:
        """See `Backend.list`."""
        return await on_io(_keys(self.objects, prefix))

    async def folders(self, prefix: str) -> Keys:
        """See `Backend.folders`."""
        return await on_io(_folders(self.objects, prefix))

    async def age(self, prefix: str) -> float | None:
        """See `Backend.age`; 0 where the server does not tell, as if just written."""
        return await on_io(_age(self.objects, f"{prefix}/"))

    async def delete(self, key: str) -> None:
        """See `Backend.delete`; folders are only parts of names."""
        await on_io(self.objects.delete(checked_key(key, self.url)))

    async def settle(self, prefix: str, durability: Durability) -> None:
        """See `Backend.settle`."""
        with self._lock:
            packs = [p for key, p in self._unfinished.items() if key.startswith(f"{prefix}/")]
        uploads = [asyncio.wrap_future(call.ended) for p in packs if (call := p.upload) is not None]
        for ended in uploads:
            ended.add_done_callback(asyncio.Future.exception)  # looked at, also where nobody waits for it any more
        if uploads:
            await asyncio.wait(uploads)  # which leaves them alone if it is cancelled
        for ended in uploads:
            if isinstance(error := ended.exception(), Exception):  # else one that was given up
                raise error

    async def flush(self) -> None:
        """See `Backend.flush`: whatever was answered is durable."""

    def writer(self, key: str, durability: Durability) -> _RemotePack:
        """See `Backend.writer`."""
        pack = _RemotePack(self, checked_key(key, self.url))
        with self._lock:
            if self._unfinished.setdefault(key, pack) is not pack:
                raise AlreadyExists(f"{self.url}: {key} is being written already")
        return pack

    def upload(self, key: str, size: int, durability: Durability) -> Upload:
        """See `Backend.upload`."""
        return Upload(self.objects, checked_key(key, self.url), size)

    def reader(self, key: str) -> _RemoteReader:
        """See `Backend.reader`."""
        return _RemoteReader(self, checked_key(key, self.url))

    async def close(self) -> None:
        """See `Backend.close`."""
        await on_io(self.objects.close())

    def unfinished(self, key: str) -> _RemotePack | None:
        """The pack of that name, while it lies in memory."""
        return self._unfinished.get(key)

    def forget(self, key: str) -> None:
        """Lets go of a pack that was uploaded or given up."""
        with self._lock:
            self._unfinished.pop(key, None)
            self._failed.pop(key, None)

    def failed(self, pack: _RemotePack) -> None:
        """Keeps a pack whose upload has failed, for `settle`."""
        with self._lock:
            if self._unfinished.get(pack.key) is pack:
                self._failed[pack.key] = pack


async def _any(objects: Objects) -> bool:
    async for page in listed(objects, "", "/"):
        if page.entries or page.folders:
            return True
    return False


async def _age(objects: Objects, prefix: str) -> float | None:
    youngest: float | None = None
    async for page in listed(objects, prefix):
        ages = [0.0 if entry.age is None else entry.age for entry in page.entries]
        youngest = min(ages if youngest is None else [youngest, *ages], default=None)
    return youngest


async def _keys(objects: Objects, prefix: str) -> Keys:
    found = [entry.key async for page in listed(objects, prefix) for entry in page.entries]
    found.sort()
    return found


async def _folders(objects: Objects, prefix: str) -> Keys:
    found = [f[len(prefix) :].rstrip("/") async for page in listed(objects, prefix, "/") for f in page.folders]
    found.sort()
    return [name for name, _ in itertools.groupby(found)]  # a set of so many would take as much again


class _RemotePack:
    """A pack in memory, and then on its way. One thread appends; any may begin the upload or read."""

    def __init__(self, owner: RemoteBackend, key: str) -> None:
        self.key = key
        self.size = 0
        self.upload: IoCall[None] | None = None
        self._owner = owner
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._used = 0  # bytes of the last block
        self._held = 0  # bytes drawn from the budget
        self._gone = False
        self._lock = threading.Lock()
        self._process = os.getpid()

    def reserve(self, size: int) -> None:
        """See `PackWriter.reserve`: memory is drawn as it is filled."""

    def append(self, buffers: BufferStream, size: int) -> int | None:
        """See `PackWriter.append`."""
        if self.upload is not None or (self.size and self.size + size > PACK):
            return None
        more = 0 if self._blocks and self._used + size <= len(self._blocks[-1]) else max(size, _BLOCK)
        if more:
            acquire(more)  # meanwhile another thread, short of memory too, may have this pack uploaded
        with self._lock:
            if self.upload is not None or self._gone:
                if more:
                    release(more)
                if self._gone:
                    raise Misuse(f"{self._owner.url}: {self.key} was given up; nothing can be appended to it")
                return None
            if more:
                self._cut()
                self._blocks.append(np.empty(more, np.uint8))
                self._used, self._held = 0, self._held + more
            block, offset = self._blocks[-1], self.size
            for buffer in buffers:
                data = np.frombuffer(buffer, np.uint8)
                block[self._used : self._used + len(data)] = data
                self._used += len(data)
            self.size += size
        _filling.add(self)
        return offset

    def finish(self) -> None:
        """See `PackWriter.finish`: begins the upload, for whose end `settle` waits."""
        with self._lock:
            if self.upload is not None or self._gone or self._process != os.getpid():
                return
            self._cut()
            self.upload = start_io(
                self._owner.objects.put(self.key, [b.data for b in self._blocks], PutMode.CREATE)
            )
        _filling.began(self)
        self.upload.ended.add_done_callback(lambda ended: self._uploaded(failed=ended.exception() is not None))

    def discard(self) -> None:
        """See `PackWriter.discard`."""
        with self._lock:
            self._gone = True
            upload = self.upload
        if upload is not None:
            upload.cancel()
            with contextlib.suppress(TStoreError, asyncio.CancelledError):
                upload.ended.result()
            with contextlib.suppress(TStoreError):  # a gc removes it, as it does where deleting is not permitted
                wait_io(self._owner.objects.delete(self.key))
        _filling.ended(self)
        self._empty()
        self._owner.forget(self.key)

    def read_into(self, offset: int, buffers: Buffers, size: int) -> bool:
        """Fills the buffers from memory; False where the pack has left it."""
        with self._lock:
            blocks = list(self._blocks)
            if not blocks and self.size:
                if self.upload is not None and (error := self.upload.ended.exception()) is not None:
                    raise error
                return False
            if offset + size > self.size:
                raise Corrupt(
                    f"{self._owner.url}: {self.key}: {size} bytes expected at {offset}, "
                    f"the pack has only {self.size}"
                )
        for buffer in buffers:
            target = np.frombuffer(buffer, np.uint8)
            at, done = offset, 0  # `at` counts from the block's begin
            for block in blocks:
                if at < len(block) and done < len(target):
                    part = block[at : at + len(target) - done]
                    target[done : done + len(part)] = part
                    done, at = done + len(part), at + len(part)
                at -= len(block)
            offset += len(target)
        return True

    def _cut(self) -> None:
        """Ends the last block where its bytes end."""
        if self._blocks:
            self._blocks[-1] = self._blocks[-1][: self._used]

    def _uploaded(self, *, failed: bool) -> None:
        _filling.ended(self)
        self._empty()
        if failed:
            self._owner.failed(self)
        else:
            self._owner.forget(self.key)

    def _empty(self) -> None:
        with self._lock:
            self._blocks, held, self._held = [], self._held, 0
        if held and self._process == os.getpid():
            release(held)

    def __del__(self) -> None:
        self._empty()


class _RemoteReader:
    """Reads of a pack, wherever it is."""

    def __init__(self, owner: RemoteBackend, key: str) -> None:
        self._owner = owner
        self._key = key

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        """See `PackReader.read_into`."""
        pack = self._owner.unfinished(self._key)
        if pack is None or not pack.read_into(offset, buffers, size):
            wait_io(self._owner.objects.read(self._key, offset, buffers, size))


class _Filling:
    """The packs of this process that are being filled, and those on their way."""

    def __init__(self) -> None:
        self._packs: weakref.WeakSet[_RemotePack] = weakref.WeakSet()
        self._uploading: set[_RemotePack] = set()
        self._lock = threading.Lock()

    def add(self, pack: _RemotePack) -> None:
        with self._lock:
            if pack.upload is None:
                self._packs.add(pack)

    def began(self, pack: _RemotePack) -> None:
        with self._lock:
            self._packs.discard(pack)
            self._uploading.add(pack)

    def ended(self, pack: _RemotePack) -> None:
        with self._lock:
            self._packs.discard(pack)
            self._uploading.discard(pack)

    def relieve(self) -> None:
        """Begins the upload of the fullest pack where memory is short and few are under way."""
        with self._lock:
            fullest = max(self._packs, key=lambda pack: pack.size, default=None)
            if fullest is None or len(self._uploading) >= _FEW_UPLOADS:
                return
        fullest.finish()


_filling = _Filling()


def _relieve() -> None:
    _filling.relieve()


on_shortage(_relieve)


def _after_fork() -> None:
    global _filling  # noqa: PLW0603 - the parent uploads its packs
    _filling = _Filling()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
