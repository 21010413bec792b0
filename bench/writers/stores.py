"""One store that many hosts write, what each does in its process: what is asked of every way, and tstore's.

A state is ``COUNT`` float32 arrays of ``SIDE``×``SIDE``; a host holds ``SIDE`` ÷ hosts rows of each. All is opened
before the clock starts, and each process has done the same once with a state of ``SMALL``×``SMALL``: what a save
takes the first time (threads, pages that a fork shares) is a question of processes, not of stores.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.writers.processes import until

COUNT, SIDE, SMALL = 16, 4096, 128
STATE = COUNT * SIDE * SIDE * 4
"""Bytes of the state: 1 GiB."""

NAMES = [f"w{i:02}" for i in range(COUNT)]
SLOTS = 1 << 20
"""Small commits that one writer may make."""


class Saved(NamedTuple):
    """When, by the monotonic clock, a host's bytes were written and its call returned; what `merge` needs."""

    written: float
    ended: float
    payload: bytes = b""


class Committed(NamedTuple):
    """What one writer's small commits took, in seconds, and how often something was done again."""

    seconds: list[float]
    retries: int


class Host:
    """One of ``count`` writers of a store in a folder that exists."""

    title: ClassVar[str]
    merges: ClassVar[bool] = False  # host 0 makes one store of what the hosts saved
    fsync: ClassVar[bool] = True  # the store can be made to force its writes to the disk
    tasks: ClassVar[bool] = True  # many tasks of one process can commit at once

    def __init__(self, number: int, count: int, durable: bool) -> None:
        self.number, self.count, self.durable = number, count, durable
        self.parts: dict[str, npt.NDArray[np.float32]] = {}
        self.runner = asyncio.Runner()
        self.prepare()

    def prepare(self) -> None:
        """Sets up the library."""

    def enter(self, folder: str, side: int = SIDE) -> None:
        """Turns to the store in ``folder``, for a state of arrays of that side."""
        self.folder, self.side = folder, side
        self.rows = side // self.count
        self.mine = slice(self.number * self.rows, (self.number + 1) * self.rows)

    def hold(self) -> None:
        """Takes this host's part of the state into memory."""
        block = np.random.default_rng(self.number).standard_normal((self.rows, self.side), dtype=np.float32)
        self.parts = {name: block + np.float32(i) for i, name in enumerate(NAMES)}

    def create(self, writers: int) -> None:
        """Makes what must be there before the clock starts, for saves (``writers`` 0) or small commits."""

    def open(self, attempt: int) -> None:
        """Opens what `create` made; for saves, as the given attempt needs it."""

    def save(self, start: float, attempt: int) -> Saved:
        """Saves this host's part of the state, from the moment ``start`` on, as part of one state."""
        raise NotImplementedError

    def merge(self, payloads: Sequence[bytes]) -> float:
        """Makes one store of what the hosts saved; the moment when it is done."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises ValueError unless this host's part of the state reads back as it is held."""
        for name, part in self.parts.items():
            if not np.array_equal(self.read(name), part):
                raise ValueError(f"{name} of host {self.number} is not what was saved")

    def read(self, name: str) -> Any:
        """This host's rows of an array of the state."""
        raise NotImplementedError

    def commit_for(self, start: float, seconds: float, tasks: int) -> list[Committed]:
        """Makes small commits from ``start`` on, in ``tasks`` at once, one after the other in each."""

        async def all_of_them() -> list[Committed]:
            return await asyncio.gather(*[self._commit_until(n, start + seconds) for n in range(tasks)])

        until(start)
        return self.runner.run(all_of_them())

    async def _commit_until(self, task: int, moment: float) -> Committed:
        writer = self.number + task  # either one host or one task
        taken: list[float] = []
        retries = 0
        while (before := time.monotonic()) < moment:
            retries += await self.commit(writer, len(taken))
            taken.append(time.monotonic() - before)
        return Committed(taken, retries)

    async def commit(self, writer: int, number: int) -> int:
        """Makes a writer's small commit of that number; returns how often something was done again."""
        raise NotImplementedError

    def lost(self, made: Sequence[int]) -> int:
        """How many small commits are not there, of as many as were acknowledged to each writer."""
        raise NotImplementedError


def value_of(writer: int, number: int) -> int:
    """What a writer's small commit of that number writes."""
    return 1 + writer * SLOTS + number


class Raw(Host):
    """The limit: each host its own file, preallocated, and nothing else."""

    title = "raw, a file for each host"

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


class TStore(Host):
    """`tstore.save` by all hosts; transactions of one small chunk."""

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
        self.written, backend = 0.0, self.store.log.backend
        flush = backend.flush

        async def settled(prefix: str, durability: Any) -> None:
            await flush(prefix, durability)
            if prefix.startswith("txn/") and not self.written:
                self.written = time.monotonic()  # this process has written its chunks, and made them durable

        backend.flush = settled

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
    """Each host its own store and its own commit: the same bytes without any coordination."""

    title = "tstore, a store for each host"

    def enter(self, folder: str, side: int = SIDE) -> None:
        super().enter(f"{folder}/{self.number}", side)

    def save(self, start: float, attempt: int) -> Saved:
        import tstore

        until(start)
        durability: Any = "fsync" if self.durable else "none"
        self.runner.run(tstore.save(self.store, self.parts, 0, durability=durability))
        return Saved(self.written, time.monotonic())

    def create(self, writers: int) -> None:
        """Nothing: each host makes its own."""

    def read(self, name: str) -> Any:
        async def read() -> Any:
            return await (await (await self.store.snapshot()).array(name)).read()

        return self.runner.run(read())
