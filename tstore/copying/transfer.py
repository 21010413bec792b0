"""Packs on their way from one backend to another.

A few packs move at once. Each is read in pieces, some ahead of what is written, and a piece is written only after
the blocks that end in it were found to have their checksums. A pack of which a block is wrong does not appear at
all. The pieces of all packs together have a fixed number of buffers.

No backend replaces an object in one step. So a damaged pack of the destination is deleted only once the whole of
its replacement was read, checked, and written to where it is kept until it is finished.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tstore.copying.destination import Destination
from tstore.copying.inventory import PackBlocks, PackCheck
from tstore.errors import AlreadyExists, Corrupt, NotFound
from tstore.runtime.budget import scratch
from tstore.runtime.pool import run, uncancelled
from tstore.storage.base import PackReader, PackWriter, Storage
from tstore.storage.objects import Durability

__all__ = ["DamagedPack", "Shipment", "is_sound"]

_PIECE = 8 << 20
_BUFFERS = 12
_AHEAD = 3
_PACKS = 8

Buffer = npt.NDArray[np.uint8]
Pack = tuple[str, int, PackBlocks]
"""Its key, its size, and the checks of its blocks."""


class DamagedPack(Corrupt):
    """A block of the pack `key`, at `offset`, is not as it was committed."""

    def __init__(self, key: str, offset: int) -> None:
        self.key = key
        self.offset = offset
        super().__init__(f"{key}: checksum mismatch at byte {offset}")


async def is_sound(backend: Storage, key: str, size: int, blocks: PackBlocks) -> bool:
    """Whether all blocks of the pack have their checksums in the object of that size."""
    return size >= blocks.end and await run(_is_sound, backend, key, size, blocks.check())


def _is_sound(backend: Storage, key: str, size: int, check: PackCheck) -> bool:
    with scratch(_PIECE) as buffer:
        try:
            reader = backend.reader(key)
            for start in range(0, size, _PIECE):
                piece = buffer[: min(_PIECE, size - start)]
                reader.read_into(start, [piece], len(piece))
                if check.take(piece.data) is not None:
                    return False
        except (Corrupt, NotFound):
            return False
    return True


class Shipment:
    """The way of packs to a destination; `progress(done, total)` is told of their bytes.

    Packs in `damaged` take the place of what is at the destination.
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
        self._target = destination.backend
        self._damaged = damaged
        self._progress = progress
        self._total = total
        self._done = 0
        self._moved: list[str] = []
        self._buffers: list[Buffer] = []
        self._free = asyncio.Semaphore(_BUFFERS)

    async def move(self, packs: Sequence[Pack]) -> list[str]:
        """The keys that were created; on return they are durable. Raises `DamagedPack`."""
        self._progress(0, self._total)
        waiting = iter(packs)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(_PACKS, len(packs))):
                    group.create_task(self._work(waiting))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        for folder in sorted({key.rpartition("/")[0] for key in self._moved}):
            await self._target.flush(folder, Durability.FSYNC)
        return self._moved

    async def _work(self, waiting: Iterator[Pack]) -> None:
        for pack in waiting:
            await self._move(*pack)

    async def _move(self, key: str, size: int, blocks: PackBlocks) -> None:
        reader = await run(self._source.reader, key)
        writer = await run(self._target.upload, key, size, Durability.FSYNC)
        check = blocks.check()
        ahead: collections.deque[asyncio.Task[Buffer]] = collections.deque()
        try:
            for start in range(0, size, _PIECE):
                while ahead and (len(ahead) == _AHEAD or self._free.locked()):
                    await self._write(writer, check, size, ahead)
                await self._free.acquire()
                ahead.append(asyncio.create_task(self._read(reader, start, min(_PIECE, size - start))))
            while ahead:
                await self._write(writer, check, size, ahead)
            if key in self._damaged:
                await self._destination.remove_damaged(key)
            await run(writer.finish)
        except AlreadyExists:
            await run(writer.discard)  # another copy was first
            return
        except BaseException:
            await uncancelled(self._give_up(writer, ahead))
            raise
        self._moved.append(key)

    async def _read(self, reader: PackReader, start: int, size: int) -> Buffer:
        """A buffer with the piece; it was drawn from `_free`, and is given back here if that fails."""
        buffer = self._buffers.pop() if self._buffers else np.empty(_PIECE, np.uint8)
        try:
            await run(reader.read_into, start, [buffer[:size]], size)
        except BaseException:
            self._give_back(buffer)
            raise
        return buffer

    async def _write(
        self, writer: PackWriter, check: PackCheck, size: int, ahead: collections.deque[asyncio.Task[Buffer]]
    ) -> None:
        """Writes the piece that was read first, if it is as it should be."""
        buffer = await ahead[0]
        piece = buffer[: min(_PIECE, size - check.at)]
        try:
            await run(_put, writer, check, piece)
        finally:
            ahead.popleft()
            self._give_back(buffer)
        self._done += len(piece)
        self._progress(self._done, self._total)

    async def _give_up(self, writer: PackWriter, ahead: Iterable[asyncio.Task[Buffer]]) -> None:
        for found in await asyncio.gather(*ahead, return_exceptions=True):
            if not isinstance(found, BaseException):
                self._give_back(found)
        await run(writer.discard)

    def _give_back(self, buffer: Buffer) -> None:
        self._buffers.append(buffer)
        self._free.release()


def _put(writer: PackWriter, check: PackCheck, piece: Buffer) -> None:
    wrong = check.take(piece.data)
    if wrong is not None:
        raise DamagedPack(writer.key, wrong)
    writer.append([piece.data], len(piece))
