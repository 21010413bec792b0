"""Writers for storage without appends: they fill a pack or an object in memory, then upload it.

1. A pack is full when the next chunks would make it longer than `PACK`. Its writer then accepts no more chunks,
   and the caller finishes it, which starts its upload in the background, as one `put`. So a large save uploads
   several packs at once, and an encoder never waits for a server unless memory is short.
2. Packs draw on the byte budget until they are uploaded. If the budget is exhausted, writers wait; if few
   uploads are in progress, a writer first starts the upload of the fullest pack of the process.
3. `flush` waits for the uploads in a folder and raises the first error; only then may a record refer to the packs.
4. Packs are put with `PutMode.CREATE`, so a server need not permit anybody to replace objects. Their names are
   never reused, so a name is taken only if the response to the same put was lost (`retry` then reads back).
5. A pack is read from memory until it is uploaded, so that a transaction reads its own writes.
6. A pack that is discarded after its upload has started may still appear; `collect` deletes it with its
   transaction.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tstore.core.runtime.budget import acquire, on_shortage, release
from tstore.core.runtime.event_loops import LoopCall, start_io, wait_io
from tstore.core.storage.objects import Buffers, BufferStream, Durability, PutMode, mapped_errors
from tstore.errors import AlreadyExists, Corrupt, Misuse, TStoreError

__all__ = ["IN_MEMORY", "PACK", "BufferedReader", "Packs", "Upload"]

PACK = 16 << 20
"""The maximum size of a pack in bytes; a longer batch of chunks becomes a pack by itself."""

IN_MEMORY = 32 << 20
"""The maximum size of an object assembled in memory; longer ones would take too much of the byte budget."""

_BLOCK = 1 << 20  # bytes by which a pack grows in memory
_FEW_UPLOADS = 4  # when memory is short, another upload starts if fewer are in progress
_PART = 8 << 20  # bytes of each buffer that `Upload` sends


class _Target(Protocol):
    """The methods of a storage that packs use."""

    url: str

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None: ...

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None: ...

    async def delete(self, key: str) -> None: ...


class Packs:
    """The packs of one storage that are not uploaded yet, by key."""

    def __init__(self) -> None:
        self.by_key: weakref.WeakValueDictionary[str, _BufferedPack] = weakref.WeakValueDictionary()
        self._finished: dict[str, _BufferedPack] = {}  # being uploaded, or failed: `flush` must raise their errors
        self._lock = threading.Lock()

    def writer(self, target: _Target, key: str) -> _BufferedPack:
        """Return a writer of a new pack; raise `AlreadyExists` while a pack of the same key is in memory."""
        pack = _BufferedPack(self, target, key)
        with self._lock:
            if self.by_key.setdefault(key, pack) is not pack:
                raise AlreadyExists(f"{target.url}: {key} is already being written")
        with _lock:
            _packs_of_process.add(pack)
        return pack

    async def flush(self, prefix: str) -> None:
        """Wait for the uploads in a folder; raise the first error."""
        with self._lock:
            packs = [p for key, p in self._finished.items() if key.startswith(f"{prefix}/")]
        uploads = [asyncio.wrap_future(call.future) for p in packs if (call := p.upload) is not None]
        for upload in uploads:
            upload.add_done_callback(asyncio.Future.exception)  # else asyncio logs an error that nobody retrieves
        if uploads:
            await asyncio.wait(uploads)  # not gather: cancelling gather would cancel the uploads
        for upload in uploads:
            if isinstance(error := upload.exception(), Exception):  # the upload of a discarded pack was cancelled
                raise error

    def add_finished(self, pack: _BufferedPack) -> None:
        """Keep a pack until it is uploaded or discarded."""
        with self._lock:
            self._finished[pack.key] = pack

    def forget(self, key: str) -> None:
        """Drop a pack that is uploaded or discarded."""
        with self._lock:
            self.by_key.pop(key, None)
            self._finished.pop(key, None)


class _BufferedPack:
    """A `PackWriter` in memory. One thread appends; any thread may start the upload or read."""

    def __init__(self, packs: Packs, target: _Target, key: str) -> None:
        self.key = key
        self.size = 0
        self.upload: LoopCall[None] | None = None
        self._packs = packs
        self._target = target
        self._blocks: list[npt.NDArray[np.uint8]] = []
        self._used = 0  # used bytes of the last block
        self.acquired = 0  # bytes drawn from the budget
        self._discarded = False
        self._lock = threading.Lock()
        self._process = os.getpid()  # a forked child must leave the upload and the budget to its parent

    def append(self, buffers: BufferStream, size: int) -> int | None:
        if self.upload is not None or (self.size and self.size + size > PACK):
            return None
        fits = self._blocks and self._used + size <= len(self._blocks[-1])
        growth = 0 if fits else max(size, _BLOCK)
        if growth:
            acquire(growth)  # meanwhile another thread that waits for memory may start the upload of this pack
        with self._lock:
            if self.upload is not None or self._discarded:
                release(growth)
                if self._discarded:
                    raise Misuse(f"{self._target.url}: {self.key} was discarded; nothing can be appended to it")
                return None
            if growth:
                self._trim()
                self._blocks.append(np.empty(growth, np.uint8))
                self._used, self.acquired = 0, self.acquired + growth
            offset = self.size
            self._copy(buffers)
            self.size += size
        return offset

    def finish(self) -> None:
        """Start the upload; `flush` waits for its end."""
        with self._lock:
            if self.upload is not None or self._discarded or self._process != os.getpid():
                return
            self._trim()
            blocks = [block.data for block in self._blocks]
            self.upload = start_io(self._target.put(self.key, blocks, PutMode.CREATE))
            self._packs.add_finished(self)  # under the lock: a second `finish` returns only after this
        self.upload.future.add_done_callback(lambda future: self._on_uploaded(future.exception()))

    def discard(self) -> None:
        with self._lock:
            self._discarded = True
            upload = self.upload
        if upload is not None:
            upload.cancel()
            with contextlib.suppress(TStoreError, asyncio.CancelledError):
                upload.future.result()
            with contextlib.suppress(TStoreError):  # if deleting fails or is not permitted, gc deletes the pack
                wait_io(self._target.delete(self.key))
        self._release()
        self._packs.forget(self.key)

    def read_into(self, offset: int, buffers: Buffers, size: int) -> bool:
        """Fill the buffers; return False if the pack is no longer in memory. Raise its upload's error."""
        with self._lock:
            blocks = list(self._blocks)
            if not blocks and self.size:
                if self.upload is not None and (error := self.upload.future.exception()) is not None:
                    raise error
                return False
            if offset + size > self.size:
                raise Corrupt(
                    f"{self._target.url}: {self.key}: expected {size} bytes at {offset}, but the pack is cut "
                    f"short after {self.size} bytes"
                )
        for buffer in buffers:
            view = np.frombuffer(buffer, np.uint8)
            block_start = 0  # within the pack
            for block in blocks:
                start, stop = max(offset, block_start), min(offset + len(view), block_start + len(block))
                if start < stop:
                    view[start - offset : stop - offset] = block[start - block_start : stop - block_start]
                block_start += len(block)
            offset += len(view)
        return True

    def _copy(self, buffers: BufferStream) -> None:
        """Copy the buffers into the last block, which must have room for them."""
        block = self._blocks[-1]
        for buffer in buffers:
            data = np.frombuffer(buffer, np.uint8)
            block[self._used : self._used + len(data)] = data
            self._used += len(data)

    def _trim(self) -> None:
        """Cut the last block to its used bytes."""
        if self._blocks:
            self._blocks[-1] = self._blocks[-1][: self._used]

    def _on_uploaded(self, error: BaseException | None) -> None:
        self._release()
        if error is None:
            self._packs.forget(self.key)

    def _release(self) -> None:
        with self._lock:
            self._blocks, acquired, self.acquired = [], self.acquired, 0
        if acquired and self._process == os.getpid():
            release(acquired)

    def __del__(self) -> None:
        self._release()


