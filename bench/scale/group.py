"""One commit of many virtual hosts with many chunks, on the model of GCS of `bench.writers.model`.

All hosts run in this process. Each uploads its data and delivers its fragment without waiting for the others; the
last one to deliver finds all fragments and commits. What this process does from the last byte of data on is the
work of that host, the finisher, and of the few hosts that deliver at the same time.
"""

from __future__ import annotations

import asyncio
import gc

import numpy as np

from bench.scale.contenders import WIDTH
from bench.scale.cost import Cost, Meter
from bench.writers.model import Bucket, GcsStorage, ModelHost
from tstore.runtime.pool import without_threads
from tstore.runtime.world import use_world
from tstore.simulation.virtual import VirtualLoop
from tstore.storage.objects import Buffers, Durability
from tstore.store import Store


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

    def create(self, key: str, data: bytes, *, durable: bool = True) -> None:
        super().create(key, data, durable=durable)
        self.moved[1] += len(data)
        if key.startswith("commits/") and self._meter is not None:
            cost, (read, written) = self._meter.cost(), self.moved
            self.cost = cost._replace(
                seconds=self.visible - self.last_byte,
                memory=max(0.0, cost.memory - written),
                read=read,
                written=written,
            )


class _Storage(GcsStorage):
    """The storage of a host, which reports when its data is in the bucket."""

    def __init__(self, bucket: _Bucket) -> None:
        super().__init__(bucket, uploads=True)
        self._watched = bucket
        self._uploaded = False

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        data = await super().get(key, max_size)
        self._watched.moved[0] += len(data)
        return data

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        await super().read(key, offset, buffers, size)
        self._watched.moved[0] += size

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
            store = Store(_Storage(bucket), "model", "a")
            tx = store.transaction(name="model", host=number, hosts=hosts, attempt="model")
            array = await tx.create_array("big", (hosts * chunks * WIDTH,), "int64", chunks=(WIDTH,))
            first = number * chunks * WIDTH
            await array[first : first + chunks * WIDTH].write(np.arange(first, first + chunks * WIDTH))
            await tx.deliver()

    await asyncio.gather(*[host(n) for n in range(hosts)])
    if bucket.cost is None:
        raise ValueError(f"{chunks} chunks a host are too few: they are not uploaded on their own")
    return bucket.cost
