"""Stores with many arrays, whose manifests are in pages, through the public names.

The fixture `short` makes pages of a few nodes, so that twenty arrays need several.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import tstore
from tests.support.http_server import ADMIN, WRITE, everybody
from tests.support.thresholds import Thresholds
from tstore.core.format.arrays.array_metadata import ArrayMeta
from tstore.core.format.layout import root_key
from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.object_ref import ObjectRef, Page
from tstore.core.format.objects.records import Root
from tstore.core.format.tree.node import Node
from tstore.core.format.tree.stored_nodes import ManifestNodes
from tstore.core.log import pages as log_pages
from tstore.core.log.pages import PageReader
from tstore.core.maintenance.contents import contents
from tstore.errors import AlreadyExists, Conflict, Corrupt, DeadlineExceeded, NotFound, SnapshotExpired
from tstore.service.server import Server


@pytest.fixture
def short(thresholds: Thresholds) -> None:
    """Make pages of a few nodes, in objects however short."""
    thresholds(PAGE_BYTES=500, SHORT_MANIFEST=500, INLINE_MANIFEST_BYTES=0)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Page]:
    """The pages that are read from storage, in any thread."""
    read: list[Page] = []
    original = PageReader._read

    def recorded(self: PageReader, key: str, places: list) -> object:
        read.extend(place.page for place in places)
        return original(self, key, places)

    monkeypatch.setattr(PageReader, "_read", recorded)
    return read


def tree_of(value: int, groups: int = 5) -> dict[str, dict[str, np.ndarray]]:
    return {f"g{g}": {f"a{a}": np.full(4, 10 * g + a + value) for a in range(4)} for g in range(groups)}


async def value_of(store: tstore.Store, path: str, at: int | None = None) -> int:
    return int((await (await (await store.snapshot(at)).array(path)).read())[0])


async def reference_of(store: tstore.Store, version: int) -> ObjectRef:
    [reference] = (await store.log.reader.record(version)).manifests
    assert isinstance(reference, ObjectRef)
    assert len(reference.pages) > 3
    return reference


async def test_a_hundred_thousand_arrays_need_not_be_read(url: str, loaded: list[Page]) -> None:
    """With pages of the usual length."""
    await tstore.save(url, {f"g{g:04}": {f"a{a}": np.full(2, a) for a in range(10)} for g in range(1000)}, 0)
    store = await tstore.open(url)
    snapshot = await store.snapshot()
    assert not loaded
    assert (await (await snapshot.array("g0500/a3")).read()).tolist() == [3, 3]
    [page] = loaded
    assert page.length < 300 << 10
    async with store.transaction() as tx:
        await (await tx.array("g0500/a4"))[:].write(7)
        await (await tx.create_array("g0500/b", (1,), "i8")).write(1)
    assert loaded == [page]
    assert await value_of(store, "g0500/a4") == 7
    assert len(loaded) == 1
    with pytest.raises(NotFound, match="g0500/a9"):
        await snapshot.array("g0500/none")
    assert len(snapshot.paths()) == 10_000
    assert len(loaded) == len((await reference_of(store, 1)).pages)


@pytest.mark.usefixtures("short")
async def test_a_group_is_listed_from_its_pages(url: str, loaded: list[Page]) -> None:
    await tstore.save(url, tree_of(0), 0)
    snapshot = await (await tstore.open(url)).snapshot()
    assert [array.path for array in contents(snapshot, "g3")] == [f"g3/a{a}" for a in range(4)]
    assert 0 < len(set(loaded)) <= 4
    assert not {"", "g0/a0"} & {page.first for page in loaded}
    assert len(contents(snapshot)) == 20


async def test_the_nodes_of_a_whole_tree_are_made_together(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One look through the columns of a manifest, not a search for each array."""
    await tstore.save(url, tree_of(0), 0)
    store = await tstore.open(url)
    made: list[str] = []
    get = ManifestNodes.get

    def counted(self: ManifestNodes, path: str) -> Node | None:
        made.append(path)
        return get(self, path)

    monkeypatch.setattr(ManifestNodes, "get", counted)
    restored = await tstore.restore(store)
    assert restored["g4"]["a3"].tolist() == [43] * 4
    assert [array.path for array in contents(await store.snapshot())] == sorted(
        f"g{g}/a{a}" for g in range(5) for a in range(4)
    )
    assert not {path for path in made if "/" in path}


