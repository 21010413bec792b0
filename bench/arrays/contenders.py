"""The interface of all contenders, tstore and the raw limit.

A contender reads what its `write` has left in the folder, checks it against the volume's definition, and returns
the cost. Arrays are opened before a read is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
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


async def gathered(read: Callable[[Point], Awaitable[Any]], points: Sequence[Point]) -> list[Any]:
    """Return the results of reads by one task for each point."""

    async def task(point: Point) -> Any:
        return await read(point)

    return await asyncio.gather(*(asyncio.ensure_future(task(point)) for point in points))


def _check(volume: Volume, index: Index, values: Values) -> None:
    if not np.array_equal(volume.part(index), values):
        raise ValueError(f"the values read at {index} differ from those written")
