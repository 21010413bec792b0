"""The read cache: the requests it saves, its size limit, and that it never changes a result."""

from __future__ import annotations

import asyncio
import os
import uuid
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support import processes
from tstore import Cache, Keep
from tstore.core.storage.cache import PIECE
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.objects import Buffers
from tstore.core.storage.remote import as_remote
from tstore.errors import Corrupt, InvalidArgument, NotFound

BIG = np.random.default_rng(0).random((3 << 20) // 8 * 4).reshape(-1, 1024)  # 12 MB: several pieces
MANY = {str(i): np.arange(500) + i for i in range(300)}


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


async def saved(name: str) -> None:
    store = await tstore.open(as_remote(MemoryStorage(name)))
    for step in range(3):
        await tstore.save(store, {"big": BIG + step, "many": MANY, "small": step}, step)


async def opened(name: str, cache: Cache | str | Path, objects: MemoryStorage | None = None) -> tstore.Store:
    return await tstore.open(as_remote(objects or MemoryStorage(name)), "r", cache=cache)


async def check(store: tstore.Store, step: int) -> None:
    tree = await tstore.restore(store, step)
    assert np.array_equal(tree["big"], BIG + step)
    assert tree["small"] == step
    assert all(np.array_equal(tree["many"][k], v) for k, v in MANY.items())


def requests(store: tstore.Store) -> dict[str, int]:
    assert store.traffic is not None
    return dict(store.traffic.requests)


def files(cache: Path) -> list[Path]:
    return [p for p in cache.rglob("*") if p.is_file() and p.name != ".lock"]


async def test_cached_data_is_not_requested_again(name: str, tmp_path: Path) -> None:
    await saved(name)
    first = await opened(name, tmp_path)
    await check(first, 1)
    assert first.traffic is not None
    assert first.traffic.bytes_read > BIG.nbytes
    again = await opened(name, tmp_path)
    await check(again, 1)
    assert again.traffic is not None
    assert again.traffic.bytes_read < 1000
    assert again.traffic.requests.get("read", 0) == 0
    assert sum(again.traffic.requests.values()) <= 10  # the marker, the hint, the search for a newer version


async def test_other_ranges_of_cached_data_are_requested(name: str, tmp_path: Path) -> None:
    await saved(name)
    store = await opened(name, tmp_path)
    array = await (await store.snapshot("step/2")).array("big")
    rng = np.random.default_rng(1)
    for _ in range(60):
        low, high = sorted(rng.integers(0, len(BIG) + 1, 2).tolist())
        assert np.array_equal(await array[low:high].read(), BIG[low:high] + 2)
    before = requests(store)
    for _ in range(20):
        low, high = sorted(rng.integers(0, len(BIG) + 1, 2).tolist())
        assert np.array_equal(await array[low:high].read(), BIG[low:high] + 2)
    await array.read()
    assert requests(store).get("read", 0) - before.get("read", 0) <= 2
    await check(store, 2)
    for _ in range(2):
        asked = requests(store)["read"]
        assert (await store.verify()).ok
        assert requests(store)["read"] > asked  # verification asks the server


async def test_new_commits_show_at_once(name: str, tmp_path: Path) -> None:
    await saved(name)
    reader = await opened(name, tmp_path)
    await check(reader, 2)
    writer = await tstore.open(as_remote(MemoryStorage(name)), cache=tmp_path)
    await tstore.save(writer, {"big": BIG + 3, "many": MANY, "small": 3}, 3)
    await check(reader, 3)
    await check(writer, 3)
    with pytest.raises(NotFound):
        await tstore.restore(reader, 4)
    await writer.collect(Keep(last=1))
    assert await tstore.steps(reader) == [3]


@pytest.mark.parametrize("damage", ["cut", "flip", "longer", "empty", "swapped"])
async def test_a_damaged_cache_changes_no_result(damage: str, name: str, tmp_path: Path) -> None:
    await saved(name)
    await check(await opened(name, tmp_path), 1)
    cached = files(tmp_path)
    contents = [p.read_bytes() for p in cached]
    for path, data in zip(cached, contents, strict=True):
        match damage:
            case "cut":
                path.write_bytes(data[: len(data) // 2])
            case "flip":
                path.write_bytes(data[:30] + bytes([data[30] ^ 1]) + data[31:])
            case "longer":
                path.write_bytes(data + b"x")
            case "empty":
                path.write_bytes(b"")
            case "swapped" if "-" in path.name:
                alike = [d for d in contents if len(d) == len(data) and d != data]
                path.write_bytes(alike[0] if alike else data[::-1])
    store = await opened(name, tmp_path)
    await check(store, 1)
    assert requests(store)["read"]
    again = await opened(name, tmp_path)
    await check(again, 1)
    assert "read" not in requests(again)


async def test_other_files_in_the_cache_change_no_result(name: str, tmp_path: Path) -> None:
    await saved(name)
    await check(await opened(name, tmp_path), 1)
    for folder in {path.parent for path in files(tmp_path)}:
        for other in ("0-3360000 (copy)", "1-2~", "notes-", "-5", "\u0663-\u0664", ".DS_Store", "a-b"):
            (folder / other).write_bytes(b"x")
    again = await opened(name, tmp_path)
    await check(again, 1)
    assert "read" not in requests(again)


class Wrong(MemoryStorage):
    """Flips a bit in the first reads of each pack, like a proxy with bad memory."""

    def __init__(self, name: str, times: int) -> None:
        super().__init__(name)
        self.times = times

    async def read(self, key: str, offset: int, buffers: Buffers, size: int) -> None:
        await super().read(key, offset, buffers, size)
        if self.times and size > 1000:
            self.times -= 1
            memoryview(buffers[0]).cast("B")[0] ^= 1


async def test_damaged_responses_are_requested_again(name: str, tmp_path: Path) -> None:
    await saved(name)
    store = await opened(name, tmp_path, Wrong(name, 1))
    await check(store, 1)
    await check(await opened(name, tmp_path), 1)
    forever = await opened(name, tmp_path / "other", Wrong(name, 10_000))
    with pytest.raises(Corrupt, match="checksum mismatch"):
        await tstore.restore(forever, 1)


async def test_wrong_references_to_chunks_are_requested_again(name: str, tmp_path: Path) -> None:
    """They are in a pack too, and are read when a lookup needs them. Without a cache, nothing is read twice."""
    store = await tstore.open(as_remote(MemoryStorage(name)))
    async with store.transaction() as tx:
        await (await tx.create_array("long", (20_000,), "u1", (1,))).write(7)

    async def read(reader: tstore.Store) -> int:
        return int(await (await (await reader.snapshot()).array("long"))[3].read())

    assert await read(await opened(name, tmp_path, Wrong(name, 1))) == 7
    with pytest.raises(Corrupt, match="references to chunks"):
        await read(await tstore.open(as_remote(Wrong(name, 1)), "r"))


async def test_stores_do_not_mix(name: str, tmp_path: Path) -> None:
    """Neither stores that follow each other at one URL, nor a store and its copy."""
    await saved(name)
    await check(await opened(name, tmp_path), 1)
    copied = str(tmp_path / "copy")
    await tstore.copy(await opened(name, tmp_path), copied)
    await tstore.save(copied, {"own": 1}, 7)
    writer = await tstore.open(as_remote(MemoryStorage(name)), cache=tmp_path)
    await tstore.save(writer, {"own": 1}, 8)
    for place, step in ((copied, 7), (as_remote(MemoryStorage(name)), 8)):
        store = await tstore.open(place, cache=tmp_path)
        assert await tstore.steps(store) == [0, 1, 2, step]
    objects = MemoryStorage(name)
    for page in [p async for p in objects.pages("")]:
        for entry in page.entries:
            await objects.delete(entry.key)
    fresh = await tstore.open(as_remote(objects), cache=tmp_path)
    await tstore.save(fresh, {"x": np.ones(3)}, 0)
    reader = await opened(name, tmp_path)
    assert (await tstore.restore(reader, 0))["x"].tolist() == [1, 1, 1]
    assert await tstore.steps(reader) == [0]


async def test_the_size_limit_is_kept(name: str, tmp_path: Path) -> None:
    await saved(name)
    limit = 20 << 20
    cache = Cache(tmp_path, size=limit)
    for step in (0, 1, 2, 0, 1, 2):
        store = await opened(name, cache)
        await check(store, step)
        assert sum(p.stat().st_size for p in files(tmp_path)) < 1.1 * limit + PIECE
    newest = await opened(name, cache)
    await check(newest, 2)  # reads again what was evicted while in use
    newest = await opened(name, cache)
    await check(newest, 2)
    assert newest.traffic is not None
    assert newest.traffic.bytes_read < 1000  # the most recently used data is still cached


async def test_remains_of_killed_processes_are_removed(name: str, tmp_path: Path) -> None:
    await saved(name)
    old, new = tmp_path / ".0.1.tmp", tmp_path / ".0.2.tmp"
    old.write_bytes(b"half")
    new.write_bytes(b"half")
    os.utime(old, (0, 0))
    await check(await opened(name, tmp_path), 1)
    assert not old.exists()
    assert new.exists()


@pytest.mark.filterwarnings("default")
async def test_an_unwritable_cache_changes_no_result(name: str, tmp_path: Path) -> None:
    await saved(name)
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    store = await opened(name, blocked)
    with pytest.warns(RuntimeWarning, match="can't be written") as warned:
        await check(store, 1)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await check(store, 2)
    with pytest.raises(InvalidArgument):
        Cache(tmp_path, size=0)


READ = """
import sys
import numpy as np
import tstore.sync as tstore

url, folder = sys.argv[1:]
for step in (2, 0, 1):
    store = tstore.open(url, "r", cache=tstore.Cache(folder, size=8_000_000))
    tree = tstore.restore(store, step)
    assert (tree["x"] == np.arange(400_000) + step).all()
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Even while each evicts data that the others use."""
    url, folder = tmp_path / "store", tmp_path / "cache"

    async def save() -> None:
        for step in range(3):
            await tstore.save(str(url), {"x": np.arange(400_000) + step}, step)

    asyncio.run(save())
    started = [processes.start(READ, url, folder) for _ in range(4)]
    with processes.running(*started):
        for process in started:
            processes.result(process)
    assert not list(folder.rglob("*.tmp"))


async def test_other_operations_pass_through(name: str, tmp_path: Path) -> None:
    """A writer with a cache can do everything that one without can."""
    store = await tstore.open(as_remote(MemoryStorage(name)), cache=tmp_path)
    tree: dict[str, Any] = {"x": np.arange(10_000)}
    for step in range(4):
        await tstore.save(store, {**tree, "step": step}, step)
    async with store.transaction() as tx:
        await (await tx.array("x"))[5:9].write(0)
        assert (await (await tx.array("x"))[4:10].read()).tolist() == [4, 0, 0, 0, 0, 9]
    await store.collect(Keep(last=1))
    assert (await store.verify()).ok
    await store.close()
