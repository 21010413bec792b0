"""The interface of all contenders: a process that saves, writes and reads with one library, or with none.

A benchmark calls the methods that its rows need, by `bench.processes`; a contender has those of the rows that it
runs in. Each library has the settings that were fastest for it on a 2-core ext4 machine; its class documents them.
A contender knows the names and shapes of its workload in advance, so none pays for a listing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from bench.workloads import RAW, Arrays, Index, Tree, Values, flat, tenth

Piece = tuple[str, tuple[slice, ...], Values]
"""The name of an array, a region of it, and the values there."""
Point = tuple[int, ...]


class New(NamedTuple):
    """New arrays, each in chunks of one shape; in one chunk each, and in groups, if there is none."""

    arrays: Arrays
    chunk: Index | None
    codecs: list[dict[str, Any]] = RAW
    durable: bool = True


class Saved(NamedTuple):
    """The monotonic times when a host's bytes were written and its call returned, and the argument of `merge`."""

    written: float
    ended: float
    payload: bytes = b""


class Contender:
    """One of `count` processes that use a store in a folder together, each with its part of the arrays."""

    title: ClassVar[str]
    durabilities: ClassVar[tuple[bool, ...]] = (True, False)
    """Whether writes can be made with fsync (True) and without."""
    processes: ClassVar[int] = 1
    """The processes of a job that saves a state."""
    exact: ClassVar[bool] = True
    """A restore returns the saved values bit for bit."""
    restores: ClassVar[bool] = True
    """Restores are measured; they are not if they run the same code as those of another contender."""
    stagings: ClassVar[tuple[str, ...]] = ()
    """The staging modes of a save in the background; empty if there is no such save."""
    reshards: ClassVar[bool] = False
    """A state can be restored in another layout."""
    parts: ClassVar[bool] = False
    """A tenth of the state can be restored alone, and changed between saves."""
    merges: ClassVar[bool] = False
    """Host 0 merges the parts that the hosts saved into one store."""
    tasks: ClassVar[bool] = True
    """Tasks of one process can commit concurrently."""

    def __init__(
        self, number: int, count: int, folder: Path, work: Any = None, durable: bool = True, meeting: str = ""
    ) -> None:
        self.number, self.count, self.durable, self.meeting = number, count, durable, meeting
        self.enter(folder, work)
        self.prepare()

    def prepare(self) -> None:
        """Set up the library."""

    def enter(self, folder: Path, work: Any) -> None:
        """Use the store in a folder, for this host's part of a workload."""
        self.folder, self.work = folder, work
        for made in ("arrays", "state"):
            self.__dict__.pop(made, None)

    @cached_property
    def arrays(self) -> Arrays:
        """This host's part of the arrays of the workload."""
        return dict(self.work.items(self.number, self.count))

    @cached_property
    def runner(self) -> asyncio.Runner:
        """What runs the coroutines of this process, with one event loop for all."""
        return asyncio.Runner()

    # whole states

    @cached_property
    def state(self) -> Tree:
        """This process's part of the state."""
        return self.work.tree(self.arrays.items())  # type: ignore[no-any-return]

    def save(self, step: int, durable: bool) -> None:
        """Save the state."""
        raise NotImplementedError

    def begin_save(self, step: int, staging: str) -> Callable[[], Any]:
        """Start a save with fsync and, once the state may change, return a function that waits for its end."""
        raise NotImplementedError

    def restore(self, step: int, what: str) -> Tree:
        """Restore "same" as it was saved, in the "other" layout, or a "tenth" as it was saved."""
        raise NotImplementedError

    def values(self) -> Iterator[Values]:
        """Yield the values that this process holds, each once."""
        yield from (array for _, array in flat(self.state))

    def pieces(self, restored: Tree) -> Iterator[Piece]:
        """Yield the pieces of a restored state that this process holds."""
        for name, array in flat(restored):
            yield name, tuple(slice(0, n) for n in array.shape), array

    def change_tenth(self) -> None:
        """Change all values of the tenth of the state that can be restored alone."""
        for _, array in flat(tenth(self.state)):
            array += 1

    def wait_for_others(self) -> None:
        """Return when all processes of the job have called this."""

    # arrays in chunks

    def create(self, new: New) -> None:
        """Commit new arrays."""
        raise NotImplementedError

    def open(self, name: str) -> None:
        """Open the newest version of an array."""
        raise NotImplementedError

    def read(self, index: Index) -> Values:
        """Return the values of a region of the open array; NumPy's whole array for `(slice(None), …)`."""
        raise NotImplementedError

    def read_points(self, points: Sequence[Point]) -> Sequence[Any]:
        """Return elements of the open array that are read at once."""
        raise NotImplementedError

    def read_group(self, paths: Sequence[str]) -> list[Any]:
        """Return the first element of each array of one group."""
        values = []
        for path in paths:
            self.open(path)
            values.append(self.read((0,)))
        return values

    def prepare_to_list(self) -> None:
        """Import what only `names` needs."""

    def names(self, group: str) -> list[str]:
        """Return the names of the arrays of a group."""
        raise NotImplementedError

    def write(self, name: str, index: Index, values: Values) -> None:
        """Commit new values of a region of an array."""
        raise NotImplementedError

    # one store of many writers

    def begin(self, writers: int) -> None:
        """Create what is needed before the clock starts, for saves (no `writers`) or small commits; on host 0."""

    def join(self, attempt: int) -> None:
        """Open the store, for saves of this attempt."""

    def save_part(self, attempt: int) -> Saved:
        """Save this host's part of the state."""
        raise NotImplementedError

    def merge(self, payloads: Sequence[bytes]) -> float:
        """Merge the saved parts into one store, and return the time of completion."""
        raise NotImplementedError

    def read_part(self, name: str) -> Values:
        """Return this host's part of an array of the state."""
        raise NotImplementedError

    async def commit(self, writer: int, number: int) -> int:
        """Make the small commit of that number of a writer, and return the number of retries."""
        raise NotImplementedError

    def lost(self, made: Sequence[int]) -> int:
        """Return the number of lost commits, given the number of acknowledged commits of each writer."""
        raise NotImplementedError

    @property
    def mine(self) -> tuple[slice, ...]:
        """This host's region of each array."""
        return self.work.rows(self.number, self.count)  # type: ignore[no-any-return]


async def gathered(read: Callable[[Point], Awaitable[Any]], points: Sequence[Point]) -> list[Any]:
    """Return the results of reads by one task for each point."""

    async def task(point: Point) -> Any:
        return await read(point)

    return await asyncio.gather(*(asyncio.ensure_future(task(point)) for point in points))


SLOTS = 1 << 20
"""The most small commits of one writer."""


def value_of(writer: int, number: int) -> int:
    """Return the value that a writer's small commit of that number writes."""
    return 1 + writer * SLOTS + number
