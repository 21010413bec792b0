"""Simulated object storage: one set of objects that all hosts share, and the faults of each host's requests.

Requests have random latencies, and may get no response. A create may have one of these faults:

    refused      has no effect, and the response says so (429 or 503): `Unavailable`
    lost         never arrives; the host stops waiting: `Unavailable`
    unanswered   takes effect, but the response is lost: `Unavailable`
    late         takes effect after a delay, mostly once the host has stopped waiting: `Unavailable`
    repeated     takes effect, and arrives once more later, as on a network that duplicates requests
    retried      takes effect, but the response is lost and the HTTP client repeats the request: `AlreadyExists`

After such a fault a host may get no response to creates, reads and listings for a while. Listings and sizes may be
stale: they lack new objects and still show deleted ones. Packs are limited in size; other hosts see a pack once it
is finished, or never. The hint `latest` may be lost or replaced late. A host may crash before, during or after any
request, or pause for longer than others wait for it.

Visible objects need not be durable. A key is durable once its folder is synced, the last step of a create; the
bytes of a pack are durable once its writer has flushed them. `SharedObjects.after_power_failure` keeps only what
is durable. Like `tstore serve`, a `strict` storage accepts no record before the previous one.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Mapping

from tstore.core.format.layout import (
    ARCHIVE_EVERY,
    archive_key,
    commit_key,
    is_archive,
    is_record,
    version_of,
)
from tstore.core.format.objects.encoding import Archive, decode
from tstore.core.storage.base import Storage
from tstore.core.storage.objects import (
    Buffers,
    BufferStream,
    Capabilities,
    Durability,
    Entry,
    Page,
    PutMode,
    Tuning,
    overlong,
    read_limit,
)
from tstore.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, Unavailable
from tstore.lab.simulation.virtual import Host

__all__ = ["HostStorage", "SharedObjects"]

_CREATE_FAULTS = ("refused", "lost", "unanswered", "late", "repeated", "retried")
_MAX_RECORDS = 256  # records in a run
_WAIT = 2.0  # seconds that a host waits for a response
_STALE = 2.0  # the maximum age of listings and sizes in seconds
_CAPACITIES = (math.inf, math.inf, 6_000, 12_000)  # choices of the maximum size of a host's packs in bytes


class SharedObjects:
    """The objects that all hosts share, and which of them a power failure may lose."""

    def __init__(self, objects: Mapping[str, bytes], name: str = "storage", *, strict: bool = False) -> None:
        self.name = name
        self.objects = dict(objects)
        self.created: dict[str, float] = {}  # times by key
        self.deleted: dict[str, tuple[float, bytes]] = {}  # times and bytes by key
        self.volatile: set[str] = set()  # keys that are not durable
        self.unflushed: set[str] = set()  # keys of `volatile` whose bytes are not durable either
        self.strict = strict

    def create(self, key: str, data: bytes, *, durable: bool = True) -> None:
        """Create an object, whose bytes are durable if `durable`; its key is durable once the folder is synced.

        Raise `AlreadyExists` if the key is taken. If `strict`, raise `InvalidArgument` for a record as long as the
        previous record does not exist.
        """
        if key in self.objects:
            raise AlreadyExists(f"simulated: {key} already exists")
        previous = version_of(key) - 1 if self.strict and is_record(key) else 0
        places = {commit_key(previous), archive_key(previous)}
        if previous and places.isdisjoint(self.objects):
            raise InvalidArgument(f"simulated: {key} can't be created before the previous record")
        self.objects[key] = data
        self.created[key] = asyncio.get_running_loop().time()
        self.volatile.add(key)
        if not durable:
            self.unflushed.add(key)

    def records(self) -> dict[int, bytes]:
        """Return the records by version, those in archives and the others."""
        records = {version_of(key): data for key, data in self.objects.items() if is_record(key)}
        for key, data in self.objects.items():
            if is_archive(key):
                archive = decode(data, Archive)
                records |= {archive.end - i: data for i, data in enumerate(reversed(archive.records))}
        return records

    def sync_folder(self, folder: str) -> None:
        """Make the keys in the folder and in the top folder durable, except those of unflushed objects."""
        self.volatile -= {key for key in self.volatile - self.unflushed if key.rpartition("/")[0] in ("", folder)}

    def make_durable(self, key: str) -> None:
        """Make an object durable."""
        self.volatile.discard(key)
        self.unflushed.discard(key)

    def sync(self) -> None:
        """Make everything durable."""
        self.volatile.clear()
        self.unflushed.clear()

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""
        if key in self.objects:
            self.deleted[key] = asyncio.get_running_loop().time(), self.objects.pop(key)
        self.volatile.discard(key)
        self.unflushed.discard(key)

    def copy(self) -> SharedObjects:
        """Return an independent copy."""
        copied = SharedObjects(self.objects, self.name, strict=self.strict)
        copied.created, copied.deleted = dict(self.created), dict(self.deleted)
        copied.volatile, copied.unflushed = set(self.volatile), set(self.unflushed)
        return copied

    def after_power_failure(self, rng: random.Random) -> SharedObjects:
        """Return the objects after a power failure: some volatile ones are lost, some deleted ones are back.

        Objects whose bytes are not durable are always lost, so transactions that are not durable survive in part.
        """
        lost = {key for key in sorted(self.volatile) if key in self.unflushed or rng.random() < 0.8}
        restored = {key: data for key, (_, data) in self.deleted.items() if rng.random() < 0.2}
        surviving = {key: data for key, data in self.objects.items() if key not in lost}
        if rng.random() < 0.5:
            surviving.pop("latest", None)
        return SharedObjects({**restored, **surviving}, self.name, strict=self.strict)


class HostStorage(Storage):
    """The storage as seen by one host.

    The writers and readers of its packs call `maybe_fail`, `finish` and `discard`.
    """

    capabilities = Capabilities(conditional_create=True, listing=True, ranges=True, durable=True, native_io=True)

    def __init__(self, storage: SharedObjects, host: Host) -> None:
        self.url = f"simulated://{storage.name}"
        self.storage = storage
        self.host = host
        self.capacity = host.random.choice(_CAPACITIES)
        streams = 1 if host.random.random() < 0.5 else 64  # sequential or concurrent requests
        self._tuning = Tuning(streams, batch=1 << 20, piece=1 << 20, gap=0)
        self._unfinished: dict[str, bytearray] = {}  # unfinished packs of this host
        self._unflushed: set[str] = set()  # packs of this host that its next flush makes durable
        self._loop = asyncio.get_running_loop()

    @property
    def without_archives(self) -> bool:
        """Whether the run archives nothing; then looks for archives take no time and do not fail."""
        return ARCHIVE_EVERY > _MAX_RECORDS

    @property
    def tuning(self) -> Tuning:
        return self._tuning

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        if self.without_archives and is_archive(key):
            raise NotFound(f"simulated: {key} does not exist")
        await self.host.step()
        data = self.storage.objects.get(key)
        await self._respond(f"get {key}")
        if data is None:
            raise NotFound(f"simulated: {key} does not exist")
        if len(data) > (max_size := read_limit(key, max_size, data)):
            raise overlong(f"{self.url}: {key}", max_size)
        return data

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        self.reader(key).read_into(offset, buffers, size)

    async def head(self, key: str) -> Entry | None:
        """Return the entry of an object, which may be stale, or None if the object does not exist."""
        if self.without_archives and is_archive(key):
            return None
        await self.host.step()
        data = self.storage.objects.get(key)
        if self.host.chance(self.host.rates.stale_heads):
            as_of = self._loop.time() - self.host.random.uniform(0, _STALE)
            deleted_at, deleted = self.storage.deleted.get(key, (-math.inf, None))
            data = None if self.storage.created.get(key, 0) > as_of else data
            data = deleted if deleted_at > as_of else data
        await self._respond(f"head {key}")
        return None if data is None else Entry(key, len(data))

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        data = b"".join(buffers)
        await (self._create(key, data, durability) if mode is PutMode.CREATE else self._replace(key, data))

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """Yield one page, which may be stale."""
        await self.host.step()
        storage, as_of = self.storage, self._loop.time()
        if self.host.chance(self.host.rates.stale_lists):
            as_of -= self.host.random.uniform(0, _STALE)
        keys = {k for k in storage.objects if k.startswith(prefix) and storage.created.get(k, 0) <= as_of}
        keys |= {k for k, (when, _) in storage.deleted.items() if k.startswith(prefix) and when > as_of}
        await self._respond(f"list {prefix}")
        start = len(prefix)
        nested = {k for k in keys if delimiter and delimiter in k[start:]}
        folders = {f"{prefix}{k[start:].partition(delimiter)[0]}{delimiter}" for k in nested}
        yield Page([Entry(key, 0) for key in sorted(keys - nested)], sorted(folders))

    async def _create(self, key: str, data: bytes, durability: Durability) -> None:
        """Create an object, perhaps with one of the faults listed at the top of this file."""
        host, storage, durable = self.host, self.storage, durability is Durability.FSYNC
        await host.step()
        fault = ""
        if self._loop.time() < host.cut_off_until:
            fault = "lost"
        elif host.chance(host.rates.faults):
            fault = host.random.choice(_CREATE_FAULTS)
            if host.chance(0.3):
                host.cut_off_until = self._loop.time() + host.random.uniform(0, 3 * _WAIT)
        if fault in ("", "unanswered", "retried", "repeated"):
            try:
                storage.create(key, data, durable=durable)
            except AlreadyExists:
                if durable and not is_record(key):  # a staged object makes nothing of others durable
                    storage.make_durable(key)
                raise
        host.log(f"create {key}: {fault}" if fault else f"creates {key}")
        if fault in ("late", "repeated"):
            self._loop.call_later(host.random.uniform(0, 3 * _WAIT), self._create_late, key, data, durable)
        if fault in ("unanswered", "lost", "late"):
            await asyncio.sleep(_WAIT if fault != "late" else host.random.uniform(0, _WAIT))
        await host.step()
        if fault == "retried":
            if durable and not is_record(key):
                storage.make_durable(key)
            raise AlreadyExists(f"simulated: {key} already exists")
        if fault not in ("", "repeated"):
            raise Unavailable(f"simulated: create {key} was {fault}")
        if durable:
            storage.sync_folder(key.rpartition("/")[0])

    async def _replace(self, key: str, data: bytes) -> None:
        """Replace an object, at once, later or never."""
        await self.host.step()
        if self.host.chance(2 * self.host.rates.faults):
            if self.host.chance(0.5):
                delay = self.host.random.uniform(0, 30)
                self._loop.call_later(delay, self.storage.objects.__setitem__, key, data)
            return
        self.storage.objects[key] = data
        await self.host.step()

    async def empty(self) -> bool:
        await self._respond("empty")
        return not self.storage.objects

    async def age(self, prefix: str) -> float | None:
        await self.host.step()
        storage = self.storage
        created = [storage.created.get(key, 0.0) for key in storage.objects if key.startswith(f"{prefix}/")]
        await self._respond(f"age {prefix}")
        return self._loop.time() - max(created) if created else None

    async def delete(self, key: str) -> None:
        """Delete an object, perhaps without a response."""
        await self.host.step()
        if self.host.chance(self.host.rates.faults):
            if self.host.chance(0.5):
                self.storage.delete(key)
            raise Unavailable(f"simulated: delete {key} got no response")
        self.storage.delete(key)
        self.host.log(f"deletes {key}")
        await self.host.step()

    async def flush(self, prefix: str, durability: Durability) -> None:
        """With FSYNC, make the keys in a folder durable, and the bytes of this host's packs there."""
        packs = {key for key in self._unflushed if key.startswith(f"{prefix}/")}
        await self._respond(f"flush {prefix}")
        if durability is Durability.FSYNC:
            self._unflushed -= packs
            self.storage.unflushed -= packs
            self.storage.sync_folder(prefix)

    async def sync(self) -> None:
        await self._respond("sync")
        self.storage.sync()

    def writer(self, key: str, durability: Durability) -> _SimulatedPack:
        """Return a writer of a pack, which other hosts see once it is finished."""
        if key in self.storage.objects or key in self._unfinished:
            raise AlreadyExists(f"simulated: {key} already exists")
        data = self._unfinished[key] = bytearray()
        return _SimulatedPack(self, key, data, durability)

    def upload(self, key: str, size: int, durability: Durability, mode: object = None) -> _SimulatedPack:
        """Return a writer of a pack, which is not visible before it is finished; no pack is ever replaced."""
        return self.writer(key, durability)

    def reader(self, key: str) -> _SimulatedReader:
        """Return a reader of a finished pack, or of an unfinished pack of this host."""
        data = self._unfinished.get(key, self.storage.objects.get(key))
        if data is None:
            raise NotFound(f"simulated: {key} does not exist")
        return _SimulatedReader(self, key, data)

    async def close(self) -> None:
        pass

    def maybe_fail(self, what: str) -> None:
        """Raise `Unavailable` while the host is cut off, and at random otherwise.

        The rate is a tenth of that of creates, whose faults matter more.
        """
        cut_off = self._loop.time() < self.host.cut_off_until
        if cut_off or self.host.chance(self.host.rates.faults / 10):
            self.host.log(f"{what}: no response")
            raise Unavailable(f"simulated: {what} got no response")

    def finish(self, key: str, data: bytearray, durability: Durability) -> None:
        """Make a pack visible, with or without a response, or lose it."""
        fails = self.host.chance(self.host.rates.faults)
        if not fails or self.host.chance(0.5):
            self.storage.create(key, bytes(data), durable=False)
            del self._unfinished[key]
            if durability is Durability.FSYNC:
                self._unflushed.add(key)
        if fails:
            self.host.log(f"finish {key}: no response, {'not done' if key in self._unfinished else 'done'}")
            raise Unavailable(f"simulated: finish {key} got no response")

    def discard(self, key: str) -> None:
        """Discard an unfinished pack."""
        self._unfinished.pop(key, None)

    async def _respond(self, what: str) -> None:
        """Await the response, which may be lost."""
        await self.host.step()
        self.maybe_fail(what)

    def _create_late(self, key: str, data: bytes, durable: bool) -> None:
        with contextlib.suppress(AlreadyExists, InvalidArgument):
            self.storage.create(key, data, durable=durable)
            self.host.log(f"late: {key} appears")


class _SimulatedPack:
    """The writer of a pack, which fails at random."""

    def __init__(self, storage: HostStorage, key: str, data: bytearray, durability: Durability) -> None:
        self.key = key
        self._durability = durability
        self._storage = storage
        self._data = data

    def append(self, buffers: BufferStream, size: int) -> int | None:
        self._storage.maybe_fail(f"append {self.key}")
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
    """The reader of a pack, which fails at random."""

    def __init__(self, storage: HostStorage, key: str, data: bytes | bytearray) -> None:
        self._storage = storage
        self._key = key
        self._data = data

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        self._storage.maybe_fail(f"read {self._key}")
        if offset + size > len(self._data):
            raise Corrupt(f"simulated: {self._key} ends before {offset + size}")
        for buffer in buffers:
            memoryview(buffer)[:] = self._data[offset : offset + len(buffer)]
            offset += len(buffer)