class BufferedReader:
    """A `PackReader` of a pack that is in memory or uploaded."""

    def __init__(self, packs: Packs, target: _Target, key: str) -> None:
        self._packs = packs
        self._target = target
        self._key = key

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        pack = self._packs.by_key.get(self._key)
        if pack is None or not pack.read_into(offset, buffers, size):
            wait_io(self._target.read(self._key, offset, buffers, size))


_lock = threading.Lock()
_packs_of_process: weakref.WeakSet[_BufferedPack] = weakref.WeakSet()


def _upload_fullest() -> None:
    """Start the upload of the fullest pack of the process if few uploads are in progress."""
    with _lock:
        packs = list(_packs_of_process)
    in_progress = sum(pack.upload is not None and not pack.upload.future.done() for pack in packs)
    open_packs = [pack for pack in packs if pack.upload is None and pack.acquired]
    if open_packs and in_progress < _FEW_UPLOADS:
        max(open_packs, key=lambda pack: pack.size).finish()


def _after_fork() -> None:
    global _lock, _packs_of_process
    _lock, _packs_of_process = threading.Lock(), weakref.WeakSet()


on_shortage(_upload_fullest)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Upload:
    """A `PackWriter` into memory, or into a mapped temporary file if the object is long.

    `finish` uploads the object whole, with `send`, and returns when it is stored.
    """

    def __init__(self, key: str, size: int, send: Callable[[Buffers], Coroutine[Any, Any, None]]) -> None:
        self.key = key
        self._send = send
        self._end = 0
        self._acquired = size if size <= IN_MEMORY else 0
        if self._acquired:
            acquire(self._acquired)
        self._data = np.empty(size, np.uint8) if size <= IN_MEMORY else _map_temporary_file(size)

    def append(self, buffers: BufferStream, size: int) -> int:
        offset = self._end
        for buffer in buffers:
            data = np.frombuffer(buffer, np.uint8)
            self._data[self._end : self._end + len(data)] = data
            self._end += len(data)
        return offset

    def finish(self) -> None:
        try:
            wait_io(self._send([self._data[i : i + _PART].data for i in range(0, self._end, _PART)]))
        finally:
            self.discard()

    def discard(self) -> None:
        self._data = np.empty(0, np.uint8)
        acquired, self._acquired = self._acquired, 0
        if acquired:
            release(acquired)


def _map_temporary_file(size: int) -> npt.NDArray[np.uint8]:
    with mapped_errors("write", tempfile.gettempdir()), tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, size)  # writing to a page without space kills the process
        return np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
