"""The promises of every storage, each as a check that fails if it is broken."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import tracemalloc
import unittest
from collections.abc import Awaitable, Callable, Iterator, Sequence

from tstore.conformance.racers import Turn, race_of_processes
from tstore.conformance.subject import Check, Place, Work, heartbeat, many
from tstore.errors import AlreadyExists, Corrupt, Denied, InvalidArgument, NotFound, TStoreError, Unavailable
from tstore.runtime.pool import run
from tstore.storage.base import Storage
from tstore.storage.objects import Durability, Page

__all__ = ["CHECKS"]

_NONE, _FSYNC = Durability.NONE, Durability.FSYNC
_RACERS, _ROUNDS = 8, 12
_NAMES = 1005
_LARGE = 24 << 20
_LONG = 16 << 20  # more than sockets and buffers on the way take

_ODD = (
    "with space",
    "ünïcödé/日本",
    "a%2fb",
    "*?[x]",
    "x" * 200,
    "-",
    "~",
    "a:b",
    "a+b&c=d#e",
    "A/a",
    '"',
)
_BAD = ("", "/", "/etc/x", "..", "../x", "a/../../x", "a/..", "a//b", "a/", ".", "a/./b", "a/.tmp", "a\0b")

CHECKS: list[Check] = []
"""All checks, the quick ones first."""


def _promise(promise: str, needs: str = "") -> Callable[[Work], Work]:
    def add(work: Work) -> Work:
        CHECKS.append(Check(getattr(work, "__name__", ""), promise, work, needs))
        return work

    return add


@_promise("any part of the marker of the store at this URL can be read")
async def reading(place: Place) -> None:
    try:
        whole = await place.one.get("tstore.json")
    except NotFound as error:
        raise unittest.SkipTest("there is no store at this URL") from error
    size = len(whole)
    assert await place.other.size("tstore.json") == size, "its length is not that of its bytes"
    for start, stop in ((0, size), (0, 1), (3, 9), (size - 1, size)):
        part = await run(_read, place.other, "tstore.json", start, [stop - start])
        assert part == whole[start:stop], f"other bytes came for {stop - start} at {start}"
    await _raises(Corrupt, run(_read, place.one, "tstore.json", size - 1, [2]), "reading beyond the end")


@_promise("a created object can be read at once and whole by every client, also by one that found it missing")
async def read_after_create(place: Place) -> None:
    for size, durability in ((0, _FSYNC), (1, _NONE), (25_600, _FSYNC)):
        key, data = place.key(size), bytes(range(256)) * (size // 256) or b"x" * size
        for client in (place.other, place.one):
            assert await client.size(key) is None, f"{key} has a size before it was created"
            await _raises(NotFound, client.get(key), f"reading {key} before it was created")
        await place.one.create(key, data, durability)
        for client in (place.other, place.one):
            assert await client.get(key) == data, f"{size} bytes were created, others are read"
            assert await client.size(key) == size, f"size() is {await client.size(key)}, {size} were created"


@_promise("an object that exists is never created again")
async def create_never_replaces(place: Place) -> None:
    await place.one.create(place.key(1), b"first", _FSYNC)
    for client in (place.one, place.other):
        for data in (b"second", b"first", b""):
            await _raises(AlreadyExists, client.create(place.key(1), data, _FSYNC), "creating a name again")
            assert await client.get(place.key(1)) == b"first", "an object was replaced by a second create"


@_promise("of racing creates of one name exactly one wins, and its bytes stay")
async def one_winner(place: Place) -> None:
    for turn in range(_ROUNDS):
        key = place.key(turn)
        bodies = [b"%d of %d" % (racer, turn) * 20 for racer in range(_RACERS)]
        clients = [place.one if racer % 2 else place.other for racer in range(_RACERS)]
        won = await asyncio.gather(*[_won(c, key, b) for c, b in zip(clients, bodies, strict=True)])
        stored = await place.one.get(key)
        _judge_race(key, Turn([b for b, w in zip(bodies, won, strict=True) if w], stored, _RACERS))
        assert await place.other.get(key) == stored, f"two clients read different bytes of {key}"


@_promise("the same with racing processes")
async def one_winner_among_processes(place: Place) -> None:
    if place.subject.url is None:
        raise unittest.SkipTest("it has no URL under which other processes find it")
    await place.one.create(place.key("here"), b"", _NONE)  # raises where nothing can be created
    url, options = place.subject.url, place.subject.storage_options
    keys = [place.key(turn) for turn in range(_ROUNDS)]
    for key, won in (await race_of_processes(url, options, keys, _RACERS)).items():
        _judge_race(key, Turn(won, await place.one.get(key), _RACERS))


@_promise("a missing object is reported as missing, and deleting it is no error")
async def missing(place: Place) -> None:
    key = place.key("nothing")
    assert await place.one.size(key) is None, "a missing object has a size"
    await _raises(NotFound, place.one.get(key), "get() of a missing object")
    await _raises(NotFound, run(_read, place.one, key, 0, [1]), "reading a missing pack")
    await place.one.delete(f"{place.folder}/alive-nothing")
    if place.one.capabilities.listing:
        assert await place.one.list(f"{place.folder}/") == [], "a new folder is not empty"
        assert await place.one.age(place.folder) is None, "a folder without objects has an age"


@_promise("any part of a pack can be read exactly, and nothing beyond its end")
async def ranges(place: Place) -> None:
    key, whole = place.key("ranges"), secrets.token_bytes(70_000)
    await run(_write_packs, place.one, key, [whole[:1], whole[1:1000], whole[1000:]])
    await place.one.flush(place.folder, _FSYNC)
    parts = [(0, [70_000]), (5, [1, 2, 3]), (69_999, [1]), (17, [9] * 3000), (0, [1]), (1000, [65_536]), (3, [])]
    for client in (place.one, place.other):
        for offset, sizes in parts:
            found = await run(_read, client, key, offset, sizes)
            assert found == whole[offset : offset + sum(sizes)], f"other bytes came for {sum(sizes)} at {offset}"
        for offset, size in ((0, 70_001), (69_999, 2), (70_000, 1), (1 << 20, 1)):
            what = f"reading {size} bytes at {offset} of 70000"
            await _raises(Corrupt, run(_read, client, key, offset, [size]), what)


@_promise("an object that is longer than a caller takes is refused, and is not received whole")
async def bounded_reads(place: Place) -> None:
    data = secrets.token_bytes(_LONG)
    await place.one.create(place.key("long"), data, _NONE)
    key, most = place.key("short"), 1000
    await place.one.create(key, data[:most], _NONE)
    for client in (place.one, place.other):
        assert await client.get(key, most) == data[:most], "other bytes are read with a bound"
        await _raises(Corrupt, client.get(key, most - 1), "reading an object one byte longer than a caller takes")
        with _receiving(place, _LONG // 2):
            await _raises(
                Corrupt, client.get(place.key("long"), most), "reading an object longer than a caller takes"
            )


@_promise("a hint is replaced, and every client sees the new one at once")
async def hint_replaces(place: Place) -> None:
    key = f"{place.folder}/alive-0"
    for number in (1, 22222, 3):
        data = heartbeat(number)
        await place.one.hint(key, data)
        for client in (place.other, place.one):
            assert await client.get(key) == data, "a hint that was replaced is still read"


@_promise("a listing has every name with the prefix at once and in order, and no other", "listing")
async def listing(place: Place) -> None:
    names = ["1", "10", "2", "2-3", "3"]
    keys = sorted(place.key(name) for name in names)
    for key in reversed(keys):
        await place.one.create(key, b"x", _NONE)
        assert key in await place.other.list(f"{place.folder}/"), "a name is missing in a list after its create"
    for prefix in (
        f"{place.folder}/",
        place.folder,
        place.key(""),
        place.key("1"),
        place.key("2-"),
        place.key("4"),
    ):
        found = await place.other.list(prefix)
        assert found == [k for k in keys if k.startswith(prefix)], f"list({prefix!r}) gave {found}"
    assert place.folder.removeprefix("txn/") in await place.other.folders("txn/"), "its folder is missing"
    age = await place.other.age(place.folder)
    assert age is not None, "a folder of objects has no age"
    assert -60 < age < 600, f"objects were written {age} seconds ago, by the server's clock: just now, by ours"
    assert not await place.one.empty(), "the place is said to be empty"


@_promise("pages list every object once with its length, and with a delimiter the folders", "listing")
async def pages(place: Place) -> None:
    await asyncio.gather(*[place.one.create(place.key(n), b"x" * n, _NONE) for n in range(5)])
    entries = [e for p in await _pages(place.one, f"{place.folder}/", "/") for e in p.entries]
    assert [(e.key, e.size) for e in entries] == [(place.key(n), n) for n in range(5)], f"entries are {entries}"
    folders = [f for p in await _pages(place.one, place.folder, "/") for f in p.folders]
    assert folders == [f"{place.folder}/"], f"with a delimiter the folders are {folders}"
    deep = [e.key for p in await _pages(place.one, place.folder, "") for e in p.entries]
    assert deep == [place.key(n) for n in range(5)], f"without a delimiter the keys are {deep}"
    entry = await place.one.head(place.key(3))
    assert entry is not None, "head() returns None for an object that exists"
    assert entry.size == 3, f"head() gives a length of {entry.size}, 3 were written"


@_promise("a deleted object is gone for every client, and its name is free", "listing")
async def deletes(place: Place) -> None:
    first, second = (f"{place.folder}/alive-{number}" for number in (1, 2))  # who may write may delete these
    old, new = heartbeat(1), heartbeat(2)
    for key in (first, second):
        await place.one.create(key, old, _FSYNC)
        assert await place.other.get(key) == old, "other bytes are read than were created"
    await place.one.delete(first)
    await place.one.delete(first)
    for client in (place.other, place.one):
        assert await client.size(first) is None, "a deleted object has a size"
        await _raises(NotFound, client.get(first), "reading a deleted object")
        assert await client.list(f"{place.folder}/") == [second], "a deleted object is listed"
    await place.one.create(first, new, _FSYNC)
    assert await place.other.get(first) == new, "an object deleted before is read"


@_promise("names with unusual characters are kept apart and listed unchanged")
async def odd_names(place: Place) -> None:
    keys = [f"{place.folder}/{name}" for name in _ODD]
    try:
        await place.one.create(keys[0], keys[0].encode(), _NONE)
    except (Denied, InvalidArgument) as error:
        await place.one.create(place.key("plain"), b"", _NONE)  # raises where nothing can be created
        raise unittest.SkipTest("the server takes names of a store's layout only") from error
    for key in keys[1:]:
        await place.one.create(key, key.encode(), _NONE)
    for key in keys:
        assert await place.other.get(key) == key.encode(), f"{key!r} holds the bytes of another"
    if place.one.capabilities.listing:
        found = await place.other.list(f"{place.folder}/")
        assert found == sorted(keys), f"names are listed as others: {sorted(set(found) ^ set(keys))}"


@_promise("names that lead outside or have two spellings are refused")
async def bad_names(place: Place) -> None:
    for key in _BAD:
        for call in (place.one.get(key), place.one.size(key), place.one.create(key, b"x", _NONE)):
            await _raises(InvalidArgument, call, f"the name {key!r}")
        for begin in (place.one.reader, lambda k: place.one.writer(k, _NONE)):
            await _raises(InvalidArgument, run(begin, key), f"the name {key!r}")


@_promise("a cancelled create leaves the whole object or none, and a client that works")
async def cancellation(place: Place) -> None:
    data = bytes(range(256)) * 256
    begun = time.monotonic()
    await place.one.create(place.key("first"), data, _NONE)
    took = time.monotonic() - begun
    for step in range(20):
        task = asyncio.ensure_future(place.one.create(place.key(step), data, _NONE))
        await asyncio.wait([task], timeout=took * step / 16)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with contextlib.suppress(NotFound):
            assert await place.one.get(place.key(step)) == data, "half an object is read after a cancelled create"
    await place.one.create(place.key("last"), data, _NONE)
    assert await place.other.get(place.key("last")) == data, "other bytes are read after cancelled creates"


@_promise("a create whose reply was lost is never reported as another's")
async def lost_replies(place: Place) -> None:
    if place.subject.relay is None:
        raise unittest.SkipTest("no relay stands between client and server that could lose a reply")
    for turn in range(6):
        key, data = place.key(turn), b"%d" % turn * 100
        with place.subject.relay.losing("request" if turn % 3 == 2 else "reply"):
            try:
                await place.one.create(key, data, _FSYNC)
                certain = True
            except Unavailable:
                certain = False
            except AlreadyExists as error:
                raise AssertionError("a create calls its own object another's, for its reply was lost") from error
        stored = await place.other.get(key) if certain or await place.other.size(key) is not None else None
        assert stored in (None, data), "half an object is read after a lost reply"


@_promise("large objects are written and read unchanged")
async def large_objects(place: Place) -> None:
    piece = secrets.token_bytes(_LARGE // 12)
    packs = await run(_write_packs, place.one, place.key("large"), [piece] * 12)
    await place.one.flush(place.folder, _FSYNC)
    for key, count in packs:
        assert await place.other.size(key) == count * len(piece), "a pack has another length than was written"
        assert await place.other.get(key) == piece * count, "other bytes are read of a large object"
        middle = await run(_read, place.other, key, len(piece) // 2, [len(piece) // 2])
        assert middle == piece[len(piece) // 2 :], "other bytes are read in the middle of a large object"


@_promise(f"a listing of {_NAMES} names is complete", "listing")
async def long_lists(place: Place) -> None:
    keys = [place.key(f"{number:05d}") for number in range(_NAMES)]
    await many(lambda key: place.one.create(key, b"", _NONE), keys)
    found = await place.other.list(f"{place.folder}/")
    assert found == keys, f"{len(keys)} names were created, {len(found)} are listed"


@contextlib.contextmanager
def _receiving(place: Place, most: int) -> Iterator[None]:
    """Check that a client receives no more bytes than that in the block: as its relay or its memory tells."""
    relay, traced = place.subject.relay, tracemalloc.is_tracing()
    before = 0 if relay is None else relay.replied
    if not traced:
        tracemalloc.start()
    tracemalloc.reset_peak()
    had, _ = tracemalloc.get_traced_memory()
    try:
        yield
        took = tracemalloc.get_traced_memory()[1] - had if relay is None else relay.replied - before
    finally:
        if not traced:
            tracemalloc.stop()
    assert took < most, f"{took} bytes of an object were received, though a caller takes only a few"


def _judge_race(key: str, turn: Turn) -> None:
    won, stored, racers = turn
    assert len(won) == 1, f"{len(won)} of {racers} racing creates of one name were told that they have won ({key})"
    assert won[0] == stored, f"the bytes of {key} are not those of the create that has won"


async def _won(client: Storage, key: str, data: bytes) -> bool:
    try:
        await client.create(key, data, _NONE)
    except AlreadyExists:
        return False
    return True


async def _raises(expected: type[TStoreError], call: Awaitable[object], what: str) -> None:
    try:
        found = await call
    except expected:
        return
    except TStoreError as error:
        raise AssertionError(
            f"{what} gave {type(error).__name__}, {expected.__name__} was expected: {error}"
        ) from error
    shown = f"{len(found)} bytes" if isinstance(found, (bytes, bytearray)) else repr(found)
    raise AssertionError(f"{what} gave {shown}, {expected.__name__} was expected")


def _read(client: Storage, key: str, offset: int, sizes: Sequence[int]) -> bytes:
    buffers = [bytearray(size) for size in sizes]
    client.reader(key).read_into(offset, buffers, sum(sizes))
    return b"".join(buffers)


def _write_packs(client: Storage, key: str, pieces: Sequence[bytes]) -> list[tuple[str, int]]:
    """The packs that the pieces filled, the first under `key`, and how many pieces each has."""
    packs: list[tuple[str, int]] = []
    writer, count = client.writer(key, _FSYNC), 0
    for piece in pieces:
        if writer.append([piece[:7], piece[7:]], len(piece)) is None:
            writer.finish()
            packs.append((writer.key, count))
            writer, count = client.writer(f"{key}-{len(packs)}", _FSYNC), 0
            assert writer.append([piece], len(piece)) == 0, "an empty pack does not begin at 0"
        count += 1
    writer.finish()
    return [*packs, (writer.key, count)]


async def _pages(client: Storage, prefix: str, delimiter: str) -> list[Page]:
    return [page async for page in client.pages(prefix, delimiter)]
