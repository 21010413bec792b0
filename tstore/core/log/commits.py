"""The records of a log as bytes, by version: each in a separate object, or old ones in archives.

1. An archive has the records of `ARCHIVE_EVERY` consecutive versions, byte for byte. A garbage collection creates
   it, if it is absent (`maintenance.archiving`). All collections write the same bytes, so a race is harmless.
2. A later collection that finds the archive deletes the separate objects of these records. So where such an object
   was deleted, its archive exists; no archive is ever deleted.
3. A number is never used again, although its object is gone. A writer may stall after it has found a number
   absent, for as long as others take to commit that version, archive it and delete its object; then the create of
   the writer succeeds. So after every create the writer looks for the archive. If there is one, the version was
   somebody else's: the create has failed (`AlreadyExists`), and the object that it left next to the archive is no
   commit.
4. So a record has two places, and the archive takes precedence. Whoever reads a record looks for its archive
   as well: a version does not exist if it is in neither place, and an object next to the archive is ignored until
   the next collection deletes it.
5. On a disk the archive is looked up after the read, so nothing is missed: every object deleted by then has an
   archive. Over a network both requests are sent at once, to save time. A reader then misses a record only if two
   collections, one that archives and one that deletes, run while its request is under way. So a search for the
   newest version that took long is repeated. Writers never rely on it, because of step 3.

The newest version is searched for:

1. Gallop: probe the numbers 1, 2, 4, … above one that exists, until one is absent.
2. Bisect between the last number that exists and the first that does not.

If probing many numbers takes no longer than probing one, they are probed in a few batches. The first batch is
enough if at most one number above the base exists. The second reaches up to 64 above the base, because a search
begins at a hint, which every 64th version renews. The last batch has all numbers between the bounds.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from tstore.core.format.layout import ARCHIVE_EVERY, archive_end, archive_key, by_archive, commit_key
from tstore.core.format.objects.encoding import Archive, ArchiveEnd, decode
from tstore.core.runtime.event_loops import PerLoop
from tstore.core.storage.base import LEADING_BYTES, Leading, Objects, Storage
from tstore.core.storage.objects import SHORT_OBJECT, Durability, overlong
from tstore.errors import AlreadyExists, Corrupt, NotFound, UnsupportedFormat

__all__ = ["NEVER", "Bounds", "CommitObjects", "Search", "places_of"]

A = TypeVar("A", bound=ArchiveEnd)

_LOADED = 2  # archives kept in memory


class CommitObjects:
    """The records of one store as bytes; the event loops of several threads may share it."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._existing: set[int] = set()  # the last versions of archives that are known to exist
        self._loaded: dict[int, Archive] = {}
        self._looks: PerLoop[dict[int, asyncio.Task[Archive | None]]] = PerLoop(
            dict
        )  # these begin in the next turn

    @property
    def advice(self) -> str:
        """The advice for a damaged or missing record or archive."""
        return f"restore it from a copy of the store, or run tstore repair {self.storage.url}"

    async def get(self, version: int, max_size: int | None = None) -> bytes:
        """Return the record of a version; raise `NotFound`, or `Corrupt` if it or its archive is damaged.

        Raise `Corrupt` also if it is longer than `max_size` bytes.
        """
        end = archive_end(version)
        if end in self._existing:
            if (archive := await self.archive(end)) is None:
                return await self.get(version, max_size)
            own = None
        elif self.storage.tuning.latency_bound:
            archive, own = await asyncio.gather(self._shared_look(end), self._own(version, max_size))
        else:
            own = await self._own(version, max_size)
            archive = await self.archive(end)
        if archive is not None:
            data = archive.record(version)
            if max_size is not None and len(data) > max_size:
                raise overlong(f"{self.storage.url}: {commit_key(version)}", max_size)
            return data
        if isinstance(own, bytes):
            return own
        raise own or NotFound(f"{self.storage.url}: {commit_key(version)} does not exist")

    async def short_objects(self, versions: Iterable[int]) -> Objects:
        """Return the records of versions in their order: `Storage.short_objects` for records."""
        versions = list(versions)
        blocks = by_archive(versions)
        single = [version for end in blocks if end not in self._existing for version in blocks[end]]
        reading = self.storage.short_objects(map(commit_key, single))
        if self.storage.tuning.latency_bound:
            looking = asyncio.gather(*map(self._archive_or_error, blocks))
            objects, archives = await asyncio.gather(reading, looking)
        else:
            objects = await reading
            archives = [await self._archive_or_error(end) for end in blocks]
        found = dict(zip(single, objects, strict=True))
        for archive, block in zip(archives, blocks.values(), strict=True):
            if isinstance(archive, Archive):
                records = [archive.record(version) for version in block]
                found |= {v: r if len(r) <= SHORT_OBJECT else None for v, r in zip(block, records, strict=True)}
            elif archive is not None:
                found |= dict.fromkeys(block)  # their archive is damaged
            elif block[0] not in found:
                return await self.short_objects(versions)
        return [found[version] for version in versions]

    async def leading(self, first: int, stop: int) -> Leading:
        """Return the consecutive records of versions `first:stop`: `Storage.leading` for records."""
        objects: list[bytes] = []
        size = 0
        while first < stop:
            end = archive_end(first)
            if end in self._existing:
                if (archive := await self.archive(end)) is None:
                    continue
                added = [archive.record(version) for version in range(first, min(end + 1, stop))]
            else:
                keys = map(commit_key, range(first, stop))
                if self.storage.tuning.latency_bound:
                    reading = self.storage.leading(keys)
                    (added, hole, truncated, _), archive = await asyncio.gather(reading, self._shared_look(end))
                else:
                    leading = await self.storage.leading(keys, archive_key(first))
                    if not leading.superseded and first + len(leading.objects) <= end and not objects:
                        return leading  # the usual case
                    added, hole, truncated, superseded = leading
                    archive = await self.archive(end) if superseded else None
                archived = [] if archive is None else [end]
                while not archived and end < archive_end(first + len(added)):  # the next block may be archived
                    end += ARCHIVE_EVERY
                    archived = [] if await self.archive(end) is None else [end]
                if not archived:
                    return Leading(objects + added, hole, truncated)
                added = added[: max(0, archived[0] - ARCHIVE_EVERY + 1 - first)]
            objects += added
            first += len(added)
            size += sum(map(len, added))
            if size > LEADING_BYTES:
                break
        return Leading(objects, hole=False, truncated=first < stop)

    async def existing(self, versions: Iterable[int]) -> set[int]:
        """Return which versions exist."""
        existing: set[int] = set()
        keys: dict[str, list[int]] = {}  # the versions for which an object of each key would stand
        for end, block in by_archive(versions).items():
            if end in self._existing:
                existing.update(block)
                continue
            for version in block:
                keys[commit_key(version)] = [version]
            keys[archive_key(end)] = block
        for key in await self.storage.sizes(keys) if keys else ():
            existing.update(keys[key])
        return existing

    def forget(self, version: int) -> None:
        """Read the archive of a version again when it is needed next, since a repair may have replaced it."""
        self._loaded.pop(archive_end(version), None)

    @property
    def last_archived(self) -> int:
        """The last version in an archive that has been read, 0 without any."""
        return max(self._existing, default=0)

    def is_archived(self, version: int) -> bool:
        """Return whether an archive that has been read has the record of a version."""
        return archive_end(version) in self._existing

    async def create(self, version: int, data: bytes, durability: Durability) -> None:
        """Create a record; raise `AlreadyExists` if the version exists, even in an archive."""
        await self.storage.create(commit_key(version), data, durability)
        await self.check_not_archived(version)

    async def check_not_archived(self, version: int) -> None:
        """Raise `AlreadyExists` if the record of a version is in an archive."""
        if await self.archive(archive_end(version)) is not None:
            raise AlreadyExists(f"{self.storage.url}: {commit_key(version)} exists, in an archive")

    async def archive(self, end: int) -> Archive | None:
        """Return the archive that ends at a version, None if there is none; raise `Corrupt` if it is damaged.

        Also return None if an administrator has deleted it while its records still have separate objects.
        """
        if (loaded := self._loaded.get(end)) is not None:
            return loaded
        archive = await self._read_archive(end, Archive)
        if archive is not None:
            self._loaded[end] = archive
            for old in list(self._loaded)[:-_LOADED]:
                self._loaded.pop(old, None)
        return archive

    async def check_archive(self, end: int) -> bool:
        """Return whether the archive that ends at a version exists; raise `Corrupt` if its checksum is wrong.

        Its records are not decoded, which would take ten times as long as the checksum.
        """
        return await self._read_archive(end, ArchiveEnd) is not None

    async def _read_archive(self, end: int, kind: type[A]) -> A | None:
        key = archive_key(end)
        objects = (await self.storage.leading([key])).objects  # one quick read, which is never stale
        if not objects:
            if end in self._existing and await self.storage.size(commit_key(end)) is None:
                raise Corrupt(f"{self.storage.url}: {key} is missing; {self.advice}")
            self._existing.discard(end)
            return None
        try:
            archive = decode(objects[0], kind)
            if archive.end != end:
                raise Corrupt(f"it is the archive up to version {archive.end}")
        except (Corrupt, UnsupportedFormat) as error:
            advice = f"; {self.advice}" if isinstance(error, Corrupt) else ""
            raise type(error)(f"{self.storage.url}: {key}: {error}{advice}") from error
        self._existing.add(end)
        return archive

    async def _shared_look(self, end: int) -> Archive | None:
        """Return what `archive` returns, with one request for all calls in this turn of the event loop."""
        looks = self._looks.get()

        async def look() -> Archive | None:
            del looks[end]
            return await self.archive(end)

        if end not in looks:
            looks[end] = asyncio.get_running_loop().create_task(look())
            looks[end].add_done_callback(_retrieve)  # all calls may have been cancelled
        return await asyncio.shield(looks[end])

    async def _archive_or_error(self, end: int) -> Archive | Corrupt | UnsupportedFormat | None:
        try:
            return await self.archive(end)
        except (Corrupt, UnsupportedFormat) as error:
            return error

    async def _own(self, version: int, max_size: int | None) -> bytes | Corrupt | NotFound:
        """Return the object of a record, or the error if it can't be read."""
        try:
            return await self.storage.get(commit_key(version), max_size)
        except (Corrupt, NotFound) as error:
            return error


