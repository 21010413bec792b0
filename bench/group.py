"""One commit of many hosts with many chunks: of virtual hosts on the model of GCS of `bench.writers.model`, and of
real processes on a disk.

All virtual hosts run in this process. Each uploads its data and delivers its fragment without waiting for the
others; the last one to deliver finds all fragments and commits. What this process does from the last byte of data
on is the work of that host, the finisher, and of the few hosts that deliver at the same time.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from bench.cost import Cost, Meter
from bench.processes import until
from bench.workloads import WIDTH
from bench.writers.model import MODEL, Bucket, GcsStorage, ModelHost
from tstore.core.runtime.pool import without_threads
from tstore.core.runtime.world import use_world
from tstore.core.storage.objects import Durability, PutMode
from tstore.core.storage.wrapper import Request
from tstore.core.store import Store
from tstore.core.store import open as open_store
from tstore.lab.simulation.virtual import VirtualLoop

T = TypeVar("T")


class RealHost:
    """One of the processes that commit together; see `bench.processes.Hosts`."""

    def __init__(self, number: int, count: int, folder: Path) -> None:
        self._number, self._count = number, count
        self._runner = asyncio.Runner()
        self._store = self._runner.run(open_store(str(folder), "a"))
        self._transaction = self._store.transaction(name="processes", host=number, hosts=count, attempt="bench")

    def write(self, chunks: int) -> None:
        """Write this host's `chunks` chunks of 64 bytes, without delivering them."""

        async def work() -> None:
            array = await self._transaction.create_array(
                "big", (self._count * chunks * WIDTH,), "int64", chunks=(WIDTH,)
            )
            first = self._number * chunks * WIDTH
            await array[first : first + chunks * WIDTH].write(np.arange(first, first + chunks * WIDTH))

        self._runner.run(work())

    def commit(self, start: float) -> Cost:
        """Commit at `start`, together with the others; return the cost until all of it is visible to this host."""
        until(start)
        meter = Meter()
        self._runner.run(self._transaction.commit())
        cost = meter.cost()
        self._runner.run(self._check())
        return cost

    async def _check(self) -> None:
        """Raise ValueError unless the last element of the last host is there."""
        array = await (await self._store.snapshot()).array("big")
        last = array.shape[0] - 1
        if int(await array[last].read()) != last:
            raise ValueError(f"element {last} of the array is wrong")


class VirtualHosts:
    """A process that runs one commit; see `bench.processes.Hosts`."""

    def __init__(self, number: int, count: int) -> None:
        return

    def commit(self, hosts: int, chunks: int, seed: int) -> Cost:
        """Return the cost of the finisher, without the objects of the bucket that it creates.

        Each host writes `chunks` chunks of 64 bytes. `seconds` is the virtual time from the last byte of data to
        the visible commit; `written` counts the bytes of the new objects, and `read` those of the objects read.
        """
        loop = VirtualLoop()
        try:
            return loop.run_until_complete(_commit(hosts, chunks, seed))
        finally:
            loop.close()


class _Bucket(Bucket):
    """A bucket that measures what happens from the last byte of data of all hosts to the commit."""

    def __init__(self, hosts: int, seed: int) -> None:
        super().__init__(seed)
        self.cost: Cost | None = None
        self.moved = [0, 0]  # bytes read and written since the last byte of data
        self._uploading = hosts
        self._meter: Meter | None = None

    def uploaded(self) -> None:
        """Count a host whose data is in the bucket."""
        self._uploading -= 1
        if not self._uploading:
            gc.freeze()  # the objects of other hosts must not cost this one time
            self._meter, self.moved = Meter(), [0, 0]

    def add(self, key: str, data: bytes | bytearray, mode: PutMode = PutMode.CREATE) -> None:
        super().add(key, data, mode)
        self.moved[1] += len(data)
        if key.startswith("commits/") and self._meter is not None:
            cost, (read, written) = self._meter.cost(), self.moved
            memory, seconds = max(0.0, cost.memory - written), self.visible - self.last_byte
            self.cost = cost._replace(seconds=seconds, memory=memory, read=read, written=written)


class _Storage(GcsStorage):
    """The storage of a host, which reports when its data is in the bucket."""

    def __init__(self, bucket: _Bucket) -> None:
        super().__init__(bucket, uploads=True)
        self._watched = bucket
        self._uploaded = False

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        result = await super().around(request, call)
        if request.operation in ("get", "read"):
            self._watched.moved[0] += len(result) if isinstance(result, bytes) else request.size
        return result

    async def flush(self, prefix: str, durability: Durability) -> None:
        await super().flush(prefix, durability)
        if prefix.startswith("txn/") and not self._uploaded:
            self._uploaded = True
            self._watched.uploaded()


async def _commit(hosts: int, chunks: int, seed: int) -> Cost:
    bucket = _Bucket(hosts, seed)

    async def nothing() -> None:
        return None

    async def host(number: int) -> None:
        with use_world(ModelHost(f"{seed} {number}")), without_threads(nothing):
            store = Store(_Storage(bucket), MODEL, "a")
            tx = store.transaction(name="model", host=number, hosts=hosts, attempt="model")
            array = await tx.create_array("big", (hosts * chunks * WIDTH,), "int64", chunks=(WIDTH,))
            first = number * chunks * WIDTH
            await array[first : first + chunks * WIDTH].write(np.arange(first, first + chunks * WIDTH))
            await tx.deliver()

    await asyncio.gather(*[host(n) for n in range(hosts)])
    if bucket.cost is None:
        raise ValueError(f"{chunks} chunks a host are too few: they are not uploaded on their own")
    return bucket.cost
