"""What every implementation of `Storage` must do."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.thresholds import Thresholds
from tstore.core.storage.base import Leading, Storage
from tstore.core.storage.connect import connect
from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import SHORT_OBJECT, Durability
from tstore.core.storage.remote import RemoteStorage
from tstore.errors import AlreadyExists, Corrupt, Denied, InvalidArgument, StorageFull
from tstore.lab.conformance.faults import Faults

FSYNC, NONE = Durability.FSYNC, Durability.NONE


@pytest.fixture(params=["local", "memory", "faulty", "remote"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return connect(tmp_path / "new" / "store")
    if request.param == "remote":
        return RemoteStorage(MemoryStorage(str(uuid.uuid4())))
    memory = connect(f"memory://{uuid.uuid4()}")
    return memory if request.param == "memory" else Faults(memory)


@pytest.mark.parametrize("quick", [5.0, 0.0], ids=["in one thread", "in several"])
async def test_short_objects_are_read_in_the_order_of_their_keys(
    storage: Storage, thresholds: Thresholds, quick: float
) -> None:
    thresholds(_QUICK_READS=quick)
    keys = [f"a/{number:03}" for number in range(200)]
    for key in keys:
        await storage.create(key, key.encode() if key != "a/017" else bytes(SHORT_OBJECT + 1), NONE)
    expected = [None if key == "a/017" else key.encode() for key in keys]
    assert await storage.short_objects([*keys[::-1], "b", "a/3"]) == [*expected[::-1], None, None]
    assert await storage.short_objects([]) == []


async def test_a_storage_is_empty_until_the_first_create(storage: Storage) -> None:
    assert await storage.empty()
    await storage.create("a", b"", FSYNC)
    assert not await storage.empty()


@pytest.mark.parametrize("durability", Durability)
async def test_packs_are_written_in_pieces_and_read_anywhere(storage: Storage, durability: Durability) -> None:
    rng = np.random.default_rng(0)
    pieces = [rng.bytes(n) for n in (1, 0, 1000, 3, 70_000)] + [rng.bytes(7) for _ in range(3000)]
    pack = storage.writer("txn/1/pack", durability)
    offsets = [pack.append([p], len(p)) for p in pieces[:5]]
    offsets.append(pack.append(pieces[5:], sum(map(len, pieces[5:]))))  # more buffers than one system call accepts
    pack.finish()
    await storage.flush("txn/1", durability)
    whole = b"".join(pieces)
    assert offsets == [0, 1, 1, 1001, 1004, 71004]
    assert await storage.size("txn/1/pack") == len(whole)
    assert await storage.get("txn/1/pack") == whole
    reader = storage.reader("txn/1/pack")
    for offset, sizes in [(0, [len(whole)]), (5, [1, 2, 3]), (len(whole) - 1, [1]), (17, [9] * 3000)]:
        buffers = [bytearray(n) for n in sizes]
        reader.read_into(offset, buffers, sum(sizes))
        assert b"".join(buffers) == whole[offset : offset + sum(sizes)]


async def test_a_pack_can_be_read_before_it_is_finished(storage: Storage) -> None:
    pack = storage.writer("p", FSYNC)
    pack.append([b"abc"], 3)
    buffer = bytearray(2)
    storage.reader("p").read_into(1, [buffer], 2)
    assert buffer == b"bc"
    pack.append([b"d"], 1)
    storage.reader("p").read_into(2, [buffer], 2)
    assert buffer == b"cd"
    pack.finish()


@pytest.mark.parametrize(("offset", "sizes"), [(0, [5]), (3, [1, 1]), (4, [1]), (100, [1]), (0, [1] * 2000)])
async def test_a_pack_that_is_too_short_is_corrupt(storage: Storage, offset: int, sizes: list[int]) -> None:
    pack = storage.writer("t/p", FSYNC)
    pack.append([b"abcd"], 4)
    pack.finish()
    await storage.flush("t", FSYNC)
    with pytest.raises(Corrupt):
        storage.reader("t/p").read_into(offset, [bytearray(n) for n in sizes], sum(sizes))


async def test_a_discarded_pack_is_gone(storage: Storage) -> None:
    pack = storage.writer("a/p", FSYNC)
    pack.append([b"abc"], 3)
    pack.discard()
    assert await storage.list("") == []


async def test_a_second_writer_of_a_pack_is_refused(storage: Storage) -> None:
    pack = storage.writer("t/p", FSYNC)
    pack.append([b"abc"], 3)
    with pytest.raises(AlreadyExists):
        storage.writer("t/p", FSYNC)
    pack.finish()
    await storage.flush("t", FSYNC)
    assert await storage.get("t/p") == b"abc"


async def test_a_create_has_one_winner_among_threads(storage: Storage) -> None:
    start = threading.Barrier(8)

    def race(number: int) -> list[bool]:
        async def one(turn: int) -> bool:
            try:
                await storage.create(f"r/{turn}", bytes([number]), NONE)
            except AlreadyExists:
                return False
            return True

        async def turns() -> list[bool]:
            return [await one(i) for i in range(25)]

        start.wait()
        return asyncio.run(turns())

    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(race, range(8)))
    assert [sum(w[i] for w in won) for i in range(25)] == [1] * 25
    for turn in range(25):
        winner = next(i for i, w in enumerate(won) if w[turn])
        assert await storage.get(f"r/{turn}") == bytes([winner])


# ---- local files


async def test_a_link_is_recognised_after_a_lost_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def lossy(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(17, "the server did it, the answer to the first try was lost", target)

    monkeypatch.setattr(os, "link", lossy)
    await LocalStorage(tmp_path).create("k", b"mine", FSYNC)
    assert (tmp_path / "k").read_bytes() == b"mine"
    assert [p.name for p in tmp_path.iterdir()] == ["k"]


@pytest.mark.parametrize("number", [1, 95])
async def test_without_links_a_rename_that_replaces_nothing_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(number, "no links on this file system", target)

    monkeypatch.setattr(os, "link", refuse)
    storage = LocalStorage(tmp_path)
    await storage.create("k", b"first", FSYNC)
    with pytest.raises(AlreadyExists):
        await storage.create("k", b"second", FSYNC)
    assert await storage.get("k") == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["k"]


async def test_remains_of_a_crash_are_not_listed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / ".0123456789abcdef.tmp").write_bytes(b"half")
    assert await storage.list("") == []
    assert await storage.empty()


def test_the_last_space_on_a_disk_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    fallocate = os.posix_fallocate

    def small_disk(fd: int, offset: int, size: int) -> None:
        if offset + size > 1 << 20:
            raise OSError(errno.ENOSPC, "no space left on device")
        fallocate(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", small_disk)
    pack = LocalStorage(tmp_path).writer("p", FSYNC)
    pack.append([bytes(900_000)], 900_000)
    with pytest.raises(StorageFull):
        pack.append([bytes(900_000)], 900_000)
    pack.append([b"x" * 1000], 1000)
    pack.finish()
    assert (tmp_path / "p").stat().st_size == 901_000


def test_urls(tmp_path: Path) -> None:
    assert connect(tmp_path).url == connect(f"file://{tmp_path}").url == connect(str(tmp_path) + "/").url
    assert connect(f"file://localhost{tmp_path}/a%20b").url == f"{tmp_path}/a b"
    assert connect("memory://x/y/").url == "memory://x/y"
    for url in ("", "gopher://x", "file://otherhost/x"):
        with pytest.raises(InvalidArgument):
            connect(url)
    assert connect("http://localhost:1/s", {"token": "secret"}).url == "http://localhost:1/s"


@pytest.mark.parametrize(
    ("url", "said"), [("http://localhost:1/s", "expected token"), ("memory://x", "takes no"), ("/x", "takes no")]
)
def test_an_unknown_option_is_named(url: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as caught:
        connect(url, {"tokn": "secret"})
    assert "tokn" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("cache", ["filecache", "simplecache", "blockcache"])
def test_a_chain_of_fsspec_is_no_store_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("https://user:secret@host/store", "/store", "file:///store"):
        with pytest.raises(InvalidArgument, match=rf"{cache}::.*pass the URL after {cache}::") as caught:
            connect(f"{cache}::{url}", {cache: {"cache_storage": "x"}})
        assert "secret" not in str(caught.value)
    assert connect("name::of a folder").url == f"{tmp_path}/name::of a folder"
    assert connect(f"./{cache}::x").url == f"{tmp_path}/{cache}::x"


@pytest.mark.parametrize("scheme", ["filecache", "simplecache", "blockcache", "cached"])
def test_a_cache_of_fsspec_is_no_store(scheme: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"{scheme}:// is a cache of fsspec.*pass the URL of the store"):
        connect(f"{scheme}:///store", {"target_protocol": "file"})


@pytest.mark.parametrize("url", ["zip:///a.zip", "zip://", "zip://s::file:///a.zip", "tar://::/a.tar"])
def test_an_archive_is_no_store(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"(zip|tar):// is an archive.*unpack it"):
        connect(url)


@pytest.mark.parametrize("call", ["get", "size", "list"])
async def test_a_closed_folder_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def closed(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "d").mkdir()
    monkeypatch.setattr(os, "open", closed)
    monkeypatch.setattr(os, "stat", closed)
    monkeypatch.setattr(os, "scandir", closed)
    storage = LocalStorage(tmp_path)
    with pytest.raises(Denied, match="permission"):
        await getattr(storage, call)("d/x")


async def test_folders_are_listed(storage: Storage) -> None:
    assert await storage.folders("txn/") == []
    for key in ("txn/b/pack", "txn/a/one", "txn/a/two", "txn/plain", "other/c/x"):
        await storage.create(key, b"x", NONE)
    assert await storage.folders("txn/") == ["a", "b"]
    age = await storage.age("txn/a")
    assert age is not None
    assert -1 < age < 100
    assert await storage.age("txn/nothing") is None
    for key in ("txn/a/one", "txn/a", "txn/a/two"):
        await storage.delete(key)
        assert await storage.list("txn/b") == ["txn/b/pack"]
    assert await storage.list("txn/a/") == []
    await storage.delete("txn/a")
    assert await storage.folders("txn/") == ["b"]


async def test_a_folder_that_holds_an_object_is_not_removed(tmp_path: Path) -> None:
    storage = connect(tmp_path)
    await storage.create("txn/a/one", b"x", NONE)
    (tmp_path / "txn/a/.left.tmp").write_bytes(b"")  # left by a killed create
    os.utime(tmp_path / "txn/a/one", (0, 0))
    await storage.delete("txn/a")
    assert await storage.get("txn/a/one") == b"x"
    await storage.delete("txn/a/one")
    await storage.delete("txn/a")
    assert os.listdir(tmp_path / "txn") == []
    await storage.create("txn/a/one", b"y", FSYNC)
    assert await storage.get("txn/a/one") == b"y"


async def test_packs_are_discarded_in_a_thread_while_others_list() -> None:
    """A transaction is aborted while a gc lists its objects."""
    storage = connect(f"memory://{uuid.uuid4()}")
    for i in range(5000):
        await storage.create(f"txn/{i}/pack", b"", NONE)
    ended = threading.Event()

    def abort() -> None:
        while not ended.is_set():
            storage.writer("txn/aborted/pack", NONE).discard()

    with ThreadPoolExecutor(1) as threads:
        aborting = threads.submit(abort)
        try:
            for _ in range(100):
                assert len(await storage.folders("txn/")) >= 5000
        finally:
            ended.set()
        aborting.result()


@pytest.mark.parametrize("existing", [0, 1, 2])
async def test_an_object_that_seems_damaged_and_then_absent_is_missing(existing: int) -> None:
    """As if a proxy had answered the first request."""
    storage = Faults(MemoryStorage(str(uuid.uuid4())))
    keys = [f"k/{number}" for number in range(4)]
    for key in keys[:existing]:
        await storage.create(key, key.encode(), NONE)
    storage.fail("get", keys[existing], error=Corrupt)
    assert await storage.leading(keys) == Leading([key.encode() for key in keys[:existing]], hole=False)
    await storage.create(keys[existing + 1], b"", NONE)
    storage.fail("get", keys[existing], error=Corrupt, nth=1)
    assert (await storage.leading(keys)).hole
    storage.clear_rules()
    storage.fail("get", keys[0], error=Corrupt, times=9)
    with pytest.raises(Corrupt):
        await storage.leading(keys)


@pytest.mark.parametrize("kind", ["local", "memory"])
async def test_readers_and_writers_look_for_an_object_that_supersedes_theirs(kind: str, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path) if kind == "local" else MemoryStorage(str(uuid.uuid4()))
    staged = storage.stage(b"a", NONE)
    await staged.create("k/0", unless="archives/1")
    assert await storage.leading(["k/0", "k/1", "k/2"], unless="archives/1") == Leading([b"a"], False)
    await storage.create("archives/1", b"b", NONE)
    assert await storage.leading(["k/0", "k/1", "k/2"], unless="archives/1") == Leading([b"a"], False, False, True)
    with pytest.raises(AlreadyExists, match="archives/1"):
        await staged.create("k/1", unless="archives/1")
    await staged.create("k/2", unless="archives/2")
    await staged.discard()
    assert await storage.get("k/2") == b"a"
