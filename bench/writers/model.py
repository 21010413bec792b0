"""Hosts that commit one checkpoint to a bucket in virtual time: the protocol of tstore on a model of GCS.

The model, for a new bucket:

1. The latency of a request is log-normal. The median is 25 ms for reads (of objects, and of lists with pages of
   1,000 keys) and 60 ms for writes; the 99th percentile is four times that. Responses 412 and 404 have the same
   latency.
2. A bucket accepts 1,000 writes and 5,000 reads per second, with a burst of another second's worth; an object of
   one name can be replaced once per second. Requests above that get a 429, and are retried after a pause with
   decorrelated jitter: between 0.1 s and three times the last pause, at most 10 s.
3. A host has 256 MiB in objects of 64 MiB, which it sends concurrently at 200 MB/s in total, ± 10 % (log-normal).
   Its last byte has arrived when all of them are acknowledged.

So 4,096 hosts write 16,384 objects, for which the bucket takes 16 s: the hosts finish one after another, as in a
real job. The second kind of run has no data to send: all hosts begin at the same instant, and only the rates of
the bucket delay them, including their first reads of the log.
"""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np

import tstore
from tstore.core.log.marker import Marker
from tstore.core.runtime.pool import without_threads
from tstore.core.runtime.world import World, use_world
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import Buffers, Capabilities, Durability, Entry, Keys, Page, PutMode, Tuning
from tstore.core.store import Store
from tstore.errors import AlreadyExists, NotFound
from tstore.lab.simulation.storage import SharedObjects
from tstore.lab.simulation.virtual import VirtualLoop

READ, WRITE = 0.025, 0.060
SPREAD = math.log(4) / 2.326  # the 99th percentile is four times the median
READS, WRITES = 5000, 1000
PAGE = 1000
OBJECTS, OBJECT = 4, 64 << 20
BANDWIDTH, BANDWIDTH_SPREAD = 200e6, 0.1
PAUSE, LONGEST_PAUSE = 0.1, 10.0
MODEL = Marker(1, uuid.UUID(int=1))
WIDTH = 2048  # values that each host writes: enough for a pack


class Commit(NamedTuple):
    """One checkpoint: virtual seconds from the last byte to visibility and to the last return; requests.

    `refused` counts the requests that got a 429. `uploaded` is the time of the last byte.
    """

    hosts: int
    visible: float
    returned: float
    requests: dict[str, int]
    refused: int
    uploaded: float

    @property
    def per_host(self) -> float:
        return sum(self.requests.values()) / self.hosts