async def test_metadata_that_many_arrays_share_is_parsed_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    parse = ArrayMeta.__init__

    def counted(self: ArrayMeta, document: bytes) -> None:
        parsed.append(document)
        parse(self, document)

    monkeypatch.setattr(ArrayMeta, "__init__", counted)
    await tstore.save(url, {f"a{n}": np.full(41, n) for n in range(60)}, 0)
    store = await tstore.open(url)
    assert (await tstore.restore(store))["a7"].tolist() == [7] * 41
    assert len(contents(await store.snapshot())) == 60
    assert len(parsed) <= 3


@pytest.mark.usefixtures("short")
async def test_changes_over_pages_are_read_back(url: str) -> None:
    store = await tstore.open(url)
    await tstore.save(store, tree_of(0), 0)
    expected = {f"g{g}/a{a}": 10 * g + a for g in range(5) for a in range(4)}
    rng = np.random.default_rng(3)
    for version in range(2, 140):  # past two roots
        path = f"g{rng.integers(6)}/a{rng.integers(4)}"
        async with store.transaction() as tx:
            if path not in expected:
                await (await tx.create_array(path, (4,), "i8")).write(version)
                expected[path] = version
            elif rng.random() < 0.3:
                await tx.delete(path)
                del expected[path]
            else:
                await (await tx.array(path)).write(version)
                expected[path] = version
            assert await tx.paths() == sorted(expected)
    for reader in (store, await tstore.open(url)):
        snapshot = await reader.snapshot()
        assert snapshot.paths() == sorted(expected)
        assert {path: await value_of(reader, path) for path in expected} == expected
    assert (await store.verify()).ok


@pytest.mark.usefixtures("short")
async def test_pages_after_a_long_record_do_not_hide_its_nodes(url: str) -> None:
    store = await tstore.open(url)
    async with store.transaction(metadata={"long": ["text"] * 100_000}) as tx:
        await (await tx.create_array("before", (1,), "i8")).write(1)
    async with store.transaction() as tx:
        for a in range(20):
            await (await tx.create_array(f"g/a{a}", (1,), "i8")).write(a)
    await reference_of(store, 2)
    fresh = await tstore.open(url)
    assert (await fresh.log.reader.stored(1)).is_long
    assert (await fresh.snapshot()).paths() == (await store.snapshot()).paths()
    assert await value_of(fresh, "before") == 1


@pytest.mark.usefixtures("short")
async def test_paths_are_taken_or_free_as_in_a_short_manifest(url: str) -> None:
    store = await tstore.open(url)
    await tstore.save(store, tree_of(0), 0)
    async with store.transaction() as tx:
        for path in ("g1", "g1/a2", "g1/a2/below"):
            with pytest.raises(AlreadyExists):
                await tx.create_array(path, (1,), "i8")
        with pytest.raises(NotFound):
            await tx.delete("g9")
        await tx.delete("g1")
        await (await tx.create_array("g1", (1,), "i8")).write(5)
        with pytest.raises(AlreadyExists):
            await tx.create_group("g1/sub")
        await tx.create_group("g2/sub", {"a": 1})
    snapshot = await (await tstore.open(url)).snapshot()
    assert [path for path in snapshot.paths() if path.startswith("g1")] == ["g1"]
    assert snapshot.attributes("g2/sub") == {"a": 1}


async def test_the_work_of_creating_arrays_anew_is_linear_in_their_number(url: str) -> None:
    store = await tstore.open(url)
    calls = dict.fromkeys((100, 400), 0)
    for count in calls:
        await tstore.save(store, {f"a{a}": np.zeros(4) for a in range(count)}, count)

        def add(_frame: object, event: str, _argument: object, count: int = count) -> None:
            calls[count] += event == "call"

        async with store.transaction() as tx:
            sys.setprofile(add)
            try:
                for a in range(count):
                    await tx.delete(f"a{a}")
                    await tx.create_array(f"a{a}", (3,), "f8")
            finally:
                sys.setprofile(None)
            for a in range(count):
                await (await tx.array(f"a{a}")).write(1.0)
    assert calls[400] < 5 * calls[100]
    assert await value_of(store, "a399") == 1


