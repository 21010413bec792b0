"""The work of a host process on a shared store: the interface of all contenders, the raw disk, and tstore.

A state is `COUNT` float32 arrays of `SIDE`×`SIDE`; a host has `SIDE` ÷ hosts rows of each. Stores are opened
before the clock starts, and each process first runs everything once with a state of `SMALL`×`SMALL`, because the
extra cost of the first save (threads, pages shared by a fork) is a cost of processes, not of stores.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.processes import until

COUNT, SIDE, SMALL = 16, 4096, 128
STATE = COUNT * SIDE * SIDE * 4
"""Bytes of the state: 1 GiB."""

NAMES = [f"w{i:02}" for i in range(COUNT)]
SLOTS = 1 << 20
"""The most small commits of one writer."""

_RECORD = 560  # bytes


class Saved(NamedTuple):
    """The monotonic times when a host's bytes were written and its call returned, and the argument of `merge`."""

    written: float
    ended: float
    payload: bytes = b""


class Committed(NamedTuple):
    """The latencies of one writer's small commits in seconds, and the number of retries."""

    seconds: list[float]
    retries: int


class Host:
    """One of `count` writers of a store in an existing folder."""

    title: ClassVar[str]
    merges: ClassVar[bool] = False  # host 0 merges the saved parts into one store
    fsync: ClassVar[bool] = True  # the store can fsync its writes
    tasks: ClassVar[bool] = True  # tasks of one process can commit concurrently

    def __init__(self, number: int, count: int, durable: bool) -> None:
        self.number, self.count, self.durable = number, count, durable
        self.parts: dict[str, npt.NDArray[np.float32]] = {}
        self.runner = asyncio.Runner()
        self.prepare()

    def prepare(self) -> None:
        """Set up the library."""

    def enter(self, folder: str, side: int = SIDE) -> None:
        """Use the store in `folder`, for a state of `side`×`side` arrays."""
        self.folder, self.side = folder, side
        self.rows = side // self.count
        self.mine = slice(self.number * self.rows, (self.number + 1) * self.rows)

    def generate(self) -> None:
        """Generate this host's part of the state."""
        block = np.random.default_rng(self.number).standard_normal((self.rows, self.side), dtype=np.float32)
        self.parts = {name: block + np.float32(i) for i, name in enumerate(NAMES)}

    def create(self, writers: int) -> None:
        """Create what the contender needs before the clock starts, for saves (`writers` 0) or small commits."""

    def open(self, attempt: int) -> None:
        """Open the store, for saves by this attempt."""

    def save(self, start: float, attempt: int) -> Saved:
        """Save this host's part of the state, beginning at the time `start`."""
        raise NotImplementedError

    def merge(self, payloads: Sequence[bytes]) -> float:
        """Merge the saved parts into one store, and return the time of completion."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise `ValueError` unless this host's part of the state reads back unchanged."""
        for name, part in self.parts.items():
            if not np.array_equal(self.read(name), part):
                raise ValueError(f"{name} of host {self.number} is not what was saved")

    def read(self, name: str) -> Any:
        """Return this host's rows of an array of the state."""
        raise NotImplementedError

    def commit_for(self, start: float, seconds: float, tasks: int) -> list[Committed]:
        """Make small commits from the time `start` on, at least one in each of `tasks` concurrent sequences."""

        async def all_of_them() -> list[Committed]:
            return await asyncio.gather(*[self._commit_until(n, start + seconds) for n in range(tasks)])

        until(start)
        return self.runner.run(all_of_them())

    async def _commit_until(self, task: int, moment: float) -> Committed:
        writer = self.number + task  # unique, since there is only one host or only one task for each host
        latencies: list[float] = []
        retries = 0
        while (before := time.monotonic()) < moment or not latencies:
            retries += await self.commit(writer, len(latencies))
            latencies.append(time.monotonic() - before)
        return Committed(latencies, retries)

    async def commit(self, writer: int, number: int) -> int:
        """Make the small commit of that number, and return the number of retries."""
        raise NotImplementedError

    def cpu(self) -> float:
        """Return the CPU seconds of this process so far, of all its threads."""
        return time.process_time()

    def lost(self, made: Sequence[int]) -> int:
        """Return the number of lost commits, given the number of acknowledged commits of each writer."""
        raise NotImplementedError


def value_of(writer: int, number: int) -> int:
    """Return the value that a writer's small commit of that number writes."""
    return 1 + writer * SLOTS + number


