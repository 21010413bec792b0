"""Hosts that commit one checkpoint to a bucket, under virtual time: tstore's own protocol on a model of GCS.

The model, for a bucket that nobody has used before:

1. A request is under way for a log-normal time: half of all reads (objects and lists, a page of 1,000 keys each)
   within 25 ms, half of all writes within 60 ms, 99 % within four times that. 412 and 404 are answers like others.
2. A bucket takes 1,000 writes and 5,000 reads a second, and another second's worth at once; an object of a name is
   replaced at most once a second. A request above that is answered by 429, and sent again after a pause with
   decorrelated jitter: between 0.1 s and three times the last one, at most 10 s.
3. A host has 256 MiB in objects of 64 MiB, which it sends all at once with 200 MB/s together, give or take a tenth
   (log-normal); its last byte has arrived when all of them are acknowledged.

So 4,096 hosts write 16,384 objects, for which the bucket takes 16 s: the hosts end one after another, as in a real
job. In the second kind of run there is nothing to send: all hosts begin at the same instant, and are held up by
the bucket's rates alone, also by their first reads of the log.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import numpy as np

import tstore
from tstore.errors import AlreadyExists, NotFound
from tstore.runtime.pool import inline
from tstore.runtime.world import World, inhabited
from tstore.simulation.storage import SharedObjects
from tstore.simulation.virtual import VirtualLoop
from tstore.storage.base import Storage
from tstore.storage.objects import Buffers, Capabilities, Durability, Entry, Keys, Page, PutMode, Tuning
from tstore.store import Store

READ, WRITE = 0.025, 0.060
SPREAD = math.log(4) / 2.326  # the 99th percentile is four times the median
READS, WRITES = 5000, 1000
PAGE = 1000
OBJECTS, OBJECT = 4, 64 << 20
BANDWIDTH, BANDWIDTH_SPREAD = 200e6, 0.1
PAUSE, LONGEST_PAUSE = 0.1, 10.0
WIDTH = 2048  # values of each host that are really there: enough to go into a pack


class Commit(NamedTuple):
    """One checkpoint of ``hosts``: virtual seconds from the last byte on, and requests after the uploads."""

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
    """So many requests a second, and as many more at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._left, self._at = rate, 0.0

    def takes(self, now: float) -> bool:
        self._left = min(self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


class Bucket(SharedObjects):
    """The objects, the rates, and the count of requests by kind."""

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

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        self.folders.setdefault(key.rpartition("/")[0], {})[key] = None
        if key.startswith("commits/"):
            self.visible = self.loop.time()

    def keys(self, prefix: str) -> Keys:
        """The keys below a prefix whose last folder, or a part of its name, the prefix names."""
        folder = prefix.rpartition("/")[0]
        found = [k for f, keys in self.folders.items() if f == folder or f.startswith(prefix) for k in keys]
        return sorted(k for k in found if k.startswith(prefix))

    async def request(self, kind: str, median: float, rate: _Rate, name: str = "") -> None:
        """One request on its way to the server, as often as it is refused."""
        pause = PAUSE
        while True:
            self.requests[kind] += 1
            await asyncio.sleep(0.5 * self.random.lognormvariate(math.log(median), SPREAD))
            now = self.loop.time()
            if now - self.replaced.get(name, -1.0) >= 1.0 and rate.takes(now):
                if name:
                    self.replaced[name] = now
                return
            self.refused += 1
            pause = min(LONGEST_PAUSE, self.random.uniform(PAUSE, 3 * pause))
            await asyncio.sleep(0.5 * READ + pause)

    async def answer(self, median: float) -> None:
        """The way back."""
        await asyncio.sleep(0.5 * self.random.lognormvariate(math.log(median), SPREAD))


class GcsStorage(Storage):
    """A host's way to the bucket."""

    url = "gs://model"
    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=True, in_place=True)
    tuning = Tuning(streams=32, batch=OBJECT, piece=OBJECT, gap=256 << 10)

    def __init__(self, bucket: Bucket, uploads: bool) -> None:
        self._bucket = bucket
        self._uploads = uploads
        self._packs: dict[str, bytearray] = {}

    async def get(self, key: str, most: int | None = None) -> bytes:
        await self._bucket.request("get", READ, self._bucket.reads)
        found = self._bucket.objects.get(key)
        await self._bucket.answer(READ)
        if found is None:
            raise NotFound(f"model: {key} does not exist")
        return found

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        raise NotFound(f"model: no pack is read, nor is {key}")

    async def head(self, key: str) -> Entry | None:
        await self._bucket.request("head", READ, self._bucket.reads)
        found = self._bucket.objects.get(key)
        await self._bucket.answer(READ)
        return None if found is None else Entry(key, len(found))

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
            await self._bucket.answer(WRITE)

    async def _replace(self, key: str, data: bytes) -> None:
        await self._bucket.request("replace", WRITE, self._bucket.writes, key)
        self._bucket.objects[key] = data
        await self._bucket.answer(WRITE)

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        if delimiter:
            yield Page([], [f"{prefix}{name}/" for name in await self.folders(prefix)])
        else:
            yield Page([Entry(key, 0) for key in await self.list(prefix)], [])

    async def list(self, prefix: str) -> Keys:
        for _ in range(max(1, -(-len(self._bucket.keys(prefix)) // PAGE))):
            await self._bucket.request("list", READ, self._bucket.reads)
            found = self._bucket.keys(prefix)
            await self._bucket.answer(READ)
        return found

    async def folders(self, prefix: str) -> Keys:
        await self._bucket.request("list", READ, self._bucket.reads)
        begun = [f"{folder}/" for folder in self._bucket.folders]
        await self._bucket.answer(READ)
        return sorted({f[len(prefix) :].partition("/")[0] for f in begun if f.startswith(prefix)})

    async def delete(self, key: str) -> None:
        await self._bucket.request("delete", WRITE, self._bucket.writes)
        self._bucket.objects.pop(key, None)
        await self._bucket.answer(WRITE)

    async def flush(self, prefix: str, durability: Durability) -> None:
        """Sends the packs, as the sizes in the model say."""
        if not prefix.startswith("txn/"):
            return
        bucket, packs = self._bucket, self._packs
        if not packs:
            return
        self._packs = {}
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
        await self._bucket.answer(WRITE)

    async def empty(self) -> bool:
        return not self._bucket.objects

    async def close(self) -> None:
        return None

    def writer(self, key: str, durability: Durability) -> _Pack:
        return _Pack(key, self._packs)


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


class _Host(World):
    """Time and chance of a host: those of the run."""

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
    """What one checkpoint of that many hosts costs; with ``uploads`` they end as their data does, else at once."""
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
        with inhabited(_Host(f"{seed} {number}")), inline(nothing):
            store = Store(GcsStorage(bucket, uploads), "model", "a")
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
