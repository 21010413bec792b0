"""Stores that many commits filled: what their roots cost, and what happens if one of these is missing or damaged.

The fixture `short` makes pages of a few nodes, and a root every fourth version.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.counted_reads import count_reads
from tests.support.http_server import ADMIN, everybody
from tests.support.thresholds import Thresholds
from tests.transactions.test_compactions import make_small
from tstore.core.format.layout import root_chain, root_key
from tstore.core.format.objects import pages
from tstore.core.format.objects.object_ref import ObjectRef
from tstore.core.format.objects.roots import StoredRoot
from tstore.core.format.tree import nodes
from tstore.core.format.tree.stored_nodes import Change, Level
from tstore.core.log import objects
from tstore.core.log.pages import PageReader
from tstore.core.storage.local.store import LocalStorage
from tstore.core.storage.remote import as_remote
from tstore.lab.simulation.scenario import override_constants
from tstore.service.server import Server

EVERY = 4


@contextlib.contextmanager
def short_roots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, override_constants(ROOT_EVERY=EVERY):
        patch.setattr(pages, "PAGE_BYTES", 500)
        patch.setattr(pages, "SHORT_MANIFEST", 500)
        patch.setattr(objects, "_SHORT_ROOT", 1500)
        patch.setattr(objects, "_ROOT_END", 300)
        patch.setattr(nodes, "_MANY", 2)
        patch.setattr(nodes, "_SHARE", 2)
        yield


@pytest.fixture
def short() -> Iterator[None]:
    with short_roots():
        yield


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A store that 58 commits filled, to be copied, and the values of its arrays."""
    folder = tmp_path_factory.mktemp("template") / "store"
    with short_roots():
        _, expected = asyncio.run(filled(folder, 58))
    return folder, expected


async def create(store: tstore.Store, paths: list[str], value: int = 0) -> None:
    async with store.transaction(durability="none") as tx:
        for path in paths:
            await (await tx.create_array(path, (2,), "i8")).write(value)


async def write(store: tstore.Store, path: str, value: int) -> None:
    async with store.transaction(durability="none") as tx:
        await (await tx.array(path)).write(value)


async def values(store: tstore.Store, at: int | None = None) -> dict[str, int]:
    snapshot = await store.snapshot(at)
    await snapshot.read_nodes()
    return {path: int((await (await snapshot.array(path)).read())[0]) for path in snapshot.paths()}


async def filled(url: str | Path, versions: int = 14) -> tuple[tstore.Store, dict[str, int]]:
    """Return a store of arrays that many commits created and changed, and the values of the arrays."""
    store, expected = await tstore.open(str(url)), dict[str, int]()
    for version in range(1, versions + 1):
        if version % 3:
            paths = [f"g{version:02}/a{a}" for a in range(3)]
            await create(store, paths, version)
            expected |= dict.fromkeys(paths, version)
        else:
            path = sorted(expected)[version % len(expected)]
            await write(store, path, version)
            expected[path] = version
    return store, expected


async def derived(store: tstore.Store, version: int) -> StoredRoot:
    """Return a root as the records determine it, to a process that starts at the version before it."""
    log = (await tstore.open(store.url)).log.reader
    await log.tree(version - 1)
    return await log.root(await log.tree(version))


