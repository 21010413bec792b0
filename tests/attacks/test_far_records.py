"""Records far above all others: with a hint and a record, anybody who may write makes a log of 10^12 versions."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tests.support.collisions import long_walks
from tests.support.fuzzing import bounded_memory, bounded_time
from tstore import Keep
from tstore.core.format.frame import Link, check_of, linked
from tstore.core.format.layout import HINT, MARKER, commit_key, root_key
from tstore.core.format.objects.encoding import encode
from tstore.core.format.objects.records import Collection, LivingVersion, Record, Root
from tstore.core.format.objects.references import Manifest
from tstore.core.log.marker import Marker
from tstore.core.storage.memory import MemoryStorage
from tstore.core.store import Store
from tstore.errors import Corrupt, TStoreError

FAR = 1 << 40  # a version that may have a root
PLAIN = Record("far", FAR - 1, 1.0)
GAP = f"records from {commit_key(3)} to {commit_key(FAR - 1)} are missing, though version {FAR} exists"


async def history(store: tstore.Store) -> None:
    async for commit in store.history():
        repr(commit)


async def commit(store: tstore.Store) -> None:
    async with store.transaction() as tx:
        await tx.create_group("g")


VERBS: list[Callable[[tstore.Store], Awaitable[Any]]] = [
    lambda store: store.snapshot(),
    lambda store: store.tags(),
    lambda store: store.verify(),
    lambda store: store.repair(),
    lambda store: store.repair([FAR]),
    lambda store: store.collect(Keep(last=1)),
    lambda store: store.outcome("nobody"),
    lambda store: store.pending(),
    lambda store: store.diff(1),
    lambda store: tstore.copy(store, f"memory://{uuid.uuid4()}"),
    lambda store: tstore.save(store, {"w": np.arange(9)}, 9),
    history,
    commit,
]


async def attacked(record: Record, *, repair: bool = False) -> str:
    """Make a store of two versions with a record far above, and perhaps a repair that voids all between."""
    store = await tstore.open(f"memory://{uuid.uuid4()}")
    for step in range(2):
        await tstore.save(store, {"w": np.arange(100) + step}, step)
    storage = store.log.storage
    log_id = Marker.decode(await storage.get(MARKER)).log_id
    far = linked(encode(record), Link(log_id, FAR - 1, b"?" * 16))
    await storage.replace(commit_key(FAR), far)
    await storage.replace(HINT, str(FAR).encode())
    if repair:
        root = Root(FAR, check_of(far), {}, Manifest.from_nodes([]))
        await storage.replace(root_key(FAR), encode(root))
        voids = encode(Record("repair-far", FAR, 1.0, metadata={"voided": [1, FAR - 1]}))
        await storage.replace(commit_key(FAR + 1), linked(voids, Link(log_id, FAR, check_of(far))))
    return store.url


@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("cached", [False, True])
async def test_every_verb_ends(repair: bool, cached: bool, tmp_path: Path) -> None:
    url = await attacked(PLAIN, repair=repair)
    with bounded_memory(256 << 20), bounded_time(5):
        for verb in VERBS:
            with suppress(TStoreError):
                store = await tstore.open(url, cache=tstore.Cache(tmp_path) if cached else None)
                await verb(store)


async def test_the_gap_is_named() -> None:
    store = await tstore.open(await attacked(PLAIN))
    report = await store.verify()
    assert report.versions == 2
    [fault] = report.faults
    assert GAP in fault
    for void in ([], [FAR]):
        with pytest.raises(Corrupt, match=GAP):
            await store.repair(void)


class Unlisted(MemoryStorage):
    capabilities = MemoryStorage.capabilities._replace(listing=False)


async def test_the_gap_is_named_where_nothing_can_be_listed() -> None:
    url = await attacked(PLAIN)
    store = Store(Unlisted(url.removeprefix("memory://")), (await tstore.open(url)).marker, "r")
    with bounded_time(20):
        report = await store.verify()
    assert report.versions == 2
    [fault] = report.faults
    assert GAP in fault


async def test_living_versions_whose_hashes_collide_are_not_counted() -> None:
    alive = tuple(LivingVersion(v, "t", 1.0, (), True, {}, ()) for v in sorted(long_walks(17)))
    forged = Record("far", FAR - 1, 1.0, collection=Collection(alive, (), {}, (), ()))
    store = await tstore.open(await attacked(forged))
    with bounded_time(4), pytest.raises(Corrupt, match=GAP):
        await store.collect(Keep(last=1))
