"""The transfer of packs from one storage to another, verified before they are written.

A few packs are copied concurrently. Each is read in pieces, a few ahead of the writer, and a piece is written only
after the checksums of the blocks that end in it have been verified. A pack with a damaged block does not appear at
the destination. The pieces of all packs share a fixed number of buffers.

Packs are created exclusively. Only a damaged pack at the destination is replaced, atomically, by verified bytes.
It is not deleted first, because a DELETE without a response may be retried after the replacement.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tstore.core.copying.destination import Destination
from tstore.core.copying.inventory import PackBlocks, PackCheck
from tstore.core.runtime.budget import scratch
from tstore.core.runtime.pool import run, run_to_end
from tstore.core.storage.base import PackReader, PackWriter, Storage
from tstore.core.storage.objects import Durability, PutMode
from tstore.errors import AlreadyExists, Corrupt, NotFound

__all__ = ["DamagedPack", "PackTransfer", "is_intact"]

_PIECE = 8 << 20  # bytes
_MAX_BUFFERS = 12
_MAX_AHEAD = 3  # pieces of one pack read ahead of its writer
_MAX_PACKS = 8  # packs copied concurrently

Bytes = npt.NDArray[np.uint8]
Pack = tuple[str, int, PackBlocks]
"""The key, size and blocks of a pack."""


class DamagedPack(Corrupt):
    """Raised when the block at `offset` of the pack `key` does not match its checksum."""

    def __init__(self, key: str, offset: int) -> None:
        self.key = key
        self.offset = offset
        super().__init__(f"{key}: checksum mismatch at byte {offset}")


async def is_intact(storage: Storage, key: str, size: int, blocks: PackBlocks) -> bool:
    """Return whether a pack, an object of `size` bytes, exists and all of its blocks match their checksums."""
    return size >= blocks.end and await run(_is_intact, storage, key, size, blocks.new_check())


def _is_intact(storage: Storage, key: str, size: int, check: PackCheck) -> bool:
    with scratch(_PIECE) as buffer:
        try:
            reader = storage.reader(key)
            for start in range(0, size, _PIECE):
                piece = buffer[: min(_PIECE, size - start)]
                reader.read_into(start, [piece], len(piece))
                if check.update(piece.data) is not None:
                    return False
        except (Corrupt, NotFound):
            return False
    return True


class PackTransfer:
    """The transfer of packs to a destination; packs in `damaged` are replaced there.

    `progress(done, total)` is called with the number of bytes copied so far and in total.
    """

    def __init__(
        self,
        source: Storage,
        destination: Destination,
        damaged: Container[str],
        total: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._source = source
        self._destination = destination
        self._target = destination.storage
        self._damaged = damaged
        self._progress = progress
        self._total = total
        self._done = 0
        self._created: list[str] = []
        self._buffers: list[Bytes] = []
        self._free_buffers = asyncio.Semaphore(_MAX_BUFFERS)

    async def run(self, packs: Sequence[Pack]) -> list[str]:
        """Copy packs; return the keys created, once they are durable. Raise `DamagedPack` for a wrong checksum."""
        self._progress(0, self._total)
        remaining = iter(packs)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_MAX_PACKS, len(packs))):
                    group.create_task(self._work(remaining))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        for folder in sorted({key.rpartition("/")[0] for key in self._created}):
            await self._target.flush(folder, Durability.FSYNC)
        return self._created

    async def _work(self, remaining: Iterator[Pack]) -> None:
        for pack in remaining:
            await self._copy(*pack)

    async def _copy(self, key: str, size: int, blocks: PackBlocks) -> None:
        reader = await run(self._source.reader, key)
        mode = PutMode.REPLACE if key in self._damaged else PutMode.CREATE
        writer = await run(self._target.upload, key, size, Durability.FSYNC, mode)
        check = blocks.new_check()
        ahead: collections.deque[asyncio.Task[Bytes]] = collections.deque()
        try:
            for start in range(0, size, _PIECE):
                while ahead and (len(ahead) == _MAX_AHEAD or self._free_buffers.locked()):
                    await self._write(writer, check, size, ahead)
                await self._free_buffers.acquire()
                ahead.append(asyncio.create_task(self._read(reader, start, min(_PIECE, size - start))))
            while ahead:
                await self._write(writer, check, size, ahead)
            with self._destination.advice(key, mode):
                await run(writer.finish)
        except AlreadyExists:
            await run(writer.discard)  # a concurrent copy created the pack
            return
        except BaseException:
            await run_to_end(self._abort(writer, ahead))
            raise
        self._created.append(key)

    async def _read(self, reader: PackReader, start: int, size: int) -> Bytes:
        """Read a piece into a buffer that the caller has acquired; release the buffer if the read fails."""
        buffer = self._buffers.pop() if self._buffers else np.empty(_PIECE, np.uint8)
        try:
            await run(reader.read_into, start, [buffer[:size]], size)
        except BaseException:
            self._release(buffer)
            raise
        return buffer

    async def _write(
        self, writer: PackWriter, check: PackCheck, size: int, ahead: collections.deque[asyncio.Task[Bytes]]
    ) -> None:
        """Write the oldest piece that was read ahead; raise `DamagedPack` if a checksum does not match."""
        buffer = await ahead[0]
        piece = buffer[: min(_PIECE, size - check.position)]
        try:
            await run(_append_checked, writer, check, piece)
        finally:
            ahead.popleft()
            self._release(buffer)
        self._done += len(piece)
        self._progress(self._done, self._total)

    async def _abort(self, writer: PackWriter, ahead: Iterable[asyncio.Task[Bytes]]) -> None:
        for result in await asyncio.gather(*ahead, return_exceptions=True):
            if not isinstance(result, BaseException):
                self._release(result)
        await run(writer.discard)

    def _release(self, buffer: Bytes) -> None:
        self._buffers.append(buffer)
        self._free_buffers.release()


def _append_checked(writer: PackWriter, check: PackCheck, piece: Bytes) -> None:
    damaged = check.update(piece.data)
    if damaged is not None:
        raise DamagedPack(writer.key, damaged)
    writer.append([piece.data], len(piece))
