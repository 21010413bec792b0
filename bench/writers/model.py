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
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

import numpy as np

import tstore
from tstore.core.log.marker import Marker
from tstore.core.runtime.pool import without_threads
from tstore.core.runtime.world import World, use_world
from tstore.core.storage.base import PackWriter
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Capabilities, Durability, Keys, PutMode, Tuning
from tstore.core.storage.wrapper import Request, Wrapper
from tstore.core.store import Store
from tstore.errors import AlreadyExists
from tstore.lab.simulation.virtual import VirtualLoop

READ, WRITE = 0.025, 0.060
SPREAD = math.log(4) / 2.326  # the 99th percentile is four times the median
READS, WRITES = 5000, 1000
PAGE = 1000
OBJECTS, OBJECT = 4, 64 << 20
BANDWIDTH, BANDWIDTH_SPREAD = 200e6, 0.1
PAUSE, LONGEST_PAUSE = 0.1, 10.0
T = TypeVar("T")
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


class Bucket(MemoryStorage):
    """The bucket: its objects, its rates, and the number of requests by kind."""

    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=True, native_io=True)
    tuning = Tuning(streams=32, batch=OBJECT, piece=OBJECT, gap=256 << 10)

    def __init__(self, seed: int) -> None:
        super().__init__(f"model-{uuid.uuid4()}")
        self.reads, self.writes = _Rate(READS), _Rate(WRITES)
        self.requests: Counter[str] = Counter()
        self.refused = 0
        self.replaced: dict[str, float] = {}
        self.random = random.Random(seed)
        self.loop = asyncio.get_running_loop()
        self.by_folder: dict[str, dict[str, None]] = {}
        self.last_byte = 0.0
        self.visible = 0.0

    def add(self, key: str, data: bytes | bytearray, mode: PutMode = PutMode.CREATE) -> None:
        super().add(key, data, mode)
        self.by_folder.setdefault(key.rpartition("/")[0], {})[key] = None
        if key.startswith("commits/"):
            self.visible = self.loop.time()

    def remove(self, key: str) -> None:
        super().remove(key)
        self.by_folder[key.rpartition("/")[0]].pop(key, None)

    async def list(self, prefix: str) -> Keys:
        """Return the sorted keys with a prefix: of few folders, since thousands of hosts list."""
        folder = prefix.rpartition("/")[0]
        below = [k for f, keys in self.by_folder.items() if f == folder or f.startswith(prefix) for k in keys]
        return sorted(k for k in below if k.startswith(prefix))

    async def folders(self, prefix: str) -> Keys:
        folders = [f"{folder}/" for folder in self.by_folder]
        return sorted({f[len(prefix) :].partition("/")[0] for f in folders if f.startswith(prefix)})

    async def request(self, kind: str, median: float, rate: _Rate, name: str = "") -> None:
        """Send a request to the server, and retry until it is accepted."""
        pause = PAUSE
        while True:
            self.requests[kind] += 1
            await asyncio.sleep(self.half(median))
            now = self.loop.time()
            if now - self.replaced.get(name, -1.0) >= 1.0 and rate.admit(now):
                if name:
                    self.replaced[name] = now
                return
            self.refused += 1
            pause = min(LONGEST_PAUSE, self.random.uniform(PAUSE, 3 * pause))
            await asyncio.sleep(0.5 * READ + pause)

    def half(self, median: float) -> float:
        """Return the seconds until a request has arrived, or its response."""
        return 0.5 * self.random.lognormvariate(math.log(median), SPREAD)


class GcsStorage(Wrapper):
    """The storage of a host: its requests take their time."""

    def __init__(self, bucket: Bucket, uploads: bool) -> None:
        super().__init__(bucket)
        self._bucket = bucket
        self._uploads = uploads

    async def around(self, request: Request, call: Callable[[], Awaitable[T]]) -> T:
        kind, bucket = _KINDS.get(request.operation, request.operation), self._bucket
        if kind == "":
            return await call()
        writes = kind in ("create", "replace", "delete")
        median, rate = (WRITE, bucket.writes) if writes else (READ, bucket.reads)
        await bucket.request(kind, median, rate, request.key if kind == "replace" else "")
        try:
            result = await call()
        finally:
            await asyncio.sleep(bucket.half(median))
        if request.operation == "list" and isinstance(result, list):
            for _ in range(PAGE, len(result), PAGE):
                await bucket.request(kind, median, rate)
                await asyncio.sleep(bucket.half(median))
        return result

    async def flush(self, prefix: str, durability: Durability) -> None:
        """Upload the packs, which takes as long as the upload of objects of the modelled sizes."""
        bucket = self._bucket
        if not prefix.startswith("txn/") or not self.finished:
            return
        self.finished = False
        if self._uploads:
            bandwidth = BANDWIDTH * bucket.random.lognormvariate(0, BANDWIDTH_SPREAD)
            seconds = OBJECT / (bandwidth / OBJECTS)
            await asyncio.gather(*[self._upload(seconds) for _ in range(OBJECTS)])
        bucket.last_byte = max(bucket.last_byte, bucket.loop.time())

    finished = False

    def writer(self, key: str, durability: Durability) -> PackWriter:
        self.finished = True
        return super().writer(key, durability)

    async def _upload(self, seconds: float) -> None:
        await self._bucket.request("upload", WRITE, self._bucket.writes)
        await asyncio.sleep(seconds)
        await asyncio.sleep(self._bucket.half(WRITE))


_KINDS = {"folders": "list", "age": "list", "empty": "", "enclosing": "", "sync": "", "sweep": ""}
"""What operations are to the bucket; those without a name are no requests."""


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
