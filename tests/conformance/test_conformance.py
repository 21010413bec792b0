"""The conformance suite: honest storages pass, and each kind of fault is detected."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.broken_storage import LATENCY, LastOneStays, LooksThenWrites, Overwrites
from tstore.core.storage.connect import connect
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Buffers, Durability, Entry, Page, PutMode
from tstore.core.storage.remote import RemoteStorage
from tstore.errors import AlreadyExists, Corrupt, NotFound, StorageFull, Unavailable
from tstore.lab import conformance

CHECKS = {check.name: check for check in conformance.CHECKS}


@pytest.fixture(params=["local", "memory", "remote"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> conformance.Subject:
    name = uuid.uuid4().hex
    match request.param:
        case "local":
            return conformance.Subject.from_url(str(tmp_path / "new" / "store"))
        case "memory":
            return conformance.Subject(lambda: connect(f"memory://{name}"))
        case _:
            return conformance.Subject(lambda: RemoteStorage(MemoryStorage(name)))


@pytest.mark.parametrize("check", conformance.CHECKS, ids=str)
async def test_conformance(check: conformance.Check, subject: conformance.Subject) -> None:
    await check(subject)


async def test_nothing_is_left_behind(tmp_path: Path) -> None:
    findings = await conformance.run_checks(conformance.Subject.from_url(str(tmp_path)))
    assert [f.check for f in findings if f.outcome == "fails"] == []
    assert list(tmp_path.iterdir()) == []


class NoRoom(MemoryStorage):
    """Accepts only short objects."""

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        if sum(map(len, buffers)) > 1 << 20:
            raise StorageFull(f"no room for {key}")
        await super().put(key, buffers, mode)


class GoesAway(MemoryStorage):
    """Does not respond to lists."""

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        raise Unavailable("no answer")
        yield Page([], [])


@pytest.mark.parametrize(("kind", "check"), [(NoRoom, "large_objects"), (GoesAway, "listing")])
async def test_a_full_or_unavailable_storage_breaks_no_promise(kind: type[MemoryStorage], check: str) -> None:
    name = uuid.uuid4().hex
    subject = conformance.Subject(lambda: RemoteStorage(kind(name)))
    findings = {f.check: f for f in await conformance.run_checks(subject)}
    assert findings[check].outcome == "unknown"
    assert findings[check].detail.startswith("no ")
    assert "fails" not in {f.outcome for f in findings.values()}


# ---- broken storages


class NobodyWins(MemoryStorage):
    """Repeats a create whose reply was lost, and takes its own object for another's."""

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        await super().put(key, buffers, mode)
        if mode is PutMode.CREATE and b"of" in buffers[0]:
            raise AlreadyExists(key)


class ForgetsInLists(MemoryStorage):
    """Returns only the first page of a list."""

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        async for page in super().pages(prefix, delimiter):
            yield Page(page.entries[:1000], page.folders)
            return


class ListsLate(MemoryStorage):
    """Does not list the last created object."""

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        async for page in super().pages(prefix, delimiter):
            yield Page(page.entries[:-1], page.folders)


class ListsAllDepths(MemoryStorage):
    """Ignores the delimiter."""

    async def pages(self, prefix: str, delimiter: str = "") -> AsyncIterator[Page]:
        async for page in super().pages(prefix):
            yield page


class OffByOne(MemoryStorage):
    """Treats the end of a range as inclusive."""

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        whole = await self.get(key)
        if offset + size - 1 > len(whole):
            raise Corrupt(key)
        for buffer in buffers:
            memoryview(buffer)[:] = whole[offset : offset + len(buffer)].ljust(len(buffer), b"\0")
            offset += len(buffer)


class ShiftedReads(MemoryStorage):
    """Reads from one byte too far."""

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        whole = await self.get(key) + b"x"
        for buffer in buffers:
            memoryview(buffer)[:] = whole[offset + 1 : offset + 1 + len(buffer)]
            offset += len(buffer)


class PadsReads(MemoryStorage):
    """Returns zeros beyond the end of the object."""

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        whole = await self.get(key)
        for buffer in buffers:
            memoryview(buffer)[:] = whole[offset : offset + len(buffer)].ljust(len(buffer), b"\0")
            offset += len(buffer)


