"""A store from which any objects of the log are lost is repaired by what its repairs advise, without a dead end.

An archive has four records here, and every second version has a root.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pytest

import tstore
from tstore import Keep
from tstore.core.storage.base import Storage
from tstore.core.storage.connect import connect
from tstore.core.storage.objects import Durability
from tstore.errors import InvalidArgument, SnapshotExpired, TStoreError
from tstore.lab.simulation.scenario import override_constants


@pytest.fixture(autouse=True)
def short_archives() -> Iterator[None]:
    with override_constants(ARCHIVE_EVERY=4, ROOT_EVERY=2):
        yield


async def commit(url: str, value: int) -> None:
    """Write a row of "w", which is in a pack, or an element of "x"; the first commit of each creates it."""
    async with (await tstore.open(url)).transaction(tag=f"t{value}") as tx:
        path, shape = ("w", (4, 1000)) if value % 3 == 2 else ("x", (8,))
        if path not in await tx.paths():
            await (await tx.create_array(path, shape, "i8", (1, *shape[1:]))).write(value)
        row = value % shape[0]
        await (await tx.array(path))[row : row + 1].write(np.full((1, *shape[1:]), value))


async def archived(url: str) -> None:
    """Versions 1 to 9, of which a collection has archived the first four; it left their objects."""
    for value in range(1, 10):
        await commit(url, value)
    await (await tstore.open(url)).collect(None)


async def collected(url: str) -> None:
    """Versions 1 to 9, of which the last one is a collection; only versions 8 and 9 are alive."""
    for value in range(1, 7):
        await commit(url, value)
    for value in (8, 9):
        await (await tstore.open(url)).collect(Keep(last=1), abandoned=timedelta(0))
        await commit(url, value)
    await (await tstore.open(url)).collect(Keep(last=1))


async def state(url: str, version: int | None) -> object:
    """Return the values of a version, or the kind of error that reading it raises."""
    try:
        snapshot = await (await tstore.open(url)).snapshot(version)
        return {path: (await (await snapshot.array(path)).read()).tolist() for path in snapshot.paths()}
    except TStoreError as error:
        return type(error)


async def void_as_advised(url: str) -> set[int]:
    """Void what a repair lists until nothing is damaged, or what its refusals advise; return the intact ones."""
    void, intact, all_intact = set[int](), set[int](), set[int]()
    for _ in range(12):
        store = await tstore.open(url)
        if not void | intact:
            damaged = (await store.repair()).damaged
            void = {one.version for one in damaged if not one.record_intact}
            intact = {one.version for one in damaged} if not void else set()
        if not void | intact:
            return all_intact
        try:
            await store.repair(sorted(void), void_intact=sorted(intact))
        except InvalidArgument as error:
            for pattern, versions in ((r"void_intact=\[(.*)\]", intact), (r"or void ([\d, ]*) too", void)):
                if advised := re.search(pattern, str(error)):
                    versions |= set(map(int, advised[1].split(", ")))
                    break
            else:
                raise
        else:
            all_intact |= intact
            void, intact = set(), set()
    pytest.fail("its advice leads nowhere")


async def check(objects: dict[str, bytes], newest: int, lost: tuple[str, ...], damaged: tuple[str, ...]) -> None:
    url = f"memory://{uuid.uuid4()}"
    storage = connect(url)
    for key, data in objects.items():
        if key not in lost:
            broken = data[: len(data) // 2] + b"?" + data[len(data) // 2 + 1 :]
            await storage.create(key, broken if key in damaged else data, Durability.NONE)
    before = {version: await state(url, version) for version in range(1, newest + 1)}
    first_intact = min(await void_as_advised(url), default=newest + 1)
    assert _unignored((await (await tstore.open(url)).verify()).faults) == []
    for version, values in before.items():
        if isinstance(values, dict) and version < first_intact:
            assert await state(url, version) in (values, SnapshotExpired), version
    for value in (20, 21):
        await commit(url, value)
        await (await tstore.open(url)).collect(Keep(last=1), abandoned=timedelta(0))
        assert isinstance(await state(url, None), dict)
        assert _unignored((await (await tstore.open(url)).verify()).faults) == []


def _unignored(faults: list[str]) -> list[str]:
    return [fault for fault in faults if "Readers ignore it" not in fault]


def keys(names: str) -> tuple[str, ...]:
    """Return the keys of objects by the first letters of their folders and their numbers."""
    folders = {"a": "archives", "c": "commits", "r": "roots"}
    return tuple(f"{folders[name[0]]}/{name[1:]:>020}" for name in names.split())


async def objects_of(storage: Storage) -> dict[str, bytes]:
    return {key: await storage.get(key) for key in await storage.list("")}


@pytest.mark.parametrize(
    ("make", "lost", "damaged"),
    [
        (archived, "", "a4 c3"),  # an archive of which some records have no other objects
        (archived, "c1 r2", "a4 r4"),  # versions in an archive rest on a lost one
        (collected, "a4 c5 c10", ""),  # an archived version between two gaps
        (collected, "", "a4 r8"),  # the commit of a repair has the state of a version that is voided
    ],
)
async def test_no_dead_end(make: object, lost: str, damaged: str) -> None:
    url = f"memory://{uuid.uuid4()}"
    assert callable(make)
    await make(url)
    newest = (await (await tstore.open(url)).snapshot()).version
    await check(await objects_of(connect(url)), newest, keys(lost), keys(damaged))


@pytest.mark.deep
@pytest.mark.parametrize("make", [archived, collected])
async def test_no_dead_end_whatever_three_objects_are_lost(make: object) -> None:
    url = f"memory://{uuid.uuid4()}"
    assert callable(make)
    await make(url)
    newest = (await (await tstore.open(url)).snapshot()).version
    objects = await objects_of(connect(url))
    of_log = [key for key in objects if key.startswith(("archives/", "commits/", "roots/"))]
    for count in (1, 2, 3):
        for some in itertools.combinations(of_log, count):
            for lost in ((), some[:1], some):
                damaged = tuple(key for key in some if key not in lost)
                try:
                    await check(objects, newest, lost, damaged)
                except Exception as error:
                    error.add_note(f"lost {lost}, damaged {damaged}")
                    raise