def page_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the key of the object for each page that is read."""
    read: list[str] = []
    original = PageReader._read

    def recorded(self: PageReader, key: str, places: list) -> object:
        read.extend([key] * len(places))
        return original(self, key, places)

    monkeypatch.setattr(PageReader, "_read", recorded)
    return read


@pytest.fixture
def quarter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make pages, and the distances between roots, a quarter of the usual."""
    for module, name in (
        (pages, "PAGE_BYTES"),
        (pages, "SHORT_MANIFEST"),
        (objects, "_SHORT_ROOT"),
        (objects, "_ROOT_END"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name) // 4)
    with override_constants(ROOT_EVERY=16):
        yield


@pytest.mark.usefixtures("quarter")
async def test_roots_cost_what_commits_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2,500 arrays: the same as of 10,000 with roots and pages of the usual length."""
    url, count = tmp_path / "store", 2500
    store = await tstore.open(str(url))
    for start in range(0, count, 125):
        await create(store, [f"g{at // 100:03}/a{at % 100:02}" for at in range(start, start + 125)])
    while await store.log.reader.newest() < 16 * 4:
        await write(store, "g000/a01", 2)
    whole = (url / root_key(64)).stat().st_size
    assert whole > 1 << 17
    for version in range(64, 64 + 160):
        await write(store, f"g{version % 23:03}/a{version % 89:02}", version)
    roots = {int(file.name): file.stat().st_size for file in (url / "roots").iterdir()}
    assert sum(size for version, size in roots.items() if version > 64) < whole / 2

    read = count_reads(monkeypatch)
    opened = await tstore.open(str(url))
    array = await (await opened.snapshot()).array("g023/a99")
    assert (await array.read()).tolist() == [0, 0]
    assert sum(read) < whole / 2
    snapshot = await opened.snapshot()
    assert len(snapshot.paths()) == count
    for version in range(75, 224, 10):
        last = max(v for v in range(64, 224) if (v % 23, v % 89) == (version % 23, version % 89))
        assert (await (await snapshot.array(f"g{last % 23:03}/a{last % 89:02}")).read())[0] == last
    assert (await opened.verify()).ok


async def test_small_commits_do_not_copy_what_large_ones_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two commits of 2,000 groups each, and thirty of one, before the next root."""
    copied = 0
    add = Level.with_changes

    def counted(self: Level, changed: Mapping[str, Change]) -> Level:
        nonlocal copied
        copied += len(self.changed)
        return add(self, changed)

    monkeypatch.setattr(Level, "with_changes", counted)
    store = await tstore.open("memory://small-commits-after-large-ones")
    for commit, size in enumerate((1, 2000, 2000, *[1] * 30)):
        async with store.transaction() as tx:
            for at in range(size):
                await tx.create_group(f"g{commit}/{at}", {})
    assert len((await store.snapshot()).tree.nodes) == 4031
    assert copied < 10_000


@pytest.mark.usefixtures("short")
async def test_any_route_to_a_version_gives_the_same_root(tmp_path: Path) -> None:
    """From the records alone, from a root a few versions before, and as the commits wrote it."""
    store, expected = await filled(tmp_path / "store", 72)
    written = {v: (tmp_path / "store" / root_key(v)).read_bytes() for v in range(EVERY, 73, EVERY)}
    parents = set[int]()
    for version, data in written.items():
        root = await derived(store, version)
        assert root.data == data
        parents.add(root.root.parent)
    assert len(parents) > 8
    for file in (tmp_path / "store/roots").iterdir():
        file.unlink()
    for version, data in written.items():
        assert (await derived(store, version)).data == data
    assert await values(await tstore.open(store.url)) == expected
    await filled_further(store, 72)
    chain = [64, 68, 72]  # to which the new root refers
    assert roots_in(tmp_path / "store") == [*chain, 76]
    for version in chain:
        assert (tmp_path / "store" / root_key(version)).read_bytes() == written[version]


@pytest.mark.usefixtures("short")
async def test_differences_are_those_of_the_values_whatever_roots_the_versions_share(
    template: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(template[0], folder)
    store = await tstore.open(folder)
    async with store.transaction() as tx:
        for path in ("g01", "g31/a0", "g58/a2"):
            await tx.delete(path)
    await write(store, "g34/a1", 1000)
    expected = {version: await values(store, version) for version in (1, 15, 16, 17, 40, 48, 57, 58, 59, 60)}
    for a, b in itertools.permutations(expected, 2):
        for opened in (store, await tstore.open(folder)):
            found = {d.path: d.change for d in (await opened.diff(a, b)).arrays}
            paths = expected[a].keys() | expected[b].keys()
            differing = {p for p in paths if expected[a].get(p) != expected[b].get(p)}
            assert found.keys() == differing
            assert {p for p, change in found.items() if change == "removed"} == expected[a].keys() - expected[
                b
            ].keys()


@pytest.mark.usefixtures("short")
async def test_a_comparison_of_near_versions_reads_few_pages(
    template: tuple[Path, dict[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(template[0], folder)
    for path in ("g02/a1", "g04/a1", "g05/a1", "g32/a1"):
        await write(await tstore.open(folder), path, 1000)
    read = page_reads(monkeypatch)
    for a, b, path in ((58, 59, "g02/a1"), (62, 61, "g32/a1")):
        store = await tstore.open(folder)
        read.clear()
        assert [d.path for d in (await store.diff(a, b)).arrays] == [path]
        assert len(read) <= 8, read  # in each level, that of the path
    read.clear()
    await (await (await tstore.open(folder)).snapshot()).read_nodes()
    assert len(read) > 20  # all pages


def roots_in(folder: Path) -> list[int]:
    """Return the versions that have a root."""
    return sorted(int(file.name) for file in (folder / "roots").iterdir())


async def filled_further(store: tstore.Store, version: int) -> None:
    """Commit until the next root is written."""
    for _ in range(EVERY - version % EVERY):
        await write(store, "g01/a0", 1)


Damage = Callable[[Path], Awaitable[None] | None]


def _flip(at: float) -> Damage:
    def flip(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[int(at * (len(data) - 1))] ^= 1
        file.write_bytes(data)

    return flip


DAMAGES: dict[str, Damage] = {
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b"") and None,
    "cut short": lambda file: file.write_bytes(file.read_bytes()[:-1]) and None,
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0") and None,
    **{f"a flipped bit at {at}": _flip(at) for at in (0, 0.1, 0.3, 0.5, 0.8, 0.95, 1)},
}


FREQUENT = {
    56: ("missing", "cut short", "a flipped bit at 0", "a flipped bit at 0.5", "a flipped bit at 1"),
    32: ("missing", "empty", "longer", "a flipped bit at 0.3"),
}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("version", "damage"),  # the newest root, and one to which it refers
    [
        pytest.param(version, damage, marks=() if damage in FREQUENT[version] else pytest.mark.deep)
        for version in FREQUENT
        for damage in DAMAGES
    ],
)
async def test_a_root_that_can_not_be_read_costs_only_time(
    damage: str, version: int, tmp_path: Path, template: tuple[Path, dict[str, int]]
) -> None:
    shutil.copytree(template[0], tmp_path / "store")
    store, expected = await tstore.open(str(tmp_path / "store")), template[1]
    assert root_chain(56) == [16, 32, 48, 52, 56]
    file = tmp_path / "store" / root_key(version)
    DAMAGES[damage](file)
    assert await values(await tstore.open(store.url)) == expected
    follower = await tstore.open(store.url)
    for path in expected:
        assert (await (await (await follower.snapshot()).array(path)).read())[0] == expected[path]
    assert (await follower.snapshot()).paths() == sorted(expected)  # without reading the nodes before
    if damage not in ("missing", "empty"):  # an empty one takes the place of a missing one
        [fault] = (await follower.verify()).faults
        assert root_key(version) in fault
        file.unlink()
    await filled_further(await tstore.open(store.url), 58)
    assert file.exists()  # those to which the new one refers are written again
    assert (await (await tstore.open(store.url)).verify()).ok
    assert (await derived(store, 60)).data == (tmp_path / "store" / root_key(60)).read_bytes()


@pytest.mark.usefixtures("short")
async def test_a_root_that_is_too_long_is_not_read(
    tmp_path: Path, template: tuple[Path, dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file is sparse, and says that nearly all of it is the frame."""
    shutil.copytree(template[0], tmp_path / "store")
    file, size = tmp_path / "store" / root_key(56), 1 << 40
    file.chmod(0o644)
    with file.open("wb") as root:
        root.truncate(size)
        root.seek(size - 8)
        root.write((size - 100).to_bytes(8, "little"))
    read = count_reads(monkeypatch)
    store = await tstore.open(str(tmp_path / "store"))
    assert await values(store) == template[1]
    [fault] = (await store.verify()).faults
    assert root_key(56) in fault
    assert max(read) < 1 << 20


@pytest.mark.usefixtures("short")
async def test_damaged_pages_of_several_roots_are_derived_by_concurrent_readers(tmp_path: Path) -> None:
    """More than there are worker threads, all of which may wait for the pages."""
    store, expected = await filled(tmp_path / "store", 58)
    for version in (16, 32, 48):
        _flip(0.1)(tmp_path / "store" / root_key(version))
    opened = await tstore.open(store.url)
    snapshot = await opened.snapshot()

    async def read(path: str) -> int:
        return int((await (await snapshot.array(path)).read())[0])

    async with asyncio.timeout(120):
        assert dict(zip(expected, await asyncio.gather(*map(read, expected)), strict=True)) == expected


@pytest.mark.usefixtures("short")
async def test_pages_are_derived_if_those_of_all_roots_are_damaged(tmp_path: Path) -> None:
    store, expected = await filled(tmp_path / "store", 58)
    for version in range(EVERY, 58, EVERY):
        _flip(0.1)(tmp_path / "store" / root_key(version))
    assert await values(await tstore.open(store.url)) == expected


@pytest.mark.usefixtures("short")
async def test_pages_are_derived_if_segments_that_they_replace_have_expired(
    tmp_path: Path, thresholds: Thresholds
) -> None:
    make_small(thresholds)
    store = await tstore.open(str(tmp_path / "store"))
    paths = [f"g{at:02}" for at in range(20)]
    await create(store, paths, 3)
    async with store.transaction(durability="none") as tx:
        await (await tx.create_array("long", (60,), "i8", (1,))).write(1)
    for view in (
        np.s_[7:9],
        np.s_[::2],
        np.s_[:],
    ):  # rows, segments over some, and all anew
        async with store.transaction(durability="none") as tx:
            long = await tx.array("long")
            await long[view].write(len(range(60)[view]))
    async with store.transaction(tag="step/1"):
        pass
    await store.collect(tstore.Keep(last=1))
    _flip(0.1)(tmp_path / "store" / root_key(4))
    opened = await tstore.open(store.url)
    assert await values(opened) == dict.fromkeys(paths, 3) | {"long": 60}
    assert (await (await tstore.open(store.url)).snapshot()).paths() == [*paths, "long"]


@pytest.mark.usefixtures("short")
async def test_a_whole_tree_is_read_without_older_roots_and_manifests(tmp_path: Path) -> None:
    """The root below it refers to one that is missing, and that expired versions would be needed to build."""
    with override_constants(INLINE_MANIFEST_BYTES=0):
        store, _ = await filled(tmp_path / "store", 29)
        await tstore.save(store, {"a": np.arange(4)}, step=1, durability="none")
        await store.collect(tstore.Keep(last=1))
        assert roots_in(tmp_path / "store") == root_chain(28)
        (tmp_path / "store" / root_key(root_chain(28)[0])).unlink()
        assert (await tstore.restore(store.url))["a"].tolist() == [0, 1, 2, 3]
        assert (await (await tstore.open(store.url)).verify()).ok


@pytest.mark.usefixtures("short")
async def test_roots_do_not_list_arrays_that_came_and_went(tmp_path: Path) -> None:
    """Over a whole tree in pages, which all later roots refer to, and some nodes of which are deleted."""
    store = await tstore.open(str(tmp_path / "store"))
    kept = [f"kept/a{at:02}" for at in range(20)]
    with override_constants(INLINE_MANIFEST_BYTES=0):
        await create(store, kept, 1)
    expected = dict.fromkeys(kept, 1)
    for version in range(2, 65):
        async with store.transaction(durability="none") as tx:
            if version > 2:
                await tx.delete(f"step/{version - 1}")
            if version % 16 == 0:
                await tx.delete(kept[version // 4])
                del expected[kept[version // 4]]
            await (await tx.create_array(f"step/{version}", (2,), "i8")).write(version)
    expected["step/64"] = 64
    deleted = {v: set((await store.log.reader.objects.root(v)).deleted) for v in (16, 32, 36, 60, 64)}
    gone = [kept[4], kept[8], kept[12], kept[16]]
    assert deleted == {16: {gone[0]}, 32: {"step/16", gone[1]}, 36: {"step/32"}, 60: {"step/56"}, 64: set(gone)}
    written = {v: (tmp_path / "store" / root_key(v)).read_bytes() for v in range(EVERY, 65, EVERY)}
    assert {v: (await derived(store, v)).data for v in written} == written
    assert await values(await tstore.open(store.url)) == expected
    assert (await (await tstore.open(store.url)).verify()).ok


@pytest.mark.usefixtures("short")
async def test_a_root_with_other_nodes_than_the_records_is_reported(tmp_path: Path) -> None:
    store, _ = await filled(tmp_path / "store", 20)
    other, _ = await filled(tmp_path / "other", 20)
    await write(other, "g20/a0", 1)
    file, copied = (tmp_path / name / root_key(16) for name in ("store", "other"))
    file.write_bytes(copied.read_bytes())
    [fault] = (await (await tstore.open(store.url)).verify()).faults
    assert root_key(16) in fault


@pytest.mark.usefixtures("short")
async def test_a_collection_keeps_the_roots_to_which_living_ones_refer(tmp_path: Path) -> None:
    store, expected = await filled(tmp_path / "store", 57)
    async with store.transaction(tag="step/1"):
        pass
    await store.collect(tstore.Keep(last=1))
    left = roots_in(tmp_path / "store")
    assert left == root_chain(56)
    opened = await tstore.open(store.url)
    assert await values(opened) == expected
    await create(opened, ["late"], 7)
    await create(opened, ["later"], 8)
    assert (await derived(opened, 60)).data == (tmp_path / "store" / root_key(60)).read_bytes()
    expected |= {"late": 7, "later": 8}
    while await opened.log.reader.newest() < 65:
        async with opened.transaction(tag=f"step/{await opened.log.reader.newest()}"):
            pass
    assert (await derived(opened, 64)).root.parent == 0
    await opened.collect(tstore.Keep(last=1))
    left = roots_in(tmp_path / "store")
    assert left == [64]
    for _ in range(2):
        assert await values(await tstore.open(store.url)) == expected
        assert (await (await tstore.open(store.url)).verify()).ok
        shutil.rmtree(tmp_path / "store/roots", ignore_errors=True)  # the records suffice


@pytest.mark.usefixtures("short")
async def test_a_reader_whose_tree_is_of_a_collected_root_goes_on_from_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages that it has not read yet are deleted, although it has all records since."""
    store, expected = await filled(tmp_path / "store", 57)
    reader = await tstore.open(store.url)
    assert (await reader.snapshot()).tree.nodes.is_paged
    while await store.log.reader.newest() < 65:
        await write(store, "g01/a0", 7)
    expected["g01/a0"] = 7
    await store.collect(tstore.Keep(last=1))
    assert roots_in(tmp_path / "store") == [64]
    read = page_reads(monkeypatch)
    assert await values(reader) == expected
    assert set(read) == {root_key(64)}


@pytest.mark.usefixtures("short")
async def test_a_hint_at_an_expired_root_is_followed_past_it(tmp_path: Path) -> None:
    """As while a collection deletes objects: the root is still there, but neither its parent nor the manifests."""
    url = tmp_path / "store"
    with override_constants(INLINE_MANIFEST_BYTES=0):
        store, _ = await filled(url, 57)
    expired = (url / root_key(44)).read_bytes()
    await tstore.save(store, {"w": np.arange(2)}, 0)
    await store.collect(tstore.Keep(last=1))
    assert root_chain(44)[-2] not in roots_in(url)
    (url / root_key(44)).write_bytes(expired)
    (url / "latest").write_bytes(b"44")
    opened = await tstore.open(as_remote(LocalStorage(str(url))))
    assert await values(opened) == {"w": 0}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("damage", ["missing", "a flipped bit at 0.5"])
async def test_a_version_that_replaced_the_tree_needs_no_root_below(damage: str, tmp_path: Path) -> None:
    with override_constants(INLINE_MANIFEST_BYTES=0):
        store, _ = await filled(tmp_path / "store", 57)
    await tstore.save(store, {"w": np.arange(2)}, 0)
    await store.collect(tstore.Keep(last=1))
    DAMAGES[damage](tmp_path / "store" / root_key(48))
    assert await values(await tstore.open(store.url)) == {"w": 0}


@pytest.mark.usefixtures("short")
async def test_copies_have_the_roots_that_they_need(tmp_path: Path) -> None:
    store, expected = await filled(tmp_path / "store", 58)
    await tstore.copy(store, tmp_path / "all")
    await tstore.copy(store, tmp_path / "one", at=57)
    await filled_further(store, 58)
    await tstore.copy(store, tmp_path / "all")
    folders = [tmp_path / name / "roots" for name in ("store", "all")]
    first, second = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert first == second
    assert roots_in(tmp_path / "one") == root_chain(56)
    expected["g01/a0"] = 1
    assert await values(await tstore.open(tmp_path / "all")) == expected
    one = await tstore.open(tmp_path / "one")
    assert await values(one) == await values(store, 57)
    assert (await one.verify()).ok


@pytest.mark.usefixtures("short")
async def test_a_server_accepts_the_roots_that_its_records_determine(tmp_path: Path) -> None:
    """It has all nodes in memory, or starts anew in between; its clients read pages."""
    for start in range(2):
        async with Server(str(tmp_path / "store"), access=everybody()) as server:
            store = await tstore.open(server.url, storage_options={"token": ADMIN})
            for at in range(20):
                await create(store, [f"h{start}{at:02}/a{a}" for a in range(3)], at)
            opened = await tstore.open(server.url, storage_options={"token": ADMIN})
            assert len(await values(opened)) == 60 * (start + 1)
    left = roots_in(tmp_path / "store")
    assert left == list(range(EVERY, 41, EVERY))
    async with Server(str(tmp_path / "copy"), access=everybody()) as server:
        await tstore.copy(await tstore.open(tmp_path / "store"), server.url, storage_options={"token": ADMIN})
    for version in left:
        original, copied = (tmp_path / name / root_key(version) for name in ("store", "copy"))
        assert original.read_bytes() == copied.read_bytes()
    assert (await (await tstore.open(tmp_path / "copy")).verify()).ok


@pytest.mark.usefixtures("short")
async def test_roots_that_a_backup_left_behind_are_not_used(tmp_path: Path) -> None:
    """The store was replaced by a backup, but roots of the versions after it stayed."""
    await filled(tmp_path / "store", 30)
    shutil.copytree(tmp_path / "store", tmp_path / "backup")
    store = await tstore.open(str(tmp_path / "store"))
    for number in range(16):
        await create(store, [f"lost{number}"])
    roots = {version: (tmp_path / "store" / root_key(version)).read_bytes() for version in (32, 36, 40, 44)}
    for version, data in roots.items():
        (tmp_path / "backup" / root_key(version)).write_bytes(data)
    store = await tstore.open(str(tmp_path / "backup"))
    expected = await values(store)
    for number in range(27):
        await create(store, [f"new{number:02}"], number)
        expected[f"new{number:02}"] = number
    assert await store.log.reader.newest() == 57
    assert root_chain(56)[1] == 32  # the root of another history
    for version in (57, 56, 50, 41):
        known = {path: value for path, value in expected.items() if path[:3] != "new" or value < version - 30}
        assert await values(await tstore.open(store.url), version) == known
    assert len((await (await tstore.open(store.url)).verify()).faults) == len(roots)


@pytest.mark.usefixtures("short")
async def test_a_writer_does_not_read_the_root_that_a_backup_left_in_place_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tree stays the one in memory, since the pages of the root that it would have written do not exist."""
    store, expected = await filled(tmp_path / "store", 31)
    other, _ = await filled(tmp_path / "other", 32)
    await other.close()
    shutil.copy(tmp_path / "other" / root_key(32), tmp_path / "store" / root_key(32))
    read = page_reads(monkeypatch)
    await create(store, [f"new{number}" for number in range(9)], 5)
    assert await store.log.reader.newest() == 32
    assert await values(store) == expected | {f"new{number}": 5 for number in range(9)}
    assert read
    assert root_key(32) not in read


@pytest.mark.usefixtures("short")
async def test_a_cache_on_disk_has_the_pages_of_roots(tmp_path: Path) -> None:
    async with Server(str(tmp_path / "store"), access=everybody()) as server:
        options, cache = {"token": ADMIN}, tstore.Cache(tmp_path / "cache")
        store = await tstore.open(server.url, storage_options=options)
        expected = dict[str, int]()
        for at in range(17):
            paths = [f"g{at:02}/a{a}" for a in range(3)]
            await create(store, paths, at)
            expected |= dict.fromkeys(paths, at)
        for _ in range(2):
            assert await values(await tstore.open(server.url, storage_options=options, cache=cache)) == expected
        shutil.rmtree(tmp_path / "store/roots")
        assert await values(await tstore.open(server.url, storage_options=options, cache=cache)) == expected
        for root in (tmp_path / "cache").rglob("*"):
            if root.is_file():
                root.write_bytes(root.read_bytes()[:-1] + b"\0")
        assert await values(await tstore.open(server.url, storage_options=options, cache=cache)) == expected


@pytest.mark.usefixtures("short")
async def test_roots_after_a_repair_are_those_of_the_new_history(tmp_path: Path) -> None:
    store, expected = await filled(tmp_path / "store", 58)
    voided = [path for path in expected if path.startswith("g34/")]
    await (await tstore.open(store.url)).repair(void_intact=[34])
    assert roots_in(tmp_path / "store") == list(range(EVERY, 58, EVERY))
    opened = await tstore.open(store.url)
    assert not await _existing(opened, voided)
    await create(opened, ["new"], 3)
    assert set(roots_in(tmp_path / "store")) > {48, 52, 56, 60}
    for version in (48, 52, 56, 60):
        assert (await derived(opened, version)).data == (tmp_path / "store" / root_key(version)).read_bytes()
    assert not await _existing(await tstore.open(store.url), voided)
    assert (await (await tstore.open(store.url)).verify()).ok


async def _existing(store: tstore.Store, paths: list[str]) -> set[str]:
    return set(paths).intersection((await store.snapshot()).paths())


@pytest.mark.usefixtures("short")
async def test_opening_reads_the_pages_of_one_array_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, expected = await filled(tmp_path / "store", 70)
    read = page_reads(monkeypatch)
    root = (await derived(store, 64)).root.manifest
    assert isinstance(root, ObjectRef)
    assert len(root.pages) > 10
    read.clear()
    opened = await tstore.open(store.url)
    snapshot = await opened.snapshot()
    assert not read
    assert (await (await snapshot.array("g01/a2")).read())[0] == expected["g01/a2"]
    assert 0 < len(read) <= len(root_chain(68))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(2, 12))])
async def test_random_histories(seed: int, tmp_path: Path) -> None:
    """Compared with a dict, by processes that follow, open anew, or find roots missing."""
    rng, url = np.random.default_rng(seed), str(tmp_path / "store")
    stores = [await tstore.open(url) for _ in range(2)]
    expected: dict[str, int] = {}
    for version in range(1, 90):
        store, kind = stores[rng.integers(len(stores))], rng.random()
        groups = sorted({path.split("/")[0] for path in expected})
        if kind < 0.05:
            leaf = np.full(2, version)
            tree = {f"g{g:02}": {f"a{a}": leaf for a in range(3)} for g in range(rng.integers(1, 9))}
            await tstore.save(store, tree, version, durability="none")
            expected = {f"{g}/{a}": version for g, arrays in tree.items() for a in arrays}
        elif kind < 0.45 or not expected:
            paths = [f"g{rng.integers(40):02}/a{rng.integers(9)}" for _ in range(rng.integers(1, 8))]
            paths = sorted(set(paths) - expected.keys()) or [f"v{version}"]
            await create(store, paths, version)
            expected |= dict.fromkeys(paths, version)
        elif kind < 0.85:
            path = sorted(expected)[rng.integers(len(expected))]
            await write(store, path, version)
            expected[path] = version
        else:
            group = groups[rng.integers(len(groups))]
            async with store.transaction(durability="none") as tx:
                await tx.delete(group)
            expected = {p: v for p, v in expected.items() if p.split("/")[0] != group}
        if rng.random() < 0.1:
            stores[rng.integers(len(stores))] = await tstore.open(url)
        if rng.random() < 0.1 and (roots := sorted((tmp_path / "store/roots").glob("*"))):
            roots[rng.integers(len(roots))].unlink()
        if rng.random() < 0.3:
            assert await values(stores[rng.integers(len(stores))]) == expected
    assert await values(await tstore.open(url)) == expected
    assert (await (await tstore.open(url)).verify()).ok
    for version in range(EVERY, 90, EVERY):
        if (file := tmp_path / "store" / root_key(version)).exists():
            assert (await derived(stores[0], version)).data == file.read_bytes()


@pytest.mark.usefixtures("short")
async def test_each_root_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, create_object = [], LocalStorage.create

    async def counted(self: LocalStorage, key: str, *arguments: Any) -> Any:
        if key.startswith("roots/"):
            written.append(key)
        return await create_object(self, key, *arguments)

    monkeypatch.setattr(LocalStorage, "create", counted)
    await filled(tmp_path, 58)
    assert sorted(written) == [root_key(version) for version in range(EVERY, 58, EVERY)]