class _Rate:
    """A rate limit with a burst of one second's worth."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._left, self._at = rate, 0.0

    def admit(self, now: float) -> bool:
        self._left = min(self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Bucket(SharedObjects):
    """The bucket: its objects, its rates, and the number of requests by kind."""

    def __init__(self, seed: int) -> None:
        super().__init__({})
        self.reads, self.writes = _Rate(READS), _Rate(WRITES)
        self.requests: Counter[str] = Counter()
        self.refused = 0
        self.replaced: dict[str, float] = {}
        self.random = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.folders: dict[str, dict[str, None]] = {}
        self.last_byte = 0.0
        self.visible = 0.0

    def create(self, key: str, data: bytes, *, durable: bool = True) -> None:
        super().create(key, data, durable=durable)
        self.folders.setdefault(key.rpartition("/")[0], {})[key] = None
        if key.startswith("commits/"):
            self.visible = self.loop.time()

    def keys(self, prefix: str) -> Keys:
        """Return the sorted keys with a prefix."""
        folder = prefix.rpartition("/")[0]
        keys_below = [k for f, keys in self.folders.items() if f == folder or f.startswith(prefix) for k in keys]
        return sorted(k for k in keys_below if k.startswith(prefix))

    async def request(self, kind: str, median: float, rate: _Rate, name: str = "") -> None:
        """Send a request to the server, and retry until it is accepted."""
        pause = PAUSE
        while True:
            self.requests[kind] += 1
            await asyncio.sleep(0.5 * self.random.lognormvariate(math.log(median), SPREAD))
            now = self.loop.time()
            if now - self.replaced.get(name, -1.0) >= 1.0 and rate.admit(now):
                if name:
                    self.replaced[name] = now
                return
            self.refused += 1
            pause = min(LONGEST_PAUSE, self.random.uniform(PAUSE, 3 * pause))
            await asyncio.sleep(0.5 * READ + pause)

    async def respond(self, median: float) -> None:
        """Wait for the response to arrive."""
        await asyncio.sleep(0.5 * self.random.lognormvariate(math.log(median), SPREAD))


class GcsStorage(Storage):
    """The storage of a host."""

    url = "gs://model"
    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=True, native_io=True)
    tuning = Tuning(streams=32, batch=OBJECT, piece=OBJECT, gap=256 << 10)

    def __init__(self, bucket: Bucket, uploads: bool) -> None:
        self._bucket = bucket
        self._uploads = uploads
        self._finished: dict[str, bytearray] = {}

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        await self._bucket.request("get", READ, self._bucket.reads)
        data = self._bucket.objects.get(key)
        await self._bucket.respond(READ)
        if data is None:
            raise NotFound(f"model: there is no object {key}")
        return data

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        await self._bucket.request("read", READ, self._bucket.reads)
        data = self._bucket.objects.get(key)
        await self._bucket.respond(READ)
        if data is None:
            raise NotFound(f"model: there is no object {key}")
        for buffer in buffers:
            memoryview(buffer)[:] = data[offset : offset + len(buffer)]
            offset += len(buffer)

    async def head(self, key: str) -> Entry | None:
        await self._bucket.request("head", READ, self._bucket.reads)
        data = self._bucket.objects.get(key)
        await self._bucket.respond(READ)
        return None if data is None else Entry(key, len(data))

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        data = b"".join(buffers)
        await (self._create(key, data) if mode is PutMode.CREATE else self._replace(key, data))

    async def _create(self, key: str, data: bytes) -> None:
        await self._bucket.request("create", WRITE, self._bucket.writes)
        try:
            self._bucket.create(key, data)
        finally:
            await self._bucket.respond(WRITE)

    async def _replace(self, key: str, data: bytes) -> None:
        await self._bucket.request("replace", WRITE, self._bucket.writes, key)
        self._bucket.objects[key] = data
        await self._bucket.respond(WRITE)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        if delimiter:
            yield Page([], [f"{prefix}{name}/" for name in await self.folders(prefix)])
        else:
            yield Page([Entry(key, 0) for key in await self.list(prefix)], [])

    async def list(self, prefix: str) -> Keys:
        for _ in range(max(1, -(-len(self._bucket.keys(prefix)) // PAGE))):
            await self._bucket.request("list", READ, self._bucket.reads)
            keys = self._bucket.keys(prefix)
            await self._bucket.respond(READ)
        return keys

    async def folders(self, prefix: str) -> Keys:
        await self._bucket.request("list", READ, self._bucket.reads)
        folders = [f"{folder}/" for folder in self._bucket.folders]
        await self._bucket.respond(READ)
        return sorted({f[len(prefix) :].partition("/")[0] for f in folders if f.startswith(prefix)})

    async def delete(self, key: str) -> None:
        await self._bucket.request("delete", WRITE, self._bucket.writes)
        self._bucket.objects.pop(key, None)
        await self._bucket.respond(WRITE)

    async def flush(self, prefix: str, durability: Durability) -> None:
        """Upload the packs, which takes as long as the upload of objects of the modelled sizes."""
        if not prefix.startswith("txn/"):
            return
        bucket, packs = self._bucket, self._finished
        if not packs:
            return
        self._finished = {}
        if self._uploads:
            bandwidth = BANDWIDTH * bucket.random.lognormvariate(0, BANDWIDTH_SPREAD)
            seconds = OBJECT / (bandwidth / OBJECTS)
            await asyncio.gather(*[self._upload(seconds) for _ in range(OBJECTS)])
        for key, data in packs.items():
            bucket.create(key, bytes(data))
        bucket.last_byte = max(bucket.last_byte, bucket.loop.time())

    async def _upload(self, seconds: float) -> None:
        await self._bucket.request("upload", WRITE, self._bucket.writes)
        await asyncio.sleep(seconds)
        await self._bucket.respond(WRITE)

    async def empty(self) -> bool:
        return not self._bucket.objects

    async def close(self) -> None:
        return None

    def writer(self, key: str, durability: Durability) -> _Pack:
        return _Pack(key, self._finished)


class _Pack:
    def __init__(self, key: str, packs: dict[str, bytearray]) -> None:
        self.key = key
        self._packs = packs
        self._data = bytearray()

    def append(self, buffers: Any, size: int) -> int:
        offset = len(self._data)
        for buffer in buffers:
            self._data += buffer
        return offset

    def finish(self) -> None:
        self._packs[self.key] = self._data

    def discard(self) -> None:
        return None


class ModelHost(World):
    """The clock and the random numbers of a host."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        return 1.7e9 + self._loop.time()

    def token(self, size: int) -> str:
        return self._random.randbytes(size).hex()

    def uniform(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)


def commit(hosts: int, seed: int, *, uploads: bool) -> Commit:
    """Simulate one checkpoint. With `uploads`, hosts first send their data; else all commit at once."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_commit(hosts, seed, uploads))
    finally:
        loop.close()


async def _commit(hosts: int, seed: int, uploads: bool) -> Commit:
    bucket = Bucket(seed)
    loop = asyncio.get_running_loop()

    async def nothing() -> None:
        return None

    async def host(number: int) -> float:
        with use_world(ModelHost(f"{seed} {number}")), without_threads(nothing):
            store = Store(GcsStorage(bucket, uploads), MODEL, "a")
            part = [((slice(number, number + 1), slice(0, WIDTH)), np.full((1, WIDTH), number, np.float32))]
            tree = {"w": tstore.Shards((hosts, WIDTH), "float32", part)}
            await tstore.save(store, tree, 1, host=number, hosts=hosts, attempt="model", timeout=3600)
            return loop.time()

    ended = max(await asyncio.gather(*[host(n) for n in range(hosts)]))
    requests = {kind: n for kind, n in sorted(bucket.requests.items()) if kind != "upload"}
    if bucket.visible == 0:
        raise AlreadyExists("model: no commit was made")
    return Commit(
        hosts,
        bucket.visible - bucket.last_byte,
        ended - bucket.last_byte,
        requests,
        bucket.refused,
        bucket.last_byte,
    )
