"""The promises of every storage, each with the check that tests it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
import tracemalloc
import unittest
from collections.abc import Awaitable, Iterator, Sequence

from tstore.core.runtime.pool import run
from tstore.core.storage.base import Leading, Storage
from tstore.core.storage.objects import Durability, Page
from tstore.errors import AlreadyExists, Corrupt, Denied, InvalidArgument, NotFound, TStoreError, Unavailable
from tstore.lab.conformance.racers import RaceOutcome, race_processes
from tstore.lab.conformance.suite import CHECKS, Scratch, for_each, heartbeat, promise

__all__ = ["CHECKS"]

_NONE, _FSYNC = Durability.NONE, Durability.FSYNC
_RACERS, _ROUNDS = 8, 12
_KEY_COUNT = 1005  # more keys than most servers list in a page
_LARGE_OBJECT = 24 << 20  # bytes: more than one pack of a remote storage
_REFUSED_OBJECT = 16 << 20  # bytes: more than the buffers of sockets take, so that a part is never received

_ODD_NAMES = ("with space", "ünïcödé/日本", "a%2fb", "*?[x]", "x" * 200, "-", "~", "a:b", "a+b&c=d#e", "A/a", '"')
_BAD_KEYS = ("", "/", "/etc/x", "..", "../x", "a/../../x", "a/..", "a//b", "a/", ".", "a/./b", "a/.tmp", "a\0b")


@promise("any part of the marker of the store at this URL can be read")
async def reading(scratch: Scratch) -> None:
    try:
        content = await scratch.one.get("tstore.json")
    except NotFound as error:
        raise unittest.SkipTest("there is no store at this URL") from error
    size = len(content)
    assert await scratch.other.size("tstore.json") == size, "size() differs from the number of bytes read"
    for start, stop in ((0, size), (0, 1), (3, 9), (size - 1, size)):
        part = await run(_read, scratch.other, "tstore.json", start, [stop - start])
        assert part == content[start:stop], f"reading {stop - start} bytes at {start} returned other bytes"
    await _raises(Corrupt, run(_read, scratch.one, "tstore.json", size - 1, [2]), "reading beyond the end")


@promise("every client can immediately read all of a created object, even if it found the object missing before")
async def read_after_create(scratch: Scratch) -> None:
    for size, durability in ((0, _FSYNC), (1, _NONE), (25_600, _FSYNC)):
        key, data = scratch.key(size), bytes(range(256)) * (size // 256) or b"x" * size
        for client in (scratch.other, scratch.one):
            assert await client.size(key) is None, f"{key} has a size before it is created"
            await _raises(NotFound, client.get(key), f"reading {key} before it is created")
        await scratch.one.create(key, data, durability)
        for client in (scratch.other, scratch.one):
            assert await client.get(key) == data, f"{size} bytes were written, but other bytes were read"
            assert await client.size(key) == size, f"size() is not {size}"
            assert await client.sizes([key, f"{key}-missing"]) == {key: size}, "sizes() differs from size()"


@promise("an existing object is never created again")
async def create_never_replaces(scratch: Scratch) -> None:
    await scratch.one.create(scratch.key(1), b"first", _FSYNC)
    for client in (scratch.one, scratch.other):
        for data in (b"second", b"first", b""):
            await _raises(AlreadyExists, client.create(scratch.key(1), data, _FSYNC), "a second create")
            assert await client.get(scratch.key(1)) == b"first", "a second create replaced an object"


@promise("of racing creates of one key exactly one wins, and its bytes remain")
async def one_winner(scratch: Scratch) -> None:
    for number in range(_ROUNDS):
        key = scratch.key(number)
        bodies = [b"%d of %d" % (racer, number) * 20 for racer in range(_RACERS)]
        clients = [scratch.one if racer % 2 else scratch.other for racer in range(_RACERS)]
        won = await asyncio.gather(*[_create_wins(c, key, b) for c, b in zip(clients, bodies, strict=True)])
        stored = await scratch.one.get(key)
        _check_race(key, RaceOutcome([b for b, w in zip(bodies, won, strict=True) if w], stored, _RACERS))
        assert await scratch.other.get(key) == stored, f"two clients read different bytes of {key}"


@promise("of racing creates by processes exactly one wins, and its bytes remain")
async def one_winner_among_processes(scratch: Scratch) -> None:
    if scratch.subject.url is None:
        raise unittest.SkipTest("the storage has no URL that other processes can use")
    await scratch.one.create(scratch.key("here"), b"", _NONE)  # raises if creates are impossible
    url, options = scratch.subject.url, scratch.subject.storage_options
    keys = [scratch.key(number) for number in range(_ROUNDS)]
    for key, winners in (await race_processes(url, options, keys, _RACERS)).items():
        _check_race(key, RaceOutcome(winners, await scratch.one.get(key), _RACERS))


@promise("a missing object is reported as missing, and can be deleted without an error")
async def missing(scratch: Scratch) -> None:
    key = scratch.key("nothing")
    assert await scratch.one.size(key) is None, "a missing object has a size"
    await _raises(NotFound, scratch.one.get(key), "get() of a missing object")
    await _raises(NotFound, run(_read, scratch.one, key, 0, [1]), "reading a missing pack")
    await scratch.one.delete(f"{scratch.folder}/alive-nothing")
    if scratch.one.capabilities.listing:
        assert await scratch.one.list(f"{scratch.folder}/") == [], "a new folder contains objects"
        assert await scratch.one.age(scratch.folder) is None, "a folder without objects has an age"


@promise("any range of a pack can be read exactly, and nothing beyond its end")
async def ranges(scratch: Scratch) -> None:
    key, content = scratch.key("ranges"), secrets.token_bytes(70_000)
    await run(_write_packs, scratch.one, key, [content[:1], content[1:1000], content[1000:]])
    await scratch.one.flush(scratch.folder, _FSYNC)
    parts = [(0, [70_000]), (5, [1, 2, 3]), (69_999, [1]), (17, [9] * 3000), (0, [1]), (1000, [65_536]), (3, [])]
    for client in (scratch.one, scratch.other):
        for offset, sizes in parts:
            data = await run(_read, client, key, offset, sizes)
            expected = content[offset : offset + sum(sizes)]
            assert data == expected, f"reading {sum(sizes)} bytes at {offset} returned other bytes"
        for offset, size in ((0, 70_001), (69_999, 2), (70_000, 1), (1 << 20, 1)):
            action = f"reading {size} bytes at {offset} of 70000"
            await _raises(Corrupt, run(_read, client, key, offset, [size]), action)


@promise("an object longer than the caller accepts is refused, and not received whole")
async def bounded_reads(scratch: Scratch) -> None:
    data = secrets.token_bytes(_REFUSED_OBJECT)
    await scratch.one.create(scratch.key("long"), data, _NONE)
    key, accepted = scratch.key("short"), 1000
    await scratch.one.create(key, data[:accepted], _NONE)
    for client in (scratch.one, scratch.other):
        assert await client.get(key, accepted) == data[:accepted], "a read with a bound returned other bytes"
        await _raises(Corrupt, client.get(key, accepted - 1), "reading one byte more than the caller accepts")
        with _receiving_less(scratch, _REFUSED_OBJECT // 2):
            read = client.get(scratch.key("long"), accepted)
            await _raises(Corrupt, read, "reading more than the caller accepts")


@promise("a heartbeat can be replaced, and every client sees the new bytes at once")
async def replacement(scratch: Scratch) -> None:
    key = f"{scratch.folder}/alive-0"
    for number in (1, 22222, 3):
        data = heartbeat(number)
        await scratch.one.replace(key, data)
        for client in (scratch.other, scratch.one):
            assert await client.get(key) == data, "a client still reads the replaced bytes"


@promise("whoever creates or reads a record notices at once that an archive has taken its place")
async def archives(scratch: Scratch) -> None:
    record, archive = scratch.key("record"), scratch.key("archive")
    staged = scratch.one.stage(b"record", _FSYNC)
    try:
        await staged.write(record)
        found = await scratch.one.leading([record], unless=archive)
        assert found == Leading([], hole=False), "a record is read that does not exist"
        await scratch.other.create(archive, b"archive", _FSYNC)
        await _raises(AlreadyExists, staged.create(record, unless=archive), "creating a record beside its archive")
    finally:
        await staged.discard()
    for client in (scratch.one, scratch.other):
        assert (await client.leading([record], unless=archive)).superseded, "a reader does not see the archive"


@promise("a listing has every key with the prefix, immediately and in order, and no other", "listing")
async def listing(scratch: Scratch) -> None:
    names = ["1", "10", "2", "2-3", "3"]
    keys = sorted(scratch.key(name) for name in names)
    for key in reversed(keys):
        await scratch.one.create(key, b"x", _NONE)
        assert key in await scratch.other.list(f"{scratch.folder}/"), "a new key is missing in a listing"
    for prefix in (f"{scratch.folder}/", scratch.folder, *map(scratch.key, ("", "1", "2-", "4"))):
        listed = await scratch.other.list(prefix)
        assert listed == [k for k in keys if k.startswith(prefix)], f"list({prefix!r}) returned {listed}"
    assert scratch.folder.removeprefix("txn/") in await scratch.other.folders("txn/"), "the folder is not listed"
    age = await scratch.other.age(scratch.folder)
    assert age is not None, "a folder of objects has no age"
    assert -60 < age < 600, f"objects written just now are {age} seconds old by the server's clock"
    assert not await scratch.one.empty(), "empty() returns True, though there are objects"


@promise("pages list every object once with its size, and with a delimiter the folders", "listing")
async def pages(scratch: Scratch) -> None:
    await asyncio.gather(*[scratch.one.create(scratch.key(n), b"x" * n, _NONE) for n in range(5)])
    entries = [e for p in await _pages(scratch.one, f"{scratch.folder}/", "/") for e in p.entries]
    assert [(e.key, e.size) for e in entries] == [(scratch.key(n), n) for n in range(5)], f"entries are {entries}"
    folders = [f for p in await _pages(scratch.one, scratch.folder, "/") for f in p.folders]
    assert folders == [f"{scratch.folder}/"], f"with a delimiter the folders are {folders}"
    deep = [e.key for p in await _pages(scratch.one, scratch.folder, "") for e in p.entries]
    assert deep == [scratch.key(n) for n in range(5)], f"without a delimiter the keys are {deep}"
    entry = await scratch.one.head(scratch.key(3))
    assert entry is not None, "head() returns None for an object that exists"
    assert entry.size == 3, f"head() returns a size of {entry.size}, but 3 bytes were written"


@promise("a deleted object is gone for every client, and its key can be created again", "listing")
async def deletes(scratch: Scratch) -> None:
    first, second = (f"{scratch.folder}/alive-{number}" for number in (1, 2))
    old, new = heartbeat(1), heartbeat(2)  # a token without the scope admin may delete only heartbeats
    for key in (first, second):
        await scratch.one.create(key, old, _FSYNC)
        assert await scratch.other.get(key) == old, "the bytes read are not those written"
    await scratch.one.delete(first)
    await scratch.one.delete(first)
    for client in (scratch.other, scratch.one):
        assert await client.size(first) is None, "a deleted object has a size"
        await _raises(NotFound, client.get(first), "reading a deleted object")
        assert await client.list(f"{scratch.folder}/") == [second], "a deleted object is listed"
    await scratch.one.create(first, new, _FSYNC)
    assert await scratch.other.get(first) == new, "the bytes of the deleted object were read"


@promise("keys with unusual characters are distinct and listed unchanged")
async def odd_names(scratch: Scratch) -> None:
    keys = [f"{scratch.folder}/{name}" for name in _ODD_NAMES]
    try:
        await scratch.one.create(keys[0], keys[0].encode(), _NONE)
    except (Denied, InvalidArgument) as error:
        await scratch.one.create(scratch.key("plain"), b"", _NONE)  # raises if creates are impossible
        raise unittest.SkipTest("the server accepts only the keys of a store") from error
    for key in keys[1:]:
        await scratch.one.create(key, key.encode(), _NONE)
    for key in keys:
        assert await scratch.other.get(key) == key.encode(), f"{key!r} has the bytes of another object"
    if scratch.one.capabilities.listing:
        listed = await scratch.other.list(f"{scratch.folder}/")
        assert listed == sorted(keys), f"the keys listed are not those created: {sorted(set(listed) ^ set(keys))}"


@promise("keys that lead outside the store or have two spellings are refused")
async def bad_names(scratch: Scratch) -> None:
    for key in _BAD_KEYS:
        for call in (scratch.one.get(key), scratch.one.size(key), scratch.one.create(key, b"x", _NONE)):
            await _raises(InvalidArgument, call, f"the key {key!r}")
        for open_pack in (scratch.one.reader, lambda k: scratch.one.writer(k, _NONE)):
            await _raises(InvalidArgument, run(open_pack, key), f"the key {key!r}")


@promise("a cancelled create leaves the whole object or none, and a working client")
async def cancellation(scratch: Scratch) -> None:
    data = bytes(range(256)) * 256
    duration = math.inf  # the least of three, since a busy machine delays some
    for number in range(3):
        started = time.monotonic()
        await scratch.one.create(scratch.key(f"first-{number}"), data, _NONE)
        duration = min(duration, time.monotonic() - started)
    for step in range(20):
        task = asyncio.ensure_future(scratch.one.create(scratch.key(step), data, _NONE))
        await asyncio.wait([task], timeout=duration * step / 16)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with contextlib.suppress(NotFound):
            assert await scratch.one.get(scratch.key(step)) == data, "a cancelled create left a part of an object"
    await scratch.one.create(scratch.key("last"), data, _NONE)
    assert await scratch.other.get(scratch.key("last")) == data, "the bytes read are not those written"


@promise("a create whose response was lost never fails because of the object that it created")
async def lost_replies(scratch: Scratch) -> None:
    if scratch.subject.relay is None:
        raise unittest.SkipTest("there is no relay between client and server to lose a response")
    for number in range(6):
        key, data = scratch.key(number), b"%d" % number * 100
        with scratch.subject.relay.losing("request" if number % 3 == 2 else "response"):
            try:
                await scratch.one.create(key, data, _FSYNC)
                acknowledged = True
            except Unavailable:
                acknowledged = False
            except AlreadyExists as error:
                raise AssertionError("a create reported its own object as another's") from error
        exists = acknowledged or await scratch.other.size(key) is not None
        stored = await scratch.other.get(key) if exists else None
        assert stored in (None, data), "a part of an object was read after a lost response"


@promise("large objects are written and read unchanged")
async def large_objects(scratch: Scratch) -> None:
    piece = secrets.token_bytes(_LARGE_OBJECT // 12)
    packs = await run(_write_packs, scratch.one, scratch.key("large"), [piece] * 12)
    await scratch.one.flush(scratch.folder, _FSYNC)
    for key, count in packs:
        size, half = count * len(piece), len(piece) // 2
        assert await scratch.other.size(key) == size, f"{size} bytes were written to {key}, but size() differs"
        assert await scratch.other.get(key) == piece * count, f"reading {key} whole returned other bytes"
        middle = await run(_read, scratch.other, key, half, [half])
        assert middle == piece[half:], f"reading {half} bytes at {half} of {key} returned other bytes"


@promise(f"a listing of {_KEY_COUNT} keys is complete", "listing")
async def long_lists(scratch: Scratch) -> None:
    keys = [scratch.key(f"{number:05d}") for number in range(_KEY_COUNT)]
    await for_each(lambda key: scratch.one.create(key, b"", _NONE), keys)
    listed = await scratch.other.list(f"{scratch.folder}/")
    assert listed == keys, f"{len(keys)} objects were created, {len(listed)} are listed"


@contextlib.contextmanager
def _receiving_less(scratch: Scratch, limit: int) -> Iterator[None]:
    """Check that clients receive fewer than `limit` bytes during the block.

    The relay counts the bytes. Without a relay, the memory that the clients allocate is measured instead.
    """
    relay, traced = scratch.subject.relay, tracemalloc.is_tracing()
    before = 0 if relay is None else relay.bytes_to_clients
    if not traced:
        tracemalloc.start()
    tracemalloc.reset_peak()
    allocated, _ = tracemalloc.get_traced_memory()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
        received = peak - allocated if relay is None else relay.bytes_to_clients - before
    finally:
        if not traced:
            tracemalloc.stop()
    assert received < limit, f"{received} bytes of an object were received, though the caller accepts only a few"


def _check_race(key: str, outcome: RaceOutcome) -> None:
    winners, stored, racers = outcome
    assert len(winners) == 1, f"{len(winners)} of {racers} racing creates of {key} succeeded, expected 1"
    assert winners[0] == stored, f"the bytes of {key} are not those of the create that succeeded"


async def _create_wins(client: Storage, key: str, data: bytes) -> bool:
    try:
        await client.create(key, data, _NONE)
    except AlreadyExists:
        return False
    return True


async def _raises(expected: type[TStoreError], call: Awaitable[object], action: str) -> None:
    try:
        result = await call
    except expected:
        return
    except TStoreError as error:
        raise AssertionError(
            f"{action} raised {type(error).__name__}, expected {expected.__name__}: {error}"
        ) from error
    shown = f"{len(result)} bytes" if isinstance(result, (bytes, bytearray)) else repr(result)
    raise AssertionError(f"{action} returned {shown}, expected {expected.__name__}")


def _read(client: Storage, key: str, offset: int, sizes: Sequence[int]) -> bytes:
    buffers = [bytearray(size) for size in sizes]
    client.reader(key).read_into(offset, buffers, sum(sizes))
    return b"".join(buffers)


def _write_packs(client: Storage, key: str, pieces: Sequence[bytes]) -> list[tuple[str, int]]:
    """Write the pieces to packs, starting with `key`; return the keys and the number of pieces in each."""
    packs: list[tuple[str, int]] = []
    writer, count = client.writer(key, _FSYNC), 0
    for piece in pieces:
        if writer.append([piece[:7], piece[7:]], len(piece)) is None:
            writer.finish()
            packs.append((writer.key, count))
            writer, count = client.writer(f"{key}-{len(packs)}", _FSYNC), 0
            assert writer.append([piece], len(piece)) == 0, "the first piece of a pack is not at position 0"
        count += 1
    writer.finish()
    return [*packs, (writer.key, count)]


async def _pages(client: Storage, prefix: str, delimiter: str) -> list[Page]:
    return [page async for page in client.pages(prefix, delimiter)]
