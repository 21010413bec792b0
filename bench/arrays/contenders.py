"""The interface of all contenders, the limit of the disk, and tstore."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.arrays.volume import Index, Layout, Values
from bench.save.peers import Raw
from bench.save.workloads import Workload
from bench.scale.cost import Cost, measured

BOXES, SINGLES, TASKS = 100, 1000, 1000


class Contender:
    """One process with the volume in memory; its methods that return a `Cost` check what they read."""

    title: ClassVar[str]
    durable: ClassVar[bool] = True
    """Whether it can make what it writes durable."""

    def __init__(self, number: int, count: int, folder: Path, layout: Layout, share: float) -> None:
        self.folder, self.layout = folder, layout
        self.values = layout.values()
        self.boxes = list(layout.boxes(max(1, int(BOXES * share))))
        self.singles = list(layout.single_chunks(max(1, int(SINGLES * share))))
        self.elements = list(layout.elements(max(1, int(TASKS * share))))
        self.prepare()

    def prepare(self) -> None:
        """Set up the library."""

    def write_all(self, durable: bool) -> Cost:
        """Create the store with the volume."""
        return measured(lambda: self.create(self.values, durable))

    def read_all(self) -> Cost:
        """Read the volume into a new array."""
        return self._checked([()], lambda: [self.read(())])

    def read_boxes(self) -> Cost:
        """Read boxes that begin anywhere, one after the other."""
        return self._checked(self.boxes, lambda: self.read_each(self.boxes))

    def read_singles(self) -> Cost:
        """Read single chunks, one after the other."""
        return self._checked(self.singles, lambda: self.read_each(self.singles))

    def read_elements(self) -> Cost:
        """Read single elements, all at once."""
        return self._checked(self.elements, lambda: self.read_at_once(self.elements))

    def read_strided(self) -> Cost:
        """Read every fourth element along each axis."""
        return self._checked([self.layout.strided], lambda: [self.read(self.layout.strided)])

    def _checked(self, indices: Sequence[Any], work: Any) -> Cost:
        read: list[Any] = []
        cost = measured(lambda: read.extend(work()))
        for index, values in zip(indices, read, strict=True):
            if not np.array_equal(self.values[index], values):
                raise ValueError(f"{index} has other values than were written")
        return cost

    def create(self, values: Values, durable: bool) -> None:
        """Create the store with the volume."""
        raise NotImplementedError

    def read(self, index: Index | tuple[()]) -> Any:
        """Return a part of the volume; the first call opens the store."""
        raise NotImplementedError

    def read_each(self, indices: Sequence[Index]) -> Sequence[Any]:
        """Return parts of the volume, read one after the other."""
        return [self.read(index) for index in indices]

    def read_at_once(self, indices: Sequence[tuple[int, ...]]) -> Sequence[Any]:
        """Return elements, each read by a call of its own, all at the same time."""
        raise NotImplementedError


class RawFile(Contender):
    """The bytes of the volume in one file, which is written and read by two threads."""

    title = "raw"

    def prepare(self) -> None:
        shape = self.layout.shape
        self.raw = Raw(Workload("volume", "volume", 1, (shape[0], shape[1] * shape[2] // 2), shape))

    def create(self, values: Values, durable: bool) -> None:
        self.raw.save(
            {self.raw.workload.names[0]: values.reshape(self.layout.side, -1).view("f4")}, self.folder, durable
        )

    def read(self, index: Index | tuple[()]) -> Any:
        [values] = self.raw.restore(self.folder).values()
        return values.view(np.uint16).reshape(self.layout.shape)[index]


class TStore(Contender):
    title = "tstore"

    def prepare(self) -> None:
        import tstore

        self.tstore = tstore
        self.runner = asyncio.Runner()

    def create(self, values: Values, durable: bool) -> None:
        async def work() -> None:
            store = await self.tstore.open(self.folder)
            async with store.transaction(durability="fsync" if durable else "none") as transaction:
                layout = self.layout
                array = await transaction.create_array("volume", layout.shape, "u2", layout.chunks, layout.codecs)
                await array.write(values)

        self.runner.run(work())

    @cached_property
    def array(self) -> Any:
        async def work() -> Any:
            store = await self.tstore.open(self.folder, "r")
            return await (await store.snapshot()).array("volume")

        return self.runner.run(work())

    def read(self, index: Index | tuple[()]) -> Any:
        return self.runner.run(self.array[index].read())

    def read_each(self, indices: Sequence[Index]) -> Sequence[Any]:
        array, values = self.array, []

        async def work() -> None:  # which returns None, since asyncio.Runner would format the values as text
            for index in indices:
                values.append(await array[index].read())

        self.runner.run(work())
        return values

    def read_at_once(self, indices: Sequence[tuple[int, ...]]) -> Sequence[Any]:
        array = self.array

        async def work() -> list[Any]:
            return list(await asyncio.gather(*(array[index].read() for index in indices)))

        return self.runner.run(work())
