"""Object storage as a simulation sees it: one shared set of objects, and hosts whose requests to it go wrong.

Every request takes a while, drawn from the host's own random numbers; then one of these may happen to it:

    refused      it was not done, and the answer says so (a 429 or 503): `Unavailable`
    lost         it never arrives; the host gives up waiting: `Unavailable`
    unanswered   it is done, but the answer is lost: `Unavailable`
    late         the host gives up waiting, and it is done only afterwards: `Unavailable`, and a surprise
    repeated     it is done twice, the second time later, as by a network that duplicates
    retried      it is done, the answer lost, and asked again below the protocol: the host learns that its own
                 new object exists already

After such a fault a host may get no answer to anything for a while. Listings may be old: they lack what is new
and still show what was deleted; so may sizes. A pack appears to others when it is finished, or never, and takes
only so many bytes. `latest` may be lost or be put in place late. A host may crash before, during or after any
request, and then does nothing more for ever; or stand still, longer than others wait for it.

What is visible need not be durable: a name is once its folder was forced, which a create does last, and the
bytes of a pack are once its writer has settled it. A power failure (`Storage.after_power_failure`) takes the
rest away. A `strict` storage is one behind a server: it takes no record before the one below it is there.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping

from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, Unavailable
from tstore.simulation.weather import Host
from tstore.storage.base import Buffers, BufferStream, Capabilities, Durability, Keys, Transfer, bound, overlong
from tstore.storage.plain import Plain

__all__ = ["HostBackend", "Storage"]

_CREATED_WRONG = ("refused", "lost", "unanswered", "late", "repeated", "retried")
_PATIENCE = 2.0  # seconds that a host waits for an answer
_OLD = 2.0  # seconds by which listings and sizes may be late
_CAPACITIES = (math.inf, math.inf, 6_000, 12_000)  # bytes that one pack of a host takes


class Storage:
    """The objects that all hosts share."""

    def __init__(self, objects: Mapping[str, bytes], name: str = "storage", *, strict: bool = False) -> None:
        self.name = name
        self.objects = dict(objects)
        self.born: dict[str, float] = {}
        self.deleted: dict[str, tuple[float, bytes]] = {}  # when, and what it was
        self.volatile: set[str] = set()  # names, or bytes, that a power failure takes away
        self.loose: set[str] = set()  # of these the ones whose bytes are not durable either
        self.strict = strict

    def create(self, key: str, data: bytes, *, forced: bool = True) -> None:
        """The one primitive, at the moment when the server does it. `forced`: its bytes are durable.

        Raises AlreadyExists where the key is taken.
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
        """Make the names durable of all objects below the folder whose bytes are."""
        self.volatile -= {key for key in self.volatile - self.loose if key.startswith(f"{folder}/")}

    def flush(self) -> None:
        """Make everything durable."""
        self.volatile.clear()
        self.loose.clear()

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        if key in self.objects:
            self.deleted[key] = asyncio.get_running_loop().time(), self.objects.pop(key)
        self.volatile.discard(key)
        self.loose.discard(key)

    def photograph(self) -> Storage:
        """A copy of it as of now."""
        copied = Storage(self.objects, self.name, strict=self.strict)
        copied.born, copied.deleted = dict(self.born), dict(self.deleted)
        copied.volatile, copied.loose = set(self.volatile), set(self.loose)
        return copied

    def after_power_failure(self, chance: random.Random) -> Storage:
        """What a power failure leaves: names that were not durable may be lost, what was deleted may be back.

        All whose bytes are not durable goes, since of transactions that asked for no more parts may survive.
        """
        lost = {key for key in sorted(self.volatile) if key in self.loose or chance.random() < 0.8}
        back = {key: data for key, (_, data) in self.deleted.items() if chance.random() < 0.2}
        kept = {key: data for key, data in self.objects.items() if key not in lost}
        if chance.random() < 0.5:
            kept.pop("latest", None)
        return Storage({**back, **kept}, self.name, strict=self.strict)