class Raw(Host):
    """The limit of the disk: each host writes a preallocated file."""

    title = "raw, a file per host"

    def save(self, start: float, attempt: int) -> Saved:
        until(start)
        fd = os.open(f"{self.folder}/{self.number}", os.O_RDWR | os.O_CREAT, 0o644)
        os.posix_fallocate(fd, 0, sum(part.nbytes for part in self.parts.values()))
        offset = 0
        for part in self.parts.values():
            for piece in np.array_split(part.reshape(-1).view(np.uint8), max(1, part.nbytes >> 23)):
                offset += os.pwrite(fd, piece, offset)
        if self.durable:
            os.fsync(fd)
        os.close(fd)
        now = time.monotonic()
        return Saved(now, now)

    def read(self, name: str) -> Any:
        values = self.rows * self.side
        at = 4 * values * NAMES.index(name)
        return np.fromfile(f"{self.folder}/{self.number}", np.float32, values, offset=at).reshape(-1, self.side)


class RawFiles(Host):
    """The limit of the disk for small commits: each is a file that is written, synced and linked to its name.

    The files are as long as a record of tstore with a chunk of 8 bytes.
    """

    title = "raw, a file per commit"

    def create(self, writers: int) -> None:
        Path(self.folder, "commits").mkdir()

    async def commit(self, writer: int, number: int) -> int:
        folder = f"{self.folder}/commits"
        path = f"{folder}/{writer:02}-{number:017}"
        temporary = f"{folder}/.{writer}-{number}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.pwrite(fd, value_of(writer, number).to_bytes(8, "little") * (_RECORD // 8), 0)
        if self.durable:
            os.fsync(fd)
        os.link(temporary, path)
        os.unlink(temporary)
        os.close(fd)
        if self.durable:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            os.fsync(fd)
            os.close(fd)
        return 0

    def lost(self, made: Sequence[int]) -> int:
        return sum(made) - len(os.listdir(f"{self.folder}/commits"))


class TStore(Host):
    """`tstore.save` on all hosts; transactions of one small chunk."""

    title = "tstore"

    def create(self, writers: int) -> None:
        import tstore

        async def make() -> None:
            async with await tstore.open(self.folder, "x") as store, store.transaction() as tx:
                for writer in range(writers):
                    await tx.create_array(f"writers/{writer}", (SLOTS,), "int64", chunks=(1,), sparse=True)

        self.runner.run(make())

    def open(self, attempt: int) -> None:
        import tstore

        self.store = self.runner.run(tstore.open(self.folder))
        self.written, storage = 0.0, self.store.log.storage
        flush = storage.flush

        async def timed_flush(prefix: str, durability: Any) -> None:
            await flush(prefix, durability)
            if prefix.startswith("txn/") and not self.written:
                self.written = time.monotonic()  # the chunks of this process are durable

        storage.flush = timed_flush

    def save(self, start: float, attempt: int) -> Saved:
        import tstore

        index, shape = (self.mine, slice(0, self.side)), (self.side, self.side)
        tree = {n: tstore.Shards(shape, "float32", [(index, part)]) for n, part in self.parts.items()}
        until(start)
        self.runner.run(
            tstore.save(
                self.store,
                tree,
                0,
                host=self.number,
                hosts=self.count,
                attempt=f"attempt{attempt}",
                durability="fsync" if self.durable else "none",
            )
        )
        return Saved(self.written, time.monotonic())

    def read(self, name: str) -> Any:
        async def read() -> Any:
            snapshot = await self.store.snapshot("step/0")
            return await (await snapshot.array(name))[self.mine].read()

        return self.runner.run(read())

    async def commit(self, writer: int, number: int) -> int:
        tx = self.store.transaction(durability="fsync" if self.durable else "none")
        async with tx:
            array = await tx.array(f"writers/{writer}")
            await array[number].write(value_of(writer, number))
        return len(getattr(tx, "retries", ()))

    def lost(self, made: Sequence[int]) -> int:
        import tstore

        async def count() -> int:
            async with await tstore.open(self.folder, "r") as store:
                snapshot = await store.snapshot()
                missing = 0
                for writer, commits in enumerate(made):
                    values = await (await snapshot.array(f"writers/{writer}"))[:commits].read()
                    missing += int((values != value_of(writer, 0) + np.arange(commits)).sum())
                return missing

        return self.runner.run(count())


class TStoreApart(TStore):
    """A store and a commit for each host: the same bytes as `TStore`, without coordination."""

    title = "tstore, a store per host"

    def enter(self, folder: str, side: int = SIDE) -> None:
        super().enter(f"{folder}/{self.number}", side)

    def save(self, start: float, attempt: int) -> Saved:
        import tstore

        until(start)
        durability: Any = "fsync" if self.durable else "none"
        self.runner.run(tstore.save(self.store, self.parts, 0, durability=durability))
        return Saved(self.written, time.monotonic())

    def create(self, writers: int) -> None:
        """Do nothing: `open` creates the store of each host."""

    def read(self, name: str) -> Any:
        async def read() -> Any:
            return await (await (await self.store.snapshot()).array(name)).read()

        return self.runner.run(read())
