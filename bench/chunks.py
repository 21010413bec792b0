"""Work on arrays in chunks: what a process does for its contender, checked, and its cost.

Not measured are: importing the library, making values, and opening the volume that is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bench.contender import Contender, New, Point
from bench.cost import Cost, measured
from bench.workloads import GROUP, WIDTH, Index, array_name, counted

T = TypeVar("T")

_SMALL = 4  # chunks of the array `small`
_VOLUME = "volume"


class ChunkProcess:
    """A process that uses the arrays in a folder by a contender; see `bench.processes.Hosts`."""

    def __init__(self, number: int, count: int, make: type[Contender], folder: Path, work: Any = None) -> None:
        self._contender = make(number, count, folder, work)
        self._work = work

    # a volume

    def write(self, durable: bool) -> Cost:
        """Write all values of the volume into an empty folder."""
        return self._create(New({_VOLUME: self._work.make()}, self._work.chunks, self._work.codecs, durable))

    def read_all(self) -> Cost:
        """Read all values into a new array."""
        self._contender.open(_VOLUME)
        cost, values = _done(lambda: self._contender.read((slice(None),) * 3))
        for z in range(0, self._work.side, 37):
            self._check((slice(z, z + 1), slice(None), slice(None)), values[z : z + 1])
        return cost

    def read_boxes(self, indices: Sequence[Index]) -> Cost:
        """Read regions one after the other."""
        self._contender.open(_VOLUME)
        cost, results = _done(lambda: [self._contender.read(index) for index in indices])
        for index, values in zip(indices, results, strict=True):
            self._check(index, values)
        return cost

    def read_elements(self, points: Sequence[Point]) -> Cost:
        """Read elements by as many tasks at once."""
        self._contender.open(_VOLUME)
        cost, results = _done(lambda: self._contender.read_points(points))
        if list(map(int, results)) != [int(self._work.part(point)) for point in points]:
            raise ValueError("the elements read differ from those written")
        return cost

    def _check(self, index: Index, values: Any) -> None:
        if not np.array_equal(self._work.part(index), values):
            raise ValueError(f"the values read at {index} differ from those written")

    # many chunks, or many arrays

    def write_chunks(self, chunks: int) -> Cost:
        """Create a store with an array `big` of this number of chunks, and the array `small`."""
        arrays = {"big": counted(chunks * WIDTH), "small": counted(_SMALL * WIDTH)}
        return self._create(New(arrays, (WIDTH,)))

    def write_arrays(self, count: int) -> Cost:
        """Create a store with this number of arrays in groups."""
        arrays = {array_name(n): np.full(4, n) for n in range(count)}
        return self._create(New(arrays, None))

    def _create(self, new: New) -> Cost:
        return measured(lambda: self._contender.create(new))

    def read_one(self, name: str, index: int, value: int) -> Cost:
        """Read one element of the newest version of an array; the first call opens the store."""

        def read() -> int:
            self._contender.open(name)
            return int(self._contender.read((index,)))

        cost, found = _done(read)
        return _expected(cost, found, value, f"element {index} of {name}")

    def list_one(self, number: int) -> Cost:
        """List the arrays of the group of that number."""
        self._contender.prepare_to_list()
        paths = _paths(number)
        cost, names = _done(lambda: sorted(self._contender.names(paths[0].rpartition("/")[0])))
        return _expected(cost, names, sorted(path.rpartition("/")[2] for path in paths), f"group {number}")

    def restore_group(self, number: int) -> Cost:
        """Open the store and read the first element of each array of the group of that number."""
        cost, values = _done(lambda: list(map(int, self._contender.read_group(_paths(number)))))
        return _expected(cost, values, [*range(number * GROUP, (number + 1) * GROUP)], f"group {number}")

    def change(self, chunks: Sequence[int], value: int) -> Cost:
        """Set the elements of these chunks of `big` to the value, in a commit for each; return the cost of one."""
        values = np.full(WIDTH, value)

        def commits() -> None:
            for chunk in chunks:
                self._contender.write("big", (slice(chunk * WIDTH, (chunk + 1) * WIDTH),), values)

        return measured(commits).per(len(chunks))


def _done(call: Callable[[], T]) -> tuple[Cost, T]:
    results: list[T] = []
    cost = measured(lambda: results.append(call()))
    return cost, results[0]


def _expected(cost: Cost, found: Any, expected: Any, what: str) -> Cost:
    if found != expected:
        raise ValueError(f"{what} is {found}, not {expected}")
    return cost


def _paths(number: int) -> list[str]:
    return [array_name(n) for n in range(number * GROUP, (number + 1) * GROUP)]