class HostBackend(Plain):
    """What one host sees of the storage."""

    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=True)

    def __init__(self, storage: Storage, host: Host) -> None:
        self.url = f"simulated://{storage.name}"
        self.storage = storage
        self.host = host
        self.capacity = host.random.choice(_CAPACITIES)
        streams = 1 if host.random.random() < 0.5 else 64  # one request after the other, or many at once
        self.transfer = Transfer(streams, batch=1 << 20, piece=1 << 20, gap=0)
        self._open: dict[str, bytearray] = {}  # packs of this host that are not finished
        self._unsettled: set[str] = set()  # packs of this host that are to become durable
        self._loop = asyncio.get_running_loop()

    async def get(self, key: str, most: int | None = None) -> bytes:
        """The whole object."""
        await self.host.step()
        found = self.storage.objects.get(key)
        await self._answer(f"get {key}")
        if found is None:
            raise NotFound(f"simulated: there is no object {key}")
        if len(found) > (most := bound(key, most, found)):
            raise overlong(f"{self.url}: {key}", most)
        return found

    async def size(self, key: str) -> int | None:
        """The object's length, or what it was a moment ago."""
        await self.host.step()
        found = self.storage.objects.get(key)
        if self.host.chance(self.host.weather.blind):
            then = self._loop.time() - self.host.random.uniform(0, _OLD)
            when, before = self.storage.deleted.get(key, (-math.inf, None))
            found = before if when > then else None if self.storage.born.get(key, 0) > then else found
        await self._answer(f"size {key}")
        return None if found is None else len(found)

    async def create(self, key: str, data: bytes, durability: Durability) -> None:
        """Makes the object, and answers truly or not at all, but for its own repetition."""
        host, storage, forced = self.host, self.storage, durability is Durability.FSYNC
        await host.step()
        cut_off = self._loop.time() < host.cut_off_until
        if not cut_off and not host.chance(host.weather.faults):
            storage.create(key, data, forced=forced)
            host.tell(f"creates {key}")
            await host.step()
            if forced:
                storage.force(key.rpartition("/")[0])
            return
        fate = "lost" if cut_off else host.random.choice(_CREATED_WRONG)
        if not cut_off and host.chance(0.3):
            host.cut_off_until = self._loop.time() + host.random.uniform(0, 3 * _PATIENCE)
        host.tell(f"create {key}: {fate}")
        if fate in ("unanswered", "retried", "repeated"):
            storage.create(key, data, forced=forced)
        if fate in ("late", "repeated"):
            self._loop.call_later(host.random.uniform(0, 3 * _PATIENCE), self._land, key, data, forced)
        if fate in ("unanswered", "lost", "late"):
            await asyncio.sleep(_PATIENCE if fate != "late" else host.random.uniform(0, _PATIENCE))
        await host.step()
        if fate == "retried":
            raise AlreadyExists(f"simulated: {key} exists already")
        if fate != "repeated":
            raise Unavailable(f"simulated: create {key} was {fate}")
        if forced:
            storage.force(key.rpartition("/")[0])

    async def hint(self, key: str, data: bytes) -> None:
        """Replaces the object, at once, later or never."""
        await self.host.step()
        if self.host.chance(2 * self.host.weather.faults):
            if self.host.chance(0.5):
                later = self.host.random.uniform(0, 30)
                self._loop.call_later(later, self.storage.objects.__setitem__, key, data)
            return
        self.storage.objects[key] = data
        await self.host.step()

    async def empty(self) -> bool:
        """Whether there is no object."""
        await self._answer("empty")
        return not self.storage.objects

    async def list(self, prefix: str) -> Keys:
        """The keys, at times without the newest, or with those that were deleted last."""
        await self.host.step()
        storage, latest = self.storage, self._loop.time()
        if self.host.chance(self.host.weather.stale):
            latest -= self.host.random.uniform(0, _OLD)
        keys = {k for k in storage.objects if k.startswith(prefix) and storage.born.get(k, 0) <= latest}
        keys |= {k for k, (when, _) in storage.deleted.items() if k.startswith(prefix) and when > latest}
        answer = sorted(keys)
        await self._answer(f"list {prefix}")
        return answer

    async def folders(self, prefix: str) -> Keys:
        """The names in front of the next slash, at times without the newest."""
        below = [key[len(prefix) :] for key in await self.list(prefix)]
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    async def age(self, prefix: str) -> float | None:
        """Seconds since the newest object below the folder was made, by the clock of the storage."""
        await self.host.step()
        born = [self.storage.born.get(key, 0.0) for key in self.storage.objects if key.startswith(f"{prefix}/")]
        await self._answer(f"age {prefix}")
        return self._loop.time() - max(born) if born else None

    async def delete(self, key: str) -> None:
        """Removes the object, perhaps without saying so."""
        await self.host.step()
        if self.host.chance(self.host.weather.faults):
            if self.host.chance(0.5):
                self.storage.delete(key)
            raise Unavailable(f"simulated: delete {key} got no answer")
        self.storage.delete(key)
        self.host.tell(f"deletes {key}")
        await self.host.step()

    async def settle(self, prefix: str, durability: Durability) -> None:
        """Make the names below the folder durable, and the bytes of this host's packs there."""
        own = {key for key in self._unsettled if key.startswith(f"{prefix}/")}
        await self._answer(f"settle {prefix}")
        if durability is Durability.FSYNC:
            self._unsettled -= own
            self.storage.loose -= own
            self.storage.force(prefix)

    async def flush(self) -> None:
        """Make everything durable."""
        await self._answer("flush")
        self.storage.flush()

    def writer(self, key: str, durability: Durability) -> _SimulatedPack:
        """A pack that nobody else sees before it is finished."""
        if key in self.storage.objects or key in self._open:
            raise AlreadyExists(f"simulated: {key} exists already")
        data = self._open[key] = bytearray()
        return _SimulatedPack(self, key, data, durability)

    def upload(self, key: str, size: int, durability: Durability) -> _SimulatedPack:
        """The same: here every pack appears when it is finished."""
        return self.writer(key, durability)

    def reader(self, key: str) -> _SimulatedReader:
        """A reader of a finished pack, or of one of this host."""
        return _SimulatedReader(self, key, self._open[key] if key in self._open else self._found(key))

    async def close(self) -> None:
        """Does nothing."""

    def fail(self, what: str) -> None:
        """Raises `Unavailable` now and then; most faults befall what is written, where they matter more."""
        cut_off = self._loop.time() < self.host.cut_off_until
        if cut_off or self.host.chance(self.host.weather.faults / 10):
            self.host.tell(f"{what}: no answer")
            raise Unavailable(f"simulated: {what} got no answer")

    def finish(self, key: str, data: bytearray, durability: Durability) -> None:
        """Lets a pack appear, with or without an answer, or not at all."""
        wrong = self.host.chance(self.host.weather.faults)
        if not wrong or self.host.chance(0.5):
            self.storage.create(key, bytes(data), forced=False)
            del self._open[key]
            if durability is Durability.FSYNC:
                self._unsettled.add(key)
        if wrong:
            self.host.tell(f"finish {key}: no answer, {'torn' if key in self._open else 'done'}")
            raise Unavailable(f"simulated: finish {key} got no answer")

    def discard(self, key: str) -> None:
        """Gives up a pack; what others can see stays."""
        self._open.pop(key, None)

    async def _answer(self, what: str) -> None:
        """The way back of an answer, on which it may be lost."""
        await self.host.step()
        self.fail(what)

    def _found(self, key: str) -> bytes:
        try:
            return self.storage.objects[key]
        except KeyError:
            raise NotFound(f"simulated: there is no object {key}") from None

    def _land(self, key: str, data: bytes, forced: bool) -> None:
        try:
            self.storage.create(key, data, forced=forced)
        except (AlreadyExists, InvalidArgument):
            return
        self.host.tell(f"late: {key} appears")


class _SimulatedPack:
    def __init__(self, backend: HostBackend, key: str, data: bytearray, durability: Durability) -> None:
        self.key = key
        self._durability = durability
        self._backend = backend
        self._data = data

    def reserve(self, size: int) -> None:
        return None

    def append(self, buffers: BufferStream, size: int) -> int | None:
        self._backend.fail(f"append {self.key}")
        offset = len(self._data)
        if offset and offset + size > self._backend.capacity:
            return None
        for buffer in buffers:
            self._data += buffer
        return offset

    def finish(self) -> None:
        self._backend.finish(self.key, self._data, self._durability)

    def discard(self) -> None:
        self._backend.discard(self.key)


class _SimulatedReader:
    def __init__(self, backend: HostBackend, key: str, data: bytes | bytearray) -> None:
        self._backend = backend
        self._key = key
        self._data = data

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        self._backend.fail(f"read {self._key}")
        if offset + size > len(self._data):
            raise Corrupt(f"simulated: {self._key} ends before {offset + size}")
        for buffer in buffers:
            memoryview(buffer)[:] = self._data[offset : offset + len(buffer)]
            offset += len(buffer)
