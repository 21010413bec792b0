"""Patches are applied again on top of the newest version of a chunk, or the commit fails."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import numpy as np
import pytest

import tstore
from tests.support.thresholds import Thresholds
from tstore.core.storage.memory import MemoryStorage
from tstore.core.storage.remote import as_remote
from tstore.core.store import Store
from tstore.errors import Corrupt, SnapshotExpired
from tstore.lab.conformance.faults import Faults, open_faulty

CHUNK = 2000  # float64, so that a chunk lies in a pack and not in its manifest


async def two_chunks(url: str) -> tstore.Store:
    """Return a store whose version 1, tagged "first", has the array "w" of two chunks of zeros."""
    store = await tstore.open(url)
    async with store.transaction(tag="first") as tx:
        await (await tx.create_array("w", (2 * CHUNK,), "f8", (CHUNK,))).write(0)
    return store


async def write_both(store: tstore.Store, values: tuple[float, float], new_arrays: int = 0) -> int:
    """Write each chunk whole from another host, so that one version has two packs.

    `new_arrays` is the number of new arrays, for a separate manifest object.
    """

    async def host(number: int) -> int:
        tx = store.transaction(name="both", host=number, hosts=2, attempt=str(values))
        w = await tx.array("w")
        await w[number * CHUNK : (number + 1) * CHUNK].write(values[number])
        for i in range(new_arrays if number == 0 else 0):
            await (await tx.create_array(f"new/{i}", (1,), "i1")).write(1)
        return await tx.commit()

    [version] = set(await asyncio.gather(host(0), host(1)))
    return version


async def overwrite(store: tstore.Store, chunk: int, value: float) -> None:
    async with store.transaction() as tx:
        await (await tx.array("w"))[chunk * CHUNK : (chunk + 1) * CHUNK].write(value)


async def newest(store: tstore.Store) -> np.ndarray:
    snapshot = await (await tstore.open(store.url, "r")).snapshot()
    return await (await snapshot.array("w")).read()


async def test_an_expired_intermediate_version_loses_no_update(url: str) -> None:
    """A version of two packs expires after one of its chunks was overwritten; the other chunk is still in use."""
    store = await two_chunks(url)
    tx = store.transaction()
    w = await tx.array("w")
    await w[1].write(-1)
    await w[CHUNK + 1].write(-2)
    assert await write_both(store, (2, 3)) == 2
    await overwrite(store, 0, 4)
    assert (await store.collect(tstore.Keep(tags=("first",)))).versions == [2]
    assert await tx.commit() == 5
    expected = np.repeat([4.0, 3.0], CHUNK)
    expected[1], expected[CHUNK + 1] = -1, -2
    assert np.array_equal(await newest(store), expected)
    assert (await store.verify()).ok
    assert [retry.version for retry in tx.retries] == [4]  # on top of the newest only


async def test_a_gc_during_the_validation_loses_no_update(url: str) -> None:
    """The version on which chunks are to be patched expires once its record has been read."""
    store = await two_chunks(url)
    faulty, faults = await open_faulty(url)
    tx = faulty.transaction()
    w = await tx.array("w")
    await w[1].write(-1)
    await w[CHUNK + 1].write(-2)
    await write_both(store, (2, 3), new_arrays=400)
    gate = faults.hold("get", "*/manifest-1")
    commit = asyncio.create_task(tx.commit())
    await gate.reached()
    await overwrite(store, 0, 4)
    assert (await store.collect(tstore.Keep(tags=("first",)))).versions == [2]
    gate.release()
    assert await commit == 5
    expected = np.repeat([4.0, 3.0], CHUNK)
    expected[1], expected[CHUNK + 1] = -1, -2
    assert np.array_equal(await newest(store), expected)
    assert (await store.verify()).ok


async def test_a_flipped_bit_under_a_patch_is_detected(tmp_path: Path) -> None:
    """Even if the version that wrote it has expired because another of its chunks was overwritten."""
    store = await two_chunks(str(tmp_path / "store"))
    tx = store.transaction()
    w = await tx.array("w")
    await w[1].write(-1)
    await w[CHUNK + 1].write(-2)
    await write_both(store, (2, 3))
    await overwrite(store, 0, 4)
    row = (await store.snapshot()).tree.nodes["w"].row(1)
    assert row is not None
    assert isinstance(row.pack, str)
    pack = tmp_path / "store" / row.pack
    data = bytearray(pack.read_bytes())
    data[row.offset + 77] ^= 1
    pack.chmod(0o644)
    pack.write_bytes(data)
    await store.collect(tstore.Keep(tags=("first",)))
    with pytest.raises(Corrupt, match="w \\(chunk number 1\\)"):
        await tx.commit()
    assert (await store.snapshot()).version == 4


async def test_an_expired_base_is_reported(url: str) -> None:
    store = await tstore.open(url)
    async with store.transaction() as tx:
        await (await tx.create_array("w", (2 * CHUNK,), "f8", (CHUNK,))).write(0)
    tx = store.transaction()
    await (await tx.array("w"))[1].write(-1)
    await write_both(store, (2, 3))
    await store.collect(tstore.Keep(tags=(), last=1))
    with pytest.raises(SnapshotExpired):
        await tx.commit()


async def test_reapplied_chunks_are_durable_once_the_commit_is(tmp_path: Path, thresholds: Thresholds) -> None:
    """On a server a pack exists once it is finished; on a disk it is durable only then."""
    thresholds(_RECENTLY=0.0)  # a commit looks for newer ones before its first attempt
    name = uuid.uuid4().hex
    for store in (await tstore.open(as_remote(MemoryStorage(name))), await tstore.open(tmp_path / "store")):
        async with store.transaction() as tx:
            await (await tx.create_array("w", (2 * CHUNK,), "f8", (CHUNK,))).write(0)
        faults = Faults(store.log.storage)
        tx = Store(faults, store.marker, "r+").transaction()
        await (await tx.array("w"))[1].write(-1)
        await overwrite(store, 0, 4)
        assert await tx.commit() == 3
        assert tx.retries
        acts = [(c.operation, c.key) for c in faults.calls if c.operation in ("finish", "flush", "create")]
        before = acts[: acts.index(("create", f"commits/{3:020d}"))]
        stored = "flush" if faults.capabilities.native_io else "create"  # of the pack, on a server
        assert [operation for operation, _ in before] == ["finish", stored] * 2
        snapshot = await store.snapshot()
        expected = np.repeat([4.0, 0.0], CHUNK)
        expected[1] = -1
        assert np.array_equal(await (await snapshot.array("w")).read(), expected)
        assert (await store.verify()).ok
