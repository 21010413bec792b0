"""The one interface to storage: bytes by key under one URL.

A new kind of storage implements `capabilities`, `get`, `read`, `head`, `put`, `pages`, `delete` and `close`. The
other methods are derived from these; a storage may override them. `remote.as_remote` adds retries, limits and the
I/O loop to a storage behind a network, and `tstore.lab.conformance` tests any storage. A `Wrapper`
implements the same interface.

Keys are relative, `/`-separated and checked by `checked_key`. Objects are immutable, with three exceptions: hints
and heartbeats are replaced, a repair replaces records, and a copy replaces damaged packs and manifests. A damaged
object is never deleted and created again, because a late repeat of the DELETE could remove the new object.
`writer`, `reader`, `upload` and the methods of the objects that they return block. Callers run them in the threads
of `runtime.pool`, so that a chunk does not cost a switch to the event loop and back.

Every implementation maps its failures to these errors:

    NotFound        the object does not exist
    AlreadyExists   another request has created the object
    Denied          credentials or permissions; a retry would not help
    InvalidArgument a key, URL or option that the storage does not accept
    StorageFull     a full disk, a quota, or an object longer than the storage accepts
    Corrupt         a response that is not what was requested: another length, another range, no object at all
    Throttled       too many requests; `retry_after` if the server named a time
    Unavailable     no response, an incomplete one, or one that means "not now"

After `Unavailable` or `Throttled` the outcome of a write is unknown, and only a read can tell. After any other
error the write has not taken effect, and never will. After `AlreadyExists` from a durable create, the existing
object is durable, even if its creator died before making it durable (except for `StagedObject`).
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tstore.core.runtime.concurrency import together
from tstore.core.runtime.pool import STREAMS
from tstore.core.storage.limits import checked_pages
from tstore.core.storage.objects import (
    SHORT_OBJECT,
    Buffers,
    BufferStream,
    Capabilities,
    Durability,
    Entry,
    Keys,
    Page,
    PutMode,
    Traffic,
    Tuning,
    checked_key,
)
from tstore.core.storage.packs import PACK, BufferedReader, Packs, Upload
from tstore.errors import AlreadyExists, Corrupt, Denied, NotFound

__all__ = ["LEADING_BYTES", "REMOTE", "Leading", "Objects", "PackReader", "PackWriter", "StagedObject", "Storage"]

REMOTE = Tuning(streams=STREAMS, batch=PACK, piece=PACK, gap=256 << 10)
"""How to read packs behind a network."""

_MAX_CONCURRENT = 32  # concurrent requests of `leading` to a server

LEADING_BYTES = 32 << 20
"""`leading` stops once it has read more than this many bytes, in at least two objects."""


class Leading(NamedTuple):
    """The objects before the first missing key, and whether that key is a hole: the key after it exists."""

    objects: list[bytes]
    hole: bool
    truncated: bool = False
    """Whether reading stopped at `LEADING_BYTES`, so that more objects may follow."""
    superseded: bool = False
    """Whether the object `unless` existed after the reading."""


Objects = list[bytes | None]
"""Objects in the order of their keys, None for those that were not read."""


class StagedObject(Protocol):
    """An object that has no key yet, for a writer that tries one key after another until one is free."""

    async def write(self, key: str) -> None:
        """Ensure that the bytes are durable before the object appears, even with `Durability.NONE`.

        The caller then calls `create`, with a key in the same folder as `key`.
        """

    async def create(self, key: str, unless: str = "") -> None:
        """Create the object, as `Storage.create` does; raise `AlreadyExists` also if `unless` then exists.

        After `AlreadyExists` another key can be tried; what exists may not be durable yet.
        """

    async def discard(self) -> None:
        """Release what was staged. Always the last call, also after `create`."""


class PackWriter(Protocol):
    """A new object, appended to by one thread at a time, then finished."""

    key: str

    def append(self, buffers: BufferStream, size: int) -> int | None:
        """Append the buffers (`size` bytes in total) and return their offset.

        If the object is full, return None and take no buffer; the caller then finishes it and starts another.
        """

    def finish(self) -> None:
        """End the object. An upload is complete on return, a pack only after `Storage.flush` of its folder."""

    def discard(self) -> None:
        """Abandon the object; what was written may be deleted."""


class PackReader(Protocol):
    """Positioned reads of one object."""

    def read_into(self, offset: int, buffers: Buffers, size: int) -> None:
        """Fill the buffers (`size` bytes in total) from `offset`.

        Raise `Corrupt` if the object is shorter, `NotFound` if it no longer exists.
        """


class Storage(abc.ABC):
    """Bytes by key under one URL."""

    url: str
    """The location, without any secret."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """What the storage can do, as far as is known yet."""

    @abc.abstractmethod
    async def get(self, key: str, max_size: int | None = None) -> bytes:
        """Return a whole object; raise `NotFound` if it does not exist.

        Raise `Corrupt` if it is longer than `read_limit(key, max_size)` bytes, without receiving the rest.
        """

    @abc.abstractmethod
    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        """Fill the buffers (`size` bytes in total) from `offset`.

        Raise `NotFound` (unless `size` is 0), or `Corrupt` if the object ends earlier.
        """

    @abc.abstractmethod
    async def head(self, key: str) -> Entry | None:
        """Return the size and age of an object, None if it does not exist."""

    @abc.abstractmethod
    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        """Store the joined buffers as one object, all or nothing, durable on return if asked.

        Raise `AlreadyExists` if the key of a create is taken, `Unavailable` if the outcome is unknown.
        """

    @abc.abstractmethod
    def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        """Yield the pages of a listing of all keys with the prefix, in key order.

        With the delimiter "/", a key with a `/` after the prefix is listed only as its folder (`Page.folders`).
        """

    @abc.abstractmethod
    async def delete(self, key: str) -> None:
        """Delete an object or an empty folder; do nothing if there is none with that key."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Close sessions and files; the next call opens them again."""

    @property
    def tuning(self) -> Tuning:
        """How to read packs fast."""
        return REMOTE

    @property
    def traffic(self) -> Traffic | None:
        """The requests made so far, None if they are not counted."""
        return None

    async def create(self, key: str, data: bytes, durability: Durability) -> None:
        """Create an object, all or nothing; raise `AlreadyExists` if the key is taken."""
        await self.put(key, [data], PutMode.CREATE, durability)

    async def replace(self, key: str, data: bytes) -> None:
        """Create or replace an object; until `sync`, a power failure may undo the write."""
        await self.put(key, [data], PutMode.REPLACE, Durability.NONE)

    async def size(self, key: str) -> int | None:
        """Return the length of an object in bytes, None if it does not exist."""
        entry = await self.head(key)
        return None if entry is None else entry.size

    async def sizes(self, keys: Iterable[str]) -> dict[str, int]:
        """Return the lengths of the objects by key, without those that do not exist."""
        keys = list(keys)
        sizes = await together(self.size, keys)
        return {key: size for key, size in zip(keys, sizes, strict=True) if size is not None}

    async def leading(self, keys: Iterable[str], unless: str = "") -> Leading:
        """Return the objects before the first missing key, and whether the key after that one exists.

        Then look for the object `unless`, if one is named. Stop early after `LEADING_BYTES`. Raise `Corrupt` if an
        object is longer than its bound (`read_limit`).
        """
        leading = await _read_leading(self, keys, _MAX_CONCURRENT if self.tuning.latency_bound else 1)
        if unless and await _get_or_none(self, unless) is not None:
            return leading._replace(superseded=True)
        return leading

    async def short_objects(self, keys: Iterable[str]) -> Objects:
        """Return the objects, in the order of the keys; None for one that is missing, damaged, or not short.

        A short object has at most `SHORT_OBJECT` bytes. The caller reads the others one at a time.
        """
        objects = await together(lambda key: _get_short(self, key), keys)
        return [None if isinstance(found, Corrupt) else found for found in objects]

    def stage(self, data: bytes, durability: Durability) -> StagedObject:
        """Return a new object without a key, to be created under the first of several keys that is free."""
        return _StagedInMemory(self, data, durability)

    async def empty(self) -> bool:
        """Return whether there is no object under the URL."""
        async for page in checked_pages(self.pages("", "/"), "", self.url):
            if page.entries or page.folders:
                return False
        return True

    async def entries(self, prefix: str) -> Sequence[Entry]:
        """Return the entries of all keys that start with the prefix, in any order."""
        pages = checked_pages(self.pages(prefix), prefix, self.url)
        return [entry async for page in pages for entry in page.entries]

    def above(self) -> Iterator[Storage]:
        """Yield the folders above the URL, nearest first, as far as they can be known."""
        return iter(())

    async def enclosing(self, key: str) -> str | None:
        """Return the nearest folder above the URL that has an object of this key, None if none is known."""
        for folder in self.above():
            with contextlib.suppress(Denied):  # permissions may end at the store's own folder
                if await folder.head(key) is not None:
                    return folder.url
        return None

    async def list(self, prefix: str) -> Keys:
        """Return the keys that start with the prefix, sorted."""
        pages = checked_pages(self.pages(prefix), prefix, self.url)
        keys = [entry.key async for page in pages for entry in page.entries]
        keys.sort()
        return keys

    async def folders(self, prefix: str) -> Keys:
        """Return the distinct parts of all keys between the prefix and the next `/`, sorted."""
        pages = checked_pages(self.pages(prefix, "/"), prefix, self.url)
        names = [folder[len(prefix) :].rstrip("/") async for page in pages for folder in page.folders]
        names.sort()
        return [name for name, _ in itertools.groupby(names)]  # a set would double the memory of a long list

    async def age(self, prefix: str) -> float | None:
        """Return the seconds since the last write of an object in the folder `prefix`, by the storage's clock.

        Return None if there is no such folder, and 0 (as if just written) if the age is unknown.
        """
        youngest: float | None = None
        async for page in checked_pages(self.pages(f"{prefix}/"), f"{prefix}/", self.url):
            ages = [0.0 if entry.age is None else entry.age for entry in page.entries]
            youngest = min(ages if youngest is None else [youngest, *ages], default=None)
        return youngest

    def writer(self, key: str, durability: Durability) -> PackWriter:
        """Return a writer of a new pack; raise `AlreadyExists` if the key is known to be taken. Blocking."""
        return self._packs.writer(self, checked_key(key, self.url))

    def reader(self, key: str) -> PackReader:
        """Return a reader of an object; raise `NotFound` here or at its first read. Blocking."""
        return BufferedReader(self._packs, self, checked_key(key, self.url))

    def upload(self, key: str, size: int, durability: Durability, mode: PutMode = PutMode.CREATE) -> PackWriter:
        """Return a writer of an object of `size` bytes, which appears whole when it is finished, or never.

        Finishing a create raises `AlreadyExists` if the key is taken by then. Blocking.
        """
        checked_key(key, self.url)
        return Upload(key, size, lambda buffers: self.put(key, buffers, mode, durability))

    async def flush(self, prefix: str, durability: Durability) -> None:
        """Wait until all finished packs in the folder `prefix` are complete, and durable if asked.

        Raise the first error of their writes.
        """
        await self._packs.flush(prefix)

    async def sync(self) -> None:
        """Make everything durable that any process has written here so far, even with `Durability.NONE`."""
        return

    async def sweep(self) -> None:
        """Remove the temporary files of creates that failed long ago."""
        return

    @property
    def _packs(self) -> Packs:
        """The packs in memory, created at the first use, because this class has no `__init__`."""
        packs: Packs | None = vars(self).get("_buffered")
        return packs or vars(self).setdefault("_buffered", Packs())  # atomic: threads may race


