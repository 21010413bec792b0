"""A copy, such as a quantized checkpoint, is not the head: readers by default and transactions do not see it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import tstore
import tstore.sync as blocking
from tests.support.http_server import ADMIN, everybody
from tstore.cli import main
from tstore.core.storage.connect import storage_at
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.remote import RemoteStorage
from tstore.core.tags import drop_tag, move_tag, set_tag
from tstore.errors import Conflict, InvalidArgument, NotFound, SnapshotExpired
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Server
from tstore.zarr import ZarrStore

Connect = Callable[[], Any]

W = np.random.default_rng(0).normal(size=(64, 64)).astype("f4")


STORAGES = ("local", "remote", "server")


@pytest.fixture(params=STORAGES)
async def connect(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    """Another storage of the same store, as another process has one."""
    name, store = str(uuid.uuid4()), tmp_path / "store"
    if request.param != "server":
        yield lambda: store if request.param == "local" else RemoteStorage(MemoryStorage(name))
        return
    async with Server(store, access=everybody()) as server, contextlib.AsyncExitStack() as stack:

        def storage() -> Any:
            made = storage_at(server.url, {"token": ADMIN})
            stack.push_async_callback(made.close)
            return made

        yield storage


async def first(connect: Connect) -> tstore.Store:
    """Return a store whose version 1 has the values W and a counter, without a step."""
    store = await tstore.open(connect())
    async with store.transaction() as tx:
        await (await tx.create_array("w", W.shape, W.dtype, (16, 64))).write(W)
        await (await tx.create_array("n", (8,), "i8", (4,))).write(0)
    return store


async def quantized(store: tstore.Store, tag: str, at: Any = None) -> int:
    """Make a copy in 4 bits, and return its version."""
    return (await tstore.quantize(store, {"w": "e2m1", "**": None}, at=at, tag=tag)).version


async def w_of(store: tstore.Store, at: Any = None) -> np.ndarray[Any, Any]:
    return await (await (await store.snapshot(at)).array("w")).read()


async def is_exact(store: tstore.Store, at: Any = None) -> bool:
    """Return whether `w` has the values W, not those of a copy."""
    return np.array_equal(await w_of(store, at), W)


async def paths_of(store: tstore.Store, at: Any = None) -> list[str]:
    return (await store.snapshot(at)).paths()


async def test_readers_get_the_head_by_default(connect: Connect) -> None:
    store = await first(connect)
    assert await quantized(store, "q4") == 2
    for each in (store, await tstore.open(connect(), "r")):
        assert (await each.snapshot()).version == 1
        assert await is_exact(each)
        assert np.array_equal((await tstore.restore(each))["w"], W)
        assert not await is_exact(each, "q4")
        assert not await is_exact(each, 2)
        assert (await each.snapshot("q4")).version == 2
        assert await each.tags() == {"q4": 2}
        assert (await each.snapshot()).tags == (await each.snapshot(2)).tags == {"q4": 2}
        assert [(c.version, c.source) async for c in each.history()] == [(2, 1), (1, None)]
        assert (await each.diff(1)).arrays == ()
        assert [a.path for a in (await each.diff("q4")).arrays] == ["w"]
        now = datetime.datetime.now(datetime.UTC)
        assert (await each.snapshot(now)).version == 1
        assert (await each.verify()).ok
    with pytest.raises(NotFound, match="no version 3; its newest is 2"):
        await store.snapshot(3)


async def test_commits_are_based_on_the_head(connect: Connect) -> None:
    store = await first(connect)
    await quantized(store, "q4")
    async with store.transaction() as tx:
        array = await tx.array("w")
        assert np.array_equal(await array.read(), W)
        assert array.codecs == (await (await store.snapshot(1)).array("w")).codecs
        await array[3, 5:9].write(7)
        await tx.create_array("new", (4,), "i8")
    assert tx.version == 3
    expected = W.copy()
    expected[3, 5:9] = 7
    for each in (store, await tstore.open(connect(), "r")):
        assert (await each.snapshot()).version == 3
        assert np.array_equal(await w_of(each), expected)
        assert await paths_of(each) == ["n", "new", "w"]
        assert await paths_of(each, "q4") == ["n", "w"]
    added = [c.bytes_added async for c in store.history()]
    assert added[0] <= 2 * W[:16].nbytes  # the chunk that it changed in part, not all of them
    assert (await store.verify()).ok


async def test_copies_in_a_row_and_copies_of_copies(connect: Connect) -> None:
    store = await first(connect)
    assert [await quantized(store, tag) for tag in ("a", "b")] == [2, 3]
    report = await tstore.quantize(store, {"w": "e1m0", "**": None}, at="a", tag="c")
    assert (report.source, report.version) == (2, 4)
    again = await tstore.quantize(store, {"w": "e4m3", "**": None})  # of the head, under a default tag
    assert (again.source, (await store.tags())[again.tag]) == (1, 5)
    assert [c.source async for c in store.history()] == [1, 2, 1, 1, None]
    for each in (store, await tstore.open(connect(), "r")):
        assert (await each.snapshot()).version == 1
        assert await is_exact(each)
        assert (await each.verify()).ok
    assert (await tstore.quantize_report(store)).version == 5
    assert [await tstore.baseline(store, at) for at in (2, 3, 4, 5)] == [1, 1, 2, 1]


async def _write(tx: tstore.Transaction) -> None:
    await (await tx.array("n"))[0:2].write(5)


async def _append(tx: tstore.Transaction) -> None:
    await (await tx.array("n")).append(np.arange(3))


async def _resize(tx: tstore.Transaction) -> None:
    await (await tx.array("w")).resize((80, 64))


async def _delete(tx: tstore.Transaction) -> None:
    await tx.delete("w")


async def _create(tx: tstore.Transaction) -> None:
    await tx.create_array("new", (2,), "f4")


@pytest.mark.parametrize(
    ("connect", "change", "isolation"),  # each two of them together
    [
        (storage, change, ("snapshot", "serializable")[(i + j) % 2])
        for i, storage in enumerate(STORAGES)
        for j, change in enumerate((_write, _append, _resize, _delete, _create))
    ],
    indirect=["connect"],
)
async def test_a_copy_conflicts_with_no_transaction(connect: Connect, change: Any, isolation: Any) -> None:
    """Neither with one that is open while the copy is committed, nor with one that is committed during it."""
    store = await first(connect)
    tx = store.transaction(isolation=isolation)
    await change(tx)
    await (await tx.array("n"))[3].read()
    assert await quantized(await tstore.open(connect()), "q4") == 2
    assert await tx.commit() == 3
    alone = await first(lambda: f"memory://{uuid.uuid4()}")
    async with alone.transaction() as same:
        await change(same)
    assert await paths_of(store) == await paths_of(alone)
    for path in await paths_of(store):
        arrays = [await (await each.snapshot()).array(path) for each in (store, alone)]
        assert arrays[0].shape == arrays[1].shape
        if path in ("n", "w") and change is not _resize:
            assert np.array_equal(await arrays[0].read(), await arrays[1].read())
    assert not await is_exact(store, "q4")
    assert (await (await tstore.open(connect(), "r")).verify()).ok


async def test_two_writers_of_parts_of_a_chunk_meet_around_a_copy(connect: Connect) -> None:
    store = await first(connect)
    late = store.transaction()
    await (await late.array("w"))[0, 0].write(1)
    async with store.transaction() as tx:
        await (await tx.array("w"))[0, 1].write(2)
    await quantized(store, "q4")
    assert await late.commit() == 4
    assert (await w_of(store))[0, :3].tolist() == [1, 2, W[0, 2]]


async def test_a_checkpoint_saved_beside_a_copy_re_uses_the_chunks_of_the_head(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path) as store:
        await tstore.save(store, {"w": W, "frozen": W}, 1)
        await quantized(store, "q4")
        await asyncio.gather(
            tstore.save(store, {"w": W + 1, "frozen": W}, 2), tstore.quantize(store, "e4m3", at=1, tag="q8")
        )
        by_tag = {c.tag: c async for c in store.history()}
        assert by_tag["step/2"].bytes_added == W.nbytes
        assert by_tag["q8"].source == 1
        assert np.array_equal((await tstore.restore(store))["w"], W + 1)
        assert (await store.snapshot()).version == by_tag["step/2"].version
        assert (await store.verify()).ok


@pytest.mark.parametrize("shared", ["move_tag", "drop_tag"])
async def test_only_tags_of_a_copy_conflict(connect: Connect, shared: str) -> None:
    store = await first(connect)
    async with store.transaction(tag="t"):
        pass
    work = store.transaction(**{shared: "t"})
    await _write(work)
    assert await quantized(store, "q4") == 3
    await move_tag(store, "t", "q4")
    with pytest.raises(Conflict):
        await work.commit()
    assert (await store.tags())["t"] == 3
    assert not await is_exact(store, "t")


OFTEN = 16


@pytest.fixture
def frequent_roots() -> Iterator[None]:
    """Make every 16th commit write a root, so that a history with several roots is short."""
    with override_constants(ROOT_EVERY=OFTEN):
        yield


async def test_many_commits_and_copies_are_read_from_roots(connect: Connect, frequent_roots: None) -> None:
    """Versions with a root are copies, follow copies, or precede them; the tree of a root is that of the head."""
    store = await first(connect)
    copies = {OFTEN - 1, OFTEN, 2 * OFTEN, 2 * OFTEN + 1, 2 * OFTEN + 3}
    for version in range(2, 2 * OFTEN + 4):
        if version in copies:
            assert await quantized(store, f"copy/{version}", at=1) == version
            head = await (await tstore.open(connect(), "r")).snapshot()
            assert head.version == max(set(range(1, version)) - copies)
            assert (await (await head.array("n")).read())[0] == head.version
        else:
            async with store.transaction(durability="none") as tx:
                await (await tx.array("n"))[0].write(version)
    reader = await tstore.open(connect(), "r")
    assert (await reader.verify()).ok
    assert await is_exact(reader)
    for version in (*copies, OFTEN + 1, 2 * OFTEN - 1, 2 * OFTEN + 2):
        fresh = await tstore.open(connect(), "r")
        snapshot = await fresh.snapshot(version)
        counter = (await (await snapshot.array("n")).read())[0]
        assert counter == (0 if version in copies else version)
        assert np.array_equal(await (await snapshot.array("w")).read(), W) == (version not in copies)
        assert snapshot.tags.keys() == {f"copy/{copy}" for copy in copies if copy <= version}


async def test_a_time_names_the_head_of_that_time(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path) as store:
        await tstore.save(store, {"w": W}, 1)
        await quantized(store, "q4")
        between = datetime.datetime.now(datetime.UTC)
        await tstore.save(store, {"w": W + 1}, 2)
        await quantized(store, "q4-2")
        assert (await store.snapshot(between)).version == 1
        assert (await store.snapshot(datetime.datetime.now(datetime.UTC))).version == 3


KEPT = (
    (tstore.Keep(last=1), {5, 6, 7, 8}),
    (tstore.Keep(last=2), {1, 2, 3, 4, 5, 6, 7, 8}),
    (tstore.Keep(last=1, tags=("a",)), {2, 4, 5, 6, 7, 8}),  # a copy of a copy stays with it, without the source
    (tstore.Keep(last=1, tags=("c",)), {4, 5, 6, 7, 8}),
    (tstore.Keep(last=2, copies=1), {1, 3, 5, 7, 8}),
    (tstore.Keep(last=2, copies=2), {1, 2, 3, 4, 5, 6, 7, 8}),
    (tstore.Keep(last=2, copies=0), {1, 5, 8}),
    (tstore.Keep(last=2, copies=0, tags=("a",)), {1, 2, 5, 8}),
    (tstore.Keep(newer_than=datetime.timedelta(hours=1), copies=0), {1, 2, 3, 4, 5, 6, 7, 8}),
)


@pytest.mark.parametrize(
    ("connect", "keep", "kept"),
    [(STORAGES[number % 3], *rule) for number, rule in enumerate(KEPT)],
    indirect=["connect"],
    ids=lambda value: repr(value)[:60],
)
async def test_copies_live_with_their_source(connect: Connect, keep: tstore.Keep, kept: set[int]) -> None:
    """1 is step/1, with the copies 2 and 3, and 4 a copy of 2; 5 is step/2, with 6 and 7; 8 is the head."""
    store = await tstore.open(connect())
    await tstore.save(store, {"w": W, "n": np.arange(8)}, 1)
    await quantized(store, "a", at=1)
    await quantized(store, "b", at=1)
    await quantized(store, "c", at=2)
    await tstore.save(store, {"w": W + 1, "n": np.arange(8)}, 2)
    await quantized(store, "d")
    await quantized(store, "e")
    async with store.transaction() as tx:
        await (await tx.array("n"))[0].write(9)
    values = {version: await w_of(store, version) for version in range(1, 9)}
    report = await store.collect(keep, dry_run=True)
    assert set(range(1, 9)) - set(report.versions) == kept
    assert (await store.collect(keep)).versions == report.versions
    for each in (store, await tstore.open(connect(), "r")):
        for version in range(1, 9):
            if version in kept:
                assert np.array_equal(await w_of(each, version), values[version])
            else:
                with pytest.raises(SnapshotExpired):
                    await each.snapshot(version)
        assert np.array_equal(await w_of(each), W + 1)
        assert (await each.verify()).ok
    async with store.transaction() as tx:
        await (await tx.array("w"))[0].write(0)
    assert (await w_of(store))[1:].tolist() == (W + 1)[1:].tolist()
    await store.collect(tstore.Keep(last=1, copies=0))
    assert {c.version async for c in store.history() if not c.expired and c.message[:2] != "gc"} == {5, tx.version}
    assert (await (await tstore.open(connect(), "r")).verify()).ok


async def test_a_copy_that_outlives_its_source_takes_nothing_from_the_head(
    tmp_path: Path, connect: Connect
) -> None:
    """The head wrote a part over the source, which has expired; the copy between them needs none of its chunks."""
    store = await first(connect)
    await quantized(store, "q4")
    low = await w_of(store, "q4")
    async with store.transaction() as tx:
        await (await tx.array("n"))[0].write(1)
    assert (await store.collect(tstore.Keep(tags=("q4",)))).versions == [1]
    await tstore.copy(store, tmp_path / "other")
    for each in (store, await tstore.open(connect(), "r"), await tstore.open(tmp_path / "other", "r")):
        assert await is_exact(each)
        assert np.array_equal(await w_of(each, "q4"), low)
        assert (await each.verify()).ok
    async with store.transaction() as tx:
        await (await tx.array("w"))[0].write(2)
    assert (await store.collect(tstore.Keep(newer_than=datetime.timedelta(0)))).versions == [2, 3]
    assert np.array_equal((await w_of(store))[1:], W[1:])
    assert (await store.verify()).ok


async def test_an_array_copied_out_of_a_copy_outlives_it(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path) as store:
        await tstore.save(store, {"w": W}, 1)
        await quantized(store, "q4")
        low = await w_of(store, "q4")
        async with store.transaction() as tx:
            await tx.copy_array(await (await store.snapshot("q4")).array("w"), "low")
        async with store.transaction() as tx:
            await tx.create_group("g")
        report = await store.collect(tstore.Keep(last=1, copies=0))
        assert report.versions == [2, 3]
        assert np.array_equal(await (await (await store.snapshot()).array("low")).read(), low)
        assert (await store.verify()).ok


async def test_keep_refuses_bad_counts_of_copies() -> None:
    for copies in (-1, True, 1.5, "1"):
        with pytest.raises(InvalidArgument, match="copies"):
            tstore.Keep(last=1, copies=copies)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="no rule"):
        tstore.Keep(copies=1)


async def test_a_copy_of_an_expired_version_is_not_committed(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path) as store:
        await tstore.save(store, {"w": W}, 1)
        await tstore.save(store, {"w": W + 1}, 2)

        def collect(done: int, total: int) -> None:
            blocking.open(tmp_path).collect(tstore.Keep(last=1))

        with pytest.raises(SnapshotExpired, match="version 1"):
            await tstore.quantize(store, "e4m3", at=1, tag="q", progress=collect)
        report = await tstore.quantize(store, "e4m3", tag="q")
        assert (report.source, (await store.tags())["q"]) == (2, report.version)


@pytest.mark.parametrize("at", ["q4", 2, None])
async def test_a_store_copied_elsewhere_keeps_its_head(tmp_path: Path, connect: Connect, at: Any) -> None:
    """A copy that is alone in its store is the head there, as there is no other."""
    store = await first(connect)
    await quantized(store, "q4")
    for _ in range(2):
        await tstore.copy(store, tmp_path / "other", at=at)
        async with await tstore.open(tmp_path / "other") as other:
            assert await is_exact(other) == (at is None)
            assert np.array_equal(await w_of(other, 2), await w_of(store, "q4"))
            assert (await other.verify()).ok
            assert [c.source async for c in other.history() if c.version == 2] == [1 if at is None else None]
    async with await tstore.open(tmp_path / "other") as other:
        before = await w_of(other)
        async with other.transaction() as tx:
            await (await tx.array("n"))[0].write(3)
        assert np.array_equal(await w_of(other), before)
        await other.collect(tstore.Keep(last=1))
        assert np.array_equal(await w_of(other), before)
        assert (await other.verify()).ok


@pytest.mark.parametrize("void", [1, 2])
async def test_a_repair_voids_the_source_or_the_copy(tmp_path: Path, void: int) -> None:
    async with await tstore.open(tmp_path) as store:
        await tstore.save(store, {"w": W}, 1)
        await quantized(store, "q4")
        await tstore.save(store, {"w": W + 1}, 2)
        await store.repair(void_intact=[void])
    async with await tstore.open(tmp_path) as store:
        assert np.array_equal(await w_of(store), W + 1)
        if void == 1:
            assert not await is_exact(store, "q4")
        else:
            assert await is_exact(store, 2)  # it changes nothing now
            assert "q4" not in await store.tags()
        assert (await store.verify()).ok
        await store.collect(tstore.Keep(last=1))
        assert np.array_equal(await w_of(store), W + 1)
        assert (await store.verify()).ok


async def test_a_head_whose_record_was_voided_leaves_no_copy_in_its_place(tmp_path: Path) -> None:
    async with await tstore.open(tmp_path) as store:
        await tstore.save(store, {"w": W}, 1)
        await tstore.save(store, {"w": W + 1}, 2)
        await quantized(store, "q4")
        await store.collect(tstore.Keep(last=2))
        await store.repair(void_intact=[2])
    async with await tstore.open(tmp_path) as store:
        assert await is_exact(store)
        assert (await store.verify()).ok


async def test_hosts_that_save_together_do_not_see_a_copy(connect: Connect) -> None:
    store = await tstore.open(connect())
    await tstore.save(store, {"w": W, "a": np.zeros(8), "b": np.zeros(8)}, 1)
    await quantized(store, "q4")

    async def host(number: int) -> int:
        own = store.transaction(name="work", host=number, hosts=2, attempt="a")
        await (await own.array("ab"[number]))[:4].write(number + 1)
        if number == 0:
            await quantized(store, "q4-again")
        return await own.commit(timeout=30)

    assert set(await asyncio.gather(host(0), host(1))) == {4}
    assert await is_exact(store)
    snapshot = await store.snapshot()
    for number, path in enumerate("ab", 1):
        assert (await (await snapshot.array(path)).read()).tolist() == [number] * 4 + [0] * 4


async def test_commits_of_one_moment_and_a_copy(tmp_path: Path) -> None:
    store = await first(lambda: tmp_path)

    async def write(at: int) -> int:
        async with store.transaction() as tx:
            await (await tx.array("n"))[at].write(at + 1)
        assert tx.version is not None
        return tx.version

    await asyncio.gather(*map(write, range(4)), quantized(store, "q4"), *map(write, range(4, 8)))
    assert (await (await (await store.snapshot()).array("n")).read()).tolist() == list(range(1, 9))
    assert await is_exact(store)
    assert not await is_exact(store, "q4")
    assert (await store.verify()).ok


async def test_tags_of_a_copy(tmp_path: Path) -> None:
    store = await first(lambda: tmp_path)
    await quantized(store, "q4")
    assert (await set_tag(store, "same", "q4")).target == 2
    assert (await set_tag(store, "best")).target == 3  # the head
    assert await is_exact(store, "best")
    await drop_tag(store, "q4")
    await drop_tag(store, "same")
    assert not await is_exact(store, 2)  # without a tag, by its number
    report = await tstore.quantize(store, "e4m3", tag="again")
    assert report.source == 1  # the commits since then only set tags
    gc = (await store.collect(tstore.Keep(tags=("best",), copies=0))).version
    assert gc is not None
    assert (gc, (await tstore.quantize(store, "e4m3", tag="third", at=gc)).source) == (8, 6)
    assert (await store.verify()).ok


async def test_zarr_shows_the_head(tmp_path: Path) -> None:
    store = await first(lambda: tmp_path)
    await quantized(store, "q4")
    snapshot = await store.snapshot()
    group = await asyncio.to_thread(zarr.open_group, ZarrStore(snapshot), mode="r")
    assert np.array_equal(await asyncio.to_thread(lambda: group["w"][:]), W)
    tx = store.transaction()
    staged = await asyncio.to_thread(zarr.open_group, ZarrStore(tx), mode="r+")

    def write() -> None:
        assert np.array_equal(staged["w"][:], W)
        staged["w"][0] = 1

    await asyncio.to_thread(write)
    await tx.commit()
    assert np.array_equal((await w_of(store))[1:], W[1:])


def test_the_command_line_shows_the_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(tmp_path / "store")
    blocking.save(url, {"w": W}, 1)
    blocking.quantize(url, "e2m1", tag="q4")

    def documents(*words: str) -> Any:
        capsys.readouterr()
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    for command in ("ls", "show"):
        assert documents(command, url)["version"] == 1
        assert documents(command, url, "--at", "q4")["version"] == 2
    assert documents("stats", url, "w")["minimum"] == W.min()
    assert documents("stats", url, "w", "--loss")["version"] == 2
    assert documents("report", url)["version"] == 2
    assert [c["source"] for c in documents("log", url)["commits"]] == [1, None]
    kept = documents("gc", url, "--keep-last", "1", "--keep-copies", "0", "--dry-run")
    assert kept["versions"] == [2]
    assert documents("gc", url, "--keep-last", "1", "--dry-run")["versions"] == []
    assert main(["gc", url, "--keep-copies", "0"]) == 2