class IgnoresRanges(MemoryStorage):
    """Reads from the beginning of the object, whatever the range."""

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        await super().read(key, 0, buffers, size)


class RefusesLate(MemoryStorage):
    """Checks the length of an object only after receiving it."""

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        whole = bytes(bytearray(await super().get(key)))
        if max_size is not None and len(whole) > max_size:
            raise Corrupt(f"{key} is longer than {max_size} bytes")
        return whole


class Stale(MemoryStorage):
    """Caches what it has read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._seen: dict[str, bytes] = {}

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        if key not in self._seen:
            self._seen[key] = await super().get(key)
        return self._seen[key]


class RemembersMisses(MemoryStorage):
    """Caches missing objects."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._missed: set[str] = set()

    async def head(self, key: str) -> Entry | None:
        entry = None if key in self._missed else await super().head(key)
        self._missed |= {key} if entry is None else set()
        return entry

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        if await self.head(key) is None:
            raise NotFound(key)
        return await super().get(key, max_size)


class Undead(MemoryStorage):
    """Never deletes anything."""

    async def delete(self, key: str) -> None:
        return None


class FoldsCase(MemoryStorage):
    """Treats names that differ in case or quoting as the same."""

    def _folded(self, key: str) -> str:
        return key.replace("%2f", "/").replace("A/a", "a/a").replace("+", " ")

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        return await super().get(self._folded(key))

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        await super().put(self._folded(key), buffers, mode)


class Slow(MemoryStorage):
    """Writes an object in two halves."""

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        whole = b"".join(buffers)
        await super().put(key, [whole[: len(whole) // 2]], mode)
        await asyncio.sleep(10 * LATENCY)
        await super().put(key, [whole], PutMode.REPLACE)


class CutsLargeObjects(MemoryStorage):
    """Stores no more than 100,000 bytes."""

    async def put(
        self, key: str, buffers: Buffers, mode: PutMode, durability: Durability = Durability.FSYNC
    ) -> None:
        await super().put(key, [b"".join(buffers)[:100_000]], mode)


class MissesSilently(MemoryStorage):
    """Returns empty bytes for missing objects."""

    async def get(self, key: str, max_size: int | None = None) -> bytes:
        return b"" if await self.head(key) is None else await super().get(key)


class OtherClock(MemoryStorage):
    """Reports that objects were written an hour too early."""

    async def head(self, key: str) -> Entry | None:
        info = await super().head(key)
        return None if info is None else info._replace(age=3600.0)


LIES = [
    (Overwrites, "create_never_replaces"),
    (Overwrites, "one_winner"),
    (LooksThenWrites, "one_winner"),
    (LastOneStays, "create_never_replaces"),
    (LastOneStays, "one_winner"),
    (NobodyWins, "one_winner"),
    (ForgetsInLists, "long_lists"),
    (ListsLate, "listing"),
    (ListsLate, "pages"),
    (ListsAllDepths, "pages"),
    (OffByOne, "ranges"),
    (ShiftedReads, "ranges"),
    (ShiftedReads, "large_objects"),
    (PadsReads, "ranges"),
    (IgnoresRanges, "ranges"),
    (RefusesLate, "bounded_reads"),
    (Stale, "replacement"),
    (Stale, "deletes"),
    (RemembersMisses, "read_after_create"),
    (RemembersMisses, "archives"),
    (Undead, "deletes"),
    (FoldsCase, "odd_names"),
    (Slow, "cancellation"),
    (CutsLargeObjects, "large_objects"),
    (MissesSilently, "missing"),
    (OtherClock, "listing"),
]


@pytest.mark.parametrize(("liar", "check"), LIES, ids=lambda p: getattr(p, "__name__", p))
async def test_a_broken_storage_is_detected(liar: type[MemoryStorage], check: str) -> None:
    name = uuid.uuid4().hex
    with pytest.raises(AssertionError):
        await CHECKS[check](conformance.Subject(lambda: RemoteStorage(liar(name))))
