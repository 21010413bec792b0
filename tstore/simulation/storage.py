"""Object storage as a simulation sees it: one shared set of objects, and hosts whose requests to it go wrong.

Every request takes a while, drawn from the host's random numbers; then one of these may happen to it:

    refused      not done, and the response says so (429 or 503): `Unavailable`
    lost         never arrives; the host gives up waiting: `Unavailable`
    unanswered   done, but the response is lost: `Unavailable`
    late         the host gives up waiting, and it is done only afterwards: `Unavailable`, and a surprise
    repeated     done twice, the second time later, as by a network that duplicates
    retried      done, the response lost, and repeated below the protocol: the host is told that its new object
                 exists already

After such a fault a host may get no response to anything for a while. Listings may be old: they lack new objects
and still show deleted ones; so may sizes. A pack appears to others when it is finished, or never, and has a
limited size. `latest` may be lost or be replaced late. A host may crash before, during or after any request, and
then never does anything again; or stand still, longer than others wait for it.

Visible objects need not be durable: a name is durable once its folder was forced, which a create does last, and
the bytes of a pack are once its writer has flushed it. A power failure (`SharedObjects.after_power_failure`) takes
the rest away. A `strict` storage is one behind a server: it accepts no record before the one below it exists."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Mapping

from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, Unavailable
from tstore.simulation.host import Host
from tstore.storage.base import Storage
from tstore.storage.objects import (
    Buffers,
    BufferStream,
    Capabilities,
    Durability,
    Entry,
    Page,
    PutMode,
    Tuning,
    bound,
    overlong,
)

__all__ = ["HostStorage", "SharedObjects"]

_CREATED_WRONG = ("refused", "lost", "unanswered", "late", "repeated", "retried")
_WAIT = 2.0  # seconds that a host waits for a response
_OLD = 2.0  # seconds by which listings and sizes may be late
_CAPACITIES = (math.inf, math.inf, 6_000, 12_000)  # the sizes of a host's packs in bytes


class SharedObjects:
    """The objects that all hosts share."""

    def __init__(self, objects: Mapping[str, bytes], name: str = "storage", *, strict: bool = False) -> None:
        self.name = name
        self.objects = dict(objects)
        self.born: dict[str, float] = {}
        self.deleted: dict[str, tuple[float, bytes]] = {}  # when, and its bytes
        self.volatile: set[str] = set()  # names, or bytes, that a power failure takes away
        self.loose: set[str] = set()  # those of them whose bytes are not durable either
        self.strict = strict

    def create(self, key: str, data: bytes, *, forced: bool = True) -> None:
        """Create an object, at the moment when the server does it; its bytes are durable if `forced`.

        Raise `AlreadyExists` if the key is taken.
        """
        if key in self.objects:
            raise AlreadyExists(f"simulated: {key} exists already")
        folder, _, number = key.partition("/")
        below = f"{folder}/{int(number) - 1:020d}" if self.strict and folder == "commits" else ""
        if below and int(number) > 1 and below not in self.objects:
            raise InvalidArgument(f"simulated: {key} can't be created before the one below it")
        self.objects[key] = data
        self.born[key] = asyncio.get_running_loop().time()
        self.volatile.add(key)
        if not forced:
            self.loose.add(key)

    def force(self, folder: str) -> None:
        """Make the names durable of all objects in the folder whose bytes are."""
        self.volatile -= {key for key in self.volatile - self.loose if key.startswith(f"{folder}/")}

    def sync(self) -> None:
        """Make everything durable."""
        self.volatile.clear()
        self.loose.clear()

    def delete(self, key: str) -> None:
        """Remove an object, if it exists."""
        if key in self.objects:
            self.deleted[key] = asyncio.get_running_loop().time(), self.objects.pop(key)
        self.volatile.discard(key)
        self.loose.discard(key)

    def photograph(self) -> SharedObjects:
        """Return a copy of it as of now."""
        copied = SharedObjects(self.objects, self.name, strict=self.strict)
        copied.born, copied.deleted = dict(self.born), dict(self.deleted)
        copied.volatile, copied.loose = set(self.volatile), set(self.loose)
        return copied

    def after_power_failure(self, chance: random.Random) -> SharedObjects:
        """Return what a power failure leaves: without some names that were not durable, with some deleted ones.

        Objects whose bytes are not durable are lost: other transactions may survive in part.
        """
        lost = {key for key in sorted(self.volatile) if key in self.loose or chance.random() < 0.8}
        back = {key: data for key, (_, data) in self.deleted.items() if chance.random() < 0.2}
        kept = {key: data for key, data in self.objects.items() if key not in lost}
        if chance.random() < 0.5:
            kept.pop("latest", None)
        return SharedObjects({**back, **kept}, self.name, strict=self.strict)


class HostStorage(Storage):
    """The storage as one host sees it."""

    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=True, in_place=True)

    def __init__(self, storage: SharedObjects, host: Host) -> None:
        self.url = f"simulated://{storage.name}"
        self.storage = storage
        self.host = host
        self.capacity = host.random.choice(_CAPACITIES)
        streams = 1 if host.random.random() < 0.5 else 64  # one request after the other, or many at once
        self._tuning = Tuning(streams, batch=1 << 20, piece=1 << 20, gap=0)
        self._open: dict[str, bytearray] = {}  # packs of this host that are not finished
        self._unflushed: set[str] = set()  # packs of this host that are to become durable
        self._loop = asyncio.get_running_loop()

    @property
    def tuning(self) -> Tuning:
        """See `Storage.tuning`."""
        return self._tuning

    async def get(self, key: str, most: int | None = None) -> bytes:
        """See `Storage.get`."""
        await self.host.step()
        found = self.storage.objects.get(key)
        await self._respond(f"get {key}")
        if found is None:
            raise NotFound(f"simulated: {key} does not exist")
        if len(found) > (most := bound(key, most, found)):
            raise overlong(f"{self.url}: {key}", most)
        return found

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        """See `Storage.read`."""
        self.reader(key).read_into(offset, buffers, size)

    async def head(self, key: str) -> Entry | None:
        """Return the entry of an object, or as it was a moment ago."""
        await self.host.step()
        found = self.storage.objects.get(key)
        if self.host.chance(self.host.rates.stale_heads):
            then = self._loop.time() - self.host.random.uniform(0, _OLD)
            when, before = self.storage.deleted.get(key, (-math.inf, None))
            found = before if when > then else None if self.storage.born.get(key, 0) > then else found
        await self._respond(f"head {key}")
        return None if found is None else Entry(key, len(found))

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        """See `Storage.put`."""
        data = b"".join(buffers)
        await (self._create(key, data, durability) if mode is PutMode.CREATE else self._replace(key, data))

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """Yield one page, at times without the newest keys, or with those that were deleted last."""
        await self.host.step()
        storage, latest = self.storage, self._loop.time()
        if self.host.chance(self.host.rates.stale_lists):
            latest -= self.host.random.uniform(0, _OLD)
        keys = {k for k in storage.objects if k.startswith(prefix) and storage.born.get(k, 0) <= latest}
        keys |= {k for k, (when, _) in storage.deleted.items() if k.startswith(prefix) and when > latest}
        await self._respond(f"list {prefix}")
        cut = len(prefix)
        deep = {k for k in keys if delimiter and delimiter in k[cut:]}
        folders = {f"{prefix}{k[cut:].partition(delimiter)[0]}{delimiter}" for k in deep}
        yield Page([Entry(key, 0) for key in sorted(keys - deep)], sorted(folders))

    async def _create(self, key: str, data: bytes, durability: Durability) -> None:
        """Create the object; respond truly or not at all, except to its own repetition."""
        host, storage, forced = self.host, self.storage, durability is Durability.FSYNC
        await host.step()
        cut_off = self._loop.time() < host.cut_off_until
        if not cut_off and not host.chance(host.rates.faults):
            storage.create(key, data, forced=forced)
            host.log(f"creates {key}")
            await host.step()
            if forced:
                storage.force(key.rpartition("/")[0])
            return
        fate = "lost" if cut_off else host.random.choice(_CREATED_WRONG)
        if not cut_off and host.chance(0.3):
            host.cut_off_until = self._loop.time() + host.random.uniform(0, 3 * _WAIT)
        host.log(f"create {key}: {fate}")
        if fate in ("unanswered", "retried", "repeated"):
            storage.create(key, data, forced=forced)
        if fate in ("late", "repeated"):
            self._loop.call_later(host.random.uniform(0, 3 * _WAIT), self._land, key, data, forced)
        if fate in ("unanswered", "lost", "late"):
            await asyncio.sleep(_WAIT if fate != "late" else host.random.uniform(0, _WAIT))
        await host.step()
        if fate == "retried":
            raise AlreadyExists(f"simulated: {key} exists already")
        if fate != "repeated":
            raise Unavailable(f"simulated: create {key} was {fate}")
        if forced:
            storage.force(key.rpartition("/")[0])

    async def _replace(self, key: str, data: bytes) -> None:
        """Replace the object, at once, later or never."""
        await self.host.step()
        if self.host.chance(2 * self.host.rates.faults):
            if self.host.chance(0.5):
                later = self.host.random.uniform(0, 30)
                self._loop.call_later(later, self.storage.objects.__setitem__, key, data)
            return
        self.storage.objects[key] = data
        await self.host.step()

    async def empty(self) -> bool:
        """See `Storage.empty`."""
        await self._respond("empty")
        return not self.storage.objects

    async def age(self, prefix: str) -> float | None:
        """See `Storage.age`; by the clock of the storage."""
        await self.host.step()
        born = [self.storage.born.get(key, 0.0) for key in self.storage.objects if key.startswith(f"{prefix}/")]
        await self._respond(f"age {prefix}")
        return self._loop.time() - max(born) if born else None

    async def delete(self, key: str) -> None:
        """Delete the object, perhaps without a response."""
        await self.host.step()
        if self.host.chance(self.host.rates.faults):
            if self.host.chance(0.5):
                self.storage.delete(key)
            raise Unavailable(f"simulated: delete {key} got no response")
        self.storage.delete(key)
        self.host.log(f"deletes {key}")
        await self.host.step()

    async def flush(self, prefix: str, durability: Durability) -> None:
        """Make the names in the folder durable, and the bytes of this host's packs there."""
        own = {key for key in self._unflushed if key.startswith(f"{prefix}/")}
        await self._respond(f"flush {prefix}")
        if durability is Durability.FSYNC:
            self._unflushed -= own
            self.storage.loose -= own
            self.storage.force(prefix)

    async def sync(self) -> None:
        """Make everything durable."""
        await self._respond("sync")
        self.storage.sync()

    def writer(self, key: str, durability: Durability) -> _SimulatedPack:
        """Return a writer of a pack that nobody else sees before it is finished."""
        if key in self.storage.objects or key in self._open:
            raise AlreadyExists(f"simulated: {key} exists already")
        data = self._open[key] = bytearray()
        return _SimulatedPack(self, key, data, durability)

    def upload(self, key: str, size: int, durability: Durability) -> _SimulatedPack:
        """Return the same writer: every pack appears when it is finished."""
        return self.writer(key, durability)

    def reader(self, key: str) -> _SimulatedReader:
        """Return a reader of a finished pack, or of an unfinished one of this host."""
        return _SimulatedReader(self, key, self._open[key] if key in self._open else self._bytes_of(key))

    async def close(self) -> None:
        """Do nothing."""

    def fail(self, what: str) -> None:
        """Raise `Unavailable` now and then; most faults are those of writes, where they matter more."""
        cut_off = self._loop.time() < self.host.cut_off_until
        if cut_off or self.host.chance(self.host.rates.faults / 10):
            self.host.log(f"{what}: no response")
            raise Unavailable(f"simulated: {what} got no response")

    def finish(self, key: str, data: bytearray, durability: Durability) -> None:
        """Let a pack appear, with or without a response, or not at all."""
        wrong = self.host.chance(self.host.rates.faults)
        if not wrong or self.host.chance(0.5):
            self.storage.create(key, bytes(data), forced=False)
            del self._open[key]
            if durability is Durability.FSYNC:
                self._unflushed.add(key)
        if wrong:
            self.host.log(f"finish {key}: no response, {'torn' if key in self._open else 'done'}")
            raise Unavailable(f"simulated: finish {key} got no response")

    def discard(self, key: str) -> None:
        """Discard a pack; what others can see stays."""
        self._open.pop(key, None)

    async def _respond(self, what: str) -> None:
        """Await the way back of a response, on which it may be lost."""
        await self.host.step()
        self.fail(what)

    def _bytes_of(self, key: str) -> bytes:
        try:
            return self.storage.objects[key]
        except KeyError:
            raise NotFound(f"simulated: {key} does not exist") from None

    def _land(self, key: str, data: bytes, forced: bool) -> None:
        try:
            self.storage.create(key, data, forced=forced)
        except (AlreadyExists, InvalidArgument):
            return
        self.host.log(f"late: {key} appears")


class _SimulatedPack:
    def __init__(self, storage: HostStorage, key: str, data: bytearray, durability: Durability) -> None:
        self.key = key
        self._durability = durability
        self._storage = storage
        self._data = data

    def append(self, buffers: BufferStream, size: int) -> int | None:
        self._storage.fail(f"append {self.key}")
        offset = len(self._data)
        if offset and offset + size > self._storage.capacity:
            return None
        for buffer in buffers:
            self._data += buffer
        return offset

    def finish(self) -> None:
        self._storage.finish(self.key, self._data, self._durability)

    def discard(self) -> None:
        self._storage.discard(self.key)


class _SimulatedReader:
    def __init__(self, storage: HostStorage, key: str, data: bytes | bytearray) -> None:
        self._storage = storage
        self._key = key
        self._data = data

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        self._storage.fail(f"read {self._key}")
        if offset + size > len(self._data):
            raise Corrupt(f"simulated: {self._key} ends before {offset + size}")
        for buffer in buffers:
            memoryview(buffer)[:] = self._data[offset : offset + len(buffer)]
            offset += len(buffer)