def _retrieve(task: asyncio.Task[Archive | None]) -> None:
    """Retrieve the error of a task, so that asyncio does not log it as lost."""
    if not task.cancelled():
        task.exception()


def places_of(version: int) -> tuple[str, str]:
    """Return the key of a record, and the key of its archive, as `StagedObject.create` takes them."""
    return commit_key(version), archive_key(version)


NEVER = 1 << 62
"""A number that no version has."""

_PROBES = 31  # probes in one batch
_RECENTLY = 1.0  # seconds


class Bounds(NamedTuple):
    """The bounds of a search: `low` exists, or is 0; `high` does not exist, and is `NEVER` if none was found."""

    low: int
    high: int


class Search:
    """The searches in one log, and what they have shown about its end.

    `exist` takes numbers and returns whether each exists. `batches` says that `exist` takes no longer for many
    numbers than for one. `highest` is the highest number known to exist.
    """

    def __init__(self, exist: Callable[[Sequence[int]], Awaitable[Sequence[bool]]], *, batches: bool) -> None:
        self._exist = exist
        self._batches = batches
        self.highest = 0
        self._end = 0, -math.inf

    def note_end(self, number: int, since: float) -> None:
        """Record that nothing existed above a number at time `since` of the event loop."""
        self._end = number, since

    def is_end(self, number: int) -> bool:
        """Return whether a check within the last second found nothing above a number."""
        end, since = self._end
        return number == end and asyncio.get_running_loop().time() - since < _RECENTLY

    async def gallop(self, base: int, low: int) -> Bounds:
        """Return bounds of the newest number; `high` is `NEVER` if all probed numbers exist.

        `low` exists, or is 0. If `base` is higher, it is probed too.
        """
        numbers = [base] if base > low else []
        for distances in _distances(self._batches):
            numbers += [base + distance for distance in distances]
            low, high = await self.narrow(Bounds(low, NEVER), numbers)
            if high < NEVER or low + distances[-1] >= NEVER:
                break
            numbers = []
        return Bounds(low, high)

    def between(self, bounds: Bounds) -> list[int]:
        """Return the numbers to probe next: all between the bounds, or some that divide the range evenly."""
        low, high = bounds
        limit = _PROBES if self._batches else 1
        if high - low - 1 <= limit:
            return list(range(low + 1, high))
        return [low + (high - low) * i // (limit + 1) for i in range(1, limit + 1)]

    async def narrow(self, bounds: Bounds, numbers: Sequence[int], above: Sequence[int] = ()) -> Bounds:
        """Probe numbers between the bounds, in ascending order, and return closer bounds.

        The numbers `above` the bounds are probed only for `highest`, and to see whether anything follows the end.
        """
        since = asyncio.get_running_loop().time()
        low, high = bounds
        probed = [*numbers, *above]
        exists = {high: False, **dict(zip(probed, await self._exist(probed), strict=True))}
        for number in numbers:
            if not exists[number]:
                high = number
                break
            low = number
        self.highest = max(self.highest, *(number for number in probed if exists[number]), 0)
        if high == low + 1 and exists.get(high + 1) is False:
            self.note_end(low, since)
        return Bounds(low, high)


def _distances(batches: bool) -> Iterator[list[int]]:
    """Yield the distances from the base at which to probe, in batches; each is twice the previous one."""
    yield [1, 2, 4]
    if batches:
        yield [8, 16, 32, 64]
    first, count = (7, 7) if batches else (3, 1)
    for exponent in itertools.count(first, count):
        yield [1 << i for i in range(exponent, exponent + count)]
