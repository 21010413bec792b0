"""Object storage as a simulation sees it: one shared set of objects, and hosts whose requests to it go wrong.

Every request takes a while, drawn from the host's own random numbers; then one of these may happen to it:

    refused      it was not done, and the answer says so (a 429 or 503): `Unavailable`
    lost         it never arrives; the host gives up waiting: `Unavailable`
    unanswered   it is done, but the answer is lost: `Unavailable`
    late         the host gives up waiting, and it is done only afterwards: `Unavailable`, and a surprise
    repeated     it is done twice, the second time later, as by a network that duplicates
    retried      it is done, the answer lost, and asked again below the protocol: the host learns that its own
                 new object exists already

After such a fault a host may get no answer to anything for a while. Listings may be old. A pack appears to
others when it is finished, or never. `latest` may be lost or be put in place late. A host may crash before, during
or after any request, and then does nothing more for ever; or stand still, longer than others wait for it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import NamedTuple

from tstore.errors import AlreadyExists, Corrupt, NotFound, Unavailable
from tstore.kv.base import Buffers, BufferStream, Capabilities, Durability, Keys, Transfer
from tstore.kv.plain import Plain
from tstore.world import World

__all__ = ["CALM", "Host", "HostBackend", "Storage", "Weather"]

_CREATED_WRONG = ("refused", "lost", "unanswered", "late", "repeated", "retried")
_PATIENCE = 2.0  # seconds that a host waits for an answer


class Weather(NamedTuple):
    """How likely it is that one request, or one host at a request, meets with a fault."""

    faults: float
    crashes: float
    pauses: float
    stale: float


CALM = Weather(0, 0, 0, 0)


class Host(World):
    """One run of one host: its clock, its random numbers, and whether it still lives.

    `tell` takes one line of the story; `skew` is what its clock is wrong by.
    """

    def __init__(
        self, name: str, seed: str, weather: Weather, skew: float, tell: Callable[[str, str], None]
    ) -> None:
        self.name = name
        self.random = random.Random(seed)
        self.weather = weather
        self.crashed = asyncio.Event()
        self.ended = False
        self._skew = skew
        self._tell = tell
        self.cut_off_until = 0.0
        self._still_until = 0.0
        self._graves: list[asyncio.Future[None]] = []
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Its own clock, wrong by its skew."""
        return 1.7e9 + self._loop.time() + self._skew

    def token(self, size: int) -> str:
        """Random digits of its own."""
        return self.random.randbytes(size).hex()

    def uniform(self, low: float, high: float) -> float:
        """A random number of its own."""
        return self.random.uniform(low, high)

    def tell(self, text: str) -> None:
        """Adds a line to the story."""
        self._tell(self.name, text)

    def chance(self, likelihood: float) -> bool:
        """True that often."""
        return likelihood > 0 and self.random.random() < likelihood

    def delay(self) -> float:
        """Seconds that a request is under way: 10 ms or so, now and then much longer."""
        draw = self.random.random()
        if draw < 0.9:
            return self.random.expovariate(100)
        return self.random.uniform(0, 1 if draw < 0.99 else 5)

    async def step(self) -> None:
        """One stretch of a request's way; here a host may crash or stand still. A dead host never returns."""
        if self.ended:
            raise asyncio.CancelledError
        if not self.crashed.is_set() and self.chance(self.weather.crashes):
            self.tell("crashes")
            self.crashed.set()
        elif self.chance(self.weather.pauses):
            still = self.random.uniform(1, 60)
            self.tell(f"stands still for {still:.1f} s")
            self._still_until = max(self._still_until, self._loop.time() + still)
        await asyncio.sleep(self.delay())
        if (still := self._still_until - self._loop.time()) > 0:
            await asyncio.sleep(still)
        if self.crashed.is_set():
            grave = self._loop.create_future()
            self._graves.append(grave)  # a task that nothing refers to would be collected, and its `finally` run
            await grave