async def test_what_a_transaction_has_staged_is_deleted_whenever_it_was_staged(url: str) -> None:
    store = await tstore.open(url)
    await tstore.save(store, {name: np.zeros(4) for name in "abcd"}, 0)
    async with store.transaction() as tx:
        await (await tx.array("a"))[:2].write(1.0)
        await tx.create_array("g/new", (3,), "f8")  # from here on, the paths that are taken are known
        await (await tx.array("b"))[:2].write(1.0)
        await tx.create_group("h", {})
        for path in ("b", "a", "g", "h"):  # the index of staged paths is dropped by the first
            await tx.delete(path)
            with pytest.raises(NotFound):
                await tx.delete(path)
        assert await tx.paths() == ["c", "d"]
        await (await tx.create_array("b/below", (3,), "f8")).write(2.0)
        await (await tx.array("c"))[:2].write(1.0)
    assert (await store.snapshot()).paths() == ["b/below", "c", "d"]


@pytest.mark.usefixtures("short")
async def test_a_serializable_transaction_over_pages(url: str) -> None:
    store = await tstore.open(url)
    await tstore.save(store, tree_of(0), 0)
    first, second = (store.transaction(isolation="serializable") for _ in range(2))
    await (await first.array("g1/a0")).read()
    assert len(await second.paths()) == 20
    for tx in (first, second):
        await (await tx.array("g4/a0")).write(9)
    async with store.transaction() as other:
        await (await other.create_array("g2/new", (1,), "i8")).write(1)
    await first.commit()
    with pytest.raises(Conflict, match="g2/new"):
        await second.commit()


@pytest.mark.usefixtures("short")
async def test_a_save_compares_with_the_pages_of_the_step_before(url: str) -> None:
    for step in range(3):
        await tstore.save(url, {**tree_of(0), "step": np.full(3, step)}, step)
    store = await tstore.open(url)
    record = await store.log.reader.record(3)
    assert record.bytes_added == 24
    await store.collect(tstore.Keep(last=1))
    again = await tstore.open(url)
    restored = await tstore.restore(again)
    assert restored["step"].tolist() == [2, 2, 2]
    assert restored["g4"]["a3"].tolist() == [43] * 4
    assert (await again.verify()).ok


@pytest.mark.usefixtures("short")
async def test_a_living_version_keeps_the_pages_of_an_expired_one(url: str) -> None:
    store = await tstore.open(url)
    await tstore.save(store, tree_of(0), 0)
    old, listed = [await (await tstore.open(url)).snapshot() for _ in range(2)]
    async with store.transaction() as tx:
        await (await tx.array("g1/a1")).write(-1)
    async with store.transaction(tag="step/1") as tx:
        await (await tx.array("g1/a1")).write(-2)
    assert (await store.collect(tstore.Keep(last=1))).versions == [1, 2]
    again = await tstore.open(url)
    assert await value_of(again, "g1/a1") == -2
    assert await value_of(again, "g4/a3") == 43
    assert (await again.verify()).ok
    await tstore.save(store, tree_of(5), 2)
    await store.collect(tstore.Keep(last=1))
    with pytest.raises(SnapshotExpired):
        await old.read_nodes()
    with pytest.raises(SnapshotExpired):
        await old.array("g0/a0")
    for look in (listed.paths, listed.attributes):
        with pytest.raises(SnapshotExpired, match="newer version"):
            look()
    assert await value_of(again, "g4/a3") == 48


