"""The interface of all contenders, tstore and the raw limit.

A contender reads what its `write` has left in the folder, checks it against the volume's definition, and returns
the cost. Arrays are opened before a read is measured.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.arrays.volume import Index, Values, Volume
from bench.cost import Cost, measured
from bench.save.peers import Raw, RawTwoFiles
from bench.save.workloads import Workload

Point = tuple[int, int, int]


class Contender:
    """One process that writes or reads the volume in a folder."""

    title: ClassVar[str]
    durable: ClassVar[bool] = True
    """Whether it can call fsync."""

    @classmethod
    def handles(cls, volume: Volume) -> bool:
        """Return whether it has anything to do with such a volume."""
        return True

    def __init__(self, number: int, count: int, folder: Path, volume: Volume) -> None:
        self.folder, self.volume = folder, volume
        self.prepare()

    def prepare(self) -> None:
        """Set up the library."""

    def write(self, durable: bool) -> Cost:
        """Write all values into an empty folder."""
        values = self.volume.make()
        return measured(lambda: self.create(values, durable))

    def read_all(self) -> Cost:
        """Read all values into a new array."""
        self.open()
        results: list[Values] = []
        cost = measured(lambda: results.append(self.read_whole()))
        for z in range(0, self.volume.side, 37):
            _check(self.volume, (slice(z, z + 1), slice(None), slice(None)), results[0][z : z + 1])
        return cost

    def read_boxes(self, indices: Sequence[Index]) -> Cost:
        """Read regions one after the other."""
        self.open()
        results: list[Values] = []
        cost = measured(lambda: results.extend(self.read(index) for index in indices))
        for index, values in zip(indices, results, strict=True):
            _check(self.volume, index, values)
        return cost

    def read_elements(self, points: Sequence[Point]) -> Cost:
        """Read elements by as many tasks at once."""
        self.open()
        results: list[Any] = []
        cost = measured(lambda: results.extend(self.read_points(points)))
        expected = [int(self.volume.part(point)) for point in points]
        if list(map(int, results)) != expected:
            raise ValueError("the elements read differ from those written")
        return cost

    def create(self, values: Values, durable: bool) -> None:
        """Write all values into an empty folder."""
        raise NotImplementedError

    def open(self) -> None:
        """Open the array."""
        raise NotImplementedError

    def read_whole(self) -> Values:
        """Return all values."""
        return self.read((slice(None),) * 3)

    def read(self, index: Index) -> Values:
        """Return the values of a region."""
        raise NotImplementedError

    def read_points(self, points: Sequence[Point]) -> Sequence[Any]:
        """Return elements that are read at once."""
        raise NotImplementedError


class TStore(Contender):
    title = "tstore"

    def prepare(self) -> None:
        import tstore
        import tstore.sync

        self.tstore, self.sync = tstore, tstore.sync
        importlib.import_module("numcodecs.zstd")  # which tstore imports at its first use

    def create(self, values: Values, durable: bool) -> None:
        store = self.sync.open(self.folder)
        with store.transaction(durability="fsync" if durable else "none") as tx:
            array = tx.create_array(
                "volume", values.shape, values.dtype, self.volume.chunks, codecs=self.volume.codecs
            )
            array.write(values)

    def open(self) -> None:
        self.array: Any = self.sync.open(self.folder, "r").snapshot().array("volume")

    def read(self, index: Index) -> Values:
        values: Values = self.array[index].read()
        return values

    def read_points(self, points: Sequence[Point]) -> Sequence[Any]:
        async def work() -> Sequence[Any]:
            array = await (await self.asynchronous.snapshot()).array("volume")
            return await gathered(lambda point: array[point].read(), points)

        return self.runner.run(work())

    def read_elements(self, points: Sequence[Point]) -> Cost:
        self.runner.run(self._open())
        return super().read_elements(points)

    @cached_property
    def runner(self) -> asyncio.Runner:
        return asyncio.Runner()

    async def _open(self) -> None:
        self.asynchronous: Any = await self.tstore.open(self.folder, "r")
        await (await self.asynchronous.snapshot()).array("volume")


class RawFile(Contender):
    """The limit of the machine: the same bytes in a plain file, without chunks; see `bench.save.peers.Raw`."""

    title = "raw, 1 file"
    files: ClassVar[type[Raw]] = Raw

    @classmethod
    def handles(cls, volume: Volume) -> bool:
        return volume.codec == "raw"

    def prepare(self) -> None:
        side = self.volume.side
        workload = Workload("volume", "volume", 1, (side, side, side // 2), (side, side, side // 2))
        self.raw = self.files(workload)

    def create(self, values: Values, durable: bool) -> None:
        self.raw.save({"w00000": values.view(np.float32)}, self.folder, durable)

    def open(self) -> None:
        """Do nothing."""

    def read_whole(self) -> Values:
        [values] = self.raw.restore(self.folder).values()
        return values.view(np.uint16)


class RawTwo(RawFile):
    title = "raw, 2 files"
    files = RawTwoFiles


class RawChunks(Contender):
    """The limit of the codec: each chunk is copied and encoded by one call, in two threads, into one file.

    Reads decode the chunks that they need, and copy from these. There are no checksums, and the index is a list.
    """

    title = "raw, chunks"

    def prepare(self) -> None:
        self.zstd: Any = importlib.import_module("numcodecs.zstd").Zstd(1) if self.volume.codec == "zstd" else None
        self.pool, self.local = ThreadPoolExecutor(2), threading.local()

    def create(self, values: Values, durable: bool) -> None:
        lock, index = threading.Lock(), np.zeros((self._count**3, 2), np.int64)
        fd, end = os.open(self.folder / "chunks", os.O_WRONLY | os.O_CREAT, 0o644), 0

        def write(number: int) -> None:
            nonlocal end
            chunk = self._memory()
            chunk[...] = values[self._region(number)]
            data: Any = chunk.reshape(-1).view(np.uint8) if self.zstd is None else self.zstd.encode(chunk)
            with lock:
                index[number] = end, len(data)
                end += len(data)
            os.pwrite(fd, data, index[number, 0])

        list(self.pool.map(write, range(self._count**3)))
        if durable:
            os.fsync(fd)
        os.close(fd)
        np.save(self.folder / "index.npy", index)

    def open(self) -> None:
        self.index = np.load(self.folder / "index.npy").tolist()
        self.fd = os.open(self.folder / "chunks", os.O_RDONLY)

    def read(self, index: Index) -> Values:
        axes = [range(self.volume.side)[i] for i in index]
        if any(axis.step != 1 for axis in axes):
            raise ValueError("a region has steps")
        values = np.empty([len(axis) for axis in axes], np.uint16)
        size = self.volume.chunk
        touched = itertools.product(*[range(axis.start // size, (axis.stop - 1) // size + 1) for axis in axes])

        def copy(at: Point) -> None:
            chunk = self._decoded((at[0] * self._count + at[1]) * self._count + at[2])
            low = [max(axis.start, i * size) for axis, i in zip(axes, at, strict=True)]
            high = [min(axis.stop, (i + 1) * size) for axis, i in zip(axes, at, strict=True)]
            ends = list(zip(axes, at, low, high, strict=True))
            values[tuple(slice(lo - axis.start, hi - axis.start) for axis, _, lo, hi in ends)] = chunk[
                tuple(slice(lo - i * size, hi - i * size) for _, i, lo, hi in ends)
            ]

        list(self.pool.map(copy, touched))
        return values

    def _decoded(self, number: int) -> Values:
        offset, length = self.index[number]
        chunk = self._memory()
        data = chunk.reshape(-1).view(np.uint8)
        encoded = data if self.zstd is None else self.local.encoded[:length]
        if os.preadv(self.fd, [encoded], offset) != length:
            raise OSError("short read")
        if self.zstd is not None:
            self.zstd.decode(encoded, data)
        return chunk

    def _memory(self) -> Values:
        """Return the memory of this thread for a chunk."""
        if not hasattr(self.local, "chunk"):
            self.local.chunk = np.empty(self.volume.chunks, np.uint16)
            self.local.encoded = np.empty(2 * self.local.chunk.nbytes, np.uint8)
        chunk: Values = self.local.chunk
        return chunk

    def _region(self, number: int) -> Index:
        size = self.volume.chunk
        at = np.unravel_index(number, (self._count,) * 3)
        return tuple(slice(i * size, (i + 1) * size) for i in map(int, at))

    @property
    def _count(self) -> int:
        """The number of chunks along each axis."""
        return self.volume.side // self.volume.chunk


async def gathered(read: Callable[[Point], Awaitable[Any]], points: Sequence[Point]) -> list[Any]:
    """Return the results of reads by one task for each point."""

    async def task(point: Point) -> Any:
        return await read(point)

    return await asyncio.gather(*(asyncio.ensure_future(task(point)) for point in points))


def _check(volume: Volume, index: Index, values: Values) -> None:
    if not np.array_equal(volume.part(index), values):
        raise ValueError(f"the values read at {index} differ from those written")