class Storage:
    """The objects that all hosts share."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = dict(objects)
        self.born: dict[str, float] = {}

    def create(self, key: str, data: bytes) -> None:
        """The one primitive, at the moment when the server does it."""
        if key in self.objects:
            raise AlreadyExists(f"simulated: {key} exists already")
        self.objects[key] = data
        self.born[key] = asyncio.get_running_loop().time()


class HostBackend(Plain):
    """What one host sees of the storage."""

    url = "simulated://storage"
    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=True)

    def __init__(self, storage: Storage, host: Host) -> None:
        self.storage = storage
        self.host = host
        streams = 1 if host.random.random() < 0.5 else 64  # one request after the other, or many at once
        self.transfer = Transfer(streams, batch=1 << 20, piece=1 << 20, gap=0)
        self._open: dict[str, bytearray] = {}  # packs of this host that are not finished
        self._loop = asyncio.get_running_loop()

    async def get(self, key: str) -> bytes:
        """The whole object."""
        await self.host.step()
        found = self.storage.objects.get(key)
        await self._answer(f"get {key}")
        if found is None:
            raise NotFound(f"simulated: there is no object {key}")
        return found

    async def size(self, key: str) -> int | None:
        """The object's length."""
        await self.host.step()
        found = self.storage.objects.get(key)
        await self._answer(f"size {key}")
        return None if found is None else len(found)

    async def create(self, key: str, data: bytes, durability: Durability) -> None:
        """Makes the object, and answers truly or not at all, but for its own repetition."""
        host, storage = self.host, self.storage
        await host.step()
        cut_off = self._loop.time() < host.cut_off_until
        if not cut_off and not host.chance(host.weather.faults):
            storage.create(key, data)
            host.tell(f"creates {key}")
            await host.step()
            return
        fate = "lost" if cut_off else host.random.choice(_CREATED_WRONG)
        if not cut_off and host.chance(0.3):
            host.cut_off_until = self._loop.time() + host.random.uniform(0, 3 * _PATIENCE)
        host.tell(f"create {key}: {fate}")
        if fate in ("unanswered", "retried", "repeated"):
            storage.create(key, data)
        if fate in ("late", "repeated"):
            self._loop.call_later(host.random.uniform(0, 3 * _PATIENCE), self._land, key, data)
        if fate in ("unanswered", "lost", "late"):
            await asyncio.sleep(_PATIENCE if fate != "late" else host.random.uniform(0, _PATIENCE))
        await host.step()
        if fate == "retried":
            raise AlreadyExists(f"simulated: {key} exists already")
        if fate != "repeated":
            raise Unavailable(f"simulated: create {key} was {fate}")

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
        """The keys, at times without the newest."""
        await self.host.step()
        born, latest = self.storage.born, self._loop.time()
        if self.host.chance(self.host.weather.stale):
            latest -= self.host.random.uniform(0, 2)
        keys = sorted(k for k in self.storage.objects if k.startswith(prefix) and born.get(k, 0) <= latest)
        await self._answer(f"list {prefix}")
        return keys

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
                self.storage.objects.pop(key, None)
            raise Unavailable(f"simulated: delete {key} got no answer")
        self.storage.objects.pop(key, None)
        self.host.tell(f"deletes {key}")
        await self.host.step()

    async def settle(self, prefix: str, durability: Durability) -> None:
        """Asks; there is nothing to do."""
        await self._answer(f"settle {prefix}")

    async def flush(self) -> None:
        """Asks; there is nothing to do."""
        await self._answer("flush")

    def writer(self, key: str, durability: Durability) -> _SimulatedPack:
        """A pack that nobody else sees before it is finished."""
        if key in self.storage.objects or key in self._open:
            raise AlreadyExists(f"simulated: {key} exists already")
        data = self._open[key] = bytearray()
        return _SimulatedPack(self, key, data)

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

    def finish(self, key: str, data: bytearray) -> None:
        """Lets a pack appear, with or without an answer, or not at all."""
        wrong = self.host.chance(self.host.weather.faults)
        if not wrong or self.host.chance(0.5):
            self.storage.create(key, bytes(data))
            del self._open[key]
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

    def _land(self, key: str, data: bytes) -> None:
        try:
            self.storage.create(key, data)
        except AlreadyExists:
            return
        self.host.tell(f"late: {key} appears")


class _SimulatedPack:
    def __init__(self, backend: HostBackend, key: str, data: bytearray) -> None:
        self.key = key
        self._backend = backend
        self._data = data

    def reserve(self, size: int) -> None:
        return None

    def append(self, buffers: BufferStream, size: int) -> int:
        self._backend.fail(f"append {self.key}")
        offset = len(self._data)
        for buffer in buffers:
            self._data += buffer
        return offset

    def finish(self) -> None:
        self._backend.finish(self.key, self._data)

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
