"""Saves and copies that refer to chunks of earlier commits, whose packs were lost or cut short meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tstore
from tstore.core.format.layout import commit_key, owner_of
from tstore.core.storage.base import Storage
from tstore.core.storage.connect import connect
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.remote import as_remote
from tstore.core.storage.wrapper import Request, Wrapper
from tstore.errors import AlreadyExists, Corrupt, SnapshotExpired, SourceCondemned, TStoreError

FROZEN = np.arange(4000.0)


def tree(step: int) -> dict[str, Any]:
    return {"frozen": FROZEN, "moving": np.full(4000, float(step))}


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4()}"


async def lose(url: str, prefix: str = "txn/") -> list[str]:
    """Delete all packs whose keys begin with the prefix, and return the keys."""
    storage = connect(url)
    packs = [key for key in await storage.list(prefix) if "/pack-" in key]
    for key in packs:
        await storage.delete(key)
    return packs


async def cut(url: str, prefix: str = "txn/") -> list[str]:
    """Do what `lose` does, but leave the first bytes of each pack."""
    storage = connect(url)
    packs = [key for key in await storage.list(prefix) if "/pack-" in key]
    for key in packs:
        await storage.replace(key, (await storage.get(key))[:100])
    return packs


damages = pytest.mark.parametrize("damage", [lose, cut])


async def check_newest(url: str, step: int) -> None:
    """Check that a new reader restores the newest step, and that nothing of its version is damaged."""
    store = await tstore.open(url, "r")
    restored = await tstore.restore(store)
    assert {path: values.tolist() for path, values in restored.items()} == {
        path: values.tolist() for path, values in tree(step).items()
    }
    newest = (await store.snapshot()).version
    assert not [fault for fault in (await store.verify()).faults if f"version {newest}" in fault]


async def save_plainly(url: str) -> None:
    await tstore.save(url, tree(2), 2)


async def save_over(url: str) -> None:
    await tstore.save(url, tree(2), 1, overwrite=True)


async def save_in_turns(url: str) -> None:
    values = tree(2)
    save = await tstore.save_async(url, values, 2, staging="turns")
    values["frozen"] = np.zeros(4000)
    await save.committed


async def save_as_a_job(url: str) -> None:
    async with tstore.Checkpointer(url, every=1) as checkpoints:
        await checkpoints.save(2, tree(2))


@damages
@pytest.mark.parametrize("save", [save_plainly, save_over, save_in_turns, save_as_a_job])
async def test_a_save_never_refers_to_a_lost_pack(
    url: str, damage: Callable[[str], Awaitable[Any]], save: Callable[[str], Awaitable[None]]
) -> None:
    await tstore.save(url, tree(1), 1)
    await damage(url)
    await save(url)
    await check_newest(url, 2)


@damages
async def test_a_process_that_wrote_the_pack_notices_its_loss(
    url: str, damage: Callable[[str], Awaitable[list[str]]], caplog: pytest.LogCaptureFixture
) -> None:
    async with await tstore.open(url) as store:
        await tstore.save(store, tree(1), 1)
        [pack, *_] = await damage(url)
        await tstore.save(store, tree(2), 2)
        [warning] = caplog.messages
        assert "The save writes all chunks" in warning
        assert owner_of(pack) in warning
        await tstore.save(store, tree(2), 3)  # refers to those of step 2
        assert (await anext(store.history())).bytes_added == 0
        assert len(caplog.messages) == 1
    await check_newest(url, 2)


@damages
async def test_hosts_whose_peer_lost_a_pack_save_together(
    url: str, damage: Callable[[str, str], Awaitable[list[str]]]
) -> None:
    """Only the host that refers to the lost pack writes its part anew, in the same transaction."""

    async def save(step: int) -> int:
        parts = [
            {"w": tstore.Shards((4000,), "f8", [((slice(at, at + 2000),), FROZEN[at : at + 2000])])}
            for at in (0, 2000)
        ]
        versions = await asyncio.gather(
            *[
                tstore.save(url, part, step, host=host, hosts=2, attempt="a", timeout=60)
                for host, part in enumerate(parts)
            ]
        )
        [version] = set(versions)
        return version

    await save(1)
    packs = [key for key in await connect(url).list("txn/") if "/pack-" in key]
    await damage(url, packs[0])
    assert await save(2) == 2
    assert np.array_equal((await tstore.restore(await tstore.open(url, "r")))["w"], FROZEN)
    assert (await anext((await tstore.open(url)).history())).bytes_added == FROZEN.nbytes // 2


async def test_a_repeated_save_of_a_lost_step_is_no_success(url: str) -> None:
    async def save() -> list[int]:
        hosts = [tstore.save(url, tree(1), 1, host=i, hosts=2, attempt="a", timeout=60) for i in range(2)]
        return await asyncio.gather(*hosts)

    assert await save() == await save() == [1, 1]
    await lose(url)
    with pytest.raises(AlreadyExists, match=r"as version 1, .*/pack-.* is missing.*overwrite=True"):
        await save()


async def test_a_step_whose_manifest_is_lost_does_not_stop_a_job(url: str) -> None:
    """The newest step is not the newest version, as its number is higher."""
    await tstore.save(url, tree(10) | {f"a{i}": np.zeros(2000) for i in range(400)}, 10)
    await tstore.save(url, tree(5), 5)
    storage = connect(url)
    [manifest] = [key for key in await storage.list("txn/") if "/manifest-" in key]
    await storage.delete(manifest)
    await tstore.save(await tstore.open(url), tree(11), 11)
    await check_newest(url, 11)


@damages
async def test_a_long_array_is_compared_without_its_lost_references(
    url: str, damage: Callable[[str], Awaitable[Any]]
) -> None:
    async def save(step: int) -> None:
        part = [((slice(0, 20_000),), np.arange(20_000.0))]
        await tstore.save(url, {"w": tstore.Shards((20_000,), "f8", part, shard_shape=(4,))}, step)

    await save(1)
    await damage(url)
    await save(2)
    restored = await tstore.restore(await tstore.open(url, "r"))
    assert np.array_equal(restored["w"], np.arange(20_000.0))


@damages
@pytest.mark.parametrize("count", [10, 5000], ids=["rows", "segments"])
async def test_a_copy_of_a_lost_array_is_refused(
    url: str, damage: Callable[[str], Awaitable[list[str]]], count: int
) -> None:
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("w", (count * 100,), "f8", (100,))).write(np.arange(count * 100.0))
    packs = await damage(url)
    tx = store.transaction()
    await tx.copy_array(await (await store.snapshot()).array("w"), "copy")
    with pytest.raises(Corrupt, match=r"copy( |:).*txn/.*/pack-") as caught:
        await tx.commit()
    assert any(pack in str(caught.value) for pack in packs)
    assert (await (await tstore.open(url, "r")).snapshot()).version == 1


@damages
async def test_a_quantized_copy_of_a_lost_array_is_refused(
    url: str, damage: Callable[[str, str], Awaitable[list[str]]]
) -> None:
    await tstore.save(url, {"kept": FROZEN}, 1)
    [pack] = [key for key in await connect(url).list("txn/") if "/pack-" in key]
    await tstore.save(url, {"kept": FROZEN, "w": np.ones(4000, "f4")}, 2)
    await damage(url, pack)
    with pytest.raises(Corrupt, match=rf"kept refers to .*{pack}"):
        await tstore.quantize(url, {"w": "e4m3", "kept": None})
    assert (await (await tstore.open(url, "r")).snapshot()).version == 2


@pytest.mark.parametrize(("voided", "error"), [(False, SourceCondemned), (True, SnapshotExpired)])
async def test_a_copy_of_what_a_collection_deleted_is_told_so(
    url: str, voided: bool, error: type[TStoreError]
) -> None:
    """Also if a repair has voided the record of that collection since, as it was lost."""
    store = await tstore.open(url)
    for step in (1, 2):
        await tstore.save(store, {"w": np.full(4000, float(step))}, step)
    source = await store.snapshot("step/1")
    tx = store.transaction()
    await tx.copy_array(await source.array("w"), "copy")
    await (await tstore.open(url)).collect(tstore.Keep(last=1))
    if voided:
        await connect(url).replace(commit_key(3), b"")
        await (await tstore.open(url)).repair([3])
    with pytest.raises(error):
        await tx.commit()


class Lookups(Wrapper):
    """Records which packs are looked up."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.keys: list[str] = []

    async def around(self, request: Request, call: Callable[[], Awaitable[Any]]) -> Any:
        if request.operation == "head" and "/pack-" in request.key:
            self.keys.append(request.key)
        return await call()


async def test_a_pack_is_looked_up_once_and_only_if_it_is_needed() -> None:
    lookups = Lookups(MemoryStorage(str(uuid.uuid4())))
    store = await tstore.open(as_remote(lookups))
    frozen = {f"f{i}": np.full(3000, float(i)) for i in range(50)}
    await tstore.save(store, frozen, 1)
    assert lookups.keys == []
    packs = [key for key in await store.log.storage.list("txn/") if "/pack-" in key]
    await tstore.save(store, frozen, 2)
    assert sorted(lookups.keys) == packs
    await tstore.save(store, {path: values + 1 for path, values in frozen.items()}, 3)
    assert sorted(lookups.keys) == packs