@pytest.mark.usefixtures("short")
async def test_damage_is_named_when_its_page_is_read(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    await tstore.save(url, tree_of(0), 0)
    reference = await reference_of(await tstore.open(url), 1)
    place = reference.place(3)
    file = Path(url, reference.key)
    intact = file.read_bytes()
    for at in range(place.offset, place.offset + place.page.length, 29):
        damaged = bytearray(intact)
        damaged[at] ^= 1
        file.write_bytes(damaged)
        store = await tstore.open(url)
        assert await value_of(store, "g0/a0") == 0  # other pages are intact
        with pytest.raises(Corrupt, match=reference.key):
            await (await store.snapshot()).array(place.page.first)
        with pytest.raises(Corrupt, match=reference.key):
            (await store.snapshot()).paths()
    [fault, *_] = (await store.verify()).faults
    assert reference.key in fault
    file.write_bytes(intact[:-1])
    with pytest.raises(Corrupt, match=reference.key):
        await value_of(await tstore.open(url), "g4/a3")
    file.unlink()
    with pytest.raises(NotFound, match=f"{url}: {reference.key} is missing; restore it from a copy"):
        await value_of(await tstore.open(url), "g4/a3")
    assert not (await (await tstore.open(url)).verify()).ok


@pytest.mark.usefixtures("short")
async def test_copies_have_the_pages(url: str, tmp_path: Path) -> None:
    store = await tstore.open(url)
    await tstore.save(store, tree_of(0), 0)
    async with store.transaction() as tx:
        await (await tx.array("g1/a1")).write(-1)
    await tstore.copy(store, tmp_path / "all")
    await tstore.copy(store, tmp_path / "one", at=2)
    for name in ("all", "one"):
        copied = await tstore.open(tmp_path / name)
        assert await value_of(copied, "g1/a1") == -1
        assert await value_of(copied, "g4/a3") == 43
        assert (await copied.verify()).ok


@pytest.mark.usefixtures("short")
async def test_hosts_with_many_arrays_each(url: str) -> None:
    async def host(number: int) -> None:
        tx = (await tstore.open(url)).transaction(name="n", host=number, hosts=3, attempt="a")
        for at in range(8):
            await (await tx.create_array(f"h{number}/a{at}", (4,), "i8")).write(10 * number + at)
        await tx.commit(timeout=20)

    await asyncio.gather(*map(host, range(3)))
    store = await tstore.open(url)
    await reference_of(store, 1)
    assert [await value_of(store, f"h{h}/a{a}") for h in range(3) for a in range(8)] == [
        10 * h + a for h in range(3) for a in range(8)
    ]
    assert (await store.verify()).ok


@pytest.mark.usefixtures("short")
async def test_a_server_on_the_same_event_loop_is_not_waited_for(tmp_path: Path, loaded: list[Page]) -> None:
    """Pages are read in threads: a call that blocked the loop would never get a response."""
    async with asyncio.timeout(60), Server(str(tmp_path / "store"), access=everybody()) as server:

        async def opened() -> tstore.Store:
            return await tstore.open(server.url, storage_options={"token": ADMIN})

        await tstore.save(await opened(), tree_of(0), 0)
        await tstore.save(await opened(), tree_of(1), 1)  # compares with the chunks of the step before
        assert await value_of(await opened(), "g4/a3") == 44
        assert (await tstore.restore(await opened(), 0))["g2"]["a1"].tolist() == [21] * 4
        assert len((await (await opened()).diff(1, 2)).arrays) == 20
        store = await opened()
        async with store.transaction(isolation="serializable") as tx:
            await (await tx.array("g0/a0"))[:2].write(7)
            await (await tx.create_array("g1/new", (1,), "i8")).write(1)
            await tx.delete("g3")
            assert len(await tx.paths()) == 17
            other = await opened()
            async with other.transaction() as concurrent:
                await (await concurrent.array("g0/a0"))[2:].write(8)
        assert (await (await (await (await opened()).snapshot()).array("g0/a0")).read()).tolist() == [7, 7, 8, 8]
        await (await opened()).collect(tstore.Keep(last=1))
        assert (await (await opened()).verify()).ok
        await tstore.copy(await opened(), tmp_path / "copy")
    assert loaded
    assert await value_of(await tstore.open(tmp_path / "copy"), "g4/a3") == 44


@pytest.mark.usefixtures("short")
async def test_calls_that_look_up_many_pages_do_not_block_the_event_loop(
    tmp_path: Path, loaded: list[Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the pages are more than are cached."""
    monkeypatch.setattr(log_pages, "_CACHED_BYTES", 500)
    async with asyncio.timeout(60), Server(str(tmp_path / "store"), access=everybody()) as server:

        async def opened() -> tstore.Store:
            return await tstore.open(server.url, storage_options={"token": ADMIN})

        await tstore.save(await opened(), {"g": tree_of(0)}, 0)
        snapshot = await (await opened()).snapshot()
        await snapshot.read_nodes()
        read = len(loaded)
        assert len(snapshot.paths()) == 20
        assert len({(await snapshot.array(path)).shape for path in snapshot.paths()}) == 1
        assert len(loaded) == read
        assert (await tstore.restore(await opened(), 0))["g"]["g2"]["a1"].tolist() == [21] * 4
        async with (await opened()).transaction() as tx:
            with pytest.raises(AlreadyExists):
                await tx.create_array("g", (1,), "i8")
            await tx.create_group("g", {"a": 1})
            assert len(await tx.paths()) == 20
        async with (await opened()).transaction() as tx:
            for path in ("g/g0/a0", "g/g4/a3", "g/g1/a1"):
                await (await tx.array(path))[:2].write(5)
        async with (await opened()).transaction() as tx:
            await tx.delete("g")
        for _ in range(2):
            async with (await opened()).transaction() as tx:
                for at in range(20):
                    await tx.create_group(f"h/g{at}", {})
                    await (await tx.create_array(f"h/g{at}/a", (1,), "i8")).write(at)
                await tx.delete("h")
        snapshot = await (await opened()).snapshot()
        await snapshot.read_nodes()
        assert snapshot.paths() == []


@pytest.mark.usefixtures("short")
async def test_many_commits_to_one_array_do_not_block_a_process_that_follows(
    tmp_path: Path, loaded: list[Page], thresholds: Thresholds
) -> None:
    """It lays them over the node from time to time, though nobody looks that up, so that no lookup takes long."""
    thresholds(_MAX_WRITES=4)
    async with asyncio.timeout(60), Server(str(tmp_path / "store"), access=everybody()) as server:
        options = {"token": ADMIN}
        store = await tstore.open(server.url, storage_options=options)
        await tstore.save(store, tree_of(0), 0)
        follower = await tstore.open(server.url, storage_options=options)
        for turn in range(10):
            async with store.transaction() as tx:
                await (await tx.array("g1/a1"))[turn % 4 : turn % 4 + 1].write(turn)
            assert (await follower.snapshot()).version == turn + 2
            if turn == 2:
                loaded.clear()
        assert len(loaded) == 1
        snapshot = await follower.snapshot()
        assert (await (await snapshot.array("g1/a1")).read()).tolist() == [8, 9, 6, 7]


async def fill(store: tstore.Store, version: int) -> None:
    """Commit until the version has a root."""
    for _ in range(64 - version % 64):
        async with store.transaction(durability="none"):
            pass


async def root_of(store: tstore.Store, version: int) -> Root:
    root = await store.log.reader.trees.root(version)
    assert root is not None
    return root


async def save_and_change(store: tstore.Store) -> None:
    """Save a tree, change two arrays, and commit until there is a root, which refers to the pages of the save."""
    await tstore.save(store, tree_of(0), 0)
    for path in ("g0/a0", "g1/a1"):
        async with store.transaction() as tx:
            await (await tx.array(path)).write(-1)
    await fill(store, 3)
    assert (await root_of(store, 64)).base is not None


@pytest.mark.usefixtures("short")
async def test_a_root_refers_to_the_pages_of_the_last_save(url: str, loaded: list[Page]) -> None:
    store = await tstore.open(url)
    for step in range(2):
        await tstore.save(store, tree_of(step), step)
    async with store.transaction() as tx:
        await (await tx.array("g1/a1")).write(-1)
        await tx.delete("g2")
        await (await tx.create_array("new", (4,), "i8")).write(-2)
    await fill(store, 3)
    root = await root_of(store, 64)
    assert (root.base, root.manifest.paths) == (await reference_of(store, 2), ("g1/a1", "new"))
    assert root.deleted == tuple(f"g2/a{a}" for a in range(4))
    await store.collect(tstore.Keep(last=1))
    again = await tstore.open(url)
    loaded.clear()
    snapshot = await again.snapshot()
    assert not loaded
    assert len(snapshot.paths()) == 17
    expected = {"g1/a1": -1, "new": -2, "g4/a3": 44}
    assert {path: await value_of(again, path) for path in expected} == expected
    assert (await again.verify()).ok
    await fill(again, 65)
    assert (await root_of(again, 128)).parent == 64
    await tstore.save(again, tree_of(7), 2)
    await fill(again, 129)
    assert (await root_of(again, 192)).base == await reference_of(again, 129)
    await again.collect(tstore.Keep(last=1))
    assert await value_of(await tstore.open(url), "g4/a3") == 50
    assert (await (await tstore.open(url)).verify()).ok


@pytest.mark.usefixtures("short")
async def test_a_server_derives_roots_that_refer_to_pages(tmp_path: Path) -> None:
    """The server has all nodes in memory, the clients read pages; both come to the same bytes."""
    async with Server(str(tmp_path / "store"), access=everybody()) as server:
        store = await tstore.open(server.url, storage_options={"token": ADMIN})
        await save_and_change(store)
        await tstore.copy(store, tmp_path / "copy")
    copied = await tstore.open(tmp_path / "copy")
    assert (await root_of(copied, 64)).base is not None
    assert (await copied.verify()).ok
    assert await value_of(copied, "g1/a1") == -1


@pytest.mark.usefixtures("short")
async def test_damage_to_a_root_that_refers_to_pages_is_reported(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    store = await tstore.open(url)
    await tstore.save(store, tree_of(0), 0)
    async with store.transaction() as tx:
        await (await tx.array("g1/a1")).write(-1)
    await fill(store, 2)
    root = await root_of(store, 64)
    file = Path(url, root_key(64))
    intact = file.read_bytes()
    for at in range(0, len(intact), 17):
        file.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
        assert await value_of(await tstore.open(url), "g1/a1") == -1  # from the records
    assert [root_key(64) in fault for fault in (await (await tstore.open(url)).verify()).faults] == [True]
    file.write_bytes(encode(replace(root, deleted=("g3/a3",))))
    [fault] = (await (await tstore.open(url)).verify()).faults
    assert "g3/a3" in fault


@pytest.mark.usefixtures("short")
async def test_nodes_that_were_replaced_need_no_pages(url: str) -> None:
    """A root, or an open store, may refer to pages that expired after a later commit replaced the tree."""
    store = await tstore.open(url)
    await tstore.save(store, tree_of(0), 0)
    follower = await tstore.open(url)
    await fill(store, 1)
    assert (await follower.snapshot()).version == 64
    async with store.transaction() as tx:
        await tx.delete("g0")
    await tstore.save(store, tree_of(1), 1)
    await store.collect(tstore.Keep(last=1))
    with pytest.raises(NotFound):
        await store.log.storage.get((await reference_of(store, 1)).key)
    for reader in (follower, await tstore.open(url)):
        assert await value_of(reader, "g4/a3") == 44
        assert (await reader.verify()).ok


@pytest.mark.usefixtures("short")
async def test_a_server_knows_all_nodes_after_a_record_with_pages(tmp_path: Path) -> None:
    """Without all manifests, it would accept no further change from a client with scope write."""
    async with Server(str(tmp_path / "store"), access=everybody()) as server:
        store = await tstore.open(server.url, storage_options={"token": WRITE})
        for step in range(3):
            await tstore.save(store, tree_of(step), step)
            async with store.transaction() as tx:
                await (await tx.array("g1/a1")).write(-step)
        assert await value_of(store, "g1/a1") == -2


@pytest.mark.usefixtures("short")
async def test_a_host_compares_with_the_pages_of_its_own_arrays(url: str, loaded: list[Page]) -> None:
    def tree(host: int) -> dict[str, dict[str, tstore.Shards]]:
        def part(group: str, value: np.ndarray) -> tstore.Shards:
            own = [(slice(0, 4), value)] if int(group[1:]) // 10 == host else []
            return tstore.Shards((4,), "i8", own, shard_shape=(4,))

        return {g: {a: part(g, value) for a, value in arrays.items()} for g, arrays in tree_of(0, 20).items()}

    async def save(host: int, step: int, timeout: float) -> None:
        await tstore.save(url, tree(host), step, host=host, hosts=2, attempt="a", timeout=timeout)

    await asyncio.gather(save(0, 1, 60), save(1, 1, 60))
    every = len((await reference_of(await tstore.open(url), 1)).pages)
    loaded.clear()
    with pytest.raises(DeadlineExceeded):
        await save(0, 2, 0.01)
    assert 0 < len(set(loaded)) <= every / 2 + 3  # in the order of paths, g10 to g19 are between g1 and g2