class _StagedInMemory:
    def __init__(self, storage: Storage, data: bytes, durability: Durability) -> None:
        self._storage = storage
        self._data = data
        self._durability = durability

    async def write(self, key: str) -> None:
        self._durability = Durability.FSYNC  # the create then makes the bytes durable before the object appears

    async def create(self, key: str, unless: str = "") -> None:
        await self._storage.create(key, self._data, self._durability)
        if unless and await _get_or_none(self._storage, unless) is not None:
            raise AlreadyExists(f"{self._storage.url}: {key} exists, in {unless}")

    async def discard(self) -> None:
        return None


async def _read_leading(storage: Storage, keys: Iterable[str], concurrency: int) -> Leading:
    keys, objects, size = iter(keys), list[bytes](), 0
    count = min(3, concurrency)  # usually the newest object, the first missing key, and the key after it
    while batch := list(itertools.islice(keys, count)):
        gets = [_get_short(storage, key) for key in batch]
        results = [await gets[0]] if len(gets) == 1 else await asyncio.gather(*gets)  # a single get needs no task
        for missing, key in enumerate(batch):
            result = results[missing]
            if isinstance(result, Corrupt):  # perhaps too long to be read together with others
                result = await _get_or_none(storage, key)
            if result is None:
                break
            objects.append(result)
            size += len(result)
            if size > LEADING_BYTES and len(objects) > 1:
                return Leading(objects, False, truncated=True)
        else:
            count = min(2 * count, concurrency)
            continue
        if missing + 1 < len(batch):
            hole = results[missing + 1] is not None
        else:
            batch += itertools.islice(keys, 1)
            hole = len(batch) > missing + 1 and await storage.size(batch[-1]) is not None
        if not hole:
            break
        if await _get_or_none(storage, batch[missing]) is None:
            return Leading(objects, True)
        keys = itertools.chain(batch[missing:], keys)  # the missing object exists by now, so there is no hole
    return Leading(objects, False)


async def _get_or_none(storage: Storage, key: str) -> bytes | None:
    try:
        return await storage.get(key)
    except NotFound:
        return None


async def _get_short(storage: Storage, key: str) -> bytes | Corrupt | None:
    """Return an object, None if it is missing, or an error if it is longer than `SHORT_OBJECT`."""
    try:
        return await storage.get(key, SHORT_OBJECT)
    except Corrupt as error:
        return error.with_traceback(None)
    except NotFound:
        return None
