"""Records at another number, of another store or of another history: whoever reads one notices."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import tstore
import tstore.server
from tstore.errors import TStoreError
from tstore.format.layout import ROOT_EVERY, commit_key

Verb = Callable[[tstore.Store, Path], Awaitable[Any]]


async def filled(folder: Path, versions: int, tag: str = "v") -> tstore.Store:
    """Return a store at a version: versions of one tag each, after those that it has."""
    store = await tstore.open(folder)
    for version in range((await store.log.reader.newest()) + 1, versions + 1):
        async with store.transaction(tag=f"{tag}{version}", durability="none") as tx:
            await tx.create_group(f"{tag}/{version}", {"at": version})
    return store


def move(source: Path, number: int, target: Path, other: int) -> None:
    """Copy a record over another number, perhaps of another store."""
    data = (source / commit_key(number)).read_bytes()
    (target / commit_key(other)).unlink(missing_ok=True)
    (target / commit_key(other)).write_bytes(data)


def merge(source: Path, target: Path) -> None:
    """Copy every file that the target lacks, as `cp -rn` and `rsync --ignore-existing` do."""
    for path in source.rglob("*"):
        other = target / path.relative_to(source)
        if path.is_file() and not other.exists():
            other.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, other)


async def opened(store: tstore.Store, _: Path) -> None:
    await store.snapshot()


async def listed(store: tstore.Store, _: Path) -> None:
    [commit async for commit in store.history()]


async def collected(store: tstore.Store, _: Path) -> None:
    await store.collect(tstore.Keep(last=1))


async def copied(store: tstore.Store, folder: Path) -> None:
    await tstore.copy(store, folder / "copied")


async def committed(store: tstore.Store, _: Path) -> None:
    async with store.transaction():
        pass


async def served(store: tstore.Store, _: Path) -> None:
    async with tstore.server.Server(store.url) as server:
        await (await tstore.open(server.url)).snapshot()


VERBS: list[Verb] = [opened, listed, collected, copied, committed, served]


@pytest.fixture
async def ours(tmp_path: Path) -> Path:
    await (await filled(tmp_path / "ours", 6)).close()
    return tmp_path / "ours"


@pytest.fixture
async def theirs(tmp_path: Path) -> Path:
    await (await filled(tmp_path / "theirs", 6)).close()
    return tmp_path / "theirs"


async def check_noticed(folder: Path, version: int) -> None:
    """Check that every verb, `verify` and `repair` name a record."""
    for verb in VERBS:
        with pytest.raises(TStoreError, match=commit_key(version)):
            await verb(await tstore.open(folder), folder.parent)
    report = await (await tstore.open(folder)).verify()
    assert any(commit_key(version) in fault for fault in report.faults)
    damaged = (await (await tstore.open(folder)).repair()).damaged
    assert (version, False) in [(damage.version, damage.record_intact) for damage in damaged]


@pytest.mark.parametrize(("number", "over"), [(2, 3), (5, 6), (1, 6), (6, 2), (6, 7)])
async def test_a_record_at_another_number_is_noticed(number: int, over: int, ours: Path) -> None:
    move(ours, number, ours, over)
    await check_noticed(ours, over)


@pytest.mark.parametrize(("number", "at"), [(3, 3), (6, 6), (1, 1), (3, 7)])
async def test_a_record_of_another_store_is_noticed(number: int, at: int, ours: Path, theirs: Path) -> None:
    move(theirs, number, ours, at)
    await check_noticed(ours, at)


@pytest.mark.parametrize("common", [3, ROOT_EVERY - 1, ROOT_EVERY, ROOT_EVERY + 2])
@pytest.mark.parametrize("ahead", [0, 1, 2, ROOT_EVERY])
async def test_merged_copies_are_noticed(common: int, ahead: int, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    await (await filled(ours, common)).close()
    shutil.copytree(ours, theirs)
    last = common + 1 + ahead
    await (await filled(ours, last, "a")).close()
    await (await filled(theirs, last + 3, "b")).close()
    merge(theirs, ours)
    await check_noticed(ours, last + 1)
